"""Each party is killed by SIGKILL, beside others that must not notice: a cell's QEMU, passt, the daemon at rest and at seeded
moments of its start, the fd store. Every fabric is in its own network namespace, so that its leftovers can be told apart."""

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

from lib import Fabric, Namespace, Process, http_get, need_program, need_root, scratch, timeout, until
from lib.fabric import PROGRAM
from lib.process import children

FILE = """
name = "{name}"
[network.lan]
subnet = "10.233.0.0/24"
uplink = "{uplink}"
[cell.web]
app = "httpd"
ip = "10.233.0.20"
accel = "tcg"
[cell.meter]
app = "iperf"
ip = "10.233.0.21"
accel = "tcg"
[[forward]]
listen = "127.0.0.1:8080"
to = "web:80"
"""
# With the kernel uplink the host is on the network by the uplink's own tap.
TAP = """
[tap.host]
ip = "10.233.0.9"
"""
WEB, METER = "10.233.0.20", "10.233.0.21"
PATIENCE_S = 120
SEED = 20261121


@contextlib.contextmanager
def place():
    """A folder and a namespace that has a way out for passt to copy: a pair of interfaces with the default route."""
    need_root()
    with Namespace() as space, scratch() as folder:
        space.way_out()
        yield space, folder


def text(uplink="user"):
    return FILE.format(name=f"k{os.getpid()}", uplink=uplink) + (TAP if uplink == "user" else "")


def page(space, host, port=80, seconds=30):
    try:
        reply = http_get(host, port=port, seconds=seconds, netns=space)
        return reply.status == 200 and b"tombolo cell" in reply.body
    except (OSError, ValueError):
        return False


def all_well(space):
    """Both cells answer through the tap, and the page comes through the forward too."""
    until("a ping through the tap to web", lambda: space.pings(WEB), PATIENCE_S)
    until("a ping through the tap to meter", lambda: space.pings(METER), PATIENCE_S)
    until("the page through the tap", lambda: page(space, WEB, seconds=5), PATIENCE_S)
    until("the page through the forward", lambda: page(space, "127.0.0.1", 8080, seconds=5), PATIENCE_S)


