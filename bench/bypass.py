#!/usr/bin/env python3
"""The bypass beside the kernel's paths: plain forwarding, forwarding with conntrack and masquerade, a bridge, a plain XDP-FIB redirect.

usage: ./x bench bypass [--cells PATTERN] [--short] [--rounds N] [--seconds S] [--no-perf]

Each cell of the matrix is one load between two ends. All of its paths are set up side by side, in the bench's own
namespaces, and measured in rounds: a short slice of each path. Each round draws a new order, so that other work of the
machine affects all paths alike.

    ends    tap-tap, tap-veth, veth-tap, veth-veth. A tap is driven by bench/pathload.c, one frame per system call and with
            a vnet header, as a monitor of microVMs does; frames of the socket loads come from the tap of another kernel
            namespace behind it.
    loads   udp64_F, udp1500_F: UDP frames as fast as one writer makes them, in F flows; trip64: one frame at a time, from
            write to read; gso_60k: segmentation frames of an opened connection; udp_send: a UDP socket; tcp_W_N_C: N
            connections that write W bytes at a time, on C cores; tcp_rr: one byte there and back.
    paths   ip and nat (conntrack and masquerade), each set up twice; bridge, xdpfib; and bypass (mode auto, given time to
            choose) over each of ip and nat. At tap-tap also two bounds: drop (the tap's write alone, XDP_DROP) and straight
            (an XDP program that only redirects).

`rate` is what the receiver got per second (for trip64 and tcp_rr: what the median time allows). cpu_ns is the CPU time per
frame (per kilobyte of a stream, per round trip), as the kernel accounts it: that of the writer, whose calls do the
forwarding, or that of all threads for sockets.

A cell is the bypass's result divided by that of the same set-up of the kernel (nat's by nat), round by round: the middle of
these ratios, and the interval in which it lies with 95 % (bench/stats.py describes the method). The kernel's rate of a round
is the mean of its two set-ups. `equals` is one of them divided by the other, which shows the noise, cell by cell. `faster`
and `slower` are used only for results outside of it. `worst_cell` is the smallest ratio. `retransmitted` and `disordered`
count TCP's troubles; `path` shows the path that our frames took. If the machine has hardware counters, `perf stat` adds
instructions and cycles per frame. The CPUs are kept from halting while the bench measures. Needs root. The bench removes
its namespaces, taps and programs.

A path whose load fails or gives no answer is set up again, once per cell. If that fails too, the cell is listed as not
measured, with the reason, and the rest is measured; the bench then ends with 1. Results are written as they arrive:
raw.jsonl, and each finished cell to cells.jsonl.
"""

import argparse
import contextlib
import json
import math
import os
import random
import re
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from common import FIRST, ROOT, BenchError, Results, group_first, note, perf, run, run_bench
from stats import SEED, spread, verdict

from lib import Namespace, need_program
from lib.tap import ETH_IP4, GSO_TCPV4, NEEDS_CSUM, TCP, UDP, ethernet, ipv4, mac_bytes, transport, vnet_header

