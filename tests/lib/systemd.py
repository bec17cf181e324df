"""A systemd of the test's own: process 1 of its own namespaces, with units of the test and nothing of the machine's.

Its cgroups are below one that the test makes at the root of the machine's cgroup v2 hierarchy (no controller is needed). /run, /sys and the
units are its own, and all else but the test's folders can only be read, so that it changes nothing of the machine. It ends
with the `with`, and with it every process of its namespaces, whatever a service left behind.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from .machine import Skip, need_program, need_root
from .process import PATIENCE_S, Process, children, until

PROGRAMS = ("/lib/systemd/systemd", "/usr/lib/systemd/systemd")
# Default dependencies of every service; here they wait for nothing.
TARGETS = ("sysinit.target", "basic.target", "shutdown.target")
# What these read is in the environment, so that a search for a test's folder among command lines
# does not find them.
ENTER = """
set -e
echo $$ >"$CGROUP/cgroup.procs"
exec unshare --pid --fork --kill-child --mount --cgroup --uts --ipc --mount-proc sh -c "$PROCESS_1"
"""
PROCESS_1 = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /run
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
for each in $FOLDERS; do mount --bind "$each" "$each"; done
# It would raise limits in /proc/sys/fs; a fabric has settings of its network to make.
mount --bind /proc/sys /proc/sys
mount --bind /proc/sys/net /proc/sys/net
mount -o remount,bind,ro /proc/sys
mount -o remount,bind,ro /
# What says that it is in a container also says that it need not set up a machine.
exec env -i PATH="$PATH" container=test SYSTEMD_UNIT_PATH="$UNITS" SYSTEMD_GENERATOR_PATH="$NONE" \
    SYSTEMD_ENVIRONMENT_GENERATOR_PATH="$NONE" "$MANAGER" --system --unit=basic.target --log-target=null
"""


def cgroup_root():
    """Where the machine's cgroup v2 hierarchy is mounted, or a skip."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ", 1)
        if after.split()[0] == "cgroup2":
            return Path(before.split()[4])
    raise Skip("no cgroup v2 hierarchy is mounted, which systemd needs")


def remove_cgroup(cgroup):
    """Removes a cgroup of the test's, with those below it, once its processes have ended."""
    with contextlib.suppress(TimeoutError):
        until("the end of all processes", lambda: not (cgroup / "cgroup.events").read_text().count("populated 1"), 20)
    for path, _, _ in os.walk(cgroup, topdown=False):
        os.rmdir(path)


class Manager:
    """systemd in the network namespace `space`, with the files `units` ({name: text}). `folders` can be written by its services."""

    def __init__(self, folder, space, units, folders=()):
        need_root()
        need_program("systemctl")
        self.program = next(filter(os.path.exists, PROGRAMS), None)
        if self.program is None:
            raise Skip("systemd is not installed")
        self.folder, self.space, self.folders = folder, space, [folder, *folders]
        (folder / "none").mkdir()
        for name, text in [*units.items(), *((name, "[Unit]\nDefaultDependencies=no\n") for name in TARGETS)]:
            path = folder / "units" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.cgroup = cgroup_root() / f"tmb-{os.getpid()}"
        self.process = self.pid = None

    def __enter__(self):
        try:
            self.cgroup.mkdir()
        except OSError as error:
            raise Skip(f"no cgroup can be made: {error}") from None
        try:
            env = {"PROCESS_1": PROCESS_1, "CGROUP": self.cgroup, "MANAGER": self.program, "FOLDERS": " ".join(map(str, self.folders)),
                   "UNITS": self.folder / "units", "NONE": self.folder / "none"}
            self.process = Process(["sh", "-c", ENTER], name="systemd", netns=self.space, own_mounts=False,
                                   env={name: str(value) for name, value in env.items()})
            self.pid = until("process 1", self._process_1)
            until("systemd's start", self._runs)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def _process_1(self):
        assert self.process.alive(), self.process.tail()
        return next(iter(children(self.process.pid, "systemd")), None)

    def _runs(self):
        assert self.process.alive(), self.process.tail()
        return self.systemctl("is-system-running", check=False).stdout.strip() == "running"

    def __exit__(self, *_):
        if self.process:
            # The kernel kills the others of a PID namespace with its process 1, and that with this
            # one (--kill-child).
            self.process.kill()
        remove_cgroup(self.cgroup)

    def words(self, *argv):
        """The words before which a command runs beside the manager, in all of its namespaces."""
        return ["nsenter", "-t", str(self.pid), "-a", *map(str, argv)]

    def run(self, *argv, seconds=PATIENCE_S, check=True, env=None):
        """Runs a program in there and gives the CompletedProcess."""
        done = subprocess.run(self.words(*argv), capture_output=True, text=True, timeout=seconds, env=dict(os.environ, **(env or {})))
        if check and done.returncode:
            raise AssertionError(f"`{' '.join(map(str, argv))}` ended with {done.returncode}: {done.stdout.strip()} {done.stderr.strip()}")
        return done

    def systemctl(self, *words, seconds=120, check=True):
        return self.run("systemctl", "--no-pager", *words, seconds=seconds, check=check)

    def show(self, unit, *properties):
        """Properties of a unit, as text."""
        text = self.systemctl("show", unit, "-p", ",".join(properties)).stdout
        return dict(line.split("=", 1) for line in text.splitlines())

    def cgroups(self):
        """The cgroups of its services that exist."""
        return sorted(str(Path(path).relative_to(self.cgroup)) for path, _, _ in os.walk(self.cgroup) if path.endswith(".service"))

    def mounts(self):
        """The mount points of its namespace."""
        return sorted(line.split()[4] for line in Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines())

    def processes(self):
        """The processes of its PID namespace but itself, by their numbers there: {number there: number here}."""
        namespace, found = os.readlink(f"/proc/{self.pid}/ns/pid"), {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == namespace:
                    numbers = next(line for line in (entry / "status").read_text().splitlines() if line.startswith("NSpid:"))
                    found[int(numbers.split()[-1])] = int(entry.name)
        del found[1]
        return found
