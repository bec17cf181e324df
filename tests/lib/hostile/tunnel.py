"""A hostile machine at the other end of a tunnel, and one that is no end of it: packets that are none, floods, and frames as others.

The machines are addresses of loopback. The attacker is the remote 127.0.0.2; 127.0.0.9 is no remote.
"""

import contextlib
import socket
import struct
import time

from ..frames import Station, mac_bytes
from ..ivshmem import checksum
from . import MARK, UDP_SUMS, attack, repeated

VNI, PORT = 77, 4789
FABRIC, ATTACKER, HONEST, STRANGER = "127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.9"
HEADER = struct.pack("!BBHI", 8, 0, 0, VNI << 8)


class TunnelPeer(Station):
    """A machine whose member is at the other end of the tunnel. The socket is of the namespace that the thread is in."""

    def __init__(self, address, mac):
        super().__init__(mac)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind((address, PORT))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def raw(self, packet):
        self.socket.sendto(packet, (FABRIC, PORT))

    def send(self, frame):
        self.raw(HEADER + frame)

    def _next(self, seconds):
        self.socket.settimeout(seconds)
        try:
            packet = self.socket.recv(65536)
        except TimeoutError:
            return None
        return packet[8:] if packet[:8] == HEADER else None


@contextlib.contextmanager
def remote(target):
    with TunnelPeer(ATTACKER, target.mac) as peer:
        yield peer


def marked(peer, destination="ff:ff:ff:ff:ff:ff"):
    """A frame that no member may get: where it has a fault, or is sent as another member."""
    return peer.frame(destination, 0x88B5, MARK + bytes(40))


def sends(target, peer, packets, pause_s=0.0):
    """Sends packets again and again, at most as fast as a sender in C would be on a slow day."""

    def step():
        for packet in packets:
            peer.raw(packet)
        time.sleep(pause_s)
    repeated(target, step)


@attack("tunnel", "unknown_remote")
def a_machine_that_is_no_remote(target):
    with TunnelPeer(STRANGER, target.mac) as peer:
        sends(target, peer, [HEADER + marked(peer), HEADER + peer.arp_request(target.gateway, target.ip)])


@attack("tunnel", "wrong_vni")
def packets_of_other_networks(target):
    with remote(target) as peer:
        frame = marked(peer)
        heads = [struct.pack("!BBHI", 8, 0, 0, vni << 8) for vni in (0, VNI - 1, VNI + 1, VNI << 8 & 0xFFFFFF, 0xFFFFFF)]
        sends(target, peer, [head + frame for head in heads])


@attack("tunnel", "bad_tunnel", "runt")
def headers_that_are_none(target):
    with remote(target) as peer:
        frame = marked(peer)
        wrong = [bytes([flags]) + HEADER[1:] + frame for flags in range(256) if not flags & 8]
        sends(target, peer, [*wrong, *((HEADER + frame)[:length] for length in range(22))])


@attack("tunnel", "too_long", "runt")
def the_largest_and_the_smallest_packets(target):
    with remote(target) as peer:
        frame = peer.frame(target.neighbour_mac, 0x0800, b"")
        sends(target, peer, [HEADER + frame + bytes(65507 - 8 - len(frame)), HEADER + frame[:14], HEADER, b""], 0.0005)


def datagram(source, to, port, content):
    """IPv4 and UDP around this, with no checksum of UDP."""
    udp = struct.pack("!HHHH", PORT, port, 8 + len(content), 0) + content
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 1, 0, 64, 17, 0, socket.inet_aton(source), socket.inet_aton(to))
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + udp


@attack("tunnel")
def a_tunnel_within_the_tunnel(target):
    """To the gateway, which is no end of a tunnel: what is within the inner one comes out nowhere. Deeper ones too."""
    with remote(target) as peer:
        gateway = peer.arp(target.gateway, target.ip, seconds=1)
        frame = marked(peer)
        for _ in range(8):
            packets = []
            for to in (target.gateway, FABRIC):
                frame_in = peer.frame(gateway, 0x0800, datagram(target.ip, to, PORT, HEADER + frame))
                packets.append(HEADER + frame_in)
            frame = peer.frame(gateway, 0x0800, datagram(target.ip, target.gateway, PORT, HEADER + frame))
            for packet in packets * 50:
                peer.raw(packet)


@attack("tunnel", UDP_SUMS)
def datagrams_whose_checksum_lies(target):
    """What was damaged, or made by hand, under the address of a remote: the kernel drops it before the port sees it."""
    with remote(target) as peer, socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        packet = bytearray(datagram(ATTACKER, FABRIC, PORT, HEADER + marked(peer)))
        packet[26:28] = b"\xba\xd5"

        def step():
            raw.sendto(packet, (FABRIC, 0))
            time.sleep(0.001)
        repeated(target, step)


