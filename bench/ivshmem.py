#!/usr/bin/env python3
"""Cells on IVSHMEM beside the same cells on virtio over vhost-user, and on QEMU's user networking.

usage: ./x bench ivshmem [--repeats N] [--cells 2,8,32,64] [--seconds S] [--only links|direct|restart|mesh]

Four parts, each interleaved within each repeat:

links    one cell (the app iperf) on microvm, in turn on each kind of link: `virtio` (vhost-user), `ivshmem` (doorbell), `plain`
         (ivshmem-plain, polled), `user` (QEMU's own user networking, no switch: reached by forwarded ports, so without ping and
         UDP downwards). Measured from a tap on the same network, with ping and stock iperf 2:
             ping_us, ping_p99_us     ICMP echo, one each 10 ms; ping_cpu_us: CPU for each
             tcp_up, tcp_down         Mbit/s, writes of 128 KiB, and of 256 and 1,460 bytes upwards
             udp_up_256, …            received Mbit/s and loss in % at each offered rate
             cpu_up, cpu_down         seconds of CPU, ours and QEMU's together, per second of the TCP stream upwards and downwards
direct   two cells (the app control) on a direct link: a command and a reply each millisecond with doorbells (`records`) and
         polled without sleeping (`polled`), and doorbells alone there and back (`rings`); times of round trips. For comparison
         two cells on doorbell links with the switch between them, one pinging the other (`switched`)
restart  the daemon, which also serves the links, is killed under traffic and restarted at once, while the machines run on:
             pause_ms, lost           the time without a reply to pings of a cell, one each 5 ms, and how many got no reply
             daemon_ms                of that, until the new daemon answers `tombolo status`
             stream                   whether a TCP stream between two cells on ivshmem continued afterwards
mesh     N cells on one network by doorbell links: each pings all others until all have answered
             ready_s                  from `tombolo up` until every cell has an address; all_s: until all pairs have answered
             rss_mib, idle_core_pct   memory of each QEMU; CPU of daemon and all QEMUs in 10 seconds after 15 quiet ones, in % of a core

Ratios are ivshmem's divided by virtio's: ping_vs_virtio for times (less is better), tcp_vs_virtio for rates. Needs root.
"""

import argparse
import json
import re
import statistics
import time

from common import FIRST, BenchError, Process, Results, fabric_of, note, private_folder, ratio, run_bench, until
from lib import CellGuest, Namespace, Net
from lib.mesh import Mesh

PREFIX = "10.79"
HOST = f"{PREFIX}.0.1"
TAP = "tmb-bench"
KINDS = {"virtio": "vhost-user", "ivshmem": "ivshmem", "plain": "ivshmem-plain", "user": None}
# Offered rates of datagrams, in Mbit/s of payload, by the datagram's length.
OFFERED = {256: (5, 20), 1460: (20, 100)}
PERIODS = 3000
MESH_PATIENCE_S = 180


HEAD = """\
name = "bench"
[network.lan]
subnet = "{prefix}.0.0/16"
gateway = "{prefix}.255.254"
"""


def file_of_link(kind, space):
    return HEAD.format(prefix=PREFIX) + f"""
[tap.host]
device = "{TAP}"
netns = "{space}"
ip = "{HOST}"
[cell.iperf]
ip = "{PREFIX}.0.10"
accel = "tcg"
attach = "{KINDS[kind]}"
"""


def rates(text):
    """Mbit/s, and loss in % where the report has it, of the last report line of stock iperf's output."""
    found = re.findall(r"([\d.]+) ([KMG]?)bits/sec(?:.*?\(([\d.e+-]+)%\))?", text)
    if not found:
        raise BenchError(f"no rate in iperf's report:\n{text}")
    rate, unit, loss = found[-1]
    return float(rate) * {"": 1e-6, "K": 1e-3, "M": 1, "G": 1e3}[unit], float(loss) if loss else None


def iperf(space, address, *words, seconds):
    """One run of stock iperf's client."""
    return space.run("iperf", "-c", address, "-f", "m", *words, seconds=seconds + 40).stdout


