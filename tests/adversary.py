#!/usr/bin/env python3
"""Hostile peers of every attachment beside neighbours that must not notice.

usage: tests/adversary.py [PART-OF-A-NAME…]     all attacks, or those whose names have one of the parts
       tests/adversary.py --list

One row per attack: the neighbours' loss and latency, the time of `tombolo status`, the daemon's CPU, and
the memory and descriptors that it holds afterwards. The last line is one JSON object. The exit code is 1
if an attack succeeded. Needs root (a network namespace); limited to a few seconds per attack.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lib.adversary import Arena  # noqa: E402
from lib.hostile import Target, load  # noqa: E402


def hostile(name, words):
    """The hostile program itself: one attack. A port that closes the connection or does not answer is what is hoped for."""
    try:
        load()[name](Target(**json.loads(words)))
    except (OSError, EOFError, TimeoutError) as error:
        print(f"ended by {type(error).__name__}: {error}")


def main():
    if sys.argv[1:2] == ["--hostile"]:
        hostile(*sys.argv[2:])
        return
    names = list(load())
    if sys.argv[1:] == ["--list"]:
        print("\n".join(names))
        return
    if sys.argv[1:2] and sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    chosen = [name for name in names if not sys.argv[1:] or any(part in name for part in sys.argv[1:])]
    if not chosen:
        sys.exit(f"no attack has {' or '.join(sys.argv[1:])} in its name; --list shows all")
    print(Arena.HEAD, flush=True)
    with Arena(report=lambda text: print(text, flush=True)) as arena:
        verdicts = [arena.judge(name) for name in chosen]
    escapes = [verdict for verdict in verdicts if verdict.escapes]
    result = {"attacks": len(verdicts), "escapes": len(escapes), "worst_neighbour_p99_ms": round(max(verdict.p99_ms for verdict in verdicts), 1)}
    print(json.dumps(result), flush=True)
    sys.exit(1 if escapes else 0)


if __name__ == "__main__":
    main()
