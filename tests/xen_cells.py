"""Cells as domains of real Xen, under emulation. Their network's other end is Linux's netback in dom0, over a bridge.

Real Xen boots once for each test, so a test goes through much. An emulated Xen varies tenfold from boot to boot: nothing here
asserts a speed.
"""

import re

from lib import timeout
from lib.process import until
from lib.xen import CELL, DOM0, fetch_bytes, host

def processor_seconds(xen, name):
    found = re.search(rf"^{name}\s+\d+\s+\d+\s+\d+\s+\S+\s+([\d.]+)", xen.run("xl list").text, re.M)
    return float(found[1])


def rests(xen, name):
    before = processor_seconds(xen, name)
    xen.run("sleep 3")  # the span that is measured
    return processor_seconds(xen, name) == before


def comes_back(xen, address=CELL):
    """The device is connected some time after xl says that it is attached; from then on no ping may be lost."""
    until("an answer over the new device", lambda: xen.ping(address, 1, seconds=2) == 1.0)
    assert xen.ping(address, 3, seconds=40) == 1.0


def restart_backend(xen):
    """The backend's driver lets go of the only device and takes it again."""
    device = xen.run("ls /sys/bus/xen-backend/drivers/vif | grep ^vif-").text.split()[0]
    for what in ("unbind", "bind"):
        xen.run(f"echo {device} >/sys/bus/xen-backend/drivers/vif/{what}")
    # A new interface of the old name; xl runs the script for a new device only.
    _, domain, number = device.split("-")
    xen.run(f"vif=vif{domain}.{number} XENBUS_PATH=backend/vif/{domain}/{number} /etc/xen/scripts/vif-bridge online")


@timeout(600)
def test_a_domain_lives_and_ends_in_each_way():
    """The image that boots on QEMU boots as a PVH domain: console, clock, idling, shutdown, reboot, and crashes with their words."""
    with host("echo") as xen:
        xen.create("calm", "echo", "net=none ip=none verbose", vif=False)
        text = xen.wait_console("calm", "net up")
        assert re.search(r"clock \d+ kHz from Xen", text), text
        assert "FIFO event channels" in text, text
        # It may have been given the processor a moment ago; one that ticks never has a span
        # without.
        until("a cell without work uses no processor time", lambda: rests(xen, "calm"), 120)
        # Into the terminal that `xl console` opens; itself it reads only what a person types. More
        # than the ring's 1024 bytes.
        tty = xen.run("xenstore-read /local/domain/$(xl domid calm)/console/tty").text.strip()
        xen.run(f"(yes 0123456789abcde | head -n 200; echo the end) >{tty}", 60)
        xen.wait_console("calm", "the end")
        assert xen.console("calm").count("0123456789abcde\n") == 200
        until("a cell without work uses no processor time", lambda: rests(xen, "calm"), 120)
        xen.run("xl shutdown calm")
        xen.wait_gone("calm")
        assert "powered off by the toolstack" in xen.console("calm")

        xen.create("again", "echo", "net=none ip=none events=2l verbose", vif=False)
        assert "two-level event channels" in xen.wait_console("again", "net up")
        xen.run("xl reboot again")
        until("the domain stopped for a reboot", lambda: (xen.state("again") or "")[3:4] == "s")
        assert "c" not in xen.state("again"), "a reboot counts as a crash"
        assert "reboot by the toolstack" in xen.console("again")

        for word, says in (("panic", "selftest=panic"), ("stack", "the stack overflowed"), ("write", "write to read-only memory"), ("execute", "execution of data")):
            xen.create(f"end-{word}", "echo", f"net=none selftest={word}", vif=False)
            until(f"selftest={word} crashes the domain", lambda word=word: "c" in (xen.state(f"end-{word}") or ""))
            xen.wait_console(f"end-{word}", says)
            xen.run(f"xl destroy end-{word}")


