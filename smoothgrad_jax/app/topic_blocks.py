"""λ [V, K] in blocks, which bound the memory that functions of a large λ need."""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

_BLOCK_SIZE = 1 << 22  # numbers per block of λ: 32 MB


def blocks(num_rows: int, row_size: int) -> Iterator[slice]:
    """Yield slices of rows with at most ``_BLOCK_SIZE`` numbers each."""
    step = max(1, _BLOCK_SIZE // row_size)
    return (slice(first, first + step) for first in range(0, num_rows, step))


def map_rows(lam: npt.NDArray, function: Callable[[npt.NDArray], npt.NDArray]) -> npt.NDArray:
    """Return ``function(rows)``, one number per row of λ, computed in blocks."""
    return np.concatenate([function(lam[rows]) for rows in blocks(*lam.shape)])


def topic_rows(lam: npt.NDArray) -> Iterator[npt.NDArray]:
    """Yield the columns of λ as contiguous float64 arrays, which are faster to read several times."""
    for columns in blocks(lam.shape[1], lam.shape[0]):
        yield from np.ascontiguousarray(lam[:, columns].T, dtype=np.float64)
