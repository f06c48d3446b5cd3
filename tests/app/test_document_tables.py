"""Ids, kept fields, groups and similar documents from the command line, and the files with one row per document."""

import csv
import json
import subprocess
import sys

import numpy as np
import pyarrow.parquet
import pytest

from smoothgrad_jax import SavedModel, load_model, open_source, save_model
from smoothgrad_jax.app.cli import main
from smoothgrad_jax.app.commands import tables
from smoothgrad_jax.data import corpus, corpus_folder

WORDS = ["anchor", "butter", "comet", "dough", "galaxy", "sail"]
TOPICS = {"sailing": ["anchor", "sail"], "cooking": ["butter", "dough"], "stars": ["comet", "galaxy"]}
SUFFIXES = ("tsv", "csv", "jsonl", "npz", "parquet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tables")


@pytest.fixture(scope="module")
def model(folder):
    """A model of the three topics, without training."""
    lam = np.array([[9.0 if word in words else 0.1 for words in TOPICS.values()] for word in WORDS], np.float32)
    settings = {"tokens": {"lowercase": True}}
    save_model(folder / "model", SavedModel(lam, 0.1, 0.1, 100, WORDS, settings, []))
    return str(folder / "model")


@pytest.fixture(scope="module")
def papers(folder):
    """Sixty records with id, date, journal, pages and text, some of them empty or without a value."""
    rng = np.random.default_rng(0)
    records = []
    for d in range(60):
        words = list(TOPICS.values())[rng.choice(3, p=[0.5, 0.3, 0.2])]
        text = " ".join([*rng.choice(words, rng.integers(1, 9)), *rng.choice(WORDS, 2)])
        date = f"{rng.integers(2019, 2022)}-{rng.integers(1, 13):02d}-05"
        journal = ['Sea, "Wind"', "Kitchen\tToday", "Sky"][rng.choice(3)]
        records.append({"id": f"p/{d}", "date": date, "journal": journal, "pages": d, "text": text})
    records[7] |= {"text": ""}
    records[8] |= {"text": "zebra", "pages": None}
    records[9] |= {"id": None, "date": None}
    records[10] |= {"date": "no date", "journal": "line\r\nbreak"}
    path = folder / "papers.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path, records


@pytest.fixture(scope="module")
def written(model, papers, folder):
    """The topic proportions of the papers in every format; the number of rows per part is small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus.Corpus.parts, "__defaults__", (17,))
        for suffix in SUFFIXES:
            out = str(folder / f"theta.{suffix}")
            assert main(["transform", model, str(papers[0]), "--keep", "date,journal,pages", "--out", out]) == 0
    return folder


def read_table(path):
    """Return the rows of a table as dictionaries, read by another package than the one that wrote them."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return [dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True)]
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


def theta_of(row):
    listed = row.get("topics", row.get("theta"))
    return np.array([row[f"topic {k}"] for k in range(3)] if listed is None else listed, float)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_transform_writes_ids_and_kept_fields_and_marks_empty_documents(papers, written, suffix):
    records, out = papers[1], written / f"theta.{suffix}"
    rows = read_table(out)
    assert len(rows) == len(records)
    missing = {"npz": "", "tsv": "", "csv": ""}.get(suffix)
    for number, (row, record) in enumerate(zip(rows, records, strict=True)):
        assert int(row["document"]) == number
        for name in ("id", "date", "journal"):
            wanted = missing if record[name] is None else record[name]
            assert row[name] == (wanted.replace("\r", "") if suffix in ("tsv", "csv") else wanted)
        if record["pages"] is not None:
            assert float(row["pages"]) == record["pages"]
        assert int(row["words"]) == sum(word in WORDS for word in record["text"].split())
        assert theta_of(row).sum() == pytest.approx(1, abs=1e-4)
    assert [number for number, row in enumerate(rows) if int(row["words"]) == 0] == [7, 8]
    if suffix == "parquet":
        types = {field.name: str(field.type) for field in pyarrow.parquet.read_schema(out)}
        assert (types["pages"], types["id"], types["topic 0"], types["words"]) == ("int64", "string", "float", "int64")
        assert rows[8]["pages"] is None
    if suffix == "npz":
        assert np.isnan(rows[8]["pages"])


