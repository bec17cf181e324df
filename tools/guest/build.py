#!/usr/bin/env python3
"""Builds the stock Linux guest: Debian's cloud kernel and a busybox initramfs, without root.

The kernel package is found by its meta package's dependency (its name changes with every security update), fetched
by `apt-get download`, and unpacked, never installed. Outputs, in build/guest/:

    vmlinuz         the kernel as packaged (for -M q35, or microvm's firmware)
    vmlinux         the ELF inside it, which has a PVH entry (for -M microvm)
    initramfs.cpio  busybox, the virtio modules, iperf 2 with its libraries, /init
    version         what the three were built from; a second run with the same inputs does nothing
    qga.cpio        Debian's qemu-guest-agent, an archive to be put behind initramfs.cpio
    initramfs-agent.cpio   with --agent: the same with tombolo-agent, and what it needs to reach an ivshmem device

Exit code 0 with the outputs in place, 1 with one line saying what is missing and how to get it.
"""

import argparse
import hashlib
import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
META_PACKAGES = ("linux-image-cloud-amd64", "linux-image-virtual")
# What virtio-net and disks need on PCI and on MMIO. A name the kernel has built in is passed over.
WANTED = ("virtio_pci", "virtio_mmio", "virtio_net", "virtio_rng", "virtio_blk")
# What the agent needs more: a tap, and vfio for its interrupts. Loaded only where the guest runs
# it.
AGENT_WANTED = ("tun", "vfio_pci", "vfio_iommu_type1")
# Dynamic programs that come along with their libraries, when this machine has them.
PROGRAMS = ("iperf", "ethtool")
# The QEMU guest agent; and those of its libraries that this machine may lack. Their names differ
# between releases.
QGA_PACKAGE = "qemu-guest-agent"
QGA_LIBRARY = re.compile(r"lib(glib2|uring|udev|pcre2)\S*")


class Missing(Exception):
    """Something this machine lacks; the text says what and what to do."""


def run(*argv, **kwargs):
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, **kwargs).stdout


def kernel_package():
    """The name and version of the package that holds the current cloud kernel of this release."""
    for meta in META_PACKAGES:
        found = subprocess.run(["apt-cache", "depends", meta], capture_output=True, text=True).stdout
        match = re.search(r"Depends: (linux-image-[0-9]\S+)", found)
        if match:
            shown = run("apt-cache", "show", "--no-all-versions", match[1])
            return match[1], re.search(r"^Version: (\S+)", shown, re.M)[1]
    raise Missing(f"apt knows none of {', '.join(META_PACKAGES)}: run `apt-get update` once (the package lists are needed)")


def download(packages, into):
    """Downloads and unpacks packages below `into`; needs no privilege, changes nothing of the system."""
    with tempfile.TemporaryDirectory(dir=into.parent) as folder:
        command = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", *packages]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise Missing(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
        for deb in Path(folder).glob("*.deb"):
            run("dpkg-deb", "-x", str(deb), str(into))


def qga_packages():
    """The packages of the QEMU guest agent and of the libraries that it needs, in this release."""
    without = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
    listed = run("apt-cache", "depends", "--recurse", *(f"--no-{kind}" for kind in without), QGA_PACKAGE)
    # Lines with a name at their beginning are packages; those that are indented are why.
    names = {line for line in listed.splitlines() if QGA_LIBRARY.fullmatch(line)}
    return [QGA_PACKAGE, *sorted(names)]


