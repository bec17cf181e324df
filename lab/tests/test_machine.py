"""Meters and conditions, on the machine that the tests run on."""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import unittest
import unittest.mock
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tombolo_lab import LabError, machine
from tombolo_lab.machine import Meter, Usage

BURN = (
    "import os, time\nos.nice(10)\nend = time.monotonic() + {}\nwhile time.monotonic() < end: pass"
)
SPAN_S = 0.6


def burn(seconds=SPAN_S):
    """A child that works for so long."""
    return subprocess.Popen([sys.executable, "-S", "-c", BURN.format(seconds)])


def burn_elsewhere(seconds=SPAN_S):
    """The PID of a process that works for so long and is no descendant of this one.

    Its parent ends at once, so it is adopted by a process above us."""
    script = f"{sys.executable} -S -c '{BURN.format(seconds)}' >/dev/null 2>&1 & echo $!"
    return int(subprocess.run(["sh", "-c", script], capture_output=True, text=True).stdout)


def worked(pid, seconds=0.2, limit_s=50):
    """Waits until a process has had so much CPU time: on a busy machine it may have to wait."""
    begun, end = machine.process_cpu_ns(pid), time.monotonic() + limit_s
    while machine.process_cpu_ns(pid) - begun < seconds * 1e9:
        if time.monotonic() > end:
            raise AssertionError(f"process {pid} had no CPU for {limit_s} s")
        time.sleep(0.05)


def usage(**changed):
    names = ("ours", "others", "kernel", "irq", "softirq", "stolen")
    values = {"seconds": 1.0, **{f"{name}_cpus": 0.0 for name in names}}
    return Usage(**{**values, "interrupts_s": 0.0, "context_switches_s": 0.0, **changed})


class Cpu(unittest.TestCase):
    def test_what_a_child_takes_is_ours_while_it_runs(self):
        child = burn(5)
        try:
            time.sleep(0.1)
            with Meter({"child": child.pid}) as meter:
                time.sleep(SPAN_S)
        finally:
            child.kill()
            child.wait()
        self.assertGreater(meter.usage.ours_cpus, 0.1)
        self.assertGreater(meter.usage.processes["child"].cpus, 0.1)
        self.assertAlmostEqual(meter.usage.seconds, SPAN_S, delta=0.5)

    def test_what_a_child_took_that_has_ended_is_ours(self):
        # So much of its own CPU time, however long a busy machine takes to give it.
        script = "import time\nwhile time.process_time() < 0.2: pass"
        with Meter() as meter:
            subprocess.run([sys.executable, "-S", "-c", script], check=True)
        self.assertGreater(meter.usage.ours_cpus * meter.usage.seconds, 0.15)

    def test_what_a_process_elsewhere_takes_is_another_ones(self):
        pid = burn_elsewhere(60)
        try:
            with Meter({"it": pid}) as meter:
                worked(pid)
        finally:
            os.kill(pid, signal.SIGKILL)
        self.assertGreater(meter.usage.others_cpus, 0)
        self.assertGreaterEqual(meter.usage.others_cpus + 0.05, meter.usage.processes["it"].cpus)

    def test_a_process_that_ends_hides_nothing_of_the_others(self):
        def task(ticks, parent=1):
            return machine._Task(parent, False, ticks)

        # 7 ends unseen with 500 ticks; 8 took 30 meanwhile.
        then = {7: task(500), 8: task(100)}
        self.assertEqual(machine._spent(then, {8: task(130)}), 30)
        # Its parent 9 waited: of the child's 520 ticks 20 are of this time.
        then = {7: task(500, parent=9), 9: task(10)}
        self.assertEqual(machine._spent(then, {9: task(530)}), 20)
        # 9 has ended too, and its parent 10 waited for it: of 540 ticks 20 are of this time.
        then = {7: task(500, parent=9), 9: task(10, parent=10), 10: task(10)}
        self.assertEqual(machine._spent(then, {10: task(540)}), 20)
        # One that is new took all of its time in the span.
        self.assertEqual(machine._spent({}, {5: task(12)}), 12)

    def test_sleeping_takes_nothing(self):
        with Meter() as meter:
            time.sleep(SPAN_S)
        self.assertLess(meter.usage.ours_cpus, 0.1)

    def test_switches_and_wakeups_are_counted_per_second(self):
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", "import time\nwhile True: time.sleep(0.01)"]
        )
        try:
            time.sleep(0.2)
            with Meter({"child": child.pid}) as meter:
                time.sleep(SPAN_S)
        finally:
            child.kill()
            child.wait()
        self.assertGreater(meter.usage.processes["child"].wakeups_s, 20)
        self.assertLess(meter.usage.processes["child"].wakeups_s, 150)
        self.assertGreater(meter.usage.context_switches_s, 20)
        self.assertGreaterEqual(meter.usage.interrupts_s, 0)
        self.assertIn("NET_RX", meter.usage.softirqs_s)

    def test_a_process_that_is_gone_counts_as_nothing(self):
        child = burn(0)
        child.wait()
        with Meter({"gone": child.pid}) as meter:
            pass
        self.assertEqual(meter.usage.processes["gone"].cpus, 0)

    def test_so_far_grows(self):
        with Meter() as meter:
            first = meter.so_far().seconds
            time.sleep(0.02)
            self.assertGreater(meter.so_far().seconds, first)

    def test_names_with_brackets_do_not_confuse(self):
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(15, b") R 1 (x", 0, 0, 0)  # PR_SET_NAME
            time.sleep(20)
            os._exit(0)
        try:
            name = Path(f"/proc/{child}/comm")
            deadline = time.monotonic() + 10
            while ") R 1" not in name.read_text() and time.monotonic() < deadline:
                time.sleep(0.01)
            self.assertIn(") R 1", name.read_text())
            self.assertEqual(machine._tasks()[child].parent, os.getpid())
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def test_kernel_threads_are_told_apart(self):
        tasks = machine._tasks()
        self.assertFalse(tasks[os.getpid()].is_kernel)
        if 2 in tasks and Path("/proc/2/comm").read_text().strip() == "kthreadd":
            self.assertTrue(tasks[2].is_kernel)


