"""Functions of the user that split a text into words, and their names ``package.module:function``."""

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import TypeAlias

from smoothgrad_jax.data.errors import CorpusError, OptionName, excerpt

Tokenizer: TypeAlias = Callable[[str], Iterable[str]]


def name_of(tokenizer: Tokenizer | str) -> str:
    """Return the name that is stored with a corpus or a model."""
    if isinstance(tokenizer, str):
        return tokenizer
    named = tokenizer if hasattr(tokenizer, "__qualname__") else type(tokenizer)
    return f"{getattr(named, '__module__', 'builtins')}:{named.__qualname__}"


def load(name: str) -> Tokenizer:
    """Import ``package.module:function``; only a name that the user gives."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise _error(f"expected package.module:function, got {name!r}")
    try:
        found = functools.reduce(getattr, function.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise _error(f"cannot import {name!r}: {error}") from None
    if not callable(found):
        raise _error(f"expected {name!r} to be a function, got {type(found).__name__}")
    return found


def words_of(tokenizer: Tokenizer | str, lowercase: bool) -> Callable[[str], list[str]]:
    """Return the tokenizer with checks of its result; a blank token is no word."""
    name = name_of(tokenizer)
    split = load(tokenizer) if isinstance(tokenizer, str) else tokenizer

    def words(text: str) -> list[str]:
        try:
            result = split(text)
            found = list(result)
        except Exception as error:  # of any type: it is the code of the user
            problem = f"{name} failed with {type(error).__name__}: {error}; the text is {excerpt(text)}"
            raise _error(problem) from error
        if isinstance(result, str):
            raise _error(f"expected a list of words from {name}, got one string; the text is {excerpt(text)}")
        for word in found:
            if not isinstance(word, str):
                problem = f"expected strings from {name}, got {type(word).__name__}; the text is {excerpt(text)}"
                raise _error(problem)
        return [word.lower() if lowercase else word for word in found if word and not word.isspace()]

    return words


def _error(problem: str) -> CorpusError:
    return CorpusError(OptionName("tokenizer"), f": {problem}")
