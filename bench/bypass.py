#!/usr/bin/env python3
"""The bypass beside the kernel's ways: plain forwarding, forwarding with conntrack and masquerade, a bridge, a plain XDP-FIB redirect.

usage: ./x bench bypass [--cells PATTERN] [--short] [--repeats N] [--seconds S] [--no-perf]

Each cell of the matrix is one load between two ends. All paths of it are set up side by side, in namespaces of the bench's own, and measured in turn, slice
by slice, so that what else the machine does meets all of them.

    ends    tap-tap, tap-veth, veth-tap, veth-veth. A tap is driven by bench/pathload.c, one frame per system call and with a vnet header, as
            a monitor of microVMs does; frames of the socket loads come from another kernel namespace's tap behind it.
    loads   udp64_F, udp1500_F: UDP frames as fast as one writer makes them, in F flows; trip64: one frame at a time, from write to read;
            gso_60k: segmentation frames; udp_send: a UDP socket; tcp_W_N_C: N connections that write W bytes at a time, on C cores;
            tcp_rr: one byte there and back.
    paths   ip, nat (conntrack and masquerade), bridge, xdpfib, and ours: bypass (mode auto, given time to choose) over each of ip and nat.
            At tap-tap also two bounds: drop (the tap's write alone, XDP_DROP) and straight (an XDP program that only redirects).

`rate` is what the receiver got a second (of trip64 and tcp_rr: what the median time allows), cpu_ns the CPU time per frame (per kilobyte of a stream, per round
trip), as the kernel accounts it: the writer's, in whose calls the forwarding is done, or all threads' for sockets. A cell is ours divided by the kernel's same
set-up (nat's by nat): the median over the repeats of ratios within one repeat, their lowest and highest, and the same by CPU time.
`worst_cell` is the smallest median. Where the machine has hardware counters, `perf stat` adds instructions and cycles per frame.
Needs root. Nothing is left: namespaces, taps and programs go with the bench.
"""

import argparse
import contextlib
import json
import os
import re
import select
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from common import ROOT, BenchError, Results, note, perf, run, run_bench

from lib import Namespace, need_program
from lib.tap import ETH_IP4, GSO_TCPV4, NEEDS_CSUM, TCP, UDP, ethernet, ipv4, mac_bytes, transport, vnet_header

PROGRAM = Path(os.environ.get("TOMBOLO_PROGRAM", ROOT / "target/release/tombolo"))
A, B = "10.1.0.2", "10.2.0.2"
NEAR = {"a": "10.1.0.1", "b": "10.2.0.1"}
FAR = {"a": A, "b": B}
MAC = {"a": "02:00:00:00:0a:02", "b": "02:00:00:00:0b:02"}
NAT = """
table ip nat { chain post { type nat hook postrouting priority 100; oifname "rb" masquerade; }; }
table inet f { chain forward { type filter hook forward priority 0; policy drop; ct state established,related accept; iifname "ra" accept; }; }
"""
ENDS = ("tap-tap", "tap-veth", "veth-tap", "veth-veth")
PATHS = ("ip", "bypass", "nat", "bypass_nat", "bridge", "xdpfib")
BOUNDS = ("drop", "straight")
REFERENCES = ("bridge", "xdpfib", *BOUNDS)
FRAMES = ("udp64_1", "udp64_100", "udp64_10000", "udp1500_1", "udp1500_100", "udp1500_10000", "trip64", "gso_60k")
SOCKETS = ("udp_send", "tcp_rr", *(f"tcp_{write}_{n}_{cores}" for write in ("64", "16K") for n in (1, 2, 4) for cores in (1, 2)))
SHORT = ("udp64_1", "udp64_10000", "udp1500_1", "trip64", "gso_60k", "tcp_rr", "tcp_16K_1_2", "tcp_64_1_2", "udp_send")
WARM_S = 0.1
# A choice takes three windows of one second.
CHOOSING_S = 8
COUNTERS = "task-clock,context-switches,instructions,cycles"


def is_socket(load):
    return load.startswith("tcp") or load == "udp_send"


