"""Lines of keys in odd TOML, and TOML that is written by hand and read back."""

import random
import sys
import tomllib
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tombolo_lab.tomltext import document_text, key_lines, key_text, value_text

ODD = r'''# a comment with [a.table] and key = "value"
title = "a # is no comment [nor = this a table]"   # but this is
'quoted.key' = 1
"esc\u0061ped \"key\"" = 2
dotted . "in side" . key = 3
text = """
fake = 1
[fake]
a quote: \""" and a backslash \\
ends with two quotes"""""
raw = \'\'\'
raw_fake = 'x' \
[[raw.fake]] ''
ends with one quote\'\'\'\'
empty = """"""
day = 1979-05-27 07:32:00  # a date with a space
list = [ # a comment ] in an array
  1, "]", # and , here
  [2, 3,
   4],
  { a = 1, b.c = "}" }, """
multi ] line""",
  5,
]

[ factors ]   # blanks are allowed
a = [1]
  indented = [ "x" ]

[deep.er."and deeper"]
x = { y = [ {z = 1}, {z = 2} ], w.v = -inf }

[[plots]]
x = 1

[plots.sub]
s = 1

[[plots]] # second
x = 2
[[plots.nested]]
n = 1
[[plots.nested]]
n = 2
[plots.nested.below]
m = 1

[factors.late]
l = 1
'''.replace(r"\'", "'")


def line_of(text, part):
    """The line on which `part` first stands, found the dull way."""
    return text[: text.index(part)].count("\n") + 1


