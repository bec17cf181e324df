"""Debian's own cloud-init, run on a seed volume as a guest runs it at boot, in a copy of this system's root that is thrown away.

The package is downloaded and unpacked below build/cloud-init, and not installed: an installed cloud-init would configure this machine at
its next start. Its libraries are those of `./x setup daytwo`.
"""

import json
import subprocess
from pathlib import Path

from .machine import BUILD, Skip, need_program, need_root

PEERS = BUILD / "cloud-init"
PACKAGES = ("cloud-init", "ifupdown")
# $1 the unpacked packages, $2 a folder, $3 the seed, $4 what is run after the boot. The upper layer
# is in memory. Where /usr is merged, lib and sbin of a package are below it. A kernel without the
# file system of the seed gets a helper of mount(8) that reads it with mtools.
SCRIPT = r"""set -e
mount --make-rprivate /
mount -t tmpfs none "$2"
mkdir "$2/up" "$2/work" "$2/root"
mount -t overlay none -o "lowerdir=/,upperdir=$2/up,workdir=$2/work" "$2/root"
root=$2/root
rm -rf "$root/etc/network" "$root/var/lib/cloud" "$root"/etc/systemd/network/*
cp -a "$1/usr" "$1/etc" "$root/"
cp -a "$1/sbin/." "$root/usr/sbin/"
cp -a "$1/lib/." "$root/usr/lib/"
mount --rbind /dev "$root/dev"
mount -t proc none "$root/proc"
mount -t sysfs none "$root/sys"
mount -t tmpfs none "$root/run"
mkdir "$root/run/network"
echo 'source /etc/network/interfaces.d/*' >"$root/etc/network/interfaces"
cat >"$root/etc/cloud/cloud.cfg.d/99_test.cfg" <<X
datasource_list: [NoCloud, None]
cloud_init_modules: [write-files, set-hostname]
system_info:
  network:
    renderers: [eni]
X
if ! grep -qw vfat /proc/filesystems && ! modprobe -q vfat; then
    cat >"$root/usr/sbin/mount.vfat" <<'X'
#!/bin/sh
mount -t tmpfs none "$2" && mcopy -s -i "$1" '::*' "$2/"
X
    chmod +x "$root/usr/sbin/mount.vfat"
fi
loop=$(losetup -f --show -r "$3")
trap 'losetup -d "$loop"' EXIT
chroot "$root" cloud-init init --local >&2
chroot "$root" sh -ec "$4"
"""


def unpacked():
    """The folder with the files of the packages."""
    need_root()
    for program in ("mcopy", "losetup", "dhclient"):
        need_program(program)
    root = PEERS / "root"
    if not (root / "usr/bin/cloud-init").exists():
        need_program("apt-get")
        folder = PEERS / "debs"
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise Skip(f"cloud-init is not unpacked, and `apt-get download {' '.join(PACKAGES)}` says {done.stderr.strip()[-200:]}")
        for deb in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", deb, root], check=True)
    return root


class Failed(Exception):
    """cloud-init, or what ran after it, ended with an error."""


def boot(folder, seed, netns, then="true"):
    """Has cloud-init do what it does before the network of a guest is up, with the devices of `netns`, and runs the shell commands `then`.
    Gives what those print."""
    place = folder / "guest"
    place.mkdir(exist_ok=True)
    words = ["nsenter", f"--net=/run/netns/{netns}", "unshare", "-m", "-u", "sh", "-c", SCRIPT, "sh"]
    done = subprocess.run([*words, unpacked(), place, seed, then], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise Failed(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def status(folder, seed, netns):
    """What cloud-init says of its first stage: the source of its data, all errors and warnings, and the devices that it configured."""
    said = boot(folder, seed, netns, """
        cat /run/cloud-init/status.json; echo; echo =
        grep -E 'WARNING|ERROR|CRITICAL|^Traceback' /var/log/cloud-init.log || true; echo; echo =
        sed -n 's/^iface \\([^ ]*\\) .*/\\1/p' /etc/network/interfaces.d/* | sort -u""")
    found, warnings, devices = said.split("\n=\n")
    found = json.loads(found)["v1"]
    return {"source": found["datasource"] or "", "faults": found["init-local"]["errors"] + warnings.splitlines(),
            "devices": sorted(set(devices.split()) - {"lo"})}


def extract(seed, name):
    """The content of a file of the seed."""
    return subprocess.run(["mcopy", "-i", seed, f"::{name}", "-"], capture_output=True, check=True).stdout.decode()


def replace(seed, name, content):
    """Writes another content into a file of the seed; None deletes it."""
    if content is None:
        subprocess.run(["mdel", "-i", seed, f"::{name}"], check=True)
    else:
        subprocess.run(["mcopy", "-o", "-i", seed, "-", f"::{name}"], input=content.encode(), check=True)


def convert(folder, seed, renderer, distribution):
    """The files that another renderer of cloud-init writes, by their names."""
    config, out = folder / "network-config", folder / renderer
    config.write_text(extract(seed, "network-config"))
    out.mkdir()
    command = ["/usr/bin/python3", "-m", "cloudinit.cmd.main", "devel", "net-convert", "-p", config, "-k", "yaml", "-D", distribution, "-O",
               renderer, "-d", out]
    done = subprocess.run(command, env={"PYTHONPATH": str(unpacked() / "usr/lib/python3/dist-packages"), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                          capture_output=True, text=True)
    if done.returncode:
        raise Failed(done.stderr[-2000:])
    return {str(path.relative_to(out)): path.read_text() for path in Path(out).rglob("*") if path.is_file()}
