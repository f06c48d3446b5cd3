"""What XLA makes of loops over rows: one function, in place, and the same numbers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import is_one_piece
from jax import lax

from smoothgrad_jax import LDA, Collapsed, Sampled, local_step, log_predictive, pack
from smoothgrad_jax.core.fused_loops import fused, row, set_row
from smoothgrad_jax.models.lda.model import _local_step


def add_rows(arrays, ids, values, holder):
    """Add rows to rows; and the largest of each, with a branch for those above 1."""
    total, largest = arrays
    assert holder.shape == (7, 0)

    def one(i, carry):
        total, largest = carry
        total = set_row(total, ids[i], row(total, ids[i]) + row(values, i))
        high = values[i].max()
        largest = lax.cond(high > 1, lambda x: set_row(x, i, high[None]), lambda x: x, largest)
        return total, largest

    return lax.fori_loop(0, len(ids), one, (total, largest))


@pytest.mark.parametrize("number", [1, 2, 50])
def test_a_fused_loop_is_the_same_function(number, rng):
    ids, values = rng.integers(0, 5_000, number).astype(np.int32), rng.gamma(1, 1, (number, 12)).astype(np.float32)
    expected = np.zeros((5_000, 12), np.float32)
    np.add.at(expected, ids, values)
    program = jax.jit(fused(add_rows), donate_argnums=0)
    arguments = jnp.zeros((5_000, 12)), jnp.zeros(number)
    given = ids, values, np.empty((7, 0), np.float32)
    compiled = program.lower(arguments, *given).compile()
    assert is_one_piece(compiled)
    assert compiled.memory_analysis().temp_size_in_bytes < 5_000  # of 240,000 for the array
    total, largest = program(arguments, *given)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    np.testing.assert_allclose(largest, np.where(values.max(1) > 1, values.max(1), 0))


def test_inputs_of_a_fused_loop_may_be_unused():
    """XLA before jax 0.12 ends the process if a call has an argument without a use."""
    program = jax.jit(fused(lambda x, y, z, u: x + z[:3]))
    np.testing.assert_array_equal(program(jnp.zeros(3), jnp.ones(3), jnp.ones(5), jnp.ones(())), 1)


@pytest.mark.parametrize("num_topics", [1, 2, 100])
@pytest.mark.parametrize("num_docs", [1, 3])
def test_the_local_step_is_one_function(num_topics, num_docs):
    """Whatever the shapes: with one document or topic XLA simplifies a good deal."""
    batch, lam = pack(np.ones((num_docs, 40))), np.ones((40, num_topics), np.float32)
    model = LDA(*np.float32([0.1, 0.1, 9]))
    assert "xla_cpu_small_call" in _local_step.lower(model, lam, batch, None).compile().as_text()
    stats, _ = local_step(model, lam, batch)
    np.testing.assert_allclose(stats.sum(), 9 * 40, rtol=1e-5)
    np.testing.assert_allclose(log_predictive(model, lam, batch, batch), -np.log(40), rtol=1e-5)


@pytest.mark.parametrize(
    ("method", "num_topics", "width"), [(Sampled(), 100, 112), (Sampled(), 1_000, 1_024), (Collapsed(), 100, 112)]
)
def test_no_array_is_copied_per_token(method, num_topics, width):
    """Copies of N or φ for every token made the sampled step a third slower, and CVB0 thirty times."""
    batch, lam = pack(np.ones((5, 40))), np.ones((40, num_topics), np.float32)
    model = LDA(*np.float32([0.1, 0.1, 9]), method=method)
    seed = np.zeros(2, np.uint32) if model.uses_key else None
    text = _local_step.lower(model, lam, batch, seed).compile().as_text()
    # Loops are nested: "while/body/while/body/…". The loop over tokens is the fourth one of the sampled step. A wide N
    # is copied once per sweep, in the third one.
    copies = re.findall(rf"= f32\[\d+,{width}\]\S* copy\(.*op_name=\"(\S+)\"", text)
    assert max((name.count("while/body") for name in copies), default=0) < (4 if num_topics > 500 else 3)
