"""Check the built site in Chromium: no table is cut off, and searches list their page first.

    pip install -e ".[docs]" aiohttp && mkdocs build -f notebooks/mkdocs.yml -d SITE
    python .ci/site.py SITE

Exit status 1 if a table is cut at 1280 or 400 pixels, scrolls without a shadow, or if a search does
not find one of its pages first.
"""

import asyncio
import functools
import http.server
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import aiohttp

SEARCHES = {
    "H100": ("performance", "compatibility"),
    "speedup": ("performance",),
    "limitations": ("limits",),
    "FAQ": ("faq",),
    "cite": ("faq",),
    "learning rate": ("first-hour",),
    "multi-GPU": ("how-to/multi-gpu",),
    "Hugging Face": ("how-to/hugging-face",),
    "NaN": ("how-to/nan",),
    "memory": ("performance", "limits", "how-to/five-bytes"),
}
# The number of tables of a page, and of those that are cut, or scroll without a shadow.
TABLES = r"""(() => {
  const article = document.querySelector('article'), edge = article.getBoundingClientRect().right;
  let count = 0, cut = 0;
  for (const table of article.querySelectorAll('table')) {
    if (!table.getBoundingClientRect().width || table.closest('.highlighttable')) continue;
    count++;
    let box = table;
    while (box !== article && !(box.scrollWidth > box.clientWidth + 1
        && getComputedStyle(box).overflowX !== 'visible')) box = box.parentElement;
    const style = getComputedStyle(box);
    cut += box === article ? table.getBoundingClientRect().right > edge + 1
      : /hidden|clip/.test(style.overflowX) || !/gradient/.test(style.backgroundImage);
  }
  return [count, cut];
})()"""
FIND = r"""(async () => {
  const input = document.querySelector('[data-md-component=search-query]');
  document.querySelector('#__search').checked = true;
  input.focus();
  input.value = %r;
  for (const kind of ['focus', 'keydown', 'keyup', 'input', 'change'])
    input.dispatchEvent(new Event(kind, {bubbles: true}));
  await new Promise(done => setTimeout(done, 3000));
  return document.querySelector('.md-search-result__item a')?.getAttribute('href') ?? '';
})()"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        del args


class Page:
    """A page of a headless Chromium, over its debugging port."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket, self.calls = socket, 0

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.calls += 1
        await self.socket.send_json({"id": self.calls, "method": method, "params": params})
        while (answer := await self.socket.receive_json()).get("id") != self.calls:
            pass
        return answer["result"]

    async def run(self, script: str) -> Any:
        answer = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        return answer["result"].get("value")

    async def open(self, address: str) -> None:
        await self.call("Page.navigate", url=address)
        await asyncio.sleep(0.2)
        while await self.run("document.readyState") != "complete":
            await asyncio.sleep(0.1)


async def check(site: Path, base: str, page: Page) -> bool:
    found = True
    for width in (1280, 400):
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
        await page.call("Emulation.setDeviceMetricsOverride", **size)
        total = cut = 0
        for path in sorted(site.rglob("index.html")):
            await page.open(f"{base}/{path.parent.relative_to(site).as_posix()}/")
            tables, wrong = await page.run(TABLES)
            total, cut = total + tables, cut + wrong
            if wrong:
                print(f"{width} pixels: {wrong} cut on {path.parent.relative_to(site)}")
        print(f"{width} pixels: {cut} of {total} tables are cut, or scroll without a shadow")
        found = found and not cut
    await page.call("Emulation.clearDeviceMetricsOverride")
    for words, wanted in SEARCHES.items():
        await page.open(f"{base}/")
        first = (await page.run(FIND % words)).removeprefix(base).split("?")[0].split("#")[0]
        right = first.strip("/") in wanted
        print(f"{'right' if right else 'wrong'}: {words!r} finds {first}")
        found = found and right
    return found


async def main(site: Path) -> bool:
    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    profile = Path(tempfile.mkdtemp())
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "--window-size=1280,1000"]
    browser = subprocess.Popen(["chromium", *flags, "about:blank"], stderr=subprocess.DEVNULL)
    try:
        while not (port := profile / "DevToolsActivePort").exists() or not port.read_text():
            await asyncio.sleep(0.1)
        debugger = f"http://127.0.0.1:{port.read_text().split()[0]}/json"
        async with aiohttp.ClientSession() as session, session.get(debugger) as answer:
            pages = [page for page in await answer.json() if page["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as ws:
                return await check(site, f"http://127.0.0.1:{server.server_port}", Page(ws))
    finally:
        browser.terminate()


if __name__ == "__main__":
    sys.exit(not asyncio.run(main(Path(sys.argv[1]).resolve())))
