"""A client of streams that can be resumed: reads events with their ids, and comes back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

RESUME = {"X-Millrace-Resume": "1"}


@dataclass(frozen=True)
class Event:
    """One event: its id, its data, and the bytes of both."""

    id: str
    data: str
    raw: str

    @property
    def choices(self) -> list[dict[str, Any]]:
        found = msgspec.json.decode(self.data) if self.data.startswith("{") else {}
        return list(found.get("choices", []))


def events_of(lines: Iterator[str]) -> Iterator[Event]:
    """Take a stream apart; comments are dropped."""
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            assert name not in fields, line
            fields[name] = value
        elif fields:
            raw = "".join(f"{name}: {value}\n" for name, value in fields.items())
            yield Event(fields["id"], fields["data"], raw)
            fields = {}


@contextmanager
def opening(url: str, path: str, body: dict[str, Any], **headers: str) -> Iterator[tuple[str, Iterator[Event]]]:
    """Open a stream; gives the id of its response and its events."""
    told = {**RESUME, **{name.replace("_", "-"): value for name, value in headers.items()}}
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", url + path, json={**body, "stream": True}, headers=told) as response,
    ):
        assert response.status_code == 200, response.read()
        yield response.headers["x-millrace-stream-id"], events_of(response.iter_lines())


@contextmanager
def resuming(url: str, stream: str, last: str | None = None) -> Iterator[Iterator[Event]]:
    """Come back to a stream."""
    headers = {} if last is None else {"Last-Event-ID": last}
    with (
        httpx.Client(timeout=60) as client,
        client.stream("GET", f"{url}/v1/streams/{stream}", headers=headers) as response,
    ):
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield events_of(response.iter_lines())


def rest(url: str, stream: str, last: str | None = None) -> list[Event]:
    """Read the rest of a stream to its end."""
    with resuming(url, stream, last) as events:
        return list(events)


def by_choice(events: list[Event]) -> dict[int, list[str]]:
    """Give the data of each choice's events; what belongs to none is under -1."""
    found: dict[int, list[str]] = {}
    for event in events:
        found.setdefault(event.choices[0]["index"] if event.choices else -1, []).append(event.data)
    return found


def text_of(events: list[Event], index: int = 0) -> str:
    """Join the text of one choice."""
    choices = [choice for event in events for choice in event.choices if choice["index"] == index]
    return "".join((c["text"] if "text" in c else c["delta"].get("content")) or "" for c in choices)
