#!/usr/bin/env python3
"""What it takes to run a fabric day after day: packages and units.

usage: ./x bench daytwo

install   Debian's packages of the release build: the size of them all, lintian's errors, how exposed the
          system's unit is, and what is left after they were installed, used, upgraded and purged in a bare system
web       the tests of the page in a browser (tests/daytwo_web.py): how many things they checked

A part is a function that gives fields of the last line; a part that fails is an error, not a zero. Needs
root (namespaces).
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]
import package  # noqa: E402
import package_debian  # noqa: E402
import package_install  # noqa: E402


def note(text):
    """Says how far the bench is; the last line of its output is for programs."""
    print(text, file=sys.stderr, flush=True)


def install():
    debs = package.deb()
    found = package.lintian()
    for line in found:
        note(line)
    note("the packages' life in a bare system:")
    [main] = package.OUT.glob("tombolo_*.deb")
    left = package_debian.live(debs, main, note)
    for name in left:
        note(f"left: {name}")
    system, _ = package_install.measure()
    return {
        "deb_bytes": sum(deb.stat().st_size for deb in debs),
        "lintian_errors": sum(line.startswith("E:") for line in found),
        "units_exposure": system,
        "purge_left": len(left),
    }


def web():
    """The page in a browser: how many things its tests checked. All hold, or the bench fails."""
    import daytwo_web
    for name, test in list(vars(daytwo_web).items()):
        if name.startswith("test_"):
            note(name)
            test()
    return {"web_tests": daytwo_web.Checks.count}


# In the order of the fields of the last line.
PARTS = (install, web)


def main():
    fields = {"bench": "daytwo"}
    for part in PARTS:
        note(f"\n== {part.__name__}")
        try:
            fields |= part()
        except (AssertionError, OSError) as error:
            sys.exit(f"daytwo: {part.__name__}: {error}")
    print(f"\n{'':16} {'value':>12}")
    for name, value in list(fields.items())[1:]:
        print(f"{name:16} {value:>12}")
    print(json.dumps(fields))


if __name__ == "__main__":
    main()
