"""Debian's packages: what is in them, and their life in a bare system: installed, run, upgraded under running guests, purged.

`./x package` has asked lintian already, and fails if that finds something.
"""

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from lib import ROOT, timeout, until
from lib.bare import Bare

sys.path.insert(0, str(ROOT / "tools"))
import package  # noqa: E402

FABRIC = """
name = "demo"
[network.lan]
subnet = "10.232.0.0/24"
[cell.web]
app = "httpd"
ip = "10.232.0.20"
accel = "tcg"
[tap.host]
ip = "10.232.0.9"
"""
# Without privileges there is no tap.
ROOTLESS = """
name = "mine"
[network.lan]
[cell.web]
app = "httpd"
accel = "tcg"
"""
FETCH = "import urllib.request; print(len(urllib.request.urlopen('http://10.232.0.20/', timeout=5).read()))"
# A service and its client, over libtombolo.
CALL = """
import tombolo
with tombolo.Service("echo", lambda request: bytes(request.data)):
    with tombolo.Client("echo") as client:
        print(bytes(client.call(b"over there", within=10).data).decode())
"""
PATIENCE_S = 120


def fetches(bare):
    return bare.run("python3", "-c", FETCH, check=False).returncode == 0


class Fetching:
    """Fetches a page from the cell over and over; counts what worked and what did not."""

    def __init__(self, bare):
        self.bare, self.good, self.bad, self.ends = bare, 0, 0, threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        while not self.ends.is_set():
            if fetches(self.bare):
                self.good += 1
            else:
                self.bad += 1

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ends.set()
        self.thread.join()

    def again(self):
        """Waits for another page."""
        before = self.good
        until("another page", lambda: self.good > before, PATIENCE_S)


def next_version(deb, folder, name="next", program=None):
    """The same package with a later version, as an upgrade; with the text `program` in place of its program."""
    folder.mkdir(exist_ok=True)
    unpacked = folder / name
    subprocess.run(["dpkg-deb", "-R", deb, unpacked], check=True)
    control = unpacked / "DEBIAN/control"
    control.write_text(re.sub(r"^(Version: .*)$", rf"\1+{name}", control.read_text(), flags=re.M))
    if program is not None:
        (unpacked / "usr/bin/tombolo").write_text(program)
    path = folder / f"tombolo_{name}.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "-b", unpacked, path], check=True, stdout=subprocess.DEVNULL)
    return path


def program_of(bare, pid):
    """What the process `pid` of the bare system executes; "(deleted)" when that file was replaced."""
    return bare.run("readlink", f"/proc/{pid}/exe").stdout.strip()


