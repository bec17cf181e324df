"""Guests under QEMU: the stock Linux guest of tools/guest, and the cells.

The Linux guest is driven over its serial console by the line protocol that tools/guest/init describes.
"""

import itertools
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from .machine import BUILD, ROOT, Skip
from .process import Process, until

_ids = itertools.count(1)
_macs = itertools.count(1)


def qemu_program():
    """$TOMBOLO_QEMU, else the system's qemu-system-x86_64."""
    found = os.environ.get("TOMBOLO_QEMU") or shutil.which("qemu-system-x86_64")
    if not found:
        raise Skip("qemu-system-x86_64 is not installed")
    return found


def qemu_version(program):
    text = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"version (\d+)\.", text)[1])


def tsc_khz():
    """The rate of this machine's time-stamp counter, which an emulated guest reads as it is."""
    text = Path("/proc/cpuinfo").read_text()
    # arch/x86: bogomips is loops_per_jiffy * HZ / 500000, and loops_per_jiffy is the TSC's rate per
    # tick.
    return round(float(re.search(r"^bogomips\s*: ([\d.]+)", text, re.M)[1]) * 500)


def tsc_is_told():
    """Whether that rate is exact: the kernel was told it (CPUID, hypervisor) instead of having measured it."""
    return "tsc_known_freq" in re.search(r"^flags\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.M)[1].split()


class Net(NamedTuple):
    """One network card: the arguments of QEMU's backend, and whether guest memory must be shared for it."""

    backend: str
    chardev: str = ""
    shared: bool = False
    device: str = ""  # more properties of the device, such as "mq=on,vectors=6"
    mac: str = ""

    @staticmethod
    def user(options=""):
        """QEMU's own user networking; options such as "hostfwd=tcp:127.0.0.1:8080-:80"."""
        return Net("user,id=ID" + (f",{options}" if options else ""))

    @staticmethod
    def tap(name):
        """A tap that exists already, in the namespace that QEMU runs in."""
        return Net(f"tap,id=ID,ifname={name},script=no,downscript=no,vhost=off")

    @staticmethod
    def vhost_user(socket, server=False, queues=1, reconnect=1):
        """vhost-user over a Unix socket; QEMU connects, or listens as `server`."""
        side = "server=on,wait=off" if server else f"reconnect={reconnect}" if reconnect else ""
        pairs = f",queues={queues}" if queues > 1 else ""
        mq = f"mq=on,vectors={2 * queues + 2}" if queues > 1 else ""
        return Net(f"vhost-user,id=ID,chardev=chID{pairs}", f"socket,id=chID,path={socket},{side}".rstrip(","), True, mq)

    @staticmethod
    def stream(socket, server=False):
        """QEMU's stream framing over a Unix socket, as passt speaks it."""
        return Net(f"stream,id=ID,server={'on' if server else 'off'},addr.type=unix,addr.path={socket}")

    def with_mac(self, mac):
        return self._replace(mac=mac)

    def with_device(self, properties):
        return self._replace(device=properties)


class Guest(Process):
    """A guest under QEMU, its console at hand. `machine` is "microvm" or "q35"; no card is made that `nets` does not name.

    `accel` is "tcg" unless $TOMBOLO_ACCEL says otherwise: emulation works on every machine.
    """

    def __init__(self, kernel, nets=(), machine="microvm", memory_mib=64, append="", initrd=None, extra=(), name="guest",
                 netns=None, cpu=None, nice=None, qemu=None, acpi=False, pcie=False):
        program = qemu or qemu_program()
        self.program = program
        accel = os.environ.get("TOMBOLO_ACCEL", "tcg")
        self.machine = machine
        self.macs = []
        options = [f"{machine},accel={accel}"]
        if machine == "microvm" and not acpi:
            options.append("acpi=off")
        if machine == "microvm" and pcie:
            options.append("pcie=on")
        argv = [program, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"]
        argv += ["-m", str(memory_mib), "-smp", "1"]
        if machine == "microvm":
            # Debian's QEMU 10 takes SeaBIOS here if not told, which starts later and hands no ACPI
            # tables on.
            argv += ["-bios", "qboot.rom"]
        if accel == "kvm":
            argv += ["-cpu", "host"]
        if any(net.shared for net in nets):
            options.append("memory-backend=ram")
            argv += ["-object", f"memory-backend-memfd,id=ram,size={memory_mib}M,share=on"]
        argv += ["-M", ",".join(options), "-kernel", kernel]
        if append:
            argv += ["-append", append]
        if initrd:
            argv += ["-initrd", initrd]
        for number, net in enumerate(nets):
            ident = f"net{number}"
            mac = net.mac or f"52:54:00:{os.getpid() >> 8 & 255:02x}:{os.getpid() & 255:02x}:{next(_macs) & 255:02x}"
            self.macs.append(mac)
            if net.chardev:
                argv += ["-chardev", net.chardev.replace("ID", ident)]
            argv += ["-netdev", net.backend.replace("ID", ident)]
            device = net.device
            if machine == "microvm":
                # The MMIO transport has one interrupt; vectors are PCI's.
                device = ",".join(word for word in device.split(",") if word and not word.startswith("vectors="))
                kind = "virtio-net-device"
            else:
                kind = "virtio-net-pci,romfile="
                if net.shared and accel == "tcg" and qemu_version(program) < 10:
                    # QEMU 7.2 dies of SIGSEGV here with MSI-X (see docs of tools/qemu10.py).
                    device = ",".join(word for word in device.split(",") if word and not word.startswith("vectors=")) + ",vectors=0"
            argv += ["-device", ",".join(word for word in (kind, f"netdev={ident}", f"mac={mac}", device.strip(",")) if word)]
        argv += [str(word) for word in extra]
        super().__init__(argv, name=name, netns=netns, cpu=cpu, nice=nice, stdin=True)


class CommandFailed(AssertionError):
    """A command in a guest ended with another code than 0; the text has its output."""


class Result(NamedTuple):
    code: int
    text: str


def sequence_numbers(text):
    """Those of the replies that busybox's ping tells of."""
    return [int(number) for number in re.findall(r"seq=(\d+) ", text)]


class Commands:
    """Commands in a Linux guest over its console, by the line protocol of tools/guest/init; for a Process that holds one."""

    # True where this process joined a console that may have been running before: "@control" may be
    # long past.
    attached = True

    def wait_control(self, seconds=120, since=0):
        """Waits until commands are taken; gives the seconds since the process's start."""
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            if self.attached and not any(line.startswith("@control ") for _, line in self.lines):
                self.send("@ready true\n")
            try:
                ready = ("@control ", "@ready=")
                return self.wait_line(lambda line: line.startswith(ready), min(1.0, left) if self.attached else left, since)[0]
            except TimeoutError:
                if left <= 1.0 or not self.attached:
                    raise

    def wait_address(self, seconds=120, since=0):
        """Waits for eth0's address and gives it without the prefix length."""
        _, line, _ = self.wait_line(lambda line: line.startswith("@net up "), seconds, since)
        return line.split()[2].split("/")[0]

    def start(self, command):
        """Starts a command in the guest and gives a handle for `finish`; several may run at once."""
        if "\n" in command or len(command) > 4000:
            raise ValueError("a command is one line of up to 4000 bytes")
        self.wait_control()
        handle = (f"@{next(_ids)}", len(self.lines))
        self.send(f"{handle[0]} {command}\n")
        return handle

    def finish(self, handle, seconds=60, check=True):
        """Waits for a started command; its exit code and its output (both streams)."""
        ident, since = handle
        _, line, number = self.wait_line(lambda line: line.startswith(f"{ident}="), seconds, since)
        prefix = f"{ident}|"
        text = "\n".join(line[len(prefix):] for _, line in self.lines[since:number] if line.startswith(prefix))
        result = Result(int(line.split("=")[1]), text)
        if check and result.code:
            raise CommandFailed(f"{self.name}: command ended with {result.code}:\n{text}")
        return result

    def run(self, command, seconds=60, check=True):
        """Runs one command line in the guest's shell; raises CommandFailed on another code than 0 unless `check` is off."""
        return self.finish(self.start(command), seconds, check)

    def ping(self, target, count=3, size=56, seconds=8):
        """Pings from within; the share of replies to the first `count` requests, 0.0 to 1.0.

        Not by `ping -c`, which waits for the last reply no longer than a second: it goes on until that reply or a later one, and where none
        comes for `seconds` longer."""
        stop = f"awk -F seq= 'NF > 1 {{ print; if ($2 + 0 >= {count - 1}) exit }}'"
        text = self.run(f"ping -s {size} -i 0.2 -w {count // 5 + seconds} {target} | {stop}", check=False).text
        return len({number for number in sequence_numbers(text) if number < count}) / count

    def start_pings(self, target):
        """Pings from within, 20 a second, until `finish_pings`."""
        self.run(f"ping -i 0.05 {target} >/tmp/pings 2>&1 & echo $! >/tmp/pings.pid")

    def finish_pings(self):
        """Ends them: how many were sent up to the last one with a reply, and to how many of these replies came. What is under way when they
        end is no loss; that it goes on until then is waited for."""
        seen = self._pinged()
        until("another reply", lambda: self._pinged() > seen)
        self.run("kill $(cat /tmp/pings.pid)")
        numbers = sequence_numbers(self.run("grep -o 'seq=[0-9]* ' /tmp/pings").text)
        return max(numbers) + 1, len(set(numbers))

    def _pinged(self):
        """How many replies there are so far."""
        return int(self.run("grep -c seq= /tmp/pings", check=False).text)


def linux_cmdline(hostname, serve="", *more):
    """What the stock Linux guest is started with: its name, and the servers that it runs ("http", "iperf", both by a comma)."""
    khz = tsc_khz()
    # Without a given rate the guest's calibration against emulated timers can hang; HZ of Debian's
    # kernel is 250.
    words = ["console=ttyS0", "quiet", "panic=-1", "mitigations=off", "reboot=t", f"tsc_early_khz={khz}", f"lpj={khz * 4}"]
    return " ".join(filter(None, [*words, f"hostname={hostname}", serve and f"serve={serve}", *more]))


class LinuxGuest(Guest, Commands):
    """The stock Linux guest. `serve` is a list of "http" and "iperf"; `address` is "dhcp", "none" or "A.B.C.D/P[,GW[,DNS]]"."""

    attached = False

    def __init__(self, net=None, nets=None, hostname="linux", serve="", address="dhcp", machine="microvm", memory_mib=192,
                 append="", **others):
        folder = BUILD / "guest"
        # microvm boots the ELF by its PVH entry, q35 the packed kernel by firmware.
        kernel = folder / ("vmlinux" if machine == "microvm" else "vmlinuz")
        if not kernel.exists():
            raise Skip("build/guest is not there: run ./x guest")
        super().__init__(kernel, nets if nets is not None else [net] if net else [], machine=machine, memory_mib=memory_mib,
                         append=linux_cmdline(hostname, serve, f"net={address}", append), initrd=folder / "initramfs.cpio", name=hostname, acpi=True,
                         **others)

    def poweroff(self, seconds=60):
        """Shuts the guest down and gives QEMU's exit code."""
        self.send("@0 poweroff -f\n")
        return self.wait(seconds)


class CellGuest(Guest):
    """A cell by the name of its app; its image is what `./x cells` built, or lies in $TOMBOLO_APPS."""

    IMAGES = Path(os.environ.get("TOMBOLO_APPS") or ROOT / "cells/target/x86_64-unknown-linux-gnu/release")

    def __init__(self, app, net=None, nets=None, append="", machine="microvm", memory_mib=64, extra=(), **others):
        image = self.IMAGES / app
        if not image.exists():
            raise Skip(f"the cell {app} is not built: run ./x cells")
        extra = ["-device", "isa-debug-exit,iobase=0xf4,iosize=4", *extra]
        # As crates/host does: an emulated cell need not spend its first milliseconds on finding it.
        if os.environ.get("TOMBOLO_ACCEL", "tcg") == "tcg" and tsc_is_told():
            append = f"tsc_khz={tsc_khz()} {append}"
        super().__init__(image, nets if nets is not None else [net] if net else [], machine=machine, memory_mib=memory_mib,
                         append=append, name=app, extra=extra, **others)
