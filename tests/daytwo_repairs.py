"""What is said of, and done about, things that others took away from a fabric that runs: a tap, the route that passt needs. And what
commands say where only they know."""

import contextlib
import json
import subprocess

from daytwo_change import change, in_space, sections
from faults_uplink import counters
from lib import Fabric, Namespace, need_root, scratch, timeout, until
from lib.fabric import PROGRAM, Api

TAPS = """
name = "repairs"
[network.lan]
subnet = "10.233.0.0/24"
[tap.web]
netns = "{web}"
ip = "10.233.0.2"
[tap.db]
netns = "{db}"
ip = "10.233.0.3"
"""

USER = """
name = "noroute"
[network.lan]
subnet = "10.234.0.0/24"
uplink = "user"
[port.guest]
kind = "stream"
mac = "02:00:00:00:00:07"
ip = "10.234.0.7"
[[forward]]
listen = "127.0.0.1:8080"
to = "guest:80"
"""

PING = """
import socket, sys
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
out.connect((sys.argv[1], 9))
out.send(b"x")
out.settimeout(20)
try:
    out.recv(1)
except ConnectionRefusedError:
    print("answered")
"""


@timeout(240)
def test_a_deleted_tap_is_no_fault_of_a_peer_and_an_apply_makes_it_again():
    need_root()
    with Namespace() as home, Namespace() as web, Namespace() as db, scratch() as folder:
        with Fabric(folder, TAPS.format(web=web, db=db), netns=home) as fabric:
            assert "answered" in in_space(web, PING, "10.233.0.3")
            index = db.ip("-o", "link", "show", "db").split(":")[0]
            web.ip("link", "del", "web")
            until("the fault", lambda: fabric.port("web")["last_fault"])
            said = fabric.cli("status").stdout
            assert "the tap `web` was deleted" in said and "`tombolo apply` makes its deleted tap again" in said, said
            assert "broke the rules" not in said + fabric.cli("events").stdout
            # A change is about what it names.
            assert sections(change(fabric, "set", "tap.db.class=high", "--dry-run")) == {"tap.db": ("change", "planned")}
            plan = change(fabric, "apply", str(fabric.file), "--dry-run")
            assert sections(plan) == {"tap.web": ("restart", "planned")}, plan
            assert "was deleted" in plan["changes"][0]["reason"], plan
            assert sections(change(fabric, "apply", str(fabric.file))) == {"tap.web": ("restart", "done")}
            assert "answered" in in_space(web, PING, "10.233.0.3")
            assert db.ip("-o", "link", "show", "db").split(":")[0] == index, "the other tap is untouched"
            assert change(fabric, "apply", str(fabric.file))["changes"] == []


@timeout(240)
def test_the_deleted_tap_of_a_kernel_uplink_is_set_up_whole_again():
    need_root()
    text = TAPS.replace('subnet = "10.233.0.0/24"', 'subnet = "10.233.0.0/24"\nuplink = "kernel"\nipv6 = "auto"')
    text = text.replace("10.233.0.3", "10.233.0.7").replace("10.233.0.2\"", "10.233.0.6\"")
    with Namespace() as home, Namespace() as web, Namespace() as db, scratch() as folder:
        with Fabric(folder, text.format(web=web, db=db), netns=home) as fabric:
            device = fabric.port("uplink-lan")["details"]["interface"]

            def state():
                found = json.loads(home.ip("-j", "address", "show", "dev", device))[0]["addr_info"]
                addresses = sorted((one["local"], one["prefixlen"]) for one in found)
                keys = [f"net.ipv4.conf.{device}.{key}" for key in ("route_localnet", "forwarding")] + [f"net.ipv6.conf.{device}.forwarding"]
                return addresses, [home.run("sysctl", "-n", key).stdout.strip() for key in keys]
            before = state()
            home.ip("link", "del", device)
            until("the fault", lambda: fabric.port("uplink-lan")["last_fault"])
            assert sections(change(fabric, "apply", str(fabric.file))) == {"network.lan": ("change", "done")}
            until(f"the same as before: {before}", lambda: state() == before)
            assert change(fabric, "apply", str(fabric.file))["changes"] == []


