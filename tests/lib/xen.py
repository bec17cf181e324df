"""A Xen host under QEMU: real Xen, a Linux dom0 that takes commands, and cells as domains (tools/xen/dom0.py builds it)."""

import collections
import contextlib
import gzip
import hashlib
import itertools
import re
import shlex
import shutil
import subprocess
import sys
import time

from .fabric import PROGRAM
from .guest import CellGuest, Commands, qemu_program
from . import scratch
from .machine import BUILD, ROOT, Skip
from .process import Process, until

sys.path.insert(0, str(ROOT / "tools/guest"))
from build import Archive, Modules, program_files  # noqa: E402

DOM0 = "10.9.0.1"
# The cell that most tests ask.
CELL = "10.9.0.2"
# How long a download may take at the most.
FETCH_S = 300
# httpd's /bytes/N: byte i is i modulo 251.
PATTERN = bytes(range(251))
MEMORY_MIB = 640
DOM0_MIB = 320
# QEMU without KVM has SVM only; Xen's PVH domains need nested paging. XSAVE, SMAP and AVX do not
# survive emulation here.
CPU = "qemu64,+svm,+npt,+rdrand"
XEN_LINE = f"console=com1 com1=115200,8n1 loglvl=warning guest_loglvl=all dom0_mem={DOM0_MIB}M,max:{DOM0_MIB}M dom0_max_vcpus=1 spec-ctrl=no"
DOM0_LINE = (
    "console=hvc0 rdinit=/init quiet loglevel=4 mitigations=off cryptomgr.notests init_on_alloc=0 lsm=none audit=0 apparmor=0 nokaslr "
    "noreplace-smp 8250.nr_uarts=0 hostname=dom0 net=none"
)

# The kernel command line of a Linux domain, whose process 1 is its /init.
LINUX_LINE = "console=hvc0 rdinit=/init quiet loglevel=2 mitigations=off nokaslr"

# A command that fits into what Xen buffers, and the part of a longer one that does so with what is
# around it.
LINE_BYTES = 110
PIECE_BYTES = 60
# How long a command may take before its host is sent an empty line.
WAKES_S = 30
_scripts = itertools.count(1)


