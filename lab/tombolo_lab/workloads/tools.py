"""Tools that readers trust, run for a bounded time: iperf 2, ping, httperf, stress-ng.

Each function starts one, reads its report, and raises ToolError where it has none.

What is parsed was seen with iperf 2.1.8, iputils ping 20221126, httperf 0.9.0 and stress-ng 0.15.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tombolo_lab import LabError

UNITS = {"": 1e-6, "K": 1e-3, "M": 1.0, "G": 1e3}


class ToolError(LabError):
    """A tool that failed or whose report could not be read; the text has its last lines."""


def bounded(command: Sequence[object], seconds: float) -> subprocess.CompletedProcess:
    """Runs a command for at most `seconds`; what it was is in the error."""
    words = [str(word) for word in command]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise ToolError(f"`{' '.join(words)}` was not done after {seconds:g} s") from None


def inside(space: object, *command: object) -> list[str]:
    """A command in a network namespace."""
    return ["ip", "netns", "exec", str(space), *map(str, command)]


# ---- iperf 2 -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Flow:
    """What one direction of iperf carried: payload in Mbit/s; for UDP the datagrams that were sent
    and lost, by their sequence numbers, and those that came out of order."""

    mbit_s: float
    sent: int | None = None
    lost: int | None = None
    jitter_ms: float | None = None

    @property
    def loss(self) -> float | None:
        """Lost datagrams, as a part of those that were sent."""
        if self.sent is None or self.lost is None:
            return None
        return max(0.0, self.lost / self.sent) if self.sent else 0.0


_RATE = r"([\d.]+) ([KMG]?)bits/sec"
_UDP = re.compile(_RATE + r"\s+([\d.]+) ms\s+(-?\d+)\s*/\s*(\d+) \(([\d.e+-]+)%\)")


def iperf_tcp(text: str) -> Flow:
    """The last rate of a report of iperf over TCP."""
    found = re.findall(_RATE, text)
    if not found:
        raise ToolError(f"no rate in iperf's report: {text.strip()[-300:]!r}")
    rate, unit = found[-1]
    return Flow(float(rate) * UNITS[unit])


def iperf_udp(text: str) -> list[Flow]:
    """The reports of iperf over UDP that count datagrams: what went up, then what came down."""
    flows = []
    for rate, unit, jitter, lost, sent, _ in _UDP.findall(text):
        flows.append(Flow(float(rate) * UNITS[unit], int(sent), max(0, int(lost)), float(jitter)))
    if not flows:
        raise ToolError(f"no count of datagrams in iperf's report: {text.strip()[-300:]!r}")
    return flows


def iperf_command(
    address: str, protocol: str, down: bool, seconds: float, size: int, offered: str
) -> list[str]:
    """The client's words. `offered` is iperf's own way to say a rate: "20M", "3000pps", or "" for
    as fast as it goes (TCP only). UDP down is iperf's -r: first up, then down."""
    words = ["iperf", "-c", address, "-f", "k", "-t", f"{seconds:g}"]
    words += ["-l", str(size)] if size else []
    words += ["-b", offered] if offered else []
    if protocol == "udp":
        return [*words, "-u", *(["-r"] if down else [])]
    return [*words, *(["-R"] if down else [])]


def iperf(
    space: object,
    address: str,
    protocol: str,
    down: bool = False,
    seconds: float = 1,
    size: int = 0,
    offered: str = "",
) -> Flow:
    """One run of iperf's client in a namespace against a server that is there.

    `down`: from the server to the client. `size`: bytes of a write or datagram; 0 is iperf's own.
    """
    command = iperf_command(address, protocol, down, seconds, size, offered)
    done = bounded(inside(space, *command), 3 * seconds + 30)
    if protocol == "tcp":
        return iperf_tcp(done.stdout)
    flows = iperf_udp(done.stdout)
    if down and len(flows) < 2:
        raise ToolError(f"no report of what came down: {done.stdout.strip()[-300:]!r}")
    return flows[1 if down else 0]


# ---- ping ----------------------------------------------------------------------------------------
def ping_times(text: str) -> list[float]:
    """Round trips in µs of ping's lines."""
    return [float(value) * 1000 for value in re.findall(r"time=([\d.]+) ms", text)]


def percentiles_us(values: Sequence[float]) -> dict:
    """count, p50, p99, p999 and p9999 by the nearest rank, as paced.c gives them."""
    ordered = sorted(values)
    if not ordered:
        raise ToolError("no round trips to take percentiles of")

    def at(part: float) -> float:
        return ordered[max(0, math.ceil(part * len(ordered) - 1e-9) - 1)]

    parts = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "p9999": 0.9999}
    return {"count": len(ordered), **{name: at(part) for name, part in parts.items()}}


