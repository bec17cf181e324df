"""What a run makes on this machine, and how all of it is gone after the run.

A `Sandbox` holds for the duration of a run:

- the sweeper, a process that clears up also when this one is killed (`tombolo_lab.sweeper`);
- a folder for files and sockets, which TMPDIR and `harness.scratch` use;
- as root, a mount namespace with a /run/netns of its own: network namespaces that a workload makes
  are pinned only there, so they end with the last process of the run;
- this process as child subreaper: a daemon whose parent ended comes to us, so it is counted as
  ours, and found when a set-up leaves it behind.

Limits: a run that is killed together with its sweeper leaves files in /tmp/tlab-*. Devices that a
workload makes in this machine's own network namespace are not known here; workloads make none.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from tombolo_lab import LabError, sweeper

NETNS = Path("/run/netns")
# How long what a set-up has told to end may take for it.
ENDING_S = 3.0
_CLONE_NEWNS = 0x0002_0000
_MS_REC, _MS_SLAVE = 0x4000, 0x8_0000
_MNT_DETACH = 2
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

# The sandbox of the run in progress, if any.
current: Sandbox | None = None


def _call(name: str, *arguments: object) -> None:
    """A function of libc; OSError when it fails."""
    if getattr(_libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


class Sandbox:
    """Use it in a `with`, in the main thread. There is one at a time."""

    folder: Path

    def __init__(self) -> None:
        self.token = uuid.uuid4().hex
        self._stack = contextlib.ExitStack()
        self._before: set[int] = set()

    def __enter__(self) -> Sandbox:
        global current
        if current is not None:
            raise LabError("a run is in progress in this process already")
        try:
            self._start_sweeper()
            self._stack.enter_context(_own_namespaces())
            self._stack.enter_context(_environment({sweeper.VARIABLE: self.token}))
            self._stack.enter_context(_temporary_files(self.folder))
            _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            self._stack.callback(_call, "prctl", _PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        except BaseException:
            self._stack.close()
            raise
        self._before = children()
        current = self
        return self

    def __exit__(self, *_: object) -> None:
        global current
        current = None
        self._stack.close()

    def _start_sweeper(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != sweeper.VARIABLE}
        self._sweeper = subprocess.Popen(
            [sys.executable, "-I", "-S", sweeper.__file__, self.token],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
            env=environment,
        )
        self._stack.callback(self._end_sweeper)
        line = self._sweeper.stdout.readline()
        if not line.endswith(b"\n"):
            raise LabError(f"{sweeper.__file__} ended with {self._sweeper.wait()}")
        self.folder = Path(line.decode().rstrip("\n"))

    def _end_sweeper(self) -> None:
        # Not by closing the pipe alone: children that never called exec have it too.
        with contextlib.suppress(BrokenPipeError):
            self._sweeper.stdin.write(b'{"end": true}\n')
            self._sweeper.stdin.close()
        self._sweeper.stdout.read()
        self._sweeper.wait()
        self._sweeper.stdout.close()

    def _tell(self, **words: object) -> None:
        self._sweeper.stdin.write(json.dumps(words).encode() + b"\n")
        self._sweeper.stdin.flush()
        if self._sweeper.stdout.read(1) != b".":
            raise LabError("the process that clears up after a run was killed; start the run again")

    @contextlib.contextmanager
    def setting(self, path: Path, value: object) -> Iterator[str]:
        """Writes a kernel setting, such as one in /proc/sys; yields what it was, and restores it.

        Also when this process is killed. LabError when it cannot be written.
        """
        try:
            before = path.read_text()
            self._tell(keep=[str(path), before])
            path.write_text(str(value))
        except OSError as error:
            raise LabError(f"{path}: expected to write {value!r}: {error.strerror}") from None
        try:
            yield before.strip()
        finally:
            sweeper.restore(str(path), before)
            self._tell(forget=str(path))

    def clear(self) -> list[str]:
        """After a set-up: ends and names what it left behind, processes and namespaces.

        A process that ends by itself within `ENDING_S` is not left behind.
        """
        deadline = time.monotonic() + ENDING_S
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.01)
        names = []
        while left := self._left():
            for pid in left:
                names.append(f"process {sweeper.name_of(pid)}")
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        if os.geteuid() == 0 and _is_own(NETNS):
            for path in NETNS.iterdir():
                names.append(f"network namespace {path.name}")
                subprocess.run(["ip", "netns", "del", path.name], capture_output=True)
        return sorted(set(names))

    def _left(self) -> set[int]:
        """Children that were not there before the run. Those that have ended are reaped."""
        left = set()
        for pid in children() - self._before:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    left.add(pid)
        return left


def children() -> set[int]:
    """The children of this process, also those of its other threads."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found.update(map(int, (task / "children").read_text().split()))
    return found


def _is_own(folder: Path) -> bool:
    """Whether /run/netns is the one of `_own_namespaces`."""
    return _own_netns is not None and folder.exists() and folder.stat().st_dev == _own_netns


_own_netns: int | None = None
# The mount namespace that this process was started in, while it has one of its own.
_mounts_before: str | None = None


def mounts_before() -> str | None:
    """A path to the mount namespace that this process was started in, for `nsenter --mount=`; None
    where the run has no mount namespace of its own."""
    return _mounts_before


@contextlib.contextmanager
def _own_namespaces() -> Iterator[None]:
    """As root: a mount namespace with an empty /run/netns. Elsewhere nothing.

    The namespace is a slave of the one before: what others unmount goes here too, so this run keeps
    no namespace of others alive.
    """
    global _own_netns, _mounts_before
    if os.geteuid() != 0:
        yield
        return
    folder = Path.cwd()
    with open("/proc/self/ns/mnt", "rb") as before:
        try:
            _call("unshare", _CLONE_NEWNS)
        except PermissionError:
            # Root of a container without CAP_SYS_ADMIN: no network namespaces either.
            yield
            return
        try:
            _call("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
            NETNS.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                _call("umount2", bytes(NETNS), _MNT_DETACH)
            _call("mount", b"tombolo-lab", bytes(NETNS), b"tmpfs", 0, b"mode=755")
            _own_netns = NETNS.stat().st_dev
            _mounts_before = f"/proc/{os.getpid()}/fd/{before.fileno()}"
            yield
        finally:
            _own_netns = _mounts_before = None
            with contextlib.suppress(OSError):
                _call("umount2", bytes(NETNS), _MNT_DETACH)
            # Threads that still run share our root folder; then we stay, which harms nothing.
            with contextlib.suppress(OSError):
                _call("setns", before.fileno(), _CLONE_NEWNS)
                os.chdir(folder)


@contextlib.contextmanager
def _environment(changed: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _temporary_files(folder: Path) -> Iterator[None]:
    """Temporary files of this process and of its children go into `folder`."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        with _environment({"TMPDIR": str(folder)}):
            yield
    finally:
        tempfile.tempdir = before
