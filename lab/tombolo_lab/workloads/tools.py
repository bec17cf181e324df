"""Tools that readers trust, run for a bounded time: iperf 2 and 3, sockperf, ping, httperf, siege,
wrk, stress-ng.

Each function starts one, reads its report, and raises ToolError where it has none.

What is parsed was seen with iperf 2.1.8, iperf 3.12, sockperf 3.7, iputils ping 20221126, httperf
0.9.0, siege 4.0.7, wrk 4.1.0 and stress-ng 0.15.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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


# ---- iperf 3 -------------------------------------------------------------------------------------
def iperf3_report(text: str) -> dict:
    """Of iperf3's JSON: mbit_s that were received; of UDP sent, lost and jitter_ms; of TCP
    retransmitted."""
    try:
        data = json.loads(text)
    except ValueError:
        raise ToolError(f"iperf3: expected JSON, found {text.strip()[-300:]!r}") from None
    if "error" in data:
        raise ToolError(f"iperf3: {data['error']}")
    end = data["end"]
    # Of UDP, iperf3 3.12 has the receiver's counts in `sum`, and its rate in sum_received.
    received = end.get("sum_received") or end["sum"]
    row = {"mbit_s": received["bits_per_second"] / 1e6}
    if "packets" in end.get("sum", {}):
        counts = end["sum"]
        return row | {
            "sent": counts["packets"],
            "lost": counts["lost_packets"],
            "jitter_ms": counts["jitter_ms"],
        }
    return row | {"retransmitted": end["sum_sent"].get("retransmits")}


def whole_seconds(seconds: float) -> int:
    """How long iperf3 sends, which takes whole seconds."""
    return max(1, math.ceil(seconds))


def iperf3(
    space: object,
    address: str,
    protocol: str,
    down: bool,
    seconds: float,
    size: int,
    bits_s: float,
    streams: int = 1,
    congestion: str = "",
) -> dict:
    """iperf3's client; 0 bits a second are as fast as TCP goes. iperf3 takes whole seconds.
    `congestion` is the sender's congestion control; empty: the machine's."""
    words: list[object] = ["iperf3", "-J", "-c", address, "-t", whole_seconds(seconds)]
    words += ["-u"] if protocol == "udp" else []
    words += ["-l", size] if size else []
    words += ["-b", round(bits_s)] if bits_s else []
    words += ["-R"] if down else []
    words += ["-P", streams] if streams > 1 else []
    words += ["-C", congestion] if congestion else []
    return iperf3_report(bounded(inside(space, *words), 3 * seconds + 30).stdout)


# ---- sockperf ------------------------------------------------------------------------------------
SOCKPERF_PORT = 11111
# What it leaves out at the begin and the end of its time.
SOCKPERF_LEAST_S = 1
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SOCKPERF = {"p50": "50.000", "p99": "99.000", "p999": "99.900", "p9999": "99.990"}


def sockperf_report(text: str) -> dict:
    """Of sockperf's ping-pong or under-load: sent, received, duplicates, out_of_order, seconds, and
    whole round trips in µs: count, p50, p99, p999, p9999. sockperf prints halves."""
    text = _COLOUR.sub("", text)

    def found(pattern: str) -> re.Match:
        match = re.search(pattern, text)
        if not match:
            raise ToolError(f"sockperf's report has no {pattern!r}: {text.strip()[-300:]!r}")
        return match

    valid = found(
        r"Valid Duration\] RunTime=([\d.]+) sec; SentMessages=(\d+); ReceivedMessages=(\d+)"
    )
    faults = found(
        r"dropped messages = (\d+); # duplicated messages = (\d+); # out-of-order messages = (\d+)"
    )
    return {
        "seconds": float(valid[1]),
        "sent": int(valid[2]),
        "received": int(valid[3]),
        "duplicates": int(faults[2]),
        "out_of_order": int(faults[3]),
        "rtt_us": {
            "count": int(found(r"Total (\d+) observations")[1]),
            **{
                name: 2 * float(found(rf"percentile {part} =\s*([\d.]+)")[1])
                for name, part in _SOCKPERF.items()
            },
        },
    }


def sockperf(
    space: object, address: str, protocol: str, seconds: float, size: int, rate: float
) -> dict:
    """Messages to sockperf's server and back, at a rate or (0) one at a time. It takes whole
    seconds."""
    words: list[object] = ["under-load", f"--mps={round(rate)}", "--reply-every=1"]
    words = ["sockperf", *(words if rate else ["ping-pong"])]
    words += ["-i", address, "-p", SOCKPERF_PORT, "-t", max(SOCKPERF_LEAST_S, math.ceil(seconds))]
    words += ["-m", size] + (["--tcp"] if protocol == "tcp" else [])
    return sockperf_report(bounded(inside(space, *words), 3 * seconds + 30).stdout)


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
    return flood_report(bounded(command, count * 0.02 + 60).stdout)


def flood_report(text: str) -> tuple[int, int, list[float]]:
    """Reads ping's summary: sent, answered, and [least, mean, most] in µs."""
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
    """What a tool counted: replies per second, Mbit/s, the mean time of a reply, errors, and where
    it says so the bytes of all replies. Rates are None where its clock says that no time passed."""

    replies_s: float | None
    mbit_s: float | None
    reply_ms: float
    replies: int
    errors: int
    moved: float | None = None


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
        replies / seconds if seconds else None,
        replies * content * 8e-6 / seconds if seconds else None,
        sum(parts),
        replies,
        int(number(r"Errors: total (\d+)")),
    )


