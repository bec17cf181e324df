"""128 ports on one network are ordinary: all reported, all reached by a broadcast, and below 1 % of a core when idle."""

import os
import time

from lib import Fabric, Namespace, StreamPeer, need_root, scratch, timeout, until
from lib.ivshmem import Client
from lib.process import children, cpu_seconds, until_idle

PORTS = 128
IDLE_S = 3.0
BOUND = 0.01
GATEWAY = "10.236.0.1"


def text(kinds):
    """`kinds` takes turns; each port has its socket in the runtime directory."""
    ports = "".join(f'[port.p{number}]\nkind = "{kinds[number % len(kinds)]}"\n' for number in range(PORTS))
    return f'name = "s{os.getpid()}"\n[network.lan]\nsubnet = "10.236.0.0/24"\n{ports}'


def assert_idle(fabric):
    until_idle("the daemon with idle ports", fabric.process.cpu_seconds, BOUND, IDLE_S)


@timeout(300)
def test_128_connected_ports():
    with scratch() as folder, Fabric(folder, text(["stream"])) as fabric:
        peers = []
        try:
            for number in range(PORTS):
                path = folder / "run" / fabric.name / f"p{number}.sock"
                peers.append(StreamPeer(path, f"02:00:00:00:ee:{number:02x}"))
            until("all links", lambda: sum(port["up"] for port in fabric.status()["ports"]) == PORTS + 1)
            assert_idle(fabric)
            # Each one's broadcast comes to every other, once.
            for peer in peers:
                peer.send(peer.frame("ff:ff:ff:ff:ff:ff", 0x88B5, peer.mac))
            for peer in peers:
                others = {other.mac for other in peers if other is not peer}
                heard = []
                while set(heard) != others:
                    frame = peer.listen(lambda frame: frame[12:14] == b"\x88\xb5", 60)
                    assert frame, f"{len(others - set(heard))} of {len(others)} broadcasts did not come"
                    heard.append(frame[14:20])
                assert len(heard) == len(others)

            def ports_of(state):
                return {port["name"]: port for port in state["ports"] if port["kind"] == "stream"}

            # What has been heard has been sent; that it was counted is seen a moment later.
            until("all to be counted", lambda: all(port["counters"]["tx_frames"] >= PORTS - 1 for port in ports_of(fabric.status()).values()))
            state = fabric.status()
            ports = ports_of(state)
            assert sorted(ports) == sorted(f"p{number}" for number in range(PORTS))
            assert state["networks"][0]["macs"] >= PORTS
            for port in ports.values():
                counters = port["counters"]
                assert counters["rx_frames"] == 1 and counters["tx_frames"] >= PORTS - 1 and port["macs"] == 1, port
                assert not counters["rx_drops"] and not counters["tx_drops"] and not counters["faults"], port
            # Idle again, with ports that have been used.
            assert_idle(fabric)
        finally:
            for peer in peers:
                peer.socket.close()
        until("all links to go", lambda: sum(port["up"] for port in fabric.status()["ports"]) == 1)


@timeout(300)
def test_128_waiting_ports_and_a_tap():
    need_root()
    with Namespace() as space, scratch() as folder:
        with Fabric(folder, text(["vhost-user", "stream"]) + '[tap.host]\nip = "10.236.0.9"\n', netns=space) as fabric:
            state = fabric.status()
            names = {port["name"] for port in state["ports"]}
            assert names >= {f"p{number}" for number in range(PORTS)} | {"host"}, names
            until("the gateway's answer", lambda: space.pings(GATEWAY))
            assert_idle(fabric)
            assert_idle(fabric)
            fabric.down()


@timeout(300)
def test_128_ivshmem_links_that_run():
    with scratch() as folder, Fabric(folder, text(["ivshmem"])) as fabric:
        # The daemon has a thread that serves the links; the keeper, its child, holds their memory
        # and doorbells.
        pids = [fabric.process.pid, *children(fabric.process.pid)]
        assert len(pids) == 2, pids

        def used():
            return sum(map(cpu_seconds, pids))

        clients, peers = [], []
        try:
            for number in range(PORTS):
                clients.append(Client(folder / "run" / fabric.name / f"p{number}.sock"))
                peers.append(clients[-1].net_peer(f"02:00:00:00:ee:{number:02x}"))
            for peer in peers:
                peer.wait_run()
            until("all links", lambda: sum(port["up"] for port in fabric.status()["ports"]) == PORTS + 1)
            until_idle("the daemon and its keeper with 128 links that run", used, BOUND, 10.0)
            # Both ends still say so, and each link carries frames both ways.
            for number, peer in enumerate(peers):
                assert peer.step(), f"link {number}: own state {peer.state}, the fabric's {peer.peer_state}"
                assert peer.arp(GATEWAY, own=f"10.236.0.{10 + number}"), f"no answer on link {number}"

            # The measure sees work.
            before, begun = used(), time.monotonic()
            while time.monotonic() - begun < 1:
                for peer in peers:
                    peer.send(peer.arp_request(GATEWAY, "10.236.0.9"))
                    while peer.receive():
                        pass
            share = (used() - before) / (time.monotonic() - begun)
            print(f"under broadcasts: {100 * share:.1f} % of a core")
            assert share > BOUND, share
            for peer in peers:
                while peer.receive():
                    pass
            # Idle again, with links that have been used.
            until_idle("the same after traffic", used, BOUND, 10.0)
            ports = [port for port in fabric.status()["ports"] if port["kind"] == "ivshmem"]
            assert len(ports) == PORTS and all(port["up"] and not port["counters"]["faults"] for port in ports), ports
        finally:
            for client in clients:
                client.close()
        until("all links to go", lambda: sum(port["up"] for port in fabric.status()["ports"]) == 1)
        fabric.down()
