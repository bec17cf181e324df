"""A cell's httpd beside busybox's httpd in the stock Linux guest, request by request.

`guests` measures HTTP with httperf; this workload measures what single requests take, and the time
from QEMU's exec to the first byte of a reply, with a connection tried every 2 ms. Both guests run
on microvm with the same kind of port, at fixed addresses, so no measurement waits for a lease.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

from tombolo_lab import harness
from tombolo_lab.workloads import Measure, Parameter, Skip, Workload, tools

PREFIX = "10.77.0"
HOST = f"{PREFIX}.1"
GUESTS = {
    "cell": (f"{PREFIX}.10", "02:00:00:00:02:0a"),
    "linux": (f"{PREFIX}.11", "02:00:00:00:02:0b"),
}
TAP = "tmb-bench"
TRANSFER_BYTES = 100 << 20
BOOT_S = 90
TRY_EVERY_S = 0.002


@dataclass
class Host:
    """The host's side of a network; `card` gives the device of a guest."""

    space: object
    card: Callable[[], object]


def fabric_file(folder: object, space: object, name: str) -> str:
    address, mac = GUESTS[name]
    return f"""\
name = "bench"
[network.lan]
subnet = "{PREFIX}.0/24"
gateway = "{PREFIX}.254"
[tap.host]
device = "{TAP}"
netns = "{space}"
ip = "{HOST}"
[port.{name}]
kind = "vhost-user"
socket = "{folder}/guest.sock"
mac = "{mac}"
ip = "{address}"
"""


def first_reply(guest: object, address: str, space: object) -> float:
    """Seconds from QEMU's exec to the first byte of a reply. Connections are tried side by side,
    since a lost SYN costs a second."""
    deadline = guest.started + BOOT_S
    poll, pending = select.poll(), {}
    request = f"GET / HTTP/1.0\r\nHost: {address}\r\n\r\n".encode()
    next_try, asked = 0.0, None
    try:
        while time.monotonic() < deadline:
            now = time.monotonic()
            if asked is None and now >= next_try:
                connection = harness.socket_in(str(space))
                connection.setblocking(False)
                connection.connect_ex((address, 80))
                pending[connection.fileno()] = connection
                poll.register(connection, select.POLLOUT)
                next_try = now + TRY_EVERY_S
            for fd, event in poll.poll(1000 * TRY_EVERY_S):
                connection = pending[fd]
                if asked is connection:
                    if connection.recv(65536):
                        return time.monotonic() - guest.started
                    raise tools.ToolError("the first connection ended without a reply")
                error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error or event & (select.POLLHUP | select.POLLERR) or asked:
                    poll.unregister(fd)
                    pending.pop(fd).close()
                elif asked is None:
                    connection.sendall(request)
                    asked = connection
                    poll.modify(fd, select.POLLIN)
            if not guest.alive():
                raise tools.ToolError(f"QEMU ended:\n{guest.tail()}")
    finally:
        for connection in pending.values():
            connection.close()
    raise tools.ToolError(f"no HTTP reply within {BOOT_S} s; the console says:\n{guest.tail()}")


