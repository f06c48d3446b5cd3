"""The command ``smoothgrad``: its options, and how errors are reported.

Only options are declared here, so that ``--help`` does not wait for jax. ``COMMANDS`` names the module in
:mod:`smoothgrad_jax.app.commands` that does the work; it is imported when the command is called. The options of a run
come from :class:`smoothgrad_jax.training.settings.Settings`.

| exit code | meaning                                                                               |
|-----------|---------------------------------------------------------------------------------------|
| 0         | success                                                                               |
| 1         | an input, a model or a folder cannot be used; one line says which and why             |
| 2         | an option is invalid                                                                  |
| 130       | interrupted; what was learned is saved, and ``--resume`` continues the run            |
"""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from smoothgrad_jax import __version__
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.data import formats
from smoothgrad_jax.training.settings import DEFAULT_VALUES, OPTIONS, parse_option

FORMATS = formats.NAMES
_INPUTS = (
    "files or a folder: text with one document per line, a folder of text files, JSON lines, CSV, TSV, UCI docword, "
    "LDA-C, Matrix Market, svmlight, scipy .npz, each also compressed by gzip, bzip2 or xz; or the output of convert"
)
# The model has its own names for the settings of the local step.
_SETTING_OF = {"tol": "local_tol", "max_iter": "local_max_iter"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
      argv: Its arguments; by default those of the process.

    Returns:
      The exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may not be able to show every word
    args = build_parser().parse_args(argv)
    try:
        return _run(args)
    except ImportError as error:
        print(f"smoothgrad: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("smoothgrad: interrupted", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    """Run a command and report every expected error in one line on the standard error."""
    command = importlib.import_module(f"smoothgrad_jax.app.commands.{args.command}")
    from smoothgrad_jax.app.commands.output import CommandError

    try:
        return command.run(args)
    except BrokenPipeError:
        # The reader of the output has closed it, such as `head`; Python must not write to it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OptionError as error:
        name = _SETTING_OF.get(error.option, error.option)
        message = f"{_flag(name) if hasattr(args, name) else error.option} {error.problem}"
    except MemoryError as error:
        message = f"out of memory: {error}"
    except (CommandError, ValueError, OSError) as error:  # includes CorpusError, LoadError and SaveError
        message = str(error)
    print(f"smoothgrad {args.command}: {message}", file=sys.stderr)
    return 1


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given on the command line."""
    return {name: getattr(args, name) for name in OPTIONS if getattr(args, name, None) is not None}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with all commands and their options."""
    parser = _Parser(prog="smoothgrad", description="Topics from text by smoothed stochastic variational inference.")
    parser.add_argument("--version", action="version", version=f"smoothgrad_jax {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.add_options(commands.add_parser(name, help=command.help))
    return parser


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="smoothgrad-demo", metavar="DIR", help="model and report (%(default)s)")
    _add_settings(parser, ("topics", "passes", "seed"), topics=30, passes=10, seed=DEFAULT_VALUES["seed"])


def _fit_options(parser: argparse.ArgumentParser) -> None:
    _add_inputs(parser)
    parser.add_argument("--out", required=True, metavar="MODEL", help="folder for the model and its checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in MODEL")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing model in MODEL")
    _add_settings(parser.add_argument_group("training"), OPTIONS)
    _add_words(parser)
    _add_json(parser)


def _topics_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--all", action="store_true", help="print nearly empty topics too")
    parser.add_argument("--words", type=_positive, default=10, metavar="N", help="words per topic (%(default)s)")
    _add_json(parser)


def _transform_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    _add_inputs(parser)
    parser.add_argument("--out", metavar="FILE", help=".tsv, .jsonl or .npz with one row per document")


def _score_options(parser: argparse.ArgumentParser) -> None:
    _transform_options(parser)
    _add_json(parser)


def _sweep_options(parser: argparse.ArgumentParser) -> None:
    _add_inputs(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the curves")
    parser.add_argument(
        "--windows",
        type=lambda text: tuple(_setting("window")(each) for each in text.split(",")),
        default=(1, 10, 100),
        metavar="L,L,…",
        help="windows to compare, as --window of fit (1,10,100)",
    )
    # All runs of a sweep have the same length and write no checkpoints.
    excluded = {"window", "seconds", "early_stopping", "patience", "min_improvement", "checkpoint_every"}
    _add_settings(parser.add_argument_group("training"), (name for name in OPTIONS if name not in excluded))
    _add_words(parser)
    _add_json(parser)


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    _add_inputs(parser, optional=True)
    parser.add_argument("--out", metavar="FILE", help="the HTML file (MODEL/report.html)")
    parser.add_argument("--title", help="title of the page")


def _convert_options(parser: argparse.ArgumentParser) -> None:
    _add_inputs(parser)
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing corpus folder")
    parser.add_argument("--jobs", type=_positive, metavar="N", help="processes that count text (one per core)")
    _add_words(parser)
    _add_json(parser)


class Command(NamedTuple):
    """A command: its help text and the function that adds its options to a parser."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]


# Each command has a module of the same name in smoothgrad_jax.app.commands.
COMMANDS = {
    "demo": Command("topics of the documentation of the Python that runs this; no download", _demo_options),
    "fit": Command("learn topics and save a model", _fit_options),
    "topics": Command("print the topics of a model", _topics_options),
    "transform": Command("topic proportions of documents", _transform_options),
    "score": Command("how well a model predicts documents", _score_options),
    "sweep": Command("compare the held-out curves of several windows", _sweep_options),
    "report": Command("write one HTML file with the topics of a model", _report_options),
    "convert": Command("write a corpus folder, for training without loading the corpus", _convert_options),
}


def _add_settings(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, names: Iterable[str], **defaults: Any
) -> None:
    """Add options for settings; without a default of its own, an option that is not given is None."""
    for name in names:
        option, default = OPTIONS[name], defaults.get(name, DEFAULT_VALUES[name])
        text = option.help.replace("%", "%%")
        if option.metavar is None:
            parser.add_argument(_flag(name), action="store_const", const=True, help=text)
            continue
        if name in defaults:
            text = text.split(" (")[0]
        if default is not None:
            text += f" ({default})" if isinstance(default, str) else f" ({default:g})"
        parser.add_argument(
            _flag(name), type=_setting(name), default=defaults.get(name), metavar=option.metavar, help=text
        )


def _add_inputs(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    parser.add_argument("inputs", nargs="*" if optional else "+", metavar="IN", help=_INPUTS)
    group = parser.add_argument_group("reading")
    group.add_argument("--format", choices=FORMATS, help="format of the files (recognised from their content)")
    group.add_argument("--field", metavar="NAME", help="field of JSON lines, or column of CSV and TSV, with the text")
    group.add_argument("--encoding", default="utf-8", help="encoding of the text (%(default)s)")
    group.add_argument("--first-id", type=int, choices=(0, 1), help="number of the first word in files of counts")
    group.add_argument("--sort", action="store_true", help="sort triplets that are not ordered by document")
    group.add_argument("--words-file", metavar="FILE", help="names of the words in files of counts, one per line")


def _add_words(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("vocabulary")
    group.add_argument("--vocabulary", metavar="FILE", help="use exactly these words, one per line")
    group.add_argument(
        "--min-df",
        type=_number_or_fraction,
        metavar="N",
        help="smallest number, or fraction, of documents with a word (5; less for fewer than 500 documents)",
    )
    group.add_argument(
        "--max-df",
        type=_number_or_fraction,
        metavar="N",
        help="largest number, or fraction, of documents with a word (0.5)",
    )
    group.add_argument("--max-features", type=_positive, metavar="N", help="largest number of words (50,000)")
    group.add_argument("--stop-words", metavar="WHICH", help="english, none, or a file with one per line (english)")
    group.add_argument("--token-pattern", metavar="REGEX", help="pattern of a word (three or more letters)")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="write JSON lines to the standard output, for programs")


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _setting(name: str) -> Callable[[str], Any]:
    """Return the function that converts the text of an option to the value of a setting."""

    def convert(text: str) -> Any:
        try:
            return parse_option(name, text)
        except OptionError as error:
            raise argparse.ArgumentTypeError(error.problem) from error

    return convert


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text}")
    return int(text)


def _number_or_fraction(text: str) -> int | float:
    return float(text) if "." in text else int(text)
