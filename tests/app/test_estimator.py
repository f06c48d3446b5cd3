"""SmoothedLDA: scikit-learn's own checks, planted topics, and what its docstring promises."""

import json
import pickle
import sys
import types

import joblib
import numpy as np
import pytest
import scipy.sparse
from sklearn.base import clone
from sklearn.decomposition import LatentDirichletAllocation
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

from smoothgrad_jax import (
    LDA,
    Adaptive,
    Corpus,
    SmoothedLDA,
    elbo,
    load_model,
    pack,
    phase_out,
    save_model,
    topic_quality,
    write_report,
)
from smoothgrad_jax.app.runs import PriorLearner
from smoothgrad_jax.app.settings import Settings
from smoothgrad_jax.models.lda import inference
from smoothgrad_jax.models.lda.execution import Batched
from smoothgrad_jax.models.lda.methods import Collapsed, Mean, Sampled
from smoothgrad_jax.models.lda.priors import fit_symmetric, mean_log
from smoothgrad_jax.training import driver as training

K, WORDS = 4, 10  # every planted topic has ten words of its own


@pytest.mark.slow
@parametrize_with_checks([SmoothedLDA(n_components=2, max_iter=2)])
def test_scikit_learn_checks(estimator, check):
    check(estimator)


def planted(num_docs, seed=0, alpha=0.1):
    rng = np.random.default_rng(seed)
    beta = np.kron(np.eye(K), np.full(WORDS, 1 / WORDS))
    theta = rng.dirichlet(np.full(K, alpha), num_docs)
    return scipy.sparse.csr_array(np.stack([rng.multinomial(40, p) for p in theta @ beta])), theta


@pytest.fixture(name="X", scope="module")
def some_documents():
    return planted(400)[0]


@pytest.fixture(scope="module")
def fitted(X):
    return SmoothedLDA(K, random_state=0).fit(X)


def purity(components):
    """The smallest share of a found topic in the ten words it has most of."""
    beta = components / components.sum(1, keepdims=True)
    return beta.reshape(K, K, WORDS).sum(2).max(1).min()


def test_planted_topics_are_found(fitted, X):
    assert purity(fitted.components_) > 0.95
    assert fitted.components_.dtype == np.float64
    assert (fitted.n_iter_, fitted.n_batch_iter_) == (10, 125)
    assert (fitted.doc_topic_prior_, fitted.topic_word_prior_) == (0.3, 0.05)
    assert list(fitted.get_feature_names_out()) == [f"smoothedlda{k}" for k in range(K)]


def test_transform_is_deterministic_normalised_and_by_document(fitted, X):
    theta = fitted.transform(X)
    np.testing.assert_allclose(theta.sum(1), 1, rtol=1e-5)
    np.testing.assert_array_equal(fitted.transform(X[37:40]), theta[37:40])
    np.testing.assert_array_equal(fitted.transform(X[[5]].toarray()), theta[[5]])
    assert fitted.transform(X.astype(np.float32)).dtype == np.float32


def test_the_same_seed_gives_the_same_bits_and_another_does_not(fitted, X):
    again = clone(fitted).fit(scipy.sparse.csc_matrix(X))
    np.testing.assert_array_equal(again.components_, fitted.components_)
    other = clone(fitted).set_params(random_state=1).fit(X)
    assert not np.array_equal(other.components_, fitted.components_)


def test_pickled_models_go_on(fitted, X):
    copy = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(copy.transform(X[:5]), fitted.transform(X[:5]))
    first = SmoothedLDA(K, batch_size=100, random_state=0, total_samples=400).partial_fit(X[:200])
    copy = pickle.loads(pickle.dumps(first))
    for each in (first, copy):
        each.partial_fit(X[200:])
    np.testing.assert_array_equal(copy.components_, first.components_)


def test_the_corpus_of_partial_fit_has_a_finite_number_of_documents(X):
    assert SmoothedLDA(K, total_samples=np.int64(400)).partial_fit(X).n_batch_iter_ > 0
    for value in (0, np.nan, np.inf, "400"):
        with pytest.raises(ValueError, match="total_samples must be a number of at least 1"):
            SmoothedLDA(K, total_samples=value).partial_fit(X)


def test_score_is_document_completion_and_perplexity_its_exponential(fitted, X):
    unseen = planted(200, seed=9)[0]
    found = fitted.score(unseen)
    # Words of a topic are equally likely: log(1/10) is what knowing the topic of every word would give.
    assert -np.log(K * WORDS) < found < np.log(1 / WORDS)
    assert fitted.perplexity(unseen) == pytest.approx(np.exp(-found))
    assert fitted.score(unseen) == found
    shuffled = clone(fitted).fit(X)
    shuffled.components_ = np.random.default_rng(0).permuted(fitted.components_, axis=1)
    assert shuffled.score(unseen) < found - 0.3


