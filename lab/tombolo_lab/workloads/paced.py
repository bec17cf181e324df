"""The paced generator and its sink, paced.c: exact rates, numbered datagrams, all round trips.

    with paced.sink(space_b, "udp", 7000):
        row = paced.send(space_a, address, "udp", size=1024, rate=3000, seconds=2, port=7000)
        row["sent"], row["received"]

`./x lab-tools` builds it. It is looked for in the folder TOMBOLO_LAB_TOOLS, and in build/lab-tools
of the checkout. paced.c says how it keeps a rate and what it counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from tombolo_lab import LabError, harness
from tombolo_lab.workloads import Skip, tools

SOURCE = Path(__file__).with_name("paced.c")
IPERF_PORT, ECHO_PORT = 5001, 7
# What the source's limits are.
LEAST_DATAGRAM, LEAST_MESSAGE, MOST_BYTES = 40, 16, 65507
MOST_NUMBERS = (1 << 24) - 1
# Bytes where an experiment leaves them open: those of iperf 2.
BYTES = {"udp": 1470, "tcp": 65500}
# What times round trips runs before all that it measures. What only sends runs like others.
NICENESS = {"trip": -20, "send": 0}
_OFFERED = re.compile(r"([0-9]*\.?[0-9]+)(pps|[kKmMgG]?)")
_SCALE = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}


def program(name: str = "paced") -> Path:
    """The program, or another one that `./x lab-tools` builds; Skip when it is not built."""
    named = os.environ.get("TOMBOLO_LAB_TOOLS")
    found = (Path(named) if named else harness.tree() / "build/lab-tools") / name
    if not found.is_file():
        raise Skip(f"{found} is not built: run ./x lab-tools")
    harness.measured(found)
    return found.absolute()


def rate_of(offered: str, size: int) -> float:
    """Datagrams or writes a second of an offered rate: "400pps", or bits a second of payload such
    as "20M"; "" is 0, as fast as it goes. LabError for other texts."""
    if not offered:
        return 0.0
    found = _OFFERED.fullmatch(offered)
    if not found:
        raise LabError(f'offered: expected a rate such as "400pps" or "20M", found {offered!r}')
    value, unit = float(found[1]), found[2].lower()
    return value if unit == "pps" else value * _SCALE[unit] / 8 / size


def check(protocol: str, size: int, offered: str, seconds: float) -> None:
    """LabError when the program would not take this load, Skip when it is not built."""
    program()
    least = LEAST_DATAGRAM if protocol == "udp" else LEAST_MESSAGE
    if not least <= size <= MOST_BYTES:
        raise LabError(f"size: expected {least} to {MOST_BYTES} B with {protocol}, found {size}")
    if (count := rate_of(offered, size) * seconds) > MOST_NUMBERS:
        raise LabError(f"{offered} for {seconds:g} s: expected at most {MOST_NUMBERS} numbers, "
                       f"found {count:.0f}")  # fmt: skip


def row_of(text: str) -> dict:
    """What the program printed; ToolError where it is no JSON, such as a complaint."""
    try:
        return json.loads(text)
    except ValueError:
        raise tools.ToolError(f"paced: expected a line of JSON, found {text[-300:]!r}") from None


def _run(space: object, mode: str, protocol: str, words: list[object], seconds: float) -> dict:
    command = ["nice", "-n", NICENESS[mode], program(), mode, protocol, *words]
    done = tools.bounded(tools.inside(space, *command), 3 * seconds + 60)
    if done.returncode:
        raise tools.ToolError(done.stderr.strip() or f"paced: ended with {done.returncode}")
    row = row_of(done.stdout)
    if row["received"] > row["sent"] or not row["sent"]:
        raise tools.ToolError(f"paced: {row['received']} of {row['sent']} that were sent arrived")
    return row


def send(
    space: object,
    address: str,
    protocol: str,
    size: int,
    rate: float,
    seconds: float,
    port: int = IPERF_PORT,
) -> dict:
    """One way, to a sink or iperf 2's server: due, sent, sent_seconds, late_us, received, bytes,
    seconds; for UDP out_of_order and jitter_us, for TCP retransmitted."""
    return _run(space, "send", protocol, [address, port, size, rate, seconds], seconds)


def trip(
    space: object,
    address: str,
    protocol: str,
    size: int,
    rate: float,
    seconds: float,
    port: int = ECHO_PORT,
) -> dict:
    """To an echo server and back: as `send`, with duplicates, `rtt_us` (count, min, mean, p50, p90,
    p99, p999, p9999, max) and `rtt_us_values`, at most 2,000 of evenly spaced ranks."""
    return _run(space, "trip", protocol, [address, port, size, rate, seconds], seconds)


@contextlib.contextmanager
def sink(
    space: object, protocol: str, port: int, buffer: int = 0, latency: bool = False
) -> Iterator[object]:
    """A sink in a namespace, while it listens. `reports(process)` gives what it has counted."""
    words: list[object] = [program(), "sink", protocol, port, buffer]
    if latency:
        words.append("latency")
    with harness.Process(words, netns=space, own_mounts=False) as process:
        table = Path(f"/proc/{process.pid}/net/{protocol}")
        harness.until("the sink's port", lambda: f":{port:04X} " in table.read_text(), 20)
        yield process


def reports(process: object) -> list[dict]:
    """What a UDP sink has printed of senders that have ended."""
    return [row_of(line) for line in process.text.splitlines() if line.startswith("{")]
