"""The moving mean: against a plain list of values, and in the compiled program."""

import math
import re
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax

from smoothgrad_jax.core import window
from smoothgrad_jax.core.window import Exponential, Moving


class Reference:
    """All values in a list, summed anew in float64 at every push."""

    def __init__(self, capacity):
        self.capacity, self.values, self.first = capacity, [], 0

    def push(self, value, length, warmup):
        t = len(self.values)
        self.values.append(np.asarray(value, np.float64))
        if self.capacity and length != math.inf:
            self.first = max(self.first, t + 1 - int(length))
        held = self.values[self.first :]
        return np.sum(held, axis=0) / (length if warmup == "zeros" and length != math.inf else len(held))


@partial(jax.jit, static_argnames="warmup")
def push(state, value, length, warmup="mean"):
    return window.push(state, value, length, warmup=warmup)


lengths_of_4 = st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0, math.inf]), min_size=1, max_size=60)


@settings(deadline=None, max_examples=60)
@given(lengths_of_4, st.sampled_from(["mean", "zeros"]), st.integers(0, 2**31 - 1))
def test_exact_mean_of_the_right_values_while_the_length_changes(lengths, warmup, seed):
    rng = np.random.default_rng(seed)
    state, reference = window.init(jnp.zeros(3), 4), Reference(4)
    for length in lengths:
        value = (rng.standard_normal(3) * 10.0 ** rng.integers(-3, 4, 3)).astype(np.float32)
        mean, state = push(state, value, length, warmup=warmup)
        expected = reference.push(value, length, warmup)
        scale = max(np.abs(v).max() for v in reference.values)
        np.testing.assert_allclose(mean, expected, rtol=2e-6, atol=1e-9 * scale)


@pytest.mark.parametrize("warmup", ["mean", "zeros"])
@pytest.mark.parametrize("length", [1, 3, 7])
def test_fixed_length_over_many_turns(length, warmup, rng):
    state, reference = window.init(jnp.zeros(5), 7), Reference(7)
    for _ in range(300):  # more than the 16 turns after which the sum is rebuilt
        value = rng.gamma(0.3, 1, 5).astype(np.float32)
        mean, state = push(state, value, length, warmup=warmup)
        np.testing.assert_allclose(mean, reference.push(value, length, warmup), rtol=3e-7)


def test_length_one_returns_the_value_to_the_last_bit(rng):
    state = window.init(jnp.zeros(100), 3)
    for _ in range(50):
        value = (rng.standard_normal(100) * 10.0 ** rng.integers(-20, 20, 100)).astype(np.float32)
        mean, state = push(state, value, 1)
        np.testing.assert_array_equal(mean, value)


def test_default_length_is_the_capacity():
    state = window.init(0.0, 2)
    for value in (1.0, 2.0, 6.0):
        mean, state = window.push(state, value)
    assert float(mean) == 4.0
    assert state.capacity == 2


@pytest.mark.parametrize("template", [jnp.zeros(2), {"a": jnp.zeros(2), "b": jnp.zeros((), jnp.bfloat16)}])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32])
def test_the_kind_of_a_state_makes_the_same_state(template, dtype):
    state = window.init(template, Moving(3, dtype))
    again = state.kind.init(template)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), again) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )


@pytest.mark.parametrize("capacity", [0, math.inf])
def test_without_a_ring_it_is_the_mean_of_everything(capacity, rng):
    state = window.init(jnp.zeros(4), capacity)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.buffer)) == 0
    values = rng.gamma(1, 1, (500, 4)).astype(np.float32)
    for i, value in enumerate(values):
        mean, state = push(state, value, math.inf, warmup="zeros")
        np.testing.assert_allclose(mean, values[: i + 1].astype(np.float64).mean(0), rtol=3e-7)


def test_infinite_length_with_a_ring_is_the_mean_of_everything_too(rng):
    values = rng.gamma(1, 1, (400, 4)).astype(np.float32)
    state = window.init(jnp.zeros(4), 3)
    for value in values:
        mean, state = push(state, value, math.inf)
    np.testing.assert_allclose(mean, values.astype(np.float64).mean(0), rtol=3e-7)


