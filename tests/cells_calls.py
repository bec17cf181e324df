"""Calls with deadlines between a cell and a peer that was written from docs/rpc.md alone (lib/calls.py), honest and not."""

import contextlib
import random
import struct

from cells_ivshmem import KINDS, MACHINES, cell, device
from lib import scratch, until
from lib.calls import BEST_EFFORT, CANCEL, LATE, SERVED, CALLS, CallsPeer
from lib.ivshmem import RESET, Region, Server, header


@contextlib.contextmanager
def calculator(machine="q35", kind="doorbell", append="", size=1 << 20):
    """The cell calc on a link whose other end this process is."""
    page = header(CALLS, vectors=2 if kind == "doorbell" else 0, region_bytes=size, name="calls")
    with scratch() as folder, contextlib.ExitStack() as stack:
        region = Region(page, size)
        stack.callback(region.close)
        server = stack.enter_context(Server(folder / "s", region)) if kind == "doorbell" else None
        peer = CallsPeer(region, ring=server.ring if server else None, eventfds=server.peers[0] if server else ())
        guest = stack.enter_context(cell("calc", machine, device(kind, region, folder / "s"), append + " ivshmem.calls.id=1"))
        peer.wait_run()
        yield peer, guest


def honest(peer):
    assert peer.call(b"6 * 7") == (SERVED, 0, b"42")


def test_a_peer_of_another_hand_is_served_on_each_machine_and_device():
    for machine, kind in zip(MACHINES, KINDS):
        with calculator(machine, kind) as (peer, _guest):
            for n in range(200):
                assert peer.call(f"{n} + 1".encode(), left_ns=10**10) == (SERVED, 0, str(n + 1).encode())
            assert peer.call(b"six") == (SERVED, 1, b'expected "A + B", with + - * or /')
            # Sixty-four at a time, in the order of their deadlines: the last one asked is due
            # first.
            with_deadline = [peer.ask(b"1 + 1", left_ns=(100 - n) * 10**9) for n in range(64)]
            order = [peer.answer()[0] for _ in with_deadline]
            assert sorted(order) == sorted(with_deadline)
            # Padded to what an entry does not hold: it goes through the arena, and comes back.
            text = b"1 + 1" + b" " * 5000
            peer.region.memory[peer.own + 20480:peer.own + 20480 + len(text)] = text
            assert peer.call(where=1, length=len(text), payload=b"") == (SERVED, 0, b"2")


def test_what_is_late_is_told_so_and_the_most_urgent_is_first():
    # It is still busy when the others come, however long that takes.
    with calculator(append="service_us=1000000") as (peer, _guest):
        first = peer.ask(b"1 + 1")
        until("the first request to be taken", lambda: peer.taken() == 1)
        # While that is served: one whose deadline passes meanwhile, two that wait.
        tokens = {peer.ask(b"2 + 2", left_ns=10**7): LATE}
        relaxed, urgent = peer.ask(b"3 + 3", left_ns=10**12), peer.ask(b"4 + 4", left_ns=10**11)
        tokens |= {first: SERVED, relaxed: SERVED, urgent: SERVED}
        answers = [peer.answer() for _ in tokens]
        assert {token: status for token, status, *_ in answers} == tokens, answers
        order = [token for token, status, *_ in answers if status == SERVED]
        assert order == [first, urgent, relaxed], order


def test_a_peer_that_lies_loses_its_link_and_is_served_when_it_restarts():
    answer = struct.pack("<QQQQQIIBBHI", 1 << 32, 0, 0, 0, 0, 0, 0, SERVED, 0, 0, 0).ljust(256, b"\0")

    def unasked(peer):
        at = peer.own + peer.half + 768
        peer.region.memory[at:at + 256] = answer
        peer.publish(peer.own + peer.half, 1)

    lies = {
        "more requests than the ring holds": lambda peer: peer.publish(peer.own, 1000),
        "a request of no kind": lambda peer: peer.ask(b"x", kind=9),
        "a slot that does not exist": lambda peer: peer.ask(b"x", token=1 << 32 | 64),
        "an absolute deadline": lambda peer: peer.ask(b"x", flags=0, left_ns=5),
        "a payload beyond its arena": lambda peer: peer.ask(b"", where=1, offset=peer.arena_bytes - 4, length=8),
        "an offset that wraps": lambda peer: peer.ask(b"", where=1, offset=2**64 - 4, length=8),
        "memory that was never handed over": lambda peer: peer.ask(b"", where=2, length=8),
        "an inline payload longer than an entry": lambda peer: peer.ask(b"", length=193),
        "an answer to nothing that was asked": unasked,
        "a state that is none": lambda peer: peer.set_state(77),
    }
    with calculator() as (peer, guest):
        honest(peer)
        for what, lie in lies.items():
            lie(peer)
            try:
                peer.fallen()
            except TimeoutError as error:
                raise AssertionError(f"{what}: {error}") from None
            peer.set_state(RESET)
            peer.wait_run()
            honest(peer)
        # A token that is in use, twice.
        token = peer.ask(b"1 + 1", left_ns=BEST_EFFORT)
        for _ in range(3):
            peer.ask(b"1 + 1", token=token)
        peer.ask(b"", kind=CANCEL, token=token)
        # Or it was answered in between, each time; then the link stands.
        words = random.Random(7)
        for _ in range(20):
            for _ in range(200):
                at = words.choice([0, peer.half]) + 4 * words.choice([words.randrange(32, 300), words.randrange(32, 30000)])
                peer.region.u32(peer.own + at).value = words.choice([words.randrange(100), words.getrandbits(32)])
            peer.notify(1)
            peer.set_state(RESET)
            peer.wait_run()
            honest(peer)
        assert guest.alive(), guest.tail()


def test_a_cell_whose_call_nobody_answers_gives_it_up_and_one_whose_peer_goes_is_told():
    with calculator(append="role=client count=3 deadline_us=0 timeout_ms=300 max_missed=3 wait=sleep") as (peer, guest):
        line = guest.wait_line(lambda text: '"app":"calc"' in text)[1]
        assert '"timeout":3' in line and '"replied":0' in line, line
        assert guest.wait() is not None
    with calculator(append="role=client count=2 deadline_us=0 timeout_ms=60000 max_missed=2") as (peer, guest):
        until("its first call", lambda: peer.asks() == 1)
        peer.set_state(RESET)
        peer.wait_run()
        until("its second", lambda: peer.asks() == 1)
        peer.set_state(RESET)
        line = guest.wait_line(lambda text: '"app":"calc"' in text)[1]
        assert '"gone":2' in line, line


