"""Workloads of one guest on a network: what its link carries, by itself, beside other load on the
host, and by the settings of switch and guest.

The load is that of iperf 2, or the paced one of paced.c: at an exact rate, one way to the guest's
iperf server, or with `echo` to a guest that sends everything back, so that every datagram and write
has its round trip. To a namespace of this host it may be that of iperf 3 or sockperf too.

`Network` measures one direction of TCP or UDP. `Stress` does so beside stress-ng. `Budget` and
`Tuning` are `Network` with other measures: what a poll turn carries, and the loss-free maximum.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from tombolo_lab import harness, machine
from tombolo_lab.workloads import (
    HISTOGRAMS,
    SAMPLES_OF,
    Measure,
    Parameter,
    Skip,
    Workload,
    endpoints,
    paced,
    tools,
)

TRAFFIC = {
    "tool": Parameter(
        "What sends: iperf 2, paced.c, iperf 3, or sockperf, whose messages come back", str,
        ("iperf", "paced", "iperf3", "sockperf"), default="iperf", setup=True,
    ),
    "echo": Parameter(
        "Whether the guest sends everything back (paced)", bool, default=False, setup=True
    ),
    "protocol": Parameter("What is sent", str, ("tcp", "udp"), default="tcp"),
    "direction": Parameter(
        "up: from the host to the guest; down: from the guest to the host", str, ("up", "down"),
        default="up",
    ),
    "size": Parameter(
        "Bytes of a write or datagram; 0 is iperf's own (128 KiB, or 1,470) or paced's (65,500, or "
        "1,470)", int, low=0, high=1_000_000, default=0, unit="B",
    ),
    "offered": Parameter(
        "Offered rate: 20M (bits a second of payload) or 400pps; empty: as fast as it goes, which "
        "iperf does with TCP only", str, default="",
    ),
    "seconds": Parameter("Duration of the load", float, low=0.2, high=600, default=2, unit="s"),
    "pings": Parameter("Whether the guest is pinged meanwhile", bool, default=False),
}  # fmt: skip
MEASURES = {
    "mbit_s": Measure(
        "Payload that arrived; of a stream of iperf 2 what its sender handed over", "Mbit/s",
        "higher",
    ),
    "loss": Measure("Datagrams lost, as a part of those sent", "", "lower", 0, 1),
    "sent_s": Measure("Datagrams sent", "1/s", ""),
    "arrived_s": Measure("Datagrams that arrived", "1/s", "higher"),
    "jitter_ms": Measure("Jitter (RFC 3550)", "ms", "lower"),
    "out_of_order": Measure("Datagrams behind one with a higher number (paced)", "", "lower"),
    "duplicates": Measure("Datagrams that came twice (echo)", "", "lower"),
    "retransmitted": Measure("TCP segments that the host sent again (paced)", "", "lower"),
    "unsent": Measure(
        "Part of the offered load that the sender was too slow for (paced)", "", "lower", 0, 1
    ),
    "late_us": Measure("Greatest lateness of the sender (paced)", "µs", "lower"),
    "cpus": Measure("CPUs that daemon and QEMU used", "CPUs", "lower"),
    "cpu_us_per_kb": Measure("CPU time of daemon and QEMU per 1,000 B", "µs", "lower"),
    "softirq_cpus": Measure("CPUs of the host's softirqs", "CPUs", "lower"),
    "host_interrupts_s": Measure("Interrupts of the host", "1/s", "lower"),
    "cycles_per_frame": Measure(
        "Cycles of daemon and guest per frame through the port, where the CPU counts", "", "lower"
    ),
    "instructions_per_frame": Measure("… the same for instructions", "", "lower"),
    "rtt_us": Measure(
        "Round trip, median: of pings during the load, or of the load itself (echo)", "µs", "lower"
    ),
    "rtt_p99_us": Measure("… its 99th percentile, of 100 and more", "µs", "lower"),
    "rtt_p999_us": Measure("… its 99.9th percentile, of 1,000 and more", "µs", "lower"),
    "rtt_p9999_us": Measure("… its 99.99th percentile, of 10,000 and more", "µs", "lower"),
    "frames_per_turn": Measure("Frames that the switch took from the port in a turn", "", ""),
    "port_frames_s": Measure("Frames through the guest's port, both ways", "1/s", ""),
    "wakeups_s": Measure("Wake-ups of the port that the load comes from", "1/s", "lower"),
}


class Network(Workload):
    """One guest, one direction of traffic."""

    name = "network"
    doc = (
        "Sends TCP or UDP between the host and one guest by iperf 2 or the paced generator. The "
        "guest is a cell or the stock Linux guest, on any attachment; the host's end is a tap in a "
        "namespace."
    )
    parameters = {**endpoints.PARAMETERS, **TRAFFIC}
    measures = MEASURES
    needs = ("root", "QEMU", "iperf 2")

    def check(self, cell: dict) -> None:
        endpoints.check(cell, app_of(cell))
        for program in PROGRAMS[cell["tool"]]:
            harness.need_program(program)
        if cell["tool"] in ("iperf3", "sockperf"):
            check_other(cell)
        if cell["tool"] == "paced":
            check_paced(cell)
        elif cell["echo"]:
            raise Skip("iperf 2 reads no echo: only paced does")
        elif cell["protocol"] == "udp" and not cell["offered"] and cell["tool"] != "sockperf":
            raise Skip("UDP by iperf needs an offered rate")
        if cell["offered"]:
            paced.rate_of(cell["offered"], 1)
        if cell["attachment"] == "user" and cell["pings"]:
            raise Skip("QEMU's user networking forwards no pings")
        if cell["attachment"] == "user" and (cell["protocol"], cell["direction"]) == (
            "udp",
            "down",
        ):
            raise Skip("QEMU's user networking lets no datagrams of the guest's own reach the host")

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[endpoints.End]:
        if cell["guest"] == "namespace":
            with endpoints.namespace(cell, servers(cell["tool"])) as end:
                if cell["tool"] in ("iperf", "paced"):
                    warm_up(end)
                yield end
            return
        with endpoints.guest(cell, app_of(cell)) as end:
            warm_up(end, cell["echo"])
            yield end

    def setup_seconds(self, cell: dict) -> float:
        return {"cell": 2.5, "linux": 15.0, "namespace": 1.0}[cell["guest"]]

    def seconds(self, cell: dict) -> float:
        both = cell["protocol"] == "udp" and cell["direction"] == "down"
        return load_seconds(cell) * (2 if both else 1) + 0.5

    def measure(self, end: endpoints.End, cell: dict) -> dict:
        return loaded(end, cell)


def app_of(cell: dict) -> str:
    """The cell's app."""
    return "echo" if cell["echo"] else "iperf"


