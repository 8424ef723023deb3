"""A real Prometheus that scrapes what was launched, with the project's own rules: for tests, and for pictures."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from services.launcher.ports import Ports

RULES: Final = Path(__file__).resolve().parent.parent / "ops" / "prometheus" / "rules" / "millrace.yml"
READY_LIMIT_S: Final = 60.0
Sample = tuple[dict[str, str], float]

CONFIG: Final = """
global: {{scrape_interval: 500ms, scrape_timeout: 400ms, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
{jobs}
"""
JOB: Final = """
  - job_name: {job}
    file_sd_configs: [{{files: ["{folder}/{job}.json"], refresh_interval: 1s}}]
"""


class PrometheusServer:
    """One server on a free port, with its data in a folder. Targets may change while it runs."""

    def __init__(self, folder: Path, targets: Mapping[str, Sequence[int]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for job, ports in targets.items():
            self.aim(job, ports)
        config = folder / "prometheus.yml"
        jobs = "".join(JOB.format(job=job, folder=folder) for job in targets)
        config.write_text(CONFIG.format(rules=RULES, jobs=jobs))
        port = Ports().next_free("127.0.0.1", 19090)
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        self._wait_ready()

    def aim(self, job: str, ports: Sequence[int]) -> None:
        """Say where the instances of a job are."""
        targets = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
        new = self._folder / f"{job}.new"
        new.write_text(f'[{{"targets": [{targets}]}}]')
        new.rename(self._folder / f"{job}.json")

    def query(self, expr: str) -> list[Sample]:
        """Ask now; gives labels and value of each sample."""
        data = self._get("/api/v1/query", query=expr)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(dict(found["metric"]), float(found["value"][1])) for found in data["result"]]

    def query_range(self, expr: str, start: float, end: float, step: float) -> list[tuple[dict[str, str], list[Any]]]:
        """Ask for a range; gives labels and (time, value) pairs of each series."""
        data = self._get("/api/v1/query_range", query=expr, start=start, end=end, step=step)
        return [(dict(found["metric"]), found["values"]) for found in data["result"]]

    def rules(self) -> list[dict[str, Any]]:
        """Give all rules with their health."""
        return [rule for group in self._get("/api/v1/rules")["groups"] for rule in group["rules"]]

    def up(self) -> int:
        """Count the targets that answer."""
        return int(sum(value for _, value in self.query("up")))

    def close(self) -> None:
        """End it."""
        self._client.close()
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    def _get(self, path: str, **params: Any) -> Any:
        answer = self._client.get(path, params=params)
        body = answer.json()
        assert body["status"] == "success", f"{params}: {body}"
        return body["data"]

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_LIMIT_S
        while True:
            assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "Prometheus does not get ready"
            try:
                if self._client.get("/-/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)


def targets_of(ports: Mapping[str, int]) -> dict[str, list[int]]:
    """Give job -> ports of what Prometheus scrapes, from the ports of a launched stack's instances."""
    targets: dict[str, list[int]] = {}
    for name, port in ports.items():
        if name != "redis":
            targets.setdefault(name.rpartition("-")[0], []).append(port)
    return targets


def filled_in(expr: str, window: str = "30s") -> str:
    """Put values in place of a dashboard's variables."""
    values = {
        "$__rate_interval": window,
        "$__range": "1m",
        "$job": ".*",
        "$instance": ".*",
        "$ttft_slo": "2.0",
        "$itl_slo": "0.2",
    }
    for name, value in values.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr
