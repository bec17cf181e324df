"""What a guest or a client can make grow, and where that ends: the daemon's log, restarts, and the memory of captures."""

import json
import os
import re
import socket
import subprocess

from lib import Fabric, StreamPeer, qemu_program, scratch, until
from lib.fabric import PROGRAM

CRASHING = """
name = "{name}"
[network.lan]
[vm.web]
kernel = "tombolo.toml"
restart = "on-failure"
accel = "tcg"
"""
# A QEMU whose guest prints what a terminal obeys and crashes at once.
SCRIPT = r"""#!/bin/sh
case "$*" in
*"-name tombolo/"*)
    head -c 100000 /dev/zero | tr '\0' x
    printf '\nfirst\n\033]0;title\007\033[2J\033[31mhostile\n'
    exit 3;;
esac
exec {qemu} "$@"
"""


def test_a_machine_that_crashes_backs_off_and_its_words_are_escaped_and_kept():
    name = f"crash{os.getpid()}"
    with scratch() as folder:
        script = folder / "qemu"
        script.write_text(SCRIPT.format(qemu=qemu_program()))
        script.chmod(0o755)
        (folder / "tombolo.toml").write_text(CRASHING.format(name=name))
        env = dict(os.environ, TOMBOLO_RUNTIME=str(folder / "run"), TOMBOLO_STATE=str(folder / "state"), TOMBOLO_QEMU=str(script))

        def cli(*words):
            return subprocess.run([PROGRAM, *words], env=env, check=True, capture_output=True, text=True, cwd=folder).stdout

        # The fabric is up, its machine is not: that is told at once, with its last words.
        up = subprocess.run([PROGRAM, "up", "-d"], env=env, capture_output=True, text=True, cwd=folder)
        assert up.returncode == 3 and "web" in up.stderr and "\x1b" not in up.stdout + up.stderr, (up.returncode, up.stdout, up.stderr)
        try:
            web = lambda: json.loads(cli("status", "--json"))["machines"][0]  # noqa: E731
            # Pauses of 1, 2 and 4 seconds: after the third crash it is told when the next start is.
            until("a third crash", lambda: web()["restarts"] == 2 and (web()["restart_in_s"] or 0) > 2)
            text = cli("status")
            assert re.search(r"failed, again in \d", text), text
            assert "\x1b" not in text and "\\u{1b}[31mhostile" in text, text
            assert max(map(len, text.splitlines())) < 400, "lines are cut"
            log = (folder / "run" / name / "log").read_text()
            assert [f"again in {s} s" in log for s in (1, 2, 4, 8)] == [True, True, True, False], log
            assert "\x1b" not in log and len(log) < 10_000, len(log)
        finally:
            cli("down", "--fabric", name)
        kept = folder / "state" / name / "logs"
        assert "again in 4 s" in (kept / "log").read_text()
        assert b"hostile" in (kept / "web.console").read_bytes()
        assert not (folder / "run" / name).exists()


CAPTURED = """
name = "{name}"
[network.lan]
mtu = 9000
[port.ear]
kind = "stream"
"""


def rss_bytes(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))


def test_captures_that_are_not_read_share_a_bounded_memory():
    name = f"stuck{os.getpid()}"
    with scratch() as folder, Fabric(folder, CAPTURED.format(name=name)) as fabric:
        run = folder / "run" / name
        peer = StreamPeer(run / "ear.sock")
        stuck = []
        # One process may have 32.
        for _ in range(32):
            held = socket.socket(socket.AF_UNIX)
            # Whatever the socket holds itself is no memory of the daemon's.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            held.connect(str(run / "api.sock"))
            held.send(b"GET /v1/ports/ear/capture HTTP/1.1\r\nHost: t\r\n\r\n")
            assert held.recv(12, socket.MSG_WAITALL).endswith(b"200")
            stuck.append(held)
        before = rss_bytes(fabric.process.pid)
        frame = b"\xff" * 6 + b"\x02\0\0\0\0\1" + b"\x88\xb5" + bytes(8900)
        # Of these each capture would keep 8 MiB.
        for _ in range(1500):
            peer.send(frame)
        until("the frames to arrive", lambda: fabric.port("ear")["counters"]["rx_frames"] >= 1500)
        grown = rss_bytes(fabric.process.pid) - before
        assert grown < 128 << 20, f"{grown >> 20} MiB for 32 captures that nobody reads"
        lost = fabric.port("ear")["counters"]["capture_lost"]
        assert lost > 0

        # A small frame finds room. After ten seconds in which nobody reads, what waits is given up,
        # and no more is taken.
        def small_frame_is_taken():
            before = fabric.port("ear")["counters"]
            peer.send(frame[:60])
            until("the frame", lambda: fabric.port("ear")["counters"]["rx_frames"] > before["rx_frames"])
            return fabric.port("ear")["counters"]["captured"] > before["captured"]

        assert small_frame_is_taken()
        until("captures that take no more", lambda: not small_frame_is_taken(), every=1)
        for held in stuck:
            held.close()
