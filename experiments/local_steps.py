"""What does the window do for each local step of LDA, and what is it worth beside sweeps and minibatch size?

    python experiments/local_steps.py --corpus arxiv/bow.npz
    python experiments/local_steps.py --corpus arxiv/bow.npz --plot

First part: L = 1, 10, 100 with each local step, after one and after ten passes. Second part, the sampled step at equal
cost: all combinations of sweeps, L and B, each with as many passes as samples every token forty times, so that half as
many sweeps make twice as many passes. The step sizes are not annealed, so that one run gives the topics after every
number of passes. Every run is one call of ``quality.py``, which documents the scores; runs that are in ``--results``
are not repeated.
"""

import argparse
import itertools
import json
import pathlib
import subprocess
import sys

QUALITY = pathlib.Path(__file__).with_name("quality.py")
METHODS, WINDOWS = ("sampled", "collapsed", "mean", "variational"), (1, 10, 100)
SWEEPS, BATCH_SIZES, SAMPLES = (2, 5, 10), (64, 256, 1024), 40


def grid():
    """Return the options of all runs."""
    pairs = itertools.product(METHODS, WINDOWS)
    steps = [{"method": m, "window": w, "batch-size": 256, "passes": 10} for m, w in pairs]
    costs = itertools.product(SWEEPS, (1, 10), BATCH_SIZES)
    return steps + [{"sweeps": s, "window": w, "batch-size": b, "passes": SAMPLES // s} for s, w, b in costs]


def train(args):
    """Make all runs."""
    for options in grid():
        flags = itertools.chain(*((f"--{name}", str(value)) for name, value in options.items()))
        fixed = ["--corpus", args.corpus, "--documents", args.documents, "--results", args.results]
        fixed += ["--schedule", "robbins-monro"]
        subprocess.run([sys.executable, QUALITY, *map(str, fixed), *flags], check=True)


def find(runs, **wanted):
    """Return the curve of the run with these settings."""
    return next(run["curve"] for run in runs if all(run["setting"][name] == value for name, value in wanted.items()))


def draw(args):
    """Print both tables and draw the figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = [json.loads(line) for line in args.results.read_text().splitlines()]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    print("| local step | L | 1 pass: score, NPMI | 10 passes: score, NPMI, effective topics |\n|---|---|---|---|")
    for number, method in enumerate(METHODS):
        curves = [find(runs, method=method, window=w, passes=10, sweeps=5, batch_size=256) for w in WINDOWS]
        for w, (first, *_, last) in zip(WINDOWS, curves, strict=True):
            early = f"{first['score']:.3f}, {first['npmi']:.3f}"
            print(f"| {method} | {w} | {early} | {last['score']:.3f}, {last['npmi']:.3f}, {last['effective']:.0f} |")
        left.plot(WINDOWS, [c[0]["score"] for c in curves], "o:", color=f"C{number}")
        left.plot(WINDOWS, [c[-1]["score"] for c in curves], "o-", color=f"C{number}", label=method)
    left.set(xscale="log", xlabel="L", ylabel="held-out score", title="dotted: after one pass, solid: after ten")
    left.legend(frameon=False)
    print("\n| sweeps | L | B | passes | score | NPMI | seconds |\n|---|---|---|---|---|---|---|")
    for (number, s), w in itertools.product(enumerate(SWEEPS), (1, 10)):
        setting = {"method": "sampled", "sweeps": s, "window": w, "passes": SAMPLES // s}
        last = [find(runs, batch_size=b, **setting)[-1] for b in BATCH_SIZES]
        for b, p in zip(BATCH_SIZES, last, strict=True):
            print(f"| {s} | {w} | {b} | {SAMPLES // s} | {p['score']:.3f} | {p['npmi']:.3f} | {p['seconds']:.1f} |")
        style = "o-" if w == 1 else "s--"
        right.plot(BATCH_SIZES, [p["score"] for p in last], style, color=f"C{number}", label=f"{s} sweeps, L = {w}")
    right.set(xscale="log", xlabel="B", title="sampled, every token sampled 40 times")
    right.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(args.results.with_suffix(".png"), dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", required=True, type=pathlib.Path)
    parser.add_argument("--documents", type=int, default=30_000)
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("local_steps.jsonl"))
    parser.add_argument("--plot", action="store_true", help="only print and draw the results")
    args = parser.parse_args()
    if not args.plot:
        train(args)
    draw(args)


if __name__ == "__main__":
    main()
