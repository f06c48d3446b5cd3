"""Measure where the time of a training step goes, on one core.

    python experiments/anatomy.py                             generated documents
    python experiments/anatomy.py --corpus arxiv/bow.npz
    python experiments/anatomy.py --words 100000              generated as for the benchmark, with this many words

The script trains topics for one pass. Then it times each program of a step by itself, and the program that updates rows
once more with only one of its parts active: values that leave the window, values that enter it, β̃ of the words in use.
It prints medians and, in brackets, minima, in milliseconds.
"""

import argparse
import os
import pathlib
import statistics
import time

import jax
import numpy as np
from benchmark import generate
from study import read

from smoothgrad_jax import LDA, Corpus, fit, init_topics, robbins_monro
from smoothgrad_jax.core.row_sparse import step as row_step
from smoothgrad_jax.core.row_sparse.program import update_rows
from smoothgrad_jax.core.row_sparse.state import END, Workspace, init_rows, partition_batch, partition_prior

TOPICS, BATCH, WINDOW, STEPS = 100, 300, 10, 60
PARTS = {"nothing": (0, 0, 0), "leave": (1, 0, 0), "enter": (0, 1, 0), "use": (0, 0, 1)}


def timed(times, name, function):
    """Return the function, which waits for its result and records the seconds."""

    def call(*args):
        jax.block_until_ready(args)
        begun = time.perf_counter()
        result = jax.block_until_ready(function(*args))
        times.setdefault(name, []).append(time.perf_counter() - begun)
        return result

    return call


def in_parts(times, program):
    """Return the program that updates rows, which is first timed on copies with only some of the words each."""

    def call(kernel, partition, slot, features, total, leaving, entering, used, *rest):
        none = np.full_like(used, END)
        for name, (leaves, enters, uses) in PARTS.items():
            lists = [
                each if active else each._replace(words=none)
                for each, active in ((leaving, leaves), (entering, enters))
            ]
            copies = jax.tree.map(lambda x: jax.numpy.array(np.array(x)), (partition, slot, features))  # are donated
            timed(times, f"rows: {name}", program)(kernel, *copies, total, *lists, used if uses else none, *rest)
        return timed(times, "rows", program)(kernel, partition, slot, features, total, leaving, entering, used, *rest)

    return call


def measure(corpus: Corpus, alpha: float, eta: float) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of every part of every step, and some facts."""
    model = LDA(alpha, eta, corpus.num_docs)
    options = {"batch_size": BATCH, "window": WINDOW, "threads": 1, "key": jax.random.key(0)}
    training = fit(corpus, model, init_topics(jax.random.key(1), corpus.num_words, TOPICS), passes=1, **options)
    *_, report = training
    state, layout = init_rows(training.params), corpus.layout(BATCH)
    kernel, prior = model.row_kernel(TOPICS, state.dtype), partition_prior(eta, state)
    rng, schedule, workspace = np.random.default_rng(0), robbins_monro(64 + training.step, 0.7), Workspace()
    times, used, evaluations = {}, [], []
    programs = row_step.update_rows, row_step._fit
    try:
        for step in range(2 * WINDOW + STEPS):
            batch = timed(times, "pack", corpus.pack)(rng.integers(0, corpus.num_docs, BATCH), layout)
            part = timed(times, "partition", partition_batch)(batch, 1)
            if step == 2 * WINDOW:  # the window is full, everything is compiled
                times.clear()
                row_step.update_rows = in_parts(times, update_rows)
                row_step._fit = timed(times, "documents", programs[1])
            inputs = part, kernel, prior, float(schedule(step)), WINDOW
            state, info = row_step.step(state, *inputs, workspace, options=row_step.StepOptions())
            used.append(int((part.words < END).sum()))
            evaluations.append(sum(int(details.iterations) for details in info.details) / BATCH)
    finally:
        row_step.update_rows, row_step._fit = programs
    facts = {
        "words per minibatch": statistics.mean(used),
        "evaluations per document": statistics.mean(evaluations),
        "documents/s at the end of the pass": report.rate,
    }
    return times, facts


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--corpus", type=pathlib.Path, help="documents × words (bow.npz), or a converted folder; else generated"
    )
    parser.add_argument("--words", type=int, help="V of documents generated as for the benchmark")
    parser.add_argument("--documents", type=int, default=30_000)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--eta", type=float, default=0.5)
    args = parser.parse_args()
    if args.words and not args.corpus:
        name, X = "generated", generate(np.random.default_rng(0), args.documents, args.words, TOPICS, 60, tail=2)[0]
    else:
        name, X = read(args.corpus)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    times, facts = measure(Corpus.of(X[: args.documents]), args.alpha, args.eta)
    print(f"{name}, V = {X.shape[1]:,}, K = {TOPICS}, B = {BATCH}, L = {WINDOW}, α = {args.alpha:g}, η = {args.eta:g}")
    for fact, value in facts.items():
        print(f"{fact:<46}{value:>10,.1f}")
    labels = {
        "pack": "pack the documents (in a thread, ahead)",
        "partition": "partition the minibatch (in a thread, ahead)",
        "documents": "documents: fit γ, sum Ŝ",
        "rows": "rows",
        "rows: nothing": "  without any row",
        "rows: leave": "  values that leave the window",
        "rows: enter": "  values that enter it",
        "rows: use": "  rows advanced, and their β̃",
    }
    for key, label in labels.items():
        part = key.startswith("rows: ") and key != "rows: nothing"
        median, least = (1e3 * (f(times[key]) - part * f(times["rows: nothing"])) for f in (statistics.median, min))
        print(f"{label:<46}{median:>10.2f}  ({least:.2f})")


if __name__ == "__main__":
    main()
