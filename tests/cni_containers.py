"""Containers on a fabric by `tombolo-cni`: direct calls as a runtime makes them, real containerd with runc, cnitool."""

import contextlib
import fcntl
import ipaddress
import json
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import tempfile
import time

from lib import Fabric, Namespace, Process, need_program, need_root, scratch, timeout, until
from lib.containers import BUILT, Cni, Containerd, Failed, Podman, RootlessPodman, cnitool, leftovers, of, path, plugin
from lib.fabric import PROGRAM, Api
from lib.frames import mac_bytes
from lib.machine import SLOW
from lib.tap import Inside, Tap

TUNSETVNETHDRSZ = 0x400454D8
FILE = """
name = "{name}"
[network.lan]
subnet = "10.236.0.0/22"
uplink = "user"
mtu = 1400
"""


@contextlib.contextmanager
def fabric():
    need_root()
    plugin()
    with scratch() as folder, Namespace() as outside:
        outside.way_out()
        with Fabric(folder, FILE.format(name=f"cni{os.getpid()}"), netns=outside, own_mounts=False) as fabric:
            yield fabric


def addresses(space, interface="eth0"):
    found = json.loads(space.ip("-j", "address", "show", "dev", interface))[0]
    return [a["local"] for a in found["addr_info"] if a["family"] == "inet"], found


def addresses6(space, interface="eth0"):
    """The global IPv6 addresses that can be used now."""
    found = json.loads(space.ip("-j", "-6", "address", "show", "dev", interface, "scope", "global", "-tentative"))
    return [a["local"] for link in found for a in link.get("addr_info", []) if "local" in a]


def link_local(mac):
    a, b, c, d, e, f = mac_bytes(mac)
    return ipaddress.IPv6Address(bytes([0xFE, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xFF, 0xFE, d, e, f])).compressed


def refused(code, call, *words, **more):
    try:
        call(*words, **more)
    except Failed as error:
        assert error.code == code, (error.code, error.text)
        return error.text
    raise AssertionError(f"{words} was not refused")


@timeout(120)
def test_a_container_is_added_checked_and_deleted_in_each_version():
    with fabric() as f, Namespace() as one, Namespace() as two:
        for version in ("0.3.1", "0.4.0", "1.0.0", "1.1.0"):
            cni = Cni(f, version)
            assert "1.1.0" in cni("VERSION")["supportedVersions"]
            result = cni("ADD", "c1", path(one), args="IgnoreUnknown=1;K8S_POD_NAME=web")
            other = cni("ADD", "c2", path(two))
            assert result["cniVersion"] == version
            assert ("version" in result["ips"][0]) == (version < "1.0.0")
            ips, link = addresses(one)
            assert result["ips"][0]["address"] == f"{ips[0]}/22" and link["mtu"] == 1400, (result, link)
            assert link["address"] == result["interfaces"][0]["mac"]
            assert "default via" in one.ip("route")
            assert one.answers(other["ips"][0]["address"].split("/")[0])
            # Its pod's name is a name of the fabric.
            asked = two.run("busybox", "nslookup", f"web.{result['dns']['domain']}", result["dns"]["nameservers"][0])
            assert ips[0] in asked.stdout, asked
            assert set(cni.ports()) == {"web", "c2"}
            if version >= "0.4.0":
                cni("CHECK", "c1", path(one), prevResult=result)
                one.ip("link", "set", "eth0", "mtu", "1300")
                assert "expected the MTU 1400, found 1300" in refused(101, cni, "CHECK", "c1", path(one), prevResult=result)
                one.ip("link", "set", "eth0", "mtu", "1400")
                router = result["routes"][0]["gw"]
                one.ip("route", "del", "default")
                assert f"no default route by {router}" in refused(101, cni, "CHECK", "c1", path(one), prevResult=result)
                one.ip("route", "add", "default", "via", router)
                cni("CHECK", "c1", path(one), prevResult=result)
                one.ip("address", "flush", "dev", "eth0")
                assert "has not the address" in refused(101, cni, "CHECK", "c1", path(one), prevResult=result)
            else:
                refused(1, cni, "CHECK", "c1", path(one))
            for _ in range(2):
                cni("DEL", "c1", path(one))
                cni("DEL", "c2", path(two))
            assert not cni.ports()
            assert "eth0" not in one.ip("link") and "eth0" not in two.ip("link")


@timeout(120)
def test_addresses_rates_and_faults_of_the_runtime():
    with fabric() as f, Namespace() as one:
        cni = Cni(f, "1.1.0")
        cni("STATUS")
        refused(50, Cni(f, "1.1.0", network="other"), "STATUS")
        assert "lan" in refused(7, Cni(f, "1.1.0", network="other"), "ADD", "c", path(one))
        refused(5, cni, "ADD", "c", "/run/netns/not-there")
        refused(4, cni, "ADD", "c", "")
        refused(4, cni, "ADD", "../c", path(one))
        refused(6, cni, "ADD", "c", path(one), config="{")
        refused(1, cni, "ADD", "c", path(one), cniVersion="9.0.0")
        refused(7, cni, "ADD", "c", path(one), runtimeConfig={"portMappings": [{"hostPort": 0, "containerPort": 1}]})
        assert "eth0" not in one.ip("link")
        result = cni("ADD", "c", path(one), runtimeConfig={"ips": ["10.236.1.77/22"], "bandwidth": {"ingressRate": 8000000, "egressRate": 4000000}})
        assert result["ips"][0]["address"] == "10.236.1.77/22" and result["interfaces"][0]["mtu"] == 1400
        with Namespace() as two:
            assert "10.236.1.77" in refused(100, cni, "ADD", "d", path(two), runtimeConfig={"ips": ["10.236.1.77"]})
            assert "eth0" not in two.ip("link")
            said = refused(100, cni, "ADD", "d", path(two), runtimeConfig={"ips": ["10.99.0.1"]})
            assert said.startswith("the address that the runtime asked for (ips): expected ") and "10.99.0.1" in said, said
            assert "request" not in said, said
        # Of a flood a container is given its rate and no more: a datagram of 1000 bytes 4000 times
        # is 32 Mbit.
        with Namespace() as two:
            target = cni("ADD", "d", path(two))["ips"][0]["address"].split("/")[0]
            text = f"import socket\ns=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\nfor _ in range(4000): s.sendto(bytes(1000),('{target}',9))"
            before = time.monotonic()
            one.run("python3", "-c", text)
            port = cni.ports()["c"]
            took = time.monotonic() - before
            assert port["counters"]["rx_bytes"] * 8 < 4000000 * (took + 2), (port["counters"], took)
            cni("DEL", "d", path(two))
        cni("DEL", "c", path(one))
        assert not cni.ports()


@timeout(120)
def test_a_pod_takes_no_name_that_its_neighbours_trust_or_that_a_client_has():
    need_root()
    plugin()
    need_program("busybox")
    with scratch() as folder, Namespace() as outside, Namespace() as one, Namespace() as two, Namespace() as host, contextlib.ExitStack() as stack:
        outside.way_out()
        text = FILE.format(name=f"names{os.getpid()}") + f'[tap.host]\nnetns = "{path(host)}"\n'
        f = stack.enter_context(Fabric(folder, text, netns=outside, own_mounts=False))
        cni = Cni(f, "1.1.0")
        for name in ("wpad", "isatap", "localhost", "local", "127", "gateway", "router", "host", "gateway-lan", "gateway-dmz", "uplink-dmz", "span-dmz"):
            result = cni("ADD", "c1", path(one), args=f"K8S_POD_NAME={name}")
            assert set(cni.ports()) == {"c1"}, name
            cni("DEL", "c1", path(one))
        # A container's ID is no better. The last name is one that nobody trusts.
        result = cni("ADD", "wpad", path(one), args="K8S_POD_NAME=isatap")
        assert set(cni.ports()) == {"c-" + result["interfaces"][0]["mac"].replace(":", "")}
        # A client behind a tap, with a MAC address of its own and a name that it asked for.
        host.ip("link", "add", "client", "link", "host", "type", "macvlan", "mode", "bridge")
        host.ip("link", "set", "client", "up")
        host.run("busybox", "udhcpc", "-i", "client", "-f", "-q", "-n", "-t", "10", "-s", "/bin/true", "-x", "hostname:printer", seconds=60 * SLOW)
        held = [lease["ip"] for lease in f.status()["networks"][0]["leases"] if lease["name"] == "printer"]
        assert len(held) == 1, f.status()["networks"][0]["leases"]
        cni("ADD", "c2", path(two), args="K8S_POD_NAME=printer")
        assert "c2" in cni.ports() and "printer" not in cni.ports()
        assert held[0] in resolved(two, f"printer.{result['dns']['domain']}", result), "the name is still the client's"
        said = refused_by(f, f'[tap.printer]\ndevice = "x"\nadopt = true\nnetns = "{path(two)}"\ncontainer = "pods/c3/eth1"\n')
        assert "a client with the MAC address" in said and "choose another name" in said, said
        cni("DEL", "wpad", path(one))
        cni("DEL", "c2", path(two))
        assert not cni.ports()


def refused_by(fabric, sections):
    """What the fabric says of sections that it does not add."""
    with contextlib.closing(Api(fabric.runtime / "api.sock")) as api:
        api.request("POST", "/v1/ports", sections)
        answer = api.getresponse()
        text = answer.read().decode()
    assert answer.status == 409, (answer.status, text)
    return json.loads(text)["error"]


@timeout(180)
def test_gc_removes_what_is_not_in_its_list_and_nothing_without_one():
    with fabric() as f, contextlib.ExitStack() as stack:
        cni = Cni(f, "1.1.0")
        others = Cni(f, "1.1.0", name="others")
        spaces = [stack.enter_context(Namespace()) for _ in range(3)]
        for n, space in enumerate(spaces[:2]):
            cni("ADD", f"c{n}", path(space))
        others("ADD", "c2", path(spaces[2]))
        assert "nothing was removed" in refused(7, cni, "GC")
        assert len(cni.ports()) == 3
        cni("GC", **{"cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth0"}]})
        assert set(cni.ports()) == {"c1", "c2"}, "another network's is not this one's to remove"
        cni("GC", **{"cni.dev/attachments": []})
        assert set(cni.ports()) == {"c2"}
        others("DEL", "c2", path(spaces[2]))


