"""The optax door: optax's own common checks, and the same λ as ``global_step``."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smoothgrad_jax import Exponential, averaged_step, global_step, init, natural_gradient, smoothed_svi, window_mean

PARAMS = {"a": jnp.array([1.0, 2.0]), "b": (jnp.ones((2, 3)), None)}


def stats_like(params, rng):
    return jax.tree.map(lambda p: jnp.asarray(rng.gamma(0.5, 3, p.shape), p.dtype), params)


TRANSFORMS = {
    "window_mean": window_mean(3),
    "window_mean, everything": window_mean(math.inf),
    "window_mean, zeros": window_mean(3, warmup="zeros"),
    "window_mean, exponential": window_mean(Exponential(3)),
    "window_mean, bfloat16": window_mean(3, dtype=jnp.bfloat16),
    "window_mean, schedule": window_mean(lambda t: 1 + t % 3, capacity=3),
    "natural_gradient": natural_gradient(0.5),
    "smoothed_svi": smoothed_svi(3, 0.5, 0.1),
    "smoothed_svi, schedule": smoothed_svi(3, 0.5, optax.exponential_decay(0.1, 10, 0.9)),
}


@pytest.fixture(params=TRANSFORMS.values(), ids=TRANSFORMS)
def transform(request):
    return request.param


def test_is_a_transformation_that_ignores_unknown_arguments(transform, rng):
    assert isinstance(transform, optax.GradientTransformationExtraArgs)
    state = transform.init(PARAMS)
    updates = stats_like(PARAMS, rng)
    plain, _ = transform.update(updates, state, PARAMS)
    extra, _ = transform.update(updates, state, PARAMS, loss=1.0, something=None)
    chex.assert_trees_all_equal(plain, extra)


def test_compiles_once_and_keeps_its_shapes(transform, rng):
    traces = []

    @jax.jit
    def update(updates, state, params):
        traces.append(None)
        return transform.update(updates, state, params)

    state = transform.init(PARAMS)
    for _ in range(4):
        updates, new = update(stats_like(PARAMS, rng), state, PARAMS)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, PARAMS)
        state = new
    assert len(traces) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64])
def test_keeps_the_dtype_also_inside_cond(transform, dtype, x64):
    params = {"a": jnp.ones(3, dtype)}
    state = transform.init(params)

    def update(state):
        return transform.update({"a": jnp.ones(3, dtype)}, state, params)

    def skip(state):
        return {"a": jnp.zeros(3, dtype)}, state

    updates, new = jax.jit(lambda state: jax.lax.cond(True, update, skip, state))(state)
    assert updates["a"].dtype == dtype
    chex.assert_trees_all_equal_shapes_and_dtypes(new, state)


def test_map_params_visits_the_state(transform):
    state = transform.init(PARAMS)
    same = optax.tree.map_params(transform, lambda leaf: leaf, state)
    chex.assert_trees_all_equal(same, state)


def test_map_params_reaches_the_ring_and_the_sum():
    transform = window_mean(2)
    state = optax.tree.map_params(transform, lambda leaf: leaf + 1, transform.init(PARAMS))
    np.testing.assert_array_equal(state.window.buffer["a"], 1)
    np.testing.assert_array_equal(state.window.total["a"], 1)
    assert int(state.window.num_pushed) == 0
    assert int(state.step) == 0


def test_window_mean_averages(rng):
    values = [stats_like(PARAMS, rng) for _ in range(7)]
    transform = window_mean(3)
    state = transform.init(PARAMS)
    for t, value in enumerate(values):
        mean, state = transform.update(value, state)
        held = values[max(t - 2, 0) : t + 1]
        chex.assert_trees_all_close(mean, jax.tree.map(lambda *x: sum(x) / len(x), *held), rtol=1e-6)
    assert int(state.step) == 7


@pytest.mark.parametrize("length", [pytest.param(1, marks=pytest.mark.slow), 4, math.inf])
@pytest.mark.parametrize("warmup", ["mean", "zeros"])
def test_same_parameters_as_global_step(length, warmup, rng):
    prior = {"a": 0.5, "b": 0.1}
    params = PARAMS
    optimiser = smoothed_svi(length, prior, 0.2, warmup=warmup)
    opt_state, state = optimiser.init(params), init(PARAMS, length)
    for _ in range(20):
        stats = stats_like(PARAMS, rng)
        updates, opt_state = optimiser.update(stats, opt_state, params)
        params = optax.apply_updates(params, updates)
        state = global_step(state, stats, prior, 0.2, length, warmup=warmup)
        chex.assert_trees_all_close(params, state.params, rtol=2e-6)


def test_the_other_order_averages_gradients(rng):
    """The paper's claim is the order of two lines."""
    smoothed = optax.chain(window_mean(4), natural_gradient(0.1), optax.scale_by_learning_rate(0.3))
    averaged = optax.chain(natural_gradient(0.1), window_mean(4), optax.scale_by_learning_rate(0.3))
    reference = {"smoothed": (smoothed, global_step), "averaged": (averaged, averaged_step)}
    ends = {}
    stats = [stats_like(PARAMS, rng) for _ in range(15)]
    for name, (optimiser, step) in reference.items():
        params, opt_state, state = PARAMS, optimiser.init(PARAMS), init(PARAMS, 4)
        for s in stats:
            updates, opt_state = optimiser.update(s, opt_state, params)
            params = optax.apply_updates(params, updates)
            state = step(state, s, 0.1, 0.3)
        chex.assert_trees_all_close(params, state.params, rtol=1e-5, atol=1e-5)
        ends[name] = params
    assert not np.allclose(ends["smoothed"]["a"], ends["averaged"]["a"], rtol=0.05)


