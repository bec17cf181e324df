"""The bypass and connection tracking: translated frames, and connections that close, change and vanish under it."""

import re
import struct

from bypass_paths import A, A6, B, B6, host, is_ip, same, translates_ipv6
from lib import need_program, timeout, until
from lib.tap import (ACK, ETH_IP4, ETH_IP6, FIN, GSO_TCPV4, ICMP, ICMP6, NEEDS_CSUM, RST, SYN, TCP, UDP, echo, ethernet, ipv4, ipv6, transport,
                     vnet_header)

# The router's own addresses at A's and at B's side.
NEAR, FAR = "10.1.0.1", "10.2.0.1"
NAT = """
table ip nat {
  chain prerouting { type nat hook prerouting priority -100; tcp dport 8080 dnat to 10.2.0.2:80; udp dport 5300 dnat to 10.2.0.2:53; }
  chain postrouting { type nat hook postrouting priority 100; oifname "tb" masquerade; }
}
table inet f {
  counter invalid { }
  chain forward {
    type filter hook forward priority 0; policy drop;
    ct state invalid counter name invalid drop
    ct state established,related accept
    iifname "ta" accept
  }
}
"""


def until_all_taken(h, exchange):
    """Waits until the bypass takes every frame of an exchange, and gives what arrived of that one: the first are learned from, TCP once the
    keeper has marked the connection, and after each lease again."""

    def taken():
        before = h.taken("ta") + h.taken("tb")
        arrived = dict(exchange())
        return h.taken("ta") + h.taken("tb") - before == len(arrived) and arrived

    return until("all kinds to be taken", taken)


def source(frame):
    """(address, port) that a frame comes from."""
    return ".".join(map(str, frame[26:30])), struct.unpack("!H", frame[34:36])[0]


def forward(h, proto, sport, dport, payload=b"there", header=bytes(10), **more):
    return h.across(h.to_b(ETH_IP4, ipv4(A, NEAR, proto, transport(proto, A, NEAR, sport, dport, payload, **more))), header)


def answer(h, proto, sport, to, payload=b"back", header=bytes(10), **more):
    return h.back(h.to_a(ETH_IP4, ipv4(B, to[0], proto, transport(proto, B, to[0], sport, to[1], payload, **more))), header)


def open_tcp(h, sport=3000, dport=8080, options=b""):
    """A handshake through both translations, with these options of TCP; gives whom B sees."""
    seen = source(forward(h, TCP, sport, dport, b"", flags=SYN, seq=100, ack=0, options=options)[1])
    assert answer(h, TCP, 80, seen, b"", flags=SYN | ACK, seq=500, ack=101, options=options)
    assert forward(h, TCP, sport, dport, b"", seq=101, ack=501)
    return seen


def exchange(h, tcp_seen, udp_seen):
    """All kinds of translated frames in both directions: (name, what arrived)."""
    partial_tcp, partial_udp = vnet_header(NEEDS_CSUM, start=34, offset=16), vnet_header(NEEDS_CSUM, start=34, offset=6)
    large = vnet_header(NEEDS_CSUM, GSO_TCPV4, 54, 1448, 34, 16)
    tcp = dict(seq=101, ack=501)
    back = dict(seq=501, ack=101)
    yield "tcp", forward(h, TCP, 3000, 8080, **tcp)
    yield "tcp odd", forward(h, TCP, 3000, 8080, b"odd", **tcp)
    yield "tcp partial", forward(h, TCP, 3000, 8080, b"p" * 333, partial_tcp, partial=True, **tcp)
    yield "tcp large", forward(h, TCP, 3000, 8080, bytes(range(256)) * 100, large, partial=True, **tcp)
    yield "tcp answer", answer(h, TCP, 80, tcp_seen, **back)
    yield "tcp answer partial", answer(h, TCP, 80, tcp_seen, b"p" * 333, partial_tcp, partial=True, **back)
    yield "tcp answer large", answer(h, TCP, 80, tcp_seen, bytes(range(256)) * 100, large, partial=True, **back)
    yield "udp", forward(h, UDP, 4000, 5300)
    yield "udp partial", forward(h, UDP, 4000, 5300, b"q" * 99, partial_udp, partial=True)
    no_sum = struct.pack("!HHHH", 4000, 5300, 12, 0) + b"none"
    yield "udp without checksum", h.across(h.to_b(ETH_IP4, ipv4(A, NEAR, UDP, no_sum)))
    yield "udp answer", answer(h, UDP, 53, udp_seen)
    yield "echo", h.across(h.to_b(ETH_IP4, ipv4(A, B, ICMP, echo(A, B, ident=99))))
    yield "echo answer", h.back(h.to_a(ETH_IP4, ipv4(B, FAR, ICMP, echo(B, FAR, ident=99, reply=True))))
    yield "udp answer partial", answer(h, UDP, 53, udp_seen, b"q" * 99, partial_udp, partial=True)


