"""A mixed fabric under checked traffic, with one random fault after the other.

`Soak` starts the fabric, runs the flows of `flows.py`, injects the faults, and measures for each how
long it takes until every flow works again, and what the fabric holds afterwards that it did not hold
before. Nothing is repaired by hand: the only help is what a service manager gives, a new `tombolo up`
when the daemon has ended. A fault that needs more than that within `GIVE_UP_S` counts as `manual`.

Limits: one fabric, on one machine, in one network namespace; traffic is a few requests a second per
flow, since the point is recovery and correctness, not throughput.
"""

import contextlib
import ctypes
import dataclasses
import os
import random
import shutil
import signal
import statistics
import subprocess
import time
from pathlib import Path

from .fabric import PROGRAM, Fabric
from .flows import CallFlow, ControlFlow, EchoFlow, HttpFlow, NameFlow, PingFlow, StreamFlow
from .guest import linux_cmdline
from .machine import BUILD
from .netns import Namespace
from .process import Process, rss_bytes, scratch

# --- limits ---

# A flow that has not come back after this long needs a person; the harness then starts the fabric
# again.
GIVE_UP_S = 120
# The whole fabric has to work this soon after its first start.
START_S = 180
# Size of the file system that holds the runtime folder and the state, so that it can be filled.
DISK_MIB = 96
# What counts as a leak at the end, beyond what the fabric held before the first fault.
LEAKED_DESCRIPTORS, LEAKED_PROCESSES, LEAKED_RSS_MIB = 16, 0, 32

CLONE_NEWNS = 0x00020000
_libc = ctypes.CDLL(None, use_errno=True)

SUBNET = "10.238.0"
HEAD = """
name = "{name}"
[network.lan]
subnet = "10.238.0.0/24"
uplink = "{uplink}"
[tap.host]
ip = "10.238.0.9"
[cell.web]
app = "httpd"
ip = "10.238.0.20"
accel = "tcg"
restart = "on-failure"
[cell.mirror]
app = "echo"
ip = "10.238.0.21"
accel = "tcg"
attach = "ivshmem"
restart = "on-failure"
[cell.flow]
app = "httpd"
ip = "10.238.0.22"
accel = "tcg"
attach = "stream"
restart = "on-failure"
[cell.calc]
app = "calc"
args = "net=none"
accel = "tcg"
restart = "on-failure"
[link.calls]
between = ["calc"]
service = "sums"
[[forward]]
listen = "127.0.0.1:8080"
to = "web:80"
"""
LINUX = """
[vm.linux]
kernel = "{kernel}"
initrd = "{initrd}"
cmdline = "{cmdline}"
machine = "q35"
memory = "192M"
ip = "10.238.0.23"
accel = "tcg"
restart = "on-failure"
"""


@dataclasses.dataclass
class Outcome:
    """What one fault did."""

    kind: str
    fault: str
    # Seconds from the end of the fault until every flow had worked again; None where that needed a
    # person.
    recovery_s: float | None
    slowest: str
    broken_streams: int
    descriptors: int
    processes: int
    rss_mib: float


