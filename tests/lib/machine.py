"""Where things are, and what a test may ask of the machine it runs on."""

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build"
# By what the time limits of tests are multiplied: an emulated guest (tests/kernels.py) is slower
# than any machine.
SLOW = float(os.environ.get("TOMBOLO_SLOW", "1"))
# Daemons and network tools live here, which a user's PATH often lacks.
os.environ["PATH"] = os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"


def built(name):
    """What `./x build` made: a program, or `examples/NAME`."""
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / name


class Skip(Exception):
    """Raised by a test that cannot run here; its text is the reason and is printed."""


def need_program(name):
    """The path of a program, or a skip that names it."""
    path = shutil.which(name)
    if not path:
        raise Skip(f"{name} is not installed")
    return path


def need_root():
    """Skips where namespaces and devices cannot be made."""
    if os.geteuid() != 0:
        raise Skip("needs root: it makes network namespaces and taps")


def timeout(seconds):
    """Bounds one test; without it the runner's default of 300 s holds."""

    def mark(test):
        test.timeout_s = seconds
        return test

    return mark


def alone(test):
    """Marks a test that needs the machine for itself, such as one that compares speeds: no other test runs beside it."""
    test.alone = True
    return test