PROGRAM = Path(os.environ.get("TOMBOLO_PROGRAM", ROOT / "target/release/tombolo"))
A, B = "10.1.0.2", "10.2.0.2"
NEAR = {"a": "10.1.0.1", "b": "10.2.0.1"}
FAR = {"a": A, "b": B}
# Whence and whither frames are that no kernel shall answer.
RAW_A, RAW_B = "10.1.0.3", "10.2.0.3"
RAW = {"a": RAW_A, "b": RAW_B}
MAC = {"a": "02:00:00:00:0a:02", "b": "02:00:00:00:0b:02"}
NAT = """
table ip nat { chain post { type nat hook postrouting priority 100; oifname "rb" masquerade; }; }
table inet f { chain forward { type filter hook forward priority 0; policy drop; ct state established,related accept; iifname "ra" accept; }; }
"""
ENDS = ("tap-tap", "tap-veth", "veth-tap", "veth-veth")
# Ours, the kernel's same set-up, and that once more.
COMPARED = (("bypass", "ip", "ip_again", ""), ("bypass_nat", "nat", "nat_again", " nat"))
BOUNDS = ("drop", "straight")
REFERENCES = ("bridge", "xdpfib", *BOUNDS)
PATHS = (*(path for compared in COMPARED for path in compared[:3]), "bridge", "xdpfib")
# Every how many rounds these are measured.
REFERENCE_ROUNDS = 4
FRAMES = ("udp64_1", "udp64_100", "udp64_10000", "udp1500_1", "udp1500_100", "udp1500_10000", "trip64", "gso_60k")
SOCKETS = ("udp_send", "tcp_rr", *(f"tcp_{write}_{n}_{cores}" for write in ("64", "16K") for n in (1, 2, 4) for cores in (1, 2)))
SHORT = ("udp64_1", "udp64_10000", "udp1500_1", "trip64", "gso_60k", "tcp_rr", "tcp_16K_1_2", "tcp_64_1_2", "udp_send")
# Until counting begins: connections open, and are known as established.
WARM_S = {"tcp": 0.04, "other": 0.01}
# A choice takes three windows of one second.
CHOOSING_S = 8
# So many more rounds where each connection keeps a pace of its own, of which the fastest is four times the slowest, on any path.
MOODS_MORE = 2
# Slices with 10,000 flows are so much longer: then a round takes longer than a lease, and each slice begins with renewing all of them, before
# counting begins.
MANY_LONGER = 3
# What renewing costs is in the comparison of 10,000 flows with one: its slices are longer than a lease.
FLOWS_S = 1.2
# Whose 10,000 flows are compared with one: ours, the kernel's, and the bound, which looks at no frame.
FLOWS = ("bypass", "bypass_nat", "ip", "nat", "straight")
COUNTERS = "task-clock,context-switches,instructions,cycles"
# How long a load's answer may be late, in parts: a machine that stood still for a while has used up one of them.
PATIENCE_S = (10, 10)
# How long a killed load may take to end: what it waits for in the kernel comes first.
ENDING_S = 60
# After so many cells in which a path could not be measured it is given up, for these ends.
MOST_FAILURES = 3
# Niceness of the bench's session among others. Linux 6.18 before .45 leaves everybody outside of a group that weighs more, its own threads among them, without a CPU
# for up to a minute where the group's threads sleep and wake as ours do; and to close a packet socket waits for such threads. At -5 it is about a second at the most.
GROUP = -5
FAILURES = (AssertionError, BenchError, OSError, RuntimeError, subprocess.SubprocessError)


def is_socket(load):
    return load.startswith("tcp") or load == "udp_send"


