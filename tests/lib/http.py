"""A small HTTP client that can be told which network namespace to speak from."""

import ctypes
import os
import socket
import time
from typing import NamedTuple

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class HttpReply(NamedTuple):
    """One reply: status, body, and seconds from connecting to the first and to the last byte."""

    status: int
    body: bytes
    first_s: float
    total_s: float


def socket_in(netns, family=socket.AF_INET, kind=socket.SOCK_STREAM):
    """A socket that belongs to a namespace: this thread enters it for as long as the call to socket() takes."""
    if netns is None:
        return socket.socket(family, kind)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{netns}", os.O_RDONLY)
    try:
        if _libc.setns(there, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {netns}")
        try:
            return socket.socket(family, kind)
        finally:
            if _libc.setns(home, CLONE_NEWNET):
                os._exit(70)  # in a foreign namespace nothing of this process may go on
    finally:
        os.close(home)
        os.close(there)


def http_get(host, path="/", port=80, seconds=30, netns=None, keep=True):
    """GET by HTTP/1.0; raises OSError or ValueError. `keep=False` counts the body without holding it (body is then b'')."""
    start = time.monotonic()
    with socket_in(netns) as connection:
        connection.settimeout(seconds)
        connection.connect((host, port))
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        head, first = b"", None
        while b"\r\n\r\n" not in head:
            part = connection.recv(65536)
            first = first or time.monotonic()
            if not part:
                raise ValueError(f"http://{host}:{port}{path}: ended within the head: {head[:80]!r}")
            head += part
        head, rest = head.split(b"\r\n\r\n", 1)
        lines = head.decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines[1:])}
        length = int(fields["content-length"]) if "content-length" in fields else None
        got, parts = len(rest), [rest] if keep else []
        buffer = bytearray(1 << 18)
        while length is None or got < length:
            count = connection.recv_into(buffer)
            if not count:
                break
            got += count
            if keep:
                parts.append(bytes(buffer[:count]))
        if length is not None and got != length:
            raise ValueError(f"http://{host}:{port}{path}: {got} of {length} bytes came")
        return HttpReply(int(lines[0].split()[1]), b"".join(parts), first - start, time.monotonic() - start)
