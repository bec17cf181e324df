"""Runs hostile peers beside neighbours that must not notice, and judges.

One fabric has victims (a cell over vhost-user, a cell over ivshmem, the host's tap) and one port per
attachment for the attacker. During each attack a neighbour is pinged 100 times a second and a TCP
connection is checked byte by byte. Afterwards the attacked port must serve a correct peer again, and
the daemon must hold no more than before.
"""

import collections
import contextlib
import dataclasses
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from .fabric import Fabric
from .flows import HttpFlow, StreamFlow
from .frames import StreamPeer
from .hostile import ATTACK_S, DUE, MARK, UDP_SUMS, load
from .hostile.ivshmem import Client
from .hostile.tunnel import ATTACKER, FABRIC, HONEST, VNI, TunnelPeer
from .ivshmem import checksum
from .netns import Namespace, inside
from .tap import Inside
from .process import cpu_seconds, rss_bytes, scratch, until
from .vhost import VhostPeer

ROOT = Path(__file__).resolve().parent.parent
SUBNET = "10.239.0"
FILE = """
name = "{name}"
[network.lan]
subnet = "10.239.0.0/24"
[tap.host]
ip = "10.239.0.9"
[cell.web]
app = "httpd"
ip = "10.239.0.20"
accel = "tcg"
[cell.mirror]
app = "echo"
ip = "10.239.0.21"
accel = "tcg"
attach = "ivshmem"
[cell.calc]
app = "calc"
args = "net=none"
accel = "tcg"
[link.calls]
between = ["calc"]
service = "sums"
[port.vhost]
kind = "vhost-user"
mac = "02:00:00:00:dd:01"
ip = "10.239.0.31"
[port.stream]
kind = "stream"
mac = "02:00:00:00:dd:02"
ip = "10.239.0.32"
[port.shared]
kind = "ivshmem"
mac = "02:00:00:00:dd:03"
ip = "10.239.0.33"
[port.tunnel]
kind = "vxlan"
vni = {vni}
local = "{local}"
remotes = ["{attacker}", "{honest}"]
"""
# The attacker of each attachment: its port, MAC address and IP address.
MEMBERS = {
    "vhost": ("vhost", "02:00:00:00:dd:01", f"{SUBNET}.31"),
    "stream": ("stream", "02:00:00:00:dd:02", f"{SUBNET}.32"),
    "segment": ("stream", "02:00:00:00:dd:02", f"{SUBNET}.32"),
    "ivshmem": ("shared", "02:00:00:00:dd:03", f"{SUBNET}.33"),
    "calls": (None, "02:00:00:00:dd:02", f"{SUBNET}.32"),
    "api": (None, "02:00:00:00:dd:02", f"{SUBNET}.32"),
    "tunnel": ("tunnel", "02:00:00:00:dd:04", f"{SUBNET}.34"),
}
# A member of another machine at the same tunnel, which must not notice either.
ELSEWHERE = ("02:00:00:00:dd:05", f"{SUBNET}.35")

# --- bounds of the verdict; generous, since the machine is shared with emulated guests and other work ---

LOSS, P99_MS = 0.05, 500.0
# Of the questions of a member on another machine. What a flood leaves of the receive buffer of the
# tunnel's socket, which all machines share, is the kernel's matter.
ELSEWHERE_LOSS, ANSWER_S = 0.25, 0.25
STATUS_S = 2.0
SERVED_S = 20
RSS_MIB, DESCRIPTORS = 64, 8


