"""The studies of the paper: settings, results on disk, verdicts; one small run through it all."""

import json
import math
import re
from pathlib import Path

import anatomy
import averaged
import beyond
import bias_variance
import heldout
import mechanism
import numpy as np
import pytest
import scipy.sparse
import study
from study import Data, Results, Setting

from smoothgrad_jax import Corpus

FOLDER = Path(__file__).parents[1] / "experiments"
STUDIES = {each.STUDY.name: each.STUDY for each in (beyond, heldout, mechanism)}


def documents(num_docs, num_words=30):
    rng = np.random.default_rng(0)
    return scipy.sparse.csr_array(rng.poisson(0.3, (num_docs, num_words)))


@pytest.fixture(scope="module")
def data():
    X = documents(260)
    return Data("tiny", Corpus.of(X[:200]), (X[200:], X[200:]))


def a_run(setting, score):
    return {"setting": study._plain(setting), "curve": [{"step": 10, "score": score, "topics": 3.0, "window": 4}]}


def test_results_are_there_again(tmp_path):
    results = Results(tmp_path / "new" / "study.json")
    results.facts = {"corpus": {"name": "generated", "documents": 100}}
    settings = [Setting(window=math.inf), Setting(rho=(64.0, 0.7)), Setting(seed=1), Setting(window=3, seed=2)]
    for i, setting in enumerate(settings):
        results.add(a_run(setting, -float(i)))
    again = Results(results.path)
    assert again.facts == results.facts
    for i, setting in enumerate(settings):
        assert again.find(setting)["curve"][0]["score"] == -i
    assert again.find(Setting(window=4)) is None
    assert again.find(Setting(eta=0.1)) is None
    passes, scores = again.curve(Setting(seed=1, batch_size=300))
    np.testing.assert_array_equal(passes, [30.0])
    np.testing.assert_array_equal(scores, [-2.0])
    assert len(results.path.read_text().splitlines()) >= len(settings)  # a run a line: a change is one line of a diff


def test_settings_that_differ_are_kept_apart():
    """What JSON keeps of a setting is all of it."""
    kept = [json.dumps(study._plain(s), sort_keys=True) for each in STUDIES.values() for s in dict.fromkeys(each.small)]
    per_study = [len(dict.fromkeys(each.small)) for each in STUDIES.values()]
    start = 0
    for number in per_study:
        assert len(set(kept[start : start + number])) == number
        start += number


def test_a_run_goes_on_where_it_was_stopped(data, tmp_path):
    setting = Setting(window=3, batch_size=20, topics=4, passes=4.0, scores=4, rho=0.1)
    whole = study.train(data, setting)
    assert [point["step"] for point in whole["curve"]] == [10, 20, 30, 40]
    stops = iter([False, True])
    with pytest.raises(KeyboardInterrupt):
        study.train(data, setting, tmp_path / "run", lambda: next(stops, True))
    assert (tmp_path / "run").exists()
    resumed = study.train(data, setting, tmp_path / "run")
    assert resumed["curve"] == whole["curve"]
    assert not (tmp_path / "run").exists()


CHANGES = (
    {"kind": "first", "switch": 5},
    {"kind": "later", "switch": 5},
    {"kind": "phase out"},
    {"kind": "exponential"},
    {"kind": "adaptive", "window": 4},
    {"start": "seeds"},
    {"start": "wide"},
    {"start": "trained"},
    {"jitter": 0.1},
    {"warmup": "zeros"},
    {"window": math.inf},
    {"slots": "bfloat16"},
    {"frequent": 10},
)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_kind_of_run(data, change):
    setting = Setting(window=3, batch_size=20, topics=4, passes=2.0, scores=2, rho=0.1)._replace(**change)
    run = study.train(data, setting)
    assert run["setting"] == study._plain(setting)
    assert all(math.isfinite(point["score"]) for point in run["curve"])


def test_windows_only_at_first_or_later():
    first = study._window(Setting(window=10, kind="first", switch=5), 100)["window"]
    later = study._window(Setting(window=10, kind="later", switch=5), 100)["window"]
    assert [int(first(t)) for t in (0, 4, 5, 9)] == [10, 10, 1, 1]
    assert [int(later(t)) for t in (0, 4, 5, 9)] == [1, 1, 10, 10]


