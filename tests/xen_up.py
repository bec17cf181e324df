"""Machines of a fabric file as domains of real Xen, under emulation: `tombolo up` in dom0 creates, keeps, reports and destroys them.

One boot goes through all of it. An emulated Xen varies tenfold from boot to boot: nothing here asserts a speed.
"""

import json
import random
import re
import time

from lib import timeout
from lib.process import until
from lib.xen import LINUX_LINE, fabric_files, fetch, fetch_bytes, host, linux_guest, linux_init, pattern, sha256, xl_config

HOST, CELL, LINUX = "10.87.0.3", "10.87.0.20", "10.87.0.21"
DATA, UP = (random.Random(seed).randbytes(1_500_000) for seed in (1, 2))
FETCHED = 300_007
RUNTIME = "/run/tombolo/xen"

# Without `tsc_mode` each reading of the time-stamp counter of an emulated machine is a trap.
WEB = f"""
name = "xen"
[network.lan]
subnet = "10.87.0.0/24"
[tap.host]
ip = "{HOST}"
[cell.web]
image = "/cells/httpd"
attach = "xen"
args = "verbose"
ip = "{CELL}"
xl = ["tsc_mode='native'"]
"""
BOTH = f"""{WEB}
[vm.linux]
kernel = "/domu/kernel"
initrd = "/domu/ramdisk"
cmdline = "{LINUX_LINE} note='it is \\\\ \\"quoted\\"' ü"
attach = "xen"
memory = "160M"
queues = 2
ip = "{LINUX}"
xl = ["tsc_mode='native'"]
"""

# A machine that is saved. Xen 4.17 does not restore one with 32 MiB.
KEPT = f"""
name = "xen"
[network.lan]
subnet = "10.87.0.0/24"
[tap.host]
ip = "{HOST}"
[cell.web]
image = "/cells/echo"
attach = "xen"
args = "verbose"
ip = "{CELL}"
memory = "64M"
restart = "always"
xl = ["tsc_mode='native'"]
"""
IMAGE = "/tmp/image"
# In place of xl: its first `list` fails.
FAILING_XL = b"""#!/bin/sh
[ "$1" = list ] && rm /tmp/fails 2>/dev/null && exit 1
exec /tmp/xl.true "$@"
"""

# What process 1 of the Linux guest does.
INIT = linux_init("""echo "told $(cat /proc/cmdline)"
ip link set eth0 up
udhcpc -q -t 100 -T 1 -i eth0 -s /udhcpc
httpd -h /www
while read -r line; do
    case $line in
        fetch*) echo "fetched $(wget -q -O - "http://${line#fetch }" | sha256sum)" ;;
        *) echo "typed: $line" ;;
    esac
done
""")


def status(xen):
    return json.loads(xen.run("tombolo status --json").text)


def machine(xen, name):
    return next(m for m in status(xen)["machines"] if m["name"] == name)


def waits(xen, name, state, seconds=120):
    """The report of a machine, once it is in that state."""
    return until(f"{name} is {state}", lambda: (m := machine(xen, name))["state"] == state and m, seconds, 0.3)


def printed(xen, name):
    return xen.run(f"tombolo cell console {name} --log", check=False).text


def wait_printed(xen, name, words, seconds=120):
    return until(f"{name} prints {words!r}", lambda: (text := printed(xen, name)) and words in text and text, seconds, 0.3)


def types(xen, line):
    """Types a line at the console of the Linux guest."""
    xen.run(f"(echo '{line}'; sleep 1) | timeout 20 tombolo cell console linux", 60, check=False)


def domains(xen):
    """Domains but dom0: name -> number."""
    lines = xen.run("xl list").text.splitlines()[2:]
    return {line.split()[0]: int(line.split()[1]) for line in lines}


def link_local(xen, number):
    """The IPv6 address of a cell that follows from its MAC."""
    mac = xen.run(f"xenstore-read /local/domain/0/backend/vif/{number}/0/mac").text.strip()
    a, b, c, d, e, f = (int(byte, 16) for byte in mac.split(":"))
    return f"fe80::{(a ^ 2) << 8 | b:x}:{c << 8 | 0xff:x}:{0xfe00 | d:x}:{e << 8 | f:x}"


