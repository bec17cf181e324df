"""A vhost-user frontend by hand, with the guest's driver in one: the peer of a `vhost-user` port.

Written from the specifications (QEMU's docs/interop/vhost-user.rst; VirtIO 1.3 §2.7 split virtqueues,
§5.1 network device), not from the project's own code. Every message and every ring word can be made
wrong, which is what the adversary suite does.
"""

import ctypes
import mmap
import os
import select
import socket
import struct
import time

from .frames import Station

# --- the protocol's ---

GET_FEATURES, SET_FEATURES, SET_OWNER, RESET_OWNER, SET_MEM_TABLE = 1, 2, 3, 4, 5
SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE, GET_VRING_BASE = 8, 9, 10, 11
SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR = 12, 13, 14
GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, GET_QUEUE_NUM, SET_VRING_ENABLE = 15, 16, 17, 18
GET_MAX_MEM_SLOTS, ADD_MEM_REG, REM_MEM_REG = 36, 37, 38
VERSION, REPLY, NEED_REPLY = 1, 4, 8
F_MRG_RXBUF, F_INDIRECT, F_EVENT_IDX, F_PROTOCOL, F_VERSION_1 = 1 << 15, 1 << 28, 1 << 29, 1 << 30, 1 << 32
P_MQ, P_REPLY_ACK, P_CONFIGURE_MEM_SLOTS = 1, 8, 1 << 15
DESC_NEXT, DESC_WRITE, DESC_INDIRECT = 1, 2, 4
RX, TX = 0, 1
HEADER_BYTES = 12

# --- where things lie in the peer's memory; the guest's addresses and the frontend's are these offsets plus a base ---

MEMORY_BYTES = 4 << 20
GUEST_BASE, USER_BASE = 0x1_0000_0000, 0x7F00_0000_0000
QUEUE_SIZE = 64
DESC, AVAIL, USED, RING_BYTES = 0, 0x1000, 0x2000, 0x4000
BUFFERS, BUFFER_BYTES = 0x100000, 2048


class Refused(ConnectionError):
    """The backend closed the connection."""