def live(debs, main, say=print):
    """Installs, runs, upgrades and purges the packages in a bare system; gives what is left of them: names of files and processes."""
    begun = time.monotonic()

    def step(what):
        say(f"{time.monotonic() - begun:6.1f} s: {what}")

    with Bare() as bare, tempfile.TemporaryDirectory() as folder:
        step("the bare system runs")
        before = bare.files()
        bare.install(*debs)
        step("installed")

        # Programs, the library and the module find their parts.
        assert bare.run("tombolo", "version").stdout.split()[1] == package.VERSION
        assert bare.run("tombolo-agent", "--version").returncode == 0
        assert "budget" in bare.run("tombolo", "lab", "ls", check=False).stdout
        assert bare.run("python3", "-c", CALL).stdout == "over there\n"

        bare.write("/etc/tombolo/demo.toml", FABRIC)
        bare.run("tombolo", "up", "-d", f"--wait={PATIENCE_S}", "/etc/tombolo/demo.toml", seconds=2 * PATIENCE_S)
        until("the cell's page", lambda: fetches(bare), PATIENCE_S)
        step("a fabric runs, and its cell answers")

        # A user without any rights runs one too.
        user = ("setpriv", "--reuid=1234", "--regid=1234", "--clear-groups")
        home = {"HOME": "/tmp/user", "XDG_RUNTIME_DIR": "/tmp/user"}
        bare.run(*user, "mkdir", "/tmp/user")
        bare.run(*user, "sh", "-c", f"cat >/tmp/user/tombolo.toml <<'END'\n{ROOTLESS}\nEND")
        bare.run(*user, "tombolo", "up", "-d", f"--wait={PATIENCE_S}", "/tmp/user/tombolo.toml", env=home, seconds=2 * PATIENCE_S)
        bare.run(*user, "tombolo", "down", "--fabric", "mine", env=home)
        bare.run(*user, "rm", "-r", "/tmp/user")
        step("a fabric of a user has run")

        def status():
            return json.loads(bare.run("tombolo", "status", "--json", "--fabric", "demo").stdout)

        cell, daemon = status()["machines"][0]["pid"], status()["pid"]
        with Fetching(bare) as fetching:
            fetching.again()
            bare.install(next_version(main, Path(folder)))
            fetching.again()
            assert status()["pid"] == daemon and program_of(bare, daemon).endswith("(deleted)")
            # What the package has systemd do, which does not run here.
            bare.run("tombolo", "up", "--replace", "-d", "/etc/tombolo/demo.toml")
            fetching.again()
        assert status()["machines"][0]["pid"] == cell, "the cell runs on"
        daemon = status()["pid"]
        assert program_of(bare, daemon) == "/usr/bin/tombolo", program_of(bare, daemon)
        assert fetching.bad == 0, f"{fetching.bad} of {fetching.bad + fetching.good} pages failed during the upgrade"
        step(f"upgraded under the running cell, which has answered {fetching.good} requests meanwhile")

        # Programs in the kernel, here and in a namespace: the package detaches them.
        for where in ((), ("-n", "apart")):
            bare.run(*(("ip", "netns", "add", "apart") if where else ("true",)))
            bare.run("ip", *where, "tuntap", "add", "byp0", "mode", "tap")
            bare.run("ip", *where, "link", "set", "byp0", "up")
            bare.run("tombolo", "bypass", "attach", "byp0", *(("--netns", "apart") if where else ()))
        attached = [path for path in bare.runtime_files() if re.fullmatch("/run/tombolo/bypass/bpf/[0-9]+", path)]
        assert len(attached) == 2 and any("bypass keep" in line for line in bare.processes()), (attached, bare.processes())
        step("a bypass is attached in two network namespaces")

        # The control plane: enabled, as its unit would run it, with the settings of its package.
        example = (ROOT / "packaging/home.span.toml").read_text()
        said = bare.run("tombolo", "span", "status", "--fabric", "demo", check=False).stderr
        assert "`systemctl enable --now tombolo-span@demo` starts it with /etc/tombolo/demo.span.toml" in said, said
        bare.run("tombolo", "service", "keys", "--keys", "/etc/tombolo/keys", "node-1")
        bare.write("/etc/tombolo/demo.span.toml", example.replace("demo-1", "demo").replace("192.0.2.1:", "127.0.0.1:"))
        unit = bare.run("cat", "/usr/lib/systemd/system/tombolo-span@.service").stdout
        [command] = re.findall(r"^ExecStart=(.*)$", unit, re.M)
        bare.run("sh", "-c", f"{command.replace('%i', 'demo')} </dev/null >/run/span.log 2>&1 & echo $! >/run/span.pid")
        until("the report of tombolo-span", lambda: bare.run("tombolo", "span", "status", "--fabric", "demo", check=False).returncode == 0, PATIENCE_S)
        bare.run("sh", "-c", "kill $(cat /run/span.pid); rm -r /run/span.pid /run/span.log /etc/tombolo/keys /etc/tombolo/demo.span.toml")
        wants = "/etc/systemd/system/demo.target.wants"
        bare.run("sh", "-c", f"mkdir -p {wants} && ln -s /usr/lib/systemd/system/tombolo-span@.service {wants}/tombolo-span@demo.service")
        step("tombolo-span has run with the command of its unit")

        # While the fabric runs: the package takes it down.
        (bare.folder / "etc/tombolo/demo.toml").unlink()
        bare.dpkg("--purge", *(deb.name.split("_")[0] for deb in debs))
        # Empty now, since what was enabled is the package's.
        bare.run("rmdir", wants)
        after = bare.files()
        left = sorted(set(after) - set(before))
        changed = sorted(name for name, size in before.items() if after.get(name, "gone") != size)
        # What `down` has ended may still be on its way out.
        running, patience = bare.processes(), time.monotonic() + 5
        while running and time.monotonic() < patience:
            time.sleep(0.1)
            running = bare.processes()
        # They were the test's, and go with their programs or without.
        bare.run("ip", "netns", "del", "apart")
        bare.run("ip", "link", "del", "byp0")
        step(f"purged: {len(left)} files and {len(running)} processes left, {len(changed)} changed")
        links = [link["ifname"] for link in json.loads(bare.run("ip", "-j", "link").stdout) if link["ifname"] != "lo"]
        # The folder of `ip netns` is a mount of its own, which nothing there can unmount.
        return left + changed + running + [name for name in bare.runtime_files() if name != "/run/netns"] + links


