"""The user uplink for IPv6: stock Linux members by taps that configure themselves, passt, and a host of the world outside, in namespaces.
passt has IPv6 only where the host has a default route for it."""

import contextlib
import hashlib
import os
import signal
import socket
import struct
import threading
import time

from daytwo_ipv6 import addresses, automatic
from guests_uplink6 import FAR, HOME, WORLD, Echo, apply, ask, default, refused, way_to
from lib import Fabric, Namespace, need_program, need_root, scratch, timeout, until
from lib.frames import mac_bytes
from lib.machine import SLOW
from lib.process import children, cpu_seconds
from lib.tap import ACK, SYN, TCP, Inside, checksum, ethernet, ipv4, transport

PREFIX = "fd12:3456:789a:7::"
FIXED = f"{PREFIX}66"
# As whom members see the host: crates/host/src/plan.rs, HOST6 and PEER.
HOST6, HOST4 = "64:ff9b:1::1", "192.0.0.1"
PORT = 7007
FILE = """
name = "{name}"
[network.lan]
subnet = "10.238.0.0/24"
uplink = "user"
ipv6 = "{prefix}/64"
{way}
[tap.auto]
netns = "/run/netns/{auto}"
mac = "02:54:00:00:68:01"
ip = "10.238.0.11"
accept_ra = true
[tap.six]
netns = "/run/netns/{six}"
mac = "02:54:00:00:68:02"
ip = "10.238.0.12"
guard = "ip"
ip6 = "{fixed}"
{forwards}
"""
PAIRS = [  # proto, listener, target
    (proto, listen, target)
    for proto in ("tcp", "udp")
    for listen, target in (("0.0.0.0:8001", "auto"), ("[::]:8002", "six"), ("[::1]:8003", f"[{FIXED}]"),
                           ("0.0.0.0:8004", "six"), ("[::]:8004", "six"))
]
FORWARDS = "".join(f'[[forward]]\nproto = "{proto}"\nlisten = "{listen}"\nto = "{target}:{PORT}"\n' for proto, listen, target in PAIRS)


