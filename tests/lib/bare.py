"""A bare Debian system, in namespaces of its own, in which packages are installed, tried and purged.

`./x package root` makes the system once (mmdebstrap); each `Bare` unpacks it into a folder that is gone afterwards. It sees no process,
no network and no mount of this machine; of /dev it has what every program needs, and KVM's and the taps' devices.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .machine import BUILD, ROOT, need_program, need_root
from .process import PATIENCE_S, Process, children, until
from .systemd import cgroup_root, remove_cgroup

sys.path.insert(0, str(ROOT / "tools"))
DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "net/tun", "kvm")
START = """
set -e
mount --make-rprivate /
mount --bind "$BARE" "$BARE"
cd "$BARE"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs tmpfs tmp
mount -t tmpfs -o mode=755 tmpfs dev
mkdir -p dev/net dev/pts dev/shm
for each in $DEVICES; do [ ! -e /dev/$each ] || { : >dev/$each; mount --bind /dev/$each dev/$each; }; done
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t tmpfs tmpfs dev/shm
ip link set lo up
"""
# Process 1 has to reap, so it is a shell that waits.
SHELL = START + "exec chroot . sh -c 'while :; do sleep 3600 & wait $!; done'"
# Or a systemd, which changes nothing of the machine: what says that it is in a container also says
# that it need not set up one.
SYSTEMD = START + """
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount --bind proc/sys proc/sys
mount --bind proc/sys/net proc/sys/net
mount -o remount,bind,ro proc/sys
exec chroot . env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=test \
    /usr/lib/systemd/systemd --system --unit=multi-user.target --log-target=null
"""
# Of dpkg, rpm and the linker, which note every package.
NOTES = ("var/lib/dpkg", "var/lib/rpm", "var/log", "var/cache/ldconfig", "etc/ld.so.cache")


class Bare:
    """The system, as a `with`: `.run("command", …)` within, `.install(deb, …)`, `.files()`. Where `systemd` is asked for, that is its
    process 1."""

    def __init__(self, systemd=False):
        need_root()
        self.systemd = systemd
        self.cgroup = cgroup_root() / f"tmb-bare-{os.getpid()}" if systemd else None
        for program in ("mmdebstrap", "chroot", "unshare", "nsenter"):
            need_program(program)
        self.folder = self.process = self.pid = None

    def __enter__(self):
        import package
        tar = package.root(package.WITH_SYSTEMD if self.systemd else package.BARE)
        self.folder = Path(tempfile.mkdtemp(dir=BUILD / "package", prefix="bare."))
        try:
            subprocess.run(["tar", "-xf", tar, "-C", self.folder, "--exclude=./dev/*"], check=True)
            command = ["unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
            env = {"BARE": str(self.folder), "DEVICES": " ".join(DEVICES)}
            if self.systemd:
                self.cgroup.mkdir()
                env["CGROUP"] = str(self.cgroup)
                command = ["sh", "-c", 'echo $$ >"$CGROUP/cgroup.procs"; exec "$@"', "sh", *command, "--cgroup", "sh", "-c", SYSTEMD]
            else:
                command += ["sh", "-c", SHELL]
            self.process = Process(command, name="bare system", env=env)
            self.pid = until("the bare system", self._process_1)
            if self.systemd:
                until("systemd's start", self._has_started, PATIENCE_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _process_1(self):
        assert self.process.alive(), self.process.tail()
        pid = next(iter(children(self.process.pid)), None)
        # It is there as soon as it has changed its root.
        return pid if pid and os.readlink(f"/proc/{pid}/root") == str(self.folder) else None

    def _has_started(self):
        assert self.process.alive(), self.process.tail()
        # "degraded" where a unit of Debian's found nothing that it is for.
        return self.run("systemctl", "is-system-running", check=False).stdout.strip() in ("running", "degraded")

    def __exit__(self, *_):
        if self.process:
            # The kernel kills the rest of its PID namespace, and its mounts go with that.
            self.process.kill()
        if self.cgroup and self.cgroup.exists():
            remove_cgroup(self.cgroup)
        if self.folder:
            # A mount that a dying process still holds is not in this namespace.
            shutil.rmtree(self.folder)

    def run(self, *argv, seconds=PATIENCE_S, check=True, env=None):
        """Runs a command in the system, and gives the CompletedProcess."""
        surroundings = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive", "HOME": "/"}
        command = ["nsenter", "-t", str(self.pid), "-m", "-n", "-p", "-i", "-u", "-r", "-w", "env", "-i"]
        command += [f"{name}={value}" for name, value in (surroundings | (env or {})).items()]
        done = subprocess.run([*command, *map(str, argv)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
        if check and done.returncode:
            raise AssertionError(f"`{' '.join(map(str, argv))}` ended with {done.returncode}: {done.stdout.strip()} {done.stderr.strip()}")
        return done

    def write(self, path, text):
        """A file of the system."""
        to = self.folder / path.lstrip("/")
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(text)

    def dpkg(self, *words):
        return self.run("dpkg", *words, seconds=5 * PATIENCE_S)

    def install(self, *debs):
        """Packages of this machine's files, by dpkg alone: what they depend on has to be there."""
        folder = self.folder / "var/debs"
        folder.mkdir()
        names = [shutil.copy(deb, folder) for deb in debs]
        self.dpkg("--install", *(f"/var/debs/{Path(name).name}" for name in names))
        shutil.rmtree(folder)

    def rpm(self, *words):
        """Packages of RPM, by the machine's rpm, since the system has none: it changes its root to the system's for their scripts, and sees
        the system's processes and mounts. What packages depend on is Debian's here, which rpm does not know. Gives what was said."""
        command = ["nsenter", "-t", str(self.pid), "-m", "-n", "-p", "-i", "-u", "env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"]
        changes = words[0] in ("-i", "-U", "-e")
        command += ["rpm", "--root", str(self.folder), "--dbpath", "/var/lib/rpm", *(["--nodeps"] if changes else []), *map(str, words)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5 * PATIENCE_S)
        # A script that fails is a warning only for some kinds of scripts.
        assert done.returncode == 0 and "scriptlet failed" not in done.stderr, f"rpm {' '.join(map(str, words))}: {done.stdout} {done.stderr}"
        return done.stdout + done.stderr

    def files(self):
        """Every file, folder and link of the system with its size, but what is mounted there and what dpkg notes."""
        found = {}
        for folder, folders, files in os.walk(self.folder):
            relative = Path(folder).relative_to(self.folder)
            folders[:] = [name for name in folders if str(relative / name) not in NOTES]
            for name in (*folders, *files):
                path = relative / name
                if str(path) not in NOTES:
                    status = (self.folder / path).lstat()
                    found[str(path)] = status.st_size if name in files else None
        return found

    def runtime_files(self):
        """What is in /run, which is mounted."""
        return self.run("find", "/run", "-mindepth", "1").stdout.split()

    def processes(self):
        """The command lines of its processes, but for process 1 and what that waits for."""
        text = self.run("sh", "-c", "for each in /proc/[0-9]*; do tr '\\0' ' ' <$each/cmdline; echo; done").stdout
        own = ("sh -c", "sleep 3600", "tr ", "nsenter")
        return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(own)]
