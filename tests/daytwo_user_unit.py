"""The user unit that packages install, word for word, under a real user manager: systemd as process 1 of its own namespaces starts
`systemd --user` for a user without any rights, as user@UID.service does, and that one runs the fabric."""

import contextlib
import json
import os
import pwd
import shutil
import signal

from lib import ROOT, Namespace, http_get, scratch, timeout, until
from lib.fabric import PROGRAM
from lib.guest import CellGuest
from lib.systemd import Manager

# A user without any rights that every Debian has (base-passwd); systemd starts services of known
# users only.
UID = pwd.getpwnam("games").pw_uid
TEMPLATE, UNIT = "tombolo@.service", "tombolo@demo.service"
USER_MANAGER = f"user@{UID}.service"
PATIENCE_S = 120
FABRIC = """
name = "mine"
[network.lan]
subnet = "10.237.0.0/24"
uplink = "user"
[cell.web]
app = "httpd"
accel = "tcg"
[[forward]]
listen = "127.0.0.1:18080"
to = "web:80"
"""
# As user@.service of systemd, without what asks PAM and logind for a session.
MANAGER_UNIT = """
[Unit]
DefaultDependencies=no
[Service]
Type=notify
User={uid}
Group={uid}
ExecStart={program} --user --unit=basic.target --log-target=console
Environment=XDG_RUNTIME_DIR=/run/user/{uid} HOME={home} SYSTEMD_UNIT_PATH={units} SYSTEMD_GENERATOR_PATH={none} PATH={path}
Environment=SYSTEMD_ENVIRONMENT_GENERATOR_PATH={none}
RuntimeDirectory=user/{uid}
RuntimeDirectoryMode=0700
Delegate=yes
KillMode=mixed
StandardOutput=append:{log}
StandardError=inherit
"""


class UserManager:
    """A user manager in the namespace `space`, with the unit of the package and `demo.toml` in ~/.config/tombolo."""

    def __init__(self, folder, manager_folder, space):
        self.folder, self.home, self.log_file = folder, folder / "home", folder / "log"
        folder.chmod(0o755)
        bin_folder, apps, units = self.home / "bin", self.home / "apps", self.home / ".config/systemd/user"
        for each in (bin_folder, apps, units, self.home / ".config/tombolo", self.home / "none"):
            each.mkdir(parents=True)
        # Copies, since the checkout may be where others cannot look.
        self.program = bin_folder / "tombolo"
        shutil.copy(PROGRAM, self.program)
        shutil.copy(CellGuest.IMAGES / "httpd", apps)
        (self.home / ".config/tombolo/demo.toml").write_text(FABRIC)
        text = (ROOT / "packaging/systemd/user-tombolo@.service").read_text()
        assert "@BINDIR@" in text and "%E/tombolo/%i.toml" in text
        (units / TEMPLATE).write_text(text.replace("@BINDIR@", str(bin_folder)))
        (units / f"{UNIT}.d").mkdir()
        (units / f"{UNIT}.d/test.conf").write_text(f"[Service]\nEnvironment=TOMBOLO_APPS={apps}\nStandardOutput=append:{self.home}/service.log\nStandardError=inherit\n")
        for target in ("basic.target", "shutdown.target", "default.target"):
            (units / target).write_text("[Unit]\nDefaultDependencies=no\n")
        for path in [self.home, *self.home.rglob("*")]:
            os.chown(path, UID, UID)
        self.manager = Manager(manager_folder, space, {}, [folder])
        self.unit = MANAGER_UNIT.format(uid=UID, program=self.manager.program, home=self.home, units=units, none=self.home / "none", path=os.environ["PATH"],
                                        log=self.log_file)
        (manager_folder / "units" / USER_MANAGER).write_text(self.unit)

    def run(self, *argv, check=True, seconds=PATIENCE_S):
        """Runs a program as the user, in a shell of a session as it were."""
        user = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--no-new-privs")
        env = {"XDG_RUNTIME_DIR": f"/run/user/{UID}", "HOME": str(self.home), "TOMBOLO_APPS": str(self.home / "apps")}
        return self.manager.run(*user, *argv, check=check, seconds=seconds, env=env)

    def systemctl(self, *words, check=True):
        done = self.run("systemctl", "--user", "--no-pager", *words, check=False)
        assert not check or done.returncode == 0, f"systemctl --user {' '.join(words)}: {done.stderr}\n{self.log()}"
        return done

    def show(self, *properties):
        text = self.systemctl("show", UNIT, "-p", ",".join(properties)).stdout
        return dict(line.split("=", 1) for line in text.splitlines())

    def status(self):
        return json.loads(self.run(self.program, "status", "--json", "--fabric", "mine").stdout)

    def log(self):
        logs = [self.log_file, self.home / "service.log"]
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in logs if path.exists())

    def __enter__(self):
        self.manager.__enter__()
        try:
            done = self.manager.systemctl("start", USER_MANAGER, check=False)
            said = self.manager.show(USER_MANAGER, "Result", "ExecMainCode", "ExecMainStatus")
            assert done.returncode == 0, f"{done.stderr}\n{said}\n{self.log()}"
        except BaseException:
            self.manager.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_):
        self.manager.__exit__(None, None, None)


