"""Cells with several network devices, and with addresses by router advertisement: each network reaches the cell, and an idle cell sleeps."""

import contextlib
import ctypes
import ipaddress
import os
import random
import re
import socket
import struct
import sys
import threading

from lib import CellGuest, Fabric, Namespace, Net, Process, http_get, need_root, scratch, timeout, until
from lib.http import socket_in

PATIENCE_S = 60
CELL = {"lan": "10.234.0.20", "ops": "10.235.0.20"}
MACS = {"lan": "02:00:00:00:34:20", "ops": "02:00:00:00:35:20"}
TAPS = {"lan": "10.234.0.9", "ops": "10.235.0.9"}
FILE = """
name = "{name}"
[network.lan]
subnet = "10.234.0.0/24"
[network.ops]
subnet = "10.235.0.0/24"
[cell.both]
app = "{app}"
machine = "{machine}"
attach = "{attach}"
accel = "tcg"
network = {networks}
ip = {ips}
mac = {macs}
args = "verbose"
[tap.lan]
network = "lan"
netns = "/run/netns/{lan}"
ip = "10.234.0.9"
[tap.ops]
network = "ops"
netns = "/run/netns/{ops}"
ip = "10.235.0.9"
"""


@contextlib.contextmanager
def cell_on_both(app, machine="microvm", attach="vhost-user", order=("lan", "ops")):
    """A fabric of two networks, a namespace at each, and a cell on both, whose first network is the first of `order`."""
    need_root()
    with Namespace() as home, Namespace() as lan, Namespace() as ops, scratch() as folder:
        listed = {key: [values[network] for network in order] for key, values in (("ips", CELL), ("macs", MACS))}
        text = FILE.format(name=f"n{os.getpid()}", app=app, machine=machine, attach=attach, networks=list(order), lan=lan, ops=ops, **listed)
        with Fabric(folder, text.replace("'", '"'), netns=home) as fabric:
            yield fabric, {"lan": lan, "ops": ops}
            fabric.down()


def counters(page):
    return {name: int(value) for name, value in re.findall(r"<td>(\w+)</td><td>(\d+)</td>", page)}


def page(host, netns, family=socket.AF_INET):
    """The page of the cell, over IPv4 or IPv6."""
    with socket_in(netns, family) as connection:
        connection.settimeout(30)
        connection.connect((host, 80))
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        got = b""
        while part := connection.recv(65536):
            got += part
    assert got.startswith(b"HTTP/1.1 200"), got[:80]
    return got.decode()


def serves_both(machine, attach, order):
    with cell_on_both("httpd", machine, attach, order) as (fabric, spaces):
        for network, space in spaces.items():
            until(f"a ping from {network}", lambda space=space, network=network: space.pings(CELL[network]), PATIENCE_S)
        for network, space in spaces.items():
            got = http_get(CELL[network], "/bytes/300000", netns=space.name)
            assert got.status == 200 and got.body == (bytes(range(251)) * 1200)[:300000]
            # Its addresses, device by device: the first is of the first network of the file.
            addresses = re.findall(r"10\.\d+\.0\.20", page(CELL[network], space.name))
            assert addresses == [CELL[name] for name in order], addresses
            # From one network the cell's address of the other is not reached: a cell is no router.
            other = next(name for name in spaces if name != network)
            assert not space.pings(CELL[other]), other
        ports = [port for port in fabric.status()["ports"] if port["name"].startswith("both")]
        assert len(ports) == 2 and all(port["up"] for port in ports), ports
        if machine == "q35" and attach == "vhost-user":
            return  # QEMU 7.2 gives such a device no interrupts, so the cell looks at it every millisecond
        # Idle, it sleeps: the requests for the page itself are a few dozens of turns.
        before = counters(page(CELL["lan"], spaces["lan"].name))
        threading.Event().wait(3)  # the span that is measured, not a wait for anything
        after = counters(page(CELL["lan"], spaces["lan"].name))
        assert after["sleeps"] - before["sleeps"] < 100, (before, after)


@timeout(300)
def test_a_cell_on_two_networks_is_reached_from_both_over_virtio_mmio():
    serves_both("microvm", "vhost-user", ("lan", "ops"))


@timeout(300)
def test_the_first_network_of_the_file_is_the_first_device():
    serves_both("q35", "vhost-user", ("ops", "lan"))


@timeout(300)
def test_a_cell_on_two_networks_is_reached_from_both_over_shared_memory():
    serves_both("q35", "ivshmem", ("ops", "lan"))


