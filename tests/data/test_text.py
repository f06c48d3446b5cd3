"""Test the counting of texts against scikit-learn's CountVectorizer."""

import gzip
import os
import re
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from sklearn.feature_extraction.text import CountVectorizer

from smoothgrad_jax.data import text
from smoothgrad_jax.data.errors import CorpusError

# Few distinct words, so that they repeat: upper case, accents, digits, hyphens, and characters outside of words.
WORDS = [
    "star",
    "Star",
    "stars",
    "the",
    "moon",
    "Étoile",
    "étoile",
    "x2",
    "3d",
    "a",
    "of",
    "sub-orbit",
    "co2",
    "_",
    "$",
]
WORDS += ["月亮", "ſtar", "İstanbul", "\u2028", "\x00"]
TEXTS = st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join) | st.text(max_size=12), max_size=12)
TOKENS = st.fixed_dictionaries(
    {
        "lowercase": st.booleans(),
        "token_pattern": st.sampled_from([text.WORD, r"(?u)\b\w\w+\b", r"\S+", r"\b(\w)\w*"]),
        "stop_words": st.sampled_from([None, "english", ["moon", "star"]]),
        "ngram_range": st.sampled_from([(1, 1), (1, 2), (2, 2)]),
    }
)


def count(texts, vocabulary, jobs=None, **options):
    """Return the counts [D, V], the number of tokens outside of the vocabulary, and of documents without others."""
    numbers = {word: i for i, word in enumerate(text.check_vocabulary(vocabulary))}
    parts = [text.renumber(chunk, numbers) for chunk in text.count_stream(texts, text.tokens(**options), jobs)]
    counts = [np.zeros((0, len(numbers)), int)]
    for indptr, indices, data, *_ in parts:
        counts.append(scipy.sparse.csr_array((data, indices, indptr), (len(indptr) - 1, len(numbers))).toarray())
    return np.concatenate(counts), sum(part.outside for part in parts), sum(part.lost for part in parts)


@settings(deadline=None, max_examples=40)
@given(TEXTS, TOKENS)
def test_texts_are_counted_as_by_scikit_learn(texts, options):
    vocabulary = ["star", "moon", "étoile", "Star", "star moon", "x2", "s"]
    sklearn = CountVectorizer(vocabulary=vocabulary, **options)
    counts, outside, lost = count(texts, vocabulary, **options)
    np.testing.assert_array_equal(counts, sklearn.transform(texts).toarray() if texts else np.zeros((0, 7)))
    tokens = [sklearn.build_analyzer()(each) for each in texts]
    known = [[token for token in each if token in vocabulary] for each in tokens]
    assert outside == sum(map(len, tokens)) - sum(map(len, known))
    assert lost == sum(bool(t) and not k for t, k in zip(tokens, known, strict=True))


def test_the_counts_do_not_depend_on_the_size_of_chunks(monkeypatch):
    texts = ["star moon star", "", "moon", "planet star", "dust"] * 3
    expected = count(texts, ["moon", "star"])
    assert expected[1:] == (6, 3)
    for size in (1, 20, 40):
        monkeypatch.setattr(text, "_CHUNK", size)
        parts = count(iter(texts), ["moon", "star"])
        np.testing.assert_array_equal(parts[0], expected[0])
        assert parts[1:] == expected[1:]


