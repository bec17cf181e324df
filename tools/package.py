#!/usr/bin/env python3
"""Builds packages into build/package: Debian's, RPM's, and an image in OCI's layout. `./x package` calls it.

usage: tools/package.py [deb] [rpm] [oci] [all]      (default: deb)
       tools/package.py reproducible                  builds Debian's packages twice, in two folders, and compares them
       tools/package.py root                          makes the bare Debian system of the tests and the image (cached)

Programs are built once by tools/release.sh from a copy of the tracked files, and kept for the next time. TOMBOLO_BUILT and
TOMBOLO_CELLS may name folders of programs and cell images that are built already; TOMBOLO_SPAN is the program tombolo-span then.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build/package"
sys.path.insert(0, str(ROOT / "tools"))
from debian import mirror  # noqa: E402
from install import VERSION  # noqa: E402

TAG = f"tombolo:{VERSION}"
# What packages are made of, by the variable that names it, and where tools/release.sh puts it.
BUILT = {"TOMBOLO_BUILT": "target/release", "TOMBOLO_CELLS": "cells/x86_64-unknown-linux-gnu/release", "TOMBOLO_SPAN": "span/release/tombolo-span"}
# What the bare system has besides the essential packages: what tombolo and its tests need and dpkg
# would refuse to miss.
BARE = ("iproute2", "nftables", "passt", "python3", "qemu-system-x86")
# And a system in which it is a service.
WITH_SYSTEMD = (*BARE, "systemd")
SUITE = "bookworm"


def run(*command, **kwargs):
    subprocess.run([str(word) for word in command], check=True, **kwargs)


def epoch():
    """The time of the newest entry of debian/changelog, in seconds: all times in packages are that one."""
    found = subprocess.run(["dpkg-parsechangelog", "-STimestamp"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return found.stdout.strip()


def copy_sources(folder):
    """The tracked files, as they are in the work tree, into `folder`; what is the same keeps its time."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\0")
    names = {name for name in names if name and (ROOT / name).exists()}
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        name = str(path.relative_to(folder))
        if name not in names and not name.startswith("debian/build/"):
            path.unlink()
    for name in sorted(names):
        to = folder / name
        if not to.is_file() or to.read_bytes() != (ROOT / name).read_bytes():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to)


def built():
    """The environment that names the programs and the cells, which are built first unless it is given."""
    if os.environ.get("TOMBOLO_BUILT"):
        return {name: os.path.abspath(os.environ[name]) for name in BUILT}
    source = OUT / "src"
    copy_sources(source)
    run("sh", source / "tools/release.sh", *(source / "debian/build" / folder for folder in ("target", "cells", "span")))
    return {name: str(source / "debian/build" / place) for name, place in BUILT.items()}


def buildpackage(source, environment):
    """dpkg-buildpackage in `source`; its results are in the folder above."""
    log = source.parent / "dpkg-buildpackage.log"
    with log.open("wb") as out:
        done = subprocess.run(["dpkg-buildpackage", "-us", "-uc", "-b"], cwd=source, env=os.environ | environment, stdout=out, stderr=out)
    if done.returncode:
        sys.exit("\n".join(log.read_text(errors="replace").splitlines()[-30:]) + f"\npackage: dpkg-buildpackage failed: see {log}")


def deb():
    """Debian's packages; gives their paths."""
    environment = built()
    with tempfile.TemporaryDirectory(dir=OUT, prefix="deb.") as folder:
        source = Path(folder) / f"tombolo-{VERSION}"
        copy_sources(source)
        buildpackage(source, environment)
        for pattern in ("*.deb", "*.changes", "*.buildinfo"):
            for old in OUT.glob(pattern):
                old.unlink()
            for new in Path(folder).glob(pattern):
                shutil.move(new, OUT / new.name)
    return debs()


def debs():
    return sorted(path for path in OUT.glob("*.deb") if "-dbgsym_" not in path.name)


def main_deb(name="tombolo"):
    """The package of the program, or of another one."""
    [path] = OUT.glob(f"{name}_*.deb")
    return path


