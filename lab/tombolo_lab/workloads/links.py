"""Cells on IVSHMEM beside the same cells on virtio, and links between cells without a network.

Four workloads: `Links` (one cell by its kind of link), `Direct` (two cells on a link of their own),
`Restart` (the daemon is killed under traffic), `MeshOfCells` (all pairs of many cells).
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tombolo_lab import harness
from tombolo_lab.workloads import Measure, Parameter, Skip, Workload, tools
from tombolo_lab.workloads.scale import free_mib

PREFIX = "10.79"
HOST, CELL = f"{PREFIX}.0.1", f"{PREFIX}.0.10"
TAP = "tmb-bench"
KINDS = {"virtio": "vhost-user", "ivshmem": "ivshmem", "plain": "ivshmem-plain", "user": None}
OFFERED = {256: (5, 20), 1460: (20, 100)}
LOADS = (
    "ping", "tcp_up", "tcp_up_256", "tcp_up_1460", "tcp_down",
    *(f"udp_{way}_{size}_{rate}M" for way in ("up", "down") for size, rates in OFFERED.items()
      for rate in rates),
)  # fmt: skip
HEAD = f"""\
name = "bench"
[network.lan]
subnet = "{PREFIX}.0.0/16"
gateway = "{PREFIX}.255.254"
"""


def check_cells(*apps: str) -> None:
    """Skip where cells of these apps cannot run in a fabric here."""
    harness.need_root()
    harness.program()
    harness.need_program("qemu-system-x86_64", "qemu-system-x86")
    for app in apps:
        harness.need_cell(app)


@dataclass
class End:
    """A cell that serves iperf. `cpu` gives the CPU seconds so far of the daemon and QEMU."""

    space: object
    address: str
    cpu: Callable[[], float]


class Links(Workload):
    """One cell by its kind of link."""

    name = "links"
    doc = (
        "Pings and loads one cell from a tap on the same network, on each kind of link: virtio "
        "over vhost-user, ivshmem with doorbells, ivshmem polled, and QEMU's user networking, "
        "which has no switch, no pings and no datagrams from the cell."
    )
    parameters = {
        "kind": Parameter("Link of the cell", str, tuple(KINDS), default="virtio", setup=True),
        "load": Parameter(
            "ping: one each 10 ms; tcp_WAY with writes of 128 KiB or of so many bytes; "
            "udp_WAY_SIZE_RATE: datagrams at an offered rate. up: to the cell",
            str,
            LOADS,
            default="ping",
        ),
        "pings": Parameter("Pings", int, low=10, high=1_000_000, default=300),
        "seconds": Parameter("Duration of a load", float, low=0.2, high=600, default=2, unit="s"),
    }
    measures = {
        "mbit_s": Measure("Payload that arrived", "Mbit/s", "higher"),
        "loss": Measure("Datagrams lost, as a part of those sent", "", "lower", 0, 1),
        "cpus": Measure("CPUs that daemon and QEMU used", "CPUs", "lower"),
        "ping_us": Measure("Median round trip of a ping", "µs", "lower"),
        "ping_p99_us": Measure("Round trip that 1 % of the pings exceed", "µs", "lower"),
        "ping_lost": Measure("Pings without a reply", "", "lower"),
        "ping_cpu_us": Measure("CPU time of daemon and QEMU per ping", "µs", "lower"),
    }
    needs = ("root", "QEMU", "iperf 2")

    def check(self, cell: dict) -> None:
        check_cells("iperf")
        harness.need_program("iperf")
        if cell["kind"] == "user" and (cell["load"] == "ping" or "udp_down" in cell["load"]):
            raise Skip("QEMU's user networking passes no pings, and no datagrams to the host")

    def setup_seconds(self, cell: dict) -> float:
        return 2.5

    def seconds(self, cell: dict) -> float:
        if cell["load"] == "ping":
            return cell["pings"] * 0.011
        return cell["seconds"] * (2 if "udp_down" in cell["load"] else 1) + 0.5

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[End]:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(harness.scratch())
            space = stack.enter_context(harness.Namespace())
            if cell["kind"] == "user":
                ports = "hostfwd=tcp:127.0.0.1:5001-:5001,hostfwd=udp:127.0.0.1:5001-:5001"
                net = harness.Net.user(ports)
                words = {"append": "hostname=cell", "netns": space, "nice": harness.FIRST}
                guest = stack.enter_context(harness.CellGuest("iperf", net=net, **words))
                guest.wait_line(lambda line: "10.0.2." in line, 30)
                yield End(space, "127.0.0.1", guest.cpu_seconds)
                return
            text = HEAD + (
                f'[tap.host]\ndevice = "{TAP}"\nnetns = "{space}"\nip = "{HOST}"\n'
                f'[cell.iperf]\nip = "{CELL}"\naccel = "tcg"\nattach = "{KINDS[cell["kind"]]}"\n'
            )
            fabric = stack.enter_context(harness.fabric_of(folder, text))
            space.ip("link", "set", TAP, "up")
            harness.until("the cell's answer", lambda: space.pings(CELL), 60)
            yield End(space, CELL, fabric.cpu_meter())

    def measure(self, end: End, cell: dict) -> dict:
        found: dict = dict.fromkeys(self.measures)
        cpu = end.cpu()
        if cell["load"] == "ping":
            times = sorted(tools.ping(end.space, end.address, cell["pings"]))
            found["ping_us"] = times[len(times) // 2]
            found["ping_p99_us"] = times[int(len(times) * 0.99)]
            found["ping_lost"] = max(0, cell["pings"] - len(times))
            found["ping_cpu_us"] = (end.cpu() - cpu) * 1e6 / cell["pings"]
            return {**found, "samples": {"ping_us": times}}
        protocol, way, *more = cell["load"].split("_")
        size, offered = int(more[0]) if more else 0, more[1] if len(more) > 1 else ""
        is_down = way == "down"
        flow = tools.iperf(
            end.space, end.address, protocol, is_down, cell["seconds"], size, offered
        )
        found["mbit_s"], found["loss"] = flow.mbit_s, flow.loss
        # iperf sends datagrams up before those that come down: CPU is of both then, and of none.
        if protocol == "tcp" or not is_down:
            found["cpus"] = (end.cpu() - cpu) / cell["seconds"]
        return found


# ---- two cells on a link of their own ------------------------------------------------------------
# What the app control is told on both ends, and whether the link has no doorbells.
LOOPS = {"records": ("", False), "rings": ("what=doorbell", False), "polled": ("wait=spin", True)}
SWITCHED_PINGS = 500


def direct_file(words: str, is_plain: bool, periods: int) -> str:
    """A fabric file of two cells on a direct link."""
    cells = "".join(
        f'[cell.{role}]\napp = "control"\naccel = "tcg"\n'
        f'args = "role={role} link=loop count={periods} max_missed={periods} {words}"\n'
        for role in ("controller", "plant")
    )
    plain = str(is_plain).lower()
    return f'{HEAD}{cells}[link.loop]\nbetween = ["controller", "plant"]\nplain = {plain}\n'


SWITCHED = (
    HEAD
    + f"""\
