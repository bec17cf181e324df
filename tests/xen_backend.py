"""Our network backend in user space (crates/port/examples/xen_switch.rs), in dom0 in place of netback: frontends that break every
rule or die, beside a neighbour that must not notice."""

import os
import re
from typing import NamedTuple

from lib import built, timeout
from lib.process import until
from lib.xen import CELL, DOM0, fetch_bytes, host, program_in_guest

# Times that a domain is destroyed under traffic; ./x xen-destroys takes more.
DESTROYS = int(os.environ.get("TOMBOLO_XEN_DESTROYS", "8"))
# What a process may grow by without having lost anything: pages of its allocator.
GROWTH_KIB = 512
MAC = "00:16:3e:00:00:0{}"
VIF = MAC + "@script=/bin/true"
# One domain after the other that is destroyed in the middle of a download.
DESTROY = """#!/bin/sh
sed -i 's/mac=[^,]*/mac=00:16:3e:00:00:03/; s/^memory=.*/memory=32/' /tmp/foe.cfg
for i in $(seq "$1"); do
    xl create -q /tmp/foe.cfg || exit 1
    tries=0
    until wget -q -O /dev/null http://10.9.0.3/bytes/1000 2>/dev/null; do
        tries=$((tries + 1))
        [ $tries -lt 60 ] || exit 2
        usleep 50000
    done
    wget -q -O /tmp/part http://10.9.0.3/bytes/900000000 2>/dev/null &
    until [ "$(stat -c %s /tmp/part 2>/dev/null || echo 0)" -gt 200000 ]; do
        usleep 20000
    done
    xl destroy foe || exit 3
    kill $!
    rm /tmp/part
done
"""


class Resources(NamedTuple):
    """What the switch holds, and what it has of dom0's and of XenStore's; `watches` are those of all clients of XenStore."""

    descriptors: int
    threads: int
    mappings: int
    event_channels: int
    watches: int
    memory_kib: int


class Switch:
    """The switch in dom0: a tap with dom0's address, and the domains `guests`, each of which may send from its own MAC only."""

    def __init__(self, xen, *guests):
        self.xen = xen
        xen.run(f"rmmod xen_netback; ip addr del {DOM0}/24 dev br0; mkfifo /tmp/ask")
        # The pipe stays open for writing, whichever process asks.
        xen.run("sh -c 'exec sleep 1000000 >/tmp/ask' >/dev/null 2>&1 </dev/null &")
        ports = " ".join(f"{name}={MAC.format(2 + n)}" for n, name in enumerate(guests))
        xen.run(f"sh -c 'exec xen_switch tap0 {ports} </tmp/ask' >/tmp/said 2>&1 </dev/null &")
        until("the switch is there", lambda: "guests" in xen.run("cat /tmp/said").text)
        xen.run(f"ip addr add {DOM0}/24 dev tap0; ip link set tap0 up; pidof xen_switch >/tmp/switch.pid")

    def say(self):
        """What it says of its ports."""
        had = int(self.xen.run("wc -c </tmp/said").text)
        self.xen.run("echo >/tmp/ask")

        def said():
            text = self.xen.run(f"tail -c +{had + 1} /tmp/said").text
            return text if re.search("^end of ?$", text, re.M) else None

        return until("the switch answers", said)

    def counters(self, guest):
        """Frames in, faults, and drops on the way in by their reason."""
        text = self.say()
        frames, faults = re.search(rf"^{guest}: frames (\d+) in, .*faults (\d+)$", text, re.M).groups()
        drops = {reason: int(count) for count, reason in re.findall(rf"^{guest}: dropped on the way in: (\d+) (\S+)$", text, re.M)}
        return int(frames), int(faults), drops

    def traffic(self, guest):
        """Frames from the guest and to it, and their bytes."""
        counts = re.search(rf"^{guest}: frames (\d+) in, (\d+) out; bytes (\d+) in, (\d+) out", self.say(), re.M).groups()
        return tuple(map(int, counts))

    def resources(self):
        pid = self.xen.run("cat /tmp/switch.pid").text.strip()
        text = self.xen.run(
            f"ls /proc/{pid}/fd | wc -l; ls /proc/{pid}/task | wc -l; grep -c gntdev /proc/{pid}/maps; lsevtchn 0 | wc -l; "
            "rm -f /tmp/memory; xenstore-control memreport /tmp/memory >/dev/null; grep -c 'struct watch ' /tmp/memory; "
            f"awk '/VmRSS/ {{ print $2 }}' /proc/{pid}/status", check=False).text
        return Resources(*map(int, text.split()))

    def wait_resources(self, before):
        """Waits until all is given back; memory may have grown by a little."""
        until("all but memory is as before", lambda: self.resources()[:-1] == before[:-1])
        after = self.resources()
        print(f"before {before}, after {after}")
        assert after.memory_kib <= before.memory_kib + GROWTH_KIB, (before, after)


