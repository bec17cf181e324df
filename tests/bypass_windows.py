"""Conntrack's entries of TCP connections that the bypass takes: state, timeout, and what a guessed FIN or RST does to them. Each case
is played without the bypass and with it."""

import os
import random
import re
import signal
import socket
import threading
import time

from bypass_nat import NAT, NEAR, answer, forward, invalid, open_tcp
from bypass_paths import A, A6, ARRIVES_S, B, B6, establish6, host, is_ip
from bypass_veth import bound, container
from lib import need_program, timeout, until
from lib.tap import ACK, ETH_IP4, ETH_IP6, FIN, PSH, RST, SYN, TCP, URG, ipv4, ipv6, transport

ESTABLISHED_S, UNACKNOWLEDGED_S = 432_000, 300
# A frame that must not arrive is waited for so long.
NOT_ARRIVES_S = 0.05


# Windows are scaled by 7 bits, and selective acknowledgements are taken.
SCALED = bytes([1, 3, 3, 7, 1, 1, 4, 2])
# In units of 128 bytes where windows are scaled.
WINDOW = 500


class Talk:
    """A connection from A to B through both translations. Each frame acknowledges all that came before it."""

    def __init__(self, h, sport=3000, options=b""):
        self.h, self.sport, self.a, self.b = h, sport, 101, 501
        self.more = dict(window=WINDOW) if options else {}
        self.seen = open_tcp(h, sport, options=options)

    def to_b(self, length=0, **more):
        got = forward(self.h, TCP, self.sport, 8080, b"a" * length, **dict(dict(self.more, seq=self.a, ack=self.b), **more))
        self.a += length
        return got

    def to_a(self, length=0, **more):
        got = answer(self.h, TCP, 80, self.seen, b"b" * length, **dict(dict(self.more, seq=self.b, ack=self.a), **more))
        self.b += length
        return got

    def from_a(self, payload, flags, seq, ack):
        """A frame with numbers of its own, which is not expected to arrive."""
        frame = ipv4(A, NEAR, TCP, transport(TCP, A, NEAR, self.sport, 8080, payload, flags=flags, seq=seq, ack=ack))
        return self.h.across(self.h.to_b(ETH_IP4, frame), seconds=NOT_ARRIVES_S)

    def from_b(self, payload, flags, seq, ack):
        """The same from the other side."""
        frame = ipv4(B, self.seen[0], TCP, transport(TCP, B, self.seen[0], 80, self.seen[1], payload, flags=flags, seq=seq, ack=ack))
        return self.h.back(self.h.to_a(ETH_IP4, frame), seconds=NOT_ARRIVES_S)

    def entry(self):
        """(state, seconds until it expires), as conntrack shows them."""
        text = self.listing()
        found = re.search(r"tcp\s+6 (\d+) (\w+)", text)
        assert found, text
        return found[2], int(found[1])

    def listing(self):
        return self.h.space.run("conntrack", "-L", "-p", "tcp", "--orig-port-src", str(self.sport), check=False).stdout

    def lasts(self):
        """Whether the entry is that of an established connection whose data was all acknowledged, moments ago."""
        state, seconds = self.entry()
        return state == "ESTABLISHED" and ESTABLISHED_S - 60 < seconds <= ESTABLISHED_S


class Talk6(Talk):
    """The same over IPv6, which nothing translates."""

    def __init__(self, h, sport=3000):
        self.h, self.sport, self.a, self.b, self.more = h, sport, 101, 501, {}
        establish6(h, sport, 80)

    def _sent(self, by_b, payload, seconds, **more):
        (source, sport), (to, dport) = ((B6, 80), (A6, self.sport))[:: 1 if by_b else -1]
        packet = ipv6(source, to, TCP, transport(TCP, source, to, sport, dport, payload, **more))
        h = self.h
        return h.back(h.to_a(ETH_IP6, packet), seconds=seconds) if by_b else h.across(h.to_b(ETH_IP6, packet), seconds=seconds)

    def to_b(self, length=0, **more):
        got = self._sent(False, b"a" * length, ARRIVES_S, **dict(dict(seq=self.a, ack=self.b), **more))
        self.a += length
        return got

    def to_a(self, length=0, **more):
        got = self._sent(True, b"b" * length, ARRIVES_S, **dict(dict(seq=self.b, ack=self.a), **more))
        self.b += length
        return got

    def from_a(self, payload, flags, seq, ack):
        return self._sent(False, payload, NOT_ARRIVES_S, flags=flags, seq=seq, ack=ack)

    def from_b(self, payload, flags, seq, ack):
        return self._sent(True, payload, NOT_ARRIVES_S, flags=flags, seq=seq, ack=ack)

    def listing(self):
        return self.h.space.run("conntrack", "-L", "-f", "ipv6", "-p", "tcp", "--orig-port-src", str(self.sport), check=False).stdout


