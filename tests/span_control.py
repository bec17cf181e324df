"""The control plane of networks across machines (`tombolo-span`). A machine is a network namespace with an address on a common bridge, a
fabric, and a tombolo-span; its members are taps in namespaces of their own. The tunnels learn nothing: what they know, tombolo-span told."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

from lib import Namespace, Process, Skip, need_root, scratch, timeout, until
from lib.fabric import PROGRAM, Fabric
from lib.machine import ROOT, SLOW
from lib.netns import Bridge
from lib.process import thread_names

SPAN = Path(os.environ.get("TOMBOLO_SPAN", ROOT / "span/target/release/tombolo-span"))
PATIENCE_S = 60 * SLOW
PORT = 7447
# The shortest that it takes, so that a test of a dead machine is short.
LEASE_S = 5
# Beyond the leases that members get of their own machine.
FIXED = 100


class Machine:
    """Number 1 to 9, named node-N, at 10.233.2.N. Its gateway is 10.87.0.N, its member 10.87.0.(FIXED + N)."""

    def __init__(self, stack, folder, bridge, number, count, env=None):
        self.stack, self.bridge, self.number, self.name = stack, bridge, number, f"node-{number}"
        self.folder = folder / self.name
        self.folder.mkdir()
        self.address = f"10.233.2.{number}"
        self.others = [n for n in range(1, count + 1) if n != number]
        self.space, self.member = stack.enter_context(Namespace()), stack.enter_context(Namespace())
        bridge.join(self.space, self.name, self.address)
        # No network card fills in the checksums of what the tunnel carries.
        self.space.run("ethtool", "-K", "eth0", "tx", "off")
        remotes = ", ".join(f'"10.233.2.{n}"' for n in self.others)
        self.fabric = stack.enter_context(Fabric(self.folder, f"""name = "f-{number}"
[network.lan]
subnet = "10.87.0.0/24"
gateway = "10.87.0.{number}"
mtu = 1450
dhcp = {{ from = "10.87.0.50", to = "10.87.0.60" }}
[tap.member-{number}]
netns = "{self.member}"
ip = "10.87.0.{FIXED + number}"
[port.span]
kind = "vxlan"
vni = 42
local = "{self.address}"
remotes = [{remotes}]
learning = false
""", netns=self.space, env=env))
        self.span = None

    def start(self, *security, name=None):
        """Starts tombolo-span; `name` is another one than its own."""
        peers = [word for n in self.others if f"node-{n}" != name for word in ("--peer", f"node-{n}=10.233.2.{n}:{PORT}")]
        self.span = Process([SPAN, "--fabric", f"f-{self.number}", "--machine", name or self.name, "--listen", f"{self.address}:{PORT}", *peers,
                             "--lease", str(LEASE_S), *security], name=f"tombolo-span of {self.name}", netns=self.space, env=self.fabric.env, cwd=self.folder)
        self.stack.callback(self.span.kill)
        self.span.wait_line(lambda line: "listens at" in line)

    def cable(self, state):
        """Takes the machine from the network without a word, or puts it back."""
        self.bridge.cable(self.name, state)

    def report(self):
        """What `tombolo span status` shows; None where there is nothing yet."""
        done = self.fabric.cli("span", "status", "--json", check=False)
        return json.loads(done.stdout)["report"] if done.returncode == 0 else None

    def connections(self):
        """The ports of its connections to other machines, here and there."""
        listed = self.space.run("ss", "-tnH", "state", "established", f"( sport = :{PORT} or dport = :{PORT} )").stdout
        return [tuple(int(end.rpartition(":")[2]) for end in line.split()[2:4]) for line in listed.splitlines()]

    def states(self):
        return {machine["name"]: machine["state"] for machine in (self.report() or {}).get("machines", [])}

    def remotes(self):
        """The MAC addresses that the daemon knows on each other machine."""
        _, answer = self.fabric.ask("GET", "/v1/networks/lan/remotes")
        return {machine["machine"]: {member["mac"]: member for member in machine["members"]} for machine in answer["machines"]}

    def mac(self):
        return self.member.run("cat", f"/sys/class/net/member-{self.number}/address").stdout.strip()

    def details(self):
        return self.fabric.port("span")["details"]

    def knows(self, *others):
        until(f"{self.name} to know the members of {', '.join(o.name for o in others)}",
              lambda: all(o.mac() in self.remotes().get(o.name, {}) for o in others), PATIENCE_S, every=0.2,
              seen=lambda: "\n".join(f"{m.name} says {m.report()}, and its tombolo-span:\n{m.span.tail()}" for m in (self, *others)))

    def follows(self, mac, before, after):
        """Waits until it knows of the one machine's member that the other one has it now. A machine that has none is not in the list."""
        until(f"{self.name} to follow",
              lambda: mac in self.remotes().get(after.name, {}) and mac not in self.remotes().get(before.name, {}), PATIENCE_S, every=0.2)

    def waits(self, seconds):
        """Lets time pass, as its tombolo-span and its daemon count it."""
        begin = until("a report", self.report)["uptime_s"]
        until(f"{seconds} s more", lambda: self.report()["uptime_s"] >= begin + seconds, PATIENCE_S, every=0.5)

    def pings(self, other):
        return self.member.answers(f"10.87.0.{FIXED + other.number}")

    def takes_member_of(self, other, peer):
        """Moves the other machine's member to here: its interface ends there and appears here, with its addresses, and the peer's
        member hears it. Gives its MAC and IP address."""
        mac, ip = other.mac(), f"10.87.0.{FIXED + other.number}"
        other.member.ip("link", "set", f"member-{other.number}", "down")
        self.member.ip("link", "set", f"member-{self.number}", "address", mac)
        self.member.ip("address", "add", f"{ip}/24", "dev", f"member-{self.number}")
        command = ("ping", "-q", "-c", "1", "-W", "5", "-I", ip, f"10.87.0.{FIXED + peer.number}")
        until("traffic from it", lambda: self.member.run(*command, check=False).returncode == 0, PATIENCE_S)
        return mac, ip


