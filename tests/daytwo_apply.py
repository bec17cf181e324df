"""`tombolo apply` and `tombolo check`: a fabric that runs becomes what its edited file says. Traffic through what did not change
goes on; what cannot be done is refused before anything is changed; a daemon that is killed meanwhile loses nothing."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time

from lib import Fabric, Namespace, http_get, need_root, scratch, timeout, until
from lib.fabric import Api, PROGRAM
from lib.http import socket_in
from lib.netns import inside

SEED = 20261125
PATIENCE_S = 120
ECHO, WEB = "10.233.0.20", "10.233.0.21"

HEAD = """
name = "{name}"
[worker.main]
budget = 64
[network.lan]
subnet = "10.233.0.0/24"
uplink = "{uplink}"
"""
ECHO_CELL = """
[cell.echo]
app = "echo"
ip = "10.233.0.20"
accel = "tcg"
network = "lan"
"""
WEB_CELL = """
[cell.web]
app = "httpd"
ip = "10.233.0.21"
accel = "tcg"
network = "lan"
memory = "{memory}"
"""
HOST = """
[tap.host]
ip = "10.233.0.9"
network = "lan"
"""
GUEST = """
[port.guest]
kind = "stream"
network = "lan"
"""


def text(*sections, uplink="user", memory="32M"):
    """A file of these sections behind the head; with the kernel uplink the host is on the network by the uplink's tap."""
    host = HOST if uplink == "user" else ""
    whole = "".join((HEAD, host, *sections))
    return whole.replace("{name}", f"a{os.getpid()}").replace("{uplink}", uplink).replace("{memory}", memory)


@contextlib.contextmanager
def fabric_of(file_text):
    need_root()
    with Namespace() as space, scratch() as folder:
        space.way_out()
        with Fabric(folder, file_text, netns=space) as fabric:
            yield fabric, space


class Steady(threading.Thread):
    """One TCP connection to the echo cell, a few bytes every few milliseconds. `gap_s` is the longest wait for an answer."""

    def __init__(self, space, host=ECHO):
        super().__init__(daemon=True)
        self.space, self.host, self.error = space, host, None
        self.rounds, self.gap_s = 0, 0.0
        self.ended = threading.Event()
        self.connection = None

    def __enter__(self):
        until("a ping to the echo cell", lambda: self.space.pings(self.host), PATIENCE_S)

        def connect():
            self.connection = socket_in(self.space)
            self.connection.settimeout(5)
            with contextlib.suppress(OSError):
                self.connection.connect((self.host, 7))
                return True
            self.connection.close()
            return False

        until("a connection to the echo cell", connect, PATIENCE_S)
        # Longer than any recovery that TCP itself survives.
        self.connection.settimeout(PATIENCE_S)
        self.start()
        until("a first answer", lambda: self.rounds > 0, PATIENCE_S)
        return self

    def run(self):
        try:
            while not self.ended.is_set():
                begun = time.monotonic()
                data = os.urandom(32)
                self.connection.sendall(data)
                got = b""
                while len(got) < len(data):
                    more = self.connection.recv(len(data) - len(got))
                    if not more:
                        raise ConnectionError("the echo server closed the connection")
                    got += more
                assert got == data, "other bytes came back"
                self.rounds += 1
                self.gap_s = max(self.gap_s, time.monotonic() - begun)
                self.ended.wait(0.005)
        except Exception as error:  # noqa: BLE001 - told by `well`
            if not self.ended.is_set():
                self.error = f"{type(error).__name__}: {error}"

    def well(self):
        """The same connection has answered since this was called."""
        before = self.rounds
        until("an answer on the same connection", lambda: self.error or self.rounds > before + 1, PATIENCE_S)
        assert self.error is None, self.error

    def __exit__(self, *_):
        self.ended.set()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.join(10)
        self.connection.close()


def edit(fabric, file_text):
    fabric.file.write_text(file_text)


def apply(fabric, *words, code=0):
    """`tombolo apply --json`, and its report; `code` is the exit code that it must have."""
    done = fabric.cli("apply", fabric.file, "--json", *words, check=False)
    assert done.returncode == code, f"exit code {done.returncode}, expected {code}: {done.stdout}{done.stderr}"
    return json.loads(done.stdout)