@pytest.mark.parametrize(("length", "share_of_zeros"), [(1, 0.5), (10, 0.9), (100, 0.99)])
def test_no_drift_in_100_000_pushes(length, share_of_zeros, rng):
    shape = (100_000, 8)
    values = (10 ** rng.uniform(3, 5, shape)).astype(np.float32) * (rng.random(shape) > share_of_zeros)

    @jax.jit
    def run(values):
        return lax.scan(lambda s, v: window.push(s, v, length)[::-1], window.init(values[0], length), values)[1]

    means = np.asarray(run(values.astype(np.float32)), np.float64)
    sums = np.cumsum(values.astype(np.float64), 0)  # exact: all of it fits into 53 bits
    sums[length:] -= sums[:-length].copy()
    truth = sums / np.minimum(np.arange(1, len(values) + 1), length)[:, None]
    assert (truth == 0).any()
    assert (means >= 0).all()
    np.testing.assert_allclose(means, truth, rtol=1e-5, atol=0)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31 - 1), st.integers(1, 5))
def test_non_negative_values_never_give_a_negative_mean(seed, length):
    """Sizes from 1e-12 to 1e12 side by side: here no pair of floats holds the sum, and rounding could go below zero."""
    rng = np.random.default_rng(seed)
    shape = (300, 16)
    values = (10 ** rng.uniform(-12, 12, shape) * (rng.random(shape) > 0.5)).astype(np.float32)
    means = _scan_mean(values, length)
    assert (np.asarray(means) >= 0).all()


@jax.jit
def _scan_mean(values, length):
    return lax.scan(lambda s, v: window.push(s, v, length)[::-1], window.init(values[0], 5), values)[1]


def test_negative_values_are_not_clamped(rng):
    values = rng.standard_normal((50, 4)).astype(np.float32) - 1
    means = np.asarray(_scan_mean(values, 3))
    np.testing.assert_allclose(means[-1], values[-3:].astype(np.float64).mean(0), rtol=1e-6)
    assert (means < 0).any()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_non_finite_value_is_forgotten_when_it_leaves(bad, length):
    state = window.init(jnp.zeros(2), 40)
    for t in range(60):
        mean, state = push(state, np.array([1.0, bad if t == 20 else 3.0], np.float32), length)
        inside = 20 <= t < 20 + length
        assert np.isfinite(mean[1]) == (not inside)
        assert float(mean[0]) == pytest.approx(1)
    np.testing.assert_allclose(mean, [1, 3], rtol=3e-7)


def test_shrinking_to_one_is_exact(rng):
    """The paper's phase-out, with values of very different size."""
    state = window.init(jnp.zeros(1000), 10)
    for length in [10] * 15 + [1, 1, 10, 1, 3, 1]:
        value = rng.gamma(0.1, 1, 1000).astype(np.float32)
        mean, state = push(state, value, length)
        if length == 1:
            np.testing.assert_array_equal(mean, value)


def test_a_value_that_has_left_does_not_return():
    state = window.init(0.0, 8)
    means = []
    for t, length in enumerate([8, 8, 8, 2, 8, 8, math.inf]):
        mean, state = push(state, 2.0**t, length)
        means.append(float(mean))
    assert means == [1, 1.5, pytest.approx(7 / 3), 6, pytest.approx(28 / 3), 15, pytest.approx(24.8)]


def test_bfloat16_slots_subtract_what_they_added(rng):
    values = rng.gamma(1, 1000, (2000, 8)).astype(np.float32)
    state = window.init(values[0], 5, dtype=jnp.bfloat16)
    assert state.buffer.dtype.itemsize == 2
    assert state.total.dtype == jnp.float32
    stored = np.asarray(jnp.asarray(values).astype(jnp.bfloat16).astype(jnp.float32), np.float64)
    run = jax.jit(lambda s, v: lax.scan(lambda s, v: window.push(s, v, 5)[::-1], s, v))
    means = np.asarray(run(state, values)[1])
    assert means.dtype == np.float32
    np.testing.assert_allclose(means[-1], stored[-5:].mean(0), rtol=3e-7)


@pytest.mark.parametrize("warmup", ["mean", "zeros"])
@pytest.mark.parametrize("length", [1, 4, math.inf])
def test_exponential_sibling(length, warmup, rng):
    values = rng.gamma(0.5, 1, (60, 3)).astype(np.float32)
    state = window.init(values[0], Exponential())
    decay = 1.0 if length == math.inf else (length - 1) / (length + 1)
    for t, value in enumerate(values):
        mean, state = push(state, value, length, warmup=warmup)
        weights = decay ** np.arange(t, -1, -1)
        full = weights.sum() if warmup == "mean" or decay == 1 else 1 / (1 - decay)
        np.testing.assert_allclose(mean, weights @ values[: t + 1].astype(np.float64) / full, rtol=2e-6)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == 3 + 1


