"""Many cells on one network over shared memory, each of which pings all others: what `./x mesh` shows and `./x bench ivshmem` measures."""

import time

from .process import core_share, rss_bytes, until

QUIET_S = 10
# What the traffic set going, and what the cells' stacks say of themselves in their first 12
# seconds, runs out before the quiet is measured; nothing tells of its end.
SETTLING_S = 15


class Mesh:
    """`count` cells with the app `mesh`, each on an ivshmem link of its own; `Fabric(folder, mesh.text)` starts them.

    Times are in seconds since the daemon was started. `progress(what, done)` is told how many cells have got there, where one is given.
    """

    def __init__(self, name, count, accel=None, progress=None):
        self.name, self.count, self.progress = name, count, progress
        more = f'\naccel = "{accel}"' if accel else ""
        cells = "".join(f"""
[cell.{self.cell(number)}]
app = "mesh"
attach = "ivshmem"
memory = "16M"
ip = "{self.address(number)}"
args = "peers={self.address(0)}-{self.address(count - 1)}"{more}
""" for number in range(count))
        self.text = f"""name = "{name}"

[network.lan]
subnet = "10.79.0.0/16"
{cells}"""

    @staticmethod
    def cell(number):
        return f"c{number}"

    @staticmethod
    def address(number):
        return f"10.79.1.{10 + number}"

    def _all_say(self, what, fabric, words, seconds):
        waiting = set(range(self.count))

        def all_have():
            waiting.difference_update([number for number in waiting if words(number) in fabric.console(self.cell(number))])
            if self.progress:
                self.progress(what, self.count - len(waiting))
            return not waiting

        until(what, all_have, seconds, every=0.2)
        return time.monotonic() - fabric.process.started

    def wait_addresses(self, fabric, seconds):
        """When every cell has its address."""
        return self._all_say("cells have their addresses", fabric, self.address, seconds)

    def wait_answers(self, fabric, seconds):
        """When every cell has been answered by every other."""
        return self._all_say("cells have been answered by all others", fabric, lambda _: "@mesh all", seconds)

    @staticmethod
    def quiet_share(fabric):
        """The share of one core that daemon and cells take together when there is nothing to do."""
        used = fabric.cpu_meter()
        time.sleep(SETTLING_S)
        return core_share(used, QUIET_S)

    @staticmethod
    def rss_bytes(fabric):
        """Resident memory of a cell's QEMU, the mean of all."""
        pids = fabric.machine_pids()
        return sum(map(rss_bytes, pids)) / len(pids)
