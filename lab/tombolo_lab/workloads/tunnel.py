"""A network over VXLAN between two machines: our port beside the kernel's vxlan device.

A machine is a namespace, and so is the member of the network on it. A pair of interfaces joins the
machines; its MTU is 1500, that of the network 1450.

    tombolo                        a fabric on each machine: the member's tap, and a vxlan port
    kernel, kernel-again           a bridge on each machine: the member's veth, and a vxlan device
    least                          a relay on each machine (relay.c) between the member's tap and
                                   UDP sockets: the system calls and copies that TCP takes through
                                   a tunnel in a process, and nothing else. It is no tunnel.

All members have a device with the same offloads (checksums, TCP segmentation). `ethtool -K tx off`
on the pair between the machines makes the kernel finish checksums and segments before they leave,
as they must for any real cable. It is the same for all: no network card segments within a tunnel
for the kernel's device, nor datagrams for ours (UDP_SEGMENT is cut in software).

CPU time is that of the whole machine, softirqs, senders and receivers included, without processes
that are none of this run's.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tombolo_lab import harness, machine
from tombolo_lab.workloads import Measure, Parameter, Workload, endpoints, paced, tools

PREFIX, UNDERLAY = "10.79.0", "192.0.2"
VNI, PORT = 42, 4789
PATH_MTU, MTU = 1500, 1450
BYTES, STREAMS = 64, 4
PINGS, PING_INTERVAL_S = 200, 0.004
DEVICE = "tmb-lab"


@dataclass(frozen=True)
class Setup:
    """The member that sends, and the address of the one that serves."""

    member: object
    address: str


class Tunnel(Workload):
    """Two machines, by what carries their network."""

    name = "tunnel"
    doc = (
        "Sends TCP (iperf 3, one stream and four), datagrams of 64 B as fast as they go, and pings "
        "between members of one network on two machines, over Tombolo's VXLAN port or over the "
        "kernel's vxlan device in a bridge. The machines are namespaces."
    )
    parameters = {
        "port": Parameter(
            "What carries the network; kernel-again is the same as kernel, and least is a relay "
            "between tap and UDP socket with the system calls and copies of TCP alone", str,
            ("tombolo", "kernel", "kernel-again", "least"), default="tombolo", setup=True,
        ),
        "seconds": Parameter(
            "Duration of each load", float, low=0.2, high=600, default=3, unit="s"
        ),
        "gro": Parameter(
            "Whether interfaces between the machines join packets of a flow that came together, as "
            "network cards do (ethtool -K gro)", str, ("off", "on"), default="on", setup=True,
        ),
        "congestion": Parameter(
            "Congestion control of TCP's sender; empty: the machine's", str, default="cubic"
        ),
        "offered": Parameter(
            "Offered rate of datagrams (400pps); empty: as fast as they go", str, default=""
        ),
    }  # fmt: skip
    measures = {
        "tcp_mbit_s": Measure("Payload over one stream", "Mbit/s", "higher"),
        "tcp_cpu_s_per_gb": Measure("CPU time of it", "s/GB", "lower"),
        "tcp4_mbit_s": Measure("Payload over four streams", "Mbit/s", "higher"),
        "tcp4_cpu_s_per_gb": Measure("CPU time of it", "s/GB", "lower"),
        "small_s": Measure("Datagrams of 64 B that arrived", "1/s", "higher"),
        "small_loss": Measure("… lost, as a part of those sent", "", "lower", 0, 1),
        "small_cpu_us": Measure("CPU time for each that arrived", "µs", "lower"),
        "rtt_us": Measure("Round trip of a ping, median", "µs", "lower"),
        "rtt_p99_us": Measure("… its 99th percentile", "µs", "lower"),
    }
    needs = ("root", "iperf3", "ethtool", "ping")

    def check(self, cell: dict) -> None:
        harness.need_root()
        for program in ("iperf3", "ethtool"):
            harness.need_program(program)
        harness.need_program("ping", "iputils-ping")
        if cell["congestion"]:
            need_congestion_control(cell["congestion"])
        paced.check("udp", BYTES, cell["offered"], cell["seconds"])
        if cell["port"] == "tombolo":
            harness.program()
        if cell["port"] == "least":
            paced.program("relay")

    def setup_seconds(self, cell: dict) -> float:
        return 0.7 if cell["port"] == "tombolo" else 0.4

    def seconds(self, cell: dict) -> float:
        long = 2 * tools.whole_seconds(cell["seconds"]) + cell["seconds"]
        return long + PINGS * PING_INTERVAL_S + 0.5

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[Setup]:
        """Both machines with their members, and the tools' servers in the second member."""
        with contextlib.ExitStack() as stack:
            machines = [stack.enter_context(harness.Namespace()) for _ in range(2)]
            members = [stack.enter_context(harness.Namespace()) for _ in range(2)]
            join(*machines, cell["gro"])
            make = {"tombolo": _fabric, "least": _relay}.get(cell["port"], _bridge)
            for at, (space, member) in enumerate(zip(machines, members, strict=True)):
                make(stack, at, space, member)
            address = f"{PREFIX}.2"
            for command in (
                ["iperf3", "-s"],
                [paced.program(), "sink", "udp", paced.IPERF_PORT],
            ):
                process = harness.Process(
                    command, netns=members[1], nice=endpoints.FIRST, own_mounts=False
                )
                stack.callback(process.kill)
            harness.until("an answer through the tunnel", lambda: members[0].pings(address))
            yield Setup(members[0], address)

    def measure(self, setup: Setup, cell: dict) -> dict:
        member, address, seconds = setup.member, setup.address, cell["seconds"]
        found = {}
        for name, streams in (("tcp", 1), ("tcp4", STREAMS)):
            with machine.Meter() as meter:
                row = tools.iperf3(
                    *(member, address, "tcp", False, seconds, 0, 0, streams, cell["congestion"])
                )
            gigabytes = row["mbit_s"] * tools.whole_seconds(seconds) / 8e3
            if not gigabytes:
                raise tools.ToolError("iperf3: nothing arrived")
            found[f"{name}_mbit_s"] = row["mbit_s"]
            found[f"{name}_cpu_s_per_gb"] = each(meter, gigabytes)
        with machine.Meter() as meter:
            rate = paced.rate_of(cell["offered"], BYTES)
            row = paced.send(member, address, "udp", BYTES, rate, seconds)
        if not row["received"]:
            raise tools.ToolError(f"none of {row['sent']} datagrams arrived")
        found["small_s"] = row["received"] / max(row["sent_seconds"], seconds)
        found["small_loss"] = 1 - row["received"] / row["sent"]
        found["small_cpu_us"] = each(meter, row["received"] / 1e6)
        times = tools.ping(member, address, PINGS, PING_INTERVAL_S)
        trips = tools.percentiles_us(times)
        found |= {"rtt_us": trips["p50"], "rtt_p99_us": trips["p99"]}
        return found | {"samples": {"rtt_us": times}}


