#!/usr/bin/env python3
"""Cells and Linux as guests of Xen, each over Linux's netback and over our backend, on real Xen 4.17 under emulation.

usage: ./x bench xen [--boots N] [--rounds N] [--flood N]

Real Xen is booted `--boots` times (QEMU, no KVM), with Debian's Linux as dom0. In each boot, `--rounds` times, both backends are
measured one after the other, and with each of them a cell and a Linux guest (PVH, Debian's kernel, busybox httpd, iperf 2). The order
changes from round to round. Everything is measured in dom0, from the other side of the network:

    first_reply_ms   `xl create` to the first ICMP echo reply (one request every 20 ms)
    ping_us          ICMP echo, one after the other: average of --pings, with least and most
    http_mb_s        GET of 100 KB to 100 MB by `ab`, 1 to 40 sessions, a connection for each request
    tcp_mbit_s       iperf, to the guest and from it
    udp_mbit_s       iperf, received of what was offered
    hypercalls       of dom0 during both TCP runs, per frame: grant copies, maps and unmaps in batches, and events sent
    memory_mib       what the domain is given

An emulated Xen varies tenfold from boot to boot, so rates are compared within one boot only. Ratios are medians over all rounds. The
first boot ends with a flood of --flood pings to a cell over our backend; how many were lost is in the last line. The kernel probes that
count stay in place in all measurements, of both backends. A segmentation frame counts as one frame.
"""

import argparse
import math
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, BenchError, Results, note, ratio, run_bench, until
from lib.fabric import PROGRAM
from lib.xen import XenHost, fabric_files, linux_guest

sys.path.insert(0, str(ROOT / "tools/guest"))
from build import program_files  # noqa: E402

HOST = "10.87.0.3"
BACKENDS = ("netback", "tombolo")
GUESTS = ("cell", "linux")
# Domain: its image, its memory in MiB, its MAC and its address. A cell has one app, so it is two domains.
DOMAINS = {
    "web": ("httpd", 32, "00:16:3e:00:00:20", "10.87.0.20"),
    "flow": ("iperf", 32, "00:16:3e:00:00:22", "10.87.0.22"),
    "linux": (None, 160, "00:16:3e:00:00:21", "10.87.0.21"),
}
# Bytes of the reply, and sessions at once.
HTTP = ((100_000, 1), (100_000, 10), (100_000, 40), (1_000_000, 1), (1_000_000, 10), (1_000_000, 40), (10_000_000, 1), (10_000_000, 4), (100_000_000, 1))
# A measurement moves at least so much, where its sessions do not move more by themselves.
HTTP_BYTES = 8_000_000
# Offered, in Mbit/s.
UDP = (2, 10, 50)
# Functions of dom0's kernel that make one hypercall for a batch each, and what they do.
HYPERCALLS = {"gnttab_batch_copy": "copy", "gnttab_map_refs": "map", "gnttab_unmap_refs": "unmap", "notify_remote_via_irq": "event", "evtchn_ioctl": "event"}
TRACE = "/sys/kernel/tracing"

FABRIC = f"""
name = "xen"
[network.lan]
subnet = "10.87.0.0/24"
[tap.host]
device = "tap0"
ip = "{HOST}"
""" + "".join(f"""
[port.{name}]
kind = "xen"
mac = "{mac}"
ip = "{address}"
""" for name, (_, _, mac, address) in DOMAINS.items())

LINUX_INIT = f"""#!/bin/busybox sh
export PATH=/bin:/usr/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
exec </dev/console >/dev/console 2>&1
insmod /xen-netfront.ko
until [ -e /sys/class/net/eth0 ]; do usleep 10000; done
ip link set lo up
ip addr add {DOMAINS['linux'][3]}/24 dev eth0
ip link set eth0 up
mkdir -p /tmp/www/bytes
for size in {' '.join(str(size) for size in sorted({size for size, _ in HTTP}))}; do
    truncate -s $size /tmp/www/bytes/$size
done
httpd -h /tmp/www
iperf -s >/dev/null 2>&1 &
exec iperf -s -u >/dev/null 2>&1
"""

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
    lines = [f"name='{name}'", "type='pvh'", f"memory={memory}", "tsc_mode='native'", "on_poweroff='destroy'", "on_reboot='preserve'", "on_crash='preserve'"]
    if app:
        lines += [f"kernel='/cells/{app}'", f"cmdline='ip={address}/24'"]
    else:
        lines += ["kernel='/domu/kernel'", "ramdisk='/domu/ramdisk'", "extra='console=hvc0 rdinit=/init quiet loglevel=2 mitigations=off nokaslr'"]
    return "\n".join([*lines, f"vif=['mac={mac},{vif}']"]).encode() + b"\n"


