"""What the benches share: private mounts and hugepages that cannot be left behind, testpmd and Open vSwitch as peers, and
the form in which results are kept and printed."""

import contextlib
import ctypes
import json
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from lib import Fabric, Process, Skip, tsc_khz, until  # noqa: E402

CLONE_NEWNS = 0x00020000
# Niceness of everything that is measured, ours and theirs alike: it comes before the machine's other work.
FIRST = -20
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
_libc = ctypes.CDLL(None, use_errno=True)


class BenchError(Exception):
    """The bench could not be run; a failed run is an error, never a zero."""


def note(text):
    """Progress, for people: standard error, so that standard output stays the table and the JSON line."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def group_first(niceness=FIRST):
    """Niceness counts only within a session where the kernel groups tasks by session: within the `with` this session's group goes ahead too."""
    group = Path("/proc/self/autogroup")
    if not group.exists():
        yield
        return
    group.write_text(str(niceness))
    try:
        yield
    finally:
        group.write_text("0")


@contextlib.contextmanager
def private_folder(hugepages=0):
    """A folder for sockets, databases and hugepage files, in a mount namespace of this process's own.

    All of it is mounts that end with the last process of the bench, so even SIGKILL leaves no file and no page in use.
    `hugepages` (of 2 MiB) are made available for as long as the `with` lasts; DPDK takes them from `folder/huge`.
    """
    if os.geteuid() != 0:
        raise BenchError("this bench needs root: DPDK wants hugepages, namespaces want CAP_SYS_ADMIN")
    if _libc.unshare(CLONE_NEWNS):
        raise BenchError(f"unshare(CLONE_NEWNS): {os.strerror(ctypes.get_errno())}")
    run("mount", "--make-rprivate", "/")
    folder = Path("/run/tombolo-bench") if os.path.isdir("/run") else Path("/tmp/tombolo-bench")
    made = not folder.exists()
    folder.mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "bench", folder)
    before = int(NR_HUGEPAGES.read_text())
    try:
        (folder / "dpdk").mkdir()
        if hugepages:
            free = int(re.search(r"HugePages_Free:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
            if free < hugepages:
                NR_HUGEPAGES.write_text(str(before + hugepages - free))
            free = int(re.search(r"HugePages_Free:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
            if free < hugepages:
                raise BenchError(f"{hugepages} hugepages of 2 MiB are needed, the kernel found {free}: free memory or reboot")
            (folder / "huge").mkdir()
            run("mount", "-t", "hugetlbfs", "-o", "pagesize=2M", "huge", folder / "huge")
            # DPDK keeps its locks and its memory map here, with any file prefix.
            Path("/run/dpdk").mkdir(exist_ok=True)
            run("mount", "--bind", folder / "dpdk", "/run/dpdk")
        with group_first():
            yield folder
    finally:
        for path in ("/run/dpdk", folder / "huge", folder):
            subprocess.run(["umount", "-l", path], capture_output=True)
        if hugepages:
            NR_HUGEPAGES.write_text(str(before))
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def run(*argv, **kwargs):
    """Runs a program to its end; BenchError with its words when it fails."""
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, **kwargs)
    if done.returncode:
        raise BenchError(f"`{' '.join(map(str, argv))}` ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def fabric_of(folder, text, netns=None):
    """A fabric with its files in a new folder within `folder`."""
    return Fabric(Path(tempfile.mkdtemp(dir=folder)), text, netns=netns, nice=FIRST)


class Testpmd(Process):
    """An interactive testpmd on one CPU. `vdevs` are EAL's --vdev values, `options` testpmd's own."""

    def __init__(self, folder, prefix, cpu, vdevs, options=(), memory_mib=256):
        eal = ["stdbuf", "-oL", "dpdk-testpmd", "--lcores", f"0@{cpu},1@{cpu}", "--no-pci", "-m", str(memory_mib)]
        eal += ["--single-file-segments", f"--file-prefix={prefix}", f"--huge-dir={folder}/huge", "--no-telemetry"]
        for vdev in vdevs:
            eal += ["--vdev", vdev]
        # Both lcores share the CPU: the main one only waits for commands.
        own = ["--", "-i", "--port-topology=paired", "--rxq=1", "--txq=1", *options]
        super().__init__(eal + own, name=f"testpmd-{prefix}", stdin=True, nice=FIRST)
        self.ready_marks = 0

    def command(self, text, seconds=10):
        """Sends one command and gives what it printed; the prompt after an unknown command marks the end."""
        self.ready_marks += 1
        since = len(self.lines)
        # testpmd answers every line in order, so we use a word that it does not know as our end mark.
        self.send(f"{text}\nendmark{self.ready_marks}\n")
        mark = f"endmark{self.ready_marks}"
        _, _, number = self.wait_line(lambda line: "Bad arguments" in line or "Command not found" in line or f"{mark}" in line, seconds, since)
        # A following prompt line belongs to the mark, not to the answer.
        return "\n".join(line for _, line in self.lines[since:number])

    def stats(self):
        """Frames received and sent over all ports so far, and the moment it was read."""
        text = self.command("show port stats all")
        received = sum(int(value) for value in re.findall(r"RX-packets:\s*(\d+)", text))
        sent = sum(int(value) for value in re.findall(r"TX-packets:\s*(\d+)", text))
        return received, sent, time.monotonic()


class OpenVSwitch:
    """ovsdb-server and the DPDK vswitchd with everything of theirs in `folder`; one bridge, NORMAL switching."""

    PROGRAM = "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk"

    def __init__(self, folder, cpu, sockets):
        self.folder = Path(folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.env = {name: str(self.folder) for name in ("OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "OVS_SYSCONFDIR")}
        database, schema = self.folder / "conf.db", "/usr/share/openvswitch/vswitch.ovsschema"
        run("ovsdb-tool", "create", database, schema)
        self.socket = f"unix:{self.folder}/db.sock"
        self.processes = [Process(["ovsdb-server", f"--remote=p{self.socket}", str(database), "--no-chdir"], env=self.env)]
        try:
            until("ovsdb-server's socket", (self.folder / "db.sock").exists)
            self.vsctl("--no-wait", "init")
            mask = hex(1 << cpu)
            extra = f"--file-prefix=ovs --huge-dir={self.folder.parent}/huge --single-file-segments --no-telemetry --no-pci"
            for setting in ("dpdk-init=true", f"dpdk-lcore-mask={mask}", f"pmd-cpu-mask={mask}", "dpdk-socket-mem=512",
                            "vhost-iommu-support=false", f'dpdk-extra="{extra}"'):
                self.vsctl("--no-wait", "set", "Open_vSwitch", ".", f"other_config:{setting}")
            self.processes.append(Process([self.PROGRAM, self.socket, "--no-chdir", "--unixctl", f"{self.folder}/ctl"], env=self.env, cpu=cpu, nice=FIRST))
            until("Open vSwitch's DPDK", self.initialised, 30)
            self.vsctl("add-br", "br0", "--", "set", "bridge", "br0", "datapath_type=netdev", "fail_mode=standalone")
            for number, socket in enumerate(sockets):
                self.vsctl("add-port", "br0", f"v{number}", "--", "set", "Interface", f"v{number}", "type=dpdkvhostuserclient",
                           f"options:vhost-server-path={socket}")
        except BaseException:
            self.close()
            raise

    def initialised(self):
        if not self.processes[-1].alive():
            raise BenchError(f"ovs-vswitchd-dpdk ended:\n{self.processes[-1].tail()}")
        with contextlib.suppress(BenchError):
            return self.vsctl("get", "Open_vSwitch", ".", "dpdk_initialized").strip() == "true"

    def vsctl(self, *words):
        return run("ovs-vsctl", f"--db={self.socket}", "--timeout=20", *words, env=dict(os.environ, **self.env))

    def appctl(self, *words):
        return run("ovs-appctl", "-t", f"{self.folder}/ctl", *words, env=dict(os.environ, **self.env))

    def close(self):
        for process in reversed(self.processes):
            process.kill()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def conditions():
    """Where and with what the numbers came about."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit + ("+changes" if changed else ""),
        "kernel": os.uname().release,
        "cpu": re.search(r"model name\s*: (.*)", cpuinfo)[1],
        "cpus": os.cpu_count(),
        "tsc_khz": tsc_khz(),
        "load": os.getloadavg(),
    }


def cpu_seconds():
    """CPU time of all the machine's processes so far, of our own and those that have ended under us, and what the hypervisor gave to others.

    Not by /proc/stat alone, in which work and what was stolen from it look alike: bursts of that have been most of a run."""
    every = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # proc(5): utime, stime, and those of children that have ended. The name may hold anything but its last bracket.
        with contextlib.suppress(OSError):
            every += sum(int(word) for word in stat.read_text().rpartition(")")[2].split()[11:15])
    # proc(5): user, nice, system, idle, iowait, irq, softirq, steal.
    stolen = int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
    ours = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    hertz = os.sysconf("SC_CLK_TCK")
    return every / hertz, sum(used.ru_utime + used.ru_stime for used in ours), stolen / hertz


class Results:
    """Raw results, kept in build/bench/DATE-NAME/ as they come, so that a run cut short keeps what it had."""

    def __init__(self, name):
        self.name = name
        self.folder = ROOT / "build/bench" / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
        self.folder.mkdir(parents=True)
        self.arguments = sys.argv[1:]
        self.conditions = conditions()
        self.begun = (time.monotonic(), *cpu_seconds())
        (self.folder / "conditions.json").write_text(json.dumps(self.conditions, indent=1) + "\n")
        self.raw = self.folder / "raw.jsonl"
        self.rows = []

    @classmethod
    def earlier(cls, name, folder):
        """The results of an earlier run, from what it left in its folder."""
        self = cls.__new__(cls)
        self.name, self.folder, self.arguments = name, Path(folder).absolute(), sys.argv[1:]
        self.raw = self.folder / "raw.jsonl"
        try:
            self.conditions = json.loads((self.folder / "conditions.json").read_text())
            self.rows = [json.loads(line) for line in self.raw.read_text().splitlines()]
        except (OSError, ValueError) as error:
            raise BenchError(f"{folder}: {error}; expected the folder of a run, such as build/bench/DATE-{name}") from error
        self.begun = None
        return self

    def add(self, **row):
        self.rows.append(row)
        self.write(self.raw.name, row)

    def write(self, name, row):
        """A line more in a file beside the raw data."""
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def values(self, key, **match):
        """The values of one key over all rows that match."""
        return [row[key] for row in self.rows if key in row and row[key] is not None and all(row.get(k) == v for k, v in match.items())]

    def median(self, key, **match):
        values = self.values(key, **match)
        return statistics.median(values) if values else None

    def end(self):
        """Nothing more is measured: notes how busy the machine was with other work."""
        if "others_cpus" not in self.conditions and self.begun:
            took, every, ours, stolen = (now - then for now, then in zip((time.monotonic(), *cpu_seconds()), self.begun, strict=True))
            spent = {"others_cpus": max(every - ours, 0), "stolen_cpus": stolen}
            self.conditions.update(load_after=os.getloadavg(), took_s=round(took, 1), **{what: round(seconds / took, 3) for what, seconds in spent.items()})
            (self.folder / "conditions.json").write_text(json.dumps(self.conditions, indent=1) + "\n")

    def finish(self, **summary):
        """Writes the summary beside the raw data and prints it as the last line."""
        self.end()
        line = {"bench": self.name, **summary, "raw": os.path.relpath(self.folder, ROOT), "conditions": self.conditions}
        (self.folder / "summary.json").write_text(json.dumps(line, indent=1) + "\n")
        print(json.dumps(line), flush=True)


def ratio(ours, peer, digits=3):
    """Ours divided by the peer's; None where either is missing."""
    return round(ours / peer, digits) if ours is not None and peer else None


@contextlib.contextmanager
def perf(*words):
    """`perf stat` or `perf record` over what runs within the `with`: it has acknowledged that it counts before that begins. Yields a list,
    in which afterwards is what perf said on standard error."""
    (control, commands), (acknowledged, acknowledge) = os.pipe(), os.pipe()
    said = []
    command = ["perf", *map(str, words), "-D", "-1", f"--control=fd:{control},{acknowledge}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, pass_fds=(control, acknowledge)) as process:
        os.close(control)
        os.close(acknowledge)
        try:
            os.write(commands, b"enable\n")
            if not os.read(acknowledged, 16).startswith(b"ack"):
                raise BenchError(f"`{' '.join(command)}` ended: {process.stderr.read().strip()}")
            yield said
            process.send_signal(signal.SIGINT)
            said.append(process.communicate(timeout=60)[1])
        finally:
            process.kill()
            os.close(commands)
            os.close(acknowledged)


def run_bench(main):
    """The whole of a bench's program: what stops it is said in one line. SIGTERM and SIGHUP end it as Ctrl-C does, with its cleanup."""
    def stop(*_):
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    name = Path(sys.argv[0]).stem
    try:
        main()
    except (AssertionError, BenchError, EOFError, RuntimeError, Skip, TimeoutError, subprocess.SubprocessError) as error:
        sys.exit(f"bench {name}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"bench {name}: stopped")
