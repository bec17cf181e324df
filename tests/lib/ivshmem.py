"""Shared memory between machines, by hand: QEMU's ivshmem server and one end of an ivshmem-net link.

Written from the specifications alone (QEMU's docs/specs/ivshmem-spec.rst; the frame layout of Siemens' Linux driver; for offloads
docs/ivshmem.md), not from the project's own code, so that a guest which talks to it talks the same bytes as others do.

Every word of the shared memory is read and written as one word (ctypes), never byte by byte.
"""

import array
import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import socket
import struct
import threading
import time

from .frames import Station

PAGE = 4096
MAGIC = b"TMBLIVS1"
NETWORK, CHANNEL = 0x0001, 0x4001
RESET, INIT, READY, RUN = range(4)
# In a header's offers, and in the state words of a guest that takes them.
OFFERS_OFFLOADS, TAKES_OFFLOADS = 1, 0x100
# A virtio-net header without num_buffers: flags, gso_type, hdr_len, gso_size, csum_start,
# csum_offset.
OFFLOAD_HEADER = struct.Struct("<BBHHHH")
PLAIN = OFFLOAD_HEADER.pack(0, 0, 0, 0, 0, 0)


def header(protocol=NETWORK, max_peers=2, vectors=2, rw_bytes=0, region_bytes=1 << 20, output_bytes=None, mac=bytes(6), mtu=0, name="lan", offers=0):
    """The header page: where the state table, the read/write section and the outputs lie."""
    rw_offset = 2 * PAGE
    output_offset = rw_offset + rw_bytes
    if output_bytes is None:
        output_bytes = (region_bytes - output_offset) // max_peers // PAGE * PAGE
    fields = struct.pack("<8sIIIIQQQQQ6sH32sI", MAGIC, 1, protocol, max_peers, vectors, PAGE, rw_offset, rw_bytes, output_offset, output_bytes,
                         mac, mtu, name.encode(), offers)
    return fields.ljust(PAGE, b"\0")


