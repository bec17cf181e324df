"""Linux guests with a NIC of a given model, the kernel's knobs for it, and its counters.

    with open_nic("e1000", Shape(), space) as nic:
        nic.apply(Knobs(netdev_budget=64))          # others have their defaults
        port = nic.serve("udp", buffer_kib=8192, vcpu=1)
        before = nic.counters()
        ...
        seen = nic.counters() - before              # packets, drops, interrupts, polls by packets

The cloud kernel of `./x guest` has drivers for virtio-net and vmxnet3 only. So these guests boot
Debian's general kernel, all models the same one. `./x guest-nics` fetches it once (70 MB, by
`apt-get download`; nothing is installed) and packs it with the modules of `MODELS`, the init of
tools/guest and the sink of paced.c. The outputs lie in build/guest-nics, or in the folder that
TOMBOLO_LAB_NICS names. Without them `need` raises Skip.

The guest has two processors and boots on q35. Its card is on a tap of a namespace: no switch of
ours is on the way. Interrupts of the card go to vCPU 0 (`IRQ_VCPU`), so receiving and polling can
be kept apart or together; those of several queues go to all vCPUs.

What a budget means for Linux (net/core/dev.c of 6.1):

napi_weight     packets that the driver takes in one poll. A constant, 64, in most drivers (16 in
                8139cp); virtio-net alone has a module parameter for it, so it is loaded again.
netdev_budget   packets of all polls in one run of the softirq. Checked after each poll, so a value
                below the driver's weight is one poll for each run.
dev_weight      packets in one poll of a CPU's backlog. A NIC's packets are there only with rps=1,
                which sends them through the backlog of vCPU 0.

Limits: one interface, eth0. Counters are those of the guest's kernel; the histogram of packets per
poll is the tracepoint napi:napi_poll, counted by a hist trigger, which costs a little of each poll.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType

from tombolo_lab import LabError, harness
from tombolo_lab.workloads import Skip, paced

META_PACKAGE = "linux-image-amd64"
FILES = ("vmlinux", "initramfs.cpio", "version")
VCPUS = 2
# The vCPU that takes the card's interrupts, and so its polls.
IRQ_VCPU = 0
MEMORY_MIB = 256
BOOT_S = 120.0
TAP = "tmb-nic"
HOST, GUEST = "10.81.0.1", "10.81.0.2"
MAC = "02:00:00:00:51:02"
TRACE = "/sys/kernel/tracing"
_POLLS = f"{TRACE}/events/napi/napi_poll"
# The name that the tracepoint gives to a CPU's backlog.
BACKLOG = "(no_device)"
COUNT = "/bin/lab-count"
FIRST_PORT = 5100


@dataclass(frozen=True)
class Model:
    """A model of card: QEMU's device, the kernel's module, and packets of its driver's poll."""

    device: str
    module: str
    weight: int
    # The greatest receive ring that its driver takes with `ethtool -G`; 0: it takes none.
    most_ring: int


MODELS = {
    "virtio-net": Model("virtio-net-pci", "virtio_net", 64, 0),
    "e1000": Model("e1000", "e1000", 64, 4096),
    "rtl8139": Model("rtl8139", "8139cp", 16, 0),
    "vmxnet3": Model("vmxnet3", "vmxnet3", 64, 4096),
}

COUNT_SCRIPT = f"""#!/bin/busybox sh
# What tombolo_lab.workloads.nics counts; every line begins with a word that says what it is.
grep -E 'CPU0|eth0|vif0-q|virtio[0-9]+-input' /proc/interrupts
grep NET_RX /proc/softirqs
sed 's/^/softnet /' /proc/net/softnet_stat
grep ^Udp: /proc/net/snmp
grep '^cpu' /proc/stat
for name in rx_packets rx_dropped rx_missed_errors rx_over_errors rx_fifo_errors; do
    read -r value </sys/class/net/eth0/statistics/$name && echo "$name $value"
done
grep hitcount: {_POLLS}/hist
"""


# ---- building ------------------------------------------------------------------------------------
def folder() -> Path:
    """Where the kernel and the ramdisk lie, whether they are there or not."""
    named = os.environ.get("TOMBOLO_LAB_NICS")
    return Path(named) if named else harness.tree() / "build/guest-nics"


