#!/usr/bin/env python3
"""Round trips by payload: 1 byte to 1 MiB by copy, 1 byte to 1 GiB in shared memory.

usage: ./x bench rpc-sweep [--calls N]

Runs crates/rpc/examples/rpc_sweep.rs: 1000 calls a size, both ends asleep while they wait, on two CPUs. Prints a table of each size's lowest, mean and
highest time and its distribution, and keeps, in build/bench/DATE-rpc-sweep/, every single time (raw.jsonl), the table (sweep.csv) and a plot
(sweep.svg). Times are us.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess

import plot
from common import FIRST, ROOT, BenchError, Results, run_bench

PARTS = {"p1_us": 0.01, "p25_us": 0.25, "p50_us": 0.5, "p75_us": 0.75, "p99_us": 0.99, "p999_us": 0.999}


def size(count):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count} {unit}"
        count //= 1024


def figures(row):
    times = sorted(row["ns"])
    at = {name: times[min(int(len(times) * part), len(times) - 1)] / 1000 for name, part in PARTS.items()}
    return {"way": row["way"], "bytes": row["bytes"], "calls": len(times), "min_us": times[0] / 1000, "mean_us": round(statistics.mean(times) / 1000, 3),
            **at, "max_us": times[-1] / 1000}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
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
    columns = list(table[0])
    with (results.folder / "sweep.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(table)
    print(f"{'':8}{'payload':>10}" + "".join(f"{name.removesuffix('_us'):>10}" for name in columns[3:]) + f"   (us, {options.calls} calls each)")
    for row in table:
        print(f"{row['way']:8}{size(row['bytes']):>10}" + "".join(f"{row[name]:10.1f}" for name in columns[3:]))
    curves = []
    for way in ("copy", "shared"):
        rows = [row for row in table if row["way"] == way]
        curves.append((f"{way}: median, 1st to 99th of 100", None, [(r["bytes"], r["p50_us"], r["p1_us"], r["p99_us"]) for r in rows]))
        curves.append((f"{way}: lowest", "lines dashtype 2", [(r["bytes"], r["min_us"]) for r in rows]))
    plot.svg(results.folder / "sweep.svg", "Round trip by payload", "payload, bytes", "µs", curves, "xy", ["set format x '2^{%L}'", "set logscale x 2"])
    by_size = {(row["way"], row["bytes"]): row["p50_us"] for row in table}
    results.finish(
        copy_1b_us=by_size["copy", 1],
        copy_64k_us=by_size["copy", 65536],
        copy_1mib_us=by_size["copy", 1 << 20],
        shared_1b_us=by_size["shared", 1],
        shared_1gib_us=by_size["shared", 1 << 30],
        table=str((results.folder / "sweep.csv").relative_to(ROOT)),
        plot=str((results.folder / "sweep.svg").relative_to(ROOT)),
    )


if __name__ == "__main__":
    run_bench(main)
