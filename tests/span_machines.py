"""One fabric file for several machines. A machine is a network namespace with an address on a common bridge; each reads the same file and runs
its part of it. The members are taps in namespaces of their own."""

import contextlib
import json
import re
import subprocess
import tomllib

from lib import Namespace, Process, Skip, need_program, need_root, scratch, timeout, until
from lib.containers import BUILT
from lib.fabric import PROGRAM, Fabric
from lib.netns import Bridge
from span_control import PATIENCE_S, SPAN

NAMES = ["a", "b", "c"]
UNDERLAY = {name: f"10.233.2.{n}" for n, name in enumerate(NAMES, 1)}
# Below what the machines lease.
MEMBERS = {name: f"10.87.0.{n}" for n, name in enumerate(NAMES, 10)}


def text(members, homes, more=""):
    """The file. `members` are the namespaces of the members, `homes` the machines that have them, `more` is its end."""
    machines = "".join(f'[machine.{name}]\naddress = "{UNDERLAY[name]}"\n' for name in NAMES)
    taps = "".join(f'[tap.of-{name}]\non = "{homes[name]}"\nnetns = "{members[name]}"\nip = "{MEMBERS[name]}"\ngroups = "all"\n' for name in NAMES)
    return f"""name = "demo"
{machines}[network.lan]
subnet = "10.87.0.0/24"
span = 42
{taps}[[rule]]
action = "deny"
from = "of-b"
to = "10.87.0.12"
{more}"""


@contextlib.contextmanager
def machines(more=""):
    need_root()
    need_program("ethtool")
    with scratch() as folder, contextlib.ExitStack() as stack:
        bridge = stack.enter_context(Bridge())
        spaces, members = ({name: stack.enter_context(Namespace()) for name in NAMES} for _ in range(2))
        for name, space in spaces.items():
            bridge.join(space, name, UNDERLAY[name])
            # No network card fills in the checksums of what the tunnel carries.
            space.run("ethtool", "-K", "eth0", "tx", "off")
        content = text(members, dict(zip(NAMES, NAMES)), more)
        fabrics = {}
        for name in NAMES:
            own = folder / name
            own.mkdir()
            if "keys" in more:
                if name == NAMES[0]:
                    subprocess.run([PROGRAM, "service", "keys", "--keys", folder / "keys", *NAMES], check=True, capture_output=True)
                (own / "keys").symlink_to(folder / "keys")
            fabrics[name] = stack.enter_context(Fabric(own, content, netns=spaces[name], machine=name))
        yield fabrics, members


def pings(members, source, destination):
    return members[source].answers(MEMBERS[destination])


@timeout(240)
def test_three_machines_run_their_parts_of_one_file_and_are_one_network():
    with machines() as (fabrics, members):
        for name, fabric in fabrics.items():
            status = fabric.status()
            assert status["name"] == f"demo-{name}" and {port["name"] for port in status["ports"]} == {f"of-{name}", "gateway-lan", "span-lan"}, status
            tunnel = fabric.port("span-lan")["details"]
            others = [f"{UNDERLAY[other]}:4789" for other in NAMES if other != name]
            assert (tunnel["local"], tunnel["remotes"], tunnel["vni"]) == (f"{UNDERLAY[name]}:4789", others, 42), tunnel
        for source, destination in ("ab", "ac", "bc", "ca"):
            if (source, destination) != ("b", "c"):
                until(f"{source} reaches {destination}", lambda: pings(members, source, destination))
        # The path's MTU less the tunnel's headers, without a word in the file.
        members["a"].run("ping", "-q", "-M", "do", "-c", "2", "-s", "1422", MEMBERS["b"])
        # Each machine has a gateway of its own, and each member reaches that of its machine.
        gateways = [fabrics[name].status()["networks"][0]["gateway"] for name in NAMES]
        assert gateways == ["10.87.0.1", "10.87.0.3", "10.87.0.5"], gateways
        for name, gateway in zip(NAMES, gateways):
            assert members[name].answers(gateway), (name, gateway)
        # The rule is where its member is, and there alone.
        until("the rule at b drops", lambda: not pings(members, "b", "c") and fabrics["b"].port("of-b")["counters"]["rx_drops"].get("denied"))
        assert not any("denied" in fabrics[name].port(f"of-{name}")["counters"]["rx_drops"] for name in "ac")


