"""What tools print, as they printed it here, and what is read from it."""

import sys
import time
import types
import unittest
import unittest.mock
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tombolo_lab.workloads import Skip, calls, endpoints, guests, links, network, stacks, tools

# iperf 2.1.8, Debian 12.
TCP = """\
Client connecting to 127.0.0.1, TCP port 5001
[  1] local 127.0.0.1 port 57300 connected with 127.0.0.1 port 5001 (icwnd/mss/irtt=319/32741/31)
[ ID] Interval       Transfer     Bandwidth
[  1] 0.0000-1.0018 sec  1337216 KBytes  10934409 Kbits/sec
"""
UDP = """\
Sending 256 byte datagrams, IPG target: 195.31 us (kalman adjust)
[ ID] Interval       Transfer     Bandwidth
[  1] 0.0000-1.0003 sec  1281 KBytes  10489 Kbits/sec
[  1] Sent 5124 datagrams
[  1] Server Report:
[ ID] Interval       Transfer     Bandwidth        Jitter   Lost/Total Datagrams
[  1] 0.0000-1.0003 sec  1281 KBytes  10489 Kbits/sec   0.012 ms 51/5123 (1%)
"""
# iputils ping 20221126.
PING = """\
64 bytes from 127.0.0.1: icmp_seq=1 ttl=64 time=0.013 ms
64 bytes from 127.0.0.1: icmp_seq=2 ttl=64 time=0.032 ms
"""
# httperf 0.9.0.
HTTPERF = """\
Total: connections 10 requests 10 replies 10 test-duration 0.012 s

Reply time [ms]: response 1.0 transfer 0.1
Reply size [B]: header 204.0 content 100000.0 footer 0.0 (total 100204.0)
Net I/O: 82379.3 KB/s (674.9*10^6 bps)
Errors: total 2 client-timo 2 socket-timo 0 connrefused 0 connreset 0
"""
# siege 4.0.7.
SIEGE = """\
** SIEGE 4.0.7
** Preparing 4 concurrent users for battle.
The server is now under siege...
Transactions:\t\t           8 hits
Availability:\t\t       66.67 %
Elapsed time:\t\t        0.02 secs
Data transferred:\t        0.76 MB
Response time:\t\t        0.01 secs
Failed transactions:\t           4
"""
# wrk 4.1.0.
WRK = """\
Running 1s test @ http://127.0.0.1:8099/nope
  1 threads and 2 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     2.39ms    2.45ms  15.06ms   84.93%
    Req/Sec     1.05k   184.92     1.27k    60.00%
  Latency Distribution
     50%    1.22ms
     75%    3.23ms
     90%    6.10ms
     99%   10.78ms
  1045 requests in 1.00s, 530.66KB read
  Non-2xx or 3xx responses: 1045
"""
# sockperf 3.7, with its colours.
SOCKPERF = """\
sockperf: [Total Run] RunTime=1.000 sec; Warm up time=400 msec; SentMessages=3002; ReceivedMessages=3002
sockperf: [Valid Duration] RunTime=0.548 sec; SentMessages=1650; ReceivedMessages=1649
sockperf: \x1b[2;35m====> avg-latency=29.350 (std-dev=74.364)\x1b[0m
sockperf: # dropped messages = 1; # duplicated messages = 2; # out-of-order messages = 3
sockperf: \x1b[2;35mTotal 1649 observations\x1b[0m; each percentile contains 16.49 observations
sockperf: ---> <MAX> observation = 1037.139
sockperf: ---> percentile 99.999 = 1037.139
sockperf: ---> percentile 99.990 = 1037.139
sockperf: ---> percentile 99.900 =  981.354
sockperf: ---> percentile 99.000 =  358.406
sockperf: ---> percentile 50.000 =   18.830
"""  # noqa: E501
# iperf 3.12 -J, shortened.
IPERF3_UDP = """\
{"end": {"sum": {"seconds": 1.000239, "bytes": 2498000, "bits_per_second": 19982601.2,
                 "jitter_ms": 0.0074, "lost_packets": 5, "packets": 2498, "sender": true},
         "sum_sent": {"packets": 2498}, "sum_received": {"bits_per_second": 19979224.9}}}
"""
IPERF3_TCP = """\
{"end": {"sum_sent": {"bits_per_second": 2e9, "retransmits": 7},
         "sum_received": {"bits_per_second": 1.5e9}}}
"""


