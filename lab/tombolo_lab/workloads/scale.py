"""What many ports, cells and addresses cost: start, memory, idle CPU and CPU per frame."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tombolo_lab import harness, machine
from tombolo_lab.workloads import Measure, Parameter, Skip, Workload, tools

SUBNET, SENDER, RECEIVER = "10.80.0.0/16", "10.80.0.1", "10.80.0.2"
ETHERTYPE_LOCAL = 0x88B5  # IEEE 802: for local experiments


@dataclass
class Fabric:
    """A fabric that is up, and what its start took."""

    fabric: object
    sender: object
    receiver: object
    start_s: float
    server: object


class Scale(Workload):
    """A fabric with many members, and traffic between two of them."""

    name = "scale"
    doc = (
        "Starts a fabric with many ports (listening Unix sockets), cells and learned addresses, "
        "and sends datagrams between two taps on it: time to start, memory, idle CPU, and CPU of "
        "the daemon per frame."
    )
    parameters = {
        "ports": Parameter(
            "Ports beside the two taps", int, low=0, high=254, default=0, setup=True
        ),
        "cells": Parameter("Cells that run idle", int, low=0, high=64, default=0, setup=True),
        "macs": Parameter(
            "Source addresses that are shown to the switch before", int, low=0, high=1_000_000,
            default=0, setup=True,
        ),
        "offered": Parameter("Offered rate as iperf takes it", str, default="20000pps"),
        "size": Parameter("Bytes of a datagram", int, low=16, high=1470, default=64, unit="B"),
        "seconds": Parameter("Duration of the load", float, low=0.2, high=600, default=1, unit="s"),
        "idle_s": Parameter("How long idle CPU is measured", float, low=0.1, high=600, default=1,
                            unit="s"),
    }  # fmt: skip
    measures = {
        "start_ms": Measure("Until the fabric answers and all cells have started", "ms", "lower"),
        "memory_mib": Measure("Resident memory of the daemon", "MiB", "lower"),
        "cells_mib": Measure("Resident memory of all cells' QEMUs", "MiB", "lower"),
        "idle_cpus": Measure("CPUs of daemon and cells when nothing happens", "CPUs", "lower"),
        "frames_s": Measure("Datagrams that arrived", "1/s", "higher"),
        "loss": Measure("Datagrams lost, as a part of those sent", "", "lower", 0, 1),
        "cpu_us_per_frame": Measure("CPU time of the daemon per datagram", "µs", "lower"),
    }
    opened = ("start_ms",)
    needs = ("root", "iperf 2", "QEMU for cells")

    def check(self, cell: dict) -> None:
        harness.need_root()
        harness.program()
        harness.need_program("iperf")
        if cell["cells"]:
            harness.need_program("qemu-system-x86_64", "qemu-system-x86")
            harness.need_cell("echo")
            need = cell["cells"] * 48
            free = free_mib()
            if free < need:
                raise Skip(f"{cell['cells']} cells need {need} MiB of memory, {free} are free")

    def setup_seconds(self, cell: dict) -> float:
        return 0.8 + cell["cells"] * 0.25 + cell["ports"] * 0.01 + cell["macs"] * 1e-5

    def seconds(self, cell: dict) -> float:
        return cell["seconds"] + cell["idle_s"] + 0.5

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[Fabric]:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(harness.scratch())
            sender, receiver = (stack.enter_context(harness.Namespace()) for _ in range(2))
            text = fabric_file(cell, folder, sender, receiver)
            fabric = stack.enter_context(harness.Fabric(folder, text))
            if cell["cells"]:

                def all_run() -> bool:
                    return len(fabric.machine_pids()) == cell["cells"]

                harness.until("all cells to run", all_run, 60 + cell["cells"])
            start_s = time.monotonic() - fabric.process.started
            for space in (sender, receiver):
                space.ip("link", "set", "tmb-lab", "up")
            show_addresses(sender, cell["macs"])
            server = stack.enter_context(
                harness.Process(["iperf", "-s", "-u"], name="iperf", netns=receiver)
            )
            harness.until("a reply across the fabric", lambda: sender.pings(RECEIVER), 30)
            yield Fabric(fabric, sender, receiver, start_s, server)

    def measure(self, setup: Fabric, cell: dict) -> dict:
        fabric = setup.fabric
        daemon = fabric.process.pid
        # Asked for once, so that asking is no part of what is measured.
        pids = [daemon, *fabric.machine_pids()]
        before, begun = cpu_ns(pids), time.monotonic()
        time.sleep(cell["idle_s"])
        idle = (cpu_ns(pids) - before) / 1e9 / (time.monotonic() - begun)
        used = machine.process_cpu_ns(daemon)
        flow = tools.iperf(
            setup.sender,
            RECEIVER,
            "udp",
            seconds=cell["seconds"],
            size=cell["size"],
            offered=cell["offered"],
        )
        used = machine.process_cpu_ns(daemon) - used
        arrived = flow.sent - flow.lost
        if not arrived:
            raise tools.ToolError(f"none of {flow.sent} datagrams arrived")
        cells = [harness.rss_bytes(pid) for pid in fabric.machine_pids()]
        return {
            "start_ms": setup.start_s * 1000,
            "memory_mib": harness.rss_bytes(daemon) / (1 << 20),
            "cells_mib": sum(cells) / (1 << 20) if cells else None,
            "idle_cpus": idle,
            "frames_s": arrived / cell["seconds"],
            "loss": flow.loss,
            "cpu_us_per_frame": used / 1000 / flow.sent,
        }


def cpu_ns(pids: Sequence[int]) -> int:
    """CPU time of processes together, in ns."""
    return sum(map(machine.process_cpu_ns, pids))


def free_mib() -> int:
    """Memory that programs can have, in MiB: MemAvailable of proc(5)."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) // 1024
    return 0


def fabric_file(cell: dict, folder: object, sender: object, receiver: object) -> str:
    """A fabric of two taps in namespaces, idle ports, and idle cells."""
    parts = [f'name = "lab"\n[network.lan]\nsubnet = "{SUBNET}"\ngateway = "10.80.255.254"\n']
    for name, space, address in (("a", sender, SENDER), ("b", receiver, RECEIVER)):
        parts.append(f'[tap.{name}]\ndevice = "tmb-lab"\nnetns = "{space}"\nip = "{address}"\n')
    for number in range(cell["ports"]):
        parts.append(f'[port.p{number}]\nkind = "stream"\nsocket = "{folder}/p{number}.sock"\n')
    for number in range(cell["cells"]):
        parts.append(f'[cell.c{number}]\napp = "echo"\n')
    return "".join(parts)


def show_addresses(space: object, count: int) -> None:
    """Sends one broadcast frame from each of `count` source addresses, at most 50,000 a second, so
    that the switch learns them."""
    if not count:
        return
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        with open(f"/run/netns/{space}") as there:
            _setns(there.fileno())
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
            raw.bind(("tmb-lab", 0))
            begun = time.monotonic()
            for number in range(count):
                source = struct.pack(">HI", 0x0200, number + 1)
                frame = b"\xff" * 6 + source + struct.pack(">H", ETHERTYPE_LOCAL) + bytes(46)
                raw.send(frame)
                if number % 500 == 499:
                    ahead = number / 50_000 - (time.monotonic() - begun)
                    if ahead > 0:
                        time.sleep(ahead)
    finally:
        _setns(before)
        os.close(before)


def _setns(fd: int) -> None:
    """setns(2) into a network namespace; os.setns is there from Python 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).setns(fd, 0x4000_0000):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
