"""One step of smoothed SVI on several devices, as one compiled program, with all rows of λ moved at every step.

A matrix of row-sparse parameters is partitioned by words, and with it the window. All other parameters are replicated.
:mod:`smoothgrad_jax.core.mesh_exchange` says how rows and statistics travel, and defines the letters. Then every device
adds the statistics that it receives, pushes them to its part of the window, and moves its rows.

For large vocabularies see :mod:`smoothgrad_jax.core.row_sparse.mesh`.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import PyTreeDef

from smoothgrad_jax.core import adaptive, compensated, svi
from smoothgrad_jax.core.mesh_exchange import (
    NOT_FINITE,
    REPLICATED,
    Exchange,
    StepOutput,
    are_finite,
    failure_of,
    mean_over_devices,
    sharding,
    step_key,
)
from smoothgrad_jax.core.model import Model, local_step
from smoothgrad_jax.core.row_sparse.kernel import RowKernel
from smoothgrad_jax.core.row_sparse.state import RowSparseState
from smoothgrad_jax.core.svi import SVIState
from smoothgrad_jax.core.types import Array, Numeric, PyTree, Warmup

_BLOCK = 256  # rows that are added before their sum is added to the others


class Hyperparameters(NamedTuple):
    """What stays the same from step to step, on every device.

    Attributes:
      kernel: Of the model; the model itself if it has no row-sparse parameters.
      prior: (η of the matrix, η of the other parameters). A matrix of η is partitioned like λ.
      scale: D/B.
      batch_size: B.
      key: Data of the random key of the run, or None.
    """

    kernel: RowKernel | Model
    prior: tuple[PyTree, PyTree]
    scale: Numeric
    batch_size: Numeric
    key: Array | None


class MeshState(NamedTuple):
    """The state of a run on a mesh: the parts of the devices of this process.

    Attributes:
      num_words: V; 0 if the model has no row-sparse parameters.
      num_devices: P.
      devices: Numbers of the devices in the mesh.
      parts: For each of these devices a :class:`smoothgrad_jax.SVIState` with the words w ≡ device (mod P), or, of rows
        that decay lazily, a :class:`smoothgrad_jax.core.row_sparse.state.RowSparseState` with one partition.
      rule: The rule of an adaptive window, or None.
    """

    num_words: np.ndarray
    num_devices: np.ndarray
    devices: np.ndarray
    parts: tuple[SVIState, ...] | tuple[RowSparseState, ...]
    rule: adaptive.DelayedRule | None


class Program(NamedTuple):
    """What determines a compiled step.

    Attributes:
      exchange: The devices, and how they exchange rows.
      axes: The structure of the state, and per array the axis that is partitioned; from :func:`partitioned_axes`.
      prior_axes: The same for the prior.
      num_words: V; 0 if the model has no row-sparse parameters.
      warmup: See :func:`smoothgrad_jax.core.window.push`.
      is_adaptive: Whether the step returns a sketch.
      key_type: See :func:`smoothgrad_jax.core.mesh_exchange.step_key`.
    """

    exchange: Exchange
    axes: tuple[PyTreeDef, tuple[int, ...]]
    prior_axes: tuple[PyTreeDef, tuple[int, ...]]
    num_words: int
    warmup: Warmup
    is_adaptive: bool
    key_type: str | None


Step: TypeAlias = Callable[..., tuple[SVIState, StepOutput]]


def partitioned_axes(make: Callable[[int], PyTree], num_rows: int) -> PyTree:
    """Return for each array of ``make(number of rows)`` the axis whose length is the number of rows, or REPLICATED.

    Args:
      make: Returns arrays, or ``ShapeDtypeStruct``, for a number of rows.
      num_rows: Any number.
    """

    def axis(x: jax.ShapeDtypeStruct, y: jax.ShapeDtypeStruct) -> int:
        different = (i for i, (m, n) in enumerate(zip(x.shape, y.shape, strict=True)) if m != n)
        return next(different, REPLICATED)

    return jax.tree.map(axis, make(num_rows), make(num_rows + 1))


def flat_axes(axes: PyTree) -> tuple[PyTreeDef, tuple[int, ...]]:
    """Return a tree of axes in a form that can be compared and hashed."""
    leaves, structure = jax.tree.flatten(axes)
    return structure, tuple(leaves)


def shardings(mesh: Mesh, axes: tuple[PyTreeDef, tuple[int, ...]]) -> PyTree:
    """Return the sharding of each array, from :func:`flat_axes`."""
    structure, leaves = axes
    return jax.tree.unflatten(structure, [sharding(mesh, axis) for axis in leaves])


def shard_on(array: jax.Array, device: jax.Device) -> jax.Array:
    """Return the part of an array on a device of this process."""
    return next(shard.data for shard in array.addressable_shards if shard.device == device)


def part_of(state: MeshState, device: int, num_devices: int, axes: SVIState) -> SVIState:
    """Return the part of a device in a mesh of any size, from a state whose parts were divided among another number.

    Args:
      state: The parts of all devices; or, for the same number of devices, at least the part of this one.
      device: Number of the device.
      num_devices: Devices of the mesh.
      axes: The partitioned axis of each array.
    """
    parts, before = parts_by_device(state), int(state.num_devices)
    if num_devices == before and device in parts:
        return parts[device]
    check_complete(state)
    words = np.arange(device, int(state.num_words), num_devices)
    capacity = -(-int(state.num_words) // num_devices)

    def collect(axis: int, *leaves: Array) -> Array:
        if axis == REPLICATED:
            return leaves[0]
        shape = list(leaves[0].shape)
        shape[axis] = capacity
        out = np.zeros(shape, leaves[0].dtype)
        for owner, leaf in enumerate(leaves):
            at = np.flatnonzero(words % before == owner)
            where: list[Any] = [slice(None)] * axis
            out[*where, at] = np.asarray(leaf)[*where, words[at] // before]
        return out

    return jax.tree.map(collect, axes, *(parts[owner] for owner in range(before)))


def parts_by_device(state: MeshState) -> dict[int, PyTree]:
    """Return the parts of a state by the number of their device."""
    return dict(zip(state.devices.tolist(), state.parts, strict=True))


def check_complete(state: MeshState) -> None:
    """Raise an error unless a state holds the parts of all devices."""
    if len(state.parts) < int(state.num_devices):
        raise ValueError(
            f"this state holds {len(state.parts)} of {state.num_devices} parts; only a checkpoint can continue on "
            "other devices"
        )


@lru_cache(maxsize=32)
def compiled_step(program: Program) -> Step:
    """Return the compiled function ``(state, batch, hyperparameters, rho, length) -> (state, output)``.

    ``state.params`` is the pair (matrix, rest). The state is donated. ρ and L are numbers; L may be None.
    """
    mesh = program.exchange.mesh
    by_device, everywhere = sharding(mesh, 0), sharding(mesh)
    state = shardings(mesh, program.axes)
    fixed = Hyperparameters._make((everywhere, shardings(mesh, program.prior_axes), *[everywhere] * 3))
    return jax.jit(
        partial(_step, program),
        in_shardings=(state, by_device, fixed, everywhere, everywhere),
        out_shardings=(state, everywhere),
        donate_argnums=0,
    )


def _step(program, state, batch, fixed, rho, length):
    name, everywhere = program.exchange.name, PartitionSpec()
    by_device = PartitionSpec(name)
    local, matrix = (_fit_rows, by_device) if program.num_words else (_fit_replicated, everywhere)
    fit = jax.shard_map(
        partial(local, program),
        mesh=program.exchange.mesh,
        in_specs=((matrix, everywhere), by_device, everywhere, everywhere, everywhere),
        out_specs=((matrix, everywhere), everywhere),
        check_vma=False,  # a kernel may contain any operation
    )
    numbers, key = (fixed.scale, fixed.batch_size), step_key(fixed.key, program.key_type, state.step)
    stats, output = fit(state.params, batch, fixed.kernel, numbers, key)
    failed = output.failure > 0
    # With ρ = 0 and statistics of 0 the parameters stay the same, to the last bit.
    stats = jax.tree.map(lambda leaf: jnp.where(failed, 0, leaf), stats)
    rho = jnp.where(failed, 0, rho)
    if program.is_adaptive:
        length = output.notices[-1].astype(length.dtype)
    return svi.global_step(state, stats, fixed.prior, rho, length, warmup=program.warmup), output


def _fit_rows(program, params, batch, kernel: RowKernel, numbers, key):
    """Exchange rows, fit the documents of this device, and exchange statistics."""
    (matrix, rest), (scale, batch_size), exchange = params, numbers, program.exchange
    words, documents, size, notices = batch.part()
    wanted, notices = exchange.words(words, notices)
    num_devices, device = exchange.mesh.size, lax.axis_index(exchange.name)
    is_word = jnp.arange(len(matrix)) * num_devices + device < program.num_words
    # END is beyond the last row. Padding needs finite features.
    blocks = matrix.at[wanted].get(mode="fill", fill_value=1)
    rows, sums = exchange.rows(blocks, _column_sums(matrix, is_word, exchange.is_batched))
    total = sums.sum(0, keepdims=True)
    part = documents, size, batch_size
    result = exchange.fit(kernel, rows.reshape(-1, rows.shape[-1]), total, rest, part, key)
    received, totals = exchange.statistics(result, rows.shape)
    # Ŝ_w = (D/B) Σ_d statistics of document d
    stats = jnp.zeros_like(matrix).at[wanted].add(scale.astype(matrix.dtype) * received, mode="drop")
    sketch = lax.psum(_sketch(stats, program, device), exchange.name) if program.is_adaptive else None
    return (stats, result.rest), StepOutput(failure_of(totals, scale), notices, sketch)


def _column_sums(matrix, is_word, is_batched):
    """Return the sum over the rows that are words.

    On a CPU a product of a vector and a matrix adds the rows one after the other, so that in float32 a large sum hardly
    grows by a small row: the result can be wrong by percents. So blocks of rows are added, with compensation.
    """
    if is_batched:  # an accelerator adds by halves
        return jnp.where(is_word[:, None], matrix, 0).sum(0)
    size = min(_BLOCK, len(matrix))

    def add_block(i, sums):
        first = jnp.minimum(i * size, len(matrix) - size)  # the last block repeats rows of the one before it
        is_new = first + jnp.arange(size) >= i * size
        chosen = (lax.dynamic_slice_in_dim(is_word, first, size) & is_new).astype(matrix.dtype)
        total, residue = sums
        return compensated.add(total, residue, chosen @ lax.dynamic_slice_in_dim(matrix, first, size))

    zeros = jnp.zeros(matrix.shape[1], matrix.dtype)
    return lax.fori_loop(0, -(-len(matrix) // size), add_block, (zeros, zeros))[0]


def _sketch(stats, program, device):
    """Return the sketch of the rows of one device; the sum over the devices is that of all rows."""
    words = jnp.arange(len(stats), dtype=jnp.uint32) * program.exchange.mesh.size + device.astype(jnp.uint32)
    # Statistics of padding are 0, and add to any bucket.
    return adaptive.sketch_rows(stats, jnp.minimum(words, program.num_words - 1), program.num_words)


def _fit_replicated(program, params, batch, model, numbers, key):
    """Take the local step on the part of this device, and average the statistics over the devices."""
    del numbers
    exchange = program.exchange
    _, part, _, notices = batch.part()
    stats, _ = local_step(model, params[1], part, key)
    # The same on all devices, as is a failure.
    stats = mean_over_devices(stats, 1 / exchange.mesh.size, exchange.name)
    sketch = adaptive.sketch(stats) if program.is_adaptive else None
    failure = jnp.where(are_finite(stats), 0, NOT_FINITE)
    return (None, stats), StepOutput(failure, lax.pmax(notices, exchange.name), sketch)
