"""A service that does nothing, to live a life in a process of its own: `python -m tests.shared.service_script MODE`."""

import sys
import threading

from shared.errors import ConfigError
from shared.messages import Heartbeat
from shared.runtime import Life, leave, main
from shared.settings import ServiceSettings


class Script:
    """What it does is its only argument; what happens is printed line by line."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def prepare(self, life: Life) -> None:
        print("preparing", flush=True)
        if self.mode == "bad-model":
            raise ConfigError("there is no such model")
        if self.mode == "slow-start":
            threading.Event().wait(60)

    def serve(self, life: Life) -> None:
        life.beat()
        print("serving", life.port, flush=True)
        if self.mode == "crash":
            raise RuntimeError("broken")
        if self.mode == "returns":
            return
        if self.mode == "helper-dies":
            life.fail(ConfigError("a helper died"))
        if self.mode == "stuck":
            threading.Event().wait(60)
        while not life.draining:
            life.beat()
            life.pause(0.05)
        print("draining", flush=True)
        while self.mode == "never-ends":
            life.beat()
            threading.Event().wait(0.01)
        print("done", life.drain_left_s() > 0, flush=True)

    def heartbeat(self, base: Heartbeat) -> Heartbeat:
        return base

    def reconnected(self) -> None:
        print("reconnected", flush=True)

    def others_died(self) -> None:
        print("others died", flush=True)


if __name__ == "__main__":
    mode = sys.argv[1]
    leave(main("tokenizer", ServiceSettings, lambda _: Script(mode), stuck_after_s=lambda _: 1.0, beat_s=0.05))