class Reports(unittest.TestCase):
    def test_iperf_over_tcp(self):
        self.assertAlmostEqual(tools.iperf_tcp(TCP).mbit_s, 10934.409)
        with self.assertRaisesRegex(tools.ToolError, "no rate"):
            tools.iperf_tcp("connect failed: Connection refused")

    def test_iperf_over_udp(self):
        [flow] = tools.iperf_udp(UDP)
        self.assertAlmostEqual(flow.mbit_s, 10.489)
        self.assertEqual((flow.sent, flow.lost, flow.jitter_ms), (5123, 51, 0.012))
        self.assertAlmostEqual(flow.loss, 51 / 5123)
        both = tools.iperf_udp(UDP + UDP.replace("51/5123", "0/100"))
        self.assertEqual([f.sent for f in both], [5123, 100])
        # A report of nothing but the sender's own line has no count.
        with self.assertRaisesRegex(tools.ToolError, "no count"):
            tools.iperf_udp(UDP.partition("[  1] Server")[0])

    def test_more_datagrams_than_were_expected_are_no_negative_loss(self):
        [flow] = tools.iperf_udp(UDP.replace("51/5123", "-3/5123"))
        self.assertEqual(flow.loss, 0)

    def test_the_words_of_iperf(self):
        def words(*arguments):
            return " ".join(tools.iperf_command("10.0.0.1", *arguments))

        self.assertEqual(words("tcp", True, 2, 256, ""), "iperf -c 10.0.0.1 -f k -t 2 -l 256 -R")
        self.assertEqual(
            words("udp", True, 0.5, 0, "400pps"), "iperf -c 10.0.0.1 -f k -t 0.5 -b 400pps -u -r"
        )

    def test_ping(self):
        self.assertEqual(tools.ping_times(PING), [13.0, 32.0])

    def test_httperf(self):
        found = tools.httperf_report(HTTPERF)
        self.assertEqual((found.replies, found.errors), (10, 2))
        self.assertAlmostEqual(found.replies_s, 10 / 0.012)
        self.assertAlmostEqual(found.mbit_s, 10 * 100000 * 8e-6 / 0.012)
        self.assertAlmostEqual(found.reply_ms, 1.1)
        with self.assertRaisesRegex(tools.ToolError, "has no"):
            tools.httperf_report("httperf: connection refused")
        fast = tools.httperf_report(HTTPERF.replace("duration 0.012 s", "duration 0.000 s"))
        self.assertEqual((fast.replies_s, fast.mbit_s, fast.replies), (None, None, 10))

    def test_siege_counts_what_failed(self):
        found = tools.siege_report(SIEGE)
        self.assertEqual((found.replies, found.errors, found.replies_s), (8, 4, 400))
        self.assertAlmostEqual(found.mbit_s, 0.76 * (1 << 20) * 8e-6 / 0.02)
        self.assertAlmostEqual(found.reply_ms, 10)
        fast = tools.siege_report(SIEGE.replace("0.02 secs", "0.00 secs"))
        self.assertEqual((fast.replies_s, fast.mbit_s, fast.replies), (None, None, 8))
        self.assertAlmostEqual(fast.moved, 0.76 * (1 << 20))
        with self.assertRaisesRegex(tools.ToolError, "no 'Elapsed time'"):
            tools.siege_report("siege: cannot resolve")

    def test_wrk_counts_other_replies_as_errors(self):
        found, parts = tools.wrk_report(WRK)
        self.assertEqual((found.replies, found.errors), (1045, 1045))
        self.assertAlmostEqual(found.mbit_s, 530.66 * 1024 * 8e-6)
        self.assertEqual(parts, {"p50": 1.22, "p75": 3.23, "p90": 6.1, "p99": 10.78})
        with self.assertRaisesRegex(tools.ToolError, "no counts"):
            tools.wrk_report("unable to connect")

    def test_sockperf_prints_halves_of_round_trips(self):
        found = tools.sockperf_report(SOCKPERF)
        self.assertEqual((found["sent"], found["received"], found["seconds"]), (1650, 1649, 0.548))
        self.assertEqual((found["duplicates"], found["out_of_order"]), (2, 3))
        self.assertEqual((found["rtt_us"]["count"], found["rtt_us"]["p50"]), (1649, 37.66))
        with self.assertRaisesRegex(tools.ToolError, "has no"):
            tools.sockperf_report("sockperf: ERROR: connection refused")

    def test_iperf3_takes_whole_seconds_and_several_streams(self):
        for streams, more in ((1, []), (4, ["-P", "4"])):
            done = unittest.mock.Mock(stdout=IPERF3_TCP)
            with unittest.mock.patch.object(tools, "bounded", return_value=done) as run:
                tools.iperf3("space", "10.0.0.1", "tcp", False, 0.3, 0, 0, streams)
            words = run.call_args[0][0]
            self.assertEqual(words[4:], ["iperf3", "-J", "-c", "10.0.0.1", "-t", "1", *more])
        with unittest.mock.patch.object(tools, "bounded", return_value=done) as run:
            tools.iperf3("space", "10.0.0.1", "tcp", False, 1, 0, 0, congestion="cubic")
        self.assertEqual(run.call_args[0][0][-2:], ["-C", "cubic"])

    def test_iperf3_gives_what_was_received(self):
        udp = tools.iperf3_report(IPERF3_UDP)
        self.assertEqual((udp["sent"], udp["lost"], udp["jitter_ms"]), (2498, 5, 0.0074))
        self.assertAlmostEqual(udp["mbit_s"], 19.9792249)
        self.assertEqual(tools.iperf3_report(IPERF3_TCP), {"mbit_s": 1500.0, "retransmitted": 7})
        with self.assertRaisesRegex(tools.ToolError, "refused"):
            tools.iperf3_report('{"error": "connection refused"}')
        with self.assertRaisesRegex(tools.ToolError, "expected JSON"):
            tools.iperf3_report("")

    def test_replies_of_another_length_are_refused(self):
        def http(content, replies=10):
            return tools.Http(replies / 2, replies * content * 8e-6 / 2, 1.0, replies, 0)

        guests.check_content("httperf", http(100_000), 100_000)
        guests.check_content("wrk", http(118_000), 100_000)
        # Of a reply on each of its connections it may have a part.
        guests.check_content("wrk", http(199_000), 100_000, unfinished=10)
        fast = tools.siege_report(SIEGE.replace("0.02 secs", "0.00 secs"))
        guests.check_content("siege", fast, 100_000)
        with self.assertRaisesRegex(tools.ToolError, "expected 8 replies of 5000000 bytes"):
            guests.check_content("siege", fast, 5_000_000)
        # siege says 0.00 MB of eight replies of 600 bytes.
        guests.check_content("siege", http(0, 8), 600)
        for wrong in (124, 90_000, 200_000):
            with self.assertRaisesRegex(tools.ToolError, "expected 10 replies of 100000 bytes"):
                guests.check_content("httperf", http(wrong), 100_000)

    def test_a_tool_that_hangs_is_ended(self):
        with self.assertRaisesRegex(tools.ToolError, "not done after 0.2 s"):
            tools.bounded(["sleep", "30"], 0.2)


