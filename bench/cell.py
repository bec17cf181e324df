#!/usr/bin/env python3
"""A cell beside the stock Linux guest: the same VMM, the same kind of port, the same client.

usage: ./x bench cell [--repeats N] [--port fabric|tap] [--accel tcg|kvm]

Both guests serve HTTP (the cell's httpd; busybox httpd) on microvm. They run in turn within each repeat, at fixed addresses,
so that no measurement waits for a lease. Measured from the host's side of the network:

    first_reply_ms   QEMU's exec to the first byte of an HTTP reply (a connection is tried every 2 ms)
    request_us       sequential GET / requests, each with its own connection: p50 and p99 of --requests
    bytes_mb_s       GET /bytes/N of 100 MiB
    ping_us          ICMP echo, p50 of --pings
    rss_mib, idle_pct   of the QEMU process: after all that, and when idle

The port is vhost-user through `tombolo up`, with a tap of the same network as the host's side; --port tap omits our switch.
Ratios are the cell's divided by the Linux guest's: http_vs_linux compares bytes_mb_s (a rate: more is better),
http_requests_vs_linux requests per second (a rate), ping_vs_linux and first_reply_vs_linux times (less is better). Needs root
(a network namespace and a tap).
"""

import argparse
import contextlib
import os
import re
import select
import statistics
import time

from common import FIRST, BenchError, Results, fabric_of, note, private_folder, ratio, run_bench, until
from lib import CellGuest, LinuxGuest, Namespace, Net, http_get
from lib.http import socket_in
from lib.process import core_share

PREFIX = "10.77.0"
HOST = f"{PREFIX}.1"
GUESTS = {"cell": (f"{PREFIX}.10", "02:00:00:00:02:0a"), "linux": (f"{PREFIX}.11", "02:00:00:00:02:0b")}
TAP = "tmb-bench"
TRANSFER_BYTES = 100 << 20


def fabric_file(folder, space):
    ports = "".join(f'\n[port.{name}]\nkind = "vhost-user"\nsocket = "{folder}/{name}.sock"\nmac = "{mac}"\nip = "{ip}"\n'
                    for name, (ip, mac) in GUESTS.items())
    return f"""\
name = "bench"

[network.lan]
subnet = "{PREFIX}.0/24"
gateway = "{PREFIX}.254"

[tap.host]
device = "{TAP}"
netns = "{space}"
ip = "{HOST}"
{ports}"""


@contextlib.contextmanager
def host_side(kind, folder, space):
    """The network's host side; gives a function from a guest's name to its card."""
    if kind == "tap":
        space.tap(TAP, f"{HOST}/24")
        yield lambda name: Net.tap(TAP).with_mac(GUESTS[name][1])
        return
    with fabric_of(folder, fabric_file(folder, space)):
        until("the fabric's ports", lambda: all((folder / f"{name}.sock").exists() for name in GUESTS) and TAP in space.ip("-o", "link"), 20)
        space.ip("link", "set", TAP, "up")
        yield lambda name: Net.vhost_user(folder / f"{name}.sock").with_mac(GUESTS[name][1])


def start(name, net, space):
    address = GUESTS[name][0]
    # Only a tap has to be reached from within the namespace, and entering it is work of others before QEMU's start.
    space = space if net.backend.startswith("tap") else None
    if name == "cell":
        return CellGuest("httpd", net=net, append=f"ip={address}/24 hostname=cell", netns=space, nice=FIRST)
    return LinuxGuest(net=net, address=f"{address}/24", serve="http", netns=space, nice=FIRST)


def first_reply(guest, address, space, seconds):
    """Seconds from QEMU's exec to the first byte of a reply. Connections are tried side by side, since a lost SYN costs a second."""
    deadline = guest.started + seconds
    poll, pending = select.poll(), {}
    request = f"GET / HTTP/1.0\r\nHost: {address}\r\n\r\n".encode()
    next_try = 0.0
    asked = None
    try:
        while time.monotonic() < deadline:
            now = time.monotonic()
            if asked is None and now >= next_try:
                connection = socket_in(space)
                connection.setblocking(False)
                connection.connect_ex((address, 80))
                pending[connection.fileno()] = connection
                poll.register(connection, select.POLLOUT)
                next_try = now + 0.002
            for fd, event in poll.poll(2):
                connection = pending[fd]
                if asked is connection:
                    if connection.recv(65536):
                        return time.monotonic() - guest.started
                    raise BenchError("the first connection ended without a reply")
                error = connection.getsockopt(1, 4)  # SOL_SOCKET, SO_ERROR
                if error or event & (select.POLLHUP | select.POLLERR) or asked:
                    poll.unregister(fd)
                    pending.pop(fd).close()
                elif asked is None:
                    connection.sendall(request)
                    asked = connection
                    poll.modify(fd, select.POLLIN)
            if not guest.alive():
                raise BenchError(f"QEMU ended:\n{guest.tail()}")
    finally:
        for connection in pending.values():
            connection.close()
    raise BenchError(f"no HTTP reply within {seconds} s; the console says:\n{guest.tail()}")


