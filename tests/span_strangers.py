"""What others can do to calls over zenoh: a machine that has a key and speaks zenoh itself (tests/lib/zenoh_attacker.py), and a stranger
that has none. Each attack is run where the machines connect to each other, and where they reach only a router. Neither the calls of the
two other machines may end by it, nor may what they know change."""

import contextlib
import json
import subprocess
import time
from pathlib import Path

from lib import ROOT, Process, need_root, scratch, timeout, until
from lib.fabric import PROGRAM
from lib.machine import SLOW
from lib.netns import Bridge
from lib.process import rss_bytes, thread_names
from span_control import PATIENCE_S, PORT, Machine
from span_router import HUB, LONG, PYTHON, RoutedMachine, machines, needed

# How long an attack lasts.
ATTACK_S = 8 * SLOW
# What a flood may add to a program: 64 connections with a window of 256 KiB each, threads, and what
# zenoh holds.
MOST_MORE_BYTES = 128 << 20
# Connections that one machine may have to another's exports (ACCEPTED in span/src/streams.rs).
MOST_STREAMS = 64
# Lines that a program may say about it: one a second, and a few.
MOST_MORE_LINES = 10 + 2 * ATTACK_S


class DirectMachine(RoutedMachine):
    """As [RoutedMachine], with connections to the others."""

    def start(self, *more, name=None):
        Machine.start(self, *more, name=name)


@contextlib.contextmanager
def three_machines(is_routed):
    """`node-1` exports to `node-2`, which calls it. Gives both, the third one, the keys, and where an attacker connects."""
    with contextlib.ExitStack() as outer:
        if is_routed:
            stack, hub, folder, keys, one, two, three = outer.enter_context(machines(3))
        else:
            need_root()
            needed()
            folder = outer.enter_context(scratch())
            stack = outer.enter_context(contextlib.ExitStack())
            bridge, keys = stack.enter_context(Bridge()), folder / "keys"
            subprocess.run([PROGRAM, "service", "keys", "--keys", keys, "node-1", "node-2", "node-3"], check=True, capture_output=True)
            one, two, three = (DirectMachine(stack, folder, bridge, n, 3) for n in (1, 2, 3))
        one.serve()
        one.start("--keys", keys, "--export", "calc=node-2")
        two.start("--keys", keys, "--import", "calc=node-1")
        if is_routed:
            hub.route(stack, one.config(folder))
        one.knows(two)
        two.knows(one)
        two.reaches()
        yield one, two, three, keys, f"tls/{HUB if is_routed else one.address}:{PORT}"


def attack(three, keys, endpoint, what, name="node-3"):
    process = Process([PYTHON, ROOT / "tests/lib/zenoh_attacker.py", keys, name, endpoint, what, str(ATTACK_S)], name=what, netns=three.space)
    three.stack.callback(process.kill)
    return process


def calls_are_served(two, seconds):
    """Calls for so long; each has its answer. Returns how many there were."""
    count, end = 0, time.monotonic() + seconds
    while count == 0 or time.monotonic() < end:
        done = two.fabric.cli("call", "calc", "1 / 4", "--repeat", "50", "--json", *LONG)
        report = json.loads(done.stdout)
        assert report["outcomes"] == {"served": 50}, report
        count += 50
    return count


def is_withstood(is_routed, what, check=None):
    with three_machines(is_routed) as (one, two, three, keys, endpoint):
        known = {machine.name: machine.remotes() for machine in (one, two)}
        before = {machine.name: (rss_bytes(machine.span.pid), len(machine.span.lines)) for machine in (one, two)}
        attacker = attack(three, keys, endpoint, what)
        attacker.wait_line(lambda line: line == "begins")
        print(f"{what}: {calls_are_served(two, ATTACK_S)} calls served")
        for machine in (one, two):
            memory, lines = before[machine.name]
            more, said = rss_bytes(machine.span.pid) - memory, machine.span.lines[lines:]
            print(f"{what}: {machine.name} has {more >> 20} MiB more and said {len(said)} lines")
            assert more < MOST_MORE_BYTES and len(said) <= MOST_MORE_LINES, (more, said[-20:])
            assert machine.remotes() == known[machine.name], machine.remotes()
        if check is not None:
            check(attacker, one, two)
        attacker.kill()
        two.reaches()


