"""How a command finds the services that run already: by the broker it is given, or by the launcher of its folder."""

from typing import Final

from services.launcher.run_files import read_ports
from services.launcher.settings import LauncherSettings
from shared.errors import Unavailable
from shared.settings import load

GIVEN_BROKER: Final = {"redis_url", "redis_username", "redis_password", "redis_password_file", "redis_ca_file"}
"""Any of these says that the user has a broker; the launcher then starts none."""


def running_broker(settings: LauncherSettings) -> LauncherSettings:
    """Give settings that reach the Redis of a launcher that runs in the same folder, unless a broker is given."""
    port = read_ports(settings.run_dir).get("redis")
    if port is None or settings.model_fields_set & GIVEN_BROKER:
        return settings
    return load(LauncherSettings, {"redis_url": redis_url(port)})


def needed_broker(settings: LauncherSettings) -> LauncherSettings:
    """Give settings that reach the broker of services that run already; otherwise as `running_broker`.

    Raises:
        Unavailable: no launcher runs in the folder, and no broker is given. A Redis that nobody has named is not tried.
    """
    joined = running_broker(settings)
    if joined is settings and not settings.model_fields_set & GIVEN_BROKER:
        raise Unavailable(
            f"no launcher runs in {settings.run_dir} (--run-dir names another folder, --redis-url or "
            f"MILLRACE_REDIS_URL a broker)"
        )
    return joined


def redis_url(port: int) -> str:
    """Give the URL of the launcher's own Redis."""
    return f"redis://127.0.0.1:{port}/0"
