"""The bypass where the kernel treats two frames of one flow differently: by a field, a mark, a length or a timeout. Each case sends the
same frames without the bypass and with it, and both must arrive alike."""

import ctypes
import os
import socket
import struct
import time

from bypass_nat import NAT, forward
from bypass_others import (ARRAY, BEFORE, LINK_CREATE, MAP_CREATE, NEXT, PROG_LOAD, SCHED_CLS, TCX_INGRESS, bpf)
from bypass_paths import A, A6, B6, has_tcx, host
from bypass_veth import C, bound, container
from lib import Skip, until
from lib.tap import ETH_IP4, ETH_IP6, UDP, Inside, ethernet, ipv4, ipv6, transport

MAP_UPDATE = 2


def udp6(h, payload=b"six", **more):
    return h.to_b(ETH_IP6, ipv6(A6, B6, UDP, transport(UDP, A6, B6, 1000, 2000, payload), **more))


def compared(h, expected, send, first, others, mode):
    """Attaches, has a flow learned from `first`, then compares what becomes of the `others`."""
    h.attach(words=("--lease", "10000", "--mode", mode))
    before = h.taken()
    for _ in range(4):
        assert send(first) == expected[0]
    assert h.taken() >= before + 2, h.status("ta")
    for n, frame in enumerate(others, 1):
        # Twice: once where the flow was learned from another frame, once where it was learned from
        # this one.
        for turn in range(2):
            assert send(frame) == expected[n], (mode, n, turn, h.status("ta"))
        assert send(first) == expected[0]
    h.cli("detach")


# (what the rule is, the rule, a frame on which it changes nothing, frames on which it does)
REWRITES = [
    ("TTL", "ip ttl set 63", lambda h: h.udp(ttl=64), [lambda h: h.udp(ttl=128), lambda h: h.udp(ttl=33)]),
    ("ECN bleaching", "ip ecn set not-ect", lambda h: h.udp(tos=0), [lambda h: h.udp(tos=2), lambda h: h.udp(tos=3)]),
    ("DF", "ip frag-off set 0", lambda h: h.udp(flags=0), [lambda h: h.udp(flags=0x4000)]),
    ("id", "ip id set 7", lambda h: h.udp(ident=7), [lambda h: h.udp(ident=8), lambda h: h.udp(ident=0)]),
    ("hop limit", "ip6 hoplimit set 63", lambda h: udp6(h, hops=64), [lambda h: udp6(h, hops=255)]),
    ("flow label", "ip6 flowlabel set 5", lambda h: udp6(h, label=5), [lambda h: udp6(h, label=6)]),
    ("IPv6's ECN", "ip6 ecn set not-ect", lambda h: udp6(h), [lambda h: udp6(h, label=2 << 20)]),
]


def test_a_rule_that_rewrites_a_field_rewrites_it_also_where_the_learned_frame_had_that_value_already():
    for what, rule, first, others in REWRITES:
        with host() as h:
            h.rules("table inet f { chain c { type filter hook forward priority 0; %s; }; }" % rule)
            first, others = first(h), [other(h) for other in others]
            send = lambda frame: h.across(frame)[1]  # noqa: B023, E731
            expected = [send(frame) for frame in [first, *others]]
            assert all(same == expected[0] for same in expected), f"{what}: the rule does not make frames alike"
            for mode in ("tcx", "xdp"):
                compared(h, expected, send, first, others, mode)


def test_rules_that_match_a_field_judge_each_of_its_values():
    matches = [("ip ttl lt 50 drop", [64, 40]), ("ip ttl 99 drop", [64, 100])]
    for rule, ttls in matches:
        with host() as h:
            h.rules("table inet f { chain c { type filter hook forward priority 0; %s; }; }" % rule)
            frames = [h.udp(ttl=ttl) for ttl in ttls]
            send = lambda frame: h.across(frame, seconds=0.3) is not None  # noqa: B023, E731
            expected = [send(frame) for frame in frames]
            assert expected == [True, False]
            for mode in ("tcx", "xdp"):
                compared(h, expected, send, frames[0], frames[1:], mode)


