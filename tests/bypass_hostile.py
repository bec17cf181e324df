"""Hostile and broken frames: whatever a guest writes into its tap, with the bypass the same arrives as without it, and nothing else.

Two routers with the same addresses get the same frames, one of them bypassed; all that leaves them is compared, frame by frame. The frames
are always the same ones, so that what fails is due to a change; TOMBOLO_SEED gives others.
"""

import contextlib
import itertools
import operator
import os
import random
import struct

from bypass_paths import A, A6, ARRIVES_S, B, B6, MAC_A, MAC_B, establish, establish6, host, same
from lib import timeout
from lib.frames import mac_bytes
from lib.tap import (ACK, ETH_IP4, ETH_IP6, FIN, GSO_TCPV4, ICMP, ICMP6, NEEDS_CSUM, RST, SYN, TCP, UDP, checksum, echo, ethernet, ipv4, ipv6,
                     packed, transport, vnet_header)

ROUTER_A, ROUTER_B = "02:00:00:00:0a:01", "02:00:00:00:0b:01"
ODD4 = ["10.1.0.1", "10.2.0.1", "10.1.0.255", "127.0.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1", "240.0.0.1", "169.254.1.1"]
ODD6 = ["fd01::1", "fd02::1", "::", "::1", "ff02::1", "ff0e::1", "fe80::1", "::ffff:10.1.0.2", "2001:db8::1"]
FRAMES, CHUNK, SEED = 4000, 100, 20261122


def usually(r, value, *others, chance=0.1):
    return r.choice(others) if r.random() < chance else value


def body(r, six, port):
    """A transport's packet: (protocol, source, destination, bytes), mostly of a few flows, of which that from `port` is the first, and mostly
    sound."""
    source = usually(r, A6 if six else A, *(ODD6 if six else ODD4), chance=0.04)
    # An attacker that pretends to be another has numbers of its own: on a clash masquerading takes
    # any port.
    own = 4000 * ((ODD6 if six else ODD4).index(source) + 1) if source not in (A, A6) else 0
    destination = usually(r, B6 if six else B, *(ODD6 if six else ODD4), chance=0.04)
    proto = usually(r, r.choice([TCP, UDP]), ICMP6 if six else ICMP, chance=0.2)
    payload = r.randbytes(usually(r, r.randrange(40), 400, 1400, chance=0.15))
    if proto in (ICMP, ICMP6):
        data = bytearray(echo(source, destination, ident=own + 7, sequence=r.randrange(9), payload=payload, reply=r.random() < 0.1))
        if r.random() < 0.1:
            data[r.randrange(2)] = r.choice([1, 3, 5, 11, 13, 200])
        return proto, source, destination, bytes(data)
    flags = usually(r, ACK, 0, FIN | ACK, SYN, RST, SYN | ACK, ACK | 8, ACK | 32, 32, 0xC0, SYN | FIN, 0xFF)
    data = bytearray(transport(proto, source, destination, own + usually(r, port, 1000, 1), usually(r, 80, 2000), payload, flags=flags,
                               seq=101, ack=501, bad=r.random() < 0.05))
    if proto == TCP and r.random() < 0.08:
        data[12] = r.randrange(16) << 4
    if proto == UDP and r.random() < 0.1:
        data[4:6] = struct.pack("!H", r.choice([0, 7, 8, len(data) - 1, len(data) + 1, 0xFFFF]) & 0xFFFF)
    if proto == UDP and r.random() < 0.05:
        data[6:8] = b"\0\0"
    return proto, source, destination, bytes(data)


OPTIONS = [b"\x01" * 4, b"\x00" * 4, b"\x94\x04\0\0", b"\x07\x07\x04" + bytes(5), b"\x44\x08\x09\0" + bytes(4), b"\x83\x07\x04" + packed(B) + b"\0",
           b"\x89\x03\x04\x01", b"\x07\xff\x04\0", b"\x82\x0b" + bytes(10), b"\x01" * 40]


