"""A hostile peer of a stream port: lengths that lie, bytes that dribble, a reader that never reads."""

import socket
import struct
import time

from ..frames import StreamPeer
from . import attack, repeated


def peer(target):
    return StreamPeer(target.sockets["stream"], target.mac)


def raw(target, data, wait_s=0.0):
    with peer(target) as connection:
        connection.socket.settimeout(0.5)
        connection.socket.sendall(data)
        time.sleep(wait_s)


@attack("stream")
def lengths_that_lie(target):
    lengths = iter([0, 1, 13, 65558, 1 << 20, 0x7FFFFFFF, 0xFFFFFFFF] * 1000)
    repeated(target, lambda: raw(target, struct.pack("!I", next(lengths)) + bytes(2000)))


@attack("stream")
def random_bytes(target):
    repeated(target, lambda: raw(target, target.dice.randbytes(65536)))


@attack("stream")
def half_a_frame(target):
    raw(target, struct.pack("!I", 1000) + bytes(10), wait_s=1.0)


@attack("stream")
def one_byte_at_a_time(target):
    with peer(target) as connection:
        frame = connection.arp_request(target.gateway, target.ip)
        data = (struct.pack("!I", len(frame)) + frame) * 1000
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sent = 0

        def step():
            nonlocal sent
            connection.socket.sendall(data[sent:sent + 1])
            sent = (sent + 1) % len(data)
        repeated(target, step)


@attack("stream")
def never_reads(target):
    """Asks for answers without end and reads none."""
    with peer(target) as connection:
        connection.socket.settimeout(0.2)
        frame = connection.arp_request(target.gateway, target.ip)
        data = (struct.pack("!I", len(frame)) + frame) * 500
        repeated(target, lambda: connection.socket.sendall(data))


@attack("stream")
def reconnects(target):
    repeated(target, lambda: raw(target, b""))
