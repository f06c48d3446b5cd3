"""Measure the baseline that the paper rejects: averaged gradients. How many entries of λ become negative, and when?

    python experiments/averaged.py                                generated documents, less than two minutes
    python experiments/averaged.py --corpus arxiv_2k/bow.npz      1,800 training documents, 200 held out
    python experiments/averaged.py --corpus arxiv_2k --draw       verdict and figure from the stored results

Three methods with the same initial λ and the same minibatches, for every L, ρ and seed:

    smoothed   λ ← λ + ρ ((η − λ) + mean_L Ŝ)           the paper's method
    averaged   λ ← λ + ρ mean_L ((η − λ) + Ŝ)           the baseline
    clipped    the baseline, then λ ← max(λ, η)         η is the smallest value that λ = η + statistics can have

λ ≤ 0 defines no Dirichlet distribution and has no score, so the curve of the baseline ends at the first step with such
an entry. (The run itself continues: the local step replaces such an entry by the smallest positive float.)

Why the product ρL matters: an entry without statistics follows λ' = −ρ · mean_L(λ − η). With z = sL for a solution
e^(s i) this is z² = −ρL (1 − e^−z). From ρL = max x²/(e^x − 1) = 0.648 on, every solution oscillates, so that λ falls
below η; from ρL = π²/2 = 4.93 on, the oscillation grows.
"""

import sys
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmark import spread
from bias_variance import advance, begin, reported, thin, without_info
from jax.tree_util import Partial
from study import Results, arguments, check_corpus, corpus_name, label_ends, load, pyplot, where

from smoothgrad_jax import (
    LDA,
    averaged_step,
    count_negative,
    global_step,
    init,
    init_topics,
    log_predictive,
    pack,
    run,
)
from smoothgrad_jax.core import svi

OVERSHOOT, UNSTABLE = 0.648, 4.93
POINTS = 120


def clipped_step(state, stats, prior, rho, length=None, *, warmup="mean"):
    """Take a step of the baseline, then set λ ← max(λ, η)."""
    moved = averaged_step(state, stats, prior, rho, length, warmup=warmup)
    return moved._replace(params=jnp.maximum(moved.params, jnp.asarray(prior, moved.params.dtype)))


METHODS = {"smoothed": global_step, "averaged": averaged_step, "clipped": clipped_step}


class Config(NamedTuple):
    """Settings of the study, in the package's letters; ``products`` are the values of ρL at which negative entries are
    searched for."""

    lengths: tuple[int, ...] = (10, 30, 100)
    rhos: tuple[float, ...] = (0.01, 0.1)
    products: tuple[float, ...] = (0.1, 0.2, 0.3, 0.45, 0.65, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.5, 8.0)
    seeds: tuple[int, ...] = (0, 1, 2)
    batch_size: int = 300
    topics: int = 100
    alpha: float = 0.5
    eta: float = 0.5
    steps: int = 400
    score_every: int = 20
    held_out: int = 200
    documents: int | None = None


PAPER = Config()
SMALL = Config(
    products=(0.1, 0.3, 0.65, 1.0, 2.0, 4.0, 8.0),
    seeds=(0,),
    batch_size=100,
    topics=10,
    steps=200,
    documents=500,
)


# Runs


def problem(data, config, seed):
    """Return the model, the initial λ and the minibatches of a seed."""
    X = data.corpus
    rows = np.random.default_rng(seed).integers(0, X.num_docs, (config.steps, config.batch_size))
    lam = init_topics(jax.random.key(seed), X.num_words, config.topics)
    return LDA(config.alpha, config.eta, float(X.num_docs)), lam, pack(X, rows)


@partial(jax.jit, static_argnames="capacity")
def begin_plain(lam, lengths, capacity):
    """Return the states of several runs whose bias is not measured."""
    return jax.vmap(lambda _: init(lam, capacity), out_axes=svi.vmap_axes())(lengths)


def negatives(state, _):
    """Return what is recorded of a step."""
    return count_negative(state.params)


