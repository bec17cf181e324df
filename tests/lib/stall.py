"""The load under which a lost wake-up once stalled a guest's network for ever.

QEMU before 8.1 drops the memory fences of a guest with one CPU. A guest that streams in both directions then misses a wake-up now
and then. Its peer has to look once more, or neither side ever wakes the other again.
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
machine = "microvm"
accel = "tcg"
ip = "{guest}"
cmdline = "{cmdline}"
"""
# An iperf run of one second on a machine that does much else besides; a stalled network never ends it.
RUN_PATIENCE_S = 30
START_PATIENCE_S = 120


class Outcome(NamedTuple):
    """What one guest did under the load."""

    runs: int
    # Runs that ended without a rate: refused or cut off. They load nothing.
    failed: int
    seconds: float
    # The words of the iperf run that did not end, with no answer to ping after it; `None` where all ended.
    stalled: str | None
    late_wakeups: int
    late_signals: int


def text_of(guest, attach, space):
    """The fabric's file: `guest` is "cell" or "linux"."""
    head = HEAD.format(number=os.getpid(), space=space)
    if guest == "cell":
        return head + CELL.format(guest=GUEST, attach=attach, port=SERVER_PORT)
    if attach != "vhost-user":
        raise ValueError(f"a stock Linux guest has no driver for {attach}")
    kernel = BUILD / "guest/vmlinux"
    if not kernel.exists():
        raise Skip("build/guest is not there: run ./x guest")
    cmdline = linux_cmdline("guest", "http,iperf")
    return head + LINUX.format(guest=GUEST, kernel=kernel, initrd=BUILD / "guest/initramfs.cpio", cmdline=cmdline)


def restarting_server(fabric):
    """Starts a second iperf server in a Linux guest that comes back when it ends, as iperf 2.1's now and then does."""
    with Console("guest", fabric.name, fabric.env) as linux:
        linux.wait_control(START_PATIENCE_S)
        linux.run(f"(while :; do iperf -s -p {SERVER_PORT}; done) >/dev/null 2>&1 &")


def streams(space, *words):
    """One run of stock iperf's client; whether it got a rate. TimeoutExpired where it does not end."""
    done = space.run("iperf", "-c", GUEST, "-p", SERVER_PORT, *words, seconds=RUN_PATIENCE_S, check=False)
    return "bits/sec" in done.stdout


def run_load(guest, attach, seconds, report=lambda line: None):
    """Streams for so many seconds or until the network stalls, and gives the Outcome."""
    need_program("iperf")
    with Namespace() as space, scratch() as folder, Fabric(folder, text_of(guest, attach, space), netns=space) as fabric:
        space.ip("link", "set", TAP, "up")
        until("the guest's answer", lambda: space.pings(GUEST), START_PATIENCE_S)
        if guest == "linux":
            restarting_server(fabric)
        until("the guest's iperf", lambda: streams(space, "-t", "0.1"), START_PATIENCE_S)
        begun, runs, failed, stalled = time.monotonic(), 0, 0, None
        for words in itertools.cycle(LOADS):
            if time.monotonic() - begun >= seconds:
                break
            try:
                failed += not streams(space, "-t", "1", *words)
            except subprocess.TimeoutExpired:
                # A stream that is only slow leaves a guest that answers.
                if not space.answers(GUEST):
                    stalled = " ".join(words) or "upload"
                    break
            runs += 1
            if runs % 20 == 0:
                report(f"{runs} runs")
        counters = fabric.port("guest")["counters"]
        return Outcome(runs, failed, time.monotonic() - begun, stalled, counters.get("late_wakeups", 0), counters.get("late_signals", 0))