def exists(pid):
    """Whether a process runs; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def pids(fabric):
    return {machine["name"]: machine["pid"] for machine in fabric.status()["machines"]}


def killed_while_it_starts(text, seed, thens, well):
    """The daemon killed at a random moment of its start, once for each of `thens`, which says what is done after that: "start" a daemon,
    see that all is `well`, and end it; "down" alone; or nothing, so that the next daemon starts "again" beside what this one left."""
    dice = random.Random(seed)
    print(f"seed {seed}")
    with place() as (space, folder):
        began = time.monotonic()
        with Fabric(folder, text, netns=space) as fabric:
            whole = time.monotonic() - began

            fabric.down()
            for round_, then in enumerate(thens):
                moment = dice.uniform(0.0, 1.1) * whole
                with Process([PROGRAM, "up", fabric.file], name="tombolo", netns=space, env=fabric.env, cwd=folder) as daemon:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        # The moment at which it dies, not a wait for anything.
                        daemon.popen.wait(moment)
                    assert daemon.alive(), f"round {round_}: it ended by itself:\n{daemon.tail()}"
                print(f"round {round_}: killed after {moment * 1000:.0f} of {whole * 1000:.0f} ms")
                if then == "start":
                    fabric.start()
                    well(space, fabric)
                    fabric.down()
                elif then == "down":
                    # `down` alone, which says so where there is nothing to do.
                    done = fabric.cli("down", "--fabric", fabric.name, check=False)
                    assert done.returncode == 0 or "not run" in done.stderr or "no fabric" in done.stderr, done.stderr
                    fabric.nothing_left()


@timeout(600)
def test_a_cell_killed():
    need_program("passt")
    with place() as (space, folder), Fabric(folder, text(), netns=space) as fabric:
        all_well(space)
        before = pids(fabric)
        # A download is on its way out of the other cell all the while.
        size = 20_000_000
        with Process(["curl", "-sS", "-o", "/dev/null", "-w", "%{size_download}\n", f"http://{WEB}/bytes/{size}"], netns=space) as load:
            os.kill(before["meter"], signal.SIGKILL)
            until("the report of meter's end", lambda: fabric.machine("meter")["state"] == "failed", PATIENCE_S)
            assert load.wait(PATIENCE_S) == 0 and load.text == str(size), load.text
        meter = fabric.machine("meter")
        first, *lines = meter["last_end"].splitlines()
        assert "signal 9" in first, meter
        assert any("|" in line and METER in line for line in lines), f"no console lines of it: {meter['last_end']}"
        assert any("meter" in warning for warning in fabric.status()["warnings"])
        until("meter's port to go down", lambda: not fabric.port("meter")["up"], PATIENCE_S)
        fabric.process.wait_line(lambda line: "meter: signal 9" in line)
        web = fabric.port("web")
        assert web["up"] and web["counters"]["faults"] == 0 and pids(fabric)["web"] == before["web"], web
        assert page(space, WEB) and page(space, "127.0.0.1", 8080)

        fabric.cli("cell", "run", "meter", "--fabric", fabric.name)
        all_well(space)
        meter = fabric.machine("meter")
        assert meter["state"] == "running" and meter["pid"] != before["meter"], meter
        assert fabric.port("meter")["up"] and fabric.status()["warnings"] == []
        fabric.down()


@timeout(600)
def test_passt_killed():
    need_program("passt")
    with place() as (space, folder), Fabric(folder, text(), netns=space) as fabric:
        all_well(space)
        before = pids(fabric)
        for round_ in range(2):
            [passt] = children(fabric.process.pid, "passt")
            os.kill(passt, signal.SIGKILL)
            # Who does not use the uplink does not notice.
            assert page(space, WEB) and space.answers(METER), round_
            until("another passt", lambda: children(fabric.process.pid, "passt") not in ([], [passt]), PATIENCE_S)
            until("the page through the forward", lambda: page(space, "127.0.0.1", 8080, seconds=5), PATIENCE_S)
            fabric.process.wait_line(lambda line: "passt ended" in line)
            state = fabric.status()
            assert state["networks"][0]["uplink_fault"] is None and state["forwards"][0]["fault"] is None, state
        assert pids(fabric) == before
        fabric.down()


@timeout(600)
def test_the_daemon_killed_under_load():
    need_program("passt")
    with place() as (space, folder), Fabric(folder, text(), netns=space) as fabric:
        all_well(space)
        before = pids(fabric)
        leases = {lease["mac"]: lease["ip"] for lease in fabric.status()["networks"][0]["leases"]}
        for _ in range(2):
            # Frames are on their way through the rings when it dies.
            with Process(["curl", "-sS", "-o", "/dev/null", f"http://{WEB}/bytes/1000000000"], netns=space):
                seen = fabric.port("web")["counters"]["rx_bytes"]
                until("traffic", lambda: fabric.port("web")["counters"]["rx_bytes"] > seen + 2_000_000, PATIENCE_S)
                [passt] = children(fabric.process.pid, "passt")
                fabric.kill()
            until("passt's end", lambda: not exists(passt))
            until("the tap's end", lambda: "host" not in space.run("ls", "/sys/class/net").stdout.split())
            assert all(exists(pid) for pid in before.values()), "the guests outlive the daemon"
            fabric.start()
            all_well(space)
            assert pids(fabric) == before
            assert all(machine["adopted"] for machine in fabric.status()["machines"])
            assert leases == {lease["mac"]: lease["ip"] for lease in fabric.status()["networks"][0]["leases"]}
            assert [port["counters"]["faults"] for port in fabric.status()["ports"]] == [0] * len(fabric.status()["ports"])
        fabric.down()


@timeout(600)
def test_the_daemon_killed_while_it_starts():
    need_program("passt")
    thens = ("again", "down", "again", "down", "start", "down", "again", "down", "again", "start")
    killed_while_it_starts(text(), SEED, thens, lambda space, _: all_well(space))


@timeout(600)
def test_the_kernel_uplinks_rules():
    """Masquerade, forwards and ip_forward: they work, survive nothing but a SIGKILL, and are gone after every `down`."""
    need_program("nft")
    with place() as (space, folder):
        def forwarding():
            return space.run("cat", "/proc/sys/net/ipv4/ip_forward").stdout

        before = forwarding()
        with Fabric(folder, text("kernel"), netns=space) as fabric:
            all_well(space)
            rules = space.run("nft", "list", "ruleset").stdout
            assert "masquerade" in rules and "dport 8080" in rules and forwarding() == "1\n", rules
            fabric.down()
            assert forwarding() == before

            fabric.start()
            machines = pids(fabric)
            all_well(space)
            fabric.kill()
            assert f"tombolo_{fabric.name}" in space.run("nft", "list", "tables").stdout
            fabric.start()
            all_well(space)
            assert pids(fabric) == machines
            assert space.run("nft", "list", "ruleset").stdout.count("dport 8080") == rules.count("dport 8080"), "rules twice"
            fabric.down()
            assert forwarding() == before
            until("the machines' end", lambda: not any(exists(pid) for pid in machines.values()))


SHARED = """
name = "{name}"
[network.lan]
subnet = "10.233.0.0/24"
[cell.web]
app = "httpd"
ip = "10.233.0.20"
accel = "tcg"
attach = "ivshmem"
[cell.meter]
app = "iperf"
ip = "10.233.0.21"
accel = "tcg"
attach = "ivshmem-plain"
[tap.host]
ip = "10.233.0.9"
[link.control]
between = ["web", "meter"]
[link.quiet]
between = ["web", "meter"]
plain = true
"""


def keepers(fabric):
    """Process ids of the keepers of this fabric."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and b"\0keeper\0" + os.fsencode(fabric.folder) in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def shared_well(space):
    until("a ping to web over its doorbells", lambda: space.pings(WEB), PATIENCE_S)
    until("a ping to meter without", lambda: space.pings(METER), PATIENCE_S)
    until("the page", lambda: page(space, WEB, seconds=5), PATIENCE_S)


