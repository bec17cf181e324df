"""What the daemon and the programs that it starts have given up, as the kernel tells it, and what QEMU can no longer do."""

import os
import subprocess

from lib import Fabric, need_program, need_root, scratch, until
from lib.fabric import PROGRAM
from lib.process import children, descriptors

FILE = """
name = "{name}"
[network.lan]
uplink = "user"
[cell.web]
app = "httpd"
[cell.mem]
app = "httpd"
attach = "ivshmem"
[cell.own]
app = "httpd"
qemu = ["-no-shutdown"]
"""
SYS_MODULE, NET_ADMIN, SYS_ADMIN = 16, 12, 21


def status_of(pid):
    with open(f"/proc/{pid}/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


def capabilities(status):
    return {bit for bit in range(64) if int(status["CapEff"], 16) >> bit & 1}


def flags_of(pid, fd):
    """The flags of an open descriptor, its own among them (proc_pid_fdinfo(5))."""
    with open(f"/proc/{pid}/fdinfo/{fd}") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))


def test_the_daemon_and_what_it_starts_are_confined():
    need_root()
    need_program("passt")
    name = f"confined{os.getpid()}"
    with scratch() as folder, Fabric(folder, FILE.format(name=name)) as fabric:
        until("every machine's ports", lambda: all(p["up"] for p in fabric.status()["ports"]))
        machines = {m["name"]: m["pid"] for m in fabric.status()["machines"]}
        daemon = fabric.process.pid
        [passt] = children(daemon, "passt")
        for pid in [daemon, passt, *machines.values()]:
            status = status_of(pid)
            assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2"), (pid, status["Name"], status["NoNewPrivs"], status["Seccomp"])
            assert SYS_MODULE not in capabilities(status), (pid, status["Name"])
        # What the daemon makes taps with, it has still; a machine keeps the right to open files
        # alone.
        assert NET_ADMIN in capabilities(status_of(daemon))
        for machine in ("web", "mem"):
            assert capabilities(status_of(machines[machine])) == {1, 2}, machine
            assert int(status_of(machines[machine])["CapBnd"], 16) == 6, machine
        # Nobody knows what arguments of the user's own need.
        assert SYS_ADMIN in capabilities(status_of(machines["own"]))
        # What a program would inherit that is started now: nothing of a guest's memory, and nothing
        # else.
        is_kept = lambda fd: flags_of(daemon, fd) & os.O_CLOEXEC  # noqa: E731
        inherited = {fd: target for fd, target in descriptors(daemon).items() if fd > 2 and not is_kept(fd)}
        assert not inherited, inherited
        fabric.down()


def test_a_confined_program_writes_nothing_but_what_it_is_given():
    with scratch() as folder:
        (folder / "run").mkdir()
        disk, other = folder / "disk", folder / "other"
        disk.write_text("old")
        other.write_text("precious")
        script = f"""
            read line < {other} && test "$line" = precious || echo cannot read
            echo new > {disk} || echo cannot write its disk
            echo device > /dev/null || echo cannot write a device
            echo bad > {other} 2> /dev/null && echo wrote another file
            echo bad > {folder}/made 2> /dev/null && echo made a file
            echo bad > {folder}/run/made 2> /dev/null && echo made a file in the runtime folder
            rm {other} 2> /dev/null && echo removed a file
            mount -t tmpfs none {folder}/run 2> /dev/null && echo mounted
            exit 7
        """
        other.write_text("precious\n")
        command = [PROGRAM, "confine", "--runtime", folder / "run", "--write", disk, "--", "/bin/bash", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (7, ""), (done.returncode, done.stdout, done.stderr)
        assert disk.read_text() == "new\n" and other.read_text() == "precious\n"
