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
from typing import Final

import torch

from services.scheduler.engine.device import set_threads
from services.scheduler.engine.engine import EngineConfig, load_model, make_cache, plan_model
from services.scheduler.engine.local import FollowerEngine
from services.scheduler.engine.parallel.comm import GroupComm, join_store
from services.scheduler.engine.parallel.control import (
    Channel,
    Closed,
    Ready,
    Setup,
    WireBatch,
    decode_batch,
    encode,
)
from services.scheduler.engine.parallel.state import Ranks
from shared.errors import ConfigError
from shared.model_files import locate

log = logging.getLogger(__name__)

EXIT_FAULT: Final = 1
_LOOK_S: Final = 0.5


def main(fd: int) -> int:
    """Follow rank 0 and give the exit code: 0 when it has ended or let this rank go."""
    threading.Thread(target=_end_with, args=(os.getppid(),), name="parent", daemon=True).start()
    channel = Channel(socket.socket(fileno=fd))
    setup = channel.receive()
    assert isinstance(setup, Setup)
    try:
        engine, threads = _start(channel, setup)
    except ConfigError as e:
        channel.send(encode(Ready(str(e))))
        return EXIT_FAULT
    set_threads(threads)
    with torch.inference_mode():
        while True:
            try:
                wire = channel.receive()
            except Closed:
                return 0
            assert isinstance(wire, WireBatch)
            engine.compute(decode_batch(wire))


def _start(channel: Channel, setup: Setup) -> tuple[FollowerEngine, int]:
    config = EngineConfig(**setup.config)
    files = locate(setup.model)
    ranks = Ranks(setup.rank, setup.size)
    plan = plan_model(config, files, ranks)
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device)
    channel.send(encode(Ready()))
    comm = GroupComm(ranks, join_store(setup.port, setup.size), plan.device)
    model = load_model(plan, files, comm)
    channel.send(encode(Ready()))
    cache = make_cache(plan, model, comm)
    return FollowerEngine(model, cache, plan.limits, config.attention_backend, comm), plan.threads


def _end_with(parent: int) -> None:
    """End this process when rank 0 is gone, whatever the main thread waits for."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(EXIT_FAULT)


if __name__ == "__main__":
    try:
        sys.exit(main(int(sys.argv[1])))
    except Closed:
        sys.exit(0)
