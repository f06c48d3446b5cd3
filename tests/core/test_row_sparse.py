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
from smoothgrad_jax.core.row_sparse import program, slots, step
from smoothgrad_jax.core.row_sparse.state import END, Workspace, init_rows, partition_batch, partition_prior

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


class Run:
    """The state of a run on the row-sparse engine, with everything that its steps take."""

    def __init__(self, model, lam, pool, threads=2, *, infinite=False, slot_dtype=None, warmup="mean"):
        self.state = init_rows(lam, threads, infinite=infinite)
        self.kernel = model.row_kernel(K if lam.shape[1] == K else lam.shape[1], lam.dtype)
        self.prior = partition_prior(model.eta, self.state)
        self.slot_dtype = jnp.dtype(slot_dtype or lam.dtype)
        self.options = step.StepOptions(warmup, self.slot_dtype)
        self.workspace, self.pool, self.threads = Workspace(), pool, threads

    def step(self, batch, rho, length):
        """Take a step with a minibatch."""
        partitioned = partition_batch(batch, self.threads)
        self.state, info = step.step(
            self.state,
            partitioned,
            self.kernel,
            self.prior,
            rho,
            length,
            self.workspace,
            self.pool,
            options=self.options,
        )
        return info

    def flush(self):
        self.state = step.flush(self.state, self.kernel, self.prior, self.workspace, self.slot_dtype, self.pool)

    def read(self):
        return step.read_rows(self.state, self.prior, self.slot_dtype)


def train(corpus, lam, model, batches, rho, length, pool, threads=2, read_after=(), **options):
    """λ after the steps in ``read_after``, and after the last; and the state."""
    length = length if callable(length) else lambda _, length=length: length
    run = Run(model, lam, pool, threads, infinite=length(0) == math.inf, **options)
    path = []
    documents = Corpus.of(corpus, num_words=V)
    layout = documents.layout(len(batches[0]))  # one shape, so that the tests compile little
    for i, chosen in enumerate(batches):
        assert run.step(documents.pack(chosen, layout), rho(i), length(i)).is_finite
        if i in read_after or i == len(batches) - 1:
            run.flush()
            path.append(run.read())
    return path, run.state


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
    for got, i in zip(path, (1, 4, 8), strict=True):
        np.testing.assert_allclose(got, expected[i], rtol=1e-8)
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
    path, _ = train(corpus, more, LDA(0.3, 0.2, 500), batches, decreasing, 2, pool, threads, read_after=range(5))
    np.testing.assert_allclose(path, expected, rtol=1e-8)


def test_a_step_size_of_one_forgets_everything_before(x64, lam, corpus, rng, pool):
    batches = picks(rng, 5)
    sizes = [1.0, 0.5, 1.0, 0.0, 0.3]
    expected = reference(corpus, lam, batches, sizes.__getitem__, 2)
    path, _ = train(corpus, lam, LDA(0.3, 0.2, 500), batches, sizes.__getitem__, 2, pool, read_after=range(5))
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
    path, state = train(corpus, lam, model._replace(tol=1e-5, max_iter=1000), batches, decreasing, 10, pool)
    assert path[-1].dtype == np.float32
    assert (path[-1] > 0).all()
    np.testing.assert_allclose(path[-1], dense.params, rtol=2e-2, atol=2e-2)
    assert np.abs(path[-1] - dense.params).sum() < 2e-3 * np.sum(dense.params)
    np.testing.assert_allclose(state.totals[0][0, :K], path[-1].sum(0, dtype=np.float64), rtol=1e-5)