class Setting:
    """A router `r` with interfaces ra and rb, each a tap or a veth with a namespace behind it (an end of its own), and one path between them."""

    def __init__(self, stack, folder, ends, path):
        self.folder, self.path, self.ends = folder, path, dict(zip("ab", ends.split("-")))
        self.router = stack.enter_context(Namespace())
        self.far, self.attached, self.process = {}, False, None
        stack.callback(self.close)
        self.router.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.disable_ipv6=1")
        if path == "bridge":
            self.router.ip("link", "add", "br0", "type", "bridge")
            self.router.ip("link", "set", "br0", "up")
        for side in "ab":
            self.make_side(stack, side)
        self.start_load()
        if path.endswith("nat"):
            subprocess.run(["ip", "netns", "exec", str(self.router), "nft", "-f", "-"], input=NAT, text=True, check=True)
        if path in REFERENCES and path != "bridge":
            section = "xdp" if path == "xdpfib" else path
            for name in ("ra", "rb"):
                self.router.run("ip", "link", "set", "dev", name, "xdpdrv", "obj", folder / "xdp_fib.o", "sec", section)
            for far in self.far.values():
                # Without NAPI at its far end a veth drops what is redirected to it; and checksums must be whole.
                far.run("ethtool", "-K", "eth0", "gro", "on", "tx", "off")
        if path.startswith("bypass"):
            self.cli("attach", "ra", "rb")
            self.attached = True
        self.mac = mac_bytes(self.router.ip("-br", "link", "show", "ra").split()[2])

    def make_side(self, stack, side):
        name, far, bridged = f"r{side}", stack.enter_context(Namespace()), self.path == "bridge"
        self.far[side] = far
        far.run("sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
        if self.ends[side] == "tap":
            self.router.ip("tuntap", "add", "dev", name, "mode", "tap", "vnet_hdr")
            far.ip("tuntap", "add", "dev", "eth0", "mode", "tap", "vnet_hdr")
        else:
            self.router.ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(far))
        far.ip("link", "set", "eth0", "address", MAC[side])
        far.ip("address", "add", f"{FAR[side]}/{8 if bridged else 24}", "dev", "eth0")
        far.ip("link", "set", "eth0", "up")
        self.router.ip("link", "set", name, "up")
        if bridged:
            self.router.ip("link", "set", name, "master", "br0")
            other = "ba"["ab".index(side)]
            far.ip("neighbour", "replace", FAR[other], "lladdr", MAC[other], "dev", "eth0", "nud", "permanent")
            return
        self.router.ip("address", "add", f"{NEAR[side]}/24", "dev", name)
        self.router.ip("neighbour", "replace", FAR[side], "lladdr", MAC[side], "dev", name, "nud", "permanent")
        near = self.router.ip("-br", "link", "show", name).split()[2]
        far.ip("neighbour", "replace", NEAR[side], "lladdr", near, "dev", "eth0", "nud", "permanent")
        far.ip("route", "add", "default", "via", NEAR[side])

    def start_load(self):
        space = {side: f"/run/netns/{self.far[side]}" for side in "ab"}
        words = [f"tap:r{side}:{space[side]}" if self.ends[side] == "tap" else f"veth:{space[side]}" for side in "ab"]
        argv = ["ip", "netns", "exec", str(self.router), str(self.folder / "pathload"), *words]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def load_pid(self):
        """The load's process: `ip netns exec` becomes it."""
        return self.process.pid

    def cli(self, *words):
        env = dict(os.environ, TOMBOLO_RUNTIME=str(self.folder / "run"))
        return run(PROGRAM, "bypass", *words, "--netns", str(self.router), env=env)

    def close(self):
        if self.process:
            self.process.kill()
            self.process.communicate()
        if self.attached:
            self.cli("detach")

    def status(self):
        return {i["name"]: i for i in json.loads(self.cli("status", "--json"))["interfaces"]}

    def frame(self, load):
        to = mac_bytes(MAC["b"]) if self.path == "bridge" else self.mac
        if load == "gso_60k":
            body = transport(TCP, A, B, 3000, 80, bytes(60000), partial=True)
            return vnet_header(NEEDS_CSUM, GSO_TCPV4, 54, 1448, 34, 16) + ethernet(to, mac_bytes(MAC["a"]), ETH_IP4, ipv4(A, B, TCP, body))
        size = 64 if load == "trip64" else int(load.split("_")[0].removeprefix("udp"))
        # 4 bytes of a frame's size are its check sequence, which no driver sees.
        body = transport(UDP, A, B, 1024, 9, bytes(size - 42 - 4))
        return bytes(10) + ethernet(to, mac_bytes(MAC["a"]), ETH_IP4, ipv4(A, B, UDP, body))

    def command(self, load, warm, seconds):
        parts = load.split("_")
        if load == "tcp_rr":
            return f"rr {warm} {seconds} {B}"
        if load == "udp_send":
            return f"udp {warm} {seconds} {B} 64"
        if parts[0] == "tcp":
            return f"tcp {warm} {seconds} {B} {parts[1].replace('K', '')}{'' if parts[1].isdigit() else '000'} {parts[2]} {parts[3]}"
        file = self.folder / f"frame-{load}-{self.router}"
        if not file.exists():
            file.write_bytes(self.frame(load))
        return f"trip {warm} {seconds} {file}" if load == "trip64" else f"frames {warm} {seconds} {file} {parts[1] if parts[0] != 'gso' else 1}"

    def ask(self, load, warm, seconds):
        """One load: what bench/pathload.c counted."""
        self.process.stdin.write(self.command(load, warm, seconds) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], warm + seconds + 20)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.process.kill()
            raise BenchError(f"{self.path}, {load}: no answer from the load: {self.process.stderr.read().strip() or 'it hangs'}")
        return json.loads(line)

    def settle(self, load):
        """Gives the mode chooser traffic to choose by: until it has, or had the time to."""
        if not self.attached:
            return
        small = load.startswith("udp") and not is_socket(load)
        end = time.monotonic() + (CHOOSING_S if small else 1.5)
        while time.monotonic() < end:
            self.ask(load, 0, 1.0 if small else 0.5)
            if small and (self.ends["a"] != "tap" or self.ends["b"] != "tap" or self.status()["ra"]["mode"] == "xdp"):
                return

    def measure(self, load, seconds):
        """A row."""
        row = self.ask(load, WARM_S, seconds)
        if load in ("trip64", "tcp_rr"):
            if "p50_ns" not in row:
                raise BenchError(f"{self.path}, {load}: nothing came back")
            row["rate"] = 1e9 / row["p50_ns"]
        elif self.path == "drop":
            row["rate"] = row["sent"] / row["seconds"]
        else:
            row["rate"] = (row["got_bytes"] if load.startswith("tcp") else row["got"]) / row["seconds"]
        cpu, units = row["sent_cpu_s"], row["sent"]
        if is_socket(load):
            cpu += row["got_cpu_s"] + row["carried_cpu_s"]
            units = {"tcp_rr": row["sent"], "udp_send": row["got"]}.get(load, row["got_bytes"] / 1000)
        row["cpu_ns"] = cpu * 1e9 / units if units else None
        return row

    def counters(self, load, seconds):
        """perf's counters over a slice, per call of the sender."""
        with perf("stat", "-x,", "-e", COUNTERS, "-p", self.load_pid()) as said:
            row = self.ask(load, 0, seconds)
        values = {}
        for line in said[0].splitlines():
            fields = line.split(",")
            with contextlib.suppress(ValueError, IndexError):
                values[fields[2]] = float(fields[0]) / max(1, row["sent"])
        return values


