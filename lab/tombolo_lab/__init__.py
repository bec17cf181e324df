"""The lab: experiments that anyone can repeat.

An experiment is a file with factors and their levels, a workload, measures, repetitions and stop
rules. `tombolo lab run NAME` measures it on this machine and leaves a folder: the conditions, every
raw point, a summary and a report. `tombolo lab compare A B` puts two such folders side by side.

Where things are:

- `model`, `design`: experiment files, designs and orders. `cli`: the commands.
- `runner`: blocks, set-ups, disturbance, stop rules, interruption and resumption.
- `results`: the folder of a run. `machine`: conditions, CPU meter, hardware counters.
- `workloads`: what is measured. `harness`: guests, fabrics and namespaces for workloads.
- `statistics`, `effects`: intervals, ratios, tests, effects. `report`: pages and plots.

Rules that hold everywhere:

- A run leaves nothing behind, however it ends: no process, namespace, mount, file or setting.
- Traffic stays on this machine, and every load ends by itself.
- A failed point is an error, never a zero. A disturbed point is marked and repeated.
- Only `statistics`, `effects` and `report` import pandas, SciPy, statsmodels, Matplotlib or Jinja2.
  Listing, showing and measuring work without them.
"""

__version__ = "0.1.0"


class LabError(Exception):
    """What a user can mend. The text says what was expected, what was found and what to do."""
