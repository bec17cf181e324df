"""How long members that an `apply` is not about wait: a stream of datagrams between two taps, beside changes of everything else.

    fields = measure(note)

The stream has a datagram each millisecond. The kernel notes when each arrives, so a receiver that is late changes nothing, and what the
sender was late is taken off. Repeats with and without applies take turns: without them the gaps are the machine's own.
"""

import os
import socket
import statistics
import struct
import sys
import threading
import time

from lib import Fabric, Namespace, scratch
from lib.http import socket_in

REPEATS, SECONDS, STEP_S = 9, 4.0, 0.001
HEAD = """
name = "{name}"
[network.lan]
subnet = "10.238.0.0/24"
{network}
[tap.from]
network = "lan"
netns = "/run/netns/{one}"
ip = "10.238.0.11"
guard = "ip"
[tap.to]
network = "lan"
netns = "/run/netns/{two}"
ip = "10.238.0.12"
guard = "ip"
"""
OTHER = """
[tap.other]
network = "lan"
netns = "/run/netns/{three}"
ip = "10.238.0.13"
"""
# What each apply changes, in turn: a member comes, changes and goes, rules, the network's own
# settings, another network.
STEPS = (
    ("", ""),
    ("", OTHER),
    ("", OTHER + 'guard = "ip"\nrate = {{ send = "10M" }}\nclass = "background"\n'),
    ('domain = "other.test"', OTHER),
    ("", OTHER + '[[rule]]\naction = "deny"\nfrom = "other"\n'),
    ("", '[network.more]\nsubnet = "10.239.0.0/24"\n[tap.far]\nnetwork = "more"\nnetns = "/run/netns/{three}"\n'),
)
SO_TIMESTAMPNS = 35
PROGRAM = """
import socket, struct, sys, time
_, host, seconds, step = sys.argv
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect((host, 7000))
start, seconds, step = time.monotonic(), float(seconds), float(step)
n = 0
while (due := start + n * step) < start + seconds:
    time.sleep(max(0, due - time.monotonic()))
    s.send(struct.pack("!Qd", n, time.clock_gettime(time.CLOCK_REALTIME)))
    n += 1
"""


class Sink(threading.Thread):
    """Takes datagrams until none came for half a second: (number, sent, arrived) each."""

    def __init__(self, space):
        super().__init__(daemon=True)
        self.socket = socket_in(space, kind=socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.socket.bind(("", 7000))
        self.socket.settimeout(20)
        self.seen = []

    def run(self):
        while True:
            try:
                data, told, _, _ = self.socket.recvmsg(64, 64)
            except TimeoutError:
                return self.socket.close()
            self.socket.settimeout(0.5)
            [stamp] = [value for level, kind, value in told if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS)]
            seconds, nanos = struct.unpack("qq", stamp)
            self.seen.append((*struct.unpack("!Qd", data), seconds + nanos / 1e9))


def longest_gap_ms(seen):
    """The longest time between two datagrams that follow each other, less what the sender was late with the second."""
    pairs = zip(seen, seen[1:])
    return 1000 * max(b[2] - a[2] - max(0.0, b[1] - a[1] - STEP_S * (b[0] - a[0])) for a, b in pairs)


def stream(one, two, meanwhile):
    """One stream; `meanwhile` is called until it has ended. Gives its longest gap and how many datagrams were lost."""
    sink = Sink(two)
    sink.start()
    words = ["nice", "-n", "-10", "ip", "netns", "exec", str(one), sys.executable, "-c", PROGRAM, "10.238.0.12", str(SECONDS), str(STEP_S)]
    pid = os.spawnvp(os.P_NOWAIT, words[0], words)
    ended = time.monotonic() + SECONDS
    while time.monotonic() < ended:
        meanwhile()
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise AssertionError(f"the sender ended with {code}")
    sink.join()
    due = round(SECONDS / STEP_S)
    if len(sink.seen) < due / 2:
        raise AssertionError(f"of {due} datagrams {len(sink.seen)} arrived")
    return longest_gap_ms(sink.seen), due - len(sink.seen)


def measure(note):
    with scratch() as folder, Namespace() as one, Namespace() as two, Namespace() as three:
        words = {"name": f"b{os.getpid()}", "one": one, "two": two, "three": three}
        texts = [(HEAD + rest).replace("{network}", network).format(**words) for network, rest in STEPS]
        with Fabric(folder, texts[0]) as fabric:
            if not one.answers("10.238.0.12"):
                raise AssertionError("the members do not reach each other")
            done = 0

            def apply():
                nonlocal done
                done += 1
                fabric.file.write_text(texts[done % len(texts)])
                fabric.cli("apply", fabric.file)
                # The programs that ask are not to be what keeps the processors busy.
                time.sleep(0.1)

            found = {"idle": [], "untouched": []}
            for repeat in range(REPEATS):
                # Which is first takes turns as well.
                for kind in ("idle", "untouched")[:: 1 if repeat % 2 else -1]:
                    found[kind].append(stream(one, two, apply if kind == "untouched" else lambda: time.sleep(0.1)))
            fabric.down()
    for kind, rows in found.items():
        note(f"longest gap in ms, {kind}: {' '.join(f'{gap:.1f}' for gap, _ in rows)}; lost: {sum(lost for _, lost in rows)}")
    note(f"{done} applies")
    gaps = {kind: [gap for gap, _ in rows] for kind, rows in found.items()}
    return {
        "apply_untouched_gap_ms": round(max(gaps["untouched"]), 2),
        "apply_untouched_gap_median_ms": round(statistics.median(gaps["untouched"]), 2),
        "apply_idle_gap_ms": round(max(gaps["idle"]), 2),
        "apply_idle_gap_median_ms": round(statistics.median(gaps["idle"]), 2),
        "apply_untouched_lost": sum(lost for _, lost in found["untouched"]),
        "applies": done,
    }