def test_frames_of_a_flow_with_ids_of_their_own_are_taken_from_the_third_on():
    for mode in ("tcx", "xdp"):
        with host() as h:
            h.attach(words=("--lease", "10000", "--mode", mode))
            for ident in range(100, 120):
                assert h.across(h.udp(ident=ident))
            assert h.taken() == 18, (mode, h.status("ta"))


# Offsets of fields that a program may write (struct __sk_buff).
MARK, PRIORITY = 8, 32


class Marker:
    """A tcx program before all others that gives each frame the mark, or priority, that `set` names: as a container engine's or a VPN's would."""

    def __init__(self, space, interface, field=MARK):
        if not has_tcx():
            raise Skip("this kernel has no tcx, by which a program comes before all filters")
        marks = bpf(MAP_CREATE, struct.pack("<IIII", ARRAY, 4, 4, 1))
        # r6 = context; *(u32 *)(r10 - 4) = 0; r0 = lookup(marks, r10 - 4); if (r0) context->mark =
        # *(u32 *)r0; return NEXT
        code = [(0xBF, 0x16, 0, 0), (0x62, 10, -4, 0), (0xBF, 0xA2, 0, 0), (0x07, 2, 0, -4), (0x18, 0x11, 0, marks), (0, 0, 0, 0), (0x85, 0, 0, 1),
                (0x15, 0, 2, 0), (0x61, 0x01, 0, 0), (0x63, 0x16, field, 0), (0xB7, 0, 0, NEXT), (0x95, 0, 0, 0)]
        text = ctypes.create_string_buffer(b"".join(struct.pack("<BBhi", *instruction) for instruction in code))
        licence = ctypes.create_string_buffer(b"GPL")
        with Inside(space):
            program = bpf(PROG_LOAD, struct.pack("<IIQQIIQII16s", SCHED_CLS, len(code), ctypes.addressof(text), ctypes.addressof(licence),
                                                 0, 0, 0, 0, 0, b"marker"))
            link = bpf(LINK_CREATE, struct.pack("<IIII", program, socket.if_nametoindex(interface), TCX_INGRESS, BEFORE))
        self.marks, self.fds = marks, (link, program, marks)

    def set(self, mark):
        key, value = ctypes.c_uint32(0), ctypes.c_uint32(mark)
        bpf(MAP_UPDATE, struct.pack("<IIQQQ", self.marks, 0, ctypes.addressof(key), ctypes.addressof(value), 0))

    def close(self):
        for fd in self.fds:
            os.close(fd)


def test_marks_that_an_earlier_program_sets_are_obeyed_by_every_frame():
    with host() as h:
        h.rules("table inet f { chain c { type filter hook forward priority 0; meta mark 7 drop; }; }")
        marker = Marker(h.space, "ta")

        def send(mark):
            marker.set(mark)
            return h.across(h.udp(), seconds=0.3 if mark == 7 else 20) is not None

        expected = [send(mark) for mark in (5, 7, 0)]
        assert expected == [True, False, True]
        compared(h, expected, send, 5, [7, 0], "auto")
        marker.close()


def test_priorities_of_ipv6_that_an_earlier_program_sets_are_obeyed_by_every_frame():
    """The kernel keeps them when it forwards IPv6; of IPv4 it makes them from the TOS."""
    with host() as h:
        h.rules("table inet f { chain c { type filter hook forward priority 0; meta priority 0:7 drop; }; }")
        marker = Marker(h.space, "ta", PRIORITY)

        def send(priority):
            marker.set(priority)
            return h.across(udp6(h), seconds=0.3 if priority == 7 else 20) is not None

        expected = [send(priority) for priority in (0, 7, 5)]
        assert expected == [True, False, True]
        compared(h, expected, send, 0, [7, 5], "auto")
        marker.close()


