"""The page in a real browser, on a whole stack with two engines: what is said, stopped, resumed, seen to die."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from services.api.settings import ApiSettings
from tests.api.conftest import RunningApi
from tests.e2e.browser import Browser, chromium
from tests.e2e.stack import Stack
from tests.waiting import eventually

ANSWER = ".message.assistant .plain"
KEY = "open-sesame"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two engines with a short lease, and time enough to look at an answer while it grows."""
    flags = ("--engine", "fake", "--fake-step-ms", "20", "--schedulers", "2", "--lease", "1.5")
    stack = Stack(tmp_path_factory.mktemp("page"), *flags)
    yield stack
    stack.close()


@pytest.fixture(scope="module")
def locked(stack: Stack) -> Iterator[RunningApi]:
    """Another replica, which wants a key."""
    url = f"redis://127.0.0.1:{stack.ports()['redis']}"
    told = {"redis_url": url, "served_model_name": stack.model, "api_keys": (f"me={KEY}",)}
    api = RunningApi(ApiSettings(host="127.0.0.1", port=0, drain_timeout=3.0, **told))
    api.wait_ready()
    yield api
    api.stop()


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(stack: Stack, window: Browser) -> Iterator[Browser]:
    """The page, freshly opened. Whatever a test does, nothing may break the policy or be an error in the console."""
    window.open(stack.url)
    wait_ready(window, stack.model)
    yield window
    complaints = window.complaints()
    window.forget()
    eventually(lambda: held(stack) == 0, "nothing is left of it")
    assert complaints == []


def wait_ready(page: Browser, model: str) -> None:
    eventually(lambda: page.text("#health") == "ready", "the page says that all is there")
    eventually(lambda: page.js("return document.getElementById('model').value") == model, "the model is offered")


def picture(stack: Stack) -> dict[str, Any]:
    found: dict[str, Any] = stack.client.get("/v1/pipeline").json()
    return found


def held(stack: Stack) -> int:
    """Count the unfinished requests of all engines, by their streams."""
    return sum(hop["length"] for hop in picture(stack)["hops"] if hop["stream"] == "generate")


def ask(page: Browser, text: str, **settings: Any) -> None:
    """Type a message with these settings, and send it as most people do."""
    for name, value in settings.items():
        field = page.one(f"#{name}")
        field.clear()
        field.send_keys(str(value))
    page.one("#prompt").send_keys(text, Keys.ENTER)


def wait_growing(page: Browser, length: int = 20) -> str:
    eventually(lambda: len(page.text(ANSWER)) > length, "the answer grows")
    return page.text(ANSWER)


def wait_end(page: Browser, count: int = 1) -> str:
    """Wait until so many answers are there and complete; gives the text of the last."""
    eventually(lambda: len(page.all(".message.assistant[aria-busy=false]")) == count, "the answer is complete")
    assert page.text(".message:last-child .error") == ""
    return page.text(ANSWER)


def said(stack: Stack, max_tokens: int, *talk: str) -> str:
    """Give what the engine says greedily to a conversation that the user begins."""
    roles = ["user", "assistant"] * len(talk)
    messages = [{"role": role, "content": text} for role, text in zip(roles, talk, strict=False)]
    text: str = stack.chat(messages=messages, max_tokens=max_tokens)["choices"][0]["message"]["content"]
    return text


def test_an_answer_streams_and_says_what_it_cost(page: Browser, stack: Stack) -> None:
    ask(page, "Tell me", max_tokens=60, temperature=0)
    part = wait_growing(page, 5)
    whole = wait_end(page)
    assert whole.startswith(part) and len(part) < len(whole)
    assert whole == said(stack, 60, "Tell me")
    told = page.text(".figures-line")
    assert all(word in told for word in ("+ 60 tokens", "tokens/s", "first after", "token limit")), told
    assert page.text("#spoken") == "The answer is complete."


def test_the_conversation_and_the_system_prompt_are_sent(page: Browser, stack: Stack) -> None:
    ask(page, "One", system="Be brief.", max_tokens=8, temperature=0)
    first = wait_end(page)
    ask(page, "Two")
    second = wait_end(page, 2)
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Two"},
    ]
    assert second == stack.chat(messages=talk, max_tokens=8)["choices"][0]["message"]["content"]


