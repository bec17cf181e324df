"""The bypass and firewall rules that judge each frame: what becomes of the same frames with the bypass and without it."""

import os
import signal
import struct
import subprocess
from collections import Counter

from bypass_nat import NAT, answer, forward, source
from bypass_paths import A, A6, B, B6, MAC_B, has_ended, host, is_ip, kernel_version, renames_what_is_up
from lib import Skip, need_program, timeout, until
from lib.tap import ETH_IP4, ETH_IP6, TCP, UDP, Tap, checksum, ipv4, ipv6, pseudo, transport

LONG = ("--lease", "10000")
EVIL = "@th,64,32 0x6576696c drop"
FORWARD = "table inet f { chain c { type filter hook forward priority 0; %s; }; }"
# No program can read the ruleset's generation before.
OTHER_MAC = "02:00:00:00:00:77"
# Commands in place of nft's rules.
IPTABLES = ("iptables ", "ipset ")
READS_GENERATION = kernel_version() >= (6, 17)


def udp(h, payload):
    return h.udp(payload.ljust(40, b"."))


def udp6(h, payload):
    return h.to_b(ETH_IP6, ipv6(A6, B6, UDP, transport(UDP, A6, B6, 1000, 2000, payload.ljust(40, b"."))))


def tcp(h, payload=b"data", options=b"", **more):
    segment = bytearray(transport(TCP, A, B, 1000, 2000, options + payload, **more))
    segment[12] = (20 + len(options)) // 4 << 4
    segment[16:18] = bytes(2)
    segment[16:18] = struct.pack("!H", ~checksum(pseudo(A, B, TCP, len(segment)) + bytes(segment)) & 0xFFFF)
    return h.to_b(ETH_IP4, ipv4(A, B, TCP, bytes(segment)))


def in_turn(*frames):
    """Each of them some times, the first one often enough for its flow to be taken."""
    return [frames[0]] * 4 + list(frames) * 4


def sized(h):
    return in_turn(h.udp(b"s" * 20), h.udp(b"l" * 200))


def good_and_evil(h):
    return in_turn(udp(h, b"good"), udp(h, b"evil"))


def by_two_macs(h):
    frame = udp(h, b"same")
    return in_turn(frame, frame[:6] + bytes.fromhex(OTHER_MAC.replace(":", "")) + frame[12:])


def alike(h):
    return [udp(h, b"same")] * 20


def outcome(h, frames):
    """How often each packet came to B, and what came to A. A tap's frames are through the router when the write is done."""
    h.a.drain()
    h.b.drain()
    for frame in frames:
        h.a.send(frame)
    return [Counter(f[14:] for _, f in tap.drain(is_ip)) for tap in (h.b, h.a)]


def prepared(h, rules):
    h.space.run("sysctl", "-qw", "net.netfilter.nf_conntrack_acct=1", check=False)
    # Whom copies are for.
    h.space.ip("neighbour", "replace", "10.2.0.3", "lladdr", MAC_B, "dev", "tb", "nud", "permanent")
    reader = ["sh", "-e"] if rules.startswith(IPTABLES) else ["nft", "-f", "-"]
    done = subprocess.run(["ip", "netns", "exec", str(h.space), *reader], input=rules, text=True, capture_output=True)
    if done.returncode:
        # A command that is wrong is no kernel's fault.
        assert not rules.startswith(IPTABLES) or "not supported" in done.stderr, done.stderr
        raise Skip(f"this kernel or nft has no such rule: {done.stderr.strip()}")


