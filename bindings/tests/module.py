"""Tests of the Python module: what the calculator does not use, and that its ctypes declarations are those of tombolo.h.

usage: python module.py HEADER, in a Python where the wheel is installed, with TOMBOLO_RUNTIME set to a folder of its own.
"""

import contextlib
import ctypes
import fcntl
import io
import os
import re
import signal
import subprocess
import sys
import threading
import unittest
from pathlib import Path

import tombolo
from tombolo import _library

HEADER = ""
PATIENCE_S = 20
C_TYPES = {
    "uint32_t": ctypes.c_uint32, "int32_t": ctypes.c_int32, "uint64_t": ctypes.c_uint64, "size_t": ctypes.c_size_t, "tombolo_token": ctypes.c_uint64,
    "const char *": ctypes.c_char_p, "char *": ctypes.c_void_p, "const void *": ctypes.c_void_p, "void *": ctypes.c_void_p,
    "void **": ctypes.POINTER(ctypes.c_void_p), "size_t *": ctypes.POINTER(ctypes.c_size_t), "const uint32_t *": ctypes.POINTER(ctypes.c_uint32),
    "uint64_t *": ctypes.POINTER(ctypes.c_uint64), "int32_t *": ctypes.POINTER(ctypes.c_int32),
    "tombolo_token *": ctypes.POINTER(ctypes.c_uint64), "const tombolo_token *": ctypes.POINTER(ctypes.c_uint64),
    "tombolo_answer *": ctypes.c_void_p, "tombolo_handler": _library.HANDLER,
    "const tombolo_connect_options *": ctypes.POINTER(_library.ConnectOptions), "const tombolo_call_options *": ctypes.POINTER(_library.CallOptions),
    "const tombolo_service_options *": ctypes.POINTER(_library.ServiceOptions), "tombolo_reply_info *": ctypes.POINTER(_library.ReplyInfo),
    "tombolo_stats *": ctypes.POINTER(_library.Stats), "tombolo_end *": ctypes.POINTER(_library.End), "tombolo_reply": ctypes.c_uint64,
}  # fmt: skip
for handle in ("client", "reply", "loan", "buffer", "service"):
    C_TYPES[f"tombolo_{handle}"] = ctypes.c_uint64
    C_TYPES[f"tombolo_{handle} *"] = ctypes.POINTER(ctypes.c_uint64)


def of_c(declaration):
    """The ctypes type of "const char *name"."""
    return C_TYPES[re.sub(r"\s*\w+$", "", declaration.strip()).strip()]


class Abi(unittest.TestCase):
    def setUp(self):
        code = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)
        self.code = re.sub(r"\s+", " ", "\n".join(line for line in code.splitlines() if not line.startswith("#")))

    def test_functions(self):
        declared = dict(re.findall(r"(?:int32_t|uint32_t|uint64_t|const char \*) ?(tombolo_\w+)\(([^()]*)\);", self.code))
        self.assertEqual(set(declared), set(_library.OTHERS))
        for name, arguments in declared.items():
            found = _library.OTHERS[name][1]
            wanted = () if arguments == "void" else tuple(of_c(argument) for argument in arguments.split(","))
            self.assertEqual(found, wanted, name)

    def test_structs(self):
        structs = [_library.ConnectOptions, _library.CallOptions, _library.ReplyInfo, _library.End, _library.ServiceOptions, _library.RequestInfo, _library.Stats]
        for struct in structs:
            body = re.search(r"typedef struct " + struct.__doc__ + r" \{(.*?)\}", self.code)[1]
            fields = [(field.split()[-1].lstrip("*"), of_c(field)) for field in body.split(";") if field.strip()]
            self.assertEqual(list(struct._fields_), fields)

    def test_constants(self):
        for name, ours in (("tombolo_status", _library.STATUSES), ("tombolo_refusal", ["refusal-" + reason for reason in _library.REFUSALS])):
            body = re.search(r"typedef enum " + name + r" \{(.*?)\}", self.code)[1]
            theirs = [(word.strip(), int(value)) for word, value in (pair.split("=") for pair in body.split(","))]
            self.assertEqual(theirs, [("TOMBOLO_" + word.upper().replace("-", "_"), value) for value, word in enumerate(ours)])


def serve(request, gate=None):
    """Does what the first word of a request says."""
    word = request.read(length=min(len(request), 20))
    if word == b"raise":
        raise KeyError("as asked for")
    if word == b"fail":
        raise tombolo.Failure(7, "seven")
    if word == b"pair":
        return 3, "three"
    if word == b"none":
        return None
    if word == b"gate":
        gate.waiting.set()
        gate.open.wait(PATIENCE_S)
        return b"open"
    if word == b"left":
        return "no deadline" if request.left is None else f"{request.left:.9f}"
    if word == b"who":
        return f"{request.pid} {request.trace}"
    if word == b"nested":
        with tombolo.Client("inner") as client:
            return client.call("left").data
    if word == b"too large":
        return bytes(2 << 20)
    if word == b"share":
        return gate.buffer
    if word == b"part":
        return 4, gate.buffer.part(2, 3)
    if word in (b"in place", b"in vain", b"no room"):
        loan = request.loan(1 << 40 if word == b"no room" else 5000)
        loan.write(b"p" * 5000)
        gate.loan = loan
        return loan if word == b"in place" else None
    return request.data


