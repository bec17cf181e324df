"""A fabric of the program's own, for tests: `tombolo up` on a file, asked through `tombolo status`, killed and started again."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import tomllib
from pathlib import Path

from .guest import Commands
from .machine import ROOT, Skip
from .netns import inside
from .process import PATIENCE_S, Process, cpu_seconds, until

PROGRAM = Path(os.environ.get("TOMBOLO_PROGRAM", ROOT / "target/release/tombolo"))


class Api(http.client.HTTPConnection):
    """HTTP on a fabric's Unix socket."""

    def __init__(self, path):
        super().__init__("localhost", timeout=60)
        self.path = str(path)

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)

    def ask(self, method, path, body=None):
        """The status of the answer, and its JSON; None where it has no body."""
        self.request(method, path, None if body is None else json.dumps(body))
        answer = self.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else None


class Fabric:
    """`tombolo up` in the foreground, on a file written into `folder` (one of `scratch()`), with its runtime files there too.

    The `with` ends it by SIGTERM and then SIGKILL. `kill` and `start` are for tests of what a crash leaves behind. `process.started` is
    when the daemon was started last, by time.monotonic(). `options` are further ones of `up`. `machine` is the one meant, of a file for several.
    `env` is added to the environment of all its programs. `prefix` are the words before the daemon's, such as those of setpriv; commands are
    run without them.
    """

    def __init__(self, folder, text, netns=None, nice=None, own_mounts=True, options=(), machine=None, env=None, prefix=()):
        if not PROGRAM.exists():
            raise Skip(f"{PROGRAM} is not built: run ./x build")
        self.folder, self.netns, self.nice, self.own_mounts, self.options = folder, netns, nice, own_mounts, options
        self.file = folder / "tombolo.toml"
        self.file.write_text(text)
        self.env = {"TOMBOLO_RUNTIME": str(folder / "run"), "TOMBOLO_STATE": str(folder / "state"), **(env or {})}
        self.name = tomllib.loads(text)["name"]
        if machine:
            self.options = ("--machine", machine, *options)
            self.name = self.env["TOMBOLO_FABRIC"] = f"{self.name}-{machine}"
        self.prefix = prefix
        self.devices_before = []
        if netns is not None:
            links = subprocess.run(["ip", "-n", str(netns), "-j", "link"], capture_output=True, text=True, check=True).stdout
            self.devices_before = [link["ifname"] for link in json.loads(links)]
        self.process = None
        self.start()

    def start(self, seconds=PATIENCE_S):
        """Starts the daemon and waits until it answers `status`."""
        self.process = Process([*self.prefix, PROGRAM, "up", *self.options, self.file], name="tombolo", netns=self.netns, nice=self.nice, env=self.env, cwd=self.folder,
                               own_mounts=self.own_mounts)

        def answers():
            if not self.process.alive():
                raise AssertionError(f"tombolo ended with {self.process.popen.returncode}:\n{self.process.tail()}")
            return self.cli("status", "--json", check=False).returncode == 0

        try:
            until("tombolo's answer to status", answers, seconds, every=0.1)
        except BaseException:
            self.process.kill()
            raise

    def cli(self, *words, seconds=PATIENCE_S, check=True):
        """Runs `tombolo WORDS` as a user of this fabric would; gives the CompletedProcess."""
        command = [str(PROGRAM), *map(str, words)]
        if self.netns is not None:
            command = [*inside(self.netns, self.own_mounts), *command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=dict(os.environ, **self.env), cwd=self.folder)
        if check and done.returncode:
            raise AssertionError(f"`tombolo {' '.join(map(str, words))}` ended with {done.returncode}: {done.stderr.strip()}")
        return done

    @property
    def runtime(self):
        """The folder of its runtime files."""
        return Path(self.env["TOMBOLO_RUNTIME"]) / self.name

    def ask(self, method, path, body=None):
        """A request on its API, on a connection of its own: the status, and the JSON of the answer."""
        with contextlib.closing(Api(self.runtime / "api.sock")) as api:
            return api.ask(method, path, body)

    def status(self):
        return json.loads(self.cli("status", "--json").stdout)

    def port(self, name):
        """One port's part of the status."""
        return next(port for port in self.status()["ports"] if port["name"] == name)

    def machine(self, name):
        """One machine's part of the status."""
        return next(machine for machine in self.status()["machines"] if machine["name"] == name)

    def machine_pids(self):
        """The processes of the machines that run."""
        return [machine["pid"] for machine in self.status()["machines"] if machine.get("pid")]

    def cpu_meter(self):
        """A function that gives the CPU time so far of the daemon and the machines, those that run now."""
        # They are asked for once, so that asking is no part of what is measured.
        pids = [self.process.pid, *self.machine_pids()]
        return lambda: sum(map(cpu_seconds, pids))

    def console_path(self, machine):
        """The file of a machine's console, begun again each time the machine starts."""
        return self.folder / "run" / self.name / f"{machine}.console"

    def console(self, machine):
        """What a machine has written to its console so far."""
        path = self.console_path(machine)
        return path.read_text(errors="replace") if path.exists() else ""

    def leftovers(self):
        """What there is of this fabric, in words: processes, bound sockets, devices it made, rules, runtime files.

        Devices and rules are those of its namespace; without one only processes, sockets and files are looked at.
        """
        found = []
        mark = str(self.folder)
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if mark in words:
                    found.append(f"process {entry.name}: {words[:80]}")
        prefix = inside(self.netns) if self.netns is not None else []
        look = lambda *argv: subprocess.run([*prefix, *argv], capture_output=True, text=True, check=True).stdout  # noqa: E731
        found += [f"socket {line.split()[-1]}" for line in look("cat", "/proc/net/unix").splitlines() if mark in line]
        if self.netns is not None:
            links = [link["ifname"] for link in json.loads(look("ip", "-j", "link"))]
            found += [f"device {link}" for link in links if link not in self.devices_before]
            found += [line for line in look("nft", "list", "tables").splitlines() if "tombolo" in line]
        folder = self.folder / "run" / self.name
        if folder.exists():
            found += [f"file {path}" for path in [folder, *folder.iterdir()]]
        return found

    def nothing_left(self):
        """Asserts that nothing is left of it. What goes with a process may go an instant after `down` has answered."""
        with contextlib.suppress(TimeoutError):
            until("nothing left", lambda: not self.leftovers(), 20)
        leftovers = self.leftovers()
        assert not leftovers, "\n".join(leftovers)

    def down(self, seconds=PATIENCE_S):
        """`tombolo down`: the daemon ends, and nothing is left."""
        self.cli("down", "--fabric", self.name, seconds=seconds)
        self.process.wait()
        self.nothing_left()

    def replace(self, seconds=PATIENCE_S, ends=True):
        """`tombolo up --replace`, in the foreground as the daemon before, which this gives back. Waits until that one has ended, unless
        `ends` is false: one that waits for a file system cannot."""
        before = self.process
        self.process = Process([PROGRAM, "up", "--replace", *self.options, self.file], name="tombolo", netns=self.netns, env=self.env, cwd=self.folder,
                               own_mounts=self.own_mounts)
        if ends:
            assert before.wait(seconds) == 0, before.tail()
        self.process.wait_line(lambda line: "is up after" in line, seconds)
        return before

    def kill(self):
        """SIGKILL to the daemon alone: what a crash is."""
        self.process.signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        """SIGTERM to the daemon, and SIGKILL if it does not end by that. Where SIGTERM leaves the fabric to the next one, `down` ends it first."""
        if "--leave-on-term" in self.options:
            self.cli("down", "--fabric", self.name, check=False)
        with contextlib.suppress(TimeoutError):
            self.process.stop(30)
        self.process.kill()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class Console(Process, Commands):
    """The console of a stock Linux guest in a fabric, through the program."""

    def __init__(self, machine, fabric, env=None):
        super().__init__([PROGRAM, "cell", "console", machine, "--fabric", fabric], name=machine, stdin=True, env=env)
