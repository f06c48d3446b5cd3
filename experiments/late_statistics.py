"""How much faster are two processes if the statistics of a minibatch travel while the next one is fitted?

    python experiments/late_statistics.py arxiv/bow.npz
    python experiments/late_statistics.py arxiv/bow.npz --gbit 1          the same over an emulated link (as root)

The step of the mesh is divided into two programs: ``documents`` fits minibatch t, and ``exchange`` sends statistics to
the owners of the words, takes the global step, and sends the rows for the next minibatch. In sequence the exchange
sends the statistics of minibatch t, as the package does. Overlapped it sends those of t − 1 while another thread fits
minibatch t: statistics enter one step late. What this costs in score is in ``minibatch.py``.

Each process has one core. Printed are milliseconds per step, of the fastest of 5 groups of 10 steps, with 120,000
documents and 100 topics; ``package`` is a step of ``fit``.
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from emulated_network import emulated_machines
from jax import lax
from jax.sharding import PartitionSpec

from smoothgrad_jax import LDA, Corpus, distributed, fit, global_step, init_topics
from smoothgrad_jax.core import mesh_step
from smoothgrad_jax.core.mesh_exchange import Exchange
from smoothgrad_jax.core.row_sparse.kernel import KernelResult

PORT, STEPS, REPEATS, WINDOW = 29_511, 10, 5, 10
COLUMNS = ("documents", "exchange", "sequence", "overlapped", "package")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="documents × words, saved by scipy")
    parser.add_argument("--batch-sizes", default="300,2400", help="documents per process and step (%(default)s)")
    parser.add_argument("--gbit", type=float, help="bandwidth of an emulated link; default: the loopback interface")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        measure(args.corpus, args.worker)
        return
    print(f"{'B/P':>9}" + "".join(f"{what:>12}" for what in COLUMNS), flush=True)
    program = [sys.executable, str(Path(__file__).absolute()), str(args.corpus.absolute()), "--worker"]
    for size in args.batch_sizes.split(","):
        with nullcontext() if args.gbit is None else emulated_machines(2, args.gbit) as machines:
            address = machines[0].address if machines else "127.0.0.1"
            env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(PORT), "NPROC": "2"}
            processes = []
            for rank in range(2):
                prefix, pin = machines[rank].prefix if machines else [], ["taskset", "--cpu-list", str(rank)]
                processes.append(subprocess.Popen([*prefix, *pin, *program, size], env=env | {"RANK": str(rank)}))
            codes = [process.wait() for process in processes]
            if any(codes):
                sys.exit(f"a process failed: exit codes {codes}")


def measure(path, batch_size):
    """Measure one minibatch size in one of the two processes; process 0 prints."""
    distributed.start()
    corpus, size = Corpus.of(scipy.sparse.csr_array(scipy.sparse.load_npz(path))[:120_000]), 2 * batch_size
    model, lam = LDA(0.5, 0.5, corpus.num_docs), init_topics(jax.random.key(0), corpus.num_words, 100)
    train = partial(fit, corpus, model, lam, window=WINDOW, rho=0.01, batch_size=size, key=jax.random.key(1))
    training = train(steps=STEPS * REPEATS, report_every=STEPS, mesh=distributed.mesh())
    best = {"package": min(size / progress.rate for progress in training)}
    again = train(steps=1, mesh=distributed.mesh())
    prepared = itertools.islice(again._batches, STEPS + 2)
    batches = [again._engine._distribute(each.batch.batch, np.zeros(5, np.int32)) for each in prepared]
    documents, exchange = programs(training._engine._parameters, size)
    state, asked, thread = training._engine._parameters._state, [], ThreadPoolExecutor(1)
    for batch in batches:
        state, rows = exchange(state, None, batch)
        asked.append(rows)
    found = [documents(*each) for each in zip(asked, batches, strict=True)]

    def wait_for_exchange(*given):
        return jax.block_until_ready(exchange(*given))

    def take_steps(state, what):
        rows, sent = asked[1], (asked[0], found[0])
        for t in range(1, STEPS + 1):
            if what == "documents":
                jax.block_until_ready(documents(asked[t], batches[t]))
            elif what == "exchange":
                state, _ = wait_for_exchange(state, (asked[t], found[t]), batches[t + 1])
            elif what == "sequence":
                state, rows = wait_for_exchange(state, (rows, documents(rows, batches[t])), batches[t + 1])
            else:
                coming = thread.submit(wait_for_exchange, state, sent, batches[t + 1])
                sent = rows, jax.block_until_ready(documents(rows, batches[t]))
                state, rows = coming.result()
        return state

    for what in COLUMNS[:-1] * (REPEATS + 1):  # the first of them compiles
        begun = time.perf_counter()
        state = take_steps(state, what)
        best[what] = min(best.get(what, np.inf), (time.perf_counter() - begun) / STEPS)
    if jax.process_index() == 0:
        print(f"{batch_size:9,}" + "".join(f"{1e3 * best[what]:12.1f}" for what in COLUMNS), flush=True)


def programs(parameters, batch_size):
    """Return ``documents(rows, batch) -> sums`` and ``exchange(state, (rows, sums), next batch) -> state, next rows``.

    ``rows`` are the words that each process wants of this one, the rows that this one wanted, and the sums of λ.
    """
    mesh, kernel, by_device = distributed.mesh(), parameters._kernel, PartitionSpec("p")
    devices = Exchange(mesh, is_short=False, is_batched=False)
    divided = partial(jax.shard_map, mesh=mesh, in_specs=by_device, out_specs=by_device, check_vma=False)

    def ask(matrix, batch):
        words, _, _, notices = batch.part()
        wanted, _ = devices.words(words, notices)
        is_word = jnp.arange(len(matrix)) * mesh.size + lax.axis_index("p") < parameters.num_words
        blocks = matrix.at[wanted].get(mode="fill", fill_value=1)
        rows, sums = devices.rows(blocks, mesh_step._column_sums(matrix, is_word, False))
        return wanted[None], rows[None], sums.sum(0)[None]

    def fit_documents(asked, batch):
        (_, rows, total), (_, part, size, _) = asked, batch.part()
        given = part, size, float(batch_size)
        result = devices.fit(kernel, rows.reshape(-1, rows.shape[-1]), total, None, given, None)
        return result.sums[None], result.total[None]

    def send(matrix, asked, found):
        result = KernelResult(found[0][0], found[1][0], None, None)
        received, _ = devices.statistics(result, asked[1].shape[1:])
        return jnp.zeros_like(matrix).at[asked[0][0]].add(kernel.scale(batch_size) * received, mode="drop")

    @partial(jax.jit, donate_argnums=0)
    def exchange(state, sent, batch):
        if sent is not None:
            stats = divided(send)(state.params[0], *sent)
            # With ρ = 0 the documents take the same number of iterations in every measurement.
            state = global_step(state, (stats, None), parameters._prior, 0.0, WINDOW)
        return state, divided(ask)(state.params[0], batch)

    return jax.jit(divided(fit_documents)), exchange


if __name__ == "__main__":
    main()
