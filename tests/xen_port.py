"""Our backend on real Xen, under emulation: `tombolo` in dom0 serves the vifs of a stock Linux guest and of a cell, in place of netback.

One boot goes through all of it, since each takes half a minute. An emulated Xen varies tenfold from boot to boot: nothing here
asserts a speed.
"""

import base64
import contextlib
import json
import random
import re
import struct
import subprocess
import time

from lib import need_program, scratch, timeout
from lib.process import until
from lib.xen import XenHost, fabric_files, fetch, fetch_bytes, linux_guest, linux_init, pattern, sha256, xl_config

HOST, CELL, LINUX = "10.87.0.3", "10.87.0.20", "10.87.0.21"
CELL_MAC, LINUX_MAC, TRUNK_MAC = "00:16:3e:00:00:20", "00:16:3e:00:00:21", "00:16:3e:00:00:22"
# VLAN 10 of a second network: dom0 has it by an access port, Linux by a trunk to its second device.
TAGGED_HOST, TAGGED_LINUX = "10.88.0.3", "10.88.0.21"
# Sources that the guards do not let pass.
FORGED, FORGED_MAC = "10.87.0.99", "02:00:00:00:00:99"
# What Linux serves, and what it fetches again and again from dom0 and from the cell.
DATA, UP = (random.Random(seed).randbytes(3_000_000) for seed in (1, 2))
CAPTURED = random.Random(3).randbytes(40_000)
FETCHED = 300_007

FABRIC = f"""
name = "xen"
[network.lan]
subnet = "10.87.0.0/24"
[tap.host]
network = "lan"
ip = "{HOST}"
[port.web]
kind = "xen"
network = "lan"
mac = "{CELL_MAC}"
ip = "{CELL}"
[port.guest]
kind = "xen"
network = "lan"
domain = "linux"
queues = 2
mac = "{LINUX_MAC}"
ip = "{LINUX}"
[network.tags]
subnet = "10.88.0.0/24"
[tap.tags]
network = "tags"
ip = "{TAGGED_HOST}"
vlan = 10
[port.trunk]
kind = "xen"
network = "tags"
domain = "linux"
vif = 1
mac = "{TRUNK_MAC}"
ip = "{TAGGED_LINUX}"
trunk = [10, 20]
"""

# What process 1 of the Linux guest does. A cell that is destroyed closes no connection, so each
# fetch has a limit.
INIT = linux_init(f"""device() {{
    until found=$(grep -l $1 /sys/class/net/eth*/address); do usleep 10000; done
    found=${{found%/address}}
    echo ${{found##*/}}
}}
lan=$(device {LINUX_MAC}) trunk=$(device {TRUNK_MAC})
ip link set $lan up
udhcpc -q -t 100 -T 1 -i $lan -s /udhcpc
ip link set $trunk up
ip link add link $trunk name tagged type vlan id 10
ip addr add {TAGGED_LINUX}/24 dev tagged
ip link set tagged up
ip addr add {FORGED}/32 dev $lan
ip link add link $trunk name forged type vlan id 20
ip link set forged address {FORGED_MAC}
ip addr add 10.89.0.1/24 dev forged
ip link set forged up
httpd -h /www
# By its path: busybox's shell takes its own `ip` otherwise.
while sleep 1; do
    asked=$(wget -q -O - http://{HOST}/xdp)
    case $asked in
        on) [ "$had" = on ] || /bin/ip link set $lan xdpdrv obj /xdp.o sec xdp ;;
        off) [ "$had" = off ] || /bin/ip link set $lan xdpdrv off ;;
        *) false ;;
    esac && had=$asked && echo "xdp $had"
done &
while :; do
    for from in {HOST}/up {CELL}/bytes/{FETCHED} {TAGGED_HOST}/up; do
        echo "fetched $from $(timeout 10 wget -q -O - http://$from | sha256sum)"
    done
    ping -c 1 -W 1 -I {FORGED} {HOST}
    ping -c 1 -W 1 10.89.0.2
    for queue in $(awk '/-q[0-9]+-[rt]x/ {{ print $NF "=" $2 + $3 }}' /proc/interrupts); do
        echo "events of $queue"
    done
done
""")


# Drops what does not begin as a frame of IPv4, ARP or IPv6, and IPv4 packets that are not as long as
# the frame. Linux gives it the bytes behind 256 of the page, wherever the frame begins.
XDP = """
struct xdp_md { unsigned data, data_end; };
__attribute__((section("xdp"), used)) int whole(struct xdp_md *context)
{
    unsigned char *frame = (void *)(long)context->data, *end = (void *)(long)context->data_end;
    if (frame + 34 > end)
        return 1;
    if (frame[12] != 8 || frame[13] != 0)
        return (frame[12] == 8 && frame[13] == 6) || (frame[12] == 0x86 && frame[13] == 0xdd) ? 2 : 1;
    long bytes = 14 + (frame[16] << 8 | frame[17]);
    return frame[14] == 0x45 && (end - frame == bytes || (bytes < 60 && end - frame == 60)) ? 2 : 1;
}
"""


