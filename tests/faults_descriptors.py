"""Descriptors of a hostile user's file system (FUSE), whose server never answers: `close`, `fstat` and `fstatfs` wait for it."""

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import threading
import time

from lib import Fabric, Namespace, Process, built, scratch, timeout, until
from lib.fabric import PROGRAM, Api
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
PODS = """
name = "{name}"
[network.lan]
subnet = "10.233.0.0/24"
uplink = "none"
[port.other]
kind = "stream"
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


@timeout(240)
def test_a_namespace_behind_a_file_system_that_never_answers_holds_up_its_own_port_alone():
    """Additions and changes are refused in time while all others are served; a takeover goes on; a start parks the container's port."""
    with scratch() as folder, Namespace() as space, Namespace() as pod:
        first, second = folder / "first", folder / "second"
        first.mkdir()
        second.mkdir()
        pod.tap("eth0")
        for name, target in (("web", f"/run/netns/{pod}"), ("dead", first / "hanging/file")):
            (folder / name).symlink_to(target)
        section = f'[tap.{{0}}]\ndevice = "eth0"\nadopt = true\nnetns = "{folder}/{{0}}"\ncontainer = "pods/{{0}}/eth0"\n'
        with Fabric(folder, PODS.format(name=f"pods{os.getpid()}"), netns=space, own_mounts=False) as fabric:
            def ask(method, path, body):
                with contextlib.closing(Api(fabric.runtime / "api.sock")) as api:
                    api.request(method, path, body)
                    answer = api.getresponse()
                    return answer.status, answer.read().decode()

            added = ask("POST", "/v1/ports", section.format("web"))
            assert added[0] < 300, added
            # A tap of the file, which belongs to no container.
            own = f'[tap.own]\ndevice = "eth1"\nadopt = true\nnetns = "{folder}/dead"\n'
            changed = PODS.format(name=fabric.name) + own
            patch = {"tap": {"own": {"device": "eth1", "adopt": True, "netns": f"{folder}/dead"}}}
            ways = [("POST", "/v1/ports", section.format("dead")), ("POST", "/v1/machines", own), ("POST", "/v1/apply", changed),
                    ("PATCH", "/v1/config", json.dumps(patch))]
            other = folder / "other.toml"
            other.write_text(PODS.format(name=f"other{os.getpid()}") + own)
            with HangingFiles(first) as files:
                os.write(files.switch, b"h")
                up = Process([PROGRAM, "up", other], netns=space, env=fabric.env, cwd=folder, own_mounts=False)
                answers = []
                asking = [threading.Thread(target=lambda way=way: answers.append((way[1], *ask(*way)))) for way in ways]
                for thread in asking:
                    thread.start()
                longest = looks = 0
                while any(thread.is_alive() for thread in asking):
                    begun = time.monotonic()
                    names = [port["name"] for port in fabric.status()["ports"]]
                    assert "web" in names and not {"own", "dead"} & set(names), names
                    longest, looks = max(longest, time.monotonic() - begun), looks + 1
                assert len(answers) == len(ways), answers
                for path, code, said in answers:
                    assert code >= 400 and "does not answer within 5s" in said and str(folder / "dead") in said, (path, code, said)
                assert longest < 4 and looks > 2, f"`status` took {longest:.1f} s at most, in {looks} looks"
                up.wait_line(lambda line: "does not answer within 5s" in line, 30)
            assert up.wait(30) != 0, up.tail()

            def lead(target):
                (folder / "web").unlink()
                (folder / "web").symlink_to(target)

            def take_over():
                before = fabric.replace(ends=False)
                return before, str(fabric.port("web"))

            # Its file system does not answer any more, and another daemon takes over: its tap is handed over.
            lead(second / "hanging/file")
            with HangingFiles(second) as files:
                os.write(files.switch, b"h")
                before, told = take_over()
                assert "parked" not in told, told
                lead(f"/run/netns/{pod}")
            assert before.wait(30) == 0, before.tail()
            # A daemon starts; another one takes over what it has parked.
            fabric.kill()
            third = folder / "third"
            third.mkdir()
            lead(third / "hanging/file")
            with HangingFiles(third) as files:
                os.write(files.switch, b"h")
                fabric.start()
                told = str(fabric.port("web"))
                assert "parked" in told and "does not answer within 5s" in told, told
                before, told = take_over()
                assert "parked" in told and "does not answer within 5s" in told, told
                lead(f"/run/netns/{pod}")
            assert before.wait(30) == 0, before.tail()
            until("the port of the container", lambda: "parked" not in str(fabric.port("web")), 60)
            fabric.down()
            assert "eth0" not in pod.ip("link")
