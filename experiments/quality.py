"""Compare the topics of smoothgrad_jax and of tomotopy: quality against seconds, K = 100.

    python experiments/quality.py --corpus bow.npz --documents 30000
    python experiments/quality.py --corpus bow.npz --documents 30000 --show

tomotopy is optional: pip install tomotopy

Each run has its own process, on all cores. Seconds count training, with compilation and without reading the corpus or
scoring. 1,000 documents are held out. All runs have one scorer, that of ``LDA(method=Maximum())``: θ of a held-out
document from one half of its words, θ ∝ α + Σ n φ with E[β], then the mean of log p(word) over the other half, with the
α of the run. NPMI and effective topics: ``smoothgrad_jax.topic_quality`` on the first 20,000 training documents.

Results are appended to ``--results``; a run that is there already is not repeated.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
import scipy.sparse

import smoothgrad_jax as sj
from smoothgrad_jax import Collapsed, Maximum, Mean, Sampled, Variational
from smoothgrad_jax.models.lda.model import split_held_out
from smoothgrad_jax.training.settings import Settings

HELD_OUT = 1_000
SWEEPS = (5, 10, 20, 50, 100, 200)  # of tomotopy
FRACTIONS = (0.1, 0.2, 0.5, 1.0)  # of a run of smoothgrad_jax


def load(path, documents):
    """Return training documents and held-out documents."""
    X = scipy.sparse.csr_array(scipy.sparse.load_npz(path)).astype(np.float32)
    order = np.random.default_rng(0).permutation(X.shape[0])
    return X[np.sort(order[HELD_OUT : HELD_OUT + documents])], X[order[:HELD_OUT]]


def measure(X, halves, alpha, lam):
    """Return the score and the quality of topics."""
    lam = np.asarray(lam, np.float32)
    quality = sj.topic_quality(lam, X[:20_000])
    return {
        "score": float(sj.log_predictive(sj.LDA(alpha, 0.1, 1, method=Maximum()), lam, *halves)),
        "npmi": float(np.mean(quality.npmi)),
        "diversity": float(quality.diversity),
        "effective": float(quality.effective_topics),
    }


def train_ours(X, halves, args):
    """Yield seconds, passes and quality along a run."""
    names = {
        "variational": Variational(),
        "mean": Mean(),
        "collapsed": Collapsed(),
        "sampled": Sampled(args.sweeps, max(1, args.sweeps // 2)),
    }
    key, steps = jax.random.key(args.seed), max(1, round(args.passes * X.shape[0] / args.batch_size))
    chosen = {"alpha": args.alpha, "eta": args.eta, "passes": None, "batch_size": args.batch_size}
    settings = Settings(
        topics=args.topics, method=args.method, **{k: v for k, v in chosen.items() if v is not None}
    ).resolve(X.shape[0])
    alpha, eta = (getattr(settings, name) for name in ("alpha", "eta"))
    begin = time.perf_counter()
    model = sj.LDA(alpha, eta, X.shape[0], method=names[args.method])
    lam = sj.seed_topics(key, X[:: -(-X.shape[0] // 10_000)], args.topics, num_docs=X.shape[0])
    rho = sj.robbins_monro(args.tau or settings.tau, args.kappa or settings.kappa)
    state, spent, step = np.asarray(lam), time.perf_counter() - begin, 0
    for fraction in FRACTIONS:
        begin = time.perf_counter()
        number = max(1, round(fraction * steps)) - step
        run = sj.fit(
            X, model, state, window=args.window, rho=rho, steps=number, batch_size=args.batch_size, key=key
        ).finish()
        step, state, lam = step + number, run.state, run.params
        spent += time.perf_counter() - begin
        yield {"seconds": spent, "passes": step * args.batch_size / X.shape[0], **measure(X, halves, model.alpha, lam)}


def train_tomotopy(X, halves, args):
    """Yield seconds, sweeps and quality along a run of tomotopy, which learns α."""
    import tomotopy

    begin = time.perf_counter()
    model = tomotopy.LDAModel(
        tw=tomotopy.TermWeight.ONE, k=args.topics, alpha=args.alpha or 0.1, eta=args.eta or 0.05, seed=args.seed + 1
    )
    names = [str(w) for w in range(X.shape[1])]
    for d in range(X.shape[0]):
        row = slice(X.indptr[d], X.indptr[d + 1])
        model.add_doc([names[w] for w in np.repeat(X.indices[row], X.data[row].astype(int))])
    model.train(0)
    prepare, spent, done = time.perf_counter() - begin, 0.0, 0
    for sweeps in (number for number in SWEEPS if number <= args.passes):
        begin = time.perf_counter()
        model.train(sweeps - done, workers=0)
        spent, done = spent + time.perf_counter() - begin, sweeps
        used = np.array([int(word) for word in model.used_vocabs])
        lam = np.full((X.shape[1], args.topics), args.eta or 0.05, np.float32)
        counts = np.array(model.get_count_by_topics(), np.float64)
        lam[used] += np.stack([model.get_topic_word_dist(k) * counts[k] for k in range(args.topics)], 1)
        result = measure(X, halves, np.asarray(model.alpha, np.float32), lam)
        yield {"seconds": spent, "prepare": prepare, "passes": sweeps, **result}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", required=True, type=pathlib.Path)
    parser.add_argument("--documents", type=int, default=30_000)
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument(
        "--method", choices=("sampled", "collapsed", "mean", "variational", "tomotopy"), default="sampled"
    )
    parser.add_argument("--passes", type=float, default=10, help="passes, or sweeps of tomotopy")
    parser.add_argument("--sweeps", type=int, default=5)
    parser.add_argument("--window", type=float, default=1)
    parser.add_argument("--alpha", type=float)
    parser.add_argument("--eta", type=float)
    parser.add_argument("--tau", type=float)
    parser.add_argument("--kappa", type=float)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("quality.jsonl"))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    setting = {k: v for k, v in vars(args).items() if k not in ("corpus", "results", "inside") and v is not None}
    setting["corpus"] = args.corpus.parent.name or args.corpus.stem
    if not args.inside:
        lines = args.results.read_text().splitlines() if args.results.exists() else []
        if any(json.loads(line)["setting"] == setting for line in lines):
            print("measured already:", setting)
            return
        sys.exit(subprocess.run([sys.executable, *sys.argv, "--inside"]).returncode)
    X, held_out = load(args.corpus, args.documents)
    halves = split_held_out(held_out, jax.random.key(7), X.shape[1])
    train = train_tomotopy if args.method == "tomotopy" else train_ours
    curve = []
    for point in train(X, halves, args):
        curve.append(point)
        print(setting["corpus"], args.method, json.dumps({k: round(v, 3) for k, v in point.items()}), flush=True)
    with args.results.open("a") as file:
        file.write(json.dumps({"setting": setting, "curve": curve}) + "\n")


if __name__ == "__main__":
    main()
