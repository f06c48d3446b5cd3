"""What do a larger minibatch, and statistics that enter one step late, cost in score at equal documents?

    python experiments/minibatch.py --corpus arxiv/bow.npz --documents 100000

Each run makes one pass over the same documents with the default step sizes of ``fit``. Delay 1 emulates a run on many
machines that exchanges the statistics of one minibatch while it fits the next one: the statistics of step t are those
of minibatch t under the topics before step t − 1. ``fit`` makes the runs without delay; the runs with delay are a loop
over ``local_step`` and ``global_step``, which without delay gives the score of ``fit``.

Scores are nats per held-out word of 1,000 documents by document completion, from ``log_predictive`` with E[β]
(``method=Maximum()``); higher is better.
"""

import argparse
import collections
import json
import pathlib

import jax
import scipy.sparse

from smoothgrad_jax import (
    LDA,
    Corpus,
    Maximum,
    Sampled,
    Variational,
    fit,
    global_step,
    init,
    local_step,
    log_predictive,
    robbins_monro,
    sample,
    seed_topics,
    split_documents,
)

METHODS = {"sampled": Sampled(), "variational": Variational()}
HELD_OUT, KEY = 1_000, 1


def step_sizes(num_docs, batch_size):
    """Return the default step sizes of ``fit``: τ is the number of minibatches per pass, at most 64."""
    return robbins_monro(min(max(num_docs / batch_size, 1), 64), 0.7)


def train(corpus, model, lam, batch_size, window, steps):
    """Return λ after a run of ``fit``."""
    key = jax.random.key(KEY)
    rho = step_sizes(corpus.num_docs, batch_size)
    training = fit(corpus, model, lam, window=window, rho=rho, batch_size=batch_size, steps=steps, key=key)
    return training.finish().params


def train_late(corpus, model, lam, batch_size, window, steps, delay):
    """Return λ after the same run, with statistics that enter ``delay`` steps late."""
    key, layout = jax.random.key(KEY), corpus.layout(batch_size)
    rho, state = step_sizes(corpus.num_docs, batch_size), init(lam, window)
    waiting = collections.deque()
    for t in range(steps + delay):
        if t < steps:
            batch = corpus.pack(sample(key, t, corpus.num_docs, batch_size), layout)
            waiting.append(local_step(model, state.params, batch, key=jax.random.fold_in(key, t))[0])
        if t >= delay:
            state = global_step(state, waiting.popleft(), model.eta, rho(t - delay), window, donate=True)
    return state.params


def main():
    """Run every method, window and minibatch size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", required=True, type=pathlib.Path)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--windows", nargs="+", type=int, default=[1, 10])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[256, 512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--delays", nargs="*", type=int, default=[], help="emulate these delays; 0 checks the loop")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    X = scipy.sparse.load_npz(args.corpus).tocsr()
    halves = split_documents(X[:HELD_OUT], jax.random.key(0))
    corpus = Corpus.of(X[HELD_OUT : HELD_OUT + args.documents])
    results = []
    for method, window in ((m, w) for m in args.methods for w in args.windows):
        alpha, eta = (2.5 / args.topics, 0.05) if method == "sampled" else (0.1, 0.1)
        model = LDA(alpha, eta, corpus.num_docs, method=METHODS[method])
        lam = seed_topics(jax.random.key(0), corpus, args.topics)
        scorer = model._replace(method=Maximum())
        for size in args.batch_sizes:
            size = min(size, corpus.num_docs)
            steps = round(corpus.num_docs / size)
            runs = {delay: train_late(corpus, model, lam, size, window, steps, delay) for delay in args.delays}
            runs = runs or {None: train(corpus, model, lam, size, window, steps)}
            found = {delay: float(log_predictive(scorer, params, *halves)) for delay, params in runs.items()}
            for delay, score in found.items():
                result = {"method": method, "window": window, "batch_size": size, "steps": steps, "delay": delay}
                results.append(result | {"score": score})
                print(json.dumps(results[-1]), flush=True)
    if args.json:
        args.json.write_text("\n".join(map(json.dumps, results)) + "\n")


if __name__ == "__main__":
    main()
