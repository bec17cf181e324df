#!/usr/bin/env python3
"""A mixed fabric under checked traffic, with a random fault every 20 seconds.

usage: tests/soak.py MINUTES [--seed N] [--only FAULT,…] [--no-linux] [--every SECONDS]

Cells over vhost-user, ivshmem and stream, a stock Linux VM, a tap, a forward through passt, names and
calls are checked all the time. After each fault the time is taken until all of them work again. The
last line is one JSON object. The exit code is 1 where data was corrupt, a fault needed a person, or
something leaked. Needs root (network namespaces); everything it starts ends with it.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lib.soak import Soak  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", default="", help="faults, separated by commas")
    parser.add_argument("--no-linux", action="store_true", help="without the Linux VM")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    begun = time.monotonic()
    with Soak(options.seed, linux=not options.no_linux, report=lambda text: print(text, flush=True)) as soak:
        names = options.only.split(",") if options.only else soak.faults()
        unknown = set(names) - set(soak.faults())
        if unknown:
            parser.error(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(soak.faults())}")
        bag = []
        begun = time.monotonic()
        while time.monotonic() - begun < options.minutes * 60:
            # Each fault comes once before any comes again, in random order.
            bag = bag or soak.dice.sample(names, len(names))
            due = time.monotonic() + options.every
            soak.inject(bag.pop())
            left = min(due, begun + options.minutes * 60) - time.monotonic()
            if left > 0:
                time.sleep(left)
        minutes = (time.monotonic() - begun) / 60
        leaks = soak.leaks()
        print(f"\n{soak.table()}\n")
        for flow in soak.flows:
            print(f"{flow.name:12} {flow.checks} checks, {flow.failures} failed, {flow.corrupt} corrupt")
        print(f"leaks: {', '.join(leaks) or 'none'}")
        times = soak.times()
        result = {
            "soak_minutes": round(minutes, 1),
            "faults": len(soak.outcomes),
            "manual": soak.manual,
            "recovery_median_s": round(statistics.median(times), 2) if times else None,
            "recovery_worst_s": round(times[-1], 2) if times else None,
            "corrupt": soak.corrupt(),
            "leaks": leaks,
        }
        print(json.dumps(result), flush=True)
    sys.exit(1 if soak.corrupt() or soak.manual or leaks else 0)


if __name__ == "__main__":
    main()
