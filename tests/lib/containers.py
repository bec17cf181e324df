"""Container runtimes that call the CNI plugin: containerd with runc, podman, cnitool, and direct calls as they make them.

The programs are those of the system, or those of Debian's packages, unpacked below build/cni and not installed. cnitool is built from
its Go module.
"""

import contextlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

from .machine import ROOT, SLOW, Skip, need_program
from .netns import inside
from .process import Process, until

BUILT = Path(os.environ.get("TOMBOLO_BUILT", ROOT / "target/release"))
PLUGIN = BUILT / "tombolo-cni"
PEERS = ROOT / "build/cni"
CNITOOL = "github.com/containernetworking/cni/cnitool@v1.3.0"


def path(space):
    """A namespace as CNI names it."""
    return f"/run/netns/{space}"


def of(result, n):
    """The address of an answer without its prefix length."""
    return result["ips"][n]["address"].split("/")[0]


def plugin():
    if not PLUGIN.exists():
        raise Skip(f"{PLUGIN} is not built: run ./x build")
    return PLUGIN


def debian(program, *packages):
    """The path of a program: the system's, or that of Debian's packages."""
    if path := shutil.which(program):
        return Path(path)
    root = PEERS / "root"
    found = [root / folder / program for folder in ("usr/bin", "usr/sbin", "usr/lib/cni", "bin")]
    if not any(path.exists() for path in found):
        need_program("apt-get")
        folder = PEERS / "debs" / program
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["apt-get", "download", *packages], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise Skip(f"{program} is not installed, and `apt-get download {' '.join(packages)}` says {done.stderr.strip()[-200:]}")
        for deb in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", deb, root], check=True)
        shutil.rmtree(folder)
    for path in found:
        if path.exists():
            return path
    raise Skip(f"{program} is in none of the packages {', '.join(packages)}")


def cnitool():
    if path := shutil.which("cnitool"):
        return Path(path)
    path = PEERS / "bin/cnitool"
    if not path.exists():
        need_program("go")
        done = subprocess.run(["go", "install", CNITOOL], env=dict(os.environ, GOBIN=str(path.parent)), capture_output=True, text=True)
        if done.returncode:
            raise Skip(f"cnitool is not installed, and `go install {CNITOOL}` says {done.stderr.strip()[-200:]}")
    return path


