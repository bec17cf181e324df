"""A cell beside a Linux guest: the same VMM, the same port, the same clients,
under QEMU and on Xen."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tombolo_lab import harness, machine
from tombolo_lab.workloads import (
    UNMEASURED,
    Measure,
    Parameter,
    Skip,
    Workload,
    domains,
    endpoints,
    tools,
)

HTTP_PORT = 80
# The resolution of what siege says it has moved.
SIEGE_BYTES = 0.01 * (1 << 20)
# What a guest is expected to serve at least, so that wrk sees whole replies on all connections.
SLOWEST_BYTES_S = 40e6


@dataclass
class Served:
    """A guest under QEMU that serves HTTP, and what its start took in seconds."""

    end: endpoints.End
    first_reply_s: float

    def ping(self, count: int) -> list[float]:
        return tools.ping(self.end.space, self.end.address, count)

    def flood(self, count: int) -> tuple[int, int, list[float]]:
        return tools.flood(self.end.space, self.end.address, count)

    def httperf(self, *words: object) -> tools.Http:
        return tools.httperf(self.end.space, self.end.address, *words)

    def siege(self, *words: object) -> tools.Http:
        return tools.siege(self.end.space, self.end.address, *words)

    def wrk(self, *words: object) -> tuple[tools.Http, dict]:
        return tools.wrk(self.end.space, self.end.address, *words)

    def memory_mib(self) -> float:
        return self.end.memory() / (1 << 20)


class Guests(Workload):
    """Boot, pings, HTTP and memory of one guest."""

    name = "guests"
    doc = (
        "Boots a guest that serves HTTP, a cell or the stock Linux guest, and measures it from the "
        "host's side of its network: the time to the first reply, pings, HTTP by size, requests "
        "and sessions (httperf), and memory."
    )
    parameters = {
        "host": Parameter(
            "Where the guest runs: QEMU; Xen with our network backend, or with Linux's netback "
            "(Xen is emulated, and `attachment` is QEMU's)", str, ("qemu", "xen", "xen-netback"),
            default="qemu", setup=True,
        ),
        **{
            name: endpoints.PARAMETERS[name]
            for name in ("guest", "attachment", "budget", "busy_poll_us", "cell_budget", "queues",
                         "region", "priority", "sysctls")
        },
        "bytes": Parameter(
            "Size of a reply", int, low=1, high=1 << 30, default=100_000, unit="B"
        ),
        "tool": Parameter(
            "What asks: httperf and siege make `requests` in each session, siege by a connection "
            "for each; wrk asks for `seconds`", str, ("httperf", "siege", "wrk"), default="httperf",
        ),
        "sessions": Parameter("Connections at the same time", int, low=1, high=1000, default=1),
        "requests": Parameter("Requests over each connection", int, low=1, high=10_000, default=10),
        "seconds": Parameter("How long wrk asks", float, low=1, high=600, default=1, unit="s"),
        "pings": Parameter("Pings, one each 10 ms", int, low=1, high=1_000_000, default=50),
        "flood": Parameter("Pings of a flood; 0: none", int, low=0, high=10_000_000, default=0),
    }  # fmt: skip
    measures = {
        "first_reply_ms": Measure("From the guest's start to the first HTTP reply", "ms", "lower"),
        "mbit_s": Measure("Content of HTTP replies", "Mbit/s", "higher"),
        "replies_s": Measure("HTTP replies", "1/s", "higher"),
        "reply_ms": Measure("Mean time of a reply, transfer included", "ms", "lower"),
        "reply_p99_ms": Measure("… its 99th percentile (wrk)", "ms", "lower"),
        "rtt_us": Measure("Median round trip of a ping", "µs", "lower"),
        "flood_lost": Measure("Pings of the flood without a reply", "", "lower"),
        "flood_mean_us": Measure("Mean round trip in the flood", "µs", "lower"),
        "memory_mib": Measure(
            "Resident memory of the guest's QEMU; of Xen, what the domain is given", "MiB", "lower"
        ),
    }
    opened = ("first_reply_ms",)
    needs = ("root", "QEMU", "httperf, siege or wrk", "for Xen its test bed (./x xen)")

    def check(self, cell: dict) -> None:
        if cell["guest"] == "namespace":
            raise Skip("a namespace is no guest")
        if cell["host"] != "qemu":
            if cell["tool"] != "httperf":
                raise Skip(f"dom0 has no {cell['tool']}: Xen is measured with httperf")
            domains.check(cell["guest"], cell["bytes"])
            return
        endpoints.check(cell, "httpd")
        harness.need_program(cell["tool"])
        if cell["attachment"] == "user":
            raise Skip("QEMU's user networking forwards no pings")

    def setup_seconds(self, cell: dict) -> float:
        if cell["host"] != "qemu":
            return 60.0
        return 2.0 if cell["guest"] == "cell" else 15

    def seconds(self, cell: dict) -> float:
        moved = cell["bytes"] * cell["sessions"] * cell["requests"] / 100e6
        if cell["host"] != "qemu":
            # An emulated Xen moves about 1 MB a second.
            moved = 1 + moved * 100
        if cell["tool"] == "wrk":
            moved = wrk_seconds(cell)
        return 0.3 + moved + cell["pings"] * 0.011 + cell["flood"] * 3e-4

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[Served | domains.Domain]:
        if cell["host"] != "qemu":
            backend = "tombolo" if cell["host"] == "xen" else "netback"
            with domains.domain(cell["guest"], backend) as served:
                yield served
            return
        with endpoints.guest(cell, app="httpd", serve="http") as end:
            yield Served(end, first_reply(end))

    def measure(self, setup: Served | domains.Domain, cell: dict) -> dict:
        if cell["guest"] == "linux" and cell["host"] == "qemu":
            page = f"/www/bytes/{cell['bytes']}"
            setup.end.process.run(f"[ -e {page} ] || truncate -s {cell['bytes']} {page}")
        times = setup.ping(cell["pings"])
        http, p99 = self.asked(setup, cell)
        found: dict = {
            "first_reply_ms": setup.first_reply_s * 1000,
            "mbit_s": http.mbit_s,
            "replies_s": http.replies_s,
            "reply_ms": http.reply_ms,
            "reply_p99_ms": p99,
            "rtt_us": sorted(times)[len(times) // 2],
            "flood_lost": None,
            "flood_mean_us": None,
            "memory_mib": setup.memory_mib(),
            "samples": {"rtt_us": times},
        }
        if http.mbit_s is None:
            found["notes"] = {UNMEASURED: f"{cell['tool']}: its clock says that no time passed"}
        if cell["flood"]:
            sent, answered, (_, mean, _) = setup.flood(cell["flood"])
            found |= {"flood_lost": sent - answered, "flood_mean_us": mean}
        return found

    def asked(self, setup: Served | domains.Domain, cell: dict) -> tuple[tools.Http, float | None]:
        """What the tool counted, and wrk's 99th percentile; ToolError unless all went well."""
        where = (f"/bytes/{cell['bytes']}", cell["sessions"])
        if cell["tool"] == "wrk":
            http, parts = setup.wrk(*where, wrk_seconds(cell))
            if not http.replies or http.errors:
                raise tools.ToolError(f"wrk: {http.replies} replies and {http.errors} errors")
            check_content("wrk", http, cell["bytes"], unfinished=cell["sessions"])
            return http, parts["p99"]
        ask = getattr(setup, cell["tool"])
        http = ask(*where, cell["requests"], 10 + 3 * self.seconds(cell))
        wanted = cell["sessions"] * cell["requests"]
        if http.replies != wanted or http.errors:
            raise tools.ToolError(
                f"{cell['tool']}: expected {wanted} replies, found {http.replies} and "
                f"{http.errors} errors"
            )
        check_content(cell["tool"], http, cell["bytes"])
        return http, None