def start_all(machines, keys):
    for machine in machines:
        machine.start("--keys", keys)


@contextlib.contextmanager
def machines(count, network=Bridge, kind=Machine):
    need_root()
    if not SPAN.exists():
        raise Skip(f"{SPAN} is not built: run ./x span-program")
    with scratch() as folder, contextlib.ExitStack() as stack:
        bridge = stack.enter_context(network())
        keys = folder / "keys"
        names = [f"node-{n}" for n in range(1, count + 1)]
        subprocess.run([PROGRAM, "service", "keys", "--keys", keys, *names], check=True, capture_output=True)
        yield (keys, *(kind(stack, folder, bridge, n, count) for n in range(1, count + 1)))


@timeout(300)
def test_three_machines_know_each_others_members_by_proven_names():
    with machines(3) as (keys, *all_three):
        one, two, three = all_three
        start_all(all_three, keys)
        for machine in all_three:
            machine.knows(*(other for other in all_three if other is not machine))
        assert one.pings(three) and two.pings(one)
        # zenoh's TLS is no use on two threads: src/carrier.rs.
        threads = thread_names(one.span.pid)
        assert [name for name in threads if name.startswith(("rx-", "tx-"))] == ["tx-0"], threads
        # Who has an address was answered here, and not asked over the tunnel.
        details = one.details()
        assert details["arp_answers"] >= 1, details
        until("the report", lambda: one.states() == {"node-2": "up", "node-3": "up"}, PATIENCE_S)
        report = one.report()
        assert report["machine"] == "node-1" and report["conflicts"] == [], report
        assert report["counters"]["messages_sent"] > 0 and report["counters"]["messages_refused"] == 0, report
        assert all(machine["rtt_us"] > 0 and machine["addresses"] for machine in report["machines"]), report
        shown = one.fabric.cli("span", "status").stdout
        assert "node-2" in shown and "up" in shown, shown


@timeout(300)
def test_a_machine_under_anothers_name_and_one_of_another_authority_are_not_believed():
    with machines(3) as (keys, one, two, three):
        one.start("--keys", keys)
        two.start("--keys", keys)
        one.knows(two)
        before = one.remotes()["node-2"]
        # Its certificate is its own, the name is that of another: node-2 lives, and must not lose
        # its members.
        false_keys = three.folder / "false"
        shutil.copytree(keys, false_keys)
        for end in ("pem", "key"):
            shutil.copy(keys / f"node-3.{end}", false_keys / f"node-2.{end}")
        three.others = [1]
        three.start("--keys", false_keys, name="node-2")
        one.waits(2 * LEASE_S)
        assert one.remotes()["node-2"].keys() == before.keys()
        assert three.mac() not in json.dumps(one.remotes())
        assert "node-3" not in [name for name, state in one.states().items() if state == "up"]
        three.span.stop()
        # Keys of another authority do not even connect.
        foreign = three.folder / "foreign"
        subprocess.run([PROGRAM, "service", "keys", "--keys", foreign, "node-3"], check=True, capture_output=True)
        three.others = [1, 2]
        three.start("--keys", foreign)
        one.waits(2 * LEASE_S)
        assert three.mac() not in json.dumps(one.remotes()) and three.states() in ({}, {"node-1": "unheard", "node-2": "unheard"}), three.states()
        assert one.pings(two)


