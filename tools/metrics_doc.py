"""Write `docs/metrics.md` from a head and the metric tables: `python -m tools.metrics_doc`. A test keeps them equal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from services.api.metrics import TABLE as API
from services.detokenizer.metrics import TABLE as DETOKENIZER
from services.scheduler.metrics import TABLE as SCHEDULER
from services.tokenizer.metrics import TABLE as TOKENIZER
from shared.metrics import COMMON, Metric, table

PATH: Final = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
HEAD: Final = Path(__file__).with_name("metrics_head.md").read_text(encoding="utf-8")
TABLES: Final[Mapping[str, Sequence[Metric]]] = {
    "every service": COMMON,
    "the api": [m for m in API if m not in COMMON],
    "the tokenizer": [m for m in TOKENIZER if m not in COMMON],
    "the scheduler": [m for m in SCHEDULER if m not in COMMON],
    "the detokenizer": [m for m in DETOKENIZER if m not in COMMON],
}
"""Where a metric comes from -> its rows."""


def render() -> str:
    """Give the text of the page."""
    return HEAD + "".join(f"\n## Of {service}\n\n{table(rows)}" for service, rows in TABLES.items())


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
