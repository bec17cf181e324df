"""A network of machines in user space, which loses, delays and reorders their frames."""

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time

from .netns import Namespace
from .tap import IFF_NO_PI, IFF_TAP, TUNSETIFF, Inside

SEED = 17
# Of an address's first byte: it is a group's.
GROUP = 1


class Wire(Namespace):
    """Joins namespaces as `netns.Bridge` does. Each frame is lost with the probability `loss`, and comes between `delay_s` seconds later, so
    that frames of less distance overtake each other. Counts what it did in `passed`, `lost` and `overtaken` (frames that came before an
    earlier one of the same machines)."""

    def __init__(self, loss=0.02, delay_s=(0.005, 0.02)):
        super().__init__()
        self.loss, self.delay_s = loss, delay_s
        self.passed = self.lost = self.overtaken = 0
        self.dice = random.Random(SEED)
        # Of each machine: the descriptor of its cable, whose other end is its eth0; whether it is
        # plugged in; who has which address.
        self.cables, self.is_up, self.places, self.gone = {}, {}, {}, set()
        self.late, self.numbers, self.newest = [], itertools.count(), {}
        self.wake, self.woken = os.pipe()
        self.ends = False
        self.thread = threading.Thread(target=self.run_wire, daemon=True)

    def __enter__(self):
        super().__enter__()
        self.thread.start()
        return self

    def __exit__(self, *args):
        self.ends = True
        os.write(self.woken, b"x")
        self.thread.join()
        for fd in (*self.cables.values(), self.wake, self.woken):
            os.close(fd)
        super().__exit__(*args)

    def join(self, space, name, address):
        """Gives a namespace an interface eth0 with this address, at the wire under this name."""
        with Inside(space):
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TAP | IFF_NO_PI))
        space.ip("address", "add", f"{address}/24", "dev", "eth0")
        space.ip("link", "set", "eth0", "up")
        self.is_up[name], self.cables[name] = True, fd
        os.write(self.woken, b"x")

    def cable(self, name, state):
        """Takes one from the network without a word ("down"), or puts it back ("up")."""
        self.is_up[name] = state == "up"

    def run_wire(self):
        while not self.ends:
            now = time.monotonic()
            while self.late and self.late[0][0] <= now:
                self.deliver(*heapq.heappop(self.late)[1:])
            names = {fd: name for name, fd in list(self.cables.items()) if fd not in self.gone}
            wait = self.late[0][0] - now if self.late else None
            for fd in select.select([self.wake, *names], [], [], wait)[0]:
                if fd == self.wake:
                    os.read(fd, 64)
                    continue
                try:
                    self.take(names[fd], os.read(fd, 70000))
                except BlockingIOError:
                    pass
                except OSError:
                    # Its namespace has gone, and the device with it.
                    self.gone.add(fd)

    def take(self, name, frame):
        self.places[frame[6:12]] = name
        place = None if frame[0] & GROUP else self.places.get(frame[:6])
        for other in [place] if place else [other for other in list(self.cables) if other != name]:
            if not (self.is_up[name] and self.is_up[other]) or self.dice.random() < self.loss:
                self.lost += 1
                continue
            due = time.monotonic() + self.dice.uniform(*self.delay_s)
            heapq.heappush(self.late, (due, next(self.numbers), name, other, frame))

    def deliver(self, number, name, other, frame):
        if not (self.is_up[name] and self.is_up[other]):
            self.lost += 1
            return
        newest = self.newest.get((name, other), -1)
        self.overtaken += number < newest
        self.newest[name, other] = max(newest, number)
        # A full queue, or an interface that is down, loses it.
        try:
            os.write(self.cables[other], frame)
            self.passed += 1
        except OSError:
            self.lost += 1