def test_all_formats_have_the_same_proportions(model, papers, written):
    counts = [[record["text"].split().count(word) for word in WORDS] for record in papers[1]]
    expected = load_model(model).transform(np.array(counts))
    for suffix in SUFFIXES:
        found = [theta_of(row) for row in read_table(written / f"theta.{suffix}")]
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_scores_have_ids_and_kept_fields(model, papers, folder, capsys):
    path, records = papers
    out = folder / "scores.csv"
    assert main(["score", model, str(path), "--keep", "journal", "--out", str(out), "--json"]) == 0
    total = json.loads(capsys.readouterr().out)["score"]
    rows = read_table(out)
    assert [row["id"] for row in rows] == [record["id"] or "" for record in records]
    assert list(rows[0]) == ["document", "id", "journal", "words", "log_prob", "held_out_words"]
    sums = [sum(float(row[name]) for row in rows) for name in ("log_prob", "held_out_words")]
    assert sums[0] / sums[1] == pytest.approx(total, rel=1e-4)


def test_every_line_of_text_has_a_row(model, folder, capsys):
    path = folder / "lines.txt"
    path.write_text("sail\n\nbutter dough\n  \ncomet\n\n")
    assert main(["transform", model, str(path)]) == 0
    out, err = capsys.readouterr()
    rows = [line.split("\t") for line in out.splitlines()]
    assert rows[0][:2] == ["document", "words"]
    assert [row[:2] for row in rows[1:]] == [["0", "1"], ["1", "0"], ["2", "2"], ["3", "0"], ["4", "1"], ["5", "0"]]
    assert "3 of 6 documents are empty, or without any known word\n" in err
    assert main(["convert", str(path), str(folder / "lines"), "--min-df", "1"]) == 0
    out, err = capsys.readouterr()
    assert "6 documents" in out
    assert "3 of 6 documents are empty" in err
    words = ["--vocabulary", f"{model}/vocabulary.txt"]
    fit = ["--topics", "2", "--passes", "1", "--held-out", "0", "--json", "--threads", "1"]
    for number, data in enumerate(([str(path), *words], [str(folder / "lines")])):
        assert main(["fit", *data, "--out", str(folder / f"lines {number}"), *fit]) == 0
        assert "3 of 6 documents are empty" in capsys.readouterr().err


def test_a_converted_corpus_gives_the_same_tables(model, papers, folder):
    path, _ = papers
    keep = ["--keep", "date,journal,pages"]
    vocabulary = ["--vocabulary", f"{model}/vocabulary.txt"]
    assert main(["convert", str(path), str(folder / "corpus"), *keep, *vocabulary]) == 0
    for command, suffix in (("transform", "jsonl"), ("transform", "parquet"), ("score", "tsv")):
        first, second = folder / f"first.{suffix}", folder / f"second.{suffix}"
        assert main([command, model, str(path), *keep, "--out", str(first)]) == 0
        assert main([command, model, str(folder / "corpus"), "--out", str(second)]) == 0
        assert read_table(first) == read_table(second)
    # Metadata do not change what is trained: a run continues with other kept fields.
    fit = ["--topics", "2", "--passes", "1", "--threads", "1"]
    assert main(["fit", str(folder / "corpus"), "--out", str(folder / "run"), *fit]) == 0
    assert main(["convert", str(path), str(folder / "corpus"), "--overwrite", *vocabulary]) == 0
    assert corpus_folder.open_folder(folder / "corpus").manifest["metadata"]["keep"] == []
    assert main(["fit", str(folder / "corpus"), "--out", str(folder / "run"), "--resume", "--passes", "2"]) == 0


@pytest.mark.parametrize(
    ("arguments", "group"),
    [
        (["--by", "journal"], lambda record: record["journal"]),
        (["--by", "date", "--period", "year"], lambda record: (record["date"] or "n")[:4].strip("no d") or None),
        (["--by", "date", "--period", "month"], lambda record: (record["date"] or "n")[:7].strip("no date") or None),
    ],
)
def test_groups_are_means_over_documents(model, papers, written, capsys, arguments, group):
    path, records = papers
    out = written / "groups.csv"
    assert main(["groups", model, str(path), *arguments, "--out", str(out)]) == 0
    err = capsys.readouterr().err
    theta = np.load(written / "theta.npz")
    members = {}
    for d, record in enumerate(records):
        if group(record) is not None and theta["words"][d]:
            members.setdefault(group(record), []).append(d)
    rows = read_table(out)
    by_size = arguments[1] == "journal"
    names = sorted(members, key=lambda name: (-len(members[name]), name) if by_size else name)
    assert [row["group"] for row in rows[::3]] == [name.replace("\r", "") for name in names]
    for row, (name, k) in zip(rows, [(name, k) for name in names for k in range(3)], strict=True):
        values = theta["theta"][members[name], k]
        assert (int(row["topic"]), int(row["documents"])) == (k, len(values))
        assert float(row["prevalence"]) == pytest.approx(values.mean(), rel=1e-4)
        assert float(row["low"]) <= float(row["prevalence"]) <= float(row["high"])
    if not by_size:
        assert f"1 document whose date has no {arguments[3]}, for example 'no date'" in err
        assert "left out: 2 documents without a value of date, 2 documents without a known word" in err


