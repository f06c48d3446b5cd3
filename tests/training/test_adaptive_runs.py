"""Runs with an adaptive window: both engines choose the same lengths, and a resumed run continues to the same bits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smoothgrad_jax import LDA, Adaptive, Corpus, Exponential, NotFiniteError, adaptive, fit, init, init_topics

V, K, D, B = 80, 3, 120, 10
WINDOW = Adaptive(16, 20)
STEPS = 70


@pytest.fixture(name="run", scope="module")
def a_run():
    """A run of LDA on minibatches that have more and more words from step 25 to 40, and are otherwise only noisy."""
    rng = np.random.default_rng(0)
    X = rng.poisson(rng.gamma(0.2, 1, (D, V)))
    lam = init_topics(jax.random.key(0), V, K)
    corpus, batches = Corpus.of(X), []
    for t in range(STEPS):
        batch = corpus.pack(rng.integers(0, D, B), corpus.layout(B))
        batches.append(batch._replace(counts=batch.counts * np.float32(1 + 2 * np.clip(t - 25, 0, 15))))

    def run(params=lam, *, model=LDA, first=0, **options):
        given = {"window": WINDOW, "rho": 0.5, "threads": 1} | options
        return fit(batches[first:], model(0.3, 0.2, D), params, **given)

    run.lam, run.batches = lam, batches
    return run


@pytest.fixture(name="complete", scope="module")
def a_complete_run(run):
    training = run(report_every=1)
    lengths = [progress.window for progress in training]
    assert lengths[24] == 16
    assert min(lengths[:50]) <= 4
    assert lengths[-1] == 16
    return lengths, training.params


def copied(state):
    """A state that shares no memory with the run it comes from."""
    return jax.tree.map(lambda leaf: jnp.array(leaf) if isinstance(leaf, jax.Array) else np.array(leaf), state)


def test_reports_and_resuming_do_not_change_a_run(run, complete):
    lengths, lam = complete
    seldom = run(report_every=7)
    assert [progress.window for progress in seldom] == lengths[6::7]
    np.testing.assert_array_equal(seldom.params, lam)
    for done in (1, 33):
        part = run(steps=done, report_every=5).finish()
        rest = run(copied(part.state), first=done, report_every=1)
        assert [progress.window for progress in rest] == lengths[done:]
        np.testing.assert_array_equal(rest.params, lam)


class DenseLDA(LDA):
    """LDA without a row kernel: it runs on the dense engine."""

    row_kernel = None


def test_both_engines_choose_the_same(run, complete):
    lengths, lam = complete
    dense = run(model=DenseLDA, report_every=1)
    assert [progress.window for progress in dense] == lengths
    np.testing.assert_allclose(dense.params, lam, rtol=0.02)
    part = run(model=DenseLDA, steps=33).finish()
    rest = run(copied(part.state), model=DenseLDA, first=33, report_every=1)
    assert [progress.window for progress in rest] == lengths[33:]
    np.testing.assert_array_equal(rest.params, dense.params)


@pytest.mark.slow
def test_threads_choose_the_same(run, complete):
    lengths, lam = complete
    two = run(threads=2, report_every=1)
    assert np.mean([progress.window == length for progress, length in zip(two, lengths, strict=True)]) > 0.9
    np.testing.assert_allclose(two.params, lam, rtol=0.05)


def test_slots_are_kept_only_as_long_as_the_window_is(run):
    training = run(report_every=1)
    for progress in training:
        assert len(training.state.slots) <= progress.window


@pytest.mark.slow
def test_statistics_that_are_not_finite_begin_the_rule_anew(run):
    bad = run.batches[3]._replace(counts=np.where(run.batches[3].counts > 0, np.inf, 0).astype(np.float32))
    training = fit([*run.batches[:3], bad, *run.batches[4:]], LDA(0.3, 0.2, D), run.lam, window=WINDOW, threads=1)
    with pytest.raises(NotFiniteError, match="step 3"):
        training.finish()
    assert training.state.rule.state.num_sketches == 0
    assert adaptive.spec_of(training.state.rule.state) == WINDOW


def test_progress_tells_the_window(run):
    for window in (3, math.inf):
        assert next(run(window=window, steps=1)).window == window
    assert next(run(window=lambda t: 4 - t % 2, steps=2, report_every=2)).window == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": Adaptive(100)}, "a power of two"),
        ({"warmup": "zeros"}, 'warmup must be "mean" for an adaptive window'),
    ],
)
def test_what_an_adaptive_window_cannot_be(run, change, message):
    with pytest.raises(ValueError, match=message):
        run(**change)


def test_a_state_continues_with_its_own_window(run):
    state = run(steps=2).finish().state
    for window in (Adaptive(8, 20), Adaptive(16, 16), 16):
        with pytest.raises(ValueError, match=r"a run with window=Adaptive\(longest=16, memory=20\)"):
            run(state, window=window)
    fixed = run(window=16, steps=2).finish().state
    with pytest.raises(ValueError, match="with given window lengths"):
        run(fixed)
    with pytest.raises(ValueError, match="of a run on the dense engine"):
        run(init(run.lam, 4))
    with pytest.raises(ValueError, match="with given window lengths"):
        run(init(run.lam, Exponential()), model=DenseLDA)
