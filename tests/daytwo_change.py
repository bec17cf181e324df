"""`tombolo set`, `unset`, `forward`, `rule` and `config`, and the same by the API: a fabric that runs is changed without its file.
Traffic shows that a change acts, and that members which it is not about lose no frame."""

import json
import os
import subprocess
import sys

from daytwo_policy import ADDRESS, connects, denied, members, text
from lib import Process, scratch, timeout, until
from lib.fabric import PROGRAM
from lib.http import socket_in

# Sends a numbered datagram every few milliseconds until standard input is closed; prints how many.
SENDER = """
import selectors, socket, sys
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
wait = selectors.DefaultSelector()
wait.register(sys.stdin, selectors.EVENT_READ)
sent = 0
while not wait.select(0.004):
    out.sendto(b"%d" % sent, (sys.argv[1], 4000))
    sent += 1
out.sendto(b"end", (sys.argv[1], 4000))
print("sent", sent, flush=True)
"""

# Prints how many different datagrams came in.
COUNTER = """
import socket
come = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
come.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
come.bind(("", 4000))
print("listening", flush=True)
seen = set()
while (data := come.recv(64)) != b"end":
    seen.add(data)
    if len(seen) == 1:
        print("first", flush=True)
print("seen", len(seen), flush=True)
"""

# Seconds until so many bytes have come back from a server that sends back what it gets.
TRANSFER = """
import socket, sys, threading, time
peer = socket.create_connection((sys.argv[1], 22), timeout=60)
count, begun = int(sys.argv[2]), time.monotonic()
threading.Thread(target=peer.sendall, args=(bytes(count),), daemon=True).start()
while count > 0:
    count -= len(peer.recv(1 << 16)) or sys.exit("closed")
print(time.monotonic() - begun)
"""


def in_space(space, program, *words, **options):
    command = ["ip", "netns", "exec", str(space), sys.executable, "-c", program, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, **options).stdout


def transfer_s(spaces, source, target, count):
    return float(in_space(spaces[source], TRANSFER, ADDRESS[target], count))


def change(fabric, *words, code=0):
    """A command with `--json`, and its report."""
    done = fabric.cli(*words, "--json", check=False)
    assert done.returncode == code, f"exit code {done.returncode}, expected {code}: {done.stdout}{done.stderr}"
    return json.loads(done.stdout)


def sections(report):
    return {change["section"]: (change["action"], change["outcome"]) for change in report["changes"]}


def forwarded(fabric, port=8080):
    """Whether a server answers behind a forward of the fabric's host."""
    connection = socket_in(fabric.netns)
    with connection:
        connection.settimeout(3)
        try:
            connection.connect(("127.0.0.1", port))
            connection.sendall(b"x")
            return connection.recv(1) == b"x"
        except OSError:
            return False


