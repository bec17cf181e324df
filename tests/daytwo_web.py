"""The page that shows a fabric, in headless Chromium: what it shows moves, and who has no session gets nothing.

`Checks` counts what holds: `web_tests` of `./x bench daytwo`. With `TOMBOLO_SHOTS=FOLDER` the screenshots are kept there.
"""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import time
from pathlib import Path

from lib import BUILD, Fabric, Process, Skip, linux_cmdline, scratch, timeout, until
from lib.browser import Browser
from lib.fabric import PROGRAM
from lib.machine import ROOT

HOSTILE = "<img src=x onerror=alert(1)>"
TEXT = """
name = "{name}"
[network.lan]
subnet = "10.236.0.0/24"
[cell.web]
app = "httpd"
network = "lan"
ip = "10.236.0.20"
accel = "tcg"
[cell.asker]
app = "ping"
args = "host=10.236.0.20 count=100000 interval_ms=50"
network = "lan"
accel = "tcg"
[cell.calc]
app = "calc"
args = "net=none"
accel = "tcg"
[link.calls]
between = ["calc"]
service = "calc"
{more}
"""
LINUX = """
[vm.linux]
kernel = "{kernel}"
initrd = "{initrd}"
machine = "microvm"
accel = "tcg"
network = "lan"
cmdline = "{cmdline}"
"""


class Checks:
    """Asserts, and counts."""

    count = 0

    def __call__(self, condition, what):
        assert condition, what
        Checks.count += 1


check = Checks()


class Page:
    """`tombolo web` of a fabric."""

    def __init__(self, fabric):
        self.process = Process([PROGRAM, "web"], name="web", env=fabric.env, cwd=fabric.folder, stdin=True)
        _, self.link, self.last = self.process.wait_line(lambda line: line.startswith("http://"), 30)
        self.host, self.token = self.link.removeprefix("http://").split("/#token=")

    def another(self):
        """A link for another browser."""
        seen = len(self.process.lines)
        self.process.send("\n")
        return self.process.wait_line(lambda line: line.startswith("http://"), 30, seen)[1]

    def ask(self, method, path, body=None, **headers):
        """One request as a program makes it; gives (status, headers, body)."""
        address, port = self.host.split(":")
        connection = http.client.HTTPConnection(address, int(port), timeout=30)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in {"Host": self.host, **{n.replace("_", "-"): v for n, v in headers.items()}}.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read()
        connection.close()
        return found


@contextlib.contextmanager
def standing(name, more=""):
    with scratch() as folder, Fabric(folder, TEXT.format(name=f"{name}{os.getpid()}", more=more)) as fabric:
        page = Page(fabric)
        try:
            yield folder, fabric, page
        finally:
            page.process.stop()


def shown(browser, table):
    """The rows of a table, as texts by column."""
    return browser.run("""return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].map((row) => [...row.cells].map((cell) => cell.innerText))""", table)


def number(text):
    value, _, unit = text.partition(" ")
    return float(value) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[unit[:1]]


