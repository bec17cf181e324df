"""The calling side. Times are seconds, as floats; instants are ns of CLOCK_MONOTONIC (`now_ns`)."""

import ctypes
import json
import math
import os

from ._library import NONE, STATUS, CallOptions, ConnectOptions, ReplyInfo, lib
from .errors import Error, check

POLLING = {"adaptive": 0, "never": 1, "always": 2}
# How long a caller waits that says nothing else.
_PATIENCE_S = 30.0
# A wait is a sequence of these, so that Ctrl-C is seen.
_SLICE_NS = 200_000_000


def now_ns():
    """Now, on the clock of deadlines."""
    return lib.tombolo_now_ns()


def nanoseconds(seconds):
    """Seconds as C has them; what is below 0 is none, and None is for ever, as is infinity."""
    return NONE if seconds is None or seconds == math.inf else min(max(int(seconds * 1e9), 0), NONE)


def path(folder):
    return None if folder is None else os.fsencode(folder)


def _bytes(data):
    """What may be sent: bytes, or anything that has them, or text."""
    if isinstance(data, str):
        return data.encode()
    # Not bytes(data), which makes zeros of a number.
    return data if isinstance(data, bytes) else bytes(memoryview(data))


def choice(what, value, table):
    """What C has for one of the words of an argument."""
    if value not in table:
        raise ValueError(f"{what}={value!r}: expected one of {', '.join(map(repr, table))}")
    return table[value]


def options_of(kind, sizes, **fields):
    """Options as C has them. `sizes` is what the caller named besides, of the bounds that have no argument of their own."""
    known = {name for name, _ in kind._fields_ if name.startswith("max_") or name.endswith(("entries", "arena_bytes"))}
    unknown = sorted(sizes.keys() - known)
    if unknown:
        raise TypeError(f"unexpected {', '.join(unknown)}: expected of {', '.join(sorted(known))}")
    return kind(**fields, **sizes)


def inside(what, offset, length, size):
    """Raises where a part is not inside of what it is a part of."""
    if not 0 <= offset <= size or not 0 <= length <= size - offset:
        raise IndexError(f"bytes {offset} to {offset}+{length} of {what} of {size}")


def _call_options(within, at, ttl, trace, wait_late):
    if within is not None and at is not None:
        raise TypeError("expected within= or at=, not both")
    options = CallOptions(trace=trace, wait_late_ns=nanoseconds(wait_late))
    if within is not None:
        options.deadline_kind, options.deadline_ns = 1, nanoseconds(within)
    elif at is not None:
        if not 0 <= at <= NONE:
            raise ValueError(f"at={at}: expected an instant in ns, from 0 to 2**64 - 1")
        options.deadline_kind, options.deadline_ns = 2, at
    if ttl is not None:
        options.ttl_ns = max(nanoseconds(ttl), 1)
    return options


def window(address, length, owner):
    """A memoryview of C's memory; the owner lives as long as it does."""
    array = (ctypes.c_ubyte * length).from_address(address)
    # The view keeps the array, and that keeps the object that would free its memory.
    array.owner = owner
    return memoryview(array).cast("B")


class Reply:
    """What a call brought back. Its memory is given back to the service when it goes."""

    def __init__(self, handle):
        self._handle = handle
        self._info = ReplyInfo()
        check(lib.tombolo_reply_get(handle, self._info))

    def __del__(self):
        lib.tombolo_reply_free(self._handle)

    def __len__(self):
        return self._info.len

    @property
    def code(self):
        """The application's; 0 is success."""
        return self._info.code

    @property
    def is_late(self):
        """Whether it came after the call's deadline; only a call with wait_late waits for such a reply."""
        return bool(self._info.late)

    @property
    def queued_ns(self):
        """How long the request waited at the service."""
        return self._info.queued_ns

    @property
    def service_ns(self):
        """How long it was served."""
        return self._info.service_ns

    @property
    def data(self):
        """A copy of the bytes. Raises Reclaimed where the reply was held for too long."""
        copy = ctypes.create_string_buffer(max(len(self), 1))
        copied = ctypes.c_size_t()
        check(lib.tombolo_reply_copy(self._handle, copy, len(self), copied))
        return copy.raw[: copied.value]

    def view(self):
        """The bytes where they are, read-only. The service may change those of a large reply; `is_current` tells afterwards."""
        return window(self._info.data, len(self), self).toreadonly()

    def is_current(self):
        """Whether what was read of the view until now was this reply's."""
        return lib.tombolo_reply_check(self._handle) == 0

    def __repr__(self):
        return f"<tombolo.Reply code={self.code} len={len(self)}>"