class Setting:
    """A router `r` with interfaces ra and rb, each a tap or a veth with a namespace behind it (an end of its own), and one path between them."""

    def __init__(self, folder, ends, path):
        self.stack = contextlib.ExitStack()
        try:
            self.make(self.stack, folder, ends, path)
        except BaseException:
            self.stack.close()
            raise

    def make(self, stack, folder, ends, path):
        self.folder, self.path, self.ends = folder, path, dict(zip("ab", ends.split("-")))
        self.router = stack.enter_context(Namespace())
        self.far, self.attached, self.process = {}, False, None
        stack.callback(self.end)
        self.before = {}
        self.router.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.disable_ipv6=1")
        if path == "bridge":
            self.router.ip("link", "add", "br0", "type", "bridge")
            self.router.ip("link", "set", "br0", "up")
        for side in "ab":
            self.make_side(stack, side)
        self.start_load()
        if "nat" in path:
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
        for address in (FAR[side], RAW[side]):
            self.router.ip("neighbour", "replace", address, "lladdr", MAC[side], "dev", name, "nud", "permanent")
        near = self.router.ip("-br", "link", "show", name).split()[2]
        far.ip("neighbour", "replace", NEAR[side], "lladdr", near, "dev", "eth0", "nud", "permanent")
        far.ip("route", "add", "default", "via", NEAR[side])

    def start_load(self):
        space = {side: f"/run/netns/{self.far[side]}" for side in "ab"}
        words = [f"tap:r{side}:{space[side]}" if self.ends[side] == "tap" else f"veth:{space[side]}" for side in "ab"]
        argv = ["nice", "-n", str(FIRST), "ip", "netns", "exec", str(self.router), str(self.folder / "pathload"), *words]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def load_pid(self):
        """The load's process: `nice` becomes `ip`, which becomes it."""
        return self.process.pid

    def cli(self, *words):
        env = dict(os.environ, TOMBOLO_RUNTIME=str(self.folder / "run"))
        # The controller that it starts is to have its turn among loads that come first.
        return run("nice", "-n", str(FIRST), PROGRAM, "bypass", *words, "--netns", str(self.router), env=env)

    def close(self):
        self.stack.close()

    def end(self):
        if self.process:
            self.end_load()
        if self.attached:
            self.cli("detach")

    def end_load(self):
        """Gives what it said."""
        self.process.kill()
        try:
            return self.process.communicate(timeout=ENDING_S)[1].strip()
        except subprocess.TimeoutExpired:
            note(f"{self.path}: the load, process {self.process.pid}, cannot be ended: it {waits(self.process.pid)}")
            return ""

    def status(self):
        return {i["name"]: i for i in json.loads(self.cli("status", "--json"))["interfaces"]}

    def frame(self, load):
        to = mac_bytes(MAC["b"]) if self.path == "bridge" else self.mac
        if load == "gso_60k":
            body = transport(TCP, RAW_A, RAW_B, 3000, 80, bytes(60000), partial=True)
            return vnet_header(NEEDS_CSUM, GSO_TCPV4, 54, 1448, 34, 16) + ethernet(to, mac_bytes(MAC["a"]), ETH_IP4, ipv4(RAW_A, RAW_B, TCP, body))
        size = 64 if load == "trip64" else int(load.split("_")[0].removeprefix("udp"))
        # 4 bytes of a frame's size are its check sequence, which no driver sees.
        body = transport(UDP, RAW_A, RAW_B, 1024, 9, bytes(size - 42 - 4))
        return bytes(10) + ethernet(to, mac_bytes(MAC["a"]), ETH_IP4, ipv4(RAW_A, RAW_B, UDP, body))

    def command(self, load, warm, seconds, awake=False):
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
        return f"trip {warm} {seconds} {file}" if load == "trip64" else f"frames {warm} {seconds} {file} {parts[1] if parts[0] != 'gso' else 1} {int(awake)}"

    def ask(self, load, warm, seconds, awake=False):
        """One load: what bench/pathload.c counted."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(self.command(load, warm, seconds, awake) + "\n")
            self.process.stdin.flush()
        is_there = any(select.select([self.process.stdout], [], [], warm + seconds + patience)[0] for patience in PATIENCE_S)
        line = self.process.stdout.readline() if is_there else ""
        if line.endswith("\n"):
            return json.loads(line)
        state = waits(self.process.pid)
        said = self.end_load()
        if is_there:
            raise BenchError(f"{self.path}, {load}: the load ended: {said or f'exit status {self.process.returncode}'}")
        raise BenchError(f"{self.path}, {load}: no answer from the load within {sum(PATIENCE_S)} s: it {state}. {said}".strip())

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

    def way(self):
        """How many of ours were taken and passed up since this was asked last, by reason; and by which mode."""
        status = self.status()["ra"]
        now = dict(status["by_reason"])
        way = {reason: count - self.before.get(reason, 0) for reason, count in now.items() if count > self.before.get(reason, 0)}
        self.before = now
        return {"mode": status["mode"], "why": status["why"], "by_reason": way}

    def measure(self, load, seconds, awake=False):
        """A row."""
        row = self.ask(load, WARM_S["tcp" if load.startswith("tcp") else "other"], seconds, awake)
        if load == "gso_60k" and not row["opened"] and self.path not in REFERENCES:
            raise BenchError(f"{self.path}, {load}: the connection could not be opened")
        if load in ("trip64", "tcp_rr"):
            # Where nothing came back within the slice, it took at least that long.
            row["rate"] = 1e9 / row["p50_ns"] if "p50_ns" in row else 1 / row["seconds"]
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


def waits(pid):
    """What a process's threads do, in words."""
    places = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            places.append(f"{(task / 'wchan').read_text().strip('0') or 'its program'} ({state})")
    return f"is in {', '.join(sorted(places))}" if places else "has ended"


