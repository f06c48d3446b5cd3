"""Compare smoothgrad_jax with other installed LDA libraries: documents/s, held-out score over time, memory.

    python experiments/benchmark.py
    python experiments/benchmark.py --corpus bow.npz --documents 15000 --json out.json --plot out.png

The other libraries are optional: pip install scikit-learn gensim tomotopy vowpalwabbit matplotlib

Every library makes one pass over the same documents with the same K, B, α, η, step sizes ρ_t = (10 + t)^−0.7 and
tolerance, in its own process, which is pinned to its number of cores. Each repeat runs every library once, so that
noise affects all. ``peers.py`` documents how each library is trained and where it differs. This script scores the
topics of all libraries at the checkpoints with the same NumPy code: γ of a held-out document from one half of its
words, the mean of log p(word) over the other half.

Time outside training is reported separately: `start` (compilation, or scikit-learn's worker processes) and `prepare`
(conversion of the documents to the library's input). documents/s excludes both; the seconds of the curve and of
`target` include the start. The memory of worker processes is sampled at the checkpoints only.

Measurements of smoothgrad_jax alone, instead of the comparison:

    python experiments/benchmark.py --windows 1,100 --documents 60000
    python experiments/benchmark.py --vocabulary 10000,100000
    python experiments/benchmark.py --first
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np
import peers
import scipy.sparse
from scipy.special import psi

TAU, KAPPA, TOLERANCE, MAX_ITER = 10, 0.7, 1e-3, 100
CHECKPOINTS = (1, 2, 4, 7, 10)  # tenths of the pass
FIRST_DOCUMENTS = 1_000


class Library(NamedTuple):
    """An LDA library."""

    label: str
    module: str
    package: str


LIBRARIES = {
    "ours": Library("smoothgrad_jax", "smoothgrad_jax", "smoothgrad_jax"),
    "sklearn": Library("scikit-learn", "sklearn.decomposition", "scikit-learn"),
    "gensim": Library("gensim LdaModel", "gensim.models", "gensim"),
    "multicore": Library("gensim LdaMulticore", "gensim.models", "gensim"),
    "tomotopy": Library("tomotopy (Gibbs)", "tomotopy", "tomotopy"),
    "vw": Library("Vowpal Wabbit", "vowpalwabbit", "vowpalwabbit"),
}
PEERS = [name for name in LIBRARIES if name != "ours"]


class Corpus(NamedTuple):
    """Training documents, halves of held-out documents, and the topics that generated them, if known."""

    train: scipy.sparse.csr_matrix
    observed: scipy.sparse.csr_matrix
    held_out: scipy.sparse.csr_matrix
    planted: np.ndarray | None
    name: str


class Program(NamedTuple):
    """One line of a table: a library, its corpus, and the settings that only it has."""

    name: str
    label: str
    cores: int
    workers: int
    corpus: Corpus
    changes: dict


# ---- The documents ----


def generate(rng, num_docs, num_words, num_topics, mean_tokens, tail):
    """Generate documents of a few topics each with Zipf-distributed words; return them and the topics [K, V].

    The frequency of the r-th word falls as 1/r, and beyond the 6,000th word as r^−tail. In English it falls as r^−2
    there: 300 arXiv abstracts contain 4,500 distinct words of the 10,000 most frequent, and 5,525 of all words. With 60
    tokens per document, 300 generated documents contain 4,330 and 5,520 (V = 10,000 and 100,000) with a tail of 2, and
    5,130 and 9,220 with a tail of 1.
    """
    rank = np.arange(num_words)
    frequency = 1 / (50 + rank)  # 50: as in text without stop words, a fifth of all documents contain the first word
    frequency *= (1 + rank / 6_000) ** (1 - tail)
    planted = rng.gamma(0.02, 1, (num_topics, num_words)) * frequency + 1e-12
    planted /= planted.sum(1, keepdims=True)
    theta = rng.dirichlet(np.full(num_topics, 0.02), num_docs)
    tokens = np.maximum(rng.poisson(mean_tokens * rng.gamma(8, 1 / 8, num_docs)), 2)  # at least one token per half
    assigned = rng.multinomial(tokens, theta)  # [documents, K]: each topic draws all its words at once
    rows, columns = [], []
    for k in range(num_topics):
        rows.append(np.repeat(np.arange(num_docs), assigned[:, k]))
        bounds = np.cumsum(planted[k])
        columns.append(np.searchsorted(bounds, rng.random(len(rows[-1])) * bounds[-1]))
    rows, columns = np.concatenate(rows), np.concatenate(columns)
    X = scipy.sparse.coo_matrix((np.ones(len(rows), np.int32), (rows, columns)), (num_docs, num_words)).tocsr()
    return X, planted


def split_tokens(X, rng):
    """Split the tokens of each document at random into two halves; return two matrices that sum to X."""
    X = X.tocoo()
    rows, columns = np.repeat(X.row, X.data), np.repeat(X.col, X.data)
    order = np.lexsort((rng.random(len(rows)), rows))
    rows, columns = rows[order], columns[order]
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)  # position of a token in its document
    return [
        scipy.sparse.coo_matrix((np.ones(half.sum()), (rows[half], columns[half])), X.shape).tocsr()
        for half in (rank % 2 == 0, rank % 2 == 1)
    ]


def load(args, num_words):
    """Read ``--corpus`` or generate a corpus; shuffle the documents, keep a multiple of the batch size."""
    rng = np.random.default_rng(args.seed)
    steps = args.documents // args.batch
    if args.corpus:
        planted, name = None, "/".join(pathlib.Path(args.corpus).parts[-2:])
        try:
            X = scipy.sparse.load_npz(args.corpus).tocsr()
        except FileNotFoundError:
            raise SystemExit(f"{args.corpus}: no such file") from None
        except (OSError, ValueError) as error:
            raise SystemExit(f"{args.corpus}: expected a matrix saved by scipy.sparse.save_npz: {error}") from None
        if (X.data != np.floor(X.data)).any() or (X.data < 0).any():
            raise SystemExit(f"{name}: counts must be non-negative integers")
        X = X[np.flatnonzero(np.asarray(X.sum(1)).ravel() > 1)]  # a single token cannot be split
        steps = min(steps, (X.shape[0] - args.held_out) // args.batch)
    else:
        X, planted = generate(rng, args.documents + args.held_out, num_words, args.topics, args.tokens, args.tail)
        name = f"generated, seed {args.seed}"
    if steps >= 10:
        steps -= steps % 10  # checkpoints then fall on minibatches, and every minibatch has the same size
    if steps < 1:
        raise SystemExit(f"{args.documents} documents are fewer than a minibatch of {args.batch}")
    order = rng.permutation(X.shape[0])[: steps * args.batch + args.held_out]
    X = X[order].astype(np.int32)
    X.sort_indices()
    num_train = steps * args.batch
    corpus = Corpus(X[:num_train], *split_tokens(X[num_train:], rng), planted, name)
    facts = about(corpus)
    print(
        f"{facts['name']}: {num_train:,} documents to train on, {facts['words']:,} words, "
        f"{facts['distinct_words_per_document']:.0f} distinct words per document; K = {args.topics}, B = {args.batch}",
        flush=True,
    )
    return corpus


# ---- The score ----


def log_predictive(topics, corpus, alpha):
    """Return the mean of log Σ_k θ_k β_kw over the held-out tokens, with θ from the observed half of each document."""
    beta = np.ascontiguousarray(topics.T, np.float64)  # [V, K]
    theta = document_topics(beta, corpus.observed, alpha)
    held_out = corpus.held_out.tocoo()
    total = 0.0
    for part in np.array_split(np.arange(held_out.nnz), 1 + held_out.nnz // 20_000):
        p = np.einsum("nk,nk->n", theta[held_out.row[part]], beta[held_out.col[part]])
        total += held_out.data[part] @ np.log(p)
    return total / held_out.data.sum()


def document_topics(beta, X, alpha, tol=1e-4, max_iter=200, together=50):
    """Return θ = γ / Σγ [documents, K] with γ_k = α + Σ_w n_w φ_wk and φ_wk ∝ exp(E[log θ_k]) β_kw."""
    lengths = np.diff(X.indptr)
    gamma = np.ones((X.shape[0], beta.shape[1]))
    for documents in np.array_split(np.argsort(lengths), math.ceil(len(lengths) / together)):
        words = np.zeros((len(documents), lengths[documents].max()), int)
        counts = np.zeros(words.shape)
        for i, d in enumerate(documents):
            entries = slice(X.indptr[d], X.indptr[d + 1])
            words[i, : lengths[d]], counts[i, : lengths[d]] = X.indices[entries], X.data[entries]
        rows = beta[words]  # [documents, words, K]
        for _ in range(max_iter):
            old = gamma[documents]
            weights = np.exp(psi(old) - psi(old.sum(1, keepdims=True)))
            norm = np.matmul(rows, weights[:, :, None])[:, :, 0]
            new = alpha + weights * np.matmul((counts / norm)[:, None, :], rows)[:, 0, :]
            gamma[documents] = new
            active = np.abs(new - old).mean(1) >= tol
            if not active.any():
                break
            if active.mean() < 0.7:  # drop converged documents; a copy in every iteration would cost more than it saves
                documents, rows, counts = documents[active], rows[active], counts[active]
    return gamma / gamma.sum(1, keepdims=True)


def unigram_score(corpus, eta):
    """Return the score of a single topic for all documents, a lower bound for every library."""
    frequency = np.asarray(corpus.train.sum(0), float).ravel() + eta
    held_out = np.asarray(corpus.held_out.sum(0)).ravel()
    return held_out @ np.log(frequency / frequency.sum()) / held_out.sum()


# ---- The runs ----


def child(args, program, train, save, seed):
    """Train in a child process; return its measurements, or print the reason and return None."""
    num_docs = program.corpus.train.shape[0]
    steps = num_docs // args.batch
    every = max(steps // 10, 1)
    spec = {
        "train_with": program.name,
        "modules": [LIBRARIES[program.name].module] if program.name in LIBRARIES else [],
        "cores": available_cores()[: program.cores],
        "workers": program.workers,
        "train": str(train),
        "save": str(save),
        "documents": num_docs,
        "topics": args.topics,
        "batch": args.batch,
        "window": args.window,
        "alpha": args.alpha,
        "eta": args.eta,
        "tau": TAU,
        "kappa": KAPPA,
        "tolerance": TOLERANCE,
        "max_iter": MAX_ITER,
        "sweeps": args.sweeps,
        "marks": sorted({min(tenths * every, steps) for tenths in CHECKPOINTS} | {steps}),
        "every": every,
        "seed": seed,
        **program.changes,
    }
    environment = {
        **os.environ,
        # The other libraries process documents in parallel; BLAS threads inside each worker slow them down.
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # every run pays for its compilation
    }
    process = subprocess.Popen(
        [sys.executable, peers.__file__, json.dumps(spec | {"started": time.time()})],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=args.timeout)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # the session includes its workers
        process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        print(f"{program.label}: stopped after {args.timeout} s")
        return None
    answer = next((line for line in output.splitlines() if line.startswith(peers.ANSWER)), None)
    if answer is None:
        reason = (errors.strip() or "no message").splitlines()[-1]
        print(f"{program.label}: ended with code {process.returncode}: {reason}", flush=True)
        return None
    return json.loads(answer.removeprefix(peers.ANSWER))


def interleave(args, programs, *, scored=False):
    """Run all libraries in turn, once per repeat; return [(program, summary)] of those that finished."""
    runs = [[] for _ in programs]
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for program in programs:
            path = files.setdefault(id(program.corpus), pathlib.Path(folder, f"{len(files)}.npz"))
            if not path.exists():
                scipy.sparse.save_npz(path, program.corpus.train, compressed=False)
        save = pathlib.Path(folder, "topics")
        for repeat in range(args.repeats):
            for program, results in zip(programs, runs, strict=True):
                path = files[id(program.corpus)]
                run = child(args, program, path, save if scored else "", args.seed + repeat)
                if run is None:
                    continue
                line = f"repeat {repeat + 1}  {program.label:<30}cores {program.cores}"
                if "first_seconds" in run:
                    line += f"{run['first_seconds']:>10.2f} s"
                else:
                    line += f"{run['marks'][-1][0] / run['train_seconds']:>10,.0f} documents/s"
                if scored:
                    topics = [np.load(f"{save}{i}.npy") for i in range(len(run["marks"]))]
                    run["scores"] = [log_predictive(beta, program.corpus, args.alpha) for beta in topics]
                    line += f"   score {run['scores'][-1]:.4f}"
                print(line, flush=True)
                results.append(run)
    return [(c, summary(c, results)) for c, results in zip(programs, runs, strict=True) if results]


def summary(program, runs):
    """Return medians over the repeats, and the runs themselves."""
    rates = [run["marks"][-1][0] / run["train_seconds"] for run in runs]
    result = {
        "label": program.label,
        "cores": program.cores,
        "documents_per_second": statistics.median(rates),
        "best_documents_per_second": max(rates),
        "steady_documents_per_second": statistics.median(steady_rate(run) for run in runs),
        "runs": runs,
    }
    for field in ("start_seconds", "prepare_seconds", "before_mb", "peak_mb", "workers_mb"):
        result[field] = statistics.median(run[field] for run in runs)
    if "scores" in runs[0]:
        documents, seconds = np.median([run["marks"] for run in runs], 0).T
        scores = np.median([run["scores"] for run in runs], 0)
        result["curve"] = [
            {"documents": int(n), "seconds": float(s), "score": float(y)}
            for n, s, y in zip(documents, seconds, scores, strict=True)
        ]
    return result


def steady_rate(run):
    """Return documents/s from the first checkpoint to the last, which excludes the initialisation of λ."""
    marks = run.get("warm_marks", run["marks"])
    (early, begun), (late, ended) = marks[0] if len(marks) > 1 else (0, 0.0), marks[-1]
    return (late - early) / (ended - begun)


def seconds_to(target, curve):
    """Return the seconds until the score was reached, interpolated linearly between checkpoints, or None."""
    previous = None
    for point in curve:
        if point["score"] >= target:
            if previous is None:  # reached before the first checkpoint
                return point["seconds"]
            part = (target - previous["score"]) / (point["score"] - previous["score"])
            return previous["seconds"] + part * (point["seconds"] - previous["seconds"])
        previous = point
    return None


# ---- The comparison ----


def entries(args, corpus):
    """Return the libraries that run, with their numbers of cores and workers."""
    most, fewest = max(args.jobs), min(args.jobs)
    found = [Program("ours", f"{LIBRARIES['ours'].label} L={args.window}", n, n, corpus, {}) for n in args.jobs]
    for name in args.peers:
        label, module, package = LIBRARIES[name]
        if importlib.util.find_spec(module.split(".")[0]) is None:
            print(f"{label} is not installed: pip install {package}")
        elif name == "sklearn":
            found += [Program(name, f"{label} n_jobs={n}", n, n, corpus, {}) for n in args.jobs]
        elif name == "multicore":  # its main process needs a core too
            found += [Program(name, f"{label} workers={n}", most, n, corpus, {}) for n in args.jobs]
        elif name == "tomotopy":
            found.append(Program(name, f"{label} workers={most}", most, most, corpus, {}))
        else:  # single-threaded
            found.append(Program(name, label, fewest, 1, corpus, {}))
    return found


def compare(args):
    """Compare all libraries on one corpus; print the table and return the figures."""
    corpus = load(args, args.words)
    bounds = {"a unigram model": unigram_score(corpus, args.eta)}
    if corpus.planted is not None:
        bounds["the planted topics"] = log_predictive(corpus.planted, corpus, args.alpha)
    print("; ".join(f"held-out score of {name} {score:.4f}" for name, score in bounds.items()), flush=True)
    results = interleave(args, entries(args, corpus), scored=True)
    if not results:
        raise SystemExit("no library finished")
    target = args.target or min(result["curve"][-1]["score"] for _, result in results)
    rates = {c.cores: result["documents_per_second"] for c, result in results if c.name == "ours"}
    print(
        f"\nmedian of {args.repeats}; target: {'' if args.target else 'the lowest final score, '}{target:.4f}; "
        "memory: peak (before training) + workers\n"
        f"{'':<30}{'cores':>6}{'documents/s':>13}{'(best)':>9}{'speed-up':>9}{'start s':>9}{'prepare s':>11}"
        f"{'score':>10}{'target s':>10}{'memory, MB':>20}"
    )
    for program, result in results:
        result["seconds_to_target"] = seconds_to(target, result["curve"])
        # A sweep of a sampler is not comparable with a pass, so there is no ratio.
        mine = 0 if program.name == "tomotopy" else rates.get(program.cores, 0)
        ratio = mine / result["documents_per_second"]
        result["speed_up"] = ratio or None
        memory = f"{result['peak_mb']:,.0f} ({result['before_mb']:,.0f})"
        memory += f" + {result['workers_mb']:,.0f}" if result["workers_mb"] else ""
        reached = result["seconds_to_target"]
        print(
            f"{program.label:<30}{program.cores:>6}{result['documents_per_second']:>13,.0f}"
            f"{result['best_documents_per_second']:>9,.0f}{f'{ratio:.2f}' if ratio else '':>9}"
            f"{result['start_seconds']:>9.2f}{result['prepare_seconds']:>11.2f}{result['curve'][-1]['score']:>10.4f}"
            f"{'never' if reached is None else f'{reached:.2f}':>10}{memory:>20}"
        )
    several = [(c, result) for c, result in results if c.name == "multicore"]
    if len(several) > 1:
        best = max(several, key=lambda pair: pair[1]["documents_per_second"])[0]
        print(f"the faster LdaMulticore is {best.label}")
    if any(c.name == "tomotopy" for c, _ in results):
        print(f"tomotopy samples the corpus {args.sweeps} times; a document counts once per sweep")
    return {
        "corpus": about(corpus),
        "bounds": bounds,
        "target": target,
        "results": [result for _, result in results],
    }


# ---- smoothgrad_jax alone ----


def windows(args):
    """Measure documents/s for several window lengths."""
    corpus = load(args, args.words)
    steps = corpus.train.shape[0] // args.batch
    if steps <= max(args.windows):
        print(f"a window of {max(args.windows)} is not full after {steps} steps: use more --documents")
    return alone(
        args,
        [Program("ours", f"L = {n}", jobs, jobs, corpus, {"window": n}) for jobs in args.jobs for n in args.windows],
    )


def vocabulary(args):
    """Measure documents/s for several vocabulary sizes, with documents of the same lengths."""
    corpora = [load(args, num_words) for num_words in args.vocabulary]
    return alone(
        args,
        [
            Program("ours", f"V = {corpus.train.shape[1]:,}", jobs, jobs, corpus, {})
            for jobs in args.jobs
            for corpus in corpora
        ],
    )


def alone(args, programs):
    """Print rates and their ratios to the first line with the same number of cores."""
    results = interleave(args, programs)
    first = {}
    print(
        f"\nmedian of {args.repeats}; steady: without the first tenth; memory: peak (before training)\n"
        f"{'':<16}{'cores':>6}{'documents/s':>13}{'(best)':>9}{'ratio':>8}{'steady':>9}{'ratio':>8}{'start s':>9}"
        f"{'memory, MB':>18}"
    )
    for program, result in results:
        rate, steady = result["documents_per_second"], result["steady_documents_per_second"]
        first_rate, first_steady = first.setdefault(program.cores, (rate, steady))
        result |= {"ratio": rate / first_rate, "steady_ratio": steady / first_steady}
        print(
            f"{program.label:<16}{program.cores:>6}{rate:>13,.0f}{result['best_documents_per_second']:>9,.0f}"
            f"{result['ratio']:>8.2f}{steady:>9,.0f}{result['steady_ratio']:>8.2f}{result['start_seconds']:>9.2f}"
            f"{result['peak_mb']:>12,.0f} ({result['before_mb']:,.0f})"
        )
    return [result for _, result in results]


def first(args):
    """Measure seconds from the start of the process to the first trained documents, without a compilation cache."""
    corpus = load(args, args.words)
    steps = math.ceil(FIRST_DOCUMENTS / args.batch)
    programs = [Program("first", "first documents", n, n, corpus, {"marks": [steps]}) for n in args.jobs]
    results = interleave(args, programs)
    print()
    for program, result in results:
        total, imported = (
            statistics.median(run[field] for run in result["runs"]) for field in ("first_seconds", "imported_seconds")
        )
        for field in ("documents_per_second", "best_documents_per_second", "steady_documents_per_second"):
            del result[field]  # compilation dominates these runs
        result |= {"first_seconds": total, "imported_seconds": imported}
        print(
            f"{steps * args.batch:,} documents trained {total:.2f} s after the start of the process, cores: "
            f"{program.cores} ({imported:.2f} s for imports, median of {args.repeats})"
        )
    return [result for _, result in results]


# ---- The report ----


def about(corpus):
    """Return the facts of a corpus."""
    X = corpus.train
    return {
        "name": corpus.name,
        "documents": X.shape[0],
        "words": X.shape[1],
        "distinct_words_per_document": X.nnz / X.shape[0],
        "tokens_per_document": float(X.sum() / X.shape[0]),
        "held_out_documents": corpus.held_out.shape[0],
        "held_out_tokens": int(corpus.held_out.sum()),
    }


def machine():
    """Return machine, versions and date."""
    versions = {}
    for package in ("jax", "jaxlib", "numpy", "scipy", *dict.fromkeys(lib.package for lib in LIBRARIES.values())):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor()
    return {
        "cpu": cpu,
        "cores": len(available_cores()),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def available_cores():
    """Return the numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count()))


