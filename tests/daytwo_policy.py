"""Rules, isolation and mirrors between real network stacks: taps of one fabric, each in a namespace of its own."""

import contextlib
import json
import subprocess
import sys

from lib import Fabric, Namespace, Process, need_root, scratch, timeout, until

NAMES = ("web", "app", "db", "ids")
ADDRESS = {name: f"10.234.0.{11 + n}" for n, name in enumerate(NAMES)}
ADDRESS6 = {name: f"fd00:234::{11 + n}" for n, name in enumerate(NAMES)}

HEAD = """
name = "policy"
[network.lan]
subnet = "10.234.0.0/24"
policy = "{policy}"
"""
RULES = """
[[rule]]
action = "allow"
from = "front"
to = "db"
protocol = "tcp"
ports = [5432, "6000-6010"]
[[rule]]
action = "allow"
protocol = "icmp"
from = "web"
"""

# Answers every connection with what it got, until it is ended.
SERVER = """
import selectors, socket, sys
waits = selectors.DefaultSelector()
for family in (socket.AF_INET, socket.AF_INET6):
    for port in map(int, sys.argv[1:]):
        listener = socket.create_server(("", port), family=family)
        waits.register(listener, selectors.EVENT_READ, True)
print("listening", flush=True)
while True:
    for key, _ in waits.select():
        if key.data:
            waits.register(key.fileobj.accept()[0], selectors.EVENT_READ, False)
            continue
        try:
            data = key.fileobj.recv(65536)
            key.fileobj.sendall(data)
        except OSError:
            data = b""
        if not data:
            waits.unregister(key.fileobj)
            key.fileobj.close()
"""

# One line "open" once connected; then every line that is read goes there and back, or ends it with
# "lost".
CLIENT = """
import socket, sys
try:
    peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3]))
except OSError:
    sys.exit("refused")
print("open", flush=True)
for line in sys.stdin:
    try:
        peer.sendall(line.encode())
        assert peer.recv(65536).decode() == line
    except OSError:
        sys.exit("lost")
    print("echoed", flush=True)
"""

# Prints the ends of every TCP segment over IPv4 that comes in at an interface.
WATCH = """
import socket, struct, sys
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
raw.bind((sys.argv[1], 0))
print("watching", flush=True)
while True:
    frame, (_, _, kind, *_) = raw.recvfrom(65536)
    if kind != socket.PACKET_OUTGOING and frame[12:15] == b"\\x08\\x00\\x45" and frame[23] == 6:
        source, target = struct.unpack("!HH", frame[34:38])
        print(socket.inet_ntoa(frame[26:30]), source, socket.inet_ntoa(frame[30:34]), target, flush=True)
"""

# Sends datagrams of 1000 bytes to an address for some seconds, every 0.8 ms (10 Mbit/s), with a
# DSCP; prints how many.
SENDER = """
import socket, sys, time
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
out.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, int(sys.argv[3]) << 2)
begin, sent = time.monotonic(), 0
while (now := time.monotonic() - begin) < float(sys.argv[4]):
    while sent < now / 0.0008:
        out.sendto(bytes(1000), (sys.argv[1], int(sys.argv[2])))
        sent += 1
    time.sleep(0.0008)
print(sent)
"""

# Counts datagrams by port until a line is read; then prints the counts.
COUNTER = """
import select, socket, sys
inputs = {}
for port in map(int, sys.argv[1:]):
    heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    heard.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    heard.bind(("", port))
    inputs[heard] = [port, 0]
print("counting", flush=True)
while True:
    for ready in select.select([*inputs, sys.stdin], [], [])[0]:
        if ready is sys.stdin:
            print(*(count for _, count in inputs.values()))
            sys.exit()
        ready.recv(2000)
        inputs[ready][1] += 1
"""


def text(policy="allow", rules="", **keys):
    taps = [f'[tap.{name}]\nnetns = "/run/netns/{{{name}}}"\nip = "{ADDRESS[name]}"\nguard = "off"\n{keys.get(name, "")}\n' for name in NAMES]
    return HEAD.replace("{policy}", policy) + "".join(taps) + rules