def dom0_files():
    """What dom0 has beside what its tests have."""
    ramdisk, kernel = linux_guest(LINUX_INIT, {}, ["iperf"])
    files = fabric_files(FABRIC) | {"domu/kernel": kernel, "domu/ramdisk": ramdisk}
    for program in ("ab", "ping"):
        path = shutil.which(program)
        if not path:
            raise BenchError(f"no {program}: ./x setup http guests installs it")
        for name, source in program_files(path):
            files.setdefault(f"usr/bin/{program}" if str(source) == path else name, source.read_bytes())
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
            self.xen.run("ip addr flush dev br0; rmmod xen_netback; tombolo up -d /tombolo.toml", 120)
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
        begun, replied = map(float, self.xen.run(f"first-reply /domu/{self.backend}/{name}.cfg {address}", 300).text.split())
        return 1000 * (replied - begun)

    def destroy(self, name):
        self.xen.run(f"xl destroy {name}")
        until(f"{name} is gone", lambda: self.xen.state(name) is None)
        until("its device is gone", lambda: not self.xen.run("xenstore-list backend/vif", check=False).text.strip().isdigit())

    def hypercalls(self):
        text = self.xen.run(f"cat {TRACE}/kprobe_profile").text
        counts = dict.fromkeys(HYPERCALLS.values(), 0)
        for function, hits in re.findall(r"^\s*(\w+)\s+(\d+)", text, re.M):
            counts[HYPERCALLS[function]] += int(hits)
        return counts

    def frames(self):
        """That passed between dom0 and its guest, both ways."""
        folder = f"/sys/class/net/{self.interface()}/statistics"
        return sum(map(int, self.xen.run(f"cat {folder}/rx_packets {folder}/tx_packets").text.split()))

    def ping(self, address, count):
        text = self.xen.run(f"/usr/bin/ping -n -q -i 0.01 -c {count} {address}", 60 + count).text
        came = int(re.search(r"(\d+) received", text)[1])
        if came < count:
            raise BenchError(f"of {count} pings {came} were answered by {address}:\n{text}")
        least, average, most = re.search(r"= ([\d.]+)/([\d.]+)/([\d.]+)", text).groups()
        return {"ping_min_us": 1000 * float(least), "ping_us": 1000 * float(average), "ping_max_us": 1000 * float(most)}

    def http(self, address):
        rows = {}
        for size, sessions in HTTP:
            requests = max(sessions, math.ceil(HTTP_BYTES / size)) if size < 100_000_000 else 1
            text = self.xen.run(f"ab -q -s 300 -n {requests} -c {sessions} http://{address}/bytes/{size} 2>&1", 600).text
            took = re.search(r"Time taken for tests:\s+([\d.]+)", text)
            failed = re.search(r"Failed requests:\s+(\d+)", text)
            moved = re.search(r"HTML transferred:\s+(\d+)", text)
            if not took or not failed or int(failed[1]) or int(moved[1]) < size * requests:
                raise BenchError(f"ab of {size} bytes by {sessions} sessions at {address}:\n{text}")
            rows[f"http_{size // 1000}k_{sessions}_mb_s"] = size * requests / float(took[1]) / 1e6
        return rows

    def tcp(self, address, seconds):
        """Both ways, and what dom0 asked of the hypervisor meanwhile."""
        before, frames = self.hypercalls(), self.frames()
        rows = {}
        for key, flags in (("tcp_to_mbit_s", ""), ("tcp_from_mbit_s", "-R")):
            text = self.xen.run(f"iperf -c {address} -t {seconds} {flags} -f k", 60 + 10 * seconds).text
            rates = re.findall(r"([\d.]+) Kbits/sec", text)
            if not rates or not float(rates[-1]):
                raise BenchError(f"iperf to {address}:\n{text}")
            rows[key] = float(rates[-1]) / 1000
        frames, after = self.frames() - frames, self.hypercalls()
        for what in before:
            rows[f"{what}_per_frame"] = (after[what] - before[what]) / frames
        rows["hypercalls_per_frame"] = sum(after[what] - before[what] for what in before) / frames
        return rows

    def udp(self, address, seconds):
        """A rate of which no server's report came in three tries is named in `udp_failed`."""
        rows, failed = {}, []
        for rate in UDP:
            for _ in range(3):
                text = self.xen.run(f"iperf -u -c {address} -b {rate}M -t {seconds} -f k", 60 + 10 * seconds, check=False).text
                # The server's report comes last, with its losses.
                if found := re.findall(r"([\d.]+) Kbits/sec\s+[\d.]+ ms\s+(\d+)/\s*(\d+)", text):
                    rows[f"udp_{rate}m_mbit_s"] = float(found[-1][0]) / 1000
                    break
            else:
                note(f"iperf of datagrams at {rate} Mbit/s to {address} has no report of the server:\n{text}")
                rows[f"udp_{rate}m_mbit_s"] = None
                failed.append(rate)
        return rows | {"udp_failed": failed}


def measure(dom0, guest, options):
    """All of one guest over the backend that is at work."""
    row = {}
    web = "web" if guest == "cell" else "linux"
    row["first_reply_ms"] = dom0.create(web)
    row["memory_mib"] = DOMAINS[web][1]
    address = DOMAINS[web][3]
    until("HTTP is served", lambda: dom0.xen.run(f"wget -q -O /dev/null http://{address}/bytes/100000", check=False).code == 0)
    row |= dom0.ping(address, options.pings)
    row |= dom0.http(address)
    if guest == "cell":
        dom0.destroy("web")
        web, address = "flow", DOMAINS["flow"][3]
        dom0.create(web)
    row |= dom0.tcp(address, options.seconds)
    row |= dom0.udp(address, options.seconds)
    dom0.destroy(web)
    return row