@timeout(120)
def test_who_has_no_session_gets_nothing():
    with standing("wa") as (_, fabric, page):
        own = f"http://{page.host}"
        check(page.host.startswith("127.") and not page.host.startswith("127.0.0.1:"), page.host)
        status, headers, body = page.ask("GET", "/")
        check(status == 200 and fabric.name.encode() not in body, "the page itself is empty")
        policy = headers["content-security-policy"]
        check("default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy and "*" not in policy, policy)
        check(headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store", headers)
        for path in ("/api/status", "/api/events", "/api/console?machine=web", "/api/services", "/api/captures", "/api/nothing"):
            check(page.ask("GET", path)[0] == 401, path)
        for host in ("evil.example", f"evil.example:{page.host.split(':')[1]}", "localhost", page.host.split(":")[0]):
            check(page.ask("GET", "/", Host=host)[0] == 403, f"DNS rebinding: {host}")
        post = {"body": page.token.encode(), "Content_Type": "text/plain"}
        for name, origin in (("none", {}), ("foreign", {"Origin": "http://evil.example"}), ("null", {"Origin": "null"}),
                             ("another port", {"Origin": own + "0"}), ("same site", {"Origin": own, "Sec_Fetch_Site": "cross-site"})):
            check(page.ask("POST", "/session", **post, **origin)[0] == 403, f"origin: {name}")
        for wrong in (b"", b"0" * 64, page.token[:-1].encode(), page.token.upper().encode() + b"x"):
            check(page.ask("POST", "/session", wrong, Origin=own)[0] == 403, wrong)
        check(page.ask("POST", "/session", b"x" * 1000, Origin=own)[0] == 413, "a token of any size")
        status, headers, _ = page.ask("POST", "/session", page.token.encode(), Origin=own)
        cookie = headers["set-cookie"]
        check(status == 204 and "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/" in cookie, cookie)
        check(page.ask("POST", "/session", page.token.encode(), Origin=own)[0] == 403, "a token works once")
        session = {"Cookie": cookie.split(";")[0]}
        status, _, body = page.ask("GET", "/api/status", **session)
        check(status == 200 and json.loads(body)["name"] == fabric.name, body)
        check(page.ask("GET", "/api/status", Cookie=session["Cookie"][:-1] + "x")[0] == 401, "a forged session")
        check(page.ask("GET", "/api/status", Origin="http://evil.example", **session)[0] == 403, "a foreign page with the cookie")
        check(page.ask("POST", "/api/console?machine=web", b"x", **session)[0] == 403, "a forged form with the cookie")
        for method, path in (("GET", "/v1/status"), ("POST", "/api/down"), ("DELETE", "/api/status"), ("GET", "/api/../v1/down"), ("GET", "/api/status?x=1")):
            check(page.ask(method, path, Origin=own, **session)[0] == 404, path)
        check(page.ask("POST", "/api/console?machine=web", b"x" * 70_000, Origin=own, **session)[0] == 413, "a bound for what is typed")
        check(page.ask("GET", "/api/console?machine=..%2F..%2Fdown", **session)[0] == 404, "a name is no path")
        wrong = page.ask("POST", "/api/capture?id=0123456789&kind=networks&name=lan&filter=nonsense&seconds=1", b"", Origin=own, **session)
        check(wrong[0] == 400 and b"nonsense" in wrong[2], wrong)
        # Clients that hold their connections and say nothing, as any user of the machine can: the
        # fabric and its other clients go on.
        address, port = page.host.split(":")
        held = [socket.create_connection((address, int(port)), 10) for _ in range(80)]
        started = time.monotonic()
        check(fabric.status()["name"] == fabric.name and time.monotonic() - started < 10, "the daemon is not slowed")
        until("a place for the page again", lambda: _answers(page, session), 60)
        check(True, "silent connections end")
        for one in held:
            one.close()
        # No follower outlives its reader: consoles and captures have places, which come back.
        streams = [_opened(page, "/api/console?machine=web", session) for _ in range(16)]
        check(all(b" 200 " in head for _, head in streams), [head for _, head in streams])
        check(page.ask("GET", "/api/console?machine=web", **session)[0] == 503, "and no more")
        for one, _ in streams:
            one.close()
        until("places again", lambda: b" 200 " in _closing(_opened(page, "/api/console?machine=web", session)), 30)
        # A capture's place comes back with its connection, not when its time is over (10 s for a
        # file that no browser wants).
        for attempt in range(5):
            captures = [_capturing(page, session, own, f"{attempt}{n:07}") for n in range(16)]
            check(all(b" 200 " in head for _, head in captures), [head for _, head in captures])
            started = time.monotonic()
            for one, _ in captures:
                one.close()
            until("the end of all captures", lambda: page.ask("GET", "/api/captures", **session)[2] == b"[]", 30)
            # A busy machine may be late once.
            if (took := time.monotonic() - started) < 8:
                break
        check(took < 8, f"captures without a browser ended after {took:.1f} s, {attempt + 1} times")
        check(page.ask("POST", "/session/close", b"", Origin=own, **session)[0] == 204, "a session can be ended")
        check(page.ask("GET", "/api/status", **session)[0] == 401, "and is over then")
        refused = fabric.cli("web", "--address", "0.0.0.0", check=False)
        check(refused.returncode == 1 and "not a loopback address" in refused.stderr, refused.stderr)


def _answers(page, session):
    try:
        return page.ask("GET", "/api/status", **session)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def _opened(page, path, session):
    """A connection whose endless answer has begun, and that answer's head.

    The page may be slow to notice that earlier connections have ended, and closes further ones at once while it has no place for them."""
    address, port = page.host.split(":")

    def answered():
        connection = socket.create_connection((address, int(port)), 30)
        with contextlib.suppress(ConnectionError):
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {page.host}\r\nCookie: {session['Cookie']}\r\n\r\n".encode())
            if head := connection.recv(4096):
                return connection, head
        connection.close()
        return None

    return until(f"an answer to {path}", answered, 60)


def _capturing(page, session, own, ident):
    """A download that has begun, as by `_opened`, of a capture with this identifier."""
    start = f"/api/capture?id={ident}&kind=networks&name=lan&seconds=600"
    until("a place for a capture", lambda: page.ask("POST", start, b"", Origin=own, **session)[0] == 204, 30)
    return _opened(page, f"/api/capture?id={ident}", session)


def _closing(opened):
    opened[0].close()
    return opened[1]


@timeout(240)
def test_the_page_shows_a_fabric_as_it_moves_and_by_keys_alone():
    shots = Path(os.environ["TOMBOLO_SHOTS"]) if "TOMBOLO_SHOTS" in os.environ else None
    with standing("wb") as (folder, fabric, page), Browser(folder) as browser:
        def shot(name):
            for scheme in ("light", "dark"):
                browser.scheme(scheme)
                picture = folder / f"{name}-{scheme}.png"
                browser.screenshot(picture)
                check(picture.stat().st_size > 10_000, picture)
                if shots:
                    (shots / picture.name).write_bytes(picture.read_bytes())
            browser.scheme("light")

        fabric.cli("wait", "--for", "port", "web", "--timeout", 60)
        browser.open(f"http://{page.host}/")
        browser.wait("the gate", "return !document.getElementById('gate').hidden")
        check(fabric.name not in browser.text("body"), "without a session nothing is shown")
        browser.open(page.link)
        browser.wait("the fabric's name", "return document.getElementById('fabric').innerText === arguments[0]", fabric.name)
        check("token" not in browser.run("return location.href"), "the token does not stay in the address")
        check(browser.run("return document.cookie") == "", "scripts do not see the session")
        # Rates move.
        moving = browser.wait("a rate", "return [...document.querySelectorAll('.rate')].some((r) => /[1-9]/.test(r.textContent))")
        check(moving, "rates in the drawing")
        check("busy" in browser.run("return [...document.querySelectorAll('.stem')].map((s) => s.getAttribute('class')).join()"), "links are busy")
        browser.wait("a line of past rates", "return [...document.querySelectorAll('.spark')].some((s) => (s.getAttribute('d') ?? '').split('L').length > 4)")
        shot("networks")
        # By keys alone: the skip link, the views, a port.
        browser.run("document.body.focus(); document.activeElement.blur()")
        browser.keys("Tab")
        check(browser.run("return document.activeElement.className") == "skip", "the first key leads past the views")
        for _ in range(12):
            if browser.run("return document.activeElement.hash") == "#ports":
                break
            browser.keys("Tab")
        check(browser.run("return document.activeElement.hash") == "#ports", "the views are reached by keys")
        outline = browser.run("return getComputedStyle(document.activeElement).outlineWidth")
        check(outline not in ("0px", ""), "focus can be seen")
        browser.keys("Enter")
        browser.wait("the ports", "return document.activeElement.id === 't-ports'")
        rows = until("rates of web", lambda: {r[0]: r for r in shown(browser, "port-table")}.get("web", [0] * 9)[4:8], 30)
        web = until("web's frames", lambda: (r := {r[0]: r for r in shown(browser, "port-table")}["web"]) and number(r[4]) > 5 and number(r[6]) > 5 and r, 60)
        check(web[1] == "lan" and web[3] == "up" and rows, web)
        for _ in range(20):
            browser.keys("Tab")
            if browser.run("return document.activeElement.hash") == "#ports/web":
                break
        browser.keys("Enter")
        browser.wait("the port's counters", "return document.activeElement.id === 'port-name' && document.activeElement.innerText === 'web'")
        counters = dict(shown(browser, "port-counters"))
        frames = int(counters["Frames from it"].replace(",", ""))
        check(0 < frames <= fabric.port("web")["counters"]["rx_frames"], counters)
        check(any(int(row[2].replace(",", "")) > 0 for row in shown(browser, "port-turns")), "frames per turn")
        shot("ports")
        # Addresses, events, services.
        browser.open(f"http://{page.host}/#addresses")
        browser.wait("a lease", "return [...document.querySelectorAll('#lease-table th')].some((c) => c.innerText === '10.236.0.20')")
        lease = next(row for row in shown(browser, "lease-table") if row[0] == "10.236.0.20")
        check(lease[1].startswith("web.") and lease[3] == "lan", lease)
        until("MAC addresses", lambda: any(row[1] == "web" for row in shown(browser, "mac-table")), 30)
        check(True, "the forwarding table")
        shot("addresses")
        browser.open(f"http://{page.host}/#services")
        until("the service", lambda: any(row[0] == "calc" and row[6] for row in shown(browser, "service-table")), 60)
        before = next(row for row in shown(browser, "service-table") if row[0] == "calc")
        check(before[4] == "0" and before[5] == "0", before)
        for _ in range(3):
            check(fabric.cli("call", "calc", "6 * 7", "--deadline", "20s").stdout.strip() == "42", "an answer in time")
        fabric.cli("call", "calc", "6 * 7", "--deadline", "1us", "--wait-late", "5s", check=False)
        until("three deadlines met", lambda: next(row for row in shown(browser, "service-table") if row[0] == "calc")[4:6] == ["3", "1"], 30)
        check(True, "deadlines met and missed are counted")
        shot("services")
        browser.open(f"http://{page.host}/#events")
        until("the start", lambda: any("start" == row[1] for row in shown(browser, "event-table")), 30)
        first = shown(browser, "event-table")[0]
        fabric.cli("cell", "restart", "asker")
        until("the restart, live", lambda: shown(browser, "event-table")[0] != first, 30)
        check(any("asker" in row[2] for row in shown(browser, "event-table")[:6]), "the newest is first")
        shot("events")
        # A capture is downloaded, and read by a program that is not ours.
        browser.open(f"http://{page.host}/#captures")
        browser.wait("choices", "return document.querySelectorAll('#capture-of option').length > 2")
        browser.run("document.getElementById('capture-of').value = 'ports/web'; document.getElementById('capture-seconds').value = '60'; document.getElementById('capture-filter').value = 'nonsense'")
        browser.click("#capture-form button")
        browser.wait("the refusal", "return document.getElementById('capture-told').innerText.includes('nonsense')")
        check(not list(browser.downloads.iterdir()), "nothing is downloaded then")
        browser.run("document.getElementById('capture-filter').value = 'icmp'")
        browser.click("#capture-form button")
        until("frames", lambda: [r for r in shown(browser, "capture-table") if r[0] == "web" and r[2] not in ("0", "")], 60)
        shot("captures")
        browser.click("#capture-table button")
        file = browser.downloads / "web.pcapng"
        until("the file", file.exists, 30)
        read = subprocess.run(["tshark", "-r", file, "-T", "fields", "-e", "_ws.col.Protocol"], capture_output=True, text=True)
        check(read.returncode == 0 and read.stdout and set(read.stdout.split()) == {"ICMP"}, read)
        # A hostile console: text is text, and nothing is answered.
        browser.open(f"http://{page.host}/#consoles/web")
        browser.wait("the terminal", "return document.querySelector('.xterm-rows')?.innerText.trim().length > 0")
        # A restart goes on in the same terminal.
        lines = "const b = App.console.term.buffer.active; return [...Array(b.length).keys()].map((i) => b.getLine(i).translateToString(true)).filter(Boolean)"
        told = browser.run(lines)
        fabric.cli("cell", "restart", "web")
        until("the new start", lambda: len(browser.run(lines)) > len(told), 60)
        check(browser.run("return document.getElementById('terminal-state').innerText") == "connected", "a restarted machine is followed")
        sent = browser.run("""
            const sent = [];
            App.console.term.onData((data) => sent.push(data));
            const evil = arguments[0] + "\\x1b[c\\x1b[>c\\x1b[6n\\x1b[?6n\\x1b]52;c;ZXZpbA==\\x07\\x1b]8;;javascript:alert(1)\\x07link\\x1b]8;;\\x07\\x1b]0;title\\x07\\x1b]11;?\\x07\\x1bP$q m\\x1b\\\\\\x1b[38;2;200;60;60mred\\x1b[0m\\r\\n";
            return new Promise((done) => App.console.term.write(evil, () => setTimeout(() => done(sent), 300)));""", HOSTILE)
        check(sent == [], f"what a guest prints types nothing: {sent}")
        check(HOSTILE in browser.run("return document.querySelector('.xterm-rows').textContent").replace("\u00a0", " "), "text of a guest is text")
        check(browser.run("return document.querySelectorAll('main img').length") == 0, "and no element")
        check("title" not in browser.run("return document.title") and fabric.name in browser.run("return document.title"), "the title stays")
        names = browser.run("""
            App.status.ports[0].name = arguments[0]; App.status.networks[0].leases.push({ip: '10.0.0.1', name: arguments[0], mac: 'x', fixed: true, expires_s: null});
            showPorts(App.status); showAddresses(App.status); drawNetworks(document.getElementById('drawings'), App.status, App.rates, App.history);
            return [document.querySelectorAll('main img, main script').length, document.getElementById('lease-table').innerText.length > 0]""", HOSTILE)
        check(names[0] == 0, "hostile names make no elements")
        shot("consoles")
        browser.keys("Control+Shift+F6")
        check(browser.run("return document.activeElement.id") == "terminal-close", "the terminal can be left by keys")
        # Nothing from elsewhere, nothing that the policy had to refuse.
        check(all(address.startswith(f"http://{page.host}/") for address in browser.requests_of()), browser.requests_of())
        said = [line for line in browser.complaints() if "401" not in line and "400" not in line and "favicon" not in line]
        check(not said, said)
        axe = ROOT / "tests/lib/axe/axe.min.js"
        for name in ("networks", "ports/web", "consoles", "addresses", "forwards", "captures", "services", "events"):
            browser.open(f"http://{page.host}/#{name}")
            browser.wait("the view", "return !document.querySelector(`[data-view=${arguments[0]}]`).hidden", name.split("/")[0])
            for scheme in ("light", "dark"):
                browser.scheme(scheme)
                found = browser.run(axe.read_text() + "; return axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']}).then((r) => r.violations.map((v) => [v.id, v.nodes.map((n) => n.html + n.failureSummary).slice(0, 4)]))")
                check(found == [], f"{name} {scheme}: {json.dumps(found, indent=1)}")
        browser.scheme("light")
        # The daemon goes, and the page says so; a machine of the fabric that is up again is shown
        # again.
        fabric.kill()
        browser.wait("a word about it", "return !document.getElementById('fault').hidden")
        fabric.start()
        browser.wait("the fabric again", "return document.getElementById('fault').hidden")
        check(browser.run("return App.status.pid") == fabric.status()["pid"], "it shows the next daemon")
        browser.click("#close")
        browser.wait("the gate", "return !document.getElementById('gate').hidden")
        check(page.process.alive(), "the server goes on")
        browser.open(page.another())
        browser.wait("another session", "return document.getElementById('fabric').innerText === arguments[0]", fabric.name)
        check(True, "Enter gives another link")


@timeout(240)
def test_a_console_takes_what_is_typed_and_shows_the_answer():
    kernel = BUILD / "guest/vmlinux"
    if not kernel.exists():
        raise Skip("build/guest is not there: run ./x guest")
    linux = LINUX.format(kernel=kernel, initrd=BUILD / "guest/initramfs.cpio", cmdline=linux_cmdline("linux", "", "net=dhcp"))
    with standing("wc", linux) as (folder, fabric, page), Browser(folder) as browser:
        browser.open(page.link)
        browser.wait("the machines", "location.hash = '#consoles'; return document.querySelectorAll('#machine-table button').length > 3")
        until("the guest's commands", lambda: "@control " in fabric.console("linux"), 180)
        browser.run("[...document.querySelectorAll('#machine-table tr')].find((r) => r.dataset.key === 'linux').querySelector('button').focus()")
        browser.keys("Enter")
        screen = "return document.querySelector('.xterm-rows')?.textContent.replaceAll('\\u00a0', ' ') ?? ''"
        browser.wait("the guest's words", f"return (() => {{ {screen} }})().includes('@control')")
        check(browser.run("return document.activeElement.getAttribute('aria-label')") == "Console of linux", "the terminal has the focus")
        browser.keys("@7 echo $((6*7))-ä", "Enter")
        until("the answer", lambda: "@7|42-" in browser.run(screen), 60)
        check("@7=0" in until("its end", lambda: "@7=0" in (text := browser.run(screen)) and text, 30), "the guest did it")
        check("@7|42-" in fabric.console("linux"), "and it is in the console's own file")
        if "TOMBOLO_SHOTS" in os.environ:
            browser.screenshot(Path(os.environ["TOMBOLO_SHOTS"]) / "typed.png")
        browser.click("#terminal-close")
        check(browser.run("return document.getElementById('terminal-box').hidden && App.console === null"), "a console is closed")
