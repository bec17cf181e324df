"""A cell and a Linux guest as domains of Xen, each over Linux's netback and over our backend.

Real Xen 4.17 runs under emulation, with Debian's Linux as dom0. Everything is measured in dom0,
from the other side of the network. An emulated Xen varies tenfold from boot to boot, so rates are
compared within one boot only; a set-up is one boot. Kernel probes count dom0's hypercalls, and stay
in place in all measurements of both backends. A segmentation frame counts as one frame, and TCP
makes longer ones over a faster backend, so the hypercalls are also counted per megabyte.

Import `xenhost` within `open` only: it loads the repository's test harness.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator

from tombolo_lab import harness
from tombolo_lab.workloads import Measure, Parameter, Skip, Workload, paced

BACKENDS = ("netback", "tombolo")
GUESTS = ("linux", "cell")
# Bytes of the reply, and sessions at once.
HTTP = (
    (100_000, 1), (100_000, 10), (100_000, 40), (1_000_000, 1), (1_000_000, 10), (1_000_000, 40),
    (10_000_000, 1), (10_000_000, 4), (100_000_000, 1),
)  # fmt: skip
# Offered, in Mbit/s.
UDP = (2, 10, 50)
HYPERCALLS = ("copy", "map", "unmap", "event")


def http_key(size: int, sessions: int) -> str:
    return f"http_{size // 1000}k_{sessions}_mb_s"


def need() -> None:
    """Skip where no Xen host can be booted with our program in it."""
    harness.need_program("qemu-system-x86_64", "qemu-system-x86")
    harness.program()
    paced.program()
    if not (harness.BUILD / "xen").is_dir():
        raise Skip("build/xen is not there: `./x bench xen` makes it")
    harness.measured(*(harness.BUILD / "xen" / name for name in harness.XEN_FILES))
    images = harness.CellGuest.IMAGES
    harness.measured(*(images / app for app in ("echo", "httpd", "iperf")))


class Xen(Workload):
    """One guest over one backend."""

    name = "xen"
    doc = (
        "Boots real Xen under emulation and measures a guest (PVH), a cell or Linux, over netback "
        "or over our backend: first reply, pings, HTTP by ab, TCP both ways, UDP at offered rates, "
        "and the hypercalls of dom0 per frame."
    )
    parameters = {
        "backend": Parameter("dom0's end of the network", str, BACKENDS, default="netback"),
        "guest": Parameter("What runs in the domain", str, GUESTS, default="linux"),
        "what": Parameter(
            "all: everything but the flood; flood: pings as fast as replies come", str,
            ("all", "flood"), default="all", setup=True,
        ),
        "pings": Parameter("Pings, one after the other", int, low=10, high=100_000, default=200),
        "flood": Parameter("Pings of a flood", int, low=10, high=10_000_000, default=100_000),
        "seconds": Parameter("Duration of an iperf run", int, low=1, high=600, default=3, unit="s"),
    }  # fmt: skip
    measures = {
        "syscall_us": Measure("A system call of a process in dom0", "µs", "lower"),
        "first_reply_ms": Measure("From `xl create` to the first echo reply", "ms", "lower"),
        "memory_mib": Measure("Memory that the domain is given", "MiB", "lower"),
        "ping_us": Measure("Mean round trip of a ping", "µs", "lower"),
        "ping_min_us": Measure("Shortest round trip", "µs", "lower"),
        "ping_max_us": Measure("Longest round trip", "µs", "lower"),
        "http_mb_s": Measure("HTTP, geometric mean over sizes and sessions", "MB/s", "higher"),
        "tcp_mbit_s": Measure("TCP, geometric mean of both ways", "Mbit/s", "higher"),
        "tcp_to_mbit_s": Measure("TCP to the guest", "Mbit/s", "higher"),
        "tcp_from_mbit_s": Measure("TCP from the guest", "Mbit/s", "higher"),
        **{
            f"{what}_per_frame": Measure(f"Hypercalls of dom0 per frame: {what}", "", "lower")
            for what in HYPERCALLS
        },
        "hypercalls_per_frame": Measure("All of these", "", "lower"),
        "hypercalls_per_mb": Measure("All of these per megabyte", "/MB", "lower"),
        **{
            http_key(size, n): Measure(f"GET of {size} B, {n} sessions", "MB/s", "higher")
            for size, n in HTTP
        },
        **{
            f"udp_{rate}m_mbit_s": Measure(f"Received of {rate} Mbit/s", "Mbit/s", "higher")
            for rate in UDP
        },
        "flood_lost": Measure("Pings of the flood without a reply", "", "lower"),
    }
    needs = ("root", "QEMU", "build/xen of ./x xen", "ab")

    def check(self, cell: dict) -> None:
        need()
        harness.need_program("ab", "apache2-utils")
        harness.need_program("iperf")

    def setup_seconds(self, cell: dict) -> float:
        return 60

    def seconds(self, cell: dict) -> float:
        if cell["what"] == "flood":
            return 20 + cell["flood"] * 2e-3
        return 60 + 8 * cell["seconds"] + cell["pings"] * 0.02

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[object]:
        from tombolo_lab.workloads import xenhost

        with harness.scratch() as folder, xenhost.booted(folder) as dom0:
            yield dom0

    def measure(self, dom0: object, cell: dict) -> dict:
        found: dict = dict.fromkeys(self.measures)
        dom0.use(cell["backend"])
        if cell["what"] == "flood":
            return found | {"flood_lost": dom0.flood(cell["flood"])}
        found |= dom0.measure(cell["guest"], cell["pings"], cell["seconds"])
        rates = [found[http_key(size, n)] for size, n in HTTP]
        found["http_mb_s"] = math.exp(statistics.fmean(math.log(rate) for rate in rates))
        found["tcp_mbit_s"] = math.sqrt(found["tcp_to_mbit_s"] * found["tcp_from_mbit_s"])
        return found