class Pinger(threading.Thread):
    """Echo requests to a neighbour, 100 a second, from a raw socket of the namespace."""

    def __init__(self, space, address):
        super().__init__(daemon=True)
        self.socket = raw_icmp(space)
        self.socket.settimeout(0.01)
        self.address, self.sent, self.replied = address, {}, {}
        self.ended = threading.Event()

    def run(self):
        number, due = 0, time.monotonic()
        while not self.ended.is_set():
            now = time.monotonic()
            if now >= due:
                body = struct.pack("!BBHHH", 8, 0, 0, os.getpid() & 0xFFFF, number & 0xFFFF) + bytes(32)
                body = body[:2] + struct.pack("!H", checksum(body)) + body[4:]
                self.sent[number & 0xFFFF] = now
                with contextlib.suppress(OSError):
                    self.socket.sendto(body, (self.address, 0))
                number, due = number + 1, max(due + 0.01, now)
            self._take(due)

    def _take(self, due):
        self.socket.settimeout(max(0.0005, due - time.monotonic()))
        with contextlib.suppress(OSError):
            data = self.socket.recv(2048)
            if data[20] == 0 and struct.unpack("!H", data[24:26])[0] == os.getpid() & 0xFFFF:
                self.replied.setdefault(struct.unpack("!H", data[26:28])[0], time.monotonic())

    def stop(self):
        """Ends it after the last replies had time to come; (loss from 0 to 1, p50 and p99 in ms)."""
        time.sleep(0.3)  # replies that are under way
        last = time.monotonic() - 0.3
        self.ended.set()
        self.join()
        self.socket.close()
        counted = {number: at for number, at in self.sent.items() if at <= last}
        times = sorted((self.replied[number] - at) * 1000 for number, at in counted.items() if number in self.replied)
        loss = 1 - len(times) / max(1, len(counted))
        return loss, times[len(times) // 2] if times else None, times[int(len(times) * 0.99)] if times else None


class Asker(threading.Thread):
    """A member of another machine, at the other remote of the tunnel: asks for a neighbour's address again and again."""

    def __init__(self, space):
        super().__init__(daemon=True)
        with Inside(space):
            self.peer = TunnelPeer(HONEST, ELSEWHERE[0])
        self.asked = self.answered = 0
        self.ended = threading.Event()

    def run(self):
        with self.peer:
            while not self.ended.is_set():
                self.asked += 1
                self.peer.send(self.peer.arp_request(f"{SUBNET}.9", ELSEWHERE[1]))
                found = self.peer.listen(lambda frame: frame[12:14] == b"\x08\x06" and frame[20:22] == b"\0\2", ANSWER_S)
                self.answered += found is not None
                time.sleep(0.02)

    def stop(self):
        """Ends it; the share of questions without an answer."""
        self.ended.set()
        self.join()
        return 1 - self.answered / max(1, self.asked)


def raw_icmp(space):
    """A raw ICMP socket in a namespace (socket_in makes sockets of protocol 0 only)."""
    with Inside(space):
        return socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)


class Sniffer(threading.Thread):
    """Counts the frames with the mark that reach the host's interface."""

    def __init__(self, space, device):
        super().__init__(daemon=True)
        with Inside(space):
            self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
            self.socket.bind((device, 3))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        self.socket.settimeout(0.2)
        self.seen = []
        self.ended = False

    def run(self):
        while not self.ended:
            with contextlib.suppress(OSError):
                frame = self.socket.recv(65600)
                if MARK in frame:
                    self.seen.append(frame[:60].hex())
        self.socket.close()


@dataclasses.dataclass
class Verdict:
    """What one attack did. `escapes` says, in words, what must not have happened."""

    attack: str
    loss: float
    p50_ms: float
    p99_ms: float
    status_s: float
    cpu: float
    rss_mib: float
    descriptors: int
    escapes: list


