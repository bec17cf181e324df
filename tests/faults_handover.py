"""One daemon takes over from another while traffic flows: nothing is lost, and the largest gap is measured at each attachment.

`./x handover [N]` hands over N times in a row (100 by default). The tests here do the same a few times.
"""

import contextlib
import hashlib
import json
import os
import re
import signal
import socket as sockets
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from lib import Fabric, Namespace, Process, http_get, need_program, need_root, scratch, timeout, until
from lib.fabric import PROGRAM
from lib.frames import StreamPeer, mac_bytes
from lib.process import children

FILE = """
name = "{name}"
[network.lan]
subnet = "10.233.0.0/24"
uplink = "{uplink}"
[cell.web]
app = "httpd"
ip = "10.233.0.20"
accel = "tcg"
[cell.mem]
app = "httpd"
ip = "10.233.0.21"
accel = "tcg"
attach = "ivshmem"
[tap.host]
ip = "10.233.0.9"
[port.peer]
kind = "stream"
[[forward]]
listen = "127.0.0.1:8080"
to = "web:80"
"""
# No machine, so that a handover takes an instant.
BARE = """
name = "{name}"
[network.lan]
subnet = "10.233.0.0/24"
[port.peer]
kind = "stream"
"""
WEB, MEM, PEER = "10.233.0.20", "10.233.0.21", "10.233.0.30"
PEER_MAC = "02:00:00:00:aa:01"
PATIENCE_S = 120
# What a busy machine of two cores may add to a gap: the tests look for lost connections, `./x
# handover` measures.
BUSY_S = 3


def text(uplink="user"):
    return FILE.format(name=f"h{os.getpid()}", uplink=uplink)


class Pings:
    """Echo requests at a steady pace from the namespace, and when each answer came."""

    def __init__(self, space, address, log, interval_s=0.002):
        self.log = open(log, "w+")
        command = ["ip", "netns", "exec", str(space), "ping", "-D", "-n", "-i", str(interval_s), address]
        self.popen = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.popen.kill()
        self.popen.wait()
        self.log.close()

    def end(self):
        """(largest gap between two answers in seconds, answers, requests)"""
        self.popen.send_signal(signal.SIGINT)
        self.popen.wait()
        self.log.seek(0)
        out = self.log.read()
        times = [float(at) for at in re.findall(r"^\[([0-9.]+)\] .*icmp_seq=", out, re.M)]
        sent = int(re.search(r"(\d+) packets transmitted", out)[1])
        return max(b - a for a, b in zip(times, times[1:])), len(times), sent


def echo_request(to_mac, own_mac, own, to, number):
    """An ICMP echo request in a frame; its checksums are right."""
    def checksum(data):
        total = sum(struct.unpack(f"!{len(data) // 2}H", data))
        total = (total >> 16) + (total & 0xFFFF)
        return ~(total + (total >> 16)) & 0xFFFF

    address = lambda text: bytes(map(int, text.split(".")))  # noqa: E731
    body = struct.pack("!BBHHH", 8, 0, 0, 7, number & 0xFFFF) + bytes(32)
    body = body[:2] + struct.pack("!H", checksum(body)) + body[4:]
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 0, 0, 64, 1, 0, address(own), address(to))
    head = head[:10] + struct.pack("!H", checksum(head)) + head[12:]
    return mac_bytes(to_mac) + mac_bytes(own_mac) + b"\x08\x00" + head + body


class StreamPings(threading.Thread):
    """The same from a peer of a stream port, in which one lost or doubled byte would end all answers."""

    def __init__(self, path, interval_s=0.002):
        super().__init__(daemon=True)
        self.peer, self.interval_s = StreamPeer(path, PEER_MAC), interval_s
        self.mac = self.peer.arp(WEB, own=PEER)
        assert self.mac, "no answer to ARP over the stream"
        self.times, self.sent, self.stop, self.error = [], 0, threading.Event(), None
        self.start()

    def run(self):
        due = time.monotonic()
        try:
            while not self.stop.is_set():
                now = time.monotonic()
                if now >= due:
                    self.peer.send(echo_request(self.mac, PEER_MAC, PEER, WEB, self.sent))
                    self.sent += 1
                    due = max(due + self.interval_s, now)
                frame = self.peer._next(max(due - time.monotonic(), 0.0005))
                if frame and frame[12:14] == b"\x08\x00" and frame[23] == 1 and frame[34] == 0:
                    self.times.append(time.monotonic())
                elif frame and frame[12:14] == b"\x08\x06" and frame[20:22] == b"\x00\x01" and frame[38:42] == bytes([10, 233, 0, 30]):
                    own, who = mac_bytes(PEER_MAC), frame[22:28]
                    self.peer.send(who + own + b"\x08\x06\x00\x01\x08\x00\x06\x04\x00\x02" + own + frame[38:42] + who + frame[28:32])
        except (OSError, EOFError) as error:
            self.error = error

    def end(self):
        self.stop.set()
        self.join(30)
        assert self.error is None, self.error
        return max(b - a for a, b in zip(self.times, self.times[1:])), len(self.times), self.sent


