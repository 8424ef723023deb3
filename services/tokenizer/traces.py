"""The stages of a request in a tokenizer, for its trace, and for those who look closely at the log."""

import logging
import time
from collections.abc import Sequence

from shared import tracing
from shared.messages import TokenizeRequest

log = logging.getLogger(__name__)


def queued(request: TokenizeRequest) -> None:
    """Note that a request was read from the queue."""
    now_ns = time.time_ns()
    tracing.record("queue", request.traceparent, request.arrival_ms * 1_000_000, now_ns, request_id=request.request_id)
    log.debug("taken from the queue", extra={"request_id": request.request_id})


def encoded(requests: Sequence[TokenizeRequest], began_ns: int) -> None:
    """Note that requests were encoded together, since `began_ns` of the wall clock."""
    now_ns = time.time_ns()
    for request in requests:
        tracing.record(
            "tokenize", request.traceparent, began_ns, now_ns, request_id=request.request_id, batch=len(requests)
        )
