"""The options of the command for words and files: what `fit` saves, `transform` applies."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from smoothgrad_jax import load_model, save_model
from smoothgrad_jax.app.cli import main
from smoothgrad_jax.data import corpus_folder, text

ROOT = Path(__file__).parents[2]
COMMON = ["--topics", "2", "--passes", "2", "--batch-size", "32", "--threads", "1"]


def vocabulary(path):
    return corpus_folder.open_folder(path).vocabulary


@pytest.fixture
def texts(tmp_path):
    """Sixty lines, in which "new york" is the only collocation."""
    rng = np.random.default_rng(0)
    lines = [" ".join(["new york", *rng.choice(["sail", "mast", "wind", "rope"], 9)]) for _ in range(60)]
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_stop_words_of_a_file_are_added_or_replace_the_english_list(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("der the star\nder moon the\n")
    (tmp_path / "stop.txt").write_text("Der\n")
    arguments = ["convert", str(tmp_path / "a.txt"), "--max-df", "1.0"]
    assert main([*arguments, str(tmp_path / "added"), "--stop-words", str(tmp_path / "stop.txt")]) == 0
    assert vocabulary(tmp_path / "added") == ["moon", "star"]
    assert main([*arguments, str(tmp_path / "only"), "--stop-words-only", str(tmp_path / "stop.txt")]) == 0
    assert vocabulary(tmp_path / "only") == ["moon", "star", "the"]
    assert main([*arguments, str(tmp_path / "none"), "--stop-words", "none"]) == 0
    assert vocabulary(tmp_path / "none") == ["der", "moon", "star", "the"]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "x", "--stop-words", "none", "--stop-words-only", "y"])
    assert stop.value.code == 2
    capsys.readouterr()
    assert main([*arguments, str(tmp_path / "x"), "--stop-words-only", "nowhere"]) == 2
    assert "--stop-words-only: expected english, or a file" in capsys.readouterr().err


def test_pairs_of_words_are_saved_with_the_model_and_counted_by_transform(texts, tmp_path, capsys):
    model = tmp_path / "model"
    assert main(["fit", str(texts), "--out", str(model), *COMMON, "--ngrams", "1,2", "--max-df", "1.0"]) == 0
    assert load_model(model).vocabulary == ["mast", "new", "new york", "rope", "sail", "wind", "york"]
    (tmp_path / "new.txt").write_text("new york\nnew sail york\nzebra\n")
    capsys.readouterr()
    assert main(["transform", str(model), str(tmp_path / "new.txt"), "--out", str(tmp_path / "theta.jsonl")]) == 0
    assert "ignoring 3 words and sequences of words outside of the vocabulary\n" in capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "theta.jsonl").read_text().splitlines()]
    assert [row["words"] for row in rows] == [3, 3, 0]  # new, york, new york; new, sail, york; nothing
    assert main(["fit", str(texts), "--out", str(model), "--resume", "--passes", "3"]) == 0
    assert main(["convert", str(texts), str(tmp_path / "x"), "--min-npmi", "0.2"]) == 2
    assert "--min-npmi has no effect without sequences of words; pass --ngrams 1,2" in capsys.readouterr().err


@pytest.mark.filterwarnings("always::smoothgrad_jax.data.errors.CorpusWarning")
def test_a_script_without_spaces_gives_a_warning_in_one_line(tmp_path, capsys):
    (tmp_path / "zh.txt").write_text("我们研究主题模型。\n机器学习的方法。\n" * 9)
    assert main(["convert", str(tmp_path / "zh.txt"), str(tmp_path / "out")]) == 0
    warning, *others = capsys.readouterr().err.splitlines()
    assert warning.startswith("smoothgrad convert: warning: 100 % of the letters are Chinese, Japanese, Thai")
    assert "as --tokenizer; if spaces separate the words already, pass --token-pattern '\\S+'" in warning
    assert not others
    assert main(["convert", str(tmp_path / "zh.txt"), str(tmp_path / "b"), "--tokenizer", "builtins:list"]) == 0
    assert capsys.readouterr().err == ""
    assert "模" in vocabulary(tmp_path / "b")
    assert main(["convert", str(tmp_path / "zh.txt"), str(tmp_path / "c"), "--token-pattern", r"\w"]) == 0
    assert capsys.readouterr().err == ""


def test_a_tokenizer_is_imported_only_if_the_user_names_it(texts, tmp_path, monkeypatch, capsys):
    (tmp_path / "letters.py").write_text("def cut(text): return text.split()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])  # as that of an installed command
    assert main(["fit", str(texts), "--out", "model", *COMMON, "--tokenizer", "letters:cut", "--max-df", "1.0"]) == 0
    assert load_model("model").settings["tokens"]["tokenizer"] == "letters:cut"
    for command in (["transform", "model", str(texts)], ["fit", str(texts), "--out", "model", "--resume"]):
        for tokenizer, end in (([], ""), (["--tokenizer", "shlex:split"], ", got 'shlex:split'")):
            monkeypatch.delitem(sys.modules, "letters", raising=False)
            capsys.readouterr()
            assert main([*command, *tokenizer]) == 1
            message = f"found with the tokenizer 'letters:cut'; if you trust it, pass its name as --tokenizer{end}\n"
            assert capsys.readouterr().err.endswith(message)
            assert "letters" not in sys.modules
        text._analyzer.cache_clear()
        assert main([*command, "--tokenizer", "letters:cut"]) == 0
        assert "letters" in sys.modules
    assert main(["report", "model", "--tokenizer", "letters:cut"]) == 2
    assert "--tokenizer has no effect without documents to read" in capsys.readouterr().err


def test_a_stored_definition_reads_no_file(texts, tmp_path, capsys):
    assert main(["fit", str(texts), "--out", str(tmp_path / "model"), *COMMON, "--max-df", "1.0"]) == 0
    model = load_model(tmp_path / "model")
    model.settings["tokens"]["stop_words"] = str(texts)
    save_model(tmp_path / "model", model)
    assert main(["transform", str(tmp_path / "model"), str(texts)]) == 1
    assert "settings.tokens.stop_words must be a list" in capsys.readouterr().err


def test_files_and_options_stand_anywhere_on_the_line(tmp_path, capsys):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"abstract": "sail mast", "title": "x"}\n' * 9)
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    words = ["--max-df", "1.0"]
    assert main(["convert", a, b, "--field", "abstract", str(tmp_path / "c"), *words]) == 0
    assert main(["convert", *words, "--field", "abstract", a, str(tmp_path / "d")]) == 0
    assert [corpus_folder.open_folder(tmp_path / name).corpus.num_docs for name in "cd"] == [18, 9]
    assert main(["fit", a, "--field", "abstract", b, *COMMON, "--out", str(tmp_path / "m"), *words]) == 0
    capsys.readouterr()
    assert main(["transform", str(tmp_path / "m"), "--field", "abstract", a, b]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 19
    assert main(["report", "--title", "x", str(tmp_path / "m"), a, "--field", "abstract", b]) == 0


def test_documents_come_from_a_pipe(texts, tmp_path):
    data = "id;text\n" + "".join(f"{i};sail {line}\n" for i, line in enumerate(texts.read_text().splitlines()))
    program = "import sys; from smoothgrad_jax.app.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "convert", "-", "out", "--max-df", "1.0"],
        cwd=tmp_path,
        input=data.encode(),
        capture_output=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert corpus_folder.open_folder(tmp_path / "out").corpus.num_docs == 60
    assert vocabulary(tmp_path / "out") == ["mast", "new", "rope", "sail", "wind", "york"]
    assert {path.name for path in tmp_path.iterdir()} == {"out", "texts.txt"}  # the copy is removed


def test_a_url_is_refused(tmp_path, capsys):
    assert main(["convert", "https://example.org/a.csv", str(tmp_path / "out")]) == 1
    message = "smoothgrad convert: https://example.org/a.csv: expected a file, got a URL; download"
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "-", "/proc/out"], "/proc/out: the folder /proc is not writable"),
        (["convert", "-", "s3://bucket/out"], "got a URL"),
        (["convert", "-", "texts.txt"], "texts.txt: exists already; choose another name, or pass --overwrite"),
        (["convert", "-", "texts.txt", "--overwrite"], "exists and is not a corpus folder"),
        (["convert", "-", "texts.txt/out"], "expected a folder or a new name, got a file"),
        (["fit", "-", "--out", "/proc/out"], "/proc/out: the folder /proc is not writable"),
        (["fit", "-", "--out", "s3://bucket/out"], "got a URL"),
        (["sweep", "-", "--out", "/proc/out"], "/proc/out: the folder /proc is not writable"),
        (["report", "model", "-", "--out", "report.pdf"], "report.pdf: expected a name that ends in .html or .htm"),
        (["report", "model", "-", "--out", "/proc/report.html"], "/proc/report.html: the folder /proc is not"),
        (["transform", "model", "-", "--out", "/proc/theta.tsv"], "/proc/theta.tsv: the folder /proc is not"),
        (["transform", "model", "-", "--out", "theta.xls"], "theta.xls: expected a name that ends in"),
        (["score", "model", "-", "--out", "nowhere/theta.tsv"], "nowhere/theta.tsv: the folder nowhere does not exist"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_read(
    texts, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    stdin = io.TextIOWrapper(io.BytesIO(b"sail mast\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(arguments) == 1
    assert message in capsys.readouterr().err
    assert stdin.read() == "sail mast\n"