@contextlib.contextmanager
def place():
    need_root()
    need_program("passt")
    with Namespace() as space, scratch() as folder:
        space.way_out()
        yield space, folder


def all_well(space):
    for address in (WEB, MEM):
        until(f"a ping to {address}", lambda a=address: space.pings(a), PATIENCE_S)


def facts(fabric):
    status = fabric.status()
    return {machine["name"]: machine["pid"] for machine in status["machines"]}


class Download(threading.Thread):
    """One TCP connection whose bytes are checked."""

    def __init__(self, space, host, port, size, digest):
        super().__init__(daemon=True)
        self.args, self.digest, self.error = (space, host, port, size), digest, None
        self.start()

    def run(self):
        space, host, port, size = self.args
        try:
            reply = http_get(host, f"/bytes/{size}", port=port, seconds=60, netns=space)
            if hashlib.sha256(reply.body).hexdigest() != self.digest:
                self.error = f"{len(reply.body)} bytes of {host}:{port} are not those that were sent"
        except (OSError, ValueError) as error:
            self.error = error


def hand_over(space, fabric, folder, rounds, size=20_000_000):
    """Hands over so many times under traffic; gives the largest gap of each attachment in each round, in seconds."""
    [digest] = {hashlib.sha256(http_get(h, f"/bytes/{size}", netns=space, seconds=PATIENCE_S).body).hexdigest() for h in (WEB, MEM)}
    before = facts(fabric)
    [passt] = children(fabric.process.pid, "passt")
    socket = fabric.folder / "run" / fabric.name / "peer.sock"
    stream = StreamPings(socket)
    gaps = []
    loads = [Download(space, host, port, size, digest) for host, port in ((WEB, 80), (MEM, 80), ("127.0.0.1", 8080))]
    done = 0
    try:
        for number in range(rounds):
            for at, load in enumerate(loads):
                if not load.is_alive():
                    assert load.error is None, f"round {number}: {load.args[1:3]}: {load.error}"
                    loads[at], done = Download(*load.args, digest), done + 1
            with Pings(space, WEB, folder / "web.log") as web, Pings(space, MEM, folder / "mem.log") as mem:
                since = len(stream.times)
                until("answers", lambda s=since: len(stream.times) > s + 20, PATIENCE_S)
                fabric.replace(PATIENCE_S)
                since = len(stream.times)
                until("answers with the next daemon", lambda s=since: len(stream.times) > s + 20, PATIENCE_S)
                times = stream.times[max(since - 400, 0):]
                row = {"vhost_user": web.end(), "ivshmem": mem.end(), "stream": (max(b - a for a, b in zip(times, times[1:])), 0, 0)}
            gaps.append({kind: gap for kind, (gap, _, _) in row.items()})
            print(f"round {number}: " + ", ".join(f"{kind} {1000 * gap:.1f} ms" for kind, gap in gaps[-1].items()), flush=True)
            assert stream.error is None, stream.error
        for load in loads:
            load.join(PATIENCE_S)
            assert not load.is_alive() and load.error is None, f"{load.args[1:3]}: {load.error}"
    finally:
        stream.stop.set()
    stream.end()
    after = fabric.status()
    assert facts(fabric) == before, "the machines run on"
    assert Path(f"/proc/{passt}").exists(), "passt runs on"
    assert [port["counters"]["faults"] for port in after["ports"]] == [0] * len(after["ports"]), after["warnings"]
    return gaps, done + len(loads)


@timeout(600)
def test_a_daemon_is_replaced_under_traffic():
    with place() as (space, folder), Fabric(folder, text(), netns=space) as fabric:
        all_well(space)
        gaps, _ = hand_over(space, fabric, folder, 20)
        assert all(gap < BUSY_S for row in gaps for gap in row.values()), gaps
        fabric.down()