class Counted:
    """Answers over TCP of both families with who asked, and what: 100,000 bytes. Unlike an Echo it does not wait for the end of the stream: passt
    of Debian 12 loses count where a member ends its half first."""

    PORT, BYTES = 7008, 100_000

    def __init__(self, space):
        with Inside(space):
            self.listener = socket.create_server(("::", self.PORT), family=socket.AF_INET6, dualstack_ipv6=True)
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self.answer, args=self.listener.accept(), daemon=True).start()

    def answer(self, taken, peer):
        with taken, contextlib.suppress(OSError):
            taken.settimeout(30)
            data = b""
            while len(data) < self.BYTES and (more := taken.recv(65536)):
                data += more
            taken.sendall(peer[0].removeprefix("::ffff:").encode() + b" " + hashlib.sha256(data).digest() + data)
            taken.recv(1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


class Talker:
    """Says so many bytes to each that connects."""

    PORT, BYTES = 7009, 1000

    def __init__(self, space):
        with Inside(space):
            self.listener = socket.create_server(("", self.PORT))
        self.taken = []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                self.taken.append(self.listener.accept()[0])
                self.taken[-1].sendall(bytes(self.BYTES))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        for one in (self.listener, *self.taken):
            one.close()


def out(space, proto, address):
    """The address as which a member is seen outside, at an Echo or a Counted; data are compared."""
    if proto == "udp":
        return ask(space, proto, address, PORT)
    sent = os.urandom(Counted.BYTES)
    with Inside(space):
        asker = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    with asker:
        asker.settimeout(20)
        asker.connect((address, Counted.PORT))
        asker.sendall(sent)
        answer = b""
        while (space_at := answer.find(b" ")) < 0 or len(answer) < space_at + 33 + len(sent):
            more = asker.recv(65536)
            assert more, f"the answer ended after {len(answer)} bytes"
            answer += more
    seen, _, rest = answer.partition(b" ")
    assert rest == hashlib.sha256(sent).digest() + sent, f"{len(rest)} bytes came back of {len(sent)}"
    return seen.decode()


@contextlib.contextmanager
def world(name, is_routed=True):
    """The fabric in the namespace of a host, whose default routes lead to another one."""
    need_root()
    need_program("passt")
    with contextlib.ExitStack() as stack:
        auto, six, home, far = (stack.enter_context(Namespace()) for _ in range(4))
        way_to(home, far)
        home.ip("route", "add", "default", "via", "192.0.2.2")
        if is_routed:
            home.ip("route", "add", "default", "via", WORLD)
        # passt answers pings by sockets for which it needs no privilege, where this says so.
        home.run("sh", "-c", "echo 0 2147483647 >/proc/sys/net/ipv4/ping_group_range")
        folder = stack.enter_context(scratch())

        def text(way="", forwards=FORWARDS):
            return FILE.format(name=name, prefix=PREFIX, way=way, auto=auto, six=six, fixed=FIXED, forwards=forwards)

        fabric = stack.enter_context(Fabric(folder, text(), netns=home))
        auto.ip("route", "replace", "default", "via", "10.238.0.2")
        six.ip("address", "replace", f"{FIXED}/64", "dev", "six", "nodad")
        six.ip("route", "replace", "default", "via", "10.238.0.2")
        for space in (auto, six, home, far):
            stack.enter_context(Echo(space))
        stack.enter_context(Counted(far))
        yield fabric, text, (auto, six, home, far)


def answered_as_mapped(space, via):
    """Whether a SYN to [::ffff:127.0.0.1] is answered, by whichever family."""
    own, far = automatic(space, "auto"), "192.0.2.9"
    mac = space.run("cat", "/sys/class/net/auto/address").stdout.strip()
    neighbours = space.ip("neighbour", "show", "dev", "auto")
    router_mac = next(line.split("lladdr ")[1].split()[0] for line in neighbours.splitlines() if line.startswith(via) and "lladdr" in line)
    source, target = socket.inet_pton(socket.AF_INET6, own), socket.inet_pton(socket.AF_INET6, "::ffff:127.0.0.1")
    # Port 40000 at the router's IPv4 table first, as an attacker would, so that an answer by IPv4
    # would find its way.
    with Inside(space):
        decoy = socket.socket()
        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    with decoy, raw:
        decoy.bind(("10.238.0.11", 40000))
        decoy.setblocking(False)
        decoy.connect_ex((far, 9))
        raw.bind(("auto", 0))
        raw.settimeout(0.2)
        segment = struct.pack("!HHIIBBHHH", 40000, PORT, 1, 0, 0x50, 2, 4096, 0, 0)
        pseudo = source + target + struct.pack("!II", len(segment), 6)
        segment = segment[:16] + struct.pack("!H", 0xFFFF - checksum(pseudo + segment)) + segment[18:]
        frame = mac_bytes(router_mac) + mac_bytes(mac) + b"\x86\xdd" + struct.pack("!IHBB", 0x60000000, len(segment), 6, 64) + source + target + segment
        ports = struct.pack("!HH", PORT, 40000)
        for _ in range(5):
            raw.send(frame)
            with contextlib.suppress(TimeoutError):
                for _ in range(50):
                    got = raw.recv(2048)
                    if got[6:12] == mac_bytes(router_mac) and ports in (got[34:38], got[54:58]):
                        return True
    return False


def with_segment_size(space, size, port):
    """A connection from `port` to the Talker outside whose SYN names that largest segment size, as no kernel does. How many of its bytes
    come."""
    mac = space.run("cat", "/sys/class/net/auto/address").stdout.strip()
    space.run("ping", "-c", "1", "-W", "1", "10.238.0.2", check=False)
    neighbours = space.ip("neighbour", "show", "10.238.0.2", "dev", "auto")
    to = mac_bytes(neighbours.split("lladdr ")[1].split()[0])
    source, target = socket.inet_aton("10.238.0.11"), socket.inet_aton("192.0.2.2")

    def frame(sequence, acknowledgement, flags, options=b""):
        segment = struct.pack("!HHIIBBHHH", port, Talker.PORT, sequence, acknowledgement, (20 + len(options)) << 2, flags, 65535, 0, 0) + options
        pseudo = source + target + struct.pack("!BBH", 0, 6, len(segment))
        segment = segment[:16] + struct.pack("!H", 0xFFFF - checksum(pseudo + segment + b"\0" * (len(segment) % 2))) + segment[18:]
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(segment), 1, 0, 64, 6, 0) + source + target
        return to + mac_bytes(mac) + b"\x08\0" + head[:10] + struct.pack("!H", 0xFFFF - checksum(head)) + head[12:] + segment

    with Inside(space):
        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    heard, first, end = set(), None, time.monotonic() + 5 * SLOW
    with raw:
        raw.bind(("auto", 0))
        raw.settimeout(0.5)
        raw.send(frame(1000, 0, 2, struct.pack("!BBH", 2, 4, size)))
        while len(heard) < Talker.BYTES and time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                got = raw.recv(65536)
                if got[12:14] != b"\x08\0" or got[23] != 6 or got[34:38] != struct.pack("!HH", Talker.PORT, port):
                    continue
                sequence, flags = struct.unpack("!I", got[38:42])[0], got[47]
                if flags & 18 == 18:
                    first = sequence + 1
                    raw.send(frame(1001, first, 0x10))
                elif first is not None:
                    data = got[34 + (got[46] >> 4) * 4:14 + struct.unpack("!H", got[16:18])[0]]
                    heard |= {sequence - first + n for n in range(len(data))}
    return len(heard)