# The client and the server of each tool.
PROGRAMS = {
    "iperf": ("iperf",), "paced": ("iperf",), "iperf3": ("iperf3",), "sockperf": ("sockperf",)
}  # fmt: skip


def servers(tool: str) -> list[list[object]]:
    """Commands of a tool's servers, in a namespace."""
    if tool == "iperf":
        return [["iperf", "-s"], ["iperf", "-s", "-u"]]
    if tool == "paced":
        return [[paced.program(), "sink", kind, paced.IPERF_PORT] for kind in ("tcp", "udp")]
    if tool == "iperf3":
        return [["iperf3", "-s"]]
    words = ["sockperf", "server", "-i", "{address}", "-p", tools.SOCKPERF_PORT]
    return [words, [*words, "--tcp"]]


def check_other(cell: dict) -> None:
    """Skip where iperf 3 and sockperf have no server, or no such load."""
    if cell["guest"] != "namespace":
        raise Skip(f'{cell["tool"]} has a server in a namespace only (guest = "namespace")')
    if cell["tool"] == "sockperf" and cell["direction"] == "down":
        raise Skip("sockperf's messages come back: only up is run")


def check_paced(cell: dict) -> None:
    """Skip where the paced generator has no such load."""
    size = cell["size"] or paced.BYTES[cell["protocol"]]
    paced.check(cell["protocol"], size, cell["offered"], cell["seconds"])
    if cell["direction"] == "down":
        raise Skip("paced sends from the host to the guest only")
    if cell["echo"] and cell["guest"] != "cell":
        raise Skip(f'only a cell has an echo server here, not guest = "{cell["guest"]}"')
    if cell["echo"] and cell["attachment"] == "user":
        raise Skip("QEMU's user networking forwards no echo here")