def did(report):
    return {change["section"]: change["action"] for change in report["changes"]}


def pids(fabric):
    return {machine["name"]: machine["pid"] for machine in fabric.status()["machines"]}


def page(space, host, port=80):
    try:
        return http_get(host, port=port, seconds=5, netns=space).status == 200
    except (OSError, ValueError):
        return False


@timeout(240)
def test_what_did_not_change_goes_on_through_every_kind_of_change():
    with fabric_of(text(ECHO_CELL)) as (fabric, space), Steady(space) as steady:
        first = pids(fabric)["echo"]

        def step(file_text, expected):
            edit(fabric, file_text)
            dry = apply(fabric, "--dry-run")
            assert did(dry) == expected and dry["outcome"] == "planned", dry
            before = fabric.status()
            assert apply(fabric, "--dry-run") == dry, "a dry run changes nothing"
            assert [p["name"] for p in fabric.status()["ports"]] == [p["name"] for p in before["ports"]]
            report = apply(fabric)
            assert did(report) == expected and report["outcome"] == "done", report
            assert all(change["outcome"] == "done" for change in report["changes"]), report
            steady.well()
            assert pids(fabric)["echo"] == first, "the echo cell has another process"
            assert did(apply(fabric, "--dry-run")) == {}, "what was applied differs from what runs"

        step(text(ECHO_CELL, GUEST), {"port.guest": "add"})
        assert (fabric.folder / "run" / fabric.name / "guest.sock").exists()
        limited = GUEST + 'rate = { send = "1M" }\nmac = "02:00:00:00:00:77"\n'
        step(text(ECHO_CELL, limited), {"port.guest": "change"})
        assert fabric.port("guest")["details"]["rate"] == {"send": {"bits": 1_000_000}} and fabric.port("guest")["guard"], fabric.port("guest")
        step(text(ECHO_CELL, limited, WEB_CELL), {"cell.web": "add"})
        until("the page of the new cell", lambda: page(space, WEB), PATIENCE_S)
        web = pids(fabric)["web"]
        step(text(ECHO_CELL, limited, WEB_CELL, memory="40M"), {"cell.web": "restart"})
        assert pids(fabric)["web"] != web
        until("the page of the cell that started again", lambda: page(space, WEB), PATIENCE_S)
        more = '[network.ops]\nsubnet = "10.234.0.0/24"\n[tap.far]\nnetwork = "ops"\nip = "10.234.0.9"\n'
        step(text(ECHO_CELL, WEB_CELL, more, memory="40M"), {"network.ops": "add", "tap.far": "add", "port.guest": "remove"})
        until("a ping to the new network's gateway", lambda: space.pings("10.234.0.1"), PATIENCE_S)
        step(text(ECHO_CELL, WEB_CELL, memory="40M"), {"network.ops": "remove", "tap.far": "remove"})
        faster = text(ECHO_CELL).replace("budget = 64", "budget = 32").replace('uplink = "user"', 'uplink = "none"')
        step(faster, {"worker.main": "change", "network.lan": "change", "cell.web": "remove"})
        assert not (fabric.folder / "run" / fabric.name / "web.sock").exists()
        with_dns = faster.replace('uplink = "none"', 'uplink = "none"\ndomain = "other.test"')
        step(with_dns, {"network.lan": "change"})
        print(f"the longest wait for an answer of a cell that no change was about: {steady.gap_s * 1000:.0f} ms")
        fabric.down()


