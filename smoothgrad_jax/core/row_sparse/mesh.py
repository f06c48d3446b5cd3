"""One step of row-sparse smoothed SVI on several devices, as one compiled program.

A device has the rows of the words w with w mod P = device, as a thread has in
:mod:`smoothgrad_jax.core.row_sparse.step`, and its rows decay lazily in the same way: a step costs O(rows that the
minibatch of all devices needs of this one), and not O(V/P). :mod:`smoothgrad_jax.core.mesh_exchange` says how rows and
statistics travel, and defines P, R, U and T. In one step a device

    1. learns which of its rows the documents of all devices need, and merges these lists into one;
    2. removes what left the window, adds the statistics of the last step, and advances the rows that are needed;
    3. sends them out, fits its documents, and adds up the statistics that come back for its rows.

| letter | name           | shape         | meaning                                                              |
|--------|----------------|---------------|----------------------------------------------------------------------|
|        | ``partitions`` | [P · R, 3C+4] | λ, Σ, δ and clocks of all rows                                       |
| M      |                |               | capacity for the rows that all devices need of one, at most R        |
|        | ``words``      | [P, M]        | for each device the rows of a minibatch, increasing, then END        |

The state is a :class:`smoothgrad_jax.core.row_sparse.state.RowSparseState` with one partition, whose arrays belong to
all devices of the mesh. The part of one device is such a state too: :func:`part_of` and :func:`join_parts` convert.
Checkpoints hold parts, so that any number of devices can continue.

The column sums obey the recursion of a row, so a step does not add up all rows. Clocks, and the choice of what leaves
the window, are numbers that every process computes by itself, in float64.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from smoothgrad_jax.core import adaptive, svi
from smoothgrad_jax.core.fused_loops import fused, row, set_row
from smoothgrad_jax.core.mesh_exchange import (
    REPLICATED,
    Exchange,
    PackedArrays,
    StepOutput,
    failure_of,
    sharding,
    step_key,
)
from smoothgrad_jax.core.mesh_step import Hyperparameters, shard_on
from smoothgrad_jax.core.row_sparse import slots
from smoothgrad_jax.core.row_sparse.decay import advance_rows, num_columns, split_clock
from smoothgrad_jax.core.row_sparse.program import (
    Clocks,
    Entering,
    Leaving,
    RowUpdate,
    clocks_of,
    merge_and_update,
    remove_rows,
)
from smoothgrad_jax.core.row_sparse.state import (
    END,
    EnteringStatistics,
    RowSparseState,
    WindowSlot,
    Workspace,
    append_columns,
    first_state,
)
from smoothgrad_jax.core.types import Array, Numeric, PyTree, Warmup
from smoothgrad_jax.core.window import Window

_LOCAL = -2  # in the place of an axis: NumPy arrays, which are the same in every process


class RowProgram(NamedTuple):
    """What determines the compiled programs of a run.

    Attributes:
      exchange: The devices, and how they exchange rows.
      num_words: V.
      has_row_prior: Whether η differs from row to row.
      warmup: See :func:`smoothgrad_jax.core.window.push`.
      slot_dtype: Dtype in which the window stores values.
      is_adaptive: Whether the step returns a sketch.
      key_type: See :func:`smoothgrad_jax.core.mesh_exchange.step_key`.
    """

    exchange: Exchange
    num_words: int
    has_row_prior: bool
    warmup: Warmup
    slot_dtype: np.dtype
    is_adaptive: bool
    key_type: str | None

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.exchange.mesh


class _Change(NamedTuple):
    """What changes rows before a minibatch reads them: statistics that leave the window, and that enter it.

    Attributes:
      leaving, entering: The statistics.
      left: [C], the sum over words of all that leaves.
      clocks: When they left and entered, and the clock of the minibatch.
    """

    leaving: WindowSlot
    entering: EnteringStatistics
    left: Array
    clocks: Clocks


class _Changed(NamedTuple):
    """Rows, column sums, and the slot with the values that entered, after a change."""

    rows: Array
    total: Array
    values: slots.Slot
    entered: Array


class _RowsAsFeatures(NamedTuple):
    """Features that are the rows themselves: the device that fits the documents computes those of the model."""

    def normalisers(self, totals):
        del totals
        return ()

    def features(self, rows, normalisers):
        del normalisers
        return rows


def init_mesh_rows(matrix: Array, total: Array, *, infinite: bool, rest: PyTree, mesh: Mesh) -> RowSparseState:
    """Return the state before the first step.

    Args:
      matrix: λ [P · R, C], partitioned.
      total: T [1, C].
      infinite: Whether L = ∞ at every step; the state then stores no slots.
      rest: SVI state of the dense leaves.
      mesh: The devices.
    """
    rows, sums = _appended(mesh)((matrix, total))
    return first_state((rows,), (sums,), infinite=infinite, rest=rest)


def start_step(
    program: RowProgram,
    state: RowSparseState,
    batch: PackedArrays,
    fixed: Hyperparameters,
    rho: Numeric,
    length: Numeric,
    workspace: Workspace,
) -> tuple[RowSparseState, EnteringStatistics, StepOutput]:
    """Start a step: change the rows by what left and entered the window with the last step, and fit the minibatch.

    Args:
      program: Of the run.
      state: The state; its arrays are donated.
      batch: A :class:`smoothgrad_jax.core.mesh_exchange.MeshPart` per device.
      fixed: Hyperparameters; η of the matrix is a pair: η of the rows [P · R or 1, C or 1], and Σ_w η_w [1, C or 1].
      rho: ρ, for the dense leaves.
      length: L, for the dense leaves; an adaptive window has it in the notices.
      workspace: Scratch memory of the run.

    Returns:
      The state for :func:`smoothgrad_jax.core.row_sparse.step.end_step`, or for :func:`restart` if the step fails; the
      statistics of the minibatch; and what all devices learned. All of them may be in progress.
    """
    capacity = _capacity(batch.shapes().words.shape, state.num_words)
    state, memory, change = _prepare(program, state, fixed, capacity, workspace)
    numbers = (np.asarray(state.step, np.uint32), rho, length)
    changed, rest, (words, sums, total), output = compiled_step(program, capacity)(
        state.partitions[0], memory, state.totals[0], state.rest, change, batch, fixed, numbers
    )
    entering = EnteringStatistics(words, (sums,), np.asarray(fixed.scale, np.float64), (total,))
    return _store(state, changed, workspace)._replace(rest=rest), entering, output


def flush(program: RowProgram, state: RowSparseState, fixed: Hyperparameters, workspace: Workspace) -> RowSparseState:
    """Apply the statistics that are about to enter or leave, and advance every row to the clock, in O(V/P).

    Afterwards another prior may hold. The arrays of the state are donated.
    """
    if state.entering is not None:  # otherwise nothing leaves either
        capacity = state.entering.words.shape[1]
        state, memory, change = _prepare(program, state, fixed, capacity, workspace)
        eta, _ = fixed.prior
        changed = _compiled_change(program, capacity)(state.partitions[0], memory, state.totals[0], change, eta)
        state = _store(state, changed, workspace)
    return _advance_all(program, state, fixed)


def restart(program: RowProgram, state: RowSparseState, fixed: Hyperparameters) -> RowSparseState:
    """Return the state before a step that failed, with an empty window; from the first result of :func:`start_step`."""
    columns, rest = state.num_columns, state.rest
    rest = None if rest is None else begin_rest(rest.params, rest.window.kind, program.mesh)
    state = _advance_all(program, state, fixed)
    rows, total = state.partitions[0][:, :columns], state.totals[0][:, :columns]
    fresh = init_mesh_rows(rows, total, infinite=state.slots is None, rest=rest, mesh=program.mesh)
    return fresh._replace(step=state.step)


def _advance_all(program, state, fixed):
    clock = split_clock(state.clock, state.dtype)
    rows, total = _compiled_advance(program)(state.partitions[0], state.totals[0], clock, fixed.prior[0])
    return state._replace(partitions=(rows,), totals=(total,))


def begin_rest(params: PyTree, kind: Window, mesh: Mesh) -> PyTree:
    """Return the SVI state of the dense leaves before the first step, on every device."""
    return jax.jit(lambda params: svi.init(params, kind), out_shardings=sharding(mesh))(params)


def part_of(state: RowSparseState, device: jax.Device) -> RowSparseState:
    """Return the part of one device of this process; copies only lists of words."""

    def readable(slot: WindowSlot) -> WindowSlot:
        return slot._replace(words=np.asarray(slot.words))

    part = jax.tree.map(lambda leaf: leaf if isinstance(leaf, np.ndarray) else shard_on(leaf, device), state)
    entering = part.entering
    return part._replace(
        slots=None if part.slots is None else tuple(map(readable, part.slots)),
        leaving=tuple(map(readable, part.leaving)),
        entering=None if entering is None else entering._replace(words=np.asarray(entering.words)),
    )


def join_parts(parts: Sequence[RowSparseState], join: Callable[[int, Sequence[Array]], Array]) -> RowSparseState:
    """Return the state whose parts on the devices of this process are given; the inverse of :func:`part_of`.

    Args:
      parts: For each device of this process a state with one partition.
      join: ``join(axis, arrays)`` makes an array of all devices, partitioned along an axis or REPLICATED, from one
        array per device of this process.
    """
    first, slot = parts[0], WindowSlot._make((0, 0, REPLICATED))
    axes = {
        "partitions": 0,
        "totals": REPLICATED,
        "slots": None if first.slots is None else (slot,) * len(first.slots),
        "leaving": (slot,) * len(first.leaving),
        "entering": None if first.entering is None else EnteringStatistics._make((0, 0, _LOCAL, REPLICATED)),
        "rest": REPLICATED,
    }

    def join_trees(axis: int, *trees: PyTree) -> PyTree:
        if axis == _LOCAL:
            return trees[0]
        return jax.tree.map(lambda *leaves: join(axis, leaves), *trees)

    joined = {name: jax.tree.map(join_trees, axis, *(getattr(p, name) for p in parts)) for name, axis in axes.items()}
    return first._replace(**joined)


def _capacity(shape, num_rows):
    """Return M for lists of words [P, U]: as many rows as all devices can need of one, and at least one END."""
    num_devices, capacity = shape
    return -(-(min(num_devices * capacity, num_rows // num_devices) + 1) // 16) * 16


def _prepare(program, state, fixed, capacity, workspace):
    """Remove all slots that leave but the last; return the state, memory for a slot, and the change of the rows."""
    mesh, columns, dtype, clocks = program.mesh, state.num_columns, state.dtype, clocks_of(state)
    entering = state.entering or _no_statistics(mesh, capacity, columns, dtype)
    rows, leaving = state.partitions[0], state.leaving or (_no_slot(program, capacity, columns, dtype),)
    for slot in leaving[:-1]:
        remove = _compiled_removal(program)
        rows = remove(rows, state.totals[0], slot.values[0], slot.words, clocks.previous, fixed.prior[0][0])
    left = sum((slot.total for slot in leaving[1:]), leaving[0].total)
    shape = (mesh.size * entering.words.shape[1], columns)
    if not workspace.slots or workspace.slots[0][0].shape != shape:
        workspace.slots = (_empty_values(program, *shape),)
    change = _Change(leaving[-1], entering._replace(scale=entering.scale.astype(dtype)), left, clocks)
    return state._replace(partitions=(rows,)), workspace.slots[0], change


def _store(state, changed, workspace):
    """Return the state after a change: the slot is in the window, and memory of what left is free."""
    rows, total, values, entered = changed
    held, workspace.slots = state.slots, (values,)
    if state.entering is not None and held is not None:
        held = (*held, WindowSlot(state.entering.words, (values,), entered))
        workspace.slots = state.leaving[-1].values if state.leaving else ()
    return state._replace(partitions=(rows,), totals=(total,), slots=held, leaving=(), entering=None)


def _filled(mesh, shape, value, dtype):
    """Return an array of one value, partitioned along the first axis; nothing is exchanged or compiled."""
    part = (shape[0] // mesh.size, *shape[1:])
    return jax.make_array_from_callback(shape, sharding(mesh, 0), lambda _: np.full(part, value, dtype))


def _everywhere(mesh, array):
    return jax.make_array_from_callback(array.shape, sharding(mesh), lambda _: array)


def _no_statistics(mesh, capacity, columns, dtype):
    words = _filled(mesh, (mesh.size, capacity), END, np.int32)
    sums = _filled(mesh, (mesh.size * capacity, columns), 0, dtype)
    return EnteringStatistics(words, (sums,), np.zeros(()), (_everywhere(mesh, np.zeros(columns, dtype)),))


def _no_slot(program, capacity, columns, dtype):
    mesh = program.mesh
    words = _filled(mesh, (mesh.size, 1), END, np.int32)
    values, total = _empty_values(program, mesh.size, columns), _everywhere(mesh, np.zeros(columns, dtype))
    return WindowSlot(words, (values,), total)


def _empty_values(program, num_rows, columns):
    """Return a slot of zeros [P · M, C]; as :func:`smoothgrad_jax.core.row_sparse.slots.empty`."""
    values = _filled(program.mesh, (num_rows, columns), 0, program.slot_dtype)
    is_bytes = program.slot_dtype == np.uint8
    return (values, _filled(program.mesh, (num_rows,), 0, np.float32)) if is_bytes else (values,)


@lru_cache(maxsize=8)
def _appended(mesh):
    """Return :func:`append_columns` for λ and its column sums."""
    return jax.jit(partial(jax.tree.map, append_columns), out_shardings=(sharding(mesh, 0), sharding(mesh)))


class _Specs(NamedTuple):
    """The partitioned axes of the arguments of a program."""

    device: PartitionSpec
    everywhere: PartitionSpec
    change: _Change
    eta: tuple[PartitionSpec, PartitionSpec]


def _specs(program: RowProgram) -> _Specs:
    device, everywhere = PartitionSpec(program.exchange.name), PartitionSpec()
    leaving = WindowSlot._make((device, device, everywhere))
    entering = EnteringStatistics._make((device, device, everywhere, everywhere))
    change = _Change._make((leaving, entering, everywhere, everywhere))
    return _Specs(device, everywhere, change, (device if program.has_row_prior else everywhere, everywhere))


def _compile(program, function, in_specs, out_specs, donated):
    """Return a function of the parts of a device as a compiled function of arrays of all devices."""
    mapped = jax.shard_map(
        function, mesh=program.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )  # check_vma: a kernel may contain any operation
    by_spec = {spec: jax.sharding.NamedSharding(program.mesh, spec) for spec in _specs(program)[:2]}
    shardings = [
        jax.tree.map(by_spec.__getitem__, specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
        for specs in (in_specs, out_specs)
    ]
    return jax.jit(mapped, in_shardings=shardings[0], out_shardings=shardings[1], donate_argnums=donated)


@lru_cache(maxsize=32)
def compiled_step(program: RowProgram, capacity: int) -> Callable[..., Any]:
    """Return the compiled program of a step for M rows per device."""
    device, everywhere, change, eta = _specs(program)
    fixed = Hyperparameters._make((everywhere, (eta, everywhere), *[everywhere] * 3))
    changed = _Changed._make((device, everywhere, device, everywhere))
    return _compile(
        program,
        partial(_step, program, capacity),
        (device, device, everywhere, everywhere, change, device, fixed, everywhere),
        (changed, everywhere, (device, device, everywhere), everywhere),
        (0, 1, 3),
    )


@lru_cache(maxsize=8)
def _compiled_change(program, capacity):
    device, everywhere, change, eta = _specs(program)

    def function(rows, memory, total, change, eta):
        used = jnp.full(capacity, END, jnp.int32)
        return _change_rows(rows, memory, total, change, used, eta)[0]

    out = _Changed._make((device, everywhere, device, everywhere))
    return _compile(program, function, (device, device, everywhere, change, eta), out, (0, 1))


@lru_cache(maxsize=8)
def _compiled_removal(program):
    device, everywhere, _, eta = _specs(program)

    def function(rows, total, values, words, clock, eta):
        return remove_rows(rows, total, values, words[0], clock, eta)

    return _compile(program, function, (device, everywhere, device, device, everywhere, eta[0]), device, 0)


@lru_cache(maxsize=8)
def _compiled_advance(program):
    device, everywhere, _, eta = _specs(program)

    def function(rows, total, clock, eta):
        return advance_rows(rows, clock, eta[0]), advance_rows(total, clock, eta[1])

    return _compile(program, function, (device, everywhere, everywhere, eta), (device, everywhere), 0)


def _step(program, capacity, rows, memory, total, rest, change, batch, fixed, numbers):
    """Take a step on one device; see the module."""
    exchange, (step, rho, length) = program.exchange, numbers
    words, documents, size, notices = batch.part()
    wanted, notices = exchange.words(words, notices)
    used, position = _merge_lists(wanted, rows.shape[0], capacity)
    changed, features = _change_rows(rows, memory, total, change, used, fixed.prior[0])
    shape = (*wanted.shape, features.shape[1])
    blocks = _gather(jnp.zeros((wanted.size, shape[-1]), rows.dtype), features, position, wanted.ravel())
    found, _ = exchange.rows(blocks.reshape(shape), jnp.zeros(shape[-1], rows.dtype))
    key = step_key(fixed.key, program.key_type, step)
    part, column_sums = (documents, size, fixed.batch_size), changed.total[:, : shape[-1]]
    dense = None if rest is None else rest.params
    result = exchange.fit(fixed.kernel, found.reshape(-1, shape[-1]), column_sums, dense, part, key)
    received, totals = exchange.statistics(result, shape)
    sums = _add_at(jnp.zeros_like(features), received.reshape(-1, shape[-1]), position, wanted.ravel())
    failure = failure_of(totals, fixed.scale)
    if program.is_adaptive:
        length = notices[-1].astype(rho.dtype)
    sketch = lax.psum(_sketch(program, used, sums, fixed.scale), exchange.name) if program.is_adaptive else None
    rest = _step_rest(program, rest, result.rest, fixed.prior[1], rho, length, failure > 0)
    return changed, rest, (used[None], sums, totals.sum(0)), StepOutput(failure, notices, sketch)


def _change_rows(rows, memory, total, change, used, eta):
    """Return the rows after the change, and λ of the rows in use [M, C]."""
    leaving, entering, left, clocks = change
    columns = num_columns(rows)
    # The features of padding are read, but do not count.
    features = jnp.ones((len(used), columns), rows.dtype)
    start = RowUpdate(rows, memory, features, total, jnp.zeros(columns, rows.dtype), jnp.zeros((), rows.dtype))
    leaves = Leaving(leaving.words[0], leaving.values[0], left)
    enters = Entering(entering.words[0], entering.sums, jnp.int32(0), entering.scale, entering.totals)
    done = merge_and_update(start, _RowsAsFeatures(), leaves, enters, used, clocks, eta)
    return _Changed(done.partition, done.total, done.slot, done.entered), done.features


def _step_rest(program, rest, stats, prior, rho, length, failed):
    """Move the dense leaves; in a step that failed with ρ = 0 and statistics of 0, which change nothing."""
    if rest is None:
        return None
    stats = jax.tree.map(lambda leaf: jnp.where(failed, 0, leaf), stats)
    return svi.global_step(rest, stats, prior, jnp.where(failed, 0, rho), length, warmup=program.warmup)


def _sketch(program, used, sums, scale):
    """Return the sketch of the statistics of one device; the sum over the devices is that of all rows."""
    device = lax.axis_index(program.exchange.name)
    words = jnp.where(used < END, used * program.mesh.size + device, 0)
    # Sums of padding are 0.
    return adaptive.sketch_rows(scale.astype(sums.dtype) * sums, words.astype(jnp.uint32), program.num_words)


def _merge_lists(wanted, num_rows, capacity):
    """Merge lists of rows [P, U] that end with END.

    Returns:
      The different rows, increasing, then END [M]; and the place of every row among them [R + 1].
    """
    used, position = jnp.full(capacity, END, jnp.int32), jnp.zeros(num_rows + 1, jnp.int32)
    return _merge_in_place((used, position), wanted.ravel())


@fused
def _merge_in_place(arrays, wanted):
    used, position = arrays
    num_rows, one = len(position) - 1, jnp.ones(1, jnp.int32)

    def mark(i, position):
        return set_row(position, jnp.minimum(wanted[i], num_rows), one)

    def append(w, carry):
        number, used, position = carry
        # The barrier separates the read from the write; see fused_loops.
        is_used = lax.optimization_barrier(position[w])
        # If the row is not used, the next one that is overwrites this entry.
        used = set_row(used, number, jnp.asarray(w, jnp.int32)[None])
        return number + is_used, used, set_row(position, w, (number * is_used)[None])

    position = lax.fori_loop(0, len(wanted), mark, position)
    number, used, position = lax.fori_loop(0, num_rows, append, (jnp.int32(0), used, position))
    return set_row(used, number, jnp.full(1, END, jnp.int32)), position


@fused
def _gather(out, rows, position, wanted):
    """Copy the rows in use to the lists that need them; padding gets any row."""

    def copy(i, out):
        return set_row(out, i, row(rows, position[jnp.minimum(wanted[i], len(position) - 1)]))

    return lax.fori_loop(0, len(wanted), copy, out)


@fused
def _add_at(sums, received, position, wanted):
    """Add the statistics of all devices, in the order of the devices."""

    def add(i, sums):
        is_row = wanted[i] < END
        place = position[jnp.minimum(wanted[i], len(position) - 1)]
        return set_row(sums, place, row(sums, place) + jnp.where(is_row, row(received, i), 0))

    return lax.fori_loop(0, len(wanted), add, sums)
