#!/usr/bin/env python3
"""What it takes to run a fabric day after day: packages and units.

usage: ./x bench daytwo [PART...]

install   Debian's packages of the release build: the size of them all, lintian's errors, how exposed the
          system's unit is, and what is left after they were installed, used, upgraded and purged in a bare system
web       the tests of the page in a browser (tests/daytwo_web.py): how many things they checked
apply     the longest gap in a stream of datagrams between members that an `apply` is not about, beside
          the longest one without applies
policy    what rules, VLANs and classes add to the daemon's CPU time for a frame, with 64 flows each way between
          two vhost-user ports; and to the switch's own work alone, between ports in memory

A part is a function that gives fields of the last line; a part that fails is an error, not a zero. Needs
root (namespaces).
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]
import apply_gap  # noqa: E402
import package  # noqa: E402
import package_debian  # noqa: E402
import package_install  # noqa: E402
import parts  # noqa: E402
import policy_cost  # noqa: E402
from parts import note  # noqa: E402


def install():
    debs = package.deb()
    found = package.lintian()
    for line in found:
        note(line)
    note("the packages' life in a bare system:")
    [main] = package.OUT.glob("tombolo_*.deb")
    left = package_debian.live(debs, main, note)
    for name in left:
        note(f"left: {name}")
    system, _ = package_install.measure()
    return {
        "deb_bytes": sum(deb.stat().st_size for deb in debs),
        "lintian_errors": sum(line.startswith("E:") for line in found),
        "units_exposure": system,
        "purge_left": len(left),
    }


def web():
    """The page in a browser: how many things its tests checked. All hold, or the bench fails."""
    import daytwo_web
    for name, test in list(vars(daytwo_web).items()):
        if name.startswith("test_"):
            note(name)
            test()
    return {"web_tests": daytwo_web.Checks.count}


def apply():
    return apply_gap.measure(note)


def policy():
    """With real ports, then in memory: in percent, with what the repeats are between."""
    fields = policy_cost.measure(note)
    program = Path(os.environ.get("TOMBOLO_BUILT", ROOT / "target/release")) / "examples/decide"
    done = subprocess.run([program, "cost"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{program} ended with {done.returncode}: {done.stderr.strip()}")
    note(done.stdout)
    rows = {name: [float(word) for word in words] for name, *words in map(str.split, done.stdout.splitlines()[1:])}
    ns, percent, least, most = rows["all"]
    return fields | {
        "policy_memory_pct": percent,
        "policy_memory_least_pct": least,
        "policy_memory_most_pct": most,
        "policy_cost_ns": round(ns - rows["none"][0], 1),
    }


# In the order of the fields of the last line.
PARTS = (install, web, apply, policy)


if __name__ == "__main__":
    parts.run("daytwo", PARTS)
