"""The command: from files to files, what scripts see, interruption, and what goes wrong in one line."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from smoothgrad_jax import load_model
from smoothgrad_jax.app import cli, progress
from smoothgrad_jax.app import demo_corpus as docstrings
from smoothgrad_jax.app.cli import build_parser, main
from smoothgrad_jax.app.runs import settings
from smoothgrad_jax.data import readers, store

ROOT = Path(__file__).parents[2]
TOPICS = {
    "sailing": ["sail", "harbour", "anchor", "mast", "wind", "rudder", "tide", "crew", "deck", "rope"],
    "cooking": ["oven", "flour", "butter", "garlic", "simmer", "whisk", "onion", "pepper", "dough", "salt"],
    "stars": ["star", "galaxy", "telescope", "orbit", "planet", "redshift", "supernova", "dust", "comet", "moon"],
}
COMMON = ["--topics", "3", "--passes", "6", "--batch-size", "32", "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def texts(folder):
    """Three hundred lines, each about one thing."""
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
    lines = capsys.readouterr().out.splitlines()
    found = {frozenset(line.split("%")[1].split()) for line in lines}
    assert found == {frozenset(words) for words in TOPICS.values()}
    saved = load_model(model)
    assert len(saved.history) >= 10
    assert saved.history[-1]["passes"] == pytest.approx(6, abs=0.2)
    assert saved.word_counts.sum() == 300 * 20
    assert main(["topics", str(model), "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(record["share"] for record in records) == pytest.approx(1)
    assert len(records[0]["words"]) == 10


def test_transform_writes_what_the_name_asks_for(model, texts, folder, capsys):
    new = folder / "new.jsonl"
    new.write_text('{"text": "anchor mast rope zebra"}\n{"text": "star moon comet"}\n{"text": "zebra"}\n')
    assert main(["transform", str(model), str(new)]) == 0
    out, err = capsys.readouterr()
    rows = [line.split("\t") for line in out.splitlines()]
    assert rows[0] == ["document", "topic 0", "topic 1", "topic 2"]
    theta = np.array([row[1:] for row in rows[1:]], float)
    np.testing.assert_allclose(theta.sum(1), 1, rtol=1e-4)
    words = [{word for word, _ in each} for each in load_model(model).top_words(10)]
    assert "anchor" in words[theta[0].argmax()]
    assert "comet" in words[theta[1].argmax()]
    assert "2 words of the text are not in the vocabulary, and are left out; 1 documents have no other" in err
    for name in ("theta.npz", "theta.jsonl", "theta.tsv"):
        assert main(["transform", str(model), str(new), "--out", str(folder / name)]) == 0
    np.testing.assert_allclose(np.load(folder / "theta.npz")["theta"], theta, atol=1e-5)
    listed = [json.loads(line) for line in (folder / "theta.jsonl").read_text().splitlines()]
    np.testing.assert_allclose([each["topics"] for each in listed], theta, atol=1e-5)
    assert (folder / "theta.tsv").read_text() == out
    assert main(["transform", str(model), str(new), "--out", str(folder / "theta.xls")]) == 1
    assert "ends in .tsv, .jsonl or .npz" in capsys.readouterr().err


def test_score(model, texts, folder, capsys):
    assert main(["score", str(model), str(texts), "--json", "--out", str(folder / "scores.tsv")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["documents"] == 300
    assert found["held_out_words"] == 3_000
    assert found["score"] == pytest.approx(np.log(1 / 10), abs=0.1)  # a line has ten words that are equally likely
    assert found["perplexity"] == pytest.approx(np.exp(-found["score"]))
    table = np.loadtxt(folder / "scores.tsv", skiprows=1)
    assert table[:, 1].sum() / table[:, 2].sum() == pytest.approx(found["score"], rel=1e-4)


def test_convert_then_fit_is_fit(model, texts, folder, capsys):
    packed = folder / "texts.txt.gz"
    packed.write_bytes(gzip.compress(texts.read_bytes()))
    assert main(["convert", str(packed), str(folder / "corpus")]) == 0
    assert "300 documents, 30 different words, 6,000 in all" in capsys.readouterr().out
    out = folder / "from folder"
    assert main(["fit", str(folder / "corpus"), "--out", str(out), *COMMON, "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert records[-1]["event"] == "done"
    assert {record["event"] for record in records[:-1]} == {"progress"}
    np.testing.assert_array_equal(load_model(out).lam, load_model(model).lam)
    assert main(["fit", str(folder / "corpus"), "--out", str(out), "--overwrite", "--min-df", "2"]) == 1
    assert "words were chosen by convert; leave min_df out" in capsys.readouterr().err


def test_report(model, texts, folder, capsys):
    assert main(["report", str(model), str(texts), "--title", "Three things"]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == model / "report.html"
    content = page.read_text()
    assert "Three things" in content
    first = texts.read_text().splitlines()
    assert any(line in content for line in first)  # a typical document


def test_sweep(texts, folder, capsys):
    out = folder / "sweep"
    arguments = ["sweep", str(texts), "--out", str(out), "--windows", "1,inf", *COMMON]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "L = 1" in printed
    assert "best at the end" in printed
    curves = json.loads((out / "sweep.json").read_text())["curves"]
    assert set(curves) == {"1", "inf"}
    assert [each["step"] for each in curves["1"]] == [each["step"] for each in curves["inf"]]
    assert main(arguments) == 1
    assert "there are curves already" in capsys.readouterr().err


def test_more_passes_go_on_from_the_end(model, texts, folder, capsys):
    """Six passes and then six more are twelve, to the last bit."""
    twelve = [*COMMON[:3], "12", *COMMON[4:]]
    assert main(["fit", str(texts), "--out", str(folder / "twelve"), *twelve]) == 0
    half = folder / "half"
    assert main(["fit", str(texts), "--out", str(half), *COMMON]) == 0
    # A run that was killed when all was done but the model is finished by --resume.
    (half / "model.json").unlink()
    assert main(["fit", str(texts), "--out", str(half), "--resume"]) == 0
    np.testing.assert_array_equal(load_model(half).lam, load_model(model).lam)
    assert "steps were taken already" in capsys.readouterr().err
    assert main(["fit", str(texts), "--out", str(half), "--resume", "--topics", "4"]) == 1
    assert "topics was 3, now 4" in capsys.readouterr().err
    assert main(["fit", str(texts), "--out", str(half), "--resume", "--passes", "12"]) == 0
    np.testing.assert_array_equal(load_model(half).lam, load_model(folder / "twelve").lam)
    seconds = [record["seconds"] for record in load_model(half).history]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) > 1


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_run_is_saved_and_goes_on(texts, folder, number):
    out = folder / f"interrupted by {number}"
    command = [sys.executable, "-m", "smoothgrad_jax", "fit", str(texts), "--out", str(out), *COMMON, "--json"]
    command[command.index("--passes") + 1] = "1000000"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, stderr=subprocess.PIPE) as child:
        child.stdout.readline()  # it trains
        time.sleep(0.2)
        child.send_signal(number)
        out_text, err_text = child.communicate(timeout=60)
    assert child.returncode == 130, err_text
    last = json.loads(out_text.splitlines()[-1])
    assert last["event"] == "interrupted"
    assert "go on with the same command and --resume" in err_text
    assert load_model(out).lam.shape == (30, 3)
    if number == signal.SIGINT:
        passes = round((last["step"] + 20) * 32 / 285) + 1
        assert main(["fit", str(texts), "--out", str(out), "--resume", "--json", "--passes", str(passes)]) == 0
        assert load_model(out).history[-1]["step"] > last["step"]


def test_help_is_there_without_jax():
    program = (
        "import sys; from smoothgrad_jax.app.cli import build_parser; build_parser().format_help();"
        "assert not {'jax', 'numpy', 'scipy', 'sklearn', 'tqdm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, cwd=ROOT)
    assert {"demo", "fit", "topics", "transform", "score", "sweep", "report", "convert"} <= set(
        build_parser()._subparsers._group_actions[0].choices
    )


def test_every_command_has_help(capsys):
    for command in ("demo", "fit", "topics", "transform", "score", "sweep", "report", "convert"):
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0
    assert "usage: smoothgrad convert" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "missing.txt", "--out", "m"], "missing.txt"),
        (["topics", "missing"], "missing: expected a model's folder, which is missing"),
        (["fit", "texts.txt", "--out", "model", "--topics", "3"], "--resume goes on with it, --overwrite replaces it"),
        (["fit", "texts.txt", "--out", "cache", "--topics", "3"], "cache: is not empty"),
        (["fit", "texts.txt", "--out", "texts.txt"], "expected a folder, or none yet; got a file"),
        (["fit", "texts.txt", "--out", "cache", "--resume"], "cache: no checkpoint to resume from"),
        (["fit", "texts.txt", "--out", "new", "--held-out", "300"], "300 documents are to be held out"),
        (["fit", "texts.txt", "--out", "new", "--format", "uci"], "texts.txt"),
        (["fit", "texts.txt", "--out", "new", "--min-df", "301"], "min_df"),
        (["fit", "texts.txt", "--out", "new", "--alpha", "-1"], "alpha must be positive"),
        (["sweep", "texts.txt", "--out", "new", "--held-out", "0"], "a sweep compares held-out scores"),
        (["report", "model", "texts.txt", "--out", "nowhere/report.html"], "nowhere"),
        (["transform", "model", "texts.txt", "--out", "nowhere/theta.tsv"], "theta.tsv: there is no folder nowhere"),
    ],
)
def test_what_goes_wrong_is_one_line(model, folder, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(folder)
    (folder / "cache" / "something").mkdir(parents=True, exist_ok=True)
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not Path("new").exists()


def test_what_is_left_by_a_run_killed_before_its_first_checkpoint_is_in_nobodys_way(texts, folder, capsys):
    for extra in (["--resume"], []):
        out = folder / f"killed early {len(extra)}"
        (out / "checkpoints" / ".new-1").mkdir(parents=True)
        assert main(["fit", str(texts), "--out", str(out), *COMMON[:3], "1", *COMMON[4:], *extra]) == 0
        assert load_model(out).lam.shape == (30, 3)
        assert ("no run to resume yet" in capsys.readouterr().err) == bool(extra)


def test_a_missing_extra_is_one_line(texts):
    program = (
        "import sys; sys.modules['sklearn'] = sys.modules['joblib'] = None; from smoothgrad_jax.app.cli import main;"
        f"sys.exit(main(['fit', {str(texts)!r}, '--out', 'nowhere']))"
    )
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 1
    assert 'pip install "smoothgrad_jax[' in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_complaints_speak_of_options(texts, folder, monkeypatch, capsys):
    for code in (0, 1):
        assert main(["convert", str(texts), str(folder / "twice")]) == code
    assert "--overwrite" in capsys.readouterr().err
    monkeypatch.setattr(store, "read", lambda *_, **__: np.empty(2**55))
    assert main(["fit", str(texts), "--out", str(folder / "huge")]) == 1
    assert "smoothgrad fit: out of memory" in capsys.readouterr().err


def test_formats_are_those_that_can_be_read():
    assert cli.FORMATS == readers.FORMATS


def test_words_that_a_terminal_does_not_know(model):
    program = [sys.executable, "-m", "smoothgrad_jax", "fit", "--help"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    assert (
        "step sizes" in subprocess.run(program, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    )


def test_wrong_arguments_are_code_2(capsys):
    for arguments in (["fit", "x"], ["fit", "x", "--out", "m", "--topics", "0"], ["nothing"], ["demo", "--seed", "-1"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2


def test_demo(folder, monkeypatch, capsys):
    """With the text of this package alone, which is quick."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    here = [(path, path.stem) for path in sorted((ROOT / "smoothgrad_jax").rglob("*.py"))]
    found = [each for file in here for each in docstrings._documented(file)]
    assert len(found) > 100
    monkeypatch.setattr(docstrings, "collect", lambda: found)
    out = folder / "demo"
    for _ in range(2):  # the second time from the cache, over the first
        assert main(["demo", "--out", str(out), "--topics", "3", "--passes", "2"]) == 0
        monkeypatch.setattr(docstrings, "collect", lambda: pytest.fail("it was cached"))
    printed = capsys.readouterr().out
    assert (out / "report.html").as_uri() in printed
    (folder / "other").mkdir()
    assert main(["demo", "--out", str(folder / "other")]) == 1


def test_documentation_strings(tmp_path):
    source = (
        '"""%s"""\n\ndef f():\n    "short"\n\n'
        'class C:\n    def g(self):\n        """%s"""\n\nadd_newdoc("m", "h", """%s""")\n'
    )
    words = [" ".join(f"{name}{i}" for i in range(20)) for name in "abc"]
    path = tmp_path / "some.py"
    path.write_text(source % tuple(words))
    assert sorted(docstrings._documented((path, "some"))) == [
        ("some", words[0]),
        ("some.C.g", words[1]),
        ("some.m.h", words[2]),
    ]
    path.write_text("def broken(:\n")
    assert docstrings._documented((path, "some")) == []


def test_settings_are_chosen_for_the_corpus():
    small, large = settings(400, {}), settings(1_000_000, {"topics": 20, "passes": None})
    assert (small["batch_size"], small["passes"], small["held_out"]) == (32, 10, 20)
    assert small["tau"] == pytest.approx(380 / 32)
    assert (large["batch_size"], large["passes"], large["held_out"], large["tau"]) == (256, 1, 1_000, 64)
    assert large["alpha"] == 0.1


class _Terminal:
    """A stream that says it is a terminal."""

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
