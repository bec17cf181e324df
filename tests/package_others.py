"""RPM's packages hold what Debian's do, and the image runs from its layers; rpm, skopeo and umoci are the judges."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from lib import ROOT, need_program, need_root, timeout

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
        # The module is found by an interpreter that reads its own folder alone, as Fedora's and SUSE's do.
        found = "import site, sys; site.addsitedir(sys.argv[1]); import tombolo, importlib.metadata; print(importlib.metadata.version('tombolo'), tombolo.__file__)"
        sites = Path(folder) / f"usr/lib/python3.{sys.version_info.minor}/site-packages"
        said = output(sys.executable, "-B", "-I", "-S", "-c", found, sites).split()
        assert said[0] == package.VERSION and said[1].startswith(folder), said
        output("rpm", *words, "-e", *(asked(path, "%{NAME}") for path in packages))
        left = [path for path in Path(folder).rglob("*") if not path.is_dir() and not path.is_relative_to(Path(folder) / "var/lib/rpm")]
        assert left == [], left


@timeout(600)
def test_the_image_runs():
    for program in ("skopeo", "umoci"):
        need_program(program)
    need_root()
    [path] = package.OUT.glob("tombolo-*.oci.tar")
    with tempfile.TemporaryDirectory(dir=package.OUT) as folder:
        layout, bundle = Path(folder) / "layout", Path(folder) / "bundle"
        layout.mkdir()
        subprocess.run(["tar", "-C", layout, "-xf", path], check=True)
        image = f"{layout}:{package.VERSION}"
        config = json.loads(output("skopeo", "inspect", "--config", f"oci:{image}"))
        assert config["config"]["Entrypoint"] == ["/usr/bin/tombolo"] and len(config["rootfs"]["diff_ids"]) == 2, config
        subprocess.run(["umoci", "unpack", "--image", image, bundle], check=True)
        said = output("unshare", "--mount", "--net", "--pid", "--fork", "chroot", bundle / "rootfs", "/usr/bin/tombolo", "version")
        assert said.split()[1] == package.VERSION, said
        said = output("unshare", "--mount", "--net", "--pid", "--fork", "chroot", bundle / "rootfs", "/usr/bin/tombolo-span", "--version")
        assert said.split() == ["tombolo-span", package.VERSION], said
        assert (bundle / "rootfs/usr/bin/qemu-system-x86_64").exists() and (bundle / "rootfs/usr/lib/tombolo/apps/httpd").is_file()
