"""Test the formats against scipy matrices, for every compression, every error message, and arbitrary bytes."""

import bz2
import csv
import datetime
import decimal
import gzip
import io
import itertools
import json
import lzma
import math
import os
import pickle
import sys
import tempfile
import threading
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import scipy.io
import scipy.sparse
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sklearn.datasets import dump_svmlight_file

from smoothgrad_jax.data import compressed_files, corpus_folder, count_blocks, formats, local_files, records
from smoothgrad_jax.data.errors import CorpusError
from smoothgrad_jax.data.sources import open_source, recognise

TEXT_FORMATS = tuple(name for name in formats.NAMES if formats.get(name).documents)
COUNT_FORMATS = tuple(name for name in formats.NAMES if formats.get(name).blocks and name != "folder")
COMPRESSION = {"plain": bytes, "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
TEXTS = ["the cat sat", "ein Satz, mit “Zeichen”", 'say "hello"\tto all', "δοκιμή 文書 🙂"]


def matrix(seed=0, shape=(23, 17), fractions=False):
    """Return a matrix with empty first, last and middle documents."""
    rng = np.random.default_rng(seed)
    table = rng.poisson(0.4, shape) * rng.choice([1, 0.25, 2.5] if fractions else [1, 100], shape)
    table[[0, 7, 8, -1]] = 0
    return scipy.sparse.csr_array(table)


def uci(X):
    X = X.tocoo()
    lines = [*X.shape, X.nnz, *(f"{d + 1} {w + 1} {c:g}" for d, w, c in zip(X.row, X.col, X.data, strict=True))]
    return "".join(f"{line}\n" for line in lines).encode()


def mm(X, **options):
    file = io.BytesIO()
    scipy.io.mmwrite(file, scipy.sparse.coo_array(X), symmetry="general", **options)
    return file.getvalue()


def ldac(X, base=0):
    rows = (X[[d]] for d in range(X.shape[0]))
    pairs = ([f"{w + base}:{c:g}" for w, c in zip(row.indices, row.data, strict=True)] for row in rows)
    return "".join(" ".join([str(len(line)), *line]) + "\n" for line in pairs).encode()


def svmlight(X, base=0, **options):
    file = io.BytesIO()
    X = scipy.sparse.csr_matrix(X)
    X.indptr, X.indices = X.indptr.astype(np.int32), X.indices.astype(np.int32)
    labels = np.arange(X.shape[0]) - 3.5
    dump_svmlight_file(X, labels, file, zero_based=not base, **options)
    return file.getvalue()


def npz(X, layout="csr", compressed=True):
    file = io.BytesIO()
    scipy.sparse.save_npz(file, X.asformat(layout), compressed)
    return file.getvalue()


COUNTS = {"uci": uci, "mm": mm, "ldac": ldac, "svmlight": svmlight, "npz": npz}


def jsonl(texts):
    return "".join(json.dumps({"id": 3, "text": text, "title": "t"}) + "\n" for text in texts).encode()


def table(texts, delimiter):
    file = io.StringIO(newline="")
    rows = csv.writer(file, delimiter=delimiter)
    rows.writerows([("id", "text"), *enumerate(texts)])
    return file.getvalue().encode()


def parquet(texts):
    file = io.BytesIO()
    columns = {"id": [str(i) for i in range(len(texts))], "text": texts}
    pyarrow.parquet.write_table(pyarrow.table(columns), file, row_group_size=2)
    return file.getvalue()


WRITTEN = {
    "text": lambda texts: "\n".join(texts).encode(),
    "jsonl": jsonl,
    "csv": lambda texts: table(texts, ","),
    "tsv": lambda texts: table(texts, "\t"),
}


def file(folder, data, name="corpus"):
    path = folder / name
    path.write_bytes(data)
    return path


def joined(source):
    """Return all blocks as one matrix, after a check of each block."""
    indptr, indices, data = [np.zeros(1, np.int64)], [], []
    for block in source.blocks():
        assert (block.indptr.dtype, block.indices.dtype, block.data.dtype) == (np.int64, np.int32, np.float32)
        assert block.indptr[0] == 0
        assert block.indptr[-1] == len(block.indices) == len(block.data)
        assert (np.diff(block.indptr) >= 0).all()
        assert ((block.data > 0) & np.isfinite(block.data)).all()
        docs = np.repeat(np.arange(len(block.indptr) - 1), np.diff(block.indptr))
        assert (np.diff(docs * 2.0**32 + block.indices) > 0).all()
        indptr.append(indptr[-1][-1] + block.indptr[1:])
        indices.append(block.indices)
        data.append(block.data)
    indices = np.concatenate(indices)
    num_words = source.num_words or indices.max(initial=0) + 1
    indptr = np.concatenate(indptr)
    return scipy.sparse.csr_array((np.concatenate(data), indices, indptr), shape=(len(indptr) - 1, num_words))


def assert_same(found, expected):
    found, expected = found.toarray(), expected.toarray().astype(np.float32)
    assert len(found) == len(expected)
    width = max(found.shape[1], expected.shape[1])
    pad = [np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in (found, expected)]
    np.testing.assert_array_equal(*pad)


@pytest.fixture(params=[None, 64], ids=["one chunk", "many chunks"])
def chunks(request, monkeypatch):
    """Run with the usual sizes of chunks and blocks, and with small ones."""
    if request.param:
        monkeypatch.setattr(compressed_files, "CHUNK_BYTES", request.param)
        monkeypatch.setattr(count_blocks, "BLOCK_ENTRIES", 10)
        monkeypatch.setattr(count_blocks, "_INSPECTED", 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("readers")


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("compression", COMPRESSION)
@pytest.mark.parametrize("fractions", [False, True], ids=["integers", "fractions"])
@pytest.mark.parametrize("kind", COUNTS)
def test_counts_are_read_as_written(tmp_path, kind, fractions, compression):
    X = matrix(fractions=fractions)
    path = file(tmp_path, COMPRESSION[compression](COUNTS[kind](X)))
    assert recognise(path) == kind
    source = open_source(path)
    assert source.format == kind
    assert not source.is_text
    assert source.num_words == (17 if kind in ("uci", "mm", "npz") else None)
    for _ in range(2):
        assert_same(joined(source), X)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("compression", COMPRESSION)
@pytest.mark.parametrize("kind", WRITTEN)
def test_texts_are_read_as_written(tmp_path, kind, compression):
    path = file(tmp_path, COMPRESSION[compression](WRITTEN[kind](TEXTS)))
    assert recognise(path) == kind
    source = open_source(path)
    assert source.is_text
    assert source.vocabulary is None
    for _ in range(2):
        assert list(source.texts()) == TEXTS


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1))
@settings(max_examples=40, deadline=None)
def test_records_contain_any_text(folder, texts):
    for kind in ("jsonl", "csv", "tsv"):
        # Python's csv before 3.13 writes a carriage return without quotes, and then reads it as the end of a row.
        texts = [text.replace("\r", "") for text in texts]
        path = file(folder, WRITTEN[kind](texts), "records")
        assert list(open_source(path, format=kind, field="text").texts()) == texts


