"""The bypass beside the kernel's own forwarding: the same frames through both, compared byte by byte.

Each test has network namespaces of its own: a router with taps (driven here as a microVM's monitor drives them) and veths.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import socket
import struct
import subprocess
import time
from pathlib import Path

from lib import ROOT, Namespace, Skip, need_program, need_root, scratch, timeout, until
from lib.machine import SLOW
from lib.tap import (ACK, ETH_ARP, ETH_IP4, ETH_IP6, GSO_ECN, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, ICMP, ICMP6, NEEDS_CSUM, SYN, TCP, TUNSETOFFLOAD, UDP, Inside,
                     Tap, checksum, echo, ethernet, ipv4, ipv6, transport, vnet_header)

PROGRAM = Path(os.environ.get("TOMBOLO_PROGRAM", ROOT / "target/release/tombolo"))
A, B = "10.1.0.2", "10.2.0.2"
A6, B6 = "fd01::2", "fd02::2"
# How long a frame may take that arrives. The kernel forwards in its own time where the machine has
# much else to do.
ARRIVES_S = 20
# chooser.rs: fewer whole frames a second do not have `auto` choose XDP.
FEW_PER_S = 20_000
MAC_A, MAC_B = "02:00:00:00:0a:02", "02:00:00:00:0b:02"


def kernel_version():
    """Of the running kernel, like (6, 12)."""
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])


def renames_what_is_up():
    """Before Linux 6.2 an interface has to be down for that, and loses its routes (commit bd039b5ea2a9)."""
    return kernel_version() >= (6, 2)


def has_tcx():
    """Whether the programs stand at tcx hooks; else they are filters behind a clsact qdisc."""
    if os.environ.get("TOMBOLO_BYPASS_AS_OLD") == "1":
        return False
    # bpf(2), BPF_PROG_QUERY, of the loopback interface's tcx ingress; older kernels know no such
    # hook.
    attributes = ctypes.create_string_buffer(struct.pack("<II", 1, 46), 128)
    return ctypes.CDLL(None).syscall(321, 16, attributes, len(attributes)) == 0


def translates_ipv6(h):
    """Whether the programs of mode tcx translate IPv6 here, as the bypass says. bypass_nat holds it to that."""
    return not any("translated IPv6" in limit for limit in h.status()["limits"])


class Host:
    """A router namespace with a tap to A and a tap to B, and a bypass of its own."""

    def __init__(self, folder, space):
        self.folder, self.space = folder, space
        # How soon errors follow each other decides nothing. Older kernels have the last two for the
        # whole machine: tests/kernels-init sets them there.
        space.run("sysctl", "-qw", "net.ipv4.icmp_ratelimit=0", "net.ipv6.icmp.ratelimit=0")
        space.run("sysctl", "-qew", "net.ipv4.icmp_msgs_per_sec=1000000", "net.ipv4.icmp_msgs_burst=1000000")
        space.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1",
                  # An address that is being checked for duplicates is a change of routes in the
                  # middle of a test.
                  "net.ipv6.conf.default.accept_dad=0", "net.ipv6.conf.all.accept_dad=0")
        self.a = Tap(space, "ta", "10.1.0.1/24", "fd01::1/64", mac=MAC_A, neighbours=(A, A6))
        self.b = Tap(space, "tb", "10.2.0.1/24", "fd02::1/64", mac=MAC_B, neighbours=(B, B6))

    def cli(self, *words, check=True):
        command = [str(PROGRAM), "bypass", *map(str, words), "--netns", str(self.space)]
        env = dict(os.environ, TOMBOLO_RUNTIME=str(self.folder / "run"))
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 * SLOW, env=env)
        if check and done.returncode:
            raise AssertionError(f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr.strip()}")
        return done

    def attach(self, *names, words=()):
        return self.cli("attach", *(names or ("ta", "tb")), *words)

    def status(self, name=None):
        report = json.loads(self.cli("status", "--json").stdout)
        return next(i for i in report["interfaces"] if i["name"] == name) if name else report

    def taken(self, name="ta"):
        return self.status(name)["taken"]

    def programs_at(self, *names):
        """How many of tc's programs are at these interfaces, which have two each."""
        if has_tcx():
            indices = [self.space.ip("-o", "link", "show", name).split(":")[0] for name in names]
            return sum(len(list((self.folder / "run/bypass/bpf").glob(f"*/link_tcx_*_{index}"))) for index in indices)
        shown = [self.space.run("tc", "filter", "show", "dev", name, side).stdout for name in names for side in ("ingress", "egress")]
        return sum(len(re.findall(r"handle 0x1 tcx_(?:in|out) ", text)) for text in shown)

    def nft(self, text, *words):
        return subprocess.run(["ip", "netns", "exec", str(self.space), "nft", *words, "-f", "-"], input=text, text=True, capture_output=True)

    def rules(self, text):
        done = self.nft(text)
        assert done.returncode == 0, done.stderr

    def to_b(self, kind, payload, **more):
        return ethernet(self.a.host_mac, self.a.mac, kind, payload, **more)

    def to_a(self, kind, payload, **more):
        return ethernet(self.b.host_mac, self.b.mac, kind, payload, **more)

    def udp(self, payload=b"x" * 22, sport=1000, dport=2000, **more):
        return self.to_b(ETH_IP4, ipv4(A, B, UDP, transport(UDP, A, B, sport, dport, payload), **more))

    def across(self, frame, header=bytes(10), seconds=ARRIVES_S, wanted=None):
        """What B gets when A sends it: IP frames only. One that shall not arrive is waited for by fewer seconds."""
        self.b.drain()
        self.a.send(frame, header)
        return self.b.receive(seconds, wanted or is_ip)

    def back(self, frame, header=bytes(10), seconds=ARRIVES_S, wanted=None):
        self.a.drain()
        self.b.send(frame, header)
        return self.a.receive(seconds, wanted or is_ip)


