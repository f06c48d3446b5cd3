"""One step of smoothed SVI on several devices, as one compiled program.

The devices may belong to several processes. The documents of a minibatch are divided among the devices. A matrix of
row-sparse parameters is partitioned by words, and with it the window: word w is row w // P of device w mod P. All other
parameters are replicated. A step exchanges only the rows of the words that the minibatch contains:

    1. every device sends the numbers of the rows that its documents need to the devices that have them;
    2. these devices send the rows back;
    3. every device fits its documents, and sends the statistics of each row to the device that has it;
    4. every device adds the statistics that it receives, pushes them to its part of the window, and moves its rows.

| letter | name      | shape      | meaning                                                                       |
|--------|-----------|------------|-------------------------------------------------------------------------------|
| P      |           |            | devices of the mesh, which has one axis                                       |
| R      |           |            | rows per device, ⌈V/P⌉; the last row of a device may be padding               |
| λ      | ``matrix``| [P · R, C] | row-sparse parameters; None if the model has none                             |
| U      |           |            | capacity for the words that the documents of one device need of one device    |
| T      | ``total`` | [1, C]     | column sums of λ                                                              |
|        | ``rest``  |            | all other parameters                                                          |

The exchange is an all-to-all and a sum; a reduce-scatter is slower on CPU, and was wrong in some versions of jax
(jax#40830). Each device adds in the order of the devices, so that the same P gives the same bits.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from smoothgrad_jax.core import adaptive, compensated, svi
from smoothgrad_jax.core.fused_loops import fused, row, set_row
from smoothgrad_jax.core.row_sparse.kernel import RowKernel
from smoothgrad_jax.core.svi import SVIState
from smoothgrad_jax.core.types import Array, Numeric, PyTree, Warmup
from smoothgrad_jax.core.window import Window

REPLICATED = -1  # the axis of an array that every device has completely
_BLOCK = 256  # rows that are added before their sum is added to the others
NOT_FINITE, NEGATIVE = 1, 2  # what is wrong with the statistics of a step; 0 for nothing


class MeshBatch(NamedTuple):
    """A minibatch divided among the devices: every array has a leading axis P.

    Attributes:
      words: [P, P, U]; entry [d, s] holds the rows that device d needs of device s, increasing, then END. None if the
        model has no row-sparse parameters.
      batch: The documents of each device, with words as positions in [P · U]; or parts of another batch.
      sizes: [P] numbers of documents; the arrays of ``batch`` may hold more, which are empty.
      notices: [P, N] int32, of which a step returns the maximum over the devices. The last one is the length of an
        adaptive window, which processes may round differently.
    """

    words: Any
    batch: Any
    sizes: Any
    notices: Any


class Hyperparameters(NamedTuple):
    """What stays the same from step to step, on every device.

    Attributes:
      kernel: A :class:`RowKernel`; the model itself if it has no row-sparse parameters.
      prior: (η of the matrix, η of the other parameters). A matrix of η is partitioned like λ.
      scale: D/B.
      batch_size: B.
      key: Data of the random key of the run, or None.
    """

    kernel: Any
    prior: PyTree
    scale: Numeric
    batch_size: Numeric
    key: Any


class StepOutput(NamedTuple):
    """What a step returns besides the state, on every device.

    Attributes:
      failure: 0, NOT_FINITE or NEGATIVE; if not 0, the parameters did not change.
      notices: [N], the maximum over the devices.
      sketch: Sketch of the statistics; None unless the window is adaptive.
    """

    failure: Array
    notices: Array
    sketch: Any


class MeshState(NamedTuple):
    """The state of a run on a mesh: the parts of the devices of this process.

    Attributes:
      num_words: V; 0 if the model has no row-sparse parameters.
      num_devices: P.
      devices: Numbers of the devices in the mesh.
      parts: For each of these devices a :class:`smoothgrad_jax.SVIState` with the words w ≡ device (mod P).
      rule: The rule of an adaptive window, or None.
    """

    num_words: np.ndarray
    num_devices: np.ndarray
    devices: np.ndarray
    parts: tuple[SVIState, ...]
    rule: adaptive.DelayedRule | None


class Program(NamedTuple):
    """What determines a compiled step.

    Attributes:
      mesh: The devices.
      axes: The structure of the state, and per array the axis that is partitioned; from :func:`partitioned_axes`.
      prior_axes: The same for the prior.
      num_words: V; 0 if the model has no row-sparse parameters.
      warmup: See :func:`smoothgrad_jax.core.window.push`.
      is_adaptive: Whether the step returns a sketch.
      is_batched: Whether the model takes its local step for accelerators.
      key_type: The implementation of a typed random key; None for no key, or one that is an array of numbers.
    """

    mesh: Mesh
    axes: tuple[Any, tuple[int, ...]]
    prior_axes: tuple[Any, tuple[int, ...]]
    num_words: int
    warmup: Warmup
    is_adaptive: bool
    is_batched: bool
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


def state_shapes(matrix: PyTree, rest: PyTree, kind: Window) -> SVIState:
    """Return the shapes of the state for a matrix of this shape, or None, and the other parameters."""
    return jax.eval_shape(lambda params: svi.init(params, kind), (matrix, rest))


def flat_axes(axes: PyTree) -> tuple[Any, tuple[int, ...]]:
    """Return a tree of axes in a form that can be compared and hashed."""
    leaves, structure = jax.tree.flatten(axes)
    return structure, tuple(leaves)


def shardings(mesh: Mesh, axes: tuple[Any, tuple[int, ...]]) -> PyTree:
    """Return the sharding of each array, from :func:`flat_axes`."""
    structure, leaves = axes
    return jax.tree.unflatten(structure, [sharding(mesh, axis) for axis in leaves])


def sharding(mesh: Mesh, axis: int = REPLICATED) -> NamedSharding:
    """Return the sharding of an array with one partitioned axis, or of a replicated one."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, *([] if axis == REPLICATED else mesh.axis_names)))


