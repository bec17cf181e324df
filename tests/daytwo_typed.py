"""docs/day-two.md, typed: the commands of its blocks, one after the other, on a fabric that is like the one they are about. What a
command prints is compared where the page shows it without times and numbers of processes."""

import os
import re
import subprocess

from lib import Namespace, need_root, scratch, timeout
from lib.fabric import PROGRAM
from lib.machine import ROOT, Skip

PAGE = ROOT / "docs/day-two.md"
BEFORE = """
name = "demo"
[network.lan]
subnet = "10.87.0.0/24"
uplink = "user"
[cell.web]
app = "httpd"
memory = "32M"
accel = "tcg"
[port.guest]
kind = "vhost-user"
[[forward]]
listen = "127.0.0.1:8000"
to = "web:80"
"""
AFTER = BEFORE.replace("32M", "64M").replace('"vhost-user"\n', '"vhost-user"\nrate = { send = "100M" }\n') + """
[cell.web2]
app = "httpd"
accel = "tcg"
"""
# Commands whose output the page shows as it is each time.
COMPARED = ("tombolo check", "tombolo apply --dry-run", "tombolo set port.guest.rate")
# It records until it is interrupted.
ENDLESS = "tombolo capture"


def blocks():
    """The commands of the page with what it shows of their output, in order."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.S):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


@timeout(400)
def test_the_commands_of_the_page_do_what_it_says():
    if not PROGRAM.exists():
        raise Skip(f"{PROGRAM} is not built: run ./x build")
    need_root()
    with Namespace() as space, scratch() as folder:
        space.way_out()
        env = dict(os.environ, TOMBOLO_RUNTIME=str(folder / "run"), TOMBOLO_STATE=str(folder / "state"), PATH=f"{PROGRAM.parent}:{os.environ['PATH']}")

        def typed(line):
            return subprocess.run(["ip", "netns", "exec", str(space), "sh", "-c", line], env=env, cwd=folder, capture_output=True, text=True, timeout=120)

        file = folder / "tombolo.toml"
        file.write_text(BEFORE)
        up = typed("tombolo up -d --wait=100")
        try:
            assert up.returncode == 0, up
            file.write_text(AFTER)
            count = 0
            for line, shown in blocks():
                if line.startswith(ENDLESS):
                    continue
                done = typed(line)
                assert done.returncode == 0, (line, done)
                if line.startswith(COMPARED):
                    assert done.stdout.splitlines() == shown, (line, done.stdout, shown)
                count += 1
            assert count > 15, f"{count} commands were found"
        finally:
            down = typed("tombolo down")
        assert down.returncode == 0, down
