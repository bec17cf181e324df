"""The bypass and changes of interfaces: VLANs, existing programs, taps that are created again, and taps as microVMs' monitors use them."""

import fcntl
import json
import os
import select
import subprocess

from bypass_paths import ARRIVES_S, MAC_A, PROGRAM, A, B, has_ended, has_tcx, host, is_ip
from lib import Namespace, Skip, alone, need_program, scratch, until
from lib.machine import SLOW
from lib.tap import ETH_IP4, UDP, Tap, ethernet, ipv4, transport


def tagged(frame, vlan):
    return frame[:12] + b"\x81\x00" + vlan.to_bytes(2, "big") + frame[12:]


def test_tagged_frames_are_taken_where_the_vlan_interfaces_are_attached():
    with host() as h:
        for side, name, net in (("ta", "ta.5", "10.5.0"), ("tb", "tb.6", "10.6.0")):
            vlan = name.split(".")[1]
            try:
                h.space.ip("link", "add", "link", side, "name", name, "type", "vlan", "id", vlan)
            except RuntimeError as error:
                raise Skip(f"this kernel has no VLAN interfaces (CONFIG_VLAN_8021Q): {error}") from None
            h.space.ip("address", "add", f"{net}.1/24", "dev", name)
            h.space.ip("link", "set", name, "up")
            mac = ":".join(f"{b:02x}" for b in (h.a if side == "ta" else h.b).mac)
            h.space.ip("neighbour", "replace", f"{net}.2", "lladdr", mac, "dev", name, "nud", "permanent")
        body = transport(UDP, "10.5.0.2", "10.6.0.2", 1000, 2000, b"tagged")
        frame = tagged(h.to_b(ETH_IP4, ipv4("10.5.0.2", "10.6.0.2", UDP, body)), 5)

        def across():
            h.b.drain()
            h.a.send(frame)
            return h.b.receive(ARRIVES_S, lambda f: f[12:14] == b"\x81\x00" and f[16:18] == b"\x08\x00")

        kernel = across()
        assert kernel and kernel[1][14:16] == b"\x00\x06", kernel
        h.attach("ta", "tb", "ta.5", "tb.6", words=("--lease", "10000"))
        assert across() == kernel
        assert across() == kernel
        assert h.status("ta.5")["taken"] == 1 and h.status("ta")["by_reason"]["up_vlan"] == 2, h.status()


def test_priority_tags_are_forwarded_as_the_kernel_does_and_never_taken():
    """VLAN 0 is a priority alone: the kernel forwards such a frame as if it had no tag."""
    for mode in ("tcx", "xdp"):
        with host() as h:
            frame = tagged(h.udp(), 0x6000)
            kernel = h.across(frame)
            assert kernel and kernel[1][12:14] == b"\x08\x00"
            h.attach(words=("--lease", "10000", "--mode", mode))
            h.across(h.udp())
            assert h.across(h.udp()) and h.taken() == 1
            for _ in range(3):
                assert h.across(frame) == kernel
            assert h.status("ta")["by_reason"]["up_vlan"] == 3 and h.taken() == 1


def test_interfaces_without_ethernet_are_refused():
    with host() as h:
        h.space.ip("tuntap", "add", "layer3", "mode", "tun")
        for name in ("lo", "layer3"):
            wrong = h.cli("attach", "ta", name, check=False)
            assert wrong.returncode == 2 and f"{name} is not an Ethernet interface" in wrong.stderr, wrong
        assert not h.status()["attached"]