def invalid(h):
    text = h.space.run("nft", "list", "counter", "inet", "f", "invalid").stdout
    return int(re.search(r"packets (\d+)", text)[1])


def test_translated_frames_are_byte_for_byte_the_kernels():
    translated("tcx")


def test_translated_frames_of_xdp_are_byte_for_byte_the_kernels():
    translated("xdp")


def translated(mode):
    with host() as h:
        h.rules(NAT)
        # The connections are the same for both paths, so the ports are too.
        tcp_seen = open_tcp(h)
        udp_seen = source(forward(h, UDP, 4000, 5300)[1])
        assert answer(h, UDP, 53, udp_seen)
        assert tcp_seen[0] == udp_seen[0] == FAR
        kernel = dict(exchange(h, tcp_seen, udp_seen))
        assert all(kernel.values()), kernel
        h.attach(words=("--lease", "10000", "--mode", mode))

        bypass = until_all_taken(h, lambda: exchange(h, tcp_seen, udp_seen))
        assert ("taken_xdp" in h.status("ta")["by_reason"]) == (mode == "xdp")
        for name, expected in kernel.items():
            assert same(bypass[name], expected, mode), f"{name}:\nkernel {expected}\nbypass {bypass[name]}"


def test_a_connection_that_closes_is_given_back_and_its_end_is_tracked():
    need_program("conntrack")
    with host() as h:
        h.rules(NAT)
        h.attach(words=("--lease", "10000"))

        def state():
            return h.space.run("conntrack", "-L", "-p", "tcp", check=False).stdout

        for how in ("fin", "rst"):
            seen = open_tcp(h)
            seq = 101
            before = h.taken()

            def send():
                nonlocal seq
                assert forward(h, TCP, 3000, 8080, b"d" * 1000, seq=seq, ack=501)
                seq += 1000
                return h.taken() >= before + 5

            until("data to be taken", send)
            assert h.status("ta")["unlearned"].get("not_liberal", 0) >= 1, "the controller was not asked"
            # Far beyond the window that the kernel saw last.
            for _ in range(200):
                assert forward(h, TCP, 3000, 8080, b"d" * 1400, seq=seq, ack=501)
                seq += 1400
            if how == "fin":
                assert forward(h, TCP, 3000, 8080, b"", flags=FIN | ACK, seq=seq, ack=501)
                assert answer(h, TCP, 80, seen, b"", flags=FIN | ACK, seq=501, ack=seq + 1)
                assert forward(h, TCP, 3000, 8080, b"", seq=seq + 1, ack=502)
                assert "TIME_WAIT" in state(), state()
            else:
                assert answer(h, TCP, 80, seen, b"", flags=RST | ACK, seq=501, ack=seq)
                assert " CLOSE " in state(), state()
            taken = h.taken()
            forward(h, TCP, 3000, 8080, b"late", seq=seq, ack=501)
            assert h.taken() == taken, "a frame of a closed connection was taken"
            h.space.run("conntrack", "-F", check=False)
        assert invalid(h) == 0


