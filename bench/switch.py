#!/usr/bin/env python3
"""One switch core between two vhost-user ports, beside testpmd's io forwarder and Open vSwitch with DPDK.

usage: ./x bench switch [--repeats N] [--seconds S] [--only PEER[,PEER]] [--sizes 64,1500]

DPDK's testpmd with two virtio-user ports is the guest. On CPU 0 it sends out of one port what it receives from the other, so
768 frames circulate through the forwarder, which has CPU 1. The rate is what leaves the forwarder, both directions together.
The generator has only one core too, so the rate is a lower bound for the forwarder. Therefore the table also has the cycles
per frame on the forwarder's core (work only, as each forwarder counts it, and the whole core).

    tombolo      `tombolo up` with two vhost-user ports: learning, source guard, counters on
    testpmd_io   testpmd's io forwarder over two vhost ports: reads no address, counts little
    ovs_dpdk     Open vSwitch, one PMD, two dpdkvhostuserclient ports, NORMAL

Peers take turns within each repeat, so that a drift of the machine affects all alike. A measurement in which a polling side
lost its core to other work is repeated (both are kept in the raw data). Needs root (hugepages) and two CPUs.
"""

import argparse
import contextlib
import os
import re
import time

from common import FIRST, BenchError, OpenVSwitch, Process, Results, Testpmd, fabric_of, note, private_folder, ratio, run_bench, tsc_khz, until
from lib.process import core_share

FORWARDER_CPU = 1
GENERATOR_CPU = 0
MACS = ("02:00:00:00:01:00", "02:00:00:00:01:01")
# Bursts of 32 that each port is primed with; 2 ports * 12 * 32 frames circulate.
PRIME_BURSTS = 12
HUGEPAGES = 700
WARM_UP_S = 0.5
# A measurement during which a polling side had less of its core than this is repeated, up to so many times.
UNDISTURBED_SHARE = 0.97
ATTEMPTS = 4


def tombolo_file(folder):
    """The fabric that is measured: two ports, their guard on, and a worker on the forwarder's CPU."""
    ports = "".join(f'\n[port.{name}]\nkind = "vhost-user"\nsocket = "{folder}/v{number}"\nmac = "{MACS[number]}"\n'
                    for number, name in enumerate(("a", "b")))
    return f"""\
name = "bench"

[worker.core]
cpu = {FORWARDER_CPU}

[network.lan]
worker = "core"
{ports}"""


class Tombolo:
    """Ours. All that depends on the program's command line is in this class."""

    generator_serves = False

    def __init__(self, folder):
        program = os.environ.get("TOMBOLO_BENCH_SWITCH")
        if program:
            # A stand-alone forwarder for experiments: PROGRAM SOCKET SOCKET CPU.
            self.process = Process([program, f"{folder}/v0", f"{folder}/v1", FORWARDER_CPU], name="tombolo", nice=FIRST)
        else:
            self.process = fabric_of(folder, tombolo_file(folder)).process
        until("tombolo's sockets", lambda: self.check() and all((folder / name).exists() for name in ("v0", "v1")), 20)

    def check(self):
        if not self.process.alive():
            raise BenchError(f"tombolo ended ({self.process.popen.returncode}):\n{self.process.tail()}")
        return True

    def cpu_seconds(self):
        return self.process.cpu_seconds()

    def reset(self):
        pass

    def work_cycles(self, _frames):
        """Cycles a frame: ours has no cycle counter of its own in the data path, so all its core spent stands for it."""
        return None

    def close(self):
        with contextlib.suppress(TimeoutError):
            self.process.stop(5)
        self.process.kill()


class TestpmdIo:
    """testpmd as forwarder: io mode, the least a forwarder can do over vhost."""

    generator_serves = False

    def __init__(self, folder):
        vdevs = [f"net_vhost{number},iface={folder}/v{number},queues=1" for number in (0, 1)]
        self.process = Testpmd(folder, "fwd", FORWARDER_CPU, vdevs,
                               ["--forward-mode=io", "--record-core-cycles", "--total-num-mbufs=16384"])
        try:
            until("testpmd's sockets", lambda: all((folder / name).exists() for name in ("v0", "v1")), 20)
            self.process.command("start")
        except BaseException:
            self.process.kill()
            raise

    def cpu_seconds(self):
        return self.process.cpu_seconds()

    def reset(self):
        pass

    def work_cycles(self, _frames):
        match = re.search(r"CPU cycles/packet=([\d.]+)", self.process.command("stop"))
        return float(match[1]) if match else None

    def close(self):
        self.process.kill()


class Ovs:
    """Open vSwitch: the switch to be compared with."""

    generator_serves = True

    def __init__(self, folder):
        self.switch = OpenVSwitch(folder / "ovs", FORWARDER_CPU, [f"{folder}/v0", f"{folder}/v1"])

    def cpu_seconds(self):
        return self.switch.processes[-1].cpu_seconds()

    def reset(self):
        self.switch.appctl("dpif-netdev/pmd-stats-clear")

    def work_cycles(self, _frames):
        text = self.switch.appctl("dpif-netdev/pmd-stats-show").split("main thread")[0]
        match = re.search(r"avg processing cycles per packet:\s*([\d.]+)", text)
        return float(match[1]) if match else None

    def close(self):
        self.switch.close()


PEERS = {"tombolo": Tombolo, "testpmd_io": TestpmdIo, "ovs_dpdk": Ovs}


