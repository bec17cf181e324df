"""The bypass between veths into containers, whose sockets are real: taken frames must be such that a kernel accepts them."""

import contextlib
import fcntl
import hashlib
import itertools
import os
import re
import socket
import subprocess
import threading

from bypass_paths import A, ARRIVES_S, MAC_B, Host, host, is_ip
from lib import Namespace, Skip, need_program, until
from lib.tap import ETH_IP4, TUNSETOFFLOAD, UDP, Inside, ethernet, ipv4, transport

C = "10.4.0.2"


@contextlib.contextmanager
def container(h, name="vc", address=C):
    """A namespace behind a veth of the router's, as a container engine makes it: no offload is touched."""
    with Namespace() as far:
        net = address.rsplit(".", 1)[0]
        h.space.ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(far))
        h.space.ip("address", "add", f"{net}.1/24", "dev", name)
        h.space.ip("link", "set", name, "up")
        far.ip("address", "add", f"{address}/24", "dev", "eth0")
        far.ip("link", "set", "eth0", "up")
        far.ip("route", "add", "default", "via", f"{net}.1")
        yield far


def bound(space, kind, address):
    with Inside(space):
        s = socket.socket(socket.AF_INET, kind)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(address)
    s.settimeout(60)
    return s


@contextlib.contextmanager
def told_of(h, *ends):
    """Adds to an error what became of the connections, for conntrack and for TCP, in the router and at these ends."""
    try:
        yield
    except Exception as error:
        for space, command in itertools.product((h.space, *ends), ("conntrack -S", "conntrack -L", "nstat -as *Rst* *Reset* *Retrans* *Abort* *Passive* *PAWS*", "ss -tino")):
            done = space.run(*command.split(), check=False)
            error.add_note(f"{space}: {command}\n{done.stdout}{done.stderr}")
        raise


def test_a_tap_reaches_a_container_whose_veth_has_neither_xdp_nor_gro():
    for mode in ("tcx", "xdp"):
        with host() as h, container(h) as far:
            words = ("ta", "tb", "vc") if mode == "tcx" else ("ta", "tb")
            h.attach(*words, words=("--lease", "10000", "--mode", mode))
            if mode == "xdp":
                h.attach("vc", words=("--lease", "10000", "--mode", "tcx"))
            server = bound(far, socket.SOCK_DGRAM, (C, 9))
            body = transport(UDP, "10.1.0.2", C, 1000, 9, b"hello")
            frame = ethernet(h.a.host_mac, h.a.mac, ETH_IP4, ipv4("10.1.0.2", C, UDP, body))
            for n in range(20):
                h.a.send(frame)
                assert server.recvfrom(100) == (b"hello", ("10.1.0.2", 1000)), f"{mode}: frame {n}"
            counts = h.status("ta")["by_reason"]
            assert counts["taken_peer"] >= 18 and "taken_xdp" not in counts, counts
            assert h.status("vc")["peer"]
            for _ in range(3):
                server.sendto(b"answer", ("10.1.0.2", 1000))
            for _ in range(3):
                header, got = h.a.receive(ARRIVES_S, lambda f: f[12:14] == b"\x08\x00" and f[23] == UDP)
                assert got[42:48] == b"answer"
            assert h.taken("vc") >= 1
            server.close()


def test_tcp_between_containers_arrives_whole_through_nat_and_a_firewall():
    with host() as h, container(h) as far, container(h, "vd", "10.5.0.2") as other:
        h.rules('table ip n { chain pre { type nat hook prerouting priority -100; iifname "vd" tcp dport 8080 dnat to 10.4.0.2:80; }; '
                'chain post { type nat hook postrouting priority 100; oifname "vc" masquerade; }; }\n'
                'table inet f { counter invalid { }; chain forward { type filter hook forward priority 0; policy drop; '
                'ct state invalid counter name invalid drop; ct state established,related accept; iifname "vd" accept; }; }')
        h.attach("vc", "vd")
        listener = bound(far, socket.SOCK_STREAM, (C, 80))
        listener.listen()
        block, sent = os.urandom(1 << 20), hashlib.sha256()
        received, accepted = hashlib.sha256(), threading.Event()

        def serve():
            connection, source = listener.accept()
            accepted.set()
            assert source[0] == "10.4.0.1", source
            while part := connection.recv(1 << 20):
                received.update(part)
            connection.sendall(received.digest())
            connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        client = bound(other, socket.SOCK_STREAM, ("10.5.0.2", 0))
        with told_of(h, far, other):
            client.connect(("10.5.0.1", 8080))
            # Kernels before 6.14, and their updates before March 2025, do not wake the listener where data comes on another
            # CPU at the same time as the handshake's last ACK ("tcp: Defer ts_recent changes until req is owned").
            assert accepted.wait(60)

            def taken():
                # The controller has to mark the connection first, in its own time.
                for _ in range(24):
                    client.sendall(block)
                    sent.update(block)
                counts = h.status("vd")
                return counts["by_reason"].get("taken_peer", 0) >= 100 and counts["taken_large"] >= 50

            until("the connection to be taken", taken)
            client.shutdown(socket.SHUT_WR)
            answer = b""
            while part := client.recv(100):
                answer += part
            thread.join()
            assert answer == sent.digest()
            assert "packets 0 " in h.space.run("nft", "list", "counter", "inet", "f", "invalid").stdout
        client.close()
        listener.close()


