"""RPM's packages hold what Debian's do and live as they do in a bare system; the image runs by podman, as the documentation says."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from lib import ROOT, Namespace, need_program, need_root, timeout, until
from lib.bare import Bare
from lib.containers import Podman
from package_debian import FABRIC, FETCH, PATIENCE_S, SPAN_ALONE, Fetching, Service, fetches, program_of

sys.path.insert(0, str(ROOT / "tools"))
import package  # noqa: E402

# Names of the same package.
NAMES = {"tombolo": "tombolo", "tombolo-agent": "tombolo-agent", "tombolo-cni": "tombolo-cni", "tombolo-span": "tombolo-span", "libtombolo0": "tombolo-libs", "libtombolo-dev": "tombolo-devel",
         "python3-tombolo": "python3-tombolo", "tombolo-lab": "tombolo-lab"}


def output(*command):
    return subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def shared(path):
    """A file's name in both kinds of packages."""
    for kind in ("/x86_64-linux-gnu/", "/lib64/", "/dist-packages/", "/site-packages/", "/vendor-completions/", "/site-functions/"):
        path = path.replace(kind, "/")
    return path.replace("/usr/lib/", "/usr/").removesuffix(".gz")


def of_deb(name):
    [path] = package.OUT.glob(f"{name}_*.deb")
    lines = output("dpkg-deb", "-c", path).splitlines()
    names = [line.split(None, 5)[5].split(" -> ")[0].lstrip(".") for line in lines if line[0] != "d"]
    # Debian's own documents of each package.
    own = ("/copyright", "/changelog.gz", "/changelog.Debian.gz")
    return {shared(name) for name in names if not name.endswith(own) and "/lintian/" not in name and "/python3/runtime.d/" not in name}


def asked(path, form):
    """What rpm says of a package file. It makes a database even for that, so it gets a place for one."""
    with tempfile.TemporaryDirectory() as database:
        return output("rpm", "-qp", "--dbpath", database, "--qf", form, path)


@timeout(120)
def test_rpms_hold_the_same_files():
    need_program("rpm")
    for name, of_rpm in NAMES.items():
        [path] = package.OUT.glob(f"{of_rpm}-{package.VERSION}-*.rpm")
        lines = asked(path, "[%{FILEMODES:perms} %{FILENAMES}\\n]").splitlines()
        # Those lead an interpreter to the module; Debian's finds it where it is.
        files = {shared(line.split(None, 1)[1]) for line in lines if line[0] != "d" and not line.endswith("/tombolo.pth")}
        assert files == of_deb(name), f"{name}: {sorted(files ^ of_deb(name))}"


@timeout(120)
def test_rpms_install_into_an_empty_system():
    need_program("rpm")
    need_root()
    with tempfile.TemporaryDirectory(dir=package.OUT) as folder:
        packages = sorted(package.OUT.glob("*.rpm"))
        words = ["--root", folder, "--dbpath", "/var/lib/rpm", "--nodeps", "--noscripts"]
        output("rpm", *words, "-i", *packages)
        assert output("rpm", *words[:4], "-qa").split() and (Path(folder) / "usr/bin/tombolo").is_file()
        # Every file is as the package says: sizes, sums, modes.
        assert output("rpm", *words[:4], "-Va", "--nodeps", "--nouser", "--nogroup") == ""
        # The module is found by an interpreter that reads its own folder alone, as Fedora's and
        # SUSE's do.
        found = "import site, sys; site.addsitedir(sys.argv[1]); import tombolo, importlib.metadata; print(importlib.metadata.version('tombolo'), tombolo.__file__)"
        sites = Path(folder) / f"usr/lib/python3.{sys.version_info.minor}/site-packages"
        said = output(sys.executable, "-B", "-I", "-S", "-c", found, sites).split()
        assert said[0] == package.VERSION and said[1].startswith(folder), said
        output("rpm", *words, "-e", *(asked(path, "%{NAME}") for path in packages))
        left = [path for path in Path(folder).rglob("*") if not path.is_dir() and not path.is_relative_to(Path(folder) / "var/lib/rpm")]
        assert left == [], left


