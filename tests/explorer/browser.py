"""Drives Chromium through pipes, with the DevTools protocol: JSON messages that end with a zero byte."""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
TIMEOUT = 60.0  # seconds for one answer
PANELS = ("cell", "tiles", "cache", "devices", "diff")
TROUBLE = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")  # events of errors and messages


class Browser:
    """One Chromium process."""

    def __init__(self, profile):
        """`profile` is a new, empty directory."""
        read_by_it, self._to = os.pipe()
        self._from, written_by_it = os.pipe()
        # Copies with high numbers: Chromium reads messages from 3 and writes them to 4.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 64) for end in (read_by_it, written_by_it)]
        actions = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, end, fd) for end, fd in zip(ends, (3, 4), strict=True)]
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._pid = os.posix_spawn(CHROMIUM, command, os.environ, file_actions=actions, setpgroup=0)
        for end in (*ends, read_by_it, written_by_it):
            os.close(end)
        self._buffer, self._next = b"", 0
        self.events = []

    def close(self):
        """Ends the process and its children."""
        os.close(self._to)
        os.close(self._from)
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def send(self, method, session=None, **parameters):
        """The result of one call. Events that arrive before it are stored."""
        self._next += 1
        message = dict(id=self._next, method=method, params=parameters) | (dict(sessionId=session) if session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._next:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _read(self, deadline):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError("Chromium did not answer in time.")
            read = os.read(self._from, 1 << 20)
            if not read:
                raise RuntimeError("Chromium ended.")
            self._buffer += read
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)


class Tab:
    """One page of a browser."""

    def __init__(self, browser, width=1200, height=860):
        self.browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def send(self, method, **parameters):
        return self.browser.send(method, self.session, **parameters)

    def resize(self, width, height, density=1):
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=density, mobile=False
        )

    def prefer(self, scheme):
        """Sets the colours that pages are asked for: "light" or "dark"."""
        self.send("Emulation.setEmulatedMedia", features=[dict(name="prefers-color-scheme", value=scheme)])

    def open(self, url):
        """Loads a page and waits until it is drawn."""
        self.send("Page.bringToFront")  # a tab that is not seen draws nothing
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)
        self.wait("document.documentElement?.dataset.ready === 'true'")

    def run(self, expression):
        """The value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition, seconds=30.0):
        """Waits until an expression in the page is true."""
        deadline = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < deadline, f"not true after {seconds} seconds: {condition}"
            time.sleep(0.02)

    def drawn(self):
        """Waits until the page is drawn."""
        self.wait("document.documentElement?.dataset.ready === 'true'")

    def mouse(self, kind, x, y, **more):
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x, y):
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def press(self, key, text=""):
        more = dict(text=text) if text else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path, whole=False):
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        more = dict(captureBeyondViewport=True, clip=size | dict(scale=1)) if whole else {}
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", **more)["data"]))


def state(tab):
    """What the page mirrors in its script `state`."""
    return json.loads(tab.run("document.getElementById('state').textContent"))


def text(tab, name):
    """The visible text of an element."""
    return tab.run(f"document.getElementById({name!r}).innerText")


def is_shown(tab, name):
    """Whether an element is visible."""
    return tab.run(f"document.getElementById({name!r}).checkVisibility()")
