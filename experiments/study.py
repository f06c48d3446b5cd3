"""Code that the studies have in common: runs of ``fit``, storage of their results, style of the figures.

A study is a list of settings. Each setting is one run on one core; several runs are made at a time. When a run ends,
its held-out curve is stored in ``results/STUDY_CORPUS.json``; a stored run is not repeated. Long runs write
checkpoints, so that the same command continues after Ctrl-C. Verdicts and figures are made from this file alone.

    python experiments/heldout.py                          generated documents, less than two minutes
    python experiments/heldout.py --corpus arxiv/bow.npz   documents × words as scipy saves them, or a converted folder
    python experiments/heldout.py --draw                   verdicts and figure from the stored results
"""

import argparse
import concurrent.futures
import datetime
import hashlib
import json
import math
import multiprocessing
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from benchmark import available_cores, generate, machine, spread

from smoothgrad_jax import (
    LDA,
    Adaptive,
    Checkpoints,
    Corpus,
    Exponential,
    __version__,
    fit,
    init_topics,
    phase_out,
    robbins_monro,
    seed_topics,
    split_documents,
)
from smoothgrad_jax.app.progress import describe
from smoothgrad_jax.data.corpus_folder import open_folder
from smoothgrad_jax.training.checkpoints import fingerprint

RESULTS = pathlib.Path(__file__).parent / "results"
GENERATED = "generated"
_CHECKPOINT_EVERY, _SHOW_EVERY = 60.0, 10.0  # seconds
_LONGEST_CHECKPOINT = 1_000  # slots; ten thousand take gigabytes, and writing them takes longer than training
_SEEDING = 20_000  # topics are initialised from documents among these many


class Setting(NamedTuple):
    """One run, in the package's letters.

    Attributes:
      window: L, a number of minibatches or ∞; the length for other kinds, the longest length for ``"adaptive"``.
      kind: ``"mean"`` of the last L, ``"exponential"``, ``"phase out"`` (L → 1 over the second half of the run),
        ``"adaptive"``, ``"first"`` (L up to step ``switch``, then 1) or ``"later"`` (1 up to ``switch``, then L).
      switch: Step at which the length changes, for ``"first"`` and ``"later"``.
      rho: ρ, or (τ, κ) for ρ_t = (τ + t)^−κ.
      batch_size, warmup, topics, alpha, eta, passes, seed: B, warm-up, K, α, η; the seed determines the initial λ and
        the minibatches.
      start: ``"noise"``, ``"seeds"`` (each topic starts from some documents), ``"trained"`` (half a pass of plain SVI
        with ρ_t = (64 + t)^−0.7 before the run) or ``"wide"`` (one step on ten times the documents before the run, as
        large as ten steps).
      jitter: Relative size of a random change of the initial λ, which shows the effect of chance.
      slots: dtype of the stored statistics.
      precision: dtype of λ.
      frequent: Number of most frequent words to keep; 0 keeps all. With fewer words, fewer rows of Ŝ are zero.
      scores: Number of held-out scores per run.
    """

    window: float = 10
    kind: str = "mean"
    switch: int = 0
    rho: Any = 1e-3
    batch_size: int = 300
    warmup: str = "mean"
    topics: int = 100
    alpha: float = 0.5
    eta: float = 0.5
    passes: float = 1.0
    seed: int = 0
    start: str = "noise"
    jitter: float = 0.0
    slots: str = "float32"
    precision: str = "float32"
    frequent: int = 0
    scores: int = 20

    @property
    def label(self) -> str:
        """Window, step size, seed, and all other fields that differ from their defaults."""
        ours, first = self._asdict(), ("rho", "seed")
        hidden = (*first, "topics", "alpha", "eta", "passes", "scores")
        changed = [name for name, default in Setting().items() if ours[name] != default and name not in hidden]
        length = "∞" if self.window == math.inf else f"{self.window:g}"
        return ", ".join([f"L = {length}", *(f"{name} = {ours[name]}" for name in (*first, *changed))])

    def items(self) -> Iterable[tuple[str, Any]]:
        """Names and values of all fields except the window."""
        return ((name, value) for name, value in self._asdict().items() if name != "window")