@timeout(900)
def test_the_network_over_netback():
    """Ping, HTTP and TCP both ways through netback; the device detached and attached, its backend gone and back, all in one life."""
    with host("httpd", "iperf") as xen:
        xen.create("web", "httpd", f"ip={CELL}/24 ip6=fd09::2/64 verbose")
        xen.wait_console("web", "net up")
        assert xen.ping(CELL, 20, seconds=40) == 1.0
        assert xen.ping(CELL, 5, size=1400, seconds=40) == 1.0
        assert "HTTP/1.1 200" in xen.run(f"wget -S -q -O /dev/null http://{CELL}/ 2>&1").text
        fetch_bytes(xen, 3_000_001)
        assert xen.run("ping -6 -c 1 -W 20 fd09::2").code == 0

        # The toolstack takes the device away and gives another one, with another address.
        xen.run("xl network-detach web 0")
        xen.wait_console("web", "the network device is gone")
        xen.run("xl network-attach web mac=00:16:3e:00:00:77 bridge=br0", 120)
        comes_back(xen)
        assert "00:16:3e:00:00:77" in xen.run(f"ip neigh show {CELL}").text
        fetch_bytes(xen, 300_001)

        # Once idle, once in the middle of a download, which goes on.
        restart_backend(xen)
        comes_back(xen)
        fetch_bytes(xen, 40_000_001, meanwhile=lambda: restart_backend(xen))
        xen.run("xl shutdown web")
        xen.wait_gone("web")

        # Over the older form of event channels, as under a Xen that has no other.
        xen.create("flow", "iperf", f"ip={CELL}/24 events=2l")
        xen.wait_console("flow", "net up")
        for direction in ("", "-R"):
            text = xen.run(f"iperf -c {CELL} -n 8M {direction} -f m", 240).text
            rates = re.findall(r"([\d.]+) Mbits/sec", text)
            assert rates and float(rates[-1]) > 0, text
            print(f"TCP {'to' if direction else 'from'} dom0: {rates[-1]} Mbit/s")
        xen.run("xl destroy flow")
        until("nothing is left in XenStore", lambda: "frontend" not in xen.run("xenstore-ls /local/domain/0/backend/vif", check=False).text)


def dropped(xen, interface):
    return int(xen.run(f"cat /sys/class/net/{interface}/statistics/tx_dropped").text)


@timeout(600)
def test_several_queues_several_vifs_and_multicast_control():
    """Two vifs on two networks, each with its addresses and four queues; a backend with one queue later; unwanted multicast stays out."""
    with host("httpd", "calc") as xen:
        xen.run("echo 4 >/sys/module/xen_netback/parameters/max_queues")
        xen.run("brctl addbr br1; ip addr add 10.8.0.1/24 dev br1; ip -6 addr add fd08::1/64 dev br1; ip link set br1 up")
        line = f"ip={CELL}/24 ip6=fd09::2/64 ip.1=10.8.0.2/24 ip6.1=fd08::2/64 queues=4 verbose"
        xen.create("web", "httpd", line, mac="00:16:3e:00:00:02+00:16:3e:00:00:03@bridge=br1")
        assert "queues 4" in xen.wait_console("web", "net up")
        number = xen.run("xl domid web").text.strip()
        for address in (CELL, "10.8.0.2"):
            assert xen.ping(address, 5, seconds=40) == 1.0
            fetch_bytes(xen, 1_000_001, address)
        # Neighbour discovery goes by multicast.
        for address in ("fd09::2", "fd08::2"):
            assert xen.run(f"ping -6 -c 1 -W 20 {address}").code == 0
        cards = xen.run("ip neigh; ip -6 neigh").text
        for address, mac in ((CELL, 2), ("fd09::2", 2), ("10.8.0.2", 3), ("fd08::2", 3)):
            assert re.search(rf"^{re.escape(address)} .*00:16:3e:00:00:0{mac}", cards, re.M), cards
        # Each vif answers for its own addresses only.
        xen.run("ip route replace 10.8.0.2/32 dev br0")
        assert xen.ping("10.8.0.2", 2, seconds=10) == 0
        xen.run("ip route del 10.8.0.2/32 dev br0")
        queues = xen.run(f"ls -d /sys/class/net/vif{number}.*/queues/tx-* | wc -l").text.strip()
        assert queues == "8", queues

        # netback drops multicast of other guests that the cell has not asked for, as what one with
        # `slaac` asks all routers.
        before = dropped(xen, f"vif{number}.0")
        xen.create("calc", "calc", "ip=none ip6=fd09::4/64 slaac tcp=7000", mac="00:16:3e:00:00:12")
        xen.wait_console("calc", "net up")
        until("netback drops a router solicitation", lambda: dropped(xen, f"vif{number}.0") > before)
        # And lets through what it has asked for: how one cell finds another.
        line = "ip=none ip6=fd09::5/64 role=client tcp=fd09::4:7000 count=5 deadline_us=0 timeout_ms=60000"
        xen.create("client", "calc", line, mac="00:16:3e:00:00:13")
        xen.wait_gone("client", 120)
        xen.run("xl destroy calc")

        # The backend comes back with one queue, in the middle of a download. The paused cell sees
        # none of its states but the last, Connected, which netback writes although it has refused
        # four queues.
        xen.run("echo 1 >/sys/module/xen_netback/parameters/max_queues")

        def restart_unseen():
            xen.run("xl pause web")
            restart_backend(xen)
            xen.run("xl unpause web")

        fetch_bytes(xen, 20_000_001, meanwhile=restart_unseen)
        queues = xen.run(f"ls -d /sys/class/net/vif{number}.0/queues/tx-* | wc -l").text.strip()
        assert queues == "1", queues
        assert xen.ping("10.8.0.2", 2, seconds=40) == 1.0
        until("a cell without work uses no processor time", lambda: rests(xen, "web"), 120)


