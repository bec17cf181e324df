"""A driver domain on real Xen, under emulation: `tombolo` in a Linux guest serves the vif of a cell, and dom0 has no part in it but the toolstack's.

XenStore does not tell such a guest the names of other domains, so the port finds its vif by the MAC. Nothing here asserts a speed.
"""

import itertools
import re

from lib import timeout
from lib.process import until
from lib.xen import fabric_files, host, linux_guest, linux_init, pattern, sha256, xl_config

HOST, CELL, CELL_MAC = "10.87.0.3", "10.87.0.20", "00:16:3e:00:00:20"
FETCHED = 700_001

FABRIC = f"""
name = "driver"
[network.lan]
subnet = "10.87.0.0/24"
[tap.host]
ip = "{HOST}"
[port.web]
kind = "xen"
mac = "{CELL_MAC}"
ip = "{CELL}"
"""

# Process 1 runs what is typed, each line in its turn, and says its exit code. Its own lines begin
# with '@', so that the echo of what is typed is none.
INIT = linux_init(
    """mount -t xenfs xen /proc/xen
export HOME=/tmp
echo "@ready"
while read -r number line; do
    eval "$line" </dev/null 2>&1 | sed "s/^/@$number|/"
    echo "@$number done"
done
""",
    has_vif=False,
)
MODULES = ("xen_evtchn", "xen_gntdev", "xenfs", "tun")


class Driver:
    """The driver domain's console."""

    def __init__(self, xen):
        self.xen, self.numbers = xen, itertools.count(1)
        self.tty = xen.run("xenstore-read /local/domain/$(xl domid driver)/console/tty").text.strip()

    def run(self, line, seconds=120):
        """What a line prints."""
        number = next(self.numbers)
        self.xen.run(f"echo '{number} {line}' >{self.tty}")
        text = self.xen.wait_console("driver", f"@{number} done", seconds)
        return "\n".join(re.findall(rf"^@{number}\|(.*?)\r?$", text, re.M))

    def fetch(self, size=FETCHED):
        want = sha256(pattern(size))
        got = self.run(f"timeout 60 wget -q -O - http://{CELL}/bytes/{size} | sha256sum", 200)
        assert got.split()[:1] == [want], got

    def port_says(self, words):
        # The console is slow: a word for a whole status.
        return self.run(f"tombolo status --json | grep -c \"{words}\"").strip() not in ("", "0")


@timeout(900)
def test_a_linux_guest_serves_a_cell_as_its_driver_domain():
    """The cell finds its network in another guest; it keeps it when the daemon there is killed, and the next cell is served after its destruction; nothing is left."""
    in_driver = fabric_files(FABRIC)
    ramdisk, kernel = linux_guest(INIT, {}, modules=MODULES, files=in_driver)
    files = {"domu/kernel": kernel, "domu/ramdisk": ramdisk}
    files["domu/driver.cfg"] = xl_config("driver", None, 384, ramdisk="/domu/ramdisk", more=["driver_domain=1"]).encode()
    files["domu/web.cfg"] = xl_config("web", CELL_MAC, 32, "/cells/httpd", line="verbose", vif="script=/bin/true,backend=driver").encode()
    with host("httpd", files=files, memory_mib=896) as xen:
        xen.run("xl create -q /domu/driver.cfg", 120)
        xen.wait_console("driver", "@ready", 200)
        driver = Driver(xen)
        said = driver.run("tombolo doctor 2>&1 | grep -iA2 xen")
        assert "a guest of Xen" in said and "driver domain" in said and "can be opened" in said, said
        assert "error" not in (said := driver.run("tombolo up -d /tombolo.toml 2>&1")), said
        until("the port waits", lambda: driver.port_says("waiting for the domain"))
        xen.run("xl create -q /domu/web.cfg", 120)
        xen.wait_console("web", f"net up {CELL}/24", 120)
        driver.fetch()
        assert "bytes=" in driver.run(f"ping -c 3 {CELL}").replace("bytes from", "bytes=")

        driver.run("kill -9 $(pidof tombolo); tombolo up -d /tombolo.toml 2>&1")
        driver.fetch()
        assert "gone" not in xen.console("web"), "the cell has noticed the daemon's end"

        xen.run("xl destroy web")
        until("the port waits", lambda: driver.port_says("waiting for the domain"))
        xen.run("xl create -q /domu/web.cfg", 120)
        driver.fetch()
        xen.run("xl destroy web")
        number = xen.run("xl domid driver").text.strip()
        nothing = f"xenstore-ls /local/domain/{number}/backend/vif"
        until("no node of a device is left", lambda: "frontend" not in xen.run(nothing, check=False).text)
        driver.run("tombolo down 2>&1")
        xen.run("xl destroy driver")
        until("dom0 is alone", lambda: len(xen.run("xl list").text.splitlines()) == 2)