[cell.controller]
app = "ping"
accel = "tcg"
attach = "ivshmem"
args = "host={PREFIX}.0.12 count={SWITCHED_PINGS} interval_ms=2"
[cell.plant]
app = "echo"
ip = "{PREFIX}.0.12"
accel = "tcg"
attach = "ivshmem"
"""
)


def said_by(fabric: object, name: str, pattern: str, seconds: float = 90) -> re.Match:
    """Waits until a cell's console has `pattern`; gives the match."""

    def found() -> re.Match | None:
        if not fabric.process.alive():
            raise tools.ToolError(f"tombolo ended:\n{fabric.process.tail()}")
        return re.search(pattern, fabric.console(name))

    return harness.until(f"what {name} says at its end", found, seconds, every=0.2)


class Direct(Workload):
    """Round trips between two cells on a link."""

    name = "direct"
    doc = (
        "Two cells on a direct link: a command and its reply each millisecond, with doorbells or "
        "polled, and doorbells alone; and for comparison pings through the switch."
    )
    parameters = {
        "loop": Parameter(
            "records: a command and a reply, sleeping in between; rings: doorbells there and back; "
            "polled: records on a link without doorbells; switched: pings between two cells on "
            "ivshmem with the switch between them",
            str,
            (*LOOPS, "switched"),
            default="records",
        ),
        "periods": Parameter("Round trips of a loop", int, low=100, high=1_000_000, default=3000),
    }
    measures = {
        "p50_us": Measure("Median round trip", "µs", "lower"),
        "max_us": Measure("Longest round trip", "µs", "lower"),
        "missed": Measure("Periods, or pings, without a reply", "", "lower"),
        "periods": Measure("Periods, or pings", "", ""),
    }
    needs = ("root", "QEMU")

    def check(self, cell: dict) -> None:
        check_cells(*(("ping", "echo") if cell["loop"] == "switched" else ("control",)))

    def seconds(self, cell: dict) -> float:
        return 2 + (SWITCHED_PINGS * 2 if cell["loop"] == "switched" else cell["periods"]) / 1000

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[Path]:
        with harness.scratch() as folder:
            yield folder

    def measure(self, folder: Path, cell: dict) -> dict:
        if cell["loop"] == "switched":
            with harness.fabric_of(folder, SWITCHED) as fabric:
                pattern = r"(\d+) sent, (\d+) received, .* median (\d+) us"
                sent, received, median = map(int, said_by(fabric, "controller", pattern).groups())
            return {"p50_us": median, "max_us": None, "missed": sent - received, "periods": sent}
        words, is_plain = LOOPS[cell["loop"]]
        text = direct_file(words, is_plain, cell["periods"])
        with harness.fabric_of(folder, text) as fabric:
            said = json.loads(said_by(fabric, "controller", r'\{"app":"control".*\}')[0])
        return {
            "p50_us": said["rtt_us"]["p50"],
            "max_us": said["rtt_us"].get("max"),
            "missed": said["missed"],
            "periods": said["periods"],
        }