def test_the_default_pattern_matches_words_of_three_letters():
    found = re.findall(text.WORD, "An H2O molecule's 3d x_ij covid19 2nd naïve state-of-the-art U.S.A. été")
    assert found == ["H2O", "molecule", "covid19", "naïve", "state", "the", "art", "été"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_pattern": "("}, "token_pattern: .* is not a regular expression"),
        ({"token_pattern": r"(\w)(\w)"}, "at most one group"),
        ({"token_pattern": None}, "token_pattern"),
        ({"ngram_range": (2, 1)}, r"ngram_range: expected .* 1 ≤ shortest ≤ longest; got \(2, 1\)"),
        ({"ngram_range": (0, 1)}, "ngram_range"),
        ({"ngram_range": (1,)}, "ngram_range"),
        ({"stop_words": ["the", 3]}, "stop_words: expected words, got 3 as word 2"),
        ({"stop_words": "german"}, "stop_words: expected english, or a file .*; there is no file 'german'"),
        ({"jobs": 0}, "jobs: expected an integer number of processes"),
        ({"jobs": 1.5}, "jobs: expected an integer number of processes"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        count(["star"], ["star"], **options)


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        ([], "at least one word"),
        (["star", "moon", "star"], "vocabulary: words 1 and 3 are both 'star'; expected distinct words"),
        (["star", 3], "vocabulary: expected words, got 3"),
        ("nowhere.txt", "nowhere.txt: there is no such file"),
    ],
)
def test_vocabularies_are_checked(vocabulary, message):
    with pytest.raises(ValueError, match=message):
        text.check_vocabulary(vocabulary)


def test_words_are_read_from_files(tmp_path):
    vocabulary, stop = tmp_path / "vocabulary.txt", tmp_path / "stop.txt"
    vocabulary.write_bytes("\ufeffmoon\r\nétoile\r\n\n".encode())
    stop.write_text("dust\nstar")
    counts, outside, _ = count(["Moon dust", "étoile star sun"], vocabulary, stop_words=stop)
    assert counts.tolist() == [[1, 0], [0, 1]]
    assert outside == 1
    vocabulary.write_bytes("moon\nétoile\n".encode("latin-1"))
    with pytest.raises(CorpusError, match=r"vocabulary.txt, line 2: expected utf-8, .* encoding='latin-1'"):
        text.check_vocabulary(vocabulary)
    assert text.check_vocabulary(vocabulary, "latin-1") == ["moon", "étoile"]
    vocabulary.write_bytes(gzip.compress(b"moon\n\nstar\n"))
    with pytest.raises(CorpusError, match=r"vocabulary.txt, line 2: expected a word, got a blank line"):
        text.check_vocabulary(vocabulary)
    vocabulary.write_bytes(gzip.compress(b"moon\nstar\n\n"))
    assert text.check_vocabulary(vocabulary) == ["moon", "star"]


@settings(deadline=None, max_examples=80)
@given(
    TEXTS.filter(lambda texts: any(re.search(r"\S", each) for each in texts)),
    st.integers(1, 4) | st.floats(0, 1),
    st.integers(1, 4) | st.floats(0, 1),
    st.none() | st.integers(1, 5),
)
def test_words_are_chosen_as_by_scikit_learn(texts, min_df, max_df, max_features):
    everything = CountVectorizer(token_pattern=r"\S+")
    X = everything.fit_transform(texts)
    frequency, total = np.asarray((X > 0).sum(0)).ravel(), np.asarray(X.sum(0)).ravel()
    names = everything.get_feature_names_out()
    sklearn = CountVectorizer(token_pattern=r"\S+", min_df=min_df, max_df=max_df, max_features=max_features)
    try:
        expected = sklearn.fit(texts).get_feature_names_out().tolist()
    except ValueError:
        expected = []
    try:
        mask = text.choose_words(frequency, total, len(texts), min_df, max_df, max_features)
        assert names[mask].tolist() == expected
        assert expected
    except CorpusError:
        assert not expected


def test_the_error_names_the_option_to_relax():
    frequency = np.array([2, 9, 9, 8])
    for limits, message in (
        ((10, 1.0, None), "lower min_df: the most common word is in 9"),
        ((1, 1, None), "raise max_df: the rarest word is in 2"),
        (
            (3, 7, None),
            "min_df=3 requires .* at least 3, max_df=7 of at most 7, in 10 documents; lower min_df or raise",
        ),
        ((5, 0.2, None), "no word can be left"),
    ):
        with pytest.raises(CorpusError, match=message):
            text.choose_words(frequency, frequency, 10, *limits)
    with pytest.raises(CorpusError, match="found no word in 10 documents: try another token_pattern"):
        text.choose_words(np.zeros(0, int), np.zeros(0, int), 10, 1, 1.0, None)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((0, 1.0, None), "min_df: .*; got 0"),
        ((True, 1.0, None), "min_df: .*; got True"),
        ((1, 1.5, None), "max_df: .*; got 1.5"),
        ((1, "half", None), "max_df: .*; got 'half'"),
        ((1, 1.0, 0), "max_features: .*; got 0"),
        ((1, float("nan"), 2), "max_df: .*; got nan"),
    ],
)
def test_limits_are_checked(limits, message):
    with pytest.raises(ValueError, match=message):
        text.check_limits(*limits)


def test_automatic_limits_depend_on_the_number_of_documents():
    auto = ("auto",) * 3
    assert text.set_limits(1, *auto) == {"min_df": 1, "max_df": 1.0, "max_features": 50_000}
    assert text.set_limits(19, *auto)["max_df"] == 1.0
    assert text.set_limits(20, *auto)["max_df"] == 0.5
    assert [text.set_limits(n, *auto)["min_df"] for n in (199, 200, 499, 500, 10**6)] == [1, 2, 4, 5, 5]
    assert text.set_limits(10**6, 2, 0.1, None) == {"min_df": 2, "max_df": 0.1, "max_features": None}


# A script without `if __name__ == "__main__"`: the processes must neither run it again nor import jax. Chunks of
# killed processes are counted by the main process.
SCRIPT = """
import os, signal
print("script runs")
from smoothgrad_jax.data import text
text._CHUNK = 1_000
pools, start = [], text._start_pool
text._start_pool = lambda jobs: pools.append(start(jobs)) or pools[-1]
stream = text.count_stream((f"star moon{i % 7}" for i in range(2_000)), text.tokens(), jobs=2)
chunks = [next(stream) for _ in range(5)]
modules = pools[0].submit(eval, "set(__import__('sys').modules)").result()
assert "smoothgrad_jax.data.text" in modules and not {"jax", "smoothgrad_jax.data.corpus_folder"} & modules
assert signal.SIGINT in pools[0].submit(signal.pthread_sigmask, signal.SIG_BLOCK, []).result()  # Ctrl-C is blocked
os.kill(pools[0].submit(os.getpid).result(), signal.SIGKILL)
chunks.extend(stream)
assert len(pools) == 1 and len(chunks) > 20
assert sum(len(chunk.indptr) - 1 for chunk in chunks) == 2_000
counts = {}
for chunk in chunks:
    for word, n in zip(chunk.words, chunk.data.dot(chunk.indices[:, None] == range(len(chunk.words)))):
        counts[word] = counts.get(word, 0) + n
assert counts == {"star": 2_000, **{f"moon{i}": 286 if i < 5 else 285 for i in range(7)}}, counts
"""


def test_several_processes_from_a_script_without_a_guard(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", tmp_path / "script.py"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stderr == ""
    assert done.stdout == "script runs\n"
    assert done.returncode == 0
