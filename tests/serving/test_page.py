"""The page of fastcross serve in headless Chromium, where there is one: a row is filled in, scored and taken apart."""

import asyncio
import base64
import json
import re
import shutil
import subprocess

import pytest

from tests.serving.test_process import Process

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("starlette")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FILL = """
for (const [name, value] of Object.entries(%s)) document.querySelector(`[data-column="${name}"]`).value = value;
document.querySelector("button").click();
"""
SHOWN = """JSON.stringify([
  document.getElementById("answer").textContent,
  [...document.getElementById("parts").rows].map(row => [...row.cells].map(cell => cell.textContent)),
])"""


class Browser:
    """A tab, by the DevTools protocol."""

    def __init__(self, socket):
        self.socket, self.number = socket, 0

    async def __call__(self, method, **parameters):
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": parameters})
        while True:
            found = await self.socket.receive_json(timeout=60)
            if found.get("id") == self.number:
                assert "error" not in found, found
                return found["result"]

    async def evaluate(self, script):
        found = await self("Runtime.evaluate", expression=script)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script, wanted):
        for _ in range(600):
            if wanted(found := await self.evaluate(script)):
                return found
            await asyncio.sleep(0.1)
        raise AssertionError(found)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_page(movies, tmp_path):
    server = Process(movies / "run")
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        "--window-size=1000,1500",
    ]
    chromium = subprocess.Popen([*command, f"--user-data-dir={tmp_path}"], stderr=subprocess.PIPE, text=True)
    try:
        found = next(filter(None, (re.search(r"ws://([^/]+)/", line) for line in chromium.stderr)))
        screenshot = asyncio.run(look(f"http://{found[1]}", f"http://127.0.0.1:{server.port}/"))
        (tmp_path / "page.png").write_bytes(screenshot)
    finally:
        for process in (chromium, server.process):
            process.terminate()
            process.wait(60)


async def look(browser, page):
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{browser}/json/new?{page}") as answer:
            address = (await answer.json())["webSocketDebuggerUrl"]
        async with session.ws_connect(address, max_msg_size=0) as socket:
            tab = Browser(socket)
            await tab.until('document.querySelector("form") && document.readyState', lambda state: state == "complete")
            await tab.evaluate(FILL % json.dumps({"user": "u3", "film": "7", "age": "thirty"}))
            said = await tab.until('document.getElementById("answer").textContent', bool)
            assert said == "row 1: column age must be a finite number; got 'thirty'"
            row = {"age": "33", "genres": "Drama|Comedy", "seen_at": "2024-02-03 12:00:00", "country": "DE"}
            await tab.evaluate(FILL % json.dumps(row))
            shown = await tab.until(SHOWN, lambda text: "the logit" in text)
            answer, lines = json.loads(shown)
            assert re.fullmatch(r"probability of 0: 0\.\d+, probability of 1: 0\.\d+, probability of 2: 0\.\d+", answer)
            assert [lines[0][0], lines[-2][0][-13:], lines[-1][0]] == ["constant", "smaller parts", "the logit"]
            *effects, logit = (float(line[-1].replace("−", "-")) for line in lines)
            assert abs(sum(effects) - logit) < 1e-3
            assert any(re.search("(user = u3|film = 7|country = DE)", line[0]) for line in lines)
            return base64.b64decode((await tab("Page.captureScreenshot", captureBeyondViewport=True))["data"])
