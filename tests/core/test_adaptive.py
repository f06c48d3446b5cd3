"""The adaptive window: the rule against a transcription, what it chooses for planted drift and noise, and in a run."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smoothgrad_jax import Adaptive
from smoothgrad_jax.core import adaptive


def noise_left(length, rho):
    """The sum of squared weights of all minibatches in λ, for a box of this length before a step size ρ."""
    weights = np.convolve(np.full(length, 1 / length), rho * (1 - rho) ** np.arange(2_000))
    return float((weights**2).sum())


def transcription(Z, longest, memory, rho):
    """The rule in float64, from the list of all sketches: the lengths after each."""
    noise, spread, length, chosen = 0.0, {}, min(8, longest), []
    Z = np.asarray(Z, np.float64)
    for t in range(1, len(Z) + 1):
        if t >= 3:
            bend = Z[t - 1] - 2 * Z[t - 2] + Z[t - 3]
            noise += max(1 / (t - 2), 1 / memory) * (bend @ bend / 6 - noise)
        cost = {1: noise}
        for size in (2**j for j in range(int(math.log2(longest)))):
            if t % size == 0 and t >= 2 * size:
                apart = Z[t - size : t].mean(0) - Z[t - 2 * size : t - size].mean(0)
                old = spread.get(size, 0.0)
                spread[size] = old + max(1 / (t // size - 1), size / memory) * (apart @ apart / 2 - old)
            if t >= max(2 * size, 3):
                cost[2 * size] = ((2 * size - 1) / size) ** 2 * max(spread[size] - noise / size, 0) / 2
        for longer in sorted(cost, reverse=True)[1:]:
            if longer > 1:
                cost[longer] = min(cost[longer], cost[2 * longer])
        cost = {each: bias + noise * noise_left(each, rho) for each, bias in (cost | {1: 0.0}).items()}
        best = min(cost, key=lambda each: (cost[each], each))
        if t >= min(128, longest) and cost[best] < 0.9 * cost[length]:
            length = best
        chosen.append(length)
    return chosen


@jax.jit
def run_rule(state, Z, rho=1.0):
    def one(state, z):
        length, state = adaptive.push(state, z, rho)
        return state, length

    return jax.lax.scan(one, state, Z)


def chosen(Z, longest=32, memory=None, rho=1.0):
    spec = Adaptive(longest, memory)
    return np.asarray(run_rule(adaptive.init(spec, Z[0]), Z, rho)[1])


def walk(rng, steps, drift, noise, size=40):
    """Sketches that move by ``drift`` a step, with noise of this mean square."""
    direction = rng.normal(size=size)
    path = np.arange(steps)[:, None] * drift * direction / np.linalg.norm(direction)
    return (path + np.sqrt(noise / size) * rng.normal(size=(steps, size))).astype(np.float32)


def test_the_rule_is_its_transcription(rng, x64):
    Z = np.concatenate([walk(rng, 150, 0.0, 1.0), walk(rng, 150, 0.3, 1.0)]).astype(np.float64)
    for rho in (1.0, 0.3):
        got = chosen(Z, 32, 50, rho)
        assert len(set(got.tolist())) >= 3
        np.testing.assert_array_equal(got, transcription(Z, 32, 50, rho))


@pytest.mark.parametrize("rho", [1.0, 0.5, 0.1, 0.01])
def test_the_noise_that_reaches_the_parameters(rng, rho):
    """Against the squared weights of an impulse response; with ρ = 1 it is 1/L, and with L = 1 it is ρ/(2 − ρ)."""
    Z = walk(rng, 40, 0.0, 1.0)
    rule = run_rule(adaptive.init(Adaptive(16), Z[0]), Z)[0]
    lengths = 2 ** np.arange(5)
    share = adaptive.errors(rule, rho)[1] / adaptive.errors(rule)[1][0]
    np.testing.assert_allclose(share, [noise_left(L, rho) for L in lengths], rtol=1e-5)
    np.testing.assert_allclose(share[0], rho / (2 - rho), rtol=1e-5)


def test_small_steps_ask_for_no_window(rng):
    """With ρ L ≪ 1 a window takes hardly any noise out of λ, and no drift is worth it."""
    noise = walk(rng, 300, 0.0, 1.0)
    assert chosen(noise, rho=0.5)[-1] == 32
    assert (chosen(noise, rho=1e-3) <= 8).all()
    assert (chosen(noise, rho=0.0) <= 8).all()


def test_noise_alone_goes_to_the_longest_and_drift_alone_to_one(rng):
    assert (chosen(walk(rng, 300, 0.0, 1.0))[64:] == 32).all()
    assert (chosen(walk(rng, 300, 1.0, 0.0))[32:] == 1).all()
    assert (chosen(np.zeros((300, 40), np.float32)) == 8).all()  # nothing speaks for another length
    assert (chosen(walk(rng, 300, 0.0, 1.0), longest=1) == 1).all()


@pytest.mark.parametrize("drift", [1.0, 0.2, 0.05, 0.02])
def test_planted_drift_and_noise_give_the_best_length_within_a_factor_of_two(rng, drift):
    lengths = np.arange(1, 129)
    best = lengths[np.argmin(((lengths - 1) / 2) ** 2 * drift**2 + 1 / lengths)]
    got = chosen(walk(rng, 600, drift, 1.0, size=60), longest=128)[256:]
    assert (got >= best / 2).all()
    assert (got <= best * 2).all()
    assert (np.diff(got) != 0).sum() <= 4


def test_it_follows_a_change(rng):
    Z = walk(rng, 300, 0.0, 1.0)
    Z[150:] += walk(rng, 150, 0.5, 0.0)
    got = chosen(Z)
    assert got[149] == 32
    assert got[-1] <= 4


def test_the_scale_does_not_matter(rng):
    Z = walk(rng, 300, 0.2, 1.0)
    np.testing.assert_array_equal(chosen(Z), chosen(2.0**20 * Z))
    np.testing.assert_array_equal(chosen(Z), chosen(2.0**-20 * Z))


def test_a_sketch_keeps_squared_distances(rng):
    # Few rows, and numbers, are kept as they are.
    few = {"a": rng.normal(size=(3, 64)), "b": rng.normal(size=5), "c": 1.5, "d": rng.normal(size=(2, 2, 2))}
    few = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), few)
    assert adaptive.sketch(few).shape == (3 * 64 + 5 + 1 + 8,)
    length = sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(few))
    np.testing.assert_allclose(jnp.sum(adaptive.sketch(few) ** 2), length, rtol=1e-5)
    # Many are hashed: each leaf is another hash, and on the average over them nothing is lost or added.
    rows = rng.gamma(0.3, 1, (1000, 3)).astype(np.float32)
    parts = jax.jit(adaptive.sketch)([jnp.asarray(rows)] * 50).reshape(50, 64, 3)
    ratio = np.sum(np.asarray(parts) ** 2, (1, 2)) / np.sum(rows**2)
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / math.sqrt(50)
    assert ratio.std() < 2 * math.sqrt(2 / 64)


def test_a_sketch_hashes_the_longest_axis(rng):
    x = jnp.asarray(rng.normal(size=(4, 500)), jnp.float32)
    np.testing.assert_array_equal(adaptive.sketch(x), adaptive.sketch(x.T))
    bucket = adaptive.bucket_of(np.arange(500, dtype=np.uint32), 500)
    expected = np.zeros((64, 4))
    for w in range(500):
        expected[bucket[w] % 64] += np.asarray(x)[:, w] * (1 if bucket[w] < 64 else -1)
    np.testing.assert_allclose(adaptive.sketch(x).reshape(64, 4), expected, rtol=1e-4, atol=1e-5)
    assert np.bincount(bucket % 64).max() < 25
    assert 180 < (bucket < 64).sum() < 320


def test_what_was_measured_can_be_seen(rng):
    Z = walk(rng, 300, 0.2, 1.0)
    rule = run_rule(adaptive.init(Adaptive(32), Z[0]), Z)[0]
    squared_bias, variance = adaptive.errors(rule)
    lengths = 2.0 ** np.arange(6)
    np.testing.assert_allclose(variance, 1 / lengths, rtol=0.1)
    np.testing.assert_allclose(squared_bias, ((lengths - 1) / 2 * 0.2) ** 2, rtol=0.2, atol=0.05)
    assert adaptive.spec_of(rule) == Adaptive(32, 64)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Adaptive(100), "a power of two"),
        (Adaptive(0), "a power of two"),
        (Adaptive(8.0), "a power of two"),
        (Adaptive(8, 4), "at least the longest window 8"),
        (Adaptive(8, math.inf), "a whole number of steps"),
    ],
)
def test_bad_specifications(spec, message):
    with pytest.raises(ValueError, match=message):
        adaptive.init(spec, jnp.ones(3))


def test_bad_sketches():
    with pytest.raises(ValueError, match="the pytree is empty"):
        adaptive.sketch({})
    with pytest.raises(ValueError, match=r"made for sketches \(3,\), got \(4,\)"):
        adaptive.push(adaptive.init(Adaptive(8), jnp.ones(3)), jnp.ones(4))