class Settings:
    """The set-ups between two ends, side by side, by path. One that failed is made anew."""

    def __init__(self, stack, folder, ends, paths):
        self.folder, self.ends = folder, ends
        # path -> its set-up, or None where there is none that works; how many cells it failed in; why it did last.
        self.made, self.failures, self.reasons = {}, dict.fromkeys(paths, 0), {}
        stack.callback(self.close)
        for path in paths:
            with contextlib.suppress(*FAILURES):
                self.get(path)

    def close(self):
        for path in self.made:
            self.drop(path)

    def drop(self, path):
        setting, self.made[path] = self.made.get(path), None
        try:
            if setting:
                setting.close()
        except FAILURES as error:
            note(f"{self.ends}: what was set up for {path} is not all gone: {error}")

    def get(self, path):
        if not self.made.get(path):
            self.made[path] = Setting(self.folder, self.ends, path)
        return self.made[path]

    def attempt(self, path, load, work):
        """What `work` gives with the path's set-up; where it fails, once more with a fresh one. BenchError where that fails too."""
        if self.failures[path] >= MOST_FAILURES:
            raise BenchError(f"given up after {MOST_FAILURES} failures: {self.reasons[path]}")
        for is_last in (False, True):
            try:
                is_new = not self.made.get(path)
                setting = self.get(path)
                if is_new and setting.attached:
                    setting.settle(load)
                    setting.way()
                return work(setting)
            except FAILURES as error:
                reason = f"{type(error).__name__}: {error}" if not isinstance(error, BenchError) else str(error)
                self.drop(path)
                if is_last:
                    self.failures[path] += 1
                    self.reasons[path] = reason
                    raise BenchError(reason) from error
                note(f"{self.ends} {load}: set up anew, after {reason}")


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


@contextlib.contextmanager
def awake(folder):
    """Both CPUs stay awake within the `with`."""
    process = subprocess.Popen([folder / "pathload", "spin"], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        process.stdin.close()
        process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="[default: 12; with --short 8]")
    parser.add_argument("--seconds", type=float, default=0.05, help="length of a slice [default: 0.05]")
    parser.add_argument("--cells", metavar="PATTERN", help="only those whose `ENDS LOAD` the regular expression finds")
    parser.add_argument("--short", action="store_true", help="fewer loads and rounds")
    parser.add_argument("--no-perf", action="store_true", help="no hardware counters")
    options = parser.parse_args()
    options.rounds = options.rounds or (8 if options.short else 12)
    for name in ("nft", "ethtool", "clang", "gcc"):
        need_program(name)
    if (os.cpu_count() or 1) < 2:
        raise BenchError("it needs two CPUs: one for each end")
    results = Results("bypass")
    # Cell -> why it could not be measured.
    missed = {}
    with_perf = not options.no_perf and has_hardware_counters()
    order = random.Random(SEED)
    with tempfile.TemporaryDirectory(prefix="tmb-bench-", ignore_cleanup_errors=True) as folder:
        folder = Path(folder)
        prepare(folder)
        with awake(folder), group_first(GROUP):
            for ends, chosen in matrix(options):
                with contextlib.ExitStack() as stack:
                    settings = Settings(stack, folder, ends, paths_of(ends, chosen[0]))
                    for number, load in enumerate(chosen):
                        is_new_kind = number == 0 or chosen[number - 1] in ("trip64", "gso_60k")
                        measure_cell(results, options, settings, load, is_new_kind, with_perf, order, missed)
                    if ends == "tap-tap" and "udp64_10000" in chosen:
                        measure_flows(results, options, settings, order, missed)
    summarise(results, options, missed)
    if missed:
        raise BenchError(f"{len(missed)} not measured: " + "; ".join(f"{name}: {reason}" for name, reason in missed.items()))


