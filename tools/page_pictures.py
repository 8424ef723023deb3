"""Take the pictures of the page that the documentation shows: `make page-pictures`, into docs/images.

The chat is one with the embedded model; the pipeline is one around the fake engine under load, in the moment after an
engine was killed. Needs chromium and chromium-driver.
"""

import random
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
from selenium.webdriver.common.keys import Keys

from tests.e2e.browser import Browser, chromium
from tests.e2e.stack import Stack
from tests.waiting import eventually

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
NUM_CLIENTS = 24
WARM_S = 45
QUESTION = "Write a Python function that adds two numbers. Show the code."


def main() -> None:
    """Take them all."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        browser.size(1280, 800)
        with closing(Stack(Path(folder) / "chat")) as stack:
            _chat(browser, stack.url)
        flags = ("--engine", "fake", "--fake-step-ms", "25", "--schedulers", "2", "--apis", "2", "--lease", "4")
        with closing(Stack(Path(folder) / "pipeline", *flags)) as stack, _load(stack):
            _pipeline(browser, stack)


def _chat(browser: Browser, url: str) -> None:
    browser.open(url)
    eventually(lambda: browser.text("#health") == "ready", "the page is ready")
    for name, value in (
        ("system", "You are brief and exact."),
        ("temperature", "0.3"),
        ("max_tokens", "160"),
        ("seed", "7"),
    ):
        browser.one(f"#{name}").send_keys(value)
    browser.one("#colour").click()
    browser.one("#prompt").send_keys(QUESTION, Keys.ENTER)
    eventually(lambda: browser.all(".message.assistant[aria-busy=false]"), "the answer is complete")
    _shoot(browser, "chat-dark", dark=True)
    browser.one("#colour").click()
    _shoot(browser, "chat-light", dark=False)
    browser.forget()


def _pipeline(browser: Browser, stack: Stack) -> None:
    browser.size(1280, 1200)
    browser.open(f"{stack.url}/#pipeline")
    eventually(
        lambda: len(browser.js("return document.querySelector('.line0').getAttribute('d')")) > 14 * WARM_S,
        "a course",
        300,
    )
    stack.kill("scheduler-1")
    eventually(lambda: "took over" in browser.text("#events"), "its requests have moved")
    _shoot(browser, "pipeline-light", dark=False)
    _shoot(browser, "pipeline-dark", dark=True)
    browser.size(390, 844, mobile=True)
    _shoot(browser, "pipeline-phone", dark=False)
    browser.driver.get(f"{stack.url}/#chat")
    browser.driver.refresh()
    browser.one("#prompt").send_keys("A long story", Keys.ENTER)
    eventually(lambda: len(browser.text(".message.assistant .plain")) > 200, "an answer")
    _shoot(browser, "chat-phone", dark=True)


def _shoot(browser: Browser, name: str, *, dark: bool) -> None:
    browser.dark(dark)
    browser.js("document.activeElement.blur()")
    (FOLDER / f"{name}.png").write_bytes(browser.driver.get_screenshot_as_png())
    print(FOLDER / f"{name}.png")


@contextmanager
def _load(stack: Stack) -> Iterator[None]:
    """Ask for answers of many lengths, side by side, until the block is over."""
    over = threading.Event()

    def client(number: int) -> None:
        chance = random.Random(number)
        with httpx.Client(base_url=stack.url, timeout=120) as http:
            while not over.is_set():
                text = "Shared words of many prompts. " * 12 + str(chance.random())
                http.post("/v1/chat/completions", json=stack.chat_body(text, max_tokens=chance.randrange(20, 250)))
                over.wait(chance.random())

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            over.set()
            for one in clients:
                one.result()


if __name__ == "__main__":
    main()
