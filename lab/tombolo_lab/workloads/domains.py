"""Domains of real Xen: a cell or Linux as a PVH guest, over our backend or Linux's netback.

    with domain("cell", "tombolo") as guest:
        guest.ping(100)

QEMU boots Xen and a Linux dom0 without KVM (tests/lib/xen.py; `./x xen` builds both). Everything is
measured in dom0, from the other side of the domain's network, by programs that are copied there.
Its clock is /proc/uptime, so the time to the first reply has a resolution of 10 ms.

Limits: an emulated Xen varies tenfold from boot to boot. Compare within one repetition only. A
Linux domain has replies of `BYTES` only.
"""

from __future__ import annotations

import contextlib
import importlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tombolo_lab import harness
from tombolo_lab.workloads import Skip, tools

BACKENDS = ("tombolo", "netback")
DOM0, ADDRESS, MAC = "10.88.0.3", "10.88.0.20", "00:16:3e:00:00:30"
NAME = "guest"
MEMORY_MIB = {"cell": 32, "linux": 160}
BYTES = (1000, 100_000, 1_000_000, 10_000_000, 100_000_000)
PROGRAMS = ("ping", "httperf")
BOOT_S, COMMAND_S = 300, 120

FABRIC = f"""
name = "lab"
[network.lan]
subnet = "10.88.0.0/24"
[tap.host]
device = "tap0"
ip = "{DOM0}"
[port.{NAME}]
kind = "xen"
mac = "{MAC}"
ip = "{ADDRESS}"
"""
# What process 1 of a Linux domain does.
LINUX_SERVES = f"""ip addr add {ADDRESS}/24 dev eth0
ip link set eth0 up
mkdir -p /tmp/www/bytes
for size in {" ".join(map(str, BYTES))}; do truncate -s $size /tmp/www/bytes/$size; done
echo >/tmp/www/index.html
exec httpd -f -h /tmp/www
"""
# Seconds from the creation of the domain to its first HTTP reply. Pings find when it is there: a
# first SYN that is lost would be sent again after a second.
FIRST_REPLY = f"""#!/bin/sh
begun=$(cut -d' ' -f1 /proc/uptime)
xl create -q "$1" >/tmp/created 2>&1 || {{ cat /tmp/created; exit 1; }}
until /usr/bin/ping -n -q -c 1 -W 0.05 {ADDRESS} >/dev/null 2>&1; do :; done
until wget -q -O /dev/null http://{ADDRESS}/ 2>/dev/null; do usleep 20000; done
echo "first-reply $begun $(cut -d' ' -f1 /proc/uptime)"
"""


def _lib() -> ModuleType:
    """tests/lib/xen.py."""
    harness.lib()
    return importlib.import_module("lib.xen")


def check(guest: str, bytes_wanted: int) -> None:
    """Skip where there is no Xen test bed, or no such reply."""
    bed = harness.lib().BUILD / "xen/version"
    if not bed.is_file():
        raise Skip(f"the Xen test bed {bed.parent} is not there: run ./x xen")
    harness.measured(*(bed.with_name(name) for name in harness.XEN_FILES))
    harness.program()
    harness.need_program("busybox", "busybox-static")
    harness.need_program("ping", "iputils-ping")
    harness.need_program("httperf")
    if guest == "cell":
        harness.need_cell("httpd")
    elif bytes_wanted not in BYTES:
        raise Skip(f"a Linux domain has replies of {', '.join(map(str, BYTES))} bytes only")


def config(guest: str, backend: str) -> str:
    """The domain's file for xl."""
    vif = "bridge=br0" if backend == "netback" else "script=/bin/true"
    what = (
        {"kernel": "/cells/httpd", "line": f"ip={ADDRESS}/24"}
        if guest == "cell"
        else {"ramdisk": "/domu/ramdisk"}
    )
    return _lib().xl_config(NAME, MAC, MEMORY_MIB[guest], vif=vif, **what)


def dom0_files(guest: str, backend: str) -> dict[str, bytes]:
    """What dom0 has beside what its tests have: name → content."""
    xen = _lib()
    files: dict[str, bytes] = {}
    if backend == "tombolo":
        files |= xen.fabric_files(FABRIC)
    if guest == "linux":
        ramdisk, kernel = xen.linux_guest(xen.linux_init(LINUX_SERVES), {})
        files |= {"domu/kernel": kernel, "domu/ramdisk": ramdisk}
    for program in PROGRAMS:
        path = harness.need_program(program)
        for name, source in xen.program_files(path):
            name = f"usr/bin/{program}" if str(source) == path else name
            files.setdefault(name, Path(source).read_bytes())
    return files | {
        "domu/guest.cfg": config(guest, backend).encode(),
        "bin/lab-first-reply": FIRST_REPLY.encode(),
    }


@dataclass
class Domain:
    """A domain that serves HTTP. `run` runs a command in dom0 and gives what it printed."""

    xen: object
    guest: str
    first_reply_s: float

    def run(self, *words: object, seconds: float) -> str:
        command = " ".join(shlex.quote(str(word)) for word in words)
        return self.xen.run(command, COMMAND_S + seconds, check=False).text

    def ping(self, count: int) -> list[float]:
        """Round trips in µs, one ping each 10 ms."""
        text = self.run(
            "/usr/bin/ping", "-n", "-i", 0.01, "-c", count, ADDRESS, seconds=count * 0.1
        )
        if not (times := tools.ping_times(text)):
            raise tools.ToolError(f"no reply to {count} pings of the domain: {text[-300:]!r}")
        return times

    def flood(self, count: int) -> tuple[int, int, list[float]]:
        """As tools.flood."""
        text = self.run(
            "/usr/bin/ping", "-n", "-q", "-f", "-c", count, ADDRESS, seconds=count * 0.05
        )
        return tools.flood_report(text)

    def httperf(self, path: str, sessions: int, requests: int, seconds: float) -> tools.Http:
        """As tools.httperf."""
        words = tools.httperf_words(ADDRESS, path, sessions, requests, seconds)
        text = self.run("/usr/bin/httperf", *words[1:], seconds=2 * seconds)
        return tools.httperf_report(text)

    def memory_mib(self) -> float:
        """What the domain is given."""
        return float(MEMORY_MIB[self.guest])


@contextlib.contextmanager
def domain(guest: str, backend: str) -> Iterator[Domain]:
    """Boots Xen, and a domain on it, which serves HTTP from here on."""
    cells = ["httpd"] if guest == "cell" else []
    with (
        harness.scratch() as folder,
        _lib().XenHost(folder, cells, dom0_files(guest, backend), nice=-5) as xen,
    ):
        xen.bring_up(BOOT_S)
        interface = "br0"
        if backend == "tombolo":
            interface = "tap0"
            xen.run("ip addr flush dev br0; rmmod xen_netback; tombolo up -d /tombolo.toml", 120)
        else:
            xen.run(f"ip addr flush dev br0; ip addr add {DOM0}/24 dev br0")
        # An ARP request without an answer would hold others back for a second.
        xen.run(f"arp -i {interface} -s {ADDRESS} {MAC}")
        text = xen.run("lab-first-reply /domu/guest.cfg", BOOT_S).text
        begun, replied = map(float, text.split("first-reply ")[1].split()[:2])
        yield Domain(xen, guest, replied - begun)
