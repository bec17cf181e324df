"""What a VM's disk for cloud-init holds, read by Debian's own cloud-init: its NoCloud source, the schema of its user-data, its renderers,
and DHCP clients that follow what it wrote, in a namespace that has the VM's devices as taps of the fabric."""

import contextlib
import os
import shutil
import subprocess

from lib import Fabric, Namespace, need_program, need_root, scratch, timeout, until
from lib import cloudinit

NETWORKS = """
name = "{name}"
[network.quiet]
subnet = "10.237.3.0/24"
dhcp = false
ipv6 = "off"
[network.lan]
subnet = "10.237.1.0/24"
ipv6 = "fd12:3456:789a:e1::/64"
[network.data]
subnet = "10.237.2.0/24"
ipv6 = "fd12:3456:789a:e2::/64"
"""
# Of the VM: the devices in the order of its networks, with the names that its kernel gives them.
MACS = {f"ens{n}": f"02:54:00:00:c1:0{n}" for n in (3, 4, 5)}
VM = """
[vm.v]
disk = "blank.raw"
accel = "tcg"
network = ["quiet", "lan", "data"]
mac = {macs}
ip = "10.237.3.9"
cloud_init = "user-data"
"""
USER_DATA = """#cloud-config
write_files:
  - path: /srv/from-the-seed
    content: |
      told by the seed
"""


@contextlib.contextmanager
def seeded():
    """A folder, and in it the seed of a VM that a fabric has started."""
    need_root()
    need_program("mcopy")
    with scratch() as folder:
        (folder / "user-data").write_text(USER_DATA)
        with open(folder / "blank.raw", "wb") as disk:
            disk.truncate(1 << 20)
        text = NETWORKS.format(name=f"ci{os.getpid()}") + VM.format(macs=str(list(MACS.values())).replace("'", '"'))
        with Fabric(folder, text) as fabric:
            seed = folder / "run" / fabric.name / "v.seed"
            until("the machine", lambda: fabric.machine("v")["state"] == "running")
            kept = shutil.copy(seed, folder / "seed")
            fabric.down()
        yield folder, kept


def is_good(state):
    """Whether cloud-init has found the seed on the disk, without any complaint, and configured all devices."""
    return state["source"].startswith("DataSourceNoCloud [seed=/dev/loop") and not state["faults"] and state["devices"] == list(MACS)


@timeout(300)
def test_cloud_init_reads_the_seed_and_all_devices_come_up():
    with seeded() as (folder, seed), Namespace() as guest:
        taps = [f'[tap.{device}]\nnetwork = "{network}"\nnetns = "/run/netns/{guest}"\nmac = "{mac}"\nguard = "mac"\naccept_ra = true\n'
                for (device, mac), network in zip(MACS.items(), ("quiet", "lan", "data"))]
        with Fabric(folder, NETWORKS.format(name=f"cj{os.getpid()}") + "".join(taps)) as fabric:
            assert is_good(cloudinit.status(folder, seed, guest))
            said = cloudinit.boot(folder, seed, guest, """
                hostname; cat /var/lib/cloud/data/instance-id
                ifup -a >&2
                cloud-init init >&2; cloud-init schema --system; cat /srv/from-the-seed
                for device in ens3 ens4 ens5; do ip -br address show dev $device; done
                for address in 10.237.3.1 10.237.1.1 10.237.2.1 fd12:3456:789a:e1::1 fd12:3456:789a:e2::1; do
                    ping -q -c 1 -W 20 $address >&2 && echo reached $address
                done
                # The clients of DHCP would go on after the system that they are of.
                for file in /run/dhclient*.pid; do kill $(cat $file); done
                """)
            lines = said.splitlines()
            assert lines[0] == "v" and lines[1].startswith("v-"), said
            assert "Valid cloud-config: system userdata" in said and "told by the seed" in said, said
            shown = {line.split()[0].split("@")[0]: line for line in lines if line.startswith("ens")}
            assert "10.237.3.9/24" in shown["ens3"], shown
            assert "10.237.1." in shown["ens4"] and "fd12:3456:789a:e1:" in shown["ens4"], shown
            assert "10.237.2." in shown["ens5"] and "fd12:3456:789a:e2:" in shown["ens5"], shown
            assert sum(line.startswith("reached") for line in lines) == 5, said
            fabric.down()


@timeout(120)
def test_each_renderer_of_cloud_init_configures_every_device():
    with seeded() as (folder, seed):
        # There are no such devices here, so the entries keep their own names.
        names = {f"eth{n}": mac for n, mac in enumerate(MACS.values())}
        files = cloudinit.convert(folder, seed, "networkd", "debian")
        units = {name.split("-")[-1].removesuffix(".network"): text for name, text in files.items()}
        assert set(units) == set(names), files
        assert all(f"MACAddress={mac}" in units[name] for name, mac in names.items()), units
        assert "Address=10.237.3.9/24" in units["eth0"] and "DHCP=no" in units["eth0"], units["eth0"]
        assert "DHCP=yes" in units["eth1"] and "IPv6AcceptRA=True" in units["eth1"] and "RouteMetric=101" in units["eth1"], units["eth1"]
        [plan] = cloudinit.convert(folder, seed, "netplan", "ubuntu").values()
        assert all(mac in plan for mac in names.values()) and plan.count("dhcp6: true") == 2 and "route-metric: 102" in plan, plan
        ifcfg = cloudinit.convert(folder, seed, "sysconfig", "rhel")
        connections = cloudinit.convert(folder, seed, "network-manager", "rhel")
        for name, mac in names.items():
            [text] = [text for path, text in ifcfg.items() if path.endswith(f"ifcfg-{name}")]
            assert mac in text.lower(), text
            [text] = [text for path, text in connections.items() if path.endswith(f"cloud-init-{name}.nmconnection")]
            assert mac in text.lower(), text


@timeout(180)
def test_a_seed_that_is_wrong_is_found_by_these_tests():
    with seeded() as (folder, seed), Namespace() as guest:
        for name, mac in MACS.items():
            guest.ip("link", "add", name, "address", mac, "type", "veth", "peer", "name", f"p{name}")
        assert is_good(cloudinit.status(folder, seed, guest))
        good = cloudinit.extract(seed, "network-config")
        for name, content in (("meta-data", None), ("user-data", None), ("network-config", None), ("network-config", good.replace("    dhcp4", "\tdhcp4")),
                              ("network-config", good.replace("version: 2", "version: 7"))):
            bad = shutil.copy(seed, folder / "bad")
            cloudinit.replace(bad, name, content)
            try:
                state = cloudinit.status(folder, bad, guest)
            except cloudinit.Failed:
                continue
            assert not is_good(state), (name, content, state)
        bad = shutil.copy(seed, folder / "bad")
        subprocess.run(["mlabel", "-i", bad, "::OTHER"], check=True)
        assert not is_good(cloudinit.status(folder, bad, guest))