class Load(unittest.TestCase):
    def test_what_others_took_is_no_load(self):
        self.assertAlmostEqual(usage(seconds=2.0, busy_cpus=1.5, others_cpus=0.5).load_s, 2)
        # Both are counted in ticks, at not quite the same moments.
        self.assertIsNone(usage(busy_cpus=0.5, others_cpus=0.51).load_s)
        self.assertIsNone(usage(busy_cpus=0.51, others_cpus=0.5).load_s)

    def test_a_process_of_ours_is_load(self):
        child = burn(120)  # killed below
        try:
            with Meter({"child": child.pid}) as meter:
                worked(child.pid, 0.3)
        finally:
            child.kill()
            child.wait()
        found = meter.usage
        took_s = found.processes["child"].cpus * found.seconds
        # The whole machine's time is sampled by ticks, that of processes is exact.
        self.assertGreater(found.load_s, took_s / 2)
        self.assertLessEqual(found.busy_cpus, os.cpu_count() * 1.1)


class Age(unittest.TestCase):
    def test_a_process_grows_older_from_its_start_on(self):
        with subprocess.Popen(["sleep", "30"]) as process:
            self.assertLess(machine.process_age_s(process.pid), 5)
            time.sleep(0.1)
            self.assertGreater(machine.process_age_s(process.pid), 0.08)
            process.kill()
        with self.assertRaises(ProcessLookupError):
            machine.process_age_s(process.pid)


class Disturbance(unittest.TestCase):
    def test_below_the_limits_there_is_none(self):
        self.assertIsNone(usage(others_cpus=0.3, stolen_cpus=0.1).disturbance(0.3, 0.1))

    def test_the_reason_has_the_figures(self):
        reason = usage(others_cpus=0.5, stolen_cpus=0.25).disturbance(0.3, 0.1)
        self.assertIn("other processes took 0.50 CPUs, more than 0.3", reason)
        self.assertIn("the hypervisor took 0.25 CPUs, more than 0.1", reason)

    def test_two_ticks_in_a_short_point_are_no_disturbance(self):
        short = usage(seconds=0.02, others_cpus=machine.RESOLUTION_S / 0.02)
        self.assertIsNone(short.disturbance(0.3, 0.1))

    def test_limits_that_cannot_be_exceeded_cost_no_wait(self):
        begun = time.monotonic()
        self.assertIsNone(machine.wait_quiet(1000, 1000, 5))
        self.assertLess(time.monotonic() - begun, 0.2)

    def test_a_busy_machine_is_waited_for_no_longer_than_asked(self):
        # Nothing is below a negative limit.
        begun = time.monotonic()
        reason = machine.wait_quiet(-1, -1, 0.2, span_s=0.1)
        self.assertIn("more than -1", reason)
        self.assertLess(time.monotonic() - begun, 5)


