"""Checked traffic: each flow repeats one small exchange in a thread of its own and checks every byte.

A flow knows when its last good check began and ended, so that a test can ask whether the path has
worked since a given moment. A check that times out or is refused is a failure, which is expected
during a fault. A check whose data is wrong is `corrupt`, which is never expected.
"""

import contextlib
import random
import socket
import struct
import threading
import time

from .http import http_get, socket_in

# A check that takes longer has failed; the next one starts afresh, so this bounds the resolution
# too.
CHECK_S = 2.0
PAUSE_S = 0.15
# Byte `i` of a cell's `/bytes/N` is `i` modulo this (cells/src/http.rs).
PATTERN = 251


class Corrupt(Exception):
    """Data came, and it was wrong."""


class Flow(threading.Thread):
    """Repeats `check()` until `stop()`. Subclasses define `check`, which returns or raises."""

    def __init__(self, name, space=None):
        super().__init__(daemon=True)
        self.name, self.space = name, space
        self.good = (0.0, 0.0)
        self.checks = self.failures = self.corrupt = self.broken = 0
        self.last_error = "no check yet"
        self.ended = threading.Event()
        self.dice = random.Random(name)

    def run(self):
        while not self.ended.is_set():
            begun = time.monotonic()
            self.checks += 1
            try:
                self.check()
                self.good = (begun, time.monotonic())
            except Corrupt as error:
                self.corrupt += 1
                self.last_error = f"corrupt: {error}"
            except Exception as error:  # noqa: BLE001 - whatever the fault makes of it
                self.failures += 1
                self.last_error = f"{type(error).__name__}: {error}"[:200]
            self.ended.wait(PAUSE_S)

    def stop(self):
        self.ended.set()
        self.join(CHECK_S + 5)

    def worked_since(self, moment):
        """When the last good check ended, if it began after `moment`; else None."""
        begun, ended = self.good
        return ended if begun >= moment else None

    def check(self):
        raise NotImplementedError


class HttpFlow(Flow):
    """Fetches a file of a cell's httpd, of random length, and checks it."""

    def __init__(self, name, space, host, port=80):
        super().__init__(name, space)
        self.host, self.port = host, port

    def check(self):
        length = self.dice.randrange(1, 60_000)
        reply = http_get(self.host, f"/bytes/{length}", port=self.port, seconds=CHECK_S, netns=self.space)
        if reply.status != 200:
            raise OSError(f"HTTP status {reply.status}")
        whole = bytes(range(PATTERN)) * (length // PATTERN + 1)
        if reply.body != whole[:length]:
            raise Corrupt(f"{len(reply.body)} bytes of {length} differ from the pattern")


class EchoFlow(Flow):
    """Sends random bytes to an echo server by TCP and by UDP and compares what comes back."""

    def __init__(self, name, space, host, port=7):
        super().__init__(name, space)
        self.host, self.port = host, port

    def check(self):
        data = self.dice.randbytes(self.dice.randrange(1, 20_000))
        with socket_in(self.space) as connection:
            connection.settimeout(CHECK_S)
            connection.connect((self.host, self.port))
            compare_echo(connection, data)
        with socket_in(self.space, kind=socket.SOCK_DGRAM) as endpoint:
            endpoint.settimeout(CHECK_S)
            endpoint.connect((self.host, self.port))
            data = self.dice.randbytes(self.dice.randrange(1, 1400))
            endpoint.send(data)
            got = endpoint.recv(2048)
            if got != data:
                raise Corrupt(f"a datagram of {len(data)} bytes came back as {len(got)} other bytes")


def compare_echo(connection, data):
    """Sends `data` in parts of at most 1,000 bytes and reads each back; Corrupt where it differs."""
    for start in range(0, len(data), 1000):
        part = data[start:start + 1000]
        connection.sendall(part)
        got = b""
        while len(got) < len(part):
            more = connection.recv(len(part) - len(got))
            if not more:
                raise ConnectionError("the echo server closed the connection")
            got += more
        if got != part:
            raise Corrupt(f"{len(part)} bytes came back changed")


class StreamFlow(Flow):
    """One TCP connection for as long as it lasts. `broken` counts its ends; it is opened again then.

    A fault that leaves both ends alive must not break it: TCP sends again what was lost."""

    connection = None

    def __init__(self, name, space, host, port=7):
        super().__init__(name, space)
        self.host, self.port = host, port

    def check(self):
        if self.connection is None:
            connection = socket_in(self.space)
            connection.settimeout(CHECK_S)
            try:
                connection.connect((self.host, self.port))
            except OSError:
                connection.close()
                raise
            # Longer than any recovery that TCP itself survives; a peer that is gone answers with a
            # reset.
            connection.settimeout(20)
            self.connection = connection
        try:
            compare_echo(self.connection, self.dice.randbytes(3000))
        except (OSError, Corrupt):
            self.broken += 1
            self.connection.close()
            self.connection = None
            raise

    def stop(self):
        with contextlib.suppress(AttributeError, OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        super().stop()


class PingFlow(Flow):
    """One echo request and its reply."""

    def __init__(self, name, space, host):
        super().__init__(name, space)
        self.host = host

    def check(self):
        if not self.space.pings(self.host):
            raise TimeoutError(f"{self.host} did not answer")


class NameFlow(Flow):
    """Asks the gateway for a member's address (RFC 1035) and checks the answer."""

    def __init__(self, name, space, server, host, address):
        super().__init__(name, space)
        self.server, self.host, self.address = server, host, address

    def check(self):
        ident = self.dice.randrange(1 << 16)
        labels = b"".join(bytes([len(label)]) + label.encode() for label in self.host.split(".")) + b"\0"
        with socket_in(self.space, kind=socket.SOCK_DGRAM) as endpoint:
            endpoint.settimeout(CHECK_S)
            endpoint.connect((self.server, 53))
            endpoint.send(struct.pack("!6H", ident, 0x0100, 1, 0, 0, 0) + labels + struct.pack("!2H", 1, 1))
            reply = endpoint.recv(512)
        got, flags, _, answers = struct.unpack("!4H", reply[:8])
        if got != ident or flags & 15 or answers != 1:
            raise OSError(f"reply {got:#x} to {ident:#x}, code {flags & 15}, {answers} answers")
        if reply[-4:] != socket.inet_aton(self.address):
            raise Corrupt(f"{self.host} is {socket.inet_ntoa(reply[-4:])}, expected {self.address}")


class CallFlow(Flow):
    """One call with a deadline to a service that a cell serves over a link."""

    def __init__(self, name, fabric, service):
        super().__init__(name)
        self.fabric, self.service = fabric, service

    def check(self):
        a, b = self.dice.randrange(1000), self.dice.randrange(1000)
        done = self.fabric.cli("call", self.service, f"{a} + {b}", "--deadline", "1s", seconds=10, check=False)
        if done.returncode:
            raise OSError(done.stderr.strip())
        if done.stdout.strip() != str(a + b):
            raise Corrupt(f"{a} + {b} = {done.stdout.strip()}")


class ControlFlow(Flow):
    """The daemon answers `tombolo status` with every member."""

    def __init__(self, name, fabric):
        super().__init__(name)
        self.fabric = fabric

    def check(self):
        done = self.fabric.cli("status", "--json", seconds=10, check=False)
        if done.returncode:
            raise OSError(done.stderr.strip())
