#!/usr/bin/env python3
"""Checks the messages of commits: a subject of at most 72 characters, an empty line, and a body that gives the reason.

usage: tools/commits.py RANGE

RANGE is what git takes, such as v0.1.0..main. Merges are passed over.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_CHARACTERS = 72


def problems_of(message):
    """What is wrong with a message, as a list of texts."""
    subject, _, rest = message.partition("\n")
    found = []
    if len(subject) > MOST_CHARACTERS:
        found.append(f"the subject has {len(subject)} characters, expected {MOST_CHARACTERS} at most")
    if subject.endswith("."):
        found.append("the subject ends with a full stop")
    if rest and not rest.startswith("\n"):
        found.append("the second line is not empty")
    if not rest.strip():
        found.append("there is no body: give the reason, and what was measured")
    return found


def self_check():
    """The rules hold for messages that are known to be right or wrong."""
    assert not problems_of("a: b\n\nSince c.\n")
    assert len(problems_of("a" * 73 + "\nno empty line")) == 2
    assert problems_of("a: b\n") == ["there is no body: give the reason, and what was measured"]
    assert problems_of("a: b.\n\nSince c.") == ["the subject ends with a full stop"]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    self_check()
    done = subprocess.run(["git", "log", "--no-merges", "-z", "--format=%h%n%B", sys.argv[1]], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"commits: {done.stderr.strip()}")
    commits = [text.partition("\n") for text in done.stdout.split("\0") if text]
    problems = [f"{commit} {message.splitlines()[0]}: {what}" for commit, _, message in commits for what in problems_of(message)]
    if problems:
        sys.exit("commits:\n" + "\n".join(problems))
    print(f"commits: {len(commits)} messages are as they should be")


if __name__ == "__main__":
    main()
