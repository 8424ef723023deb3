"""The stack under test and the hand that strikes it: two of every service, a Redis behind a wire, faults by name.

Owns processes and their signals, the broker's server and its data, and the questions whether all serve again and
whether anything is left. Knows no client.
"""

import asyncio
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
import redis.asyncio

from bench.chaos.proxy import Proxy
from bench.chaos.schedule import LEASES_S, Fault
from bench.chaos.workload import NAN, POISON
from bench.plane_stack import Stack
from bench.soak import GAUGES, KEPT, read_gauge
from services.launcher.redis_server import RedisServer, find_programs
from shared.broker.log_id import END_ATTEMPT
from shared.keys import TOKENIZER_GROUP

READY_LIMIT_S: Final = 60.0
QUIET_LIMIT_S: Final = 75.0
"""How long what is left may take to go: plain requests of a dead api wait for its lease, and their logs a minute."""
RESUME_FOR_S: Final = 8
"""How long a stream that can be resumed waits for its client."""
_LATENCY_S: Final = 0.1
_LOOK_S: Final = 0.05
_STRANGE: Final = b"not yours"
ALARMS: Final = {
    "reopened": ("api", "millrace_requests_reopened_total"),
    "unheld": ("api", 'millrace_requests_reopened_total{why="unheld"}'),
    "gaps": ("detokenizer", 'millrace_detokenizer_dropped_total{reason="gap"}'),
    "restarts": ("scheduler", "millrace_log_restarts_total"),
}
"""What must never happen while the broker has lost nothing."""


