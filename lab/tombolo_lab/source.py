"""An experiment file as tables with checked access, and the error that says where it is wrong.

`Source` holds the data of a file and the line of each key. `Table` is one table of it; each of its
methods gives the value of a key in the right type, or raises `ExperimentError` with the line, the
key, what was expected and what was found. What keys mean is told in `tombolo_lab.model`.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tombolo_lab import LabError
from tombolo_lab.tomltext import KeyPath, key_lines, key_text, value_text

TOP_KEYS = (
    "name", "title", "about", "workload", "seed", "measures", "primary", "correlations", "factors",
    "fixed", "exclude", "design", "repeat", "order", "disturbed", "plots", "published", "quick",
)  # fmt: skip
PLAIN_KEYS = TOP_KEYS[:8]
QUICK_KEYS = ("factors", "fixed", "repeat")
REQUIRED = object()


class ExperimentError(LabError):
    """An experiment file, or a `--set`, that cannot be used.

    The text is FILE:LINE: KEY: expected …, found …; did you mean NEAR? Parts that are not known
    are left out. `line` counts from 1.
    """

    def __init__(
        self,
        path: str,
        expected: str,
        found: str,
        *,
        line: int | None = None,
        key: str = "",
        near: str | None = None,
    ):
        place = path if line is None else f"{path}:{line}"
        parts = [place] if place else []
        parts += [key] if key else []
        text = f"expected {expected}, found {found}"
        if near is not None:
            text += f"; did you mean {near}?"
        super().__init__(": ".join([*parts, text]))
        self.path = path
        self.line = line
        self.key = key
        self.expected = expected
        self.found = found
        self.near = near


def near(word: str, words: Collection[object]) -> str | None:
    """The one of `words` that `word` may have been meant to be."""
    close = difflib.get_close_matches(word.lower(), [str(other).lower() for other in words], 1)
    return next((str(other) for other in words if str(other).lower() in close), None)


def listed(items: Collection[object]) -> str:
    return ", ".join(map(str, items)) if items else "none"


def found_text(value: object) -> str:
    """A value as an error shows it: short, and tables and arrays by their kind."""
    match value:
        case dict():
            return "a table"
        case list():
            return "an array of tables" if any(isinstance(v, dict) for v in value) else "an array"
        case bool() | int() | float() | str():
            text = value_text(value)
            return text if len(text) <= 60 else text[:59] + "…"
    return f"a {type(value).__name__}"


@dataclass(frozen=True)
class Source:
    """An experiment file: its data, and where each key stands."""

    path: Path
    data: dict
    lines: dict[KeyPath, int]

    @classmethod
    def read(cls, path: Path) -> Source:
        try:
            text = path.read_bytes().decode()
        except OSError as error:
            raise ExperimentError(
                str(path), "an experiment file", error.strerror or str(error)
            ) from None
        except UnicodeDecodeError as error:
            raise ExperimentError(str(path), "text in UTF-8", str(error)) from None
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            at = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)", str(error))
            line = int(at[1]) if at and at[1] else None
            if at and not line:
                line = max(1, text.rstrip().count("\n") + 1)
            reason = str(error).replace(at[0], "") if at else str(error)
            raise ExperimentError(str(path), "valid TOML", reason, line=line) from None
        return cls(path, data, key_lines(text))

    def fail(
        self, path: KeyPath, expected: str, found: object, near: str | None = None
    ) -> NoReturn:
        """Raises ExperimentError at the line of `path`, or of what holds it."""
        holder = path
        while holder and holder not in self.lines:
            holder = holder[:-1]
        raise ExperimentError(
            str(self.path),
            expected,
            str(found),
            line=self.lines.get(holder, 1),
            key=key_text(path),
            near=near,
        )


class Table:
    """A table of the file, or a part of one, with checked access to its keys."""

    def __init__(self, source: Source, path: KeyPath, data: dict):
        self.source = source
        self.path = path
        self.data = data

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def fail(self, key: str, expected: str, found: object, near: str | None = None) -> NoReturn:
        self.source.fail((*self.path, key), expected, found, near)

    def only(self, keys: Collection[str], what: str) -> None:
        """Fails at the first key that is none of `keys`."""
        for key in self.data:
            if key in keys:
                continue
            self.unknown(key, keys, what)

    def unknown(self, key: str, keys: Collection[str], what: str) -> NoReturn:
        """Fails at a key that is none of `keys`."""
        if self.path and key in PLAIN_KEYS:
            expected = f"{key} before the first [table] of the file"
            self.fail(key, expected, f"it in {key_text(self.path)}")
        self.fail(key, f"{what}: {listed(keys)}", "another key", near(key, keys))

    def get(self, key: str, default: object, expected: str) -> object:
        if key in self.data:
            return self.data[key]
        if default is REQUIRED:
            self.fail(key, expected, "nothing")
        return default

    def text(self, key: str, default: object = REQUIRED) -> str | None:
        expected = "a text that is not empty"
        value = self.get(key, default, expected)
        if key in self.data and (not isinstance(value, str) or not value.strip()):
            self.fail(key, expected, found_text(value))
        return value

    def choice(self, key: str, choices: Collection[str], default: object = REQUIRED) -> str | None:
        expected = f"one of {listed(choices)}"
        value = self.get(key, default, expected)
        if key in self.data and (not isinstance(value, str) or value not in choices):
            self.fail(key, expected, found_text(value), near(str(value), choices))
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, "true or false", found_text(value))
        return value

    def number(
        self,
        key: str,
        low: float = -math.inf,
        high: float = math.inf,
        default: object = REQUIRED,
        whole: bool = False,
        above: bool = False,
    ) -> float | int | None:
        """A finite number from `low` (or above it) to `high`."""
        expected = range_text("a whole number" if whole else "a number", low, high, above)
        value = self.get(key, default, expected)
        if key not in self.data:
            return value
        kinds = int if whole else int | float
        good = isinstance(value, kinds) and is_finite(value)
        if not good or not low <= value <= high or (above and value == low):
            self.fail(key, expected, found_text(value))
        return value if whole else float(value)

    def array(self, key: str, expected: str) -> list:
        value = self.get(key, [], expected)
        if not isinstance(value, list):
            self.fail(key, expected, found_text(value))
        return value

    def table(self, key: str, required: bool = False) -> Table:
        expected = f"a table [{key_text((*self.path, key))}]"
        value = self.get(key, REQUIRED if required else {}, expected)
        if not isinstance(value, dict):
            self.fail(key, expected, found_text(value))
        return Table(self.source, (*self.path, key), value)

    def tables(self, key: str) -> list[Table]:
        """The elements of an array of tables."""
        expected = f"tables [[{key}]]"
        value = self.array(key, expected)
        for element in value:
            if not isinstance(element, dict):
                self.fail(key, expected, found_text(value))
        return [Table(self.source, (*self.path, key, n), e) for n, e in enumerate(value)]


def is_finite(value: object) -> bool:
    """Whether it is a number that TOML 1.0.0 promises to carry: an integer of 64 bits or a float
    that is finite."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return isinstance(value, float) and math.isfinite(value)


def range_text(what: str, low: float, high: float, above: bool = False) -> str:
    if math.isfinite(low) and math.isfinite(high):
        return f"{what} {'above' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}"
    if math.isfinite(low):
        return f"{what} above {low:g}" if above else f"{what} of at least {low:g}"
    return f"{what} of at most {high:g}" if math.isfinite(high) else what
