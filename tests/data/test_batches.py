"""Test packing: counts are unchanged in every form of input, and errors name the document."""

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings

from smoothgrad_jax import pack
from smoothgrad_jax.data.batches import canonical_csr, split_tokens
from smoothgrad_jax.models.lda.document_fit import _tile_parts


def unpack(batch):
    """Return the documents of a batch as a dense [B, V], read tile by tile as in the compiled program."""
    dense = np.zeros((batch.size, int(batch.num_words)))
    for d in range(batch.size):
        start, length = batch.offsets[d], batch.offsets[d + 1] - batch.offsets[d]
        assert length <= sum(batch.tiles)
        seen = 0
        parts = zip(batch.tiles, *_tile_parts(length, batch.tiles), strict=True)
        for size, wanted, at, used in reversed(list(parts)):  # the largest tile has the first words
            if not wanted:
                assert used == 0
                continue
            assert at == seen
            assert start + at + size <= len(batch.counts)  # a tile that reached beyond would be moved
            part = slice(start + at, start + at + used)
            np.add.at(dense[d], batch.vocabulary[batch.words[part]], batch.counts[part])
            seen += int(used)
        assert seen == length
    return dense


def padded(batch):
    """Return the number of rows of all tiles that the documents use."""
    return sum(
        size * int(wanted)
        for n in np.diff(batch.offsets)
        for size, wanted, *_ in zip(batch.tiles, *_tile_parts(n, batch.tiles), strict=True)
    )


matrices = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 12), st.integers(1, 200)),
    elements=st.floats(0, 1e6, width=32),
    fill=st.just(0.0),
)


@settings(deadline=None, max_examples=150)
@given(matrices)
def test_pack_keeps_every_count_in_every_form(X):
    np.testing.assert_array_equal(unpack(pack(X)), X)
    for form in ("csr", "csc", "coo", "lil", "dok", "bsr"):
        for kind in (scipy.sparse.coo_array, scipy.sparse.coo_matrix):
            np.testing.assert_array_equal(unpack(pack(kind(X).asformat(form))), X)
    listed = [(np.flatnonzero(row), row[row != 0]) for row in X]
    np.testing.assert_array_equal(unpack(pack(listed, num_words=X.shape[1])), X)


@settings(deadline=None, max_examples=50)
@given(matrices, st.data())
def test_pack_selects_and_stacks_rows(X, data):
    rows = data.draw(hnp.arrays(np.int64, (3, 4), elements=st.integers(0, len(X) - 1)))
    batches = pack(X, rows)
    for t in range(3):
        one = type(batches)(*(x[t] for x in batches))
        np.testing.assert_array_equal(unpack(one), X[rows[t]])
    np.testing.assert_array_equal(unpack(pack(X, rows[0])), X[rows[0]])