def generator(folder, serves):
    vdevs = []
    for number, mac in enumerate(MACS):
        vdevs.append(f"net_virtio_user{number},path={folder}/v{number},queues=1,queue_size=256,mac={mac}" + (",server=1" if serves else ""))
    options = ["--forward-mode=io", "--total-num-mbufs=16384", f"--eth-peer=0,{MACS[1]}", f"--eth-peer=1,{MACS[0]}"]
    return Testpmd(folder, "gen", GENERATOR_CPU, vdevs, options)


def measure(name, folder, size, seconds):
    """One peer, one size: frames a second out of the forwarder, and what they cost its core."""
    for socket in ("v0", "v1"):
        with contextlib.suppress(FileNotFoundError):
            (folder / socket).unlink()
    forwarder = PEERS[name](folder)
    try:
        with generator(folder, forwarder.generator_serves) as gen:
            gen.command(f"set txpkts {size}", 30)
            # A link is up when the backend has the rings; before that the frames of the first burst would be lost.
            until("the ports' links", lambda: gen.command("show port summary all").count(" up") >= 2, 20, every=0.1)
            gen.command(f"start tx_first {PRIME_BURSTS}")
            time.sleep(WARM_UP_S)
            forwarder.reset()
            first, busy, generated = gen.stats(), forwarder.cpu_seconds(), gen.cpu_seconds()
            time.sleep(seconds)
            last, busy_after, generated_after = gen.stats(), forwarder.cpu_seconds(), gen.cpu_seconds()
            frames, took = last[0] - first[0], last[2] - first[2]
            if frames <= 0:
                raise BenchError(f"{name}, {size} bytes: no frame came through\n{gen.tail(15)}")
            share, generator_share = (busy_after - busy) / took, (generated_after - generated) / took
            # Who polls and did not have its core was disturbed by something else on this machine. Ours may sleep instead.
            needed = [generator_share] + ([] if name == "tombolo" else [share])
            return {
                "disturbed": min(needed) < UNDISTURBED_SHARE,
                "mpps": frames / took / 1e6,
                "cycles_all": share * tsc_khz() * 1000 * took / frames,
                "cycles_work": forwarder.work_cycles(frames),
                "core_share": share,
                "generator_share": generator_share,
            }
    finally:
        forwarder.close()


def measure_idle(folder, seconds):
    """CPU that ours takes with both ports attached and no traffic, in percent of a core."""
    for socket in ("v0", "v1"):
        with contextlib.suppress(FileNotFoundError):
            (folder / socket).unlink()
    forwarder = Tombolo(folder)
    try:
        with generator(folder, False) as gen:
            until("the ports' links", lambda: gen.command("show port summary all").count(" up") >= 2, 20, every=0.1)
            time.sleep(WARM_UP_S)
            return 100 * core_share(forwarder.cpu_seconds, seconds)
    finally:
        forwarder.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--only", default=",".join(PEERS), help=f"some of {', '.join(PEERS)}")
    parser.add_argument("--sizes", default="64,1500")
    options = parser.parse_args()
    peers, sizes = options.only.split(","), [int(size) for size in options.sizes.split(",")]
    if set(peers) - set(PEERS):
        parser.error(f"--only: there are {', '.join(PEERS)}")
    if len(os.sched_getaffinity(0)) < 2:
        raise BenchError("two CPUs are needed: one for the generator, one for the forwarder")
    results = Results("switch")
    idle, disturbed = None, 0
    with private_folder(HUGEPAGES) as folder:
        for repeat in range(options.repeats):
            for size in sizes:
                for name in peers:
                    for attempt in range(ATTEMPTS):
                        row = measure(name, folder, size, options.seconds)
                        counted = not row["disturbed"] or attempt == ATTEMPTS - 1
                        results.add(peer=name, size=size, repeat=repeat, counted=counted, **row)
                        if counted:
                            break
                    work = f"{row['cycles_work']:.0f}" if row["cycles_work"] else "-"
                    disturbed += row["disturbed"]
                    note(f"{repeat + 1}/{options.repeats} {size:5} B {name:11} {row['mpps']:6.2f} Mpps, cycles a frame {work} work, {row['cycles_all']:.0f} all"
                         + (" (disturbed)" if row["disturbed"] else ""))
        if "tombolo" in peers:
            idle = measure_idle(folder, options.idle_seconds)
            results.add(peer="tombolo", idle_core_pct=idle)
    print(f"{'peer':12} {'bytes':>5} {'Mpps':>7} {'min':>7} {'max':>7} {'work':>6} {'all':>6}   (medians of {options.repeats}; cycles a frame)")
    ratios, rates, cycles = {}, {}, {}
    for size in sizes:
        for name in peers:
            match = {"peer": name, "size": size, "counted": True}
            values = results.values("mpps", **match)
            rate, work, spent = (results.median(key, **match) for key in ("mpps", "cycles_work", "cycles_all"))
            rates[f"{name}_{size}"] = round(rate, 3)
            cycles[f"{name}_{size}"] = round(work or spent, 1)
            print(f"{name:12} {size:5} {rate:7.2f} {min(values):7.2f} {max(values):7.2f} {f'{work:.0f}' if work else '-':>6} {spent:6.0f}")
        if "tombolo" in peers:
            for name in peers:
                if name != "tombolo":
                    ratios[f"{name}_{size}"] = ratio(rates[f"tombolo_{size}"], rates[f"{name}_{size}"])
    if idle is not None:
        print(f"tombolo idle: {idle:.2f} % of a core, both ports attached")
    if disturbed:
        print(f"{disturbed} of {options.repeats * len(sizes) * len(peers)} measurements were disturbed by other work on this machine each time they were tried")
    results.finish(ratios=ratios, idle_core_pct=None if idle is None else round(idle, 3), mpps=rates, cycles_per_frame=cycles, disturbed=disturbed)


if __name__ == "__main__":
    run_bench(main)
