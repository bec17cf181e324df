"""Puts a run's results into a folder of the docs: a page with tables, plots and conditions, and the table and raw data as files.

The names contain no date, so a later run replaces the files and every link stays valid. The page has the time, the place
and the commit of its figures."""

import gzip
import shutil
from pathlib import Path

from common import ROOT, BenchError


def table(header, rows):
    """A table of the docs; the first column is text, the others are figures."""
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def others(conditions):
    """What else the machine did, in a sentence."""
    if "others_cpus" not in conditions:
        return f"The machine's load was {conditions['load'][0]:.1f} when the run began; the run was cut short before it noted what else ran meanwhile."
    load, after = (conditions[key][0] for key in ("load", "load_after"))
    spent = conditions["others_cpus"]
    words = "nothing else ran worth a word" if spent < 0.05 else f"other work took {spent:.2f} of its {conditions['cpus']} CPUs meanwhile, and the figures suffer from it"
    if conditions["stolen_cpus"] >= 0.01:
        words += f"; the hypervisor gave {conditions['stolen_cpus']:.2f} of them to others"
    return f"The machine's load was {load:.1f} when the run began and {after:.1f} when it ended; {words}."


def page(folder, results, title, about, sections):
    """Writes NAME.md with these sections into `folder`, and beside it each plot and table (rpc-FILE) and the raw data (NAME.jsonl.gz)."""
    folder = Path(folder).absolute()
    if not folder.is_dir():
        raise BenchError(f"--publish {folder}: no such folder; expected one such as {(ROOT / 'docs/results').relative_to(ROOT)}")
    name, conditions = results.name, results.conditions
    for file in sorted(results.folder.glob("*.svg")) + sorted(results.folder.glob("*.csv")):
        shutil.copyfile(file, folder / f"rpc-{file.name}")
    # Without a date within, the same data are the same file.
    with results.raw.open("rb") as raw, (folder / f"{name}.jsonl.gz").open("wb") as out, gzip.GzipFile("", "wb", 9, out, mtime=0) as packed:
        shutil.copyfileobj(raw, packed)
    # The folder of a run is private and not published.
    arguments = [Path(word).name if word.startswith("/") else word for word in results.arguments]
    made = (f"Made by `./x bench {results.name} {' '.join(arguments)}` on {conditions['date'][:16].replace('T', ' ')} UTC from commit "
            f"{conditions['commit'][:12]}{' with changes' if conditions['commit'].endswith('+changes') else ''}: {conditions['cpu']}, {conditions['cpus']} CPUs, Linux {conditions['kernel']}. {others(conditions)}")
    files = ", ".join(f"[{file.name}]({file.name})" for file in sorted(folder.glob(f"{name}.*")) if file.suffix in (".csv", ".gz"))
    text = [f"# {title}", about, made.replace("  ", " "), *sections, f"Data: {files}."]
    (folder / f"{name}.md").write_text("\n\n".join(text) + "\n")
