"""Local steps for accelerators: the numbers of the loops over documents, and programs without such loops."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from smoothgrad_jax import (
    LDA,
    Batched,
    Collapsed,
    Maximum,
    Mean,
    Sampled,
    Sequential,
    Variational,
    elbo,
    global_step,
    init,
    local_step,
    log_predictive,
    pack,
    run,
    split_documents,
)
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.models.lda import batch_collapsed, batch_fit, batch_sampling, inference
from smoothgrad_jax.models.lda.batch_entries import blocks_of, document_of, sizes

METHODS = [Variational(), Mean(), Maximum(), Collapsed(), Sampled(3, 2)]
KEY = jax.random.key(3)
NUM_DOCS, V, K = 33, 50, 20


@pytest.fixture(autouse=True)
def small_arrays(monkeypatch):
    """Finished documents leave the arrays also in a small batch."""
    for module in (batch_fit, batch_collapsed, batch_sampling):
        monkeypatch.setattr(module, "_SMALLEST", 4)
    monkeypatch.setattr(batch_fit, "_MOST_SIZES", 2)


def documents():
    """Documents of very different length: empty, of one word, of 100 tokens and more, fractional, zeros stored."""
    rng = np.random.default_rng(0)
    X = rng.poisson(0.4, (NUM_DOCS, V)) * rng.integers(1, 4, (NUM_DOCS, V)).astype(float)
    X[[0, 7, 8, 32]], X[3], X[5, 2] = 0, rng.poisson(9, V), 2.5
    X[2] = np.eye(V)[4] * 3
    matrix = scipy.sparse.csr_array(X)
    matrix.data[matrix.indptr[10]] = 0  # an entry without tokens
    return matrix


def topics(num_topics=K):
    return np.random.default_rng(1).gamma(0.5, 1.0, (V, num_topics)) + 0.05


def model(method, execution, **options):
    return LDA(0.3, 0.1, NUM_DOCS, method=method, execution=execution, **options)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_all_documents_at_once_equal_one_after_the_other(x64, method):
    batch, lam = pack(documents()), topics()
    # Some documents stop at max_iter, and most of them earlier.
    options = {"tol": 1e-4, "max_iter": 30}
    expected, info = local_step(model(method, Sequential(), **options), lam, batch, key=KEY)
    stats, found = local_step(model(method, Batched(), **options), lam, batch, key=KEY)
    assert stats.dtype == np.float64
    np.testing.assert_allclose(stats, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(found.iterations, info.iterations)
    for one, other in zip(found, info, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
    if isinstance(method, Sampled):
        np.testing.assert_array_equal(np.rint(found.tokens * 2), np.rint(info.tokens * 2))  # the same topics
    else:
        assert len(np.unique(info.iterations)) > 3


@pytest.mark.parametrize("method", [Variational(), Collapsed(), Sampled(2, 1)])
def test_one_document_with_one_topic(x64, method):
    X = documents()[[3]]
    stats, info = local_step(LDA(0.3, 0.1, 1, method=method, execution=Batched()), topics(1), pack(X), key=KEY)
    np.testing.assert_allclose(stats[:, 0], X.sum(0), rtol=1e-10)
    np.testing.assert_allclose(info.gamma, 0.3 + X.sum(), rtol=1e-10)


def test_scores_equal_those_of_the_loops(x64):
    X, lam = documents(), topics()
    halves = split_documents(X, KEY)
    one, other = (model(Collapsed(), execution) for execution in (Sequential(), Batched()))
    np.testing.assert_allclose(log_predictive(other, lam, *halves), log_predictive(one, lam, *halves), rtol=1e-10)
    np.testing.assert_allclose(elbo(other, lam, pack(X)), elbo(one, lam, pack(X)), rtol=1e-10)
    gamma = inference.posteriors(other, lam, X)
    np.testing.assert_allclose(gamma, inference.posteriors(one, lam, X), rtol=1e-10)


@pytest.mark.parametrize("traced", [False, True])
def test_a_run_chooses_by_platform(x64, traced):
    """By that of the parameters; inside ``jit`` by the one for which it is compiled."""
    batches, lam = pack(documents(), np.arange(32).reshape(4, 8)), topics()

    def final(execution):
        return run(model(Mean(), execution), init(lam, 2), batches, rho=0.1)[0].params

    found = jax.jit(final, static_argnums=0)(None) if traced else final(None)
    np.testing.assert_allclose(found, final(Batched()), rtol=1e-10)


def lowered(function, *arguments, platforms=("cuda", "tpu")):
    """Return the StableHLO for platforms, which need not exist on this machine."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), arguments)
    return jax.export.export(jax.jit(function), platforms=platforms)(*shapes).mlir_module()


