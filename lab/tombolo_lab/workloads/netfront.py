"""The poll budget and other knobs of a Linux domain's kernel on Xen: those of its netfront.

The way is a generator in dom0 -> netback or our backend -> the domain's netfront -> a sink in the
domain. Real Xen runs under emulation (`xen`); one boot serves all points, and its speed varies
tenfold from boot to boot, so compare within one repetition. `nics` says what each knob bounds and
what is counted; netfront's driver polls 64 packets at most, and that is a constant. The domain has
one processor, so the sink always shares it with the polls.

Commands reach the domain by a CGI program of its busybox httpd, beside the load's own network.

Import what `open` imports within it only: it loads the repository's test harness.
"""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterator

from tombolo_lab import harness
from tombolo_lab.workloads import (
    SAMPLES_OF,
    Measure,
    Parameter,
    Skip,
    Workload,
    cards,
    network,
    nics,
    paced,
    tools,
    xen,
)

MODEL = "xen-netfront"
# Packets of a poll of netfront (drivers/net/xen-netfront.c gives netif_napi_add its default).
WEIGHT = 64
MEMORY_MIB = 128
VCPUS = 1
DOMAIN, VIF, GUEST = "knobs", "00:16:3e:00:00:51", "10.87.0.51"
SIZE = 1470
PING_S = 0.02
BOOT_S, SWITCH_S, POINT_S = 60.0, 25.0, 6.0
CGI = """#!/bin/busybox sh
# Runs what is posted; the last line is its exit code.
printf 'Content-Type: text/plain\\r\\n\\r\\n'
head -c "$CONTENT_LENGTH" >/tmp/cgi.$$
sh /tmp/cgi.$$ 2>&1 </dev/null
echo "exit $?"
rm /tmp/cgi.$$
"""
SETUP = f"""ip addr add {GUEST}/24 dev eth0
ip link set eth0 up
mount -t tracefs t {nics.TRACE}
echo 'hist:keys=dev_name,work:size=2048' >{nics.TRACE}/events/napi/napi_poll/trigger
httpd -h /srv
while :; do sleep 1000; done
"""


def knobs_of(text: str) -> nics.Knobs:
    """As `nics.parse`; Skip for what netfront's driver does not have."""
    shape, knobs = nics.parse(text)
    if shape != nics.Shape() or knobs.napi_weight != WEIGHT or knobs.rx_ring:
        raise Skip("queues, rings, offloads and the driver's weight are not knobs of netfront here")
    return knobs


class Domain:
    """The Linux domain, as `nics.Nic` wants its guest (`run`) and its namespace (`pings`)."""

    def __init__(self, xenhost: object):
        self.xen = xenhost

    def run(self, script: str, seconds: float = 60, check: bool = True) -> object:
        """Runs a script in the domain; ToolError where it fails or no answer comes."""
        ask = f"wget -q -O - --post-data {shlex.quote(script)} http://{GUEST}/cgi-bin/run"
        found = self.xen.run(ask, seconds, check=False)
        text, _, code = found.text.rpartition("exit ")
        if found.code or not code.strip().isdigit():
            raise tools.ToolError(f"no answer from the domain: {found.text[-300:]!r}")
        if check and int(code):
            raise tools.ToolError(f"in the domain: {text.strip()[-300:]}")
        return found._replace(code=int(code), text=text)

    def pings(self, _: str) -> bool:
        return self.xen.run(f"/usr/bin/ping -n -q -c 1 -W 1 {GUEST}", check=False).code == 0


class Bed:
    """dom0 of one boot with one backend at work, and the domain, which is started again with each
    other backend."""

    def __init__(self, dom0: object):
        self.dom0, self.xen = dom0, dom0.xen
        self.nic: nics.Nic | None = None
        self.backend = ""

    def use(self, backend: str) -> nics.Nic:
        if backend == self.backend and self.nic:
            return self.nic
        if self.nic:
            self.dom0.destroy(DOMAIN)
            self.nic = None
        self.dom0.use(backend)
        self.backend = backend
        self.xen.run(f"arp -i {self.dom0.interface()} -s {GUEST} {VIF}")
        self.xen.run(f"xl create -q /knobs/{backend}.cfg", 120)
        domain = Domain(self.xen)
        harness.until("the domain answers", lambda: domain.pings(GUEST), 90)
        harness.until("its httpd answers", lambda: answers(domain), 60)
        self.nic = nics.Nic(MODEL, nics.Shape(), domain, domain)
        return self.nic


def answers(domain: Domain) -> bool:
    try:
        return domain.run("true", 20).code == 0
    except tools.ToolError:
        return False


