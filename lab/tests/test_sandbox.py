"""What a run leaves on the machine: nothing, also when it is killed at any moment."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tombolo_lab import LabError, harness, machine, sandbox
from tombolo_lab.sandbox import NETNS, Sandbox

PATIENCE_S = 20
AUTOGROUP = Path("/proc/self/autogroup")


def until(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {PATIENCE_S} s")
        time.sleep(0.01)


def is_alive(pid):
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")


# What `sleeper` started stays referenced, so that Python does not warn of it.
sleepers = []


def sleeper(command=("sleep", "1000"), **options):
    """A process in a session of its own, which nothing ends when its parent ends."""
    sleepers.append(subprocess.Popen(command, start_new_session=True, **options))
    return sleepers[-1]


def forked():
    """A fork whose child ends with us, also when a test is stopped."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        machine.die_with(parent)
    return child


def group_of(pid):
    """The niceness of a process's group of tasks."""
    return Path(f"/proc/{pid}/autogroup").read_text().split()[-1]


def mount_namespace():
    return os.readlink("/proc/self/ns/mnt")


class Normal(unittest.TestCase):
    def setUp(self):
        self.setting = Path(self.enterContext(tempfile.TemporaryDirectory())) / "setting"
        self.setting.write_text("64\n")

    def test_the_folder_is_there_and_then_gone(self):
        with Sandbox() as box:
            self.assertTrue(box.folder.is_dir())
            self.assertLess(len(str(box.folder)), 20)
            self.assertEqual(tempfile.gettempdir(), str(box.folder))
            self.assertEqual(os.environ["TMPDIR"], str(box.folder))
            with harness.scratch() as one, harness.scratch() as other:
                self.assertEqual((one.parent, other.parent), (box.folder, box.folder))
                self.assertNotEqual(one, other)
                (one / "file").write_text("")
            self.assertFalse(one.exists() or other.exists())
        self.assertFalse(box.folder.exists())
        self.assertNotEqual(tempfile.gettempdir(), str(box.folder))

    def test_everything_is_as_before(self):
        before = (mount_namespace(), Path.cwd(), dict(os.environ), sandbox.children())
        with Sandbox():
            pass
        after = (mount_namespace(), Path.cwd(), dict(os.environ), sandbox.children())
        self.assertEqual(after, before)

    def test_two_at_once_are_refused(self):
        with Sandbox(), self.assertRaisesRegex(LabError, "in progress"), Sandbox():
            pass
        with Sandbox():
            pass

    def test_what_a_set_up_leaves_is_ended_and_named(self):
        with Sandbox() as box:
            child = sleeper()
            # Its parent ends at once, so it comes to us.
            script = "sleep 1000 >/dev/null 2>&1 & echo $!"
            orphan = int(subprocess.run(["sh", "-c", script], capture_output=True).stdout)
            sandbox_ending, sandbox.ENDING_S = sandbox.ENDING_S, 0.1
            try:
                self.assertEqual(box.clear(), ["process sleep"])
            finally:
                sandbox.ENDING_S = sandbox_ending
            self.assertFalse(is_alive(orphan) or is_alive(child.pid))
            self.assertEqual(box.clear(), [])
            child.wait()

    def test_what_ends_by_itself_is_not_left(self):
        with Sandbox() as box:
            child = subprocess.Popen(["sleep", "0.2"])
            self.assertEqual(box.clear(), [])
            child.wait()

    def test_processes_that_were_there_before_stay(self):
        child = sleeper()
        try:
            with Sandbox() as box:
                self.assertEqual(box.clear(), [])
            self.assertTrue(is_alive(child.pid))
        finally:
            child.kill()
            child.wait()

    def test_the_end_kills_what_is_left(self):
        with Sandbox():
            child = sleeper()
        self.assertEqual(child.wait(5), -signal.SIGKILL)

    def test_a_setting_is_restored(self):
        with Sandbox():
            with harness.kernel_setting(self.setting, 300) as before:
                self.assertEqual(before, "64")
                self.assertEqual(self.setting.read_text(), "300")
            self.assertEqual(self.setting.read_text(), "64\n")

    def test_a_setting_that_cannot_be_written(self):
        with (
            Sandbox(),
            self.assertRaisesRegex(LabError, "/nonexistent/x: expected to write 1"),
            harness.kernel_setting("/nonexistent/x", 1),
        ):
            pass

    def test_settings_are_changed_within_a_run_only(self):
        with (
            self.assertRaisesRegex(LabError, "only within a run"),
            harness.kernel_setting(self.setting, 300),
        ):
            pass
        self.assertEqual(self.setting.read_text(), "64\n")

    @unittest.skipUnless(os.geteuid() == 0, "needs root")
    def test_network_namespaces_are_those_of_the_run(self):
        with Sandbox() as box:
            if not sandbox._is_own(NETNS):
                self.skipTest("no CAP_SYS_ADMIN")
            subprocess.run(["ip", "netns", "add", "lab-test"], check=True)
            seen = subprocess.run(
                ["nsenter", "-t", str(os.getppid()), "-m", "ls", NETNS],
                capture_output=True, text=True,
            )  # fmt: skip
            self.assertNotIn("lab-test", seen.stdout)
            self.assertEqual(box.clear(), ["network namespace lab-test"])
            self.assertEqual(list(NETNS.iterdir()), [])
        self.assertFalse((NETNS / "lab-test").exists())


