"""Entry of the api: settings from the environment, then one server, or the parent of several."""

import sys

from services.api.server import serve
from services.api.settings import ApiSettings
from services.api.workers import Workers
from shared.errors import ConfigError
from shared.logs import setup_logs
from shared.reason import tell_reason
from shared.settings import load
from shared.tracing import setup_tracing, stop_tracing


def main() -> int:
    """Run the api and give its exit code: 0 a clean end, 1 a fault, 2 a bad setting."""
    try:
        settings = load(ApiSettings)
        setup_logs("api", settings)
        if settings.api_workers > 1:
            return Workers(settings).run()
        setup_tracing("api", settings)
        return serve(settings)
    except ConfigError as e:
        sys.stderr.write(f"api: {e}\n")
        tell_reason(str(e))
        return 2
    finally:
        stop_tracing()


if __name__ == "__main__":
    sys.exit(main())
