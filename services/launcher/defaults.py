"""What a launch consists of: from settings to one Spec per instance.

Owns the embedded default: the model when none is named, where each instance listens, and who gets how many
threads. The engine keeps the cores; the other services do with one thread each.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast

from services.api.settings import ApiSettings
from services.launcher.ports import FIRST_HEALTH_PORT, HEALTH_PORT_STEP, Ports, reachable
from services.launcher.processes import Spec, http_probe, service_argv
from services.launcher.settings import SERVICES, LauncherSettings
from services.scheduler.settings import SchedulerSettings
from shared.errors import ConfigError
from shared.keys import Role
from shared.model_files import BYTES_NAME, locate
from shared.settings import load

ROOT: Final = Path(__file__).resolve().parent.parent.parent
_LOCAL: Final = "127.0.0.1"
_ONE_THREAD: Final[Mapping[str, str]] = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_ENGINE_THREADS: Final[Mapping[str, str]] = {
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch, ready to be run.

    Attributes:
        specs: of the four services, in any order.
        base_url: of the first api replica, with `/v1`; empty without one.
        model: what clients call it.
        has_keys: whether clients need a key.
        ports: keeps what was handed out for this launch, as long as it lives.
    """

    specs: Sequence[Spec]
    base_url: str
    model: str
    has_keys: bool
    ports: Ports


def model_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Settle the model before anything starts: check that it is there, and name it.

    Returns variables to add: the byte model for the fake engine, and the name under which it is served.

    Raises:
        ConfigError: there is no such model, or its files are not usable.
    """
    scheduler = load(SchedulerSettings)
    added: dict[str, str] = {}
    model = scheduler.model
    if scheduler.engine == "fake" and not model:
        added["MILLRACE_MODEL"] = model = BYTES_NAME
    try:
        files = locate(model, scheduler.model_source, revision=scheduler.model_revision)
    except ConfigError as e:
        raise ConfigError(f"MILLRACE_MODEL: {e}") from e
    if not environ.get("MILLRACE_SERVED_MODEL_NAME"):
        added["MILLRACE_SERVED_MODEL_NAME"] = files.served_name
    return added


def plan(settings: LauncherSettings, environ: Mapping[str, str]) -> Plan:
    """Work out every instance of a launch.

    Args:
        settings: the launcher's own.
        environ: what every service inherits; settings of services are read from it by themselves.

    Raises:
        ConfigError: a setting of some service is bad, or a port is taken.
    """
    services = {role: load(cls) for role, cls in SERVICES.items()}
    api = cast(ApiSettings, services["api"])
    ports = Ports()
    inherited = {**environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), environ.get("PYTHONPATH"))))}
    health_host = environ.get("MILLRACE_HEALTH_HOST") or _LOCAL
    api_host = environ.get("MILLRACE_HOST") or _LOCAL
    ranks = cast(SchedulerSettings, services["scheduler"]).tensor_parallel_size
    specs = []
    for number in range(settings.apis):
        port = ports.exactly(api_host, api.port + number if api.port else 0)
        own = {"MILLRACE_HOST": api_host, "MILLRACE_PORT": str(port)}
        specs.append(_spec("api", number, {**inherited, **_ONE_THREAD, **own}, reachable(api_host), port))
    counts: dict[Role, int] = {
        "tokenizer": settings.tokenizers,
        "scheduler": settings.schedulers,
        "detokenizer": settings.detokenizers,
    }
    for role, count in counts.items():
        threads = _engine_threads(environ, count) if role == "scheduler" else _ONE_THREAD
        for number in range(count):
            port = ports.next_free(health_host, FIRST_HEALTH_PORT[role] + HEALTH_PORT_STEP * number)
            own = {
                "MILLRACE_HEALTH_HOST": health_host,
                "MILLRACE_HEALTH_PORT": str(port),
                "MILLRACE_HEALTH_PORT_STRICT": "true",
            }
            spec = _spec(role, number, {**inherited, **threads, **own}, reachable(health_host), port)
            specs.append(replace(spec, ranks=ranks) if role == "scheduler" else spec)
    return Plan(
        specs,
        base_url=f"http://{reachable(api_host)}:{specs[0].port}/v1" if settings.apis else "",
        model=api.served_model_name,
        has_keys=bool(api.api_keys or api.api_keys_file),
        ports=ports,
    )


def _spec(role: Role, number: int, env: Mapping[str, str], host: str, port: int) -> Spec:
    instance = f"{role}-{number}"
    return Spec(instance, role, service_argv(role), {**env, "MILLRACE_NAME": instance}, port, http_probe(host, port))


def _engine_threads(environ: Mapping[str, str], engines: int) -> dict[str, str]:
    """Share the cores between the engines; what the user has set stays."""
    share = str(max(1, len(os.sched_getaffinity(0)) // engines))
    defaults = {"OMP_NUM_THREADS": share, **_ENGINE_THREADS}
    if engines > 1:
        defaults["MILLRACE_THREADS"] = share
    return {name: environ.get(name) or value for name, value in defaults.items()}