@timeout(180)
def test_a_dead_container_does_not_keep_its_namespace_and_a_daemon_may_be_killed():
    with fabric() as f:
        cni = Cni(f, "1.1.0")
        with Namespace() as one, Namespace() as two:
            first, second = (cni("ADD", name, path(space)) for name, space in (("c1", one), ("c2", two)))
            target = second["ips"][0]["address"].split("/")[0]
            f.kill()
            assert "eth0" in one.ip("link"), "the container keeps its interface"
            # DEL finds no daemon and succeeds; ADD says that it is to be tried again.
            cni("DEL", "c1", path(one))
            assert "eth0" not in one.ip("link")
            with Namespace() as three:
                refused(11, cni, "ADD", "c3", path(three))
                refused(50, cni, "STATUS")
                f.start()
                assert set(cni.ports()) == {"c2"}, "what was deleted meanwhile is forgotten"
                cni("CHECK", "c2", path(two), prevResult=second)
                cni("ADD", "c3", path(three))
                assert three.answers(target), "the container is on the network again"
        # Both namespaces lost their names without DEL.
        until("the daemon lets go of dead containers", lambda: not cni.ports(), 60)


HOLD = """
import fcntl, os, struct, time
fd = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(fd, 0x400454CA, struct.pack("16sH22x", b"eth0", 0x5002))
print("held", flush=True)
time.sleep(3600)
"""


@timeout(240)
def test_a_container_cannot_keep_its_fabric_from_starting():
    with fabric() as f, Namespace() as one, Namespace() as two, Namespace() as three:
        cni = Cni(f, "1.1.0")
        spaces = {"swaps": one, "holds": two, "good": three}
        for name, space in spaces.items():
            cni("ADD", name, path(space))
        mac = addresses(one)[1]["address"]
        for again, kind in enumerate(("veth", "tap"), 1):
            f.kill()
            # One has another device in the place of its own, with its MAC address; one has opened
            # its own.
            one.ip("link", "del", "eth0")
            if kind == "veth":
                one.ip("link", "add", "eth0", "address", mac, "type", "veth", "peer", "name", "other")
            else:
                one.ip("tuntap", "add", "dev", "eth0", "mode", "tap")
                one.ip("link", "set", "eth0", "address", mac)
            with Process(["python3", "-c", HOLD], name="holder", netns=two) as holder:
                until("the tap is held", lambda: "held" in holder.tail(), 30)
                f.start()
                ports = cni.ports()
                assert {name: port["up"] for name, port in ports.items()} == {"swaps": False, "holds": False, "good": True}, ports
                parked = {name for name, port in ports.items() if port["details"].get("state") == "parked"}
                assert parked == {"swaps", "holds"}, ports
                warnings = f.status()["warnings"]
                assert any("port swaps: it is parked" in text and "another one than it was given" in text for text in warnings), warnings
                assert any("port holds: it is parked" in text and "another process uses it" in text for text in warnings), warnings
                told = f.cli("events", "--json").stdout
                assert [told.count(f"port {name} is parked") for name in ("swaps", "holds")] == [again, again], told
                # Its place in the fabric is still its own.
                assert ports["holds"]["details"]["container"] == "pods/holds/eth0", ports
            until("the tap is attached again", lambda: cni.ports()["holds"]["up"], 90)
            assert "port holds is attached again" in f.cli("events", "--json").stdout
            assert cni.ports()["swaps"]["details"]["state"] == "parked"
        f.cli("port", "del", "swaps")
        assert "eth0" in one.ip("link"), "what the container made is its own"
        cni("DEL", "holds", path(two))
        cni("DEL", "good", path(three))
        assert not cni.ports()


@timeout(180)
def test_a_start_that_fails_leaves_containers_their_interfaces():
    need_root()
    plugin()
    with scratch() as folder, Namespace() as outside, Namespace() as host, Namespace() as one, contextlib.ExitStack() as stack:
        outside.way_out()
        host.ip("tuntap", "add", "dev", "host0", "mode", "tap")
        text = FILE.format(name=f"fails{os.getpid()}") + f'[tap.t]\ndevice = "host0"\nadopt = true\nnetns = "{path(host)}"\n'
        f = stack.enter_context(Fabric(folder, text, netns=outside, own_mounts=False))
        cni = Cni(f, "1.1.0")
        result = cni("ADD", "c1", path(one))
        before = addresses(one)[1]["ifindex"]
        f.kill()
        host.ip("link", "del", "host0")
        host.ip("link", "add", "host0", "type", "veth", "peer", "name", "other")
        failed = f.cli("up", f.file, check=False)
        assert failed.returncode and "single-queue tap" in failed.stderr, failed
        assert addresses(one)[1]["ifindex"] == before
        host.ip("link", "del", "host0")
        host.ip("tuntap", "add", "dev", "host0", "mode", "tap")
        f.start()
        assert set(cni.ports()) == {"c1"} and cni.ports()["c1"]["up"]
        cni("CHECK", "c1", path(one), prevResult=result)
        cni("DEL", "c1", path(one))


@timeout(120)
def test_a_path_that_is_no_containers_namespace_is_told_and_not_waited_for():
    with fabric() as f, Namespace() as one:
        cni = Cni(f, "1.1.0")
        with scratch() as folder:
            fifo = folder / "fifo"
            os.mkfifo(fifo)
            begun = time.monotonic()
            for other in (fifo, "/proc/self/ns/uts"):
                assert "expected a network namespace, found another kind of file" in refused(5, cni, "ADD", "c1", other)
                cni("DEL", "c1", other)
            assert time.monotonic() - begun < 20 * SLOW, "nothing waits for the FIFO's other end"
        # A container with the host's network: the fabric's own namespace.
        for here in (path(f.netns), "/proc/self/ns/net"):
            assert "found that of the host" in refused(4, cni, "ADD", "c1", here)
        assert "eth0" not in f.netns.ip("link") and not cni.ports()
        # So it is for others who add a container's member.
        mac = "02:00:00:00:00:77"
        section = f'[port.own]\nkind = "vhost-user"\ncontainer = "pods/c1/eth0"\nnetns = "{path(f.netns)}"\nmac = "{mac}"\n'
        assert "namespace of the fabric itself" in refused_by(f, section)
        cni("ADD", "c1", path(one))
        cni("DEL", "c1", path(one))


@timeout(180)
def test_calls_for_one_attachment_come_one_after_the_other():
    with fabric() as f, Namespace() as one:
        cni = Cni(f, "1.1.0")
        for _ in range(6):
            calls = [cni.start("ADD", "c1", path(one)) for _ in range(4)]
            results = [cni.finish(call) for call in calls]
            assert all(result == results[0] for result in results), results
            assert addresses(one)[1]["address"] == results[0]["interfaces"][0]["mac"]
            cni("CHECK", "c1", path(one), prevResult=results[0])
            calls = [cni.start(command, "c1", path(one)) for command in ("ADD", "DEL", "ADD", "DEL")]
            for call in calls:
                cni.finish(call)
            cni("DEL", "c1", path(one))
            assert not cni.ports() and "eth0" not in one.ip("link")


@contextlib.contextmanager
def other_calls_under_way(fabric):
    """The turns of all attachments are taken, as calls of the plugin take them."""
    folder = fabric.folder / "run" / fabric.name
    with contextlib.ExitStack() as stack:
        for n in range(256):
            fcntl.flock(stack.enter_context(open(folder / f"cni-{n:02x}.lock", "a")), fcntl.LOCK_EX)
        yield


def await_waiting(pid):
    """Waits until a call waits for its turn: it has opened the file, which it locks."""
    def has_lock():
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            return any(os.readlink(f"{folder}/{fd}").endswith(".lock") for fd in os.listdir(folder))
    until("the call waits for its turn", has_lock, 30)


@timeout(240)
def test_an_add_whose_runtime_or_namespace_went_while_it_waited_adds_nothing():
    with fabric() as f, Namespace() as one, scratch() as folder:
        cni = Cni(f, "1.1.0")
        # Whoever would read its answer has gone. DEL waits as well, and does not find what comes
        # after it.
        with other_calls_under_way(f):
            unread = cni.start("ADD", "c1", path(one))
            await_waiting(unread.pid)
            unread.stdout.close()
        assert unread.wait(60 * SLOW) == 1
        cni("DEL", "c1", path(one))
        # The runtime was killed, and its answer goes to a file.
        with other_calls_under_way(f):
            left = f"exec 3<&0; {plugin()} <&3 >{folder}/answer & echo $! >{folder}/pid; wait"
            runtime = cni.start("ADD", "c2", path(one), program=("sh", "-c", left))
            until("the plugin runs", lambda: (folder / "pid").exists() and (folder / "pid").read_text().strip(), 30)
            pid = int((folder / "pid").read_text())
            await_waiting(pid)
            runtime.kill()
            runtime.wait()
        until("the call has answered", lambda: (folder / "answer").read_text().endswith("\n"), 60)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        assert "the process that called the plugin has ended" in json.loads((folder / "answer").read_text())["msg"]
        # The namespace has gone, and the runtime waits.
        with other_calls_under_way(f):
            with Namespace() as two:
                call = cni.start("ADD", "c3", path(two))
                await_waiting(call.pid)
        assert "network namespace" in refused(5, cni.finish, call)
        assert not cni.ports() and "eth0" not in one.ip("link"), cni.ports()
        # One that is waited for comes to its turn.
        with other_calls_under_way(f):
            call = cni.start("ADD", "c4", path(one))
            await_waiting(call.pid)
        assert cni.finish(call)["ips"] and set(cni.ports()) == {"c4"}


@timeout(180)
def test_del_at_a_daemon_that_does_not_answer_is_to_be_tried_again():
    with fabric() as f, Namespace() as one:
        cni = Cni(f, "1.1.0")
        cni("ADD", "c1", path(one))
        f.process.signal(signal.SIGSTOP)
        try:
            assert "did not answer within" in refused(11, cni, "DEL", "c1", path(one))
        finally:
            f.process.signal(signal.SIGCONT)
        assert "eth0" not in one.ip("link")
        assert set(cni.ports()) == {"c1"}, "the daemon has not heard of it"
        cni("DEL", "c1", path(one))
        assert not cni.ports()


@timeout(120)
def test_a_section_of_the_file_does_not_take_a_containers_port():
    with fabric() as f, Namespace() as one:
        cni = Cni(f, "1.1.0")
        result = cni("ADD", "c1", path(one), args="K8S_POD_NAME=web")
        before = f.file.read_text()
        f.file.write_text(before + '[port.web]\nkind = "stream"\n')
        failed = f.cli("apply", f.file, check=False)
        assert failed.returncode and '"web" is the name of a container that runs (pods/c1/eth0)' in failed.stderr, failed
        cni("CHECK", "c1", path(one), prevResult=result)
        cni("DEL", "c1", path(one))
        f.cli("apply", f.file)
        assert f.port("web")["kind"] == "stream"


def losses(fabric):
    """The events that tell what rules and mirrors have lost."""
    events = map(json.loads, fabric.cli("events", "--json").stdout.splitlines())
    return [event for event in events if "what names it goes" in event["text"]]