def extract_elf(image):
    """The ELF kernel inside a bzImage: its payload is found by the boot protocol's own fields."""
    data = image.read_bytes()
    if data[0x202:0x206] != b"HdrS":
        # Boot protocol header magic is at 0x202 (Linux boot.rst, "The Real-Mode Kernel Header").
        raise Missing(f"{image} is no bzImage")
    setup = (data[0x1F1] or 4) + 1
    offset, length = struct.unpack_from("<II", data, 0x248)
    payload = data[setup * 512 + offset : setup * 512 + offset + length]
    # The last four bytes of the payload are the size of the unpacked kernel, except for gzip, whose
    # own end it is.
    if payload.startswith(b"\x1f\x8b"):
        elf = zlib.decompressobj(31).decompress(payload)
    elif payload.startswith(b"\xfd7zXZ"):
        elf = lzma.LZMADecompressor().decompress(payload)
    else:
        for magic, tool in ((b"\x02\x21\x4c\x18", "lz4"), (b"\x28\xb5\x2f\xfd", "zstd")):
            if payload.startswith(magic):
                break
        else:
            raise Missing(f"{image}: payload of unknown packing {payload[:4].hex()}")
        if not shutil.which(tool):
            raise Missing(f"the kernel is packed with {tool}: apt-get install {tool}")
        done = subprocess.run([tool, "-d", "-c", "-q"], input=payload[:-4], stdout=subprocess.PIPE, check=True)
        elf = done.stdout
    if not elf.startswith(b"\x7fELF"):
        raise Missing(f"{image}: the payload is no ELF file")
    return elf


class Modules:
    """The modules of one unpacked kernel, and what each needs."""

    def __init__(self, tree):
        self.paths = {}
        for path in tree.rglob("*.ko*"):
            self.paths[path.name.split(".ko")[0].replace("-", "_")] = path
        builtin = next(iter(tree.rglob("modules.builtin")), None)
        names = builtin.read_text().split() if builtin else []
        self.builtin = {Path(name).name.removesuffix(".ko").replace("-", "_") for name in names}

    def read(self, name):
        path = self.paths[name]
        data = path.read_bytes()
        if path.suffix == ".xz":
            return lzma.decompress(data)
        if path.suffix == ".zst":
            return subprocess.run(["zstd", "-d", "-c", "-q"], input=data, stdout=subprocess.PIPE, check=True).stdout
        return data

    def order(self, wanted):
        """Names in an order in which each can be loaded, with what they depend on, each once."""
        loaded = {}

        def load(name):
            if name in loaded or name in self.builtin:
                return
            if name not in self.paths:
                raise Missing(f"this kernel has no module {name}, built in or not")
            data = self.read(name)
            depends = re.search(rb"\0depends=([^\0]*)\0", data)
            for other in depends[1].decode().split(",") if depends and depends[1] else ():
                load(other.replace("-", "_"))
            loaded[name] = data

        for name in wanted:
            load(name)
        return loaded


class Archive:
    """A cpio archive in the 'newc' form, written without root: every entry is root's by decree."""

    def __init__(self):
        self.parts = []
        self.inode = 1
        self.seen = set()

    def _entry(self, name, mode, data=b"", device=(0, 0)):
        path = name.encode() + b"\0"
        fields = (self.inode, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(path), 0)
        self.inode += 1
        head = b"070701" + b"".join(b"%08x" % field for field in fields)
        for part in (head + path, data):
            self.parts.append(part + b"\0" * (-len(part) % 4))

    def folder(self, name):
        parent = os.path.dirname(name)
        if parent and parent not in self.seen:
            self.folder(parent)
        if name not in self.seen:
            self.seen.add(name)
            self._entry(name, 0o040755)

    def file(self, name, data, mode=0o755):
        self.folder(os.path.dirname(name)) if os.path.dirname(name) else None
        self.seen.add(name)
        self._entry(name, 0o100000 | mode, data)

    def link(self, name, target):
        self.folder(os.path.dirname(name))
        self._entry(name, 0o120777, target.encode())

    def device(self, name, major, minor):
        self.folder(os.path.dirname(name))
        self._entry(name, 0o020600, device=(major, minor))

    def bytes(self):
        self._entry("TRAILER!!!", 0)
        return b"".join(self.parts)


def program_files(name):
    """A dynamic program and each library it names, as (path in the guest, file here)."""
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if not path:
        return
    yield f"bin/{name}", Path(path)
    for line in run("ldd", path).splitlines():
        match = re.search(r"(?:=> )?(/\S+) \(0x", line)
        if match:
            yield match[1].lstrip("/"), Path(match[1])