def test_groups_are_printed_and_written_as_json_lines(model, papers, capsys):
    path, records = papers
    assert main(["groups", model, str(path), "--by", "date", "--period", "year", "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["2019", "2020", "2021"]
    assert lines[-4].split()[:2] == ["date", "documents"]
    assert sum(line.startswith("topic ") for line in lines) == 2
    assert "… and 1 smaller topic; --top 3 prints all of them" in lines
    assert main(["groups", model, str(path), "--by", "journal", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 3 * len({record["journal"] for record in records})
    sums = {}
    for row in rows:
        sums[row["group"]] = sums.get(row["group"], 0) + row["prevalence"]
    assert list(sums.values()) == pytest.approx([1] * len(sums))


def test_groups_have_the_labels_of_topics(model, papers, folder, capsys):
    path, by = str(papers[0]), ["--by", "date", "--period", "year"]
    labelled = str(folder / "labelled")
    save_model(labelled, load_model(model)._replace(labels={1: "cooking"}))
    assert main(["groups", labelled, path, *by, "--top", "3"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("topic ")]
    assert sorted(line.split(":")[:-1] for line in lines) == [["topic 0"], ["topic 1", " cooking"], ["topic 2"]]
    assert main(["groups", labelled, path, *by, "--out", f"{labelled}.csv"]) == 0
    assert [row["label"] for row in read_table(folder / "labelled.csv")][:4] == ["", "cooking", "", ""]


@pytest.mark.parametrize("suffix", ["tsv", "csv"])
def test_kept_numbers_have_all_their_digits(model, folder, suffix):
    values = [1_609_459_200.5, 0.1 + 0.2, 12_345_678]
    path, out = folder / "numbers.jsonl", folder / f"numbers.{suffix}"
    path.write_text("".join(json.dumps({"text": "sail", "x": value}) + "\n" for value in values))
    assert main(["transform", model, str(path), "--keep", "x", "--out", str(out)]) == 0
    assert [float(row["x"]) for row in read_table(out)] == values


def test_characters_that_command_a_terminal_are_shown_as_escapes(model, folder, capsys):
    path = folder / "escapes.jsonl"
    records = [{"id": f"a\x1b[2J{d}", "group": "g\x1b]0;title", "text": f"sail \x1b[31m {d}"} for d in range(3)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["similar", model, str(path), "--row", "0"]) == 0
    assert main(["groups", model, str(path), "--by", "group"]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "a\\x1b[2J1" in out
    assert "g\\x1b]0;title" in out


def test_years_are_in_the_order_of_time_without_a_period(model, folder, capsys):
    path = folder / "years.csv"
    path.write_text("year,text\n2021.0,sail\n2021.0,anchor\n2020,dough\n2019,comet\n,comet\n")
    assert main(["groups", model, str(path), "--by", "year", "--period", "year", "--json"]) == 0
    assert [json.loads(line)["group"] for line in capsys.readouterr().out.splitlines()[::3]] == ["2019", "2020", "2021"]
    path.write_text("year,text\n2021,sail\n2021,anchor\n2020,dough\n")
    assert main(["groups", model, str(path), "--by", "year", "--json"]) == 0
    assert [json.loads(line)["group"] for line in capsys.readouterr().out.splitlines()[::3]] == ["2020", "2021"]


def test_similar_documents_have_the_smallest_hellinger_distance(model, papers, written, capsys):
    path, records = papers
    table = np.load(written / "theta.npz")
    # γ = θ (Σ α + words), and γ − α are the expected words per topic
    tokens = np.maximum(table["theta"] * (3 * 0.1 + table["words"][:, None]) - 0.1, 0)
    p = tokens / np.maximum(tokens.sum(1, keepdims=True), 1e-3)
    distance = np.sqrt(((np.sqrt(p) - np.sqrt(p[4])) ** 2).sum(1) / 2)
    distance[[4, *np.flatnonzero(table["words"] == 0)]] = np.inf
    order = np.argsort(distance, kind="stable")[:5]
    for query in (["--to", "p/4"], ["--to", "4"], ["--row", "4"]):
        assert main(["similar", model, str(path), *query, "--top", "5", "--keep", "journal", "--json"]) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        np.testing.assert_allclose([each["similarity"] for each in found], 1 - distance[order], atol=1e-3)
        np.testing.assert_allclose([1 - distance[each["document"]] for each in found], 1 - distance[order], atol=1e-3)
        assert all(each["id"] == records[each["document"]]["id"] for each in found)
        assert all(each["fields"] == {"journal": records[each["document"]]["journal"]} for each in found)
        assert all(each["text"] == records[each["document"]]["text"] for each in found)
    assert main(["similar", model, str(path), "--text", "Butter, dough and butter", "--top", "1"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["similarity", "document"]
    value, title, *words = line.split()
    assert float(value) > 0.8
    assert title.startswith("p/")
    assert {"butter", "dough"} & set(words)


def test_a_document_of_a_corpus_folder_is_shown_by_its_words(model, papers, folder, capsys):
    path, _ = papers
    arguments = ["--keep", "date", "--overwrite", "--vocabulary", f"{model}/vocabulary.txt"]
    assert main(["convert", str(path), str(folder / "dated corpus"), *arguments]) == 0
    capsys.readouterr()
    assert main(["similar", model, str(folder / "dated corpus"), "--to", "p/0", "--top", "60"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 57  # the document itself and two empty ones are left out
    named = next(line for line in lines if "document 9" in line)  # it has neither id nor date
    assert set(named.split()[3:]) <= set(WORDS)
    assert sum(" · 20" in line for line in lines) == 55


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["groups", "--by", "volume"], "--by volume: there is no such field; expected one of 'id', 'date', 'journal'"),
        (["groups", "--by", "journal", "--period", "year"], "--by journal: expected years, got 'Kitchen"),
        (["groups", "--by", "date", "--out", "x.csv", "--json"], "--json has no effect with --out"),
        (["groups", "--by", "date", "--top", "3", "--json"], "--top has no effect with --json or --out"),
        (["groups", "--by", "date", "--out", "x.xls"], "x.xls: expected a name that ends in .tsv"),
        (["similar", "--to", "p/77"], "--to p/77: no document has this id, and the rows are 0 to 59"),
        (["similar", "--to", "60"], "--to 60: no document has this id, and the rows are 0 to 59"),
        (["similar", "--row", "60"], "--row 60 must be less than the number of documents, 60"),
        (["similar", "--row", "7"], "the document or text has no word that is in the vocabulary"),
        (["similar", "--text", "zebra"], "the document or text has no word that is in the vocabulary"),
        (["transform", "--keep", "volume"], "--keep volume: there is no such field"),
        (["transform", "--keep", "id"], "--keep id: the output has a column of this name"),
        (["score", "--out", "x.csv", "--id", "none"], "--id none: there is no such field"),
        (["score", "--id", "id"], "--id has no effect without --out"),
        (["transform", "--out", "papers.jsonl"], "papers.jsonl: is one of the inputs, which would be replaced"),
        (["score", "--keep", "date"], "--keep has no effect without --out"),
    ],
)
def test_errors_name_the_option_and_what_is_expected(model, papers, capsys, monkeypatch, folder, arguments, message):
    monkeypatch.chdir(folder)
    command, *options = arguments
    assert main([command, model, str(papers[0]), *options]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]


def test_groups_of_an_id_are_refused_before_anything_is_computed(model, papers, capsys, monkeypatch):
    monkeypatch.setattr("smoothgrad_jax.app.commands.groups.MAX_GROUPS", 20)
    monkeypatch.setattr(SavedModel, "transform", None)
    assert main(["groups", model, str(papers[0]), "--by", "id"]) == 1
    assert (
        "--by id: has more than 20 different values; for dates pass --period year or month" in capsys.readouterr().err
    )


def test_a_duplicate_id_is_refused_with_its_rows(model, folder, capsys):
    path = folder / "twice.csv"
    path.write_text("id,text\n7,sail\nx,dough\n7,comet\n")
    assert main(["similar", model, str(path), "--to", "7"]) == 1
    assert "--to 7: 2 documents have this id, rows 0, 2; pass one as --row" in capsys.readouterr().err
    assert main(["similar", model, str(path), "--to", "2", "--json"]) == 0
    assert {json.loads(line)["document"] for line in capsys.readouterr().out.splitlines()} == {0, 1}


def test_the_report_shows_ids_and_kept_fields(model, papers, written, folder):
    best = papers[1][np.load(written / "theta.npz")["theta"][:, 2].argmax()]
    out = folder / "report.html"
    assert main(["report", model, str(papers[0]), "--keep", "journal", "--out", str(out)]) == 0
    assert json.dumps(f"{best['id']} · {best['journal']}", ensure_ascii=False) in out.read_text()
    (folder / "files").mkdir()
    for name, words in TOPICS.items():
        (folder / "files" / f"{name}.txt").write_text(" ".join(words * 3))
    assert main(["report", model, str(folder / "files"), "--out", str(out)]) == 0
    assert all(f'"{name}.txt"' in out.read_text() for name in TOPICS)


def test_parquet_without_pyarrow_names_the_extra_before_anything_is_read(model, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["transform", model, "missing", "--out", "theta.parquet"]) == 1
    assert 'pip install "smoothgrad_jax[parquet]"' in capsys.readouterr().err


def test_an_incomplete_table_is_removed(folder):
    for suffix in SUFFIXES:
        out = folder / f"incomplete.{suffix}"

        def fail(path=out):
            with tables.table_writer(str(path)) as write:
                write({"a": np.arange(3)})
                raise OSError("no space")

        with pytest.raises(OSError, match="no space"):
            fail()
        assert not list(folder.glob("incomplete*"))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None, 2], int),
        ([1, 2.5], float),
        ([2.5, 1, None], float),
        ([True, False], bool),
        ([True, 1], str),
        (["a", 1, None], str),
        ([1, 2**63], str),
        ([None, None], str),
    ],
)
@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_columns_of_any_values_have_one_type(folder, values, kind, suffix):
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps({"text": "sail", "x": value}) + "\n" for value in values))
    source = open_source(path, keep=["x"])
    types = tables.column_types(source.keep, source.metadata())
    assert types == {"x": kind}
    out = folder / f"values.{suffix}"
    with tables.table_writer(str(out), lambda: types) as write:
        for value in values:
            write({"x": [value]})
    for row, value in zip(read_table(out), values, strict=True):
        if value is not None:
            assert row["x"] == kind(value)
        else:
            assert row["x"] in (None, "") or np.isnan(row["x"])


def test_pandas_reads_the_tables(papers, written):
    pandas = pytest.importorskip("pandas")
    read = {"tsv": pandas.read_table, "csv": pandas.read_csv, "parquet": pandas.read_parquet}
    for suffix, function in read.items():
        frame = function(written / f"theta.{suffix}")
        assert frame["journal"].iloc[:7].tolist() == [record["journal"] for record in papers[1][:7]]
        assert frame["pages"].isna().sum() == 1
        assert frame[frame.words == 0].index.tolist() == [7, 8]


def test_a_table_can_be_piped(model, papers):
    command = [sys.executable, "-m", "smoothgrad_jax", "transform", model, str(papers[0])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 61


def test_an_output_in_the_folder_of_the_documents_is_no_document(model, tmp_path):
    for name in ("a", "c"):
        (tmp_path / f"{name}.txt").write_text("anchor sail")
    table, converted = tmp_path / "b.csv", tmp_path / "b"
    assert main(["transform", model, str(tmp_path), "--out", str(table)]) == 0
    with table.open() as lines:
        assert [row["id"] for row in csv.DictReader(lines)] == ["a.txt", "c.txt"]
    table.unlink()
    assert main(["convert", str(tmp_path), str(converted)]) == 0
    assert corpus_folder.open_folder(converted).corpus.num_docs == 2


def test_a_single_document_has_no_similar_ones(model, folder, capsys):
    path = folder / "one.csv"
    path.write_text("id,text\na,sail\n")
    assert main(["similar", model, str(path), "--to", "a"]) == 0
    assert capsys.readouterr().out == "similarity  document\n"


def test_a_file_that_loses_documents_while_it_is_read_is_an_error(model, folder, capsys, monkeypatch):
    path = folder / "shrinks.csv"
    path.write_text("id,text\na,sail\nb,dough\n")

    def read(*args, **options):
        counted = corpus_folder_read(*args, **options)
        path.write_text("id,text\na,sail\n")
        return counted

    corpus_folder_read = corpus_folder.read
    monkeypatch.setattr(corpus_folder, "read", read)
    assert main(["transform", model, str(path), "--out", str(folder / "shrinks.tsv")]) == 1
    assert "shrinks.csv: has fewer documents than before; was it changed?" in capsys.readouterr().err
    assert not (folder / "shrinks.tsv").exists()
