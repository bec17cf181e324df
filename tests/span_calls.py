"""Services across machines (`tombolo service export` and `import`). A machine is a network namespace with an address on a common bridge, a
folder of services of its own, and a monotonic clock that is hours apart from the others'."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time

from lib import Namespace, Process, need_root, scratch, timeout, until
from lib.containers import BUILT
from lib.fabric import PROGRAM, Api, Fabric
from lib.machine import SLOW
from lib.netns import Bridge

PATIENCE_S = 60 * SLOW
PORT = 7000
# A machine that vanishes is noticed within so much (DEAD_AFTER in crates/remote); then what a busy
# machine may add.
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
        bridge.join(self.space, name, self.address)

    def cable(self, state):
        """Takes the machine from the network without a word, or puts it back."""
        self.bridge.cable(self.name, state)

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

    def fabric(self, text):
        """A fabric of the machine, with this after its name."""
        folder = self.folder / "fabric"
        folder.mkdir(exist_ok=True)
        return self.stack.enter_context(OfMachine(folder, f'name = "{self.name}"\n{text}', self))

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


class OfMachine(Fabric):
    """A fabric whose runtime files are the machine's, so that its services are too."""

    def __init__(self, folder, text, machine):
        self.machine = machine
        super().__init__(folder, text, netns=machine.space)

    def start(self, *args):
        self.env.update(self.machine.environment)
        super().start(*args)


@contextlib.contextmanager
def machines(*names, network=Bridge):
    need_root()
    with scratch() as folder, contextlib.ExitStack() as stack:
        bridge = stack.enter_context(network())
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


def proof(keys, machine):
    return f'keys = "{keys}"\nmachine = "{machine.name}"\n'


def bridge(fabric):
    """The process that passes calls on."""
    return json.loads((fabric.runtime / "owner.json").read_text())["bridges"][0]["pid"]


@timeout(300)
def test_services_cross_as_the_files_say_while_daemons_are_replaced_and_killed():
    with machines("a", "b") as (keys, a, b):
        a.serve()
        one = a.fabric(f'[export.calc]\nlisten = "{a.address}:{PORT}"\nallow = "b"\n' + proof(keys, a))
        two = b.fabric(f'[import.calc]\nfrom = "a={a.address}:{PORT}"\n' + proof(keys, b))
        b.reaches()
        listed = b.cli("service", "ls").stdout.splitlines()
        assert listed[1].split()[:2] == ["calc", "a"], listed

        # A replaced daemon and a killed one leave it alone; the next one adopts it.
        for fabric in (one, two):
            before = bridge(fabric)
            fabric.replace()
            assert bridge(fabric) == before
            fabric.kill()
            assert b.call("6 * 7") == "42"
            fabric.start()
            assert bridge(fabric) == before
        b.reaches()
        # One that is killed is started again, and one that is stopped is ended and started again.
        for how in (signal.SIGKILL, signal.SIGSTOP):
            for fabric in (one, two):
                before = bridge(fabric)
                os.kill(before, how)
                until("another bridge", lambda f=fabric, p=before: bridge(f) != p, PATIENCE_S)
                b.reaches()
        # Another name here, by apply; then none.
        text = two.file.read_text()
        two.file.write_text(text + 'as = "far"\n')
        assert "import.calc" in two.cli("apply").stdout
        until("the other name", lambda: b.cli("call", "far", "6 * 7").stdout.strip() == "42", PATIENCE_S)
        assert "no service" in b.call("1 + 1")
        two.file.write_text('name = "b"\n[network.lan]\n')
        two.cli("apply")
        assert "far" not in b.cli("service", "ls").stdout
        # What cannot work is found before anything starts.
        one.file.write_text(one.file.read_text().replace(f'"{keys}"', '"nowhere"'))
        refused = one.cli("check", one.file, check=False)
        assert refused.returncode != 0 and "export.calc.keys" in refused.stderr and "tombolo service keys" in refused.stderr, refused.stderr
        for fabric in (one, two):
            fabric.cli("down", "--fabric", fabric.name)
            fabric.process.wait()
        assert "no service" in b.call("1 + 1")
        left = subprocess.run(["pgrep", "-f", f"machine-bridge {a.folder.parent}"], capture_output=True, text=True).stdout
        assert not left, left


@timeout(300)
def test_what_changes_around_an_export_or_import_is_told_or_followed():
    with machines("a", "b") as (keys, a, b):
        a.serve()
        taken = b.serve()
        one = a.fabric(f'[export.calc]\nlisten = "0.0.0.0:{PORT}"\n' + proof(keys, a))
        two = b.fabric(f'[import.calc]\nfrom = "a={a.address}:{PORT}"\n' + proof(keys, b))

        def warned():
            return [warning for warning in two.status()["warnings"] if "calls are not passed on" in warning]

        # The name is another service's, until that ends.
        until("the reason", warned, PATIENCE_S)
        assert '"calc"' in warned()[0], warned()
        taken.kill()
        b.reaches()
        until("no reason any more", lambda: not warned(), PATIENCE_S)
        # The export's own process is in the way of no address of its port, nor is one that a killed
        # daemon has left.
        everywhere, at_one = f'"0.0.0.0:{PORT}"', f'"{a.address}:{PORT}"'
        text, before = one.file.read_text(), bridge(one)
        one.file.write_text(text.replace(everywhere, at_one))
        assert "export.calc" in one.cli("apply").stdout and bridge(one) != before
        b.reaches()
        one.kill()
        before = bridge(one)
        one.file.write_text(text)
        one.start()
        assert bridge(one) != before
        b.reaches()
        # Other keys in the same folder: one side has them, then both.
        other = a.folder / "other-keys"
        subprocess.run([PROGRAM, "service", "keys", "--keys", other, "a", "b"], check=True, capture_output=True)
        for name in os.listdir(keys):
            shutil.copy(other / name, keys / name)
        assert "other keys" in one.cli("apply").stdout
        until("the old authority to be refused", lambda: "no service" in b.call("1 + 1"), PATIENCE_S)
        two.cli("apply")
        b.reaches()
        assert "other keys" not in two.cli("apply").stdout
        # What a running fabric does not start is not taken among what is added to it.
        for section in (f'[export.more]\nlisten = "{a.address}:{PORT + 1}"\ntls = false\n', f'[import.more]\nfrom = "{b.address}:{PORT}"\ntls = false\n'):
            with contextlib.closing(Api(one.runtime / "api.sock")) as api:
                api.request("POST", "/v1/ports", section)
                answer = api.getresponse()
                said = answer.read().decode()
            assert answer.status >= 400 and "can be added to a running fabric" in said, said


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
