"""The bypass on interfaces with programs and filters of others: it refuses or lines up, says so clearly, and hides no frame that they must see."""

import contextlib
import ctypes
import os
import re
import socket
import struct
import subprocess
import threading

from bypass_paths import A, B, Host, has_tcx, host
from bypass_veth import C, container
from lib import Skip, need_program, until
from lib.machine import SLOW
from lib.netns import inside
from lib.tap import ETH_IP4, ICMP, UDP, Inside, echo, ethernet, ipv4, transport

# Both are named as ip(8) and tc(8) want them: by their sections.
PROGRAMS = """
struct __sk_buff { unsigned int len; };
__attribute__((section("xdp"), used)) int xdp_pass_all(void *context) { return 2; }
__attribute__((section("shot"), used)) int shoot(struct __sk_buff *skb) { return 2; }
char licence[] __attribute__((section("license"), used)) = "GPL";
"""


TCX_INGRESS, TCX_EGRESS, NEXT, SHOT, BEFORE = 46, 47, -1, 2, 1 << 3
SYS_BPF, MAP_CREATE, MAP_LOOKUP, PROG_LOAD, LINK_CREATE, ARRAY, SCHED_CLS = 321, 0, 1, 5, 28, 2, 3
libc = ctypes.CDLL(None, use_errno=True)


def bpf(command, attributes):
    """bpf(2); gives its file descriptor."""
    attributes = ctypes.create_string_buffer(attributes, 128)
    fd = libc.syscall(SYS_BPF, command, attributes, len(attributes))
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"bpf command {command}")
    return fd


class Queue:
    """A process that takes packets from NFQUEUE and judges each by its bytes, as an intrusion prevention does (nfnetlink_queue)."""

    NETLINK_NETFILTER, SUBSYSTEM, PACKET, VERDICT, CONFIG, DROP, ACCEPT = 12, 3 << 8, 0, 1, 2, 0, 1

    def __init__(self, space, number, passes):
        with Inside(space):
            self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, self.NETLINK_NETFILTER)
        self.socket.bind((0, 0))
        self.number, self.passes, self.judged = number, passes, 0
        # NFQA_CFG_CMD: bind; NFQA_CFG_PARAMS: whole packets.
        self._say(self.CONFIG, 1, struct.pack("!BBH", 1, 0, 2))
        self._say(self.CONFIG, 2, struct.pack("!IB", 0xFFFF, 2))
        threading.Thread(target=self._serve, daemon=True).start()

    def _say(self, kind, attribute, value):
        body = struct.pack("!BBH", 0, 0, self.number) + struct.pack("=HH", 4 + len(value), attribute) + value
        body += bytes(-len(body) % 4)
        self.socket.send(struct.pack("=IHHII", 16 + len(body), self.SUBSYSTEM | kind, 1, 0, 0) + body)

    def _serve(self):
        while True:
            data = self.socket.recv(1 << 17)
            if struct.unpack_from("=H", data, 4)[0] != self.SUBSYSTEM | self.PACKET:
                continue
            # NFQA_PACKET_HDR, with the packet's number, comes first.
            number = struct.unpack_from("!I", data, 24)[0]
            self.judged += 1
            self._say(self.VERDICT, 2, struct.pack("!II", self.ACCEPT if self.passes(data) else self.DROP, number))


def test_what_a_process_judges_by_nfqueue_it_judges_frame_by_frame():
    need_program("iptables")
    with host() as h:
        h.attach(words=("--lease", "10000"))
        h.across(h.udp())
        assert h.across(h.udp()) and h.taken() == 1
        # As such a process's own rules are: without it everything passes.
        done = h.space.run("iptables", "-A", "FORWARD", "-p", "udp", "-j", "NFQUEUE", "--queue-num", "7", "--queue-bypass", check=False)
        if done.returncode:
            raise Skip(f"this kernel has no NFQUEUE target: {done.stderr.strip()}")
        h.across(h.udp())
        queue = Queue(h.space, 7, lambda packet: b"evil" not in packet)

        def is_seen():
            before = queue.judged
            return h.across(h.udp()) and queue.judged == before + 1

        until("the controller's notice of the queue", is_seen)
        before, taken = queue.judged, h.taken()
        for turn in range(1, 6):
            assert h.across(h.udp()) and h.across(h.udp(b"evil" * 5), seconds=0.2) is None
            assert queue.judged == before + 2 * turn and h.taken() == taken, (turn, queue.judged, h.status("ta"))
        # Said of those that the verdict let go on the CPU that they came in by: on another nobody
        # has a note of them.
        until("the reason", lambda: h.across(h.udp()) and h.status("ta")["unlearned"].get("not_at_once"))
        # What no rule queues is taken, also where somebody listens.
        echoes = h.to_b(ETH_IP4, ipv4(A, B, ICMP, echo(A, B)))
        assert all(h.across(echoes) for _ in range(4)) and h.taken() >= taken + 2, h.status("ta")


