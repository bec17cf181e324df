"""Flame graphs of the stacks that points kept.

A box is a function; the boxes above it are the functions that it called. Its width is its share of
the samples. Pictures of one run have one scale where the run has a CPU time per unit of work
(`cpu_ns`): the narrower picture is the one that takes less.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from html import escape
from pathlib import Path

from tombolo_lab import summary
from tombolo_lab.results import Run, cell_key, write_whole

WIDTH, ROW, CHARACTER = 1180, 17, 6.6
# What is narrower is not drawn: it would be unreadable, and the file stays small.
NARROWEST = 1.0
# Okabe and Ito's palette, lightened; colours tell kinds of functions apart, and names say which.
COLOURS = (
    (r"^(bpf|xdp|htab|__htab|lookup_nulls|trie)|_bpf_", "#7fc8ad"),
    (r"^(nf_|nft_|ipt_|__nf|ct_)", "#e69f66"),
    (r"^(ip_|ip6_|fib_|__?ip|inet|neigh|arp|dst_)", "#f2e394"),
    (r"^(tun_|tap_)", "#9ad1f2"),
    (r"", "#dddddd"),
)


class Box:
    """A function within its caller."""

    def __init__(self) -> None:
        self.samples = 0
        self.calls: dict[str, Box] = defaultdict(Box)

    def add(self, names: list[str], count: int) -> None:
        self.samples += count
        if names:
            self.calls[names[0]].add(names[1:], count)

    def depth(self, narrowest: float) -> int:
        parts = [box.depth(narrowest) for box in self.calls.values() if box.samples >= narrowest]
        return 1 + max(parts, default=0)


def boxes(box: Box, name: str, x: float, level: int, scale: float, total: int) -> Iterator[str]:
    """SVG of a function and of those above it."""
    width = box.samples * scale
    colour = next(colour for pattern, colour in COLOURS if re.search(pattern, name))
    letters = int((width - 4) / CHARACTER)
    text = name if len(name) <= letters else name[: letters - 1] + "…" if letters > 3 else ""
    label = f'<text x="{x + 3:.1f}" y="{level + 12}">{escape(text)}</text>' if text else ""
    yield (
        f"<g><title>{escape(name)}: {100 * box.samples / total:.1f} %</title>"
        f'<rect x="{x:.1f}" y="{level}" width="{max(width - 0.4, 0.3):.1f}" '
        f'height="{ROW - 1}" fill="{colour}"/>{label}</g>'
    )
    for inner, call in sorted(box.calls.items(), key=lambda item: -item[1].samples):
        if call.samples * scale >= NARROWEST:
            yield from boxes(call, inner, x, level - ROW, scale, total)
            x += call.samples * scale


def picture(stacks: Counter[str], title: str, width: float) -> str:
    """An SVG of `width` pixels at most WIDTH."""
    root = Box()
    for stack, count in stacks.items():
        root.add([name for name in stack.split(";") if name], count)
    scale = width / root.samples
    height = (root.depth(NARROWEST / scale) + 3) * ROW
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 20} {height}" '
            'font-family="monospace" font-size="11">'
            '<rect width="100%" height="100%" fill="#ffffff"/>'
            f'<text x="10" y="15" font-size="13">{escape(title)}</text>',
            *boxes(root, "write", 10, height - 2 * ROW, scale, root.samples),
            "</svg>\n",
        ]
    )


def stacks_by_cell(run: Run) -> dict[str, tuple[dict, Counter[str], list[float]]]:
    """Cell key → the cell, its stacks over all points that count, and its CPU times per unit."""
    found: dict[str, tuple[dict, Counter[str], list[float]]] = {}
    for point in run.counted():
        stacks = point.get("notes", {}).get("stacks")
        if not stacks:
            continue
        _, counts, costs = found.setdefault(cell_key(point["cell"]), (point["cell"], Counter(), []))
        counts.update(stacks)
        if cost := point["measures"].get("cpu_ns"):
            costs.append(cost)
    return found


def draw(run: Run, folder: Path) -> list[Path]:
    """Writes plots/NAME.flame.svg for each cell whose points have stacks."""
    found = list(stacks_by_cell(run).values())
    costs = [statistics.median(values) for _, _, values in found if values]
    most = max(costs, default=None)
    changing = [name for name, levels in run.experiment.factors.items() if len(levels) > 1]
    paths = []
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    for cell, stacks, values in found:
        cost = statistics.median(values) if values and most else None
        shown = {name: level for name, level in cell.items() if name in changing} or cell
        title = summary.cell_name(shown) + (
            f": {cost:.0f} ns of CPU time per frame" if cost else ""
        )
        name = re.sub(r"[^A-Za-z0-9]+", "-", "-".join(map(str, shown.values()))).strip("-")
        path = folder / "plots" / f"{name}.flame.svg"
        write_whole(path, picture(stacks, title, WIDTH * cost / most if cost else WIDTH))
        paths.append(path)
    return paths
