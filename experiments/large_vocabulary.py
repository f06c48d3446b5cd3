"""Train with a vocabulary that is too large for one small machine: memory per process.

    python experiments/large_vocabulary.py
    python experiments/large_vocabulary.py --processes 4 --num-words 1000000 --topics 200 --window 10

Starts processes on this machine, which train LDA on a generated corpus, and prints the largest resident memory of each.
λ is 800 MB with the default options; with the window sums and clocks, the rows are 2.4 GB in all. Exits with 1 if a
process uses more than ``--limit`` GB.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time

import numpy as np


def main() -> None:
    """Start the processes and print what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--num-words", type=int, default=1_000_000, help="V (%(default)s)")
    parser.add_argument("--topics", type=int, default=200, help="K (%(default)s)")
    parser.add_argument("--window", type=int, default=10, help="L (%(default)s)")
    parser.add_argument("--documents", type=int, default=100_000, help="of the generated corpus (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=300, help="documents per process and step (%(default)s)")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--limit", type=float, default=3.0, help="GB per process (%(default)s)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(train(args)), flush=True)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"WORLD_SIZE": str(args.processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, *sys.argv, "--worker"]
    processes = [
        subprocess.Popen(command, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(args.processes)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if failed := [f"process {rank}: code {each.returncode}" for rank, each in enumerate(processes) if each.returncode]:
        sys.exit("; ".join(failed))
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    for rank, each in enumerate(found):
        print(f"process {rank}: " + ", ".join(f"{name} {value:,.2f}" for name, value in each.items()))
    sys.exit(max(each["peak GB"] for each in found) > args.limit)


def generate(num_docs: int, num_words: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the CSR arrays of documents of 60 different words each, with Zipf's law."""
    rng, length = np.random.default_rng(0), 60
    words = (num_words ** rng.random((num_docs, length), np.float32) - 1).astype(np.int32)
    words.sort(1)
    different = np.diff(words, axis=1, prepend=-1) > 0
    indptr = np.concatenate([[0], np.cumsum(different.sum(1))])
    return indptr, words[different], np.ones(int(indptr[-1]), np.float32)


def initial_topics(num_words: int, num_topics: int) -> np.ndarray:
    """Return λ [V, K], the same in every process, without further memory."""
    rng, lam = np.random.default_rng(1), np.empty((num_words, num_topics), np.float32)
    for rows in np.array_split(lam, 100):
        rng.standard_gamma(100, dtype=np.float32, out=rows)
    lam *= np.float32(0.01)
    return lam


def train(args: argparse.Namespace) -> dict[str, float]:
    """Train in this process; return what it measured."""
    from smoothgrad_jax import LDA, Corpus, distributed, fit, robbins_monro

    number = distributed.start(start_timeout=120)
    import jax

    corpus = Corpus(*generate(args.documents, args.num_words), args.num_words)
    before = peak()
    training = fit(
        corpus,
        LDA(0.1, 0.1, corpus.num_docs),
        initial_topics(args.num_words, args.topics),
        window=args.window,
        rho=robbins_monro(10, 0.7),
        batch_size=args.batch_size * number,
        steps=args.steps,
        report_every=max(1, args.steps // 5),
        key=jax.random.key(0),
        mesh=distributed.mesh(),
    )
    rates = [report.rate for report in training]
    trained, begun = peak(), time.perf_counter()
    lam = training.params
    return {
        "GB before training": before,
        "GB during training": trained,
        "peak GB": peak(),
        "documents/s": max(rates),
        "seconds to collect λ": time.perf_counter() - begun,
        "mean of λ": float(np.mean([rows.mean() for rows in np.array_split(lam, 100)])),
    }


def peak() -> float:
    """Return the largest resident memory of this process so far in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


if __name__ == "__main__":
    main()
