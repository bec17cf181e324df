"""A workload that measures nothing, for tests of files, designs and the command line."""

from tombolo_lab.workloads import Measure, Parameter, Skip, Workload

# What a test puts into the registry: {"fake": TARGET}.
TARGET = f"{__name__}:Fake"


class Fake(Workload):
    name = "fake"
    doc = "Sends imagined frames. They reach nothing."
    needs = ("imagination",)
    parameters = {
        "attachment": Parameter(
            "How the endpoints are attached",
            str,
            choices=("ivshmem", "vhost-user", "user"),
            default="ivshmem",
            setup=True,
        ),
        "protocol": Parameter("Transport protocol", str, choices=("tcp", "udp"), default="tcp"),
        "offered": Parameter("Offered rate", int, low=1, high=10000, default=100, unit="Mbit/s"),
        "load": Parameter("CPU load beside it", float, low=0, high=1, default=0.0),
        "offload": Parameter("Checksum offload", bool, default=True),
        "comment": Parameter("Any text", str),
        "seconds": Parameter("Duration of a point", float, low=0.1, default=5.0, unit="s"),
    }
    measures = {
        "mbit_s": Measure("Bandwidth at the sink", "Mbit/s", "higher"),
        "loss": Measure("Lost packets", "", "lower", high=1),
        "packets": Measure("Packets at the sink", "1/s", "higher"),
    }

    def check(self, cell):
        if cell["attachment"] == "user":
            raise Skip("qemu-system-x86_64 is missing")
        if cell["offered"] > 5000:
            raise Skip("root is needed")

    def setup_seconds(self, cell):
        return 0.0

    def seconds(self, cell):
        return cell["seconds"] + 1
