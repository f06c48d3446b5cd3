"""Files of documents: the names that other rooms need, until the readers stand."""

from typing import Any, NamedTuple


class CorpusError(ValueError):
    """A complaint about a corpus: which file, what was expected, what came."""


class Block(NamedTuple):
    """Some documents as counts, CSR."""

    indptr: Any
    indices: Any
    data: Any