def is_ip(frame):
    """IP to one receiver: not what the host's own IPv6 says to its neighbourhood."""
    return not frame[0] & 1 and frame[12:14] in (b"\x08\x00", b"\x86\xdd")


def is_tcp(frame):
    """TCP to one receiver: not an ICMP error about a frame that was sent seconds ago."""
    return is_ip(frame) and frame[23 if frame[12:14] == b"\x08\x00" else 20] == TCP


def has_ended(pid):
    """A process that is no more, or only waits to be reaped: that has no command line."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


@contextlib.contextmanager
def host():
    need_root()
    need_program("nft")
    if kernel_version() < (5, 14):
        raise Skip(f"the bypass cannot work before Linux 5.14, this is {os.uname().release}")
    if not PROGRAM.exists():
        raise Skip(f"{PROGRAM} is not built: run ./x build")
    with Namespace() as space, scratch() as folder:
        made = Host(folder, space)
        try:
            yield made
        finally:
            made.cli("detach", check=False)
            made.a.close()
            made.b.close()


def frames(h):
    """Names and frames from A's side, (vnet header, frame), of all kinds that the two paths are compared on."""
    tcp = dict(proto=TCP, source=A, destination=B, sport=3000, dport=80)
    tcp6 = dict(proto=TCP, source=A6, destination=B6, sport=3000, dport=80)
    udp4 = lambda payload, **more: transport(UDP, A, B, 1000, 2000, payload, **more)  # noqa: E731
    plain = bytes(10)
    partial = lambda at, offset: vnet_header(NEEDS_CSUM, start=at, offset=offset)  # noqa: E731
    yield "udp", plain, h.udp()
    yield "udp without payload", plain, h.udp(b"")
    yield "udp unpadded", plain, h.to_b(ETH_IP4, ipv4(A, B, UDP, udp4(b"")), pad=False)
    yield "udp of 1500", plain, h.udp(b"y" * 1472)
    yield "udp without checksum", plain, h.to_b(ETH_IP4, ipv4(A, B, UDP, struct.pack("!HHHH", 1000, 2000, 12, 0) + b"abcd"))
    yield "udp with a wrong checksum", plain, h.to_b(ETH_IP4, ipv4(A, B, UDP, udp4(b"abc", bad=True)))
    yield "udp with TOS and without DF", plain, h.udp(tos=0xB8, flags=0)
    yield "udp with ECN", plain, h.udp(tos=0x03)
    yield "udp with an odd id", plain, h.udp(ident=0xFFFF)
    for ttl in (2, 3, 128, 255):
        yield f"udp with ttl {ttl}", plain, h.udp(ttl=ttl)
    yield "tcp", plain, h.to_b(ETH_IP4, ipv4(A, B, TCP, transport(**tcp, payload=b"hello")))
    yield "tcp of 1500", plain, h.to_b(ETH_IP4, ipv4(A, B, TCP, transport(**tcp, payload=b"z" * 1460)))
    yield "tcp with a partial checksum", partial(34, 16), h.to_b(ETH_IP4, ipv4(A, B, TCP, transport(**tcp, payload=b"part" * 50, partial=True)))
    yield "udp with a partial checksum", partial(34, 6), h.to_b(ETH_IP4, ipv4(A, B, UDP, udp4(b"part" * 50, partial=True)))
    for name, outer in (("without checksum", 0), ("with a checksum", 0x1234)):
        # A tunnel's packet: what is unfinished is within, and UDP's own field does not tell. From
        # flows of their own.
        inner = ethernet(h.b.mac, h.a.mac, ETH_IP4, ipv4("10.9.0.1", "10.9.0.2", TCP, transport(TCP, "10.9.0.1", "10.9.0.2", 5, 6, b"in" * 40, partial=True)))
        vxlan = struct.pack("!HHHH", 5000 + bool(outer), 2000, 16 + len(inner), outer) + b"\x08" + bytes(7) + inner
        yield f"udp {name} around a partial one", partial(34 + 16 + 34, 16), h.to_b(ETH_IP4, ipv4(A, B, UDP, vxlan))
    yield "tcp of 60 KB", vnet_header(NEEDS_CSUM, GSO_TCPV4, 54, 1448, 34, 16), h.to_b(
        ETH_IP4, ipv4(A, B, TCP, transport(**tcp, payload=bytes(range(256)) * 234, partial=True)))
    yield "icmp echo", plain, h.to_b(ETH_IP4, ipv4(A, B, ICMP, echo(A, B)))
    yield "icmp echo with an odd length", plain, h.to_b(ETH_IP4, ipv4(A, B, ICMP, echo(A, B, payload=b"odd" * 33)))
    yield "icmp6 echo", plain, h.to_b(ETH_IP6, ipv6(A6, B6, ICMP6, echo(A6, B6, payload=b"six" * 9)))
    yield "udp6", plain, h.to_b(ETH_IP6, ipv6(A6, B6, UDP, transport(UDP, A6, B6, 1000, 2000, b"six" * 9)))
    yield "udp6 with class and label", plain, h.to_b(ETH_IP6, ipv6(A6, B6, UDP, transport(UDP, A6, B6, 1000, 2000, b"six"), label=0xB812345))
    yield "udp6 with 2 hops", plain, h.to_b(ETH_IP6, ipv6(A6, B6, UDP, transport(UDP, A6, B6, 1000, 2000, b"six"), hops=2))
    yield "tcp6", plain, h.to_b(ETH_IP6, ipv6(A6, B6, TCP, transport(**tcp6, payload=b"hello")))
    yield "tcp6 with a partial checksum", partial(54, 16), h.to_b(ETH_IP6, ipv6(A6, B6, TCP, transport(**tcp6, payload=b"p" * 99, partial=True)))


