"""Topic proportions by group against NumPy and scipy.stats."""

import numpy as np
import pytest
import scipy.stats

from smoothgrad_jax.models import topic_groups as module
from smoothgrad_jax.models.topic_groups import GroupedPart, period_of, topic_groups


@pytest.fixture
def documents():
    """θ [500, 7], a group per document, of which some are missing, and numbers of words, of which some are zero."""
    rng = np.random.default_rng(0)
    theta = rng.dirichlet(np.full(7, 0.3), 500).astype(np.float32)
    values = rng.choice(np.array(["b", "a", "c", None], object), 500, p=[0.5, 0.3, 0.1, 0.1])
    return theta, list(values), rng.integers(0, 8, 500)


def test_means_and_intervals_equal_scipy(documents):
    theta, values, num_words = documents
    found = topic_groups("journal", [GroupedPart(*documents)])
    assert (found.field, found.values) == ("journal", ["b", "a", "c"])  # largest first
    for g, name in enumerate(found.values):
        rows = theta[[v == name and n > 0 for v, n in zip(values, num_words, strict=True)]].astype(np.float64)
        assert found.num_docs[g] == len(rows)
        np.testing.assert_allclose(found.prevalence[g], rows.mean(0), rtol=1e-12)
        low, high = scipy.stats.t.interval(0.95, len(rows) - 1, rows.mean(0), scipy.stats.sem(rows))
        np.testing.assert_allclose(found.low[g], np.maximum(low, 0), rtol=1e-9)
        np.testing.assert_allclose(found.high[g], np.minimum(high, 1), rtol=1e-9)
    assert found.num_missing == values.count(None)
    assert found.num_empty == sum(v is not None and n == 0 for v, n in zip(values, num_words, strict=True))
    assert found.num_docs.sum() + found.num_missing + found.num_empty == 500


def test_parts_give_the_same_as_all_documents_at_once(documents):
    theta, values, num_words = documents
    whole = topic_groups("x", [documents], order="name")
    parts = ((theta[i : i + 9], values[i : i + 9], num_words[i : i + 9]) for i in range(0, 500, 9))
    found = topic_groups("x", parts, order="name")
    assert found.values == whole.values == ["a", "b", "c"]
    np.testing.assert_allclose(np.stack(found[3:6]), np.stack(whole[3:6]), atol=1e-12)
    assert found.num_docs.tolist() == whole.num_docs.tolist()
    assert found[6:] == whole[6:]


def test_the_interval_of_one_document_says_nothing():
    found = topic_groups("x", [(np.array([[0.25, 0.75]]), ["a"])])
    assert found.prevalence.tolist() == [[0.25, 0.75]]
    assert (found.low.tolist(), found.high.tolist()) == ([[0, 0]], [[1, 1]])


def test_the_interval_of_equal_documents_is_their_value():
    theta = np.full((50, 3), 1 / 3)
    found = topic_groups("x", [(theta, ["a"] * 50)])
    np.testing.assert_allclose(found.high - found.low, 0, atol=1e-8)


def test_intervals_contain_the_mean_in_95_of_100_samples():
    rng = np.random.default_rng(1)
    samples = rng.dirichlet([2, 3, 5], (2_000, 30))
    inside = []
    for theta in samples:
        found = topic_groups("x", [(theta, ["a"] * 30)])
        inside.append((found.low[0] <= [0.2, 0.3, 0.5]) & (found.high[0] >= [0.2, 0.3, 0.5]))
    np.testing.assert_allclose(np.mean(inside, 0), 0.95, atol=0.015)


def test_wrong_parts_are_refused(monkeypatch):
    theta = np.full((3, 2), 0.5)
    with pytest.raises(ValueError, match="one value per row of theta: 3 rows, got 2 values"):
        topic_groups("x", [(theta, ["a", "b"])])
    with pytest.raises(ValueError, match="year: expected documents with a group, got none: 2 have no value and 1 have"):
        topic_groups("year", [(theta, [None, "a", None], np.zeros(3))])
    monkeypatch.setattr(module, "MAX_GROUPS", 2)
    with pytest.raises(ValueError, match="x: has more than 2 different values"):
        topic_groups("x", [(theta, ["a", "b", "c"])])


@pytest.mark.parametrize(
    ("value", "year", "month"),
    [
        ("2020-03-31", "2020", "2020-03"),
        (" 2020-03-31T12:00:00Z ", "2020", "2020-03"),
        ("2020-03-31 12:00:00.123+01:00", "2020", "2020-03"),
        ("20200331", "2020", "2020-03"),
        ("2020-03", "2020", "2020-03"),
        ("2020", "2020", None),
        (2020, "2020", None),
        (2020.0, "2020", None),
        ("0987-01-01", "0987", "0987-01"),
        ("2020-13", None, None),
        ("2020-02-30", None, None),
        ("31.3.2020", None, None),
        ("March 2020", None, None),
        ("20", None, None),
        ("", None, None),
        (None, None, None),
        (True, None, None),
    ],
)
def test_dates_and_years_are_recognised(value, year, month):
    assert period_of(value, "year") == year
    assert period_of(value, "month") == month
