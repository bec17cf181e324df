"""The machine: conditions of a run, and meters of CPU, interrupts, memory and hardware counters.

`Meter` answers the question that decides whether a point counts: how much CPU did others take while
we measured? It splits CPU time of a span into four parts:

- ours: this process, and all its descendants;
- others: every other process of user space;
- the kernel's own threads (ksoftirqd, kworker, vhost), which work for both and are in neither;
- stolen: what the hypervisor gave to other machines, from /proc/stat.

Limits: CPU times of processes have a resolution of 10 ms. A process of ours that leaves our tree
(a daemon whose parent ended) counts as another's, unless this process is a child subreaper, which
`sandbox.Sandbox` makes it. In a container, processes of other containers are not seen; what they
take shows as stolen only where the kernel counts it so.

Sources: proc(5), "Interrupts" and "softirqs" of the kernel's Documentation/filesystems/proc.rst,
perf-stat(1).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tombolo_lab import LabError

HERTZ = os.sysconf("SC_CLK_TCK")
# What a sum of CPU times may be wrong by: processes are counted in ticks, at both ends of a span.
RESOLUTION_S = 2 / HERTZ
# Flag of the kernel's own threads in /proc/PID/stat, include/linux/sched.h.
PF_KTHREAD = 0x0020_0000
PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1


# ---- CPU -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Task:
    """A process in /proc: its parent, and its CPU time with that of children it waited for."""

    parent: int
    is_kernel: bool
    ticks: int


def _tasks() -> dict[int, _Task]:
    """Every process that is there now."""
    found = {}
    for entry in os.scandir(PROC):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"{entry.path}/stat", "rb") as file:
                text = file.read()
        except OSError:  # it ended meanwhile
            continue
        # The name in brackets may hold anything, brackets too.
        words = text.rpartition(b")")[2].split()
        ticks = sum(map(int, words[11:15]))  # utime, stime, cutime, cstime
        found[int(entry.name)] = _Task(int(words[1]), bool(int(words[6]) & PF_KTHREAD), ticks)
    return found


def _descendants(tasks: Mapping[int, _Task], root: int) -> set[int]:
    """`root` and all processes below it."""
    children: dict[int, list[int]] = {}
    for pid, task in tasks.items():
        children.setdefault(task.parent, []).append(pid)
    found, ahead = set(), [root]
    while ahead:
        pid = ahead.pop()
        if pid not in found:
            found.add(pid)
            ahead += children.get(pid, [])
    return found


@dataclass(frozen=True)
class _Counters:
    """Monotonic counters at one moment. CPU times are in ticks where nothing else is said."""

    at: float
    ours: int
    others: dict[int, _Task]
    kernel: int
    irq: int
    softirq: int
    stolen: int
    busy: int
    interrupts: int
    context_switches: int
    softirqs: dict[str, int]
    processes: dict[str, tuple[int, int]]  # CPU time in ns, wake-ups

    @classmethod
    def now(cls, pids: Mapping[str, int]) -> _Counters:
        tasks = _tasks()
        own = _descendants(tasks, os.getpid())
        ours = sum(tasks[pid].ticks for pid in own if pid in tasks)
        kernel = sum(task.ticks for task in tasks.values() if task.is_kernel)
        others = {pid: task for pid, task in tasks.items() if not task.is_kernel and pid not in own}
        stat = dict(
            line.split(" ", 1) for line in (PROC / "stat").read_text().splitlines() if " " in line
        )
        # user nice system idle iowait irq softirq steal
        cpu = [int(word) for word in stat["cpu"].split()]
        return cls(
            at=time.monotonic(),
            ours=ours,
            others=others,
            kernel=kernel,
            irq=cpu[5],
            softirq=cpu[6],
            stolen=cpu[7],
            busy=sum(cpu[:3]) + cpu[5] + cpu[6],
            interrupts=int(stat["intr"].split(" ", 1)[0]),
            context_switches=int(stat["ctxt"]),
            softirqs=_softirqs(),
            processes={name: (process_cpu_ns(pid), wakeups(pid)) for name, pid in pids.items()},
        )


def _spent(then: Mapping[int, _Task], now: Mapping[int, _Task]) -> int:
    """Ticks that a set of processes took between two looks.

    A sum over all that are there would fall when one ends whose parent does not wait for it, and so
    hide what the others took. Each one is therefore counted by itself. A parent that waits gets the
    time of its child's whole life; what of that was before is taken off again. Where the parent has
    ended too, as in a build, the next one above that is still there got the time.
    """
    spent = {pid: task.ticks - then[pid].ticks if pid in then else task.ticks
             for pid, task in now.items()}  # fmt: skip
    for pid, task in then.items():
        if pid in now:
            continue
        heir = task.parent
        while heir not in spent and heir in then:
            heir = then[heir].parent
        if spent.get(heir, -1) >= task.ticks:
            spent[heir] -= task.ticks
    return sum(max(ticks, 0) for ticks in spent.values())


def _softirqs() -> dict[str, int]:
    """Softirqs served so far by kind, such as NET_RX, over all CPUs."""
    found = {}
    for line in (PROC / "softirqs").read_text().splitlines()[1:]:
        name, _, counts = line.partition(":")
        found[name.strip()] = sum(map(int, counts.split()))
    return found


def process_cpu_ns(pid: int) -> int:
    """CPU time of a process and its threads, also of those that have ended, in ns by the
    scheduler's own clock (clock_getcpuclockid(3)). 0 once the process ended."""
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError:
        return 0