def test_an_override_of_lintian_has_its_reason():
    for path in sorted((ROOT / "debian").glob("*.lintian-overrides")):
        lines = path.read_text().splitlines()
        for above, line in zip(["", *lines], lines, strict=False):
            assert line.startswith("#") or above.startswith("#") or not line, f"{path.name}: {line}: a comment above it has to say why"


def test_each_package_says_what_it_is_made_of():
    for name in ("tombolo", "tombolo-agent", "tombolo-cni", "tombolo-span", "libtombolo0", "libtombolo-dev"):
        [deb] = package.OUT.glob(f"{name}_*.deb")
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["dpkg-deb", "-x", deb, folder], check=True)
            doc = Path(folder) / f"usr/share/doc/{name}"
            [listed] = doc.glob(f"{name}.spdx.json*")
            text = subprocess.run(["gzip", "-dcf", listed], check=True, stdout=subprocess.PIPE).stdout
            crates = {entry["name"] for entry in json.loads(text)["packages"]}
            assert "rustix" in crates and ("zenoh" in crates) == (name == "tombolo-span") and (name != "tombolo" or {"clap", "smoltcp", "aya"} <= crates), crates
            assert "proptest" not in crates, "crates of tests are not in the package"
            licences = subprocess.run(["gzip", "-dcf", *doc.glob("third-party-licences.txt*")], check=True, stdout=subprocess.PIPE).stdout
            assert b"Permission is hereby granted, free of charge" in licences
            if name == "tombolo-span":
                example = (doc / "examples/home.span.toml").read_text()
                assert example in (ROOT / "docs/span.md").read_text() and example == (ROOT / "packaging/home.span.toml").read_text()
                # Licences that no other package has, with what they ask for.
                for part in (b"https://crates.io/crates/option-ext/", b"Mozilla Public License Version 2.0", b"Community Data License Agreement"):
                    assert part in licences, part
            assert (doc / "copyright").is_file()