@timeout(300)
def test_a_datagram_is_answered_on_the_network_that_it_came_from():
    with cell_on_both("echo") as (_, spaces):
        for network, space in spaces.items():
            until(f"a ping from {network}", lambda space=space, network=network: space.pings(CELL[network]), PATIENCE_S)
        sockets = {name: socket_in(space.name, socket.AF_INET, socket.SOCK_DGRAM) for name, space in spaces.items()}
        with contextlib.ExitStack() as stack:
            for connection in sockets.values():
                stack.enter_context(connection).settimeout(20)
            # Both wait at the cell at the same time, and each gets its own.
            for number in range(20):
                for name, connection in sockets.items():
                    connection.sendto(f"{name} {number}".encode(), (CELL[name], 7))
                for name, connection in sockets.items():
                    assert connection.recvfrom(100) == (f"{name} {number}".encode(), (CELL[name], 7))


@timeout(300)
def test_answers_to_far_hosts_leave_by_the_router_of_the_network_they_came_from():
    """Both devices have a router. Of an answer that took the first one's instead, the strict reverse path check loses every packet."""
    with Namespace() as space:
        for number in (1, 2):
            space.tap(f"tap{number}", f"10.8{number}.0.1/24")
        space.ip("address", "add", "203.0.113.9/32", "dev", "lo")
        for name in ("all", "tap1", "tap2"):
            space.run("sysctl", "-qw", f"net.ipv4.conf.{name}.rp_filter=1", f"net.ipv4.conf.{name}.arp_announce=2")
        macs = ["02:00:00:00:81:0a", "02:00:00:00:82:0a"]
        nets = [Net.tap(f"tap{number}").with_mac(macs[number - 1]) for number in (1, 2)]
        line = f"macs={','.join(macs)} ip=10.81.0.10/24 gw=10.81.0.1 ip.1=10.82.0.10/24 gw.1=10.82.0.1"
        with CellGuest("httpd", nets=nets, append=line, netns=space) as guest:
            guest.wait_line(lambda line: "net up 10.82.0.10/24" in line and "device 1" in line)
            for number in (1, 2):
                with socket_in(space.name) as connection:
                    connection.settimeout(20)
                    connection.bind(("203.0.113.9", 0))
                    connection.connect((f"10.8{number}.0.10", 80))
                    connection.sendall(b"GET /bytes/20000 HTTP/1.0\r\n\r\n")
                    got = 0
                    while part := connection.recv(65536):
                        got += len(part)
                    assert got > 20000, got
            guest.kill()


# A router of one interface: answers each solicitation, as RFC 4861 has it, with the options that
# its arguments give. For each line of its input it sends an advertisement to all nodes: "LIFETIME
# VALID [MTU]"; without an MTU it has no such option.
ROUTER = """
import select, socket, struct, sys
name, prefix, server = sys.argv[1:4]
values = [int(word) for word in sys.argv[4:]]
raw = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
index = socket.if_nametoindex(name)
watch = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x86dd))
watch.bind((name, 0))
raw.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
raw.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)

def advertise(lifetime, valid, mtu=0):
    packed = lambda address: socket.inet_pton(socket.AF_INET6, address)
    message = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, lifetime, 0, 0)
    message += struct.pack("!BBBBIII", 3, 4, 64, 0xc0, valid, valid, 0) + packed(prefix)
    message += struct.pack("!BBHI", 25, 3, 0, 600) + packed(server)
    if mtu:
        message += struct.pack("!BBHI", 5, 1, 0, mtu)
    source = packed("fe80::1") + struct.pack("@I", index)
    raw.sendmsg([message], [(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, source)], 0, ("ff02::1", 0, 0, index))

print("routing", flush=True)
while True:
    for ready in select.select([watch, sys.stdin], [], [])[0]:
        if ready is watch:
            frame, (_, _, kind, *_) = watch.recvfrom(2000)
            if kind != socket.PACKET_OUTGOING and frame[20] == 58 and frame[54] == 133:
                print("solicited", flush=True)
                advertise(*values)
        else:
            line = sys.stdin.readline()
            if not line:
                sys.exit(0)
            advertise(*[int(word) for word in line.split()])
            print("advertised", line, end="", flush=True)
"""
MAC6 = "02:00:00:00:86:0a"
PREFIX, SERVER6 = "fd86::", "fd86::53"
SLAAC = "fd86::ff:fe00:860a"


def pings6(space, address, count=1):
    """Whether one of so many echo requests is answered within a second."""
    return space.run("ping", "-6", "-q", "-n", "-c", count, "-i", "0.3", "-W", "1", address, check=False).returncode == 0