def warm_up(end: endpoints.End, echo: bool = False, seconds: float = 20) -> None:
    """A first connection, which pays for ARP and routes. A Linux guest answers pings before its
    server listens, so it is tried again for a while."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if echo:
                paced.trip(end.space, end.address, "tcp", 64, 100, 0.1)
            else:
                tools.iperf(end.space, end.address, "tcp", seconds=0.3)
            return
        except tools.ToolError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def loaded(end: endpoints.End, cell: dict, offered: str | None = None) -> dict:
    """One load, and everything that is counted meanwhile."""
    offered = cell["offered"] if offered is None else offered
    before = end.turns() if end.turns else None
    cpu = end.cpu()
    with contextlib.ExitStack() as stack:
        times: list[float] = []
        if cell["pings"]:
            times = stack.enter_context(tools.pinging(end.space, end.address))
        pids = end.pids if machine.missing_counters() is None else {}
        counts = stack.enter_context(machine.counters(list(pids.values()))) if pids else {}
        meter = stack.enter_context(machine.Meter())
        row = LOADS[cell["tool"]](end, cell, offered)
    # By the load's own seconds: its start and its report are no part of it.
    took, used = load_seconds(cell), end.cpu() - cpu
    # iperf's -r sends up first, so there CPU and frames are of both directions, and of none alone.
    is_alone = (cell["protocol"], cell["direction"]) != ("udp", "down")
    found: dict = dict.fromkeys(MEASURES) | row
    found["softirq_cpus"] = meter.usage.softirq_cpus
    found["host_interrupts_s"] = meter.usage.interrupts_s
    if is_alone:
        found["cpus"] = used / took
        if found["mbit_s"]:
            found["cpu_us_per_kb"] = used / took * 1e6 / (found["mbit_s"] * 125)
    if before is not None and is_alone:
        after, is_down = end.turns(), cell["direction"] == "down"
        found |= port_rates(before, after, is_down, took)
        turns = {HISTOGRAMS: {"frames_per_turn": turns_by_frames(before, after, is_down)}}
        found["notes"] = row.get("notes", {}) | turns
        frames = found["port_frames_s"] * took
        for event, count in counts.items():
            if count is not None and frames:
                found[f"{event}_per_frame"] = count / frames
    if cell["pings"]:
        if not times:
            raise tools.ToolError("no ping was answered during the load")
        if row.get("rtt_us") is None:
            found |= trips(tools.percentiles_us(times))
            found["samples"] = {"rtt_us": times}
    return found


def load_seconds(cell: dict) -> float:
    """How long the load lasts: iperf 3 and sockperf take whole seconds."""
    is_whole = cell["tool"] in ("iperf3", "sockperf")
    return tools.whole_seconds(cell["seconds"]) if is_whole else cell["seconds"]


def iperf_row(end: endpoints.End, cell: dict, offered: str) -> dict:
    """What iperf 2 says of one load."""
    if cell["protocol"] == "tcp" and offered.endswith("pps"):
        # It takes writes a second for UDP only.
        size = cell["size"] or 128 << 10
        offered = f"{paced.rate_of(offered, size) * size * 8:.0f}"
    flow = tools.iperf(
        end.space,
        end.address,
        cell["protocol"],
        cell["direction"] == "down",
        cell["seconds"],
        cell["size"],
        offered,
    )
    row = {"mbit_s": flow.mbit_s, "loss": flow.loss}
    if flow.sent is not None:
        row["sent_s"] = flow.sent / cell["seconds"]
        row["arrived_s"] = (flow.sent - flow.lost) / cell["seconds"]
        row["jitter_ms"] = flow.jitter_ms
    return row


def iperf3_row(end: endpoints.End, cell: dict, offered: str) -> dict:
    """What iperf 3 says of one load."""
    size = cell["size"] or paced.BYTES[cell["protocol"]]
    done = tools.iperf3(
        end.space,
        end.address,
        cell["protocol"],
        cell["direction"] == "down",
        cell["seconds"],
        size,
        paced.rate_of(offered, size) * size * 8,
    )
    row = {"mbit_s": done["mbit_s"], "retransmitted": done.get("retransmitted")}
    if "sent" in done:
        if not done["sent"]:
            raise tools.ToolError("iperf3 sent no datagram")
        seconds = load_seconds(cell)
        row |= {
            "loss": done["lost"] / done["sent"],
            "sent_s": done["sent"] / seconds,
            "arrived_s": (done["sent"] - done["lost"]) / seconds,
            "jitter_ms": done["jitter_ms"],
        }
    return row


def sockperf_row(end: endpoints.End, cell: dict, offered: str) -> dict:
    """What sockperf says of messages that came back."""
    size = cell["size"] or paced.BYTES[cell["protocol"]]
    rate = paced.rate_of(offered, size)
    done = tools.sockperf(end.space, end.address, cell["protocol"], cell["seconds"], size, rate)
    if not done["received"] or done["seconds"] <= 0:
        raise tools.ToolError("sockperf received nothing")
    row = {"mbit_s": done["received"] * size * 8e-6 / done["seconds"], **trips(done["rtt_us"])}
    if cell["protocol"] == "udp":
        row |= {
            "loss": max(0.0, 1 - done["received"] / done["sent"]),
            "sent_s": done["sent"] / done["seconds"],
            "arrived_s": min(done["received"], done["sent"]) / done["seconds"],
            "duplicates": done["duplicates"],
            "out_of_order": done["out_of_order"],
        }
    return row


def paced_row(end: endpoints.End, cell: dict, offered: str) -> dict:
    """What the paced generator says of one load."""
    protocol, seconds = cell["protocol"], cell["seconds"]
    size = cell["size"] or paced.BYTES[protocol]
    way = paced.trip if cell["echo"] else paced.send
    done = way(end.space, end.address, protocol, size, paced.rate_of(offered, size), seconds)
    return row_of(done, protocol, seconds)


def row_of(done: dict, protocol: str, seconds: float) -> dict:
    """Measures of a row of paced.c, of a load that was to last so long."""
    is_stream = protocol == "tcp"
    # A stream is over when all of it has been read, a rate after its last interval.
    span = max(done["sent_seconds"], seconds, done["seconds"] if is_stream else 0)
    row = {
        "mbit_s": done["bytes"] * 8e-6 / span,
        "late_us": done["late_us"],
        "unsent": 1 - done["sent"] / done["due"],
        "duplicates": done.get("duplicates"),
        "retransmitted": done.get("retransmitted"),
    }
    if not is_stream:
        row |= {
            "loss": 1 - done["received"] / done["sent"],
            "sent_s": done["sent"] / span,
            "arrived_s": done["received"] / span,
            "jitter_ms": done["jitter_us"] / 1000,
            "out_of_order": done["out_of_order"],
        }
    if "rtt_us" in done:
        if done["rtt_us"] is None:
            raise tools.ToolError(f"none of {done['sent']} came back")
        row |= trips(done["rtt_us"])
        row["jitter_ms"] = done["jitter_us"] / 1000
        row["samples"] = {"rtt_us": done["rtt_us_values"]}
        row["notes"] = {SAMPLES_OF: {"rtt_us": done["rtt_us"]["count"]}}
    return row


LOADS = {
    "iperf": iperf_row, "paced": paced_row, "iperf3": iperf3_row, "sockperf": sockperf_row
}  # fmt: skip


def trips(found: dict) -> dict:
    """Measures of round trips; a percentile of fewer values than it needs is None."""
    count = found["count"]
    return {
        "rtt_us": found["p50"],
        "rtt_p99_us": found["p99"] if count >= 100 else None,
        "rtt_p999_us": found["p999"] if count >= 1000 else None,
        "rtt_p9999_us": found["p9999"] if count >= 10_000 else None,
    }


def source_of(is_down: bool) -> str:
    """The port that the switch takes a load from: the guest's when the guest sends."""
    return "guest" if is_down else "host"


