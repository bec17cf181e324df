#!/usr/bin/env python3
"""Round trips by payload: 1 byte to 1 MiB by copy, 1 byte to 1 GiB in shared memory.

usage: ./x bench rpc-sweep [--calls N] [--publish FOLDER]

Runs crates/rpc/examples/rpc_sweep.rs: 1000 calls per size, both ends asleep while they wait, on two CPUs. Prints a table of
each size's lowest, mean and highest time and its distribution. Keeps every single time (raw.jsonl), the table (sweep.csv) and
two plots (sweep.svg, sweep-distribution.svg) in build/bench/DATE-rpc-sweep/. Times are us. It takes about 15 seconds.
`--publish docs/results` writes the page of the docs, rpc-sweep.md, and the files that it shows.
"""

import argparse
import csv
import json
import math
import os
import statistics
import subprocess

import plot
import publish
from common import FIRST, ROOT, BenchError, Results, run_bench

PARTS = {"p1_us": 0.01, "p25_us": 0.25, "p50_us": 0.5, "p75_us": 0.75, "p99_us": 0.99, "p999_us": 0.999}


def size(count):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count} {unit}"
        count //= 1024


def figures(row):
    times = sorted(row["ns"])
    at = {name: times[max(math.ceil(len(times) * part), 1) - 1] / 1000 for name, part in PARTS.items()}
    return {"way": row["way"], "bytes": row["bytes"], "calls": len(times), "min_us": times[0] / 1000, "mean_us": round(statistics.mean(times) / 1000, 3),
            **at, "max_us": times[-1] / 1000}


def plots(results, table, calls):
    curves = []
    for way, colour in (("copy", "#0060ad"), ("shared", "#dd181f")):
        rows = [row for row in table if row["way"] == way]
        drawn = [("1st to 99th of 100", f"filledcurves fillcolor rgb '{colour}' fillstyle transparent solid 0.15", ("p1_us", "p99_us")),
                 ("median", f"linespoints linecolor rgb '{colour}' pointtype 7 pointsize 0.5 linewidth 2", ("p50_us",)),
                 ("mean", f"lines linecolor rgb '{colour}' dashtype 2", ("mean_us",)),
                 ("lowest, highest", f"lines linecolor rgb '{colour}' dashtype 3", ("min_us",)),
                 (None, f"lines linecolor rgb '{colour}' dashtype 3", ("max_us",))]
        curves += [(name and f"{way}: {name}", style, [(row["bytes"], *(row[key] for key in keys)) for row in rows]) for name, style, keys in drawn]
    ticks = ", ".join(f"'{size(1 << power)}' {1 << power}" for power in range(0, 31, 5))
    plot.svg(results.folder / "sweep.svg", f"Round trip by payload, {calls} calls of each size", "payload", "round trip, µs", curves, "xy",
             ["set logscale x 2", f"set xtics ({ticks})", "set key outside bottom center horizontal maxrows 4"])
    curves = []
    for index, (way, log, colour) in enumerate((way, log, colour) for way, logs, colour in (("copy", (0, 12, 16, 20), "#0060ad"), ("shared", (0, 20, 30), "#dd181f"))
                                               for log in logs):
        times = next((sorted(row["ns"]) for row in results.rows if (row["way"], row["bytes"]) == (way, 1 << log)), None)
        if times is None:
            continue
        # As many as can be told apart: each step of the rare ones, every tenth or so of the others.
        ranks = sorted({*range(0, len(times), max(len(times) // 80, 1)), *range(max(len(times) - 40, 0), len(times))})
        style = f"steps linewidth 1.5 dashtype {index % 4 + 1} linecolor rgb '{colour}'"
        curves.append((f"{way}, {size(1 << log)}", style, [(times[rank] / 1000, (len(times) - rank) / len(times)) for rank in ranks]))
    plot.svg(results.folder / "sweep-distribution.svg", f"How many of {calls} calls take longer", "round trip, µs", "part of the calls that takes at least as long", curves,
             "xy", ["set key outside right top", f"set yrange [{0.9 / calls}:1.1]"])


def page(folder, results, table, columns, calls):
    header = ["payload", *(name.removesuffix("_us").replace("p999", "p99.9") for name in columns[3:])]
    sections = []
    for way, words in (("copy", "By copy"), ("shared", "In shared memory")):
        rows = [[size(row["bytes"]), *(f"{row[name]:.1f}" for name in columns[3:])] for row in table if row["way"] == way]
        sections.append(f"## {words}\n\nMicroseconds; p25 is what a quarter of the calls stays below, and so on.\n\n" + publish.table(header, rows))
    about = ("A request of each size goes to another process and comes back as large, while the caller waits: by copy (into the connection's memory, into the reply's, and out "
             "of it), and in memory that was handed over before, of which both ends write the first eight bytes. Both ends sleep while they wait, on two CPUs, without a real-time class. "
             f"{calls} calls of each size, after a tenth as many to warm up.")
    sections[:0] = ["![Round trip by payload](rpc-sweep.svg)\n\n![Distribution of round trips](rpc-sweep-distribution.svg)"]
    publish.page(folder, results, "Round trips by payload", about, sections)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--publish", metavar="FOLDER")
    options = parser.parse_args()
    subprocess.run(["cargo", "build", "--release", "--quiet", "-p", "tombolo-rpc", "--example", "rpc_sweep"], cwd=ROOT, check=True)
    if os.geteuid() == 0:
        os.setpriority(os.PRIO_PROCESS, 0, FIRST)
    results = Results("rpc-sweep")
    table = []
    with subprocess.Popen([ROOT / "target/release/examples/rpc_sweep", "--calls", str(options.calls)], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            row = json.loads(line)
            results.add(**row)
            table.append(figures(row))
        if process.wait():
            raise BenchError(f"rpc_sweep ended with {process.returncode}")
    results.end()
    columns = list(table[0])
    with (results.folder / "sweep.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(table)
    print(f"{'':8}{'payload':>10}" + "".join(f"{name.removesuffix('_us'):>10}" for name in columns[3:]) + f"   (us, {options.calls} calls each)")
    for row in table:
        print(f"{row['way']:8}{size(row['bytes']):>10}" + "".join(f"{row[name]:10.1f}" for name in columns[3:]))
    plots(results, table, options.calls)
    if options.publish:
        page(options.publish, results, table, columns, options.calls)
    by_size = {(row["way"], row["bytes"]): row["p50_us"] for row in table}
    results.finish(
        copy_1b_us=by_size["copy", 1],
        copy_64k_us=by_size["copy", 65536],
        copy_1mib_us=by_size["copy", 1 << 20],
        shared_1b_us=by_size["shared", 1],
        shared_1gib_us=by_size["shared", 1 << 30],
        table=str((results.folder / "sweep.csv").relative_to(ROOT)),
        plots=[str((results.folder / name).relative_to(ROOT)) for name in ("sweep.svg", "sweep-distribution.svg")],
    )


if __name__ == "__main__":
    run_bench(main)
