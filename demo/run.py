#!/usr/bin/env python3
"""The program's main job on real guests: two cells, a stock Linux guest and this host on one network.

usage: make demo [KEEP=1]        (or: demo/run.py [--keep])

Writes build/demo/tombolo.toml, starts it with `tombolo up`, and uses it as its users would: addresses by DHCP, pings by
name each way, a page through a port forward, 100 MB with a checksum, iperf in both directions, the way out. Prints each step
as it happens and a table at the end. Exits 0 only if all of it happened, 1 if something failed, 3 if something could not be
tried here (it says what). Everything is torn down, unless --keep.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from lib import BUILD, Console, http_get, linux_cmdline, until  # noqa: E402

TOMBOLO = ROOT / "target/release/tombolo"
# As it is typed in this repository.
PROGRAM = TOMBOLO.relative_to(ROOT)
# Not `demo`: that is the name of the fabric of examples/demo.toml.
FABRIC = "tour"
LISTEN = ("127.0.0.1", 18080)
BYTES = 100_000_000
IPERF_SECONDS = 3
# For what takes a few seconds on a machine with nothing else to do, and much longer under emulation
# on a busy one.
PATIENCE_S = 120
AS_ROOT = os.geteuid() == 0
# Leases of an earlier run would look like addresses before any guest has asked for one.
STATE = BUILD / "demo/state"
os.environ["TOMBOLO_STATE"] = str(STATE)

FILE = """\
# Two cells, a stock Linux guest and this host on one network, with DHCP, names, a forward and a
# rootless way out.
name = "{fabric}"

[network.lan]
subnet = "10.87.0.0/24"
uplink = "user"                 # through passt

[cell.web]                      # a unikernel that serves HTTP
app = "httpd"

[cell.meter]                    # a unikernel that speaks iperf 2
app = "iperf"

[vm.linux]                      # Debian's cloud kernel with busybox, made by `./x guest`
kernel = "../guest/vmlinux"
initrd = "../guest/initramfs.cpio"
machine = "microvm"
cmdline = "{cmdline}"

[[forward]]
listen = "{host}:{port}"
to = "web:80"
"""
HOST_TAP = """
[tap.host]                      # this machine's own place in the network (needs root)
device = "tombolo-demo"
ip = "10.87.0.9"
"""


class Failed(Exception):
    """A step did not do what it should; the text says what came instead."""


class Untried(Exception):
    """A step cannot be tried on this machine; the text says why."""


class Table:
    """The steps and what came of them; printed as they happen and once more at the end."""

    def __init__(self):
        self.rows = []
        self.start = time.monotonic()

    def step(self, what, action):
        began = time.monotonic()
        tty = sys.stdout.isatty()
        if tty:
            print(f"  ...  {what}", end="\r", flush=True)
        try:
            verdict, text = "ok", action() or ""
        except Untried as reason:
            verdict, text = "SKIP", str(reason)
        except Exception as error:
            verdict, text = "FAIL", f"{type(error).__name__}: {error}" if not isinstance(error, Failed) else str(error)
        took = time.monotonic() - began
        self.rows.append((verdict, what, text, took))
        print(f"\033[K  {verdict:4} {what}: {text}  ({took:.1f} s)" if tty else f"  {verdict:4} {what}: {text}  ({took:.1f} s)", flush=True)
        return verdict == "ok"

    def end(self):
        total = time.monotonic() - self.start
        width = max(len(row[1]) for row in self.rows)
        print(f"\n{'':4} {'step':{width}} {'seconds':>7}  what was seen")
        for verdict, what, text, took in self.rows:
            print(f"{verdict:4} {what:{width}} {took:7.1f}  {text.splitlines()[0] if text else ''}")
        print(f"{'':4} {'all':{width}} {total:7.1f}")
        verdicts = {row[0] for row in self.rows}
        return 1 if "FAIL" in verdicts else 3 if "SKIP" in verdicts else 0


def tombolo(*words, seconds=30):
    done = subprocess.run([TOMBOLO, *words], capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise Failed(f"`tombolo {' '.join(words)}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def status():
    return json.loads(tombolo("status", "--json", "--fabric", FABRIC))


def write_file():
    cmdline = linux_cmdline("linux", "http,iperf")
    folder = BUILD / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(STATE, ignore_errors=True)
    path = folder / "tombolo.toml"
    path.write_text(FILE.format(fabric=FABRIC, cmdline=cmdline, host=LISTEN[0], port=LISTEN[1]) + (HOST_TAP if AS_ROOT else ""))
    return path


def leases():
    return {lease["name"]: lease["ip"] for lease in status()["networks"][0]["leases"] if lease.get("expires_s")}


def all_addresses():
    wanted = {"web", "meter", "linux"}
    found = until("an address for each guest", lambda: wanted <= set(leases()) and leases(), seconds=PATIENCE_S, every=0.2)
    return ", ".join(f"{name} {found[name]}" for name in sorted(wanted))


def need_host_tap():
    if not AS_ROOT:
        raise Untried("the host's own tap needs root")


def host_resolves(name):
    """Asks the fabric's DNS server from the host."""
    gateway = status()["networks"][0]["gateway"]
    done = subprocess.run(["busybox", "nslookup", f"{name}.{FABRIC}.internal", gateway], capture_output=True, text=True, timeout=10)
    found = re.findall(r"^Address(?: \d+)?: ([\d.]+)$", done.stdout, re.M)
    if not found:
        raise Failed(f"{name} has no address: {done.stdout.strip()} {done.stderr.strip()}")
    return found[-1]