def wrk_seconds(cell: Mapping) -> int:
    """How long wrk asks, in whole seconds: longer where a slow guest could not finish a reply on
    each connection, since wrk counts whole replies only."""
    return math.ceil(max(cell["seconds"], cell["bytes"] * cell["sessions"] / SLOWEST_BYTES_S))


def check_content(tool: str, http: tools.Http, size: int, unfinished: int = 0) -> None:
    """ToolError when replies were not as long as what was asked for, such as a page that says that
    there is none. siege and wrk print their bytes rounded, wrk's with headers and with what it had
    of up to `unfinished` replies that it did not wait for."""
    found = http.moved
    if found is None:
        found = http.mbit_s / 8e-6 / http.replies_s * http.replies if http.replies_s else 0
    expected = size * http.replies
    most = expected * 1.2 + 20_000 * http.replies + size * unfinished
    if not expected * 0.95 - SIEGE_BYTES < found < most:
        raise tools.ToolError(
            f"{tool}: expected {http.replies} replies of {size} bytes, found {found:.0f} in all"
        )


def first_reply(end: endpoints.End, seconds: float = 60) -> float:
    """Seconds from the start of the guest's QEMU to the first reply to GET /. The guest answers
    pings by now, so this finds a reply soon or none."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            reply = harness.http_get(end.address, netns=str(end.space), seconds=5)
            if reply.status == 200:
                return machine.process_age_s(end.pids["guest"])
            raise tools.ToolError(f"GET /: expected status 200, found {reply.status}")
        except OSError:
            if time.monotonic() > deadline:
                raise tools.ToolError(f"no HTTP reply within {seconds:g} s") from None
            time.sleep(0.02)
