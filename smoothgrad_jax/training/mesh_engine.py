"""The engine for a mesh of devices, which may belong to several processes: ``fit(…, mesh=mesh)``.

A step is one compiled program, :mod:`smoothgrad_jax.core.mesh_step`. Every process draws the documents of a minibatch
from (key, step), and packs those of its own devices: the processes exchange no documents, and the minibatch does not
depend on the number of devices. The result is that of one process up to rounding.

A model without row-sparse parameters is replicated: every device has all parameters, and the statistics are averaged.

The arrays of a minibatch must have the same shapes in every process. A process whose words exceed the planned capacity
announces this with the step before, so that all processes enlarge their arrays together (:class:`Capacity`). What
process 0 decides, such as a limit in seconds, is announced in the same way.
"""

import itertools
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from smoothgrad_jax.core import adaptive, mesh_step, svi
from smoothgrad_jax.core.adaptive import Adaptive
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.mesh_step import Hyperparameters, MeshBatch, MeshState, Program
from smoothgrad_jax.core.model import Model, check_key, checked, for_platform, is_batched, uses_key
from smoothgrad_jax.core.row_sparse.kernel import RowSparseModel
from smoothgrad_jax.core.row_sparse.state import END, partition_batch
from smoothgrad_jax.core.types import ArrayLike, PyTree
from smoothgrad_jax.core.window import Window
from smoothgrad_jax.data.batches import Batch
from smoothgrad_jax.data.sampling import prefetch
from smoothgrad_jax.training.engines import (
    EngineOptions,
    PreparedBatch,
    Request,
    check_not_donated,
    check_options,
    check_rule,
    check_window,
    negative_error,
    not_finite_error,
    option_names,
    window_kind,
)
from smoothgrad_jax.training.minibatches import DividedBatch


class Capacity(NamedTuple):
    """The sizes of the arrays of a minibatch.

    Attributes:
      words: U, different words per pair of devices.
      entries: N, entries of the documents of a device.
      tokens: T, tokens of a document.
    """

    words: int
    entries: int
    tokens: int


_NO_CAPACITY = Capacity(0, 0, 0)


class PackedBatch(NamedTuple):
    """The documents of a minibatch that belong to the devices of this process.

    Attributes:
      words: For each device, for each owner the rows that it needs [P, U]; None if the model has no rows.
      parts: For each device its documents, or its part of another batch.
      sizes: For each device its number of documents.
      size: B, of all devices of all processes.
      capacity: The sizes of the arrays.
    """

    words: tuple[Any, ...]
    parts: tuple[Any, ...]
    sizes: tuple[int, ...]
    size: int
    capacity: Capacity


class AnnouncedBatch(NamedTuple):
    """A minibatch, and the capacity that the minibatch after it needs in this process."""

    batch: PackedBatch
    following: Capacity


