"""The command ``smoothgrad``: what can be asked for, and how an answer ends.

Only the arguments are here, so that ``--help`` answers at once; :mod:`smoothgrad_jax.app.commands` does the work and is
imported when there is some.

| exit code | meaning                                                                              |
|-----------|--------------------------------------------------------------------------------------|
| 0         | done                                                                                 |
| 1         | an input, a model or a folder is not what it should be; one line says which and why  |
| 2         | the arguments are wrong                                                              |
| 130       | interrupted; what was learned is saved, and ``--resume`` goes on                     |
"""

import argparse
import io
import sys
from collections.abc import Sequence

from smoothgrad_jax import __version__

FORMATS = ("text", "files", "jsonl", "csv", "tsv", "uci", "ldac", "mm", "svmlight", "npz", "folder")
_INPUTS = (
    "files, or a folder: text with a document a line, a folder of text files, JSON lines, CSV, TSV, UCI docword, "
    "LDA-C, Matrix Market, svmlight, scipy .npz, each also packed by gzip, bzip2 or xz; or what convert wrote"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
      argv: Its arguments; by default those of the process.

    Returns:
      The exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a word that the terminal does not know is no reason to stop
    args = build_parser().parse_args(argv)
    try:
        from smoothgrad_jax.app import commands

        return commands.run(args)
    except ImportError as error:
        print(f"smoothgrad: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("smoothgrad: interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = _Parser(prog="smoothgrad", description="Topics from text, by smoothed stochastic variational inference.")
    parser.add_argument("--version", action="version", version=f"smoothgrad_jax {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    demo = commands.add_parser("demo", help="topics of the documentation of the Python that runs this; no download")
    demo.add_argument("--out", default="smoothgrad-demo", metavar="DIR", help="model and report (%(default)s)")
    demo.add_argument("--topics", type=_positive, default=30, metavar="K", help="number of topics (%(default)s)")
    demo.add_argument("--passes", type=_positive, default=10, metavar="N", help="passes over the texts (%(default)s)")
    demo.add_argument("--seed", type=_seed, default=0, help="random seed (%(default)s)")

    fit = commands.add_parser("fit", help="learn topics, and save a model")
    _add_inputs(fit)
    fit.add_argument("--out", required=True, metavar="MODEL", help="folder for the model and its checkpoints")
    _add_training(fit)
    fit.add_argument("--window", type=_window, metavar="L", help="minibatches to average over; inf for all (10)")
    fit.add_argument("--resume", action="store_true", help="go on from the last checkpoint in MODEL")
    fit.add_argument("--overwrite", action="store_true", help="replace a model that is in MODEL")
    fit.add_argument(
        "--checkpoint-every",
        type=float,
        default=60,
        metavar="S",
        help="seconds between checkpoints; 0: only at Ctrl-C (60)",
    )
    fit.add_argument(
        "--slots", choices=("float32", "bfloat16", "uint8"), help="how the window is kept; less memory for a large L"
    )
    _add_text(fit)
    _add_json(fit)

    topics = commands.add_parser("topics", help="print the topics of a model")
    topics.add_argument("model", metavar="MODEL")
    topics.add_argument("--all", action="store_true", help="also those that hold almost nothing")
    topics.add_argument("--words", type=_positive, default=10, metavar="N", help="words of a topic (%(default)s)")
    _add_json(topics)

    for name, what in (("transform", "topic proportions of documents"), ("score", "how well documents are predicted")):
        command = commands.add_parser(name, help=what)
        command.add_argument("model", metavar="MODEL")
        _add_inputs(command)
        command.add_argument("--out", metavar="FILE", help=".tsv, .jsonl or .npz, one row a document")
        if name == "score":
            _add_json(command)

    sweep = commands.add_parser("sweep", help="several windows side by side, with their held-out curves")
    _add_inputs(sweep)
    sweep.add_argument("--out", required=True, metavar="DIR", help="folder for the curves")
    sweep.add_argument(
        "--windows", type=_windows, default=(1, 10, 100), metavar="L,L,…", help="windows to compare (1,10,100)"
    )
    _add_training(sweep)
    _add_text(sweep)
    _add_json(sweep)

    report = commands.add_parser("report", help="one HTML file with the topics of a model")
    report.add_argument("model", metavar="MODEL")
    _add_inputs(report, optional=True)
    report.add_argument("--out", metavar="FILE", help="where to (MODEL/report.html)")
    report.add_argument("--title", help="of the page")

    convert = commands.add_parser("convert", help="write a corpus folder that is trained from without loading it")
    _add_inputs(convert)
    convert.add_argument("out", metavar="OUT", help="the folder")
    convert.add_argument("--overwrite", action="store_true", help="replace a corpus folder that is there")
    convert.add_argument("--jobs", type=_positive, metavar="N", help="processes that count text (one a core)")
    _add_text(convert)
    _add_json(convert)
    return parser


def _add_inputs(parser, optional=False):
    parser.add_argument("inputs", nargs="*" if optional else "+", metavar="IN", help=_INPUTS)
    group = parser.add_argument_group("reading")
    group.add_argument("--format", choices=FORMATS, help="of the files; recognised from their content if not given")
    group.add_argument("--field", metavar="NAME", help="field of JSON lines, or column of a table, that is the text")
    group.add_argument("--encoding", default="utf-8", help="of text (%(default)s)")
    group.add_argument("--first-id", type=int, choices=(0, 1), help="number of the first word in files of counts")
    group.add_argument("--sort", action="store_true", help="sort triplets that are in no order by document")
    group.add_argument("--words-file", metavar="FILE", help="names of the words in files of counts, one a line")


def _add_text(parser):
    group = parser.add_argument_group("which words")
    group.add_argument("--vocabulary", metavar="FILE", help="exactly these words, one a line")
    group.add_argument(
        "--min-df", type=_share, metavar="N", help="fewest documents of a word, number or share (5; less below 500)"
    )
    group.add_argument("--max-df", type=_share, metavar="N", help="most documents of a word, number or share (0.5)")
    group.add_argument("--max-features", type=_positive, metavar="N", help="most words (50,000)")
    group.add_argument("--stop-words", metavar="WHICH", help="english, none, or a file with one a line (english)")
    group.add_argument("--token-pattern", metavar="REGEX", help="what a word is (three letters or more)")


def _add_training(parser):
    group = parser.add_argument_group("training")
    group.add_argument("--topics", type=_positive, metavar="K", help="number of topics (50)")
    group.add_argument("--passes", type=_positive, metavar="N", help="passes over the documents (10; fewer for many)")
    group.add_argument("--batch-size", type=_positive, metavar="B", help="documents in a minibatch (a 32nd, 32 to 256)")
    group.add_argument("--alpha", type=float, help="prior of topics in a document (0.1)")
    group.add_argument("--eta", type=float, help="prior of words in a topic (0.1)")
    group.add_argument("--tau", type=float, help="step sizes are (τ + t)^−κ (minibatches in a pass, at most 64)")
    group.add_argument("--kappa", type=float, help="in (0.5, 1] to converge (0.7)")
    group.add_argument("--held-out", type=int, metavar="N", help="documents set aside to score (5%%, at most 1,000)")
    group.add_argument("--seed", type=_seed, help="random seed (0)")
    group.add_argument("--threads", type=_positive, metavar="N", help="(one a core, up to 8; fewer for small batches)")


def _add_json(parser):
    parser.add_argument("--json", action="store_true", help="JSON lines on the standard output, for programs")


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help tells more\n")


def _positive(text):
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return int(text)


def _seed(text):
    if not text.isdecimal() or not int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2³¹ − 1, got {text}")
    return int(text)


def _share(text):
    return float(text) if "." in text else int(text)


def _window(text):
    return float("inf") if text in ("inf", "∞") else _positive(text)


def _windows(text):
    return tuple(_window(each) for each in text.split(","))
