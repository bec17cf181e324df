"""`tombolo exec` against Debian's qemu-guest-agent in a real guest: ends, streams, input, limits, several at once, what is killed
or stopped in between, and a guest that lies."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from lib import BUILD, Skip, linux_cmdline, scratch, timeout, until
from lib.fabric import PROGRAM, Console, Fabric
from lib.process import cpu_seconds

PATIENCE_S = 120
BOOT_CPU_S = 90
FILE = """
name = "{name}"
[network.lan]
[vm.v]
kernel = "{kernel}"
initrd = "{initrd}"
machine = "{machine}"
attach = "{attach}"
accel = "tcg"
memory = "256M"
agent = {agent}
cmdline = "{cmdline}"
"""


def boots(fabric, console):
    """Waits until the guest takes commands. A boot is measured in QEMU's own CPU time: how busy the machine is does not make it a failure,
    and a guest that hangs is told from one that gets no CPU."""
    [machine] = fabric.status()["machines"]
    while True:
        with contextlib.suppress(TimeoutError):
            return console.wait_control(5)
        used = cpu_seconds(machine["pid"])
        assert used < BOOT_CPU_S, f"the guest is not up after {used:.0f} s of CPU, where a boot takes 3 s: {fabric.console('v')[-2000:]}"


@contextlib.contextmanager
def standing(qga="yes", machine="microvm", attach="vhost-user", agent=True):
    """A fabric with the guest `v`, whose agent answers, and the guest's console."""
    # As everywhere: microvm boots the ELF by its PVH entry, q35 the packed kernel by firmware.
    kernel = BUILD / ("guest/vmlinux" if machine == "microvm" else "guest/vmlinuz")
    parts = [BUILD / "guest/initramfs.cpio", BUILD / "guest/qga.cpio"]
    if not all(path.exists() for path in [kernel, *parts]):
        raise Skip("build/guest/qga.cpio is not there: run ./x guest")
    with scratch() as folder:
        initrd = folder / "initrd"
        first, second = (path.read_bytes() for path in parts)
        initrd.write_bytes(first + b"\0" * (-len(first) % 4) + second)
        cmdline = linux_cmdline("v", "", "net=none", f"qga={qga}" if agent else "")
        text = FILE.format(name=f"x{os.getpid()}", kernel=kernel, initrd=initrd, machine=machine, attach=attach,
                           agent=str(agent).lower(), cmdline=cmdline)
        with Fabric(folder, text) as fabric, Console("v", fabric.name, fabric.env) as console:
            boots(fabric, console)
            if qga == "yes" and agent:
                answers(fabric, console, lambda done: done.returncode == 0)
            elif qga != "no" and agent:
                # One that may run no commands answers with that.
                answers(fabric, console, lambda done: b"does not answer" not in done.stderr)
            yield fabric, console
            fabric.down()


def answers(fabric, console, is_right):
    """Waits for the agent's answer."""
    def seen():
        guest = console.run("ps | grep qemu-ga; cat /tmp/qga.log; grep . /sys/class/virtio-ports/*/name; ls -l /dev/vport*").text
        return f"{execute(fabric, 'true').stderr.decode()}\nin the guest:\n{guest}"

    until("the agent", lambda: is_right(execute(fabric, "true")), PATIENCE_S, seen=seen)


def execute(fabric, *words, flags=(), data=b"", seconds=PATIENCE_S):
    command = [PROGRAM, "exec", "--fabric", fabric.name, *flags, "v", "--", *words]
    return subprocess.run(command, input=data, capture_output=True, env=dict(os.environ, **fabric.env), timeout=seconds)


def begin(fabric, *words):
    command = [PROGRAM, "exec", "--fabric", fabric.name, "-n", "v", "--", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ, **fabric.env))


