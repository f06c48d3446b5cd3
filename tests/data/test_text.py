"""Test the counting of texts against scikit-learn's CountVectorizer."""

import gzip
import itertools
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from sklearn.feature_extraction.text import CountVectorizer

from smoothgrad_jax.data import collocations, text
from smoothgrad_jax.data.errors import CorpusError, CorpusWarning
from smoothgrad_jax.data.scripts import check_script

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
    words = options["stop_words"]
    if isinstance(words, list):  # the list replaces the English one only as `stop_words_only`
        options = {**options, "stop_words": "english", "stop_words_only": words}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CorpusWarning)  # one pattern splits the stop words
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
        ({"ngram_range": (1, 11)}, r"ngram_range: expected .* up to 10"),
        ({"stop_words": ["dust"], "stop_words_only": ["dust"]}, "stop_words: has no effect beside stop_words_only"),
        ({"tokenizer": "str"}, "tokenizer: expected package.module:function, got 'str'"),
        ({"tokenizer": "nowhere:cut"}, "tokenizer: cannot import 'nowhere:cut': No module named 'nowhere'"),
        ({"tokenizer": "re:nothing"}, "tokenizer: cannot import 're:nothing': module 're' has no attribute 'nothing'"),
        ({"tokenizer": "sys:path"}, "tokenizer: expected 'sys:path' to be a function, got list"),
        ({"tokenizer": 3}, "tokenizer: expected a function or 'module:function', got 3"),
        ({"tokenizer": str.split, "token_pattern": "x"}, "token_pattern: has no effect beside a tokenizer"),
        ({"tokenizer": str.encode}, r"tokenizer: expected strings from builtins:str.encode, got int; .* 'star'"),
        ({"tokenizer": str.upper}, r"tokenizer: expected a list of words from builtins:str.upper, got one string"),
        ({"tokenizer": "json:loads"}, "tokenizer: json:loads failed with JSONDecodeError: Expecting value.* 'star'"),
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
pools, start = [], text.start_pool
text.start_pool = lambda jobs: pools.append(start(jobs)) or pools[-1]
stream = text.count_stream((f"star moon{i % 7}" for i in range(2_000)), text.tokens(), jobs=2)
chunks = [next(stream) for _ in range(5)]
modules = pools[0].submit(eval, "set(__import__('sys').modules)").result()
assert "smoothgrad_jax.data.text" in modules and not {"jax", "smoothgrad_jax.data.corpus_folder"} & modules
blocked = pools[0].submit(signal.pthread_sigmask, signal.SIG_BLOCK, []).result()
assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} <= blocked
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


def words_of(texts, **options):
    """Return the distinct words of texts, in alphabetical order."""
    return sorted({word for chunk in text.count_stream(texts, text.tokens(**options)) for word in chunk.words})


def test_stop_words_are_added_to_the_english_list_or_replace_it(tmp_path):
    file = tmp_path / "stop.txt"
    file.write_text("Und\nnicht\n")
    texts = ["The moon und the Star", "und nicht whether"]
    for words in (file, ["Und", "nicht"]):
        assert words_of(texts, stop_words=words) == ["moon", "star"]
        assert words_of(texts, stop_words_only=words) == ["moon", "star", "the", "whether"]
    assert words_of(texts, stop_words=None) == ["moon", "nicht", "star", "the", "und", "whether"]
    assert words_of(["Und und"], stop_words_only=["und"], lowercase=False) == ["Und"]


def test_stop_words_that_are_split_give_a_warning():
    with pytest.warns(CorpusWarning, match=r"some stop words are split into words that are kept.*: 'aujourd', 'hui'"):
        text.tokens(stop_words_only=["aujourd'hui", "une"])


def naive_npmi(documents, first, second):
    """Return the NPMI of two neighbours, from lists of words."""
    words = [word for each in documents for word in each]
    pairs = [pair for each in documents for pair in itertools.pairwise(each)]
    p, q, both = (
        found.count(what) / len(words) for found, what in ((words, first), (words, second), (pairs, (first, second)))
    )
    return np.log(both / (p * q)) / -np.log(both)


