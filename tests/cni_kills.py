"""SIGKILL to the plugin and to the daemon, at random times within ADD and DEL: what is left after a DEL, or the end of the namespace."""

import json
import os
import random
import signal
import time

from lib import Fabric, Namespace, need_root, scratch, timeout, until
from lib.containers import Cni, path, plugin
from lib.machine import SLOW

TRIALS = 40
FILE = """
name = "{name}"
[network.lan]
subnet = "10.236.0.0/22"
uplink = "kernel"
"""
MAPPINGS = {"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80}]}}
TAP = {"args": "TC_REDIRECT_TAP_NAME=tap7"}


def what_is_left(f, outside, dans):
    """Ports, leases, forwards, links, tables, sockets and Kata's files."""
    status = f.status()
    return {
        "ports": sorted(port["name"] for port in status["ports"]),
        "leases": status["networks"][0]["leases"],
        "forwards": status["forwards"],
        "links": sorted(link["ifname"] for link in json.loads(outside.ip("-j", "link"))),
        "tables": outside.run("nft", "list", "ruleset").stdout,
        "sockets": sorted(file.name for file in f.runtime.iterdir() if file.name.startswith("c-")),
        "dans": sorted(file.name for file in dans.iterdir()) if dans.exists() else [],
        "namespaces": sorted(name for name in os.listdir("/run/netns") if name.startswith(f"tmb{os.getpid()}-")),
    }


@timeout(900)
def test_a_kill_of_the_plugin_or_the_daemon_leaves_nothing_after_del_or_the_end_of_the_namespace():
    need_root()
    plugin()
    seed = int(os.environ.get("TOMBOLO_SEED", "16"))
    random_of = random.Random(seed)
    print(f"TOMBOLO_SEED={seed}")
    with scratch() as folder, Namespace() as outside:
        outside.way_out()
        dans = folder / "dans"
        with Fabric(folder, FILE.format(name=f"kills{os.getpid()}"), netns=outside, own_mounts=False) as f:
            kinds = {"container": (Cni(f, "1.1.0"), MAPPINGS), "tap": (Cni(f, "1.1.0", vm="tap"), TAP),
                     "vhost-user": (Cni(f, "1.1.0", vm="vhost-user", dan=str(dans)), {})}
            took = {}
            # How long each command takes, and once without a kill.
            for kind, (cni, more) in kinds.items():
                with Namespace() as space:
                    for command in ("ADD", "DEL"):
                        began = time.monotonic()
                        cni(command, "c1", path(space), **more)
                        took[kind, command] = time.monotonic() - began
            before = what_is_left(f, outside, dans)
            hits = 0
            for n in range(TRIALS):
                kind = random_of.choice(sorted(kinds))
                command, victim = random_of.choice(("ADD", "DEL")), random_of.choice(("plugin", "daemon"))
                ends_by_del = random_of.random() < 0.5
                delay = random_of.uniform(0, 1.2) * took[kind, command]
                what = f"{n}: {victim} within {command} of a {kind}, after {1000 * delay:.1f} ms, then {'DEL' if ends_by_del else 'the end'}"
                cni, more = kinds[kind]
                with Namespace() as space:
                    if command == "DEL":
                        cni("ADD", f"c{n}", path(space), **more)
                    process = cni.start(command, f"c{n}", path(space), **more)
                    time.sleep(delay)
                    hits += process.poll() is None
                    if victim == "plugin":
                        process.kill()
                        process.wait(60 * SLOW)
                    else:
                        f.process.signal(signal.SIGKILL)
                        f.process.wait()
                        process.stdout.read()
                        process.wait(60 * SLOW)
                        f.start()
                    if ends_by_del:
                        # A runtime calls DEL until it succeeds.
                        cni("DEL", f"c{n}", path(space), **more)
                        inside = [link["ifname"] for link in json.loads(space.ip("-j", "link"))]
                        assert inside == ["lo"], (what, inside)
                        assert what_is_left(f, outside, dans) == {**before, "namespaces": sorted([*before["namespaces"], str(space)])}, what
                if not ends_by_del and kind == "vhost-user":
                    # The daemon forgets the port; the file and the socket are the plugin's to
                    # remove, by GC.
                    until(f"the port goes: {what}", lambda: not cni.ports(), 60)
                    age(dans)
                    cni("GC", **{"cni.dev/valid-attachments": []})
                until(f"all is as before: {what}", lambda: what_is_left(f, outside, dans) == before, 60)  # noqa: B023
            print(f"{hits} of {TRIALS} kills came before the end of the call")
            assert hits > TRIALS // 4


def age(folder):
    """Makes what killed calls have left look as old as it is when GC comes."""
    for file in folder.iterdir() if folder.exists() else []:
        if file.name.endswith(".next"):
            os.utime(file, (0, 0))
