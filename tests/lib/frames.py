"""Ethernet frames by hand: stations that send and receive exactly what a test wants. One is the peer of a `stream` port."""

import socket
import struct
import time


def mac_bytes(text):
    return bytes(int(part, 16) for part in text.split(":"))


class Station:
    """A station of an Ethernet, played by the test. Of each kind are its own: `send(frame)`, and `_next(seconds)`, the next frame that comes,
    or None where none has come; it waits no longer than so many seconds."""

    def __init__(self, mac):
        self.mac, self.heard = mac_bytes(mac), []

    def frame(self, destination, kind, payload):
        """A frame from here to a MAC address in text."""
        return (mac_bytes(destination) + self.mac + struct.pack("!H", kind) + payload).ljust(60, b"\0")

    def listen(self, wanted, seconds=20):
        """The first frame for which `wanted(frame)` holds, or None; all frames are kept in `heard`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            frame = self._next(left)
            if frame is not None:
                self.heard.append(frame)
                if wanted(frame):
                    return frame
        return None

    def arp_request(self, address, own):
        """The broadcast that asks who has an address."""
        request = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + self.mac + socket.inet_aton(own) + bytes(6) + socket.inet_aton(address)
        return self.frame("ff:ff:ff:ff:ff:ff", 0x0806, request)

    def arp(self, address, own="0.0.0.0", seconds=30):
        """Asks who has an address until somebody answers; the answer's MAC in text, or None."""
        target = socket.inet_aton(address)

        def answer(frame):
            return frame[12:14] == b"\x08\x06" and frame[20:22] == b"\0\2" and frame[28:32] == target

        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.send(self.arp_request(address, own))
            found = self.listen(answer, 1)
            if found:
                return found[22:28].hex(":")
        return None


class StreamPeer(Station):
    """Connects to the socket of a stream port. Each frame has its length before it: four bytes, big-endian."""

    def __init__(self, path, mac="02:00:00:00:aa:01"):
        super().__init__(mac)
        self._buffer = b""
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(str(path))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, frame):
        self.socket.sendall(struct.pack("!I", len(frame)) + frame)

    def _next(self, seconds):
        length = struct.unpack("!I", self._buffer[:4])[0] if len(self._buffer) >= 4 else None
        if length is not None and len(self._buffer) >= 4 + length:
            frame, self._buffer = self._buffer[4:4 + length], self._buffer[4 + length:]
            return frame
        self.socket.settimeout(seconds)
        try:
            part = self.socket.recv(65536)
        except TimeoutError:
            return None
        if not part:
            raise EOFError("the port closed the stream")
        self._buffer += part
        return None