def test_files_of_a_folder_are_documents(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").write_text("no document")
    contents = {"a.txt": "one\ntwo", "b/c.txt.gz": "three", "b/d": "", "e": "\ufeffσ\r\n"}
    for name, text in contents.items():
        file(tmp_path, gzip.compress(text.encode()) if name.endswith("gz") else text.encode(), name)
    source = open_source(tmp_path)
    assert source.format == "files"
    assert list(source.texts()) == ["one\ntwo", "three", "", "σ\r\n"]
    assert list(open_source(tmp_path / "e", format="files").texts()) == ["σ\r\n"]


def test_several_files_form_one_corpus(tmp_path):
    X, Y = matrix(0), matrix(1)
    for kind, write in COUNTS.items():
        paths = [file(tmp_path, COMPRESSION[pack](write(Z)), kind + pack) for Z, pack in ((X, "plain"), (Y, "gz"))]
        assert_same(joined(open_source(paths)), scipy.sparse.vstack([X, Y]))
    shards = tmp_path / "shards"
    shards.mkdir()
    for name in "ab":
        file(shards, jsonl([name]), name)
    assert list(open_source(shards, format="jsonl").texts()) == ["a", "b"]
    with pytest.raises(CorpusError, match=r"one text per file, but a is recognised as jsonl; pass format='jsonl' to"):
        open_source(shards)
    with pytest.raises(CorpusError, match=r"a: expected uci as in .*uciplain, got jsonl"):
        open_source([tmp_path / "uciplain", shards / "a"])
    narrow = file(tmp_path, uci(matrix(shape=(23, 9))), "narrow")
    with pytest.raises(CorpusError, match=r"narrow: expected 17 words as in .*uciplain, got 9"):
        open_source([tmp_path / "uciplain", narrow])


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_folder_of_tables_is_not_read_as_one_document_per_file(tmp_path, kind):
    for name in ("a", "b"):
        file(tmp_path, WRITTEN[kind]([name, f"{name}{name}"]), f"{name}.{kind}")
    with pytest.raises(CorpusError, match=rf"a\.{kind} is recognised as {kind}; pass format='{kind}'.* format='files'"):
        open_source(tmp_path)
    assert list(open_source(tmp_path, format=kind).texts()) == ["a", "aa", "b", "bb"]
    assert len(list(open_source(tmp_path, format="files").texts())) == 2


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("kind", ["uci", "mm", "csc", "coo"])
def test_triplets_in_any_order_are_sorted(tmp_path, kind):
    X = matrix(fractions=True)
    order = np.random.default_rng(1).permutation(X.nnz)
    table = X.tocoo()
    mixed = scipy.sparse.coo_array((table.data[order], (table.row[order], table.col[order])), shape=X.shape)
    data = {"uci": uci, "mm": mm, "coo": lambda X: npz(X, "coo"), "csc": lambda X: npz(X, "csc")}[kind](mixed)
    assert_same(joined(open_source(file(tmp_path, data))), X)


def test_triplets_that_are_sorted_by_word(tmp_path, monkeypatch):
    """Triplets of one word are also sorted by document; the order of the file is not known from them."""
    monkeypatch.setattr(count_blocks, "_INSPECTED", 10)
    monkeypatch.setattr(compressed_files, "CHUNK_BYTES", 40)
    X = scipy.sparse.csr_array(np.arange(1, 121).reshape(40, 3))
    assert_same(joined(open_source(file(tmp_path, mm(X.tocsc().tocoo())))), X)


def test_an_order_that_breaks_later_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(count_blocks, "_INSPECTED", 4)
    monkeypatch.setattr(compressed_files, "CHUNK_BYTES", 12)
    lines = ["3", "2", "6", "1 2 1", "1 1 2", "2 1 1", "2 2 1", "3 1 1", "1 2 5"]
    path = file(tmp_path, "\n".join(lines).encode())
    with pytest.raises(
        CorpusError, match=r"corpus, line 9: expected documents in order, got 1 after 3; pass sort=True"
    ):
        joined(open_source(path))
    expected = scipy.sparse.csr_array([[2, 6], [1, 1], [1, 0]])
    assert_same(joined(open_source(path, sort=True)), expected)
    coo = npz(scipy.sparse.coo_array(([1, 2, 3], ([0, 1, 0], [0, 1, 0])), shape=(2, 2)), "coo")
    assert_same(joined(open_source(file(tmp_path, coo))), scipy.sparse.csr_array([[4, 0], [0, 2]]))


@pytest.mark.usefixtures("chunks")
def test_duplicate_pairs_are_added_and_zeros_are_dropped(tmp_path):
    expected = scipy.sparse.csr_array([[0, 4.5, 0], [0, 0, 0], [1, 0, 2]])
    lines = ["3 3 6", "1 2 1.5", "1 2 3", "1 1 0", "2 1 0e0", "3 3 2", "3 1 1"]
    kinds = {
        "uci": "\n".join(lines[0].split() + lines[1:]),
        "mm": "\n".join(["%%MatrixMarket matrix coordinate real general", "% words", *lines]),
        "ldac": "3 1:1.5 1:3 0:0\n0\n2 2:2 0:1",
        "svmlight": "# made by hand\n-1 1:1.5 1:3 0:0 # a\n+1\n2,3 qid:4 2:2 0:1",
    }
    for kind, text in kinds.items():
        for end in ("\n", " \r\n", "\n \t", *(["\n\n"] if kind != "uci" else [])):
            path = file(tmp_path, ("\ufeff" + text.replace("\n", end)).encode())
            assert_same(joined(open_source(path, format=kind)), expected)


@pytest.mark.usefixtures("chunks")
def test_a_document_with_many_entries_of_few_words(tmp_path):
    """One document can have any number of entries if it has few distinct words."""
    entries = [(1 + d, 1 + w % 3) for d, w in itertools.product([1], range(200))] + [(3, 1)]
    lines = [3, 3, len(entries), *(f"{d} {w} 1" for d, w in entries)]
    path = file(tmp_path, "\n".join(map(str, lines)).encode())
    assert_same(joined(open_source(path)), scipy.sparse.csr_array([[0, 0, 0], [67, 67, 66], [1, 0, 0]]))
    assert_same(joined(open_source(path, sort=True)), scipy.sparse.csr_array([[0, 0, 0], [67, 67, 66], [1, 0, 0]]))


def test_too_many_distinct_words_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(count_blocks, "MAX_DISTINCT", 20)
    monkeypatch.setattr(count_blocks, "BLOCK_ENTRIES", 8)
    monkeypatch.setattr(compressed_files, "CHUNK_BYTES", 16)
    X = scipy.sparse.csr_array(np.ones((2, 30)))
    for write in COUNTS.values():
        with pytest.raises(CorpusError, match=r"at most 20 distinct words in a document"):
            joined(open_source(file(tmp_path, write(X))))


@pytest.mark.parametrize("write", [ldac, svmlight])
def test_ids_can_start_from_0_or_1(tmp_path, write):
    X = scipy.sparse.csr_array([[0, 2, 1], [3, 0, 0], [0, 1, 1]])
    words = ["a", "b", "c"]
    for base in (0, 1):
        path = file(tmp_path, write(X, base))
        assert_same(joined(open_source(path, first_id=base)), X)
        # With a vocabulary the base is known: id 0 occurs, or id V does.
        assert_same(joined(open_source(path, vocabulary=words)), X)
    shifted = scipy.sparse.csr_array([[0, 0, 2, 1], [0, 3, 0, 0], [0, 0, 1, 1]])
    assert_same(joined(open_source(path)), shifted)
    zero = file(tmp_path, write(X, 0), "zero")
    with pytest.raises(CorpusError, match=r"zero, line 2: expected a word id from 1 to .*, got 0; .* pass first_id=0"):
        joined(open_source(zero, first_id=1))
    with pytest.raises(CorpusError, match=r"line 1: expected a word id from 0 to 1, got 2 for a vocabulary of 2 words"):
        joined(open_source(zero, vocabulary=["a", "b"]))


def test_ids_beyond_a_vocabulary_that_was_found_name_the_file(tmp_path):
    words = file(tmp_path, b"a\nb\n", "vocab.txt")
    with pytest.raises(
        CorpusError, match=rf"got 2 for a vocabulary of 2 words.*; to ignore {words}, pass vocab.*=False"
    ):
        joined(open_source(file(tmp_path, b"2 0:1 2:1\n")))


def test_ids_of_triplets_can_start_from_0(tmp_path):
    path = file(tmp_path, b"2\n3\n2\n0 0 1\n1 2 4\n")
    with pytest.raises(CorpusError, match=r"corpus, line 4: expected a document from 1 to 2, got 0; .* first_id=0"):
        joined(open_source(path))
    assert_same(joined(open_source(path, first_id=0)), scipy.sparse.csr_array([[1, 0, 0], [0, 0, 4]]))


def test_vocabularies_are_found_and_checked(tmp_path):
    X = matrix()
    words = [f"wörd {i}" for i in range(17)]
    text = "\r\n".join(words) + "\r\n\r\n"
    file(tmp_path, gzip.compress(uci(X)), "docword.some.txt.gz")
    file(tmp_path, "\n".join(words[:9]).encode(), "vocab.txt")
    assert open_source(tmp_path / "docword.some.txt.gz").vocabulary is None
    file(tmp_path, text.encode(), "vocab.some.txt")
    source = open_source(tmp_path / "docword.some.txt.gz")
    assert (source.vocabulary, source.num_words, source.words_file) == (words, 17, tmp_path / "vocab.some.txt")
    path = file(tmp_path, npz(X), "x.npz")
    with pytest.raises(CorpusError, match=r"vocab.txt: expected V = 17 words for .*x.npz, got 9"):
        open_source(path)
    with pytest.raises(CorpusError, match=r"got 9; to ignore the file, pass vocabulary=False"):
        open_source(path)
    assert open_source(path, vocabulary=False).vocabulary is None
    assert open_source(path, vocabulary=tmp_path / "vocab.some.txt").vocabulary == words
    (tmp_path / "vocab.txt").unlink()
    file(tmp_path, bz2.compress(text.encode()), "vocabulary.txt.bz2")
    assert open_source(path).vocabulary == words
    for count in (16, 18):
        other = file(tmp_path, "\n".join(map(str, range(count))).encode(), "other")
        with pytest.raises(CorpusError, match=rf"other: expected V = 17 words.*, got {count}"):
            open_source(path, vocabulary=other)
    with pytest.raises(CorpusError, match="the vocabulary: expected V = 17 words"):
        open_source(path, vocabulary=words[1:])
    gap = file(tmp_path, b"a\n\nb\n", "gap")
    with pytest.raises(CorpusError, match="gap, line 2: expected a word, got a blank line"):
        open_source(path, vocabulary=gap)
    pairs = file(tmp_path, ldac(X), "x.dat")
    assert open_source(pairs).num_words == 17
    text = file(tmp_path, b"a text\n", "text")
    assert open_source(text).vocabulary is None
    assert open_source(text, vocabulary=["a"]).vocabulary == ["a"]


def test_every_line_is_a_document_without_its_line_end(tmp_path):
    path = file(tmp_path, b"\xef\xbb\xbfone\r\n\r\n \t\ntwo\x0b\x0c\xe2\x80\xa8still\n\n")
    assert list(open_source(path).texts()) == ["one", "", " \t", "two\x0b\x0c\u2028still", ""]


def test_quoted_newlines_and_empty_records_are_kept(tmp_path):
    path = file(tmp_path, b'id,body\r\n1,"a\n\n""b"""\r\n2,\r\n\r\n3,c')
    assert list(open_source(path).texts()) == ['a\n\n"b"', "", "c"]
    path = file(tmp_path, b'{"abstract": null}\n\n{"abstract": "\\ud800."}\n')
    assert list(open_source(path, field="abstract").texts()) == ["", "?."]


TABLE = [("DOI", "date", "n", "text"), ("a/1", "2020", "3", "one"), ("", "2021", "", "two"), ("b", "", "5", "")]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_ids_and_kept_fields_come_with_the_texts(tmp_path, kind):
    rows = TABLE[1:]
    if kind == "jsonl":
        lines = [{"DOI": "a/1", "date": "2020", "text": "one"}, {"date": 2021, "text": "two", "n": [1]}]
        lines.append({"DOI": 7, "date": None, "text": None, "n": math.nan})
        path = file(tmp_path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        expected = [("a/1", None, "2020"), (None, "[1]", 2021), ("7", None, None)]
    else:
        text = io.StringIO(newline="")
        csv.writer(text, delimiter="," if kind == "csv" else "\t").writerows(TABLE)
        path = file(tmp_path, text.getvalue().encode())
        expected = [(id or None, n, date) for id, date, n, _ in rows]
    source = open_source(path, keep=["n", "date", "n"])
    assert (source.format, source.id, source.keep, source.has_metadata) == (kind, "DOI", ("n", "date"), True)
    assert [(each.id, *each.fields) for each in source.metadata()] == expected
    assert [each.metadata for each in source.documents()] == list(source.metadata())
    assert list(source.texts()) == ["one", "two", ""]
    assert next(open_source(path, id="date").metadata()).id == "2020"
    for option in ({"id": "nothing"}, {"keep": ["date", "nothing"]}):
        name = next(iter(option))
        with pytest.raises(
            CorpusError, match=rf"corpus, line 1: {name}='nothing': there is no such field; .*'DOI', 'd"
        ):
            open_source(path, **option)


def test_the_usual_names_of_ids_are_found_in_this_order(tmp_path):
    def found(*names, **options):
        rows = [names, ["x"] * len(names)]
        return open_source(file(tmp_path, "".join(",".join(row) + "\n" for row in rows).encode()), **options).id

    assert found("url", "doi", "text", "id") == "id"
    assert found("text", "URL", "Doi") == "Doi"
    assert found("text", "url") == "url"
    assert found("text", "ids") is None
    assert found("id", "url", field="id") == "url"  # the text is no id
    assert found("id", "id", "text") is None  # it is unclear which column is meant


def test_ids_of_some_formats(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("a.txt", "b/c.txt"):
        file(tmp_path, b"words", name)
    assert [each.id for each in open_source(tmp_path).metadata()] == ["a.txt", "b/c.txt"]
    both = [str(tmp_path / "b"), str(tmp_path / "a.txt")]
    assert [each.id for each in open_source(both, format="files").metadata()] == [f"{both[0]}/c.txt", both[1]]
    lines = open_source(file(tmp_path, b"one\n\ntwo\n"))
    assert not lines.has_metadata
    assert list(lines.metadata()) == []
    for option in ({"id": "id"}, {"keep": ["date"]}, {"keep": "date"}):
        name = next(iter(option))
        for path in (lines.paths[0], file(tmp_path, npz(matrix()), "counts")):
            with pytest.raises(CorpusError, match=rf"{name}='\w+' has no meaning for"):
                open_source(path, **option)


def test_a_file_without_ids_follows_one_with_ids(tmp_path):
    paths = [file(tmp_path, b"id,text,date\nx,one,1\n", "a.csv"), file(tmp_path, b"date,text\n2,two\n", "b.csv")]
    assert list(open_source(paths, keep=["date"]).metadata()) == [("x", ("1",)), (None, ("2",))]
    other = file(tmp_path, b"id,text\ny,three\n", "c.csv")
    with pytest.raises(CorpusError, match=r"c\.csv, line 1: expected one column 'date', got 'id', 'text'"):
        list(open_source([*paths, other], keep=["date"]).metadata())


def test_long_columns_are_read(tmp_path):
    text = "word " * 50_000
    assert list(open_source(file(tmp_path, WRITTEN["csv"]([text]))).texts()) == [text]


def test_the_field_with_the_text_is_chosen(tmp_path):
    path = file(tmp_path, b'{"a": "x", "b": "y", "n": 1}\n{"a": "z", "n": 2}\n')
    with pytest.raises(
        CorpusError, match=r"corpus, line 1: expected a field text, body.*got 'a', 'b', 'n'; pass the one .* as field"
    ):
        open_source(path)
    assert list(open_source(path, field="a").texts()) == ["x", "z"]
    with pytest.raises(CorpusError, match=r"line 2: expected the field 'b', got 'a', 'n'"):
        list(open_source(path, field="b").texts())
    with pytest.raises(CorpusError, match=r"line 1: expected text in the field 'n', got '1'"):
        list(open_source(path, field="n").texts())
    assert open_source(file(tmp_path, b'{"n": 1, "only": "x"}\n')).field == "only"
    assert open_source(file(tmp_path, b'{"content": "x", "body": "y"}\n')).field == "body"
    path = file(tmp_path, b"a,b\nx,y\n")
    assert recognise(path) == "text"
    assert list(open_source(path, field="b").texts()) == ["y"]
    with pytest.raises(CorpusError, match=r"line 1: expected the field 'c', got 'a', 'b'"):
        open_source(path, format="csv", field="c")
    assert open_source(file(tmp_path, b"words\nx\n", "one.csv")).field == "words"


def test_encodings_are_decoded_and_checked(tmp_path):
    text = "naïve\ncafé ½\n"
    path = file(tmp_path, text.encode("latin-1"))
    with pytest.raises(CorpusError, match=r"corpus, line 1: expected utf-8, got the byte 0xef; .*encoding=.latin-1."):
        list(open_source(path).texts())
    assert list(open_source(path, encoding="latin-1").texts()) == ["naïve", "café ½"]
    path = file(tmp_path, text.encode("utf-16"))
    with pytest.raises(CorpusError, match="corpus, line 1: expected utf-8, got UTF-16; pass encoding='utf-16'"):
        open_source(path)
    assert list(open_source(path, encoding="utf-16").texts()) == text[:-1].split("\n")
    path = file(tmp_path, text.encode("utf-16") + b"\n")
    with pytest.raises(CorpusError, match="corpus, line 3: the bytes are not valid utf-16; pass another encoding"):
        list(open_source(path, encoding="utf-16").texts())
    later = file(tmp_path, b"good\n" * 5 + b"b\xe9d\n")
    with pytest.raises(CorpusError, match="corpus, line 6: expected utf-8, got the byte 0xe9"):
        list(open_source(later).texts())
    with pytest.raises(CorpusError, match="corpus, line 6: expected utf-8"):
        list(open_source(later, format="files").texts())
    for name in ("no such", "rot13"):
        with pytest.raises(ValueError, match="encoding: expected the name of a text encoding"):
            open_source(path, encoding=name)


@pytest.mark.parametrize("compression", ["gz", "bz2", "xz"])
@pytest.mark.parametrize("kind", [*COUNTS, *WRITTEN])
def test_a_truncated_archive_is_an_error(tmp_path, kind, compression):
    data = COUNTS[kind](matrix(shape=(300, 50))) if kind in COUNTS else WRITTEN[kind]([f"text {i}" for i in range(999)])
    packed = COMPRESSION[compression](data)
    for size in (len(packed) // 2, len(packed) - 3):
        with pytest.raises(CorpusError, match="corpus: the compressed file is truncated"):
            consume(open_source(file(tmp_path, packed[:size]), format=kind))
    damaged = bytearray(packed)
    damaged[len(packed) // 2] ^= 255
    with pytest.raises(CorpusError, match="corpus"):
        consume(open_source(file(tmp_path, bytes(damaged)), format=kind))


def test_concatenated_compressed_streams_are_read(tmp_path):
    for pack in (gzip.compress, bz2.compress, lzma.compress):
        parts = [pack(b"one\n"), pack(b"two\n")]
        path = file(tmp_path, (bytes(4) if pack is lzma.compress else b"").join(parts))
        assert list(open_source(path).texts()) == ["one", "two"]


def test_xz_with_an_excessive_dictionary_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed_files, "_XZ_MEMORY", 2**24)
    wide = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2**26}]
    path = file(tmp_path, lzma.compress(b"text\n", filters=wide))
    with pytest.raises(CorpusError, match="the compressed file is damaged: Memory usage limit"):
        open_source(path)


def test_truncated_and_damaged_npz_is_an_error(tmp_path):
    data = npz(matrix(shape=(300, 50)))
    for size in (10, len(data) // 2, len(data) - 3):
        with pytest.raises(CorpusError, match=r"corpus: expected a matrix of scipy.sparse.save_npz .* got a damaged"):
            open_source(file(tmp_path, data[:size]))
    data = bytearray(npz(matrix(shape=(300, 50)), compressed=False))
    place = data.index(b"indices.npy") + 700
    data[place] ^= 1
    with pytest.raises(CorpusError, match=r"Bad CRC-32"):
        joined(open_source(file(tmp_path, bytes(data))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": b"bsr"}, "expected a matrix of scipy.sparse.save_npz"),
        ({"format": None}, "got a damaged or another archive"),
        ({"shape": [2, -3]}, "got a damaged or another archive"),
        ({"shape": [10**18, 3]}, "got a damaged or another archive"),
        ({"shape": [2, 10**18]}, "the header declares 1,000,000,000,000,000,000 words"),
        ({"shape": [3, 3]}, "got a damaged or another archive"),
        ({"indptr": [0, 2, 1]}, "got a damaged or another archive"),
        ({"indptr": [1, 2, 3]}, "got a damaged or another archive"),
        ({"indptr": [0, 2, 4]}, "got a damaged or another archive"),
        ({"indices": [0, 3, 1]}, "got a damaged or another archive"),
        ({"indices": [0, -1, 1]}, "got a damaged or another archive"),
        ({"indices": [0, 1]}, "got a damaged or another archive"),
        ({"data": [1.0, np.nan, 1.0]}, "document 0: the count of word 1 is nan"),
        ({"data": [1, -1, 1]}, "document 0: the count of word 1 is -1"),
        ({"data": [1j, 1, 1]}, "counts must be real numbers"),
        ({"data": np.array([1, None, "x"])}, "got a damaged or another archive"),
    ],
)
def test_npz_without_a_matrix_of_counts_is_an_error(tmp_path, changes, message):
    arrays = {"format": b"csr", "shape": [2, 3], "indptr": [0, 2, 3], "indices": [0, 1, 1], "data": [1, 2, 3]} | changes
    path = tmp_path / "x.npz"
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(CorpusError, match=f"x.npz: .*{message}"):
        joined(open_source(path))


def test_binary_files_are_errors(tmp_path):
    path = file(tmp_path, b"\x00\x01\x02" * 50)
    with pytest.raises(CorpusError, match="corpus: expected text or a known format, got a binary file"):
        open_source(path)
    for kind in ("text", "jsonl", "csv", "files"):
        with pytest.raises(CorpusError, match="corpus, line 1: expected text or a known format, got a binary file"):
            consume(open_source(path, format=kind, field=None if kind in ("text", "files") else "text"))
    late = file(tmp_path, b"text\n" * 20_000 + b"\0\n")
    with pytest.raises(CorpusError, match=r"corpus, line 20001: .* binary file"):
        consume(open_source(late))
    for magic, what in {b"%PDF-1.7": "a PDF", b"(\xb5/\xfd": "zstd"}.items():
        with pytest.raises(CorpusError, match=f"corpus: is .*{what}"):
            open_source(file(tmp_path, magic + bytes(20)))
    with pytest.raises(CorpusError, match=r"corpus: .*got a damaged or another archive"):
        open_source(file(tmp_path, archive("one.txt")), format="npz")


def test_missing_and_empty_inputs_are_errors(tmp_path):
    empty = file(tmp_path, b"", "empty")
    for data in (b"", gzip.compress(b""), bz2.compress(b""), lzma.compress(b"")):
        with pytest.raises(CorpusError, match="corpus: expected documents, got an empty file"):
            open_source(file(tmp_path, data))
    for kind in COUNT_FORMATS + TEXT_FORMATS:
        if kind != "files":
            with pytest.raises(CorpusError, match="empty"):
                consume(open_source(empty, format=kind))
        with pytest.raises(CorpusError, match="missing: there is no such file"):
            consume(open_source(tmp_path / "missing", format=kind))
    (tmp_path / "folder").mkdir()
    for kind in (None, "files", "jsonl"):
        with pytest.raises(CorpusError, match="folder: expected files in the folder, got none"):
            consume(open_source(tmp_path / "folder", format=kind))
    with pytest.raises(CorpusError, match="corpus: expected documents, got none"):
        consume(open_source(file(tmp_path, b"0\n0\n0\n")))
    with pytest.raises(CorpusError, match="folder: expected a file, got a folder"):
        open_source(file(tmp_path, uci(matrix())), vocabulary=tmp_path / "folder")
    with pytest.raises(ValueError, match="at least one file"):
        open_source([])
    with pytest.raises(ValueError, match="format: expected one of csv, "):
        open_source(empty, format="word")
    with pytest.raises(ValueError, match="first_id: expected 0 or 1; got 2"):
        open_source(empty, first_id=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'fromat'"):
        open_source(empty, fromat="text")
    with pytest.raises(CorpusError, match="null: expected a regular file"):
        open_source("/dev/null")
    for name in ("n" * 999, "docword." + "n" * 245, "nul\0"):
        for kind in (None, "uci", "files", "folder", "npz"):
            with pytest.raises(CorpusError, match=r"n: cannot be read|no such file|manifest.json"):
                consume(open_source(tmp_path / name, format=kind))
    long = file(tmp_path, uci(matrix()), "docword." + "n" * 245)
    assert open_source(long).vocabulary is None


def test_a_corpus_folder_is_recognised(tmp_path):
    path = file(tmp_path, b'{"format": "smoothgrad corpus"}', "manifest.json")
    assert recognise(tmp_path) == "folder"
    with pytest.raises(CorpusError, match="damaged, or edited by hand"):
        open_source(tmp_path)
    path.write_text('{"format": "other"}')
    with pytest.raises(CorpusError, match=r"manifest\.json is recognised as jsonl"):
        recognise(tmp_path)
    with pytest.raises(CorpusError, match="not a smoothgrad corpus"):
        open_source(tmp_path, format="folder")


def test_an_option_without_meaning_is_refused(tmp_path):
    path = file(tmp_path, npz(matrix()))
    for options in ({"sort": True}, {"first_id": 0}, {"encoding": "latin-1"}):
        with pytest.raises(CorpusError, match="has no meaning for npz"):
            open_source(path, **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2\n3\n3\n1 1 1\n2 3 100\n", "corpus: the header declares 3 entries, the file has 2"),
        ("2\n3\n1\n1 1 1\n2 3 1\n", "corpus, line 5: the header declares 1 entry, the file has more"),
        ("2\n3\n2\n1 1 1\n3 3 1\n", "corpus, line 5: expected a document from 1 to 2, got 3"),
        ("2\n3\n2\n1 4 1\n2 3 1\n", "corpus, line 4: expected a word from 1 to 3, got 4"),
        ("2\n3\n2\n1 1 1\n2 3\n", "corpus, line 5: expected document word count, got '2 3'"),
        ("2\n3\n2\n1 1\n1 2 3 1\n", "corpus, line 4: expected document word count"),
        ("2\n3\n1\n1 1 -1\n", "corpus, line 4: expected a count from 0 to 1e.30, got -1"),
        ("2\n3\n1\n1 1 1e31\n", "corpus, line 4: expected a count"),
        ("2\n3\n1\n1 1 inf\n", "corpus, line 4: expected document word count, got '1 1 inf'"),
        ("2\n3\n1\n1 1 1_0\n", "corpus, line 4: expected document word count, got '1 1 1_0'"),
        ("2\n3\n1\n1.5 1 1\n", "corpus, line 4: expected a document"),
        ("2\n3\n1\n1 99999999999999999999999 1\n", "corpus, line 4: expected a word from 1 to 3"),
        (f"{10**18}\n3\n1\n1 1 1\n", "corpus, line 3: the header declares 1,000,000,000,000,000,000 documents"),
        (f"2\n{10**18}\n1\n1 1 1\n", "corpus, line 3: the header declares 1,000,000,000,000,000,000 words"),
        (f"2\n3\n{10**18}\n1 1 1\n", "corpus, line 3: the header declares .* more than a file of 30 bytes can hold"),
        (f"{10**18}\n{10**9}\n{10**18}\n1 1 1\n", "corpus, line 3: the header declares .* more than a file"),
        (f"2\n3\n{10**30}\n1 1 1\n", "corpus, line 3: expected the number of entries, got '1000"),
        ("two\n3\n1\n1 1 1\n", "corpus, line 1: expected the number of documents, got 'two'"),
        ("2\n3\n", "corpus: expected three lines"),
    ],
)
def test_uci_that_contradicts_its_header_is_an_error(tmp_path, text, message):
    with pytest.raises(CorpusError, match=message):
        joined(open_source(file(tmp_path, text.encode()), format="uci"))


def test_a_wrong_header_of_a_compressed_file_allocates_no_memory(tmp_path):
    """The capacity of a compressed file is unknown until it is read, so that nothing is allocated in advance."""
    for text in (f"{10**18}\n{10**9}\n{10**18}\n1 1 1\n", f"{10**18}\n{10**9}\n{10**18}\n{10**17} 1 1\n"):
        path = file(tmp_path, gzip.compress(text.encode()))
        tracemalloc.start()
        with pytest.raises(CorpusError, match=r"corpus: (the header declares|got at least)"):
            joined(open_source(path))
        assert tracemalloc.get_traced_memory()[1] < 2**25
        tracemalloc.stop()


def test_a_large_gap_between_documents_is_an_error(tmp_path, monkeypatch):
    """A wrong header is detected when the number of a document is much larger than the previous one."""
    for module, name, value in (
        (count_blocks, "_INSPECTED", 4),
        (compressed_files, "CHUNK_BYTES", 16),
        (count_blocks, "BLOCK_ENTRIES", 4),
    ):
        monkeypatch.setattr(module, name, value)
    text = f"{10**18}\n9\n{10**18}\n" + "1 2 1\n1 1 1\n" * 9 + f"{10**17} 1 1\n" * 9
    with pytest.raises(CorpusError, match=r"corpus: got at least 99,999,\S+ documents"):
        joined(open_source(file(tmp_path, gzip.compress(text.encode()))))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("%%MatrixMarket matrix array real general\n1 1\n1\n", "corpus, line 1: can read only .*coordinate"),
        ("%%MatrixMarket matrix coordinate complex general\n1 1 1\n1 1 1 1\n", "corpus, line 1: can read only"),
        ("%%MatrixMarket matrix coordinate real symmetric\n1 1 1\n1 1 1\n", "corpus, line 1: can read only"),
        ("%%MatrixMarket tensor\n", "corpus, line 1: expected %%MatrixMarket matrix"),
        ("%%MatrixMarket matrix coordinate real general\n% a\n", "corpus: expected a line with the numbers"),
        ("%%MatrixMarket matrix coordinate real general\n%\n1 1\n1 1 1\n", "corpus, line 3: expected documents, words"),
        (
            "%%MatrixMarket matrix coordinate real general\n1 2 1\n1 3 1\n",
            "corpus, line 3: expected a word from 1 to 2",
        ),
        (
            "%%MatrixMarket matrix coordinate real general\n1 2 1\n% 1\n1 2 1\n",
            "corpus, line 3: expected document word",
        ),
        ("%%MatrixMarket matrix coordinate pattern general\n1 2 1\n1 2 1\n", "corpus, line 3: expected document word"),
        ("%%MatrixMarket matrix coordinate real general\n1 2 2\n\n1 2 1 \n", "corpus: the header declares 2 entries"),
    ],
)
def test_invalid_matrix_market_is_an_error(tmp_path, text, message):
    with pytest.raises(CorpusError, match=message):
        joined(open_source(file(tmp_path, text.encode())))


def test_matrix_market_pattern_is_read_as_ones(tmp_path):
    X = matrix().astype(bool)
    path = file(tmp_path, mm(X.astype(float), field="pattern"))
    assert b"pattern" in path.read_bytes()
    assert_same(joined(open_source(path)), X)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("ldac", "1 0:1\n2 0:1\n", "corpus, line 2: expected N id:count …, with N pairs, got '2 0:1'"),
        ("ldac", "1 0:1\nx 0:1\n", "corpus, line 2: expected N id:count …, with N pairs, got 'x 0:1'"),
        ("ldac", "1 0:1\n\n1 0\n", "corpus, line 3: expected N id:count …, with N pairs, got '1 0'"),
        ("ldac", "1 0:1\n1 -1:1\n", "corpus, line 2: expected a word id from 0 to"),
        ("ldac", "1 2147483648:1\n", "corpus, line 1: expected a word id from 0 to 2147483646"),
        ("ldac", "1 99999999999999999999:1\n", "corpus, line 1: expected a word id"),
        ("ldac", "1 1.5:1\n", "corpus, line 1: expected a word id"),
        ("ldac", "1 1:nan\n", "corpus, line 1: expected N id:count …, with N pairs, got '1 1:nan'"),
        ("ldac", "1 1:-2\n", "corpus, line 1: expected a count"),
        ("ldac", "1 1::2\n", "corpus, line 1: expected N id:count"),
        ("ldac", "2 1: 2\n", "corpus, line 1: expected N id:count"),
        ("svmlight", "1 0:1\nfoo 1:1\n", "corpus, line 2: expected label id:count …, got 'foo 1:1'"),
        ("svmlight", "1 0:1 qid:3\n", "corpus, line 1: expected label id:count …, got '1 0:1 qid:3'"),
        ("svmlight", "1 0:1\n1 2:1e99\n", "corpus, line 2: expected a count"),
    ],
)
def test_invalid_pairs_are_errors(tmp_path, kind, text, message):
    with pytest.raises(CorpusError, match=message):
        joined(open_source(file(tmp_path, text.encode()), format=kind))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("jsonl", '{"text": "a"}\n\n{"text": \n', "line 3: expected a JSON object: Expecting value in column"),
        ("jsonl", '{"text": "a"}\n[1]\n', r"corpus, line 2: expected a JSON object, got '\[1\]'"),
        (
            "jsonl",
            '{"text": "a"}\n' + "[" * 200_000,
            "corpus, line 2: expected a JSON object, got one nested too deeply",
        ),
        ("jsonl", '{"text": "a"}\n{"text": ' + "1" * 9999 + "}", "corpus, line 2: expected a JSON object: Exceeds"),
        ("csv", "id,text\n1,a\n2\n", "corpus, line 3: expected 2 columns as in the header, got 1"),
        ("csv", "text,text\na,b\n", "corpus, line 1: expected one column 'text', got 'text', 'text'"),
        ("csv", "id,text\n1,a\rb\n", "corpus, line 2: expected csv, with quotes in pairs .*: new-line character"),
        ("csv", 'id,text\n1,"a\n2,b\n', "corpus, line 3: expected csv, with quotes in pairs .*: unexpected end"),
        ("tsv", 'id\ttext\n1\t"a\n2\t"b"\n', "corpus, line 3: expected tsv, with quotes in pairs"),
    ],
)
def test_invalid_records_are_errors(tmp_path, kind, text, message):
    with pytest.raises(CorpusError, match=message):
        consume(open_source(file(tmp_path, text.encode()), format=kind))