def process_age_s(pid: int) -> float:
    """Seconds since a process was started, to a tick; ProcessLookupError when it is gone."""
    try:
        words = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        raise ProcessLookupError(f"no process {pid}") from None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(words[19]) / HERTZ


def wakeups(pid: int) -> int:
    """How often threads of a process slept and were woken: its voluntary context switches."""
    total = 0
    for status in (PROC / str(pid) / "task").glob("*/status"):
        with contextlib.suppress(OSError):
            total += int(
                re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status.read_text(), re.M)[1]
            )
    return total


@dataclass(frozen=True)
class ProcessUsage:
    """What a named process took in a span: CPUs, and wake-ups per second."""

    cpus: float
    wakeups_s: float


@dataclass(frozen=True)
class Usage:
    """What happened in a span of `seconds`. One CPU is one core that is busy all the time."""

    seconds: float
    ours_cpus: float
    others_cpus: float
    kernel_cpus: float
    irq_cpus: float
    softirq_cpus: float
    stolen_cpus: float
    interrupts_s: float
    context_switches_s: float
    softirqs_s: dict[str, float] = field(default_factory=dict)
    processes: dict[str, ProcessUsage] = field(default_factory=dict)
    busy_cpus: float = 0.0  # all that was neither idle nor stolen

    @property
    def load_s(self) -> float | None:
        """CPU seconds of the whole machine, softirqs included, without other processes'. None where
        those took so much that the difference says nothing."""
        found = (self.busy_cpus - self.others_cpus) * self.seconds
        return found if found > RESOLUTION_S else None

    def disturbance(self, others_cpus: float, stolen_cpus: float) -> str | None:
        """Why a point with this usage is disturbed, or None. The resolution is allowed for."""
        reasons = []
        allowance = RESOLUTION_S / self.seconds
        for what, used, limit in (
            ("other processes took", self.others_cpus, others_cpus),
            ("the hypervisor took", self.stolen_cpus, stolen_cpus),
        ):
            if used - allowance > limit:
                reasons.append(f"{what} {used:.2f} CPUs, more than {limit:g}")
        return "; ".join(reasons) or None


class Meter:
    """Measures what is in its `with`; `usage` holds the result afterwards.

        with Meter({"switch": pid}) as meter:
            ...
        meter.usage.processes["switch"].cpus

    `pids` names processes to be told apart; one that ends within the span counts as zero.
    """

    usage: Usage

    def __init__(self, pids: Mapping[str, int] | None = None):
        self.pids = dict(pids or {})

    def __enter__(self) -> Meter:
        self._begun = _Counters.now(self.pids)
        return self

    def __exit__(self, *_: object) -> None:
        self.usage = self._between(self._begun, _Counters.now(self.pids))

    def so_far(self) -> Usage:
        """The usage from the beginning until now."""
        return self._between(self._begun, _Counters.now(self.pids))

    @staticmethod
    def _between(then: _Counters, now: _Counters) -> Usage:
        seconds = max(now.at - then.at, 1e-9)

        def cpus(name: str) -> float:
            # A process whose parent does not wait for it takes its time with it: never below zero.
            return max(getattr(now, name) - getattr(then, name), 0) / HERTZ / seconds

        processes = {}
        for name, (spent, wakes) in now.processes.items():
            spent_before, wakes_before = then.processes[name]
            processes[name] = ProcessUsage(
                max(spent - spent_before, 0) / 1e9 / seconds,
                max(wakes - wakes_before, 0) / seconds,
            )
        return Usage(
            seconds=seconds,
            **{
                f"{name}_cpus": cpus(name)
                for name in ("ours", "kernel", "irq", "softirq", "stolen", "busy")
            },
            others_cpus=_spent(then.others, now.others) / HERTZ / seconds,
            interrupts_s=(now.interrupts - then.interrupts) / seconds,
            context_switches_s=(now.context_switches - then.context_switches) / seconds,
            softirqs_s={
                name: (count - then.softirqs.get(name, 0)) / seconds
                for name, count in now.softirqs.items()
            },
            processes=processes,
        )


