"""Calls with deadlines between cells and processes of this machine in a fabric of the program's own: over direct links by `tombolo service
bridge`, both ways, and over TCP where a cell has only a network."""

import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

from lib import Fabric, Namespace, Process, need_root, scratch, timeout, until
from lib.fabric import PROGRAM
from lib.process import descriptors

PATIENCE_S = 120
# Time enough for any machine: what is late is so by far.
IN_TIME = "30s"
LINKS = """
name = "{name}"
[network.lan]
[cell.calc]
app = "calc"
args = "net=none {calc}"
accel = "tcg"
[link.calls]
between = ["calc"]
seats = 1
protocol = 0x4002
"""
ASKER = """
[cell.asker]
app = "calc"
args = "net=none role=client link=back count=200 deadline_us=30000000 timeout_ms=60000 {asker}"
accel = "tcg"
attach = "ivshmem"
[link.back]
between = ["asker"]
seats = 1
protocol = 0x4002
"""
BY_NAME = """
name = "{name}"
[network.lan]
[cell.calc]
app = "calc"
args = "net=none service_us=2000000"
accel = "tcg"
[link.calls]
between = ["calc"]
service = "named"
[cell.asker]
app = "calc"
args = "net=none role=client link=back count=1 deadline_us=0 timeout_ms=60000"
accel = "tcg"
attach = "ivshmem"
[link.back]
between = ["asker"]
to = "named"
"""
# Cells with a network are adopted after a crash; a call of `slow` takes half a second.
GOES_ON = """
name = "{name}"
[network.lan]
subnet = "10.236.9.0/24"
[cell.slow]
app = "calc"
args = "link=slow service_us=500000"
ip = "10.236.9.20"
accel = "tcg"
[link.slow]
between = ["slow"]
service = "slow"
"""
MORE = """
[cell.quick]
app = "calc"
args = "link=quick"
ip = "10.236.9.21"
accel = "tcg"
[link.quick]
between = ["quick"]
service = "quick"
callers = "everybody"
[cell.asker]
app = "calc"
args = "role=client link=back count={count} deadline_us=0 timeout_ms=60000"
ip = "10.236.9.22"
accel = "tcg"
[link.back]
between = ["asker"]
to = "slow"
"""
OVER_TCP = """
name = "{name}"
[network.lan]
subnet = "10.236.7.0/24"
[cell.calc]
app = "calc"
args = "tcp=7000"
ip = "10.236.7.20"
accel = "tcg"
[cell.asker]
app = "calc"
args = "role=client tcp=10.236.7.20:7000 count=200 deadline_us=30000000 timeout_ms=60000"
ip = "10.236.7.21"
accel = "tcg"
[tap.host]
ip = "10.236.7.9"
"""


@contextlib.contextmanager
def bridge(fabric, *words):
    """A bridge that runs."""
    command = [PROGRAM, "service", "bridge", *words]
    process = Process(command, name="bridge", netns=fabric.netns, env=fabric.env, cwd=fabric.folder)
    try:
        yield process
    finally:
        process.kill()


def call(fabric, service, text, *words):
    """One call by `tombolo call`: the reply, or what was said on standard error."""
    done = fabric.cli("call", service, text, *words, check=False)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip()


def registered(fabric, service):
    until(f"service {service}", lambda: call(fabric, service, "1 + 1") == "2", PATIENCE_S)


def report(fabric, machine):
    """What the client's cell says at its end."""
    found = []

    def is_there():
        # Whole lines only: the last one may be on its way.
        found[:] = [json.loads(line) for line in fabric.console(machine).split("\n")[:-1] if line.startswith('{"app":"calc"')]
        return bool(found)

    until(f"the report of {machine}", is_there, PATIENCE_S)
    return found[0]


