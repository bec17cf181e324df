"""Several queue pairs (`queues = 2`) of a stock Linux guest in a fabric: QEMU 7.2 and 10, microvm and q35, TCP both ways, reconnect."""

import os

from lib import BUILD, Console, Fabric, Skip, linux_cmdline, scratch, timeout, until

PATIENCE_S = 90
FILE = """
name = "{name}"
[network.lan]
subnet = "10.236.0.0/24"
uplink = "none"
[cell.web]
app = "httpd"
accel = "tcg"
[cell.sink]
app = "iperf"
accel = "tcg"
[vm.linux]
kernel = "{kernel}"
initrd = "{initrd}"
machine = "{machine}"
accel = "tcg"
cpus = 2
queues = 2
cmdline = "{cmdline}"
"""


def talk(linux):
    until("a ping by name", lambda: linux.ping("web", count=1) == 1.0, PATIENCE_S)
    text = linux.run("wget -q -O - http://web/bytes/5000000 | wc -c", seconds=180).text
    assert int(text) == 5_000_000, text
    report = linux.run("iperf -c sink -P 2 -t 1", seconds=120).text
    assert "bits/sec" in report, report


def queues(machine, qemu10):
    kernel = BUILD / "guest" / ("vmlinux" if machine == "microvm" else "vmlinuz")
    if not kernel.exists():
        raise Skip("build/guest is not there: run ./x guest")
    if qemu10:
        if not (BUILD / "qemu10/run").exists():
            raise Skip("build/qemu10 is not there: run ./x qemu10")
        os.environ["TOMBOLO_QEMU"] = str(BUILD / "qemu10/run")
    text = FILE.format(name=f"q{os.getpid()}", kernel=kernel, initrd=BUILD / "guest/initramfs.cpio", machine=machine,
                       cmdline=linux_cmdline("linux", ""))
    with scratch() as folder, Fabric(folder, text) as fabric:
        with Console("linux", fabric.name, fabric.env) as linux:
            linux.wait_address(240)
            linux.wait_control(120)
            use(fabric, linux)
        # The backend ends under the live guest, and its successor has all rings again.
        fabric.kill()
        fabric.start()
        with Console("linux", fabric.name, fabric.env) as linux:
            use(fabric, linux)
            fabric.down()


def use(fabric, linux):
    """Both pairs carry traffic, and nothing is wrong."""
    talk(linux)
    queues = linux.run("ls -d /sys/class/net/eth0/queues/rx-* | wc -l").text
    assert int(queues) == 2, queues
    port = fabric.port("linux")
    # The driver uses as many pairs as it has CPUs.
    assert len(port["details"]["ring_sizes"]) == 4, port
    assert port["up"] and port["counters"]["faults"] == 0, port


@timeout(600)
def test_queues_on_microvm():
    queues("microvm", False)


@timeout(600)
def test_queues_on_q35():
    """On QEMU 7.2 under emulation with interrupts by INTx."""
    queues("q35", False)


@timeout(600)
def test_queues_on_microvm_of_qemu_10():
    queues("microvm", True)


@timeout(600)
def test_queues_on_q35_of_qemu_10():
    queues("q35", True)