def test_tagged_frames_cross_a_bridge_of_attached_taps_untouched_and_are_counted():
    tags = [b"\x81\x00\x00\x05", b"\x81\x00\xe0\x00", b"\x88\xa8\x00\x05\x81\x00\x00\x06"]
    for mode in ("tcx", "xdp"):
        with host() as h:
            h.space.ip("link", "add", "br0", "type", "bridge")
            h.space.ip("link", "set", "br0", "up")
            for name in ("ta", "tb"):
                h.space.ip("link", "set", name, "master", "br0")
            # The bridge has to know on which side who is.
            here = ethernet(h.a.mac, h.b.mac, 0x88B5, b"here")
            until("the bridge to forward", lambda: h.b.send(here) or h.a.receive(0.1, lambda f: f == here))
            plain = ethernet(h.b.mac, h.a.mac, ETH_IP4, ipv4(A, "10.2.0.2", UDP, transport(UDP, A, "10.2.0.2", 1000, 2000, b"tagged")))
            frames = [plain[:12] + tag + plain[12:] for tag in tags]

            def across(frame):
                h.b.drain()
                h.a.send(frame)
                return h.b.receive(1, lambda f: f[6:12] == h.a.mac)

            kernel = [across(frame) for frame in frames]
            assert [f[1] for f in kernel] == frames, kernel
            h.attach(words=("--lease", "10000", "--mode", mode))
            for _ in range(2):
                assert [across(frame) for frame in frames] == kernel, mode
            # To another's MAC address, which is what is counted first; and the third kind is no IP
            # behind its first tag.
            counts = h.status("ta")["by_reason"]
            assert counts == {"up_not_ours": 4, "up_protocol": 2}, counts
            # To the interface's own, behind which the kernel has no VLAN 5: counted as tagged, and
            # gone.
            h.a.send(tagged(h.to_b(ETH_IP4, plain[14:]), 5))
            counts = h.status("ta")["by_reason"]
            assert counts == {"up_not_ours": 4, "up_protocol": 2, "up_vlan": 1} and h.taken() == 0, counts


def test_a_tap_that_is_made_anew_is_attached_again():
    with host() as h:
        h.attach("ta", "tb", words=("--lease", "10000"))
        h.across(h.udp())
        assert h.across(h.udp()) and h.taken() == 1
        old = h.status("ta")["index"]
        h.a.close()
        until("the tap's end", lambda: "ta:" not in h.space.ip("link"))
        h.a = Tap(h.space, "ta", "10.1.0.1/24", mac=MAC_A, neighbours=(A,))
        until("the controller's notice", lambda: h.status("ta")["index"] != old)
        assert "created again" in h.status("ta")["why"] or h.status("ta")["why"] == "light traffic", h.status("ta")

        def taken():
            assert h.across(h.udp()), "a frame was lost"
            return h.taken() >= 2

        until("frames to be taken again", taken)
        h.cli("detach")
        assert not h.status()["attached"]


def record(h):
    (path,) = (h.folder / "run/bypass").glob("*.json")
    return path


def recorded(h):
    """Names of the interfaces that the owner record has."""
    return [i["name"] for i in json.loads(record(h).read_text())["interfaces"]]


def shown(h):
    return [i["name"] for i in h.status()["interfaces"]]


def test_an_interface_that_is_deleted_leaves_status_and_the_records_and_the_last_one_takes_all_with_it():
    with host() as h:
        h.space.ip("link", "add", "gone", "type", "veth", "peer", "name", "other")
        h.attach("gone", "ta", "tb")
        keeper = h.status()["keeper"]
        h.space.ip("link", "del", "gone")
        assert shown(h) == ["ta", "tb"] and "gone" not in h.cli("status").stdout and '"gone"' not in h.cli("status", "--metrics").stdout
        until("its record's end", lambda: recorded(h) == ["ta", "tb"])
        assert h.programs_at("ta", "tb") == 4
        assert len(list((h.folder / "run/bypass/bpf").rglob("link_*"))) == (4 if has_tcx() else 0)
        assert "is not attached" in h.cli("detach", "nosuch", check=False).stderr
        # It is awaited for a minute: when that is over what is left is nothing, and goes.
        h.cli("detach", "ta", "tb")
        assert h.cli("status").stdout.startswith("nothing is attached in this network namespace") and not has_ended(keeper)
        minute_is_over(h)
        until("the end of all", lambda: not (h.folder / "run/bypass").exists())
        until("the controller's end", lambda: has_ended(keeper))


