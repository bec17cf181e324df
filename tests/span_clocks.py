"""Machines whose clocks are hours apart: all programs of a machine have its time of day, by libfaketime. Members, moves, leases and calls are as
with equal clocks, and a clock that is set back changes nothing. (tests/span_calls.py has machines whose monotonic clocks differ.)"""

import contextlib
import glob
import json
import signal
import time
from pathlib import Path

import span_control
from lib import Process, Skip, timeout, until
from lib.containers import BUILT
from lib.fabric import PROGRAM
from span_control import FIXED, LEASE_S, PATIENCE_S
from span_router import LATE_S, LONG
from span_strangers import DirectMachine

LIBRARY = "/usr/lib/*/faketime/libfaketimeMT.so.1"
HOURS = {1: 0, 2: 3, 3: -3}
CALLS = 7000


class OffMachine(DirectMachine):
    """Its clocks are some hours from those of the others."""

    def clock(self, hours):
        """The environment of programs whose time of day is that."""
        return {"LD_PRELOAD": self.library, "FAKETIME": f"{hours:+d}h", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}

    def __init__(self, stack, folder, bridge, number, count):
        found = glob.glob(LIBRARY)
        if not found:
            raise Skip("libfaketime is not installed: apt install libfaketime")
        self.library = found[0]
        super().__init__(stack, folder, bridge, number, count, self.clock(HOURS[number]))

    def program(self, *words):
        """Starts a program of this machine."""
        process = Process(words, name=f"{words[0].name} of {self.name}", netns=self.space, env=self.fabric.env, cwd=self.folder)
        self.stack.callback(process.kill)
        until(f"the clock of {process.name}", lambda: self.is_off(process.pid, HOURS[self.number]))
        return process

    def start(self, *more, name=None):
        super().start(*more, name=name)
        assert self.is_off(self.span.pid, int(self.fabric.env["FAKETIME"].rstrip("h"))), self.span.tail()

    def is_off(self, pid, hours):
        """Whether a process has the library, and was told this time. A program that clears its environment, or is linked statically, has neither."""
        told = Path(f"/proc/{pid}/environ").read_text().split("\0")
        return self.library in Path(f"/proc/{pid}/maps").read_text() and f"FAKETIME={hours:+d}h" in told

    def hours_off(self):
        """How far the daemon's time of day is from the test's, by its last event."""
        _, answer = self.fabric.ask("GET", "/v1/events")
        return (answer["events"][-1]["unix_ms"] / 1000 - time.time()) / 3600


@contextlib.contextmanager
def machines():
    with span_control.machines(3, kind=OffMachine) as (keys, *all_three):
        for machine in all_three:
            assert abs(machine.hours_off() - HOURS[machine.number]) < 0.2, (machine.name, machine.hours_off())
            assert machine.is_off(machine.fabric.process.pid, HOURS[machine.number]), machine.name
        yield (keys, *all_three)


@timeout(400)
def test_members_moves_leases_and_restarts_with_clocks_that_are_hours_apart():
    with machines() as (keys, *all_three):
        one, two, three = all_three
        span_control.start_all(all_three, keys)
        for machine in all_three:
            machine.knows(*(other for other in all_three if other is not machine))
        assert one.pings(two) and two.pings(three)
        # Round trips and times are those of each machine's own clock.
        for machine in all_three:
            until("round trips", lambda m=machine: all(other["rtt_us"] for other in (m.report() or {"machines": [{"rtt_us": 0}]})["machines"]), PATIENCE_S)
            for other in machine.report()["machines"]:
                assert 0 < other["rtt_us"] < PATIENCE_S * 1e6 and 0 <= other["heard_s"] < PATIENCE_S, other
        # A member moves to the machine whose clock is behind, and back.
        moved, address = three.takes_member_of(two, one)
        one.follows(moved, two, three)
        three.member.ip("address", "del", f"{address}/24", "dev", "member-3")
        three.member.ip("link", "set", "member-3", "down")
        two.member.ip("link", "set", "member-2", "up")
        two.member.run("ping", "-q", "-c", "1", "-W", "5", f"10.87.0.{FIXED + 1}", check=False)
        until("node-1 to follow back", lambda: moved in one.remotes().get("node-2", {}), PATIENCE_S, every=0.2)
        # A machine is forgotten after its lease, no sooner and no hours later.
        begin = time.monotonic()
        two.span.signal(signal.SIGSTOP)
        until("node-2 to be forgotten", lambda: "node-2" not in one.remotes() and "node-2" not in three.remotes(), PATIENCE_S, every=0.1)
        took = time.monotonic() - begin
        # It was last heard up to a beat before.
        assert took >= LEASE_S - 3, took
        two.span.signal(signal.SIGCONT)
        one.knows(two)
        # Its program starts again with a clock that was set back by nine hours: what it tells is newer all the same.
        two.span.stop()
        two.fabric.env.update(two.clock(-6))
        two.start("--keys", keys)
        one.knows(two)
        guest = two.stack.enter_context(span_control.Namespace())
        two.fabric.env.update(two.clock(HOURS[2]))
        two.fabric.file.write_text(two.fabric.file.read_text() + f'[tap.guest]\nnetns = "{guest}"\n')
        two.fabric.cli("apply")
        given = span_control.lease(two, guest)
        assert given, "a lease"
        until("its lease at node-1", lambda: any(given in member["ips"] for member in one.remotes().get("node-2", {}).values()), PATIENCE_S, every=0.2)


@timeout(400)
def test_deadlines_of_calls_hold_over_both_engines_with_clocks_that_are_hours_apart():
    with machines() as (keys, one, two, three):
        # node-2 calls over the direct engine, node-3 over zenoh. One service answers, the other one does not in time.
        for port, service, more in ((CALLS, "calc", ()), (CALLS + 1, "slow", ("--delay-ms", str(int(PATIENCE_S * 1000))))):
            one.program(BUILT / "examples/calculator", "--name", service, *more)
            at = f"{one.address}:{port}"
            export = one.program(PROGRAM, "service", "export", service, "--listen", at, "--keys", keys, "--machine", "node-1", "--allow", "node-2")
            export.wait_line(lambda line, s=service: f"{s} at" in line)
            two.program(PROGRAM, "service", "import", service, "--from", f"node-1={at}", "--keys", keys, "--machine", "node-2")
        one.start("--keys", keys, "--export", "calc=node-3", "--export", "slow=node-3")
        three.start("--keys", keys, "--import", "calc=node-1", "--import", "slow=node-1")
        for machine in (two, three):
            machine.reaches()
            done = machine.fabric.cli("call", "calc", "1 / 4", "--repeat", "100", "--deadline", f"{int(PATIENCE_S)}s", "--json")
            assert json.loads(done.stdout)["outcomes"] == {"served": 100}, done.stdout
            # Much less than the hours between the clocks, and neither at once nor for ever.
            until("the slow service", lambda m=machine: "slow" in m.fabric.cli("service", "ls").stdout, PATIENCE_S)
            begin = time.monotonic()
            done = machine.fabric.cli("call", "slow", "2 + 2", "--deadline", "2s", check=False)
            took = time.monotonic() - begin
            assert "deadline" in done.stderr and 1.9 <= took < 2 + LATE_S, (done, took)
        served = json.loads(one.fabric.cli("service", "stats", "calc", "--json").stdout)["answers"]
        assert served["served"] >= 202 and served["late"] == 0, served
        # Both engines still have their machine.
        for machine in (two, three):
            assert machine.call("6 * 7", *LONG) == "42"
