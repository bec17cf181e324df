"""tombolo-span by way of zenohd itself, the router that docs/span.md tells to run, which `./x span-peers` builds from crates.io. (The router of
tests/span_router.py is zenoh's library for Python.) zenohd gets the settings that `tombolo-span --router-config` prints: mutual TLS, and
access control by the names in the certificates."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import span_router
from lib import ROOT, Skip, timeout, until
from lib.fabric import PROGRAM
from span_control import LEASE_S, PATIENCE_S, SPAN
from span_router import HUB, PORT, Hub

ZENOHD = Path(os.environ.get("TOMBOLO_ZENOHD", ROOT / "build/zenohd/bin/zenohd"))
# What a client of TLS gets from the router: the folder with ca.pem, and the name whose key it has,
# or "". One that is accepted hears nothing, since zenoh waits for its first message.
CLIENT = f"""
import socket, ssl, sys
folder, name = sys.argv[1:]
context = ssl.create_default_context(cafile=folder + "/ca.pem")
context.minimum_version = ssl.TLSVersion.TLSv1_3
if name:
    context.load_cert_chain(f"{{folder}}/{{name}}.pem", f"{{folder}}/{{name}}.key")
with socket.create_connection(("{HUB}", {PORT}), timeout=60) as plain:
    with context.wrap_socket(plain, server_hostname="hub") as client:
        # Of TLS 1.3 the client is done before the server has looked at its certificate.
        client.settimeout(2)
        try:
            print("heard", len(client.recv(1)))
        except TimeoutError:
            print("accepted")
        except (ssl.SSLError, ConnectionError) as error:
            print("refused:", error)
"""


class Zenohd(Hub):
    """As [Hub], with zenohd as the router."""

    def command(self, config):
        return [ZENOHD, "--config", config]

    def is_ready(self, line):
        return f"can be reached at: tls/{HUB}:{PORT}" in line


def needed():
    for program, recipe in ((SPAN, "span-program"), (ZENOHD, "span-peers")):
        if not program.exists():
            raise Skip(f"{program} is not built: run ./x {recipe}")


def machines(count):
    return span_router.machines(count, Zenohd, needed)


def moves(source, target):
    """Has a machine's member end there and appear at another one, where it sends a frame. Gives its MAC address."""
    mac, device = source.mac(), f"member-{target.number}"
    source.member.ip("link", "set", f"member-{source.number}", "down")
    target.member.ip("link", "set", device, "address", mac)
    target.member.pings(f"10.87.0.{target.number}")
    return mac


@timeout(300)
def test_machines_that_reach_only_zenohd_know_each_others_members_and_call_each_other():
    span_router.members_and_calls_cross(machines)


@timeout(400)
def test_a_call_through_zenohd_has_one_named_answer_whatever_ends_it():
    span_router.calls_end_once(machines)


@timeout(300)
def test_a_machine_under_anothers_name_is_not_believed_through_zenohd():
    span_router.another_name_is_not_believed(machines)


@timeout(300)
def test_what_is_known_outlives_zenohd_and_a_member_that_moved_meanwhile_is_followed():
    with machines(3) as (stack, hub, folder, keys, one, two, three):
        one.serve()
        one.start("--keys", keys, "--export", "calc=node-2")
        two.start("--keys", keys, "--import", "calc=node-1")
        three.start("--keys", keys)
        config = one.config(folder)
        hub.route(stack, config)
        for machine in (one, two, three):
            machine.knows(*(other for other in (one, two, three) if other is not machine))
        two.reaches()

        def is_at(mac, target, other):
            known = one.remotes()
            return mac in known.get(target.name, {}) and mac not in known.get(other.name, {})

        # While zenohd is there, a member is followed.
        moved = moves(two, three)
        until("node-1 to follow", lambda: is_at(moved, three, two), PATIENCE_S, every=0.2)
        known = {machine: machine.remotes() for machine in (one, two)}
        hub.router.signal(signal.SIGKILL)
        hub.router.wait()
        # Meanwhile it moves back.
        three.member.ip("link", "set", "member-3", "down")
        two.member.ip("link", "set", "member-2", "up")
        two.member.pings("10.87.0.2")
        for machine in (one, two):
            machine.waits(2 * LEASE_S)
            assert set(machine.states().values()) == {"stale"}, machine.states()
        # node-2 has its member again, and node-1 cannot know it.
        assert one.remotes() == known[one] and two.remotes()["node-1"] == known[two]["node-1"], (one.remotes(), two.remotes(), known)
        assert "no service" in two.call("1 + 1")
        hub.route(stack, config)
        until("node-1 to follow back", lambda: is_at(moved, two, three), PATIENCE_S, every=0.2)
        until("all to be heard", lambda: one.states() == {"node-2": "up", "node-3": "up"}, PATIENCE_S)
        two.reaches()
        assert one.report()["conflicts"] == [], one.report()


@timeout(300)
def test_zenohd_lets_no_outsider_in():
    with machines(3) as (stack, hub, folder, keys, one, two, three):
        one.serve()
        one.start("--keys", keys, "--export", "calc=node-2")
        two.start("--keys", keys, "--import", "calc=node-1")
        hub.route(stack, one.config(folder))
        one.knows(two)
        two.reaches()
        foreign = folder / "foreign"
        subprocess.run([PROGRAM, "service", "keys", "--keys", foreign, "node-3"], check=True, capture_output=True)
        (foreign / "ca.pem").write_bytes((keys / "ca.pem").read_bytes())

        def gets(where, name):
            return three.space.run(sys.executable, "-c", CLIENT, where, name).stdout.strip()

        # A certificate of the authority is what makes the difference.
        assert gets(keys, "node-3") == "accepted"
        assert gets(keys, "").startswith("refused: "), gets(keys, "")
        assert gets(foreign, "node-3").startswith("refused: "), gets(foreign, "node-3")
        # Neither is there a way for tombolo-span.
        known = {machine.name: machine.remotes() for machine in (one, two)}
        for security in (("--no-tls",), ("--keys", foreign)):
            three.start(*security)
            three.span.wait_line(lambda line: "it is tried again" in line)
            three.waits(LEASE_S)
            assert three.states() == {"node-1": "unheard", "node-2": "unheard"}, three.states()
            three.span.stop()
        for machine in (one, two):
            assert machine.remotes() == known[machine.name] and machine.states()["node-3"] == "unheard", (machine.remotes(), machine.states())
        two.reaches()
        three.start("--keys", keys)
        one.knows(three)
