#!/usr/bin/env python3
"""Runs the tests of the bypass on the kernels of distributions, each in a guest.

usage: tests/kernels.py [KERNEL...] [--only PART-OF-A-NAME,...] [--seconds N]

KERNEL is `debian-12` (the stock kernel of this Debian 12), `backports` (the newest of bookworm-backports), or the folder
of any other unpacked kernel package with boot/vmlinuz-* and lib/modules/. Without one, both of Debian's are run.
Tests of the bench are left out, since speed under emulation means nothing, and so is bypass_old, which other kernels skip.

The guest's root is this machine's, read-only over 9p, so it has the same programs; it writes to its memory only. For a kernel
without 9p, as RHEL's, the parts of the root that the tests use are packed into an image first, which takes 7 GB in build/.
The last table has a row per test and a column per kernel. Each guest's results are in build/kernels/NAME/results, its
console in build/kernels/NAME/console. The exit code is 1 if a test failed or a guest did not finish.

Environment: TOMBOLO_PROGRAM (the program under test), TOMBOLO_QEMU, TOMBOLO_ACCEL (default: "tcg"), and TOMBOLO_SLOW, the
factor for the time limits of the guests' tests (default: 8, under emulation).
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT / "tools"), str(ROOT / "tools/guest")]
import debian  # noqa: E402
from build import Archive, Missing, Modules, download, run  # noqa: E402
from lib.machine import BUILD  # noqa: E402

FOLDER = BUILD / "kernels"
META_PACKAGE = "linux-image-amd64"
# What a guest needs to reach its root; all other modules are loaded from there.
WANTED = ("virtio_pci", "overlay")
BY_9P = ("9pnet_virtio", "9p")
# virtiofs would need no image, but its daemon writes to the guest's memory, and emulation runs on
# with code that it translated before.
BY_IMAGE = ("virtio_blk", "squashfs")
# What an image has, if it exists, besides Python, the repository, the program and the kernel.
PACKED = ("bin", "etc", "lib", "lib32", "lib64", "libx32", "sbin", "usr", "var/lib/dpkg")
NOT_PACKED = ("usr/share/doc", "usr/share/locale", "usr/src", "usr/lib/debug")
MEMORY_MIB = 2048
# Of a guest from start to end. Emulated on two cores without other work, all tests take more than
# half an hour.
SECONDS = 10800
LEFT_OUT = ("bypass_bench", "bypass_old")
END = "@end "
LINE = re.compile(r"^(ok|FAIL|skip) +(\S+)  ([\d.]+) s(?:, CPU [\d.]+ s)?(?:: (.*))?$")


class Kernel:
    """An unpacked kernel package."""

    def __init__(self, name, tree):
        self.name, self.tree = name, tree
        self.folder = FOLDER / name
        self.folder.mkdir(parents=True, exist_ok=True)
        images = sorted((tree / "boot").glob("vmlinuz-*"))
        if len(images) != 1:
            raise Missing(f"{tree}/boot holds {len(images)} kernels, 1 is expected")
        self.image = images[0]
        self.release = self.image.name.removeprefix("vmlinuz-")
        self.modules = Modules(tree)

    def depend(self):
        """Writes the modules' index, as the package's installation would."""
        if (self.tree / "lib/modules" / self.release / "modules.dep").exists():
            return
        program = shutil.which("depmod")
        if not program:
            raise Missing("no depmod: apt-get install kmod")
        run(program, "-b", str(self.tree.resolve()), self.release)

    def has_9p(self):
        return "9p" in self.modules.paths or "9p" in self.modules.builtin

    def initramfs(self, settings):
        """What brings the guest to its root."""
        archive = Archive()
        for name in ("proc", "sys", "dev"):
            archive.folder(name)
        archive.device("dev/console", 5, 1)
        archive.device("dev/null", 1, 3)
        archive.file("bin/busybox", Path(shutil.which("busybox")).read_bytes())
        archive.file("init", (HERE / "kernels-init").read_bytes())
        archive.file("settings", "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items()).encode())
        modules = self.modules.order((*WANTED, *(BY_9P if self.has_9p() else BY_IMAGE)))
        for name, data in modules.items():
            archive.file(f"lib/modules/{name}.ko", data, 0o644)
        archive.file("lib/modules/order", "".join(f"{name}.ko\n" for name in modules).encode(), 0o644)
        return archive.bytes()


def fetched(name):
    """One of Debian's kernels, downloaded and unpacked, not installed."""
    options = []
    if name == "backports":
        options = debian.backports("kernels", FOLDER / "apt")
    found = run("apt-cache", *options, "depends", META_PACKAGE)
    packages = re.findall(r"Depends: (linux-image-[0-9]\S+)", found)
    if not packages:
        raise Missing(f"apt knows no {META_PACKAGE}: run `apt-get update` once, on a Debian")
    package = packages[0]
    trees = FOLDER / name / "trees"
    shown = run("apt-cache", *options, "show", "--no-all-versions", package)
    tree = trees / re.search(r"^Version: (\S+)", shown, re.M)[1].replace(":", "_")
    if not (tree / "boot").exists():
        shutil.rmtree(trees, ignore_errors=True)
        trees.mkdir(parents=True)
        print(f"kernels: downloading {package} (unpacked below build/kernels/{name}, not installed)", flush=True)
        made = trees / "new"
        download([*options, package], made)
        made.rename(tree)
    return Kernel(name, tree)


