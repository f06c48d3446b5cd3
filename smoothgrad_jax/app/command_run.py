"""Run a command whose arguments are parsed: signals, the log of events, and errors as one line and an exit code."""

import argparse
import contextlib
import importlib
import logging
import shlex
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO

from smoothgrad_jax.app import event_log, signals
from smoothgrad_jax.app.cli import COMMANDS, SETTING_OF, flag
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.data.errors import CorpusError, CorpusWarning, OptionName, message_of


def run_command(args: argparse.Namespace) -> int:
    """Run a command, and return the exit code of the process."""
    with signals.handled() as received, _warnings_in_one_line(args), contextlib.ExitStack() as stack:
        try:
            stack.callback(_drop_unwritten_output)
            stack.enter_context(event_log.writing(getattr(args, "log_json", None)))
            return _run(args)
        except BrokenPipeError:  # the reader of the output has ended, for example `head`
            return 0
        except KeyboardInterrupt:
            code, message = received.exit_code, "interrupted"
        except OptionError as error:
            code, name = 2, SETTING_OF.get(error.option, error.option)
            message = f"{flag(name) if hasattr(args, name) else error.option} {error.problem}"
        except CorpusError as error:
            code = 2 if isinstance(error.args[0], OptionName) else 1
            message = message_of(error, lambda option: _spell(option, args))
        except MemoryError as error:
            code, message = 1, f"out of memory: {error}"
        except (ImportError, ValueError, OSError) as error:  # includes CommandError, LoadError and SaveError
            code, message = 1, str(error)
            if isinstance(error, OSError) and error.filename is None and len(error.args) == 2:  # raised by the system
                message = f"the standard output or a temporary file: {error.strerror}"
        from smoothgrad_jax.app.commands.output import printable

        with contextlib.suppress(OSError):  # nobody reads the error either
            print(f"smoothgrad {args.command}: {printable(message)}", file=sys.stderr)
        event_log.event("error", level=logging.ERROR, message=message, code=code)
        _leave(args, code)
        return code


@contextlib.contextmanager
def _warnings_in_one_line(args: argparse.Namespace) -> Iterator[None]:
    """Print warnings about the corpus as one line, with options as the command line has them."""
    with warnings.catch_warnings():
        default = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if isinstance(message, CorpusWarning):
                text = message_of(message, lambda option: _spell(option, args))
                print(f"smoothgrad {args.command}: warning: {text}", file=sys.stderr)
            else:
                default(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def _run(args: argparse.Namespace) -> int:
    """Run a command."""
    command = importlib.import_module(f"smoothgrad_jax.app.commands.{args.command}")
    if COMMANDS[args.command].compiles:
        from smoothgrad_jax.app.program_cache import stored_programs

        with stored_programs():
            code = command.run(args)
    else:
        code = command.run(args)
    sys.stdout.flush()
    return code


def _drop_unwritten_output() -> None:
    """Drop output that cannot be written: Python would try again at exit, and replace the exit code by 120."""
    try:
        sys.stdout.flush()
    except OSError:
        signals.drop_output(1)


def _leave(args: argparse.Namespace, code: int) -> None:
    """End the process at once after an error, if it is one of several, so that the others do not wait for it."""
    if getattr(args, "distributed", False):
        from smoothgrad_jax.training import distributed

        distributed.leave(code)


def _spell(option: OptionName, args: argparse.Namespace) -> str:
    """Return an option as the command line has it: ``--min-df 5``, ``--sort``; as Python has it if it has no flag."""
    if option == OptionName("vocabulary", False):  # of `open_source`, not of `convert`
        return "--words-file none"
    if option.name == "keep" and hasattr(args, "by"):  # groups keeps the field by which it groups
        option = option._replace(name="by")
    if not hasattr(args, option.name):
        return str(option)
    value = option.value
    text = "" if value in (None, True) else ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return flag(option.name) + (f" {shlex.quote(text)}" if text else "")