@timeout(300)
def test_a_member_that_moves_to_another_machine_is_followed():
    with machines(3) as (keys, *all_three):
        one, two, three = all_three
        start_all(all_three, keys)
        three.knows(one, two)
        one.knows(two)
        assert one.pings(two)
        moved, address = three.takes_member_of(two, one)
        one.follows(moved, two, three)
        assert one.member.answers(address)


@timeout(300)
def test_a_member_that_a_second_machine_claims_too_stays_where_it_sends():
    with machines(3) as (keys, *all_three):
        one, two, three = all_three
        start_all(all_three, keys)
        for machine in all_three:
            machine.knows(*(other for other in all_three if other is not machine))
        mac = two.mac()
        sends(two, one)
        # Both send all the time now, so each machine claims it again and again.
        three.member.ip("link", "set", "member-3", "address", mac)
        sends(three, one)

        def at():
            return [machine for machine, members in one.remotes().items() if mac in members]

        def named():
            return [c for c in (one.report() or {}).get("conflicts", []) if c["what"] == mac and c["winner"] == "node-2"]

        until("the conflict", named, PATIENCE_S, every=0.2)
        until("node-1 to know it at node-2", lambda: at() == ["node-2"], PATIENCE_S, every=0.2)
        for _ in range(50):
            assert at() == ["node-2"], at()
            one.space.run("sleep", "0.2")
        assert any(f"machine node-3: two machines have a member with the MAC address {mac}" in line for _, line in one.span.lines), one.span.text
        assert one.pings(two)
        # When the second one has gone, there is no conflict.
        three.member.ip("link", "set", "member-3", "down")
        until("no conflict", lambda: not one.report()["conflicts"], PATIENCE_S, every=0.5)


def sends(machine, other):
    """Has the machine's member send all the time."""
    process = Process(["ping", "-q", "-i", "0.2", f"10.87.0.{FIXED + other.number}"], netns=machine.member)
    machine.stack.callback(process.kill)


@timeout(300)
def test_whatever_ends_what_is_known_stays_and_a_dead_machine_is_forgotten():
    with machines(3) as (keys, *all_three):
        one, two, three = all_three
        start_all(all_three, keys)
        one.knows(two, three)
        until("a report", one.report)
        # The program is killed: the daemon forwards as before.
        one.span.signal(signal.SIGKILL)
        one.span.wait()
        assert one.pings(two) and two.mac() in one.remotes()["node-2"]
        until("a warning", lambda: "may have ended" in one.fabric.cli("span", "status", check=False).stdout, PATIENCE_S, every=0.5)
        assert "node-2" in one.fabric.cli("span", "status").stdout
        one.start("--keys", keys)
        until("a report", lambda: one.states() == {"node-2": "up", "node-3": "up"}, PATIENCE_S)
        # A daemon that hangs does not make the others forget its machine.
        one.fabric.process.signal(signal.SIGSTOP)
        two.waits(2 * LEASE_S)
        assert two.states()["node-1"] == "up", two.states()
        one.fabric.process.signal(signal.SIGCONT)
        # The daemon is killed and comes back: it is told all again.
        one.fabric.kill()
        one.fabric.start()
        one.knows(two, three)
        assert one.pings(two)
        # A member is announced again once it sends.
        three.knows(one, two)
        # A machine loses its network: the others, who hear each other, forget it; it keeps what it
        # knew.
        three.cable("down")
        until("node-3 to be forgotten", lambda: "node-3" not in one.remotes() and "node-3" not in two.remotes(), PATIENCE_S, every=0.5)
        assert one.mac() in three.remotes()["node-1"] and two.mac() in three.remotes()["node-2"]
        until("the report", lambda: one.states()["node-3"] == "gone", PATIENCE_S)
        assert one.pings(two)
        three.cable("up")
        one.knows(three)
        three.knows(one, two)
        assert one.pings(three)
        # A stopped program is as a dead one; when it goes on, all is as before.
        two.span.signal(signal.SIGSTOP)
        until("node-2 to be forgotten", lambda: "node-2" not in one.remotes(), PATIENCE_S, every=0.5)
        two.span.signal(signal.SIGCONT)
        one.knows(two)
        for machine in all_three:
            machine.span.stop()
            machine.fabric.down()


