"""Test corpus folders: writing, reading, and errors for damaged folders."""

import contextlib
import gzip
import json
import os
import resource
import shutil
import tracemalloc
import zlib
from pathlib import Path
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.sparse
from hypothesis import HealthCheck, given, settings
from sklearn.feature_extraction.text import CountVectorizer
from test_text import TEXTS, TOKENS

from smoothgrad_jax import Corpus, open_source
from smoothgrad_jax.data import compressed_files, corpus_folder, count_blocks, counting, durable_files, formats, text
from smoothgrad_jax.data.corpus_folder import CountedCorpus, convert, is_folder, open_folder, read
from smoothgrad_jax.data.count_blocks import Block
from smoothgrad_jax.data.documents import Document
from smoothgrad_jax.data.durable_files import SaveError
from smoothgrad_jax.data.errors import CorpusError

ALL = {"min_df": 1, "max_df": 1.0, "max_features": None}
TALES = ["the star and the moon", "", "a moon, a Moon! a dusty moon", "star dust", "12 34 of"] * 2


class Texts(NamedTuple):
    """A source of texts without files."""

    lines: list
    paths: tuple = (Path("tales.txt"),)
    format: str = "text"
    is_text: bool = True
    vocabulary: list | None = None
    num_words: int | None = None
    encoding: str = "utf-8"
    has_metadata: bool = False

    def documents(self):
        yield from map(Document, self.lines)


class Counts(NamedTuple):
    """A source of counts without files."""

    pieces: list
    vocabulary: list | None = None
    num_words: int | None = None
    paths: tuple = (Path("docword.txt"), Path("more.txt"))
    format: str = "uci"
    is_text: bool = False
    encoding: str = "utf-8"
    has_metadata: bool = False

    def blocks(self):
        for piece in self.pieces:
            yield piece if isinstance(piece, Block) else block(piece)


def block(X):
    X = scipy.sparse.csr_array(X)
    return Block(X.indptr.astype(np.int64), X.indices.astype(np.int32), X.data)


def dense(stored):
    corpus = stored.corpus
    ids = np.asarray(corpus.indices).astype(np.int64)
    return scipy.sparse.csr_array((corpus.data, ids, corpus.indptr), corpus.shape).toarray()


def check(stored):
    """Check the properties that every corpus has."""
    (indptr, indices, data, num_words), vocabulary, manifest = stored
    lengths = np.diff(indptr)
    assert indptr[0] == 0
    assert indptr[-1] == len(indices) == len(data) == manifest["num_entries"]
    assert (len(indptr) - 1, num_words) == (manifest["num_docs"], manifest["num_words"])
    assert (lengths >= 0).all()
    document = np.repeat(np.arange(len(lengths)), lengths)
    assert (np.diff(document * num_words + indices) > 0).all()
    assert (data > 0).all()
    assert np.sum(data, dtype=np.float64) == pytest.approx(manifest["num_tokens"])
    assert indices.dtype == (np.uint16 if num_words <= 65_536 else np.int32)
    assert data.dtype in (np.min_scalar_type(int(data.max(initial=1))), np.float32)
    assert vocabulary is None or len(vocabulary) == num_words
    assert manifest["dropped"]["empty_documents"] == (lengths == 0).sum()


@pytest.fixture(name="small_chunks")
def use_small_chunks(monkeypatch):
    """Use many small chunks and spools, on disk."""
    monkeypatch.setattr(text, "_CHUNK", 60)
    monkeypatch.setattr(counting, "_SPOOL_WORDS", 3)
    monkeypatch.setattr(counting, "_SPOOL_BYTES", 100)


LIMITS = st.fixed_dictionaries(
    {
        "min_df": st.integers(1, 3) | st.floats(0, 0.6),
        "max_df": st.integers(1, 6) | st.floats(0.4, 1),
        "max_features": st.none() | st.integers(1, 6),
    }
)


