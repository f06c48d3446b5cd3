"""Measure the estimator against scikit-learn's, the command against ``fit``, conversion, and memory.

    python experiments/benchmark_text.py estimator 20ng/bow.npz arxiv/bow.npz
    python experiments/benchmark_text.py command arxiv/bow.npz
    python experiments/benchmark_text.py convert abstracts.jsonl.gz
    python experiments/benchmark_text.py memory abstracts.jsonl.gz abstracts.jsonl.gz

``estimator`` fits ``SmoothedLDA(K, method="variational")`` and
``LatentDirichletAllocation(K, learning_method="online")`` to the same documents with the same passes, batch size,
priors and step sizes, in turn, and scores both on held-out documents with the same NumPy code (document completion,
``benchmark.py``). The seconds of SmoothedLDA include compilation; with several repeats they are also shown without it.

``command`` converts a corpus and trains with ``smoothgrad fit --method variational``, in turn with ``fit`` on the same
arrays in memory (``engine``), each in its own process; documents/s include compilation, as both report it.

``convert`` runs ``smoothgrad convert`` in its own process; it shows documents/s as the command reports them, and
seconds including the start of Python.

``memory`` converts the files (a file may be given many times) and trains on the folder for one minute; it shows the
peak of the private memory of each command and its child processes (RssAnon, sampled ten times per second; Linux).
"""

import argparse
import json
import math
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import benchmark
import numpy as np
import scipy.sparse

SMOOTHGRAD = ("-m", "smoothgrad_jax")


def load(path, documents, held_out):
    """Return training documents and the halves of held-out documents."""
    X = scipy.sparse.load_npz(path).tocsr()
    observed, scored = benchmark.split_tokens(X[:held_out], np.random.default_rng(0))
    return X[held_out : held_out + documents], SimpleNamespace(observed=observed, held_out=scored)


def estimator(args):
    """Fit both estimators in turn on every corpus."""
    from sklearn.decomposition import LatentDirichletAllocation

    from smoothgrad_jax import SmoothedLDA

    for path in args.paths:
        X, halves = load(path, args.documents, args.held_out)
        same = {"doc_topic_prior": 0.1, "topic_word_prior": 0.1, "batch_size": 256, "max_iter": args.passes}
        same |= {"learning_offset": 64.0, "learning_decay": 0.7}
        found = {"ours": [], "theirs": []}
        for seed in range(args.repeats):
            for name, model in (
                ("ours", SmoothedLDA(args.topics, method="variational", random_state=seed, **same)),
                (
                    "theirs",
                    LatentDirichletAllocation(
                        args.topics, learning_method="online", random_state=seed, n_jobs=args.jobs, **same
                    ),
                ),
            ):
                begun = time.perf_counter()
                model.fit(X)
                seconds = time.perf_counter() - begun
                topics = model.components_ / model.components_.sum(1, keepdims=True)
                score = benchmark.log_predictive(topics, halves, same["doc_topic_prior"])
                found[name].append((seconds, score))
                print(f"{path.parent.name}  {name:7} seed {seed}  {seconds:7.1f} s  score {score:.4f}", flush=True)
        ours, theirs = (np.array(found[name]) for name in ("ours", "theirs"))
        ratio = np.median(theirs[:, 0]) / ours[:, 0]
        print(
            f"{path.parent.name}: {X.shape[0]:,} documents, {args.passes} passes, K = {args.topics}: "
            f"{ratio[0]:.1f} times as fast with compilation"
            + (f", {np.median(ratio[1:]):.1f} without" if len(ratio) > 1 else "")
            + f"; scores {ours[:, 1].mean():.4f} and {theirs[:, 1].mean():.4f}"
        )