def test_only_the_words_of_most_documents():
    X = scipy.sparse.csr_array([[9, 1, 0, 2], [0, 3, 1, 4], [0, 5, 1, 6], [0, 0, 0, 7]])
    few = Data("tiny", Corpus.of(X), (X[:2], X[2:])).of_frequent_words(2)
    corpus = scipy.sparse.csr_array((few.corpus.data, few.corpus.indices, few.corpus.indptr), few.corpus.shape)
    np.testing.assert_array_equal(corpus.toarray(), [[1, 2], [3, 4], [5, 6], [0, 7]])
    np.testing.assert_array_equal(few.halves[0].toarray(), [[1, 2], [3, 4]])
    np.testing.assert_array_equal(few.halves[1].toarray(), [[5, 6], [0, 7]])


def test_the_linear_analysis_agrees_with_an_impulse_response():
    rho, L = 0.01, 100
    box = np.full(L, 1 / L)
    decay = rho * (1 - rho) ** np.arange(5_000)
    ratio = (np.convolve(box, decay) ** 2).sum() / (decay**2).sum()
    assert mechanism.variance_ratio(rho * L) == pytest.approx(ratio, rel=2e-2)


def filled(study, scores):
    """Results in which every setting has its score."""
    results = Results(Path("nowhere"))
    results.facts = {"corpus": {"name": "generated", "documents": 100, "words": 10}}
    results.runs = [a_run(setting, scores(setting)) for setting in dict.fromkeys(study.small)]
    return results


def test_gains_are_over_the_same_seed():
    results = filled(mechanism.STUDY, lambda s: -s.seed - 5 + 0.25 * (s.window == 10))
    gains = mechanism.gains(results)
    np.testing.assert_allclose(gains["L = 10"], 0.25)
    np.testing.assert_allclose(gains["L = 100"], 0)
    assert len(gains["L = 10"]) == len(mechanism.SMALL_SEEDS)


def test_scores_of_few_words_are_not_compared_with_others():
    results = filled(mechanism.STUDY, lambda s: -5.0 - 0.1 * (s.window == 10))
    for run in results.runs:
        run["curve"][-1]["topics"] = -run["curve"][-1]["score"] if "frequent" in run["setting"] else 5.0
    assert {run["curve"][-1]["topics"] for run in mechanism.of_all_words(results)} == {5.0}
    assert len(mechanism.of_all_words(results)) == len(results.runs) - 2 * len(mechanism.SMALL_SEEDS)


@pytest.mark.slow
def test_the_parts_of_a_step_are_timed(monkeypatch):
    monkeypatch.setattr(anatomy, "TOPICS", 4)
    monkeypatch.setattr(anatomy, "BATCH", 20)
    monkeypatch.setattr(anatomy, "WINDOW", 2)
    monkeypatch.setattr(anatomy, "STEPS", 3)
    times, facts = anatomy.measure(Corpus.of(documents(200)), 0.5, 0.5)
    assert {len(each) for each in times.values()} <= {2, 3}
    assert all(second > 0 for each in times.values() for second in each)
    assert 0 < facts["words per minibatch"] <= 30


def test_held_out_verdict_counts_seeds():
    results = filled(heldout.STUDY, lambda s: -5.0 + 0.125 * (s.window == 10) - 0.25 * (s.window == 10 and s.seed == 1))
    lines = [line for line in heldout.verdict(results) if line.startswith("L = 10 against")]
    assert lines == ["L = 10 against L = 1, same seed: 2 of 3 better, gains +0.1250, -0.1250, +0.1250"]


@pytest.mark.parametrize(("score", "word"), [(-4.9, "within"), (-5.2, "outside")])
def test_adaptive_is_judged_by_the_best_fixed_window(score, word):
    def scores(setting):
        if setting.kind == "adaptive":
            return score
        return -5.0 - 0.1 * setting.seed if setting.window == 100 and setting.kind == "mean" else -6.0

    lines = [line for line in beyond.verdict(filled(beyond.STUDY, scores)) if "hindsight" in line]
    assert len(lines) == 3
    assert all("(L = 100)" in line and word in line for line in lines)


@pytest.mark.parametrize("path", sorted((FOLDER / "results").glob("*.json")), ids=lambda path: path.stem)
def test_published_results_have_their_verdict(path):
    results = Results(path)
    name = next(each for each in (*STUDIES, "averaged", "bias_variance") if path.stem.startswith(each + "_"))
    if name == "bias_variance":
        warmups = results.facts["verdicts"]
        assert set(warmups) == {"mean", "zeros"}
        assert all(bias_variance.lines(warmup, body) for warmup, body in warmups.items())
        assert all(path.with_name(f"{path.stem}_{warmup}.png").exists() for warmup in warmups)
        return
    verdict = averaged.verdict if name == "averaged" else STUDIES[name].verdict
    assert verdict(results)
    assert path.with_suffix(".png").exists()