@pytest.mark.filterwarnings("ignore::smoothgrad_jax.data.errors.CorpusWarning")  # of Chinese words
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, TOKENS, st.just(ALL) | LIMITS, st.booleans())
def test_text_is_counted_as_by_scikit_learn(tmp_path_factory, small_chunks, texts, options, limits, to_disk):
    sklearn = CountVectorizer(**options, **limits)
    ours, words = {**options, **limits}, options["stop_words"]
    if isinstance(words, list):  # the list replaces the English one only as `stop_words_only`
        ours |= {"stop_words": "english", "stop_words_only": words}
    if options["ngram_range"] != (1, 1):
        ours["min_npmi"] = -1  # all sequences
    try:
        expected = sklearn.fit_transform(texts).toarray() if texts else None
    except ValueError:
        expected = None
    with contextlib.suppress(CorpusError):
        if to_disk:
            stored = convert(Texts(texts), tmp_path_factory.mktemp("corpus") / "out", **ours)
        else:
            stored = read(Texts(texts), **ours)
        np.testing.assert_array_equal(dense(stored), expected)
        assert stored.vocabulary == sklearn.get_feature_names_out().tolist()
        check(stored)
        every = CountVectorizer(**options).fit_transform(texts).toarray()
        assert stored.manifest["dropped"]["pruned_words"] == every.shape[1] - expected.shape[1]
        assert stored.manifest["dropped"]["pruned_tokens"] == every.sum() - expected.sum()
        lost = (every.sum(1) > 0) & (expected.sum(1) == 0)
        assert stored.manifest["dropped"]["documents_that_lost_all_words"] == lost.sum()
        return
    assert expected is None or any("\n" in word for word in sklearn.get_feature_names_out())


def test_sequences_of_words_are_chosen_and_counted_in_bounded_memory(small_chunks):
    rng = np.random.default_rng(0)
    texts = [" ".join([*rng.choice(["sea", "sail", "wind"], 9), "new", "york"]) for _ in range(30)]
    every = CountVectorizer(ngram_range=(1, 2)).fit(texts)
    stored = read(Texts(texts), ngram_range=(1, 2), **ALL)
    assert stored.vocabulary == ["new", "new york", "sail", "sea", "wind", "york"]
    expected = every.transform(texts).toarray()[:, [every.vocabulary_[word] for word in stored.vocabulary]]
    np.testing.assert_array_equal(dense(stored), expected)
    assert stored.manifest["limits"]["min_npmi"] == 0.4
    assert stored.manifest["tokens"]["ngram_range"] == [1, 2]
    assert read(Texts(texts), ngram_range=(2, 2), **ALL).vocabulary == ["new york"]
    assert len(read(Texts(texts), ngram_range=(1, 2), min_npmi=-1, **ALL).vocabulary) == len(every.vocabulary_)
    # The vocabulary of a model contains the sequences, and needs no choice.
    tokens = text.stored_tokens(json.loads(json.dumps(stored.manifest["tokens"])))
    again = read(Texts(texts), vocabulary=stored.vocabulary, tokens=tokens)
    np.testing.assert_array_equal(dense(again), dense(stored))
    with pytest.raises(CorpusError, match="no sequence of words is left after min_df=1 and min_npmi=1; lower"):
        read(Texts(["sea sail sea sail sea"]), ngram_range=(2, 2), min_npmi=1, min_df=1)
    with pytest.raises(CorpusError, match=r"min_npmi has no effect without .*; pass ngram_range=\(1, 2\)"):
        read(Texts(texts), min_npmi=0.5)
    with pytest.raises(CorpusError, match="min_npmi: expected a number from -1 to 1"):
        read(Texts(texts), ngram_range=(1, 2), min_npmi=2)
    with pytest.raises(CorpusError, match="lowercase has no effect beside a definition of a token"):
        read(Texts(texts), tokens=tokens, lowercase=True)


