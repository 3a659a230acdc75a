"""Headless Chromium, driven by its debugging protocol over a pair of pipes: no port, no package, no driver."""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time

LIMIT_S = 20  # for one thing to happen; generous, as other tests may share the cores
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
DESKTOP = {"width": 1440, "height": 900, "deviceScaleFactor": 1, "mobile": False}
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}


def chromium():
    """The path of a Chromium or Chrome, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A Chromium with a profile of its own in `folder`. Downloads go to `folder / "downloads"`."""

    def __init__(self, folder):
        self.downloads = folder / "downloads"
        self._last_id, self._buffer, self._pages = 0, b"", {}
        ours, theirs = os.pipe(), os.pipe()
        # The browser reads from descriptor 3 and writes to 4. Those that are copied to there must be others.
        reads, writes = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (ours[0], theirs[1]))
        os.close(ours[0])
        os.close(theirs[1])
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--disable-background-networking", "--disable-component-update", "--disable-extensions"]
        self.process = subprocess.Popen(
            [chromium(), *flags, f"--user-data-dir={folder}/profile", "--remote-debugging-pipe", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=lambda: (os.dup2(reads, 3), os.dup2(writes, 4)),
        )
        os.close(reads)
        os.close(writes)
        self._to, self._from = ours[1], theirs[0]
        self.call(
            "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads), eventsEnabled=False
        )

    def page(self, url, size=DESKTOP):
        """A new page of this size in CSS pixels, once `url` is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(size)
        page.open(url)
        return page

    def call(self, method, session=None, **params):
        """The result of a command of the protocol. Fails if the browser says that it could not."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + LIMIT_S
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            if answer.get("sessionId") in self._pages:
                self._pages[answer["sessionId"]].events.append((answer["method"], answer["params"]))

    def _receive(self, deadline, method):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"the browser does not answer to {method}"
            chunk = os.read(self._from, 2**20)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def close(self):
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for fd in (self._to, self._from):
            os.close(fd)


class Page:
    """A tab."""

    def __init__(self, browser, session):
        self._browser, self._session = browser, session
        self.events = []  # (method, params)
        self.expected_problems = []  # those of `problems` that a test is about

    def call(self, method, **params):
        return self._browser.call(method, self._session, **params)

    def open(self, url):
        self._load("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def reload(self):
        self._load("Page.reload")

    def _load(self, method, **params):
        """Do what loads the page, and wait until it is loaded."""

        def times():
            return sum(method == "Page.loadEventFired" for method, _ in self.events)

        before, deadline = times(), time.monotonic() + LIMIT_S
        self.call(method, **params)
        while times() == before:
            assert time.monotonic() < deadline, f"not loaded: {method} {params}"
            self.call("Page.getLayoutMetrics")  # which also takes in events
            time.sleep(0.02)

    def run(self, code):
        """The JSON value of a JavaScript expression, awaited if it is a promise."""
        result = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True, userGesture=True)
        assert "exceptionDetails" not in result, (code, result["exceptionDetails"])
        return result["result"].get("value")

    def until(self, code):
        """The first value of an expression that is true; True if it is a node of the page."""
        deadline = time.monotonic() + LIMIT_S
        while not (value := self.run(f"((value) => value instanceof Node || value)({code})")):
            assert time.monotonic() < deadline, f"never true: {code}\n{self.run('document.body.innerText')}"
            time.sleep(0.02)
        return value

    def click(self, selector, text=None):
        """Press what a user would: the first visible element of a CSS selector, and with this text if one is given."""
        found = f"""[...document.querySelectorAll({json.dumps(selector)})].find((node) => node.checkVisibility()
          && ({json.dumps(text)} === null || node.textContent.trim() === {json.dumps(text)}))"""
        box = self.until(f"""(() => {{
          const node = {found};
          if (!node || node.disabled) return null;
          node.scrollIntoView({{ block: "nearest" }});
          const {{ x, y, width, height }} = node.getBoundingClientRect(), at = [x + width / 2, y + height / 2];
          return node.contains(document.elementFromPoint(...at)) ? at : null; // not covered by another
        }})()""")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text, selector=None):
        """Put text where the cursor is, or in place of what is in a field."""
        if selector is not None:
            self.run(f"""(() => {{
              const node = document.querySelector({json.dumps(selector)});
              node.focus();
              node.select();
            }})()""")
        self.call("Input.insertText", text=text)

    def press(self, key, shift=False):
        code, text = _KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def choose_file(self, selector, path):
        found = self.call("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")
        self.call("DOM.setFileInputFiles", objectId=found["result"]["objectId"], files=[str(path)])

    def resize(self, size):
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setTouchEmulationEnabled", enabled=size["mobile"])

    def prefer(self, **features):
        """Set media features: `prefers_color_scheme="dark"`."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)

    def close(self):
        self.call("Page.close")

    @property
    def problems(self):
        """What the browser has complained of: exceptions, errors, warnings, violations of the policy."""
        self.run("0")
        found = []
        for method, params in self.events:
            if method == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"]["exception"].get("description", str(params)))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
        return found

    @property
    def requested(self):
        """The addresses of all requests that the page has made."""
        self.run("0")
        return [params["request"]["url"] for method, params in self.events if method == "Network.requestWillBeSent"]
