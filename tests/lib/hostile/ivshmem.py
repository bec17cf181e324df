"""A hostile peer of an ivshmem port, on QEMU's server protocol: floods of clients, states, doorbells and rings that lie."""

import contextlib
import fcntl
import os
import socket
import time

from ..ivshmem import RESET, RUN, Client
from . import attack, repeated


def client(target):
    return Client(target.sockets["ivshmem"])


def linked(target):
    """A client whose link runs."""
    one = client(target)
    peer = one.net_peer(target.mac)
    peer.wait_run(5)
    return one, peer


@attack("ivshmem")
def client_flood(target):
    held = []

    def step():
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(0.2)
        connection.connect(target.sockets["ivshmem"])
        held.append(connection)
        if len(held) > 200:
            held.pop(0).close()
    repeated(target, step)
    for connection in held:
        connection.close()


@attack("ivshmem")
def bytes_to_the_server(target):
    def step():
        with client(target) as one:
            one.socket.sendall(target.dice.randbytes(64))
            time.sleep(0.05)
    repeated(target, step)


@attack("ivshmem")
def memory_that_is_resized(target):
    """The region must be sealed: shrinking it would be a SIGBUS in the daemon."""
    with client(target) as one:
        for size in (0, 4096, 1 << 30):
            with contextlib.suppress(OSError):
                os.ftruncate(one.memory_fd, size)
        os.pread(one.memory_fd, 1, 0)


@attack("ivshmem")
def states_without_end(target):
    one, peer = linked(target)
    with one:
        repeated(target, lambda: peer.set_state(target.dice.choice((0, 1, 2, 3, 4, 0xFF, 0x103, 0xFFFFFFFF))))


@attack("ivshmem")
def whole_memory_overwritten(target):
    """Every word of the region, the other side's and the header page included."""
    one, peer = linked(target)
    with one:
        def step():
            at = target.dice.randrange(0, peer.region.size, 4096)
            peer.region.memory[at:at + 4096] = target.dice.randbytes(4096)
            peer.notify(target.dice.randrange(2))
        repeated(target, step)


@attack("ivshmem")
def doorbell_storm(target):
    one, peer = linked(target)
    with one:
        repeated(target, lambda: [peer.notify(vector) for vector in (0, 1) for _ in range(500)])


@attack("ivshmem")
def doorbells_that_block(target):
    """Full and blocking, so that a plain write never returns; drained and blocking, so that a plain read never does."""
    one, peer = linked(target)
    with one:
        for fd in [*one.vectors, *(fd for fds in one.peers.values() for fd in fds)]:
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(fd)
        for fd in one.vectors:
            os.eventfd_write(fd, (1 << 64) - 2)
        for fd in [*one.vectors, *(fd for fds in one.peers.values() for fd in fds)]:
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)

        def step():
            peer.send(peer.arp_request(target.gateway, target.ip), ring_always=True)
            for fds in one.peers.values():
                for fd in fds:
                    os.set_blocking(fd, False)
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(fd)
                    os.set_blocking(fd, True)
        repeated(target, step)


@attack("ivshmem")
def rings_that_lie(target):
    one, peer = linked(target)
    with one:
        def step():
            if peer.state != RUN:
                peer.step()
                return
            index = peer.sent % peer.ring.num
            at = peer.own + 16 * index
            words = [target.dice.choice((0, 1, 64, peer.ring.data, peer.ring.end, 0xFFFFFFFF)) for _ in range(4)]
            for offset, word in zip((0, 4, 8, 12), words):
                peer.region.u32(at + offset).value = word
            peer.region.u16(peer.own + peer.ring.avail + 4 + 2 * index).value = target.dice.choice((index, 0xFFFF, peer.ring.num))
            peer.sent += target.dice.choice((1, 1, 1, peer.ring.num + 1, 40000))
            peer.region.u16(peer.own + peer.ring.avail + 2).value = peer.sent & 0xFFFF
            # The used ring of what the daemon sends, which is in this side's section.
            peer.region.u16(peer.own + peer.ring.used + 2).value = target.dice.randrange(65536)
            peer.notify(1)
        repeated(target, step)
        peer.set_state(RESET)
