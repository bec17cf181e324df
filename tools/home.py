#!/usr/bin/env python3
"""Containers on a fabric beside containers on the reference bridge plugin: what it takes to add one, and what their link carries.

usage: ./x bench home [PART...]

add     the time of CNI's ADD: 40 of each plugin, in turn. Ours sets a name, a guard and addresses of both families;
        the bridge plugin with host-local an IPv4 address and a default route, which ours does not set without an uplink
life    200 containers up and down, eight at a time, and what is left of them: ports, leases, interfaces
link    TCP between two containers by iperf3, in slices of a second in turn: on the fabric by IPv4 and IPv6, on the
        bridge by IPv4

A part is a function that gives fields of the last line; one that fails is an error, not a zero. Needs root, iperf3 and
the bridge plugin (Debian's containernetworking-plugins, unpacked below build/cni where it is not installed).
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]
import parts  # noqa: E402
from lib import Fabric, Namespace, Process, need_program, need_root, scratch, until  # noqa: E402
from lib.containers import Cni, debian, leftovers, plugin  # noqa: E402
from lib.netns import inside  # noqa: E402
from parts import note  # noqa: E402

ADDS, SLICES, CONTAINERS, AT_ONCE = 40, 9, 200, 8
SLICE_S = 1
FILE = """
name = "{name}"
[network.lan]
subnet = "10.236.0.0/22"
ipv6 = "fd12:3456:789a:d::/64"
"""


class Bridge:
    """Calls the reference plugins as `Cni` calls ours."""

    def __init__(self, outside, folder):
        # `bridge` alone is iproute2's.
        installed = Path("/usr/lib/cni")
        folder_of = installed if (installed / "host-local").exists() else debian("host-local", "containernetworking-plugins").parent
        self.outside, self.program = outside, folder_of / "bridge"
        self.config = {
            "cniVersion": "1.0.0", "name": "bridged", "type": "bridge", "bridge": "cnibr0", "isGateway": True, "ipMasq": False,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.240.0.0/22"}]], "routes": [{"dst": "0.0.0.0/0"}],
                     "dataDir": str(folder / "host-local")},
        }  # fmt: skip

    def __call__(self, command, container, netns, interface="eth0"):
        words = {"CNI_COMMAND": command, "CNI_CONTAINERID": container, "CNI_NETNS": str(netns), "CNI_IFNAME": interface,
                 "CNI_PATH": str(self.program.parent)}
        done = subprocess.run([*inside(self.outside, own_mounts=False), str(self.program)], input=json.dumps(self.config), text=True,
                              capture_output=True, timeout=120, env=dict(os.environ, **words))
        if done.returncode:
            raise AssertionError(f"bridge {command}: {done.stdout} {done.stderr}")
        return json.loads(done.stdout) if done.stdout.strip() else None


@contextlib.contextmanager
def both():
    """A fabric and a bridge in one namespace, with what calls their plugins."""
    with scratch() as folder, Namespace() as outside:
        with Fabric(folder, FILE.format(name=f"home{os.getpid()}"), netns=outside, own_mounts=False) as fabric:
            yield fabric, Cni(fabric), Bridge(outside, folder)


def of(result, n=0):
    """An address of an answer without its prefix length."""
    return result["ips"][n]["address"].split("/")[0]


def add():
    with both() as (_, ours, bridge), Namespace() as space:
        took = {"ours": [], "bridge": []}
        for n in range(ADDS):
            for name, call in (("ours", ours), ("bridge", bridge)) if n % 2 else (("bridge", bridge), ("ours", ours)):
                began = time.monotonic()
                call("ADD", f"c{n}", f"/run/netns/{space}")
                took[name].append((time.monotonic() - began) * 1000)
                call("DEL", f"c{n}", f"/run/netns/{space}")
    for name, all_ms in took.items():
        note(f"{name}: {statistics.median(all_ms):.1f} ms ({min(all_ms):.1f} to {max(all_ms):.1f})")
    return {"cni_add_ms": round(statistics.median(took["ours"]), 1), "cni_bridge_add_ms": round(statistics.median(took["bridge"]), 1)}


def life():
    prefix = f"tmbh{os.getpid()}-"
    with both() as (fabric, ours, _):
        ports = len(fabric.status()["ports"])
        try:
            for n in range(CONTAINERS):
                subprocess.run(["ip", "netns", "add", f"{prefix}{n}"], check=True)
            for command in ("ADD", "DEL"):
                began = time.monotonic()
                for first in range(0, CONTAINERS, AT_ONCE):
                    names = [f"{prefix}{n}" for n in range(first, min(first + AT_ONCE, CONTAINERS))]
                    for running in [ours.start(command, name, f"/run/netns/{name}") for name in names]:
                        ours.finish(running)
                note(f"{command} of {CONTAINERS}: {time.monotonic() - began:.1f} s, {AT_ONCE} at a time")
                if command == "ADD" and len(fabric.status()["ports"]) != ports + CONTAINERS:
                    raise AssertionError(f"{len(fabric.status()['ports']) - ports} ports of {CONTAINERS} containers")
            status = fabric.status()
            links = [subprocess.run(["ip", "-n", f"{prefix}{n}", "-br", "link"], capture_output=True, text=True).stdout for n in range(CONTAINERS)]
            left = {"ports": len(status["ports"]) - ports, "leases": len(status["networks"][0]["leases"]), "links": sum("eth0" in text for text in links)}
            note(f"left: {left}")
        finally:
            for name in leftovers(prefix):
                subprocess.run(["ip", "netns", "del", name], check=False)
    return {"containers": CONTAINERS, "left": sum(left.values())}


def link():
    need_program("iperf3")
    with both() as (_, ours, bridge), contextlib.ExitStack() as stack:
        spaces = {name: [stack.enter_context(Namespace()) for _ in range(2)] for name in ("ours", "bridge")}
        calls = {"ours": ours, "bridge": bridge}
        results = {name: [calls[name]("ADD", f"{name}{n}", f"/run/netns/{space}") for n, space in enumerate(spaces[name])] for name in calls}
        for name in calls:
            stack.enter_context(Process(["iperf3", "-s"], netns=spaces[name][1], own_mounts=False))
        ways = {"ours": ("ours", of(results["ours"][1])), "ours6": ("ours", of(results["ours"][1], 1)), "bridge": ("bridge", of(results["bridge"][1]))}
        found = {way: [] for way in ways}

        def slice_of(way):
            name, address = ways[way]
            done = spaces[name][0].run("iperf3", "-c", address, "-t", SLICE_S, "-J", check=False)
            try:
                return json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"] / 1e9
            except (ValueError, KeyError):
                return None

        for way in ways:
            until(f"a connection: {way}", lambda way=way: slice_of(way), 60)
        order = list(ways)
        for _ in range(SLICES):
            # Each round begins with another one.
            order.append(order.pop(0))
            for way in order:
                if (rate := slice_of(way)) is None:
                    raise AssertionError(f"{way}: iperf3 failed")
                found[way].append(rate)
        for way, rates in found.items():
            note(f"{way}: {statistics.median(rates):.2f} Gbit/s ({min(rates):.2f} to {max(rates):.2f})")

    def ratio(a, b):
        return round(statistics.median(x / y for x, y in zip(found[a], found[b], strict=True)), 3)

    return {"ratios": {"pod_tcp_vs_bridge": ratio("ours", "bridge"), "ipv6_vs_ipv4": ratio("ours6", "ours")}}


# In the order of the fields of the last line.
PARTS = (add, life, link)


if __name__ == "__main__":
    need_root()
    plugin()
    parts.run("home", PARTS)
