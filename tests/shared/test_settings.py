import re
import tomllib
from pathlib import Path

import pytest
from pydantic import SecretStr

from shared.errors import ConfigError
from shared.settings import CommaList, ModelSettings, RedisSettings, ServiceSettings, load
from shared.version import VERSION

ODD_PASSWORD = "p@ss:w/o?r#d%25 \u00e9"


class Example(ServiceSettings):
    origins: CommaList = ()
    api_keys: CommaList = ("a",)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in os.environ:
        if name.startswith("MILLRACE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_defaults_serve_the_embedded_model_on_a_local_broker() -> None:
    settings = load(ModelSettings)
    assert (settings.redis_url, settings.redis_prefix) == ("redis://127.0.0.1:6379/0", "millrace")
    assert (settings.model, settings.served_model_name) == ("", "smollm2-135m-instruct")
    assert (settings.lease, settings.drain_timeout) == (5.0, 30.0)


def test_the_environment_is_read_and_overrides_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_LEASE", "7.5")
    monkeypatch.setenv("MILLRACE_LOG_LEVEL", "DEBUG")
    assert load(ServiceSettings).lease == 7.5
    assert load(ServiceSettings).log_level == "debug"
    assert load(ServiceSettings, {"lease": 9}).lease == 9.0


def test_a_dotenv_file_is_not_read_behind_the_users_back(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("MILLRACE_LEASE=99\n")
    assert load(ServiceSettings).lease == 5.0


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_LEASE", "")
    monkeypatch.setenv("MILLRACE_REDIS_PASSWORD", "")
    assert load(ServiceSettings).lease == 5.0
    assert load(ServiceSettings).read_redis_password() is None


def test_variables_of_other_services_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_TENSOR_PARALLEL_SIZE", "2")
    assert not hasattr(load(ServiceSettings), "tensor_parallel_size")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("MILLRACE_LEASE", "soon", "valid number"),
        ("MILLRACE_LEASE", "0.1", "greater than or equal to 1"),
        ("MILLRACE_HEALTH_PORT", "65536", "less than or equal to 65535"),
        ("MILLRACE_LOG_LEVEL", "loud", "'debug', 'info'"),
        ("MILLRACE_LOG_FORMAT", "xml", "'auto', 'text' or 'json'"),
        ("MILLRACE_REDIS_URL", "http://x", "must begin with one of"),
        ("MILLRACE_REDIS_PREFIX", "a b", "match pattern"),
        ("MILLRACE_REDIS_CA_FILE", "/nowhere/ca.pem", "no such file: /nowhere/ca.pem"),
        ("MILLRACE_NAME", "a/b", "match pattern"),
    ],
)
def test_a_bad_value_is_named_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{name}: .*{re.escape(reason)}"):
        load(ServiceSettings)


def test_a_bad_value_is_shown_unless_it_may_be_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_LEASE", "soon")
    monkeypatch.setenv("MILLRACE_REDIS_URL", "http://:hush@x")
    with pytest.raises(ConfigError, match=r"MILLRACE_LEASE: 'soon': ") as caught:
        load(ServiceSettings)
    assert "hush" not in str(caught.value)


def test_all_bad_values_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_LEASE", "x")
    monkeypatch.setenv("MILLRACE_DRAIN_TIMEOUT", "-1")
    with pytest.raises(ConfigError, match=r"MILLRACE_LEASE: .*; MILLRACE_DRAIN_TIMEOUT: "):
        load(ServiceSettings)


def test_a_password_may_hold_any_character(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MILLRACE_REDIS_PASSWORD", ODD_PASSWORD)
    assert load(RedisSettings).read_redis_password() == ODD_PASSWORD
    monkeypatch.delenv("MILLRACE_REDIS_PASSWORD")
    secret = tmp_path / "secret"
    secret.write_text(ODD_PASSWORD + "\n", encoding="utf-8")
    monkeypatch.setenv("MILLRACE_REDIS_PASSWORD_FILE", str(secret))
    assert load(RedisSettings).read_redis_password() == ODD_PASSWORD


def test_two_passwords_are_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("one")
    monkeypatch.setenv("MILLRACE_REDIS_PASSWORD", ODD_PASSWORD)
    monkeypatch.setenv("MILLRACE_REDIS_PASSWORD_FILE", str(secret))
    with pytest.raises(ConfigError, match="both set") as caught:
        load(RedisSettings)
    assert ODD_PASSWORD not in str(caught.value)


def test_secrets_are_not_in_what_is_printed() -> None:
    settings = ServiceSettings(redis_url=f"redis://u:{ODD_PASSWORD}@h:1/0", redis_password=SecretStr(ODD_PASSWORD))
    assert ODD_PASSWORD not in f"{settings!r} {settings}"


def test_settings_cannot_be_changed() -> None:
    settings = load(ServiceSettings)
    with pytest.raises(ValueError, match="frozen"):
        settings.lease = 3.0  # type: ignore[misc]


def test_lists_are_written_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_ORIGINS", "http://a, http://b,")
    settings = load(Example)
    assert (settings.origins, settings.api_keys) == (("http://a", "http://b"), ("a",))


def test_an_instance_is_named_after_its_setting_or_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(ServiceSettings, {"name": "api-7"}).instance_name("api") == "api-7"
    monkeypatch.setattr("socket.gethostname", lambda: "box 1.local")
    assert load(ServiceSettings).instance_name("api") == "api-box-1.local"


def test_only_engines_take_their_lease_from_the_setting() -> None:
    settings = load(ServiceSettings, {"lease": 8})
    assert (settings.lease_s("scheduler"), settings.lease_s("api"), settings.lease_s("detokenizer")) == (8.0, 15.0, 1.5)


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