class Httpd(Workload):
    """One guest, from its start to its idle CPU."""

    name = "httpd"
    doc = (
        "Starts a guest that serves HTTP and measures it from the host's side of its network: the "
        "first reply, requests one by one with a connection each, a transfer of 100 MiB, pings, "
        "memory and idle CPU. busybox starts a process for each request."
    )
    parameters = {
        "guest": Parameter("What serves", str, tuple(GUESTS), default="cell", setup=True),
        "port": Parameter(
            "fabric: vhost-user through `tombolo up`; tap: QEMU's tap, without our switch", str,
            ("fabric", "tap"), default="fabric", setup=True,
        ),
        "accel": Parameter(
            "What QEMU runs guests with", str, ("tcg", "kvm"), default="tcg", setup=True
        ),
        "requests": Parameter("Requests, one after the other", int, low=10, high=100_000,
                              default=300),
        "pings": Parameter("Pings, one each 10 ms", int, low=10, high=100_000, default=200),
        "idle_s": Parameter("How long idle CPU is measured", float, low=0.1, high=600, default=2,
                            unit="s"),
    }  # fmt: skip
    measures = {
        "first_reply_ms": Measure("From QEMU's exec to the first byte of a reply", "ms", "lower"),
        "request_us": Measure("Median time of GET / with a connection of its own", "µs", "lower"),
        "request_p99_us": Measure("Time that 1 % of them exceed", "µs", "lower"),
        "requests_s": Measure("Requests per second, one after the other", "1/s", "higher"),
        "bytes_mb_s": Measure("GET of 100 MiB", "MB/s", "higher"),
        "ping_us": Measure("Median round trip of a ping", "µs", "lower"),
        "ping_lost": Measure("Pings without a reply", "", "lower"),
        "rss_mib": Measure("Resident memory of QEMU after all that", "MiB", "lower"),
        "idle_pct": Measure("CPU of QEMU when idle, in % of a core", "%", "lower"),
    }
    needs = ("root", "QEMU")

    def check(self, cell: dict) -> None:
        harness.need_root()
        harness.program()
        harness.need_program("qemu-system-x86_64", "qemu-system-x86")
        if cell["guest"] == "cell":
            harness.need_cell("httpd")
        else:
            harness.need_guest()
        if cell["accel"] == "kvm" and not os.access("/dev/kvm", os.R_OK | os.W_OK):
            raise Skip("needs /dev/kvm")

    def setup_seconds(self, cell: dict) -> float:
        return 1.0

    def seconds(self, cell: dict) -> float:
        boot = 0.3 if cell["guest"] == "cell" else 6
        return boot + cell["requests"] * 0.006 + cell["pings"] * 0.011 + 1.5 + cell["idle_s"]

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[Host]:
        name = cell["guest"]
        mac = GUESTS[name][1]
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(harness.scratch())
            space = stack.enter_context(harness.Namespace())
            stack.enter_context(harness.group_first())
            # What the harness starts guests with.
            stack.enter_context(mock.patch.dict(os.environ, TOMBOLO_ACCEL=cell["accel"]))
            if cell["port"] == "tap":
                space.tap(TAP, f"{HOST}/24")
                yield Host(space, lambda: harness.Net.tap(TAP).with_mac(mac))
                return
            stack.enter_context(harness.fabric_of(folder, fabric_file(folder, space, name)))
            path = folder / "guest.sock"

            def is_ready() -> bool:
                return path.exists() and TAP in space.ip("-o", "link")

            harness.until("the fabric's ports", is_ready, 20)
            space.ip("link", "set", TAP, "up")
            yield Host(space, lambda: harness.Net.vhost_user(path).with_mac(mac))

    @staticmethod
    def start(cell: dict, host: Host) -> object:
        """The guest. Only a tap has to be reached from within the namespace, and entering it is
        work of others before QEMU's start."""
        address = GUESTS[cell["guest"]][0]
        space = host.space if cell["port"] == "tap" else None
        more = {"net": host.card(), "netns": space, "nice": harness.FIRST}
        if cell["guest"] == "cell":
            return harness.CellGuest("httpd", append=f"ip={address}/24 hostname=cell", **more)
        return harness.LinuxGuest(address=f"{address}/24", serve="http", **more)

    def measure(self, host: Host, cell: dict) -> dict:
        address, mac = GUESTS[cell["guest"]]
        # The host knows the guest's MAC: an unanswered ARP would hold the first SYN back.
        words = ("lladdr", mac, "dev", TAP, "nud", "permanent")
        host.space.ip("neigh", "replace", address, *words)
        with self.start(cell, host) as guest:
            if cell["guest"] == "linux":
                # It needs seconds; SYNs of all that time would wait for it in the tap's queue.
                guest.wait_address(BOOT_S)
            first = first_reply(guest, address, host.space)
            return {"first_reply_ms": first * 1000, **self.served(guest, address, host.space, cell)}

    @staticmethod
    def served(guest: object, address: str, space: object, cell: dict) -> dict:
        """Requests, a transfer, pings, memory and idle CPU of a guest that replies."""
        times = []
        for _ in range(cell["requests"]):
            begun = time.monotonic()
            reply = harness.http_get(address, netns=str(space))
            times.append(time.monotonic() - begun)
            if reply.status != 200:
                raise tools.ToolError(f"GET /: expected status 200, found {reply.status}")
        times.sort()
        path = f"/bytes/{TRANSFER_BYTES}"
        transfer = harness.http_get(address, path, netns=str(space), seconds=60, keep=False)
        pings = tools.ping(space, address, cell["pings"])
        idle = 100 * harness.core_share(guest.cpu_seconds, cell["idle_s"])
        return {
            "request_us": statistics.median(times) * 1e6,
            "request_p99_us": times[int(len(times) * 0.99)] * 1e6,
            "requests_s": len(times) / sum(times),
            "bytes_mb_s": TRANSFER_BYTES / transfer.total_s / 1e6,
            "ping_us": statistics.median(pings),
            "ping_lost": max(0, cell["pings"] - len(pings)),
            "rss_mib": guest.rss_bytes() / (1 << 20),
            "idle_pct": idle,
            "samples": {"ping_us": pings, "request_us": [seconds * 1e6 for seconds in times]},
        }
