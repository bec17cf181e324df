#!/usr/bin/env python3
"""Builds what boots real Xen under QEMU: the hypervisor, a Linux dom0 and its ramdisk, without root.

The packages are fetched by `apt-get download` and unpacked, never installed. dom0 is the stock Linux guest of tools/guest
(same init, same commands over its console) with the modules and programs of a Xen host. Outputs, in build/xen/:

    xen             the hypervisor, unpacked, as QEMU's own loader takes it (multiboot)
    vmlinux         dom0's kernel; unpacked here, since Xen needs 6 s for it under emulation
    dom0.cpio       dom0's ramdisk; /bin/xen-start brings the Xen host up
    version         what the three were built from; a second run with the same inputs does nothing

Exit code 0 with the outputs in place, 1 with one line saying what is missing and how to get it.
"""

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUT = ROOT / "build/xen"
sys.path.insert(0, str(ROOT / "tools/guest"))
from build import PROGRAMS, Archive, Missing, Modules, download, extract_elf, initramfs, program_files, run, write  # noqa: E402

# The cloud kernel cannot be a dom0; the general one can.
KERNEL_META = "linux-image-amd64"
XEN_META = "xen-system-amd64"
# Beside the hypervisor and its tools: what these link with and no Debian system has by itself.
LIBRARIES = (
    "libxencall1", "libxendevicemodel1", "libxenevtchn1", "libxenforeignmemory1", "libxengnttab1", "libxenhypfs1", "libxenstore4",
    "libxentoolcore1", "libxentoollog1", "libyajl2", "xenstore-utils",
)
MODULES = ("xen_evtchn", "xen_privcmd", "xen_gntdev", "xen_gntalloc", "xenfs", "bridge", "xen_netback", "tun")
TOOLS = ("xl", "xenstored", "xenconsoled", "xen-init-dom0", "xenconsole", "libxl-save-helper", "lsevtchn", "xenstore-control")
XENSTORE_NAMES = ("read", "write", "ls", "list", "rm", "watch", "exists")
# glibc loads it by name when a thread is cancelled, so ldd does not know.
LOADED_BY_NAME = "libgcc_s.so.1"


def depends(package, pattern):
    found = subprocess.run(["apt-cache", "depends", package], capture_output=True, text=True).stdout
    match = re.search(rf"Depends: ({pattern})$", found, re.M)
    if not match:
        raise Missing(f"apt does not know {package}: it is Debian's; run `apt-get update` once (the package lists are needed)")
    return match[1]


def packages():
    """The packages and their versions. Names are looked up: both change with updates."""
    hypervisor = depends(XEN_META, r"xen-hypervisor-[0-9]\S+")
    release = re.search(r"[0-9.]+[0-9]", hypervisor)[0]
    names = [depends(KERNEL_META, r"linux-image-[0-9]\S+"), hypervisor, f"xen-utils-{release}", f"libxenmisc{release}", *LIBRARIES]
    shown = run("apt-cache", "show", "--no-all-versions", *names)
    versions = re.findall(r"^Version: (\S+)", shown, re.M)
    return names, release, " ".join(f"{name}={version}" for name, version in zip(re.findall(r"^Package: (\S+)", shown, re.M), versions, strict=True))


def library_files(program, folders):
    """The libraries that a program of the unpacked packages needs, as (name, file): from these packages, else from this machine."""
    env = dict(os.environ, LD_LIBRARY_PATH=":".join(map(str, folders)))
    for line in run("ldd", str(program), env=env).splitlines():
        match = re.search(r"(\S+) => (\S+) \(0x", line) or re.search(r"(/\S+()) \(0x", line)
        if match and "not found" in line:
            raise Missing(f"{program.name} needs {match[1]}")
        if match and match[2]:
            yield f"lib/x86_64-linux-gnu/{match[1]}", Path(match[2])
        elif match:
            yield match[1].lstrip("/"), Path(match[1])


