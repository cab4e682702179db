"""A browser that tests drive: Debian's chromium, headless, by its DevTools protocol over two pipes."""

import json
import os
import select
import subprocess
import time


class Browser:
    """One page. errors: exceptions that nobody caught, and what its console has of errors."""

    def __init__(self, folder):
        (theirs, self.to), (self.of, ours) = os.pipe(), os.pipe()

        def place():  # the protocol's: it reads from 3 and writes to 4
            a, b = os.dup(theirs), os.dup(ours)
            os.dup2(a, 3), os.dup2(b, 4)

        self.process = subprocess.Popen(
            ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--window-size=1440,1200", "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=place, close_fds=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        os.close(theirs), os.close(ours)
        self.number, self.session, self.errors, self.read = 0, {}, [], b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        for domain in "Page", "Runtime", "Log":
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self.number += 1
        os.write(self.to, json.dumps({"id": self.number, "method": method, "params": parameters,
                                      **self.session}).encode() + b"\0")
        while True:
            answer = self.next()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def next(self):
        while b"\0" not in self.read:
            assert select.select([self.of], [], [], 60)[0], "the browser is silent"
            self.read += os.read(self.of, 1 << 20)
        text, _, self.read = self.read.partition(b"\0")
        message = json.loads(text)
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.errors.append(message["params"])
        return message

    def run(self, script):
        """The value of a JavaScript expression, which may be a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True,
                           userGesture=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script):
        """Until a JavaScript expression is true."""
        deadline = time.time() + 60
        while not self.run(f"Boolean({script})"):
            assert time.time() < deadline, (script, self.run("document.body.innerText"))
            time.sleep(0.02)

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href === '{url}'")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.to), os.close(self.of)
