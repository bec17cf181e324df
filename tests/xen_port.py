"""Our backend on real Xen, under emulation: `tombolo` in dom0 serves the vifs of a stock Linux guest and of a cell, in place of netback.

One boot goes through all of it, since each takes half a minute. An emulated Xen varies tenfold from boot to boot: nothing here
asserts a speed.
"""

import contextlib
import json
import random
import re
import time

from lib import scratch, timeout
from lib.process import until
from lib.xen import PATTERN, XenHost, fabric_files, linux_guest, linux_init, sha256, xl_config

HOST, CELL, LINUX = "10.87.0.3", "10.87.0.20", "10.87.0.21"
CELL_MAC, LINUX_MAC = "00:16:3e:00:00:20", "00:16:3e:00:00:21"
# What Linux serves, and what it fetches again and again from dom0 and from the cell.
DATA, UP = (random.Random(seed).randbytes(3_000_000) for seed in (1, 2))
FETCHED = 300_007

FABRIC = f"""
name = "xen"
[network.lan]
subnet = "10.87.0.0/24"
[tap.host]
ip = "{HOST}"
[port.web]
kind = "xen"
mac = "{CELL_MAC}"
ip = "{CELL}"
[port.guest]
kind = "xen"
domain = "linux"
queues = 2
mac = "{LINUX_MAC}"
ip = "{LINUX}"
"""

# What process 1 of the Linux guest does. A cell that is destroyed closes no connection, so each fetch has a limit.
INIT = linux_init(f"""ip link set eth0 up
udhcpc -q -t 100 -T 1 -i eth0 -s /udhcpc
httpd -h /www
while :; do
    for from in {HOST}/up {CELL}/bytes/{FETCHED}; do
        echo "fetched $from $(timeout 10 wget -q -O - http://$from | sha256sum)"
    done
    for queue in $(awk '/-q[0-9]+-[rt]x/ {{ print $NF "=" $2 + $3 }}' /proc/interrupts); do
        echo "events of $queue"
    done
done
""")


