"""Traffic ends: a guest on each kind of attachment, and the host's side of the same network.

    with endpoints.guest(cell) as end:
        tools.iperf(end.space, end.address, "tcp")

The host's side is a network namespace of the run with one interface on the guest's network, so all
traffic stays on this machine. `attachment` is

    vhost-user, stream, ivshmem, ivshmem-plain    the guest is a member of a fabric; the host's side
                                                  is a tap of the same network
    tap                                           QEMU's tap, without our switch: the kernel alone
    macvtap                                       QEMU on a macvtap; the host's side is a macvlan of
                                                  the same lower device (bridge mode)
    user                                          QEMU's user networking, without our switch; ports
                                                  5001 and 80 are forwarded, pings are not
    switch-tap                                    a tap of a fabric, for a namespace
    veth                                          a veth pair, for a namespace: the kernel alone

`guest` is "cell", an app of ours; "linux", the stock guest of `./x guest`; or "namespace", a
network namespace of this host, in which the servers of the tools run as processes.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tombolo_lab import harness
from tombolo_lab.workloads import Parameter, Skip

PREFIX = "10.79.0"
HOST, GUEST = f"{PREFIX}.1", f"{PREFIX}.10"
TAP = "tmb-lab"
MAC = "02:00:00:00:4c:0a"
FABRIC = ("vhost-user", "stream", "ivshmem", "ivshmem-plain")
SPACES = ("switch-tap", "veth")
BARE = ("tap", "macvtap", "user")
ATTACHMENTS = (*FABRIC, *BARE, *SPACES)
BOOT_S = {"cell": 60, "linux": 120}
# Of servers that stand for a guest, and of tunnels: they come first among other processes.
FIRST = -5

PARAMETERS = {
    "attachment": Parameter(
        "How the guest's network device reaches the host", str, ATTACHMENTS, default="vhost-user",
        setup=True,
    ),
    "guest": Parameter(
        "What the guest is", str, ("cell", "linux", "namespace"), default="cell", setup=True
    ),
    "budget": Parameter(
        "Frames that the switch takes from a port in a turn", int, low=1, high=256, default=64,
        setup=True,
    ),
    "busy_poll_us": Parameter(
        "How long the switch polls with nothing to do", int, low=0, high=1_000_000, default=0,
        unit="µs", setup=True,
    ),
    "cell_budget": Parameter(
        "Frames that a cell takes from its device in a turn", int, low=1, high=256, default=64,
        setup=True,
    ),
    "queues": Parameter(
        "Queue pairs of the device (vhost-user)", int, low=1, high=8, default=1, setup=True
    ),
    "region": Parameter(
        "Shared memory of the device (ivshmem): the size of its rings", str,
        ("1M", "2M", "4M", "8M", "16M"), default="1M", setup=True,
    ),
    "priority": Parameter(
        "Whether daemon and guest run before other processes (niceness -15, otherwise 0)", bool,
        default=False,
        setup=True,
    ),
    "sysctls": Parameter(
        "Settings of a Linux guest's kernel: NAME=VALUE, several by a space", str, default="",
        setup=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class End:
    """A guest that serves. `cpu` gives the CPU seconds so far of the daemon and QEMU together;
    `turns` the switch's counters of the ports "host" and "guest", None without a switch."""

    space: object
    address: str
    cpu: Callable[[], float]
    turns: Callable[[], dict] | None
    process: object
    memory: Callable[[], float]
    pids: Mapping[str, int] = field(default_factory=dict)


