"""`tombolo bypass capture`: frames of one flow or of a filter, with the path of each, read by tshark."""

import contextlib
import ctypes
import os
import signal
import struct
import subprocess
import time
from collections import namedtuple

from bypass_flows import MAP_LOOK_UP, OBJ_GET
from bypass_nat import NAT, answer, forward, source
from bypass_others import bpf
from bypass_paths import A, A6, B, B6, PROGRAM, Inside, host, is_ip
from lib import Namespace, need_program, until
from lib.machine import SLOW
from lib.tap import ETH_IP4, ETH_IP6, GSO_TCPV4, ICMP, NEEDS_CSUM, TCP, UDP, echo, ipv4, ipv6, transport, vnet_header

LONG = ("--lease", "10000")
SET_CAPTURE, SET_OBSERVED_NS = 5, 6  # tables.h, enum setting
FIELDS = ("frame.time_epoch", "frame.interface_name", "frame.packet_flags_direction", "frame.len", "frame.cap_len", "eth.src", "frame.protocols",
          "frame.comment")
Line = namedtuple("Line", "time interface incoming length kept mac protocols comment packet")


def setting(h, which):
    """A word that the programs look at."""
    path = ctypes.create_string_buffer(str(next((h.folder / "run/bypass/bpf").glob("*/map_settings"))).encode())
    fd = bpf(OBJ_GET, struct.pack("<QII", ctypes.addressof(path), 0, 0))
    try:
        key, value = ctypes.c_uint32(which), ctypes.c_uint64(0)
        bpf(MAP_LOOK_UP, struct.pack("<IIQQQ", fd, 0, ctypes.addressof(key), ctypes.addressof(value), 0))
        return value.value
    finally:
        os.close(fd)


def monotonic():
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Capture:
    """A running capture; `end` gives what tshark reads of its file."""

    def __init__(self, h, *words):
        self.h, self.path = h, h.folder / f"{time.monotonic_ns()}.pcapng"
        command = [str(PROGRAM), "bypass", "capture", "-w", str(self.path), *map(str, words), "--netns", str(h.space)]
        env = dict(os.environ, TOMBOLO_RUNTIME=str(h.folder / "run"))
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        until("the capture's start", lambda: self.process.poll() is not None or setting(h, SET_CAPTURE) >= monotonic() - 1)
        assert self.process.poll() is None, self.process.communicate()

    def end(self, how=signal.SIGINT, status=0):
        if how:
            self.process.send_signal(how)
        _, self.said = self.process.communicate(timeout=60 * SLOW)
        assert self.process.returncode == status, (self.process.returncode, self.said)
        return self.read()

    def tshark(self, *words):
        need_program("tshark")
        done = subprocess.run(["tshark", "-n", "-r", str(self.path), *words], capture_output=True, text=True, timeout=60 * SLOW)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def read(self):
        """Each frame, with its bytes behind the Ethernet header."""
        rows = self.tshark("-T", "fields", *(word for field in FIELDS for word in ("-e", field)))
        blocks = self.tshark("-x")
        packets, now = [], bytearray()
        for line in [*blocks, ""]:
            words = line[6:54].split()
            if words:
                now += bytes.fromhex("".join(words))
            elif now:
                packets.append(bytes(now))
                now = bytearray()
        assert len(packets) == len(rows), (len(packets), rows)
        lines = []
        for row, packet in zip(rows, packets):
            when, interface, direction, length, kept, mac, protocols, comment = row.split("\t")
            lines.append(Line(float(when), interface, int(direction, 16) == 1, int(length), int(kept), mac, protocols, comment, packet))
        assert [line.time for line in lines] == sorted(line.time for line in lines), "out of order"
        assert all(abs(line.time - time.time()) < 600 for line in lines)
        return lines


@contextlib.contextmanager
def capture(h, *words):
    """A capture and what it read, for use after the block."""
    running, lines = Capture(h, *words), []
    yield lines
    lines.extend(running.end())


def key(line):
    return line.comment.split(":")[0]


def ways(lines):
    return [(line.interface, line.incoming, key(line)) for line in lines]


def flow(mode, taken):
    """What is seen of a frame that the kernel forwards, and of those that are taken."""
    return [("ta", True, "up_no_flow"), ("tb", False, "kernel")] + [("ta", True, f"taken_{mode}"), ("tb", False, f"taken_{mode}")] * taken


