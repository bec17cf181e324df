"""`bypass = true` on a network: the traffic of a fabric past the host's kernel, seen in status and metrics, and gone with the fabric."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time

import lib.fabric
from bypass_paths import PROGRAM, has_ended, kernel_version
from lib import Fabric, Namespace, Skip, need_program, need_root, scratch, timeout, until
from lib.machine import SLOW
from lib.tap import Inside

# The real network behind the host's own interface; the guest's address in the fabric.
OUT, GUEST = "192.0.2.9", "10.87.0.9"


class World:
    """A host's namespace with an interface to the outside, a guest's namespace, and a fabric of one network between them."""

    def __init__(self, stack, folder, network="bypass = true"):
        self.folder = folder
        self.host, self.out, self.guest = (stack.enter_context(Namespace()) for _ in range(3))
        self.host.ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(self.out))
        for space, address in ((self.host, "192.0.2.1"), (self.out, OUT)):
            space.ip("address", "add", f"{address}/24", "dev", "eth0")
            space.ip("link", "set", "eth0", "up")
        self.host.ip("route", "add", "default", "via", OUT)
        self.text = f"""name = "byp"
[network.lan]
uplink = "kernel"
{network}
[tap.guest]
device = "net0"
netns = "/run/netns/{self.guest}"
ip = "{GUEST}"
"""

    def up(self):
        # In the network namespace alone: pins made among a process's own mounts would end with it.
        return Fabric(self.folder, self.text, netns=self.host, own_mounts=False)

    def bypass(self, *words):
        env = dict(os.environ, TOMBOLO_RUNTIME=str(self.folder / "run"))
        command = [str(PROGRAM), "bypass", *words, "--netns", str(self.host)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60 * SLOW, env=env, check=True).stdout

    def attached(self):
        return {i["name"]: i for i in json.loads(self.bypass("status", "--json"))["interfaces"]}

    def talk(self, times=5):
        """Datagrams from the guest to the outside and back, through the host's masquerade."""
        with contextlib.suppress(RuntimeError):
            self.guest.ip("route", "add", "default", "via", "10.87.0.2")
        with Inside(self.out):
            server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with Inside(self.guest):
            client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with server, client:
            server.bind((OUT, 9))
            server.settimeout(30)
            client.settimeout(30)
            for n in range(times):
                client.sendto(b"ping%d" % n, (OUT, 9))
                data, source = server.recvfrom(100)
                assert data == b"ping%d" % n and source[0] == "192.0.2.1", (data, source)
                server.sendto(b"pong", source)
                assert client.recvfrom(100)[0] == b"pong"


@contextlib.contextmanager
def world(network="bypass = true"):
    need_root()
    need_program("nft")
    need_program("nsenter")
    if kernel_version() < (5, 14):
        raise Skip(f"the bypass cannot work before Linux 5.14, this is {os.uname().release}")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch())
        yield World(stack, folder, network)


