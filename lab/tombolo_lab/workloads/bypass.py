"""The bypass beside the kernel's paths between two ends. The set-ups and the load are those of
bench/bypass.py and bench/pathload.c."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tombolo_lab import harness, sandbox
from tombolo_lab.workloads import Measure, Parameter, Skip, Workload

ENDS = ("tap-tap", "tap-veth", "veth-tap", "veth-veth")
PATHS = ("ip", "bypass", "nat", "bypass_nat", "bridge", "xdpfib", "kata")
FRAMES = tuple(f"udp{size}_{flows}" for size in (64, 1500) for flows in (1, 100, 10000))
LOADS = (
    *FRAMES, "trip64", "gso_60k", "udp_send", "tcp_rr",
    *(f"tcp_{write}_{n}_{cores}" for write in ("64", "16K") for n in (1, 2, 4) for cores in (1, 2)),
)  # fmt: skip
STREAMS = ("tcp_64", "tcp_16K")


def mirror(setting: object, module: object, side: str) -> None:
    """Kata's path: what comes from the tap is redirected to one end of a veth pair and back (tc
    with mirred, as Kata's tcfilter model), and the kernel forwards at the pair's other end."""
    router, tap = setting.router, f"r{side}"
    inner, outer = f"k{side}", f"n{side}"
    router.ip("link", "add", inner, "type", "veth", "peer", "name", outer)
    router.ip("address", "flush", "dev", tap)
    router.ip("neighbour", "flush", "dev", tap)
    for name in (inner, outer):
        router.ip("link", "set", name, "up")
    router.ip("address", "add", f"{module.NEAR[side]}/24", "dev", outer)
    mac = module.MAC[side]
    for address in (module.FAR[side], module.RAW[side]):
        words = ("lladdr", mac, "dev", outer, "nud", "permanent")
        router.ip("neighbour", "replace", address, *words)
    for source, target in ((tap, inner), (inner, tap)):
        router.run("tc", "qdisc", "add", "dev", source, "ingress")
        redirect = ("action", "mirred", "egress", "redirect", "dev", target)
        match = ("protocol", "all", "u32", "match", "u32", "0", "0")
        router.run("tc", "filter", "add", "dev", source, "parent", "ffff:", *match, *redirect)
    near = router.ip("-br", "link", "show", outer).split()[2]
    far = setting.far[side]
    words = ("lladdr", near, "dev", "eth0", "nud", "permanent")
    far.ip("neighbour", "replace", module.NEAR[side], *words)


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
            "by tc to a veth and back, behind which the kernel forwards",
            str,
            PATHS,
            default="ip",
            setup=True,
        ),
        "load": Parameter(
            "udp64_F and udp1500_F: frames in F flows; trip64: one frame at a time; gso_60k: "
            "segmentation frames; udp_send: a UDP socket; tcp_rr: a byte there and back; "
            "tcp_W_N_C: N connections that write W bytes at a time on C cores",
            str,
            LOADS,
            default="udp64_1",
        ),
        "seconds": Parameter("Duration of a slice", float, low=0.05, high=600, default=0.5,
                             unit="s"),
    }  # fmt: skip
    measures = {
        "frames_s": Measure("Frames or round trips that arrived", "1/s", "higher"),
        "mbit_s": Measure("What arrived: payload of streams, whole frames otherwise", "Mbit/s",
                          "higher"),
        "cpu_ns": Measure("CPU time per frame, round trip, or 1,000 B of a stream", "ns", "lower"),
        "loss": Measure("Frames that did not arrive, as a part of those sent", "", "lower", 0, 1),
        "rtt_us": Measure("Median round trip", "µs", "lower"),
        "taken": Measure("Part of the frames at the near end that the bypass took", "", "higher",
                         0, 1),
    }  # fmt: skip
    needs = ("root", "clang or gcc", "XDP")

    def __init__(self) -> None:
        self.built = None
        self.tidy = contextlib.ExitStack()

    def check(self, cell: dict) -> None:
        harness.need_root()
        harness.program()
        for name, package in (("gcc", "gcc"), ("clang", "clang"), ("ethtool", "ethtool"),
                              ("nft", "nftables")):  # fmt: skip
            harness.need_program(name, package)
        if cell["path"] == "kata" and not cell["ends"].startswith("tap"):
            raise Skip("Kata's path begins at a tap")
        if cell["path"] in ("xdpfib", "bridge") and cell["load"] == "udp64_10000":
            raise Skip("references are measured with fewer flows")

    def setup_seconds(self, cell: dict) -> float:
        return 3.0 if cell["path"].startswith("bypass") else 0.8

    def seconds(self, cell: dict) -> float:
        return cell["seconds"] + 0.1

    @staticmethod
    def setting_class() -> type:
        """bench/bypass.py's set-up, whose bypass is attached from outside of the run's own mount
        namespace: the bypass refuses to pin where pins would go with it."""
        module = harness.bench("bypass")

        class Setting(module.Setting):
            def make_side(self, stack: contextlib.ExitStack, side: str) -> None:
                super().make_side(stack, side)
                if self.path == "kata" and self.ends[side] == "tap":
                    mirror(self, module, side)

            def make(self, stack: contextlib.ExitStack, *words: object) -> None:
                super().make(stack, *words)
                if self.path == "kata" and self.ends["a"] == "tap":
                    near = self.router.ip("-br", "link", "show", "na").split()[2]
                    self.mac = module.mac_bytes(near)

            def cli(self, *words: str) -> str:
                mounts = sandbox.mounts_before()
                if mounts is None:
                    return super().cli(*words)
                # The namespace's name is in our mounts only; this path leads to it from anywhere.
                own = f"/proc/{os.getpid()}/root"
                space = f"{own}{sandbox.NETNS}/{self.router}"
                command = ("nsenter", f"--mount={mounts}", "nice", "-n", str(module.FIRST))
                env = dict(os.environ, TOMBOLO_RUNTIME=str(self.folder / "run"))
                argv = (*command, module.PROGRAM, "bypass", *words, "--netns", space)
                return module.run(*argv, env=env)

        return Setting

    def folder(self) -> object:
        """Where the load and the XDP programs are built; kept for the run."""
        if self.built is None:
            folder = self.tidy.enter_context(harness.scratch())
            harness.bench("bypass").prepare(folder)
            self.built = folder
        return self.built

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[object]:
        setting = self.setting_class()(self.folder(), cell["ends"], cell["path"])
        try:
            # The mode chooser looks at traffic like that of the points.
            setting.settle(cell["load"])
            yield setting
        finally:
            setting.close()

    def measure(self, setting: object, cell: dict) -> dict:
        load, seconds = cell["load"], cell["seconds"]
        if setting.attached:
            setting.way()
        row = setting.measure(load, seconds)
        is_stream = load.startswith(STREAMS)
        is_trip = load in ("trip64", "tcp_rr")
        found: dict = dict.fromkeys(self.measures)
        found["cpu_ns"] = row["cpu_ns"]
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
        if setting.attached:
            counted = setting.way()["by_reason"]
            total = sum(counted.values())
            taken = sum(n for reason, n in counted.items() if reason.startswith("taken"))
            found["taken"] = taken / total if total else None
        return found