def part_of(state: MeshState, device: int, num_devices: int, axes: SVIState) -> SVIState:
    """Return the part of a device in a mesh of any size, from a state whose parts were divided among another number.

    Args:
      state: The parts of all devices; or, for the same number of devices, at least the part of this one.
      device: Number of the device.
      num_devices: Devices of the mesh.
      axes: The partitioned axis of each array.
    """
    parts = dict(zip(state.devices.tolist(), state.parts, strict=True))
    before = int(state.num_devices)
    if num_devices == before and device in parts:
        return parts[device]
    if len(parts) < before:
        raise ValueError(
            f"this state holds {len(parts)} of {before} parts; only a checkpoint can continue on other devices"
        )
    words = np.arange(device, int(state.num_words), num_devices)
    capacity = -(-int(state.num_words) // num_devices)

    def collect(axis: int, *leaves: Any) -> Any:
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


@lru_cache(maxsize=32)
def compiled_step(program: Program) -> Step:
    """Return the compiled function ``(state, batch, hyperparameters, rho, length) -> (state, output)``.

    ``state.params`` is the pair (matrix, rest). The state is donated. ρ and L are numbers; L may be None.
    """
    by_device, everywhere = sharding(program.mesh, 0), sharding(program.mesh)
    state = shardings(program.mesh, program.axes)
    fixed = Hyperparameters(everywhere, shardings(program.mesh, program.prior_axes), *[everywhere] * 3)
    return jax.jit(
        partial(_step, program),
        in_shardings=(state, by_device, fixed, everywhere, everywhere),
        out_shardings=(state, everywhere),
        donate_argnums=0,
    )


def _step(program, state, batch, fixed, rho, length):
    name = program.mesh.axis_names[0]
    key = fixed.key if program.key_type is None else jax.random.wrap_key_data(fixed.key, impl=program.key_type)
    key = None if key is None else jax.random.fold_in(key, state.step)
    local = _fit_rows if program.num_words else _fit_replicated
    matrix = PartitionSpec(name) if program.num_words else PartitionSpec()
    fit = jax.shard_map(
        partial(local, program),
        mesh=program.mesh,
        in_specs=((matrix, PartitionSpec()), PartitionSpec(name), PartitionSpec(), PartitionSpec(), PartitionSpec()),
        out_specs=((matrix, PartitionSpec()), PartitionSpec()),
        check_vma=False,  # a kernel may contain any operation
    )
    numbers = fixed.scale, fixed.batch_size
    stats, output = fit(state.params, batch, fixed.kernel, numbers, key)
    failed = output.failure > 0
    # With ρ = 0 and statistics of 0 the parameters stay the same, to the last bit.
    stats = jax.tree.map(lambda leaf: jnp.where(failed, 0, leaf), stats)
    rho = jnp.where(failed, 0, rho)
    if program.is_adaptive:
        length = output.notices[-1].astype(length.dtype)
    return svi.global_step(state, stats, fixed.prior, rho, length, warmup=program.warmup), output


def _fit_rows(program, params, batch, kernel: RowKernel, numbers, key):
    """Exchange rows, fit the documents of this device, and exchange statistics.

    A small exchange takes a tenth of a millisecond, so there are only three: the notices travel with the numbers of the
    rows, the column sums with the rows, and a failure with the statistics. The last two use the last row of each block,
    which is padding.
    """
    (matrix, rest), (scale, batch_size) = params, numbers
    name, num_devices, columns = program.mesh.axis_names[0], program.mesh.size, matrix.shape[1]
    words, documents, size, notices = jax.tree.map(lambda leaf: leaf[0], batch)
    capacity = words.shape[1]

    def exchange(blocks):
        """Send the d-th block to device d."""
        return lax.all_to_all(blocks, name, 0, 0)

    everywhere = jnp.broadcast_to(notices, (num_devices, len(notices)))
    received = exchange(jnp.concatenate([words, everywhere], 1))
    wanted, notices = received[:, :capacity], received[:, capacity:].max(0)  # rows of this device, per device
    is_word = jnp.arange(len(matrix)) * num_devices + lax.axis_index(name) < program.num_words
    # END is beyond the last row. Padding needs finite features.
    sums = _column_sums(matrix, is_word, program.is_batched)
    rows = matrix.at[wanted].get(mode="fill", fill_value=1).at[:, -1].set(sums)
    rows = exchange(rows)
    total, rows = rows[:, -1].sum(0, keepdims=True), rows.reshape(-1, columns)
    scratch = jnp.zeros((len(rows), kernel.width()), matrix.dtype)
    if program.is_batched:
        features = kernel.features(rows, kernel.normalisers(total))
    else:
        features = _features_by_row(scratch, rows, total, kernel)
    result = kernel.fit((features,), total, rest, documents, (jnp.int32(0), size), scratch, key)
    rest_stats = _mean_over_devices(result.rest, documents.size / batch_size, name)
    is_finite = _are_finite((num_devices * scale * result.total, rest_stats))
    failure = jnp.where(jnp.isneginf(result.total).any(), NEGATIVE, jnp.where(is_finite, 0, NOT_FINITE))
    sums = result.sums[:, :columns].reshape(num_devices, capacity, columns)
    sums = exchange(sums.at[:, -1, 0].set(failure.astype(matrix.dtype)))
    failure = sums[:, -1, 0].max().astype(jnp.int32)
    # Ŝ_w = (D/B) Σ_d statistics of document d
    stats = jnp.zeros_like(matrix).at[wanted].add(scale.astype(matrix.dtype) * sums, mode="drop")
    sketch = None
    if program.is_adaptive:
        sketch = lax.psum(_sketch(stats, program, lax.axis_index(name)), name)
    return (stats, rest_stats), StepOutput(failure, notices, sketch)


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


@fused
def _features_by_row(out, rows, total, kernel):
    """Compute the features row by row, which is faster on a CPU than all rows together."""
    normalisers = kernel.normalisers(total)

    def compute(i, out):
        return set_row(out, i, kernel.features(row(rows, i), normalisers))

    return lax.fori_loop(0, len(rows), compute, out)


def _sketch(stats, program, device):
    """Return the sketch of the rows of one device; the sum over the devices is that of all rows."""
    bucket, num_buckets = adaptive.hash_buckets(program.num_words)
    num_devices = program.mesh.size
    padded = jnp.pad(jnp.asarray(bucket), (0, len(stats) * num_devices - len(bucket)))  # padding adds zeros to bucket 0
    mine = lax.dynamic_index_in_dim(padded.reshape(len(stats), num_devices), device, 1, keepdims=False)
    return adaptive.sum_buckets(jnp.zeros((2 * num_buckets, stats.shape[1]), stats.dtype), stats, mine).ravel()


def _fit_replicated(program, params, batch, model, numbers, key):
    """Take the local step on the part of this device, and average the statistics over the devices."""
    del numbers
    name = program.mesh.axis_names[0]
    _, part, _, notices = jax.tree.map(lambda leaf: leaf[0], batch)
    stats, _ = model.local_step(params[1], part, key)
    stats = _mean_over_devices(stats, 1 / program.mesh.size, name)  # the same on all devices, as is a failure
    sketch = adaptive.sketch(stats) if program.is_adaptive else None
    failure = jnp.where(_are_finite(stats), 0, NOT_FINITE)
    return (None, stats), StepOutput(failure, lax.pmax(notices, name), sketch)


def _mean_over_devices(stats, fraction, name):
    """Return the sum over the devices of statistics that each device scaled from its documents to all of the data."""
    return jax.tree.map(lambda leaf: lax.psum((leaf * fraction).astype(leaf.dtype), name), stats)


def _are_finite(tree):
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()