def test_a_tree_without_leaves():
    state = window.init({"a": None}, 3)
    mean, state = window.push(state, {"a": None})
    assert mean == {"a": None}


def test_integers_have_a_mean():
    state = window.init({"a": 0, "b": jnp.zeros(2, int)}, 3)
    for _ in range(2):
        mean, state = window.push(state, {"a": 0.5, "b": jnp.array([0.75, 2.0])}, 2)
    assert float(mean["a"]) == 0.5
    np.testing.assert_array_equal(mean["b"], [0.75, 2.0])


def test_any_pytree(rng):
    tree = {
        "a": np.float32(1),
        "b": (np.ones((2, 3), np.float16), None),
        "c": [np.arange(3)],
        "d": np.ones(0, np.float32),
    }
    state = window.init(tree, 3)
    mean, state = window.push(state, tree, 2)
    mean, state = window.push(state, jax.tree.map(lambda x: 3 * x, tree), 2)
    assert jax.tree.structure(mean) == jax.tree.structure(tree)
    assert mean["b"][0].dtype == jnp.float16
    assert mean["c"][0].dtype == jnp.float32  # the mean of integers is none
    jax.tree.map(lambda m, x: np.testing.assert_array_equal(m, 2.0 * x), mean, tree)


def test_complex_values():
    state = window.init(jnp.zeros(1, jnp.complex64), 2)
    _, state = window.push(state, np.array([1 + 1j], np.complex64))
    mean, _ = window.push(state, np.array([-3 + 3j], np.complex64))
    np.testing.assert_array_equal(mean, [-1 + 2j])


def test_template_may_be_shapes_only():
    state = window.init(jax.ShapeDtypeStruct((2,), jnp.float32), 1)
    mean, _ = window.push(state, jnp.ones(2))
    np.testing.assert_array_equal(mean, 1)


@pytest.mark.parametrize("length", [0, 4, -1, 1.5, jnp.array(4), np.float32(9)])
def test_a_length_that_cannot_be_served_is_refused(length):
    with pytest.raises(ValueError, match=r"whole number from 1 to the capacity 3.*got"):
        window.push(window.init(0.0, 3), 1.0, length)


def test_a_traced_length_beyond_the_capacity_is_the_capacity():
    state = window.init(0.0, 2)
    for value in (1.0, 2.0, 3.0, 4.0):
        mean, state = push(state, value, 99)
    assert float(mean) == 3.5


def test_other_errors():
    state = window.init(jnp.zeros(3), 2)
    with pytest.raises(ValueError, match=r"shape \(3,\), got \(2,\)"):
        window.push(state, jnp.zeros(2))
    with pytest.raises(ValueError, match="made for values like"):
        window.push(state, (jnp.zeros(3),))
    with pytest.raises(ValueError, match='"mean" or "zeros"'):
        window.push(state, jnp.zeros(3), warmup="none")
    with pytest.raises(ValueError, match="the capacity is 0"):
        window.push(window.init(0.0, 0), 1.0, 5)
    with pytest.raises(ValueError, match="length is missing"):
        window.push(window.init(0.0, Exponential()), 1.0)
    with pytest.raises(ValueError, match="a number from 1 on"):
        window.push(window.init(0.0, Exponential()), 1.0, 0.5)
    with pytest.raises(ValueError, match="floating dtype, got int8"):
        window.init(0.0, 3, dtype=jnp.int8)
    for capacity in (-1, 2.5, 10**12, math.nan):
        with pytest.raises(ValueError, match="capacity must be a whole number"):
            window.init(0.0, capacity)


def test_runs_with_different_lengths_under_vmap_equal_separate_ones(rng):
    values = rng.gamma(0.3, 1, (120, 3, 4)).astype(np.float32)
    lengths = [1.0, 5.0, math.inf]

    def one(values, length):
        return lax.scan(lambda s, v: window.push(s, v, length)[::-1], window.init(values[0], 5), values)[1]

    together = jax.jit(jax.vmap(one, in_axes=(1, 0), out_axes=1))(values, jnp.array(lengths))
    nested = jax.vmap(jax.vmap(one, in_axes=(None, 0)), in_axes=(1, None))(values, jnp.array(lengths))
    for run, length in enumerate(lengths):
        alone = jax.jit(one)(values[:, run], length)
        np.testing.assert_allclose(together[:, run], alone, rtol=1e-6)
        np.testing.assert_allclose(nested[run, run], alone, rtol=1e-6)


