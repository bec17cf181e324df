"""One switch core between two vhost-user ports: Tombolo, testpmd's io forwarder, Open vSwitch.

DPDK's testpmd with two virtio-user ports stands for the guests. On CPU 0 it sends out of one port
what it receives from the other, so 768 frames circulate through the forwarder, which has CPU 1.
The rate is what leaves the forwarder, both directions together. The generator has one core too, so
the rate is a lower bound; cycles per frame on the forwarder's core are measured beside it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tombolo_lab import LabError, harness
from tombolo_lab.workloads import Measure, Parameter, Skip, Workload, tools

FORWARDER_CPU, GENERATOR_CPU = 1, 0
MACS = ("02:00:00:00:01:00", "02:00:00:00:01:01")
# Bursts of 32 that each port is primed with; 2 ports × 12 × 32 frames circulate.
PRIME_BURSTS = 12
HUGEPAGES = 700
WARM_UP_S = 0.5
# A polling side that had less of its core than this was disturbed by other work.
UNDISTURBED_SHARE = 0.97
FABRIC = """\
name = "bench"
[worker.core]
cpu = {cpu}
[network.lan]
worker = "core"
"""


class Tombolo:
    """`tombolo up` with two vhost-user ports: learning, source guard and counters are on."""

    generator_serves = False

    def __init__(self, folder: Path):
        text = FABRIC.format(cpu=FORWARDER_CPU)
        for number, mac in enumerate(MACS):
            text += f'[port.p{number}]\nkind = "vhost-user"\nsocket = "{folder}/v{number}"\n'
            text += f'mac = "{mac}"\n'
        self.fabric = harness.fabric_of(folder, text)
        self.process = self.fabric.process
        try:
            harness.until("tombolo's sockets", lambda: self.is_ready(folder), 20)
        except BaseException:
            self.close()
            raise

    def is_ready(self, folder: Path) -> bool:
        if not self.process.alive():
            raise LabError(f"tombolo ended:\n{self.process.tail()}")
        return has_sockets(folder)

    def cpu_seconds(self) -> float:
        return self.process.cpu_seconds()

    def begin(self) -> None:
        """Nothing: it forwards from its start."""

    def reset(self) -> None:
        """Nothing: its work is not counted in cycles."""

    def work_cycles(self) -> float | None:
        return None

    def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            self.process.stop(5)
        self.process.kill()


class TestpmdIo:
    """testpmd's io mode, the least that a forwarder can do over vhost: it reads no address."""

    generator_serves = False

    def __init__(self, folder: Path):
        from tombolo_lab.workloads import dpdk

        vdevs = [f"net_vhost{number},iface={folder}/v{number},queues=1" for number in (0, 1)]
        options = ["--forward-mode=io", "--record-core-cycles", "--total-num-mbufs=16384"]
        self.process = dpdk.Testpmd(folder, "fwd", FORWARDER_CPU, vdevs, options)
        try:
            harness.until("testpmd's sockets", lambda: has_sockets(folder), 20)
        except BaseException:
            self.process.kill()
            raise

    def cpu_seconds(self) -> float:
        return self.process.cpu_seconds()

    def begin(self) -> None:
        self.process.command("start")

    def reset(self) -> None:
        """Nothing: its count begins with `start`, and idle turns are not in it."""

    def work_cycles(self) -> float | None:
        found = re.search(r"CPU cycles/packet=([\d.]+)", self.process.command("stop"))
        return float(found[1]) if found else None

    def close(self) -> None:
        self.process.kill()


class Ovs:
    """Open vSwitch: one polling thread, two dpdkvhostuserclient ports, NORMAL switching."""

    generator_serves = True

    def __init__(self, folder: Path):
        from tombolo_lab.workloads import dpdk

        sockets = [f"{folder}/v0", f"{folder}/v1"]
        self.switch = dpdk.OpenVSwitch(folder / "ovs", FORWARDER_CPU, sockets)

    def cpu_seconds(self) -> float:
        return self.switch.processes[-1].cpu_seconds()

    def begin(self) -> None:
        """Nothing: it forwards from its start."""

    def reset(self) -> None:
        self.switch.appctl("dpif-netdev/pmd-stats-clear")

    def work_cycles(self) -> float | None:
        text = self.switch.appctl("dpif-netdev/pmd-stats-show").split("main thread")[0]
        found = re.search(r"avg processing cycles per packet:\s*([\d.]+)", text)
        return float(found[1]) if found else None

    def close(self) -> None:
        self.switch.close()


KINDS = {"tombolo": Tombolo, "testpmd_io": TestpmdIo, "ovs_dpdk": Ovs}


def has_sockets(folder: Path) -> bool:
    return all((folder / name).exists() for name in ("v0", "v1"))


def generator(folder: Path, serves: bool, more: Sequence[str] = ()) -> object:
    """The testpmd that frames circulate through; `more` are further options of it."""
    from tombolo_lab.workloads import dpdk

    server = ",server=1" if serves else ""
    vdevs = [
        f"net_virtio_user{number},path={folder}/v{number},queues=1,queue_size=256,mac={mac}{server}"
        for number, mac in enumerate(MACS)
    ]
    peers = [f"--eth-peer=0,{MACS[1]}", f"--eth-peer=1,{MACS[0]}"]
    options = ["--forward-mode=io", "--total-num-mbufs=16384", *peers, *more]
    return dpdk.Testpmd(folder, "gen", GENERATOR_CPU, vdevs, options)


