"""The controller of the bypass is killed at every step, and loses what it manages: traffic continues, and nothing is left behind."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

from bypass_paths import PROGRAM, Host, has_ended, host
from lib import Namespace, Skip, alone, need_program, scratch, timeout, until
from lib.machine import SLOW
from lib.process import children

# What attaching and detaching ask of the kernel that stays when they are killed.
CALLS = ("bpf", "mount", "umount2", "mkdir", "rmdir", "unlink", "rename", "flock")


def traced(h, words, call, number, how, log="/dev/null"):
    """The command, which gets a signal when it enters a system call for the n-th time: strace's command line."""
    return ["strace", "-qq", "-o", str(log), "-e", f"trace={call}", "-e", f"inject={call}:signal={how}:when={number}", str(PROGRAM),
            "bypass", *words, "--netns", str(h.space)]


def environment(h):
    return dict(os.environ, TOMBOLO_RUNTIME=str(h.folder / "run"))


def is_killed(h, words, call, number):
    """Runs the command and kills it there; whether it came that far."""
    done = subprocess.run(traced(h, words, call, number, "KILL"), capture_output=True, text=True, timeout=20 * SLOW, env=environment(h))
    return done.returncode == -signal.SIGKILL


def after(call, number):
    """Which of these calls is the next to be killed at: of the many that make maps and load programs (bpf) every eighth."""
    return number + (1 if call != "bpf" or number < 4 else 8)


def nothing_is_left(h, before):
    h.cli("detach")
    assert not (h.folder / "run/bypass").exists(), list((h.folder / "run/bypass").rglob("*"))
    assert str(h.folder) not in Path("/proc/mounts").read_text()
    assert h.space.ip("-d", "link") == before


@timeout(600)
def test_attach_killed_at_every_step_leaves_traffic_flowing_and_nothing_that_detach_does_not_take():
    need_program("strace")
    with host() as h:
        before, kills = h.space.ip("-d", "link"), 0
        for call in CALLS:
            number = 1
            while is_killed(h, ["attach", "ta", "tb", "--mode", "xdp", "--no-controller"], call, number):
                assert h.across(h.udp()) and h.across(h.udp()), f"{call} {number}"
                if number % 4 == 1:
                    # The next process attaches over what it left.
                    done = h.attach(words=("--lease", "10000"))
                    assert "runs after" not in done.stderr, f"{call} {number}: {done.stderr}"
                    h.across(h.udp())
                    assert h.across(h.udp()) and h.taken() >= 1, f"{call} {number}"
                nothing_is_left(h, before)
                kills += 1
                number = after(call, number)
            h.cli("detach", check=False)
        print(f"{kills} kills")
        assert kills >= 20


@timeout(600)
def test_detach_killed_at_every_step_leaves_traffic_flowing_and_is_finished_by_the_next():
    need_program("strace")
    with host() as h:
        before, kills = h.space.ip("-d", "link"), 0
        for call in CALLS:
            number = 1
            while True:
                h.attach(words=("--lease", "10000", "--mode", "xdp", "--no-controller"))
                h.across(h.udp())
                if not is_killed(h, ["detach"], call, number):
                    break
                assert h.across(h.udp()) and h.across(h.udp()), f"{call} {number}"
                nothing_is_left(h, before)
                kills += 1
                number = after(call, number)
            h.cli("detach", check=False)
        print(f"{kills} kills")
        assert kills >= 15


def traced_frames(h):
    """What a trace tells of frames, until it has told of two."""
    command = [PROGRAM, "bypass", "trace", "ta", "--all", "--count", "2", "--seconds", "60", "--netns", str(h.space)]
    trace = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(h))
    until("the trace's end", lambda: h.across(h.udp()) and trace.poll() is not None)
    return trace.communicate()[0]


def test_traffic_leaves_the_bypass_with_its_keeper_where_that_is_asked_for_and_stays_where_not():
    for mode in ("tcx", "xdp"):
        with host() as h:
            def taken(h=h):
                before = h.taken()
                assert h.across(h.udp())
                return h.taken() > before

            h.attach("ta", "tb", words=("--lease", "10000", "--mode", mode, "--if-controller-dies", "leave"))
            until("frames to be taken", taken)
            # At once: however long it has run, frames are taken no longer than three seconds
            # without it.
            os.kill(h.status()["keeper"], signal.SIGKILL)
            begin = time.monotonic()
            # Single ones do so anyway, to ask the kernel again.
            until("frames to go the kernel's way", lambda: not any(taken() for _ in range(5)))
            assert time.monotonic() - begin < 8 * SLOW
            assert not any(taken() for _ in range(50))
            assert "up_off" in traced_frames(h)
            assert h.status()["needs_keeper"] and "so all traffic takes the kernel's path" in h.cli("status").stdout
            # Another keeper; that it is needed is as it was.
            h.attach("ta", "tb", words=("--mode", mode))
            until("frames to be taken again", taken)
            h.attach("ta", "tb", words=("--mode", mode, "--if-controller-dies", "stay"))
            keeper = h.status()["keeper"]
            os.kill(keeper, signal.SIGKILL)
            until("the controller's end", lambda k=keeper: has_ended(k))
            # Longer than frames are taken without one where it is needed.
            time.sleep(4)
            until("frames to be taken without a controller", taken)


