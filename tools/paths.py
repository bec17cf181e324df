#!/usr/bin/env python3
"""Checks that no tracked file names a folder of one machine or the address of a package registry."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Written in pieces, so that this file passes its own check.
PATTERNS = {
    "a home folder": r"(?<![\w.])/(?:home|Users)/[a-z]" + r"[\w.-]*|(?<![\w.])/ro" + r"ot/[\w.]",
    "a work folder of one machine": r"(?<![\w./~-])/wo" + r"rk/\w",
    "a registry's address": r"\b(?:deb|security|snapshot)\.deb" + r"ian\.org|(?:archive|ports)\.ubu" + r"ntu\.com|index\.crates" + r"\.io|static\.crates" + r"\.io",
    "a tool of one workplace": r"\bfa" + r"rm-[a-z]+\b",
}
# A lock file names the registry by cargo's own decree.
PASSED_OVER = {"Cargo.lock"}


def main():
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\0")
    problems, count = [], 0
    for name in filter(None, names):
        path = ROOT / name
        if path.name in PASSED_OVER or not path.is_file() or path.is_symlink():
            continue
        data = path.read_bytes()
        if b"\0" in data:
            continue
        count += 1
        for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
            for what, pattern in PATTERNS.items():
                match = re.search(pattern, line)
                if match:
                    problems.append(f"{name}:{number}: {what}: {match[0]}")
    if problems:
        sys.exit("paths:\n" + "\n".join(problems))
    print(f"paths: {count} files name none")


if __name__ == "__main__":
    main()
