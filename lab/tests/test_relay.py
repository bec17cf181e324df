"""The relay between tap and UDP sockets, which a tunnel is measured beside."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tombolo_lab import harness
from tombolo_lab.workloads import tools, tunnel

SOURCE = Path(tunnel.__file__).with_name("relay.c")
FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror", "-static")
MEGABYTES = 40
SERVE = """
import hashlib, socket
with socket.create_server(("10.79.0.2", 7000)) as server:
    server.settimeout(60)
    print("ready", flush=True)
    connection, _ = server.accept()
    connection.settimeout(60)
    seen = hashlib.sha256()
    while part := connection.recv(1 << 20):
        seen.update(part)
print(seen.hexdigest())
"""
SEND = f"""
import hashlib, os, socket
data = os.urandom(1_000_000) * {MEGABYTES}
with socket.create_connection(("10.79.0.2", 7000), 60) as client:
    client.sendall(data)
print(hashlib.sha256(data).hexdigest())
"""


@unittest.skipIf(os.geteuid() != 0, "needs root: namespaces and taps")
class Relay(unittest.TestCase):
    def setUp(self):
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        program = folder / "relay"
        subprocess.run([shutil.which("gcc"), *FLAGS, "-o", program, SOURCE], check=True)
        patch = unittest.mock.patch.object(tunnel.paced, "program", lambda name: program)
        self.stack.enter_context(patch)
        self.machines, self.members = (
            [self.stack.enter_context(harness.Namespace()) for _ in range(2)] for _ in range(2)
        )

    def start(self, gro="on"):
        tunnel.join(*self.machines, gro)
        for at, (space, member) in enumerate(zip(self.machines, self.members, strict=True)):
            tunnel._relay(self.stack, at, space, member)

    def transfer(self):
        """What is sent from one member to the other comes as it was."""
        harness.until("an answer", lambda: self.members[0].pings("10.79.0.2"))
        command = tools.inside(self.members[1], sys.executable, "-c", SERVE)
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.addCleanup(server.kill)
        with server:
            self.assertEqual(server.stdout.readline(), "ready\n")
            sent = tools.bounded(tools.inside(self.members[0], sys.executable, "-c", SEND), 90)
            came, _ = server.communicate(timeout=90)
        self.assertEqual((sent.returncode, len(came)), (0, 65), sent.stderr)
        self.assertEqual(came, sent.stdout)

    def test_tcp_comes_as_it_was_sent(self):
        self.start()
        self.transfer()

    def test_what_lost_datagrams_leave_is_no_frame(self):
        """Every 200th datagram is lost, of frames of 45 that come one by one."""
        rules = (
            "table ip t { chain c { type filter hook prerouting priority raw; "
            "udp dport 4789 numgen inc mod 200 == 7 counter drop; }; }"
        )
        self.machines[1].run("nft", rules)
        self.start(gro="off")
        self.transfer()
        counted = self.machines[1].run("nft", "list ruleset").stdout
        self.assertNotIn("packets 0 ", counted)

    def test_a_relay_that_ends_says_why_at_once(self):
        self.machines[0].ip("link", "add", tunnel.DEVICE, "type", "veth", "peer", "name", "other")
        with self.assertRaisesRegex(EOFError, "making the tap"):
            self.start()


if __name__ == "__main__":
    unittest.main()
