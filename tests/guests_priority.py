"""Classes of frames on their way to a stock Linux guest that has a dozen receive buffers: pings beside a flood of the same sender, marked
by DSCP, and by 802.1p on a trunk."""

import re

from daytwo_vlan import tag
from lib import Fabric, LinuxGuest, Namespace, Net, Process, alone, scratch, timeout, until

FILE = """
name = "prio"
[network.lan]
subnet = "10.236.0.0/24"
uplink = "none"
[tap.prio0]
ip = "10.236.0.9"
{key}
[port.slow]
kind = "vhost-user"
guard = "off"
{slow}
"""
GUEST = "10.236.0.20"
SECONDS, PINGS, TRIES = 6, 100, 5
# More datagrams than the guest takes and fewer than the switch does, for so many seconds.
FLOOD = """
import socket, sys, time
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
out.connect((sys.argv[1], 9))
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    for _ in range(int(sys.argv[3])):
        try:
            out.send(bytes(1000))
        except OSError:
            pass
    time.sleep(0.002)
"""
# Expedited forwarding, as an octet of IP's header.
EF = ("-Q", 46 << 2)
# A mark of the kernel, which the sender's stack puts into each frame's tag as its priority; IP's
# header has no mark then.
VLAN, PCP = 10, ("-m", 6)
TRUNK = {"key": f"trunk = [{VLAN}]", "slow": f"vlan = {VLAN}"}


def answered(space, burst, mark):
    """Of `PINGS` pings with the mark and of as many without one, beside bursts of so many datagrams: how many were answered."""
    with Process(["/usr/bin/python3", "-c", FLOOD, GUEST, str(SECONDS), str(burst)], netns=space, name="flood"):
        pings = [
            Process(["ping", "-q", "-n", "-i", "0.02", "-c", str(PINGS), "-W", "2", option, str(value), GUEST], netns=space, name=f"ping{value}")
            for option, value in (mark, (mark[0], 0))
        ]
        found = []
        for ping in pings:
            with ping:
                ping.wait(SECONDS + 20)
                found.append(int(re.search(r"(\d+) received", ping.text)[1]))
        return found


def shown(mark, prepare=lambda space, folder: None, **keys):
    """Marked pings are lost like others beside a flood, until their port is trusted; then they pass."""
    def text(more=""):
        return FILE.format(key=f"{keys.get('key', '')}\n{more}", slow=keys.get("slow", ""))

    # Few and large buffers, as in guests_few_buffers.
    few = "mrg_rxbuf=off,indirect_desc=off,rx_queue_size=256"
    with scratch() as folder, Namespace() as space, Fabric(folder, text(), netns=space) as fabric:
        net = Net.vhost_user(folder / "run" / "prio" / "slow.sock").with_device(few)
        space.run("ethtool", "-K", "prio0", "tso", "off", "gso", "off")
        prepare(space, folder)
        with LinuxGuest(net=net, address=f"{GUEST}/24") as guest:
            guest.wait_control()
            until("a reply", lambda: space.pings(GUEST), 60)
            for burst in (32, 64, 128, 256):
                marked, plain = answered(space, burst, mark)
                print(f"without class, {burst} datagrams at a time: {marked} of {PINGS} marked pings were answered, {plain} of the others")
                if plain < 0.8 * PINGS:
                    break
            # Anyone can mark frames: nothing comes of it.
            assert marked < 0.9 * PINGS and abs(marked - plain) < 0.4 * PINGS, (marked, plain)
            fabric.file.write_text(text('class = "marked"'))
            fabric.cli("apply", str(fabric.file))
            assert fabric.port("prio0")["details"]["class"] == "marked"
            # A guest that gets no CPU for 50 ms loses frames of any class, so a busy machine has
            # more tries.
            for _ in range(TRIES):
                marked, plain = answered(space, burst, mark)
                print(f"class = marked: {marked} of {PINGS} marked pings were answered, {plain} of the others")
                if PINGS - marked <= 0.5 * (PINGS - plain):
                    break
            else:
                raise AssertionError(f"marked pings were lost like others, {TRIES} times")
            counters = fabric.port("slow")["counters"]
            assert counters["tx_drops"]["queue_full"] > 0 and counters["queued_frames"] > 0, counters


@alone
@timeout(300)
def test_marked_frames_pass_a_flood_where_the_port_is_trusted():
    shown(EF)


@alone
@timeout(300)
def test_tagged_frames_with_a_priority_pass_a_flood_on_a_trusted_trunk():
    shown(PCP, lambda space, folder: tag(space, "prio0", f"({VLAN} | skb->mark << 13)", folder), **TRUNK)
