"""Guests that post few receive buffers: iPXE, and a Linux guest whose ring holds a dozen frames. What one frame of the sender becomes
(up to 45 segments) waits for buffers instead of being lost."""

import contextlib
import http.server
import os
import re
import socket
import threading
import time
from pathlib import Path

from lib import Fabric, LinuxGuest, Namespace, Net, Skip, alone, scratch, timeout, until
from lib.guest import Guest
from lib.http import socket_in

FILE = """
name = "few"
[network.lan]
subnet = "10.235.0.0/24"
uplink = "none"
[tap.few0]
ip = "10.235.0.9"
[port.pxe]
kind = "vhost-user"
guard = "off"
[port.str]
kind = "stream"
guard = "off"
"""
HOST = "10.235.0.9"
FILE_BYTES = 3_000_000
FETCHES = 4


def ipxe():
    """iPXE as a kernel, of Debian's package ipxe, or $TOMBOLO_IPXE."""
    path = Path(os.environ.get("TOMBOLO_IPXE", "/boot/ipxe.lkrn"))
    if not path.exists():
        raise Skip(f"{path} is not there: apt install ipxe")
    return path


def drops(fabric, port):
    return fabric.port(port)["counters"]["tx_drops"]


class Server(http.server.ThreadingHTTPServer):
    """Serves one file in a namespace, and notes when each request came."""

    daemon_threads = True

    def __init__(self, space):
        server = self
        self.asked = []
        body = bytes(FILE_BYTES)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                server.asked.append((self.client_address[0], time.monotonic()))
                self.send_response(200)
                self.send_header("Content-Length", str(FILE_BYTES))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

            def log_message(self, *_):
                pass

        super().__init__((HOST, 8000), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = socket_in(space)
        self.server_bind()
        self.server_activate()

    def server_bind(self):
        # Without the look-up of the host's name.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = self.server_address


@contextlib.contextmanager
def served(space):
    server = Server(space)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def fetches(folder, server, net, number):
    """Seconds of each fetch of iPXE: from its request to the next one."""
    own = f"10.235.0.{20 + number}"
    script = folder / f"script{number}"
    lines = ["#!ipxe", "ifopen net0", f"set net0/ip {own}", "set net0/netmask 255.255.255.0"]
    for n in range(FETCHES + 1):
        lines += [f"imgfetch http://{HOST}:8000/{n} || goto done", "imgfree"]
    script.write_text("\n".join([*lines, ":done", "sleep 600", ""]))
    with Guest(ipxe(), [net], machine="q35", memory_mib=128, initrd=script, name="ipxe") as guest:
        times = lambda: [at for address, at in server.asked if address == own]  # noqa: E731
        until("the fetches", lambda: len(times()) > FETCHES, 120, seen=lambda: f"{len(times())} requests from {own}:\n{guest.tail()}")
        asked = times()
        return [later - earlier for earlier, later in zip(asked, asked[1:])]


@alone
@timeout(600)
def test_ipxe_is_as_fast_over_vhost_user_as_over_a_stream():
    ipxe()
    with scratch() as folder, Namespace() as space, Fabric(folder, FILE, netns=space) as fabric, served(space) as server:
        run = folder / "run" / "few"
        nets = {"vhost-user": lambda: Net.vhost_user(run / "pxe.sock"), "stream": lambda: Net.stream(run / "str.sock")}
        took = {kind: [] for kind in nets}
        for number in range(4):
            kind = ("vhost-user", "stream")[number % 2]
            took[kind] += fetches(folder, server, nets[kind](), number)
        best = {kind: min(times) for kind, times in took.items()}
        counters = fabric.port("pxe")["counters"]
        print(f"{FILE_BYTES / 1e6:.0f} MB by iPXE, {2 * FETCHES} fetches each, median and least seconds: "
              + ", ".join(f"{kind} {sorted(times)[len(times) // 2]:.2f} {min(times):.2f}" for kind, times in took.items())
              + f"; waited {counters.get('queued_frames', 0)}, dropped {counters['tx_drops']} of {counters['tx_frames']}")
        assert best["vhost-user"] < 2 * best["stream"], took


@timeout(600)
def test_a_linux_guest_with_a_dozen_buffers():
    # Without mergeable buffers each of them is of 64 KiB, in 19 descriptors of the smallest ring
    # that QEMU makes; the host sends single segments.
    few = "mrg_rxbuf=off,indirect_desc=off,rx_queue_size=256"
    with scratch() as folder, Namespace() as space, Fabric(folder, FILE, netns=space) as fabric:
        net = Net.vhost_user(folder / "run" / "few" / "pxe.sock").with_device(few)
        space.run("ethtool", "-K", "few0", "tso", "off", "gso", "off")
        with LinuxGuest(net=net, address="10.235.0.20/24", serve="iperf") as guest:
            guest.wait_control()
            until("a reply", lambda: space.pings("10.235.0.20"), 60)
            until("the server", lambda: guest.run("netstat -ltn | grep -q :5001", check=False).code == 0)
            rates = []
            for _ in range(3):
                report = space.run("iperf", "-c", "10.235.0.20", "-t", "2", "-f", "k")
                found = re.findall(r"([0-9.]+) Kbits/sec", report.stdout)
                assert found, f"{report}\n{guest.tail()}\n{fabric.port('pxe')}"
                rates.append(float(found[-1]) / 1e3)
            counters = fabric.port("pxe")["counters"]
            lost = sum(counters["tx_drops"].values())
            print(f"TCP to a guest with 13 buffers: {', '.join(f'{rate:.0f}' for rate in rates)} Mbit/s; waited "
                  f"{counters.get('queued_frames', 0)}, dropped {counters['tx_drops']} of {counters['tx_frames']}")
            assert counters["queued_frames"] > 0, "the test is one"
            assert lost * 100 < counters["tx_frames"], counters
