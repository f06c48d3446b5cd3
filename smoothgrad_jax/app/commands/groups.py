"""``smoothgrad groups``: the prevalence of the topics per group of documents, or over time."""

import itertools
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from smoothgrad_jax.app import saved_models
from smoothgrad_jax.app.commands.inputs import ModelInputs, open_for_model
from smoothgrad_jax.app.commands.output import CommandError, log, printable
from smoothgrad_jax.app.commands.tables import check_output, table_writer
from smoothgrad_jax.app.saved_models import SavedModel
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.data.documents import Metadata
from smoothgrad_jax.data.errors import excerpt, plural
from smoothgrad_jax.models.topic_groups import MAX_GROUPS, GroupedPart, TopicGroups, period_of, topic_groups

_TOPICS_SHOWN, _WORDS_SHOWN = 5, 8


def run(args: Namespace) -> int:
    """Print or write the mean topic proportions of each group."""
    check_output(args.out, args.inputs)
    if args.json and args.out:
        raise OptionError("json", "has no effect with --out; give a name that ends in .jsonl")
    if args.top and (args.json or args.out):
        raise OptionError("top", "has no effect with --json or --out, which write all topics")
    model = saved_models.load_model(args.model)
    args.keep = (args.by,)
    documents = open_for_model(args, model)
    groups = group_documents(args, documents, map(model.transform, documents.corpus.parts()))
    if args.out or args.json:
        with table_writer(args.out, dict, ".jsonl") as write:
            write(_columns(groups, model.labels or {}))
        if args.out:
            print(f"{args.out}: {plural(len(groups.values), 'group')}")
    else:
        _print(groups, model, args.top or _TOPICS_SHOWN)
    return 0


def group_documents(args: Namespace, documents: ModelInputs, theta: Iterator[npt.NDArray]) -> TopicGroups:
    """Return the topic proportions per group, which the first kept field has; report documents that are left out.

    The topic proportions θ of each part of the corpus are computed after the groups are checked.
    """
    is_time = _check_groups(args, documents)
    metadata = documents.metadata()
    parts = (
        GroupedPart(rows, [_group_of(args, each) for each in itertools.islice(metadata, part.num_docs)], part.lengths())
        for part, rows in zip(documents.corpus.parts(), theta, strict=True)
    )
    groups = topic_groups(args.by, parts, order="name" if is_time else "size")
    left_out = [
        f"{plural(number, 'document')} without {what}"
        for number, what in ((groups.num_missing, f"a value of {args.by}"), (groups.num_empty, "a known word"))
        if number
    ]
    if left_out:
        log(f"left out: {', '.join(left_out)}")
    return groups


def _group_of(args: Namespace, metadata: Metadata) -> str | None:
    """Return the group of a document: the value of its first kept field, or the period in which it is."""
    value = metadata.fields[0]
    if value in (None, ""):
        return None
    return period_of(value, args.period) if args.period else str(value)


def _check_groups(args: Namespace, documents: ModelInputs) -> bool:
    """Check the groups before anything is computed, and return whether they are dates."""
    sizes: Counter[str] = Counter()
    num_undated, example = 0, ""
    for metadata in documents.metadata():
        name = _group_of(args, metadata)
        if name is not None:
            sizes[name] += 1
        elif metadata.fields[0] not in (None, ""):
            num_undated, example = num_undated + 1, example or excerpt(metadata.fields[0])
        if len(sizes) > MAX_GROUPS:
            remedy = "" if args.period else "; for dates pass --period year or month"
            raise CommandError(f"--by {args.by}: has more than {MAX_GROUPS:,} different values{remedy}")
    if not sizes:
        got = f"got {example}" if num_undated else "every value is missing"
        raise CommandError(f"--by {args.by}: expected {args.period or 'group'}s, {got}")
    if num_undated:
        undated = f"{plural(num_undated, 'document')} whose {args.by} has no {args.period}"
        log(f"{undated}, for example {example}; dates are 2020-01-31, 2020-01 or 2020")
    return all(period_of(name, "year") for name in sizes)


def _columns(groups: TopicGroups, labels: dict[int, str]) -> dict[str, np.ndarray | list]:
    """Return a table with one row per group and topic, and the labels of the topics, if there are some."""
    G, K = groups.prevalence.shape
    named = {"label": [labels.get(k) for k in range(K)] * G} if labels else {}
    return {
        "group": [name for name in groups.values for _ in range(K)],
        "documents": np.repeat(groups.num_docs, K),
        "topic": np.tile(np.arange(K), G),
        **named,
        "prevalence": groups.prevalence.ravel(),
        "low": groups.low.ravel(),
        "high": groups.high.ravel(),
    }


def _print(groups: TopicGroups, model: SavedModel, top: int) -> None:
    """Print one line per group for the topics that are largest over all groups."""
    mean = groups.num_docs @ groups.prevalence / groups.num_docs.sum()
    shown = np.argsort(-mean, kind="stable")[:top].tolist()
    topics, words = model.topic_names(), model.top_words(_WORDS_SHOWN)
    for k in shown:
        print(printable(f"{topics[k]}: {' '.join(word for word, _ in words[k])}"))
    if len(shown) < len(mean):
        print(f"… and {plural(len(mean) - len(shown), 'smaller topic')}; --top {len(mean)} prints all of them")
    print("\nprevalence (mean of the documents) in % with 95 % intervals")
    field, *names = map(printable, [groups.field, *groups.values])
    width = max(map(len, [field, *names]))
    print(f"{field:<{width}}  documents" + "".join(f"{f'topic {k}':>13}" for k in shown))
    half = np.maximum(groups.high - groups.prevalence, groups.prevalence - groups.low)
    for g, name in enumerate(names):
        cells = (f"{100 * groups.prevalence[g, k]:.1f} ±{100 * half[g, k]:.1f}" for k in shown)
        print(f"{name:<{width}}  {groups.num_docs[g]:9,}" + "".join(f"{cell:>13}" for cell in cells))