def each(meter: machine.Meter, amount: float) -> float | None:
    """CPU seconds for each of an amount; None where other work hides them."""
    load_s = meter.usage.load_s
    return None if load_s is None else load_s / amount


def need_congestion_control(name: str) -> None:
    """Skip where the kernel has no such congestion control, built in or as a module: a root's
    request loads it."""
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError as error:
            known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text()
            raise harness.Skip(
                f"congestion: expected one that this kernel has ({', '.join(known.split())}), "
                f"found {name}: {error.strerror}"
            ) from None


def join(one: object, two: object, gro: str) -> None:
    """The cable between two machines; `gro` as the parameter."""
    cable = ("eth0", "mtu", PATH_MTU, "type", "veth", "peer", "name", "eth0", "mtu", PATH_MTU)
    one.ip("link", "add", *cable, "netns", str(two))
    for at, space in enumerate((one, two), 1):
        space.run("ethtool", "-K", "eth0", "tx", "off", "gro", gro)
        space.ip("address", "add", f"{UNDERLAY}.{at}/24", "dev", "eth0")
        space.ip("link", "set", "eth0", "up")


def _fabric(stack: contextlib.ExitStack, at: int, space: object, member: object) -> None:
    """A fabric with a tap in the member's namespace."""
    local, remote = (f"{UNDERLAY}.{number}" for number in (1 + at, 2 - at))
    # Each machine has a gateway of its own, for its own members.
    text = f"""\
name = "machine{at + 1}"
[network.lan]
subnet = "{PREFIX}.0/24"
gateway = "{PREFIX}.{254 - at}"
mtu = {MTU}
[tap.host]
device = "{DEVICE}"
netns = "{member}"
ip = "{PREFIX}.{1 + at}"
[port.span]
kind = "vxlan"
vni = {VNI}
udp_port = {PORT}
local = "{local}"
remotes = ["{remote}"]
"""
    folder = stack.enter_context(harness.scratch())
    stack.enter_context(harness.Fabric(folder, text, netns=space, nice=endpoints.FIRST))
    member.ip("link", "set", DEVICE, "up")


def _relay(stack: contextlib.ExitStack, at: int, space: object, member: object) -> None:
    """A relay whose tap goes into the member's namespace."""
    local, remote = (f"{UNDERLAY}.{number}" for number in (1 + at, 2 - at))
    command = [paced.program("relay"), DEVICE, local, remote, PORT]
    process = harness.Process(command, netns=space, nice=endpoints.FIRST, own_mounts=False)
    stack.callback(process.kill)
    process.wait_line(lambda line: line.strip() == "ready")
    space.ip("link", "set", DEVICE, "mtu", MTU, "netns", str(member))
    member.ip("address", "add", f"{PREFIX}.{1 + at}/24", "dev", DEVICE)
    member.ip("link", "set", DEVICE, "up")


def _bridge(stack: contextlib.ExitStack, at: int, space: object, member: object) -> None:
    """A bridge with a vxlan device and the member's veth, at their best: no frame on the bridge
    goes through the machine's packet filter, as none of the switch's does."""
    off = "for f in /proc/sys/net/bridge/bridge-nf-call-*; do [ ! -e $f ] || echo 0 >$f; done"
    space.run("sh", "-c", off)
    space.ip("link", "add", "br0", "mtu", MTU, "type", "bridge")
    space.ip(
        *("link", "add", "vx0", "mtu", MTU, "type", "vxlan", "id", VNI, "dstport", PORT),
        *("local", f"{UNDERLAY}.{1 + at}", "remote", f"{UNDERLAY}.{2 - at}", "dev", "eth0"),
    )
    veth = ("mtu", MTU, "type", "veth", "peer", "name", DEVICE, "mtu", MTU, "netns", str(member))
    space.ip("link", "add", "member", *veth)
    for name in ("vx0", "member"):
        space.ip("link", "set", name, "master", "br0", "up")
    space.ip("link", "set", "br0", "up")
    member.ip("address", "add", f"{PREFIX}.{1 + at}/24", "dev", DEVICE)
    member.ip("link", "set", DEVICE, "up")
