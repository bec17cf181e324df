"""The stock Linux guest on two networks of a fabric: a device on each, in the order of the file, reached from both sides."""

import os

from lib import BUILD, Console, Fabric, Skip, linux_cmdline, scratch, timeout, until

PATIENCE_S = 120
FILE = """
name = "{name}"
[network.lan]
subnet = "10.234.0.0/24"
[network.ops]
subnet = "10.235.0.0/24"
[cell.near]
app = "httpd"
network = "lan"
ip = "10.234.0.20"
accel = "tcg"
[cell.far]
app = "httpd"
network = "ops"
ip = "10.235.0.20"
accel = "tcg"
[vm.linux]
kernel = "{kernel}"
initrd = "{initrd}"
machine = "{machine}"
accel = "tcg"
network = ["ops", "lan"]
ip = ["10.235.0.21", "10.234.0.21"]
cmdline = "{cmdline}"
"""


def both(machine):
    kernel = BUILD / "guest" / ("vmlinux" if machine == "microvm" else "vmlinuz")
    if not kernel.exists():
        raise Skip("build/guest is not there: run ./x guest")
    text = FILE.format(name=f"v{os.getpid()}", kernel=kernel, initrd=BUILD / "guest/initramfs.cpio", machine=machine,
                       cmdline=linux_cmdline("linux", "http"))
    with scratch() as folder, Fabric(folder, text) as fabric, Console("linux", fabric.name, fabric.env) as linux:
        # The first device is that of the first network of the file.
        assert linux.wait_address(240).startswith("10.235.0.21")
        linux.wait_control(120)
        linux.run("ip link set eth1 up && ip addr add 10.234.0.21/24 dev eth1")
        for address in ("10.235.0.20", "10.234.0.20"):
            until(f"a ping of {address}", lambda address=address: linux.ping(address, count=1) == 1.0, PATIENCE_S)
            got = linux.run(f"wget -q -O - http://{address}/bytes/1000000 | wc -c", seconds=120).text
            assert int(got) == 1000000, got
        # Its second address comes by DHCP as well.
        asked = linux.run("udhcpc -i eth1 -n -q -s /bin/true -t 20 -T 1 2>&1", seconds=60).text
        assert "lease of 10.234.0.21 obtained" in asked, asked
        ports = [port for port in fabric.status()["ports"] if port["name"].split(".")[0] == "linux"]
        assert len(ports) == 2 and all(port["up"] for port in ports), ports
        fabric.down()


@timeout(420)
def test_a_vm_on_two_networks_over_pci():
    both("q35")


@timeout(420)
def test_a_vm_on_two_networks_over_mmio():
    both("microvm")
