"""Peers of the switch that use DPDK, and the hugepages that they need.

Import this within `open` only: it loads the repository's test harness.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tombolo_lab import LabError, harness

NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")


def run(*argv: object, env: dict | None = None) -> str:
    """Runs a program to its end; LabError with its words when it fails."""
    words = [str(word) for word in argv]
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=60)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise LabError(f"`{' '.join(words)}` ended with {done.returncode}: {said}")
    return done.stdout


def _free() -> int:
    found = re.search(r"HugePages_Free:\s+(\d+)", Path("/proc/meminfo").read_text())
    return int(found[1]) if found else 0


@contextlib.contextmanager
def hugepages(folder: Path, count: int) -> Iterator[None]:
    """`count` hugepages of 2 MiB within the `with`; DPDK takes them from `folder/huge`.

    The mounts are in the run's own mount namespace, and the number of pages is restored when the
    run is killed too.
    """
    huge, dpdk = folder / "huge", folder / "dpdk"
    huge.mkdir()
    dpdk.mkdir()
    with contextlib.ExitStack() as stack:
        missing = count - _free()
        if missing > 0:
            before = int(NR_HUGEPAGES.read_text())
            stack.enter_context(harness.kernel_setting(NR_HUGEPAGES, before + missing))
        if _free() < count:
            raise LabError(
                f"{count} hugepages of 2 MiB are needed, the kernel found {_free()}: free memory "
                "or reboot"
            )
        run("mount", "-t", "hugetlbfs", "-o", "pagesize=2M", "huge", huge)
        stack.callback(subprocess.run, ["umount", "-l", str(huge)], capture_output=True)
        # DPDK keeps its locks and its memory map here, with any file prefix.
        Path("/run/dpdk").mkdir(exist_ok=True)
        run("mount", "--bind", dpdk, "/run/dpdk")
        stack.callback(subprocess.run, ["umount", "-l", "/run/dpdk"], capture_output=True)
        yield


class Testpmd(harness.Process):
    """An interactive testpmd on one CPU. `vdevs` are EAL's --vdev values, `options` testpmd's."""

    def __init__(
        self, folder: Path, prefix: str, cpu: int, vdevs: Sequence[str], options: Sequence[str] = ()
    ):
        eal = ["stdbuf", "-oL", "dpdk-testpmd", "--lcores", f"0@{cpu},1@{cpu}", "--no-pci"]
        eal += ["-m", "256", "--single-file-segments", f"--file-prefix={prefix}"]
        eal += [f"--huge-dir={folder}/huge", "--no-telemetry"]
        for vdev in vdevs:
            eal += ["--vdev", vdev]
        # Both lcores share the CPU: the main one only waits for commands.
        own = ["--", "-i", "--port-topology=paired", "--rxq=1", "--txq=1", *options]
        super().__init__(eal + own, name=f"testpmd-{prefix}", stdin=True, nice=harness.FIRST)
        self.marks = 0

    def command(self, text: str, seconds: float = 10) -> str:
        """Sends one command and gives what it printed."""
        self.marks += 1
        since = len(self.lines)
        # testpmd answers line by line, so a word that it does not know marks the end.
        mark = f"endmark{self.marks}"
        self.send(f"{text}\n{mark}\n")
        ends = ("Bad arguments", "Command not found", mark)
        _, _, number = self.wait_line(lambda line: any(end in line for end in ends), seconds, since)
        return "\n".join(line for _, line in self.lines[since:number])

    def stats(self) -> tuple[int, int, float]:
        """Frames received and sent over all ports so far, and the moment of this look."""
        text = self.command("show port stats all")
        received = sum(int(value) for value in re.findall(r"RX-packets:\s*(\d+)", text))
        sent = sum(int(value) for value in re.findall(r"TX-packets:\s*(\d+)", text))
        return received, sent, time.monotonic()


class OpenVSwitch:
    """ovsdb-server and the DPDK vswitchd with all their files in `folder`; one bridge, NORMAL
    switching. Hugepages come from `folder`'s parent."""

    PROGRAM = "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk"

    def __init__(self, folder: Path, cpu: int, sockets: Sequence[str]):
        self.folder = Path(folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        names = ("OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "OVS_SYSCONFDIR")
        self.env = {name: str(self.folder) for name in names}
        schema = "/usr/share/openvswitch/vswitch.ovsschema"
        run("ovsdb-tool", "create", self.folder / "conf.db", schema)
        self.socket = f"unix:{self.folder}/db.sock"
        server = ["ovsdb-server", f"--remote=p{self.socket}", str(self.folder / "conf.db")]
        self.processes = [harness.Process([*server, "--no-chdir"], env=self.env)]
        try:
            self._start(cpu, sockets)
        except BaseException:
            self.close()
            raise

    def _start(self, cpu: int, sockets: Sequence[str]) -> None:
        harness.until("ovsdb-server's socket", (self.folder / "db.sock").exists)
        self.vsctl("--no-wait", "init")
        mask = hex(1 << cpu)
        extra = f"--file-prefix=ovs --huge-dir={self.folder.parent}/huge --single-file-segments"
        for setting in (
            "dpdk-init=true", f"dpdk-lcore-mask={mask}", f"pmd-cpu-mask={mask}",
            "dpdk-socket-mem=512", "vhost-iommu-support=false",
            f'dpdk-extra="{extra} --no-telemetry --no-pci"',
        ):  # fmt: skip
            self.vsctl("--no-wait", "set", "Open_vSwitch", ".", f"other_config:{setting}")
        words = [self.PROGRAM, self.socket, "--no-chdir", "--unixctl", f"{self.folder}/ctl"]
        self.processes.append(harness.Process(words, env=self.env, cpu=cpu, nice=harness.FIRST))
        harness.until("Open vSwitch's DPDK", self._initialised, 30)
        bridge = ("set", "bridge", "br0", "datapath_type=netdev", "fail_mode=standalone")
        self.vsctl("add-br", "br0", "--", *bridge)
        for number, socket in enumerate(sockets):
            port = ("set", "Interface", f"v{number}", "type=dpdkvhostuserclient")
            path = f"options:vhost-server-path={socket}"
            self.vsctl("add-port", "br0", f"v{number}", "--", *port, path)

    def _initialised(self) -> bool:
        if not self.processes[-1].alive():
            raise LabError(f"ovs-vswitchd-dpdk ended:\n{self.processes[-1].tail()}")
        with contextlib.suppress(LabError):
            return self.vsctl("get", "Open_vSwitch", ".", "dpdk_initialized").strip() == "true"
        return False

    def vsctl(self, *words: object) -> str:
        env = dict(os.environ, **self.env)
        return run("ovs-vsctl", f"--db={self.socket}", "--timeout=20", *words, env=env)

    def appctl(self, *words: object) -> str:
        env = dict(os.environ, **self.env)
        return run("ovs-appctl", "-t", f"{self.folder}/ctl", *words, env=env)

    def close(self) -> None:
        for process in reversed(self.processes):
            process.kill()
