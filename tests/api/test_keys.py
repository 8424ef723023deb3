"""API keys: their file and its changes, several of one name, and what is refused."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from services.api.auth import KeyRing, KeyStore
from services.api.settings import ApiSettings
from shared.broker.limits import Limits
from shared.errors import ConfigError, NotAuthorized
from tests.api.conftest import HOST, StartApi
from tests.waiting import eventually


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def store(path: Path, **settings: Any) -> KeyStore:
    return KeyStore(ApiSettings(api_keys_file=path, **settings))


def knows(keys: KeyStore | KeyRing, key: str) -> bool:
    try:
        keys.tenant(b"Bearer " + key.encode())
    except NotAuthorized:
        return False
    return True


def test_limits_stand_behind_a_key() -> None:
    ring = KeyRing(["team=a requests=60  tokens=1000", "team=b", "c concurrency=0"], Limits(2, 3, 4))
    assert ring.tenant(b"Bearer a").limits == Limits(2, 60, 1000)
    assert ring.tenant(b"Bearer b").limits == Limits(2, 3, 4)
    assert ring.tenant(b"Bearer c").limits == Limits(0, 3, 4)
    assert ring.tenant(b"Bearer a").name == ring.tenant(b"Bearer b").name == "team"
    assert ring.tenant(b"Bearer a").key_hash != ring.tenant(b"Bearer b").key_hash


@pytest.mark.parametrize("entry", ["a=k speed=3", "a=k requests=-1", "a=k requests", "a b=k", "\n=k", "a\x00=k", "ä=k"])
def test_a_malformed_entry_is_named_without_its_key(entry: str) -> None:
    with pytest.raises(ConfigError, match="entry 2") as caught:
        KeyRing(["fine", entry])
    assert "=k" not in str(caught.value)


def test_a_malformed_line_is_named_by_its_file_and_number(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("team=a\n# a comment\n\nteam=b speed=3\n")
    with pytest.raises(ConfigError) as caught:
        store(path, api_keys="fixed")
    assert str(caught.value).startswith(f"MILLRACE_API_KEYS_FILE: {path}, line 4: behind a key only")
    path.write_text("team=a\n")
    with pytest.raises(ConfigError, match=r"^MILLRACE_API_KEYS: entry 2: "):
        store(path, api_keys="fixed,team=")


@pytest.mark.parametrize("content", ["", "# nothing but a comment\n\n", "name=\n", "\xff"])
def test_a_file_that_cannot_be_used_stops_the_start(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError):
        store(path)


def test_a_changed_file_counts_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("team=old\n")
    keys = store(path, api_keys="fixed")
    assert keys.reload() is None
    path.write_text("# turned\n\nteam=new requests=5 # the second one\n")
    assert keys.reload() is True
    assert keys.reload() is None
    assert [knows(keys, key) for key in ("old", "new", "fixed")] == [False, True, True]
    assert keys.tenant(b"Bearer new").limits.requests == 5


def test_a_mounted_secret_changes_by_its_link(tmp_path: Path) -> None:
    """Kubernetes replaces the folder that a link points at; the file's own path never changes."""
    for name, key in (("..v1", "old"), ("..v2", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys").write_text(f"team={key}\n")
        os.utime(tmp_path / name / "keys", ns=(1, 1))
    (tmp_path / "..data").symlink_to("..v1")
    (tmp_path / "keys").symlink_to("..data/keys")
    keys = store(tmp_path / "keys")
    assert knows(keys, "old")
    (tmp_path / "..tmp").symlink_to("..v2")
    (tmp_path / "..tmp").rename(tmp_path / "..data")
    assert keys.reload() is True
    assert knows(keys, "new") and not knows(keys, "old")


def test_a_broken_change_keeps_the_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text("team=good\n")
    keys = store(path)
    for content in (b"", b"team=good\nother=\n", b"\xff\xfe", b"team=good speed=9"):
        path.write_bytes(content)
        assert keys.reload() is False
        assert keys.reload() is None, "it is told once"
        assert knows(keys, "good")
    path.unlink()
    assert keys.reload() is False
    assert knows(keys, "good")
    assert "stay as they are" in caplog.text and "good" not in caplog.text
    path.write_text("team=better\n")
    assert keys.reload() is True
    assert knows(keys, "better")


def test_a_running_api_takes_in_its_file(start_api: StartApi, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("team=old-key\n")
    api = start_api(api_keys_file=path)
    assert api.get("/version", headers=bearer("old-key")).status_code == 200
    path.write_text("team=new-key\n")
    eventually(lambda: api.get("/version", headers=bearer("new-key")).status_code == 200, "the new key is known")
    assert api.get("/version", headers=bearer("old-key")).status_code == 401
    path.write_text("")
    told = 'millrace_api_keys_reloads_total{outcome="refused"} 1.0'
    eventually(lambda: told in api.get("/metrics").text, "the broken file is counted")
    assert api.get("/version", headers=bearer("new-key")).status_code == 200


def test_two_keys_in_one_request_are_refused(start_api: StartApi) -> None:
    api = start_api(api_keys="good")
    with socket.create_connection((HOST, api.port), timeout=20) as sock:
        head = "GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        sock.sendall(f"{head}Authorization: Bearer bad\r\nAuthorization: Bearer good\r\n\r\n".encode())
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"ambiguous_authorization" in answer
