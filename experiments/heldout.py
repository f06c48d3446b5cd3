"""Reproduce the paper's second figure: does averaging over L minibatches predict unseen words better?

    python experiments/heldout.py                                generated documents, two minutes
    python experiments/heldout.py --corpus arxiv/bow.npz         one of the large corpora

The paper's settings: K = 100 topics, B = 300 documents per minibatch drawn with replacement, α = η = 0.5, a constant
ρ = 10⁻³, λ from noise; three seeds for L = 1, 10, 100, one for 1,000, 10,000 and ∞. The same windows also run
with ρ_t = (64 + t)^−0.7, a common choice. Scores are nats per held-out word by document completion.
"""

import math

import numpy as np
from study import Results, Setting, Study, label_ends, main, pyplot

SEEDS = (0, 1, 2)
LENGTHS = (1, 10, 100, 1_000, 10_000, math.inf)
REPEATED = (1, 10, 100)
BYTES = (10_000,)  # lengths of windows that are stored as uint8
CONSTANT, DECREASING = 1e-3, (64.0, 0.7)
PASSES = {"arxiv": 20.0, "news": 20.0, "wiki_hoffman": 30.0}  # an hour or somewhat more per corpus on two cores
SMALL = Setting(rho=1e-2, batch_size=100, topics=20, alpha=0.1, eta=0.1, passes=3.0)


def settings(base: Setting, constant: float) -> list[Setting]:
    """Return all runs of the study, the first seed of every length first."""
    # A small run has fewer steps than the other lengths, which would equal ∞.
    lengths = [L for L in LENGTHS if base != SMALL or L in (*REPEATED, math.inf)]
    one = [base._replace(rho=constant, window=L, slots="uint8" if L in BYTES else "float32") for L in lengths]
    decreasing = [base._replace(rho=DECREASING, window=L) for L in (*REPEATED, math.inf)]
    more = [run._replace(seed=seed) for seed in SEEDS[1:] for run in one if run.window in REPEATED]
    return [*one, *decreasing, *more]


def paper(data) -> list[Setting]:
    """Return the settings for a real corpus."""
    return settings(Setting(passes=PASSES.get(data.name, 3.0)), CONSTANT)


def chosen(results: Results) -> list[Setting]:
    """Return the settings whose runs the results file can contain."""
    if results.facts["corpus"]["name"] == "generated":
        return settings(SMALL, SMALL.rho)
    found = max(run["setting"]["passes"] for run in results.runs)
    return settings(Setting(passes=found), CONSTANT)


def verdict(results: Results) -> list[str]:
    """Report the last scores, the spread of the seeds, and how often a window beats plain SVI with the same seed."""
    lines = []
    for setting in chosen(results):
        if setting.seed == 0 and results.find(setting):
            finals = results.finals(setting, SEEDS)
            rho = f"ρ = {setting.rho:g}" if np.ndim(setting.rho) == 0 else "ρ_t = ({:g} + t)^−{:g}".format(*setting.rho)
            seeds = f"mean of {len(finals)} seeds, " if len(finals) > 1 else ""
            each = ", ".join(f"{final:.4f}" for final in finals)
            lines.append(f"{rho}, L = {name(setting.window)}: {finals.mean():.4f} ({seeds}seed 0 first: {each})")
    constant = [setting for setting in chosen(results) if np.ndim(setting.rho) == 0]
    plain = next(setting for setting in constant if setting.window == 1)
    for other in (setting for setting in constant if setting.window != 1 and setting.seed == 0):
        pairs = [(results.find(other._replace(seed=seed)), results.find(plain._replace(seed=seed))) for seed in SEEDS]
        gains = [a["curve"][-1]["score"] - b["curve"][-1]["score"] for a, b in pairs if a and b]
        if gains:
            better = sum(gain > 0 for gain in gains)
            lines.append(
                f"L = {name(other.window)} against L = 1, same seed: {better} of {len(gains)} better, "
                f"gains {', '.join(f'{gain:+.4f}' for gain in gains)}"
            )
    return lines


def name(length: float) -> str:
    """Format L."""
    return "∞" if length == math.inf else f"{length:,.0f}"


def draw(results: Results, path) -> None:
    """Draw score against passes: constant ρ on the left, decreasing ρ on the right."""
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(10.5, 4.2), sharey=True, layout="constrained")
    runs = chosen(results)
    colours = dict(zip(LENGTHS, ("black", "tab:red", "tab:blue", "tab:green", "0.45", "0.65"), strict=True))
    lines = dict(zip(LENGTHS, ("-", "-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))), strict=True))
    shown, all_ends = [], []
    for axes, decreasing in zip(panels, (False, True), strict=True):
        ends = []
        for setting in (s for s in runs if s.seed == 0 and (np.ndim(s.rho) > 0) == decreasing):
            curves = [results.curve(setting._replace(seed=seed)) for seed in SEEDS]
            curves = [curve for curve in curves if curve]
            if not curves:
                continue
            passes = curves[0][0]
            scores = np.stack([scores for _, scores in curves])
            style = {"color": colours[setting.window], "linestyle": lines[setting.window]}
            axes.plot(passes, scores.mean(0), **style)
            if len(scores) > 1:
                axes.fill_between(passes, scores.min(0), scores.max(0), color=style["color"], alpha=0.15, linewidth=0)
            seeds = "" if len(scores) > 1 or decreasing else " (one seed)"
            ends.append((passes[-1], scores.mean(0)[-1], f"L = {name(setting.window)}{seeds}", style["color"]))
            shown.append(scores[:, max(1, len(passes) // 10) :])
        constant = next((s.rho for s in runs if np.ndim(s.rho) == 0), None)
        axes.set_title("ρ = (64 + t)$^{-0.7}$, one seed" if decreasing else f"ρ = {constant:g}, shaded: three seeds")
        axes.set_xlabel("effective passes over the corpus")
        all_ends.append(ends)
    low, high = min(map(np.min, shown)), max(map(np.max, shown))
    panels[0].set_ylim(low, high + 0.03 * (high - low))
    for axes, ends in zip(panels, all_ends, strict=True):
        if ends:
            label_ends(axes, ends)
    panels[0].set_ylabel("held-out log p(word), mean")
    corpus = results.facts["corpus"]
    title = f"{corpus['name']}: {corpus['documents']:,} documents, {corpus['words']:,} words"
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path)


STUDY = Study("heldout", paper, settings(SMALL, SMALL.rho), verdict, draw)

if __name__ == "__main__":
    main(STUDY, __doc__)