class MemoryAndCounters(unittest.TestCase):
    def test_memory_of_this_process(self):
        block = bytearray(32 << 20)
        block[::4096] = b"x" * len(block[::4096])
        found = machine.memory(os.getpid())
        self.assertGreater(found.resident, 32 << 20)
        self.assertGreaterEqual(found.peak, found.resident - (1 << 20))
        if found.share is not None:
            self.assertGreater(found.share, 32 << 20)

    def test_memory_of_no_process(self):
        child = burn(0)
        child.wait()
        with self.assertRaises(ProcessLookupError):
            machine.memory(child.pid)

    def test_the_output_of_perf_is_read(self):
        text = (
            "# started on …\n\n"
            "123456,,cycles:u,1000,100.00,,\n"
            "<not supported>,,instructions,0,100.00,,\n"
            "12.5,msec,task-clock,1000,100.00,,\n"
            "7,,cycles:u,1000,100.00,,\n"
        )
        counts = machine.parsed_counts(text, ("cycles", "instructions", "task-clock", "branches"))
        self.assertEqual(
            counts,
            {"cycles": 123463.0, "instructions": None, "task-clock": 12.5, "branches": None},
        )

    @unittest.skipUnless(shutil.which("perf"), "perf is not installed")
    def test_perf_counts_what_a_process_does(self):
        child = burn(5)
        try:
            with machine.counters([child.pid], ("task-clock", "cycles")) as counts:
                self.assertEqual(counts, {"task-clock": None, "cycles": None})
                time.sleep(0.3)
        finally:
            child.kill()
            child.wait()
        if counts["task-clock"] is None:
            self.skipTest("perf is not permitted to count here")
        # In ms. A shared machine gives less than all of a CPU.
        self.assertGreater(counts["task-clock"], 30)
        self.assertLess(counts["task-clock"], 2000)

    def test_without_perf_nothing_is_counted(self):
        path, os.environ["PATH"] = os.environ["PATH"], "/nonexistent"
        try:
            with machine.counters() as counts:
                pass
        finally:
            os.environ["PATH"] = path
        self.assertEqual(counts, {"cycles": None, "instructions": None})


class Conditions(unittest.TestCase):
    def test_they_name_the_machine(self):
        program = Path(sys.executable)
        found = machine.conditions(Path(__file__).parent, program)
        self.assertEqual(found["kernel"], os.uname().release)
        self.assertEqual(found["cpus"], os.cpu_count())
        self.assertGreater(found["memory_bytes"], 1 << 20)
        self.assertTrue(found["cpu"])
        self.assertEqual(found["program_sha256"], machine.file_hash(program))
        self.assertEqual(len(found["load"]), 3)
        self.assertIsInstance(found["mitigations"], dict)
        json.dumps(found, allow_nan=False)

    def test_the_commit_of_a_checkout(self):
        found = machine.commit(Path(__file__).parent)
        if found is None:
            self.skipTest("this is no checkout")
        self.assertRegex(found, r"^[0-9a-f]{40}(\+changes)?$")
        self.assertIsNone(machine.commit(Path("/proc")))

    def test_a_file_that_cannot_be_read(self):
        with self.assertRaisesRegex(LabError, re.escape("/nonexistent: No such file")):
            machine.file_hash(Path("/nonexistent"))


class MissingCounters(unittest.TestCase):
    def test_what_is_missing_is_named(self):
        machine.missing_counters.cache_clear()
        self.addCleanup(machine.missing_counters.cache_clear)
        with unittest.mock.patch.object(machine.shutil, "which", return_value=None):
            self.assertIn("perf is missing", machine.missing_counters())

    def test_it_agrees_with_what_is_counted(self):
        machine.missing_counters.cache_clear()
        missing = machine.missing_counters()
        with machine.counters([os.getpid()]) as counts:
            sum(range(10_000))
        self.assertEqual(missing is None, None not in counts.values())


if __name__ == "__main__":
    unittest.main()
