"""Exchange the rows of λ and their statistics between the devices of a mesh, in a step of smoothed SVI.

The devices may belong to several processes. The documents of a minibatch are divided among the devices, and the words
too: word w is row w // P of device w mod P. A step exchanges only the rows of the words that the minibatch contains:

    1. every device sends the numbers of the rows that its documents need to the devices that have them;
    2. these devices send the rows back;
    3. every device fits its documents, and sends the statistics of each row to the device that has it.

λ is updated by :mod:`smoothgrad_jax.core.mesh_step` (dense rows) or by :mod:`smoothgrad_jax.core.row_sparse.mesh` (rows
that decay lazily).

| letter | name      | shape      | meaning                                                                       |
|--------|-----------|------------|-------------------------------------------------------------------------------|
| P      |           |            | devices of the mesh, which has one axis                                       |
| R      |           |            | rows per device, ⌈V/P⌉; the last row of a device may be padding               |
| C, W   |           |            | columns of λ, and of the features that the model computes of a row            |
| U      |           |            | capacity for the words that the documents of one device need of one device    |
| T      | ``total`` | [1, C]     | column sums of λ                                                              |
|        | ``rest``  |            | the parameters that are not row-sparse                                        |

The exchange is an all-to-all and a sum; a reduce-scatter is slower on CPU, and was wrong in some versions of jax
(jax#40830). Each device adds in the order of the devices, so that the same P gives the same bits. A small exchange
takes a tenth of a millisecond, so there are only three: the notices travel with the numbers of the rows, and one vector
of float32 precision with each block of rows, in the place of its padding.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from smoothgrad_jax.core.fused_loops import fused, row, set_row
from smoothgrad_jax.core.row_sparse.kernel import KernelResult, RowKernel
from smoothgrad_jax.core.types import Array, Numeric, PRNGKey, PyTree

REPLICATED = -1  # the axis of an array that every device has completely
PADDING = 3  # places at the end of each list of words, for a vector of float32 in the form of three 16-bit floats
NOT_FINITE, NEGATIVE = 1, 2  # what is wrong with the statistics of a step; 0 for nothing


class MeshPart(NamedTuple):
    """The part of a minibatch that belongs to one device.

    Attributes:
      words: [P, U]; entry s holds the rows that the device needs of device s, increasing, then END at least PADDING
        times. None if the model has no row-sparse parameters.
      batch: The documents, with words as positions in [P · U]; or a part of another batch.
      size: The number of documents; the arrays of ``batch`` may hold more, which are empty.
      notices: [N] int32, of which a step returns the maximum over the devices. The last one is the length of an
        adaptive window, which processes may round differently.
    """

    words: Any
    batch: Any
    size: Any
    notices: Any


@jax.tree_util.register_pytree_node_class
class PackedArrays:
    """The arrays of a tree as one vector per data type; to transfer a vector takes as long as to transfer one array.

    Args:
      vectors: [n] per data type; or [P, n], one row per device.
      places: For each array of the tree the number of its vector, and its shape.
      structure: That of the tree.
    """

    def __init__(
        self,
        vectors: tuple[Array, ...],
        places: tuple[tuple[int, tuple[int, ...]], ...],
        structure: jax.tree_util.PyTreeDef,
    ) -> None:
        self.vectors, self.places, self.structure = vectors, places, structure

    @classmethod
    def of(cls, tree: PyTree) -> "PackedArrays":
        """Pack a tree of NumPy arrays, in the data types that they have in a compiled program."""
        leaves, structure = jax.tree.flatten(tree)
        arrays = [np.asarray(leaf) for leaf in leaves]
        dtypes = [jax.dtypes.canonicalize_dtype(array.dtype) for array in arrays]
        kinds = list(dict.fromkeys(dtypes))
        same = [[array.ravel() for array, dtype in zip(arrays, dtypes, strict=True) if dtype == kind] for kind in kinds]
        vectors = tuple(np.concatenate(each).astype(kind) for each, kind in zip(same, kinds, strict=True))
        shapes = [array.shape for array in arrays]
        return cls(vectors, tuple(zip(map(kinds.index, dtypes), shapes, strict=True)), structure)

    def shapes(self) -> PyTree:
        """Return the shapes of the arrays."""
        return jax.tree.unflatten(self.structure, [jax.ShapeDtypeStruct(shape, np.int32) for _, shape in self.places])

    def part(self) -> PyTree:
        """Return the tree of this device, in a program of one device."""
        starts, arrays = [0] * len(self.vectors), []
        for number, shape in self.places:
            end = starts[number] + math.prod(shape)
            arrays.append(self.vectors[number][0, starts[number] : end].reshape(shape))
            starts[number] = end
        return jax.tree.unflatten(self.structure, arrays)

    def tree_flatten(self) -> tuple[tuple[tuple[Array, ...]], tuple[Any, Any]]:
        return (self.vectors,), (self.places, self.structure)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, Any], children: tuple[tuple[Array, ...]]) -> "PackedArrays":
        return cls(children[0], *static)


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


class Exchange(NamedTuple):
    """How the devices exchange rows.

    Attributes:
      mesh: The devices.
      is_short: Whether rows and statistics travel as 16-bit floats (bfloat16).
      is_batched: Whether the model takes its local step for accelerators.
    """

    mesh: Mesh
    is_short: bool
    is_batched: bool

    @property
    def name(self) -> str:
        """The axis of the mesh."""
        return self.mesh.axis_names[0]

    def words(self, words: Array, notices: Array) -> tuple[Array, Array]:
        """Return the rows [P, U] of this device that each device needs, and the maximum of the notices."""
        everywhere = jnp.broadcast_to(notices, (self.mesh.size, len(notices)))
        received = self._swap(jnp.concatenate([words, everywhere], 1))
        capacity = words.shape[1]
        return received[:, :capacity], received[:, capacity:].max(0)

    def rows(self, blocks: Array, extra: Array) -> tuple[Array, Array]:
        """Send a block of rows to each device.

        Args:
          blocks: [P, U, C]; the d-th block is for device d, and its last PADDING rows have no meaning.
          extra: [C], a vector for all devices, which travels in the last rows of each block.

        Returns:
          The blocks of all devices for this one, and the vectors of all devices [P, C].
        """
        if not self.is_short:
            received = self._swap(blocks.at[:, -1].set(extra))
            return received, received[:, -1]
        parts = jnp.stack(_thirds(extra))
        short = lax.bitcast_convert_type(blocks.astype(jnp.bfloat16).at[:, -PADDING:].set(parts), jnp.uint16)
        # As bits: XLA on CPU would send bfloat16 as float32.
        received = lax.bitcast_convert_type(self._swap(short), jnp.bfloat16).astype(blocks.dtype)
        return received, received[:, -PADDING:].sum(1)

    def _swap(self, blocks: Array) -> Array:
        """Send the d-th block to device d."""
        return lax.all_to_all(blocks, self.name, 0, 0)

    def fit(
        self,
        kernel: RowKernel,
        rows: Array,
        total: Array,
        rest: PyTree,
        part: tuple[PyTree, Array, Numeric],
        key: PRNGKey | None,
    ) -> KernelResult:
        """Fit the documents of this device; the statistics of the dense leaves are those of all devices.

        Args:
          kernel: Of the model.
          rows: λ [P · U, C] of the words of the documents.
          total: T [1, C].
          rest: The dense leaves.
          part: The documents, their number, and B.
          key: A random key of this step.
        """
        documents, size, batch_size = part
        scratch = jnp.zeros((len(rows), kernel.width()), rows.dtype)
        if self.is_batched:
            features = kernel.features(rows, kernel.normalisers(total))
        else:
            features = _features_by_row(scratch, rows, total, kernel)
        result = kernel.fit((features,), total, rest, documents, (jnp.int32(0), size), scratch, key)
        return result._replace(rest=mean_over_devices(result.rest, documents.size / batch_size, self.name))

    def statistics(self, result: KernelResult, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Send the statistics of the rows [P, U, C] to their owners; return those for this device.

        Returns:
          The statistics of each device for the rows of this one, and Σ_w of the statistics of each device [P, C].
        """
        total = result.total
        if jax.tree.leaves(result.rest):  # dense leaves that fail make the step fail
            total = jnp.where(are_finite(result.rest), total, jnp.nan)
        return self.rows(result.sums[:, : shape[-1]].reshape(shape), total)