class VhostPeer(Station):
    """Connects to a vhost-user socket. `setup()` does a whole and correct handshake; each step can be had alone."""

    def __init__(self, path, mac="02:00:00:00:cc:01", queue_size=QUEUE_SIZE):
        super().__init__(mac)
        self.size = queue_size
        self.fd = os.memfd_create("vhost-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, MEMORY_BYTES)
        self.memory = mmap.mmap(self.fd, MEMORY_BYTES)
        self.kick = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2)]
        self.call = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2)]
        self.avail = [0, 0]
        self.used = [0, 0]
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(str(path))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.socket.close()
        for fd in [self.fd, *self.kick, *self.call]:
            os.close(fd)

    # Messages
    # -------------------------------------------------------------------------------------------------------
    def say(self, request, payload=b"", fds=(), flags=VERSION, size=None):
        """One message, of whatever size it claims to have."""
        message = struct.pack("<III", request, flags, len(payload) if size is None else size) + payload
        try:
            if fds:
                socket.send_fds(self.socket, [message], list(fds))
            else:
                self.socket.sendall(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Refused(str(error)) from None

    def ask(self, request, payload=b"", fds=(), flags=VERSION):
        """One message and its reply's payload."""
        self.say(request, payload, fds, flags)
        return self.reply()

    def reply(self):
        head = self._exactly(12)
        _, _, size = struct.unpack("<III", head)
        return self._exactly(size)

    def _exactly(self, count):
        data = b""
        while len(data) < count:
            try:
                part = self.socket.recv(count - len(data))
            except ConnectionResetError as error:
                raise Refused(str(error)) from None
            if not part:
                raise Refused("the backend closed the connection")
            data += part
        return data

    def is_refused(self, seconds=30):
        """Waits for the backend to close the connection."""
        self.socket.settimeout(seconds)
        try:
            while self.socket.recv(4096):
                pass
        except (ConnectionResetError, BrokenPipeError):
            pass
        except TimeoutError:
            return False
        return True

    # Set-up
    # ---------------------------------------------------------------------------------------------------------
    def features(self, wanted=F_VERSION_1 | F_PROTOCOL, protocol=P_REPLY_ACK):
        self.ask(GET_FEATURES)
        self.say(SET_OWNER)
        self.ask(GET_PROTOCOL_FEATURES)
        self.say(SET_PROTOCOL_FEATURES, struct.pack("<Q", protocol))
        self.say(SET_FEATURES, struct.pack("<Q", wanted))

    @staticmethod
    def region(guest=GUEST_BASE, size=MEMORY_BYTES, user=USER_BASE, offset=0):
        return struct.pack("<QQQQ", guest, size, user, offset)

    def memory_table(self, *regions, fds=None, count=None):
        regions = regions or (self.region(),)
        payload = struct.pack("<II", len(regions) if count is None else count, 0) + b"".join(regions)
        self.say(SET_MEM_TABLE, payload, [self.fd] * len(regions) if fds is None else fds)

    def state(self, request, index, value, flags=VERSION):
        self.say(request, struct.pack("<II", index, value), flags=flags)

    def addresses(self, index, desc=None, used=None, avail=None):
        base = USER_BASE + index * RING_BYTES
        desc, used, avail = (base + at if given is None else given for at, given in ((DESC, desc), (USED, used), (AVAIL, avail)))
        self.say(SET_VRING_ADDR, struct.pack("<IIQQQQ", index, 0, desc, used, avail, 0))

    def start_ring(self, index, size=None, kick=None, call=None, base=0, **addresses):
        self.state(SET_VRING_NUM, index, self.size if size is None else size)
        self.state(SET_VRING_BASE, index, base)
        self.addresses(index, **addresses)
        self.say(SET_VRING_CALL, struct.pack("<Q", index), [self.call[index] if call is None else call])
        self.say(SET_VRING_KICK, struct.pack("<Q", index), [self.kick[index] if kick is None else kick])

    def setup(self, wanted=F_VERSION_1 | F_PROTOCOL):
        """A correct handshake; frames flow afterwards."""
        self.features(wanted)
        self.memory_table()
        for index in (RX, TX):
            self.start_ring(index)
            self.state(SET_VRING_ENABLE, index, 1)
        for slot in range(self.size):
            self.descriptor(RX, slot, GUEST_BASE + self.buffer(RX, slot), BUFFER_BYTES, DESC_WRITE)
            self.offer(RX, slot, kick=False)
        os.eventfd_write(self.kick[RX], 1)
        self.sync()

    def sync(self):
        """Waits until the backend has handled every message so far."""
        self.ask(GET_FEATURES)

    # Rings
    # ----------------------------------------------------------------------------------------------------------
    def u16(self, offset):
        return ctypes.c_uint16.from_buffer(self.memory, offset)

    def buffer(self, index, slot):
        return BUFFERS + (index * QUEUE_SIZE + slot) * BUFFER_BYTES

    def descriptor(self, index, slot, address, length, flags=0, following=0, table=None):
        at = (index * RING_BYTES + DESC if table is None else table) + 16 * slot
        self.memory[at:at + 16] = struct.pack("<QIHH", address & (1 << 64) - 1, length & 0xFFFFFFFF, flags, following)

    def set_avail(self, index, value):
        self.avail[index] = value & 0xFFFF
        self.u16(index * RING_BYTES + AVAIL + 2).value = self.avail[index]

    def offer(self, index, head, kick=True):
        """Makes a chain available, and kicks."""
        self.u16(index * RING_BYTES + AVAIL + 4 + 2 * (self.avail[index] % self.size)).value = head
        self.set_avail(index, self.avail[index] + 1)
        if kick:
            os.eventfd_write(self.kick[index], 1)

    def used_index(self, index):
        return self.u16(index * RING_BYTES + USED + 2).value

    def chain(self, data, slot=None):
        """Writes bytes into the transmit buffer of a slot and describes them; the slot."""
        slot = self.avail[TX] % self.size if slot is None else slot
        at = self.buffer(TX, slot)
        self.memory[at:at + len(data)] = data
        self.descriptor(TX, slot, GUEST_BASE + at, len(data))
        return slot

    def send(self, frame, header=bytes(HEADER_BYTES)):
        """One frame; waits while the ring is full."""
        deadline = time.monotonic() + 10
        while (self.avail[TX] - self.used_index(TX)) & 0xFFFF >= self.size:
            if time.monotonic() > deadline:
                raise TimeoutError("the backend gives no transmit buffer back")
            time.sleep(0.0005)
        self.offer(TX, self.chain(header + frame))

    def _next(self, seconds):
        if self.used[RX] == self.used_index(RX):
            select.select([self.call[RX], self.socket], [], [], min(seconds, 0.05))
            try:
                os.eventfd_read(self.call[RX])
            except BlockingIOError:
                pass
        if self.used[RX] == self.used_index(RX):
            return None
        at = RX * RING_BYTES + USED + 4 + 8 * (self.used[RX] % self.size)
        slot, length = struct.unpack("<II", self.memory[at:at + 8])
        frame = self.memory[self.buffer(RX, slot) + HEADER_BYTES:self.buffer(RX, slot) + length]
        self.used[RX] = (self.used[RX] + 1) & 0xFFFF
        self.offer(RX, slot)
        return frame
