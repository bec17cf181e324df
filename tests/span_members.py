"""What a control plane says of members on other machines: the daemon's side, over its API. The other end is the kernel's vxlan device, which is
told nothing and learns nothing, so that each answer and each way is the daemon's own."""

import contextlib
import ipaddress
import json
import os
import signal
import socket

from lib import Namespace, Process, need_program, need_root, scratch, timeout, until
from lib.fabric import Fabric

OURS, THEIRS, THIRD = "192.0.2.1", "192.0.2.2", "192.0.2.3"
PREFIX6 = "fd00:1:2:3::"
HOST = "10.87.0.9"
# The member at the other machine.
FAR, FAR6, FAR_MAC = "10.87.0.50", PREFIX6 + "50", "02:00:00:00:00:50"
TEXT = f"""name = "one"
[network.lan]
subnet = "10.87.0.0/24"
ipv6 = "{PREFIX6}/64"
mtu = 1450
dhcp = {{ from = "10.87.0.10", to = "10.87.0.12" }}
[tap.host]
ip = "{HOST}"
[tap.client]
netns = "CLIENT"
[port.span]
kind = "vxlan"
vni = 42
local = "{OURS}"
remotes = ["{THEIRS}", "{THIRD}"]
learning = false
"""
# Asks the server ARGV[1] for the name ARGV[2] and the type ARGV[3], and prints the code and the
# data of the answers.
RESOLVE = """
import socket, struct, sys
name = b"".join(bytes([len(label)]) + label.encode() for label in sys.argv[2].split("."))
question = name + b"\\0" + struct.pack("!HH", int(sys.argv[3]), 1)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.settimeout(20)
    s.sendto(struct.pack("!6H", 7, 256, 1, 0, 0, 0) + question, (sys.argv[1], 53))
    answer = s.recv(2000)
at, found = 12 + len(question), [str(answer[3] & 15)]
for _ in range(struct.unpack("!H", answer[6:8])[0]):
    length = struct.unpack("!H", answer[at + 10:at + 12])[0]
    found.append(answer[at + 12:at + 12 + length].hex())
    at += 12 + length
print(*found)
"""


class Api:
    """What a control plane asks of a fabric."""

    def __init__(self, fabric):
        self.ask = fabric.ask

    def put(self, machine, members, address=THEIRS):
        return self.ask("PUT", f"/v1/networks/lan/remotes/{machine}", {"address": address, "members": members})

    def lose(self, *ips):
        return self.ask("PUT", "/v1/networks/lan/lost", {"ips": ips})


def member(mac, *ips, name=None):
    return {"name": name, "mac": mac, "ips": list(ips)}


@contextlib.contextmanager
def machines():
    """A fabric in one namespace with a member in another; a third one is the machine at the other end of the cable."""
    need_root()
    need_program("ethtool")
    with Namespace() as a, Namespace() as b, Namespace() as client, scratch() as folder:
        a.ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(b))
        for space, addresses in ((a, (OURS,)), (b, (THEIRS, THIRD))):
            space.run("ethtool", "-K", "eth0", "tx", "off")
            for address in addresses:
                space.ip("address", "add", f"{address}/24", "dev", "eth0")
            space.ip("link", "set", "eth0", "up")
        until("the cable", lambda: a.answers(THEIRS))
        with Fabric(folder, TEXT.replace("CLIENT", str(client)), netns=a) as fabric:
            a.ip("-6", "address", "add", f"{PREFIX6}9/64", "dev", "host", "nodad")
            yield fabric, Api(fabric), a, b, client


def far_end(b, fabric_mac):
    """The kernel's end: it learns nothing and asks nobody."""
    b.ip("link", "add", "vx0", "mtu", "1450", "address", FAR_MAC, "type", "vxlan", "id", "42", "dstport", "4789", "local", THEIRS, "remote", OURS,
         "nolearning")
    b.ip("address", "add", f"{FAR}/24", "dev", "vx0")
    b.ip("-6", "address", "add", f"{FAR6}/64", "dev", "vx0", "nodad")
    b.ip("link", "set", "vx0", "arp", "off", "up")
    for address in (HOST, PREFIX6 + "9"):
        b.ip("neigh", "replace", address, "lladdr", fabric_mac, "dev", "vx0", "nud", "permanent")


def neighbour(space, address):
    """The MAC address that the kernel has for an address on the tap."""
    words = space.ip("neigh", "show", address, "dev", "host").split()
    return words[words.index("lladdr") + 1] if "lladdr" in words else None


def detail(fabric, name):
    return fabric.port("span")["details"][name]


def sent(space):
    return int(space.run("cat", "/sys/class/net/eth0/statistics/tx_packets").stdout)


def events(fabric):
    return [json.loads(line)["text"] for line in fabric.cli("events", "--json", "--kind", "span").stdout.splitlines()]


