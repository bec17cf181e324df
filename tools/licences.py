#!/usr/bin/env python3
"""Checks that every dependency of all workspaces is under a licence that Apache-2.0 code may be shipped with.

Reads `cargo metadata`; a licence it does not know, or none at all, fails. An expression passes when its "OR" branches
hold one all of whose "AND" parts are allowed. Prints the licences with the number of packages under each.
"""

import hashlib
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import sbom  # noqa: E402

ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unicode-DFS-2016",
    "Unlicense",
    "Zlib",
}


# Of single crates, with the reason. deny.toml has the same.
EXCEPTIONS = {
    # Of zenoh, in tombolo-span only, unchanged: MPL-2.0 asks for the source of its own files.
    "option-ext": "MPL-2.0",
    # Of zenoh too: a list of public certificates, under a permissive licence for data.
    "webpki-roots": "CDLA-Permissive-2.0",
}


def allowed(expression):
    """Whether an SPDX expression can be met by allowed licences; old manifests write "/" for OR."""
    tokens = re.findall(r"\(|\)|[^\s()]+", expression.replace("/", " OR "))
    position = 0

    def peek():
        return tokens[position].upper() if position < len(tokens) else None

    def take():
        nonlocal position
        position += 1
        return tokens[position - 1]

    def either():
        value = both()
        while peek() == "OR":
            take()
            value = both() or value
        return value

    def both():
        value = one()
        while peek() == "AND":
            take()
            value = one() and value
        return value

    def one():
        if peek() is None:
            raise ValueError(expression)
        token = take()
        if token == "(":
            value = either()
            if peek() != ")":
                raise ValueError(expression)
            take()
            return value
        if peek() == "WITH":
            take()
            token = f"{token} WITH {take()}"
        return token in ALLOWED

    value = either()
    if position != len(tokens):
        raise ValueError(expression)
    return value


def self_check():
    """The parser's own cases: a check that cannot fail is none."""
    yes = ("MIT", "MIT/Apache-2.0", "(MIT OR GPL-3.0) AND Unicode-3.0", "Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT")
    no = ("GPL-2.0-only", "MIT AND GPL-3.0", "LGPL-2.1 OR GPL-2.0", "Apache-2.0 WITH Other-exception", "MPL-2.0")
    for text in yes:
        assert allowed(text), text
    for text in no:
        assert not allowed(text), text


def check_deny():
    """deny.toml, for those who use cargo-deny, allows the same licences."""
    listed = set(tomllib.loads((ROOT / "deny.toml").read_text())["licenses"]["allow"])
    if listed != ALLOWED:
        sys.exit(f"licences: deny.toml and tools/licences.py differ in {', '.join(sorted(listed ^ ALLOWED))}")
    excepted = {entry["crate"]: " ".join(entry["allow"]) for entry in tomllib.loads((ROOT / "deny.toml").read_text())["licenses"]["exceptions"]}
    if excepted != EXCEPTIONS:
        sys.exit(f"licences: the exceptions of deny.toml and tools/licences.py differ: {excepted} and {EXCEPTIONS}")


def check_vendored():
    """Scripts that are copies of others' are unchanged, and their licence is allowed too."""
    packages = [package for root in sbom.VENDORED for package in sbom.vendored(root)]
    assert packages and all(allowed(package["license"]) for package in packages), packages
    for line in (sbom.XTERM / "SHA256SUMS").read_text().splitlines():
        wanted, name = line.split()
        if hashlib.sha256((sbom.XTERM / name).read_bytes()).hexdigest() != wanted:
            sys.exit(f"licences: {name} of {sbom.XTERM.relative_to(ROOT)} is not the file of SHA256SUMS")


def main():
    check_deny()
    check_vendored()
    self_check()
    counts, bad = Counter(), []
    for folder in (".", "cells", "span"):
        if not (ROOT / folder / "Cargo.toml").exists():
            continue
        command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", "x86_64-unknown-linux-gnu"]
        metadata = json.loads(subprocess.run(command, cwd=ROOT / folder, check=True, stdout=subprocess.PIPE).stdout)
        for package in metadata["packages"]:
            name, licence = f"{package['name']} {package['version']}", package["license"]
            counts[licence or "none"] += 1
            try:
                fine = bool(licence) and (allowed(licence) or EXCEPTIONS.get(package["name"]) == licence)
            except ValueError:
                fine = False
            if not fine:
                bad.append(f"{name}: {licence or 'no licence given'}")
    for licence, count in counts.most_common():
        print(f"{count:4} {licence}")
    if bad:
        sys.exit("licences that are not on the list of tools/licences.py:\n" + "\n".join(sorted(set(bad))))
    print(f"licences: {sum(counts.values())} packages, all allowed")


if __name__ == "__main__":
    main()
