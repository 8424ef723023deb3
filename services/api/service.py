"""One api replica: its parts, its background tasks, and the life of a request from the door to the books.

Owns composition and the sweep that looks after requests nobody rings for: repairs, comment lines, slow clients,
services that stay away, the drain deadline. Knows no HTTP beyond what an exchange says of its client.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Coroutine
from typing import Any, Final

from services.api.admission import Admission, opened_in_vain, roles_of, service_away
from services.api.auth import KeyStore
from services.api.books import Books
from services.api.error_body import to_body
from services.api.exchange import Exchange
from services.api.fleet import NAMES, Fleet
from services.api.hops import Hops
from services.api.janitor import CLIENT_GONE, Janitor
from services.api.limits import KeyLimited, LimitKeeper, make_claim
from services.api.metrics import ApiMetrics
from services.api.readers import Readers
from services.api.repair import SWEEP_S, Repair
from services.api.replies import Replies, is_over
from services.api.settings import ApiSettings
from shared.broker.backoff import Backoff, Outage
from shared.broker.connection import AsyncBroker
from shared.errors import BrokerError, RateLimited, Unavailable
from shared.health import Readiness
from shared.ids import new_incarnation
from shared.metrics import DRAINING, READY, Metrics
from shared.version import VERSION

log = logging.getLogger(__name__)

SHUTTING_DOWN: Final = to_body(Unavailable("the server is shutting down", code="shutting_down"))
BROKER_AWAY: Final = to_body(Unavailable("the message broker was away for too long", code="broker_unavailable"))
_SETTLE_S: Final = 2.0
_LOOP_PROBE_S: Final = 0.1


class ApiService:
    """All parts of a replica. Built in the process's main, started and stopped by the app's lifespan.

    Attributes:
        incarnation: names the inbox; new at every start.
        drain_deadline: monotonic seconds at which running requests are ended; infinite while not draining.
        readiness: what `/readyz` answers from.
        faulted: a background task has died.
    """

    def __init__(self, settings: ApiSettings, *, port: int = 0) -> None:
        self.settings = settings
        self.incarnation = new_incarnation(settings.instance_name("api"))
        common = Metrics("api", settings.instance_name("api"), settings.served_model_name, VERSION)
        self.metrics = ApiMetrics(common)
        self.keys = KeyStore(settings)
        self.readiness = Readiness()
        self.broker = AsyncBroker(settings, name=self.incarnation)
        self.fleet = Fleet(
            self.broker, self.incarnation, settings, common, version=VERSION, port=port, on_reconnect=self._reconnected
        )
        self.books = Books(self.metrics, self.fleet.waits)
        self.hops = Hops(self.broker, self.fleet.pipeline)
        self.janitor = Janitor(self.broker, self.metrics.strays)
        self.repair = Repair(
            self.broker, self.incarnation, self.fleet, self.metrics,
            repair_after=settings.repair_after, reopen_after=settings.reopen_after,
            end_stray=lambda uid: self.janitor.end(uid, CLIENT_GONE),
        )  # fmt: skip
        self.readers = Readers(self.broker, self.repair, self.metrics, life_ms=int(settings.resume_for * 1000))
        self.replies = Replies(self.broker, self.incarnation, self.janitor, self.repair, self.metrics)
        self.admission = Admission(settings, self.fleet)
        self.limits = LimitKeeper(self.broker)
        self._ready = common.gauge(READY)
        self._draining = common.gauge(DRAINING)
        self._tasks: list[asyncio.Task[None]] = []
        self._sweep_all = False
        self.drain_deadline = float("inf")
        self.faulted = False

    async def start(self) -> None:
        """Start the background tasks. Probes answer from here on; the broker may still be away."""
        for name, work in (
            ("heart", self._connect_and_beat()),
            ("inbox", self.replies.run()),
            ("janitor", self.janitor.run()),
            ("readers", self.readers.run()),
            ("sweep", self._sweep_forever()),
            ("limits", self.limits.run()),
            ("keys", self.keys.watch(self.metrics.keys_read)),
            ("loop-probe", self._probe_loop()),
        ):
            self._tasks.append(asyncio.create_task(self._guard(name, work), name=name))
        self.readiness.started()

    async def stop(self) -> None:
        """Finish what is left behind requests, leave the registry, close the broker. Requests are over by now."""
        for exchange in list(self.replies.exchanges):
            self.replies.close(exchange, SHUTTING_DOWN)
        if not await self.janitor.settle(_SETTLE_S):
            log.warning("some reply logs were not ended; they die by their time to live")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await asyncio.wait_for(self.limits.work(), _SETTLE_S)
            await asyncio.wait_for(self.fleet.leave(), _SETTLE_S)
        except (BrokerError, TimeoutError):
            log.warning("the registry was not left; the lease tells")
        await self.broker.close()

    def drain(self) -> None:
        """Begin to end: take no new request, and end the running ones when the drain time is over."""
        if not self.admission.draining:
            log.info("draining: %d requests are running", len(self.replies.exchanges))
            self.admission.draining = self.fleet.draining = True
            self._draining.set(1)
            self.drain_deadline = time.monotonic() + self.settings.drain_timeout

    def fingerprint(self, model: str) -> str:
        """Name what answers: version, model and the weights of the engines that serve it now."""
        engines = sorted({e.fingerprint for e in self.fleet.living("scheduler", model)})
        return "fp_" + hashlib.sha256("\0".join([VERSION, model, *engines]).encode()).hexdigest()[:12]

    def missing(self) -> list[str]:
        """Name what keeps this replica from serving now."""
        missing = ["draining"] if self.admission.draining else []
        return missing + self.fleet.missing(self.settings.served_model_name) + self.readiness.what_is_missing()

    # --- the life of a request ---------------------------------------------------------------------------

    def enter(self, exchange: Exchange) -> None:
        """Count a request in."""
        self.books.begin(exchange)
        if exchange.follows:
            self.replies.exchanges.add(exchange)
            self.fleet.num_resumed += len(exchange.choices)
            return
        self.admission.enter(exchange.job)
        self.fleet.num_open = self.admission.num_choices

    async def open(self, exchange: Exchange) -> None:
        """Queue a request.

        Raises:
            RateLimited: with the measured wait. KeyLimited, Unavailable, BrokerError: as `Replies.open`.
        """
        exchange.job.claim = claim = make_claim(exchange.job)
        if claim is not None:
            self.limits.enter(claim)
        began = time.monotonic()
        try:
            await self.replies.open(exchange, self.admission.capacity(exchange.job.model))
        except KeyLimited as e:
            self.metrics.refused.labels("key_limits").inc()
            exchange.fail(to_body(e))
            raise
        except RateLimited as e:
            self.metrics.refused.labels("queue_full").inc()
            full = self.admission.full(e.message, len(exchange.choices))
            exchange.fail(to_body(full))
            raise full from e
        except (Unavailable, BrokerError) as e:
            self.metrics.refused.labels("broker").inc()
            exchange.fail(to_body(e))
            raise
        self.metrics.open.observe(time.monotonic() - began)

    async def free(self, exchange: Exchange) -> None:
        """Free what a request has of its key's limits, before its client can have read the end of its answer."""
        if self.fleet.connected and is_over(exchange):
            await self.limits.free(exchange)

    def leave(self, exchange: Exchange) -> None:
        """Leave nothing of a request behind, and write it into the books."""
        error = exchange.first_error()
        self.replies.close(exchange, error or CLIENT_GONE)
        self.readers.leave(exchange)
        if exchange.follows:
            self.fleet.num_resumed -= len(exchange.choices)
            if not exchange.num_open:
                self.limits.look_soon()
        else:
            self.limits.leave(exchange)
            self.admission.leave(exchange.job, sum(choice.ended is not None for choice in exchange.choices))
            self.fleet.num_open = self.admission.num_choices
        self.books.end(exchange, error)
        exchange.let_go()

    # --- background --------------------------------------------------------------------------------------

    async def _guard(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Say when a background task dies, and end: nothing else would tell, until a client hangs."""
        try:
            await work
        except Exception:
            log.critical("the task %s died", name, exc_info=True)
            self.readiness.missing(f"{name} task")
            self._ready.set(0)  # it may have been the one that says so
            self.faulted = True
            raise

    async def _connect_and_beat(self) -> None:
        """Agree with the installation once, then beat. A server that will not do keeps the replica unready."""
        backoff, outage = Backoff(), Outage()
        self.readiness.missing("broker agreement")
        while True:
            try:
                self.hops.num_shards = (await self.broker.prepare()).num_shards
                break
            except BrokerError as e:
                if told := outage.tell(str(e)):
                    log.warning("waiting for the broker at %s: %s", self.broker.url, told)
                await asyncio.sleep(backoff.next_s())
        self.readiness.have("broker agreement")
        await self.fleet.run()

    def _reconnected(self) -> None:
        self._sweep_all = True

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._look_after_clients()
            self._ready.set(not self.missing())
            if not self.fleet.connected:
                continue
            everything, self._sweep_all = self._sweep_all, False
            try:
                choices = [*self.replies.choices.values(), *self.readers.followed_choices()]
                await self.repair.sweep(choices, everything=everything)
            except BrokerError as e:
                log.debug("a sweep was cut short: %s", e)
                self._sweep_all = self._sweep_all or everything

    def _look_after_clients(self) -> None:
        now = time.monotonic()
        over = now >= self.drain_deadline
        for exchange in list(self.replies.exchanges):
            if over:
                exchange.fail(SHUTTING_DOWN)
            if exchange.sending_since:
                if over or now - exchange.sending_since > self.settings.slow_client_timeout:
                    self.metrics.slow_clients.inc()
                    exchange.drop()
            elif now - exchange.silent_since > self.settings.sse_comment_interval:
                exchange.silent_since = now
                exchange.nudge()
            if exchange.num_open:
                self._check_broker(exchange, now)
            if self.fleet.connected and exchange.num_open:
                self._check_services(exchange)

    def _check_broker(self, exchange: Exchange, now: float) -> None:
        """End a request that hears nothing because of a broker that stays away, or takes nothing."""
        silent_s = now - max(exchange.opened_at, exchange.last_token_at)
        if min(silent_s, self.fleet.unwell_s) > self.settings.no_engine_timeout:
            exchange.fail(BROKER_AWAY)

    def _check_services(self, exchange: Exchange) -> None:
        """End a request that waits for a service which stays away."""
        model = exchange.job.model
        for role in roles_of(exchange.job):
            away = self.fleet.away_s(role, model)
            in_vain = (
                not exchange.started
                and not exchange.follows
                and opened_in_vain(self.fleet, role, exchange.opened_at, model, self.settings.missing_grace)
            )
            if away and (in_vain or away > self.settings.no_engine_timeout):
                exchange.fail(to_body(service_away(NAMES[role])))

    async def _probe_loop(self) -> None:
        """Measure how late the event loop runs a timer: what every client waits for when the loop is busy."""
        while True:
            due = time.monotonic() + _LOOP_PROBE_S
            await asyncio.sleep(_LOOP_PROBE_S)
            self.metrics.event_loop_delay.observe(max(0.0, time.monotonic() - due))
