"""A hostile peer of an ivshmem port, on QEMU's server protocol: floods of clients, states, doorbells and rings that lie."""

import array
import contextlib
import fcntl
import mmap
import os
import socket
import struct
import time

from ..ivshmem import RESET, RUN, NetPeer, Region
from . import attack, repeated


class Client:
    """A client of the server: reads what QEMU's device would read."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(2)
        self.socket.connect(str(path))
        self.ident, self.memory_fd, self.peers, self.vectors = None, None, {}, []
        self._read()

    def _message(self):
        data, ancillary, _, _ = self.socket.recvmsg(8, socket.CMSG_SPACE(4))
        if not data:
            raise ConnectionError("the server closed the connection")
        while len(data) < 8:
            data += self.socket.recv(8 - len(data))
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[:4])
        return struct.unpack("<q", data)[0], (fds[0] if fds else None)

    def _read(self):
        version, _ = self._message()
        assert version == 0, version
        self.ident, _ = self._message()
        mark, self.memory_fd = self._message()
        assert mark == -1, mark
        # Own doorbells come last; how many is known from the first peer's.
        self.socket.settimeout(0.3)
        with contextlib.suppress(TimeoutError):
            while True:
                number, fd = self._message()
                if fd is None:
                    continue
                (self.vectors if number == self.ident else self.peers.setdefault(number, [])).append(fd)
        self.socket.settimeout(2)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.socket.close()
        for fd in [self.memory_fd, *self.vectors, *(fd for fds in self.peers.values() for fd in fds)]:
            with contextlib.suppress(OSError, TypeError):
                os.close(fd)

    def net_peer(self, mac):
        """A correct end of the link on this client's memory."""
        region = Region.__new__(Region)
        region.fd = self.memory_fd
        region.size = os.fstat(self.memory_fd).st_size
        region.memory = mmap.mmap(self.memory_fd, region.size)
        page = region.memory[:4096]
        region.offers, = struct.unpack_from("<I", page, 104)
        _, region.protocol, region.max_peers, region.vectors, region.states, _, _, region.outputs, region.output_bytes = struct.unpack_from("<IIIIQQQQQ", page, 8)
        other = next(iter(self.peers), 0)

        def ring(peer, vector):
            fds = self.peers.get(peer, [])
            if vector < len(fds):
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(fds[vector], 1)
        return NetPeer(region, ident=self.ident, peer=other, ring=ring, eventfds=self.vectors, mac=mac)


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
