"""tombolo-span where machines reach no other machine, but only a router of zenoh that others wrote. A machine is a namespace with a cable
to the router's, which forwards no packets. Members are known everywhere, and services are called through the router."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time

from lib import ROOT, Namespace, Process, Skip, need_root, scratch, timeout, until
from lib.containers import BUILT
from lib.fabric import PROGRAM
from lib.machine import SLOW
from span_control import LEASE_S, PATIENCE_S, SPAN, Machine

PYTHON = ROOT / "build/zenoh/bin/python"
HUB, PORT = "10.233.2.100", 7447
ROUTER = f"hub={HUB}:{PORT}"
# A machine that vanishes is noticed within so much (SILENCE in crates/span/src/stream.rs); then
# what a busy machine may add.
SILENCE_S = 4
LATE_S = 6 * SLOW
# Calls whose own time is no matter here.
LONG = ("--timeout", f"{int(PATIENCE_S)}s")


class Hub(Namespace):
    """The router's namespace: a cable to each machine, and no way for packets from one to another."""

    def __enter__(self):
        super().__enter__()
        self.run("sysctl", "-qw", "net.ipv4.ip_forward=0")
        self.router = None
        return self

    def join(self, space, name, address):
        self.ip("link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", space.name)
        for here, own, device, other in ((self, HUB, f"to-{name}", address), (space, address, "eth0", HUB)):
            here.ip("address", "add", f"{own}/32", "dev", device)
            here.ip("link", "set", device, "up")
            here.ip("route", "add", f"{other}/32", "dev", device)
        # The daemon wants a route to its tunnel's remotes. It leads nowhere.
        space.ip("route", "add", "default", "via", HUB, "dev", "eth0", "onlink")

    def cable(self, name, state):
        self.ip("link", "set", f"to-{name}", state)
        if state == "up":
            # A route goes with its interface.
            self.ip("route", "replace", f"10.233.2.{name.split('-')[1]}/32", "dev", f"to-{name}")

    def command(self, config):
        """The router's command."""
        return [PYTHON, ROOT / "tests/lib/zenoh_router.py", config]

    def is_ready(self, line):
        """Whether the router says by this line that it listens."""
        return line.startswith("router ")

    def route(self, stack, config):
        self.router = Process(self.command(config), name="router", netns=self)
        stack.callback(self.router.kill)
        self.router.wait_line(self.is_ready)


