"""Reproduce the paper's first figure: bias and variance of the smoothed gradient along a run, for several windows.

    python experiments/bias_variance.py                                generated documents, less than two minutes
    python experiments/bias_variance.py --corpus arxiv_2k/bow.npz      2,000 abstracts, the paper's settings
    python experiments/bias_variance.py --corpus arxiv_2k --draw       verdicts and figures from the stored results

The paper's settings: K = 100 topics, B = 300 documents per minibatch drawn with replacement, α = η = 0.5, ρ = 0.01, λ
from noise; the statistics of the full corpus at every step. All windows run in one program on the same minibatches,
once per warm-up: "zeros" is Algorithm 1, "mean" is the paper's prose. Verdicts are computed from every step; the
results file keeps a part of the steps for the figure. After Ctrl-C the same command continues.
"""

import pathlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from study import Results, arguments, check_corpus, corpus_name, label_ends, pyplot, read, where

from smoothgrad_jax import (
    LDA,
    Corpus,
    __version__,
    count_negative,
    global_step,
    init,
    init_topics,
    local_step,
    pack,
)
from smoothgrad_jax import bias_variance as measure_errors
from smoothgrad_jax.core import diagnostics
from smoothgrad_jax.training.checkpoints import fingerprint

WARMUPS = ("zeros", "mean")
CURVES = ("squared_bias", "variance", "squared_error")
POINTS = 300  # points per curve that are stored for the figure
CHUNK = 10  # steps per progress report
SAVE_EVERY = 300.0  # seconds; the windows take gigabytes


class Config(NamedTuple):
    """Settings of the study, in the package's letters; ``shown`` are the lengths with a panel, D = ``documents``."""

    lengths: tuple[int, ...] = (1, 3, 10, 30, 100, 300)
    shown: tuple[int, ...] = (30, 100, 300)
    rho: float = 0.01
    batch_size: int = 300
    topics: int = 100
    alpha: float = 0.5
    eta: float = 0.5
    steps: int = 1_000
    seed: int = 0
    documents: int | None = None


PAPER = Config()
SMALL = Config((1, 3, 10, 30, 100), (10, 30, 100), batch_size=100, topics=10, steps=400, documents=1_000)


# Runs


def without_info(model, lam, batch):
    """Run a local step and drop its info."""
    return local_step(model, lam, batch)[0], None


def errors_and_negatives(state, error):
    """Return what is recorded of a step."""
    return error, count_negative(state.params)


@partial(jax.jit, static_argnames=("capacity", "update"))
def begin(lam: jax.Array, lengths: jax.Array, capacity: int, update: Callable = global_step) -> Any:
    """Return the states of several runs, one per length."""
    each = jax.vmap(lambda _: diagnostics.measured(init(lam, capacity), update), out_axes=diagnostics.vmap_axes(update))
    return each(lengths)


@partial(jax.jit, static_argnames=("warmup", "update"), donate_argnames="states")
def advance(states, lengths, rhos, batches, model, data, warmup, update=global_step):
    """Advance all runs by some steps; return the states, and errors and numbers of non-positive entries [R, T]."""
    axes = diagnostics.vmap_axes(update)

    def one(state, length, rho):
        options = {"warmup": warmup, "update": update, "record": errors_and_negatives}
        return measure_errors(Partial(without_info, model), state, batches, data, model.eta, rho, length, **options)

    return jax.vmap(one, in_axes=(axes, 0, 0), out_axes=(axes, 0))(states, lengths, rhos)


class Interrupted:
    """Delay Ctrl-C to the end of a step: a state that was donated to a step cannot be saved before the step returns."""

    def __enter__(self):
        self._event = threading.Event()
        self._previous = signal.signal(signal.SIGINT, lambda *_: self._event.set())
        return self._event

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self._previous)


def reported(first: int, last: int, size: int, label: str) -> Iterator[tuple[int, int]]:
    """Yield chunks (from, to) of the steps ``first`` … ``last`` − 1; print rate and remaining time after each."""
    begun, said = None, time.monotonic()
    for start in range(first, last, size):
        stop = min(start + size, last)
        yield start, stop
        now = time.monotonic()
        if begun is None:  # the first chunk compiles
            begun, base = now, stop
        elif now - said > 10 or stop == last:
            rate = (stop - base) / (now - begun)
            left = (last - stop) / rate / 60
            print(f"{label}: step {stop:,} of {last:,}, {rate:.2f} steps/s, {left:.1f} min left", flush=True)
            said = now