def measure_link(space, address, options, cpu, user=False):
    row = {}
    if not user:
        before = cpu()
        pings = space.run("ping", "-n", "-i", "0.01", "-c", options.pings, address, seconds=60, check=False).stdout
        times = sorted(float(value) * 1000 for value in re.findall(r"time=([\d.]+) ms", pings))
        if not times:
            raise BenchError(f"no echo reply came:\n{pings}")
        row["ping_us"], row["ping_p99_us"] = statistics.median(times), times[int(len(times) * 0.99)]
        row["ping_lost"] = options.pings - len(times)
        row["ping_cpu_us"] = (cpu() - before) * 1e6 / options.pings
    seconds = options.seconds
    before = cpu()
    row["tcp_up"] = rates(iperf(space, address, "-t", seconds, seconds=seconds))[0]
    row["cpu_up"] = (cpu() - before) / seconds
    for length in OFFERED:
        row[f"tcp_up_{length}"] = rates(iperf(space, address, "-t", seconds, "-l", length, seconds=seconds))[0]
    before = cpu()
    row["tcp_down"] = rates(iperf(space, address, "-t", seconds, "-R", seconds=seconds))[0]
    row["cpu_down"] = (cpu() - before) / seconds
    for length, offered in OFFERED.items():
        for rate in offered:
            both = ("-r",) if not user else ()
            text = iperf(space, address, "-u", "-l", length, "-b", f"{rate}M", "-t", seconds, *both, seconds=2 * seconds)
            # The server's report comes for what went up; with -r another report of our own for what came down.
            reports = re.findall(r"[^\n]*\([\d.e+-]+%\)[^\n]*", text)
            if not reports:
                raise BenchError(f"no server report in iperf's output:\n{text}")
            for way, report in zip(("up", "down"), reports):
                row[f"udp_{way}_{length}_{rate}M"], row[f"udp_{way}_{length}_{rate}M_loss"] = rates(report)
    return row


def part_links(results, space, folder, options):
    for repeat in range(options.repeats):
        for kind in KINDS:
            if kind == "user":
                net = Net.user("hostfwd=tcp:127.0.0.1:5001-:5001,hostfwd=udp:127.0.0.1:5001-:5001")
                with CellGuest("iperf", net=net, append="hostname=cell", netns=space, nice=FIRST) as guest:
                    guest.wait_line(lambda line: "10.0.2." in line, 30)
                    row = measure_link(space, "127.0.0.1", options, guest.cpu_seconds, user=True)
            else:
                with fabric_of(folder, file_of_link(kind, space)) as fabric:
                    address = f"{PREFIX}.0.10"
                    space.ip("link", "set", TAP, "up")
                    until("the cell's answer", lambda: space.pings(address), 60)
                    row = measure_link(space, address, options, fabric.cpu_meter())
            results.add(part="links", kind=kind, repeat=repeat, **row)
            note(f"{repeat + 1}/{options.repeats} {kind:8}" + ", ".join(f"{key} {value:.1f}" for key, value in row.items() if value is not None and not key.endswith("_loss")))


# What the app control is told on both ends, and whether the link has no doorbells.
LOOPS = {
    "records": ("", False),                             # a command and a reply each millisecond, sleeping in between
    "rings": ("what=doorbell", False),                  # a bare doorbell there and back, as fast as it goes
    "polled": ("wait=spin", True),                      # as records, on a link without doorbells
}


def file_of_direct(words, plain):
    return HEAD.format(prefix=PREFIX) + "".join(f"""
[cell.{role}]
app = "control"
accel = "tcg"
args = "role={role} link=loop count={PERIODS} max_missed={PERIODS} {words}"
""" for role in ("controller", "plant")) + f"""
[link.loop]
between = ["controller", "plant"]
plain = {str(plain).lower()}
"""


SWITCHED = HEAD.format(prefix=PREFIX) + f"""
[cell.controller]
app = "ping"
accel = "tcg"
attach = "ivshmem"
args = "host={PREFIX}.0.12 count=500 interval_ms=2"
[cell.plant]
app = "echo"
ip = "{PREFIX}.0.12"
accel = "tcg"
attach = "ivshmem"
"""


