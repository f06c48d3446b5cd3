"""Errors about files and options of a corpus, and the parts of their messages."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias


class OptionName(NamedTuple):
    """An option in an error message, and the value that the message shows or recommends."""

    name: str
    value: object = None

    def __str__(self) -> str:
        """Return the option as a keyword argument: ``min_df`` or ``min_df=5``."""
        return self.name if self.value is None else f"{self.name}={self.value!r}"


Pieces: TypeAlias = Sequence[str | OptionName]  # a message, whose options are separate pieces


class CorpusError(ValueError):
    """Raised if a file or an option is not usable; the message names the file, the line, the problem and the remedy.

    The arguments are the message in pieces. Options are separate pieces, so that the command line can write
    ``--min-df 5`` where Python code has ``min_df=5``.
    """

    def __str__(self) -> str:
        return message_of(self)


class CorpusWarning(UserWarning):
    """Issued if a corpus can be read, but probably not as the user wants; its arguments are those of the error."""

    def __str__(self) -> str:
        return message_of(self)


def message_of(error: CorpusError | CorpusWarning, spell: Callable[[OptionName], str] = str) -> str:
    """Return the message, with each option as ``spell`` writes it."""
    return "".join(spell(part) if isinstance(part, OptionName) else str(part) for part in error.args)


def corpus_error(path: object, problem: str | Pieces, line: int | None = None) -> CorpusError:
    """Return an error about a file, and about one of its lines, if known."""
    where = f"{path}: " if line is None else f"{path}, line {line}: "
    return CorpusError(where, *([problem] if isinstance(problem, str) else problem))


def excerpt(data: object) -> str:
    """Return a value of a file, quoted and shortened for a message."""
    text = data.decode("utf-8", "replace") if isinstance(data, bytes) else str(data)
    return repr(text if len(text) <= 60 else text[:60] + "…")


def plural(count: int, noun: str) -> str:
    """Return a count with its noun for a message: "1 word", "2,000 words", "0 entries"."""
    if count != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun}"
