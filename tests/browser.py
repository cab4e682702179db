"""A browser that tests drive: Debian's chromium, headless, by its DevTools protocol over two pipes."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium")


class Browser:
    """One page. errors: what it has written to its console as errors, and exceptions that nobody caught."""

    def __init__(self, folder):
        (theirs, self.to), (self.of, ours) = os.pipe(), os.pipe()

        def place():  # the protocol's: it reads from 3 and writes to 4
            a, b = os.dup(theirs), os.dup(ours)
            os.dup2(a, 3), os.dup2(b, 4)

        self.process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"], preexec_fn=place, close_fds=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs), os.close(ours)
        self.number, self.session, self.errors, self.read, self.messages = 0, None, [], b"", []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in "Page", "Runtime", "Log":
            self.call(f"{domain}.enable")
        self.resize(1440, 1200)

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 700)

    def call(self, method, timeout=120, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        deadline = time.time() + timeout
        while True:
            answer = self.next(deadline)
            if answer.get("id") == self.number:
                problem = answer.get("error", {}).get("message", "")
                if "navigated" in problem or "destroyed" in problem:  # the page reloads, so ask the new one
                    return self.call(method, timeout, **parameters)
                assert not problem, problem
                return answer["result"]

    def next(self, deadline):
        while b"\0" not in self.read:
            assert select.select([self.of], [], [], max(0, deadline - time.time()))[0], "the browser is silent"
            self.read += os.read(self.of, 1 << 20)
        text, _, self.read = self.read.partition(b"\0")
        message = json.loads(text)
        what, parameters = message.get("method"), message.get("params", {})
        if what == "Runtime.exceptionThrown":
            self.errors.append(parameters["exceptionDetails"]["exception"].get("description"))
        if what == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        return message

    def run(self, script):
        """The value of a JavaScript expression, which may be a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script, timeout=60):
        """Until a JavaScript expression is true."""
        deadline = time.time() + timeout
        while not self.run(f"Boolean({script})"):
            assert time.time() < deadline, (script, self.run("$('said').textContent + $('refused')?.textContent"))
            time.sleep(0.02)

    def open(self, url, ready):
        """Of a page that is there, another place is no new page, so there is none between."""
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.call("Page.navigate", url=url)
        self.wait(f"location.href !== 'about:blank' && document.readyState === 'complete' && ({ready})")

    def close(self):
        with contextlib.suppress(OSError):
            os.close(self.to)
        self.process.kill()
        self.process.wait()
        os.close(self.of)