class Killed(unittest.TestCase):
    """A child runs a function within a sandbox, and is killed."""

    def killed(self, work):
        """Kills a child in the middle of `work(box, tell)`; gives what it told, and checks that its
        folder and its processes are gone."""
        ready, told = os.pipe()
        child = forked()
        if child == 0:
            with contextlib.suppress(BaseException), Sandbox() as box:
                tell = lambda word: os.write(told, f"{word} ".encode())  # noqa: E731
                tell(box.folder)
                tell(box._sweeper.pid)
                work(box, tell)
                tell("end")
                time.sleep(1000)
            os._exit(1)
        os.close(told)
        text = ""
        with open(ready, "rb", buffering=0) as file:
            while not text.endswith("end "):
                data = file.read(4096)
                self.assertTrue(data, f"the child ended after {text}")
                text += data.decode()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        words = text.split()
        folder, sweeper_pid, *others = words[:-1]
        until(lambda: not is_alive(int(sweeper_pid)), "the sweeper ends")
        self.assertFalse(Path(folder).exists())
        for pid in others:
            self.assertFalse(is_alive(int(pid)), pid)
        return words

    def test_children_are_killed_in_any_session(self):
        self.killed(lambda box, tell: tell(sleeper().pid))

    def test_orphans_are_killed(self):
        def work(box, tell):
            script = "sleep 1000 >/dev/null 2>&1 & echo $!"
            tell(subprocess.run(["sh", "-c", script], capture_output=True, text=True).stdout)

        self.killed(work)

    def test_a_child_that_never_called_exec_is_killed(self):
        def work(box, tell):
            child = os.fork()
            if child == 0:
                os.setsid()
                time.sleep(1000)
            tell(child)

        self.killed(work)

    def test_a_child_without_our_environment_is_known_by_the_folder(self):
        def work(box, tell):
            path = box.folder / "socket"
            command = ["tail", "-f", "/dev/null", "--pid=1", "-q", path]
            path.write_text("")
            tell(sleeper().pid)
            tell(sleeper(command, env={}).pid)

        self.killed(work)

    def test_settings_are_restored(self):
        with tempfile.TemporaryDirectory() as name:
            one, two = Path(name, "one"), Path(name, "two")
            one.write_text("1\n")
            two.write_text("2\n")

            def work(box, tell):
                stack = contextlib.ExitStack()
                stack.enter_context(box.setting(one, 10))
                stack.enter_context(box.setting(two, 20))
                with box.setting(one, 25):
                    pass
                stack.enter_context(box.setting(one, 30))
                sleepers.append(stack)
                assert one.read_text() == "30"

            self.killed(work)
            self.assertEqual((one.read_text(), two.read_text()), ("1\n", "2\n"))

    @unittest.skipUnless(
        os.geteuid() == 0 and AUTOGROUP.exists(), "needs root and a kernel with autogroups"
    )
    def test_the_niceness_of_the_users_session_is_restored(self):
        """To what it was, which is not 0; at the end of the `with`, and after SIGKILL."""
        ready, told = os.pipe()
        child = forked()
        if child == 0:
            with contextlib.suppress(BaseException):
                os.setsid()
                # What stands for the user's shell: in the session, and not of the run.
                user = subprocess.Popen(["sleep", "1000"])
                os.write(told, f"{user.pid} ".encode())
                AUTOGROUP.write_text("5")
                with Sandbox() as box:
                    with harness.group_first(-3):
                        os.write(told, f"{group_of(user.pid)} ".encode())
                    os.write(told, f"{group_of(user.pid)} ".encode())
                    with harness.group_first():
                        os.write(told, f"{group_of(user.pid)} {box._sweeper.pid} end".encode())
                        time.sleep(1000)
            os._exit(1)
        os.close(told)
        text = b""
        with open(ready, "rb", buffering=0) as file:
            while not text.endswith(b" end") and (data := file.read(4096)):
                text += data
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        user, *rest = text.decode().split()
        try:
            self.assertEqual(rest[:3] + rest[4:], ["-3", "5", "-20", "end"])
            until(lambda: not is_alive(int(rest[3])), "the sweeper ends")
            self.assertEqual(group_of(user), "5")
        finally:
            os.kill(int(user), signal.SIGKILL)

    def test_a_kill_of_the_whole_process_group_spares_the_sweeper(self):
        ready, told = os.pipe()
        child = forked()
        if child == 0:
            os.setsid()
            with contextlib.suppress(BaseException), Sandbox() as box:
                os.write(told, f"{box.folder} {box._sweeper.pid} {sleeper().pid}".encode())
                time.sleep(1000)
            os._exit(1)
        os.close(told)
        with open(ready, "rb", buffering=0) as file:
            folder, sweeper_pid, pid = file.read(4096).decode().split()
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        until(lambda: not is_alive(int(sweeper_pid)), "the sweeper ends")
        self.assertFalse(Path(folder).exists() or is_alive(int(pid)))