@timeout(240)
def test_forwards_come_and_go_with_both_uplinks():
    for uplink in ("user", "kernel"):
        def forward(port):
            return f'[[forward]]\nlisten = "127.0.0.1:{port}"\nto = "web:80"\n'

        base = text(ECHO_CELL, WEB_CELL, uplink=uplink)
        with fabric_of(base) as (fabric, space), Steady(space) as steady:
            until("the page", lambda: page(space, WEB), PATIENCE_S)
            edit(fabric, base + forward(8080))
            report = apply(fabric)
            assert did(report) == {"network.lan": "change"}, report
            assert report["changes"][0]["keys"][0] == {"key": "forward tcp 127.0.0.1:8080", "before": None, "after": "web:80"}, report
            until(f"the page through the new forward ({uplink})", lambda: page(space, "127.0.0.1", 8080), PATIENCE_S)
            listed = fabric.cli("forward", "ls").stdout.splitlines()[1].split()
            assert listed[:3] == ["tcp", "127.0.0.1:8080", "web:80"], listed
            assert json.loads(fabric.cli("forward", "ls", "--json").stdout)["forwards"] == fabric.status()["forwards"]
            edit(fabric, base + forward(8081))
            apply(fabric)
            until("the page through the moved forward", lambda: page(space, "127.0.0.1", 8081), PATIENCE_S)
            assert not page(space, "127.0.0.1", 8080), "the old forward is still there"
            steady.well()
            edit(fabric, base)
            apply(fabric)
            assert fabric.status()["forwards"] == []
            steady.well()
            fabric.down()


@timeout(240)
def test_a_forward_moves_between_networks_whichever_comes_first():
    """Each network has a passt of its own, and both listen at the same place: the old one must have gone."""
    early = '[network.early]\nsubnet = "10.234.0.0/24"\nuplink = "user"\n[cell.first]\napp = "httpd"\naccel = "tcg"\nnetwork = "early"\n'
    base = text(ECHO_CELL, WEB_CELL, early)

    def forward(to):
        return f'[[forward]]\nlisten = "127.0.0.1:8080"\nto = "{to}:80"\n'

    with fabric_of(base + forward("web")) as (fabric, space), Steady(space) as steady:
        until("the page", lambda: page(space, "127.0.0.1", 8080), PATIENCE_S)
        # The listener of a process that is being killed may be free in time by chance.
        for to in ("first", "web") * 5:
            edit(fabric, base + forward(to))
            report = apply(fabric)
            assert did(report) == {"network.early": "change", "network.lan": "change"} and report["outcome"] == "done", report
            [told] = fabric.status()["forwards"]
            assert told["to"] == f"{to}:80" and told["fault"] is None, told
            until(f"the page of {to}", lambda: page(space, "127.0.0.1", 8080), PATIENCE_S)
            assert did(apply(fabric, "--dry-run")) == {}
        steady.well()
        fabric.down()


@timeout(180)
def test_what_cannot_be_done_is_refused_before_anything_is_changed():
    base = text(ECHO_CELL)
    with fabric_of(base) as (fabric, space), Steady(space) as steady:
        before = fabric.status()
        edit(fabric, base.replace("10.233.0.", "10.235.0.") + GUEST)
        report = apply(fabric, code=1)
        assert report["outcome"] == "refused", report
        lan = next(change for change in report["changes"] if change["section"] == "network.lan")
        assert lan["action"] == "refuse" and "`subnet`" in lan["reason"] and "echo" in lan["reason"], lan
        assert "port.guest" in did(report), "the plan is whole"
        # Several faults of this machine at once, each with its line.
        taken = socket_in(space)
        with taken:
            taken.bind(("127.0.0.1", 8085))
            taken.listen()
            wrong = base + '[tap.a]\nnetwork = "lan"\nnetns = "no-such-space"\n[tap.b]\nnetwork = "lan"\ndevice = "out0"\n' \
                           '[[forward]]\nlisten = "127.0.0.1:8085"\nto = "echo:7"\n[[forward]]\nlisten = "192.0.2.1:80"\nto = "echo:7"\n' \
                           '[worker.far]\ncpu = 4000\n[network.far]\nsubnet = "10.236.0.0/24"\nworker = "far"\n'
            edit(fabric, wrong)
            lines = {word: wrong[:wrong.index(word)].count("\n") + 1 for word in ("netns =", "device =", '"127.0.0.1:8085"', '"192.0.2.1', "cpu =")}
            for command in (("apply", fabric.file), ("check", fabric.file)):
                done = fabric.cli(*command, check=False)
                assert done.returncode == 1 and "5 faults on this machine" in done.stderr, done.stderr
                for word, line in lines.items():
                    assert f"tombolo.toml:{line}:" in done.stderr, f"{word} in line {line}: {done.stderr}"
                assert "another program listens there (process" in done.stderr and "no address of this machine" in done.stderr, done.stderr
            faults = json.loads(fabric.cli("check", fabric.file, "--json", check=False).stdout)["faults"]
            assert sorted(fault["line"] for fault in faults) == sorted(lines.values()), faults
        edit(fabric, "name =\n")
        assert fabric.cli("apply", fabric.file, check=False).returncode == 2
        edit(fabric, base)
        assert fabric.cli("check", fabric.file).stdout.endswith("1 machine, 1 tap, 0 ports, 0 forwards\n")
        assert did(apply(fabric, "--dry-run")) == {}
        after = fabric.status()
        assert [(p["name"], p["counters"]["faults"]) for p in after["ports"]] == [(p["name"], p["counters"]["faults"]) for p in before["ports"]]
        again = fabric.cli("up", "-d", fabric.file, check=False)
        assert again.returncode == 1 and "`tombolo apply` changes it" in again.stderr, again.stderr
        steady.well()
        fabric.down()