def test_every_study_is_in_the_list():
    text = (FOLDER / "README.md").read_text()
    assert all(f"`{path.name}`" in text for path in FOLDER.glob("*.py"))
    named = set(re.findall(r"results/(\w+\.png)", text))
    assert named == {path.name for path in (FOLDER / "results").glob("*.png")}


def test_verdicts_of_planted_curves():
    lengths, steps = (1, 3, 10, 30), np.arange(1, 201)
    rng = np.random.default_rng(0)
    noise = rng.uniform(0.9, 1.1, 200)
    variance = noise / np.array(lengths)[:, None]
    slope = bias_variance.variance_slope(variance, lengths, after=30)
    assert slope["median"] == pytest.approx(-1)
    assert bias_variance.variance_slope(variance**0.5, lengths, after=30)["median"] == pytest.approx(-0.5)

    found = bias_variance.decomposition(np.full(9, 2.0), np.full(9, 3.0), np.full(9, 4.0))
    assert found["ratio"] == pytest.approx(0.8)
    assert found["cross_mean"] == pytest.approx(-0.25)

    corner = np.exp(-0.3 * np.maximum(steps - 50, 0)) * steps**-0.5
    assert bias_variance.kink(corner, 50)["times"] > 100
    assert bias_variance.kink(steps**-0.5, 50)["times"] < 2
    assert bias_variance.kink(corner, 199) is None

    errors = np.stack([np.full(200, 5.0), np.where(steps <= 60, 9.0, 1.0)])
    assert bias_variance.best_lengths(errors, (1, 10)) == [
        {"length": 1, "from": 1, "to": 60},
        {"length": 10, "from": 61, "to": 200},
    ]
    rise = bias_variance.late_rise(np.where(steps < 100, 1.0, 3.0), 30)
    assert rise["ratio"] == pytest.approx(3)
    assert bias_variance.late_rise(np.ones(30), 30) is None


def test_where_averaged_gradients_go_wrong():
    runs = [{"setting": {"search": x, "window": 10}, "most_negative": int(x > 1)} for x in (2.0, 0.5, 1.0, 4.0)]
    assert averaged.safe_product(runs) == (1.0, 2.0)
    assert averaged.safe_product(runs[1:3]) == (1.0, None)

    def last(seed, score):
        return {"setting": {"seed": seed}, "scores": [0.0, score]}

    gains = averaged.score_gains([last(0, -1.0), last(1, None), last(2, -3.0)], [last(0, -1.5), last(1, -1.0)])
    assert gains == [0.5]


def test_where_theory_says_that_averaged_gradients_overshoot_and_grow():
    """An entry without statistics, in discrete time: below η from 0.648 on, and a growing oscillation from 4.93 on."""

    def path(product, L=100):
        rho, x = product / L, [1.0] * L
        for _ in range(60 * L):
            x.append(x[-1] - rho * np.mean(x[-L:]))
        return np.array(x)

    assert path(0.9 * averaged.OVERSHOOT)[: 30 * 100].min() > 0
    assert path(1.2 * averaged.OVERSHOOT).min() < 0
    for factor, grows in ((0.9, False), (1.1, True)):
        x = np.abs(path(factor * averaged.UNSTABLE))
        assert (x[-1_000:].max() > x[1_000:2_000].max()) == grows


def test_bad_corpora_are_one_line(tmp_path):
    (tmp_path / "bow.npz").write_bytes(b"nothing")
    with pytest.raises(SystemExit, match="expected a matrix documents × words"):
        study.load(tmp_path, 10)
    scipy.sparse.save_npz(tmp_path / "bow.npz", documents(5).tocsr())
    with pytest.raises(SystemExit, match="5 documents are too few to hold out 10"):
        study.load(tmp_path, 10)
    with pytest.raises(SystemExit, match="no such file"):
        study.load(tmp_path / "nothing.npz", 10)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="neither bow"):
        study.load(tmp_path / "empty", 10)


def test_corpora_are_not_mixed(tmp_path, data):
    assert study.corpus_name(Path("x/arxiv/bow.npz")) == study.corpus_name(Path("x/arxiv")) == "arxiv"
    assert study.corpus_name(Path("x/arxiv.npz")) == "arxiv"
    results = Results(tmp_path / "study.json")
    study.check_corpus(results, data.facts())
    results.facts["corpus"] = data.facts()
    study.check_corpus(results, data.facts())
    X = documents(200)
    X.data[0] += 1
    other = data._replace(corpus=Corpus.of(X))
    with pytest.raises(SystemExit, match="another corpus with this name"):
        study.check_corpus(results, other.facts())
