"""Cells on shared memory: the devices of stock QEMU, and a peer that was written from the specifications alone (lib/ivshmem.py)."""

import contextlib
import os
import random
import struct
import time

from lib import CellGuest, Process, scratch, timeout, until
from lib.ivshmem import CHANNEL, INIT, NETWORK, PAGE, READY, RESET, RUN, NetPeer, Region, Server, header

CELL, HOST = "10.0.0.2", "10.0.0.1"
MAC = bytes.fromhex("525400a1b2c3")
MACHINES = ("q35", "microvm")
KINDS = ("doorbell", "plain")


def device(kind, region, path, vectors=2, ident="s0"):
    """QEMU's arguments for one device."""
    if kind == "doorbell":
        return ["-chardev", f"socket,path={path},id={ident}", "-device", f"ivshmem-doorbell,chardev={ident},vectors={vectors}"]
    backend = f"memory-backend-file,id={ident},mem-path={region.path()},size={region.size},share=on"
    return ["-object", backend, "-device", f"ivshmem-plain,memdev={ident}"]


def cell(app, machine, extra, append=f"ip={CELL}/24", **others):
    return CellGuest(app, machine=machine, extra=extra, append=append, pcie=True, acpi=True, **others)


@contextlib.contextmanager
def network(machine, kind, app="echo", size=1 << 20, vectors=2, append=f"ip={CELL}/24 verbose", wait=True, **fields):
    """A cell on a link whose other end this process is: yields the peer, the region, the server and the cell."""
    page = header(NETWORK, vectors=vectors if kind == "doorbell" else 0, region_bytes=size, mac=MAC, **fields)
    with scratch() as folder, contextlib.ExitStack() as stack:
        region = Region(page, size)
        stack.callback(region.close)
        server = stack.enter_context(Server(folder / "s", region)) if kind == "doorbell" else None
        peer = NetPeer(region, ring=server.ring if server else None, eventfds=server.peers[0] if server else ())
        guest = stack.enter_context(cell(app, machine, device(kind, region, folder / "s", vectors), append))
        if wait:
            peer.wait_run()
        yield peer, region, server, guest


def talk(peer, count=20):
    mac = peer.arp(CELL)
    assert mac == MAC, mac.hex(":")
    lost = [size for size in [0, 1, 56, 1000, 1472] * (count // 5) if peer.ping(mac, CELL, sequence=size + 1, size=size) is None]
    assert not lost, f"pings of {lost} bytes were lost"


def each(test):
    """The test on each machine with each kind of device, as tests of their own."""
    for machine in MACHINES:
        for kind in KINDS:
            def one(machine=machine, kind=kind):
                test(machine, kind)
            one.timeout_s = getattr(test, "timeout_s", 120)
            one.__doc__ = test.__doc__
            globals()[f"test_{test.__name__}_{machine}_{kind}"] = one
    return None


@each
def arp_and_ping(machine, kind):
    """Frames both ways, bit for bit as the layout says."""
    with network(machine, kind) as (peer, _region, _server, guest):
        talk(peer, 100)
        assert guest.alive()
