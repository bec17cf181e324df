#!/usr/bin/env python3
"""Hostile peers, random faults and handovers, in turn.

usage: ./x bench trust [--minutes M] [--handovers N] [--seed S]

adversary   every attack of tests/adversary.py beside neighbours: attacks that succeeded, the worst p99 of
            a neighbour's pings
soak        M minutes (60) of checked traffic with a random fault every 20 s: recovery times, and how
            often a person was needed
handover    `tombolo up --replace` N times (100) under traffic: the largest gap of each attachment

Each part prints its table to standard error. `lost` counts checks with wrong data, broken transfers and
leaks. A part that cannot run is an error, not a zero. Needs root (network namespaces).
"""

import argparse
import json
import subprocess
import sys

from common import ROOT, BenchError, note


def last_line(*command):
    """Runs one part, passes its output on, and gives the JSON object of its last line."""
    note(f"\n== {' '.join(map(str, command))}")
    lines = []
    with subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            lines.append(line.rstrip())
            note(lines[-1])
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        raise BenchError(f"`{' '.join(map(str, command))}` ended with {process.returncode} and without its JSON line") from None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--handovers", type=int, default=100)
    parser.add_argument("--seed", type=int, default=20261122)
    options = parser.parse_args()
    try:
        adversary = last_line("tests/adversary.py")
        soak = last_line("tests/soak.py", options.minutes, "--seed", options.seed)
        handover = last_line("tests/faults_handover.py", options.handovers)
    except BenchError as error:
        sys.exit(f"trust: {error}")
    print(json.dumps({
        "bench": "trust",
        "attacks": adversary["attacks"],
        "escapes": adversary["escapes"],
        "worst_neighbour_p99_ms": adversary["worst_neighbour_p99_ms"],
        "soak_minutes": soak["soak_minutes"],
        "manual": soak["manual"],
        "recovery_median_s": soak["recovery_median_s"],
        "recovery_worst_s": soak["recovery_worst_s"],
        "upgrade_gap_ms": handover["upgrade_gap_ms"],
        "lost": soak["corrupt"] + len(soak["leaks"]) + handover["lost"],
    }))


if __name__ == "__main__":
    main()
