"""What tests with real guests are written with: bounded processes, namespaces, QEMU guests, a runner's verdicts.

A test is a function `test_*` in a file `tests/GROUP_*.py`; `./x guests` and `./x faults` run the groups of those names.

    from lib import LinuxGuest, Net, scratch, timeout

    @timeout(60)
    def test_a_guest_gets_its_address():
        with LinuxGuest(net=Net.user()) as guest:
            assert guest.wait_address(30).startswith("10.0.2.")
            assert guest.run("echo hello").text == "hello"

Every process started here dies with the test, whatever ends it; every wait has a deadline and says what it waited for.
"""

from .fabric import Console, Fabric
from .frames import StreamPeer
from .guest import CellGuest, CommandFailed, Commands, Guest, LinuxGuest, Net, linux_cmdline, qemu_program, qemu_version, tsc_khz
from .http import HttpReply, http_get
from .machine import BUILD, ROOT, Skip, alone, built, need_program, need_root, timeout
from .netns import Namespace
from .process import Process, scratch, until

__all__ = [
    "BUILD",
    "ROOT",
    "CellGuest",
    "CommandFailed",
    "Commands",
    "Console",
    "Fabric",
    "Guest",
    "HttpReply",
    "LinuxGuest",
    "Namespace",
    "Net",
    "Process",
    "Skip",
    "StreamPeer",
    "alone",
    "built",
    "http_get",
    "linux_cmdline",
    "need_program",
    "need_root",
    "qemu_program",
    "qemu_version",
    "scratch",
    "timeout",
    "tsc_khz",
    "until",
]
