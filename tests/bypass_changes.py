"""What changes in the host while flows are bypassed: routes, settings, rules and interfaces. Two routers that differ in the bypass only see the same
changes between the same frames, and what leaves them is compared; flows hold for ten seconds, so that none is asked for again by itself."""

import os
import struct
import time

from bypass_hostile import is_packet, said, twins
from bypass_paths import A, A6, B, B6, MAC_B, has_tcx, host, kernel_version, renames_what_is_up, translates_ipv6
from lib import Namespace, Skip, timeout, until
from lib.machine import SLOW
from lib.tap import ETH_IP4, ETH_IP6, TCP, UDP, Tap, ethernet, ipv4, ipv6, packed, transport

ETH_ARP = 0x0806
# How long the router may take to answer; and where that is waited for within a lease of ten seconds.
ANSWERS_S, ANSWERS_SOON_S = 3 * SLOW, 3
# Routers that answered no more, as in a bridge: they are not waited for again.
SILENT = set()
# Behind B.
FAR, FAR6 = "10.9.0.1", "fd09::1"
ROUTES = ("route add 10.9.0.0/24 via 10.2.0.2", "-6 route add fd09::/64 via fd02::2")
RULES = """table inet f {
  set banned { type ipv4_addr; }
  chain before { type filter hook prerouting priority -150; }
  chain forward { type filter hook forward priority 0; }
}
"""
NAT = """table ip n { chain post { type nat hook postrouting priority 100; oifname "tb" masquerade; }; }
table ip6 n { chain post { type nat hook postrouting priority 100; oifname "tb" masquerade; }; }
table inet f { chain forward { type filter hook forward priority 0; }; }
"""
LONG = ("--lease", "10000")


def links(*commands):
    return lambda h: [h.space.ip(*command.split()) for command in commands]


def settings(*words):
    return lambda h: h.space.run("sysctl", "-qw", *words)


def rules(text):
    return lambda h: h.rules(text)


def own_destination(h):
    """The destination becomes the host's own. Of IPv6 the kernel makes the route to an address in a work queue, after the command."""
    h.space.ip("address", "add", "10.2.0.2/32", "dev", "tb")
    h.space.ip("address", "add", "fd02::2/128", "dev", "tb", "nodad")
    until("the route to the address", lambda: "local fd02::2 " in h.space.ip("-6", "route", "show", "table", "local"))


def flows(h, size):
    """One frame of each flow."""
    payload = b"p" * size
    for to in (B, FAR):
        yield h.to_b(ETH_IP4, ipv4(A, to, UDP, transport(UDP, A, to, 1000, 2000, payload)))
    for to in (B6, FAR6):
        yield h.to_b(ETH_IP6, ipv6(A6, to, UDP, transport(UDP, A6, to, 1000, 2000, payload)))


def outcome(h, frame, seconds=ANSWERS_S):
    """What B gets when A sends it, and what A is told. Behind the frame A asks for the router's Ethernet address: with the answer the frame is through, also
    where the kernel works off its queue later."""
    h.a.drain()
    h.b.drain()
    h.a.send(frame)
    h.a.send(ethernet(b"\xff" * 6, h.a.mac, ETH_ARP, struct.pack("!HHBBH6s4s6s4s", 1, 0x800, 6, 4, 1, h.a.mac, packed(A), bytes(6), packed("10.1.0.1"))))
    heard, answers = [], []
    while not answers and (got := h.a.receive(0 if h in SILENT else seconds)):
        (answers if got[1][12:14] == struct.pack("!H", ETH_ARP) else heard).append(got)
    if not answers:
        SILENT.add(h)
    return [got for _, got in h.b.drain(is_packet)], said([got for got in heard if is_packet(got[1])])


def outcomes(h, size, seconds=ANSWERS_S):
    return [outcome(h, frame, seconds) for frame in flows(h, size)]


def warm(plain, bypassed, size, mode="tcx", is_translated=False):
    """Attaches, and has all flows taken that can be: four, and without those of IPv6 two."""
    bypassed.attach(words=(*LONG, "--mode", mode))
    for _ in range(2):
        outcomes(bypassed, size)
    before = bypassed.taken()
    assert outcomes(plain, size) == outcomes(bypassed, size)
    flows_taken = 2 if is_translated and mode == "tcx" and not translates_ipv6(bypassed) else 4
    assert bypassed.taken() == before + flows_taken, bypassed.status("ta")


