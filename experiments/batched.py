"""What do masks cost when all documents of a minibatch are fitted at once, and how fast is that on a CPU?

    python experiments/batched.py --corpus arxiv/bow.npz

A loop that updates all documents ends with the slowest one. The first table counts updates of blocks of eight words by
the variational step, in units of those that are needed: with arrays of one size, and with further arrays of half the
size, a quarter, … for the documents that are left. The second table times ``Sequential()`` and ``Batched()`` on the
CPU, for which ``Batched()`` is not meant; on a GPU or TPU nothing was measured.
"""

import argparse
import pathlib
import time
from functools import partial

import jax
import numpy as np
import scipy.sparse

from smoothgrad_jax import (
    LDA,
    Batched,
    Collapsed,
    Corpus,
    Sampled,
    Sequential,
    Variational,
    fit,
    local_step,
    seed_topics,
)
from smoothgrad_jax.models.lda import batch_fit
from smoothgrad_jax.models.lda.batch_entries import blocks_of, num_blocks, sizes


def block_rounds(iterations, blocks, capacities):
    """Return how many updates of blocks the loops over arrays of these sizes make."""
    rounds = total = 0
    for capacity, smaller in zip(capacities, (*capacities[1:], 0), strict=True):
        while blocks[iterations > rounds].sum() > smaller:
            rounds, total = rounds + 1, total + capacity
    return total


def milliseconds(call, repeats):
    """Return the shortest time of a call, after one that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begun)
    return 1e3 * min(times)


def main():
    """Train topics, count and time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", required=True, type=pathlib.Path)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[300, 2400])
    parser.add_argument("--repeats", type=int, default=5, help="0 only counts")
    args = parser.parse_args()
    corpus = Corpus.of(scipy.sparse.load_npz(args.corpus).tocsr()[: args.documents])
    model = LDA(0.1, 0.1, corpus.num_docs)
    lam = seed_topics(jax.random.key(0), corpus, args.topics)
    lam = jax.numpy.asarray(fit(corpus, model, lam, passes=2, key=jax.random.key(1)).finish().params)
    batches = [corpus.pack(np.arange(b), corpus.layout(b)) for b in args.batch_sizes]
    for batch in batches:
        iterations, blocks = np.asarray(local_step(model, lam, batch)[1].iterations), np.asarray(num_blocks(batch))
        needed, capacity = (iterations * blocks).sum(), len(blocks_of(batch, lam.dtype).document)
        capacities = sizes(capacity, batch_fit._RATIO, batch_fit._SMALLEST)
        counts = [block_rounds(iterations, blocks, capacities[:n]) / needed for n in range(1, 6)]
        print(f"B = {batch.size:,}: {iterations.mean():.1f} updates per document, at most {iterations.max()}")
        print(
            "  updates of blocks with 1, 2, … sizes, over those needed: "
            + ", ".join(f"{count:.2f}" for count in counts),
            flush=True,
        )
    for batch in batches if args.repeats else ():
        for method in (Variational(), Collapsed(), Sampled()):
            times = []
            for execution in (Sequential(), Batched()):
                one = model._replace(method=method, execution=execution)
                step = partial(local_step, one, lam, batch, key=jax.random.key(0))
                times.append(milliseconds(step, args.repeats))
            name = type(method).__name__
            print(f"B = {batch.size:,}, {name}: sequential {times[0]:.1f} ms, batched {times[1]:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