def heard_by(attacker):
    """The keys of the messages that it has received."""
    return {line.split()[1] for _, line in attacker.lines if line.startswith("heard ")}


def only_what_is_for_all(attacker, *_):
    heard = heard_by(attacker)
    assert "tombolo/default/node-1/here" in heard, "it is connected, and hears what all may hear"
    calls = [key for key in heard if "/calls/" in key]
    assert not calls, f"calls of others: {calls}"


def stands_still(attacker, *_):
    state = Path(f"/proc/{attacker.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    assert state == "T", f"it has sent everything, and stopped itself: {state}, {attacker.tail()}"


def refused_under_its_own_name_alone(is_routed):
    """What it says under its own name arrives, and is counted as wrong; the same under other names does not."""

    def check(_, one, two):
        for machine, other in ((one, "node-2"), (two, "node-1")):
            # Without a router it is connected to node-1, which passes nothing on.
            hears = is_routed or machine is one
            refused = machine.report()["counters"]["messages_refused"]
            assert refused > 100 if hears else refused == 0, (machine.name, refused)
            assert any("machine node-3: " in line for _, line in machine.span.lines) == hears, machine.span.text
            assert not any(f"machine {other}: " in line for _, line in machine.span.lines), machine.span.text
    return check


def most_are_refused(attacker, one, two):
    """It has no more connections than it may, and hears of those beyond that they are ended."""
    streams = [name for name in thread_names(one.span.pid) if name.startswith("stream-")]
    # Two of each connection; those of node-2's calls are among them.
    assert len(streams) <= 2 * (MOST_STREAMS + 2), len(streams)
    told = json.loads(attacker.wait_line(lambda line: line.startswith("{"))[1])
    print(told)
    ended = told.get("closed", 0) + told.get("full", 0)
    assert told["opened"] > 4 * MOST_STREAMS and ended > MOST_STREAMS and told.get("unknown", 0) + told.get("absent", 0) > 0, told
    assert any("refused a connection from node-3: " in line for _, line in one.span.lines), one.span.text


@timeout(240)
def test_a_machine_hears_no_calls_of_others():
    is_withstood(False, "listen", only_what_is_for_all)


@timeout(240)
def test_a_machine_hears_no_calls_of_others_through_a_router():
    is_withstood(True, "listen", only_what_is_for_all)


@timeout(240)
def test_a_machine_that_speaks_as_others_is_not_heard():
    is_withstood(False, "forge", refused_under_its_own_name_alone(False))


@timeout(240)
def test_a_machine_that_speaks_as_others_is_not_heard_through_a_router():
    is_withstood(True, "forge", refused_under_its_own_name_alone(True))


@timeout(240)
def test_a_machine_that_opens_connections_without_end_is_limited():
    is_withstood(False, "flood", most_are_refused)


@timeout(240)
def test_a_machine_that_opens_connections_without_end_is_limited_through_a_router():
    is_withstood(True, "flood", most_are_refused)


@timeout(240)
def test_a_machine_that_reads_no_answers_holds_up_no_other_one():
    is_withstood(False, "stall", stands_still)


@timeout(240)
def test_a_machine_that_reads_no_answers_holds_up_no_other_one_through_a_router():
    is_withstood(True, "stall", stands_still)


@timeout(240)
def test_a_stranger_with_keys_of_another_authority_is_refused_everywhere():
    for is_routed in (False, True):
        with three_machines(is_routed) as (one, two, three, keys, endpoint):
            foreign = three.folder / "foreign"
            subprocess.run([PROGRAM, "service", "keys", "--keys", foreign, "node-3"], check=True, capture_output=True)
            stranger = attack(three, foreign, endpoint, "listen")
            until("the stranger to be refused", lambda: stranger.popen.poll() is not None, PATIENCE_S)
            assert any(line.startswith("refused") for _, line in stranger.lines), stranger.lines
            # The authority is right, but the machine is none of the peers.
            subprocess.run([PROGRAM, "service", "keys", "--keys", keys, "node-7"], check=True, capture_output=True)
            unknown = attack(three, keys, endpoint, "listen", name="node-7")
            unknown.wait_line(lambda line: line == "begins")
            calls_are_served(two, ATTACK_S)
            assert not heard_by(unknown), unknown.lines
