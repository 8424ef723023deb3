"""A queue with its api and its engines played by the test, around real tokenizers and a real Redis."""

import threading
from collections.abc import Iterable
from typing import Any

from shared.broker.connection import Broker
from shared.broker.control import beat_and_look
from shared.broker.dead_letters import list_dead
from shared.broker.replies import EndEntry, end, read_log
from shared.broker.streams import Choice, list_consumers, open_request, read_generate
from shared.messages import DeadLetter, Delta, GenerateRequest, Heartbeat, ReplyHeader, TokenizeRequest, decode
from tests.redis_keys import command
from tests.tokenizer.requests import MODEL, make_request


class Rig:
    """The other services of one installation."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.keys = broker.keys
        self.engines: dict[str, Heartbeat] = {}
        self._beating = threading.Event()
        self._thread: threading.Thread | None = None

    def send(self, *prompts: Any, **options: Any) -> list[str]:
        """Open and queue a request, as the api does; give its uids."""
        return self.queue(make_request(*prompts, **options))

    def queue(self, request: TokenizeRequest) -> list[str]:
        """Open and queue a request that is made already."""
        choices = [Choice(uid, ReplyHeader(replica="api-1")) for uid in request.uids]
        assert self.broker.run(open_request(self.keys, request, choices, cap=10_000)).outcome == "OK"
        return request.uids

    def abort(self, uid: str) -> None:
        """End a uid, as the api does when its client goes."""
        self.broker.run(end(self.keys, uid, Delta(0, [], "", finish="stop")))

    def engine(self, name: str, **fields: Any) -> None:
        """Register an engine, or change what it says."""
        count = self.engines[name].beat + 1 if name in self.engines else 1
        base: dict[str, Any] = {"model": MODEL, "max_seq_len": 8192, "max_running": 64}
        self.engines[name] = Heartbeat(beat=count, name=name, **(base | fields))
        self.broker.run(beat_and_look(self.keys, "scheduler", name, self.engines[name]))

    def keep_beating(self) -> None:
        """Beat for all engines until `stop`."""

        def run() -> None:
            while not self._beating.wait(0.3):
                for name in list(self.engines):
                    self.engine(name)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more."""
        self._beating.set()
        if self._thread is not None:
            self._thread.join()

    def remove_engine(self, name: str) -> None:
        """Take an engine out of the registry, as its clean end does."""
        del self.engines[name]
        self.broker.run(command("HDEL", self.keys.alive("scheduler"), name))

    def generated(self, *engines: str) -> list[GenerateRequest]:
        """Read what the engines were given."""
        found = [e for name in engines for e in self.broker.run(read_generate(self.keys, name, count=10_000))]
        return [decode(GenerateRequest, entry.payload) for entry in found]

    def error_of(self, uid: str) -> tuple[int, str | None]:
        """Give status and code of the error a uid ended with."""
        entry = self.broker.run(read_log(self.keys, uid))[-1]
        assert isinstance(entry, EndEntry) and entry.delta.error is not None, entry
        return entry.delta.error.status, entry.delta.error.code

    def end_of(self, uid: str) -> Delta:
        """Give the terminal of a uid that ended well."""
        entry = self.broker.run(read_log(self.keys, uid))[-1]
        assert isinstance(entry, EndEntry) and entry.delta.error is None, entry
        return entry.delta

    def is_ended(self, uids: Iterable[str]) -> bool:
        """Whether the logs of all these uids have their terminal."""
        logs = self.broker.run_many([read_log(self.keys, uid) for uid in uids])
        return all(log and isinstance(log[-1], EndEntry) for log in logs)

    def queue_len(self) -> int:
        """Count the entries of the queue, read or not."""
        length = self.broker.run(command("XLEN", self.keys.tokenize(MODEL)))
        assert isinstance(length, int)
        return length

    def pending(self) -> dict[str, int]:
        """Give consumer -> entries it was given and has not done."""
        return self.broker.run(list_consumers(self.keys, MODEL))

    def dead_letters(self) -> list[DeadLetter]:
        """List what was given up."""
        return [letter for _, letter in self.broker.run(list_dead(self.keys))]
