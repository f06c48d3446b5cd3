"""The row-sparse engine: the same λ as the transcription, whatever the window, the priors and the number of threads."""

import math
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from compiled import is_one_piece

from smoothgrad_jax import LDA, Corpus, global_step, local_step, pack
from smoothgrad_jax import init as dense_init
from smoothgrad_jax.training import rows

V, K, D = 200, 5, 60


@pytest.fixture
def lam(rng):
    return rng.gamma(1, 1, (V, K)) + 0.1


@pytest.fixture
def corpus(make_documents):
    documents = make_documents(D, V, longest=30)
    documents[7] = (np.zeros(0, int), np.zeros(0))
    return documents


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(3) as pool:
        yield pool


def decreasing(step):
    return (2 + step) ** -0.6


def picks(rng, steps, size=6):
    return [rng.integers(0, D, size) for _ in range(steps)]


def train(corpus, lam, model, batches, rho, length, pool, threads=2, look=(), dtype=None, **options):
    """λ after the steps in ``look``, and after the last; and the state."""
    length = length if callable(length) else lambda _, length=length: length
    state = rows.init(lam, threads, infinite=length(0) == math.inf, dtype=dtype)
    dealt = rows.deal(model, state)
    path = []
    table = Corpus.of(corpus, num_words=V)
    layout = table.layout(len(batches[0]))  # one shape, so that the tests compile little
    for i, chosen in enumerate(batches):
        batch = table.pack(chosen, layout)
        state, info = rows.step(state, rows.share(batch, threads), dealt, rho(i), length(i), pool, **options)
        assert info.finite
        if i in look or i == len(batches) - 1:
            state = rows.settle(state, dealt, pool)
            path.append(rows.params(state, dealt))
    return path, state


def reference(corpus, lam, batches, rho, length, alpha=0.3, eta=0.2, warmup="mean"):
    return oracle.algorithm_1(lam, [[corpus[d] for d in b] for b in batches], alpha, eta, rho, length, 500, warmup)


@pytest.mark.parametrize(
    ("threads", "warmup", "length"),
    [(1, "mean", 1), (2, "zeros", 1), (3, "mean", 3), (2, "zeros", 3), (2, "mean", math.inf), (1, "zeros", math.inf)],
)
def test_rows_are_algorithm_1_in_float64(x64, lam, corpus, rng, pool, threads, warmup, length):
    batches = picks(rng, 9)
    expected = reference(corpus, lam, batches, decreasing, length, warmup=warmup)
    model = LDA(0.3, 0.2, 500)
    path, state = train(corpus, lam, model, batches, decreasing, length, pool, threads, (1, 4), warmup=warmup)
    for got, step in zip(path, (1, 4, 8), strict=True):
        np.testing.assert_allclose(got, expected[step], rtol=1e-8)
    np.testing.assert_allclose(state.totals[-1][0, :K], expected[-1].sum(0), rtol=1e-9)


@pytest.mark.parametrize("shape", [(), (K,), (1, K), (V, 1), (V, K)])
def test_every_form_of_the_prior(x64, lam, corpus, rng, pool, shape):
    eta, alpha, batches = rng.gamma(1, 0.2, shape) + 0.01, np.linspace(0.1, 1, K), picks(rng, 6)
    expected = reference(corpus, lam, batches, decreasing, 2, alpha, eta)
    path, state = train(corpus, lam, LDA(alpha, eta, 500), batches, decreasing, 2, pool)
    np.testing.assert_allclose(path[-1], expected[-1], rtol=1e-8)
    np.testing.assert_allclose(state.totals[-1][0, :K], expected[-1].sum(0), rtol=1e-9)


@pytest.mark.parametrize("threads", [1, 2])
def test_words_that_no_document_has(x64, lam, corpus, rng, pool, threads):
    """λ may have more rows than the documents have words: these decay towards the prior, and nothing else."""
    batches, more = picks(rng, 5), np.concatenate([lam, rng.gamma(1, 1, (3 * V, K))])
    expected = reference(corpus, more, batches, decreasing, 2)
    path, _ = train(corpus, more, LDA(0.3, 0.2, 500), batches, decreasing, 2, pool, threads, look=range(5))
    np.testing.assert_allclose(path, expected, rtol=1e-8)


def test_a_step_size_of_one_forgets_everything_before(x64, lam, corpus, rng, pool):
    batches = picks(rng, 5)
    sizes = [1.0, 0.5, 1.0, 0.0, 0.3]
    expected = reference(corpus, lam, batches, sizes.__getitem__, 2)
    path, _ = train(corpus, lam, LDA(0.3, 0.2, 500), batches, sizes.__getitem__, 2, pool, look=range(5))
    np.testing.assert_allclose(path, expected, rtol=1e-8)