class Ends(unittest.TestCase):
    def refused(self, words, **more):
        cell = {name: one.default for name, one in network.Network.parameters.items()} | more
        with (
            unittest.mock.patch.multiple(
                endpoints.harness,
                need_root=unittest.mock.DEFAULT,
                program=unittest.mock.DEFAULT,
                need_program=unittest.mock.DEFAULT,
                need_cell=unittest.mock.DEFAULT,
            ),
            unittest.mock.patch.object(network.paced, "program"),
            self.assertRaisesRegex(Skip, words),
        ):
            network.Network().check(cell)

    def test_namespaces_have_attachments_of_their_own(self):
        self.refused("are for a namespace", attachment="veth")
        self.refused("are for a namespace", guest="namespace", attachment="tap")

    def test_loads_that_an_end_does_not_serve_are_skipped_by_name(self):
        self.refused("iperf3 has a server in a namespace only", tool="iperf3")
        self.refused("sockperf's messages come back", tool="sockperf", guest="namespace",
                     attachment="veth", direction="down")  # fmt: skip
        self.refused("only paced does", echo=True)
        self.refused("paced sends from the host", tool="paced", direction="down")
        self.refused("only a cell has an echo", tool="paced", echo=True, guest="namespace",
                     attachment="veth")  # fmt: skip
        self.refused("needs an offered rate", protocol="udp")

    def test_iperf3_and_sockperf_take_whole_seconds(self):
        for tool, took in (("iperf", 0.4), ("paced", 0.4), ("iperf3", 1), ("sockperf", 1)):
            self.assertEqual(network.load_seconds({"tool": tool, "seconds": 0.4}), took)
        self.assertEqual(network.load_seconds({"tool": "iperf3", "seconds": 1.2}), 2)