def same(got, expected, mode):
    """The same bytes and the same vnet header; but for its hdr_len, a hint, where an XDP program is on the tap: then the kernel makes
    segmentation frames linear, whatever the program says, and the hint is their whole length."""
    if mode == "xdp" and got and got[0][1]:
        got, expected = [(header[:2] + header[4:], frame) for header, frame in (got, expected)]
    return got == expected


def settle(h, frame, header):
    """Sends a frame until its flow is in the bypass. The first frames of a tracked TCP connection are not enough: the controller has to
    have conntrack judge it liberally."""
    def is_in():
        before = h.status("ta")
        h.across(frame, header)
        after = h.status("ta")
        return after["taken"] + after["learned"] > before["taken"] + before["learned"]

    until("the flow is learned", is_in)


def compare(h, mode="tcx"):
    """Each frame by the kernel's way (nothing attached), then by the bypass: the same bytes and the same offload state."""
    expected = {}
    for name, header, frame in frames(h):
        expected[name] = h.across(frame, header)
        assert expected[name], f"{name}: the kernel does not forward it"
    attached = time.monotonic()
    h.attach(words=("--lease", "10000", "--mode", mode))
    for name, header, frame in frames(h):
        for _ in range(3):
            settle(h, frame, header)
            before = h.status("ta")
            got = h.across(frame, header)
            assert same(got, expected[name], mode), f"{name}:\nkernel {expected[name]}\nbypass {got}"
            after = h.status("ta")
            if after["by_reason"].get("up_lease", 0) == before["by_reason"].get("up_lease", 0):
                break
            # On an emulated machine ten seconds may pass between the two frames.
            assert time.monotonic() > attached + 10, f"{name}: a lease ended early: {after}"
        assert after["taken"] == before["taken"] + 1, f"{name} was not taken: {after}"
    return h.status("ta")["by_reason"]


def test_taken_frames_are_byte_for_byte_the_kernels():
    with host() as h:
        compare(h)


def test_taken_frames_are_the_kernels_with_a_firewall_that_tracks():
    with host() as h:
        h.rules("table inet f { chain forward { type filter hook forward priority 0; policy drop; ct state established,related accept; "
                "udp dport 2000 accept; tcp dport 80 accept; icmp type echo-request accept; icmpv6 type echo-request accept; }; }")
        h.space.run("sysctl", "-qw", "net.netfilter.nf_conntrack_checksum=0")
        establish(h, 3000, 80)
        establish6(h, 3000, 80)
        compare(h)


def test_frames_that_xdp_takes_are_byte_for_byte_the_kernels_and_partial_and_large_ones_are_left_to_tcx():
    with host() as h:
        counts = compare(h, "xdp")
        # Six kinds have unfinished checksums, in a packet within or the 60 KB one among them, and
        # one has none.
        assert counts["handed_partial"] + counts["handed_large"] == counts["taken_tcx"] >= 7, counts
        assert counts["taken_xdp"] >= 17, counts


def segmentation_frames(h):
    """Of every kind that a tap takes, such also whose segments together are no longer than a packet, and such as no sound guest sends: whole checksums."""
    data = bytes(range(250)) * 12
    tcp = lambda a, b, payload, **more: transport(TCP, a, b, 1000, 2000, payload, **more)  # noqa: E731
    udp = lambda a, b, payload, **more: transport(UDP, a, b, 1000, 2000, payload, **more)  # noqa: E731
    four = lambda proto, body: h.to_b(ETH_IP4, ipv4(A, B, proto, body))  # noqa: E731
    six = lambda proto, body: h.to_b(ETH_IP6, ipv6(A6, B6, proto, body))  # noqa: E731
    yield vnet_header(NEEDS_CSUM, GSO_TCPV4, 54, 1000, 34, 16), four(TCP, tcp(A, B, data, partial=True))
    yield vnet_header(NEEDS_CSUM, GSO_TCPV4, 54, 300, 34, 16), four(TCP, tcp(A, B, data[:900], partial=True))
    yield vnet_header(NEEDS_CSUM, GSO_TCPV4 | GSO_ECN, 54, 300, 34, 16), four(TCP, tcp(A, B, data[:900], partial=True, flags=ACK | 0x80))
    yield vnet_header(0, GSO_TCPV4, 54, 300), four(TCP, tcp(A, B, data[:900]))
    yield vnet_header(NEEDS_CSUM, GSO_UDP_L4, 42, 1000, 34, 6), four(UDP, udp(A, B, data, partial=True))
    yield vnet_header(NEEDS_CSUM, GSO_TCPV6, 74, 1000, 54, 16), six(TCP, tcp(A6, B6, data, partial=True))
    yield vnet_header(NEEDS_CSUM, GSO_UDP_L4, 62, 1000, 54, 6), six(UDP, udp(A6, B6, data, partial=True))


def is_refused(h, header, frame):
    """Whether this kernel's taps take no UDP segmentation frames, as before Linux 6.2."""
    try:
        h.a.send(frame, header)
    except OSError as error:
        if error.errno == errno.EINVAL and header[1] == GSO_UDP_L4:
            return True
        raise
    return False


