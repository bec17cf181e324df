"""Cells on shared memory: the devices of stock QEMU, and a peer that was written from the specifications alone (lib/ivshmem.py)."""

import contextlib
import json
import os
import random
import socket
import struct
import time
from pathlib import Path

from lib import CellGuest, scratch, timeout, until
from lib.ivshmem import CHANNEL, NETWORK, OFFERS_OFFLOADS, OFFLOAD_HEADER, PLAIN, READY, RESET, RUN, TAKES_OFFLOADS, NetPeer, Region, Server, checksum, header
from lib.process import until_idle

CELL, HOST = "10.0.0.2", "10.0.0.1"
MAC = bytes.fromhex("525400a1b2c3")
MACHINES = ("q35", "microvm")
KINDS = ("doorbell", "plain")
# Seconds after which a cell has nothing left to say of itself.
OLD_S = 15
# How long a cell waits for its other end, in a test of both.
PATIENCE = "patience_s=200"


def device(kind, region, path, vectors=2, ident="s0"):
    """QEMU's arguments for one device."""
    if kind == "doorbell":
        return ["-chardev", f"socket,path={path},id={ident}", "-device", f"ivshmem-doorbell,chardev={ident},vectors={vectors}"]
    backend = f"memory-backend-file,id={ident},mem-path={region.path()},size={region.size},share=on"
    return ["-object", backend, "-device", f"ivshmem-plain,memdev={ident}"]


def cell(app, machine, extra, append=f"ip={CELL}/24", **others):
    return CellGuest(app, machine=machine, extra=extra, append=append, pcie=True, acpi=True, **others)


@contextlib.contextmanager
def network(machine, kind, app="echo", size=1 << 20, vectors=2, append=f"ip={CELL}/24 verbose", wait=True, header_vectors=None, **fields):
    """A cell on a link whose other end this process is: yields the peer, the region, the server and the cell."""
    if header_vectors is None:
        header_vectors = vectors if kind == "doorbell" else 0
    page = header(NETWORK, vectors=header_vectors, region_bytes=size, mac=MAC, **fields)
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
    mac = peer.resolve(CELL)
    assert mac == MAC.hex(":"), mac
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


@each
def memory_above_4_gib(machine, kind):
    """A region that fits nowhere below: its base address comes from the firmware (q35) or from the cell (microvm)."""
    with network(machine, kind, size=4 << 30, output_bytes=0x7f000) as (peer, _region, _server, _guest):
        talk(peer)


def syn(peer, mac, port, sum_of):
    """A TCP SYN from `port` to the cell's port 7; `sum_of(pseudo header, segment)` is its checksum's field."""
    addresses = socket.inet_aton(HOST) + socket.inet_aton(CELL)
    segment = bytearray(struct.pack("!HHIIBBHHH", port, 7, 1000, 0, 0x50, 2, 8192, 0, 0))
    struct.pack_into("!H", segment, 16, sum_of(addresses + struct.pack("!BBH", 0, 6, len(segment)), bytes(segment)))
    ip = bytearray(struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(segment), port, 0, 64, 6, 0) + addresses)
    struct.pack_into("!H", ip, 10, checksum(bytes(ip)))
    return peer.frame(mac, 0x0800, bytes(ip + segment))


@each
def offloads_are_carried(machine, kind):
    """A cell that is offered offloads says that it takes them; then frames stand behind virtio-net headers, and sums may be left to do."""
    left_undone = OFFLOAD_HEADER.pack(1, 0, 0, 0, 34, 16)
    with network(machine, kind, offers=OFFERS_OFFLOADS) as (peer, region, _server, guest):
        assert region.state(1).value == RUN | TAKES_OFFLOADS
        talk(peer, 100)
        mac = peer.resolve(CELL)

        def answered(port, sum_of, offload, seconds=20):
            peer.send(syn(peer, mac, port, sum_of), offload=offload)
            return peer.listen(lambda frame: frame[12:14] == b"\x08\x00" and frame[23] == 6 and frame[34:38] == struct.pack("!HH", 7, port), seconds)

        # A sum that is left to do, as in a header's golden bytes; a whole one; a wrong one, which
        # nobody vouches for.
        answer = answered(40001, lambda pseudo, _: ~checksum(pseudo) & 0xffff, left_undone)
        assert answer and answer[47] & 0x12 == 0x12, "no SYN-ACK"
        assert peer.last_header == left_undone, peer.last_header.hex()
        length = struct.unpack_from("!H", answer, 16)[0] - 20
        pseudo = answer[26:34] + struct.pack("!BBH", 0, 6, length)
        assert struct.unpack_from("!H", answer, 50)[0] == ~checksum(pseudo) & 0xffff, "the field holds the sum of the pseudo header"
        assert answered(40002, lambda pseudo, segment: checksum(pseudo + segment), PLAIN)
        assert not answered(40003, lambda _pseudo, _segment: 0x1234, PLAIN, seconds=0.5)
        # A life later, and headers of every kind of nonsense, they are still agreed on.
        peer.set_state(RESET)
        peer.wait_run()
        for _ in range(50):
            peer.send(os.urandom(random.randrange(0, 100)), offload=os.urandom(OFFLOAD_HEADER.size)[:random.randrange(11)])
        talk(peer)
        assert guest.alive()