def test_partial_fit_learns_and_its_window_reaches_back(X):
    model = SmoothedLDA(K, batch_size=50, total_samples=400, random_state=0)
    for _ in range(8):
        model.partial_fit(X)
    assert model.n_batch_iter_ == 64
    assert purity(model.components_) > 0.9
    # One call with all minibatches is the same as one call for each of them, from the same topics.
    # Samples depend on the number of a document in its call, so the method is one that does not sample.
    options = {"batch_size": 50, "total_samples": 400, "init": model.components_, "method": "variational"}
    whole = SmoothedLDA(K, **options).partial_fit(X[:150])
    parts = SmoothedLDA(K, **options)
    for first in (0, 50, 100):
        parts.partial_fit(X[first : first + 50])
    np.testing.assert_allclose(parts.components_, whole.components_, rtol=1e-4)


def test_partial_fit_after_fit_keeps_the_topics(fitted, X):
    model = pickle.loads(pickle.dumps(fitted)).set_params(total_samples=400)
    model.partial_fit(X[:100])
    assert model.n_batch_iter_ == fitted.n_batch_iter_ + 3
    assert purity(model.components_) > 0.9
    # ρ goes on from where fit ended: a few steps of (12.5 + 125)^-0.7 = 0.03 move little.
    moved = np.abs(model.components_ - fitted.components_).sum() / fitted.components_.sum()
    assert moved < 0.05


def test_partial_fit_goes_on_with_the_schedule_after_fit(X, monkeypatch):
    """ρ after 125 steps of fit is small, and stays so at the second call and the third."""
    model = SmoothedLDA(K, total_samples=400, random_state=0).fit(X)
    for _ in range(3):
        before = model.components_
        model.partial_fit(X[:32])
        assert np.abs(model.components_ / before - 1).max() < 0.3
    assert model.n_batch_iter_ == 128


def test_the_execution_holds_after_fit_and_in_every_partial_fit(X, monkeypatch):
    methods = []
    monkeypatch.setattr(inference, "proportions", lambda model, *args, **kw: methods.append(model) or np.ones((1, K)))
    estimator = SmoothedLDA(K, execution="batched", max_iter=1, random_state=0, total_samples=400).fit(X)
    estimator.partial_fit(X[:100]).partial_fit(X[100:200])
    estimator.transform(X[:1])
    assert [each.execution for each in methods] == [Batched()]


def test_partial_fit_follows_topics_that_were_edited(X):
    model = SmoothedLDA(K, total_samples=400, random_state=0).partial_fit(X)
    model.components_ = np.kron(np.eye(K), np.full(WORDS, 1000.0)) + 0.1
    model.partial_fit(X[:32])
    assert (model.components_.reshape(K, K, WORDS).sum(2).argmax(1) == np.arange(K)).all()


def test_partial_fit_survives_an_interruption(X, monkeypatch):
    model = SmoothedLDA(K, batch_size=50, total_samples=400, random_state=0, n_jobs=2).partial_fit(X[:100])

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training.Training, "__next__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.partial_fit(X)
    model.partial_fit(X)
    assert model.n_batch_iter_ == 10


@pytest.mark.parametrize("num_docs", [33, 100, 390])
def test_passes_are_counted(X, num_docs):
    model = SmoothedLDA(K, max_iter=3, early_stopping=True, n_iter_no_change=9, random_state=0).fit(X[:num_docs])
    assert model.n_iter_ == 3
    assert len(model.validation_scores_) in (3, 4)


def test_init_starts_from_given_topics(X):
    start = np.kron(np.eye(K), np.full(WORDS, 100.0)) + 0.1
    model = SmoothedLDA(K, init=start, batch_size=100, max_iter=1, random_state=0).fit(X)
    assert (model.components_.reshape(K, K, WORDS).sum(2).argmax(1) == np.arange(K)).all()
    with pytest.raises(ValueError, match=r"init must be positive and finite of shape \(4, 40\)"):
        SmoothedLDA(K, init=start[:2]).fit(X)


def test_early_stopping(X):
    model = SmoothedLDA(K, batch_size=60, max_iter=60, early_stopping=True, tol=0.01, random_state=0).fit(X)
    assert model.n_iter_ < 60
    assert len(model.validation_scores_) == model.n_iter_
    last = model.validation_scores_
    assert max(last[-2:]) < max(last[:-2]) + 0.01
    with pytest.raises(ValueError, match="n_samples = 1"):
        SmoothedLDA(K, early_stopping=True).fit(X[:1])


