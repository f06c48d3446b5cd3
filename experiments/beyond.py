"""Compare other windows than the paper's, on the same documents and with the same number of steps.

    python experiments/beyond.py                              generated documents, two minutes
    python experiments/beyond.py --corpus arxiv/bow.npz

The study compares fixed windows of L = 1, 10, 100 minibatches with an exponential window that has the variance of L
(one slot instead of L), a window that is phased out to 1 over the second half of the run (the paper's proposal for
convergence), slots in bfloat16, and an adaptive window that estimates noise and drift and chooses L. All runs have the
same seeds and 1,000 minibatches of 300 documents. With ρ = 0.01 and 0.03 the windows differ (ρL = 0.1 to 3); at the
paper's 0.001 they hardly differ after the first steps. A third regime, ρ_t = (64 + t)^−0.7 with topics initialised from
documents, is the default of the command and the estimator for the variational method, here with the paper's priors.
"""

import numpy as np
from study import Results, Setting, Study, main, pyplot

SEEDS = (0, 1, 2)
FIXED = (1, 10, 100)
STEPS = 1_000
LONGEST = 128
COMPARED = ("adaptive", *(f"L = {L}" for L in FIXED))
PAPER = Setting(rho=1e-2)
SMALL = Setting(rho=0.05, batch_size=100, topics=20, alpha=0.1, eta=0.1, passes=2.0)
USERS = {"rho": (64.0, 0.7), "start": "seeds"}


def windows(base: Setting) -> dict[str, Setting]:
    """Return the windows by name, the fixed windows first."""
    return {
        **{f"L = {L}": base._replace(window=L) for L in FIXED},
        "adaptive": base._replace(window=LONGEST, kind="adaptive"),
        "exponential, L = 10": base._replace(window=10, kind="exponential"),
        "exponential, L = 100": base._replace(window=100, kind="exponential"),
        "L = 100 phased out": base._replace(window=100, kind="phase out"),
        "L = 100 in bfloat16": base._replace(window=100, slots="bfloat16"),
    }


def regimes(base: Setting) -> dict[str, Setting]:
    """Return step sizes and initialisations, by name."""
    larger = base._replace(rho=3 * base.rho)
    return {
        f"ρ = {base.rho:g}, λ₀ noise": base,
        f"ρ = {larger.rho:g}, λ₀ noise": larger,
        "ρ = (64 + t)^−0.7, λ₀ from documents": base._replace(**USERS),
    }


def settings(base: Setting, seeds: tuple[int, ...]) -> list[Setting]:
    """Return all runs of the study: all windows for the first seed, the compared windows for the other seeds."""
    return [
        setting._replace(seed=seed)
        for seed in seeds
        for regime in regimes(base).values()
        for name, setting in windows(regime).items()
        if seed == seeds[0] or name in COMPARED
    ]


def paper(data) -> list[Setting]:
    """Return the settings for a real corpus."""
    return settings(based_on(data.facts()), SEEDS)


def complete(rows: dict[str, np.ndarray]) -> bool:
    """Return whether all compared windows were run with the same seeds."""
    return len({len(rows.get(name, ())) for name in COMPARED}) == 1 and "adaptive" in rows


def based_on(corpus: dict) -> Setting:
    """Return the settings that all runs on a corpus have in common."""
    if corpus["name"] == "generated":
        return SMALL
    return PAPER._replace(passes=STEPS * PAPER.batch_size / corpus["documents"])


def last_scores(results: Results) -> dict[str, dict[str, np.ndarray]]:
    """Return the last scores of all seeds, by regime and window."""
    found = {
        regime: {name: results.finals(setting, SEEDS) for name, setting in windows(base).items()}
        for regime, base in regimes(based_on(results.facts["corpus"])).items()
    }
    return {
        regime: {name: scores for name, scores in rows.items() if len(scores)}
        for regime, rows in found.items()
        if any(map(len, rows.values()))
    }


def verdict(results: Results) -> list[str]:
    """Report mean scores, and whether the adaptive window is within the spread of the seeds of the best fixed one."""
    lines = []
    for regime, rows in last_scores(results).items():
        for name, scores in rows.items():
            lines.append(f"{regime}, {name}: {scores.mean():.4f} ({', '.join(f'{score:.4f}' for score in scores)})")
        fixed = {name: scores for name, scores in rows.items() if name in COMPARED[1:]}
        if complete(rows):
            best = max(fixed, key=lambda name: fixed[name].mean())
            gaps = rows["adaptive"] - fixed[best]
            width = fixed[best].max() - fixed[best].min()
            word = "within" if gaps.mean() >= -width else "outside"
            lines.append(
                f"{regime}: adaptive {gaps.mean():+.4f} from the best fixed window in hindsight ({best}), "
                f"{word} the spread of its seeds ({width:.4f}); by seed {', '.join(f'{gap:+.4f}' for gap in gaps)}"
            )
    return lines


def draw(results: Results, path) -> None:
    """Draw a panel per regime: a row per window, a dot per seed. Below, the L that the adaptive window chose."""
    plt = pyplot()
    rows = last_scores(results)
    figure, panels = plt.subplots(
        2, len(rows), figsize=(5.2 * len(rows), 5), layout="constrained", squeeze=False, height_ratios=(3, 2)
    )
    bases = regimes(based_on(results.facts["corpus"]))
    for (top, below), (regime, found) in zip(panels.T, rows.items(), strict=True):
        best = max((found[name] for name in found if name in COMPARED[1:]), key=np.mean)
        top.axvspan(best.min(), best.max(), color="0.9", linewidth=0)
        for row, (name, scores) in enumerate(found.items()):
            colour = "tab:red" if name == "adaptive" else "black"
            top.plot(scores, np.full(len(scores), row), "o", color=colour, markersize=4, alpha=0.7)
            top.plot([scores.mean()] * 2, [row - 0.3, row + 0.3], color=colour, linewidth=1.5)
        top.set_yticks(range(len(found)), [n if len(found[n]) > 1 else f"{n} (one seed)" for n in found])
        top.locator_params(axis="x", nbins=4)
        top.invert_yaxis()
        top.tick_params(axis="y", length=0)
        top.set_title(regime.replace("^−0.7", "$^{-0.7}$"))
        top.set_xlabel("held-out log p(word), mean")
        adaptive = windows(bases[regime])["adaptive"]
        for seed, line in zip(SEEDS, ("-", "--", ":"), strict=True):
            run = results.find(adaptive._replace(seed=seed))
            if run:
                steps, lengths = zip(*((point["step"], point["window"]) for point in run["curve"]), strict=True)
                below.step(steps, lengths, line, where="post", color="tab:red", label=f"seed {seed}")
        below.set_yscale("log", base=2)
        below.set_ylim(0.8, 1.3 * LONGEST)
        below.set_xlabel("step")
        below.set_ylabel("L chosen")
        below.legend(frameon=False, fontsize=8)
    corpus = results.facts["corpus"]
    title = f"{corpus['name']}: {corpus['documents']:,} documents; bars: means, grey: seeds of the best fixed window"
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path)


STUDY = Study("beyond", paper, settings(SMALL, SEEDS[:2]), verdict, draw)

if __name__ == "__main__":
    main(STUDY, __doc__)