class Data(NamedTuple):
    """A training corpus, and the two halves of held-out documents."""

    name: str
    corpus: Corpus
    halves: tuple[Any, Any]

    def facts(self) -> dict[str, Any]:
        """Return name, sizes and fingerprint of the corpus."""
        return {
            "name": self.name,
            "documents": self.corpus.num_docs,
            "words": self.corpus.num_words,
            "held_out": self.halves[0].shape[0],
            "fingerprint": fingerprint(self.corpus)[:16],
        }

    def of_frequent_words(self, number: int) -> "Data":
        """Keep only the words that occur in the largest number of documents."""
        corpus = self.corpus
        X = scipy.sparse.csr_array((corpus.data, corpus.indices, corpus.indptr), corpus.shape)
        in_documents = np.bincount(corpus.indices, minlength=corpus.num_words)
        kept = np.sort(np.argsort(-in_documents, kind="stable")[:number])
        observed, held_out = (half[:, kept] for half in self.halves)
        return self._replace(corpus=Corpus.of(X[:, kept]), halves=(observed, held_out))


def read(path: pathlib.Path | None) -> tuple[str, scipy.sparse.csr_array]:
    """Return name and documents × words of the corpus at a path; without a path, of a generated corpus."""
    if path is None:
        return GENERATED, generate(np.random.default_rng(0), 21_000, 2_000, 20, 60.0, tail=1.0)[0]
    if (path / "manifest.json").exists():
        corpus = open_folder(path).corpus
        return path.name, scipy.sparse.csr_array((corpus.data, corpus.indices, corpus.indptr), corpus.shape)
    file = path / "bow.npz" if path.is_dir() else path
    if not file.exists():
        sys.exit(f"{path}: no such file" if file == path else f"{path}: contains neither bow.npz nor manifest.json")
    try:
        if not zipfile.is_zipfile(file):
            raise ValueError("not an .npz file")
        return corpus_name(file), scipy.sparse.load_npz(file).tocsr()
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{file}: expected a matrix documents × words written by scipy.sparse.save_npz: {error}")


def corpus_name(path: pathlib.Path | None) -> str:
    """Return the name that :func:`read` gives a corpus, without reading it."""
    if path is None:
        return GENERATED
    path = path.resolve()
    return path.parent.name if path.name == "bow.npz" else path.stem


def load(path: pathlib.Path | None, held_out: int, documents: int | None = None) -> Data:
    """Read or generate documents; hold out the last ``held_out``, keep the first ``documents`` of the others."""
    name, X = read(path)
    if X.shape[0] <= held_out:
        sys.exit(f"{path}: {X.shape[0]} documents are too few to hold out {held_out}")
    train = X[: X.shape[0] - held_out]
    train = train if documents is None else train[:documents]
    return Data(name, Corpus.of(train), split_documents(X[X.shape[0] - held_out :], jax.random.key(0)))