def test_checkpoints_continue_an_interrupted_fit(X, monkeypatch, tmp_path):
    options = {"batch_size": 50, "max_iter": 6, "random_state": 0, "n_jobs": 1, "slots": "bfloat16", "warmup": "zeros"}
    complete = SmoothedLDA(K, **options).fit(X)
    original, calls = training.Training.__next__, []

    def interrupted(self):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self)

    monkeypatch.setattr("smoothgrad_jax.training.driver._REPORT_INTERVAL", 0.0)  # report after every step
    model = SmoothedLDA(K, **options, checkpoints=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(training.Training, "__next__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.fit(X)
    with pytest.raises(ValueError, match="checkpoints names a folder with a run; resume=True continues it"):
        model.fit(X)
    model.set_params(resume=True).fit(X)
    np.testing.assert_array_equal(model.components_, complete.components_)
    with pytest.raises(ValueError, match="batch_size was 50 in the checkpoint, and is 40 now"):
        model.set_params(batch_size=40).fit(X)
    with pytest.raises(ValueError, match=r"random_state was .* in the checkpoint, and is"):
        clone(model).set_params(batch_size=50, random_state=1).fit(X)
    with pytest.raises(ValueError, match=r'the corpus was "400x40-.*, now "300x40-'):
        model.set_params(batch_size=50).fit(X[:300])


def test_learned_priors(X):
    rng = np.random.default_rng(1)
    alpha = np.array([1.0, 0.3, 0.1, 0.1])
    theta = rng.dirichlet(alpha, 800)
    beta = np.kron(np.eye(K), np.full(WORDS, 1 / WORDS))
    X = np.stack([rng.multinomial(60, p) for p in theta @ beta])
    priors = {"doc_topic_prior": "auto", "topic_word_prior": "auto"}
    model = SmoothedLDA(K, method="variational", **priors, batch_size=100, max_iter=60, random_state=0).fit(X)
    order = model.components_.reshape(K, K, WORDS).sum(2).argmax(1)
    found = np.empty(K)
    found[order] = model.doc_topic_prior_
    np.testing.assert_allclose(np.log(found), np.log(alpha), atol=np.log(2))
    assert found[0] > found[1] > max(found[2:])
    likeliest = fit_symmetric(mean_log(model.components_.T, 0), K * WORDS, 1.0)
    assert model.topic_word_prior_ == pytest.approx(likeliest, rel=0.05)
    assert purity(model.components_) > 0.8  # of the rarest topic


@pytest.mark.parametrize("method", [Sampled(), Collapsed(), Mean()])
def test_a_learned_prior_follows_the_prevalence_of_topics_and_keeps_its_sum(method):
    rng = np.random.default_rng(1)
    beta = np.kron(np.eye(K), np.full(WORDS, 1 / WORDS))
    X = np.stack([rng.multinomial(60, p) for p in rng.dirichlet([1.0, 0.3, 0.1, 0.1], 400) @ beta])
    lam, model = (0.1 + 1_000 * beta.T).astype(np.float32), LDA(0.3, 0.1, 400, method=method)
    learner = PriorLearner(Settings(alpha="auto"), Corpus.of(X), None, rng)
    for _ in range(20):
        model = learner.update(model, lam)
    alpha = np.asarray(model.alpha)
    assert alpha.sum() == pytest.approx(K * 0.3)
    np.testing.assert_allclose(np.log(alpha / alpha.sum()), np.log(np.array([10, 3, 1, 1]) / 15), atol=np.log(2))
    assert alpha[0] > alpha[1] > max(alpha[2:])


@pytest.mark.slow
def test_a_prior_for_every_word_or_topic(X):
    eta = np.full(X.shape[1], 0.05)
    one = SmoothedLDA(K, topic_word_prior=0.05, batch_size=200, max_iter=1, random_state=0).fit(X)
    many = SmoothedLDA(K, topic_word_prior=eta, batch_size=200, max_iter=1, random_state=0).fit(X)
    np.testing.assert_allclose(many.components_, one.components_, rtol=1e-5)
    full = np.broadcast_to(eta, one.components_.shape)
    model = SmoothedLDA(K, topic_word_prior=full, doc_topic_prior=[0.3] * K, batch_size=200, max_iter=1, random_state=0)
    np.testing.assert_allclose(model.fit(X).components_, one.components_, rtol=1e-5)
    assert model.topic_word_prior_.shape == one.components_.shape
    model.transform(X[:3])


def test_batch_variational_bayes_is_a_limit_case(X):
    """With one minibatch of everything, L = 1 and ρ = 1, the bound rises at every pass, as scikit-learn's does."""
    bounds = []
    for passes in (1, 3, 9):
        options = {"window": 1, "learning_rate": 1.0, "batch_size": X.shape[0], "method": "variational"}
        model = SmoothedLDA(K, **options, max_iter=passes, random_state=0).fit(X)
        priors = LDA(model.doc_topic_prior_, model.topic_word_prior_, X.shape[0])
        bounds.append(float(elbo(priors, np.float32(model.components_.T), pack(X))))
    assert bounds[0] < bounds[1] < bounds[2]
    peer = LatentDirichletAllocation(
        K, doc_topic_prior=1 / K, topic_word_prior=0.1, learning_method="batch", max_iter=9, random_state=0
    ).fit(X)
    reached = float(elbo(priors, np.float32(peer.components_.T), pack(X)))
    assert bounds[2] > reached - 0.05 * abs(reached)


@pytest.mark.slow
def test_in_a_pipeline_and_a_grid_search_with_processes(X):
    pipeline = make_pipeline(FunctionTransformer(), SmoothedLDA(K, max_iter=1, batch_size=200, random_state=0))
    search = GridSearchCV(pipeline, {"smoothedlda__n_components": [1, 4]}, cv=2, n_jobs=2).fit(X)
    assert search.best_params_ == {"smoothedlda__n_components": 4}
    assert search.transform(X[:2]).shape == (2, 4)


def test_a_model_that_can_be_saved(fitted, X, tmp_path):
    words = [f"word{i}" for i in range(K * WORDS)]
    save_model(tmp_path, fitted.to_model(words, X))
    model = load_model(tmp_path)
    assert model.vocabulary == words
    assert model.quality.describe() == fitted.topic_quality(X).describe()
    assert fitted.to_model(words).quality is None
    np.testing.assert_array_equal(model.word_counts, X.sum(0))
    assert fitted.to_model(words).word_counts is None
    assert fitted.to_model(labels={1: " blue "}).labels == {1: "blue"}
    with pytest.raises(ValueError, match=f"expected topics from 0 to {K - 1}, got {K}"):
        fitted.to_model(labels={K: "none"})
    np.testing.assert_array_equal(model.transform(X[:9]), fitted.transform(X[:9].astype(np.float32)))
    assert write_report(tmp_path / "report.html", model).stat().st_size > 10_000


def test_a_saved_model_infers_as_the_estimator_does(X, tmp_path):
    """The file is valid JSON, with the names of the settings and the options of the local step."""
    options = {"mean_change_tol": 1e-6, "max_doc_update_iter": 500, "window": np.inf, "learning_rate": 0.5}
    fitted = SmoothedLDA(K, method="variational", **options, max_iter=1, random_state=0).fit(X)
    save_model(tmp_path, fitted.to_model())
    text = (tmp_path / "model.json").read_text()
    settings = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["settings"]
    expected = {"topics": K, "window": "inf", "rho": 0.5, "local_tol": 1e-6, "local_max_iter": 500, "passes": 1}
    assert expected.items() <= settings.items()
    model, few = load_model(tmp_path), X[:9].astype(np.float32)
    np.testing.assert_array_equal(model.transform(few), fitted.transform(few))
    assert not np.array_equal(model._replace(settings={}).transform(few), fitted.transform(few))


def test_the_quality_of_topics(fitted, X):
    found = fitted.topic_quality(X)
    lam, shares = fitted.components_.T.astype(np.float32), fitted.to_model().prevalence
    np.testing.assert_array_equal(found.npmi, topic_quality(lam, X).npmi)
    assert found.effective_topics == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))
    assert found.effective_topics == pytest.approx(K, rel=0.1)
    assert (found.npmi > 0).all()
    assert found.junk == {}


