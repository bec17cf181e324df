"""The stock Linux guest with tombolo-agent on an ivshmem link of a whole fabric, beside a cell on virtio: no kernel driver of ours.

Its wake-ups come by interrupt through vfio where the guest has an IOMMU, else the memory is polled; both are run here.
"""

import os

from lib import BUILD, Skip, linux_cmdline, timeout, until
from guests_fabric import with_linux

WEB, LINUX = "10.236.0.20", "10.236.0.21"
PATIENCE_S = 120
SIZE = 10485760
FILE = """
name = "{name}"
[network.lan]
subnet = "10.236.0.0/24"
[cell.web]
app = "httpd"
ip = "{web}"
accel = "tcg"
[vm.linux]
kernel = "{kernel}"
initrd = "{initrd}"
machine = "q35"
accel = "tcg"
attach = "{attach}"
iommu = {iommu}
ip = "{linux}"
cmdline = "{cmdline}"
"""


def standing(attach, wakeups, iommu):
    """A fabric with the cell `web` and the guest `linux` with the agent, and the guest's console."""
    kernel, initrd = BUILD / "guest/vmlinuz", BUILD / "guest/initramfs-agent.cpio"
    if not initrd.exists():
        raise Skip("build/guest/initramfs-agent.cpio is not there: run ./x guest")
    cmdline = linux_cmdline("linux", "http", f"agent={wakeups}", "intel_iommu=on" if iommu else "")
    text = FILE.format(name=f"a{os.getpid()}", web=WEB, linux=LINUX, kernel=kernel, initrd=initrd, attach=attach,
                       iommu=str(iommu).lower(), cmdline=cmdline)
    return with_linux(text)


def fetch(linux):
    """The guest fetches zeros from the cell and counts them."""
    text = linux.run(f"wget -q -O - http://{WEB}/bytes/{SIZE} | wc -c", seconds=240).text
    assert int(text) == SIZE, text


def carries(fabric, linux):
    """The lease is the one that the file says, names work, and a stream goes each way without a loss that shows."""
    assert linux.run("ip -4 addr show eth0").text.count(LINUX) == 1
    assert linux.ping("web", count=5, size=1400) == 1.0
    fetch(linux)
    port = fabric.port("linux")
    assert port["up"] and port["kind"] == "ivshmem" and port["details"]["offloads"] == "carried", port


@timeout(600)
def test_a_stock_guest_is_woken_by_interrupts_through_vfio():
    with standing("ivshmem", "vfio", iommu=True) as (fabric, linux):
        said = linux.run("cat /tmp/agent.log").text
        assert "wake-ups by interrupt" in said, said
        assert linux.run("grep -c vfio-msix /proc/interrupts").text.strip() == "2"
        carries(fabric, linux)
        # An idle link wakes nobody: the interrupts of a second without traffic are those of stray
        # frames at most.
        count = "cat /proc/interrupts | grep vfio-msix | awk '{ n += $2 } END { print n }'"
        before = int(linux.run(count).text)
        linux.run("sleep 2")  # the span that is measured, not a wait for anything
        assert int(linux.run(count).text) - before < 20


@timeout(600)
def test_a_guest_without_an_iommu_polls_and_says_why():
    with standing("ivshmem", "auto", iommu=False) as (fabric, linux):
        said = linux.run("cat /tmp/agent.log").text
        assert "polled: this guest has no IOMMU" in said, said
        carries(fabric, linux)
        listed = linux.run("tombolo-agent --list").text
        assert "ivshmem-doorbell" in listed and "protocol 0x1" in listed and "wake-ups: none: this guest has no IOMMU" in listed, listed
        # Demanding what is not there fails with the way out, and takes nothing from the agent that
        # runs.
        refused = linux.run("tombolo-agent --wakeups vfio --tap other", check=False)
        assert refused.code == 1 and "--wakeups poll" in refused.text, refused
        assert linux.run("ip link show other", check=False).code != 0
        assert linux.ping("web", count=2) == 1.0


@timeout(600)
def test_a_plain_device_serves_and_a_killed_agent_is_followed_by_the_next():
    with standing("ivshmem-plain", "auto", iommu=False) as (fabric, linux):
        carries(fabric, linux)
        linux.run("killall -9 tombolo-agent")
        until("the tap to go with its agent", lambda: linux.run("ip link show eth0", check=False).code != 0, PATIENCE_S)
        linux.run("tombolo-agent --tap eth0 >/tmp/agent2.log 2>&1 &")
        until("the next agent's tap", lambda: linux.run("ip link show eth0", check=False).code == 0, PATIENCE_S)
        linux.run(f"ip addr add {LINUX}/24 dev eth0 && ip link set eth0 up")
        until("a ping after the agent came again", lambda: linux.ping(WEB, count=1) == 1.0, PATIENCE_S)
        fetch(linux)
        # A signal ends it with the tap gone and the link down.
        linux.run("killall -TERM tombolo-agent")
        until("the link to go down", lambda: not fabric.port("linux")["up"], PATIENCE_S)
