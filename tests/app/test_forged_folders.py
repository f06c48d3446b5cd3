"""Forged corpora, models and checkpoints end in an error that the command prints as one line: no crash, no hang."""

import contextlib
import os
import shutil
import signal

import jax
import numpy as np
import pytest
from forgery import forge_array, forge_json

from smoothgrad_jax import Corpus, init_topics, open_source
from smoothgrad_jax.app import runs, saved_models
from smoothgrad_jax.app.commands.output import print_topics
from smoothgrad_jax.app.runs import Run
from smoothgrad_jax.app.saved_models import SavedModel
from smoothgrad_jax.app.settings import Settings
from smoothgrad_jax.data import corpus_folder
from smoothgrad_jax.training.checkpoints import Checkpoints
from smoothgrad_jax.training.engines import NotFiniteError

V, K, D, B = 60, 3, 90, 10
SEEDS = int(os.environ.get("FORGERIES", "30"))
PRINTED = (ValueError, OSError, MemoryError, NotFiniteError)  # errors that the command prints


@pytest.fixture(name="X", scope="module")
def some_documents():
    return np.random.default_rng(0).poisson(0.3, (D, V))


def new_run(X, checkpoint=None):
    settings = Settings(topics=K, batch_size=B, passes=2, window=3, threads=1, alpha="auto", eta="auto").resolve(D)
    corpus, key = Corpus.of(X), jax.random.key(0)
    start = None if checkpoint else init_topics(key, V, K)
    if checkpoint:
        runs.check_same_run(checkpoint.settings, runs.stored_settings(checkpoint).resolve(D), {})
    return Run(corpus, settings, start, key=key, rng=np.random.default_rng(0), checkpoint=checkpoint)


@pytest.fixture(name="healthy", scope="module")
def some_folders(X, tmp_path_factory):
    folder = tmp_path_factory.mktemp("healthy")
    lines = [" ".join(f"word{chr(97 + w // 26)}{chr(97 + w % 26)}" for w in np.flatnonzero(x)) for x in X]
    (folder / "text.txt").write_text("\n".join(lines))
    corpus_folder.convert(open_source(folder / "text.txt"), folder / "corpus", min_df=1)
    run = new_run(X)
    reports = run.reports()
    next(reports)
    run._write(Checkpoints(folder / "checkpoints"), print)
    run.close()
    settings = {"tokens": {"lowercase": True, "stop_words": ["the"], "ngram_range": [1, 1]}, "method": "sampled"}
    words = [f"word{w}" for w in range(V)]
    history = [{"step": 3, "passes": 0.1, "seconds": 1.0, "rate": 3.0, "score": -3.5}]
    model = SavedModel(np.asarray(run.params), 0.1, 0.1, D, words, settings, history, np.ones(K), np.ones(V))
    saved_models.save_model(folder / "model", model)
    return folder


def use_corpus(folder, X):
    stored = corpus_folder.read(open_source(folder))
    assert stored.corpus.num_docs > 0
    corpus = corpus_folder.open_folder(folder).corpus
    corpus.pack(np.arange(corpus.num_docs), corpus.layout(min(B, corpus.num_docs)))
    corpus.word_counts()


def use_model(folder, X):
    model = saved_models.load_model(folder)
    model.lda()
    print_topics(model, 5)


def use_checkpoint(folder, X):
    last = Checkpoints(folder).latest()
    run = new_run(X, last)
    next(run.reports(), None)
    run.close()


@contextlib.contextmanager
def time_limit(seconds):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, also inside compiled code
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


USES = {"corpus": use_corpus, "model": use_model, "checkpoints": use_checkpoint}


@pytest.mark.parametrize("kind", USES)
def test_a_forged_folder_is_used_or_refused(healthy, X, tmp_path, kind):
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        copy = tmp_path / str(seed)
        shutil.copytree(healthy / kind, copy)
        description = next(path for path in copy.rglob("*.json"))
        others = sorted(path for path in description.parent.iterdir() if path.suffix in (".npy", ".txt"))
        if rng.random() < 0.5:
            forged = forge_json(rng, description)
        else:
            forged = forge_array(rng, others[rng.integers(len(others))], description)
        with time_limit(120):
            try:
                USES[kind](copy, X)
            except PRINTED:
                pass
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {kind}: {forged}") from error
        shutil.rmtree(copy)
