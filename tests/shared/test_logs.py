import asyncio
import io
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import SecretStr

from shared.logs import Redactor, escape, request_context, setup_logs
from shared.settings import ServiceSettings

PASSWORD = "p@ss:w/o?r#d%25 \u00e9"


class Example(ServiceSettings):
    api_keys: tuple[SecretStr, ...] = ()
    per_tenant: dict[str, SecretStr] = {}


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before[0], before[1]
    logging.captureWarnings(False)


def start(log_format: str = "json", **fields: Any) -> io.StringIO:
    stream = io.StringIO()
    setup_logs("api", Example(log_format=log_format, name="api-0", **fields), stream)
    return stream


def entries(stream: io.StringIO) -> list[dict[str, str]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_carry_service_request_and_uid() -> None:
    stream = start()
    logging.getLogger("x").info("hello %s", "you", extra={"uid": "u1", "request_id": "r1"})
    [entry] = entries(stream)
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "info",
        "service": "api-0",
        "logger": "x",
        "message": "hello you",
        "uid": "u1",
        "request_id": "r1",
    }


def test_text_lines_carry_the_same() -> None:
    stream = start("text")
    logging.getLogger("x").warning("hello", extra={"uid": "u1", "request_id": "r1"})
    assert stream.getvalue().endswith(" WARNING api-0 x: hello uid=u1 request_id=r1\n")


def test_auto_is_json_where_there_is_no_terminal() -> None:
    stream = start("auto")
    logging.getLogger("x").info("hello")
    assert entries(stream)[0]["message"] == "hello"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_values_of_clients_cannot_begin_a_line_or_move_the_cursor(log_format: str) -> None:
    stream = start(log_format)
    evil = "a\nERROR forged\r\x1b[2J\u2028\u202e\x85\ud800b"
    logging.getLogger("x").info("id %s", evil, extra={"request_id": evil})
    text = stream.getvalue()
    assert len(text.splitlines()) == 1
    assert text.isprintable() or text.rstrip("\n").isprintable()


def test_escape_leaves_ordinary_text_alone() -> None:
    assert escape("\u65e5\u672c \U0001f642 \u00e9 \\n") == "\u65e5\u672c \U0001f642 \u00e9 \\n"
    assert escape("a\tb\0") == "a\\tb\\x00"


def test_context_names_the_request_in_this_task_and_those_it_starts() -> None:
    stream = start()
    logger = logging.getLogger("x")

    async def child() -> None:
        logger.info("child")

    async def serve(uid: str) -> None:
        with request_context(request_id="r" + uid), request_context(uid=uid):
            await asyncio.create_task(child())
        logger.info("after")

    async def both() -> None:
        await asyncio.gather(serve("1"), serve("2"))

    asyncio.run(both())
    found = [(e["message"], e.get("uid"), e.get("request_id")) for e in entries(stream) if e["logger"] == "x"]
    assert sorted(found, key=str) == [
        ("after", None, None),
        ("after", None, None),
        ("child", "1", "r1"),
        ("child", "2", "r2"),
    ]


def test_secrets_are_redacted_also_in_tracebacks() -> None:
    stream = start(redis_password=PASSWORD, api_keys=("sk-first-key",), per_tenant={"a": SecretStr("sk-second-key")})
    logger = logging.getLogger("x")
    logger.info("using %s and %s, %s", PASSWORD, "sk-first-key", "sk-second-key")
    logger.info("redis://user:pw@host:1/0 and Authorization: Bearer abc.def-123456")
    try:
        raise RuntimeError(f"cannot use {PASSWORD}")
    except RuntimeError:
        logger.exception("failed")
    text = stream.getvalue()
    for secret in (PASSWORD, json.dumps(PASSWORD)[1:-1], "sk-first-key", "sk-second-key", "user:pw", "abc.def"):
        assert secret not in text
    assert "redis://***@host:1/0" in text
    assert "RuntimeError: cannot use ***" in text


def test_a_password_with_a_slash_in_a_url_is_redacted_when_known() -> None:
    assert PASSWORD not in Redactor([PASSWORD])(f"redis://u:{PASSWORD}@h")


def test_text_tracebacks_are_indented_under_their_line() -> None:
    stream = start("text")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("x").exception("failed")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("x: failed")
    assert rest
    assert all(line.startswith("    ") for line in rest)


def test_uvicorn_logs_and_warnings_go_the_same_way() -> None:
    logging.getLogger("uvicorn.access").addHandler(logging.NullHandler())
    logging.getLogger("uvicorn.access").propagate = False
    stream = start()
    logging.getLogger("uvicorn.access").info('%s - "%s"', "1.2.3.4", "GET /\nx")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert [e["logger"] for e in entries(stream)] == ["uvicorn.access", "py.warnings"]


def test_the_level_holds() -> None:
    stream = start(log_level="warning")
    logging.getLogger("x").info("no")
    logging.getLogger("x").warning("yes")
    assert [e["message"] for e in entries(stream)] == ["yes"]