def initramfs(modules, busybox):
    archive = Archive()
    for name in ("proc", "sys", "dev", "tmp", "run", "var", "root", "sbin", "usr/bin", "etc", "www/bytes"):
        archive.folder(name)
    archive.device("dev/console", 5, 1)
    archive.device("dev/null", 1, 3)
    archive.file("bin/busybox", busybox)
    archive.link("bin/sh", "busybox")
    archive.file("init", (HERE / "init").read_bytes())
    archive.file("etc/udhcpc", (HERE / "udhcpc.script").read_bytes())
    archive.file("etc/resolv.conf", b"", 0o644)
    archive.file("www/index.html", (HERE / "index.html").read_bytes(), 0o644)
    for name, data in modules.items():
        archive.file(f"lib/modules/{name}.ko", data, 0o644)
    archive.file("lib/modules/order", "".join(f"{name}.ko\n" for name in modules).encode(), 0o644)
    done = set()
    for program in PROGRAMS:
        for name, path in program_files(program):
            if name not in done:
                done.add(name)
                archive.file(name, path.read_bytes())
    return archive.bytes()


def with_agent(initramfs, modules, already, agent):
    """The same guest with the agent: a second archive behind the first, which Linux unpacks one after the other
    (Linux Documentation/driver-api/early-userspace/buffer-format)."""
    more = Archive()
    names = [name for name in modules if name not in already]
    for name in names:
        more.file(f"lib/modules/{name}.ko", modules[name], 0o644)
    more.file("lib/modules/agent-order", "".join(f"{name}.ko\n" for name in names).encode(), 0o644)
    more.file("bin/tombolo-agent", agent)
    # The buffer format wants each archive to begin at a multiple of four bytes.
    return initramfs + b"\0" * (-len(initramfs) % 4) + more.bytes()


def add_qga(out):
    """Makes qga.cpio, an archive to be put behind initramfs.cpio: Debian's qemu-guest-agent with its libraries, and the module
    of the port that it answers at. The init of the guest loads it and starts the agent where `qga` is on its command line."""
    mark, wanted = out / "version-qga", hashlib.sha256((out / "version").read_bytes() + Path(__file__).read_bytes()).hexdigest()
    if mark.exists() and mark.read_text() == wanted and (out / "qga.cpio").exists():
        return
    tree = next((out / "kernel").iterdir())
    unpacked = out / "qga"
    if not (unpacked / "usr/sbin/qemu-ga").exists():
        shutil.rmtree(unpacked, ignore_errors=True)
        unpacked.mkdir()
        download(qga_packages(), unpacked)
    archive = Archive()
    modules = Modules(tree)
    already = modules.order(WANTED)
    names = {name: data for name, data in modules.order(("virtio_console",)).items() if name not in already}
    for name, data in names.items():
        archive.file(f"lib/modules/{name}.ko", data, 0o644)
    archive.file("lib/modules/qga-order", "".join(f"{name}.ko\n" for name in names).encode(), 0o644)
    archive.file("bin/qemu-ga", (unpacked / "usr/sbin/qemu-ga").read_bytes())
    folders = ":".join(sorted({str(path.parent) for path in unpacked.rglob("*.so*")}))
    found = run("ldd", str(unpacked / "usr/sbin/qemu-ga"), env=dict(os.environ, LD_LIBRARY_PATH=folders))
    if "not found" in found:
        raise Missing(f"libraries of qemu-ga: {found}")
    for line in found.splitlines():
        match = re.search(r"(?:=> )?(/\S+) \(0x", line)
        if match:
            path = Path(match[1])
            inside = path.relative_to(unpacked) if path.is_relative_to(unpacked) else path.relative_to("/")
            archive.file(str(inside), path.read_bytes())
    write(out, {"qga.cpio": archive.bytes()})
    mark.write_text(wanted)
    print(f"guest: qga.cpio {(out / 'qga.cpio').stat().st_size >> 10} KiB")