def flood(dom0, count):
    """Pings as fast as replies come; how many were lost."""
    dom0.use("tombolo")
    dom0.create("web")
    text = dom0.xen.run(f"/usr/bin/ping -n -q -f -c {count} {DOMAINS['web'][3]}", 60 + count // 20).text
    sent, came = map(int, re.search(r"(\d+) packets transmitted, (\d+) received", text).groups())
    note(text.strip().splitlines()[-1])
    dom0.destroy("web")
    if sent != count:
        raise BenchError(f"of {count} pings {sent} were sent")
    return sent - came


def http_mean(row):
    """The geometric mean of the rates of all sizes and sessions."""
    rates = [row[f"http_{size // 1000}k_{sessions}_mb_s"] for size, sessions in HTTP]
    return math.exp(statistics.fmean(math.log(rate) for rate in rates))


def tcp_mean(row):
    return math.sqrt(row["tcp_to_mbit_s"] * row["tcp_from_mbit_s"])


def ratios(rows):
    """Medians over the rounds; each ratio is of two measurements of one round."""
    rounds = {}
    for row in rows:
        rounds.setdefault((row["boot"], row["round"]), {})[row["guest"], row["backend"]] = row
    whole = [found for found in rounds.values() if len(found) == len(GUESTS) * len(BACKENDS)]

    def middle(value, ours, peers):
        return statistics.median(ratio(value(found[our]), value(found[peer])) for found in whole for our, peer in zip(ours, peers, strict=True))

    cells, linuxes = ([(guest, backend) for backend in BACKENDS] for guest in GUESTS)
    ours, netback = [("linux", "tombolo")], [("linux", "netback")]
    return {
        "http_cell_vs_linux": middle(http_mean, cells, linuxes),
        "tcp_cell_vs_linux": middle(tcp_mean, cells, linuxes),
        "ping_cell_vs_linux": middle(lambda row: row["ping_us"], cells, linuxes),
        "first_reply_cell_vs_linux": middle(lambda row: row["first_reply_ms"], cells, linuxes),
        "backend_tcp_vs_netback": middle(tcp_mean, ours, netback),
        "hypercalls_per_frame_vs_netback": middle(lambda row: row["hypercalls_per_frame"], ours, netback),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boots", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--pings", type=int, default=200)
    parser.add_argument("--seconds", type=int, default=3, help="of each iperf run")
    parser.add_argument("--flood", type=int, default=100_000, help="pings of the flood; 0: none")
    options = parser.parse_args()
    if not PROGRAM.exists():
        raise BenchError(f"{PROGRAM} is not built: run ./x build")
    results, lost = Results("xen"), None
    for boot in range(options.boots):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            with XenHost(folder, ["httpd", "iperf"], dom0_files()) as xen:
                note(f"boot {boot + 1}/{options.boots}: Xen and dom0 were up after {xen.bring_up():.1f} s")
                dom0 = Dom0(xen)
                for turn in range(options.rounds):
                    is_odd = (boot + turn) % 2
                    for backend in BACKENDS[::-1] if is_odd else BACKENDS:
                        dom0.use(backend)
                        for guest in GUESTS[::-1] if is_odd else GUESTS:
                            begun = time.monotonic()
                            row = measure(dom0, guest, options)
                            results.add(boot=boot, round=turn, backend=backend, guest=guest, **row)
                            note(f"{guest} over {backend}: first reply {row['first_reply_ms']:.0f} ms, ping {row['ping_us']:.0f} us, HTTP {http_mean(row):.1f} MB/s, "
                                 f"TCP {tcp_mean(row):.0f} Mbit/s, {row['hypercalls_per_frame']:.2f} hypercalls per frame ({time.monotonic() - begun:.0f} s)")
                if boot == 0 and options.flood:
                    lost = flood(dom0, options.flood)
    columns = [(guest, backend) for guest in GUESTS for backend in BACKENDS]
    print(f"{'':24}" + "".join(f"{guest + ' ' + backend:>16}" for guest, backend in columns) + f"   (medians of {options.boots} boots, {options.rounds} rounds each)")
    for key in (key for key in results.rows[0] if key not in ("boot", "round", "backend", "guest", "udp_failed")):
        values = [results.median(key, guest=guest, backend=backend) for guest, backend in columns]
        print(f"{key:24}" + "".join("               -" if value is None else f"{value:16.2f}" for value in values))
    failed = [f"{row['guest']} over {row['backend']}, boot {row['boot']}: UDP at {rate} Mbit/s" for row in results.rows for rate in row["udp_failed"]]
    results.finish(boots=options.boots, rounds=options.rounds, ratios=ratios(results.rows), floodping_lost=lost, failed=failed)


if __name__ == "__main__":
    run_bench(main)