def check(cell: Mapping, app: str) -> None:
    """Skip where an end of this kind cannot be made here."""
    harness.need_root()
    harness.program()
    if (cell["guest"] == "namespace") != (cell["attachment"] in SPACES):
        raise Skip(f"{' and '.join(SPACES)} are for a namespace, the others for a machine")
    if cell["guest"] == "namespace":
        return
    harness.need_program("qemu-system-x86_64", "qemu-system-x86")
    if cell["guest"] == "cell":
        harness.need_cell(app)
    else:
        harness.need_guest()
        if cell["attachment"].startswith("ivshmem"):
            raise Skip("the stock Linux guest has no driver for ivshmem")
    if cell["attachment"] != "vhost-user" and cell["queues"] > 1:
        raise Skip("only vhost-user devices have several queues")
    if cell["sysctls"] and cell["guest"] == "cell":
        raise Skip("a cell has no kernel settings")


def head(cell: Mapping, space: object) -> str:
    """The fabric file up to the guest."""
    return f"""\
name = "lab"
[worker.switch]
budget = {cell["budget"]}
busy_poll_us = {cell["busy_poll_us"]}
[network.lan]
subnet = "{PREFIX}.0/24"
gateway = "{PREFIX}.254"
worker = "switch"
[tap.host]
device = "{TAP}"
netns = "{space}"
ip = "{HOST}"
"""


def cell_table(cell: Mapping, app: str) -> str:
    """The guest of a fabric file, a cell that the fabric runs."""
    attachment = cell["attachment"]
    more = f'region = "{cell["region"]}"\n' if attachment.startswith("ivshmem") else ""
    more += f"queues = {cell['queues']}\n" if cell["queues"] > 1 else ""
    return f"""\
[cell.guest]
app = "{app}"
ip = "{GUEST}"
mac = "{MAC}"
attach = "{attachment}"
args = "budget={cell["cell_budget"]}"
{more}"""


def _niceness(cell: Mapping) -> int:
    return -15 if cell["priority"] else 0


@contextlib.contextmanager
def guest(cell: Mapping, app: str = "iperf", serve: str = "iperf") -> Iterator[End]:
    """A guest that serves and answers. `app` is the cell's app, `serve` what the Linux guest runs:
    "iperf", "http" or both by a comma."""
    attachment = cell["attachment"]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(harness.scratch())
        space = stack.enter_context(harness.Namespace())
        if attachment in BARE:
            yield stack.enter_context(_bare(cell, space, folder, app, serve))
        elif cell["guest"] == "cell":
            yield stack.enter_context(_cell_in_fabric(cell, space, folder, app))
        else:
            yield stack.enter_context(_linux_in_fabric(cell, space, folder, serve))


def _ready(
    space: object, alive: Callable[[], bool], seconds: float, mac: str | None = MAC
) -> None:
    """Waits until the guest answers a ping, of which it is sent one every 20 ms: what is measured
    from its start does not wait for the next second, nor for an answer to ARP where its MAC address
    is known."""
    space.ip("link", "set", TAP, "up")
    neighbour = (GUEST, "lladdr", mac, "dev", TAP)
    if mac:
        space.ip("neighbour", "replace", *neighbour, "nud", "permanent")

    def answers() -> bool:
        if not alive():
            raise AssertionError("the guest's process ended while it started")
        # With both -c and -w it ends with the first reply.
        words = ("ping", "-q", "-n", "-i", 0.02, "-c", 1, "-w", 2, GUEST)
        return space.run(*words, check=False).returncode == 0

    harness.until("the guest's answer to a ping", answers, seconds)
    if mac:
        space.ip("neighbour", "del", *neighbour)


def _counters(fabric: object) -> Callable[[], dict]:
    def look() -> dict:
        ports = {port["name"]: port["counters"] for port in fabric.status()["ports"]}
        return {name: ports[name] for name in ("host", "guest")}

    return look


@contextlib.contextmanager
def _cell_in_fabric(cell: Mapping, space: object, folder: Path, app: str) -> Iterator[End]:
    text = head(cell, space) + cell_table(cell, app)
    with harness.Fabric(folder, text, nice=_niceness(cell)) as fabric:
        _ready(space, fabric.process.alive, BOOT_S["cell"])
        [pid] = fabric.machine_pids()
        yield End(
            space,
            GUEST,
            fabric.cpu_meter(),
            _counters(fabric),
            fabric.process,
            lambda: float(harness.rss_bytes(pid)),
            {"switch": fabric.process.pid, "guest": pid},
        )


