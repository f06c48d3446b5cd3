"""Where the time of a training step goes, on one core.

    python experiments/anatomy.py                             generated documents
    python experiments/anatomy.py --corpus arxiv/bow.npz
    python experiments/anatomy.py --words 100000              generated as for the benchmark, with so many words

Topics are trained for a pass; then every program of a step is waited for and timed by itself, and the rows' program
again with only one of its parts at work: values that leave the window, values that enter it, β̃ of the words to come.
Medians and, in brackets, minima, in milliseconds.
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
from smoothgrad_jax.models import lda
from smoothgrad_jax.training import rows

TOPICS, BATCH, WINDOW, STEPS = 100, 300, 10, 60
PARTS = {"nothing": (0, 0, 0), "leave": (1, 0, 0), "enter": (0, 1, 0), "use": (0, 0, 1)}


def timed(times, name, function):
    """The function, which waits for its result and notes the seconds."""

    def call(*args):
        jax.block_until_ready(args)
        begun = time.perf_counter()
        result = jax.block_until_ready(function(*args))
        times.setdefault(name, []).append(time.perf_counter() - begun)
        return result

    return call


def in_parts(times, program):
    """The rows' program, which before it works is timed on copies with only a part of the words each."""

    def call(shard, slot, table, totals, leave, enter, use, *rest):
        none = np.full_like(use, rows._END)
        for name, (leaves, enters, used) in PARTS.items():
            lists = (leave[0] if leaves else none, *leave[1:]), (enter[0] if enters else none, *enter[1:])
            copies = jax.tree.map(lambda x: jax.numpy.array(np.array(x)), (shard, slot, table))  # which it uses up
            timed(times, f"rows: {name}", program)(*copies, totals, *lists, use if used else none, *rest)
        return timed(times, "rows", program)(shard, slot, table, totals, leave, enter, use, *rest)

    return call


def measure(corpus: Corpus, alpha: float, eta: float) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of every part of every step, and some facts."""
    model = LDA(alpha, eta, corpus.num_docs)
    options = {"batch_size": BATCH, "window": WINDOW, "threads": 1, "key": jax.random.key(0)}
    training = fit(corpus, model, init_topics(jax.random.key(1), corpus.num_words, TOPICS), passes=1, **options)
    *_, report = training
    state = rows.init(training.params)
    dealt, layout = rows.deal(lda.check(model, training.params), state), corpus.layout(BATCH)
    rng, schedule = np.random.default_rng(0), robbins_monro(64 + training.step, 0.7)
    times, used, evaluations = {}, [], []
    programs = rows._rows, rows._documents
    try:
        for step in range(2 * WINDOW + STEPS):
            batch = timed(times, "pack", corpus.pack)(rng.integers(0, corpus.num_docs, BATCH), layout)
            share = timed(times, "share", rows.share)(batch, 1)
            if step == 2 * WINDOW:  # the window is full, everything is compiled
                times.clear()
                rows._rows, rows._documents = in_parts(times, programs[0]), timed(times, "documents", programs[1])
            state, info = rows.step(state, share, dealt, float(schedule(step)), WINDOW)
            used.append(int((share.words < rows._END).sum()))
            evaluations.append(info.iterations / BATCH)
    finally:
        rows._rows, rows._documents = programs
    facts = {
        "words in a minibatch": statistics.mean(used),
        "evaluations a document": statistics.mean(evaluations),
        "documents/s at the end of the pass": report.rate,
    }
    return times, facts


def main():
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--corpus", type=pathlib.Path, help="documents × words (bow.npz), or a converted folder; else generated"
    )
    parser.add_argument("--words", type=int, help="V of documents that are generated as those of the benchmark")
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
        "share": "deal them out (in a thread, ahead)",
        "documents": "documents: fit γ, sum Ŝ",
        "rows": "rows",
        "rows: nothing": "  of which without any row",
        "rows: leave": "  values that leave the window",
        "rows: enter": "  values that enter it",
        "rows: use": "  rows brought up to date, and their β̃",
    }
    for key, label in labels.items():
        part = key.startswith("rows: ") and key != "rows: nothing"
        median, least = (1e3 * (f(times[key]) - part * f(times["rows: nothing"])) for f in (statistics.median, min))
        print(f"{label:<46}{median:>10.2f}  ({least:.2f})")


if __name__ == "__main__":
    main()