@timeout(240)
def test_a_user_manager_starts_reloads_restarts_and_stops_a_fabric():
    with contextlib.ExitStack() as stack:
        folder, manager_folder, space = (stack.enter_context(each) for each in (scratch(), scratch(), Namespace()))
        # passt wants an interface with a route to outside.
        outside = stack.enter_context(Namespace())
        space.ip("link", "add", "out", "type", "veth", "peer", "name", "in", "netns", str(outside))
        space.ip("address", "add", "192.0.2.2/24", "dev", "out")
        space.ip("link", "set", "out", "up")
        outside.ip("link", "set", "in", "up")
        space.ip("route", "add", "default", "via", "192.0.2.1")
        user = stack.enter_context(UserManager(folder, manager_folder, space))
        assert "running" in user.systemctl("is-system-running", check=False).stdout, user.log()
        user.systemctl("start", UNIT)
        # Type=notify: it is up when the command returns.
        status = user.status()
        said = user.show("ActiveState", "SubState", "MainPID", "NRestarts", "ControlGroup")
        assert (said["ActiveState"], said["SubState"]) == ("active", "running"), (said, user.log())
        assert int(said["MainPID"]) == status["pid"], (said, status["pid"])
        assert f"user@{UID}.service" in said["ControlGroup"], said
        assert status["warnings"] == [], status["warnings"]

        def page():
            with contextlib.suppress(OSError):
                return http_get("127.0.0.1", "/", 18080, netns=space).status == 200

        until("the cell's page, through passt", page, PATIENCE_S)
        cell = status["machines"][0]["pid"]

        def stays(what, before):
            status = user.status()
            assert status["pid"] != before and status["machines"][0]["pid"] == cell, f"{what}: {status['pid']}, {status['machines']}\n{user.log()}"
            said = user.show("ActiveState", "MainPID")
            assert (said["ActiveState"], int(said["MainPID"])) == ("active", status["pid"]), said
            until(f"the page after {what}", page, PATIENCE_S)
            return status["pid"]

        user.systemctl("reload", UNIT)
        daemon = stays("a reload", status["pid"])
        # A crash: systemd starts the next daemon, and the cell runs on.
        user.run("kill", "-9", str(daemon))
        until("the next daemon", lambda: user.show("NRestarts", "ActiveState") == {"NRestarts": "1", "ActiveState": "active"}, PATIENCE_S)
        daemon = stays("a crash", daemon)
        user.systemctl("restart", UNIT)
        stays("a restart", daemon)
        # A stop leaves the guests to the next start, and `down` ends them.
        user.systemctl("stop", UNIT)
        assert user.show("ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}, user.log()
        assert user.run("kill", "-0", str(cell), check=False).returncode == 0, "the cell runs on"
        user.systemctl("start", UNIT)
        stays("a stop and a start", 0)
        user.run(user.program, "down", "--fabric", "mine")
        until("the service's end", lambda: user.show("ActiveState")["ActiveState"] == "inactive", PATIENCE_S)
        assert user.run("kill", "-0", str(cell), check=False).returncode, "the cell has ended"
        left = user.run("find", f"/run/user/{UID}/tombolo", "-type", "s", check=False).stdout
        assert left == "", left


@timeout(120)
def test_a_fabric_file_that_is_not_there_is_a_condition_and_a_faulty_one_a_failure():
    with contextlib.ExitStack() as stack:
        folder, manager_folder, space = (stack.enter_context(each) for each in (scratch(), scratch(), Namespace()))
        user = stack.enter_context(UserManager(folder, manager_folder, space))
        file = user.home / ".config/tombolo/demo.toml"
        good = file.read_text()
        file.unlink()
        user.systemctl("start", UNIT)
        assert user.show("ActiveState", "ConditionResult") == {"ActiveState": "inactive", "ConditionResult": "no"}, user.log()
        file.write_text("[network.lan]\nmtu = 1\n")
        os.chown(file, UID, UID)
        assert user.systemctl("start", UNIT, check=False).returncode
        until("the fault in the log", lambda: "network.lan.mtu" in user.log())
        # It is tried until it works, also longer than systemd's own patience.
        until("eight tries", lambda: int(user.show("NRestarts")["NRestarts"]) >= 8, 60)
        file.write_text(good)
        until("the service to run", lambda: user.show("ActiveState")["ActiveState"] == "active", PATIENCE_S)
        user.run(user.program, "down", "--fabric", "mine")
        until("the service's end", lambda: user.show("ActiveState")["ActiveState"] == "inactive", PATIENCE_S)
        assert signal.Signals.SIGUSR2.name in (ROOT / "packaging/systemd/user-tombolo@.service").read_text()
