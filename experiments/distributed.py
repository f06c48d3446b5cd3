"""How fast are several processes on this machine, and how many bytes do they exchange?

    python experiments/distributed.py arxiv/bow.npz
    python experiments/distributed.py arxiv/bow.npz --processes 0,1,2 --batch-size 2400 --num-words 100000

Every configuration runs in processes of its own, each pinned to one core: one process without a mesh, then the mesh of
P = 1, 2, … processes with the same minibatch per process. All take turns, and the fastest of ``--repeats`` counts. The
score is that of 1,000 documents after those of ``--documents``.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time

import numpy as np
import scipy.sparse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", help="documents × words, saved by scipy")
    parser.add_argument(
        "--processes", default="0,1,2", help="numbers of processes; 0 is one without a mesh (%(default)s)"
    )
    parser.add_argument("--batch-size", type=int, default=300, help="documents per process and step (%(default)s)")
    parser.add_argument("--documents", type=int, default=120_000, help="documents to use (%(default)s)")
    parser.add_argument("--num-words", type=int, help="V; words beyond those of the corpus never occur")
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--window", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60, help="steps that are measured (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--messages", choices=["bfloat16"], help="exchange 16-bit floats")
    parser.add_argument("--lazy-from", type=int, help="V from which rows decay lazily; default: that of the package")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(args)), flush=True)
        return
    configurations = ["no mesh" if number == "0" else number for number in args.processes.split(",")]
    found: dict[str, list[dict]] = {name: [] for name in configurations}
    for _ in range(args.repeats):
        for name in configurations:
            found[name].append(run_processes(name))
    print(
        f"{args.batch_size} documents per process and step; MB per process and step: sent, rows that it uses both ways"
    )
    heads = ["processes", "ms/step", "CPU ms", "docs/s", "MB sent", "MB used", "score"]
    print("".join(f"{head:>12}" for head in heads))
    for name, runs in found.items():
        best = {key: min(run[key] for run in runs) for key in runs[0]}
        documents = args.batch_size * (1 if name == "no mesh" else int(name)) / best["ms"] * 1e3
        numbers = best["ms"], best["cpu"], documents, best["sent"], best["needed"], best["score"]
        print(f"{name:>12}" + "".join(f"{number:12,.2f}" for number in numbers[:-1]) + f"{numbers[-1]:12.5f}")


def run_processes(name: str) -> dict:
    """Run one configuration and return what its first process measured."""
    number = 1 if name == "no mesh" else int(name)
    cores = sorted(os.sched_getaffinity(0))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--worker", name],
            env=env | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            preexec_fn=lambda rank=rank: os.sched_setaffinity(0, {cores[rank % len(cores)]}),
        )
        for rank in range(number)
    ]
    outputs = [process.communicate()[0] for process in processes]
    return json.loads(outputs[0].splitlines()[-1])


def measure(args: argparse.Namespace) -> dict:
    """Measure one configuration in this process."""
    from smoothgrad_jax import (
        LDA,
        Corpus,
        distributed,
        fit,
        init_topics,
        log_predictive,
        robbins_monro,
        split_documents,
    )
    from smoothgrad_jax.training import mesh_engine

    mesh_engine.LAZY_FROM = mesh_engine.LAZY_FROM if args.lazy_from is None else args.lazy_from
    number = distributed.start()
    import jax

    X = scipy.sparse.csr_array(scipy.sparse.load_npz(args.corpus))
    X, unseen = X[: args.documents], X[args.documents :][:1_000]
    num_words = args.num_words or X.shape[1]
    corpus = Corpus(X.indptr, X.indices, X.data, num_words)
    lam = init_topics(jax.random.key(args.seed), num_words, args.topics)
    size = args.batch_size * number
    warm = 15
    model = LDA(0.5, 0.5, corpus.num_docs)
    training = fit(
        corpus,
        model,
        lam,
        window=args.window,
        rho=robbins_monro(10, 0.7),
        batch_size=size,
        steps=warm + args.steps,
        report_every=warm,
        key=jax.random.key(100 + args.seed),
        **({"threads": 1} if args.worker == "no mesh" else {"mesh": distributed.mesh(), "messages": args.messages}),
    )
    next(training)
    used, first = time.process_time(), training.step
    # On a shared machine the best of many short intervals is the least disturbed one.
    best = min(size / report.rate for report in training)
    used = time.process_time() - used
    rows = np.unique(corpus.indices[: corpus.indptr[args.batch_size]]).size
    sent = needed = 0.0
    if number > 1:
        # Each process sends, to each other one, numbers of rows, rows, and statistics of rows.
        capacity, row = training._engine._capacity.words, 4 * args.topics
        sent = (number - 1) * capacity * (4 + 2 * row / (2 if args.messages else 1)) / 1e6
        needed = 2 * row * rows * (number - 1) / number / 1e6
    steps, lam = training.step - first, training.params
    halves = split_documents(Corpus(unseen.indptr, unseen.indices, unseen.data, num_words), jax.random.key(1))
    score = float(log_predictive(model, lam, *halves))
    return {"ms": best * 1e3, "cpu": used / steps * 1e3, "sent": sent, "needed": needed, "score": score}


if __name__ == "__main__":
    main()