def test_long_lines_are_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed_files, "CHUNK_BYTES", 64)
    monkeypatch.setattr(records, "MAX_TEXT_BYTES", 200)
    monkeypatch.setattr(compressed_files, "MAX_RECORD_BYTES", 200)
    line = b"x" * 400
    for kind in ("text", "jsonl", "csv", "ldac", "svmlight", "files"):
        with pytest.raises(CorpusError, match=r"corpus(, line 3)?: expected a (line|document) of at most 200 bytes"):
            consume(open_source(file(tmp_path, b"\n\n" + line), format=kind, field=None))
    quoted = b'id,text\n1,"' + b'a\n",",\n' * 100
    with pytest.raises(
        CorpusError, match=r"expected a record of at most 200 characters, got a longer one; is a quote not closed"
    ):
        consume(open_source(file(tmp_path, quoted), format="csv"))
    assert consume(open_source(file(tmp_path, WRITTEN["csv"](TEXTS * 9)))) == TEXTS * 9


def consume(source):
    return joined(source) if source.format in COUNT_FORMATS else list(source.texts())


def outcome(path, **options):
    """Return the documents of a file, or the message of a CorpusError; any other error fails the test."""
    try:
        return consume(open_source(path, **options))
    except CorpusError as error:
        message = str(error)
    assert message.startswith(str(path))
    return message


