"""A headless Chromium for tests, driven over the WebDriver protocol (W3C WebDriver, 2018) through chromedriver."""

import base64
import json
import shutil
import urllib.error
import urllib.request

from .machine import Skip
from .process import Process, until

KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Shift": "\ue008", "Control": "\ue009", "F6": "\ue036", "Escape": "\ue00c"}
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One window. `scheme` is what the system prefers: "light" or "dark". Downloads go to `downloads`."""

    def __init__(self, folder, scheme="light", size=(1280, 900)):
        if not shutil.which("chromedriver") or not shutil.which("chromium"):
            raise Skip("chromium and chromedriver are not installed: ./x setup browser")
        self.downloads = folder / "downloads"
        self.downloads.mkdir(exist_ok=True)
        self.session = None
        home = folder / "browser-home"
        home.mkdir(exist_ok=True)
        self.driver = Process(["chromedriver", "--port=0", "--log-level=WARNING"], name="chromedriver", env={"HOME": str(home)})
        try:
            _, line, _ = self.driver.wait_line(lambda line: "started successfully on port" in line, 60)
            self.base = f"http://127.0.0.1:{line.rstrip('.').split()[-1]}"
            words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
                     "--disable-component-update", f"--window-size={size[0]},{size[1]}", f"--user-data-dir={folder / 'profile'}"]
            preferences = {"download.default_directory": str(self.downloads), "download.prompt_for_download": False}
            options = {"args": words, "prefs": preferences, "binary": shutil.which("chromium")}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            self.session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}}, seconds=120)["sessionId"]
            self.scheme(scheme)
        except BaseException:
            self.close()
            raise

    def _call(self, method, path, body=None, seconds=60):
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"browser: {json.loads(error.read())['value']['message'][:600]}") from None

    def _ask(self, method, path, body=None):
        return self._call(method, f"/session/{self.session}{path}", body)

    def open(self, url):
        self._ask("POST", "/url", {"url": url})

    def run(self, script, *arguments):
        """The value that a script returns; a promise is waited for."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector):
        return self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText ?? e.textContent).join('\\n')", selector)

    def wait(self, what, script, *arguments, seconds=60):
        """Waits until a script gives something true; gives that."""
        return until(what, lambda: self.run(script, *arguments), seconds, every=0.2)

    def click(self, selector):
        element = self._ask("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]
        self._ask("POST", f"/element/{element}/click")

    def keys(self, *keys):
        """Presses keys where the focus is: names of KEYS, with "+" for those held at once, or text."""
        actions = []
        for key in keys:
            held = [KEYS[part] for part in key.split("+")] if all(part in KEYS for part in key.split("+")) else None
            for one in held or key:
                actions.append({"type": "keyDown", "value": one})
                if not held:
                    actions.append({"type": "keyUp", "value": one})
            actions += [{"type": "keyUp", "value": one} for one in reversed(held or [])]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def scheme(self, scheme):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self._ask("POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": media})

    def requests_of(self):
        """The addresses of all that the page loaded."""
        return self.run("return performance.getEntriesByType('resource').map((e) => e.name)")

    def complaints(self):
        """What the page's console says since the last call."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def close(self):
        if self.session:
            try:
                self._call("DELETE", f"/session/{self.session}")
            except (AssertionError, OSError):
                pass
        self.driver.stop()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