def packet4(r, port):
    proto, source, destination, data = body(r, False, port)
    packet = bytearray(ipv4(source, destination, proto, data, ttl=usually(r, 64, 0, 1, 2, 255), tos=usually(r, 0, 0x10, 0xB8, 1, 3, 0xFF),
                            ident=r.randrange(3), flags=usually(r, 0x4000, 0, 0x8000, 0x2000, 0x2001, 0x0003, 0x1FFF, 0x6000),
                            options=usually(r, b"", *OPTIONS, chance=0.05)))
    damaged = r.random() < 0.2
    if damaged:
        what = r.choice(["version", "length", "proto", "any"])
        if what == "version":
            packet[0] = r.choice([0x40, 0x41, 0x44, 0x46, 0x4F, 0x55, 0x65, 0x05])
        elif what == "length":
            packet[2:4] = struct.pack("!H", r.choice([0, 19, 20, 27, 28, 39, len(packet) - 1, len(packet) + 1, len(packet) + 60, 0xFFFF]))
        elif what == "proto":
            packet[9] = r.choice([0, 2, 4, 41, 47, 50, 51, 132, 255])
        else:
            packet[r.choice([*range(12), *range(16, 20)])] ^= 1 << r.randrange(8)
        if r.random() < 0.7:
            packet[10:12] = b"\0\0"
            packet[10:12] = struct.pack("!H", ~checksum(bytes(packet[:max(20, (packet[0] & 15) * 4)])) & 0xFFFF)
    return ETH_IP4, packet


def extended(r, proto, data):
    """The packet behind extension headers, some of which no router lets pass: (first header's number, bytes)."""
    following, chain = proto, data
    for _ in range(r.choice([1, 1, 2, 3, 12])):
        number = r.choice([0, 60, 43, 44, 51, 59, 135])
        if number == 44:
            head = struct.pack("!BBHI", following, 0, r.choice([0, 1, 8, 9, 0xFFF9]), 5)
        elif number == 43:
            head = bytes([following, 2, r.choice([0, 2, 4]), r.choice([0, 1, 3])]) + bytes(4) + packed(B6)
        elif number == 0 and r.random() < 0.5:
            head = bytes([following, 0, 0xC2, 4]) + struct.pack("!I", r.choice([0, 40, 70000]))
        elif number == 0:
            head = bytes([following, 0]) + r.choice([b"\x05\x02\0\0\0\0", b"\x1e\x04\0\0\0\0", b"\xde\x04\0\0\0\0", b"\x01\xff\0\0\0\0"])
        else:
            head = bytes([following, usually(r, 0, 1, 255)]) + b"\x01\x04\0\0\0\0"
        following, chain = number, head + chain
    return following, chain


def packet6(r, port):
    proto, source, destination, data = body(r, True, port)
    if r.random() < 0.08:
        proto, data = extended(r, proto, data)
    packet = bytearray(ipv6(source, destination, proto, data, hops=usually(r, 64, 0, 1, 2, 255), label=usually(r, 0, 0x100000, 0xB800000, 77)))
    if r.random() < 0.15:
        what = r.choice(["version", "length", "proto", "any"])
        if what == "version":
            packet[0] = r.choice([0x40, 0x45, 0x50, 0x70, 0x00])
        elif what == "length":
            packet[4:6] = struct.pack("!H", r.choice([0, 7, 8, 19, 20, len(data) - 1, len(data) + 1, 0xFFFF]) & 0xFFFF)
        elif what == "proto":
            packet[6] = r.choice([0, 1, 4, 41, 50, 59, 132, 255])
        else:
            packet[r.randrange(40)] ^= 1 << r.randrange(8)
    return ETH_IP6, packet