FUZZ = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much]}
ANY_FORMAT = st.sampled_from([None, *TEXT_FORMATS, *COUNT_FORMATS])
ANY_COMPRESSION = st.sampled_from(sorted(COMPRESSION))


@given(st.binary(max_size=300), ANY_FORMAT, ANY_COMPRESSION, st.sampled_from(["utf-8", "utf-16", "latin-1"]))
@settings(max_examples=100, **FUZZ)
def test_any_bytes_are_documents_or_a_corpus_error(folder, data, kind, compression, encoding):
    outcome(file(folder, COMPRESSION[compression](data)), format=kind, encoding=encoding)


VALID = {
    **{kind: write(matrix(shape=(9, 5))) for kind, write in COUNTS.items()},
    "stored": npz(matrix(shape=(9, 5)), compressed=False),
    "csc": npz(matrix(shape=(9, 5)), "csc", compressed=False),
    "coo": npz(matrix(shape=(9, 5)), "coo", compressed=False),
    **{kind: write(TEXTS) for kind, write in WRITTEN.items()},
}


@st.composite
def mutated(draw):
    """Return a valid file, perhaps compressed, of which some bytes are changed, removed, doubled or truncated."""
    kind = draw(st.sampled_from(sorted(VALID)))
    data = bytearray(COMPRESSION[draw(ANY_COMPRESSION)](VALID[kind]))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        stop = place + draw(st.integers(0, 6))
        token = draw(
            st.sampled_from([b"", b"-", b"9" * 20, b"\0", b"\xff", b":", b"nan", b"\n", b'"', bytes(data[place:stop])])
        )
        data[place:stop] = token
    return (kind if kind in formats.NAMES else "npz"), bytes(data[: draw(st.integers(len(data) // 2, len(data)))])


@given(mutated(), st.booleans())
@settings(max_examples=150, **FUZZ)
def test_damaged_files_are_documents_or_a_corpus_error(folder, changed, forced):
    kind, data = changed
    outcome(file(folder, data), format=kind if forced else None)


NUMBERS = st.text("0123456789 .:e+-\n\t\r#", max_size=60) | st.lists(
    st.sampled_from(
        ["0", "1", "2", "3 ", "1 1 1\n", "2 1:1", " ", "\n", "1.0", ":", "0:2", "1e0", "99999999999999999999", "\r\n"]
    ),
    max_size=20,
).map("".join)


@given(NUMBERS, st.sampled_from(["uci", "mm", "pattern", "ldac", "svmlight"]))
@example("1 1 1\n1 1\n2 1 1 1\n", "uci")
@example("1 1:2 :3\n", "ldac")
@example("0.", "ldac")
@example("0 9223372036854775296:.0", "svmlight")
@example("1 1 99999999999999999999\n", "uci")
@settings(max_examples=200, **FUZZ)
def test_counts_and_errors_do_not_depend_on_the_size_of_chunks(folder, text, kind):
    """A chunk of one line and a chunk of all lines give the same counts, or an error that names the same line."""
    lines = sum(1 for line in text.split("\n") if line.strip())
    if kind == "uci":
        text = f"3\n3\n{lines}\n{text}"
    elif kind in ("mm", "pattern"):
        field = "real" if kind == "mm" else kind
        text = f"%%MatrixMarket matrix coordinate {field} general\n3 3 {lines}\n{text}"
        kind = "mm"
    path = file(folder, text.encode())
    complete = outcome(path, format=kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressed_files, "CHUNK_BYTES", 1)
        by_line = outcome(path, format=kind)
    if isinstance(complete, str):
        assert complete == by_line
    else:
        assert_same(complete, by_line)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 12), st.sampled_from(sorted(COUNTS)))
@settings(max_examples=40, **FUZZ)
def test_any_matrix_is_read_with_any_size_of_chunks_and_blocks(folder, seed, docs, words, kind):
    rng = np.random.default_rng(seed)
    X = scipy.sparse.csr_array(rng.poisson(rng.choice([0.02, 0.5, 3]), (docs, words)) * rng.choice([1, 0.5]))
    path = file(folder, COUNTS[kind](X))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressed_files, "CHUNK_BYTES", int(rng.integers(16, 200)))
        patch.setattr(count_blocks, "BLOCK_ENTRIES", int(rng.integers(4, 50)))
        patch.setattr(count_blocks, "_INSPECTED", int(rng.integers(1, 50)))
        assert_same(joined(open_source(path, format=kind)), X)


@pytest.mark.parametrize("delimiter", [",", ";", "|", "\t"])
@pytest.mark.parametrize("name", ["papers.csv", "papers"])
def test_the_delimiter_of_a_table_is_found(tmp_path, delimiter, name):
    texts = ["one, two; three", "a|b", 'say "x"\n\tand y', ""] * 3
    path = file(tmp_path, table(texts, delimiter), name)
    assert list(open_source(path).texts()) == texts
    other = io.StringIO(newline="")
    csv.writer(other, delimiter=delimiter).writerows([("Titre", "Résumé, bref"), *([text, "x"] for text in texts)])
    path = file(tmp_path, other.getvalue().encode(), name)
    assert list(open_source(path, field="Titre").texts()) == texts
    assert open_source(path, field="Résumé, bref").format == ("tsv" if delimiter == "\t" else "csv")


def test_files_with_different_delimiters_form_one_corpus(tmp_path):
    paths = [file(tmp_path, table([str(i)], delimiter), f"{i}.csv") for i, delimiter in enumerate(",;|\t")]
    assert list(open_source(paths, format="csv").texts()) == ["0", "1", "2", "3"]
    single = file(tmp_path, b"text\none; two\nthree|four\n", "single.csv")
    assert list(open_source(single).texts()) == ["one; two", "three|four"]
    with pytest.raises(CorpusError, match=r"bad\.csv, line 3: expected 2 columns as in the header, got 3"):
        consume(open_source(file(tmp_path, b"id;text\n1;a\n2;b;c\n", "bad.csv")))


def test_parquet_is_read_as_written(tmp_path):
    path = file(tmp_path, parquet([*TEXTS, None]))
    source = open_source(path)
    assert (source.format, source.field, source.id) == ("parquet", "text", "id")
    for _ in range(2):
        assert list(source.texts()) == [*TEXTS, ""]
    assert [each.id for each in source.metadata()] == ["0", "1", "2", "3", "4"]
    assert list(open_source([path, path]).texts()) == [*TEXTS, "", *TEXTS, ""]


def test_columns_of_parquet_are_kept(tmp_path):
    day = datetime.date(2020, 5, 17)
    columns = {
        "DOI": ["a/1", None],
        "abstract": pyarrow.array(["one", "two"], pyarrow.large_string()),
        "day": [day, None],
        "time": pyarrow.array([0, 1], pyarrow.timestamp("ns")),
        "price": [decimal.Decimal("1.50"), None],
        "n": [3, None],
        "score": [0.5, math.nan],
        "tags": [["x", "y"], []],
        "bytes": [b"\xc3\xbc\xff", None],
        "days": [[day], []],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    keep = ["day", "price", "n", "score", "tags"]
    found = [tuple(each) for each in open_source(tmp_path / "x.parquet", keep=keep).metadata()]
    assert found == [("a/1", ("2020-05-17", "1.50", 3, 0.5, '["x", "y"]')), (None, (None, None, None, None, "[]"))]
    found = [each.fields for each in open_source(tmp_path / "x.parquet", keep=["bytes", "days"]).metadata()]
    assert found == [("ü\ufffd", '["2020-05-17"]'), (None, "[]")]
    times = [each.fields[0] for each in open_source(tmp_path / "x.parquet", id="n", keep=["time"]).metadata()]
    assert times[1] == "1970-01-01 00:00:00.000000001"
    for options, message in (
        ({"field": "n"}, r"x\.parquet: expected text in the column 'n', got '3' in row 0"),
        ({"field": "body"}, r"x\.parquet: expected the field 'body', got 'DOI', 'abstract'"),
        ({"keep": ["date"]}, r"x\.parquet: keep='date': there is no such field; .*'day'"),
    ):
        with pytest.raises(CorpusError, match=message):
            consume(open_source(tmp_path / "x.parquet", **options))
    with pytest.raises(CorpusError, match=r"other: expected one column 'abstract', got 'id', 'text'"):
        consume(open_source([tmp_path / "x.parquet", file(tmp_path, parquet(["a"]), "other")]))


def test_parquet_is_read_in_bounded_memory(tmp_path):
    texts = [f"{i} " + "word " * 2_000 for i in range(8_000)]  # 80 MB
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "large", row_group_size=500)
    del texts
    before = pyarrow.total_allocated_bytes()
    largest = max(pyarrow.total_allocated_bytes() - before for _ in open_source(tmp_path / "large").texts())
    assert largest < 2**25


def test_damaged_parquet_and_a_missing_package(tmp_path, monkeypatch):
    data = parquet(TEXTS * 50)
    for damaged in (data[:100], data[:4], data[:60] + b"\xff" * 60 + data[120:]):
        with pytest.raises(
            CorpusError, match=r"corpus: (expected a Parquet file, got a damaged|the Parquet file is dam)"
        ):
            consume(open_source(file(tmp_path, damaged)))
    with pytest.raises(CorpusError, match="expected a Parquet file, got a compressed one; decompress it first"):
        open_source(file(tmp_path, gzip.compress(data)))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r'pip install "smoothgrad_jax\[parquet\]"'):
        open_source(file(tmp_path, data))


