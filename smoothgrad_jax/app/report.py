"""Report of a fitted model: one HTML file with topics, typical documents, a map, groups and a comparison.

The folder ``report_page`` contains the page, its style sheet and its scripts. A script per part of the page; they share
one scope, in the order of ``_SCRIPTS``. The page sends no network request, and its content security policy allows only
this style sheet and these scripts, by their hashes. The data (:mod:`smoothgrad_jax.app.report_content`) are embedded as
JSON and displayed as text only.
"""

import base64
import hashlib
import html
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoothgrad_jax.app.model_comparison import Comparison
from smoothgrad_jax.app.report_content import MAX_TEXT_LENGTH, MAX_WORD_LENGTH, Excerpt, page_content, truncated
from smoothgrad_jax.app.saved_models import SavedModel
from smoothgrad_jax.data.durable_files import replacing
from smoothgrad_jax.models.topic_groups import TopicGroups
from smoothgrad_jax.models.topic_quality import largest

_FOLDER = Path(__file__).with_name("report_page")
_SCRIPTS = (
    *("base.js", "words.js", "labels.js", "list.js", "topic.js", "search.js", "map.js", "curve.js", "groups.js"),
    *("comparison.js", "main.js"),
)


def write_report(
    path: str | os.PathLike,
    model: SavedModel,
    *,
    documents: Mapping[int, Sequence[Excerpt | tuple]] | None = None,
    groups: TopicGroups | None = None,
    comparison: Comparison | None = None,
    title: str | None = None,
) -> Path:
    """Write the report of a model atomically. Equal inputs give equal bytes.

    Args:
      path: The HTML file; its folder must exist.
      model: The model.
      documents: Typical documents by topic, best first: (proportion, text) or :class:`Excerpt`; see
        :func:`typical_documents`.
      groups: Prevalence per group of documents or over time. Groups that are years, ``"2024"``, or months,
        ``"2024-05"``, in ascending order are shown over time.
      comparison: Another model with its matched topics; see :func:`smoothgrad_jax.app.model_comparison.compare_models`.
      title: The heading.

    Returns:
      The path.

    Raises:
      ValueError: If the parts of the model do not match; the message names the part.
      FileNotFoundError: If the folder does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: expected a folder to write {path.name} into; create it first")
    if path.is_dir():
        raise IsADirectoryError(f"{path}: expected a file to write, got a folder")
    content = page_content(model, title=title or "Topics", documents=documents, groups=groups, comparison=comparison)
    page = _page(content)
    with replacing(path) as temporary:
        temporary.write_bytes(page)
    return path


def typical_documents(
    theta: npt.ArrayLike, texts: Iterable[str], ids: Iterable[str | None] | None = None, *, most: int = 5
) -> dict[int, list[Excerpt]]:
    """Return the documents with the largest proportions of each topic, for :func:`write_report`.

    Args:
      theta: Topic proportions of the documents [D, K].
      texts: The D documents in the same order; they are read once, one at a time.
      ids: Their ids, which become the titles; by default, or for None, a document is named by its number from 0.
      most: Largest number of documents per topic.

    Returns:
      Excerpts by topic, largest proportion first, ties in the order of the documents. Empty documents are skipped.

    Raises:
      ValueError: If the number of texts or of ids differs from the number of rows of θ.
    """
    theta = np.asarray(theta)
    if theta.ndim != 2:
        raise ValueError(f"theta must have shape documents × topics, got {theta.shape}")
    # More candidates than needed, because empty documents are skipped.
    order = [largest(column, 2 * most + 10) for column in theta.T]
    candidates, excerpts, number = set(np.concatenate(order).tolist()) if order else set(), {}, 0
    named = zip(texts, itertools.repeat(None) if ids is None else ids, strict=ids is not None)
    for number, (text, name) in enumerate(named, start=1):
        if number - 1 in candidates and text.strip():
            title = truncated(name or f"document {number - 1}", MAX_WORD_LENGTH)
            excerpts[number - 1] = truncated(text.strip(), MAX_TEXT_LENGTH), title
    if number != len(theta):
        raise ValueError(f"expected one text per row of theta: {len(theta)} rows, got {number} texts")
    return {
        k: [Excerpt(float(theta[d, k]), *excerpts[d]) for d in rows.tolist() if d in excerpts][:most]
        for k, rows in enumerate(order)
    }


def _page(content: dict[str, Any]) -> bytes:
    """Return the template with the content inserted."""
    data = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # The HTML parser must not find a tag in the data, nor the JavaScript parser a line break.
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    template, style, *scripts = (
        (_FOLDER / name).read_text(encoding="utf-8") for name in ("page.html", "style.css", *_SCRIPTS)
    )
    script = "\n".join(scripts)
    policy = (
        f"default-src 'none'; script-src {_source_hash(script)}; style-src {_source_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "title": html.escape(content["title"])}
    parts |= {"style": style, "script": script, "data": data}
    # One pass over the template, so that placeholders inside the inserted data are not replaced.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
    # UTF-8 cannot encode a lone surrogate (from a file name or a badly decoded word); its JSON escape can be stored.
    return page.encode("utf-8", errors="backslashreplace")


def _source_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
