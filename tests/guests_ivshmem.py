"""Cells on shared memory in a fabric of the program's own, beside members of every other kind: all reach each other, and a forward, names and
DHCP are as ever. Stock QEMU's two devices, without a guest of ours, are tested in crates/ivshmem/tests/qemu.rs."""

import contextlib
import json
import os
import socket
import struct
import subprocess

from lib import CellGuest, Fabric, Namespace, Process, http_get, need_program, need_root, scratch, timeout, until
from lib.fabric import PROGRAM
from lib.http import socket_in

PATIENCE_S = 120
CELLS = {"bell": "10.236.0.20", "plain": "10.236.0.21", "virtio": "10.236.0.22", "framed": "10.236.0.23", "big": "10.236.0.24"}
FILE = """
name = "{name}"
[network.lan]
subnet = "10.236.0.0/24"
uplink = "{uplink}"
[cell.bell]
app = "httpd"
ip = "10.236.0.20"
accel = "tcg"
attach = "ivshmem"
[cell.plain]
app = "httpd"
ip = "10.236.0.21"
accel = "tcg"
attach = "ivshmem-plain"
[cell.virtio]
app = "httpd"
ip = "10.236.0.22"
accel = "tcg"
[cell.framed]
app = "httpd"
ip = "10.236.0.23"
accel = "tcg"
attach = "stream"
[cell.big]
app = "httpd"
ip = "10.236.0.24"
accel = "tcg"
attach = "ivshmem"
region = "4M"
machine = "q35"
args = "offloads=none"
[tap.host]
ip = "10.236.0.9"
[link.control]
between = ["bell", "big"]
[link.quiet]
between = ["virtio", "plain"]
plain = true
[link.open]
between = ["bell"]
seats = 2
"""
FORWARDS = """
[[forward]]
listen = "127.0.0.1:8080"
to = "bell:80"
[[forward]]
listen = "127.0.0.1:8081"
to = "plain:80"
"""


@contextlib.contextmanager
def standing(uplink="none"):
    """The fabric in a namespace of its own, which has a way out for passt to copy."""
    need_root()
    with Namespace() as space, scratch() as folder:
        space.way_out()
        text = FILE.format(name=f"i{os.getpid()}", uplink=uplink) + (FORWARDS if uplink == "user" else "")
        with Fabric(folder, text, netns=space) as fabric:
            yield space, fabric
            fabric.down()


def page(space, host, port=80, path="/"):
    try:
        return http_get(host, port=port, path=path, seconds=5, netns=space)
    except (OSError, ValueError):
        return None


def lookup(space, name):
    """The address that the gateway's name server gives for a name (RFC 1035 §4.1), or None."""
    question = b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0\0\1\0\1"
    with socket_in(space, kind=socket.SOCK_DGRAM) as asking:
        asking.settimeout(5)
        asking.sendto(struct.pack(">6H", 7, 0x0100, 1, 0, 0, 0) + question, ("10.236.0.1", 53))
        answer = asking.recv(512)
    counts = struct.unpack_from(">6H", answer)
    return socket.inet_ntoa(answer[-4:]) if counts[3] == 1 else None


def all_well(space):
    for name, address in CELLS.items():
        until(f"a ping to {name}", lambda address=address: space.pings(address), PATIENCE_S)
        until(f"the page of {name}", lambda address=address: (reply := page(space, address)) and reply.status == 200, PATIENCE_S)


def link(fabric, name, kind):
    return next(link for link in fabric.status()["links"] if (link["name"], link["kind"]) == (name, kind))


@timeout(600)
def test_shared_memory_beside_every_other_kind():
    need_program("passt")
    with standing("user") as (space, fabric):
        all_well(space)
        # Both ways, in bulk: a download of every cell.
        for name, address in CELLS.items():
            reply = page(space, address, path="/bytes/2000000")
            assert reply and len(reply.body) == 2_000_000, name
        # DHCP and names: what the gateway says of each.
        leases = {lease["name"]: lease for lease in fabric.status()["networks"][0]["leases"]}
        assert all(leases[name]["ip"] == address and leases[name]["expires_s"] for name, address in CELLS.items()), leases
        for name, address in CELLS.items():
            assert lookup(space, f"{name}.{fabric.name}.internal") == address, name
        for port in (8080, 8081):
            until(f"the page through the forward {port}", lambda port=port: page(space, "127.0.0.1", port), PATIENCE_S)
        # Cells take the offloads that a network link offers, and one that wants none is as well
        # off.
        carried = {name: fabric.port(name)["details"]["offloads"] for name in ("bell", "plain", "big")}
        assert carried == {"bell": "carried", "plain": "carried", "big": "none"}, carried
        # What status says of the links.
        bell, plain, big = (link(fabric, name, "network") for name in ("bell", "plain", "big"))
        for report in (bell, plain, big):
            assert fabric.port(report["name"])["rings"]["frames_out_max"] == report["rings"]["frames_out_max"], report
            assert [(peer["id"], peer["state"]) for peer in report["peers"]] == [(0, "run"), (1, "run")], report
            assert report["kept"] and report["rings"]["frames_out_max"] > 0 and report["version"] == 1, report
        assert (bell["vectors"], plain["vectors"], plain["plain"], big["region_bytes"]) == (2, 0, True, 4 << 20)
        pids = {machine["name"]: machine["pid"] for machine in fabric.status()["machines"]}
        assert bell["peers"][1]["pid"] == pids["bell"] and bell["peers"][1]["name"] == "bell"
        control = link(fabric, "control", "direct")
        assert [(peer["id"], peer["name"]) for peer in control["peers"]] == [(0, "bell"), (1, "big")], control
        quiet = link(fabric, "quiet", "direct")
        assert [(peer["id"], peer["name"], peer["pid"]) for peer in quiet["peers"]] == [(0, "virtio", pids["virtio"]), (1, "plain", pids["plain"])], quiet
        metrics = subprocess.run(["curl", "-sS", "--unix-socket", fabric.folder / "run" / fabric.name / "api.sock", "http://x/metrics"],
                                 capture_output=True, text=True, check=True).stdout
        assert 'tombolo_link_peer_state{link="bell",kind="network",peer="1"} 3' in metrics, metrics
        faults = {port["name"]: port["counters"]["faults"] for port in fabric.status()["ports"]}
        assert not any(faults.values()), faults