@timeout(300)
def test_a_connection_that_one_end_still_has_does_not_keep_the_other_ends_next_one_from_being_heard():
    with machines(2) as (keys, one, two):
        start_all((one, two), keys)
        one.knows(two)
        two.knows(one)
        # With one of each direction, what one end opens next may be added to what the other end still has, and be dropped for as long as they
        # were connected before.
        one.waits(LEASE_S)
        for loser, other in ((one, two), (two, one)):
            [(own, far)] = loser.connections()
            # It gives its connection up, and nothing tells the other end of that.
            other.space.run("nft", "add table ip hide; add chain ip hide in { type filter hook input priority 0; }; "
                                   f"add rule ip hide in ip saddr {loser.address} tcp sport {own} tcp dport {far} drop")
            loser.space.run("ss", "-K", "-tn", "state", "established", f"( sport = :{own} and dport = :{far} )")
            assert (own, far) not in loser.connections()
            # What is new at either end is heard by way of the next one.
            for machine, hears in ((loser, other), (other, loser)):
                name = f"after-{loser.number}"
                text = machine.fabric.file.read_text() + f'[tap.{name}]\nnetns = "{machine.member}"\nip = "10.87.0.{200 + 10 * loser.number + machine.number}"\n'
                machine.fabric.file.write_text(text)
                machine.fabric.cli("apply")
                mac = machine.member.run("cat", f"/sys/class/net/{name}/address").stdout.strip()
                until("the member to be known", lambda: mac in hears.remotes()[machine.name], PATIENCE_S, every=0.2)
            until("both to be heard", lambda: one.states() == {"node-2": "up"} and two.states() == {"node-1": "up"}, PATIENCE_S, every=0.2)
            assert len(loser.connections()) == 1, loser.connections()


@timeout(300)
def test_an_address_that_both_sides_of_a_partition_gave_away_is_one_members_after_it():
    # The client of each side asks for the same address of the same range.
    with machines(3) as (keys, *all_three):
        one, two, three = all_three
        three.cable("down")
        guests = {}
        for machine in (one, three):
            guests[machine] = machine.stack.enter_context(Namespace())
            machine.fabric.file.write_text(machine.fabric.file.read_text() + f'[tap.guest]\nnetns = "{guests[machine]}"\n')
            machine.fabric.cli("apply")
            assert lease(machine, guests[machine], "10.87.0.50") == "10.87.0.50", machine.name
        start_all(all_three, keys)
        one.knows(two)
        three.cable("up")
        one.knows(two, three)
        conflict = until("the conflict", lambda: one.report()["conflicts"] or lost(three), PATIENCE_S, every=0.2)
        print(conflict)
        until("the later machine to end its lease", lambda: lost(three), PATIENCE_S, every=0.2)
        assert not lost(one)
        # Asked again, the gateway gives another one, and the first stays where it was.
        assert lease(three, guests[three]) not in ("", "10.87.0.50")
        until("no conflict", lambda: not one.report()["conflicts"] and not three.report()["conflicts"], PATIENCE_S, every=0.5)
        holders = [m for m in three.remotes()["node-1"].values() if "10.87.0.50" in m["ips"]]
        assert len(holders) == 1, holders


def lease(machine, guest, asked=None):
    """The address that a DHCP client in a namespace is given, which may ask for one."""
    files = machine.folder / "client"
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir()
    script = files / "script"
    script.write_text('#!/bin/sh\n[ -z "$new_ip_address" ] || echo "$new_ip_address" > ' + f"{files}/address\n")
    script.chmod(0o755)
    # Taps come up with their daemon; the client's own script would do it otherwise.
    guest.ip("link", "set", "guest", "up")
    settings = files / "settings"
    settings.write_text(f"send dhcp-requested-address {asked};\n" if asked else "")
    given = lambda: (files / "address").read_text().strip() if (files / "address").exists() else ""  # noqa: E731
    # In the foreground: in the background, it could outlive the test that has not seen its number.
    words = ["dhclient", "-1", "-d", "-v", "-cf", settings, "-sf", script, "-lf", files / "leases", "-pf", files / "pid", "guest"]
    with Process(words, name="dhclient", netns=guest) as client:
        until("an address, or the client's end", lambda: given() or not client.alive(), PATIENCE_S + 60)
        print(client.text)
    return given()


def lost(machine):
    """Whether its gateway has ended the lease of that address."""
    network = machine.fabric.status()["networks"][0]
    return all(lease["ip"] != "10.87.0.50" for lease in network["leases"])
