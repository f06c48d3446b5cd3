"""The command ``smoothgrad``: its options, and how errors are reported.

This module declares only options, so that ``--help`` does not import jax; the options of a command are declared when
it is called. Each command has a module of the same name in :mod:`smoothgrad_jax.app.commands`, which is imported when
the command runs. The options of a run come from :class:`smoothgrad_jax.training.settings.Settings`.

| exit code | meaning                                                                               |
|-----------|---------------------------------------------------------------------------------------|
| 0         | success                                                                               |
| 1         | invalid input, model or folder; the error message is one line                         |
| 2         | an option is invalid, or has no effect beside others; the error message is one line   |
| 134       | ``fit --distributed``: ended by jax (SIGABRT), because another process died           |
| 130       | interrupted by Ctrl-C, or by SIGTERM while ``fit``, ``sweep`` or ``demo`` trains.     |
|           | The result of the training so far is saved, and ``fit --resume`` continues it;        |
|           | interrupted at another time, a command saves nothing                                  |
"""

import _thread
import argparse
import contextlib
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from smoothgrad_jax import __version__
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.data.errors import CorpusError, OptionName

_INPUTS = (
    "files or a folder: text with one document per line, a folder of text files, JSON lines, CSV, TSV, UCI docword, "
    "LDA-C, Matrix Market, svmlight, scipy .npz, optionally compressed by gzip, bzip2 or xz; or the output of convert"
)
_LATER = 0.02  # seconds between a Ctrl-C that cannot be handled and the next attempt
# Option of the model -> setting.
_SETTING_OF = {"tol": "local_tol", "max_iter": "local_max_iter"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``, by default that of the process, and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # some terminals cannot encode every character
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser([argument for argument in argv if argument in COMMANDS][:1]).parse_args(argv)
    _catch_interrupts()
    try:
        return _run(args)
    except ImportError as error:
        print(f"smoothgrad: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("smoothgrad: interrupted", file=sys.stderr)
        _leave(args, 130)
        return 130


def _catch_interrupts() -> None:
    """Make Ctrl-C raise KeyboardInterrupt also where Python would ignore the exception.

    jax runs a function during garbage collection. Python ignores exceptions there, so that Ctrl-C would have no effect.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; during garbage collection, a moment later."""
    while frame is not None and frame.f_code.co_name != "_xla_gc_callback":
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt
    threading.Timer(_LATER, _thread.interrupt_main, (number,)).start()


def _run(args: argparse.Namespace) -> int:
    """Run a command; print an expected error to standard error as one line."""
    command = importlib.import_module(f"smoothgrad_jax.app.commands.{args.command}")
    from smoothgrad_jax.app.commands.output import CommandError

    code = 1
    try:
        return command.run(args)
    except BrokenPipeError:
        # The output pipe is closed, for example by `head`. Python must not flush to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OptionError as error:
        code, name = 2, _SETTING_OF.get(error.option, error.option)
        message = f"{_flag(name) if hasattr(args, name) else error.option} {error.problem}"
    except CorpusError as error:
        message = error.message(lambda option: _spell(option, args))
        code = 2 if isinstance(error.args[0], OptionName) else 1
    except MemoryError as error:
        message = f"out of memory: {error}"
    except (CommandError, ValueError, OSError) as error:  # includes LoadError and SaveError
        message = str(error)
    print(f"smoothgrad {args.command}: {message}", file=sys.stderr)
    _leave(args, code)
    return code


def _leave(args: argparse.Namespace, code: int) -> None:
    """End the process at once after an error, if it is one of several, so that the others do not wait for it."""
    if getattr(args, "distributed", False):
        from smoothgrad_jax.training import distributed

        distributed.leave(code)


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given on the command line."""
    from smoothgrad_jax.training.settings import OPTIONS

    return {name: getattr(args, name) for name in OPTIONS if getattr(args, name, None) is not None}


def build_parser(with_options: Collection[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser with all commands.

    Args:
      with_options: The commands whose options are declared; by default all.
    """
    parser = _Parser(prog="smoothgrad", description="Topics from text by smoothed stochastic variational inference.")
    parser.add_argument("--version", action="version", version=f"smoothgrad_jax {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help)
        if with_options is None or name in with_options:
            command.add_options(subparser)
    return parser


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", default="smoothgrad-demo", metavar="DIR", help="folder for model and report (%(default)s)"
    )
    _add_settings(parser, ("topics", "passes", "seed"), topics=30, passes=10, seed=0)


def _fit_options(parser: argparse.ArgumentParser) -> None:
    _add_inputs(parser)
    parser.add_argument("--out", required=True, metavar="MODEL", help="folder for the model and its checkpoints")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="continue from the last checkpoint in MODEL")
    existing.add_argument("--overwrite", action="store_true", help="replace an existing model in MODEL")
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="one of several processes, which srun, mpirun, torchrun or smoothgrad launch starts; --threads: of each",
    )
    _add_settings(parser.add_argument_group("training"))
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
        type=_windows,
        default=(1, 10, 100),
        metavar="L,L,…",
        help="windows to compare, in the format of fit --window (1,10,100)",
    )
    # All runs of a sweep have the same length and write no checkpoints.
    excluded = {"window", "seconds", "early_stopping", "patience", "min_improvement", "checkpoint_every"}
    _add_settings(parser.add_argument_group("training"), excluded=excluded)
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


