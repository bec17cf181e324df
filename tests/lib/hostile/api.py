"""A hostile client of the API's socket."""

import socket
import time

from . import attack, repeated


def connected(target):
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(0.5)
    connection.connect(target.sockets["api"])
    return connection


def hold(target, data, count=200):
    """Sends the same on many connections and keeps them open."""
    held = []
    while target.goes_on() and len(held) < count:
        try:
            connection = connected(target)
            connection.sendall(data)
            held.append(connection)
        except OSError:
            time.sleep(0.02)
    while target.goes_on():
        time.sleep(0.02)
    for connection in held:
        connection.close()


@attack("api")
def half_sent_heads(target):
    hold(target, b"GET /v1/status HTTP/1.1\r\nHost: x\r\nX-")


@attack("api")
def half_sent_bodies(target):
    hold(target, b"POST /v1/ports HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n[port")


@attack("api")
def unread_answers(target):
    hold(target, b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n" * 200)


@attack("api")
def random_bytes(target):
    def step():
        with connected(target) as connection:
            connection.sendall(target.dice.randbytes(20000))
            connection.recv(4096)
    repeated(target, step)


@attack("api")
def heads_without_end(target):
    def step():
        with connected(target) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n")
            for _ in range(2000):
                connection.sendall(b"X-A: " + b"b" * 1000 + b"\r\n")
    repeated(target, step)
