"""The parameters of a run on a mesh: how they are stored, moved by a step, read, and divided among other devices.

| class                    | stores                                        | for                                       |
|--------------------------|-----------------------------------------------|-------------------------------------------|
| :class:`DenseParameters` | λ and a dense window, partitioned by words if | every model, window kind and platform     |
|                          | the model has rows, else replicated           |                                           |
| :class:`LazyRows`        | rows that decay lazily, partitioned by words  | models with rows and a moving or adaptive |
|                          |                                               | window, on CPUs, for large vocabularies   |

Both satisfy :class:`MeshParameters`. A dense step moves all V/P rows of a device; a lazy one only the rows that the
minibatch, or what enters and leaves the window, touches.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from smoothgrad_jax.core import mesh_step, svi
from smoothgrad_jax.core.mesh_exchange import REPLICATED, Exchange, PackedArrays, StepOutput, sharding
from smoothgrad_jax.core.mesh_step import Hyperparameters, MeshState
from smoothgrad_jax.core.model import Model
from smoothgrad_jax.core.row_sparse import mesh as row_mesh
from smoothgrad_jax.core.row_sparse.kernel import RowKernel, RowSparseModel
from smoothgrad_jax.core.row_sparse.mesh import RowProgram
from smoothgrad_jax.core.row_sparse.state import (
    EnteringStatistics,
    RowPrior,
    RowSparseState,
    Workspace,
    join_partitions,
    prior_rows,
    repartition,
)
from smoothgrad_jax.core.row_sparse.step import check_row_lengths, end_step, read_rows
from smoothgrad_jax.core.types import Array, ArrayLike, PyTree, Warmup
from smoothgrad_jax.core.window import Window

LAZY_FROM = 50_000  # V from which rows decay lazily: the time of a dense step grows with V
_CHUNK = 1 << 24  # numbers of λ that are collected from all processes at a time


class Placement(NamedTuple):
    """Where arrays are.

    Attributes:
      mesh: The devices.
      devices: Those of this process, each with its number in the mesh.
    """

    mesh: Mesh
    devices: list[tuple[int, jax.Device]]

    @property
    def is_shared(self) -> bool:
        """Whether other processes have devices of the mesh."""
        return len(self.devices) < self.mesh.size

    def join(self, axis: int, arrays: Sequence[Array | np.ndarray]) -> jax.Array:
        """Return an array of all devices, from one array per device of this process, copied there if necessary."""
        placed = [
            each if isinstance(each, jax.Array) and each.devices() == {device} else jax.device_put(each, device)
            for each, (_, device) in zip(arrays, self.devices, strict=True)
        ]
        shape = list(placed[0].shape)
        if axis != REPLICATED:
            shape[axis] *= self.mesh.size
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding(self.mesh, axis), placed)

    def join_trees(self, axes: PyTree, parts: list[PyTree]) -> PyTree:
        """Return arrays of all devices from a tree per device of this process, and the partitioned axis of each."""
        return jax.tree.map(lambda axis, *arrays: self.join(axis, arrays), axes, *parts)

    def rows(self, matrix: np.ndarray) -> jax.Array:
        """Return the rows of a matrix [V, C], which every process has, partitioned by words: [P · R, C]."""
        return self.join(0, [_rows_of(matrix, number, self.mesh.size) for number, _ in self.devices])


class StepSettings(NamedTuple):
    """What decides which program takes the steps.

    Attributes:
      exchange: How the devices exchange rows.
      warmup: See :func:`smoothgrad_jax.core.window.push`.
      is_adaptive: Whether the window is adaptive.
      slot_dtype: Dtype in which lazy rows store the values of the window; None is that of λ.
      key: Data of the random key of the run, or None.
      key_type: See :func:`smoothgrad_jax.core.mesh_exchange.step_key`.
    """

    exchange: Exchange
    warmup: Warmup
    is_adaptive: bool
    slot_dtype: np.dtype | None
    key: np.ndarray | None
    key_type: str | None


class MeshParameters(Protocol):
    """Parameters on a mesh, and a run of steps.

    Attributes:
      num_words: V; 0 if the model has no row-sparse parameters.
    """

    num_words: int

    @property
    def step(self) -> int:
        """Number of steps taken, the one in progress included."""

    def shapes(self) -> tuple[jax.ShapeDtypeStruct | None, PyTree]:
        """Return the shape of the matrix [V, C], or None, and those of the other parameters."""

    def check_lengths(self, lengths: ArrayLike) -> None:
        """Raise an error if the window cannot have one of these lengths."""

    def set_model(self, model: Model, settings: StepSettings) -> None:
        """Use a model with other hyperparameters for the steps to come."""

    def start(self, batch: PackedArrays, size: int, rho: float, length: float | None) -> StepOutput:
        """Start a step on B documents; the parameters must not be read before :meth:`finish` or :meth:`fail`."""

    def finish(self, rho: float, length: float | None) -> None:
        """Complete a step that did not fail."""

    def fail(self) -> None:
        """Return to the parameters before the step, with an empty window."""

    def parts(self) -> PyTree:
        """Return the parts of the devices of this process."""

    def read(self) -> tuple[np.ndarray | None, PyTree]:
        """Return a copy of λ [V, C], or None, and of the other parameters; every process makes this call."""


class DenseParameters(MeshParameters):
    """An :class:`smoothgrad_jax.SVIState` of arrays of all devices."""

    def __init__(
        self, placement: Placement, num_words: int, matrix: Array | np.ndarray | None, rest: PyTree, kind: Window
    ) -> None:
        """Determine the layout; :meth:`begin` and :meth:`resume` make the arrays.

        Args:
          placement: The devices.
          num_words: V.
          matrix: Anything with the number of columns and the dtype of λ; None if the model has no rows.
          rest: The other parameters, or their shapes.
          kind: The window kind.
        """
        self._placement, self.num_words, self._kind = placement, num_words, kind

        def shapes(num_rows: int) -> svi.SVIState:
            rows = None if matrix is None else jax.ShapeDtypeStruct((num_rows, matrix.shape[1]), matrix.dtype)
            others = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, rest))
            return jax.eval_shape(lambda params: svi.init(params, kind), (rows, others))

        self._axes = mesh_step.partitioned_axes(shapes, 3)
        self._steps = 0
        self._scale: Callable[[int], float] = lambda size: 1.0

    def begin(self, matrix: np.ndarray | None, rest: PyTree) -> "DenseParameters":
        """Start from parameters that every process has."""
        rows = None if matrix is None else self._placement.rows(np.asarray(matrix))
        everywhere = self._placement.join_trees(self._axes.params[1], [rest] * len(self._placement.devices))
        self._state = self._initialise((rows, everywhere), 0)
        return self

    def resume(self, start: MeshState) -> "DenseParameters":
        """Continue from the state of the same number of devices or of another."""
        size = self._placement.mesh.size
        parts = [mesh_step.part_of(start, device, size, self._axes) for device, _ in self._placement.devices]
        self._state, self._steps = self._placement.join_trees(self._axes, parts), int(parts[0].step)
        return self

    def _initialise(self, params: PyTree, step: int) -> svi.SVIState:
        """Return a state with an empty window; the parameters are donated."""
        self._steps = step
        shardings = mesh_step.shardings(self._placement.mesh, mesh_step.flat_axes(self._axes))

        def begin(params, step):
            return svi.init(params, self._kind)._replace(step=step)

        return jax.jit(begin, out_shardings=shardings, donate_argnums=0)(params, np.int32(step))

    @property
    def step(self) -> int:
        return self._steps

    def shapes(self) -> tuple[jax.ShapeDtypeStruct | None, PyTree]:
        matrix, rest = jax.eval_shape(lambda: self._state.params)
        return None if matrix is None else jax.ShapeDtypeStruct((self.num_words, matrix.shape[1]), matrix.dtype), rest

    def check_lengths(self, lengths: ArrayLike) -> None:
        self._kind.check_lengths(lengths)

    def set_model(self, model: Model, settings: StepSettings) -> None:
        kernel: Model | RowKernel = model
        prior: tuple[PyTree, PyTree] = (None, jax.tree.map(np.asarray, model.prior))
        if isinstance(model, RowSparseModel):
            matrix = self._state.params[0]
            kernel = model.row_kernel(matrix.shape[1], matrix.dtype)
            eta, rest_prior = model.row_prior()
            prior = (np.asarray(eta, matrix.dtype), jax.tree.map(np.asarray, rest_prior))
            self._scale = kernel.scale
        axes = jax.tree.map(lambda _: REPLICATED, prior)
        if prior[0] is not None and prior[0].ndim == 2 and len(prior[0]) > 1:
            prior, axes = (self._placement.rows(prior[0]), prior[1]), (0, axes[1])
        program = mesh_step.Program(
            settings.exchange,
            mesh_step.flat_axes(self._axes),
            mesh_step.flat_axes(axes),
            self.num_words,
            settings.warmup,
            settings.is_adaptive,
            settings.key_type,
        )
        self._program, self._kernel = mesh_step.compiled_step(program), kernel
        self._prior, self._key = prior, settings.key

    def start(self, batch: PackedArrays, size: int, rho: float, length: float | None) -> StepOutput:
        scale, count = _number(self._scale(size)), _number(size)
        fixed = Hyperparameters(self._kernel, self._prior, scale, count, self._key)
        numbers = _number(rho), None if length is None else _number(length)
        self._state, output = self._program(self._state, batch, fixed, *numbers)
        self._steps += 1
        return output

    def finish(self, rho: float, length: float | None) -> None:
        """Do nothing: the program has moved the parameters."""

    def fail(self) -> None:
        self._state = self._initialise(self._state.params, self._steps - 1)

    def parts(self) -> tuple[svi.SVIState, ...]:
        return tuple(
            jax.tree.map(partial(mesh_step.shard_on, device=device), self._state)
            for _, device in self._placement.devices
        )

    def read(self) -> tuple[np.ndarray | None, PyTree]:
        everywhere = sharding(self._placement.mesh)
        matrix, rest = jax.jit(lambda params: params, out_shardings=everywhere)(self._state.params)
        rest = jax.tree.map(lambda leaf: jnp.array(leaf.addressable_data(0)), rest)
        if matrix is None:
            return None, rest
        found, size = np.asarray(matrix.addressable_data(0)), self._placement.mesh.size
        lam = np.empty((self.num_words, found.shape[1]), found.dtype)
        for device, rows in enumerate(np.split(found, size)):
            lam[device::size] = rows[: len(lam[device::size])]
        return lam, rest


class LazyRows(MeshParameters):
    """Rows that decay lazily; see :mod:`smoothgrad_jax.core.row_sparse.mesh`."""

    def __init__(self, placement: Placement, num_words: int) -> None:
        """Take the devices and V; :meth:`begin` and :meth:`resume` make the arrays."""
        self._placement, self.num_words = placement, num_words
        self._workspace = Workspace()
        self._statistics: EnteringStatistics | None = None
        self._eta: np.ndarray | None = None  # η [V or 1, C or 1]; None before the first model
        self._program: RowProgram
        self._fixed: Hyperparameters

    def begin(self, matrix: np.ndarray, rest: PyTree, kind: Window | None, infinite: bool) -> "LazyRows":
        """Start from parameters that every process has."""
        mesh, total = self._placement.mesh, matrix.sum(0, dtype=np.float64, keepdims=True).astype(matrix.dtype)
        self._state = row_mesh.init_mesh_rows(
            self._placement.rows(matrix), total, infinite=infinite, rest=self._begin_rest(rest, kind), mesh=mesh
        )
        return self

    def _begin_rest(self, rest: PyTree, kind: Window | None) -> PyTree:
        if kind is None:
            return None
        axes = jax.tree.map(lambda _: REPLICATED, rest)
        everywhere = self._placement.join_trees(axes, [rest] * len(self._placement.devices))
        return row_mesh.begin_rest(everywhere, kind, self._placement.mesh)

    def resume(self, start: MeshState) -> "LazyRows":
        """Continue from the state of the same number of devices or of another."""
        parts, size = mesh_step.parts_by_device(start), self._placement.mesh.size
        mine = [device for device, _ in self._placement.devices]
        if size != int(start.num_devices) or not parts.keys() >= set(mine):
            mesh_step.check_complete(start)
            joined = join_partitions([parts[device] for device in sorted(parts)], self.num_words)
            parts = {device: self._padded(repartition(joined, size, [device])) for device in mine}
        self._state = row_mesh.join_parts([parts[device] for device in mine], self._placement.join)
        return self

    def _padded(self, part: RowSparseState) -> RowSparseState:
        """Return a part with as many rows as every other."""
        capacity = -(-self.num_words // self._placement.mesh.size)
        rows = np.asarray(part.partitions[0])
        return part._replace(partitions=(np.pad(rows, [(0, capacity - len(rows)), (0, 0)]),))

    @property
    def step(self) -> int:
        return int(self._state.step) + (self._statistics is not None)

    def shapes(self) -> tuple[jax.ShapeDtypeStruct | None, PyTree]:
        state, rest = self._state, self._state.rest
        matrix = jax.ShapeDtypeStruct((self.num_words, state.num_columns), state.dtype)
        return matrix, None if rest is None else jax.eval_shape(lambda: rest.params)

    def check_lengths(self, lengths: ArrayLike) -> None:
        check_row_lengths(lengths, self._state.slots is None, self._state.rest)

    def set_model(self, model: Model, settings: StepSettings) -> None:
        """Use other hyperparameters; in O(V/P) if the prior of the rows changes."""
        assert isinstance(model, RowSparseModel), "the engine chooses LazyRows for such a model"
        dtype = self._state.dtype
        prior, rest_prior = model.row_prior()
        eta, total = prior_rows(prior, self.num_words, dtype)
        if self._eta is not None and not np.array_equal(eta, self._eta):
            # The steps that a row has skipped were under the old prior.
            self._state = row_mesh.flush(self._program, self._state, self._fixed, self._workspace)
        self._eta = eta
        kernel = model.row_kernel(self._state.num_columns, dtype)
        self._scale = kernel.scale
        self._program = RowProgram(
            settings.exchange,
            self.num_words,
            len(eta) > 1,
            settings.warmup,
            np.dtype(settings.slot_dtype or self._state.slot_dtype or dtype),
            settings.is_adaptive,
            settings.key_type,
        )
        self._fixed = Hyperparameters(
            kernel,
            ((self._placement.rows(eta) if len(eta) > 1 else eta, total), jax.tree.map(np.asarray, rest_prior)),
            _number(1),
            _number(1),
            settings.key,
        )

    def start(self, batch: PackedArrays, size: int, rho: float, length: float | None) -> StepOutput:
        fixed = self._fixed._replace(scale=_number(self._scale(size)), batch_size=_number(size))
        numbers = _number(rho), None if length is None else _number(length)
        self._state, self._statistics, output = row_mesh.start_step(
            self._program, self._state, batch, fixed, *numbers, self._workspace
        )
        return output

    def finish(self, rho: float, length: float | None) -> None:
        assert self._statistics is not None, "start comes first"
        assert length is not None, "a moving window has a length"
        self._state = end_step(self._state, self._statistics, rho, length, self._program.warmup)
        self._statistics = None

    def fail(self) -> None:
        self._state, self._statistics = row_mesh.restart(self._program, self._state, self._fixed), None

    def parts(self) -> tuple[RowSparseState, ...]:
        return tuple(row_mesh.part_of(self._state, device) for _, device in self._placement.devices)

    def read(self) -> tuple[np.ndarray, PyTree]:
        """Return a copy of the parameters; allocates λ, the rows of the devices of this process, and little more."""
        size, devices = self._placement.mesh.size, self._placement.devices
        parts = zip(devices, self.parts(), strict=True)
        mine = np.stack([self._read_part(number, part) for (number, _), part in parts])
        order = np.argsort(self._gather(np.array([number for number, _ in devices], np.int32)))
        lam = np.empty((self.num_words, mine.shape[2]), mine.dtype)
        step = max(1, _CHUNK // mine.shape[2] // size)
        for first in range(0, mine.shape[1], step):
            found = self._gather(mine[:, first : first + step])
            for device in range(size):
                rows = lam[device + first * size : (first + step) * size : size]
                rows[:] = found[order[device]][: len(rows)]
        rest = self._state.rest
        return lam, None if rest is None else jax.tree.map(
            lambda leaf: jnp.array(leaf.addressable_data(0)), rest.params
        )

    def _gather(self, array: np.ndarray) -> np.ndarray:
        """Return an array with one entry per device of this process, with the entries of all processes."""
        if not self._placement.is_shared:
            return array
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))

    def _read_part(self, number: int, part: RowSparseState) -> np.ndarray:
        """Return λ of the rows of a device, with padding."""
        eta = self._eta
        assert eta is not None, "set_model comes first"
        mine = _rows_of(eta, number, self._placement.mesh.size) if len(eta) > 1 else eta
        return read_rows(part, RowPrior((mine,), eta), self._program.slot_dtype)


def _rows_of(matrix, device, num_devices):
    """Return the rows of a device, padded to ⌈V/P⌉ with zeros."""
    rows = matrix[device::num_devices]
    return np.pad(rows, [(0, -(-len(matrix) // num_devices) - len(rows)), (0, 0)])


def _number(value):
    """Return a number in the float dtype of jax, so that all numbers are one type of argument."""
    return np.asarray(value, jax.dtypes.canonicalize_dtype(np.float64))