@contextlib.contextmanager
def tcx_program(space, interface, hook, verdict, flags=0, name=b"another"):
    """A program that says the same of every frame, and counts those of IPv4 (the kernel's own IPv6 comes at any time), at the end of the line at a tcx hook or, by `BEFORE`, at its beginning (no tool of
    Debian 12 attaches there). Yields what gives its count."""
    if not has_tcx():
        raise Skip("this kernel has no tcx: others are filters here as ours are")
    counts = bpf(MAP_CREATE, struct.pack("<IIII", ARRAY, 4, 8, 1))
    # if (skb->protocol == htons(ETH_P_IP)) { *(u32 *)(r10 - 4) = 0; r0 = lookup(counts, r10 - 4);
    # if (r0) lock *(u64 *)r0 += 1; } return verdict
    code = [(0x61, 0x12, 16, 0), (0x55, 2, 9, socket.htons(0x0800)), (0x62, 10, -4, 0), (0xBF, 0xA2, 0, 0), (0x07, 2, 0, -4), (0x18, 0x11, 0, counts), (0, 0, 0, 0), (0x85, 0, 0, 1),
            (0x15, 0, 2, 0), (0xB7, 1, 0, 1), (0xDB, 0x10, 0, 0), (0xB7, 0, 0, verdict), (0x95, 0, 0, 0)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("<BBhi", *instruction) for instruction in code))
    licence = ctypes.create_string_buffer(b"GPL")
    with Inside(space):
        program = bpf(PROG_LOAD, struct.pack("<IIQQIIQII16s", SCHED_CLS, len(code), ctypes.addressof(text), ctypes.addressof(licence), 0, 0, 0, 0, 0, name))
        link = bpf(LINK_CREATE, struct.pack("<IIII", program, socket.if_nametoindex(interface), hook, flags))

    def seen():
        key, count = ctypes.c_uint32(0), ctypes.c_uint64(0)
        bpf(MAP_LOOKUP, struct.pack("<IIQQ", counts, 0, ctypes.addressof(key), ctypes.addressof(count)))
        return count.value

    try:
        yield seen
    finally:
        for fd in (link, program, counts):
            os.close(fd)


