"""Write what follows from the settings classes: `make env-example`. A test keeps the files as this writes them.

That is `.env.example`, and the part of the chart's schema that says which settings its values take (`helm_values`).
"""

import textwrap
from pathlib import Path
from typing import Any

from services.launcher.settings import settings_fields
from shared.settings import ENV_PREFIX
from tools import helm_values

PATH = Path(__file__).resolve().parent.parent / ".env.example"
HEAD = """\
# Every variable that a service reads. All are optional: what stands here is the default.
# Compose reads a copy of it that is called .env; `make run` does not: export what you need, or give it as a flag,
# MILLRACE_MAX_SEQ_LEN is --max-seq-len. A service run by itself listens on all addresses unless MILLRACE_HOST says
# otherwise; the launcher makes that 127.0.0.1.
"""


def render() -> str:
    """Give the text of the file."""
    groups: dict[str, list[str]] = {}
    for name, flag in settings_fields().items():
        comment = textwrap.wrap(flag.text, 110, initial_indent="# ", subsequent_indent="# ")
        line = f"#{ENV_PREFIX}{name.upper()}={_shown(flag.default)}"
        groups.setdefault(flag.owner, []).append("\n".join([*comment, line]))
    parts = [f"\n# ---- {owner} ----\n\n" + "\n".join(lines) + "\n" for owner, lines in groups.items()]
    return HEAD + "".join(parts)


def _shown(default: Any) -> str:
    """Write a default as its variable would have it."""
    if default is None or default == ():
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
    helm_values.write()