def need(model: str) -> Path:
    """The folder of the guest; Skip when it is not built or QEMU does not know the model."""
    if model not in MODELS:
        raise Skip(f"no Linux guest has a NIC of model {model}: there are {', '.join(MODELS)}")
    harness.need_root()
    harness.need_program("qemu-system-x86_64", "qemu-system-x86")
    harness.need_program("ip", "iproute2")
    found = folder()
    if not all((found / name).is_file() for name in FILES):
        raise Skip(
            f"{found} has no Linux guest with NICs: run ./x guest-nics once (it fetches 70 MB), or "
            "name a folder that has one in TOMBOLO_LAB_NICS"
        )
    harness.measured(*(found / name for name in FILES))
    return found


def _builder() -> ModuleType:
    """tools/guest/build.py."""
    place = harness.tree() / "tools/guest"
    sys.path.insert(0, str(place))
    try:
        module = importlib.import_module("build")
    finally:
        sys.path.remove(str(place))
    if Path(module.__file__).parent.resolve() != place.resolve():
        raise LabError(f"expected the module build of {place}, found {module.__file__}")
    return module


def _base(builder: ModuleType, into: Path, busybox: bytes) -> tuple[str, bytes]:
    """The stamp of the kernel and its ramdisk without our programs; makes both where they are not
    up to date. The package, 400 MB when it is unpacked, is gone afterwards."""
    found = re.search(
        r"Depends: (linux-image-[0-9]\S+)", builder.run("apt-cache", "depends", META_PACKAGE)
    )
    if not found:
        raise LabError(f"apt does not know {META_PACKAGE}: run `apt-get update` once")
    shown = builder.run("apt-cache", "show", "--no-all-versions", found[1])
    number = re.search(r"^Version: (\S+)", shown, re.M)[1]
    version = builder.stamp(found[1], number, busybox + repr(MODELS).encode())
    kept = [into / name for name in ("vmlinux", "base.cpio", "base-version")]
    if all(path.is_file() for path in kept) and kept[2].read_text() == version:
        return version, kept[1].read_bytes()
    tree = into / "kernel" / found[1]
    shutil.rmtree(into / "kernel", ignore_errors=True)
    tree.mkdir(parents=True)
    builder.download([found[1]], tree)
    wanted = ("virtio_pci", *(model.module for model in MODELS.values()))
    ramdisk = builder.initramfs(builder.Modules(tree).order(wanted), busybox)
    kernel = builder.extract_elf(next((tree / "boot").glob("vmlinuz-*")))
    builder.write(into, {"vmlinux": kernel, "base.cpio": ramdisk})
    builder.write(into, {"base-version": version.encode()})
    shutil.rmtree(into / "kernel")
    return version, ramdisk


def build(into: Path) -> Path:
    """Makes the kernel and the ramdisk in `into`; nothing is fetched when the kernel is up to date.

    LabError when a package or a program is missing.
    """
    builder = _builder()
    busybox = shutil.which("busybox")
    if not busybox:
        raise LabError("no busybox: apt-get install busybox-static")
    try:
        sink = paced.program().read_bytes()
        into.mkdir(parents=True, exist_ok=True)
        base, ramdisk = _base(builder, into, Path(busybox).read_bytes())
        ours = hashlib.sha256(COUNT_SCRIPT.encode() + sink).hexdigest()[:16]
        version = f"{base.strip()} {ours}\n"
        if all((into / name).is_file() for name in FILES) and (
            (into / "version").read_text() == version
        ):
            return into
        more = builder.Archive()
        more.file(COUNT.lstrip("/"), COUNT_SCRIPT.encode())
        more.file("bin/paced", sink)
        builder.write(
            into,
            {
                # Each archive begins at a multiple of four bytes (Linux, buffer-format).
                "initramfs.cpio": ramdisk + b"\0" * (-len(ramdisk) % 4) + more.bytes(),
                "version": version.encode(),
            },
        )
    except (builder.Missing, Skip, subprocess.CalledProcessError, OSError) as error:
        raise LabError(f"the Linux guest with NICs cannot be built: {error}") from None
    return into


