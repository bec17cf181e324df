"""Hostile peers, one module per attachment. Each attack is a function of a `Target`, marked by `@attack`.

An attack runs in a process of its own for at most `ATTACK_S` seconds and may end earlier, or by an
exception: a port that closes the connection is what it should do. `tests/adversary.py` runs them all
and judges by what the neighbours and the daemon show.
"""

import dataclasses
import importlib
import random
import time

# How long an attack that repeats itself goes on.
ATTACK_S = 1.5
# A frame that holds this must not reach a neighbour.
MARK = b"TMB-ESCAPED"
# In the namespace of the attack.
UDP_SUMS = "InCsumErrors"


@dataclasses.dataclass
class Target:
    """What an attack may know: sockets and addresses, as any member of the network would."""

    sockets: dict
    mac: str
    ip: str
    gateway: str
    neighbour_ip: str
    neighbour_mac: str
    seed: int = 1

    def __post_init__(self):
        self.dice = random.Random(self.seed)
        self.until = time.monotonic() + ATTACK_S

    def goes_on(self):
        """True until the attack's time is up."""
        return time.monotonic() < self.until


ATTACKS = {}
# By the name of an attack: the reasons under which its port has to drop something.
DUE = {}


def attack(port, *due):
    """Registers a function as an attack on an attachment; its name is `PORT.FUNCTION`. `due` are the reasons under which the port drops what
    is sent; `UDP_SUMS` is the kernel's count of datagrams with a wrong checksum."""

    def register(function):
        ATTACKS[f"{port}.{function.__name__}"] = function
        DUE[f"{port}.{function.__name__}"] = due
        return function

    return register


def repeated(target, step):
    """Calls `step` until the time is up; what the port answers with (a closed connection) is no error."""
    while target.goes_on():
        try:
            step()
        except (OSError, TimeoutError):
            time.sleep(0.01)


def load():
    """Imports all modules; gives the attacks by name."""
    for name in ("api", "calls", "ivshmem", "segment", "stream", "tunnel", "vhost_user"):
        importlib.import_module("." + name, __package__)
    return ATTACKS
