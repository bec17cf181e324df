"""dom0 of an emulated Xen host, and what is measured in it. Import it within `open` only."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tombolo_lab import harness
from tombolo_lab.workloads import paced, tools
from tombolo_lab.workloads.xen import BACKENDS, HTTP, UDP, http_key

harness.lib()
sys.path.insert(0, str(harness.tree() / "tools/guest"))
from build import program_files
from lib.xen import XenHost, fabric_files, linux_guest, linux_init, xl_config

HOST = "10.87.0.3"
# Domain: its image, memory in MiB, MAC and address. A cell has one app, so it is two domains.
DOMAINS = {
    "web": ("httpd", 32, "00:16:3e:00:00:20", "10.87.0.20"),
    "flow": ("iperf", 32, "00:16:3e:00:00:22", "10.87.0.22"),
    "linux": (None, 160, "00:16:3e:00:00:21", "10.87.0.21"),
}
# A measurement moves at least so much, where its sessions do not move more by themselves.
HTTP_BYTES = 8_000_000
# Functions of dom0's kernel that make one hypercall for a batch each, and what they do.
HYPERCALLS = {
    "gnttab_batch_copy": "copy",
    "gnttab_map_refs": "map",
    "gnttab_unmap_refs": "unmap",
    "notify_remote_via_irq": "event",
    "evtchn_ioctl": "event",
}
TRACE = "/sys/kernel/tracing"
UDP_BYTES, UDP_BUFFER = 1470, 1 << 20
SYSCALLS = 20_000



def fabric(domains):
    """The fabric file of dom0: our backend for these domains, name -> (MAC, address)."""
    return f"""
name = "xen"
[network.lan]
subnet = "10.87.0.0/24"
[tap.host]
device = "tap0"
ip = "{HOST}"
""" + "".join(
        f"""
[port.{name}]
kind = "xen"
mac = "{mac}"
ip = "{address}"
"""
        for name, (mac, address) in domains.items()
    )



LINUX_INIT = linux_init(
    f"""ip addr add {DOMAINS["linux"][3]}/24 dev eth0
ip link set eth0 up
mkdir -p /tmp/www/bytes
for size in {" ".join(str(size) for size in sorted({size for size, _ in HTTP}))}; do
    truncate -s $size /tmp/www/bytes/$size
done
httpd -h /tmp/www
iperf -s >/dev/null 2>&1 &
exec paced sink udp {paced.IPERF_PORT} {UDP_BUFFER} >/dev/null 2>&1
"""
)

# The time of the first reply after the domain's creation, both by the clock of `ping -D`.
FIRST_REPLY = """#!/bin/sh
# usage: first-reply CONFIG ADDRESS
clock() { /usr/bin/ping -D -n -c 1 127.0.0.1 | sed -n 's/^\\[\\([0-9.]*\\)\\].*/\\1/p'; }
/usr/bin/ping -D -n -i 0.02 "$2" >/tmp/first &
pinger=$!
clock
xl create -q "$1" >/tmp/created 2>&1 || { kill $pinger; cat /tmp/created; exit 1; }
until grep -q 'bytes from' /tmp/first; do usleep 20000; done
kill $pinger
sed -n 's/^\\[\\([0-9.]*\\)\\].*bytes from.*/\\1/p;T;q' /tmp/first
"""


def guest_config(name, backend):
    app, memory, mac, address = DOMAINS[name]
    vif = "bridge=br0" if backend == "netback" else "script=/bin/true"
    what = (
        {"kernel": f"/cells/{app}", "line": f"ip={address}/24"}
        if app
        else {"ramdisk": "/domu/ramdisk"}
    )
    return xl_config(name, mac, memory, vif=vif, **what).encode()


def programs(*names):
    """Programs of this machine at /usr/bin, where dom0's own are others, with their libraries."""
    files = {}
    for program in names:
        path = shutil.which(program)
        if not path:
            raise tools.ToolError(f"no {program}: ./x setup http guests installs it")
        for name, source in program_files(path):
            files[f"usr/bin/{program}" if str(source) == path else name] = source.read_bytes()
    return files


