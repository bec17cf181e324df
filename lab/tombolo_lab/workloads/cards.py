"""The poll budget and other knobs of a Linux guest's kernel, by the model of its NIC.

The way is tap -> QEMU's device -> the guest's driver -> a sink in the guest; the sender is that of
paced.c, in the tap's namespace. No switch of ours is on the way. `nics` says what each knob bounds.

Affinity. apart: the sink runs on another vCPU than the one that takes the NIC's interrupts and
polls. together: on the same.

Beside each load one echo request every 2 ms gives round trips; those without a reply have none.
Counts must add up, or the point fails: what the sink got and what its socket lost are no more than
what was sent, and the sink got no more than came to the NIC.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping

from tombolo_lab import LabError, harness, machine
from tombolo_lab.workloads import (
    SAMPLES_OF,
    Measure,
    Parameter,
    Workload,
    network,
    nics,
    paced,
    tools,
)

SIZES = {"udp": 1470, "tcp": 16384}
PING_S = 0.002
# Packets that are none of the load: ARP, and the datagrams that ask for the sink's report.
OTHER_PACKETS = 64
# Values of a histogram that are kept as samples; they are thinned in proportion.
MOST_SAMPLES = 500
# Reading the guest's counters twice, by its console.
COUNTERS_S = 1.2
BOOT_S = 10.0


def thinned(values: Mapping[int, int], most: int = MOST_SAMPLES) -> list[float]:
    """A histogram (value -> count) as at most `most` values, each as often as its part of the
    whole; evenly spaced ranks, so the least and the greatest stay where they are common."""
    total = sum(values.values())
    count = min(total, most)
    ranks = [(2 * index + 1) * total // (2 * count) for index in range(count)]
    found: list[float] = []
    end = 0
    for value in sorted(values):
        end += values[value]
        while len(found) < count and ranks[len(found)] < end:
            found.append(float(value))
    return found


def polls_of(seen: nics.NicCounters, knobs: nics.Knobs, model: str) -> tuple[Counter, int]:
    """Polls that took packets (packets -> polls), and what a full one takes."""
    is_virtio = model == "virtio-net"
    return polls_taken(seen, knobs, knobs.napi_weight if is_virtio else nics.MODELS[model].weight)


def polls_taken(seen: nics.NicCounters, knobs: nics.Knobs, weight: int) -> tuple[Counter, int]:
    """As `polls_of`, by the weight of the driver's poll."""
    # With RPS the packets are polled once more, from the CPU's backlog.
    polls = Counter(seen.polls.get(nics.BACKLOG if knobs.rps else "eth0", Counter()))
    del polls[0]
    if knobs.rps:
        return polls, knobs.dev_weight
    return polls, weight


def losses(done: Mapping, seen: nics.NicCounters) -> dict:
    """Where a load of datagrams was lost, as parts of what was sent; LabError when the sender's
    counts and the guest's contradict each other."""
    sent, received = done["sent"], done["received"]
    if received > seen.packets:
        raise LabError(f"{received} datagrams arrived of {seen.packets} packets at the NIC")
    if received + seen.udp_overflows > sent + OTHER_PACKETS:
        raise LabError(
            f"{received} datagrams and {seen.udp_overflows} that the socket lost are more than "
            f"the {sent} that were sent"
        )
    lost = sent - received
    at_socket = min(seen.udp_overflows, lost)
    return {"loss_socket": at_socket / sent, "loss_port": (lost - at_socket) / sent}


def guest_row(
    seen: nics.NicCounters, seconds: float, vcpus: int, polls: Counter, weight: int
) -> dict:
    """Measures of the guest's counters over a load of so many seconds; a full poll takes `weight`
    packets."""
    count = sum(polls.values())
    return {
        "port_frames_s": seen.packets / seconds,
        "packets_per_poll": nics.packets_of(polls) / count if count else None,
        "full_polls": sum(polls[size] for size in polls if size >= weight) / count if count else 0,
        "interrupts_s": seen.interrupts / seconds,
        "squeezed_s": seen.squeezed / seconds,
        "inside_cpus": seen.busy_cpus(vcpus),
        "inside_softirq_cpus": seen.softirq_cpus(vcpus),
    }