def plot(figures, path):
    """Draw score against seconds, with labels in a column on the right in the order of the final scores."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: pip install matplotlib")
        return
    figure, axes = pyplot.subplots(figsize=(10, 6))
    ordered = sorted(figures["results"], key=lambda result: result["curve"][-1]["score"])
    points = [point for result in ordered for point in result["curve"]]
    scores = [point["score"] for point in points]
    low, high = min(scores), max(scores)
    places = spread([result["curve"][-1]["score"] for result in ordered], (high - low) / 18)
    right = 1.6 * max(point["seconds"] for point in points)
    styles = [(line, marker) for line in ("-", "--", ":", "-.") for marker in "osD^"]
    for i, (result, place) in enumerate(zip(ordered, places, strict=True)):
        mine = result["label"].startswith(LIBRARIES["ours"].label)
        seconds, curve = zip(*((point["seconds"], point["score"]) for point in result["curve"]), strict=True)
        line, marker = ("-", "o") if mine else styles[i % len(styles)]
        colour = "black" if mine else str(0.3 + 0.1 * (i % 4))
        axes.plot(seconds, curve, line, marker=marker, markersize=4, color=colour, linewidth=2.5 if mine else 1.2)
        axes.plot([seconds[-1], right], [curve[-1], place], color="0.8", linewidth=0.6, zorder=0)
        cores = f"{result['cores']} core{'s' if result['cores'] > 1 else ''}"
        axes.text(
            right, place, f" {result['label']}, {cores}", va="center", fontsize=9, weight="bold" if mine else None
        )
    axes.axhline(figures["target"], color="0.6", linewidth=0.8, linestyle=(0, (1, 3)))
    axes.annotate(
        "target", (0, figures["target"]), xycoords=("axes fraction", "data"), va="bottom", fontsize=8, color="0.4"
    )
    axes.set_xscale("log")
    axes.set_xlim(right=right)
    axes.set_xlabel("seconds of training, including compilation and start of workers")
    axes.set_ylabel("held-out log p(word), mean")
    corpus = figures["corpus"]
    axes.set_title(f"{corpus['documents']:,} documents, {corpus['words']:,} words: {corpus['name']}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    print(f"plot: {path}")


def spread(heights, gap):
    """Move increasing heights as little as possible until neighbours are ``gap`` apart."""
    blocks = []  # groups of adjacent heights: (mean of height − i · gap, size)
    for i, height in enumerate(heights):
        mean, size = height - i * gap, 1
        while blocks and blocks[-1][0] > mean:
            below, number = blocks.pop()
            mean, size = (mean * size + below * number) / (size + number), size + number
        blocks.append((mean, size))
    return [mean + i * gap for i, mean in enumerate(mean for mean, size in blocks for _ in range(size))]


def integers(text):
    """Parse a comma-separated list of integers."""
    return [int(part) for part in text.split(",")]


def parse():
    """Parse and check the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--corpus", help="counts, documents × words, saved by scipy.sparse.save_npz; default: generated"
    )
    parser.add_argument("--documents", type=int, default=15_000, help="training documents")
    parser.add_argument("--held-out", type=int, default=1_000, help="held-out documents")
    parser.add_argument("--words", type=int, default=10_000, help="V of the generated corpus")
    parser.add_argument("--tokens", type=float, default=60, help="mean length of a generated document")
    parser.add_argument(
        "--tail", type=float, default=2, help="the frequency of rare generated words falls as rank^-TAIL"
    )
    parser.add_argument("--topics", type=int, default=100, help="K")
    parser.add_argument("--batch", type=int, default=300, help="B, documents per minibatch")
    parser.add_argument("--window", type=int, default=10, help="L, length of the window of smoothgrad_jax")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--eta", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"libraries among {','.join(PEERS)}; '' for none")
    parser.add_argument("--jobs", type=integers, default=None, help="numbers of cores; default 1,2 with two cores")
    parser.add_argument("--sweeps", type=int, default=50, help="sweeps of tomotopy's sampler over the corpus")
    parser.add_argument("--target", type=float, help="score to reach; default: the lowest final score")
    parser.add_argument("--timeout", type=float, default=1_800, help="seconds after which a library is stopped")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="PATH", help="write all measurements to this file")
    parser.add_argument("--plot", metavar="PATH", help="draw score against seconds to this file")
    parser.add_argument("--windows", type=integers, metavar="L,L", help="this package alone: documents/s for each L")
    parser.add_argument("--vocabulary", type=integers, metavar="V,V", help="this package alone: documents/s for each V")
    parser.add_argument(
        "--first", action="store_true", help=f"this package alone: seconds to {FIRST_DOCUMENTS:,} documents"
    )
    args = parser.parse_args()
    cores = len(available_cores())
    args.jobs = args.jobs or list(range(1, min(cores, 2) + 1))
    args.peers = [name for name in args.peers.split(",") if name]
    unknown = set(args.peers) - set(PEERS)
    if unknown:
        parser.error(f"unknown library: {', '.join(unknown)}; known: {', '.join(PEERS)}")
    if not 1 <= min(args.jobs) <= max(args.jobs) <= cores:
        parser.error(f"--jobs must lie between 1 and {cores}, the number of available cores")
    if args.corpus and args.vocabulary:
        parser.error("--vocabulary generates its corpora and cannot be combined with --corpus")
    if args.plot and (args.windows or args.vocabulary or args.first):
        parser.error("--plot draws the comparison and cannot be combined with --windows, --vocabulary or --first")
    return args


def main():
    """Measure, print and write."""
    args = parse()
    settings = vars(args) | {"corpus": args.corpus and pathlib.Path(args.corpus).name}
    del settings["json"], settings["plot"]
    figures = {"machine": machine(), "settings": settings}
    versions = ", ".join(f"{name} {version}" for name, version in figures["machine"]["versions"].items())
    print(f"{figures['machine']['cpu']}, Python {figures['machine']['python']}, {versions}")
    for part in (windows, vocabulary, first):
        if getattr(args, part.__name__):
            figures[part.__name__] = part(args)
    if not (args.windows or args.vocabulary or args.first):
        figures["comparison"] = compare(args)
        if args.plot:
            plot(figures["comparison"], args.plot)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(figures, indent=1))
        print(f"figures: {args.json}")


if __name__ == "__main__":
    main()