class Gate:
    def __init__(self):
        self.waiting, self.open = threading.Event(), threading.Event()
        self.buffer = tombolo.Buffer(8192)


class Calls(unittest.TestCase):
    def setUp(self):
        self.gate = Gate()
        self.service = tombolo.Service("tester", lambda request: serve(request, self.gate), ttl=PATIENCE_S)
        self.client = tombolo.Client("tester")

    def tearDown(self):
        self.gate.open.set()
        self.client.close()
        self.service.stop()

    def test_replies_of_all_sizes(self):
        for size in (0, 1, 192, 193, 70000, 400000):
            data = os.urandom(size)
            reply = self.client.call(data)
            self.assertEqual((reply.code, reply.data, len(reply)), (0, data, size))
        for other in ("text", bytearray(b"text"), memoryview(b"text")):
            self.assertEqual(self.client.call(other).data, b"text")

    def test_a_view_outlives_reply_client_and_service(self):
        data = os.urandom(50000)
        view = self.client.call(data).view()[10:]
        self.client.close()
        self.service.stop()
        self.assertTrue(view.readonly)
        self.assertEqual(bytes(view), data[10:])

    def test_buffers_and_loans(self):
        buffer = tombolo.Buffer(1 << 20)
        buffer.view[4096:4102] = b"shared"
        self.assertEqual(self.client.wait(self.client.submit(buffer, offset=4096, length=6)).data, b"shared")
        with self.assertRaises(tombolo.errors.Range):
            self.client.submit(buffer, offset=1 << 20, length=1)
        loan = self.client.loan(5000)
        loan.write(b"a" * 2500)
        loan.write(b"b" * 2500, 2500)
        with self.assertRaises(IndexError):
            loan.write(b"c", 5000)
        self.assertEqual(self.client.wait(self.client.submit(loan)).data, b"a" * 2500 + b"b" * 2500)
        with self.assertRaises(ValueError):
            loan.write(b"late")
        with self.assertRaises(tombolo.errors.UnknownHandle):
            self.client.submit(loan)
        with self.assertRaises(tombolo.errors.NoRoom):
            self.client.loan(1 << 40)
        self.gate.buffer.view[:6] = b"answer"
        self.assertEqual(self.client.call("share").data, b"answer" + bytes(8186))
        part = self.client.call("part")
        self.assertEqual((part.code, part.data), (4, b"swe"))

    def test_a_memfd_that_is_there_already_is_handed_over_whole(self):
        sealed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        for seals in (sealed, sealed | fcntl.F_SEAL_WRITE):
            with open(os.memfd_create("theirs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b") as file:
                with self.assertRaisesRegex(tombolo.errors.Section, "no seals, expected seals SHRINK and GROW"):
                    tombolo.Buffer.of_memfd(file)
                os.pwrite(file.fileno(), b"there already", 299_987)
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
                buffer = tombolo.Buffer.of_memfd(file)
            self.assertEqual((len(buffer), buffer.view.readonly), (300_000, seals != sealed))
            self.assertEqual(bytes(buffer.view[-13:]), b"there already")
            self.assertEqual(self.client.wait(self.client.submit(buffer, offset=299_980, length=20)).data, bytes(7) + b"there already")
            self.gate.buffer = buffer
            self.assertEqual(self.client.call("share").data, bytes(299_987) + b"there already", "for answers, too")
        buffer = tombolo.Buffer.of_memfd(self.sealed_memfd(4096))
        buffer.view[:3] = b"abc"
        self.assertEqual(self.client.wait(self.client.submit(buffer, length=3)).data, b"abc")
        with self.assertRaisesRegex(tombolo.errors.Section, "0 bytes"):
            tombolo.Buffer.of_memfd(self.sealed_memfd(0))
        reader, writer = os.pipe()
        with self.assertRaisesRegex(tombolo.errors.Section, "expected a memfd"):
            tombolo.Buffer.of_memfd(reader)
        for fd in (reader, writer):
            os.close(fd)
        for fd in (-1, 1_000_000):
            with self.assertRaisesRegex(tombolo.errors.Argument, "expected an open descriptor"):
                tombolo.Buffer.of_memfd(fd)

    def test_replies_beyond_what_the_connection_takes_are_told_apart(self):
        with tombolo.Client("tester", max_shared_bytes=8191) as client:
            with self.assertRaises(tombolo.errors.ReplyTooLarge) as caught:
                client.call("share")
            self.assertRegex(str(caught.exception), "memory of 8192 bytes.*accepts 8191 together.*max_shared_bytes")
            self.assertEqual(client.call("goes on").data, b"goes on")
        with tombolo.Client("tester", max_shared_bytes=8192) as client:
            self.assertEqual(len(client.call("share")), 8192)

    def sealed_memfd(self, size):
        fd = os.memfd_create("theirs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.addCleanup(os.close, fd)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return fd

    def test_answers_are_written_in_place(self):
        self.assertEqual(self.client.call("in place").data, b"p" * 5000)
        with self.assertRaises(ValueError):
            self.gate.loan.write(b"late")
        self.assertEqual(self.client.call("in vain").data, b"")
        with self.assertRaises(tombolo.Refused) as caught:
            self.client.call("no room")
        self.assertEqual(caught.exception.reason, "reply-memory")

    def test_several_are_waited_for(self):
        blocked = self.client.submit("gate")
        self.assertTrue(self.gate.waiting.wait(PATIENCE_S))
        queued, late = self.client.submit("queued"), self.client.submit("late", at=1, wait_late=None)
        exceeded = self.client.submit("exceeded", at=1)
        self.assertTrue(self.client.cancel(queued))
        ends = self.client.wait_all([blocked, late, queued, exceeded], 0.3)
        expected = [tombolo.Timeout, tombolo.Late, tombolo.Cancelled, tombolo.DeadlineExceeded]
        self.assertEqual([type(end) for end in ends], expected)
        self.gate.open.set()
        ends = self.client.wait_all([self.client.submit(str(n)) for n in range(10)], float("inf"))
        self.assertEqual([end.data for end in ends], [b"%d" % n for n in range(10)])
        self.assertEqual(self.client.wait_all([]), [])
        for wrong in (-1, 2**64):
            with self.assertRaises(ValueError):
                self.client.call("x", at=wrong)
        self.assertEqual(self.client.call("left", at=2**64 - 1).data, b"no deadline")

    def test_what_a_handler_returns_and_raises(self):
        for word, code, data in (("pair", 3, b"three"), ("fail", 7, b"seven"), ("none", 0, b"")):
            reply = self.client.call(word)
            self.assertEqual((reply.code, reply.data), (code, data))
        with contextlib.redirect_stderr(io.StringIO()) as shown, self.assertRaises(tombolo.errors.Failed):
            self.client.call("raise")
        self.assertIn("as asked for", shown.getvalue())
        with self.assertRaises(tombolo.errors.Refused) as caught:
            self.client.call("too large")
        self.assertEqual((caught.exception.reason, caught.exception.status), ("reply-memory", "refused"))
        stats = self.service.stats()
        self.assertEqual((stats["served"], stats["failed"], stats["refused_reply_memory"]), (3, 1, 1))
        self.assertEqual(tombolo.report("tester")["answers"]["served"], 3)

    def test_each_end_has_its_class(self):
        blocked = self.client.submit("gate")
        self.assertTrue(self.gate.waiting.wait(PATIENCE_S))
        queued = self.client.submit("queued")
        self.assertIsNone(self.client.poll(queued))
        with self.assertRaises(tombolo.errors.Late):
            self.client.call("late", within=0.001, wait_late=PATIENCE_S)
        # The service hangs: the call ends at its deadline.
        with self.assertRaises(tombolo.errors.DeadlineExceeded) as caught:
            self.client.call("exceeds", within=0.01)
        self.assertIsInstance(caught.exception, TimeoutError)
        self.assertTrue(self.client.cancel(queued))
        self.assertEqual(self.client.wait_any([blocked, queued]), 1)
        with self.assertRaises(tombolo.errors.Cancelled):
            self.client.poll(queued)
        self.assertFalse(self.client.cancel(queued))
        with self.assertRaises(tombolo.errors.Expired):
            self.client.call("expires", ttl=0.001)
        with self.assertRaises(TimeoutError):
            self.client.call("times out", timeout=0.001)
        self.gate.open.set()
        self.assertEqual(self.client.wait(blocked).data, b"open")
        with self.assertRaises(tombolo.errors.Running):
            tombolo.Service("tester", serve)
        self.service.stop()
        with self.assertRaises(ConnectionError) as caught:
            self.client.call("nobody")
        self.assertIs(type(caught.exception), tombolo.errors.ProviderGone)
        with self.assertRaises(tombolo.errors.NoService):
            tombolo.Client("tester")
        self.client.close()
        with self.assertRaises(tombolo.errors.UnknownHandle):
            self.client.call("closed")

    def test_deadlines_are_inherited(self):
        with tombolo.Service("inner", serve):
            self.assertEqual(self.client.call("nested").data, b"no deadline")
            left = float(self.client.call("nested", within=PATIENCE_S).data)
            self.assertTrue(0 < left <= PATIENCE_S, left)
        left = float(self.client.call("left", at=tombolo.now_ns() + 10**10).data)
        self.assertTrue(0 < left <= 10, left)
        self.assertEqual(self.client.call("who", trace=5).data, f"{os.getpid()} 5".encode())
        with self.assertRaises(TypeError):
            self.client.call("both", within=1, at=1)

    def test_wrong_arguments_are_told(self):
        for make in (
            lambda: tombolo.Client("calls", max_shard_bytes=1),
            lambda: tombolo.Service("other", serve, max_clientz=1),
            lambda: tombolo.Client("calls", patience_ns=1),
            lambda: self.client.call(5),
        ):
            self.assertRaises(TypeError, make)
        for make in (
            lambda: tombolo.Client("calls", polling="often"),
            lambda: tombolo.Service("other", serve, late_policy="never"),
            lambda: tombolo.Buffer(0),
            lambda: tombolo.Buffer(-1),
        ):
            self.assertRaisesRegex(ValueError, "expected", make)
        self.assertRaises(IndexError, tombolo.Buffer(4096).part, 4096, 1)

    def test_a_file_that_nobody_else_holds_is_kept_until_its_memory_is_taken(self):
        fd = os.memfd_create("module", os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, 4096)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            class Lent:
                """Its descriptor is there for as long as it is."""

                def __init__(self):
                    self.fd = os.dup(fd)

                def fileno(self):
                    return self.fd

                def __del__(self):
                    os.close(self.fd)

            self.assertEqual(len(tombolo.Buffer.of_memfd(Lent())), 4096)
        finally:
            os.close(fd)

    def test_other_threads_run_while_one_waits(self):
        """Both sides wait in C in this one process: without the lock given back neither this nor the handler would ever run."""
        replies = []
        waits = threading.Thread(target=lambda: replies.append(self.client.call("gate")))
        waits.start()
        self.assertTrue(self.gate.waiting.wait(PATIENCE_S))
        self.gate.open.set()
        waits.join(PATIENCE_S)
        self.assertEqual(replies[0].data, b"open")

    def test_a_wait_sees_signals(self):
        """A wait without end in C would not let Python act on Ctrl-C."""

        class Interrupted(Exception):
            pass

        def interrupt(*_):
            raise Interrupted

        token = self.client.submit("gate")
        self.assertTrue(self.gate.waiting.wait(PATIENCE_S))
        signal.signal(signal.SIGALRM, interrupt)
        with self.assertRaises(Interrupted):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            self.client.wait(token, None)

    def test_a_request_is_gone_when_its_handler_has_returned(self):
        kept = []
        with tombolo.Service("keeper", kept.append), tombolo.Client("keeper") as client:
            client.call("x")
            with self.assertRaises(ValueError):
                kept[0].data  # noqa: B018
            with self.assertRaises(tombolo.errors.UnknownHandle):
                tombolo.errors.check(_library.lib.tombolo_answer_code(1, 1))

    def test_a_forked_child_has_connections_of_its_own_and_leaves_its_parents_alone(self):
        data = os.urandom(100000)
        reply, waiting = self.client.call(data), self.client.submit("gate")
        self.assertTrue(self.gate.waiting.wait(PATIENCE_S))
        child = os.fork()
        if child == 0:
            # Whatever happens, the rest of the tests is not the child's.
            code = 1
            try:
                with self.assertRaises(tombolo.ProviderGone):
                    self.client.call("x")
                with self.assertRaises(tombolo.ProviderGone):
                    self.client.wait(waiting)
                self.client.close()
                self.service.stop()
                del reply
                self.lose_a_service()
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.gate.open.set()
        self.assertEqual(self.client.wait(waiting, PATIENCE_S).data, b"open")
        self.assertEqual(self.client.call(os.urandom(100000)).code, 0, "the connection is still there")
        self.assertEqual(reply.data, data, "a reply that the child dropped too is still there")
        self.assertEqual(tombolo.report("tester")["answers"]["refused_stopping"], 0)

    def lose_a_service(self):
        """A service that is killed while it serves a call of this process's."""
        program = "import time, tombolo; s = tombolo.Service('mortal', lambda _: time.sleep(600)); print('serving', flush=True); time.sleep(600)"
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as provider:
            self.assertEqual(provider.stdout.readline(), b"serving\n")
            with tombolo.Client("mortal") as client:
                token = client.submit("x")
                provider.kill()
                with self.assertRaises(tombolo.ProviderGone):
                    client.wait(token, PATIENCE_S)


if __name__ == "__main__":
    HEADER = Path(sys.argv.pop()).read_text()
    unittest.main()