def test_one_flows_frames_are_captured_as_they_came_in_and_went_out_in_every_mode():
    for mode in ("tcx", "xdp"):
        with host() as h:
            h.attach(words=(*LONG, "--mode", mode))
            frame = h.udp(b"flow" * 20)
            with capture(h, "--end", f"{A}:1000", "--end", f"{B}:2000", "--protocol", "udp") as lines:
                got = []
                for _ in range(4):
                    got.append(h.across(frame)[1])
                    # Other flows: other ports, the other protocol, other addresses.
                    assert h.across(h.udp(sport=1001)) and h.across(h.udp(dport=1000, sport=2001))
                    assert h.across(h.to_b(ETH_IP4, ipv4(A, B, TCP, transport(TCP, A, B, 1000, 2000, b"tcp"))))
                    assert h.across(h.to_b(ETH_IP6, ipv6(A6, B6, UDP, transport(UDP, A6, B6, 1000, 2000, b"six"))))
            assert ways(lines) == flow(mode, 3), lines
            assert [line.packet for line in lines] == [bytes(b) for sent in got for b in (frame, sent)], mode
            assert lines[2].comment.endswith(", to tb") and lines[3].comment.endswith(", from ta") and lines[1].comment == "kernel: forwarded, from ta"
            # Nothing left the bypass for it.
            by_reason = h.status("ta")["by_reason"]
            assert by_reason[f"taken_{mode}"] >= 12 and "handed_capture" not in by_reason, by_reason
            assert not h.status("ta")["captured"], "the capture is a packet socket"


def test_both_directions_of_one_interface_are_captured_and_of_no_other():
    with host() as h:
        h.attach(words=LONG)
        with capture(h, "ta", "--end", A) as lines:
            for _ in range(2):
                assert h.across(h.udp())
                assert h.back(h.to_a(ETH_IP4, ipv4(B, A, UDP, transport(UDP, B, A, 2000, 1000, b"back"))))
        assert ways(lines) == [("ta", True, "up_no_flow"), ("ta", False, "kernel"), ("ta", True, "taken_tcx"), ("ta", False, "taken_tcx")], lines
        # What the host itself sends; ports alone; a prefix.
        with capture(h, "--end", "10.1.0.0/24") as lines:
            h.space.run("ping", "-c", "1", "-W", "1", A, check=False)
        assert ("ta", False, "kernel") in ways(lines) and all(line.comment == "kernel: sent by this host" for line in lines if not line.incoming), lines
        with capture(h, "--end", ":2001") as lines:
            assert h.across(h.udp(dport=2001)) and h.across(h.udp()) and h.across(h.udp(sport=2001))
            assert h.across(h.to_b(ETH_IP6, ipv6(A6, B6, UDP, transport(UDP, A6, B6, 7, 2001, b"six"))))
        assert len(lines) == 6 and {line.protocols.split(":")[2] for line in lines} == {"ip", "ipv6"}, lines


def test_each_side_of_a_translation_is_captured_by_the_addresses_that_frames_have_there():
    with host() as h:
        h.rules(NAT)
        h.attach(words=(*LONG, "--mode", "tcx"))
        seen = source(forward(h, UDP, 4000, 5300)[1])
        assert answer(h, UDP, 53, seen)

        def talk():
            for _ in range(3):
                assert forward(h, UDP, 4000, 5300) and answer(h, UDP, 53, seen)

        with capture(h, "--end", A) as lines:
            talk()
        assert {(line.interface, line.incoming) for line in lines} == {("ta", True), ("ta", False)} and len(lines) == 6, lines
        # The leases may have ended while tshark read the file.
        talk()
        with capture(h, "tb") as lines:
            talk()
        mine = [line for line in lines if "udp" in line.protocols]
        assert {(line.interface, line.incoming) for line in mine} == {("tb", True), ("tb", False)} and len(mine) == 6, lines
        assert all(key(line) == "taken_tcx" for line in mine), lines


