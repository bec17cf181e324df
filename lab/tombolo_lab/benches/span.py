"""Several machines: calls beside a bare TCP connection, a network beside the kernel's vxlan, and
how fast many machines agree."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from tombolo_lab.benches import Figures, Part
from tombolo_lab.results import Run

MACHINES = 100
PARTS = (Part("machines"), Part("tunnel"), Part("converge", (f"machines={MACHINES}", "loss=0.0")))
CALLS = {
    "call_vs_tcp": ("tls", "tcp"),
    "call_zenoh_vs_tcp": ("zenoh", "tcp"),
    "call_plain_vs_tcp": ("plain", "tcp"),
    "call_vs_local": ("tls", "local"),
}
# Of the small datagrams, how many arrive in a CPU second: the inverse of CPU time for each.
TUNNEL = {
    "tcp_vs_kernel": "tcp_mbit_s",
    "tcp4_vs_kernel": "tcp4_mbit_s",
    "small_vs_kernel": "small_cpu_us",
    "small_rate_vs_kernel": "small_s",
}
INVERSE = ("small_vs_kernel",)
PORTS = ("tombolo", "kernel", "least")
LONGEST = ("join_ms", "move_max_ms", "heal_ms")


def middle(ratios: list[float]) -> float | None:
    return round(statistics.median(ratios), 3) if ratios else None


def against_kernel(figures: Figures, port: str, keys: Iterable[str] = TUNNEL) -> dict:
    """Medians of the ratios of each repetition to the kernel's vxlan."""
    found = {}
    for key in keys:
        measure = TUNNEL[key]
        ours, base = {"port": port}, {"port": "kernel"}
        pair = (base, ours) if key in INVERSE else (ours, base)
        found[key] = middle(figures.paired(measure, *pair))
    return found


def line(runs: dict[str, Run]) -> dict:
    """Medians of the ratios of each repetition; `lost_answers` is the sum over all calls."""
    found: dict = {"ratios": {}}
    if "machines" in runs:
        figures = Figures(runs["machines"])
        for key, (ours, base) in CALLS.items():
            ratios = figures.paired("p50_us", {"row": ours}, {"row": base})
            found["ratios"][key] = middle(ratios)
        found["call_us"] = figures.median("p50_us", 1, row="tls")
        found["call_zenoh_us"] = figures.median("p50_us", 1, row="zenoh")
        counts = figures.values("lost_answers")
        found["lost_answers"] = sum(counts) if counts else None
    if "tunnel" in runs:
        run = runs["tunnel"]
        figures = Figures(run)
        found["ratios"] |= against_kernel(figures, "tombolo")
        found["noise"] = against_kernel(figures, "kernel-again")
        # Its small frames are no least.
        found["least"] = against_kernel(figures, "least", ("tcp_vs_kernel", "tcp4_vs_kernel"))
        found["cpu_s_per_gb"] = {
            port: figures.median("tcp_cpu_s_per_gb", 3, port=port) for port in PORTS
        }
    if "converge" in runs:
        figures = Figures(runs["converge"])
        match = {"machines": MACHINES, "loss": 0.0}
        times = [time for name in LONGEST for time in figures.values(name, **match)]
        found["converge_ms_100"] = round(max(times), 1) if times else None
        # A change is told to each other machine in a message of its own.
        sizes = figures.paired("bytes_per_change", match, match, "messages_per_change")
        found["bytes_per_change"] = round(sizes[0], 1) if sizes else None
    return found