def archive(*names):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as members:
        for name in names:
            members.writestr(name, "x" * 99)
    return packed.getvalue()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (archive("[Content_Types].xml", "word/document.xml"), "a Word document; save it as plain text"),
        (archive("[Content_Types].xml", "xl/workbook.xml"), "an Excel workbook; save the sheet .* as CSV"),
        (archive("ppt/presentation.xml"), "a PowerPoint presentation"),
        (archive("mimetype", "META-INF/container.xml"), "an EPUB book; convert it"),
        (archive("mimetype", "content.xml"), "an OpenDocument file"),
        (archive("one.txt", "two.txt"), "a zip archive; unpack it first"),
        (b"%PDF-1.7\n%\xe2", "a PDF document; extract its text"),
        (bytes.fromhex("d0cf11e0a1b11ae1") + b"\0" * 99, r"an Office document \(.doc, .xls, .ppt\)"),
        (rb"{\rtf1\ansi hello}", "an RTF document"),
        (b"SQLite format 3\0" + b"\0" * 99, "an SQLite database"),
        (pickle.dumps(["text"], 4), "a pickle"),
    ],
)
def test_files_that_are_no_corpus_are_named_for_what_they_are(tmp_path, data, kind):
    path = file(tmp_path, data)
    with pytest.raises(CorpusError, match=rf"corpus: is {kind}"):
        open_source(path)
    with pytest.raises(CorpusError, match=rf"corpus: is {kind}"):  # the first file of a folder
        open_source(tmp_path)


