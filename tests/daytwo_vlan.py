"""VLANs between real network stacks: access ports, and trunks whose kernels tag and untag every frame (eBPF, since
not every kernel has 802.1Q devices). Frames with tags that no kernel would send come from packet sockets."""

import contextlib
import json
import socket
import struct
import subprocess
import sys
import time

from lib import Fabric, Namespace, Process, need_program, need_root, scratch, timeout, until
from lib.tap import Inside

SOL_PACKET, PACKET_AUXDATA = 263, 8

HEAD = """
name = "vlans"
[network.lan]
subnet = "10.235.0.0/24"
"""
NAMES = ("a", "b", "c", "t", "plain")
ADDRESS = {name: f"10.235.0.{11 + n}" for n, name in enumerate(NAMES)}
KEYS = {"a": "vlan = 10", "b": "vlan = 10", "c": "vlan = 20", "t": 'trunk = [10, "20-29"]\nnative = 1'}

# A tagged interface: what its stack sends gets the tag, and it sees only frames that have the tag.
TAGGER = """
struct __sk_buff { unsigned len, pkt_type, mark, queue_mapping, protocol, vlan_present, vlan_tci; };
static long (*push)(struct __sk_buff *, unsigned short, unsigned short) = (void *)18;
static long (*pop)(struct __sk_buff *) = (void *)19;
__attribute__((section("out"), used)) int tag(struct __sk_buff *skb) { return push(skb, 0x0081, TCI) ? 2 : 0; }
__attribute__((section("in"), used)) int untag(struct __sk_buff *skb) {
    if (!skb->vlan_present || (skb->vlan_tci & 0xfff) != (TCI & 0xfff)) return 2;
    return pop(skb) ? 2 : 0;
}
char _license[] __attribute__((section("license"), used)) = "GPL";
"""

# Answers one connection after the other: takes all that comes, and says how many bytes and what sum
# they were.
SINK = """
import hashlib, socket
listener = socket.create_server(("", 5000))
print("listening", flush=True)
while True:
    peer, _ = listener.accept()
    sum, size = hashlib.sha256(), 0
    while data := peer.recv(1 << 20):
        sum.update(data)
        size += len(data)
    peer.sendall(f"{size} {sum.hexdigest()}".encode())
    peer.close()
"""
SOURCE = """
import hashlib, random, socket, sys
data = random.Random(7).randbytes(1 << 20) * 16
peer = socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2]))
peer.sendall(data)
peer.shutdown(socket.SHUT_WR)
assert peer.makefile().read() == f"{len(data)} {hashlib.sha256(data).hexdigest()}"
print("whole")
"""


def text(**keys):
    keys = {**KEYS, **keys}
    taps = [f'[tap.{name}]\nnetns = "/run/netns/{{{name}}}"\nip = "{ADDRESS[name]}"\nguard = "off"\n{keys.get(name, "")}\n' for name in NAMES]
    return HEAD + "".join(taps)


@contextlib.contextmanager
def members(file_text):
    need_root()
    with contextlib.ExitStack() as stack:
        spaces = {name: stack.enter_context(Namespace()) for name in NAMES}
        home = stack.enter_context(Namespace())
        folder = stack.enter_context(scratch())
        fabric = stack.enter_context(Fabric(folder, file_text.format_map(spaces), netns=home))
        yield fabric, spaces, folder


def tag(space, device, tci, folder):
    """Makes the stack of a namespace one that lives in a VLAN of its device. `tci` may be an expression of the frame, `skb`."""
    need_program("clang")
    source, program = folder / "tagger.c", folder / "tagger.o"
    source.write_text(TAGGER)
    subprocess.run(["clang", "-O2", "-target", "bpf", f"-DTCI={tci}", "-c", str(source), "-o", str(program)], check=True)
    space.run("tc", "qdisc", "replace", "dev", device, "clsact")
    for direction, section in (("egress", "out"), ("ingress", "in")):
        space.run("tc", "filter", "replace", "dev", device, direction, "prio", "1", "handle", "1", "bpf", "da", "obj", program, "sec", section)


