"""Tests of the report: numbers against slow reference code, the HTML file, and the page in a browser."""

import base64
import hashlib
import importlib.util
import itertools
import json
import math
import re
import shutil
import time

import numpy as np
import pytest
from scipy.spatial.distance import pdist, squareform

from smoothgrad_jax.app import report_content, topic_blocks, topic_map
from smoothgrad_jax.app.model_comparison import compare_models
from smoothgrad_jax.app.report import typical_documents, write_report
from smoothgrad_jax.app.report_content import Excerpt
from smoothgrad_jax.app.saved_models import SavedModel
from smoothgrad_jax.app.topic_labels import read_labels
from smoothgrad_jax.models.topic_groups import TopicGroups
from smoothgrad_jax.models.topic_quality import TopicQuality

HOSTILE = [
    "</script><script>window.ran=1</script>",
    "<img src=x onerror=window.ran=1>",
    "<!--<script>",
    "&amp;&lt;",
    "\"quoted\" 'words' `and` \\u003c \\",
    "{{data}}{{title}}",
    "מילה",
    "كلمة",
    "🦜👩‍🚀",
    "\u2028line\u2029s",
    "zero\x00width\u200b\ufeff",
    "\udc80surrogate",
    "  ",
    "long" * 60,
]


QUALITY = TopicQuality(np.array([0.1, -0.25, 0.3, 0.05, 0.2]), 0.9, 4.5, [(0, 3)], {1: "incoherent"}, 1234)


def make_model(V=200, K=5, seed=0, **changes):
    """Return a random model with Zipf-like word frequencies and no ties in relevance."""
    rng = np.random.default_rng(seed)
    lam = rng.gamma(0.3, 200 / np.arange(1, V + 1)[:, None], (V, K)) + 0.05
    parts = {
        "lam": lam.astype(np.float32),
        "alpha": 0.1,
        "eta": 0.05,
        "num_docs": 1234,
        "vocabulary": [f"word{i}" for i in range(V)],
        "settings": {"window": math.inf, "seed": 7, "rho": "(10 + t)^−0.7"},
        "history": [{"step": t, "passes": t / 4, "score": -8 + t / 40} for t in np.arange(1, 20)],
        "prevalence": None,
        "word_counts": None,
        "quality": None,
    }
    return SavedModel(**parts | changes)


def read(path):
    """Return the embedded data of a report."""
    blocks = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 1
    return json.loads(blocks[0])


def oracle(model):
    """Return p(w|k) [K][V], π [K] and p(w) [V], computed by loops over Python numbers."""
    lam = np.asarray(model.lam, np.float64).T.tolist()
    sums = [math.fsum(row) for row in lam]
    prevalence = sums if model.prevalence is None else list(model.prevalence)
    prevalence = [weight / math.fsum(prevalence) for weight in prevalence]
    p = [[value / total for value in row] for row, total in zip(lam, sums, strict=True)]
    marginal = [math.fsum(s * row[w] for s, row in zip(prevalence, p, strict=True)) for w in range(len(lam[0]))]
    return p, prevalence, marginal


# ---- numbers ----


