"""Open every page of build/site in chromium, wide and narrow, light and dark, and report what is wrong with it.

Horizontal overflow, errors on the console, requests to other hosts, diagrams whose texts overlap or leave their box.
Ends with 1 if there is any.

    make docs && python scripts/see_site.py [--pictures FOLDER] [--search "reward stays zero"]
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

SITE = Path(__file__).parents[1] / "build/site"
OVERFLOW = """
const width = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth <= width) return [];
return [...document.querySelectorAll('.md-content *')]
  .filter((e) => e.getBoundingClientRect().right > width + 1 && !e.closest('pre, .md-typeset__scrollwrap'))
  .slice(0, 3).map((e) => e.tagName + ': ' + e.textContent.trim().slice(0, 60)).concat(['wider than the window']);
"""
TEXTS = """
const found = [];
for (const svg of document.querySelectorAll('.diagram svg')) {
  const whole = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].map((t) => [t.textContent, t.getBoundingClientRect()]);
  for (const [i, [a, p]] of texts.entries()) {
    if (p.left < whole.left - 1 || p.right > whole.right + 1) found.push('leaves the diagram: ' + a);
    for (const [b, q] of texts.slice(i + 1))
      if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 2 && q.top < p.bottom - 2)
        found.push(`overlap: ${a} / ${b}`);
  }
}
return found;
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def browser(width: int, dark: bool) -> webdriver.Chrome:
    options = Options()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    return driver


def faults(driver: webdriver.Chrome, base: str, dark: bool) -> list[str]:
    """What is wrong with the page that is open."""
    found = driver.execute_script(OVERFLOW) + driver.execute_script(TEXTS)
    found += [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        url = message.get("params", {}).get("request", {}).get("url", "")
        if message["method"] == "Network.requestWillBeSent" and not url.startswith((base, "data:", "blob:")):
            found.append(f"asks another host: {url}")
    scheme = driver.execute_script("return document.body.dataset.mdColorScheme")
    if scheme != ("slate" if dark else "default"):
        found.append(f"the colour scheme is {scheme}")
    return found


def search(driver: webdriver.Chrome, base: str, question: str) -> list[str]:
    """Titles and addresses of the first results."""
    driver.get(f"{base}/index.html?q={question.replace(' ', '%20')}")
    for _ in range(40):
        time.sleep(0.25)
        found = driver.execute_script(
            "return [...document.querySelectorAll('.md-search-result__link')].slice(0, 6)"
            ".map((a) => [a.querySelector('h1, h2').textContent.trim(), new URL(a.href)])"
            ".map(([title, url]) => `${title}  ${url.pathname}${url.hash}`)"
        )
        if found:
            return found
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=Path, help="folder for a screenshot of each page")
    parser.add_argument("--search", action="append", default=[], help="print the first results of a question")
    parser.add_argument("--only", default="", help="pages whose path contains this")
    options = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    if options.search:
        driver = browser(1280, dark=False)
        for question in options.search:
            print(f"\n{question}")
            for line in search(driver, base, question):
                print("  ", line)
        driver.quit()
        return
    pages = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html") if options.only in str(path))
    bad = 0
    for width in (1280, 390):
        for dark in (False, True):
            driver = browser(width, dark)
            for page in pages:
                driver.get(f"{base}/{page}")
                name = f"{width} {'dark' if dark else 'light'} {page}"
                for fault in dict.fromkeys(faults(driver, base, dark)):
                    bad += 1
                    print(f"{name}: {fault}")
                if options.pictures:
                    options.pictures.mkdir(parents=True, exist_ok=True)
                    driver.save_screenshot(str(options.pictures / f"{name.replace('/', '_').replace(' ', '-')}.png"))
            driver.quit()
    print(f"{len(pages)} pages at 1280 and 390 px, light and dark: {bad} faults")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