class RoutedMachine(Machine):
    """As [Machine], by way of the router."""

    def start(self, *more, name=None):
        name = name or self.name
        peers = [word for n in self.others if f"node-{n}" != name for word in ("--peer", f"node-{n}")]
        self.words = ["--fabric", self.fabric.name, "--machine", name, "--router", ROUTER, *peers, "--lease", str(LEASE_S), *more]
        self.span = Process([SPAN, *self.words], name=f"tombolo-span of {self.name}", netns=self.space, env=self.fabric.env, cwd=self.folder)
        self.stack.callback(self.span.kill)
        self.span.wait_line(lambda line: "uses the router" in line)

    def config(self, folder):
        """The router's settings, which this machine's tombolo-span prints."""
        printed = subprocess.run([SPAN, *self.words, "--router-config"], check=True, capture_output=True, text=True).stdout
        file = folder / "router.json5"
        file.write_text(printed)
        return file

    def serve(self, *words):
        process = Process([BUILT / "examples/calculator", "--name", "calc", *words], netns=self.space, env=self.fabric.env, cwd=self.folder)
        self.stack.callback(process.kill)
        return process

    def call(self, text, *words):
        """The reply, or what was said on standard error."""
        done = self.fabric.cli("call", "calc", text, *words, check=False)
        return done.stdout.strip() if done.returncode == 0 else done.stderr.strip()

    def reaches(self):
        until(f"calls of {self.name} to be answered", lambda: self.call("6 * 7") == "42", PATIENCE_S)

    def begins(self):
        """A call that is not answered for long, as a process."""
        return subprocess.Popen([PROGRAM, "call", "calc", "2 + 2", *LONG], text=True, env={**os.environ, **self.fabric.env},
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def needed():
    """Skips a test for which something was not built or installed."""
    if not SPAN.exists():
        raise Skip(f"{SPAN} is not built: run ./x span-program")
    if not PYTHON.exists():
        raise Skip("eclipse-zenoh is not installed: ./x span installs it into build/zenoh")


@contextlib.contextmanager
def machines(count, kind=Hub, needed=needed):
    """The router's namespace is of the class `kind`."""
    need_root()
    needed()
    with scratch() as folder, contextlib.ExitStack() as stack:
        hub = stack.enter_context(kind())
        keys = folder / "keys"
        names = ["hub", *(f"node-{n}" for n in range(1, count + 1))]
        subprocess.run([PROGRAM, "service", "keys", "--keys", keys, *names], check=True, capture_output=True)
        yield (stack, hub, folder, keys, *(RoutedMachine(stack, folder, hub, n, count) for n in range(1, count + 1)))


def members_and_calls_cross(of):
    with of(3) as (stack, hub, folder, keys, one, two, three):
        one.serve()
        one.start("--keys", keys, "--export", "calc=node-2")
        # The router may come later.
        one.span.wait_line(lambda line: "it is tried again" in line)
        two.start("--keys", keys, "--import", "calc=node-1")
        three.start("--keys", keys, "--import", "calc=node-1")
        hub.route(stack, one.config(folder))
        for machine in (one, two, three):
            machine.knows(*(other for other in (one, two, three) if other is not machine))
        assert not two.space.answers(one.address) and two.space.answers(HUB), "there is no direct path"
        two.reaches()
        # Deadlines cross, and each call has one answer.
        report = json.loads(two.fabric.cli("call", "calc", "1 / 4", "--repeat", "200", "--deadline", f"{int(PATIENCE_S)}s", "--json").stdout)
        assert report["outcomes"] == {"served": 200}, report
        served = json.loads(one.fabric.cli("service", "stats", "calc", "--json").stdout)["answers"]
        assert served["served"] >= 201 and served["late"] == 0, served
        listed = two.fabric.cli("service", "ls").stdout.splitlines()
        assert listed[1].split()[:2] == ["calc", "node-1"], listed
        # The export does not name node-3.
        three.span.wait_line(lambda line: "not offered to this machine" in line)
        assert "no service" in three.call("1 + 1")
        until("the report", lambda: two.states() == {"node-1": "up", "node-3": "up"}, PATIENCE_S)


def calls_end_once(of):
    with of(2) as (stack, hub, folder, keys, one, two):
        service = one.serve("--delay-ms", str(int(PATIENCE_S * 1000)))
        provider, consumer = ("--keys", keys, "--export", "calc"), ("--keys", keys, "--import", "calc=node-1")
        one.start(*provider)
        two.start(*consumer)
        config = one.config(folder)
        hub.route(stack, config)

        def up():
            until("the name to be there", lambda: "calc" in two.fabric.cli("service", "ls").stdout, PATIENCE_S)

        def ends(how, within_s, expected):
            up()
            call = two.begins()
            service.wait_line(lambda line: line == "working")
            how()
            began = time.monotonic()
            _, said = call.communicate(timeout=PATIENCE_S)
            took = time.monotonic() - began
            print(f"{expected}: {took:.2f} s")
            assert expected in said and took < within_s, (said, took)
            service.kill()
            return one.serve("--delay-ms", str(int(PATIENCE_S * 1000)))

        # The provider's program, killed: the router says so.
        service = ends(lambda: one.span.signal(signal.SIGKILL), SILENCE_S + LATE_S, "has gone")
        one.start(*provider)
        # Without a network nothing says so.
        service = ends(lambda: one.cable("down"), 2 * SILENCE_S + LATE_S, "has gone")
        one.cable("up")
        # The router: killed, and stopped.
        service = ends(lambda: hub.router.signal(signal.SIGKILL), 2 * SILENCE_S + LATE_S, "has gone")
        hub.route(stack, config)
        service = ends(lambda: hub.router.signal(signal.SIGSTOP), 2 * SILENCE_S + LATE_S, "has gone")
        hub.router.signal(signal.SIGCONT)
        # The consumer's program.
        service = ends(lambda: two.span.signal(signal.SIGKILL), LATE_S, "has gone")
        two.start(*consumer)
        # The service itself: the export says so for it.
        service = ends(lambda: service.signal(signal.SIGKILL), LATE_S, "fail")
        service.kill()
        one.serve()
        two.reaches()


def another_name_is_not_believed(of):
    with of(4) as (stack, hub, folder, keys, one, two, three, four):
        one.serve()
        one.start("--keys", keys, "--export", "calc=node-2")
        two.start("--keys", keys)
        # A machine that hears no other one forgets none.
        four.start("--keys", keys)
        hub.route(stack, one.config(folder))
        one.knows(two, four)
        false_keys = three.folder / "false"
        shutil.copytree(keys, false_keys)
        for end in ("pem", "key"):
            shutil.copy(keys / f"node-3.{end}", false_keys / f"node-2.{end}")
        two.span.stop()
        until("node-2 to be gone", lambda: one.states().get("node-2") == "gone", PATIENCE_S)
        # The certificate is node-3's, which the router sees, and so does node-1 within the calls'
        # own TLS.
        three.others = [1]
        three.start("--keys", false_keys, "--import", "calc=node-1", name="node-2")
        three.span.wait_line(lambda line: "the router is reached" in line)
        one.waits(2 * LEASE_S)
        assert one.states().get("node-2") == "gone" and three.mac() not in json.dumps(one.remotes()), one.states()
        assert "no service" in three.call("1 + 1")
        three.span.stop()
        two.start("--keys", keys, "--import", "calc=node-1")
        two.reaches()


@timeout(300)
def test_machines_that_reach_only_a_router_know_each_others_members_and_call_each_other():
    members_and_calls_cross(machines)


@timeout(400)
def test_a_call_through_a_router_has_one_named_answer_whatever_ends_it():
    calls_end_once(machines)


@timeout(300)
def test_a_machine_under_anothers_name_is_not_believed_through_a_router():
    another_name_is_not_believed(machines)