def test_a_window_that_changes(X):
    model = SmoothedLDA(K, window=phase_out(5, 4, 8), batch_size=50, max_iter=2, random_state=0).fit(X)
    assert model.n_batch_iter_ == 16


def test_a_window_that_finds_its_length(X):
    model = SmoothedLDA(K, window=Adaptive(16), random_state=0).fit(X)
    assert purity(model.components_) > 0.95
    half = clone(model).set_params(batch_size=20).partial_fit(X[:200])
    again = pickle.loads(pickle.dumps(half))
    np.testing.assert_array_equal(again.partial_fit(X[200:]).components_, half.partial_fit(X[200:]).components_)


def test_what_was_learned_stays_when_it_is_interrupted(X, monkeypatch):
    original, calls = training.Training.__next__, []

    def interrupted(self):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self)

    monkeypatch.setattr(training.Training, "__next__", interrupted)
    model = SmoothedLDA(K, early_stopping=True, batch_size=50, max_iter=50, random_state=0)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X)
    assert model.n_batch_iter_ > 0
    assert model.n_iter_ > 0
    assert model.transform(X[:2]).shape == (2, K)


def test_verbose_shows_progress(X, capsys):
    SmoothedLDA(K, verbose=1, batch_size=100, max_iter=1, random_state=0).fit(X)
    assert "documents/s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_components": 0}, "n_components must be an integer of at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be an integer of at least 1, got 2.5"),
        ({"doc_topic_prior": "learn"}, "doc_topic_prior must be a positive number, an array or \"auto\", got 'learn'"),
        ({"topic_word_prior": -1.0}, 'topic_word_prior must be a positive number, an array or "auto", got -1.0'),
        ({"learning_rate": 2.0}, "learning_rate must be a number above 0 and at most 1, got 2.0"),
        ({"window": "10"}, "window must be an integer of at least 1"),
        ({"learning_rate": 0.1, "learning_offset": 5}, "learning_offset has no effect with a constant step size"),
        ({"n_iter_no_change": 3}, "n_iter_no_change has no effect without early stopping"),
        ({"validation_fraction": 0.2}, "validation_fraction has no effect without early stopping"),
        ({"resume": True}, "resume has no effect without checkpoints"),
        ({"validation_fraction": 1.0}, "validation_fraction must be between 0 and 1, got 1.0"),
    ],
)
def test_errors_name_what_is_wrong(X, options, message):
    with pytest.raises(ValueError, match=message):
        SmoothedLDA(**options).fit(X)