def host_pings():
    need_host_tap()
    seen = []
    for name in ("web", "meter", "linux"):
        address = host_resolves(name)
        done = subprocess.run(["ping", "-q", "-n", "-c", "3", "-i", "0.2", "-W", "2", address], capture_output=True, text=True, timeout=20)
        match = re.search(r"= [\d.]+/([\d.]+)/", done.stdout)
        if done.returncode or not match:
            raise Failed(f"{name} ({address}): {done.stdout.strip().splitlines()[-2:]}")
        seen.append(f"{name} {float(match[1]):.2f} ms")
    return ", ".join(seen)


def linux_pings(linux):
    names = ["web", "meter"] + (["host"] if AS_ROOT else [])
    seen = []
    for name in names:
        text = linux.run(f"ping -q -c 3 -i 0.2 -W 2 {name}.{FABRIC}.internal", 20, check=False).text
        match = re.search(r"= [\d.]+/([\d.]+)/", text)
        if not match or " 0% packet loss" not in text:
            raise Failed(f"{name}: {text}")
        seen.append(f"{name} {float(match[1]):.2f} ms")
    return ", ".join(seen)


def cell_pings():
    """A cell started by hand on the running fabric: it asks the fabric's DNS, pings, prints, and ends."""
    seen = []
    for name in ["linux"] + (["host"] if AS_ROOT else []):
        tombolo("cell", "run", "ping", "--name", f"pinger-{name}", "--args", f"host={name} count=3", "--fabric", FABRIC)
        text = cell_output(f"pinger-{name}", r"(\d+) sent, (\d+) received.*")
        sent, received = (int(n) for n in re.match(r"(\d+) sent, (\d+) received", text).groups())
        if received != sent:
            raise Failed(f"{name}: {text}")
        seen.append(f"{name}: {text}")
    return "; ".join(seen)


def cell_output(name, pattern, seconds=30):
    """The first text on a cell's console that matches."""
    def look():
        match = re.search(pattern, tombolo("cell", "console", name, "--log", "--fabric", FABRIC))
        return match and match[0].strip()
    return until(f"{pattern!r} on the console of {name}", look, seconds, every=0.2)


def forward():
    reply = http_get(LISTEN[0], "/", port=LISTEN[1], seconds=10)
    if reply.status != 200 or b"tombolo cell" not in reply.body:
        raise Failed(f"status {reply.status}, body {reply.body[:80]!r}")
    return f"{len(reply.body)} bytes from the cell, first after {reply.first_s * 1000:.1f} ms"