def kernel(word):
    if word in ("debian-12", "backports"):
        return fetched(word)
    tree = Path(word)
    if not (tree / "lib/modules").is_dir():
        raise Missing(f"{word} is neither debian-12 nor backports, nor a folder with boot/ and lib/modules/")
    return Kernel(tree.resolve().name, tree.resolve())


def qemu():
    """QEMU 10 where it was fetched: it emulates faster and better."""
    fetched = BUILD / "qemu10/run"
    found = os.environ.get("TOMBOLO_QEMU") or (str(fetched) if fetched.exists() else shutil.which("qemu-system-x86_64"))
    if not found:
        raise Missing("no qemu-system-x86_64: ./x setup guests")
    return found


def all_tests():
    """The tests that say something in a guest, by the beginnings of their names."""
    return [f"{path.stem}." for path in sorted(HERE.glob("bypass_*.py")) if path.stem not in LEFT_OUT]


def packed_root(kernel, program):
    """An image of what the tests use of this machine's root, made anew for each run: programs and tests change."""
    image = kernel.folder / "root.squashfs"
    image.unlink(missing_ok=True)
    print(f"kernels: packing {image} for a kernel without 9p", flush=True)
    own = [Path(sys.base_prefix), kernel.tree.resolve(), program]
    own += [path for path in ROOT.iterdir() if path.name not in ("target", "build", ".git")]
    own += [path for path in (ROOT / "target/release").iterdir() if path.is_file() or path.name == "examples"]
    inside = [str(path.relative_to("/")) for path in own if not path.is_relative_to("/usr")]
    sources = [name for name in PACKED if Path("/", name).exists()] + inside
    plain = ("-no-strip", "-no-xattrs", "-noI", "-noD", "-noF", "-quiet", "-no-progress")
    subprocess.run(["mksquashfs", *sources, str(image.resolve()), *plain, "-e", *NOT_PACKED], cwd="/", stdout=subprocess.DEVNULL, check=True)
    return image