@timeout(180)
def test_a_step_that_fails_is_told_and_the_next_apply_does_the_rest():
    base = text(ECHO_CELL)
    with fabric_of(base) as (fabric, space), Steady(space) as steady:
        # A folder where the socket belongs: found only when it is made.
        blocked = fabric.folder / "blocked.sock"
        (blocked / "x").mkdir(parents=True)
        more = GUEST + '[port.blocked]\nkind = "stream"\nnetwork = "lan"\nsocket = "blocked.sock"\n'
        edit(fabric, text(ECHO_CELL, more))
        report = apply(fabric, code=3)
        outcomes = {change["section"]: change["outcome"] for change in report["changes"]}
        assert report["outcome"] == "partly" and outcomes == {"port.guest": "done", "port.blocked": "failed"}, report
        assert "blocked.sock" in next(change["error"] for change in report["changes"] if change["error"]), report
        (blocked / "x").rmdir()
        blocked.rmdir()
        assert did(apply(fabric)) == {"port.blocked": "add"}
        # What was added by hand is not the file's to end, and becomes the file's when that has it.
        fabric.cli("port", "add", "extra", "--kind", "stream")
        report = apply(fabric)
        assert did(report) == {} and report["kept"] == ["extra"], report
        extra = '[port.extra]\nkind = "stream"\nnetwork = "lan"\n'
        edit(fabric, text(ECHO_CELL, more, extra))
        report = apply(fabric)
        assert report["kept"] == [] and set(did(report)) <= {"port.extra"}, report
        edit(fabric, text(ECHO_CELL, more))
        assert did(apply(fabric)) == {"port.extra": "remove"}
        # A limit that was set by hand ends with the next change of the file's.
        fabric.cli("port", "set", "guest", "--rate", "send=5M")
        edit(fabric, text(ECHO_CELL, more.replace('network = "lan"\n', 'network = "lan"\nrate = { send = "2M" }\n', 1)))
        assert did(apply(fabric)) == {"port.guest": "change"}
        assert fabric.port("guest")["details"]["rate"]["send"]["bits"] == 2_000_000, fabric.port("guest")
        steady.well()
        fabric.down()


