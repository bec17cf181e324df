"""Ethernet frames by hand: the peer of a `stream` port, which says and hears exactly what a test wants."""

import socket
import struct
import time


def mac_bytes(text):
    return bytes(int(part, 16) for part in text.split(":"))


class StreamPeer:
    """Connects to the socket of a stream port. Each frame has its length before it: four bytes, big-endian."""

    def __init__(self, path, mac="02:00:00:00:aa:01"):
        self.mac, self.heard, self._buffer = mac_bytes(mac), [], b""
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(str(path))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, frame):
        self.socket.sendall(struct.pack("!I", len(frame)) + frame)

    def frame(self, destination, kind, payload):
        return (mac_bytes(destination) + self.mac + struct.pack("!H", kind) + payload).ljust(60, b"\0")

    def listen(self, wanted, seconds):
        """The first frame for which `wanted(frame)` holds, or None; all frames are kept in `heard`."""
        deadline = time.monotonic() + seconds
        while True:
            while len(self._buffer) >= 4:
                length = struct.unpack("!I", self._buffer[:4])[0]
                if len(self._buffer) < 4 + length:
                    break
                frame, self._buffer = self._buffer[4:4 + length], self._buffer[4 + length:]
                self.heard.append(frame)
                if wanted(frame):
                    return frame
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self.socket.settimeout(left)
            try:
                part = self.socket.recv(65536)
            except TimeoutError:
                return None
            if not part:
                raise EOFError("the port closed the stream")
            self._buffer += part

    def arp(self, address, own="0.0.0.0", seconds=10):
        """Asks who has an address until somebody answers; the answer's MAC in text, or None."""
        target = socket.inet_aton(address)
        request = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + self.mac + socket.inet_aton(own) + bytes(6) + target

        def answer(frame):
            return frame[12:14] == b"\x08\x06" and frame[20:22] == b"\0\2" and frame[28:32] == target

        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.send(self.frame("ff:ff:ff:ff:ff:ff", 0x0806, request))
            found = self.listen(answer, 1)
            if found:
                return ":".join(f"{byte:02x}" for byte in found[22:28])
        return None
