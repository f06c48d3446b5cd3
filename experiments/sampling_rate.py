"""How does the rate of the sampled local step depend on the number of topics, beside tomotopy?

    python experiments/sampling_rate.py --corpus arxiv/bow.npz
    python experiments/sampling_rate.py --corpus arxiv/bow.npz --topics 100,1000 --threads 2

Documents per second of ``fit`` after compilation, with five sweeps and topics of one pass; and those of tomotopy for
sweeps 6 to 10, with as many workers. Runs on as many cores as there are threads. The fastest of ``--repeats`` counts.
"""

import argparse
import os
import pathlib
import time

import jax
import numpy as np
import scipy.sparse

import smoothgrad_jax as sj

WARM, SWEEPS = 12, 5  # steps before the measurement, sweeps per document


def rate_of_fit(X, num_topics, threads, repeats):
    """Return documents/s of the steps of one pass, after a pass that trains the topics."""
    model = sj.LDA(2.5 / num_topics, 0.05, X.shape[0], method=sj.Sampled(SWEEPS))
    options = {"rho": 0.05, "batch_size": 256, "key": jax.random.key(0), "threads": threads}
    lam = sj.seed_topics(jax.random.key(0), X[:10_000], num_topics, num_docs=X.shape[0])
    lam = sj.fit(X, model, lam, passes=1, **options).finish().params
    steps, rates = X.shape[0] // 256, []
    for _ in range(repeats):
        training = sj.fit(X, model, lam, steps=WARM + steps, report_every=WARM, **options)
        next(training)
        begun, first = time.perf_counter(), training.step
        training.finish()
        rates.append((training.step - first) * 256 / (time.perf_counter() - begun))
    return max(rates)


def rate_of_tomotopy(X, num_topics, workers):
    """Return documents/s for as many sweeps as a document has in :func:`rate_of_fit`."""
    import tomotopy

    model = tomotopy.LDAModel(tw=tomotopy.TermWeight.ONE, k=num_topics, alpha=5 / num_topics, eta=0.05, seed=1)
    names = [str(w) for w in range(X.shape[1])]
    for d in range(X.shape[0]):
        row = slice(X.indptr[d], X.indptr[d + 1])
        model.add_doc([names[w] for w in np.repeat(X.indices[row], X.data[row].astype(int))])
    model.train(SWEEPS, workers=workers)
    begun = time.perf_counter()
    model.train(SWEEPS, workers=workers)
    return X.shape[0] / (time.perf_counter() - begun)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", required=True, type=pathlib.Path)
    parser.add_argument("--documents", type=int, default=30_000)
    parser.add_argument("--topics", default="100,1000", help="numbers of topics (%(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-args.threads :])
    X = scipy.sparse.csr_array(scipy.sparse.load_npz(args.corpus)).astype(np.float32)[: args.documents]
    print("| K | smoothgrad_jax, documents/s | tomotopy, documents/s per five sweeps |\n|---|---|---|")
    for num_topics in map(int, args.topics.split(",")):
        ours = rate_of_fit(X, num_topics, args.threads, args.repeats)
        print(f"| {num_topics} | {ours:,.0f} | {rate_of_tomotopy(X, num_topics, args.threads):,.0f} |", flush=True)


if __name__ == "__main__":
    main()
