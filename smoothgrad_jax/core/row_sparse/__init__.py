"""Smoothed SVI for statistics that touch few rows: a step costs O(rows in the minibatch), not O(V).

The parameters are a matrix λ [V, C] with one row per word (or per item, node, …). The statistics of a minibatch are
zero in most rows. Each step of smoothed SVI moves every row. But while no statistics of row w enter or leave the
window, the window sum Σ_w does not change, and many steps on the row collapse into one, in closed form:

    λ_w ← P λ_w + (1 − P) η_w + Q Σ_w                from step i to step j
    P = Π (1 − ρ_t) = exp(A_j − A_i)                 A_t+1 = A_t + log(1 − ρ_t)
    Q = C_j − P C_i                                  C_t+1 = (1 − ρ_t) C_t + ρ_t / n_t

So the algorithm reads a row when the minibatch contains its word. It writes a row when statistics of the row enter the
window or leave it. A window slot stores these rows only. The column sums T_k = Σ_w λ_wk follow without a pass over the
rows, because T obeys the same recursion, with prior Σ_w η_w and the column sums of the statistics.

| letter  | name             | shape          | meaning                                                             |
|---------|------------------|----------------|---------------------------------------------------------------------|
| S       |                  |                | partitions, one per thread; word w is row w // S of partition w % S |
| λ, Σ, δ | ``partitions``   | [V/S, 3C + 4]  | parameters, window sum, and the rounding error of the sum (TwoSum); |
|         |                  |                | then the clock (A, C) of the last write, each as a sum of 2 floats  |
| T       | ``totals``       | [1, 3C + 4]    | column sums of the same quantities, one copy per thread             |
| A, C    | ``clock``        | [2]            | clock of the next step                                              |
| n       |                  |                | divisor of the sum: number of values in the window, or L            |

Modules:

| module      | contents                                                                                       |
|-------------|------------------------------------------------------------------------------------------------|
| ``kernel``  | what a model provides: the :class:`RowKernel` and :class:`RowSparseModel` protocols            |
| ``decay``   | the closed form above: advance a row to a clock. Training, reading λ and resuming all use it   |
| ``slots``   | how a window slot stores values: float32, bfloat16 or uint8                                    |
| ``state``   | the immutable state, the minibatch partitioned among threads, the workspace                    |
| ``program`` | the compiled loop over the rows of one partition                                               |
| ``step``    | one step of smoothed SVI, reading λ, and changes of the prior                                  |
| ``mesh``    | a step on the devices of a mesh, one partition per device                                      |

With L = 1 the algorithm is SVI with lazy updates. For every L it computes the same λ as
:func:`smoothgrad_jax.global_step`, up to rounding.
"""
