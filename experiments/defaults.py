"""Compare default settings on real corpora, with one setting changed at a time.

    python experiments/defaults.py 20ng/bow.npz reuters/bow.npz arxiv/bow.npz --json defaults.json

Each run changes one of the base settings and trains with ``fit`` for ten passes over at most 20,000 documents of the
corpus. The score on 1,000 held-out documents after one, two, five and ten passes is nats per held-out word by document
completion (higher is better). Seconds are training time without compilation and scoring. For large corpora:

    python experiments/defaults.py arxiv/bow.npz --documents 600000 --topics 100 --passes 1 --change alpha
"""

import argparse
import json
import pathlib

import jax
import scipy.sparse

from smoothgrad_jax import LDA, Corpus, fit, init_topics, robbins_monro, seed_topics, split_documents

BASE = {"window": 10, "batch_size": 256, "tau": 64.0, "kappa": 0.7, "alpha": 0.1, "eta": 0.1}
CHANGES = {
    "batch_size": (64, 1_024),
    "window": (1, 3, 30, 100),
    "tau": (10.0, 256.0),
    "kappa": (0.5, 0.9),
    "alpha": (0.02, 0.5),
    "eta": (0.01, 0.5),
}
AFTER = (0.1, 0.2, 0.5, 1)  # fractions of the run
STARTS = {
    "seeds": seed_topics,
    "noise": lambda key, corpus, num_topics: init_topics(key, corpus.num_words, num_topics),
}


def settings(only):
    """Yield the base settings and every change of them, or the changes of one setting only."""
    yield "base", BASE
    for name, values in CHANGES.items() if only is None else [(only, CHANGES[only])]:
        for value in values:
            yield f"{name} = {value:g}", BASE | {name: value}


def scores(corpus, halves, num_topics, seed, chosen, start, passes):
    """Return {fraction of the run: (score, seconds)}."""
    model = LDA(chosen["alpha"], chosen["eta"], corpus.num_docs)
    lam = start(jax.random.key(seed), corpus, num_topics)
    a_tenth = -(-round(passes * corpus.num_docs / 10) // chosen["batch_size"])
    training = fit(
        corpus,
        model,
        lam,
        window=chosen["window"],
        rho=robbins_monro(chosen["tau"], chosen["kappa"]),
        steps=a_tenth * 10,
        batch_size=chosen["batch_size"],
        key=jax.random.key(seed + 1),
        held_out=halves,
        score_every=a_tenth,
    )
    found = {p.step // a_tenth: (p.score, p.seconds) for p in training if p.score is not None}
    return {after: found[round(10 * after)] for after in AFTER}


def main():
    """Run all settings on all corpora and print the scores per corpus."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("corpora", nargs="+", type=pathlib.Path, metavar="BOW.npz")
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--held-out", type=int, default=1_000)
    parser.add_argument("--topics", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--start", choices=STARTS, default="seeds", help="initial topics: from documents, or noise")
    parser.add_argument("--passes", type=float, default=10)
    parser.add_argument("--change", choices=CHANGES, help="change this setting only")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    results = []
    for path in args.corpora:
        X = scipy.sparse.load_npz(path).tocsr()
        halves = split_documents(X[: args.held_out], jax.random.key(0))
        corpus = Corpus.of(X[args.held_out : args.held_out + args.documents])
        print(f"\n{path.parent.name}: {corpus.num_docs:,} documents, {corpus.num_words:,} words, K = {args.topics}")
        print(f"{'passes':20}" + "".join(f"{args.passes * after:14g}" for after in AFTER) + f"{'seconds':>10}")
        for label, chosen in settings(args.change):
            for seed in range(args.seeds):
                found = scores(corpus, halves, args.topics, seed, chosen, STARTS[args.start], args.passes)
                print(
                    f"{label:20}" + "".join(f"{found[after][0]:14.4f}" for after in AFTER) + f"{found[1][1]:10.1f}",
                    flush=True,
                )
                results.append({"corpus": path.parent.name, "setting": label, "seed": seed, "after": found})
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
