"""Time limits and signals of a run. Both raise exceptions in the main thread, wherever it is."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tombolo_lab.workloads import PointTimeout

# An exception that a workload swallows comes again after so long.
ALARM_AGAIN_S = 60
STANDARD_LIBRARY = str(Path(os.__file__).parent)
# Frames of these modules are not what a point waits for.
_OURS = ("lib.", __name__, "tombolo_lab.runner")


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt once; the cleanup is not interrupted."""

    def stop(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        # The cleanup has time limits of its own; a time limit of the point must not break it.
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def time_limit(expected_s: float) -> float:
    """How long something may take that is expected to take `expected_s`."""
    return 3 * expected_s + 60


@contextlib.contextmanager
def limited(seconds: float, what: str) -> Iterator[None]:
    """PointTimeout in the main thread when the `with` takes longer; it says what was waited for.

    A workload that swallows it meets it again after `ALARM_AGAIN_S`.
    """

    def expire(_: int, frame: FrameType | None) -> None:
        waiting = waiting_for(frame)
        raise PointTimeout(f"{what} took more than {seconds:.0f} s, waiting for {waiting}")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds, ALARM_AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def waiting_for(frame: FrameType | None) -> str:
    """What a stack waits for: the name that `until` of tests/lib was given, a process's line or
    end, and the line of the workload."""
    what = place = ""
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if not what and module == "lib.process":
            name = getattr(frame.f_locals.get("self"), "name", "")
            if function == "until":
                what = str(frame.f_locals.get("what"))
            elif function in ("wait_line", "wait", "stop") and name:
                what = f"{name}: {'a line of output' if function == 'wait_line' else 'its end'}"
        path = frame.f_code.co_filename
        is_library = module.startswith(_OURS) or path.startswith((STANDARD_LIBRARY, "<"))
        if not place and not is_library:
            place = f"{Path(path).name}:{frame.f_lineno} ({function})"
        frame = frame.f_back
    return ", ".join(filter(None, [what, place])) or "nothing that is known"