@pytest.mark.parametrize(("dtype", "error"), [(jnp.bfloat16, 3e-3), (jnp.uint8, 3e-2)])
def test_slots_of_low_precision(lam, corpus, rng, pool, dtype, error):
    lam, model, batches = lam.astype(np.float32), LDA(0.3, 0.2, 500), picks(rng, 30)
    exact, _ = train(corpus, lam, model, batches, decreasing, 5, pool)
    rough, state = train(corpus, lam, model, batches, decreasing, 5, pool, slot_dtype=dtype)
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
        _, state = train(
            corpus, lam.astype(np.float32), LDA(0.3, 0.2, 500), batches, decreasing, 2, pool, slot_dtype=dtype
        )
        sums = np.concatenate([np.asarray(state.partitions[w % 2])[w // 2, K : 2 * K] for w in gone])
        assert gone.size
        np.testing.assert_array_equal(sums, 0)


def test_a_row_that_is_only_used_is_not_written(x64, lam, corpus, pool):
    """It stays at the step at which it was written last, and λ is none the less that of now."""
    first, second = corpus[0], corpus[1]
    only = np.setdiff1d(second[0], first[0])
    assert only.size
    path, _ = train(corpus, lam, LDA(0.3, 0.2, 500), [[0], [1]], decreasing, 2, pool)
    np.testing.assert_allclose(path[-1], reference(corpus, lam, [[0], [1]], decreasing, 2)[-1], rtol=1e-8)
    run, documents = Run(LDA(0.3, 0.2, 500), lam, pool), Corpus.of(corpus, num_words=V)
    for i in range(2):
        run.step(documents.pack([i], documents.layout(1)), decreasing(i), 2)
    state = run.state
    for w in only:
        row = np.asarray(state.partitions[w % 2])[w // 2]
        np.testing.assert_array_equal(row[:K], lam[w])
        np.testing.assert_array_equal(row[-4:], 0)
    for w in first[0]:
        np.testing.assert_allclose(np.asarray(state.partitions[w % 2])[w // 2, -4], state.previous_clock[0])


def run_in_progress(lam, corpus, rng, pool, threads, lengths, **options):
    """A run with statistics that are about to enter and to leave."""
    model = LDA(0.3, (rng.gamma(1, 0.2, (V, 1)) + 0.01).astype(lam.dtype), 500)
    run = Run(model, lam, pool, threads, infinite=lengths[0] == math.inf, **options)
    documents = Corpus.of(corpus, num_words=V)
    layout = documents.layout(6)
    for i, (chosen, length) in enumerate(zip(picks(rng, len(lengths)), lengths, strict=True)):
        run.step(documents.pack(chosen, layout), decreasing(i), length)
    assert run.state.entering is not None
    return run


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.uint8])
@pytest.mark.parametrize("threads", [1, 2])
def test_reading_gives_what_the_next_step_computes(lam, corpus, rng, pool, threads, dtype):
    """λ with statistics about to enter, and several slots about to leave, is λ after they have."""
    lengths = [4, 4, 4, 4, 4, 2]
    run = run_in_progress(lam.astype(np.float32), corpus, rng, pool, threads, lengths, slot_dtype=dtype)
    assert len(run.state.leaving) == 3
    read = run.read()
    np.testing.assert_array_equal(run.read(), read)
    run.flush()
    np.testing.assert_allclose(read, run.read(), rtol=2e-6)
    np.testing.assert_allclose(read.sum(0, dtype=np.float64), run.state.totals[0][0, :K], rtol=0.05 if dtype else 1e-5)


@pytest.mark.parametrize("lengths", [[2, 2, 2], [math.inf] * 3])
def test_reading_in_float64(x64, lam, corpus, rng, pool, lengths):
    run = run_in_progress(lam, corpus, rng, pool, 2, lengths)
    read = run.read()
    run.flush()
    np.testing.assert_allclose(read, run.read(), rtol=1e-13)


def test_the_state_is_a_pytree_of_arrays(lam, corpus, rng, pool):
    """A state that is taken apart and put together is the same state, and continues to the same bits."""
    run = run_in_progress(lam.astype(np.float32), corpus, rng, pool, 2, [3, 3, 3, 3, 2])
    leaves, structure = jax.tree.flatten(run.state)
    assert all(isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves)
    copies = [jnp.array(leaf) if isinstance(leaf, jax.Array) else np.array(leaf) for leaf in leaves]
    batch = pack([corpus[3], corpus[4]], num_words=V)
    run.step(batch, 0.5, 2)
    expected = run.read()
    run.state = jax.tree.unflatten(structure, copies)
    run.workspace = Workspace()
    run.step(batch, 0.5, 2)
    np.testing.assert_array_equal(run.read(), expected)


def test_reading_allocates_the_result(pool):
    """And no copy of the rows, which are three times as large."""
    num_words = 30_000
    run = Run(LDA(0.3, 0.2, 500), np.ones((num_words, K), np.float32), pool, threads=1)
    assert run.step(pack([([3, 4], [1, 2])], num_words=num_words), 0.5, 3).is_finite
    tracemalloc.start()
    lam = run.read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lam.nbytes <= peak < 1.7 * lam.nbytes


def test_bytes_keep_the_sum_and_the_size_of_every_entry(rng):
    values = (rng.gamma(0.1, 1, (300, 40)) * 10.0 ** rng.integers(-6, 6, (300, 1))).astype(np.float32)
    values[7] = 0
    stored = slots.encode(jnp.asarray(values), jnp.uint8)
    out = np.concatenate([slots.decode_row(stored, i, jnp.float32) for i in range(len(values))])
    np.testing.assert_allclose(np.sum(out, 1), values.sum(1), rtol=1e-5)
    large = values > values.max(1, keepdims=True) * 2.0**-30
    np.testing.assert_allclose(np.asarray(out)[large], values[large], rtol=0.1)
    assert (np.asarray(out) >= 0).all()


def test_statistics_that_are_not_finite_stay_out(lam, corpus, rng, pool):
    run = Run(LDA(0.3, 0.2, 500), lam.astype(np.float32), pool)
    documents = Corpus.of(corpus, num_words=V)
    for i, chosen in enumerate(picks(rng, 4)):
        run.step(documents.pack(chosen, documents.layout(6)), decreasing(i), 2)
    expected = run.read()
    batch = pack([corpus[0]], num_words=V)
    batch = batch._replace(counts=np.where(batch.counts > 0, np.inf, 0).astype(np.float32))
    info, later = (run.step(batch, 0.5, 2) for _ in range(2))
    assert not info.is_finite
    assert not later.is_finite
    run.state = step.restart(run.state, info, run.prior, run.slot_dtype)
    assert run.state.step == 4
    np.testing.assert_allclose(run.read(), expected, rtol=1e-6)


def test_every_document_belongs_to_one_thread(rng):
    X = (rng.random((37, 150)) < rng.random((37, 1))).astype(np.float32)
    for threads in (1, 2, 3, 4):
        part = partition_batch(pack(X), threads)
        assert part.bounds[0] == 0
        assert part.bounds[-1] == 37
        entries = np.diff(part.batch.offsets[part.bounds])
        assert entries.sum() == np.count_nonzero(X)
        assert entries.max() - entries.min() <= 2 * 150  # a document or two
        ids = [(w * threads + s, s * part.words.shape[1] + i) for s in range(threads) for i, w in words_of(part, s)]
        assert sorted(w for w, _ in ids) == np.flatnonzero(X.sum(0)).tolist()
        # The words of the documents are positions in these lists.
        place = {position: w for w, position in ids}
        for d in range(37):
            entries = part.batch.words[part.batch.offsets[d] : part.batch.offsets[d + 1]]
            assert [place[position] for position in entries.tolist()] == np.flatnonzero(X[d]).tolist()


def words_of(part, s):
    """(i, w) up to the end of the list."""
    assert part.words[s, -1] == END
    return [(i, w) for i, w in enumerate(part.words[s].tolist()) if w != END]


def test_nothing_is_compiled_twice(lam, corpus, rng, pool):
    def compiled():
        return program.update_rows._cache_size(), step._fit._cache_size()

    lam = lam.astype(np.float32)
    train(corpus, lam, LDA(0.3, 0.2, 500), picks(rng, 4), decreasing, 2, pool)
    before = compiled()
    train(corpus, 2 * lam, LDA(0.5, 0.1, 50, 1e-4, 50), picks(rng, 8), lambda i: 0.1, 3, pool)
    train(corpus, lam, LDA(0.3, 0.2, 500), picks(rng, 8), decreasing, 1, pool, read_after=(2, 3))
    assert compiled() == before


@pytest.mark.parametrize("threads", [1, 2])
def test_the_background_compiles_what_the_step_needs(lam, corpus, pool, threads):
    """A first step of a new shape compiles one program for the documents, though two threads ask for it."""
    size = 10 + threads  # a batch size of no other test
    documents = Corpus.of(corpus, num_words=V)
    run = Run(LDA(0.3, 0.2, 500), lam.astype(np.float32), pool, threads)
    before = step._fit._cache_size()
    assert run.step(documents.pack(np.arange(size), documents.layout(size)), 0.5, 2).is_finite
    pool.submit(int).result()
    assert step._fit._cache_size() == before + 1


def test_no_hidden_copy_of_the_partition():
    """Rows change in place: the temporaries of the program are the order of the words, and do not grow with V."""
    K = 32

    def f(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    kernel = LDA(0.3, 0.2, 500).row_kernel(K, np.dtype(np.float32))
    for num_words, U in ((2_000, 128), (20_000, 1280)):
        ids, one = jax.ShapeDtypeStruct((U,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
        compiled = program.update_rows.lower(
            kernel,
            f(num_words, 3 * K + 4),
            (f(U, K),),
            f(U, K),
            f(1, 3 * K + 4),
            program.Leaving(ids, (f(U, K),), f(K)),
            program.Entering(ids, (f(U, K),), one, f(), (f(K),)),
            ids,
            program.Clocks(f(4), f(4)),
            (f(1, 1), f(1, 1)),
        ).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 5_000 + 13 * U
        assert is_one_piece(compiled)


def test_the_documents_are_one_piece():
    """Without a scatter in any loop: XLA would fall back to one task per operation, at half the speed."""
    batch = partition_batch(pack(np.eye(40, 60) + 1), 2).batch
    features, memory = jax.ShapeDtypeStruct((64, 16), jnp.float32), jax.ShapeDtypeStruct((128, 16), jnp.float32)
    kernel, total = LDA(1.0, 0.2, 500).row_kernel(5, np.dtype(np.float32)), jax.ShapeDtypeStruct((1, 19), jnp.float32)
    arguments = (kernel, (features, features), total, None, batch, (np.int32(0), np.int32(20)), memory, None, None)
    assert is_one_piece(step._fit.lower(*arguments).compile())
