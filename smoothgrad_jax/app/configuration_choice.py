"""Choice of the number of topics and the window from the runs of a sweep.

| symbol | meaning                                                                                        |
|--------|------------------------------------------------------------------------------------------------|
| c, s   | configuration (topics and window), seed; C and S are their numbers                             |
| x_cs   | held-out score, or mean NPMI, of a run                                                         |
| σ      | standard deviation of x over seeds, pooled over configurations, without what a seed changes in |
|        | all configurations                                                                             |

All runs of a seed hold out the same documents and draw the same minibatches, so that the mean of a seed cancels in a
comparison of configurations:

    r_cs = x_cs − x̄_c − x̄_s + x̄,   σ² = Σ r_cs² / ((C − 1)(S − 1))
    tolerance = max(floor, 2 σ √(2/S))          two standard errors of the difference of two means

The rule: of the configurations whose mean score is within the tolerance of the best, and whose mean NPMI is within the
tolerance of the highest among these, the one with the fewest topics; of equal numbers, the one with the best score. The
floors are differences that no reader of topics notices: 0.01 nats per word, which is 1 % of perplexity, and an NPMI of
0.02. With one seed or one configuration σ is not known, and the floors are the tolerances.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SCORE_FLOOR = 0.01
NPMI_FLOOR = 0.02
_NAMES = 3  # in a message


class Configuration(NamedTuple):
    """The runs of one configuration, with the same seeds for every configuration."""

    topics: int  # K
    name: str  # for messages
    scores: npt.NDArray  # held-out score per seed [S]
    npmi: npt.NDArray  # mean NPMI per seed [S]


class Choice(NamedTuple):
    """The recommended configuration; made by :func:`choose`."""

    number: int  # among the configurations
    reason: str  # why, as one sentence
    notes: list[str]  # what limits the recommendation, one sentence each


def choose(configurations: Sequence[Configuration]) -> Choice:
    """Return the recommended one of at least one configuration, all with the same seeds, by the rule of this module."""
    scores, npmi = (np.array([getattr(each, name) for each in configurations]) for name in ("scores", "npmi"))
    means, coherence = scores.mean(1), npmi.mean(1)
    score_tolerance, npmi_tolerance = tolerance(scores, SCORE_FLOOR), tolerance(npmi, NPMI_FLOOR)
    best = int(means.argmax())
    near = np.flatnonzero(means >= means[best] - score_tolerance)
    highest = int(near[coherence[near].argmax()])
    kept = near[coherence[near] >= coherence[highest] - npmi_tolerance].tolist()
    number = min(kept, key=lambda c: (configurations[c].topics, -means[c]))
    if len(configurations) == 1:
        return Choice(number, "it is the only configuration", _notes(configurations, number))
    if number == best:
        reason = f"it has the best held-out score, {means[best]:.3f}"
    else:
        reason = (
            f"its held-out score {means[number]:.3f} is within {score_tolerance:.3f} of the best, {means[best]:.3f} "
            f"({configurations[best].name})"
        )
    reason += f"; NPMI {coherence[number]:.3f}"
    if highest != number:
        reason += f" is within {npmi_tolerance:.3f} of {coherence[highest]:.3f} ({configurations[highest].name})"
    fewer = [c for c in range(len(configurations)) if configurations[c].topics < configurations[number].topics]
    if worse := [configurations[c].name for c in fewer if c not in near]:
        reason += f"; lower by more than {score_tolerance:.3f}: {_listed(worse)}"
    if incoherent := [configurations[c].name for c in fewer if c in near]:
        reason += f"; as good in score, but with an NPMI lower by more than {npmi_tolerance:.3f}: {_listed(incoherent)}"
    return Choice(number, reason, _notes(configurations, number))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")


def tolerance(values: npt.ArrayLike, floor: float) -> float:
    """Return the difference of two means over seeds of x [C, S] up to which configurations count as equal."""
    x = np.asarray(values, np.float64)
    free = (x.shape[0] - 1) * (x.shape[1] - 1)
    if not free:
        return floor
    r = x - x.mean(1, keepdims=True) - x.mean(0) + x.mean()
    return max(floor, 2 * float(np.sqrt((r**2).sum() / free * 2 / x.shape[1])))


def _notes(configurations: Sequence[Configuration], number: int) -> list[str]:
    numbers, chosen = sorted({each.topics for each in configurations}), configurations[number]
    notes = []
    if len(numbers) > 1 and chosen.topics == numbers[-1]:
        notes.append(f"{chosen.topics} is the largest number of topics tried; more may be better")
    if len(numbers) > 1 and chosen.topics == numbers[0]:
        notes.append(f"{chosen.topics} is the smallest number of topics tried; fewer may be as good")
    if len(chosen.scores) == 1:
        notes.append("one seed: the differences between seeds are not known; --seeds 2 or more measures them")
    return notes