def test_a_folder_has_the_content_that_is_read(tmp_path):
    reports = []
    stored = convert(Texts(TALES), tmp_path / "a" / "tales", jobs=1, progress=reports.append, **ALL)
    assert reports == [10]
    again = read(Texts(TALES), **ALL)
    np.testing.assert_array_equal(dense(stored), dense(again))
    assert stored.vocabulary == again.vocabulary == ["dust", "dusty", "moon", "star"]
    files = stored.manifest.pop("files")
    assert (stored.manifest.pop("format"), stored.manifest.pop("version")) == ("smoothgrad corpus", 2)
    assert stored.manifest == json.loads(json.dumps(again.manifest))
    assert stored.manifest["num_docs"] == 10
    assert stored.manifest["dropped"]["empty_documents"] == 4
    # The files have the documented formats, which other programs can read.
    folder = tmp_path / "a" / "tales"
    assert {path.name for path in folder.iterdir()} == {*files, "manifest.json"}
    for name, file in files.items():
        content = (folder / name).read_bytes()
        assert file == {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    for name in ("indptr", "indices", "data"):
        np.testing.assert_array_equal(np.load(folder / f"{name}.npy"), getattr(again.corpus, name))
        assert isinstance(getattr(stored.corpus, name), np.memmap)
        assert getattr(stored.corpus, name).dtype == getattr(again.corpus, name).dtype
    assert (folder / "vocabulary.txt").read_text() == "dust\ndusty\nmoon\nstar\n"
    assert [path.name for path in folder.parent.iterdir()] == ["tales"]
    # The options in the manifest count new texts in the same way.
    new = read(Texts(TALES), vocabulary=stored.vocabulary, **stored.manifest["tokens"])
    np.testing.assert_array_equal(dense(new), dense(stored))


def test_corpora_are_converted_from_files(tmp_path):
    """Text with and without a vocabulary, counts with and without words."""
    tales = tmp_path / "tales.jsonl.gz"
    with gzip.open(tales, "wt") as file:
        file.writelines(json.dumps({"id": i, "body": each}) + "\n" for i, each in enumerate(TALES))
    stored = convert(open_source(tales, field="body"), tmp_path / "tales", **ALL)
    np.testing.assert_array_equal(dense(stored), dense(read(Texts(TALES), **ALL)))
    assert stored.manifest["source"] == {"format": "jsonl", "paths": [str(tales)]}
    assert read(open_source(tales, vocabulary=["star"])).manifest["dropped"]["tokens_outside_vocabulary"] == 12
    (tmp_path / "docword.tales.txt").write_text("3\n2\n3\n1 2 7\n3 1 1\n3 2 1\n")
    counts = open_source(tmp_path / "docword.tales.txt")
    assert (dense(read(counts)).tolist(), read(counts).vocabulary) == ([[0, 7], [0, 0], [1, 1]], None)
    (tmp_path / "vocab.tales.txt").write_text("moon\nstar\n")
    stored = convert(open_source(tmp_path / "docword.tales.txt"), tmp_path / "counts")
    assert (dense(stored).tolist(), stored.vocabulary) == ([[0, 7], [0, 0], [1, 1]], ["moon", "star"])
    assert stored.corpus.data.dtype == np.uint8
    again = read(open_source(tmp_path / "counts"), vocabulary=["star", "sun"])
    assert dense(again).tolist() == [[7, 0], [0, 0], [1, 0]]
    source = open_source(tales, field="body")
    os.truncate(tales, 60)
    with pytest.raises(CorpusError, match=r"tales\.jsonl\.gz: the compressed file is truncated"):
        convert(source, tmp_path / "short")
    assert not (tmp_path / "short").exists()


def test_the_default_limits_keep_the_words_of_small_corpora():
    assert read(Texts(["a star"])).vocabulary == ["star"]
    assert read(Texts(["star moon", "star sun", "star dust"])).vocabulary == ["dust", "moon", "star", "sun"]
    common = [f"star w{'abcdefghij'[i % 10]}xx" for i in range(40)]
    assert "star" not in read(Texts(common)).vocabulary
    with pytest.raises(CorpusError, match="found no word in 2 documents: try another token_pattern"):
        read(Texts(["the of", "1 2"]))
    with pytest.raises(CorpusError, match=r"tales.txt: expected documents, got none"):
        read(Texts([]))


def test_text_is_counted_with_a_given_vocabulary(tmp_path, small_chunks):
    stored = convert(Texts(TALES), tmp_path / "tales", vocabulary=["star", "comet", "dust"])
    assert stored.vocabulary == ["star", "comet", "dust"]
    assert dense(stored).tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0], [1, 0, 1], [0, 0, 0]] * 2
    dropped = stored.manifest["dropped"]
    assert dropped["tokens_outside_vocabulary"] == 10  # moon, moon, Moon, dusty, moon; twice
    assert dropped["documents_that_lost_all_words"] == 2
    assert dropped["empty_documents"] == 6
    assert stored.manifest["limits"] is None
    check(stored)
    nothing = convert(Texts(TALES), tmp_path / "nothing", vocabulary=["comet"])
    assert nothing.corpus.shape == (10, 1)
    assert nothing.manifest["num_tokens"] == 0
    check(nothing)
    with pytest.raises(ValueError, match="omit min_df"):
        read(Texts(TALES), vocabulary=["star"], min_df=2)