def port_rates(before: dict, after: dict, is_down: bool, seconds: float) -> dict:
    """What the counters of both ports say of the time between two looks.

    Turns and wake-ups are of the port that the switch takes the load from. Frames are those through
    the guest's port.
    """
    source = source_of(is_down)

    def change(port: str, name: str) -> int:
        return after[port][name] - before[port][name]

    turns, frames = change(source, "turns"), change("guest", "rx_frames")
    return {
        "frames_per_turn": change(source, "rx_frames") / turns if turns else 0.0,
        "port_frames_s": (frames + change("guest", "tx_frames")) / seconds,
        "wakeups_s": change(source, "wakeups") / seconds,
    }


def turns_by_frames(before: dict, after: dict, is_down: bool) -> list[list[int | None]]:
    """The turns of the port that the load comes from between two looks, by the frames that each
    gave, as HISTOGRAMS has it: the switch counts 0, 1, 2 to 3, 4 to 7 and so on, and in the last
    range all beyond."""
    old, new = (counters[source_of(is_down)]["frames_per_turn"] for counters in (before, after))
    last = len(new) - 1
    return [
        [(1 << k) >> 1, None if k == last else (1 << k) - 1, now - then]
        for k, (then, now) in enumerate(zip(old, new, strict=True))
    ]


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


