#!/usr/bin/env python3
"""The bypass beside the kernel's ways: plain forwarding, forwarding with conntrack and masquerade, a bridge, a plain XDP-FIB redirect.

usage: ./x bench bypass [--repeats N] [--seconds S] [--quick]

Each cell of the matrix is one load between two ends, through each path in turn within each repeat, in namespaces of the bench's own:

    ends    tap-tap, tap-veth, veth-tap, veth-veth. A tap is driven by bench/tapload.c, one frame per write and read, with a vnet header, writer on
            CPU 0 and reader on CPU 1; a veth's far end, in another namespace, by a packet socket in the same program.
    loads   64 and 1500 byte UDP frames in 1, 100 and 10,000 flows; 60 KB segmentation frames; over veths also TCP (iperf, 16 KB and 64 B
            writes, 1, 2 and 4 connections) and one-byte TCP round trips.
    paths   ip, nat (conntrack and masquerade), bridge, xdpfib, and ours: bypass (mode auto, given three seconds to choose) over each of ip and nat.

A rate is what the reader got; cpu_ns is both threads' CPU time, the kernel's work within their calls included, per frame read. A ratio is ours
divided by the kernel's same set-up (nat's by nat), the median over the repeats of ratios within one repeat, with the lowest and the
highest; `by CPU` is the same of the writer's CPU time per frame, in which the forwarding happens. `worst_cell` is the smallest median. Needs root. Nothing is left: namespaces, taps and programs go with the bench.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, BenchError, Results, note, run, terminate_cleanly

from lib import Namespace, Skip, need_program
from lib.tap import (ETH_IP4, GSO_TCPV4, NEEDS_CSUM, TCP, UDP, Inside, Tap, ethernet, ipv4, mac_bytes, transport, vnet_header)

PROGRAM = Path(os.environ.get("TOMBOLO_PROGRAM", ROOT / "target/release/tombolo"))
A, B, FAR = "10.1.0.2", "10.2.0.2", "10.2.0.1"
MAC = {"a": "02:00:00:00:0a:02", "b": "02:00:00:00:0b:02"}
NAT = """
table ip nat { chain post { type nat hook postrouting priority 100; oifname "rb" masquerade; }; }
table inet f { chain forward { type filter hook forward priority 0; policy drop; ct state established,related accept; iifname "ra" accept; }; }
"""
ENDS = ("tap-tap", "tap-veth", "veth-tap", "veth-veth")
CHOOSING_S = 4.5


class Setting:
    """A router `r` with interfaces ra and rb, each a tap or a veth into a namespace of its own (ha, hb), and one path between them."""

    def __init__(self, stack, folder, ends, path):
        self.folder, self.path, self.ends = folder, path, dict(zip("ab", ends.split("-")))
        self.router = stack.enter_context(Namespace())
        self.far, self.attached = {}, False
        stack.callback(self.close)
        self.router.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.disable_ipv6=1")
        for side, (near, peer) in {"a": ("10.1.0.1", A), "b": (FAR, B)}.items():
            name = f"r{side}"
            if self.ends[side] == "tap":
                self.router.ip("tuntap", "add", "dev", name, "mode", "tap", "vnet_hdr")
            else:
                far = self.far[side] = stack.enter_context(Namespace())
                self.router.ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(far))
                far.run("sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
                far.ip("link", "set", "eth0", "address", MAC[side])
                far.ip("address", "add", f"{peer}/{24 if path != 'bridge' else 8}", "dev", "eth0")
                far.ip("link", "set", "eth0", "up")
                if path != "bridge":
                    far.ip("route", "add", "default", "via", near)
            self.router.ip("link", "set", name, "up")
            if path != "bridge":
                self.router.ip("address", "add", f"{near}/24", "dev", name)
                self.router.ip("neighbour", "replace", peer, "lladdr", MAC[side], "dev", name, "nud", "permanent")
        if path == "bridge":
            self.router.ip("link", "add", "br0", "type", "bridge")
            self.router.ip("link", "set", "br0", "up")
            for side in "ab":
                self.router.ip("link", "set", f"r{side}", "master", "br0")
        if path.endswith("nat"):
            subprocess.run(["ip", "netns", "exec", str(self.router), "nft", "-f", "-"], input=NAT, text=True, check=True)
        if path == "xdpfib":
            for name in ("ra", "rb"):
                self.router.run("ip", "link", "set", "dev", name, "xdpdrv", "obj", folder / "xdp_fib.o", "sec", "xdp")
            for far in self.far.values():
                # Without NAPI at its far end a veth drops what is redirected to it; and checksums must be whole.
                far.run("ethtool", "-K", "eth0", "gro", "on", "tx", "off")
        if path.startswith("bypass"):
            self.cli("attach", "ra", "rb")
            self.attached = True
        self.mac = mac_bytes(self.router.ip("-br", "link", "show", "ra").split()[2])

    def cli(self, *words):
        env = dict(os.environ, TOMBOLO_RUNTIME=str(self.folder / "run"))
        return run(PROGRAM, "bypass", *words, "--netns", str(self.router), env=env)

    def close(self):
        if self.attached:
            self.cli("detach")

    def status(self):
        return {i["name"]: i for i in json.loads(self.cli("status", "--json"))["interfaces"]}

    def frame(self, load):
        to = mac_bytes(MAC["b"]) if self.path == "bridge" else self.mac
        if load == "gso_60k":
            body = transport(TCP, A, B, 3000, 80, bytes(60000), partial=True)
            return vnet_header(NEEDS_CSUM, GSO_TCPV4, 54, 1448, 34, 16) + ethernet(to, mac_bytes(MAC["a"]), ETH_IP4, ipv4(A, B, TCP, body))
        size = int(load.split("_")[0].removeprefix("udp"))
        body = transport(UDP, A, B, 1024, 9, bytes(size - 42 - 4))
        return bytes(10) + ethernet(to, mac_bytes(MAC["a"]), ETH_IP4, ipv4(A, B, UDP, body))

    def load(self, load, seconds):
        """Frames through the path: a row."""
        file = self.folder / "frame"
        file.write_bytes(self.frame(load))
        flows = int(load.split("_")[1]) if load.startswith("udp") else 1
        words = [f"tap:r{side}" if self.ends[side] == "tap" else f"packet:eth0@/run/netns/{self.far[side]}" for side in "ab"]
        argv = [self.folder / "tapload", *words, seconds, file, flows, 0, (os.cpu_count() or 1) - 1]
        row = json.loads(self.router.run(*argv, seconds=seconds + 30).stdout)
        row["rate"] = row["read"] / row["seconds"]
        # The forwarding happens within the writer's call: this is what a machine with other work disturbs least.
        row["writer_ns"] = row["writer_cpu_s"] * 1e9 / row["written"] if row["written"] else None
        row["cpu_ns"] = (row["writer_cpu_s"] + row["reader_cpu_s"]) * 1e9 / row["read"] if row["read"] else None
        return row

    def tcp(self, write, connections, seconds):
        """iperf from A to B: Mbit/s."""
        server = subprocess.Popen(["ip", "netns", "exec", str(self.far["b"]), "taskset", "-c", "1", "iperf", "-s"],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(0.3)
            client = ["taskset", "-c", "0", "iperf", "-c", B, "-l", write, "-P", connections, "-t", max(1, int(seconds)), "-y", "C"]
            lines = self.far["a"].run(*client, seconds=seconds + 30).stdout.split()
            rates = [int(line.split(",")[8]) for line in lines]
            if not rates:
                raise BenchError("iperf printed nothing")
            return {"rate": rates[-1] / 1e6}
        finally:
            server.kill()
            server.wait()

    def round_trips(self, seconds):
        """One byte there and back, blocking at both ends: round trips a second, p50 and p99 in microseconds."""
        with Inside(self.far["b"]):
            listener = socket.create_server((B, 7000))
        with Inside(self.far["a"]):
            client = socket.create_connection((B, 7000), timeout=10)
        server, _ = listener.accept()

        def serve():
            with contextlib.suppress(OSError):
                while server.send(server.recv(1) or b""):
                    pass

        # A process for the other end, so that the interpreter's lock is not what is measured.
        child = os.fork()
        if child == 0:
            client.close()
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            serve()
            os._exit(0)
        server.close()
        listener.close()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                start = time.perf_counter_ns()
                client.send(b"x")
                if not client.recv(1):
                    raise BenchError("the other end closed the connection")
                times.append(time.perf_counter_ns() - start)
        finally:
            client.close()
            os.waitpid(child, 0)
        times.sort()
        return {"rate": len(times) / seconds, "p50_us": times[len(times) // 2] / 1e3, "p99_us": times[int(len(times) * 0.99)] / 1e3}

    def measure(self, load, seconds):
        if load == "tcp_rr":
            work = self.round_trips
        elif load.startswith("tcp"):
            _, write, connections = load.split("_")
            work = lambda s: self.tcp(write, int(connections), s)  # noqa: E731
        else:
            work = lambda s: self.load(load, s)  # noqa: E731
        if self.attached and not load.startswith("tcp"):
            # The mode is chosen by the traffic, so it is given traffic to choose by.
            work(CHOOSING_S)
        else:
            work(min(0.3, seconds) if not load.startswith("tcp_1") else seconds)
        row = work(seconds)
        if self.attached:
            status = self.status()["ra"]
            row.update(mode=status["mode"], why=status["why"], taken=status["taken"], passed=status["passed"])
        return row


def loads(ends, quick):
    if quick:
        return ["udp64_1", "udp1500_1", "gso_60k"] + (["tcp_16K_1", "tcp_rr"] if ends == "veth-veth" else [])
    common = ["udp64_1", "udp64_100", "udp64_10000", "udp1500_1", "udp1500_10000", "gso_60k"]
    return common + ([f"tcp_{w}_{n}" for w in ("64", "16K") for n in (1, 2, 4)] + ["tcp_rr"] if ends == "veth-veth" else [])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--ends", default=",".join(ENDS))
    parser.add_argument("--loads", help="only those that begin with one of these, by commas")
    parser.add_argument("--quick", action="store_true", help="fewer loads")
    options = parser.parse_args()
    terminate_cleanly()
    for name in ("nft", "iperf", "ethtool", "clang", "gcc"):
        need_program(name)
    results = Results("bypass")
    with tempfile.TemporaryDirectory(prefix="tmb-bench-") as folder:
        folder = Path(folder)
        run("gcc", "-O2", "-o", folder / "tapload", ROOT / "bench/tapload.c", "-lpthread")
        run("clang", "-O2", "-g", "-target", "bpf", f"-I/usr/include/{os.uname().machine}-linux-gnu", "-c", ROOT / "bench/xdp_fib.bpf.c", "-o",
            folder / "xdp_fib.o")
        for repeat in range(options.repeats):
            for ends in options.ends.split(","):
                for load in loads(ends, options.quick):
                    if options.loads and not load.startswith(tuple(options.loads.split(","))):
                        continue
                    for path in ("ip", "bypass", "nat", "bypass_nat", "bridge", "xdpfib"):
                        if path == "xdpfib" and load.startswith("tcp_64"):
                            continue
                        with contextlib.ExitStack() as stack:
                            row = Setting(stack, folder, ends, path).measure(load, options.seconds)
                        results.add(ends=ends, load=load, path=path, repeat=repeat, **row)
                        note(f"{repeat + 1}/{options.repeats} {ends:9} {load:13} {path:10} {row['rate']:12.0f} {row.get('mode', '')}")
    summarise(results, options)


def summarise(results, options):
    cells, work = {}, {}
    for row in results.rows:
        if not row["path"].startswith("bypass"):
            continue
        same = dict(ends=row["ends"], load=row["load"], repeat=row["repeat"], path=row["path"].replace("bypass_", "").replace("bypass", "ip"))
        kernel, spent = results.values("rate", **same), results.values("writer_ns", **same)
        if kernel and kernel[0]:
            name = f"{row['ends']} {row['load']}" + (" nat" if row["path"].endswith("nat") else "")
            cells.setdefault(name, []).append(row["rate"] / kernel[0])
            if spent and row.get("writer_ns"):
                work.setdefault(name, []).append(spent[0] / row["writer_ns"])
    if not cells:
        raise BenchError("nothing was measured")
    table = {name: {"median": round(statistics.median(v), 3), "low": round(min(v), 3), "high": round(max(v), 3)} for name, v in cells.items()}
    for name, values in work.items():
        table[name]["writer_ns"] = round(statistics.median(values), 3)
    print(f"{'cell':32}{'ratio':>8}{'low':>8}{'high':>8}{'by CPU':>8}")
    for name, cell in table.items():
        by_cpu = f"{cell['writer_ns']:8.2f}" if "writer_ns" in cell else ""
        print(f"{name:32}{cell['median']:8.2f}{cell['low']:8.2f}{cell['high']:8.2f}{by_cpu}")
    worst = min(table, key=lambda name: table[name]["median"])
    get = lambda name: table.get(name, {}).get("median")  # noqa: E731
    ratios = {"tap_tap_64": get("tap-tap udp64_1"), "tap_tap_64_nat": get("tap-tap udp64_1 nat"), "worst_cell": table[worst]["median"],
              "gso_60k": get("tap-tap gso_60k"), "tcp_rr": get("veth-veth tcp_rr")}
    results.finish(ratios=ratios, worst_cell_name=worst, cells=table, repeats=options.repeats, seconds=options.seconds)


if __name__ == "__main__":
    try:
        main()
    except (BenchError, TimeoutError, RuntimeError, subprocess.SubprocessError, Skip) as error:
        sys.exit(f"bench bypass: {error}")
    except KeyboardInterrupt:
        sys.exit("bench bypass: stopped")