@pytest.mark.parametrize("name", ["seconds", "replace", "early_stopping", "checkpoints"])
def test_partial_fit_refuses_what_has_no_effect_there(X, tmp_path, name):
    value = tmp_path if name == "checkpoints" else 1.0 if name == "seconds" else True
    with pytest.raises(ValueError, match=f"{name} has no effect in partial_fit; set it to"):
        SmoothedLDA(K, **{name: value}).partial_fit(X)


def num_partitions(X, n_jobs):
    return len(SmoothedLDA(K, n_jobs=n_jobs, max_iter=1).partial_fit(X[:60])._state.partitions)


def test_n_jobs_has_the_meaning_of_scikit_learn(fitted, X):
    assert num_partitions(X, None) == num_partitions(X, -1_000) == 1
    assert num_partitions(X, -2) == max(1, joblib.cpu_count() - 1)
    with joblib.parallel_config("threading", n_jobs=2):
        assert num_partitions(X, None) == 2
    model = pickle.loads(pickle.dumps(fitted))
    for bad in (0, 1.5, True, "all"):
        for method in (model.fit, model.transform):
            model.n_jobs = bad
            with pytest.raises(ValueError, match="n_jobs must be None or an integer other than 0, got"):
                method(X)


def test_more_topics_than_documents_are_said_to_repeat(X):
    message = "n_components=5 is more than the 3 documents to start from.*choose n_components below 3, or give init"
    for train in ("fit", "partial_fit"):
        with pytest.warns(UserWarning, match=message) as record:
            getattr(SmoothedLDA(5, max_iter=1, random_state=0), train)(X[:3])
        assert record[0].filename == __file__
    SmoothedLDA(3, max_iter=1, init=np.ones((3, X.shape[1]))).fit(X[:2])


def test_topics_for_octis_and_pyldavis_are_those_of_the_saved_model(fitted, X, monkeypatch):
    words = [f"word{i}" for i in range(K * WORDS)]
    found, model = fitted.to_octis(X[:50], words, test=X[50:], top_words=3), fitted.to_model(words)
    few, others = (each.astype(np.float32) for each in (X[:50], X[50:]))
    assert found["topics"] == [[word for word, _ in topic] for topic in model.top_words(3)]
    np.testing.assert_array_equal(found["topic-word-matrix"], model.topics())
    np.testing.assert_array_equal(found["topic-document-matrix"], model.transform(few).T)
    np.testing.assert_array_equal(found["test-topic-document-matrix"], model.transform(others).T)
    monkeypatch.setitem(sys.modules, "pyLDAvis", types.SimpleNamespace(prepare=lambda **options: options))
    prepared = fitted.to_pyldavis(X, words, R=5)
    assert (prepared["vocab"], prepared["R"]) == (words, 5)
    np.testing.assert_array_equal(prepared["term_frequency"], X.sum(0))
    with pytest.raises(ValueError, match="expecting 40 features"):
        fitted.to_octis(X[:, :30])