def outlasts(talk, what):
    """Waits until its entry is that of an established connection."""
    def seen():
        h = talk.h
        logs = [path.read_text() for path in h.folder.glob("run/bypass/*.log")]
        return "\n".join([f"sent {talk.a} and {talk.b}", talk.listing(), h.cli("flows", "--json").stdout, h.cli("status", "--json").stdout, *logs])

    until(what, talk.lasts, seen=seen)


# Connections are tracked, and those of before are not translated.
TRACKED = NAT[NAT.index("table inet f"):]


def bulk(talk):
    for n in range(300):
        assert talk.to_b(1400)
        if n % 2:
            assert talk.to_a()


def requests(talk):
    for _ in range(80):
        assert talk.to_b(100) and talk.to_a(900)
        time.sleep(0.01)
    assert talk.to_b()


def keystrokes(talk):
    for _ in range(12):
        assert talk.to_b(36) and talk.to_a(36) and talk.to_b()
        time.sleep(0.15)


def both_ways(talk):
    for n in range(150):
        assert talk.to_b(1400) and talk.to_a(1400)
    assert talk.to_b()


PATTERNS = [bulk, requests, keystrokes, both_ways]


def attach(h, mode="tcx"):
    h.attach(words=("--lease", "200", "--mode", mode))


def all_taken(talk):
    """Waits until the bypass takes both directions."""

    def is_taken():
        before = talk.h.taken("ta"), talk.h.taken("tb")
        # More than one: an emulated guest asks for the counters for longer than a lease.
        for _ in range(4):
            assert talk.to_b(10) and talk.to_a(10)
        return talk.h.taken("ta") > before[0] and talk.h.taken("tb") > before[1]

    until("both directions to be taken", is_taken)


@timeout(600)
def test_entries_of_idle_connections_last_as_long_as_the_kernels():
    entries_last(Talk, NAT, PATTERNS, "tcx")


@timeout(300)
def test_entries_of_idle_connections_that_xdp_takes_last_as_long_as_the_kernels():
    entries_last(Talk, NAT, [requests], "xdp")


@timeout(300)
def test_entries_of_idle_connections_over_ipv6_last_as_long_as_the_kernels():
    for mode in ("tcx", "xdp"):
        entries_last(Talk6, TRACKED, [requests], mode)


def entries_last(kind, rules, patterns, mode):
    need_program("conntrack")
    for pattern in patterns:
        with host() as h:
            h.rules(rules)
            kernel = kind(h, 3000)
            pattern(kernel)
            assert kernel.lasts(), kernel.entry()
            attach(h, mode)
            talk = kind(h, 3001)
            all_taken(talk)
            before = h.taken()
            pattern(talk)
            assert h.taken() >= before + 10, h.status("ta")
            outlasts(talk, f"the entry after {pattern.__name__} to last")
            # And again, after more traffic.
            pattern(talk)
            outlasts(talk, f"the entry after {pattern.__name__} once more to last")
            pattern(talk)
            h.cli("detach")
            assert talk.lasts(), (pattern.__name__, talk.entry())
            for _ in range(3):
                assert talk.to_b(10) and talk.to_a(10) and talk.to_b()
                assert talk.lasts(), (pattern.__name__, talk.entry())
            assert invalid(h) == 0