def test_segmentation_frames_arrive_as_the_kernel_sends_them_to_readers_with_and_without_offloads():
    for mode in ("tcx", "xdp"):
        for offloads in (True, False):
            with host() as h:
                if not offloads:
                    fcntl.ioctl(h.b.fd, TUNSETOFFLOAD, 0)

                def sent(header, frame, h=h):
                    h.b.drain()
                    h.a.send(frame, header)
                    # Without the header's length, a hint: test_frames_that_xdp_takes says why.
                    return [(v[:2] + v[4:], f) for v, f in h.b.drain(is_ip)]

                frames = [frame for frame in segmentation_frames(h) if not is_refused(h, *frame)]
                kernel = [sent(*frame) for frame in frames]
                assert all(kernel) and (offloads or all(not v[0] and not v[1] for got in kernel for v, _ in got)), kernel
                h.attach(words=("--lease", "10000", "--mode", mode))
                # Flows of whole frames, which XDP takes.
                for kind, a, b, packet in ((ETH_IP4, A, B, ipv4), (ETH_IP6, A6, B6, ipv6)):
                    for proto in (TCP, UDP):
                        for _ in range(2):
                            assert h.across(h.to_b(kind, packet(a, b, proto, transport(proto, a, b, 1000, 2000, b"whole"))))
                assert h.taken() == 4
                assert len(frames) >= 5
                for expected, frame in zip(kernel, frames):
                    for _ in range(2):
                        assert sent(*frame) == expected, f"{mode}, offloads {offloads}, {frame[0]}:\nkernel {expected}\nbypass {sent(*frame)}"
                counts = h.status("ta")["by_reason"]
                assert counts["taken_tcx"] == 2 * len(frames) + (4 if mode == "tcx" else 0), counts
                assert counts.get("handed_large", 0) == (2 * len(frames) if mode == "xdp" else 0), counts


def test_what_a_writer_that_blocks_sends_is_taken_in_every_mode():
    """For such a one the kernel makes an sk_buff before the XDP program runs."""
    with host() as h:
        os.set_blocking(h.a.fd, True)
        h.attach(words=("--lease", "10000", "--mode", "xdp"))
        for _ in range(3):
            h.b.drain()
            h.a.send(h.udp())
            assert h.b.receive(ARRIVES_S, is_ip)
        counts = h.status("ta")["by_reason"]
        assert counts["taken_tcx"] == counts["handed_large"] == 2, counts
        os.set_blocking(h.a.fd, False)
        assert h.across(h.udp()) and h.status("ta")["by_reason"]["taken_xdp"] == 1


def test_tunnels_that_carry_whole_and_unfinished_packets_in_turn_lose_no_mark_in_xdp():
    """Each flow is learned from a whole packet. That one whose inner checksum is unfinished comes next shows in no field of UDP's own."""
    heads = {"vxlan": b"\x08" + bytes(3) + b"\0\0\x2a\0", "vxlan with a group": b"\x88\0\0\x07\0\0\x2a\0", "geneve": b"\0\0\x65\x58\0\0\x2a\0",
             "geneve with an option": b"\x02\x40\x65\x58\0\0\x2a\0" + b"\x01\x02\x80\x01\0\0\0\x09"}
    with host() as h:
        def frame(head, sport, partial, seq):
            inner = transport(TCP, "10.9.0.1", "10.9.0.2", 5, 6, b"in" * 40, partial=partial, seq=seq)
            body = head + ethernet(h.b.mac, h.a.mac, ETH_IP4, ipv4("10.9.0.1", "10.9.0.2", TCP, inner))
            start = 34 + 8 + len(head) + 34
            header = vnet_header(NEEDS_CSUM, start=start, offset=16) if partial else bytes(10)
            # The outer checksum is right as soon as the inner one is finished (local checksum
            # offload).
            done = head + ethernet(h.b.mac, h.a.mac, ETH_IP4, ipv4("10.9.0.1", "10.9.0.2", TCP, transport(TCP, "10.9.0.1", "10.9.0.2", 5, 6, b"in" * 40, seq=seq)))
            outer = transport(UDP, A, B, sport, 4789, done)[:8]
            return header, h.to_b(ETH_IP4, ipv4(A, B, UDP, outer + body))

        frames = [frame(head, 1000 + n, partial, seq) for n, head in enumerate(heads.values()) for seq in range(3) for partial in (False, True)]
        kernel = [h.across(f, header) for header, f in frames]
        assert [bool(got[0][0] & NEEDS_CSUM) for got in kernel] == [False, True] * 12
        h.attach(words=("--lease", "10000", "--mode", "xdp"))
        for expected, (header, f) in zip(kernel, frames):
            got = h.across(f, header)
            assert same(got, expected, "xdp"), f"kernel {expected}\nbypass {got}"
        counts = h.status("ta")["by_reason"]
        assert counts["taken_tcx"] == counts["handed_partial"] == len(frames) - len(heads), counts
        # What is no tunnel is XDP's as before.
        h.across(h.udp())
        assert h.across(h.udp()) and h.status("ta")["by_reason"]["taken_xdp"] == 1


def test_xdp_steps_aside_while_somebody_captures_and_for_outputs_that_are_no_taps():
    with host() as h:
        h.attach(words=("--lease", "10000", "--mode", "xdp"))
        h.across(h.udp())
        assert h.across(h.udp())
        assert h.status("ta")["by_reason"]["taken_xdp"] == 1
        with Inside(h.space):
            capture = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        capture.bind(("ta", 3))
        assert h.across(h.udp())
        until("the controller's notice", lambda: h.status("ta")["captured"])
        capture.settimeout(ARRIVES_S)
        # It hears also what the host's own IPv6 says.
        while capture.recv(2000)[12:14] != b"\x08\x00":
            pass
        assert h.across(h.udp()) and h.status("ta")["by_reason"]["taken_xdp"] == 1
        capture.close()
        until("the controller's notice", lambda: not h.status("ta")["captured"])
        h.across(h.udp())
        assert h.across(h.udp()) and h.status("ta")["by_reason"]["taken_xdp"] == 2


