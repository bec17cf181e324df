"""Guests that stream in both directions while their memory fences may do nothing: no wake-up is lost for good."""

from lib import timeout
from lib.stall import run_load

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
