"""The engine for a mesh of devices, which may belong to several processes: ``fit(…, mesh=mesh)``.

A step is one compiled program, which moves all rows of a device (:mod:`smoothgrad_jax.core.mesh_step`) or, for large
vocabularies, those of the minibatch (:mod:`smoothgrad_jax.core.row_sparse.mesh`). Every process draws the documents of
a minibatch from (key, step), and packs those of its own devices: the processes exchange no documents, and the minibatch
does not depend on the number of devices. The result is that of one process up to rounding.

A model without row-sparse parameters is replicated: every device has all parameters, and the statistics are averaged.

The arrays of a minibatch must have the same shapes in every process. A process whose words exceed the planned capacity
announces this with the step before, so that all processes enlarge their arrays together (:class:`Capacity`). What
process 0 decides, such as a limit in seconds, is announced in the same way.
"""

import itertools
import math
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from smoothgrad_jax.core import adaptive
from smoothgrad_jax.core.adaptive import Adaptive
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.mesh_exchange import NEGATIVE, PADDING, Exchange, MeshPart, PackedArrays, StepOutput
from smoothgrad_jax.core.mesh_step import MeshState
from smoothgrad_jax.core.model import Model, check_key, checked, for_platform, is_batched, uses_key
from smoothgrad_jax.core.row_sparse.kernel import RowSparseModel
from smoothgrad_jax.core.row_sparse.state import END, RowSparseState, partition_batch
from smoothgrad_jax.core.svi import SVIState
from smoothgrad_jax.core.types import ArrayLike, PyTree
from smoothgrad_jax.core.window import Window
from smoothgrad_jax.data.batches import Batch
from smoothgrad_jax.data.sampling import prefetch
from smoothgrad_jax.training.engines import (
    DenseAdaptiveState,
    EngineOptions,
    PreparedBatch,
    Request,
    check_not_donated,
    check_options,
    check_rows,
    check_rule,
    check_window,
    longest_length,
    negative_error,
    not_finite_error,
    option_names,
    slot_dtype,
    window_kind,
)
from smoothgrad_jax.training.mesh_parameters import (
    LAZY_FROM,
    DenseParameters,
    LazyRows,
    MeshParameters,
    Placement,
    StepSettings,
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


class _StepInProgress(NamedTuple):
    """What a step returns, its ρ, and its L."""

    output: StepOutput
    rho: float
    length: float | None


class MeshEngine:
    """Runs any model on a mesh of devices; see the module."""

    def __init__(self, model: Model, start: PyTree, options: EngineOptions, mesh: Mesh) -> None:
        options = check_options(options)
        if options.threads is not None:
            raise OptionError("threads", "has no effect with a mesh, which runs one thread per device: leave it out")
        self._placement = Placement(mesh, local_devices(mesh))
        self.is_shared = self._placement.is_shared
        self._options = options
        self._rule: adaptive.DelayedRule | None = None
        model = for_platform(model, options.platform)
        with option_names():
            if isinstance(start, MeshState):
                self._parameters = self._resume(start)
            elif isinstance(start, SVIState | DenseAdaptiveState | RowSparseState):
                raise ValueError(
                    "this state is of a run without a mesh; continue it without one, or from its parameters"
                )
            else:
                start = jax.tree.map(_as_numpy, start)
                model = checked(model, start, options.num_words)
                self._parameters = self._begin(model, start)
        if options.messages is not None and not self._parameters.num_words:
            raise OptionError("messages", f"has no effect: {type(model).__name__} has no row-sparse parameters")
        check_rule(self._rule, options.window)
        self._set_model(checked(model, self._template(model), options.num_words))
        if isinstance(options.window, Adaptive):
            self.check_lengths(options.window.longest)
        self._capacity, self._request, self._decision = _NO_CAPACITY, Request.CONTINUE, Request.CONTINUE
        self._in_progress: _StepInProgress | None = None
        self.length: float | None = None

    def _begin(self, model: Model, params: PyTree) -> MeshParameters:
        """Make the parameters before the first step."""
        row_sparse, window = _row_sparse(model), self._options.window
        matrix, rest = row_sparse.split_rows(params) if row_sparse else (None, params)
        if isinstance(window, Adaptive):
            sketch = jax.eval_shape(adaptive.sketch, rest if matrix is None else np.asarray(matrix))
            self._rule = adaptive.init_delayed(window, sketch)
        num_words = 0 if matrix is None else len(matrix)
        if matrix is not None and self._is_lazy(model, num_words):
            infinite = longest_length(window) == math.inf
            lazy = LazyRows(self._placement, num_words)
            return lazy.begin(np.asarray(matrix), rest, None if rest is None else window_kind(self._options), infinite)
        if self._options.slots == "uint8":
            raise OptionError("slots", f"must be a float type on a mesh, unless λ has {LAZY_FROM:,} rows; got uint8")
        return DenseParameters(self._placement, num_words, matrix, rest, window_kind(self._options)).begin(matrix, rest)

    def _is_lazy(self, model: Model, num_words: int) -> bool:
        """Return whether the rows decay lazily, which is faster for many rows, with the programs of a CPU."""
        return (
            num_words >= LAZY_FROM
            and not isinstance(self._options.window, Window)
            and self._options.platform == "cpu"
            and not is_batched(model)
        )

    def _resume(self, start: MeshState) -> MeshParameters:
        """Continue from a state of the same number of devices or of another."""
        check_not_donated(start.parts)
        first, num_words = start.parts[0], int(start.num_words)
        if start.rule is not None:  # of a checkpoint: views of its files
            self._rule = start.rule._replace(
                state=jax.tree.map(jnp.array, start.rule.state), pending=tuple(map(jnp.array, start.rule.pending))
            )
        if isinstance(first, RowSparseState):
            check_rows(first, self._options)
            return LazyRows(self._placement, num_words).resume(start)
        check_window(first.window, self._options)
        matrix, rest = first.params
        return DenseParameters(self._placement, num_words, matrix, rest, first.window.kind).resume(start)

    def _set_model(self, model: Model) -> None:
        key = self._options.key if uses_key(model) else None
        is_typed = key is not None and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        is_cpu = self._options.platform == "cpu"
        settings = StepSettings(
            Exchange(self._placement.mesh, self._options.messages == "bfloat16", is_batched(model) or not is_cpu),
            self._options.warmup,
            self._rule is not None,
            slot_dtype(self._options.slots),
            None if key is None else np.asarray(jax.random.key_data(key) if is_typed else key),
            str(jax.random.key_impl(key)) if key is not None and is_typed else None,
        )
        self._parameters.set_model(model, settings)
        row_sparse = _row_sparse(model)
        matrix, _ = self._parameters.shapes()
        # Which batches can be divided depends on it.
        self._divides_any = row_sparse is not None and row_sparse.row_kernel(*_row_type(matrix)).max_threads is None
        self._model = model

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self._parameters.step

    @property
    def template(self) -> PyTree:
        """Shapes and dtypes of the parameters."""
        return self._template(self._model)

    def _template(self, model: Model) -> PyTree:
        matrix, rest = self._parameters.shapes()
        row_sparse = _row_sparse(model)
        return rest if row_sparse is None else row_sparse.join_rows(matrix, rest)

    def check_batch_size(self, size: int) -> None:
        """Raise an error if the model cannot divide a minibatch of this size among the devices."""
        num_devices = self._placement.mesh.size
        if size < num_devices:
            raise OptionError("batch_size", f"must be at least the {num_devices} devices of the mesh, got {size}")
        if not self._divides_any and size % num_devices:
            raise OptionError(
                "batch_size",
                f"must be a multiple of the {num_devices} devices of the mesh for {type(self._model).__name__}, "
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
            rows, batch = self._partition(part) if has_documents and self._parameters.num_words else (None, part)
            if has_documents:
                used = len(batch.vocabulary) if rows is None else rows.shape[1]
                capacity = Capacity(*map(max, capacity, (used, len(batch.words), len(batch.tokens))))
            words.append(rows)
            parts.append(batch)
        return PackedBatch(tuple(words), tuple(parts), divided.sizes, divided.size, capacity)

    def _partition(self, batch: Any) -> tuple[np.ndarray, Any]:
        """Return the rows that documents need by owner [P, U], and the documents with words as positions in these."""
        num_rows = self._parameters.num_words
        if batch.num_words > num_rows:
            raise ValueError(f"the documents have {batch.num_words} words, but λ has {num_rows} rows")
        partitioned = partition_batch(batch, self._placement.mesh.size, padding=PADDING)
        return partitioned.words, partitioned.batch

    def _enlarge(self, needed: Iterable[int]) -> None:
        self._capacity = Capacity(*(max(mine, int(other)) for mine, other in zip(self._capacity, needed, strict=True)))

    def check_lengths(self, lengths: ArrayLike) -> None:
        """Raise an error if the window kind cannot have one of these lengths."""
        with option_names():
            self._parameters.check_lengths(lengths)

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
        output = self._parameters.start(self._distribute(packed, notice), packed.size, rho, length)
        self._in_progress = _StepInProgress(output, rho, length)
        self.length = None if length is None else float(length)
        if rule is not None:
            self._rule = adaptive.delay(rule, (output.sketch.addressable_data(0),), 1.0)

    def _distribute(self, packed: PackedBatch, notice: np.ndarray) -> PackedArrays:
        """Return a minibatch as arrays of all devices, of the agreed sizes."""
        parts = []
        for words, part, size, (_, device) in zip(*packed[:3], self._placement.devices, strict=True):
            rows, documents = _fill(words, part, self._capacity)
            part = PackedArrays.of(MeshPart(rows, documents, np.int32(size), notice))
            parts.append(jax.device_put(jax.tree.map(lambda vector: vector[None], part), device))
        return self._placement.join_trees(jax.tree.map(lambda _: 0, parts[0]), parts)

    def _read_output(self) -> None:
        """Wait until no step is in progress, and read what it returned."""
        if self._in_progress is None:
            return
        (output, rho, length), self._in_progress = self._in_progress, None
        failure, notices = int(output.failure), np.asarray(output.notices)
        self._enlarge(notices[1:4])
        self._decision = Request(max(self._decision, int(notices[0])))
        if failure:
            self._parameters.fail()
            self._rule = None if self._rule is None else adaptive.restart(self._rule)
            raise negative_error(self.step, self._model) if failure == NEGATIVE else not_finite_error(self.step)
        # Processes may round the rule of an adaptive window differently.
        self._parameters.finish(rho, length if self._rule is None else float(notices[-1]))

    def wait(self) -> None:
        """Wait until no step is in progress."""
        self._read_output()

    def state(self) -> MeshState:
        """Return the parts of this process of the state after the last step."""
        self.wait()
        parts = self._parameters.parts()
        check_not_donated(parts)
        return MeshState(
            np.asarray(self._parameters.num_words, np.int64),
            np.asarray(self._placement.mesh.size, np.int64),
            np.asarray([number for number, _ in self._placement.devices], np.int64),
            parts,
            self._rule,
        )

    def params(self) -> PyTree:
        """Return a copy of the parameters after the last step, collected from all devices."""
        self.wait()
        check_not_donated(self._parameters.parts())
        matrix, rest = self._parameters.read()
        row_sparse = _row_sparse(self._model)
        return rest if row_sparse is None else row_sparse.join_rows(matrix, rest)

    def set_model(self, model: Model) -> None:
        """Use other hyperparameters; those of process 0, should the processes round differently."""
        checked_model = checked(for_platform(model, self._options.platform), self.template, None)
        check_key(checked_model, self._options.key)
        self.wait()
        if self.is_shared:
            checked_model = multihost_utils.broadcast_one_to_all(checked_model)
        self._set_model(checked_model)


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


def _row_type(matrix):
    """Return C and the dtype of λ."""
    return matrix.shape[1], matrix.dtype


def _as_numpy(leaf):
    """Return an array in the dtype that it has in a compiled program."""
    return np.asarray(leaf, jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype))


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