class Measured(NamedTuple):
    """SB, VAR and SE [3, R, T] of all lengths, the seconds they took, and whether Ctrl-C ended the run early."""

    found: np.ndarray
    seconds: float
    cut: bool = False


def measure(X: Any, config: Config, warmup: str, scratch: pathlib.Path) -> Measured:
    """Run all lengths side by side, or continue them.

    Args:
      X: Documents × words.
      config: The settings of the study.
      warmup: ``"mean"`` or ``"zeros"``.
      scratch: A file for the state of an interrupted run.
    """
    lam = init_topics(jax.random.key(config.seed), X.shape[1], config.topics)
    lengths, rhos = (jnp.asarray(x, float) for x in (config.lengths, [config.rho] * len(config.lengths)))
    first, earlier, parts, states = 0, 0.0, [], None
    if scratch.exists():
        like = jax.eval_shape(partial(begin, capacity=max(config.lengths)), lam, lengths)
        states, (found, earlier, _) = restore(scratch, like)
        first, parts = found.shape[-1], [found]
        print(f"{warmup}: continues from step {first:,}", flush=True)
    model = LDA(config.alpha, config.eta, float(X.shape[0]))
    rows = np.random.default_rng(config.seed).integers(0, X.shape[0], (config.steps, config.batch_size))
    batches, data = pack(X, rows), jax.tree.map(jnp.asarray, pack(X))
    states = begin(lam, lengths, max(config.lengths)) if states is None else states
    begun = saved = time.monotonic()

    def so_far(*, cut=False):
        return Measured(np.concatenate(parts, -1), earlier + time.monotonic() - begun, cut)

    with Interrupted() as interrupted:
        for start, stop in reported(first, config.steps, CHUNK, warmup):
            few = jax.tree.map(lambda x, a=start, b=stop: x[a:b], batches)
            states, (errors, _) = advance(states, lengths, rhos, few, model, data, warmup)
            parts.append(np.asarray(errors[:3]))
            if interrupted.is_set() or time.monotonic() - saved > SAVE_EVERY:
                save(scratch, states, so_far())
                saved = time.monotonic()
            if interrupted.is_set():
                return so_far(cut=stop < config.steps)
    return so_far()