@pytest.mark.parametrize(("V", "top"), [(400, 60), (30, 60), (400, 1), (1, 5)])
def test_ranked_words_are_the_top_words_of_all_slider_positions(V, top):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        log_marginal = rng.normal(-8, 3, V)
        log_p = log_marginal + rng.normal(0, 2, V)
        log_p[1 + V // 2 :] = -np.inf
        expected_words = set()
        for mu in np.arange(21) / 20:
            seen = np.flatnonzero(np.isfinite(log_p)).tolist()
            score = {w: mu * log_p[w] + (1 - mu) * (log_p[w] - log_marginal[w]) for w in seen}
            expected_words |= set(sorted(seen, key=lambda w: -score[w])[:top])
        words = report_content.ranked_words(log_p, log_marginal, top, positions=20).tolist()
        assert sorted(words) == sorted(expected_words)
        assert words == sorted(words, key=lambda w: -log_p[w])


@pytest.mark.parametrize("given", [False, True])
def test_page_data_equal_the_reference(tmp_path, given):
    rng = np.random.default_rng(1)
    model = make_model(V=300, K=7)
    if given:
        model = model._replace(prevalence=rng.dirichlet(np.ones(7)), word_counts=rng.integers(0, 50, 300))
    p, prevalence, marginal = oracle(model)
    data = read(write_report(tmp_path / "r.html", model))
    number = [int(word[4:]) for word in data["words"]]
    statistics = np.maximum(model.lam.astype(np.float64) - 0.05, 0).sum()
    counts = model.word_counts if given else statistics * np.array(marginal)

    assert data["counted"] is given
    assert (data["num_words"], data["num_docs"]) == (300, 1234)
    np.testing.assert_allclose(data["counts"], counts[number], rtol=6e-4)
    np.testing.assert_allclose(data["marginal"], np.array(marginal)[number], rtol=6e-4)
    assert data["counts"] == sorted(data["counts"], reverse=True)
    for k, topic in enumerate(data["topics"]):
        np.testing.assert_allclose(topic["prevalence"], prevalence[k], rtol=6e-4)
        words = [number[i] for i in topic["words"]]
        np.testing.assert_allclose(topic["p"], [p[k][w] for w in words], rtol=6e-4)
        # At each slider position the page contains the most relevant of all words that occur.
        for mu in (0, 0.3, 0.6, 1):
            score = {w: math.log(p[k][w]) - (1 - mu) * math.log(marginal[w]) for w in range(300) if counts[w] > 0}
            assert sorted(words, key=lambda w: -score[w])[:60] == sorted(score, key=lambda w: -score[w])[:60]
    for w, pairs in zip(number, data["word_topics"], strict=True):
        posterior = [prevalence[k] * p[k][w] / marginal[w] for k in range(7)]
        assert pairs[::2] == sorted((k for k in range(7) if posterior[k] >= 0.005), key=lambda k: -posterior[k])
        np.testing.assert_allclose(pairs[1::2], [1000 * posterior[k] for k in pairs[::2]], atol=0.5 + 1e-9)


def test_the_page_contains_the_quality_of_the_topics(tmp_path):
    data = read(write_report(tmp_path / "r.html", make_model(quality=QUALITY)))
    assert [topic["npmi"] for topic in data["topics"]] == QUALITY.npmi.tolist()
    assert [topic["junk"] for topic in data["topics"]] == [None, "incoherent", None, None, None]
    assert [topic["duplicates"] for topic in data["topics"]] == [[3], [], [], [0], []]
    names = ["mean NPMI", "diversity", "effective topics", "near-duplicate pairs", "junk topics"]
    assert [name for name, _ in data["quality"]] == names
    assert [value for _, value in data["quality"]][-2:] == ["1", "1"]


def make_groups(K=5, values=("b", "a", "c"), **changes):
    """Return groups with random numbers."""
    rng = np.random.default_rng(len(values))
    mean = rng.dirichlet(np.ones(K), len(values))
    parts = {"low": 0.9 * mean, "high": 1 - 0.9 * (1 - mean), "num_docs": np.arange(10, 10 + len(values))}
    return TopicGroups(**{"field": "year", "values": list(values), "prevalence": mean, **parts, **changes})


@pytest.mark.parametrize(
    ("values", "at"),
    [
        (("2019", "2020", "2022"), [2019, 2020, 2022]),
        (("2019-11", "2019-12", "2020-01"), [2019.833, 2019.917, 2020]),
        (("2020", "2019"), None),
        (("2019", "unknown"), None),
        (("2019-13", "2020-01"), None),
        (("2019",), None),
        (("b", "a", "c"), None),
    ],
)
def test_the_page_contains_groups_and_recognises_years_and_months(tmp_path, values, at):
    groups = make_groups(values=values, num_missing=1234)
    data = read(write_report(tmp_path / "r.html", make_model(), groups=groups))["groups"]
    assert (data["field"], data["values"], data["at"]) == ("year", list(values), at)
    assert data["docs"] == groups.num_docs.tolist()
    assert data["remark"] == "Documents without year: 1,234."
    expected = np.stack([groups.prevalence, groups.low, groups.high]).transpose(2, 0, 1)
    np.testing.assert_allclose(data["topics"], expected, rtol=6e-3)
    assert read(write_report(tmp_path / "r.html", make_model()))["groups"] is None


def test_of_many_groups_those_with_the_most_documents_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(report_content, "_MAX_GROUP_NUMBERS", 5 * 20)
    values = [f"{1900 + i}" for i in range(50)]
    groups = make_groups(values=values, num_docs=np.arange(50) * 7 % 50)
    data = read(write_report(tmp_path / "r.html", make_model(), groups=groups))["groups"]
    kept = [i for i in range(50) if i * 7 % 50 >= 30]
    assert data["values"] == [values[i] for i in kept]
    np.testing.assert_allclose(np.array(data["topics"])[:, 0].T, groups.prevalence[kept], rtol=6e-3)
    assert data["remark"] == "Shown: the 20 groups with the most documents, of 50."


def test_the_page_contains_the_matched_topics_of_another_model(tmp_path):
    model = make_model(V=60, quality=QUALITY)
    # The other model has two topics less, in another order, lacks some words and has others.
    kept, order = np.arange(59, 9, -1), [3, 0, 4]
    lam = np.concatenate([model.lam[kept][:, order], np.full((8, 3), 0.05, np.float32)])
    names = [f"word{w}" for w in kept] + [f"new{i}" for i in range(8)]
    other = make_model(lam=lam, vocabulary=names, labels={1: "one"})
    found = compare_models(model, other, "other")
    data = read(write_report(tmp_path / "r.html", model, comparison=found))["comparison"]
    assert data["partner"] == [1, -1, -1, 0, 2]
    np.testing.assert_allclose(data["similarity"], [1, 0, 0, 1, 1], rtol=1e-3)
    assert (data["name"], data["num_common_words"], data["mean"]) == ("other", 50, 1)
    assert [topic["label"] for topic in data["topics"]] == [None, "one", None]
    words = [[word for word, _ in top] for top in other.top_words(20)]
    assert [topic["words"] for topic in data["topics"]] == words
    np.testing.assert_allclose([t["prevalence"] for t in data["topics"]], other.topic_proportions(), rtol=1e-3)
    assert data["quality"][0] == ["mean NPMI", "0.080", "–"]
    assert data["quality"][-1] == ["held-out score", "−7.525", "−7.525"]
    assert read(write_report(tmp_path / "r.html", model))["comparison"] is None


def test_models_without_common_words_cannot_be_compared():
    model = make_model()
    for other, message in (
        (make_model(vocabulary=[f"other{i}" for i in range(200)]), "the models have no common word"),
        (make_model(vocabulary=None), "one of the models has no vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            compare_models(model, other, "other")
    numbers = make_model(vocabulary=None)
    assert compare_models(numbers, numbers, "same").match.partner.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="no vocabulary and 200 and 100 words"):
        compare_models(numbers, make_model(V=100, vocabulary=None), "other")


def test_long_texts_of_many_documents_are_shortened(tmp_path, monkeypatch):
    monkeypatch.setattr(report_content, "_MAX_TEXTS", 5_000)
    documents = {k: [(0.5, "ü" * 700), (0.4, "short"), (0.3, "x" * 1000)] for k in range(5)}
    texts = [
        text
        for each in read(write_report(tmp_path / "r.html", make_model(), documents=documents))["documents"].values()
        for _, _, text in each
    ]
    assert 4_900 <= len("".join(texts).encode()) <= 5_050
    assert [text for text in texts if text == "short"] == ["short"] * 5
    few = {k: [(0.5, "x" * 900)] for k in range(5)}
    kept = read(write_report(tmp_path / "r.html", make_model(), documents=few))["documents"]
    assert [text for each in kept.values() for _, _, text in each] == ["x" * 900] * 5


def test_words_that_never_occur_are_not_shown(tmp_path):
    counts = np.arange(200) % 2
    data = read(write_report(tmp_path / "r.html", make_model(word_counts=counts)))
    assert set(data["words"]) == {f"word{w}" for w in range(1, 200, 2)}


def test_jensen_shannon_distances_equal_their_definition():
    rng = np.random.default_rng(0)
    beta = rng.dirichlet(np.full(50, 0.1), 9)
    beta[0, :25] = beta[1, 25:] = 0
    beta[:2] /= beta[:2].sum(1, keepdims=True)
    beta[2] = beta[3]

    def negative_entropy(p):
        return math.fsum(x * math.log(x) for x in p.tolist() if x > 0)

    for i, j in itertools.product(range(9), repeat=2):
        halves = (negative_entropy(beta[i]) + negative_entropy(beta[j])) / 2
        expected = max(halves - negative_entropy((beta[i] + beta[j]) / 2), 0) ** 0.5
        assert topic_map.jensen_shannon(beta)[i, j] == pytest.approx(expected, abs=1e-7)
    assert topic_map.jensen_shannon(beta)[0, 1] == pytest.approx(math.sqrt(math.log(2)))


def test_almost_equal_topics_have_the_distance_zero():
    """scipy returns NaN for a third of these pairs."""
    beta = np.random.default_rng(0).dirichlet(np.ones(30), 20)
    for row in beta:
        other = row * np.float32(1 + 1e-6)
        np.testing.assert_allclose(topic_map.jensen_shannon(np.stack([row, other / other.sum()])), 0, atol=1e-7)


@pytest.mark.parametrize("K", [1, 2, 3])
def test_scaling_is_exact_for_up_to_three_topics(K):
    distances = topic_map.jensen_shannon(np.random.default_rng(K).dirichlet(np.ones(20), K))
    points, explained = topic_map.classical_scaling(distances)
    np.testing.assert_allclose(squareform(pdist(points)), distances, atol=1e-9)
    assert explained == pytest.approx(1)


def test_scaling_is_exact_in_two_dimensions_and_a_projection_in_more():
    rng = np.random.default_rng(0)
    flat, solid = (squareform(pdist(rng.normal(size=(12, n)))) for n in (2, 5))
    points, explained = topic_map.classical_scaling(flat)
    np.testing.assert_allclose(squareform(pdist(points)), flat, atol=1e-9)
    assert explained == pytest.approx(1)
    points, explained = topic_map.classical_scaling(solid)
    # A projection increases no distance, and explains the fraction of squared distances that it preserves.
    projected = squareform(pdist(points))
    assert (projected <= solid + 1e-9).all()
    assert explained == pytest.approx((projected**2).sum() / (solid**2).sum())
    assert points.var(0)[0] > points.var(0)[1]


def test_merging_words_preserves_sums_and_increases_no_distance():
    model = make_model(V=2_000, K=10)
    exact = topic_map.merged_words(model.lam, np.full(10, 0.1), 2_000)
    np.testing.assert_allclose(exact, np.array(oracle(model)[0]), rtol=1e-6)
    merged = topic_map.merged_words(model.lam, np.full(10, 0.1), 300)
    assert merged.shape == (10, 300)
    np.testing.assert_allclose(merged.sum(1), 1)
    near, far = topic_map.jensen_shannon(merged), topic_map.jensen_shannon(exact)
    assert (near <= far + 1e-9).all()
    off = ~np.eye(10, dtype=bool)
    assert (near[off] / far[off]).min() > 0.9


def test_the_map_uses_merged_words_for_large_vocabularies(tmp_path, monkeypatch):
    model = make_model(V=2_000, K=10)
    exact = np.array([t["at"] for t in read(write_report(tmp_path / "a.html", model))["topics"]])
    monkeypatch.setattr(topic_map, "_MAX_DISTANCE_TERMS", 300 * 50)
    approximate = np.array([t["at"] for t in read(write_report(tmp_path / "b.html", model))["topics"]])
    assert (exact != approximate).any()
    np.testing.assert_allclose(pdist(approximate), pdist(exact), atol=0.05)


def test_the_block_size_does_not_change_the_report(tmp_path, monkeypatch):
    model = make_model()
    data = read(write_report(tmp_path / "a.html", model))
    monkeypatch.setattr(topic_blocks, "_BLOCK_SIZE", 450)
    blocks = read(write_report(tmp_path / "b.html", model))
    assert {**data, "topics": None} == {**blocks, "topics": None}
    for a, b in zip(data["topics"], blocks["topics"], strict=True):
        assert (a["words"], a["p"]) == (b["words"], b["p"])
        np.testing.assert_allclose(a["at"], b["at"], rtol=2e-3)


def test_typical_documents_have_the_largest_proportions():
    rng = np.random.default_rng(0)
    theta = rng.dirichlet(np.full(4, 0.3), 100).astype(np.float32)
    theta[10] = theta[11] = [0, 1, 0, 0]
    empty = set(np.argsort(-theta[:, 2])[:3].tolist())
    texts = ["" if d in empty else f" text {d}" for d in range(100)]
    found = typical_documents(theta, iter(texts), most=6)
    assert sorted(found) == [0, 1, 2, 3]
    for k, excerpts in found.items():
        best = sorted((d for d in range(100) if d not in empty), key=lambda d: (-theta[d, k], d))[:6]
        assert excerpts == [Excerpt(float(theta[d, k]), f"text {d}", f"document {d}") for d in best]
    names = [f"doi/{d}" if d % 2 else None for d in range(100)]
    for k, excerpts in typical_documents(theta, texts, iter(names), most=6).items():
        wanted = [(each.proportion, each.text, each.text.replace("text ", "")) for each in found[k]]
        wanted = [(p, text, f"doi/{d}" if int(d) % 2 else f"document {d}") for p, text, d in wanted]
        assert excerpts == [Excerpt(*each) for each in wanted]
    with pytest.raises(ValueError, match="shorter"):
        typical_documents(theta, texts, names[:-1])
    for wrong in (texts[:-1], [*texts, "more"]):
        with pytest.raises(ValueError, match=f"one text per row of theta: 100 rows, got {len(wrong)}"):
            typical_documents(theta, wrong)
    with pytest.raises(ValueError, match="documents × topics"):
        typical_documents(theta[0], texts)


def test_the_curve_contains_finite_scores_and_is_thinned(tmp_path):
    history = [{"step": t, "passes": t / 100, "score": -7 - 1 / (1 + t)} for t in range(5_000)]
    history[5:5] = [{"step": 5, "passes": 0.05, "score": None}, {"step": 6, "passes": 0.06}]
    history.append({"step": 5_000, "passes": 50.0, "score": math.nan})
    curve = read(write_report(tmp_path / "r.html", make_model(history=history)))["curve"]
    assert len(curve) == 400
    assert curve[0] == [0, -8, 0]
    assert curve[-1] == [49.99, pytest.approx(-7.0002, abs=1e-5), 4_999]
    assert read(write_report(tmp_path / "r.html", make_model(history=[])))["curve"] == []


def test_settings_are_formatted_as_text(tmp_path):
    settings = {"window": math.inf, "learn": True, "none": None, "nested": {"a": 1, "b": 0.25}, "device": object}
    model = make_model(K=40, alpha=np.linspace(0.1, 0.9, 40), eta=np.float32(0.05), settings=settings)
    shown = dict(read(write_report(tmp_path / "r.html", model))["settings"])
    assert shown["α"] == "40 numbers, 0.1 to 0.9"
    assert shown["η"] == "0.05"
    assert shown["documents"] == "1,234"
    assert (shown["window"], shown["learn"], shown["none"]) == ("∞", "yes", "–")
    assert shown["nested"] == "a = 1, b = 0.25"


# ---- the file ----


def test_hostile_words_are_not_parsed_as_markup(tmp_path):
    model = make_model(vocabulary=[*HOSTILE, *(f"word{i}" for i in range(len(HOSTILE), 200))])
    model = model._replace(settings={HOSTILE[0]: HOSTILE[1]})
    documents = {0: [(0.9, HOSTILE[0] * 3), Excerpt(0.8, HOSTILE[11], HOSTILE[2])]}
    path = write_report(tmp_path / "r.html", model, documents=documents, title=HOSTILE[0] + "{{data}}")
    page = path.read_text("utf-8")
    assert len(re.findall("<script", page, re.IGNORECASE)) == page.count("</script>") == 2
    assert "onerror" not in re.sub('id="data">.*?</script>', "", page, flags=re.DOTALL)
    assert "\u2028" not in page
    data = read(path)
    words = set(data["words"])
    for word in HOSTILE:
        assert word in words or word[:119] + "…" in words
    assert [HOSTILE[0], HOSTILE[1]] in data["settings"]
    assert data["documents"]["0"] == [[0.9, "", HOSTILE[0] * 3], [0.8, HOSTILE[2], HOSTILE[11]]]
    assert data["title"] == HOSTILE[0] + "{{data}}"


def test_the_page_sends_no_requests(tmp_path):
    page = write_report(tmp_path / "r.html", make_model()).read_text("utf-8")
    assert set(re.findall(r"\w+://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}  # a namespace, not an address
    assert not re.search(r"""\b(src|href|srcset|action)\s*=|@import|url\(|\bfetch\(|XMLHttpRequest|innerHTML""", page)
    policy = re.search('http-equiv="Content-Security-Policy" content="(.*?)"', page)[1]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        inside = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_equal_inputs_give_equal_bytes_and_no_temporary_files(tmp_path):
    first = write_report(tmp_path / "a.html", make_model(), documents={0: [(0.5, "text")]})
    second = write_report(str(tmp_path / "b.html"), make_model(), documents={0: [(0.5, "text")]})
    assert first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_a_failed_write_keeps_the_previous_report(tmp_path, monkeypatch):
    path = write_report(tmp_path / "r.html", make_model())
    before = path.read_bytes()

    def disk_full(self, contents):
        with self.open("wb") as file:
            file.write(contents[:1000])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "write_bytes", disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_report(path, make_model(seed=1))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_report_of_a_large_model_is_small(tmp_path):
    """K = 200 with five long documents per topic, thirty groups and another model takes less than 3 MB."""
    rng = np.random.default_rng(0)
    V, K = 14_000, 200
    lam = np.full((V, K), 0.1, np.float32)
    lam[rng.integers(0, V, 150_000) ** 2 // V, rng.integers(0, K, 150_000)] += rng.gamma(0.5, 50, 150_000)
    names = [f"{w:x}" * 2 for w in range(V)]
    model = make_model(lam=lam, vocabulary=names, quality=QUALITY._replace(npmi=rng.random(K)))
    documents = {k: [(0.5, "text ü " * 300, f"10.1000/{k}-{i}") for i in range(5)] for k in range(K)}
    groups, other = make_groups(K, [f"{1990 + i}" for i in range(30)]), compare_models(model, model, "other")
    path = write_report(tmp_path / "r.html", model, documents=documents, groups=groups, comparison=other)
    assert 2_000_000 < path.stat().st_size < 3_000_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lam": np.ones((3, 0))}, r"λ must be float32 or float64 of shape \[V, K\]"),
        ({"prevalence": np.zeros(5)}, "prevalence must not be negative, and not all 0"),
        ({"word_counts": np.zeros(200)}, "word_counts must not be negative, and not all 0"),
    ],
)
def test_parts_that_do_not_match_are_rejected(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        write_report(tmp_path / "r.html", make_model(**changes))
    assert not list(tmp_path.iterdir())


def test_wrong_documents_and_paths_are_rejected(tmp_path):
    with pytest.raises(ValueError, match="documents: expected topics from 0 to 4, got 5"):
        write_report(tmp_path / "r.html", make_model(), documents={5: []})
    with pytest.raises(ValueError, match="topic 1: expected a proportion between 0 and 1, got nan"):
        write_report(tmp_path / "r.html", make_model(), documents={1: [(math.nan, "text")]})
    with pytest.raises(ValueError, match=r"groups: expected prevalence of shape \(groups, 5\), got \(3, 4\)"):
        write_report(tmp_path / "r.html", make_model(), groups=make_groups(4))
    with pytest.raises(ValueError, match="groups: expected a prevalence and an interval between 0 and 1"):
        write_report(tmp_path / "r.html", make_model(), groups=make_groups(high=np.full((3, 5), math.nan)))
    with pytest.raises(FileNotFoundError, match="missing: expected a folder to write"):
        write_report(tmp_path / "missing" / "r.html", make_model())
    with pytest.raises(IsADirectoryError, match="expected a file to write, got a folder"):
        write_report(tmp_path, make_model())


# ---- the page in a browser ----


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Start one headless Chromium for all tests."""
    if importlib.util.find_spec("selenium") is None:
        pytest.skip("selenium is not installed")
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.skip("chromium or chromedriver is not installed")
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = programs[0]
    for flag in (
        *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
        *("disable-component-update", "disable-sync", "disable-dev-shm-usage"),
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=ChromeService(executable_path=programs[1]))
    yield driver
    driver.quit()


class Page:
    """A report that is open in the browser."""

    def __init__(self, browser, path, width=1400, height=900, address=""):
        self.browser = browser
        self.resize(width, height)
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get(path.as_uri() + address)

    def resize(self, width, height):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def run(self, program, *arguments):
        return self.browser.execute_script(program, *arguments)

    def find(self, selector):
        return self.browser.find_element("css selector", selector)

    def texts(self, selector):
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent.toWellFormed())", selector
        )

    def press(self, *keys):
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()

    def hover(self, element):
        from selenium.webdriver import ActionChains

        ActionChains(self.browser, duration=0).move_to_element(element).perform()

    def sort(self, order):
        self.find(f'#sort option[value="{order}"]').click()

    def sees(self, name):
        """Return whether an element is inside the window, at least in part."""
        box = self.run("return document.getElementById(arguments[0]).getBoundingClientRect().toJSON()", name)
        return box["top"] < self.run("return innerHeight") and box["bottom"] > 0

    @property
    def focus(self):
        """Return the id of the focused element, or its text."""
        return self.run("const e = document.activeElement; return e.id || e.textContent.slice(0, 40)")

    @property
    def topic(self):
        """Return the selected topic; assert that heading, list, map and URL show the same one."""
        number = int(self.find("#name").text.removeprefix("Topic "))
        assert self.texts('#topics [aria-selected="true"] .number') == [str(number)]
        assert self.texts("#map text.selected") == [str(number)]
        for listbox in ("multiples", "pairs"):
            items = self.run(f"return [...{listbox}].map((item) => item.getAttribute('aria-selected') === 'true')")
            assert items in ([], [k == number for k in range(len(items))])
        assert f"topic={number}" in self.run("return location.hash")
        return number

    def check(self):
        """Assert no console messages, requests, injected scripts, invalid numbers or horizontal overflow."""
        assert self.browser.get_log("browser") == []
        assert self.run("return performance.getEntriesByType('resource').length") == 0
        assert self.run("return window.ran") is None
        assert not self.run("return /NaN|undefined|Infinity/.test(document.querySelector('main').outerHTML)")
        assert self.run("return document.documentElement.scrollWidth <= innerWidth")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Return a model with hostile words among its top words, and its report."""
    vocabulary = [*HOSTILE, *(f"word{i}" for i in range(len(HOSTILE), 200))]
    documents = {k: [(0.9, HOSTILE[0] + " text" * 200, HOSTILE[2]), (0.5, "short")] for k in range(4)}
    model = make_model(vocabulary=vocabulary, quality=QUALITY, labels={0: HOSTILE[1]})
    groups = make_groups(values=[HOSTILE[0], HOSTILE[1], HOSTILE[7]], field=HOSTILE[1])
    other = compare_models(model, make_model(K=4, seed=1, vocabulary=vocabulary, labels={0: HOSTILE[1]}), HOSTILE[0])
    path = tmp_path_factory.mktemp("report") / "r.html"
    options = {"documents": documents, "groups": groups, "comparison": other, "title": HOSTILE[1]}
    return model, write_report(path, model, **options)


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """Return a model with groups over time, labels, typical documents and another model, and its report."""
    model = make_model(quality=QUALITY, labels={2: "galaxies"})
    documents = {
        k: [(0.9 - i / 10, f"Text {i} of topic {k}." + " Some words." * 99, f"id-{k}-{i}") for i in range(3)]
        for k in range(5)
    }
    groups = make_groups(values=[str(year) for year in range(2001, 2021)])
    other = compare_models(model, make_model(K=4, seed=1), "other")
    path = tmp_path_factory.mktemp("complete") / "r.html"
    return model, write_report(path, model, documents=documents, groups=groups, comparison=other)


def test_topics_are_selected_by_click_and_by_key(browser, hostile):
    model, path = hostile
    page = Page(browser, path)
    prevalence = model.lam.sum(0)
    order = np.argsort(-prevalence).tolist()
    assert page.find("#title").text == HOSTILE[1]
    assert page.texts("#topics .number") == [str(k) for k in order]
    assert page.topic == order[0]

    page.find(f"#topic-{order[3]}").click()
    assert page.topic == order[3]
    page.press("k")
    assert page.topic == order[2]
    page.press("j", "j")
    assert page.topic == order[4]
    page.find("#previous").click()
    assert page.topic == order[3]
    page.run("document.getElementById(`topic-${arguments[0]}`).focus()", order[3])
    page.press("\ue013")  # up
    assert page.topic == order[2]
    assert page.run("return document.activeElement.id") == f"topic-{order[2]}"
    page.press("\ue010")  # end
    assert page.topic == order[4]
    page.sort("number")
    assert page.texts("#topics .number") == ["0", "1", "2", "3", "4"]
    circle = page.run(
        "return document.querySelectorAll('#map circle')[arguments[0]]",
        order.index(0),  # the largest circles are drawn first
    )
    page.hover(circle)
    assert page.find("#note").text.startswith(f"Topic 0: {HOSTILE[1]} · ")
    circle.click()
    assert page.topic == 0
    page.check()


def test_the_list_shows_and_sorts_by_coherence(browser, hostile, tmp_path):
    page = Page(browser, hostile[1], address="#topic=1")
    assert page.find("#prevalence").text.endswith("of the corpus · NPMI −0.25 · junk: incoherent")
    page.sort("npmi")
    assert page.texts("#topics .number") == ["2", "4", "0", "3", "1"]
    page.sort("npmi-lowest")
    assert page.texts("#topics .number") == ["1", "3", "0", "4", "2"]
    page.sort("remarks")
    assert set(page.texts("#topics .number")[:3]) == {"0", "1", "3"}
    page.sort("npmi")
    assert page.texts("#topics .npmi") == ["0.30", "0.20", "0.10", "0.05", "−0.25"]
    assert page.texts("#topics .remarked .number") == ["0", "3", "1"]
    assert page.texts("#topics .remark") == ["near-duplicate of 3", "near-duplicate of 0", "junk: incoherent"]
    assert page.texts("#quality dd")[0] == "0.080"
    page.run("location.hash = '#topic=3'")
    page.run("dispatchEvent(new HashChangeEvent('hashchange'))")
    page.find("#prevalence button").click()  # the near-duplicate
    assert page.topic == 0
    page.check()
    page = Page(browser, write_report(tmp_path / "r.html", make_model()))
    assert page.texts("#topics .npmi") == []
    assert page.texts("#sort option") == ["Prevalence", "Number", "Match of the search"]
    assert page.texts("#quality dt") == ["effective topics"]
    page.check()


def test_the_slider_sorts_words_by_relevance(browser, hostile):
    model, path = hostile
    page = Page(browser, path, address="#topic=2")
    p = model.lam[:, 2] / model.lam[:, 2].sum(dtype=np.float64)
    marginal = model.lam.sum(1, dtype=np.float64) / model.lam.sum(dtype=np.float64)

    # The page truncates words and shows a lone surrogate as the replacement character.
    names = [report_content.truncated(word, 120).replace("\udc80", "\ufffd") for word in model.vocabulary]

    def assert_sorted(shown, mu):
        """Assert that word i is the i-th most relevant word, up to rounding to four digits."""
        score = mu * np.log(p) + (1 - mu) * np.log(p / marginal)
        assert len(set(shown)) == len(shown)
        np.testing.assert_allclose(score[[names.index(word) for word in shown]], -np.sort(-score)[:30], atol=2e-3)

    assert_sorted(page.texts("#words button"), 0.6)
    page.find("#by-lift").click()
    assert_sorted(page.texts("#words button"), 0)
    page.find("#by-probability").click()
    assert_sorted(page.texts("#words button"), 1)
    page.find("#mu").send_keys("\ue012" * 5)  # left
    assert_sorted(page.texts("#words button"), 0.75)
    assert page.find("#formula").text == "Relevance μ = 0.75: between probability and lift"
    assert page.topic == 2
    assert "relevance=0.75" in page.run("return location.hash")
    page.find("#more").click()
    assert len(page.texts("#words button")) == 60
    # The bar of the topic is p(k|w) times the bar of the corpus.
    prevalence = model.lam[:, 2].sum(dtype=np.float64) / model.lam.sum(dtype=np.float64)
    posterior = prevalence * p / marginal
    bars = page.run(
        "return [...document.querySelectorAll('#words li[data-word]')].map((line) => "
        "[line.querySelector('button').textContent.toWellFormed(), parseFloat(line.querySelector('.own').style.width), "
        "parseFloat(line.querySelector('.all').style.width), line.querySelector('.beyond') === null])"
    )
    for word, own, corpus, complete in bars:
        if complete:
            assert own / corpus == pytest.approx(posterior[names.index(word)], rel=5e-3)
    page.check()


def test_a_search_sorts_topics_by_the_word(browser, hostile):
    model, path = hostile
    page = Page(browser, path)
    word = "word50"
    posterior = (model.lam[50] / model.lam[50].sum()).tolist()  # p(k|w) ∝ λ_wk, because the prevalence is from λ
    order = sorted((k for k in range(5) if posterior[k] >= 0.005), key=lambda k: -posterior[k])
    page.press("/", word)
    assert page.texts("#topics .number")[: len(order)] == [str(k) for k in order]
    assert page.find("#note").text.startswith(f"{word} occurs in topic {order[0]} (")
    assert "word" in page.find("#map").get_attribute("class")
    page.press("\ue007")  # enter
    assert page.topic == order[0]
    assert "word=word50" in page.run("return location.hash")
    page.press("\ue00c")  # escape
    assert page.find("#search").get_attribute("value") == ""
    assert page.texts("#topics .number") == [str(k) for k in np.argsort(-model.lam.sum(0))]
    page.press("/", "nothing like this")
    assert "Not among the top words of any topic" in page.find("#found").text
    page.press("\ue00c")

    # Hovering over a word shows its topics in the map; a click selects the word.
    line = page.find("#words li:nth-child(4)")
    page.hover(line)
    assert page.texts("#words .highlighted button") == page.texts("#words li:nth-child(4) button")
    assert "word" in page.find("#map").get_attribute("class")
    page.hover(page.find("#title"))
    assert page.texts("#words .highlighted button") == []
    page.find("#words li:nth-child(4) button").click()
    assert page.run("return document.getElementById('sort').value") == "match"
    page.check()


def test_the_url_contains_the_selection(browser, hostile):
    _, path = hostile
    page = Page(browser, path, address="#topic=3&relevance=0.25&word=word50")
    assert page.topic == 3
    assert page.run("return mu.valueAsNumber") == 0.25
    assert page.find("#search").get_attribute("value") == "word50"
    page.run("location.hash = '#topic=1'")
    page.run("dispatchEvent(new HashChangeEvent('hashchange'))")
    assert page.topic == 1
    assert page.find("#search").get_attribute("value") == ""
    for wrong in ("#topic=99&relevance=7&word=none", "#topic=x", "#" + "%" * 9):
        page.run("location.hash = arguments[0]; dispatchEvent(new HashChangeEvent('hashchange'))", wrong)
        assert 0 <= page.topic < 5
    page.check()


def test_colours_have_enough_contrast_in_both_themes(browser, hostile):
    page = Page(browser, hostile[1])
    text = [
        *(("ink", background) for background in ("paper", "panel", "accent-soft", "word-soft")),
        *(("muted", background) for background in ("paper", "panel", "accent-soft", "word-soft")),
        *(
            ("accent", "panel"),
            ("accent", "accent-soft"),
            ("word", "panel"),
            ("word", "word-soft"),
            ("panel", "accent"),
        ),
    ]

    def luminance(name):
        colour = page.run("title.style.color = `var(--${arguments[0]})`; return getComputedStyle(title).color", name)
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        return np.dot(
            [0.2126, 0.7152, 0.0722], [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        )

    def contrast(one, other):
        low, high = sorted([luminance(one), luminance(other)])
        return (high + 0.05) / (low + 0.05)

    backgrounds = []
    for _ in range(2):
        for one, other in text:
            assert contrast(one, other) >= 4.5, (one, other)
        assert contrast("edge", "panel") >= 3
        backgrounds.append(luminance("paper"))
        page.find("#theme").click()
    assert min(backgrounds) < 0.02 < 0.8 < max(backgrounds)
    assert luminance("paper") == backgrounds[0]
    page.check()


def test_labels_are_edited_and_downloaded(browser, complete, tmp_path):
    _, path = complete
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page = Page(browser, path, address="#topic=2")
    field = page.find("#label")
    assert field.get_attribute("value") == "galaxies"
    assert field.get_attribute("aria-label") == "Label of topic 2"
    assert not page.find("#label-note").is_displayed()
    page.find("#topic-3").click()
    field.send_keys("  dark matter ", "\ue007")  # enter
    assert page.texts("#topic-3 .label") == ["dark matter"]
    assert page.find("#label-note").text.startswith("2 labels, edited in this page only.")
    assert "Topic 3: dark matter" in page.texts("#pairs li > span:first-child .label")
    assert any(text == "3 dark matter" for text in page.texts("#multiples .caption"))
    field.send_keys(" forgotten", "\ue00c")  # escape
    assert field.get_attribute("value") == "dark matter"
    page.run("setLabel(0, 'a\\tb\\u202e\\n')")  # pasted
    assert page.texts("#topic-0 .label") == ["a b"]
    page.find("#topic-4").click()
    field.send_keys("x" * 200, "\ue004")  # tab
    assert page.focus == "download"
    page.press("\ue00d")  # space
    assert not page.find("#label-note").is_displayed()
    deadline = time.monotonic() + 20
    while not (tmp_path / "labels.tsv").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    # The command reads what the page writes.
    assert read_labels(tmp_path / "labels.tsv", 5) == {0: "a b", 2: "galaxies", 3: "dark matter", 4: "x" * 80}
    page.find("#topic-2").click()
    field.clear()
    field.send_keys("\ue007")
    assert page.texts("#topic-2 .label") == [""]
    page.find("#download").click()
    page.check()


def test_a_search_finds_labels_and_documents(browser, complete):
    page = Page(browser, complete[1])
    page.press("/", "id-3-1")
    assert page.texts("#results button") == ["id-3-1 in topic 3"]
    assert page.find("#found").text == "Not among the top words of any topic: id-3-1; in 1 typical document"
    page.press("\ue007")  # enter
    assert page.topic == 3
    assert page.run("return document.activeElement.querySelector('strong').textContent") == "id-3-1"
    assert page.texts("#documents mark") == ["id-3-1"]
    assert page.run("return document.activeElement.querySelector('.clamped')") is None  # complete text
    page.press("\ue00c")
    assert page.texts("#results button, #documents mark") == []
    page.press("/", "GALAX")
    assert page.texts("#results button") == ["Topic 2: galaxies"]
    page.find("#results button").click()
    assert page.topic == 2
    page.press("\ue00c", "/", "of topic")
    assert len(page.texts("#results button")) == 4
    assert page.find("#found").text.endswith("in 15 typical documents, the first 4 matches are listed")
    page.press("\ue00c", "/", "(text*[")  # no regular expression
    assert page.texts("#results button") == []
    page.check()


def test_groups_show_means_and_intervals(browser, hostile, complete):
    _, path = complete
    groups = make_groups(values=[str(year) for year in range(2001, 2021)])
    page = Page(browser, path, address="#topic=1")
    assert page.texts("#by-group-title") == ["Prevalence by year"]
    assert page.find("#time-chart").is_displayed()
    assert page.find("#time-reading").text.startswith("2020: ")
    assert page.texts("#group-rows li") == []
    page.find("#all-groups").click()
    assert page.texts("#group-rows .value") == groups.values
    assert page.texts("#group-rows .docs") == [str(number) for number in groups.num_docs]
    for text, mean, low, high in zip(
        page.texts("#group-rows .share"), groups.prevalence[:, 1], groups.low[:, 1], groups.high[:, 1], strict=True
    ):
        shown = [float(each) / 100 for each in re.findall(r"([\d.]+)%", text)]
        np.testing.assert_allclose(shown, [mean, low, high], rtol=0.06)
    # The line of the overview is the mean, on the scale that is printed below.
    end = float(page.texts("#multiples .quiet")[page.texts("#topics .number").index("1")].split()[-1][:-1]) / 100
    path_of_topic = page.run("return multiples[1].querySelector('.line').getAttribute('d')")
    y = np.array([float(each.split()[1]) for each in path_of_topic[1:].split("L")])
    np.testing.assert_allclose((61 - y) / 56 * end, groups.prevalence[:, 1], rtol=0.02, atol=0.02)
    page.find("#same-scale").click()
    assert len(set(page.texts("#multiples .quiet"))) == 1
    page.run("multiples[3].click()")
    assert page.topic == 3
    page.check()

    page = Page(browser, hostile[1], address="#topic=1")
    groups = make_groups(values=[HOSTILE[0], HOSTILE[1], HOSTILE[7]])
    means = groups.prevalence[:, 1]
    names = [HOSTILE[0], HOSTILE[1], HOSTILE[7]]
    assert page.texts("#group-rows .value") == [names[g] for g in np.argsort(-means)]
    widths = page.run("return [...document.querySelectorAll('#group-rows .own')].map((e) => parseFloat(e.style.width))")
    np.testing.assert_allclose(np.array(widths) / widths[0], np.sort(means)[::-1] / means.max(), rtol=0.01)
    # The dashed line is the mean over the documents of all groups: it is never below or above every group.
    overall = np.average(means, weights=groups.num_docs)
    dashed = page.run("return parseFloat(document.querySelector('#group-rows .corpus').style.left)")
    np.testing.assert_allclose(dashed / widths[0], overall / means.max(), rtol=0.01)
    assert not page.find("#time-chart").is_displayed()
    page.check()


def test_two_models_are_shown_side_by_side(browser, complete):
    model, path = complete
    other = make_model(K=4, seed=1)
    match = compare_models(model, other, "other").match
    page = Page(browser, path, address="#topic=0")
    page.sort("similarity")
    order = np.argsort(match.similarity, kind="stable").tolist()
    assert page.texts("#topics .number") == [str(k) for k in order]
    alone = match.partner.tolist().index(-1)
    assert order[0] == alone
    pairs = page.texts("#pairs li > span:last-child")
    assert pairs[0] == "no matched topic"
    assert [text.startswith(f"Topic {match.partner[k]}") for k, text in zip(order, pairs, strict=True)][1:] == [
        True
    ] * 4
    assert page.texts("#both tr:last-child td") == ["−7.525", "−7.525"]
    k = order[-1]
    page.run("pairs[arguments[0]].click()", k)
    assert page.topic == k
    assert page.find("#match-facts").text.startswith(
        f"Topic {match.partner[k]} · similarity {match.similarity[k]:.2f} · "
    )
    here, there = (
        {word for word, _ in each.top_words(20)[number]} for each, number in ((model, k), (other, match.partner[k]))
    )
    both, only_here, only_there = (
        {*text.split()} if text != "none" else set() for text in page.texts("#match-words dd")
    )
    assert (both, only_here, only_there) == (here & there, here - there, there - here)
    page.run("pairs[arguments[0]].click()", alone)
    assert page.find("#match-facts").text == "No topic is matched: the other model has fewer topics."
    page.check()


def test_the_page_is_used_with_the_keyboard_only(browser, complete):
    page = Page(browser, complete[1], address="#topic=2")
    reached = []
    for _ in range(120):
        page.press("\ue004")  # tab
        if page.run("return document.activeElement === document.body"):
            break
        reached.append(page.focus)
        assert page.run("return getComputedStyle(document.activeElement).outlineStyle") != "none", page.focus
    # Each list is reached once, at the selected topic, in the order of the page.
    stops = ["theme", "search", "sort", "topic-2", "next", "label", "download", "by-lift", "mu"]
    assert [each for each in reached if each in stops] == stops
    expected = ["all-groups", "same-scale", "2 galaxies"]
    found = [next(i for i, each in enumerate(reached) if each.startswith(name)) for name in expected]
    assert found == sorted(found)
    assert sum(each.startswith("topic-") for each in reached) == 1
    assert len(reached) < 80

    page.find("#sort").send_keys("N", "\ue007")  # Number, enter
    assert page.texts("#topics .number") == ["0", "1", "2", "3", "4"]
    page.run("document.querySelector('#multiples [aria-selected=true]').focus()")
    page.press("\ue015")  # down
    assert page.topic == 3
    assert page.focus.startswith("3 ")
    page.press("\ue010")  # end
    assert page.topic == 4
    page.press("\ue007")  # enter
    assert page.sees("by-group")
    page.run("document.querySelector('#pairs [aria-selected=true]').focus()")
    page.press("\ue011")  # home
    assert page.topic == 0
    page.press("\ue00d")  # space
    assert page.sees("compared")
    page.find("#panels button:nth-child(3)").send_keys("\ue007")
    assert page.focus == "comparison"
    page.press("/", "word50", "\ue00c")  # escape
    assert page.find("#search").get_attribute("value") == ""
    page.check()


def test_the_policy_blocks_other_scripts(browser, hostile):
    page = Page(browser, hostile[1])
    page.run(
        "const script = document.createElement('script'); script.textContent = 'window.ran = 1';"
        "document.body.append(script);"
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.ran=1>')"
    )
    assert page.run("return window.ran") is None
    messages = browser.get_log("browser")
    assert len(messages) >= 2
    assert all("Content Security Policy" in entry["message"] for entry in messages)


@pytest.mark.parametrize("width", [360, 400, 800, 1400])
@pytest.mark.parametrize("which", ["hostile", "complete"])
def test_long_words_and_texts_do_not_overflow_the_screen(browser, request, which, width):
    page = Page(browser, request.getfixturevalue(which)[1], width=width, height=700)
    page.check()
    overflowing = page.run(
        "return [...document.querySelectorAll('main *')].filter((e) => !e.closest('.hide, #topics, #multiples') && "
        "e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80).toWellFormed())"
    )
    assert overflowing == []
    button = page.find("#documents button")
    page.run("arguments[0].click()", button)
    assert button.text == "Less"


@pytest.mark.parametrize(
    ("V", "K", "changes"),
    [
        (50, 1, {}),
        (3, 2, {"vocabulary": None, "history": [], "settings": {}}),
        (1, 1, {"history": [{"passes": 1, "score": -2.0}]}),
        (600, 500, {"word_counts": np.arange(600)}),
        (40, 2, {"prevalence": np.array([0.0, 1.0])}),
    ],
    ids=["one topic", "two topics of three words", "one word", "500 topics", "a topic with prevalence 0"],
)
def test_models_of_extreme_sizes_are_shown(browser, tmp_path, V, K, changes):
    model = make_model(V, K, **changes)
    page = Page(browser, write_report(tmp_path / "r.html", model), width=360)
    assert len(page.texts("#topics li")) == K
    assert len(page.texts("#words button")) == min(V, 30)
    assert page.find("#held-out").is_displayed() == bool(model.history)
    prevalence = model.lam.sum(0) if model.prevalence is None else model.prevalence
    order = np.argsort(-prevalence, kind="stable").tolist()
    for k in order[:3]:
        assert page.topic == k
        assert page.texts("#words .bar .all:not(.beyond)"), "all bars exceed the scale"
        page.check()
        page.press("j")
    # The areas are the prevalences; the largest circles are drawn first.
    radii = page.run("return [...document.querySelectorAll('#map circle')].map((c) => c.r.baseVal.value)")
    areas = np.square(radii)
    np.testing.assert_allclose(areas / areas.sum(), prevalence[order] / prevalence.sum(), rtol=0.01, atol=3e-4)
    page.resize(1400, 700)
    assert page.run("return sort.clientHeight") > 20
    assert page.run("return list.clientHeight") < 700
    page.check()