def said_by(fabric, cell, pattern, seconds=90):
    """Waits until a cell's console has `pattern`; gives the match."""
    def found():
        if not fabric.process.alive():
            raise BenchError(f"tombolo ended:\n{fabric.process.tail()}")
        return re.search(pattern, fabric.console(cell))

    return until(f"what {cell} says at its end", found, seconds, every=0.2)


def part_direct(results, space, folder, options):
    for repeat in range(options.repeats):
        with fabric_of(folder, SWITCHED) as fabric:
            said = said_by(fabric, "controller", r"(\d+) sent, (\d+) received, .* median (\d+) us")
            row = {"p50_us": int(said[3]), "missed": int(said[1]) - int(said[2]), "periods": int(said[1])}
            results.add(part="direct", kind="switched", repeat=repeat, **row)
            note(f"{repeat + 1}/{options.repeats} direct switched: {row}")
        for kind, (words, plain) in LOOPS.items():
            with fabric_of(folder, file_of_direct(words, plain)) as fabric:
                said = json.loads(said_by(fabric, "controller", r'\{"app":"control".*\}')[0])
            row = {f"{name}_us": value for name, value in said["rtt_us"].items()} | {"missed": said["missed"], "periods": said["periods"]}
            results.add(part="direct", kind=kind, repeat=repeat, **row)
            note(f"{repeat + 1}/{options.repeats} direct {kind}: {row}")


RESTARTED = HEAD.format(prefix=PREFIX) + """
[tap.host]
device = "{tap}"
netns = "{space}"
ip = "{host}"
[cell.server]
app = "iperf"
ip = "{cell}"
accel = "tcg"
attach = "ivshmem"
[cell.client]
app = "iperf"
accel = "tcg"
attach = "ivshmem"
args = "iperf=client host={cell} time=3600"
"""
STREAM_BYTES = 10_000_000


def part_restart(results, space, folder, options):
    address = f"{PREFIX}.0.10"

    def streams(fabric):
        # Counters restart with the daemon.
        return lambda: fabric.port("server")["counters"]["tx_bytes"] > STREAM_BYTES

    with fabric_of(folder, RESTARTED.format(tap=TAP, space=space, host=HOST, cell=address)) as fabric:
        space.ip("link", "set", TAP, "up")
        until("the cell's answer", lambda: space.pings(address), 60)
        for repeat in range(options.repeats):
            until("the stream between the cells", streams(fabric), 60)
            with Process(["ping", "-n", "-D", "-i", "0.005", address], netns=space) as pings:
                pings.wait_line(lambda line: "icmp_seq=100 " in line, 60)
                killed = time.time()
                fabric.kill()
                fabric.start()
                daemon_ms = (time.time() - killed) * 1000
                space.ip("link", "set", TAP, "up")
                until("the cell's answer", lambda: space.pings(address), 60)
                since = len(pings.lines)
                pings.wait_line(lambda line: "time=" in line, 60, since)
                replies = [re.match(r"\[([\d.]+)\] .* icmp_seq=(\d+) .*time=", line) for _, line in pings.lines]
            replies = [(float(found[1]), int(found[2])) for found in replies if found]
            last = max(reply for reply in replies if reply[0] <= killed)
            first = min(reply for reply in replies if reply[0] > killed and reply[1] > last[1] + 1)
            stream = True
            try:
                until("the stream between the cells", streams(fabric), 30)
            except TimeoutError:
                stream = False
            row = {"pause_ms": 1000 * (first[0] - last[0]), "lost": first[1] - last[1] - 1, "daemon_ms": daemon_ms, "stream": stream}
            results.add(part="restart", repeat=repeat, **row)
            note(f"{repeat + 1}/{options.repeats} restart: {row}")


