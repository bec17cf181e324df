"""tombolo-span as a service: the settings file of docs/span.md, and the unit that packages install, under a systemd of the test's own."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path

from daytwo_user_unit import UID, UserManager
from lib import ROOT, Namespace, Skip, scratch, timeout, until
from lib.fabric import PROGRAM
from lib.systemd import Manager
from span_control import LEASE_S, PATIENCE_S, SPAN, machines

TEMPLATE, UNIT = "tombolo-span@.service", "tombolo-span@home.service"
STATES = ("ActiveState", "SubState", "MainPID", "Result", "NRestarts", "StatusText", "ExecMainStatus")
# Long enough for a busy machine of two cores.
WATCHDOG_S = 10


def examples():
    """The settings files of the docs: where machines reach each other, and with a router."""
    page = (ROOT / "docs/span.md").read_text()
    return re.findall(r"^```toml\n(# /etc/tombolo/home\.span\.toml .*?)^```", page, re.M | re.S)


def example():
    """The first of them."""
    text, _ = examples()
    assert text == (ROOT / "packaging/home.span.toml").read_text(), "the docs and the package have the same"
    return text


def need_span():
    if not SPAN.exists():
        raise Skip(f"{SPAN} is not built: run ./x span-program")


def span(*words):
    need_span()
    environment = {name: value for name, value in os.environ.items() if name != "TOMBOLO_FABRIC"}
    return subprocess.run([SPAN, *map(str, words)], capture_output=True, text=True, timeout=60, env=environment)


@timeout(60)
def test_the_example_of_the_docs_is_checked_and_nothing_is_started():
    need_span()
    with scratch() as folder:
        file = folder / "home.span.toml"
        file.write_text(example())
        done = span("--config", file, "--check")
        assert done.returncode == 1 and f"{folder}/keys/node-1.pem: No such file" in done.stderr, done
        subprocess.run([PROGRAM, "service", "keys", "--keys", folder / "keys", "node-1", "node-2", "node-3"], check=True, capture_output=True)
        done = span("--config", file, "--check")
        # 192.0.2.1 is no address of this machine: it was not tried.
        assert done.returncode == 0 and done.stderr == "", done
        assert done.stdout == f"node-1 of the fabric demo-1: listens at 192.0.2.1:7447 for 2 machines, with the keys of {folder}/keys\n", done
        # A flag wins.
        assert "node-3 of the fabric demo-1" in span("--config", file, "--check", "--machine", "node-3", "--peer", "node-1=192.0.2.9:7447").stdout
        file.write_text(examples()[1])
        done = span("--config", file, "--check")
        assert "node-1 of the fabric demo-1: uses the router hub=192.0.2.9:7447 for 1 machines" in done.stdout, done
        config = json.loads(span("--config", file, "--router-config").stdout)
        assert config["mode"] == "router" and config["listen"]["endpoints"] == ["tls/192.0.2.9:7447"], config
        (folder / "keys/node-1.key").chmod(0o644)
        done = span("--config", file, "--check")
        assert done.returncode == 1 and "found mode 0644; run chmod 600" in done.stderr, done


@timeout(60)
def test_wrong_settings_are_all_listed_with_their_places():
    with scratch() as folder:
        file = folder / "home.span.toml"
        file.write_text(example().replace("fabric =", "fabrik =").replace('"192.0.2.1:7447"', '"192.0.2.1"'))
        for more in ([], ["--check"]):
            done = span("--config", file, *more)
            assert done.returncode == 2, done
            assert f'{file}:2:1: fabrik: expected one of the keys ' in done.stderr and 'did you mean "fabric"?' in done.stderr, done
            assert f'{file}:4:10: listen: expected ADDRESS:PORT, such as "192.0.2.1:7447", found the string "192.0.2.1"' in done.stderr, done
            assert "2 faults in the settings; nothing was started" in done.stderr, done
        done = span("--config", folder / "none.toml")
        assert done.returncode == 2 and "reading the settings file" in done.stderr, done


def test_the_docs_have_a_row_for_each_key_and_each_key_is_a_flag():
    page = (ROOT / "docs/span.md").read_text()
    [section] = re.findall(r"^### Settings\n(.*?)^#", page, re.M | re.S)
    rows = re.findall(r"^\| `(\w+)` \|", section, re.M)
    help_text = span("--help").stdout
    flags = set(re.findall(r"^ +(?:-\w, )?--([\w-]+)", help_text, re.M)) - {"config", "check", "router-config", "help", "version"}
    assert {row.replace("_", "-") for row in rows} == flags and len(rows) == 12, (rows, flags)
    for text in examples():
        assert set(tomllib.loads(text)) <= set(rows)


class Service:
    """tombolo-span of a machine of span_control.py, as the service that packages install."""

    def __init__(self, machine, folder, keys):
        self.folder, self.file, self.log = machine.folder, machine.folder / "home.span.toml", machine.folder / "service.log"
        text = example().replace("demo-1", machine.fabric.name).replace("192.0.2.", "10.233.2.").replace('"keys"', f'"{keys}"')
        self.file.write_text(text + f"lease = {LEASE_S}\n")
        unit = (ROOT / "packaging/systemd" / TEMPLATE).read_text()
        for installed, here in (("@BINDIR@/tombolo-span", SPAN), ("@CONFDIR@/%i.span.toml", self.file)):
            assert installed in unit, f"{installed} is not in the unit"
            unit = unit.replace(installed, str(here))
        assert "\nWatchdogSec=30\n" in unit and "\nRestartSec=2\n" in unit
        # The test or the checkout may be in /tmp and /home, and the systemd of a test can mount no
        # devices.
        places = "PrivateTmp=no\nProtectHome=read-only\nPrivateDevices=no\n"
        places += "".join(f"Environment={name}={value}\n" for name, value in machine.fabric.env.items())
        places += f"StandardOutput=append:{self.log}\nStandardError=inherit\nWatchdogSec={WATCHDOG_S}\n"
        units = {TEMPLATE: unit, f"{UNIT}.d/test.conf": f"[Service]\n{places}"}
        folder.mkdir()
        self.manager = Manager(folder, machine.space, units, [machine.folder, keys])

    def __enter__(self):
        self.manager.__enter__()
        return self

    def __exit__(self, *what):
        self.manager.__exit__(*what)

    def states(self):
        return self.manager.show(UNIT, *STATES)

    def told(self):
        return f"{self.states()}\n{self.log.read_text() if self.log.exists() else ''}"

    def control(self, word, works=True):
        done = self.manager.systemctl(word, UNIT, check=False)
        assert (done.returncode == 0) == works, f"systemctl {word}: {done.stderr}\n{self.told()}"

    def reaches(self, what, **expected):
        """Waits for states, with an operator: a value, or a function of one."""
        def there():
            found = self.states()
            return found if all(value(found[key]) if callable(value) else found[key] == value for key, value in expected.items()) else None

        return until(what, there, PATIENCE_S, every=0.2, seen=self.told)


@timeout(300)
def test_the_unit_waits_for_the_fabric_and_lives_through_kills_hangs_and_wrong_settings():
    with machines(3) as (keys, one, two, three), scratch() as folder:
        two.start("--keys", keys)
        one.fabric.kill()
        with Service(one, folder / "manager", keys) as service:
            # READY=1: it listens. The fabric comes later.
            service.control("start")
            service.reaches("the wait for the fabric", ActiveState="active", StatusText=lambda text: "waiting for the fabric" in text)
            one.fabric.start()
            one.knows(two)
            status = "1 of 2 other machines are heard; the fabric answers; conflicts: 0"
            before = service.reaches("the fabric", StatusText=status, NRestarts="0")
            # As the unit leaves it: without any privilege.
            pid = service.manager.processes()[int(before["MainPID"])]
            capabilities = re.findall(r"^Cap(?:Eff|Bnd):\t(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
            assert capabilities == ["0" * 16] * 2, capabilities
            os.kill(pid, signal.SIGKILL)
            before = service.reaches("the next after a kill", ActiveState="active", NRestarts="1", StatusText=status)
            # One that lives is left alone for longer than the watchdog waits, and one that hangs is
            # not.
            begin = one.report()["uptime_s"]
            one.waits(WATCHDOG_S + 2)
            assert one.report()["uptime_s"] > begin and service.states()["MainPID"] == before["MainPID"], service.told()
            os.kill(service.manager.processes()[int(before["MainPID"])], signal.SIGSTOP)
            service.reaches("the next after a hang", ActiveState="active", NRestarts="2", StatusText=status)
            one.knows(two)
            # A failure that may pass is tried again.
            (keys / "node-1.key").chmod(0o644)
            service.control("restart", works=False)
            service.reaches("more tries", NRestarts=lambda text: int(text) >= 2, ExecMainStatus="1")
            assert "found mode 0644" in service.log.read_text()
            (keys / "node-1.key").chmod(0o600)
            service.reaches("the service", ActiveState="active", StatusText=status)
            # Wrong settings are not.
            good = service.file.read_text()
            service.file.write_text(good.replace("peer =", "peers ="))
            service.control("restart", works=False)
            failed = service.reaches("the end", ActiveState="failed", ExecMainStatus="2")
            assert failed["Result"] == "exit-code" and 'did you mean "peer"?' in service.log.read_text(), service.told()
            assert two.mac() in one.remotes()["node-2"], "the daemon keeps what it knows"
            service.file.write_text(good)
            service.control("start")
            service.control("stop")
            service.reaches("the end", ActiveState="inactive", Result="success", MainPID="0")
        two.span.stop()


@timeout(240)
def test_the_unit_of_a_user_runs_beside_the_users_fabric():
    need_span()
    with contextlib.ExitStack() as stack:
        folder, manager_folder, space = (stack.enter_context(each) for each in (scratch(), scratch(), Namespace()))
        user = UserManager(folder, manager_folder, space)
        program, settings = user.home / "bin/tombolo-span", user.home / ".config/tombolo/demo.span.toml"
        shutil.copy(SPAN, program)
        (user.home / ".config/tombolo/demo.toml").write_text('name = "mine"\n[network.lan]\n')
        settings.write_text('fabric = "mine"\nmachine = "node-1"\nlisten = "127.0.0.1:7447"\npeer = "node-2=127.0.0.2:7447"\nno_tls = true\n')
        text = (ROOT / "packaging/systemd" / f"user-{TEMPLATE}").read_text()
        assert "@BINDIR@" in text and "%E/tombolo/%i.span.toml" in text
        units = user.home / ".config/systemd/user"
        (units / TEMPLATE).write_text(text.replace("@BINDIR@", str(program.parent)))
        for path in (program, settings, units / TEMPLATE):
            os.chown(path, UID, UID)
        stack.enter_context(user)
        unit = "tombolo-span@demo.service"

        def states():
            return dict(line.split("=", 1) for line in user.systemctl("show", unit, "-p", ",".join(STATES)).stdout.splitlines())

        user.systemctl("start", unit)
        until("the wait for the fabric", lambda: "waiting for the fabric" in states()["StatusText"], PATIENCE_S)
        user.systemctl("start", "tombolo@demo.service")
        until("the fabric", lambda: "the fabric answers" in states()["StatusText"], PATIENCE_S)
        shown = user.run(user.program, "span", "status", "--fabric", "mine").stdout
        assert shown.startswith("node-1  of site default") and "node-2   unheard" in shown, shown
        user.systemctl("stop", unit, "tombolo@demo.service")
        assert states()["Result"] == "success" and states()["ActiveState"] == "inactive", states()
        user.run(user.program, "down", "--fabric", "mine", check=False)
