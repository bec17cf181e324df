"""A hostile vhost-user frontend and driver: lies in messages, in memory tables and in rings."""

import contextlib
import fcntl
import os
import socket
import struct
import threading
import time

from ..vhost import (AVAIL, BUFFER_BYTES, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, F_EVENT_IDX, F_INDIRECT, F_PROTOCOL, F_VERSION_1, GET_FEATURES,
                     GET_VRING_BASE, GUEST_BASE, HEADER_BYTES, MEMORY_BYTES, RING_BYTES, RX, SET_FEATURES, SET_MEM_TABLE, SET_OWNER, SET_VRING_CALL,
                     SET_VRING_ENABLE, SET_VRING_KICK, SET_VRING_NUM, TX, USED, USER_BASE, VhostPeer)
from . import attack, repeated


def peer(target, mac=None):
    return VhostPeer(target.sockets["vhost"], mac or target.mac)


def each(target, steps, setup=True):
    """Runs each lie on a connection of its own, several times over."""
    def once(step):
        with peer(target) as frontend:
            frontend.socket.settimeout(2)
            if setup:
                frontend.setup()
            step(frontend)
            with contextlib.suppress(OSError):
                frontend.sync()

    while target.goes_on():
        for step in steps:
            with contextlib.suppress(OSError):
                once(step)


# --- messages ---


@attack("vhost")
def random_bytes(target):
    def step():
        with peer(target) as frontend:
            frontend.socket.settimeout(0.2)
            frontend.socket.sendall(target.dice.randbytes(4096))
            frontend.is_refused(0.2)
    repeated(target, step)


@attack("vhost")
def half_a_header(target):
    with peer(target) as frontend:
        frontend.socket.sendall(b"\1\0\0")
        time.sleep(1)  # the attack: it says no more


@attack("vhost")
def sizes_that_lie(target):
    each(target, [lambda p, size=size: p.say(SET_MEM_TABLE, bytes(64), size=size) for size in (0, 1, 1 << 12, 1 << 20, 0x7FFFFFFF, 0xFFFFFFFF)], setup=False)


@attack("vhost")
def unknown_requests(target):
    each(target, [lambda p: [p.say(request, target.dice.randbytes(target.dice.randrange(64))) for request in range(0, 256, 3)]], setup=False)


@attack("vhost")
def descriptor_flood(target):
    def flood(frontend):
        for request in (SET_OWNER, SET_MEM_TABLE, GET_FEATURES, SET_VRING_NUM, SET_VRING_ENABLE):
            frontend.say(request, bytes(8), [frontend.fd] * 200)
    each(target, [flood], setup=False)


@attack("vhost")
def reconnects(target):
    def step():
        with peer(target) as frontend:
            frontend.setup()
    repeated(target, step)


@attack("vhost")
def changes_while_running(target):
    def storm(frontend):
        for _ in range(20):
            frontend.say(SET_FEATURES, struct.pack("<Q", target.dice.getrandbits(64)))
            frontend.memory_table()
            frontend.addresses(TX, desc=USER_BASE + target.dice.randrange(1 << 22))
            for index in (RX, TX, 7, 0xFFFFFFFF):
                frontend.state(SET_VRING_ENABLE, index, target.dice.randrange(3))
    each(target, [storm])


@attack("vhost")
def stops_and_starts(target):
    def storm(frontend):
        for _ in range(50):
            frontend.state(GET_VRING_BASE, TX, 0)
            frontend.reply()
            frontend.start_ring(TX, base=target.dice.randrange(65536))
    each(target, [storm])


# --- memory tables ---


@attack("vhost")
def memory_tables(target):
    region = VhostPeer.region
    tables = [
        (region(), region()),                                     # the same twice
        (region(), region(guest=GUEST_BASE + 4096)),              # overlapping
        (region(guest=(1 << 64) - 4096),),                        # wraps around
        (region(user=(1 << 64) - 4096),),
        (region(size=0),),
        (region(size=1 << 63),),
        (region(size=MEMORY_BYTES * 1000),),                      # beyond the file
        (region(offset=MEMORY_BYTES),),
        (region(offset=(1 << 64) - 4096),),
        (region(size=100),),
        tuple(region(guest=GUEST_BASE + (number << 32), user=USER_BASE + (number << 32)) for number in range(40)),
    ]
    steps = [lambda p, table=table: (p.features(), p.memory_table(*table)) for table in tables]
    steps += [lambda p: (p.features(), p.memory_table(fds=[])), lambda p: (p.features(), p.memory_table(count=8)),
              lambda p: (p.features(), p.memory_table(fds=[p.fd] * 8))]
    each(target, steps, setup=False)


@attack("vhost")
def memory_that_is_none(target):
    reader, writer = os.pipe()
    a, b = socket.socketpair()
    folder = os.open("/", os.O_RDONLY)
    null = os.open("/dev/zero", os.O_RDWR)
    fds = [reader, writer, a.fileno(), b.fileno(), folder, null, os.eventfd(0)]
    each(target, [lambda p, fd=fd: (p.features(), p.memory_table(fds=[fd])) for fd in fds], setup=False)


