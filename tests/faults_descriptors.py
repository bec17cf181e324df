"""Descriptors of a hostile user's file system (FUSE), whose server never answers: `close`, `fstat` and `fstatfs` wait for it."""

import contextlib
import os
import select
import socket
import struct
import subprocess
import time

from lib import Fabric, Process, built, scratch, timeout, until
from lib.fabric import PROGRAM
from lib.fuse import HangingFiles

FILE = """
name = "descr"
[network.lan]
subnet = "10.233.0.0/24"
uplink = "none"
[port.bad]
kind = "vhost-user"
socket = "{folder}/bad.sock"
[port.good]
kind = "vhost-user"
socket = "{folder}/good.sock"
"""
VERSION, MAGIC = 2, int.from_bytes(b"TMBLRPC\x02", "little")
GET_FEATURES, SET_MEM_TABLE, SET_VRING_KICK, SET_VRING_CALL, ADD_MEM_REG = 1, 5, 12, 13, 37


def message(request, body=b""):
    return struct.pack("<III", request, 1, len(body)) + body


def features(path):
    """What a frontend that behaves is answered."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(path))
        connection.sendall(message(GET_FEATURES))
        reply = connection.recv(20, socket.MSG_WAITALL)
        return struct.unpack("<IIIQ", reply)[3]


def send_and_see_the_end(path, data, fds, kind=socket.SOCK_STREAM):
    """Sends a message with descriptors; the other side ends the connection."""
    with socket.socket(socket.AF_UNIX, kind) as connection:
        connection.settimeout(30)
        connection.connect(str(path))
        socket.send_fds(connection, [data], fds)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass


@timeout(180)
def test_vhost_user_is_not_held_up_by_a_file_system_that_never_answers():
    with scratch() as folder, Fabric(folder, FILE.format(folder=folder)) as fabric, HangingFiles(folder) as files:
        region = struct.pack("<IIQQQQ", 1, 0, 0, 1 << 20, 0x7F00_0000_0000, 0)
        slot = struct.pack("<QQQQQ", 0, 0, 1 << 20, 0x7F00_0000_0000, 0)
        bad, good = folder / "bad.sock", folder / "good.sock"
        # Where one belongs, where an eventfd belongs, where none belongs, and with a message that
        # means nothing.
        attacks = [message(SET_MEM_TABLE, region), message(ADD_MEM_REG, slot), message(SET_VRING_KICK, bytes(8)),
                   message(SET_VRING_CALL, bytes(8)), message(GET_FEATURES), bytes(12)]

        def attack(open_file, hang):
            fds = [open_file() for _ in attacks]
            hang()
            for data, fd in zip(attacks, fds):
                send_and_see_the_end(bad, data, [fd])
                assert features(bad), "the port serves the next frontend"
            for _ in range(100):
                send_and_see_the_end(bad, message(GET_FEATURES), [fds[0]])

        files.attack(attack)
        # The first ones hold up a thread each or wait for it; what there is no room for was
        # discarded by the kernel.
        held = fabric.status()["descriptors"]["held"]
        assert len(attacks) <= held <= 64, f"{held} descriptors wait to be closed"
        assert features(good)
        begun = time.monotonic()
        fabric.cli("port", "del", "bad")
        took = time.monotonic() - begun
        assert took < 20, f"port del took {took:.1f} s"
        names = [port["name"] for port in fabric.status()["ports"]]
        assert "good" in names and "bad" not in names, names
        assert features(good)
        files.answer()
        until("all is closed", lambda: fabric.status()["descriptors"]["held"] == 0, 30)


@timeout(180)
def test_a_service_is_not_held_up_by_a_file_system_that_never_answers():
    """One HELLO used to block the control thread of a service for every client."""
    program = built("examples/calculator")
    with scratch() as folder, HangingFiles(folder) as files:
        env = {"TOMBOLO_RUNTIME": str(folder)}
        door = folder / "services/calculator"

        def call():
            words = [program, "2 + 3"]
            done = subprocess.run(words, env=dict(os.environ, **env), capture_output=True, text=True, timeout=30)
            assert done.stdout.strip() == "5", done

        with Process([program], env=env):
            until("the service", door.exists, 30)
            hello = struct.pack("<IIQIIQ", 1, VERSION, MAGIC, 8, 0, 4096)

            def attack(open_file, hang):
                fds = [open_file() for _ in range(3)]
                hang()
                # In place of the section, with a question that has none, and with nonsense.
                send_and_see_the_end(door, hello, [fds[0]], socket.SOCK_SEQPACKET)
                send_and_see_the_end(door, hello, fds[:2], socket.SOCK_SEQPACKET)
                send_and_see_the_end(door, b"nonsense", [fds[2]], socket.SOCK_SEQPACKET)

            call()
            files.attack(attack)
            call()
            files.answer()
            call()


@timeout(60)
def test_a_daemon_keeps_no_descriptor_of_who_started_it():
    with scratch() as folder:
        name = f"kept{os.getpid()}"
        (folder / "tombolo.toml").write_text(f'name = "{name}"\n[network.lan]\n')
        env = dict(os.environ, TOMBOLO_RUNTIME=str(folder / "run"), TOMBOLO_STATE=str(folder / "state"))
        reader, writer = os.pipe()
        # A script's pipe, whose reader waits for the end of all that write to it.
        up = subprocess.run([PROGRAM, "up", "-d"], env=env, cwd=folder, pass_fds=[writer], capture_output=True, text=True)
        try:
            assert up.returncode == 0, up
            os.close(writer)
            assert select.select([reader], [], [], 10)[0] and os.read(reader, 1) == b"", "the daemon has the pipe"
        finally:
            subprocess.run([PROGRAM, "down", "--fabric", name], env=env, check=True, capture_output=True)
            os.close(reader)