# ---- the daemon is killed under traffic ----------------------------------------------------------
STREAM_BYTES = 10_000_000


def restarted_file(space: object) -> str:
    return HEAD + (
        f'[tap.host]\ndevice = "{TAP}"\nnetns = "{space}"\nip = "{HOST}"\n'
        f'[cell.server]\napp = "iperf"\nip = "{CELL}"\naccel = "tcg"\nattach = "ivshmem"\n'
        '[cell.client]\napp = "iperf"\naccel = "tcg"\nattach = "ivshmem"\n'
        f'args = "iperf=client host={CELL} time=3600"\n'
    )


def gap(replies: list[tuple[float, int]], killed: float) -> tuple[float, int]:
    """The pause around a moment in ms, and the pings lost in it, of (moment, number) of replies."""
    last = max(reply for reply in replies if reply[0] <= killed)
    later = [reply for reply in replies if reply[0] > killed and reply[1] > last[1] + 1]
    first = min(later, default=min(reply for reply in replies if reply[0] > killed))
    return 1000 * (first[0] - last[0]), first[1] - last[1] - 1


class Restart(Workload):
    """The daemon, which also serves the links, is killed under traffic and started again."""

    name = "restart"
    doc = (
        "Kills the daemon under pings of a cell, one each 5 ms, and under a TCP stream between two "
        "cells on ivshmem, and starts it again while the machines run on."
    )
    parameters = {
        "attachment": Parameter("Link of the cells", str, ("ivshmem",), default="ivshmem",
                                setup=True),
    }  # fmt: skip
    measures = {
        "pause_ms": Measure("Time without a reply", "ms", "lower"),
        "lost": Measure("Pings without a reply", "", "lower"),
        "daemon_ms": Measure("Until the new daemon answers status", "ms", "lower"),
        "stream": Measure("1 if the TCP stream continued", "", "higher", 0, 1),
    }
    needs = ("root", "QEMU")

    def check(self, cell: dict) -> None:
        check_cells("iperf")

    def seconds(self, cell: dict) -> float:
        return 4

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[tuple]:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(harness.scratch())
            space = stack.enter_context(harness.Namespace())
            fabric = stack.enter_context(harness.fabric_of(folder, restarted_file(space)))
            space.ip("link", "set", TAP, "up")
            harness.until("the cell's answer", lambda: space.pings(CELL), 60)
            yield fabric, space

    @staticmethod
    def streams(fabric: object) -> bool:
        """Whether the stream has passed data; counters restart with the daemon."""
        return fabric.port("server")["counters"]["tx_bytes"] > STREAM_BYTES

    def measure(self, setup: tuple, cell: dict) -> dict:
        fabric, space = setup
        harness.until("the stream between the cells", lambda: self.streams(fabric), 60)
        command = ["ping", "-n", "-D", "-i", "0.005", CELL]
        with harness.Process(command, netns=space) as pings:
            pings.wait_line(lambda line: "icmp_seq=100 " in line, 60)
            killed = time.time()
            fabric.kill()
            fabric.start()
            daemon_ms = (time.time() - killed) * 1000
            space.ip("link", "set", TAP, "up")
            harness.until("the cell's answer", lambda: space.pings(CELL), 60)
            pings.wait_line(lambda line: "time=" in line, 60, len(pings.lines))
            lines = [line for _, line in pings.lines]
        pattern = re.compile(r"\[([\d.]+)\] .* icmp_seq=(\d+) .*time=")
        replies = [(float(m[1]), int(m[2])) for m in map(pattern.match, lines) if m]
        pause_ms, lost = gap(replies, killed)
        stream = 1
        try:
            harness.until("the stream between the cells", lambda: self.streams(fabric), 30)
        except TimeoutError:
            stream = 0
        return {"pause_ms": pause_ms, "lost": lost, "daemon_ms": daemon_ms, "stream": stream}