class Soak:
    """A fabric, its flows and its faults; use it with `with`. `linux` adds a stock Linux VM."""

    def __init__(self, seed, linux=True, uplink="user", report=print):
        self.dice = random.Random(seed)
        self.linux, self.uplink, self.report = linux, uplink, report
        self.outcomes = []
        self.manual = 0

    # --- life ---

    def __enter__(self):
        self.stack = contextlib.ExitStack()
        try:
            self._start()
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, *_):
        for flow in getattr(self, "flows", []):
            flow.stop()
        self.stack.close()

    def _start(self):
        self.folder = self.stack.enter_context(scratch())
        # Mounts of this process's own: they end with it, also when it is killed.
        if _libc.unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNS)")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "soak", self.folder], check=True)
        self.stack.callback(subprocess.run, ["umount", "-l", self.folder], capture_output=True)
        self.space = self.stack.enter_context(Namespace())
        self.space.way_out()
        text = HEAD.format(name=f"soak{os.getpid()}", uplink=self.uplink)
        if self.linux:
            guest = BUILD / "guest"
            text += LINUX.format(kernel=guest / "vmlinuz", initrd=guest / "initramfs.cpio", cmdline=linux_cmdline("linux", "http", "net=dhcp"))
        self.fabric = self.stack.enter_context(Fabric(self.folder, text, netns=self.space))
        self.flows = [
            HttpFlow("web", self.space, f"{SUBNET}.20"),
            HttpFlow("stream", self.space, f"{SUBNET}.22"),
            HttpFlow("forward", self.space, "127.0.0.1", 8080),
            EchoFlow("ivshmem", self.space, f"{SUBNET}.21"),
            StreamFlow("connection", self.space, f"{SUBNET}.21"),
            NameFlow("dns", self.space, f"{SUBNET}.1", f"web.{self.fabric.name}.internal", f"{SUBNET}.20"),
            CallFlow("call", self.fabric, "sums"),
            ControlFlow("status", self.fabric),
        ]
        if self.linux:
            self.flows.append(PingFlow("linux", self.space, f"{SUBNET}.23"))
        for flow in self.flows:
            flow.start()
        late = self._all_work(time.monotonic(), START_S)
        if late is None:
            raise TimeoutError(f"the fabric did not work within {START_S} s: {self._waiting(0)}\n{self.fabric.process.tail()}")
        self.report(f"started: every flow worked after {late[0]:.1f} s, the last was {late[1]}")
        self.baseline = self._holdings()

    # --- recovery ---

    def _waiting(self, since):
        return ", ".join(f"{flow.name} ({flow.last_error})" for flow in self.flows if not flow.worked_since(since))

    def _all_work(self, since, seconds):
        """Waits until each flow has passed a check that began after `since`: (seconds, the last flow)."""
        deadline = time.monotonic() + seconds
        while True:
            ends = [(flow.worked_since(since), flow.name) for flow in self.flows]
            if all(end for end, _ in ends):
                end, name = max(ends)
                return end - since, name
            if time.monotonic() > deadline:
                return None
            if not self.fabric.process.alive():
                # What a service manager does with a daemon that has ended.
                with contextlib.suppress(AssertionError, TimeoutError):
                    self.fabric.start(seconds=max(1, deadline - time.monotonic()))
            time.sleep(0.05)

    def _holdings(self):
        """What the fabric holds: descriptors and memory (MiB) of its daemon, and its processes."""
        pid = self.fabric.process.pid
        mark = str(self.folder).encode()
        count = 0
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_bytes()
                    state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                    count += mark in words and state != "Z" and b"call" not in words.split(b"\0")[1:2]
        # A process of `ip netns exec` becomes the daemon, so the pid is the daemon's own.
        return len(os.listdir(f"/proc/{pid}/fd")), count, rss_bytes(pid) / 2**20

    def settled_holdings(self, seconds=10):
        """The least of some samples: what is under way is no leak."""
        best = None
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError):
                now = self._holdings()
                best = now if best is None else tuple(map(min, best, now))
                if best[0] <= self.baseline[0] and best[1] <= self.baseline[1]:
                    return best
            if time.monotonic() > deadline:
                return best
            time.sleep(0.25)

    # --- faults ---

    def processes(self, *words):
        """Processes of this fabric whose command line has all of these words (as parts)."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    line = (entry / "cmdline").read_bytes().decode(errors="replace")
                except OSError:
                    continue
                if str(self.folder) in line and all(word in line for word in words):
                    found.append(int(entry.name))
        return found

    def machine_pid(self):
        name = self.dice.choice(["web", "mirror", "flow", "calc"] + (["linux"] if self.linux else []))
        pids = self.processes(f"tombolo/{self.fabric.name}/{name}")
        return name, pids[0] if pids else None

    def fault_kill_machine(self):
        name, pid = self.machine_pid()
        if pid:
            os.kill(pid, signal.SIGKILL)
        return f"kill {name}"

    def fault_pause_machine(self):
        name, pid = self.machine_pid()
        if pid:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(2)  # the length of the fault
            os.kill(pid, signal.SIGCONT)
        return f"pause {name}"

    def fault_restart_machine(self):
        name, _ = self.machine_pid()
        self.fabric.cli("cell", "stop", name, "--fabric", self.fabric.name, check=False)
        self.fabric.cli("cell", "run", name, "--fabric", self.fabric.name, check=False)
        return f"restart {name}"

    def fault_kill_passt(self):
        for pid in self._passt():
            os.kill(pid, signal.SIGKILL)
        return "kill passt"

    def fault_hang_passt(self):
        """A passt that hangs for good: only the daemon can end it."""
        for pid in self._passt():
            os.kill(pid, signal.SIGSTOP)
        return "hang passt"

    def fault_kill_bridge(self):
        """What passes calls on between the cell and the services of this machine."""
        for pid in self.processes("link-bridge"):
            os.kill(pid, signal.SIGKILL)
        return "kill bridge"

    def fault_hang_bridge(self):
        """Only the daemon can end it."""
        for pid in self.processes("link-bridge"):
            os.kill(pid, signal.SIGSTOP)
        return "hang bridge"

    def _passt(self):
        """The passts of this network namespace; their command lines do not name the fabric."""
        here = os.stat(f"/run/netns/{self.space}").st_ino
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if (entry / "comm").read_text().startswith("passt") and os.stat(entry / "ns/net").st_ino == here:
                        found.append(int(entry.name))
        return found

    def fault_kill_daemon(self):
        self.fabric.kill()
        return "kill daemon"

    def fault_pause_daemon(self):
        self.fabric.process.signal(signal.SIGSTOP)
        time.sleep(2)  # the length of the fault
        self.fabric.process.signal(signal.SIGCONT)
        return "pause daemon"

    def fault_stop_daemon(self):
        """SIGTERM ends the machines too; a service manager starts the fabric again."""
        self.fabric.process.stop(60)
        return "stop fabric"

    def fault_replace_daemon(self):
        """A planned handover to a new daemon."""
        old = self.fabric.process
        self.fabric.process = Process([PROGRAM, "up", "--replace", self.fabric.file], name="tombolo", netns=self.space, env=self.fabric.env,
                                      cwd=self.folder)
        with contextlib.suppress(TimeoutError):
            old.wait(30)
        old.kill()
        return "replace daemon"

    def fault_kill_store(self):
        """The process that keeps shared memory and connections while the daemon is away."""
        for pid in self.processes("keeper") + self.processes("fd-store"):
            os.kill(pid, signal.SIGKILL)
        return "kill fd store"

    def fault_delete_socket(self):
        sockets = sorted(path for path in self._runtime().rglob("*.sock"))
        if sockets:
            path = self.dice.choice(sockets)
            path.unlink(missing_ok=True)
            return f"delete {path.name}"
        return "delete socket"

    def fault_delete_folder(self):
        shutil.rmtree(self._runtime(), ignore_errors=True)
        return "delete runtime folder"

    def fault_fill_disk(self):
        """The disk is full for five seconds, and the daemon dies meanwhile."""
        path = self.folder / "filler"
        with contextlib.suppress(OSError), path.open("wb") as file:
            while True:
                file.write(b"\0" * 65536)
                file.flush()
        if self.dice.random() < 0.5:
            self.fabric.kill()
            with contextlib.suppress(AssertionError, TimeoutError):
                self.fabric.start(seconds=20)
        else:
            time.sleep(5)  # the length of the fault
        path.unlink()
        return "fill disk"

    def _runtime(self):
        return self.folder / "run" / self.fabric.name

    def faults(self):
        """The names of all faults."""
        return [name.removeprefix("fault_") for name in dir(self) if name.startswith("fault_")]

    def inject(self, name):
        """Injects one fault, waits for recovery, and notes the outcome."""
        for flow in self.flows:
            flow.broken = 0
        label = getattr(self, f"fault_{name}")()
        ended = time.monotonic()
        recovered = self._all_work(ended, GIVE_UP_S)
        if recovered is None:
            self.manual += 1
            self.report(f"{label}: not recovered after {GIVE_UP_S} s: {self._waiting(ended)}\n{self.fabric.process.tail(15)}\n{self._evidence()}")
            self._by_hand()
        descriptors, processes, rss = self.settled_holdings()
        outcome = Outcome(name.replace("_", " "), label, recovered[0] if recovered else None, recovered[1] if recovered else "", sum(flow.broken for flow in self.flows),
                          descriptors - self.baseline[0], processes - self.baseline[1], rss - self.baseline[2])
        self.outcomes.append(outcome)
        said = "needs a person" if recovered is None else f"{outcome.recovery_s:6.2f} s (last: {outcome.slowest})"
        self.report(f"{label:24} {said:34} descriptors {outcome.descriptors:+d}, processes {outcome.processes:+d}, "
                    f"memory {outcome.rss_mib:+.1f} MiB, connections broken {outcome.broken_streams}")
        return outcome

    def _evidence(self):
        """What would be lost with a new start: the status, and of each machine whether it works and what it said last."""
        found = [self.fabric.cli("status", "--fabric", self.fabric.name, check=False).stdout]
        for name in ["web", "mirror", "flow", "calc"] + (["linux"] if self.linux else []):
            used = []
            for _ in range(2):
                for pid in self.processes(f"tombolo/{self.fabric.name}/{name}"):
                    with contextlib.suppress(OSError, IndexError):
                        stat = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
                        used.append(f"process {pid} {stat[0]}, {(int(stat[11]) + int(stat[12])) / os.sysconf('SC_CLK_TCK'):.2f} s of CPU time")
                time.sleep(1)  # between two readings
            with contextlib.suppress(OSError):
                found.append(f"--- {name}: {'; '.join(used)}\n" + self.fabric.console_path(name).read_bytes()[-1500:].decode(errors="replace"))
        return "\n".join(found)

    def _by_hand(self):
        """What a person would do: take everything down and start again."""
        self.fabric.cli("down", "--fabric", self.fabric.name, check=False)
        self.fabric.process.kill()
        for pid in self.processes(""):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.fabric.start()
        if self._all_work(time.monotonic(), START_S) is None:
            raise TimeoutError(f"not even a new start helped: {self._waiting(0)}\n{self.fabric.process.tail()}")

    # --- verdict ---

    def corrupt(self):
        """Checks whose data was wrong."""
        return sum(flow.corrupt for flow in self.flows)

    def leaks(self):
        """What is held at the end beyond the bounds, in words."""
        descriptors, processes, rss = self.settled_holdings(30)
        now = (descriptors - self.baseline[0], processes - self.baseline[1], rss - self.baseline[2])
        names = (("descriptors", LEAKED_DESCRIPTORS), ("processes", LEAKED_PROCESSES), ("MiB of memory", LEAKED_RSS_MIB))
        return [f"{value:.0f} {name}" for value, (name, bound) in zip(now, names) if value > bound]

    def times(self):
        """Recovery times in seconds, sorted; those that needed a person are left out (see `manual`)."""
        return sorted(outcome.recovery_s for outcome in self.outcomes if outcome.recovery_s is not None)

    def table(self):
        """One line per kind of fault."""
        kinds = {}
        for outcome in self.outcomes:
            kinds.setdefault(outcome.kind, []).append(outcome)
        lines = [f"{'fault':24} {'count':>5} {'median s':>9} {'worst s':>8} {'manual':>6} {'broken':>6}"]
        for kind, outcomes in sorted(kinds.items()):
            times = [outcome.recovery_s for outcome in outcomes if outcome.recovery_s is not None]
            middle = f"{statistics.median(times):9.2f} {max(times):8.2f}" if times else f"{'-':>9} {'-':>8}"
            lines.append(f"{kind:24} {len(outcomes):5} {middle} {len(outcomes) - len(times):6} {sum(o.broken_streams for o in outcomes):6}")
        return "\n".join(lines)