@partial(jax.jit, static_argnames="update", donate_argnames="states")
def advance_plain(states, lengths, rhos, batches, model, update):
    """Advance several runs by some steps; return the states and the numbers of entries of λ ≤ 0 [R, T]."""

    def one(state, length, rho):
        step = Partial(without_info, model)
        return run(step, state, batches, model.eta, rho, length, record=negatives, update=update)

    return jax.vmap(one, in_axes=(svi.vmap_axes(), 0, 0), out_axes=(svi.vmap_axes(), 0))(states, lengths, rhos)


def compare(data, config: Config, method: str, seed: int) -> list[dict[str, Any]]:
    """Run one method and seed with all L and ρ side by side. Bias is measured for the first seed only."""
    model, lam, batches = problem(data, config, seed)
    halves = [jax.tree.map(jnp.asarray, pack(half)) for half in data.halves]
    settings = [(L, rho) for rho in config.rhos for L in config.lengths]
    lengths, rhos = (jnp.asarray(x, float) for x in zip(*settings, strict=True))
    update, measured = METHODS[method], seed == config.seeds[0]
    if measured:
        full = jax.tree.map(jnp.asarray, pack(data.corpus))
        states = begin(lam, lengths, max(config.lengths), update)
    else:
        states = begin_plain(lam, lengths, max(config.lengths))
    parts, scores = [], []
    for start, stop in reported(0, config.steps, config.score_every, f"{method}, seed {seed}"):
        few = jax.tree.map(lambda x, a=start, b=stop: x[a:b], batches)
        if measured:
            states, (errors, negative) = advance(states, lengths, rhos, few, model, full, "mean", update)
            kept = [negative, errors.squared_bias, *([] if errors.extra_bias is None else [errors.extra_bias])]
        else:
            states, negative = advance_plain(states, lengths, rhos, few, model, update)
            kept = [negative]
        parts.append(np.stack([np.asarray(x, np.float64) for x in kept]))
        scores.append(
            [None if row[-1] else score(model, x, halves) for x, row in zip(states.params, negative, strict=True)]
        )
    found = np.concatenate(parts, -1)
    return [
        {
            "setting": {"method": method, "window": L, "rho": rho, "seed": seed},
            "scores": [row[r] for row in scores],
            **facts(*found[:, r]),
        }
        for r, (L, rho) in enumerate(settings)
    ]


def score(model, lam, halves):
    """Return nats per held-out word."""
    return number(float(log_predictive(model, lam, *halves)), 6)


