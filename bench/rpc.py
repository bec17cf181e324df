#!/usr/bin/env python3
"""Calls with deadlines, beside the lower bound that the kernel sets and beside peers, all between the same two processes.

usage: ./x bench rpc [--repeats N] [--calls N] [--no-peers] [--no-cells] [--only-cells] [--publish FOLDER]
       ./x bench rpc --from build/bench/DATE-rpc [--publish FOLDER]

Each repeat runs crates/rpc/examples/rpc_bench.rs (ours, a futex, a Unix socket, a spinning word) and then the program of each
peer (bench/peers): iceoryx2 by events, by a WaitSet and polled, Cap'n Proto, gRPC by tonic over a Unix socket, zenoh in shared
memory. All are measured in turn in each repeat. The table has the medians over the repeats and the spread from the least to
the most; ratios are formed within each repeat. `--publish docs/results` writes the page rpc.md, from at least seven repeats.
Times are round trips in us, p50 unless named otherwise; cpu is of both processes, per call. "blocking" and "asleep" mean that
both ends sleep at once; "outstanding_16" and "loaded" wait as the library does by default (poll where that gains, then sleep).
`--from` measures nothing: it makes tables and page from the raw data of an earlier run, even an unfinished one.
Rows with a cell at one end follow (bench/cellcalls.py); their `way` is the median of a round trip minus the provider's share.
Ratios are ours divided by the peer's: below 1 we are faster (for rates: above 1). A peer that cannot be built or run is listed
with the reason.

After that crates/rpc/examples/misses.rs counts the deadlines that earliest deadline first misses at a load of 0.9, on a virtual clock.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
from collections import defaultdict

import cellcalls
import publish
from common import FIRST, ROOT, BenchError, Results, note, private_folder, ratio, run_bench

EXAMPLES = ROOT / "target/release/examples"
PEERS = ROOT / "target/peers/release"
# What each peer's program needs besides cargo.
NEEDS = {"iceoryx2": None, "capnp": "capnp", "tonic": None, "zenoh": None}


def lines(command, seconds=None):
    """The JSON objects that a program prints, as they come. One that says nothing more for so long is ended."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as over:
            process.kill()
            raise BenchError(f"{command[0]} was not done after {seconds} s") from over
        if process.returncode:
            raise BenchError(f"{command[0]} ended with {process.returncode}: {err.strip()[-300:]}")
        yield from map(json.loads, out.splitlines())


def alone(program):
    """The command that runs a peer where what it leaves behind (iceoryx2 in /tmp and /dev/shm, zenoh in /dev/shm) goes with it."""
    if os.geteuid() != 0 or ROOT.is_relative_to("/tmp"):
        return [program]
    mounts = "mount -t tmpfs peer /dev/shm && mount -t tmpfs peer /tmp && exec \"$@\""
    return ["unshare", "--mount", "sh", "-c", mounts, "sh", program]


def build(example):
    subprocess.run(["cargo", "build", "--release", "--quiet", "-p", "tombolo-rpc", "--example", example], cwd=ROOT, check=True)


def build_peers():
    """Builds each peer's program on its own. Returns why each that is missing is."""
    missing = {}
    for peer, program in NEEDS.items():
        if program and not shutil.which(program):
            missing[peer] = f"the program {program} is not installed (./x setup peers)"
            continue
        note(f"building {peer} (the first time takes some minutes)")
        command = ["cargo", "build", "--release", "--quiet", "--target-dir", str(ROOT / "target/peers"), "-p", f"peer-{peer}"]
        done = subprocess.run(command, cwd=ROOT / "bench/peers", capture_output=True, text=True)
        if done.returncode:
            missing[peer] = f"it does not build here: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}"
    return missing


