"""Stock QEMU and a stock Linux guest on the vhost-user port alone, by the example that forwards between two ports.

What is killed comes back by itself: the guest by a reboot, QEMU by kill -9, the backend by kill -9 under a live guest.
"""

import contextlib

from lib import BUILD, LinuxGuest, Net, Process, Skip, built, qemu_program, scratch, timeout, until

ADDRESSES = ("10.78.0.1", "10.78.0.2")


class Forwarder(Process):
    """The example, sleeping when there is nothing to do."""

    def __init__(self, *sockets):
        super().__init__([built("examples/forward"), *sockets], name="forward")


def linux(number, net, **others):
    return LinuxGuest(net=net, hostname=f"lin{number}", address=f"{ADDRESSES[number]}/24", serve="http,iperf", **others)


def talk(guests, seconds=120):
    """Both reach each other; for a while they may not, while something comes back."""
    until("a reply to ping", lambda: guests[0].ping(ADDRESSES[1], count=1) == 1.0, seconds)
    assert guests[0].ping(ADDRESSES[1], count=5) == 1.0
    assert guests[1].ping(ADDRESSES[0], count=5, size=1400) == 1.0


def fetch(guest, source, size):
    """Fetches zeros from the other guest, over TCP with whatever offloads were agreed on, and counts them."""
    text = guest.run(f"wget -q -O - http://{ADDRESSES[source]}/bytes/{size} | wc -c", seconds=240).text
    assert int(text) == size, text


@contextlib.contextmanager
def network(connect=False, **others):
    """Two guests on a forwarder: yields the guests, and what starts another forwarder in the first one's place."""
    with scratch() as folder, contextlib.ExitStack() as stack:
        sockets = [folder / "v0", folder / "v1"]
        arguments = [f"connect:{path}" if connect else path for path in sockets]

        def forward():
            process = stack.enter_context(Forwarder(*arguments))
            if not connect:
                until("the sockets", lambda: all(path.exists() for path in sockets))
            return process

        def guest(number):
            return stack.enter_context(linux(number, Net.vhost_user(sockets[number], server=connect), **others))

        forwarder = forward()
        guests = [guest(0), guest(1)]
        for one in guests:
            one.wait_control(240)
        yield guests, guest, forwarder, forward


@timeout(600)
def test_offloads_and_bulk_between_two_linux_guests():
    with network() as (guests, _, forwarder, _forward):
        talk(guests)
        fetch(guests[0], 1, 104857600)
        fetch(guests[1], 0, 10485760)
        report = guests[0].run(f"iperf -c {ADDRESSES[1]} -t 2").text
        assert "bits/sec" in report, report
        # Large frames went through whole: their state was carried.
        features = guests[0].run("ethtool -k eth0 | grep -E 'tcp-segmentation|tx-checksumming|generic-receive'").text
        assert "tcp-segmentation-offload: on" in features and "tx-checksumming: on" in features, features
        assert forwarder.popen.poll() is None
        faults = [line for _, line in forwarder.lines if line.startswith(("ring:", "protocol:", "memory:", "system:"))]
        assert not faults, faults


@timeout(600)
def test_pci_and_interrupt_vectors():
    """q35: INTx on QEMU 7.2, which dies with MSI-X under emulation; MSI-X on QEMU 10."""
    with network(machine="q35") as (guests, *_):
        talk(guests)
        fetch(guests[0], 1, 10485760)


@timeout(600)
def test_qemu_10():
    program = BUILD / "qemu10/run"
    if not program.exists():
        raise Skip("build/qemu10 is not there: run ./x qemu10")
    with network(machine="q35", qemu=str(program)) as (guests, *_):
        talk(guests)
        fetch(guests[0], 1, 10485760)


@timeout(600)
def test_the_guest_reboots():
    # -action undoes the test library's -no-reboot.
    with network(extra=("-action", "reboot=reset")) as (guests, *_):
        talk(guests)
        seen = len(guests[0].lines)
        guests[0].send("@0 reboot -f\n")
        guests[0].wait_control(240, since=seen)
        talk(guests)


@timeout(600)
def test_qemu_is_killed():
    with network() as (guests, guest, *_):
        talk(guests)
        guests[0].kill()
        guests[0] = guest(0)
        guests[0].wait_control(240)
        talk(guests)


def received(guest):
    """Bytes that its card has received so far."""
    return int(guest.run("cat /sys/class/net/eth0/statistics/rx_bytes").text)


@timeout(600)
def test_the_backend_is_killed_under_live_guests():
    with network() as (guests, _, forwarder, forward):
        talk(guests)
        for _ in range(3):
            # In the middle of a transfer, so that frames are on their way.
            before = received(guests[1])
            load = guests[0].start(f"iperf -c {ADDRESSES[1]} -t 3")
            until("a part of the transfer", lambda before=before: received(guests[1]) > before + (1 << 20))
            forwarder.kill()
            forwarder = forward()
            guests[0].finish(load, seconds=60, check=False)
            talk(guests)
            fetch(guests[0], 1, 1048576)


@timeout(600)
def test_the_backend_connects_and_is_killed():
    with network(connect=True) as (guests, _, forwarder, forward):
        talk(guests)
        forwarder.kill()
        forwarder = forward()
        talk(guests)
        fetch(guests[1], 0, 1048576)
        assert qemu_program()