def test_a_cell_that_wants_no_offloads_gets_none():
    with network("q35", "doorbell", offers=OFFERS_OFFLOADS, append=f"ip={CELL}/24 offloads=none") as (peer, region, _server, _guest):
        assert region.state(1).value == RUN
        talk(peer)


def test_firmware_that_gives_no_addresses():
    page = header(NETWORK, mac=MAC)
    with scratch() as folder:
        region = Region(page)
        with Server(folder / "s", region) as server:
            peer = NetPeer(region, ring=server.ring, eventfds=server.peers[0])
            extra = ["-bios", "qboot.rom", *device("doorbell", region, folder / "s")]
            with cell("echo", "q35", extra):
                peer.wait_run()
                talk(peer)


def test_one_vector_for_both_events():
    with network("q35", "doorbell", vectors=1) as (peer, _region, _server, _guest):
        talk(peer)


def test_a_device_with_fewer_vectors_than_its_link_is_polled():
    with network("q35", "doorbell", vectors=1, header_vectors=2) as (peer, _region, _server, guest):
        talk(peer)
        assert "no interrupt for them here: polled" in guest.text, guest.tail()


def test_a_header_without_vectors_is_obeyed():
    """The device has a doorbell, the link has none: the cell looks by itself."""
    with network("q35", "doorbell", header_vectors=0) as (peer, _region, server, _guest):
        peer._ring = None
        talk(peer)


@each
def peer_that_resets_in_the_middle(machine, kind):
    """Frames half told, then a new life of the host: the link comes back, the cell's address stays, nothing reboots."""
    with network(machine, kind) as (peer, region, _server, guest):
        talk(peer)
        mac = peer.resolve(CELL)
        for life in range(5):
            # Descriptors and an index that are ahead of any frame; requests that nobody will take
            # the answers to.
            for _ in range(life * 7):
                peer.send(peer.frame(mac, 0x0800, os.urandom(100)))
            region.u32(peer.own + 16 * (peer.sent % peer.ring.num)).value = 0xdeadbeef
            peer.set_state(RESET)
            until("the cell follows", lambda: peer.peer_state != RUN, every=0.001)
            peer.wait_run()
            talk(peer)
        assert sum("net up" in line for _, line in guest.lines) == 1, guest.tail()