@timeout(900)
def test_connections_survive_save_and_restore():
    """A download goes on over `xl save` and `xl restore`; a domain that is saved and goes on loses nothing; the console and the clock work after it."""
    with host("httpd", "echo") as xen:
        xen.create("web", "httpd", f"ip={CELL}/24 ip6=fd09::2/64 ip.1=10.9.0.3/24", memory_mib=64, mac="00:16:3e:00:00:02+00:16:3e:00:00:03")
        xen.wait_console("web", "net up")
        assert xen.ping(CELL, 2, seconds=40) == 1.0

        def save_and_restore():
            xen.run("until [ $(cat /sys/class/net/vif*.0/statistics/rx_bytes) -gt 1000000 ]; do usleep 50000; done")
            xen.run("xl save web /tmp/image", 120)
            assert xen.state("web") is None
            xen.run("sleep 3")  # it is away for some time
            xen.run("xl restore /tmp/image && rm /tmp/image", 120)

        fetch_bytes(xen, 40_000_001, meanwhile=save_and_restore)
        xen.wait_console("web", "restored")
        # The second vif came back too, and neighbour discovery with the multicast addresses that it
        # needs.
        assert xen.ping("10.9.0.3", 2, seconds=40) == 1.0
        assert xen.run("ping -6 -c 1 -W 20 fd09::2").code == 0
        until("a restored cell without work uses no processor time", lambda: rests(xen, "web"), 120)

        # A checkpoint: the domain goes on by itself.
        fetch_bytes(xen, 40_000_001, meanwhile=lambda: xen.run("xl save -c web /tmp/image && rm /tmp/image", 120))
        assert xen.console("web").count("restored") == 1
        # Once more, and then its end by the toolstack, which needs the watches of the last domain.
        xen.run("xl save web /tmp/image && xl restore /tmp/image", 200)
        until("two restores", lambda: xen.console("web").count("restored") == 2)
        fetch_bytes(xen, 300_001)
        xen.run("xl shutdown web")
        xen.wait_gone("web")

        # Timers of an app and what is typed, after a restore.
        xen.create("echo", "echo", "net=none ip=none", memory_mib=64, vif=False)
        xen.wait_console("echo", "net up")
        xen.run("xl save echo /tmp/image && xl restore /tmp/image", 200)
        xen.wait_console("echo", "restored")
        tty = xen.run("xenstore-read /local/domain/$(xl domid echo)/console/tty").text.strip()
        xen.run(f"echo still here >{tty}")
        xen.wait_console("echo", "still here")


@timeout(600)
def test_every_app_runs_unchanged():
    """DHCP over the bridge, an echo, a ping from a cell, and calls with deadlines between two domains."""
    with host("echo", "ping", "calc") as xen:
        settings = "interface br0\nstart 10.9.0.100\nend 10.9.0.110\nlease_file /tmp/leases\noption subnet 255.255.255.0\n"
        xen.run(f"printf {settings!r} >/tmp/udhcpd.conf; touch /tmp/leases; udhcpd -S /tmp/udhcpd.conf")
        xen.create("echo", "echo", mac="00:16:3e:00:00:10")
        text = xen.wait_console("echo", "(DHCP)")
        address = re.search(r"net up ([\d.]+)/24", text)[1]
        assert xen.run(f"echo hello | nc -w 20 {address} 7 | head -n 1").text == "hello"

        xen.create("ping", "ping", f"ip=10.9.0.3/24 host={DOM0}", mac="00:16:3e:00:00:11")
        text = xen.wait_console("ping", "received")
        assert re.search(r"3 sent, [1-3] received", text), text

        xen.create("calc", "calc", "ip=10.9.0.4/24 tcp=7000", mac="00:16:3e:00:00:12")
        xen.wait_console("calc", "net up")
        line = "ip=10.9.0.5/24 role=client tcp=10.9.0.4:7000 count=50 deadline_us=0 timeout_ms=60000"
        xen.create("client", "calc", line, mac="00:16:3e:00:00:13")
        # It leaves with success only where each reply was right.
        xen.wait_gone("client", 120)
        print(xen.console("client"))