def save(path: pathlib.Path, states: Any, measured: Measured) -> None:
    """Write the state of an interrupted run. The previous file remains intact until the new file is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new.npz")
    kept = {"found": measured.found, "seconds": measured.seconds}
    np.savez(beside, *map(np.asarray, jax.tree.leaves(states)), **kept)
    beside.replace(path)


def restore(path: pathlib.Path, like: Any) -> tuple[Any, Measured]:
    """Read what :func:`save` wrote."""
    with np.load(path) as kept:
        measured = Measured(kept["found"], float(kept["seconds"]))
        leaves = [jnp.array(kept[f"arr_{i}"]) for i in range(len(jax.tree.leaves(like)))]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), measured


# Verdicts: functions of the curves. Step i has index i − 1; after it, i minibatches have been processed.


def variance_slope(variance: np.ndarray, lengths: Any, after: int) -> dict[str, float]:
    """Fit the exponent s of VAR ∝ Lˢ at every step after ``after``; return median and range of 90 % of the steps."""
    logs = np.log(variance[:, after:])
    x = np.log(np.asarray(lengths, float))
    slopes = ((x - x.mean()) @ (logs - logs.mean(0))) / ((x - x.mean()) ** 2).sum()
    low, median, high = np.quantile(slopes, [0.05, 0.5, 0.95])
    return {"median": float(median), "low": float(low), "high": float(high)}


def decomposition(bias: np.ndarray, variance: np.ndarray, error: np.ndarray) -> dict[str, float]:
    """Compare SE with SB + VAR of one run: their ratio, and the cross term 2⟨bias, noise⟩ as a fraction of SE."""
    ratio = error / (bias + variance)
    cross = (error - bias - variance) / error
    low, median, high = np.quantile(ratio, [0.05, 0.5, 0.95])
    return {
        "ratio": float(median),
        "ratio_low": float(low),
        "ratio_high": float(high),
        "cross": float(np.median(np.abs(cross))),
        "cross_mean": float(cross.mean()),
    }


def kink(curve: np.ndarray, at: int) -> dict[str, float] | None:
    """Measure how sharply log y bends at i = ``at``: the change of its slope from one step to the next.

    The window is full at that step, and the first statistics leave it at the next step; the larger change of the two is
    used.
    ``usual`` is the median size of the change at other steps from at/2 to 3/2 at (at least four to either side), and
    ``times`` the ratio. A corner has a large ratio; a smooth bend does not. None if the curve is too short.
    """
    y = np.log(np.maximum(curve, np.finfo(float).tiny))
    reach = max(at // 2, 4)
    # Step i has index i − 1. A mean of one value has no bias and no logarithm.
    turns = {i: y[i] - 2 * y[i - 1] + y[i - 2] for i in range(max(at - reach, 2), min(at + reach, len(y) - 1) + 1)}
    turns = {i: turn for i, turn in turns.items() if curve[i - 2 : i + 1].min() > 0}
    here = [turns.pop(i) for i in (at, at + 1) if i in turns]
    if len(here) < 2 or not turns:
        return None
    change, usual = max(here, key=abs), float(np.median(np.abs(list(turns.values()))))
    return {"change": float(change), "usual": usual, "times": float(abs(change) / usual)}


def smooth(curve: np.ndarray, width: int = 21) -> np.ndarray:
    """Return the running median over ``width`` steps."""
    padded = np.pad(curve, [(0, 0)] * (curve.ndim - 1) + [(width // 2, width // 2)], mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1), -1)


def best_lengths(error: np.ndarray, lengths: Any) -> list[dict[str, int]]:
    """Return the L with the smallest squared error for each range of steps; SE is smoothed over time."""
    best = np.asarray(lengths)[np.argmin(smooth(error), axis=0)]
    edges = np.flatnonzero(np.diff(best)) + 1
    starts, stops = [0, *edges], [*edges, len(best)]
    return [{"length": int(best[a]), "from": int(a) + 1, "to": int(b)} for a, b in zip(starts, stops, strict=True)]


def late_rise(bias: np.ndarray, length: int) -> dict[str, float] | None:
    """Measure the rise of SB after its minimum with a full window: the highest later value over the minimum."""
    if len(bias) < length + 20:
        return None
    later = smooth(bias)[length:]
    lowest = int(np.argmin(later[: -len(later) // 10 or None]))
    highest = lowest + int(np.argmax(later[lowest:]))
    return {
        "lowest_at": length + lowest + 1,
        "highest_at": length + highest + 1,
        "ratio": float(later[highest] / later[lowest]),
    }


def verdicts(found: np.ndarray, lengths: Any) -> dict[str, Any]:
    """Compute all verdicts of one warm-up from SB, VAR and SE [3, R, T] at every step."""
    bias, variance, error = found.astype(np.float64)
    longest = max(lengths)
    body: dict[str, Any] = {"steps": int(bias.shape[-1])}
    if bias.shape[-1] > longest:
        body["variance_slope"] = variance_slope(variance, lengths, longest)
        body["variance_against_one_over_L"] = {
            str(L): float(np.median(variance[0, longest:] / variance[r, longest:]) / L) for r, L in enumerate(lengths)
        }
    body["decomposition"] = {
        str(L): decomposition(bias[r], variance[r], error[r]) for r, L in enumerate(lengths) if L > 1
    }
    body["kinks"] = {str(L): kink(bias[r], L) for r, L in enumerate(lengths) if kink(bias[r], L)}
    body["best"] = best_lengths(error, lengths)
    body["late_rise"] = {
        str(L): late_rise(bias[r], L) for r, L in enumerate(lengths) if L > 1 and late_rise(bias[r], L)
    }
    body["mean_error"] = {str(L): float(error[r].mean()) for r, L in enumerate(lengths)}
    return _rounded(body)


def by_length(named: dict[str, Any]) -> list[tuple[int, Any]]:
    """Sort by L; JSON stores L as text."""
    return sorted((int(L), value) for L, value in named.items())


def lines(warmup: str, body: dict[str, Any]) -> list[str]:
    """Format the verdicts as lines of text."""
    said = [f"warm-up {warmup}, {body['steps']:,} steps"]
    if "variance_slope" in body:
        slope = body["variance_slope"]
        said.append(
            f"  variance ∝ L^{slope['median']:.3f} (90 % of the steps: {slope['low']:.3f} … {slope['high']:.3f}); "
            "VAR₁/(L·VAR_L): "
            + ", ".join(f"L = {L}: {ratio:.2f}" for L, ratio in by_length(body["variance_against_one_over_L"]) if L > 1)
        )
    for L, found in by_length(body["decomposition"]):
        said.append(
            f"  L = {L}: SE/(SB + VAR) {found['ratio']:.3f} ({found['ratio_low']:.3f} … {found['ratio_high']:.3f}), "
            f"cross term {found['cross']:.1%} of SE, on average {found['cross_mean']:+.1%}"
        )
    for L, found in by_length(body["kinks"]):
        said.append(
            f"  kink at i = L = {L}: slope of log SB changes by {found['change']:+.2g} in one step, nearby by "
            f"{found['usual']:.2g}: {found['times']:.1f} times"
        )
    best = ", ".join(f"{part['from']}–{part['to']}: L = {part['length']}" for part in body["best"])
    said.append(f"  smallest squared error at steps {best}")
    for L, found in by_length(body["late_rise"]):
        said.append(
            f"  L = {L}: SB is lowest at i = {found['lowest_at']} and rises to {found['ratio']:.2f} times that "
            f"at i = {found['highest_at']}"
        )
    return said


def _rounded(value, digits=5):
    if isinstance(value, dict):
        return {name: _rounded(each, digits) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each, digits) for each in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def thin(steps: int, points: int = POINTS) -> np.ndarray:
    """Return the steps to draw: all of the first steps, then steps in geometric progression."""
    number = points
    while (kept := np.unique(np.round(np.geomspace(1, steps, number)).astype(int))).size < min(points, steps) - 1:
        number += 1
    return kept[: points - 1] if kept.size > points else kept


def keep(results: Results, config: Config, warmup: str, measured: Measured) -> None:
    """Store the curves and verdicts of one warm-up in the results file."""
    found = measured.found
    ends = [L for L in config.lengths if found.shape[-1] >= L]  # keeps every kink at its exact step
    at = np.union1d(thin(found.shape[-1], POINTS - len(ends)), ends)
    results.facts.setdefault("steps", {})[warmup] = at.tolist()
    results.facts.setdefault("verdicts", {})[warmup] = verdicts(found, config.lengths)
    results.facts.setdefault("seconds", {})[warmup] = round(measured.seconds)
    results.runs = [run for run in results.runs if run["setting"]["warmup"] != warmup]
    for r, L in enumerate(config.lengths):
        curves = {name: _rounded(found[c, r, at - 1].astype(float).tolist(), 4) for c, name in enumerate(CURVES)}
        results.runs.append({"setting": {"warmup": warmup, "window": L}, **curves})
    results.write()


# Figures

STYLES = (
    ("black", "-"),
    ("tab:red", "-"),
    ("tab:blue", "--"),
    ("tab:green", "-."),
    ("0.45", ":"),
    ("tab:purple", (0, (5, 1, 1, 1, 1, 1))),
)


def draw(results: Results, warmup: str, path: pathlib.Path) -> None:
    """Draw the paper's two rows of panels: three lengths with all errors, then each error with all lengths."""
    plt = pyplot()
    config, at = results.facts["config"], np.array(results.facts["steps"][warmup])
    runs = {run["setting"]["window"]: run for run in results.runs if run["setting"]["warmup"] == warmup}
    figure, panels = plt.subplots(2, 3, figsize=(11, 6.6), layout="constrained", sharex=True)
    for axes, L in zip(panels[0], config["shown"], strict=True):
        bias, variance, error = (np.array(runs[L][name]) for name in CURVES)
        for y, style in (
            (bias, {"color": "tab:red", "linestyle": "--"}),
            (variance, {"color": "tab:blue", "linestyle": "-."}),
            (error, {"color": "0.7", "linewidth": 3.5}),
            (bias + variance, {"color": "black", "linewidth": 1.0}),
        ):
            axes.plot(at, np.where(y > 0, y, np.nan), **style)
        axes.axvline(L, color="0.6", linewidth=0.6, zorder=0)
        axes.set_title(f"L = {L}")
        total = bias + variance
        ends = [
            (bias, "SB", "tab:red"),
            (variance, "VAR", "tab:blue"),
            (error, "SE", "0.5"),
            (total, "SB + VAR", "black"),
        ]
        _finish(axes, [(at[-1], y[-1], text, colour) for y, text, colour in ends])
    for axes, name, title in zip(
        panels[1], CURVES, ("squared bias SB", "variance VAR", "squared error SE"), strict=True
    ):
        ends = []
        for L, (colour, line) in zip(config["lengths"], STYLES, strict=False):
            y = np.array(runs[L][name])
            if not (y > 0).any():  # L = 1 has no bias
                continue
            axes.plot(at, np.where(y > 0, y, np.nan), color=colour, linestyle=line)
            ends.append((at[-1], y[-1], f"L = {L}", colour))
            if name == "squared_bias" and L in at:
                axes.plot(L, y[at == L], "o", color=colour, markersize=4)
        axes.set_title(title + (", dots at i = L" if name == "squared_bias" else ""))
        axes.set_xlabel("iteration i")
        _finish(axes, ends)
    _same_height(panels[0])
    _same_height(panels[1, :1])
    _same_height(panels[1, 1:])
    for axes in panels[:, 0]:
        axes.set_ylabel("squared norm, natural gradient")
    corpus = results.facts["corpus"]
    prose = {"zeros": "Algorithm 1 (missing statistics are zeros)", "mean": "mean of the stored statistics"}
    figure.suptitle(
        f"{corpus['name']}: D = {corpus['documents']:,}, V = {corpus['words']:,}, K = {config['topics']}, "
        f"B = {config['batch_size']}, ρ = {config['rho']:g}; warm-up: {prose[warmup]}",
        x=0.01,
        ha="left",
    )
    figure.savefig(path)
    plt.close(figure)