def test_a_window_that_shrinks_and_grows(x64, lam, corpus, rng, pool):
    """Against a queue of dense statistics that drops what must leave, and gets nothing back."""
    lengths, batches = [4, 4, 4, 4, 2, 1, 1, 3, 3, 3], picks(rng, 10)
    queue, expected = [], lam
    for i, chosen in enumerate(batches):
        stats, _ = oracle.local_step(0.3, expected, [corpus[d] for d in chosen], 500)
        queue = [*queue, stats][-lengths[i] :]
        expected = (1 - decreasing(i)) * expected + decreasing(i) * (0.2 + np.mean(queue, axis=0))
    path, state = train(corpus, lam, LDA(0.3, 0.2, 500), batches, decreasing, lengths.__getitem__, pool)
    np.testing.assert_allclose(path[-1], expected, rtol=1e-8)
    assert len(state.slots) == 3


def test_float32_follows_the_dense_path(lam, corpus, rng, pool):
    """Many steps with a long window: sums and lazy rows do not drift from what global_step computes."""
    lam = lam.astype(np.float32)
    model, batches = LDA(0.3, 0.2, 500), picks(rng, 120, 4)
    dense = dense_init(jnp.asarray(lam), 10)
    table = Corpus.of(corpus, num_words=V)
    layout = table.layout(4)
    for i, chosen in enumerate(batches):
        stats, _ = local_step(model, dense.params, table.pack(chosen, layout), 1e-5, 1000)
        dense = global_step(dense, stats, model.eta, decreasing(i), 10, donate=True)
    path, state = train(corpus, lam, model, batches, decreasing, 10, pool, tol=1e-5, max_iter=1000)
    assert path[-1].dtype == np.float32
    assert (path[-1] > 0).all()
    np.testing.assert_allclose(path[-1], dense.params, rtol=2e-2, atol=2e-2)
    assert np.abs(path[-1] - dense.params).sum() < 2e-3 * np.sum(dense.params)
    np.testing.assert_allclose(state.totals[0][0, :K], path[-1].sum(0, dtype=np.float64), rtol=1e-5)


@pytest.mark.parametrize(("dtype", "error"), [(jnp.bfloat16, 3e-3), (jnp.uint8, 3e-2)])
def test_slots_of_low_precision(lam, corpus, rng, pool, dtype, error):
    lam, model, batches = lam.astype(np.float32), LDA(0.3, 0.2, 500), picks(rng, 30)
    exact, _ = train(corpus, lam, model, batches, decreasing, 5, pool)
    rough, state = train(corpus, lam, model, batches, decreasing, 5, pool, dtype=dtype)
    assert state.slots[0].values[0][0].dtype == dtype
    assert 0 < np.abs(exact[-1] - rough[-1]).sum() < error * exact[-1].sum()
    # A byte keeps the sum of a word as it is.
    np.testing.assert_allclose(rough[-1].sum(1), exact[-1].sum(1), rtol=0.02)