@timeout(300)
def test_data_that_nobody_acknowledges_lets_the_entry_expire_as_in_the_kernel():
    need_program("conntrack")
    with host() as h:
        h.rules(NAT)
        kernel = Talk(h, 3000)
        assert kernel.to_b(500)
        state, seconds = kernel.entry()
        assert state == "ESTABLISHED" and UNACKNOWLEDGED_S - 30 < seconds <= UNACKNOWLEDGED_S
        attach(h)
        talk = Talk(h, 3001)
        all_taken(talk)
        bulk(talk)
        outlasts(talk, "the entry to last")
        for _ in range(20):
            assert talk.to_b(500)
        until("the entry to be one of unacknowledged data", lambda: talk.entry()[1] <= UNACKNOWLEDGED_S)
        assert talk.entry()[0] == "ESTABLISHED" and talk.entry()[1] > UNACKNOWLEDGED_S - 60
        assert talk.to_a()
        outlasts(talk, "the entry to last again")


def half_closed(h, frames, meanwhile=None):
    """Entries of two half-closed connections, of which the bypass takes the second: at half of the close, after so many frames each way, and as
    the rest closes. `meanwhile` is done to the second one before."""
    entries = []
    for sport in (3000, 3001):
        talk = Talk(h, sport)
        if sport == 3001:
            attach(h)
            all_taken(talk)
        both_ways(talk)
        assert talk.to_b(flags=FIN | ACK)
        talk.a += 1
        assert talk.to_a()
        if meanwhile:
            for _ in range(frames):
                assert talk.to_a(1400) and talk.to_b()
            if sport == 3001:
                meanwhile()
        states = [talk.entry()]
        for _ in range(frames):
            assert talk.to_a(1400) and talk.to_b()
        states.append(talk.entry())
        assert talk.to_a(flags=FIN | ACK)
        talk.b += 1
        states.append(talk.entry())
        assert talk.to_b()
        states.append(talk.entry())
        entries.append(states)
    kernel, bypass = entries
    assert [state for state, _ in kernel] == [state for state, _ in bypass] == ["CLOSE_WAIT", "CLOSE_WAIT", "LAST_ACK", "TIME_WAIT"], entries
    assert all(abs(k - b) <= 10 for (_, k), (_, b) in zip(kernel, bypass, strict=True)), entries
    assert invalid(h) == 0


@timeout(300)
def test_half_closed_connections_have_the_kernels_state():
    need_program("conntrack")
    with host() as h:
        h.rules(NAT)
        half_closed(h, 40)
        assert "dropped_window" not in h.status("ta")["by_reason"]


@timeout(300)
def test_half_closed_connections_have_the_kernels_state_when_the_bypass_ends():
    need_program("conntrack")
    for end in (lambda h: os.kill(h.status()["keeper"], signal.SIGKILL), lambda h: h.cli("detach")):
        with host() as h:
            h.rules(NAT)
            half_closed(h, 20, lambda h=h, end=end: end(h))


def guess(talk, by_b):
    """FINs and RSTs with random numbers, the same each time; says which of them arrived."""
    dice = random.Random(11)
    arrived = []
    send, own, other = (talk.from_b, talk.b, talk.a) if by_b else (talk.from_a, talk.a, talk.b)
    for _ in range(30):
        flags = dice.choice((RST, RST | ACK, FIN | ACK))
        # Not near what is right: of 65536 guesses one may be, in the kernel too.
        seq, ack = ((base + dice.randrange(1 << 22, (1 << 32) - (1 << 22))) % (1 << 32) for base in (own, other))
        arrived.append(bool(send(b"", flags, seq, ack)))
    return arrived


def same_guesses(talk, by_b, expected):
    got = guess(talk, by_b)
    differ = [n for n, (had, want) in enumerate(zip(got, expected)) if had != want]
    assert not differ, f"guesses {differ} do not fare as without the bypass: arrived {got}, expected {expected}"


@timeout(600)
def test_a_guessed_fin_or_rst_harms_no_connection_and_passes_where_the_kernel_lets_it_pass():
    guesses_are_harmless(Talk, NAT, PATTERNS)


@timeout(300)
def test_a_guessed_fin_or_rst_harms_no_connection_over_ipv6():
    guesses_are_harmless(Talk6, TRACKED, [both_ways])