class OwnSeconds(unittest.TestCase):
    """Rates are of the load's own seconds, not of what its start and its report take too."""

    cpu = 0.0

    def load(self, *_):
        time.sleep(0.3)  # of which 0.1 are the load
        self.cpu += 0.05
        return {"mbit_s": 8.0, "notes": {"kept": 1}}

    def test_of_a_load_on_a_network(self):
        def turns():
            count = round(self.cpu * 1000)
            port = {"rx_frames": count, "tx_frames": 0, "turns": count, "wakeups": count}
            port["frames_per_turn"] = [0, count, 0]
            return {"host": port, "guest": port}

        end = types.SimpleNamespace(cpu=lambda: self.cpu, turns=turns, pids={})
        cell = {"tool": "iperf", "seconds": 0.1, "offered": "", "pings": 0, "protocol": "tcp",
                "direction": "up"}  # fmt: skip
        with unittest.mock.patch.dict(network.LOADS, iperf=self.load):
            found = network.loaded(end, cell)
        self.assertAlmostEqual(found["cpus"], 0.5)
        self.assertAlmostEqual(found["port_frames_s"], 500)
        self.assertAlmostEqual(found["wakeups_s"], 500)
        self.assertAlmostEqual(found["cpu_us_per_kb"], 500)
        turns = {"frames_per_turn": [[0, 0, 0], [1, 1, 50], [2, None, 0]]}
        self.assertEqual(found["notes"], {"kept": 1, "histograms": turns})

    def test_of_a_load_on_a_link(self):
        flow = types.SimpleNamespace(mbit_s=8.0, loss=None)
        end = types.SimpleNamespace(cpu=lambda: self.cpu, space=None, address="")
        with unittest.mock.patch.object(tools, "iperf", lambda *_: self.load() and flow):
            found = links.Links().measure(end, {"load": "tcp_up", "seconds": 0.1})
        self.assertAlmostEqual(found["cpus"], 0.5)


