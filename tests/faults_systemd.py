"""The unit that packages install, word for word, under a systemd of the test's own: start, reload, restart, a crash, a hang, stop."""

import contextlib
import os
import signal
import time
from pathlib import Path

from faults_handover import Pings
from lib import ROOT, Fabric, Namespace, scratch, timeout, until
from lib.fabric import PROGRAM
from lib.guest import CellGuest
from lib.systemd import Manager

TEMPLATE, UNIT = "tombolo@.service", "tombolo@demo.service"
WEB = "10.232.0.20"
FILE = """
name = "{name}"
[network.lan]
subnet = "10.232.0.0/24"
[cell.web]
app = "httpd"
ip = "10.232.0.20"
accel = "tcg"
[cell.mem]
app = "httpd"
ip = "10.232.0.21"
accel = "tcg"
attach = "ivshmem"
[tap.host]
ip = "10.232.0.9"
"""
# What needs most of the system: a tap, nftables, sysctls, eBPF programs, and passt, which makes
# namespaces for itself.
WAYS_OUT = """
name = "{name}"
[network.lan]
subnet = "10.232.0.0/24"
uplink = "kernel"
bypass = ["out0"]
[network.user]
subnet = "10.233.0.0/24"
uplink = "user"
[cell.web]
app = "httpd"
network = "lan"
ip = "10.232.0.20"
accel = "tcg"
[cell.other]
app = "httpd"
network = "user"
accel = "tcg"
"""
ADDRESSES = (WEB, "10.232.0.21")
PATIENCE_S = 120
# What a busy machine of two cores may add to a gap: the tests look for what is lost, `./x handover`
# measures.
BUSY_S = 10
# Half of it is how often the daemon gives a sign of life: a busy machine may keep it from its CPU
# for seconds.
WATCHDOG_S = 20
# What systemd is asked for after each step.
STATES = ("ActiveState", "SubState", "MainPID", "Result", "NRestarts", "ExecMainPID", "ExecMainCode", "ExecMainStatus")


def installed_unit(file):
    """The unit of the package, with this program and this fabric's file in place of its own."""
    text = (ROOT / "packaging/systemd/tombolo@.service").read_text()
    for installed, here in (("@BINDIR@/tombolo", PROGRAM), ("@CONFDIR@/%i.toml", file)):
        assert installed in text, f"{installed} is not in the unit"
        text = text.replace(installed, str(here))
    return text


class ServiceFabric(Fabric):
    """A fabric whose daemon is a service of a systemd: `start` is `systemctl start`, and commands run beside that systemd."""

    def __init__(self, folder, text, manager_folder, netns, more=""):
        self.manager_folder, self.stack, self.more = manager_folder, contextlib.ExitStack(), more
        super().__init__(folder, text, netns=netns)

    def start(self):
        surroundings = {**self.env, "TOMBOLO_APPS": CellGuest.IMAGES, **{k: v for k, v in os.environ.items() if k == "TOMBOLO_QEMU"}}
        test = "".join(f"Environment={key}={value}\n" for key, value in surroundings.items())
        test += f"StandardOutput=append:{self.folder}/service.log\nStandardError=inherit\n"
        units = {TEMPLATE: installed_unit(self.file), f"{UNIT}.d/test.conf": f"[Service]\n{test}{self.more}"}
        self.manager = self.stack.enter_context(Manager(self.manager_folder, self.netns, units, [self.folder]))
        self.mounts_before = self.manager.mounts()

    def cli(self, *words, seconds=60, check=True):
        return self.manager.run(PROGRAM, *words, seconds=seconds, check=check, env=self.env)

    def unit(self):
        """What systemd says of the service."""
        return self.manager.show(UNIT, *STATES)

    def says(self, **expected):
        """Asserts what systemd says of the service, and gives all of it."""
        said = self.unit()
        assert {key: said[key] for key in expected} == expected, f"{said}\n{self.log()}"
        return said

    def log(self):
        path = self.folder / "service.log"
        logs = [path, self.folder / "run" / self.name / "log"]
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in logs if path.exists())

    def control(self, *words):
        """`systemctl WORDS` on the service, which must work; the seconds it took."""
        begun = time.monotonic()
        done = self.manager.systemctl(*words, UNIT, check=False)
        assert done.returncode == 0, f"systemctl {' '.join(words)}: {done.stderr}\n{self.unit()}\n{self.log()}"
        return time.monotonic() - begun

    def stands(self):
        """Asserts that the service is active, that its main process is the daemon that answers, and gives that one's number."""
        said = self.says(ActiveState="active", SubState="running", Result="success")
        assert int(said["MainPID"]) == self.status()["pid"] > 0, said
        return int(said["MainPID"])

    def left_mounts(self):
        """Mount points that are new in the namespace of its systemd; what other tests mount on this machine shows there as well."""
        here = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
        return sorted(set(self.manager.mounts()) - set(self.mounts_before) - here)

    def nothing_left(self):
        super().nothing_left()
        until("all processes to go", lambda: not self.manager.processes(), 20)
        until("its mounts to go", lambda: not self.left_mounts(), 20)
        until("its cgroup to go", lambda: not self.manager.cgroups(), 20)

    def down(self):
        self.cli("down", "--fabric", self.name)
        until("the service's end", lambda: self.unit()["ActiveState"] != "activating" and self.unit()["MainPID"] == "0", 30)
        self.says(ActiveState="inactive", Result="success")
        self.nothing_left()

    def stop(self):
        self.stack.close()