def facts(negative: np.ndarray, bias: Any = None, extra: Any = None) -> dict[str, Any]:
    """Summarise all steps of a run, and thin its curves for the figure."""
    at, late, below = thin(len(negative), POINTS) - 1, slice(len(negative) // 2, None), np.flatnonzero(negative)
    body = {
        "first_negative": int(below[0]) + 1 if below.size else None,
        "most_negative": int(negative.max()),
        "last_negative": int(negative[-1]),
    }
    if bias is not None:
        body |= {"late_bias": number(np.median(bias[late])), "squared_bias": [number(x, 4) for x in bias[at]]}
        body["negative"] = [int(x) for x in negative[at]]
    if extra is not None:
        body |= {"late_extra": number(np.median(extra[late])), "extra_bias": [number(x, 4) for x in extra[at]]}
    return body


def number(x: float, digits: int = 5) -> float | None:
    """Round a number for JSON; None if it is not finite."""
    return float(f"{x:.{digits}g}") if np.isfinite(x) else None


def search(data, config: Config, length: int) -> list[dict[str, Any]]:
    """Return, for every ρL, the largest number of entries of λ ≤ 0 and the step of the first."""
    model, lam, batches = problem(data, config, config.seeds[0])
    rhos = [product / length for product in config.products]
    lengths = jnp.full(len(rhos), float(length))
    states = begin_plain(lam, lengths, length)
    counts = np.asarray(advance_plain(states, lengths, jnp.asarray(rhos), batches, model, averaged_step)[1])
    below = [np.flatnonzero(row) for row in counts]
    return [
        {
            "setting": {"search": product, "window": length},
            "first_negative": int(where[0]) + 1 if where.size else None,
            "most_negative": int(row.max()),
        }
        for product, row, where in zip(config.products, counts, below, strict=True)
    ]


# Verdicts


def pick(results: Results, **setting: Any) -> list[dict[str, Any]]:
    """Return the runs with these settings."""
    return [run for run in results.runs if setting.items() <= run["setting"].items()]


def safe_product(runs: list[dict[str, Any]]) -> tuple[float | None, float | None]:
    """Return the largest ρL without negative entries and the smallest with some, for the runs of one length."""
    runs = sorted(runs, key=lambda run: run["setting"]["search"])
    wrong = [run["setting"]["search"] for run in runs if run["most_negative"]]
    first = min(wrong, default=None)
    safe = [run["setting"]["search"] for run in runs if first is None or run["setting"]["search"] < first]
    return max(safe, default=None), first


def score_gains(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[float]:
    """Return last score minus last score of the other run with the same seed, where both exist."""
    last = {run["setting"]["seed"]: run["scores"][-1] for run in others}
    pairs = [(run["scores"][-1], last.get(run["setting"]["seed"])) for run in runs]
    return [a - b for a, b in pairs if a is not None and b is not None]


def verdict(results: Results) -> list[str]:
    """Report negative entries, bias and score of each method, and the ρL at which negative entries begin."""
    config = results.facts["config"]
    entries = results.facts["corpus"]["words"] * config["topics"]
    said = []
    for rho in config["rhos"]:
        for L in config["lengths"]:
            here = partial(pick, results, rho=rho, window=L)
            smoothed, averaged, clipped = (here(method=method) for method in METHODS)
            if not (smoothed and averaged and clipped):
                continue
            first = [run["first_negative"] for run in averaged]
            most = max(run["most_negative"] for run in averaged)
            found = (
                "none" if not most else f"at most {most:,} ({100 * most / entries:.2g} %), first at i = {_list(first)}"
            )
            kept = sum(run["most_negative"] for run in (*smoothed, *clipped))
            one, two = (next(run for run in runs if "late_bias" in run) for runs in (smoothed, averaged))
            said.append(
                f"ρ = {rho:g}, L = {L} (ρL = {rho * L:g}), {len(averaged)} seeds: entries of λ ≤ 0: averaged {found}; "
                f"smoothed and clipped {kept}"
            )
            said.append(
                f"  late SB: smoothed {_number(one['late_bias'])}, averaged {_number(two['late_bias'])}, of which "
                f"‖λ − λ̄‖² alone {_number(two['late_extra'])}"
            )
            for name, others in (("averaged", averaged), ("clipped", clipped)):
                gains = score_gains(others, smoothed)
                if gains:
                    said.append(f"  {name} minus smoothed, last score, same seed: {_list(gains, '+.4f')}")
            said.append(
                "  last score: "
                + "; ".join(
                    f"{method} {_list([run['scores'][-1] for run in runs], '.4f')}"
                    for method, runs in zip(METHODS, (smoothed, averaged, clipped), strict=True)
                )
            )
    for L in config["lengths"]:
        found = [run for run in results.runs if "search" in run["setting"] and run["setting"]["window"] == L]
        if found:
            safe, wrong = safe_product(found)
            said.append(f"L = {L}: no entry of λ ≤ 0 up to ρL = {safe}, some from ρL = {wrong} on")
    return said


def _list(values, form=""):
    return ", ".join("none" if value is None else format(value, form) for value in values)


def _number(value):
    return "not finite" if value is None else f"{value:.3g}"


# Figure

LOOKS = {"smoothed": ("black", "-"), "averaged": ("tab:red", "--"), "clipped": ("tab:blue", "-.")}
LINES = ((("tab:green"), "-."), ("tab:blue", "--"), ("tab:red", "-"))


def draw(results: Results, path) -> None:
    """Draw negative entries over time and against ρL, bias, and scores."""
    plt = pyplot()
    config, corpus = results.facts["config"], results.facts["corpus"]
    entries = corpus["words"] * config["topics"]
    at = np.array(results.facts["steps"])
    figure, panels = plt.subplots(2, 3, figsize=(11.5, 6.8), layout="constrained")
    seed = config["seeds"][0]
    small, large = config["rhos"]
    middle, longest = config["lengths"][1:]
    for axes, rho in zip(panels[0], (small, large), strict=False):
        ends = []
        for L, (colour, line) in zip(config["lengths"], LINES, strict=True):
            for found in pick(results, method="averaged", window=L, rho=rho, seed=seed):
                percent = 100 * np.array(found["negative"]) / entries
                axes.plot(at, percent, color=colour, linestyle=line)
                ends.append((at[-1], percent[-1], f"L = {L}", colour))
        axes.set_title(f"entries of λ ≤ 0, averaged, ρ = {rho:g}")
        axes.set_ylabel("% of all entries")
        if any(found["most_negative"] for found in pick(results, method="averaged", rho=rho, seed=seed)):
            axes.set_yscale("symlog", linthresh=100 / entries)
            axes.set_ylim(bottom=0)
            axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= at[-1]])
            axes.set_xlim(right=1.3 * at[-1])
            axes.spines["bottom"].set_bounds(axes.get_xlim()[0], at[-1])
            _label_points(axes, ends)
        else:
            axes.set_ylim(0, 1)
            axes.set_yticks([0])
            axes.text(0.5, 0.5, "none, for any L", transform=axes.transAxes, ha="center", color="0.4")
    _threshold(panels[0, 2], results, config, entries)
    _bias(panels[1, 0], results, at, {"window": longest, "rho": small, "seed": seed})
    _scores(panels[1, 1], results, config, {"window": longest, "rho": small})
    _scores(panels[1, 2], results, config, {"window": middle, "rho": large})
    for axes in (*panels[0, :2], *panels[1]):
        axes.set_xlabel("iteration i")
    figure.suptitle(
        f"{corpus['name']}: averaged gradients. D = {corpus['documents']:,}, V = {corpus['words']:,}, "
        f"K = {config['topics']}, B = {config['batch_size']}, {len(config['seeds'])} seeds",
        x=0.01,
        ha="left",
    )
    figure.savefig(path)
    plt.close(figure)