@timeout(240)
def test_passt_without_a_route_says_so_and_opens_nothing():
    need_root()
    with Namespace() as home, scratch() as folder:
        with Fabric(folder, USER, netns=home) as fabric:
            def fault():
                return next(forward["fault"] for forward in fabric.status()["forwards"]) or ""
            until("the fault", lambda: "no default route" in fault(), seconds=60)
            # Several tries later as well.
            until("tries", lambda: fabric.cli("events").stdout.count("is interrupted") and counters(fabric)["passt_restarts"] >= 3)
            until("the fault again", lambda: "no default route" in fault())
            told = fabric.cli("events").stdout
            assert "open again" not in told and told.count("is interrupted") == 1, told
            assert told.count("ended and is started again") == 1, told
            # The route comes, and passt is tried again by itself.
            home.ip("link", "add", "way", "type", "veth", "peer", "name", "far")
            home.ip("link", "set", "far", "up")
            home.ip("address", "add", "198.51.100.2/24", "dev", "way")
            home.ip("link", "set", "way", "up")
            home.ip("route", "add", "default", "via", "198.51.100.1")
            until("an open forward", lambda: not fault(), seconds=60)
            until("the event", lambda: "is open again" in fabric.cli("events").stdout)


@timeout(240)
def test_commands_say_what_is_meant():
    need_root()
    with Namespace() as home, Namespace() as web, Namespace() as db, scratch() as folder:
        with Fabric(folder, TAPS.format(web=web, db=db), netns=home) as fabric:
            fabric.cli("port", "set", "db", "--rate", "receive=20M")
            # A client may send it in several lines.
            status, _ = fabric.ask("PATCH", "/v1/ports/web", {"toml": "[rate]\nsend = \"30M\"\n"})
            for words in (("config",), ("config", "--changes")):
                assert "# port db has another limit while it runs" in fabric.cli(*words).stdout
            assert "20M" in fabric.ask("GET", "/v1/config")[1]["port_limits"]["db"]
            fabric.file.with_name("same.toml").write_text(fabric.cli("config").stdout)
            assert change(fabric, "apply", str(fabric.file.with_name("same.toml")), "--dry-run")["changes"] == [], "it is a fabric file"

            def refused(*words):
                done = fabric.cli(*words, check=False)
                assert done.returncode, words
                return done.stderr
            assert "the name of a fabric that runs cannot be changed" in refused("set", "name=zz")
            assert "expected a number from 1 on" in refused("rule", "rm", "x")
            assert refused("cell", "run", "nosuchapp").count("APP: expected") == 1
            assert sections(change(fabric, "rule", "add", "deny", "--from", "web", "--to", "db")) == {"policy": ("add", "done")}
            shown = fabric.cli("rule", "add", "allow", "--from", "db", "--protocol", "udp", "--port", "53", "--at", "1").stdout
            assert "rules and mirrors  changed: rule 1 none → allow from db udp port 53" in shown, shown
            fabric.cli("wait", "--for", "port", "web", "db", "--timeout", "20")
            late = fabric.cli("wait", "--for", "port", "web", "dc", "--timeout", "1", check=False)
            assert late.returncode == 1 and 'there is no port "dc"' in late.stderr
            # What is of the file and what is of this machine.
            fabric.file.write_text(TAPS.format(web=web, db="nosuchspace") + "\n[tap.x]\nmtuu = 3\n")
            with contextlib.closing(Api(fabric.runtime / "api.sock")) as api:
                api.request("POST", "/v1/apply", fabric.file.read_text())
                answer = json.loads(api.getresponse().read())
            assert {(p["key"], p["of"]) for p in answer["problems"]} == {("tap.x.mtuu", "file"), ("tap.db.netns", "machine")}, answer


def test_a_broken_head_is_one_fault():
    with scratch() as folder:
        file = folder / "f.toml"
        file.write_text('name = "f"\n[[[\n')
        done = subprocess.run([PROGRAM, "check", "--json", file], capture_output=True, text=True, check=False, timeout=60)
        faults = json.loads(done.stdout)["faults"]
        assert len(faults) == 1 and "valid TOML" in faults[0]["expected"], faults