class MeshEngine:
    """Runs any model on a mesh of devices; see the module."""

    def __init__(self, model: Model, start: PyTree, options: EngineOptions, mesh: Mesh) -> None:
        options = check_options(options)
        if options.threads is not None:
            raise OptionError("threads", "has no effect with a mesh, which runs one thread per device: leave it out")
        self._mesh, self._devices = mesh, local_devices(mesh)
        self.is_shared = len(self._devices) < mesh.size
        self._run_key, self._warmup, self._platform = options.key, options.warmup, options.platform
        model = for_platform(model, options.platform)
        self._rule: adaptive.DelayedRule | None = None
        with option_names():
            if isinstance(start, MeshState):
                model = self._resume(model, start, options)
            elif _is_state(start):
                raise ValueError(
                    "this state is of a run without a mesh; continue it without one, or from its parameters"
                )
            else:
                model = self._begin(model, jax.tree.map(_as_numpy, start), options)
        check_rule(self._rule, options.window)
        self._set_hyperparameters(model)
        if isinstance(options.window, Adaptive):
            self.check_lengths(options.window.longest)
        self._capacity, self._request, self._decision = _NO_CAPACITY, Request.CONTINUE, Request.CONTINUE
        self._output: mesh_step.StepOutput | None = None
        self.length: float | None = None

    def _begin(self, model: Model, params: PyTree, options: EngineOptions) -> Model:
        """Make the state before the first step."""
        model = checked(model, params, options.num_words)
        row_sparse = _row_sparse(model)
        matrix, rest = row_sparse.split_rows(params) if row_sparse else (None, params)
        self._num_words = 0 if matrix is None else len(matrix)
        self._set_layout(matrix, rest, window_kind(options))
        parts = [
            (None if matrix is None else _rows_of(np.asarray(matrix), d, self._mesh.size), rest)
            for d, _ in self._devices
        ]
        self._state = self._initialise(self._globalise(parts, self._axes.params), 0)
        if isinstance(options.window, Adaptive):
            sketch = jax.eval_shape(adaptive.sketch, rest if matrix is None else np.asarray(matrix))
            self._rule = adaptive.init_delayed(options.window, sketch)
        return model

    def _resume(self, model: Model, start: MeshState, options: EngineOptions) -> Model:
        """Continue from a state of the same number of devices or of another."""
        check_not_donated(start.parts)
        first = start.parts[0]
        check_window(first.window, options)
        self._num_words = int(start.num_words)
        if start.rule is not None:  # of a checkpoint: views of its files
            self._rule = start.rule._replace(
                state=jax.tree.map(jnp.array, start.rule.state), pending=tuple(map(jnp.array, start.rule.pending))
            )
        matrix, rest = first.params
        self._set_layout(matrix, rest, first.window.kind)
        parts = [mesh_step.part_of(start, device, self._mesh.size, self._axes) for device, _ in self._devices]
        self._state, self._steps = self._globalise(parts, self._axes), int(first.step)
        return checked(model, self._template(model), options.num_words)

    def _set_layout(self, matrix: Any, rest: PyTree, kind: Window) -> None:
        """Determine which axis of each array of the state is partitioned."""

        def shapes(num_rows: int) -> svi.SVIState:
            rows = None if matrix is None else jax.ShapeDtypeStruct((num_rows, matrix.shape[1]), matrix.dtype)
            return mesh_step.state_shapes(rows, jax.eval_shape(lambda: jax.tree.map(jnp.asarray, rest)), kind)

        self._kind, self._axes = kind, mesh_step.partitioned_axes(shapes, 3)

    def _initialise(self, params: PyTree, step: int) -> svi.SVIState:
        """Return a state with an empty window; the parameters are donated."""
        self._steps = step
        shardings = mesh_step.shardings(self._mesh, mesh_step.flat_axes(self._axes))
        begin = jax.jit(partial(_initial_state, self._kind), out_shardings=shardings, donate_argnums=0)
        return begin(params, np.int32(step))

    def _globalise(self, parts: list[PyTree], axes: PyTree) -> PyTree:
        """Return arrays of all devices from the parts of the devices of this process."""

        placed = [jax.device_put(part, device) for part, (_, device) in zip(parts, self._devices, strict=True)]
        return self._join(axes, placed)

    def _join(self, axes: PyTree, parts: list[PyTree]) -> PyTree:
        """Return arrays of all devices from arrays on the devices of this process."""
        shardings = {axis: mesh_step.sharding(self._mesh, axis) for axis in set(jax.tree.leaves(axes))}

        def join(axis: int, *arrays: jax.Array) -> jax.Array:
            shape = list(arrays[0].shape)
            if axis != mesh_step.REPLICATED:
                shape[axis] *= self._mesh.size
            return jax.make_array_from_single_device_arrays(tuple(shape), shardings[axis], list(arrays))

        return jax.tree.map(join, axes, *parts)

    def _set_hyperparameters(self, model: Model) -> None:
        size, key = self._mesh.size, self._run_key if uses_key(model) else None
        kernel: Any = model
        prior: PyTree = (None, jax.tree.map(np.asarray, model.prior))
        row_sparse = _row_sparse(model)
        if row_sparse:
            matrix = self._state.params[0]
            kernel = row_sparse.row_kernel(matrix.shape[1], matrix.dtype)
            eta, rest_prior = row_sparse.row_prior()
            prior = (np.asarray(eta, matrix.dtype), jax.tree.map(np.asarray, rest_prior))
        axes = jax.tree.map(lambda _: mesh_step.REPLICATED, prior)
        if prior[0] is not None and prior[0].ndim == 2 and len(prior[0]) > 1:
            parts = [_rows_of(prior[0], device, size) for device, _ in self._devices]
            prior, axes = (self._globalise(parts, 0), prior[1]), (0, axes[1])
        is_typed = key is not None and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        program = Program(
            self._mesh,
            mesh_step.flat_axes(self._axes),
            mesh_step.flat_axes(axes),
            self._num_words,
            self._warmup,
            self._rule is not None,
            is_batched(model) or self._platform != "cpu",
            str(jax.random.key_impl(key)) if key is not None and is_typed else None,
        )
        self._program, self._model, self._kernel = mesh_step.compiled_step(program), model, kernel
        self._prior = prior
        self._key_data = None if key is None else np.asarray(jax.random.key_data(key) if is_typed else key)

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self._steps

    @property
    def template(self) -> PyTree:
        """Shapes and dtypes of the parameters."""
        return self._template(self._model)

    def _template(self, model: Model) -> PyTree:
        matrix, rest = jax.eval_shape(lambda: self._state.params)
        row_sparse = _row_sparse(model)
        if row_sparse is None:
            return rest
        return row_sparse.join_rows(jax.ShapeDtypeStruct((self._num_words, matrix.shape[1]), matrix.dtype), rest)

    def check_batch_size(self, size: int) -> None:
        """Raise an error if the model cannot divide a minibatch of this size among the devices."""
        divides_any = self._num_words and self._kernel.max_threads is None
        if size < self._mesh.size:
            raise OptionError("batch_size", f"must be at least the {self._mesh.size} devices of the mesh, got {size}")
        if not divides_any and size % self._mesh.size:
            raise OptionError(
                "batch_size",
                f"must be a multiple of the {self._mesh.size} devices of the mesh for {type(self._model).__name__}, "
                f"got {size}",
            )

    def prepared(self, batches: Iterable[DividedBatch]) -> Generator[PreparedBatch, None, None]:
        """Pack minibatches in another thread; the first one makes the processes agree on a capacity."""
        with closing(prefetch(self._pack, batches)) as packed:
            current = next(packed, None)
            if current is not None:
                self._enlarge(current.capacity)
            if current is not None and self.is_shared:
                needed = multihost_utils.process_allgather(np.array(current.capacity, np.int32))
                self._enlarge(np.asarray(needed).reshape(-1, len(current.capacity)).max(0))
            for following in itertools.chain(packed, [None]):
                if current is None:
                    return
                capacity = _NO_CAPACITY if following is None else following.capacity
                yield PreparedBatch(AnnouncedBatch(current, capacity), current.size)
                current = following

    def _pack(self, divided: DividedBatch) -> PackedBatch:
        """Find the rows that each device needs of each other."""
        self.check_batch_size(divided.size)
        words, parts, capacity = [], [], _NO_CAPACITY
        for part in divided.parts:
            has_documents = isinstance(part, Batch)
            rows, batch = self._partition(part) if has_documents and self._num_words else (None, part)
            if has_documents:
                used = len(batch.vocabulary) if rows is None else rows.shape[1]
                capacity = Capacity(*map(max, capacity, (used, len(batch.words), len(batch.tokens))))
            words.append(rows)
            parts.append(batch)
        return PackedBatch(tuple(words), tuple(parts), divided.sizes, divided.size, capacity)

    def _partition(self, batch: Any) -> tuple[np.ndarray, Any]:
        """Return the rows that documents need by owner [P, U], and the documents with words as positions in these."""
        if batch.num_words > self._num_words:
            raise ValueError(f"the documents have {batch.num_words} words, but λ has {self._num_words} rows")
        partitioned = partition_batch(batch, self._mesh.size)
        return partitioned.words, partitioned.batch

    def _enlarge(self, needed: Iterable[int]) -> None:
        self._capacity = Capacity(*(max(mine, int(other)) for mine, other in zip(self._capacity, needed, strict=True)))

    def check_lengths(self, lengths: ArrayLike) -> None:
        """Raise an error if the window kind cannot have one of these lengths."""
        with option_names():
            self._kind.check_lengths(lengths)

    def agree(self, request: Request) -> Request:
        """Return what all processes do next; see :meth:`smoothgrad_jax.training.engines.Engine.agree`."""
        self._read_output()
        if not self.is_shared:
            return request
        # Any process can be interrupted; process 0 decides everything else.
        self._request = request if jax.process_index() == 0 or request == Request.INTERRUPT else Request.CONTINUE
        decision, self._decision = self._decision, Request.CONTINUE
        return decision

    def share(self, compute: Callable[[], float]) -> float:
        """Return a number that process 0 computes."""
        if not self.is_shared:
            return compute()
        # As 32-bit numbers, so that a float64 keeps its precision where jax is limited to float32.
        mine = np.array(compute() if jax.process_index() == 0 else 0.0, np.float64)
        bits = np.asarray(multihost_utils.broadcast_one_to_all(mine.reshape(1).view(np.uint32)))
        return float(bits.astype(np.uint32).view(np.float64)[0])

    def advance(self, batch: AnnouncedBatch, rho: float, length: float | None) -> None:
        """Start one step; see :meth:`smoothgrad_jax.training.engines.Engine.advance`."""
        self._read_output()
        packed, following = batch
        rule = None
        if self._rule is not None:
            length, rule = adaptive.next_length(self._rule, rho)
        notice = np.array([self._request, *following, 0 if rule is None else length], np.int32)
        dtype = jax.dtypes.canonicalize_dtype(np.float64)
        scale = self._kernel.scale(packed.size) if self._num_words else 1.0
        fixed = Hyperparameters(
            self._kernel, self._prior, np.asarray(scale, dtype), np.asarray(packed.size, dtype), self._key_data
        )
        arrays = self._distribute(packed, notice)
        numbers = np.asarray(rho, dtype), None if length is None else np.asarray(length, dtype)
        self._state, self._output = self._program(self._state, arrays, fixed, *numbers)
        self._steps += 1
        self.length = None if length is None else float(length)
        if rule is not None:
            sketch = self._output.sketch.addressable_data(0)
            self._rule = adaptive.delay(rule, (sketch,), 1.0)

    def _distribute(self, packed: PackedBatch, notice: np.ndarray) -> MeshBatch:
        """Return a minibatch as arrays of all devices, of the agreed sizes."""
        parts = []
        for words, part, size, (_, device) in zip(*packed[:3], self._devices, strict=True):
            rows, documents = _fill(words, part, self._capacity)
            batch = MeshBatch(rows, documents, np.int32(size), notice)
            parts.append(jax.device_put(jax.tree.map(lambda leaf: leaf[None], batch), device))
        return self._join(jax.tree.map(lambda _: 0, parts[0]), parts)

    def _read_output(self) -> None:
        """Wait until no step is in progress, and read what it returned."""
        if self._output is None:
            return
        output, self._output = self._output, None
        failure, notices = int(output.failure), np.asarray(output.notices)
        self._enlarge(notices[1:4])
        self._decision = Request(max(self._decision, int(notices[0])))
        if failure:
            self._state = self._initialise(self._state.params, self._steps - 1)
            self._rule = None if self._rule is None else adaptive.restart(self._rule)
            is_negative = failure == mesh_step.NEGATIVE
            raise negative_error(self.step, self._model) if is_negative else not_finite_error(self.step)

    def wait(self) -> None:
        """Wait until no step is in progress."""
        self._read_output()

    def state(self) -> MeshState:
        """Return the parts of this process of the state after the last step."""
        self.wait()
        check_not_donated(self._state.params)

        def local(device: jax.Device) -> svi.SVIState:
            return jax.tree.map(
                lambda leaf: next(shard.data for shard in leaf.addressable_shards if shard.device == device),
                self._state,
            )

        numbers, devices = zip(*self._devices, strict=True)
        return MeshState(
            np.asarray(self._num_words, np.int64),
            np.asarray(self._mesh.size, np.int64),
            np.asarray(numbers, np.int64),
            tuple(map(local, devices)),
            self._rule,
        )

    def params(self) -> PyTree:
        """Return a copy of the parameters after the last step, collected from all devices."""
        self.wait()
        check_not_donated(self._state.params)
        everywhere = mesh_step.sharding(self._mesh)
        matrix, rest = jax.jit(lambda params: params, out_shardings=everywhere)(self._state.params)
        rest = jax.tree.map(lambda leaf: jnp.array(leaf.addressable_data(0)), rest)
        row_sparse = _row_sparse(self._model)
        if row_sparse is None:
            return rest
        found, size = np.asarray(matrix.addressable_data(0)), self._mesh.size
        lam = np.empty((self._num_words, found.shape[1]), found.dtype)
        for device, rows in enumerate(np.split(found, size)):
            lam[device::size] = rows[: len(lam[device::size])]
        return row_sparse.join_rows(lam, rest)

    def set_model(self, model: Model) -> None:
        """Use other hyperparameters; those of process 0, should the processes round differently."""
        checked_model = checked(for_platform(model, self._platform), self.template, None)
        check_key(checked_model, self._run_key)
        self.wait()
        if self.is_shared:
            checked_model = multihost_utils.broadcast_one_to_all(checked_model)
        self._set_hyperparameters(checked_model)