@attack("vhost")
def memory_that_shrinks(target):
    """The daemon's access to memory that is gone is a SIGBUS."""
    def shrink(frontend):
        for _ in range(10):
            frontend.offer(TX, frontend.chain(bytes(200)))
        os.ftruncate(frontend.fd, 0)
        frontend.memory = bytearray(MEMORY_BYTES)
        for _ in range(10):
            os.eventfd_write(frontend.kick[TX], 1)
            frontend.sync()
    each(target, [shrink])


# --- rings ---


@attack("vhost")
def ring_sizes_and_places(target):
    def start(**what):
        def step(frontend):
            frontend.features()
            frontend.memory_table()
            frontend.start_ring(TX, **what)
            frontend.state(SET_VRING_ENABLE, TX, 1)
        return step

    sizes = [start(size=size) for size in (0, 3, 65, 32769, 65536, 0xFFFFFFFF)]
    end = USER_BASE + MEMORY_BYTES
    places = [start(desc=value) for value in (0, 1, USER_BASE + 1, end - 16, end, (1 << 64) - 16)]
    places += [start(avail=value) for value in (0, USER_BASE + 1, end - 2, (1 << 64) - 2)]
    places += [start(used=value) for value in (0, USER_BASE + 2, end - 4, (1 << 64) - 4)]
    places.append(start(desc=USER_BASE, avail=USER_BASE, used=USER_BASE))
    each(target, sizes + places, setup=False)


@attack("vhost")
def index_jumps(target):
    def jump(frontend, by):
        frontend.set_avail(TX, frontend.avail[TX] + by)
        os.eventfd_write(frontend.kick[TX], 1)
    each(target, [lambda p, by=by: jump(p, by) for by in (65, 1000, 32768, 65535, -5)])


def chain_of(*descriptors, head=0, table=None):
    """A lie made of descriptors (address, length, flags, next), offered once."""
    def step(frontend):
        for slot, words in enumerate(descriptors):
            frontend.descriptor(TX, slot, *words, table=table)
        frontend.offer(TX, head)
        frontend.sync()
    return step


@attack("vhost")
def chains_that_lie(target):
    at = GUEST_BASE + 0x200000
    steps = [
        chain_of((at, 100, DESC_NEXT, 1), (at, 100, DESC_NEXT, 0)),                       # a loop
        chain_of((at, 100, DESC_NEXT, 0)),                                                # of one
        chain_of((at, 100, DESC_NEXT, 0xFFFF)),
        chain_of((at, 100), head=0xFFFF),
        chain_of((at, 0xFFFFFFFF)),
        chain_of((at, 0)),
        chain_of((at, 5)),
        chain_of((0, 100)),
        chain_of(((1 << 64) - 50, 100)),
        chain_of((GUEST_BASE + MEMORY_BYTES - 50, 100)),                                  # over the end
        chain_of((at, 100, DESC_WRITE)),
        chain_of((at, 100, DESC_NEXT, 1), (at, 100, DESC_WRITE)),
        chain_of(*[(at, 0, DESC_NEXT, slot + 1) for slot in range(63)], (at, 60)),
        chain_of(*[(at, 65536, DESC_NEXT, slot + 1) for slot in range(63)], (at, 60)),
    ]
    each(target, steps)


@attack("vhost")
def indirect_tables_that_lie(target):
    at, table = GUEST_BASE + 0x300000, 0x300000

    def indirect(length, *inner):
        def step(frontend):
            for slot, words in enumerate(inner):
                frontend.descriptor(TX, slot, *words, table=table)
            frontend.descriptor(TX, 0, at, length, DESC_INDIRECT)
            frontend.offer(TX, 0)
            frontend.sync()
        return step

    steps = [indirect(length) for length in (0, 15, 17, 0xFFFFFFF0, 16 * 65536)]
    steps += [indirect(16, (at, 16, DESC_INDIRECT)), indirect(32, (at, 64, DESC_NEXT, 0)), indirect(16, (at, 64, DESC_NEXT, 9)),
              indirect(16 * 200, *[(at, 1, DESC_NEXT, slot + 1) for slot in range(199)], (at, 1))]

    def once(step):
        with peer(target) as frontend:
            frontend.socket.settimeout(2)
            frontend.setup(F_VERSION_1 | F_PROTOCOL | F_INDIRECT | F_EVENT_IDX)
            step(frontend)

    while target.goes_on():
        for step in steps:
            with contextlib.suppress(OSError):
                once(step)


