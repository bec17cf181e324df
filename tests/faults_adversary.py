"""Hostile peers of each attachment, a few attacks of each; `./x adversary` runs all of them and prints the table."""

from lib import need_root, timeout
from lib.adversary import Arena

# At least two per attachment: those that broke it once, and one of each class.
ATTACKS = (
    "vhost.memory_that_shrinks",
    "vhost.index_jumps",
    "vhost.chains_that_lie",
    "vhost.call_descriptor_that_blocks",
    "vhost.kick_descriptor_that_blocks",
    "ivshmem.whole_memory_overwritten",
    "ivshmem.doorbells_that_block",
    "stream.lengths_that_lie",
    "stream.never_reads",
    "segment.source_address_of_a_neighbour",
    "segment.arp_for_the_gateway_and_neighbours",
    "segment.broadcast_storm",
    "segment.dhcp_flood",
    "tunnel.a_machine_that_is_no_remote",
    "tunnel.packets_of_other_networks",
    "tunnel.headers_that_are_none",
    "tunnel.the_largest_and_the_smallest_packets",
    "tunnel.a_tunnel_within_the_tunnel",
    "tunnel.datagrams_whose_checksum_lies",
    "tunnel.floods_to_all",
    "calls.descriptors_that_are_none",
    "api.half_sent_heads",
)


@timeout(600)
def test_neighbours_do_not_notice_hostile_peers():
    need_root()
    print(Arena.HEAD)
    with Arena() as arena:
        # Loss and latency are those of one busy machine: what escapes must do so twice.
        first = [arena.judge(name) for name in ATTACKS]
        again = [arena.judge(verdict.attack) for verdict in first if verdict.escapes]
        escaped = [verdict for verdict in again if verdict.escapes]
        assert not escaped, "\n".join(f"{verdict.attack}: {'; '.join(verdict.escapes)}" for verdict in escaped)
