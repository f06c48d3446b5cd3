"""Text forms of windows, for the command line and for JSON.

| text                                | object                                       |
|-------------------------------------|----------------------------------------------|
| ``10``, ``inf``                     | a number, ∞                                  |
| ``adaptive``, ``adaptive:64:500``   | ``Adaptive()``, ``Adaptive(64, 500)``        |
| ``exponential:10``                  | ``Exponential(10)``                          |
| ``phase-out:100:500:1000``          | ``phase_out(100, 500, 1000)``                |

A text is the name of a form and the fields of the object. The class of a window is imported when an object is made, so
that ``smoothgrad fit --help`` is fast.
"""

import importlib
import math
from collections.abc import Callable
from numbers import Number
from typing import Any, NamedTuple, TypeAlias

from smoothgrad_jax.core.errors import OptionError

Window: TypeAlias = Any  # a number, a text form, a schedule of the step number, or a window object


class _Form(NamedTuple):
    """The text form of a class: its syntax, where the class is, the type of its numbers, and which ones are valid."""

    syntax: str
    module: str
    name: str
    number: type[int] | type[float]
    accepts: Callable[[list[Any]], bool]


def _accepts_adaptive(numbers: list[Any]) -> bool:
    longest, memory = (*numbers, None, None)[:2]
    is_power_of_two = longest is None or (longest > 0 and longest & (longest - 1) == 0)
    # Noise and drift are measured over at least the longest window.
    return len(numbers) < 3 and is_power_of_two and (memory is None or memory >= longest)


_CORE = "smoothgrad_jax.core"
_FORMS = {
    "adaptive": _Form("[:LONGEST[:MEMORY]]", f"{_CORE}.adaptive", "Adaptive", int, _accepts_adaptive),
    "exponential": _Form(
        ":L", f"{_CORE}.exponential_window", "Exponential", float, lambda n: len(n) == 1 and n[0] >= 1
    ),
    "phase-out": _Form(
        ":L:FIRST:LAST",
        f"{_CORE}.schedules",
        "PhaseOut",
        int,
        lambda n: len(n) == 3 and n[0] >= 1 and 0 <= n[1] < n[2],
    ),
}
EXPECTED = " or ".join(["an integer of at least 1, inf", *(name + form.syntax for name, form in _FORMS.items())])


def parse_window(text: str) -> float | str:
    """Return a number or ∞ from a text that stands for one, other texts as they are."""
    if text in ("inf", "∞"):
        return math.inf
    return int(text) if text.isdecimal() else text


def is_window(value: Window) -> bool:
    """Return whether a value may be a window; :func:`smoothgrad_jax.fit` checks objects."""
    if isinstance(value, str):
        return value == "inf" or _numbers(value) is not None
    if isinstance(value, int | float):
        return value == math.inf or (not isinstance(value, bool) and value >= 1 and value == int(value))
    return value is not None


def window_text(window: Window) -> Window:
    """Return the text form of a window object, or the length of a moving window; other values as they are."""
    if window is None or isinstance(window, str | Number):
        return window
    module, name = type(window).__module__, type(window).__name__
    if (module, name) == (f"{_CORE}.moving_window", "Moving") and window.dtype is None:
        return window.length
    form = next((each for each, f in _FORMS.items() if (f.module, f.name) == (module, name)), None)
    if form is None:
        return window
    fields = window if isinstance(window, tuple) else vars(window).values()
    text = ":".join([form, *(str(value) for value in fields if value is not None)])
    return text if _numbers(text) is not None else window


def window_object(window: Window) -> Window:
    """Return the window that :func:`smoothgrad_jax.fit` takes, from a number, a text or an object.

    Raises:
      OptionError: The text has no known form.
    """
    if not isinstance(window, str):
        return window
    if window == "inf":
        return math.inf
    numbers = _numbers(window)
    if numbers is None:
        raise OptionError("window", f"has an unknown form: {window!r}")
    form = _FORMS[window.partition(":")[0]]
    return getattr(importlib.import_module(form.module), form.name)(*numbers)


def _numbers(text: str) -> list[Any] | None:
    """Return the numbers in the text form of a window; None if it has no such form."""
    name, *parts = text.split(":")
    form = _FORMS.get(name)
    try:
        numbers = [form.number(part) for part in parts] if form else None
    except ValueError:
        return None
    return numbers if form and numbers is not None and form.accepts(numbers) else None