def catches(pid, number):
    """Whether a process has a handler for the signal."""
    [mask] = re.findall(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(mask, 16) >> (number - 1) & 1


@timeout(240)
def test_a_command_ends_as_it_does_in_the_guest():
    with standing() as (fabric, _):
        done = execute(fabric, "sh", "-c", "echo out; echo err >&2; exit 7")
        assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n"), done
        assert execute(fabric, "sh", "-c", "kill -9 $$").returncode == 128 + 9
        missing = execute(fabric, "no-such-command")
        assert missing.returncode == 127 and b"No such file" in missing.stderr, missing
        # Every byte in and out, more than any buffer between.
        data = os.urandom(1 << 20)
        assert execute(fabric, "cat", data=data).stdout == data
        over = execute(fabric, "cat", data=bytes((4 << 20) + 1))
        assert over.returncode == 125 and b"at most 4 MiB" in over.stderr, over
        large = execute(fabric, "sh", "-c", "head -c 17000000 /dev/zero")
        assert large.returncode == 0 and len(large.stdout) == 16 << 20 and b"first part" in large.stderr, large.stderr
        report = json.loads(execute(fabric, "sh", "-c", "printf '\\377'; exit 3", flags=["--json"]).stdout)
        assert (report["exit_code"], report["signal"], report["stdout_base64"]) == (3, None, "/w=="), report
        begun = time.monotonic()
        late = execute(fabric, "sleep", "60", flags=["--timeout", "2"])
        assert late.returncode == 124 and b"runs on in the guest as process" in late.stderr, late
        assert time.monotonic() - begun < 30


@timeout(240)
def test_several_at_once_and_killed_ones_disturb_no_other():
    with standing(machine="q35", attach="stream") as (fabric, console):
        slow = begin(fabric, "sh", "-c", "sleep 5; echo slow")
        both = [begin(fabric, "sh", "-c", f"sleep 1; echo {n}; exit {n}") for n in range(6)]
        for n, one in enumerate(both):
            out, err = one.communicate(timeout=PATIENCE_S)
            assert (one.returncode, out) == (n, b"%d\n" % n), (n, out, err)
        out, err = slow.communicate(timeout=PATIENCE_S)
        assert (slow.returncode, out) == (0, b"slow\n"), err
        # Killed at many moments: within the sync, the request, and the answer.
        for n in range(20):
            one = begin(fabric, "sh", "-c", "head -c 300000 /dev/zero")
            time.sleep(n * 0.02)
            one.kill()
            one.communicate()
            done = execute(fabric, "echo", str(n))
            assert (done.returncode, done.stdout) == (0, b"%d\n" % n), (n, done)
        # An agent that is stopped is told of; once it goes on, its late answers are nobody's.
        console.run("kill -STOP $(pidof qemu-ga)")
        begun = time.monotonic()
        silent = execute(fabric, "true")
        assert silent.returncode == 125 and b"does not answer" in silent.stderr, silent
        assert 9 < time.monotonic() - begun < 40
        assert execute(fabric, "true", flags=["--timeout", "1"]).returncode == 124
        console.run("kill -CONT $(pidof qemu-ga)")
        done = execute(fabric, "echo", "again")
        assert (done.returncode, done.stdout) == (0, b"again\n"), done


@timeout(240)
def test_an_interrupt_ends_the_command_in_the_guest_and_a_stopped_machine_is_told_of():
    with standing() as (fabric, console):
        def runs(mark):
            return mark in execute(fabric, "ps").stdout

        for signal_number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            one = begin(fabric, "sh", "-c", "sleep 4711; echo went on >/tmp/after; :")
            until("the command", lambda: runs(b"sleep 4711"), PATIENCE_S)
            begun = time.monotonic()
            one.send_signal(signal_number)
            _, err = one.communicate(timeout=PATIENCE_S)
            assert one.returncode == code and b"was ended in the guest" in err, (one.returncode, err)
            assert time.monotonic() - begun < 20
            assert not runs(b"sleep 4711")
            assert execute(fabric, "cat", "/tmp/after").returncode != 0, "the shell went on"
        # One that ignores SIGTERM.
        one = begin(fabric, "sh", "-c", "trap '' TERM; while :; do sleep 4712; done")
        until("the command", lambda: runs(b"sleep 4712"), PATIENCE_S)
        one.send_signal(signal.SIGINT)
        _, err = one.communicate(timeout=PATIENCE_S)
        assert one.returncode == 130 and b"was ended in the guest" in err, (one.returncode, err)
        until("its end", lambda: not runs(b"sleep 4712"), PATIENCE_S)
        # An agent that is silent keeps no interrupted command from ending.
        console.run("kill -STOP $(pidof qemu-ga)")
        one = begin(fabric, "true")
        until("the command to catch interrupts", lambda: catches(one.pid, signal.SIGINT), PATIENCE_S)
        one.send_signal(signal.SIGINT)
        # An agent that is silent for 10 s is an error of another kind.
        _, err = one.communicate(timeout=PATIENCE_S)
        assert one.returncode == 130 and b"had not said yet" in err, (one.returncode, err)
        fabric.cli("cell", "stop", "v")
        done = execute(fabric, "true")
        assert done.returncode == 125 and b"v is stopped" in done.stderr and b"cell run v" in done.stderr, done


@timeout(240)
def test_an_agent_that_may_not_run_commands_and_a_machine_without_one_are_told_of():
    with standing("--blacklist=guest-exec") as (fabric, _):
        refused = execute(fabric, "true")
        assert refused.returncode == 125 and b"allow-rpcs" in refused.stderr, refused
        done = subprocess.run([PROGRAM, "exec", "--fabric", fabric.name, "w", "true"], capture_output=True, stdin=subprocess.DEVNULL,
                              env=dict(os.environ, **fabric.env))
        assert done.returncode == 125 and b"there are: v" in done.stderr, done
    with standing(agent=False) as (fabric, _):
        bare = execute(fabric, "true")
        assert bare.returncode == 125 and b"agent = true" in bare.stderr, bare
        # One that was just given an agent has a device that QEMU may still be making.
        fabric.file.write_text(fabric.file.read_text().replace("agent = false", "agent = true"))
        fabric.cli("apply", fabric.file)
        early = execute(fabric, "true", flags=("--timeout", "1"))
        assert b"agent = true" not in early.stderr, early


@timeout(240)
def test_a_guest_that_lies_is_an_error_and_costs_no_more():
    with standing("no") as (fabric, console):
        console.run("cat /sys/class/virtio-ports/*/name; ls /dev/vport*")
        # An endless line, and endless lines with wrong ids.
        for lie in ("yes [[[[ | tr -d '\\n'", "yes '{\"return\": 1}'"):
            console.start(f"{lie} >$(ls /dev/vport*p1)")
            begun = time.monotonic()
            done = execute(fabric, "true")
            assert done.returncode == 125 and (b"breaks the protocol" in done.stderr or b"not answer" in done.stderr), done
            assert time.monotonic() - begun < 100
            console.run("killall yes", check=False)