@timeout(600)
def test_a_daemon_goes_on_where_the_next_one_cannot_stand():
    """A file that is wrong, one that asks for what cannot be, and a process that says it takes over and dies."""
    with place() as (space, folder), Fabric(folder, text(), netns=space) as fabric:
        all_well(space)
        before, pid = facts(fabric), fabric.process.pid
        broken = folder / "broken.toml"
        broken.write_text(fabric.file.read_text().replace('app = "httpd"', 'app = "nothing-of-that-name"'))
        done = fabric.cli("up", "--replace", broken, check=False)
        assert done.returncode != 0 and fabric.process.alive(), done.stderr
        path = fabric.folder / "run" / fabric.name / "handover.sock"
        for words in (b"tombolo handover 1\n", b"tombolo handover 99\n", b"\n"):
            with sockets.socket(sockets.AF_UNIX) as asks:
                asks.connect(str(path))
                asks.sendall(words)
                asks.settimeout(60)
                answer = asks.recv(4096)
                assert (answer == b"ready\n") == words.endswith(b" 1\n"), answer
        all_well(space)
        assert facts(fabric) == before and fabric.process.alive() and fabric.process.pid == pid
        # It hands over all the same to one that means it.
        fabric.replace(PATIENCE_S)
        all_well(space)
        assert facts(fabric) == before
        fabric.down()


@timeout(600)
def test_a_daemon_leaves_and_the_next_one_goes_on():
    """What a service manager's restart does: SIGUSR2, the end of the process, and `up`."""
    with place() as (space, folder), Fabric(folder, text(), netns=space) as fabric:
        all_well(space)
        before = facts(fabric)
        [passt] = children(fabric.process.pid, "passt")
        for _ in range(2):
            with Pings(space, WEB, folder / "web.log") as web:
                fabric.process.signal(signal.SIGUSR2)
                assert fabric.process.wait(PATIENCE_S) == 0
                fabric.start()
                all_well(space)
                gap, _, _ = web.end()
            print(f"{1000 * gap:.1f} ms")
            assert facts(fabric) == before and Path(f"/proc/{passt}").exists()
        fabric.down()


@timeout(600)
def test_vhost_user_guests_go_on_after_a_crash_without_connecting_again():
    with place() as (space, folder), Fabric(folder, text(), netns=space) as fabric:
        all_well(space)
        before = facts(fabric)
        for _ in range(2):
            fabric.kill()
            fabric.start()
            # QEMU tries once a second; the port is up when the daemon stands, since its connection
            # never ended.
            assert fabric.port("web")["up"], fabric.port("web")
            all_well(space)
            assert facts(fabric) == before
            assert fabric.port("web")["counters"]["faults"] == 0
        fabric.down()


CHANGED = """
name = "{name}"
[network.lan]
subnet = "10.233.0.0/24"
[cell.web]
app = "httpd"
ip = "10.233.0.20"
accel = "tcg"
[tap.host]
ip = "10.233.0.9"
[port.peer]
kind = "stream"
"""


@contextlib.contextmanager
def small():
    """A fabric without a user uplink, whose cell answers."""
    need_root()
    with Namespace() as space, scratch() as folder:
        with Fabric(folder, CHANGED.format(name=f"c{os.getpid()}"), netns=space) as fabric:
            until("a ping", lambda: space.pings(WEB), PATIENCE_S)
            yield space, folder, fabric


def tap_number(space):
    shown = subprocess.run(["ip", "-n", str(space), "-j", "address"], capture_output=True, text=True, check=True).stdout
    [number] = [link["ifindex"] for link in json.loads(shown) if any(a["local"] == "10.233.0.9" for a in link["addr_info"])]
    return number


