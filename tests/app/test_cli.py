"""The command: its files and JSON output, interruption and resumption, and one-line errors."""

import errno
import fcntl
import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from smoothgrad_jax import SmoothedLDA, load_model, save_model
from smoothgrad_jax.app import cli, demo_corpus, progress
from smoothgrad_jax.app.cli import main
from smoothgrad_jax.app.commands import metrics
from smoothgrad_jax.data import corpus_folder
from smoothgrad_jax.data.folder_lock import FolderInUseError
from smoothgrad_jax.training import checkpoints
from smoothgrad_jax.training.checkpoints import Checkpoints

ROOT = Path(__file__).parents[2]
TOPICS = {
    "sailing": ["sail", "harbour", "anchor", "mast", "wind", "rudder", "tide", "crew", "deck", "rope"],
    "cooking": ["oven", "flour", "butter", "garlic", "simmer", "whisk", "onion", "pepper", "dough", "salt"],
    "stars": ["star", "galaxy", "telescope", "orbit", "planet", "redshift", "supernova", "dust", "comet", "moon"],
}
# A parent that ignores SIGINT, such as `nohup ... &`, passes that on to its children: the child resets the handler.
_MAIN = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from smoothgrad_jax.app.cli import main; sys.exit(main())"
)
COMMON = ["--topics", "3", "--passes", "6", "--batch-size", "32", "--threads", "1"]
# Step sizes that do not depend on the number of passes: a run continues where a longer one would be.
ANY_PASSES = ["--schedule", "robbins-monro"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def texts(folder):
    """Three hundred lines, each from one topic."""
    rng = np.random.default_rng(0)
    names = list(TOPICS)
    lines = [" ".join(rng.choice(TOPICS[names[i % 3]], 20)) for i in range(300)]
    path = folder / "texts.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def model(folder, texts):
    assert main(["fit", str(texts), "--out", str(folder / "model"), *COMMON]) == 0
    return folder / "model"


def test_fit_finds_the_topics_and_topics_prints_them(model, capsys):
    assert main(["topics", str(model), "--words", "10"]) == 0
    head, *lines, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["topic", "prevalence", "NPMI", "words"]
    found = {frozenset(line.split("%")[1].split()[1:]) for line in lines}
    assert found == {frozenset(words) for words in TOPICS.values()}
    saved = load_model(model)
    assert len(saved.history) >= 10
    assert saved.history[-1]["passes"] == pytest.approx(6, abs=0.2)
    assert saved.word_counts.sum() == 300 * 20
    assert main(["topics", str(model), "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(record["prevalence"] for record in records) == pytest.approx(1)
    assert len(records[0]["words"]) == 10
    # All words of a line are from one topic, and lines of the same topic differ in their words.
    assert all(0.5 < record["npmi"] <= 1 and record["remarks"] == [] for record in records)
    assert last == f"quality: {saved.quality.describe()}"
    assert saved.quality.num_docs == 300 - saved.settings["held_out"]
    assert saved.quality.summary() == {
        "npmi": pytest.approx(np.mean([record["npmi"] for record in records])),
        "diversity": 1,
        "effective_topics": pytest.approx(3, abs=0.01),
        "near_duplicates": 0,
        "junk_topics": 0,
    }


def test_topics_of_a_model_without_quality_and_of_one_with_bad_topics(model, folder, capsys):
    saved = load_model(model)
    save_model(folder / "old", saved._replace(quality=None))
    assert main(["topics", str(folder / "old")]) == 0
    out = capsys.readouterr().out
    assert "NPMI" not in out
    assert out.splitlines()[-1] == "quality: 3.0 effective topics of 3"
    assert main(["topics", str(folder / "old"), "--json"]) == 0
    assert "npmi" not in json.loads(capsys.readouterr().out.splitlines()[0])
    bad = saved.quality._replace(near_duplicates=[(0, 2)], junk={2: "flat"})
    save_model(folder / "bad", saved._replace(quality=bad, prevalence=np.array([0.5, 0.499, 0.001])))
    assert main(["topics", str(folder / "bad")]) == 0
    out = capsys.readouterr().out
    assert "(near-duplicate of topic 2)" in out
    assert "… and 1 smaller topic\n" in out
    assert "1 near-duplicate pair, 1 junk topic" in out
    assert main(["topics", str(folder / "bad"), "--all"]) == 0
    assert "(flat; near-duplicate of topic 0)" in capsys.readouterr().out


def test_topics_says_how_many_topics_are_in_effect_used(model, folder, capsys):
    """exp of the entropy of (0.98, 0.01, 0.01) is 1.12; of a third each it is 3, and nothing is said."""
    saved = load_model(model)
    for name, quality in (("one used", saved.quality._replace(effective_topics=1.12)), ("one used, old", None)):
        save_model(folder / name, saved._replace(quality=quality, prevalence=np.array([0.98, 0.01, 0.01])))
        assert main(["topics", str(folder / name)]) == 0
        hint = capsys.readouterr().out.splitlines()[-1]
        assert hint.startswith("in effect, 1 of the 3 topics are used; fewer topics may be as good")
        assert "sweep --topics 2,3" in hint
    assert main(["topics", str(model)]) == 0
    assert "in effect" not in capsys.readouterr().out


def test_transform_writes_the_format_of_the_suffix(model, texts, folder, capsys):
    new = folder / "new.jsonl"
    new.write_text('{"text": "anchor mast rope zebra"}\n{"text": "star moon comet"}\n{"text": "zebra"}\n')
    assert main(["transform", str(model), str(new)]) == 0
    out, err = capsys.readouterr()
    rows = [line.split("\t") for line in out.splitlines()]
    assert rows[0] == ["document", "words", "topic 0", "topic 1", "topic 2"]
    assert [row[:2] for row in rows[1:]] == [["0", "3"], ["1", "3"], ["2", "0"]]
    theta = np.array([row[2:] for row in rows[1:]], float)
    np.testing.assert_allclose(theta.sum(1), 1, rtol=1e-4)
    words = [{word for word, _ in each} for each in load_model(model).top_words(10)]
    assert "anchor" in words[theta[0].argmax()]
    assert "comet" in words[theta[1].argmax()]
    assert "ignoring 2 words outside of the vocabulary\n1 of 3 documents is empty, or without any known word\n" in err
    for name in ("theta.npz", "theta.jsonl", "theta.tsv"):
        assert main(["transform", str(model), str(new), "--out", str(folder / name)]) == 0
    np.testing.assert_allclose(np.load(folder / "theta.npz")["theta"], theta, atol=1e-5)
    listed = [json.loads(line) for line in (folder / "theta.jsonl").read_text().splitlines()]
    np.testing.assert_allclose([each["topics"] for each in listed], theta, atol=1e-5)
    assert (folder / "theta.tsv").read_text() == out
    assert main(["transform", str(model), str(new), "--out", str(folder / "theta.xls")]) == 1
    assert "ends in .tsv, .csv, .jsonl, .npz or .parquet" in capsys.readouterr().err


def test_labels_from_a_file_stay_in_the_model(model, texts, folder, capsys):
    named, path = folder / "named", folder / "labels.tsv"
    assert main(["fit", str(texts), "--out", str(named), *COMMON]) == 0
    path.write_text("topic\tlabel\n1\tseafaring\n2\tsky\n")
    capsys.readouterr()
    assert main(["topics", str(named), "--labels", str(path), "--words", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == f"{named}: 2 labels\n"
    lines = {int(line.split()[0]): line.split()[3:] for line in out.splitlines()[1:-1]}
    assert [lines[k][0] for k in (1, 2)] == ["seafaring:", "sky:"]
    assert [len(lines[k]) for k in range(3)] == [2, 3, 3]
    assert main(["topics", str(named), "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {record["topic"]: record["label"] for record in records} == {0: None, 1: "seafaring", 2: "sky"}
    assert main(["transform", str(named), str(texts)]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("topic 0\ttopic 1: seafaring\ttopic 2: sky")
    # The topics of a resumed run continue from those of the model, and keep the labels.
    assert main(["fit", str(texts), "--out", str(named), "--resume", "--passes", "7"]) == 0
    assert load_model(named).labels == {1: "seafaring", 2: "sky"}
    # A damaged model does not stop the run.
    description = (named / "model.json").read_bytes()
    (named / "model.json").write_bytes(description[:-9])
    assert main(["fit", str(texts), "--out", str(named), "--resume", "--passes", "7"]) == 0
    assert "labels of the earlier model are lost" in capsys.readouterr().err
    assert load_model(named).labels is None
    (named / "model.json").write_bytes(description)
    # A wrong file changes nothing, and a second file replaces the labels.
    path.write_text("0\tcooking\n3\tsky\n")
    capsys.readouterr()
    assert main(["topics", str(named), "--labels", str(path)]) == 1
    assert capsys.readouterr().err.endswith("labels.tsv, line 2: labels: expected topics from 0 to 2, got 3\n")
    assert load_model(named).labels == {1: "seafaring", 2: "sky"}
    path.write_text('{"0": "cooking"}')
    assert main(["topics", str(named), "--labels", str(path)]) == 0
    assert load_model(named).labels == {0: "cooking"}
    # A run that writes the model would replace the labels at its end.
    with open(named / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["topics", str(named), "--labels", str(path)]) == 1
    assert "has been writing here since" in capsys.readouterr().err
    # `--overwrite` replaces the model at the end: a run that is killed before leaves checkpoints beside other topics.
    earlier = {path: path.read_bytes() for path in named.iterdir() if path.is_file()}
    assert main(["fit", str(texts), "--out", str(named), "--overwrite", *COMMON, "--seed", "1"]) == 0
    assert load_model(named).labels is None
    for path, content in earlier.items():
        path.write_bytes(content)
    assert main(["fit", str(texts), "--out", str(named), "--resume", "--passes", "7"]) == 0
    assert "labels of the earlier model are lost: seed was 0" in capsys.readouterr().err
    assert load_model(named).labels is None


def test_score(model, texts, folder, capsys):
    assert main(["score", str(model), str(texts), "--json", "--out", str(folder / "scores.tsv")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["documents"] == 300
    assert found["held_out_words"] == 3_000
    assert found["score"] == pytest.approx(np.log(1 / 10), abs=0.1)  # a line has ten words that are equally likely
    assert found["perplexity"] == pytest.approx(np.exp(-found["score"]))
    table = np.loadtxt(folder / "scores.tsv", skiprows=1)
    np.testing.assert_array_equal(table[:, 1], 20)
    assert table[:, 2].sum() / table[:, 3].sum() == pytest.approx(found["score"], rel=1e-4)


def test_fit_of_a_converted_corpus_gives_the_same_model(model, texts, folder, capsys):
    packed = folder / "texts.txt.gz"
    packed.write_bytes(gzip.compress(texts.read_bytes()))
    assert main(["convert", str(packed), str(folder / "corpus")]) == 0
    assert "300 documents, 30 distinct words, 6,000 words in total" in capsys.readouterr().out
    out = folder / "from folder"
    assert main(["fit", str(folder / "corpus"), "--out", str(out), *COMMON, "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert records[-1]["event"] == "done"
    assert {record["event"] for record in records[:-1]} == {"progress"}
    assert load_model(out).quality.summary().items() <= records[-1].items()
    np.testing.assert_array_equal(load_model(out).lam, load_model(model).lam)
    assert main(["fit", str(folder / "corpus"), "--out", str(out), "--overwrite", "--min-df", "2"]) == 2
    assert f"--min-df has no effect: the words of {folder / 'corpus'} were chosen by" in capsys.readouterr().err


def test_report(model, texts, folder, capsys):
    assert main(["report", str(model), str(texts), "--title", "Three things"]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == model / "report.html"
    content = page.read_text()
    assert "Three things" in content
    first = texts.read_text().splitlines()
    assert any(line in content for line in first)  # a typical document


def test_a_report_has_groups_ids_and_another_model(model, texts, folder, capsys):
    lines = texts.read_text().splitlines()
    records = [
        {"key": f"d{i}", "text": line, "date": f"{2001 + i % 3}-05-0{1 + i % 9}"} for i, line in enumerate(lines)
    ]
    records.append({"key": "last", "text": "anchor"})
    path, out = folder / "dated.jsonl", folder / "dated.html"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    other = folder / "other model"
    save_model(other, load_model(model)._replace(labels={1: "first"}))
    by_year = ["--by", "date", "--period", "year", "--out", str(out), "--compare", str(other)]
    assert main(["report", str(model), str(path), "--field", "text", "--id", "key", *by_year]) == 0
    text, log = out.read_text(), capsys.readouterr().err
    assert "left out: 1 document without a value of date" in log
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    assert (data["groups"]["field"], data["groups"]["values"]) == ("date", ["2001", "2002", "2003"])
    assert data["groups"]["docs"] == [100, 100, 100]
    # A line has the words of one topic, and the topics follow each other as the years do.
    means = np.array(data["groups"]["topics"])[:, 0]
    assert sorted(means.argmax(1)) == [0, 1, 2]
    assert means.max(1).min() > 0.9
    titles = [title for each in data["documents"].values() for _, title, _ in each]
    assert all(re.fullmatch(r"d\d+ · 200[123]-05-0\d", title) for title in titles)
    assert (data["comparison"]["name"], data["comparison"]["partner"]) == ("other model", [0, 1, 2])
    assert data["comparison"]["topics"][1]["label"] == "first"
    # A converted corpus has the same metadata.
    assert main(["convert", str(path), str(folder / "dated"), "--field", "text", "--id", "key", "--keep", "date"]) == 0
    again = folder / "again.html"
    assert main(["report", str(model), str(folder / "dated"), *by_year, "--out", str(again)]) == 0
    stored = json.loads(re.search(r'id="data">(.*?)</script>', again.read_text())[1])
    assert stored["groups"] == data["groups"]


def test_more_passes_continue_from_the_end(texts, folder, capsys):
    """Six passes and then six more give the same bits as twelve passes."""
    twelve = [*COMMON[:3], "12", *COMMON[4:], *ANY_PASSES]
    assert main(["fit", str(texts), "--out", str(folder / "twelve"), *twelve]) == 0
    half = folder / "half"
    assert main(["fit", str(texts), "--out", str(half), *COMMON, *ANY_PASSES]) == 0
    # --resume writes the model of a run that was killed after its last checkpoint.
    lam = load_model(half).lam
    (half / "model.json").unlink()
    assert main(["fit", str(texts), "--out", str(half), "--resume"]) == 0
    np.testing.assert_array_equal(load_model(half).lam, lam)
    assert "the run is complete after 54 steps; give more --passes to continue" in capsys.readouterr().err
    assert main(["fit", str(texts), "--out", str(half), "--resume", "--topics", "4"]) == 2
    assert "--topics was 3 in the checkpoint, and is 4 now" in capsys.readouterr().err
    assert main(["fit", str(texts), "--out", str(half), "--resume", "--rho", "0.1"]) == 2
    assert "--rho was not set in the checkpoint, and is 0.1 now" in capsys.readouterr().err
    assert main(["fit", str(texts), "--out", str(half), "--resume", "--window", "inf"]) == 2
    assert "--window was 10 in the checkpoint, and is inf now" in capsys.readouterr().err
    assert main(["fit", str(texts), "--out", str(half), "--resume", "--min-df", "7"]) == 1
    assert 'the choice of words was not set, now {"min_df": 7}' in capsys.readouterr().err
    assert main(["fit", str(texts), "--out", str(half), "--resume", "--passes", "12"]) == 0
    np.testing.assert_array_equal(load_model(half).lam, load_model(folder / "twelve").lam)
    seconds = [record["seconds"] for record in load_model(half).history]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) > 1


def test_more_passes_anneal_the_step_sizes_again(model, texts, folder):
    """The step sizes of an annealed run depend on its length; those of the steps to come follow from the new length."""
    out = folder / "annealed"
    shutil.copytree(model, out)
    assert main(["fit", str(texts), "--out", str(out), "--resume", "--passes", "12"]) == 0
    continued = load_model(out)
    assert continued.settings["schedule"] == "annealed"
    assert continued.history[-1]["step"] == 107
    assert not np.array_equal(continued.lam, load_model(model).lam)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_metrics_of_a_run_are_a_table_that_a_resumed_run_continues(texts, folder):
    """Lines of steps after the checkpoint, and a line that a kill cut off, are replaced."""
    out, four = folder / "metrics", [*COMMON[:3], "4", *COMMON[4:]]
    assert main(["fit", str(texts), "--out", str(out), *COMMON[:3], "2", *COMMON[4:], "--score-every", "3"]) == 0
    path = out / "metrics.jsonl"
    first = read_lines(path)
    assert [row["step"] for row in first] == [3, 6, 9, 12, 15, 18]
    with path.open("a") as file:
        file.write(json.dumps(first[-1] | {"step": 21, "score": 0}) + "\n" + json.dumps(first[-1])[:30])
    assert main(["fit", str(texts), "--out", str(out), *four, "--score-every", "3", "--resume"]) == 0
    rows = read_lines(path)
    assert rows[:6] == first
    assert {tuple(row) for row in rows} == {tuple(first[0])}  # the columns of a table
    table = {name: np.array([row[name] for row in rows]) for name in first[0]}
    assert table["step"].tolist() == list(range(3, 37, 3))
    assert (table["documents"] == 32 * table["step"]).all()
    np.testing.assert_allclose(table["passes"], table["documents"] / 285)
    assert (np.diff(table["seconds"]) > 0).all()
    assert (table["rate"] > 0).all()
    assert (table["window"] == 10).all()
    assert table["score"].tolist() == [each["score"] for each in load_model(out).history]


def test_metrics_have_a_line_per_score_and_null_for_what_json_cannot_hold(tmp_path):
    reports = [progress.Progress(t, t, t, t, 1.0, None, -7.0 if t == 3 else None, np.inf) for t in range(1, 5)]
    path = tmp_path / "new" / "metrics.jsonl"
    assert list(metrics.recorded(reports, path, first=0)) == reports
    rows = read_lines(path)
    assert [(row["step"], row["score"]) for row in rows] == [(1, None), (3, -7.0)]  # the first, and the score
    assert [row["window"] for row in rows] == [None, None]


def test_a_run_whose_metrics_cannot_be_written_continues(texts, folder, monkeypatch, capsys):
    monkeypatch.setattr(metrics, "_truncate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert main(["fit", str(texts), "--out", str(folder / "no metrics"), *COMMON]) == 0
    err = capsys.readouterr().err
    assert err.count("metrics.jsonl: could not be written: No space left on device; the run continues") == 1
    assert load_model(folder / "no metrics").lam.shape == (30, 3)


def test_the_name_of_an_option_is_not_completed(texts, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["fit", str(texts), "--topic", "3", "--out", "model"])
    assert "unrecognized arguments: --topic 3" in capsys.readouterr().err


def test_log_json_appends_one_object_per_event(texts, folder, capsys):
    log, out = folder / "events.jsonl", folder / "logged"
    command = ["fit", str(texts), "--out", str(out), *COMMON, "--log-json", str(log)]
    assert main(command) == 0
    records = read_lines(log)
    assert [each["event"] for each in records if each["event"] not in ("message", "progress")] == [
        *("start", "checkpoint", "done")
    ]
    assert {each["level"] for each in records} == {"info"}
    times = [datetime.fromisoformat(each["time"]) for each in records]
    assert times == sorted(times)
    assert all(time.utcoffset() == timedelta(0) for time in times)
    done = records[-1]
    start = next(each for each in records if each["event"] == "start")
    assert (start["steps"], start["settings"]["topics"]) == (54, 3)
    assert done["effective_topics"] == pytest.approx(3, abs=0.01)
    assert [each["step"] for each in records if each["event"] == "progress"] == [
        each["step"] for each in read_lines(out / "metrics.jsonl")
    ]
    assert main(command) == 1  # the folder contains a run
    assert read_lines(log)[: len(records)] == records
    last = read_lines(log)[-1]
    assert (last["level"], last["event"], last["code"]) == ("error", "error", 1)
    assert "--resume continues it" in last["message"]
    assert main([*command[:-1], str(folder / "nowhere" / "log")]) == 1
    assert "the log cannot be written: No such file or directory; give another file" in capsys.readouterr().err


LOCKS = """
import sys, time
from smoothgrad_jax.training.checkpoints import Checkpoints
from smoothgrad_jax.data.folder_lock import FolderLock
checkpoints, lock = Checkpoints(sys.argv[1]), FolderLock(sys.argv[2])
checkpoints.lock()
print("locked", flush=True)
time.sleep(60)
"""


def test_a_folder_into_which_another_process_writes_is_refused(texts, tmp_path, capsys):
    out, checkpoints = tmp_path / "out", tmp_path / "checkpoints"
    command = [sys.executable, "-c", LOCKS, str(checkpoints), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout.readline() == "locked\n"
        for arguments in (["fit", str(texts), "--overwrite"], ["sweep", str(texts)], ["demo"]):
            assert main([*arguments, "--out", str(out)]) == 1
            error = capsys.readouterr().err
            assert f"out: process {child.pid} on host {socket.gethostname()} has been writing here since" in error
        with pytest.raises(FolderInUseError, match=f"checkpoints: process {child.pid} on host"):
            SmoothedLDA(2, checkpoints=checkpoints).fit(np.ones((4, 3)))
        assert [path.name for path in (*out.iterdir(), *checkpoints.iterdir())] == [".lock"] * 2
        child.kill()
    assert main(["fit", str(texts), "--overwrite", "--out", str(out), *COMMON, "--passes", "1"]) == 0


@pytest.fixture(name="converted", scope="module")
def some_corpus_folder(folder, texts):
    assert main(["convert", str(texts), str(folder / "converted")]) == 0
    return folder / "converted"


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def test_a_flipped_byte_of_a_corpus_stops_fit_which_keeps_a_checkpoint(converted, tmp_path, capsys):
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    shutil.copytree(converted, corpus)
    flip_a_byte(corpus / "data.npy")
    assert main(["fit", str(corpus), "--out", str(out), *COMMON]) == 1
    error = capsys.readouterr().err
    assert f"{corpus / 'data.npy'}: damaged: expected the checksum" in error
    assert "the model is not saved. Restore the corpus and repeat the command with --resume" in error
    assert not (out / "model.json").exists()
    assert Checkpoints(out / "checkpoints").latest().step > 0
    shutil.rmtree(corpus)
    shutil.copytree(converted, corpus)
    assert main(["fit", str(corpus), "--out", str(out), *COMMON, "--resume"]) == 0
    assert load_model(out).lam.shape == (30, 3)


def test_verify_reports_every_file_of_a_corpus_a_model_and_its_checkpoints(converted, model, tmp_path, capsys):
    for source in (converted, model):
        copy = tmp_path / source.name
        shutil.copytree(source, copy)
        assert main(["verify", str(copy)]) == 0
        files = [path for path in copy.rglob("*.*") if path.suffix in (".npy", ".json", ".txt")]
        *lines, last = capsys.readouterr().out.splitlines()
        assert last == f"{copy}: {len(files)} files, all intact"
        assert len(lines) == len(files) >= 5
        assert all(line.startswith("ok ") for line in lines)
        for path in files:
            before = path.read_bytes()
            flip_a_byte(path)
            assert main(["verify", str(copy), "--json"]) == 1
            records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            assert [record["file"] for record in records if not record["ok"]] == [str(path)]
            path.write_bytes(before)
    assert main(["verify", str(tmp_path)]) == 1
    assert "expected the folder of a corpus, a model, a run or a checkpoint" in capsys.readouterr().err
    file = tmp_path / "papers.csv"
    file.write_text("")
    assert main(["verify", str(file)]) == 1
    assert capsys.readouterr().err.endswith("a model, a run or a checkpoint, got a file\n")
    assert main(["verify", str(tmp_path / "missing")]) == 1
    assert capsys.readouterr().err.endswith("a model, a run or a checkpoint; there is no such folder\n")
    (tmp_path / "sweep.json").write_text("[]")
    assert main(["verify", str(tmp_path)]) == 1
    assert f"one folder per run in {tmp_path / 'runs'}" in capsys.readouterr().err


def test_a_full_disk_at_a_checkpoint_costs_no_training(texts, tmp_path, capsys, monkeypatch):
    real, calls = checkpoints.write_tree, []

    def write_tree(folder, tree):
        calls.append(folder)
        if len(calls) <= 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(folder, tree)

    monkeypatch.setattr(checkpoints, "write_tree", write_tree)
    out = tmp_path / "out"
    assert main(["fit", str(texts), "--out", str(out), *COMMON, "--checkpoint-every", "1e-9"]) == 0
    error = capsys.readouterr().err
    assert error.count("No space left on device; there is no earlier checkpoint") == 2
    assert len(calls) > 2
    assert Checkpoints(out / "checkpoints").latest().step == 54
    assert load_model(out).lam.shape == (30, 3)


def test_too_little_space_is_reported_before_training(texts, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    assert main(["fit", str(texts), "--out", str(tmp_path / "out"), *COMMON]) == 1
    assert "the model needs 360 bytes, and 100 are free; free some space first" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3_000))
    assert main(["fit", str(texts), "--out", str(tmp_path / "out"), *COMMON, "--passes", "1"]) == 0
    assert "bytes, and 3,000 are free; free some space" in capsys.readouterr().err


def test_control_characters_of_a_vocabulary_do_not_reach_the_terminal(model, tmp_path, capsys):
    evil = load_model(model)
    save_model(tmp_path, evil._replace(vocabulary=["\x1b[2J\x9b1m\u202eword"] * len(evil.lam)))
    assert main(["topics", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert r"\x1b[2J\x9b1m\u202eword" in out
    assert not set(out) & {"\x1b", "\x9b", "\u202e"}
    assert main(["topics", str(tmp_path / "\x1b[2J")]) == 1
    assert r"\x1b[2J: expected the folder of a model" in capsys.readouterr().err


def test_a_full_disk_while_rows_are_written_is_an_error_with_a_name(model, texts, tmp_path):
    program = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
        "from smoothgrad_jax.app.cli import main; sys.exit(main())"
    )
    out = tmp_path / "theta.npz"
    command = [sys.executable, "-c", program, "transform", str(model), str(texts), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert f"smoothgrad transform: {out}: could not be written: File too large; the incomplete file" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


TWICE = [signal.SIGINT] * 2, [signal.SIGTERM] * 2, [signal.SIGHUP, signal.SIGTERM]


@pytest.mark.parametrize("numbers", [TWICE[0], *(pytest.param(each, marks=pytest.mark.slow) for each in TWICE[1:])])
def test_an_interrupted_run_is_saved_and_can_be_resumed(texts, folder, numbers):
    """The first signal saves the model and a checkpoint, whatever comes after it."""
    out = folder / f"interrupted by {numbers[0]}"
    command = [sys.executable, "-c", _MAIN, "fit", str(texts), "--out", str(out), *COMMON, "--json"]
    command[command.index("--passes") + 1] = "1000000"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, stderr=subprocess.PIPE) as child:
        child.stdout.readline()  # it trains
        time.sleep(0.2)
        for number in numbers:
            child.send_signal(number)
            time.sleep(0.005)
        out_text, err_text = child.communicate(timeout=60)
    assert child.returncode == 128 + numbers[0], err_text
    last = json.loads(out_text.splitlines()[-1])
    assert last["event"] == "interrupted"
    assert "repeat the command with --resume to continue" in err_text
    assert load_model(out).lam.shape == (30, 3)
    assert Checkpoints(out / "checkpoints").latest().step == last["step"]
    if numbers[0] == signal.SIGINT:
        passes = round((last["step"] + 20) * 32 / 285) + 1
        assert main(["fit", str(texts), "--out", str(out), "--resume", "--json", "--passes", str(passes)]) == 0
        assert load_model(out).history[-1]["step"] > last["step"]


HELP = """
import contextlib, sys
from smoothgrad_jax.app import cli
for arguments in ["--help"], *([name, "--help"] for name in cli.COMMANDS):
    with contextlib.suppress(SystemExit):
        cli.main(arguments)
assert not {"jax", "numpy", "scipy", "sklearn", "tqdm"} & set(sys.modules)
"""


def test_every_command_has_help_that_imports_no_numpy_and_no_jax():
    command = [sys.executable, "-W", "error", "-c", HELP]
    printed = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    first, *others = printed.split("usage: smoothgrad ")[1:]
    for (name, about), text in zip(cli.COMMANDS.items(), others, strict=True):
        assert name in first.split()
        assert text.startswith(f"{name} [-h]")
        assert about.summary[1:20] in text


def test_a_run_whose_output_has_no_reader_is_completed(texts, tmp_path):
    """As before `| head -1`, or before a `tee` that Ctrl-C has ended."""
    command = [sys.executable, "-c", _MAIN, "fit", str(texts), "--out", str(tmp_path / "m"), *COMMON]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    with subprocess.Popen(command, **both, env=environment) as child:
        assert "300 documents" in child.stdout.readline()
        child.stdout.close()
        assert child.wait(timeout=60) == 0
    assert load_model(tmp_path / "m").lam.shape == (30, 3)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_output_that_cannot_be_written_at_the_end_is_an_error(model):
    """Output is buffered: Python would write it after the exit code is known, and end with code 120."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", _MAIN, "topics", str(model)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    problem = "the standard output or a temporary file"
    assert (done.returncode, done.stderr) == (1, f"smoothgrad topics: {problem}: No space left on device\n")


def test_every_command_has_help(capsys):
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert shown.startswith(f"usage: smoothgrad {command} ")
        assert cli.COMMANDS[command].description in shown
        positional = shown.partition("positional arguments: ")[2].split()
        assert "MODEL" not in positional[:1] or positional[1:5] == ["folder", "of", "a", "model:"]


def test_the_help_of_the_topics_says_what_their_columns_mean(capsys):
    for command in ("demo", "fit", "topics"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = capsys.readouterr().out
        assert "prevalence" in shown
        assert "NPMI" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "missing.txt", "--out", "m"], "missing.txt"),
        (["topics", "missing"], "missing: expected the folder of a model; there is no such folder"),
        (["fit", "texts.txt", "--out", "model", "--topics", "3"], "--resume continues it, --overwrite replaces it"),
        (["fit", "texts.txt", "--out", "cache", "--topics", "3"], "cache: is not empty"),
        (["fit", "texts.txt", "--out", "texts.txt"], "expected a folder or a new name, got a file"),
        (["fit", "texts.txt", "--out", "cache", "--resume"], "cache: contains no checkpoint to resume from"),
        (["fit", "texts.txt", "--out", "cache", "--overwrite"], "cache: is neither a model nor the folder of a run"),
        (["transform", "model", "texts.txt", "--out", "folder.tsv"], "folder.tsv: expected the name of a file"),
        (["report", "model", "--out", "cache"], "cache: expected the name of a file, got a folder"),
        (
            ["fit", "texts.txt", "--out", "new", "--held-out", "300"],
            "--held-out must leave documents to train on: 300 of 300",
        ),
        (["fit", "texts.txt", "--out", "new", "--format", "uci"], "texts.txt"),
        (
            ["fit", "texts.txt", "--out", "new", "--min-df", "301"],
            "--min-df 301 requires a document frequency",
        ),
        (["fit", "texts.txt", "--out", "new", "--min-df", "0"], "--min-df: expected an integer number of documents"),
        (["fit", "texts.txt", "--out", "new", "--sort"], "texts.txt: --sort has no meaning for text"),
        (["fit", "texts.txt", "--out", "new", "--words-file", "texts.txt"], "--words-file has no meaning for text"),
        (["transform", "model", "texts.txt", "--words-file", "texts.txt"], "--words-file has no meaning for text"),
        (
            ["fit", "texts.txt", "--out", "new", "--encoding", "utf-16"],
            "not valid utf-16; pass another --encoding",
        ),
        (["fit", "missing", "--out", "new", "--rho", "0.1", "--tau", "5"], "--tau has no effect with a constant step"),
        (
            ["fit", "missing", "--out", "new", "--messages", "bfloat16"],
            "--messages has no effect without --distributed",
        ),
        (["fit", "missing", "--out", "new", "--patience", "5"], "--patience has no effect without early stopping"),
        (["transform", "missing", "missing", "--out", "theta.xls"], "ends in .tsv, .csv, .jsonl, .npz or .parquet"),
        (["report", "missing", "--out", "nowhere/report.html"], "the folder nowhere does not exist"),
        (
            ["sweep", "texts.txt", "--out", "new", "--held-out", "0"],
            "--held-out must be at least 1: a sweep compares held-out scores",
        ),
        (["report", "model", "texts.txt", "--out", "nowhere/report.html"], "nowhere"),
        (["report", "model", "--field", "body"], "--field has no effect without documents to read"),
        (["report", "model", "--by", "date"], "--by has no effect without documents to read"),
        (["report", "model", "texts.txt", "--period", "year"], "--period has no effect without --by"),
        (
            ["report", "model", "--compare", "missing"],
            "missing: expected the folder of a model; there is no such folder",
        ),
        (["topics", "model", "--all", "--json"], "--all has no effect with --json"),
        (["sweep", "missing", "--out", "texts.txt"], "texts.txt: expected a folder or a new name, got a file"),
        (["sweep", "missing", "--out", "texts.txt/new"], "texts.txt/new: expected a folder or a new name, got a file"),
        (["fit", "counts.ldac", "--out", "new", "--stop-words", "none"], "--stop-words has no meaning for ldac"),
        (["convert", "counts.ldac", "new", "--jobs", "2"], "--jobs 2 has no meaning for ldac"),
        (["convert", "counts.ldac", "new", "--min-npmi", "0.1"], "--min-npmi 0.1 has no meaning for ldac"),
        (["fit", "counts.ldac", "--out", "new", "--encoding", "latin-1"], "--encoding latin-1 has no meaning for ldac"),
        (["fit", "texts.txt", "--out", "new", "--stop-words", "german"], "there is no file 'german'"),
        (
            ["transform", "model", "texts.txt", "--out", "nowhere/theta.tsv"],
            "theta.tsv: the folder nowhere does not exist",
        ),
    ],
)
def test_an_error_is_one_line(model, folder, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(folder)
    for name in ("cache", "folder.tsv"):
        (folder / name / "something").mkdir(parents=True, exist_ok=True)
    (folder / "counts.ldac").write_text("1 0:1\n2 0:1 1:3\n")
    code = main(arguments)
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith(f"smoothgrad {arguments[0]}: ")
    assert (out, err.count("\n")) == ("", 1)
    assert code == (2 if err.startswith(f"smoothgrad {arguments[0]}: --") else 1)
    assert not Path("new").exists()
    assert Path("cache/something").is_dir()
    assert Path("folder.tsv/something").is_dir()


def test_the_remains_of_a_run_killed_before_its_first_checkpoint_are_replaced(texts, folder, capsys):
    for extra in (["--resume"], []):
        out = folder / f"killed early {len(extra)}"
        (out / "checkpoints" / ".new-1").mkdir(parents=True)
        assert main(["fit", str(texts), "--out", str(out), *COMMON[:3], "1", *COMMON[4:], *extra]) == 0
        assert load_model(out).lam.shape == (30, 3)
        assert ("no checkpoint to resume from yet" in capsys.readouterr().err) == bool(extra)


def test_a_run_resumes_from_an_earlier_checkpoint_if_the_last_is_damaged(texts, folder, capsys):
    out, complete = folder / "damaged", folder / "undamaged"
    for passes in ("2", "4"):
        extra = ANY_PASSES if passes == "2" else ["--resume"]
        assert main(["fit", str(texts), "--out", str(out), *COMMON[:3], passes, *COMMON[4:], *extra]) == 0
    last = max((out / "checkpoints").iterdir())
    for array in last.glob("*.npy"):
        array.write_bytes(array.read_bytes()[:-1])
    capsys.readouterr()
    assert main(["fit", str(texts), "--out", str(out), "--resume", "--passes", "4"]) == 0
    err = capsys.readouterr().err
    assert f"{last}" in err
    assert "damaged: expected" in err
    assert "resuming from an earlier checkpoint" in err
    assert main(["fit", str(texts), "--out", str(complete), *COMMON[:3], "4", *COMMON[4:], *ANY_PASSES]) == 0
    np.testing.assert_array_equal(load_model(out).lam, load_model(complete).lam)


def test_a_missing_extra_is_one_line(texts):
    program = (
        "import sys; sys.modules['sklearn'] = sys.modules['joblib'] = None; from smoothgrad_jax.app.cli import main;"
        f"sys.exit(main(['fit', {str(texts)!r}, '--out', 'nowhere']))"
    )
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 1
    assert 'pip install "smoothgrad_jax[' in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_errors_name_the_options_of_the_command(texts, folder, monkeypatch, capsys):
    for code in (0, 1):
        assert main(["convert", str(texts), str(folder / "twice")]) == code
    assert "--overwrite" in capsys.readouterr().err
    monkeypatch.setattr(corpus_folder, "read", lambda *_, **__: np.empty(2**55))
    assert main(["fit", str(texts), "--out", str(folder / "huge")]) == 1
    assert "smoothgrad fit: out of memory" in capsys.readouterr().err


def test_a_terminal_without_unicode_shows_the_help(model):
    program = [sys.executable, "-m", "smoothgrad_jax", "fit", "--help"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    assert (
        "step sizes" in subprocess.run(program, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    )


def test_wrong_arguments_are_code_2(capsys):
    for arguments in (
        ["fit", "x"],
        ["fit", "x", "--out", "m", "--topics", "0"],
        ["nothing"],
        ["demo", "--seed", "-1"],
        ["fit", "x", "--out", "m", "--alpha", "-1"],
        ["fit", "x", "--out", "m", "--window", "x"],
        ["fit", "x", "--out", "m", "--resume", "--overwrite"],
        ["fit", "x", "--out", "m", "--min-df", "half"],
        ["sweep", "x", "--out", "m", "--windows", "1,10,1"],
        ["sweep", "x", "--out", "m", "--topics", "10,many"],
        ["sweep", "x", "--out", "m", "--seeds", "0"],
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2


def test_a_vocabulary_beside_the_counts_is_reported_and_can_be_ignored(tmp_path, capsys):
    counts, out = tmp_path / "counts.mm", str(tmp_path / "out")
    counts.write_text("%%MatrixMarket matrix coordinate integer general\n2 2 2\n1 1 3\n2 2 1\n")
    (tmp_path / "vocab.txt").write_text("moon\n")
    assert main(["convert", str(counts), out]) == 1
    assert "expected V = 2 words" in (err := capsys.readouterr().err)
    assert "to ignore the file, pass --words-file none" in err
    assert main(["convert", str(counts), out, "--words-file", "none"]) == 0
    assert corpus_folder.open_folder(out).vocabulary is None
    assert "vocab.txt" not in capsys.readouterr().err
    (tmp_path / "vocab.txt").write_text("moon\nstar\n")
    assert main(["convert", str(counts), out, "--overwrite"]) == 0
    assert f"reading the words from {tmp_path / 'vocab.txt'}; --words-file selects" in capsys.readouterr().err
    assert corpus_folder.open_folder(out).vocabulary == ["moon", "star"]


def test_words_of_documents_are_matched_with_those_of_the_model_by_name(model, folder, capsys):
    (folder / "few.txt").write_text("star moon zebra\nanchor mast\n")
    assert main(["convert", str(folder / "few.txt"), str(folder / "few")]) == 0
    capsys.readouterr()
    assert main(["transform", str(model), str(folder / "few.txt")]) == 0
    expected = capsys.readouterr().out
    assert main(["transform", str(model), str(folder / "few")]) == 0
    out, err = capsys.readouterr()
    assert out == expected
    assert "ignoring 1 word outside of the vocabulary\n" in err
    saved = load_model(model)
    settings = {name: value for name, value in saved.settings.items() if name != "tokens"}
    save_model(folder / "without tokens", saved._replace(settings=settings))
    assert main(["transform", str(folder / "without tokens"), str(folder / "few.txt")]) == 0
    assert "does not store how text is split into words" in capsys.readouterr().err
    save_model(folder / "without words", saved._replace(vocabulary=None))
    assert main(["transform", str(folder / "without words"), str(folder / "few.txt")]) == 1
    assert "the model has no vocabulary" in capsys.readouterr().err


def test_a_fraction_can_be_given_in_scientific_notation(texts, tmp_path):
    assert main(["convert", str(texts), str(tmp_path / "out"), "--min-df", "1e-3"]) == 0
    assert corpus_folder.open_folder(tmp_path / "out").manifest["limits"]["min_df"] == 1e-3


def test_demo(folder, monkeypatch, capsys):
    """Use the documentation of this package only, which is fast."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    here = [(path, path.stem) for path in sorted((ROOT / "smoothgrad_jax").rglob("*.py"))]
    found = [each for file in here for each in demo_corpus.docstrings(file)]
    assert len(found) > 100
    monkeypatch.setattr(demo_corpus, "collect", lambda: found)
    out = folder / "demo"
    out.mkdir()
    (out / ".lock").touch()  # of a demo that was killed
    for _ in range(2):  # the second run reads the cache and replaces the first
        assert main(["demo", "--out", str(out), "--topics", "3", "--passes", "2"]) == 0
        monkeypatch.setattr(demo_corpus, "collect", lambda: pytest.fail("the corpus was not cached"))
    printed = capsys.readouterr().out
    assert (out / "report.html").as_uri() in printed
    (folder / "other" / "something").mkdir(parents=True)
    assert main(["demo", "--out", str(folder / "other")]) == 1


def test_documentation_strings(tmp_path):
    source = (
        '"""%s"""\n\ndef f():\n    "short"\n\n'
        'class C:\n    def g(self):\n        """%s"""\n\nadd_newdoc("m", "h", """%s""")\n'
    )
    words = [" ".join(f"{name}{i}" for i in range(20)) for name in "abc"]
    path = tmp_path / "some.py"
    path.write_text(source % tuple(words))
    assert sorted(demo_corpus.docstrings((path, "some"))) == [
        ("some", words[0]),
        ("some.C.g", words[1]),
        ("some.m.h", words[2]),
    ]
    path.write_text("def broken(:\n")
    assert demo_corpus.docstrings((path, "some")) == []


@pytest.mark.parametrize(
    "options",
    [
        ["--window", "adaptive:16"],
        ["--window", "exponential:5"],
        ["--window", "phase-out:8:10:20", "--warmup", "zeros"],
        ["--alpha", "auto", "--eta", "auto"],
        ["--rho", "0.2", "--replace", "--local-tol", "0.01", "--local-max-iter", "20"],
    ],
    ids=lambda options: " ".join(options[:2]),
)
def test_a_resumed_run_with_any_option_ends_where_a_complete_one_ends(texts, folder, options):
    name = "".join(options).replace(":", "-")
    runs = {passes: folder / f"{name}-{passes}" for passes in ("2", "4")}
    common = [*COMMON[:2], *COMMON[4:], *options, *([] if "--rho" in options else ANY_PASSES)]
    for passes, out in runs.items():
        assert main(["fit", str(texts), "--out", str(out), *common, "--passes", passes, "--score-every", "3"]) == 0
    assert main(["fit", str(texts), "--out", str(runs["2"]), "--resume", "--passes", "4"]) == 0
    first, second = (load_model(out) for out in runs.values())
    if "auto" not in options:  # learned priors are also updated at the end of the first run
        np.testing.assert_array_equal(first.lam, second.lam)
    else:
        assert first.alpha.shape == (3,)
        assert first.eta != 0.1


def test_early_stopping_ends_a_run(texts, folder):
    out = folder / "early"
    options = ["--early-stopping", "--patience", "1", "--min-improvement", "0.05"]
    assert main(["fit", str(texts), "--out", str(out), *COMMON[:2], "--passes", "200", *COMMON[4:], *options]) == 0
    history = load_model(out).history
    assert len(history) < 50
    assert main(["fit", str(texts), "--out", str(out), "--resume"]) == 0
    assert load_model(out).history == history


class _Terminal:
    """A stream that claims to be a terminal."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


def test_a_terminal_sees_one_bar():
    from smoothgrad_jax import Progress

    reports = [Progress(i, i * 10, i / 10, i, 1234.5, 10.0 - i, -7.5 if i == 5 else None) for i in range(1, 11)]
    stream = _Terminal()
    assert list(progress.watch(reports, steps=10, stream=stream)) == reports
    last = stream.text.split("\r")[-1]
    assert "100%" in last
    assert "1.00 passes, 1,234 documents/s, held-out -7.5000" in last
    assert stream.text.count("\n") == 1
