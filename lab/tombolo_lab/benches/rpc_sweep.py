"""Round trips by payload: 1 B to 1 MiB by copy, 1 B to 1 GiB in shared memory."""

from __future__ import annotations

from tombolo_lab.benches import Figures, Part, files
from tombolo_lab.results import Run
from tombolo_lab.workloads.rpc import SWEEP_BYTES

PARTS = (
    Part(
        "rpc",
        ("method=copy,shared", f"bytes={','.join(map(str, SWEEP_BYTES))}", "calls=1000"),
    ),
)
FIGURES = {
    "copy_1b_us": ("copy", 1),
    "copy_64k_us": ("copy", 1 << 16),
    "copy_1mib_us": ("copy", 1 << 20),
    "shared_1b_us": ("shared", 1),
    "shared_1gib_us": ("shared", 1 << 30),
}


def line(runs: dict[str, Run]) -> dict:
    """Medians over the repetitions of the median round trip."""
    run = runs["rpc"]
    figures = Figures(run)
    return {
        **{
            key: figures.median("p50_us", method=method, bytes=size)
            for key, (method, size) in FIGURES.items()
        },
        **files([run]),
    }
