"""`make install` and `make uninstall`, and what systemd-analyze says of the units that they install."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from lib import ROOT, need_program, need_root, scratch, timeout

# What docs/install.md tells.
EXPOSURE = re.compile(r"^→ Overall exposure level for (\S+): ([\d.]+)", re.M)
SYSTEM, USER = "lib/systemd/system/tombolo@.service", "lib/systemd/user/tombolo@.service"
# By the component that installs them.
UNITS = {"tombolo": (SYSTEM, USER), "span": tuple(unit.replace("tombolo@", "tombolo-span@") for unit in (SYSTEM, USER))}


def install(*words):
    command = [sys.executable, ROOT / "tools/install.py", *words]
    for name in ("built", "cells", "span"):
        if value := os.environ.get(f"TOMBOLO_{name.upper()}"):
            command += [f"--{name}", Path(value).absolute()]
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT)


def analyze(*words):
    need_program("systemd-analyze")
    done = subprocess.run(["systemd-analyze", "--no-pager", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env=dict(os.environ, XDG_RUNTIME_DIR="/run"))
    return done.returncode, done.stdout


def exposure(unit):
    """How exposed a unit's service is, from 0 to 10, as systemd reckons it."""
    _, text = analyze("security", "--offline=true", unit)
    found = EXPOSURE.search(text)
    assert found, text
    return float(found[2])


def units(folder, component="tombolo"):
    """The units, installed below the folder: paths of the system's and the user's."""
    install("--component", component, "--prefix", folder, "--sysconfdir", folder / "etc")
    return tuple(folder / unit for unit in UNITS[component])


def measure(component="tombolo"):
    """The exposure of the two units of a component."""
    with scratch() as folder:
        return tuple(exposure(unit) for unit in units(folder, component))


@timeout(120)
def test_systemd_finds_no_fault_in_the_units():
    for component in UNITS:
        with scratch() as folder:
            for unit, manager in zip(units(folder, component), ("--system", "--user"), strict=True):
                code, text = analyze(manager, "verify", "--man=no", unit)
                assert code == 0 and not text.strip(), text
                # What is wrong is found, so silence means something.
                unit.write_text(unit.read_text().replace("Type=notify", "Type=notfy").replace("RestartSec=", "RestrtSec="))
                _, text = analyze(manager, "verify", "--man=no", unit)
                assert "notfy" in text and "RestrtSec" in text, text


def test_the_units_let_a_fabric_use_every_device_that_the_program_opens():
    """What DevicePolicy=closed allows anyway is left out, and so are terminals, vfio and disks, which the unit allows as classes."""
    unit = (ROOT / "packaging/systemd/tombolo@.service").read_text()
    allowed = set(re.findall(r"^DeviceAllow=(/dev/\S+) rw$", unit, re.M))
    sources = "".join(path.read_text() for path in (ROOT / "crates").glob("*/src/**/*.rs"))
    opened = set(re.findall(r'"(/dev/(?:xen/[a-z]+|net/tun|kvm))"', sources))
    assert {"/dev/xen/xenbus", "/dev/kvm"} <= opened <= allowed, (opened, allowed)
    # What `xl` opens besides (libxencall, libxenforeignmemory).
    assert {"/dev/xen/hypercall", "/dev/xen/privcmd"} <= allowed, allowed


def test_the_units_wait_for_the_network_and_do_not_give_up():
    system, user = ((ROOT / f"packaging/systemd/{name}").read_text() for name in ("tombolo@.service", "user-tombolo@.service"))
    assert re.search(r"^Wants=.*network-online\.target", system, re.M) and re.search(r"^After=.*network-online\.target", system, re.M)
    assert all("\nStartLimitIntervalSec=0\n" in unit for unit in (system, user))


