"""What can be seen of the bypass: the trace, and status."""

import ctypes
import json
import os
import re
import signal
import socket
import struct
import subprocess
import threading
import time
from collections import Counter

from bypass_capture import setting
from bypass_others import bpf
from bypass_paths import A, B, PROGRAM, has_tcx, host
from lib import until
from lib.machine import SLOW
from lib.tap import ETH_IP4, ICMP, Inside, echo, ipv4

# bpf(2), and the settings that `trace` writes: seconds, and what programs look at first, in ns.
MAP_UPDATE, OBJ_GET, SET_TRACE, SET_ACCOUNT, SET_OBSERVED_NS = 2, 7, 1, 2, 6


def test_a_trace_tells_frame_by_frame_which_way_it_went_and_why():
    with host() as h:
        h.attach(words=("--lease", "10000"))
        command = [str(PROGRAM), "bypass", "trace", "ta", "--count", "4", "--seconds", "120", "--json", "--netns", str(h.space)]
        trace = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ, TOMBOLO_RUNTIME=str(h.folder / "run")))
        stop = threading.Event()

        def send():
            port = 1000
            while not stop.wait(0.05):
                port += 1
                for _ in range(3):
                    h.a.send(h.udp(sport=port))
                h.b.drain()

        sender = threading.Thread(target=send)
        sender.start()
        try:
            text, _ = trace.communicate(timeout=150)
        finally:
            stop.set()
            sender.join()
        assert trace.returncode == 0
        lines = [json.loads(line) for line in text.splitlines()]
        assert lines.pop() == {"lost": 0} and len(lines) == 4
        first = lines[0]
        ways = [line["path"] for line in lines if line["source"] == first["source"]]
        # A trace that starts in the middle of a flow has missed its beginning.
        assert ways in (["up_no_flow", "learned", "taken_tcx"], ["learned", "taken_tcx"], ["taken_tcx"]), ways
        assert {(line["input"], line["destination"]) for line in lines} <= {("ta", f"{B}:2000")}
        assert all(line["source"].startswith(A) and line["why"] and line["at_ns"] > 0 for line in lines)
        assert all(line["output"] == "tb" for line in lines if line["path"] == "taken_tcx")


def ask_for_events(h, seconds):
    """Asks for events as `trace` does, which does so for a second or two only: tables.h, SET_TRACE."""
    path = ctypes.create_string_buffer(bytes(next((h.folder / "run/bypass/bpf").glob("*/map_settings"))))
    settings = bpf(OBJ_GET, struct.pack("<QII", ctypes.addressof(path), 0, 0))
    until_s = int(time.monotonic() + seconds)
    for which, word in ((SET_TRACE, until_s), (SET_OBSERVED_NS, (until_s + 1) * 1_000_000_000)):
        key, value = ctypes.c_uint32(which), ctypes.c_uint64(word)
        bpf(MAP_UPDATE, struct.pack("<IIQQQ", settings, 0, ctypes.addressof(key), ctypes.addressof(value), 0))
    os.close(settings)


def test_a_trace_says_how_many_events_it_lost():
    with host() as h:
        h.attach(words=("--lease", "10000", "--mode", "tcx"))
        assert h.across(h.udp()) and h.across(h.udp())
        command = [str(PROGRAM), "bypass", "trace", "--all", "--seconds", "120", "--netns", str(h.space)]
        environment = dict(os.environ, TOMBOLO_RUNTIME=str(h.folder / "run"))
        for words, lost in ((["--json"], lambda out, _: json.loads(out.splitlines()[-1])["lost"]),
                            ([], lambda _, error: int(re.search(r"(\d+) more events", error)[1]))):
            with (h.folder / "out").open("w+") as out:
                trace = subprocess.Popen([*command, *words], stdout=out, stderr=subprocess.PIPE, text=True, env=environment)
                until("the first line", lambda o=out: h.across(h.udp()) and os.fstat(o.fileno()).st_size)
                # A reader that stands still for a moment, while more comes than the ring of 1 MiB
                # holds. A slow machine needs longer for that than the reader has asked for events.
                frame, sent, before = bytes(10) + h.udp(), 0, h.status("ta")
                while sent < 200_000:
                    trace.send_signal(signal.SIGSTOP)
                    ask_for_events(h, 60)
                    for _ in range(20_000):
                        os.write(h.a.fd, frame)
                    trace.send_signal(signal.SIGCONT)
                    sent += 20_000
                    h.b.drain()
                    if words and sent >= 40_000:
                        break
                trace.send_signal(signal.SIGINT)
                _, error = trace.communicate(timeout=60 * SLOW)
                out.seek(0)
                text = out.read()
            assert trace.returncode == 0, (trace.returncode, error)
            count, after = lost(text, error), h.status("ta")
            frames = after["taken"] + after["passed"] - before["taken"] - before["passed"]
            told = len(text.splitlines()) - bool(words)
            print(f"{frames} frames, {told} told, {count} lost")
            # What passes, once in ten seconds, is told of twice.
            assert 0 < count and told + count <= frames + 50, (count, told, frames)
            assert told + count >= frames / 4, "events that were neither told nor counted"


