"""What a killed daemon leaves, in every state that it may be in: a passt that is stopped, VMs with disks. `up` and `down` end it in order and say so."""

import contextlib
import os
import signal
import subprocess
import time

from lib import Fabric, Namespace, Process, need_program, need_root, scratch, timeout, until
from lib.fabric import PROGRAM
from lib.process import children

# A guest of one sector that obeys its power button: crates/host/src/qemu/monitor.rs has it with
# comments.
GUEST = bytes.fromhex("fa ba0206 b80001 ef baf803 b052 ee ba0006 ed f6c401 74fa ba0406 b80020 ef f4")

# A user who has no other process.
USER = 64_120

FORWARD = """
name = "{name}"
[network.lan]
subnet = "10.234.0.0/24"
uplink = "user"
[port.p]
kind = "stream"
mac = "02:00:00:00:00:07"
ip = "10.234.0.7"
[[forward]]
listen = "127.0.0.1:8080"
to = "p:80"
"""

DISK = """
name = "{name}"
[network.lan]
subnet = "10.234.0.0/24"
[vm.db]
disk = "disk"
memory = "{memory}"
accel = "tcg"
qemu = ["-trace", "qemu_system_shutdown_request", "-trace", "qemu_system_powerdown_request", "-D", "{trace}"]
"""
MANY = """
name = "{name}"
[network.lan]
subnet = "10.234.0.0/24"
uplink = "none"
[vm.db]
disk = "db.img"
memory = "16M"
accel = "tcg"
[vm.web]
disk = "web.img"
memory = "16M"
accel = "tcg"
"""
# QEMU's ShutdownCause (qapi/run-state.json).
GUEST_SHUTDOWN = "reason=6"


def is_gone(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@timeout(300)
def test_a_stopped_passt_is_ended_by_up_and_by_down():
    """A passt that is stopped does not see the end of its stream, and holds the forward's listener as another user."""
    need_root()
    need_program("passt")
    with Namespace() as space, scratch() as folder:
        space.way_out()
        with Fabric(folder, FORWARD.format(name=f"left{os.getpid()}"), netns=space) as fabric:
            for then in ("up", "down", "up"):
                [passt] = children(fabric.process.pid, "passt")
                os.kill(passt, signal.SIGSTOP)
                fabric.kill()
                # It is of no use to anybody, and would never end by itself.
                assert not is_gone(passt)
                if then == "up":
                    fabric.start()
                    fabric.process.wait_line(lambda line, pid=passt: f"passt, process {pid}, was ended" in line)
                    assert any(f"passt, process {passt}, was ended" in line for line in fabric.status()["takeover"])
                else:
                    told = fabric.cli("down", "--fabric", fabric.name).stderr
                    assert f"passt, process {passt}, was ended" in told, told
                    fabric.nothing_left()
                    fabric.start()
                assert is_gone(passt)
            # Also where it stops while its daemon runs.
            [passt] = children(fabric.process.pid, "passt")
            os.kill(passt, signal.SIGSTOP)
            fabric.down()
            assert is_gone(passt)


def bootable(path):
    disk = bytearray(1 << 20)
    disk[: len(GUEST)], disk[510:512] = GUEST, b"\x55\xaa"
    path.write_bytes(disk)


@timeout(300)
def test_down_ends_every_machine_at_the_limit_of_tasks():
    """A daemon of a user who has as many tasks as it may have: no thread and no process can be started."""
    need_root()
    need_program("setpriv")
    with scratch() as folder:
        for machine in ("db", "web"):
            bootable(folder / f"{machine}.img")
        for path in (folder, *folder.iterdir()):
            os.chown(path, USER, USER)
        # A privilege would lift the limit.
        words = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs",
                 "--pdeathsig=KILL"]
        with Fabric(folder, MANY.format(name=f"tasks{os.getpid()}"), prefix=words) as fabric:
            for machine in ("db", "web"):
                until("the guest to listen to its button", lambda machine=machine: "R" in fabric.console(machine))
            pids = fabric.machine_pids()
            assert len(pids) == 2, pids
            # A thread that waits for work in a pool ends after ten seconds.
            time.sleep(12)
            # Below the present number, so that no task that ends makes room for another one.
            subprocess.run([*words[:4], "prlimit", f"--pid={fabric.process.pid}", "--nproc=1:1"], check=True)
            refused = fabric.cli("capture", "db", "--write", folder / "db.pcapng", check=False)
            assert "check the limit on threads" in refused.stderr, refused
            # Services are asked on a thread: the page is without them.
            assert "tombolo_machine" in fabric.cli("metrics").stdout
            fabric.down()
            assert fabric.process.popen.returncode == 0, fabric.process.tail()
            assert all(map(is_gone, pids)), pids