def router(fabric):
    """The link-local address of the router, once passt has IPv6."""
    return fabric.status()["networks"][0]["router6"]


@timeout(180)
def test_members_reach_the_world_through_passt_by_both_families():
    with world(f"user{os.getpid()}") as (fabric, text, (auto, six, home, far)):
        automatic(auto, "auto")
        until("the router's advertisement", lambda: "proto ra" in default(auto))
        assert router(fabric).startswith("fe80::") and router(fabric) in default(auto), (router(fabric), default(auto))
        six.ip("route", "replace", "default", "via", router(fabric), "dev", "six")
        for space in (auto, six):
            for proto in ("tcp", "udp"):
                assert out(space, proto, WORLD) == HOME
                assert out(space, proto, "192.0.2.2") == "192.0.2.1"
            assert out(space, "tcp", FAR) == HOME
            assert space.answers(FAR) and space.answers("192.0.2.2")
        # What the host serves to itself alone stays its own: by the names that it has for members,
        # and by IPv4 in IPv6's form, which passt's socket would take for 127.0.0.1. The member's
        # own kernel sends no such packet.
        for address in (HOST6, HOST4):
            assert refused(auto, "tcp", address) and refused(auto, "udp", address)
        assert not answered_as_mapped(auto, router(fabric))
        # The passt goes on under another daemon, with what the router knew.
        [passt] = children(fabric.process.pid, "passt")
        fabric.replace()
        assert out(auto, "tcp", FAR) == HOME and addresses(auto, "auto")
        assert os.path.exists(f"/proc/{passt}"), "passt was started again"
        # Another passt: members keep the way out.
        os.kill(passt, signal.SIGKILL)
        until("another passt", lambda: passt not in (found := children(fabric.process.pid, "passt")) and found)
        until("the router", lambda: router(fabric) is not None)
        assert out(auto, "tcp", FAR) == HOME and "proto ra" in default(auto)
        # No way out for IPv6, and again one.
        six_only = "".join(part for part in FORWARDS.split("[[forward]]")[1:2])
        said = apply(fabric, text('uplink6 = "off"', "[[forward]]" + six_only))
        assert "uplink6" in said and "passt is started again" in said, said
        until("the withdrawal", lambda: default(auto) == "")
        assert router(fabric) is None
        assert refused(auto, "tcp", FAR) and out(auto, "tcp", "192.0.2.2") == "192.0.2.1"
        apply(fabric, text())
        until("the router again", lambda: "proto ra" in default(auto))
        assert out(auto, "udp", WORLD) == HOME
        fabric.down()
        until("the withdrawal", lambda: default(auto) == "")
        fabric.nothing_left()


@timeout(240)
def test_no_segment_size_of_a_member_ends_passt():
    with world(f"size{os.getpid()}") as (fabric, _, (auto, six, _, far)), Talker(far):
        [passt] = children(fabric.process.pid, "passt")
        six.ip("route", "replace", "default", "via", "10.238.0.2")
        assert out(six, "tcp", "192.0.2.2") == "192.0.2.1"
        # The member's kernel knows nothing of these connections, and would end them.
        auto.run("nft", "add table inet odd; add chain inet odd out { type filter hook output priority 0; }; add rule inet odd out tcp flags rst drop")
        with Inside(six):
            kept = socket.create_connection(("192.0.2.2", Counted.PORT), timeout=20)
        with kept:
            kept.sendall(bytes(50_000))
            for n, size in enumerate((1460, 0, 1, 2, 3, 4, 20, 47, 48, 536)):
                came = with_segment_size(auto, size, 30_000 + n)
                assert os.path.exists(f"/proc/{passt}"), f"passt has ended after a SYN with the segment size {size}"
                assert came == Talker.BYTES, f"{came} bytes came after a SYN with the segment size {size}"
            assert out(auto, "tcp", "192.0.2.2") == "192.0.2.1"
            kept.sendall(bytes(50_000))
            kept.settimeout(20)
            assert kept.recv(9) == b"192.0.2.1", "a neighbour's connection goes on"
        assert children(fabric.process.pid, "passt") == [passt]