@timeout(300)
def test_auto_moves_a_tap_of_small_frames_to_xdp_and_back_for_segmentation_frames():
    with host() as h:
        h.attach()
        assert h.status("ta")["wanted"] == "auto" and h.status("ta")["mode"] == "tcx"
        frame, header = h.udp(), bytes(10)

        def load(seconds, condition):
            end, sent = time.monotonic() + seconds, 0
            while time.monotonic() < end:
                for _ in range(20000):
                    os.write(h.a.fd, header + frame)
                sent += 20000
                h.b.drain()
                if condition(h.status("ta")):
                    return
            if sent < seconds * FEW_PER_S:
                raise Skip(f"this machine sends {sent / seconds:.0f} frames a second, and `auto` chooses XDP from {FEW_PER_S} on")
            raise AssertionError(h.status("ta"))

        # The first second in a mode has frames of the one before, and a few segmentation frames in
        # it are not held against XDP.
        load(120, lambda s: s["mode"] == "xdp" and s["by_reason"].get("taken_xdp") and s["for_ms"] > 3000)
        assert "whole frames" in h.status("ta")["why"]
        big = h.to_b(ETH_IP4, ipv4(A, B, TCP, transport(TCP, A, B, 3000, 80, b"g" * 6000, partial=True)))
        gso = vnet_header(NEEDS_CSUM, GSO_TCPV4, 54, 1448, 34, 16)

        def stream():
            # As many as are a stream also where each look at the mode takes a second.
            for _ in range(100):
                h.a.send(big, gso)
            h.b.drain()
            return h.status("ta")["mode"] == "tcx"

        until("tcx again", stream)
        assert "segmentation" in h.status("ta")["why"] or "later" in h.status("ta")["why"], h.status("ta")


def test_programs_that_are_there_are_left_alone():
    with host() as h:
        # Somebody else's: a bypass with other runtime files.
        other = Host.__new__(Host)
        other.folder, other.space = h.folder / "other", h.space
        other.attach("ta", words=("--mode", "xdp"))
        try:
            wrong = h.cli("attach", "tb", "ta", "--mode", "xdp", check=False)
            assert wrong.returncode == 1 and "ta has an XDP program already" in wrong.stderr, wrong
            assert not h.status()["attached"] and "xdp" not in h.space.ip("link", "show", "tb")
            h.attach("tb", words=("--mode", "tcx"))
            assert h.cli("attach", "ta", "--mode", "xdp", check=False).returncode == 1
            assert [i["name"] for i in h.status()["interfaces"]] == ["tb"]
            done = h.attach(words=("--mode", "tcx"))
            assert "ta: runs after tcx_in" in done.stderr, done
            h.cli("detach")
            assert other.status("ta")["mode"] == "xdp" and "xdp" in h.space.ip("link", "show", "ta")
        finally:
            other.cli("detach")
        assert "xdp" not in h.space.ip("link", "show", "ta")


def establish(h, sport, dport, a=A, b=B, to=None, seen=None, payload=b""):
    """A TCP handshake from A to B; `to` is where A sends (a translated address), `seen` whom B sees."""
    to, seen = to or b, seen or (a, sport)
    assert h.across(h.to_b(ETH_IP4, ipv4(a, to, TCP, transport(TCP, a, to, sport, dport, flags=SYN, seq=100, ack=0))), wanted=is_tcp), "SYN"
    port = dport
    answer = transport(TCP, b, seen[0], port, seen[1], flags=SYN | ACK, seq=500, ack=101)
    assert h.back(h.to_a(ETH_IP4, ipv4(b, seen[0], TCP, answer)), wanted=is_tcp), "SYN, ACK"
    assert h.across(h.to_b(ETH_IP4, ipv4(a, to, TCP, transport(TCP, a, to, sport, dport, seq=101, ack=501))), wanted=is_tcp), "ACK"


def establish6(h, sport, dport):
    send = lambda s, d, p, q, **more: transport(TCP, s, d, p, q, **more)  # noqa: E731
    assert h.across(h.to_b(ETH_IP6, ipv6(A6, B6, TCP, send(A6, B6, sport, dport, flags=SYN, seq=100, ack=0))), wanted=is_tcp), "SYN"
    assert h.back(h.to_a(ETH_IP6, ipv6(B6, A6, TCP, send(B6, A6, dport, sport, flags=SYN | ACK, seq=500, ack=101))), wanted=is_tcp), "SYN, ACK"
    assert h.across(h.to_b(ETH_IP6, ipv6(A6, B6, TCP, send(A6, B6, sport, dport, seq=101, ack=501))), wanted=is_tcp), "ACK"