# (the rule, what of it is named, frames)
CASES = [
    (FORWARD % EVIL, "matches the payload", good_and_evil),
    (FORWARD % EVIL, "matches the payload", lambda h: in_turn(udp6(h, b"good"), udp6(h, b"evil"))),
    (FORWARD % "meta length > 100 drop", "matches meta length", sized),
    (FORWARD % "ip length > 100 drop", "matches IPv4's length", sized),
    (FORWARD % "udp length > 100 drop", "matches UDP's length", sized),
    (FORWARD % "numgen inc mod 2 0 drop", "matches numgen", alike),
    (FORWARD % "limit rate over 1/hour burst 3 packets drop", "limit", alike),
    (FORWARD % "quota over 500 bytes drop", "quota", alike),
    ("table inet f { quota q { over 500 bytes }; chain c { type filter hook forward priority 0; quota name q drop; }; }", "quota", alike),
    (FORWARD % "ct original packets > 5 drop", "matches ct packets", alike),
    (FORWARD % "ct original bytes > 500 drop", "matches ct bytes", alike),
    (FORWARD % "tcp window < 1000 drop", "matches TCP's window", lambda h: in_turn(tcp(h), tcp(h, window=500))),
    (FORWARD % "tcp window set 500", "writes TCP's window", lambda h: in_turn(tcp(h, window=500), tcp(h, window=600))),
    (FORWARD % "tcp option timestamp exists drop", "matches TCP options",
     lambda h: in_turn(tcp(h), tcp(h, options=b"\x01\x01\x08\x0a" + bytes(8)))),
    (FORWARD % "tcp sequence > 1000 drop", "matches TCP's sequence numbers", lambda h: in_turn(tcp(h), tcp(h, seq=5000))),
    (FORWARD % "tcp flags & psh == psh drop", "matches TCP's flags", lambda h: in_turn(tcp(h), tcp(h, flags=0x18))),
    ("table inet f { chain c { type filter hook forward priority 0; jump d; }; chain d { udp dport 2000 jump e; }; chain e { %s; }; }" % EVIL,
     "inet f e handle", good_and_evil),
    ("table inet f { chain c { type filter hook prerouting priority -300; %s; }; }" % EVIL, "matches the payload", good_and_evil),
    ("table ip f { chain c { type filter hook postrouting priority 200; %s; }; }" % EVIL, "matches the payload", good_and_evil),
    ("table inet f { set s { type ipv4_addr; flags dynamic; }; chain c { type filter hook forward priority 0; "
     "update @s { ip saddr limit rate over 1/hour burst 3 packets } drop; }; }", "limit", alike),
    ('table ip f { chain c { type filter hook forward priority 0; udp dport 2000 dup to 10.2.0.3 device "tb"; }; }', "dup", alike),
    ('table netdev n { chain c { type filter hook egress device "tb" priority 0; udp dport 2000 dup to "ta"; }; }', "dup", alike),
    ('table netdev n { chain c { type filter hook egress device "tb" priority 0; %s; }; }' % EVIL, "matches the payload", good_and_evil),
    ('table netdev n { chain c { type filter hook ingress device "ta" priority 0; %s; }; }' % EVIL, "matches the payload", good_and_evil),
    ('table inet n { chain c { type filter hook ingress device "ta" priority 0; %s; }; }' % EVIL, "matches the payload", good_and_evil),
    ("ipset create s hash:ip counters\nipset add s %s\niptables -A FORWARD -m set --match-set s src --packets-gt 5 -j DROP" % A,
     "matches the counters of a set", alike),
    (f"ipset create s bitmap:ip,mac range 10.1.0.0/16\nipset add s {A},{OTHER_MAC}\niptables -A FORWARD -m set --match-set s src,src -j DROP",
     "matches a set of MAC addresses", by_two_macs),
]


def compared(rules, named, make):
    """The same frames to a router without the bypass and to one with it."""
    with host() as h:
        frames = make(h)
        without = outcome(h, frames)
        prepared(h, rules)
        expected = outcome(h, frames)
        assert expected != without and expected[0], f"{rules}: the rule does nothing, or everything"
    with host() as h:
        prepared(h, rules)
        h.attach(words=(*LONG, "--mode", "tcx", "--judging-rules", "skip"))
        assert outcome(h, make(h)) != expected, f"{rules}: the frames do not show whether the rule judged each"
    for mode in ("tcx", "xdp"):
        with host() as h:
            prepared(h, rules)
            said = h.attach(words=(*LONG, "--mode", mode)).stderr
            got = outcome(h, make(h))
            assert got == expected, f"{rules}, {mode}:\nkernel {expected}\nbypass {got}\n{h.status('ta')}"
            assert h.taken() == 0 and h.status("ta")["unlearned"]["judged"] >= 1, (rules, h.status("ta"))
            assert 0 <= h.status("ta")["unlearned_ms_ago"]["judged"] < 60_000, h.status("ta")
            assert "rule that judges each frame" in said and named in said and "decoded" not in said, (rules, said)
            report = h.status()
            assert report["judging_rules"] and not report["judging_rules_skipped"] and report["rules_fault"] is None, report
            assert named in h.cli("status").stdout, rules


