"""Detokenizers as they run: on a thread of the test, or as a process of their own."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from services.detokenizer.settings import DetokenizerSettings
from services.detokenizer.worker import BEAT_S, Detokenizer
from shared.runtime import Life
from shared.settings import RedisSettings
from tests.detokenizer.stage import MODEL
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


class ThreadInstance:
    """A whole service, its life included, on a thread. `kill` calls end the thread's test, not the process."""

    def __init__(self, redis: RedisSettings, name: str = "detokenizer-a") -> None:
        settings = DetokenizerSettings(
            **redis.model_dump(),
            model="bytes",
            served_model_name=MODEL,
            name=name,
            health_host="127.0.0.1",
            health_port=0,
        )
        self.killed: list[int] = []
        self.life = Life("detokenizer", settings, Detokenizer(settings), beat_s=BEAT_S, kill=self.killed.append)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def _run(self) -> None:
        self.code = self.life.run()

    def wait_ready(self) -> None:
        eventually(lambda: self.life.readiness.ready, "the detokenizer is ready")

    def stop(self) -> int | None:
        """Drain; gives the exit code."""
        self.life.drain()
        self._thread.join(20)
        assert not self._thread.is_alive()
        assert self.killed == []
        return self.code


class ProcessInstance:
    """A service as its image runs it."""

    def __init__(self, redis: RedisSettings, name: str) -> None:
        env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("MILLRACE_")},
            "MILLRACE_REDIS_URL": redis.redis_url,
            "MILLRACE_REDIS_PREFIX": redis.redis_prefix,
            "MILLRACE_MODEL": "bytes",
            "MILLRACE_SERVED_MODEL_NAME": MODEL,
            "MILLRACE_NAME": name,
            "MILLRACE_HEALTH_HOST": "127.0.0.1",
            "MILLRACE_HEALTH_PORT": "0",
        }
        self.process = subprocess.Popen([sys.executable, "-m", "services.detokenizer"], cwd=ROOT, env=env)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)