class Arena:
    """The fabric, its victims and the measurement; use it with `with`."""

    def __init__(self, report=print):
        self.report = report
        self.attacks = load()

    def __enter__(self):
        self.stack = contextlib.ExitStack()
        try:
            self._start()
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, *_):
        for flow in getattr(self, "flows", []):
            flow.stop()
        self.stack.close()

    def _start(self):
        self.folder = self.stack.enter_context(scratch())
        self.space = self.stack.enter_context(Namespace())
        self.fabric = self.stack.enter_context(Fabric(self.folder, FILE.format(
            name=f"adv{os.getpid()}", vni=VNI, local=FABRIC, attacker=ATTACKER, honest=HONEST), netns=self.space))
        self.run = self.folder / "run" / self.fabric.name
        until("the neighbours' answers", lambda: self.space.pings(f"{SUBNET}.20") and self.space.pings(f"{SUBNET}.21"), 120)
        self.flows = [StreamFlow("connection", self.space, f"{SUBNET}.21"), HttpFlow("web", self.space, f"{SUBNET}.20")]
        for flow in self.flows:
            flow.start()
        neighbours = json.loads(self.space.run("ip", "-j", "neigh").stdout)
        self.neighbour_mac = next(entry["lladdr"] for entry in neighbours if entry["dst"] == f"{SUBNET}.20")
        # The first use of each port maps and caches what later uses find there.
        for name in MEMBERS:
            self._served(name)

    def sockets(self):
        services = list((self.folder / "run").rglob("sums")) + list((self.folder / "run").rglob("sums.sock"))
        return {
            "vhost": str(self.run / "vhost.sock"),
            "stream": str(self.run / "stream.sock"),
            "ivshmem": str(self.run / "shared.sock"),
            "service": str(services[0]) if services else "",
            "api": str(self.run / "api.sock"),
        }

    def _served(self, name):
        """Whether a correct peer of the attachment is served: the seconds that took, or None."""
        port, mac, ip = MEMBERS[name]
        gateway = f"{SUBNET}.1"
        begun = time.monotonic()
        while time.monotonic() - begun < SERVED_S:
            try:
                if self._try_served(name, port, mac, ip, gateway):
                    return time.monotonic() - begun
            except Exception:  # noqa: BLE001 - what a correct peer trips over is the finding
                pass
            time.sleep(0.05)
        return None

    def _try_served(self, name, port, mac, ip, gateway):
        if name == "calls":
            return self.fabric.cli("call", "sums", "20 + 22", "--deadline", "2s", check=False, seconds=10).stdout.strip() == "42"
        if name == "api":
            return self.fabric.cli("status", "--json", check=False, seconds=10).returncode == 0
        if port == "vhost":
            with VhostPeer(self.sockets()["vhost"], mac) as peer:
                peer.socket.settimeout(2)
                peer.setup()
                return peer.arp(gateway, ip, seconds=2)
        if port == "stream":
            with StreamPeer(self.sockets()["stream"], mac) as peer:
                return peer.arp(gateway, ip, seconds=2)
        if port == "tunnel":
            with Inside(self.space):
                peer = TunnelPeer(ATTACKER, mac)
            with peer:
                return peer.arp(gateway, ip, seconds=2)
        with Client(self.sockets()["ivshmem"]) as client:
            peer = client.net_peer(mac)
            peer.wait_run(2)
            return peer.arp(gateway, ip, seconds=2)

    def _holdings(self):
        pid = self.fabric.process.pid
        return len(os.listdir(f"/proc/{pid}/fd")), rss_bytes(pid) / 2**20

    def _dropped(self, port, name):
        """How often something was dropped for each reason that is due."""
        if not DUE[name]:
            return {}
        own = MEMBERS[port][0]
        drops = collections.Counter()
        for found in self.fabric.status()["ports"]:
            # What comes from its port, and what others may not get of it.
            drops.update(found["counters"]["rx_drops"] if found["name"] == own else found["counters"]["tx_drops"])
        snmp = self.space.run("grep", "^Udp:", "/proc/net/snmp").stdout.splitlines()
        kernel = dict(zip(*(line.split() for line in snmp)))
        return {reason: int(kernel[reason]) if reason == UDP_SUMS else drops[reason] for reason in DUE[name]}

    def judge(self, name):
        """Runs one attack and gives its Verdict."""
        port = name.split(".")[0]
        _, mac, ip = MEMBERS[port]
        target = {"sockets": self.sockets(), "mac": mac, "ip": ip, "gateway": f"{SUBNET}.1", "neighbour_ip": f"{SUBNET}.20",
                  "neighbour_mac": self.neighbour_mac}
        for flow in self.flows:
            flow.broken = 0
        descriptors, rss = self._holdings()
        before = self._dropped(port, name)
        pid = self.fabric.process.pid
        cpu, begun = cpu_seconds(pid), time.monotonic()
        sniffer, pinger = Sniffer(self.space, "host"), Pinger(self.space, f"{SUBNET}.20")
        sniffer.start()
        pinger.start()
        escapes = []
        asker = Asker(self.space) if port == "tunnel" else None
        if asker:
            asker.start()
        program = subprocess.Popen([*inside(self.space, own_mounts=False), sys.executable, ROOT / "adversary.py", "--hostile", name, json.dumps(target)], stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True)
        try:
            time.sleep(ATTACK_S / 2)  # in the midst of the attack
            asked = time.monotonic()
            answer = self.fabric.cli("status", "--json", check=False, seconds=60)
            if answer.returncode:
                escapes.append(f"`status` failed during the attack: {answer.stderr.strip()}")
            status_s = time.monotonic() - asked
            said, _ = program.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            program.kill()
            said, _ = program.communicate()
            escapes.append("the hostile program itself hung")
        said = said.strip().splitlines()
        used = (cpu_seconds(pid) - cpu) / (time.monotonic() - begun) if self.fabric.process.alive() else 0.0
        loss, p50, p99 = pinger.stop()
        if asker and (unanswered := asker.stop()) > ELSEWHERE_LOSS:
            escapes.append(f"a member of another machine had no answer to {100 * unanswered:.0f} % of its questions")
        sniffer.ended = True
        sniffer.join()
        if not self.fabric.process.alive():
            escapes.append(f"the daemon ended: {self.fabric.process.tail(5)}")
            self.fabric.start()
        if program.returncode:
            escapes.append(f"the hostile program failed: {said[-1] if said else program.returncode}")
        if loss > LOSS:
            escapes.append(f"a neighbour lost {100 * loss:.0f} % of its pings")
        if p99 is not None and p99 > P99_MS:
            escapes.append(f"a neighbour's pings took {p99:.0f} ms (p99)")
        if status_s > STATUS_S:
            escapes.append(f"`status` took {status_s:.1f} s")
        if sniffer.seen:
            escapes.append(f"{len(sniffer.seen)} forged frames reached a neighbour, the first: {sniffer.seen[0]}")
        escapes += [f"the checked {flow.name} broke {flow.broken} times" for flow in self.flows if flow.broken]
        escapes += [f"the checked {flow.name} got wrong data" for flow in self.flows if flow.corrupt]
        for reason, count in self._dropped(port, name).items():
            if count <= before[reason]:
                escapes.append(f"nothing was dropped as {reason}")
        served = self._served(port)
        if served is None:
            escapes.append(f"a correct peer was not served within {SERVED_S} s afterwards")
        now, memory = self._settled(descriptors, rss)
        if now - descriptors > DESCRIPTORS:
            escapes.append(f"{now - descriptors} descriptors are held")
        if memory - rss > RSS_MIB:
            escapes.append(f"{memory - rss:.0f} MiB are held")
        verdict = Verdict(name, loss, p50 or 0.0, p99 or 0.0, status_s, used, memory - rss, now - descriptors, escapes)
        self.report(self.row(verdict))
        return verdict

    def _settled(self, descriptors, rss):
        """What is held once the attack's remains had time to go."""
        deadline = time.monotonic() + 8
        while True:
            now, memory = self._holdings()
            if (now <= descriptors + DESCRIPTORS and memory <= rss + RSS_MIB) or time.monotonic() > deadline:
                return now, memory
            time.sleep(0.1)

    HEAD = f"{'attack':44} {'loss %':>6} {'p50 ms':>7} {'p99 ms':>7} {'status s':>8} {'cpu':>5} {'MiB':>6} {'fds':>4}  verdict"

    @staticmethod
    def row(verdict):
        said = "held" if not verdict.escapes else "ESCAPE: " + "; ".join(verdict.escapes)
        return (f"{verdict.attack:44} {100 * verdict.loss:6.1f} {verdict.p50_ms:7.2f} {verdict.p99_ms:7.2f} {verdict.status_s:8.2f} {verdict.cpu:5.2f} "
                f"{verdict.rss_mib:+6.1f} {verdict.descriptors:+4d}  {said}")
