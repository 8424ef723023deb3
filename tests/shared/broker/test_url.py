"""Forms of the broker's URL, and what of them may be logged."""

import pytest

from shared.broker.url import Target, parse_url
from shared.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("redis://host", Target((("host", 6379),))),
        ("redis://", Target((("127.0.0.1", 6379),))),
        ("redis://host:1/3", Target((("host", 1),), db=3)),
        ("redis://host?db=4", Target((("host", 6379),), db=4)),
        ("rediss://[::1]:6380/0", Target((("::1", 6380),), tls=True)),
        ("redis://user@host", Target((("host", 6379),), username="user")),
        ("redis://:p%40ss@host", Target((("host", 6379),), password="p@ss")),
        ("redis://u%3A:p:w@host", Target((("host", 6379),), username="u:", password="p:w")),
        ("redis://u:a@b/c?d#e@host/1", Target((("host", 6379),), db=1, username="u", password="a@b/c?d#e")),
        ("redis://u:%C3%A9%25@host", Target((("host", 6379),), username="u", password="é%")),
        ("unix:///run/redis.sock", Target(path="/run/redis.sock")),
        ("unix://u:p@/run/redis.sock?db=2", Target(path="/run/redis.sock", db=2, username="u", password="p")),
        (
            "redis+sentinel://u:p@a:1,b,[::1]:3/main/2",
            Target((("a", 1), ("b", 26379), ("::1", 3)), "main", db=2, username="u", password="p"),
        ),
        ("rediss+sentinel://a/main", Target((("a", 26379),), "main", tls=True)),
        ("sentinel://a/main", Target((("a", 26379),), "main")),
        ("sentinels://a/main?db=1", Target((("a", 26379),), "main", db=1, tls=True)),
    ],
)
def test_forms(url: str, target: Target) -> None:
    assert parse_url(url) == target


@pytest.mark.parametrize(
    "url",
    [
        "host:6379",
        "http://u:secret@host",
        "redis://u:secret@host:port",
        "redis://u:secret@host:0",
        "redis://u:secret@host:65536",
        "redis://u:secret@host/x",
        "redis://u:secret@host/1/2",
        "redis://u:secret@ho:st:1",
        "redis://u:secret@host?db=-1",
        "unix://u:secret@relative.sock",
        "redis+sentinel://u:secret@a,b",
        "redis+sentinel://u:secret@a/main/1/2",
        "redis+sentinel://u:secret@a,/main",
    ],
)
def test_a_bad_url_is_refused_without_showing_its_secret(url: str) -> None:
    with pytest.raises(ConfigError, match="redis_url") as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@host/1", "redis://user:***@host:6379/1"),
        ("redis://:secret@host", "redis://:***@host:6379/0"),
        ("redis://user@host", "redis://user@host:6379/0"),
        ("rediss://host", "rediss://host:6379/0"),
        ("unix://:secret@/a.sock", "unix://:***@/a.sock?db=0"),
        ("sentinels://u:secret@a,[::1]:2/main/3", "rediss+sentinel://u:***@a:26379,[::1]:2/main/3"),
    ],
)
def test_what_is_logged_has_no_secret_and_means_the_same(url: str, shown: str) -> None:
    target = parse_url(url)
    assert str(target) == shown
    assert "secret" not in repr(target)
    if "***" not in shown:
        assert parse_url(shown) == target