@timeout(600)
def test_capture_stop_and_run():
    with standing() as (space, fabric):
        all_well(space)
        path = fabric.folder / "bell.pcapng"
        with Process([PROGRAM, "capture", "bell", "-w", path, "--count", "20", "--fabric", fabric.name],
                     env=fabric.env) as capture:
            until("the file", path.exists, PATIENCE_S)
            until("the capture's end", lambda: space.pings(CELLS["bell"]) and not capture.alive(), PATIENCE_S)
            assert capture.wait() == 0 and path.stat().st_size > 20 * 60, capture.text
        for name in ("bell", "plain"):
            before = link(fabric, name, "network")
            fabric.cli("cell", "stop", name, "--fabric", fabric.name)
            until("its seat to be free", lambda: len(link(fabric, name, "network")["peers"]) == 1, PATIENCE_S)
            until("its port to go down", lambda: not fabric.port(name)["up"])
            assert space.answers(CELLS["virtio"])
            fabric.cli("cell", "run", name, "--fabric", fabric.name)
            all_well(space)
            after = link(fabric, name, "network")
            assert (after["joins"], after["leaves"]) == (before["joins"] + 1, before["leaves"] + 1), after
        control = link(fabric, "control", "direct")
        assert len(control["peers"]) == 2 and control["leaves"] == 1, control
        assert json.dumps(fabric.status()["warnings"]) == "[]"


OWN = """
name = "{name}"
[network.lan]
subnet = "10.236.0.0/24"
[cell.virtio]
app = "httpd"
ip = "10.236.0.22"
accel = "tcg"
[tap.host]
ip = "10.236.0.9"
[port.own]
kind = "ivshmem"
mac = "02:00:00:00:36:01"
ip = "10.236.0.66"
[port.second]
kind = "ivshmem"
version = 2
vectors = 1
"""


def first_bytes(path, count, say=b""):
    """Connects to a server, says something, and gives the first bytes that it says and how the connection ended."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(str(path))
        got, fds, _, _ = socket.recv_fds(client, count, 8)
        for fd in fds:
            os.close(fd)
        if say:
            client.sendall(say)
            while True:
                more, fds, _, _ = socket.recv_fds(client, 4096, 8)
                for fd in fds:
                    os.close(fd)
                if not more:
                    break
        return got


@timeout(600)
def test_a_vmm_of_ones_own_and_clients_that_break_the_rules():
    need_root()
    with Namespace() as space, scratch() as folder, Fabric(folder, OWN.format(name=f"i{os.getpid()}"), netns=space) as fabric:
        sockets = folder / "run" / fabric.name
        until("a ping to virtio", lambda: space.pings(CELLS["virtio"]), PATIENCE_S)
        for machine in ("q35", "microvm"):
            extra = ["-chardev", f"socket,id=c0,path={sockets / 'own.sock'}", "-device", "ivshmem-doorbell,chardev=c0,vectors=2"]
            with CellGuest("httpd", machine=machine, extra=extra, pcie=True, acpi=True) as cell:
                # It takes the MAC of its region's header, and DHCP gives the address that goes with
                # it. With its IPv6 address it forgets its neighbours, and loses one reply.
                until("its IPv6 address", lambda: "by router advertisement" in cell.text, PATIENCE_S)
                until("a ping to the cell", lambda: space.pings("10.236.0.66"), PATIENCE_S)
                assert len(page(space, "10.236.0.66", path="/bytes/500000").body) == 500_000
                # The seat is taken: any other that comes is refused, and the one that sits there
                # does not notice.
                assert first_bytes(sockets / "own.sock", 8) == b""
                assert space.answers("10.236.0.66")
                until("the count of it", lambda: link(fabric, "own", "network")["refused"] >= 1)
            until("its seat to be free", lambda: len(link(fabric, "own", "network")["peers"]) == 1, PATIENCE_S)
        # Who talks to the server is put out, and counted.
        assert first_bytes(sockets / "own.sock", 8, say=b"x") == struct.pack("<q", 0)
        until("the count of it", lambda: link(fabric, "own", "network")["cut_talking"] == 1, PATIENCE_S)
        assert any("own" in warning for warning in fabric.status()["warnings"])
        # The other protocol: INIT of peer 1 of 2, one vector, the network protocol, the output
        # sections of Jailhouse's network link.
        init = first_bytes(sockets / "second.sock", 40)
        assert struct.unpack("<IIIIIIIIQ", init) == (0, 40, 2, 2, 1, 2, 1, 1, 0x7F000), init
        until("its seat to be free", lambda: len(link(fabric, "second", "network")["peers"]) == 1, PATIENCE_S)
        assert space.answers(CELLS["virtio"])
        fabric.down()