def linux(
    cell: Mapping, net: object, serve: str, netns: object = None, qemu: object = None
) -> object:
    """The stock Linux guest, not yet started to wait for; use it in a `with`."""
    return harness.LinuxGuest(
        net=net,
        serve=serve,
        address=f"{GUEST}/24",
        netns=netns,
        nice=_niceness(cell),
        qemu=qemu,
    )


def settle(machine: object, cell: Mapping) -> None:
    """Waits for the guest's shell and applies its kernel settings."""
    machine.wait_control(BOOT_S["linux"])
    for setting in cell["sysctls"].split():
        name, _, value = setting.partition("=")
        machine.run(f"echo {value} > /proc/sys/{name.replace('.', '/')}")


@contextlib.contextmanager
def _linux_in_fabric(cell: Mapping, space: object, folder: Path, serve: str) -> Iterator[End]:
    socket = folder / "guest.sock"
    text = head(cell, space) + (
        f'[port.guest]\nkind = "{cell["attachment"]}"\nsocket = "{socket}"\n'
        f'ip = "{GUEST}"\nmac = "{MAC}"\n'
    )
    if cell["queues"] > 1:
        text += f"queues = {cell['queues']}\n"
    with harness.Fabric(folder, text, nice=_niceness(cell)) as fabric:
        harness.until("the guest's socket", socket.exists, 20)
        if cell["attachment"] == "stream":
            net = harness.Net.stream(socket)
        else:
            net = harness.Net.vhost_user(socket, queues=cell["queues"])
        with linux(cell, net.with_mac(MAC), serve) as machine:
            settle(machine, cell)
            _ready(space, machine.alive, BOOT_S["linux"])
            daemon = fabric.cpu_meter()
            yield End(
                space,
                GUEST,
                lambda: daemon() + machine.cpu_seconds(),
                _counters(fabric),
                machine,
                lambda: float(machine.rss_bytes()),
                {"switch": fabric.process.pid, "guest": machine.pid},
            )


def macvtap_node(space: object, name: str, node: Path) -> None:
    """Makes the character device of a namespace's macvtap. Nodes in /dev are named by an index that
    is unique within a namespace only, so they are of no use for several."""
    numbers = space.run("sh", "-c", f"cat /sys/class/net/{name}/macvtap/*/dev").stdout.strip()
    major, minor = map(int, numbers.split(":"))
    os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(major, minor))


def _macvtap(space: object, folder: Path) -> tuple[object, Path]:
    """A macvtap and, as TAP, a macvlan on one lower device: the guest's card, and a QEMU that has
    the macvtap open as its descriptor 9."""
    lower, end = "tmb-lower", "tmb-mvt"
    space.ip("link", "add", lower, "type", "veth", "peer", "name", f"{lower}1")
    for kind, name in (("macvlan", TAP), ("macvtap", end)):
        words = ("link", "add", "link", lower, "name", name, "type", kind, "mode", "bridge")
        try:
            space.ip(*words)
        except subprocess.CalledProcessError as error:
            raise Skip(f"this kernel makes no {kind}: {error.stderr.strip()}") from None
    space.ip("link", "set", end, "address", MAC)
    space.ip("address", "add", f"{HOST}/24", "dev", TAP)
    for name in (lower, f"{lower}1", end, TAP):
        space.ip("link", "set", name, "up")
    node = folder / "macvtap"
    macvtap_node(space, end, node)
    wrapper = folder / "qemu"
    qemu = harness.need_program("qemu-system-x86_64", "qemu-system-x86")
    wrapper.write_text(
        f'#!/bin/sh\nexec "{os.environ.get("TOMBOLO_QEMU") or qemu}" "$@" 9<>"{node}"\n'
    )
    wrapper.chmod(0o755)
    return harness.Net("tap,id=ID,fd=9,vhost=off").with_mac(MAC), wrapper


