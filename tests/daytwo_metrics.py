"""Metrics beside what reads them: alert rules under promtool, and rules and dashboard under a real Prometheus."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request

from lib import ROOT, Fabric, Process, need_program, scratch, timeout, until
from lib.fabric import PROGRAM

RULES = ROOT / "packaging/prometheus/tombolo.rules.yml"
UNIT_TESTS = ROOT / "packaging/prometheus/tombolo.rules.test.yml"
DASHBOARD = ROOT / "packaging/grafana/tombolo.json"
METRIC = re.compile(r"\btombolo_[a-z0-9_]+\b")
FABRIC = """
name = "{name}"
[network.lan]
subnet = "10.234.0.0/24"
[cell.web]
app = "httpd"
accel = "tcg"
[port.guest]
kind = "stream"
"""
# What Grafana puts in place of its variables and macros.
VARIABLES = {"$__rate_interval": "1m", "$instance": ".*", "$network": ".*", "$port": ".*"}
# Panels that have values as soon as a fabric with one cell runs.
SHOWS_AT_ONCE = {"Fabrics", "Warnings", "Machines down", "Ports down", "Bits from members", "Frames to members", "Busy", "Running", "Uptime",
                 "Leases and addresses", "Turns", "Other machines by state", "Reports of tombolo-span"}


def promtool(*words):
    need_program("promtool")
    return subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, timeout=60)


def queries():
    """Every query of the dashboard, as Prometheus gets it, with its panel's title."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            assert "$" not in query, query
            found.append((panel["title"], query))
    return found


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(port, path, **fields):
    url = f"http://127.0.0.1:{port}{path}" + ("?" + urllib.parse.urlencode(fields) if fields else "")
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read().decode()


def silenced(alert):
    """The rules with one alert that never fires."""
    lines, of_it, in_expression = [], False, False
    for line in RULES.read_text().splitlines():
        if "- alert: " in line:
            of_it = line.endswith(f": {alert}")
        if of_it and line.startswith("        expr:"):
            lines.append("        expr: vector(0) > 1")
            in_expression = True
        elif not (in_expression and line.startswith("          ")):
            in_expression = False
            lines.append(line)
    return "\n".join(lines) + "\n"


@timeout(120)
def test_promtool_accepts_the_rules_and_their_unit_tests_miss_no_alert():
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0, done
    done = promtool("test", "rules", UNIT_TESTS)
    assert done.returncode == 0, done.stdout + done.stderr
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    assert len(alerts) == len(set(alerts)) > 15, alerts
    # An alert that never fires fails the unit tests, whichever it is.
    with scratch() as folder:
        shutil.copy(UNIT_TESTS, folder)
        for alert in alerts:
            text = silenced(alert)
            (folder / RULES.name).write_text(text)
            assert promtool("check", "rules", folder / RULES.name).returncode == 0, text
            done = promtool("test", "rules", folder / UNIT_TESTS.name)
            assert done.returncode and alert in done.stdout + done.stderr, f"the unit tests do not see that {alert} never fires"


def test_the_docs_name_each_alert():
    page = (ROOT / "docs/metrics.md").read_text()
    for alert in re.findall(r"- alert: (\w+)", RULES.read_text()):
        assert f"`{alert}`" in page, alert


@contextlib.contextmanager
def prometheus(folder, target):
    """A Prometheus that reads `target` each second and has the rules; gives its port."""
    need_program("prometheus")
    port = free_port()
    (folder / "prometheus.yml").write_text(f"""
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
scrape_configs:
  - job_name: tombolo
    static_configs: [{{targets: ["127.0.0.1:{target}"], labels: {{instance: demo}}}}]
rule_files: ["{RULES}"]
""")
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
    process = Process(command, name="prometheus", cwd=folder)
    try:
        yield port
    finally:
        process.kill()


def api(port, path, **fields):
    return json.loads(get(port, f"/api/v1/{path}", **fields))["data"]