def test_frames_that_take_the_kernels_path_are_captured_with_the_reason():
    with host() as h:
        h.attach(words=LONG)
        udp = transport(UDP, A, B, 1000, 2000, b"x" * 100)
        sent = [("up_ttl", h.udp(ttl=1)), ("up_fragment", h.to_b(ETH_IP4, ipv4(A, B, UDP, udp, flags=1))),
                ("up_handshake", h.to_b(ETH_IP4, ipv4(A, B, TCP, transport(TCP, A, B, 1, 2, b"", flags=2)))),
                ("up_transport", h.to_b(ETH_IP4, ipv4(A, B, 132, b"sctp" * 5))), ("up_no_flow", h.to_b(ETH_IP4, ipv4(A, B, ICMP, echo(A, B))))]
        with capture(h, "ta", "--end", A, "--end", B) as lines:
            for _, frame in sent:
                h.a.send(frame)
            until("all of them", lambda: sum(h.status("ta")["by_reason"].get(name, 0) for name, _ in sent) >= len(sent))
        found = [(key(line), line.packet) for line in lines if line.incoming]
        assert found == [(name, bytes(frame)) for name, frame in sent], found
        # A protocol by its name and number; without a filter also what is no IP.
        with capture(h, "ta", "--protocol", "132") as lines:
            for _, frame in sent:
                h.a.send(frame)
            h.b.drain()
        assert [key(line) for line in lines] == ["up_transport"], lines
        with capture(h, "ta", "--protocol", "icmp") as lines:
            h.a.send(sent[-1][1])
            h.a.send(h.to_b(ETH_IP6, ipv6(A6, B6, 58, echo(A6, B6, payload=b"six" * 9))))
        assert {line.protocols.split(":")[2] for line in lines if line.incoming} == {"ip", "ipv6"}, lines
        arp = b"\xff" * 6 + h.a.mac + b"\x08\x06" + struct.pack("!HHBBH", 1, 0x800, 6, 4, 1) + h.a.mac + bytes([10, 1, 0, 2]) + bytes(6) + bytes([10, 1, 0, 1])
        with capture(h, "ta") as lines:
            h.a.send(arp)
            until("the answer", lambda: h.a.receive(20, lambda f: f[12:14] == b"\x08\x06"))
        assert ("ta", True, "up_not_ours") in ways(lines) or ("ta", True, "up_protocol") in ways(lines), lines
        assert any("arp" in line.protocols and line.comment == "kernel: sent by this host" for line in lines), lines


def test_segmentation_frames_are_captured_whole_and_named():
    with host() as h:
        h.attach(words=(*LONG, "--mode", "tcx"))
        large = h.to_b(ETH_IP4, ipv4(A, B, TCP, transport(TCP, A, B, 3000, 80, bytes(range(256)) * 234, partial=True)))
        header = vnet_header(NEEDS_CSUM, GSO_TCPV4, 54, 1448, 34, 16)
        with capture(h, "ta", "--protocol", "tcp") as lines:
            for _ in range(2):
                assert h.across(large, header)
        assert [key(line) for line in lines] == ["up_no_flow", "taken_tcx"] and all(line.packet == bytes(large) for line in lines)
        assert all("a segmentation frame, of packets with 1448 bytes of payload each" in line.comment for line in lines), lines


def test_frames_into_a_veths_other_end_are_captured_as_they_go_there():
    with host() as h, Namespace() as guest:
        h.space.ip("link", "add", "vg", "type", "veth", "peer", "name", "eth0", "netns", str(guest))
        h.space.ip("address", "add", "10.5.0.1/24", "dev", "vg")
        h.space.ip("link", "set", "vg", "up")
        guest.ip("address", "add", "10.5.0.2/24", "dev", "eth0")
        guest.ip("link", "set", "eth0", "up")
        guest.ip("route", "add", "default", "via", "10.5.0.1")
        import socket
        with Inside(guest):
            server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with server:
            server.bind(("10.5.0.2", 9))
            server.settimeout(20)
            h.attach("ta", "vg", words=LONG)
            until("the straight way", lambda: h.status("vg")["peer"])
            frame = h.to_b(ETH_IP4, ipv4(A, "10.5.0.2", UDP, transport(UDP, A, "10.5.0.2", 1000, 9, b"straight")))
            with capture(h, "--end", "10.5.0.2:9") as lines:
                for _ in range(4):
                    h.a.send(frame)
                    assert server.recv(100) == b"straight"
        assert [way[2] for way in ways(lines)][-2:] == ["taken_peer"] * 2, lines
        last = lines[-1]
        assert (last.interface, last.incoming) == ("vg", False) and last.packet[14 + 8] == 63 and last.packet[6:12] != bytes(h.a.mac), lines


def test_count_and_snap_length_bound_the_file_and_one_that_is_full_ends():
    with host() as h:
        h.attach(words=LONG)
        running = Capture(h, "ta", "--end", A, "--count", 5, "--snaplen", 60)
        for _ in range(12):
            assert h.across(h.udp(b"long" * 100))
        lines = running.end(how=None)
        assert [(line.length, line.kept) for line in lines] == [(442, 60)] * 5, lines
        assert running.said.startswith("5 frames, "), running.said
        assert os.stat(running.path).st_mode & 0o77 == 0, "others can read it"
        # Of this flow only: the host's kernel sends frames of its own now and then.
        running = Capture(h, "ta", "--end", A, "--seconds", "0.5")
        assert running.end(how=None) == []


