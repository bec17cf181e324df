"""Services across machines (`tombolo service export` and `import`). A machine is a network namespace with an address on a common bridge, a
folder of services of its own, and a monotonic clock that is hours apart from the others'."""

import contextlib
import json
import os
import signal
import subprocess
import time

from lib import Namespace, Process, need_root, scratch, timeout, until
from lib.containers import BUILT
from lib.fabric import PROGRAM
from lib.machine import SLOW
from lib.netns import ip

PATIENCE_S = 60 * SLOW
PORT = 7000
# A machine that vanishes is noticed within so much (DEAD_AFTER in crates/remote); then what a busy machine may add.
DEAD_AFTER_S = 4
LATE_S = 6 * SLOW
# Calls whose own time is no matter here.
LONG = ("--timeout", f"{int(PATIENCE_S)}s")


class Machine:
    def __init__(self, stack, folder, bridge, number, name):
        self.stack, self.bridge, self.name = stack, bridge, name
        self.folder = folder / name
        self.folder.mkdir()
        self.address = f"10.233.1.{number}"
        self.clock = ["unshare", "--time", f"--monotonic={number * 3 * 3600}"]
        self.environment = {"TOMBOLO_RUNTIME": str(self.folder)}
        self.space = stack.enter_context(Namespace())
        ip("link", "add", "eth0", "netns", self.space.name, "type", "veth", "peer", "name", f"to-{name}", "netns", bridge.name)
        self.space.ip("address", "add", f"{self.address}/24", "dev", "eth0")
        self.space.ip("link", "set", "eth0", "up")
        bridge.ip("link", "set", f"to-{name}", "master", "br0", "up")

    def cable(self, state):
        """Takes the machine from the network without a word, or puts it back."""
        self.bridge.ip("link", "set", f"to-{self.name}", state)

    def start(self, *argv):
        # unshare has its words run as its own process, not as a child.
        process = Process([*self.clock, *argv], name=f"{argv[0].name} of {self.name}", netns=self.space, env=self.environment, cwd=self.folder)
        self.stack.callback(process.kill)
        return process

    def serve(self, *words):
        return self.start(BUILT / "examples/calculator", "--name", "calc", *words)

    def export(self, *words):
        export = self.start(PROGRAM, "service", "export", "calc", "--listen", f"{self.address}:{PORT}", *words)
        export.wait_line(lambda line: "calc at" in line)
        return export

    def import_from(self, *machines, words=()):
        sources = [word for machine in machines for word in ("--from", f"{machine.name}={machine.address}:{PORT}")]
        return self.start(PROGRAM, "service", "import", "calc", *sources, *words)

    def keys(self, folder):
        return "--keys", folder, "--machine", self.name

    def command(self, *words):
        """`tombolo WORDS` on this machine, as arguments of subprocess."""
        command = ["ip", "netns", "exec", self.space.name, *self.clock, PROGRAM, *words]
        return {"args": command, "text": True, "env": {**os.environ, **self.environment}}

    def cli(self, *words):
        return subprocess.run(**self.command(*words), capture_output=True, timeout=PATIENCE_S)

    def call(self, text, *words):
        """The reply, or what was said on standard error."""
        done = self.cli("call", "calc", text, *words)
        return done.stdout.strip() if done.returncode == 0 else done.stderr.strip()

    def reaches(self, text="6 * 7", reply="42"):
        until(f"calls of {self.name} to be answered", lambda: self.call(text) == reply, PATIENCE_S)


@contextlib.contextmanager
def machines(*names):
    need_root()
    with scratch() as folder, contextlib.ExitStack() as stack:
        bridge = stack.enter_context(Namespace())
        bridge.ip("link", "add", "br0", "type", "bridge", "forward_delay", "0")
        bridge.ip("link", "set", "br0", "up")
        keys = folder / "keys"
        subprocess.run([PROGRAM, "service", "keys", "--keys", keys, *names], check=True, capture_output=True)
        yield (keys, *(Machine(stack, folder, bridge, number, name) for number, name in enumerate(names, 1)))


