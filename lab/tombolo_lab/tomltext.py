"""The text of TOML files: on which line a key stands, and writing a document by hand.

`tomllib` reads values and nothing else. `key_lines` walks over the same text a second time and
notes the line of every key, table header and array element, so that an error in an experiment file
can say where it is. It expects text that `tomllib` has accepted and therefore checks no syntax.

A key path is a tuple of keys and, within arrays, indices from 0: ("plots", 1, "x") is x of the
second [[plots]].

Format: TOML 1.0.0, https://toml.io/en/v1.0.0.
"""

from __future__ import annotations

import bisect
import json
import re
import tomllib

KeyPath = tuple[str | int, ...]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"[ \t]*")
# What may stand between two elements of an array, and between two statements.
_BETWEEN = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
# A number, boolean, date or time: up to what can follow a value. A date may contain a space.
_PLAIN = re.compile(r"[^,\]}#\r\n]*")
_STRINGS = (
    # Up to two quotes may stand directly before the three that close.
    re.compile(r'"""(?:[^\\]|\\.)*?""""{0,2}', re.DOTALL),
    re.compile(r"'''.*?''''{0,2}", re.DOTALL),
    re.compile(r'"(?:[^"\\\n]|\\.)*"'),
    re.compile(r"'[^'\n]*'"),
)


class _Scanner:
    def __init__(self, text: str):
        self.text = text
        self.at = 0
        self.starts = [0] + [match.end() for match in re.finditer("\n", text)]
        self.lines: dict[KeyPath, int] = {}
        # How many elements each array of tables has so far.
        self.elements: dict[KeyPath, int] = {}

    def skip(self, pattern: re.Pattern) -> str:
        match = pattern.match(self.text, self.at)
        assert match, "the text was not valid TOML"
        self.at = match.end()
        return match[0]

    def note(self, path: KeyPath) -> None:
        """Notes the present line for a path that has none yet."""
        self.lines.setdefault(path, bisect.bisect(self.starts, self.at))

    def document(self) -> None:
        table: KeyPath = ()
        self.skip(_BETWEEN)
        while self.at < len(self.text):
            if self.text[self.at] == "[":
                table = self.header()
            else:
                self.statement(table)
            self.skip(_BETWEEN)

    def header(self) -> KeyPath:
        """[a.b] or [[a.b]]: the path of the table that it opens."""
        start = self.at
        is_array = self.text.startswith("[[", self.at)
        self.at += 1 + is_array
        keys = self.key()
        after = self.at + 1 + is_array
        self.at = start
        path: KeyPath = ()
        for index, key in enumerate(keys):
            path += (key,)
            self.note(path)
            if is_array and index == len(keys) - 1:
                self.elements[path] = self.elements.get(path, 0) + 1
            if path in self.elements:
                path += (self.elements[path] - 1,)
                self.note(path)
        self.at = after
        return path

    def statement(self, table: KeyPath) -> None:
        """key = value within `table`."""
        start = self.at
        keys = self.key()
        after = self.at + 1  # the equals sign
        self.at = start
        path = table
        for key in keys:
            path += (key,)
            self.note(path)
        self.at = after
        self.skip(_BLANK)
        self.value(path)

    def key(self) -> list[str]:
        """A bare, quoted or dotted key, and the blanks behind it."""
        keys = []
        while True:
            self.skip(_BLANK)
            if self.text[self.at] in "\"'":
                quoted = self.skip(_STRINGS[2 if self.text[self.at] == '"' else 3])
                keys.append(tomllib.loads(f"key = {quoted}")["key"])
            else:
                keys.append(self.skip(_BARE_KEY))
            self.skip(_BLANK)
            if not self.text.startswith(".", self.at):
                return keys
            self.at += 1

    def value(self, path: KeyPath) -> None:
        if self.text.startswith("[", self.at):
            self.array(path)
        elif self.text.startswith("{", self.at):
            self.inline_table(path)
        else:
            for pattern in _STRINGS:
                if match := pattern.match(self.text, self.at):
                    self.at = match.end()
                    return
            self.skip(_PLAIN)

    def array(self, path: KeyPath) -> None:
        self.at += 1
        self.skip(_BETWEEN)
        index = 0
        while self.text[self.at] != "]":
            self.note((*path, index))
            self.value((*path, index))
            index += 1
            self.skip(_BETWEEN)
            if self.text[self.at] == ",":
                self.at += 1
                self.skip(_BETWEEN)
        self.at += 1

    def inline_table(self, path: KeyPath) -> None:
        self.at += 1
        self.skip(_BETWEEN)
        while self.text[self.at] != "}":
            self.statement(path)
            self.skip(_BETWEEN)
            if self.text[self.at] == ",":
                self.at += 1
                self.skip(_BETWEEN)
        self.at += 1


def key_lines(text: str) -> dict[KeyPath, int]:
    """Key path → line from 1, for each key, table and array element of a valid TOML text.

    A table that several lines define has the line that mentions it first.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.document()
    return scanner.lines


def key_text(path: KeyPath) -> str:
    """A key path as people write it: plots[1].x."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += ("." if text else "") + _key(key)
    return text


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are TOML's too, except that DEL must be escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def value_text(value: object) -> str:
    """A value on one line: a string, number, boolean, list, tuple or dict (as an inline table)."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return _string(value)
        case list() | tuple():
            return "[" + ", ".join(map(value_text, value)) + "]"
        case dict():
            pairs = ", ".join(f"{_key(key)} = {value_text(item)}" for key, item in value.items())
            return "{ " + pairs + " }" if pairs else "{}"
    raise TypeError(f"no TOML for {type(value).__name__}")


def _is_tables(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and value != ()
        and value != []
        and all(isinstance(item, dict) for item in value)
    )


def document_text(data: dict) -> str:
    """A TOML document: scalars and arrays first, then tables, then arrays of tables.

    Tables within tables are written inline. `tomllib.loads` gives `data` back, tuples as lists.
    """
    plain, tables, arrays = [], [], []
    for key, value in data.items():
        if isinstance(value, dict):
            tables.append(f"\n[{_key(key)}]")
            tables += [f"{_key(name)} = {value_text(item)}" for name, item in value.items()]
        elif _is_tables(value):
            for element in value:
                arrays.append(f"\n[[{_key(key)}]]")
                arrays += [f"{_key(name)} = {value_text(item)}" for name, item in element.items()]
        else:
            plain.append(f"{_key(key)} = {value_text(value)}")
    return "\n".join(plain + tables + arrays).removeprefix("\n") + "\n"