@timeout(600)
def test_an_interface_that_goes_while_it_is_attached_leaves_nothing():
    need_program("strace")
    with host() as h:
        for number in (1, 20, 30, 35, 38, 40, 42, 45, 48):
            h.space.ip("link", "add", "gone", "type", "veth", "peer", "name", "other")
            log = h.folder / "strace"
            log.unlink(missing_ok=True)
            strace = subprocess.Popen(traced(h, ["attach", "gone", "ta", "--no-controller"], "bpf", number, "STOP", log), stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True, env=environment(h))
            try:
                (process,) = until("the command to run", lambda s=strace: children(s.pid, PROGRAM.name[:15]))
                stopped = lambda: log.exists() and "stopped by SIGSTOP" in log.read_text()  # noqa: E731
                until("it to be stopped", lambda s=strace: s.poll() is not None or stopped())
                h.space.ip("link", "del", "gone")
                if strace.poll() is None:
                    os.kill(process, signal.SIGCONT)
                said, _ = strace.communicate(timeout=60 * SLOW)
            finally:
                if strace.poll() is None:
                    os.kill(process, signal.SIGKILL)
                    strace.kill()
            assert "panicked" not in said, said
            assert strace.returncode == 0 or "gone" in said or "nterface" in said or "evice" in said, (number, strace.returncode, said)
            assert h.across(h.udp()) and h.across(h.udp())
            nothing_is_left(h, h.space.ip("-d", "link"))


def lone(folder, space):
    """A bypass's commands for a namespace that has a tap of its own and no reader behind it."""
    h = Host.__new__(Host)
    h.folder, h.space = folder, space
    space.ip("tuntap", "add", "lone", "mode", "tap")
    space.ip("link", "set", "lone", "up")
    return h


def test_a_namespace_that_is_deleted_takes_its_bypass_with_it():
    with host() as h, scratch() as folder, Namespace() as space:
        other = lone(folder, space)
        other.attach("lone")
        keeper = other.status()["keeper"]
        # One that is alive is left alone by the controller of the other.
        h.folder = folder
        h.attach("ta", "tb", words=("--lease", "10000"))
        subprocess.run(["ip", "netns", "del", str(space)], check=True)
        until("the controller's end", lambda: has_ended(keeper))
        left = [entry.name for entry in (folder / "run/bypass").iterdir() if entry.name.endswith(".json")]
        assert len(left) == 1, left
        h.across(h.udp())
        assert h.across(h.udp()) and h.taken() == 1
        h.cli("detach")
        assert not (folder / "run/bypass").exists()


def test_detach_everywhere_leaves_nothing_in_any_namespace():
    """Of one with a name, of one that only a process is in, of one that is gone, and of one whose record another version wrote."""
    with host() as h, scratch() as folder, Namespace() as unnamed, Namespace() as deleted, Namespace() as newer:
        h.folder = folder
        h.attach("ta", "tb")
        others = [lone(folder, space) for space in (unnamed, deleted, newer)]
        for other in others:
            other.attach("lone", words=("--no-controller",) if other.space is deleted else ())
        held = subprocess.Popen(["ip", "netns", "exec", str(unnamed), "sleep", "1000"])
        keepers = [one.status()["keeper"] for one in (h, others[0], others[2])]
        known = {path.name for path in (folder / "run/bypass").glob("*.json")}
        record = folder / f"run/bypass/{os.stat(f'/run/netns/{newer}').st_ino}.json"
        assert record.name in known and len(known) == 4, known
        record.write_text(re.sub(r'"version": \d+', '"version": 99', record.read_text()))
        try:
            for space in (unnamed, deleted):
                subprocess.run(["ip", "netns", "del", str(space)], check=True)
            env = dict(os.environ, TOMBOLO_RUNTIME=str(folder / "run"))
            command = [str(PROGRAM), "bypass", "detach", "--everywhere"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60 * SLOW, env=env)
            assert done.returncode == 0 and "ta detached" in done.stdout, done
            assert not (folder / "run/bypass").exists(), list((folder / "run/bypass").rglob("*"))
            # Also where another version's record does not say what is attached.
            assert h.programs_at("ta", "tb") == others[2].programs_at("lone") == 0
            for keeper in keepers:
                until("the controller's end", lambda pid=keeper: has_ended(pid))
            again = subprocess.run(command, capture_output=True, text=True, timeout=60 * SLOW, env=env)
            assert again.returncode == 0 and not (folder / "run/bypass").exists(), again
            h.across(h.udp())
        finally:
            held.kill()
            held.wait()


def test_what_a_deleted_namespace_left_without_a_keeper_goes_with_the_next_attach_anywhere():
    with host() as h, scratch() as folder, Namespace() as space:
        other = lone(folder, space)
        other.attach("lone", words=("--no-controller",))
        subprocess.run(["ip", "netns", "del", str(space)], check=True)
        h.folder = folder
        h.attach("ta", "tb", words=("--no-controller",))
        assert len([e for e in (folder / "run/bypass").iterdir() if e.name.endswith(".json")]) == 1
        h.cli("detach")
        assert not (folder / "run/bypass").exists()


# Namespaces that other tests make meanwhile take the number.
@alone
def test_what_a_deleted_namespace_left_goes_also_where_another_has_its_number():
    with host() as h, scratch() as folder, Namespace() as space, Namespace() as later:
        lone(folder, space).attach("lone", words=("--no-controller",))
        number = space.number()
        subprocess.run(["ip", "netns", "del", str(space)], check=True)
        try:
            until("the number", lambda: later.has_again(number), 60 * SLOW, 0.1)
        except TimeoutError:
            raise Skip("the kernel has not given the namespace's number again in a minute") from None
        inside = subprocess.Popen(["ip", "netns", "exec", str(later), "sleep", "1000"])
        try:
            until("the process to be inside", lambda: os.stat(f"/proc/{inside.pid}/ns/net").st_ino == number)
            h.folder = folder
            h.attach("ta", "tb", words=("--no-controller",))
            assert len(list((folder / "run/bypass").glob("*.json"))) == 1
            h.cli("detach")
        finally:
            inside.kill()
            inside.wait()
        assert not (folder / "run/bypass").exists()