@timeout(300)
def test_a_machine_with_a_disk_has_its_grace_also_after_a_crash():
    """`up` with a changed section, and `down` without a daemon, press the power button, and the guest turns itself off."""
    with scratch() as folder:
        bootable(folder / "disk")
        name = f"disk{os.getpid()}"

        def text(memory):
            return DISK.format(name=name, memory=memory, trace=folder / "trace-%d")

        with Fabric(folder, text("16M")) as fabric:
            def booted():
                return "R" in fabric.console("db")

            for memory, then in (("24M", "up"), ("24M", "down")):
                until("the guest to listen to its button", booted)
                [pid] = fabric.machine_pids()
                fabric.kill()
                fabric.file.write_text(text(memory))
                begun = time.monotonic()
                if then == "up":
                    fabric.start()
                    [told] = [line for line in fabric.status()["takeover"] if line.startswith("db:")]
                    for part in ("started again", f"process {pid}", "power button", "now -m 24M", "before -m 16M"):
                        assert part in told, told
                    assert [m["pid"] for m in fabric.status()["machines"]] != [pid]
                else:
                    told = fabric.cli("down", "--fabric", name).stderr
                    assert f"db: process {pid} is ended, by its power button first" in told, told
                    fabric.nothing_left()
                print(f"{then}: {time.monotonic() - begun:.1f} s")
                assert is_gone(pid)
                said = (folder / f"trace-{pid}").read_text()
                assert "qemu_system_powerdown_request" in said and GUEST_SHUTDOWN in said, said


@timeout(300)
def test_up_tells_what_it_keeps_and_what_it_ends():
    """Two VMs without disks, whose driver never comes: both are ended, each with its reason."""
    with scratch() as folder:
        (folder / "disk").write_bytes(bytes(1 << 20))
        vm = '[vm.{name}]\nkernel = "disk"\nmemory = "16M"\naccel = "tcg"\n'
        head = f'name = "told{os.getpid()}"\n[network.lan]\nsubnet = "10.234.0.0/24"\n'
        with Fabric(folder, head + vm.format(name="a") + vm.format(name="b")) as fabric:
            pids = {machine["name"]: machine["pid"] for machine in fabric.status()["machines"]}
            fabric.kill()
            fabric.file.write_text(head + vm.format(name="a"))
            fabric.cli("up", "-d", fabric.file)
            try:
                told = {line.split(":")[0]: line for line in fabric.status()["takeover"]}
                assert f"started again; process {pids['a']} is ended" in told["a"] and "driver was not on the network" in told["a"], told
                assert f"ended; process {pids['b']} is ended" in told["b"] and "not in the file any more" in told["b"], told
            finally:
                fabric.cli("down", "--fabric", fabric.name)
                fabric.nothing_left()


@timeout(300)
def test_up_right_after_a_kill_waits_for_the_daemon_before():
    """The kernel takes apart a daemon with many taps for seconds; `up`, and `down`, wait for that instead of refusing."""
    need_root()
    taps = "".join(f'[tap.t{number}]\nmac = "02:00:00:00:01:{number:02x}"\n' for number in range(40))
    text = f'name = "late{os.getpid()}"\n[network.lan]\nsubnet = "10.234.0.0/24"\n{taps}'
    with Namespace() as space, scratch() as folder, Fabric(folder, text, netns=space) as fabric:
        before = fabric.process
        try:
            for _ in range(2):
                # Not waited for: the next `up` begins at the same instant.
                os.kill(fabric.status()["pid"], signal.SIGKILL)
                begun = time.monotonic()
                told = fabric.cli("up", "-d", fabric.file).stderr
                print(f"up is done after {time.monotonic() - begun:.2f} s: {told}")
                assert sum(port["kind"] == "tap" for port in fabric.status()["ports"]) == 40
            os.kill(fabric.status()["pid"], signal.SIGKILL)
            fabric.cli("down", "--fabric", fabric.name)
            fabric.nothing_left()
        finally:
            fabric.cli("down", "--fabric", fabric.name, check=False)
            before.wait()


@contextlib.contextmanager
def small_disks(*folders):
    """A file system of 512 KiB at each folder."""
    mounted = []
    try:
        for folder in folders:
            folder.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "tmpfs", folder], check=True)
            mounted.append(folder)
        yield
    finally:
        for folder in mounted:
            subprocess.run(["umount", "-l", folder], check=False)


def fill(folder):
    with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


