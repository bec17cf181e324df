"""vhost-user ports with `connect = true`: the frontend, QEMU, listens, and the fabric connects, again and again."""

import os
import stat
import time

from lib import Fabric, LinuxGuest, Net, scratch, timeout, until
from lib.process import cpu_seconds

FILE = """
name = "{name}"
[network.lan]
[port.guest]
kind = "vhost-user"
socket = "qemu.sock"
connect = true
"""


@timeout(300)
def test_the_fabric_connects_to_a_frontend_that_listens():
    with scratch() as folder, Fabric(folder, FILE.format(name=f"client{os.getpid()}")) as fabric:
        socket = folder / "qemu.sock"
        # Nobody listens for a while; that costs next to nothing.
        cpu, begun = cpu_seconds(fabric.process.pid), time.monotonic()
        until("two seconds", lambda: time.monotonic() > begun + 2)
        assert cpu_seconds(fabric.process.pid) - cpu < 0.5
        for life in range(2):
            with LinuxGuest(net=Net.vhost_user(socket, server=True)) as guest:
                assert guest.wait_address(90).startswith("10.87.0."), life
                assert guest.ping("10.87.0.1"), life
                assert fabric.port("guest")["up"]
                guest.kill()
            until("the link to be down", lambda: not fabric.port("guest")["up"])
        # The frontend's socket is not the fabric's to remove.
        with LinuxGuest(net=Net.vhost_user(socket, server=True)) as guest:
            guest.wait_address(90)
            fabric.cli("down", "--fabric", fabric.name)
            fabric.process.wait()
            assert stat.S_ISSOCK(os.stat(socket).st_mode)