class XenHost(Process, Commands):
    """Boots Xen and dom0, with the images of `cells` at /cells/NAME and `files` (name in dom0 -> bytes)."""

    attached = False

    def __init__(self, folder, cells=(), files=None, nice=None, memory_mib=MEMORY_MIB):
        if not (BUILD / "xen/version").exists():
            raise Skip("build/xen is not there: run ./x xen")
        more = Archive()
        for app in cells:
            image = CellGuest.IMAGES / app
            if not image.exists():
                raise Skip(f"the cell {app} is not built: run ./x cells")
            more.file(f"cells/{app}", image.read_bytes())
        for name, data in (files or {}).items():
            more.file(name, data)
        ramdisk = (BUILD / "xen/dom0.cpio").read_bytes()
        (folder / "dom0.cpio").write_bytes(ramdisk + b"\0" * (-len(ramdisk) % 4) + more.bytes())
        (folder / "vmlinux").symlink_to(BUILD / "xen/vmlinux")
        argv = [qemu_program(), "-M", "q35", "-accel", "tcg,tb-size=256", "-cpu", CPU, "-m", memory_mib, "-display", "none", "-nodefaults"]
        argv += ["-no-user-config", "-no-reboot", "-serial", "stdio", "-kernel", BUILD / "xen/xen", "-append", XEN_LINE]
        argv += ["-initrd", f"vmlinux {DOM0_LINE.replace(',', ',,')},dom0.cpio"]
        super().__init__(argv, name="xen", cwd=folder, stdin=True, nice=nice)
        # The whole lines of each domain's console that have been read.
        self._consoles = collections.defaultdict(list)

    def bring_up(self, seconds=240):
        """Waits for dom0 and starts what a Xen host runs; gives the seconds since QEMU's start."""
        self.wait_control(seconds)
        self.run("xen-start", seconds)
        return time.monotonic() - self.started

    def start(self, command):
        """As of every guest; but Xen holds 128 bytes of what its console is sent and drops the rest, so a longer command goes in pieces.
        So does one of several lines."""
        if len(command) <= LINE_BYTES and "\n" not in command:
            return super().start(command)
        script = f"/tmp/.c{next(_scripts)}"
        for line in command.splitlines():
            for at in range(0, len(line), PIECE_BYTES):
                self.finish(super().start(f"printf %s {shlex.quote(line[at : at + PIECE_BYTES])} >>{script}"))
            self.finish(super().start(f"echo >>{script}"))
        return super().start(f"sh {script}")

    def finish(self, handle, seconds=60, check=True):
        """As of every guest. An emulated Xen sometimes stands still, without using any CPU, until an interrupt comes that is not its timer's
        ("Platform timer appears to have unexpectedly wrapped"). The console's is one."""
        ident, since = handle
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > WAKES_S:
            with contextlib.suppress(TimeoutError):
                self.wait_line(lambda line: line.startswith(f"{ident}="), WAKES_S, since)
                break
            self.send("\n")
        return super().finish(handle, max(left, 1), check)

    def create(self, name, app, line="", memory_mib=32, mac="00:16:3e:00:00:02", vif=True):
        """Starts a cell as a PVH domain with xl (tools/xen/cell), with one vif or several (`mac` is what that takes as VIF)."""
        self.run(f"xen-cell {name} {app} {memory_mib} {mac if vif else 'none'} {shlex.quote(line)}", 120)

    def console(self, name):
        """What a domain has printed so far. What has been read is not asked for again: dom0's own console takes a millisecond for each
        line."""
        whole = self._consoles[name]
        read = self.run(f"tail -n +{len(whole) + 1} /var/log/xen/console/guest-{name}.log && echo", check=False)
        if read.code:
            return "\n".join(whole)
        *lines, rest = read.text.split("\n")
        whole += lines
        return "\n".join([*whole, rest])

    def wait_console(self, name, words, seconds=60):
        """Waits until a domain has printed `words`; gives all it printed."""
        has_words = lambda: (text := self.console(name)) and words in text and text  # noqa: E731
        try:
            return until(f"{name} prints {words!r}", has_words, seconds, 0.2)
        except TimeoutError:
            # A line that dom0's kernel has written into may have been read without them.
            del self._consoles[name]
            if text := has_words():
                return text
            raise

    def state(self, name):
        """xl's state letters of a domain, such as "-b----"; None where there is none of that name."""
        found = re.search(rf"^{re.escape(name)}\s+\d+\s+\d+\s+\d+\s+(\S+)", self.run("xl list", check=False).text, re.M)
        return found and found[1]

    def wait_gone(self, name, seconds=60):
        until(f"{name} is gone", lambda: self.state(name) is None, seconds, 0.2)

    def poweroff(self, seconds=60):
        self.send("@0 poweroff -f\n")
        return self.wait(seconds)