def guesses_are_harmless(kind, rules, patterns):
    need_program("conntrack")
    for pattern in patterns:
        with host() as h:
            h.rules(rules)
            kernel = kind(h, 3000)
            pattern(kernel)
            expected = guess(kernel, True)
            assert kernel.lasts() and not all(expected), kernel.entry()
            expected_a = guess(kernel, False)
            # Of what comes from both sides and is invalid the kernel makes something: it lowers the
            # timeout.
            assert kernel.entry()[0] == "ESTABLISHED" and not all(expected_a), kernel.entry()
            attach(h)
            talk = kind(h, 3001)
            all_taken(talk)
            pattern(talk)
            # In the midst of traffic, and at rest.
            same_guesses(talk, True, expected)
            assert talk.entry()[0] == "ESTABLISHED", talk.entry()
            pattern(talk)
            outlasts(talk, "the entry to last")
            same_guesses(talk, True, expected)
            assert talk.lasts(), talk.entry()
            same_guesses(talk, False, expected_a)
            assert talk.entry()[0] == "ESTABLISHED", talk.entry()
            dropped = [h.status(name)["by_reason"]["dropped_window"] for name in ("ta", "tb")]
            assert dropped == [expected_a.count(False), 2 * expected.count(False)], dropped
            # It goes on, and ends as it should.
            pattern(talk)
            assert talk.to_b(flags=FIN | ACK), h.status("ta")
            assert talk.entry()[0] == "FIN_WAIT", talk.entry()


# Together with PSH and the bits of ECN, which conntrack leaves out of account, each of them is as
# unknown to it.
UNKNOWN_ENDS = (FIN, FIN | URG, SYN | FIN | ACK, SYN | RST | ACK, FIN | RST | ACK, RST | URG, RST | ACK | URG, FIN | PSH)


@timeout(300)
def test_an_end_with_flags_that_conntrack_does_not_know_is_left_to_it_whatever_its_numbers_are():
    unknown_ends_are_the_kernels(Talk, NAT)


@timeout(300)
def test_an_end_over_ipv6_with_flags_that_conntrack_does_not_know_is_left_to_it():
    unknown_ends_are_the_kernels(Talk6, TRACKED)


def unknown_ends_are_the_kernels(kind, rules):
    need_program("conntrack")
    with host() as h:
        h.rules(rules)

        def sent(talk):
            """In place, near, and far behind the window."""
            places = [(talk.b, talk.a), (talk.b + 100, talk.a), (talk.b + (1 << 30), talk.a)]
            return [bool(talk.from_b(b"", flags, *place)) for flags in UNKNOWN_ENDS for place in places]

        kernel = kind(h, 3000)
        both_ways(kernel)
        expected = sent(kernel)
        assert kernel.lasts() and not any(expected), (kernel.entry(), expected)
        attach(h)
        talk = kind(h, 3001)
        all_taken(talk)
        for _ in range(2):
            assert sent(talk) == expected and "dropped_window" not in h.status("tb")["by_reason"], h.status("tb")
            # None of them counts as its end: such a connection is not settled.
            both_ways(talk)
            outlasts(talk, "the entry to last")
        assert talk.to_b(flags=FIN | ACK) and talk.entry()[0] == "FIN_WAIT", talk.entry()


@timeout(600)
def test_after_detach_the_kernel_checks_windows_again():
    need_program("conntrack")
    for pattern in PATTERNS:
        for mode in ("tcx", "xdp") if pattern is bulk else ("tcx",):
            with host() as h:
                h.rules(NAT)
                kernel = Talk(h, 3000, SCALED)
                pattern(kernel)
                expected = guess(kernel, True)
                attach(h, mode)
                talk = Talk(h, 3001, SCALED)
                all_taken(talk)
                # The kernel has lost its step by more than a window.
                bulk(talk)
                pattern(talk)
                outlasts(talk, "the entry to last")
                before = invalid(h)
                assert h.cli("detach").stdout == "ta detached\ntb detached\n"
                # Neither end has seen how.
                assert not talk.h.a.receive(NOT_ARRIVES_S, is_ip) and not talk.h.b.receive(NOT_ARRIVES_S, is_ip)
                assert talk.lasts(), (pattern.__name__, talk.entry())
                assert guess(talk, True) == expected and not all(expected), (pattern.__name__, expected)
                assert talk.lasts(), (pattern.__name__, talk.entry())
                pattern(talk)
                assert talk.lasts() and invalid(h) == before, (pattern.__name__, talk.entry())
                # It can be taken again, and its right RST ends it.
                attach(h, mode)
                all_taken(talk)
                h.cli("detach")
                assert talk.to_a(flags=RST | ACK) and talk.entry()[0] == "CLOSE", (pattern.__name__, talk.entry())


