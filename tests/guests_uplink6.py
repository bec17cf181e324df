"""The kernel uplink for IPv6 and forwards of both families, with stock Linux at all ends: members by taps that configure themselves,
the fabric's host, and a host of the world outside, each in a namespace of its own."""

import contextlib
import hashlib
import ipaddress
import json
import os
import re
import signal
import socket
import threading
import time

from daytwo_ipv6 import addresses, automatic, local, packet, send
from lib import Fabric, Namespace, need_program, need_root, scratch, timeout, until
from lib.frames import mac_bytes
from lib.tap import UDP, Inside, ipv6, transport

PREFIX, OTHER = "fd12:3456:789a:6::", "2001:db8:5:6::"
HOME, WORLD, FAR = "2001:db8:ff::1", "2001:db8:ff::2", "2001:db8:77::1"
# A port to which somebody sends who claims to be another.
CLAIMED = 7999
ROUTER, FIXED = f"{PREFIX}2", f"{PREFIX}66"
AUTO_MAC, SIX_MAC = "02:54:00:00:67:01", "02:54:00:00:67:02"
PORT = 7007
FILE = """
name = "{name}"
[network.lan]
subnet = "10.236.0.0/24"
uplink = "kernel"
ipv6 = "{prefix}/64"
{way}
[tap.auto]
netns = "/run/netns/{auto}"
mac = "{auto_mac}"
ip = "10.236.0.11"
accept_ra = true
[tap.six]
netns = "/run/netns/{six}"
mac = "{six_mac}"
ip = "10.236.0.12"
guard = "ip"
ip6 = "{fixed}"
{more}
"""
PAIRS = [  # proto, listener, target: the four pairs of families, and ::1
    (proto, listen, target)
    for proto in ("tcp", "udp")
    for listen, target in (("0.0.0.0:8001", "auto"), ("[::]:8002", "six"), ("0.0.0.0:8003", f"[{FIXED}]"), ("[::]:8004", "10.236.0.11"),
                           ("[::1]:8005", f"[{FIXED}]"), ("127.0.0.1:8006", f"[{FIXED}]"))
]


def forwards(pairs=PAIRS):
    return "".join(f'[[forward]]\nproto = "{proto}"\nlisten = "{listen}"\nto = "{target}:{PORT}"\n' for proto, listen, target in pairs)