EGRESS = "a chain at an interface's egress"
# What is obeyed from the next frame on: (what is said, the change, the frames' size, what is
# prepared, rules).
AT_ONCE = [
    ("forwarding off", settings("net.ipv4.ip_forward=0", "net.ipv6.conf.all.forwarding=0")),
    ("forwarding off at the input", settings("net.ipv4.conf.ta.forwarding=0", "net.ipv6.conf.ta.forwarding=0")),
    ("routes added to nowhere", links("route add blackhole 10.2.0.2/32", "-6 route add blackhole fd02::2/128")),
    ("routes added that prohibit", links("route add prohibit 10.2.0.2/32", "-6 route add prohibit fd02::2/128")),
    ("routes replaced", links("route replace unreachable 10.9.0.0/24", "-6 route replace unreachable fd09::/64 metric 1024")),
    ("routes removed", links("route del 10.9.0.0/24", "-6 route del fd09::/64")),
    ("routing rules by interface", links("rule add iif ta prohibit", "-6 rule add iif ta prohibit")),
    ("routing rules by mark", links("rule add fwmark 7 prohibit", "-6 rule add fwmark 7 prohibit"), 20, RULES + "add rule inet f before meta mark set 7"),
    ("a mark for a routing rule", lambda h: (h.space.ip("rule", "add", "fwmark", "7", "prohibit"), h.space.ip("-6", "rule", "add", "fwmark", "7", "prohibit"),
                                             h.rules("add rule inet f before meta mark set 7")), 20, RULES),
    ("a destination that is the host's own", own_destination),
    ("addresses removed", links("address del 10.2.0.1/24 dev tb", "address del fd02::1/64 dev tb")),
    ("IPv6 off", settings("net.ipv6.conf.tb.disable_ipv6=1")),
    ("an MTU", links("link set tb mtu 1300"), 1400),
    ("routes' MTUs", links("route change 10.9.0.0/24 via 10.2.0.2 mtu 1300", "-6 route change fd09::/64 via fd02::2 mtu 1300"), 1400),
    ("the input's Ethernet address", links("link set ta address 02:00:00:00:0a:99")),
    ("the output's Ethernet address", links("link set tb address 02:00:00:00:0b:99", f"neighbour replace {B} lladdr {MAC_B} dev tb nud permanent",
                                            f"neighbour replace {B6} lladdr {MAC_B} dev tb nud permanent")),
    ("IPsec policies", links("xfrm policy add dir fwd src 10.1.0.0/16 dst 0.0.0.0/0 action block", "xfrm policy add dir fwd src fd01::/64 dst ::/0 action block")),
    ("an element of a set", rules("add element inet f banned { 10.1.0.2 }"), 20, RULES + "add rule inet f forward ip saddr @banned drop"),
    ("a rule against established connections", rules("add rule inet f forward ct state { new, established } drop"), 20, NAT),
    ("no rules any more", rules("flush ruleset"), 20, NAT),
    ("no tracking any more", rules("table inet r { chain p { type filter hook prerouting priority -300; notrack; }; }"), 20, NAT),
    ("a zone of its own", rules("table inet r { chain p { type filter hook prerouting priority -300; ct zone set 3; }; }"), 20, NAT + "add rule inet f forward ct zone 3 drop"),
    ("another address to hide behind", links("address add 10.2.0.7/24 dev tb", "address del 10.2.0.1/24 dev tb", "address add 10.2.0.1/24 dev tb",
                                             f"neighbour replace {B} lladdr {MAC_B} dev tb nud permanent"), 20, NAT),
    ("a chain at an interface's ingress", rules("table netdev n { chain c { type filter hook ingress device ta priority 0; udp dport 2000 drop; }; }")),
    (EGRESS, rules("table netdev n { chain c { type filter hook egress device tb priority 0; udp dport 2000 drop; }; }")),
]


def has_egress_hook(h):
    """Whether nftables has the hook at an interface's egress: since Linux 5.16, and in older kernels that took it over."""
    text = "table netdev probe { chain c { type filter hook egress device tb priority 0; }; }"
    done = h.nft(text, "--check")
    assert done.returncode == 0 or ("not supported" in done.stderr and kernel_version() < (5, 16)), done.stderr
    return done.returncode == 0


def obeyed(name, change, size=20, prepared="", mode="tcx"):
    with twins(rules=prepared, routes=ROUTES) as (plain, bypassed):
        if name == EGRESS and not has_egress_hook(plain):
            return print("left out, since Linux before 5.16 has no such hook")
        warm(plain, bypassed, size, mode, prepared.startswith(NAT))
        before = outcomes(plain, size)
        for h in (plain, bypassed):
            change(h)
        # Two IPv4 errors each time. The kernel sends a host five at once about routes that refuse,
        # then one a second (ip_rt_error_burst, which no namespace has for itself), so what a third
        # turn would show depends on the clock.
        for turn in range(2):
            kernel, ours = outcomes(plain, size), outcomes(bypassed, size)
            # With what the kernels say of errors that they did not send, or limited; that is long, so
            # it comes first, as the runner shows the end.
            counted = [h.space.run("nstat", "-asz", "*Icmp*Out*").stdout for h in (plain, bypassed)] if kernel != ours else []
            assert kernel == ours, "\n".join([*counted, f"{name}, {mode}, frames {turn} after it:", f"kernel {kernel}", f"bypass {ours}"])
        assert kernel != before, f"{name}: changes nothing"