@contextlib.contextmanager
def service(more=""):
    """A fabric that systemd started, with `more` lines for its service, and whose cells answer."""
    with Namespace() as space, scratch() as folder, scratch() as manager_folder:
        with ServiceFabric(folder, FILE.format(name=f"sd{os.getpid()}"), manager_folder, space, more) as fabric:
            # Type=notify: systemctl returns when the fabric stands.
            took = fabric.control("start")
            fabric.stands()
            print(f"start: active after {1000 * took:.0f} ms", flush=True)
            all_well(fabric)
            yield fabric


def all_well(fabric):
    for address in ADDRESSES:
        until(f"a ping to {address}", lambda a=address: fabric.netns.pings(a), PATIENCE_S)


def guests(fabric):
    """The cells' processes, by name."""
    return {machine["name"]: machine["pid"] for machine in fabric.status()["machines"]}


@contextlib.contextmanager
def traffic_goes_on(fabric, what):
    """Pings to the cells throughout; their largest gaps are printed and bounded, and no cell has been started again."""
    before = guests(fabric)
    with contextlib.ExitStack() as stack:
        logs = {address: fabric.folder / f"{address}.log" for address in ADDRESSES}
        pings = {address: stack.enter_context(Pings(fabric.netns, address, log)) for address, log in logs.items()}

        def answered():
            # A gap ends with the answer after it.
            for address, log in logs.items():
                size = log.stat().st_size
                until(f"answers from {address}", lambda log=log, size=size: log.stat().st_size > size + 1000, PATIENCE_S)

        answered()
        yield
        all_well(fabric)
        answered()
        gaps = {address: each.end()[0] for address, each in pings.items()}
    print(f"{what}: " + ", ".join(f"gap {1000 * gap:.0f} ms at {address}" for address, gap in gaps.items()), flush=True)
    assert guests(fabric) == before, "the machines run on"
    assert all(gap < BUSY_S for gap in gaps.values()), gaps


@timeout(300)
def test_reload_and_restart_leave_the_guests_alone():
    with service() as fabric:
        daemons = [fabric.stands()]
        # A restart after a reload ends a main process that systemd has not started itself.
        for verb in ("reload", "reload", "restart", "restart", "reload", "restart"):
            with traffic_goes_on(fabric, verb):
                fabric.control(verb)
                daemons.append(fabric.stands())
            assert daemons[-1] not in daemons[:-1]
            assert [number for number in daemons[:-1] if number in fabric.manager.processes()] == []
        fabric.says(NRestarts="0")
        fabric.down()


@timeout(300)
def test_the_units_hardening_holds_and_breaks_no_uplink():
    with Namespace() as space, scratch() as folder, scratch() as manager_folder:
        space.way_out()
        with ServiceFabric(folder, WAYS_OUT.format(name=f"sd{os.getpid()}"), manager_folder, space) as fabric:
            fabric.control("start")
            daemon = fabric.manager.processes()[fabric.stands()]
            status = dict(line.split(":", 1) for line in Path(f"/proc/{daemon}/status").read_text().splitlines())
            # The daemon's own filter is one; the others are the unit's.
            assert int(status["Seccomp_filters"]) > 1 and int(status["NoNewPrivs"]) == 1, status
            mounts = [line.split() for line in Path(f"/proc/{daemon}/mountinfo").read_text().splitlines()]
            assert any(words[4] == "/usr" and words[5].startswith("ro") for words in mounts), "ProtectSystem="
            until("both cells", lambda: all(port["up"] for port in fabric.status()["ports"] if port["name"] in ("web", "other")), PATIENCE_S)
            until("a ping through the kernel uplink", lambda: space.pings(WEB), PATIENCE_S)
            said = fabric.status()
            assert all(network.get("uplink_fault") is None for network in said["networks"]), said["networks"]
            [bypass] = [network["bypass"] for network in said["networks"] if network.get("bypass")]
            assert not bypass.get("fault"), bypass
            faults = [text for text in said["warnings"] if "confined" in text or "does not work" in text]
            assert not faults, faults
            fabric.down()


@timeout(300)
def test_stop_leaves_the_guests_for_the_next_start():
    with service() as fabric:
        before = guests(fabric)
        for reloads in (0, 1):
            for _ in range(reloads):
                fabric.control("reload")
            main = fabric.stands()
            fabric.control("stop")
            # CLD_EXITED with 0: it left by itself, and was not killed.
            fabric.says(ActiveState="inactive", Result="success", MainPID="0", ExecMainPID=str(main), ExecMainCode="1", ExecMainStatus="0")
            assert set(before.values()) <= set(fabric.manager.processes()) and main not in fabric.manager.processes()
            fabric.control("start")
            fabric.stands()
            assert guests(fabric) == before
            all_well(fabric)
        # Without a daemon `down` ends what it left.
        fabric.control("stop")
        assert set(before.values()) <= set(fabric.manager.processes())
        fabric.down()


