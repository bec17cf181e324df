"""Stacks of functions by perf(1): where the time of a load goes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tombolo_lab import harness
from tombolo_lab.workloads import tools

FREQUENCY = 4999
LEAST_SAMPLES = 50


def is_available() -> bool:
    """Whether perf can sample here: it is installed, and allowed to look into the kernel."""
    return shutil.which("perf") is not None and os.geteuid() == 0


@contextlib.contextmanager
def recording(file: Path, cpu: int) -> Iterator[None]:
    """`perf record` of one CPU over what runs within the `with`; it has acknowledged that it
    samples before that begins. Without hardware counters samples come from a timer."""
    (control, commands), (acknowledged, acknowledge) = os.pipe(), os.pipe()
    command = ["perf", "record", "-q", "-F", str(FREQUENCY), "-g", "-C", str(cpu), "-o", str(file)]
    command += ["-D", "-1", f"--control=fd:{control},{acknowledge}"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(control, acknowledge),
    ) as process:
        os.close(control)
        os.close(acknowledge)
        try:
            os.write(commands, b"enable\n")
            if not os.read(acknowledged, 16).startswith(b"ack"):
                raise tools.ToolError(
                    f"`{' '.join(command)}` ended: {process.stderr.read()[-300:]}"
                )
            yield
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        finally:
            process.kill()
            os.close(commands)
            os.close(acknowledged)


def of_calls(text: str, calls: tuple[str, ...]) -> Counter[str]:
    """Stacks below one of some system calls, of what `perf script` printed: functions outermost
    first, separated by semicolons → samples."""
    found: Counter[str] = Counter()
    for block in text.split("\n\n"):
        names = []
        for line in reversed(block.strip().splitlines()[1:]):
            if " " in line.strip():
                name = line.split(None, 1)[1].rsplit(" (", 1)[0]
                names.append(re.sub(r"\+0x[0-9a-f]+$", "", name).replace(";", ","))
        names = [re.sub(r"^bpf_prog_[0-9a-f]{16}_", "bpf: ", name) for name in names]
        start = next((names.index(call) for call in calls if call in names), None)
        if start is not None:
            found[";".join(name for name in names[start + 1 :] if name not in calls)] += 1
    return found


def of_writes(file: Path, command: str) -> Counter[str]:
    """The stacks of the write calls of a program, from what `recording` left."""
    words = ["perf", "script", "-i", str(file), "--comms", command, "-F", "comm,ip,sym,dso"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    found = of_calls(done.stdout, ("__x64_sys_write", "ksys_write"))
    if found.total() < LEAST_SAMPLES:
        raise tools.ToolError(
            f"perf saw {found.total()} samples of writes: is kernel.kptr_restrict or "
            f"perf_event_paranoid in the way? perf script ended with {done.returncode}, "
            f"{len(done.stdout)} bytes: {done.stderr.strip()[-200:]}"
        )
    return found


@contextlib.contextmanager
def file_of_samples() -> Iterator[Path]:
    """Where `recording` writes to."""
    with harness.scratch() as folder:
        yield folder / "perf.data"