def prepare(folder):
    """Compiles what the settings need into their folder."""
    run("gcc", "-O2", "-o", folder / "pathload", ROOT / "bench/pathload.c", "-lpthread")
    run("clang", "-O2", "-g", "-target", "bpf", f"-I/usr/include/{os.uname().machine}-linux-gnu", "-c", ROOT / "bench/xdp_fib.bpf.c", "-o",
        folder / "xdp_fib.o")


def has_hardware_counters():
    if not shutil.which("perf"):
        return False
    done = subprocess.run(["perf", "stat", "-x,", "-e", "instructions", "true"], capture_output=True, text=True)
    return done.returncode == 0 and "not supported" not in done.stderr and "not counted" not in done.stderr


def paths_of(ends, load):
    bounds = BOUNDS if ends == "tap-tap" and load == "udp64_1" else ()
    return PATHS + bounds


def matrix(options):
    """(ends, loads) of what was asked for."""
    wanted = re.compile(options.cells or "")
    loads = [load for load in FRAMES + SOCKETS if not options.short or load in SHORT]
    for ends in ENDS:
        chosen = [load for load in loads if wanted.search(f"{ends} {load}")]
        if chosen:
            yield ends, chosen


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, help="[default: 5; with --short 3]")
    parser.add_argument("--seconds", type=float, default=0.2, help="length of a slice [default: 0.2]")
    parser.add_argument("--cells", metavar="PATTERN", help="only those whose `ENDS LOAD` the regular expression finds")
    parser.add_argument("--short", action="store_true", help="fewer loads and repeats")
    parser.add_argument("--no-perf", action="store_true", help="no hardware counters")
    options = parser.parse_args()
    options.repeats = options.repeats or (3 if options.short else 5)
    for name in ("nft", "ethtool", "clang", "gcc"):
        need_program(name)
    if (os.cpu_count() or 1) < 2:
        raise BenchError("it needs two CPUs: one for each end")
    results = Results("bypass")
    with_perf = not options.no_perf and has_hardware_counters()
    with tempfile.TemporaryDirectory(prefix="tmb-bench-", ignore_cleanup_errors=True) as folder:
        folder = Path(folder)
        prepare(folder)
        for ends, chosen in matrix(options):
            with contextlib.ExitStack() as stack:
                settings = {path: Setting(stack, folder, ends, path) for path in paths_of(ends, chosen[0])}
                for number, load in enumerate(chosen):
                    measure_cell(results, options, settings, ends, load, number == 0 or chosen[number - 1] in ("trip64", "gso_60k"), with_perf)
    summarise(results, options)