def nested_loops(text):
    """Return the number of loops, and how deep they are nested."""
    regions, number, deepest = [], 0, 0
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if "stablehlo.while" in line:
            regions.append(indent)
            number, deepest = number + 1, max(deepest, len(regions))
        elif regions and indent <= regions[-1] and line.lstrip().startswith("}") and "do {" not in line:
            regions.pop()
    assert not regions
    return number, deepest


@pytest.mark.parametrize("method", [Variational(), Collapsed(), Sampled(3, 2)])
def test_a_step_lowers_for_accelerators_without_loops_over_documents(method):
    batch, lam = pack(documents()), topics().astype(np.float32)
    # The default execution: the program for an accelerator is chosen when it is lowered for one.
    lda = LDA(0.3, 0.1, NUM_DOCS, method=method)

    def local(lam, batch, seed):
        return local_step(lda, lam, batch, key=jax.random.wrap_key_data(seed))

    seed = np.zeros(2, np.uint32)
    text = lowered(local, lam, batch, seed)
    assert "custom_call" not in text
    number, depth = nested_loops(text)
    if isinstance(method, Sampled):
        num_sizes = len(sizes(NUM_DOCS, batch_sampling._RATIO, batch_sampling._SMALLEST))
        # Over the updates of long documents; over sweeps; in it over draws and over counted tokens.
        assert (number, depth) == (2 + 2 * num_sizes, 2)
        assert (
            text.count("stablehlo.dynamic_update_slice") == num_sizes
        )  # a row of topics [T, B] per draw of all documents
        assert not re.findall(r"dynamic_update_slice.*xf32", text)
    else:
        assert (number, depth) == (2, 1)  # two sizes of the arrays
        assert "dynamic_update_slice" not in text

    def step(state, batch, seed):
        return global_step(state, local(state.params, batch, seed)[0], 0.1, 0.1, 3)

    assert "custom_call" not in lowered(step, init(lam, 3), batch, seed)


@pytest.mark.parametrize("method", [Variational(), Collapsed()])
def test_where_no_document_leaves_the_arrays_there_is_one_loop(method, monkeypatch):
    for module in (batch_fit, batch_collapsed):
        monkeypatch.setattr(module, "_SMALLEST", 10_000)
    lda, lam = model(method, Batched()), topics().astype(np.float32)
    text = lowered(lambda lam, batch: local_step(lda, lam, batch), lam, pack(documents()))
    assert nested_loops(text) == (1, 1)


def test_scores_lower_for_accelerators_without_loops_over_documents():
    lda, lam, batch = LDA(0.3, 0.1, NUM_DOCS), topics().astype(np.float32), pack(documents())
    for function in (elbo, lambda model, lam, batch: log_predictive(model, lam, batch, batch)):
        text = lowered(lambda lam, batch, function=function: function(lda, lam, batch), lam, batch)
        assert nested_loops(text)[1] == 1
        assert "custom_call" not in text


def test_loops_over_documents_are_seen_by_these_tests():
    lda, lam = model(Variational(), Sequential()), topics().astype(np.float32)
    text = lowered(lambda lam, batch: local_step(lda, lam, batch), lam, pack(documents()), platforms=["cpu"])
    assert nested_loops(text)[0] > 5
    assert "dynamic_update_slice" in text


def test_every_entry_is_in_one_block_of_its_document():
    batch = pack(documents())
    blocks = blocks_of(batch, np.float32)
    counts = np.zeros((NUM_DOCS, len(batch.vocabulary)))
    np.add.at(counts, (np.repeat(blocks.document, 8), np.ravel(blocks.words)), np.ravel(blocks.counts))
    expected = np.zeros_like(counts)
    n = batch.offsets[-1]
    np.add.at(expected, (np.asarray(document_of(batch))[:n], batch.words[:n]), batch.counts[:n])
    np.testing.assert_array_equal(counts, expected)
    np.testing.assert_allclose(expected.sum(1), documents().sum(1), rtol=1e-6)
    assert (np.diff(blocks.document) >= 0).all()


def test_loops_over_documents_are_refused_on_an_accelerator():
    with pytest.raises(OptionError, match="execution must be batched on gpu"):
        model(Variational(), Sequential()).for_platform("gpu")
    assert model(Variational(), None).for_platform("tpu").is_batched
    assert not model(Variational(), None).for_platform("cpu").is_batched


def test_an_execution_that_is_none_is_refused():
    with pytest.raises(OptionError, match=r"execution must be Sequential\(\), Batched\(\) or None, got True"):
        local_step(model(Variational(), True), topics().astype(np.float32), pack(documents()))