@contextlib.contextmanager
def cell_and_router(app, line, lifetime=1800, valid=7200, mtu=0):
    with Namespace() as space:
        space.tap("tap0")
        # As a router, the kernel listens to the group of all routers, and solicits none.
        space.run("sysctl", "-qw", "net.ipv6.conf.tap0.accept_dad=0", "net.ipv6.conf.all.forwarding=1")
        for address in ("fd86::1/64", "fe80::1/64"):
            space.ip("address", "add", address, "dev", "tap0", "nodad")
        words = [sys.executable, "-c", ROUTER, "tap0", PREFIX, SERVER6, str(lifetime), str(valid), str(mtu)]
        router = Process(words, name="router", netns=space, stdin=True)
        try:
            router.wait_line(lambda line: "routing" in line, 60)
            with CellGuest(app, net=Net.tap("tap0").with_mac(MAC6), append=line, netns=space) as guest:
                yield space, router, guest
                guest.kill()
        finally:
            router.kill()


@timeout(300)
def test_a_cell_takes_its_address_from_a_router_and_sleeps():
    with cell_and_router("httpd", "ip=none") as (space, router, guest):
        guest.wait_line(lambda line: f"{SLAAC}/64 by router advertisement" in line, PATIENCE_S)
        until("an echo", lambda: pings6(space, SLAAC), PATIENCE_S)
        text = page(SLAAC, space.name, socket.AF_INET6)
        assert f"{SLAAC}/64" in text
        # From beyond the network its answers go through the router.
        space.ip("address", "add", "2001:db8::9/128", "dev", "lo", "nodad")
        with socket_in(space.name, socket.AF_INET6) as far:
            far.settimeout(30)
            far.bind(("2001:db8::9", 0))
            far.connect((SLAAC, 80))
            far.sendall(b"GET /bytes/20000 HTTP/1.0\r\n\r\n")
            got = 0
            while part := far.recv(65536):
                got += len(part)
            assert got > 20000
        # Idle, it does nothing: a look every 10 ms would be 400 in the span.
        before = counters(page(SLAAC, space.name, socket.AF_INET6))
        threading.Event().wait(4)  # the span that is measured, not a wait for anything
        after = counters(page(SLAAC, space.name, socket.AF_INET6))
        assert after["sleeps"] - before["sleeps"] < 60, (before, after)
        # One answer was enough.
        solicited = sum("solicited" in line for _, line in router.lines)
        assert solicited <= 3, router.tail()


def segments(space, family, address):
    """The largest segment that a cell says it takes, and the largest IPv6 packet of its answer that came."""
    with socket_in(space.name, socket.AF_PACKET, socket.SOCK_RAW) as watch, socket_in(space.name, family) as client:
        watch.bind(("tap0", 0x86DD))
        client.settimeout(30)
        client.connect((address, 80))
        takes = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        client.sendall(b"GET /bytes/20000 HTTP/1.0\r\n\r\n")
        got = 0
        while part := client.recv(65536):
            got += len(part)
        assert got > 20000
        watch.setblocking(False)
        largest = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                frame, (_, _, kind, *_) = watch.recvfrom(65536)
                if kind != socket.PACKET_OUTGOING:
                    largest = max(largest, len(frame) - 14)
        return takes, largest


@timeout(300)
def test_a_cell_sends_no_larger_packets_than_a_router_says():
    # The device has an MTU of 1500: QEMU tells none.
    with cell_and_router("httpd", "ip=10.86.0.10/24", mtu=1300) as (space, router, guest):
        space.ip("address", "add", "10.86.0.1/24", "dev", "tap0")
        guest.wait_line(lambda line: "MTU 1300 by router advertisement" in line, PATIENCE_S)
        guest.wait_line(lambda line: f"{SLAAC}/64 by router advertisement" in line, PATIENCE_S)
        until("an echo", lambda: pings6(space, SLAAC), PATIENCE_S)
        assert segments(space, socket.AF_INET6, SLAAC) == (1240, 1300)
        assert segments(space, socket.AF_INET, "10.86.0.10")[0] == 1260
        # What no link of IPv6 has is ignored, and the device's own is the most. Addresses and
        # routes stay.
        router.send("1800 7200 900\n")
        router.wait_line(lambda line: "advertised 1800 7200 900" in line, PATIENCE_S)
        router.send("1800 7200 1280\n")
        guest.wait_line(lambda line: "MTU 1280 by router advertisement" in line, PATIENCE_S)
        assert segments(space, socket.AF_INET6, SLAAC) == (1220, 1280)
        router.send("1800 7200 9000\n")
        guest.wait_line(lambda line: "MTU 1500 by router advertisement" in line, PATIENCE_S)
        assert segments(space, socket.AF_INET6, SLAAC) == (1440, 1500)
        assert not [line for _, line in guest.lines if "MTU 900" in line]


