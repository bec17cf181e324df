"""A bench of parts: functions that give fields of its last line, which is JSON. `./x bench daytwo` and `./x bench home` are such."""

import json
import sys


def note(text):
    """Says how far the bench is; the last line of its output is for programs."""
    print(text, file=sys.stderr, flush=True)


def run(bench, parts):
    """Runs the parts that the command line names, or all of them, in this order, and prints a table and the last line.
    A part that fails is an error, not a zero."""
    names = [part.__name__ for part in parts]
    if unknown := [word for word in sys.argv[1:] if word not in names]:
        sys.exit(f"{bench}: expected parts among {', '.join(names)}, found {unknown[0]!r}")
    fields = {}
    for part in [part for part in parts if part.__name__ in (sys.argv[1:] or names)]:
        note(f"\n== {part.__name__}")
        try:
            fields |= part()
        except (AssertionError, OSError) as error:
            sys.exit(f"{bench}: {part.__name__}: {error}")
    print(f"\n{'':30} {'value':>12}")
    for name, value in fields.items():
        for key, number in value.items() if isinstance(value, dict) else [(name, value)]:
            print(f"{key:30} {number:>12}")
    print(json.dumps({"bench": bench, **fields}))