@contextlib.contextmanager
def _bare(cell: Mapping, space: object, folder: Path, app: str, serve: str) -> Iterator[End]:
    """A guest on QEMU's own networking, without a fabric."""
    is_tap, qemu = cell["attachment"] in ("tap", "macvtap"), None
    if is_tap:
        if cell["attachment"] == "macvtap":
            net, qemu = _macvtap(space, folder)
        else:
            space.tap(TAP, f"{HOST}/24")
            net = harness.Net.tap(TAP).with_mac(MAC)
        address, words = GUEST, f"ip={GUEST}/24 hostname=guest budget={cell['cell_budget']}"
    else:
        forwards = ",".join(
            f"hostfwd={kind}:127.0.0.1:{port}-:{port}"
            for kind, port in (("tcp", 5001), ("udp", 5001), ("tcp", 80))
        )
        net = harness.Net.user(forwards)
        address, words = "127.0.0.1", f"hostname=guest budget={cell['cell_budget']}"
    if cell["guest"] == "cell":
        machine = harness.CellGuest(
            app, net=net, append=words, netns=space, nice=_niceness(cell), qemu=qemu
        )
    elif is_tap:
        machine = linux(cell, net, serve, space, qemu)
    else:
        machine = harness.LinuxGuest(net=net, serve=serve, netns=space, nice=_niceness(cell))
    with machine:
        if cell["guest"] == "linux":
            settle(machine, cell)
        if is_tap:
            _ready(space, machine.alive, BOOT_S[cell["guest"]])
        elif cell["guest"] == "cell":
            machine.wait_line(lambda line: "10.0.2." in line, BOOT_S["cell"])
        else:
            machine.wait_address(BOOT_S["linux"])
        yield End(
            space,
            address,
            machine.cpu_seconds,
            None,
            machine,
            lambda: float(machine.rss_bytes()),
            {"guest": machine.pid},
        )


@contextlib.contextmanager
def namespace(cell: Mapping, servers: Sequence[Sequence[object]]) -> Iterator[End]:
    """A namespace in which these servers run, each a command of a tool, when it answers pings.
    "{address}" in a command is the namespace's address."""
    with contextlib.ExitStack() as stack:
        near, far = (stack.enter_context(harness.Namespace()) for _ in range(2))
        fabric = None
        if cell["attachment"] == "switch-tap":
            folder = stack.enter_context(harness.scratch())
            text = head(cell, near) + (
                f'[tap.guest]\ndevice = "{TAP}"\nnetns = "{far}"\nip = "{GUEST}"\n'
            )
            fabric = stack.enter_context(harness.Fabric(folder, text, nice=_niceness(cell)))
        else:
            near.ip("link", "add", TAP, "type", "veth", "peer", "name", TAP, "netns", str(far))
            for space, address in ((near, HOST), (far, GUEST)):
                space.ip("address", "add", f"{address}/24", "dev", TAP)
        far.ip("link", "set", TAP, "up")
        processes = [
            stack.enter_context(
                harness.Process(
                    [str(word).format(address=GUEST) for word in words],
                    netns=far,
                    nice=FIRST,
                    own_mounts=False,
                )
            )
            for words in servers
        ]
        watched = [fabric.process, *processes] if fabric else processes

        _ready(near, lambda: all(process.alive() for process in watched), 20, mac=None)
        pids = {f"server {index}": process.pid for index, process in enumerate(processes)}
        if fabric:
            pids["switch"] = fabric.process.pid
        yield End(
            near,
            GUEST,
            lambda: sum(harness.cpu_seconds(pid) for pid in pids.values()),
            _counters(fabric) if fabric else None,
            processes[0],
            lambda: float(sum(harness.rss_bytes(process.pid) for process in processes)),
            pids,
        )