def image(folder):
    """An OCI image in one archive: busybox, and its names."""
    busybox = need_program("busybox")
    rootfs = io.BytesIO()
    with tarfile.open(fileobj=rootfs, mode="w") as tar:
        for name in ("bin", "etc", "tmp", "proc", "sys", "dev"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        tar.add(busybox, "bin/busybox")
        for name in ("sh", "sleep", "ip", "ping", "wget", "nslookup", "cat"):
            entry = tarfile.TarInfo(f"bin/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
    blobs = {}

    def blob(data, kind, **more):
        import hashlib
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data), **more}

    layer = blob(rootfs.getvalue(), "layer.v1.tar")
    config = blob(json.dumps({"architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/bin"]},
                              "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]}}).encode(), "config.v1+json")
    manifest = blob(json.dumps({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
                                "config": config, "layers": [layer]}).encode(), "manifest.v1+json",
                    annotations={"io.containerd.image.name": "localhost/bb:1", "org.opencontainers.image.ref.name": "1"})
    files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": json.dumps({"schemaVersion": 2, "manifests": [manifest]}).encode(), **blobs}
    path = folder / "bb.tar"
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


class Failed(Exception):
    """An error object of CNI."""

    def __init__(self, value):
        super().__init__(value)
        self.code, self.text = value["code"], value["msg"]


class Cni:
    """Calls the plugin as a runtime does, with a configuration for `fabric`."""

    def __init__(self, fabric, version="1.0.0", name="pods", **more):
        self.fabric = fabric
        self.config = {"cniVersion": version, "name": name, "type": "tombolo-cni", "fabric": fabric.name, "runtime": str(fabric.folder / "run"), **more}

    def start(self, command, container="", netns="", interface="eth0", args="", config=None, program=(), **more):
        """`program` is what runs in place of the plugin: words before its path, or another copy of it."""
        words = {"CNI_COMMAND": command, "CNI_CONTAINERID": container, "CNI_NETNS": str(netns), "CNI_IFNAME": interface, "CNI_PATH": str(BUILT)}
        if args:
            words["CNI_ARGS"] = args
        argv = [str(word) for word in program] or [str(plugin())]
        if self.fabric.netns is not None:
            argv = [*inside(self.fabric.netns, own_mounts=False), *argv]
        process = subprocess.Popen(argv, env=dict(os.environ, **words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.stdin.write(config if isinstance(config, str) else json.dumps({**self.config, **more}))
        process.stdin.close()
        return process

    def finish(self, process, seconds=60 * SLOW):
        out = process.stdout.read()
        process.wait(seconds)
        if process.returncode:
            raise Failed(json.loads(out))
        return json.loads(out) if out.strip() else None

    def __call__(self, command, *words, **more):
        return self.finish(self.start(command, *words, **more))

    def ports(self):
        """The containers' ports of the fabric."""
        return {port["name"]: port for port in self.fabric.status()["ports"] if "container" in port["details"]}


class Mounts:
    """A mount namespace with the CNI folders of this test; `words` go before what is to run in it."""

    def __init__(self, folder, conflist):
        self.folder = folder
        for name in ("net.d", "bin"):
            (folder / name).mkdir()
        (folder / "net.d/10-tombolo.conflist").write_text(json.dumps(conflist))
        shutil.copy(plugin(), folder / "bin/tombolo-cni")
        script = f"""set -e
mount --make-rprivate /
mkdir -p /etc/cni /opt/cni
mount -t tmpfs none /etc/cni; mkdir /etc/cni/net.d; cp {folder}/net.d/* /etc/cni/net.d/
mount -t tmpfs none /opt/cni; mkdir /opt/cni/bin; cp {folder}/bin/* /opt/cni/bin/
exec "$@"
"""
        self.words = ["unshare", "-m", "sh", "-c", script, "sh"]


class Containerd:
    """A containerd of the test's own, without CRI. `ctr` runs a command of it."""

    def __init__(self, folder, conflist):
        containerd = debian("containerd", "containerd", "runc")
        debian("runc", "runc")
        self.folder = folder
        self.path = f"{containerd.parent}:{PEERS / 'root'}/usr/sbin:{os.environ['PATH']}"
        self.mounts = Mounts(folder, conflist)
        config = folder / "containerd.toml"
        config.write_text(f"""version = 2
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.snapshotter.v1.devmapper", "io.containerd.internal.v1.opt"]
[grpc]
address = "{folder}/c.sock"
[ttrpc]
address = "{folder}/c.sock.ttrpc"
""")
        self.config, self.containerd = config, containerd
        self.process = None

    def __enter__(self):
        self.process = Process([*self.mounts.words, self.containerd, "-c", self.config], name="containerd", env={"PATH": self.path})
        try:
            until("containerd answers", lambda: self.ctr("version", check=False).returncode == 0, every=0.2)
            self.ctr("images", "import", "--snapshotter", "native", image(self.folder))
        except BaseException:
            self.__exit__()
            raise
        return self

    def command(self, *words):
        # The CNI folders are those of the process that runs ctr.
        pid = self.process.popen.pid
        return ["nsenter", f"--mount=/proc/{pid}/ns/mnt", str(self.containerd.parent / "ctr"), "-a", str(self.folder / "c.sock"), *map(str, words)]

    def ctr(self, *words, check=True, seconds=120 * SLOW):
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=seconds, env=dict(os.environ, PATH=self.path))
        if check and done.returncode:
            raise AssertionError(f"ctr {' '.join(map(str, words))}: {done.stderr.strip()}\n{self.process.tail()}")
        return done

    def __exit__(self, *_):
        with contextlib.suppress(Exception):
            for task in self.ctr("tasks", "ls", "-q", check=False).stdout.split():
                self.ctr("tasks", "kill", "-s", "KILL", task, check=False)
                time.sleep(0.2)
                self.ctr("tasks", "rm", "-f", task, check=False)
                self.ctr("containers", "rm", task, check=False)
        self.process.stop()


def podman_files(folder, home, seen, conflist):
    """What podman with its CNI backend needs in `folder`, which it sees as `seen`, and in its user's `home`: the plugin, the network, a policy.
    Returns the settings that both kinds of podman have, up to those of the engine."""
    policy = home / ".config/containers/policy.json"
    for path in (folder / "net.d", folder / "bin", policy.parent):
        path.mkdir(parents=True)
    (folder / "net.d/10-tombolo.conflist").write_text(json.dumps(conflist))
    shutil.copy(plugin(), folder / "bin/tombolo-cni")
    policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    # nofile, nproc: podman's defaults are above the limits of a machine that may not raise them.
    return f"""[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
log_driver = "k8s-file"
[network]
network_backend = "cni"
cni_plugin_dirs = ["{seen}/bin"]
network_config_dir = "{seen}/net.d"
default_network = "{conflist["name"]}"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none\""""


class RootlessPodman:
    """podman of a user without privileges, with its CNI backend, in mount and PID namespaces of the test's own: what it leaves running
    ends with them. The user has no further numbers (/etc/subuid), so its containers have one user.

    Their namespaces are known in a network namespace that podman makes for all of them, and only there. So what has to see them, as a
    daemon, runs there too: `inside(…)` gives the words.
    """

    USER = 4_000_016
    HOME = Path("/mnt/home")

    def __init__(self, folder, conflist):
        peers = {name: debian(name, *packages) for name, packages in (
            ("podman", ("podman", "conmon", "libsubid4")), ("conmon", ("conmon",)), ("runc", ("runc",)), ("slirp4netns", ("slirp4netns", "libslirp0")))}
        need_program("setpriv")
        # As the user finds them: it may have no way to this tree.
        paths = {name: Path("/mnt/peers") / path.relative_to(PEERS / "root") if path.is_relative_to(PEERS) else path for name, path in peers.items()}
        self.podman = paths["podman"]
        settings = podman_files(folder, folder, self.HOME, conflist)
        (folder / "tmp").mkdir()
        shutil.copy(BUILT / "tombolo", folder / "bin")
        (folder / "containers.conf").write_text(f"""{settings}
lock_type = "file"
runtime = "runc"
conmon_path = ["{paths["conmon"]}"]
conmon_env_vars = ["LD_LIBRARY_PATH=/mnt/peers/usr/lib/x86_64-linux-gnu"]
network_cmd_path = "{paths["slirp4netns"]}"
[engine.runtimes]
runc = ["{paths["runc"]}"]
""")
        image(folder)
        PEERS.joinpath("root").mkdir(parents=True, exist_ok=True)
        script = f"""set -e
mount -t tmpfs none /run
mount -t tmpfs none /mnt
mkdir -p /run/user/{self.USER} /mnt/peers {self.HOME}
chown {self.USER}:{self.USER} /run/user/{self.USER}
chmod 700 /run/user/{self.USER}
mount --bind {PEERS / "root"} /mnt/peers
mount --bind {folder} {self.HOME}
chown -R {self.USER}:{self.USER} {self.HOME}
mknod /mnt/tun c 10 200
chmod 666 /mnt/tun
mount --bind /mnt/tun /dev/net/tun
echo ready
exec sleep infinity
"""
        self.holder = Process(["unshare", "-mp", "--fork", "--kill-child", "--mount-proc", "--propagation", "private", "sh", "-c", script], name="holder")

    def __enter__(self):
        self.holder.__enter__()
        self.holder.wait_line(lambda line: line == "ready", 30)
        self.pid = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text().split()[0]
        self("load", "-i", self.HOME / "bb.tar")
        return self

    def __exit__(self, *error):
        self.holder.__exit__(*error)

    def words(self, *words):
        """A command of the user."""
        environment = {"HOME": self.HOME, "USER": "tester", "XDG_RUNTIME_DIR": f"/run/user/{self.USER}", "TMPDIR": self.HOME / "tmp",
                       "CONTAINERS_CONF": self.HOME / "containers.conf", "LD_LIBRARY_PATH": "/mnt/peers/usr/lib/x86_64-linux-gnu",
                       "PATH": f"/mnt/peers/usr/bin:/mnt/peers/usr/sbin:{os.environ['PATH']}",
                       "TOMBOLO_RUNTIME": self.HOME / "run", "TOMBOLO_STATE": self.HOME / "state"}
        return ["nsenter", "-m", "-p", "-t", self.pid, "setpriv", "--reuid", str(self.USER), "--regid", str(self.USER),
                "--clear-groups", "env", "-i", f"--chdir={self.HOME}", *(f"{key}={value}" for key, value in environment.items()), *map(str, words)]

    def inside(self, *words):
        """A command that sees the containers' namespaces."""
        return self.words(self.podman, "--storage-driver", "vfs", "unshare", "--rootless-netns", *words)

    def run(self, words, check=True, seconds=120 * SLOW):
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
        if check and done.returncode:
            raise AssertionError(f"{words} ended with {done.returncode}: {done.stderr.strip()}")
        return done

    def __call__(self, *words, **more):
        return self.run(self.words(self.podman, "--storage-driver", "vfs", *words), **more)


class Podman:
    """podman with its CNI backend, and files of its own. It runs in the network namespace `netns`, which is the host of its containers.

    It has no mount namespace of its own: the daemon has to see the containers' network namespaces, which podman mounts at /run/netns.
    """

    def __init__(self, folder, conflist, netns):
        podman, runc = debian("podman", "podman", "conmon", "libsubid4"), debian("runc", "runc")
        conmon = debian("conmon", "conmon")
        self.folder, self.netns, self.network = folder, netns, conflist["name"]
        settings = podman_files(folder, folder / "home", folder, conflist)
        # Also for conmon, which starts podman when a container ends.
        libraries = ":".join(filter(None, [str(PEERS / "root/usr/lib/x86_64-linux-gnu"), os.environ.get("LD_LIBRARY_PATH")]))
        (folder / "containers.conf").write_text(f"""{settings}
lock_type = "file"
runtime = "runc"
conmon_path = ["{conmon}"]
conmon_env_vars = ["LD_LIBRARY_PATH={libraries}"]
tmp_dir = "{folder}/tmp"
[engine.runtimes]
runc = ["{runc}"]
""")
        self.environment = dict(os.environ, CONTAINERS_CONF=str(folder / "containers.conf"), HOME=str(folder / "home"),
                                LD_LIBRARY_PATH=libraries, TMPDIR=str(folder))
        storage = ["--root", folder / "root", "--runroot", folder / "runroot", "--storage-driver", "vfs"]
        self.words = list(map(str, [*inside(netns, own_mounts=False), podman, *storage]))

    def __enter__(self):
        self("load", "-i", image(self.folder))
        return self

    def __call__(self, *words, check=True, seconds=120 * SLOW):
        done = subprocess.run([*self.words, *map(str, words)], capture_output=True, text=True, timeout=seconds, env=self.environment)
        if check and done.returncode:
            raise AssertionError(f"podman {' '.join(map(str, words))} ended with {done.returncode}: {done.stderr.strip()}")
        return done

    def __exit__(self, *_):
        self("rm", "--all", "--force", "--time", "0", check=False)
        self.mounts_left()

    def namespaces(self):
        """The paths of the network namespaces of the containers that run."""
        ids = self("ps", "--quiet").stdout.split()
        return self("inspect", "--format", "{{.NetworkSettings.SandboxKey}}", *ids).stdout.split() if ids else []

    def mounts_left(self):
        """Unmounts what is mounted below the folder; says what it was."""
        found = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {self.folder}/" in line]
        for path in reversed(found):
            subprocess.run(["umount", "--lazy", path], check=False)
        return found


def leftovers(prefix):
    """Network namespaces with names that begin so."""
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in done.stdout.splitlines() if line.startswith(prefix)]
