"""A file system of a hostile user: a FUSE server, spoken directly over /dev/fuse, that stops answering on command."""

import ctypes
import errno
import os
import select
import signal
import struct
import traceback

from .machine import Skip, need_root

# include/uapi/linux/fuse.h
LOOKUP, FORGET, GETATTR, OPEN, STATFS, RELEASE, FLUSH, INIT, INTERRUPT = 1, 2, 3, 14, 17, 18, 25, 26, 36
BATCH_FORGET = 42
SIZE = 64 << 20
MNT_DETACH = 2


def attributes(inode):
    mode = 0o40755 if inode == 1 else 0o100666
    return struct.pack("<6Q10I", inode, SIZE, SIZE // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def serve(fuse, hangs):
    """Answers until the file system is gone. Once the pipe `hangs` is readable, whatever is asked of the file stays unanswered."""
    os.set_blocking(hangs, False)
    hanging = False
    while True:
        try:
            request = os.read(fuse, 1 << 20)
        except OSError as error:
            if error.errno == errno.ENOENT:
                continue
            return
        _, code, unique, inode = struct.unpack_from("<IIQQ", request)
        try:
            hanging = hanging or bool(os.read(hangs, 1))
        except BlockingIOError:
            pass
        if code in (FORGET, BATCH_FORGET, INTERRUPT) or (hanging and code != INIT):
            continue
        error, body = 0, b""
        if code == INIT:
            body = struct.pack("<4I2H2I2HI7I", 7, 31, 0, 0, 12, 9, 4096, 1, 0, 0, 0, *[0] * 7)
        elif code == LOOKUP:
            # Attributes are valid for no time: each fstat asks.
            body = struct.pack("<4Q2I", 2, 0, 0, 0, 0, 0) + attributes(2)
        elif code == GETATTR:
            body = struct.pack("<QII", 0, 0, 0) + attributes(inode)
        elif code == OPEN:
            body = struct.pack("<QII", 1, 0, 0)
        elif code not in (FLUSH, RELEASE):
            error = -errno.ENOSYS
        os.write(fuse, struct.pack("<IiQ", 16 + len(body), error, unique) + body)


class HangingFiles:
    """`.attack(work)` runs `work(open, hang)` in a process of its own. `open()` gives a descriptor of a file; after `hang()` nobody
    gets an answer about it: fstat, fstatfs, close and reads wait. So that process holds the only descriptors of the test's, and starts no
    other. The end of the `with`, or `.answer()`, ends the server, which ends all waiting.
    """

    def __init__(self, folder):
        need_root()
        if not os.path.exists("/dev/fuse"):
            raise Skip("no /dev/fuse")
        self.place = folder / "hanging"
        self.place.mkdir()
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.attackers = []

    def __enter__(self):
        fuse = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other"
        if self.libc.mount(b"hanging", str(self.place).encode(), b"fuse.hanging", 0, options.encode()):
            code = ctypes.get_errno()
            os.close(fuse)
            raise Skip(f"mounting a FUSE file system: {os.strerror(code)}")
        hangs, self.switch = os.pipe()
        self.server = os.fork()
        if self.server == 0:
            try:
                os.close(self.switch)
                serve(fuse, hangs)
            finally:
                os._exit(0)
        os.close(fuse)
        os.close(hangs)
        return self

    def attack(self, work):
        done, told = os.pipe()
        attacker = os.fork()
        if attacker == 0:
            try:
                work(lambda: os.open(self.place / "file", os.O_RDWR), lambda: os.write(self.switch, b"h"))
                os.write(told, b"done")
            except BaseException:
                os.write(told, traceback.format_exc()[-4000:].encode())
            # Its end would wait for the server, too.
            while True:
                signal.pause()
        os.close(told)
        self.attackers.append(attacker)
        with os.fdopen(done, "rb") as pipe:
            ready, _, _ = select.select([pipe], [], [], 90)
            assert ready, "the attacker waits for somebody who is held up"
            said = os.read(pipe.fileno(), 1 << 16).decode()
            assert said == "done", said

    def answer(self):
        """The server ends, and with it whatever waits."""
        for process in [self.server, *self.attackers]:
            os.kill(process, signal.SIGKILL)
            if process == self.server:
                os.waitpid(process, 0)
        for process in self.attackers:
            os.waitpid(process, 0)
        self.server, self.attackers = 0, []

    def __exit__(self, *_):
        if self.server:
            self.answer()
        os.close(self.switch)
        self.libc.umount2(str(self.place).encode(), MNT_DETACH)