def part_mesh(results, space, folder, options):
    for count in options.cells:
        mesh = Mesh("bench", count, accel="tcg")
        with fabric_of(folder, mesh.text) as fabric:
            ready = mesh.wait_addresses(fabric, MESH_PATIENCE_S)
            reachable = True
            try:
                mesh.wait_answers(fabric, MESH_PATIENCE_S)
            except TimeoutError:
                reachable = False
            everything = time.monotonic() - fabric.process.started
            idle, rss = 100 * mesh.quiet_share(fabric), mesh.rss_bytes(fabric) / (1 << 20)
            fabric.down(seconds=120)
        row = {"ready_s": ready, "all_s": everything, "all_reachable": reachable, "rss_mib": rss, "idle_core_pct": idle}
        results.add(part="mesh", cells=count, **row)
        note(f"mesh of {count}: " + ", ".join(f"{key} {value}" if isinstance(value, bool) else f"{key} {value:.1f}" for key, value in row.items()))


def table(results, options):
    rows = [row for row in results.rows if row["part"] == "links"]
    if rows:
        keys = list(dict.fromkeys(key for row in rows for key in row if key not in ("part", "kind", "repeat")))
        print(f"{'':24}" + "".join(f"{kind:>10}" for kind in KINDS) + f"   (medians of {options.repeats})")
        for key in keys:
            values = [results.median(key, part="links", kind=kind) for kind in KINDS]
            print(f"{key:24}" + "".join(f"{value:10.1f}" if value is not None else f"{'-':>10}" for value in values))
    for row in results.rows:
        if row["part"] != "links":
            print(" ".join(f"{key}={value:.1f}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()))


PARTS = {"links": part_links, "direct": part_direct, "restart": part_restart, "mesh": part_mesh}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--pings", type=int, default=300)
    parser.add_argument("--cells", type=lambda text: [int(n) for n in text.split(",")], default=[2, 8, 32, 64])
    parser.add_argument("--only", choices=tuple(PARTS))
    options = parser.parse_args()
    results = Results("ivshmem")
    with Namespace() as space, private_folder() as folder:
        for name, part in PARTS.items():
            if options.only in (None, name):
                part(results, space, folder, options)
    table(results, options)
    summary = {}
    if options.only in (None, "links"):
        of = lambda key, kind: results.median(key, part="links", kind=kind)  # noqa: E731
        summary["ratios"] = {
            "ping_vs_virtio": ratio(of("ping_us", "ivshmem"), of("ping_us", "virtio")),
            "tcp_vs_virtio": ratio(of("tcp_up", "ivshmem"), of("tcp_up", "virtio")),
            "tcp_down_vs_virtio": ratio(of("tcp_down", "ivshmem"), of("tcp_down", "virtio")),
            "ping_plain_vs_virtio": ratio(of("ping_us", "plain"), of("ping_us", "virtio")),
            "tcp_vs_user": ratio(of("tcp_up", "ivshmem"), of("tcp_up", "user")),
        }
    if options.only in (None, "direct"):
        summary["direct_link_rtt_us"] = results.median("p50_us", part="direct", kind="records")
        summary["direct_link_doorbell_us"] = results.median("p50_us", part="direct", kind="rings")
        summary["direct_link_polled_rtt_us"] = results.median("p50_us", part="direct", kind="polled")
        summary["switched_link_rtt_us"] = results.median("p50_us", part="direct", kind="switched")
    if options.only in (None, "restart"):
        rows = [row for row in results.rows if row["part"] == "restart"]
        summary |= {"restart_pause_ms": round(results.median("pause_ms", part="restart")), "stream_goes_on": all(row["stream"] for row in rows)}
    if options.only in (None, "mesh"):
        largest = max(options.cells)
        row = next(row for row in results.rows if row["part"] == "mesh" and row["cells"] == largest)
        summary |= {"cells": largest, "all_reachable": row["all_reachable"], "ready_s": round(row["ready_s"], 1),
                    "all_s": round(row["all_s"], 1), "rss_mib": round(row["rss_mib"], 1), "idle_core_pct": round(row["idle_core_pct"], 1)}
    results.finish(**summary)


if __name__ == "__main__":
    run_bench(main)