@timeout(200)
def test_a_far_member_is_answered_for_while_it_is_down_and_reached_at_its_machine_alone():
    with machines() as (fabric, api, a, b, _client):
        assert not a.pings(FAR) and neighbour(a, FAR) is None, "nobody has told anything yet"
        assert api.put("node-2", [member(FAR_MAC, FAR, FAR6, name="web")]) == (200, {"schema": 1, "conflicts": []})
        # There is no tunnel at the other end at all.
        for address in (FAR, FAR6):
            a.run("ping", "-q", "-c", "1", "-W", "1", address, check=False)
            until(f"an answer for {address}", lambda ip=address: neighbour(a, ip) == FAR_MAC)
        assert detail(fabric, "arp_answers") >= 1 and detail(fabric, "nd_answers") >= 1
        before = fabric.port("span")["counters"]["rx_frames"]
        assert before == detail(fabric, "arp_answers") + detail(fabric, "nd_answers"), "they came in by the tunnel's port"
        [mac] = [line.split()[1] for line in a.ip("link", "show", "host").splitlines() if "link/ether" in line]
        far_end(b, mac)
        for address in (FAR, FAR6):
            until("an answer through the tunnel", lambda ip=address: a.answers(ip))
        packets = sent(a)
        a.run("ping", "-q", "-c", "20", "-i", "0.05", "-W", "10", FAR)
        packets = sent(a) - packets
        assert 20 <= packets < 30, f"{packets} packets for 20 requests: one each, to one of two remotes"
        # The same list changes nothing, another one does, and without one it is as before.
        assert api.put("node-2", [member(FAR_MAC, FAR, FAR6, name="web")])[0] == 200
        assert detail(fabric, "places") == 1 and detail(fabric, "answered_addresses") == 2
        assert api.ask("DELETE", "/v1/networks/lan/remotes/node-2") == (204, None)
        assert api.ask("DELETE", "/v1/networks/lan/remotes/node-2") == (204, None)
        until("the place to go", lambda: detail(fabric, "places") == 0)


@timeout(200)
def test_names_of_far_members_are_resolved_and_conflicts_are_reported():
    with machines() as (fabric, api, a, _b, _client):
        gateway = "10.87.0.1"

        def resolve(name, kind):
            return a.run("python3", "-c", RESOLVE, gateway, name, kind).stdout.split()

        assert resolve("web.one.internal", 1) == ["3"]
        mine = member("02:00:00:00:00:60", HOST, "10.87.0.60", name="host")
        status, answer = api.put("node-2", [member(FAR_MAC, FAR, FAR6, name="Web"), mine])
        expected = [{"member": "host", "mac": mine["mac"], "ip": HOST, "with": "the member host of this machine has it by the file"}]
        assert (status, answer["conflicts"]) == (200, expected)
        until("the name", lambda: resolve("web.one.internal", 1) == ["0", socket.inet_aton(FAR).hex()])
        assert resolve("web", 28) == ["0", ipaddress.IPv6Address(FAR6).packed.hex()]
        name = b"\x03web\x03one\x08internal\0".hex()
        for address in (FAR, FAR6):
            assert resolve(ipaddress.ip_address(address).reverse_pointer, 12) == ["0", name]
        assert resolve("host", 1) == ["0", socket.inet_aton(HOST).hex()], "the one of this machine"
        report = api.ask("GET", "/v1/networks/lan/remotes")[1]
        [machine] = report["machines"]
        assert (report["network"], machine["machine"], machine["address"]) == ("lan", "node-2", THEIRS), report
        assert [(entry["name"], entry["used"]) for entry in machine["members"]] == [("web", True), ("host", False)]
        assert any("10.87.0.9 of host (02:00:00:00:00:60) on the machine node-2 is in use here too" in text for text in events(fabric))
        for path, body, status, text in (
                ("lan/remotes/node-2", {"address": "192.0.2.9", "members": []}, 422, f"{THEIRS}, {THIRD}"),
                ("lan/remotes/node-2", {"address": THEIRS, "members": [member("ff:ff:ff:ff:ff:ff")]}, 400, "members[0].mac"),
                ("lan/remotes/a%20b", {"address": THEIRS, "members": []}, 400, "machine: expected a name"),
                ("wan/remotes/node-2", {"address": THEIRS, "members": []}, 404, "there are lan"),
                ("lan/lost", {"ips": ["10.87.0.255"]}, 400, "ips[0]: expected the IP address of one station"),
                ("wan/lost", {"ips": []}, 404, "there are lan")):
            found, fault = api.ask("PUT", f"/v1/networks/{path}", body)
            assert found == status and text in fault["error"], (path, body, found, fault)
        # Together no more than a tunnel takes.
        many = [member(f"02:01:00:00:{n >> 8:02x}:{n & 255:02x}") for n in range(4096)]
        for n in range(3):
            assert api.put(f"big-{n}", [dict(one, mac=f"02:0{n + 2}" + one["mac"][5:]) for one in many])[0] == 200
        # The machines with most are cut, so that none takes places which another one lacks.
        assert api.put("big-3", many)[0] == 200
        until("the event", lambda: any("more members than its share of the 16384 places of lan" in text for text in events(fabric)))