def _launch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--processes", type=_positive, required=True, metavar="P", help="number of processes")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="fit …", help="the command, with its options")


class Command(NamedTuple):
    """A command: its help text and the function that adds its options to a parser."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]


COMMANDS = {
    "demo": Command("learn topics of Python's docstrings (no download)", _demo_options),
    "fit": Command("learn topics and save a model", _fit_options),
    "topics": Command("print the topics of a model", _topics_options),
    "transform": Command("infer topic proportions of documents", _transform_options),
    "score": Command("compute the predictive log-probability of documents", _score_options),
    "sweep": Command("compare the held-out curves of several windows", _sweep_options),
    "report": Command("write one HTML file with the topics of a model", _report_options),
    "convert": Command("convert a corpus to memory-mapped arrays", _convert_options),
    "launch": Command("run fit in several processes on this machine, for tests", _launch_options),
}


def _add_settings(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    names: Iterable[str] = (),
    excluded: Collection[str] = (),
    **defaults: Any,
) -> None:
    """Add one option per setting, by default for all; its default is None, or the value in ``defaults``."""
    from smoothgrad_jax.training.settings import DEFAULT_VALUES, OPTIONS

    for name in names or (name for name in OPTIONS if name not in excluded):
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
    from smoothgrad_jax.data import formats

    parser.add_argument("inputs", nargs="*" if optional else "+", metavar="IN", help=_INPUTS)
    group = parser.add_argument_group("reading")
    group.add_argument("--format", choices=formats.NAMES, help="format of the files (recognised from their content)")
    group.add_argument("--field", metavar="NAME", help="field of JSON lines, or column of CSV and TSV, with the text")
    group.add_argument("--encoding", default="utf-8", help="encoding of the text (%(default)s)")
    group.add_argument("--first-id", type=int, choices=(0, 1), help="id of the first word in count files")
    group.add_argument("--sort", action="store_true", help="sort triplets by document")
    group.add_argument("--words-file", metavar="FILE", help="vocabulary of count files, one word per line; or none")


def _add_words(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("vocabulary")
    group.add_argument("--vocabulary", metavar="FILE", help="file with the words to use, one per line")
    group.add_argument(
        "--min-df",
        type=_number_or_fraction,
        metavar="N",
        help="minimum document frequency, a number or a fraction (5; less for fewer than 500 documents)",
    )
    group.add_argument(
        "--max-df",
        type=_number_or_fraction,
        metavar="N",
        help="maximum document frequency, a number or a fraction (0.5)",
    )
    group.add_argument("--max-features", type=_positive, metavar="N", help="maximum vocabulary size (50,000)")
    group.add_argument(
        "--stop-words", metavar="WHICH", help="english, none, or a file with one word per line (english)"
    )
    group.add_argument(
        "--token-pattern",
        metavar="REGEX",
        help="regular expression of a word (a letter, then two or more letters or digits)",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="write JSON lines to standard output")


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _spell(option: OptionName, args: argparse.Namespace) -> str:
    """Return an option as the command line has it: ``--min-df 5``, ``--sort``; as Python has it if it has no flag."""
    if option == OptionName("vocabulary", False):  # of `open_source`, not of `convert`
        return "--words-file none"
    if not hasattr(args, option.name):
        return str(option)
    return _flag(option.name) + ("" if option.value in (None, True) else f" {option.value}")


def _setting(name: str) -> Callable[[str], Any]:
    """Return the argparse type of a setting."""
    from smoothgrad_jax.training.settings import parse_option

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
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            return convert(text)
    raise argparse.ArgumentTypeError(f"must be a number of documents, or a fraction such as 0.5, got {text}")


def _windows(text: str) -> tuple[Any, ...]:
    windows = tuple(map(_setting("window"), text.split(",")))
    if len(set(windows)) < len(windows):
        raise argparse.ArgumentTypeError(f"must be different windows, got {text}")
    return windows