NUMBERS = st.integers(0, 3) | st.sampled_from([0, 200, 300, 70_000, 2**30, 2**40])
TABLES = st.integers(1, 5).flatmap(
    lambda v: st.lists(st.lists(NUMBERS, min_size=v, max_size=v), min_size=1, max_size=8)
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TABLES, st.integers(1, 4), st.sampled_from([np.int64, np.float32, np.float64]), st.booleans())
def test_counts_are_unchanged(small_chunks, table, pieces, dtype, halved):
    X = np.array(table, dtype) / (2 if halved else 1)
    stored = read(Counts([part for part in np.array_split(X, pieces) if len(part)], num_words=X.shape[1]))
    np.testing.assert_array_equal(dense(stored), X.astype(np.float32) if stored.corpus.data.dtype == np.float32 else X)
    assert stored.vocabulary is None
    assert stored.manifest["limits"] is None
    assert (stored.corpus.data.dtype == np.float32) == bool((X % 1).any() or X.max() >= 2**32)
    check(stored)


def test_words_of_counts_are_removed_only_by_given_limits(tmp_path):
    X = np.array([[1, 0, 2, 0, 1], [1, 3, 0, 0, 0], [1, 0, 0, 0, 0], [5, 1, 0, 0, 0]])
    source = Counts([X[:1], X[1:]], vocabulary=list("abcde"))
    assert read(source).vocabulary == list("abcde")
    assert read(Counts([X])).corpus.num_words == 5
    assert read(Counts([X], num_words=9)).corpus.num_words == 9
    stored = convert(source, tmp_path / "common", min_df=2)
    assert stored.vocabulary == ["a", "b"]
    np.testing.assert_array_equal(dense(stored), X[:, :2])
    assert stored.manifest["dropped"] == {
        "empty_documents": 0,
        "documents_that_lost_all_words": 0,
        "tokens_outside_vocabulary": 0,
        "pruned_words": 2,  # d never occurs
        "pruned_tokens": 3,
    }
    rare = read(source, max_df=0.5)
    assert rare.vocabulary == list("bcde")
    assert rare.manifest["dropped"]["documents_that_lost_all_words"] == 1
    assert read(source, max_features=2).vocabulary == ["a", "b"]
    with pytest.raises(CorpusError, match=r"min_df=5 requires .* at least 5, .* in 4 documents; lower min_df$"):
        convert(source, tmp_path / "none", min_df=5)
    assert [path.name for path in tmp_path.iterdir()] == ["common"]