@timeout(300)
def test_a_changed_file_that_a_handover_cannot_carry_out_is_refused():
    """The new daemon says which section, and the old one goes on as if nothing had been asked."""
    with small() as (space, folder, fabric):
        before, daemon, tap = facts(fabric), fabric.process.pid, tap_number(space)
        good = fabric.file.read_text()
        other = folder / "tombolo.toml"
        for change, told in (
            (good.replace("10.233.0.9", "10.233.0.8"), "[tap.host] expected ip = 10.233.0.9/24"),
            (good.replace("[tap.host]", '[tap.host]\nmac = "02:00:00:00:00:99"'), "[tap.host] expected mac = "),
            (good.replace("[tap.host]", "[tap.host]\naccept_ra = true"), "[tap.host] expected accept_ra = false"),
            (good.replace('/24"', '/24"\nmtu = 1400'), "[tap.host] expected mtu = 1500"),
            (good.replace("10.233.0.0/24", "10.233.0.0/25"), "[network.lan] expected subnet = 10.233.0.0/24"),
            (good + '[tap.more]\ndevice = "lo"\n', "expected no interface lo"),
            (good + '[port.more]\nkind = "packet"\ndevice = "absent0"\n', "absent0"),
        ):
            other.write_text(change)
            done = fabric.cli("up", "--replace", other, check=False)
            assert done.returncode != 0 and told in done.stderr, (told, done.stderr)
            assert fabric.status()["pid"] == daemon and facts(fabric) == before and tap_number(space) == tap
        assert space.pings(WEB)
        # What a handover can do it does.
        other.write_text(good + '[tap.more]\nip = "10.233.0.7"\n')
        fabric.replace(PATIENCE_S)
        assert facts(fabric) == before and tap_number(space) == tap
        until("a ping", lambda: space.pings(WEB), PATIENCE_S)
        fabric.down()


@timeout(300)
def test_a_failure_after_the_handover_leaves_everything_to_the_next_up():
    """A socket's place is a directory, which shows only when the port is opened: the old daemon has ended by then."""
    with small() as (space, folder, fabric):
        before, tap = facts(fabric), tap_number(space)
        good = fabric.file.read_text()
        (folder / "taken").mkdir()
        fabric.file.write_text(good + f'[port.more]\nkind = "stream"\nsocket = "{folder}/taken"\n')
        old = fabric.process
        for words in (["up", "--replace"], ["up"]):
            done = fabric.cli(*words, fabric.file, check=False)
            assert done.returncode != 0 and "port more" in done.stderr and "`tombolo up`" in done.stderr, done.stderr
            assert old.wait(PATIENCE_S) == 0
            assert all(Path(f"/proc/{pid}").exists() for pid in before.values()), "the machines run on"
            assert tap_number(space) == tap, "the tap is kept"
        fabric.file.write_text(good)
        fabric.start()
        assert facts(fabric) == before and tap_number(space) == tap
        until("a ping", lambda: space.pings(WEB), PATIENCE_S)
        assert fabric.port("web")["counters"]["faults"] == 0
        fabric.down()


@timeout(300)
def test_a_signal_before_the_handover_calls_it_off():
    with small() as (space, folder, fabric):
        before, old = facts(fabric), fabric.process
        for number in (signal.SIGINT, signal.SIGTERM):
            # The daemon that is asked does not answer.
            old.signal(signal.SIGSTOP)
            new = Process([PROGRAM, "up", "--replace", fabric.file], name="new", netns=space, env=fabric.env, cwd=folder)
            time.sleep(1)
            begun = time.monotonic()
            new.signal(number)
            assert new.wait(PATIENCE_S) != 0
            assert time.monotonic() - begun < 5, "it ends at once"
            new.wait_line(lambda line: "interrupted before it took over" in line)
            old.signal(signal.SIGCONT)
            until("a ping", lambda: space.pings(WEB), PATIENCE_S)
            assert old.alive() and facts(fabric) == before and fabric.status()["pid"] == old.pid
        fabric.replace(PATIENCE_S)
        assert facts(fabric) == before
        fabric.down()


@timeout(300)
def test_a_new_daemon_without_a_place_for_its_api_leaves_the_guests_to_the_next():
    with small() as (space, folder, fabric):
        before = facts(fabric)
        api = folder / "run" / fabric.name / "api.sock"
        api.unlink()
        api.mkdir()
        done = fabric.cli("up", "--replace", "-d", fabric.file, check=False)
        assert done.returncode != 0 and "the guests run on" in done.stderr, done.stderr
        fabric.process.wait(PATIENCE_S)
        assert [pid for pid in before.values() if not Path(f"/proc/{pid}").exists()] == []
        api.rmdir()
        fabric.start()
        until("a ping", lambda: space.pings(WEB), PATIENCE_S)
        assert facts(fabric) == before
        fabric.down()


