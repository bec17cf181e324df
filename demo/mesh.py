#!/usr/bin/env python3
"""Many cells on one network over shared memory: each pings all others until every pair has answered.

usage: ./x mesh [CELLS]        (default 64; up to 200)

Starts a fabric of cells with the app `mesh`, each on an ivshmem link of its own, and prints when all have their addresses, when all pairs have
answered, what memory a cell takes, and what the whole costs when it is quiet. Needs no root. Exits 0 only if all pairs answered; everything
is torn down.
"""

import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from lib import Fabric, scratch, until  # noqa: E402
from lib.fabric import PROGRAM  # noqa: E402

PATIENCE_S = 240
QUIET_S = 10


def address(number):
    return f"10.79.1.{10 + number}"


def fabric_file(count):
    cells = "".join(f"""
[cell.c{number}]
app = "mesh"
attach = "ivshmem"
memory = "16M"
ip = "{address(number)}"
args = "peers={address(0)}-{address(count - 1)}"
""" for number in range(count))
    return f"""name = "mesh{os.getpid()}"

[network.lan]
subnet = "10.79.0.0/16"
""" + cells


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    if not 2 <= count <= 200:
        sys.exit(f"mesh: {count} cells were asked for; 2 to 200 are expected")
    if not PROGRAM.exists():
        sys.exit("mesh: target/release/tombolo is not built: run ./x build")
    with scratch() as folder:
        begun = time.monotonic()
        with Fabric(folder, fabric_file(count)) as fabric:
            def consoles():
                paths = {path.stem: path for path in (folder / "run").rglob("*.console")}
                return [paths[f"c{n}"].read_text(errors="replace") if f"c{n}" in paths else "" for n in range(count)]

            def all_say(what):
                return all(what(number) in text for number, text in enumerate(consoles()))

            until("every cell's address", lambda: all_say(address), PATIENCE_S, every=0.2)
            print(f"{count} cells have their addresses after {time.monotonic() - begun:.1f} s", flush=True)
            until("an answer from every cell to every cell", lambda: all_say(lambda _: "@mesh all"), PATIENCE_S, every=0.2)
            print(f"all {count * (count - 1)} ways answered after {time.monotonic() - begun:.1f} s", flush=True)
            pids = [machine["pid"] for machine in fabric.status()["machines"]]
            time.sleep(3)
            total = lambda: sum(map(cpu_seconds, [fabric.process.pid, *pids]))  # noqa: E731
            before, since = total(), time.monotonic()
            time.sleep(QUIET_S)
            share = 100 * (total() - before) / (time.monotonic() - since)
            print(f"quiet, all of it takes {share:.1f} % of one core; a cell's QEMU takes {sum(map(resident_mib, pids)) / count:.0f} MiB")
            fabric.cli("down", "--fabric", fabric.name, seconds=120)


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, TimeoutError) as error:
        sys.exit(f"mesh: {error}")
    except KeyboardInterrupt:
        sys.exit("mesh: stopped")
