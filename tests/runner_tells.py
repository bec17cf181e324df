"""The runner of tests itself: its verdicts, tests side by side, and what is left when it is stopped or killed."""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from lib import Process, alone, need_root, scratch, timeout, until

RUNNER = Path(__file__).resolve().parent / "run.py"
HEAD = """
import os, subprocess, time
from pathlib import Path
from lib import Skip, alone, until
FOLDER = Path({folder!r})
def note(word):
    with (FOLDER / "notes").open("a") as file:
        file.write(word + "\\n")
"""
VERDICTS = """
def test_good(): pass
def test_bad(): assert False, "as it should be"
def test_skipped(): raise Skip("a reason")
def test_leaves_a_process(): subprocess.Popen(["sleep", "600"])
def test_good_the_second_time():
    note("run")
    assert (FOLDER / "notes").read_text().count("run") == 2, "the first time"
"""
SPACES = """
from lib.netns import Namespace
def test_leaves_one(): note(str(Namespace().__enter__()))
def test_is_late():
    with Namespace() as space:
        note(str(space))
        time.sleep(600)
test_is_late.timeout_s = {seconds}
"""
BOTH = """
import subprocess
from lib.netns import Namespace
def test_leaves_both():
    subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    note(str(Namespace().__enter__()))
"""
# Each waits for the other, so one after the other they would not end.
TOGETHER = """
def meet(own, other):
    note(own)
    until("the other test", lambda: other in (FOLDER / "notes").read_text(), 20)
def test_a(): meet("a", "b")
def test_b(): meet("b", "a")
@alone
def test_alone():
    note("alone")
"""
# Says when it begins and ends.
SPAN = """
def test_{name}():
    note("{name}-begins")
    time.sleep(1)
    note("{name}-ends")
"""
# The first runs forever, with a process in a session of its own.
ENDLESS = """
def test_endless():
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    note(str(process.pid))
    note(str(os.getpid()))
    time.sleep(600)
def test_beside():
    process = subprocess.Popen(["sleep", "601"], start_new_session=True)
    note(str(process.pid))
    note(str(os.getpid()))
    time.sleep(600)
"""


def sample(folder, text):
    (Path(folder) / "sample_one.py").write_text(HEAD.format(folder=str(folder)) + text)
    return f"{folder}/sample"


def runner(*words, ci=False):
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | ({"CI": "true"} if ci else {})
    done = subprocess.run([sys.executable, "-B", str(RUNNER), *words], env=environment, capture_output=True, text=True, timeout=120)
    verdicts = {}
    for verdict, name in re.findall(r"^(ok|FAIL|skip) +sample_one.test_(\S+)", done.stdout, re.M):
        verdicts.setdefault(name, []).append(verdict)
    return done, verdicts


@timeout(120)
def test_each_verdict_is_told_and_counted():
    for jobs in ("1", "3"):
        with scratch() as folder:
            done, verdicts = runner("--jobs", jobs, sample(folder, VERDICTS))
            assert verdicts == {"good": ["ok"], "bad": ["FAIL"], "skipped": ["skip"], "leaves_a_process": ["FAIL"], "good_the_second_time": ["FAIL"]}, done.stdout
            assert "as it should be" in done.stdout and "left behind: sleep" in done.stdout, done.stdout
            assert done.stdout.splitlines()[-1] == "1 passed, 3 failed, 1 skipped" and done.returncode == 1, done.stdout


