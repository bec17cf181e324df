"""Tunnels with other software at the end or below: Open vSwitch in user space, and WireGuard in user space (docs/span.md)."""

import contextlib
import os
import socket
import subprocess
import time
from pathlib import Path

from lib import Process, need_program, scratch, timeout, until
from lib.fabric import Fabric
from lib.tap import Inside
from span_vxlan import OURS, UNDERLAYS, VNI, cable, talk, text

SCHEMA = Path("/usr/share/openvswitch/vswitch.ovsschema")
# What WireGuard's interface has below a path of 1500 bytes, and the network in a tunnel within.
WIREGUARD_MTU, NETWORK_MTU = 1420, 1370


class OpenVSwitch:
    """Its two daemons in a namespace, with a database, sockets and logs of their own."""

    def __init__(self, folder, space):
        for program in ("ovs-vswitchd", "ovsdb-server", "ovs-vsctl", "ovsdb-tool"):
            need_program(program)
        self.folder, self.space = folder, space
        self.env = {f"OVS_{name}": str(folder) for name in ("RUNDIR", "LOGDIR", "DBDIR", "SYSCONFDIR")}

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            database, remote = self.folder / "conf.db", self.folder / "db.sock"
            subprocess.run(["ovsdb-tool", "create", database, SCHEMA], check=True)
            words = ["ovsdb-server", database, f"--remote=punix:{remote}", f"--unixctl={self.folder}/db.ctl"]
            stack.callback(Process(words, name="ovsdb-server", netns=self.space, env=self.env, cwd=self.folder).kill)
            until("the database's socket", remote.exists)
            self.database = f"--db=unix:{remote}"
            words = ["ovs-vswitchd", f"unix:{remote}", f"--unixctl={self.folder}/switch.ctl"]
            self.switch = Process(words, name="ovs-vswitchd", netns=self.space, env=self.env, cwd=self.folder)
            stack.callback(self.switch.kill)
            self.set("--no-wait", "init")
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self.stack.close()

    def set(self, *words):
        self.space.run("ovs-vsctl", "--timeout=30", self.database, *words)


@timeout(240)
def test_a_vxlan_port_of_open_vswitch_in_user_space_is_the_other_end():
    ours, theirs, prefix, overhead = UNDERLAYS[4]
    with cable() as (a, b), scratch() as folder:
        with Fabric(folder, text("one", 1500 - overhead, OURS, ours, theirs), netns=a), OpenVSwitch(folder, b) as switch:
            # Its tunnels in user space end at a bridge that has the interface and its address.
            b.ip("address", "flush", "dev", "eth0")
            switch.set("add-br", "br-phy", "--", "set", "bridge", "br-phy", "datapath_type=netdev", "--", "add-port", "br-phy", "eth0")
            b.ip("address", "add", f"{theirs}/{prefix}", "dev", "br-phy")
            b.ip("link", "set", "br-phy", "up")
            switch.set("add-br", "br0", "--", "set", "bridge", "br0", "datapath_type=netdev", "--", "add-port", "br0", "vx0", "--", "set", "interface", "vx0",
                       "type=vxlan", f"options:remote_ip={ours}", f"options:key={VNI}", "options:dst_port=4789")
            b.ip("address", "add", "10.87.0.50/24", "dev", "br0")
            b.ip("link", "set", "br0", "mtu", str(1500 - overhead), "up")
            talk(a, b, 1500 - overhead)


@contextlib.contextmanager
def wireguard(a, b, folder):
    """WireGuard between both machines, by user-space programs; the addresses within are those that `cable` gives the machines otherwise."""
    need_program("wg")
    ours, theirs, prefix, _ = UNDERLAYS[4]
    outer = {a: "198.51.100.1", b: "198.51.100.2"}
    inner = {a: ours, b: theirs}
    # The sockets by which `wg` sets them up are named for the interfaces, in a folder of the whole
    # machine.
    names = {a: f"wga{os.getpid()}", b: f"wgb{os.getpid()}"}
    keys = {}
    with contextlib.ExitStack() as stack:
        for space in (a, b):
            space.ip("address", "flush", "dev", "eth0")
            space.ip("address", "add", f"{outer[space]}/24", "dev", "eth0")
            private = folder / f"{names[space]}.key"
            secret = subprocess.run(["wg", "genkey"], capture_output=True, text=True, check=True).stdout
            private.touch(0o600)
            private.write_text(secret)
            keys[space] = private, subprocess.run(["wg", "pubkey"], input=secret, capture_output=True, text=True, check=True).stdout.strip()
            program = Process(["wireguard-go", "--foreground", names[space]], name="wireguard-go", netns=space)
            stack.callback(program.stop)
        for space, other in ((a, b), (b, a)):
            device = names[space]
            until("the device", lambda: space.run("wg", "show", device, check=False).returncode == 0)
            space.run("wg", "set", device, "private-key", keys[space][0], "listen-port", "51820", "peer", keys[other][1], "endpoint",
                      f"{outer[other]}:51820", "allowed-ips", f"{inner[other]}/32")
            space.ip("address", "add", f"{inner[space]}/{prefix}", "dev", device)
            space.ip("link", "set", device, "mtu", str(WIREGUARD_MTU), "up")
        until("WireGuard", lambda: a.answers(theirs))
        yield


def heard(space, seconds):
    """Whole frames on the cable, for so long."""
    with Inside(space), socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as sniffer:
        sniffer.bind(("eth0", 3))
        sniffer.settimeout(0.1)
        frames, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                frames.append(sniffer.recv(2000))
        return frames


@timeout(240)
def test_a_tunnel_within_wireguard_carries_full_frames_and_shows_none_of_them():
    need_program("wireguard-go")
    ours, theirs, _, _ = UNDERLAYS[4]
    with cable() as (a, b), scratch() as folder, wireguard(a, b, folder):
        folders = [folder / name for name in ("one", "two")]
        for one in folders:
            one.mkdir()
        texts = [text("one", NETWORK_MTU, OURS, ours, theirs), text("two", NETWORK_MTU, "10.87.0.50", theirs, ours)]
        with Fabric(folders[0], texts[0], netns=a) as fabric, Fabric(folders[1], texts[1], netns=b):
            talk(a, b, NETWORK_MTU)
            # One byte more does not fit the path, and `check` says what does.
            wide = folders[0] / "wide.toml"
            wide.write_text(texts[0].replace(f"mtu = {NETWORK_MTU}", f"mtu = {NETWORK_MTU + 1}"))
            refused = fabric.cli("check", wide, check=False)
            assert refused.returncode and f"mtu = {NETWORK_MTU}" in refused.stderr, refused.stderr
            # What members say is not to be read on the way; the same without WireGuard would be.
            mark = b"read-me-if-you-can"
            flow = subprocess.Popen(["ip", "netns", "exec", str(a), "ping", "-i", "0.02", "-w", "3", "-p", mark[:16].hex(), "10.87.0.50"],
                                    stdout=subprocess.DEVNULL)
            frames = heard(a, 2)
            flow.wait(10)
            outer = [frame for frame in frames if frame[12:14] == b"\x08\x00" and frame[23] == 17]
            assert len(outer) > 20 and all(51820 in (int.from_bytes(frame[34:36], "big"), int.from_bytes(frame[36:38], "big")) for frame in outer)
            assert not any(mark[:8] in frame for frame in frames)
