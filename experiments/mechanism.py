"""Find the origin of the gain of a window: λ is itself a moving average of Ŝ, so why does another average help?

    python experiments/mechanism.py                              generated documents, two minutes
    python experiments/mechanism.py --corpus arxiv/bow.npz

In a linear analysis, with independent noise in Ŝ and with S independent of λ, a window of L in front of the step ρ
reduces the variance of λ by this factor:

    Var(λ; L) / Var(λ; 1) = 2 (x − 1 + exp(−x)) / x²,      x = ρ L

At ρ = 10⁻³ and L = 10 the factor is 0.997, a negligible gain. The study therefore changes one setting at a time, with
the same seeds and documents, and compares with L = 1 under the same setting: ρ and L, both warm-ups, the window in the
first steps only or in all later steps only, the batch size, the initial λ, double precision, the most frequent words
only; and a placebo, L = 1 from a λ that differs by a thousandth, which shows the effect of chance. "Wide" takes one
step on ten times the documents before the run: ten minibatches that are all fitted under the initial λ, without a
window. A minibatch contains 34 % of all words (arXiv) or 47 % (generated), and Ŝ is zero for the others. It contains
99 % of the 1,000 most frequent words of arXiv, and all of the 300 most frequent words of both: Ŝ is then not sparse.
"""

import math

import numpy as np
from study import Results, Setting, Study, main, pyplot

PAPER = Setting(passes=0.5)
SMALL = Setting(rho=1e-2, batch_size=100, topics=20, alpha=0.1, eta=0.1, passes=1.0, scores=4)
SEEDS, SMALL_SEEDS = (0, 1), (0, 1, 2)  # with few topics chance is larger: the loss of one of twenty topics costs 0.08
FREQUENT, SMALL_FREQUENT = (1_000, 300), (300,)  # words
PLACEBO = "L = 1 again, λ₀ off by 0.001"


