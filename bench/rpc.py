#!/usr/bin/env python3
"""Calls with deadlines, beside a futex and a Unix socket between the same two processes.

usage: ./x bench rpc [--repeats N] [--calls N]

Runs crates/rpc/examples/rpc_bench.rs, which interleaves all rows in each repeat, and crates/rpc/examples/misses.rs (deadlines missed, on a
virtual clock). The table has the medians over the repeats. Times are round trips in us, p50 unless named otherwise; cpu is of both
processes, per call; "blocking" means that both ends sleep at once. Ratios are ours divided by the peer's: below 1 we are faster.

Peers with RPC semantics of their own (iceoryx2, Cap'n Proto, gRPC, zenoh) are not in this run yet.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict

from common import FIRST, ROOT, BenchError, Results, note, ratio, terminate_cleanly

EXAMPLES = ROOT / "target/release/examples"


def lines(command, env=None):
    """The JSON objects that a program prints, as they come."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        for line in process.stdout:
            yield json.loads(line)
        if process.wait():
            raise BenchError(f"{command[0]} ended with {process.returncode}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20000)
    options = parser.parse_args()
    terminate_cleanly()
    subprocess.run(["cargo", "build", "--release", "--quiet", "-p", "tombolo-rpc", "--examples"], cwd=ROOT, check=True)
    if os.geteuid() == 0:
        os.setpriority(os.PRIO_PROCESS, 0, FIRST)
    results = Results("rpc")
    values = defaultdict(lambda: defaultdict(list))
    for row in lines([str(EXAMPLES / "rpc_bench"), "--repeats", str(options.repeats), "--calls", str(options.calls)]):
        results.add(**row)
        for key, value in row.items():
            if key != "row" and value is not None:
                values[row["row"]][key].append(value)
        note(", ".join(f"{key} {value}" for key, value in row.items()))
    medians = {name: {key: statistics.median(of) for key, of in row.items()} for name, row in values.items()}
    print(f"{'row':24}{'p50 us':>10}{'p99 us':>10}{'p99.9 us':>10}{'calls/s':>12}{'cpu us':>9}   (medians of {options.repeats})")
    for name, row in medians.items():
        cells = [row.get("p50_us", 0), row.get("p99_us", 0), row.get("p999_us", 0)]
        print(f"{name:24}" + "".join(f"{cell:10.2f}" for cell in cells) + f"{row.get('rate', 0):12.0f}{row.get('cpu_us', 0):9.2f}")
    misses = {row["load"]: row for row in lines([str(EXAMPLES / "misses")])}
    loaded = medians.get("loaded")
    p50 = {name: row.get("p50_us") for name, row in medians.items()}
    results.finish(
        blocking_us=p50["blocking"],
        blocking_one_cpu_us=p50["blocking_one_cpu"],
        adaptive_us=p50["adaptive"],
        polled_us=p50["polled"],
        shared_1gib_us=p50["shared_1gib"],
        copy_64k_us=p50["copy_64k"],
        rate_16=round(medians["outstanding_16"]["rate"]),
        cpu_us_16=medians["outstanding_16"].get("cpu_us"),
        # Without the right to a real-time class there is no such figure.
        loaded_p999_us=loaded["p999_us"] if loaded else None,
        order_10k_us=p50["order_10k"],
        **{"edf_misses_at_0.9": misses[0.9]["edf"]},
        ratios={
            "futex_blocking": ratio(p50["blocking"], p50["futex_blocking"]),
            "unix_blocking": ratio(p50["blocking"], p50["unix_blocking"]),
            "futex_one_cpu": ratio(p50["blocking_one_cpu"], p50["futex_one_cpu"]),
            "unix_one_cpu": ratio(p50["blocking_one_cpu"], p50["unix_one_cpu"]),
        },
    )


if __name__ == "__main__":
    try:
        main()
    except (BenchError, TimeoutError, subprocess.CalledProcessError) as error:
        sys.exit(f"bench rpc: {error}")
    except KeyboardInterrupt:
        sys.exit("bench rpc: stopped")