def unfinished(r, port):
    """A sound frame whose checksum its sender left to others."""
    six, proto = r.random() < 0.5, r.choice([TCP, UDP])
    a, b = (A6, B6) if six else (A, B)
    data = transport(proto, a, b, port, 80, r.randbytes(r.randrange(200)), seq=101, ack=501, partial=True)
    packet = ipv6(a, b, proto, data) if six else ipv4(a, b, proto, data)
    frame = ethernet(mac_bytes(ROUTER_A), mac_bytes(MAC_A), ETH_IP6 if six else ETH_IP4, packet)
    return vnet_header(NEEDS_CSUM, start=54 if six else 34, offset=16 if proto == TCP else 6), frame


def hostile(r, port, lies):
    """A frame and its vnet header, which `lies` about what is unfinished in it or is sound. (What an XDP program sees has no such header: it
    tells unfinished sums by themselves, and the liar's frames arrive as if it had said nothing.)"""
    if r.random() < 0.05:
        return unfinished(r, port)
    kind, packet = packet4(r, port) if r.random() < 0.6 else packet6(r, port)
    kind = usually(r, kind, ETH_IP4, ETH_IP6, 0x0806, 0x88B5, 0x0040, 0xFFFF, chance=0.03)
    mac = mac_bytes(usually(r, ROUTER_A, ROUTER_B, MAC_B, "ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01", "33:33:00:00:00:01", chance=0.06))
    frame = ethernet(mac, mac_bytes(usually(r, MAC_A, MAC_B, ROUTER_A, "ff:ff:ff:ff:ff:ff")), kind, bytes(packet),
                     pad=r.random() < 0.5)
    if r.random() < 0.04:
        tag = r.choice([b"\x81\x00\x00\x05", b"\x81\x00\x0f\xff", b"\x88\xa8\x00\x05\x81\x00\x00\x06", b"\x81\x00", b"\x81\x00\x60\x00",
                        b"\x88\xa8\xe0\x00", b"\x81\x00\x00\x00\x81\x00\x00\x00"])
        frame = frame[:12] + tag + frame[12:]
    if r.random() < 0.05:
        frame = frame[:r.randrange(14, len(frame) + 1)]
    elif r.random() < 0.05:
        frame += r.randbytes(r.randrange(1, 90))
    header = bytes(10)
    if lies and r.random() < 0.08:
        header = r.choice([vnet_header(NEEDS_CSUM, start=34, offset=16), vnet_header(NEEDS_CSUM, start=34, offset=6),
                           vnet_header(NEEDS_CSUM, start=54, offset=16), vnet_header(NEEDS_CSUM, start=20, offset=10),
                           vnet_header(NEEDS_CSUM, start=len(frame) - 2, offset=0), vnet_header(NEEDS_CSUM, start=65000, offset=16),
                           vnet_header(NEEDS_CSUM, GSO_TCPV4, 54, 100, 34, 16), vnet_header(NEEDS_CSUM, GSO_TCPV4, 54, 0, 34, 16),
                           vnet_header(0, GSO_TCPV4, 54, 100), vnet_header(NEEDS_CSUM, 4, 74, 100, 54, 16), vnet_header(2), vnet_header(0, 0x81, 54, 100, 34, 16),
                           vnet_header(NEEDS_CSUM, 5, 42, 100, 34, 6)])
    return header, frame


def write(tap, header, frame):
    """What the tap says to it: 0 or an errno. The frames are written as they are, broken ones too."""
    try:
        os.write(tap.fd, header + frame)
        return 0
    except OSError as error:
        return error.errno


# What a router says once a neighbour has not answered for seconds, or (of no route) so and so often
# a second: no matter of the frame before it.
LATE4, LATE6 = (b"\x03\x01", b"\x03\0"), b"\x01\x03"


def said(frames):
    """The router's own answers at A's side, without what differs by itself: its packets' numbers, its link-local address, its patience."""
    kept = []
    for _, frame in frames:
        if frame[12:14] == b"\x08\x00" and not (frame[23] == ICMP and frame[34:36] in LATE4):
            kept.append(frame[:18] + b"\0\0" + frame[20:24] + b"\0\0" + frame[26:])
        elif frame[12:14] == b"\x86\xdd" and frame[22:24] != b"\xfe\x80" and not (frame[20] == ICMP6 and frame[54:56] == LATE6):
            kept.append(frame)
    return kept