def _finish(axes, ends):
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.ends = ends


def _same_height(several):
    """Give these panels the same limits, then add the labels, which depend on the limits."""
    low, high = (pick(axes.get_ylim()[i] for axes in several) for i, pick in enumerate((min, max)))
    for axes in several:
        axes.set_ylim(low, high)
        right = max(x for x, *_ in axes.ends)
        label_ends(axes, axes.ends)
        axes.set_xlim(1, right * 3)
        axes.xaxis.set_minor_locator(axes.xaxis.get_major_locator())


def main():
    """Make the missing measurements, print the verdicts, draw the figures."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, help="number of steps, instead of the study's")
    args = parser.parse_args()
    results = Results(args.results / f"bias_variance_{corpus_name(args.corpus)}.json")
    if not args.draw:
        run(results, args)
    if not results.runs:
        sys.exit(f"{results.path}: no results to draw; run without --draw first")
    for warmup in results.facts["verdicts"]:
        print("\n".join(lines(warmup, results.facts["verdicts"][warmup])))
        path = results.path.with_name(f"{results.path.stem}_{warmup}.png")
        draw(results, warmup, path)
        print(f"figure: {path}")
    print(f"results: {results.path}")


def run(results, args):
    """Measure the warm-ups that the results file lacks."""
    config = PAPER if args.corpus else SMALL
    config = config._replace(steps=args.steps or config.steps)
    name, X = read(args.corpus)
    X = X[: config.documents]
    corpus = {
        "name": name,
        "documents": X.shape[0],
        "words": X.shape[1],
        "fingerprint": fingerprint(Corpus.of(X))[:16],
    }
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in config._asdict().items()}
    check_corpus(results, corpus)
    if results.facts.get("config") != plain:
        results.facts, results.runs = {}, []
    results.facts |= {"config": plain, "corpus": corpus, "machine": where()}
    done = results.facts.get("verdicts", {})
    for warmup in WARMUPS:
        scratch = pathlib.Path(tempfile.gettempdir()) / "smoothgrad-studies"
        scratch = scratch / f"{results.path.stem}_{warmup}_{config.steps}_{corpus['fingerprint']}_{__version__}.npz"
        if done.get(warmup, {}).get("steps") == config.steps:
            continue
        measured = measure(X, config, warmup, scratch)
        keep(results, config, warmup, measured)
        if measured.cut:
            sys.exit(f"interrupted at step {measured.found.shape[-1]:,}: the same command continues")
        scratch.unlink(missing_ok=True)  # the results file now holds the measurements


if __name__ == "__main__":
    main()
