"""Who serves.

A handler is called with a `Request` and returns the answer: bytes or text, or (code, bytes or text), or a `Buffer`, or None for an
empty one; of a Buffer also a `part`, or what it wrote in place (`Request.loan`). It may raise `Failure(code, text)`. Any other exception is printed, and the caller gets Failed. It runs in a thread of the library's; with several workers, in several at a time, as far as Python's lock lets it.
"""

import atexit
import ctypes
import threading
import traceback
import weakref

from ._library import HANDLER, NONE, STATUS, ServiceOptions, Stats, lib
from .client import POLLING, Buffer, Part, Room, _bytes, choice, inside, nanoseconds, now_ns, options_of, path
from .errors import NoRoom, check

CLASSES = {"normal": 0, "fifo": 1, "deadline": 2}
LATE = {"refuse": 0, "best-effort": 1}
ORDER = {"edf": 0, "fifo": 1, "deadline-monotonic": 2}


# Services that run. They end before Python does: a handler must not be called in what is left of
# it.
_running = weakref.WeakSet()


@atexit.register
def _stop_all():
    for service in list(_running):
        service.stop()


class Failure(Exception):
    """What a handler raises to answer with a code of the application's and a text."""

    def __init__(self, code, text=""):
        super().__init__(code, text)
        self.code, self.text = code, text


class Request:
    """A request that is being served. Its bytes can be read until the handler returns."""

    def __init__(self, info, answer):
        self._info, self._answer, self._loan, self._is_refused = info, answer, None, False
        self.deadline_ns = None if info.deadline_ns == NONE else info.deadline_ns
        self.trace, self.queued_ns = info.trace, info.queued_ns
        self.pid, self.uid, self.gid = info.pid, info.uid, info.gid
        self._len = info.len

    def __len__(self):
        return self._len

    @property
    def data(self):
        """A copy of the bytes."""
        return self.read()

    def read(self, offset=0, length=None):
        """A copy of a part of the bytes."""
        if self._info is None:
            raise ValueError("the request's handler has returned: its bytes are gone")
        length = self._len - offset if length is None else length
        inside("a request", offset, length, self._len)
        return ctypes.string_at(self._info.data + offset, length)

    def loan(self, size):
        """Room for an answer in the connection's memory: written in place (`write`), and returned by the handler. Raises NoRoom where there is
        none; the caller then gets Refused, unless something else is returned."""
        self._loan = AnswerLoan(self, size)
        return self._loan

    @property
    def left(self):
        """Seconds until the deadline; 0 when it has passed, None for best effort."""
        return None if self.deadline_ns is None else max(self.deadline_ns - now_ns(), 0) / 1e9


class AnswerLoan(Room):
    """Room for an answer; of a request the last one."""

    def __init__(self, request, size):
        if request._info is None:
            raise ValueError("the request's handler has returned: there is no answer to it any more")
        data = ctypes.c_void_p()
        status = lib.tombolo_answer_loan(request._answer, size, data)
        request._is_refused = status == STATUS["no-room"]
        check(status)
        self._request, self._address, self._size = request, data.value, size

    def _is_ours(self):
        return self._request._info is not None and self._request._loan is self


def _put(request, result):
    answer = request._answer
    code, result = result if isinstance(result, tuple) else (0, result)
    check(lib.tombolo_answer_code(answer, code))
    if isinstance(result, Buffer):
        result = result.part(0, len(result))
    if isinstance(result, Part):
        check(lib.tombolo_answer_share(answer, result.buffer._handle, result.offset, result.length))
    elif isinstance(result, AnswerLoan):
        if not result._is_ours():
            raise ValueError("expected what request.loan gave last, for this request")
    elif result is not None or request._loan is not None:
        data = _bytes(b"" if result is None else result)
        check(lib.tombolo_answer_write(answer, data, len(data)))


class Service:
    """A service: it runs from here until `stop`, or the end of a `with`. Times are seconds."""

    _handle = 0

    def __init__(
        self,
        name,
        handler,
        *,
        workers=1,
        worker_class="normal",
        fifo_priority=0,
        budget=0.001,
        period=0.010,
        queue_bound=0,
        late_policy="refuse",
        order="edf",
        admission=False,
        uids=(),
        gids=(),
        everybody=False,
        polling="adaptive",
        ttl=60.0,
        reply_ttl=60.0,
        slow=0.010,
        folder=None,
        **sizes,
    ):
        """sizes: max_clients, max_clients_per_uid, max_bytes_per_uid, max_entries_per_uid, max_entries, max_arena_bytes, reply_arena_bytes,
        max_shared_bytes, as in tombolo.h."""
        self._serve = handler
        self._ended = threading.Event()
        # C calls it until the service has been stopped.
        self._callback = HANDLER(self._called)
        uids, gids = ((ctypes.c_uint32 * len(ids))(*ids) for ids in (uids, gids))
        options = options_of(
            ServiceOptions,
            sizes,
            workers=workers,
            worker_class=choice("worker_class", worker_class, CLASSES),
            fifo_priority=fifo_priority,
            budget_ns=nanoseconds(budget),
            period_ns=nanoseconds(period),
            queue_bound=queue_bound,
            late_policy=choice("late_policy", late_policy, LATE),
            order=choice("order", order, ORDER),
            admission=admission,
            uids=uids,
            uid_count=len(uids),
            gids=gids,
            gid_count=len(gids),
            everybody=everybody,
            polling=choice("polling", polling, POLLING),
            ttl_ns=nanoseconds(ttl),
            reply_ttl_ns=nanoseconds(reply_ttl),
            slow_ns=nanoseconds(slow),
            folder=path(folder),
        )
        handle = ctypes.c_uint64()
        check(lib.tombolo_register(name.encode(), options, self._callback, None, handle))
        self._handle = handle.value
        _running.add(self)

    def _called(self, _context, info, answer):
        request = Request(info.contents, answer)
        try:
            try:
                result = self._serve(request)
            except Failure as failure:
                result = (failure.code, failure.text)
            except NoRoom:
                # Of a loan of the answer's; elsewhere it is a failure as others.
                return 0 if request._is_refused else self._failed()
            try:
                _put(request, result)
            except NoRoom:
                # Answered as refused, which is what the client is to know.
                pass
            return 0
        except BaseException:  # noqa: BLE001: nothing may cross into C
            return self._failed()
        finally:
            request._info = None

    @staticmethod
    def _failed():
        traceback.print_exc()
        return 1

    def stop(self):
        """Ends it: handlers under way are waited for. Not from within one of them."""
        if self._handle:
            check(lib.tombolo_stop(self._handle))
            self._handle = 0
        self._ended.set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def __del__(self):
        if self._handle:
            self.stop()

    def wait(self, timeout=None):
        """Waits until it is stopped, by another thread or Ctrl-C; False after the time."""
        return self._ended.wait(timeout)

    def stats(self):
        """Counters and times, by their names in tombolo.h."""
        stats = Stats()
        check(lib.tombolo_service_stats(self._handle, stats))
        return {name: getattr(stats, name) for name, _ in Stats._fields_[2:]}