def _threshold(axes, results, config, entries):
    ends = []
    for L, (colour, line) in zip(config["lengths"], LINES, strict=True):
        found = [run for run in results.runs if "search" in run["setting"] and run["setting"]["window"] == L]
        found.sort(key=lambda run: run["setting"]["search"])
        x = np.array([run["setting"]["search"] for run in found])
        y = 100 * np.array([run["most_negative"] for run in found]) / entries
        axes.plot(x, y, color=colour, linestyle=line, marker="o", markersize=3)
        ends.append((x[-1], y[-1], f"L = {L}", colour))
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=100 / entries)
    axes.set_ylim(bottom=0)
    axes.set_title("most entries of λ ≤ 0, against ρL")
    axes.set_xlabel("ρL")
    for x, text in ((OVERSHOOT, f"overshoots from {OVERSHOOT:g}"), (UNSTABLE, f"grows from {UNSTABLE:g}")):
        axes.axvline(x, color="0.6", linewidth=0.8, zorder=0)
        axes.text(
            x * 0.97,
            0.04,
            text,
            rotation=90,
            va="bottom",
            ha="right",
            fontsize=7,
            color="0.4",
            transform=axes.get_xaxis_transform(),
        )
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5) if tick >= min(config["products"])]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(right=1.8 * max(x for x, *_ in ends))
    _label_points(axes, ends)


def _bias(axes, results, at, setting):
    ends = []
    for method, name, text in (
        ("smoothed", "squared_bias", "SB smoothed"),
        ("averaged", "squared_bias", "SB averaged"),
        ("averaged", "extra_bias", "‖λ − λ̄‖²"),
    ):
        for found in pick(results, method=method, **setting):
            y = np.array([np.nan if v is None or v <= 0 else v for v in found[name]])
            colour, line = ("0.5", ":") if name == "extra_bias" else LOOKS[method]
            axes.plot(at, y, color=colour, linestyle=line)
            if np.isfinite(y[-1]):
                ends.append((at[-1], y[-1], text, colour))
    axes.set_yscale("log")
    axes.set_title(_title("squared bias", setting))
    _label(axes, ends)


