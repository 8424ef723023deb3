"""What is left of requests that are over: in the services, by their metrics, and in the broker, by its keys."""

from collections.abc import Callable

import httpx

from tests.e2e.stack import Stack
from tests.waiting import eventually

PREFIX = "millrace"


def engines(stack: Stack) -> list[str]:
    """Name the schedulers."""
    return [name for name in stack.ports() if name.startswith("scheduler")]


def apis(stack: Stack) -> list[str]:
    """Name the apis."""
    return [name for name in stack.ports() if name.startswith("api")]


def api_urls(stack: Stack) -> list[str]:
    """Give the address of every api."""
    return [f"http://127.0.0.1:{stack.ports()[name]}" for name in apis(stack)]


def total(stack: Stack, role: str, name: str, **labels: str) -> float:
    """Sum a metric over all instances of a role, or of one; what was never counted is 0."""
    return sum(_count(stack, i, name, labels) for i in stack.ports() if i.startswith(role))


def _count(stack: Stack, instance: str, name: str, labels: dict[str, str]) -> float:
    text = httpx.get(f"http://127.0.0.1:{stack.ports()[instance]}/metrics", timeout=10).text
    assert f"# TYPE {name} " in text, f"{instance} has no metric {name}"
    rows = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] == name]
    assert all(f'{key}="' in line for line in rows for key in labels), f"{name} has other labels than {labels}"
    rows = [line for line in rows if all(f'{key}="{value}"' in line for key, value in labels.items())]
    return sum(float(line.rpartition(" ")[2]) for line in rows)


def slots_in_use(stack: Stack) -> list[str]:
    """Say what the engines still hold: slots, queues, pages."""
    left = []
    for name in engines(stack):
        counts = {
            what: stack.metric(name, f"millrace_requests_{what}") for what in ("running", "waiting", "unconfirmed")
        }
        left += [f"{name}: {count:g} {what}" for what, count in counts.items() if count]
        pages = {s: stack.metric(name, "millrace_kv_pages", state=s) for s in ("free", "live", "cached")}
        if pages["live"] or sum(pages.values()) != stack.metric(name, "millrace_kv_pages_capacity"):
            left.append(f"{name}: pages {pages}")
    return left


def keys_left(stack: Stack, *, ended_logs: bool = False) -> list[str]:
    """Say what the broker still holds of requests. Inboxes and doorbells go by themselves, within seconds.

    Args:
        stack: whose broker.
        ended_logs: logs that have ended may be there, as long as they are about to go by themselves; so may the
            records of streams that could be come back to, but none that is counted as unfinished.
    """
    left = []
    with stack.redis() as broker:
        for key in broker.scan_iter(match=f"{PREFIX}:*", count=1000):
            kind = key.split(":")[1]
            if kind in ("alive", "meta", "dead"):
                continue
            if kind in ("tokens", "generate", "tokenize") and broker.xlen(key) == 0:
                continue
            lasting = broker.pttl(key) == -1
            if kind in ("inbox", "abort", "flush") and not lasting:
                continue
            if kind in ("reply", "stream") and ended_logs and not lasting:
                continue
            left.append(f"{key}{' for ever' if lasting else ''}")
        for key in broker.scan_iter(match=f"{PREFIX}:tokenize:*", count=1000):
            pending = [group["pending"] for group in broker.xinfo_groups(key)]
            if any(pending):
                left.append(f"{key}: pending {pending}")
    return left


def requests_open(stack: Stack) -> list[str]:
    """Say which apis think that somebody waits for an answer."""
    metrics = ("millrace_requests_in_flight", "millrace_http_open_generations")
    return [f"{a}: {m} {v:g}" for a in apis(stack) for m in metrics if (v := stack.metric(a, m))]


def texts_kept(stack: Stack) -> list[str]:
    """Say which detokenizers keep the text of a reply."""
    names = [name for name in stack.ports() if name.startswith("detokenizer")]
    return [f"{n}: {v:g} replies" for n in names if (v := stack.metric(n, "millrace_detokenizer_replies"))]


def wait_quiet(stack: Stack, *, ended_logs: bool = False, texts: bool = True, timeout_s: float = 40.0) -> None:
    """Wait until nothing is left of any request: no slot, page, uid, text or key."""
    looks: list[Callable[[Stack], list[str]]] = [slots_in_use, requests_open]
    looks.append(lambda stack: keys_left(stack, ended_logs=ended_logs))
    if texts:
        looks.append(texts_kept)
    left: list[str] = []

    def is_quiet() -> bool:
        left[:] = [line for look in looks for line in look(stack)]
        return not left

    try:
        eventually(is_quiet, "nothing is left of any request", timeout_s, every_s=0.2)
    except AssertionError as e:
        raise AssertionError(f"{e}: {left[:20]}") from None
