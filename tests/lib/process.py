"""Child processes that cannot outlive the test, and waits that cannot outlive their deadline."""

import contextlib
import ctypes
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from .machine import SLOW
from .netns import inside

PR_SET_PDEATHSIG = 1
# How long a wait lasts unless it says otherwise: a machine that has much else to do may let a
# process stand for tens of seconds.
PATIENCE_S = 60 * SLOW
_libc = ctypes.CDLL(None, use_errno=True)


def _prepare(parent, nice, moment):
    """Runs in the child between fork and exec: SIGKILL when the parent goes, even if it is killed; its niceness; and into the
    pipe `moment` the time of the exec."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # A shell starts what runs in its background with this one ignored, which is inherited: then no
    # child of a test could be interrupted.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if nice is not None:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    if os.getppid() != parent:
        os._exit(127)
    os.write(moment, struct.pack("d", time.monotonic()))


def until(what, condition, seconds=PATIENCE_S, every=0.02, seen=None):
    """Calls `condition` until it returns something true, which is returned; raises TimeoutError naming `what`, with what `seen()`
    gives then, as text: what a reader needs to find the cause."""
    deadline = time.monotonic() + seconds
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > deadline:
            break
        time.sleep(every)
    late = TimeoutError(f"{what}: not within {seconds} s")
    if seen is None:
        raise late
    try:
        text = seen()
    except Exception as error:
        # Neither what it was about is to be lost nor why nothing can be said of it.
        raise late from error
    raise TimeoutError(f"{late}\n{text}")


def cpu_seconds(pid):
    """User and system time of a process and its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def thread_names(pid):
    """The names of its threads, without those that end meanwhile."""
    names = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append((task / "comm").read_text().strip())
    return names


def rss_bytes(pid):
    """Memory of a process that is resident; 0 once it has none."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def descriptors(pid):
    """What the open descriptors of a process lead to: sockets and pipes by their numbers, files by their paths."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[int(entry.name)] = os.readlink(entry)
        except OSError:  # closed meanwhile
            continue
    return found


def children(pid, name=""):
    """The children of a process whose names begin with `name`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                head, rest = (entry / "stat").read_text(errors="replace").rsplit(")", 1)
            except OSError:  # it has gone meanwhile
                continue
            if int(rest.split()[1]) == pid and head.split("(", 1)[1].startswith(name):
                found.append(int(entry.name))
    return found


def until_idle(what, used_seconds, bound, span_s=1):
    """Waits until a span of `span_s` seconds in which less than the share `bound` of one core is used. A busy machine may cost a span (a cache that
    is cold, work that came late); who never comes to rest never has one."""
    shares = []

    def rests():
        shares.append(core_share(used_seconds, span_s))
        return shares[-1] < bound

    until(what, rests, seen=lambda: f"{', '.join(f'{100 * share:.2f} %' for share in shares[-9:])} of a core, expected under {100 * bound} %")
    print(f"{what}: {100 * shares[-1]:.2f} % of a core, after {len(shares)} spans")


def core_share(used_seconds, span_s):
    """Which share of one core is used in the next `span_s` seconds; `used_seconds()` gives the CPU time so far."""
    before, begun = used_seconds(), time.monotonic()
    time.sleep(span_s)  # the span that is measured, not a wait for anything
    return (used_seconds() - before) / (time.monotonic() - begun)


class scratch:
    """A folder of the test's own, gone after the `with` (short, since socket paths end at 107 bytes)."""

    def __enter__(self):
        self.path = Path(tempfile.mkdtemp(prefix="tmb-", dir="/tmp"))
        return self.path

    def __exit__(self, kind, *_):
        places = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        left = [place for place in places if place.startswith(f"{self.path}/")]
        for place in reversed(left):
            subprocess.run(["umount", "--lazy", place], check=False)
        shutil.rmtree(self.path, ignore_errors=True)
        assert kind or not left, f"the test left these mounted: {left}"


class Process:
    """One child, its output gathered line by line (standard error with it), dead when the `with` ends.

    Start it from the test's main thread: the kernel ties the child's life to the thread that started it.
    """

    def __init__(self, argv, name=None, netns=None, cpu=None, env=None, cwd=None, stdin=False, nice=None, own_mounts=True):
        self.name = name or Path(str(argv[0])).name
        self.lines = []
        self._changed = threading.Condition()
        self._eof = False
        command = [str(word) for word in argv]
        if cpu is not None:
            command = ["taskset", "-c", str(cpu)] + command
        if netns is not None:
            command = inside(netns, own_mounts) + command
        self.argv = command
        parent = os.getpid()
        moment, told = os.pipe()
        with os.fdopen(moment, "rb") as moment:
            try:
                self.popen = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd=cwd,
                    env=dict(os.environ, **env) if env else None,
                    preexec_fn=lambda: _prepare(parent, nice, told),
                )
            finally:
                os.close(told)
            # The exec, not the fork: copying an interpreter takes milliseconds that are not the
            # child's.
            (self.started,) = struct.unpack("d", moment.read(8))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    @property
    def pid(self):
        return self.popen.pid

    def _read(self):
        for raw in self.popen.stdout:
            line = raw.decode(errors="replace").rstrip("\r\n")
            at = time.monotonic() - self.started
            with self._changed:
                self.lines.append((at, line))
                self._changed.notify_all()
        with self._changed:
            self._eof = True
            self._changed.notify_all()

    def send(self, text):
        """Writes text to its standard input (`stdin=True`)."""
        self.popen.stdin.write(text.encode())
        self.popen.stdin.flush()

    def wait_line(self, matches, seconds=PATIENCE_S, since=0):
        """The first line from number `since` on for which `matches(line)` is true, as (seconds after start, line, number)."""
        deadline = time.monotonic() + seconds
        number = since
        with self._changed:
            while True:
                while number < len(self.lines):
                    at, line = self.lines[number]
                    if matches(line):
                        return at, line, number
                    number += 1
                if self._eof:
                    raise EOFError(f"{self.name} ended ({self.popen.poll()}) before the line came; its last lines:\n{self.tail()}")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"{self.name} did not print it within {seconds} s; its last lines:\n{self.tail()}")
                self._changed.wait(left)

    def tail(self, count=30):
        """The last lines it printed, with their times."""
        return "\n".join(f"  {at:8.3f} {line}" for at, line in self.lines[-count:])

    @property
    def text(self):
        return "\n".join(line for _, line in self.lines)

    def alive(self):
        return self.popen.poll() is None

    def wait(self, seconds=PATIENCE_S):
        """Its exit code; TimeoutError with its last lines when it does not end."""
        try:
            code = self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} did not end within {seconds} s; its last lines:\n{self.tail()}") from None
        self._reader.join(2)
        return code

    def signal(self, number):
        self.popen.send_signal(number)

    def stop(self, seconds=PATIENCE_S):
        """SIGTERM and its exit code."""
        if self.alive():
            self.signal(signal.SIGTERM)
        return self.wait(seconds)

    def kill(self):
        """SIGKILL, and reaped."""
        if self.alive():
            self.popen.kill()
        self.popen.wait()
        self._reader.join(2)
        for pipe in (self.popen.stdin,):
            if pipe:
                try:
                    pipe.close()
                except OSError:
                    pass

    def cpu_seconds(self):
        return cpu_seconds(self.pid)

    def rss_bytes(self):
        return rss_bytes(self.pid)