def test_a_mark_of_the_hosts_does_not_go_along_into_a_container():
    with host() as h, container(h) as far:
        h.rules("table inet f { chain before { type filter hook prerouting priority -150; meta mark set 7; }; }")
        seen = "table inet f { counter arrived { }; counter marked { }; chain c { type filter hook input priority 0; udp dport 9 counter name arrived; " \
               "udp dport 9 meta mark != 0 counter name marked; udp dport 9 meta priority != none counter name marked; }; }"
        subprocess.run(["ip", "netns", "exec", str(far), "nft", "-f", "-"], input=seen, text=True, check=True)
        h.attach("ta", "vc", words=("--lease", "10000"))
        server = bound(far, socket.SOCK_DGRAM, (C, 9))
        for _ in range(10):
            # The router gives an urgent TOS a priority of its own.
            packet = ipv4("10.1.0.2", C, UDP, transport(UDP, "10.1.0.2", C, 1000, 9, b"hello"), tos=0x10)
            h.a.send(ethernet(h.a.host_mac, h.a.mac, ETH_IP4, packet))
            assert server.recvfrom(100)[0] == b"hello"
        server.close()
        assert h.status("ta")["by_reason"]["taken_peer"] >= 8
        counts = [int(n) for n in re.findall(r"packets (\d+)", far.run("nft", "list", "counters").stdout)]
        assert counts == [10, 0], counts


def test_an_xdp_program_of_a_containers_own_sees_every_frame():
    need_program("clang")
    with host() as h, container(h) as far:
        h.attach("ta", "vc", words=("--lease", "10000"))
        server = bound(far, socket.SOCK_DGRAM, (C, 9))
        server.settimeout(0.5)

        def arrives():
            h.a.send(ethernet(h.a.host_mac, h.a.mac, ETH_IP4, ipv4("10.1.0.2", C, UDP, transport(UDP, "10.1.0.2", C, 1000, 9, b"hello"))))
            try:
                return server.recvfrom(100)[0] == b"hello"
            except TimeoutError:
                return False

        until("frames to go straight", lambda: arrives() and h.status("ta")["by_reason"].get("taken_peer", 0) >= 3)
        source = h.folder / "drop.c"
        # XDP_DROP: this container's own firewall.
        source.write_text('__attribute__((section("xdp"), used)) int drop_all(void *context) { return 1; }\n'
                          'char licence[] __attribute__((section("license"), used)) = "GPL";\n')
        subprocess.run(["clang", "-O2", "-g", "-target", "bpf", "-c", source, "-o", h.folder / "drop.o"], check=True)
        far.run("ip", "link", "set", "dev", "eth0", "xdpdrv", "obj", h.folder / "drop.o", "sec", "xdp")
        until("the controller's notice", lambda: not h.status("vc")["peer"])
        for n in range(5):
            assert not arrives(), f"frame {n} went past the container's program"
        assert h.status("ta")["by_reason"].get("taken_tcx", 0) >= 3
        far.run("ip", "link", "set", "dev", "eth0", "xdpdrv", "off")
        until("the straight way again", lambda: arrives() and h.status("vc")["peer"])
        server.close()