def failure_of(totals: Array, scale: Numeric) -> Array:
    """Return what is wrong with the statistics of a step, from the column sums [P, C] of all devices."""
    scaled = scale * totals
    is_finite = jnp.isfinite(scaled).all() & jnp.isfinite(scaled.sum(0)).all()
    return jnp.where(jnp.isneginf(totals).any(), NEGATIVE, jnp.where(is_finite, 0, NOT_FINITE))


def mean_over_devices(stats: PyTree, fraction: Numeric, name: str) -> PyTree:
    """Return the sum over the devices of statistics that each device scaled from its documents to all of the data."""
    return jax.tree.map(lambda leaf: lax.psum((leaf * fraction).astype(leaf.dtype), name), stats)


def are_finite(tree: PyTree) -> Array:
    """Return whether all arrays are finite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def sharding(mesh: Mesh, axis: int = REPLICATED) -> NamedSharding:
    """Return the sharding of an array with one partitioned axis, or of a replicated one."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, *([] if axis == REPLICATED else mesh.axis_names)))


def step_key(data: Array | None, key_type: str | None, step: Numeric) -> PRNGKey | None:
    """Return the random key of a step.

    Args:
      data: Data of the random key of the run, or None.
      key_type: The implementation of a typed random key; None for no key, or one that is an array of numbers.
      step: Number of steps before this one.
    """
    if data is None:
        return None
    key = data if key_type is None else jax.random.wrap_key_data(data, impl=key_type)
    return jax.random.fold_in(key, step)


def _thirds(x):
    """Return a vector as three vectors of bfloat16, whose sum has 24 bits; what is not finite stays in the first."""
    # Not by conversions, which XLA may leave out.
    high = lax.reduce_precision(x, 8, 7)
    rest = jnp.where(jnp.isfinite(x), x - high, 0)
    middle = lax.reduce_precision(rest, 8, 7)
    return tuple(part.astype(jnp.bfloat16) for part in (high, middle, rest - middle))


@fused
def _features_by_row(out, rows, total, kernel):
    """Compute the features row by row, which is faster on a CPU than all rows together."""
    normalisers = kernel.normalisers(total)

    def compute(i, out):
        return set_row(out, i, kernel.features(row(rows, i), normalisers))

    return lax.fori_loop(0, len(rows), compute, out)