def test_inject_hyperparams_with_a_static_length(rng):
    schedule = optax.exponential_decay(0.3, 5, 0.5)
    injected = optax.inject_hyperparams(smoothed_svi, static_args="length")(length=3, prior=0.5, learning_rate=schedule)
    plain = smoothed_svi(3, 0.5, schedule)
    state, other = jax.jit(injected.init)(PARAMS), plain.init(PARAMS)
    for _ in range(6):
        stats = stats_like(PARAMS, rng)
        a, state = jax.jit(injected.update)(stats, state, PARAMS)
        b, other = plain.update(stats, other, PARAMS)
        chex.assert_trees_all_close(a, b, rtol=1e-6)
    assert float(state.hyperparams["prior"]) == 0.5


def test_inject_hyperparams_with_a_static_capacity(rng):
    injected = optax.inject_hyperparams(window_mean, static_args="capacity")(length=2, capacity=3)
    state = jax.jit(injected.init)(jnp.ones(2))
    for value in (1.0, 2.0, 4.0):
        mean, state = jax.jit(injected.update)(jnp.full(2, value), state)
    np.testing.assert_allclose(mean, 3.0)


def test_masked_and_partitioned(rng):
    """SVI for one part of the parameters, plain descent for the other."""
    params = {"topics": jnp.ones(3), "net": jnp.ones(2)}
    stats = {"topics": jnp.full(3, 4.0), "net": jnp.full(2, 1.0)}
    svi = smoothed_svi(2, 0.5, 0.1)
    expected = {"topics": 1 + 0.1 * (0.5 - 1 + 4), "net": 1 - 0.5}
    masks = {"topics": True, "net": False}
    masked = optax.chain(
        optax.masked(svi, masks),
        optax.masked(optax.sgd(0.5), {"topics": False, "net": True}),
    )
    parts = optax.partition({"svi": svi, "sgd": optax.sgd(0.5)}, {"topics": "svi", "net": "sgd"})
    old = optax.multi_transform({"svi": svi, "sgd": optax.sgd(0.5)}, {"topics": "svi", "net": "sgd"})
    for optimiser in (masked, parts, old):
        updates, _ = jax.jit(optimiser.update)(stats, optimiser.init(params), params)
        new = optax.apply_updates(params, updates)
        for name in params:
            np.testing.assert_allclose(new[name], expected[name], rtol=1e-6)