class Counters(unittest.TestCase):
    def test_rates_are_of_the_port_that_the_load_comes_from(self):
        def counters(rx, tx, turns, wakeups):
            return {"rx_frames": rx, "tx_frames": tx, "turns": turns, "wakeups": wakeups}

        before = {"host": counters(10, 5, 2, 1), "guest": counters(0, 10, 0, 0)}
        after = {"host": counters(110, 55, 22, 5), "guest": counters(50, 110, 50, 8)}
        up = network.port_rates(before, after, False, 2)
        self.assertEqual(up, {"frames_per_turn": 5.0, "port_frames_s": 75.0, "wakeups_s": 2.0})
        down = network.port_rates(before, after, True, 2)
        self.assertEqual(down, {"frames_per_turn": 1.0, "port_frames_s": 75.0, "wakeups_s": 4.0})
        self.assertEqual(network.port_rates(before, before, False, 1)["frames_per_turn"], 0)

    def test_turns_are_counted_by_ranges_of_frames(self):
        # As `crates/switch/src/counters.rs` counts: bucket k has 2^(k-1) to 2^k - 1 frames.
        before = {"host": {"frames_per_turn": [1, 2, 3, 4, 5]}, "guest": {}}
        after = {"host": {"frames_per_turn": [1, 3, 5, 7, 9]}, "guest": {}}
        self.assertEqual(
            network.turns_by_frames(before, after, False),
            [[0, 0, 0], [1, 1, 1], [2, 3, 2], [4, 7, 3], [8, None, 4]],
        )
        before["guest"], after["guest"] = before["host"], before["host"]
        counts = [row[2] for row in network.turns_by_frames(before, after, True)]
        self.assertEqual(counts, [0] * 5)

    def test_the_search_finds_the_highest_rate_without_loss(self):
        cell = {"search_top": 100.0, "search_steps": 8}
        offered = []

        def probe(end, trial, rate):
            offered.append(float(rate.removesuffix("M")))
            self.assertEqual(trial["protocol"], "udp")
            return {"loss": 0.0 if offered[-1] <= 37 else 0.2, "unsent": None}

        with unittest.mock.patch.object(network, "loaded", probe):
            found = network.Budget.loss_free(None, cell)
        self.assertAlmostEqual(found, 37, delta=100 / 2**8)
        self.assertLessEqual(found, 37)
        # The upper end first, and each rate that lost twice.
        self.assertEqual(len(set(offered)), 9)


# perf script -F comm,ip,sym,dso of Linux 6.1's perf; innermost function first.
SAMPLES = """\
pathload
\tffffffff81 nf_hook_slow+0x41 ([kernel.kallsyms])
\tffffffff82 bpf_prog_0123456789abcdef_take+0x10 (bpf_prog)
\tffffffff83 vfs_write+0x1a ([kernel.kallsyms])
\tffffffff84 ksys_write+0x5 ([kernel.kallsyms])
\tffffffff85 __x64_sys_write+0x2 ([kernel.kallsyms])
\tffffffff86 do_syscall_64+0x3 ([kernel.kallsyms])

pathload
\tffffffff87 futex_wait+0x1 ([kernel.kallsyms])
\tffffffff86 do_syscall_64+0x3 ([kernel.kallsyms])
"""


class Stacks(unittest.TestCase):
    def test_stacks_are_those_below_the_calls_outermost_first(self):
        found = stacks.of_calls(SAMPLES, ("__x64_sys_write", "ksys_write"))
        self.assertEqual(found, {"vfs_write;bpf: take;nf_hook_slow": 1})


class Gaps(unittest.TestCase):
    def test_the_pause_is_between_the_replies_around_the_moment(self):
        replies = [(1.00, 1), (1.01, 2), (1.25, 8), (1.26, 9)]
        pause_ms, lost = links.gap(replies, 1.02)
        self.assertAlmostEqual(pause_ms, 240)
        self.assertEqual(lost, 5)

    def test_nothing_lost_is_the_distance_of_two_replies(self):
        pause_ms, lost = links.gap([(1.0, 1), (1.005, 2)], 1.002)
        self.assertAlmostEqual(pause_ms, 5)
        self.assertEqual(lost, 0)


class Rows(unittest.TestCase):
    def test_every_row_of_a_peer_has_its_program(self):
        self.assertEqual(set(calls.PROGRAM_OF.values()), set(calls.PEERS))
        self.assertNotIn("iceoryx2_polled_loaded", calls.PROGRAM_OF)
        self.assertEqual(calls.PROGRAM_OF["iceoryx2_waitset_16"], "iceoryx2")

    def test_a_program_that_fails_is_an_error_with_its_words(self):
        with self.assertRaisesRegex(tools.ToolError, "ended with 3: no socket"):
            calls.rows_of(["sh", "-c", "echo no socket >&2; exit 3"], 10)
        self.assertEqual(calls.rows_of(["echo", '{"row":"a"}'], 10), [{"row": "a"}])


if __name__ == "__main__":
    unittest.main()
