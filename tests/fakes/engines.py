"""Engines for tests of the broker side: a whole scheduler as a process, or its loop and link within the test."""

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from types import TracebackType

from services.scheduler.broker_link import BrokerLink
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.fake_engine import FakeEngine, FakeEngineConfig
from services.scheduler.link_config import LinkConfig
from services.scheduler.loop import StepLoop
from services.scheduler.metrics import SchedulerMetrics
from shared.broker.connection import Broker
from shared.heart import Heart
from shared.messages import Heartbeat
from shared.metrics import Metrics
from shared.settings import RedisSettings
from tests.fakes.front import SHARDS, Front
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


class SchedulerProcess:
    """`python -m services.scheduler --engine fake` as a child. Ended, at the latest, with its block."""

    def __init__(self, redis: RedisSettings, name: str, log: Path, **settings: object) -> None:
        self.name = name
        self.log = log
        self._env = {
            **os.environ,
            "MILLRACE_REDIS_URL": redis.redis_url,
            "MILLRACE_REDIS_PREFIX": redis.redis_prefix,
            "MILLRACE_NAME": name,
            "MILLRACE_SERVED_MODEL_NAME": "tiny",
            "MILLRACE_ENGINE": "fake",
            "MILLRACE_LEASE": "1",
            "MILLRACE_HEALTH_HOST": "127.0.0.1",
            "MILLRACE_HEALTH_PORT": "0",
            **{f"MILLRACE_{key.upper()}": str(value) for key, value in settings.items()},
        }
        self.incarnation = ""
        self._former: set[str] = set()
        self.start()

    def start(self) -> None:
        self._former.add(self.incarnation)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.scheduler"], cwd=ROOT, env=self._env, stdout=log, stderr=log
            )

    def __enter__(self) -> "SchedulerProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def ready(self, front: Front) -> str:
        """Wait until it is registered, and give its incarnation."""

        def found() -> str:
            assert self.process.poll() is None, self.log.read_text()
            beats = front.beats()
            return next(
                (e for e, b in beats.items() if b.name == self.name and e not in self._former and b.max_running), ""
            )

        self.incarnation = eventually(found, f"{self.name} is registered")
        return self.incarnation

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait(self, timeout_s: float = 30.0) -> int:
        return self.process.wait(timeout_s)

    def metrics(self, front: Front) -> dict[str, float]:
        """Scrape: name with labels -> value."""
        port = front.beats()[self.incarnation].port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return {key: float(value) for key, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}


class HostedEngine:
    """Loop, link and heart of one engine in threads of the test."""

    def __init__(
        self, redis: RedisSettings, name: str, fake: FakeEngineConfig | None = None, *, api_lease_s: float = 60.0
    ) -> None:
        self.me = name
        self.broker = Broker(redis)
        self.registry = Metrics("scheduler", name, "tiny", "0")
        self.scheduler_metrics = SchedulerMetrics(self.registry)
        self._beats = 0
        self.heart = Heart(
            self.broker,
            "scheduler",
            name,
            self._describe,
            self.registry,
            watch=("api",),
            leases={"scheduler": 1.0, "api": api_lease_s},
            interval_s=0.1,
            on_up=self._on_up,
        )
        self.engine = FakeEngine(fake or FakeEngineConfig(base_ms=2.0))
        self.scheduler = Scheduler(self.engine.limits)
        config = LinkConfig(name, "tiny", "fake", SHARDS, lease_s=1.0, api_lease_s=api_lease_s)
        self.failures: list[str] = []
        self.link = BrokerLink(
            self.broker,
            self.heart,
            config,
            self.scheduler_metrics,
            on_report=self._on_report,
            on_failure=self.failures.append,
        )
        self.loop = StepLoop(self.engine, self.link, self.scheduler)
        self._thread = threading.Thread(target=self.loop.run, name=f"loop-{name}", daemon=True)

    def __enter__(self) -> "HostedEngine":
        self.heart.start()
        assert self.heart.wait_up(10.0)
        self.heart.announce()
        self.link.start()
        self._thread.start()
        eventually(lambda: self.heart.since_beat_s < 1.0 and not self.link.paused, "the engine is registered")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop_loop()
        if error is None:
            self.link.finish(5.0)
        self.heart.stop(leave=True)
        self.broker.close()
        if error is None:
            assert not self.failures

    def stop_loop(self) -> None:
        self.loop.stop()
        self.link.wake()
        self._thread.join(10.0)
        assert not self._thread.is_alive()

    @property
    def is_whole(self) -> bool:
        """Whether nothing runs, waits or is held, and every page can be had."""
        load = self.link.load
        idle = not load.num_running and not load.num_ready and not self.link.num_held
        return idle and load.free_pages == self.engine.limits.num_pages

    def counter(self, name: str, **labels: str) -> float:
        return self.registry.registry.get_sample_value(name, labels) or 0.0

    def _on_report(self) -> None:
        self._beats += 1

    def _on_up(self) -> None:
        self.link.lost_contact()

    def _describe(self) -> Heartbeat:
        load = self.link.load
        return Heartbeat(
            self._beats,
            self.me,
            model="tiny",
            fingerprint="fake",
            num_running=load.num_running,
            num_waiting=self.link.num_waiting,
            max_running=self.engine.limits.max_running,
            free_pages=load.free_pages,
        )
