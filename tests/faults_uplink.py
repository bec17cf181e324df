"""A passt that behaves badly: the watchdog replaces it, and counts why. A program of this file runs in passt's place, at the other end of the stream."""

import contextlib
import os
import signal
import socket
import struct
import sys
import threading
import time

from lib import Fabric, Namespace, need_root, scratch, timeout, until
from lib.frames import StreamPeer, mac_bytes
from lib.process import children

FILE = """
name = "{name}"
[network.lan]
subnet = "10.234.0.0/24"
uplink = "user"
[port.p]
kind = "stream"
mac = "02:00:00:00:00:07"
ip = "10.234.0.7"
"""

# It does what the file `mode` beside it says when it starts. Every frame has its length before it.
PROGRAM = '''#!{python}
import os, pathlib, select, socket, struct
mode = (pathlib.Path(__file__).parent / "mode").read_text()
stream = socket.socket(fileno=0)
MAC, buffer = bytes([2, 0, 0, 0, 0, 0xaa]), b""

def send(frame):
    stream.sendall(struct.pack("!I", len(frame)) + frame)

def frames():
    global buffer
    part = stream.recv(65536)
    if not part:
        raise SystemExit
    buffer += part
    while len(buffer) >= 4 and len(buffer) >= 4 + (size := struct.unpack("!I", buffer[:4])[0]):
        yield buffer[4:4 + size]
        buffer = buffer[4 + size:]

def answer(frame):
    """Its ARP answer, or the same segment again for each that came: a retransmission for each duplicate acknowledgement."""
    if frame[12:14] == b"\\x08\\x06" and frame[20:22] == b"\\0\\1":
        return frame[6:12] + MAC + frame[12:20] + b"\\0\\2" + MAC + frame[38:42] + frame[22:28] + frame[28:32]
    if frame[12:14] == b"\\x08\\0" and frame[23] == 6:
        return (frame[6:12] + MAC + frame[12:26] + frame[30:34] + frame[26:30] + frame[36:38] + frame[34:36] + frame[38:])
    return None

def segment(router, sequence):
    head = bytes([0x45, 0, 0, 40, 0, 1, 0, 0, 64, 6, 0, 0, 198, 51, 100, 7, 192, 0, 0, 2])
    return router + MAC + b"\\x08\\0" + head + struct.pack("!HHIIHHI", 80, 40000, sequence, 1, 0x5010, 256, 0)

router, sequence, repeated = None, 0, None
while router is None:
    for frame in frames():
        if reply := answer(frame):
            router = frame[6:12]
            send(reply)
(pathlib.Path(__file__).parent / "answered").touch()
if mode == "hangs":
    while True:
        os.getpid()
while True:
    if mode == "deaf":
        # What it sends is different each time, and is life to a reader that looks no further.
        sequence += 1
        send(segment(router, sequence))
        select.select([], [], [], 0.05)
        continue
    ready = select.select([stream], [], [], 0 if mode in ("tcp", "turn", "arp") or repeated else None)[0]
    for frame in frames() if ready else ():
        reply = answer(frame)
        if mode == "answered" and reply and reply[12:14] == b"\\x08\\0":
            repeated = repeated or reply
        elif reply:
            send(reply)
    if repeated:
        send(repeated)
    if mode == "tcp":
        send(segment(router, 1))
    elif mode == "turn":
        sequence += 1
        send(segment(router, 1 + sequence % 2))
    elif mode == "arp":
        send(router + MAC + bytes([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]) + MAC + bytes([192, 0, 0, 9]) + router + bytes([192, 0, 0, 2]))
'''


@contextlib.contextmanager
def uplink(mode):
    """A fabric whose passt behaves as `mode` says, and each one after it well."""
    need_root()
    with Namespace() as space, scratch() as folder:
        program = folder / "passt"
        program.write_text(PROGRAM.replace("{python}", sys.executable))
        program.chmod(0o755)
        (folder / "mode").write_text(mode)
        before = os.environ["PATH"]
        os.environ["PATH"] = f"{folder}:{before}"
        try:
            with Fabric(folder, FILE.format(name=f"dog{os.getpid()}"), netns=space) as fabric:
                until("its first answer", (folder / "answered").exists)
                [pid] = passts(fabric)
                (folder / "mode").write_text("good")
                yield fabric, pid
                fabric.down()
        finally:
            os.environ["PATH"] = before


def passts(fabric):
    """The processes in passt's place."""
    found = []
    for pid in children(fabric.process.pid):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if b"_TOMBOLO_HELPER=" in file.read():
                found.append(pid)
    return found


def counters(fabric):
    return fabric.status()["networks"][0]["counters"]


def replaced(fabric, pid, counter):
    begun = time.monotonic()
    until("another passt", lambda: passts(fabric) not in ([], [pid]))
    print(f"replaced after {time.monotonic() - begun:.1f} s")
    until("its count", lambda: counters(fabric)[counter] == 1)
    assert counters(fabric)["passt_restarts"] == 1, counters(fabric)
    other = "passt_hangs" if counter == "passt_storms" else "passt_storms"
    assert counters(fabric)[other] == 0, counters(fabric)
    fabric.process.wait_line(lambda line: "ended by the watchdog" in line)