# The compiled program: in place, without a copy of the ring.

SLOT, CAPACITY = (400, 64), 20
SLOT_BYTES = 4 * SLOT[0] * SLOT[1]


def whole_ring_copies(compiled, runs=None):
    shape = ",".join(map(str, (*([runs] if runs else []), CAPACITY + 1, *SLOT)))
    return re.findall(rf"\w+\[{shape}\]\S* (?:copy|convert)\(", compiled.as_text())


def assert_in_place(program, arguments, runs=None):
    compiled = jax.jit(program, donate_argnums=0).lower(*arguments).compile()
    assert not whole_ring_copies(compiled, runs)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 2 * SLOT_BYTES * (runs or 1)
    ring = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments[0].buffer))
    assert memory.alias_size_in_bytes >= ring  # the donated ring is the new one


@pytest.fixture(params=[None, jnp.bfloat16, jnp.float16], ids=["float32", "bfloat16", "float16"])
def empty(request):
    return lambda: window.init(jnp.zeros(SLOT), CAPACITY, dtype=request.param)


def test_the_detector_sees_a_copy():
    ring = jnp.zeros((CAPACITY + 1, *SLOT))
    compiled = jax.jit(lambda ring: (ring, ring.at[0].set(1.0))).lower(ring).compile()
    assert whole_ring_copies(compiled)


def test_in_place_in_jit(empty):
    assert_in_place(window.push, (empty(), jnp.zeros(SLOT), 7))


def test_in_place_in_scan(empty):
    def program(state, values, length):
        return lax.scan(lambda s, v: window.push(s, v, length)[::-1], state, values)

    assert_in_place(program, (empty(), jnp.zeros((9, *SLOT)), 7))


@pytest.mark.parametrize(
    "axes", [Moving(0).vmap_axes(), Moving(0).vmap_axes()._replace(num_pushed=0)], ids=["one clock", "own clocks"]
)
def test_in_place_under_vmap_over_lengths(axes, empty):
    lengths = jnp.array([1, 3, 10, 20])
    states = jax.vmap(lambda _: empty(), out_axes=axes)(lengths)
    program = jax.vmap(window.push, in_axes=(axes, 0, 0), out_axes=(0, axes))
    assert_in_place(program, (states, jnp.zeros((4, *SLOT)), lengths), runs=4)


def test_in_place_in_scan_under_vmap(empty):
    def one(state, values, length):
        return lax.scan(lambda s, v: window.push(s, v, length)[::-1], state, values)

    axes = Moving(0).vmap_axes()
    lengths = jnp.array([1, 3, 10, 20])
    states = jax.vmap(lambda _: empty(), out_axes=axes)(lengths)
    program = jax.vmap(one, in_axes=(axes, None, 0), out_axes=(axes, 1))  # [T, runs, ...], as scan stacks them
    assert_in_place(program, (states, jnp.zeros((9, *SLOT)), lengths), runs=4)


def test_the_ring_is_written_with_dynamic_update_slice():
    jaxpr = str(jax.make_jaxpr(window.push)(window.init(jnp.zeros(3), 2), jnp.zeros(3), 2))
    assert "dynamic_update_slice" in jaxpr
    assert "scatter" not in jaxpr


def test_small_negative_values_in_float64(x64):
    mean, _ = window.push(window.init(jnp.zeros(1), 3), jnp.array([-1e-50]), 1)
    assert float(mean[0]) == -1e-50


def test_float64(x64, rng):
    values = rng.gamma(0.3, 1, (100, 4))
    state = window.init(values[0], 6)
    for t, value in enumerate(values):
        mean, state = push(state, value, 6)
        np.testing.assert_allclose(mean, values[max(t - 5, 0) : t + 1].mean(0), rtol=1e-14)
    together = jax.vmap(push, in_axes=(None, None, 0))(state, values[0], jnp.array([1, 5]))[0]
    np.testing.assert_allclose(together, [values[0], (values[-4:].sum(0) + values[0]) / 5], rtol=1e-14)