@timeout(600)
def test_rules_that_judge_each_frame_judge_each_frame():
    skipped = []
    for rules, named, make in CASES:
        print(rules)
        try:
            compared(rules, named, make)
        except Skip as reason:
            skipped.append(str(reason))
    print(f"not on this machine: {skipped}")
    if len(skipped) > len(CASES) // 4:
        raise Skip(f"of {len(CASES)} kinds of rules {len(skipped)} are not known here: {skipped[0]}")


# Rules that cannot judge UDP from A's port 1000 to B's port 2000, or that treat all its frames
# alike.
HARMLESS = [
    'iifname "tb" limit rate 1/hour drop',
    'oifname != "tb" limit rate 1/hour drop',
    "meta l4proto tcp log",
    "udp dport 53 log",
    "udp sport { 1, 5-7 } log",
    "ip saddr 10.9.0.0/16 numgen inc mod 2 0 drop",
    "ip daddr 10.9.0.1 quota over 1 bytes drop",
    "ip6 daddr fd09::/64 log",
    "meta nfproto ipv6 limit rate 1/hour drop",
    "tcp flags syn tcp option maxseg size set 1400",
    "tcp flags & (syn | rst) == syn limit rate 1/hour drop",
    "tcp flags & (fin | syn | rst | psh | ack | urg) == 0x0 log drop",
    "ip frag-off & 0x1fff != 0 log drop",
    "ct state { established, related, invalid } log",
    'iifname "ta" counter accept; limit rate 1/hour drop',
    "meta l4proto vmap { tcp : drop, udp : accept }; log",
    "ct state vmap { new : accept, established : accept }; log",
    "ip saddr 10.1.0.0/24 counter meta mark set 7 ct mark set 9",
    "ip ttl > 5 ip dscp != 46 ct state new accept",
    "icmp type echo-request limit rate 1/hour drop",
    "exthdr hbh exists log",
    "ipset create s hash:ip counters\nipset add s 10.9.0.1\niptables -A FORWARD -m set --match-set s src -j DROP",
]


@timeout(600)
def test_a_rule_that_cannot_judge_a_flow_does_not_keep_it_from_the_bypass():
    for rule in HARMLESS:
        for mode in ("tcx", "xdp"):
            with host() as h:
                prepared(h, rule if rule.startswith(IPTABLES) else FORWARD % rule)
                h.attach(words=(*LONG, "--mode", mode))
                assert all(h.across(udp(h, b"harmless")) for _ in range(6)) and h.taken() == 5, (rule, h.status())


def test_established_connections_do_not_come_to_rules_behind_their_acceptance():
    with host() as h:
        h.rules(NAT + "add rule inet f forward limit rate 1/second log drop")
        done = h.attach(words=LONG)
        assert "inet f forward handle" in done.stderr and "limit" in done.stderr, done.stderr
        seen = source(forward(h, UDP, 4000, 5300)[1])
        for _ in range(4):
            assert forward(h, UDP, 4000, 5300)
        # As long as no answer has come it is new, and `iifname "ta" accept` is what lets it pass,
        # before the rule that judges.
        assert h.taken() == 4, h.status("ta")
        assert answer(h, UDP, 53, seen)
        for _ in range(3):
            assert forward(h, UDP, 4000, 5300) and answer(h, UDP, 53, seen)
        assert h.taken("ta") >= 6 and h.taken("tb") >= 2, h.status()
    with host() as h:
        h.rules(FORWARD % "ct state established,related accept; limit rate 1000/second accept; drop")
        h.attach(words=LONG)
        for _ in range(4):
            assert h.across(udp(h, b"new"))
        assert h.taken() == 0 and h.status("ta")["unlearned"]["judged"] == 4, h.status("ta")
        assert h.back(h.to_a(ETH_IP4, ipv4(B, A, UDP, transport(UDP, B, A, 2000, 1000, b"back"))))
        for _ in range(4):
            assert h.across(udp(h, b"established"))
        assert h.taken() == 3, h.status("ta")


