"""A hostile client of a service: it has the right to connect, and abuses it."""

import os
import socket
import time

from . import attack, repeated


def connected(target):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(1)
    connection.connect(target.sockets["service"])
    return connection


@attack("calls")
def random_messages(target):
    def step():
        with connected(target) as connection:
            connection.send(target.dice.randbytes(target.dice.randrange(1, 4096)))
            connection.recv(4096)
    repeated(target, step)


@attack("calls")
def silent_connections(target):
    held = []

    def step():
        held.append(connected(target))
        if len(held) >= 300:
            time.sleep(0.05)
            held.pop(0).close()
    repeated(target, step)
    for connection in held:
        connection.close()


@attack("calls")
def descriptors_that_are_none(target):
    reader, writer = os.pipe()
    folder = os.open("/", os.O_RDONLY)
    memory = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 64 << 20)

    def step():
        with connected(target) as connection:
            fds = target.dice.sample([reader, writer, folder, memory, connection.fileno()], target.dice.randrange(1, 5)) * target.dice.randrange(1, 40)
            socket.send_fds(connection, [target.dice.randbytes(target.dice.randrange(1, 256))], fds[:200])
            connection.recv(4096)
    repeated(target, step)