# Folders that every system with RPM has of its own (its package "filesystem" or systemd), and the
# bare one has not.
OF_SYSTEM = {"usr/lib/systemd/user", "usr/lib64/pkgconfig", "usr/share/man/man1", "usr/share/man/man5", "usr/share/man/man8"}


def next_release(folder):
    """The same packages, one release later."""
    return package.rpmbuild(folder, release=2)


def names(packages):
    return [asked(path, "%{NAME}") for path in packages]


@timeout(1200)
def test_rpms_scripts_upgrade_a_running_service_and_leave_nothing_of_it():
    need_program("rpm")
    first = sorted(package.OUT.glob("*.rpm"))
    with Bare(systemd=True) as bare, tempfile.TemporaryDirectory(dir=package.OUT) as folder:
        second = next_release(folder)
        assert names(first) == names(second), second
        before = bare.files()
        bare.rpm("-i", *first)
        service = Service(bare)
        bare.write("/etc/tombolo/demo.toml", FABRIC)
        bare.write("/etc/tombolo/alone.span.toml", SPAN_ALONE)
        service.control("enable --now")
        until("the cell's page", lambda: fetches(bare), PATIENCE_S)
        bare.run("systemctl", "enable", "--now", "tombolo-span@alone")
        daemon, cell = service.main_pid(), service.cell()

        def span():
            return int(bare.run("systemctl", "show", "tombolo-span@alone", "-p", "MainPID", "--value").stdout)

        old_span = span()
        with Fetching(bare) as fetching:
            fetching.again()
            bare.rpm("-U", *second)
            fetching.again()
            assert {line.rsplit("-", 1)[1].split(".")[0] for line in bare.rpm("-qa").split()} == {"2"}
            upgraded = service.main_pid()
            # %post has systemd reload the service, with the new program; the scripts of the old
            # packages, which run last, end nothing.
            assert upgraded not in (None, daemon), service.log()
            assert program_of(bare, upgraded).endswith("/usr/bin/tombolo"), program_of(bare, upgraded)
            assert service.cell() == cell, "the cell runs on"
            until("the control plane's next process", lambda: span() not in (0, old_span), PATIENCE_S)
        assert fetching.bad == 0, f"{fetching.bad} of {fetching.bad + fetching.good} pages failed"

        # While both run: the packages stop them.
        bare.rpm("-e", *names(second))
        until("the end of the services' processes", lambda: not any("tombolo" in line or "qemu" in line for line in bare.processes()), 20)
        left = {name for name in set(bare.files()) - set(before) if "tombolo" in name}
        # Fabric files are the administrator's, and rpm has no purge that would remove leases and
        # logs.
        state = {name for name in left if f"{name}/".startswith("var/lib/tombolo/")}
        assert state and left - state == {"etc/tombolo", "etc/tombolo/demo.toml", "etc/tombolo/alone.span.toml"}, left
        assert not [name for name in bare.runtime_files() if "tombolo" in name], bare.runtime_files()
        units = bare.run("systemctl", "list-units", "--all", "--no-legend", "--plain", "tombolo*").stdout
        assert not units, units


@timeout(1200)
def test_rpms_scripts_end_fabrics_and_bypasses_where_no_systemd_runs():
    need_program("rpm")
    first = sorted(package.OUT.glob("*.rpm"))
    with Bare() as bare, tempfile.TemporaryDirectory(dir=package.OUT) as folder:
        before = bare.files()
        bare.rpm("-i", *first)
        bare.run("sh", "-c", f"cat >/run/demo.toml <<'END'\n{FABRIC}\nEND")
        bare.run("tombolo", "up", "-d", f"--wait={PATIENCE_S}", "/run/demo.toml", seconds=2 * PATIENCE_S)
        bare.run("ip", "tuntap", "add", "byp0", "mode", "tap")
        bare.run("ip", "link", "set", "byp0", "up")
        bare.run("tombolo", "bypass", "attach", "byp0")
        status = json.loads(bare.run("tombolo", "status", "--json", "--fabric", "demo").stdout)
        bare.rpm("-U", *next_release(folder))
        now = json.loads(bare.run("tombolo", "status", "--json", "--fabric", "demo").stdout)
        assert (now["pid"], now["machines"][0]["pid"]) == (status["pid"], status["machines"][0]["pid"]), "an upgrade ends nothing"
        until("the cell's page", lambda: fetches(bare), PATIENCE_S)
        bare.rpm("-e", *names(first))
        until("the end of all processes", lambda: not bare.processes(), 20)
        bare.run("ip", "link", "del", "byp0")
        bare.run("rm", "/run/demo.toml")
        left = set(bare.files()) - set(before) - OF_SYSTEM
        left = sorted(name for name in left if not f"{name}/".startswith("var/lib/tombolo/"))
        links = [link["ifname"] for link in json.loads(bare.run("ip", "-j", "link").stdout) if link["ifname"] != "lo"]
        assert left + bare.runtime_files() + links == [], (left, bare.runtime_files(), links)