def test_stop_keeps_what_was_said_and_frees_the_slot(page: Browser, stack: Stack) -> None:
    ask(page, "A long story")
    wait_growing(page)
    eventually(lambda: held(stack) == 1, "it runs")
    page.one("#stop").click()
    text = wait_end(page)
    assert len(text) > 20
    eventually(lambda: held(stack) == 0, "its slot is free", 10)
    assert "stopped" in page.text(".figures-line")
    assert page.one("#send")


def test_escape_stops_too_and_another_answer_takes_the_place(page: Browser, stack: Stack) -> None:
    ask(page, "A long story")
    wait_growing(page)
    page.one("#prompt").send_keys(Keys.ESCAPE)
    before = wait_end(page)
    page.one("#max_tokens").send_keys("30")
    page.one("#temperature").send_keys("0")
    page.one(".message.assistant .regenerate").click()
    after = wait_end(page)
    assert after != before and after == said(stack, 30, "A long story")


def test_a_reload_resumes_where_it_was(page: Browser, stack: Stack) -> None:
    with ThreadPoolExecutor(1) as pool:
        undisturbed = pool.submit(said, stack, 200, "Once upon a time")
        ask(page, "Once upon a time", max_tokens=200, temperature=0)
        part = wait_growing(page)
        page.driver.refresh()
        assert wait_growing(page).startswith(part)
        assert wait_end(page) == undisturbed.result()
    assert "+ 200 tokens" in page.text(".figures-line")
    page.driver.refresh()
    assert len(wait_end(page)) == 200, "what is complete is only shown"


def test_a_reload_before_the_first_word_resumes_too(page: Browser, stack: Stack) -> None:
    engines = [pid for name, pid in stack.pids().items() if name.startswith("scheduler")]
    try:
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        ask(page, "Not yet", max_tokens=10, temperature=0)
        name = "return JSON.parse(sessionStorage.getItem('millrace.talk') ?? '[]').at(-1)?.stream?.id"
        eventually(lambda: page.js(name), "the page knows the name of its stream")
        assert page.text(ANSWER) == ""
        page.driver.refresh()
        page.one(".message.assistant .wait")
    finally:
        for pid in engines:
            os.kill(pid, signal.SIGCONT)
    assert wait_end(page) == said(stack, 10, "Not yet")


def test_tokens_are_coloured_by_probability(page: Browser) -> None:
    page.one("#colour").click()
    ask(page, "Colours", max_tokens=40)
    text = wait_end(page)
    spans = page.all(".message.assistant .tokens span")
    assert "".join(page.js("return arguments[0].map((span) => span.textContent)", spans)) == text
    assert len(spans) == 40 and "%" in str(spans[0].get_attribute("title"))
    assert spans[0].is_displayed() and page.one("#scale")
    page.one("#colour").click()
    assert page.one(ANSWER) and not spans[0].is_displayed()


def test_text_never_becomes_markup(page: Browser) -> None:
    attack = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    ask(page, attack, max_tokens=2)
    wait_end(page)
    assert page.text(".message.user .text") == attack
    render = """
      const [text, done] = arguments;
      import("/page/markdown.js").then(({ show }) => {
        const box = document.createElement("div");
        for (let end = 1; end <= text.length; end++) show(box, text.slice(0, end));
        const tags = [...box.querySelectorAll("*")].map((node) => node.tagName.toLowerCase());
        done([box.textContent, tags, [...box.querySelectorAll("a")].map((a) => a.href)]);
      });"""
    text = (
        f"# {attack}\n\n**bold** and `a<b` [here](https://example.com/?a=1) [there](javascript:alert(3))\n\n"
        "1. one\n2. two\n\n> said\n\n```js\nif (a < b) {}\n\n<b>"
    )
    shown, tags, links = page.driver.execute_async_script(render, text)  # type: ignore[no-untyped-call]
    assert tags == ["p", "p", "strong", "code", "a", "ol", "li", "li", "blockquote", "pre", "code"]
    assert links == ["https://example.com/?a=1"]
    assert attack in shown and "(javascript:alert(3))" in shown and "<b>" in shown


def test_a_killed_engine_is_seen_to_die_and_its_requests_to_move(page: Browser, stack: Stack) -> None:
    ask(page, "Do not lose me", temperature=0)
    before = wait_growing(page)
    page.one("#to-pipeline").click()
    engines = eventually(lambda: [i for i in picture(stack)["instances"] if i.get("slots") and i["running"]], "it runs")
    victim = engines[0]["name"]
    stack.kill(victim)
    dead = page.one(".card[data-state=dead]")
    assert dead.text.startswith(victim)
    eventually(lambda: f"{victim} died, holding 1 request" in page.text("#events"), "the death is told")
    eventually(lambda: "took over 1 request" in page.text("#events"), "the move is told")
    eventually(lambda: "all of its requests have moved" in dead.text, "nothing is left with the dead")
    eventually(lambda: len(page.all(".card[data-state=serving] .squares")) == 2, "there are two engines again")
    page.one("#to-chat").click()
    wait_growing(page, len(page.text(ANSWER)))
    page.one("#stop").click()
    after = wait_end(page)
    assert after.startswith(before) and after == said(stack, len(after), "Do not lose me")
    stack.wait_ready()


