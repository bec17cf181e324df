"""A cell beside the stock Linux guest: the same VMM, the same kind of port, the same client."""

from __future__ import annotations

from tombolo_lab.benches import Figures, Part, ratio
from tombolo_lab.results import Run

PARTS = (Part("cell"),)
# Key of a ratio → its measure.
RATIOS = {
    "http_vs_linux": "bytes_mb_s",
    "http_requests_vs_linux": "requests_s",
    "ping_vs_linux": "ping_us",
    "first_reply_vs_linux": "first_reply_ms",
}


def line(runs: dict[str, Run]) -> dict:
    """Ratios are the cell's median divided by the Linux guest's: of rates (http) more is better, of
    times less."""
    run = runs["cell"]
    figures, experiment = Figures(run), run.experiment
    guests = {
        name: {key: figures.median(key, 2, guest=name) for key in experiment.measures}
        for name in experiment.factors["guest"]
    }
    found: dict = {name: experiment.fixed[name] for name in ("accel", "port")}
    if {"cell", "linux"} <= guests.keys():
        first = {name: figures.median("first_reply_ms", 1, guest=name) for name in guests}
        found["first_reply_ms"] = first["cell"]
        found["linux_first_reply_ms"] = first["linux"]
        found["ratios"] = {
            key: ratio(*(figures.median(measure, guest=name) for name in ("cell", "linux")))
            for key, measure in RATIOS.items()
        }
    # In the documented order.
    return found | {name: guests[name] for name in ("cell", "linux") if name in guests}