def adopted(fabric, before):
    """The machines are those of before, and so are all of their links."""
    status = fabric.status()
    assert {machine["name"]: machine["pid"] for machine in status["machines"]} == before, status["machines"]
    assert all(machine["adopted"] for machine in status["machines"])
    assert [port["counters"]["faults"] for port in status["ports"]] == [0] * len(status["ports"]), status["warnings"]
    for link in status["links"]:
        assert len(link["peers"]) == 2 and link["kept"] and link["leaves"] == link["joins"] == 0, link


@timeout(600)
def test_shared_memory_outlives_each_party():
    with place() as (space, folder), Fabric(folder, SHARED.format(name=f"k{os.getpid()}"), netns=space) as fabric:
        shared_well(space)
        before = pids(fabric)
        [keeper] = keepers(fabric)

        for _ in range(2):
            # Frames are on their way through the regions when the daemon dies.
            with Process(["curl", "-sS", "-o", "/dev/null", f"http://{WEB}/bytes/1000000000"], netns=space):
                seen = fabric.port("web")["counters"]["rx_bytes"]
                until("traffic", lambda: fabric.port("web")["counters"]["rx_bytes"] > seen + 1_000_000, PATIENCE_S)
                fabric.kill()
            assert all(exists(pid) for pid in before.values()) and keepers(fabric) == [keeper]
            fabric.start()
            shared_well(space)
            adopted(fabric, before)

        # A lost fd store is replaced, and knows all that it has to.
        os.kill(keeper, signal.SIGKILL)
        fabric.process.wait_line(lambda line: "fd store" in line and "lost" in line)
        until("another fd store, and it alone", lambda: len(keepers(fabric)) == 1 and keepers(fabric) != [keeper])
        [second] = keepers(fabric)
        until("all to be handed over to it", lambda: all(link["kept"] for link in fabric.status()["links"]))
        assert space.answers(WEB) and space.answers(METER)
        fabric.kill()
        fabric.start()
        shared_well(space)
        adopted(fabric, before)

        # One machine dies: its seats are free, the other does not notice, and it comes back to
        # them.
        for name in ("web", "meter"):
            os.kill(before[name], signal.SIGKILL)
            until("its seats to be free", lambda: sum(len(link["peers"]) for link in fabric.status()["links"]) == 5, PATIENCE_S)
            other = METER if name == "web" else WEB
            assert space.answers(other)
            fabric.cli("cell", "run", name, "--fabric", fabric.name)
            shared_well(space)
            assert all(len(link["peers"]) == 2 for link in fabric.status()["links"])
        before = pids(fabric)

        # A machine that dies while there is no daemon is started again; the other is adopted, and
        # its links with it.
        fabric.kill()
        os.kill(before["meter"], signal.SIGKILL)
        fabric.start()
        shared_well(space)
        after = pids(fabric)
        assert after["web"] == before["web"] and after["meter"] != before["meter"]
        assert all(len(link["peers"]) == 2 for link in fabric.status()["links"])

        # Without daemon and keeper nobody can join what the machines share: they are told so, and
        # started again.
        fabric.kill()
        os.kill(second, signal.SIGKILL)
        fabric.start()
        shared_well(space)
        assert not set(pids(fabric).values()) & set(after.values())
        warnings = fabric.status()["warnings"]
        assert any("web was restarted" in line and "is lost, because no fd store has it" in line for line in warnings), warnings

        # With the daemon gone, the last machine takes the keeper with it.
        [third] = keepers(fabric)
        machines = pids(fabric)
        fabric.kill()
        assert exists(third)
        for pid in machines.values():
            os.kill(pid, signal.SIGKILL)
        until("the keeper's end", lambda: not exists(third))
        fabric.start()
        shared_well(space)
        fabric.down()


@timeout(600)
def test_the_daemon_killed_while_shared_memory_starts():
    def well(space, fabric):
        shared_well(space)
        assert len(keepers(fabric)) == 1

    killed_while_it_starts(SHARED.format(name=f"k{os.getpid()}"), SEED + 1, ("down", "start") * 4, well)