def chosen(documents, shortest, longest, **limits):
    """Return the words that are kept, and all words."""
    everything = CountVectorizer(ngram_range=(1, longest), token_pattern=r"\S+")
    X = everything.fit_transform(map(" ".join, documents))
    names = everything.get_feature_names_out()
    frequency, total = np.asarray((X > 0).sum(0)).ravel(), np.asarray(X.sum(0)).ravel()
    kept = collocations.collocations(lambda: names, frequency, total, ngram_range=(shortest, longest), **limits)
    return set(names[kept]), frequency, names


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([-1, 0, 0.2, 0.4, 0.7]), st.sampled_from([1, 3]))
def test_pairs_are_kept_by_their_npmi(seed, min_npmi, min_df):
    rng = np.random.default_rng(seed)
    documents = [rng.choice(["a", "b", "c", "d e"], 12, p=[0.5, 0.3, 0.15, 0.05]) for _ in range(20)]
    documents = [" ".join(each).split(" ") for each in documents]
    kept, frequency, names = chosen(documents, 1, 2, min_df=min_df, min_npmi=min_npmi)
    often = names[frequency >= min_df]
    scores = {name: naive_npmi(documents, *name.split(" ")) for name in often if " " in name}
    assert all(-1 <= score <= 1 + 1e-9 for score in scores.values())
    clear = {name for name, score in scores.items() if abs(score - min_npmi) > 1e-9}
    assert kept & clear == {name for name in clear if scores[name] >= min_npmi}
    assert kept - scores.keys() == {name for name in often if " " not in name}


def test_a_frequent_pair_of_frequent_words_is_not_a_collocation():
    rng = np.random.default_rng(0)
    # "of" and "the" are frequent and independent; "new york" always occurs together.
    documents = [
        [*rng.choice(["of", "the", "sail"], 20), "new", "york", *rng.choice(["of", "the"], 5)] for _ in range(99)
    ]
    kept, frequency, names = chosen(documents, 2, 3, min_df=5, min_npmi=0.4)
    assert kept == {"new york"}
    assert frequency[names.tolist().index("of the")] > 90
    assert chosen(documents, 1, 2, min_df=5, min_npmi=-1)[0] >= {"of the", "new york", "of"}


def test_a_token_with_a_space_is_not_a_sequence():
    names, ones = ["new york", "star"], np.ones(2, int)
    assert collocations.collocations(lambda: names, ones, ones, 1, 0.5, (1, 2)).all()
    names, total = ["star", "star moon", "moon"], np.array([2, 4, 2])  # as many as all words without a space
    assert collocations.collocations(lambda: names, total, total, 1, 0.5, (1, 2)).all()


CHINESE = "我们使用机器学习方法研究大规模文本数据的主题模型。"
THAI = "แบบจำลองหัวข้อสำหรับข้อความภาษาไทย"


@pytest.mark.parametrize(
    "sample", [CHINESE, THAI, "トピックモデルは文書の集合を分析する。", f"{CHINESE} LDA topic model"]
)
def test_scripts_without_spaces_give_a_warning_that_names_the_remedy(sample):
    with pytest.warns(
        CorpusWarning, match=r"% of the letters are Chinese.*tokenizer; .* pass token_pattern='"
    ) as found:
        assert list(check_script([sample] * 9)) == [sample] * 9
    assert len(found) == 1


@pytest.mark.parametrize(
    "sample",
    ["topic model of the text 主题", "토픽 모델은 문서 집합의 주제를 찾는다", "Это модель тематик", "αβγ", ""],
)
def test_other_scripts_give_no_warning(sample):
    assert list(check_script([sample])) == [sample]


def test_a_tokenizer_receives_the_text_and_its_words_are_counted():
    assert words_of(["Star/The/ moon / /"], tokenizer=lambda text: text.split("/")) == [" moon ", "star"]
    assert words_of(["Star MOON"], tokenizer=lambda text: text.split(), lowercase=False) == ["MOON", "Star"]
    assert words_of(["NOT star"], tokenizer=lambda text: [text[:3]]) == []  # a stop word
    found = words_of(["star moon sun"], tokenizer="shlex:split", ngram_range=(1, 2), stop_words_only=["sun"])
    assert found == ["moon", "star", "star moon"]


