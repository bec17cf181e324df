"""The bypass with large rulesets: the time and memory for reading them, and which commands wait for that.

`python3 tests/bypass_large.py 1000 10000 50000` prints the table of docs/bypass.md.
"""

import json
import os
import subprocess
import sys
import time

from bypass_paths import A, B, PROGRAM, host
from lib import alone, timeout, until
from lib.machine import SLOW
from lib.tap import UDP, ETH_IP4, ipv4, transport

# Processor time that a ruleset of 10,000 rules may take, many times what it takes.
LIMIT_S = 10 * SLOW
FORWARD = "table inet f { chain c { type filter hook forward priority 0;\n%s\n}; }"


def address(n):
    return f"10.{9 + n // 65536}.{n // 256 % 256}.{n % 256}"


def rules(n):
    return FORWARD % "\n".join(f"ip saddr {address(i)} tcp dport {i % 60000 + 1} counter drop" for i in range(n))


def judging(n):
    return FORWARD % "\n".join(f"ip saddr {address(i)} tcp dport {i % 60000 + 1} limit rate 1/second drop" for i in range(n))


def verdicts(n):
    return FORWARD % ("ip saddr vmap { " + ", ".join(f"{address(2 * i)} : drop" for i in range(n)) + " }")


def chains(n):
    """Each rule jumps to a chain of its own."""
    own = "\n".join(f"chain d{i} {{ ip daddr 10.9.0.{i % 250} tcp dport 80 accept; }}" for i in range(n))
    return "table inet f {\n%s\nchain c { type filter hook forward priority 0;\n%s\n}; }" % (own, "\n".join(f"ip saddr {address(i)} jump d{i}" for i in range(n)))


def cost(h, *words):
    """Processor seconds and MiB of a command, and what it prints."""
    env = dict(os.environ, TOMBOLO_RUNTIME=str(h.folder / "run"))
    process = subprocess.Popen([str(PROGRAM), "bypass", *words, "--netns", str(h.space)], env=env, stdout=subprocess.PIPE, text=True)
    text = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = status
    assert status == 0, words
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, text


KINDS = (rules, judging, verdicts, chains)


def measure(counts):
    """By kind and number of rules: processor seconds and MiB of an attach, and seconds of a `status` behind it."""
    for make in KINDS:
        for count in counts:
            with host() as h:
                if count:
                    h.rules(make(count))
                seconds, mib, _ = cost(h, "attach", "ta", "tb", "--no-controller")
                shown, _, text = cost(h, "status", "--json")
                print(f"| {make.__name__} | {count} | {seconds:.2f} s | {mib:.0f} MiB | {shown:.2f} s |", flush=True)
                yield make, count, seconds, mib, shown, json.loads(text)


@alone
@timeout(600)
def test_reading_a_ruleset_takes_time_and_memory_by_its_size_and_status_does_not_read_it_again():
    spent = {}
    for make, count, seconds, mib, shown, report in measure((0, 2500, 10_000)):
        assert report["rules_fault"] is None and report["judging_rules_total"] == (count if make is judging else 0), report["judging_rules_total"]
        assert len(report["judging_rules"]) <= 100 and len(report["warnings"]) <= 30
        assert mib < 300 and seconds < LIMIT_S, (make.__name__, count, seconds, mib)
        # What was read last is known: it asks for the ruleset's generation alone.
        assert shown < 1, (make.__name__, count, shown)
        spent[make, count] = seconds
    for make in KINDS:
        # Four times as many may take four times as long, and what else an attach does.
        none, small, large = (spent[make, count] for count in (0, 2500, 10_000))
        assert large - none < 8 * max(small - none, 0.1), (make.__name__, spent)


@alone
@timeout(600)
def test_the_keeper_goes_on_while_it_reads_a_large_ruleset():
    with host() as h:
        h.attach(words=("--lease", "10000"))
        keeper = h.status()["keeper"]
        frame = h.to_b(ETH_IP4, ipv4(A, B, UDP, transport(UDP, A, B, 1, 2, b"x" * 40)))
        for n in range(3):
            h.rules("flush ruleset\n" + judging(20_000 + n))
            begin, gaps = time.monotonic(), []
            # It is read while the controller tells that it is at work, and commands do not wait for
            # it.
            while h.status()["rules_fault"]:
                at = time.monotonic()
                h.attach()
                gaps.append(time.monotonic() - at)
                assert h.status()["keeper_fault"] is None and time.monotonic() - begin < 100 * SLOW
            print(f"read after {time.monotonic() - begin:.2f} s, attaches took {[round(g, 2) for g in gaps]}")
            report = h.status()
            assert report["judging_rules_total"] == 20_000 + n and report["keeper"] == keeper, report["judging_rules_total"]
        h.rules("flush ruleset")
        until("frames to be taken", lambda: h.across(frame) and h.across(frame) and h.taken() > 0, 60)


@alone
@timeout(600)
def test_a_ruleset_that_is_too_large_keeps_all_flows_on_the_kernels_path_and_says_so():
    with host() as h:
        # As chains of two rules each, which are followed for each kind of flow.
        h.rules(chains(85_000))
        h.attach(words=("--no-controller",))
        report = h.status()
        whys = [rule["why"] for rule in report["judging_rules"]]
        assert whys == ["the ruleset is too large to be followed"], report
        frame = h.udp(b"any" * 20)
        assert h.across(frame) and h.across(frame) and h.across(frame) and h.taken() == 0
        assert "too large to be followed; flows that it could judge take the kernel's path" in h.cli("status").stdout


if __name__ == "__main__":
    for _ in measure([int(word) for word in sys.argv[1:]]):
        pass