@timeout(240)
def test_what_was_added_changed_removed_and_applied_is_one_record_for_the_next_daemon():
    with fabric() as f, contextlib.ExitStack() as stack:
        spaces = [stack.enter_context(Namespace()) for _ in range(4)]
        cni, text = Cni(f, "1.1.0"), f.file.read_text()
        limits = {"runtimeConfig": {"bandwidth": {"egressRate": 5_000_000, "egressBurst": 100_000}}}

        def there():
            config = json.loads(f.cli("config", "--json").stdout)
            status = f.status()
            [network] = status["networks"]
            kept = ("name", "network", "kind")
            ports = {port["name"]: ([port[key] for key in kept], {key: port["details"].get(key) for key in ("container", "netns", "rate", "mac")})
                     for port in status["ports"]}
            fixed = sorted((lease["ip"], lease["mac"], lease["name"]) for lease in network["leases"] if lease["fixed"])
            return config, ports, fixed, [name for name in network["counters"] if name.startswith("rule")], network["mtu"]

        def record():
            return json.loads((f.folder / "run" / f.name / "owner.json").read_text())

        def apply(content):
            f.file.write_text(content)
            f.cli("apply", f.file)

        first = there()
        steps = (
            lambda: cni("ADD", "c1", path(spaces[0]), args="K8S_POD_NAME=web", **limits),
            lambda: cni("ADD", "c2", path(spaces[1]), args="K8S_POD_NAME=db"),
            # The file's own member, beside those that were added.
            lambda: apply(text + f'[tap.extra]\nnetns = "{path(spaces[2])}"\nip = "10.236.1.9"\n'),
            lambda: f.cli("set", 'rule=[{action = "deny", from = ["web", "extra"], to = "db"}]'),
            lambda: f.cli("port", "set", "--rate", "send=3M", "db"),
            lambda: cni("ADD", "c3", path(spaces[3])),
            lambda: cni("DEL", "c1", path(spaces[0])),
            lambda: f.cli("set", "network.lan.policy=deny"),
            lambda: cni("DEL", "c3", path(spaces[3])),
        )
        seen = [first]
        for step in steps:
            step()
            now = there()
            assert now != seen[-1], now
            seen.append(now)
            f.kill()
            f.start()
            until("containers have a carrier again", lambda: all(port["up"] for port in cni.ports().values()), 30)
            again = there()
            assert again == now, (now, again)
        rules = seen[-1][0]["changes"]["rule"]
        assert [rule["from"] for rule in rules] == [["extra"]] and set(cni.ports()) == {"db"}, rules
        # What is left is the file's alone, in the record too.
        cni("DEL", "c2", path(spaces[1]))
        apply(text)
        assert there() == first, (first, there())
        assert "uplink-lan" in str(record()) and not any(record().get(key) for key in ("additions", "changes", "rates", "containers")), record()
        f.kill()
        f.start()
        assert there() == first, (first, there())


@timeout(120)
def test_rules_lose_the_name_of_a_container_that_ends_and_what_was_changed_stays():
    with fabric() as f, Namespace() as one, Namespace() as two:
        cni = Cni(f, "1.1.0")
        cni("ADD", "c1", path(one), args="K8S_POD_NAME=web")
        cni("ADD", "c2", path(two), args="K8S_POD_NAME=db")
        f.cli("rule", "add", "deny", "--from", "web", "--to", "db", "--protocol", "tcp", "--port", "22")
        f.cli("rule", "add", "deny", "--from", "db", "--protocol", "tcp", "--port", "23")
        # What a rule names is no port for `port del` while its container runs; nothing else keeps a
        # container from ending.
        cni("DEL", "c1", path(one))
        assert set(cni.ports()) == {"db"}
        changes = json.loads(f.cli("config", "--json").stdout)["changes"]
        assert [rule["from"] for rule in changes["rule"]] == ["db"], changes
        told = losses(f)
        assert len(told) == 1 and told[0]["kind"] == "apply" and 'container "web" has ended' in told[0]["text"], told
        assert "the rule {" in told[0]["text"] and "is removed" in told[0]["text"], told
        f.kill()
        f.start()
        assert json.loads(f.cli("config", "--json").stdout)["changes"] == changes, "they fit still"
        assert set(cni.ports()) == {"db"}
        # So it is for one that ends while no daemon runs.
        f.kill()
        two.ip("link", "del", "eth0")
        f.start()
        assert not cni.ports()
        changes = json.loads(f.cli("config", "--json").stdout)["changes"]
        assert "rule" not in changes and "db" not in str(changes), changes
        told = losses(f)
        assert len(told) == 2 and told[1]["kind"] == "recovery" and 'container "db" has ended' in told[1]["text"], told
        # Neither has the daemon them in memory, where the next container would be checked against
        # them.
        cni("ADD", "c3", path(one), args="K8S_POD_NAME=web")
        assert "rule_0" not in f.status()["networks"][0]["counters"], f.status()["networks"][0]["counters"]
        cni("ADD", "c4", path(two), args="K8S_POD_NAME=ids")
        f.cli("set", 'mirror=[{of = "web", to = "ids"}]')
        cni("DEL", "c3", path(one))
        cni("ADD", "c5", path(one), args="K8S_POD_NAME=next")
        assert "mirror" not in json.loads(f.cli("config", "--json").stdout)["changes"]


