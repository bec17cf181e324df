"""The bypass on a host whose microVMs' networks are made by CNI: the real plugins ptp and bridge, then the tap and the two filters that Firecracker's
tc-redirect-tap puts into the container's namespace."""

import contextlib
import json
import subprocess
from pathlib import Path

from bypass_interfaces import recorded
from bypass_paths import B, host, is_ip
from lib import Namespace, Skip, need_program, until
from lib.frames import mac_bytes
from lib.machine import SLOW
from lib.netns import inside
from lib.tap import ETH_IP4, GSO_TCPV4, NEEDS_CSUM, TCP, UDP, Tap, ethernet, ipv4, transport, vnet_header

# Where Debian and most distributions have the plugins.
FOLDERS = ("/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni")
GATEWAY, GUEST = "10.7.0.1", "10.7.0.2"


def plugin(name):
    for folder in FOLDERS:
        if (Path(folder) / name).exists():
            return Path(folder) / name
    raise Skip(f"the CNI plugin {name} is not installed (Debian: containernetworking-plugins)")


def cni(h, pod, command, config):
    """Runs a plugin as a container runtime does: its word in the environment, its configuration on standard input."""
    path = plugin(config["type"])
    words = {"CNI_COMMAND": command, "CNI_CONTAINERID": str(pod), "CNI_NETNS": f"/run/netns/{pod}", "CNI_IFNAME": "eth0", "CNI_PATH": str(path.parent)}
    done = subprocess.run([*inside(h.space, own_mounts=False), "env", *(f"{k}={v}" for k, v in words.items()), path], input=json.dumps(config),
                          capture_output=True, text=True, timeout=20 * SLOW)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return json.loads(done.stdout) if done.stdout else None


class Guest:
    """A microVM in a container's namespace: its tap, joined to the container's interface by the filters of tc-redirect-tap, whose MAC address it has."""

    def __init__(self, pod, mac):
        self.tap = Tap(pod, "tap0", mac=mac)
        for one, other in (("eth0", "tap0"), ("tap0", "eth0")):
            pod.run("tc", "qdisc", "add", "dev", one, "ingress")
            pod.run("tc", "filter", "add", "dev", one, "parent", "ffff:", "protocol", "all", "u32", "match", "u32", "0", "0",
                    "action", "mirred", "egress", "redirect", "dev", other)

    def close(self):
        self.tap.close()


@contextlib.contextmanager
def machine(h, kind):
    """(the guest, the host's interface that its traffic goes through, a function that ends it by CNI DEL)."""
    need_program("tc")
    config = {"cniVersion": "0.4.0", "name": "fcnet", "type": kind,
              "ipam": {"type": "host-local", "subnet": "10.7.0.0/24", "dataDir": str(h.folder / "cni")}}
    if kind == "bridge":
        config |= {"bridge": "cni0", "isGateway": True}
    with Namespace() as pod:
        result = cni(h, pod, "ADD", config)
        made = {i["name"]: i for i in result["interfaces"]}
        assert result["ips"][0]["address"] == f"{GUEST}/24" or result["ips"][0]["address"].startswith(GUEST), result
        side = "cni0" if kind == "bridge" else next(n for n, i in made.items() if not i.get("sandbox"))
        h.space.ip("neighbour", "replace", GUEST, "lladdr", made["eth0"]["mac"], "dev", side, "nud", "permanent")
        guest = Guest(pod, made["eth0"]["mac"])
        guest.host_mac = mac_bytes(h.space.ip("-br", "link", "show", side).split()[2])
        try:
            yield guest, side, lambda: cni(h, pod, "DEL", config)
        finally:
            guest.close()


def frames(guest, h):
    """(name, from which end, vnet header, frame): both ways, whole, unfinished and of segments."""
    def out(proto, body, header=bytes(10)):
        return guest.tap, header, ethernet(guest.host_mac, guest.tap.mac, ETH_IP4, ipv4(GUEST, B, proto, body))

    def back(proto, body, header=bytes(10)):
        return h.b, header, h.to_a(ETH_IP4, ipv4(B, GUEST, proto, body))

    for name, way, a, b in (("out", out, GUEST, B), ("back", back, B, GUEST)):
        yield f"udp {name}", *way(UDP, transport(UDP, a, b, 1000, 1000, b"whole"))
        yield f"tcp {name}", *way(TCP, transport(TCP, a, b, 1000, 1000, b"part" * 9, partial=True), vnet_header(NEEDS_CSUM, start=34, offset=16))
        yield f"60 KB {name}", *way(TCP, transport(TCP, a, b, 1000, 1000, bytes(range(256)) * 230, partial=True),
                                    vnet_header(NEEDS_CSUM, GSO_TCPV4, 54, 1448, 34, 16))


def across(guest, h, sender, header, frame):
    receiver = h.b if sender is guest.tap else guest.tap
    receiver.drain()
    sender.send(frame, header)
    return receiver.receive(1, is_ip)


def bypassed(kind, taken):
    with host() as h, machine(h, kind) as (guest, side, delete):
        kernel = {name: across(guest, h, *frame) for name, *frame in frames(guest, h)}
        assert all(kernel.values()), kernel
        # As docs/bypass.md says it, after the CNI ADD.
        h.attach(side, "tb", words=("--lease", "10000"))
        for _ in range(3):
            got = {name: across(guest, h, *frame) for name, *frame in frames(guest, h)}
            assert got == kernel, (got, kernel)
        assert h.taken(side) >= 6 and h.status("tb")["by_reason"].get(taken, 0) >= 6, h.status()
        h.cli("detach")
        assert {name: across(guest, h, *frame) for name, *frame in frames(guest, h)} == kernel
        # CNI takes away what it made while it is attached; the uplink's attachment stays.
        h.attach(side, "tb")
        delete()
        if kind == "ptp":
            until("the interface's end", lambda: side not in h.space.ip("link"), 5)
            # From status at once, and with the controller's next look from the record.
            assert [i["name"] for i in h.status()["interfaces"]] == ["tb"] and side not in h.cli("status").stdout
            until("its attachment's end", lambda: side not in recorded(h))
            h.attach("ta")
            assert sorted(i["name"] for i in h.status()["interfaces"]) == ["ta", "tb"]
        h.cli("detach")
        assert not h.status()["attached"] and not (h.folder / "run/bypass").exists()


def test_a_microvm_behind_cnis_ptp_is_bypassed_both_ways_and_its_offloads_stay():
    bypassed("ptp", "taken_peer")


def test_microvms_behind_cnis_bridge_are_bypassed_at_the_bridge():
    bypassed("bridge", "taken_tcx")


def test_a_bridges_port_that_is_attached_instead_of_the_bridge_takes_nothing_and_loses_nothing():
    with host() as h, machine(h, "bridge") as (guest, _, _delete):
        port = h.space.ip("-br", "link", "show", "master", "cni0").split("@")[0]
        kernel = {name: across(guest, h, *frame) for name, *frame in frames(guest, h)}
        h.attach(port, "tb", words=("--lease", "10000"))
        for _ in range(3):
            assert {name: across(guest, h, *frame) for name, *frame in frames(guest, h)} == kernel
        assert h.taken(port) == 0 and h.taken("tb") == 0, h.status()
        assert h.status(port)["passed"] >= 9