def test_frames_that_find_no_room_are_counted_and_the_bypass_goes_on():
    with host() as h:
        h.attach(words=(*LONG, "--mode", "xdp"))
        frame, header = h.udp(b"much" * 340), bytes(10)
        assert h.across(frame) and h.across(frame)
        running = Capture(h, "ta", "--end", A)
        before = h.status("ta")
        running.process.send_signal(signal.SIGSTOP)
        cpus = sorted(os.sched_getaffinity(0))
        # Frames are asked for up to the end of the next second, so on a slow machine not all of it
        # in one go.
        for _ in range(3):
            # More than the buffers of all CPUs hold, one CPU after the other: the reader finds more
            # than it takes of each at once.
            for cpu in cpus:
                os.sched_setaffinity(0, {cpu})
                for _ in range(12_000 // len(cpus)):
                    os.write(h.a.fd, header + frame)
            os.sched_setaffinity(0, cpus)
            h.b.drain()
            running.process.send_signal(signal.SIGCONT)
            time.sleep(0.2)
            running.process.send_signal(signal.SIGSTOP)
        running.process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        lines = running.end()
        after = h.status("ta")
        frames = after["taken"] + after["passed"] - before["taken"] - before["passed"]
        lost = int(running.said.split(" more frames came faster")[0].split()[-1])
        print(f"{frames} frames, {len(lines)} captured, {lost} lost")
        assert frames >= 36_000 and lost > 0 and frames / 4 <= len(lines) + lost <= frames, (frames, len(lines), lost)
        assert after["by_reason"]["taken_xdp"] - before["by_reason"].get("taken_xdp", 0) > 35_000, after
        # The file says it too.
        data = running.path.read_bytes()
        assert struct.pack("<HHQ", 5, 8, lost) in data, "no statistics"


def test_one_capture_runs_at_a_time_and_a_killed_one_leaves_nothing():
    with host() as h:
        h.attach(words=LONG)
        running = Capture(h, "ta")
        words = ("capture", "-w", h.folder / "second", "--seconds", "1")
        # The file is not touched: it may be that of the capture that runs.
        (h.folder / "second").write_text("mine")
        refused = h.cli(*words, check=False)
        assert refused.returncode == 1 and f"process {running.process.pid} (" in refused.stderr, refused
        assert (h.folder / "second").read_text() == "mine"
        assert h.across(h.udp()) and h.across(h.udp())
        running.process.kill()
        running.process.wait()
        h.cli(*words)
        running = Capture(h, "ta")
        running.process.kill()
        running.process.wait()
        until("capturing ends after the kill", lambda: setting(h, SET_CAPTURE) < monotonic() and setting(h, SET_OBSERVED_NS) < monotonic() * 1e9)
        before = h.status("ta")["taken"]
        assert h.across(h.udp()) and h.taken() == before + 1
        for wrong, text in ((("tb0",), "tb0 is not attached"), (("lo",), "lo is not attached"), (("--end", A, "--end", A6), "no frame goes"),
                            (("--end", ":1", "--protocol", "icmp"), "only TCP and UDP have ports"), (("--end", "x"), "expected an address")):
            done = h.cli("capture", "-w", "-", *wrong, check=False)
            assert done.returncode == 2 and text in done.stderr, done


def test_frames_are_counted_while_nobody_reads_a_capture():
    """Longer than the moment up to which frames are asked for: what finds no room is lost, and reported."""
    with host() as h:
        h.attach(words=LONG)
        env = dict(os.environ, TOMBOLO_RUNTIME=str(h.folder / "run"))
        command = [str(PROGRAM), "bypass", "capture", "ta", "--netns", str(h.space)]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        until("it captures", lambda: setting(h, SET_CAPTURE) > 0)
        # The pipe is full with the first ones, and then the capture stands still.
        for _ in range(200):
            h.a.send(h.udp(b"f" * 1400))
        end = monotonic() + 4
        while monotonic() < end:
            h.a.send(h.udp(b"f" * 1400))
            # On a machine without a turn for it the thread that asks may be late, but it goes on.
            until("frames to be asked for", lambda: setting(h, SET_CAPTURE) >= int(monotonic()), 5)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60 * SLOW)[1]
        assert process.returncode == 0, said


def test_a_detach_ends_a_capture():
    with host() as h:
        h.attach(words=LONG)
        running = Capture(h, "ta", "--end", A)
        assert h.across(h.udp())
        h.cli("detach")
        lines = running.end(how=None, status=running.process.wait(timeout=60 * SLOW))
        assert running.process.returncode == 3 and "detached meanwhile" in running.said, (running.process.returncode, running.said)
        assert ("ta", True, "up_no_flow") in ways(lines), lines
        assert is_ip(lines[0].packet)
