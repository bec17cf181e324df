"""A router between two ends, each a tap (as of a microVM) or a veth (as of a container), and one
path between them: what the workload `bypass` measures.

Import this within `open` only: it loads the repository's test harness.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tombolo_lab import LabError, harness, sandbox
from tombolo_lab.workloads import endpoints
from tombolo_lab.workloads.bypass import KATA

harness.lib()
from lib import Namespace
from lib.tap import (
    ETH_IP4,
    GSO_TCPV4,
    NEEDS_CSUM,
    TCP,
    UDP,
    ethernet,
    ipv4,
    mac_bytes,
    transport,
    vnet_header,
)  # fmt: skip

A, B = "10.1.0.2", "10.2.0.2"
NEAR = {"a": "10.1.0.1", "b": "10.2.0.1"}
FAR = {"a": A, "b": B}
# Addresses of frames that no kernel answers.
RAW_A, RAW_B = "10.1.0.3", "10.2.0.3"
RAW = {"a": RAW_A, "b": RAW_B}
MAC = {"a": "02:00:00:00:0a:02", "b": "02:00:00:00:0b:02"}
NAT = """
table ip nat { chain post { type nat hook postrouting priority 100; oifname "rb" masquerade; }; }
table inet f { chain forward { type filter hook forward priority 0; policy drop;
  ct state established,related accept; iifname "ra" accept; }; }
