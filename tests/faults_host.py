"""Each party of a fabric killed in turn: passt, a cell's QEMU, the daemon at rest and while it starts. Whatever is killed, the page
behind the forward comes back by itself or with the next `up`, and `down` leaves nothing."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time

from lib import BUILD, Fabric, Namespace, http_get, need_program, need_root, qemu_program, scratch, timeout, until
from lib.process import children

FILE = """
name = "{name}"
[network.lan]
subnet = "10.232.0.0/24"
uplink = "{uplink}"
[cell.web]
app = "httpd"
restart = "on-failure"
[[forward]]
listen = "127.0.0.1:{port}"
to = "web:80"
"""
TAP = """
[tap.{tap}]
ip = "10.232.0.9"
"""


def free_port():
    """A port that nobody has, and that no connection is given for its own end (ip_local_port_range begins above)."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def page(port, netns=None, seconds=90):
    """The cell's page through the forward, within the time."""
    def look():
        try:
            return http_get("127.0.0.1", port=port, seconds=10, netns=netns).status == 200
        except (OSError, ValueError):
            return False
    until("the page through the forward", look, seconds, every=0.2)


def machines(name):
    """Processes that run machines of this fabric, by their command lines."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if any(word.startswith(f"tombolo/{name}/".encode()) for word in words):
            found.append(int(pid))
    return found


def nothing_left(name, tap, fabric):
    # What goes with a process may go an instant after `down` has answered.
    until("the machines' end", lambda: not machines(name))
    assert not os.path.exists(f"/sys/class/net/{tap}"), "the tap is there"
    assert not (fabric.folder / "run" / name).exists(), list((fabric.folder / "run" / name).iterdir())


@timeout(600)
def test_each_party_killed_in_turn():
    need_root()
    need_program("passt")
    name, tap, port = f"kill{os.getpid()}", f"tbk{os.getpid()}", free_port()
    with scratch() as folder, Fabric(folder, (FILE + TAP).format(name=name, tap=tap, port=port, uplink="user")) as fabric:
        page(port)
        [passt] = children(fabric.process.pid, "passt")
        os.kill(passt, signal.SIGKILL)
        until("another passt", lambda: passt not in children(fabric.process.pid, "passt"))
        page(port)

        [machine] = machines(name)
        os.kill(machine, signal.SIGKILL)
        until("another machine", lambda: machines(name) not in ([], [machine]))
        page(port)
        [web] = [m for m in fabric.status()["machines"] if m["name"] == "web"]
        assert web["restarts"] == 1 and "signal 9" in web["last_end"], web

        [machine] = machines(name)
        fabric.kill()
        until("the tap to go with the daemon", lambda: not os.path.exists(f"/sys/class/net/{tap}"))
        assert machines(name) == [machine], "the guest outlives the daemon"
        fabric.start()
        page(port)
        assert machines(name) == [machine]
        [web] = [m for m in fabric.status()["machines"] if m["name"] == "web"]
        assert web["adopted"] and web["pid"] == machine, web

        # The daemon dies while it starts, at several points.
        fabric.kill()
        for pause in (0.005, 0.02, 0.05, 0.1, 0.2):
            with subprocess.Popen([*map(str, fabric.process.popen.args[:1]), "up", fabric.file], env=dict(os.environ, **fabric.env),
                                  stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as daemon:
                time.sleep(pause)  # the point in the start at which it dies, not a wait for anything
                daemon.kill()
        fabric.start()
        page(port)
        assert machines(name) == [machine]
        fabric.cli("down", "--fabric", name)
        nothing_left(name, tap, fabric)


def refusal(port, netns=None):
    """Seconds until a request through the forward fails; it must not wait for the client's own patience. Of a few, one shows what is ours of that."""
    begun = time.monotonic()
    try:
        answer = http_get("127.0.0.1", port=port, seconds=15, netns=netns)
    except TimeoutError as late:
        raise AssertionError("a forward to a machine that does not run hangs") from late
    except (OSError, ValueError):
        return time.monotonic() - begun
    raise AssertionError(f"who answers for a machine that does not run? {answer}")


@timeout(600)
def test_a_forward_to_a_stopped_cell_is_refused():
    need_root()
    need_program("passt")
    need_program("nft")
    name, port = f"stop{os.getpid()}", free_port()
    with scratch() as folder, Fabric(folder, FILE.format(name=name, port=port, uplink="user")) as fabric:
        page(port)
        fabric.cli("cell", "stop", "web", "--fabric", name)
        took = [refusal(port) for _ in range(3)]
        print("user uplink:", took)
        assert min(took) < 2, took
        # Not refused while it boots.
        fabric.cli("cell", "run", "web", "--fabric", name)
        assert http_get("127.0.0.1", port=port, seconds=60).status == 200
    with Namespace() as space, scratch() as folder, Fabric(folder, FILE.format(name=name, port=8080, uplink="kernel"), netns=space) as fabric:
        page(8080, space)
        fabric.cli("cell", "stop", "web", "--fabric", name)
        took = [refusal(8080, space) for _ in range(3)]
        print("kernel uplink:", took)
        assert min(took) < 8, took


