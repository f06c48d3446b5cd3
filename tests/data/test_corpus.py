"""Test the corpus, the sampling of documents, and prefetching."""

import threading

import jax
import numpy as np
import pytest
import scipy.sparse
from test_batches import unpack

from smoothgrad_jax import Corpus, pack, prefetch, sample
from smoothgrad_jax.data.batches import Layout


@pytest.fixture(name="X")
def some_documents(rng):
    return scipy.sparse.csr_array((rng.random((60, 90)) < rng.random((60, 1)) * 0.6) * rng.integers(1, 5, (60, 90)))


def test_a_corpus_is_a_view(X):
    corpus = Corpus.of(X)
    assert corpus.shape == X.shape
    assert np.shares_memory(corpus.data, X.data)
    assert np.shares_memory(corpus.indices, X.indices)
    assert Corpus.of(corpus) is corpus
    part = corpus.part(10, 25)
    assert part.num_docs == 15
    assert np.shares_memory(part.indptr, corpus.indptr)
    batch = part.pack(np.arange(15), part.layout(15))
    np.testing.assert_array_equal(unpack(batch), X[10:25].toarray())


@pytest.mark.parametrize("bounds", [(-1, 3), (3, 3), (5, 61)])
def test_a_part_must_exist(X, bounds):
    with pytest.raises(ValueError, match="expected 0 ≤ first < last ≤ 60"):
        Corpus.of(X).part(*bounds)