def local_devices(mesh: Mesh) -> list[tuple[int, jax.Device]]:
    """Return the devices of this process in a mesh of one axis, each with its number in the mesh."""
    if not isinstance(mesh, Mesh) or len(mesh.axis_names) != 1:
        raise OptionError("mesh", f"must be a mesh of one axis such as smoothgrad_jax.distributed.mesh(), got {mesh}")
    devices = list(mesh.devices.flat)
    mine = [(i, device) for i, device in enumerate(devices) if device.process_index == jax.process_index()]
    if len(mine) < len(devices) and len({device.process_index for device in devices}) < jax.process_count():
        raise OptionError("mesh", "must contain devices of all processes, or only devices of this one")
    return mine


def _row_sparse(model: Model) -> RowSparseModel | None:
    """Return the model if its rows are partitioned."""
    return model if isinstance(model, RowSparseModel) else None


def _initial_state(kind, params, step):
    return svi.init(params, kind)._replace(step=step)


def _as_numpy(leaf):
    """Return an array in the dtype that it has in a compiled program."""
    return np.asarray(leaf, jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype))


def _is_state(start):
    return hasattr(start, "_fields") and not {"step", "state"}.isdisjoint(start._fields)


def _rows_of(matrix, device, num_devices):
    """Return the rows of a device, padded to ⌈V/P⌉ with zeros."""
    rows = matrix[device::num_devices]
    return np.pad(rows, [(0, -(-len(matrix) // num_devices) - len(rows)), (0, 0)])


def _fill(words, batch, capacity):
    """Enlarge the arrays of one part."""
    if not isinstance(batch, Batch):
        return words, batch
    if words is None:
        batch = batch._replace(vocabulary=_enlarged(batch.vocabulary, capacity.words, 0))
    elif words.shape[1] < capacity.words:
        # Position i of owner s is s · U + i.
        owner, i = np.divmod(batch.words, words.shape[1])
        batch = batch._replace(words=owner * capacity.words + i)
        words = _enlarged(words, capacity.words, END)
    return words, batch._replace(
        words=_enlarged(batch.words, capacity.entries, 0),
        counts=_enlarged(batch.counts, capacity.entries, 0),
        tokens=np.empty((capacity.tokens, 0), np.float32),
    )


def _enlarged(array, size, fill):
    """Pad the last axis."""
    if array.shape[-1] == size:
        return array
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, size - array.shape[-1])], constant_values=fill)