def reached(xen, what):
    print(f"{time.monotonic() - xen.started:6.1f} s  {what}", flush=True)


def up(xen, file="/tombolo.toml", more=""):
    return xen.run(f"tombolo up -d {more} {file}", 120).text


def kill_daemon(xen):
    xen.run(f"kill -9 {status(xen)['pid']}")


def nothing_is_left(xen):
    until("dom0 is alone", lambda: not domains(xen))
    left = xen.run("xenstore-list /local/domain/0/backend/vif; xenstore-list /libxl; xenstore-list /vm; xenstore-list /local/domain", check=False)
    names = [line for line in left.text.splitlines() if "could not list" not in line]
    # dom0 itself.
    assert names in (["0"], ["00000000-0000-0000-0000-000000000000", "0"]), left.text
    assert xen.run("ls /run/tombolo/xen", check=False).code, "the runtime folder is still there"
    ours = r"xl create|xl restore|xenconsole |tombolo up|tombolo keeper|tombolo domain-watch"
    # A xenconsole ends when it hears that its domain has gone.
    until("no process is left", lambda: not re.search(ours, xen.run("ps", 60).text), 30, 0.5)


@timeout(900)
def test_a_fabric_file_runs_its_machines_as_domains():
    """A cell and Linux by `tombolo up`: traffic, console both ways, two daemons more, each kind of end told, nothing left."""
    ramdisk, kernel = linux_guest(INIT, {"data": DATA})
    files = fabric_files(BOTH) | {"web.toml": WEB.encode(), "domu/kernel": kernel, "domu/ramdisk": ramdisk, "www/up": UP}
    with host("httpd", files=files) as xen:
        xen.run("rmmod xen_netback; httpd -h /www")
        up(xen)
        wait_printed(xen, "web", f"net up {CELL}/24")
        wait_printed(xen, "linux", f"@net up {LINUX}/24")
        assert "note='it is \\ \"quoted\"' " in printed(xen, "linux"), printed(xen, "linux")
        reached(xen, "both have their leases")
        before = domains(xen)
        assert set(before) == {"xen.web", "xen.linux"}, before
        web = machine(xen, "web")
        assert (web["state"], web["accel"], web["machine"]) == ("running", "xen", "pvh"), web
        assert web["domain"] == {"name": "xen.web", "id": before["xen.web"], "suspended": False}, web
        assert f"Xen domain xen.linux, number {before['xen.linux']}" in xen.run("tombolo status").text
        fetch_bytes(xen, 1_000_003, CELL)
        fetch(xen, LINUX, "data", DATA)
        types(xen, f"fetch {CELL}/bytes/{FETCHED}")
        wait_printed(xen, "linux", f"fetched {sha256(pattern(FETCHED))}")
        types(xen, f"fetch {HOST}/up")
        wait_printed(xen, "linux", f"fetched {sha256(UP)}")
        reached(xen, "content both ways, typed at the console")

        def another_daemon():
            kill_daemon(xen)
            up(xen)

        fetch_bytes(xen, 3_000_001, CELL, meanwhile=another_daemon)
        assert domains(xen) == before, domains(xen)
        assert all(m["adopted"] and m["state"] == "running" for m in status(xen)["machines"])
        assert "web: kept" in "\n".join(status(xen)["takeover"]), status(xen)["takeover"]
        # The cell asked the backend before for the multicast frames of neighbour discovery. dom0
        # has not looked for it before.
        ping = f"ping -6 -I host -c 1 -W 2 {link_local(xen, before['xen.web'])}"
        until("the cell answers by IPv6", lambda: xen.run(ping, check=False).code == 0, 60)
        fetch(xen, LINUX, "data", DATA, meanwhile=lambda: up(xen, more="--replace"))
        assert domains(xen) == before, domains(xen)
        types(xen, "after two daemons")
        wait_printed(xen, "linux", "typed: after two daemons")
        reached(xen, "two daemons later")

        # Ends, each with its reason and the console's last lines, and a start again.
        xen.run("xl destroy xen.web")
        end = waits(xen, "web", "failed")["last_end"]
        assert end.startswith("the domain was destroyed") and f"net up {CELL}/24" in end, end
        xen.run("tombolo cell run web", 60)
        wait_printed(xen, "web", f"net up {CELL}/24")
        assert domains(xen)["xen.web"] != before["xen.web"]
        fetch_bytes(xen, 300_001, CELL)
        xen.run("xl shutdown xen.web")
        end = waits(xen, "web", "stopped")["last_end"]
        assert end.startswith("the domain powered off") and "powered off by the toolstack" in end, end
        # One that is added while the fabric runs.
        xen.run("tombolo cell run /cells/httpd --name bad --attach xen --args selftest=panic", 60)
        end = waits(xen, "bad", "failed")["last_end"]
        assert end.startswith("the domain crashed") and "panicked at" in end, end
        xen.run("tombolo cell stop bad")
        # What xl cannot build is told in its words.
        xen.run("tombolo cell run /www/up --name none --attach xen", 60)
        end = waits(xen, "none", "failed")["last_end"]
        assert end.startswith("xl ended with exit code") and "xl: libxl: error" in end, end
        xen.run("tombolo cell stop none")
        assert set(domains(xen)) == {"xen.linux"}
        reached(xen, "destroyed, powered off, crashed")

        # A domain that nothing watches any more is not left running.
        xen.run("tombolo cell run web", 60)
        wait_printed(xen, "web", f"net up {CELL}/24")
        xen.run(f"kill -9 {machine(xen, 'web')['pid']}")
        end = waits(xen, "web", "failed")["last_end"]
        assert end.startswith("xl was ended by signal 9, and the domain was destroyed"), end
        assert set(domains(xen)) == {"xen.linux"}
        xen.run("tombolo down", 120)
        nothing_is_left(xen)
        reached(xen, "down")

        # What a killed daemon left is cleared up without one, also where its xl was killed.
        up(xen, "/web.toml")
        wait_printed(xen, "web", f"net up {CELL}/24")
        pid = machine(xen, "web")["pid"]
        kill_daemon(xen)
        xen.run(f"kill -9 {pid}")
        assert set(domains(xen)) == {"xen.web"}
        said = xen.run("tombolo down --fabric xen", 180).text
        assert "domain xen.web was destroyed" in said, said
        nothing_is_left(xen)
        reached(xen, "cleared up after a crash")