def wait_quiet(
    others_cpus: float, stolen_cpus: float, patience_s: float, span_s: float = 0.5
) -> str | None:
    """Waits for a span of `span_s` without disturbance, for at most `patience_s`.

    Gives None when there was one, else why the last span was disturbed. Limits that the machine
    cannot exceed cost no time.
    """
    if min(others_cpus, stolen_cpus) >= (os.cpu_count() or 1):
        return None
    deadline = time.monotonic() + patience_s
    while True:
        with Meter() as meter:
            time.sleep(span_s)  # the span that is measured
        reason = meter.usage.disturbance(others_cpus, stolen_cpus)
        if reason is None or time.monotonic() >= deadline:
            return reason


# ---- memory and counters -------------------------------------------------------------------------
@dataclass(frozen=True)
class Memory:
    """Memory of a process in bytes: resident, its share of it (shared pages divided by their
    users; None without permission), and the peak of what was resident."""

    resident: int
    share: int | None
    peak: int


def memory(pid: int) -> Memory:
    """Memory of a process; ProcessLookupError when it is gone."""

    def kilobytes(text: str, key: str) -> int | None:
        found = re.search(rf"^{key}:\s*(\d+) kB", text, re.M)
        return int(found[1]) * 1024 if found else None

    try:
        status = (PROC / str(pid) / "status").read_text()
    except OSError:
        raise ProcessLookupError(f"no process {pid}") from None
    share = None
    with contextlib.suppress(OSError):
        share = kilobytes((PROC / str(pid) / "smaps_rollup").read_text(), "Pss")
    return Memory(kilobytes(status, "VmRSS") or 0, share, kilobytes(status, "VmHWM") or 0)


class Counts(dict):
    """Hardware events by name: a number, or None where the machine does not count it."""


def parsed_counts(text: str, events: Sequence[str]) -> Counts:
    """The counts in the output of `perf stat -x ,`: value, unit, event, …"""
    counts = Counts(dict.fromkeys(events))
    for line in text.splitlines():
        words = line.split(",")
        if len(words) < 3:
            continue
        # With restricted permission perf writes the modifier that it added: cycles:u.
        name = words[2].partition(":")[0]
        for event in events:
            if event.partition(":")[0] == name and words[0].replace(".", "", 1).isdigit():
                counts[event] = (counts[event] or 0) + float(words[0])
    return counts


@contextlib.contextmanager
def counters(
    pids: Sequence[int] = (), events: Sequence[str] = ("cycles", "instructions")
) -> Iterator[Counts]:
    """Counts hardware events of processes, or without `pids` of the whole machine.

    The dict that it yields is filled when the `with` ends. Without perf, permission or counters,
    as in many virtual machines, the values are None.
    """
    counts = Counts(dict.fromkeys(events))
    if not shutil.which("perf"):
        yield counts
        return
    target = ["-p", ",".join(map(str, pids))] if pids else ["-a"]
    control, commands = os.pipe()
    acknowledged, acknowledge = os.pipe()
    command = ["perf", "stat", "-x", ",", "-e", ",".join(events), *target]
    command += ["-D", "-1", f"--control=fd:{control},{acknowledge}"]
    parent = os.getpid()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(control, acknowledge),
        preexec_fn=lambda: die_with(parent),
    ) as process:
        os.close(control)
        os.close(acknowledge)
        try:
            # perf has acknowledged that it counts before the `with` begins; one that refused, for
            # lack of permission, has closed its end.
            with contextlib.suppress(BrokenPipeError):
                os.write(commands, b"enable\n")
                os.read(acknowledged, 16)
            yield counts
            process.send_signal(signal.SIGINT)
            counts.update(parsed_counts(process.communicate(timeout=60)[1], events))
        finally:
            process.kill()
            os.close(commands)
            os.close(acknowledged)


