"""One end of calls with deadlines over an ivshmem link, by hand from docs/rpc.md, and not from the project's own code.

Every word of the shared memory is read and written as one word (ctypes), never byte by byte.
"""

import struct
import time

from .ivshmem import NetPeer

CALLS = 0x4002
ENTRIES, ENTRY = 64, 256
STAMP, PAYLOAD = 56, 64
PUBLISHED, WAKE, RING = 128, 256, 512 + 4 * ENTRIES
ARENA = 20480
CALL, CANCEL = 1, 2
TIME_LEFT = 1
BEST_EFFORT = 2**64 - 1
SERVED, LATE, REFUSED, CANCELLED, EXPIRED, FAILED = range(1, 7)


class CallsPeer(NetPeer):
    """The states of a link as any peer follows them; the sections as calls have them."""

    def __init__(self, region, **others):
        self.half = region.output_bytes // 2 // 4096 * 4096
        self.arena_bytes = 4096
        while ARENA + 2 * self.arena_bytes <= self.half:
            self.arena_bytes *= 2
        super().__init__(region, **others)

    def _clear(self):
        """Both halves of the own section, fresh: the zeros are there."""
        self.asked = self.answered = self.taken_requests = self.replied = self.turn = 0
        for start, role in ((self.own, 1), (self.own + self.half, 2)):
            page = struct.pack("<8sIIIIQQ", b"TMBLRPC\x02", 2, role, ENTRIES, ENTRY, self.arena_bytes, ARENA + self.arena_bytes)
            self.region.memory[start:start + len(page)] = page

    def publish(self, section, index):
        self.region.u32(section + PUBLISHED).value = index
        self.notify(1)

    def entry(self, payload=b"", token=None, left_ns=BEST_EFFORT, flags=TIME_LEFT, kind=CALL, where=0, offset=0, length=None):
        """A request of 256 bytes, wrong in whatever way is asked for."""
        self.turn += 1
        token = self.turn << 32 | self.asked % ENTRIES if token is None else token
        length = len(payload) if length is None else length
        head = struct.pack("<QQQQQIIBBHI", token, left_ns, 0, offset, length, 0, 0, kind, where, flags, 0)
        return token, (head.ljust(PAYLOAD, b"\0") + payload).ljust(ENTRY, b"\0")

    def ask(self, *words, **fields):
        """Writes a request into the ring and rings; its token."""
        token, entry = self.entry(*words, **fields)
        at = self.own + RING + self.asked % ENTRIES * ENTRY
        self.region.memory[at:at + ENTRY] = entry
        self.asked += 1
        self.region.u32(self.own + PUBLISHED).value = self.asked
        self.region.u32(at + STAMP).value = self.asked
        self.notify(1)
        return token

    def taken(self):
        """How many of our requests the other side has taken."""
        return self.region.u32(self.other + self.half + WAKE).value >> 1

    def asks(self):
        """How many requests the other side has written."""
        return self.region.u32(self.other + PUBLISHED).value

    def answer(self, seconds=60):
        """The next answer: token, status, code, payload."""
        theirs = self.other + self.half
        deadline = time.monotonic() + seconds
        while self.region.u32(theirs + PUBLISHED).value == self.answered:
            # Waiting: taken so far, and the lowest bit.
            self.region.u32(self.own + WAKE).value = self.answered << 1 | 1
            if self.region.u32(theirs + PUBLISHED).value != self.answered:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer after {seconds} s")
            self._sleep(0.01)
        at = theirs + RING + self.answered % ENTRIES * ENTRY
        entry = self.region.memory[at:at + ENTRY]
        token, _queued, _service, offset, length, _block, _generation, status, where, _reason, code = struct.unpack_from("<QQQQQIIBBHI", entry)
        self.answered += 1
        self.region.u32(self.own + WAKE).value = self.answered << 1
        start = at + PAYLOAD if where == 0 else theirs + ARENA + offset
        return token, status, code, self.region.memory[start:start + length]

    def call(self, payload, **fields):
        """One call after the other: status, code, payload."""
        token = self.ask(payload, **fields)
        got, *rest = self.answer()
        assert got == token, f"an answer to {got:#x}, asked was {token:#x}"
        return tuple(rest)

    def fallen(self, seconds=60):
        """Waits until the cell has left RUN, and follows it."""
        deadline = time.monotonic() + seconds
        while self.peer_state == 3:
            if time.monotonic() > deadline:
                raise TimeoutError("the cell goes on as if nothing had been")
            self._sleep(0.01)
        self.step()
