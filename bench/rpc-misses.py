#!/usr/bin/env python3
"""Deadlines missed against offered load: earliest deadline first, first come first served, and priorities (deadline-monotonic),
with admission and without, on the same task sets, beside the bound for any order.

usage: ./x bench rpc-misses [--sim-seeds N] [--seeds N] [--ms N] [--tries N] [--load PERCENT] [--sim-only] [--publish FOLDER]

Runs crates/rpc/examples/misses.rs twice: on a virtual clock, where the service's own rules decide and nothing else takes
time; and for real, with a service of one worker (SCHED_FIFO where that is allowed) and its client, two processes. Loads are
0.5 to 1.2. The task sets are "spread", deadlines of 4 to 40 times the work; "implicit", random rates with each period as
deadline; and "tight", deadlines of 1.2 to 3 times the work. The first two are feasible up to a load of 1 for an order that
preempts, which a service does not. "tight" is infeasible at each load.

The work charged to each request of a real run is measured before the runs, with the call's own cost. The bound counts the
handler's CPU time only, which every order needs. Real runs that the hypervisor or a late client disturbed are kept in
raw.jsonl, repeated, and left out of the tables.

Two bounds are shown beside the orders: how far the requests that really arrived exceed the available time (no order misses
fewer of them), and 1 - 1/load, which is the bound of a long run. All orders serve the same requests, in turn for each seed,
so they are compared by the differences within a seed. Miss ratios are means over the seeds, with 95 % confidence intervals
(Student's t). build/bench/DATE-rpc-misses/ keeps every run (raw.jsonl), the table (misses.csv), and a plot for each kind of
set and clock. It takes about twelve minutes. `--publish docs/results` writes the page of the docs, rpc-misses.md, and the
files that it shows.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
from collections import defaultdict

import plot
import publish
from common import FIRST, ROOT, BenchError, Results, note, run_bench

PROGRAM = ROOT / "target/release/examples/misses"
SETS = {"spread": "deadlines of 4 to 40 times the work, feasible up to a load of 1", "implicit": "random rates, each period its deadline, feasible up to a load of 1",
        "tight": "deadlines of 1.2 to 3 times the work, infeasible"}
CLOCKS = {"sim": "on a virtual clock", "real": "for real", "real_without_rights": "for real, without the right to a real-time class"}
COLOURS = {"edf": "#0060ad", "fifo": "#dd181f", "priority": "#2f8f2f"}
ADMITTED = " with admission"
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


def percent(mean, half=None):
    return f"{100 * mean:.2f}" + ("" if half is None else f" ± {100 * half:.2f}")


PAIRS = [("edf", "fifo"), ("edf with admission", "edf"), ("edf with admission", "fifo"), ("edf with admission", "fifo with admission")]


def paired(ratios, how, tasks, loads):
    """What one order misses more than another of the same requests (less than none: fewer), by the differences within each seed."""
    lines = []
    for load in loads:
        cells = []
        for one, other in PAIRS:
            of_one, of_other = ratios.get((how, tasks, one, load), {}), ratios.get((how, tasks, other, load), {})
            differences = [of_one[seed] - of_other[seed] for seed in of_one.keys() & of_other.keys()]
            cells.append(percent(*interval(differences)) if differences else "disturbed")
        lines.append([f"{load:.2f}", *cells])
    head = ["load", *(f"{one} less {other}" for one, other in PAIRS)]
    return "\n\nDifferences on the same requests, in points; below 0 the first misses fewer:\n\n" + publish.table(head, lines)


def figures(real):
    """What a request was charged and took in real runs, us: of undisturbed ones."""
    rows = [row for row in real if not row["disturbed"]]
    if not rows:
        return {}
    took = sorted(row["served_ns"] / 1000 for row in rows if row["served_ns"])
    return {"work_us": rows[0]["work_ns"] / 1000, "charged_us": rows[0]["charged_ns"] / 1000, "served_us_median": round(statistics.median(took), 1),
            "served_us_most": round(took[-1], 1)} if took else {}


def measured(real):
    words = figures(real)
    if not words:
        return "no run was undisturbed"
    return (f"{words['work_us']:.0f} µs of CPU time in the handler, of which the bound is made; {words['charged_us']:.0f} µs in all with the call, measured before the runs, of which loads and "
            f"deadlines are made; services took {words['served_us_median']:.0f} µs, the median over the runs, and {words['served_us_most']:.0f} in the worst run's mean")


def draw(path, how, tasks, rows, bounds):
    """The plot of one kind of set on one clock. Curves are moved aside by a hair, so that their intervals can be told apart."""
    curves = []
    for index, name in enumerate(dict.fromkeys(row["order"] for row in rows)):
        order, admitted = name.removesuffix(ADMITTED), name.endswith(ADMITTED)
        style = f"linecolor rgb '{COLOURS[order]}' pointtype {6 if admitted else 7} pointsize 0.5 linewidth 1.5 dashtype {2 if admitted else 1}"
        points = [(row["load"] + (index - 2.5) * 0.003, *(100 * y for y in (row["missed"], max(row["missed"] - (row["ci95"] or 0), 0), min(row["missed"] + (row["ci95"] or 0), 1))))
                  for row in sorted(rows, key=lambda row: row["load"]) if row["order"] == name]
        curves.append((name.replace("edf", "earliest deadline").replace("fifo", "first come"), f"yerrorlines {style}", points))
    curves.append(("bound: demand of these requests", "lines linewidth 3 linecolor rgb '#000000'", [(load, 100 * demand) for load, (demand, _) in bounds]))
    curves.append(("bound: 1 - 1/load, long run", "lines linewidth 2 linecolor rgb '#888888' dashtype 3", [(load, 100 * least) for load, (_, least) in bounds]))
    plot.svg(path, f"Deadlines missed {CLOCKS[how]}: {SETS[tasks]}", "offered load (work per time)", "missed, % of the requests (95 % confidence)", curves,
             extra=["set key outside bottom center horizontal maxrows 3", "set xrange [0.48:1.22]", "set yrange [0:]"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sim-seeds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--ms", type=int, default=500)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--load", type=int, default=0, help="only this load, in percent")
    parser.add_argument("--sim-only", action="store_true")
    parser.add_argument("--publish", metavar="FOLDER")
    options = parser.parse_args()
    subprocess.run(["cargo", "build", "--release", "--quiet", "-p", "tombolo-rpc", "--example", "misses"], cwd=ROOT, check=True)
    if os.geteuid() == 0:
        os.setpriority(os.PRIO_PROCESS, 0, FIRST)
    results = Results("rpc-misses")
    if options.publish and not options.sim_only and options.seeds < 7:
        raise BenchError(f"--publish with {options.seeds} seeds; expected at least 7, so that the figures have a spread")
    # By seed, so that orders are compared on the same requests.
    ratios, demands, least = defaultdict(dict), defaultdict(dict), {}
    real, disturbed = [], defaultdict(int)
    runs = [["sim", "--seeds", str(options.sim_seeds)]]
    if not options.sim_only:
        runs.append(["real", "--seeds", str(options.seeds), "--ms", str(options.ms), "--tries", str(options.tries)])
    for run in runs:
        run.extend(["--loads", str(options.load)] if options.load else [])
    for run in runs:
        note(f"misses {' '.join(run)}")
        for row in rows(*run):
            results.add(**row)
            if row["how"] != "sim":
                real.append(row)
                disturbed["runs"] += 1
            if row.get("disturbed"):
                disturbed["of them"] += 1
                continue
            variant, requests = row["order"] + (ADMITTED if row["admission"] else ""), max(row["requests"], 1)
            ratios[row["how"], row["tasks"], variant, row["load"]][row["seed"]] = row["missed"] / requests
            demands[row["how"], row["tasks"], row["load"]][row["seed"]] = row["demanded"] / requests
            least[row["load"]] = row["least"]
    results.end()
    table = []
    # Always in the same order, whichever run was disturbed.
    for (how, tasks, variant, load), values in sorted(ratios.items(), key=lambda item: (list(CLOCKS).index(item[0][0]), list(SETS).index(item[0][1]), item[0][2], item[0][3])):
        mean, half = interval(list(values.values()))
        demand = statistics.mean(demands[how, tasks, load].values())
        table.append({"how": how, "tasks": tasks, "order": variant, "load": load, "runs": len(values), "missed": round(mean, 5),
                      "ci95": None if half is None else round(half, 5), "demand": round(demand, 5), "least": least[load]})
    with (results.folder / "misses.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    plots, sections = [], []
    for how, tasks in dict.fromkeys((row["how"], row["tasks"]) for row in table):
        mine = [row for row in table if (row["how"], row["tasks"]) == (how, tasks)]
        bounds = sorted({row["load"]: (row["demand"], row["least"]) for row in mine}.items())
        variants = list(dict.fromkeys(row["order"] for row in mine))
        print(f"\n{CLOCKS[how]}, {tasks}: missed of 100 (95 % confidence)\n{'load':>6}{'demand':>8}" + "".join(f"{name:>25}" for name in variants))
        lines = []
        for load, (demand, _) in bounds:
            cells = {row["order"]: percent(row["missed"], row["ci95"]) for row in mine if row["load"] == load}
            # Where each try of a run was disturbed there is no figure.
            lines.append([f"{load:.2f}", percent(demand), *(cells.get(name, "disturbed") for name in variants)])
            print(f"{lines[-1][0]:>6}{lines[-1][1]:>8}" + "".join(f"{cell:>25}" for cell in lines[-1][2:]))
        path = results.folder / f"misses-{how}-{tasks}.svg"
        draw(path, how, tasks, mine, bounds)
        plots.append(str(path.relative_to(ROOT)))
        sections.append(f"## {tasks}, {CLOCKS[how]}\n\nMissed of 100 requests; {SETS[tasks]}.\n\n![{tasks}, {CLOCKS[how]}](rpc-{path.name})\n\n"
                        + publish.table(["load", "bound: demand", *variants], lines) + paired(ratios, how, tasks, [load for load, _ in bounds]))
    if options.publish:
        about = ("The same requests, served in three orders, with admission and without: earliest deadline first (edf), as they come (fifo), shortest relative deadline first (priority). A request is missed when its "
                 "reply is not there at its deadline, for whatever reason. Below the bound no order comes, even one that knows the future and interrupts what it serves. On the virtual clock the service's own rules "
                 f"decide and nothing but the work takes time ({options.sim_seeds} seeds of half a second, 100 µs of work); the real runs are a service with one worker and its client, two processes "
                 f"({options.seeds} seeds of {options.ms} ms; {measured(real)}). Of {disturbed['runs']} real runs {disturbed['of them']} were disturbed and are left out.")
        publish.page(options.publish, results, "Deadlines missed against load", about, sections)
    at = {(row["how"], row["tasks"], row["order"], row["load"]): row["missed"] for row in table}
    results.finish(
        **{f"real_{key}": value for key, value in figures(real).items()},
        real_runs=disturbed["runs"],
        real_runs_disturbed=disturbed["of them"],
        **{f"{name}_misses_at_{load}": at.get(("sim", "spread", name.replace("_", " with "), load)) for name in ("edf", "edf_admission", "fifo", "priority") for load in (0.9, 1.2)},
        **{f"real_{name}_misses_at_0.9": next((m for (how, tasks, order, load), m in at.items() if how.startswith("real") and (tasks, order, load) == ("spread", name, 0.9)), None) for name in ("edf", "fifo", "priority")},
        table=str((results.folder / "misses.csv").relative_to(ROOT)),
        plots=plots,
    )


if __name__ == "__main__":
    run_bench(main)