def command(args):
    """Run ``smoothgrad fit`` on a converted corpus and ``fit`` on arrays in memory, each in its own process."""
    for path in args.paths:
        with tempfile.TemporaryDirectory() as folder:
            corpus = pathlib.Path(folder) / "corpus"
            run(*SMOOTHGRAD, "convert", path, corpus)
            rates = {"command": [], "engine": []}
            for repeat in range(args.repeats):
                out = pathlib.Path(folder) / f"model {repeat}"
                settings = ["--topics", args.topics, "--batch-size", 300, "--passes", 1, "--held-out", 1_000, "--json"]
                settings += ["--method", "variational", "--tau", 64]
                last = json.loads(run(*SMOOTHGRAD, "fit", corpus, "--out", out, *settings).splitlines()[-1])
                rates["command"].append(300 * last["step"] / last["seconds"])
                rates["engine"].append(float(run(__file__, "engine", path, "--topics", args.topics)))
                print({name: round(values[-1]) for name, values in rates.items()}, flush=True)
            ratio = statistics.median(rates["command"]) / statistics.median(rates["engine"])
            print(f"{path.parent.name}: the command trains at {ratio:.2f} of the engine's documents/s (medians)")


def engine(args):
    """Print documents/s of ``fit`` on arrays in memory, with the settings of the command."""
    import jax

    from smoothgrad_jax import LDA, Corpus, fit, robbins_monro, seed_topics

    corpus, key = Corpus.of(scipy.sparse.load_npz(args.paths[0]).tocsr()), jax.random.key(0)
    model, lam = LDA(0.1, 0.1, corpus.num_docs), seed_topics(key, corpus, args.topics)
    *_, end = fit(corpus, model, lam, rho=robbins_monro(64, 0.7), batch_size=300, key=key)
    print(end.documents / end.seconds)


def convert(args):
    """Convert text to a corpus folder."""
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(args.repeats):
            begun = time.perf_counter()
            printed = run(*SMOOTHGRAD, "convert", *args.paths, pathlib.Path(folder) / str(repeat))
            print(f"{printed.splitlines()[-1].split(': ')[1]}; {time.perf_counter() - begun:.1f} s including the start")


def memory(args):
    """Print the private memory of convert and fit."""
    with tempfile.TemporaryDirectory() as folder:
        corpus, model = pathlib.Path(folder) / "corpus", pathlib.Path(folder) / "model"
        fit = ["fit", corpus, "--topics", args.topics, "--passes", 1, "--out", model]
        for arguments, seconds in ((["convert", *args.paths, corpus], math.inf), (fit, 60)):
            begun, peak, interrupted = time.perf_counter(), 0, False
            with subprocess.Popen(python(*SMOOTHGRAD, *arguments)) as process:
                while process.poll() is None:
                    peak = max(peak, own_memory(process.pid))
                    if not interrupted and time.perf_counter() - begun > seconds:
                        process.send_signal(signal.SIGINT)
                        interrupted = True
                    time.sleep(0.1)
            if process.returncode and not interrupted:
                sys.exit(f"smoothgrad {arguments[0]} ended with code {process.returncode}")
            print(f"{arguments[0]}: at most {peak / 1024:.0f} MB, {time.perf_counter() - begun:.0f} s", flush=True)


def own_memory(process):
    """Return RssAnon of a process and its children in kB; 0 for a process that has ended."""
    try:
        status = pathlib.Path(f"/proc/{process}/status").read_text()
        own = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), 0)
        children = pathlib.Path("/proc", str(process), "task").glob("*/children")
        return own + sum(own_memory(child) for each in children for child in each.read_text().split())
    except OSError:
        return 0


def run(*arguments):
    """Run ``python …`` in a child process and return its standard output."""
    return subprocess.run(python(*arguments), check=True, stdout=subprocess.PIPE, text=True).stdout


def python(*arguments):
    """Return the command line for this Python."""
    return [sys.executable, *map(str, arguments)]


def main():
    """Run one of the measurements."""
    measurements = {each.__name__: each for each in (estimator, command, engine, convert, memory)}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=measurements)
    parser.add_argument("paths", nargs="+", type=pathlib.Path)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--held-out", type=int, default=1_000)
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--jobs", type=int, help="n_jobs of scikit-learn")
    args = parser.parse_args()
    measurements[args.what](args)


if __name__ == "__main__":
    main()
