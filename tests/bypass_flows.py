"""`tombolo bypass flows`: which flows have traffic, which path their frames take, and why some are not taken."""

import ctypes
import json
import os
import re
import signal
import struct
import subprocess
import threading
import time

from bypass_nat import NAT
from bypass_others import bpf
from bypass_paths import A, A6, B, B6, PROGRAM, host
from lib import until
from lib.tap import ETH_IP6, UDP, ipv6, transport

MAP_LOOK_UP, OBJ_GET = 1, 7
SET_ACCOUNT = 2  # tables.h, enum setting


class Measurement:
    """A running `flows --json`; frames are sent by `each` until it ends."""

    def __init__(self, h, *words):
        command = [str(PROGRAM), "bypass", "flows", "--json", *map(str, words), "--netns", str(h.space)]
        env = dict(os.environ, TOMBOLO_RUNTIME=str(h.folder / "run"))
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)

    def during(self, each):
        stop = threading.Event()

        def send():
            while not stop.is_set():
                each()
                time.sleep(0.002)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            text, _ = self.process.communicate(timeout=120)
        finally:
            stop.set()
            sender.join()
        assert self.process.returncode == 0, self.process.returncode
        report = json.loads(text)
        assert report["schema"] == 1 and report["seconds"] > 0
        return report


def flow_of(report, source, destination):
    found = [f for f in report["flows"] if (f["source"], f["destination"]) == (source, destination)]
    assert len(found) == 1, (source, destination, report)
    return found[0]


def counted_until(h):
    """Up to which second of the monotonic clock the programs count by flow."""
    path = ctypes.create_string_buffer(str(next((h.folder / "run/bypass/bpf").glob("*/map_settings"))).encode())
    fd = bpf(OBJ_GET, struct.pack("<QII", ctypes.addressof(path), 0, 0))
    try:
        key, value = ctypes.c_uint32(SET_ACCOUNT), ctypes.c_uint64(0)
        bpf(MAP_LOOK_UP, struct.pack("<IIQQQ", fd, 0, ctypes.addressof(key), ctypes.addressof(value), 0))
        return value.value
    finally:
        os.close(fd)


def test_each_flow_is_shown_with_its_path_and_those_with_most_bytes_first():
    with host() as h:
        for mode in ("tcx", "xdp"):
            h.attach(words=("--lease", "10000", "--mode", mode))
            six = h.to_b(ETH_IP6, ipv6(A6, B6, UDP, transport(UDP, A6, B6, 7, 8, b"six" * 100)))

            def send(six=six):
                for frame in (h.udp(b"large" * 200, sport=1), h.udp(b"x", sport=2), six):
                    h.a.send(frame)
                h.b.drain()

            send()
            before = h.status("ta")
            report = Measurement(h, "--seconds", 2).during(send)
            assert report["total"] == len(report["flows"]) == 3
            assert [f["protocol"] for f in report["flows"]] == ["udp"] * 3
            sizes = [f["taken_bytes"] + f["passed_bytes"] for f in report["flows"]]
            assert sizes == sorted(sizes, reverse=True)
            path = "taken_" + mode
            for source, destination, length in ((f"{A}:1", f"{B}:2000", 1042), (f"{A}:2", f"{B}:2000", 43), (f"[{A6}]:7", f"[{B6}]:8", 362)):
                flow = flow_of(report, source, destination)
                assert (flow["input"], flow["output"], flow["path"]) == ("ta", "tb", path), flow
                assert flow["taken"] > 100 and flow["taken_bytes"] == flow["taken"] * length, flow
            taken = sum(f["taken"] for f in report["flows"])
            assert taken <= h.taken() - before["taken"]
            # After the measurement nothing is counted any more.
            assert Measurement(h, "--seconds", "0.2").during(lambda: None)["total"] == 0
            top = Measurement(h, "--seconds", "0.5", "--top", 1).during(send)
            assert (top["total"], len(top["flows"]), top["flows"][0]["source"]) == (3, 1, f"{A}:1")
            assert Measurement(h, "tb", "--seconds", "0.5").during(send)["total"] == 0
            h.cli("detach")


def test_why_a_flow_is_not_taken_is_said():
    with host() as h:
        h.rules("table inet f { chain c { type filter hook forward priority 0; udp dport 9 ip ttl set 9; udp dport 10 drop; }; }")
        h.attach(words=("--lease", "10000", "--mode", "tcx"))

        def send():
            for dport in (9, 10, 11):
                h.a.send(h.udp(sport=5, dport=dport))
            h.a.send(h.udp(sport=5, dport=12, ttl=1))
            h.b.drain()
            h.a.drain()

        send()
        report = Measurement(h, "--seconds", 2).during(send)
        whys = {dport: flow_of(report, f"{A}:5", f"{B}:{dport}") for dport in (9, 10, 11, 12)}
        assert {dport: flow["why"] for dport, flow in whys.items() if dport != 11} == {9: "altered", 10: "up_no_flow", 12: "up_ttl"}, report
        assert whys[11]["path"] == "taken_tcx" and whys[11]["taken"] > 100
        assert all(whys[n]["path"] is None and whys[n]["taken"] == 0 and whys[n]["passed"] > 100 for n in (9, 10, 12))
        only = Measurement(h, "--seconds", "0.5", "--passed").during(send)
        assert {f["destination"] for f in only["flows"]} == {f"{B}:{dport}" for dport in (9, 10, 12)}
        text = h.cli("flows", "--seconds", "0.1").stdout
        # How long it took in truth, which is more on a busy machine.
        assert re.match(r"0 flows with frames in \d\.\d s\n", text), text


def test_a_translated_flow_is_shown_as_it_came_in():
    with host() as h:
        h.rules(NAT)
        h.attach(words=("--lease", "300", "--mode", "tcx"))
        send = lambda: (h.a.send(h.udp(sport=77)), h.b.drain())  # noqa: E731
        send()
        report = Measurement(h, "--seconds", 2).during(send)
        assert [(f["source"], f["output"], f["path"]) for f in report["flows"]] == [(f"{A}:77", "tb", "taken_tcx")], report


def test_two_measurements_at_once_count_the_same_and_a_killed_one_ends():
    with host() as h:
        h.attach(words=("--lease", "10000", "--mode", "tcx"))
        send = lambda: (h.a.send(h.udp(sport=77)), h.b.drain())  # noqa: E731
        send()
        killed, short = Measurement(h, "--seconds", 60), Measurement(h, "--seconds", 1)
        report = Measurement(h, "--seconds", 3).during(send)
        text, _ = short.process.communicate(timeout=60)
        assert json.loads(text)["flows"][0]["taken"] < report["flows"][0]["taken"]
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait()

        until("counting ends after the kill", lambda: counted_until(h) < time.clock_gettime(time.CLOCK_MONOTONIC))
        interrupted = Measurement(h, "--seconds", 60)
        threading.Timer(1.5, lambda: interrupted.process.send_signal(signal.SIGINT)).start()
        assert interrupted.during(send)["flows"][0]["taken"] > 10