LOSS_FREE = Measure("Highest offered rate without loss", "Mbit/s", "higher", top="search_top")


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
        "loss_free_mbit_s": LOSS_FREE,
    }

    def seconds(self, cell: dict) -> float:
        one = super().seconds(cell)
        return one * (1 + (1 + cell["search_steps"]) * cell["search"])

    def measure(self, end: endpoints.End, cell: dict) -> dict:
        found = {**loaded(end, cell), "loss_free_mbit_s": None}
        if cell["search"]:
            found["loss_free_mbit_s"] = self.loss_free(end, cell)
        return found

    @staticmethod
    def loss_free(end: endpoints.End, cell: dict) -> float:
        """The highest offered rate without loss in Mbit/s, between 0 and `search_top`."""
        trial = {**cell, "protocol": "udp", "pings": False}

        def loss(rate: float) -> float:
            row = loaded(end, trial, f"{rate:.3f}M")
            # What was not even sent is no loss of the guest, but no rate that was had either.
            return max(row["loss"], row["unsent"] or 0)

        return search(loss, cell["search_top"], cell["search_steps"])


def search(loss: Callable[[float], float], top: float, steps: int) -> float:
    """The highest rate at which nothing is lost, by binary search (RFC 2544, 26.1): `top` where
    that is free of loss, else exact to top / 2**steps; 0 where all that was tried lost some.

    A rate that lost is tried once more, since a machine that does something else for a moment
    loses too.
    """

    def is_free(rate: float) -> bool:
        return loss(rate) == 0 or loss(rate) == 0

    if is_free(top):
        return top
    low, high = 0.0, top
    for _ in range(steps):
        middle = (low + high) / 2
        if is_free(middle):
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