@timeout(300)
def test_a_passt_that_storms_is_replaced_whatever_it_repeats():
    for mode in ("tcp", "turn", "arp"):
        with uplink(mode) as (fabric, pid):
            replaced(fabric, pid, "passt_storms")


@timeout(300)
def test_a_passt_that_spins_is_replaced():
    with uplink("hangs") as (fabric, pid):
        replaced(fabric, pid, "passt_hangs")


def ipv4(guest, router, protocol, body):
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 1, 0, 64, protocol, 0)
    ends = socket.inet_aton("10.234.0.7") + socket.inet_aton("198.51.100.7")
    total = sum(struct.unpack("!10H", head + ends))
    total = (total & 0xffff) + (total >> 16)
    total = ~((total & 0xffff) + (total >> 16)) & 0xffff
    return mac_bytes(router) + guest.mac + b"\x08\0" + head[:10] + struct.pack("!H", total) + ends + body


@contextlib.contextmanager
def guest(fabric):
    """A guest at the stream port, and its router's address."""
    path = fabric.folder / "run" / fabric.name / "p.sock"
    with StreamPeer(path, "02:00:00:00:00:07") as peer:
        router = peer.arp("10.234.0.2", own="10.234.0.7")
        assert router, "the router answers no ARP"
        yield peer, router


@timeout(300)
def test_a_passt_that_sends_and_never_reads_is_replaced():
    with uplink("deaf") as (fabric, pid), guest(fabric) as (peer, router):
        datagram = ipv4(peer, router, 17, struct.pack("!HHHH", 5000, 53, 1208, 0) + bytes(1200))
        # More than its socket holds.
        for _ in range(2000):
            peer.send(datagram)
        replaced(fabric, pid, "passt_hangs")


@contextlib.contextmanager
def answering(peer, frame=None):
    """A thread that reads what the guest gets, and sends `frame` for each; counts what came."""
    done, received = threading.Event(), [0]

    def read():
        rest = b""
        while not done.is_set():
            with contextlib.suppress(BlockingIOError, TimeoutError):
                rest += peer.socket.recv(1 << 20)
            while len(rest) >= 4 and len(rest) >= 4 + (length := int.from_bytes(rest[:4], "big")):
                rest = rest[4 + length:]
                received[0] += 1
                if frame:
                    peer.send(frame)

    reader = threading.Thread(target=read)
    peer.socket.settimeout(1)
    reader.start()
    try:
        yield received
    finally:
        done.set()
        reader.join()


def surplus(fabric):
    """Repeats of the uplink that were dropped."""
    [port] = [port for port in fabric.status()["ports"] if port["kind"] == "uplink"]
    return port["counters"]["rx_drops"].get("uplink_repeat", 0)


@timeout(300)
def test_a_storm_that_a_guest_answers_is_one():
    with uplink("answered") as (fabric, pid), guest(fabric) as (peer, router):
        def tcp(flags):
            return ipv4(peer, router, 6, struct.pack("!HHIIBBHHH", 5000, 80, 1, 1, 0x50, flags, 256, 0, 0))

        with answering(peer, tcp(0x10)) as received:
            peer.send(tcp(2))
            begun = time.monotonic()
            replaced(fabric, pid, "passt_storms")
        print(f"{received[0]} of the storm's frames answered in {time.monotonic() - begun:.1f} s, {surplus(fabric)} dropped")
        assert received[0] > 100 and surplus(fabric) > 5000


@timeout(300)
def test_a_guest_that_sends_duplicate_acknowledgements_ends_no_passt():
    with uplink("good") as (fabric, pid), guest(fabric) as (peer, router):
        def tcp(flags, sequence):
            return ipv4(peer, router, 6, struct.pack("!HHIIBBHHH", 5000, 80, sequence, 1, 0x50, flags, 256, 0, 0))

        peer.send(tcp(2, 1))
        assert peer.listen(lambda f: f[12:14] == b"\x08\0" and f[23] == 6), "the uplink answers"
        with answering(peer) as received:
            same, begun, sent = tcp(0x10, 2), time.monotonic(), 0
            # Many times what is a storm, for longer than the watchdog takes to look twice.
            while time.monotonic() - begun < 5 or sent < 40000:
                peer.send(same)
                sent += 1
        took = time.monotonic() - begun
        repeats, dropped = received[0], surplus(fabric)
        print(f"{repeats} repeats for {sent} acknowledgements in {took:.1f} s, {dropped} dropped")
        assert repeats + dropped > 10000, (repeats, dropped)
        assert repeats <= 1000 * (took + 3), "no more than 1000 a second"
        # It is still looked at, and found stopped.
        assert passts(fabric) == [pid] and counters(fabric)["passt_storms"] == 0, counters(fabric)
        os.kill(pid, signal.SIGSTOP)
        replaced(fabric, pid, "passt_hangs")
