"""What a policy costs with real ports: frames of many flows circulate between two vhost-user ports through one worker, with and without
rules, VLANs and classes.

    fields = measure(note)

DPDK's testpmd stands for the guests, as in the bench `switch`: with two virtio-user ports on CPU 0 it sends out of one port what it
receives from the other. The settings change between slices (`tombolo apply`), so all slices are of one set-up. A slice counts the
frames that the generator received, and the CPU time of the daemon, which has CPU 1. In each repeat the slices come in a new
random order. Without a policy there are two of each, whose difference is that of equal things.

Runs as a program of its own in a mount namespace, for hugepages.
"""

import contextlib
import json
import math
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SLICE_S, SETTLE_S, SEED = 0.2, 0.05, 20261127
# A size has repeats until the interval of `all` is this narrow, in percent, within limits.
LEAST_REPEATS, MOST_REPEATS, NARROW = 41, 161, 5
SIZES = (1500, 64)
FORWARDER_CPU, HUGEPAGES = 1, 700
MACS = ("02:00:00:00:01:00", "02:00:00:00:01:01")
# testpmd gives each frame that it makes the next of 256 source addresses.
# So two bursts of 32 are 64 flows each way.
BURSTS = 2
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
# Its rules name groups of a third port, which has no peer.
HEAD = """
name = "bench"
[worker.core]
cpu = {cpu}
[network.lan]
worker = "core"
policy = "{policy}"
[port.idle]
kind = "stream"
groups = ["web", "db", "app", "ids"]
"""
PORT = """
[port.p{number}]
kind = "vhost-user"
socket = "{folder}/v{number}"
mac = "{mac}"
{keys}
"""
# What no rule is about is denied, and these frames are allowed by the last of five rules. They are
# in a VLAN, and marks give their class.
RULES = "".join(f'[[rule]]\naction = "deny"\nfrom = "{name}"\n' for name in ("web", "db", "app", "ids"))
RULES += '[[rule]]\naction = "allow"\nfrom = ["p0", "p1"]\nprotocol = "udp"\n'
KEYS = 'vlan = 10\nclass = "marked"\n'
# Policy, keys of the ports, and rules.
SETTINGS = {"none": ("allow", "", ""), "again": ("allow", "", ""), "rules": ("deny", "", RULES), "all": ("deny", KEYS, RULES)}


def text(folder, name):
    policy, keys, rules = SETTINGS[name]
    ports = (PORT.format(number=number, folder=folder, mac=mac, keys=keys) for number, mac in enumerate(MACS))
    return HEAD.format(cpu=FORWARDER_CPU, policy=policy) + "".join(ports) + rules


def measure(note):
    """Runs the program, and gives the fields of the last line."""
    command = ["unshare", "--mount", "--propagation", "private", "/usr/bin/python3", __file__]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{Path(__file__).name} ended with {done.returncode}")
    *rows, last = done.stdout.splitlines()
    for row in rows:
        note(row)
    return json.loads(last)


@contextlib.contextmanager
def hugepages(folder):
    """Hugepages of 2 MiB for DPDK, as `dpdk.hugepages` of the lab mounts them; as many as before afterwards."""
    before = int(NR_HUGEPAGES.read_text())
    NR_HUGEPAGES.write_text(str(before + HUGEPAGES))
    try:
        from tombolo_lab.workloads import dpdk
        with dpdk.hugepages(folder, HUGEPAGES):
            yield
    finally:
        NR_HUGEPAGES.write_text(str(before))


