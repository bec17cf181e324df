"""Seeing what happens in a fabric on its second day: events, logs, waits, lists, restarts. None of it needs root."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time

from lib import Fabric, Process, Skip, scratch, timeout, until
from lib.fabric import PROGRAM
from lib.machine import BUILD, ROOT

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
CELLS = """
name = "{name}"
[network.lan]
subnet = "10.236.0.0/24"
[cell.web]
app = "httpd"
network = "lan"
ip = "10.236.0.20"
accel = "tcg"
[cell.db]
app = "httpd"
network = "lan"
accel = "tcg"
"""


@contextlib.contextmanager
def standing(name):
    """A fabric with the cells `web` and `db`, once both are on the network."""
    with scratch() as folder, Fabric(folder, CELLS.format(name=f"{name}{os.getpid()}")) as fabric:
        fabric.cli("wait", "--timeout", 60)
        yield fabric


def events(fabric, *words):
    return [json.loads(line) for line in fabric.cli("events", "--json", *words).stdout.splitlines()]


def kinds(found, name):
    return [event["kind"] for event in found if event["name"] == name]


@timeout(240)
def test_what_happened_overnight_is_told_also_after_a_crash_and_when_the_fabric_is_down():
    with standing("ev") as fabric:
        fabric.cli("wait", "--for", "lease", "web")
        follower = Process([PROGRAM, "events", "--follow", "--json", "--since", "1s", "web"], name="events", env=fabric.env,
                           cwd=fabric.folder)
        # A link that comes up and goes down at once is not told.
        until("its port's start", lambda: "port-up" in kinds(events(fabric), "web"))
        pid = fabric.machine("web")["pid"]
        os.kill(pid, signal.SIGKILL)
        until("web's death", lambda: "death" in kinds(events(fabric), "web"))
        death = next(event for event in events(fabric, "--kind", "death"))
        assert (death["pid"], death["name"]) == (pid, "web") and "signal 9" in death["cause"], death
        follower.wait_line(lambda line: '"death"' in line, 30)
        until("its port's end", lambda: "port-down" in kinds(events(fabric), "web"))
        fabric.cli("cell", "restart", "web")
        fabric.cli("wait", "--for", "up", "web")
        until("its port's return", lambda: kinds(events(fabric), "web").count("port-up") == 2)
        before = events(fabric)
        assert [event["id"] for event in before] == list(range(1, len(before) + 1)), before
        expected = {"start", "port-up", "death", "port-down"}
        assert expected <= set(kinds(before, "web")), before
        assert any(event["kind"] == "lease" and "10.236.0.20" in event["text"] for event in before), before
        assert time.time() * 1000 - before[-1]["unix_ms"] < 60_000
        # The daemon is killed, and the next one goes on with the same numbers. A thread writes
        # them, for which nothing waits.
        last = f'"id":{before[-1]["id"]},'
        until("the last one on the disk", lambda: any(last in file.read_text() for file in fabric.folder.rglob("events.jsonl")))
        fabric.kill()
        fabric.start()
        fabric.cli("wait", "--timeout", 60)
        later = events(fabric)
        assert later[: len(before)] == before and later[len(before)]["id"] == before[-1]["id"] + 1
        assert [event["kind"] for event in later].count("up") == 2
        assert any(event["kind"] == "recovery" and "web: kept" in event["text"] for event in later), later
        # `up --replace` hands over between two numbers, and a follower goes on.
        fabric.cli("up", "-d", "--replace", fabric.file)
        fabric.cli("cell", "stop", "db")
        after = events(fabric)
        assert [event["id"] for event in after] == list(range(1, len(after) + 1)), after
        assert kinds(after, "db")[-1] in {"stop", "port-down"}, after
        fabric.cli("down")
        follower.wait_line(lambda line: "is down" in line or '"stop"' in line, 30)
        follower.stop()
        down = events(fabric)
        assert down[: len(after)] == after and down[-1]["kind"] in {"stop", "port-down"}, down[len(after):]
        assert "down" in [event["kind"] for event in down[len(after):]]
        assert events(fabric, "--since", "0s") == []
        stray = fabric.cli("events", "wbe")
        assert stray.stdout == "" and 'no event so far concerns "wbe"; did you mean "web"?' in stray.stderr, stray
        text = fabric.cli("events", "--last", 3).stdout.splitlines()
        assert len(text) == 3 and all(line.startswith("20") and "Z  " in line for line in text), text


@timeout(240)
def test_logs_are_merged_by_time_and_followed():
    with standing("lo") as fabric:
        follower = Process([PROGRAM, "logs", "-f", "web"], name="logs", env=fabric.env, cwd=fabric.folder)
        first = until("a line of web's console", lambda: fabric.cli("logs", "web").stdout.splitlines())
        # Its daemon runs in the foreground, as a service's does.
        assert "is up after" in fabric.cli("logs", "daemon").stdout, fabric.cli("logs").stdout
        assert all("  web  " in line for line in first), first
        # Its time may differ: the list may have been made before the daemon saw the line.
        text = first[0].split("  ", 1)[1]
        follower.wait_line(lambda line: text in line, 30)
        # Its new console has times of its own, after those of the other, which has said what it
        # says.
        seen = [""]
        until("db's console to rest", lambda: seen.append(fabric.cli("logs", "db").stdout) or seen[-1] == seen[-2] != "", every=0.25)
        restarted_ms = time.time() * 1000
        fabric.cli("cell", "restart", "web")
        fabric.cli("wait", "--for", "up", "web")
        lines = until("lines of both", lambda: (
            found := [json.loads(line) for line in fabric.cli("logs", "--json").stdout.splitlines()],
            {line["member"] for line in found} >= {"web", "db"})[1] and found)
        assert lines == sorted(lines, key=lambda line: line["unix_ms"])
        # Whole seconds would put the daemon's lines before those that a console had said earlier in
        # the same second.
        assert any(line["unix_ms"] % 1000 for line in lines if line["member"] == "daemon"), lines
        of_web = [line["unix_ms"] for line in lines if line["member"] == "web"]
        of_db = [line["unix_ms"] for line in lines if line["member"] == "db"]
        assert min(of_web) >= restarted_ms - 1000 > max(of_db) - 1000, (of_web, of_db, restarted_ms)
        until("the second start followed", lambda: sum(text.split(" in ")[0] in line for _, line in follower.lines) >= 2)
        wrong = fabric.cli("logs", "wbe", check=False)
        assert wrong.returncode == 1 and "web" in wrong.stderr, wrong.stderr
        fabric.cli("down")
        until("the follower's end", lambda: not follower.alive())
        kept = fabric.cli("logs", "-n", 2, "web").stdout.splitlines()
        assert len(kept) == 2 and all("  web  " in line for line in kept), kept


@timeout(240)
def test_fabrics_are_listed_waited_for_and_several_machines_are_stopped():
    with standing("wa") as fabric:
        found = json.loads(fabric.cli("ls", "--json").stdout)["fabrics"]
        assert [(line["name"], line["state"], line["running"]) for line in found] == [(fabric.name, "up", 2)], found
        assert str(fabric.file) in fabric.cli("ls").stdout
        assert fabric.cli("wait", "--for", "port", "db").returncode == 0
        late = fabric.cli("wait", "--for", "exit", "web", "--timeout", "0.3", check=False)
        assert late.returncode == 1 and "web is running" in late.stderr, late.stderr
        never = fabric.cli("wait", "nobody", check=False)
        assert never.returncode == 1 and "there are: db, web" in never.stderr, never.stderr
        done = fabric.cli("cell", "stop", "web", "nobody", "db", check=False)
        assert done.returncode == 3 and "web, db" in done.stdout and "nobody" in done.stderr, (done.stdout, done.stderr)
        assert fabric.cli("wait", "--for", "exit", "web").returncode == 0
        never = fabric.cli("wait", "--for", "lease", "web", check=False)
        assert never.returncode == 1, "its lease is still kept"
        both = json.loads(fabric.cli("cell", "restart", "web", "db", "--json").stdout)
        assert [machine["state"] for machine in both["machines"]] == ["running", "running"], both
        fabric.cli("wait", "--for", "lease", "web")
        # One that was added stays when it is restarted.
        fabric.cli("cell", "run", "httpd", "--name", "more", "--accel", "tcg")
        first = fabric.machine("more")["pid"]
        fabric.cli("cell", "restart", "more")
        assert fabric.machine("more")["pid"] not in {None, first}
        os.kill(fabric.machine("web")["pid"], signal.SIGKILL)
        assert fabric.cli("wait", "--for", "exit", "web", check=False).returncode == 1
        fabric.kill()
        found = json.loads(fabric.cli("ls", "--json").stdout)["fabrics"]
        assert [(line["state"], line["file"]) for line in found] == [("killed", str(fabric.file))], found
        fabric.start()


MORE = """
[worker.main]
[worker.second]
[network.more]
worker = "second"
[cell.late]
app = "httpd"
network = "more"
accel = "tcg"
"""


@timeout(240)
def test_a_worker_that_came_later_tells_of_its_ports_too():
    with standing("wk") as fabric:
        fabric.file.write_text(fabric.file.read_text() + MORE)
        fabric.cli("apply", fabric.file)
        # Nothing else happens in the fabric that could have the ports looked at.
        until("the port's start", lambda: "port-up" in kinds(events(fabric), "late"), 30)


@timeout(240)
def test_a_validator_of_others_accepts_the_answers():
    try:
        import jsonschema
    except ImportError:
        raise Skip("jsonschema is not installed: apt install python3-jsonschema") from None
    with standing("oa") as fabric:
        _, document = fabric.ask("GET", "/v1/openapi.json")
        for path, name in [
            ("/v1/status", "Status"),
            ("/v1/ports", "Ports"),
            ("/v1/ports/web", "PortReport"),
            ("/v1/machines", "Machines"),
            ("/v1/machines/web", "MachineReport"),
            ("/v1/events", "Events"),
            ("/v1/tables", "Tables"),
            ("/v1/config", "ConfigReport"),
        ]:
            status, answer = fabric.ask("GET", path)
            assert status == 200, (path, answer)
            schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
            jsonschema.Draft202012Validator(schema).validate(answer)
        status, fault = fabric.ask("GET", "/v1/machines/nobody")
        schema = {"$ref": "#/components/schemas/Fault", "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(fault)
        assert status == 404 and "there are: db, web" in fault["error"], fault
        # A schema that asks for more than there is refuses: the validator looks at what it is
        # given.
        strict = {"$ref": "#/components/schemas/Status", "required": ["nothing"], "components": document["components"]}
        assert not jsonschema.Draft202012Validator(strict).is_valid(fabric.ask("GET", "/v1/status")[1])


def test_a_validator_of_others_accepts_the_openapi_document():
    python = BUILD / "openapi/bin/python"
    if not python.exists():
        raise Skip("openapi-spec-validator is not installed: ./x daytwo installs it into build/openapi")
    document = ROOT / "crates/host/src/api/openapi.json"

    def judged(path):
        return subprocess.run([python, "-m", "openapi_spec_validator", path], capture_output=True, text=True)

    said = judged(document)
    assert said.returncode == 0, said
    # It refuses what is wrong, so its silence means something.
    with scratch() as folder:
        wrong = json.loads(document.read_text())
        wrong["paths"]["/v1/status"]["get"]["responses"] = []
        (folder / "wrong.json").write_text(json.dumps(wrong))
        assert judged(folder / "wrong.json").returncode != 0


@timeout(240)
def test_tables_captures_of_a_network_and_faults_of_flags():
    with standing("ta") as fabric:
        fabric.cli("wait", "--for", "lease", "web")
        capture = Process([PROGRAM, "capture", "--network", "lan", "--filter", "udp port 67 and udp port 68", "-w", "dhcp.pcapng"],
                          name="capture", env=fabric.env, cwd=fabric.folder)
        until("the capture's file", lambda: (fabric.folder / "dhcp.pcapng").exists())
        fabric.cli("cell", "restart", "db")
        # Requests and their answers, each once: the network is captured where frames enter it.
        until("frames", lambda: (fabric.folder / "dhcp.pcapng").read_bytes().count(bytes([99, 130, 83, 99])) >= 4)
        assert capture.stop() == 0, capture.tail()
        data = (fabric.folder / "dhcp.pcapng").read_bytes()
        assert b"gateway-lan" in data and b"db" in data
        wrong = fabric.cli("capture", "web", "--filter", "tcp prot 80", "-w", "none.pcapng", check=False)
        assert wrong.returncode == 2 and "at 2: expected `and`" in wrong.stderr, wrong.stderr
        tables = json.loads(fabric.cli("table", "mac", "--json").stdout)
        where = {entry["mac"]: entry["port"] for entry in tables["macs"]}
        web = next(entry for entry in tables["neighbours"] if entry["name"] == "web")
        assert (web["ip"], web["source"], where[web["mac"]]) == ("10.236.0.20", "lease", "web"), tables
        assert "10.236.0.20" in fabric.cli("table", "neighbours", "--network", "lan").stdout
        wrong = fabric.cli("cell", "run", "httpd", "--name", "Web_1", check=False)
        assert wrong.returncode == 2 and "request" not in wrong.stderr, wrong.stderr
        assert 'did you mean "web-1"?' in wrong.stderr, wrong.stderr
        wrong = fabric.cli("cell", "run", "httpd", "--name", "more", "--memory", "lots", check=False)
        assert wrong.returncode == 2 and "--memory: expected" in wrong.stderr, wrong.stderr
        for rate, found in (("send=10Q", 'found the string "10Q" for send'), ("send=1M,send=2M", "found send more than once"), ("sent=1M", "the key sent")):
            wrong = fabric.cli("port", "set", "web", "--rate", rate, check=False)
            assert wrong.returncode == 2 and wrong.stderr.startswith("tombolo: --rate: expected"), wrong.stderr
            assert found in wrong.stderr and "request" not in wrong.stderr, wrong.stderr
        wrong = fabric.cli("rule", "add", "deny", "--from", "nobody", check=False)
        assert wrong.returncode == 2 and wrong.stderr.startswith("tombolo: --from: expected"), wrong.stderr
        wrong = fabric.cli("forward", "add", "127.0.0.1:8080", "nobody:80", check=False)
        assert wrong.returncode == 2 and wrong.stderr.startswith("tombolo: MEMBER:PORT: expected"), wrong.stderr
        wrong = fabric.cli("set", "cell.wbe.memory=64M", check=False)
        assert wrong.returncode == 2 and 'did you mean "cell.web"?' in wrong.stderr, wrong.stderr
        # Another file with the same name.
        (fabric.folder / "other").mkdir()
        other = fabric.folder / "other" / "tombolo.toml"
        other.write_text(fabric.file.read_text())
        taken = fabric.cli("up", "-d", other, check=False)
        assert taken.returncode == 1 and str(fabric.file) in taken.stderr and str(other) in taken.stderr, taken.stderr


@timeout(120)
def test_a_console_prints_whole_lines_at_a_terminal():
    with standing("tt") as fabric:
        until("a console", lambda: "\n" in fabric.console("web"))
        ours, theirs = pty.openpty()
        env = dict(os.environ, **fabric.env)
        console = subprocess.Popen([PROGRAM, "cell", "console", "web"], stdin=theirs, stdout=theirs, stderr=theirs, env=env,
                                   cwd=fabric.folder)
        os.close(theirs)
        seen = bytearray()

        def lines():
            seen.extend(os.read(ours, 4096))
            return seen.count(b"\n") >= 1 + min(2, fabric.console("web").count("\n"))

        until("lines of the console", lines)
        os.write(ours, b"\x1d")
        assert console.wait(30) == 0
        os.close(ours)
        # A line feed alone would begin the next line below the end of this one.
        assert seen.count(b"\n") == seen.count(b"\r\n"), bytes(seen)


class Screen:
    """`tombolo top` at a terminal of 24 lines: what it writes, and what is on the screen now."""

    def __init__(self, fabric, columns):
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.before = termios.tcgetattr(self.ours)
        self.text = ""
        command = [PROGRAM, "top", "--interval", "0.3"]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=dict(os.environ, **fabric.env), cwd=fabric.folder)
        os.close(theirs)

    def shows(self, *words, absent=()):
        """Waits until a page has all of these words, and none of the others."""
        def is_shown():
            with contextlib.suppress(BlockingIOError):
                self.text += os.read(self.ours, 65536).decode()
            # Each page begins at the upper left corner, and the last one may not be whole yet.
            pages = self.text.split("\x1b[H")
            return len(pages) > 2 and all(word in pages[-2] for word in words) and not any(word in pages[-2] for word in absent)

        until(f"{words} on the screen", is_shown, 20)

    def press(self, keys):
        os.write(self.ours, keys)


@timeout(120)
def test_top_at_a_terminal_sorts_filters_fits_and_gives_the_screen_back():
    with standing("top") as fabric:
        for columns in (120, 40):
            screen = Screen(fabric, columns)
            os.set_blocking(screen.ours, False)
            try:
                screen.shows("web", "db", "q quit")
                if columns > 80:
                    screen.shows("sort: name")
                    screen.press(b"s")
                    screen.shows("sort: rx")
                screen.press(b"/we")
                screen.shows("web", "filter: we_", absent=("db ",))
                screen.press(b"\r")
                screen.shows("web", absent=("db ", "filter: we_"))
                screen.press(b"\x1b")
                screen.shows("web", "db ")
                longest = max(len(line) for line in ESCAPES.sub("", screen.text).replace("\r", "").split("\n"))
                assert longest <= columns, (longest, screen.text[-2000:])
                screen.press(b"q")
                assert screen.process.wait(30) == 0
                with contextlib.suppress(OSError):
                    while True:
                        screen.text += os.read(screen.ours, 65536).decode()
                assert screen.text.rstrip().endswith("\x1b[?25h\x1b[?1049l"), repr(screen.text[-200:])
                assert termios.tcgetattr(screen.ours) == screen.before, "the terminal is as it was"
            finally:
                screen.process.kill()
                screen.process.wait()
                os.close(screen.ours)