def lintian():
    """What lintian finds, a line each, in Debian's packages of this folder."""
    [changes] = OUT.glob("*.changes")
    # As root it warns of itself otherwise.
    command = ["lintian", "--allow-root", "--fail-on", "none", "--tag-display-limit", "0", changes]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"package: lintian ended with {done.returncode}: {done.stderr}")
    return [line for line in done.stdout.splitlines() if line[:2] in ("E:", "W:")]


def rpmbuild(folder, release=1):
    """RPM's packages of this release, from the files of Debian's, in `folder`; gives their paths."""
    environment = built()
    stage = Path(folder) / "stage"
    run(sys.executable, ROOT / "tools/install.py", "--strip", "--unlisted", "--destdir", stage, "--prefix", "/usr", "--libdir", "lib64",
        "--pythondir", "lib/python3/site-packages", "--built", environment["TOMBOLO_BUILT"], "--cells", environment["TOMBOLO_CELLS"],
        "--span", environment["TOMBOLO_SPAN"], env=os.environ | {"SOURCE_DATE_EPOCH": epoch()})
    defines = {"_topdir": f"{folder}/top", "_dbpath": f"{folder}/db", "version": VERSION, "release": release, "stage": stage}
    words = [word for name, value in defines.items() for word in ("--define", f"{name} {value}")]
    log = OUT / "rpmbuild.log"
    with log.open("wb") as out:
        done = subprocess.run(["rpmbuild", "-bb", "--target", "x86_64", *words, ROOT / "packaging/rpm/tombolo.spec"], stdout=out, stderr=out,
                              env=os.environ | {"SOURCE_DATE_EPOCH": epoch()})
    if done.returncode:
        sys.exit("\n".join(log.read_text(errors="replace").splitlines()[-30:]) + f"\npackage: rpmbuild failed: see {log}")
    return sorted(Path(folder).glob("top/RPMS/*/*.rpm"), key=lambda path: path.name)


def rpm():
    """RPM's packages; gives their paths."""
    with tempfile.TemporaryDirectory(dir=OUT, prefix="rpm.") as folder:
        made = rpmbuild(folder)
        for old in OUT.glob("*.rpm"):
            old.unlink()
        for new in made:
            shutil.move(new, OUT / new.name)
    return sorted(OUT.glob("*.rpm"))


def root(packages=BARE):
    """A tar of a bare Debian system with these packages, made once by mmdebstrap."""
    key = hashlib.sha256(" ".join((SUITE, *packages)).encode()).hexdigest()[:12]
    path = OUT / f"root-{key}.tar"
    if not path.exists():
        OUT.mkdir(parents=True, exist_ok=True)
        print(f"package: making a bare {SUITE} with {', '.join(packages)} (about two minutes, once)", file=sys.stderr, flush=True)
        new = path.with_suffix(".new.tar")
        # In mounts of its own, so that none is left behind when it is killed.
        with (OUT / "mmdebstrap.log").open("wb") as log:
            done = subprocess.run(["unshare", "--mount", "mmdebstrap", "--mode=root", "--variant=apt", f"--include={','.join(packages)}",
                                   "--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*",
                                   "--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-include=/usr/share/doc/*/copyright",
                                   SUITE, new, mirror("package")], stdout=log, stderr=log)
        if done.returncode:
            sys.exit(f"package: mmdebstrap failed: see {OUT / 'mmdebstrap.log'}")
        new.rename(path)
    return path


@contextlib.contextmanager
def bare_root():
    """The bare system, unpacked into a folder that is gone afterwards."""
    tar = root()
    with tempfile.TemporaryDirectory(dir=OUT, prefix="root.") as folder:
        run("tar", "-xf", tar, "-C", folder, "--exclude=./dev/*")
        yield Path(folder)