class Flow:
    """Datagrams every 2 ms from a socket in one namespace to an echo server in another, until the block ends."""

    def __init__(self, space, far, address):
        with Inside(far):
            self.server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with Inside(space):
            self.client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.server.bind((address, 7))
        self.address = (address, 7)
        for end in (self.server, self.client):
            end.settimeout(0.2)
        self.done, self.sources, self.times = threading.Event(), set(), []
        self.threads = [threading.Thread(target=work) for work in (self._ask, self._echo, self._hear)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        for thread in self.threads:
            thread.join()
        self.server.close()
        self.client.close()

    def _ask(self):
        while not self.done.wait(0.002):
            # No route yet, or the interface is away for a moment.
            with contextlib.suppress(OSError):
                self.client.sendto(b"echo", self.address)

    def _echo(self):
        while not self.done.is_set():
            with contextlib.suppress(OSError):
                data, source = self.server.recvfrom(100)
                self.sources.add(source)
                self.server.sendto(data, source)

    def _hear(self):
        while not self.done.is_set():
            with contextlib.suppress(OSError):
                self.client.recv(100)
                self.times.append(time.monotonic())

    def echoes(self):
        return len(self.times)

    @property
    def gap(self):
        return max(b - a for a, b in zip(self.times, self.times[1:]))


@timeout(300)
def test_a_fabrics_status_names_rules_that_judge_each_frame_and_other_warnings():
    with world() as w:
        with w.up() as fabric:
            assert warnings_of(fabric) == [], warnings_of(fabric)
            rules = "table inet judge { chain c { type filter hook forward priority 0; limit rate 1000/second accept; }; }"
            subprocess.run(["ip", "netns", "exec", str(w.host), "nft", "-f", "-"], input=rules, text=True, check=True)
            named = "the bypass of lan: rule that judges each frame: inet judge c handle 2: limit; flows that it could judge take the kernel's path"
            until("the rule in status", lambda: named in fabric.status()["warnings"])
            assert any(named.endswith(warning) for warning in bypass_of(fabric)["warnings"]), bypass_of(fabric)
            w.talk(5)
            kept = "the bypass of lan: 1 firewall rule(s) that judge each frame keep frames on the kernel's path, since attach: "
            until("its frames", lambda: any(warning.startswith(kept) for warning in fabric.status()["warnings"]))
            subprocess.run(["ip", "netns", "exec", str(w.host), "nft", "delete", "table", "inet", "judge"], check=True)
            until("no warning", lambda: warnings_of(fabric) == [])
    # The fabric's own limit of first packets to unknown members is no such rule.
    with world('bypass = true\nipv6 = "fd00:1:2:3::/64"\nuplink6 = "routed"') as w, w.up() as fabric:
        rules = w.host.run("nft", "list", "ruleset").stdout
        assert "@members_lan limit rate over" in rules, rules
        assert warnings_of(fabric) == [], warnings_of(fabric)
        assert [w for w in bypass_of(fabric)["warnings"] if not w.startswith("this kernel: ")] == [], bypass_of(fabric)


def warnings_of(fabric):
    """A fabric's warnings, without those about what an older kernel lacks."""
    warnings = fabric.status()["warnings"]
    about_kernel = [w for w in warnings if w.startswith("the bypass of lan: this kernel: ")]
    assert not about_kernel or kernel_version() < (6, 17), warnings
    return [w for w in warnings if w not in about_kernel]


def bypass_of(fabric):
    return next(n for n in fabric.status()["networks"] if n["name"] == "lan")["bypass"]


@timeout(300)
def test_a_networks_traffic_skips_the_kernel_and_status_and_metrics_say_so():
    with world() as w:
        with w.up() as fabric:
            assert bypass_of(fabric)["fault"] is None, bypass_of(fabric)["fault"]
            w.talk(20)

            def taken():
                w.talk(5)
                found = {i["name"]: i for i in bypass_of(fabric)["interfaces"]}
                return set(found) == {"eth0", "tb-byp-lan"} and all(i["taken_frames"] >= 10 for i in found.values()) and found

            found = until("frames to be taken both ways", taken)
            assert found["eth0"]["mode"] == "tcx" and found["eth0"]["by_reason"]["up_no_flow"] >= 1, found
            text = fabric.cli("status").stdout
            assert "bypass tb-byp-lan tcx" in text, text
            page = subprocess.run(["curl", "-s", "--unix-socket", str(w.folder / "run/byp/api.sock"), "http://x/metrics"],
                                  capture_output=True, text=True, check=True).stdout
            assert 'tombolo_bypass_up{network="lan"} 1' in page, page
            line = next(x for x in page.splitlines() if x.startswith('tombolo_bypass_taken_frames_total{network="lan",interface="eth0"}'))
            assert int(line.split()[-1]) >= 10
            fabric.cli("down")
            assert w.attached() == {}
            fabric.nothing_left()


@timeout(300)
def test_a_network_with_a_bypass_and_an_interface_of_the_host_is_replaced_under_traffic():
    """`up --replace`: the flow past the kernel and the one over the interface go on, each with the same two ends."""
    with world() as w, Namespace() as real:
        w.host.ip("link", "add", "eth1", "type", "veth", "peer", "name", "eth1", "netns", str(real))
        w.host.ip("link", "set", "eth1", "up")
        real.ip("link", "set", "eth1", "up")
        real.ip("address", "add", "10.87.0.50/24", "dev", "eth1")
        w.text += '[port.real]\nkind = "packet"\ndevice = "eth1"\n'
        with w.up() as fabric, Flow(w.guest, w.out, OUT) as out, Flow(w.guest, real, "10.87.0.50") as inside:
            w.talk(10)
            for _ in range(3):
                before = [flow.echoes() for flow in (out, inside)]
                daemon = fabric.status()["pid"]
                fabric.replace()
                assert fabric.status()["pid"] != daemon
                until("both flows to go on", lambda b=before: all(f.echoes() > n + 20 for f, n in zip((out, inside), b)))
                assert bypass_of(fabric)["fault"] is None, bypass_of(fabric)
                assert set(w.attached()) == {"eth0", "tb-byp-lan"}, (w.attached(), bypass_of(fabric))

                def taken():
                    return {i["name"]: i["taken_frames"] for i in bypass_of(fabric)["interfaces"]}

                first = taken()
                until("frames past the kernel", lambda f=first: all(taken()[name] > f[name] + 20 for name in f))
            # One socket each, seen from the other side as one source: no connection was made again.
            assert len(out.sources) == 1 and len(inside.sources) == 1, (out.sources, inside.sources)
            print(f"longest silence: {1000 * out.gap:.0f} ms past the kernel, {1000 * inside.gap:.0f} ms over the interface")
            fabric.cli("down")
            assert w.attached() == {}
            fabric.nothing_left()


@timeout(300)
def test_what_a_killed_fabric_attached_goes_with_the_next_up_and_down_and_what_others_attached_stays():
    with world() as w:
        with w.up() as fabric:
            w.talk()
            fabric.process.popen.send_signal(signal.SIGKILL)
            fabric.process.popen.wait()
            until("the tap's end", lambda: "tb-byp-lan" not in w.host.ip("link"))
            assert "eth0" in w.attached(), "a killed daemon's traffic flows on"
            fabric.start()
            assert set(w.attached()) == {"eth0", "tb-byp-lan"}

            def taken():
                w.talk()
                return w.attached()["tb-byp-lan"]["taken"] >= 5

            until("frames to be taken", taken)
            # By hand as well: then the fabric is not the last that wants it.
            w.bypass("attach", "eth0")
            fabric.process.popen.send_signal(signal.SIGKILL)
            fabric.process.popen.wait()
            fabric.cli("down")
            assert set(w.attached()) == {"eth0"}
            keeper = json.loads(w.bypass("status", "--json"))["keeper"]
            w.bypass("detach")
            assert w.attached() == {}
            until("the controller's end", lambda: has_ended(keeper))


@timeout(300)
def test_a_daemon_whose_program_is_another_one_by_now_starts_its_controller_again():
    with world() as w:
        installed = w.folder / "tombolo"
        shutil.copy(PROGRAM, installed)
        lib.fabric.PROGRAM = installed
        with w.up() as fabric:
            lib.fabric.PROGRAM = PROGRAM
            keeper = json.loads(w.bypass("status", "--json"))["keeper"]
            # An upgrade.
            installed.unlink()
            os.kill(keeper, signal.SIGKILL)
            until("another controller", lambda: json.loads(w.bypass("status", "--json"))["keeper"] not in (None, keeper), 60)
            w.talk()
            fabric.cli("down")


@timeout(300)
def test_a_bypass_that_cannot_be_is_said_and_the_network_works():
    with world('bypass = ["nosuch0"]') as w:
        with w.up() as fabric:
            fault = bypass_of(fabric)["fault"]
            assert "no interface nosuch0" in fault, fault
            assert "the bypass does not work" in fabric.cli("status").stdout
            w.talk()
            assert w.attached() == {}
