#!/usr/bin/env python3
"""Compares what documentation says of the crates with the crates.

usage: tools/rooms.py

* The table of rooms in ARCHITECTURE.md has each crate, with the crates that it uses as its Cargo.toml has them, and each room
  comes before those that it uses.
* The head of each library's lib.rs names each of its public modules.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| `([a-z-]+)` \|.*\| ([^|]*) \|$", re.M)
NAME = re.compile(r"tombolo-(.*)")


def crates():
    """The folder of each crate by its room's name."""
    folders = [*ROOT.glob("crates/*"), ROOT / "lab/programs/harness"]
    names = {folder: tomllib.loads((folder / "Cargo.toml").read_text())["package"]["name"] for folder in folders}
    return {NAME.fullmatch(name)[1]: folder for folder, name in names.items()}


def used(folder):
    """The rooms on which a crate depends, those that only its tests or builds use left out."""
    dependencies = tomllib.loads((folder / "Cargo.toml").read_text()).get("dependencies", {})
    return {match[1] for name, how in dependencies.items() if (match := NAME.fullmatch(name)) and not (isinstance(how, dict) and how.get("optional"))}


def faults_of_table():
    rows = {name: set() if uses == "nothing" else set(uses.split(", ")) for name, uses in ROW.findall((ROOT / "ARCHITECTURE.md").read_text())}
    folders, order = crates(), list(rows)
    for name in sorted(folders.keys() ^ rows.keys()):
        yield f"ARCHITECTURE.md: {name} is {'no crate' if name in rows else 'missing in the table of rooms'}"
    for name in sorted(folders.keys() & rows.keys()):
        expected = used(folders[name])
        if rows[name] != expected:
            yield f"ARCHITECTURE.md: {name} uses {', '.join(sorted(expected)) or 'nothing'}; the table says {', '.join(sorted(rows[name])) or 'nothing'}"
        above = [other for other in sorted(expected & rows.keys()) if order.index(other) < order.index(name)]
        if above:
            yield f"ARCHITECTURE.md: {name} comes after {', '.join(above)}, which it uses"


def faults_of_heads():
    for name, folder in sorted(crates().items()):
        library = folder / "src/lib.rs"
        if not library.exists():
            continue
        text = library.read_text()
        head = "\n".join(line for line in text.splitlines() if line.startswith("//!"))
        # In brackets as a link, or in backquotes: `[`frame`]`, `[`drop`](mod@drop)`,
        # `[`mod@drop`]`.
        named = set(re.findall(r"`(?:mod@)?([a-z_0-9]+)`", head))
        public = re.findall(r"^pub mod ([a-z_0-9]+)", re.sub(r"#\[cfg\([^\]]*test[^\]]*\)\]\n(?:#\[.*\]\n)*pub mod .*", "", text), re.M)
        missing = [module for module in public if module not in named]
        if missing:
            yield f"{library.relative_to(ROOT)}: its head does not name {', '.join(missing)}"


def main():
    faults = [*faults_of_table(), *faults_of_heads()]
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        sys.exit(1)
    print(f"rooms: {len(crates())} crates as ARCHITECTURE.md and their heads say")


if __name__ == "__main__":
    main()