@timeout(180)
def test_prometheus_reads_a_fabric_and_evaluates_every_rule_and_every_panel():
    name = f"me{os.getpid()}"
    with scratch() as folder, Fabric(folder, FABRIC.format(name=name)) as fabric:
        report = {"machine": "node-1", "pid": 1, "uptime_s": 1, "site": "default", "networks": [{"name": "lan", "local": 1, "remote": 0}],
                  "machines": [{"name": "node-2", "state": "up", "heard_s": 0, "members": 0}], "counters": {"messages_refused": 2}}
        assert fabric.ask("PUT", "/v1/span", report)[0] == 204
        # A list that does not fit is counted.
        assert fabric.ask("PUT", "/v1/networks/lan/remotes/node-2", {"address": "192.0.2.2", "members": []})[0] in (400, 409, 422)
        port = free_port()
        server = Process([PROGRAM, "metrics", "--fabric", name, "--listen", f"127.0.0.1:{port}"], name="metrics", env=fabric.env, cwd=folder)
        server.wait_line(lambda line: "metrics of" in line)
        page = get(port, "/metrics")
        printed = fabric.cli("metrics").stdout
        for line in ('tombolo_span_refused_total{what="list"} 1', 'tombolo_span_refused_total{what="message"} 2', 'tombolo_span_machines{state="up"} 1'):
            assert line in page.splitlines(), f"{line}: {page}"
        families = set(re.findall(r"^# TYPE (\S+)", page, re.M))
        assert families == set(re.findall(r"^# TYPE (\S+)", printed, re.M)) and len(families) > 60, sorted(families)
        # Each name that the rules and the dashboard use is one that the daemon gives.
        for path in (RULES, UNIT_TESTS, DASHBOARD):
            named = set(METRIC.findall(path.read_text()))
            assert named - families == set(), f"{path.name}: {sorted(named - families)}"
            assert named, path
        checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60)
        assert "error while linting" not in checked.stderr and "parse" not in checked.stderr, checked.stderr
        # What changes a fabric does not get through.
        for method, path in (("POST", "/v1/down"), ("GET", "/v1/status"), ("DELETE", "/v1/ports/guest")):
            try:
                urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method), timeout=20)
                raise AssertionError(f"{method} {path} was answered")
            except urllib.error.HTTPError as refused:
                assert refused.code in (404, 405), (method, path, refused.code)
        fabric.cli("wait")
        with prometheus(folder, port) as where:
            def target():
                with contextlib.suppress(OSError):
                    return [t["health"] for t in api(where, "targets")["activeTargets"]] == ["up"]

            until("the first scrape", target)
            # A rate needs two samples.
            rate = 'rate(tombolo_worker_lifetime_seconds_total[1m])'
            until("a rate", lambda: api(where, "query", query=rate)["result"])
            until("an evaluation of all rules", lambda: all(rule["health"] == "ok" for group in api(where, "rules")["groups"] for rule in group["rules"]))
            firing = [alert["labels"]["alertname"] for alert in api(where, "alerts")["alerts"] if alert["state"] == "firing"]
            assert firing == [], firing
            shown = set()
            for title, query in queries():
                try:
                    result = api(where, "query", query=query)["result"]
                except urllib.error.HTTPError as error:
                    raise AssertionError(f"{title}: {query}: {error.read().decode()}") from None
                shown |= {title} if result else set()
            assert shown >= SHOWS_AT_ONCE, sorted(SHOWS_AT_ONCE - shown)
            # Labels of the variables.
            assert api(where, "label/instance/values", **{"match[]": "tombolo_info"}) == ["demo"]
            assert set(api(where, "label/port/values", **{"match[]": 'tombolo_port_up{network=~"lan"}'})) >= {"web", "guest"}
            # A fabric that is gone is told, and one that comes back is read again, by the same
            # server.
            fabric.cli("down")
            until("the pending alert", lambda: "TomboloFabricDown" in [alert["labels"]["alertname"] for alert in api(where, "alerts")["alerts"]])
            fabric.start()
            until("it is up again", lambda: api(where, "query", query='up{job="tombolo"} == 1')["result"])