def oci():
    """An image of the bare system with the program and tombolo-span, in OCI's layout, as a tar; gives its path."""
    made = epoch()
    with tempfile.TemporaryDirectory(dir=OUT, prefix="oci.") as folder:
        layout, layer = Path(folder) / "layout", Path(folder) / "layer"
        layer.mkdir()
        # What dpkg would note of them, for `dpkg -l` and for scanners: files of their own, as in
        # images without dpkg.
        notes = layer / "var/lib/dpkg/status.d"
        notes.mkdir(parents=True)
        for name in ("tombolo", "tombolo-span"):
            run("dpkg-deb", "-x", main_deb(name), layer)
            (notes / name).write_text(subprocess.run(["dpkg-deb", "-f", main_deb(name)], check=True, stdout=subprocess.PIPE, text=True).stdout)
        tar = Path(folder) / "layer.tar"
        run("tar", "-C", layer, "--sort=name", f"--mtime=@{made}", "--owner=0", "--group=0", "--numeric-owner", "-cf", tar, ".")
        image, when = f"{layout}:{VERSION}", subprocess.run(["date", "-ud", f"@{made}", "+%FT%TZ"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        run("umoci", "init", "--layout", layout)
        run("umoci", "new", "--image", image)
        for content, what in ((root(), f"Debian {SUITE} with QEMU and passt"), (tar, f"Tombolo {VERSION}")):
            run("umoci", "raw", "add-layer", "--image", image, "--history.created", when, "--history.created_by", what, content)
        run("umoci", "config", "--image", image, "--config.entrypoint", "/usr/bin/tombolo", "--config.cmd", "doctor",
            "--config.label", f"org.opencontainers.image.version={VERSION}", "--config.label", "org.opencontainers.image.licenses=Apache-2.0",
            "--config.label", "org.opencontainers.image.title=Tombolo", "--created", when, "--history.created", when, "--history.created_by", "config")
        run("umoci", "gc", "--layout", layout)
        path = OUT / f"tombolo-{VERSION}.oci.tar"
        run("tar", "-C", layout, "--sort=name", f"--mtime=@{made}", "--owner=0", "--group=0", "--numeric-owner", "-cf", path, ".")
    return path


def reproducible():
    """Builds in two folders, with names of different lengths, and compares the packages byte for byte."""
    sums = []
    with tempfile.TemporaryDirectory(dir=OUT, prefix="twice.") as folder:
        for name in ("a", "another-folder"):
            source = Path(folder) / name / "tombolo"
            copy_sources(source)
            buildpackage(source, dict.fromkeys(BUILT, ""))
            shutil.rmtree(source)
            sums.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(source.parent.glob("*.deb"))})
        different = [name for name in sums[0] if sums[1].get(name) != sums[0][name]]
        for name in different:
            kept = [shutil.copy2(path, OUT / f"{path.parent.name}-{name}") for path in sorted(Path(folder).glob(f"*/{name}"))]
            print(f"package: {name} differs: diffoscope {' '.join(map(str, kept))}")
    if different or not sums[0]:
        sys.exit(f"package: {len(different)} of {len(sums[0])} packages differ")
    print(f"reproducible: {len(sums[0])} packages, built twice, are the same")


def main():
    words = sys.argv[1:] or ["deb"]
    kinds = {"deb": deb, "rpm": rpm, "oci": oci}
    unknown = [word for word in words if word not in (*kinds, "all", "reproducible", "root")]
    if unknown:
        sys.exit(f"package: expected deb, rpm, oci, all, reproducible or root, found {' '.join(unknown)}")
    OUT.mkdir(parents=True, exist_ok=True)
    if "root" in words:
        print(root(), root(WITH_SYSTEMD), sep="\n")
    if "reproducible" in words:
        reproducible()
    # The image is made of Debian's packages, of this tree.
    if "oci" in words:
        words.append("deb")
    for kind, build in kinds.items():
        if kind in words or "all" in words:
            made = build()
            for path in made if isinstance(made, list) else [made]:
                print(f"{path.stat().st_size:>10} {path.relative_to(ROOT)}", flush=True)
            if kind == "deb":
                found = lintian()
                print("\n".join([*found, f"lintian: {sum(line[0] == 'E' for line in found)} errors, {sum(line[0] == 'W' for line in found)} warnings"]))
                if found:
                    sys.exit(1)


if __name__ == "__main__":
    main()
