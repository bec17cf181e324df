"""Calls with deadlines, beside what the kernel needs at least and beside peers."""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys

from tombolo_lab import harness
from tombolo_lab.benches import Figures, Part
from tombolo_lab.results import Run
from tombolo_lab.workloads.calls import PEERS, PROGRAM_OF

PARTS = (
    Part("calls"),
    Part("deadlines", ("load=90", "tasks=spread", "order=edf", "admission=false")),
    Part("cell-calls"),
)
# What each peer's program needs besides cargo.
NEEDS = {"capnp": "capnp"}
# Name of a ratio, our row, the other's row, measure.
PAIRS = [
    ("futex_blocking", "blocking", "futex_blocking", "p50_us"),
    ("unix_blocking", "blocking", "unix_blocking", "p50_us"),
    ("futex_one_cpu", "blocking_one_cpu", "futex_one_cpu", "p50_us"),
    ("unix_one_cpu", "blocking_one_cpu", "unix_one_cpu", "p50_us"),
    ("spin_polled", "polled", "spin", "p50_us"),
    ("futex_16", "outstanding_16_asleep", "futex_16", "calls_s"),
    ("futex_16_adaptive", "outstanding_16", "futex_16", "calls_s"),
    ("iceoryx2_polled", "polled", "iceoryx2_polled_blocking", "p50_us"),
    ("binary_heap_order", "order_10k_without_admission", "order_10k_binary_heap", "p50_us"),
    *(
        (f"{peer}_{row}{'_asleep' if ours.endswith('_asleep') else ''}", ours, f"{peer}_{row}", key)
        for peer in ("iceoryx2", "iceoryx2_waitset", "capnp", "tonic", "zenoh")
        for row, ours, key in (
            ("blocking", "blocking", "p50_us"),
            ("one_cpu", "blocking_one_cpu", "p50_us"),
            ("64k", "copy_64k", "p50_us"),
            ("16", "outstanding_16", "calls_s"),
            ("16", "outstanding_16_asleep", "calls_s"),
            ("loaded", "loaded", "p999_us"),
            ("loaded", "loaded_asleep", "p999_us"),
        )
    ),
]
# Key of the last line → row, measure, digits.
FIGURES = {
    "blocking_us": ("blocking", "p50_us", None),
    "blocking_one_cpu_us": ("blocking_one_cpu", "p50_us", None),
    "adaptive_us": ("adaptive", "p50_us", None),
    "polled_us": ("polled", "p50_us", None),
    "shared_1gib_us": ("shared_1gib", "p50_us", None),
    "copy_64k_us": ("copy_64k", "p50_us", None),
    "copy_64k_adaptive_us": ("copy_64k_adaptive", "p50_us", None),
    "rate_16": ("outstanding_16", "calls_s", 0),
    "cpu_us_16": ("outstanding_16", "cpu_us", None),
    "rate_16_asleep": ("outstanding_16_asleep", "calls_s", 0),
    "cpu_us_16_asleep": ("outstanding_16_asleep", "cpu_us", None),
    # Without the right to a real-time class there are no such figures.
    "loaded_p999_us": ("loaded", "p999_us", None),
    "loaded_p999_asleep_us": ("loaded_asleep", "p999_us", None),
    "loaded_p999_normal_us": ("loaded_normal", "p999_us", None),
    "order_10k_us": ("order_10k", "p50_us", None),
}


def built(peer: str) -> str | None:
    """Builds a peer's program; why there is none, or None."""
    program = NEEDS.get(peer)
    if program and not shutil.which(program):
        return f"the program {program} is not installed (./x setup peers)"
    tree = harness.tree()
    print(f"building {peer} (the first time takes some minutes)", file=sys.stderr, flush=True)
    command = ["cargo", "build", "--release", "--quiet", "-p", f"peer-{peer}"]
    command += ["--target-dir", str(tree / "target/peers")]
    folder = tree / "lab/programs/peers"
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if not done.returncode:
        return None
    said = done.stderr.strip().splitlines()
    return f"it does not build here: {said[-1] if said else done.returncode}"


def prepare(options: argparse.Namespace) -> dict:
    """Builds the peers that are to be measured. A peer that does not build is in the last line."""
    asked = [text for text in options.set if text.startswith("row=")]
    rows = asked[-1].removeprefix("row=").split(",") if asked else list(PROGRAM_OF)
    if options.quick or options.only not in (None, "calls"):
        return {}
    wanted = dict.fromkeys(PROGRAM_OF[row] for row in rows if row in PROGRAM_OF)
    return {"missing_peers": {peer: why for peer in wanted if (why := built(peer))}}


def missing_peers(run: Run) -> dict[str, str]:
    """The peers of which no row was measured, with the reason."""
    have = {PROGRAM_OF.get(point["cell"]["row"]) for point in run.counted()}
    reasons = {PROGRAM_OF.get(item["cell"]["row"]): item["reason"] for item in run.skipped}
    for point in run.points:
        if "failed" in point:
            reasons.setdefault(PROGRAM_OF.get(point["cell"]["row"]), point["failed"])
    return {peer: reasons.get(peer, "left out") for peer in PEERS if peer not in have}


def line(runs: dict[str, Run]) -> dict:
    """Medians over the repetitions; ratios are formed within each."""
    found: dict = {}
    if "calls" in runs:
        figures = Figures(runs["calls"])
        for key, (row, measure, digits) in FIGURES.items():
            found[key] = figures.median(measure, digits, row=row)
        ratios, between = {}, {}
        for name, ours, theirs, measure in PAIRS:
            each = figures.paired(measure, {"row": ours}, {"row": theirs})
            if each:
                ratios[name] = round(statistics.median(each), 3)
                between[name] = [round(min(each), 3), round(max(each), 3)]
        found["ratios"], found["ratios_between"] = ratios, between
        found["missing_peers"] = missing_peers(runs["calls"])
    if "deadlines" in runs:
        misses = Figures(runs["deadlines"]).values("missed", order="edf", load=90)
        found["edf_misses_at_0.9"] = round(statistics.mean(misses), 6) if misses else None
    if "cell-calls" in runs:
        run = runs["cell-calls"]
        figures = Figures(run)
        rows = {}
        for row in run.experiment.factors["row"]:
            medians = {key: figures.median(key, 1, row=row) for key in run.experiment.measures}
            if any(value is not None for value in medians.values()):
                rows[row] = medians
        why = {"missing": run.skipped[0]["reason"]} if run.skipped else {}
        found["cells"] = {"accel": "tcg", **rows, **why}
    return found