# ---- knobs ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Shape:
    """What a guest's card is made with; a change needs another guest. 0: QEMU's default."""

    queues: int = 1
    device_ring: int = 0  # virtio-net: entries of its receive ring, a power of two
    offloads: bool = True  # virtio-net: checksums, segmentation and merged receive buffers

    def device(self, model: str) -> str:
        """The value of QEMU's -device, without netdev and MAC."""
        words = [MODELS[model].device, "romfile="]
        if model == "virtio-net":
            if self.queues > 1:
                words += ["mq=on", f"vectors={2 * self.queues + 2}"]
            if self.device_ring:
                words.append(f"rx_queue_size={self.device_ring}")
            if not self.offloads:
                off = ("csum", "guest_csum", "gso", "guest_tso4", "guest_tso6", "guest_ecn",
                       "guest_ufo", "host_tso4", "host_tso6", "host_ecn", "host_ufo")  # fmt: skip
                words += [f"{word}=off" for word in off]
        elif self != Shape():
            raise ValueError(f"queues, ring and offloads of the device are virtio-net's: {model}")
        return ",".join(words)


@dataclass(frozen=True)
class Knobs:
    """Settings of the guest's kernel, with its own defaults (HZ is 250).

    Sources: Documentation/admin-guide/sysctl/net.rst, Documentation/networking/napi.rst and
    scaling.rst, Documentation/ABI/testing/sysfs-class-net.
    """

    netdev_budget: int = 300
    netdev_budget_usecs: int = 8000
    dev_weight: int = 64
    rps: bool = False
    napi_weight: int = 64  # virtio-net only: its module is loaded again
    threaded: bool = False
    defer_hard_irqs: int = 0
    gro_flush_ns: int = 0
    busy_poll_us: int = 0  # busy_poll and busy_read, for sockets that are made afterwards
    rx_ring: int = 0  # by `ethtool -G`; 0: the driver's default
    gro: bool = True

    def commands(self, model: str, before: Knobs | None, queues: int = 1) -> list[str]:
        """Shell commands that make a guest with `before` (None: that of the boot) have these
        settings."""
        device = "/sys/class/net/eth0"
        lines = []
        before_weight = before.napi_weight if before else 64
        reloaded = self.napi_weight != before_weight
        if self.napi_weight != 64 and model != "virtio-net":
            raise ValueError(f"napi_weight is a parameter of virtio-net's driver, not of {model}'s")
        if reloaded:
            lines += _reload(self.napi_weight)
        old_ring = before.rx_ring if before else 0
        if self.rx_ring != old_ring:
            lines.append(f"ethtool -G eth0 rx {self.rx_ring or 256}")
        for name in ("netdev_budget", "netdev_budget_usecs", "dev_weight"):
            lines.append(f"echo {getattr(self, name)} >/proc/sys/net/core/{name}")
        for name in ("busy_poll", "busy_read"):
            lines.append(f"echo {self.busy_poll_us} >/proc/sys/net/core/{name}")
        mask = f"{1 << IRQ_VCPU:x}" if self.rps else "0"
        lines.append(f"for q in {device}/queues/rx-*; do echo {mask} >$q/rps_cpus; done")
        lines.append(f"echo {self.defer_hard_irqs} >{device}/napi_defer_hard_irqs")
        lines.append(f"echo {self.gro_flush_ns} >{device}/gro_flush_timeout")
        lines.append(f"echo {int(self.threaded)} >{device}/threaded")
        lines.append(f"ethtool -K eth0 gro {'on' if self.gro else 'off'}")
        return [*lines, *_pinning(self.threaded, queues)]


# What `parse` takes. The kernel takes no netdev_budget_usecs below two ticks of 4 ms.
RANGES: dict[str, range | tuple[int, ...]] = {
    "netdev_budget": range(1, 100_001),
    "netdev_budget_usecs": range(8000, 10_000_001),
    "dev_weight": range(1, 100_001),
    "rps": (0, 1),
    "napi_weight": range(1, 65),
    "threaded": (0, 1),
    "defer_hard_irqs": range(1001),
    "gro_flush_ns": range(1_000_000_001),
    "busy_poll_us": range(1_000_001),
    "rx_ring": range(4097),
    "gro": (0, 1),
    "queues": range(1, VCPUS + 1),
    "device_ring": (0, 256, 512, 1024),
    "offloads": (0, 1),
}
SHAPE_NAMES = ("queues", "device_ring", "offloads")


