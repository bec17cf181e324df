"""docs/span.md, typed: the ten commands from two bare machines to a network and a call. The machines are namespaces, whose folders stand for
/etc/tombolo; what `ssh` and `scp` do is done here, and what the units start is started as they do it."""

import contextlib
import os
import re
import subprocess

from lib import Namespace, Process, need_program, need_root, scratch, timeout, until
from lib.fabric import PROGRAM
from lib.machine import ROOT, SLOW
from lib.netns import Bridge
from span_control import SPAN
from span_unit import need_span

PAGE = ROOT / "docs/span.md"
ADDRESS = {"node-1": "192.0.2.1", "node-2": "192.0.2.2"}
UNITS = "systemctl enable --now tombolo@home tombolo-span@home"


def section():
    """The file of the section, and its commands with the output that it shows, by block."""
    text = PAGE.read_text().split("\n## In ten commands\n")[1].split("\n## ")[0]
    [file] = re.findall(r"```toml\n(.*?)```", text, re.S)
    blocks = []
    for block in re.findall(r"```console\n(.*?)```", text, re.S):
        blocks.append([])
        for line in block.splitlines():
            if line[:2] in ("$ ", "# "):
                blocks[-1].append((line[2:], []))
            else:
                blocks[-1][-1][1].append(line)
    return file, blocks


@timeout(400)
def test_the_ten_commands_lead_to_a_network_and_a_call():
    need_root()
    need_span()
    need_program("curl")
    need_program("ethtool")
    file, (anywhere, on_both, on_the_other) = section()
    assert len(anywhere) + len(on_both) + len(on_the_other) == 10
    with scratch() as folder, contextlib.ExitStack() as stack:
        bridge = stack.enter_context(Bridge())
        spaces = {name: stack.enter_context(Namespace()) for name in ADDRESS}
        for name, space in spaces.items():
            bridge.join(space, name, ADDRESS[name])
            space.run("ethtool", "-K", "eth0", "tx", "off")

        def here(line, name=None):
            line = re.sub(r"ssh root@(node-\d) mkdir -p /etc/tombolo", rf"mkdir -p {folder}/\1", line)
            line = re.sub(r"root@(node-\d):/etc/tombolo", rf"{folder}/\1", line).replace("scp ", "cp ")
            return line.replace("/etc/tombolo", f"{folder}/{name}")

        def typed(line, name=None, check=True):
            env = dict(os.environ, PATH=f"{PROGRAM.parent}:{os.environ['PATH']}")
            if name is not None:
                env |= {"TOMBOLO_RUNTIME": f"{folder}/run-{name}", "TOMBOLO_STATE": f"{folder}/state-{name}"}
            prefix = [] if name is None else ["ip", "netns", "exec", str(spaces[name])]
            done = subprocess.run([*prefix, "sh", "-c", here(line, name)], env=env, cwd=folder, capture_output=True, text=True, timeout=200)
            assert not check or done.returncode == 0, (line, done)
            return done.stdout.splitlines()

        (folder / "home.toml").write_text(file)
        for line, _ in anywhere:
            typed(line)
        [settings, (start, _)] = on_both
        assert start == UNITS, start
        for name in ADDRESS:
            typed(settings[0].replace("node-1", name), name)
            # As the units: by the name of the machine, which a namespace has not.
            stack.callback(typed, f"tombolo down --fabric home-{name}", name)
            typed(f"cd /etc/tombolo && tombolo up -d --machine {name} home.toml", name)
            environment = {"TOMBOLO_RUNTIME": f"{folder}/run-{name}"}
            span = Process([SPAN, "--config", folder / name / "home.span.toml"], name=f"span-{name}", netns=spaces[name], env=environment)
            stack.callback(span.kill)
        [(call, shown), (status, _), (fetch, _)] = on_the_other
        call = call.replace("50ms", f"{50 * SLOW}ms")
        until("the call to be served in time", lambda: typed(call, "node-2", check=False) == shown, 120)
        # It says what is missing until tombolo-span has told the fabric.
        until("node-1", lambda: any(re.search(r"node-1 +up", line) for line in typed(status, "node-2", check=False)), 60)
        until("the page of the far member", lambda: typed(fetch, "node-2", check=False), 120)
