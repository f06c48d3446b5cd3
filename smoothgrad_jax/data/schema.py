"""Declare what a value from a JSON file must be, and check it before anything is computed from it.

A schema is a function ``schema(value, name)``, which raises an error that calls the value by its ``name``. Schemas are
composed like the values:

    manifest = record({"num_docs": integer(1), "files": mapping(entry)}, optional={"note": string})
    manifest(json.loads(text), "")

Further entries of a record are ignored, so that an old reader accepts what a new writer adds.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Json: TypeAlias = Any  # None, bool, int, float, str, and lists and dictionaries of these
Schema: TypeAlias = Callable[[Json, str], None]

LARGEST = 2**53  # integers up to here are exact in every reader of JSON


def integer(least: int = 0, most: int = LARGEST) -> Schema:
    """Return the schema of an integer within bounds."""

    def check(value: Json, name: str) -> None:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        _require(is_integer and least <= value <= most, name, f"an integer from {least} to {most}", value)

    return check


def number(least: float = -math.inf, most: float = math.inf, *, above: bool = False) -> Schema:
    """Return the schema of a finite number within bounds; with ``above`` the lower bound is excluded."""
    bounds = f"{' above' if above else ' of at least'} {least:g}" if least > -math.inf else ""
    bounds += f" and at most {most:g}" if most < math.inf else ""

    def check(value: Json, name: str) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_valid = is_number and abs(value) < math.inf and least <= value <= most and not (above and value == least)
        _require(is_valid, name, f"a finite number{bounds}", value)

    return check


def real(value: Json, name: str) -> None:
    """Accept every number, NaN and ∞ too."""
    _require(isinstance(value, int | float) and not isinstance(value, bool), name, "a number", value)


def anything(value: Json, name: str) -> None:
    """Accept every value."""


def boolean(value: Json, name: str) -> None:
    """Accept true and false."""
    _require(isinstance(value, bool), name, "true or false", value)


def string(value: Json, name: str) -> None:
    """Accept a string."""
    _require(isinstance(value, str), name, "a string", value)


def one_of(*values: Json) -> Schema:
    """Return the schema of a few values."""
    expected = " or ".join(map(repr, values))
    return lambda value, name: _require(any(value == each for each in values), name, expected, value)


def optional(schema: Schema) -> Schema:
    """Return the schema of null, or a value of another schema."""
    return lambda value, name: None if value is None else schema(value, name)


def either(*schemas: Schema) -> Schema:
    """Return the schema of a value that one of several schemas accepts; the error is that of the last one."""

    def check(value: Json, name: str) -> None:
        for schema in schemas[:-1]:
            try:
                return schema(value, name)
            except ValueError:
                continue
        return schemas[-1](value, name)

    return check


def list_of(schema: Schema, length: int | None = None) -> Schema:
    """Return the schema of a list, of any length or of a given one."""

    def check(value: Json, name: str) -> None:
        expected = "a list" if length is None else f"a list of {length}"
        _require(isinstance(value, list) and length in (None, len(value)), name, expected, value)
        for i, each in enumerate(value):
            schema(each, f"{name}[{i}]")

    return check


def mapping(schema: Schema) -> Schema:
    """Return the schema of an object with any names, whose values have one schema."""

    def check(value: Json, name: str) -> None:
        _require(isinstance(value, dict), name, "an object", value)
        for key, each in value.items():
            schema(each, _entry(name, key))

    return check


def record(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of an object with given names, some of which may be absent."""

    def check(value: Json, name: str) -> None:
        _require(isinstance(value, dict), name, "an object", value)
        for key, schema in required.items():
            if key not in value:
                raise ValueError(f"{_entry(name, key)} is missing")
            schema(value[key], _entry(name, key))
        for key, schema in (optional or {}).items():
            if key in value:
                schema(value[key], _entry(name, key))

    return check


def _entry(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _require(condition: bool, name: str, expected: str, value: Json) -> None:
    if not condition:
        raise ValueError(f"{name or 'the content'} must be {expected}, got {value!r:.60}")