class Region:
    """A region in a memfd that nobody can resize; the header is written before anybody joins."""

    def __init__(self, page, size=1 << 20):
        self.size = size
        self.fd = os.memfd_create("ivshmem-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        os.pwrite(self.fd, page, 0)
        self._map()

    @classmethod
    def of(cls, fd):
        """The region in another process's memfd, which has its header; the descriptor stays the caller's."""
        region = cls.__new__(cls)
        region.fd, region.size = fd, os.fstat(fd).st_size
        region._map()
        return region

    def _map(self):
        self.memory = mmap.mmap(self.fd, self.size)
        page = self.memory[:PAGE]
        self.offers, = struct.unpack_from("<I", page, 104)
        values = struct.unpack_from("<IIIIQQQQQ", page, 8)
        _, self.protocol, self.max_peers, self.vectors, self.states, _, _, self.outputs, self.output_bytes = values

    def u16(self, offset):
        return ctypes.c_uint16.from_buffer(self.memory, offset)

    def u32(self, offset):
        return ctypes.c_uint32.from_buffer(self.memory, offset)

    def state(self, peer):
        return self.u32(self.states + 4 * peer)

    def output(self, peer):
        return self.outputs + peer * self.output_bytes

    def path(self):
        """A path by which a process that this one starts can open the memory."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self):
        os.close(self.fd)


class Server:
    """QEMU's ivshmem server: hands out ids, memory and eventfds, tells who comes. `host`: this process is peer 0."""

    def __init__(self, path, region, host=True):
        self.path, self.region, self.host = str(path), region, host
        self.peers, self._sockets, self._lock = {}, {}, threading.Lock()
        self._stopped = False
        if host:
            self.peers[0] = self._eventfds()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(16)
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """As if the server had been killed: sockets close, memory and eventfds stay with those who have them."""
        if self._stopped:
            return
        self._stopped = True
        # Only by shutdown is a thread woken that waits in accept or recv.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for client in list(self._sockets.values()):
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def _eventfds(self):
        return [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(self.region.vectors)]

    @staticmethod
    def _tell(to, number, fd=None):
        message = [struct.pack("<q", number)]
        if fd is None:
            to.sendmsg(message)
        else:
            socket.send_fds(to, message, [fd])

    def _serve(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                taken = set(self._sockets) | ({0} if self.host else set())
                ident = next(number for number in range(65536) if number not in taken)
                is_new = ident not in self.peers
                own = self.peers[ident] = self.peers.get(ident) or self._eventfds()
                self._tell(client, 0)
                self._tell(client, ident)
                self._tell(client, -1, self.region.fd)
                for peer, fds in self.peers.items():
                    for fd in fds if peer != ident else ():
                        self._tell(client, peer, fd)
                for fd in own:
                    self._tell(client, ident, fd)
                for other in self._sockets.values() if is_new else ():
                    # One that was killed a moment ago hears nothing; `_watch` removes it.
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        for fd in own:
                            self._tell(other, ident, fd)
                self._sockets[ident] = client
            threading.Thread(target=self._watch, args=(ident, client), daemon=True).start()

    def _watch(self, ident, client):
        try:
            client.recv(1)
        except OSError:
            pass
        if self._stopped:
            client.close()
            return
        with self._lock:
            # The seat keeps its eventfds, and nobody is told: QEMU 7.2 frees a peer's doorbells
            # when it hears that it is gone, and writes to them when the number comes again.
            del self._sockets[ident]
            # Nobody else writes the word of a peer that is gone, and rings for it.
            self.region.state(ident).value = RESET
            for peer in self.peers:
                self.ring(peer, 0)
            client.close()

    def ring(self, peer, vector):
        """Rings a peer's doorbell; one that is not there is no error."""
        fds = self.peers.get(peer, [])
        if vector < len(fds):
            os.eventfd_write(fds[vector], 1)


def align(value, to):
    return (value + to - 1) // to * to


class Ring:
    """Where the parts of one direction's ring lie, counted from the start of the section that is its sender's."""

    def __init__(self, section_bytes):
        num = 4096
        while num > 32 and align(self._size(num), 64) >= section_bytes // 8:
            num //= 2
        self.num = num
        self.avail = 16 * num
        self.used = align(self.avail + 2 * (3 + num), 64)
        self.used_event = self.avail + 4 + 2 * num
        self.avail_event = self.used + 4 + 8 * num
        self.data = align(self._size(num), 64)
        self.end = section_bytes

    @staticmethod
    def _size(num):
        return align(16 * num + 2 * (3 + num), 64) + 2 * 3 + 8 * num


def need_event(event, new, old):
    """vring_need_event of the virtio specification, on 16 bits."""
    return (new - event - 1) & 0xffff < (new - old) & 0xffff


class NetPeer(Station):
    """One end of an ivshmem-net link: frames in and out, the states, and nothing that a test does not ask for.

    The used rings are swapped: descriptors and avail of what this end sends, and used of what it receives, are in its own
    output section; it writes nowhere else.
    """

    def __init__(self, region, ident=0, peer=1, ring=None, eventfds=(), mac="02:00:00:00:bb:01"):
        super().__init__(mac)
        self.region, self.ident, self.peer = region, ident, peer
        self._ring, self._eventfds = ring, eventfds
        self.ring = Ring(region.output_bytes)
        self.own, self.other = region.output(ident), region.output(peer)
        self.resets, self.rings = 0, 0
        self.last_header = PLAIN
        self._clear()

    # States
    # ---------------------------------------------------------------------------------------------------------
    @property
    def state(self):
        return self.region.state(self.ident).value

    @property
    def peer_state(self):
        word = self.region.state(self.peer).value
        return word & ~TAKES_OFFLOADS if self.carries_offloads else word

    @property
    def carries_offloads(self):
        """Whether frames go behind headers: the page offers it, and the peer's word says that it wants it."""
        return bool(self.region.offers & OFFERS_OFFLOADS and self.region.state(self.peer).value & TAKES_OFFLOADS)

    def set_state(self, value):
        self.region.state(self.ident).value = value
        self.notify(0)

    def notify(self, vector):
        self.rings += 1
        if self._ring:
            self._ring(self.peer, vector if self.region.vectors > 1 else 0)

    def _clear(self):
        self.sent = self.taken = self.completed = 0
        self.head, self.in_flight = self.ring.data, []

    def step(self):
        """One step of the states; true while frames may go."""
        mine, theirs = self.state, self.peer_state
        if mine == RESET:
            if theirs < READY:
                self.set_state(INIT)
        elif mine == INIT:
            if theirs > RESET:
                self.region.memory[self.own:self.own + self.ring.end] = bytes(self.ring.end)
                self._clear()
                self.set_state(READY)
        elif theirs == RESET:
            self.resets += 1
            self.set_state(RESET)
        elif mine == READY and theirs >= READY:
            self.set_state(RUN)
        return self.state == RUN and theirs >= READY

    def wait_run(self, seconds=60):
        deadline = time.monotonic() + seconds
        while not (self.step() and self.peer_state == RUN):
            if time.monotonic() > deadline:
                raise TimeoutError(f"own state {self.state}, peer's {self.peer_state} after {seconds} s")
            self._sleep(0.01)

    def _sleep(self, seconds):
        if self._eventfds:
            for fd in select.select(self._eventfds, [], [], seconds)[0]:
                try:
                    os.eventfd_read(fd)
                except BlockingIOError:
                    pass
        else:
            time.sleep(min(seconds, 0.0005))

    # Frames
    # ---------------------------------------------------------------------------------------------------------
    def send(self, frame, ring_always=False, offload=PLAIN):
        """Puts one frame on the ring, behind `offload` where headers were agreed on; false where there is no room."""
        self._reap()
        if self.carries_offloads:
            frame = offload + frame
        room = align(18 + len(frame), 64)
        at = self.head if self.head + room <= self.ring.end else self.ring.data
        for start, length in self.in_flight:
            if at < start + length and start < at + room:
                return False
        if len(self.in_flight) >= self.ring.num:
            return False
        self.region.memory[self.own + at:self.own + at + len(frame)] = frame
        index = self.sent % self.ring.num
        descriptor = self.own + 16 * index
        # Address in two halves: the section is below 4 GiB.
        self.region.u32(descriptor).value, self.region.u32(descriptor + 4).value = at, 0
        self.region.u32(descriptor + 8).value, self.region.u32(descriptor + 12).value = len(frame), 0
        self.region.u16(self.own + self.ring.avail + 4 + 2 * index).value = index
        self.head = at + room
        self.in_flight.append((at, room))
        self.sent += 1
        self.region.u16(self.own + self.ring.avail + 2).value = self.sent & 0xffff
        event = self.region.u16(self.other + self.ring.avail_event).value
        if ring_always or need_event(event, self.sent & 0xffff, (self.sent - 1) & 0xffff):
            self.notify(1)
        return True

    def _reap(self):
        used = self.region.u16(self.other + self.ring.used + 2).value
        while self.completed & 0xffff != used:
            entry = self.other + self.ring.used + 4 + 8 * (self.completed % self.ring.num)
            ident, length = self.region.u32(entry).value, self.region.u32(entry + 4).value
            assert ident == self.completed % self.ring.num, f"completion {self.completed} names descriptor {ident}: out of order"
            assert length == 1, f"completion {self.completed} has length {length}, not 1"
            self.in_flight.pop(0)
            self.completed += 1
        # Told again when all that is in flight is done.
        self.region.u16(self.own + self.ring.used_event).value = (self.sent - 1) & 0xffff

    def receive(self):
        """The next frame, or None."""
        if self.region.u16(self.other + self.ring.avail + 2).value == self.taken & 0xffff:
            return None
        slot = self.taken % self.ring.num
        index = self.region.u16(self.other + self.ring.avail + 4 + 2 * slot).value
        assert index < self.ring.num, f"descriptor {index} of {self.ring.num}"
        descriptor = self.other + 16 * index
        low, high = self.region.u32(descriptor).value, self.region.u32(descriptor + 4).value
        length, flags = self.region.u32(descriptor + 8).value, self.region.u16(descriptor + 12).value
        at = low | high << 32
        assert flags == 0, f"descriptor flags {flags:#x}"
        assert self.ring.data <= at and at + length <= self.ring.end, f"frame of {length} bytes at {at:#x} of the section"
        frame = self.region.memory[self.other + at:self.other + at + length]
        entry = self.own + self.ring.used + 4 + 8 * slot
        self.region.u32(entry).value, self.region.u32(entry + 4).value = index, 1
        self.taken += 1
        self.region.u16(self.own + self.ring.used + 2).value = self.taken & 0xffff
        # Interested in the very next frame.
        self.region.u16(self.own + self.ring.avail_event).value = self.taken & 0xffff
        event = self.region.u16(self.other + self.ring.used_event).value
        if need_event(event, self.taken & 0xffff, (self.taken - 1) & 0xffff):
            self.notify(1)
        if self.carries_offloads:
            self.last_header, frame = frame[:OFFLOAD_HEADER.size], frame[OFFLOAD_HEADER.size:]
        return frame

    def _next(self, seconds):
        self.step()
        frame = self.receive() if self.state == RUN else None
        if frame is None:
            self._sleep(min(seconds, 0.05))
        return frame

    def resolve(self, address, own="10.0.0.1", seconds=30):
        """The MAC, in text, of the host that has an address."""
        mac = self.arp(address, own, seconds)
        if mac is None:
            raise TimeoutError(f"nobody said to have {address} within {seconds} s")
        return mac

    def ping(self, mac, address, own="10.0.0.1", sequence=1, size=56, seconds=20):
        """An echo request and its reply, both with right checksums: the round trip in seconds, or None."""
        payload = bytes((sequence + i) % 251 for i in range(size))
        echo = struct.pack("!BBHHH", 8, 0, 0, 0x7b, sequence) + payload
        echo = echo[:2] + struct.pack("!H", checksum(echo)) + echo[4:]
        ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(echo), sequence, 0, 64, 1, 0, socket.inet_aton(own), socket.inet_aton(address))
        ip = ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:]

        def reply(frame):
            same = frame[12:14] == b"\x08\0" and frame[23] == 1 and frame[34] == 0 and frame[38:42] == echo[4:8]
            if not same:
                return False
            assert checksum(frame[14:34]) == 0 and checksum(frame[34:34 + len(echo)]) == 0, "a wrong checksum"
            assert frame[42:42 + size] == payload, "the payload changed"
            return True

        start = time.monotonic()
        assert self.send(self.frame(mac, 0x0800, ip + echo)), "no room for one frame"
        return time.monotonic() - start if self.listen(reply, seconds) else None


def checksum(data):
    """The internet checksum (RFC 1071); 0 over data that holds its own."""
    data = data + b"\0" if len(data) % 2 else data
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xffff:
        total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff


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
        # Own doorbells come last, as many as the header says; where the header was overwritten,
        # what comes in a moment.
        page = os.pread(self.memory_fd, PAGE, 0)
        expected = struct.unpack_from("<I", page, 20)[0] if page.startswith(MAGIC) else 0
        self.socket.settimeout(0.3)
        with contextlib.suppress(TimeoutError):
            while not expected or len(self.vectors) < expected:
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
        region = Region.of(self.memory_fd)
        other = next(iter(self.peers), 0)

        def ring(peer, vector):
            fds = self.peers.get(peer, [])
            if vector < len(fds):
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(fds[vector], 1)
        return NetPeer(region, ident=self.ident, peer=other, ring=ring, eventfds=self.vectors, mac=mac)