@timeout(300)
def test_an_fd_store_that_hangs_is_replaced_by_the_daemon_that_hands_over():
    with small() as (space, folder, fabric):
        before = facts(fabric)
        [store] = [pid for pid in children(fabric.process.pid) if b"keeper" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(store, signal.SIGSTOP)
        fabric.replace(PATIENCE_S)
        until("a ping", lambda: space.pings(WEB), PATIENCE_S)
        assert facts(fabric) == before and not Path(f"/proc/{store}").exists()
        fabric.down()


@timeout(300)
def test_a_silent_handover_request_blocks_no_one():
    """`status` is answered while a peer of handover.sock is silent, and while one that was told "ready" does not decide."""
    with small() as (space, folder, fabric):
        before, daemon = facts(fabric), fabric.process.pid
        path = fabric.folder / "run" / fabric.name / "handover.sock"

        def answers_while_asked(words):
            """Whether `status` came while the daemon still waited for this peer, which a busy machine may be too slow for."""
            with sockets.socket(sockets.AF_UNIX) as asks:
                asks.connect(str(path))
                asks.settimeout(60)
                if words:
                    asks.sendall(words)
                    assert asks.recv(4096) == b"ready\n"
                assert fabric.status()["pid"] == daemon
                asks.setblocking(False)
                try:
                    return asks.recv(1) != b""
                except BlockingIOError:
                    return True

        for words in (b"", b"tombolo handover 1\n"):
            until(f"an answer beside {words!r}", lambda w=words: answers_while_asked(w), PATIENCE_S)
        until("a ping", lambda: space.pings(WEB), PATIENCE_S)
        assert facts(fabric) == before
        # More than there are places for.
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(sockets.socket(sockets.AF_UNIX)).connect(str(path))
            fabric.replace(PATIENCE_S)
        assert facts(fabric) == before
        fabric.down()


@timeout(600)
def test_commands_beside_a_handover_are_answered():
    """`status` is asked all the time while one daemon follows another, and `down` at such a moment: none of them fails."""
    with scratch() as folder, Namespace() as space, Fabric(folder, BARE.format(name=f"c{os.getpid()}"), netns=space) as fabric:
        over, failed, asked = threading.Event(), [], [0, 0]

        def ask(n):
            while not over.is_set():
                done = fabric.cli("status", check=False, seconds=PATIENCE_S)
                asked[n] += 1
                if done.returncode:
                    failed.append(done.stderr)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(asked))]
        for thread in threads:
            thread.start()
        try:
            for _ in range(12):
                fabric.cli("up", "--replace", "-d", fabric.file, seconds=PATIENCE_S)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert not failed, f"{len(failed)} of {sum(asked)} failed: {failed[0]}"
        # Each waits for the daemon that comes, where it asks between two.
        assert min(asked) >= 4, asked
        # A handover that loses the race finds no daemon to take over from.
        replaces = threading.Thread(target=lambda: fabric.cli("up", "--replace", "-d", fabric.file, check=False, seconds=PATIENCE_S))
        replaces.start()
        done = fabric.cli("down", "--fabric", fabric.name, check=False, seconds=PATIENCE_S)
        replaces.join()
        assert done.returncode == 0, done.stderr
        # It may have been over before the other began.
        fabric.cli("down", "--fabric", fabric.name, check=False, seconds=PATIENCE_S)


