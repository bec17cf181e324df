"""Three machines of which each has its own user: a namespace, and in it a daemon, a cell and a tombolo-span that run without any privilege. The
tunnel is a UDP socket, so it needs none either."""

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
from pathlib import Path

from lib import Namespace, Process, Skip, need_program, need_root, scratch, timeout, until
from lib.fabric import PROGRAM, Fabric
from lib.frames import StreamPeer, mac_bytes
from lib.ivshmem import checksum
from lib.netns import Bridge
from lib.process import children
from span_control import PATIENCE_S, PORT, SPAN

FIRST_USER = 64_100
NAMES = {1: "a", 2: "b", 3: "c"}


def text(number):
    remotes = ", ".join(f'"10.233.2.{n}"' for n in NAMES if n != number)
    return f"""name = "u-{number}"
[network.lan]
subnet = "10.87.0.0/24"
gateway = "10.87.0.{number}"
mtu = 1450
dhcp = {{ from = "10.87.0.{40 + number}", to = "10.87.0.{40 + number}" }}
[cell.web-{number}]
app = "httpd"
accel = "tcg"
ip = "10.87.0.{10 + number}"
[port.probe-{number}]
kind = "stream"
mac = "02:00:00:00:ee:0{number}"
ip = "10.87.0.{20 + number}"
[port.span]
kind = "vxlan"
vni = 42
local = "10.233.2.{number}"
remotes = [{remotes}]
learning = false
"""


