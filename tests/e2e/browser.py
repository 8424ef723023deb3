"""Debian's chromium, driven as a person would drive it, with ears for what its console says."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.waiting import eventually

LIMIT_S = 60.0
_EARS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (e) => violations.push(e.violatedDirective + " " + e.blockedURI));
"""


class Browser:
    """One window. What a page logs and what its policy forbids is kept since the last `complaints`."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _EARS})

    def open(self, url: str) -> None:
        self.driver.get(url)
        eventually(lambda: self.find("#health[data-state]"), "the page runs", LIMIT_S)

    def find(self, selector: str) -> WebElement | None:
        found = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return found[0] if found else None

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        """Wait for an element that is seen."""

        def seen() -> WebElement | None:
            found = self.find(selector)
            return found if found is not None and found.is_displayed() else None

        return eventually(seen, f"{selector} is seen", LIMIT_S)  # type: ignore[return-value]

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)  # type: ignore[no-untyped-call]

    def text(self, selector: str) -> str:
        """Read the text of the last element that fits, as it is in the document; empty when there is none."""
        script = "return [...document.querySelectorAll(arguments[0])].at(-1)?.textContent ?? ''"
        text: str = self.js(script, selector)
        return text

    def wait_text(self, selector: str, part: str) -> str:
        """Wait until an element's text holds a part."""
        return eventually(
            lambda: (t := self.text(selector)) if part in self.text(selector) else "", f"{selector} says {part!r}"
        )

    def complaints(self) -> list[str]:
        """Give console errors and violations of the policy since the last time."""
        logged = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]  # type: ignore[no-untyped-call]
        return logged + self.js("return violations.splice(0)")

    def dark(self, is_dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def size(self, width: int, height: int, *, mobile: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def forget(self) -> None:
        """Let go of the page and of what it keeps of the last test."""
        self.driver.get(self.js("return location.origin") + "/page/icon.svg")  # the page saves itself as it goes
        self.js("sessionStorage.clear(); localStorage.clear()")
        self.driver.get("about:blank")
        self.complaints()  # a picture by itself has no icon


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser. It shares nothing with others and leaves nothing behind."""
    program, driver_program = shutil.which("chromium"), shutil.which("chromedriver")
    assert program and driver_program, "chromium and chromium-driver are not installed (Debian: apt-get install both)"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = program
        flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # chromium refuses to have one as root
        for flag in (*flags, f"--user-data-dir={Path(profile) / 'profile'}", "--window-size=1280,860"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = Chrome(options=options, service=Service(driver_program))
        try:
            yield Browser(driver)
        finally:
            driver.quit()
