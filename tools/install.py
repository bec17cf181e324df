#!/usr/bin/env python3
"""Installs what was built, or removes it again. `make install`, Debian's and RPM's packages all use it.

usage: tools/install.py [--uninstall] [--component NAME]... [options]

    DESTDIR/PREFIX/bin/tombolo, lib/tombolo/apps/..., share/man/man1/..., ...

It builds nothing: programs come from --built and --span, images of cells from --cells. Files are the same for the same input: modes are
set, and texts that programs print about themselves (manual pages, completions) hold no date of today. Nothing is written before everything
is there. PREFIX/lib/tombolo/installed lists the files of each component, and --uninstall removes those, whatever is built by then.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import sbom  # noqa: E402

COMPONENTS = ("tombolo", "agent", "cni", "lib", "dev", "python", "lab", "span")
APPS = ("calc", "control", "echo", "httpd", "iperf", "mesh", "ping")
SONAME = "libtombolo.so.0"
# A file for each component that was installed, with the names of its files.
LISTS = "lib/tombolo/installed"
VERSION = re.search(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(), re.M)[1]
# Which crates each program is made of, by the folder of the workspace and its packages.
PARTS = {
    "tombolo": [(".", "tombolo-cli"), ("cells", "tombolo-cells")],
    "tombolo-agent": [(".", "tombolo-agent")],
    "tombolo-cni": [(".", "tombolo-cni")],
    "tombolo-span": [("span", "tombolo-span-zenoh")],
    "libtombolo0": [(".", "tombolo-ffi")],
    "libtombolo-dev": [(".", "tombolo-ffi")],
}
COMPLETIONS = {
    "bash": "share/bash-completion/completions/tombolo",
    "zsh": "share/zsh/{zsh}/_tombolo",
    "fish": "share/fish/vendor_completions.d/tombolo.fish",
}
# Parts of the harness that experiments use, beside the lab itself.
HARNESS = ("lab/tombolo_lab/**/*", "lab/programs/*.c", "tests/lib/**/*.py")
PKG_CONFIG = """prefix={prefix}
libdir=${{prefix}}/{lib}
includedir=${{prefix}}/include

