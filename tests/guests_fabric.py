"""Stock Linux guests and cells on a whole fabric, by `tombolo up`: names, bytes, reboots, isolation, the guard, captures, live ports
and a hostile vhost-user peer. None of it needs root."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess

from lib import BUILD, CellGuest, Console, Fabric, Net, Process, Skip, StreamPeer, linux_cmdline, scratch, timeout, until
from lib.fabric import PROGRAM

WEB, LINUX, OTHER = "10.234.0.20", "10.234.0.21", "10.235.0.20"
PATIENCE_S = 90
HEAD = """
name = "{name}"
[network.lan]
subnet = "10.234.0.0/24"
[cell.web]
app = "httpd"
network = "lan"
ip = "10.234.0.20"
accel = "tcg"
[vm.linux]
kernel = "{kernel}"
initrd = "{initrd}"
machine = "{machine}"
accel = "tcg"
network = "lan"
ip = "10.234.0.21"
cmdline = "{cmdline}"
"""


@contextlib.contextmanager
def with_linux(text):
    """A fabric with the guest `linux` and another machine `web`, and the guest's console once both answer."""
    with scratch() as folder, Fabric(folder, text) as fabric, Console("linux", fabric.name, fabric.env) as linux:
        linux.wait_address(240)
        linux.wait_control(120)
        until("a ping by name", lambda: linux.ping("web", count=1) == 1.0, PATIENCE_S)
        yield fabric, linux
        # The console that this test holds is no leftover of the fabric.
        fabric.down()


def standing(more="", machine="microvm"):
    """A fabric with the cell `web` and the guest `linux`, and the guest's console."""
    kernel = BUILD / "guest" / ("vmlinux" if machine == "microvm" else "vmlinuz")
    if not kernel.exists():
        raise Skip("build/guest is not there: run ./x guest")
    text = HEAD.format(name=f"g{os.getpid()}", kernel=kernel, initrd=BUILD / "guest/initramfs.cpio", machine=machine,
                       cmdline=linux_cmdline("linux", "http"))
    return with_linux(text + more)