class Ground:
    """Two of each service on a Redis of their own. Use as a context; `start` comes first.

    Args:
        engine: `fake` or `real`.
        seed: decides what faults leave open.
    """

    def __init__(self, engine: str, seed: int) -> None:
        self._engine = engine
        self._rng = random.Random(f"strikes {seed}")
        self._folder = Path(tempfile.mkdtemp(prefix="millrace-chaos-"))
        self._server = RedisServer(find_programs()[0], self._folder, persistent=True)
        self._proxy = Proxy(self._server.port)
        self._redis = redis.asyncio.Redis(port=self._server.port)
        self._vandalized = b""
        self._old_pid = 0
        self._stack: Stack
        self._session: aiohttp.ClientSession

    async def start(self) -> None:
        """Launch, and wait until all serve."""
        await asyncio.to_thread(self._server.start)
        await self._proxy.start()
        flags = {
            "apis": 2, "tokenizers": 2, "schedulers": 2, "detokenizers": 2, "lease": LEASES_S["scheduler"],
            "redis-url": f"redis://127.0.0.1:{self._proxy.port}/0", "idle-reply": 3, "resume-for": RESUME_FOR_S,
        }  # fmt: skip
        if self._engine == "fake":
            markers = {name: ",".join(map(str, ids)) for name, ids in (("crash", POISON), ("nan", NAN))}
            flags |= {"engine": "fake", "fake-step-ms": 10, "stuck-after": 5, "max-running-requests": 32}
            flags |= {f"fake-{name}-marker": ids for name, ids in markers.items()}
        else:
            flags |= {"dtype": "float32", "max-running-requests": 8, "max-seq-len": 1024}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        self._stack = await asyncio.to_thread(Stack, *words)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3))
        await self.recovered()

    async def __aenter__(self) -> Self:
        """Give the ground; all of it is ended at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """End everything."""
        await self._session.close()
        await self._redis.aclose()
        await asyncio.to_thread(self._stack.close)
        await self._proxy.stop()
        self._server.kill()
        shutil.rmtree(self._folder)

    @property
    def model(self) -> str:
        """What clients call it."""
        return self._stack.model

    @property
    def urls(self) -> list[str]:
        """Addresses of the apis, in order."""
        ports = self._stack.ports()
        return [f"http://127.0.0.1:{ports[f'api-{i}']}" for i in range(2)]

    def log_text(self) -> str:
        """Give what the services have logged."""
        return self._stack.log.read_text(errors="replace")

    # --- strikes

    async def strike(self, fault: Fault) -> None:
        """Let a fault begin. Those of clients are the clients' own."""
        match fault.kind:
            case "kill" | "drain":
                self._signal(fault.target, signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
            case "stop" | "pause" if fault.target == "redis":
                os.kill(self._server.pid, signal.SIGSTOP)
            case "stop" | "pause":
                self._signal(fault.target, signal.SIGSTOP)
            case "redis kill":
                self._server.kill()
            case "redis wipe":
                self._server.kill()
                for left in self._folder.glob("appendonly*"):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            case "latency":
                self._proxy.delay_s = _LATENCY_S
            case "cut":
                self._proxy.cut()
            case "vandal":
                await self._vandalize(fault.target)

    async def heal(self, fault: Fault) -> None:
        """Let a fault end, once it has lasted as long as it shall."""
        await asyncio.sleep(fault.hold_s)
        match fault.kind:
            case "kill" | "drain":
                await self._until(lambda: self._stack.pids().get(fault.target, self._old_pid) != self._old_pid)
            case "stop" | "pause" if fault.target == "redis":
                os.kill(self._server.pid, signal.SIGCONT)
            case "stop" | "pause":
                os.kill(self._old_pid, signal.SIGCONT)
            case "redis kill" | "redis wipe":
                await asyncio.to_thread(self._server.start, 30.0)
            case "latency":
                self._proxy.delay_s = 0.0

    async def recovered(self) -> None:
        """Wait until every instance says that it serves, and no key of ours is a stranger's.

        Raises:
            TimeoutError: not in time; says who does not.
        """
        missing: list[str] = []
        deadline = time.monotonic() + READY_LIMIT_S
        while True:
            missing = [why for name in self._stack.ports() if (why := await self._lacks(name))]
            if self._vandalized and await self._redis.type(self._vandalized) == b"string":
                missing.append(self._vandalized.decode())
            if not missing:
                self._vandalized = b""
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready again: {missing}")
            await asyncio.sleep(_LOOK_S)

    async def _vandalize(self, kind: str) -> None:
        """Put a string in the place of one of our keys, if there is one of that kind."""
        found: list[Any] = await self._redis.keys(f"millrace:{kind}:*")
        keys: list[bytes] = sorted(found)
        if kind in ("inbox", "generate"):  # those of the dead are nobody's: they are not touched any more
            keys = [key for key in keys if (await self._redis.object("idletime", key) or 0) <= 1]
        elif kind == "reply":  # one that has ended is read by nobody
            keys = [key for key in keys if await self._is_open(key)]
        if kind == "tokens" and not keys:
            keys = [f"millrace:tokens:{self.model}:{shard}".encode() for shard in range(4)]
        if keys:
            self._vandalized = key = self._rng.choice(keys)
            await self._redis.set(key, _STRANGE, keepttl=True)

    async def _is_open(self, log: bytes) -> bool:
        """Whether a reply log has no terminal yet."""
        newest: Any = await self._redis.xrevrange(log, count=1)
        return bool(newest) and int(newest[0][0].partition(b"-")[0]) != END_ATTEMPT

    def _signal(self, instance: str, signum: int) -> None:
        self._old_pid = self._stack.pids()[instance]
        os.kill(self._old_pid, signum)

    async def _lacks(self, name: str) -> str:
        """Say who does not serve and for want of what; empty when it serves."""
        try:
            async with self._session.get(f"http://127.0.0.1:{self._stack.ports()[name]}/readyz") as answer:
                return "" if answer.status == 200 else f"{name}: {(await answer.json())['missing']}"
        except (aiohttp.ClientError, TimeoutError) as e:
            return f"{name}: {type(e).__name__}"

    async def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_LIMIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("no successor was started")
            await asyncio.sleep(_LOOK_S)

    # --- what is left

    async def alarms(self) -> dict[str, dict[int, float]]:
        """Read the counters of what must not happen without lost data: alarm -> process -> count."""
        pids = self._stack.pids()
        found: dict[str, dict[int, float]] = {}
        for alarm, (role, metric) in ALARMS.items():
            names = [name for name in pids if name.startswith(role)]
            found[alarm] = {pids[name]: await asyncio.to_thread(self._gauge, name, metric) for name in names}
        return found

    def _gauge(self, instance: str, metric: str) -> float:
        try:
            return read_gauge(self._stack.ports()[instance], metric)
        except LookupError:  # a counter with labels that was never counted
            return 0.0

    async def quiet(self, *, keys: bool) -> dict[str, Any]:
        """Wait until no request has left anything; give what is there when the time is over.

        Args:
            keys: look into the broker too. Logs of a dead api's clients take a minute to go.
        """
        deadline = time.monotonic() + QUIET_LIMIT_S
        while True:
            left = await asyncio.to_thread(self._left_in_services)
            left |= await self._keys_for_ever() if not keys else await self._keys_left()
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.1)

    def _left_in_services(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for instance, port in self._stack.ports().items():
            for name in GAUGES.get(instance.partition("-")[0], ()):
                if value := read_gauge(port, name):
                    found[f"{instance} {name}"] = value
            if instance.startswith("scheduler"):
                pages = read_gauge(port, "millrace_kv_pages")
                capacity = read_gauge(port, "millrace_kv_pages_capacity")
                if pages != capacity:
                    found[f"{instance} pages"] = pages - capacity
        return found

    async def _keys_for_ever(self) -> dict[str, Any]:
        """Name keys of requests that have no time to live."""
        keys = [key async for key in self._redis.scan_iter(count=1000) if not KEPT.match(key.decode())]
        lives = [await self._redis.pttl(key) for key in keys]
        for_ever = [key.decode() for key, life in zip(keys, lives, strict=True) if life == -1]
        return {"keys for ever": for_ever} if for_ever else {}

    async def _keys_left(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key in [key.decode() async for key in self._redis.scan_iter(count=1000)]:
            kind = key.split(":")[1]
            if kind in ("reply", "abort") or not (KEPT.match(key) or kind == "strange"):
                found[key] = "is left"
            elif kind in ("tokenize", "generate", "tokens", "inbox") and (entries := await self._redis.xlen(key)):
                found[key] = f"{entries} entries"
            elif kind == "alive" and (registered := await self._redis.hlen(key)) != 2:
                found[key] = f"{registered} registered"
        living: Any = await self._redis.hkeys("millrace:alive:tokenizer")
        # A living one need not be there: before Redis 7.2 only one that has been given something is a consumer.
        for consumer in await self._redis.xinfo_consumers(f"millrace:tokenize:{self.model}", TOKENIZER_GROUP):
            if consumer["pending"] or consumer["name"] not in living:
                found[f"consumer {consumer['name'].decode()}"] = f"{consumer['pending']} pending"
        return found
