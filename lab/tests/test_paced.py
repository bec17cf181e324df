"""The paced generator and its sink against peers that lose, double and reorder what they are sent.

paced.c is compiled here; all traffic is on loopback.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tombolo_lab import LabError
from tombolo_lab.workloads import Skip, network, paced, tools

FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror", "-static")


def number_of(datagram):
    low, high = (int.from_bytes(datagram[at : at + 4], "big") for at in (0, 12))
    number = high << 32 | low
    return number - (1 << 64) if number >> 63 else number


class Relay(threading.Thread):
    """Hands datagrams on to a port (None: back to the sender), as `plan` says: number → how many
    copies. `swapped` is a number that waits for the next one, `kept_s` how long it last did."""

    def __init__(self, onward, plan, swapped=None):
        super().__init__(daemon=True)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.settimeout(20)
        self.port = self.socket.getsockname()[1]
        self.onward, self.plan, self.swapped = onward, plan, swapped
        self.kept_s = None
        self.start()

    def run(self):
        sender = kept = None
        while True:
            try:
                data, source = self.socket.recvfrom(65536)
            except OSError:
                return
            if self.onward is not None and source[1] == self.onward:
                self.socket.sendto(data, sender)
                continue
            sender = source
            to = ("127.0.0.1", self.onward) if self.onward else sender
            number = number_of(data)
            if number == self.swapped:
                kept, since = data, time.monotonic()
                continue
            for _ in range(self.plan.get(number, 1)):
                self.socket.sendto(data, to)
            if kept:
                self.kept_s = time.monotonic() - since
                self.socket.sendto(kept, to)
                kept = None

    def close(self):
        # A thread that waits in a system call is not woken by close.
        self.socket.settimeout(0.01)
        self.socket.close()


class Program(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not shutil.which("gcc"):
            raise unittest.SkipTest("gcc is missing: apt-get install gcc libc6-dev")
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.paced = Path(cls.folder.name) / "paced"
        subprocess.run(["gcc", *FLAGS, "-o", cls.paced, paced.SOURCE, "-lm"], check=True)

    def sink(self, protocol, *more):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = subprocess.Popen(
            [self.paced, "sink", protocol, str(port), *more], stdout=subprocess.PIPE, text=True
        )
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        table = Path(f"/proc/net/{protocol}")
        deadline = time.monotonic() + 20
        while f":{port:04X} " not in table.read_text():
            self.assertLess(time.monotonic(), deadline, "the sink does not listen")
            time.sleep(0.01)
        return process, port

    def run_paced(self, mode, protocol, port, size, rate, seconds, sink=None):
        """What it prints once it has kept its rate, which a busy machine may prevent for a while;
        with the process of a UDP sink, what that prints too."""
        for _ in range(20):
            row = self.run_once(mode, protocol, port, size, rate, seconds)
            seen = json.loads(sink.stdout.readline()) if sink else None
            if row["sent"] == row["due"]:
                return (row, seen) if sink else row
        self.fail(f"{row['sent']} of {row['due']} were sent, in 20 attempts")

    def run_once(self, mode, protocol, port, size, rate, seconds):
        words = [mode, protocol, "127.0.0.1", port, size, rate, seconds]
        done = subprocess.run(
            [self.paced, *map(str, words)], capture_output=True, text=True, timeout=60
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_datagrams_at_a_rate_arrive_and_are_counted_at_both_ends(self):
        sink, port = self.sink("udp", "0", "latency")
        row, seen = self.run_paced("send", "udp", port, 1024, 500, 0.4, sink)
        self.assertEqual((row["due"], row["sent"], row["received"]), (200, 200, 200))
        self.assertEqual((row["bytes"], row["out_of_order"]), (200 * 1024, 0))
        # 199 intervals of 2 ms, or a little more on a machine that is busy.
        self.assertGreater(row["sent_seconds"], 0.395)
        self.assertEqual((seen["sent"], seen["received"], seen["duplicates"]), (200, 200, 0))
        times = seen["latency_us"]
        self.assertEqual(times["count"], 200)
        order = [times[key] for key in ("min", "p50", "p90", "p99", "p999", "p9999", "max")]
        self.assertEqual(order, sorted(order))
        self.assertGreater(times["min"], 0)
        self.assertEqual(times["p9999"], times["max"])

    def test_loss_doubles_and_order_are_counted_by_number(self):
        sink, port = self.sink("udp")
        relay = Relay(port, {3: 0, 4: 0, 10: 2}, swapped=20)
        self.addCleanup(relay.close)
        row, seen = self.run_paced("send", "udp", relay.port, 64, 400, 0.25, sink)
        self.assertEqual((row["sent"], row["received"]), (100, 98))
        self.assertEqual((row["bytes"], row["out_of_order"]), (98 * 64, 1))
        self.assertEqual((seen["sent"], seen["received"]), (100, 98))
        self.assertEqual((seen["duplicates"], seen["out_of_order"]), (1, 1))
        self.assertNotIn("latency_us", seen)

    def test_a_lost_request_for_the_report_is_repeated(self):
        _, port = self.sink("udp")
        # The end of 10 datagrams has the number -11; the first is lost here.
        relay = Relay(port, {-11: 0})
        self.addCleanup(relay.close)
        threading.Timer(0.4, relay.plan.clear).start()
        row = self.run_paced("send", "udp", relay.port, 64, 200, 0.05)
        self.assertEqual((row["sent"], row["received"]), (10, 10))

    def test_a_sink_begins_again_for_the_next_sender(self):
        sink, port = self.sink("udp")
        for count in (20, 10):
            row, seen = self.run_paced("send", "udp", port, 64, count * 10, 0.1, sink)
            self.assertEqual((row["sent"], row["received"]), (count, count))
            self.assertEqual(seen["received"], count)

    def test_an_echo_gives_each_datagram_its_round_trip(self):
        relay = Relay(None, {5: 0, 6: 2}, swapped=8)
        self.addCleanup(relay.close)
        # Number 8 waits for number 9: an interval of 5 ms, or less if the sender was late with it.
        for _ in range(20):
            row = self.run_paced("trip", "udp", relay.port, 100, 200, 0.25)
            if relay.kept_s > 0.004:
                break
        self.assertEqual((row["sent"], row["received"]), (50, 49))
        self.assertEqual((row["duplicates"], row["out_of_order"]), (1, 1))
        self.assertEqual((row["rtt_us"]["count"], len(row["rtt_us_values"])), (49, 49))
        self.assertEqual(row["rtt_us_values"], sorted(row["rtt_us_values"]))
        self.assertGreater(row["rtt_us"]["max"], 4000)
        self.assertGreaterEqual(row["rtt_us"]["max"], int(relay.kept_s * 1e6))

    def test_nothing_that_comes_back_has_no_percentiles(self):
        relay = Relay(None, dict.fromkeys(range(1, 5), 0))
        self.addCleanup(relay.close)
        row = self.run_paced("trip", "udp", relay.port, 100, 40, 0.1)
        self.assertEqual((row["sent"], row["received"], row["rtt_us"]), (4, 0, None))
        with self.assertRaisesRegex(tools.ToolError, "none of 4 came back"):
            network.row_of(row, "udp", 0.1)

    def test_streams_are_read_to_their_end(self):
        _, port = self.sink("tcp")
        row = self.run_paced("send", "tcp", port, 256, 400, 0.25)
        self.assertEqual((row["sent"], row["bytes"]), (100, 25600))
        fast = self.run_paced("send", "tcp", port, 4096, 0, 0.1)
        self.assertEqual(fast["bytes"], fast["sent"] * 4096)
        self.assertEqual(fast["due"], fast["sent"])

    def echo_server(self, pieces):
        """Sends a stream back in pieces of so many bytes."""
        server = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(server.close)

        def serve():
            stream, _ = server.accept()
            with stream:
                while data := stream.recv(pieces):
                    stream.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        return server.getsockname()[1]

    def test_messages_of_a_stream_are_put_together_again(self):
        row = self.run_paced("trip", "tcp", self.echo_server(100), 256, 200, 0.25)
        self.assertEqual((row["sent"], row["received"], row["bytes"]), (50, 50, 12800))
        self.assertEqual(row["rtt_us"]["count"], 50)

    def test_bad_words_are_refused_with_what_was_expected(self):
        for words, said in (
            (("send", "udp", "127.0.0.1", "9", "39", "1", "1"), "BYTES: expected 40 to 65507"),
            (("send", "udp", "localhost", "9", "64", "1", "1"), "HOST: expected an IPv4 address"),
            (("trip", "tcp", "127.0.0.1", "0", "64", "1", "1"), "PORT: expected 1 to 65535"),
            (("send", "udp", "127.0.0.1", "9", "64", "1x", "1"), "RATE: expected 0 to"),
            (("send", "udp", "127.0.0.1", "9", "64", "1e8", "9"), "at most 16777215"),
            (("send", "tcp", "127.0.0.1", "1", "64", "1", "1"), "Connection refused"),
        ):
            done = subprocess.run([self.paced, *words], capture_output=True, text=True, timeout=30)
            self.assertEqual(done.returncode, 1, words)
            self.assertIn(said, done.stderr)
        done = subprocess.run([self.paced, "receive", "udp", "1"], capture_output=True, timeout=30)
        self.assertEqual(done.returncode, 2)

    def test_a_sink_that_does_not_report_is_an_error(self):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mute:
            mute.bind(("127.0.0.1", 0))
            words = ["send", "udp", "127.0.0.1", str(mute.getsockname()[1]), "64", "100", "0.1"]
            done = subprocess.run([self.paced, *words], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 1)
        self.assertIn("no report of the sink", done.stderr)


class Words(unittest.TestCase):
    def test_rates_are_packets_or_bits(self):
        self.assertEqual(paced.rate_of("", 64), 0)
        self.assertEqual(paced.rate_of("400pps", 64), 400)
        self.assertEqual(paced.rate_of("819200", 256), 400)
        self.assertAlmostEqual(paced.rate_of("11.76M", 1470), 1000)
        for wrong in ("fast", "20Mbit", "-1M", "1.2.3M"):
            with self.assertRaisesRegex(LabError, f"expected a rate.*{wrong}"):
                paced.rate_of(wrong, 64)

    def test_a_program_that_is_not_built_is_a_skip_that_says_how(self):
        with (
            tempfile.TemporaryDirectory() as empty,
            unittest.mock.patch.dict(os.environ, {"TOMBOLO_LAB_TOOLS": empty}),
            self.assertRaisesRegex(Skip, r"run \./x lab-tools"),
        ):
            paced.program()

    def test_loads_that_the_program_refuses_are_refused_before(self):
        with unittest.mock.patch.object(paced, "program"):
            paced.check("udp", 40, "400pps", 1)
            with self.assertRaisesRegex(LabError, "size: expected 40 to 65507 B with udp"):
                paced.check("udp", 39, "400pps", 1)
            with self.assertRaisesRegex(LabError, "16777215"):
                paced.check("udp", 64, "1000000pps", 60)


class Rows(unittest.TestCase):
    SENT = {
        "due": 1000, "sent": 900, "sent_seconds": 1.05, "late_us": 40.0, "received": 810,
        "bytes": 81000, "out_of_order": 2, "seconds": 1.0, "jitter_us": 30.0,
    }  # fmt: skip

    def test_rates_are_over_the_time_of_sending(self):
        row = network.row_of(self.SENT, "udp", 1.0)
        self.assertAlmostEqual(row["mbit_s"], 81000 * 8e-6 / 1.05)
        self.assertAlmostEqual(row["loss"], 0.1)
        self.assertAlmostEqual(row["unsent"], 0.1)
        self.assertAlmostEqual(row["sent_s"] * (1 - row["loss"]), row["arrived_s"])

    def test_percentiles_need_enough_values(self):
        times = {"count": 999, "p50": 1, "p99": 2, "p999": 3, "p9999": 4}
        self.assertEqual(
            list(network.trips(times).values()), [1, 2, None, None], "999 have no 99.9th percentile"
        )
        self.assertEqual(list(network.trips(times | {"count": 10_000}).values()), [1, 2, 3, 4])

    def test_percentiles_are_nearest_ranks(self):
        found = tools.percentiles_us(range(10_000, 0, -1))
        self.assertEqual(
            found, {"count": 10_000, "p50": 5000, "p99": 9900, "p999": 9990, "p9999": 9999}
        )
        with self.assertRaises(tools.ToolError):
            tools.percentiles_us([])

    def test_a_search_tries_a_rate_that_lost_once_more(self):
        tried = []

        def loss(rate):
            tried.append(rate)
            # 25 loses by chance when it is first tried.
            return 0.0 if rate < 37 and tried != [100, 100, 50, 50, 25] else 0.1

        found = network.search(loss, 100, 6)
        self.assertLess(37 - found, 100 / 2**6)
        self.assertLessEqual(found, 37)
        self.assertEqual(network.search(lambda rate: 0.0, 100, 6), 100)
        self.assertEqual(network.search(lambda rate: 1.0, 100, 6), 0)


if __name__ == "__main__":
    unittest.main()