def pattern_digest(size):
    """What /bytes/N of the cell is, by its SHA-256."""
    block = bytes(i % 251 for i in range(251 * 4096))
    return hashlib.sha256((block * (size // len(block) + 1))[:size]).hexdigest()


def fetch(linux, size, host="web", seconds=180):
    """Fetches from a cell by name and compares the checksum. (Debian 12's busybox wget crashes with -T.)"""
    text = linux.run(f"wget -q -O /tmp/page http://{host}/bytes/{size} && sha256sum /tmp/page; rm -f /tmp/page", seconds).text
    assert pattern_digest(size) in text, text


def talk(linux, size=2_000_000):
    until("a ping by name", lambda: linux.ping("web", count=1) == 1.0, PATIENCE_S)
    assert linux.ping("web", count=5) == 1.0
    fetch(linux, size)


@timeout(600)
def test_names_bytes_and_reboots():
    with standing() as (fabric, linux):
        assert linux.ping(f"web.{fabric.name}.internal") == 1.0
        fetch(linux, 10_000_000)
        before = fabric.machine("linux")
        print("named and fetched", flush=True)
        for how in ("by the guest", "by QEMU's monitor"):
            seen = len(linux.lines)
            if how == "by the guest":
                linux.send("@0 reboot -f\n")
            else:
                reset(fabric.folder / "run" / fabric.name / "linux.qmp")
            linux.wait_address(240, since=seen)
            linux.wait_control(120, since=seen)
            print(f"{how}: up again", flush=True)
            talk(linux)
            now = fabric.machine("linux")
            assert (now["pid"], now["restarts"], now["state"]) == (before["pid"], 0, "running"), (how, now)
            port = fabric.port("linux")
            assert port["up"] and port["counters"]["faults"] == 0, (how, port)
        assert fabric.status()["warnings"] == []


def reset(path):
    """QEMU's `system_reset` over QMP."""
    with socket.socket(socket.AF_UNIX) as monitor:
        monitor.settimeout(60)
        monitor.connect(str(path))
        with monitor.makefile("rw") as lines:
            lines.readline()
            for command in ("qmp_capabilities", "system_reset"):
                lines.write(json.dumps({"execute": command}) + "\n")
                lines.flush()
                while "return" not in (answer := json.loads(lines.readline())):
                    assert "error" not in answer, answer


@timeout(600)
def test_qemu_10_with_interrupt_vectors():
    program = BUILD / "qemu10/run"
    if not program.exists():
        raise Skip("build/qemu10 is not there: run ./x qemu10")
    os.environ["TOMBOLO_QEMU"] = str(program)
    with standing(machine="q35") as (fabric, linux):
        interrupts = linux.run("grep virtio /proc/interrupts").text
        assert "MSI" in interrupts, interrupts
        talk(linux, 10_000_000)
        assert fabric.port("linux")["counters"]["faults"] == 0


@timeout(600)
def test_two_networks_are_two():
    more = f"""
[network.other]
subnet = "10.235.0.0/24"
[cell.far]
app = "httpd"
network = "other"
ip = "{OTHER}"
accel = "tcg"
[port.near-ear]
kind = "stream"
network = "lan"
[port.far-ear]
kind = "stream"
network = "other"
"""
    with standing(more) as (fabric, linux):
        sockets = fabric.folder / "run" / fabric.name
        mac = linux.run("cat /sys/class/net/eth0/address").text.strip()
        with StreamPeer(sockets / "near-ear.sock") as near, StreamPeer(sockets / "far-ear.sock", "02:00:00:00:aa:02") as far:
            assert far.arp(OTHER, own="10.235.0.9", seconds=PATIENCE_S), "the other network's cell answers there"
            # The guest takes the other network for its own link, and asks all of it for the cell.
            linux.run("ip route add 10.235.0.0/24 dev eth0")
            assert linux.ping(OTHER, count=3, seconds=2) == 0.0
            asked = near.listen(lambda frame: frame[6:12].hex(":") == mac and frame[38:42] == socket.inet_aton(OTHER))
            assert asked, "the guest's question is heard in its own network"
            # What was switched before this answer came would have been heard before it.
            assert far.arp(OTHER, own="10.235.0.9")
            assert not [frame for frame in far.heard if frame[6:12].hex(":") == mac]
            assert near.arp(OTHER, own="10.234.0.9", seconds=2) is None
            assert linux.ping("web") == 1.0
            assert linux.run("nslookup far", check=False).code, "a name of another network"


def guarded(fabric):
    """How many of the guest's frames the guard has dropped so far."""
    return fabric.port("linux")["counters"]["rx_drops"].get("guard", 0)


@timeout(600)
def test_a_spoofed_source_is_dropped_and_counted():
    more = '[port.ear]\nkind = "stream"\n'
    with standing(more) as (fabric, linux), StreamPeer(fabric.folder / "run" / fabric.name / "ear.sock") as ear:
        web = ear.arp(WEB, own="10.234.0.9")
        own = linux.run("cat /sys/class/net/eth0/address").text.strip()
        assert web and own in fabric.port("linux")["guard"], fabric.port("linux")
        assert "guard" not in fabric.port("linux")["counters"]["rx_drops"]
        # The worst there is: the cell's own address, which would draw its traffic.
        ear.heard.clear()
        linux.run(f"ip link set eth0 down; ip link set eth0 address {web}; ip link set eth0 up; ip addr add {LINUX}/24 dev eth0", check=False)
        def dropped():
            assert linux.ping("10.234.0.9", count=5, seconds=2) == 0.0
            return guarded(fabric) >= 3

        until("three frames that the guard drops", dropped, PATIENCE_S)
        others = [port for port in fabric.status()["ports"] if port["name"] != "linux"]
        assert all("guard" not in port["counters"]["rx_drops"] for port in others), others
        assert ear.arp(WEB, own="10.234.0.9") == web
        heard = [frame for frame in ear.heard if frame[6:12].hex(":") == web]
        assert heard and all(frame[28:32] == socket.inet_aton(WEB) for frame in heard if frame[12:14] == b"\x08\x06"), "spoofed frames came through"
        macs = {port["name"]: port["macs"] for port in fabric.status()["ports"]}
        # Guarded addresses are pinned to their ports and learned nowhere.
        assert macs["web"] == macs["linux"] == 0, macs
        linux.run(f"ip link set eth0 down; ip link set eth0 address {own}; ip link set eth0 up; ip addr add {LINUX}/24 dev eth0", check=False)
        until("a ping with its own address", lambda: linux.ping(WEB, count=1) == 1.0, PATIENCE_S)


@timeout(600)
def test_a_guest_that_takes_anothers_ipv4_address_is_not_heard():
    with standing() as (fabric, linux):
        assert LINUX in fabric.port("linux")["guard"], fabric.port("linux")
        assert linux.ping(WEB, count=2) == 1.0
        assert "guard" not in fabric.port("linux")["counters"]["rx_drops"]
        # Its own Ethernet address, and an IPv4 address that is not its own: it neither draws
        # traffic by ARP nor sends under it.
        linux.run("ip addr add 10.234.0.99/24 dev eth0")
        text = linux.run(f"ping -q -c 3 -W 1 -I 10.234.0.99 {WEB}", check=False).text
        assert " 100% packet loss" in text, text
        until("three frames that the guard drops", lambda: guarded(fabric) >= 3)
        assert linux.ping(WEB, count=2) == 1.0


MICROVM = """
name = "{name}"
[network.lan]
subnet = "10.234.0.0/24"
[vm.linux]
machine = "microvm"
kernel = "{kernel}"
initrd = "{initrd}"
accel = "tcg"
"""


@timeout(300)
def test_a_microvm_boots_stock_linux_with_no_further_keys():
    kernel = BUILD / "guest/vmlinux"
    if not kernel.exists():
        raise Skip("build/guest is not there: run ./x guest")
    text = MICROVM.format(name=f"m{os.getpid()}", kernel=kernel, initrd=BUILD / "guest/initramfs.cpio")
    with scratch() as folder, Fabric(folder, text) as fabric, Console("linux", fabric.name, fabric.env) as linux:
        assert linux.wait_address(240).startswith("10.234.0.")
        fabric.cli("down", "--fabric", fabric.name)


def blocks(data):
    """The blocks of a pcapng file, as (type, body), their two lengths compared."""
    at = 0
    while at < len(data):
        kind, length = struct.unpack_from("<II", data, at)
        assert length >= 12 and length % 4 == 0 and at + length <= len(data), (at, kind, length)
        assert struct.unpack_from("<I", data, at + length - 4)[0] == length, (at, kind)
        yield kind, data[at + 8:at + length - 4]
        at += length


@timeout(600)
def test_capture_while_traffic_flows():
    count = 200
    with standing() as (fabric, linux):
        mac = fabric.port("web")["guard"][0]
        path = fabric.folder / "web.pcapng"
        command = [PROGRAM, "capture", "web", "-w", path, "--count", str(count), "--fabric", fabric.name]
        with Process(command, env=fabric.env) as capture:
            until("the file", path.exists, PATIENCE_S)
            until("the capture's end", lambda: fetch(linux, 500_000) or not capture.alive(), PATIENCE_S)
            assert capture.wait() == 0, capture.text
        seen = list(blocks(path.read_bytes()))
        assert seen[0][0] == 0x0A0D0D0A and struct.unpack_from("<I", seen[0][1])[0] == 0x1A2B3C4D
        assert seen[1][0] == 1 and struct.unpack_from("<H", seen[1][1])[0] == 1, "an Ethernet interface"
        frames = [body for kind, body in seen if kind == 6]
        assert len(frames) == count
        last = 0
        for body in frames:
            _, high, low, captured, length = struct.unpack_from("<IIIII", body)
            frame = body[20:20 + captured]
            assert 14 <= captured <= length and len(frame) == captured
            assert mac in (frame[:6].hex(":"), frame[6:12].hex(":")) or frame[0] & 1, frame[:14].hex(":")
            assert high << 32 | low >= last
            last = high << 32 | low
        assert fabric.port("web")["counters"]["captured"] >= count
        tshark = shutil.which("tshark")
        if tshark:
            done = subprocess.run([tshark, "-n", "-r", path, "-T", "fields", "-e", "frame.number"], capture_output=True, text=True, timeout=30)
            assert done.returncode == 0 and len(done.stdout.split()) == count, done.stderr


@timeout(600)
def test_a_console_neither_repeats_nor_loses_a_byte_while_the_daemon_stands():
    with standing() as (fabric, linux):
        lines = [f"line {number} of what nobody reads for a while" for number in range(1, 501)]
        linux.run("for n in $(seq 1 500); do echo line $n of what nobody reads for a while; done >/tmp/lines")
        fabric.process.signal(signal.SIGSTOP)
        try:
            with open(fabric.console_path("linux").with_suffix(".tty"), "w") as tty:
                tty.write("@alone cat /tmp/lines\n")
            until("the end of it", lambda: "@alone=0" in fabric.console("linux"), PATIENCE_S)
        finally:
            fabric.process.signal(signal.SIGCONT)
        assert linux.finish(("@alone", 0)).text.split("\n") == lines
        assert linux.run("cat /tmp/lines").text.split("\n") == lines


@contextlib.contextmanager
def none_lost(fabric, linux):
    """The guest pings `web` all the while, and each request has its reply. There is no transfer to the guest meanwhile: one whose machine lets it
    stand has no room for all of that, and loses what comes between."""
    linux.start_pings("web")
    yield
    sent, received = linux.finish_pings()
    counters = {port["name"]: port["counters"] for port in fabric.status()["ports"]}
    assert 0 < sent == received, f"{received} replies to {sent} requests; {json.dumps(counters)}"


@timeout(600)
def test_ports_come_and_go_under_traffic():
    with standing() as (fabric, linux):
        for round_ in range(2):
            path = fabric.folder / "run" / fabric.name / "extra.sock"
            with contextlib.ExitStack() as stack:
                with none_lost(fabric, linux):
                    fabric.cli("port", "add", "extra", "--kind", "vhost-user", "--mac", "02:00:00:00:bb:01", "--ip", "10.234.0.77",
                               "--fabric", fabric.name)
                    assert path.exists() and not fabric.port("extra")["up"]
                    stack.enter_context(CellGuest("httpd", net=Net.vhost_user(path).with_mac("02:00:00:00:bb:01")))
                    until("a ping by the new name", lambda: linux.ping("extra", count=1) == 1.0, PATIENCE_S)
                fetch(linux, 1_000_000, host="extra")
                with none_lost(fabric, linux):
                    fabric.cli("port", "del", "extra", "--fabric", fabric.name)
                    assert not path.exists(), round_
                    assert all(port["name"] != "extra" for port in fabric.status()["ports"])
                    assert linux.ping("10.234.0.77", count=2, seconds=2) == 0.0
        refused = fabric.cli("port", "del", "web", "--fabric", fabric.name, check=False)
        assert refused.returncode and "cell stop web" in refused.stderr, refused.stderr


def vhost_message(request, body=b"", flags=1, size=None):
    return struct.pack("<III", request, flags, len(body) if size is None else size) + body


def attacks(dice):
    """What a vhost-user frontend may send that is against the rules: bytes, and file descriptors to go with them."""
    start = vhost_message(3) + vhost_message(2, struct.pack("<Q", 1 << 32 | 1 << 30))
    region = struct.pack("<II", 1, 0) + struct.pack("<QQQQ", 0, 1 << 30, 0, 0)
    yield "random bytes", bytes(dice.randrange(256) for _ in range(4096)), False
    yield "a body of 4 GiB", vhost_message(5, flags=1, size=0xFFFFFFFF), False
    yield "another version", vhost_message(1, flags=2), False
    yield "an unknown request", vhost_message(4242, b"\xff" * 16), False
    yield "features that were not offered", vhost_message(3) + vhost_message(2, b"\xff" * 8), False
    yield "memory without a descriptor", start + vhost_message(5, region), False
    yield "memory larger than its file", start + vhost_message(5, region), True
    yield "a ring that there is not", start + vhost_message(8, struct.pack("<II", 200, 256)), False
    yield "addresses of no memory", start + vhost_message(9, struct.pack("<IIQQQQ", 0, 0, 1 << 63, (1 << 64) - 2, 4096, 0)), False
    yield "half a header", b"\x01\x00\x00", False


@timeout(600)
def test_a_hostile_frontend_harms_itself_alone():
    dice = random.Random(20261121)
    more = '[port.foe]\nkind = "vhost-user"\nmac = "02:00:00:00:cc:01"\nip = "10.234.0.66"\n'
    with standing(more) as (fabric, linux):
        path = fabric.folder / "run" / fabric.name / "foe.sock"
        told = {}
        with none_lost(fabric, linux):
            for name, data, with_file in attacks(dice):
                before = fabric.port("foe")["counters"]["faults"]
                with socket.socket(socket.AF_UNIX) as foe, open(os.devnull, "rb") as null:
                    foe.settimeout(PATIENCE_S)
                    foe.connect(str(path))
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        if with_file:
                            socket.send_fds(foe, [data], [null.fileno()])
                        else:
                            foe.sendall(data)
                        if name == "half a header":
                            # Nobody waits for the other half.
                            assert linux.ping("web", count=3) == 1.0
                            continue
                        # It is put out: the socket ends, without our doing.
                        while foe.recv(65536):
                            pass
                until(f"the fault of {name}", lambda: fabric.port("foe")["counters"]["faults"] > before, PATIENCE_S)
                told[name] = fabric.port("foe")["last_fault"]
        print(json.dumps(told, indent=1))
        assert any("foe" in warning for warning in fabric.status()["warnings"])
        others = [port for port in fabric.status()["ports"] if port["name"] != "foe"]
        assert all(port["counters"]["faults"] == 0 for port in others), others
        fetch(linux, 5_000_000)
        # The port itself serves the next peer that keeps to the rules.
        with CellGuest("httpd", net=Net.vhost_user(path).with_mac("02:00:00:00:cc:01")):
            until("a ping to the port's next guest", lambda: linux.ping("10.234.0.66", count=1) == 1.0, PATIENCE_S)
            fetch(linux, 1_000_000, host="10.234.0.66")