def answers(xen, seconds=60):
    until("the cell answers", lambda: xen.ping(CELL, 1, seconds=5) == 1.0, seconds)


def types_at_web(xen, line):
    """Types a line at the cell's console, which returns it."""
    xen.run(f"(echo '{line}'; sleep 1) | timeout 20 tombolo cell console web", 60, check=False)
    wait_printed(xen, "web", line)


def is_watched(xen, number):
    """The machine runs as the domain of that number, which the fabric's own process watches."""
    waits(xen, "web", "running")
    # The number is told once the domain has been found.
    until("the domain's number", lambda: machine(xen, "web")["domain"]["id"] is not None, 60, 0.3)
    web = machine(xen, "web")
    assert web["domain"]["id"] == number and web["restarts"] == 0, web
    assert f"domain-watch {number} {RUNTIME}/web.xl" in xen.run(f"tr '\\0' ' ' </proc/{web['pid']}/cmdline").text
    return web


@timeout(900)
def test_a_saved_machine_of_a_fabric_goes_on_where_it_was():
    """Checkpoint, save, restore, and each with another daemon: none starts a second domain, and console, state and port come back."""
    other = xl_config("other", None, 32, "/cells/echo", line="net=none ip=none").encode()
    with host("echo", files=fabric_files(KEPT) | {"other.cfg": other, "failing-xl": FAILING_XL}) as xen:
        xen.run("rmmod xen_netback")
        up(xen)
        wait_printed(xen, "web", f"net up {CELL}/24")
        first = domains(xen)["xen.web"]
        types_at_web(xen, "typed before")

        # After a checkpoint the domain goes on; its xl has done with it.
        xen.run(f"xl save -c xen.web {IMAGE} >/dev/null 2>&1; rm {IMAGE}", 120)
        until("the fabric watches the domain", lambda: "domain-watch" in xen.run("ps").text, 30, 0.3)
        is_watched(xen, first)
        answers(xen)
        types_at_web(xen, "typed after a checkpoint")
        reached(xen, "a checkpoint")

        # Saved: stopped, and no policy starts it, also with another daemon.
        xen.run(f"xl save xen.web {IMAGE} >/dev/null 2>&1", 120)
        end = waits(xen, "web", "stopped")["last_end"]
        assert end.startswith("the domain was saved or migrated"), end
        up(xen, more="--replace")
        kill_daemon(xen)
        up(xen)
        web = machine(xen, "web")
        assert (web["state"], web["restarts"]) == ("stopped", 0) and "xl restore" in web["last_end"], web
        assert not domains(xen)
        reached(xen, "saved")

        # Restored: the same life goes on.
        xen.run(f"xl restore {IMAGE} >/dev/null 2>&1", 120)
        second = domains(xen)["xen.web"]
        assert second != first
        is_watched(xen, second)
        answers(xen)
        types_at_web(xen, "typed after a restore")
        text = printed(xen, "web")
        assert text.count("net up") == 1 and "typed before" in text, text
        kill_daemon(xen)
        up(xen)
        assert machine(xen, "web")["adopted"] and domains(xen) == {"xen.web": second}
        is_watched(xen, second)
        reached(xen, "restored, and kept by another daemon")

        # An `xl` that fails once is no reason to end a healthy domain. The end of another one has
        # the watcher ask it.
        watcher = machine(xen, "web")["pid"]
        xen.run("xl create -p -q /other.cfg", 60)
        xl = xen.run("which xl").text.strip()
        xen.run(f"mv {xl} /tmp/xl.true; touch /tmp/fails; cp /failing-xl {xl}; chmod 755 {xl}")
        xen.run("xl destroy other")
        until("an `xl list` has failed", lambda: xen.run("ls /tmp/fails", check=False).code, 60, 0.3)
        log = f"cat {RUNTIME}/web.log"
        until("the watcher looks again", lambda: "looking again every 5 s" in xen.run(log).text, 30, 0.3)
        time.sleep(6)
        xen.run(f"mv /tmp/xl.true {xl}")
        assert domains(xen) == {"xen.web": second}
        assert machine(xen, "web")["pid"] == watcher, machine(xen, "web")
        answers(xen)
        reached(xen, "an xl that failed")

        # Saved and restored while no daemon runs, as far as a vif can be without its backend: the
        # next one finds it.
        xen.run(f"rm {IMAGE}; xl save xen.web {IMAGE} >/dev/null 2>&1", 120)
        waits(xen, "web", "stopped")
        handle = xen.start(f"xl restore {IMAGE} >/dev/null 2>&1")
        until("the domain is there", lambda: "xen.web" in domains(xen), 60, 0.2)
        kill_daemon(xen)
        up(xen)
        xen.finish(handle, 120)
        third = domains(xen)["xen.web"]
        is_watched(xen, third)
        answers(xen)
        reached(xen, "restored while a daemon was killed")

        # Its end is told as of any other, and the policy counts again.
        xen.run("xl shutdown xen.web")
        until("another domain was started", lambda: domains(xen).get("xen.web", third) != third, 60, 0.3)
        web = waits(xen, "web", "running")
        assert web["restarts"] == 1 and web["last_end"].startswith("the domain powered off"), web
        assert "powered off by the toolstack" in web["last_end"], web
        xen.run("tombolo down", 120)
        nothing_is_left(xen)
        reached(xen, "down")
