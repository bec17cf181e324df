"""What one member of a fabric, or the fabric itself, may do to the host and to the host's other networks: nothing that was not asked for."""

import contextlib
import socket
import struct

from lib import Fabric, Namespace, need_program, need_root, scratch, timeout, until
from lib.tap import Inside

ROUTER, GATEWAY, GUEST = "10.87.0.2", "10.87.0.1", "10.87.0.9"
FORWARD, REDIRECTS = "/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv4/conf/all/accept_redirects"
FORWARD6 = "/proc/sys/net/ipv6/conf/all/forwarding"


def veth(a, b, first, second, name):
    """A pair of interfaces called `name` between two namespaces, with these addresses."""
    a.ip("link", "add", name, "type", "veth", "peer", "name", name, "netns", str(b))
    for space, address in ((a, first), (b, second)):
        space.ip("address", "add", address, "dev", name, *(["nodad"] if ":" in address else []))
        space.ip("link", "set", name, "up")


def read(space, path):
    return space.run("cat", path).stdout.strip()


def write(space, path, value):
    space.run("sh", "-c", f"echo {value} > {path}")


def packets(space, device):
    """A raw socket on an interface of a namespace."""
    with Inside(space):
        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    raw.bind((device, 0))
    return raw


def mac_of(space, device):
    return bytes.fromhex(read(space, f"/sys/class/net/{device}/address").replace(":", ""))


def checksum6(source, destination, message):
    data = source + destination + struct.pack("!II", len(message), 58) + message
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def router_advertisement(mac, before=b""):
    """A whole frame that tells all nodes to route everything through its sender, with a prefix to take addresses from; `before` are tags."""
    local = bytes([0xFE, 0x80]) + bytes(6) + bytes([mac[0] ^ 2]) + mac[1:3] + b"\xff\xfe" + mac[3:]
    everyone = socket.inet_pton(socket.AF_INET6, "ff02::1")
    prefix = struct.pack("!BBBBIII", 3, 4, 64, 0xC0, 3600, 3600, 0) + socket.inet_pton(socket.AF_INET6, "2001:db8:66::")
    options = bytes([1, 1]) + mac + prefix
    message = lambda total: struct.pack("!BBHBBHII", 134, 0, total, 64, 0, 1800, 0, 0) + options  # noqa: E731
    message = message(checksum6(local, everyone, message(0)))
    packet = struct.pack("!IHBB", 0x60000000, len(message), 58, 255) + local + everyone + message
    return bytes.fromhex("333300000001") + mac + before + b"\x86\xdd" + packet


def gratuitous_arp(mac, address):
    ip = socket.inet_aton(address)
    return b"\xff" * 6 + mac + b"\x08\x06" + struct.pack("!HHBBH", 1, 0x0800, 6, 4, 2) + mac + ip + b"\xff" * 6 + ip


def dhcp_offer(mac):
    udp = struct.pack("!HHHH", 67, 68, 8 + 240, 0) + bytes(240)
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0, socket.inet_aton(GUEST), b"\xff" * 4)
    return b"\xff" * 6 + mac + b"\x08\x00" + ip + udp


@contextlib.contextmanager
def worlds(count):
    need_root()
    need_program("nft")
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(scratch()), [stack.enter_context(Namespace()) for _ in range(count)]


def text(guest, *lines):
    return "\n".join(['name = "trust"', "[network.lan]", 'uplink = "kernel"', "[tap.guest]", 'device = "net0"', f'netns = "/run/netns/{guest}"',
                      f'ip = "{GUEST}"', *lines, ""])