class Buffer:
    """Memory that is written here and read by the other side without a copy, to GiB. `view` is a memoryview of it."""

    _handle, _is_writable = 0, True

    def __init__(self, size, populate=False):
        if size < 1:
            raise ValueError(f"size={size}: expected 1 byte or more")
        handle, data = ctypes.c_uint64(), ctypes.c_void_p()
        check(lib.tombolo_buffer_new(size, populate, handle, data))
        self._handle, self._address, self._size = handle.value, data.value, size

    @classmethod
    def of_memfd(cls, fd):
        """The memory of a memfd that is there already, whole: a number, or what has `fileno()`. It has a size and is sealed against shrinking and
        growing (fcntl.F_SEAL_SHRINK, F_SEAL_GROW), or this raises Section; sealed against writing too, its view is read-only. The descriptor
        stays the caller's."""
        handle, data, size, writable = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int32()
        # The object is kept for as long as C has its number.
        number = fd.fileno() if hasattr(fd, "fileno") else fd
        check(lib.tombolo_buffer_of_memfd(number, handle, data, size, writable))
        buffer = cls.__new__(cls)
        buffer._handle, buffer._address, buffer._size = handle.value, data.value, size.value
        buffer._is_writable = writable.value != 0
        return buffer

    def __del__(self):
        if self._handle:
            lib.tombolo_buffer_free(self._handle)

    def __len__(self):
        return self._size

    @property
    def view(self):
        view = window(self._address, self._size, self)
        return view if self._is_writable else view.toreadonly()

    def part(self, offset, length):
        """A part of it, for a handler to return."""
        inside("a buffer", offset, length, len(self))
        return Part(self, offset, length)


class Part:
    """A part of a Buffer."""

    def __init__(self, buffer, offset, length):
        self.buffer, self.offset, self.length = buffer, offset, length


class Room:
    """Memory of a connection's that is written in place."""

    def __len__(self):
        return self._size

    def write(self, data, offset=0):
        """Copies data to an offset."""
        data = _bytes(data)
        if not self._is_ours():
            raise ValueError("it was sent already")
        if not 0 <= offset <= self._size - len(data):
            raise IndexError(f"{len(data)} bytes at {offset} of room for {self._size}")
        ctypes.memmove(self._address + offset, data, len(data))


class Loan(Room):
    """Room for a request in the connection's memory: written in place, then sent by `Client.submit`."""

    _handle = 0

    def __init__(self, client, size):
        handle, data = ctypes.c_uint64(), ctypes.c_void_p()
        check(lib.tombolo_loan_new(client, size, handle, data))
        self._handle, self._address, self._size = handle.value, data.value, size

    def __del__(self):
        if self._handle:
            lib.tombolo_loan_free(self._handle)

    def _is_ours(self):
        return self._handle != 0

    def _take(self):
        handle, self._handle = self._handle, 0
        return handle


