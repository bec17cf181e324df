"""A tap driven as a microVM's monitor drives it: one frame per non-blocking read or write, with a vnet header; and frames by hand."""

import ctypes
import errno
import fcntl
import os
import select
import socket
import struct
import time

from .frames import mac_bytes

TUNSETIFF = 0x400454CA
TUNSETOFFLOAD = 0x400454D0
TUNSETVNETHDRSZ = 0x400454D8
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
# TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6
OFFLOADS = 1 | 2 | 4
VNET = struct.Struct("<BBHHHH")
NEEDS_CSUM, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, GSO_ECN = 1, 1, 4, 5, 0x80
CLONE_NEWNET = 0x40000000
ETH_IP4, ETH_ARP, ETH_IP6 = 0x0800, 0x0806, 0x86DD
TCP, UDP, ICMP, ICMP6 = 6, 17, 1, 58
FIN, SYN, RST, PSH, ACK, URG = 1, 2, 4, 8, 16, 32
_libc = ctypes.CDLL(None, use_errno=True)


class Inside:
    """Within the `with` this thread is in the namespace; sockets and taps made there stay there."""

    def __init__(self, netns):
        self.path = f"/run/netns/{netns}"

    def __enter__(self):
        self.before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(self.path, os.O_RDONLY)
        try:
            if _libc.setns(there, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {self.path}")
        finally:
            os.close(there)

    def __exit__(self, *_):
        _libc.setns(self.before, CLONE_NEWNET)
        os.close(self.before)


class Tap:
    """A tap of a namespace. `address` is the host's; the peer behind it has the MAC `mac` and the addresses `neighbours`."""

    def __init__(self, netns, name, *addresses, mac, neighbours=(), vnet=True, offloads=True, mtu=1500):
        self.netns, self.name, self.mac, self.vnet = netns, name, mac_bytes(mac), vnet
        with Inside(netns):
            # The device is of the namespace in which this file was opened.
            self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            flags = IFF_TAP | IFF_NO_PI | (IFF_VNET_HDR if vnet else 0)
            fcntl.ioctl(self.fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        if vnet and offloads:
            fcntl.ioctl(self.fd, TUNSETOFFLOAD, OFFLOADS)
        netns.ip("link", "set", name, "mtu", str(mtu))
        for address in addresses:
            netns.ip("address", "add", address, "dev", name, *(["nodad"] if ":" in address else []))
        netns.ip("link", "set", name, "up")
        for neighbour in neighbours:
            netns.ip("neighbour", "replace", neighbour, "lladdr", mac, "dev", name, "nud", "permanent")
        text = netns.ip("-br", "link", "show", name)
        self.host_mac = mac_bytes(text.split()[2])

    def close(self):
        os.close(self.fd)

    def send(self, frame, header=bytes(10)):
        """One frame, with its vnet header; a full queue is waited for, as a monitor waits for its next event."""
        data = (header if self.vnet else b"") + frame
        while True:
            try:
                assert os.write(self.fd, data) == len(data)
                return
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    raise
                select.select([], [self.fd], [], 1)

    def receive(self, seconds=1.0, wanted=lambda frame: True):
        """The next frame that is wanted: (vnet header, frame), or None."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                data = os.read(self.fd, 70000)
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self.fd], [], [], left)[0]:
                    return None
                continue
            header, frame = (data[:10], data[10:]) if self.vnet else (bytes(10), data)
            if wanted(frame):
                return header, frame

    def drain(self, wanted=lambda frame: True):
        """All frames that wait."""
        frames = []
        while True:
            got = self.receive(0, wanted)
            if got is None:
                return frames
            frames.append(got)


def checksum(data):
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def packed(address):
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)


def pseudo(source, destination, proto, length):
    a, b = packed(source), packed(destination)
    if len(a) == 4:
        return a + b + struct.pack("!BBH", 0, proto, length)
    return a + b + struct.pack("!I3xB", length, proto)


def transport(proto, source, destination, sport, dport, payload=b"", flags=ACK, seq=1, ack=1, partial=False, window=65535, bad=False, options=b""):
    """TCP or UDP with its checksum: whole, the pseudo header's only (`partial`), or wrong (`bad`). TCP's options are whole words."""
    if proto == TCP:
        head, at = struct.pack("!HHIIBBHHH", sport, dport, seq, ack, 5 + len(options) // 4 << 4, flags, window, 0, 0) + options, 16
    else:
        head, at = struct.pack("!HHHH", sport, dport, 8 + len(payload), 0), 6
    data = head + payload
    start = pseudo(source, destination, proto, len(data))
    value = checksum(start) if partial else (~checksum(start + data) & 0xFFFF) or (0xFFFF if proto == UDP else 0)
    if bad:
        value ^= 0x5555
    return data[:at] + struct.pack("!H", value) + data[at + 2:]


def echo(source, destination, ident=7, sequence=1, payload=b"echo", reply=False):
    """An ICMP echo, or its reply, of the family of the addresses."""
    six = ":" in source
    kind = (129 if reply else 128) if six else (0 if reply else 8)
    data = struct.pack("!BBHHH", kind, 0, 0, ident, sequence) + payload
    value = ~checksum((pseudo(source, destination, ICMP6, len(data)) if six else b"") + data) & 0xFFFF
    return data[:2] + struct.pack("!H", value) + data[4:]


def ipv4(source, destination, proto, body, ttl=64, tos=0, ident=7, flags=0x4000, options=b"", length=None):
    ihl = 5 + len(options) // 4
    total = length or ihl * 4 + len(body)
    head = struct.pack("!BBHHHBBH4s4s", 0x40 | ihl, tos, total, ident, flags, ttl, proto, 0, packed(source), packed(destination)) + options
    return head[:10] + struct.pack("!H", ~checksum(head) & 0xFFFF) + head[12:] + body


def ipv6(source, destination, proto, body, hops=64, label=0, length=None):
    return struct.pack("!IHBB16s16s", 6 << 28 | label, length or len(body), proto, hops, packed(source), packed(destination)) + body


def ethernet(destination, source, kind, payload, pad=True):
    frame = destination + source + struct.pack("!H", kind) + payload
    return frame.ljust(60, b"\0") if pad else frame


def vnet_header(flags=0, gso=0, header_length=0, gso_size=0, start=0, offset=0):
    return VNET.pack(flags, gso, header_length, gso_size, start, offset)
