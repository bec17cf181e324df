#!/usr/bin/env python3
"""Fetches QEMU 10 for a Debian 12 machine into build/qemu10, without root and without touching the system's apt.

QEMU 7.2 under emulation crashes when a guest's driver starts a vhost-user port with MSI-X; 10 does not. Debian carries
10 in bookworm-backports. This writes an apt configuration of its own below build/, downloads the few packages, unpacks
them, and writes build/qemu10/run, which takes QEMU's own arguments. Where the system's QEMU is 10 or newer, `run`
simply calls that.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from debian import SUITE, backports, output

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "build/qemu10"
PROGRAM = "qemu-system-x86_64"
PACKAGES = ("qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios")


def major(program):
    """The major version a QEMU binary reports; 0 when it cannot be run."""
    try:
        return int(re.search(r"version (\d+)\.", output(program, "--version"))[1])
    except (OSError, subprocess.CalledProcessError, TypeError):
        return 0


def write_run(text):
    script = HERE / "run"
    script.write_text("#!/bin/sh\n" + text)
    script.chmod(0o755)
    if major(script) < 10:
        sys.exit(f"qemu10: {script} does not run; `{script} --version` says why")
    print(f"qemu10: {output(script, '--version').splitlines()[0]}: build/qemu10/run")


def main():
    HERE.mkdir(parents=True, exist_ok=True)
    system = shutil.which(PROGRAM)
    if system and major(system) >= 10:
        return write_run(f'exec {system} "$@"\n')
    if (HERE / "run").exists() and major(HERE / "run") >= 10:
        return print("qemu10: build/qemu10/run (as it was)")
    apt = HERE / "apt"
    options = backports("qemu10", apt)
    debs = HERE / "debs"
    shutil.rmtree(debs, ignore_errors=True)
    debs.mkdir()
    print(f"qemu10: downloading {' '.join(PACKAGES)} from {SUITE} (unpacked below build/qemu10, not installed)")
    output("apt-get", "-q", *options, "download", *(f"{name}/{SUITE}" for name in PACKAGES), cwd=debs)
    tree = HERE / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for deb in debs.glob("*.deb"):
        output("dpkg-deb", "-x", deb, tree)
    shutil.rmtree(debs)
    missing = re.findall(r"(\S+) => not found", output("ldd", tree / "usr/bin" / PROGRAM))
    if missing:
        sys.exit(f"qemu10: this machine lacks {', '.join(missing)}: install the system's qemu-system-x86, which brings them")
    write_run(
        'here=$(dirname "$(readlink -f "$0")")/tree/usr\n'
        'QEMU_MODULE_DIR=$(echo "$here"/lib/*/qemu)\n'
        "export QEMU_MODULE_DIR\n"
        f'exec "$here/bin/{PROGRAM}" -L "$here/share/qemu" -L "$here/share/seabios" "$@"\n'
    )


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"qemu10: `{' '.join(map(str, error.cmd))}` failed ({error.returncode})")
