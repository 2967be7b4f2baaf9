"""Debian's chromium, driven by selenium, and the server of the page as a separate process."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NEEDS = {"chromium": shutil.which("chromium"), "chromedriver": shutil.which("chromedriver")}
LACKS = [name for name, path in NEEDS.items() if path is None]
LACKS += ["the package selenium"] * (importlib.util.find_spec("selenium") is None)


@contextmanager
def watching(root: Path) -> Iterator[str]:
    """`forge watch` over a folder; gives its address."""
    command = [sys.executable, "-m", "forge", "watch", str(root), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1]
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="session")
def browser(processes: None) -> Iterator[Any]:
    """A page of 1280 by 900; skipped where there is no browser."""
    if LACKS:
        pytest.skip(f"there is no {', '.join(LACKS)}: apt-get install chromium chromium-driver; pip install selenium")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.binary_location = NEEDS["chromium"] or ""
    driver = webdriver.Chrome(options, webdriver.ChromeService(NEEDS["chromedriver"]))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Any) -> Iterator[Page]:
    """Fails the test if the page has logged an error."""
    found = Page(browser)
    found.look(1280)
    yield found
    found.leave()
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []


class Page:
    """What a user does with the page."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def look(self, width: int, dark: bool = False) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    @contextmanager
    def watching(self, root: Path) -> Iterator[str]:
        """`forge watch` over a folder, which ends after this page has left it: a page logs what is not answered."""
        with watching(root) as url:
            yield url
            self.leave()

    def leave(self) -> None:
        self.browser.get("about:blank")

    def open(self, url: str) -> None:
        self.leave()
        self.browser.get(url)

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def text(self, selector: str = "main") -> str:
        return self.browser.find_element("css selector", selector).text

    def value(self, selector: str) -> str:
        return self.browser.find_element("css selector", selector).get_attribute("value")

    def wait(self, what: Callable[[], Any], seconds: float = 60) -> Any:
        """The first true value; elements that the page has just replaced are looked up again."""
        from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        ignored = (StaleElementReferenceException, NoSuchElementException)
        return WebDriverWait(self.browser, seconds, 0.1, ignored).until(lambda _: what())

    def texts(self, selector: str) -> list[str]:
        return self.browser.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map((node) => node.innerText)", selector
        )

    def click(self, selector: str, at: int = 0) -> None:
        self.browser.execute_script(
            "[...document.querySelectorAll(arguments[0])].at(arguments[1]).click()", selector, at
        )

    def type(self, selector: str, text: str) -> None:
        box = self.browser.find_element("css selector", selector)
        box.clear()
        box.send_keys(text)

    def choose(self, selector: str, value: str) -> None:
        from selenium.webdriver.support.ui import Select

        Select(self.browser.find_element("css selector", selector)).select_by_value(value)

    def overlaps(self) -> list[str]:
        """What is wider than the window, and cards that lie on one another."""
        return self.browser.execute_script(
            """
            const found = document.documentElement.scrollWidth > innerWidth ? ["the page is too wide"] : [];
            const blocks = ".card, .alert, .controls, #lanes, #found, h2";
            const boxes = [...document.querySelectorAll(blocks)].map((node) => [node, node.getBoundingClientRect()]);
            for (const [a, x] of boxes) for (const [b, y] of boxes) {
              if (a === b || a.contains(b) || b.contains(a) || !x.width || !y.width) continue;
              const alongside = x.left >= y.right - 1 || y.left >= x.right - 1;
              if (alongside || x.top >= y.bottom - 1 || y.top >= x.bottom - 1) continue;
              found.push(`${a.className || a.tagName} on ${b.className || b.tagName}`);
            }
            return found;
            """
        )