@timeout(120)
def test_the_units_are_as_exposed_as_the_docs_say():
    page = (ROOT / "docs/install.md").read_text()
    told = re.findall(r"exposure\s+of ([\d.]+)\s+\(system\)\s+and\s+([\d.]+)\s+\(user\)", page)
    assert len(told) == len(UNITS), "docs/install.md tells the units' exposure"
    for component, figures in zip(UNITS, told, strict=True):
        # Versions of systemd reckon a little differently.
        for of_docs, here in zip(map(float, figures), measure(component), strict=True):
            assert abs(of_docs - here) <= 0.3, f"{component}: docs/install.md says {of_docs}, systemd-analyze {here}"


@timeout(300)
def test_what_is_installed_runs_and_is_uninstalled():
    with scratch() as folder:
        prefix = folder / "usr"
        install("--prefix", prefix, "--sysconfdir", folder / "etc")
        program = prefix / "bin/tombolo"
        # Cells of the prefix, not of this checkout.
        (folder / "a.toml").write_text('name = "a"\n[network.lan]\n[cell.web]\napp = "no-such-app"\n')
        done = subprocess.run([program, "up", folder / "a.toml"], capture_output=True, text=True, env={"TOMBOLO_RUNTIME": str(folder), "PATH": os.environ["PATH"]})
        assert done.returncode and str(prefix / "lib/tombolo/apps") in done.stderr, done.stderr
        # Compiled against what is installed, found by pkg-config where that is there.
        flags = [f"-I{prefix}/include", f"-L{prefix}/lib", "-ltombolo"]
        if shutil.which("pkg-config"):
            environment = dict(os.environ, PKG_CONFIG_PATH=str(prefix / "lib/pkgconfig"))
            flags = subprocess.run(["pkg-config", "--cflags", "--libs", "tombolo"], check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout.split()
        example = prefix / "share/doc/libtombolo-dev/examples/calculator.c"
        subprocess.run(["cc", "-o", folder / "calculator", example, *flags], check=True)
        needed = subprocess.run(["readelf", "-d", folder / "calculator"], check=True, stdout=subprocess.PIPE, text=True).stdout
        assert "libtombolo.so.0" in needed, needed
        run = subprocess.run([folder / "calculator", "--help"], capture_output=True, text=True, env={"LD_LIBRARY_PATH": str(prefix / "lib")})
        assert "error while loading" not in run.stderr, run.stderr
        # Of a checkout in which nothing is built any more.
        subprocess.run([sys.executable, ROOT / "tools/install.py", "--uninstall", "--prefix", prefix, "--built", folder, "--cells", folder, "--span", folder], check=True)
        left = sorted(str(path.relative_to(folder)) for path in prefix.rglob("*"))
        assert left == [], left


@timeout(60)
def test_an_installation_that_cannot_be_changes_nothing_and_says_why():
    def run(*words, user=None):
        # Another user may not reach this interpreter, nor this checkout.
        command = [sys.executable] if user is None else ["setpriv", f"--reuid={user}", "--clear-groups", "--bounding-set=-dac_override", "--inh-caps=-all", sys.executable]
        return subprocess.run([*command, ROOT / "tools/install.py", *map(str, words)], capture_output=True, text=True, cwd=ROOT)

    with scratch() as folder:
        for words, text in (
            (("--prefix", folder / "usr", "--built", folder, "--cells", folder, "--span", folder), "build it first"),
            (("--prefix", "usr"), "expected an absolute path, such as /usr/local"),
            (("--uninstall", "--prefix", folder / "usr"), "nothing is listed in"),
        ):
            done = run(*words)
            assert done.returncode and text in done.stderr and "Traceback" not in done.stderr, done
            assert not (folder / "usr").exists() and not (ROOT / "usr").exists()
        need_root()
        (folder / "usr").mkdir(mode=0o755)
        done = run("--component", "lab", "--prefix", folder / "usr", user=65534)
        assert done.returncode and "permission denied" in done.stderr and "sudo make install" in done.stderr and "Traceback" not in done.stderr, done


@timeout(300)
def test_make_install_needs_no_tool_of_debian_and_says_what_it_lacks():
    """On a system that has nothing of dpkg and apt, nor help2man; and where no cargo is found, as in root's PATH below sudo."""
    with scratch() as folder:
        bare = folder / "bin"
        bare.mkdir()
        absent = re.compile("dpkg.*|apt.*|dh_?.*|lintian.*|help2man|sudo|cargo")
        for place in ("/usr/bin", "/bin"):
            for program in Path(place).iterdir():
                if not absent.fullmatch(program.name) and not (bare / program.name).exists():
                    (bare / program.name).symlink_to(program)
        (bare / "python3").unlink(missing_ok=True)
        (bare / "python3").symlink_to(sys.executable)
        words = [word for name in ("built", "cells") if (value := os.environ.get(f"TOMBOLO_{name.upper()}"))
                 for word in (f"--{name}", str(Path(value).absolute()))]

        def run(program, to, *before, **environment):
            command = [*before, bare / "bash", "x", program, *words, "--component", "agent", "--component", "cni"]
            surroundings = {"PATH": str(bare), "HOME": str(folder), "DESTDIR": str(to), **environment}
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=surroundings)

        refused = run("install", folder / "without", CARGO_HOME=str(folder))
        assert refused.returncode == 1 and "no cargo in PATH" in refused.stderr and "Traceback" not in refused.stderr, refused
        below = run("install", folder / "without", CARGO_HOME=str(folder), SUDO_UID="65534")
        assert below.returncode == 1 and "~/.cargo/bin of the user who called sudo" in below.stderr, below
        # Below sudo it is the user's, run as that user: one who says who asked, and no more.
        need_root()
        user, passwd = folder / "user", folder / "passwd"
        theirs = user / ".cargo/bin/cargo"
        theirs.parent.mkdir(parents=True)
        theirs.write_text('#!/bin/sh\necho "$(id -u) $(id -G) $HOME" >"$HOME/asked"\nexit 3\n')
        theirs.chmod(0o755)
        folder.chmod(0o755)
        os.chown(user, 54321, 54321)
        passwd.write_text(Path("/etc/passwd").read_text() + f"someone:x:54321:54321::{user}:/bin/sh\n")
        known = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/passwd; exec "$@"', passwd)
        asked = run("install", folder / "without", *known, CARGO_HOME=str(folder), SUDO_UID="54321")
        assert asked.returncode == 1 and "ended with 3" in asked.stderr, asked
        assert (user / "asked").read_text() == f"54321 54321 {user}\n"
        (bare / "cargo").symlink_to(shutil.which("cargo"))
        home = {name: os.environ[name] for name in ("HOME", "CARGO_HOME", "RUSTUP_HOME") if name in os.environ}
        done = run("install", folder / "to", **home)
        assert done.returncode == 0 and "without help2man" in done.stderr, done
        assert (folder / "to/usr/local/lib/cni/tombolo-cni").is_file() and (folder / "to/usr/local/share/doc/tombolo-cni/tombolo-cni.spdx.json").is_file()
        (bare / "cargo").unlink()
        gone = run("uninstall", folder / "to", CARGO_HOME=str(folder))
        assert gone.returncode == 0, gone
        left = [path for path in (folder / "to").rglob("*") if not path.is_dir()]
        assert left == [], left


@timeout(120)
def test_destdir_stands_for_the_root():
    with scratch() as folder:
        install("--component", "tombolo", "--destdir", folder)
        assert (folder / "usr/local/bin/tombolo").is_file()
        text = (folder / "usr/local" / SYSTEM).read_text()
        assert "ExecStart=/usr/local/bin/tombolo up /etc/tombolo/%i.toml\n" in text and "@" not in text.replace("tombolo@", "").replace("~@", "").replace(" @", ""), text
        assert all(path.is_relative_to(folder / "usr/local") or path.is_dir() for path in folder.rglob("*"))