@timeout(300)
def test_a_killed_daemon_is_started_again():
    with service() as fabric:
        for after_reload in (False, True):
            if after_reload:
                fabric.control("reload")
            main, restarts = fabric.stands(), int(fabric.unit()["NRestarts"])
            with traffic_goes_on(fabric, "kill -9 after a reload" if after_reload else "kill -9"):
                os.kill(fabric.manager.processes()[main], signal.SIGKILL)
                until("the next daemon", lambda n=restarts: int(fabric.unit()["NRestarts"]) > n and fabric.unit()["ActiveState"] == "active", 30)
                assert fabric.stands() != main
        fabric.down()


@timeout(400)
def test_a_daemon_that_hangs_is_started_again():
    with service(f"WatchdogSec={WATCHDOG_S}\n") as fabric:
        # A daemon of a reload has to feed the watchdog too, though systemd tells it no period.
        for after_reload in (False, True):
            if after_reload:
                fabric.control("reload")
            main = fabric.stands()
            beat = int(fabric.manager.show(UNIT, "WatchdogTimestampMonotonic")["WatchdogTimestampMonotonic"])
            until("a sign of life", lambda b=beat: int(fabric.manager.show(UNIT, "WatchdogTimestampMonotonic")["WatchdogTimestampMonotonic"]) > b, WATCHDOG_S)
            before, restarts = guests(fabric), int(fabric.unit()["NRestarts"])
            os.kill(fabric.manager.processes()[main], signal.SIGSTOP)
            until("the next daemon", lambda n=restarts: int(fabric.unit()["NRestarts"]) > n and fabric.unit()["ActiveState"] == "active", 3 * WATCHDOG_S + 30)
            assert fabric.stands() != main and guests(fabric) == before
            all_well(fabric)
        fabric.down()


@timeout(300)
def test_a_reload_that_fails_ends_no_guest():
    with service() as fabric:
        main, before = fabric.stands(), guests(fabric)
        good = fabric.file.read_text()
        fabric.file.write_text(good.replace('app = "httpd"', 'app = "nothing-of-that-name"'))
        assert fabric.manager.systemctl("reload", UNIT, check=False).returncode != 0
        assert fabric.stands() == main and guests(fabric) == before
        # What shows only when the old daemon has gone is a failure too; the unit's Restart= tries
        # again, until it works.
        (fabric.folder / "taken").mkdir()
        fabric.file.write_text(good + f'[port.more]\nkind = "stream"\nsocket = "{fabric.folder}/taken"\n')
        assert fabric.manager.systemctl("reload", UNIT, check=False).returncode != 0
        until("eight tries", lambda: int(fabric.unit()["NRestarts"]) >= 8, 60)
        assert set(before.values()) <= set(fabric.manager.processes())
        fabric.file.write_text(good)
        until("the service to run", lambda: fabric.unit()["ActiveState"] == "active", 30)
        fabric.stands()
        fabric.control("reload")
        assert fabric.stands() != main and guests(fabric) == before
        all_well(fabric)
        fabric.down()
        # A start that fails is one for systemd.
        fabric.file.write_text("name = 7\n")
        assert fabric.manager.systemctl("start", UNIT, check=False).returncode != 0
        said = fabric.unit()
        assert said["ActiveState"] in ("failed", "activating") and said["Result"] == "exit-code", said


LATE = """
name = "{name}"
[network.lan]
subnet = "10.232.0.0/24"
uplink = "user"
[port.web]
kind = "stream"
mac = "02:00:00:00:00:07"
ip = "10.232.0.20"
[[forward]]
listen = "192.0.2.77:8080"
to = "web:80"
"""


@timeout(180)
def test_a_fabric_whose_address_comes_late_starts_when_it_is_there():
    """As at boot, where DHCP is slower than the unit."""
    with Namespace() as space, scratch() as folder, scratch() as manager_folder:
        space.way_out()
        with ServiceFabric(folder, LATE.format(name=f"sd{os.getpid()}"), manager_folder, space) as fabric:
            assert fabric.manager.systemctl("start", UNIT, check=False).returncode != 0
            # Longer than systemd's own patience: five starts in ten seconds.
            until("eight tries", lambda: int(fabric.unit()["NRestarts"]) >= 8, 60)
            assert "192.0.2.77" in fabric.log() and fabric.unit()["ActiveState"] == "activating", (fabric.unit(), fabric.log())
            space.ip("address", "add", "192.0.2.77/32", "dev", "lo")
            until("the service to run", lambda: fabric.unit()["ActiveState"] == "active", 30)
            fabric.stands()
            fabric.down()
