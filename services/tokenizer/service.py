"""The tokenizer as a service: loads the model's vocabulary and template, then lets the worker turn until the drain."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.claims import Claims
from services.tokenizer.dialect import find_dialect
from services.tokenizer.encode import PromptEncoder
from services.tokenizer.engines import Engines
from services.tokenizer.metrics import TokenizerMetrics
from services.tokenizer.settings import TokenizerSettings
from services.tokenizer.worker import Worker
from shared.broker.backoff import Backoff
from shared.broker.streams import backlog, forget_consumer, list_consumers
from shared.dialect import Dialect
from shared.errors import BrokerDown, BrokerError
from shared.messages import Heartbeat
from shared.model_files import locate
from shared.runtime import Life
from shared.vocab import load_vocabulary

log = logging.getLogger(__name__)

BLOCK_MS: Final = 100
"""How long a turn waits for requests: also how late the death of another tokenizer is noticed."""
_MEASURE_S: Final = 1.0


class TokenizerService:
    """Runs a worker for one model.

    Args:
        settings: of the service.
    """

    def __init__(self, settings: TokenizerSettings) -> None:
        self._settings = settings
        self._worker: Worker | None = None
        self._metrics: TokenizerMetrics | None = None
        self._dialect: Dialect | None = None
        self._trouble = ""
        self._pool = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="encode")

    def prepare(self, life: Life) -> None:
        """Load the model's small files.

        Raises:
            ConfigError: they are missing, broken or of an unsupported kind.
        """
        settings = self._settings
        files = locate(settings.model, settings.model_source, revision=settings.model_revision)
        vocabulary, template = load_vocabulary(files), ChatTemplate(files)
        encoder = PromptEncoder(vocabulary, template, controls_in_messages=settings.control_tokens_in_messages)
        self._dialect = find_dialect(
            files, template, vocabulary, tools=settings.tool_call_parser, reasoning=settings.reasoning_parser
        )
        model = settings.served_model_name
        engines = Engines(model, lambda: life.living("scheduler"), files.max_seq_len)
        self._metrics = TokenizerMetrics(life.metrics)
        self._worker = Worker(
            life.broker,
            model,
            life.incarnation,
            encoder,
            engines,
            self._metrics,
            batch=settings.tokenizer_batch,
            pool=self._pool,
            keep_bodies=settings.dead_letter_bodies,
        )

    def serve(self, life: Life) -> None:
        """Turn until the drain, then bring what is in hand to its end as far as there are engines for it."""
        worker, metrics, model = self._worker, self._metrics, self._settings.served_model_name
        assert worker is not None and metrics is not None, "prepare comes first"
        claims = Claims(
            life.broker,
            model,
            life.incarnation,
            worker,
            living=lambda: life.living("tokenizer").keys(),
            dead=lambda: life.dead("tokenizer").keys(),
            forgettable=lambda: life.forgettable("tokenizer"),
        )
        backoff, lost, next_measure_s = Backoff(), True, 0.0
        while not life.draining:
            life.beat()
            try:
                if lost:
                    worker.recover()
                    claims.lost()
                    lost = False
                worker.turn(BLOCK_MS)
                claims.look(life.beat)
                if time.monotonic() >= next_measure_s:
                    next_measure_s = time.monotonic() + _MEASURE_S
                    keys = life.broker.keys
                    found, in_hand = life.broker.run_many([backlog(keys.tokenize(model)), list_consumers(keys, model)])
                    metrics.backlog(found, sum(in_hand.values()))
                backoff.reset()
                self._went_well(life)
            except BrokerError as e:
                self._went_wrong(life, e)
                lost = True
                life.pause(backoff.next_s())
        self._finish(life, worker)

    def heartbeat(self, base: Heartbeat) -> Heartbeat:
        """Add what is in hand, and the model's dialect."""
        worker = self._worker
        if worker is None:
            return base
        return msgspec.structs.replace(
            base, num_running=worker.num_aside, num_waiting=worker.num_held, dialect=self._dialect
        )

    def reconnected(self) -> None:
        """Nothing: the worker's own calls fail with the connection, and it recovers by itself."""

    def others_died(self) -> None:
        """Nothing: the worker looks before each of its short reads."""

    def _went_well(self, life: Life) -> None:
        if self._trouble:
            self._trouble = ""
            life.readiness.have("queue")

    def _went_wrong(self, life: Life, error: BrokerError) -> None:
        """Note why the queue cannot be read: the heart tells of outages; what it does not see is told here, once."""
        if isinstance(error, BrokerDown):
            log.debug("the broker is away: %s", error)
        elif str(error) != self._trouble:
            self._trouble = str(error)
            life.readiness.missing("queue")
            log.error("the queue cannot be read: %s; trying again", error)

    def _finish(self, life: Life, worker: Worker) -> None:
        """End: what is being encoded is finished; what has no engine stays in the queue for another tokenizer."""
        try:
            while worker.num_aside and life.drain_left_s() > 0:
                life.beat()
                worker.bring_on()
                time.sleep(0.01)
            worker.bring_on()
            life.broker.run(forget_consumer(life.broker.keys, self._settings.served_model_name, life.incarnation))
        except BrokerError as e:
            log.warning("%d requests are left to other tokenizers: %s", worker.num_held + worker.num_aside, e)
        self._pool.shutdown(wait=False, cancel_futures=True)
