"""A corpus folder of :mod:`smoothgrad_jax.data.corpus_folder`, which ``smoothgrad convert`` writes."""

from collections.abc import Iterator

import numpy as np

from smoothgrad_jax.data import corpus_folder, count_blocks, records
from smoothgrad_jax.data.corpus_folder import CountedCorpus
from smoothgrad_jax.data.count_blocks import Block
from smoothgrad_jax.data.documents import Metadata
from smoothgrad_jax.data.errors import OptionName, corpus_error
from smoothgrad_jax.data.formats import Format
from smoothgrad_jax.data.sources import Head, Source


def _recognise(head: Head) -> bool:
    return head.is_folder and corpus_folder.is_folder(head.path)


def _prepare(source: Source) -> Source:
    if len(source.paths) > 1:
        raise corpus_error(source.paths[1], "a corpus folder must be the only input")
    stored = corpus_folder.open_folder(source.paths[0])
    id, kept = _fields(stored)
    for name in source.keep:
        if name not in kept:
            problem = f": the corpus keeps {records.listed(kept)}; convert the source again to keep other fields"
            raise corpus_error(source.paths[0], (OptionName("keep", name), problem))
    return source._replace(
        vocabulary=stored.vocabulary,
        num_words=stored.corpus.num_words,
        id=id,
        keep=source.keep or tuple(kept),
        loaded=stored,
    )


def _blocks(source: Source) -> Iterator[Block]:
    # The checksums are compared, because the blocks may be written to another folder, with new checksums.
    corpus = corpus_folder.open_folder(source.paths[0], verify=True).corpus
    for offsets, entries in count_blocks.block_ranges(corpus.indptr):
        yield Block(offsets, corpus.indices[entries].astype(np.int32), corpus.data[entries])


def _metadata(source: Source) -> Iterator[Metadata]:
    assert isinstance(source.loaded, CountedCorpus)
    _, kept = _fields(source.loaded)
    chosen = [kept.index(name) for name in source.keep]
    for id, fields in corpus_folder.read_metadata(source.paths[0], source.loaded.manifest):
        yield Metadata(id, tuple(fields[i] for i in chosen))


def _fields(stored: CountedCorpus) -> tuple[str | None, list[str]]:
    """Return the name of the field with the id, and the names of the kept fields."""
    names = stored.manifest.get("metadata", {"id": None, "keep": []})
    return names["id"], names["keep"]


FORMAT = Format(0, _recognise, blocks=_blocks, metadata=_metadata, prepare=_prepare, options=frozenset({"keep"}))
