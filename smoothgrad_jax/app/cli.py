"""The command ``smoothgrad``: its options, and how errors are reported.

This module declares only options, so that ``--help`` does not import jax; the options of a command are declared when
it is called. Each command has a module of the same name in :mod:`smoothgrad_jax.app.commands`, which is imported when
the command runs. The options of a run come from :class:`smoothgrad_jax.app.settings.Settings`.

| exit code | meaning                                                                               |
|-----------|---------------------------------------------------------------------------------------|
| 0         | success                                                                               |
| 1         | invalid input, model or folder, or output that cannot be written; the error message   |
|           | is one line                                                                           |
| 2         | an option is invalid, or has no effect beside others; the error message is one line   |
| 134       | ``fit --distributed``: ended by jax (SIGABRT), because another process died           |
| 129, 130, | ended by SIGHUP, by SIGINT (Ctrl-C) or by SIGTERM: 128 plus the number of the signal. |
| 143       | ``fit``, ``sweep`` and ``demo`` have saved the result of the training so far, and     |
|           | ``--resume`` continues it; before and after training, and in other commands,      |
|           | incomplete output is removed. A third signal within a second ends the process at      |
|           | once, which saves nothing; see :mod:`smoothgrad_jax.app.signals`                      |
"""

from __future__ import annotations

import argparse
import io
import sys

from smoothgrad_jax import __version__

TYPE_CHECKING = False  # as in typing, whose import takes longer than the rest of this module
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from typing import Any, NoReturn

