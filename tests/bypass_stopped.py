"""A keeper that is stopped: seen, without effect on what leases promise, and replaced."""

import os
import signal
import time

from bypass_fabric import bypass_of, world
from bypass_paths import B, MAC_B, has_ended, host
from bypass_together import keepers_of
from lib import timeout, until
from lib.machine import SLOW
from lib.frames import mac_bytes

OTHER_MAC = "02:00:00:00:0b:77"
# How long a keeper may do nothing before it counts as stopped (controller.rs).
SILENT_S = 5


def stop(h):
    keeper = h.status()["keeper"]
    os.kill(keeper, signal.SIGSTOP)
    return keeper


def is_up(h):
    line = next(x for x in h.cli("status", "--metrics").stdout.splitlines() if x.startswith("tombolo_bypass_up{"))
    return int(line.split()[-1])


def test_a_stopped_keeper_is_seen_and_the_next_attach_replaces_it():
    with host() as h:
        h.attach(words=("--lease", "200"))
        assert is_up(h) and h.status()["keeper_fault"] is None
        keeper = stop(h)
        until("it to be seen", lambda: not is_up(h), 15)
        report = h.status()
        assert report["keeper"] == keeper and f"process {keeper}, is stopped" in report["keeper_fault"], report
        assert "`tombolo bypass attach` replaces it" in h.cli("status").stdout
        # Traffic goes on.
        before = h.taken()
        assert all(h.across(h.udp()) for _ in range(20)) and h.taken() > before
        h.attach()
        other = h.status()
        assert has_ended(keeper) and other["keeper"] not in (None, keeper) and other["keeper_fault"] is None, other
        assert is_up(h) and keepers_of(h) == [other["keeper"]]
        # One that goes on where it was stopped is at work, and stays. On a machine that gives it no
        # turn for `SILENT_S` it is replaced again, rightly, so the next one is tried.
        for _ in range(5):
            keeper = stop(h)
            until("it to be seen", lambda: not is_up(h), 15)
            went_on = time.monotonic()
            os.kill(keeper, signal.SIGCONT)
            until("it to be at work", lambda: is_up(h), 5)
            h.attach()
            took, now = time.monotonic() - went_on, h.status()["keeper"]
            assert now == keeper or took > SILENT_S, f"replaced {took:.1f} s after it went on"
            if now == keeper:
                break
        assert now == keeper, "none of five was at work for long enough"
        # Detach waits for no process that is stopped.
        stop(h)
        h.cli("detach")
        until("its end", lambda: has_ended(keeper), 5)
        assert not (h.folder / "run/bypass").exists()


def test_a_keeper_that_is_stopped_with_the_lock_in_its_hand_holds_nothing_up_for_long():
    with host() as h:
        h.attach()
        keeper = h.status()["keeper"]
        for _ in range(2000):
            os.kill(keeper, signal.SIGSTOP)
            until("it to stop", lambda: open(f"/proc/{keeper}/stat").read().rsplit(") ", 1)[1][0] == "T")
            inode = os.stat(h.folder / "run/bypass").st_ino
            if any(f" {keeper} " in line and line.split()[5].endswith(f":{inode}") for line in open("/proc/locks") if "->" not in line):
                break
            os.kill(keeper, signal.SIGCONT)
            time.sleep(0.0005)
        else:
            print("it was never met in it; what follows is the plain case")
            stop(h)
        begin = time.monotonic()
        until("another controller", lambda: h.attach() and h.status()["keeper"] != keeper, 30)
        assert has_ended(keeper) and time.monotonic() - begin < 15 * SLOW
        h.cli("detach")
        assert not (h.folder / "run/bypass").exists()


def test_no_flow_outlives_its_lease_while_the_keeper_is_stopped():
    for mode in ("tcx", "xdp"):
        with host() as h:
            h.attach(words=("--lease", "3000", "--mode", mode))
            h.across(h.udp())
            assert h.across(h.udp()) and h.taken() == 1
            stop(h)
            # A neighbour that moves is what only a controller tells before the lease ends.
            h.space.ip("neighbour", "replace", B, "lladdr", OTHER_MAC, "dev", "tb", "nud", "permanent")
            begin, old, frames = time.monotonic(), 0, 0
            while time.monotonic() < begin + 8:
                sent = time.monotonic()
                got = h.across(h.udp())
                assert got
                frames += 1
                if got[1][:6] == mac_bytes(MAC_B):
                    # Half a second for a machine that has much else to do between the clock and the
                    # frame.
                    assert sent - begin < 3.5, f"{mode}: {sent - begin:.1f} s after the change"
                    old += 1
                time.sleep(0.01)
            print(f"{mode}: {old} of {frames} frames went the old way, all within the lease")
            assert frames > 50 and h.taken() > frames / 2, (frames, h.status("ta"))


def test_frames_leave_the_bypass_with_a_stopped_keeper_where_it_is_needed():
    with host() as h:
        h.attach(words=("--lease", "10000", "--if-controller-dies", "leave"))

        def taken():
            before = h.taken()
            assert h.across(h.udp())
            return h.taken() > before

        until("frames to be taken", taken)
        stop(h)
        begin = time.monotonic()
        until("frames to go the kernel's way", lambda: not any(taken() for _ in range(5)))
        assert time.monotonic() - begin < 8 * SLOW
        until("it to be seen", lambda: h.status()["keeper_fault"], 15)
        assert "and all traffic takes the kernel's path" in h.cli("status").stdout
        h.attach()
        until("frames to be taken again", taken)


@timeout(300)
def test_a_fabrics_daemon_replaces_a_keeper_that_is_stopped_or_killed():
    import json
    with world() as w:
        with w.up() as fabric:
            keeper = lambda: json.loads(w.bypass("status", "--json"))["keeper"]  # noqa: E731
            first = keeper()
            os.kill(first, signal.SIGSTOP)
            until("its end", lambda: has_ended(first), 30)
            second = until("another controller", keeper, 30)
            assert second != first
            until("the bypass to work", lambda: bypass_of(fabric)["fault"] is None, 10)
            os.kill(second, signal.SIGKILL)
            third = until("a third controller", lambda: keeper() not in (None, second) and keeper(), 30)
            w.talk()
            fabric.cli("down")
            assert w.attached() == {}
            until("the last controller's end", lambda: has_ended(third))
            fabric.nothing_left()