def corrupt(peer, region, number, value):
    """Writes junk to one word of the peer's rings, or to the words that only the cell has to write."""
    ring, own, other = peer.ring, peer.own, peer.other
    index = peer.sent % ring.num
    where = [
        lambda: setattr(region.u16(own + ring.avail + 2), "value", value & 0xffff),
        lambda: (setattr(region.u16(own + ring.avail + 4 + 2 * index), "value", value & 0xffff), publish()),
        lambda: (setattr(region.u32(own + 16 * index), "value", value), setattr(region.u32(own + 16 * index + 8), "value", 60), publish()),
        lambda: (setattr(region.u32(own + 16 * index + 4), "value", value), setattr(region.u32(own + 16 * index + 8), "value", 60), publish()),
        lambda: (setattr(region.u32(own + 16 * index), "value", ring.data), setattr(region.u32(own + 16 * index + 8), "value", value), publish()),
        lambda: (setattr(region.u32(own + 16 * index), "value", ring.data), setattr(region.u32(own + 16 * index + 8), "value", 60),
                 setattr(region.u16(own + 16 * index + 12), "value", value & 0xffff or 1), publish()),
        lambda: setattr(region.u16(own + ring.used + 2), "value", value & 0xffff),
        lambda: [setattr(region.u32(own + ring.used + 4 + 4 * word), "value", value) for word in range(2 * ring.num)],
        lambda: setattr(region.u16(own + ring.used_event), "value", value & 0xffff),
        lambda: setattr(region.u16(own + ring.avail_event), "value", value & 0xffff),
        # What the cell wrote and remembers by itself.
        lambda: [setattr(region.u32(other + 4 * word), "value", value) for word in range(ring.data // 4)],
        lambda: setattr(region.state(peer.ident), "value", value),
        lambda: setattr(region.state(peer.peer), "value", value),
    ]

    def publish():
        region.u16(own + ring.avail + 2).value = (peer.sent + 1) & 0xffff

    if number >= len(where):
        return False
    where[number]()
    return True


@timeout(600)
def hostile_words(machine, kind):
    """Whatever a peer writes into whichever word: the cell lives, and the link works again after both began again."""
    with network(machine, kind) as (peer, region, _server, guest):
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")
        junk = random.Random(seed)
        mac = peer.resolve(CELL)
        number = 0
        for number in range(100):
            for value in (0xffffffff, 0, 0x7fff8000, junk.randrange(1 << 32)):
                peer.wait_run()
                if not corrupt(peer, region, number, value):
                    break
                peer.notify(1)
                peer.notify(0)
                time.sleep(0.01)  # the span in which the cell looks; one that does not mind shows nothing of it
                assert guest.alive(), guest.tail()
                # The cell may be down by now, or not have minded; a peer that begins again finds
                # it.
                peer.set_state(RESET)
                until(f"the cell follows after word {number} = {value:#x}", lambda: peer.peer_state < READY, every=0.001)
                peer.wait_run()
                assert peer.ping(mac, CELL) is not None, f"no ping after word {number} = {value:#x}"
            else:
                continue
            break
        assert number == 13, number


each(hostile_words)


def test_junk_in_every_word_of_the_header():
    """The cell says what it does not like and ends by its own code, or goes on where the word does not matter."""
    good = header(NETWORK, vectors=0, mac=MAC)
    junk = random.Random(7)
    refused = []
    for word in range(27):
        for value in (0, 0xffffffff, junk.randrange(1 << 32)):
            page = bytearray(good)
            struct.pack_into("<I", page, 4 * word, value)
            if page == good:
                continue
            region = Region(page)
            with cell("echo", "microvm", device("plain", region, None), f"ip={CELL}/24 net=lan") as guest:
                until("an end or the network", lambda: not guest.alive() or "net up" in guest.text)
                if not guest.alive():
                    code = guest.wait()
                    assert code == 3, f"word {word} = {value:#x}: ended by {code}\n{guest.tail()}"
                    why = [line for _, line in guest.lines if "is not used: " in line or "ivshmem link" in line or "net=lan: no" in line]
                    assert why, f"word {word} = {value:#x}: no reason given\n{guest.tail()}"
                    refused.append(word)
                else:
                    # Words that do not matter: vectors of a plain device, the address, the MTU,
                    # bytes of the name.
                    assert word in (5, 16, 17) or 18 <= word, f"word {word} = {value:#x} was taken\n{guest.tail()}"
            region.close()
    assert set(range(3)) <= set(refused) and {4, 6, 8, 12, 14} <= set(refused), refused


def test_a_storm_of_rings_and_answers_that_nobody_takes():
    with network("q35", "doorbell") as (peer, region, server, guest):
        mac = peer.resolve(CELL)
        for _ in range(50000):
            server.ring(1, 0)
            server.ring(1, 1)
        assert peer.ping(mac, CELL) is not None
        # Requests whose answers stay: the cell's ring fills, and it goes on.
        request = peer.arp_request("10.0.0.2", own="10.0.0.1")
        sent = 0
        deadline = time.monotonic() + 120
        while sent < 6000 and time.monotonic() < deadline:
            sent += peer.send(request)
        assert sent == 6000, f"the cell took only {sent} frames"
        until("the cell's ring is full", lambda: region.u16(peer.other + peer.ring.avail + 2).value - peer.taken & 0xffff >= peer.ring.num)
        until_idle("a cell whose ring is full", guest.cpu_seconds, 0.2)
        peer.listen(lambda frame: False, 0.5)
        assert peer.ping(mac, CELL) is not None


def test_the_server_may_go_while_the_link_stays():
    with network("q35", "doorbell") as (peer, _region, server, _guest):
        talk(peer)
        server.stop()
        talk(peer)


def nanoseconds(process):
    """Processor time of all threads; the clock ticks of cpu_seconds() are too coarse for a quiet cell."""
    total = 0
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            total += int((thread / "schedstat").read_text().split()[0])
    return total


@each
def idle(machine, kind):
    """A quiet cell sleeps: with doorbell altogether, without it looks five times a second."""
    with network(machine, kind) as (peer, _region, _server, guest):
        talk(peer)
        # Left out of the spans that are measured: what the stack says at its start, and the looks
        # until they are seldom.
        time.sleep(5)
        until_idle("a quiet cell", lambda: nanoseconds(guest) / 1e9, 0.002 if kind == "doorbell" else 0.01, span_s=3)


@contextlib.contextmanager
def direct(machines, kind, words, protocol=CHANNEL, **fields):
    """Two cells of the app `control` on one link with no switch between them: yields the plant, the controller, region and server."""
    page = header(protocol, vectors=2 if kind == "doorbell" else 0, name="control", **fields)
    with scratch() as folder, contextlib.ExitStack() as stack:
        region = Region(page)
        stack.callback(region.close)
        server = stack.enter_context(Server(folder / "s", region, host=False)) if kind == "doorbell" else None
        guests = []
        for ident, (role, machine) in enumerate(zip(("plant", "controller"), machines)):
            append = f"role={role} {PATIENCE} {words}" + (f" ivshmem.control.id={ident}" if kind == "plain" else "")
            guests.append(stack.enter_context(cell("control", machine, device(kind, region, folder / "s"), append)))
        yield *guests, region, server


def result(controller, plant=None, seconds=240, codes=(5,)):
    """The controller's line for programs, after both have left with success, or the controller by another of these codes."""
    code = controller.wait(seconds)
    assert code in codes, f"the controller ended by {code}\n{controller.tail()}"
    if plant:
        assert plant.wait(seconds) == 5, plant.tail()
    lines = [line for _, line in controller.lines if line.startswith("{")]
    assert len(lines) == 1, controller.tail()
    return json.loads(lines[0])


@each
def control_loop(machine, kind):
    """A command and a reply in each period, to the set point: most periods have theirs, if they are as long as a machine that does other things
    besides needs them."""
    for period_us in (5000, 5000, 10000, 20000, 80000):
        words = f"count=600 period_us={period_us} max_missed=300"
        with direct((machine, "microvm"), kind, words) as (plant, controller, region, _server):
            # Too many missed are a failure, to the app.
            found = result(controller, plant, codes=(5, 3))
            print(found)
        assert found["wake"] == ("doorbell" if kind == "doorbell" else "polled") and found["periods"] == 600
        if found["missed"] <= 300:
            break
    assert found["missed"] <= 300 <= found["replies"] and found["set_point_reached"]
    rtt = found["rtt_us"]
    assert 0 < rtt["min"] <= rtt["p50"] <= rtt["p99"] <= rtt["p99.9"] <= rtt["max"] and rtt["p50"] < period_us


@each
def round_trips(machine, kind):
    """Records, and bare rings, back and forth as fast as they go."""
    for what in ("records", "doorbell"):
        for wait in ("sleep", "tasks"):
            words = f"what={what} wait={wait} period_us=0 count=500"
            with direct((machine, machine), kind, words) as (plant, controller, _region, _server):
                found = result(controller, plant)
                print(found)
                assert (found["what"], found["wait"], found["replies"], found["missed"]) == (what, wait, 500, 0), found


@each
def controller_that_is_killed_and_replaced(machine, kind):
    """The plant notices, waits, and goes on with the next one; it is not started again."""
    with direct((machine, machine), kind, "count=20000 period_us=2000 max_missed=20000") as (plant, controller, region, server):
        until("the loop runs", lambda: region.state(1).value == RUN and region.u16(region.output(1) + 128).value > 100)
        controller.kill()
        if kind == "plain":
            # Nobody notices there, until the next one begins.
            assert region.state(1).value == RUN
        append = f"role=controller {PATIENCE} count=800 max_missed=800" + (" ivshmem.control.id=1" if kind == "plain" else "")
        with cell("control", machine, device(kind, region, server.path if server else None), append) as second:
            found = result(second, plant)
            assert found["replies"] > 0, found


def test_a_channel_peer_that_is_none():
    """States as they should be, and sections that are not: the app is told, and says so."""
    with scratch() as folder:
        region = Region(header(CHANNEL, name="control"))
        with Server(folder / "s", region) as server:
            peer = NetPeer(region, ring=server.ring, eventfds=server.peers[0])
            with cell("control", "q35", device("doorbell", region, folder / "s"), "role=plant") as guest:
                until("the cell's answer", lambda: peer.step() or not guest.alive())
                assert guest.wait() == 3 and "the peer's section begins with" in guest.text, guest.tail()
        region.close()


def test_a_first_ring_that_gets_lost_is_made_up_for():
    """A peer's QEMU drops its ring for a cell of which the server has not told it yet. This peer rings later, or not at all."""
    for wait in ("sleep", "tasks"):
        with scratch() as folder:
            region = Region(header(CHANNEL, vectors=2, name="control"))
            words = f"role=plant what=doorbell wait={wait} {PATIENCE}"
            with Server(folder / "s", region), cell("control", "q35", device("doorbell", region, folder / "s"), words) as guest:
                # The app's words for this: state 3, and a number in each section.
                region.state(0).value = 3
                until("the plant", lambda: region.state(1).value == 3)
                # Its looks are seldom by then.
                until_idle("the plant", lambda: nanoseconds(guest) / 1e9, 0.02, span_s=0.5)
                region.u32(region.output(0)).value = 1
                until("its answer", lambda: region.u32(region.output(1)).value == 1, 10)
                assert guest.alive()
            region.close()


def test_first_rings_of_a_network_peer_that_get_lost_are_made_up_for():
    """As above, of a peer that has come in place of one whose rings arrived. It rings no more, also not for its states."""
    with network("q35", "doorbell") as (peer, region, _server, guest):
        talk(peer)
        mac = peer.resolve(CELL)
        peer.set_state(RESET)
        until("the cell follows", lambda: region.state(1).value != RUN)
        peer._ring = None
        peer.wait_run()
        for _ in range(2):
            until_idle("a cell of which no look finds anything", guest.cpu_seconds, 0.2)
            assert peer.ping(mac, CELL, seconds=15) is not None
        # It ends: an idle cell looks no more.
        until_idle("a cell that was looked for in vain", guest.cpu_seconds, 0.2)


def test_links_that_are_not_there_are_named():
    with scratch() as folder:
        region = Region(header(CHANNEL, name="left"))
        with Server(folder / "s", region):
            with cell("control", "q35", device("doorbell", region, folder / "s"), "role=plant") as guest:
                assert guest.wait() == 3 and 'no ivshmem link "control" is free; there are ["left"]' in guest.text, guest.tail()
        region.close()


@contextlib.contextmanager
def two_cells_on_a_network(machine, kind, server_app, client_app, client_words, mtu=0, server_words="", **others):
    """A network of two cells with nobody between them: the second one talks to the first."""
    page = header(NETWORK, vectors=2 if kind == "doorbell" else 0, mtu=mtu)
    with scratch() as folder, contextlib.ExitStack() as stack:
        region = Region(page)
        stack.callback(region.close)
        server = stack.enter_context(Server(folder / "s", region, host=False)) if kind == "doorbell" else None
        guests = []
        for ident, (app, words) in enumerate(((server_app, server_words), (client_app, client_words))):
            append = f"ip=10.0.0.{ident + 1}/24 ivshmem.lan.id={ident} {words}"
            extra = device(kind, region, server.path if server else None)
            guests.append(stack.enter_context(cell(app, machine, extra, append, **others)))
        yield guests


@each
def network_of_two_cells(machine, kind):
    """Ping, and TCP and UDP in bulk, over a link that has no switch in it."""
    with two_cells_on_a_network(machine, kind, "echo", "ping", "host=10.0.0.1 count=5") as (_, client):
        assert client.wait() == 5, client.tail()
    with two_cells_on_a_network(machine, kind, "iperf", "iperf", "iperf=client host=10.0.0.1 num=50M exit") as (_, client):
        assert client.wait(240) == 5, client.tail()
        print(client.tail(3))
    with two_cells_on_a_network(machine, kind, "iperf", "iperf", "iperf=client host=10.0.0.1 udp rate=20M time=1 exit") as (_, client):
        assert client.wait() == 5, client.tail()
        print(client.tail(3))


def test_mesh_finds_the_other_cell_and_is_quiet_then():
    words = "peers=10.0.0.1-10.0.0.2"
    with two_cells_on_a_network("microvm", "doorbell", "mesh", "mesh", words, memory_mib=16, server_words=words) as guests:
        for guest in guests:
            guest.wait_line(lambda line: line.startswith("@mesh all 1 of 1 in "))
        # The stack's own timers (router solicitations) have all run by the time that a cell is this
        # old, and none is to keep it awake.
        time.sleep(max(0, OLD_S - (time.monotonic() - guests[0].started)))
        until_idle("two quiet cells", lambda: sum(map(nanoseconds, guests)) / 1e9, 0.03, span_s=3)
