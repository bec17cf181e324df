"""The process that clears up after a run, also when the run is killed. A program of its own.

usage: python3 sweeper.py TOKEN

The runner starts it before anything else, holds its standard input open, and reads from its
standard output the folder that it made for the run's files. Lines of JSON on standard input tell it
what else there is: {"keep": [PATH, TEXT]} for a kernel setting that is to have TEXT again,
{"forget": PATH} when the runner restored the last one of this path, {"end": true} at the end.

At that moment, or when the runner ends in any other way:

1. every process of the run is killed: those with the token in their environment, those that hold
   the runner's end of the pipe (children that never called exec), and those with the folder in
   their command line;
2. settings are restored, the last one first;
3. the folder is removed.

It ignores the signals of a terminal and has a session of its own, so Ctrl-C does not reach it.
It imports the standard library only: it is started with `-I -S`.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time

VARIABLE = "TOMBOLO_LAB_RUN"
# How long processes of the run have to be gone; what is still there then cannot be killed.
ENDING_S = 15


def read(path):
    """The bytes of a file in /proc; none when its process is gone or another user's."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def holds(pid, pipe):
    """Whether a process has the write end of our standard input."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path) == pipe:
                    return True
    return False


def belongs(pid, token, folder, pipe):
    """Whether a process is one of the run."""
    mark = f"{VARIABLE}={token}\0".encode()
    if mark in read(f"/proc/{pid}/environ") + b"\0":
        return True
    # The slash: a folder whose name begins so is another's.
    words = read(f"/proc/{pid}/cmdline").replace(b"\0", b"/\0")
    return f"{folder}/".encode() in words or holds(pid, pipe)


def name_of(pid):
    return read(f"/proc/{pid}/comm").decode(errors="replace").strip()


def processes(token, folder, pipe, spared):
    """The living processes of the run."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in spared and belongs(entry, token, folder, pipe):
            state = read(f"/proc/{entry}/stat").rpartition(b")")[2].split()
            if state and state[0] not in (b"Z", b"X"):
                found.append(int(entry))
    return found


def kill(pid, token, folder, pipe):
    """SIGKILL to a process of the run, and not to one that has its number since."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if belongs(pid, token, folder, pipe):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def kill_all(token, folder, pipe, spared):
    """Kills the processes of the run until none is left; gives the names of those that it met."""
    names, deadline = set(), time.monotonic() + ENDING_S
    while (found := processes(token, folder, pipe, spared)) and time.monotonic() < deadline:
        names.update(map(name_of, found))
        for pid in found:
            kill(pid, token, folder, pipe)
        time.sleep(0.01)
    return sorted(filter(None, names))


def restore(path, text):
    """Gives a setting the text again that was read from it. That of a group of tasks (autogroup of
    sched(7)) reads "/autogroup-N nice M", takes M, and is reached by any process in the group: the
    runner's own file is gone when the runner is."""
    if not path.endswith("/autogroup"):
        with open(path, "w") as file:
            file.write(text)
        return
    group, _, niceness = text.strip().rpartition(" nice ")
    for pid in ["self", *filter(str.isdigit, os.listdir("/proc"))]:
        there = f"/proc/{pid}/autogroup"
        if read(there).startswith(f"{group} ".encode()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                with open(there, "w") as file:
                    file.write(niceness)
                return


def listen(parent, settings):
    """Reads what the runner tells, until it ends or closes the pipe."""
    pidfd, rest = None, b""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(parent)
    if pidfd is None or os.getppid() != parent:
        return
    while True:
        ready, _, _ = select.select([0, pidfd], [], [])
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                told = json.loads(line)
                if "keep" in told:
                    settings.append(told["keep"])
                elif "forget" in told:
                    last = max(n for n, (path, _) in enumerate(settings) if path == told["forget"])
                    del settings[last]
                else:
                    return
                # The runner goes on when its word has arrived.
                os.write(1, b".")
        elif pidfd in ready:
            return


def main():
    token, parent = sys.argv[1], os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    # Short, since the path of a socket ends at 107 bytes.
    folder = tempfile.mkdtemp(prefix="tlab-", dir="/tmp")
    pipe = os.readlink("/proc/self/fd/0")
    settings = []
    try:
        with contextlib.suppress(BrokenPipeError):
            os.write(1, f"{folder}\n".encode())
            listen(parent, settings)
    finally:
        # The runner itself, when it lives, waits for the names.
        spared = {os.getpid(), parent if os.getppid() == parent else 0}
        names = kill_all(token, folder, pipe, spared)
        for path, text in reversed(settings):
            with contextlib.suppress(OSError):
                restore(path, text)
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(BrokenPipeError):
            os.write(1, json.dumps(names).encode() + b"\n")


if __name__ == "__main__":
    main()