def test_metrics_are_the_counters_of_status_by_the_names_and_labels_of_a_fabric():
    with host() as h:
        assert 'tombolo_bypass_up{network="%s"} 0' % h.space in h.cli("status", "--metrics").stdout
        h.attach(words=("--lease", "10000"))
        for _ in range(4):
            assert h.across(h.udp())
        page, of = h.cli("status", "--metrics").stdout, h.status("ta")
        label = f'network="{h.space}",interface="ta"'
        assert of["taken"] == 3 and of["passed"] >= 1, of
        expected = {f'tombolo_bypass_up{{network="{h.space}"}}': 1, f'tombolo_bypass_mode{{{label},mode="tcx"}}': 1,
                    f"tombolo_bypass_taken_frames_total{{{label}}}": of["taken"], f"tombolo_bypass_taken_bytes_total{{{label}}}": of["taken_bytes"],
                    f'tombolo_bypass_frames_total{{{label},path="taken_tcx"}}': 3, f'tombolo_bypass_frames_total{{{label},path="up_no_flow"}}': 1}
        lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        assert {name: int(lines[name]) for name in expected} == expected, page
        assert int(lines[f"tombolo_bypass_passed_frames_total{{{label}}}"]) >= 1
        # Every family has its help and type, once.
        families = {name.split("{")[0] for name in lines}
        assert all(page.count(f"# TYPE {family} ") == page.count(f"# HELP {family} ") == 1 for family in families), page
        h.cli("detach")
        wrong = h.cli("status", "--metrics", "--json", check=False)
        assert wrong.returncode == 2 and "cannot be used with" in wrong.stderr, wrong


def test_a_trace_names_echoes_by_their_id_and_not_by_ports():
    with host() as h:
        h.attach(words=("--lease", "10000"))
        command = [str(PROGRAM), "bypass", "trace", "ta", "--count", "1", "--seconds", "120", "--netns", str(h.space)]
        trace = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ, TOMBOLO_RUNTIME=str(h.folder / "run")))

        def ended():
            h.a.send(h.to_b(ETH_IP4, ipv4(A, B, ICMP, echo(A, B, ident=99))))
            return trace.poll() is not None

        until("a line", ended)
        line = trace.stdout.read()
        assert f" icmp echo 99 {A} > {B} " in line, line


def test_a_detach_ends_a_trace_and_a_measurement_of_flows():
    """Also where another attach follows at once, whose programs tell them nothing."""
    for follows in (False, True):
        with host() as h:
            h.attach()
            env = dict(os.environ, TOMBOLO_RUNTIME=str(h.folder / "run"))
            started = {}
            for words in (("trace", "--seconds", "60"), ("flows", "--seconds", "60")):
                command = [str(PROGRAM), "bypass", *words, "--netns", str(h.space)]
                started[words[0]] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
            until("both have begun", lambda: all(setting(h, which) > time.monotonic() for which in (SET_TRACE, SET_ACCOUNT)))
            h.cli("detach")
            if follows:
                h.attach()
            for name, process in started.items():
                out, said = process.communicate(timeout=30 * SLOW)
                assert process.returncode == 3 and "everything was detached meanwhile" in said, (name, process.returncode, out, said)


def test_interfaces_that_are_not_attached_are_refused_by_whatever_looks_at_one():
    with host() as h:
        for words in (("trace",), ("flows",), ("capture", "-w", "/dev/null")):
            done = h.cli(*words, check=False)
            assert done.returncode == 2 and "--netns" in done.stderr and "TOMBOLO_RUNTIME" in done.stderr, (words, done.stderr)
        done = h.cli("attach", "nosuch", check=False)
        assert done.returncode == 2 and "no interface nosuch" in done.stderr, done
        h.attach("ta")
        for interface in ("tb", "lo", "nosuch"):
            for words in (("trace", interface), ("flows", interface), ("capture", interface, "-w", "/dev/null"), ("detach", interface)):
                done = h.cli(*words, check=False)
                assert done.returncode == 2 and f"{interface} is not attached" in done.stderr, (words, done.returncode, done.stderr)


def test_a_port_of_a_bridge_is_attached_with_a_warning():
    with host() as h:
        h.space.ip("link", "add", "br7", "type", "bridge")
        h.space.ip("link", "set", "ta", "master", "br7")
        said = h.attach("ta").stderr
        assert "ta: it is a port of br7" in said, said
        assert [w["kind"] for w in h.status()["warnings"]].count("interface") == 1 and h.status("ta")["port_of"] == "br7"


def test_attach_says_what_it_set_for_all_interfaces():
    with host() as h:
        done = h.attach("ta", "ta", words=("--lease", "200", "--if-controller-dies", "leave", "--judging-rules", "skip"))
        assert done.stdout.splitlines() == [
            "ta attached in mode auto",
            "all interfaces of this network namespace: lease 200 ms, traffic leaves the bypass if the controller dies, judging rules see one frame per lease",
        ], done.stdout