def measure_cell(results, options, settings, load, is_new_kind, with_perf, order, missed):
    """All paths of one load, round by round."""
    ends, failed = settings.ends, {}
    wanted = [path for path in paths_of(ends, load) if path in settings.failures]

    def attempt(path, work):
        try:
            return settings.attempt(path, load, work)
        except BenchError as error:
            failed[path] = str(error)
            note(f"{ends} {load}: {path} is not measured: {error}")

    def begin(setting):
        if is_new_kind:
            setting.settle(load)
        if setting.attached:
            setting.way()

    def measure(setting, number):
        row = setting.measure(load, options.seconds * (MANY_LONGER if load.endswith("_10000") else 1))
        if with_perf and number == 0:
            row["perf"] = setting.counters(load, options.seconds)
        return row

    for path in wanted:
        attempt(path, begin)
    for number in range(options.rounds * (MOODS_MORE if "16K" in load else 1)):
        turn = [path for path in wanted if path not in failed and (path not in REFERENCES or number % REFERENCE_ROUNDS == 0)]
        order.shuffle(turn)
        for path in turn:
            row = attempt(path, lambda setting: measure(setting, number))  # noqa: B023 (it is called at once)
            if row:
                results.add(ends=ends, load=load, path=path, round=number, **row)
    for path in wanted:
        way = attempt(path, lambda setting: setting.way() if setting.attached else None) if path not in failed else None
        if way:
            results.add(ends=ends, load=load, path=path, way=way)
    for compared in COMPARED:
        name, reasons = f"{ends} {load}{compared[-1]}", [failed[path] for path in compared[:3] if path in failed]
        if reasons:
            missed[name] = reasons[0]
        cell = None if reasons else cell_of(results, ends, load, compared)
        results.write("cells.jsonl", {"cell": name, **(cell or {"not_measured": missed.get(name, "no round has all its paths")})})
    rates = [f"{path} {results.median('rate', ends=ends, load=load, path=path):.4g}" for path in wanted if path not in failed]
    note(f"{ends:9} {load:13} {'  '.join(rates)}")