@functools.cache
def missing_counters() -> str | None:
    """Why this machine counts no cycles and instructions, or None where it does."""
    if not shutil.which("perf"):
        return "perf is missing: apt-get install linux-perf"
    with counters([os.getpid()]) as counts:
        sum(range(10_000))
    missing = [event for event, count in counts.items() if count is None]
    return f"perf counts no {' and no '.join(missing)} here" if missing else None


def die_with(parent: int) -> None:
    """For `preexec_fn`: this child is killed when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.getppid() != parent:
        os._exit(127)


# ---- conditions ----------------------------------------------------------------------------------
def _text(path: str | Path) -> str | None:
    """The text of a small file of the kernel, or None."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _said(*words: object) -> str | None:
    """The standard output of a program, or None when it is missing or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [str(word) for word in words], capture_output=True, text=True, timeout=20
        )
        return done.stdout.strip() if done.returncode == 0 else None
    return None


def virtualisation() -> str:
    """What this machine runs on: "kvm", "docker in kvm", or "none"."""
    if shutil.which("systemd-detect-virt"):
        # Its exit code is 1 for "none", which is an answer too.
        names = [
            subprocess.run(
                ["systemd-detect-virt", kind], capture_output=True, text=True
            ).stdout.strip()
            for kind in ("--container", "--vm")
        ]
        return " in ".join(name for name in names if name not in ("", "none")) or "none"
    return "a hypervisor" if re.search(r"\bhypervisor\b", _text("/proc/cpuinfo") or "") else "none"


def commit(tree: Path) -> str | None:
    """The commit of a checkout, with "+changes" behind it when files differ; None elsewhere."""
    head = _said("git", "-C", tree, "rev-parse", "HEAD")
    if head is None:
        return None
    return head + ("+changes" if _said("git", "-C", tree, "status", "--porcelain") else "")


def file_hash(path: Path) -> str:
    """SHA-256 of a file; LabError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise LabError(f"{path}: {error.strerror}") from None


def cpu_model() -> str:
    """The name of the first CPU, as the kernel has it."""
    text = _text("/proc/cpuinfo") or ""
    found = re.search(r"^(?:model name|Processor|cpu model)\s*: (.*)", text, re.M)
    return found[1] if found else os.uname().machine


def mitigations() -> dict[str, str]:
    """The kernel's words on each CPU vulnerability that concerns this CPU."""
    folder = Path("/sys/devices/system/cpu/vulnerabilities")
    found = {path.name: _text(path) or "" for path in sorted(folder.glob("*"))}
    return {name: text for name, text in found.items() if text and text != "Not affected"}


def tool_versions(program: Path | None) -> dict[str, str]:
    """Versions of what nearly every workload uses: the program, QEMU, Python."""
    tools = {"python": sys.version.split()[0]}
    asked = {"tombolo": program, "qemu": os.environ.get("TOMBOLO_QEMU") or "qemu-system-x86_64"}
    for name, path in asked.items():
        if path is not None and (text := _said(path, "--version")):
            tools[name] = text.splitlines()[0]
    return tools


def conditions(tree: Path | None, program: Path | None) -> dict:
    """Where and with what a run measures. Sizes are in bytes, times in UTC."""
    os_release = _text("/etc/os-release") or ""
    name = re.search(r'^PRETTY_NAME="?([^"\n]*)', os_release, re.M)
    memory_kb = re.search(r"^MemTotal:\s*(\d+)", _text("/proc/meminfo") or "", re.M)
    return {
        "command": shlex.join(["tombolo", "lab", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(tree) if tree else None,
        "kernel": os.uname().release,
        "distribution": name[1] if name else None,
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "governor": _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "memory_bytes": int(memory_kb[1]) * 1024 if memory_kb else None,
        "tcp_congestion_control": _text("/proc/sys/net/ipv4/tcp_congestion_control"),
        "mitigations": mitigations(),
        "clocksource": _text("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "virtualisation": virtualisation(),
        "root": os.geteuid() == 0,
        "program": str(program) if program else None,
        "program_sha256": file_hash(program) if program else None,
        "tools": tool_versions(program),
        "load": list(os.getloadavg()),
        "hardware_counters": missing_counters() or "cycles and instructions",
    }