def test_an_answer_survives_the_api_that_gives_it(window: Browser, stack: Stack) -> None:
    window.open(stack.url)
    wait_ready(window, stack.model)
    ask(window, "Do not lose me either", temperature=0)
    before = wait_growing(window)
    stack.kill("api-0")
    wait_growing(window, len(window.text(ANSWER)) + 50)
    window.one("#stop").click()
    after = wait_end(window)
    assert after.startswith(before) and after == said(stack, len(after), "Do not lose me either")
    complaints = window.complaints()  # of the time when nobody listened, or was not ready
    assert [c for c in complaints if "ERR_" not in c and "503" not in c] == []
    window.forget()
    stack.wait_ready()


def test_the_figures_of_the_pipeline_are_drawn(page: Browser) -> None:
    ask(page, "Count me", max_tokens=40)
    wait_end(page)
    page.one("#to-pipeline").click()
    eventually(lambda: "api" in page.text(".stage.api h2"), "the services are there")
    assert [len(page.all(f".stage.{role} .card[data-state=serving]")) > 0 for role in ("api", "detokenizer")] == [
        True
    ] * 2
    drawn = "return [...document.querySelectorAll('.figure')].map((f) => f.querySelector('.line0').getAttribute('d'))"
    eventually(lambda: all(page.js(drawn)[:5]), "there are lines")
    assert all(unit in page.text("#figures") for unit in ("ms", "top", "p99"))


def test_a_key_is_asked_for_kept_in_the_tab_and_sent(window: Browser, locked: RunningApi, stack: Stack) -> None:
    window.open(locked.url)
    window.one("#key-cancel").click()
    eventually(lambda: window.text("#health") == "key needed", "it says what is missing, and asks no more")
    assert not window.js("return document.getElementById('key-dialog').open")
    ask(window, "Let me in")
    eventually(lambda: "key" in window.text(".error"), "the answer says so too")
    for key, is_right in (("wrong", False), (KEY, True)):
        window.one("#key").send_keys(key, Keys.ENTER)
        eventually(lambda good=is_right: (window.text("#health") == "ready") == good, "the key is judged")
        if not is_right:
            window.one("#key").clear()
    window.one("#new-chat").click()
    ask(window, "Let me in", max_tokens=5, temperature=0)
    assert wait_end(window) == said(stack, 5, "Let me in")
    window.driver.refresh()
    eventually(lambda: window.text("#health") == "ready", "the key is still there")
    assert window.js("return JSON.stringify(localStorage)").find(KEY) == -1
    assert all("401" in complaint for complaint in window.complaints())
    window.forget()


def test_it_can_be_used_with_the_keyboard_and_by_ear(page: Browser) -> None:
    nameless = """
      const named = (node) => node.getAttribute("aria-label") || node.labels?.length || node.textContent.trim();
      return [...document.querySelectorAll("input, select, textarea, button, a, summary")]
        .filter((node) => !named(node)).map((node) => node.id || node.outerHTML);"""
    assert page.js(nameless) == []
    assert page.js("return document.documentElement.lang") == "en"
    reached = set()
    page.js("document.activeElement.blur()")
    for _ in range(20):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(page.js("return document.activeElement.id"))
    wanted = {"to-chat", "to-pipeline", "key-button", "prompt", "send", "model", "system", "temperature", "new-chat"}
    assert wanted <= reached
    live = page.js("return [...document.querySelectorAll('[aria-live], [role=status]')].map((node) => node.id)")
    assert {"messages", "events", "health", "spoken"} <= set(live)


@pytest.mark.parametrize("view", ["chat", "pipeline"])
def test_nothing_is_cut_off_on_a_phone(page: Browser, view: str) -> None:
    page.size(390, 844, mobile=True)
    page.one(f"#to-{view}").click()
    assert page.one(f"#{view}")
    assert page.js("return document.documentElement.scrollWidth") <= 390
    page.size(1280, 860)