@timeout(600)
def test_a_guest_started_by_a_script_is_adopted():
    """$TOMBOLO_QEMU may be a script that adds arguments (build/qemu10/run does): the guest's command line is not the one in the plan."""
    need_root()
    need_program("passt")
    name, port = f"wrap{os.getpid()}", free_port()
    own = BUILD / "qemu10/run"
    with scratch() as folder:
        qemu = folder / "qemu"
        qemu.write_text(f'#!/bin/sh\nexec {own if own.exists() else qemu_program()} "$@" -d guest_errors\n')
        qemu.chmod(0o755)
        os.environ["TOMBOLO_QEMU"] = str(qemu)
        with Fabric(folder, FILE.format(name=name, port=port, uplink="user")) as fabric:
            page(port)
            [machine] = machines(name)
            fabric.kill()
            fabric.start()
            page(port)
            assert machines(name) == [machine]
            assert fabric.machine("web")["adopted"] and fabric.machine("web")["pid"] == machine
            # What the file says otherwise now is not adopted.
            fabric.kill()
            fabric.file.write_text(fabric.file.read_text().replace('app = "httpd"', 'app = "httpd"\nmemory = "48M"'))
            fabric.start()
            page(port)
            assert not fabric.machine("web")["adopted"] and machine not in machines(name)


@timeout(300)
def test_a_subnet_that_the_host_reaches_otherwise_is_refused():
    need_root()
    need_program("nft")
    text = 'name = "{name}"\n[network.lan]\nuplink = "kernel"\n'
    one, two = f"net{os.getpid()}a", f"net{os.getpid()}b"
    with Namespace() as space, scratch() as folder, scratch() as other, Fabric(folder, text.format(name=one), netns=space) as first:
        file = other / "tombolo.toml"
        file.write_text(text.format(name=two))
        refused = first.cli("up", "-d", file, check=False)
        assert refused.returncode == 1, refused
        device = next(link["ifname"] for link in json.loads(space.ip("-j", "link")) if link["ifname"].startswith("tb-"))
        for part in ("network.lan.subnet", "10.87.0.0/24", device, 'like "10.87.1.0/24"'):
            assert part in refused.stderr, refused.stderr
        file.write_text(text.format(name=two) + 'subnet = "10.87.1.0/24"\n')
        first.cli("up", "-d", file)
        first.cli("down", "--fabric", two)
        # A wider route loses a part, which is said.
        space.run("ip", "link", "add", "vpn", "type", "veth", "peer", "name", "vpn-far")
        space.run("ip", "addr", "add", "10.88.0.9/16", "dev", "vpn")
        space.run("ip", "link", "set", "vpn", "up")
        space.run("ip", "link", "set", "vpn-far", "up")
        file.write_text(text.format(name=two) + 'subnet = "10.88.7.0/24"\n')
        told = first.cli("up", "-d", file).stderr
        assert "its route to 10.88.0.0/16 through vpn" in told, told
        first.cli("down", "--fabric", two)


@timeout(600)
def test_rules_of_a_killed_daemon_go_with_down():
    """The kernel uplink, in a namespace: the table and ip_forward outlive a SIGKILL, and neither the next `up` nor `down` trips over them."""
    need_root()
    need_program("nft")
    name = f"rules{os.getpid()}"
    # The host is on this network as its router; a second tap of it there would be a second route to
    # the guests.
    with Namespace() as space, scratch() as folder:
        before = space.run("cat", "/proc/sys/net/ipv4/ip_forward").stdout
        with Fabric(folder, FILE.format(name=name, port=8080, uplink="kernel"), netns=space) as fabric:
            page(8080, space)
            fabric.kill()
            assert f"tombolo_{name}" in space.run("nft", "list", "tables").stdout
            fabric.start()
            page(8080, space)
            fabric.kill()
            fabric.cli("down", "--fabric", name)
            assert space.run("nft", "list", "tables").stdout.strip() == ""
            assert space.run("cat", "/proc/sys/net/ipv4/ip_forward").stdout == before
            until("the machines' end", lambda: not machines(name))
            assert not (folder / "run" / name).exists()
