"""The registry of file formats: one module in this folder is one format.

A module ``formats/NAME.py`` defines ``FORMAT``, a :class:`Format`. No other code has to be changed to add a format: the
readers, the command and the tests find the module by its name. The names are read from the folder, so that
``smoothgrad --help`` lists them without importing NumPy.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from smoothgrad_jax.data.count_blocks import Block
    from smoothgrad_jax.data.documents import Document, Metadata
    from smoothgrad_jax.data.sources import Head, Source

NAMES = tuple(module.name for module in pkgutil.iter_modules(__path__))


class Format(NamedTuple):
    """How files of one format are recognised and read.

    Attributes:
      priority: Formats are tried in increasing order, until one recognises the file.
      recognise: Whether the beginning of a file, or a folder, is of this format.
      documents: Yields the documents of a source of text, each with its id and the fields ``source.keep``; None for
        counts. Every document of the input is yielded, also an empty one.
      blocks: Yields the documents of a source as counts; None for text.
      metadata: Yields the metadata of the documents of a source of counts that has some (``source.has_metadata``).
      prepare: Reads the beginning of the files, and returns the source with what is declared there: ``field``, ``id``,
        ``keep``, ``num_words``, ``vocabulary``. None if there is nothing to read.
      options: The options of :func:`smoothgrad_jax.open_source` that this format has beside the common ones, of
        ``"field"``, ``"id"``, ``"keep"``, ``"first_id"`` and ``"sort"``.
    """

    priority: int
    recognise: "Callable[[Head], bool]"
    documents: "Callable[[Source], Iterator[Document]] | None" = None
    blocks: "Callable[[Source], Iterator[Block]] | None" = None
    metadata: "Callable[[Source], Iterator[Metadata]] | None" = None
    prepare: "Callable[[Source], Source] | None" = None
    options: frozenset[str] = frozenset()


@lru_cache
def get(name: str) -> Format:
    """Return the format of a name."""
    return importlib.import_module(f"{__name__}.{name}").FORMAT


def by_priority() -> list[str]:
    """Return the names of all formats, in the order in which they are tried."""
    return sorted(NAMES, key=lambda name: get(name).priority)
