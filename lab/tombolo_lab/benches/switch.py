"""One switch core between two vhost-user ports, beside testpmd and Open vSwitch."""

from __future__ import annotations

from tombolo_lab.benches import Figures, Part, ratio
from tombolo_lab.results import Run

PARTS = (Part("switch"),)


def line(runs: dict[str, Run]) -> dict:
    """Ratios are Tombolo's rate by the peer's, of medians; `disturbed` counts points that were
    disturbed in each attempt."""
    run = runs["switch"]
    figures, factors = Figures(run), run.experiment.factors
    rates, cycles, ratios = {}, {}, {}
    for size in factors["size"]:
        for name in factors["forwarder"]:
            match = {"forwarder": name, "size": size}
            rates[f"{name}_{size}"] = figures.median("mpps", 3, **match)
            work = figures.median("cycles_work", 1, **match)
            # Ours has no cycle counter in the data path, so all that its core spent stands for it.
            cycles[f"{name}_{size}"] = work or figures.median("cycles_all", 1, **match)
        if "tombolo" in factors["forwarder"]:
            ours = rates[f"tombolo_{size}"]
            for name in factors["forwarder"]:
                if name != "tombolo":
                    ratios[f"{name}_{size}"] = ratio(ours, rates[f"{name}_{size}"])
    return {
        "ratios": ratios,
        "idle_core_pct": figures.median("idle_core_pct", 3),
        "mpps": rates,
        "cycles_per_frame": cycles,
        "disturbed": run.counts()["disturbed"],
    }