def test_frames_that_conntrack_calls_invalid_are_not_learned_from():
    """They are forwarded as they are where no rule drops them. Those of a connection that begins meanwhile are translated."""
    masquerade = "table ip nat { chain postrouting { type nat hook postrouting priority 100; oifname \"tb\" masquerade; }; }\n"
    untracked = "table ip raw { chain prerouting { type filter hook prerouting priority -300; udp dport 7 notrack; }; }"

    def to_b(proto, payload=b"", **more):
        return h.across(h.to_b(ETH_IP4, ipv4(A, B, proto, transport(proto, A, B, 3000, more.pop("dport", 80), payload, **more))))

    with host() as h:
        h.rules(masquerade + untracked)
        # Else a connection may be met in its midst.
        h.space.run("sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_loose=0")
        h.attach(words=("--lease", "10000"))
        for _ in range(5):
            assert source(to_b(TCP, b"who", seq=9, ack=9)[1])[0] == A
        assert h.taken() == 0 and h.status("ta")["unlearned"].get("not_plain_connection", 0) >= 4, h.status("ta")
        assert source(to_b(TCP, flags=SYN, seq=100, ack=0)[1])[0] == FAR
        assert h.back(h.to_a(ETH_IP4, ipv4(B, FAR, TCP, transport(TCP, B, FAR, 80, 3000, flags=SYN | ACK, seq=500, ack=101))))
        for _ in range(5):
            assert source(to_b(TCP, b"now", seq=101, ack=501)[1])[0] == FAR
        # What rules take from conntrack is no connection's by their own will.
        before = h.taken()
        assert all(source(to_b(UDP, b"free", dport=7)[1])[0] == A for _ in range(5)) and h.taken() > before, h.status("ta")


def test_without_a_keeper_tracked_tcp_goes_the_kernels_way_and_udp_is_taken():
    with host() as h:
        h.rules(NAT)
        h.attach(words=("--lease", "10000", "--no-controller"))
        open_tcp(h)
        for _ in range(3):
            assert forward(h, TCP, 3000, 8080, seq=101, ack=501)
        assert h.taken() == 0 and h.status("ta")["unlearned"]["not_liberal"] >= 1
        for _ in range(3):
            assert forward(h, UDP, 4000, 5300)
        assert h.taken() == 2


@timeout(600)
def test_translation_agrees_with_conntrack_under_churn():
    need_program("conntrack")
    with host() as h:
        h.rules(NAT)
        h.attach(words=("--lease", "10000", "--mode", "tcx"))
        for turn in range(6):
            ports = range(20000, 20040)
            seen = {}
            for port in ports:
                for _ in range(3):
                    seen[port] = source(forward(h, UDP, port, 5300)[1])
                assert answer(h, UDP, 53, seen[port])
                assert source(answer(h, UDP, 53, seen[port])[1]) == (NEAR, 5300)
            table = h.space.run("conntrack", "-L", "-p", "udp", check=False).stdout
            for port in ports:
                line = re.search(rf"src={A} dst={NEAR} sport={port} .*?src={B} dst={FAR} sport=53 dport=(\d+)", table)
                assert line and int(line[1]) == seen[port][1], (turn, port, seen[port], line)
            # Half of them vanish, and others take their ports at B's side: the next sender must not
            # be told for the old one.
            for port in list(ports)[::2]:
                h.space.run("conntrack", "-D", "-p", "udp", "--orig-port-src", str(port), check=False)
            for port in list(ports)[::2]:
                thief = ethernet(h.a.host_mac, h.a.mac, ETH_IP4, ipv4("10.1.0.3", NEAR, UDP, transport(UDP, "10.1.0.3", NEAR, port, 5300, b"t")))
                got = h.across(thief)
                assert got
                now = source(forward(h, UDP, port, 5300)[1])
                assert now != source(got[1]), "two connections with one translation"
            h.space.run("conntrack", "-F", check=False)
        reasons = h.status("ta")["by_reason"]
        assert reasons["up_conntrack"] >= 100 and reasons["taken_tcx"] >= 200, reasons


def test_a_flow_that_the_firewall_refuses_never_has_an_entry():
    with host() as h:
        h.rules(NAT)
        h.attach()
        for _ in range(5):
            # From B nothing may begin: the policy drops it.
            assert h.back(h.to_a(ETH_IP4, ipv4(B, A, UDP, transport(UDP, B, A, 53, 9999, b"no"))), seconds=0.1) is None
        assert h.status()["flows"] == 0 and h.taken("tb") == 0


def test_one_way_frames_to_an_open_port_are_taken_after_the_first():
    with host() as h:
        h.rules(NAT)
        h.attach(words=("--lease", "10000"))
        frame = h.udp()
        for _ in range(4):
            got = h.across(frame)
            assert got and is_ip(got[1]) and source(got[1])[0] == FAR
        assert h.taken() == 3