@timeout(200)
def test_leases_avoid_far_members_and_a_lost_one_ends_at_once():
    need_program("busybox")
    with machines() as (fabric, api, _a, _b, client):
        others = [member(f"02:00:00:00:00:7{n}", f"10.87.0.1{n}") for n in range(2)]
        assert api.put("node-2", others)[1]["conflicts"] == []
        script = fabric.folder / "script"
        script.write_text("#!/bin/sh\n[ \"$1\" = bound ] || [ \"$1\" = renew ] || exit 0\nip address flush dev client\n"
                          "ip address add $ip/24 dev client\n")
        script.chmod(0o755)

        def address():
            found = client.ip("-4", "-j", "address", "show", "dev", "client")
            return [one["local"] for device in json.loads(found) for one in device.get("addr_info", [])]

        words = ["busybox", "udhcpc", "-f", "-i", "client", "-s", script, "-t", "50", "-T", "1", "-A", "1"]
        with Process(words, name="udhcpc", netns=client) as process:
            until("a lease", address)
            assert address() == ["10.87.0.12"], "the two others are far members'"
            # What this machine has wins: the lease stays, and the conflict is told.
            conflicts = api.put("node-3", [member("02:00:00:00:00:80", "10.87.0.12", name="web")], THIRD)[1]["conflicts"]
            assert [(one["ip"], "has the lease" in one["with"]) for one in conflicts] == [("10.87.0.12", True)], conflicts
            assert detail(fabric, "answered_addresses") == 2, "not for that of the lease"
            # The control plane decides otherwise.
            naks = lambda: fabric.status()["networks"][0]["counters"]["dhcp_naks"]  # noqa: E731
            assert api.ask("DELETE", "/v1/networks/lan/remotes/node-2")[0] == 204
            assert (naks(), api.lose("10.87.0.12", HOST)) == (0, (200, {"schema": 1, "fixed": [HOST]}))
            until("the end of the lease", lambda: "10.87.0.12" not in [one["ip"] for one in fabric.status()["networks"][0]["leases"]])
            assert any(text.startswith("10.87.0.12 was lost to another machine: the lease of") for text in events(fabric)), events(fabric)
            assert any(f"{HOST} of host is in use on another machine as well" in text for text in fabric.status()["warnings"])
            until("the other's entry to be used", lambda: detail(fabric, "answered_addresses") == 1)
            # Guards know IPv4 addresses from the file alone, so what the client sends until it
            # renews its lease passes.
            before = fabric.port("client")["counters"]
            client.run("ping", "-c", "1", "-W", "1", HOST, check=False)
            after = fabric.port("client")["counters"]
            assert after["rx_frames"] > before["rx_frames"] and after["rx_drops"] == before["rx_drops"], after
            os.kill(process.pid, signal.SIGUSR1)
            until("another lease", lambda: address() and address() != ["10.87.0.12"])
            assert naks() >= 1 and address()[0] in ("10.87.0.10", "10.87.0.11"), address()
        assert api.lose()[1]["fixed"] == [] and not fabric.status()["warnings"]


@timeout(100)
def test_the_control_planes_report_is_shown_and_counted():
    with machines() as (fabric, api, _a, _b, _client):
        done = fabric.cli("span", "status", check=False)
        assert done.returncode == 1 and "tombolo: tombolo-span does not run for this fabric: " in done.stderr and "tombolo-span@NAME" in done.stderr, done
        machine = {"name": "node-2", "state": "up", "rtt_us": 210, "heard_s": 0.4, "members": 12, "networks": ["lan"], "addresses": [THEIRS]}
        report = {"machine": "node-1", "pid": 123, "uptime_s": 5.5, "site": "demo", "machines": [machine, dict(machine, name="node-3", state="stale")],
                  "networks": [{"name": "lan", "local": 3, "remote": 12}], "counters": {"messages_sent": 17},
                  "conflicts": [{"network": "lan", "what": "10.87.0.12", "machines": ["node-1", "node-2"], "winner": "node-1"}]}
        assert api.ask("PUT", "/v1/span", report) == (204, None)
        answer = json.loads(fabric.cli("span", "status", "--json").stdout)
        assert answer["report"] == report and 0 <= answer["age_s"] < 30, answer
        text = fabric.cli("span", "status").stdout
        assert "node-2   up" in text and "node-3   stale" in text and "10.87.0.12" in text, text
        api.put("node-2", [member(FAR_MAC, FAR)])
        lines = fabric.cli("metrics").stdout.splitlines()
        for line in ('tombolo_span_machines{state="up"} 1', 'tombolo_span_machines{state="stale"} 1', 'tombolo_span_members{network="lan"} 1',
                     "tombolo_span_conflicts 1"):
            assert line in lines, line
        assert any(line.startswith("tombolo_span_report_age_seconds 0") for line in lines)
        # A daemon that takes over knows nothing, and is told again.
        fabric.replace()
        assert api.ask("GET", "/v1/span")[0] == 404 and api.ask("GET", "/v1/networks/lan/remotes")[1]["machines"] == []
        assert fabric.status()["span"] is None and detail(fabric, "places") == 0