def groups(base: Setting, seeds: tuple[int, ...]) -> dict[str, list[tuple[Setting, Setting]]]:
    """Return pairs of a run and its L = 1 reference by condition, one pair per seed, the main conditions first."""
    rho, size = base.rho, base.batch_size
    plain = base._replace(window=1)
    conditions: dict[str, tuple[Setting, Setting]] = {
        PLACEBO: (plain._replace(jitter=1e-3), plain),
        "L = 10": (base._replace(window=10), plain),
        "L = 100": (base._replace(window=100), plain),
    }
    for L, switch in ((10, 10), (10, 100), (100, 100)):
        window = base._replace(window=L, switch=switch)
        conditions[f"L = {L} in the first {switch} steps only"] = (window._replace(kind="first"), plain)
        conditions[f"L = {L} after the first {switch} steps"] = (window._replace(kind="later"), plain)
    conditions["L = 1, wide first step"] = (plain._replace(start="wide"), plain)
    for L in (10, 100):
        conditions[f"L = {L}, zero warm-up"] = (base._replace(window=L, warmup="zeros"), plain)
    for start in ("trained", "seeds"):
        other = base._replace(start=start)
        for L in (10, 100):
            conditions[f"L = {L}, λ₀ {_STARTS[start]}"] = (other._replace(window=L), other._replace(window=1))
    for factor in (10, 30) if base == SMALL else (3, 10, 30):
        other = base._replace(rho=rho * factor)
        for L in (10, 100):
            conditions[f"L = {L}, ρ = {rho * factor:g}"] = (other._replace(window=L), other._replace(window=1))
    late = other._replace(window=100, kind="later", switch=100)
    conditions[f"L = 100 after the first 100 steps, ρ = {late.rho:g}"] = (late, other._replace(window=1))
    tenth = base._replace(batch_size=size // 10, rho=rho / 10)
    conditions[f"L = 10, B = {size // 10}, ρ = {rho / 10:g}, against B = {size}, L = 1"] = (
        tenth._replace(window=10),
        plain,
    )
    conditions[f"L = 1, B = {size // 10}, ρ = {rho / 10:g}, against B = {size}, L = 1"] = (
        tenth._replace(window=1),
        plain,
    )
    conditions[f"L = 1, B = {size * 10}, ρ = {rho * 10:g}, against B = {size}, L = 1"] = (
        plain._replace(batch_size=size * 10, rho=rho * 10),
        plain,
    )
    few = base._replace(batch_size=size // 10)
    for L in (10, 1):
        conditions[f"L = {L}, B = {size // 10}, ρ = {rho:g}, against B = {size}, L = 1"] = (
            few._replace(window=L),
            plain,
        )
    conditions[f"L = 10, B = {size // 10}, ρ = {rho:g}"] = (few._replace(window=10), few._replace(window=1))
    for number in SMALL_FREQUENT if base == SMALL else FREQUENT:
        dense = base._replace(frequent=number)
        conditions[f"L = 10, the {number:,} most frequent words"] = (
            dense._replace(window=10),
            dense._replace(window=1),
        )
    double = base._replace(precision="float64")
    conditions["L = 10, float64"] = (double._replace(window=10), double._replace(window=1))
    return {
        name: [(run._replace(seed=seed), against._replace(seed=seed)) for seed in seeds]
        for name, (run, against) in conditions.items()
    }


_STARTS = {"trained": "trained", "seeds": "from documents"}


def settings(base: Setting, seeds: tuple[int, ...]) -> list[Setting]:
    """Return all runs of the study, each once."""
    pairs = list(groups(base, seeds).values())
    return list(dict.fromkeys(run for i in range(len(seeds)) for pair in pairs for run in pair[i]))


def paper(_) -> list[Setting]:
    """Return the settings for a real corpus."""
    return settings(PAPER, SEEDS)


def gains(results: Results) -> dict[str, np.ndarray]:
    """Return the gain over L = 1 of every seed in nats per held-out word, by condition."""
    generated = results.facts["corpus"]["name"] == "generated"
    base = SMALL if generated else PAPER._replace(passes=max(run["setting"]["passes"] for run in results.runs))
    found = {}
    for name, pairs in groups(base, SMALL_SEEDS if generated else SEEDS).items():
        both = [(results.find(run), results.find(against)) for run, against in pairs]
        values = [a["curve"][-1]["score"] - b["curve"][-1]["score"] for a, b in both if a and b]
        if values:
            found[name] = np.array(values)
    return found


def of_all_words(results: Results) -> list[dict]:
    """Return the runs on the full vocabulary; scores on other vocabularies are not comparable."""
    return [run for run in results.runs if "frequent" not in run["setting"]]


def variance_ratio(x: float) -> float:
    """Return Var(λ; L) / Var(λ; 1) in the linear analysis, x = ρL."""
    return 2 * (x - 1 + math.exp(-x)) / x**2


def verdict(results: Results) -> list[str]:
    """Report the gain of every condition, including the placebo."""
    found = gains(results)
    lines = [
        f"{name}: {values.mean():+.4f} nats per word over L = 1 ({', '.join(f'{value:+.4f}' for value in values)})"
        for name, values in found.items()
    ]
    ends = [(run["curve"][-1]["topics"], run["curve"][-1]["score"]) for run in of_all_words(results)]
    ranks = [np.argsort(np.argsort(values)) for values in zip(*ends, strict=True)]
    lines.append(f"rank correlation of score and topics in use, {len(ends)} runs: {np.corrcoef(*ranks)[0, 1]:.2f}")
    rho = SMALL.rho if results.facts["corpus"]["name"] == "generated" else PAPER.rho
    ratios = ", ".join(f"L = {L}: {variance_ratio(rho * L):.3f}" for L in (10, 100))
    lines.append(f"Var(λ; L) / Var(λ; 1) in the linear analysis at ρ = {rho:g}: {ratios}")
    return lines


def draw(results: Results, path) -> None:
    """Draw a row per condition and a dot per seed; on the right, the score of every run against its topics in use."""
    plt = pyplot()
    found = gains(results)
    figure, (axes, right) = plt.subplots(
        1, 2, figsize=(11, 0.25 * len(found) + 1), layout="constrained", width_ratios=(3, 2)
    )
    chance = np.abs(found.get(PLACEBO, np.zeros(1))).max()
    axes.axvspan(-chance, chance, color="0.9", linewidth=0)
    axes.axvline(0, color="0.5", linewidth=0.8)
    for row, (name, values) in enumerate(found.items()):
        strong = name in ("L = 10", "L = 100")
        axes.plot(values, np.full(len(values), row), "o", color="black" if strong else "tab:blue", markersize=4)
        axes.plot([values.mean()] * 2, [row - 0.3, row + 0.3], color="black", linewidth=1.5)
    axes.set_yticks(range(len(found)), found)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("gain over L = 1 of the same seed, nats per word")
    corpus, passes = results.facts["corpus"], max(run["setting"]["passes"] for run in results.runs)
    axes.set_title(f"{corpus['name']}, {passes:g} passes. Dots: seeds, bars: means, grey: placebo")
    for run in of_all_words(results):
        plain = run["setting"]["window"] == 1
        end = run["curve"][-1]
        right.plot(end["topics"], end["score"], "o" if plain else "x", color="black" if plain else "tab:blue", ms=4)
    right.set_xlabel("topics in use at the end")
    right.set_ylabel("held-out log p(word), mean")
    right.set_title("all runs on the full vocabulary: L = 1 (dots), windows (×)")
    figure.savefig(path)


STUDY = Study("mechanism", paper, settings(SMALL, SMALL_SEEDS), verdict, draw)

if __name__ == "__main__":
    main(STUDY, __doc__)
