"""A corpus folder of :mod:`smoothgrad_jax.data.corpus_folder`, which ``smoothgrad convert`` writes."""

from collections.abc import Iterator

import numpy as np

from smoothgrad_jax.data import batches, corpus_folder, count_blocks
from smoothgrad_jax.data.corpus_folder import CountedCorpus
from smoothgrad_jax.data.count_blocks import Block
from smoothgrad_jax.data.errors import corpus_error
from smoothgrad_jax.data.formats import Format
from smoothgrad_jax.data.sources import Head, Source


def _recognise(head: Head) -> bool:
    return head.is_folder and corpus_folder.is_folder(head.path)


def _prepare(source: Source) -> Source:
    if len(source.paths) > 1:
        raise corpus_error(source.paths[1], "a corpus folder must be the only input")
    stored = corpus_folder.open_folder(source.paths[0])
    return source._replace(vocabulary=stored.vocabulary, num_words=stored.corpus.num_words, loaded=stored)


def _blocks(source: Source) -> Iterator[Block]:
    assert isinstance(source.loaded, CountedCorpus)
    corpus = source.loaded.corpus
    for offsets, entries in count_blocks.block_ranges(corpus.indptr):
        try:
            batches.check_entries(corpus, entries)
        except ValueError as error:
            raise corpus_error(source.paths[0], f"damaged: {error}") from None
        yield Block(offsets, corpus.indices[entries].astype(np.int32), corpus.data[entries])


FORMAT = Format(0, _recognise, blocks=_blocks, prepare=_prepare)