def minute_is_over(h):
    """What is awaited has been away for long."""
    lock = os.open(h.folder / "run/bypass", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    text = json.loads(record(h).read_text())
    assert text["awaited"]
    for awaited in text["awaited"]:
        awaited["since_ns"] = 0
    record(h).write_text(json.dumps(text))
    os.close(lock)


def test_what_is_awaited_is_detached_by_its_name_and_with_its_last_owner():
    with host() as h:
        h.space.ip("link", "add", "gone", "type", "veth", "peer", "name", "other")
        h.attach("gone", "ta")
        h.space.ip("link", "del", "gone")
        assert h.cli("detach", "gone").stdout == "gone detached\n"
        h.space.ip("link", "add", "gone", "type", "veth", "peer", "name", "other")
        until("the controller to have looked", lambda: h.status("ta")["for_ms"] > 2500)
        assert shown(h) == ["ta"]


def test_an_interface_with_the_number_of_one_that_went_is_not_attached_already():
    for keeper in ((), ("--no-controller",)):
        with host() as h:
            def make(h=h):
                h.space.ip("link", "add", "again", "index", "77", "type", "veth", "peer", "name", "other")
                h.space.ip("link", "set", "again", "up")

            make()
            h.attach("again", "ta", words=keeper)
            h.space.ip("link", "del", "again")
            make()
            if keeper:
                assert shown(h) == ["ta"], "its link is dead"
                assert "again attached in" in h.attach("again", words=keeper).stdout
            until("it to be attached", lambda: shown(h) == ["ta", "again"])
            assert h.programs_at("again") == 2
            # One by another name is another one.
            h.space.ip("link", "del", "again")
            h.space.ip("link", "add", "third", "index", "77", "type", "veth", "peer", "name", "other")
            until("the controller to have looked", lambda: shown(h) == ["ta"] and (keeper or recorded(h) == ["ta"]))


# Namespaces that other tests make meanwhile take the number.
@alone
def test_a_namespace_with_the_number_of_one_that_went_has_nothing_attached():
    with host() as h, scratch() as folder, Namespace() as space:
        h.folder, h.space, own = folder, space, h.space

        def make():
            space.ip("link", "add", "again", "index", "77", "type", "veth", "peer", "name", "other")
            space.ip("link", "set", "again", "up")

        try:
            make()
            h.attach("again", words=("--no-controller", "--lease", "5000"))
            old = space.number()
            try:
                until("the number", lambda: space.has_again(old), 60 * SLOW, 0.1)
            except TimeoutError:
                raise Skip("the kernel has not given the namespace's number again in a minute") from None
            make()
            assert not h.status()["attached"], h.status()
            assert h.cli("attach", "again", "--no-controller").stdout.startswith("again attached in")
            assert shown(h) == ["again"] and h.status()["lease_ms"] == 1000, "what was set was the other's"
        finally:
            h.cli("detach")
            h.space = own
        assert not (folder / "run/bypass").exists()


def test_an_xdp_dispatcher_is_recognised_and_left_alone():
    need_program("clang")
    with host() as h:
        source = h.folder / "dispatcher.c"
        # What libxdp loads is called so; that it calls nothing here makes no difference to who
        # finds it.
        source.write_text("int xdp_dispatcher(void *context) __attribute__((section(\"xdp\"), used));\n"
                          "int xdp_dispatcher(void *context) { return 2; }\n"
                          "char licence[] __attribute__((section(\"license\"), used)) = \"GPL\";\n")
        subprocess.run(["clang", "-O2", "-g", "-target", "bpf", "-c", source, "-o", h.folder / "dispatcher.o"], check=True)
        h.space.run("ip", "link", "set", "dev", "ta", "xdpdrv", "obj", h.folder / "dispatcher.o", "sec", "xdp")
        wrong = h.cli("attach", "ta", "tb", "--mode", "xdp", check=False)
        assert wrong.returncode == 1 and "libxdp's dispatcher" in wrong.stderr and "--mode auto" in wrong.stderr, wrong
        assert not h.status()["attached"]
        h.attach(words=("--lease", "10000"))
        h.across(h.udp())
        # Behind the dispatcher, which passes everything, tcx takes it.
        assert h.across(h.udp()) and h.taken() == 1
        h.cli("detach")
        assert "xdp" in h.space.ip("link", "show", "ta"), "the dispatcher stays"


class Monitor:
    """A microVM's monitor with one network device, as Firecracker 1.x drives a tap: opened by name with a vnet header, TUN_F offloads set
    by what the guest agreed to, non-blocking, one frame per read and per write, waiting in epoll, edge-triggered for what comes in."""

    def __init__(self, space, name, mac):
        self.tap = Tap(space, name, mac=mac)
        self.poll = select.epoll()
        self.poll.register(self.tap.fd, select.EPOLLIN | select.EPOLLET)
        self.got = []

    def transmit(self, frames):
        for frame in frames:
            assert os.write(self.tap.fd, bytes(10) + frame) == 10 + len(frame)

    def serve(self, seconds):
        """One turn of the monitor's loop: what came in since, up to the last frame."""
        if self.poll.poll(seconds):
            while True:
                try:
                    data = os.read(self.tap.fd, 65562)
                except BlockingIOError:
                    break
                if is_ip(data[10:]):
                    self.got.append((data[:10], data[10:]))
        return self.got

    def close(self):
        self.poll.close()
        self.tap.close()


def test_two_monitors_that_drive_taps_as_firecracker_does_lose_and_gain_nothing():
    with host() as h:
        # As in docs/bypass.md: made and addressed beforehand, /30 each, the monitor opens them by
        # name.
        for name, net in (("fc0", "172.16.0"), ("fc1", "172.16.1")):
            h.space.ip("tuntap", "add", name, "mode", "tap")
            h.space.ip("address", "add", f"{net}.1/30", "dev", name)
            h.space.ip("link", "set", name, "up")
            h.space.ip("neighbour", "replace", f"{net}.2", "lladdr", "06:00:ac:10:00:02", "dev", name, "nud", "permanent")
        h.attach("fc0", "fc1", words=("--lease", "200"))
        one, two = Monitor(h.space, "fc0", "06:00:ac:10:00:02"), Monitor(h.space, "fc1", "06:00:ac:10:00:02")
        try:
            def frames(a, b, host_mac, count):
                for n in range(count):
                    body = transport(UDP, a, b, 1000, 2000, n.to_bytes(4, "big") * 8)
                    yield ethernet(host_mac, one.tap.mac, ETH_IP4, ipv4(a, b, UDP, body, ident=n & 0xFFFF))

            for turn in range(40):
                one.transmit(frames("172.16.0.2", "172.16.1.2", one.tap.host_mac, 50))
                two.transmit(frames("172.16.1.2", "172.16.0.2", two.tap.host_mac, 50))
                until("all of turn's frames", lambda: len(two.serve(0.5)) >= 50 and len(one.serve(0.5)) >= 50)
                for monitor in (one, two):
                    assert [f[42:46] for _, f in monitor.got] == [n.to_bytes(4, "big") for n in range(50)], "order, loss or doubles"
                    assert all(header == bytes(10) and f[22] == 63 for header, f in monitor.got)
                    monitor.got.clear()
            for name in ("fc0", "fc1"):
                status = h.status(name)
                assert status["taken"] >= 40 * 50 * 0.9, status
                assert status["taken"] + status["passed"] >= 2000, status
        finally:
            one.close()
            two.close()


def test_a_name_in_two_namespaces_is_two_interfaces():
    with host() as h, host() as other:
        other.folder = h.folder
        h.attach("ta", words=("--lease", "10000"))
        other.attach("ta", "tb", words=("--lease", "10000"))
        h.cli("detach")
        other.across(other.udp())
        assert other.across(other.udp()) and other.taken() == 1
        assert other.udp()[26:30] == bytes(map(int, A.split("."))) and B


def test_attach_is_refused_where_its_pins_would_end_with_the_caller_and_only_there():
    with host() as h:
        env = dict(os.environ, TOMBOLO_RUNTIME=str(h.folder / "run"))

        def attach(*before, space=()):
            command = [*before, str(PROGRAM), "bypass", "attach", "ta", *space]
            return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)

        refused = attach("ip", "netns", "exec", str(h.space))
        assert refused.returncode == 1 and "its own mount namespace" in refused.stderr, refused
        assert not (h.folder / "run/bypass").exists() or not h.status()["attached"]
        # Back in the mounts of before, below a process that has others: what is pinned there lasts.
        outer = f"--mount=/proc/{os.getpid()}/ns/mnt"
        done = attach("unshare", "--mount", "sh", "-c", 'nsenter "$@"; exit $?', "sh", outer, space=("--netns", str(h.space)))
        assert done.returncode == 0, done.stderr
        assert h.status("ta")["name"] == "ta"
        h.across(h.udp())
        assert h.cli("detach").returncode == 0