def pattern(size):
    return (PATTERN * (size // len(PATTERN) + 1))[:size]


@contextlib.contextmanager
def host():
    ramdisk, kernel = linux_guest(INIT, {"data": DATA})
    files = fabric_files(FABRIC) | {"domu/kernel": kernel, "domu/ramdisk": ramdisk, "www/up": UP}
    files["domu/web.cfg"] = xl_config("web", CELL_MAC, 32, "/cells/httpd", line="verbose").encode()
    # A queue for each processor, as its driver does.
    files["domu/linux.cfg"] = xl_config("linux", LINUX_MAC, 160, ramdisk="/domu/ramdisk", more=["vcpus=2"]).encode()
    with scratch() as folder, XenHost(folder, ["httpd"], files) as xen:
        try:
            print(f"Xen and dom0 were up after {xen.bring_up():.1f} s")
            yield xen
        except Exception:
            print(xen.tail(40))
            raise


def port(xen, name):
    status = json.loads(xen.run("tombolo status --json").text)
    return next(port for port in status["ports"] if port["name"] == name)


def fetch(xen, address, path, want, meanwhile=lambda: None):
    """A file by HTTP to dom0, by its checksum; `meanwhile` happens while it comes."""
    handle = xen.start(f"wget -q -O - http://{address}/{path} | sha256sum")
    meanwhile()
    got = xen.finish(handle, 300).text.split()[0]
    assert got == want, f"{address}/{path} has the checksum {got}, expected {want}"


def fetched(xen):
    """What Linux has fetched so far, by where from; each with the right content, or none while the other end was away."""
    found = {HOST: 0, CELL: 0}
    for address, digest in re.findall(r"fetched ([\d.]+)/\S+ ([0-9a-f]{64})", xen.console("linux")):
        want = sha256(UP) if address == HOST else sha256(pattern(FETCHED))
        found[address] += digest == want
    return found


def rings_used(xen):
    """The rings of which Linux had events."""
    return {ring for ring, count in re.findall(r"events of \S+-(q\d-[rt]x)=(\d+)", xen.console("linux")) if int(count) > 0}


def fetches_more(xen):
    """Linux fetches from both another time, with the right content."""
    before = fetched(xen)
    until("Linux fetches both another time", lambda: all(fetched(xen)[a] > before[a] for a in before), 300, 0.5)


def answers(xen, address):
    until(f"an answer of {address}", lambda: xen.ping(address, 1, seconds=2) == 1.0)
    assert xen.ping(address, 5, seconds=40) == 1.0


def reached(xen, what):
    print(f"{time.monotonic() - xen.started:6.1f} s  {what}", flush=True)


def channels(xen):
    return len(xen.run("lsevtchn 0").text.splitlines())


def killed(xen):
    """kill -9 of the daemon, and another one."""
    pid = json.loads(xen.run("tombolo status --json").text)["pid"]
    xen.run(f"kill -9 {pid}")
    up(xen)


def up(xen, more=""):
    xen.run(f"tombolo up -d {more} /tombolo.toml", 120)


def nothing_is_left(xen):
    """Of no domain but dom0 anything is left. One of which a page is still mapped would stay as a zombie."""
    until("dom0 is alone", lambda: len(xen.run("xl list").text.splitlines()) == 2)
    assert xen.run("xenstore-list /local/domain/0/backend/vif", check=False).text in ("", "xenstore-list: could not list path /local/domain/0/backend/vif")


@timeout(1200)
def test_the_fabric_serves_linux_and_a_cell_in_place_of_netback():
    """Content both ways for both guests; the daemon killed and replaced under downloads; devices detached and attached, a domain destroyed under traffic; nothing left."""
    with host() as xen:
        refused = xen.run("tombolo up -d /tombolo.toml", 120, check=False)
        assert refused.code and "rmmod xen-netback" in refused.text, refused.text
        said = xen.run("tombolo doctor 2>&1 | grep -iA2 xen", 120).text
        assert "this is the dom0 of Xen" in said and "rmmod xen-netback" in said and "/dev/xen/privcmd" in said, said
        xen.run("rmmod xen_netback; httpd -h /www")
        before = channels(xen)
        up(xen)
        assert port(xen, "web")["details"]["state"] == "waiting for the domain"
        for name in ("linux", "web"):
            xen.run(f"xl create -q /domu/{name}.cfg", 120)
        xen.wait_console("web", f"net up {CELL}/24", 300)
        xen.wait_console("linux", f"@net up {LINUX}/24", 300)
        reached(xen, "both guests have their leases")
        for address in (CELL, LINUX):
            assert xen.ping(address, 10, seconds=40) == 1.0
            assert xen.ping(address, 3, size=1400, seconds=40) == 1.0
        fetch(xen, CELL, "bytes/3000001", sha256(pattern(3_000_001)))
        fetch(xen, LINUX, "data", sha256(DATA))
        fetches_more(xen)
        for name in ("web", "guest"):
            seen = port(xen, name)
            assert seen["kind"] == "xen" and seen["up"] and seen["details"]["state"].endswith("connected"), seen
            assert {"tso4", "checksum"} <= set(seen["offloads"]), seen
            assert seen["counters"]["faults"] == 0 and seen["counters"]["rx_frames"] > 100, seen

        # Both queues of the Linux guest are used, each way.
        assert port(xen, "guest")["details"]["queues"] == 2, port(xen, "guest")
        until("events of each ring", lambda: rings_used(xen) == {"q0-tx", "q0-rx", "q1-tx", "q1-rx"}, 120, 0.5)

        reached(xen, "content both ways")

        # The guests keep their links and connections when the daemon is killed, and when another takes over.
        fetch(xen, CELL, "bytes/8000009", sha256(pattern(8_000_009)), meanwhile=lambda: killed(xen))
        # Much of it came through the daemon that followed.
        assert port(xen, "web")["counters"]["rx_bytes"] > 1_000_000
        fetch(xen, LINUX, "data", sha256(DATA), meanwhile=lambda: up(xen, "--replace"))
        fetches_more(xen)
        assert "gone" not in xen.console("web"), "the cell has noticed the daemon's end"
        reached(xen, "two daemons later")

        # The toolstack takes the device away and gives it back.
        xen.run("xl network-detach web 0", 120)
        until("the port waits", lambda: not port(xen, "web")["up"])
        xen.run(f"xl network-attach web mac={CELL_MAC} script=/bin/true", 120)
        answers(xen, CELL)
        fetch(xen, CELL, "bytes/300001", sha256(pattern(300_001)))

        reached(xen, "detached and attached")

        # A domain dies under traffic; the other one notices nothing, and the next of that name is served.
        xen.start_pings(LINUX)
        handle = xen.start(f"timeout 20 wget -q -O /dev/null http://{CELL}/bytes/400000000")
        until("the download runs", lambda: port(xen, "web")["counters"]["rx_bytes"] > 3_000_000)
        xen.run("xl destroy web")
        until("the port waits", lambda: port(xen, "web")["details"]["state"] == "waiting for the domain")
        xen.run("xl create -q /domu/web.cfg", 120)
        answers(xen, CELL)
        sent, came = xen.finish_pings()
        assert sent == came, f"{sent - came} of {sent} pings of the other guest were lost"
        xen.finish(handle, 60, check=False)
        fetches_more(xen)

        reached(xen, "destroyed and created under traffic")
        for name in ("web", "linux"):
            xen.run(f"xl destroy {name}")
        nothing_is_left(xen)
        assert port(xen, "guest")["counters"]["faults"] == 0
        xen.run("tombolo down", 60)
        assert channels(xen) == before, xen.run("lsevtchn 0").text
