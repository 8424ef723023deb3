"""Load against the whole stack while its parts are struck, one after the other; and what came of it.

    python -m bench.chaos [--seed 1] [--requests 1000] [--faults 100] [--engine fake|real] [--brief] [--only WORDS]

Launches two of every service and a Redis with an append-only file behind a wire that can be made slow. In each round
some clients ask, a fault strikes in mid-stream, more clients ask, the fault ends, and all are heard out; the next
round begins when all serve again and nothing of this one is left. Schedule and requests are a pure function of the
seed. Every request was asked once before the first fault, so each answer is compared token by token with its own.
Prints a table; exits with 1 when a promise of docs/promises.md was broken.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Final

import aiohttp

from bench.chaos.clients import Client
from bench.chaos.ground import Ground
from bench.chaos.judge import Books, judge, table
from bench.chaos.schedule import Fault, plan
from bench.chaos.workload import NAN, POISON, Ask, hostile, make_pool, poison
from bench.plane_stack import machine

POOL: Final = {"fake": 65, "real": 13}
OVER_LIMIT_S: Final = 150.0
_BEGUN_LIMIT_S: Final = 60.0
_SLOW_S: Final = 0.03


class Run:
    """One run on one stack."""

    def __init__(self, ground: Ground, session: aiohttp.ClientSession, seed: int, engine: str) -> None:
        self._ground = ground
        self._session = session
        self._rng = random.Random(f"rounds {seed}")
        self._pool = make_pool(seed, ground.model, POOL[engine], real=engine == "real")
        self.total = Books()
        self.kinds: dict[str, Books] = defaultdict(Books)

    async def learn(self) -> None:
        """Ask for every answer once while nothing happens."""
        for at in range(0, len(self._pool), 16):
            clients = [self._client(ask) for ask in self._pool[at : at + 16]]
            await asyncio.gather(*(client.run(self._session) for client in clients))
            for client in clients:
                assert client.outcome == "done", (client.ask.kind, client.outcome, client.code)
                assert client.heard, client.ask.kind
                client.ask.answer, client.ask.tokens = client.heard, client.tokens

    async def round(self, fault: Fault, requests: int) -> None:
        """Ask, strike, ask more, and hear all out; then count."""
        before = await self._ground.alarms()
        slow_s = _SLOW_S if fault.kind == "slow readers" else 0.0
        early = [self._client(self._rng.choice(self._pool), slow_s) for _ in range(max(1, requests * 7 // 10))]
        tasks = {client: self._start(client) for client in early}
        await self._wait_begun(early, fault.after)
        await self._ground.strike(fault)
        late = [self._client(self._rng.choice(self._pool)) for _ in range(requests - len(early))]
        tasks |= {client: self._start(client) for client in late}
        notes = await self._clients_part(fault, early, tasks)
        try:
            await self._ground.heal(fault)
            await self._ground.recovered()
        except TimeoutError as e:
            notes.append(f"#{fault.number} {fault.name}: {e}")
        _, hung = await asyncio.wait(tasks.values(), timeout=OVER_LIMIT_S)
        for client, task in tasks.items():
            if task in hung:
                notes.append(f"#{fault.number} {fault.name}, {client.ask.kind}: hangs")
                task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        books = judge(fault, [*early, *late])
        books.forbidden += notes
        left = await self._ground.quiet(keys=False)
        books.leaked += [f"#{fault.number} {fault.name}: {what} {value}" for what, value in left.items()]
        risen = _risen(before, await self._ground.alarms())
        if not fault.loses_data:
            books.alarms += risen
        elif fault.kind != "vandal":  # an entry of a request is lost with everything, or not at all
            books.alarms += Counter(unheld=risen["unheld"])
        books.alarms = +books.alarms
        self.total.add(books)
        self.kinds[fault.name].add(books)

    async def _clients_part(
        self, fault: Fault, early: list[Client], tasks: dict[Client, "asyncio.Task[None]"]
    ) -> list[str]:
        """Do what the fault is, if it is one of clients; give what went wrong."""
        model = self._ground.model
        match fault.kind:
            case "leave":
                for client in early[:: self._rng.choice((1, 2))]:
                    tasks[client].cancel()
            case "poison" | "nan":
                marker, code = (POISON, "engine_crashed") if fault.kind == "poison" else (NAN, "bad_logits")
                bad = self._client(poison(model, marker))
                await bad.run(self._session)
                if (bad.outcome, bad.code) != ("error", code):
                    return [f"#{fault.number} {fault.name}: it ended with {bad.outcome} {bad.code}"]
            case "hostile":
                wrong = []
                for ask, status in hostile(model):
                    bad = self._client(ask)
                    await bad.run(self._session)
                    if bad.status != status:
                        wrong.append(f"#{fault.number} {fault.name}, {ask.kind}: answered with {bad.status} {bad.code}")
                return wrong
        return []

    def _client(self, ask: Ask, slow_s: float = 0.0) -> Client:
        return Client(ask, self._ground.urls, self._rng.randrange(2), slow_s=slow_s)

    def _start(self, client: Client) -> "asyncio.Task[None]":
        return asyncio.create_task(client.run(self._session))

    async def _wait_begun(self, clients: list[Client], count: int) -> None:
        """Wait until so many of the clients that can hear anything yet have."""
        waits = [asyncio.create_task(client.begun.wait()) for client in clients if client.ask.streams]
        deadline = time.monotonic() + _BEGUN_LIMIT_S
        while sum(wait.done() for wait in waits) < min(count, len(waits)) and time.monotonic() < deadline:
            await asyncio.wait([w for w in waits if not w.done()], timeout=1, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


def _risen(before: dict[str, dict[int, float]], after: dict[str, dict[int, float]]) -> Counter[str]:
    """Say which alarms have risen in processes that were there before."""
    risen: Counter[str] = Counter()
    for alarm, counts in after.items():
        risen[alarm] = int(sum(max(0.0, n - before[alarm].get(pid, 0.0)) for pid, n in counts.items()))
    return +risen


async def run(args: argparse.Namespace) -> Run:
    """Launch, learn, strike, and look at what is left."""
    schedule = plan(args.seed, args.faults, brief=args.brief, only=args.only)
    if args.engine == "real":
        schedule = [f for f in schedule if f.kind not in ("poison", "nan")]
    ground = Ground(args.engine, args.seed)
    await ground.start()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
    async with ground, session:
        one = Run(ground, session, args.seed, args.engine)
        await one.learn()
        began, share = time.monotonic(), args.requests // len(schedule)
        for fault in schedule:
            at, broken = time.monotonic(), len(one.total.forbidden) + len(one.total.leaked)
            await one.round(fault, share)
            told = one.total.forbidden[broken:] + one.total.leaked[broken:]
            print(
                f"{time.monotonic() - began:7.1f} s  #{fault.number:<3} {fault.kind} {fault.target} "
                f"({time.monotonic() - at:.1f} s)", *told, file=sys.stderr, flush=True,
            )  # fmt: skip
        left = await ground.quiet(keys=True)
        one.total.leaked += [f"at the end: {what} {value}" for what, value in left.items()]
        if args.log or not one.total.held:
            (args.log or Path("chaos.log")).write_text(ground.log_text())
    return one


def main() -> int:
    """Run, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--engine", choices=("fake", "real"), default="fake")
    parser.add_argument("--brief", action="store_true", help="one instance of each role is struck, none for long")
    parser.add_argument("--only", default="", help="faults whose name holds these words")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--log", type=Path, help="keep what the services log here; a broken promise keeps it anyway")
    args = parser.parse_args()
    began = time.monotonic()
    print(machine(), file=sys.stderr)
    one = asyncio.run(run(args))
    print(table(one.total, one.kinds))
    if args.json:
        figures = {"total": asdict(one.total), "kinds": {name: asdict(books) for name, books in one.kinds.items()}}
        args.json.write_text(json.dumps(figures))
    again = f"--seed {args.seed} --requests {args.requests} --faults {args.faults} --engine {args.engine}"
    again += " --brief" * args.brief + f" --only '{args.only}'" * bool(args.only)
    verdict = "held" if one.total.held else "BROKEN"
    print(f'\n{verdict} after {time.monotonic() - began:.0f} s; again: make chaos ARGS="{again}"')
    return 0 if one.total.held else 1


if __name__ == "__main__":
    sys.exit(main())