@contextlib.contextmanager
def members(file_text):
    """The running fabric and the namespace of each member, with a server on ports 22, 5432 and 6005 in each."""
    need_root()
    with contextlib.ExitStack() as stack:
        spaces = {name: stack.enter_context(Namespace()) for name in NAMES}
        home = stack.enter_context(Namespace())
        folder = stack.enter_context(scratch())
        whole = file_text.format_map(spaces) if "{web}" in file_text else file_text
        fabric = stack.enter_context(Fabric(folder, whole, netns=home))
        for name, space in spaces.items():
            space.ip("address", "add", f"{ADDRESS6[name]}/64", "dev", name, "nodad")
            server = Process([sys.executable, "-c", SERVER, "22", "5432", "6005"], name=f"server-{name}", netns=space)
            stack.callback(server.kill)
            server.wait_line(lambda line: "listening" in line, 60)
        yield fabric, spaces


def connects(spaces, source, target, port, six=False, seconds=20):
    """Whether a TCP connection opens and carries data."""
    address = (ADDRESS6 if six else ADDRESS)[target]
    done = subprocess.run(["ip", "netns", "exec", str(spaces[source]), sys.executable, "-c", CLIENT, address, str(port), str(seconds)],
                          input="ping\n", capture_output=True, text=True, timeout=120)
    return "echoed" in done.stdout


def denied(fabric, source):
    drops = fabric.port(source)["counters"]["rx_drops"]
    return drops.get("denied", 0)


@timeout(300)
def test_only_what_a_rule_allows_passes_and_its_answers_do():
    fronts = {"web": 'groups = "front"', "app": 'groups = ["front", "back"]'}
    with members(text("deny", RULES, **fronts)) as (fabric, spaces):
        for six in (False, True):
            for source in ("web", "app"):
                assert connects(spaces, source, "db", 5432, six), f"{source} to db, {six}"
            assert connects(spaces, "web", "db", 6005, six)
            before = denied(fabric, "web"), denied(fabric, "db")
            assert not connects(spaces, "web", "db", 22, six, seconds=2)
            assert not connects(spaces, "db", "web", 22, six, seconds=2), "no answer goes that way, a new connection neither"
            assert denied(fabric, "web") > before[0] and denied(fabric, "db") > before[1]
        assert spaces["web"].answers(ADDRESS["db"]), "its echo, and the answer to it"
        assert not spaces["db"].pings(ADDRESS["web"], seconds=2)
        [network] = fabric.status()["networks"]
        counters = network["counters"]
        assert counters["rule_0"] >= 6 and counters["rule_1"] >= 1 and counters["rule_connections"] >= 6, counters


