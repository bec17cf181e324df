"""The repository's own examples: each comes up with `--wait`, which returns once all its machines are on their networks, and goes again."""

import re
import subprocess

from lib import BUILD, Namespace, need_root, scratch, timeout
from lib.fabric import PROGRAM
from lib.machine import ROOT, Skip

# What a fresh namespace needs besides a way out: the interface that an example joins with a bridge.
INTERFACES = {"router": "eth0"}


def without_guest(text):
    """An example without its Linux guest, for a tree in which that was not built; everything else of it stays."""
    text = re.sub(r"\[vm\.linux\].*?(?=\n\[)", "", text, flags=re.S)
    return re.sub(r'\[\[forward\]\]\n[^\[]*to = "linux:80"\n', "", text)


def example(name, wait):
    if not PROGRAM.exists():
        raise Skip(f"{PROGRAM} is not built: run ./x build")
    need_root()
    source = ROOT / "examples" / f"{name}.toml"
    text = source.read_text()
    if "../build/guest" in text and not (BUILD / "guest/vmlinuz").exists():
        text = without_guest(text)
    text = text.replace("../build/guest", str(BUILD / "guest"))
    with Namespace() as space, scratch() as folder:
        space.way_out()
        if name in INTERFACES:
            space.ip("link", "add", INTERFACES[name], "type", "veth", "peer", "name", "far0")
            for interface in (INTERFACES[name], "far0"):
                space.ip("link", "set", interface, "up")
        file = folder / source.name
        file.write_text(text)
        env = {"TOMBOLO_RUNTIME": str(folder / "run"), "TOMBOLO_STATE": str(folder / "state")}

        def tombolo(*words):
            command = ["ip", "netns", "exec", str(space), "env", *(f"{key}={value}" for key, value in env.items()), str(PROGRAM)]
            return subprocess.run([*command, *map(str, words)], capture_output=True, text=True, timeout=wait + 60)

        try:
            up = tombolo("up", "-d", f"--wait={wait}", file)
            assert up.returncode == 0 and " is up after " in up.stdout, (up.returncode, up.stdout, up.stderr)
            states = tombolo("cell", "ls", "--json", "--file", file)
            assert '"failed"' not in states.stdout, states.stdout
        finally:
            down = tombolo("down", "--file", file)
        assert down.returncode == 0, down.stderr


@timeout(180)
def test_the_example_of_calls():
    example("calls", 60)


@timeout(180)
def test_the_example_of_a_control_loop():
    example("control-loop", 60)


@timeout(180)
def test_the_demo():
    example("demo", 60)


@timeout(300)
def test_the_example_of_shared_memory():
    example("ivshmem", 180)


@timeout(180)
def test_the_example_for_an_own_monitor():
    example("own-vmm", 60)


@timeout(180)
def test_the_example_of_a_router():
    example("router", 60)


def test_no_example_is_left_out():
    tested = {"calls", "control-loop", "demo", "ivshmem", "own-vmm", "router"}
    assert {path.stem for path in (ROOT / "examples").glob("*.toml")} == tested