Name: tombolo
Description: Calls with deadlines between processes of one machine, over shared memory
URL: https://github.com/tombolo-fabric/tombolo
Version: {version}
Libs: -L${{libdir}} -ltombolo
Libs.private: -lpthread -ldl -lm
Cflags: -I${{includedir}}
"""


class Install:
    """Files by their place below DESTDIR. `add` gives one; all are written when all were given."""

    def __init__(self, options):
        self.options = options
        self.scratch = tempfile.TemporaryDirectory()
        self.files = []

    def run(self):
        with self.scratch:
            for component in self.options.component or COMPONENTS:
                before = len(self.files)
                getattr(self, component)()
                if not self.options.unlisted:
                    listed = f"{LISTS}/{component}"
                    names = sorted([*(relative for relative, _, _ in self.files[before:]), listed])
                    self.add(listed, "".join(f"{name}\n" for name in names))
            for relative, content, mode in self.files:
                self.put(self.place(relative), content, mode)
        print(f"{len(self.files)} files are installed below {self.place('.')}")

    def place(self, relative):
        base = Path("/") if relative.startswith("/") else Path(self.options.prefix)
        return Path(str(self.options.destdir) + str(base / relative.lstrip("/")))

    def add(self, relative, content, mode=0o644):
        """`content` is bytes, a text, a path to copy, or ("link", target)."""
        if isinstance(content, Path):
            need(content)
        self.files.append((relative, content, mode))

    def put(self, to, content, mode):
        to.parent.mkdir(parents=True, exist_ok=True)
        # A program that runs keeps its file.
        to.unlink(missing_ok=True)
        if isinstance(content, tuple):
            to.symlink_to(content[1])
            return
        if isinstance(content, Path):
            shutil.copyfile(content, to)
        else:
            to.write_bytes(content if isinstance(content, bytes) else content.encode())
        to.chmod(mode)
        if self.options.strip and isinstance(content, Path) and (content.parent == self.options.built or content == self.options.span):
            subprocess.run(["strip", "--strip-debug" if to.suffix == ".a" else "--strip-unneeded", to], check=True)

    def printed(self, program, *words):
        need(self.options.built / program)
        environment = {**os.environ, "LC_ALL": "C.UTF-8"}
        return subprocess.run([self.options.built / program, *words], check=True, stdout=subprocess.PIPE, env=environment).stdout

    def unit(self, path):
        return path.read_text().replace("@BINDIR@", f"{self.options.prefix}/bin").replace("@CONFDIR@", f"{self.options.sysconfdir}/tombolo")

    def notices(self, package):
        """What is in the package by other people: a list for machines, and the licences for people."""
        crates = sbom.crates(PARTS[package])
        folder = f"share/doc/{package}"
        self.add(f"{folder}/{package}.spdx.json", json.dumps(sbom.spdx(package, VERSION, crates), indent=1) + "\n")
        self.add(f"{folder}/third-party-licences.txt", sbom.licences(crates))

    def tombolo(self):
        self.add("bin/tombolo", self.options.built / "tombolo", 0o755)
        for app in APPS:
            self.add(f"lib/tombolo/apps/{app}", self.options.cells / app, 0o755)
        self.add("lib/systemd/system/tombolo@.service", self.unit(ROOT / "packaging/systemd/tombolo@.service"))
        self.add("lib/systemd/user/tombolo@.service", self.unit(ROOT / "packaging/systemd/user-tombolo@.service"))
        pages = Path(self.scratch.name) / "man"
        self.printed("tombolo", "man", "--out", pages)
        for page in sorted(pages.iterdir()):
            self.add(f"share/man/man{page.suffix[1:]}/{page.name}.gz", gzip.compress(page.read_bytes(), mtime=0))
        for shell, place in self.completions():
            self.add(place, self.printed("tombolo", "completions", shell))
        for example in sorted((ROOT / "examples").glob("*.toml")):
            self.add(f"share/doc/tombolo/examples/{example.name}", example)
        self.add("share/tombolo/tombolo.schema.json", self.printed("tombolo", "schema"))
        for file in ("prometheus/tombolo.rules.yml", "grafana/tombolo.json"):
            self.add(f"share/tombolo/{file}", ROOT / "packaging" / file)
        self.notices("tombolo")

    def completions(self):
        """Shells and where they look. zsh of distributions reads folders of its own below /usr; below other prefixes site-functions."""
        folder = "vendor-completions" if str(self.options.prefix) == "/usr" else "site-functions"
        return [(shell, place.format(zsh=folder)) for shell, place in COMPLETIONS.items()]

    def agent(self):
        self.add("bin/tombolo-agent", self.options.built / "tombolo-agent", 0o755)
        self.manual(self.options.built / "tombolo-agent", 1, "--name", "joins a Linux guest to its network through an ivshmem device")
        self.notices("tombolo-agent")

    def manual(self, program, section, *words):
        """A page from the help of a program. help2man runs it, and takes the date from SOURCE_DATE_EPOCH."""
        need(program)
        command = ["help2man", "--no-info", f"--section={section}", *words, program]
        if not shutil.which(command[0]):
            print(f"install: without help2man there is no manual page of {Path(program).name}; the rest is installed", file=sys.stderr)
            return
        page = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        self.add(f"share/man/man{section}/{Path(program).name}.{section}.gz", gzip.compress(page, mtime=0))

    def span(self):
        program = self.options.span
        self.add("bin/tombolo-span", program, 0o755)
        for manager, source in (("system", "tombolo-span@.service"), ("user", "user-tombolo-span@.service")):
            self.add(f"lib/systemd/{manager}/tombolo-span@.service", self.unit(ROOT / "packaging/systemd" / source))
        self.manual(program, 8, "--include", ROOT / "packaging/tombolo-span.h2m",
                    "--name", "tells the fabrics of several machines which member is where")
        for shell, place in self.completions():
            self.add(place.replace("tombolo", "tombolo-span"), self.printed(program, "--completions", shell))
        self.add("share/doc/tombolo-span/examples/home.span.toml", ROOT / "packaging/home.span.toml")
        self.notices("tombolo-span")

    def cni(self):
        self.add("lib/cni/tombolo-cni", self.options.built / "tombolo-cni", 0o755)
        self.notices("tombolo-cni")

    def lib(self):
        self.add(f"{self.options.libdir}/{SONAME}", self.options.built / "libtombolo.so")
        self.notices("libtombolo0")

    def dev(self):
        self.add(f"{self.options.libdir}/libtombolo.so", ("link", SONAME))
        self.add(f"{self.options.libdir}/libtombolo.a", self.options.built / "libtombolo.a")
        self.add(f"{self.options.libdir}/pkgconfig/tombolo.pc", PKG_CONFIG.format(prefix=self.options.prefix, lib=self.options.libdir, version=VERSION))
        for header in ("tombolo.h", "tombolo.hpp"):
            self.add(f"include/{header}", ROOT / "bindings/include" / header)
        for example in ("calculator.c", "calculator.cpp"):
            self.add(f"share/doc/libtombolo-dev/examples/{example}", ROOT / "bindings/examples" / example)
        self.notices("libtombolo-dev")

    def python(self):
        folder = self.options.pythondir
        for module in sorted((ROOT / "bindings/python/tombolo").glob("*.py")):
            self.add(f"{folder}/tombolo/{module.name}", module)
        # Where the module looks for it.
        up = "/".join(".." for _ in Path(f"{folder}/tombolo").parts)
        self.add(f"{folder}/tombolo/libtombolo.so", ("link", f"{up}/{self.options.libdir}/{SONAME}"))
        sys.path.insert(0, str(ROOT / "bindings/python"))
        import backend
        self.add(f"{folder}/tombolo-{VERSION}.dist-info/METADATA", backend.metadata())
        self.add("share/doc/python3-tombolo/examples/calculator.py", ROOT / "bindings/examples/calculator.py")

    def lab(self):
        for pattern in HARNESS:
            for path in sorted(ROOT.glob(pattern)):
                if path.is_file() and "__pycache__" not in path.parts:
                    self.add(f"share/tombolo/{path.relative_to(ROOT)}", path)


class Uninstall(Install):
    """Removes the files that the lists have, and folders below the prefix that are empty then."""

    def run(self):
        lists = [self.place(f"{LISTS}/{component}") for component in self.options.component or COMPONENTS]
        names = [name for file in lists if file.is_file() for name in file.read_text().splitlines()]
        if not names:
            sys.exit(f"uninstall: nothing is listed in {self.place(LISTS)}: was it installed by `make install`, with this PREFIX and DESTDIR?")
        folders, base = set(), self.place(".")
        for name in names:
            path = self.place(name)
            path.unlink(missing_ok=True)
            folders.update(parent for parent in path.parents if base in parent.parents)
        for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def need(path):
    """Ends the program where something that was to be built is not there."""
    if not path.is_file():
        sys.exit(f"install: {path} is not there: build it first (./x build && ./x cells && ./x span-program), or name where it is (--built, --cells, --span). Nothing was changed")


def main():
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uninstall", action="store_true")
    parser.add_argument("--component", action="append", choices=COMPONENTS, help="only this one; may be repeated (all)")
    parser.add_argument("--destdir", default="", help="folder that stands for / (empty)")
    parser.add_argument("--prefix", default="/usr/local", help="(%(default)s)")
    parser.add_argument("--libdir", default="lib", help="of the library, below the prefix (%(default)s)")
    parser.add_argument("--pythondir", default="lib/python3/dist-packages", help="below the prefix (%(default)s)")
    parser.add_argument("--sysconfdir", default="/etc", help="(%(default)s)")
    parser.add_argument("--unlisted", action="store_true", help="make no list for --uninstall, in packages")
    parser.add_argument("--strip", action="store_true", help="leave out what only debuggers need")
    parser.add_argument("--built", type=Path, default=target / "release", help="folder of the programs")
    parser.add_argument("--cells", type=Path, default=ROOT / "cells/target/x86_64-unknown-linux-gnu/release", help="folder of the cells' images")
    parser.add_argument("--span", type=lambda text: Path(text).absolute(), default=ROOT / "span/target/release/tombolo-span", help="the program tombolo-span")
    options = parser.parse_args()
    if not Path(options.prefix).is_absolute():
        parser.error(f"--prefix {options.prefix}: expected an absolute path, such as /usr/local")
    try:
        (Uninstall if options.uninstall else Install)(options).run()
    except PermissionError as error:
        sys.exit(f"{error.filename}: permission denied. Run it as root (sudo make install), or with PREFIX= of a folder of yours")


if __name__ == "__main__":
    main()
