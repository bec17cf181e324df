#!/usr/bin/env python3
"""Streams through guests whose memory fences may do nothing, and reports whether a network stalled.

usage: tests/stall.py [SECONDS] [--only VARIANT,…]

Each variant runs for SECONDS (default: 60): a cell and a stock Linux guest, both over vhost-user and over ivshmem (in Linux by
tombolo-agent), each under the system's QEMU and under build/qemu10. The last line is one JSON object. The exit code is 1 if a
network stalled. Needs root (network namespaces) and iperf 2; everything it starts ends with it.
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lib import BUILD, qemu_version  # noqa: E402
from lib.guest import qemu_program  # noqa: E402
from lib.stall import run_load  # noqa: E402

GUESTS = {
    "cell": ("cell", "vhost-user"),
    "cell-ivshmem": ("cell", "ivshmem"),
    "linux": ("linux", "vhost-user"),
    "linux-ivshmem": ("linux", "ivshmem"),
}


def main():
    programs = {"system": None, "qemu10": BUILD / "qemu10/run"}
    variants = [f"{guest}-{qemu}" for qemu in programs for guest in GUESTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float, nargs="?", default=60)
    parser.add_argument("--only", default=",".join(variants), help=f"of {', '.join(variants)}")
    options = parser.parse_args()
    results = {}
    for variant in options.only.split(","):
        if variant not in variants:
            parser.error(f"no such variant: {variant}; there are {', '.join(variants)}")
        guest, qemu = variant.rsplit("-", 1)
        if program := programs[qemu]:
            if not program.exists():
                print(f"{variant}: not run: {program} is not there: run ./x qemu10", flush=True)
                continue
            os.environ["TOMBOLO_QEMU"] = str(program)
        else:
            os.environ.pop("TOMBOLO_QEMU", None)
        outcome = run_load(*GUESTS[guest], options.seconds, lambda line: print(f"  {variant}: {line}", flush=True))
        results[variant] = outcome
        told = f"STALLED in {outcome.stalled}" if outcome.stalled else "no stall"
        print(f"{variant} (QEMU {qemu_version(qemu_program())}): {outcome.runs} runs in {outcome.seconds:.0f} s, "
              f"{outcome.failed} without a rate, {told}, "
              f"{outcome.late_wakeups} late wake-ups, {outcome.late_signals} late signals", flush=True)
    print(json.dumps({variant: outcome._asdict() for variant, outcome in results.items()}), flush=True)
    sys.exit(1 if any(outcome.stalled for outcome in results.values()) else 0)


if __name__ == "__main__":
    main()