def test_a_rule_that_comes_judges_the_next_frame_and_one_that_goes_judges_no_more():
    for mode in ("tcx", "xdp"):
        with host() as h:
            h.rules(FORWARD % "counter")
            h.attach(words=(*LONG, "--mode", mode))
            assert all(h.across(udp(h, b"good")) for _ in range(4)) and h.taken() == 3
            for _ in range(5):
                taken = h.taken()
                h.rules("add rule inet f c " + EVIL)
                if not READS_GENERATION:
                    until("the controller to have read the rule", lambda h=h: h.across(udp(h, b"evil"), seconds=0.1) is None, 10)
                    taken = h.taken()
                for _ in range(3):
                    assert h.across(udp(h, b"evil"), seconds=0.1) is None, mode
                    assert h.across(udp(h, b"good")), mode
                assert h.taken() == taken and "matches the payload" in h.cli("status").stdout, h.status("ta")
                h.rules("flush chain inet f c")
                until("frames to be taken again", lambda h=h, t=taken: h.across(udp(h, b"good")) and h.taken() > t, 20)
                assert h.status()["judging_rules"] == []


def test_the_user_may_have_flows_taken_although_a_rule_judges_them():
    with host() as h:
        h.rules(FORWARD % EVIL)
        words = ("--judging-rules", "skip")
        said = h.attach(words=(*LONG, *words)).stderr
        assert "matches the payload" in said and "as --judging-rules skip says" in said, said

        def skips():
            assert h.across(udp(h, b"good")) and h.across(udp(h, b"good"))
            assert h.across(udp(h, b"evil")), "it was taken"
            return h.status()["judging_rules_skipped"]

        assert skips() and h.taken() == 2
        assert "as --judging-rules skip says" in h.cli("status").stdout and h.status()["judging_rules"]
        # As it is.
        h.attach()
        assert skips()
        # A change of rules needs no reading then.
        h.rules("add rule inet f c counter")
        assert skips() and h.status()["rules_fault"] is None
        h.attach(words=("--judging-rules", "obey"))
        assert not h.status()["judging_rules_skipped"]
        assert h.across(udp(h, b"good")) and h.across(udp(h, b"evil"), seconds=0.1) is None


def test_without_a_keeper_changed_rules_have_all_flows_take_the_kernels_path_until_they_are_read():
    if not READS_GENERATION:
        raise Skip("before Linux 6.17 programs cannot read the ruleset's generation")
    for how in ("killed", "never started"):
        with host() as h:
            h.rules(FORWARD % "counter")
            h.attach(words=(*LONG, *(() if how == "killed" else ("--no-controller",))))
            if how == "killed":
                keeper = h.status()["keeper"]
                os.kill(keeper, signal.SIGKILL)
                until("the controller's end", lambda k=keeper: has_ended(k))
            assert all(h.across(udp(h, b"good")) for _ in range(4)) and h.taken() == 3
            h.rules("add rule inet f c " + EVIL)
            for _ in range(3):
                assert h.across(udp(h, b"good")) and h.across(udp(h, b"evil"), seconds=0.1) is None
            assert h.taken() == 3 and h.status("ta")["unlearned"]["judged"] >= 3, h.status("ta")
            assert "not read yet" in h.status()["rules_fault"] and "until then no flow is learned" in h.cli("status").stdout
            h.attach(words=("--no-controller",))
            assert h.status()["rules_fault"] is None
            assert h.across(udp(h, b"good")) and h.across(udp(h, b"evil"), seconds=0.1) is None
            h.rules("flush chain inet f c")
            h.attach(words=("--no-controller",))
            assert all(h.across(udp(h, b"good")) for _ in range(4)) and h.taken() >= 6, h.status("ta")