def test_what_is_not_understood_goes_up_and_is_answered_by_the_kernel():
    with host() as h:
        h.attach(words=("--lease", "10000"))
        fragment = ipv4(A, B, UDP, transport(UDP, A, B, 1000, 2000, b"f" * 24), flags=0x2000)
        options = ipv4(A, B, UDP, transport(UDP, A, B, 1000, 2000, b"o"), options=b"\x01\x01\x01\x00")
        # A timestamp request: no echo.
        stamp = struct.pack("!BBHHHIII", 13, 0, 0, 1, 1, 1, 0, 0)
        stamp = stamp[:2] + struct.pack("!H", ~checksum(stamp) & 0xFFFF) + stamp[4:]
        extension = ipv6(A6, B6, 60, bytes([UDP, 0, 1, 4, 0, 0, 0, 0]) + transport(UDP, A6, B6, 1000, 2000, b"e"))
        cases = [
            ("up_options", h.to_b(ETH_IP4, options), True),
            ("up_transport", h.to_b(ETH_IP4, ipv4(A, B, ICMP, stamp)), True),
            ("up_options", h.to_b(ETH_IP6, extension), True),
            ("up_ttl", h.udp(ttl=1), False),
            ("up_malformed", h.to_b(ETH_IP4, ipv4(A, B, UDP, transport(UDP, A, B, 1000, 2000, b"l"), length=300)), False),
            ("up_not_ours", b"\x02\0\0\0\0\x77" + h.udp()[6:], False),
            ("up_vlan", h.udp()[:12] + b"\x81\x00\x00\x05" + h.udp()[12:], False),
            ("up_protocol", h.to_b(0x88B5, b"what"), False),
        ]
        h.across(h.udp())
        h.across(h.udp())
        for reason, frame, arrives in cases:
            before = h.status("ta")["by_reason"].get(reason, 0)
            got = h.across(frame, seconds=ARRIVES_S if arrives else 0.3)
            assert bool(got) == arrives, f"{reason}: {got}"
            until(reason, lambda reason=reason, before=before: h.status("ta")["by_reason"].get(reason, 0) == before + 1)
        # A flow that is known is of no help to a fragment of it.
        before = h.status("ta")["by_reason"].get("up_fragment", 0)
        h.across(h.to_b(ETH_IP4, fragment), seconds=0.2)
        until("up_fragment", lambda: h.status("ta")["by_reason"].get("up_fragment", 0) == before + 1)
        # The kernel's answers: time exceeded.
        h.a.drain()
        h.a.send(h.udp(ttl=1))
        _, answer = h.a.receive(ARRIVES_S, lambda f: f[12:14] == b"\x08\x00" and f[23] == ICMP)
        assert answer[34] == 11, answer


