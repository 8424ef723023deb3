"""Entry of the launcher: `python -m services.launcher [serve | shell | warmup | dead] [flags]`; a bare call serves."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Final

from services.launcher import dead, hints, shell, warmup
from services.launcher.deaths import Deaths
from services.launcher.defaults import Plan, model_variables, plan
from services.launcher.joining import GIVEN_BROKER, needed_broker, running_broker
from services.launcher.redis_server import own_redis
from services.launcher.run_files import RunFiles
from services.launcher.settings import LauncherSettings, parse, settings_fields
from services.launcher.supervisor import Supervisor, say
from services.scheduler.settings import SchedulerSettings
from shared.errors import BrokerError, ConfigError, Unavailable
from shared.settings import load

EXIT_BAD_SETTING: Final = 2
_NAME_A_MODEL: Final = ("MODEL", "SERVED_MODEL_NAME", "ENGINE")


def main(argv: Sequence[str]) -> int:
    """Run a command and give its exit code."""
    args, variables = parse(argv)
    os.environ.update(variables)
    for warning in hints.of_variables(os.environ, settings_fields()) if args.command == "serve" else ():
        say(warning)
    try:
        if args.command == "warmup":
            return warmup.run(load(SchedulerSettings))
        settings = load(LauncherSettings)
        if args.command == "dead":
            return dead.run(needed_broker(settings), args)
        return talk(settings, argv[1:]) if args.command == "shell" else serve(settings)
    except ConfigError as e:
        say(hints.with_flags(str(e), variables, argv))
        return EXIT_BAD_SETTING
    except BrokerError as e:
        say(f"the broker cannot be used: {e}")
        return 1
    except Unavailable as e:
        say(str(e))
        return 1
    except KeyboardInterrupt:
        return 130


def serve(settings: LauncherSettings) -> int:
    """Run all services until a signal."""
    os.environ.update(model_variables(os.environ))
    files = RunFiles(settings.run_dir)
    try:
        redis = []
        if not settings.model_fields_set & GIVEN_BROKER:
            spec, os.environ["MILLRACE_REDIS_URL"] = own_redis(settings.run_dir)
            redis = [spec]
        launch = plan(settings, os.environ)
        supervisor = Supervisor(
            [*redis, *launch.specs],
            files,
            on_ready=lambda: announce(launch),
            drain_timeout_s=settings.drain_timeout,
            fatal_codes=frozenset({EXIT_BAD_SETTING}),
            on_death=Deaths(load(LauncherSettings)).tell,
        )
        return supervisor.run()
    finally:
        files.close()


def talk(settings: LauncherSettings, flags: Sequence[str]) -> int:
    """Talk to the services that run, or to some that run as long as the conversation."""
    joined = running_broker(settings)
    joins = joined is not settings or bool(settings.model_fields_set & GIVEN_BROKER)
    any_model = joins and not any(os.environ.get(f"MILLRACE_{name}") for name in _NAME_A_MODEL)
    if not any_model:
        os.environ.update(model_variables(os.environ))
    named = load(LauncherSettings, {"redis_url": joined.redis_url} if joins else None)
    return shell.run(named, joins=joins, any_model=any_model, flags=list(flags))


def announce(launch: Plan) -> None:
    """Print where the service is, and a line to try it."""
    if not launch.base_url:
        print(f"Millrace is ready without HTTP (model {launch.model})", flush=True)
        return
    message = {"role": "user", "content": "What is 2+2?"}
    body = json.dumps({"model": launch.model, "messages": [message], "temperature": 0, "max_tokens": 64})
    key = '-H "Authorization: Bearer YOUR_KEY" ' if launch.has_keys else ""
    print(f"Millrace is ready: {launch.base_url} (model {launch.model})")
    print(f"curl {launch.base_url}/chat/completions {key}-H 'Content-Type: application/json' -d {shlex.quote(body)}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