@timeout(300)
def test_a_guest_changes_no_route_of_the_host():
    """The device of a guest without a guard sends what takes a host over; the switch refuses it, and the host would not take it."""
    with worlds(3) as (folder, (host, outside, guest)):
        veth(host, outside, "2001:db8::1/64", "2001:db8::2/64", "eth0")
        host.ip("-6", "route", "add", "default", "via", "2001:db8::2")
        # As a host that is no router: it takes routers' word.
        before = host.ip("-6", "route", "show", "default")
        drops = lambda fabric, reason: fabric.port("guest")["counters"]["rx_drops"].get(reason, 0)  # noqa: E731
        with Fabric(folder, text(guest), netns=host) as fabric:
            mac = mac_of(guest, "net0")
            with packets(guest, "net0") as raw:
                tags = [b"", b"\x81\x00\x00\x00", b"\x81\x00\x00\x00" * 4, struct.pack("!H", 100) + b"\xaa\xaa\x03\x00\x00\x00"]
                for before_type in tags:
                    raw.send(router_advertisement(mac, before_type))
                raw.send(dhcp_offer(mac))
                for address in (GATEWAY, ROUTER):
                    raw.send(gratuitous_arp(mac, address))
                until("all of them refused", lambda: drops(fabric, "rogue_router") >= len(tags) and drops(fabric, "rogue_dhcp") >= 1
                      and drops(fabric, "gateway_claim") >= 2, 60)
            assert host.ip("-6", "route", "show", "default") == before
            assert guest.answers(ROUTER) and guest.answers(GATEWAY)
            fabric.down()
        # A port that may advertise: the advertisement arrives, and the host does not follow it.
        with Fabric(folder, text(guest, 'allow = ["router-advertisements"]'), netns=host) as fabric:
            mac = mac_of(guest, "net0")
            frame = router_advertisement(mac)
            with packets(guest, "net0") as raw, packets(host, "tb-trust-lan") as seen:
                seen.settimeout(60)
                raw.send(frame)
                while seen.recv(2000) != frame:
                    pass
                # The kernel takes frames in order: when it has answered this one, it is done with
                # that.
                assert guest.answers(ROUTER)
            assert host.ip("-6", "route", "show", "default") == before
            assert "2001:db8:66:" not in host.ip("-6", "address", "show", "dev", "tb-trust-lan")
            assert drops(fabric, "rogue_router") == 0
            # Nor does the fabric's device in the guest's namespace, when the host is the one to
            # advertise.
            for space, device in ((host, "tb-trust-lan"), (guest, "net0")):
                for key in ("ipv6/conf/{}/accept_ra", "ipv6/conf/{}/accept_redirects", "ipv4/conf/{}/accept_redirects"):
                    assert read(space, "/proc/sys/net/" + key.format(device)) == "0", (device, key)
            fabric.down()


@timeout(300)
def test_a_kernel_uplink_makes_the_host_no_router_between_its_networks():
    """Two networks of a host that does not forward stay apart while a fabric uses both as its way out; all is as before after `down`."""
    with worlds(4) as (folder, (host, left, right, guest)):
        veth(host, left, "192.0.2.1/24", "192.0.2.9/24", "left")
        veth(host, right, "198.51.100.1/24", "198.51.100.9/24", "right")
        left.ip("route", "add", "default", "via", "192.0.2.1")
        right.ip("route", "add", "default", "via", "198.51.100.1")
        # What the owner has set by hand is to come back as it was.
        write(host, "/proc/sys/net/ipv4/conf/right/forwarding", 1)
        write(host, REDIRECTS, 0)
        settings = lambda: {path: read(host, path) for path in (FORWARD, REDIRECTS, *(  # noqa: E731
            f"/proc/sys/net/ipv4/conf/{name}/forwarding" for name in ("default", "left", "right", "lo")))}
        before = settings()
        assert before[FORWARD] == "0" and before[REDIRECTS] == "0"
        forward = ['[[forward]]', 'listen = "0.0.0.0:8080"', f'to = "{GUEST}:80"']
        with Fabric(folder, text(guest, *forward), netns=host) as fabric:
            guest.ip("route", "add", "default", "via", ROUTER)
            assert read(host, FORWARD) == "1"
            assert guest.answers("192.0.2.9") and guest.answers("198.51.100.9"), "guests go out"
            # What should not pass is tried once for an instant, after the same way was seen to work
            # for guests.
            assert not left.pings("198.51.100.9") and not right.pings("192.0.2.9"), "the host routes for strangers"
            assert not left.pings(GUEST) and not right.pings(GUEST), "guests are reached without a forward"
            assert left.answers("192.0.2.1"), "the host itself answers"
            with Inside(guest):
                server = socket.create_server((GUEST, 80))
            with server, Inside(left):
                client = socket.create_connection(("192.0.2.1", 8080), timeout=60)
                with client:
                    server.settimeout(60)
                    connection, _ = server.accept()
                    connection.sendall(b"through the forward")
                    assert client.recv(100) == b"through the forward"
                    connection.close()
            # A daemon that was killed leaves the bounds in place.
            fabric.kill()
            assert not left.pings("198.51.100.9") and not right.pings("192.0.2.9"), "after a kill"
            fabric.cli("down", "--fabric", fabric.name)
            fabric.nothing_left()
            assert settings() == before
        with Fabric(folder, text(guest), netns=host) as fabric:
            fabric.down()
        assert settings() == before


