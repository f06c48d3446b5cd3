"""Compare the topics of smoothgrad_jax and of other libraries: quality against seconds.

    python experiments/quality.py --corpus arxiv/bow.npz --documents 30000 --passes 10
    python experiments/quality.py --corpus arxiv/bow.npz --documents 30000 --method tomotopy --passes 200
    python experiments/quality.py --table
    python experiments/quality.py --plot quality.png --corpora arxiv,news,wiki_hoffman

The other libraries are optional: pip install tomotopy scikit-learn gensim vowpalwabbit matplotlib

A call makes one run in its own process, on all cores, and appends its curve to ``--results``; a run that is there
already is not repeated. Seconds count training, with compilation, and without the preparation of the documents and
without scoring. 1,000 documents are held out. All runs have one scorer, that of ``LDA(method=Maximum())``: θ of a
held-out document from one half of its words, θ ∝ α + Σ n φ with E[β], then the mean of log p(word) over the other half,
with the α of the run. NPMI, diversity and effective topics: ``smoothgrad_jax.topic_quality`` on the first 20,000
training documents.

| method         | algorithm and settings, where the options do not say otherwise                                |
|----------------|------------------------------------------------------------------------------------------------|
| ``sampled`` …  | smoothgrad_jax with this local step; all other settings as the command chooses them            |
| ``tomotopy``   | collapsed Gibbs sampling; α starts at 0.1 and is learned, η = 0.05; passes are sweeps          |
| ``mallet``     | the same with the settings of MALLET: Σα = 5, η = 0.01, α learned after 200 sweeps             |
| ``sklearn``    | online variational inference, α = 0.1, η = 0.05, ρ_t = (64 + t)^−0.7                           |
| ``gensim``     | online variational inference, α and η learned, ρ_t = (64 + t)^−0.7                             |
| ``vw``         | Vowpal Wabbit, online variational inference, α = 0.1, η = 0.05, ρ_t = (64 + t)^−0.7            |

Where step sizes are annealed to the end of a run, its topics are measured at the end only: one run per length gives the
curve.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
import scipy.sparse

import smoothgrad_jax as sj
from smoothgrad_jax import Maximum
from smoothgrad_jax.app.runs import step_size
from smoothgrad_jax.app.settings import METHODS, SCHEDULES, Settings
from smoothgrad_jax.models.lda.methods import named_method
from smoothgrad_jax.models.lda.model import split_held_out

HELD_OUT = 1_000
SWEEPS = (5, 10, 20, 50, 100, 200, 400)  # of tomotopy after which topics are measured
FRACTIONS = (0.1, 0.2, 0.5, 1.0)  # of a run of smoothgrad_jax without an end
PEERS = ("tomotopy", "mallet", "sklearn", "gensim", "vw")
COLOURS = dict(zip((*METHODS, *PEERS), ("C3", "C4", "C5", "C1", "C0", "C9", "C2", "C7", "C8"), strict=True))
MALLET_BURN_IN = 200  # sweeps
PEER_BATCH_SIZE = 256


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
    """Yield seconds, passes and quality along a run of smoothgrad_jax."""
    key = jax.random.key(args.seed)
    names = "topics", "method", "batch_size", "alpha", "eta", "tau", "kappa", "schedule"
    settings = Settings(held_out=0, **{name: getattr(args, name) for name in names}).resolve(X.shape[0])
    batch_size, window = settings.batch_size, args.window or settings.window
    steps = max(1, round(args.passes * X.shape[0] / batch_size))
    begin = time.perf_counter()
    method = named_method(args.method, args.sweeps)
    model = sj.LDA(settings.alpha, settings.eta, X.shape[0], method=method)
    lam = sj.seed_topics(key, X[:: -(-X.shape[0] // 10_000)], args.topics, num_docs=X.shape[0])
    rho = step_size(settings, steps)
    state, spent, step = np.asarray(lam), time.perf_counter() - begin, 0
    for fraction in (1.0,) if settings.schedule == "annealed" else FRACTIONS:
        begin = time.perf_counter()
        number = max(1, round(fraction * steps)) - step
        run = sj.fit(X, model, state, window=window, rho=rho, steps=number, batch_size=batch_size, key=key).finish()
        step, state, lam = step + number, run.state, run.params
        spent += time.perf_counter() - begin
        yield {"seconds": spent, "passes": step * batch_size / X.shape[0], **measure(X, halves, model.alpha, lam)}


def train_tomotopy(X, halves, args):
    """Yield seconds, sweeps and quality along a run of tomotopy, which learns α."""
    import tomotopy

    begin = time.perf_counter()
    alpha, eta = (5 / args.topics, 0.01) if args.method == "mallet" else (0.1, 0.05)
    alpha, eta = args.alpha or alpha, args.eta or eta
    model = tomotopy.LDAModel(tw=tomotopy.TermWeight.ONE, k=args.topics, alpha=alpha, eta=eta, seed=args.seed + 1)
    if args.method == "mallet":
        model.burn_in = MALLET_BURN_IN
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
        lam = np.full((X.shape[1], args.topics), eta, np.float32)
        counts = np.array(model.get_count_by_topics(), np.float64)
        lam[used] += np.stack([model.get_topic_word_dist(k) * counts[k] for k in range(args.topics)], 1)
        result = measure(X, halves, np.asarray(model.alpha, np.float32), lam)
        yield {"seconds": spent, "prepare": prepare, "passes": sweeps, **result}


def train_sklearn(X, halves, args):
    """Yield seconds, passes and quality along a run of scikit-learn."""
    from sklearn.decomposition import LatentDirichletAllocation

    alpha = args.alpha or 0.1
    model = LatentDirichletAllocation(
        args.topics,
        doc_topic_prior=alpha,
        topic_word_prior=args.eta or 0.05,
        learning_method="online",
        learning_offset=args.tau or 64,
        learning_decay=args.kappa or 0.7,
        batch_size=args.batch_size or PEER_BATCH_SIZE,
        total_samples=X.shape[0],
        max_iter=1,
        n_jobs=1,  # worker processes are slower for minibatches of this size
        random_state=args.seed,
    )
    spent = 0.0
    for number in range(1, round(args.passes) + 1):
        begin = time.perf_counter()
        model.partial_fit(X[np.random.default_rng([args.seed, number]).permutation(X.shape[0])])
        spent += time.perf_counter() - begin
        yield {"seconds": spent, "passes": number, **measure(X, halves, alpha, model.components_.T)}


def train_gensim(X, halves, args):
    """Yield seconds, passes and quality along a run of gensim, which learns α and η."""
    from gensim.models import LdaModel

    rows = [slice(X.indptr[d], X.indptr[d + 1]) for d in range(X.shape[0])]
    corpus = [list(zip(X.indices[row].tolist(), X.data[row].tolist(), strict=True)) for row in rows]
    begin = time.perf_counter()
    model = LdaModel(
        num_topics=args.topics,
        id2word={w: str(w) for w in range(X.shape[1])},
        alpha=args.alpha or "auto",
        eta=args.eta or "auto",
        chunksize=args.batch_size or PEER_BATCH_SIZE,
        offset=args.tau or 64,
        decay=args.kappa or 0.7,
        random_state=args.seed,
        eval_every=None,
    )
    spent = time.perf_counter() - begin
    for number in range(1, round(args.passes) + 1):
        order, begin = np.random.default_rng([args.seed, number]).permutation(len(corpus)), time.perf_counter()
        model.update([corpus[d] for d in order])
        spent += time.perf_counter() - begin
        alpha = np.asarray(model.alpha, np.float32)
        yield {"seconds": spent, "passes": number, **measure(X, halves, alpha, model.state.get_lambda().T)}


def train_vw(X, halves, args):
    """Yield seconds, passes and quality along a run of Vowpal Wabbit; each point is a run of its own from the start."""
    from peers import Watch
    from peers import train_vw as train

    passes = range(1, round(args.passes) + 1)
    orders = [np.random.default_rng([args.seed, number]).permutation(X.shape[0]) for number in passes]
    alpha, batch_size = args.alpha or 0.1, args.batch_size or PEER_BATCH_SIZE
    spec = {
        "topics": args.topics,
        "alpha": alpha,
        "eta": args.eta or 0.05,
        "batch": batch_size,
        "documents": X.shape[0],
        "tau": args.tau or 64,
        "kappa": args.kappa or 0.7,
        "tolerance": 1e-3,
        "marks": [X.shape[0] // batch_size * number for number in passes],
    }
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(save=f"{folder}/")
        train(scipy.sparse.vstack([X[order] for order in orders], format="csr"), spec, watch)
        for number, (documents, seconds) in enumerate(watch.marks):
            lam = np.load(f"{folder}/{number}.npy").T
            yield {"seconds": seconds, "passes": documents / X.shape[0], **measure(X, halves, alpha, lam)}


def read_results(path):
    """Return the settings and curves of all runs by corpus and number of documents, small corpora first."""
    runs = {}
    for line in path.read_text().splitlines():
        run = json.loads(line)
        runs.setdefault((run["setting"]["corpus"], run["setting"]["documents"]), []).append(run)
    return dict(sorted(runs.items(), key=lambda item: (item[0][1] > 100_000, item[0])))


def label(setting):
    """Return the name of a run: its method, and the options that differ from the defaults."""
    shown = ("sweeps", "window", "alpha", "eta", "kappa", "batch_size", "seed", "topics")
    defaults = {"sweeps": 5, "seed": 0, "topics": 100}
    changed = [
        f"{name}={setting[name]:g}" for name in shown if setting.get(name, defaults.get(name)) != defaults.get(name)
    ]
    return ", ".join([setting["method"], *filter(None, [setting.get("schedule")]), *changed])


def print_table(path):
    """Print one line per point of every curve."""
    for (corpus, documents), runs in read_results(path).items():
        print(f"\n{corpus}, {documents:,} documents\n")
        print("| run | passes or sweeps | seconds | score | NPMI | effective topics | diversity |")
        print("|---|---|---|---|---|---|---|")
        for run in runs:
            for p in run["curve"]:
                columns = f"{p['passes']:.3g} | {p['seconds']:.1f} | {p['score']:.3f} | {p['npmi']:.3f}"
                print(f"| {label(run['setting'])} | {columns} | {p['effective']:.0f} | {p['diversity']:.2f} |")


def plot(path, out, corpora):
    """Draw the score and the NPMI of the runs on some corpora against seconds, one column per corpus."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = {key: runs for key, runs in read_results(path).items() if not corpora or key[0] in corpora}
    figure, axes = plt.subplots(2, len(results), figsize=(4 * len(results), 6), squeeze=False, sharex="col")
    for column, ((corpus, documents), runs) in enumerate(results.items()):
        curves = {}
        for run in runs:  # runs that differ in their length only are points of one curve
            curves.setdefault((run["setting"]["method"], label(run["setting"])), []).extend(run["curve"])
        for (name, text), points in curves.items():
            ours = name in METHODS
            text = f"smoothgrad_jax, {text}" if ours else text
            points.sort(key=lambda point: point["seconds"])
            for axis, measured in zip(axes[:, column], ("score", "npmi"), strict=True):
                xy = [[p[key] for p in points] for key in ("seconds", measured)]
                axis.plot(*xy, "o-" if ours else "s--", color=COLOURS[name], label=text, markersize=4)
        axes[0, column].set_title(f"{corpus}, {documents:,} documents")
        axes[1, column].set(xscale="log", xlabel="seconds")
    axes[0, 0].set_ylabel("held-out score, nats per word")
    axes[1, 0].set_ylabel("mean NPMI of the topics")
    handles = {text: line for axis in axes[0] for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=min(4, len(handles)), frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(out, dpi=110)
    print(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", type=pathlib.Path, help="documents × words, saved by scipy.sparse.save_npz")
    parser.add_argument("--documents", type=int, default=30_000)
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--method", choices=(*METHODS, *PEERS), default="sampled")
    parser.add_argument("--passes", type=float, default=10, help="passes, or sweeps of tomotopy")
    parser.add_argument("--sweeps", type=int, default=5, help="of the sampled local step")
    parser.add_argument("--window", type=float, help="L; by default that of the command")
    for name in ("alpha", "eta", "tau", "kappa"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--schedule", choices=SCHEDULES, help="of the step sizes; by default annealed to 0")
    parser.add_argument("--batch-size", type=int, help="by default that of the command; 256 for other libraries")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("quality.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the results")
    parser.add_argument("--plot", metavar="PATH", help="draw the results")
    parser.add_argument("--corpora", default="", help="with --plot: names of corpora, separated by commas")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.table or args.plot:
        print_table(args.results) if args.table else plot(
            args.results, args.plot, set(filter(None, args.corpora.split(",")))
        )
        return
    if args.corpus is None:
        parser.error("a run needs --corpus")
    excluded = ("corpus", "results", "table", "plot", "corpora", "inside")
    setting = {name: value for name, value in vars(args).items() if name not in excluded and value is not None}
    setting["corpus"] = args.corpus.parent.name or args.corpus.stem
    if not args.inside:
        if args.results.exists() and any(
            run["setting"] == setting for runs in read_results(args.results).values() for run in runs
        ):
            print("measured already:", setting)
            return
        sys.exit(subprocess.run([sys.executable, *sys.argv, "--inside"]).returncode)
    X, held_out = load(args.corpus, args.documents)
    halves = split_held_out(held_out, jax.random.key(7), X.shape[1])
    trainers = {
        "tomotopy": train_tomotopy,
        "mallet": train_tomotopy,
        "sklearn": train_sklearn,
        "gensim": train_gensim,
        "vw": train_vw,
    }
    curve = []
    for point in trainers.get(args.method, train_ours)(X, halves, args):
        curve.append(point)
        print(setting["corpus"], args.method, json.dumps({k: round(v, 3) for k, v in point.items()}), flush=True)
    with args.results.open("a") as file:
        file.write(json.dumps({"setting": setting, "curve": curve}) + "\n")


if __name__ == "__main__":
    main()