@pytest.mark.parametrize("url", ["https://example.org/a.csv", "s3://bucket/a.jsonl", "http://x"])
def test_urls_are_refused(url):
    for name in (url, Path(url)):
        with pytest.raises(CorpusError, match=r"http|s3.*: expected a file, got a URL; download .* curl -L URL"):
            open_source(name)


def test_a_pipe_is_copied_to_a_temporary_file(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.csv")
    writer = threading.Thread(target=(tmp_path / "pipe.csv").write_bytes, args=[gzip.compress(table(TEXTS, ";"))])
    writer.start()
    source = open_source(tmp_path / "pipe.csv")
    writer.join()
    for _ in range(2):
        assert list(source.texts()) == TEXTS
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(jsonl(TEXTS))))
    source = open_source("-")
    assert list(source.texts()) == list(source.texts()) == TEXTS
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\0\xff")))
    with pytest.raises(CorpusError, match="standard input: expected text or a known format, got a binary file"):
        open_source("-")
    terminal, other = os.openpty()
    with open(terminal) as stdin, open(other):
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(CorpusError, match="-: the standard input is a terminal; write documents to it with a pipe"):
            open_source("-")


def test_a_pipe_to_which_nothing_writes_does_not_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(local_files, "_WAIT", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorpusError, match=r"pipe: no process has written to the pipe for 0\.1 s"):
        open_source(tmp_path / "pipe")
    with pytest.raises(CorpusError, match="pipe: expected a regular file"):  # not named by the user
        open_source(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "manifest.json")
    assert not corpus_folder.is_folder(tmp_path / "folder")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(CorpusError, match="zero: expected a regular file"):
        open_source(tmp_path / "zero")
    with pytest.raises(CorpusError, match="zero: expected a regular file"):
        open_source(file(tmp_path, uci(matrix())), vocabulary=tmp_path / "zero")


def test_a_copy_of_a_pipe_that_does_not_fit_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "standard input").symlink_to("/dev/full")
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **options: str(tmp_path / "full"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"words" * 100_000)))
    with pytest.raises(
        CorpusError, match=r"standard input: cannot be copied to .*: No space left on device; .* TMPDIR"
    ):
        open_source("-")
    assert not (tmp_path / "full").exists()