class Client:
    """A connection to a service. Threads may share it. Use `with`, or `close` it."""

    _handle = 0

    def __init__(self, name, *, folder=None, patience=5.0, polling="adaptive", **sizes):
        """sizes: entries, arena_bytes, max_shared_bytes, as in tombolo.h."""
        patience_ns, polling = max(nanoseconds(patience), 1), choice("polling", polling, POLLING)
        options = options_of(ConnectOptions, sizes, folder=path(folder), patience_ns=patience_ns, polling=polling)
        handle = ctypes.c_uint64()
        check(lib.tombolo_connect(name.encode(), options, handle))
        self._handle = handle.value

    def close(self):
        """Ends the connection. Replies stay readable."""
        handle, self._handle = self._handle, 0
        if handle:
            lib.tombolo_close(handle)

    def __del__(self):
        self.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def call(self, data, *, within=None, at=None, timeout=_PATIENCE_S, ttl=None, trace=0, wait_late=0):
        """Calls and waits for the reply. A call ends at its deadline, whatever the service does: DeadlineExceeded.

        within: the deadline, so many seconds from now; at: the deadline as an instant; neither: that of the request which this thread
        serves, if any. wait_late: for how long after the deadline a late reply is waited for; it says so (`is_late`). timeout: how long
        the caller waits where the deadline is later or there is none; None has no end. ttl: how long the request may wait.
        """
        if timeout == _PATIENCE_S and within is not None:
            timeout = max(timeout, within)
        token = self.submit(data, within=within, at=at, ttl=ttl, trace=trace, wait_late=wait_late)
        return self.wait(token, timeout)

    def submit(self, data, *, offset=0, length=None, within=None, at=None, ttl=None, trace=0, wait_late=0):
        """Calls without waiting; gives a token. data: bytes, text, a Loan (which is used up), or a Buffer, of which offset and length
        take a part and which must not be written before the answer."""
        options = _call_options(within, at, ttl, trace, wait_late)
        token = ctypes.c_uint64()
        if isinstance(data, Buffer):
            length = len(data) - offset if length is None else length
            check(lib.tombolo_buffer_submit(self._handle, data._handle, offset, length, options, token))
        elif isinstance(data, Loan):
            check(lib.tombolo_loan_submit(self._handle, data._take(), options, token))
        else:
            data = _bytes(data)
            check(lib.tombolo_submit(self._handle, data, len(data), options, token))
        return token.value

    def poll(self, token):
        """The reply, or None while it has not come. Raises how else the call ended."""
        reply = ctypes.c_uint64()
        status = lib.tombolo_poll(self._handle, token, reply)
        if status == STATUS["pending"]:
            return None
        check(status)
        return Reply(reply.value)

    def wait(self, token, timeout=_PATIENCE_S):
        """Waits for the reply. After the time the call is cancelled: Timeout; at its deadline: DeadlineExceeded."""
        left = nanoseconds(timeout)
        end = None if timeout is None else now_ns() + left
        while left > _SLICE_NS and self.wait_any([token], _SLICE_NS / 1e9) is None:
            left = NONE if end is None else max(end - now_ns(), 0)
        reply = ctypes.c_uint64()
        check(lib.tombolo_wait(self._handle, token, left, reply))
        return Reply(reply.value)

    def wait_any(self, tokens, timeout=_PATIENCE_S):
        """Waits until one of these calls can be polled; its index, or None after the time."""
        which = ctypes.c_size_t()
        array = (ctypes.c_uint64 * len(tokens))(*tokens)
        status = lib.tombolo_wait_any(self._handle, array, len(tokens), nanoseconds(timeout), which)
        if status == STATUS["pending"]:
            return None
        check(status)
        return which.value

    def wait_all(self, tokens, timeout=_PATIENCE_S):
        """Waits for all of these calls: a list of how each ended, in their order, the Reply or the Error that `wait` would have raised. Those
        whose answer has not come after the time are cancelled: Timeout."""
        end = None if timeout is None else now_ns() + nanoseconds(timeout)
        ends = []
        for token in tokens:
            try:
                ends.append(self.wait(token, None if end is None else max(end - now_ns(), 0) / 1e9))
            except Error as error:
                ends.append(error)
        return ends

    def cancel(self, token):
        """Asks the service to take a call back; its answer still comes. False where it is not under way any more."""
        return lib.tombolo_cancel(self._handle, token) == 0

    def loan(self, size):
        """Room for a request; raises NoRoom where there is none now."""
        return Loan(self._handle, size)


def report(name, *, folder=None):
    """What a running service tells of itself, as `tombolo service stats NAME --json`."""
    options = ConnectOptions(folder=path(folder))
    room, needed = 4096, ctypes.c_size_t()
    while True:
        text = ctypes.create_string_buffer(room)
        status = lib.tombolo_report(name.encode(), options, text, room, needed)
        if status != STATUS["no-room"]:
            check(status)
            return json.loads(text.value)
        # Its numbers may grow meanwhile.
        room = needed.value + 256