def write(out, made):
    """Puts outputs in place, each at once."""
    for name, data in made.items():
        (out / f".{name}").write_bytes(data)
        (out / f".{name}").rename(out / name)


def add_agent(out, agent):
    """Makes initramfs-agent.cpio of the guest that stands in `out`, unless it is of the same guest and agent already."""
    agent = agent.read_bytes()
    digest = hashlib.sha256((out / "version").read_bytes() + agent).hexdigest()
    mark = out / "version-agent"
    if mark.exists() and mark.read_text() == digest and (out / "initramfs-agent.cpio").exists():
        return
    trees = list((out / "kernel").iterdir())
    if len(trees) != 1:
        raise Missing(f"{out / 'kernel'} holds {len(trees)} kernels, 1 is expected: remove build/guest and run this again")
    modules = Modules(trees[0])
    archive = with_agent((out / "initramfs.cpio").read_bytes(), modules.order(AGENT_WANTED), modules.order(WANTED), agent)
    write(out, {"initramfs-agent.cpio": archive})
    mark.write_text(digest)
    print(f"guest: initramfs-agent.cpio {len(archive) >> 10} KiB")


def stamp(package, version, busybox):
    """Changes when anything that goes into the outputs changes."""
    digest = hashlib.sha256(busybox)
    for path in sorted(HERE.iterdir()):
        if path.is_file():
            digest.update(path.read_bytes())
    for program in PROGRAMS:
        for _, path in program_files(program):
            digest.update(path.read_bytes())
    return f"{package} {version} {digest.hexdigest()[:16]}\n"


def main():
    options = arguments()
    build(options)
    add_qga(options.out)
    if options.agent:
        add_agent(options.out, options.agent)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build/guest")
    parser.add_argument("--offline", action="store_true", help="use what is there; fail if nothing is")
    parser.add_argument("--agent", type=Path, help="tombolo-agent, linked statically (./x agent)")
    return parser.parse_args()


def build(options):
    out = options.out
    outputs = [out / name for name in ("vmlinuz", "vmlinux", "initramfs.cpio", "version")]
    complete = all(path.exists() for path in outputs)
    if options.offline and complete:
        return print(f"guest: {(out / 'version').read_text().strip()} (as it was)")
    busybox = shutil.which("busybox")
    if not busybox:
        raise Missing("no busybox: apt-get install busybox-static")
    busybox = Path(busybox).read_bytes()
    try:
        package, version = kernel_package()
    except Missing:
        # Without package lists a guest that was built before is better than none.
        if complete:
            return print(f"guest: {(out / 'version').read_text().strip()} (not checked for a newer kernel)")
        raise
    wanted = stamp(package, version, busybox)
    if complete and (out / "version").read_text() == wanted:
        return print(f"guest: {wanted.strip()} (up to date)")
    out.mkdir(parents=True, exist_ok=True)
    tree = out / "kernel" / f"{package}_{version}".replace(":", "_")
    if not (tree / "boot").exists():
        shutil.rmtree(out / "kernel", ignore_errors=True)
        tree.mkdir(parents=True)
        names = [package]
        if META_PACKAGES[0] not in package and "cloud" not in package:
            names.append(package.replace("linux-image-", "linux-modules-"))
        print(f"guest: downloading {' '.join(names)} {version} (unpacked below {out.name}/, not installed)")
        download(names, tree)
    image = next((tree / "boot").glob("vmlinuz-*"))
    modules = Modules(tree).order(WANTED)
    made = {"vmlinuz": image.read_bytes(), "vmlinux": extract_elf(image), "initramfs.cpio": initramfs(modules, busybox)}
    write(out, made)
    (out / "version").write_text(wanted)
    print(f"guest: {wanted.strip()}: " + ", ".join(f"{name} {len(data) >> 10} KiB" for name, data in made.items()))


if __name__ == "__main__":
    try:
        main()
    except (Missing, subprocess.CalledProcessError) as error:
        sys.exit(f"guest: {error}")
