#!/usr/bin/env python3
"""Flame graphs of a frame's path from tap to tap: before (the kernel's conntrack and masquerade) and after (the bypass over the same).

usage: ./x bench bypass-flames [--seconds S] [--load LOAD] [--folder FOLDER]

Uses the same two taps and the same load as `./x bench bypass --cells 'tap-tap udp64_1$'`. perf(1) samples the writer's
calls, in which all of the forwarding happens. A box is a function; the boxes above it are the functions that it called. Its
width is its share of the writer's samples. Both pictures have one scale, nanoseconds of CPU time per frame, so the second
one is narrower by the time that is saved. If the machine has no hardware counters, samples come from a timer. Code that
runs with interrupts off is then charged to the place where they are enabled again. Needs root.
"""

import argparse
import collections
import contextlib
import re
import shutil
import subprocess
import tempfile
from html import escape
from pathlib import Path

from bypass import Setting, prepare
from common import ROOT, BenchError, note, perf, run_bench

WIDTH, ROW, CHARACTER = 1180, 17, 6.6
# What is narrower is not drawn: it would be unreadable, and the file stays small.
NARROWEST = 1.0
COLOURS = ((r"^(bpf|xdp|htab|__htab|lookup_nulls|trie)|_bpf_", "#7fb77e"), (r"^(nf_|nft_|ipt_|__nf|ct_)", "#e07a5f"),
           (r"^(ip_|ip6_|fib_|__?ip|inet|neigh|arp|dst_)", "#f2b36b"), (r"^(tun_|tap_)", "#8fb8de"), (r"", "#e8dfd0"))
TITLES = {"nat": "Before: forwarding with conntrack and masquerade", "bypass_nat": "After: the bypass over the same rules"}


def stacks(text):
    """perf script's samples as lists of functions, outermost first, of the system calls that write."""
    for block in text.split("\n\n"):
        lines = block.strip().splitlines()[1:]
        names = [re.sub(r"\+0x[0-9a-f]+$", "", line.split(None, 1)[1].rsplit(" (", 1)[0]) for line in reversed(lines) if " " in line.strip()]
        names = [re.sub(r"^bpf_prog_[0-9a-f]{16}_", "bpf: ", name) for name in names]
        for start in ("__x64_sys_write", "ksys_write"):
            if start in names:
                yield ["write"] + [n for n in names[names.index(start) + 1:] if n != "ksys_write"]
                break


class Box:
    """A function within its caller."""

    def __init__(self):
        self.samples, self.calls = 0, collections.defaultdict(Box)

    def add(self, names):
        self.samples += 1
        if names:
            self.calls[names[0]].add(names[1:])

    def depth(self, narrowest):
        return 1 + max((b.depth(narrowest) for b in self.calls.values() if b.samples >= narrowest), default=0)


def boxes(box, name, x, level, scale, total):
    """SVG of a function and of those above it."""
    width = box.samples * scale
    colour = next(colour for pattern, colour in COLOURS if re.search(pattern, name))
    letters = int((width - 4) / CHARACTER)
    text = name if len(name) <= letters else name[:letters - 1] + "…" if letters > 3 else ""
    yield (f'<g><title>{escape(name)}: {100 * box.samples / total:.1f} %</title><rect x="{x:.1f}" y="{level}" width="{max(width - 0.4, 0.3):.1f}" '
           f'height="{ROW - 1}" fill="{colour}"/>' + (f'<text x="{x + 3:.1f}" y="{level + 12}">{escape(text)}</text>' if text else "") + "</g>")
    for inner, call in sorted(box.calls.items(), key=lambda item: -item[1].samples):
        if call.samples * scale >= NARROWEST:
            yield from boxes(call, inner, x, level - ROW, scale, total)
            x += call.samples * scale


def picture(root, title, ns_per_frame, ns_per_pixel):
    scale = ns_per_frame / ns_per_pixel / root.samples
    height = (root.depth(NARROWEST / scale) + 3) * ROW
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 20} {height}" font-family="monospace" font-size="11">'
            f'<rect width="100%" height="100%" fill="#ffffff"/><text x="10" y="15" font-size="13">{escape(title)}: {ns_per_frame:.0f} ns per frame</text>')
    return "\n".join([head, *boxes(root, "write", 10, height - 2 * ROW, scale, root.samples), "</svg>\n"])


def sample(setting, load, seconds, file):
    """The writer's stacks as a tree, and the CPU time of a frame."""
    setting.settle(load)
    # Of the writer's CPU: of a process perf samples only the threads that are there already.
    with perf("record", "-q", "-F", "4999", "-g", "-C", "0", "-o", file):
        row = setting.ask(load, 0, seconds)
    text = subprocess.run(["perf", "script", "-i", file, "--comms", "pathload", "-F", "comm,ip,sym,dso"], capture_output=True, text=True, check=True).stdout
    root = Box()
    for names in stacks(text):
        root.add(names[1:])
    if root.samples < 200:
        raise BenchError(f"perf saw {root.samples} samples of writes only: is kernel.kptr_restrict or perf_event_paranoid in the way?")
    return root, row["sent_cpu_s"] * 1e9 / row["sent"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--load", default="udp64_1")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs/flames")
    options = parser.parse_args()
    if not shutil.which("perf"):
        raise BenchError("it needs perf (Debian: apt install linux-perf)")
    seen = {}
    with tempfile.TemporaryDirectory(prefix="tmb-bench-", ignore_cleanup_errors=True) as folder:
        folder = Path(folder)
        prepare(folder)
        for path in TITLES:
            with contextlib.closing(Setting(folder, "tap-tap", path)) as setting:
                seen[path] = sample(setting, options.load, options.seconds, folder / f"{path}.data")
    options.folder.mkdir(parents=True, exist_ok=True)
    ns_per_pixel = max(ns for _, ns in seen.values()) / WIDTH
    for (path, (root, ns)), name in zip(seen.items(), ("before.svg", "after.svg")):
        (options.folder / name).write_text(picture(root, TITLES[path], ns, ns_per_pixel))
        note(f"{options.folder / name}: {root.samples} samples, {ns:.0f} ns per frame")


if __name__ == "__main__":
    run_bench(main)
