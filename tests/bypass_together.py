"""Many commands at once over one bypass: each waits for the other, what said that it attached has attached, and nothing stays behind the last detach."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading

from bypass_paths import PROGRAM, has_ended, host
from lib import need_program, timeout, until
from lib.machine import SLOW

TIMES = int(os.environ.get("TOMBOLO_TIMES", "1"))


def command(h, *words):
    return [str(PROGRAM), "bypass", *words, "--netns", str(h.space)]


def begin(h, *words):
    """A command of the bypass, as a process that is not waited for."""
    return subprocess.Popen(command(h, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=dict(os.environ, TOMBOLO_RUNTIME=str(h.folder / "run")))


def taps(h, count):
    """Taps that no process holds."""
    names = [f"many{n}" for n in range(count)]
    for name in names:
        h.space.ip("tuntap", "add", name, "mode", "tap")
        h.space.ip("link", "set", name, "up")
    return names


def works(h):
    """Whether frames from A to B are taken."""
    def taken():
        before = h.taken()
        # Some in a row: a slow guest asks for the counters for longer than a lease.
        assert all(h.across(h.udp()) for _ in range(4))
        return h.taken() > before

    until("frames to be taken", taken)
    for name in ("ta", "tb"):
        assert h.programs_at(name) == 2, name


def nothing_is_left(h, keepers=()):
    h.cli("detach")
    assert not (h.folder / "run/bypass").exists(), list((h.folder / "run/bypass").rglob("*"))
    for keeper in keepers:
        until("the controller's end", lambda k=keeper: has_ended(k))


@timeout(300)
def test_of_two_first_attaches_at_once_none_destroys_the_other():
    with host() as h:
        for _ in range(25 * TIMES):
            both = [begin(h, "attach", name) for name in ("ta", "tb")]
            said = [p.communicate(timeout=60 * SLOW) for p in both]
            assert [p.returncode for p in both] == [0, 0], said
            assert {i["name"] for i in h.status()["interfaces"]} == {"ta", "tb"}, (said, h.status())
            keeper = h.status()["keeper"]
            assert keeper, said
            works(h)
            nothing_is_left(h, [keeper])


@timeout(600)
def test_two_hundred_attaches_at_once_leave_one_bypass_of_all_that_said_attached():
    """Each process by itself, of which some are killed in the midst: what they had not said is nowhere in the way."""
    with host() as h:
        for kills in (0, 25):
            names = ["ta", "tb", *taps(h, 18)]
            running = [(name, begin(h, "attach", name)) for _ in range(10) for name in names]
            victims = random.sample(running[len(names):], kills)
            for _, process in victims:
                threading.Timer(random.random() * 4, process.send_signal, [signal.SIGKILL]).start()
            ends = [(name, process, *process.communicate(timeout=300 * SLOW)) for name, process in running]
            for name, process, out, error in ends:
                killed = (name, process) in victims and process.returncode == -signal.SIGKILL
                assert killed or process.returncode == 0, (name, process.returncode, out, error)
                assert killed or out.startswith(f"{name} "), (name, out)
            report = h.status()
            assert sorted(i["name"] for i in report["interfaces"]) == sorted(names), report
            # One of each name was the first, but for those whose first was killed behind it.
            firsts = [name for name, _, out, _ in ends if "attached in" in out]
            assert len(firsts) == len(set(firsts)) and (kills or len(firsts) == len(names)), firsts
            # One that a killed command had started ends when it finds another at work.
            until("one controller", lambda: keepers_of(h) == [h.status()["keeper"]])
            keepers = keepers_of(h)
            works(h)
            nothing_is_left(h, keepers)
            for name in names[2:]:
                h.space.ip("link", "del", name)


@timeout(120)
def test_an_attach_beside_another_whose_controller_starts_starts_none():
    """It waits for that, which has the lock from its first moment: 200 at once had started fifteen, each in the way of the others."""
    need_program("strace")
    with host() as h:
        log = h.folder / "strace"
        # The controller makes a session of its own before anything else.
        slowly = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", str(log), "-e", "trace=setsid", "-e", "inject=setsid:delay_enter=2s"]
        environment = dict(os.environ, TOMBOLO_RUNTIME=str(h.folder / "run"))
        first = subprocess.Popen([*slowly, *command(h, "attach", "ta")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        try:
            until("the first one's controller to start", lambda: keepers_of(h) or first.poll() is not None)
            second = begin(h, "attach", "tb")
            said = second.communicate(timeout=60 * SLOW)
            assert second.returncode == 0, said
            keeper = h.status()["keeper"]
            assert [int(line.split()[0]) for line in log.read_text().splitlines() if "setsid" in line] == [keeper], (keeper, log.read_text(), said)
            works(h)
            nothing_is_left(h, [keeper])
            # strace follows the controller to its end.
            assert first.wait(60 * SLOW) == 0, first.stdout.read()
        finally:
            first.kill()
            first.communicate()


def keepers_of(h):
    """Processes that keep in this namespace."""
    there = h.space.run("readlink", "/proc/self/ns/net").stdout.strip()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\0")
            if words[1:3] == [b"bypass", b"keep"] and os.readlink(f"/proc/{pid}/ns/net") == there:
                found.append(int(pid))
        except OSError:
            pass
    return found


@timeout(600)
def test_attaches_beside_detaches_and_kills_end_in_one_state_or_the_other():
    with host() as h:
        for turn in range(12 * TIMES):
            running = [begin(h, "attach", "ta", "tb") if n % 2 else begin(h, "detach") for n in range(8)]
            victim = running[turn % 8] if turn % 3 == 0 else None
            if victim:
                threading.Timer(random.random() * 0.4, victim.send_signal, [signal.SIGKILL]).start()
            for process in running:
                out, error = process.communicate(timeout=120 * SLOW)
                assert process.returncode == 0 or process is victim, (turn, process.args, process.returncode, out, error)
            names = {i["name"] for i in h.status()["interfaces"]}
            assert names in (set(), {"ta", "tb"}), names
            programs = h.programs_at("ta", "tb")
            # A killed one may have left programs that no record names; the next command takes them.
            assert victim or programs == 2 * len(names), (programs, names)
            h.attach("ta", "tb")
            works(h)
            nothing_is_left(h)
        until("all controllers' ends", lambda: not keepers_of(h))


@timeout(300)
def test_a_command_that_hangs_with_the_lock_is_named_and_one_that_is_killed_frees_it():
    with host() as h:
        h.attach("ta", "tb")
        before = h.status()
        hold = f"import fcntl, os, time; fcntl.flock(os.open('{h.folder}/run/bypass', os.O_RDONLY), fcntl.LOCK_EX); print('held', flush=True); time.sleep(600)"
        holder = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
        try:
            assert holder.stdout.readline() == "held\n"
            done = subprocess.run(command(h, "detach"), capture_output=True, text=True, timeout=150,
                                  env=dict(os.environ, TOMBOLO_RUNTIME=str(h.folder / "run")))
            assert done.returncode == 1 and re.search(rf"locked for 6\d s by process {holder.pid} \(python", done.stderr), done
            # Who only looks, and the keeper, need no lock.
            assert {**h.status(), "interfaces": []} == {**before, "interfaces": []} and h.status("ta")["index"]
            waits = begin(h, "detach")
            assert waits.poll() is None
        finally:
            holder.kill()
            holder.wait()
        out, error = waits.communicate(timeout=60 * SLOW)
        assert out == "ta detached\ntb detached\n", (out, error)
        assert json.loads(h.cli("status", "--json").stdout)["attached"] is False
        assert not (h.folder / "run/bypass").exists()
