"""A fabric of the program's own, for tests: `tombolo up` on a file, asked through `tombolo status`, killed and started again."""

import json
import os
import signal
import subprocess

from .machine import ROOT, Skip
from .process import Process, until

PROGRAM = ROOT / "target/release/tombolo"


class Fabric:
    """`tombolo up` in the foreground, on a file written into `folder` (one of `scratch()`), with its runtime files there too.

    The `with` ends it by SIGTERM and then SIGKILL. `kill` and `start` are for tests of what a crash leaves behind.
    """

    def __init__(self, folder, text, netns=None):
        if not PROGRAM.exists():
            raise Skip("target/release/tombolo is not built: run ./x build")
        self.folder, self.netns = folder, netns
        self.file = folder / "tombolo.toml"
        self.file.write_text(text)
        self.env = {"TOMBOLO_RUNTIME": str(folder / "run"), "TOMBOLO_STATE": str(folder / "state")}
        self.process = None
        self.start()

    def start(self, seconds=30):
        """Starts the daemon and waits until it answers `status`."""
        self.process = Process([PROGRAM, "up", self.file], name="tombolo", netns=self.netns, env=self.env, cwd=self.folder)

        def answers():
            if not self.process.alive():
                raise AssertionError(f"tombolo ended with {self.process.popen.returncode}:\n{self.process.tail()}")
            return self.cli("status", "--json", check=False).returncode == 0

        try:
            until("tombolo's answer to status", answers, seconds, every=0.1)
        except BaseException:
            self.process.kill()
            raise

    def cli(self, *words, seconds=30, check=True):
        """Runs `tombolo WORDS` as a user of this fabric would; gives the CompletedProcess."""
        command = [str(PROGRAM), *map(str, words)]
        if self.netns is not None:
            command = ["ip", "netns", "exec", str(self.netns), *command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=dict(os.environ, **self.env), cwd=self.folder)
        if check and done.returncode:
            raise AssertionError(f"`tombolo {' '.join(map(str, words))}` ended with {done.returncode}: {done.stderr.strip()}")
        return done

    def status(self):
        return json.loads(self.cli("status", "--json").stdout)

    def port(self, name):
        """One port's part of the status."""
        return next(port for port in self.status()["ports"] if port["name"] == name)

    def kill(self):
        """SIGKILL to the daemon alone: what a crash is."""
        self.process.signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.process.stop(10)
        except TimeoutError:
            pass
        self.process.kill()