def test_tiles_have_less_than_eight_padded_rows(rng):
    lengths = np.arange(1, 3000)
    words, indptr = np.concatenate([np.arange(n) for n in lengths]), np.concatenate([[0], np.cumsum(lengths)])
    X = scipy.sparse.csr_array((np.ones(lengths.sum()), words, indptr), shape=(len(lengths), 3000))
    batch = pack(X)
    assert padded(batch) == (-(-lengths // 8) * 8).sum()
    assert batch.tiles == (8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def test_the_capacity_includes_the_last_tile():
    """There are 32 entries, a power of two, and the tiles of the last document extend beyond them."""
    X = np.zeros((2, 40))
    X[0, :13], X[1, :19] = 1, 2
    np.testing.assert_array_equal(unpack(pack(X)), X)


def test_batches_of_one_size_share_their_shapes(rng):
    """Documents have 1 to 2000 words, with a realistic distribution."""
    lengths = np.clip(rng.lognormal(4.2, 0.9, 3000), 1, 2000).astype(int)
    indices = np.concatenate([rng.choice(3000, n, replace=False) for n in lengths])
    X = scipy.sparse.csr_array(
        (np.ones(len(indices)), indices, np.concatenate([[0], np.cumsum(lengths)])), (3000, 3000)
    )
    shapes = set()
    for _ in range(50):
        batch = pack(X, rng.choice(3000, 100))
        shapes.add((len(batch.vocabulary), len(batch.words), batch.tiles))
    assert len(shapes) <= 2


def test_empty_documents_are_kept():
    batch = pack(np.array([[0, 0], [1, 2], [0, 0]]))
    assert batch.size == 3
    np.testing.assert_array_equal(unpack(batch), [[0, 0], [1, 2], [0, 0]])
    np.testing.assert_array_equal(unpack(pack(np.zeros((2, 3)))), 0)


def test_duplicate_entries_are_added_and_zeros_ignored():
    X = scipy.sparse.coo_array(([1.0, 2.0, 0.0], ([0, 0, 1], [1, 1, 2])), shape=(2, 3))
    np.testing.assert_array_equal(unpack(pack(X)), [[0, 3, 0], [0, 0, 0]])
    np.testing.assert_array_equal(unpack(pack([([1, 1], [1, 2])], num_words=3)), [[0, 3, 0]])
    small = scipy.sparse.coo_array((np.array([200, 200], np.uint8), ([0, 0], [1, 1])), shape=(1, 2))
    np.testing.assert_array_equal(unpack(pack(small)), [[0, 400]])
    np.testing.assert_array_equal(canonical_csr(small).toarray(), [[0, 400]])


def test_the_input_is_not_changed():
    X = scipy.sparse.csr_matrix(([0.0, 1.0, 2.0], [1, 1, 0], [0, 3]), shape=(1, 2))
    before = (X.data.copy(), X.indices.copy(), X.indptr.copy())
    pack(X)
    for a, b in zip(before, (X.data, X.indices, X.indptr), strict=True):
        np.testing.assert_array_equal(a, b)


def test_float64_is_kept_and_integers_become_float32():
    assert pack(np.eye(2)).counts.dtype == np.float64
    assert pack(np.eye(2, dtype=np.int64)).counts.dtype == np.float32
    assert pack(np.eye(2, dtype=bool)).counts.dtype == np.float32


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (np.array([[1.0, 0, 0], [0, -2, 0]]), "document 1: the count of word 1 is -2"),
        (np.array([[1.0, 0, 0], [np.nan, 2, 0]]), "document 1: the count of word 0 is nan"),
        (np.array([[np.inf, 0, 0], [0, 2, 0]]), "document 0: the count of word 0 is inf"),
        (
            scipy.sparse.csr_array([[0.0, 0, 0], [0, 0, 0], [0, -1, 0]]),
            "document 2: the count of word 1 is -1",
        ),
        ([([0], [1]), ([5], [1])], "document 1: word id 5 is out of range; ids must be in 0 … 2"),
        ([([0], [1]), ([-1], [1])], "document 1: word id -1 is out of range"),
        ([([0, 1], [1])], r"document 0: .* one length, got shapes \(2,\) and \(1,\)"),
        ([([0], [1]), 3], r"document 1: expected \(word ids, counts\), two lists of one length; got a int"),
        ([[(0, 5), (7, 2)]], r"document 0: .* got a list of \(id, count\) pairs"),
        (scipy.sparse.csr_array(([1.0, 1], [0, 9], [0, 1, 2]), shape=(2, 3)), "document 1: word id 9 is out of range"),
        (scipy.sparse.coo_array(([3.0, -1], ([1, 1], [2, 2])), shape=(2, 3)), "document 1: the count of word 2 is -1"),
        ([([0.5], [1])], "document 0: word ids must be integers"),
        ([([0], ["a"])], "document 0: counts must be real numbers"),
        ([], "there is no document"),
        (np.zeros((0, 3)), "there is no document"),
        (np.zeros(3), r"expected documents × words, got an array of float64 of shape \(3,\)"),
        (np.zeros((2, 3, 4)), "expected documents × words"),
        (np.array([["a"]]), "expected documents × words, got an array of"),
        (np.eye(2), "num_words is 3, but the documents have 2 columns"),
        (np.eye(3) * 1j, "expected documents × words"),
        (scipy.sparse.eye_array(3) * 1j, "counts must be real numbers"),
    ],
)
def test_errors_name_the_document(X, message):
    with pytest.raises(ValueError, match=message):
        pack(X, num_words=3)


@pytest.mark.parametrize("rows", [[5], [-1], [], [[[0]]], [0.5], 0])
def test_invalid_rows_are_errors(rows):
    with pytest.raises(ValueError, match="rows must"):
        pack(np.eye(3), rows)


def test_rows_of_a_small_dtype_do_not_overflow():
    X = np.arange(1, 301)[:, None] * np.ones((1, 6))
    for rows in (np.array([127], np.int8), np.array([255, 0], np.uint8)):
        np.testing.assert_array_equal(unpack(pack(X, rows)), X[rows])


def test_counts_beyond_float32_are_errors():
    with pytest.raises(ValueError, match=r"document 0: the count of word 1 is 1e\+39"):
        pack([([0, 1], [1, 1e39])])
    assert pack(np.ones((2, 3), np.longdouble)).counts.dtype == np.float64


def test_num_words_of_a_list_is_the_largest_id_plus_one():
    assert pack([([4], [1])]).num_words == 5
    assert pack([([], [])]).num_words == 1


@settings(deadline=None, max_examples=100)
@given(matrices, st.integers(0, 99))
def test_split_assigns_every_token_to_one_half(X, seed):
    X = np.minimum(X, 50)
    observed, held_out = split_tokens(X, np.random.default_rng(seed))
    np.testing.assert_allclose((observed + held_out).toarray(), X, rtol=1e-6, atol=1e-6)
    assert (observed.toarray() >= 0).all()
    assert (held_out.toarray() >= 0).all()


def test_split_assigns_tokens_at_random():
    X = np.array([[3, 0, 4, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]] * 50)
    observed, held_out = split_tokens(X, np.random.default_rng(0))
    assert (observed.toarray() % 1 == 0).all()
    np.testing.assert_array_equal(observed.sum(1), (X.sum(1) + 1) // 2)
    np.testing.assert_array_equal((observed + held_out).toarray(), X)
    again, _ = split_tokens(X, np.random.default_rng(0))
    np.testing.assert_array_equal(observed.toarray(), again.toarray())
    # A half of 8 tokens, three of which are word 0, has 1.5 tokens of word 0 on average.
    assert observed.toarray()[::4, 0].mean() == pytest.approx(1.5, abs=0.35)


def test_canonical_csr_accepts_other_sparse_formats(rng):
    X = (rng.random((5, 4)) < 0.5).astype(np.float32)
    np.testing.assert_array_equal(canonical_csr(scipy.sparse.csc_matrix(X)).toarray(), X)


def test_a_count_that_cannot_be_split_is_an_error_with_its_document():
    with pytest.raises(ValueError, match=r"document 1: the count of word 2 is 1e\+20; to be split, a count must be"):
        split_tokens(np.array([[1, 1, 0], [0, 2, 1e20]]), np.random.default_rng(0))