def httperf_words(
    address: str, path: str, sessions: int, requests: int, seconds: float
) -> list[object]:
    """httperf's command."""
    return [
        *("httperf", "--hog", "--server", address, "--port", 80, "--uri", path),
        *("--num-conns", sessions, "--num-calls", requests, "--rate", 1000, "--timeout", seconds),
    ]


def siege_report(text: str) -> Http:
    """Reads siege's summary. Its times have a resolution of 10 ms."""

    def number(name: str) -> float:
        found = re.search(rf"^{name}:\s+([\d.]+)", text, re.M)
        if not found:
            raise ToolError(f"siege's report has no {name!r}: {text.strip()[-300:]!r}")
        return float(found[1])

    seconds, replies = number("Elapsed time"), int(number("Transactions"))
    unit = re.search(r"^Data transferred:\s+[\d.]+ (\w+)", text, re.M)
    moved = number("Data transferred") * _BYTES[unit[1] if unit else "MB"]
    return Http(
        replies / seconds if seconds else None,
        moved * 8e-6 / seconds if seconds else None,
        number("Response time") * 1000,
        replies,
        int(number("Failed transactions")),
        moved,
    )


# Units of siege and of wrk: powers of 1,024, as both print them.
_BYTES = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_TIMES_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}
_SIEGERC = """\
verbose = false
logging = false
protocol = HTTP/1.1
connection = close
parser = false
failures = 1024
timeout = {seconds:.0f}
"""


def siege(
    space: object, address: str, path: str, sessions: int, requests: int, seconds: float
) -> Http:
    """`requests` by each of `sessions` users at the same time, without delays.

    Each request has a connection of its own, as some servers close them after one. Of a run below
    siege's 10 ms the rates are unknown.
    """
    with tempfile.TemporaryDirectory() as home:
        settings = Path(home) / "siegerc"
        settings.write_text(_SIEGERC.format(seconds=max(1, seconds)))
        words = ["siege", "-R", settings, "-b", "-c", sessions, "-r", requests]
        command = inside(space, "env", f"HOME={home}", *words, f"http://{address}{path}")
        done = bounded(command, 2 * seconds + 30)
    return siege_report(done.stdout + done.stderr)


def wrk_report(text: str) -> tuple[Http, dict]:
    """Reads wrk's report with --latency: what was counted, and percentiles of a reply in ms."""
    total = re.search(r"(\d+) requests in ([\d.]+)(us|ms|s|m), ([\d.]+)(\w?B) read", text)
    mean = re.search(r"Latency\s+([\d.]+)(us|ms|s|m)", text)
    parts = re.findall(r"^\s+(\d+)%\s+([\d.]+)(us|ms|s|m)", text, re.M)
    if not total or not mean or not parts:
        raise ToolError(f"no counts in wrk's report: {text.strip()[-300:]!r}")
    seconds = float(total[2]) * _TIMES_MS[total[3]] / 1000
    errors = 0
    if found := re.search(r"connect (\d+), read (\d+), write (\d+), timeout (\d+)", text):
        errors += sum(map(int, found.groups()))
    if found := re.search(r"Non-2xx or 3xx responses: (\d+)", text):
        errors += int(found[1])
    http = Http(
        int(total[1]) / seconds,
        float(total[4]) * _BYTES[total[5]] * 8e-6 / seconds,
        float(mean[1]) * _TIMES_MS[mean[2]],
        int(total[1]),
        errors,
    )
    return http, {f"p{part}": float(value) * _TIMES_MS[unit] for part, value, unit in parts}


def wrk(space: object, address: str, path: str, sessions: int, seconds: float) -> tuple[Http, dict]:
    """`sessions` connections that ask again and again, for a whole number of seconds."""
    words = ["wrk", "--latency", "-t", 1, "-c", sessions, "-d", f"{max(1, math.ceil(seconds))}s"]
    command = inside(space, *words, "--timeout", "30s", f"http://{address}{path}")
    return wrk_report(bounded(command, 3 * seconds + 60).stdout)


def httperf(
    space: object, address: str, path: str, sessions: int, requests: int, seconds: float
) -> Http:
    """`sessions` connections at the same time, `requests` over each, for a path of the server."""
    command = inside(space, *httperf_words(address, path, sessions, requests, seconds))
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