@pytest.mark.parametrize(
    "options",
    [
        {"lowercase": False},
        {"token_pattern": "x"},
        {"stop_words": None},
        {"ngram_range": (1, 2)},
        {"jobs": 2},
        {"tokens": text.tokens()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_counts_have_no_options_of_text(options):
    with pytest.raises(CorpusError, match=rf"docword\.txt: {next(iter(options))}.* has no meaning for uci"):
        read(Counts([np.ones((2, 2))]), **options)


def test_counts_are_matched_with_a_given_vocabulary():
    X = np.array([[1, 2, 4], [0, 0, 8], [0.5, 0, 0]])
    source = Counts([X], vocabulary=["star", "moon", "star"])
    stored = read(source, vocabulary=["comet", "star"])
    assert dense(stored).tolist() == [[0, 5], [0, 8], [0, 0.5]]
    assert stored.vocabulary == ["comet", "star"]
    assert stored.manifest["dropped"]["tokens_outside_vocabulary"] == 2
    with pytest.raises(CorpusError, match=r"docword.txt and 1 more: its words have no names"):
        read(Counts([X]), vocabulary=["star"])


def test_a_folder_is_a_source(tmp_path, monkeypatch):
    first = convert(Texts(TALES), tmp_path / "first", **ALL)
    source = open_source(tmp_path / "first")
    for piece in (1, 3, 1000):
        monkeypatch.setattr(count_blocks, "BLOCK_ENTRIES", piece)
        again = convert(source, tmp_path / "again", overwrite=True)
        np.testing.assert_array_equal(dense(again), dense(first))
        assert again.vocabulary == first.vocabulary
    assert read(source, min_df=4).vocabulary == ["dust", "moon", "star"][1:]
    # A corpus folder can replace itself.
    assert convert(source, tmp_path / "first", min_df=4, overwrite=True).vocabulary == ["moon", "star"]


def test_more_than_65536_words_have_ids_of_four_bytes():
    wide = Block(np.array([0, 2, 3]), np.array([0, 65_535, 7], np.int32), np.array([1, 2, 3], np.float32))
    assert read(Counts([wide])).corpus.indices.dtype == np.uint16
    stored = read(Counts([wide._replace(indices=np.array([0, 65_536, 7], np.int32))]))
    assert stored.corpus.indices.dtype == np.int32
    check(stored)


def test_a_memory_mapped_corpus_packs_as_one_in_memory(tmp_path):
    """Both types of word ids, with their largest values."""
    rng = np.random.default_rng(0)
    for num_words in (300, 65_536, 70_000):
        X = scipy.sparse.random_array((200, num_words), density=8 / num_words, rng=rng, format="lil")
        X[3, num_words - 1] = 1
        X = scipy.sparse.csr_array(X * 300).ceil()
        folder = tmp_path / str(num_words)
        corpus = convert(Counts([X], num_words=num_words), folder).corpus
        plain, layout = Corpus.of(X), corpus.layout(50)
        assert plain.layout(50) == layout
        for part, same in ((corpus, plain), (corpus.part(2, 120), plain.part(2, 120))):
            rows = np.concatenate([[3, 1], rng.integers(0, part.num_docs, 48)])
            for a, b in zip(part.pack(rows, layout)[:6], same.pack(rows, layout)[:6], strict=True):
                np.testing.assert_array_equal(a, b)


RECORDS = [
    {"id": "x1", "text": "star moon", "date": "2020-01-01", "n": 3},
    {"id": None, "text": "moon dust", "date": None, "n": 2.5, "tags": ["a", "b"]},
    {"id": 'ü"\t\n', "text": "", "date": "2021", "n": True},
]


def records(folder):
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


@pytest.mark.usefixtures("small_chunks")
def test_ids_and_kept_fields_are_stored_in_the_folder(tmp_path):
    source = open_source(records(tmp_path), keep=["n", "date", "tags"])
    expected = list(source.metadata())
    assert [each.fields for each in expected] == [
        (3, "2020-01-01", None),
        (2.5, None, '["a", "b"]'),
        (True, "2021", None),
    ]
    for options in (ALL, {"vocabulary": ["moon", "star"]}):
        stored = convert(source, tmp_path / "corpus", overwrite=True, **options)
        assert stored.manifest["metadata"] == {"id": "id", "keep": ["n", "date", "tags"]}
        again = open_source(tmp_path / "corpus")
        assert (again.id, again.keep) == ("id", ("n", "date", "tags"))
        assert list(again.metadata()) == expected
        corpus_folder.open_folder(tmp_path / "corpus", verify=True)
    dates = open_source(tmp_path / "corpus", keep=["date"])
    assert [(each.id, *each.fields) for each in dates.metadata()] == [(m.id, m.fields[1]) for m in expected]
    # The metadata of a folder that is converted again, with other words, are those of the folder.
    convert(dates, tmp_path / "again", vocabulary=["dust"])
    assert list(open_source(tmp_path / "again").metadata()) == list(dates.metadata())
    with pytest.raises(
        CorpusError, match=r"again: keep='n': the corpus keeps 'date'; convert the source again to keep"
    ):
        open_source(tmp_path / "again", keep=["n"])


def test_a_folder_without_metadata_has_no_file_of_them(tmp_path):
    stored = convert(Counts([np.eye(3)]), tmp_path / "corpus")
    assert "metadata" not in stored.manifest
    assert not (tmp_path / "corpus" / "metadata.jsonl").exists()
    source = open_source(tmp_path / "corpus")
    assert (source.has_metadata, list(source.metadata())) == (False, [])


def test_damaged_metadata_are_reported(tmp_path):
    convert(open_source(records(tmp_path), keep=["date"]), tmp_path / "corpus", **ALL)
    file = tmp_path / "corpus" / "metadata.jsonl"
    data = file.read_bytes()
    for damaged in (
        data.replace(b"2020", b"2\n20"),
        data.replace(b"null", b"[1]]"),
        data.replace(b'"2021"', b'"2","'),
        data.replace(b"[null,null]\n", b" " * 11 + b"\n"),
        data.replace(b'"x1",', b'"x1" '),
        data[:-12] + b"\n" * 12,
    ):
        file.write_bytes(damaged)
        if len(damaged) == len(data):
            with pytest.raises(CorpusError, match=r"metadata\.jsonl: damaged"):
                list(open_source(tmp_path / "corpus").metadata())
            with pytest.raises(CorpusError, match=r"metadata\.jsonl: damaged: expected the checksum"):
                corpus_folder.open_folder(tmp_path / "corpus", verify=True)
        else:
            with pytest.raises(CorpusError, match=r"metadata\.jsonl: damaged: expected \d+ bytes"):
                open_source(tmp_path / "corpus")
    file.unlink()
    with pytest.raises(CorpusError, match=r"metadata\.jsonl: missing"):
        open_source(tmp_path / "corpus")


def test_memory_does_not_grow_with_the_metadata(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed_files, "CHUNK_BYTES", 1 << 16)
    path = tmp_path / "long.csv"
    with path.open("w") as file:
        file.write("id,note,text\n")
        file.writelines(f"{d:06d},{'x' * 2_000},moon\n" for d in range(10_000))
    source = open_source(path, keep=["note"])
    tracemalloc.start()
    try:
        convert(source, tmp_path / "corpus", jobs=1, **ALL)
        count = sum(1 for _ in open_source(tmp_path / "corpus").metadata())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 10_000
    assert (tmp_path / "corpus" / "metadata.jsonl").stat().st_size > 20e6
    assert peak < 8e6


def test_an_existing_folder_is_replaced_only_by_a_complete_corpus(tmp_path):
    out = tmp_path / "out"
    convert(Texts(["star"]), out)
    with pytest.raises(CorpusError, match="out: exists already"):
        convert(Texts(["moon"]), out)
    assert open_folder(out).vocabulary == ["star"]
    with pytest.raises(CorpusError, match="found no word in 1 document:"):
        convert(Texts(["1"]), out, overwrite=True)
    assert open_folder(out).vocabulary == ["star"]
    assert convert(Texts(["moon"]), out, overwrite=True).vocabulary == ["moon"]
    with pytest.MonkeyPatch.context() as patch:  # interrupted between the two renames
        rename = Path.rename

        def interrupted(path, target):
            if "partial" in path.name:
                raise KeyboardInterrupt
            return rename(path, target)

        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(Texts(["sun"]), out, overwrite=True)
    assert open_folder(out, verify=True).vocabulary == ["moon"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    for path in (other, other / "thesis.txt"):
        assert not is_folder(path)
        with pytest.raises(CorpusError, match="is not a corpus folder; it is not overwritten"):
            convert(Texts(["moon"]), path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("error", [BrokenError, KeyboardInterrupt, CorpusError])
def test_a_failed_conversion_leaves_nothing(tmp_path, error, small_chunks):
    def documents():
        yield from TALES
        raise error

    with pytest.raises(error):
        convert(Texts(documents()), tmp_path / "out", jobs=1)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error(tmp_path):
    X = np.ones((100, 100))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit, spool in ((3_000, 1 << 20), (3_000, 100)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(counting, "_SPOOL_BYTES", spool)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            try:
                with pytest.raises(SaveError, match=r"out: could not be written: File too large; .* removed"):
                    convert(Counts([X]), tmp_path / "out")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="out: could not be written: "):
        convert(Texts(["star"]), tmp_path / "file" / "out")


@pytest.fixture(name="folder", scope="module")
def some_folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("corpus") / "out"
    convert(Texts(TALES), out, **ALL)
    return out


def change(path, old, new):
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


def forge(path, **changes):
    """Change the manifest and give it a valid checksum."""
    file = path / "manifest.json"
    manifest = durable_files.read_json(file, corpus_folder.FORMAT, corpus_folder.VERSION)
    file.unlink()
    durable_files.write_json(file, manifest | changes)


def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


def replace_by_link(path, target):
    path.unlink()
    path.symlink_to(target)


def alter(path, name, position, value):
    """Change an element of an array, as a folder from someone else could have it: with the same size and no check."""
    array = np.load(path / name, mmap_mode="r+")
    array[position] = value
    array.flush()


DAMAGE = [
    (lambda path: shutil.rmtree(path), "manifest.json: missing; every smoothgrad corpus has this file"),
    (lambda path: (path / "manifest.json").write_bytes(b"\xff{"), "manifest.json: damaged, or not a smoothgrad corpus"),
    (lambda path: (path / "manifest.json").write_text("[" * 100_000), "manifest.json: damaged, or not a"),
    (lambda path: (path / "manifest.json").write_text('{"format": "other"}'), "not a smoothgrad corpus"),
    (lambda path: (path / "manifest.json").write_text("[1]"), "not a smoothgrad corpus"),
    (lambda path: forge(path, version=1), "format version 1, this package reads version 2: convert the source again"),
    (lambda path: forge(path, version=3), "format version 3, this package reads version 2: upgrade"),
    (lambda path: change(path / "manifest.json", b'"num_docs": 10', b'"num_docs": 11'), "its checksum does not match"),
    (lambda path: forge(path, num_docs="x"), "manifest.json: damaged"),
    (lambda path: forge(path, num_docs=float("inf")), "manifest.json: damaged"),
    (lambda path: forge(path, num_docs=11), "indptr.npy: damaged: expected"),
    (lambda path: forge(path, num_words=5), "expected 5 words, got 4"),
    (lambda path: forge(path, files={}), "indptr.npy: not named in the description"),
    (lambda path: (path / "data.npy").unlink(), "data.npy: missing"),
    (lambda path: os.truncate(path / "indices.npy", 130), "indices.npy: damaged: expected 152 bytes, got 130"),
    (lambda path: change(path / "indices.npy", b"NUMPY", b"DUMPY"), "indices.npy: damaged: expected an array"),
    (lambda path: change(path / "indices.npy", b"<u2", b"<i2"), "indices.npy: damaged: expected <u2 or <i4"),
    (lambda path: change(path / "data.npy", b"(12,)", b"(11,)"), "data.npy: damaged"),
    (lambda path: change(path / "data.npy", b"(12,)", b"(9e9)"), "data.npy: damaged"),
    (
        lambda path: change(path / "indptr.npy", np.int64(12).tobytes() * 2, bytes(16)),
        "from 0 to 12, got 0 to 0",
    ),
    (lambda path: change(path / "vocabulary.txt", b"moon\n", b"moon "), "vocabulary.txt: damaged: expected 4 words"),
    (lambda path: forge(path, num_words=0), "manifest.json: damaged: num_words must be an integer from 1 to"),
    (lambda path: forge(path, num_words=-5), "manifest.json: damaged: num_words must be an integer from 1 to"),
    (lambda path: forge(path, num_words=200_000_000), "indices.npy: damaged: uint16 are not the ids of 200000000"),
    (lambda path: forge(path, num_tokens=None), "num_tokens must be a finite number of at least 0, got None"),
    (lambda path: forge(path, dropped={}), "dropped.tokens_outside_vocabulary is missing"),
    (lambda path: forge(path, files={"data.npy": {"bytes": 1}}), r"files\.data\.npy\.crc32 is missing"),
    (lambda path: replace_by_pipe(path / "data.npy"), "data.npy: expected a regular file, got a folder, a pipe or a"),
    (lambda path: replace_by_pipe(path / "manifest.json"), "manifest.json: expected a regular file, got a folder, a"),
    (lambda path: replace_by_link(path / "data.npy", "/dev/zero"), "data.npy: is a link that leads out of its folder"),
    (lambda path: replace_by_link(path / "vocabulary.txt", "/etc/passwd"), "vocabulary.txt: is a link that leads out"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_folder_is_an_error(folder, tmp_path, damage, message):
    shutil.copytree(folder, tmp_path / "copy")
    damage(tmp_path / "copy")
    with pytest.raises(CorpusError, match=message):
        open_folder(tmp_path / "copy")


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_change_of_a_byte_is_detected(folder, tmp_path_factory, data):
    """Without ``verify`` a changed byte may raise CorpusError; with ``verify`` every change of an array does."""
    copy = tmp_path_factory.mktemp("copy") / "copy"
    shutil.copytree(folder, copy)
    path = copy / data.draw(st.sampled_from(sorted(each.name for each in folder.iterdir())))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with contextlib.suppress(CorpusError):
        assert isinstance(open_folder(copy), CountedCorpus)
    if path.name != "manifest.json":
        with pytest.raises(CorpusError, match="damaged"):
            open_folder(copy, verify=True)


@pytest.mark.parametrize("value", [-3, 5, 10**12])
def test_offsets_that_fall_are_refused(folder, tmp_path, value):
    """Compiled code would read and write outside of its arrays."""
    shutil.copytree(folder, tmp_path / "copy")
    alter(tmp_path / "copy", "indptr.npy", 2, value)
    with pytest.raises(CorpusError, match=r"indptr\.npy: damaged: the entries of document [12] are "):
        open_folder(tmp_path / "copy")


FLOATS = np.array([[1.5, 0, 2], [0, 3, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("data.npy", np.nan, "the count of word 1 is nan"),
        ("data.npy", -3, r"the count of word 1 is -3\.0"),
        ("data.npy", 3e38, r"the count of word 1 is 3"),
        ("indices.npy", 7, r"word id 7 is out of range 0 … 2"),
    ],
)
def test_bad_entries_are_refused_where_they_are_used(tmp_path, name, value, message):
    convert(Counts([FLOATS]), tmp_path / "in")
    alter(tmp_path / "in", name, 2, value)
    corpus = open_folder(tmp_path / "in").corpus
    for use in (corpus.word_counts, lambda: corpus.select([1])):
        with pytest.raises(ValueError, match=f"document 1: {message}"):
            use()


def test_an_altered_count_is_not_copied_to_a_folder_with_new_checksums(tmp_path):
    convert(Counts([FLOATS]), tmp_path / "in")
    alter(tmp_path / "in", "data.npy", 2, 4)  # a valid count, and a file of the same size
    with pytest.raises(CorpusError, match=r"data\.npy: damaged: expected the checksum"):
        convert(open_source(tmp_path / "in"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_verify_accepts_a_complete_folder(folder):
    assert open_folder(folder, verify=True).vocabulary == ["dust", "dusty", "moon", "star"]


def test_a_word_with_a_line_break_is_an_error(tmp_path):
    with pytest.raises(CorpusError, match=r"cannot be a line of vocabulary\.txt; for text, try another"):
        convert(Texts(["a\nb,c"]), tmp_path / "out", token_pattern="[^,]+")


def test_implausibly_large_ids_are_errors(tmp_path):
    """An array with an element per id would need 15 GB."""
    for kind, line in (("svmlight", b"1 2000000000:3\n"), ("ldac", b"1 2000000000:3\n")):
        path = tmp_path / kind
        path.write_bytes(line)
        with pytest.raises(CorpusError, match=r"word id 2,000,000,000 after 1 entry, which is not plausible"):
            read(open_source(path, format=kind))


@given(
    st.binary(max_size=200) | st.text("0123456789 :\n.", max_size=60).map(str.encode),
    st.sampled_from([None, *(name for name in formats.NAMES if name != "folder")]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_bytes_are_a_corpus_or_a_corpus_error(tmp_path, data, kind):
    path = tmp_path / "any"
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    with contextlib.suppress(CorpusError):
        stored = read(open_source(path, format=kind))
        assert stored.corpus.num_docs == stored.manifest["num_docs"] > 0
        assert stored.corpus.num_words == stored.manifest["num_words"] > 0