def test_a_slot_that_left_leaves_nothing_behind(lam, corpus, pool):
    """Words that came once and left the window: their sum is 0 to the last bit, in every precision of the slots."""
    once, other = corpus[0], corpus[1]
    gone = np.setdiff1d(once[0], other[0])
    for dtype in (None, jnp.bfloat16, jnp.uint8):
        batches = [[0], [1], [1], [1]]
        _, state = train(corpus, lam.astype(np.float32), LDA(0.3, 0.2, 500), batches, decreasing, 2, pool, dtype=dtype)
        sums = np.concatenate([np.asarray(state.shards[w % 2])[w // 2, K : 2 * K] for w in gone])
        assert gone.size
        np.testing.assert_array_equal(sums, 0)


def test_a_row_that_is_only_used_is_not_written(x64, lam, corpus, pool):
    """It stays at the step at which it was written last, and λ is none the less that of now."""
    first, second = corpus[0], corpus[1]
    only = np.setdiff1d(second[0], first[0])
    assert only.size
    path, _ = train(corpus, lam, LDA(0.3, 0.2, 500), [[0], [1]], decreasing, 2, pool)
    np.testing.assert_allclose(path[-1], reference(corpus, lam, [[0], [1]], decreasing, 2)[-1], rtol=1e-8)
    state, table = rows.init(lam, 2), Corpus.of(corpus, num_words=V)
    for i in range(2):
        share = rows.share(table.pack([i], table.layout(1)), 2)
        state, _ = rows.step(state, share, rows.deal(LDA(0.3, 0.2, 500), state), decreasing(i), 2, pool)
    for w in only:
        row = np.asarray(state.shards[w % 2])[w // 2]
        np.testing.assert_array_equal(row[:K], lam[w])
        np.testing.assert_array_equal(row[-4:], 0)
    for w in first[0]:
        np.testing.assert_allclose(np.asarray(state.shards[w % 2])[w // 2, -4], state.last[0])


def waiting(lam, corpus, rng, pool, threads, lengths, **options):
    """A state with statistics that wait to enter and to leave, and the model."""
    model = LDA(0.3, (rng.gamma(1, 0.2, (V, 1)) + 0.01).astype(lam.dtype), 500)
    state, table = rows.init(lam, threads, infinite=lengths[0] == math.inf, **options), Corpus.of(corpus, num_words=V)
    dealt, layout = rows.deal(model, state), table.layout(6)
    for i, (chosen, length) in enumerate(zip(picks(rng, len(lengths)), lengths, strict=True)):
        share = rows.share(table.pack(chosen, layout), threads)
        state, _ = rows.step(state, share, dealt, decreasing(i), length, pool)
    assert state.pending is not None
    return state, dealt


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.uint8])
@pytest.mark.parametrize("threads", [1, 2])
def test_to_look_is_what_the_next_step_will_do(lam, corpus, rng, pool, threads, dtype):
    """λ with statistics that wait to enter, and several slots that wait to leave, is that after they have."""
    lengths = [4, 4, 4, 4, 4, 2]
    state, dealt = waiting(lam.astype(np.float32), corpus, rng, pool, threads, lengths, dtype=dtype)
    assert len(state.leaving) == 3
    looked = rows.params(state, dealt)
    np.testing.assert_array_equal(rows.params(state, dealt), looked)
    settled = rows.settle(state, dealt, pool)
    np.testing.assert_allclose(looked, rows.params(settled, dealt), rtol=2e-6)
    np.testing.assert_allclose(looked.sum(0, dtype=np.float64), settled.totals[0][0, :K], rtol=0.05 if dtype else 1e-5)


@pytest.mark.parametrize("lengths", [[2, 2, 2], [math.inf] * 3])
def test_to_look_in_float64_and_at_a_restored_state(x64, lam, corpus, rng, pool, lengths):
    state, dealt = waiting(lam, corpus, rng, pool, 2, lengths)
    looked = rows.params(state, dealt)
    arrays, facts = rows.export(state)
    again = rows.restore({name: np.concatenate(pieces) for name, pieces in arrays.items()}, facts)
    np.testing.assert_array_equal(rows.params(again, dealt), looked)
    np.testing.assert_allclose(looked, rows.params(rows.settle(state, dealt, pool), dealt), rtol=1e-13)


def test_to_look_allocates_the_result(rng, pool):
    """And no copy of the rows, which are three times as large."""
    num_words = 30_000
    model, state = LDA(0.3, 0.2, 500), rows.init(np.ones((num_words, K), np.float32))
    share = rows.share(pack([([3, 4], [1, 2])], num_words=num_words), 1)
    dealt = rows.deal(model, state)
    state, info = rows.step(state, share, dealt, 0.5, 3, pool)
    assert info.finite
    tracemalloc.start()
    lam = rows.params(state, dealt)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lam.nbytes <= peak < 1.7 * lam.nbytes


def test_bytes_keep_the_sum_and_the_size_of_every_entry(rng):
    values = (rng.gamma(0.1, 1, (300, 40)) * 10.0 ** rng.integers(-6, 6, (300, 1))).astype(np.float32)
    values[7] = 0
    stored = rows._store(jnp.asarray(values), jnp.uint8)
    out = np.concatenate([rows._load(stored, i, jnp.float32) for i in range(len(values))])
    np.testing.assert_allclose(np.sum(out, 1), values.sum(1), rtol=1e-5)
    large = values > values.max(1, keepdims=True) * 2.0**-30
    np.testing.assert_allclose(np.asarray(out)[large], values[large], rtol=0.1)
    assert (np.asarray(out) >= 0).all()


def test_statistics_that_are_not_finite_stay_out(lam, corpus, rng, pool):
    model = LDA(0.3, 0.2, 500)
    path, state = train(corpus, lam.astype(np.float32), model, picks(rng, 4), decreasing, 2, pool)
    dealt = rows.deal(model, state)
    batch = pack([corpus[0]], num_words=V)
    batch = batch._replace(counts=np.where(batch.counts > 0, np.inf, 0).astype(np.float32))
    state, info = rows.step(state, rows.share(batch, 2), dealt, 0.5, 2, pool)
    state, after = rows.step(state, rows.share(batch, 2), dealt, 0.5, 2, pool)
    assert not info.finite
    assert not after.finite
    state = rows.before(state, info, dealt)
    assert state.step == 4
    np.testing.assert_allclose(rows.params(state, dealt), path[-1], rtol=1e-6)


def test_every_document_is_dealt_once(rng):
    X = (rng.random((37, 150)) < rng.random((37, 1))).astype(np.float32)
    for threads in (1, 2, 3, 4):
        share = rows.share(pack(X), threads)
        assert share.bounds[0] == 0
        assert share.bounds[-1] == 37
        entries = np.diff(share.batch.offsets[share.bounds])
        assert entries.sum() == np.count_nonzero(X)
        assert entries.max() - entries.min() <= 2 * 150  # a document or two
        ids = [(w * threads + s, s * share.words.shape[1] + i) for s in range(threads) for i, w in words_of(share, s)]
        assert sorted(w for w, _ in ids) == np.flatnonzero(X.sum(0)).tolist()
        # The words of the documents are positions in these lists.
        place = {position: w for w, position in ids}
        for d in range(37):
            entries = share.batch.words[share.batch.offsets[d] : share.batch.offsets[d + 1]]
            assert [place[position] for position in entries.tolist()] == np.flatnonzero(X[d]).tolist()


def words_of(share, s):
    """(i, w) up to the end of the list."""
    assert share.words[s, -1] == rows._END
    return [(i, w) for i, w in enumerate(share.words[s].tolist()) if w != rows._END]


def test_nothing_is_compiled_twice(lam, corpus, rng, pool):
    lam = lam.astype(np.float32)
    train(corpus, lam, LDA(0.3, 0.2, 500), picks(rng, 4), decreasing, 2, pool)
    before = rows._rows._cache_size(), rows._documents._cache_size()
    train(corpus, 2 * lam, LDA(0.5, 0.1, 50), picks(rng, 8), lambda i: 0.1, 3, pool, tol=1e-4, max_iter=50)
    train(corpus, lam, LDA(0.3, 0.2, 500), picks(rng, 8), decreasing, 1, pool, look=(2, 3))
    assert (rows._rows._cache_size(), rows._documents._cache_size()) == before


@pytest.mark.parametrize("threads", [1, 2])
def test_the_background_compiles_what_the_step_needs(lam, corpus, pool, threads):
    """A first step of a new shape compiles one program for the documents, though two threads ask for it."""
    size = 10 + threads  # of no other test
    table, state = Corpus.of(corpus, num_words=V), rows.init(lam.astype(np.float32), threads)
    share = rows.share(table.pack(np.arange(size), table.layout(size)), threads)
    before = rows._documents._cache_size()
    _, info = rows.step(state, share, rows.deal(LDA(0.3, 0.2, 500), state), 0.5, 2, pool)
    assert info.finite
    pool.submit(int).result()
    assert rows._documents._cache_size() == before + 1


def test_no_hidden_copy_of_the_shard():
    """Rows are changed in place: the program's temporaries are the order of the words, and do not grow with V."""
    K = 32

    def f(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    for num_words, U in ((2_000, 128), (20_000, 1280)):
        ids, one = jax.ShapeDtypeStruct((U,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
        compiled = rows._rows.lower(
            f(num_words, 3 * K + 4),
            (f(U, K),),
            f(U, K),
            (f(1, 3 * K + 4), f(K), (f(K),), f(1, 1)),
            (ids, (f(U, K),)),
            (ids, (f(U, K),), one, f()),
            ids,
            (f(4), f(4)),
            f(1, 1),
        ).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 5_000 + 13 * U
        assert is_one_piece(compiled)


def test_the_documents_are_one_piece():
    """Without a scatter in any loop: XLA would fall back to a task for every operation, at half the speed."""
    batch = rows.share(pack(np.eye(40, 60) + 1), 2).batch
    table = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    alpha, spare = jnp.ones(5), jax.ShapeDtypeStruct((128, 16), jnp.float32)
    bounds = np.int32(0), np.int32(20)
    arguments = (alpha, (table, table), batch, bounds, np.float32(1e-3), 100, spare)
    assert is_one_piece(rows._documents.lower(*arguments).compile())