def parse(text: str) -> tuple[Shape, Knobs]:
    """Of NAME=VALUE, several by a space; others have their defaults, as all of "default" have.

    LabError for a name or a value that there is not.
    """
    values: dict[type, dict[str, int | bool]] = {Shape: {}, Knobs: {}}
    for word in [] if text == "default" else text.split():
        name, _, value = word.partition("=")
        if name not in RANGES:
            near = difflib.get_close_matches(name, RANGES, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise LabError(
                f"knobs: expected NAME=VALUE with one of {', '.join(RANGES)}, found {word!r}{hint}"
            )
        allowed = RANGES[name]
        if not value.isdecimal() or int(value) not in allowed:
            shown = (
                f"{allowed[0]} to {allowed[-1]}"
                if isinstance(allowed, range)
                else " or ".join(map(str, allowed))
            )
            raise LabError(f"knobs: {name}: expected {shown}, found {value!r}")
        kind = Shape if name in SHAPE_NAMES else Knobs
        is_switch = isinstance(getattr(kind, name), bool)
        values[kind][name] = bool(int(value)) if is_switch else int(value)
    return Shape(**values[Shape]), Knobs(**values[Knobs])


def settings(text: str, model: str) -> tuple[Shape, Knobs]:
    """As `parse`; Skip for what this model or its driver does not have."""
    shape, knobs = parse(text)
    if model != "virtio-net" and shape != Shape():
        raise Skip(f"{', '.join(SHAPE_NAMES)} are virtio-net's, not {model}'s")
    if model != "virtio-net" and knobs.napi_weight != 64:
        raise Skip(f"the poll weight of {model}'s driver is a constant, only virtio-net's is not")
    most = MODELS[model].most_ring
    if knobs.rx_ring > most:
        limit = f"at most {most}" if most else "none"
        raise Skip(f"rx_ring: {model}'s driver takes {limit} by ethtool")
    return shape, knobs


def _reload(weight: int) -> list[str]:
    """virtio-net's driver once more, with another weight; the interface is a new one."""
    return [
        "rmmod virtio_net",
        f"insmod /lib/modules/virtio_net.ko napi_weight={weight}",
        f"ip addr add {GUEST}/24 dev eth0",
        "ip link set eth0 up",
    ]


def _pinning(threaded: bool, queues: int) -> list[str]:
    """The card's interrupts, and the threads of threaded NAPI, on IRQ_VCPU; the interrupts of
    several queues on the vCPUs in turn."""
    mask = f"{1 << IRQ_VCPU:x}"
    names = "grep -E 'eth0|virtio[0-9]+-input' /proc/interrupts | cut -d: -f1"
    # Masks of up to three vCPUs read the same in decimal and in hexadecimal.
    wanted = f"$((1 << (i++ % {VCPUS})))" if queues > 1 else mask
    lines = [f"i=0; for n in $({names}); do echo {wanted} >/proc/irq/$n/smp_affinity; done"]
    if threaded:
        pin = f"taskset -p {mask} ${{p#/proc/}} >/dev/null"
        lines.append(
            "for p in /proc/[0-9]*; do if read -r name <$p/comm; then "
            f"case $name in napi/eth0*) {pin};; esac; fi; done"
        )
    return lines


# ---- counters ------------------------------------------------------------------------------------
@dataclass
class NicCounters:
    """Totals of the guest's kernel. `polls` is device → packets in a poll → how many polls;
    CPU times are in ticks of 10 ms, as the guest sees them."""

    packets: int = 0
    dropped: int = 0  # by the driver or the card, of what had reached it
    interrupts: int = 0
    softirqs: int = 0
    squeezed: int = 0  # runs of the softirq that ended with work left
    backlog_dropped: int = 0
    udp_datagrams: int = 0
    udp_overflows: int = 0  # datagrams that found the socket's buffer full
    busy: int = 0
    softirq: int = 0
    ticks: int = 0
    polls: dict[str, Counter] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> NicCounters:
        """What lab-count prints; LabError when a part is missing."""
        seen = cls()
        cpus, udp_names, parts = 0, None, set()
        for line in text.replace("\r", "").splitlines():
            words = line.split()
            if not words:
                continue
            part = words[0].rstrip(":")
            if line.lstrip().startswith("CPU0"):
                cpus = len(words)
                continue
            if part == "softnet":
                seen.backlog_dropped += int(words[2], 16)
                seen.squeezed += int(words[3], 16)
            elif part == "NET_RX":
                seen.softirqs = sum(map(int, words[1:]))
            elif part == "Udp":
                if udp_names is None:
                    udp_names = words[1:]
                    continue
                values = dict(zip(udp_names, map(int, words[1:]), strict=True))
                seen.udp_datagrams = values["InDatagrams"]
                seen.udp_overflows = values["RcvbufErrors"]
            elif part == "cpu":
                ticks = list(map(int, words[1:9]))
                seen.ticks, seen.softirq = sum(ticks), ticks[6]
                # Neither idle nor waiting for a disk.
                seen.busy = seen.ticks - ticks[3] - ticks[4]
            elif part == "rx_packets":
                seen.packets = int(words[1])
            elif part.startswith("rx_"):
                seen.dropped += int(words[1])
            elif found := re.match(
                r"\{ dev_name: (\S+)\s*, work:\s*(\d+) \} hitcount:\s*(\d+)", line.strip()
            ):
                polls = seen.polls.setdefault(found[1], Counter())
                polls[int(found[2])] += int(found[3])
                continue
            elif part.isdigit() and cpus:
                seen.interrupts += sum(map(int, words[1 : 1 + cpus]))
                part = "interrupts"
            parts.add(part)
        missing = {"softnet", "NET_RX", "Udp", "cpu", "rx_packets", "interrupts"} - parts
        if missing:
            raise LabError(f"the guest's counters lack {', '.join(sorted(missing))}:\n{text}")
        return seen

    def __sub__(self, before: NicCounters) -> NicCounters:
        """What was counted since `before`; LabError when a counter went back."""
        result = NicCounters()
        for each in fields(self):
            if each.name == "polls":
                continue
            value = getattr(self, each.name) - getattr(before, each.name)
            if value < 0:
                raise LabError(f"the guest's counter {each.name} went back by {-value}")
            setattr(result, each.name, value)
        for device, polls in self.polls.items():
            found = Counter(polls)
            found.subtract(before.polls.get(device, Counter()))
            if min(found.values(), default=0) < 0:
                raise LabError(f"the guest's polls of {device} went back")
            result.polls[device] = +found
        return result

    def busy_cpus(self, vcpus: int = VCPUS) -> float:
        """CPUs that were busy, as a guest of so many counts."""
        return self.busy / self.ticks * vcpus if self.ticks else 0.0

    def softirq_cpus(self, vcpus: int = VCPUS) -> float:
        """CPUs that served softirqs, as a guest of so many counts."""
        return self.softirq / self.ticks * vcpus if self.ticks else 0.0


# ---- the guest -----------------------------------------------------------------------------------
def _guest_class() -> type:
    """A guest under QEMU that takes commands; tests/lib is imported when this is called."""
    harness.lib()
    guest = importlib.import_module("lib.guest")

    class NicGuest(guest.Guest, guest.Commands):
        attached = False

    return NicGuest


class Nic:
    """A guest that runs and is reachable from `space` at `GUEST`. `guest` takes commands too."""

    def __init__(self, model: str, shape: Shape, guest: object, space: object):
        self.model, self.shape, self.guest, self.space = model, shape, guest, space
        self.knobs: Knobs | None = None
        self._servers: dict[tuple, int] = {}

    @property
    def pid(self) -> int:
        """QEMU's process."""
        return self.guest.pid

    def apply(self, knobs: Knobs) -> None:
        """Gives the kernel these settings; CommandFailed when it refuses one."""
        if knobs == self.knobs:
            return
        lines = knobs.commands(self.model, self.knobs, self.shape.queues)
        self.guest.run("set -e; " + "; ".join(lines), 60)
        before, self.knobs = self.knobs, knobs
        if before is None or (before.napi_weight, before.rx_ring) != (
            knobs.napi_weight,
            knobs.rx_ring,
        ):
            # The interface has gone down and up again; some cards take seconds for that.
            self.wait()

    def wait(self) -> None:
        """Until the guest answers."""
        harness.until(f"{self.model}'s answer", lambda: self.space.pings(GUEST), 30)

    def serve(self, protocol: str, buffer_kib: int = 0, vcpu: int = 1) -> int:
        """The port of a sink (paced.c) that runs on this vCPU, with a receive buffer of so many KiB
        (SO_RCVBUF, which the kernel doubles; 0: the kernel's default)."""
        busy = self.knobs.busy_poll_us if self.knobs else 0
        key = (protocol, buffer_kib, vcpu, busy)
        if key not in self._servers:
            port = FIRST_PORT + len(self._servers)
            ask = f"grep -q ':{port:04X} ' /proc/net/{protocol}"
            self.guest.run(
                # Its output is closed: what holds the command's output keeps the command open.
                f"taskset {1 << vcpu:x} paced sink {protocol} {port} {buffer_kib << 10} "
                ">/dev/null 2>&1 & "
                f"for i in $(seq 200); do {ask} && exit 0; usleep 20000; done; exit 1",
                30,
            )
            self._servers[key] = port
        return self._servers[key]

    def counters(self) -> NicCounters:
        """What the guest's kernel has counted so far."""
        return NicCounters.parse(self.guest.run(COUNT, 60, check=False).text)


@contextlib.contextmanager
def open_nic(model: str, shape: Shape, space: object, nice: int | None = None) -> Iterator[Nic]:
    """A guest with one card of a model, on a tap of the namespace `space`, when it answers."""
    found = need(model)
    space.tap(TAP, f"{HOST}/24")
    harness.lib()
    backend = f"tap,id=card,ifname={TAP},script=no,downscript=no,vhost=off"
    if shape.queues > 1:
        space.ip("link", "del", TAP)
        space.ip("tuntap", "add", "dev", TAP, "mode", "tap", "vnet_hdr", "multi_queue")
        space.ip("address", "add", f"{HOST}/24", "dev", TAP)
        space.ip("link", "set", TAP, "up")
        backend += f",queues={shape.queues}"
    line = harness.linux_cmdline("nic", "", f"net={GUEST}/24")
    extra = ["-smp", VCPUS, "-netdev", backend]
    extra += ["-device", f"{shape.device(model)},netdev=card,mac={MAC}"]
    guest = _guest_class()(
        found / "vmlinux",
        machine="q35",
        memory_mib=MEMORY_MIB,
        append=line,
        initrd=found / "initramfs.cpio",
        extra=extra,
        name=model,
        netns=space,
        nice=nice,
    )
    with guest:
        guest.wait_control(BOOT_S)
        nic = Nic(model, shape, guest, space)
        guest.run(
            f"mount -t tracefs t {TRACE}; "
            f"echo 'hist:keys=dev_name,work:size=2048' >{_POLLS}/trigger"
        )
        if shape.queues > 1:
            guest.run(f"ethtool -L eth0 combined {shape.queues}")
        nic.wait()
        yield nic


def packets_of(polls: Mapping[int, int]) -> int:
    """Packets that these polls took."""
    return sum(work * count for work, count in polls.items())


def main() -> None:
    """Builds the guest."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tombolo_lab.workloads.nics",
        description=f"Builds the Linux guest with drivers for {', '.join(MODELS)}.",
    )
    parser.add_argument("--out", type=Path, help="default: build/guest-nics")
    options = parser.parse_args()
    try:
        made = build(options.out or folder())
    except LabError as error:
        sys.exit(f"nics: {error}")
    print(f"{made}: {(made / 'version').read_text().strip()}")


if __name__ == "__main__":
    main()