TIMES = int(os.environ.get("TOMBOLO_TIMES", "10"))


@timeout(600 + 5 * TIMES)
def test_streams_stay_whole_while_the_bypass_comes_and_goes():
    """As fast as the sockets go in one direction, and request by request in the other."""
    with host() as h, container(h) as far, container(h, "vd", "10.5.0.2") as other:
        h.rules('table ip n { chain pre { type nat hook prerouting priority -100; iifname "vd" tcp dport 8080 dnat to 10.4.0.2:80; }; '
                'chain post { type nat hook postrouting priority 100; oifname "vc" masquerade; }; }\n'
                'table inet f { counter invalid { }; chain pre { type filter hook prerouting priority -199; ct state invalid counter name invalid; }; }')
        listener = bound(far, socket.SOCK_STREAM, ("10.4.0.2", 80))
        listener.listen()
        stop, failures = threading.Event(), []
        counts = {"stream": 0, "answers": 0}

        def guarded(body):
            def run():
                try:
                    body()
                except Exception as error:
                    failures.append(repr(error))
                    stop.set()
            thread = threading.Thread(target=run)
            thread.start()
            return thread

        def opened():
            s = bound(other, socket.SOCK_STREAM, ("10.5.0.2", 0))
            s.connect(("10.5.0.1", 8080))
            far_end, _ = listener.accept()
            far_end.settimeout(60)
            return s, far_end

        (one, one_far), (two, two_far) = opened(), opened()
        block = random.Random(5).randbytes(1 << 16)

        def send():
            while not stop.is_set():
                one.sendall(block)
            one.shutdown(socket.SHUT_WR)

        def receive():
            got = b""
            while True:
                data = one_far.recv(1 << 16)
                if not data:
                    break
                counts["stream"] += len(data)
                got += data
                while len(got) >= len(block):
                    assert got.startswith(block), "the stream's bytes are others"
                    got = got[len(block):]

        def ask():
            n = 0
            while not stop.is_set():
                two.sendall(b"%8d" % n)
                assert two.recv(8, socket.MSG_WAITALL) == b"%8d" % n
                n += 1
            two.shutdown(socket.SHUT_WR)

        def reply():
            while data := two_far.recv(8):
                two_far.sendall(data)
                counts["answers"] += 1

        threads = [guarded(body) for body in (receive, send, reply, ask)]
        unchecked = 0
        try:
            for turn in range(TIMES):
                before = dict(counts)
                h.attach("vc", "vd", words=("--lease", "200"))
                until("both connections to go on", lambda b=before: stop.is_set() or all(counts[k] > b[k] for k in counts))
                unchecked += "checks no windows" in h.cli("detach").stdout
                before = dict(counts)
                until("both connections to go on", lambda b=before: stop.is_set() or all(counts[k] > b[k] for k in counts))
                assert not failures, (turn, failures, h.space.run("nft", "list", "counter", "inet", "f", "invalid").stdout, h.space.run("conntrack", "-L").stdout)
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
        assert not failures, failures
        print(f"     {TIMES} times: {counts['stream'] >> 20} MiB, {counts['answers']} answers, {unchecked} times a connection stayed unchecked")
        text = h.space.run("nft", "list", "counter", "inet", "f", "invalid").stdout
        assert re.search(r"packets (\d+)", text)[1] == "0", text
        for s in (one, one_far, two, two_far, listener):
            s.close()


@timeout(300)
def test_after_detach_connections_without_scaled_windows_stay_unchecked_and_detach_says_so():
    with host() as h:
        h.rules(NAT)
        attach(h)
        talk = Talk(h)
        all_taken(talk)
        both_ways(talk)
        said = h.cli("detach").stdout
        assert "checks no windows of 1 TCP connection, " in said, said
        both_ways(talk)
        assert talk.lasts() and invalid(h) == 0


