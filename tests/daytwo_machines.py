"""What the file says of when machines run: one after the other, several of one section, again after they have ended; and the
disks that they are given."""

import contextlib
import json
import os
import subprocess

from lib import BUILD, Fabric, Skip, linux_cmdline, scratch, timeout, until
from lib.fabric import Console
from lib.guest import CellGuest

PATIENCE_S = 120


@contextlib.contextmanager
def fabric_of(text):
    with scratch() as folder, Fabric(folder, text.replace("{name}", f"m{os.getpid()}")) as fabric:
        yield fabric


def running(fabric):
    return {machine["name"]: machine for machine in fabric.status()["machines"] if machine["state"] == "running"}


@timeout(180)
def test_machines_start_in_order_and_a_section_may_be_several():
    text = """
name = "{name}"
[network.lan]
[cell.web]
app = "httpd"
accel = "tcg"
count = 2
depends_on = "base"
[cell.last]
app = "echo"
accel = "tcg"
depends_on = "web"
[cell.base]
app = "echo"
accel = "tcg"
"""
    with fabric_of(text) as fabric:
        # While one waits it is neither running nor failed.
        states = {machine["name"]: machine["state"] for machine in fabric.status()["machines"]}
        assert set(states) == {"base", "web-1", "web-2", "last"} and not {"failed", "stopped"} & set(states.values()), states
        until("all machines", lambda: len(running(fabric)) == 4, PATIENCE_S)
        up = {name: machine["uptime_s"] for name, machine in running(fabric).items()}
        assert up["base"] > up["web-1"] > up["last"] and up["base"] > up["web-2"] > up["last"], up
        # A new one that depends on what is up starts at once; the others are not touched.
        pids = {name: machine["pid"] for name, machine in running(fabric).items()}
        fabric.file.write_text(fabric.file.read_text().replace("count = 2", "count = 3"))
        report = json.loads(fabric.cli("apply", fabric.file, "--json").stdout)
        assert {c["section"]: c["action"] for c in report["changes"]} == {"cell.web-3": "add", "cell.last": "change"}, report
        until("the third", lambda: "web-3" in running(fabric), PATIENCE_S)
        now = {name: machine["pid"] for name, machine in running(fabric).items()}
        assert {name: now[name] for name in pids} == pids
        fabric.down()


@timeout(180)
def test_a_machine_that_ends_well_starts_again_where_the_file_says_always():
    text = """
name = "{name}"
[cell.controller]
app = "control"
accel = "tcg"
args = "role=controller link=control period_us=1000 count=50 max_missed=50 net=none"
restart = "always"
[cell.plant]
app = "control"
accel = "tcg"
args = "role=plant link=control net=none"
restart = "always"
[link.control]
between = ["controller", "plant"]
"""
    with fabric_of(text) as fabric:
        until("a second start", lambda: all(m["restarts"] > 0 for m in fabric.status()["machines"]), PATIENCE_S)
        fabric.down()


@timeout(60)
def test_a_vm_has_a_disk_for_cloud_init():
    kernel = CellGuest.IMAGES / "httpd"
    if not kernel.exists():
        raise Skip(f"{kernel} is not built: run ./x cells")
    with scratch() as home:
        (home / "user-data").write_text("#cloud-config\npassword: x\n")
        text = f'name = "{{name}}"\n[network.lan]\n[vm.v]\nkernel = "{kernel}"\naccel = "tcg"\ncloud_init = "{home}/user-data"\n'
        with fabric_of(text) as fabric:
            assert fabric.machine("v")["state"] == "running"
            seed = fabric.folder / "run" / fabric.name / "v.seed"
            found = subprocess.run(["blkid", "-p", "-o", "export", seed], capture_output=True, text=True, check=True).stdout
            assert "LABEL=CIDATA" in found and "TYPE=vfat" in found, found
            # QEMU has it open, and for reading alone.
            pid = fabric.machine("v")["pid"]

            def opened():
                # One that is closed meanwhile is not it.
                with contextlib.suppress(FileNotFoundError):
                    return next((fd for fd in os.listdir(f"/proc/{pid}/fd") if os.readlink(f"/proc/{pid}/fd/{fd}") == str(seed)), None)

            fd = until("QEMU to open it", opened)
            flags = next(line for line in open(f"/proc/{pid}/fdinfo/{fd}") if line.startswith("flags"))
            assert int(flags.split()[1], 8) & 3 == 0, flags
            fabric.down()


@timeout(300)
def test_a_vm_reads_and_writes_each_of_its_disks():
    """Each disk is the one that the file names, in the guest's order of it: read there, written there, read here."""
    initrd = BUILD / "guest/initramfs.cpio"
    if not initrd.exists():
        raise Skip("build/guest is not there: run ./x guest")
    # microvm boots the ELF by its PVH entry, q35 the packed kernel by firmware.
    for machine, kernel in (("microvm", BUILD / "guest/vmlinux"), ("q35", BUILD / "guest/vmlinuz")):
        with scratch() as home:
            disks = [home / name for name in ("first.raw", "second.raw", "third.raw")]
            for number, disk in enumerate(disks, 1):
                disk.write_bytes(f"disk {number} of {machine}\n".encode().ljust(1 << 20, b"\0"))
            text = f'name = "{{name}}"\n[network.lan]\n[vm.v]\nkernel = "{kernel}"\ninitrd = "{initrd}"\nmachine = "{machine}"\naccel = "tcg"\n'
            text += f'memory = "256M"\ncmdline = "{linux_cmdline("v", "", "net=none")}"\ndisk = "{disks[0]}"\ndisks = ["{disks[1]}", "{disks[2]}"]\n'
            with fabric_of(text) as fabric, Console("v", fabric.name, fabric.env) as console:
                console.wait_control(PATIENCE_S)
                for number, device in enumerate(("vda", "vdb", "vdc"), 1):
                    assert f"disk {number} of {machine}" in console.run(f"head -n 1 /dev/{device}"), (machine, device)
                console.run("echo written in the guest | dd of=/dev/vdb bs=512 seek=4 conv=fsync 2>/dev/null")
                written = disks[1].read_bytes()[4 * 512:].split(b"\0")[0]
                assert written == b"written in the guest\n", written
                # What QEMU has locked is no fault of the fabric whose machine has it, but one of
                # every other's.
                assert "no faults" in fabric.cli("check", fabric.file).stdout
                other = fabric.folder / "other.toml"
                other.write_text(fabric.file.read_text().replace(f'name = "{fabric.name}"', 'name = "other"').replace("[network.lan]", '[network.lan]\nsubnet = "10.213.0.0/24"'))
                refused = fabric.cli("up", "-d", other, check=False)
                assert refused.returncode == 1 and "3 faults on this machine" in refused.stderr, refused.stderr
                told = f"{disks[2]}, which another program has (process {fabric.machine('v')['pid']}, "
                assert told in refused.stderr, refused.stderr
                # Nor where its daemon was killed.
                before = fabric.machine("v")["pid"]
                fabric.kill()
                assert "no faults" in fabric.cli("check", fabric.file).stdout
                fabric.start()
                assert fabric.machine("v")["pid"] == before
                fabric.down()