def is_packet(frame):
    """IP of any kind, but for what the router's IPv6 says to its neighbourhood by itself, in its own time: whom it looks for, once a second."""
    solicits = frame[20] == ICMP6 and frame[54:55] == b"\x87"
    by_itself = frame[:2] == b"\x33\x33" and (solicits or frame[22:24] in (b"\xfe\x80", b"\0\0"))
    return frame[12:14] == b"\x08\x00" or (frame[12:14] == b"\x86\xdd" and not by_itself)


@contextlib.contextmanager
def twins(rules="", routes=(), sysctls=()):
    """Two routers that differ in nothing: one for the kernel's way, one for the bypass."""
    with host() as plain, host() as bypassed:
        for h in (plain, bypassed):
            for tap, mac in ((h.a, ROUTER_A), (h.b, ROUTER_B)):
                h.space.ip("link", "set", tap.name, "address", mac)
                tap.host_mac = mac_bytes(mac)
            # With an interface's address its neighbours go.
            for name, addresses, mac in (("ta", (A, A6), MAC_A), ("tb", (B, B6), MAC_B)):
                for address in addresses:
                    h.space.ip("neighbour", "replace", address, "lladdr", mac, "dev", name, "nud", "permanent")
            h.space.run("sysctl", "-qw", "net.ipv4.conf.all.send_redirects=0", "net.ipv4.conf.ta.send_redirects=0")
            for route in routes:
                h.space.ip(*route.split())
            if rules:
                h.rules(rules)
            # Those of connection tracking are there once rules have had its module loaded.
            if sysctls:
                h.space.run("sysctl", "-qw", *sysctls)
        yield plain, bypassed


def exchange(h, frames, number):
    """Each frame twice, then one that says the end: (what the tap said, what B got, what A got)."""
    end = h.udp(b"end %d" % number, sport=9, dport=9)
    results = [write(h.a, header, frame) for header, frame in frames for _ in range(2)]
    h.a.send(end)
    got = []
    while True:
        frame = h.b.receive(ARRIVES_S, is_packet)
        assert frame, f"chunk {number}: its end did not arrive"
        if frame[1][42:].startswith(b"end %d" % number):
            return results, got, said(h.a.drain(is_packet))
        got.append(frame)


def alike(where, kernel, bypass, are=operator.eq):
    """Fails with the first difference of two lists."""
    for n, (expected, got) in enumerate(itertools.zip_longest(kernel, bypass)):
        assert expected and got and are(expected, got), f"{where}, frame {n} of {len(kernel)}:\nkernel {expected}\nbypass {got}"