_INPUTS = (
    "files or a folder: text with one document per line, a folder of text files, JSON lines, CSV, TSV, Parquet, UCI "
    "docword, LDA-C, Matrix Market, svmlight, scipy .npz, optionally compressed by gzip, bzip2 or xz; or the output of "
    "convert; or - for the standard input, which is copied to a temporary file, as are pipes"
)
_TABLES = ".tsv, .csv, .jsonl, .npz or .parquet"  # see `smoothgrad_jax.app.commands.tables`
# Option of the model -> setting.
SETTING_OF = {"tol": "local_tol", "max_iter": "local_max_iter"}
_SHORT = {"ngram_range": "ngrams"}  # Python's name of an option -> its name on the command line


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``, by default that of the process, and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # some terminals cannot encode every character
    args = _parse(sys.argv[1:] if argv is None else argv)
    from smoothgrad_jax.app.command_run import run_command  # not for --help, which has ended here

    return run_command(args)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Files and options of a command may be mixed: ``convert a.jsonl --field x OUT``."""
    if not argv or argv[0] not in COMMANDS:
        return build_parser().parse_args(argv)
    command = COMMANDS[argv[0]]
    parser = _Parser(prog=f"smoothgrad {argv[0]}", description=command.description)
    command.add_options(parser)
    namespace = argparse.Namespace(command=argv[0])
    # The options of the command that `launch` starts are not those of `launch`.
    parse = parser.parse_args if argv[0] == "launch" else parser.parse_intermixed_args
    return parse(argv[1:], namespace)


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given on the command line."""
    from smoothgrad_jax.app.settings import OPTIONS

    return {name: getattr(args, name) for name in OPTIONS if getattr(args, name, None) is not None}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with all commands, without the options of the commands."""
    parser = _Parser(prog="smoothgrad", description="Topics from text by smoothed stochastic variational inference.")
    parser.add_argument("--version", action="version", version=f"smoothgrad_jax {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary)
    return parser


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", default="smoothgrad-demo", metavar="DIR", help="folder for model and report (%(default)s)"
    )
    _add_settings(parser, ("topics", "passes", "seed"), topics=30, passes=6, seed=0)


def _fit_options(parser: argparse.ArgumentParser) -> None:
    _add_inputs(parser)
    parser.add_argument("--out", required=True, metavar="MODEL", help="folder for the model and its checkpoints")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="continue from the last checkpoint in MODEL")
    existing.add_argument("--overwrite", action="store_true", help="replace an existing model in MODEL")
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="one of several processes of srun, Open MPI 4, torchrun or smoothgrad launch; each has --threads",
    )
    parser.add_argument(
        "--messages",
        choices=["bfloat16"],
        help="with --distributed: exchange 16-bit floats, which halves what the processes send",
    )
    _add_settings(parser.add_argument_group("training"))
    _add_words(parser)
    _add_json(parser)
    _add_log(parser)


def _topics_options(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--all", action="store_true", help="print nearly empty topics too")
    parser.add_argument("--words", type=_positive, default=10, metavar="N", help="words per topic (%(default)s)")
    parser.add_argument(
        "--labels",
        metavar="FILE",
        help="store the labels of a file in the model: lines of topic number, tab and label, or JSON; the report "
        "writes such a file",
    )
    _add_json(parser)


def _transform_options(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_metadata(_add_inputs(parser))
    _add_tokenizer(parser, "if the model was fitted with it")
    parser.add_argument(
        "--out", metavar="FILE", help=f"{_TABLES} with one row per document; words is 0 for an empty document"
    )


def _score_options(parser: argparse.ArgumentParser) -> None:
    _transform_options(parser)
    _add_json(parser)


def _sweep_options(parser: argparse.ArgumentParser) -> None:
    _add_inputs(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the results and the models")
    parser.add_argument("--resume", action="store_true", help="continue the sweep in DIR; finished runs are kept")
    group = parser.add_argument_group("runs to compare: every number of topics with every window and every seed")
    group.add_argument(
        "--topics",
        type=_several("topics"),
        metavar="K,K,…",
        help="numbers of topics (20,50,100,200; with --windows 50)",
    )
    group.add_argument(
        "--windows", type=_several("window"), metavar="L,L,…", help="windows, in the format of fit --window (10)"
    )
    group.add_argument(
        "--seeds", type=_positive, default=2, metavar="N", help="seeds per configuration, from --seed on (%(default)s)"
    )
    group.add_argument(
        "--jobs", type=_positive, metavar="N", help="runs at a time (one per core, fewer where memory is short)"
    )
    # All runs of a sweep have the same length.
    excluded = {"topics", "window", "seconds", "early_stopping", "patience", "min_improvement"}
    _add_settings(parser.add_argument_group("training"), excluded=excluded)
    _add_words(parser)
    _add_json(parser)
    _add_log(parser)


def _report_options(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_metadata(_add_inputs(parser, optional=True))
    _add_tokenizer(parser, "if the model was fitted with it")
    parser.add_argument("--out", metavar="FILE", help="the HTML file (MODEL/report.html)")
    parser.add_argument("--title", help="title of the page")
    _add_groups(parser)
    parser.add_argument("--compare", metavar="OTHER", help="another model, shown side by side with matched topics")


def _groups_options(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_inputs(parser)
    _add_tokenizer(parser, "if the model was fitted with it")
    _add_groups(parser, required=True)
    parser.add_argument("--top", type=_positive, metavar="N", help="number of topics to print, largest first (5)")
    parser.add_argument("--out", metavar="FILE", help=f"{_TABLES} with one row per group and topic")
    _add_json(parser)


def _similar_options(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_metadata(_add_inputs(parser))
    _add_tokenizer(parser, "if the model was fitted with it")
    query = parser.add_mutually_exclusive_group(required=True)
    query.add_argument("--to", metavar="DOC", help="id of a document; if no document has it, row number from 0")
    query.add_argument("--row", type=_natural, metavar="N", help="row number of a document, from 0")
    query.add_argument("--text", help="a text")
    parser.add_argument("--top", type=_positive, default=10, metavar="N", help="number of documents (%(default)s)")
    _add_json(parser)


def _convert_options(parser: argparse.ArgumentParser) -> None:
    _add_metadata(_add_inputs(parser))
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing corpus folder")
    parser.add_argument("--jobs", type=_positive, metavar="N", help="processes that count text (one per core)")
    _add_words(parser)
    _add_json(parser)


def _verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="folder of a corpus, a model, a run or a checkpoint")
    _add_json(parser)


def _launch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--processes", type=_positive, required=True, metavar="P", help="number of processes")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="fit …", help="the command, with its options")


class Command:
    """A command: what it does, its options, how its output is read, and whether it compiles programs."""

    def __init__(
        self,
        summary: str,
        add_options: Callable[[argparse.ArgumentParser], None],
        output: str = "",
        compiles: bool = True,  # which `smoothgrad_jax.app.program_cache` stores
    ) -> None:
        self.summary, self.add_options, self.output, self.compiles = summary, add_options, output, compiles

    @property
    def description(self) -> str:
        """Return the text that the help of this command begins with."""
        return f"{self.summary[0].upper()}{self.summary[1:]}. {self.output}".rstrip()


_ON_TOPICS = (
    "The list of topics has the fraction of all words that belong to each topic (prevalence), and how often its first "
    "words occur together (NPMI, from -1 to 1)."
)
COMMANDS = {
    "demo": Command("learn topics from the documentation of Python, numpy, scipy and jax", _demo_options, _ON_TOPICS),
    "fit": Command(
        "learn topics and save a model",
        _fit_options,
        f"{_ON_TOPICS} The held-out score is in nats per word; higher is better. Ctrl-C saves the model, and --resume "
        "continues.",
    ),
    "topics": Command("print the topics of a model, and label them", _topics_options, _ON_TOPICS, compiles=False),
    "transform": Command(
        "infer topic proportions of documents",
        _transform_options,
        "The table has one row per document, in the order of the input.",
    ),
    "groups": Command(
        "compute the prevalence of topics per group of documents, or over time",
        _groups_options,
        "Here the prevalence is the mean of the topic proportions of the documents, each with the same weight; in the "
        "list of topics long documents weigh more.",
    ),
    "similar": Command("find documents with similar topic proportions (Hellinger distance)", _similar_options),
    "score": Command(
        "compute the predictive log-probability of documents",
        _score_options,
        "One half of each document is predicted from the other half; the score is in nats per word, and higher is "
        "better.",
    ),
    "sweep": Command(
        "compare numbers of topics and windows, and recommend one",
        _sweep_options,
        "DIR/runs has one model per run. The table has the held-out score in nats per word (higher is better), the "
        "coherence of the topics (NPMI, from -1 to 1), their diversity (from 0 to 1), and how similar they are between "
        "seeds (stability, from 0 to 1). The recommendation is the fewest topics of which score and coherence are not "
        "measurably worse than the best.",
    ),
    "report": Command(
        "write one HTML file with the topics of a model",
        _report_options,
        "With documents it also shows those that are typical of each topic.",
    ),
    "convert": Command("convert a corpus to memory-mapped arrays", _convert_options, compiles=False),
    "launch": Command("run fit in several processes on this machine, for tests", _launch_options, compiles=False),
    "verify": Command("compare the files of a folder with their checksums", _verify_options, compiles=False),
}


def _add_settings(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    names: Iterable[str] = (),
    excluded: Collection[str] = (),
    **defaults: Any,
) -> None:
    """Add one option per setting, by default for all; its default is None, or the value in ``defaults``."""
    from smoothgrad_jax.app.settings import DEFAULT_VALUES, OPTIONS

    for name in names or (name for name in OPTIONS if name not in excluded):
        option, default = OPTIONS[name], defaults.get(name, DEFAULT_VALUES[name])
        text = option.help.replace("%", "%%")
        if option.metavar is None:
            parser.add_argument(flag(name), action="store_const", const=True, help=text)
            continue
        if name in defaults:
            text = text.split(" (")[0]
        if default is not None:
            text += f" ({default})" if isinstance(default, str) else f" ({default:g})"
        parser.add_argument(
            flag(name), type=_setting(name), default=defaults.get(name), metavar=option.metavar, help=text
        )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder of a model: --out of fit, or a run of a sweep")


def _add_inputs(parser: argparse.ArgumentParser, optional: bool = False) -> argparse._ArgumentGroup:
    """Add the input files and the options that say how they are read; return the group of these options."""
    from smoothgrad_jax.data import formats

    parser.add_argument("inputs", nargs="*" if optional else "+", metavar="IN", help=_INPUTS)
    group = parser.add_argument_group("reading")
    group.add_argument("--format", choices=formats.NAMES, help="format of the files (recognised from their content)")
    group.add_argument(
        "--field", metavar="NAME", help="field of JSON lines, or column of CSV, TSV and Parquet, with the text"
    )
    group.add_argument("--encoding", default="utf-8", help="encoding of the text (%(default)s)")
    group.add_argument("--first-id", type=int, choices=(0, 1), help="id of the first word in count files")
    group.add_argument("--sort", action="store_true", help="sort triplets by document")
    group.add_argument("--words-file", metavar="FILE", help="vocabulary of count files, one word per line; or none")
    return group


def _add_metadata(reading: argparse._ArgumentGroup) -> None:
    reading.add_argument(
        "--id", metavar="NAME", help="field or column with the ids (id, doi or url; the names of files in a folder)"
    )
    reading.add_argument(
        "--keep", type=_names, default=(), metavar="NAME,NAME,…", help="fields or columns to keep beside the ids"
    )


def _add_groups(parser: argparse.ArgumentParser, required: bool = False) -> None:
    parser.add_argument("--by", required=required, metavar="NAME", help="field or column with the groups, or the dates")
    parser.add_argument("--period", choices=("year", "month"), help="group dates (2020-01-31, 2020-01, 2020)")


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
    stop_words = group.add_mutually_exclusive_group()
    stop_words.add_argument(
        "--stop-words",
        metavar="FILE",
        help="file with words to remove beside scikit-learn's English list, one per line; or none: remove no word",
    )
    stop_words.add_argument(
        "--stop-words-only",
        metavar="FILE",
        help="file with words to remove instead, for other languages: github.com/stopwords-iso has such lists",
    )
    group.add_argument(
        "--ngrams",
        dest="ngram_range",
        type=_lengths,
        metavar="N,N",
        help="shortest and longest sequence of words that is a word: 1,2 adds pairs whose words belong together (1,1)",
    )
    group.add_argument(
        "--min-npmi",
        type=float,
        metavar="X",
        help="minimum normalised pointwise mutual information of such a sequence, from -1 to 1 (0.4)",
    )
    group.add_argument(
        "--token-pattern",
        metavar="REGEX",
        help="regular expression of a word (a letter, then two or more letters or digits)",
    )
    _add_tokenizer(group, "for example of Chinese, or into lemmas")


def _add_tokenizer(parser: argparse.ArgumentParser | argparse._ArgumentGroup, what: str) -> None:
    text = f"Python function that splits a text into words, {what}; runs the code of the module"
    parser.add_argument("--tokenizer", metavar="MODULE:FUNCTION", help=text)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="write JSON lines to standard output")


def _add_log(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-json", metavar="FILE", help="append events with their time to FILE, as JSON lines")


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, and does not complete the names of options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def flag(name: str) -> str:
    """Return the name of an option on the command line."""
    return f"--{_SHORT.get(name, name).replace('_', '-')}"


def _setting(name: str) -> Callable[[str], Any]:
    """Return the argparse type of a setting."""
    from smoothgrad_jax.app.settings import parse_option
    from smoothgrad_jax.core.errors import OptionError

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


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, got {text}")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"must be different names of fields, got {text!r}")
    return names


def _number_or_fraction(text: str) -> int | float:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        problem = f"must be a number of documents, or a fraction such as 0.5, got {text}"
        raise argparse.ArgumentTypeError(problem) from None


def _lengths(text: str) -> tuple[int, ...]:
    lengths = tuple(map(_positive, text.split(",")))
    if len(lengths) != 2:
        raise argparse.ArgumentTypeError(f"must be two numbers such as 1,2, got {text}")
    return lengths


def _several(name: str) -> Callable[[str], tuple[Any, ...]]:
    """Return the argparse type of several values of a setting."""

    def convert(text: str) -> tuple[Any, ...]:
        values = tuple(map(_setting(name), text.split(",")))
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"must be different values, got {text}")
        return values

    return convert