def _scores(axes, results, config, setting):
    steps = np.arange(config["score_every"], config["steps"] + 1, config["score_every"])
    ends = []
    for method, (colour, line) in LOOKS.items():
        found = pick(results, method=method, **setting)
        if not found:
            continue
        rows = np.array([[np.nan if v is None else v for v in run["scores"]] for run in found])
        scored = ~np.isnan(rows).any(0)
        if not scored.any():
            axes.text(
                0.98,
                0.04,
                f"{method}: no score,\nλ ≤ 0 from i ≤ {steps[0]} on",
                color=colour,
                fontsize=8,
                ha="right",
                transform=axes.transAxes,
            )
            continue
        # The curve ends at the first step at which a seed has an entry of λ ≤ 0.
        last = len(scored) if scored.all() else int(np.argmin(scored))
        x, y = steps[:last], rows[:, :last]
        if last:
            axes.plot(x, y.mean(0), color=colour, linestyle=line)
            axes.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.15, linewidth=0)
            if last < len(steps):
                axes.plot(x[-1], y.mean(0)[-1], "x", color=colour)
                axes.annotate(
                    f"{method}: λ ≤ 0",
                    (x[-1], y.mean(0)[-1]),
                    (6, -10),
                    textcoords="offset points",
                    color=colour,
                    fontsize=8,
                )
            else:
                ends.append((x[-1], y.mean(0)[-1], method, colour))
    axes.set_title(_title("held-out log p(word)", setting))
    _label(axes, ends)


def _title(text, setting):
    rho, L = setting["rho"], setting["window"]
    return f"{text}, ρ = {rho:g}, L = {L}"


def _label_points(axes, ends):
    """Label the ends of curves. Labels are moved apart in points, because the scale is neither linear nor log."""
    ends = sorted(ends, key=lambda end: end[1])
    heights = [72 / axes.figure.dpi * axes.transData.transform((x, y))[1] for x, y, *_ in ends]
    for (x, y, text, colour), height, place in zip(ends, heights, spread(heights, 10), strict=True):
        where = {"textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.annotate(text, (x, y), (5, place - height), color=colour, **where)


def _label(axes, ends):
    if ends:
        label_ends(axes, ends)


def main():
    """Make the missing runs, print the verdict, draw the figure."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, help="number of steps, instead of the study's")
    args = parser.parse_args()
    results = Results(args.results / f"averaged_{corpus_name(args.corpus)}.json")
    if not args.draw:
        run_missing(results, args)
    if not results.runs:
        sys.exit(f"{results.path}: no results to draw; run without --draw first")
    for line in verdict(results):
        print(line)
    draw(results, results.path.with_suffix(".png"))
    print(f"results: {results.path}\nfigure: {results.path.with_suffix('.png')}")


def run_missing(results, args):
    """Make the runs that the file lacks; write the file after each group of runs."""
    config = PAPER if args.corpus else SMALL
    config = config._replace(steps=args.steps or config.steps)
    data = load(args.corpus, config.held_out, config.documents)
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in config._asdict().items()}
    check_corpus(results, data.facts())
    if results.facts.get("config") != plain:
        results.facts, results.runs = {"seconds": {}}, []
    results.facts |= {
        "config": plain,
        "corpus": data.facts(),
        "machine": where(),
        "steps": thin(config.steps, POINTS).tolist(),
    }
    todo = [(f"{method} {seed}", (compare, method, seed)) for seed in config.seeds for method in METHODS]
    todo[len(METHODS) : len(METHODS)] = [(f"search {L}", (search, L)) for L in config.lengths]
    for label, (make, *what) in todo:
        if label in results.facts["seconds"]:
            continue
        begun = time.monotonic()
        try:
            made = make(data, config, *what)
        except KeyboardInterrupt:
            sys.exit(f"interrupted: {len(results.runs)} runs are in {results.path}; the same command continues")
        results.facts["seconds"][label] = round(time.monotonic() - begun)
        results.runs += made
        results.write()
        print(f"{label}: {results.facts['seconds'][label]} s", flush=True)


if __name__ == "__main__":
    main()