def dom0_files():
    """What dom0 has beside what its tests have."""
    program = paced.program().read_bytes()
    ramdisk, kernel = linux_guest(LINUX_INIT, {}, ["iperf"], files={"bin/paced": program})
    files = fabric_files(fabric({name: domain[2:] for name, domain in DOMAINS.items()}))
    files |= {"domu/kernel": kernel, "domu/ramdisk": ramdisk, **programs("ab", "ping")}
    files["bin/paced"] = program
    for backend in BACKENDS:
        files |= {f"domu/{backend}/{name}.cfg": guest_config(name, backend) for name in DOMAINS}
    files["bin/first-reply"] = FIRST_REPLY.encode()
    return files


class Dom0:
    """The Xen host of one boot, with one of the two backends at work."""

    def __init__(self, xen):
        self.xen, self.backend = xen, "netback"
        xen.run(f"ip addr flush dev br0; ip addr add {HOST}/24 dev br0; mount -t tracefs t {TRACE}")
        for function in HYPERCALLS:
            xen.run(f"echo p:{function} {function} >>{TRACE}/kprobe_events")
        xen.run(f"echo 1 >{TRACE}/events/kprobes/enable")

    def use(self, backend):
        if backend == self.backend:
            return
        if backend == "tombolo":
            self.xen.run(
                "ip addr flush dev br0; rmmod xen_netback; tombolo up -d /tombolo.toml", 120
            )
        else:
            self.xen.run("tombolo down", 120)
            self.xen.run(f"insmod $(ls /lib/modules/*netback*); ip addr add {HOST}/24 dev br0")
        self.backend = backend

    def interface(self):
        return "br0" if self.backend == "netback" else "tap0"

    def create(self, name):
        """Starts a domain; milliseconds to its first reply."""
        _, _, mac, address = DOMAINS[name]
        # An unanswered ARP request would hold requests back for a second.
        self.xen.run(f"arp -i {self.interface()} -s {address} {mac}")
        begun, replied = map(
            float,
            self.xen.run(
                f"first-reply /domu/{self.backend}/{name}.cfg {address}", 300
            ).text.split(),
        )
        return 1000 * (replied - begun)

    def destroy(self, name):
        self.xen.run(f"xl destroy {name}")
        harness.until(f"{name} is gone", lambda: self.xen.state(name) is None)
        harness.until(
            "its device is gone",
            lambda: (
                not self.xen.run("xenstore-list backend/vif", check=False).text.strip().isdigit()
            ),
        )

    def hypercalls(self):
        text = self.xen.run(f"cat {TRACE}/kprobe_profile").text
        counts = dict.fromkeys(HYPERCALLS.values(), 0)
        for function, hits in re.findall(r"^\s*(\w+)\s+(\d+)", text, re.M):
            counts[HYPERCALLS[function]] += int(hits)
        return counts

    def traffic(self):
        """Frames and bytes that passed between dom0 and its guest, both ways."""
        folder = f"/sys/class/net/{self.interface()}/statistics"
        counts = self.xen.run(f"cd {folder}; cat rx_packets tx_packets rx_bytes tx_bytes").text
        frames_in, frames_out, bytes_in, bytes_out = map(int, counts.split())
        return frames_in + frames_out, bytes_in + bytes_out

    def ping(self, address, count):
        text = self.xen.run(f"/usr/bin/ping -n -q -i 0.01 -c {count} {address}", 60 + count).text
        came = int(re.search(r"(\d+) received", text)[1])
        if came < count:
            raise tools.ToolError(f"of {count} pings {came} were answered by {address}:\n{text}")
        least, average, most = re.search(r"= ([\d.]+)/([\d.]+)/([\d.]+)", text).groups()
        return {
            "ping_min_us": 1000 * float(least),
            "ping_us": 1000 * float(average),
            "ping_max_us": 1000 * float(most),
        }

    def http(self, address):
        rows = {}
        for size, sessions in HTTP:
            requests = max(sessions, math.ceil(HTTP_BYTES / size)) if size < 100_000_000 else 1
            text = self.xen.run(
                f"ab -q -s 300 -n {requests} -c {sessions} http://{address}/bytes/{size} 2>&1", 600
            ).text
            took = re.search(r"Time taken for tests:\s+([\d.]+)", text)
            failed = re.search(r"Failed requests:\s+(\d+)", text)
            moved = re.search(r"HTML transferred:\s+(\d+)", text)
            if not took or not failed or int(failed[1]) or int(moved[1]) < size * requests:
                raise tools.ToolError(
                    f"ab of {size} bytes by {sessions} sessions at {address}:\n{text}"
                )
            rows[http_key(size, sessions)] = size * requests / float(took[1]) / 1e6
        return rows

    def tcp(self, address, seconds):
        """Both ways, and what dom0 asked of the hypervisor meanwhile."""
        before, (frames, moved) = self.hypercalls(), self.traffic()
        rows = {}
        for key, flags in (("tcp_to_mbit_s", ""), ("tcp_from_mbit_s", "-R")):
            text = self.xen.run(
                f"iperf -c {address} -t {seconds} {flags} -f k", 60 + 10 * seconds
            ).text
            rates = re.findall(r"([\d.]+) Kbits/sec", text)
            if not rates or not float(rates[-1]):
                raise tools.ToolError(f"iperf to {address}:\n{text}")
            rows[key] = float(rates[-1]) / 1000
        (frames_then, moved_then), after = self.traffic(), self.hypercalls()
        frames, moved = frames_then - frames, moved_then - moved
        for what in before:
            rows[f"{what}_per_frame"] = (after[what] - before[what]) / frames
        calls = sum(after[what] - before[what] for what in before)
        rows["hypercalls_per_frame"] = calls / frames
        rows["hypercalls_per_mb"] = calls / moved * 1e6
        return rows

    def udp(self, address, seconds):
        """Received rates; None where the server did not report in three tries."""
        rows = {}
        for rate in UDP:
            rows[f"udp_{rate}m_mbit_s"] = None
            for _ in range(3):
                each = paced.rate_of(f"{rate}M", UDP_BYTES)
                words = (address, paced.IPERF_PORT, UDP_BYTES, each, seconds)
                command = f"paced send udp {' '.join(map(str, words))}"
                text = self.xen.run(command, 60 + 10 * seconds, check=False).text
                if text.startswith("{"):
                    done = paced.row_of(text)
                    took = max(done["sent_seconds"], seconds)
                    rows[f"udp_{rate}m_mbit_s"] = done["bytes"] * 8e-6 / took
                    break
        return rows

    def syscall_us(self):
        """What a system call of a process of dom0 takes: dd makes two for each byte."""
        calls = f"dd if=/dev/zero of=/dev/null bs=1 count={SYSCALLS // 2} 2>/dev/null"
        clock = "cut -d' ' -f1 /proc/uptime"
        begun, ended = map(float, self.xen.run(f"{clock}; {calls}; {clock}", 120).text.split())
        return (ended - begun) * 1e6 / SYSCALLS

    def measure(self, guest, pings, seconds):
        """All of one guest over the backend that is at work."""
        web = "web" if guest == "cell" else "linux"
        row = {"syscall_us": self.syscall_us(), "first_reply_ms": self.create(web)}
        row["memory_mib"] = DOMAINS[web][1]
        address = DOMAINS[web][3]
        fetch = f"wget -q -O /dev/null http://{address}/bytes/100000"
        harness.until("HTTP is served", lambda: self.xen.run(fetch, check=False).code == 0)
        row |= self.ping(address, pings)
        row |= self.http(address)
        if guest == "cell":
            # A cell has one app, so it is two domains.
            self.destroy("web")
            web, address = "flow", DOMAINS["flow"][3]
            self.create(web)
        row |= self.tcp(address, seconds)
        row |= self.udp(address, seconds)
        self.destroy(web)
        return row

    def flood(self, count):
        """Pings of a cell as fast as replies come; how many were lost."""
        self.create("web")
        command = f"/usr/bin/ping -n -q -f -c {count} {DOMAINS['web'][3]}"
        text = self.xen.run(command, 60 + count // 20).text
        found = re.search(r"(\d+) packets transmitted, (\d+) received", text)
        sent, came = map(int, found.groups())
        self.destroy("web")
        if sent != count:
            raise tools.ToolError(f"of {count} pings {sent} were sent")
        return sent - came


@contextlib.contextmanager
def booted(folder: Path, files: dict[str, bytes] | None = None) -> Iterator[Dom0]:
    """A Xen host that is up, with what the workload `xen` wants of it or with other files."""
    cells = ["httpd", "iperf"] if files is None else []
    with XenHost(folder, cells, dom0_files() if files is None else files) as xen:
        xen.bring_up()
        yield Dom0(xen)