@timeout(240)
def test_a_member_moves_to_another_machine_by_the_same_file_and_keeps_its_addresses():
    with machines() as (fabrics, members):
        until("a reaches c", lambda: pings(members, "a", "c"))
        mac = members["c"].run("cat", "/sys/class/net/of-c/address").stdout
        content = text(members, {"a": "a", "b": "b", "c": "b"})
        # The machine that has it gives it up first: the device's name is taken as long as it is
        # there.
        for name in "cba":
            fabrics[name].file.write_text(content)
            report = fabrics[name].cli("apply", "--machine", name).stdout
            assert "of-c" in report or name == "a", report
        assert members["c"].run("cat", "/sys/class/net/of-c/address").stdout == mac
        until("a reaches c on b", lambda: pings(members, "a", "c"))
        assert fabrics["b"].port("of-c") and "of-c" not in str(fabrics["c"].status()["ports"])
        # What is wrong for any of them is refused on each.
        fabrics["a"].file.write_text(content.replace("10.87.0.11", "10.87.0.12"))
        refused = fabrics["a"].cli("apply", "--machine", "a", check=False)
        assert refused.returncode and "which is that of [tap.of-b]" in refused.stderr and pings(members, "a", "c"), refused.stderr


CALLS = """[span]
keys = "keys"
[export.calc]
on = "a"
listen = "0.0.0.0:7000"
keys = "keys"
allow = ["b"]
[import.calc]
keys = "keys"
"""


@timeout(240)
def test_a_service_of_one_machine_is_called_on_the_others_as_the_one_file_says():
    with machines(CALLS) as (fabrics, _):
        a, b, c = (fabrics[name] for name in NAMES)
        with Process([BUILT / "examples/calculator", "--name", "calc"], netns=a.netns, env=a.env, cwd=a.folder):

            def called(fabric):
                return fabric.cli("call", "calc", "6 * 7", "--timeout", "10s", check=False)

            for fabric in (a, b):
                until(f"calls on {fabric.name}", lambda: called(fabric).stdout.strip() == "42")
            report = json.loads(b.cli("call", "calc", "1 / 4", "--repeat", "50", "--timeout", "60s", "--json").stdout)
            assert report["outcomes"] == {"served": 50}, report
            assert b.cli("service", "ls").stdout.splitlines()[1].split()[:2] == ["calc", "a"]
            # The export names b alone.
            log = c.runtime / "calc.import.log"
            until("c to be refused", lambda: log.exists() and "not offered" in log.read_text())
            assert "no service" in called(c).stderr
            # Its end is told by name, on the other machine as on its own.
        until("the service to be gone", lambda: called(a).returncode and called(b).returncode)
        # The settings of tombolo-span: those of the file, and those that run.
        a.cli("set", "span.lease=20")
        of_running = tomllib.loads(a.cli("span", "settings", "--fabric", "demo-a").stdout)
        env = a.env.pop("TOMBOLO_FABRIC")
        of_file = tomllib.loads(a.cli("span", "settings", "-f", a.file, "--machine", "a").stdout)
        a.env["TOMBOLO_FABRIC"] = env
        assert of_file["lease"] == 15 and of_running == {**of_file, "lease": 20}, of_running
        assert of_running["peer"] == [f"{name}={UNDERLAY[name]}:7447" for name in "bc"], of_running


