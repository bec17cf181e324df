"""Guests that stream in both directions while their memory fences may do nothing: no wake-up is lost for good."""

from lib import Namespace, Process, need_program, timeout
from lib.stall import GUEST, Streams, run_load

SECONDS = 12


def never_stalls(guest, attach):
    outcome = run_load(guest, attach, SECONDS)
    assert outcome.stalled is None, f"the network stalled after {outcome.runs} runs, in {outcome.stalled}"
    # A network that is slow is not stalled, but one that carries nothing would not show a stall.
    assert outcome.runs > outcome.failed, outcome


@timeout(300)
def test_a_cell_over_vhost_user_never_stalls():
    never_stalls("cell", "vhost-user")


@timeout(300)
def test_a_cell_over_ivshmem_never_stalls():
    never_stalls("cell", "ivshmem")


@timeout(600)
def test_a_stock_guest_over_ivshmem_never_stalls():
    never_stalls("linux", "ivshmem")


@timeout(120)
def test_a_run_that_is_refused_waits_for_the_server():
    """The namespace is its own guest here."""
    need_program("iperf")
    with Namespace() as space:
        space.ip("address", "add", GUEST, "dev", "lo")
        streams = Streams(space)
        assert streams.once("-t", "0.1") is None
        # The server comes when the first run has been refused.
        shell = f"sleep 1; exec iperf -s -p {streams.port}"
        with Process(["sh", "-c", shell], name="iperf", netns=space):
            assert streams.served("-t", "0.1") is True
        assert streams.refused > 0
        # What is refused and served later is one run with a rate.
        with Process(["sh", "-c", shell], name="iperf", netns=space):
            assert streams.load(0.5, print) is None
        assert (streams.runs, streams.failed) == (1, 0), vars(streams)