def overlay(tree, release):
    """The archive behind the guest's own: programs, their libraries, configuration."""
    archive, done = Archive(), set()

    def add(name, path):
        if name not in done:
            done.add(name)
            archive.file(name, path.read_bytes())

    # The guest's own archive has these already.
    for program in PROGRAMS:
        done.update(name for name, _ in program_files(program))
    folders = sorted({path.parent for path in tree.rglob("*.so*")})
    programs = [tree / f"usr/lib/xen-{release}/bin/{name}" for name in TOOLS] + [tree / "usr/bin/xenstore"]
    for program in programs:
        add(f"usr/lib/xen-{release}/bin/{program.name}", program)
        archive.link(f"usr/bin/{program.name}", f"/usr/lib/xen-{release}/bin/{program.name}")
        for name, path in library_files(program, folders):
            add(name, path)
    gcc = next((path for path in (Path(f"/lib/x86_64-linux-gnu/{LOADED_BY_NAME}"), Path(f"/usr/lib/x86_64-linux-gnu/{LOADED_BY_NAME}")) if path.exists()), None)
    if gcc is None:
        raise Missing(f"no {LOADED_BY_NAME}: apt-get install libgcc-s1")
    add(f"lib/x86_64-linux-gnu/{LOADED_BY_NAME}", gcc)
    for name in XENSTORE_NAMES:
        archive.link(f"usr/bin/xenstore-{name}", "xenstore")
    archive.file("etc/xen/xl.conf", b'autoballoon="off"\n', 0o644)
    archive.file("etc/xen/scripts/vif-bridge", (HERE / "vif-bridge").read_bytes())
    archive.file("bin/xen-start", (HERE / "start").read_bytes())
    archive.file("bin/xen-cell", (HERE / "cell").read_bytes())
    archive.folder("cells")
    return archive.bytes()


def main():
    out = OUT
    complete = all((out / name).exists() for name in ("xen", "vmlinux", "dom0.cpio", "version"))
    try:
        names, release, found = packages()
    except Missing:
        if complete:
            return print("xen: build/xen as it was (not checked for newer packages)")
        raise
    busybox = shutil.which("busybox")
    if not busybox:
        raise Missing("no busybox: apt-get install busybox-static")
    digest = hashlib.sha256(Path(busybox).read_bytes())
    for path in sorted([*HERE.iterdir(), *(ROOT / "tools/guest").iterdir()]):
        if path.is_file():
            digest.update(path.read_bytes())
    wanted = f"{found} {digest.hexdigest()[:16]}\n"
    if complete and (out / "version").read_text() == wanted:
        return print("xen: build/xen is up to date")
    out.mkdir(parents=True, exist_ok=True)
    tree = out / "tree"
    mark = tree / "packages"
    if not mark.exists() or mark.read_text() != found:
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir()
        print(f"xen: downloading {len(names)} packages, of them {names[0]} and {names[1]} (75 MB; unpacked below build/xen, not installed)")
        download(names, tree)
        mark.write_text(found)
    modules = Modules(tree).order(MODULES)
    ramdisk = initramfs(modules, Path(busybox).read_bytes())
    # Linux unpacks several archives one after the other, each from a multiple of four bytes.
    ramdisk += b"\0" * (-len(ramdisk) % 4) + overlay(tree, release)
    hypervisor = gzip.decompress(next((tree / "boot").glob(f"xen-{release}-amd64.gz")).read_bytes())
    made = {"xen": hypervisor, "vmlinux": extract_elf(next((tree / "boot").glob("vmlinuz-*"))), "dom0.cpio": ramdisk}
    write(out, made)
    (out / "version").write_text(wanted)
    print("xen: " + ", ".join(f"{name} {len(data) >> 10} KiB" for name, data in made.items()))


if __name__ == "__main__":
    try:
        main()
    except (Missing, subprocess.CalledProcessError) as error:
        sys.exit(f"xen: {error}")