@attack("tunnel")
def garbage_within(target):
    """Random bytes behind headers that say they are IPv4, IPv6, ARP and VLANs."""
    kinds = [0x0800, 0x86DD, 0x0806, 0x8100, 0x88A8, 0x0004]
    with remote(target) as peer:
        def step():
            for kind in kinds:
                for to in (target.neighbour_mac, "ff:ff:ff:ff:ff:ff", "33:33:00:00:00:01"):
                    peer.send(peer.frame(to, kind, target.dice.randbytes(target.dice.randrange(1500))))
            time.sleep(0.001)
        repeated(target, step)


@attack("tunnel")
def lengths_that_lie(target):
    """IP and TCP headers whose lengths point beyond the frame."""
    with remote(target) as peer:
        def step():
            first = 0x40 | target.dice.randrange(16)
            header = struct.pack("!BBHHHBBH4s4s", first, 0, target.dice.randrange(65536), 1, target.dice.randrange(65536), 64, 6, 0,
                                 socket.inet_aton(target.ip), socket.inet_aton(target.neighbour_ip))
            peer.send(peer.frame(target.neighbour_mac, 0x0800, header + target.dice.randbytes(30)))
            time.sleep(0.0002)
        repeated(target, step)


@attack("tunnel", "bad_source")
def as_a_member_of_the_other_machine(target):
    """The MAC address of a guarded member: neither its frames nor its place."""
    with remote(target) as peer:
        own = peer.mac
        peer.mac = mac_bytes(target.neighbour_mac)
        sends(target, peer, [HEADER + marked(peer), HEADER + marked(peer, own.hex(":"))], 0.0002)


@attack("tunnel", "gateway_claim")
def as_the_gateway(target):
    with remote(target) as peer:
        answer = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 2) + peer.mac + socket.inet_aton(target.gateway)
        answer += mac_bytes(target.neighbour_mac) + socket.inet_aton(target.neighbour_ip) + MARK
        head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(MARK), 1, 0, 64, 253, 0, socket.inet_aton(target.gateway), socket.inet_aton("255.255.255.255"))
        sends(target, peer, [HEADER + peer.frame("ff:ff:ff:ff:ff:ff", 0x0806, answer), HEADER + peer.frame("ff:ff:ff:ff:ff:ff", 0x0800, head + MARK)], 0.0005)


@attack("tunnel", "rogue_dhcp", "rogue_router")
def as_a_server_and_a_router(target):
    """An answer of a DHCP server and a router's advertisement."""
    with remote(target) as peer:
        udp = struct.pack("!HHHH", 67, 68, 8 + len(MARK), 0) + MARK
        four = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 1, 0, 64, 17, 0, socket.inet_aton(target.ip), socket.inet_aton("255.255.255.255"))
        advertisement = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0) + MARK
        six = struct.pack("!IHBB", 6 << 28, len(advertisement), 58, 255) + socket.inet_pton(socket.AF_INET6, "fe80::66")
        six += socket.inet_pton(socket.AF_INET6, "ff02::1")
        sends(target, peer, [HEADER + peer.frame("ff:ff:ff:ff:ff:ff", 0x0800, four + udp), HEADER + peer.frame("33:33:00:00:00:01", 0x86DD, six + advertisement)],
              0.0005)


@attack("tunnel", "remote_storm")
def floods_to_all(target):
    with remote(target) as peer:
        sends(target, peer, [HEADER + peer.frame(to, 0x88B6, bytes(40)) for to in ("ff:ff:ff:ff:ff:ff", "33:33:00:00:00:09", "02:00:00:00:ff:ff")])


@attack("tunnel")
def asks_without_end(target):
    with remote(target) as peer:
        sends(target, peer, [HEADER + peer.arp_request(target.gateway, target.ip), HEADER + peer.arp_request(target.neighbour_ip, target.ip)])


@attack("tunnel")
def ever_new_addresses(target):
    with remote(target) as peer:
        def step():
            peer.mac = b"\x02" + target.dice.randbytes(5)
            peer.send(peer.frame(target.neighbour_mac, 0x88B6, bytes(40)))
        repeated(target, step)


@attack("tunnel")
def sends_everything_back(target):
    """A loop: each frame that comes goes back as it came, many times."""
    with remote(target) as peer:
        peer.send(peer.frame("ff:ff:ff:ff:ff:ff", 0x88B6, bytes(40)))

        def step():
            peer.socket.settimeout(0.2)
            packet = peer.socket.recv(65536)
            for _ in range(20):
                peer.raw(packet)
        repeated(target, step)


@attack("tunnel")
def takes_turns_as_many_members(target):
    """Frames from the addresses of a whole machine's members, each again and again."""
    with remote(target) as peer:
        def step():
            for n in range(32):
                peer.mac = bytes([2, 0, 0, 0, 0xDE, n])
                peer.send(peer.frame(target.neighbour_mac, 0x88B6, bytes(40)))
            time.sleep(0.0005)
        repeated(target, step)