class Circle:
    """Frames of one size that circulate, slice by slice."""

    def __init__(self, fabric, load, folder, size):
        self.fabric, self.load, self.folder = fabric, load, folder
        load.command(f"set txpkts {size}", 30)

    def slice(self, name):
        """With the settings `name`: nanoseconds of the daemon's CPU time for each frame that went through, and millions of frames in a
        second."""
        # No frames circulate meanwhile: one port would be in the VLAN before the other. The start
        # empties the generator's rings.
        self.fabric.file.write_text(text(self.folder, name))
        self.fabric.cli("apply", self.fabric.file)
        self.load.command(f"start tx_first {BURSTS}")
        try:
            time.sleep(SETTLE_S)
            return self.counted()
        finally:
            self.load.command("stop")

    def counted(self):
        first, busy = self.load.stats(), self.cpu_ns()
        time.sleep(SLICE_S)
        last, busy = self.load.stats(), self.cpu_ns() - busy
        frames = last[0] - first[0]
        if frames < 10_000:
            raise AssertionError(f"{frames} frames came through in {SLICE_S} s; lost: {self.lost()}")
        return busy / frames, frames / (last[2] - first[2]) / 1e6

    def cpu_ns(self):
        """CPU time of the daemon, in nanoseconds: /proc/PID/stat counts in hundredths of a second."""
        from tombolo_lab import machine
        return machine.process_cpu_ns(self.fabric.process.pid)

    def lost(self):
        """Frames that were dropped so far, by port, way and reason."""
        ways = [(name, way, self.fabric.port(name)["counters"][way]) for name in ("p0", "p1") for way in ("rx_drops", "tx_drops")]
        return {f"{name} {way} {reason}": count for name, way, drops in ways for reason, count in drops.items() if count}


def percent(with_it, without):
    """How much more in percent, as the median over the repeats, and the ends of its 95 % interval.

    The interval is that of the sign test, which holds for any distribution: by the normal approximation, the true median is
    between the values that are 0.98 √n places before and after the middle (Conover, Practical Nonparametric Statistics, 3.2)."""
    more = sorted((a / b - 1) * 100 for a, b in zip(with_it, without))
    far = 0.98 * math.sqrt(len(more))
    first = max(0, math.floor(len(more) / 2 - far))
    last = min(len(more) - 1, math.ceil(len(more) / 2 + far) - 1)
    return [round(value, 1) for value in (statistics.median(more), more[first], more[last])]


def is_narrow(ns):
    if len(ns["none"]) < LEAST_REPEATS:
        return False
    _, least, most = percent(ns["all"], ns["none"])
    return most - least <= NARROW


def sizes(fabric, load, folder):
    """For each size: the nanoseconds of each setting's slices."""
    dice = random.Random(SEED)
    for size in SIZES:
        circle = Circle(fabric, load, folder, size)
        ns, mpps = ({name: [] for name in SETTINGS} for _ in range(2))
        while len(ns["none"]) < MOST_REPEATS and not is_narrow(ns):
            for name in dice.sample(list(SETTINGS), len(SETTINGS)):
                took, rate = circle.slice(name)
                ns[name].append(took)
                mpps[name].append(rate)
        circle.slice("all")
        connections = fabric.status()["networks"][0]["counters"]["rule_connections"]
        for name in SETTINGS:
            cost, least, most = percent(ns[name], ns["none"])
            print(f"{size:5} bytes {name:6} {statistics.median(ns[name]):8.1f} ns {statistics.median(mpps[name]):8.2f} M/s "
                  f"{cost:6.1f} % more (95 %: {least} to {most})")
        print(f"{size:5} bytes: {len(ns['none'])} repeats, {connections} connections, lost so far: {circle.lost() or 'none'}")
        yield size, ns


def main():
    sys.path[:0] = [str(ROOT / "lab"), str(ROOT / "tests")]
    from lib import Fabric, scratch, until
    from tombolo_lab.workloads.forwarder import generator, has_sockets, is_up

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch())
        stack.enter_context(hugepages(folder))
        (folder / "fabric").mkdir()
        fabric = stack.enter_context(Fabric(folder / "fabric", text(folder, "none"), nice=-20))
        until("the sockets", lambda: has_sockets(folder))
        load = stack.enter_context(generator(folder, False, ["--txonly-multi-flow"]))
        # Frames that are sent before the daemon has the rings would be lost.
        until("the ports' links", lambda: is_up(load) and all(fabric.port(name)["up"] for name in ("p0", "p1")), every=0.1)
        fields = {}
        for size, ns in sizes(fabric, load, folder):
            cost, least, most = percent(ns["all"], ns["none"])
            end = "" if size == SIZES[0] else f"_{size}"
            fields |= {
                f"policy_cost_pct{end}": cost,
                f"policy_cost_least_pct{end}": least,
                f"policy_cost_most_pct{end}": most,
                f"policy_rules_pct{end}": percent(ns["rules"], ns["none"])[0],
                f"policy_equal_pct{end}": percent(ns["again"], ns["none"])[0],
                f"policy_frame_ns{end}": round(statistics.median(ns["none"]), 1),
            }
    print(json.dumps(fields))


if __name__ == "__main__":
    main()
