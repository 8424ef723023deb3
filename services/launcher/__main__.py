"""Entry of the launcher: `python -m services.launcher [serve | dead] [flags]`; a call without a command serves."""

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Final

from services.launcher import dead
from services.launcher.defaults import Plan, model_variables, plan
from services.launcher.redis_server import own_redis
from services.launcher.run_files import RunFiles, read_ports
from services.launcher.settings import LauncherSettings, parse
from services.launcher.supervisor import Supervisor, say
from shared.errors import BrokerError, ConfigError
from shared.settings import load

EXIT_BAD_SETTING: Final = 2
GIVEN_BROKER: Final = {"redis_url", "redis_username", "redis_password", "redis_password_file", "redis_ca_file"}
"""Any of these says that the user has a broker; the launcher then starts none."""


def main(argv: Sequence[str]) -> int:
    """Run a command and give its exit code."""
    args, variables = parse(argv)
    os.environ.update(variables)
    try:
        settings = load(LauncherSettings)
        return dead.run(running_broker(settings), args) if args.command == "dead" else serve(settings)
    except ConfigError as e:
        say(str(e))
        return EXIT_BAD_SETTING
    except BrokerError as e:
        say(f"the broker cannot be used: {e}")
        return 1
    except KeyboardInterrupt:
        return 130


def serve(settings: LauncherSettings) -> int:
    """Run all services until a signal."""
    os.environ.update(model_variables(os.environ))
    files = RunFiles(settings.run_dir)
    try:
        redis = [] if settings.model_fields_set & GIVEN_BROKER else [own_redis(settings.run_dir)]
        for spec in redis:
            os.environ["MILLRACE_REDIS_URL"] = redis_url(spec.port)
        launch = plan(settings, os.environ)
        supervisor = Supervisor(
            [*redis, *launch.specs],
            files,
            on_ready=lambda: announce(launch),
            drain_timeout_s=settings.drain_timeout,
            fatal_codes=frozenset({EXIT_BAD_SETTING}),
        )
        return supervisor.run()
    finally:
        files.close()


def running_broker(settings: LauncherSettings) -> LauncherSettings:
    """Give settings that reach the Redis of a launcher that runs in the same folder, unless a broker is given."""
    port = read_ports(settings.run_dir).get("redis")
    if port is None or settings.model_fields_set & GIVEN_BROKER:
        return settings
    return load(LauncherSettings, {"redis_url": redis_url(port)})


def redis_url(port: int) -> str:
    """Give the URL of the launcher's own Redis."""
    return f"redis://127.0.0.1:{port}/0"


def announce(launch: Plan) -> None:
    """Print where the service is, and a line to try it."""
    body = (
        f'{{"model": "{launch.model}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
    )
    key = '-H "Authorization: Bearer YOUR_KEY" ' if launch.has_keys else ""
    print(f"Millrace is ready: {launch.base_url} (model {launch.model})")
    print(f"curl {launch.base_url}/chat/completions {key}-H 'Content-Type: application/json' -d {shlex.quote(body)}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