@timeout(600)
def test_what_changes_under_traffic_is_obeyed_from_the_next_frame_on():
    for case in AT_ONCE:
        print(case[0])
        obeyed(*case)


@timeout(600)
def test_what_changes_under_traffic_is_obeyed_by_xdp_from_the_next_frame_on():
    for case in AT_ONCE:
        print(case[0])
        obeyed(*case, mode="xdp")


def test_nexthop_objects_that_change_or_go_are_followed_at_once():
    objects = ("nexthop add id 1 via 10.2.0.2 dev tb", "nexthop add id 2 via fd02::2 dev tb", "route add 10.9.0.0/24 nhid 1", "-6 route add fd09::/64 nhid 2")
    for change in (links("nexthop del id 1", "nexthop del id 2"), links("nexthop replace id 1 blackhole", "-6 nexthop replace id 2 blackhole")):
        with twins(routes=objects) as (plain, bypassed):
            warm(plain, bypassed, 20)
            for h in (plain, bypassed):
                change(h)
            kernel = outcomes(plain, 20)
            assert kernel == outcomes(bypassed, 20)
            assert not kernel[1][0] and not kernel[3][0], kernel


# What no generation tells of, and the controller is told of by netlink.
TOLD = [
    ("an input renamed", links("link set ta name tx"), RULES + 'add rule inet f forward iifname "tx" drop'),
    ("an output renamed", links("link set tb name ty"), RULES + 'add rule inet f forward oifname "ty" drop'),
    ("an input in another group", links("link set ta group 5"), RULES + "add rule inet f forward iifgroup 5 drop"),
    ("an input put into a bridge", links("link add br0 type bridge", "link set ta master br0"), ""),
    ("strict sources", settings("net.ipv4.conf.ta.rp_filter=1"), ""),
    ("strict sources everywhere", settings("net.ipv4.conf.all.rp_filter=1"), ""),
]


def counts_of_what_was_told(name, change, prepared, routes):
    """How the frames went after a change that the controller is told of, once the bypass does what the kernel does."""
    with twins(rules=prepared, routes=routes) as (plain, bypassed):
        warm(plain, bypassed, 20)
        before = outcomes(plain, 20)
        for h in (plain, bypassed):
            change(h)
        now = lambda h: outcomes(h, 20, ANSWERS_SOON_S)  # noqa: E731
        assert now(plain) != before
        until(name, lambda: now(plain) == now(bypassed))
        return bypassed.status()["interfaces"][0]["by_reason"]


@timeout(600)
def test_what_the_keeper_is_told_of_is_obeyed_before_the_lease_ends():
    # A's way back is another, which a host that is strict about sources does not stand; a table of
    # its own has the ways there.
    odd = ("rule add iif ta lookup 7 pref 5", "route add 10.2.0.2 dev tb table 7", "route add 10.9.0.0/24 via 10.2.0.2 table 7",
           "route add 10.1.0.2/32 via 10.2.0.2 dev tb")
    for name, change, prepared in TOLD:
        if "renamed" in name and not renames_what_is_up():
            print(f"{name}: left out, since Linux before 6.2 renames no interface that is up")
            continue
        # A slow guest may take longer for it than a lease, which says nothing then.
        for _ in range(5 if SLOW > 1 else 1):
            counts = counts_of_what_was_told(name, change, prepared, (*ROUTES, *(odd if "sources" in name else ())))
            print(name, counts)
            if was_told := "up_lease" not in counts and "up_changed" in counts:
                break
        assert was_told, (name, counts)