@timeout(240)
def test_what_a_member_sends_before_the_answer_to_its_syn_has_no_passt_hang():
    """The passt of Debian 12 spins for ever if it reads a SYN together with another segment of its connection."""
    with world(f"early{os.getpid()}") as (fabric, _, (auto, six, _, _)):
        [passt] = children(fabric.process.pid, "passt")
        six.ip("route", "replace", "default", "via", "10.238.0.2")
        assert out(six, "tcp", "192.0.2.2") == "192.0.2.1"
        auto.run("nft", "add table inet odd; add chain inet odd out { type filter hook output priority 0; }; add rule inet odd out tcp flags rst drop")
        auto.run("ping", "-c", "1", "-W", "1", "10.238.0.2", check=False)
        to = mac_bytes(auto.ip("neighbour", "show", "10.238.0.2", "dev", "auto").split("lladdr ")[1].split()[0])

        def frame(target, sport, flags, seq, payload=b""):
            body = transport(TCP, "10.238.0.11", target, sport, 9, payload, flags, seq, 1 if flags & ACK else 0,
                             options=b"\x02\x04\x05\xb4" if flags & SYN else b"")
            return ethernet(to, mac_bytes("02:54:00:00:68:01"), 0x0800, ipv4("10.238.0.11", target, TCP, body), pad=False)

        # A host that is not there gives no answer.
        frames = [frame("192.0.2.77", 20_000 + n, *said) for n in range(50)
                  for said in ((SYN, 1000), (ACK, 1001, b"x" * 100), (SYN, 1000))]
        with Inside(auto):
            raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        with raw:
            raw.bind(("auto", 0))
            # All are in its socket before it reads the first one.
            os.kill(passt, signal.SIGSTOP)
            for one in frames:
                raw.send(one)
            time.sleep(0.3)
            os.kill(passt, signal.SIGCONT)
        time.sleep(0.5)
        before = cpu_seconds(passt)
        time.sleep(2)
        used = cpu_seconds(passt) - before
        assert used < 1, f"passt took {used:.1f} s of CPU time in 2 s"
        drops = next(port["counters"]["tx_drops"] for port in fabric.status()["ports"] if port["kind"] == "uplink")
        assert drops.get("uplink_opening", 0) == 100, drops
        assert out(six, "tcp", "192.0.2.2") == "192.0.2.1", "passt serves a neighbour"
        assert children(fabric.process.pid, "passt") == [passt]


@timeout(180)
def test_forwards_of_the_user_uplink_carry_both_families():
    with world(f"both{os.getpid()}") as (fabric, _, (_, six, home, far)):
        until("IPv6", lambda: router(fabric) is not None)
        six.ip("route", "replace", "default", "via", router(fabric), "dev", "six")
        listed = fabric.status()["forwards"]
        assert len(listed) == len(PAIRS) and not [one for one in listed if one["fault"]], listed
        for proto in ("tcp", "udp"):
            assert ask(far, proto, "192.0.2.1", 8001) == "192.0.2.2"
            assert ask(far, proto, HOME, 8002) == WORLD
            assert refused(far, proto, HOME, 8003), "it listens on the host's loopback"
            assert ask(far, proto, "192.0.2.1", 8004) == "192.0.2.2"
            assert ask(far, proto, HOME, 8004) == WORLD
            # From the host itself.
            assert ask(home, proto, "::1", 8003) == HOST6
            assert ask(home, proto, "::1", 8004) == HOST6
            assert ask(home, proto, "127.0.0.1", 8004) == HOST4
        fabric.down()
        fabric.nothing_left()


@timeout(180)
def test_without_a_default_route_for_ipv6_only_ipv4_goes_out_and_it_is_said():
    with world(f"four{os.getpid()}", is_routed=False) as (fabric, _, (auto, six, home, far)):
        automatic(auto, "auto")
        faults = {one["listen"]: one["fault"] for one in fabric.status()["forwards"] if one["proto"] == "tcp"}
        assert [listen for listen, fault in faults.items() if fault] == ["[::]:8002", "[::1]:8003", "[::]:8004"], faults
        assert "default route" in faults["[::]:8002"], faults
        assert ask(far, "tcp", "192.0.2.1", 8001) == "192.0.2.2"
        assert ask(far, "tcp", "192.0.2.1", 8004) == "192.0.2.2"
        assert out(auto, "tcp", "192.0.2.2") == "192.0.2.1"
        assert default(auto) == "" and router(fabric) is None, "no way is advertised that leads nowhere"
        # The host gets one: the next passt has it.
        home.ip("route", "add", "default", "via", WORLD)
        [passt] = children(fabric.process.pid, "passt")
        os.kill(passt, signal.SIGKILL)
        until("the router's advertisement", lambda: "proto ra" in default(auto))
        assert out(auto, "tcp", FAR) == HOME
        assert not [one for one in fabric.status()["forwards"] if one["fault"]]
        six.ip("route", "replace", "default", "via", router(fabric), "dev", "six")
        assert ask(far, "tcp", HOME, 8002) == WORLD
        # And loses it: the one after that serves IPv4.
        home.ip("-6", "route", "del", "default")
        [passt] = children(fabric.process.pid, "passt")
        os.kill(passt, signal.SIGKILL)
        until("the withdrawal", lambda: default(auto) == "")
        assert out(auto, "tcp", "192.0.2.2") == "192.0.2.1"
        fabric.down()
        fabric.nothing_left()