def reaped(pid):
    """Whether an orphan has ended that comes to this process, the subreaper, and waits for it."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


@timeout(120)
def test_namespaces_that_a_test_leaves_are_removed_and_told():
    need_root()

    def spaces(folder):
        names = (Path(folder) / "notes").read_text().split()
        return names, [name for name in names if Path("/run/netns", name).exists()]

    with scratch() as folder:
        done, verdicts = runner(sample(folder, SPACES.format(seconds=1)))
        names, there = spaces(folder)
        assert verdicts == {"leaves_one": ["FAIL"], "is_late": ["FAIL"]} and f"left behind: {names[0]}" in done.stdout, done.stdout
        assert len(names) == 2 and not there, there
    # Also where another runner begins while a process that the test has left is waited for.
    with scratch() as folder, scratch() as other:
        first = subprocess.Popen([sys.executable, "-B", str(RUNNER), sample(folder, BOTH)], stdout=subprocess.PIPE, text=True)
        until("the test to run", lambda: (Path(folder) / "notes").exists() and spaces(folder)[0])
        [name], _ = spaces(folder)
        until("its end", lambda: not Path("/proc", name.split("-")[0].removeprefix("tmb")).exists())
        runner(sample(other, VERDICTS), "good")
        said, _ = first.communicate(timeout=60)
        assert f"left behind: {name}, sleep" in said, said
    # Of a runner that is killed the next one removes them.
    with scratch() as folder:
        # PR_SET_CHILD_SUBREAPER: the orphan comes to this process.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
        command = [sys.executable, "-B", str(RUNNER), sample(folder, SPACES.format(seconds=60)), "late"]
        killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        until("the test to run", lambda: (Path(folder) / "notes").exists() and spaces(folder)[1])
        # With its job, which is told to end otherwise, and removes them itself.
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        (name,), _ = spaces(folder)
        until("its end", lambda: reaped(int(name.split("-")[0].removeprefix("tmb"))))
        assert spaces(folder)[1] == [name]
        runner(sample(folder, VERDICTS), "good")
        assert not spaces(folder)[1]


@timeout(120)
def test_in_ci_a_failed_test_runs_once_more_and_a_skip_fails():
    with scratch() as folder:
        done, verdicts = runner("--jobs", "2", sample(folder, VERDICTS), ci=True)
        assert verdicts["good_the_second_time"] == ["FAIL", "ok"] and verdicts["bad"] == ["FAIL", "FAIL"] and verdicts["good"] == ["ok"], done.stdout
        assert done.stdout.splitlines()[-1] == "2 passed, 2 failed, 1 skipped, 1 passed on a second run" and done.returncode == 1, done.stdout
        assert "skipped although CI must not skip: sample_one.test_skipped" in done.stdout, done.stdout


@timeout(120)
def test_jobs_run_side_by_side_and_those_that_need_the_machine_run_after_them():
    with scratch() as folder:
        done, verdicts = runner("--jobs", "2", sample(folder, TOGETHER))
        assert done.returncode == 0 and set(map(tuple, verdicts.values())) == {("ok",)} and len(verdicts) == 3, done.stdout
        assert (Path(folder) / "notes").read_text().split()[-1] == "alone"


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@timeout(180)
def test_nothing_is_left_when_it_is_stopped_or_killed():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        for jobs in (1, 2):
            with scratch() as folder, Process([sys.executable, "-B", str(RUNNER), "--jobs", str(jobs), sample(folder, ENDLESS)]) as process:
                notes = Path(folder) / "notes"
                until("the tests' processes", lambda: notes.exists() and len(notes.read_text().split()) == 2 * jobs, 30)
                pids = [int(word) for word in notes.read_text().split()]
                assert all(map(is_running, pids))
                os.kill(process.pid, number)
                until(f"the end of {pids} after signal {number}", lambda: not any(map(is_running, pids)), 30)


@alone
@timeout(60)
def test_a_test_that_hangs_is_ended():
    text = "def test_hangs():\n    time.sleep(600)\ntest_hangs.timeout_s = 1\n"
    with scratch() as folder:
        start = time.monotonic()
        done, verdicts = runner(sample(folder, text))
        assert verdicts == {"hangs": ["FAIL"]} and "still running after" in done.stdout, done.stdout
        assert time.monotonic() - start < 50


@timeout(60)
def test_stages_are_not_begun_on_a_disk_that_they_would_fill():
    need_root()
    with scratch() as folder:
        script = f"""
            mount -t tmpfs -o size=64m small {folder} && mkdir {folder}/tests && cp {RUNNER.parent / "stages.py"} {folder}/tests
            {sys.executable} {folder}/tests/stages.py"""
        done = subprocess.run(["unshare", "--mount", "--propagation", "private", "bash", "-c", script], capture_output=True, text=True)
        assert done.returncode == 1, done
        assert "room for 0.1 GB more, and all stages need about 10 GB there" in done.stderr, done
        assert not list(Path(folder).iterdir()), "the mount was its own"


@timeout(60)
def test_those_that_run_alone_can_be_left_out_and_run_by_themselves():
    text = "def test_one(): pass\n@alone\ndef test_alone(): pass\n"
    with scratch() as folder:
        group = sample(folder, text)
        for which, expected in (("with", {"one", "alone"}), ("without", {"one"}), ("only", {"alone"})):
            for words, more in (("--alone", which), {}), ((), {"TOMBOLO_ALONE": which}):
                done = subprocess.run([sys.executable, "-B", str(RUNNER), *words, group], env=os.environ | more, capture_output=True, text=True)
                assert set(re.findall(r"^ok +sample_one.test_(\S+)", done.stdout, re.M)) == expected and done.returncode == 0, done
                assert ("left to the stage of tests that run alone: sample_one.test_alone" in done.stdout) == (which == "without"), done


@timeout(120)
def test_a_test_that_needs_the_machine_has_no_other_beside_it_of_another_stage_or_clone():
    with scratch() as folder:
        # Locks of its own: this test has its turn by those of the machine.
        environment = {"TOMBOLO_IN_TURN": "", "TOMBOLO_TEST_LOCKS": str(folder)}
        stages = []
        for group, body in {"alone": "@alone\n" + SPAN.format(name="alone"), "beside": SPAN.format(name="beside1") + SPAN.format(name="beside2")}.items():
            tests = folder / f"clone-{group}/tests"
            shutil.copytree(RUNNER.parent / "lib", tests / "lib")
            shutil.copy(RUNNER, tests)
            (tests / f"{group}_one.py").write_text(HEAD.format(folder=str(folder)) + body)
            stages.append([sys.executable, "-B", str(tests / "run.py"), "--jobs", "2", group])
        with Process(stages[0], env=environment) as alone_one, Process(stages[1], env=environment) as beside:
            assert alone_one.wait(60) == 0 and beside.wait(60) == 0
        notes = (folder / "notes").read_text().split()
        begun = notes.index("alone-begins")
        assert notes[begun + 1] == "alone-ends", notes
        # The two of one stage ran at the same time, so that the file can tell what runs side by
        # side.
        assert {word for word in notes if "alone" not in word} == {"beside1-begins", "beside2-begins", "beside1-ends", "beside2-ends"}, notes


def stages(folder, recipes, *words):
    """What starts the stages of a checkout whose ./x has these recipes, each a line of the shell."""
    (folder / "tests").mkdir(exist_ok=True)
    shutil.copy(RUNNER.parent / "stages.py", folder / "tests")
    cases = "".join(f"{name}) {recipe} ;;\n" for name, recipe in recipes.items())
    (folder / "x").write_text(f"case $1 in\n{cases}esac\n")
    return [sys.executable, str(folder / "tests/stages.py"), *words]


@timeout(60)
def test_stages_run_side_by_side_each_after_those_it_uses():
    meet = "echo {0} begins; touch {0}; for n in $(seq 200); do [ -e {1} ] && break; sleep 0.1; done; [ -e {1} ] && echo {0} ends"
    with scratch() as folder:
        recipes = {
            "fmt": meet.format("fmt", "paths"),
            "paths": meet.format("paths", "fmt"),
            "build": "sleep 1; touch is-built",
            "bypass": "[ -e is-built ] && echo after its build",
            "doc": "exit 3",
        }
        done = subprocess.run(stages(folder, recipes, "--lanes", "2", "fmt", "paths", "bypass", "doc", "build"), capture_output=True, text=True)
        assert done.returncode == 1, done
        # In one piece, in order of their start: the bypass waited for its build, and doc did not
        # wait for it.
        pieces = "=== fmt\nfmt begins\nfmt ends\n\n=== paths\npaths begins\npaths ends\n\n=== doc\n\n=== build\n\n=== bypass\nafter its build\n"
        assert done.stdout.startswith("\n" + pieces), done.stdout
        assert "4 stages passed, 1 failed" in done.stdout and re.search(r"^doc +FAILED ", done.stdout, re.M), done.stdout
        # One at a time they do not meet.
        shutil.rmtree(folder)
        folder.mkdir()
        recipes["fmt"] = "sleep 1; [ ! -e paths ]"
        done = subprocess.run(stages(folder, recipes | {"paths": "touch paths"}, "--lanes", "1", "fmt", "paths"), capture_output=True, text=True)
        assert done.returncode == 0 and "2 stages passed, 0 failed" in done.stdout, done


def stat(idle_s):
    """/proc/stat of a machine whose CPUs were idle for so long."""
    row = f" 0 0 0 {idle_s * os.sysconf('SC_CLK_TCK'):.0f} 0 0 0 0 0 0\n"
    return "".join(f"cpu{number}{row}" for number in range(os.cpu_count()))


@timeout(120)
def test_more_stages_run_while_cpus_are_idle():
    with scratch() as folder:
        # Each notes how many run beside it, until it is told to end.
        names = ("fmt", "paths", "doc", "lint", "unsafe-list", "rooms", "licences")
        recipes = {name: f"touch run-{name}; until [ -e end ]; do sleep 0.05; done; rm run-{name}" for name in names}
        count = lambda: len(list(folder.glob("run-*")))  # noqa: E731

        def most(lanes, idle_cpus, expected):
            """Waits until so many run, then for as long as five looks take; how many run at most."""
            (folder / "end").unlink(missing_ok=True)
            began = time.monotonic()
            (folder / "stat").write_text(stat(0))
            words = stages(folder, recipes, "--lanes", str(lanes), *names)
            program = folder / "tests/stages.py"
            text = program.read_text()
            assert 'Path("/proc/stat")' in text and "\nLOOK_S = 4\n" in text
            program.write_text(text.replace('Path("/proc/stat")', f'Path("{folder}/stat")').replace("\nLOOK_S = 4\n", "\nLOOK_S = 0.4\n"))

            def go_on():
                new = folder / "stat-new"
                new.write_text(stat((time.monotonic() - began) * idle_cpus / os.cpu_count()))
                new.rename(folder / "stat")
                return count()

            with Process(words) as process:
                until(f"{expected} stages", lambda: go_on() >= expected, 30)
                found, end = 0, time.monotonic() + 2
                while time.monotonic() < end:
                    found = max(found, go_on())
                    time.sleep(0.02)
                (folder / "end").touch()
                assert process.wait(30) == 0, process.text
            return found

        cpus = len(os.sched_getaffinity(0)) / os.cpu_count()
        assert most(2, 1.2 / cpus, 6) == 6
        assert most(2, 0.2 / cpus, 2) == 2
        assert most(1, 1.2 / cpus, 1) == 1


@timeout(60)
def test_stopped_stages_end_what_they_have_started():
    with scratch() as folder:
        recipes = {name: f"echo $$ > {name}; exec sleep 600" for name in ("fmt", "paths")}
        with Process(stages(folder, recipes, "--lanes", "2", "fmt", "paths", "doc")) as process:
            until("both stages", lambda: all((folder / name).exists() and (folder / name).read_text() for name in recipes))
            pids = [int((folder / name).read_text()) for name in recipes]
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(30) == 1
            assert not any(map(is_running, pids))
            assert "doc" not in process.text, "none begins after that"


@timeout(60)
def test_stages_end_with_a_terminal_that_is_gone():
    with scratch() as folder:
        recipes = {name: f"echo $$ > {name}; echo begins; exec sleep 600" for name in ("fmt", "paths")}
        process = subprocess.Popen(stages(folder, recipes, "--lanes", "2", "fmt", "paths"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        process.stdout.close()
        until("its end", lambda: process.poll() is not None, 30)
        # One may have been ended before it had written its number.
        pids = [int(text) for name in recipes if (folder / name).exists() and (text := (folder / name).read_text())]
        assert process.returncode != 0 and not any(map(is_running, pids)), (process.returncode, pids)


@timeout(60)
def test_a_stage_is_over_when_it_has_ended_whatever_it_has_left_running():
    with scratch() as folder:
        (folder / "tests").mkdir()
        shutil.copy(RUNNER.parent / "stages.py", folder / "tests")
        (folder / "x").write_text("echo begins\nsetsid sleep 600 &\necho $! > left\nsleep 1\necho ends\n")
        begun = time.monotonic()
        done = subprocess.run([sys.executable, folder / "tests/stages.py", "fmt"], capture_output=True, text=True)
        left = int((folder / "left").read_text())
        assert done.returncode == 0 and time.monotonic() - begun < 30, done
        assert f"begins\nends\nfmt: left running: sleep, process {left}: killed\n" in done.stdout, done.stdout
        until("its end", lambda: not Path(f"/proc/{left}/exe").exists())


@timeout(60)
def test_a_test_of_cargo_that_was_skipped_is_counted_as_that_and_not_as_passed():
    with scratch() as folder:
        (folder / "tests").mkdir()
        shutil.copy(RUNNER.parent / "stages.py", folder / "tests")
        # As crates/testing writes it: a line of its own, or behind the name where tests run one by
        # one.
        lines = ("test good ... ok", "skipped: tests::a: it takes root", "test tests::a ... ok", "test tests::b ... skipped: tests::b: no nft",
                 "ok", "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured")
        (folder / "x").write_text("".join(f"echo '{line}'\n" for line in lines))
        done = subprocess.run([sys.executable, folder / "tests/stages.py", "fmt"], capture_output=True, text=True)
        assert "1 stages passed, 0 failed; 2 tests skipped" in done.stdout, done.stdout
        assert re.search(r"^fmt +passed +[\d.]+ +[\d.]+ +[\d.]+ +1 +2 +0$", done.stdout, re.M), done.stdout