def host_row(seen: nics.NicCounters, usage: machine.Usage) -> dict:
    """Measures of the host's counters over one load."""
    guest = usage.processes["guest"].cpus
    return {
        "host_interrupts_s": usage.interrupts_s,
        "guest_cpus": guest,
        "softirq_cpus": usage.softirq_cpus,
        "cpu_us_per_frame": guest * usage.seconds * 1e6 / seen.packets if seen.packets else None,
    }


class Guests(contextlib.ExitStack):
    """The guests of a model, one for each shape of its device, booted when it is first wanted. The
    others sleep meanwhile."""

    def __init__(self, model: str):
        super().__init__()
        self.model = model
        self._nics: dict[nics.Shape, nics.Nic] = {}

    def of(self, shape: nics.Shape) -> nics.Nic:
        if shape not in self._nics:
            space = self.enter_context(harness.Namespace())
            self._nics[shape] = self.enter_context(nics.open_nic(self.model, shape, space))
        return self._nics[shape]


class Nics(Workload):
    """Points of a model share its guests: their kernels take the knobs while they run."""

    name = "nics"
    doc = (
        "Sends to a Linux guest with a NIC of a given model, and varies the knobs of its kernel: "
        "poll budgets, deferred interrupts, threaded NAPI, busy polling."
    )
    needs = ("root", "QEMU", "the Linux guest with NICs (./x guest-nics)")
    parameters = {
        "model": Parameter(
            "Model of the NIC", str, tuple(nics.MODELS), default="virtio-net", setup=True
        ),
        "knobs": Parameter(
            "Settings of the guest's kernel and (queues, device_ring, offloads) of virtio-net's "
            "device: default, or NAME=VALUE, several by a space; names: "
            + ", ".join(nics.RANGES),
            str, default="default",
        ),
        "protocol": Parameter("Protocol", str, ("udp", "tcp"), default="udp"),
        "offered": Parameter(
            "Offered rate: 20M (bits a second of payload) or 400pps; empty: as fast as it goes",
            str, default="",
        ),
        "size": Parameter(
            "Bytes of a datagram or write; 0: 1,470 or 16,384", int, low=0, high=paced.MOST_BYTES,
            default=0, unit="B",
        ),
        "affinity": Parameter(
            "The sink beside the polls: on another vCPU or on theirs", str, ("apart", "together"),
            default="apart",
        ),
        "buffer_kib": Parameter(
            "Receive buffer of the sink's socket (SO_RCVBUF); 0: the kernel's default", int, low=0,
            high=64 << 10, default=0, unit="KiB",
        ),
        "seconds": Parameter("Duration of the load", float, low=0.1, high=60, default=1, unit="s"),
        "search": Parameter("Whether the loss-free maximum is searched for", bool, default=False),
        "search_top": Parameter(
            "Upper end of that search", float, low=1, high=100_000, default=200, unit="Mbit/s"
        ),
        "search_steps": Parameter("Halvings of that search", int, low=1, high=20, default=6),
        "search_seconds": Parameter(
            "Duration of each trial", float, low=0.1, high=60, default=0.3, unit="s"
        ),
    }  # fmt: skip
    measures = {
        "mbit_s": Measure("Payload that arrived", "Mbit/s", "higher"),
        "port_frames_s": Measure("Packets at the NIC", "1/s", "higher"),
        "sent_s": Measure("Datagrams sent", "1/s", ""),
        "arrived_s": Measure("Datagrams that arrived", "1/s", "higher"),
        "unsent": network.MEASURES["unsent"],
        "late_us": network.MEASURES["late_us"],
        "retransmitted": network.MEASURES["retransmitted"],
        "loss": network.MEASURES["loss"],
        "loss_port": Measure("… of these, lost before the socket", "", "lower", 0, 1),
        "loss_socket": Measure("… of these, lost by a full receive buffer", "", "lower", 0, 1),
        "loss_free_mbit_s": network.LOSS_FREE,
        "packets_per_poll": Measure("Packets of a poll that took any", "", ""),
        "full_polls": Measure("Polls that used up their weight", "", "", 0, 1),
        "squeezed_s": Measure("Runs of the guest's softirq that left work", "1/s", "lower"),
        "interrupts_s": Measure("Interrupts of the NIC in the guest", "1/s", "lower"),
        "host_interrupts_s": Measure("Interrupts of the host", "1/s", "lower"),
        "guest_cpus": Measure("CPUs of QEMU, as the host sees them", "CPUs", "lower"),
        "inside_cpus": Measure("CPUs of the guest, as it sees them", "CPUs", "lower"),
        "inside_softirq_cpus": Measure("… of these, in softirqs", "CPUs", "lower"),
        "softirq_cpus": Measure("CPUs of the host's softirqs", "CPUs", "lower"),
        "cpu_us_per_frame": Measure("CPU time of QEMU per packet", "µs", "lower"),
        "rtt_us": Measure("Round trip of a ping during the load, median", "µs", "lower"),
        "rtt_p99_us": network.MEASURES["rtt_p99_us"],
        "rtt_p999_us": network.MEASURES["rtt_p999_us"],
        "rtt_p9999_us": network.MEASURES["rtt_p9999_us"],
    }

    @staticmethod
    def size_of(cell: dict) -> int:
        return cell["size"] or SIZES[cell["protocol"]]

    def check(self, cell: dict) -> None:
        model = cell["model"]
        nics.settings(cell["knobs"], model)
        paced.check(cell["protocol"], self.size_of(cell), cell["offered"], cell["seconds"])
        nics.need(model)
        harness.need_program("ping", "iputils-ping")

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[Guests]:
        with Guests(cell["model"]) as guests:
            guests.of(nics.settings(cell["knobs"], cell["model"])[0])
            yield guests

    def setup_seconds(self, cell: dict) -> float:
        return BOOT_S

    def seconds(self, cell: dict) -> float:
        trials = (1 + cell["search_steps"]) * cell["search"]
        # Asked for cells that are skipped, too.
        is_other = nics.parse(cell["knobs"])[0] != nics.Shape()
        return (
            is_other * BOOT_S
            + cell["seconds"]
            + COUNTERS_S
            + trials * (cell["search_seconds"] + 0.1)
        )

    def measure(self, guests: Guests, cell: dict) -> dict:
        shape, knobs = nics.settings(cell["knobs"], cell["model"])
        nic = guests.of(shape)
        nic.apply(knobs)
        vcpu = 1 - nics.IRQ_VCPU if cell["affinity"] == "apart" else nics.IRQ_VCPU
        port = nic.serve(cell["protocol"], cell["buffer_kib"], vcpu)
        row = self.loaded(nic, cell, knobs, port)
        row["loss_free_mbit_s"] = self.loss_free(nic, cell, vcpu) if cell["search"] else None
        return row

    def loaded(self, nic: nics.Nic, cell: dict, knobs: nics.Knobs, port: int) -> dict:
        """One load, and everything that is counted meanwhile."""
        protocol, size, seconds = cell["protocol"], self.size_of(cell), cell["seconds"]
        rate = paced.rate_of(cell["offered"], size)
        before = nic.counters()
        with (
            tools.pinging(nic.space, nics.GUEST, PING_S) as times,
            machine.Meter({"guest": nic.pid}) as meter,
        ):
            done = paced.send(nic.space, nics.GUEST, protocol, size, rate, seconds, port)
        seen = nic.counters() - before
        polls, weight = polls_of(seen, knobs, nic.model)
        found: dict = dict.fromkeys(self.measures)
        for name, value in network.row_of(done, protocol, seconds).items():
            if name in self.measures:
                found[name] = value
        took = max(done["sent_seconds"], seconds)
        found |= guest_row(seen, took, nics.VCPUS, polls, weight)
        found |= host_row(seen, meter.usage)
        samples: dict[str, list[float]] = {"packets_per_poll": thinned(polls)} if polls else {}
        if times:
            found |= network.trips(tools.percentiles_us(times))
            samples["rtt_us"] = times
        if protocol == "udp":
            found |= losses(done, seen)
        notes = {SAMPLES_OF: {"packets_per_poll": sum(polls.values())}} if polls else {}
        return found | {"samples": samples, "notes": notes}

    def loss_free(self, nic: nics.Nic, cell: dict, vcpu: int) -> float:
        """The highest offered rate of datagrams without loss, in Mbit/s."""
        size = cell["size"] or SIZES["udp"]
        port = nic.serve("udp", cell["buffer_kib"], vcpu)

        def loss(mbit_s: float) -> float:
            rate, seconds = mbit_s * 1e6 / 8 / size, cell["search_seconds"]
            done = paced.send(nic.space, nics.GUEST, "udp", size, rate, seconds, port)
            # What was not even sent is no loss of the guest, but no rate that was had either.
            return 1 - done["received"] / max(done["due"], done["sent"])

        return network.search(loss, cell["search_top"], cell["search_steps"])