def test_versions_agree():
    found = subprocess.run(["dpkg-parsechangelog", "-SVersion"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    assert found == package.VERSION, f"debian/changelog has {found}, Cargo.toml {package.VERSION}"
    [span] = re.findall(r'^version = "(.*)"$', (ROOT / "span/Cargo.toml").read_text(), re.M)
    assert span == package.VERSION, f"span/Cargo.toml has {span}, Cargo.toml {package.VERSION}"


@timeout(1200)
def test_installed_run_upgraded_and_purged():
    [main] = package.OUT.glob("tombolo_*.deb")
    left = live(package.debs(), main)
    assert left == [], left


class Service:
    """The fabric `demo` of a bare system with systemd, as the service that its package gives it."""

    def __init__(self, bare):
        self.bare = bare

    def control(self, word):
        done = self.bare.run("systemctl", "--no-pager", *word.split(), "tombolo@demo", check=False, seconds=2 * PATIENCE_S)
        assert done.returncode == 0, f"systemctl {word}: {done.stderr}\n{self.log()}"

    def log(self):
        return self.bare.run("journalctl", "--no-pager", "-u", "tombolo@demo", "-n", "40", check=False).stdout

    def main_pid(self):
        """The process that systemd takes for the daemon, if the service is active."""
        said = self.bare.run("systemctl", "show", "tombolo@demo", "-p", "MainPID,ActiveState").stdout
        found = dict(line.split("=", 1) for line in said.splitlines())
        return int(found["MainPID"]) if found["ActiveState"] == "active" else None

    def cell(self):
        return json.loads(self.bare.run("tombolo", "status", "--json", "--fabric", "demo").stdout)["machines"][0]["pid"]


SPAN_ALONE = '''fabric = "alone"
machine = "node-1"
listen = "127.0.0.1:7447"
peer = "node-2=127.0.0.2:7447"
import = "calc=node-2"
no_tls = true
'''


@timeout(1200)
def test_a_running_service_is_upgraded_by_its_packages_scripts_and_purged():
    debs, [main] = package.debs(), package.OUT.glob("tombolo_*.deb")
    with Bare(systemd=True) as bare, tempfile.TemporaryDirectory() as folder:
        before = bare.files()
        bare.install(*debs)
        service = Service(bare)
        # Alone, before any fabric: it has a place for the sockets of what it imports.
        bare.write("/etc/tombolo/alone.span.toml", SPAN_ALONE)
        assert bare.run("ls", "/run/tombolo", check=False).returncode != 0
        bare.run("systemctl", "start", "tombolo-span@alone")
        for action in ("runs", "has ended"):
            assert bare.run("stat", "-c", "%a %U", "/run/tombolo").stdout == "755 root\n", f"while it {action}"
            bare.run("systemctl", "stop", "tombolo-span@alone")
        bare.run("rm", "/etc/tombolo/alone.span.toml")
        # README's commands, but for the installation. Its uplink and forward do not work here:
        # passt wants a user namespace, which the kernel refuses in a chroot.
        block = next(text for text in (ROOT / "README.md").read_text().split("```console") if "systemctl enable" in text)
        copy, enable = [line.removeprefix("$ sudo ") for line in block.split("```")[0].strip().splitlines()[1:]]
        assert enable == "systemctl enable --now tombolo@demo", enable
        example = copy.split()[1]
        bare.write(example, (ROOT / example).read_text())
        bare.run(*copy.split())
        service.control("enable --now")
        until("README's fabric", lambda: bare.run("tombolo", "wait", "--fabric", "demo", check=False).returncode == 0, PATIENCE_S)
        service.control("disable --now")
        bare.run("tombolo", "down", "--fabric", "demo")
        bare.run("rm", f"/{example}")
        bare.write("/etc/tombolo/demo.toml", FABRIC)
        service.control("enable --now")
        until("the cell's page", lambda: fetches(bare), PATIENCE_S)
        daemon, cell = service.main_pid(), service.cell()
        # The service has mounts of its own, so its paths begin outside.
        assert program_of(bare, daemon).endswith("/usr/bin/tombolo"), program_of(bare, daemon)

        with Fetching(bare) as fetching:
            fetching.again()
            # Its postinst has systemd reload the service.
            bare.install(next_version(main, Path(folder)))
            fetching.again()
            upgraded = service.main_pid()
            assert upgraded not in (None, daemon), service.log()
            assert program_of(bare, upgraded).endswith("/usr/bin/tombolo"), program_of(bare, upgraded)
            assert service.cell() == cell, "the cell runs on"
            # A version that cannot take over leaves the daemon of before at its work, and the
            # package is installed all the same.
            bare.install(next_version(main, Path(folder), "zbroken", "#!/bin/sh\nexit 1\n"))
            fetching.again()
            assert service.main_pid() == upgraded and program_of(bare, upgraded).endswith("(deleted)")
            # With a good version again, the next reload works.
            bare.install(next_version(main, Path(folder) / "again"))
            fetching.again()
            assert service.main_pid() not in (None, upgraded), service.log()
            assert service.cell() == cell
        assert fetching.bad == 0, f"{fetching.bad} of {fetching.bad + fetching.good} pages failed"

        # While the service runs: the package stops it.
        (bare.folder / "etc/tombolo/demo.toml").unlink()
        bare.dpkg("--purge", *(deb.name.split("_")[0] for deb in debs))
        until("the end of the fabric's processes", lambda: not any("tombolo" in line or "qemu" in line for line in bare.processes()), 20)
        left = {name for name in set(bare.files()) - set(before) if "tombolo" in name}
        assert not left and not [name for name in bare.runtime_files() if "tombolo" in name], (left, bare.runtime_files())
        units = bare.run("systemctl", "list-units", "--all", "--no-legend", "--plain", "tombolo*").stdout
        assert not units, units
