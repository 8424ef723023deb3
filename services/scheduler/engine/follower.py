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
from contextlib import suppress
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
from services.scheduler.engine.kernel_cache import inherited_folder, kept_kernels
from services.scheduler.engine.local import FollowerEngine
from services.scheduler.engine.memory import within_memory
from services.scheduler.engine.models.llama import LlamaModel
from services.scheduler.engine.parallel.comm import Comm, join_store
from services.scheduler.engine.parallel.control import (
    Channel,
    Closed,
    Failed,
    Message,
    Ready,
    Serve,
    Setup,
    WireBatch,
    decode_batch,
    encode,
)
from services.scheduler.engine.parallel.ending import EXIT_CONFIG, EXIT_FAULT, end_process
from services.scheduler.engine.parallel.orders import Order
from services.scheduler.engine.parallel.state import Ranks
from shared.errors import ConfigError
from shared.model_files import locate

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.5
_CLOSE_S: Final = 2.0
"""How long a rank that serves may take to let its device finish when rank 0 lets it go."""

Follow = Callable[[Message], None]


def main(fd: int) -> int:
    """Follow rank 0 and give the exit code: 0 when it has ended or let this rank go."""
    channel, serves = Channel(socket.socket(fileno=fd)), threading.Event()
    threading.Thread(target=_end_with, args=(channel, os.getppid(), serves), name="rank-0", daemon=True).start()
    try:
        follow, end = _start(channel)
        serves.set()
        with suppress(Closed):
            while True:
                follow(channel.receive())
        end()
    except Closed:
        return 0
    except Exception as e:
        is_config = isinstance(e, ConfigError)
        if not is_config:
            log.exception("this rank cannot go on")
        with suppress(Closed):
            channel.send(encode(Failed(str(e) if is_config else f"{type(e).__name__}: {e}", is_config)))
        return EXIT_CONFIG if is_config else EXIT_FAULT
    return 0


def _start(channel: Channel) -> tuple[Follow, Callable[[], None]]:
    """Load the model and follow until rank 0 serves; returns what follows a message, and what ends this rank.

    Raises:
        Closed: rank 0 has let this rank go.
        ConfigError: it cannot be served as set.
    """
    setup = channel.receive()
    assert isinstance(setup, Setup)
    config = EngineConfig(**setup.config)
    with kept_kernels(inherited_folder(), config.device), within_memory():
        files = locate(setup.model)
        plan = plan_model(config, files, Ranks(setup.rank, setup.size))
        channel.send(encode(Ready()))
        comm = make_comm(plan, join_store(setup.port, setup.size), direct=config.direct_sums)
        model = load_model(plan, files, comm)
        channel.send(encode(Ready()))
        start = _start_on_gpu if runs_on_kernels(plan, config.attention_backend) else _start_on_cpu
        follow, end = start(plan, config, model, comm)
        while not isinstance(message := channel.receive(), Serve):
            follow(message)  # what warms all ranks up
    return follow, end


def _start_on_cpu(
    plan: ModelPlan, config: EngineConfig, model: LlamaModel, comm: Comm
) -> tuple[Follow, Callable[[], None]]:
    set_threads(plan.threads)
    engine = FollowerEngine(model, make_cache(plan, model, comm), plan.limits, config.attention_backend, comm)

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


def _end_with(channel: Channel, parent: int, serves: threading.Event) -> None:
    """End this process when rank 0 is gone or lets it go, whatever the main thread waits for."""
    while not channel.wait_closed(_LOOK_S):
        if os.getppid() != parent:
            os._exit(EXIT_FAULT)
    until = time.monotonic() + (_CLOSE_S if serves.is_set() else 0.0)
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.05)  # the main thread has read it too
    os._exit(EXIT_FAULT)


if __name__ == "__main__":
    # Not by way of what the interpreter does at its end: a GPU may wait for a rank that is gone.
    end_process(main(int(sys.argv[1])))
