"""Topic proportions by group of documents or over time: the mean of θ per group, with confidence intervals.

| symbol | meaning                                                                    |
|--------|----------------------------------------------------------------------------|
| θ_d    | topic proportions of document d [K]                                        |
| n_g    | number of documents in group g that have at least one known word           |
| m_gk   | prevalence of topic k in group g: the mean of θ_dk over these documents    |
| s_gk   | standard deviation of θ_dk over these documents, with the divisor n_g − 1  |

    95 % interval of m_gk:   m_gk ± t s_gk / √n_g

with t the 97.5 % quantile of Student's t with n_g − 1 degrees of freedom, cut to [0, 1]; the interval of a single
document is [0, 1]. Every document has the same weight, whatever its length. A document without any known word is left
out, because its θ is that of the prior; so is a document without a group. Both are counted. The interval describes how
much the mean varies between samples of documents. It does not contain the uncertainty of the topics.
"""

import contextlib
import datetime
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import scipy.sparse
import scipy.special

MAX_GROUPS = 2_000  # a field with more values, such as an id, is no group
Period = Literal["year", "month"]
PERIODS: tuple[Period, ...] = get_args(Period)

_QUANTILE = 0.975  # of both sides of a 95 % interval


class TopicGroups(NamedTuple):
    """Topic proportions per group; made by :func:`topic_groups`.

    Attributes:
      field: The name of the field by which documents are grouped.
      values: The names of the G groups in order.
      num_docs: Documents per group [G].
      prevalence: The mean of θ over the documents of each group [G, K]; rows sum to one.
      low: The lower ends of the 95 % intervals of the prevalence [G, K].
      high: The upper ends [G, K].
      num_missing: Documents without a group.
      num_empty: Documents of all groups that were left out, because they have no known word.
    """

    field: str
    values: list[str]
    num_docs: npt.NDArray[np.int64]
    prevalence: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]
    num_missing: int = 0
    num_empty: int = 0


class GroupedPart(NamedTuple):
    """Some documents and their groups; a tuple in this order is one, too.

    Attributes:
      theta: θ [n, K].
      values: The group of each document, or None if it has none; see :func:`period_of` for dates.
      num_words: The number of known words of each document [n]; None if every document has some.
    """

    theta: npt.NDArray
    values: Sequence[str | None]
    num_words: npt.NDArray | None = None


def topic_groups(
    field: str, parts: Iterable[GroupedPart | tuple], *, order: Literal["size", "name"] = "size"
) -> TopicGroups:
    """Return the mean topic proportions of each group of documents.

    Args:
      field: The name of the field by which documents are grouped.
      parts: All documents in parts, which are read once; only sums per group are kept in memory.
      order: The order of the groups: ``"size"``, the group with the most documents first, ties by name; or ``"name"``,
        which for dates is the order in time.

    Raises:
      ValueError: If a part has not one value per row of θ, there are more than ``MAX_GROUPS`` groups, or no document
        with a known word has a group.

    Example:
      >>> theta = np.array([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]])
      >>> groups = topic_groups("year", [(theta, ["2020", "2020", "2021"])], order="name")
      >>> groups.values, groups.num_docs.tolist(), groups.prevalence.round(1).tolist()
      (['2020', '2021'], [2, 1], [[0.8, 0.2], [0.2, 0.8]])
    """
    sizes: Counter[str] = Counter()
    sums: dict[str, npt.NDArray] = {}  # Σ θ and Σ θ² per group [2, K]
    num_missing = num_empty = 0
    for part in parts:
        theta, values, num_words = GroupedPart(*part)
        if len(values) != len(theta):
            raise ValueError(f"expected one value per row of theta: {len(theta)} rows, got {len(values)} values")
        empty = np.zeros(len(theta), bool) if num_words is None else np.asarray(num_words) == 0
        grouped = np.array([value is not None for value in values], bool)
        num_missing += int(np.count_nonzero(~grouped))
        num_empty += int(np.count_nonzero(grouped & empty))
        rows = np.flatnonzero(grouped & ~empty)
        for name, size, added in _group_sums(theta[rows], [str(values[d]) for d in rows.tolist()]):
            sizes[name] += size
            sums[name] = sums[name] + added if name in sums else added
        if len(sums) > MAX_GROUPS:
            raise ValueError(f"{field}: has more than {MAX_GROUPS:,} different values; choose a field of categories")
    if not sums:
        left_out = f"{num_missing:,} have no value and {num_empty:,} have no known word"
        raise ValueError(f"{field}: expected documents with a group, got none: {left_out}")
    names = sorted(sums, key=lambda name: (-sizes[name], name) if order == "size" else (0, name))
    num_docs = np.array([sizes[name] for name in names])
    mean, low, high = _intervals(num_docs, np.stack([sums[name] for name in names]))
    return TopicGroups(field, names, num_docs, mean, low, high, num_missing, num_empty)


def period_of(value: object, period: Period) -> str | None:
    """Return the year or the month of a date as ``"2020"`` or ``"2020-01"``; None if the value has none.

    Args:
      value: A date of ISO 8601 with or without a time, a month such as ``"2020-01"``, or a year. A year can be a
        number.
      period: ``"year"`` or ``"month"``.
    """
    text = str(value).strip()
    found = re.fullmatch(r"(\d{4})(?:\.0|-(\d\d))?", text)  # tables with missing values write 2020 as 2020.0
    with contextlib.suppress(ValueError):
        if found:
            date = datetime.date(int(found[1]), int(found[2] or 1), 1)
            return f"{date:%Y}" if period == "year" else f"{date:%Y-%m}" if found[2] else None
        date = datetime.datetime.fromisoformat(text)
        return f"{date.year:04d}" if period == "year" else f"{date.year:04d}-{date.month:02d}"
    return None


def _group_sums(theta: npt.NDArray, names: list[str]) -> Iterable[tuple[str, int, npt.NDArray]]:
    """Yield the name, the number of documents, and Σ θ and Σ θ² [2, K] of each group."""
    groups = list(dict.fromkeys(names))
    number = {name: g for g, name in enumerate(groups)}
    shape = (len(groups), len(names))
    member = scipy.sparse.csr_array((np.ones(len(names)), ([number[n] for n in names], np.arange(len(names)))), shape)
    theta = theta.astype(np.float64)
    sums = np.stack([member @ theta, member @ theta**2], axis=1)
    return zip(groups, member.sum(1).astype(int).tolist(), sums, strict=True)


def _intervals(
    num_docs: npt.NDArray, sums: npt.NDArray
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return mean, low and high [G, K] from Σ θ and Σ θ² [G, 2, K]."""
    n = num_docs[:, None].astype(np.float64)
    mean = sums[:, 0] / n
    # s² = (Σ θ² − n m²) / (n − 1); rounding can make a variance of zero negative
    variance = np.maximum(sums[:, 1] - n * mean**2, 0) / np.maximum(n - 1, 1)
    half = scipy.special.stdtrit(np.maximum(n - 1, 1), _QUANTILE) * np.sqrt(variance / n)
    half = np.where(n > 1, half, 1)
    return mean, np.clip(mean - half, 0, 1), np.clip(mean + half, 0, 1)