"""
REFERENCES = ("bridge", "xdpfib", "drop", "straight")
# Until counting begins: connections open, and are known as established.
WARM_S = {"tcp": 0.04, "other": 0.01}
# A choice takes three windows of one second.
CHOOSING_S = 8
# How long a load's answer may be late, in parts: a machine that stood still has used up one.
PATIENCE_S = (10, 10)
# How long a killed load may take to end: what it waits for in the kernel comes first.
ENDING_S = 60
# Niceness of the run's session among others. Linux 6.18 before .45 leaves everybody outside of a
# group that weighs more without a CPU for up to a minute where the group's threads sleep and wake
# as ours do; and to close a packet socket waits for such threads. At -5 it is a second at most.
GROUP = -5


def run(*argv: object, env: Mapping | None = None) -> str:
    """Runs a program to its end; LabError with its words when it fails."""
    words = [str(word) for word in argv]
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise LabError(f"`{' '.join(words)}` ended with {done.returncode}: {said}")
    return done.stdout


def is_socket(load: str) -> bool:
    return load.startswith("tcp") or load == "udp_send"


class Setting:
    """A router with interfaces ra and rb, each a tap or a veth with a namespace behind it, and one
    path between them. `folder` is that of `prepare`."""

    def __init__(self, folder, ends, path):
        self.stack = contextlib.ExitStack()
        try:
            self.make(self.stack, folder, ends, path)
        except BaseException:
            self.stack.close()
            raise

    def make(self, stack, folder, ends, path):
        self.folder, self.path = folder, path
        self.ends = dict(zip("ab", ends.split("-"), strict=True))
        self.router = stack.enter_context(Namespace())
        self.far, self.attached, self.process = {}, False, None
        stack.callback(self.end)
        self.before = {}
        self.router.run(
            "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.disable_ipv6=1"
        )
        if path == "bridge":
            self.router.ip("link", "add", "br0", "type", "bridge")
            self.router.ip("link", "set", "br0", "up")
        for side in "ab":
            self.make_side(stack, side)
        self.start_load()
        if "nat" in path:
            command = ["ip", "netns", "exec", str(self.router), "nft", "-f", "-"]
            subprocess.run(command, input=NAT, text=True, check=True)
        if path in REFERENCES and path != "bridge":
            section = "xdp" if path == "xdpfib" else path
            for name in ("ra", "rb"):
                words = ("xdpdrv", "obj", folder / "xdp_fib.o", "sec", section)
                self.router.run("ip", "link", "set", "dev", name, *words)
            for far in self.far.values():
                # Without NAPI at its far end a veth drops what is redirected to it; and checksums
                # must be whole.
                far.run("ethtool", "-K", "eth0", "gro", "on", "tx", "off")
        if path.startswith("bypass"):
            self.cli("attach", "ra", "rb")
            self.attached = True
        self.mac = mac_bytes(self.link_address(self.gateway("a")))

    def gateway(self, side: str) -> str:
        """The interface at which the kernel forwards: of a pair (Kata's models) the far one."""
        has_pair = self.path in KATA and self.ends[side] == "tap"
        return f"n{side}" if has_pair else f"r{side}"

    def link_address(self, name: str) -> str:
        return self.router.ip("-br", "link", "show", name).split()[2]

    def make_side(self, stack, side):
        name, far, bridged = f"r{side}", stack.enter_context(Namespace()), self.path == "bridge"
        self.far[side] = far
        far.run("sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
        if self.gateway(side) != name:
            inner, outer = f"k{side}", self.gateway(side)
            self.router.ip("link", "add", inner, "type", "veth", "peer", "name", outer)
            for pair in (inner, outer):
                self.router.ip("link", "set", pair, "up")
        if self.ends[side] == "tap":
            if self.path == "macvtap":
                self.make_macvtap(side)
            else:
                self.router.ip("tuntap", "add", "dev", name, "mode", "tap", "vnet_hdr")
            far.ip("tuntap", "add", "dev", "eth0", "mode", "tap", "vnet_hdr")
        else:
            self.router.ip(
                "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(far)
            )
        far.ip("link", "set", "eth0", "address", MAC[side])
        far.ip("address", "add", f"{FAR[side]}/{8 if bridged else 24}", "dev", "eth0")
        far.ip("link", "set", "eth0", "up")
        self.router.ip("link", "set", name, "up")
        if bridged:
            self.router.ip("link", "set", name, "master", "br0")
            other = "ba"["ab".index(side)]
            words = ("lladdr", MAC[other], "dev", "eth0", "nud", "permanent")
            far.ip("neighbour", "replace", FAR[other], *words)
            return
        if self.path == "kata" and self.ends[side] == "tap":
            self.mirror(side)
        gateway = self.gateway(side)
        self.router.ip("address", "add", f"{NEAR[side]}/24", "dev", gateway)
        for address in (FAR[side], RAW[side]):
            words = ("lladdr", MAC[side], "dev", gateway, "nud", "permanent")
            self.router.ip("neighbour", "replace", address, *words)
        words = ("lladdr", self.link_address(gateway), "dev", "eth0", "nud", "permanent")
        far.ip("neighbour", "replace", NEAR[side], *words)
        far.ip("route", "add", "default", "via", NEAR[side])

    def start_load(self):
        space = {side: f"/run/netns/{self.far[side]}" for side in "ab"}
        words = [
            f"tap:{self.tap(side)}:{space[side]}" if self.ends[side] == "tap"
            else f"veth:{space[side]}"
            for side in "ab"
        ]
        argv = ["nice", "-n", str(harness.FIRST), "ip", "netns", "exec", str(self.router)]
        argv += [str(self.folder / "pathload"), *words]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def load_pid(self):
        """The load's process: `nice` becomes `ip`, which becomes it."""
        return self.process.pid

    def cli(self, *words: object) -> str:
        """The program's `bypass`. Its controller has its turn among loads that come first."""
        env = dict(os.environ, TOMBOLO_RUNTIME=str(self.folder / "run"))
        command = ["nice", "-n", str(harness.FIRST)]
        space = str(self.router)
        if mounts := sandbox.mounts_before():
            # The bypass refuses to pin where pins would go with a mount namespace, so it is started
            # outside of the run's own. The name of the namespace is known in there only; this path
            # leads to it from anywhere.
            command = ["nsenter", f"--mount={mounts}", *command]
            space = f"/proc/{os.getpid()}/root{sandbox.NETNS}/{space}"
        return run(*command, harness.program(), "bypass", *words, "--netns", space, env=env)

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
            pid = self.process.pid
            raise LabError(
                f"{self.path}: the load, process {pid}, cannot be ended: it {waits(pid)}"
            ) from None

    def status(self):
        return {i["name"]: i for i in json.loads(self.cli("status", "--json"))["interfaces"]}

    def frame(self, load):
        to = mac_bytes(MAC["b"]) if self.path == "bridge" else self.mac
        if load == "gso_60k":
            body = transport(TCP, RAW_A, RAW_B, 3000, 80, bytes(60000), partial=True)
            header = vnet_header(NEEDS_CSUM, GSO_TCPV4, 54, 1448, 34, 16)
            packet = ipv4(RAW_A, RAW_B, TCP, body)
            return header + ethernet(to, mac_bytes(MAC["a"]), ETH_IP4, packet)
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
            return f"tcp {warm} {seconds} {B} {parts[1].replace('K', '000')} {parts[2]} {parts[3]}"
        file = self.folder / f"frame-{load}-{self.router}"
        if not file.exists():
            file.write_bytes(self.frame(load))
        if load == "trip64":
            return f"trip {warm} {seconds} {file}"
        flows = parts[1] if parts[0] != "gso" else 1
        return f"frames {warm} {seconds} {file} {flows} {int(awake)}"

    def ask(self, load, warm, seconds, awake=False):
        """One load: what pathload.c counted."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(self.command(load, warm, seconds, awake) + "\n")
            self.process.stdin.flush()
        is_there = any(
            select.select([self.process.stdout], [], [], warm + seconds + patience)[0]
            for patience in PATIENCE_S
        )
        line = self.process.stdout.readline() if is_there else ""
        if line.endswith("\n"):
            return json.loads(line)
        state = waits(self.process.pid)
        said = self.end_load()
        if is_there:
            why = said or f"exit status {self.process.returncode}"
            raise LabError(f"{self.path}, {load}: the load ended: {why}")
        late = f"no answer from the load within {sum(PATIENCE_S)} s: it {state}. {said}"
        raise LabError(f"{self.path}, {load}: {late}".strip())

    def settle(self, load):
        """Gives the mode chooser traffic to choose by: until it has, or had the time to."""
        if not self.attached:
            return
        small = load.startswith("udp") and not is_socket(load)
        end = time.monotonic() + (CHOOSING_S if small else 1.5)
        while time.monotonic() < end:
            self.ask(load, 0, 1.0 if small else 0.5)
            is_taps = set(self.ends.values()) == {"tap"}
            if small and (not is_taps or self.status()["ra"]["mode"] == "xdp"):
                return

    def way(self):
        """How many frames were taken and passed up since this was asked last, by reason; and by
        which mode."""
        status = self.status()["ra"]
        now = dict(status["by_reason"])
        way = {
            reason: count - self.before.get(reason, 0)
            for reason, count in now.items()
            if count > self.before.get(reason, 0)
        }
        self.before = now
        return {"mode": status["mode"], "why": status["why"], "by_reason": way}

    def measure(self, load, seconds, awake=False):
        """A row."""
        row = self.ask(load, WARM_S["tcp" if load.startswith("tcp") else "other"], seconds, awake)
        if load == "gso_60k" and not row["opened"] and self.path not in REFERENCES:
            raise LabError(f"{self.path}, {load}: the connection could not be opened")
        if load in ("trip64", "tcp_rr"):
            # Where nothing came back within the slice, it took at least that long.
            row["rate"] = 1e9 / row["p50_ns"] if "p50_ns" in row else 1 / row["seconds"]
        elif self.path == "drop":
            row["rate"] = row["sent"] / row["seconds"]
        else:
            got = row["got_bytes"] if load.startswith("tcp") else row["got"]
            row["rate"] = got / row["seconds"]
        cpu, units = row["sent_cpu_s"], row["sent"]
        if is_socket(load):
            cpu += row["got_cpu_s"] + row["carried_cpu_s"]
            of_load = {"tcp_rr": row["sent"], "udp_send": row["got"]}
            units = of_load.get(load, row["got_bytes"] / 1000)
        row["cpu_ns"] = cpu * 1e9 / units if units else None
        return row

    def tap(self, side: str) -> str | Path:
        """What the monitor opens: a tap's name, or a macvtap's character device."""
        is_macvtap = self.path == "macvtap"
        return self.folder / f"macvtap-{self.router}-{side}" if is_macvtap else f"r{side}"

    def mirror(self, side: str) -> None:
        """Kata's `tcfilter` model: tc redirects what comes from the tap into the pair, and back."""
        tap, inner = f"r{side}", f"k{side}"
        for source, target in ((tap, inner), (inner, tap)):
            self.router.run("tc", "qdisc", "add", "dev", source, "ingress")
            redirect = ("action", "mirred", "egress", "redirect", "dev", target)
            match = ("protocol", "all", "u32", "match", "u32", "0", "0")
            place = ("dev", source, "parent", "ffff:")
            self.router.run("tc", "filter", "add", *place, *match, *redirect)

    def make_macvtap(self, side: str) -> None:
        """Kata's `macvtap` model: the monitor opens a macvtap on the pair's inner end."""
        name, node = f"r{side}", self.tap(side)
        words = ("type", "macvtap", "mode", "bridge")
        self.router.ip("link", "add", "link", f"k{side}", "name", name, *words)
        self.router.ip("link", "set", name, "address", MAC[side])
        endpoints.macvtap_node(self.router, name, node)
        self.stack.callback(node.unlink)


def waits(pid):
    """What a process's threads do, in words."""
    places = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            where = (task / "wchan").read_text().strip("0") or "its program"
            places.append(f"{where} ({state})")
    return f"is in {', '.join(sorted(places))}" if places else "has ended"


def prepare(folder: Path) -> None:
    """Compiles the load and the XDP programs into a folder."""
    programs = harness.tree() / "lab/programs"
    run("gcc", "-O2", "-o", folder / "pathload", programs / "pathload.c", "-lpthread")
    include = f"-I/usr/include/{os.uname().machine}-linux-gnu"
    words = ("-O2", "-g", "-target", "bpf", include, "-c", programs / "xdp_fib.bpf.c")
    run("clang", *words, "-o", folder / "xdp_fib.o")


@contextlib.contextmanager
def awake(folder: Path) -> Iterator[None]:
    """Both CPUs stay awake within the `with`: a sleeper on a halted virtual CPU takes 50 to 100 µs
    to wake, which would hide any difference between paths."""
    process = subprocess.Popen([folder / "pathload", "spin"], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        process.stdin.close()
        process.wait()