def xdp_program():
    need_program("clang")
    with scratch() as folder:
        (folder / "xdp.c").write_text(XDP)
        subprocess.run(["clang", "-O2", "-target", "bpf", "-c", folder / "xdp.c", "-o", folder / "xdp.o"], check=True)
        return (folder / "xdp.o").read_bytes()


@contextlib.contextmanager
def host():
    www, modules = {"data": DATA, "captured": CAPTURED}, ("xen_netfront", "8021q")
    ramdisk, kernel = linux_guest(INIT, www, programs=["ip"], modules=modules, files={"xdp.o": xdp_program()})
    files = fabric_files(FABRIC) | {"domu/kernel": kernel, "domu/ramdisk": ramdisk, "www/up": UP}
    # Xen 4.17 does not restore a domain with 32 MiB.
    files["domu/web.cfg"] = xl_config("web", CELL_MAC, 64, "/cells/httpd", line="verbose").encode()
    # A queue for each processor, as its driver does.
    more = ["vcpus=2", f"vif={[f'mac={mac},script=/bin/true' for mac in (LINUX_MAC, TRUNK_MAC)]}"]
    files["domu/linux.cfg"] = xl_config("linux", None, 160, ramdisk="/domu/ramdisk", more=more).encode()
    with scratch() as folder, XenHost(folder, ["httpd"], files, memory_mib=704) as xen:
        try:
            print(f"Xen and dom0 were up after {xen.bring_up():.1f} s")
            yield xen
        except Exception:
            print(xen.tail(40))
            raise


def status(xen):
    # The console of an emulated machine takes a millisecond for each line.
    return json.loads(xen.run("tombolo status --json | tr -s ' ' | tr -d '\\n'").text)


def port(xen, name):
    return next(port for port in status(xen)["ports"] if port["name"] == name)


def fetched(xen):
    """What Linux has fetched so far, by where from; each with the right content, or none while the other end was away."""
    found = {HOST: 0, CELL: 0, TAGGED_HOST: 0}
    for address, digest in re.findall(r"fetched ([\d.]+)/\S+ ([0-9a-f]{64})", xen.console("linux")):
        want = sha256(pattern(FETCHED)) if address == CELL else sha256(UP)
        found[address] += digest == want
    return found


def rings_used(xen):
    """The rings of which Linux had events."""
    return {ring for ring, count in re.findall(r"events of \S+-(q\d-[rt]x)=(\d+)", xen.console("linux")) if int(count) > 0}


def fetches_more(xen):
    """Linux fetches from each another time, with the right content."""
    before = fetched(xen)
    until("Linux fetches from each another time", lambda: all(fetched(xen)[a] > before[a] for a in before), 300, 0.5)


def answers(xen, address):
    until(f"an answer of {address}", lambda: xen.ping(address, 1, seconds=2) == 1.0)
    assert xen.ping(address, 5, seconds=40) == 1.0


def frames_of(data):
    """The frames of a pcapng file; its last block may not be whole yet."""
    at, frames = 0, []
    while at + 8 <= len(data):
        kind, length = struct.unpack_from("<II", data, at)
        if at + length > len(data):
            break
        if kind == 6:  # an enhanced packet block
            _, _, _, kept, whole = struct.unpack_from("<IIIII", data, at + 8)
            assert kept == whole, "frames are whole"
            frames.append(data[at + 28 : at + 28 + kept])
        at += length
    return frames


def captured(xen, name, expression, meanwhile, is_enough):
    """The frames of a port of which the expression is true, from before `meanwhile` happens until they are enough."""
    xen.run("rm -f /tmp/frames")
    xen.run(f"tombolo capture {name} --filter '{expression}' -w /tmp/frames >/dev/null 2>&1 & echo $! >/tmp/capture.pid")
    # Its header: the capture has begun.
    until("the capture's file", lambda: not xen.run("[ -s /tmp/frames ]", check=False).code)
    meanwhile()
    read = lambda: frames_of(base64.b64decode(xen.run("base64 /tmp/frames", 120).text))
    frames = until("enough is captured", lambda: is_enough(found := read()) and found, 60, 0.5)
    xen.run("kill $(cat /tmp/capture.pid)")
    return frames