@contextlib.contextmanager
def bpffs(folder):
    """A place for pins, as libxdp wants one."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "bpf", "bpf", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def programs(h):
    """An object with an XDP program that passes and a tc program that drops."""
    need_program("clang")
    source, made = h.folder / "others.c", h.folder / "others.o"
    source.write_text(PROGRAMS)
    subprocess.run(["clang", "-O2", "-g", "-target", "bpf", "-c", source, "-o", made], check=True)
    return made


def seen_by_filter(h, name, side):
    """How many frames the filter there has looked at."""
    text = h.space.run("tc", "-s", "filter", "show", "dev", name, side).stdout
    return int(re.search(r"Sent \d+ bytes (\d+) pkt", text)[1])


def add_filter(h, name, side, *words):
    h.space.run("tc", "qdisc", "add", "dev", name, "clsact", check=False)
    h.space.run("tc", "filter", "add", "dev", name, side, "protocol", "all", "u32", "match", "u32", "0", "0",
                "action", "mirred", "egress", "mirror", "dev", "lo", *words)


def test_a_generic_xdp_program_is_named_with_the_command_that_takes_it_off():
    with host() as h:
        h.space.run("ip", "link", "set", "dev", "ta", "xdpgeneric", "obj", programs(h), "sec", "xdp")
        wrong = h.cli("attach", "ta", "--mode", "xdp", check=False)
        assert wrong.returncode == 1 and "xdp_pass_all" in wrong.stderr, wrong
        command = re.search(r"\((ip link set dev ta \S+ off)\)", wrong.stderr)[1]
        assert not h.status()["attached"]
        h.attach(words=("--lease", "10000"))
        h.across(h.udp())
        assert h.across(h.udp()) and h.taken() == 1
        h.cli("detach")
        assert "xdpgeneric" in h.space.ip("link", "show", "ta"), "what was there stays"
        h.space.run(*command.split())
        h.attach(words=("--lease", "10000", "--mode", "xdp"))
        h.across(h.udp())
        assert h.across(h.udp()) and h.status("ta")["by_reason"]["taken_xdp"] == 1


def test_an_attach_that_fails_leaves_what_was_attached_as_it_was():
    with host() as h:
        h.attach("ta", words=("--mode", "tcx"))
        before = h.space.ip("-d", "link", "show", "ta")
        h.space.run("ip", "link", "set", "dev", "tb", "xdpgeneric", "obj", programs(h), "sec", "xdp")
        wrong = h.cli("attach", "ta", "tb", "--mode", "xdp", check=False)
        assert wrong.returncode == 1 and "xdp_pass_all" in wrong.stderr, wrong
        assert h.status("ta")["mode"] == "tcx" and h.space.ip("-d", "link", "show", "ta") == before
        assert [i["name"] for i in h.status()["interfaces"]] == ["ta"]


def test_what_libxdp_loaded_stays_until_the_named_command():
    loader = need_program("xdp-loader")
    with host() as h, bpffs(h.folder / "libxdp") as pins:
        # Not in mounts of its own, where libxdp's pins would go with each command.
        def run(*words):
            return subprocess.run([*inside(h.space, own_mounts=False), *words], capture_output=True, text=True, timeout=20 * SLOW,
                                  env=dict(os.environ, LIBXDP_BPFFS=str(pins)))

        # Behind libxdp's dispatcher where the kernel replaces programs' functions, else by itself:
        # whatever is there is named.
        made = run(loader, "load", "-m", "native", "-s", "xdp", "ta", str(programs(h)))
        if made.returncode:
            raise Skip(f"xdp-loader cannot attach a program here: {made.stderr.strip()}")
        chained = "xdp_dispatcher" in run(loader, "status", "ta").stdout
        wrong = h.cli("attach", "ta", "--mode", "xdp", check=False)
        assert wrong.returncode == 1 and ("libxdp's dispatcher" if chained else "xdp_pass_all") in wrong.stderr, wrong
        command = re.search(r"\((xdp-loader unload ta --all|ip link set dev ta xdp off)\)", wrong.stderr)[1]
        assert command.startswith("xdp-loader") == chained
        h.attach(words=("--lease", "10000"))
        h.across(h.udp())
        assert h.across(h.udp()) and h.taken() == 1
        h.cli("detach")
        assert "xdp_pass_all" in run(loader, "status", "ta").stdout
        assert run(*command.split()).returncode == 0
        h.attach(words=("--lease", "10000", "--mode", "xdp"))
        assert h.status("ta")["mode"] == "xdp"


def test_a_filter_at_the_ingress_sees_every_frame_unless_it_need_not():
    if not has_tcx():
        raise Skip("this kernel has no tcx: ours runs behind filters that were there, as another test has it")
    with host() as h:
        add_filter(h, "ta", "ingress")
        wrong = h.cli("attach", "ta", "tb", check=False)
        assert wrong.returncode == 1 and "ta has tc filters" in wrong.stderr and "--past-filters" in wrong.stderr, wrong
        assert not h.status()["attached"]
        h.attach(words=("--lease", "10000", "--past-filters"))

        def is_taken():
            """Whether a frame is taken, which the filter then does not see; any other it sees."""
            before = h.taken(), seen_by_filter(h, "ta", "ingress")
            assert h.across(h.udp())
            after = h.taken(), seen_by_filter(h, "ta", "ingress")
            assert sum(after) == sum(before) + 1, (before, after, h.status("ta"))
            return after[0] > before[0]

        # The second one on most machines; a lease may end between two frames of a slow one.
        assert not is_taken()
        until("a frame to be taken", is_taken)
        h.cli("detach")
        h.space.run("tc", "qdisc", "del", "dev", "ta", "clsact")
        # One that comes later: the controller sees it, and until it goes again everything goes by
        # it.
        h.attach(words=("--lease", "10000"))
        h.across(h.udp())
        assert h.across(h.udp()) and h.taken() == 1
        add_filter(h, "ta", "ingress")
        until("the controller's notice", lambda: "filters were added" in h.status("ta")["why"])
        before, taken = seen_by_filter(h, "ta", "ingress"), h.taken()
        for _ in range(5):
            assert h.across(h.udp())
        assert seen_by_filter(h, "ta", "ingress") == before + 5 and h.taken() == taken
        assert h.status("ta")["by_reason"]["up_off"] >= 5, h.status("ta")
        h.space.run("tc", "qdisc", "del", "dev", "ta", "clsact")
        until("frames to be taken again", lambda: h.across(h.udp()) and h.taken() > taken)


def test_without_tcx_filters_that_were_there_see_every_frame_and_so_do_those_that_come_later():
    if has_tcx():
        raise Skip("this kernel has tcx, which is behind no filter (TOMBOLO_BYPASS_AS_OLD=1 does without)")
    with host() as h:
        # Without its last word such a filter is the last to be asked, and frames that it matches
        # stay on the kernel's path.
        add_filter(h, "ta", "ingress", "continue")
        done = h.attach(words=("--lease", "10000"))
        assert "ta: runs after u32, which was there before" in done.stderr, done
        before = seen_by_filter(h, "ta", "ingress")
        assert all(h.across(h.udp()) for _ in range(6)) and h.taken() == 5, h.status("ta")
        assert seen_by_filter(h, "ta", "ingress") == before + 6
        h.cli("detach")
        assert seen_by_filter(h, "ta", "ingress") and "clsact" in h.space.run("tc", "qdisc", "show", "dev", "ta").stdout, "what was there stays"
        assert "clsact" not in h.space.run("tc", "qdisc", "show", "dev", "tb").stdout, "what was made for it goes"
        h.space.run("tc", "qdisc", "del", "dev", "ta", "clsact")
        h.attach(words=("--lease", "10000"))
        h.across(h.udp())
        assert h.across(h.udp()) and h.taken() == 1
        # One behind ours: everything goes by it until it goes.
        h.space.run("tc", "filter", "add", "dev", "ta", "ingress", "pref", "60000", "protocol", "all", "u32", "match", "u32", "0", "0",
                    "action", "mirred", "egress", "mirror", "dev", "lo")
        until("the controller's notice", lambda: "filters were added" in h.status("ta")["why"])
        before, taken = seen_by_filter(h, "ta", "ingress"), h.taken()
        assert all(h.across(h.udp()) for _ in range(5))
        assert seen_by_filter(h, "ta", "ingress") == before + 5 and h.taken() == taken
        h.space.run("tc", "filter", "del", "dev", "ta", "ingress", "pref", "60000")
        until("frames to be taken again", lambda: h.across(h.udp()) and h.taken() > taken)
        # Somebody removes the qdisc, and with it ours: the controller puts it there again.
        h.space.run("tc", "qdisc", "del", "dev", "ta", "clsact")
        until("it to be attached again", lambda: h.programs_at("ta") == 2)
        until("frames to be taken again", lambda: h.across(h.udp()) and h.taken("ta") > 0)


def test_tcx_programs_that_come_later_see_every_frame():
    with host() as h:
        h.attach(words=("--lease", "10000", "--mode", "xdp"))
        h.across(h.udp())
        assert h.across(h.udp()) and h.status("ta")["by_reason"]["taken_xdp"] == 1
        with tcx_program(h.space, "tb", TCX_EGRESS, SHOT):
            until("its word", lambda: h.across(h.udp(), seconds=0.1) is None)
            assert all(h.across(h.udp(), seconds=0.1) is None for _ in range(3))
        until("frames to be taken by XDP again", lambda: h.across(h.udp()) and h.status("ta")["by_reason"]["taken_xdp"] > 1)
        with tcx_program(h.space, "ta", TCX_INGRESS, SHOT):
            until("the controller's notice", lambda: "filters were added" in h.status("ta")["why"])
            assert h.across(h.udp(), seconds=0.1) is None
        assert h.across(h.udp())


def test_tcx_programs_that_were_there_before_see_every_frame_in_every_mode():
    for mode in ("tcx", "xdp", "auto"):
        for interface, hook in (("ta", TCX_INGRESS), ("tb", TCX_EGRESS)):
            with host() as h, tcx_program(h.space, interface, hook, NEXT) as seen:
                done = h.attach(words=("--lease", "10000", "--mode", mode))
                assert ("ta: runs after another, which was there before" in done.stderr) == (interface == "ta"), done
                h.across(h.udp())
                before = seen()
                assert all(h.across(h.udp()) for _ in range(5)) and h.taken() == 5, h.status("ta")
                assert seen() == before + 5, (mode, interface, before, seen())
                assert h.status("ta")["by_reason"]["taken_tcx"] == 5, h.status("ta")


def test_a_tcx_program_that_comes_before_ours_later_sees_what_xdp_took():
    with host() as h:
        h.attach(words=("--lease", "10000", "--mode", "xdp"))
        h.across(h.udp())
        assert h.across(h.udp()) and h.status("ta")["by_reason"]["taken_xdp"] == 1
        with tcx_program(h.space, "ta", TCX_INGRESS, NEXT, BEFORE) as first:
            until("the controller's notice", lambda: h.across(h.udp()) and first())
            before, count = h.taken(), first()
            assert all(h.across(h.udp()) for _ in range(5)) and h.taken() >= before + 4, h.status("ta")
            assert first() == count + 5
            # A verdict of its own is obeyed, also for flows that are taken.
            with tcx_program(h.space, "ta", TCX_INGRESS, SHOT, BEFORE):
                assert all(h.across(h.udp(), seconds=0.1) is None for _ in range(3))
        until("frames to be taken by XDP again", lambda: h.across(h.udp()) and h.status("ta")["by_reason"]["taken_xdp"] > 1)


def test_what_a_filter_at_the_output_drops_is_dropped_in_every_mode():
    for mode in ("tcx", "xdp"):
        with host() as h, container(h) as _:
            made = programs(h)
            h.attach("ta", "tb", words=("--lease", "10000", "--mode", mode))
            h.attach("vc", words=("--lease", "10000", "--mode", "tcx"))
            assert h.status("vc")["peer"]
            into = ethernet(h.a.host_mac, h.a.mac, ETH_IP4, ipv4("10.1.0.2", C, UDP, transport(UDP, "10.1.0.2", C, 1, 9, b"in")))
            h.across(h.udp())
            assert h.across(h.udp()) and h.taken() == 1
            until("frames to go straight into the container", lambda: h.a.send(into) or h.status("ta")["by_reason"].get("taken_peer"))
            for name in ("tb", "vc"):
                # Without tcx it is there already.
                h.space.run("tc", "qdisc", "add", "dev", name, "clsact", check=False)
                h.space.run("tc", "filter", "add", "dev", name, "egress", "bpf", "da", "obj", made, "sec", "shot")
            until("the controller's notice", lambda: not h.status("vc")["peer"] and h.across(h.udp(), seconds=0.1) is None)
            assert all(h.across(h.udp(), seconds=0.1) is None for _ in range(5)), mode
            straight = h.status("ta")["by_reason"]["taken_peer"]
            for _ in range(5):
                h.a.send(into)
            assert h.status("ta")["by_reason"]["taken_peer"] == straight, mode
            h.space.run("tc", "qdisc", "del", "dev", "tb", "clsact")
            assert h.across(h.udp()), "nothing else keeps it"


def test_several_bypasses_are_in_line_and_each_goes_without_the_other():
    with host() as h:
        other = Host.__new__(Host)
        other.folder, other.space = h.folder / "other", h.space
        other.attach("ta", "tb", words=("--lease", "10000"))
        done = h.attach(words=("--lease", "10000"))
        assert "ta: runs after tcx_in, which was there before" in done.stderr, done

        def takes(one):
            before = one.taken()
            assert h.across(h.udp())
            return one.taken() > before

        # A program behind one's own is to see every frame, whatever its name: the first in line
        # steps aside for the last, with its keeper.
        until("the first one's keeper to notice", lambda: "filters were added" in other.status("ta")["why"])
        until("the last one to take frames", lambda: takes(h))
        before = other.taken()
        assert h.across(h.udp()) and other.taken() == before
        h.cli("detach")
        until("the first one to take frames again", lambda: takes(other))
        h.attach(words=("--lease", "10000"))
        other.cli("detach")
        until("the last one to take frames", lambda: takes(h))


def test_programs_of_others_that_have_the_names_of_ours_are_not_taken_for_ours():
    with host() as h:
        def sees(count, frames):
            """Whether it sees each of so many frames; the host's own (IPv6) may come on top."""
            before = count()
            assert all(h.across(h.udp()) for _ in range(frames))
            return count() >= before + frames

        h.attach(words=("--lease", "10000", "--mode", "xdp"))
        h.across(h.udp())
        assert h.across(h.udp()) and h.status("ta")["by_reason"]["taken_xdp"] == 1
        with tcx_program(h.space, "tb", TCX_EGRESS, NEXT, name=b"tcx_out") as seen:
            until("the controller's notice", lambda s=seen: sees(s, 5))
            assert sees(seen, 20)
        until("frames to be taken by XDP again", lambda: h.across(h.udp()) and h.status("ta")["by_reason"]["taken_xdp"] > 1)
        for flags in (0, BEFORE):
            with tcx_program(h.space, "ta", TCX_INGRESS, NEXT, flags, name=b"tcx_in") as seen:
                until("the controller's notice", lambda s=seen: sees(s, 5))
                assert sees(seen, 20), flags
                # What is attached is changed around it, and it stays.
                h.attach(words=("--lease", "10000", "--mode", "xdp"))
                h.cli("detach")
                assert sees(seen, 1)
                h.attach(words=("--lease", "10000", "--mode", "xdp"))
                h.across(h.udp())
                assert sees(seen, 20), flags