class Netfront(Workload):
    """Points share one boot: the domain's kernel takes the knobs while it runs."""

    name = "netfront"
    doc = (
        "Sends datagrams to a Linux domain on emulated Xen, and varies the knobs of its kernel: "
        "poll budgets, deferred interrupts, threaded NAPI, busy polling."
    )
    needs = ("root", "QEMU", "build/xen of ./x xen")
    parameters = {
        "backend": Parameter("dom0's end of the network", str, xen.BACKENDS, default="netback"),
        "knobs": Parameter(
            "Settings of the domain's kernel: default, or NAME=VALUE, several by a space; names as "
            "of the workload nics, but queues, rings, offloads and napi_weight",
            str, default="default",
        ),
        "offered": Parameter(
            "Offered rate: 20M (bits a second of payload) or 400pps; empty: as fast as it goes",
            str, default="",
        ),
        "buffer_kib": Parameter(
            "Receive buffer of the sink's socket (SO_RCVBUF); 0: the kernel's default", int, low=0,
            high=64 << 10, default=0, unit="KiB",
        ),
        "seconds": Parameter("Duration of the load", float, low=0.1, high=60, default=1, unit="s"),
    }  # fmt: skip
    measures = {
        name: cards.Nics.measures[name]
        for name in (
            "mbit_s", "port_frames_s", "sent_s", "arrived_s", "unsent", "loss", "loss_port",
            "loss_socket", "packets_per_poll", "full_polls", "squeezed_s", "interrupts_s",
            "inside_softirq_cpus", "inside_cpus",
        )
    } | {
        "rtt_us": Measure("Mean round trip of a ping during the load", "µs", "lower"),
        "hypercalls_per_frame": Measure("Hypercalls of dom0 per packet", "", "lower"),
    }  # fmt: skip

    def check(self, cell: dict) -> None:
        knobs_of(cell["knobs"])
        paced.check("udp", SIZE, cell["offered"], cell["seconds"])
        harness.need_program("ethtool")
        xen.need()

    def setup_seconds(self, cell: dict) -> float:
        return BOOT_S + SWITCH_S

    def seconds(self, cell: dict) -> float:
        return cell["seconds"] + POINT_S

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[Bed]:
        from tombolo_lab.workloads import xenhost

        with harness.scratch() as folder, xenhost.booted(folder, files()) as dom0:
            yield Bed(dom0)

    def measure(self, bed: Bed, cell: dict) -> dict:
        nic = bed.use(cell["backend"])
        nic.apply(knobs_of(cell["knobs"]))
        port = nic.serve("udp", cell["buffer_kib"], 0)
        return loaded(bed, nic, cell, port)


def loaded(bed: Bed, nic: nics.Nic, cell: dict, port: int) -> dict:
    """One load, and everything that is counted meanwhile."""
    seconds, rate = cell["seconds"], paced.rate_of(cell["offered"], SIZE)
    calls, before = bed.dom0.hypercalls(), nic.counters()
    patience = 60 + 10 * seconds
    pings = math.ceil(seconds / PING_S)
    pinging = bed.xen.start(f"/usr/bin/ping -n -q -i {PING_S} -c {pings} {GUEST}")
    said = bed.xen.run(
        f"paced send udp {GUEST} {port} {SIZE} {rate} {seconds}", patience, check=False
    ).text
    round_trips = bed.xen.finish(pinging, patience, check=False).text
    seen, after = nic.counters() - before, bed.dom0.hypercalls()
    done = paced.row_of(said)
    polls, weight = cards.polls_taken(seen, nic.knobs, WEIGHT)
    took = max(done["sent_seconds"], seconds)
    row = network.row_of(done, "udp", seconds)
    found = {name: row.get(name) for name in Netfront.measures}
    found |= cards.losses(done, seen)
    found |= cards.guest_row(seen, took, VCPUS, polls, weight)
    return found | {
        "rtt_us": mean_us(round_trips),
        "hypercalls_per_frame": sum(after[what] - calls[what] for what in after) / seen.packets
        if seen.packets
        else None,
        "samples": {"packets_per_poll": cards.thinned(polls)} if polls else {},
        "notes": {SAMPLES_OF: {"packets_per_poll": sum(polls.values())}} if polls else {},
    }


def mean_us(text: str) -> float | None:
    """The mean that ping printed, in microseconds; None where nothing came back."""
    _, found, numbers = text.partition("min/avg/max")
    return 1000 * float(numbers.split("=")[1].split("/")[1]) if found else None


def files() -> dict[str, bytes]:
    """What dom0 has for this: the generator, the domain's kernel and ramdisk, and its settings."""
    from tombolo_lab.workloads import xenhost

    program = paced.program().read_bytes()
    inside = {
        "srv/cgi-bin/run": CGI.encode(),
        nics.COUNT.lstrip("/"): nics.COUNT_SCRIPT.encode(),
        "bin/paced": program,
    }
    ramdisk, kernel = xenhost.linux_guest(
        xenhost.linux_init(SETUP), {}, ["ethtool"], files=inside
    )
    found = xenhost.fabric_files(xenhost.fabric({DOMAIN: (VIF, GUEST)}))
    found |= {"bin/paced": program, "knobs/kernel": kernel, "knobs/ramdisk": ramdisk}
    found |= xenhost.programs("ping")
    for backend in xen.BACKENDS:
        vif = "bridge=br0" if backend == "netback" else "script=/bin/true"
        text = xenhost.xl_config(
            DOMAIN, VIF, MEMORY_MIB, kernel="/knobs/kernel", ramdisk="/knobs/ramdisk", vif=vif
        )
        found[f"knobs/{backend}.cfg"] = text.encode()
    return found