@timeout(300)
def test_rules_before_conntrack_that_drop_what_detach_injects_leave_connections_as_they_were():
    with host() as h:
        h.rules(NAT)
        attach(h)
        talk = Talk(h, options=SCALED)
        all_taken(talk)
        both_ways(talk)
        h.rules("table inet raw { chain pre { type filter hook prerouting priority -300; tcp flags syn drop; }; }")
        said = h.cli("detach").stdout
        assert "checks no windows of 1 TCP connection, " in said, said
        both_ways(talk)
        assert talk.lasts() and invalid(h) == 0


@timeout(300)
def test_connections_outlive_detaches_of_one_interface_after_the_other():
    """What the first one could not do the second one must not do with numbers that were not followed since."""
    with host() as h:
        h.rules(NAT)
        attach(h)
        talk = Talk(h, options=SCALED)
        all_taken(talk)
        both_ways(talk)
        h.rules("table inet raw { chain pre { type filter hook prerouting priority -300; tcp flags syn drop; }; }")
        said = h.cli("detach", "ta").stdout
        assert "checks no windows of 1 TCP connection, " in said, said
        h.space.run("nft", "delete", "table", "inet", "raw")
        # Further than a window.
        bulk(talk)
        both_ways(talk)
        h.cli("detach", "tb")
        both_ways(talk)
        assert talk.lasts() and invalid(h) == 0, talk.entry()
        assert not h.a.receive(NOT_ARRIVES_S, is_ip) and not h.b.receive(NOT_ARRIVES_S, is_ip)


@timeout(300)
def test_a_right_rst_ends_the_entry_in_every_mode():
    need_program("conntrack")
    for mode in ("tcx", "xdp"):
        for pattern in (bulk, requests):
            for by_b in (True, False):
                with host() as h:
                    h.rules(NAT)
                    attach(h, mode)
                    talk = Talk(h)
                    all_taken(talk)
                    pattern(talk)
                    assert (talk.to_a if by_b else talk.to_b)(flags=RST | ACK), (mode, pattern.__name__, h.status())
                    until("the entry to be closed", lambda t=talk: t.entry()[0] == "CLOSE")
                    assert talk.entry()[1] <= 10, talk.entry()


@timeout(300)
def test_data_that_is_guessed_moves_no_window():
    need_program("conntrack")
    dice = random.Random(12)
    with host() as h:
        h.rules(NAT)
        attach(h)
        talk = Talk(h)
        all_taken(talk)
        both_ways(talk)
        for turn in range(30):
            seq, ack = ((base + dice.randrange(1 << 22, (1 << 32) - (1 << 22))) % (1 << 32) for base in (talk.b, talk.a))
            # Conntrack is liberal, so it may arrive; its receiver does not take it.
            talk.from_b(b"guess", ACK, seq, ack)
            for flags in (RST, RST | ACK, FIN | ACK):
                talk.from_b(b"", flags, (seq + 5) % (1 << 32), ack)
            assert talk.entry()[0] == "ESTABLISHED", (turn, talk.entry())
            time.sleep(0.02)
        assert talk.entry()[0] == "ESTABLISHED"
        assert talk.to_b(10) and talk.to_a(10) and talk.to_a(flags=RST | ACK)
        until("the entry to be closed", lambda: talk.entry()[0] == "CLOSE")


@timeout(300)
def test_without_the_keeper_connections_go_back_to_the_kernel_and_last():
    need_program("conntrack")
    for pattern in PATTERNS:
        with host() as h:
            h.rules(NAT)
            attach(h)
            talk = Talk(h)
            all_taken(talk)
            pattern(talk)
            os.kill(h.status()["keeper"], signal.SIGKILL)
            end = time.monotonic() + 8
            while time.monotonic() < end:
                pattern(talk)
            before = h.taken()
            pattern(talk)
            assert h.taken() == before and h.status("ta")["unlearned"]["not_kept"] > 0, h.status("ta")
            if pattern in (bulk, both_ways):
                # More than a window was sent since conntrack saw a frame. It follows again once it
                # is told where the two are.
                assert talk.entry()[0] == "ESTABLISHED" and talk.entry()[1] > UNACKNOWLEDGED_S - 60, talk.entry()
                attach(h)
                outlasts(talk, "the entry to last")
            assert talk.lasts(), talk.entry()
            assert invalid(h) == 0
