"""The load under which a lost wake-up used to stall a guest's network for ever.

QEMU before 8.1 drops the memory fences of a guest with one CPU. A guest that streams in both directions then sometimes misses
a wake-up. Its peer must check once more, or neither side ever wakes the other again.
"""

import itertools
import os
import subprocess
import time
from typing import NamedTuple

from .fabric import Console, Fabric
from .guest import linux_cmdline
from .machine import BUILD, Skip, need_program
from .netns import Namespace
from .process import scratch, until

PREFIX = "10.238.0"
GUEST = f"{PREFIX}.10"
TAP = "tmb-stall"
SERVER_PORT = 5002
# One second each: upload, upload in small segments, and download.
LOADS = ((), ("-l", "256"), ("-l", "1460"), ("-R",))
HEAD = f"""
name = "stall{{number}}"
[network.lan]
subnet = "{PREFIX}.0/24"
[tap.host]
device = "{TAP}"
netns = "{{space}}"
ip = "{PREFIX}.2"
"""
CELL = """
[cell.guest]
app = "iperf"
ip = "{guest}"
args = "port={port}"
accel = "tcg"
attach = "{attach}"
"""
LINUX = """
[vm.guest]
kernel = "{kernel}"
initrd = "{initrd}"
machine = "{machine}"
accel = "tcg"
ip = "{guest}"
cmdline = "{cmdline}"
"""
# The agent's wake-ups come by interrupt through vfio; where it polls there is none to lose.
AGENT = """attach = "ivshmem"
iommu = true
"""
# An iperf run of one second on a machine that does much else besides; a stalled network never ends
# it.
RUN_PATIENCE_S = 30
START_PATIENCE_S = 120


class Outcome(NamedTuple):
    """What one guest did under the load."""

    runs: int
    # Runs that ended without a rate: cut off by either end. They load nothing. One that is refused,
    # since the guest's server is being started again, is no run.
    failed: int
    seconds: float
    # The words of the iperf run that did not end, with no answer to ping after it; `None` where all
    # ended.
    stalled: str | None
    late_wakeups: int
    late_signals: int


def text_of(guest, attach, space):
    """The fabric's file: `guest` is "cell" or "linux", `attach` is "vhost-user" or "ivshmem" (in Linux by tombolo-agent)."""
    head = HEAD.format(number=os.getpid(), space=space)
    if guest == "cell":
        return head + CELL.format(guest=GUEST, attach=attach, port=SERVER_PORT)
    by_agent = attach == "ivshmem"
    machine, kernel, initrd = ("q35", "vmlinuz", "initramfs-agent.cpio") if by_agent else ("microvm", "vmlinux", "initramfs.cpio")
    folder = BUILD / "guest"
    if not (folder / initrd).exists():
        raise Skip(f"build/guest/{initrd} is not there: run ./x guest")
    cmdline = linux_cmdline("guest", "http,iperf", *(("agent=vfio", "intel_iommu=on") if by_agent else ()))
    text = LINUX.format(guest=GUEST, machine=machine, kernel=folder / kernel, initrd=folder / initrd, cmdline=cmdline)
    return head + text + (AGENT if by_agent else "")


def restarting_server(fabric):
    """Starts a second iperf server in a Linux guest that comes back when it ends, as iperf 2.1's now and then does."""
    with Console("guest", fabric.name, fabric.env) as linux:
        linux.wait_control(START_PATIENCE_S)
        linux.run(f"(while :; do iperf -s -p {SERVER_PORT}; done) >/dev/null 2>&1 &")


class Streams:
    """Runs of stock iperf's client from the namespace `space` to the guest."""

    def __init__(self, space, port=SERVER_PORT):
        self.space, self.port = space, port
        self.begun, self.runs, self.failed, self.refused = time.monotonic(), 0, 0, 0

    def once(self, *words):
        """Whether a run got a rate, or None where the guest refused the connection: it answers, and has no server just now.
        TimeoutExpired where the run does not end."""
        done = self.space.run("iperf", "-c", GUEST, "-p", self.port, *words, seconds=RUN_PATIENCE_S, check=False)
        return None if "refused" in done.stdout + done.stderr else "bits/sec" in done.stdout

    def served(self, *words):
        """The same, once the server is there; TimeoutError where it does not come."""
        outcomes = []

        def accepted():
            outcomes.append(self.once(*words))
            self.refused += outcomes[-1] is None
            return outcomes[-1] is not None

        until("the guest's iperf", accepted, START_PATIENCE_S, every=0.2)
        return outcomes[-1]

    def load(self, seconds, report):
        """Runs the loads in turn for so many seconds; the words of the one in which the network stalled, or None."""
        self.begun = time.monotonic()
        for words in itertools.cycle(LOADS):
            if time.monotonic() - self.begun >= seconds:
                return None
            try:
                self.failed += not self.served("-t", "1", *words)
            except subprocess.TimeoutExpired:
                # A stream that is only slow leaves a guest that answers.
                if not self.space.answers(GUEST):
                    return " ".join(words) or "upload"
            self.runs += 1
            if self.runs % 20 == 0:
                report(f"{self.runs} runs, {self.refused} refused")


def run_load(guest, attach, seconds, report=lambda line: None):
    """Streams for so many seconds or until the network stalls, and gives the Outcome."""
    need_program("iperf")
    with Namespace() as space, scratch() as folder, Fabric(folder, text_of(guest, attach, space), netns=space) as fabric:
        space.ip("link", "set", TAP, "up")
        until("the guest's answer", lambda: space.pings(GUEST), START_PATIENCE_S)
        if guest == "linux":
            restarting_server(fabric)
        streams = Streams(space)
        stalled = streams.load(seconds, report)
        counters = fabric.port("guest")["counters"]
        return Outcome(streams.runs, streams.failed, time.monotonic() - streams.begun, stalled,
                       counters.get("late_wakeups", 0), counters.get("late_signals", 0))