def measure_flows(results, options, settings, order, missed):
    """One flow beside 10,000, in slices longer than a lease: what renewing the leases of so many costs is in them. The reader stays awake: whether a writer
    has to wake it for each frame depends on which of the two is the faster, and would be most of the difference."""
    failed = set()
    for number in range(max(4, options.rounds // 2)):
        turn = [(path, load) for path in FLOWS if path in settings.failures for load in ("udp64_1", "udp64_10000")]
        order.shuffle(turn)
        for path, load in turn:
            if path in failed:
                continue
            try:
                row = settings.attempt(path, load, lambda setting: setting.measure(load, FLOWS_S, awake=True))  # noqa: B023 (it is called at once)
                results.add(flows=load, path=path, round=number, **row)
            except BenchError as error:
                failed.add(path)
                missed[f"10,000 flows by 1: {path}"] = str(error)


def by_round(results, key, **match):
    """round -> value."""
    return {row["round"]: row[key] for row in results.rows if row.get(key) and "round" in row and all(row.get(k) == v for k, v in match.items())}


def compare(ours, kernel, again):
    """A cell by one measure: ours and the noise, from values by round where more is better."""
    rounds = ours.keys() & kernel.keys() & again.keys()
    if not rounds:
        return None
    cell = spread([ours[n] / math.sqrt(kernel[n] * again[n]) for n in sorted(rounds)])
    equals = spread([again[n] / kernel[n] for n in sorted(rounds)])
    return cell | {"equals": equals, "verdict": verdict(cell, equals)}


def inverted(values):
    return {n: 1 / value for n, value in values.items()}


def cell_of(results, ends, load, compared):
    """A cell, by rate and by CPU time; None where no round has all of its paths."""
    paths = compared[:3]
    cell = compare(*(by_round(results, "rate", ends=ends, load=load, path=p) for p in paths))
    if not cell:
        return None
    cell["by_cpu"] = compare(*(inverted(by_round(results, "cpu_ns", ends=ends, load=load, path=p)) for p in paths))
    for key in ("retransmitted", "disordered"):
        if load.startswith("tcp"):
            cell[key] = {p: sum(results.values(key, ends=ends, load=load, path=p)) for p in paths[:2]}
    ways = results.values("way", ends=ends, load=load, path=paths[0])
    if ways:
        cell["path"] = ways[-1]
    return cell


def cells(results, missed):
    """name -> the cell, of those that were measured."""
    table = {}
    for ends, load in dict.fromkeys((row["ends"], row["load"]) for row in results.rows if "ends" in row):
        for compared in COMPARED:
            name = f"{ends} {load}{compared[-1]}"
            cell = cell_of(results, ends, load, compared) if name not in missed else None
            if cell:
                table[name] = cell
    return table


def interval(cell):
    return f"{cell['ratio']:7.2f} ({cell['low']:.2f} to {cell['high']:.2f})"


def print_table(table):
    """For people."""
    print(f"{'cell':24}{'ours by the kernel':>24}{'equals':>18}            {'by CPU time':>12}             went up   sent again (kernel)")
    for name, cell in table.items():
        counts = cell.get("path", {}).get("by_reason", {})
        total = sum(count for reason, count in counts.items() if not reason.startswith("handed"))
        passed = sum(count for reason, count in counts.items() if reason.startswith("up"))
        again = cell.get("retransmitted")
        words = [interval(cell), f"{cell['equals']['low']:.2f} to {cell['equals']['high']:.2f}", f"{cell['verdict']:7}"]
        words += [interval(cell["by_cpu"]) if cell["by_cpu"] else "", f"{100 * passed / total:5.1f} %" if total else ""]
        words += [f"{' '.join(str(count) for count in again.values())}" if again else ""]
        print(f"{name:24}{words[0]:>24}{words[1]:>18}  {words[2]:9} {words[3]:>24} {words[4]:>8}   {words[5]}")


def many_by_one(results, path):
    """10,000 flows by one, by rate and by CPU time."""
    rates, costs = ([by_round(results, key, flows=load, path=path) for load in ("udp64_1", "udp64_10000")] for key in ("rate", "cpu_ns"))
    rounds = sorted(rates[0].keys() & rates[1].keys())
    if not rounds:
        return None
    return spread([rates[1][n] / rates[0][n] for n in rounds]) | {"by_cpu": spread([costs[0][n] / costs[1][n] for n in rounds])}


def summarise(results, options, missed):
    table = cells(results, missed)
    if not table:
        raise BenchError("nothing was measured" + "".join(f"; {name}: {reason}" for name, reason in missed.items()))
    print_table(table)
    bounds = {}
    for bound in BOUNDS:
        ours, kernel, again = (by_round(results, "rate", ends="tap-tap", load="udp64_1", path=p) for p in (bound, "ip", "ip_again"))
        if ours:
            bounds[bound] = compare(ours, kernel, again)
            print(f"{'bound: ' + bound:24}{interval(bounds[bound]):>24}")
    flows = {}
    for path in FLOWS:
        cell = many_by_one(results, path)
        if cell:
            flows[path] = cell
            print(f"{'10,000 flows by 1: ' + path:30}{interval(cell):>22}   by CPU time {interval(cell['by_cpu'])}")
    by_verdict = {word: sum(cell["verdict"] == word for cell in table.values()) for word in ("faster", "equal", "slower")}
    print(f"of {len(table)} cells {by_verdict['faster']} are faster than the kernel, {by_verdict['equal']} equal within the noise, {by_verdict['slower']} slower")
    for name, reason in missed.items():
        print(f"not measured: {name}: {reason}")
    worst = min(table, key=lambda name: table[name]["ratio"])
    get = lambda name: table.get(name, {}).get("ratio")  # noqa: E731
    ratios = {"tap_tap_64": get("tap-tap udp64_1"), "tap_tap_64_nat": get("tap-tap udp64_1 nat"), "worst_cell": table[worst]["ratio"],
              "gso_60k": get("tap-tap gso_60k"), "tcp_rr": get("veth-veth tcp_rr"),
              "flows_10k": flows.get("bypass", {}).get("ratio"), "flows_10k_nat": flows.get("bypass_nat", {}).get("ratio")}
    results.finish(ratios=ratios, worst_cell_name=worst, worst_cell=table[worst], cells=len(table), verdicts=by_verdict,
                   slower=[name for name, cell in table.items() if cell["verdict"] == "slower"], flows_10000_to_1=flows, bounds=bounds, not_measured=missed,
                   table=table, rounds=options.rounds, seconds=options.seconds)


if __name__ == "__main__":
    run_bench(main)