def paths(data, path=()):
    """Every key path of parsed TOML."""
    if path:
        yield path
    if isinstance(data, dict):
        for key, value in data.items():
            yield from paths(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from paths(value, (*path, index))


class KeyLines(unittest.TestCase):
    def test_each_key_of_an_odd_file_has_a_line_and_no_other_has(self):
        self.assertEqual(set(paths(tomllib.loads(ODD))), set(key_lines(ODD)))

    def test_lines_of_an_odd_file(self):
        lines = key_lines(ODD)
        expected = {
            ("title",): "title =",
            ("quoted.key",): "'quoted.key'",
            ('escaped "key"',): '"esc',
            ("dotted",): "dotted .",
            ("dotted", "in side", "key"): "dotted .",
            ("text",): "text =",
            ("raw",): "raw =",
            ("empty",): "empty =",
            ("day",): "day =",
            ("list",): "list =",
            ("list", 0): '1, "]"',
            ("list", 1): '1, "]"',
            ("list", 2): "[2, 3",
            ("list", 2, 1): "[2, 3",
            ("list", 2, 2): "   4],",
            ("list", 3, "b", "c"): "{ a = 1",
            ("list", 4): "{ a = 1",
            ("list", 5): "  5,",
            ("factors",): "[ factors ]",
            ("factors", "a"): "a = [1]",
            ("factors", "indented", 0): "indented",
            ("deep", "er", "and deeper"): "[deep.er",
            ("deep", "er", "and deeper", "x", "y", 1, "z"): "x = { y",
            ("deep", "er", "and deeper", "x", "w", "v"): "x = { y",
            ("plots",): "[[plots]]",
            ("plots", 0, "x"): "x = 1",
            ("plots", 0, "sub", "s"): "s = 1",
            ("plots", 1): "[[plots]] # second",
            ("plots", 1, "x"): "x = 2",
            ("plots", 1, "nested", 0, "n"): "n = 1",
            ("plots", 1, "nested", 1, "n"): "n = 2",
            ("plots", 1, "nested", 1, "below", "m"): "m = 1\n\n[factors.late]",
            ("factors", "late", "l"): "l = 1",
        }
        for path, part in expected.items():
            with self.subTest(path=path):
                self.assertEqual(lines[path], line_of(ODD, part))

    def test_line_ends_of_windows_give_the_same_lines(self):
        self.assertEqual(key_lines(ODD.replace("\n", "\r\n")), key_lines(ODD))

    def test_a_file_without_a_line_end_and_an_empty_one(self):
        self.assertEqual(key_lines("a = 1"), {("a",): 1})
        self.assertEqual(key_lines("a = [1, 2]#"), {("a",): 1, ("a", 0): 1, ("a", 1): 1})
        self.assertEqual(key_lines(""), {})
        self.assertEqual(key_lines("\n# only a comment"), {})

    def test_quotes_before_the_end_of_a_multi_line_string(self):
        for quotes in ("'", '"'):
            for more in range(3):
                text = f"a = {quotes * 3}x{quotes * (3 + more)}\nb = 1\n"
                with self.subTest(text=text):
                    self.assertEqual(tomllib.loads(text)["a"], "x" + quotes * more)
                    self.assertEqual(key_lines(text), {("a",): 1, ("b",): 2})
        text = "a = '''''''' # two quotes and nothing else\nb = 1"
        self.assertEqual(tomllib.loads(text)["a"], "''")
        self.assertEqual(key_lines(text), {("a",): 1, ("b",): 2})

    def test_seeded_random_documents(self):
        """Each leaf's value is the line on which it was written."""
        for seed in range(200):
            source = random.Random(seed)
            text, number = "", 0
            for index in range(source.randrange(1, 30)):
                filler = source.choice(["", "\n", '# x = 1 [y] "\n', "  \n\t\n"])
                text += filler
                number = text.count("\n") + 1
                text += source.choice(
                    [
                        f"k{index} = {number}\n",
                        f"'k{index}'.a.\"b\" = {number} # c\n",
                        f"k{index} = {{ a = [{number}, {number}], b.c = {number} }}\n",
                        f"k{index} = [\n # ]\n {number + 2},\n {number + 3} ]\n",
                        f"[t{index}]\n",
                        f"[[a]]\nk = {number + 1}\n",
                        f"[[a]]\n[[a.b]]\nk{index}.c = {number + 2}\n",
                    ]
                )
            with self.subTest(seed=seed, text=text):
                data = tomllib.loads(text)
                lines = key_lines(text)
                self.assertEqual(set(paths(data)), set(lines))
                for path in paths(data):
                    value = data
                    for key in path:
                        value = value[key]
                    if isinstance(value, int):
                        self.assertEqual(lines[path], value, path)


class Writing(unittest.TestCase):
    def test_key_paths_as_text(self):
        self.assertEqual(key_text(("plots", 1, "x")), "plots[1].x")
        self.assertEqual(key_text(("factors", "odd key")), 'factors."odd key"')
        self.assertEqual(key_text(()), "")

    def test_a_document_is_read_back(self):
        data = {
            "text": "quotes \" ' and \\ and \n\t\x00\x1f\x7f\u2028é😀",
            "tables": [{"a": 1, "in line": {"b": [1, 2], "c": {}}}, {"d": "x"}],
            "numbers": [0, -5, 10**15, 0.1, 1e-7, 1e300, 5e-324, -0.0, float("inf")],
            "truth": True,
            "table": {"odd key": [True, False], "empty": [], "nested": [["a"], [1.0]]},
            "empty": {},
            "none": [],
        }
        text = document_text(data)
        read = tomllib.loads(text)
        self.assertEqual(read, data)
        self.assertEqual(str(read["numbers"]), str(data["numbers"]), "integers stay integers")
        self.assertEqual(set(paths(read)), set(key_lines(text)))

    def test_a_document_of_tables_starts_with_no_empty_line(self):
        self.assertEqual(document_text({"a": {"b": 1}}), "[a]\nb = 1\n")

    def test_what_toml_has_no_value_for(self):
        for value in (None, {1, 2}, b"x"):
            with self.assertRaisesRegex(TypeError, "no TOML for"):
                value_text(value)


if __name__ == "__main__":
    unittest.main()