def measure(name, net, space, options):
    address, mac = GUESTS[name]
    # The host knows the guest's MAC beforehand: an unanswered ARP would hold the first SYN back for a second.
    space.ip("neigh", "replace", address, "lladdr", mac, "dev", TAP, "nud", "permanent")
    with start(name, net, space) as guest:
        if name == "linux":
            # It needs seconds; SYNs of all that time would wait for it in the tap's queue.
            guest.wait_address(90)
        first = first_reply(guest, address, space.name, 90)
        times = []
        for _ in range(options.requests):
            begun = time.monotonic()
            reply = http_get(address, netns=space.name)
            times.append(time.monotonic() - begun)
            if reply.status != 200:
                raise BenchError(f"{name}: status {reply.status}")
        times.sort()
        transfer = http_get(address, f"/bytes/{TRANSFER_BYTES}", netns=space.name, seconds=60, keep=False)
        pings = space.run("ping", "-n", "-i", "0.01", "-c", options.pings, address, seconds=60, check=False).stdout
        round_trips = sorted(float(value) * 1000 for value in re.findall(r"time=([\d.]+) ms", pings))
        if not round_trips:
            raise BenchError(f"{name}: no echo reply came:\n{pings}")
        idle = 100 * core_share(guest.cpu_seconds, options.idle_seconds)
        return {
            "first_reply_ms": first * 1000,
            "request_us": statistics.median(times) * 1e6,
            "request_p99_us": times[int(len(times) * 0.99)] * 1e6,
            "requests_s": len(times) / sum(times),
            "bytes_mb_s": TRANSFER_BYTES / transfer.total_s / 1e6,
            "ping_us": statistics.median(round_trips),
            "ping_lost": options.pings - len(round_trips),
            "rss_mib": guest.rss_bytes() / (1 << 20),
            "idle_pct": idle,
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--pings", type=int, default=200)
    parser.add_argument("--idle-seconds", type=float, default=2.0)
    parser.add_argument("--port", choices=("fabric", "tap"), default="fabric")
    parser.add_argument("--accel", choices=("tcg", "kvm"), default="tcg")
    parser.add_argument("--only", choices=tuple(GUESTS), help="one of the two; no ratios then")
    options = parser.parse_args()
    os.environ["TOMBOLO_ACCEL"] = options.accel
    results = Results("cell")
    guests = [options.only] if options.only else list(GUESTS)
    with Namespace() as space, private_folder() as folder, host_side(options.port, folder, space) as card:
        for repeat in range(options.repeats):
            for name in guests:
                row = measure(name, card(name), space, options)
                results.add(guest=name, repeat=repeat, **row)
                note(f"{repeat + 1}/{options.repeats} {name:6} " + ", ".join(f"{key} {value:.1f}" for key, value in row.items()))
    keys = [key for key in results.rows[0] if key not in ("guest", "repeat")]
    median = {name: {key: results.median(key, guest=name) for key in keys} for name in guests}
    print(f"{'':16}" + "".join(f"{name:>12}" for name in guests) + f"   (medians of {options.repeats}, {options.accel}, port: {options.port})")
    for key in keys:
        print(f"{key:16}" + "".join(f"{median[name][key]:12.1f}" for name in guests))
    summary = {"accel": options.accel, "port": options.port}
    if not options.only:
        ours, peer = median["cell"], median["linux"]
        summary["first_reply_ms"] = round(ours["first_reply_ms"], 1)
        summary["linux_first_reply_ms"] = round(peer["first_reply_ms"], 1)
        summary["ratios"] = {
            "http_vs_linux": ratio(ours["bytes_mb_s"], peer["bytes_mb_s"]),
            "http_requests_vs_linux": ratio(ours["requests_s"], peer["requests_s"]),
            "ping_vs_linux": ratio(ours["ping_us"], peer["ping_us"]),
            "first_reply_vs_linux": ratio(ours["first_reply_ms"], peer["first_reply_ms"]),
        }
    for name in guests:
        summary[name] = {key: round(value, 2) for key, value in median[name].items()}
    results.finish(**summary)


if __name__ == "__main__":
    run_bench(main)