@timeout(300)
def test_rules_that_change_are_in_force_for_connections_that_exist():
    file_text = text("deny", RULES, web='groups = "front"')
    with members(file_text) as (fabric, spaces):
        client = subprocess.Popen(["ip", "netns", "exec", str(spaces["web"]), sys.executable, "-c", CLIENT, ADDRESS["db"], "5432", "15"],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert client.stdout.readline() == "open\n"

            def echoes():
                client.stdin.write("x\n")
                client.stdin.flush()
                return client.stdout.readline() == "echoed\n"

            assert echoes()
            fabric.file.write_text(file_text.format_map(spaces).replace('"6000-6010"', "6001"))
            report = json.loads(fabric.cli("apply", "--json").stdout)
            assert [change["section"] for change in report["changes"]] == ["policy"], report
            assert echoes(), "it is allowed as before"
            # The daemon knows nothing of the connection afterwards; the next frame of its opener
            # makes it known.
            fabric.process.kill()
            fabric.start()
            assert echoes(), "a daemon that was killed costs no connection"
            fabric.file.write_text(file_text.format_map(spaces).replace("5432, ", ""))
            fabric.cli("apply")
            assert not echoes(), "it is not allowed any more"
        finally:
            client.kill()
            client.communicate()
        assert connects(spaces, "web", "db", 6005)


@timeout(300)
def test_isolated_members_reach_the_others_and_their_community_only():
    keys = {"web": 'isolated = "a"', "app": 'isolated = "a"', "db": "isolated = true"}
    with members(text(**keys)) as (fabric, spaces):
        assert connects(spaces, "web", "app", 22) and connects(spaces, "app", "web", 22)
        for isolated in ("web", "app", "db"):
            assert connects(spaces, isolated, "ids", 22) and connects(spaces, "ids", isolated, 22)
        # Each knows the other's address, so that it is not only the question for it that is lost.
        for source, target in (("web", "db"), ("db", "web")):
            mac = json.loads(spaces[target].ip("-j", "link", "show", target))[0]["address"]
            spaces[source].ip("neigh", "replace", ADDRESS[target], "lladdr", mac, "dev", source)
        assert not connects(spaces, "web", "db", 22, seconds=2) and not connects(spaces, "db", "web", 22, seconds=2)
        assert fabric.port("web")["counters"]["rx_drops"]["isolated"] > 0


@timeout(300)
def test_a_mirror_sees_the_traffic_of_its_members():
    mirror = '[[mirror]]\nof = "web"\nto = "ids"\n'
    with members(text(rules=mirror)) as (fabric, spaces):
        watch = Process([sys.executable, "-c", WATCH, "ids"], name="watch", netns=spaces["ids"])
        try:
            watch.wait_line(lambda line: "watching" in line, 60)
            assert connects(spaces, "app", "db", 22)
            assert connects(spaces, "web", "db", 5432)
            watch.wait_line(lambda line: line.startswith(ADDRESS["web"]) and line.endswith(f"{ADDRESS['db']} 5432"), 60)
            watch.wait_line(lambda line: line.startswith(f"{ADDRESS['db']} 5432 {ADDRESS['web']}"), 60)
            assert ADDRESS["app"] not in watch.text, "that is the traffic of others"
        finally:
            watch.kill()
        # It gets no answers, since it may not even ask.
        assert not connects(spaces, "ids", "web", 22, seconds=2)
        until("the mirror's own frames to be dropped", lambda: fabric.port("ids")["counters"]["rx_drops"].get("mirror_port", 0) > 0)


@timeout(300)
def test_a_limit_of_a_class_holds_for_frames_that_are_marked_so_and_for_no_others():
    ef, seconds = 46, 3
    with members(text(web='class = "marked"\nrate = {{ send_urgent = "2M", send_urgent_burst = "20K" }}')) as (fabric, spaces):
        counter = subprocess.Popen(["ip", "netns", "exec", str(spaces["db"]), sys.executable, "-c", COUNTER, "7001", "7002"],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert counter.stdout.readline() == "counting\n"
            senders = [subprocess.Popen(["ip", "netns", "exec", str(spaces["web"]), sys.executable, "-c", SENDER, ADDRESS["db"], str(port), str(dscp),
                                         str(seconds)], stdout=subprocess.PIPE, text=True) for port, dscp in ((7001, ef), (7002, 0))]
            urgent, normal = (int(sender.communicate(timeout=60)[0]) for sender in senders)
            counted, _ = counter.communicate("end\n", timeout=60)
        finally:
            counter.kill()
            counter.wait()
        got_urgent, got_normal = map(int, counted.split())
        # 2 Mbit/s of frames of 1042 bytes, and the burst. A busy machine sends for longer than it
        # says.
        most = (2e6 * (seconds + 3) + 20_000) / 8 / 1042
        assert urgent > 2 * most and 0.5 * most / 2 < got_urgent <= most, (urgent, got_urgent, most)
        assert got_normal > 0.95 * normal, (normal, got_normal)
        drops = fabric.port("web")["counters"]["rx_drops"]
        assert sum(count for reason, count in drops.items() if "rate" in reason) >= 0.9 * (urgent - got_urgent), drops


TAKES = """
import socket, sys, time
listener = socket.create_server(("0.0.0.0", 5001))
print("listens", flush=True)
connection, _ = listener.accept()
start, count = time.monotonic(), 0
while data := connection.recv(1 << 20):
    count += len(data)
print(count, time.monotonic() - start, flush=True)
"""
GIVES = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5001)) as connection:
    end = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end:
        connection.sendall(bytes(1 << 16))
"""


@timeout(300)
def test_a_limit_of_what_a_member_receives_is_what_tcp_gets():
    seconds = 5
    for rate, burst in ((20e6, ""), (100e6, ""), (100e6, ", receive_burst = 1_000_000")):
        with members(text(db=f"rate = {{{{ receive = {int(rate)}{burst} }}}}")) as (fabric, spaces):
            takes = Process([sys.executable, "-c", TAKES], name="takes", netns=spaces["db"])
            try:
                takes.wait_line(lambda line: line == "listens", 60)
                spaces["web"].run(sys.executable, "-c", GIVES, ADDRESS["db"], str(seconds), seconds=120)
                count, took = map(float, takes.wait_line(lambda line: line[:1].isdigit(), 60)[1].split())
            finally:
                takes.kill()
            part = count * 8 / took / rate
            counters = fabric.port("db")["counters"]
            print(f"{rate / 1e6:.0f} Mbit/s{burst}: {part:.2f} of it, queued {counters['queued_frames']}, drops {counters['tx_drops']}")
            # Headers count too; the burst, and what waits at the end, come on top.
            assert 0.7 < part < 1.2, part
            assert counters["queued_frames"] > 0, counters
