"""Completion of names at the prompts of real shells: bash and zsh on a terminal, fish by its own engine. None of it needs root."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import time

from lib import Fabric, need_program, scratch, timeout, until
from lib.fabric import PROGRAM

FABRIC = """
name = "{name}"
[network.inner]
subnet = "10.235.0.0/24"
[cell.webserver]
app = "httpd"
accel = "tcg"
[cell.database]
app = "httpd"
accel = "tcg"
[cell.reckoner]
app = "calc"
args = "net=none"
network = []
accel = "tcg"
[port.guest]
kind = "stream"
[link.calls]
between = ["reckoner"]
service = "multiply"
"""
# Escape sequences of terminals, which line editors mix into what they show.
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>])")


class Prompt:
    """A shell on a terminal, which has the program as `tombolo` in PATH, and its completions."""

    def __init__(self, shell, folder, env):
        need_program(shell)
        bin_folder = folder / "bin"
        bin_folder.mkdir(exist_ok=True)
        if not (bin_folder / "tombolo").exists():
            (bin_folder / "tombolo").symlink_to(PROGRAM)
        base = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "TERM": "xterm", "HOME": str(folder), "LC_ALL": "C.UTF-8"}
        command = {"bash": ["bash", "--noprofile", "--norc", "-i"], "zsh": ["zsh", "-f", "-i"]}[shell]
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(command[0], command, base | {name: value for name, value in env.items()})
        self.text = ""
        if shell == "bash":
            self.run("source <(tombolo completions bash)")
        else:
            # As a package installs it: a file that zsh loads at the first completion.
            functions = folder / "functions"
            functions.mkdir(exist_ok=True)
            script = subprocess.run([PROGRAM, "completions", "zsh"], check=True, stdout=subprocess.PIPE, text=True).stdout
            (functions / "_tombolo").write_text(script)
            self.run(f"fpath=({functions} $fpath); autoload -Uz compinit; compinit -u -D; unsetopt beep")

    def _read(self, seconds):
        if select.select([self.fd], [], [], seconds)[0]:
            with contextlib.suppress(OSError):
                self.text += os.read(self.fd, 65536).decode(errors="replace")

    def shown(self):
        self._read(0.05)
        return ESCAPES.sub("", self.text)

    def run(self, line):
        """Runs a command; its end is told by a word that the command line itself does not contain."""
        before = len(self.text)
        os.write(self.fd, f"{line}; echo do''ne\n".encode())
        until(f"the end of {line}", lambda: (self._read(0.05), "done" in self.text[before:])[1])

    def complete(self, line, expected, tabs=1):
        """Types `line` and Tab, waits until the text `expected` shows, and clears the line. Gives how long it took."""
        os.write(self.fd, b"\x15")
        self._read(0.2)
        self.text = ""
        begun = time.monotonic()
        self.typed(line + "\t" * tabs, expected)
        return time.monotonic() - begun

    def typed(self, text, expected):
        """Types more of the line, and waits until `expected` shows."""
        os.write(self.fd, text.encode())
        until(f"{expected} after {text!r}", lambda: expected in self.shown(), 20, seen=lambda: f"shown: {self.shown()!r}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.kill(self.pid, signal.SIGKILL)
        os.close(self.fd)
        os.waitpid(self.pid, 0)


def offered(folder, env, *words):
    """What the program offers for the last of the words, as a shell asks it."""
    asks = {"_TOMBOLO_COMPLETE": "bash", "_CLAP_COMPLETE_INDEX": str(len(words)), "_CLAP_IFS": "\n"}
    begun = time.monotonic()
    done = subprocess.run([PROGRAM, "--", "tombolo", *words], capture_output=True, text=True, cwd=folder, timeout=30,
                          env=os.environ | env | asks)
    assert done.returncode == 0 and not done.stderr, done
    return [line.strip() for line in done.stdout.splitlines() if not line.startswith("-")], time.monotonic() - begun


def fish_offers(folder, fabric, expected):
    """By fish's own engine: the line that it shows for each unfinished command."""
    need_program("fish")
    script = subprocess.run([PROGRAM, "completions", "fish"], check=True, stdout=subprocess.PIPE, text=True).stdout
    (folder / "tombolo.fish").write_text(script)
    # The shells before have put the program there.
    env = os.environ | fabric.env | {"HOME": str(folder), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    for line, offer in expected:
        done = subprocess.run(["fish", "--no-config", "-c", f"source {folder}/tombolo.fish; complete -C '{line}'"], capture_output=True, text=True,
                              cwd=folder, env=env, timeout=60)
        assert offer in [each.rstrip("\t") for each in done.stdout.splitlines()], (line, done)


@timeout(240)
def test_bash_zsh_and_fish_complete_names_of_a_running_fabric():
    name = f"cp{os.getpid()}"
    with scratch() as folder, Fabric(folder, FABRIC.format(name=name)) as fabric:
        fabric.cli("wait", "--for", "service", "multiply")
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        for shell in ("bash", "zsh"):
            with Prompt(shell, elsewhere, fabric.env) as prompt:
                prompt.complete("tombolo cell stop web", "webserver ")
                prompt.complete("tombolo cell console data", "database ")
                prompt.complete("tombolo port stats gu", "guest ")
                prompt.complete("tombolo capture --network in", "inner ")
                prompt.complete("tombolo call mul", "multiply ")
                prompt.complete("tombolo wait --for service mul", "multiply ")
                prompt.complete("tombolo service bridge cal", "calls ")
                prompt.complete(f"tombolo status --fabric {name[:3]}", f"{name} ")
                # Several that fit are listed; commands and flags are completed too.
                prompt.complete("tombolo logs ", "reckoner", tabs=2)
                prompt.complete("tombolo cell cons", "console ")
                prompt.complete("tombolo capture --snap", "--snaplen")
        fish_offers(elsewhere, fabric, (("tombolo cell stop web", "webserver\tcell, running"), ("tombolo --fabric ", f"{name}\truns"),
                                        ("tombolo call ", "multiply\tservice"), ("tombolo port stats gu", "guest\tstream on inner, down")))
        found, _ = offered(elsewhere, fabric.env, "cell", "run", "")
        assert {"webserver", "database", "httpd", "iperf"} <= set(found), found
        found, _ = offered(elsewhere, fabric.env, "events", "--fabric", name, "")
        assert {"webserver", "guest", "calls"} <= set(found), found


RULES = """
name = "{name}"
[network.inner]
subnet = "10.235.0.0/24"
uplink = "user"
ipv6 = "fd81:7:3::/64"
[port.front]
kind = "stream"
ip = "10.235.0.9"
ip6 = "fd81:7:3::9"
mac = "52:54:00:00:00:09"
groups = ["webs", "all"]
[port.back]
kind = "stream"
[[forward]]
listen = "127.81.7.3:18080"
to = "front:80"
[[forward]]
proto = "udp"
listen = "127.81.7.3:18081"
to = "front:80"
[[forward]]
listen = "[::1]:18082"
to = "front:80"
[[rule]]
action = "deny"
from = "webs"
to = "back"
[[rule]]
action = "allow"
"""


@timeout(240)
def test_bash_zsh_and_fish_complete_values_of_rules_forwards_and_keys():
    name = f"cv{os.getpid()}"
    with scratch() as folder, Fabric(folder, RULES.format(name=name)) as fabric:
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        for shell in ("bash", "zsh"):
            with Prompt(shell, elsewhere, fabric.env) as prompt:
                prompt.complete("tombolo rule add de", "deny ")
                prompt.complete("tombolo rule add deny --from we", "--from webs ")
                prompt.complete("tombolo rule add deny --to out", "--to outside ")
                prompt.complete("tombolo rule add deny --to=ba", "--to=back ")
                prompt.complete("tombolo rule add deny --protocol ic", "icmp ")
                prompt.complete("tombolo rule rm ", "2", tabs=2)
                # A member's port has to follow, so no space does.
                prompt.complete("tombolo forward add 127.0.0.1:8000 fr", "8000 front:")
                prompt.typed("8", "8000 front:8")
                prompt.complete("tombolo forward rm 127.8", "rm 127.81.7.3:18080 ")
                # Where bash takes the word apart.
                prompt.complete("tombolo forward rm 127.81.7.3:1", "rm 127.81.7.3:18080 ")
                prompt.complete("tombolo forward rm 127.81.7.3:", "rm 127.81.7.3:18080 ")
                if shell == "bash":
                    # Brackets are no pattern, whether or not a file fits or patterns without one vanish.
                    (elsewhere / "1:18082").touch()
                    for option in ("-u", "-s"):
                        prompt.run(f"shopt {option} nullglob")
                        prompt.complete("tombolo forward rm [", "rm [::1]:18082 ")
                    prompt.run("shopt -u nullglob")
                prompt.complete("tombolo forward rm 127.81.7.3:18080 --proto ud", "rm 127.81.7.3:18080 --proto udp ")
                prompt.complete("tombolo set port.front.cla", "set port.front.class=")
                prompt.complete("tombolo set port.front.class=ur", "set port.front.class=urgent ")
                prompt.complete(f"tombolo status --fabric={name[:3]}", f"--fabric={name} ")
        fish_offers(elsewhere, fabric, (
            ("tombolo rule add deny --from we", "webs\tgroup"), ("tombolo rule add deny --to out", "outside\tthe network's uplink"),
            ("tombolo forward add 127.0.0.1:8000 fr", "front:\tport"), ("tombolo forward rm 127", "127.81.7.3:18080\tto front:80"),
            ("tombolo forward rm --proto udp 127", "127.81.7.3:18081\tto front:80"), ("tombolo rule add deny --at ", "3\tbehind all"),
            ("tombolo rule rm ", '1\t{ action = "deny", from = "webs", to = "back" }'), ("tombolo set port.front.class=m", "port.front.class=marked")))
        # What was changed while it runs is known at once.
        fabric.cli("rule", "rm", "1")
        fabric.cli("set", "port.back.groups=later")
        assert offered(elsewhere, fabric.env, "rule", "rm", "")[0] == ["1"]
        assert "later" in offered(elsewhere, fabric.env, "rule", "add", "deny", "--from", "")[0]


@timeout(120)
def test_names_come_from_the_file_where_no_fabric_runs_and_nothing_is_waited_for():
    name = f"cq{os.getpid()}"
    with scratch() as folder:
        env = {"TOMBOLO_RUNTIME": str(folder / "run"), "TOMBOLO_STATE": str(folder / "state")}
        assert offered(folder, env, "cell", "stop", "")[0] == []
        assert offered(folder, env, "--fabric", "")[0] == []
        # A file that is being edited.
        (folder / "tombolo.toml").write_text(FABRIC.format(name=name) + "[cell.half]\napp =")
        assert set(offered(folder, env, "logs", "")[0]) >= {"daemon", "database", "half", "reckoner", "webserver"}
        (folder / "other.toml").write_text("[vm.elsewhere]\n")
        assert offered(folder, env, "-f", "other.toml", "cell", "console", "")[0] == ["elsewhere"]
        # Names that a shell or a terminal would take for something else.
        (folder / "tombolo.toml").write_text('[cell."a$(touch x)"]\n[cell."\\u001b[2J"]\n[cell.plain]\n')
        assert offered(folder, env, "cell", "stop", "")[0] == ["plain"]
        # A file that is never read to its end.
        (folder / "tombolo.toml").unlink()
        os.mkfifo(folder / "tombolo.toml")
        found, seconds = offered(folder, env, "cell", "stop", "")
        assert found == [] and seconds < 8, (found, seconds)


@timeout(120)
def test_a_daemon_that_hangs_does_not_hold_up_a_prompt():
    name = f"cr{os.getpid()}"
    with scratch() as folder, Fabric(folder, f'name = "{name}"\n[network.lan]\n[port.guest]\nkind = "stream"\n') as fabric:
        fabric.process.signal(signal.SIGSTOP)
        try:
            found, seconds = offered(folder, fabric.env, "port", "stats", "")
            # It is asked for 0.7 s, where commands wait for 10 s.
            assert found == ["guest"] and 0.6 < seconds < 8, (found, seconds)
            found, seconds = offered(folder, fabric.env, "--fabric", "")
            assert name in found and seconds < 8, (found, seconds)
        finally:
            fabric.process.signal(signal.SIGCONT)
