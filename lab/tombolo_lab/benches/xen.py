"""A cell and a Linux guest on Xen, each over Linux's netback and over our backend."""

from __future__ import annotations

import statistics

from tombolo_lab.benches import Figures, Part
from tombolo_lab.results import Run
from tombolo_lab.workloads.xen import BACKENDS, UDP

PARTS = (Part("xen"), Part("xen-flood"))
# Ratio → measure, ours, the other's: pairs of cells of one boot.
CELL_BY_LINUX = [({"guest": "cell", "backend": b}, {"guest": "linux", "backend": b})
                 for b in BACKENDS]  # fmt: skip
OURS_BY_NETBACK = [
    ({"guest": "linux", "backend": "tombolo"}, {"guest": "linux", "backend": "netback"})
]
RATIOS = {
    "http_cell_vs_linux": ("http_mb_s", CELL_BY_LINUX),
    "tcp_cell_vs_linux": ("tcp_mbit_s", CELL_BY_LINUX),
    "ping_cell_vs_linux": ("ping_us", CELL_BY_LINUX),
    "first_reply_cell_vs_linux": ("first_reply_ms", CELL_BY_LINUX),
    "backend_tcp_vs_netback": ("tcp_mbit_s", OURS_BY_NETBACK),
    "hypercalls_per_frame_vs_netback": ("hypercalls_per_frame", OURS_BY_NETBACK),
}


def failed(run: Run) -> list[str]:
    """Rates of datagrams of which no server's report came."""
    found = []
    for point in run.counted():
        cell = point["cell"]
        for rate in UDP:
            if point["measures"].get(f"udp_{rate}m_mbit_s") is None:
                where = f"{cell['guest']} over {cell['backend']}, boot {point['block']}"
                found.append(f"{where}: UDP at {rate} Mbit/s")
    return found


def line(runs: dict[str, Run]) -> dict:
    """Ratios are medians over the boots; each is of two measurements of one boot."""
    found: dict = {}
    if "xen" in runs:
        run = runs["xen"]
        figures, ratios = Figures(run), {}
        for name, (measure, pairs) in RATIOS.items():
            each = [one for ours, base in pairs for one in figures.paired(measure, ours, base)]
            ratios[name] = round(statistics.median(each), 3) if each else None
        # Each boot measures everything once.
        found = {"boots": run.experiment.repeat.times, "rounds": 1, "ratios": ratios}
    if "xen-flood" in runs:
        found["floodping_lost"] = Figures(runs["xen-flood"]).median("flood_lost", 0)
    if "xen" in runs:
        found["failed"] = failed(runs["xen"])
    return found