@timeout(600)
def test_a_daemon_with_a_kernel_uplink_is_replaced_under_traffic():
    """The tap, the rules and the connections through them go on, and `down` by the last daemon takes all of it back."""
    need_program("nft")
    with place() as (space, folder):
        forwarding = lambda: space.run("cat", "/proc/sys/net/ipv4/ip_forward").stdout  # noqa: E731
        before = forwarding()
        without = text("kernel").replace('ip = "10.233.0.9"\n', "")
        with Fabric(folder, without, netns=space) as fabric:
            all_well(space)
            machines, rules, tap = facts(fabric), space.run("nft", "list", "ruleset").stdout, uplink_number(space, fabric)
            size = 20_000_000
            digest = hashlib.sha256(http_get(WEB, f"/bytes/{size}", netns=space, seconds=PATIENCE_S).body).hexdigest()
            for _ in range(3):
                loads = [Download(space, host, port, size, digest) for host, port in ((WEB, 80), ("127.0.0.1", 8080))]
                with Pings(space, WEB, folder / "web.log") as web:
                    fabric.replace(PATIENCE_S)
                    all_well(space)
                    gap, _, _ = web.end()
                for load in loads:
                    load.join(PATIENCE_S)
                    assert not load.is_alive() and load.error is None, load.error
                print(f"{1000 * gap:.1f} ms")
                assert gap < BUSY_S
                assert facts(fabric) == machines and uplink_number(space, fabric) == tap
                after = space.run("nft", "list", "ruleset").stdout
                assert [after.count(word) for word in ("masquerade", "dport 8080")] == [rules.count(word) for word in ("masquerade", "dport 8080")]
                assert forwarding() == "1\n"
            # The kernel's device keeps what it has.
            good = fabric.file.read_text()
            fabric.file.write_text(good.replace('uplink = "kernel"', 'uplink = "kernel"\nmtu = 1400'))
            done = fabric.cli("up", "--replace", fabric.file, check=False)
            assert done.returncode != 0 and "[network.lan] expected mtu = 1500" in done.stderr, done.stderr
            fabric.file.write_text(good)
            all_well(space)
            fabric.down()
            assert forwarding() == before and "tombolo" not in space.run("nft", "list", "tables").stdout


def uplink_number(space, fabric):
    [number] = [link["ifindex"] for link in json.loads(space.run("ip", "-j", "link").stdout) if link["ifname"] == f"tb-{fabric.name}-lan"]
    return number


# Asks at each socket that is for the owner, and says what it was told.
PROBE = """
import pathlib, socket, sys
run = pathlib.Path(sys.argv[1])

def ask(name, kind, words):
    with socket.socket(socket.AF_UNIX, kind) as to:
        to.settimeout(60)
        try:
            to.connect(str(run / name))
            to.send(words)
            return to.recv(4096)
        except (BrokenPipeError, ConnectionResetError):
            return b""

print(ask("api.sock", socket.SOCK_STREAM, b"GET /v1/status HTTP/1.1\\r\\nHost: t\\r\\n\\r\\n")[:12].decode())
print(ask("keeper.sock", socket.SOCK_SEQPACKET, bytes([3, 0, 0, 0]))[:1].hex())
print(ask("handover.sock", socket.SOCK_STREAM, b"tombolo handover 1\\n").decode().strip())
"""


@timeout(300)
def test_a_machine_may_not_use_the_sockets_that_are_for_the_owner():
    """A program that the fabric's machine starts is refused by the API, the fd store and the handover; the owner's is not."""
    with scratch() as tools:
        probe, go, said, script = tools / "probe.py", tools / "go", tools / "said", tools / "qemu"
        probe.write_text(PROBE)
        script.write_text(
            f"""#!/bin/sh
case "$*" in *tombolo/*)
    run=$(dirname "$(echo "$*" | grep -o '[^ =:,]*/web[.]qmp' | head -n 1)")
    (until [ -e {go} ] || [ ! -d {tools} ]; do sleep 0.05; done
     {sys.executable} {probe} "$run" > {said}.part 2>&1; mv {said}.part {said}) </dev/null >/dev/null 2>&1 &
esac
exec qemu-system-x86_64 "$@"
"""
        )
        script.chmod(0o755)
        os.environ["TOMBOLO_QEMU"] = str(script)
        with small() as (space, _, fabric):
            run = fabric.folder / "run" / fabric.name
            go.touch()
            until("what the machine was told", said.exists, PATIENCE_S)
            assert said.read_text().split("\n")[:3] == ["HTTP/1.1 403", "", ""], said.read_text()
            done = subprocess.run([sys.executable, probe, run], capture_output=True, text=True, check=True)
            assert done.stdout.split("\n")[:3] == ["HTTP/1.1 200", "05", "ready"], done.stdout
            fabric.down()


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with place() as (space, folder), Fabric(folder, text(), netns=space) as fabric:
        all_well(space)
        gaps, downloads = hand_over(space, fabric, folder, rounds)
        fabric.down()
    out = {"bench": "handover", "rounds": rounds, "lost": 0, "downloads_checked": downloads}
    for name, of in (("upgrade_gap_ms", max), ("median_gap_ms", lambda values: sorted(values)[len(values) // 2])):
        out[name] = {kind: round(1000 * of([row[kind] for row in gaps]), 1) for kind in gaps[0]}
    print(json.dumps(out))


if __name__ == "__main__":
    main()