# ---- many cells ----------------------------------------------------------------------------------
MESH_PATIENCE_S = 180


class MeshOfCells(Workload):
    """Cells on one network by doorbell links; each pings all others."""

    name = "mesh"
    doc = (
        "Starts cells on one network by doorbell links; each pings all others until all have "
        "answered, and then nothing happens for a while."
    )
    parameters = {
        "cells": Parameter("Cells", int, low=2, high=64, default=2, setup=True),
        "idle": Parameter("Whether idle CPU is measured, in 25 seconds", bool, default=True),
    }
    measures = {
        "ready_s": Measure("Until every cell has an address", "s", "lower"),
        "all_s": Measure("Until all pairs have answered", "s", "lower"),
        "all_reachable": Measure("1 if all pairs have answered", "", "higher", 0, 1),
        "rss_mib": Measure("Resident memory of a cell's QEMU", "MiB", "lower"),
        "idle_core_pct": Measure("CPU of daemon and all cells, in % of a core", "%", "lower"),
    }
    needs = ("root", "QEMU")

    def check(self, cell: dict) -> None:
        check_cells("mesh")
        need, free = cell["cells"] * 48, free_mib()
        if free < need:
            raise Skip(f"{cell['cells']} cells need {need} MiB of memory, {free} are free")

    def seconds(self, cell: dict) -> float:
        return 2 + cell["cells"] * 0.25 + 25 * cell["idle"]

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[Path]:
        with harness.scratch() as folder:
            yield folder

    def measure(self, folder: Path, cell: dict) -> dict:
        mesh = harness.Mesh("bench", cell["cells"], accel="tcg")
        with harness.fabric_of(folder, mesh.text) as fabric:
            ready = mesh.wait_addresses(fabric, MESH_PATIENCE_S)
            reachable = 1
            try:
                mesh.wait_answers(fabric, MESH_PATIENCE_S)
            except TimeoutError:
                reachable = 0
            everything = time.monotonic() - fabric.process.started
            idle = 100 * mesh.quiet_share(fabric) if cell["idle"] else None
            memory = mesh.rss_bytes(fabric) / (1 << 20)
            fabric.down(seconds=120)
        return {
            "ready_s": ready,
            "all_s": everything,
            "all_reachable": reachable,
            "rss_mib": memory,
            "idle_core_pct": idle,
        }