@attack("vhost")
def offload_headers_that_lie(target):
    """virtio_net_hdr: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset, num_buffers (VirtIO 1.3 §5.1.6)."""
    with peer(target) as frontend:
        frontend.setup(F_VERSION_1 | F_PROTOCOL | 1 | 1 << 11 | 1 << 12)
        frame = frontend.frame(target.neighbour_mac, 0x0800, bytes(1400))

        def step():
            header = struct.pack("<BBHHHHH", target.dice.randrange(4), target.dice.choice((0, 1, 3, 4, 5, 0x81, 0xFF)), *(
                target.dice.choice((0, 1, 14, 34, 54, 1500, 0xFFFF)) for _ in range(5)))
            frontend.send(frame[:target.dice.randrange(1, len(frame))], header)
        repeated(target, step)


@attack("vhost")
def segments_without_end(target):
    """The most work that one frame can ask for: 64 KiB to be cut into segments of one byte."""
    with peer(target) as frontend:
        frontend.setup(F_VERSION_1 | F_PROTOCOL | 1 | 1 << 11)
        ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 0, 1, 0, 64, 6, 0, socket.inet_aton(target.ip), socket.inet_aton(target.neighbour_ip))
        tcp = struct.pack("!HHIIBBHHH", 1, 80, 1, 1, 0x50, 16, 100, 0, 0)
        frame = frontend.frame(target.neighbour_mac, 0x0800, ip + tcp + bytes(1900))
        header = struct.pack("<BBHHHHH", 1, 1, 54, 1, 34, 16, 0)
        repeated(target, lambda: frontend.send(frame[:BUFFER_BYTES - HEADER_BYTES], header))


@attack("vhost")
def changes_under_the_readers_eyes(target):
    """A second thread rewrites descriptors and the index while the backend reads them (double fetch)."""
    with peer(target) as frontend:
        frontend.setup()
        ended = threading.Event()

        def rewrite():
            while not ended.is_set():
                for slot in range(frontend.size):
                    frontend.descriptor(TX, slot, target.dice.choice((GUEST_BASE + 0x200000, 0, (1 << 64) - 1)), target.dice.choice((60, 0, 0xFFFFFFFF)))

        writer = threading.Thread(target=rewrite)
        writer.start()
        try:
            def step():
                frontend.offer(TX, target.dice.randrange(frontend.size))
                if target.dice.random() < 0.01:
                    frontend.sync()
            repeated(target, step)
        finally:
            ended.set()
            writer.join()


@attack("vhost")
def receive_buffers_that_lie(target):
    def lie(address, length, flags=DESC_WRITE):
        def step(frontend):
            for slot in range(frontend.size):
                frontend.descriptor(RX, slot, address, length, flags)
            # Whatever comes in next is written by these.
            frontend.send(frontend.arp_request(target.gateway, target.ip))
            frontend.sync()
        return step
    each(target, [lie(GUEST_BASE + 0x200000, 1), lie(0, 2048), lie((1 << 64) - 8, 2048), lie(GUEST_BASE + 0x200000, 2048, 0),
                  lie(GUEST_BASE + RX * RING_BYTES + USED, 2048), lie(GUEST_BASE + AVAIL, 2048)])


# --- descriptors that both sides hold ---


@attack("vhost")
def kick_storm(target):
    with peer(target) as frontend:
        frontend.setup()
        repeated(target, lambda: [os.eventfd_write(frontend.kick[index], 1) for index in (RX, TX) for _ in range(1000)])


def blocking(fd):
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)


@attack("vhost")
def call_descriptor_that_blocks(target):
    """The call eventfd is full and blocking: a plain write to it never returns."""
    with peer(target) as frontend:
        frontend.setup()
        for fd in frontend.call:
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(fd)
            os.eventfd_write(fd, (1 << 64) - 2)
            blocking(fd)
        repeated(target, lambda: frontend.send(frontend.arp_request(target.gateway, target.ip)))


@attack("vhost")
def kick_descriptor_that_blocks(target):
    """The kick eventfd is drained and blocking: a plain read after poll never returns."""
    with peer(target) as frontend:
        frontend.setup()
        blocking(frontend.kick[TX])

        def step():
            os.eventfd_write(frontend.kick[TX], 1)
            os.eventfd_read(frontend.kick[TX])
        repeated(target, step)


@attack("vhost")
def doorbells_that_are_none(target):
    reader, writer = os.pipe()
    a, b = socket.socketpair()
    with contextlib.suppress(BlockingIOError):
        os.set_blocking(writer, False)
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    null = os.open("/dev/null", os.O_RDWR)
    fds = [reader, writer, a.fileno(), b.fileno(), null, os.memfd_create("x")]

    def lie(request, fd):
        def step(frontend):
            frontend.features()
            frontend.memory_table()
            frontend.state(SET_VRING_NUM, TX, 64)
            frontend.addresses(TX)
            frontend.say(request, struct.pack("<Q", TX), [fd])
            frontend.sync()
        return step
    each(target, [lie(request, fd) for fd in fds for request in (SET_VRING_KICK, SET_VRING_CALL)], setup=False)

