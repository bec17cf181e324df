"""Networks and services across machines whose network loses frames, delays them, and brings them in another order (`lib.wire`)."""

import contextlib
import hashlib
import json
import sys

import span_calls
import span_control
from lib import Process, timeout
from lib.wire import Wire
from span_control import FIXED, LEASE_S, PATIENCE_S
from span_strangers import DirectMachine

# Much more than a window, so that what is lost has to be sent again.
BLOCK, BLOCKS = bytes(range(256)), 4096
TAKES = """
import hashlib, socket, sys
listener = socket.create_server(("0.0.0.0", 5001))
print("listens", flush=True)
connection, _ = listener.accept()
digest = hashlib.sha256()
while data := connection.recv(65536):
    digest.update(data)
print("took", digest.hexdigest(), flush=True)
"""
SENDS = f"""
import socket, sys
with socket.create_connection((sys.argv[1], 5001)) as connection:
    connection.sendall(bytes(range(256)) * {BLOCKS})
"""
# There and back, a frame is under way for as long at least.
ROUND_TRIP_US = 10_000


@contextlib.contextmanager
def bad_wire(wire):
    """Says what the wire has done meanwhile, which has to be enough to matter."""
    before = (wire.passed, wire.lost, wire.overtaken)
    yield
    passed, lost, overtaken = (now - then for now, then in zip((wire.passed, wire.lost, wire.overtaken), before))
    print(f"passed {passed}, lost {lost}, overtaken {overtaken}")
    assert lost > 0 and overtaken > 0, (lost, overtaken)


def on(fabric):
    """What runs a command on the machine of this fabric, whatever its exit code."""
    return lambda *words: fabric.cli(*words, check=False)


@timeout(400)
def test_machines_know_each_other_and_a_stream_comes_whole_through_a_bad_network():
    with span_control.machines(3, Wire) as (keys, *all_three):
        one, two, three = all_three
        span_control.start_all(all_three, keys)
        for machine in all_three:
            machine.knows(*(other for other in all_three if other is not machine))
        with bad_wire(one.bridge):
            # TCP between two members, whose frames are in the tunnel's datagrams.
            takes = Process([sys.executable, "-c", TAKES], netns=two.member)
            one.stack.callback(takes.kill)
            takes.wait_line(lambda line: line == "listens")
            one.member.run(sys.executable, "-c", SENDS, f"10.87.0.{FIXED + 2}", seconds=PATIENCE_S)
            took = takes.wait_line(lambda line: line.startswith("took"), PATIENCE_S)[1]
            assert took == "took " + hashlib.sha256(BLOCK * BLOCKS).hexdigest(), took
        # Nobody is given up for what is lost, and nobody's members flap.
        for machine in all_three:
            machine.waits(2 * LEASE_S)
            assert set(machine.states().values()) == {"up"}, machine.states()
            assert not any("forgotten" in line for _, line in machine.span.lines), machine.span.text
            assert all(other["rtt_us"] >= ROUND_TRIP_US for other in machine.report()["machines"]), machine.report()
        # A member that moves is followed.
        moved, _ = three.takes_member_of(two, one)
        one.follows(moved, two, three)


@timeout(300)
def test_each_call_through_a_bad_network_has_one_answer_over_tls():
    with span_calls.machines("a", "b", network=Wire) as (keys, a, b):
        a.serve()
        a.export(*a.keys(keys))
        b.import_from(a, words=b.keys(keys))
        b.reaches()
        answered(b.cli, a.cli, b.bridge)


@timeout(300)
def test_each_call_through_a_bad_network_has_one_answer_over_zenoh():
    with span_control.machines(2, Wire, DirectMachine) as (keys, one, two):
        one.serve()
        one.start("--keys", keys, "--export", "calc=node-2")
        two.start("--keys", keys, "--import", "calc=node-1")
        two.reaches()
        answered(on(two.fabric), on(one.fabric), two.bridge)


def answered(caller, provider, wire):
    """Calls have an answer each, whether they have time enough or none. `caller` and `provider` run commands on these machines."""

    def calls(count, time):
        done = caller("call", "calc", "1 / 4", "--json", "--repeat", str(count), "--timeout", time)
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    with bad_wire(wire):
        report = calls(300, f"{int(PATIENCE_S)}s")
        assert report["outcomes"] == {"served": 300} and report["times"]["min_ns"] >= ROUND_TRIP_US * 1000, report
        # Less time than the way there and back takes: the caller ends each by itself, and the next
        # one is not disturbed.
        report = calls(50, "8ms")
        assert sum(report["outcomes"].values()) == 50 and "served" not in report["outcomes"], report
        report = calls(50, f"{int(PATIENCE_S)}s")
        assert report["outcomes"] == {"served": 50}, report
    answers = json.loads(provider("service", "stats", "calc", "--json").stdout)["answers"]
    assert answers["served"] >= 350, answers