@timeout(240)
def test_containers_stay_on_the_network_when_their_daemon_is_stopped_or_replaced():
    need_root()
    plugin()
    with scratch() as folder, Namespace() as outside, Namespace() as one, Namespace() as two, contextlib.ExitStack() as stack:
        way_out6(outside)
        text = kernel_uplink().format(name=f"stay{os.getpid()}")
        f = stack.enter_context(Fabric(folder, text, netns=outside, own_mounts=False, options=["--leave-on-term"]))
        cni = Cni(f, "1.1.0")
        config = {"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80}]}}
        result = cni("ADD", "c1", path(one), args="K8S_POD_NAME=web", **config)
        other = cni("ADD", "c2", path(two))
        server = ("import socket\nwith socket.create_server(('', 80)) as s:\n while True:\n"
                  "  c, peer = s.accept()\n  c.sendall(b'from the container\\n')\n  c.close()")
        stack.enter_context(Process(["python3", "-c", server], name="server", netns=one))
        before = addresses(one)[1]["ifindex"]

        def works(how):
            assert set(cni.ports()) == {"web", "c2"}, how
            assert addresses(one)[1]["ifindex"] == before, f"{how}: the interface is the same one"
            until(f"traffic between containers after {how}", lambda: two.pings(of(result, 0)) and one.pings(of(other, 0)), 60)
            until(f"IPv6 after {how}", lambda: two.pings(of(result, 1)), 60)
            until(f"the port mapping after {how}", lambda: listens(outside, "198.51.100.2", "8080"), 60)
            cni("CHECK", "c1", path(one), prevResult=result, **config)
            cni("CHECK", "c2", path(two), prevResult=other)

        def ended():
            assert f.process.wait(60 * SLOW) == 0, f.process.tail()

        def helpers():
            # Without the shell that runs it, a program of the daemon has the folder among its
            # words.
            own = [entry for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]
            return [int(pid) for pid in own if f"{f.folder}/run" in cmdline(pid)]

        works("ADD")
        # A container that ends while no daemon runs is not kept alive by what the daemon left.
        with Namespace() as short:
            outside.ip("link", "add", "outer", "type", "veth", "peer", "name", "inner", "netns", str(short))
            cni("ADD", "c3", path(short))
            f.process.signal(signal.SIGTERM)
            ended()
        until("the end of a namespace while no daemon runs", lambda: "outer" not in outside.ip("link"), 10)
        f.start()
        works("the end of a container meanwhile")
        for how, number in (("SIGTERM", signal.SIGTERM), ("SIGUSR2", signal.SIGUSR2)):
            f.process.signal(number)
            ended()
            assert addresses(one)[0] == [of(result, 0)] and "default via" in one.ip("route"), f"{how}: the interface is as it was"
            f.start()
            works(how)
        # A container runtime ends what is left in the container of the daemon, the fd store too.
        f.process.signal(signal.SIGTERM)
        ended()
        for pid in helpers():
            os.kill(pid, signal.SIGKILL)
        f.start()
        works("the end of its container")
        f.replace(60 * SLOW)
        works("a handover")
        f.process.signal(signal.SIGTERM)
        ended()
        f.start()
        works("SIGTERM to the daemon that took over")
        # So it is as a daemon in the background, whose option goes with it.
        f.cli("down")
        ended()
        f.cli("up", "-d", "--leave-on-term", f.file)
        cni("ADD", "c1", path(one), args="K8S_POD_NAME=web", **config)
        cni("ADD", "c2", path(two))
        before = addresses(one)[1]["ifindex"]
        daemon = f.status()["pid"]
        os.kill(daemon, signal.SIGTERM)
        # Its parent is the machine's first process, which may not take note of its end.
        until("it ends", lambda: not cmdline(daemon), 60)
        f.start()
        works("SIGTERM to a daemon in the background")
        f.cli("down")
        ended()
        assert "dnat ip to" not in outside.run("nft", "list", "ruleset").stdout


def cmdline(pid):
    """The words of a process; nothing where it has gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().replace(b"\0", b" ").decode(errors="replace")
    return ""


@timeout(120)
def test_a_namespace_ends_with_its_container_though_no_del_came():
    with fabric() as f, Namespace() as witness:
        cni = Cni(f)
        with Namespace() as one:
            # The end of the pair that is outside goes at the moment at which the namespace ends.
            witness.ip("link", "add", "outer", "type", "veth", "peer", "name", "inner", "netns", str(one))
            cni("ADD", "c1", path(one))
        assert "outer" in witness.ip("link"), "the tap of the daemon keeps the namespace for now"
        until("the namespace ends", lambda: "outer" not in witness.ip("link"), 60)
        assert not cni.ports()


@timeout(120)
def test_a_container_that_takes_the_name_of_one_before_it_keeps_its_port():
    with fabric() as f, Namespace() as one, Namespace() as two:
        cni = Cni(f)
        # As a runtime does that starts a container again: the same name in a new namespace.
        cni("ADD", "c1", path(one), args="K8S_POD_NAME=web")
        cni("DEL", "c1", path(one))
        cni("ADD", "c1", path(two), args="K8S_POD_NAME=web")
        with Namespace() as three:
            cni("ADD", "c3", path(three))
        until("the daemon has looked at the namespaces", lambda: "c3" not in cni.ports(), 60)
        assert set(cni.ports()) == {"web"}
        cni("DEL", "c1", path(two))


@timeout(300)
def test_two_hundred_containers_come_and_go_in_parallel_and_leave_nothing():
    count, at_once = 200, 8
    with fabric() as f:
        cni = Cni(f, "1.0.0")
        before = len(f.status()["ports"]), len(os.listdir(f"/proc/{f.process.popen.pid}/fd"))
        prefix = f"tmbc{os.getpid()}-"
        try:
            for n in range(count):
                subprocess.run(["ip", "netns", "add", f"{prefix}{n}"], check=True)

            def links(space):
                with Inside(space):
                    return [name for _, name in socket.if_nameindex()]

            fresh = links(f"{prefix}0")

            def all_of(command):
                results, running = [], []
                for n in range(count):
                    running.append(cni.start(command, f"{prefix}{n}", f"/run/netns/{prefix}{n}"))
                    if len(running) == at_once:
                        results += [cni.finish(process) for process in running]
                        running = []
                return results + [cni.finish(process) for process in running]

            started = time.monotonic()
            results = all_of("ADD")
            added = time.monotonic() - started
            ips = {result["ips"][0]["address"] for result in results}
            assert len(ips) == count and len(cni.ports()) == count
            ping = ["ip", "netns", "exec", f"{prefix}0", "ping", "-c1", "-W20", results[-1]["ips"][0]["address"].split("/")[0]]
            assert subprocess.run(ping, capture_output=True).returncode == 0
            all_of("DEL")
            print(f"{count} containers up in {added:.1f} s, {at_once} at a time")
            status = f.status()
            assert len(status["ports"]) == before[0] and not status["networks"][0]["leases"], status["networks"][0]["leases"]
            # The daemon forgets the processes that called it at a later call: it keeps a pidfd of
            # each for a second.
            descriptors = lambda: f.status() and len(os.listdir(f"/proc/{f.process.popen.pid}/fd"))  # noqa: E731
            until("no descriptor is left", lambda: descriptors() <= before[1] + 4, 60, every=2)
            left = {n: found for n in range(count) if (found := links(f"{prefix}{n}")) != fresh}
            assert not left, (fresh, left)
        finally:
            for name in leftovers(prefix):
                subprocess.run(["ip", "netns", "del", name], check=False)


def conflist(fabric, version="1.0.0"):
    return {"cniVersion": version, "name": "pods", "plugins": [
        {"type": "tombolo-cni", "fabric": fabric.name, "runtime": str(fabric.folder / "run")}]}


@timeout(240)
def test_containerd_and_runc_run_containers_on_the_fabric():
    with fabric() as f, scratch() as folder, Containerd(folder, conflist(f)) as containerd:
        cni = Cni(f)
        run = ("run", "--rm", "--snapshotter", "native", "--cni")
        done = containerd.ctr(*run, "localhost/bb:1", "once", "/bin/ip", "address")
        assert "eth0" in done.stdout and "10.236." in done.stdout, done
        assert not cni.ports(), "DEL came after the container had ended"
        server = containerd.ctr("run", "-d", "--snapshotter", "native", "--cni", "localhost/bb:1", "server", "/bin/sleep", "1000")
        assert server.returncode == 0
        name, port = next(iter(cni.ports().items()))
        target = next(lease["ip"] for lease in f.status()["networks"][0]["leases"] if lease["mac"] in port["guard"])
        done = containerd.ctr(*run, "localhost/bb:1", "client", "/bin/ping", "-c", "1", "-W", "20", target)
        assert "1 packets received" in done.stdout, done
        # Killed without DEL: the daemon finds that the namespace is gone.
        pid = int(containerd.ctr("tasks", "ls").stdout.split("server")[1].split()[0])
        os.kill(pid, signal.SIGKILL)
        until("the daemon forgets the killed container", lambda: name not in cni.ports(), 60 * SLOW)


@contextlib.contextmanager
def podman():
    """A fabric whose host is a namespace with addresses of both families, and podman there."""
    need_root()
    plugin()
    with scratch() as folder, Namespace() as outside, contextlib.ExitStack() as stack:
        way_out6(outside)
        text = kernel_uplink().format(name=f"pod{os.getpid()}")
        f = stack.enter_context(Fabric(folder, text, netns=outside, own_mounts=False, options=["--leave-on-term"]))
        listed = conflist(f)
        listed["plugins"][0]["capabilities"] = {"portMappings": True, "ips": True}
        engine = stack.enter_context(Podman(stack.enter_context(scratch()), listed, outside))
        yield f, engine, outside
        namespaces = engine.namespaces()
        engine("rm", "--all", "--force", "--time", "0")
        assert not [path for path in namespaces if os.path.exists(path)]
        assert not engine.mounts_left()


def http(outside, url):
    return outside.run("busybox", "timeout", "5", "busybox", "wget", "-q", "-O", "-", url, check=False).stdout


@timeout(240)
def test_podman_runs_containers_on_the_fabric():
    with podman() as (f, engine, outside):
        cni = Cni(f)
        server = ("--name", "web", "-p", "8099:80", "localhost/bb:1", "/bin/sh", "-c", "echo from podman >/tmp/index.html; exec busybox httpd -f -p 80 -h /tmp")
        engine("run", "-d", *server)
        seen = json.loads(engine("inspect", "web").stdout)[0]["NetworkSettings"]["Networks"]["pods"]
        held = {lease["ip"] for lease in f.status()["networks"][0]["leases"] if lease["name"] == "web"}
        assert held == {seen["IPAddress"], seen["GlobalIPv6Address"]} and seen["IPPrefixLen"] == 22, (held, seen)
        assert seen["MacAddress"] in cni.ports()["web"]["guard"] and seen["Gateway"] == f.status()["networks"][0]["router"], seen
        shown = engine("exec", "web", "ip", "address", "show", "dev", "eth0").stdout
        assert "mtu 1400" in shown and all(ip in shown for ip in held), shown
        # Another container reaches it by both families, and by its name.
        for ip in held:
            done = engine("run", "--rm", "localhost/bb:1", "ping", "-c", "1", "-W", "20", ip)
            assert "1 packets received" in done.stdout, done
        done = engine("run", "--rm", "localhost/bb:1", "wget", "-q", "-O", "-", f"http://web.{f.name}.internal/")
        assert done.stdout == "from podman\n", done
        assert set(cni.ports()) == {"web"}, "those with --rm are gone"
        # The host reaches its port, and the container the world.
        until("the port leads to the container", lambda: http(outside, "http://198.51.100.2:8099/") == "from podman\n", 30)
        assert http(outside, "http://127.0.0.1:8099/") == "from podman\n"
        assert "1 packets received" in engine("exec", "web", "ping", "-c", "1", "-W", "20", "198.51.100.2").stdout
        # A second container cannot have the port, and leaves nothing.
        done = engine("run", "-d", "--name", "second", "-p", "8099:81", "localhost/bb:1", "sleep", "1000", check=False)
        assert done.returncode and "that no other forward has, found tcp 0.0.0.0:8099" in done.stderr, done
        engine("rm", "--force", "second")
        assert set(cni.ports()) == {"web"}
        # Stopped, it is no part of the fabric; started again it is, and its port too.
        engine("stop", "--time", "0", "web")
        assert not cni.ports() and not f.status()["forwards"] and not http(outside, "http://198.51.100.2:8099/")
        engine("start", "web")
        until("the port leads there again", lambda: http(outside, "http://198.51.100.2:8099/") == "from podman\n", 30)
        # The daemon may be killed under it.
        f.kill()
        f.start()
        until("the port leads there after a crash", lambda: http(outside, "http://198.51.100.2:8099/") == "from podman\n", 60)
        # It may be stopped and replaced, as kubelet does it. The kernel looks for another user of
        # the link-local address each time.
        show = lambda: engine("exec", "web", "ip", "address", "show", "dev", "eth0").stdout.replace(" tentative", "")  # noqa: E731
        shown = show()
        for how in ("SIGTERM", "SIGUSR2", "a handover"):
            if how == "a handover":
                f.replace(60 * SLOW)
            else:
                f.process.signal(signal.Signals[how])
                assert f.process.wait(60 * SLOW) == 0, f.process.tail()
                f.start()
            until(f"the port leads there after {how}", lambda: http(outside, "http://198.51.100.2:8099/") == "from podman\n", 60)
            assert show() == shown, (how, shown)
            assert "1 packets received" in engine("exec", "web", "ping", "-c", "1", "-W", "20", "198.51.100.2").stdout, how
        engine("run", "-d", "--name", "chosen", "--ip", "10.236.1.77", "localhost/bb:1", "sleep", "1000")
        assert "10.236.1.77/22" in engine("exec", "chosen", "ip", "address").stdout
        engine("rm", "--force", "--time", "0", "web", "chosen")
        assert not cni.ports() and not f.status()["forwards"] and not f.status()["networks"][0]["leases"]


@timeout(300)
def test_podman_without_root_runs_containers_on_a_fabric_of_its_user():
    need_root()
    with scratch() as folder:
        name = f"rl{os.getpid()}"
        (folder / "pods.toml").write_text(f'name = "{name}"\n[network.lan]\nsubnet = "10.237.0.0/22"\n')
        plugins = [{"type": "tombolo-cni", "fabric": name, "runtime": str(RootlessPodman.HOME / "run"), "capabilities": {"ips": True}}]
        with RootlessPodman(folder, {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}) as podman:
            tombolo = RootlessPodman.HOME / "bin/tombolo"

            def ports():
                status = json.loads(podman.run(podman.inside(tombolo, "status", "--json")).stdout)
                return {port["name"]: port["up"] for port in status["ports"] if "container" in port["details"]}

            with Process(podman.inside(tombolo, "up", RootlessPodman.HOME / "pods.toml"), name="tombolo") as daemon:
                daemon.wait_line(lambda line: " is up" in line, 60 * SLOW)
                podman("run", "--detach", "--network", "pods", "--name", "one", "--ip", "10.237.1.9", "localhost/bb:1", "sleep", "3600")
                assert ports() == {"one": True}
                said = podman("run", "--rm", "--network", "pods", "localhost/bb:1", "sh", "-c", f"ip address show eth0; ping -c 1 -W 5 one.{name}.internal").stdout
                assert "inet 10.237." in said and "inet6 fd" in said and "1 packets received" in said, said
                until("the second one's port is gone", lambda: ports() == {"one": True}, 30)
                # Its daemon is killed, and the next one has it. `podman unshare` is between this
                # test and the daemon.
                podman.run(podman.words("kill", "-9", json.loads((folder / "run" / name / "owner.json").read_text())["pid"]))
                until("the daemon has ended", lambda: daemon.popen.poll() is not None, 30)
                with Process(podman.inside(tombolo, "up", RootlessPodman.HOME / "pods.toml"), name="next") as following:
                    following.wait_line(lambda line: " is up" in line, 60 * SLOW)
                    assert ports() == {"one": True}
                    podman("rm", "--force", "--time", "0", "one")
                    assert ports() == {}
                    podman.run(podman.inside(tombolo, "down"))
                    until("the daemon has ended", lambda: following.popen.poll() is not None, 30)


@timeout(300)
def test_twenty_containers_of_podman_come_and_go_and_leave_nothing():
    count = 20
    with podman() as (f, engine, outside):
        cni = Cni(f)
        before = len(f.status()["ports"]), outside.run("nft", "list", "ruleset").stdout
        names = [f"c{n}" for n in range(count)]

        def each(make):
            # Four at a time.
            for first in range(0, count, 4):
                running = [subprocess.Popen([*engine.words, *make(n)], env=engine.environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                           for n in range(first, first + 4)]
                for process in running:
                    _, said = process.communicate(timeout=120 * SLOW)
                    assert process.returncode == 0, said

        each(lambda n: ["run", "-d", "--name", names[n], "-p", f"{8100 + n}:80", "localhost/bb:1", "sleep", "1000"])
        # A listener of each family for each.
        assert set(cni.ports()) == set(names) and len(f.status()["forwards"]) == 2 * count
        assert len({lease["ip"] for lease in f.status()["networks"][0]["leases"]}) == 2 * count
        namespaces = engine.namespaces()
        assert len(namespaces) == count
        # Half are removed, half end by themselves and are cleaned up by podman's monitor.
        each(lambda n: ["rm", "--force", "--time", "0", names[n]] if n % 2 else ["kill", names[n]])
        until("all are gone", lambda: not cni.ports(), 60)
        status = f.status()
        assert len(status["ports"]) == before[0] and not status["networks"][0]["leases"] and not status["forwards"], status
        assert outside.run("nft", "list", "ruleset").stdout == before[1]
        until("no namespace is left", lambda: not [path for path in namespaces if os.path.exists(path)], 30)


@timeout(120)
def test_cnitool_drives_all_commands():
    tool = cnitool()
    with fabric() as f, scratch() as folder, Namespace() as one:
        (folder / "10-pods.conflist").write_text(json.dumps(conflist(f, "1.1.0")))
        environment = dict(os.environ, NETCONFPATH=str(folder), CNI_PATH=str(BUILT))

        def run(command, *words):
            inside = ["nsenter", f"--net=/run/netns/{f.netns}", str(tool), command, "pods", *words]
            done = subprocess.run(inside, env=environment, capture_output=True, text=True, timeout=60 * SLOW)
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            return done.stdout

        run("status", path(one))
        assert json.loads(run("add", path(one)))["cniVersion"] == "1.1.0"
        run("check", path(one))
        run("del", path(one))
        assert not Cni(f).ports()


@timeout(120)
def test_a_microvms_monitor_opens_its_tap_and_its_guest_is_on_the_fabric():
    with fabric() as f, Namespace() as one, Namespace() as two:
        cni, vms = Cni(f, "1.0.0"), Cni(f, "1.0.0", vm="tap")
        result = vms("ADD", "vm1", path(one), args="IgnoreUnknown=1;TC_REDIRECT_TAP_NAME=tap7;TC_REDIRECT_TAP_UID=1234;TC_REDIRECT_TAP_GID=1235")
        tap, guest = result["interfaces"]
        assert (tap["name"], tap["sandbox"], guest["name"], guest["sandbox"]) == ("tap7", path(one), "tap7", "vm1"), result
        assert len(result["ips"]) == 1 and result["ips"][0]["interface"] == 1
        shown = json.loads(one.ip("-j", "-d", "link", "show", "tap7"))[0]
        assert shown["mtu"] == 1400 and shown["linkinfo"]["info_data"]["user"] in (1234, "1234"), shown
        assert shown["linkinfo"]["info_data"]["group"] in (1235, "1235"), shown
        ip = result["ips"][0]["address"].split("/")[0]
        peer = cni("ADD", "c2", path(two))
        # As a monitor does: one frame per call, with a vnet header.
        monitor = Tap(one, "tap7", mac=guest["mac"], mtu=1400)
        # The device keeps the size of its header; a monitor sets the one that it uses.
        fcntl.ioctl(monitor.fd, TUNSETVNETHDRSZ, struct.pack("i", 10))
        try:
            until("the port is up", lambda: vms.ports()["vm1"]["up"], 60)
            theirs, ours = (bytes(map(int, address.split("."))) for address in (peer["ips"][0]["address"].split("/")[0], ip))
            mac = mac_bytes(guest["mac"])
            ask = b"\xff" * 6 + mac + bytes.fromhex("08060001080006040001") + mac + ours + bytes(6) + theirs
            monitor.send(ask)
            got = monitor.receive(20, lambda frame: frame[12:14] == b"\x08\x06" and frame[28:32] == theirs)
            assert got and got[1][6:12] == mac_bytes(peer["interfaces"][0]["mac"]), got
            # The guard holds the guest to its address.
            monitor.send(ask.replace(ours, bytes([10, 236, 3, 200])))
            until("a stolen address is dropped", lambda: vms.ports()["vm1"]["counters"]["rx_drops"], 60)
            vms("CHECK", "vm1", path(one), args="TC_REDIRECT_TAP_NAME=tap7", prevResult=result)
        finally:
            monitor.close()
        f.kill()
        f.start()
        assert set(cni.ports()) == {"vm1", "c2"}
        vms("DEL", "vm1", path(one), args="TC_REDIRECT_TAP_NAME=tap7")
        cni("DEL", "c2", path(two))
        assert not cni.ports() and "tap7" not in one.ip("link")


@timeout(120)
def test_a_microvm_whose_tap_has_a_name_of_its_own_is_known_by_the_name_of_its_interface():
    with fabric() as f, Namespace() as one, Namespace() as two:
        vms = Cni(f, "1.1.0", vm="tap")
        named = {"args": "TC_REDIRECT_TAP_NAME=tap7"}
        result = vms("ADD", "vm1", path(one), **named)
        vms("ADD", "vm2", path(two), args="TC_REDIRECT_TAP_NAME=tap8")
        assert {port["details"]["container"] for port in vms.ports().values()} == {"pods/vm1/eth0", "pods/vm2/eth0"}
        # GC's list has CNI_IFNAME: the virtual machine that lives stays.
        vms("GC", **{"cni.dev/valid-attachments": [{"containerID": "vm1", "ifname": "eth0"}]})
        assert set(vms.ports()) == {"vm1"}
        # CHECK and DEL need no argument. A second ADD, as after a kill, replaces the tap though it
        # has another name.
        vms("CHECK", "vm1", path(one), prevResult=result)
        again = vms("ADD", "vm1", path(one), args="TC_REDIRECT_TAP_NAME=tap9")
        assert again["interfaces"][1]["mac"] == result["interfaces"][1]["mac"] and set(vms.ports()) == {"vm1"}
        assert "tap7" not in one.ip("link") and "tap9" in one.ip("link")
        vms("DEL", "vm1", path(one))
        assert "tap9" not in one.ip("link") and not vms.ports()
        # So it is without a daemon, and after GC, which leaves the tap.
        vms("ADD", "vm1", path(one), **named)
        f.kill()
        vms("DEL", "vm1", path(one))
        vms("DEL", "vm2", path(two), args="TC_REDIRECT_TAP_NAME=tap8")
        assert "tap7" not in one.ip("link") and "tap8" not in two.ip("link")
        f.start()
        assert not vms.ports()


@timeout(120)
def test_the_jailers_user_opens_the_tap_and_no_other_user_does():
    need_program("setpriv")
    opens = ("import fcntl, os, struct, sys\nfd = os.open(sys.argv[1], os.O_RDWR)\n"
             "fcntl.ioctl(fd, 0x400454CA, struct.pack('16sH22x', b'tap7', 0x5002))\nprint('opened')")
    with fabric() as f, Namespace() as one, scratch() as folder:
        # As the jailer makes one: the machine's own may be root's.
        device = folder / "tun"
        os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(10, 200))
        device.chmod(0o666)
        folder.chmod(0o755)
        vms = Cni(f, "1.0.0", vm="tap")
        vms("ADD", "vm1", path(one), args="TC_REDIRECT_TAP_NAME=tap7;TC_REDIRECT_TAP_UID=1234;TC_REDIRECT_TAP_GID=1235")

        def opened(user, group):
            words = ["nsenter", f"--net={path(one)}", "setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "python3", "-c", opens, device]
            done = subprocess.run(words, capture_output=True, text=True, timeout=60 * SLOW)
            assert done.returncode == 0 or "PermissionError" in done.stderr, done
            return "opened" in done.stdout

        assert opened(1234, 1235)
        assert not opened(1236, 1235) and not opened(1234, 1236)
        assert opened(0, 0), "root opens any"
        vms("DEL", "vm1", path(one))


@timeout(120)
def test_a_plugin_without_privileges_says_what_it_lacks_and_changes_nothing():
    need_program("setpriv")
    with fabric() as f, Namespace() as one, tempfile.TemporaryDirectory() as public:
        os.chmod(public, 0o755)
        copy = shutil.copy(plugin(), public)
        cni = Cni(f, "1.1.0")
        cni("ADD", "c1", path(one))
        # The way to the socket is open; it is the daemon that refuses.
        for folder in (f.folder, f.folder / "run", f.runtime):
            os.chmod(folder, 0o755)
        anybody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", copy]
        for command, code in (("ADD", 5), ("CHECK", 5), ("GC", 5), ("STATUS", 50), ("DEL", 5)):
            container = "c2" if command == "ADD" else "c1"
            said = refused(code, cni, command, container, path(one), program=anybody, **{"cni.dev/valid-attachments": []})
            assert "belongs to another user; run this as its owner" in said, (command, said)
        assert set(cni.ports()) == {"c1"} and "eth0" in one.ip("link")
        # Root, and no more rights over the namespace: the container's interface cannot be made.
        bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", copy]
        with Namespace() as two:
            said = refused(5, cni, "ADD", "c2", path(two), program=bare)
            assert "CAP_SYS_ADMIN" in said, said
            assert "eth0" not in two.ip("link") and set(cni.ports()) == {"c1"}
        cni("DEL", "c1", path(one))


@timeout(120)
def test_a_container_keeps_the_offloads_of_its_tap():
    need_program("ethtool")
    with fabric() as f, Namespace() as one, Namespace() as two:
        cni = Cni(f, "1.1.0")
        results = {name: cni("ADD", name, path(space)) for name, space in (("c1", one), ("c2", two))}
        features = dict(line.strip().split(": ", 1) for line in one.run("ethtool", "-k", "eth0").stdout.splitlines()[1:])
        for name in ("tx-checksum-ip-generic", "scatter-gather", "tcp-segmentation-offload", "tx-tcp-segmentation", "tx-tcp6-segmentation"):
            assert features[name] == "on", (name, features)
        # A stream of 20 MB: frames that the kernel has not cut, from one container into the other.
        server = "import socket\ns=socket.create_server(('',7000))\nprint('ready',flush=True)\nc,_=s.accept()\nn=0\n" \
                 "while d:=c.recv(1<<20): n+=len(d)\nprint(n,flush=True)"
        client = f"import socket\ns=socket.create_connection(('{of(results['c2'], 0)}',7000))\ns.sendall(bytes(20_000_000))"
        before = {name: port["counters"] for name, port in cni.ports().items()}
        with Process(["python3", "-c", server], netns=two, own_mounts=False) as receiver:
            receiver.wait_line(lambda line: line == "ready")
            one.run("python3", "-c", client)
            receiver.wait_line(lambda line: line == "20000000")
        after = {name: port["counters"] for name, port in cni.ports().items()}
        for name, way in (("c1", "rx"), ("c2", "tx")):
            count, size = (after[name][f"{way}_{unit}"] - before[name][f"{way}_{unit}"] for unit in ("frames", "bytes"))
            assert size > 20_000_000 and size / count > 2 * 1400, (name, way, count, size)
        for name, space in (("c1", one), ("c2", two)):
            cni("DEL", name, path(space))


@timeout(120)
def test_what_a_container_receives_has_its_rate():
    with fabric() as f, Namespace() as one, Namespace() as two:
        cni = Cni(f, "1.1.0")
        rate = 4_000_000
        limited = cni("ADD", "c1", path(one), runtimeConfig={"bandwidth": {"ingressRate": rate, "ingressBurst": 400_000}})
        other = cni("ADD", "c2", path(two))
        assert two.answers(of(limited, 0))

        def received():
            return int(one.run("cat", "/sys/class/net/eth0/statistics/rx_bytes").stdout)

        # 40 Mbit in datagrams of 1000 bytes, of which the container gets what its rate lets
        # through, and no less.
        flood = f"import socket\ns=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\nfor _ in range(5000): s.sendto(bytes(1000),('{of(limited, 0)}',9))"
        before, began = received(), time.monotonic()
        two.run("python3", "-c", flood)
        seen = [-1]
        until("what is late has come", lambda: seen.append(received()) or seen[-1] == seen[-2], 10)
        took, got = time.monotonic() - began, (received() - before) * 8
        assert 0.1 * rate < got < rate * took + 1_000_000, (got, took)
        # The other direction is not limited.
        sent = lambda: cni.ports()["c1"]["counters"]["rx_bytes"]  # noqa: E731
        before = sent()
        one.run("python3", "-c", flood.replace(of(limited, 0), of(other, 0)))
        # A tap has no back-pressure, so not all of the 5 MB.
        until("the flood", lambda: sent() - before > 500_000, 10)
        assert not cni.ports()["c1"]["counters"]["rx_drops"].get("rate_limit"), cni.ports()["c1"]["counters"]
        for name, space in (("c1", one), ("c2", two)):
            cni("DEL", name, path(space))


SLOW_END = """
[vm.slow]
disk = "blank.raw"
accel = "tcg"
memory = "64M"
"""


@timeout(240)
def test_what_comes_while_the_file_is_applied_waits_and_is_told_to_try_again():
    need_root()
    plugin()
    with scratch() as folder, Namespace() as outside, Namespace() as one, Namespace() as two, contextlib.ExitStack() as stack:
        outside.way_out()
        (folder / "blank.raw").write_bytes(bytes(1 << 20))
        text = FILE.format(name=f"busy{os.getpid()}")
        f = stack.enter_context(Fabric(folder, text + SLOW_END, netns=outside, own_mounts=False))
        cni = Cni(f, "1.1.0")
        cni("ADD", "c1", path(one))

        @contextlib.contextmanager
        def applying():
            """An apply that waits 15 s for a virtual machine whose firmware does not hear the power button."""
            # A virtual machine that has just started may end at once.
            until("the firmware runs", lambda: f.machine("slow")["uptime_s"] > 5, 60)
            f.file.write_text(text)
            with Process([PROGRAM, "apply", f.file], name="apply", netns=outside, env=f.env, own_mounts=False) as apply:
                until("the fabric is being changed", lambda: f.ask("PATCH", "/v1/ports/x", {"toml": "rate = 5"})[0] == 503, 30, every=0.1)
                yield apply
                assert apply.wait(60 * SLOW) == 0, apply.tail()

        with applying() as apply:
            began = time.monotonic()
            running = [cni.start("ADD", "c2", path(two)), cni.start("GC", **{"cni.dev/valid-attachments": []})]
            for process in running:
                try:
                    cni.finish(process)
                    raise AssertionError("the apply ended before the limit")
                except Failed as error:
                    assert error.code == 11 and "being changed" in error.text, (error.code, error.text)
            assert 8 < time.monotonic() - began and apply.alive(), "they tried for 10 s"
            assert "eth0" not in two.ip("link")
            # One that comes later has its turn when the apply is done.
            late = [cni.start("ADD", "c2", path(two)), cni.start("DEL", "c1", path(one))]
            for process in late:
                cni.finish(process)
        assert set(cni.ports()) == {"c2"} and "eth0" not in one.ip("link")
        # A daemon that is told to leave meanwhile leaves when the apply is done.
        f.file.write_text(text + SLOW_END)
        f.cli("apply", f.file)
        with applying():
            f.process.signal(signal.SIGUSR2)
        assert f.process.wait(60 * SLOW) == 0, f.process.tail()
        f.start()
        assert set(cni.ports()) == {"c2"} and not f.status()["machines"]
        cni("DEL", "c2", path(two))
        assert not cni.ports()


@timeout(120)
def test_down_leaves_no_interface_in_a_container():
    with fabric() as f, Namespace() as one, Namespace() as two, Namespace() as three:
        cni, vms = Cni(f, "1.1.0"), Cni(f, "1.1.0", vm="tap")

        def add():
            cni("ADD", "c1", path(one))
            vms("ADD", "vm1", path(two), args="TC_REDIRECT_TAP_NAME=tap7")
            # What came in the place of a tap is another's.
            cni("ADD", "c3", path(three))
            three.ip("link", "del", "eth0")
            three.ip("tuntap", "add", "dev", "eth0", "mode", "tap")

        for crash in (False, True):
            add()
            if crash:
                f.kill()
                f.cli("down", "--fabric", f.name)
            else:
                f.cli("down")
                f.process.wait(60 * SLOW)
            assert "eth0" not in one.ip("link") and "tap7" not in two.ip("link"), f"crash: {crash}"
            assert "eth0" in three.ip("link")
            three.ip("link", "del", "eth0")
            f.start()
            assert not cni.ports()


def kernel_uplink():
    """A fabric whose network takes forwards while it runs."""
    return FILE.replace('"user"', '"kernel"')


def heard(outside, address, port):
    """What a connection from the host gets."""
    return outside.run("busybox", "timeout", "5", "busybox", "nc", address, port, check=False).stdout


def listens(outside, address, port):
    """Whether a connection from the host gets what the container says."""
    return "from the container" in heard(outside, address, port)


def way_out6(outside):
    outside.way_out()
    outside.ip("-6", "address", "add", "2001:db8:5::1/64", "dev", "out0", "nodad")
    outside.ip("-6", "route", "add", "default", "via", "2001:db8:5::2", "dev", "out0")


def resolved(space, name, result, n=0):
    """What the fabric's name server says of a name or an address, asked at the nameserver `n` of an answer."""
    return space.run("busybox", "nslookup", name, result["dns"]["nameservers"][n], check=False).stdout


@timeout(180)
def test_a_container_has_an_address_of_each_family():
    need_root()
    plugin()
    with scratch() as folder, Namespace() as outside, Namespace() as one, Namespace() as two, contextlib.ExitStack() as stack:
        way_out6(outside)
        text = kernel_uplink().format(name=f"six{os.getpid()}") + 'ipv6 = "fd12:3456:789a:c::/64"\n'
        f = stack.enter_context(Fabric(folder, text, netns=outside, own_mounts=False))
        # A runtime that has IPv6 off by default, for networks without it.
        two.run("sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1")
        # And one whose link-local addresses do not show the MAC address.
        one.run("sysctl", "-qw", "net.ipv6.conf.default.addr_gen_mode=3")
        for version in ("0.3.1", "0.4.0", "1.0.0", "1.1.0"):
            cni = Cni(f, version)
            result, other = cni("ADD", "c1", path(one)), cni("ADD", "c2", path(two))
            # At the return of ADD, without a wait for duplicate address detection.
            assert addresses6(one) == [of(result, 1)] and addresses6(two) == [of(other, 1)], (result, addresses6(one))
            assert result["ips"][1]["address"].startswith("fd12:3456:789a:c::") and result["ips"][1]["address"].endswith("/64")
            assert result["ips"][1].get("version") == ("6" if version < "1.0.0" else None) and result["ips"][1]["interface"] == 0
            assert [route["dst"] for route in result["routes"]] == ["0.0.0.0/0", "::/0"]
            assert {"fd12:3456:789a:c::2"} == {result["ips"][1]["gateway"], result["routes"][1]["gw"]}
            assert "default via fd12:3456:789a:c::2" in one.ip("-6", "route")
            assert link_local(result["interfaces"][0]["mac"]) in one.ip("-6", "address", "show", "dev", "eth0", "scope", "link")
            assert one.answers(of(other, 1)), "to another container"
            assert one.answers("2001:db8:5::1"), "by the default route"
            # AAAA and PTR, over both families.
            for n in range(2):
                assert of(result, 1) in resolved(two, f"c1.{result['dns']['domain']}", result, n)
                assert f"c1.{result['dns']['domain']}" in resolved(two, of(result, 1), result, n)
            leases = f.status()["networks"][0]["leases"]
            assert {lease["ip"] for lease in leases if lease["name"] == "c1"} == {of(result, 0), of(result, 1)}, leases
            if version >= "0.4.0":
                cni("CHECK", "c1", path(one), prevResult=result)
                one.ip("-6", "address", "del", result["ips"][1]["address"], "dev", "eth0")
                assert f"not the address {of(result, 1)}" in refused(101, cni, "CHECK", "c1", path(one), prevResult=result)
                one.ip("-6", "address", "add", result["ips"][1]["address"], "dev", "eth0", "nodad")
                one.ip("-6", "route", "del", "default")
                assert "no default route by fd12:3456:789a:c::2" in refused(101, cni, "CHECK", "c1", path(one), prevResult=result)
                one.ip("-6", "route", "add", "default", "via", "fd12:3456:789a:c::2", "dev", "eth0")
                cni("CHECK", "c1", path(one), prevResult=result)
                lacks = {**result, "ips": result["ips"][:1]}
                assert of(result, 1) in refused(101, cni, "CHECK", "c1", path(one), prevResult=lacks)
            # The guard: no address but this one.
            one.ip("-6", "address", "add", "fd12:3456:789a:c::bad/128", "dev", "eth0", "nodad")
            one.run("ping", "-c1", "-W1", "-I", "fd12:3456:789a:c::bad", of(other, 1), check=False)
            assert "guard" in cni.ports()["c1"]["counters"]["rx_drops"], cni.ports()["c1"]["counters"]
            # Also after a restart of the daemon.
            f.kill()
            f.start()
            until("the containers are back", lambda: all(port["up"] for port in cni.ports().values()), 60)
            assert addresses6(two) == [of(other, 1)] and two.answers(of(result, 1))
            cni("DEL", "c1", path(one))
            assert of(result, 1) not in resolved(two, f"c1.{result['dns']['domain']}", result)
            cni("DEL", "c2", path(two))
            assert not cni.ports() and not f.status()["networks"][0]["leases"]


@timeout(120)
def test_a_container_has_the_ways_out_of_the_user_uplink():
    need_root()
    plugin()
    with scratch() as folder, Namespace() as outside, Namespace() as one:
        way_out6(outside)
        outside.run("sh", "-c", "echo 0 2147483647 >/proc/sys/net/ipv4/ping_group_range")
        with Fabric(folder, FILE.format(name=f"out{os.getpid()}"), netns=outside, own_mounts=False) as f:
            until("passt has IPv6", lambda: f.status()["networks"][0]["router6"])
            router = f.status()["networks"][0]["router6"]
            cni = Cni(f, "1.1.0")
            result = cni("ADD", "c1", path(one))
            assert router.startswith("fe80::") and [route["gw"] for route in result["routes"]] == ["10.236.0.2", router], result
            assert f"default via {router} dev eth0" in one.ip("-6", "route")
            assert one.answers("2001:db8:5::1") and one.answers("198.51.100.2")
            cni("CHECK", "c1", path(one), prevResult=result)
            cni("DEL", "c1", path(one))
            assert not cni.ports()


@timeout(120)
def test_addresses_that_the_runtime_chooses_are_one_of_each_family():
    with fabric() as f, Namespace() as one, Namespace() as two:
        cni = Cni(f, "1.1.0")
        network = f.status()["networks"][0]
        prefix = network["prefix6"].removesuffix("/64")

        def ips(*all):
            return {"runtimeConfig": {"ips": list(all)}}

        result = cni("ADD", "c1", path(one), **ips(f"{prefix}77/64", "10.236.1.77/22"))
        assert (of(result, 0), of(result, 1)) == ("10.236.1.77", f"{prefix}77") and addresses6(one) == [f"{prefix}77"]
        assert len(result["routes"]) == 1, "this host has no way out by IPv6"
        for wrong in ("fd00:bad::1", network["gateway6"], prefix, "::1"):
            assert wrong in refused(7, cni, "ADD", "c2", path(two), **ips(wrong)), wrong
        assert "each family" in refused(7, cni, "ADD", "c2", path(two), **ips(f"{prefix}78", f"{prefix}79"))
        said = refused(100, cni, "ADD", "c2", path(two), **ips(f"{prefix}77"))
        assert f"{prefix}77, which is that of c1" in said and said.count("expected") == 1, said
        said = refused(100, cni, "ADD", "c2", path(two), **ips("10.236.1.77"))
        assert "10.236.1.77, which is that of [tap.c1]" in said and said.count("expected") == 1, f"{said}: one fault, said once"
        assert "eth0" not in two.ip("link") and set(cni.ports()) == {"c1"}
        # Also in parallel: one of two has it.
        cni("DEL", "c1", path(one))
        both = [cni.start("ADD", name, path(space), **ips(f"{prefix}77")) for name, space in (("c1", one), ("c2", two))]
        codes = []
        for process in both:
            try:
                codes.append(of(cni.finish(process), 1))
            except Failed as error:
                codes.append(error.code)
        assert sorted(codes, key=str) == sorted([100, f"{prefix}77"], key=str), codes
        cni("DEL", "c1", path(one))
        cni("DEL", "c2", path(two))
        assert not cni.ports() and not f.status()["networks"][0]["leases"]


@timeout(120)
def test_a_network_without_ipv6_gives_ipv4_alone():
    need_root()
    plugin()
    with scratch() as folder, Namespace() as outside, Namespace() as one:
        outside.way_out()
        for more in ('ipv6 = "off"\n', ""):
            text = FILE.format(name=f"four{os.getpid()}") + more
            text = text if more else text.replace("mtu = 1400", "mtu = 1200")
            with Fabric(folder, text, netns=outside, own_mounts=False) as f:
                cni = Cni(f, "1.0.0")
                result = cni("ADD", "c1", path(one))
                assert len(result["ips"]) == len(result["routes"]) == 1 and not addresses6(one), result
                assert len(result["dns"]["nameservers"]) == 1
                cni("CHECK", "c1", path(one), prevResult=result)
                cni("DEL", "c1", path(one))
                assert "expected no IPv6 address" in refused(7, cni, "ADD", "c1", path(one), runtimeConfig={"ips": ["fd00::7"]})
                assert "eth0" not in one.ip("link")


@timeout(60)
def test_a_second_interface_leaves_the_default_routes_to_the_first_and_its_answer_says_so():
    need_root()
    plugin()
    with scratch() as folder, Namespace() as outside, Namespace() as one, contextlib.ExitStack() as stack:
        way_out6(outside)
        f = stack.enter_context(Fabric(folder, kernel_uplink().format(name=f"two{os.getpid()}"), netns=outside, own_mounts=False))
        cni = Cni(f, "1.1.0")
        results = [cni("ADD", "c1", path(one), name) for name in ("eth0", "eth1")]
        assert [len(result["routes"]) for result in results] == [2, 0], results
        for family in ("-4", "-6"):
            ways = json.loads(one.ip(family, "-j", "route", "show", "default"))
            assert [way["dev"] for way in ways] == ["eth0"], ways
        for name, result in zip(("eth0", "eth1"), results, strict=True):
            cni("CHECK", "c1", path(one), name, prevResult=result)
        # Once the first has gone, the next one has them.
        cni("DEL", "c1", path(one), "eth0")
        cni("DEL", "c1", path(one), "eth1")
        assert len(cni("ADD", "c1", path(one), "eth1")["routes"]) == 2


@timeout(120)
def test_port_mappings_lead_to_the_container_and_end_with_it():
    need_root()
    plugin()
    tool = cnitool()
    with scratch() as folder, Namespace() as outside, Namespace() as one, Namespace() as two, contextlib.ExitStack() as stack:
        way_out6(outside)
        text = kernel_uplink().format(name=f"map{os.getpid()}")
        f = stack.enter_context(Fabric(folder, text, netns=outside, own_mounts=False))
        cni = Cni(f, "1.1.0")
        mappings = [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}, {"hostPort": 8081, "containerPort": 80, "hostIP": "127.0.0.1"},
                    {"hostPort": 8053, "containerPort": 53, "protocol": "UDP"}, {"hostPort": 8084, "containerPort": 80, "hostIP": "::1"},
                    {"hostPort": 8085, "containerPort": 80, "hostIP": "2001:db8:5::1"}]
        config = {"runtimeConfig": {"portMappings": mappings}}
        result = cni("ADD", "c1", path(one), **config)
        server = ("import socket\nwith socket.create_server(('::', 80), family=socket.AF_INET6, dualstack_ipv6=True) as s:\n while True:\n"
                  "  c, peer = s.accept()\n  c.sendall(f'from the container to {c.getsockname()[0]} of {peer[0]}\\n'.encode())\n  c.close()")
        stack.enter_context(Process(["python3", "-c", server], name="server", netns=one))
        until("the mapping leads to the container", lambda: listens(outside, "198.51.100.2", "8080"), 30)
        until("also from the host's loopback", lambda: listens(outside, "127.0.0.1", "8081"), 30)
        for address in ("2001:db8:5::1", "::1"):
            until(f"without a hostIP also from {address}", lambda: listens(outside, address, "8080"), 30)  # noqa: B023
            assert f"to {of(result, 1)} " in heard(outside, address, "8080"), "it goes to the container's IPv6 address"
        until("from its IPv6 loopback", lambda: listens(outside, "::1", "8084"), 30)
        until("from its IPv6 address", lambda: listens(outside, "2001:db8:5::1", "8085"), 30)
        for address, port in (("::1", "8084"), ("2001:db8:5::1", "8085")):
            assert f"to {of(result, 1)} " in heard(outside, address, port), "it goes to the container's address of that family"
        assert f"to ::ffff:{of(result, 0)} " in heard(outside, "198.51.100.2", "8080")
        assert not listens(outside, "198.51.100.2", "8081"), "it is of 127.0.0.1 alone"
        assert {(w["proto"], w["listen"], w["to"]) for w in f.status()["forwards"]} == {
            ("tcp", "0.0.0.0:8080", "c1:80"), ("tcp", "127.0.0.1:8081", "c1:80"), ("udp", "0.0.0.0:8053", "c1:53"),
            ("tcp", "[::1]:8084", "c1:80"), ("tcp", "[2001:db8:5::1]:8085", "c1:80"), ("tcp", "[::]:8080", "c1:80"), ("udp", "[::]:8053", "c1:53")}
        # A container of the same network, and this one itself, by the host's addresses.
        inside = stack.enter_context(Namespace())
        cni("ADD", "c9", path(inside))
        for space in (inside, one):
            for address, port in (("198.51.100.2", "8080"), ("2001:db8:5::1", "8085")):
                until(f"{address} from {space}", lambda: listens(space, address, port), 30)  # noqa: B023
        cni("DEL", "c9", path(inside))
        cni("CHECK", "c1", path(one), prevResult=result, **config)
        more = {"runtimeConfig": {"portMappings": [{"hostPort": 9999, "containerPort": 9}]}}
        assert "9999" in refused(101, cni, "CHECK", "c1", path(one), prevResult=result, **more)
        # Taken by another container, by a program of the host, and of an address that the host has
        # not.
        said = refused(100, cni, "ADD", "c2", path(two), **config)
        assert said.startswith("runtimeConfig.portMappings: ") and "found tcp 0.0.0.0:8080, which leads to c1:80" in said, said
        assert "forward[" not in said, f"{said}: the runtime wrote no forward"
        holder = stack.enter_context(Process(["busybox", "nc", "-l", "-p", "8082"], name="holder", netns=outside))
        until("the port is taken", lambda: ":8082" in outside.run("ss", "-tln").stdout, 20)
        taken = {"runtimeConfig": {"portMappings": [{"hostPort": 8082, "containerPort": 80}]}}
        said = refused(100, cni, "ADD", "c2", path(two), **taken)
        assert said.startswith("runtimeConfig.portMappings: the forward of tcp 0.0.0.0:8082: another program listens there"), said
        assert "choose another port" in said, said
        holder.kill()
        assert "hostIP" in refused(7, cni, "ADD", "c2", path(two), runtimeConfig={"portMappings": [{**mappings[0], "hostIP": "::g"}]})
        assert set(cni.ports()) == {"c1"} and "eth0" not in two.ip("link")
        # A daemon that is killed, and the next one.
        f.kill()
        f.start()
        until("the mapping is there again", lambda: listens(outside, "198.51.100.2", "8080"), 60)
        until("also the one of IPv6", lambda: listens(outside, "::1", "8084"), 60)
        cni("CHECK", "c1", path(one), prevResult=result, **config)
        cni("DEL", "c1", path(one), **config)
        rules = lambda: outside.run("nft", "list", "ruleset").stdout  # noqa: E731
        assert not f.status()["forwards"] and "dnat ip to" not in rules(), rules()
        assert not listens(outside, "::1", "8084")
        # By cnitool, which passes the capability on, and GC without the container in its list.
        listed = conflist(f, "1.1.0")
        listed["plugins"][0]["capabilities"] = {"portMappings": True}
        (folder / "10-pods.conflist").write_text(json.dumps(listed))
        environment = dict(os.environ, NETCONFPATH=str(folder), CNI_PATH=str(BUILT), CAP_ARGS=json.dumps({"portMappings": mappings}))
        add = ["nsenter", f"--net=/run/netns/{outside}", str(tool), "add", "pods", path(one)]
        done = subprocess.run(add, env=environment, capture_output=True, text=True, timeout=60 * SLOW)
        assert done.returncode == 0, (done.stdout, done.stderr)
        assert len(f.status()["forwards"]) == 7
        until("the mapping of cnitool leads there", lambda: listens(outside, "198.51.100.2", "8080"), 30)
        cni("GC", **{"cni.dev/valid-attachments": []})
        assert not f.status()["forwards"] and not cni.ports() and "dnat ip to" not in rules()
        # A container that ends while no daemon runs takes its mapping with it.
        one.ip("link", "del", "eth0")
        cni("ADD", "c3", path(one), **config)
        f.kill()
        cni("DEL", "c3", path(one), **config)
        f.start()
        assert not f.status()["forwards"] and not cni.ports() and "dnat ip to" not in rules()