@timeout(300)
def test_addresses_and_routes_end_with_their_lifetimes():
    with cell_and_router("httpd", "ip=10.86.0.10/24", valid=10) as (space, router, guest):
        space.ip("address", "add", "10.86.0.1/24", "dev", "tap0")
        guest.wait_line(lambda line: f"{SLAAC}/64 by router advertisement" in line, PATIENCE_S)
        until("the address", lambda: pings6(space, SLAAC), PATIENCE_S)
        # Nothing but the end of its life takes the address.
        until("the end of the address", lambda: SLAAC not in page("10.86.0.10", space.name), PATIENCE_S)
        # Announced again, it is there again.
        router.send("1800 7200\n")
        until("the address again", lambda: SLAAC in page("10.86.0.10", space.name), PATIENCE_S)
        until("an echo of it", lambda: pings6(space, SLAAC), PATIENCE_S)


def hostile_adverts(rng_bytes):
    """Advertisements that RFC 4861 calls invalid, or that ask for what a cell does not do."""
    head = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0)
    prefix = lambda bits, flags, valid, preferred, address: struct.pack("!BBBBIII", 3, 4, bits, flags, valid, preferred, 0) \
        + ipaddress.IPv6Address(address).packed
    yield head + b"\x03\x00" + bytes(30)
    yield head + b"\x03\xff" + bytes(30)
    yield head[:10]
    yield head + prefix(63, 0xc0, 60, 60, "fd99::")
    yield head + prefix(64, 0xc0, 60, 61, "fd99::")
    yield head + prefix(64, 0xc0, 60, 60, "fe80::")
    yield head + prefix(64, 0xc0, 60, 60, "ff02::")
    for number in range(40):
        yield head + prefix(64, 0xc0, 60, 60, f"fd{number:02x}:99::")
    for number in range(40):
        yield head + rng_bytes[number * 32:number * 32 + 32]


@timeout(300)
def test_a_cell_survives_routers_that_say_nonsense():
    seed = int(os.environ.get("TOMBOLO_SEED") or random.randrange(1 << 32))
    print(f"seed {seed}")
    noise = random.Random(seed).randbytes(40 * 32)
    with cell_and_router("httpd", "ip=none") as (space, _, guest):
        guest.wait_line(lambda line: f"{SLAAC}/64 by router advertisement" in line, PATIENCE_S)
        with RawIcmp6(space) as raw:
            for message in hostile_adverts(noise):
                with contextlib.suppress(OSError):
                    raw.send(message)
        text = page(SLAAC, space.name, socket.AF_INET6)
        # The first prefix, and no more than there is room for.
        assert f"{SLAAC}/64" in text and len(re.findall(r"fd[0-9a-f]{2}:", text)) <= 3, text
        assert guest.alive()


class RawIcmp6:
    """A raw socket for ICMPv6 in a namespace, sending at tap0 with hop limit 255."""

    def __init__(self, space):
        self.space = space

    def __enter__(self):
        libc = ctypes.CDLL(None, use_errno=True)
        home, there = os.open("/proc/thread-self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{self.space.name}", os.O_RDONLY)
        assert libc.setns(there, 0x40000000) == 0
        try:
            self.socket = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
            self.index = socket.if_nametoindex("tap0")
        finally:
            assert libc.setns(home, 0x40000000) == 0
            os.close(home), os.close(there)
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        return self

    def send(self, message):
        source = ipaddress.IPv6Address("fe80::1").packed + struct.pack("@I", self.index)
        self.socket.sendmsg([message], [(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, source)], 0, ("ff02::1", 0, 0, self.index))

    def __exit__(self, *_):
        self.socket.close()


@timeout(300)
def test_a_cell_pings_a_host_by_its_ipv6_address():
    with cell_and_router("ping", "ip=none host=fd86::1 count=5") as (_, _, guest):
        # The first requests may come before its address is there: of the link alone it answers
        # those too.
        line = guest.wait_line(lambda line: "ping fd86::1" in line, PATIENCE_S)[1]
        assert int(re.search(r"(\d+) received", line)[1]) >= 1, line