def boot(kernel, parts, seconds):
    """Runs the tests in a guest; gives how it ended, in words."""
    accel = os.environ.get("TOMBOLO_ACCEL", "tcg")
    program = Path(os.environ.get("TOMBOLO_PROGRAM", ROOT / "target/release/tombolo")).resolve()
    if not program.exists():
        raise Missing(f"{program} is not built: run ./x build")
    slow = os.environ.get("TOMBOLO_SLOW", "8" if accel == "tcg" else "1")
    for path in (kernel.tree.resolve(), ROOT, program):
        if path.is_relative_to("/tmp") or path.is_relative_to("/run"):
            raise Missing(f"{path} is not seen in the guest, which has a /tmp and a /run of its own: move it elsewhere")
    settings = {
        "tree": str(kernel.tree.resolve()),
        "root": str(ROOT),
        "command": " ".join([sys.executable, "-B", "tests/run.py", "--jobs", "2", "bypass", *parts]),
        "paths": os.environ["PATH"],
        "environment": f"TOMBOLO_PROGRAM={program} TOMBOLO_SLOW={slow}",
        "end": END,
        "files": "9p" if kernel.has_9p() else "image",
    }
    initramfs, results, console = (kernel.folder / name for name in ("initramfs", "results", "console"))
    initramfs.write_bytes(kernel.initramfs(settings))
    for path in (results, console):
        path.unlink(missing_ok=True)
    command = [
        qemu(), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-machine", f"q35,accel={accel}", "-cpu", "host" if accel == "kvm" else "max,la57=off",
        "-smp", "2", "-m", str(MEMORY_MIB),
        "-kernel", kernel.image, "-initrd", initramfs,
        "-append", "console=ttyS0 quiet panic=-1 mitigations=off random.trust_cpu=on net.ifnames=0",
        "-serial", f"file:{console}", "-serial", f"file:{results}",
    ]
    if kernel.has_9p():
        command += ["-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
                    "-device", "virtio-9p-pci,fsdev=host,mount_tag=host"]
    else:
        command += ["-drive", f"file={packed_root(kernel, program)},format=raw,if=virtio,readonly=on"]
    start = time.monotonic()
    guest = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL)
    told = 0
    try:
        while guest.poll() is None:
            if time.monotonic() - start > seconds:
                return f"not at its end after {seconds:.0f} s"
            lines = read(results)
            for line in lines[told:]:
                print(f"{kernel.name}: {line}", flush=True)
            told = len(lines)
            time.sleep(1)
    finally:
        if guest.poll() is None:
            guest.kill()
        guest.wait()
    for line in read(results)[told:]:
        print(f"{kernel.name}: {line}", flush=True)
    ended = [line for line in read(results) if line.startswith(END)]
    return "" if ended else f"the guest ended early (QEMU's exit code {guest.returncode}); see {console}"


def read(results):
    """Whole lines that have come so far."""
    text = results.read_text(errors="replace") if results.exists() else ""
    return text.replace("\r", "").split("\n")[:-1]


def verdicts(results):
    """Verdict and reason of each test by its name."""
    found = {}
    for line in read(results):
        if match := LINE.match(line):
            verdict, name, _, reason = match.groups()
            found[name] = (verdict, reason or "")
    return found


def table(columns):
    """The table in Markdown, and how many tests failed."""
    words = {"ok": "passed", "FAIL": "FAILED", "skip": "skipped"}
    names = sorted({name for found in columns.values() for name in found})
    lines = ["| test | " + " | ".join(columns) + " |", "|" + " --- |" * (1 + len(columns))]
    for name in names:
        cells = []
        for found in columns.values():
            verdict, reason = found.get(name, ("", ""))
            cells.append(words.get(verdict, "not run") + (f" ({reason})" if reason else ""))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    failed = sum(verdict == "FAIL" for found in columns.values() for verdict, _ in found.values())
    return "\n".join(lines), failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", default=["debian-12", "backports"])
    parser.add_argument("--only", default="", metavar="PART,...", help="only tests with one of these in their names")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"a guest's limit ({SECONDS})")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    # So that a guest does not outlive this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    columns, faults = {}, []
    for word in options.kernels:
        one = kernel(word)
        one.depend()
        fault = boot(one, [part for part in options.only.split(",") if part] or all_tests(), options.seconds)
        if fault:
            faults.append(f"{one.name}: {fault}")
        columns[f"{one.name} ({one.release})"] = verdicts(one.folder / "results")
    text, failed = table(columns)
    print(text)
    print("\n".join(faults), file=sys.stderr)
    sys.exit(1 if failed or faults or not all(columns.values()) else 0)


if __name__ == "__main__":
    try:
        main()
    except (Missing, subprocess.CalledProcessError) as error:
        sys.exit(f"kernels: {error}")
