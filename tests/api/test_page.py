"""The files of the page: their policy, their cache, and the one setting that turns them off."""

import re
from pathlib import Path

import httpx
import pytest

from services.api.routes.page import PAGE_PATHS
from tests.api.conftest import RunningApi, StartApi
from tests.api.engine_side import EngineSide

FOLDER = Path(__file__).parent.parent.parent / "services" / "api" / "page"
LOCAL = {"http://www.w3.org/2000/svg"}
"""A name, not an address."""


def test_every_file_is_sent_with_its_type_and_policy(api: RunningApi) -> None:
    assert api.get("/").text == (FOLDER / "index.html").read_text()
    for path in PAGE_PATHS - {"/"}:
        answer = api.get(path)
        assert answer.status_code == 200
        assert answer.content == (FOLDER / path.rpartition("/")[2]).read_bytes()
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
        assert "unsafe" not in answer.headers["content-security-policy"]
    types = {path.rpartition(".")[2]: api.get(path).headers["content-type"].partition(";")[0] for path in PAGE_PATHS}
    assert types["js"] == "text/javascript" and types["css"] == "text/css" and types["svg"] == "image/svg+xml"


def test_a_browser_that_has_a_file_is_told_so(api: RunningApi) -> None:
    first = api.get("/page/app.js")
    tag = first.headers["etag"]
    for known in (tag, f'"other", W/{tag}', "*"):
        again = api.get("/page/app.js", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert api.get("/page/app.js", headers={"if-none-match": '"other"'}).status_code == 200
    head = httpx.head(api.url + "/page/app.js")
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", tag)


def test_nothing_else_is_there(api: RunningApi) -> None:
    for path in ("/page/", "/page/nothing.js", "/page/..%2fapp.py", "/page/%2e%2e/app.py"):
        assert api.get(path).status_code == 404, path


def test_it_can_be_turned_off_and_the_api_stays(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api(disable_page=True)
    for path in PAGE_PATHS:
        assert api.get(path).status_code == 404, path
    assert api.get("/v1/pipeline").status_code == 200


def test_the_page_needs_no_key_but_what_it_shows_does(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api(api_keys=("me=secret-key",))
    assert {api.get(path).status_code for path in PAGE_PATHS} == {200}
    assert api.get("/v1/pipeline").status_code == 401
    assert api.get("/v1/pipeline", headers={"authorization": "Bearer secret-key"}).status_code == 200


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_nothing_comes_from_outside_and_no_text_becomes_markup(path: Path) -> None:
    text = path.read_text()
    assert set(re.findall(r"https?://[\w./-]+", text)) <= LOCAL
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style=", "onclick"):
        assert word not in text, word


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_in_both_schemes(scheme: int) -> None:
    palette = re.findall(r":root {(.*?)}", (FOLDER / "style.css").read_text(), re.DOTALL)[scheme]
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", palette))
    pairs = [(text, ground) for text in ("text", "soft", "accent", "bad") for ground in ("ground", "panel")]
    pairs += [("on-accent", "accent"), ("bad", "bad-soft"), ("late", "late-soft"), ("text", "accent-soft")]
    pairs += [("text", f"p{shade}") for shade in range(4)]
    faint = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs}
    assert {pair: value for pair, value in faint.items() if value < 4.5} == {}
