"""Workloads of one guest on a network: what its link carries, by itself, beside other load on the
host, and by the settings of switch and guest.

`Network` measures one direction of TCP or UDP. `Stress` does so beside stress-ng. `Budget` and
`Tuning` are `Network` with other measures: what a poll turn carries, and the loss-free maximum.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from tombolo_lab import harness
from tombolo_lab.workloads import Measure, Parameter, Skip, Workload, endpoints, tools

TRAFFIC = {
    "protocol": Parameter("What is sent", str, ("tcp", "udp"), default="tcp"),
    "direction": Parameter(
        "up: from the host to the guest; down: from the guest to the host", str, ("up", "down"),
        default="up",
    ),
    "size": Parameter(
        "Bytes of a write or datagram; 0 is iperf's own (128 KiB, or 1,470)", int, low=0,
        high=1_000_000, default=0, unit="B",
    ),
    "offered": Parameter(
        "Offered rate as iperf takes it: 20M, 400pps; empty: as fast as TCP goes", str, default=""
    ),
    "seconds": Parameter("Duration of the load", float, low=0.2, high=600, default=2, unit="s"),
    "pings": Parameter("Whether the guest is pinged meanwhile", bool, default=False),
}  # fmt: skip
MEASURES = {
    "mbit_s": Measure("Payload that arrived", "Mbit/s", "higher"),
    "loss": Measure("Datagrams lost, as a part of those sent", "", "lower", 0, 1),
    "sent_s": Measure("Datagrams sent", "1/s", ""),
    "arrived_s": Measure("Datagrams that arrived", "1/s", "higher"),
    "jitter_ms": Measure("iperf's jitter", "ms", "lower"),
    "cpus": Measure("CPUs that daemon and QEMU used", "CPUs", "lower"),
    "cpu_us_per_kb": Measure("CPU time of daemon and QEMU per 1,000 B", "µs", "lower"),
    "rtt_us": Measure("Round trip of a ping during the load, median", "µs", "lower"),
    "frames_per_turn": Measure("Frames that the switch took from the port in a turn", "", ""),
    "port_frames_s": Measure("Frames through the guest's port, both ways", "1/s", ""),
    "wakeups_s": Measure(
        "Wake-ups of the port that the load comes from", "1/s", "lower"
    ),
}


class Network(Workload):
    """One guest, one direction of traffic."""

    name = "network"
    doc = (
        "Sends TCP or UDP between the host and one guest by iperf 2. The guest is a cell or the "
        "stock Linux guest, on any attachment; the host's end is a tap in a namespace."
    )
    parameters = {**endpoints.PARAMETERS, **TRAFFIC}
    measures = MEASURES
    needs = ("root", "QEMU", "iperf 2")

    def check(self, cell: dict) -> None:
        endpoints.check(cell, "iperf")
        harness.need_program("iperf")
        if cell["protocol"] == "udp" and not cell["offered"]:
            raise Skip("UDP needs an offered rate")
        if cell["attachment"] == "user" and cell["pings"]:
            raise Skip("QEMU's user networking forwards no pings")
        if cell["attachment"] == "user" and (cell["protocol"], cell["direction"]) == (
            "udp",
            "down",
        ):
            raise Skip("QEMU's user networking lets no datagrams of the guest's own reach the host")

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[endpoints.End]:
        with endpoints.guest(cell) as end:
            warm_up(end)
            yield end

    def setup_seconds(self, cell: dict) -> float:
        return 2.5 if cell["guest"] == "cell" else 15

    def seconds(self, cell: dict) -> float:
        both = cell["protocol"] == "udp" and cell["direction"] == "down"
        return cell["seconds"] * (2 if both else 1) + 0.5

    def measure(self, end: endpoints.End, cell: dict) -> dict:
        return loaded(end, cell)


def warm_up(end: endpoints.End, seconds: float = 20) -> None:
    """A first connection, which pays for ARP and routes. A Linux guest answers pings before its
    server listens, so it is tried again for a while."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            tools.iperf(end.space, end.address, "tcp", seconds=0.3)
            return
        except tools.ToolError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def loaded(end: endpoints.End, cell: dict, offered: str | None = None) -> dict:
    """One load, and everything that is counted meanwhile."""
    before = end.turns() if end.turns else None
    cpu, begun = end.cpu(), time.monotonic()
    with contextlib.ExitStack() as stack:
        times: list[float] = []
        if cell["pings"]:
            times = stack.enter_context(tools.pinging(end.space, end.address))
        flow = tools.iperf(
            end.space,
            end.address,
            cell["protocol"],
            cell["direction"] == "down",
            cell["seconds"],
            cell["size"],
            cell["offered"] if offered is None else offered,
        )
    took, used = time.monotonic() - begun, end.cpu() - cpu
    # iperf's -r sends up first, so there CPU and frames are of both directions, and of none alone.
    is_alone = (cell["protocol"], cell["direction"]) != ("udp", "down")
    found: dict = dict.fromkeys(MEASURES)
    found |= {"mbit_s": flow.mbit_s, "loss": flow.loss}
    if is_alone:
        found["cpus"] = used / took
        if flow.mbit_s:
            found["cpu_us_per_kb"] = used / cell["seconds"] * 1e6 / (flow.mbit_s * 125)
    if flow.sent is not None:
        found["sent_s"] = flow.sent / cell["seconds"]
        found["arrived_s"] = (flow.sent - flow.lost) / cell["seconds"]
        found["jitter_ms"] = flow.jitter_ms
    if before is not None and is_alone:
        found |= port_rates(before, end.turns(), cell["direction"] == "down", took)
    if cell["pings"]:
        if not times:
            raise tools.ToolError("no ping was answered during the load")
        found["rtt_us"] = sorted(times)[len(times) // 2]
        found["samples"] = {"rtt_us": times}
    return found


def port_rates(before: dict, after: dict, is_down: bool, seconds: float) -> dict:
    """What the counters of both ports say of the time between two looks.

    Turns and wake-ups are of the port that the switch takes the load from: the guest's when it
    sends, the host's otherwise. Frames are those through the guest's port.
    """
    source = "guest" if is_down else "host"

    def change(port: str, name: str) -> int:
        return after[port][name] - before[port][name]

    turns, frames = change(source, "turns"), change("guest", "rx_frames")
    return {
        "frames_per_turn": change(source, "rx_frames") / turns if turns else 0.0,
        "port_frames_s": (frames + change("guest", "tx_frames")) / seconds,
        "wakeups_s": change(source, "wakeups") / seconds,
    }


class Stress(Network):
    """The same beside load on the host."""

    name = "stress"
    doc = (
        "Sends TCP or UDP between the host and one guest while stress-ng loads the host's CPUs, "
        "memory, loopback network and disk."
    )
    parameters = {
        **Network.parameters,
        **{
            kind: Parameter(f"Whether stress-ng loads the host: {what}", bool, default=False)
            for kind, what in (
                ("cpu", "two workers of matrix products"),
                ("memory", "one worker that writes and checks 128 MiB"),
                ("network", "a pair of UDP processes on loopback"),
                ("disk", "one worker that writes and reads files of 32 MiB"),
            )
        },
    }
    needs = ("root", "QEMU", "iperf 2", "stress-ng")

    def check(self, cell: dict) -> None:
        super().check(cell)
        harness.need_program("stress-ng")

    def measure(self, end: endpoints.End, cell: dict) -> dict:
        kinds = [kind for kind in tools.STRESSORS if cell[kind]]
        limit = 3 * self.seconds(cell) + 30
        with harness.scratch() as folder, tools.stressing(kinds, folder, limit):
            # Its workers need a moment to start.
            time.sleep(0.3 if kinds else 0)
            return loaded(end, cell)


class Budget(Network):
    """Poll budgets: what a turn carries."""

    name = "budget"
    doc = (
        "Offers TCP or UDP to a guest with a given poll budget in the switch, in a cell or in a "
        "Linux guest's kernel (net.core.netdev_budget, dev_weight), and finds the highest rate "
        "without loss by halving (RFC 2544, 26.1)."
    )
    parameters = {
        **Network.parameters,
        "search": Parameter("Whether the loss-free maximum is searched for", bool, default=False),
        "search_top": Parameter(
            "Upper end of that search", float, low=1, high=100_000, default=400, unit="Mbit/s"
        ),
        "search_steps": Parameter("Halvings of that search", int, low=1, high=20, default=6),
    }
    measures = {
        **MEASURES,
        "loss_free_mbit_s": Measure("Highest offered rate without loss", "Mbit/s", "higher"),
    }

    def seconds(self, cell: dict) -> float:
        one = super().seconds(cell)
        return one * (1 + cell["search_steps"] * cell["search"])

    def measure(self, end: endpoints.End, cell: dict) -> dict:
        found = {**loaded(end, cell), "loss_free_mbit_s": None}
        if cell["search"]:
            found["loss_free_mbit_s"] = self.loss_free(end, cell)
        return found

    @staticmethod
    def loss_free(end: endpoints.End, cell: dict) -> float:
        """The highest offered rate at which no datagram was lost, in Mbit/s; 0 where even the
        lowest that was tried lost some."""
        low, high = 0.0, cell["search_top"]
        trial = {**cell, "protocol": "udp", "pings": False}
        for _ in range(cell["search_steps"]):
            middle = (low + high) / 2
            if loaded(end, trial, f"{middle:.3f}M")["loss"] == 0:
                low = middle
            else:
                high = middle
        return low


class Tuning(Network):
    """Settings of switch, cell and device."""

    name = "tuning"
    doc = (
        "Sends TCP or UDP between the host and one guest by the settings of the switch (budget, "
        "busy polling), of the device (queues, size of the rings) and of the cell (budget)."
    )
