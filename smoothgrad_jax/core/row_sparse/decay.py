"""Advance rows in closed form: the one implementation that training, reading λ and resuming share.

    λ ← P λ + (1 − P) η + Q Σ,      P = exp(A_j − A_i),   Q = C_j − P C_i

| letter  | name       | shape      | meaning                                                              |
|---------|------------|------------|----------------------------------------------------------------------|
| λ, Σ, δ | ``rows``   | [n, 3C + 4]| parameters, window sum, rounding error of the sum, and a clock       |
| A, C    | ``clock``  | [4]        | a clock in the dtype of the rows: A = a + a′ and C = c + c′          |
| P, Q    |            | [n, 1]     | factors of the closed form                                           |

All functions take NumPy and JAX arrays: the compiled loops call them for one row, reading λ for some thousand.
"""

import itertools

import numpy as np

from smoothgrad_jax.core.compensated import add
from smoothgrad_jax.core.types import Array, Numeric

CLOCK_SIZE = 4  # numbers of a clock in a row


def num_columns(rows: Array) -> int:
    """Return C."""
    return (rows.shape[1] - CLOCK_SIZE) // 3


def split_row(rows: Array) -> tuple[Array, Array, Array, Array]:
    """Return views of λ, Σ, δ [n, C] and the clocks [n, 4]."""
    columns = num_columns(rows)
    lam, total, residue, clocks = (
        rows[:, a:b] for a, b in itertools.pairwise((0, columns, 2 * columns, 3 * columns, rows.shape[1]))
    )
    return lam, total, residue, clocks


def split_clock(clock: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return (A, C) in float64 as [a, a′, c, c′] in ``dtype``, where a′ and c′ hold the rounding errors of a and c."""
    high = clock.astype(dtype)
    low = (clock - high).astype(dtype)
    return np.array([high[0], low[0], high[1], low[1]], dtype)


def factors(clocks: Array, clock: Array) -> tuple[Array, Array, Array]:
    """Return P, 1 − P and Q [n, 1] that advance rows from their clocks [n, 4] to one clock [4]."""
    xp = clocks.__array_namespace__()
    a, a_rest, c, c_rest = (clocks[:, j, None] for j in range(CLOCK_SIZE))
    # P = exp(A_j − A_i),   Q = C_j − P C_i = (C_j − C_i) + (1 − P) C_i
    log_P = (clock[0] - a) + (clock[1] - a_rest)
    lost = -xp.expm1(log_P)
    return xp.exp(log_P), lost, ((clock[2] - c) + (clock[3] - c_rest)) + lost * c


def combine(factors: tuple[Numeric, Numeric, Numeric], lam: Array, eta: Numeric, total: Array) -> Array:
    """Return P λ + (1 − P) η + Q Σ; a window sum that rounding left below 0 counts as 0, as no value is negative."""
    P, lost, Q = factors
    return P * lam + lost * eta + Q * lam.__array_namespace__().maximum(total, 0)


def advance(rows: Array, clock: Array, eta: Numeric) -> Array:
    """Return λ [n, C] of rows at a clock."""
    lam, total, _, clocks = split_row(rows)
    return combine(factors(clocks, clock), lam, eta, total)


def advance_rows(rows: Array, clock: Array, eta: Numeric) -> Array:
    """Return rows with λ at a clock, and with this clock."""
    lam = advance(rows, clock, eta)
    return rows.at[:, : lam.shape[1]].set(lam).at[:, -CLOCK_SIZE:].set(clock)


def change_sum(rows: Array, left: Numeric, entered: Numeric) -> tuple[Array, Array]:
    """Return Σ and δ [n, C] of rows after values left and entered the window."""
    _, total, residue, _ = split_row(rows)
    return add(*add(total, residue, -left), entered)