class Machine:
    """Number 1 to 3, at 10.233.2.N, of the user FIRST_USER + N."""

    def __init__(self, stack, folder, bridge, keys, number):
        self.number, self.user, self.name = number, FIRST_USER + number, NAMES[number]
        self.space = stack.enter_context(Namespace())
        bridge.join(self.space, self.name, f"10.233.2.{number}")
        self.space.run("ethtool", "-K", "eth0", "tx", "off")
        self.folder = folder / self.name
        self.folder.mkdir()
        own = self.folder / "keys"
        own.mkdir(mode=0o700)
        for file in ("ca.pem", f"{self.name}.pem", f"{self.name}.key"):
            shutil.copy(keys / file, own)
        for path in (self.folder, own, *own.iterdir()):
            os.chown(path, self.user, self.user)
        # What such a user has: no capability, and no way to one.
        self.words = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all",
                      "--no-new-privs", "--pdeathsig=KILL"]
        self.fabric = stack.enter_context(Fabric(self.folder, text(number), netns=self.space, prefix=self.words))
        peers = [word for n, name in NAMES.items() if n != number for word in ("--peer", f"{name}=10.233.2.{n}:{PORT}")]
        self.span = Process([*self.words, SPAN, "--fabric", self.fabric.name, "--machine", self.name, "--listen", f"10.233.2.{number}:{PORT}",
                             "--keys", own, *peers], name=f"tombolo-span of {self.name}", netns=self.space, env=self.fabric.env, cwd=self.folder)
        stack.callback(self.span.kill)

    def remotes(self):
        _, answer = self.fabric.ask("GET", "/v1/networks/lan/remotes")
        return {machine["machine"]: {ip for member in machine["members"] for ip in member["ips"]} for machine in answer["machines"]}

    def pings(self, other):
        """Whether the other machine's cell answers this machine's probe."""
        target = f"10.87.0.{10 + other.number}"
        with StreamPeer(self.fabric.runtime / f"probe-{self.number}.sock", f"02:00:00:00:ee:0{self.number}") as probe:
            mac = probe.arp(target, f"10.87.0.{20 + self.number}", seconds=5)
            if mac is None:
                return False
            body = struct.pack("!BBHHH", 8, 0, 0, 7, other.number) + bytes(40)
            body = body[:2] + struct.pack("!H", checksum(body)) + body[4:]
            head = struct.pack("!BBHHHBBH4B4B", 0x45, 0, 20 + len(body), 1, 0, 64, 1, 0, 10, 87, 0, 20 + self.number, *map(int, target.split(".")))
            head = head[:10] + struct.pack("!H", checksum(head)) + head[12:]
            own = f"10.87.0.{20 + self.number}"

            def is_reply(frame):
                if frame[12:14] == b"\x08\x06" and frame[20:22] == b"\0\1" and frame[38:42] == socket.inet_aton(own):
                    # The cell asks for the probe's address, as any machine would.
                    answer = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 2) + probe.mac + socket.inet_aton(own) + frame[22:32]
                    probe.send(probe.frame(frame[6:12].hex(":"), 0x0806, answer))
                return frame[6:12] == mac_bytes(mac) and frame[12:14] == b"\x08\x00" and frame[23] == 1 and frame[34] == 0

            for _ in range(3):
                probe.send(probe.frame(mac, 0x0800, head + body))
                if probe.listen(is_reply, 2):
                    return True
            return False

    def processes(self):
        """All processes of this machine's user."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and entry.stat().st_uid == self.user:
                    found.append(int(entry.name))
        return found


def status(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.split() for key, _, value in (line.partition(":") for line in lines)}


@timeout(400)
def test_three_machines_of_three_users_without_privileges_are_one_network():
    need_root()
    need_program("setpriv")
    need_program("ethtool")
    if not SPAN.exists():
        raise Skip(f"{SPAN} is not built: run ./x span-program")
    with scratch() as folder, contextlib.ExitStack() as stack:
        folder.chmod(0o711)
        for program in (PROGRAM, SPAN):
            done = subprocess.run(["setpriv", f"--reuid={FIRST_USER}", "--clear-groups", program, "--version"], capture_output=True, text=True)
            if done.returncode:
                raise Skip(f"other users cannot run {program}: {done.stderr.strip()}")
        bridge = stack.enter_context(Bridge())
        keys = folder / "all-keys"
        subprocess.run([PROGRAM, "service", "keys", "--keys", keys, *NAMES.values()], check=True, capture_output=True)
        machines = [Machine(stack, folder, bridge, keys, number) for number in NAMES]
        for machine in machines:
            others = [other for other in machines if other is not machine]
            for other in others:
                until(f"{machine.name} to know the cell of {other.name}", lambda m=machine, o=other: f"10.87.0.{10 + o.number}" in m.remotes().get(o.name, ()),
                      PATIENCE_S, every=0.5)
                until(f"{machine.name} reaches the cell of {other.name}", lambda m=machine, o=other: m.pings(o), PATIENCE_S)
        for machine in machines:
            pids = [json.loads(machine.fabric.cli("status", "--json").stdout)["pid"], machine.span.pid, *machine.fabric.machine_pids()]
            assert len(pids) == 3, pids
            for pid in pids:
                found = status(pid)
                assert set(found["Uid"]) == {str(machine.user)}, (pid, found["Name"], found["Uid"])
                assert int(found["CapEff"][0], 16) == int(found["CapBnd"][0], 16) == 0 and found["NoNewPrivs"] == ["1"], (pid, found["Name"])
            assert machine.fabric.port("span")["details"]["arp_answers"] >= 1
        # A user has neither the keys nor the daemon of another one. The owner has both, by the same commands.
        first, second = machines[:2]
        env = {**os.environ, **first.fabric.env}
        for command, what, refusal in ((["cat", first.folder / "keys/a.key"], "PRIVATE KEY", "Permission denied"),
                                       ([PROGRAM, "status", "--fabric", first.fabric.name], first.fabric.name, "no permission")):
            own, other = (subprocess.run([*user.words, *command], env=env, capture_output=True, text=True, check=False) for user in (first, second))
            assert own.returncode == 0 and what in own.stdout, own
            assert other.returncode != 0 and refusal in other.stderr and not other.stdout, other
        for machine in machines:
            machine.span.stop()
            machine.fabric.down()
            until(f"no process of {machine.name}", lambda m=machine: not m.processes(), PATIENCE_S)
            assert not machine.fabric.runtime.exists() or not list(machine.fabric.runtime.iterdir()), list(machine.fabric.runtime.iterdir())
        assert not children(os.getpid(), "tombolo"), "nothing is left"