def measure_cell(results, options, settings, ends, load, is_new_kind, perf):
    """All paths of one load, slice by slice."""
    wanted = {path: settings[path] for path in paths_of(ends, load) if path in settings}
    if is_new_kind:
        for setting in wanted.values():
            setting.settle(load)
    for repeat in range(options.repeats):
        for path, setting in wanted.items():
            if path in REFERENCES and repeat % 2:
                continue
            row = setting.measure(load, options.seconds)
            if perf and repeat == 0:
                row["perf"] = setting.counters(load, options.seconds)
            if setting.attached and repeat == options.repeats - 1:
                status = setting.status()["ra"]
                row.update(mode=status["mode"], why=status["why"], by_reason=status["by_reason"])
            results.add(ends=ends, load=load, path=path, repeat=repeat, **row)
    rates = [f"{path} {results.median('rate', ends=ends, load=load, path=path):.4g}" for path in wanted]
    note(f"{ends:9} {load:13} {'  '.join(rates)}")


def spread(values):
    return {"median": round(statistics.median(values), 3), "low": round(min(values), 3), "high": round(max(values), 3)}


def compare(results, path, kernel, sign):
    """Cells of a path against the kernel's: name -> rates' and CPU times' ratios, repeat by repeat."""
    cells = {}
    for row in results.rows:
        if row["path"] != path:
            continue
        same = dict(ends=row["ends"], load=row["load"], repeat=row["repeat"], path=kernel)
        rate, spent = results.values("rate", **same), results.values("cpu_ns", **same)
        cell = cells.setdefault(f"{row['ends']} {row['load']}{sign}", {"rate": [], "cpu": []})
        # A slice in which the machine let nobody receive says nothing; one in which only ours got nothing says much.
        if rate and rate[0]:
            cell["rate"].append(row["rate"] / rate[0])
        if spent and row["cpu_ns"]:
            cell["cpu"].append(spent[0] / row["cpu_ns"])
    return {name: cell for name, cell in cells.items() if cell["rate"]}


def summarise(results, options):
    cells = compare(results, "bypass", "ip", "") | compare(results, "bypass_nat", "nat", " nat")
    if not cells:
        raise BenchError("nothing was measured")
    table = {}
    for name, cell in cells.items():
        table[name] = spread(cell["rate"]) | ({"by_cpu": spread(cell["cpu"])} if cell["cpu"] else {})
    print(f"{'cell':28}{'ratio':>8}{'low':>8}{'high':>8}   {'by CPU':>8}{'low':>8}{'high':>8}")
    for name, cell in table.items():
        by_cpu = cell.get("by_cpu", {})
        numbers = "".join(f"{cell[k]:8.2f}" for k in ("median", "low", "high")) + "   " + "".join(f"{v:8.2f}" for v in by_cpu.values())
        print(f"{name:28}{numbers}")
    bounds = {}
    for path in BOUNDS:
        for name, cell in compare(results, path, "ip", "").items():
            bounds[path] = spread(cell["rate"]) | {"by_cpu": spread(cell["cpu"]), "cpu_ns": results.median("cpu_ns", path=path)}
            print(f"{'bound: ' + name + ' ' + path:36}{bounds[path]['median']:8.2f} by CPU {bounds[path]['by_cpu']['median']:8.2f}")
    worst = min(table, key=lambda name: table[name]["median"])
    get = lambda name: table.get(name, {}).get("median")  # noqa: E731
    flows = {path: results.median("rate", ends="tap-tap", load="udp64_10000", path=path) for path in ("bypass", "bypass_nat")}
    one = {path: results.median("rate", ends="tap-tap", load="udp64_1", path=path) for path in flows}
    many = {path: round(flows[path] / one[path], 3) if flows[path] and one[path] else None for path in flows}
    ratios = {"tap_tap_64": get("tap-tap udp64_1"), "tap_tap_64_nat": get("tap-tap udp64_1 nat"), "worst_cell": table[worst]["median"],
              "gso_60k": get("tap-tap gso_60k"), "tcp_rr": get("veth-veth tcp_rr")}
    results.finish(ratios=ratios, worst_cell_name=worst, cells=len(table), flows_10000_to_1=many, bounds=bounds, table=table,
                   repeats=options.repeats, seconds=options.seconds)


if __name__ == "__main__":
    run_bench(main)
