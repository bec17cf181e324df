"""What a fabric keeps on disk: for its own user only, whatever the umask is."""

import contextlib
import os
import stat
import subprocess

from lib import Fabric, need_program, need_root, scratch, until
from lib.fabric import PROGRAM

FILE = """
name = "{name}"
[network.lan]
uplink = "user"
[cell.web]
app = "httpd"
[cell.old]
app = "httpd"
attach = "stream"
[cell.mem]
app = "httpd"
attach = "ivshmem"
[port.vhost]
kind = "vhost-user"
[port.stream]
kind = "stream"
[port.shared]
kind = "ivshmem"
[link.direct]
between = ["web"]
seats = 1
"""


def open_to_others(*folders):
    """Everything below the folders, and themselves, that others have any right to, with its mode."""
    found, seen = [], []
    for top in folders:
        for folder, names, files in os.walk(top):
            for path in [folder, *(os.path.join(folder, name) for name in [*names, *files])]:
                with contextlib.suppress(FileNotFoundError):
                    mode = os.lstat(path).st_mode
                    seen.append(path)
                    if stat.S_IMODE(mode) & 0o077:
                        found.append(f"{path} {stat.filemode(mode)}")
    return found, seen


def test_files_and_sockets_are_private_under_any_umask():
    need_root()
    need_program("passt")
    os.umask(0)
    name = f"private{os.getpid()}"
    with scratch() as folder, Fabric(folder, FILE.format(name=name)) as fabric:
        run, state = folder / "run" / name, folder / "state" / name
        until("every machine", lambda: all(m["state"] == "running" for m in fabric.status()["machines"]))
        record = folder / "capture.pcapng"
        # A file that was there already, open to all, is closed too.
        record.touch(0o666)
        fabric.cli("capture", "web", "-w", record, "--seconds", "1")
        found, seen = open_to_others(run, state, record)
        assert not found, found
        kinds = {os.path.basename(path) for path in seen}
        for part in ["api.sock", "owner.json", "lock", "web.console", "web.log", "web.tty", "vhost.sock", "stream.sock", "shared.sock"]:
            assert part in kinds, (part, sorted(kinds))
        assert any("qmp" in kind for kind in kinds), sorted(kinds)
        assert not stat.S_IMODE(os.stat(record).st_mode) & 0o077
        fabric.down()
        # And as a daemon, whose log is a file.
        env = dict(os.environ, **fabric.env)
        subprocess.run([PROGRAM, "up", "-d", fabric.file], env=env, check=True, capture_output=True)
        found, seen = open_to_others(run, state)
        assert not found, found
        assert str(run / "log") in seen, seen
        fabric.cli("down", "--fabric", name)