class Echo:
    """Answers in a namespace at one port, over TCP and UDP of both families, with who asked and what. TCP answers after the end of the stream."""

    def __init__(self, space):
        self.sockets = []
        with Inside(space):
            for family, any_address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                    one = socket.socket(family, kind)
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if family == socket.AF_INET6:
                        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    one.bind((any_address, PORT))
                    if kind == socket.SOCK_STREAM:
                        one.listen(16)
                    self.sockets.append(one)
                    threading.Thread(target=self.streams if kind == socket.SOCK_STREAM else self.datagrams, args=(one,), daemon=True).start()

    @staticmethod
    def streams(listener):
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=Echo.stream, args=listener.accept(), daemon=True).start()

    @staticmethod
    def stream(taken, peer):
        with taken, contextlib.suppress(OSError):
            taken.settimeout(30)
            data = b"".join(iter(lambda: taken.recv(65536), b""))
            taken.sendall(peer[0].encode() + b" " + hashlib.sha256(data).digest() + data)

    @staticmethod
    def datagrams(bound):
        with contextlib.suppress(OSError):
            while True:
                data, peer = bound.recvfrom(65536)
                if peer is None:  # It was shut down.
                    return
                bound.sendto(peer[0].encode() + b" " + hashlib.sha256(data).digest() + data, peer)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one in self.sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def ask(space, proto, address, port, seconds=20):
    """Asks an Echo, with data that are compared; gives the address that it saw."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with Inside(space):
        asker = socket.socket(family, socket.SOCK_STREAM if proto == "tcp" else socket.SOCK_DGRAM)
    with asker:
        asker.settimeout(seconds)
        asker.connect((address, port))
        sent = os.urandom(300_000 if proto == "tcp" else 900)
        if proto == "tcp":
            asker.sendall(sent)
            asker.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: asker.recv(65536), b""))
        else:
            asker.send(sent)
            answer = asker.recv(65536)
    seen, _, rest = answer.partition(b" ")
    assert rest == hashlib.sha256(sent).digest() + sent, f"{len(rest)} bytes came back of {len(sent)}"
    return seen.decode()


def refused(space, proto, address, port=PORT):
    try:
        seen = ask(space, proto, address, port, seconds=2)
    except OSError:
        return True
    raise AssertionError(f"{proto} {address}:{port} was answered, as seen from {seen}")


def settled(space):
    """All that a kernel uplink changes in a namespace: rules and sysctls, by interface."""
    keys = space.run("grep", "-rHs", ".", "/proc/sys/net/ipv4/conf", "/proc/sys/net/ipv6/conf", "/proc/sys/net/ipv4/ip_forward", check=False).stdout
    return space.run("nft", "list", "ruleset").stdout, {line for line in keys.splitlines() if "stable_secret" not in line}


def way_to(home, far):
    """Joins the namespace of a host and that of the world outside, which has another address behind that."""
    home.ip("link", "add", "out", "type", "veth", "peer", "name", "eth0", "netns", str(far))
    for space, device, own, own4 in ((home, "out", HOME, "192.0.2.1"), (far, "eth0", WORLD, "192.0.2.2")):
        space.ip("address", "add", f"{own}/64", "dev", device, "nodad")
        space.ip("address", "add", f"{own4}/24", "dev", device)
        space.ip("link", "set", device, "up")
    far.ip("address", "add", f"{FAR}/128", "dev", "lo")


@contextlib.contextmanager
def world(name, way="", more=""):
    need_root()
    need_program("nft")
    with contextlib.ExitStack() as stack:
        auto, six, home, far = (stack.enter_context(Namespace()) for _ in range(4))
        way_to(home, far)
        for prefix in (PREFIX, OTHER):
            far.ip("route", "add", f"{prefix}/64", "via", HOME)
        home.ip("route", "add", "default", "via", WORLD)
        home.run("nft", "add table inet other { chain c { type filter hook forward priority 10; policy accept; counter; }; }")
        folder = stack.enter_context(scratch())
        text = lambda way, more="": FILE.format(name=name, prefix=PREFIX, way=way, more=more, auto=auto, six=six, auto_mac=AUTO_MAC,  # noqa: E731
                                                six_mac=SIX_MAC, fixed=FIXED)
        before = settled(home)
        fabric = stack.enter_context(Fabric(folder, text(way, more), netns=home))

        def configure():
            auto.ip("route", "replace", "default", "via", "10.236.0.2")
            six.ip("address", "replace", f"{FIXED}/64", "dev", "six", "nodad")
            six.ip("route", "replace", "default", "via", ROUTER)

        configure()
        stack.enter_context(Echo(auto))
        stack.enter_context(Echo(six))
        stack.enter_context(Echo(far))
        yield fabric, text, (auto, six, home, far), before


def apply(fabric, text):
    fabric.file.write_text(text)
    return fabric.cli("apply", fabric.file).stdout


def default(space):
    return space.ip("-6", "route", "show", "default")


def nothing_changed(home, before, fabric):
    rules, keys = settled(home)
    counters = re.compile(r"packets \d+ bytes \d+")
    assert counters.sub("", rules) == counters.sub("", before[0]), rules
    assert keys == before[1], keys ^ before[1]
    fabric.nothing_left()


@timeout(180)
def test_members_reach_the_world_by_each_way_and_all_is_undone():
    with world(f"ways{os.getpid()}") as (fabric, text, (auto, _, home, far), before):
        own = automatic(auto, "auto")
        until("the router's advertisement", lambda: "proto ra" in default(auto))
        mac = home.run("cat", "/sys/class/net/" + next(line.split(":")[1].strip() for line in home.ip("-o", "link").splitlines() if "tb-" in line) +
                       "/address").stdout.strip()
        assert local(mac) in default(auto), default(auto)
        assert auto.answers(FAR)
        for proto in ("tcp", "udp"):
            assert ask(auto, proto, WORLD, PORT) == HOME, "masqueraded"
            assert refused(far, proto, own), "nobody comes in without a forward"
        # The members' own addresses.
        assert "uplink6" in apply(fabric, text('uplink6 = "routed"'))
        for proto in ("tcp", "udp"):
            assert ask(auto, proto, WORLD, PORT) == own
            assert ask(far, proto, own, PORT) == WORLD
        assert far.answers(own)
        # Nobody outside is taken for a member, or for the gateway.
        with Inside(auto):
            heard = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        heard.bind(("::", CLAIMED))
        with Inside(far):
            raw = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_RAW)
        for source in (FIXED, PREFIX + "1", WORLD):
            raw.sendto(ipv6(source, own, UDP, transport(UDP, source, own, 5555, CLAIMED, source.encode())), (own, 0))
        heard.settimeout(20)
        assert heard.recv(100) == WORLD.encode()
        raw.close()
        heard.close()
        # Which the rules of the network limit.
        apply(fabric, text('uplink6 = "routed"', '[[rule]]\naction = "deny"\nfrom = "outside"\nto = "auto"\n'))
        assert refused(far, "tcp", own)
        assert ask(auto, "tcp", WORLD, PORT) == own
        # Another prefix, the same end.
        apply(fabric, text(f'uplink6 = {{ prefix = "{OTHER}/64" }}'))
        ends = int(ipaddress.IPv6Address(own)) & (1 << 64) - 1
        known = ipaddress.IPv6Address(int(ipaddress.IPv6Address(OTHER)) | ends).compressed
        for proto in ("tcp", "udp"):
            assert ask(auto, proto, WORLD, PORT) == known
            assert ask(far, proto, known, PORT) == WORLD
        # No way out: the router is withdrawn, and the host's forwarding as before.
        apply(fabric, text('uplink6 = "off"'))
        until("the withdrawal", lambda: default(auto) == "")
        assert home.run("cat", "/proc/sys/net/ipv6/conf/all/forwarding").stdout.strip() == "0"
        assert refused(auto, "tcp", FAR)
        assert ask(auto, "tcp", "192.0.2.2", PORT) == "192.0.2.1", "IPv4 goes on"
        apply(fabric, text(""))
        until("the router again", lambda: "proto ra" in default(auto))
        assert ask(auto, "tcp", FAR, PORT) == HOME
        # The host loses its own way out, and finds it again.
        home.ip("route", "del", "default", "via", WORLD)
        until("the withdrawal", lambda: default(auto) == "")
        home.ip("route", "add", "default", "via", WORLD)
        until("the router again", lambda: "proto ra" in default(auto))
        # The uplink itself goes and comes.
        gone = text("").replace('uplink = "kernel"\n', "")
        apply(fabric, gone)
        until("the withdrawal", lambda: default(auto) == "")
        nothing = settled(home)
        assert "tombolo" not in nothing[0] and nothing[1] == before[1], nothing[1] ^ before[1]
        apply(fabric, text(""))
        until("the router again", lambda: "proto ra" in default(auto))
        # A datagram may be lost while the new tap looks for duplicates of its address.
        for proto in ("tcp", "udp"):
            assert ask(auto, proto, WORLD, PORT) == HOME
        fabric.down()
        nothing_changed(home, before, fabric)


@timeout(180)
def test_a_scan_from_outside_has_few_addresses_asked_for_and_keeps_no_member_from_being_reached():
    name, way = f"scan{os.getpid()}", 'uplink6 = "routed"'
    with world(name, way) as (fabric, text, (auto, six, home, far), _):
        assert far.answers(FIXED), "it has answered, so it is known"
        with Inside(six):
            heard = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x86DD))
        heard.bind(("six", 0))
        heard.settimeout(0.2)
        with Inside(far):
            scanner = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        sent = 4000
        for n in range(sent):
            scanner.sendto(b"scan", (f"{PREFIX}7:{n + 1:x}", 9))
        asked = set()
        begun = time.monotonic()
        while time.monotonic() - begun < 4:
            with contextlib.suppress(TimeoutError):
                frame = heard.recv(2000)
                # A neighbour solicitation, and the address that it is for.
                if frame[20] == 58 and frame[54] == 135:
                    asked.add(frame[62:78])
        scanned = {target for target in asked if target[:12] == ipaddress.IPv6Address(f"{PREFIX}7:1").packed[:12]}
        assert 0 < len(scanned) < 600, f"{len(scanned)} of {sent}"
        counters = json.loads(home.run("nft", "-j", "list", "counters").stdout)["nftables"]
        dropped = [c["counter"]["packets"] for c in counters if c.get("counter", {}).get("name") == "silent_0"]
        assert len(dropped) == 1 and dropped[0] >= sent - 600, counters
        for n in range(300):
            scanner.sendto(b"scan", (f"{PREFIX}8:{n + 1:x}", 9))
        assert ask(far, "tcp", FIXED, PORT) == WORLD, "a member that is known is reached at once"
        # Made-up addresses have filled what the host remembers: members with addresses of the file
        # are known still, also after these have changed.
        more = f"{PREFIX}67"
        apply(fabric, text(way).replace(f'ip6 = "{FIXED}"', f'ip6 = ["{FIXED}", "{more}"]'))
        six.ip("address", "add", f"{more}/64", "dev", "six", "nodad")
        for address in (FIXED, more):
            home.run("nft", "flush", "set", "inet", f"tombolo_{name}", "members_lan")
            for n in range(300):
                scanner.sendto(b"scan", (f"{PREFIX}9:{n + 1:x}", 9))
            begun = time.monotonic()
            assert ask(far, "tcp", address, PORT) == WORLD
            took = time.monotonic() - begun
            # The first packet of a connection that is dropped is sent again after a second.
            assert took < 0.9, f"{address} was reached after {took:.1f} s"
        # A change of the rules makes another table, in which it is known too.
        fabric.cli("forward", "add", "[::]:8099", f"[{FIXED}]:{PORT}")
        sets = home.run("nft", "-j", "list", "sets").stdout
        assert FIXED in sets, sets
        scanner.close()
        heard.close()


@timeout(180)
def test_forwards_of_all_pairs_of_families_carry_data():
    with world(f"pairs{os.getpid()}", more=forwards()) as (fabric, text, (_, _, home, far), before):
        listed = fabric.status()["forwards"]
        assert len(listed) == len(PAIRS) and not [one for one in listed if one["fault"]], listed
        assert {one["address"] for one in listed} == {"10.236.0.11", FIXED}
        for proto in ("tcp", "udp"):
            # From outside. Between addresses of one family the member sees the peer, else the host.
            assert ask(far, proto, "192.0.2.1", 8001) == "192.0.2.2"
            assert ask(far, proto, HOME, 8002) == WORLD
            assert ask(far, proto, "192.0.2.1", 8003) == ROUTER
            assert ask(far, proto, HOME, 8004) == "10.236.0.2"
            assert refused(far, proto, HOME, 8005) and refused(far, proto, "192.0.2.1", 8006), "these listen on the host's loopback"
            # From the host itself.
            assert ask(home, proto, "127.0.0.1", 8001) == "10.236.0.2"
            assert ask(home, proto, HOME, 8002)
            for address, port, seen in (("::1", 8002, ROUTER), ("127.0.0.1", 8003, ROUTER), ("::1", 8004, "10.236.0.2"),
                                        ("::1", 8005, ROUTER), ("127.0.0.1", 8006, ROUTER)):
                assert ask(home, proto, address, port) == seen, (proto, address, port)
        # One goes, another comes, and the rest goes on, with the connections through it.
        with Inside(home):
            kept = socket.create_connection(("::1", 8004), 20)
        with kept:
            kept.sendall(b"abc")
            changed = [pair for pair in PAIRS if pair[1] != "0.0.0.0:8003"] + [("tcp", "[::]:8009", "auto")]
            said = apply(fabric, text("", forwards(changed)))
            assert "forward tcp 0.0.0.0:8003" in said and "forward tcp [::]:8009" in said, said
            assert refused(far, "tcp", "192.0.2.1", 8003)
            assert ask(far, "tcp", HOME, 8009) == "10.236.0.2"
            kept.shutdown(socket.SHUT_WR)
            kept.settimeout(20)
            assert b"".join(iter(lambda: kept.recv(4096), b"")).endswith(b"abc")
        # Another program has the port: told, and served as soon as it is free.
        with Inside(home):
            rival = socket.create_server(("127.0.0.1", 8010))
        with rival:
            apply(fabric, text("", forwards([("tcp", "0.0.0.0:8010", f"[{FIXED}]")])))
            [one] = fabric.status()["forwards"]
            assert "in use" in one["fault"], one
        until("the listener", lambda: not fabric.status()["forwards"][0]["fault"])
        assert ask(home, "tcp", "127.0.0.1", 8010) == ROUTER
        fabric.down()
        nothing_changed(home, before, fabric)


@timeout(180)
def test_the_hosts_own_router_outlives_forwarding_and_a_kill_leaves_nothing():
    name = f"kills{os.getpid()}"
    with world(name, more=forwards()) as (fabric, _, (auto, _, home, far), before):
        fabric.down()
        # The host learns its default route from a router outside, as many do; forwarding alone
        # would drop it (accept_ra).
        home.ip("route", "del", "default", "via", WORLD)
        far_mac = far.run("cat", "/sys/class/net/eth0/address").stdout.strip()
        advert = bytes([134, 0, 0, 0, 64, 0, 7, 8]) + bytes(8) + b"\x01\x01" + mac_bytes(far_mac)

        def advertised():
            send(far, "eth0", [packet(far_mac, local(far_mac), "ff02::1", 58, advert, 2)])
            return "proto ra" in default(home)

        until("the host's own default route", advertised)
        before = settled(home)
        assert "/proc/sys/net/ipv6/conf/out/accept_ra:1" in before[1]
        fabric.start()
        assert "proto ra" in default(home), "it was not dropped"
        assert home.run("cat", "/proc/sys/net/ipv6/conf/out/accept_ra").stdout.strip() == "2"
        home.ip("-6", "route", "flush", "proto", "ra")
        until("a default route, learned while forwarding", advertised)
        automatic(auto, "auto")
        until("the router's advertisement", lambda: "proto ra" in default(auto))
        assert ask(auto, "tcp", FAR, PORT) == HOME
        fabric.kill()
        assert f"tombolo_{name}" in home.run("nft", "list", "tables").stdout
        fabric.start()
        automatic(auto, "auto")
        until("the router's advertisement", lambda: "proto ra" in default(auto))
        assert ask(auto, "tcp", FAR, PORT) == HOME
        fabric.kill()
        fabric.cli("down", "--fabric", name)
        assert "proto ra" in default(home)
        nothing_changed(home, before, fabric)


@timeout(180)
def test_any_other_fabric_undoes_the_forwarding_that_a_killed_one_left():
    def forwarding():
        keys = ("ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv6/conf/out/accept_ra")
        return tuple(home.run("cat", f"/proc/sys/net/{key}").stdout.strip() for key in keys)

    def tables():
        return [line.split()[-1] for line in home.run("nft", "list", "tables").stdout.splitlines() if "tombolo" in line]

    dead, plain, four = (f"{word}{os.getpid()}" for word in ("dead", "plain", "four"))
    with world(dead) as (fabric, _, (_, _, home, _), before), scratch() as folder:
        def other(name, more=""):
            """Another fabric of the same user in the same namespace."""
            file = folder / f"{name}.toml"
            file.write_text(f'name = "{name}"\n[network.lan]\nsubnet = "10.237.0.0/24"\n{more}')
            return file

        fabric.down()
        off, on = forwarding(), ("1", "1", "2")
        assert off == ("0", "0", "1") and tables() == [], (off, tables())
        fabric.start()
        assert forwarding() == on
        # One that runs is not touched.
        fabric.cli("up", "-d", other(plain))
        fabric.cli("down", "--fabric", plain)
        assert forwarding() == on
        # One that needs IPv4 alone: IPv6 ends with the next that looks, IPv4 with it.
        fabric.cli("up", "-d", other(four, 'uplink = "kernel"\nipv6 = "off"\n'))
        fabric.kill()
        assert forwarding() == on and len(tables()) == 2
        fabric.cli("up", "-d", other(plain))
        assert forwarding() == ("1", *off[1:])
        fabric.cli("down", "--fabric", four)
        assert forwarding() == off and tables() == [], (forwarding(), tables())
        # Once more, with no other fabric that has an uplink.
        fabric.start()
        assert forwarding() == on and tables() == [f"tombolo_{dead}"]
        fabric.kill()
        fabric.cli("down", "--fabric", plain)
        assert forwarding() == off and tables() == []
        # One that was left to the next daemon goes the same way, and is not called one that was
        # killed.
        fabric.start()
        fabric.process.signal(signal.SIGUSR2)
        assert fabric.process.wait() == 0 and forwarding() == on
        fabric.cli("up", "-d", other(plain))
        assert forwarding() == off and tables() == []
        said = fabric.cli("events", "--fabric", plain).stdout
        assert f"nftables table tombolo_{dead}: removed" in said and "its daemon left it to the next one" in said, said
        fabric.cli("down", "--fabric", plain)
        # The fabric comes again as it was.
        fabric.start()
        assert forwarding() == on and tables() == [f"tombolo_{dead}"]
        fabric.down()
        nothing_changed(home, before, fabric)


STOPPED = """
name = "{name}"
[network.lan]
subnet = "10.236.0.0/24"
uplink = "kernel"
[vm.web]
boot = true
accel = "tcg"
memory = "64M"
ip = "10.236.0.20"
[[forward]]
listen = "0.0.0.0:8001"
to = "web:80"
[[forward]]
listen = "[::]:8002"
to = "web:80"
"""


@timeout(180)
def test_forwards_of_a_machine_that_is_stopped_are_out_of_force_until_it_runs():
    need_root()
    need_program("nft")
    need_program("qemu-system-x86_64")
    with Namespace() as home, scratch() as folder:
        def in_force():
            rules = home.run("nft", "list", "ruleset").stdout
            listeners = home.run("ss", "-Hltn").stdout
            return "dport 8001" in rules, ":8002" in listeners

        def faults():
            return [one["fault"] for one in fabric.status()["forwards"]]

        with Fabric(folder, STOPPED.format(name=f"stopped{os.getpid()}"), netns=home) as fabric:
            until("its forwards", lambda: in_force() == (True, True))
            for _ in range(2):
                assert faults() == [None, None], faults()
                fabric.cli("cell", "stop", "web")
                assert in_force() == (False, False)
                assert faults() == ["web does not run: connections are refused until it does"] * 2, faults()
                assert fabric.cli("forward", "ls").stdout.count("does not work: web does not run") == 2
                # Other changes do not bring them back.
                fabric.cli("apply", fabric.file, check=False)
                assert in_force() == (False, False) or fabric.machine("web")["pid"]
                fabric.cli("cell", "run", "web", check=False)
                assert in_force() == (True, True)
            # It dies by itself.
            os.kill(fabric.machine("web")["pid"], 9)
            until("no forwards", lambda: in_force() == (False, False))
            fabric.down()


@timeout(120)
def test_a_daemon_that_takes_over_goes_on_with_ipv6():
    with world(f"over{os.getpid()}", more=forwards()) as (fabric, _, (auto, _, home, far), before):
        automatic(auto, "auto")
        until("the router's advertisement", lambda: "proto ra" in default(auto))
        fabric.replace()
        assert ask(auto, "tcp", FAR, PORT) == HOME
        assert addresses(auto, "auto"), "the prefix was not withdrawn"
        assert ask(far, "tcp", HOME, 8002) == WORLD
        until("the relay's listeners", lambda: not [one for one in fabric.status()["forwards"] if one["fault"]])
        assert ask(far, "udp", "192.0.2.1", 8003) == ROUTER
        fabric.down()
        nothing_changed(home, before, fabric)
