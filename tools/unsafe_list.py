#!/usr/bin/env python3
"""Compares the modules that allow unsafe code with those that ARCHITECTURE.md lists; either way round, a difference fails.

ARCHITECTURE.md has a heading "## Modules that may use unsafe"; each module below it is a line that begins with
"- `path/from/the/root.rs`", and what follows on the line says why. A module allows unsafe code for itself, by
`#![allow(unsafe_code)]` at its head (`expect` counts the same); an allowance for a single item or from a parent is not
accepted, since it would hide from this list.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADING = "## Modules that may use unsafe"


def listed(text):
    """The paths under the heading, up to the next heading of the same or a higher level."""
    if HEADING not in text.splitlines():
        sys.exit(f'ARCHITECTURE.md has no heading "{HEADING}"')
    section = re.split(r"^##? ", text.split(HEADING, 1)[1], maxsplit=1, flags=re.M)[0]
    return re.findall(r"^[-*] `([^`]+\.rs)`", section, re.M)


def allowances(text):
    """(inner, outer): how many allowances of unsafe code a source has for the whole module and for single items."""
    code = re.sub(r"//[^\n]*", "", text)
    pattern = r"#(!?)\[\s*(?:cfg_attr\([^\]]*,\s*)?(?:allow|expect|warn)\s*\([^\]]*\bunsafe_code\b"
    marks = re.findall(pattern, code)
    return marks.count("!"), marks.count("")


def main():
    assert allowances("//! x\n#![allow(unsafe_code)]\n") == (1, 0)
    assert allowances("#[allow(dead_code, unsafe_code)]\nmod a;") == (0, 1)
    assert allowances("// #![allow(unsafe_code)]\n#![deny(unsafe_code)]") == (0, 0)
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.rs"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found, problems = set(), []
    for name in files.stdout.split():
        path = ROOT / name
        if not path.exists():
            continue
        inner, outer = allowances(path.read_text())
        if inner:
            found.add(name)
        if outer:
            problems.append(f"{name}: allows unsafe code for a single item or a child module; put #![allow(unsafe_code)] at the head of the module itself")
    architecture = ROOT / "ARCHITECTURE.md"
    names = listed(architecture.read_text()) if architecture.exists() else sys.exit("there is no ARCHITECTURE.md")
    problems += [f"{name}: allows unsafe code and is not listed in ARCHITECTURE.md" for name in sorted(found - set(names))]
    problems += [f"{name}: listed in ARCHITECTURE.md, but does not allow unsafe code (or is not there)" for name in sorted(set(names) - found)]
    problems += [f"{name}: listed twice" for name in sorted({name for name in names if names.count(name) > 1})]
    if problems:
        sys.exit("unsafe-list:\n" + "\n".join(problems))
    print(f"unsafe-list: {len(found)} modules, as listed")


if __name__ == "__main__":
    main()
