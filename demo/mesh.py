#!/usr/bin/env python3
"""Many cells on one network over shared memory: each pings all others until every pair has answered.

usage: ./x mesh [CELLS]        (default 64; up to 200)

Starts a fabric of cells with the app `mesh`, each on its own ivshmem link. Prints when all have their addresses, when all
pairs have answered, how much memory a cell needs, and what the idle fabric costs. On a terminal it counts the cells as they
start. Needs no root. Exits 0 only if all pairs answered; everything is removed at the end.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from lib import Fabric, Skip, scratch  # noqa: E402
from lib.mesh import QUIET_S, SETTLING_S, Mesh  # noqa: E402

PATIENCE_S = 240


def main():
    asked = sys.argv[1] if len(sys.argv) > 1 else "64"
    count = int(asked) if asked.isascii() and asked.isdigit() else 0
    if not 2 <= count <= 200:
        sys.exit(f"mesh: expected a number of cells from 2 to 200, found {asked!r}")
    tty = sys.stdout.isatty()

    def say(text, end="\n"):
        print(f"{text}\033[K" if tty else text, end=end, flush=True)

    def progress(what, done):
        if tty:
            say(f"{done} of {count} {what} …", end="\r")

    mesh = Mesh(f"mesh{os.getpid()}", count, progress=progress)
    say(f"starting {count} cells …")
    with scratch() as folder, Fabric(folder, mesh.text) as fabric:
        say(f"{count} cells have their addresses after {mesh.wait_addresses(fabric, PATIENCE_S):.1f} s")
        say(f"all {count * (count - 1)} ways answered after {mesh.wait_answers(fabric, PATIENCE_S):.1f} s")
        say(f"letting it fall quiet and measuring what that costs: {SETTLING_S + QUIET_S} s …")
        share, memory = mesh.quiet_share(fabric), mesh.rss_bytes(fabric)
        say(f"quiet, all of it takes {100 * share:.1f} % of one core; a cell's QEMU takes {memory / (1 << 20):.0f} MiB")
        say("taking it down …")
        fabric.down(seconds=120)


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, TimeoutError, Skip) as error:
        sys.exit(f"mesh: {error}")
    except KeyboardInterrupt:
        sys.exit("mesh: stopped")