def is_guarded(xen, source, destination, address, expression):
    """Frames of which the expression is true come from the guest of the one port, go no further, and are counted."""
    before = guarded(xen, source)

    def meanwhile():
        xen.run(f"timeout 120 tombolo capture {source} --filter '{expression}' --count 2 -w /dev/null", 150)
        # The capture of the other port has come so far when it has this.
        assert xen.ping(address, 1, size=777, seconds=20) == 1.0

    frames = captured(xen, destination, f"{expression} or greater 819 and less 819", meanwhile, is_enough=bool)
    assert {len(frame) for frame in frames} == {14 + 20 + 8 + 777}, frames
    assert guarded(xen, source) >= before + 2


def stream(frames):
    """What the TCP segments carry, put together by their sequence numbers."""
    parts, first = {}, 0
    for frame in frames:
        tcp = 14 + (frame[14] & 15) * 4
        end = 14 + struct.unpack_from("!H", frame, 16)[0]
        sequence, flags = struct.unpack_from("!I", frame, tcp + 4)[0], frame[tcp + 13]
        payload = frame[tcp + (frame[tcp + 12] >> 4) * 4 : end]
        if flags & 2:
            first = sequence + 1
        parts[sequence + (flags >> 1 & 1)] = payload
    data = b""
    for sequence, payload in sorted((((sequence - first) % (1 << 32)), payload) for sequence, payload in parts.items()):
        if sequence > len(data):
            break
        data = data[:sequence] + payload + data[sequence + len(payload) :]
    return data


def reached(xen, what):
    print(f"{time.monotonic() - xen.started:6.1f} s  {what}", flush=True)


def channels(xen):
    return len(xen.run("lsevtchn 0").text.splitlines())


def killed(xen):
    """kill -9 of the daemon, and another one."""
    xen.run(f"kill -9 {status(xen)['pid']}")
    up(xen)


def up(xen, more=""):
    xen.run(f"tombolo up -d {more} /tombolo.toml", 120)


def guarded(xen, name):
    """Frames that the guard of a port dropped."""
    return port(xen, name)["counters"]["rx_drops"].get("guard", 0)


def told_xdp(xen, what, headroom):
    """Has the Linux guest attach its XDP program ("on") or detach it ("off"), and waits until both ends say so."""
    xen.run(f"echo {what} >/www/xdp")
    xen.wait_console("linux", f"xdp {what}", 120)
    until("the port knows", lambda: port(xen, "guest")["details"]["headroom"] == headroom)
    seen = port(xen, "guest")
    assert ("tso4" in seen["offloads"]) == (headroom == 0) and "checksum" in seen["offloads"], seen


def save_and_restore(xen):
    before = port(xen, "web")["counters"]["rx_bytes"]
    until("the download runs", lambda: port(xen, "web")["counters"]["rx_bytes"] > before + 1_000_000, 60, 0.05)
    xen.run("xl save web /tmp/image >/dev/null 2>&1", 120)
    assert xen.state("web") is None
    xen.run("xl restore /tmp/image >/dev/null 2>&1 && rm /tmp/image", 120)


def nothing_is_left(xen):
    """Of no domain but dom0 anything is left. One of which a page is still mapped would stay as a zombie."""
    until("dom0 is alone", lambda: len(xen.run("xl list").text.splitlines()) == 2)
    assert xen.run("xenstore-list /local/domain/0/backend/vif", check=False).text in ("", "xenstore-list: could not list path /local/domain/0/backend/vif")


