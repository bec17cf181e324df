"""The bypass beside the kernel's paths between two ends.

All paths between two ends are set up side by side, so that slices of them can follow each other
within a second. The load is lab/programs/pathload.c; `router` makes the set-ups. The load comes
before the machine's other work, and the CPUs are kept from halting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tombolo_lab import harness, machine
from tombolo_lab.workloads import Measure, Parameter, Skip, Workload, stacks, tools

ENDS = ("tap-tap", "tap-veth", "veth-tap", "veth-veth")
PATHS = (
    "ip", "bypass", "nat", "bypass_nat", "bridge", "xdpfib", "kata", "macvtap", "ip_again",
    "nat_again", "drop", "straight",
)  # fmt: skip
# Kata's two models: a pair of interfaces stands between the tap and where the kernel forwards.
KATA = ("kata", "macvtap")
BOUNDS = ("drop", "straight")
FRAMES = tuple(f"udp{size}_{flows}" for size in (64, 1500) for flows in (1, 100, 10000))
LOADS = (
    *FRAMES, "trip64", "gso_60k", "udp_send", "tcp_rr",
    *(f"tcp_{write}_{n}_{cores}" for write in ("64", "16K") for n in (1, 2, 4) for cores in (1, 2)),
)  # fmt: skip
STREAMS = ("tcp_64", "tcp_16K")


# Loads that the writer's own calls carry to the far end; stacks are taken of them.
SAMPLED = "udp64_1"
# Slices of so many flows are longer, so that they begin with a renewed lease of each.
MANY_FLOWS_LONGER = 3
WRITER_CPU = 0
# On a busy machine the sender or the receiver may have no turn in a slice, which says nothing then.
# So many are tried.
SLICES = 3


class Paths:
    """The set-ups between two ends, side by side, each made when its path is first measured."""

    def __init__(self, folder: Path, ends: str, stack: contextlib.ExitStack):
        self.folder, self.ends, self.stack = folder, ends, stack
        self.made: dict[str, object] = {}
        self.settled: dict[str, str] = {}

    def get(self, path: str, load: str, choose: bool) -> object:
        """The set-up of a path. With `choose` its mode chooser has seen traffic of this kind."""
        from tombolo_lab.workloads import router

        if path not in self.made:
            self.made[path] = router.Setting(self.folder, self.ends, path)
            self.stack.callback(self.made[path].close)
        setting, kind = self.made[path], kind_of(load)
        if choose and self.settled.get(path) != kind:
            setting.settle(load)
            self.settled[path] = kind
        return setting


def kind_of(load: str) -> str:
    """Loads of one kind need no new choice of a mode."""
    return "frames" if load in FRAMES else load if load in ("trip64", "gso_60k") else "sockets"


class Bypass(Workload):
    """One load over one path."""

    name = "bypass"
    doc = (
        "Frames between two ends of a router in a namespace, each a tap (as of a microVM) or a "
        "veth (as of a container): over the kernel's forwarding, with NAT, over a bridge, over a "
        "plain XDP-FIB redirect, and through the bypass."
    )
    parameters = {
        "ends": Parameter("Near and far end", str, ENDS, default="tap-tap", setup=True),
        "path": Parameter(
            "ip and nat are the kernel's forwarding, without and with masquerade; bypass and "
            "bypass_nat the same with the bypass attached; kata: the tap's frames are redirected "
            "by tc to a veth and back, behind which the kernel forwards; macvtap: the guest is on "
            "a macvtap of such a veth instead; ip_again and nat_again: set up once more, which "
            "shows the noise; bounds: drop, a tap's write alone, and straight, an XDP program that "
            "only redirects",
            str,
            PATHS,
            default="ip",
        ),
        "load": Parameter(
            "udp64_F and udp1500_F: frames in F flows; trip64: one frame at a time; gso_60k: "
            "segmentation frames; udp_send: a UDP socket; tcp_rr: a byte there and back; "
            "tcp_W_N_C: N connections that write W bytes at a time on C cores",
            str,
            LOADS,
            default="udp64_1",
        ),
        "seconds": Parameter("Duration of a slice; that of 10,000 flows is three times as long",
                             float, low=0.05, high=600, default=0.5, unit="s"),
        "awake": Parameter(
            "Whether the reader never sleeps, so that no writer has to wake it", bool,
            default=False,
        ),
        "choose": Parameter(
            "Whether the bypass has traffic first, until its mode chooser had the time to decide",
            bool, default=True,
        ),
        "stack_seconds": Parameter(
            f"How long perf samples the writer's stacks, of {SAMPLED}; 0: not at all", float,
            low=0, high=60, default=0, unit="s",
        ),
    }  # fmt: skip
    measures = {
        "frames_s": Measure("Frames or round trips that arrived", "1/s", "higher"),
        "mbit_s": Measure("What arrived: payload of streams, whole frames otherwise", "Mbit/s",
                          "higher"),
        "cpu_ns": Measure("CPU time per frame, round trip, or 1,000 B of a stream", "ns", "lower"),
        "loss": Measure("Frames that did not arrive, as a part of those sent", "", "lower", 0, 1),
        "rtt_us": Measure("Median round trip", "µs", "lower"),
        "retransmitted": Measure("Segments that TCP sent again", "", "lower"),
        "disordered": Measure("Segments that came out of order", "", "lower"),
        "instructions": Measure("Instructions per frame sent, where counters exist", "", "lower"),
        "cycles": Measure("Cycles per frame sent, where counters exist", "", "lower"),
        "taken": Measure("Part of the frames at the near end that the bypass took", "", "higher",
                         0, 1),
    }  # fmt: skip
    needs = ("root", "clang or gcc", "XDP")

    def __init__(self) -> None:
        self.built: Path | None = None
        self.counters: bool | None = None
        self.tidy = contextlib.ExitStack()

    def check(self, cell: dict) -> None:
        harness.need_root()
        harness.program()
        harness.measured(*(harness.tree() / "lab/programs").glob("*.c"))
        for name, package in (("gcc", "gcc"), ("clang", "clang"), ("ethtool", "ethtool"),
                              ("nft", "nftables")):  # fmt: skip
            harness.need_program(name, package)
        if cell["path"] in KATA and not cell["ends"].startswith("tap"):
            raise Skip("Kata's paths begin at a tap")
        if cell["path"] in ("xdpfib", "bridge") and cell["load"] == "udp64_10000":
            raise Skip("references are measured with fewer flows")
        if cell["path"] in BOUNDS and (cell["ends"], cell["load"]) not in (
            ("tap-tap", "udp64_1"),
            ("tap-tap", "udp64_10000"),
        ):
            raise Skip("bounds are those of a tap's write of 64 bytes")

    def setup_seconds(self, cell: dict) -> float:
        # The spinner starts at once. A path is made by its first point; two of a few have a mode
        # chooser, which takes some seconds for each kind of load.
        return 12.0 if cell["choose"] else 2.5

    def seconds(self, cell: dict) -> float:
        sampled = cell["stack_seconds"] + 0.7 if cell["stack_seconds"] else 0
        slices = cell["seconds"] * (MANY_FLOWS_LONGER if is_long(cell) else 1)
        return slices + 0.25 + (sampled if cell["load"] == SAMPLED else 0)

    def folder(self) -> Path:
        """Where the load and the XDP programs are built; kept for the run."""
        from tombolo_lab.workloads import router

        if self.built is None:
            folder = self.tidy.enter_context(harness.scratch())
            router.prepare(folder)
            self.built = folder
        return self.built

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[Paths]:
        from tombolo_lab.workloads import router

        folder = self.folder()
        with contextlib.ExitStack() as stack:
            stack.enter_context(router.awake(folder))
            stack.enter_context(harness.group_first(router.GROUP))
            yield Paths(folder, cell["ends"], stack)

    def measure(self, setup: Paths, cell: dict) -> dict:
        load = cell["load"]
        setting = setup.get(cell["path"], load, cell["choose"])
        if setting.attached:
            setting.way()
        seconds = cell["seconds"] * (MANY_FLOWS_LONGER if is_long(cell) else 1)
        for _ in range(SLICES):
            row = setting.measure(load, seconds, cell["awake"])
            if row["sent"] and row["rate"]:
                break
        found = {**dict.fromkeys(self.measures), **figures(row, load)}
        notes = {}
        if setting.attached:
            way = setting.way()
            total = sum(way["by_reason"].values())
            taken = sum(n for why, n in way["by_reason"].items() if why.startswith("taken"))
            found["taken"] = taken / total if total else None
            notes["path"] = way
        if self.has_counters():
            with machine.counters((setting.load_pid(),)) as counts:
                again = setting.ask(load, 0, seconds)
            for name, value in counts.items():
                if value is not None and again["sent"]:
                    found[name] = value / again["sent"]
        if cell["stack_seconds"] and load == SAMPLED and stacks.is_available():
            # A busy machine may give perf no time; the figures of the point are as good.
            try:
                notes["stacks"] = self.stacks(setting, cell)
            except tools.ToolError as error:
                notes["no_stacks"] = str(error)
        return found | ({"notes": notes} if notes else {})

    @staticmethod
    def stacks(setting: object, cell: dict) -> dict[str, int]:
        """Where the writer's calls spend their time, in a further slice."""
        with stacks.file_of_samples() as file:
            with stacks.recording(file, WRITER_CPU):
                setting.ask(cell["load"], 0, cell["stack_seconds"], cell["awake"])
            return dict(stacks.of_writes(file, "pathload"))

    def has_counters(self) -> bool:
        """Whether the machine has hardware counters; asked once."""
        if self.counters is None:
            with machine.counters() as counts:
                pass
            self.counters = all(value is not None for value in counts.values())
        return self.counters


def is_long(cell: dict) -> bool:
    return cell["load"].endswith("_10000") and not cell["awake"]


def figures(row: dict, load: str) -> dict:
    """The measures of a slice, of what the load counted."""
    is_stream, is_trip = load.startswith(STREAMS), load in ("trip64", "tcp_rr")
    found = {"cpu_ns": row["cpu_ns"]}
    if not row["sent"]:
        found["disturbed"] = "the sender had no turn in the slice"
    if is_stream:
        found["mbit_s"] = row["rate"] * 8e-6
    else:
        found["frames_s"] = row["rate"]
        if not is_trip and row.get("got_bytes"):
            found["mbit_s"] = row["got_bytes"] / row["seconds"] * 8e-6
    if is_trip and "p50_ns" in row:
        found["rtt_us"] = row["p50_ns"] / 1000
    if load in FRAMES and row["sent"]:
        found["loss"] = max(0.0, 1 - row["got"] / row["sent"])
    if load.startswith("tcp"):
        for name in ("retransmitted", "disordered"):
            found[name] = row.get(name)
    return found