@timeout(300)
def test_what_is_changed_by_command_acts_and_others_lose_no_frame():
    with members(text()) as (fabric, spaces):
        counter = Process([sys.executable, "-c", COUNTER], name="counter", netns=spaces["ids"])
        counter.wait_line(lambda line: "listening" in line, 60)
        sender = subprocess.Popen(["ip", "netns", "exec", str(spaces["app"]), sys.executable, "-c", SENDER, ADDRESS["ids"]],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            counter.wait_line(lambda line: "first" in line, 60)
            written = fabric.file.read_text()
            # A rule.
            assert connects(spaces, "web", "db", 22)
            words = ("rule", "add", "deny", "--from", "web", "--to", "db", "--protocol", "tcp", "--port", "22")
            assert sections(change(fabric, *words, "--dry-run")) == {"policy": ("add", "planned")}
            assert connects(spaces, "web", "db", 22), "a dry run changes nothing"
            assert sections(change(fabric, *words)) == {"policy": ("add", "done")}
            before = denied(fabric, "web")
            assert not connects(spaces, "web", "db", 22, seconds=2) and denied(fabric, "web") > before
            assert connects(spaces, "web", "db", 5432)
            assert change(fabric, "rule", "ls") == [{"action": "deny", "from": "web", "to": "db", "protocol": "tcp", "ports": 22}]
            change(fabric, "rule", "rm", "1")
            assert connects(spaces, "web", "db", 22)
            # A rate: 6 Mbit at 2 Mbit/s, but for the burst, and for the last turn of the port, which
            # takes what has come and owes for it: 64 KB and more on a busy machine.
            report = change(fabric, "set", "tap.web.rate.send=2M", "tap.web.rate.send_burst=64K")
            assert sections(report) == {"tap.web": ("change", "done")}, report
            assert transfer_s(spaces, "web", "db", 750_000) > 1.5
            change(fabric, "unset", "tap.web.rate")
            until("the transfer to be as fast as before", lambda: transfer_s(spaces, "web", "db", 750_000) < 1.5)
            # A guard.
            spaces["web"].ip("link", "set", "web", "address", "02:00:00:00:00:99")
            assert connects(spaces, "web", "db", 22)
            change(fabric, "set", "tap.web.guard=mac")
            assert not connects(spaces, "web", "db", 22, seconds=2), "its MAC address is another one"
            change(fabric, "set", "tap.web.guard=off")
            assert connects(spaces, "web", "db", 22)
            # An uplink, and a forward through it.
            assert not forwarded(fabric)
            assert sections(change(fabric, "set", "network.lan.uplink=kernel")) == {"network.lan": ("change", "done")}
            until("a ping from the host through the new uplink", lambda: fabric.netns.pings(ADDRESS["db"]))
            change(fabric, "forward", "add", "127.0.0.1:8080", "web:22")
            until("an answer through the new forward", lambda: forwarded(fabric))
            change(fabric, "forward", "rm", "127.0.0.1:8080")
            assert not forwarded(fabric)
            assert fabric.file.read_text() == written, "the file is the user's"
            # Members that none of it was about.
            sent, _ = sender.communicate("\n", timeout=60)
            counter.wait_line(lambda line: line.startswith("seen"), 60)
            seen = next(line for _, line in counter.lines if line.startswith("seen"))
            print(f"untouched members: {sent.strip()}, {seen}")
            assert sent.split()[1] == seen.split()[1] and int(sent.split()[1]) > 100, (sent, seen)
        finally:
            sender.kill()
            sender.communicate()
            counter.kill()
        fabric.down()


@timeout(240)
def test_a_daemon_that_follows_keeps_what_was_changed_and_the_file_ends_it():
    with members(text()) as (fabric, spaces):
        change(fabric, "rule", "add", "deny", "--from", "web", "--to", "db", "--port", "22", "--protocol", "tcp")
        change(fabric, "set", "tap.app.groups=back")
        fabric.cli("port", "add", "extra", "--kind", "stream")
        expected = {"rule": [{"action": "deny", "from": "web", "to": "db", "ports": 22, "protocol": "tcp"}],
                    "tap": {"app": {"groups": "back"}}}

        def holds(how):
            config = change(fabric, "config")
            assert config["changes"] == expected, (how, config["changes"])
            assert config["config"]["port"]["extra"]["kind"] == "stream" and "[port.extra]" in config["toml"], (how, config)
            assert fabric.cli("config", "--changes").stdout.startswith("rule = [{"), how
            until(f"both servers to be reached or denied {how}",
                  lambda: connects(spaces, "web", "db", 5432) and not connects(spaces, "web", "db", 22, seconds=2))
            assert sections(change(fabric, "set", "tap.app.groups=back")) == {}, f"{how}: what runs is not what was asked for"

        holds("while it runs")
        fabric.replace()
        holds("after a handover")
        fabric.kill()
        fabric.start()
        holds("after a kill")
        # What was added is changed, and removed, like what the file has; it stays an addition.
        report = change(fabric, "set", "port.extra.rate.send=5M")
        assert sections(report) == {"port.extra": ("change", "done")}, report
        assert change(fabric, "config")["changes"] == expected
        assert change(fabric, "config")["config"]["port"]["extra"]["rate"] == {"send": "5M"}
        assert sections(change(fabric, "unset", "port.extra")) == {"port.extra": ("remove", "done")}
        assert "extra" not in fabric.cli("config").stdout
        # A member of the file that was removed stays away, too, until the file is applied.
        fabric.cli("port", "del", "ids")
        assert change(fabric, "config")["changes"]["tap"]["ids"] is None
        fabric.kill()
        fabric.start()
        assert "ids" not in [port["name"] for port in fabric.status()["ports"]]
        dry = change(fabric, "apply", "--dry-run")
        assert dry["reverted"] == ["rule", "tap.app.groups", "tap.ids"], dry
        assert sections(dry) == {"policy": ("remove", "planned"), "tap.app": ("change", "planned"), "tap.ids": ("add", "planned")}, dry
        said = fabric.cli("apply").stdout
        assert "tap.app.groups was changed while the fabric ran, and is as in the file from now on" in said, said
        assert change(fabric, "config")["changes"] == {}
        assert connects(spaces, "web", "db", 22)
        assert change(fabric, "apply")["reverted"] == []
        fabric.down()


@timeout(240)
def test_what_was_added_outlives_an_apply_whatever_was_changed_about_it():
    with members(text()) as (fabric, _):
        for name in ("set", "named", "both"):
            fabric.cli("port", "add", name, "--kind", "stream")
        change(fabric, "set", "port.set.rate.send=5M")
        change(fabric, "rule", "add", "deny", "--from", "named", "--to", "both", "--port", "22", "--protocol", "tcp")
        change(fabric, "set", "port.both.rate.send=7M")

        def rates():
            ports = change(fabric, "config")["config"]["port"]
            return {name: ports[name].get("rate", {}).get("send") for name in ("set", "named", "both")}

        def kept(how):
            assert rates() == {"set": "5M", "named": None, "both": "7M"}, (how, rates())

        kept("changed")
        assert "set" not in change(fabric, "config")["changes"]["port"]
        wrong = fabric.cli("set", "port.set.rate.send=nonsense", check=False)
        assert wrong.returncode == 2 and "change: port.set.rate: expected" in wrong.stderr, wrong.stderr
        fabric.kill()
        fabric.start()
        kept("after a kill")
        fabric.replace()
        kept("after a handover")
        dry = change(fabric, "apply", "--dry-run")
        assert sorted(dry["kept"]) == ["both", "named", "set"] and dry["reverted"] == ["rule"], dry
        report = change(fabric, "apply")
        assert sections(report) == {"policy": ("remove", "done")}, report
        kept("after an apply")
        assert change(fabric, "config")["changes"] == {}
        # A rule that goes again leaves nothing of what it named.
        change(fabric, "rule", "add", "deny", "--from", "named")
        assert "named" in change(fabric, "config")["changes"]["port"]
        change(fabric, "rule", "rm", "1")
        assert "named" not in str(change(fabric, "config")["changes"])
        kept("at the end")
        fabric.cli("port", "del", "both")
        fabric.kill()
        fabric.start()
        assert sections(change(fabric, "apply")) == {}
        assert "both" not in fabric.cli("config").stdout
        fabric.down()


@timeout(180)
def test_a_change_by_the_api_is_checked_as_a_file_is():
    with members(text()) as (fabric, _):
        before = fabric.status()["ports"]

        def refused(patch, status, *words, query=""):
            code, answer = fabric.ask("PATCH", f"/v1/config{query}", patch)
            assert code == status and all(word in answer["error"] for word in words), (patch, code, answer)
            return answer["problems"]

        [problem] = refused({"tap": {"web": {"rate": {"send": "5 parsecs"}}}}, 400, "change: tap.web.rate", "nothing was changed")
        assert problem["key"].startswith("tap.web.rate") and problem["line"] == 0, problem
        problems = refused({"network": {"lan": {"mtu": 7, "uplnk": "kernel"}}}, 400, "2 faults in the change")
        assert sorted(problem["key"] for problem in problems) == ["network.lan.mtu", "network.lan.uplnk"], problems
        assert "did you mean \"uplink\"" in str(problems), problems
        refused([1], 400, "RFC 7386")
        refused({"rule": [{"action": None}]}, 400, "null")
        refused({"name": "other"}, 409, "other")
        refused({"tap": {"far": {"netns": "no-such-space"}}}, 409, "tap.far.netns", "1 fault on this machine")
        refused({"tap": {"web": {"guard": "mac"}}}, 409, "read it again", query="?revision=0123456789abcdef")
        # What members have learned is refused by the plan.
        code, report = fabric.ask("PATCH", "/v1/config", {"network": {"lan": {"subnet": "10.235.0.0/24"}}})
        assert code == 400 or report["outcome"] == "refused", report
        code, read = fabric.ask("GET", "/v1/config")
        assert code == 200 and read["config"]["network"]["lan"]["subnet"] == "10.234.0.0/24" and read["changes"] == {}, read
        patch = {"tap": {"web": {"guard": "mac", "storm": None}}}
        code, report = fabric.ask("PATCH", f"/v1/config?dry_run=true&revision={read['revision']}", patch)
        assert (code, report["outcome"]) == (200, "planned"), report
        assert fabric.status()["ports"][0]["guard"] == before[0]["guard"] and fabric.ask("GET", "/v1/config")[1] == read
        code, report = fabric.ask("PATCH", f"/v1/config?revision={read['revision']}", patch)
        assert (code, report["outcome"], len(report["changes"])) == (200, "done", 1), report
        [key] = report["changes"][0]["keys"]
        assert (key["key"], key["after"]) == ("guard", "mac"), key
        assert fabric.ask("GET", "/v1/config")[1]["changes"] == {"tap": {"web": {"guard": "mac"}}}
        event = fabric.ask("GET", "/v1/events")[1]["events"][-1]
        assert event["kind"] == "apply" and event["text"].startswith("change of tap.web.guard, tap.web.storm: 1 change done"), event
        for words, code, says in [
            (("set", "tap.web"), 2, "expected KEY=VALUE"),
            (("set", "tap.web.guard=of"), 2, "did you mean \"off\""),
            (("unset", "tap.web.gard"), 1, "did you mean \"tap.web.guard\""),
            (("forward", "rm", "127.0.0.1:9"), 1, "it has none"),
            (("rule", "rm", "1"), 1, "0 rules"),
        ]:
            done = fabric.cli(*words, check=False)
            assert done.returncode == code and says in done.stderr, (words, done)
        fabric.down()


@timeout(120)
def test_a_member_that_a_rule_names_is_not_removed_before_the_rule():
    with members(text()) as (fabric, _):
        fabric.cli("rule", "add", "deny", "--from", "web", "--to", "db")
        done = fabric.cli("port", "del", "web", check=False)
        assert done.returncode == 1 and 'the configuration names "web" in rule' in done.stderr, done
        assert any(port["name"] == "web" for port in fabric.status()["ports"])
        fabric.cli("rule", "rm", "1")
        fabric.cli("port", "del", "web")
        assert not any(port["name"] == "web" for port in fabric.status()["ports"])


@timeout(120)
def test_a_start_goes_without_a_change_that_the_machine_refuses_by_then():
    with members(text()) as (fabric, _):
        fabric.cli("set", "tap.web.guard=mac")
        space = f"tmb-passes{os.getpid()}"
        subprocess.run(["ip", "netns", "add", space], check=True)
        try:
            fabric.cli("set", f"tap.passes.netns={space}", "tap.passes.network=lan")
            assert any(port["name"] == "passes" for port in fabric.status()["ports"])
            fabric.kill()
        finally:
            subprocess.run(["ip", "netns", "del", space], check=True)
        fabric.start()
        ports = {port["name"] for port in fabric.status()["ports"]}
        assert "web" in ports and "passes" not in ports, ports
        assert json.loads(fabric.cli("config", "--json").stdout)["changes"] == {}


@timeout(120)
def test_variables_that_are_set_to_nothing_are_not_set_and_a_killed_fabric_is_named():
    with members(text()) as (fabric, _):
        environment = dict(os.environ, TOMBOLO_RUNTIME="", TOMBOLO_STATE="", TOMBOLO_QEMU="", TOMBOLO_FABRIC="")
        asked = subprocess.run([str(PROGRAM), "status", "--file", str(fabric.file)], env=environment, capture_output=True, text=True, check=False)
        assert "no socket at /run/tombolo/" in asked.stderr, asked
        fabric.kill()
        empty = fabric.folder / "elsewhere"
        empty.mkdir()
        environment = dict(os.environ, **fabric.env)
        down = subprocess.run([str(PROGRAM), "down"], cwd=empty, env=environment, capture_output=True, text=True, check=False)
        assert down.returncode and f"the daemon of {fabric.name} left" in down.stderr and f"`tombolo down --fabric {fabric.name}`" in down.stderr, down
        fabric.start()


@timeout(120)
def test_apply_and_check_take_the_file_of_the_fabric_that_runs():
    with members(text()) as (fabric, _):
        elsewhere = fabric.folder / "elsewhere"
        elsewhere.mkdir()

        def there(*words):
            environment = dict(os.environ, **fabric.env)
            return subprocess.run([str(PROGRAM), *words], cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=60, check=False)

        for words in (("apply", "--dry-run"), ("apply", "--dry-run", "--fabric", fabric.name)):
            done = there(*words)
            assert done.returncode == 0 and f"{fabric.name}: would be: 0 added" in done.stdout, done
        checked = there("check")
        assert checked.returncode == 0 and checked.stdout.startswith(f"{fabric.file}: no faults"), checked
        # The file of the folder is another fabric's.
        (elsewhere / "tombolo.toml").write_text('name = "another"\n[network.lan]\n')
        done = there("apply", "--dry-run", "--fabric", fabric.name)
        assert done.returncode == 2 and "is of the fabric" in done.stderr, done
        assert there("apply", "--dry-run").returncode == 1
        assert there("check").stdout.startswith("tombolo.toml: no faults: 1 network, 0 machines")
        (elsewhere / "tombolo.toml").unlink()
        absent = there("apply", "--fabric", "absent")
        assert absent.returncode == 1 and 'no fabric named "absent" runs' in absent.stderr, absent


@timeout(60)
def test_what_is_for_one_machine_takes_no_machine_and_a_pipe_is_no_file():
    with scratch() as folder:
        file, fifo = folder / "one.toml", folder / "fifo"
        file.write_text('name = "one"\n[network.lan]\n')
        os.mkfifo(fifo)
        environment = dict(os.environ, TOMBOLO_RUNTIME=str(folder / "run"), TOMBOLO_STATE=str(folder / "state"))

        def refused(*words):
            done = subprocess.run([str(PROGRAM), *map(str, words)], env=environment, capture_output=True, text=True, timeout=30, check=False)
            assert done.returncode == 2, (words, done)
            return done.stderr

        for words in (("up", "--machine", "a", file), ("check", "--machine", "a", file), ("down", "-f", file, "--machine", "a")):
            assert "expected a section [machine.a], since --machine names that" in refused(*words), words
        assert "expected a regular file" in refused("up", fifo)
        file.write_text('name = "all"\n[machine.a]\naddress = "192.0.2.1"\n[machine.b]\naddress = "192.0.2.2"\n[network.lan]\n')
        # A command names an option that it takes.
        assert "--machine NAME" in refused("down", "-f", file)
        said = refused("status", "-f", file)
        assert "--fabric NAME-MACHINE" in said and "--machine NAME" not in said, said