@timeout(120)
def test_check_asks_for_no_mapping_of_ipv6_that_add_did_not_make():
    need_root()
    plugin()
    with scratch() as folder, Namespace() as outside, Namespace() as one, Namespace() as two, contextlib.ExitStack() as stack:
        way_out6(outside)
        text = kernel_uplink().format(name=f"later{os.getpid()}") + 'ipv6 = "fd12:3456:789a:c::/64"\n'
        f = stack.enter_context(Fabric(folder, text + 'uplink6 = "off"\n', netns=outside, own_mounts=False))
        cni = Cni(f, "1.1.0")
        config = {"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80}]}}
        result = cni("ADD", "c1", path(one), **config)
        assert [w["listen"] for w in f.status()["forwards"]] == ["0.0.0.0:8080"], f.status()["forwards"]
        cni("CHECK", "c1", path(one), prevResult=result, **config)
        f.file.write_text(text)
        f.cli("apply", f.file)
        cni("CHECK", "c1", path(one), prevResult=result, **config)
        # What is added from then on has both, and CHECK asks for both.
        other = {"runtimeConfig": {"portMappings": [{"hostPort": 8081, "containerPort": 80}]}}
        later = cni("ADD", "c2", path(two), **other)
        assert {"0.0.0.0:8081", "[::]:8081"} <= {w["listen"] for w in f.status()["forwards"]}
        cni("CHECK", "c2", path(two), prevResult=later, **other)
        with_more = {"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80}, *other["runtimeConfig"]["portMappings"]]}}
        assert "8080" in refused(101, cni, "CHECK", "c2", path(two), prevResult=later, **with_more)


@timeout(120)
def test_a_port_that_another_fabric_forwards_is_told_before_it_is_taken():
    need_root()
    plugin()
    with scratch() as folder, scratch() as other, Namespace() as outside, Namespace() as one, contextlib.ExitStack() as stack:
        way_out6(outside)
        forward = '[[forward]]\nlisten = "{}:8080"\nto = "10.236.1.9:80"\n'
        text = kernel_uplink().format(name=f"first{os.getpid()}") + 'ipv6 = "fd00:6::/64"\n'
        text += forward.format("0.0.0.0") + forward.format("[2001:db8:5::1]").replace("10.236.1.9", "[fd00:6::9]")
        stack.enter_context(Fabric(folder, text, netns=outside, own_mounts=False))
        second = kernel_uplink().format(name=f"second{os.getpid()}").replace("10.236.", "10.237.") + 'ipv6 = "fd00:7::/64"\n'
        took = f'fabric "first{os.getpid()}" of this machine forwards'
        # Another protocol, port or address is free.
        free = second + forward.format("0.0.0.0").replace("10.236", "10.237").replace(":8080", ":8081")
        f = stack.enter_context(Fabric(other, free, netns=outside, own_mounts=False))
        for listen in ("0.0.0.0", "198.51.100.2", "[2001:db8:5::1]", "[::]"):
            f.file.write_text(second + forward.format(listen).replace("10.236.1.9", "[fd00:7::9]" if "[" in listen else "10.237.1.9"))
            done = f.cli("apply", f.file, check=False)
            assert done.returncode and took in done.stdout + done.stderr and "choose another port" in done.stdout + done.stderr, done
        # So it is for a fabric that starts, and for a container.
        f.stop()
        done = f.cli("up", f.file, check=False, seconds=60)
        assert done.returncode and took in done.stderr, done
        f.file.write_text(free)
        f.start()
        said = refused(100, Cni(f, "1.1.0"), "ADD", "c1", path(one), runtimeConfig={"portMappings": [{"hostPort": 8080, "containerPort": 80}]})
        assert took in said, said
        assert "eth0" not in one.ip("link")
        Cni(f, "1.1.0")("ADD", "c1", path(one), runtimeConfig={"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "udp"}]})


@timeout(120)
def test_apply_keeps_the_port_mappings_of_containers():
    need_root()
    plugin()
    with scratch() as folder, Namespace() as outside, Namespace() as one, Namespace() as two, contextlib.ExitStack() as stack:
        way_out6(outside)
        text = kernel_uplink().format(name=f"kept{os.getpid()}")
        f = stack.enter_context(Fabric(folder, text, netns=outside, own_mounts=False))
        cni = Cni(f, "1.1.0")
        ports = [{"hostPort": 8080, "containerPort": 80, "hostIP": "0.0.0.0"}, {"hostPort": 8084, "containerPort": 80, "hostIP": "::1"}]
        mapped = {"runtimeConfig": {"portMappings": ports}}
        result = cni("ADD", "c1", path(one), **mapped)
        server = ("import socket, threading\ndef serve(c):\n c.sendall(b'from the container\\n')\n for d in iter(lambda: c.recv(99), b''): c.sendall(d)\n c.close()\n"
                  "with socket.create_server(('::', 80), family=socket.AF_INET6, dualstack_ipv6=True) as s:\n"
                  " while True: threading.Thread(target=serve, args=s.accept()[:1], daemon=True).start()")
        stack.enter_context(Process(["python3", "-c", server], name="server", netns=one))
        until("the mapping leads to the container", lambda: listens(outside, "198.51.100.2", "8080"), 30)
        # A connection through the mapping goes on while the file changes under it: one member and
        # one forward more, then fewer.
        talk = stack.enter_context(Process(["busybox", "nc", "198.51.100.2", "8080"], name="talk", netns=outside, stdin=True))
        talk.wait_line(lambda line: line == "from the container", 30)
        more = f'[tap.extra]\nnetns = "{path(two)}"\nip = "10.236.1.9"\n[[forward]]\nlisten = "0.0.0.0:9000"\nto = "extra:80"\n'
        for n, (changed, forwards) in enumerate(((text + more, 3), (text, 2))):
            f.file.write_text(changed)
            said = f.cli("apply", f.file).stdout
            assert "c1 was added while the fabric ran, and stays" in said and "refused" not in said, said
            assert len(f.status()["forwards"]) == forwards and set(cni.ports()) == {"c1"}, f.status()["forwards"]
            talk.send(f"word {n}\n")
            talk.wait_line(lambda line: line == f"word {n}", 30)  # noqa: B023
            for address, port in (("198.51.100.2", "8080"), ("::1", "8084")):
                until(f"the mapping of {address}", lambda: listens(outside, address, port), 30)  # noqa: B023
            cni("CHECK", "c1", path(one), prevResult=result, **mapped)
        # A rule, a forward and a setting about the container go with an apply, but for the setting; the container stays.
        f.cli("rule", "add", "allow", "--from", "c1")
        f.cli("forward", "add", "0.0.0.0:9001", "c1:80")
        f.cli("set", "tap.c1.class=high")
        said = f.cli("apply", f.file).stdout
        assert "c1 was added while the fabric ran, and stays" in said and "tap.c1" not in said, said
        config = json.loads(f.cli("config", "--json").stdout)
        assert config["changes"] == {} and config["config"]["tap"]["c1"]["class"] == "high", config
        assert len(f.status()["forwards"]) == 2 and set(cni.ports()) == {"c1"}, f.status()["forwards"]
        cni("CHECK", "c1", path(one), prevResult=result, **mapped)
        until("the mapping", lambda: listens(outside, "198.51.100.2", "8080"), 30)
        # A forward of the file at the mapping's port is refused, and says what has it.
        f.file.write_text(text + more.replace("9000", "8080"))
        done = f.cli("apply", f.file, check=False)
        assert done.returncode and "c1 was added while the fabric ran, and does not fit" in done.stderr and "8080" in done.stderr, done
        assert listens(outside, "198.51.100.2", "8080")
        cni("DEL", "c1", path(one), **mapped)
        assert not f.status()["forwards"]


@timeout(120)
def test_a_port_that_an_apply_moves_to_another_container_ends_with_that_one():
    with fabric() as f, Namespace() as one, Namespace() as two:
        text, cni = f.file.read_text(), Cni(f)
        for space in (one, two):
            mac = json.loads(space.ip("-j", "link", "show", space.tap("eth0")))[0]["address"]
            f.file.write_text(f'{text}[tap.web]\ndevice = "eth0"\nadopt = true\nnetns = "{path(space)}"\ncontainer = "pods/web/eth0"\n'
                              f'mac = "{mac}"\nip = "10.236.1.9"\nguard = "ip"\n')
            f.cli("apply", f.file)
            for _ in range(2):
                with Namespace() as other:
                    cni("ADD", "other", path(other))
                until("the daemon has looked at the namespaces", lambda: "other" not in cni.ports(), 60)
            assert space.answers(f.status()["networks"][0]["gateway"]), f"its container is the one in {space}"
        f.cli("down")
        f.process.wait()
        assert "eth0" not in two.ip("link"), "`down` finds it where it is"


@timeout(60)
def test_port_mappings_through_a_user_uplink_are_refused_with_what_to_do():
    with fabric() as f, Namespace() as one:
        said = refused(100, Cni(f), "ADD", "c", path(one), runtimeConfig={"portMappings": [{"hostPort": 8080, "containerPort": 80}]})
        assert "uplink \"kernel\"" in said and "tombolo apply" in said, said
        assert not f.status()["forwards"] and "eth0" not in one.ip("link")