class Forwarder(Workload):
    """What one forwarding core carries."""

    name = "forwarder"
    doc = (
        "Frames circulate between two vhost-user ports through one forwarding core: Tombolo, "
        "testpmd's io forwarder, or Open vSwitch with DPDK."
    )
    parameters = {
        "forwarder": Parameter("What forwards", str, tuple(KINDS), default="tombolo", setup=True),
        "size": Parameter(
            "Bytes of a frame", int, low=64, high=1500, default=64, unit="B", setup=True
        ),
        "seconds": Parameter("Duration of the load", float, low=0.1, high=600, default=2, unit="s"),
        "idle_s": Parameter(
            "How long Tombolo's idle CPU is measured", float, low=0.1, high=600, default=2, unit="s"
        ),
    }
    measures = {
        "mpps": Measure("Frames that left the forwarder", "10^6/s", "higher"),
        "cycles_all": Measure("All cycles of the forwarder's core per frame", "cycles", "lower"),
        "cycles_work": Measure(
            "Cycles per frame that the forwarder counts as work", "cycles", "lower"
        ),
        "core_share": Measure("Part of its core that the forwarder used", "", ""),
        "generator_share": Measure("Part of its core that the generator used", "", ""),
        "idle_core_pct": Measure("CPU of Tombolo with no traffic, in % of a core", "%", "lower"),
    }
    needs = ("root", "two CPUs", "DPDK's testpmd", "Open vSwitch with DPDK", "hugepages")

    def check(self, cell: dict) -> None:
        harness.need_root()
        harness.program()
        harness.need_program("dpdk-testpmd", "dpdk")
        if cell["forwarder"] == "ovs_dpdk":
            for name in ("ovsdb-server", "ovs-vsctl", "/usr/lib/openvswitch-switch-dpdk/"
                         "ovs-vswitchd-dpdk"):  # fmt: skip
                harness.need_program(name, "openvswitch-switch-dpdk")
        if len(os.sched_getaffinity(0)) < 2:
            raise Skip("needs two CPUs: one for the generator, one for the forwarder")

    def setup_seconds(self, cell: dict) -> float:
        return 7 if cell["forwarder"] == "ovs_dpdk" else 3

    def seconds(self, cell: dict) -> float:
        return WARM_UP_S + cell["seconds"] + cell["idle_s"] * (cell["forwarder"] == "tombolo") + 0.5

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[tuple]:
        from tombolo_lab.workloads import dpdk

        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(harness.scratch())
            stack.enter_context(dpdk.hugepages(folder, HUGEPAGES))
            stack.enter_context(harness.group_first())
            forwarder = KINDS[cell["forwarder"]](folder)
            stack.callback(forwarder.close)
            load = stack.enter_context(generator(folder, forwarder.generator_serves))
            # Frames that are sent before the backend has the rings would be lost.
            harness.until("the ports' links", lambda: is_up(load), 20, every=0.1)
            yield forwarder, load

    def measure(self, setup: tuple, cell: dict) -> dict:
        forwarder, load = setup
        idle = None
        if cell["forwarder"] == "tombolo":
            time.sleep(WARM_UP_S)
            idle = 100 * harness.core_share(forwarder.cpu_seconds, cell["idle_s"])
        forwarder.begin()
        load.command(f"set txpkts {cell['size']}", 30)
        load.command(f"start tx_first {PRIME_BURSTS}")
        try:
            return self.measured(forwarder, load, cell) | {"idle_core_pct": idle}
        finally:
            load.command("stop")

    @staticmethod
    def measured(forwarder: object, load: object, cell: dict) -> dict:
        """Frames and cycles while they circulate."""
        time.sleep(WARM_UP_S)
        forwarder.reset()
        first, busy, made = load.stats(), forwarder.cpu_seconds(), load.cpu_seconds()
        time.sleep(cell["seconds"])
        last = load.stats()
        busy, made = forwarder.cpu_seconds() - busy, load.cpu_seconds() - made
        frames, took = last[0] - first[0], last[2] - first[2]
        if frames <= 0:
            raise tools.ToolError(f"no frame came through\n{load.tail(15)}")
        share, generator_share = busy / took, made / took
        # Ours may sleep; the others poll, and so does the generator.
        polls = generator_share if cell["forwarder"] == "tombolo" else min(share, generator_share)
        found = {
            "mpps": frames / took / 1e6,
            "cycles_all": share * harness.tsc_khz() * 1000 * took / frames,
            "cycles_work": forwarder.work_cycles(),
            "core_share": share,
            "generator_share": generator_share,
        }
        if polls < UNDISTURBED_SHARE:
            found["disturbed"] = f"a polling side had {polls:.2f} of its core"
        return found


def is_up(load: object) -> bool:
    """Whether both links of the generator are up."""
    return load.command("show port summary all").count(" up") >= 2