def pieces(h, payload):
    """A datagram of each family in pieces, the first of which has the ports."""
    whole = transport(UDP, A, B, 1000, 2000, payload)
    for at in range(0, len(whole), 800):
        part, more = whole[at:at + 800], at + 800 < len(whole)
        yield h.to_b(ETH_IP4, ipv4(A, B, UDP, part, ident=77, flags=(0x2000 if more else 0) | at // 8))
    whole = transport(UDP, A6, B6, 1000, 2000, payload)
    for at in range(0, len(whole), 800):
        part, more = whole[at:at + 800], at + 800 < len(whole)
        yield h.to_b(ETH_IP6, ipv6(A6, B6, 44, struct.pack("!BBHI", UDP, 0, at | more, 77) + part))


def test_fragments_and_options_of_known_flows_arrive_as_the_kernel_sends_them():
    tracking = "table inet f { chain forward { type filter hook forward priority 0; ct state invalid drop; }; }"
    options = [b"\x01" * 4, b"\x94\x04\0\0", b"\x07\x07\x04" + bytes(5)]
    for mode in ("tcx", "xdp"):
        for rules in ("", tracking):
            with host() as h:
                if rules:
                    h.rules(rules)
                frames = list(pieces(h, bytes(range(250)) * 8))
                frames += [h.to_b(ETH_IP4, ipv4(A, B, UDP, transport(UDP, A, B, 1000, 2000, b"o"), options=o)) for o in options]

                def sent(h=h, frames=frames):
                    h.b.drain()
                    for frame in frames:
                        h.a.send(frame)
                    # The number of IPv6's pieces that are cut again is any.
                    return [(v, f[:58] + f[62:] if f[12:14] == b"\x86\xdd" and f[20] == 44 else f) for v, f in h.b.drain(is_ip)]

                # With tracking the kernel holds the pieces back up to the last one, and cuts again.
                kernel = sent()
                assert len(kernel) == len(frames), kernel
                h.attach(words=("--lease", "10000", "--mode", mode))
                h.across(h.udp())
                assert h.across(h.udp()) and h.taken() == 1
                for _ in range(2):
                    assert sent() == kernel, (mode, rules)
                counts = h.status("ta")["by_reason"]
                assert counts["up_fragment"] == 12 and counts["up_options"] == 6 and h.taken() == 1, counts


def test_a_packet_too_long_for_the_way_out_is_answered_and_cut_as_the_kernel_does():
    with host() as h:
        h.space.ip("link", "set", "tb", "mtu", "1400")
        h.attach(words=("--lease", "10000"))
        h.across(h.udp())
        assert h.across(h.udp())
        h.a.drain()
        h.a.send(h.udp(b"m" * 1472))
        _, answer = h.a.receive(ARRIVES_S, lambda f: f[12:14] == b"\x08\x00" and f[23] == ICMP)
        assert (answer[34], answer[35], struct.unpack("!H", answer[40:42])[0]) == (3, 4, 1400)
        h.b.drain()
        h.a.send(h.udp(b"m" * 1472, flags=0))
        pieces = [h.b.receive(ARRIVES_S, is_ip)[1], h.b.receive(ARRIVES_S, is_ip)[1]]
        assert all(len(p) <= 1414 for p in pieces)
        assert h.status("ta")["by_reason"]["up_mtu"] == 2
        # A segmentation frame whose segments fit is taken, and one whose segments do not is not.
        big = ipv4(A, B, TCP, transport(TCP, A, B, 3000, 80, b"g" * 6000, partial=True))
        for size, fits in ((1300, True), (1448, False)):
            header = vnet_header(NEEDS_CSUM, GSO_TCPV4, 54, size, 34, 16)
            seconds = ARRIVES_S if fits else 0.3
            h.across(h.to_b(ETH_IP4, big), header, seconds)
            before = h.taken()
            h.across(h.to_b(ETH_IP4, big), header, seconds)
            assert h.taken() - before == fits, size
        assert h.status("ta")["taken_large"] >= 1


def test_a_route_that_changes_under_traffic_is_followed_at_once():
    with host() as h:
        other = Tap(h.space, "tc", "10.3.0.1/24", mac="02:00:00:00:0c:02", neighbours=("10.3.0.2",))
        try:
            h.attach("ta", "tb", "tc", words=("--lease", "10000"))
            h.across(h.udp())
            assert h.across(h.udp()) and h.taken() == 1
            h.space.ip("route", "add", B + "/32", "via", "10.3.0.2", "dev", "tc")
            h.b.drain()
            for n in range(5):
                h.a.send(h.udp())
                assert other.receive(ARRIVES_S, is_ip), f"frame {n} after the change"
            assert not h.b.drain(is_ip), "a frame went the old way"
            h.space.ip("route", "del", B + "/32")
            assert h.across(h.udp()) and not other.drain(is_ip)
            h.space.ip("link", "set", "tb", "down")
            assert h.across(h.udp(), seconds=0.2) is None
        finally:
            other.close()


def test_a_neighbour_that_moves_is_followed_by_the_keeper_and_without_it_by_the_lease():
    with host() as h:
        h.attach(words=("--lease", "10000"))
        h.across(h.udp())
        assert h.across(h.udp())[1][:6] == h.b.mac
        h.space.ip("neighbour", "replace", B, "lladdr", "02:00:00:00:0b:99", "dev", "tb", "nud", "permanent")
        moved = bytes.fromhex("020000000b99")
        until("the controller's notice", lambda: h.across(h.udp())[1][:6] == moved)
        h.cli("detach")
        h.attach(words=("--lease", "100", "--no-controller"))
        h.across(h.udp())
        h.across(h.udp())
        h.space.ip("neighbour", "replace", B, "lladdr", MAC_B, "dev", "tb", "nud", "permanent")
        until("the lease's end", lambda: h.across(h.udp())[1][:6] == h.b.mac)


def arp_answer(h):
    """B's answer to the router's question who has its address."""
    return ethernet(h.b.host_mac, h.b.mac, ETH_ARP, struct.pack("!HHBBH6s4s6s4s", 1, ETH_IP4, 6, 4, 2, h.b.mac, socket.inet_aton(B),
                                                                h.b.host_mac, socket.inet_aton("10.2.0.1")))


def test_what_waited_for_its_neighbour_is_not_learned_under_routes_that_came_meanwhile():
    """The kernel decided on it when it came in, and no longer would."""
    with host() as h:
        # The note of a frame is its CPU's.
        cpus = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cpus)})
        try:
            h.attach(words=("--lease", "10000"))
            h.space.ip("neighbour", "del", B, "dev", "tb")
            h.b.drain()
            h.a.send(h.udp())
            assert h.b.receive(ARRIVES_S, lambda frame: frame[12:14] == b"\x08\x06")
            h.space.ip("route", "add", "blackhole", B + "/32")
            h.b.send(arp_answer(h))
            assert h.b.receive(ARRIVES_S, is_ip), "the kernel sends what it had accepted"
            for n in range(5):
                assert h.across(h.udp(), seconds=0.1) is None, (n, h.status("ta"))
        finally:
            os.sched_setaffinity(0, cpus)


def test_a_rule_that_refuses_a_flow_is_obeyed_from_the_next_frame_on():
    with host() as h:
        h.rules("table inet f { chain forward { type filter hook forward priority 0; policy accept; udp dport 666 drop; }; }")
        h.attach(words=("--lease", "10000"))
        for _ in range(5):
            assert h.across(h.udp(dport=666), seconds=0.1) is None
        assert h.status()["flows"] == 0 and h.taken() == 0
        h.across(h.udp())
        assert h.across(h.udp()) and h.taken() == 1
        h.rules("add rule inet f forward udp dport 2000 drop")
        for n in range(5):
            assert h.across(h.udp(), seconds=0.1) is None, f"frame {n} behind the new rule"
        h.rules("flush chain inet f forward")
        # Before Linux 6.17 two changes look like none, so the flow of before may hold again.
        until("frames to be taken again", lambda: h.across(h.udp()) and h.taken() >= 2)


def test_detach_leaves_nothing_and_gives_the_way_back():
    with host() as h:
        before = h.space.ip("-d", "link")
        h.attach()
        keeper = h.status()["keeper"]
        assert keeper
        h.across(h.udp())
        h.across(h.udp())
        # As `tc` and `ip` do, where they find no other such file system.
        (h.folder / "run/bypass/bpf/tc/globals").mkdir(parents=True)
        h.cli("detach", "ta")
        assert [i["name"] for i in h.status()["interfaces"]] == ["tb"]
        h.cli("detach")
        assert h.across(h.udp()), "the kernel forwards again"
        assert h.space.ip("-d", "link") == before
        until("the controller's end", lambda: has_ended(keeper))
        assert not (h.folder / "run/bypass").exists()
        assert str(h.folder) not in Path("/proc/mounts").read_text()
        wrong = h.cli("detach", "ta", check=False)
        assert wrong.returncode == 2 and "ta is not attached" in wrong.stderr


