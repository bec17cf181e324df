#!/usr/bin/env python3
"""Deadlines missed against offered load: earliest deadline first, first come first served, and priorities (deadline-monotonic), with admission and
without, on the same task sets, beside what no order can do better.

usage: ./x bench rpc-misses [--sim-seeds N] [--seeds N] [--ms N] [--sim-only]

Runs crates/rpc/examples/misses.rs twice: on a virtual clock, where the service's own rules decide and nothing else takes time; and for real, a
service with one worker (SCHED_FIFO where that is allowed) and its client, two processes. Loads are 0.5 to 1.2. Task sets: "constrained", deadlines shorter than
periods; "implicit", random rates with each period as deadline, feasible up to a load of 1 for an order that interrupts, which a service does not. Above 1
every set is infeasible, and at least 1 - 1/load of it is missed.

Miss ratios are means over the seeds, with 95 % confidence intervals (Student's t). build/bench/DATE-rpc-misses/ keeps every run (raw.jsonl), the
table (misses.csv), and a plot for each kind of set and clock.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
from collections import defaultdict

import plot
from common import FIRST, ROOT, BenchError, Results, note, run_bench

PROGRAM = ROOT / "target/release/examples/misses"
# Student's t for 95 %, by degrees of freedom; beyond the table it is that of the normal distribution, nearly.
T95 = [12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11, 2.101, 2.093]


def interval(values):
    """Mean and half the width of its 95 % confidence interval; None for that where one value is all there is."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, None
    t = T95[len(values) - 2] if len(values) - 2 < len(T95) else 2.0
    return mean, t * statistics.stdev(values) / len(values) ** 0.5


def rows(*arguments):
    with subprocess.Popen([PROGRAM, *arguments], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            yield json.loads(line)
        if process.wait():
            raise BenchError(f"misses {arguments[0]} ended with {process.returncode}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sim-seeds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ms", type=int, default=500)
    parser.add_argument("--sim-only", action="store_true")
    options = parser.parse_args()
    subprocess.run(["cargo", "build", "--release", "--quiet", "-p", "tombolo-rpc", "--example", "misses"], cwd=ROOT, check=True)
    if os.geteuid() == 0:
        os.setpriority(os.PRIO_PROCESS, 0, FIRST)
    results = Results("rpc-misses")
    ratios, least = defaultdict(list), {}
    runs = [("sim", "--seeds", str(options.sim_seeds))]
    if not options.sim_only:
        runs.append(("real", "--seeds", str(options.seeds), "--ms", str(options.ms)))
    for run in runs:
        note(f"misses {' '.join(run)}")
        for row in rows(*run):
            results.add(**row)
            variant = row["order"] + (" with admission" if row["admission"] else "")
            ratios[row["how"], row["tasks"], variant, row["load"]].append(row["missed"] / max(row["requests"], 1))
            least[row["load"]] = row["least"]
    table = []
    for (how, tasks, variant, load), values in ratios.items():
        mean, half = interval(values)
        table.append({"how": how, "tasks": tasks, "order": variant, "load": load, "runs": len(values), "missed": round(mean, 5),
                      "ci95": None if half is None else round(half, 5), "least": least[load]})
    with (results.folder / "misses.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    plots = []
    for how, tasks in dict.fromkeys((row["how"], row["tasks"]) for row in table):
        mine = [row for row in table if (row["how"], row["tasks"]) == (how, tasks)]
        loads = sorted({row["load"] for row in mine})
        variants = list(dict.fromkeys(row["order"] for row in mine))
        print(f"\n{how}, {tasks} deadlines: missed of 100 (95 % confidence)\n{'load':>6}{'bound':>8}" + "".join(f"{name:>25}" for name in variants))
        for load in loads:
            cells = {row["order"]: f"{100 * row['missed']:.2f}" + ("" if row["ci95"] is None else f" ± {100 * row['ci95']:.2f}")
                     for row in mine if row["load"] == load}
            print(f"{load:6.2f}{100 * least[load]:8.2f}" + "".join(f"{cells[name]:>25}" for name in variants))
        curves = []
        for name in variants:
            points = sorted((r["load"], r["missed"], max(r["missed"] - (r["ci95"] or 0), 0), r["missed"] + (r["ci95"] or 0)) for r in mine if r["order"] == name)
            curves.append((name, None, points))
        curves.append(("no order misses less", "lines linewidth 2 linecolor rgb 'black' dashtype 2", [(load, least[load]) for load in loads]))
        path = results.folder / f"misses-{how}-{tasks}.svg"
        plot.svg(path, f"Deadlines missed: {how}, {tasks} deadlines", "offered load", "missed per request", curves)
        plots.append(str(path.relative_to(ROOT)))
    at = {(row["how"], row["tasks"], row["order"], row["load"]): row["missed"] for row in table}
    results.finish(
        **{f"{name}_misses_at_{load}": at.get(("sim", "constrained", name.replace("_", " with "), load)) for name in ("edf", "edf_admission", "fifo", "priority") for load in (0.9, 1.2)},
        **{f"real_{name}_misses_at_0.9": next((m for (how, tasks, order, load), m in at.items() if how.startswith("real") and (tasks, order, load) == ("constrained", name, 0.9)), None) for name in ("edf", "fifo", "priority")},
        table=str((results.folder / "misses.csv").relative_to(ROOT)),
        plots=plots,
    )


if __name__ == "__main__":
    run_bench(main)