def test_what_rules_write_into_packets_beyond_a_translation_is_not_left_out():
    """A flow whose packets a rule rewrites is not learned, and keeps being rewritten."""
    for rule in ("ip id set 5", "ip frag-off set 0", "ip6 flowlabel set 5", "tcp window set 500", "ip dscp set 10", "ip ttl set 20", "ip6 hoplimit set 20"):
        with twins(rules=RULES + f"add rule inet f forward {rule}") as (plain, bypassed):
            bypassed.attach(words=LONG)
            for _ in range(4):
                for six in (False, True):
                    a, b = (A6, B6) if six else (A, B)
                    body = transport(TCP, a, b, 1000, 2000, b"rewritten")
                    frame = bypassed.to_b(ETH_IP6 if six else ETH_IP4, (ipv6 if six else ipv4)(a, b, TCP, body))
                    kernel, ours = outcome(plain, frame), outcome(bypassed, frame)
                    assert kernel == ours and kernel[0], f"{rule}:\nkernel {kernel}\nbypass {ours}"
            status = bypassed.status("ta")
            assert status["unlearned"]["altered"] >= 4, (rule, status)
            assert status["taken"] == (0 if rule.startswith("tcp") else 3), (rule, status)


def names(h):
    return [i["name"] for i in h.status()["interfaces"]]


def test_an_interface_that_is_renamed_is_known_by_its_new_name():
    if not renames_what_is_up():
        raise Skip(f"Linux before 6.2 renames no interface that is up, and this is {os.uname().release}")
    for keeper in ((), ("--no-controller",)):
        with host() as h:
            h.attach(words=(*LONG, *keeper))
            h.space.ip("link", "set", "tb", "name", "ty")
            if not keeper:
                until("the new name", lambda h=h: names(h) == ["ta", "ty"])
            # Another one by the old name is another one.
            other = Tap(h.space, "tb", "10.3.0.1/24", mac="02:00:00:00:0c:02")
            try:
                h.attach("tb", words=keeper)
                assert names(h) == ["ta", "ty", "tb"]
                h.across(h.udp())
                before = h.taken()
                assert h.across(h.udp()) and h.taken() == before + 1
                h.cli("detach", "ty")
                assert names(h) == ["ta", "tb"]
                assert "tb is not attached" not in h.cli("detach", "tb").stderr
            finally:
                other.close()


def test_an_interface_that_moves_away_goes_without_our_programs_and_is_attached_again_when_it_is_back():
    with host() as h, Namespace() as far:
        h.attach(words=LONG)
        h.across(h.udp())
        assert h.across(h.udp()) and h.taken() == 1
        h.space.ip("link", "set", "ta", "netns", str(far))
        if has_tcx():
            until("our programs to be off it", lambda: len(list((h.folder / "run/bypass/bpf").rglob("link_*"))) == 2)
        until("it to be missed", lambda: names(h) == ["tb"])
        far.ip("link", "set", "ta", "netns", str(h.space))
        until("it to be attached again", lambda: names(h) == ["tb", "ta"])
        for words in ("address add 10.1.0.1/24 dev ta", "link set ta up"):
            h.space.ip(*words.split())

        def taken():
            assert h.across(h.udp())
            return h.taken() >= 1

        until("frames to be taken again", taken)


@timeout(120)
def test_a_neighbour_that_flaps_has_only_its_own_flows_learned_again():
    with host() as h:
        h.attach(words=("--lease", "10000", "--mode", "tcx"))
        other, other_mac = "10.2.0.9", "02:00:00:00:0b:09"
        h.space.ip("neighbour", "replace", other, "lladdr", other_mac, "dev", "tb", "nud", "permanent")
        calm = h.udp(sport=1)
        flapping = h.to_b(ETH_IP4, ipv4(A, other, UDP, transport(UDP, A, other, 2, 2, b"flap")))
        macs = ["02:00:00:00:0b:aa", other_mac]

        def move(n):
            h.space.ip("neighbour", "replace", other, "lladdr", macs[n % 2], "dev", "tb", "nud", "permanent")

        # One move is followed at once, long before the lease ends.
        assert h.across(flapping) and h.across(flapping)
        assert h.across(calm) and h.across(calm)
        move(0)
        until("the neighbour's new place", lambda: h.across(flapping)[1][:6] == bytes.fromhex(macs[0].replace(":", "")))
        before, begun = (h.status("ta")["by_reason"], h.taken()), time.monotonic()
        for n in range(1, 101):
            move(n)
            assert h.across(calm)[1][:6] == h.b.mac
        after, leases = (h.status("ta")["by_reason"], h.taken()), (time.monotonic() - begun) / 10
        assert after[0]["up_no_flow"] == before[0]["up_no_flow"], (before, after)
        # A guest may take longer for it than the flow's lease.
        asked = after[0].get("up_lease", 0) - before[0].get("up_lease", 0)
        assert after[1] + asked == before[1] + 100 and asked <= leases, (before, after, leases)
        # Its last move is followed too, at latest a second later.
        begun = time.monotonic()
        until("the neighbour's last place", lambda: h.across(flapping)[1][:6] == bytes.fromhex(macs[0].replace(":", "")))
        assert time.monotonic() - begun < 5 * SLOW
