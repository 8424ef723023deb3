"""Write the dashboards for Grafana: `python -m tools.dashboards`. A test keeps the files and the code equal."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tools.dashboards.builder import Dashboard
from tools.dashboards.engine import ENGINE
from tools.dashboards.overview import OVERVIEW
from tools.dashboards.pipeline import PIPELINE

FOLDER: Final = Path(__file__).resolve().parent.parent.parent / "ops" / "grafana" / "dashboards"
DASHBOARDS: Final[tuple[Dashboard, ...]] = (OVERVIEW, PIPELINE, ENGINE)


def files() -> Iterator[tuple[Path, str]]:
    """Give the path and the text of each file."""
    for dashboard in DASHBOARDS:
        yield FOLDER / f"{dashboard.uid}.json", json.dumps(dashboard.to_json(), indent=1) + "\n"


if __name__ == "__main__":
    for path, text in files():
        path.write_text(text, encoding="utf-8")