class Raw:
    """A packet socket on a device of a namespace."""

    def __init__(self, space, device):
        with Inside(space):
            self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self.socket.setsockopt(SOL_PACKET, PACKET_AUXDATA, 1)
        self.socket.bind((device, 0))
        self.mac = self.socket.getsockname()[4]

    def send(self, to, tags, mark, source=None):
        fields = b"".join(struct.pack("!HH", kind, tci) for kind, tci in tags)
        self.socket.send(to + (source or self.mac) + fields + b"\x88\xb5" + mark.ljust(46, b"."))

    def got(self, mark, seconds=20):
        """The tag of the frame with this mark, 0 for none, or None if it does not come."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                data, control, _, address = self.socket.recvmsg(2048, 256)
            except TimeoutError:
                return None
            if address[2] == socket.PACKET_OUTGOING or mark not in data:
                continue
            # The kernel takes the tag out and tells it beside the frame.
            for level, kind, aux in control:
                if (level, kind) == (SOL_PACKET, PACKET_AUXDATA):
                    status, _, _, _, _, tci, _ = struct.unpack("IIIHHHH", aux[:20])
                    if status & 16:
                        return tci
            return struct.unpack("!H", data[14:16])[0] if data[12:14] == b"\x81\x00" else 0
        return None


def reaches(space, target):
    """A question for an address that was asked in vain before may still be under way, and its failure is of all that wait."""
    until(f"an answer of {target}", lambda: space.pings(ADDRESS[target], seconds=2))


def drops(fabric, name):
    return fabric.port(name)["counters"]["rx_drops"]


@timeout(300)
def test_members_of_one_vlan_exchange_and_others_are_apart():
    with members(text()) as (fabric, spaces, folder):
        assert spaces["a"].answers(ADDRESS["b"])
        for source, target in (("a", "c"), ("a", "plain"), ("plain", "c")):
            assert not spaces[source].pings(ADDRESS[target], seconds=2), f"{source} reaches {target}"
        # The gateway is in VLAN 1, as who has no keys and the native VLAN of the trunk.
        assert spaces["plain"].answers("10.235.0.1") and spaces["t"].answers("10.235.0.1")
        assert spaces["t"].answers(ADDRESS["plain"])
        assert not spaces["a"].pings("10.235.0.1", seconds=2)
        # The same stack in VLAN 10 and then 20 of its trunk.
        tag(spaces["t"], "t", 10, folder)
        reaches(spaces["t"], "a")
        reaches(spaces["b"], "t")
        assert not spaces["t"].pings(ADDRESS["c"], seconds=2)
        # A stack sends segments of 64 KiB with the checksum left to others, which get a tag here
        # and lose it there.
        for source, target in (("a", "t"), ("t", "a")):
            sink = Process([sys.executable, "-c", SINK], name=f"sink-{target}", netns=spaces[target])
            try:
                sink.wait_line(lambda line: "listening" in line, 60)
                done = spaces[source].run(sys.executable, "-c", SOURCE, ADDRESS[target], "120", seconds=240, check=False)
                assert done.stdout == "whole\n", done
            finally:
                sink.kill()
        tag(spaces["t"], "t", 20, folder)
        spaces["t"].ip("neigh", "flush", "dev", "t")
        reaches(spaces["t"], "c")
        tag(spaces["t"], "t", 30, folder)
        assert not spaces["t"].pings(ADDRESS["c"], seconds=2)
        assert drops(fabric, "t")["vlan_denied"] > 0


@timeout(300)
def test_tags_and_priorities_on_the_wire():
    with members(text()) as (fabric, spaces, _):
        raw = {name: Raw(spaces[name], name) for name in NAMES}
        everyone = b"\xff" * 6
        raw["a"].send(everyone, [], b"from an access port")
        assert raw["b"].got(b"from an access port") == 0 and raw["t"].got(b"from an access port") == 10
        assert raw["c"].got(b"from an access port", seconds=1) is None
        assert raw["plain"].got(b"from an access port", seconds=1) is None
        raw["a"].send(everyone, [(0x8100, 0xc000)], b"a priority and no VLAN")
        assert raw["b"].got(b"a priority and no VLAN") == 0 and raw["t"].got(b"a priority and no VLAN") == 0xc00a
        raw["t"].send(everyone, [(0x8100, 25)], b"a VLAN of nobody else")
        assert all(raw[name].got(b"a VLAN of nobody else", seconds=0.3) is None for name in ("a", "b", "c", "plain"))
        raw["t"].send(everyone, [(0x8100, 20)], b"to the other VLAN")
        assert raw["c"].got(b"to the other VLAN") == 0
        # The same address in two VLANs is two stations.
        station = b"\x02\x00\x00\x00\x99\x99"
        raw["t"].send(everyone, [(0x8100, 20)], b"station in 20", station)
        raw["b"].send(everyone, [], b"station in 10", station)
        assert raw["c"].got(b"station in 20") == 0 and raw["a"].got(b"station in 10") == 0
        raw["a"].send(station, [], b"to 10")
        raw["c"].send(station, [], b"to 20")
        assert raw["b"].got(b"to 10") == 0 and raw["t"].got(b"to 20") == 20
        # What hops between VLANs elsewhere.
        before = drops(fabric, "a")
        for tags in ([(0x8100, 20)], [(0x8100, 10)], [(0x8100, 0), (0x8100, 20)], [(0x88a8, 20)], [(0x8100, 10), (0x8100, 20)]):
            raw["a"].send(everyone, tags, b"not allowed")
        until("all five to be dropped under their reasons", lambda: (
            drops(fabric, "a").get("vlan_denied", 0) >= before.get("vlan_denied", 0) + 2
            and drops(fabric, "a").get("vlan_tags", 0) >= before.get("vlan_tags", 0) + 3))
        assert all(raw[name].got(b"not allowed", seconds=0.3) is None for name in ("b", "c", "t", "plain"))


@timeout(300)
def test_vlans_change_while_members_run():
    with members(text()) as (fabric, spaces, _):
        assert not spaces["a"].pings(ADDRESS["c"], seconds=2)
        fabric.file.write_text(text(c="vlan = 10").format_map(spaces))
        plan = json.loads(fabric.cli("apply", "--dry-run", "--json", check=False).stdout)
        [change] = plan["changes"]
        assert change["section"] == "tap.c" and [key["key"] for key in change["keys"]] == ["vlan"], plan
        assert not spaces["a"].pings(ADDRESS["c"], seconds=1), "a dry run changes nothing"
        report = json.loads(fabric.cli("apply", "--json").stdout)
        assert [change["section"] for change in report["changes"]] == ["tap.c"], report
        reaches(spaces["a"], "c")
        reaches(spaces["a"], "b")
        # A daemon that was killed is followed by one with the same VLANs.
        fabric.process.kill()
        fabric.start()
        reaches(spaces["a"], "c")
        assert not spaces["a"].pings(ADDRESS["plain"], seconds=2)
        fabric.file.write_text(text(a="", b="", c="", t="").format_map(spaces))
        fabric.cli("apply")
        for target in ("b", "c", "t", "plain"):
            reaches(spaces["a"], target)