def transfer(linux):
    block = bytes(i % 251 for i in range(251 * 4096))
    want = hashlib.sha256((block * (BYTES // len(block) + 1))[:BYTES]).hexdigest()
    began = time.monotonic()
    text = linux.run(f"wget -q -O - http://web.{FABRIC}.internal/bytes/{BYTES} | sha256sum", PATIENCE_S).text
    took = time.monotonic() - began
    if want not in text:
        raise Failed(f"checksum {text.split()[:1]} instead of {want}")
    return f"{BYTES // 1_000_000} MB with the right SHA-256 at {BYTES / took / 1e6:.0f} MB/s (checksum on the way)"


def rate(text):
    found = re.findall(r"([\d.]+) ([KMG])bits/sec", text)
    if not found:
        raise Failed(f"no rate in iperf's report: {text}")
    value, unit = found[-1]
    return float(value) * {"K": 1e-3, "M": 1, "G": 1e3}[unit]


def iperf_to_cell(linux):
    text = linux.run(f"iperf -c meter.{FABRIC}.internal -t {IPERF_SECONDS}", IPERF_SECONDS + PATIENCE_S).text
    return f"TCP {rate(text):.0f} Mbit/s by stock iperf in the Linux guest"


def iperf_from_cell():
    tombolo("cell", "run", "iperf", "--name", "sender", "--args", f"iperf=client host=linux time={IPERF_SECONDS}", "--fabric", FABRIC)
    text = cell_output("sender", r"iperf: TCP to .*, ([\d.]+) Mbit/s", IPERF_SECONDS + PATIENCE_S)
    return f"TCP {text.rsplit(' ', 2)[1]} Mbit/s by the cell, to stock iperf"


def way_out(linux):
    """A service of this host's own, reached by the guest through passt: the way out without leaving the machine."""
    text = linux.run("ip route", 5).text
    router = re.search(r"default via ([\d.]+)", text)
    if not router:
        raise Failed(f"the guest has no default route: {text}")
    return f"default route by {router[1]}" + outside(linux)


def outside(linux):
    """Fetches from a listener on one of this host's own addresses, which lies outside the guests' network."""
    import http.server
    import threading

    address = own_address()
    if not address:
        raise Untried("this host has no address besides loopback and the demo's tap, so nothing lies outside")

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"outside\n")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer((address, 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            text = linux.run(f"wget -q -O - http://{address}:{server.server_port}/", 15, check=False).text
        finally:
            server.shutdown()
    if text.strip() != "outside":
        raise Failed(f"http://{address}: {text!r}")
    return f"; fetched a page from {address}, outside the network"


def own_address():
    text = subprocess.run(["ip", "-4", "-o", "addr", "show", "scope", "global"], capture_output=True, text=True).stdout
    found = [m for m in re.findall(r"^\d+: (\S+)\s+inet ([\d.]+)", text, re.M) if m[0] != "tombolo-demo"]
    return found[0][1] if found else None


def counters():
    state = status()
    frames = sum(port["counters"]["rx_frames"] for port in state["ports"])
    drops = sum(sum(port["counters"]["rx_drops"].values()) + sum(port["counters"]["tx_drops"].values()) for port in state["ports"])
    if state["warnings"]:
        raise Failed("; ".join(state["warnings"]))
    return f"{len(state['ports'])} ports, {frames} frames switched, {drops} dropped with a reason, no warnings"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="leave it running")
    keep = parser.parse_args().keep
    if subprocess.run([TOMBOLO, "status", "--fabric", FABRIC], capture_output=True, timeout=30).returncode == 0:
        sys.exit(f"demo: the fabric {FABRIC!r} runs already, as `make demo KEEP=1` leaves it. `{PROGRAM} down --fabric {FABRIC}` ends it. Nothing was changed.")
    path = write_file()
    print(f"The fabric file is {path.relative_to(ROOT)}:\n\n{path.read_text()}")
    table = Table()
    standing = table.step("tombolo up", lambda: tombolo("up", "-d", str(path), seconds=60).strip().splitlines()[-1])
    try:
        if standing and table.step("DHCP", all_addresses):
            with Console("linux", FABRIC) as linux:
                table.step("forward: host -> web:80", forward)
                table.step("ping by name: host -> guests", host_pings)
                table.step("ping by name: linux -> all", lambda: linux_pings(linux))
                table.step("ping by name: cell -> all", cell_pings)
                table.step("100 MB: web -> linux", lambda: transfer(linux))
                table.step("iperf: linux -> cell", lambda: iperf_to_cell(linux))
                table.step("iperf: cell -> linux", iperf_from_cell)
                table.step("the way out", lambda: way_out(linux))
            table.step("counters", counters)
    finally:
        if standing and not keep:
            table.step("tombolo down", lambda: tombolo("down", "--fabric", FABRIC).strip())
    code = table.end()
    if keep and standing:
        print(f"""
Still running. Look around:
  {PROGRAM} status --fabric {FABRIC}                        what there is, who has which address, what was dropped and why
  {PROGRAM} top --fabric {FABRIC}                           rates, once a second
  curl http://{LISTEN[0]}:{LISTEN[1]}/           the cell's page through the forward
  {PROGRAM} cell console linux --fabric {FABRIC}            the Linux guest's console (leave with Ctrl-])
  {PROGRAM} capture web -w web.pcapng --fabric {FABRIC}     frames of one port, for Wireshark
  {PROGRAM} down --fabric {FABRIC}                         ends it""")
    return code


if __name__ == "__main__":
    sys.exit(main())