def test_memory_mapped_arrays_are_packed(X, tmp_path):
    """Arrays of the types in corpus folders are packed without a conversion of the corpus."""
    arrays = {
        "indptr": X.indptr.astype(np.int64),
        "indices": X.indices.astype(np.int32),
        "data": X.data.astype(np.uint8),
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    corpus = Corpus(*(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in arrays), num_words=90)
    assert isinstance(corpus.part(3, 9).indices, np.memmap)
    rows = np.array([5, 3, 5, 0])
    np.testing.assert_array_equal(unpack(corpus.pack(rows, corpus.layout(4))), X[rows].toarray())


def test_minibatches_of_one_size_have_one_shape(rng):
    X = scipy.sparse.random_array((5000, 800), density=0.02, rng=rng, format="csr")
    corpus = Corpus.of(X)
    layout = corpus.layout(64)
    key = jax.random.key(0)
    shapes = set()
    for step in range(150):
        batch = corpus.pack(sample(key, step, 5000, 64, replace=step % 2 == 0), layout)
        shapes.add(tuple(np.shape(leaf) for leaf in jax.tree.leaves(batch)))
    assert len(shapes) == 1


def test_a_batch_that_exceeds_the_layout_is_packed(X):
    corpus = Corpus.of(X)
    narrow = Layout(8, 20, 3, 8)
    np.testing.assert_array_equal(unpack(corpus.pack(np.arange(60), narrow)), X.toarray())
    batch = corpus.pack(np.arange(60), Layout(0, 0, 0, 0))
    np.testing.assert_array_equal(unpack(batch), X.toarray())


def test_a_corpus_of_empty_documents_is_packed():
    corpus = Corpus.of(np.zeros((4, 3)))
    batch = corpus.pack(np.arange(4), corpus.layout(4))
    np.testing.assert_array_equal(unpack(batch), np.zeros((4, 3)))


def test_invalid_rows_are_errors(X):
    corpus = Corpus.of(X)
    layout = corpus.layout(3)
    with pytest.raises(ValueError, match=r"rows must lie in 0 … 59; got 2 … 60"):
        corpus.pack([2, 60], layout)


@pytest.mark.parametrize(
    ("count", "word", "message"),
    [
        (-2.0, 1, "document 1: the count of word 1 is -2"),
        (np.nan, 1, "document 1: the count of word 1 is nan"),
        (1.0, 3, "document 1: word id 3 is out of range 0 … 2"),
    ],
)
def test_counts_in_memory_are_checked_when_a_corpus_is_made(tmp_path, count, word, message):
    bad = Corpus(np.array([0, 1, 2]), np.array([0, word]), np.array([1.0, count]), num_words=3)
    with pytest.raises(ValueError, match=message):
        Corpus.of(bad)
    with pytest.raises(ValueError, match=message):
        Corpus.of(scipy.sparse.csr_array((bad.data, bad.indices, bad.indptr), (2, 3)))
    assert Corpus.of(bad.part(0, 1)).num_docs == 1
    with pytest.raises(ValueError, match="num_words is 4, but the documents have 3 columns"):
        Corpus.of(bad.part(0, 1), num_words=4)
    # A memory-mapped corpus is checked when it is packed, because reading all of it could take minutes.
    np.save(tmp_path / "data.npy", bad.data)
    on_disk = Corpus.of(bad._replace(data=np.load(tmp_path / "data.npy", mmap_mode="r")))
    with pytest.raises(ValueError, match=message):
        on_disk.pack([0, 1], Layout(8, 20, 3, 8))


@pytest.mark.parametrize("batch_size", [7, 20, 64, 150])
def test_passes_contain_every_document_once(batch_size):
    D, key = 64, jax.random.key(3)
    steps = 3 * D  # enough for the passes below
    drawn = np.concatenate([sample(key, step, D, batch_size) for step in range(steps * 3 // batch_size + 1)])
    for number in range(3):
        assert sorted(drawn[number * D : (number + 1) * D]) == list(range(D))
    assert (drawn[:D] != drawn[D : 2 * D]).any()


@pytest.mark.parametrize("replace", [True, False])
def test_a_minibatch_is_a_function_of_key_and_step(replace):
    draw = [sample(jax.random.key(1), step, 1000, 50, replace=replace) for step in (0, 1, 77)]
    again = [sample(jax.random.key(1), step, 1000, 50, replace=replace) for step in (77, 1, 0)]
    for one, other in zip(draw, reversed(again), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (draw[0] != draw[1]).any()
    assert (draw[0] != sample(jax.random.key(2), 0, 1000, 50, replace=replace)).any()


@pytest.mark.parametrize(("step", "num_docs", "batch_size"), [(-1, 9, 3), (0, 0, 3), (0, 9, 0)])
def test_invalid_numbers_of_a_sample_are_errors(step, num_docs, batch_size):
    with pytest.raises(ValueError, match="expected a step of at least 0, and at least one document"):
        sample(jax.random.key(1), step, num_docs, batch_size)


def test_sampling_with_replacement_is_uniform():
    drawn = np.concatenate([sample(jax.random.key(0), step, 20, 50, replace=True) for step in range(400)])
    counts = np.bincount(drawn, minlength=20)
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # χ² with 19 degrees of freedom, p = 0.001


def test_prefetch_computes_map_in_another_thread():
    begun, here = [], threading.get_ident()

    def square(i):
        begun.append((i, threading.get_ident()))
        return i * i

    results = prefetch(square, range(6), depth=2)
    assert next(results) == 0
    assert [next(results) for _ in range(3)] == [1, 4, 9]
    assert list(results) == [16, 25]
    assert [i for i, _ in begun] == list(range(6))
    assert all(thread != here for _, thread in begun)


def test_prefetch_raises_after_the_preceding_results():
    results = prefetch(lambda i: 6 // (3 - i), range(9), depth=4)
    assert [next(results) for _ in range(3)] == [2, 3, 6]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_prefetch_computes_no_more_than_its_depth_in_advance():
    begun = []
    results = prefetch(begun.append, range(1000), depth=3)
    next(results)
    results.close()
    assert len(begun) <= 5


def test_a_layout_changes_shapes_and_not_contents(X):
    corpus = Corpus.of(X)
    rows = np.arange(30)
    np.testing.assert_array_equal(unpack(corpus.pack(rows, corpus.layout(30))), unpack(pack(X, rows)))


def test_parts_selections_and_word_counts(rng):
    X = scipy.sparse.csr_array(rng.poisson(0.3, (70, 20)))
    corpus = Corpus.of(X)
    parts = list(corpus.parts(30))
    assert [part.num_docs for part in parts] == [30, 30, 10]
    np.testing.assert_array_equal(
        np.concatenate([part.select(np.arange(part.num_docs)).toarray() for part in parts]), X.toarray()
    )
    np.testing.assert_array_equal(corpus.select([5, 3, 3]).toarray(), X[[5, 3, 3]].toarray())
    np.testing.assert_array_equal(corpus.word_counts(), X.sum(0))
    np.testing.assert_array_equal(parts[1].word_counts(), X[30:60].sum(0))
