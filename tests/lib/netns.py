"""Network namespaces and the taps within them, gone when the `with` ends."""

import contextlib
import itertools
import os
import shutil
import subprocess

from .machine import SLOW, need_root

_numbers = itertools.count()


def ip(*words, netns=None):
    """Runs iproute2; CalledProcessError carries its message."""
    command = ["ip"] + (["-n", netns] if netns else []) + [str(word) for word in words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}`: {done.stderr.strip()}")
    return done.stdout


def inside(netns, own_mounts=True):
    """The words before a command that is to run in a namespace: with mounts of its own and that namespace's /sys, as `ip netns exec` has it, or
    in the network namespace alone."""
    return ["ip", "netns", "exec", str(netns)] if own_mounts else ["nsenter", f"--net=/run/netns/{netns}"]


class Namespace:
    """A network namespace of this process's own, with loopback up. Processes enter it by `Process(…, netns=space)`."""

    def __init__(self, name=None):
        need_root()
        self.name = name or f"tmb{os.getpid()}-{next(_numbers)}"

    def __str__(self):
        return self.name

    def __enter__(self):
        ip("netns", "add", self.name)
        ip("link", "set", "lo", "up", netns=self.name)
        return self

    def __exit__(self, *_):
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)

    def number(self):
        """The number by which the kernel knows it: its inode."""
        return os.stat(f"/run/netns/{self.name}").st_ino

    def has_again(self, number):
        """Makes it again; whether it has that number now, of a namespace that went. A new one has the lowest number that is free, so others
        take the lower ones first. The number may be another process's for a while, or the kernel may not have taken the old one down
        yet. Namespaces that other tests make meanwhile may take it, so such a test is `@alone`."""
        ip("netns", "del", self.name)
        with contextlib.ExitStack() as lower:
            while True:
                ip("netns", "add", self.name)
                if self.number() >= number:
                    return self.number() == number
                ip("netns", "del", self.name)
                lower.enter_context(Namespace())

    def tap(self, name="tap0", address=None, vnet_hdr=True):
        """A persistent tap, up, with an address ("10.77.0.1/24") if given; QEMU adopts it by its name."""
        words = ["tuntap", "add", "dev", name, "mode", "tap"] + (["vnet_hdr"] if vnet_hdr else [])
        ip(*words, netns=self.name)
        if address:
            ip("address", "add", address, "dev", name, netns=self.name)
        ip("link", "set", name, "up", netns=self.name)
        return name

    def ip(self, *words):
        return ip(*words, netns=self.name)

    def way_out(self):
        """A default route, as passt wants one to copy: over a pair of interfaces of which both ends are here."""
        self.ip("link", "add", "out0", "type", "veth", "peer", "name", "out1")
        self.ip("link", "set", "out1", "up")
        self.ip("address", "add", "198.51.100.2/24", "dev", "out0")
        self.ip("link", "set", "out0", "up")
        self.ip("route", "add", "default", "via", "198.51.100.1")

    def pings(self, address, seconds=1):
        """Whether one echo request from within is answered within so many seconds: one for who asks again until it is."""
        if not shutil.which("ping"):
            # Otherwise it would look like a network without an answer.
            raise FileNotFoundError("ping is missing: apt-get install iputils-ping")
        return self.run("ping", "-q", "-n", "-c", "1", "-W", seconds, address, check=False).returncode == 0

    def answers(self, address):
        """Whether one echo request from within is answered, however busy the machine is."""
        return self.pings(address, seconds=20)

    def run(self, *argv, seconds=60 * SLOW, check=True):
        """Runs a program inside and gives its CompletedProcess."""
        command = ["ip", "netns", "exec", self.name] + [str(word) for word in argv]
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=check)


class Bridge(Namespace):
    """A namespace with a bridge, by which other namespaces, machines of a test, have a network in common."""

    def __enter__(self):
        super().__enter__()
        self.ip("link", "add", "br0", "type", "bridge", "forward_delay", "0")
        self.ip("link", "set", "br0", "up")
        return self

    def join(self, space, name, address):
        """Gives a namespace an interface eth0 with this address, at the bridge under this name."""
        ip("link", "add", "eth0", "netns", space.name, "type", "veth", "peer", "name", f"to-{name}", "netns", self.name)
        space.ip("address", "add", f"{address}/24", "dev", "eth0")
        space.ip("link", "set", "eth0", "up")
        self.ip("link", "set", f"to-{name}", "master", "br0", "up")

    def cable(self, name, state):
        """Takes one from the network without a word ("down"), or puts it back ("up")."""
        self.ip("link", "set", f"to-{name}", state)
