"""Networks across machines (`kind = "vxlan"`). A machine is a network namespace. The other end is the kernel's vxlan device or a second fabric."""

import contextlib
import hashlib
import subprocess
import time

from lib import Namespace, need_program, need_root, scratch, timeout, until
from lib.fabric import PROGRAM, Fabric
from lib.machine import SLOW
from lib.netns import inside

VNI = 42
UNDERLAYS = {4: ("192.0.2.1", "192.0.2.2", 24, 50), 6: ("2001:db8::1", "2001:db8::2", 64, 70)}
STRANGER = "192.0.2.3"
# Each fabric has one of its own, for its own members.
GATEWAYS = {"one": "10.87.0.1", "two": "10.87.0.2"}
OURS, THEIRS = "10.87.0.9", "10.87.0.50"
BULK_BYTES = 8_000_000
RECEIVER = """
import hashlib, socket, sys
server = socket.create_server((sys.argv[1], 9000))
print("listens", flush=True)
peer, _ = server.accept()
digest = hashlib.sha256()
while data := peer.recv(1 << 16):
    digest.update(data)
print(digest.hexdigest(), flush=True)
"""
SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], 9000), timeout=60) as peer:
    peer.sendall(bytes(range(250)) * (int(sys.argv[2]) // 250))
"""
# Numbered datagrams: some one by one, some by UDP_SEGMENT (103). The receiver is an ordinary one,
# which gets each by itself.
DATAGRAMS = 2000
COUNTER = """
import socket, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.setsockopt(socket.SOL_SOCKET, 33, 16 << 20)  # SO_RCVBUFFORCE
    s.bind((sys.argv[1], 9001))
    print("listens", flush=True)
    s.settimeout(20)
    got, wrong, out_of_order, last = 0, 0, 0, -1
    while (data := s.recv(65535)) != b"end":
        number = int.from_bytes(data[:4], "big")
        wrong += data != number.to_bytes(4, "big") * 75
        out_of_order += number <= last
        got, last = got + 1, number
    print(got, wrong, out_of_order, flush=True)
"""
BURSTS = """
import socket, sys, time
count, segment = int(sys.argv[2]), int(sys.argv[3])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    s.connect((sys.argv[1], 9001))
    datagrams = [n.to_bytes(4, "big") * 75 for n in range(count)]
    if segment:
        s.setsockopt(socket.IPPROTO_UDP, 103, 300)
    for at in range(0, count, 40):
        burst = datagrams[at:at + 40]
        for data in [b"".join(burst)] if segment else burst:
            s.send(data)
        time.sleep(0.002)
    time.sleep(0.5)
    for _ in range(3):
        s.send(b"end")
"""
DATAGRAM = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.bind((sys.argv[1], 0))
    s.sendto(bytes.fromhex(sys.argv[3]), (sys.argv[2], 4789))
"""


@contextlib.contextmanager
def cable(path_mtu=1500, version=4):
    """Two machines, with an interface each; the kernel fills in all checksums, since no network card does here."""
    need_root()
    need_program("ethtool")
    ours, theirs, prefix, _ = UNDERLAYS[version]
    with Namespace() as a, Namespace() as b:
        a.ip("link", "add", "eth0", "mtu", str(path_mtu), "type", "veth", "peer", "name", "eth0", "mtu", str(path_mtu), "netns", str(b))
        for space, addresses in ((a, (ours,)), (b, (theirs, STRANGER) if version == 4 else (theirs,))):
            space.run("ethtool", "-K", "eth0", "tx", "off")
            for address in addresses:
                space.ip("address", "add", f"{address}/{prefix}", "dev", "eth0", *(("nodad",) if version == 6 else ()))
            space.ip("link", "set", "eth0", "up")
        until("the cable", lambda: a.answers(theirs))
        yield a, b


def kernel_end(space, mtu, version=4):
    ours, theirs, _, _ = UNDERLAYS[version]
    space.ip("link", "add", "vx0", "mtu", str(mtu), "type", "vxlan", "id", str(VNI), "dstport", "4789", "local", theirs, "remote", ours)
    space.ip("address", "add", f"{THEIRS}/24", "dev", "vx0")
    space.ip("link", "set", "vx0", "up")


def text(name, mtu, address, local, remote):
    return f"""name = "{name}"
[network.lan]
subnet = "10.87.0.0/24"
gateway = "{GATEWAYS[name]}"
mtu = {mtu}
[tap.host]
ip = "{address}"
[port.span]
kind = "vxlan"
vni = {VNI}
local = "{local}"
remotes = ["{remote}"]
"""


def bulk(sender, receiver, address):
    """Sends over TCP and compares what came."""
    command = [*inside(receiver, own_mounts=False), "python3", "-c", RECEIVER, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout.readline() == "listens\n"
            begin = time.monotonic()
            sender.run("python3", "-c", SENDER, address, str(BULK_BYTES), seconds=90 * SLOW)
            digest = server.stdout.readline().strip()
            print(f"{BULK_BYTES / 1e6:.0f} MB in {time.monotonic() - begin:.2f} s")
        finally:
            server.kill()
    assert digest == hashlib.sha256(bytes(range(250)) * (BULK_BYTES // 250)).hexdigest()


def talk(a, b, mtu):
    until("an answer through the tunnel", lambda: a.answers(THEIRS))
    for space, address in ((a, THEIRS), (b, OURS)):
        for size in (0, mtu - 28):
            space.run("ping", "-q", "-M", "do", "-c", "3", "-i", "0.2", "-W", "10", "-s", str(size), address)
    bulk(a, b, THEIRS)
    bulk(b, a, OURS)


def drops(fabric):
    return fabric.port("span")["counters"]["rx_drops"]


@timeout(300)
def test_the_kernels_vxlan_device_is_the_other_end():
    for version, path in ((4, 1500), (6, 1500), (4, 9000), (4, 1330)):
        ours, theirs, _, overhead = UNDERLAYS[version]
        mtu = path - overhead
        print(f"IPv{version}, {path} bytes")
        with cable(path, version) as (a, b), scratch() as folder:
            kernel_end(b, mtu, version)
            with Fabric(folder, text("one", mtu, OURS, ours, theirs), netns=a) as fabric:
                talk(a, b, mtu)
                details = fabric.port("span")["details"]
                assert details["vni"] == VNI and details["interface"] == "eth0", details
                fabric.cli("down")
                fabric.nothing_left()


def bursts(sender, receiver, address, segment):
    """Sends numbered datagrams; returns how many came, and how many of them were wrong or out of order."""
    command = [*inside(receiver, own_mounts=False), "python3", "-c", COUNTER, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout.readline() == "listens\n"
            sender.run("python3", "-c", BURSTS, address, str(DATAGRAMS), str(int(segment)), seconds=60 * SLOW)
            got, *bad = map(int, server.stdout.readline().split())
        finally:
            server.kill()
    print(f"{got} of {DATAGRAMS} datagrams, by UDP_SEGMENT: {segment}")
    return got, bad


@timeout(240)
def test_the_kernels_own_device_joins_a_network_in_place_of_a_tunnel():
    mtu = 1450
    with cable() as (a, b), scratch() as folder:
        ours, theirs, _, _ = UNDERLAYS[4]
        kernel_end(b, mtu)
        a.ip("link", "add", "vx0", "mtu", str(mtu), "type", "vxlan", "id", str(VNI), "dstport", "4789", "local", ours, "remote", theirs)
        a.ip("link", "set", "vx0", "up")
        file = f'name = "one"\n[network.lan]\nsubnet = "10.87.0.0/24"\nmtu = {mtu}\nuplink = {{ bridge = "vx0" }}\n[tap.host]\nip = "{OURS}"\n'
        with Fabric(folder, file, netns=a, own_mounts=False):
            talk(a, b, mtu)


@timeout(200)
def test_segments_are_merged_for_a_tap_and_arrive_as_they_were_sent():
    """Between two fabrics, and from the kernel's device."""
    ours, theirs, _, overhead = UNDERLAYS[4]
    mtu = 1500 - overhead

    def check(fabric, sender, receiver, address):
        merged = lambda: fabric.port("host")["counters"]["software_merged"]  # noqa: E731
        before = merged()
        bulk(sender, receiver, address)
        # A small part of the 5,700 segments: the test does not say how fast the two machines are.
        assert merged() - before > 50, (before, merged())
        for segment in (False, True):
            before = merged()
            got, bad = bursts(sender, receiver, address, segment)
            assert bad == [0, 0], bad
            # Nothing here holds a sender up, so a busy machine may lose some.
            assert got > DATAGRAMS / 2, got
            assert merged() > before
            lost = sum(fabric.port("host")["counters"]["tx_drops"].values())
            assert lost == 0, fabric.port("host")["counters"]["tx_drops"]

    with cable() as (a, b), scratch() as one, scratch() as two:
        with Fabric(one, text("one", mtu, OURS, ours, theirs), netns=a), Fabric(two, text("two", mtu, THEIRS, theirs, ours), netns=b) as second:
            until("an answer through the tunnel", lambda: a.answers(THEIRS))
            assert second.port("host")["details"]["datagram_segmentation"] is True
            check(second, a, b, THEIRS)
            # To all: sent as one by UDP_SEGMENT, each comes by itself.
            got, bad = bursts(a, b, "10.87.0.255", True)
            assert bad == [0, 0] and got > DATAGRAMS / 2, (got, bad)
    with cable() as (a, b), scratch() as folder:
        kernel_end(b, mtu)
        with Fabric(folder, text("one", mtu, OURS, ours, theirs), netns=a) as fabric:
            until("an answer through the tunnel", lambda: a.answers(THEIRS))
            check(fabric, b, a, OURS)


@timeout(200)
def test_two_fabrics_are_the_ends_and_one_is_replaced():
    ours, theirs, _, overhead = UNDERLAYS[4]
    mtu = 1500 - overhead
    with cable() as (a, b), scratch() as one, scratch() as two:
        with Fabric(one, text("one", mtu, OURS, ours, theirs), netns=a) as first, Fabric(two, text("two", mtu, THEIRS, theirs, ours), netns=b):
            talk(a, b, mtu)
            daemon = first.status()["pid"]
            first.replace()
            assert first.status()["pid"] != daemon
            talk(a, b, mtu)


@timeout(200)
def test_a_node_of_flannel_is_reached_with_the_settings_that_flanneld_gives_the_kernel():
    """Two nodes of its vxlan backend: b has the kernel's device, a has a tap and the tunnel in its place. Nothing is learned or asked: flanneld
    writes routes, neighbours and forwarding entries. This does the same without it."""
    ours, theirs, _, overhead = UNDERLAYS[4]
    with cable() as (a, b), scratch() as folder:
        mtu = 1500 - overhead
        file = text("one", mtu, OURS, ours, theirs).replace(f"vni = {VNI}", "vni = 1\nudp_port = 8472")
        with Fabric(folder, file, netns=a) as fabric:
            b.ip("link", "add", "flannel.1", "mtu", str(mtu), "type", "vxlan", "id", "1", "dstport", "8472", "local", theirs, "dev", "eth0", "nolearning")
            b.ip("link", "set", "flannel.1", "up")
            devices = {a: "host", b: "flannel.1"}
            macs = {space: space.run("cat", f"/sys/class/net/{device}/address").stdout.strip() for space, device in devices.items()}
            for space, own, other, far in ((a, 1, 2, b), (b, 2, 1, a)):
                device = devices[space]
                space.ip("address", "add", f"10.244.{own}.0/32", "dev", device)
                space.ip("address", "add", f"10.244.{own}.1/32", "dev", "lo")
                space.ip("neighbour", "replace", f"10.244.{other}.0", "lladdr", macs[far], "dev", device, "nud", "permanent")
                space.ip("route", "replace", f"10.244.{other}.0/24", "via", f"10.244.{other}.0", "dev", device, "onlink", "src", f"10.244.{own}.1")
            b.run("bridge", "fdb", "append", macs[a], "dev", "flannel.1", "dst", ours)
            until("the pod on the other node", lambda: a.answers("10.244.2.1"))
            assert b.answers("10.244.1.1")
            bulk(a, b, "10.244.2.1")
            bulk(b, a, "10.244.1.1")
            assert not {"wrong_vni", "unknown_remote", "bad_tunnel"} & drops(fabric).keys(), drops(fabric)


@timeout(200)
def test_what_comes_from_elsewhere_and_of_another_network_is_dropped_and_counted():
    ours, theirs, _, overhead = UNDERLAYS[4]
    frame = "ffffffffffff020000000001" + "0806" + "00" * 46
    with cable() as (a, b), scratch() as folder, Fabric(folder, text("one", 1500 - overhead, OURS, ours, theirs), netns=a) as fabric:
        for source, header, reason in ((STRANGER, f"08000000{VNI:06x}00", "unknown_remote"), (theirs, f"08000000{VNI + 1:06x}00", "wrong_vni"),
                                       (theirs, "0000000000000000", "bad_tunnel")):
            before = fabric.port("host")["counters"]["tx_frames"]
            b.run("python3", "-c", DATAGRAM, source, ours, header + frame)
            until(f"a drop as {reason}", lambda r=reason: drops(fabric).get(r) == 1)
            assert fabric.port("host")["counters"]["tx_frames"] == before


@timeout(100)
def test_an_mtu_that_does_not_fit_the_path_is_refused_with_one_that_does():
    for version in (4, 6):
        ours, theirs, _, overhead = UNDERLAYS[version]
        with cable(version=version) as (a, _b), scratch() as folder:
            (folder / "tombolo.toml").write_text(text("one", 1500, OURS, ours, theirs))
            done = subprocess.run([*inside(a, own_mounts=False), PROGRAM, "check", folder / "tombolo.toml"], capture_output=True, text=True, timeout=60)
            assert done.returncode != 0 and f"set `mtu = {1500 - overhead}` in [network.lan]" in done.stderr, done