def test_segmentation_frames_of_a_tunnel_are_cut_to_the_mtu_as_the_kernel_does():
    """A container's VXLAN hands over one frame for many packets, whose headers are more than IP's and UDP's."""
    UDP_SEGMENT, headers = 103, 20 + 8 + 8 + 14 + 20 + 8
    with host() as h, container(h) as far:
        fcntl.ioctl(h.b.fd, TUNSETOFFLOAD, 0)
        h.space.ip("link", "set", "tb", "mtu", "1460")
        try:
            far.ip("link", "add", "vx", "type", "vxlan", "id", "42", "remote", "10.2.0.2", "dstport", "4789")
        except RuntimeError as error:
            raise Skip(f"this kernel has no VXLAN: {error}") from None
        far.run("sysctl", "-qw", "net.ipv6.conf.vx.disable_ipv6=1")
        far.ip("address", "add", "10.99.0.1/24", "dev", "vx")
        far.ip("link", "set", "vx", "up")
        far.ip("neighbour", "add", "10.99.0.2", "lladdr", "02:00:00:00:99:02", "dev", "vx", "nud", "permanent")
        sender = bound(far, socket.SOCK_DGRAM, ("10.99.0.1", 0))

        def lengths(size):
            h.b.drain()
            sender.setsockopt(socket.SOL_UDP, UDP_SEGMENT, size)
            sender.sendto(b"s" * size * 4, ("10.99.0.2", 7))
            got, whole = [], 0
            while whole < 4 * size:
                _, frame = h.b.receive(ARRIVES_S, lambda f: is_ip(f) and f[23] == UDP)
                got.append(len(frame) - 14)
                # Of pieces the second one has no headers but IP's.
                whole += len(frame) - 14 - (20 if int.from_bytes(frame[20:22], "big") & 0x1FFF else headers)
            return got

        small, large = lengths(1300), lengths(1400)
        assert small == [1300 + headers] * 4 and large == [1460, 38] * 4, (small, large)
        h.attach("vc", "tb", words=("--lease", "10000"))
        # Two packets with different ids have to pass the kernel before others are taken.
        lengths(1300), lengths(1300)
        assert lengths(1300) == small and lengths(1400) == large
        status = h.status("vc")
        assert status["taken_large"] == 1 and status["by_reason"]["up_mtu"] == 1, status
        sender.close()


def test_a_container_that_goes_takes_its_attachment_with_it():
    with host() as h:
        with container(h):
            h.attach("ta", "vc")
        until("the interface's end", lambda: "vc" not in h.space.ip("link"))
        h.attach("tb")
        assert [i["name"] for i in h.status()["interfaces"]] == ["ta", "tb"]
        h.across(h.udp())
        assert h.across(h.udp())[1][:6] == bytes.fromhex(MAC_B.replace(":", ""))
        assert isinstance(h, Host) and h.taken() == 1


def esp(space, own, other, *policies):
    """A security association each way, and policies: (direction, source, destination)."""
    for number, (source, destination) in enumerate(sorted([(own, other), (other, own)]), 1):
        done = space.run("ip", "xfrm", "state", "add", "src", source, "dst", destination, "proto", "esp", "spi", str(number), "mode", "tunnel",
                         "auth", "hmac(sha1)", "0x" + "11" * 20, "enc", "cipher_null", "", check=False)
        if done.returncode:
            raise Skip(f"this kernel has no ESP: {done.stderr.strip()}")
    for direction, source, destination in policies:
        ends = (own, other) if direction == "out" else (other, own)
        space.ip("xfrm", "policy", "add", "src", source, "dst", destination, "dir", direction, "tmpl", "src", ends[0], "dst", ends[1],
                 "proto", "esp", "mode", "tunnel")


def test_what_ipsec_has_opened_is_not_taken_for_what_comes_unprotected():
    """A packet out of a tunnel comes in a second time, at the interface where the tunnel's came in."""
    inner, behind = "10.9.0.2", "10.9.0.0/24"
    with host() as h, container(h) as far:
        near = C.rsplit(".", 1)[0] + ".1"
        esp(h.space, near, C, ("in", behind, A), ("fwd", behind, A), ("out", A, behind))
        esp(far, C, near, ("out", behind, A), ("in", A, behind))
        h.space.ip("route", "add", behind, "via", C)
        far.ip("address", "add", f"{inner}/32", "dev", "lo")
        with Inside(far):
            raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
            raw.bind(("eth0", 0))
        # As the socket below sends it: with DF, and so without an id.
        packet = ipv4(inner, A, UDP, transport(UDP, inner, A, 1000, 2000, b"protected?"), ident=0)
        router = far.run("cat", "/sys/class/net/eth0/address").stdout.strip()
        host_mac = h.space.run("cat", "/sys/class/net/vc/address").stdout.strip()
        plain = ethernet(bytes.fromhex(host_mac.replace(":", "")), bytes.fromhex(router.replace(":", "")), ETH_IP4, packet)
        protected = bound(far, socket.SOCK_DGRAM, (inner, 1000))

        def arrives(send, seconds):
            h.a.drain()
            send()
            return h.a.receive(seconds, is_ip) is not None

        by_tunnel, unprotected = (lambda: protected.sendto(b"protected?", (A, 2000))), (lambda: raw.send(plain))
        assert arrives(by_tunnel, 20) and not arrives(unprotected, 0.3)
        h.attach("ta", "vc", words=("--lease", "10000"))
        for _ in range(5):
            assert arrives(by_tunnel, 20)
            assert not arrives(unprotected, 0.3), h.status("vc")
        assert h.status("vc")["by_reason"]["up_decrypted"] == 5 and h.taken("vc") == 0, h.status("vc")