def test_no_parameters_at_all(transform):
    for params in ({}, {"a": None}):
        updates, _ = transform.update(params, transform.init(params), params)
        assert updates == params
    params = {"a": jnp.ones(2)}
    unused = optax.masked(transform, {"a": False})
    updates, _ = unused.update(params, unused.init(params), params)
    chex.assert_trees_all_equal(updates, params)


def test_masked_with_a_prior_for_every_parameter():
    params = {"topics": jnp.ones(3), "net": jnp.ones(2)}
    optimiser = optax.masked(natural_gradient({"topics": 0.5, "net": 0.1}), {"topics": True, "net": False})
    updates, _ = optimiser.update({"topics": jnp.zeros(3), "net": jnp.zeros(2)}, optimiser.init(params), params)
    np.testing.assert_allclose(updates["topics"], 0.5)
    np.testing.assert_allclose(updates["net"], 0.0)


def test_multi_steps(rng):
    """Two minibatches per step: the window sees their mean."""
    optimiser = optax.MultiSteps(smoothed_svi(2, 0.5, 0.1), every_k_schedule=2)
    params = {"a": jnp.ones(2)}
    state = optimiser.init(params)
    for value in (2.0, 4.0):
        updates, state = jax.jit(optimiser.update)({"a": jnp.full(2, value)}, state, params)
    np.testing.assert_allclose(updates["a"], 0.1 * (0.5 - 1 + 3), rtol=1e-6)


@pytest.mark.parametrize("optimiser", [optax.sgd(0.02), optax.adam(0.02), optax.sgd(0.01, momentum=0.9)])
def test_window_mean_in_front_of_another_optimiser(optimiser):
    """It still finds the minimum of a parabola."""
    optimiser = optax.chain(window_mean(5), optimiser)

    def step(carry, _):
        x, state = carry
        updates, state = optimiser.update(jax.grad(lambda x: jnp.sum((x - 3) ** 2))(x), state, x)
        return (optax.apply_updates(x, updates), state), None

    x = jnp.zeros(2)
    (x, _), _ = jax.lax.scan(step, (x, optimiser.init(x)), length=2000)
    np.testing.assert_allclose(x, 3, atol=1e-3)


def test_sharding_of_the_state_follows_the_parameters():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        params = jax.device_put(jnp.ones((4, 2)), jax.sharding.NamedSharding(mesh, jax.P("x")))
        transform = smoothed_svi(3, 0.5, 0.1)
        state = transform.init(params)
        updates, new = jax.jit(transform.update)(params, state, params)
        assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
        assert jax.typeof(updates) == jax.typeof(params)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="needs a capacity"):
        window_mean(lambda t: t)
    for length in (0, -1, 2.5, math.nan, -math.inf):
        with pytest.raises(ValueError, match="length must be"):
            window_mean(length)
    with pytest.raises(ValueError, match="a schedule or a window kind, got None"):
        window_mean(None)
    with pytest.raises(ValueError, match="static_args='length'"):
        jax.jit(optax.inject_hyperparams(smoothed_svi)(length=3, prior=0.1, learning_rate=0.1).init)(PARAMS)
    with pytest.raises(ValueError, match="belong to the window kind"):
        window_mean(Exponential(3), capacity=3)
    with pytest.raises(ValueError, match='"mean" or "zeros"'):
        window_mean(3, warmup="none")
    with pytest.raises(ValueError, match="capacity 2"):
        window_mean(3, capacity=2)
    with pytest.raises(ValueError, match="a number from 1 on"):
        window_mean(Exponential(0.5))
    with pytest.raises(ValueError, match="natural_gradient needs the parameters"):
        natural_gradient(0.1).update({"a": 1.0}, optax.EmptyState())