class Image(Podman):
    """podman with the image, which has come into its storage by the command of docs/install.md."""

    def __init__(self, folder, space):
        super().__init__(folder, {"name": "none"}, space)
        [self.path] = package.OUT.glob("tombolo-*.oci.tar")
        block = (ROOT / "docs/install.md").read_text().split("$ skopeo copy ")[1].split("```")[0]
        copy, doctor, *up = block.strip().splitlines()
        source, self.target = copy.split()
        assert source == f"oci-archive:{self.path.relative_to(ROOT)}" and self.target == f"containers-storage:tombolo:{package.VERSION}", block
        self.doctor, self.up = (" ".join(lines).replace("\\ ", "").removeprefix("$ podman run ").split() for lines in ([doctor], up))

    def __enter__(self):
        storage = f"containers-storage:[vfs@{self.folder}/root+{self.folder}/runroot]"
        words = ["skopeo", "copy", "--quiet", f"oci-archive:{self.path}", self.target.replace("containers-storage:", storage)]
        subprocess.run(words, check=True, env=self.environment, stdout=subprocess.DEVNULL)
        return self

    def run(self, *words, **options):
        """`podman run`; a network of podman's own is not needed."""
        return self("run", "--network", "none", *words, **options)


@timeout(900)
def test_the_image_runs_a_fabric_in_a_container():
    need_program("skopeo")
    need_root()
    name = f"tombolo:{package.VERSION}"
    with tempfile.TemporaryDirectory(dir=package.OUT) as folder, Namespace() as space, Image(Path(folder), space) as engine:
        # As docs/install.md has it, and with other words than the image's own.
        said = engine.run(*engine.doctor, check=False)
        assert said.returncode in (0, 1) and "qemu" in said.stdout.lower(), said
        assert engine.run("--rm", name, "version").stdout.split()[1] == package.VERSION
        assert engine.run("--rm", "--entrypoint", "tombolo-span", name, "--version").stdout.split() == ["tombolo-span", package.VERSION]
        scanned = engine.run("--rm", "--entrypoint", "cat", name, "/var/lib/dpkg/status.d/tombolo").stdout
        assert f"Version: {package.VERSION}" in scanned, scanned
        # A fabric of the image's cells and QEMU, with traffic.
        file = Path(folder) / "demo.toml"
        # A container's /proc/sys can only be read.
        file.write_text(FABRIC.replace("[tap.host]", "[tap.host]\naccept_ra = true"))
        engine.run(*(word.replace("./demo.toml", str(file)) for word in engine.up))

        def fetches():
            done = engine("exec", "demo", "python3", "-c", FETCH, check=False)
            state = engine("inspect", "--format", "{{.State.Running}}", "demo").stdout.strip()
            assert state == "true", engine("logs", "demo", check=False)
            return done.returncode == 0

        until("the cell's page", fetches, PATIENCE_S)
        assert "web" in engine("exec", "demo", "tombolo", "status").stdout
        # SIGTERM is what a runtime stops it by: the fabric goes down with it, and in time.
        engine("stop", "--time", "60", "demo")
        assert engine("inspect", "--format", "{{.State.ExitCode}}", "demo").stdout.strip() == "0", engine("logs", "demo")