@timeout(240)
def test_addresses_of_the_file_stay_with_their_machines_whatever_another_one_claims():
    """Machine `a` is hostile: it has another file, in which the addresses of a's and c's members are exchanged. Its name
    sorts first."""
    if not SPAN.exists():
        raise Skip(f"{SPAN} is not built: run ./x span-program")
    with machines('[span]\nkeys = "keys"\n') as (fabrics, members), contextlib.ExitStack() as stack:
        a, b, c = (fabrics[name] for name in NAMES)
        own = a.file.read_text()
        exchanged = own.replace(MEMBERS["a"], "A").replace(MEMBERS["c"], MEMBERS["a"]).replace("A", MEMBERS["c"])
        a.file.write_text(exchanged)
        a.cli("apply", "--machine", "a")
        for fabric in fabrics.values():
            env = fabric.env.pop("TOMBOLO_FABRIC")
            settings = fabric.folder / "span.toml"
            settings.write_text(fabric.cli("span", "settings", "-f", fabric.file, "--machine", env.removeprefix("demo-")).stdout)
            fabric.env["TOMBOLO_FABRIC"] = env
            span = Process([SPAN, "--config", settings], name=f"tombolo-span of {env}", netns=fabric.netns, env=fabric.env, cwd=fabric.folder)
            stack.callback(span.kill)

        def known(fabric):
            """The addresses that the daemon knows at each other machine."""
            _, answer = fabric.ask("GET", "/v1/networks/lan/remotes")
            return {machine["machine"]: sorted(ip for member in machine["members"] for ip in member["ips"]) for machine in answer["machines"]}

        # Its own gateway, and no other address: that of its member is wrong. Without the file's word it
        # would have c's, since it sorts first.
        until("b to know both", lambda: MEMBERS["c"] in known(b).get("c", []) and "10.87.0.1" in known(b).get("a", []), PATIENCE_S, every=0.2)
        assert not {MEMBERS["c"], MEMBERS["a"]} & set(known(b)["a"]), known(b)

        def conflicts():
            return json.loads(b.cli("span", "status", "--json").stdout)["report"]["conflicts"]

        expected = {"network": "lan", "what": MEMBERS["c"], "machines": ["a", "c"], "winner": "c"}
        until("the conflict", lambda: expected in conflicts(), PATIENCE_S, every=0.5)
        # With the right file, all is well.
        a.file.write_text(own)
        a.cli("apply", "--machine", "a")
        until("a's address at b", lambda: MEMBERS["a"] in known(b)["a"], PATIENCE_S, every=0.2)
        until("no conflict", lambda: not conflicts(), PATIENCE_S, every=0.5)


@timeout(120)
def test_a_machine_that_is_not_named_or_unknown_is_an_error_and_check_looks_at_all():
    with machines() as (fabrics, _):
        fabric = fabrics["a"]
        checked = fabric.cli("check")
        assert "no faults in the file, on each of its 3 machines" in checked.stdout, checked.stdout
        env = fabric.env.pop("TOMBOLO_FABRIC")
        for words, expected in (
            (("up", fabric.file), "expected the name of a machine of the file (a, b, c), found no --machine, and the host name"),
            (("up", "--machine", "d", fabric.file), 'found "d"; did you mean "a"?'),
            (("check", "--machine", "aa"), 'found "aa"; did you mean "a"?'),
        ):
            refused = fabric.cli(*words, check=False)
            assert refused.returncode == 2 and expected in refused.stderr, refused.stderr
        # A fault of each machine, told on any of them.
        faulty = re.sub(r'on = "([bc])"', r'on = "\1"\nguard = "\1"', fabric.file.read_text())
        fabric.file.write_text(faulty)
        refused = fabric.cli("check", "--machine", "a", check=False).stderr
        assert "tap.of-b.guard" in refused and "tap.of-c.guard" in refused and "2 faults in the fabric file" in refused, refused
        # By the machine's name the fabric is found although its file is faulty now.
        assert "demo-a is down" in fabric.cli("down", "--machine", "a").stdout
        fabric.env["TOMBOLO_FABRIC"] = env
