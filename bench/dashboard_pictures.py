"""Pictures of the dashboards, drawn from a load run: what Grafana would show, without a Grafana.

    python -m bench.dashboard_pictures [--seconds 120] [--at-once 8]

Launches the stack with two fake engines, asks it all kinds of requests, kills an engine halfway, and lets a real
Prometheus scrape it. Then the queries of the written JSON are run and drawn panel by panel, in the JSON's own layout,
into docs/images/dashboard-*.png.
"""

import argparse
import json
import math
import os
import signal
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from bench.mixed_load import MixedLoad
from bench.plane_stack import Stack
from bench.prometheus_server import PrometheusServer, filled_in, targets_of
from tools.dashboards.__main__ import FOLDER

PICTURES: Final = Path(__file__).resolve().parent.parent / "docs" / "images"
FLAGS: Final = (
    "--engine", "fake", "--fake-step-ms", "8", "--fake-row-us", "200", "--fake-token-us", "30", "--schedulers", "2",
    "--tokenizers", "1", "--detokenizers", "2", "--api-workers", "2", "--max-seq-len", "1024",
    "--max-running-requests", "8", "--num-pages", "512",
)  # fmt: skip
WINDOW: Final = "15s"
STEP_S: Final = 1.0
WIDTH_INCHES: Final = 10.0
COLORS: Final = 48
Json = dict[str, Any]


class Painter:
    """Draws one dashboard from the data of a run."""

    def __init__(self, prometheus: PrometheusServer, start: float, end: float) -> None:
        self._prometheus = prometheus
        self._start, self._end = start, end

    def draw(self, board: Json, path: Path) -> None:
        """Draw all panels where the JSON places them."""
        unit = WIDTH_INCHES / 24
        height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in board["panels"])
        figure = plt.figure(figsize=(WIDTH_INCHES, height * unit * 0.55), dpi=96)
        for panel in board["panels"]:
            at = panel["gridPos"]
            box = (at["x"] / 24, 1 - (at["y"] + at["h"]) / height, at["w"] / 24, at["h"] / height)
            if panel["type"] == "row":
                figure.text(0.004, box[1] + box[3] / 2, panel["title"], fontsize=9, weight="bold", va="center")
            else:
                self._panel(figure, panel, box, 1 / height)
        figure.savefig(path)
        plt.close(figure)
        shrink(path)

    def _panel(self, figure: Figure, panel: Json, box: tuple[float, float, float, float], unit: float) -> None:
        x, y, w, h = box
        if panel["type"] in ("stat", "table"):
            figure.text(x + 0.006, y + h - 0.55 * unit, panel["title"], fontsize=7, va="center")
            self._words(figure, panel, box, unit)
            return
        axes = figure.add_axes((x + 0.035, y + 1.1 * unit, w - 0.045, h - 2.2 * unit))
        axes.set_title(panel["title"], fontsize=7, loc="left", pad=3)
        axes.tick_params(labelsize=5, length=2, pad=1)
        axes.set_xlim(0, self._end - self._start)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        drawn = self._heatmap(axes, panel) if panel["type"] == "heatmap" else self._lines(axes, panel)
        if not drawn:
            axes.text(0.5, 0.5, panel["fieldConfig"]["defaults"]["noValue"], transform=axes.transAxes, fontsize=7,
                      ha="center", color="grey")  # fmt: skip

    def _series(self, target: Json) -> list[tuple[str, list[float], list[float]]]:
        """Run a query over the run; gives name, seconds since its start and values of each series."""
        found = self._prometheus.query_range(filled_in(target["expr"], WINDOW), self._start, self._end, STEP_S)
        series = []
        for labels, points in found:
            name = target["legendFormat"]
            for label, value in labels.items():
                name = name.replace(f"{{{{{label}}}}}", value)
            known = [(at - self._start, float(value)) for at, value in points]
            series.append((name, [at for at, _ in known], [value for _, value in known]))
        return series

    def _lines(self, axes: Axes, panel: Json) -> bool:
        defaults = panel["fieldConfig"]["defaults"]
        series = [one for target in panel["targets"] for one in self._series(target)]
        if defaults["custom"]["stacking"]["mode"] == "normal" and series:
            moments = sorted({at for _, times, _ in series for at in times})
            stacked = [
                [dict(zip(times, values, strict=True)).get(at, 0.0) for at in moments] for _, times, values in series
            ]
            stacked = [[0.0 if math.isnan(value) else value for value in values] for values in stacked]
            axes.stackplot(moments, stacked, labels=[name for name, _, _ in series], alpha=0.7, linewidth=0)
        else:
            for name, times, values in series:
                axes.plot(times, values, linewidth=0.8, label=name)
        highest = max((value for _, _, values in series for value in values if math.isfinite(value)), default=0.0)
        axes.set_ylim(0, defaults.get("max") or (None if highest > 0 else 1))
        axes.yaxis.set_major_formatter(lambda value, _: in_unit(value, defaults["unit"]))
        if series:
            axes.legend(fontsize=4.5, ncols=2, frameon=False, loc="upper left", handlelength=1, labelspacing=0.2)
        return bool(series)

    def _heatmap(self, axes: Axes, panel: Json) -> bool:
        rows = sorted(self._series(panel["targets"][0]), key=lambda one: float(one[0].replace("+Inf", "inf")))
        if not rows:
            return False
        below = [0.0] * len(rows[0][1])
        cells = []
        for _, _, values in rows:
            cells.append([max(0.0, value - less) for value, less in zip(values, below, strict=True)])
            below = values
        axes.pcolormesh(rows[0][1], range(len(rows)), cells, cmap="Oranges", shading="nearest")
        axes.set_yticks(range(0, len(rows), 3), [in_unit(float(name), "s") for name, _, _ in rows[::3]])
        return True

    def _words(self, figure: Figure, panel: Json, box: tuple[float, float, float, float], unit: float) -> None:
        """Write the number of a stat, or the labels of a table."""
        x, y, w, h = box
        found = self._prometheus.query(filled_in(panel["targets"][0]["expr"], WINDOW))
        defaults = panel["fieldConfig"]["defaults"]
        if panel["type"] == "stat":
            text = in_unit(found[0][1], defaults["unit"]) if found else defaults["noValue"]
            figure.text(x + w / 2, y + h / 2 - 0.3 * unit, text, fontsize=15, ha="center", va="center", color="#1f60c4")
            return
        hidden = {"__name__", "job", "instance"}
        lines = ["  ".join(f"{k}={v}" for k, v in sorted(labels.items()) if k not in hidden) for labels, _ in found]
        text = "\n".join(textwrap.shorten(line, int(w * 190)) for line in lines[:7])
        figure.text(x + 0.006, y + h - 1.2 * unit, text, fontsize=5, va="top", family="monospace")