@timeout(1200)
def test_the_fabric_serves_linux_and_a_cell_in_place_of_netback():
    """Content both ways for both guests, also with VLAN tags; captured; forged sources dropped; the daemon killed and replaced under downloads, a domain saved and restored; devices detached and attached, a domain destroyed under traffic; nothing left."""
    with host() as xen:
        refused = xen.run("tombolo up -d /tombolo.toml", 120, check=False)
        assert refused.code and "rmmod xen-netback" in refused.text, refused.text
        said = xen.run("tombolo doctor 2>&1 | grep -iA2 xen", 120).text
        assert "this is the dom0 of Xen" in said and "rmmod xen-netback" in said and "/dev/xen/privcmd" in said, said
        xen.run("rmmod xen_netback; httpd -h /www")
        before = channels(xen)
        up(xen)
        assert port(xen, "web")["details"]["state"] == "waiting for the domain"
        for name in ("linux", "web"):
            xen.run(f"xl create -q /domu/{name}.cfg", 120)
        xen.wait_console("web", f"net up {CELL}/24", 300)
        xen.wait_console("linux", f"@net up {LINUX}/24", 300)
        assert not xen.run("ip addr show tags | grep -F 10.88.0.3", check=False).code
        reached(xen, "both guests have their leases")
        for address in (CELL, LINUX):
            assert xen.ping(address, 10, seconds=40) == 1.0
            assert xen.ping(address, 3, size=1400, seconds=40) == 1.0
        fetch_bytes(xen, 3_000_001, CELL)
        fetch(xen, LINUX, "data", DATA)
        fetches_more(xen)
        for name in ("web", "guest"):
            seen = port(xen, name)
            assert seen["kind"] == "xen" and seen["up"] and seen["details"]["state"].endswith("connected"), seen
            assert {"tso4", "checksum"} <= set(seen["offloads"]), seen
            assert seen["counters"]["faults"] == 0 and seen["counters"]["rx_frames"] > 100, seen

        # Both queues of the Linux guest are used, each way.
        assert port(xen, "guest")["details"]["queues"] == 2, port(xen, "guest")
        until("events of each ring", lambda: rings_used(xen) == {"q0-tx", "q0-rx", "q1-tx", "q1-rx"}, 120, 0.5)

        reached(xen, "content both ways")

        # Linux has tagged frames by its second device, and takes them only with their checksums and
        # in segments. dom0's kernel gives them without either.
        fetch(xen, TAGGED_LINUX, "data", DATA)
        assert port(xen, "trunk")["counters"]["software_segments"] > 1000, port(xen, "trunk")["counters"]
        reached(xen, "tagged frames both ways")

        # A capture at the port of the Xen guest has what went to it and what came, whole and uncut.
        at_80 = f"tcp src port 80 and src host {LINUX} or tcp dst port 80 and dst host {LINUX}"
        end = b"\r\n\r\n" + CAPTURED
        from_linux = lambda frames: [frame for frame in frames if frame[6:12].hex(":") == LINUX_MAC]
        frames = captured(
            xen, "guest", at_80, lambda: fetch(xen, LINUX, "captured", CAPTURED), lambda frames: stream(from_linux(frames)).endswith(end)
        )
        came = from_linux(frames)
        assert {frame[:6].hex(":") for frame in frames if frame not in came} == {LINUX_MAC}, "what went to it"
        assert max(map(len, came)) > 1514, "Linux's frames were cut before they were captured"

        # The guards let no forged address pass, of IPv4 or of Ethernet.
        is_guarded(xen, "guest", "host", LINUX, f"src host {FORGED}")
        is_guarded(xen, "trunk", "tags", TAGGED_LINUX, f"ether src {FORGED_MAC}")
        reached(xen, "captured and guarded")

        # Linux attaches an XDP program: its frames come with room before them and in one page each,
        # also from the next daemons, and it asks for all that again when it detaches the program.
        told_xdp(xen, "on", 256)
        fetches_more(xen)
        fetch(xen, LINUX, "data", DATA)

        # The guests keep their links and connections when the daemon is killed, and when another
        # takes over.
        fetch_bytes(xen, 20_000_009, CELL, meanwhile=lambda: killed(xen))
        # Much of it came through the daemon that followed.
        assert port(xen, "web")["counters"]["rx_bytes"] > 1_000_000
        fetch(xen, LINUX, "data", DATA, meanwhile=lambda: up(xen, "--replace"))
        fetches_more(xen)
        assert "gone" not in xen.console("web"), "the cell has noticed the daemon's end"
        told_xdp(xen, "off", 0)
        fetches_more(xen)
        reached(xen, "two daemons later")

        # A domain is saved and restored while a download runs, which goes on.
        fetch_bytes(xen, 30_000_001, CELL, meanwhile=lambda: save_and_restore(xen))
        assert xen.console("web").count("restored") == 1
        fetches_more(xen)
        reached(xen, "saved and restored under a download")

        # The toolstack takes the device away and gives it back.
        xen.run("xl network-detach web 0", 120)
        until("the port waits", lambda: not port(xen, "web")["up"])
        xen.run(f"xl network-attach web mac={CELL_MAC} script=/bin/true", 120)
        answers(xen, CELL)
        fetch_bytes(xen, 300_001, CELL)

        reached(xen, "detached and attached")

        # A domain dies under traffic; the other one notices nothing, and the next of that name is
        # served.
        xen.start_pings(LINUX)
        handle = xen.start(f"timeout 20 wget -q -O /dev/null http://{CELL}/bytes/400000000")
        until("the download runs", lambda: port(xen, "web")["counters"]["rx_bytes"] > 3_000_000)
        xen.run("xl destroy web")
        until("the port waits", lambda: port(xen, "web")["details"]["state"] == "waiting for the domain")
        xen.run("xl create -q /domu/web.cfg", 120)
        answers(xen, CELL)
        sent, came = xen.finish_pings()
        assert sent == came, f"{sent - came} of {sent} pings of the other guest were lost"
        xen.finish(handle, 60, check=False)
        fetches_more(xen)

        reached(xen, "destroyed and created under traffic")
        for name in ("web", "linux"):
            xen.run(f"xl destroy {name}")
        nothing_is_left(xen)
        assert port(xen, "guest")["counters"]["faults"] == 0
        xen.run("tombolo down", 60)
        assert channels(xen) == before, xen.run("lsevtchn 0").text
