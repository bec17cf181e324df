"""The built-in experiments in their short forms, and checks of what they measured.

    python3 -m tombolo_lab.quick [--into DIR] [NAME…]

An experiment of which nothing can run here is skipped with the reason, and fails where CI=true. It
is a stage of the repository's tests and the bench `lab`. It checks data, not speed: every cell
that can run here has all its points, none failed, counts add up, parts lie in 0 to 1, intervals
contain their estimates, and each report exists. The last line is one JSON object:

    bench, experiments, points, disturbed (attempts), skipped (cells), failed (points and checks),
    budget_corr      Pearson's r of received bandwidth and frames at the port, of `budget`
    stress_effects   effect on the round trip in µs by factor, of `stress`
    seconds          by experiment

The exit code is 1 when a point or a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tombolo_lab import LabError, model, runner
from tombolo_lab.results import Run, cell_key
from tombolo_lab.workloads import UNMEASURED

INTO = Path("build/lab/quick")
# Their short forms take minutes, another experiment or test does the same, or they need what only
# they need (switch: DPDK and 1.4 GB of hugepages). They run when they are named.
LEFT_OUT = (
    "budget-xen", "bypass-flames", "bypass-flows", "bypass-matrix", "mesh", "switch", "trust",
    "xen", "xen-flood",
)  # fmt: skip


def faults_of_points(run: Run) -> list[str]:
    """What is wrong with the points of a run, in words."""
    experiment = run.experiment
    faults = [f"a point failed: {p['failed']}" for p in run.points if "failed" in p]
    skipped = {cell_key(item["cell"]) for item in run.skipped}
    have: dict[str, int] = {}
    for point in run.counted():
        have[cell_key(point["cell"])] = have.get(cell_key(point["cell"]), 0) + 1
        values = point["measures"]
        sent, arrived, loss = (values.get(name) for name in ("sent_s", "arrived_s", "loss"))
        if None not in (sent, arrived, loss) and abs(sent * (1 - loss) - arrived) > 1e-6 * sent:
            faults.append(f"{sent:g} sent, {arrived:g} arrived and a loss of {loss:g} do not agree")
        if values.get(experiment.primary) is None and UNMEASURED not in point.get("notes", {}):
            faults.append(f"{experiment.primary} has no value in {point['cell']}")
    for cell in experiment.cells():
        found = have.get(cell_key(cell), 0)
        if cell_key(cell) not in skipped and found < experiment.repeat.times:
            faults.append(f"{found} of {experiment.repeat.times} points count in {cell}")
    return faults


def faults_of_summary(run: Run, found: dict) -> list[str]:
    """What is wrong with a summary, in words."""
    faults = []
    for part in found["cells"]:
        for name, numbers in part["measures"].items():
            for low, value, high in (
                (numbers["low"], numbers["mean"], numbers["high"]),
                (numbers["boot_low"], numbers["median"], numbers["boot_high"]),
            ):
                slack = 1e-9 * abs(value or 0)
                if low is not None and not low - slack <= value <= high + slack:
                    faults.append(f"{name}: {value:g} is outside its interval {low:g} to {high:g}")
    if found["counts"]["points"] != len(run.counted()):
        faults.append("the counts of the summary do not add up")
    if not (run.folder / "report.html").is_file():
        faults.append("there is no report")
    return faults


def measured(name: str, folder: Path) -> tuple[dict, list[str]]:
    """Runs one experiment; gives its summary and what is wrong with it."""
    from tombolo_lab import report

    shutil.rmtree(folder, ignore_errors=True)
    run = runner.run(model.load(name, quick=True), folder, False, sys.stderr)
    faults = faults_of_points(run)
    if not run.counted():
        if run.skipped and os.environ.get("CI") == "true":
            faults.append(f"skipped although CI must not skip: {run.skipped[0]['reason']}")
        return {
            "counts": run.counts(),
            "why": run.skipped[0]["reason"] if run.skipped else "",
        }, faults
    report.write(run, folder)
    found = json.loads((folder / "summary.json").read_text())
    return found, faults + faults_of_summary(run, found)


def effects_by_factor(found: dict) -> dict[str, float]:
    """Main effects on the round trip, in µs."""
    parts = (found.get("effects") or {"measures": {}})["measures"].get("rtt_us", {"effects": []})
    return {
        effect["factors"][0]: round(effect["q"], 2)
        for effect in parts["effects"]
        if len(effect["factors"]) == 1
    }


def correlation(found: dict) -> float | None:
    """Pearson's r of bandwidth and frames."""
    for item in found.get("correlations", []):
        if (item["x"], item["y"], item["kind"]) == ("mbit_s", "port_frames_s", "Pearson"):
            return None if item["coefficient"] is None else round(item["coefficient"], 4)
    return None


def names() -> list[str]:
    """The experiments of a run that names none."""
    return [name for name in model.names() if name not in LEFT_OUT]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all experiments, or those that are named; gives the exit code."""
    parser = argparse.ArgumentParser(prog="tombolo_lab.quick", description=__doc__.split("\n")[0])
    parser.add_argument("--into", type=Path, default=INTO, help=f"folder of results ({INTO})")
    parser.add_argument("names", metavar="NAME", nargs="*", help="experiments (default: all)")
    options = parser.parse_args(argv)
    total = {"points": 0, "disturbed": 0, "skipped": 0, "failed": 0}
    seconds, special = {}, {}
    verdicts = {"ok": 0, "FAIL": 0, "skip": 0}
    for name in options.names or names():
        begun = time.monotonic()
        try:
            found, faults = measured(name, options.into / name)
        except LabError as error:
            found, faults = {"counts": {}}, [str(error)]
        counts = found["counts"]
        total["points"] += counts.get("points", 0)
        total["disturbed"] += counts.get("disturbed_attempts", 0)
        total["skipped"] += counts.get("skipped_cells", 0)
        total["failed"] += len(faults)
        seconds[name] = round(time.monotonic() - begun, 1)
        is_skipped = not faults and not counts.get("points")
        verdict = "FAIL" if faults else "skip" if is_skipped else "ok"
        verdicts[verdict] += 1
        more = f": {found['why']}" if is_skipped else f"  {counts}"
        print(f"{verdict:5}{name}  {seconds[name]} s{more}", flush=True)
        for fault in faults:
            print(f"     {fault}", flush=True)
        if name == "budget":
            special["budget_corr"] = correlation(found)
        if name == "stress":
            special["stress_effects"] = effects_by_factor(found)
    good, bad, skipped = verdicts.values()
    print(f"{good} passed, {bad} failed, {skipped} skipped")
    last = {"bench": "lab", "experiments": len(seconds), **total, **special, "seconds": seconds}
    print(json.dumps(last))
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