@timeout(300)
def test_up_on_a_full_disk_restores_the_guests_network():
    need_root()
    text = f"""
name = "full{os.getpid()}"
[network.lan]
subnet = "10.234.0.0/24"
[cell.web]
app = "httpd"
ip = "10.234.0.20"
accel = "tcg"
[tap.host]
ip = "10.234.0.9"
"""
    with Namespace() as space, scratch() as folder, small_disks(folder / "run", folder / "state"):
        with Fabric(folder, text, netns=space, own_mounts=False) as fabric:
            until("a ping", lambda: space.pings("10.234.0.20"))
            until("the cell in the owner record", lambda: '"web"' in (folder / "run" / fabric.name / "owner.json").read_text())
            pids = fabric.machine_pids()
            for round_ in range(2):
                fabric.kill()
                fill(folder / "run")
                fill(folder / "state")
                fabric.start()
                # The cell comes through the daemon's end, and has its network again, without a byte
                # of disk.
                until("a ping on full disks", lambda: space.pings("10.234.0.20"))
                status = fabric.status()
                assert fabric.machine_pids() == pids, round_
                assert any("owner record" in line and "No space left" in line for line in status["warnings"]), status["warnings"]
            # What is said goes nowhere, and the daemon lives on.
            fabric.kill()
            told = fabric.cli("up", "-d", fabric.file).stderr
            assert "web: kept" in told, told
            until("a ping with a log that is full", lambda: space.pings("10.234.0.20"))
            (folder / "run" / "filler").unlink()
            (folder / "state" / "filler").unlink()
            # With room again the record is written at the next change.
            fabric.cli("port", "add", "more", "--kind", "stream", "--fabric", fabric.name)
            assert not any("owner record" in line for line in fabric.status()["warnings"])
            fabric.cli("down", "--fabric", fabric.name)
            fabric.nothing_left()


@timeout(300)
def test_a_passt_that_stops_is_replaced_while_its_daemon_runs():
    need_root()
    need_program("passt")
    with Namespace() as space, scratch() as folder:
        space.way_out()
        with Fabric(folder, FORWARD.format(name=f"dog{os.getpid()}"), netns=space) as fabric:
            [passt] = children(fabric.process.pid, "passt")
            os.kill(passt, signal.SIGSTOP)
            begun = time.monotonic()
            until("another passt", lambda: children(fabric.process.pid, "passt") not in ([], [passt]))
            print(f"replaced after {time.monotonic() - begun:.1f} s")
            until("its count", lambda: fabric.status()["networks"][0]["counters"]["passt_hangs"] == 1)
            fabric.process.wait_line(lambda line: "ended by the watchdog" in line)
            fabric.down()


def sockets(fabric):
    return {path.name for path in (fabric.folder / "run" / fabric.name).iterdir() if path.is_socket()}


DELETED = """
name = "{name}"
[network.lan]
subnet = "10.234.0.0/24"
[cell.web]
app = "httpd"
ip = "10.234.0.20"
accel = "tcg"
restart = "on-failure"
[tap.host]
ip = "10.234.0.9"
[port.p]
kind = "stream"
[port.l]
kind = "ivshmem"
"""


@timeout(300)
def test_deleted_runtime_files_come_back():
    need_root()
    with Namespace() as space, scratch() as folder:
        with Fabric(folder, DELETED.format(name=f"gone{os.getpid()}"), netns=space) as fabric:
            run = folder / "run" / fabric.name
            until("a ping", lambda: space.pings("10.234.0.20"))
            before, pids = sockets(fabric), fabric.machine_pids()
            # One after the other: `status` works at once, and those that nobody uses come back.
            [keeper] = children(fabric.process.pid, "exe")
            for name in ("api.sock", "p.sock", "owner.json", "lock", "handover.sock", "l.sock", "keeper.sock"):
                (run / name).unlink()
                assert fabric.status()["machines"], name
                until(f"{name} to come back", lambda name=name: (run / name).exists())
            # The fd store is the one from before, and another daemon can take the fabric over.
            assert not is_gone(keeper)
            old = fabric.process
            fabric.process = Process([PROGRAM, "up", "--replace", fabric.file], name="tombolo", netns=space, env=fabric.env, cwd=folder)
            assert old.wait(60) == 0, old.tail()
            fabric.process.wait_line(lambda line: "is up after" in line)
            assert fabric.machine_pids() == pids and not is_gone(keeper)
            until("a ping", lambda: space.pings("10.234.0.20"))
            # A socket whose peer is connected comes back with the peer's end; the machine is
            # started again once.
            [web] = [name for name in before if name.startswith("web") and not name.endswith(".qmp")]
            (run / web).unlink()
            until("a warning", lambda: any("its socket was deleted" in line for line in fabric.status()["warnings"]))
            assert space.pings("10.234.0.20")
            os.kill(pids[0], signal.SIGKILL)
            until("the cell's next start", lambda: fabric.machine_pids() not in ([], pids))
            until("a ping to it", lambda: space.pings("10.234.0.20"))
            assert fabric.machine("web")["restarts"] <= 2, fabric.machine("web")
            assert (run / web).exists()
            # The whole folder, twice: every command finds the fabric.
            for _ in range(2):
                subprocess.run(["rm", "-rf", run], check=False)
                assert fabric.status()["name"] == fabric.name
                refused = fabric.cli("up", "-d", fabric.file, check=False)
                assert refused.returncode == 1 and f"running already (process {fabric.status()['pid']})" in refused.stderr, refused.stderr
                assert space.pings("10.234.0.20")
            fabric.down()