def test_rules_for_interfaces_that_come_or_are_renamed_later_judge_them():
    with host() as h:
        h.rules(FORWARD % f'iifname {{ "tc", "tx" }} {EVIL}')
        h.attach(words=LONG)
        assert all(h.across(udp(h, b"good")) for _ in range(3)) and h.taken() == 2
        other = Tap(h.space, "tc", "10.3.0.1/24", mac="02:00:00:00:0c:02", neighbours=("10.3.0.2",))
        try:
            said = h.attach("tc").stderr
            assert "matches the payload" in said, said

            def arrives(payload, seconds):
                packet = ipv4("10.3.0.2", B, UDP, transport(UDP, "10.3.0.2", B, 1000, 2000, payload))
                h.b.drain()
                other.send(other.host_mac + other.mac + b"\x08\x00" + packet)
                return h.b.receive(seconds, is_ip) is not None

            for _ in range(4):
                assert arrives(b"good" * 9, 20) and not arrives(b"evil" * 9, 0.1)
            assert h.taken("tc") == 0
        finally:
            other.close()
        until("frames of another input to be taken", lambda: h.across(udp(h, b"good")) and h.taken() > 3)
        if not renames_what_is_up():
            return print("the rename is left out, since Linux before 6.2 renames no interface that is up")
        h.space.ip("link", "set", "ta", "name", "tx")
        until("the controller's notice", lambda: h.across(udp(h, b"evil"), seconds=0.1) is None)
        assert h.across(udp(h, b"good")) and h.across(udp(h, b"evil"), seconds=0.1) is None


def test_more_rules_than_there_are_filters_judge_all_the_same():
    with host() as h:
        many = "; ".join(f"udp dport {port} log" for port in range(3000, 3060))
        h.rules(FORWARD % many)
        said = h.attach(words=LONG).stderr
        assert "40 more such rules" in said, said
        # The filters cover more than the rules, so UDP is not taken at all, and what comes by no
        # rule is.
        assert all(h.across(udp(h, b"good")) for _ in range(4)) and h.taken() == 0
        assert len(h.status()["judging_rules"]) == h.status()["judging_rules_total"] == 60


def test_rules_of_iptables_are_read_where_they_are_nftables_rules():
    need_program("iptables")
    with host() as h:
        if "nf_tables" not in h.space.run("iptables", "--version").stdout:
            raise Skip("iptables is the legacy one here")

        def iptables(*words):
            done = h.space.run("iptables", *words, check=False)
            if done.returncode:
                raise Skip(f"iptables {' '.join(words)}: {done.stderr.strip()}")

        iptables("-A", "FORWARD", "-m", "comment", "--comment", "kept", "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT")
        iptables("-A", "FORWARD", "-p", "tcp", "--tcp-flags", "SYN,RST", "SYN", "-j", "TCPMSS", "--clamp-mss-to-pmtu")
        h.attach(words=LONG)
        assert h.status()["judging_rules"] == [], h.status()
        assert all(h.across(udp(h, b"new")) for _ in range(4)) and h.taken() == 3, h.status("ta")
        iptables("-A", "FORWARD", "-p", "udp", "-m", "statistic", "--mode", "nth", "--every", "2", "--packet", "0", "-j", "DROP")
        passed = [h.across(udp(h, b"new"), seconds=0.1) is not None for _ in range(8)]
        assert passed in ([True, False] * 4, [False, True] * 4), passed
        assert "matches -m statistic" in h.cli("status").stdout
        # With an answer the connection is established, and does not come to it.
        assert h.back(h.to_a(ETH_IP4, ipv4(B, A, UDP, transport(UDP, B, A, 2000, 1000, b"back"))))
        before = h.taken()
        assert all(h.across(udp(h, b"established")) for _ in range(6))
        until("frames to be taken", lambda: h.across(udp(h, b"established")) and h.taken() > before)