def test_detach_says_so_where_nothing_is_attached():
    with host() as h:
        done = h.cli("detach")
        assert done.stdout.startswith("nothing is attached in this network namespace (--netns"), done
        h.attach()
        assert h.cli("detach").stdout == "ta detached\ntb detached\n"


def test_status_of_nothing_and_of_something_is_one_schema():
    with host() as h:
        assert h.status() == {"schema": 1, "attached": False, "keeper": None, "keeper_fault": None, "needs_keeper": False, "lease_ms": 0, "flows": 0,
                              "flow_entries": 0, "flow_limit": 0, "judging_rules": [], "judging_rules_total": 0, "judging_rules_skipped": False,
                              "rules_fault": None, "is_lenient": False, "trace_lost": 0, "limits": [], "interfaces": [], "warnings": []}
        h.attach(words=("--lease", "5000"))
        h.across(h.udp())
        h.across(h.udp())
        report = h.status()
        assert (report["lease_ms"], report["flows"]) == (5000, 1)
        ta = next(i for i in report["interfaces"] if i["name"] == "ta")
        assert (ta["taken"], ta["passed"], ta["taken_bytes"], ta["learned"], ta["flows"]) == (1, 1, 64, 1, 1)
        text = h.cli("status").stdout
        assert "up_no_flow: the kernel has not forwarded one like it yet" in text and "controller" in text


def kinds(h):
    return Counter(warning["kind"] for warning in h.status()["warnings"])


def test_status_warns_of_what_a_user_should_act_on_and_of_nothing_else():
    with host() as h:
        # Whatever the kernel lacks is there from the start.
        h.attach(words=("--lease", "10000"))
        usual = kinds(h)
        assert set(usual) <= {"kernel"}, h.status()["warnings"]

        def only(kind, text):
            found = [w for w in h.status()["warnings"] if w["kind"] == kind]
            shown = h.cli("status").stdout
            return len(found) == 1 and text in found[0]["what"] and found[0]["what"] in shown and found[0]["advice"] in shown

        # A capture by a packet socket.
        with Inside(h.space):
            listening = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        with listening:
            listening.bind(("ta", 0))
            until("the capture's warning", lambda: only("interface", "ta: a process captures on it"), 20)
        until("its end", lambda: kinds(h) == usual, 20)
        # Rules that judge, and the frames that they keep.
        h.rules("table inet f { chain c { type filter hook forward priority 0; limit rate 1000/second accept; }; }")
        until("the rule's warning", lambda: only("judging_rule", "inet f c handle 2: limit"), 20)
        for _ in range(5):
            assert h.across(h.udp())
        until("the frames", lambda: only("judging_rules", "at ta"))
        h.rules("flush ruleset")
        until("no rule", lambda: kinds(h) == usual, 20)
        # Events that were lost: more than the ring holds, while its reader stands still.
        command = [str(PROGRAM), "bypass", "trace", "--all", "--netns", str(h.space)]
        trace = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ, TOMBOLO_RUNTIME=str(h.folder / "run")))
        frame = bytes(10) + h.udp()

        def lost():
            trace.send_signal(signal.SIGSTOP)
            for _ in range(20_000):
                os.write(h.a.fd, frame)
            h.b.drain()
            trace.send_signal(signal.SIGCONT)
            return only("trace", "events since the first attach")

        until("lost events", lost)
        trace.send_signal(signal.SIGINT)
        trace.wait()
        # A filter that would miss what is taken. Without tcx it runs before ours.
        if has_tcx():
            for words in (("qdisc", "add", "dev", "ta", "clsact"), ("filter", "add", "dev", "ta", "ingress", "protocol", "all", "u32", "match", "u32", "0", "0")):
                h.space.run("tc", *words)
            until("the filter's warning", lambda: only("interface", "ta: nothing is taken"), 20)
            h.space.run("tc", "qdisc", "del", "dev", "ta", "clsact")
            until("its end", lambda: "interface" not in kinds(h), 20)
        # The keeper's end, and what follows of it for changed rules.
        os.kill(h.status()["keeper"], signal.SIGKILL)
        until("the controller's warning", lambda: only("keeper", "no controller runs: no new TCP connections"), 20)
        h.rules("table inet f { chain c { type filter hook forward priority 0; counter; }; }")
        assert only("rules_unread", "until then no flow is learned"), h.status()
        h.attach()
        until("all well", lambda: set(kinds(h)) <= {"kernel", "trace"}, 20)


def test_status_warns_of_leases_that_a_timeout_cuts():
    with host() as h:
        h.rules("table inet f { chain c { type filter hook forward priority 0; ct state new,established accept; }; }")
        h.space.run("sysctl", "-qw", "net.netfilter.nf_conntrack_udp_timeout=2")
        h.attach(words=("--lease", "10000"))
        for _ in range(3):
            assert h.across(h.udp())
        found = [w for w in h.status()["warnings"] if w["kind"] == "leases"]
        assert len(found) == 1 and "ta: 1 leases were cut" in found[0]["what"], h.status()