TOKENIZER_SCRIPT = """
import os, sys
sys.path.append(sys.argv[1])
from smoothgrad_jax.data import text
text._CHUNK = 1_000
main = os.getpid()
def cut(text):
    return [*text.split("/"), "main" if os.getpid() == main else "worker"]
for tokenizer in ("letters_of:cut", cut):
    chunks = text.count_stream(["star/moon"] * 400, text.tokens(tokenizer=tokenizer), jobs=2)
    assert {word for chunk in chunks for word in chunk.words} == {"star", "moon", "worker"}
"""


def test_worker_processes_use_the_tokenizer(tmp_path):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "letters_of.py").write_text(
        f"import os\nmain = {os.getpid()}\ndef cut(text): return [*text.split('/'), 'worker']\n"
    )
    (tmp_path / "script.py").write_text(TOKENIZER_SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", tmp_path / "script.py", tmp_path / "modules"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stderr == ""
    assert done.returncode == 0


def test_a_stored_definition_is_the_same_definition():
    for options in ({}, {"stop_words": ["dust"]}, {"stop_words": None, "ngram_range": (1, 2), "lowercase": False}):
        definition = text.tokens(**options)
        stored = json.loads(json.dumps(definition.as_json()))
        assert text.stored_tokens(stored) == definition
    named = text.tokens(tokenizer="shlex:split")
    assert named.as_json()["tokenizer"] == "shlex:split"
    assert text.tokens(tokenizer=words_of).as_json()["tokenizer"] == f"{__name__}:words_of"
    assert text.stored_tokens(named.as_json(), "shlex:split") == named


def test_a_stored_tokenizer_is_not_imported_but_asked_for(tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    stored = {**text.tokens().as_json(), "tokenizer": "trap:cut"}
    with pytest.raises(CorpusError, match=r"found with the tokenizer 'trap:cut'; if you trust it, pass .* tokenizer$"):
        text.stored_tokens(stored)
    with pytest.raises(CorpusError, match=r"tokenizer 'trap:cut'; .* got 'shlex:split'"):
        text.stored_tokens(stored, "shlex:split")
    with pytest.raises(CorpusError, match="tokenizer: has no effect, because the words were found without one"):
        text.stored_tokens(text.tokens().as_json(), "shlex:split")


@pytest.mark.parametrize(
    "change",
    [
        {"stop_words": "/etc/passwd"},
        {"stop_words": 3},
        {"stop_words": [3]},
        {"token_pattern": 3},
        {"token_pattern": "("},
        {"token_pattern": "a" * 1_001},
        {"ngram_range": [1, 10**9]},
        {"ngram_range": 2},
        {"tokenizer": ["a"]},
    ],
)
def test_a_damaged_definition_is_an_error(change):
    with pytest.raises(CorpusError, match="the stored definition of a word is damaged: "):
        text.stored_tokens({**text.tokens().as_json(), **change})
    assert text.stored_tokens({}) == text.tokens()
    for stored in ([], None, "english"):
        with pytest.raises(CorpusError, match="damaged"):
            text.stored_tokens(stored)


def test_a_stored_regular_expression_cannot_hang(monkeypatch):
    monkeypatch.setattr(text, "_PATTERN_SECONDS", 1)
    monkeypatch.setattr(text, "_PATTERN_WORKERS", 1)
    # Python does not notice a signal while it tries this expression.
    definition = text.stored_tokens({**text.tokens().as_json(), "token_pattern": r"\w+x"})
    with pytest.raises(CorpusError, match=r"the saved regular expression .* took more than 1 s"):
        list(text.count_stream(["a" * 1_000_000], definition))
    definition = text.stored_tokens({**text.tokens().as_json(), "token_pattern": r"[a-z]+"})
    monkeypatch.setattr(text, "_PATTERN_SECONDS", 60)
    assert [chunk.words for chunk in text.count_stream(["star moon"], definition)] == [["star", "moon"]]
    monkeypatch.setattr(text, "start_pool", lambda jobs: None)
    with pytest.raises(CorpusError, match="is applied in another process, which could not be started"):
        list(text.count_stream(["star moon"], definition))
