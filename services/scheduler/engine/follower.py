"""A rank above 0: loads its piece of the model and computes what rank 0 tells it to, until that ends.

`python -m services.scheduler.engine.follower FD RANK`, started by rank 0 with a socket. Knows no request and draws
no token.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import torch

from services.scheduler.engine.device import set_threads
from services.scheduler.engine.engine import (
    EngineConfig,
    ModelPlan,
    load_model,
    make_cache,
    make_comm,
    plan_model,
    runs_on_kernels,
)
from services.scheduler.engine.local import FollowerEngine
from services.scheduler.engine.models.llama import LlamaModel
from services.scheduler.engine.parallel.comm import Comm, join_store
from services.scheduler.engine.parallel.control import (
    Channel,
    Closed,
    Message,
    Ready,
    Setup,
    WireBatch,
    decode_batch,
    encode,
)
from services.scheduler.engine.parallel.orders import Order
from services.scheduler.engine.parallel.state import Ranks
from shared.errors import ConfigError
from shared.model_files import locate

log = logging.getLogger(__name__)

EXIT_FAULT: Final = 1
_LOOK_S: Final = 0.5
_TOLD_S: Final = 10.0


def main(fd: int) -> int:
    """Follow rank 0 and give the exit code: 0 when it has ended or let this rank go."""
    threading.Thread(target=_end_with, args=(os.getppid(),), name="parent", daemon=True).start()
    channel = Channel(socket.socket(fileno=fd))
    setup = channel.receive()
    assert isinstance(setup, Setup)
    try:
        follow, end = _start(channel, setup)
    except ConfigError as e:
        log.error("rank %d cannot start: %s", setup.rank, e)
        channel.send(encode(Ready(str(e))))
        channel.wait_closed(_TOLD_S)  # rank 0 ends this rank, unless it waits on its GPU for it
        return EXIT_FAULT
    while True:
        try:
            message = channel.receive()
        except Closed:
            end()
            return 0
        follow(message)


Follow = Callable[[Message], None]


def _start(channel: Channel, setup: Setup) -> tuple[Follow, Callable[[], None]]:
    """Load the model; returns what follows a message, and what ends this rank."""
    config = EngineConfig(**setup.config)
    files = locate(setup.model)
    ranks = Ranks(setup.rank, setup.size)
    plan = plan_model(config, files, ranks)
    channel.send(encode(Ready()))
    comm = make_comm(plan, join_store(setup.port, setup.size), direct=config.direct_sums)
    model = load_model(plan, files, comm)
    channel.send(encode(Ready()))
    set_threads(plan.threads)
    if runs_on_kernels(plan, config.attention_backend):
        return _start_on_gpu(plan, config, model, comm)
    cache = make_cache(plan, model, comm)
    engine = FollowerEngine(model, cache, plan.limits, config.attention_backend, comm)

    def follow(message: Message) -> None:
        assert isinstance(message, WireBatch)
        with torch.inference_mode():
            engine.compute(decode_batch(message))

    return follow, lambda: None


def _start_on_gpu(
    plan: ModelPlan, config: EngineConfig, model: LlamaModel, comm: Comm
) -> tuple[Follow, Callable[[], None]]:
    from services.scheduler.engine.gpu_start import start_gpu_follower  # Triton only where it is used

    gpu = start_gpu_follower(model, plan.limits, plan.pool, config.cuda_graph_max_bs, comm)

    def follow(message: Message) -> None:
        assert isinstance(message, Order)
        gpu.follow(message)

    return follow, gpu.close


def _end_with(parent: int) -> None:
    """End this process when rank 0 is gone, whatever the main thread waits for."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(EXIT_FAULT)


def _run(fd: int) -> int:
    try:
        return main(fd)
    except Closed:
        return 0
    except Exception:
        log.exception("this rank cannot go on")
        return EXIT_FAULT


if __name__ == "__main__":
    status = _run(int(sys.argv[1]))
    logging.shutdown()
    # Not by way of what the interpreter does at its end: a GPU may wait for a rank that is gone.
    os._exit(status)