RESTARTED = """
name = "{name}"
[network.lan]
subnet = "10.234.0.0/24"
[tap.host]
ip = "10.234.0.9"
[cell.web]
app = "httpd"
ip = "10.234.0.20"
attach = "{attach}"
accel = "tcg"
"""


@timeout(300)
def test_a_machine_that_is_started_again_after_its_files_were_deleted_has_its_network():
    need_root()
    for attach in ("stream", "vhost-user", "ivshmem"):
        with Namespace() as space, scratch() as folder:
            with Fabric(folder, RESTARTED.format(name=f"again{os.getpid()}", attach=attach), netns=space) as fabric:
                until("a ping", lambda: space.pings("10.234.0.20"))
                warned = lambda: any("its socket was deleted" in line for line in fabric.status()["warnings"])
                for _ in range(3):
                    subprocess.run(["rm", "-rf", folder / "run" / fabric.name], check=False)
                    until("the folder to come back", lambda: (folder / "run" / fabric.name / "api.sock").exists())
                    # A connection that its port still has is over when the machine has ended, which
                    # the port may learn later.
                    if attach != "ivshmem":
                        until("a warning", warned)
                    fabric.cli("cell", "stop", "web", "--fabric", fabric.name)
                    fabric.cli("cell", "run", "web", "--fabric", fabric.name)
                    until(f"a ping over {attach}", lambda: space.pings("10.234.0.20"), 20)
                # A handover leaves a listener in the fd store. The next daemon made another, since
                # the file had gone; the file of that one, which is killed, is no sign that the
                # first can be found.
                subprocess.run(["rm", "-rf", folder / "run" / fabric.name], check=False)
                until("the folder to come back", lambda: (folder / "run" / fabric.name / "api.sock").exists())
                old = fabric.process
                fabric.process = Process([PROGRAM, "up", "--replace", fabric.file], name="tombolo", netns=space, env=fabric.env, cwd=folder)
                assert old.wait(60) == 0, old.tail()
                fabric.process.wait_line(lambda line: "is up after" in line)
                fabric.kill()
                fabric.start()
                fabric.cli("cell", "stop", "web", "--fabric", fabric.name)
                fabric.cli("cell", "run", "web", "--fabric", fabric.name)
                until(f"a ping over {attach} after a handover and a crash", lambda: space.pings("10.234.0.20"), 20)
                fabric.down()


@timeout(300)
def test_a_store_that_cannot_be_reached_is_not_replaced_by_a_handover():
    """Its socket is deleted while the old daemon is stopped, which therefore cannot make it again."""
    need_root()
    with Namespace() as space, scratch() as folder:
        with Fabric(folder, DELETED.format(name=f"cut{os.getpid()}"), netns=space) as fabric:
            until("a ping", lambda: space.pings("10.234.0.20"))
            pids, daemon = fabric.machine_pids(), fabric.status()["pid"]
            [keeper] = children(fabric.process.pid, "exe")
            os.kill(daemon, signal.SIGSTOP)
            (folder / "run" / fabric.name / "keeper.sock").unlink()
            said = fabric.cli("up", "--replace", fabric.file, check=False)
            assert said.returncode == 1 and "keeper.sock" in said.stderr and "try again" in said.stderr, said.stderr
            assert not is_gone(keeper)
            os.kill(daemon, signal.SIGCONT)
            assert fabric.machine_pids() == pids
            fabric.down()


@timeout(300)
def test_a_daemon_without_its_files_is_found_and_ended():
    """A stopped daemon cannot make its files again: all commands say that it runs, and `down` ends it and its taps."""
    need_root()
    with Namespace() as space, scratch() as folder:
        with Fabric(folder, DELETED.format(name=f"lost{os.getpid()}"), netns=space) as fabric:
            daemon = fabric.status()["pid"]
            os.kill(daemon, signal.SIGSTOP)
            subprocess.run(["rm", "-rf", folder / "run" / fabric.name], check=True)
            said = fabric.cli("status", "--fabric", fabric.name, check=False)
            assert said.returncode == 1 and f"runs (process {daemon})" in said.stderr, said.stderr
            said = fabric.cli("up", "-d", fabric.file, check=False)
            assert said.returncode == 1 and f"running already (process {daemon})" in said.stderr, said.stderr
            fabric.cli("down", "--fabric", fabric.name)
            assert is_gone(daemon)
            fabric.nothing_left()