class Harness(unittest.TestCase):
    def test_the_checkout_is_found(self):
        try:
            tree = harness.tree()
        except LabError:
            self.skipTest("this is no checkout")
        self.assertTrue((tree / "tests/lib/process.py").is_file())
        self.assertEqual(harness.Process.__module__, "lib.process")
        self.assertEqual(harness.cpu_seconds.__module__, "lib.process")
        self.assertEqual(len(harness.skips()), 2)
        with self.assertRaisesRegex(AttributeError, "neither in tombolo_lab.harness nor"):
            getattr(harness, "Nothing")  # noqa: B009

    def test_a_tree_without_the_harness_is_an_error(self):
        with (
            unittest.mock.patch.dict(os.environ, TOMBOLO_TREE="/nonexistent"),
            self.assertRaisesRegex(
                LabError, "tests/lib in /nonexistent, found none: set TOMBOLO_T"
            ),
        ):
            harness.tree()

    def test_what_is_missing_is_a_skip_with_a_remedy(self):
        with self.assertRaisesRegex(harness.Skip, "no-such is missing: apt-get install a-package"):
            harness.need_program("no-such", "a-package")
        with (
            unittest.mock.patch.dict(os.environ, TOMBOLO_PROGRAM="/nonexistent"),
            self.assertRaisesRegex(harness.Skip, "/nonexistent is not there: run ./x build"),
        ):
            harness.program()
        self.assertTrue(harness.need_program("sh").endswith("/sh"))


if __name__ == "__main__":
    unittest.main()