# The router's own addresses; A's network is hidden behind the one at B's side.
NEAR6, FAR6 = "fd01::1", "fd02::1"
NAT6 = """
table ip6 nat {
  chain prerouting { type nat hook prerouting priority -100; tcp dport 8080 dnat to [fd02::2]:80; udp dport 5300 dnat to [fd02::2]:53; }
  chain postrouting { type nat hook postrouting priority 100; oifname "tb" masquerade; }
}
table inet f { chain forward { type filter hook forward priority 0; policy drop; ct state established,related accept; iifname "ta" accept; }; }
"""


def exchange6(h, tcp_port, udp_port):
    """The same over IPv6; the ports are those that B sees."""
    def there(proto, body, header=bytes(10), to=NEAR6):
        return h.across(h.to_b(ETH_IP6, ipv6(A6, to, proto, body)), header)

    def back(proto, body, header=bytes(10)):
        return h.back(h.to_a(ETH_IP6, ipv6(B6, FAR6, proto, body)), header)

    partial_tcp, partial_udp = vnet_header(NEEDS_CSUM, start=54, offset=16), vnet_header(NEEDS_CSUM, start=54, offset=6)
    yield "tcp", there(TCP, transport(TCP, A6, NEAR6, 3000, 8080, b"there", seq=101, ack=501))
    yield "tcp partial", there(TCP, transport(TCP, A6, NEAR6, 3000, 8080, b"p" * 333, seq=101, ack=501, partial=True), partial_tcp)
    yield "tcp answer", back(TCP, transport(TCP, B6, FAR6, 80, tcp_port, b"back", seq=501, ack=101))
    yield "udp", there(UDP, transport(UDP, A6, NEAR6, 4000, 5300, b"odd"))
    yield "udp partial", there(UDP, transport(UDP, A6, NEAR6, 4000, 5300, b"q" * 99, partial=True), partial_udp)
    yield "udp answer", back(UDP, transport(UDP, B6, FAR6, 53, udp_port, b"back"))
    yield "echo", there(ICMP6, echo(A6, B6, ident=99), to=B6)
    yield "echo answer", back(ICMP6, echo(B6, FAR6, ident=99, reply=True))


def test_translated_frames_of_ipv6_are_byte_for_byte_the_kernels():
    translated6("tcx")


def test_translated_frames_of_ipv6_by_xdp_are_byte_for_byte_the_kernels():
    translated6("xdp")


def translated6(mode):
    with host() as h:
        h.rules(NAT6)

        def seen_port(body, proto):
            frame = h.across(h.to_b(ETH_IP6, ipv6(A6, NEAR6, proto, body)))[1]
            assert frame[22:38] == bytes.fromhex("fd020000000000000000000000000001") and frame[38:54] == bytes.fromhex("fd020000000000000000000000000002")
            return struct.unpack("!H", frame[54:56])[0]

        tcp_port = seen_port(transport(TCP, A6, NEAR6, 3000, 8080, b"", flags=SYN, seq=100, ack=0), TCP)
        assert h.back(h.to_a(ETH_IP6, ipv6(B6, FAR6, TCP, transport(TCP, B6, FAR6, 80, tcp_port, b"", flags=SYN | ACK, seq=500, ack=101))))
        seen_port(transport(TCP, A6, NEAR6, 3000, 8080, b"", seq=101, ack=501), TCP)
        udp_port = seen_port(transport(UDP, A6, NEAR6, 4000, 5300, b"first"), UDP)
        kernel = dict(exchange6(h, tcp_port, udp_port))
        assert all(kernel.values()), kernel
        h.attach(words=("--lease", "10000", "--mode", mode))

        if not translates_ipv6(h):
            # XDP leaves frames with unfinished checksums to the programs of mode tcx.
            left = {name for name in kernel if mode == "tcx" or "partial" in name}
            for _ in range(3):
                bypass = dict(exchange6(h, tcp_port, udp_port))
            both = [h.status(name)["by_reason"] for name in ("ta", "tb")]
            assert not any("taken_tcx" in counts for counts in both), both
            assert sum(counts.get("up_failed", 0) for counts in both) >= len(left), both
            assert all(("taken_xdp" in counts) == (mode == "xdp") for counts in both), both
        else:
            bypass = until_all_taken(h, lambda: exchange6(h, tcp_port, udp_port))
            assert ("taken_xdp" in h.status("ta")["by_reason"]) == (mode == "xdp")
        for name, expected in kernel.items():
            assert same(bypass[name], expected, mode), f"{name}:\nkernel {expected}\nbypass {bypass[name]}"