def in_unit(value: float, unit: str) -> str:
    """Write a number as a person would."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "bytes":
        return f"{value / 2**20:.4g} MiB"
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    number = f"{value / 1e3:.3g}k" if abs(value) >= 1e4 else f"{value:.4g}"
    return number + ("/s" if unit == "reqps" else "")


def shrink(path: Path) -> None:
    """Keep a picture small: few colours."""
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLORS).save(path, optimize=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load and draw."""
    parser = argparse.ArgumentParser(prog="bench.dashboard_pictures", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--at-once", type=int, default=8)
    args = parser.parse_args(argv)
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Stack(*FLAGS) as stack:
        prometheus = PrometheusServer(Path(folder), targets_of(stack.ports()))
        try:
            start = time.time()
            with MixedLoad(f"http://{stack.host}:{stack.port}", stack.model, args.at_once) as load:
                time.sleep(args.seconds / 2)
                os.kill(stack.pids()["scheduler-0"], signal.SIGKILL)
                time.sleep(args.seconds / 2)
                painter = Painter(prometheus, start, time.time())
                for path in sorted(FOLDER.glob("*.json")):
                    picture = PICTURES / f"dashboard-{path.stem.removeprefix('millrace-')}.png"
                    painter.draw(json.loads(path.read_text(encoding="utf-8")), picture)
                    print(f"{picture.name}: {picture.stat().st_size / 1024:.0f} kB")
            print(dict(load.told))
        finally:
            prometheus.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
