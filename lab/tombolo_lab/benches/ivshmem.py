"""Cells on IVSHMEM beside the same cells on virtio, and on QEMU's user networking."""

from __future__ import annotations

from tombolo_lab.benches import Figures, Part, ratio
from tombolo_lab.results import Run

PARTS = (Part("links"), Part("direct"), Part("restart"), Part("mesh"))
# Key of a ratio → measure, load, our kind, the other's.
RATIOS = {
    "ping_vs_virtio": ("ping_us", "ping", "ivshmem", "virtio"),
    "tcp_vs_virtio": ("mbit_s", "tcp_up", "ivshmem", "virtio"),
    "tcp_down_vs_virtio": ("mbit_s", "tcp_down", "ivshmem", "virtio"),
    "ping_plain_vs_virtio": ("ping_us", "ping", "plain", "virtio"),
    "tcp_vs_user": ("mbit_s", "tcp_up", "ivshmem", "user"),
}
LOOPS = {
    "direct_link_rtt_us": "records",
    "direct_link_doorbell_us": "rings",
    "direct_link_polled_rtt_us": "polled",
    "switched_link_rtt_us": "switched",
}


def line(runs: dict[str, Run]) -> dict:
    """Ratios are of medians; the figures of a mesh are those of the largest one."""
    found: dict = {}
    if "links" in runs:
        figures = Figures(runs["links"])
        found["ratios"] = {
            key: ratio(*(figures.median(measure, load=load, kind=kind) for kind in kinds))
            for key, (measure, load, *kinds) in RATIOS.items()
        }
    if "direct" in runs:
        figures = Figures(runs["direct"])
        found |= {key: figures.median("p50_us", loop=loop) for key, loop in LOOPS.items()}
    if "restart" in runs:
        figures = Figures(runs["restart"])
        streams = figures.values("stream")
        found["restart_pause_ms"] = figures.median("pause_ms", 0)
        found["stream_goes_on"] = bool(streams) and min(streams) == 1
    if "mesh" in runs:
        figures = Figures(runs["mesh"])
        largest = max(runs["mesh"].experiment.factors["cells"])
        answered = figures.values("all_reachable", cells=largest)
        found |= {"cells": largest, "all_reachable": bool(answered) and min(answered) == 1}
        for key in ("ready_s", "all_s", "rss_mib", "idle_core_pct"):
            found[key] = figures.median(key, 1, cells=largest)
    return found