@contextlib.contextmanager
def host(*cells, files=None, memory_mib=MEMORY_MIB):
    """A Xen host that is up; its last lines are printed where the test fails."""
    with scratch() as folder, XenHost(folder, cells, files, memory_mib=memory_mib) as xen:
        try:
            print(f"Xen and dom0 were up after {xen.bring_up():.1f} s")
            yield xen
        except Exception:
            print(xen.tail(40))
            raise


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def pattern(size):
    """The `size` bytes of httpd's /bytes/SIZE."""
    return (PATTERN * (size // len(PATTERN) + 1))[:size]


def told_of(xen, address):
    """What dom0 and its domains say of a transfer that stands still."""
    fabric = "tombolo status --json 2>/dev/null | tr -s ' ' | tr -d '\\n'"
    consoles = "tail -n 4 /var/log/xen/console/guest-*.log"
    said = []
    for command in ("netstat -tn", f"ping -c 3 -W 2 {address}", "ip neigh", "cat /proc/net/dev", "xl list", fabric, consoles):
        try:
            said.append(f"{command}\n{xen.run(command, 30, check=False).text}")
        except TimeoutError:
            said.append(f"{command}\nno answer within 30 s")
    return "\n".join(said)


def fetch(xen, address, path, content, meanwhile=None):
    """Downloads http://ADDRESS/PATH to dom0 and compares its checksum with that of `content`. `meanwhile` happens while it comes: until
    that has returned, dom0 reads 128 KiB in 0.1 s, and from half of it on in 2 s, so that a fast machine is not ready before. A cell's
    httpd gives up a client that reads nothing for 30 s."""
    read = "cat"
    if meanwhile:
        blocks = len(content) // 2 // 65536
        paced = f"[ $n -lt {blocks} ] || usleep 1900000; n=$((n+2)); dd bs=64k count=2 iflag=fullblock status=none; usleep 100000"
        read = f"{{ touch /tmp/held; n=0; while [ -e /tmp/held ]; do {paced}; done; cat; }}"
    handle = xen.start(f"wget -q -O - http://{address}/{path} | {read} | sha256sum")
    if meanwhile:
        xen.run("until [ -e /tmp/held ]; do usleep 10000; done")
        meanwhile()
        xen.run("rm /tmp/held")
    try:
        text = xen.finish(handle, FETCH_S).text
    except TimeoutError:
        raise AssertionError(f"{address}/{path} has not come within {FETCH_S} s\n{told_of(xen, address)}") from None
    got, want = text.split()[0], sha256(content)
    assert got == want, f"{address}/{path} has the checksum {got}, expected {want}"


def fetch_bytes(xen, size, address=CELL, meanwhile=None):
    """`fetch` of `size` bytes from httpd."""
    fetch(xen, address, f"bytes/{size}", pattern(size), meanwhile)


def program_in_guest(program):
    """A program that ./x build made, and the libraries that it needs, as files of a Linux guest."""
    if not program.exists():
        raise Skip(f"{program} is not built: run ./x build")
    with scratch() as folder:
        stripped = folder / program.name
        subprocess.run(["strip", "-o", stripped, program], check=True)
        files = {f"bin/{program.name}": stripped.read_bytes()}
    return files | {name: path.read_bytes() for name, path in program_files(str(program)) if name.startswith("lib")}


def fabric_files(text):
    """What a Xen host needs beside its own files to run a fabric: the program, and /tombolo.toml with that text."""
    return program_in_guest(PROGRAM) | {"tombolo.toml": text.encode()}


def linux_init(then, has_vif=True):
    """Process 1 of a Linux domain: its programs, file systems, console, modules and network device (eth0, not yet up), and then these lines."""
    wait = "until [ -e /sys/class/net/eth0 ]; do usleep 10000; done" if has_vif else ""
    return f"""#!/bin/busybox sh
export PATH=/bin:/usr/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
exec </dev/console >/dev/console 2>&1
while read -r module; do insmod /lib/modules/$module; done </lib/modules/order
{wait}
ip link set lo up
{then}"""


def xl_config(name, mac, memory_mib, kernel="/domu/kernel", ramdisk=None, line="", vif="script=/bin/true", more=()):
    """The file for xl of a PVH domain, with one vif, or none where `mac` is None, and `more` lines. Without `ramdisk` the kernel is a cell."""
    rest = [f"ramdisk='{ramdisk}'", f"extra='{line or LINUX_LINE}'"] if ramdisk else [f"cmdline='{line}'"]
    return "\n".join(
        [
            f"name='{name}'",
            "type='pvh'",
            f"kernel='{kernel}'",
            *rest,
            f"memory={memory_mib}",
            # The default traps each reading of the time-stamp counter on a machine whose counter
            # Xen does not trust, as an emulated one.
            "tsc_mode='native'",
            "on_poweroff='destroy'",
            "on_reboot='preserve'",
            "on_crash='preserve'",
            *([f"vif=['mac={mac},{vif}']"] if mac else []),
            *more,
            "",
        ]
    )


def linux_guest(init, www, programs=(), modules=("xen_netfront",), files=None):
    """The ramdisk of a Linux domain with `init` as process 1, the files `www` in /www, these programs and modules, and `files` (name -> bytes); and its kernel, which is dom0's."""
    busybox = shutil.which("busybox")
    if not busybox:
        raise Skip("no busybox: apt-get install busybox-static")
    if not (BUILD / "xen/version").exists():
        raise Skip("build/xen is not there: run ./x xen")
    archive = Archive()
    for name in ("proc", "sys", "dev", "tmp", "run", "www"):
        archive.folder(name)
    archive.device("dev/console", 5, 1)
    archive.file("bin/busybox", open(busybox, "rb").read())
    archive.file("init", init.encode())
    archive.file("udhcpc", (ROOT / "tools/guest/udhcpc.script").read_bytes().replace(b"#!/bin/sh", b"#!/bin/busybox sh"))
    ordered = Modules(BUILD / "xen/tree").order(modules)
    content = {f"lib/modules/{name}.ko": data for name, data in ordered.items()}
    content["lib/modules/order"] = "".join(f"{name}.ko\n" for name in ordered).encode()
    content |= {f"www/{name}": data for name, data in www.items()}
    content |= {name: path.read_bytes() for program in programs for name, path in program_files(program)}
    for name, data in (content | (files or {})).items():
        archive.file(name, data)
    # Plain, the kernel takes 66 MB; libxl unpacks gzip in a second, and xz in six.
    return archive.bytes(), gzip.compress((BUILD / "xen/vmlinux").read_bytes(), 1)