def waits(machine):
    """A call that its service has begun and does not answer for long, as a process."""
    return subprocess.Popen(**machine.command("call", "calc", "2 + 2", *LONG), stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@timeout(300)
def test_a_service_of_another_machine_is_called_by_its_name_by_those_that_it_allows():
    with machines("a", "b", "c") as (keys, a, b, c):
        a.serve()
        a.export("--allow", "b", *a.keys(keys))
        b.import_from(a, words=b.keys(keys))
        b.reaches()
        # Deadlines cross although the clocks are hours apart.
        report = json.loads(b.cli("call", "calc", "1 / 4", "--repeat", "100", "--deadline", f"{int(PATIENCE_S)}s", "--json").stdout)
        print(report)
        assert "Late" not in json.dumps(report) and a.cli("service", "stats", "calc", "--json").returncode == 0
        served = json.loads(a.cli("service", "stats", "calc", "--json").stdout)["answers"]
        assert served["served"] >= 101 and served["late"] == 0, served
        listed = b.cli("service", "ls").stdout.splitlines()
        assert listed[1].split()[:2] == ["calc", "a"], listed
        assert json.loads(b.cli("service", "ls", "--json").stdout)["services"][0]["machines"] == ["a"]
        # Another machine of the same authority, and one without a key.
        refused = c.import_from(a, words=c.keys(keys))
        refused.wait_line(lambda line: "not offered to this machine" in line)
        plain = c.import_from(a, words=["--no-tls"])
        plain.wait_line(lambda line: "tombolo: a:" in line)
        assert "no service" in c.call("1 + 1")
        # What is imported is not exported again.
        b.export(*b.keys(keys))
        again = c.import_from(b, words=c.keys(keys))
        again.wait_line(lambda line: "runs on a third machine" in line)


@timeout(300)
def test_however_a_machine_ends_its_calls_end_with_one_named_answer():
    with machines("a", "b") as (keys, a, b):
        def slow():
            return a.serve("--delay-ms", str(int(PATIENCE_S * 1000)))

        service = slow()
        export = a.export(*a.keys(keys))
        importer = b.import_from(a, words=b.keys(keys))
        importer.wait_line(lambda line: "is registered" in line)

        def ends(how, within_s, expected):
            call = waits(b)
            service.wait_line(lambda line: line == "working")
            how()
            began = time.monotonic()
            _, said = call.communicate(timeout=PATIENCE_S)
            took = time.monotonic() - began
            print(f"{expected}: {took:.2f} s")
            assert expected in said and took < within_s, (said, took)

        # Killed: its kernel says so at once.
        ends(lambda: export.signal(signal.SIGKILL), LATE_S, "has gone")
        until("the name to go", lambda: "no service" in b.call("1 + 1"))
        service.kill()
        service, since = slow(), len(importer.lines)
        export = a.export(*a.keys(keys))
        importer.wait_line(lambda line: "is registered" in line, since=since)
        # Without a network nothing says so.
        ends(lambda: a.cable("down"), DEAD_AFTER_S + LATE_S, "has gone")
        until("the name to go", lambda: "no service" in b.call("1 + 1"))
        service.kill()
        service, since = slow(), len(importer.lines)
        a.cable("up")
        importer.wait_line(lambda line: "is registered" in line, since=since)
        # The service itself: the export says so for it.
        ends(lambda: service.signal(signal.SIGKILL), LATE_S, "fail")
        a.serve()
        b.reaches()
        # Stopped, it is no dead machine: the caller's own time ends its call.
        export.signal(signal.SIGSTOP)
        began = time.monotonic()
        assert "time" in b.call("1 + 1", "--timeout", "1s") and time.monotonic() - began < 1 + LATE_S
        export.signal(signal.SIGCONT)
        b.reaches()


@timeout(300)
def test_calls_go_on_while_one_of_several_machines_is_there():
    with machines("a", "b", "c") as (keys, a, b, c):
        for machine in (a, b):
            machine.serve()
            machine.export(*machine.keys(keys))
        importer = c.import_from(a, b, words=["--pick", "sticky", *c.keys(keys)])
        for machine in (a, b):
            importer.wait_line(lambda line, name=machine.name: f"{name} is there" in line)
        c.reaches()

        def served(machine):
            return json.loads(machine.cli("service", "stats", "calc", "--json").stdout)["answers"]["served"]

        before = served(b)
        for partition in range(2):
            for machine, other in ((a, b), (b, a)):
                since = len(importer.lines)
                machine.cable("down")
                importer.wait_line(lambda line, name=machine.name: f"{name} is gone" in line, since=since)
                c.reaches()
                machine.cable("up")
                importer.wait_line(lambda line, name=machine.name: f"{name} is there" in line, since=since)
                c.reaches()
                assert "no service" not in c.call("6 * 7"), f"partition {partition}: {machine.name} of {other.name}"
        assert served(b) > before


@timeout(120)
def test_bad_arguments_are_told_with_what_to_do():
    with machines("a", "b") as (keys, a, b):
        for words, expected in [
            (["keys", "--keys", keys, "a"], "exists already"),
            (["keys", "--keys", keys, "Node_1"], "not a valid machine name"),
            (["export", "calc", "--listen", "nowhere"], "--keys"),
            (["export", "calc", "--listen", "nowhere", "--no-tls"], "such as 0.0.0.0:7000"),
            (["export", "calc", "--listen", "192.0.2.1:7000", "--no-tls"], "listening at 192.0.2.1:7000"),
            (["export", "c/c", "--listen", f"{a.address}:7000", "--no-tls"], "not a valid service name"),
            (["export", "calc", "--listen", f"{a.address}:7000", "--keys", keys, "--machine", "z"], "z.pem"),
            (["import", "calc", "--from", f"{b.address}:7000", *a.keys(keys)], "MACHINE=ADDRESS:PORT"),
            (["import", "calc", "--from", "b=nowhere", *a.keys(keys)], "a port"),
            (["import", "calc", "--from", f"b={b.address}:1", "--from", f"b={b.address}:1", *a.keys(keys)], "named twice"),
        ]:
            done = a.cli("service", *words)
            assert done.returncode != 0 and expected in done.stderr, (words, done.stderr)