def files():
    return program_in_guest(built("examples/xen_switch")) | {"bin/destroy-foe": DESTROY.encode()}


def neighbour(xen):
    xen.create("web", "httpd", f"ip={CELL}/24", mac=VIF.format(2))
    xen.wait_console("web", "net up")
    until("the neighbour answers", lambda: xen.ping(CELL, 1, seconds=5) == 1.0)
    fetch_bytes(xen, 1_000_001)


def no_nodes_left(xen, name):
    """Nothing is left of a domain's vif in the backend's part of XenStore."""
    until(f"{name} is gone from XenStore", lambda: len(xen.run("xenstore-list backend/vif", check=False).text.split()) == 1)


@timeout(3600)
def test_domains_are_destroyed_under_traffic():
    """A domain is destroyed again and again in the middle of a download; the neighbour's pings go on, and the switch is as before."""
    with host("httpd", files=files()) as xen:
        switch = Switch(xen, "web", "foe")
        neighbour(xen)
        xen.create("foe", "httpd", "ip=10.9.0.3/24", mac=VIF.format(3))
        xen.wait_console("foe", "net up")
        alive = switch.resources()
        xen.run("xl destroy foe")
        # Once before it is measured: what the switch allocates for its first such guest it keeps.
        xen.run("destroy-foe 1", 120)
        no_nodes_left(xen, "foe")
        before = switch.resources()
        assert all(getattr(alive, what) > getattr(before, what) for what in ("mappings", "event_channels", "watches")), (alive, before)
        xen.start_pings(CELL)
        xen.run(f"destroy-foe {DESTROYS}", 60 * DESTROYS)
        no_nodes_left(xen, "foe")
        switch.wait_resources(before)
        sent, answered = xen.finish_pings()
        frames = switch.counters("foe")[0]
        print(f"{DESTROYS} domains destroyed, {frames} frames of theirs; {answered} of {sent} pings to the neighbour were answered")
        # Of up to 60 KiB each: no few of every domain.
        assert frames > 10 * DESTROYS and sent == answered
        assert switch.counters("web")[1:] == (0, {})
        fetch_bytes(xen, 1_000_001)


@timeout(600)
def test_tcp_over_ipv6_goes_uncut_both_ways():
    """Between dom0 and a cell: the frames of each direction are longer than the MTU on the average."""
    with host("iperf", files=files()) as xen:
        switch = Switch(xen, "flow")
        xen.run("ip -6 addr del fd09::1/64 dev br0; ip -6 addr add fd09::1/64 dev tap0")
        xen.create("flow", "iperf", f"ip={CELL}/24 ip6=fd09::2/64", mac=VIF.format(2))
        xen.wait_console("flow", "net up")
        until("the cell answers", lambda: xen.run("ping -6 -c 1 -W 5 fd09::2", check=False).code == 0)
        for direction, option in enumerate(("-R", "")):
            before = switch.traffic("flow")
            text = xen.run(f"iperf -V -c fd09::2 -n 8M {option} -f m", 240).text
            more = [after - had for had, after in zip(before, switch.traffic("flow"))]
            frames, size = more[direction], more[2 + direction]
            print(f"TCP over IPv6 {'to' if direction else 'from'} the cell: {size} bytes in {frames} frames")
            assert size > 8 << 20, text
            assert size / frames > 2 * 1514, (frames, size)
        assert switch.counters("flow")[1:] == (0, {})