def cells(results, options):
    """The rows with a cell at one end: medians over the repeats, in us, or why there are none."""
    if os.geteuid() != 0:
        return {"missing": "a tap and a namespace need root"}
    cellcalls.build()
    calls = max(options.calls // 10, 10)
    values = defaultdict(lambda: defaultdict(list))
    missing = {}
    with private_folder() as folder:
        for _ in range(options.repeats):
            try:
                for row in cellcalls.rows(folder, calls):
                    results.add(**row)
                    note(", ".join(f"{key} {value}" for key, value in row.items()))
                    for key, value in row.items():
                        if key.endswith("_us"):
                            values[row["row"]][key].append(value)
            except BenchError as error:
                # What was measured before is worth no less.
                missing = {"missing": str(error)}
                note(f"rows with cells: {error}")
    medians = {name: {key: round(statistics.median(of), 1) for key, of in row.items()} for name, row in values.items()}
    print(f"{'under emulation':30}{'p50 us':>10}{'p99 us':>10}{'p99.9 us':>11}{'way us':>12}   ({calls} calls each, medians of {options.repeats})")
    for name, row in medians.items():
        print(f"{name:30}{row['p50_us']:10.1f}{row['p99_us']:10.1f}{row['p999_us']:11.1f}{row['way_us']:12.1f}")
    return {"accel": "tcg", **medians, **missing}


def measured(options):
    """Runs all rows so many times, in turn. Returns the results, and why each peer that is missing is."""
    build("rpc_bench")
    build("misses")
    missing = dict.fromkeys(NEEDS, "left out by --no-peers") if options.no_peers else build_peers()
    if os.geteuid() == 0:
        os.setpriority(os.PRIO_PROCESS, 0, FIRST)
    results = Results("rpc")

    def measure(command, seconds=None):
        for row in lines([*command, "--calls", str(options.calls)], seconds):
            results.add(**row)
            note(", ".join(f"{key} {value}" for key, value in row.items()))

    for _ in range(options.repeats):
        measure([str(EXAMPLES / "rpc_bench")])
        for peer in NEEDS:
            if peer in missing:
                continue
            try:
                # Ten times what the slowest takes.
                measure(alone(str(PEERS / f"peer-{peer}")), 60 + options.calls * 0.02)
            except BenchError as error:
                missing[peer] = str(error)
                note(f"{peer}: {error}")
    return results, missing


def spread(values, digits=2):
    """The least and the most of the repeats."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}" if values else "-"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--publish", metavar="FOLDER")
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-cells", action="store_true")
    parser.add_argument("--only-cells", action="store_true")
    parser.add_argument("--from", dest="earlier", metavar="FOLDER")
    options = parser.parse_args()
    if options.publish and not options.earlier and options.repeats < 7:
        raise BenchError(f"--publish with {options.repeats} repeats; expected at least 7, so that the figures have a spread")
    if options.only_cells:
        results = Results("rpc")
        results.finish(cells=cells(results, options))
        return
    if options.earlier:
        results = Results.earlier("rpc", options.earlier)
        missing = {peer: "left out of that run" for peer in NEEDS if not any(row["row"].startswith(peer) for row in results.rows)}
    else:
        results, missing = measured(options)
    values = defaultdict(lambda: defaultdict(list))
    for row in results.rows:
        for key, value in row.items():
            if key != "row" and value is not None:
                values[row["row"]][key].append(value)
    repeats = max(len(of) for row in values.values() for of in row.values())
    if options.publish and repeats < 7:
        raise BenchError(f"--publish with {repeats} repeats; expected at least 7, so that the figures have a spread")
    medians = {name: {key: statistics.median(of) for key, of in row.items()} for name, row in values.items()}
    keys = ["p50_us", "p99_us", "p999_us", "rate", "cpu_us"]
    print(f"{'row':30}{'p50 us':>10}{'p99 us':>10}{'p99.9 us':>11}{'calls/s':>12}{'cpu us':>9}   least to most of p50   (medians of {repeats})")
    time_lines = []
    for name, row in medians.items():
        figures = ["-" if row.get(key) is None else f"{row[key]:.0f}" if key == "rate" else f"{row[key]:.2f}" for key in keys]
        print(f"{name:30}" + "".join(f"{cell:>{width}}" for cell, width in zip(figures, (10, 10, 11, 12, 9), strict=True)) + f"   {spread(values[name]['p50_us'])}")
        time_lines.append([name, *figures, spread(values[name]["p50_us"])])
    for peer, why in missing.items():
        print(f"{peer}: no figures, {why}")
    simulated = [] if options.earlier else lines([str(EXAMPLES / "misses"), "sim", "--loads", "90"])
    misses = [row["missed"] / row["requests"] for row in simulated
              if (row["tasks"], row["order"], row["admission"]) == ("spread", "edf", False)]

    def value(row, key="p50_us"):
        return medians.get(row, {}).get(key)

    pairs = [
        ("futex_blocking", "blocking", "futex_blocking", "p50_us"),
        ("unix_blocking", "blocking", "unix_blocking", "p50_us"),
        ("futex_one_cpu", "blocking_one_cpu", "futex_one_cpu", "p50_us"),
        ("unix_one_cpu", "blocking_one_cpu", "unix_one_cpu", "p50_us"),
        ("spin_polled", "polled", "spin", "p50_us"),
        ("futex_16", "outstanding_16_asleep", "futex_16", "rate"),
        ("futex_16_adaptive", "outstanding_16", "futex_16", "rate"),
        ("iceoryx2_polled", "polled", "iceoryx2_polled_blocking", "p50_us"),
        ("binary_heap_order", "order_10k_without_admission", "order_10k_binary_heap", "p50_us"),
        *((f"{peer}_{row}" + ("_asleep" if ours.endswith("_asleep") else ""), ours, f"{peer}_{row}", key)
          for peer in ("iceoryx2", "iceoryx2_waitset", "capnp", "tonic", "zenoh")
          for row, ours, key in [("blocking", "blocking", "p50_us"), ("one_cpu", "blocking_one_cpu", "p50_us"), ("64k", "copy_64k", "p50_us"),
                                 ("16", "outstanding_16", "rate"), ("16", "outstanding_16_asleep", "rate"),
                                 ("loaded", "loaded", "p999_us"), ("loaded", "loaded_asleep", "p999_us")]),
    ]
    ratios, ratio_lines = {}, []
    for name, ours, theirs, key in pairs:
        # Within each repeat: both were measured within seconds of each other.
        each = [ratio(a, b) for a, b in zip(values[ours][key], values[theirs][key], strict=False)]
        each = [one for one in each if one is not None]
        ratios[name] = round(statistics.median(each), 3) if each else None
        if each:
            ratio_lines.append([name, f"{ours}, {key}", f"{statistics.median(each):.3f}", spread(each, 3)])
    if options.publish:
        results.end()
        about = (f"Calls between two processes and what they are compared with, in turn in each of {repeats} repeats: medians over the repeats, and the least and the most "
                 "of the repeats' medians. Rows are explained in [benches.md](../benches.md) and in the head of bench/rpc.py; ratios are ours to the other's, formed within each repeat.")
        sections = ["## Times, µs\n\n" + publish.table(["row", "p50", "p99", "p99.9", "calls a second", "CPU", "p50, least to most"], time_lines),
                    "## Ratios\n\n" + publish.table(["ratio", "ours", "median", "least to most"], ratio_lines)]
        publish.page(options.publish, results, "Calls between processes", about, sections)
    results.finish(
        blocking_us=value("blocking"),
        blocking_one_cpu_us=value("blocking_one_cpu"),
        adaptive_us=value("adaptive"),
        polled_us=value("polled"),
        shared_1gib_us=value("shared_1gib"),
        copy_64k_us=value("copy_64k"),
        copy_64k_adaptive_us=value("copy_64k_adaptive"),
        rate_16=round(value("outstanding_16", "rate")),
        cpu_us_16=value("outstanding_16", "cpu_us"),
        rate_16_asleep=round(value("outstanding_16_asleep", "rate")),
        cpu_us_16_asleep=value("outstanding_16_asleep", "cpu_us"),
        # Without the right to a real-time class there is no such figure.
        loaded_p999_us=value("loaded", "p999_us"),
        loaded_p999_asleep_us=value("loaded_asleep", "p999_us"),
        loaded_p999_normal_us=value("loaded_normal", "p999_us"),
        order_10k_us=value("order_10k"),
        **{"edf_misses_at_0.9": round(statistics.mean(misses), 6) if misses else None},
        ratios={name: value for name, value in ratios.items() if value is not None},
        missing_peers=missing,
        cells=None if options.no_cells or options.earlier else cells(results, options),
    )


if __name__ == "__main__":
    run_bench(main)