def ping(space: object, address: str, count: int, interval_s: float = 0.01) -> list[float]:
    """Round trips in µs of `count` echo requests; those without a reply are left out."""
    command = inside(space, "ping", "-n", "-i", interval_s, "-c", count, "-W", 1, address)
    times = ping_times(bounded(command, count * interval_s * 3 + 30).stdout)
    if not times:
        raise ToolError(f"no reply to {count} pings of {address}")
    return times


def flood(space: object, address: str, count: int) -> tuple[int, int, list[float]]:
    """A flood ping: how many were sent and answered, and [least, mean, most] in µs.

    A request follows the reply to the one before, or after 10 ms.
    """
    command = inside(space, "ping", "-n", "-q", "-f", "-c", count, address)
    text = bounded(command, count * 0.02 + 60).stdout
    counts = re.search(r"(\d+) packets transmitted, (\d+) received", text)
    times = re.search(r"= ([\d.]+)/([\d.]+)/([\d.]+)/", text)
    if not counts or not times:
        raise ToolError(f"no summary in ping's report: {text.strip()[-300:]!r}")
    return int(counts[1]), int(counts[2]), [float(value) * 1000 for value in times.groups()]


@contextlib.contextmanager
def pinging(space: object, address: str, interval_s: float = 0.02) -> Iterator[list[float]]:
    """Pings in the background within the `with`; the list is filled with round trips in µs."""
    command = inside(space, "ping", "-n", "-i", interval_s, address)
    found: list[float] = []
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        try:
            yield found
        finally:
            # SIGINT would end it with a summary; what it has printed by then is enough.
            process.terminate()
            process.wait()
            out.seek(0)
            found += ping_times(out.read())


# ---- httperf -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Http:
    """What httperf counted: replies per second, Mbit/s, the mean time of a reply, and errors."""

    replies_s: float
    mbit_s: float
    reply_ms: float
    replies: int
    errors: int


def httperf_report(text: str) -> Http:
    """Reads httperf's report."""

    def number(pattern: str) -> float:
        found = re.search(pattern, text)
        if not found:
            raise ToolError(f"httperf's report has no {pattern!r}: {text.strip()[-300:]!r}")
        return float(found[1])

    seconds = number(r"test-duration ([\d.]+) s")
    replies = int(number(r"Total: connections \d+ requests \d+ replies (\d+)"))
    content = number(r"Reply size \[B\]: header [\d.]+ content ([\d.]+)")
    parts = [
        number(rf"Reply time \[ms\]: {part}")
        for part in (r"response ([\d.]+)", r".*?transfer ([\d.]+)")
    ]
    return Http(
        replies / seconds if seconds else 0.0,
        replies * content * 8e-6 / seconds if seconds else 0.0,
        sum(parts),
        replies,
        int(number(r"Errors: total (\d+)")),
    )


def httperf(
    space: object, address: str, path: str, sessions: int, requests: int, seconds: float
) -> Http:
    """`sessions` connections at the same time, `requests` over each, for a path of the server."""
    command = inside(
        space,
        *("httperf", "--hog", "--server", address, "--port", 80, "--uri", path),
        *("--num-conns", sessions, "--num-calls", requests, "--rate", 1000, "--timeout", seconds),
    )
    return httperf_report(bounded(command, 2 * seconds + 30).stdout)


# ---- stress-ng -----------------------------------------------------------------------------------
STRESSORS = {
    "cpu": ("--cpu", "2", "--cpu-method", "matrixprod"),
    "memory": ("--vm", "1", "--vm-bytes", "128M", "--vm-method", "flip"),
    "network": (
        "--udp",
        "1",
    ),
    "disk": ("--hdd", "1", "--hdd-bytes", "32M"),
}


@contextlib.contextmanager
def stressing(kinds: Sequence[str], folder: object, seconds: float) -> Iterator[None]:
    """Load of the given kinds on the host within the `with`; it ends by itself after `seconds`.

    Files of the disk load lie in `folder` and are gone with it.
    """
    if not kinds:
        yield
        return
    words = [word for kind in kinds for word in STRESSORS[kind]]
    program = shutil.which("stress-ng") or "stress-ng"
    command = [
        program,
        "--timeout",
        f"{seconds:.0f}",
        "--temp-path",
        str(folder),
        "--quiet",
        *words,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
        if process.poll() is not None:
            raise ToolError(f"stress-ng ended early with {process.returncode}")
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