@timeout(300)
def test_a_daemon_that_is_killed_in_an_apply_loses_nothing():
    dice = random.Random(SEED)
    print(f"seed {SEED}")
    base = text(ECHO_CELL, WEB_CELL)
    changed = text(ECHO_CELL, WEB_CELL, GUEST, memory="40M").replace("budget = 64", "budget = 32")
    with fabric_of(base) as (fabric, space), Steady(space) as steady:
        first = pids(fabric)["echo"]
        until("the page", lambda: page(space, WEB), PATIENCE_S)
        whole = 0.5
        for round_ in range(4):
            edit(fabric, changed if round_ % 2 == 0 else base)
            command = [*inside(fabric.netns), str(PROGRAM), "apply", str(fabric.file)]
            began = time.monotonic()
            asked = subprocess.Popen(command, env=dict(os.environ, **fabric.env), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if round_ == 0:
                # The whole of it once, to know how long it takes.
                assert asked.wait(PATIENCE_S) == 0
                whole = time.monotonic() - began
                edit(fabric, base)
                asked = subprocess.Popen(command, env=dict(os.environ, **fabric.env), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                # The moment at which the daemon dies, not a wait for anything.
                asked.wait(dice.uniform(0.0, 1.1) * whole)
            fabric.kill()
            asked.wait(PATIENCE_S)
            fabric.start()
            steady.well()
            status = fabric.status()
            is_changed = round_ % 2 == 0 and round_ > 0
            assert any(port["name"] == "guest" for port in status["ports"]) == is_changed, round_
            assert pids(fabric)["echo"] == first, "the echo cell was started again"
            assert did(apply(fabric)) == {}, "the next `up` is as the file says"
            until("the page after the kill", lambda: page(space, WEB), PATIENCE_S)
        fabric.down()


def with_argument(word):
    """The processes of QEMU that have `word` among their arguments."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            words = open(f"/proc/{entry}/cmdline", "rb").read().split(b"\0") if entry.isdigit() else []
            found += [int(entry)] if os.fsencode(word) in words and b"qemu" in words[0] else []
    return found


@timeout(240)
def test_no_machine_starts_or_stops_behind_an_apply():
    """A machine with a disk that ignores its power button makes an apply take 15 s. Meanwhile machines that crash become able to
    start, and they are due: the one that the file has no more must not start, nor the one that it changes as it was before."""
    crashing = '[vm.{0}]\nkernel = "disk"\nmemory = "{1}"\naccel = "tcg"\nrestart = "always"\nqemu = ["-readconfig", "{2}"]\n'
    slow = '[vm.slow]\ndisk = "disk"\nmemory = "{}"\naccel = "tcg"\n'
    with scratch() as folder:
        (folder / "disk").write_bytes(bytes(1 << 20))
        gates = {name: str(folder / f"{name}.conf") for name in ("gone", "changed", "same")}

        def text(memory, *names):
            head = f'name = "b{os.getpid()}"\n[network.lan]\n'
            return head + slow.format(memory) + "".join(crashing.format(n, memory if n == "changed" else "16M", gates[n]) for n in names)

        with Fabric(folder, text("16M", *gates)) as fabric:
            def asked(*words):
                command, before = [str(PROGRAM), *map(str, words)], len(fabric.process.lines)
                process = subprocess.Popen(command, env=dict(os.environ, **fabric.env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                fabric.process.wait_line(lambda line: "asked to shut down" in line, since=before)
                return process

            edit(fabric, text("24M", "changed", "same"))
            waits = asked("apply", fabric.file)
            for gate in gates.values():
                open(gate, "w").close()
            said, _ = waits.communicate(timeout=PATIENCE_S)
            assert waits.returncode == 0, said
            until("the machine that no change was about", lambda: pids(fabric)["same"], PATIENCE_S)
            until("the machine that was changed", lambda: pids(fabric)["changed"], PATIENCE_S)
            assert with_argument(gates["gone"]) == [], "it runs on, and the fabric does not know it"
            for name in ("changed", "same"):
                assert with_argument(gates[name]) == [pids(fabric)[name]], f"{name} runs as the fabric says, once"
            memory = open(f"/proc/{pids(fabric)['changed']}/cmdline").read().split("\0")
            assert "24M" in memory[memory.index("-m") + 1], memory
            # An apply does not come between the two halves of a restart, nor does it wait for them.
            edit(fabric, text("16M", "changed", "same"))
            restarts = asked("cell", "restart", "slow", "--fabric", fabric.name)
            # Trying again helps with each of these, and each says so.
            for path, body, why in (("/v1/apply", fabric.file.read_text(), "stopped or restarted"), ("/v1/machines", "slow", "being stopped"),
                                    ("/v1/machines/slow/restart", None, "being stopped already")):
                with contextlib.closing(Api(fabric.runtime / "api.sock")) as api:
                    api.request("POST", path, body)
                    answer = api.getresponse()
                    assert (answer.status, answer.headers["Retry-After"]) == (503, "1"), (path, answer.status)
                    assert why in json.load(answer)["error"], path
            assert did(apply(fabric, "--dry-run")) == {"vm.slow": "restart", "vm.changed": "restart"}
            said, _ = restarts.communicate(timeout=PATIENCE_S)
            assert restarts.returncode == 0, said
            assert pids(fabric)["slow"], "it runs again"
            fabric.down()
            assert not any(with_argument(gate) for gate in gates.values())


@timeout(180)
def test_a_daemon_that_is_told_to_leave_during_an_apply_leaves_when_that_is_done():
    """A machine with a disk that ignores its power button makes the apply take 15 s."""
    with scratch() as folder:
        (folder / "disk").write_bytes(bytes(1 << 20))
        text = f'name = "l{os.getpid()}"\n[network.lan]\n[vm.slow]\ndisk = "disk"\naccel = "tcg"\nmemory = "{{}}M"\n'
        with Fabric(folder, text.format(16), options=["--leave-on-term"]) as fabric:
            first = pids(fabric)["slow"]
            edit(fabric, text.format(24))
            command, before = [str(PROGRAM), "apply", str(fabric.file)], len(fabric.process.lines)
            changes = subprocess.Popen(command, env=dict(os.environ, **fabric.env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            fabric.process.wait_line(lambda line: "asked to shut down" in line, since=before)
            fabric.process.signal(signal.SIGTERM)
            assert fabric.process.wait(PATIENCE_S) == 0, fabric.process.tail()
            said, _ = changes.communicate(timeout=PATIENCE_S)
            assert changes.returncode == 0 and "1 restarted" in said, said
            waits = [line for _, line in fabric.process.lines[before:] if "next daemon" in line and "leaving" not in line]
            assert len(waits) == 1 and "its end is waited for" in waits[0], waits
            fabric.start()
            second = pids(fabric)["slow"]
            assert second not in (None, first), "the machine that the apply started is the next daemon's"
            fabric.down()


@timeout(120)
def test_up_waits_for_a_machine_that_is_started_again():
    """Its first start fails, for want of a file; the next one, after a pause of a second or more, finds it."""
    with scratch() as folder:
        name, gate = f"w{os.getpid()}", folder / "gate.conf"
        file = folder / "tombolo.toml"
        file.write_text(f'name = "{name}"\n[network.lan]\n[cell.web]\napp = "httpd"\naccel = "tcg"\nrestart = "always"\n'
                        f'qemu = ["-readconfig", "{gate}"]\n')
        env = dict(os.environ, TOMBOLO_RUNTIME=str(folder / "run"), TOMBOLO_STATE=str(folder / "state"))
        run = lambda *words: subprocess.run([str(PROGRAM), *words], env=env, capture_output=True, text=True)  # noqa: E731
        up = subprocess.Popen([str(PROGRAM), "up", "-d", f"--wait={PATIENCE_S}", str(file)], env=env, stderr=subprocess.PIPE, text=True)
        try:
            def has_failed():
                status = run("status", "--fabric", name, "--json")
                [machine] = json.loads(status.stdout)["machines"] if status.returncode == 0 else [{"state": ""}]
                return machine["state"] == "failed" and machine["restart_in_s"] is not None

            until("the first failure", has_failed, PATIENCE_S, every=0.02)
            gate.touch()
            _, said = up.communicate(timeout=PATIENCE_S)
            assert up.returncode == 0, (up.returncode, said)
            [machine] = json.loads(run("status", "--fabric", name, "--json").stdout)["machines"]
            assert machine["state"] == "running" and machine["restarts"] > 0, machine
        finally:
            down = run("down", "--fabric", name)
        assert down.returncode == 0, down.stderr


@timeout(60)
def test_up_tells_which_machines_die_at_once():
    with scratch() as folder:
        name = f"d{os.getpid()}"
        file = folder / "tombolo.toml"
        file.write_text(f'name = "{name}"\n[network.lan]\n[cell.web]\napp = "httpd"\naccel = "tcg"\nqemu = ["-no-such-option"]\n')
        env = dict(os.environ, TOMBOLO_RUNTIME=str(folder / "run"), TOMBOLO_STATE=str(folder / "state"))
        run = lambda *words: subprocess.run([str(PROGRAM), *words], env=env, capture_output=True, text=True)  # noqa: E731
        try:
            up = run("up", "-d", str(file))
            assert up.returncode == 3, up
            assert "web died at once: QEMU's exit code 1" in up.stderr and "-no-such-option: invalid option" in up.stderr, up.stderr
        finally:
            down = run("down", "--fabric", name)
        assert down.returncode == 0, down.stderr