@timeout(300)
def test_a_host_that_routes_goes_on_routing():
    """Where the host forwarded before, as with Docker, its other networks are none of the fabric's business."""
    with worlds(4) as (folder, (host, left, right, guest)):
        veth(host, left, "192.0.2.1/24", "192.0.2.9/24", "left")
        veth(host, right, "198.51.100.1/24", "198.51.100.9/24", "right")
        left.ip("route", "add", "default", "via", "192.0.2.1")
        right.ip("route", "add", "default", "via", "198.51.100.1")
        write(host, FORWARD, 1)
        with Fabric(folder, text(guest), netns=host) as fabric:
            guest.ip("route", "add", "default", "via", ROUTER)
            assert left.answers("198.51.100.9") and guest.answers("198.51.100.9")
            assert not left.pings(GUEST), "a guest is reached without a forward"
            fabric.down()
        assert read(host, FORWARD) == "1" and left.answers("198.51.100.9")


@timeout(300)
def test_the_forwarding_of_a_killed_fabric_is_its_own_also_for_the_next_fabric():
    """A second fabric, started after the first one was killed, neither takes the host for a router nor leaves it one."""
    with worlds(5) as (folder, (host, left, right, guest, other)):
        veth(host, left, "192.0.2.1/24", "192.0.2.9/24", "left")
        veth(host, right, "198.51.100.1/24", "198.51.100.9/24", "right")
        left.ip("route", "add", "default", "via", "192.0.2.1")
        right.ip("route", "add", "default", "via", "198.51.100.1")
        settings = lambda: {path: read(host, path) for path in (FORWARD, REDIRECTS, FORWARD6, *(  # noqa: E731
            f"/proc/sys/net/ipv{family}/conf/{name}/forwarding" for name in ("default", "left", "right", "lo") for family in (4, 6)))}
        before = settings()
        assert before[FORWARD] == before[FORWARD6] == "0"
        second = text(other).replace('name = "trust"', 'name = "second"').replace("[network.lan]", '[network.lan]\nsubnet = "10.88.0.0/24"')
        with Fabric(folder, text(guest), netns=host) as first:
            first.kill()
            assert read(host, FORWARD) == read(host, FORWARD6) == "1"
            with Fabric(folder, second.replace(f'ip = "{GUEST}"', 'ip = "10.88.0.9"'), netns=host) as fabric:
                fabric.cli("down", "--fabric", first.name)
                assert "tombolo_trust" not in host.run("nft", "list", "tables").stdout
                other.ip("route", "add", "default", "via", "10.88.0.2")
                assert other.answers("192.0.2.9") and other.answers("198.51.100.9"), "its guest goes out"
                assert not left.pings("198.51.100.9") and not right.pings("192.0.2.9"), "the host routes for strangers"
                fabric.down()
            assert settings() == before