def test_a_frame_too_long_for_a_veths_other_end_goes_where_the_kernel_sends_it():
    with host() as h, container(h) as far:
        far.ip("link", "set", "eth0", "mtu", "1300")
        server = bound(far, socket.SOCK_DGRAM, (C, 9))

        def send(length):
            payload = bytes(length - 28)
            frame = ethernet(h.a.host_mac, h.a.mac, ETH_IP4, ipv4(A, C, UDP, transport(UDP, A, C, 1000, 9, payload)))
            h.a.send(frame)
            server.settimeout(0.3 if length > 1304 else 20)
            try:
                return len(server.recv(4000)) == len(payload)
            except TimeoutError:
                return False

        # The driver leaves room for a tag.
        lengths = [100, 1300, 1304, 1305, 1500]
        expected = [send(length) for length in lengths]
        assert expected == [True, True, True, False, False]
        h.attach("ta", "vc", words=("--lease", "10000"))
        assert all(send(100) for _ in range(5)) and h.status("ta")["by_reason"]["taken_peer"] >= 3
        assert [send(length) for length in lengths] == expected
        # A change at the other end, in another namespace, holds for the next frame.
        far.ip("link", "set", "eth0", "mtu", "1200")
        assert send(1204) and not send(1300)
        far.ip("link", "set", "eth0", "mtu", "1500")
        assert send(1500)
        server.close()


def test_a_routes_mtu_above_the_interfaces_counts_as_the_kernel_counts_it():
    cases = [(4, "10.2.0.0/24", "mtu 9000", True), (4, "10.2.0.0/24", "mtu lock 9000", True), (4, "10.2.0.0/24", "mtu 1400", False),
             (6, "fd02::/64", "mtu 9000", False), (6, "fd02::/64", "mtu lock 9000", True), (6, "fd02::/64", "mtu 1400", False)]
    for family, net, mtu, passes in cases:
        for mode in ("tcx", "xdp"):
            with host() as h:
                # The interface's own route, and no second one.
                own = ["src", "10.2.0.1"] if family == 4 else ["metric", "256"]
                h.space.ip(f"-{family}", "route", "replace", net, "dev", "tb", "proto", "kernel", *own, *mtu.split())
                make = (lambda size: h.udp(bytes(size))) if family == 4 else (lambda size: udp6(h, bytes(size)))  # noqa: B023, E731

                def send(size):
                    return h.across(make(size), seconds=0.3 if size > 1300 and not passes else 20) is not None  # noqa: B023

                expected = [send(size) for size in (100, 2000, 1420)]
                assert expected[:2] == [True, passes], (family, mtu)
                compared(h, expected, send, 100, [2000, 1420], mode)


def test_a_lease_is_shorter_than_the_conntrack_timeout_in_force():
    with host() as h:
        h.rules(NAT)
        h.space.run("sysctl", "-qw", "net.netfilter.nf_conntrack_udp_timeout=2", "net.netfilter.nf_conntrack_udp_timeout_stream=2")
        h.attach(words=("--lease", "10000"))
        assert forward(h, UDP, 700, 5300)
        entry = h.space.run("conntrack", "-L", "-o", "id", "-p", "udp").stdout.split("id=")[1].split()[0]
        end = time.monotonic() + 5
        while time.monotonic() < end:
            assert forward(h, UDP, 700, 5300)
            time.sleep(0.05)
        left = h.space.run("conntrack", "-L", "-o", "id", "-p", "udp").stdout
        assert f"id={entry} " in left.replace("\n", " \n"), (entry, left)
        report = h.status("ta")
        # Half of two seconds, so a frame a second goes up, and the rest is taken.
        assert report["shortened"] >= 4 and report["taken"] > 20, report
        assert "shortened" in h.cli("status").stdout
        # Timeouts that are longer change nothing.
        h.space.run("sysctl", "-qw", "net.netfilter.nf_conntrack_udp_timeout=30", "net.netfilter.nf_conntrack_udp_timeout_stream=120")
        until("a lease of its own length", lambda: forward(h, UDP, 701, 5300) and h.status("ta")["learned"] > report["learned"])
        shortened = h.status("ta")["shortened"]
        for _ in range(10):
            assert forward(h, UDP, 701, 5300)
        assert h.status("ta")["shortened"] == shortened