def compared(mode, prepare=lambda h, port: None, **world):
    seed = int(os.environ.get("TOMBOLO_SEED") or SEED)
    print(f"TOMBOLO_SEED={seed}")
    r = random.Random(seed)
    with twins(**world) as (plain, bypassed):
        bypassed.attach(words=("--lease", "10000", "--mode", mode))
        for number in range(FRAMES // CHUNK):
            for h in (plain, bypassed):
                prepare(h, 3000 + number)
            frames = [hostile(r, 3000 + number, lies=mode != "xdp") for _ in range(CHUNK)]
            kernel, ours = exchange(plain, frames, number), exchange(bypassed, frames, number)
            assert kernel[0] == ours[0], f"chunk {number}: the taps differ: {kernel[0]} {ours[0]}"
            alike(f"chunk {number} at B", kernel[1], ours[1], lambda expected, got: same(got, expected, mode))
            alike(f"chunk {number} at A", kernel[2], ours[2])
        status = bypassed.status("ta")
        print(status)
        return status


def test_a_frame_with_an_unfinished_checksum_in_its_padding_is_left_to_the_kernel_which_drops_it():
    """The kernel drops it when it removes the padding. The bypass must not: since Linux 6.1.189 its helper removes the padding and
    calls the checksum finished."""
    kinds = [(ETH_IP4, ipv4(A, B, ICMP, echo(A, B, payload=b"ab")), 34), (ETH_IP6, ipv6(A6, B6, UDP, transport(UDP, A6, B6, 1000, 2000, b"ab")), 54)]
    with twins() as (plain, bypassed):
        bypassed.attach(words=("--lease", "10000", "--mode", "tcx"))
        for kind, packet, start in kinds:
            frame = ethernet(mac_bytes(ROUTER_A), mac_bytes(MAC_A), kind, packet, pad=False) + bytes(30)
            end = 14 + len(packet)
            for last, arrives in ((end, True), (end + 1, False), (end + 20, False)):
                header = vnet_header(NEEDS_CSUM, start=start, offset=last - 2 - start)
                # A slow machine needs longer than a lease for all of this.
                bypassed.across(frame)
                before = bypassed.status("ta")["by_reason"]
                expected, got = (h.across(frame, header, ARRIVES_S if arrives else 0.3) for h in (plain, bypassed))
                assert bool(expected) == arrives and got == expected, f"field up to {last} of {end}:\nkernel {expected}\nbypass {got}"
                after = bypassed.status("ta")["by_reason"]
                reason = "taken_tcx" if arrives else "up_malformed"
                assert after[reason] == before.get(reason, 0) + 1, f"field up to {last} of {end}: {before} {after}"


SEEN = {"up_not_ours", "up_protocol", "up_vlan", "up_options", "up_fragment", "up_ttl", "up_transport", "up_malformed", "up_handshake", "up_no_flow"}


@timeout(600)
def test_of_any_frames_tcx_forwards_those_that_the_kernel_forwards_as_the_kernel_does():
    status = compared("tcx")
    assert status["taken"] >= FRAMES // 4 and SEEN <= status["by_reason"].keys(), status


@timeout(600)
def test_of_any_frames_xdp_forwards_those_that_the_kernel_forwards_as_the_kernel_does():
    status = compared("xdp")
    assert status["by_reason"]["taken_xdp"] >= FRAMES // 4 and SEEN <= status["by_reason"].keys(), status


# Connections are tracked and translated, and rules and routes look at what differs from frame to
# frame of a flow.
TRACKED = {
    "rules": """
table ip n { chain post { type nat hook postrouting priority 100; oifname "tb" masquerade; }; }
table inet f { chain forward {
  type filter hook forward priority 0; policy drop;
  ip dscp 46 drop
  ip6 dscp 46 drop
  ct state invalid drop
  ct state established,related accept
  iifname "ta" th dport { 9, 80, 2000 } accept
  icmp type echo-request accept
  icmpv6 type echo-request accept
}; }
""",
    "routes": ["rule add dsfield 0x10 blackhole", "-6 rule add dsfield 0x10 blackhole"],
    # What of tracking the bypass leaves out: docs/bypass.md, "What to know".
    "sysctls": ["net.netfilter.nf_conntrack_checksum=0", "net.netfilter.nf_conntrack_tcp_be_liberal=1"],
}


def open_flows(h, port):
    establish(h, port, 80, seen=("10.2.0.1", port))
    establish6(h, port, 80)


@timeout(600)
def test_of_any_frames_tcx_forwards_those_that_firewall_tracking_and_routing_rules_let_pass():
    status = compared("tcx", open_flows, **TRACKED)
    assert status["taken"] >= FRAMES // 5 and SEEN <= status["by_reason"].keys(), status


@timeout(600)
def test_of_any_frames_xdp_forwards_those_that_firewall_tracking_and_routing_rules_let_pass():
    status = compared("xdp", open_flows, **TRACKED)
    assert status["by_reason"]["taken_xdp"] >= FRAMES // 5 and SEEN <= status["by_reason"].keys(), status