def train(
    data: Data,
    setting: Setting,
    scratch: pathlib.Path | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Run ``fit`` on one core and return the record of the run.

    Args:
      data: The documents.
      setting: The settings of the run.
      scratch: Folder for checkpoints; removed when the run has ended.
      stopped: Called between reports; if it returns True, the run writes a checkpoint and ends, as after Ctrl-C.
    """
    data = data.of_frequent_words(setting.frequent) if setting.frequent else data
    with jax.enable_x64(setting.precision == "float64"):
        return _train(data, setting, scratch, stopped)


def _train(data, setting, scratch, stopped):
    corpus = data.corpus
    model = LDA(setting.alpha, setting.eta, corpus.num_docs)
    key = jax.random.key(setting.seed)
    steps = max(1, round(setting.passes * corpus.num_docs / setting.batch_size))
    options = {"batch_size": setting.batch_size, "key": key, "replace": True, "threads": 1}
    long = _LONGEST_CHECKPOINT < setting.window < math.inf
    checkpoints = Checkpoints(scratch, keep=1) if scratch and not long else None
    last = checkpoints.latest() if checkpoints else None
    first = last.step if last else 0
    training = fit(
        corpus,
        model,
        last.state if last else _start(data, setting, model, key, options),
        rho=robbins_monro(*setting.rho) if np.ndim(setting.rho) else setting.rho,
        steps=steps - first,
        held_out=data.halves,
        score_every=max(1, steps // setting.scores),
        warmup=setting.warmup,
        **(options | {"threads": None if last or setting.kind == "exponential" else 1}),
        **_window(setting, steps),
    )
    curve = list(last.history) if last else []
    written, begun = time.monotonic(), time.perf_counter()
    shown = time.monotonic()
    try:
        for report in training:
            if time.monotonic() - shown >= _SHOW_EVERY:  # lines instead of a bar, because several runs print at once
                shown = time.monotonic()
                told = report._replace(passes=report.step * setting.batch_size / corpus.num_docs)
                print(f"  {setting.label}: {describe(told)}", file=sys.stderr, flush=True)
            if report.score is not None:
                chosen = {} if setting.kind != "adaptive" else {"window": report.window}
                used = round(_topics_used(training.params, setting.eta), 2)
                curve.append({"step": report.step, "score": round(report.score, 5), "topics": used, **chosen})
            if report.step >= steps:
                continue  # the run is complete and needs no checkpoint
            if stopped():
                raise KeyboardInterrupt
            if checkpoints and time.monotonic() - written >= _CHECKPOINT_EVERY:
                checkpoints.write(training, {}, curve)
                written = time.monotonic()
    except KeyboardInterrupt:
        if checkpoints:
            checkpoints.write(training, {}, curve)
        raise
    if checkpoints:
        shutil.rmtree(scratch, ignore_errors=True)
    return {
        "setting": _plain(setting),
        "curve": curve,
        "seconds": round(report.seconds, 2),
        "wall": round(time.perf_counter() - begun, 2),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _start(data, setting, model, key, options):
    """Return the initial λ."""
    corpus, dtype = data.corpus, jnp.dtype(setting.precision)
    if setting.start == "seeds":
        some = corpus.select(np.arange(0, corpus.num_docs, -(-corpus.num_docs // _SEEDING)))
        lam = seed_topics(key, some, setting.topics, num_docs=corpus.num_docs)
    else:
        lam = init_topics(key, corpus.num_words, setting.topics)
    other = options | {"key": jax.random.fold_in(key, 2), "window": 1}
    if setting.start == "trained":
        half = corpus.num_docs // setting.batch_size // 2
        lam = fit(corpus, model, lam, rho=robbins_monro(64, 0.7), steps=half, **other).finish().params
    if setting.start == "wide":
        other["batch_size"] = 10 * setting.batch_size
        lam = fit(corpus, model, lam, rho=1 - (1 - setting.rho) ** 10, steps=1, **other).finish().params
    if setting.jitter:
        noise = jax.random.normal(jax.random.fold_in(key, 3), np.shape(lam))
        lam = lam * jnp.exp(setting.jitter * noise)
    return np.asarray(lam, dtype)


def _window(setting, steps):
    """Return the arguments of ``fit`` that select the window."""
    length, switch = setting.window, setting.switch
    slots = {} if setting.slots == "float32" else {"slots": setting.slots}
    if setting.kind == "mean":
        return {"window": length, **slots}
    if setting.kind == "exponential":
        return {"window": Exponential(length)}
    if setting.kind == "phase out":
        return {"window": phase_out(int(length), steps // 2, max(steps - steps // 10, steps // 2 + 1)), **slots}
    if setting.kind == "adaptive":
        return {"window": Adaptive(longest=int(length)), **slots}
    inside, outside = (length, 1) if setting.kind == "first" else (1, length)
    return {"window": lambda step: jnp.where(jnp.asarray(step) < switch, inside, outside), **slots}


def _topics_used(lam, eta):
    """Return the effective number of topics: exp of the entropy of the topic proportions."""
    mass = np.maximum(np.asarray(lam) - eta, 0).sum(0, dtype=np.float64)
    proportions = mass / mass.sum() if mass.sum() else np.full(len(mass), 1 / len(mass))
    return float(np.exp(-(proportions * np.log(np.maximum(proportions, 1e-300))).sum()))


class Results:
    """The runs of a study on one corpus, stored in a file.

    Args:
      path: The file; it may not exist yet.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.facts: dict[str, Any] = {}
        self.runs: list[dict[str, Any]] = []
        if path.exists():
            body = json.loads(path.read_text())
            self.runs = body.pop("runs")
            self.facts = body

    def add(self, run: dict[str, Any]) -> None:
        """Add a run and write the file."""
        self.runs.append(run)
        self.write()

    def write(self) -> None:
        """Write the file atomically, one line per run, so that a changed run is one line of a diff."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        ordered = sorted(self.runs, key=lambda run: json.dumps(run["setting"], sort_keys=True))
        lines = ",\n".join(json.dumps(run, sort_keys=True) for run in ordered)
        body = json.dumps(self.facts, indent=1, sort_keys=True)[:-2]
        beside = self.path.with_suffix(".new")
        beside.write_text(f'{body},\n "runs": [\n{lines}\n]}}\n' if self.facts else f'{{"runs": [\n{lines}\n]}}\n')
        os.replace(beside, self.path)

    def find(self, setting: Setting) -> dict[str, Any] | None:
        """Return the run with this setting, or None."""
        wanted = _plain(setting)
        return next((run for run in self.runs if run["setting"] == wanted), None)

    def curve(self, setting: Setting) -> tuple[np.ndarray, np.ndarray] | None:
        """Return effective passes and scores of a run, or None if the run is missing."""
        run = self.find(setting)
        if run is None:
            return None
        passes = np.array([point["step"] for point in run["curve"]]) * setting.batch_size
        return passes / self.facts["corpus"]["documents"], np.array([point["score"] for point in run["curve"]])

    def finals(self, setting: Setting, seeds: Iterable[int]) -> np.ndarray:
        """Return the last score of each seed whose run exists."""
        found = (self.find(setting._replace(seed=seed)) for seed in seeds)
        return np.array([run["curve"][-1]["score"] for run in found if run])


def _plain(setting):
    """Convert a setting to JSON types: ∞ to a string, a pair to a list; most defaults are omitted."""
    named = {name: value for name, value in setting.items() if value != Setting._field_defaults[name]}
    named = {name: list(value) if isinstance(value, tuple) else value for name, value in named.items()}
    always = {"rho": named.get("rho", setting.rho), "seed": setting.seed, "passes": setting.passes}
    return {"window": "inf" if setting.window == math.inf else setting.window, **always, **named}


def run_all(results: Results, data: Data, settings: Iterable[Setting], jobs: int) -> None:
    """Make the missing runs, ``jobs`` at a time, each in its own process."""
    todo = [setting for setting in dict.fromkeys(settings) if results.find(setting) is None]
    corpus = data.facts()
    check_corpus(results, corpus)
    if not todo:
        return
    results.facts = {"corpus": corpus, "machine": where()}
    scratch = pathlib.Path(tempfile.gettempdir()) / "smoothgrad-studies" / results.path.stem
    begun, work = time.monotonic(), sum(map(_cost, todo))
    print(f"{data.name}: {len(todo)} runs to make, {jobs} at a time; Ctrl-C keeps completed runs", flush=True)
    done = 0.0
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pool = concurrent.futures.ProcessPoolExecutor(jobs, context, initializer=_receive, initargs=(data, stop))
    try:
        # A checkpoint belongs to one setting, corpus and version.
        names = [hashlib.sha256(repr((s, corpus["fingerprint"], __version__)).encode()).hexdigest()[:16] for s in todo]
        futures = {pool.submit(_job, s, scratch / name): s for s, name in zip(todo, names, strict=True)}
        for future in concurrent.futures.as_completed(futures):
            run, setting = future.result(), futures[future]
            results.add(run)
            done += _cost(setting)
            left = (time.monotonic() - begun) * (work / done - 1)
            number, score = sum(each.done() for each in futures), run["curve"][-1]["score"]
            print(f"{number}/{len(todo)} {setting.label}: {score:.4f}, {left:.0f} s left", flush=True)
    except KeyboardInterrupt:
        kept = f"{len(results.runs)} runs are in {results.path}" if results.runs else "no run is complete yet"
        print(f"interrupted: {kept}; the same command continues. Writing checkpoints …", file=sys.stderr, flush=True)
        sys.exit(130)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


_received = None  # in a worker process: the data, and the event that tells all workers to stop


def _receive(*received):
    global _received
    _received = received
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent sets the event


def check_corpus(results: Results, corpus: dict[str, Any]) -> None:
    """Exit if the results belong to another corpus with the same name."""
    kept = results.facts.get("corpus", {})
    if any(kept[name] != corpus[name] for name in kept.keys() & corpus.keys()):
        sys.exit(f"{results.path}: these results belong to another corpus with this name, {kept}; change --results")


def where() -> dict[str, Any]:
    """Return machine and versions."""
    facts = machine()
    facts["versions"] = {name: facts["versions"][name] for name in ("jax", "jaxlib", "numpy", "smoothgrad_jax")}
    return facts


def _job(setting, scratch):
    data, stop = _received
    parent = multiprocessing.parent_process()

    def stopped():
        return stop.is_set() or not parent.is_alive()

    if stopped():  # the pool submits one run more than it has workers
        raise KeyboardInterrupt
    return train(data, setting, scratch, stopped)


def _cost(setting):
    return setting.passes


class Study(NamedTuple):
    """A claim of the paper and the runs that test it.

    Attributes:
      name: Prefix of the file names.
      paper: ``(data) -> settings`` for a real corpus.
      small: Settings for the generated corpus.
      verdict: ``(results) -> lines``.
      draw: ``(results, path)`` writes the figure.
      held_out: Number of held-out documents.
    """

    name: str
    paper: Callable[[Data], list[Setting]]
    small: list[Setting]
    verdict: Callable[[Results], list[str]]
    draw: Callable[[Results, pathlib.Path], None]
    held_out: int = 2_000


def arguments(text: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every study has."""
    parser = argparse.ArgumentParser(description=text.split("\n")[0])
    parser.add_argument(
        "--corpus",
        type=pathlib.Path,
        help="documents × words (bow.npz) or a converted folder; default: generated documents",
    )
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for results and figures")
    parser.add_argument("--draw", action="store_true", help="make verdict and figure from the stored results")
    return parser


def main(study: Study, text: str) -> None:
    """Make the missing runs, print the verdict, draw the figure."""
    parser = arguments(text)
    parser.add_argument("--jobs", type=int, default=len(available_cores()), help="simultaneous runs, one core each")
    parser.add_argument("--passes", type=float, help="number of passes over a corpus, instead of the study's")
    args = parser.parse_args()
    if args.passes and not args.corpus:
        parser.error("--passes needs --corpus: the study of generated documents has fixed settings")
    if args.draw:
        results = Results(args.results / f"{study.name}_{corpus_name(args.corpus)}.json")
        if not results.runs:
            sys.exit(f"{results.path}: no results to draw; run without --draw first")
    else:
        data = load(args.corpus, study.held_out if args.corpus else 1_000)
        results = Results(args.results / f"{study.name}_{data.name}.json")
        settings = study.paper(data) if args.corpus else study.small
        if args.passes:
            settings = [setting._replace(passes=args.passes) for setting in settings]
        run_all(results, data, settings, args.jobs)
    for line in study.verdict(results):
        print(line)
    study.draw(results, results.path.with_suffix(".png"))
    print(f"results: {results.path}\nfigure: {results.path.with_suffix('.png')}")


def pyplot() -> Any:
    """Import matplotlib and set the style of all figures: no frame, thin lines, legible in grey."""
    try:
        import matplotlib
    except ImportError:
        sys.exit('the figures need matplotlib: pip install "smoothgrad_jax[plot]"')
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 10,
            "axes.titlelocation": "left",
            "font.size": 9,
            "lines.linewidth": 1.4,
            "savefig.dpi": 150,
            "savefig.bbox": "tight",
        }
    )
    return plt


def label_ends(axes: Any, ends: list[tuple[float, float, str, Any]]) -> None:
    """Write a label at the end of each curve, (x, y, text, colour), and move labels apart where they would overlap.

    Call this after the limits of the axes are set; it extends the axes to the right.
    """
    low, high = axes.get_ylim()
    log = axes.get_yscale() == "log"
    at = np.log if log else np.asarray
    low, high = float(at(low)), float(at(high))
    ends = sorted(ends, key=lambda end: end[1])
    places = spread([min(max(float(at(y)), low), high) for _, y, *_ in ends], (high - low) / 20)
    right = max(x for x, *_ in ends)
    for (x, y, text, colour), place in zip(ends, places, strict=True):
        place = math.exp(place) if log else place
        axes.plot([x, 1.02 * right], [y, place], color=colour, linewidth=0.4, clip_on=False)
        axes.text(1.03 * right, place, text, color=colour, va="center", fontsize=8)
    axes.set_xlim(right=1.25 * right)
    axes.spines["bottom"].set_bounds(axes.get_xlim()[0], right)
    axes.set_xticks([tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick <= 1.001 * right])