@timeout(600)
def test_a_process_calls_a_cell_and_a_cell_calls_a_service_of_this_machine():
    text = LINKS.format(name=f"c{os.getpid()}", calc="") + ASKER.format(asker="")
    with scratch() as folder, Fabric(folder, text) as fabric, bridge(fabric, "calls", "--as", "adds") as there:
        registered(fabric, "adds")
        assert call(fabric, "adds", "6 * 7", "--deadline", IN_TIME) == "42"
        assert "late" not in call(fabric, "adds", "1 / 4", "--repeat", "100", "--deadline", IN_TIME, "--json")
        stats = json.loads(fabric.cli("service", "stats", "adds", "--json").stdout)
        assert stats["answers"]["served"] >= 102, stats
        # The reverse: the other cell's requests go to the service, which is served by the first
        # cell.
        with bridge(fabric, "back", "--no-service", "--to", "adds"):
            said = report(fabric, "asker")
            assert (said["replied"], said["late"], said["wrong"]) == (200, 0, 0), said
        there.signal(signal.SIGKILL)
        there.wait()
        # The next bridge takes the seat and the name.
        with bridge(fabric, "calls", "--as", "adds"):
            registered(fabric, "adds")


def under_way(fabric, *words):
    """A call of the service `slow` that has reached it, as a process that runs."""
    command = [str(PROGRAM), "call", "slow", "2 + 2", *words]
    process = subprocess.Popen(command, env=dict(os.environ, **fabric.env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until("the call to be under way", lambda: stats(fabric, "slow")["clients"] > 0)
    return process


def stats(fabric, service):
    return json.loads(fabric.cli("service", "stats", service, "--json").stdout)


def time_to_error(fabric):
    """Kills the cell while it serves; how long it took to tell who waits."""
    waits = under_way(fabric, "--timeout", "120s")
    os.kill(fabric.machine("calc")["pid"], signal.SIGKILL)
    killed = time.monotonic()
    _, said = waits.communicate(timeout=PATIENCE_S)
    took = time.monotonic() - killed
    assert "has gone" in said, said
    # With its cell the name goes: nobody is left to wait for one who does not answer.
    until("the name to go", lambda: "no service" in call(fabric, "slow", "1 + 1"), PATIENCE_S)
    return took


@timeout(600)
def test_deadlines_cross_and_a_cell_that_dies_ends_its_calls_at_once():
    # It is still busy when the second call comes, however long its process takes to start.
    text = LINKS.format(name=f"d{os.getpid()}", calc="service_us=2000000")
    with scratch() as folder, Fabric(folder, text) as fabric, bridge(fabric, "calls", "--as", "slow"):
        registered(fabric, "slow")
        before = stats(fabric, "slow")["answers"]["served"]
        busy = under_way(fabric, "--deadline", IN_TIME)
        late = call(fabric, "slow", "3 + 3", "--deadline", "100ms")
        assert "the deadline passed without an answer" in late, late
        late = call(fabric, "slow", "3 + 3", "--deadline", "100ms", "--wait-late", f"{PATIENCE_S}s")
        assert "the deadline had passed before the service could begin" in late, late
        assert busy.communicate(timeout=PATIENCE_S)[0].strip() == "4"
        assert stats(fabric, "slow")["answers"]["served"] == before + 1
        # The machine may be busy with other things: of some tries one shows what ours costs.
        took = [time_to_error(fabric)]
        while took[-1] >= 0.5 and len(took) < 10:
            fabric.cli("cell", "run", "calc", "--fabric", fabric.name)
            registered(fabric, "slow")
            took.append(time_to_error(fabric))
        assert took[-1] < 0.5, f"told so many seconds after the kill: {took}"


@timeout(600)
def test_a_cell_is_called_by_the_name_in_the_fabrics_file_and_what_is_cancelled_is_so_in_the_cell():
    with scratch() as folder, Fabric(folder, BY_NAME.format(name=f"n{os.getpid()}")) as fabric:
        assert call(fabric, "named", "6 * 7", "--wait", "60s") == "42"
        # The other cell's calls go to the service that the first one is. In its first run it may
        # have asked before the name was there.
        report(fabric, "asker")
        fabric.cli("cell", "stop", "asker", "--fabric", fabric.name, check=False)
        fabric.console_path("asker").unlink()
        fabric.cli("cell", "run", "asker", "--fabric", fabric.name)
        said = report(fabric, "asker")
        assert (said["replied"], said["wrong"]) == (1, 0), said
        answers = lambda: json.loads(fabric.cli("service", "stats", "named", "--json").stdout)["answers"]  # noqa: E731
        before = answers()
        command, env = [str(PROGRAM), "call", "named"], dict(os.environ, **fabric.env)
        start = lambda *words: subprocess.Popen([*command, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: E731
        # The cell serves one at a time: the others wait in the cell, and end there, before the
        # first is done.
        there = stats(fabric, "named")["clients"]
        calls = [start("1 + 1")]
        until("the first to be there", lambda: stats(fabric, "named")["clients"] > there)
        calls += [start("2 + 2", "--timeout", "100ms"), start("3 + 3", "--ttl", "50ms")]
        said = [process.communicate(timeout=PATIENCE_S) for process in calls]
        assert said[0][0].strip() == "2" or said[1][0].strip() == "4" or said[2][0].strip() == "6", said
        until("the ends of all", lambda: sum(answers().values()) - sum(before.values()) >= 3)
        ended = {name: count - before[name] for name, count in answers().items() if count != before[name]}
        # Of the two that would not wait for the first one was cancelled (or its caller had gone by
        # then), and one expired.
        assert ended.get("cancelled", 0) + ended.get("expired", 0) >= 1, (ended, said)
        # After a crash the cell is started again, since its driver was not on the network, and the
        # bridge goes on.
        fabric.kill()
        fabric.start()
        registered(fabric, "named")
        fabric.down()
        assert not list((folder / "run" / "services").glob("*")), "no name is left"


class Calling(threading.Thread):
    """Calls a service of this machine again and again, by one client after the other, until its end is asked for."""

    def __init__(self, fabric, service, repeat, *words):
        super().__init__(daemon=True)
        self.command = [str(PROGRAM), "call", service, "6 * 7", "--repeat", str(repeat), "--json", *words]
        self.env, self.over = dict(os.environ, **fabric.env), threading.Event()
        self.served, self.error = 0, None
        self.start()

    def run(self):
        while not self.over.is_set() and self.error is None:
            done = subprocess.run(self.command, env=self.env, capture_output=True, text=True)
            report = json.loads(done.stdout) if done.returncode == 0 else {}
            if report.get("outcomes") == {"served": report.get("calls")}:
                self.served += report["calls"]
            else:
                self.error = f"{self.command[2]}: {done.stdout} {done.stderr}"

    def end(self):
        self.over.set()
        self.join(PATIENCE_S)
        assert not self.is_alive() and self.error is None, self.error
        return self.served


def bridges(fabric):
    """The processes that pass calls on, by link: who sits behind the one machine of it."""
    links = {link["name"]: link["peers"] for link in fabric.status()["links"] if link["kind"] == "direct"}
    return {name: peer["pid"] for name, peers in links.items() for peer in peers if peer["id"] == 1}


def settled(fabric, *machines):
    """Waits until these could be adopted after a crash."""
    owner = fabric.folder / "run" / fabric.name / "owner.json"
    known = lambda: {m["pid"] for m in json.loads(owner.read_text())["settled"]}  # noqa: E731
    until("the machines' drivers on the network", lambda: {fabric.machine(m)["pid"] for m in machines} <= known(), PATIENCE_S)


def without_a_gap(again):
    """Calls both ways, some of half a second, while `again(fabric)` has another daemon; not one of them may end otherwise than it should."""
    with scratch() as folder, Fabric(folder, (GOES_ON + MORE).format(name=f"g{os.getpid()}", count=12)) as fabric:
        registered(fabric, "slow")
        registered(fabric, "quick")
        # In its first run it may have asked before the name was there.
        fabric.cli("cell", "stop", "asker", "--fabric", fabric.name, check=False)
        fabric.console_path("asker").unlink()
        fabric.cli("cell", "run", "asker", "--fabric", fabric.name)
        settled(fabric, "slow", "quick", "asker")
        there, machines = bridges(fabric), {m["name"]: m["pid"] for m in fabric.status()["machines"]}
        assert sorted(there) == ["back", "quick", "slow"] and machines.keys() == {"slow", "quick", "asker"}, (there, machines)
        callers = [Calling(fabric, "slow", 3), Calling(fabric, "quick", 100, "--interval", "5ms")]
        is_asking = lambda: '{"app":"calc"' not in fabric.console("asker")  # noqa: E731
        rounds = 0
        # A cell that ends while no daemon runs is started again, and asks once more.
        while is_asking() or rounds < 3:
            again(fabric)
            rounds += 1
            assert not [caller.error for caller in callers if caller.error], [caller.error for caller in callers]
        assert bridges(fabric) == there, "the bridges go on"
        said = report(fabric, "asker")
        assert (said["calls"], said["replied"], said["wrong"]) == (12, 12, 0), said
        served = [caller.end() for caller in callers]
        print(f"{rounds} daemons; calls served: {served[0]} of half a second, {served[1]} others, and {said['replied']} of the cell's")
        assert min(served) > 0 and rounds >= 3
        assert {name: fabric.machine(name)["pid"] for name in ("slow", "quick")} == {name: machines[name] for name in ("slow", "quick")}
        assert not [text for text in fabric.status()["warnings"] if "link" in text], fabric.status()["warnings"]
        fabric.down()
        assert not list((folder / "run" / "services").iterdir()), "no name is left"


@timeout(600)
def test_calls_in_flight_go_on_while_the_daemon_is_replaced():
    without_a_gap(Fabric.replace)


@timeout(600)
def test_calls_in_flight_go_on_while_the_daemon_is_killed_and_started_again():
    def crash(fabric):
        settled(fabric, "slow", "quick")
        fabric.kill()
        fabric.start()

    without_a_gap(crash)


def refused_by_the_store(fabric):
    """The processes that the fd store answers nothing, by its own word (crates/ivshmem/src/fd_store.rs)."""
    list_of, entry, prefix, found = 3, 5, b"refuse:", set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as store:
        store.settimeout(60)
        store.connect(str(fabric.folder / "run" / fabric.name / "keeper.sock"))
        store.send(struct.pack("<BBH", list_of, 0, len(prefix)) + prefix)
        while (reply := store.recv(4096))[0] == entry:
            found.add(int(reply[4 + len(prefix):4 + struct.unpack_from("<H", reply, 2)[0]]))
    return found


def has_ended(pid):
    """It is not there, or not reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


@timeout(600)
def test_a_bridge_that_is_killed_is_back_and_one_that_is_stopped_ends_with_its_fabric():
    with scratch() as folder, Fabric(folder, GOES_ON.format(name=f"k{os.getpid()}")) as fabric:
        registered(fabric, "slow")
        for _ in range(3):
            first = bridges(fabric)["slow"]
            waits = under_way(fabric, "--timeout", "60s")
            os.kill(first, signal.SIGKILL)
            killed = time.monotonic()
            _, said = waits.communicate(timeout=PATIENCE_S)
            assert waits.returncode != 0 and "has gone" in said, said
            until("another bridge", lambda: bridges(fabric).get("slow") not in (first, None), every=0.02)
            back_s = time.monotonic() - killed
            registered(fabric, "slow")
        assert back_s < 2, f"back after {back_s:.1f} s"
        assert any("its bridge ended (signal: 9 (SIGKILL))" in line for line in fabric.process.tail().splitlines()), fabric.process.tail()
        # Of the daemon it has nothing but what its link's server and its clients gave it.
        pid = bridges(fabric)["slow"]
        log = str(fabric.folder / "run" / fabric.name / "slow.link.log")
        common = set(descriptors(pid).values()) & set(descriptors(fabric.process.pid).values())
        known = {"/dev/null", "anon_inode:[eventfd]", "anon_inode:[eventpoll]", "/memfd:tombolo-link:slow (deleted)"}
        assert common <= known and log in set(descriptors(pid).values()), (common, set(descriptors(pid).values()))
        assert {pid, fabric.machine("slow")["pid"]} <= refused_by_the_store(fabric), "a member may not use what is for the owner"
        with open(f"/proc/{pid}/status") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        assert (status["NoNewPrivs"], status["Seccomp"], int(status["CapBnd"], 16) & ~6) == ("1", "2", 0), status
        # Who is stopped is replaced while the fabric stands, and ended with it.
        os.kill(pid, signal.SIGSTOP)
        until("another bridge", lambda: bridges(fabric).get("slow") not in (pid, None))
        registered(fabric, "slow")
        os.kill(bridges(fabric)["slow"], signal.SIGSTOP)
        fabric.down()
        assert not list((folder / "run" / "services").iterdir()), "no name is left"
        # The same where the daemon is not there to do it.
        fabric.start()
        registered(fabric, "slow")
        pid = bridges(fabric)["slow"]
        os.kill(pid, signal.SIGSTOP)
        fabric.kill()
        done = fabric.cli("down", "--fabric", fabric.name)
        assert f"a bridge, process {pid}, was ended" in done.stdout + done.stderr, (done.stdout, done.stderr)
        fabric.nothing_left()
        assert not list((folder / "run" / "services").iterdir()), "no name is left"


@timeout(600)
def test_a_bridge_ends_by_itself_where_a_killed_daemon_and_its_machine_are_gone():
    with scratch() as folder, Fabric(folder, GOES_ON.format(name=f"e{os.getpid()}")) as fabric:
        registered(fabric, "slow")
        pid, machine = bridges(fabric)["slow"], fabric.machine("slow")["pid"]
        fabric.kill()
        assert call(fabric, "slow", "6 * 7") == "42", "without a daemon, too"
        os.kill(machine, signal.SIGKILL)
        until("the ends of the fd store and the bridge", lambda: not [left for left in fabric.leftovers() if left.startswith("process")], PATIENCE_S)
        assert has_ended(pid)
        fabric.start()
        registered(fabric, "slow")
        fabric.down()


@timeout(600)
def test_a_changed_service_of_a_link_leaves_its_cell_and_its_memory_alone():
    text = (GOES_ON + MORE.split("[cell.asker]")[0]).format(name=f"a{os.getpid()}")
    with scratch() as folder, Fabric(folder, text) as fabric:
        registered(fabric, "slow")
        registered(fabric, "quick")
        first = {name: fabric.machine(name)["pid"] for name in ("slow", "quick")}
        joins = {link["name"]: link["joins"] for link in fabric.status()["links"] if link["kind"] == "direct"}

        def change(old, new, expected):
            fabric.file.write_text(fabric.file.read_text().replace(old, new))
            report = json.loads(fabric.cli("apply", fabric.file, "--json").stdout)
            assert {c["section"]: [c["action"], *(k["key"] for k in c["keys"])] for c in report["changes"]} == expected, report
            assert report["outcome"] == "done", report

        change('service = "slow"', 'service = "other"', {"link.slow": ["change", "service"]})
        registered(fabric, "other")
        assert "no service" in call(fabric, "slow", "1 + 1"), "the name of before is gone"
        change('callers = "everybody"\n', "", {"link.quick": ["change", "callers"]})
        registered(fabric, "quick")
        # Each takes the name of the other, whichever comes first in the file.
        swapped = text.replace('service = "slow"', 'service = "quick"', 1)[::-1].replace('"kciuq" = ecivres', '"rehto" = ecivres', 1)[::-1]
        change(fabric.file.read_text(), swapped.replace('callers = "everybody"\n', ""), {"link.slow": ["change", "service"], "link.quick": ["change", "service"]})
        registered(fabric, "quick")
        registered(fabric, "other")
        begun = time.monotonic()
        assert call(fabric, "quick", "6 * 7", "--deadline", IN_TIME) == "42" and time.monotonic() - begun >= 0.5, "it is the slow cell's name"
        assert {name: fabric.machine(name)["pid"] for name in first} == first, "a cell was started again"
        now = {link["name"]: link["joins"] for link in fabric.status()["links"] if link["kind"] == "direct"}
        assert all(now[name] > joins[name] for name in joins), (joins, now, "they are the links of before, with another bridge")
        fabric.down()
        assert not list((folder / "run" / "services").iterdir()), "no name is left"


def bridge_processes(fabric):
    """The bridges that there are, by their command lines."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if words[1:2] == [b"link-bridge"] and words[2].startswith(bytes(fabric.folder)):
                found.add(int(entry.name))
    return found


@timeout(600)
def test_a_daemon_that_is_killed_while_it_starts_leaves_one_bridge_at_most():
    moments = random.Random(20261123)
    with scratch() as folder, Fabric(folder, GOES_ON.format(name=f"m{os.getpid()}")) as fabric:
        registered(fabric, "slow")
        settled(fabric, "slow")
        for number in range(12):
            fabric.kill()
            if number % 3 == 0:
                for pid in bridge_processes(fabric):
                    os.kill(pid, signal.SIGKILL)
            daemon = Process([PROGRAM, "up", fabric.file], name="tombolo", env=fabric.env, cwd=fabric.folder)
            time.sleep(moments.uniform(0, 0.15))
            daemon.signal(signal.SIGKILL)
            daemon.wait()
            fabric.start()
            registered(fabric, "slow")
            there = bridge_processes(fabric)
            assert len(there) == 1 and set(bridges(fabric).values()) == there, (number, there, bridges(fabric))
        fabric.down()
        assert not list((folder / "run" / "services").iterdir()), "no name is left"


@timeout(600)
def test_a_bridge_whose_section_has_changed_is_replaced_and_one_that_is_not_asked_for_ends():
    def crash(fabric):
        settled(fabric, "slow", "quick")
        fabric.kill()
        fabric.start()

    first = (GOES_ON + MORE).format(name=f"s{os.getpid()}", count=1)
    renamed = first.replace('service = "slow"', 'service = "renamed"')
    unasked = first.replace('service = "slow"', "seats = 1\nprotocol = 0x4002")
    assert len({first, renamed, unasked}) == 3
    with scratch() as folder, Fabric(folder, first) as fabric:
        registered(fabric, "slow")
        registered(fabric, "quick")
        machine = fabric.machine("slow")["pid"]
        for again in (Fabric.replace, crash):
            settled(fabric, "slow", "quick")
            there = bridges(fabric)
            fabric.file.write_text(renamed)
            again(fabric)
            registered(fabric, "renamed")
            now = bridges(fabric)
            assert now["slow"] != there["slow"] and has_ended(there["slow"]) and now["quick"] == there["quick"], (there, now)
            assert sorted(p.name for p in (folder / "run" / "services").iterdir()) == ["quick", "renamed"]
            fabric.file.write_text(unasked)
            again(fabric)
            assert has_ended(now["slow"])
            until("its seat to be free", lambda: "slow" not in bridges(fabric))
            assert sorted(p.name for p in (folder / "run" / "services").iterdir()) == ["quick"]
            fabric.file.write_text(first)
            again(fabric)
            registered(fabric, "slow")
        assert fabric.machine("slow")["pid"] == machine
        fabric.down()


@timeout(600)
def test_calls_go_over_tcp_where_a_cell_has_only_a_network():
    need_root()
    with Namespace() as space, scratch() as folder, Fabric(folder, OVER_TCP.format(name=f"t{os.getpid()}"), netns=space) as fabric:
        said = report(fabric, "asker")
        assert (said["replied"], said["late"], said["wrong"]) == (200, 0, 0), said
        with bridge(fabric, "--tcp", "10.236.7.20:7000", "--as", "far") as there:
            registered(fabric, "far")
            assert call(fabric, "far", "6 * 7", "--deadline", IN_TIME) == "42"
            os.kill(fabric.machine("calc")["pid"], signal.SIGKILL)
            there.signal(signal.SIGTERM)
            there.wait()