def test_a_killed_keeper_leaves_traffic_flowing_and_the_next_attach_starts_another():
    with host() as h:
        h.attach(words=("--lease", "50"))
        h.across(h.udp())
        os.kill(h.status()["keeper"], 9)
        until("the controller's end", lambda: h.status()["keeper"] is None)

        def taken():
            # Some at once, since what comes more slowly than the lease is not taken.
            assert all(h.across(h.udp()) for _ in range(5))
            return h.taken() >= 30

        # Which is for many leases.
        until("frames to be taken without a controller", taken)
        assert "attached already" in h.attach().stdout
        assert h.status()["keeper"]


def test_attach_says_what_is_wrong():
    with host() as h:
        h.space.ip("link", "add", "link", "tb", "name", "above", "type", "macvtap")
        for words, code, text in [
            (("nosuch",), 2, "no interface nosuch"),
            (("lo",), 0, None),
            (("ta", "--lease", "60000"), 2, "lease of 60s"),
            (("ta", "above"), 1, "above is a macvtap"),
        ]:
            done = h.cli("attach", *words, check=False)
            if text:
                assert (done.returncode, text in done.stderr) == (code, True), (words, done)
        h.cli("detach", check=False)
        inside = h.space.run("env", f"TOMBOLO_RUNTIME={h.folder}/run", PROGRAM, "bypass", "attach", "ta", check=False)
        assert inside.returncode == 1 and "--netns" in inside.stderr, inside


def test_doctor_and_status_name_what_this_kernel_lacks():
    version = kernel_version()
    with host() as h:
        h.attach()
        limits = h.status()["limits"]
        env = dict(os.environ, TOMBOLO_RUNTIME=str(h.folder / "run"))
        done = subprocess.run([str(PROGRAM), "doctor", "--json"], capture_output=True, text=True, timeout=60 * SLOW, env=env)
        said = next(finding for finding in json.loads(done.stdout)["findings"] if finding["what"] == "bypass")
        hook = "tcx" if has_tcx() else "clsact"
        assert f"{hook} and xdp" in said["seen"] and all(limit in said["seen"] for limit in limits), (said, limits)
        assert said["outcome"] == ("degraded" if limits else "works"), said
        # Since Linux 6.2, and in RHEL's 5.14.
        has_pointers = b"\0bpf_rdonly_cast\0" in Path("/sys/kernel/btf/vmlinux").read_bytes()
        typed = has_pointers and os.environ.get("TOMBOLO_BYPASS_AS_OLD") != "1"
        for words, is_lacking in (("no tcx", hook == "clsact"), ("no typed pointers", not typed), ("not tested", version < (5, 14)),
                                  ("firewall rules", version < (6, 17))):
            assert any(words in limit for limit in limits) == is_lacking, (words, limits)
        # Kernels of before may have the fix.
        assert translates_ipv6(h) or version < (6, 16), limits
        shown = h.cli("status").stdout
        assert all(limit in shown for limit in limits), (shown, limits)


def test_a_flow_slower_than_its_lease_is_not_learned_again_until_it_is_quick():
    with host() as h:
        h.attach(words=("--lease", "100"))
        assert h.across(h.udp()) and h.status("ta")["learned"] == 1
        for _ in range(3):
            # Longer than the lease: the span that is tested.
            time.sleep(0.15)
            assert h.across(h.udp())
        assert h.status("ta")["learned"] == 1 and h.status("ta")["by_reason"]["up_lease"] == 3, h.status("ta")

        def taken():
            assert all(h.across(h.udp()) for _ in range(4))
            return h.taken() >= 1

        until("quick frames to be taken", taken)
        assert h.status("ta")["learned"] >= 2, h.status("ta")


@timeout(300)
def test_where_most_flows_are_of_one_frame_one_is_learned_with_its_second():
    with host() as h:
        h.attach()
        frame, flows, turns = bytearray(bytes(10) + h.udp()), 0, 0

        def scan():
            nonlocal flows, turns
            turns += 1
            for _ in range(5000):
                flows += 1
                # Another source port, and no checksum.
                frame[44:46] = struct.pack("!H", 1024 + flows % 60000)
                frame[50:52] = b"\0\0"
                os.write(h.a.fd, frame)
            before = h.status("ta")["learned"]
            assert h.across(bytes(frame[10:44] + struct.pack("!H", turns) + frame[46:]))
            return h.status("ta")["learned"] == before

        until("the first frame of a flow not to be learned from", scan)
        # The first frame of a flow is noted and the second one learned from. Where the table of
        # notes is full, a coin decides whether a new note replaces an old one, so a few flows need
        # more frames than three. The CPUs share the notes: each frame comes from another CPU.
        needed, cpus = [], sorted(os.sched_getaffinity(0))
        for sport in range(900, 916):
            before, sent = h.taken(), 0
            while h.taken() == before and sent < 40:
                os.sched_setaffinity(0, {cpus[sent % len(cpus)]})
                assert h.across(h.udp(sport=sport)), (sport, sent)
                sent += 1
            needed.append(sent)
        os.sched_setaffinity(0, cpus)
        assert min(needed) == 3 and max(needed) < 40 and sorted(needed)[11] == 3, (needed, h.status("ta"))
        lone = bytes(10) + h.udp(sport=999)
        # Traffic of few flows: as before, from the first frame on.

        def calm():
            nonlocal turns
            for _ in range(3000):
                os.write(h.a.fd, lone)
            before = h.status("ta")["learned"]
            turns += 1
            assert h.across(h.udp(sport=turns))
            return h.status("ta")["learned"] == before + 1

        until("a first frame to be learned from again", calm)
