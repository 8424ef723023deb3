"""Two of each service in one world: who acts when, who dies, and whether the promise holds in the end."""

from collections.abc import Iterator

from shared.broker.call import pairs
from shared.broker.connection import Broker
from shared.broker.log_id import END_ATTEMPT, split_log_id
from shared.broker.replies import EndEntry, LogEntry, OpenEntry, TokensEntry, read_log
from shared.broker.streams import list_consumers, list_held
from tests.model.engine import Engine
from tests.model.machines import LOST_DATA, Api, Detokenizer, Machine, Tokenizer
from tests.model.readers import NOT_FOUND, ReadersApi
from tests.model.world import MODEL, NUM_SHARDS, Client, Crash, Violation, World

KINDS: tuple[type[Machine], ...] = (Api, Tokenizer, Engine, Detokenizer)
MAX_CALM_TURNS = 60_000


class Town:
    """All machines, and the checks on what they leave behind."""

    def __init__(
        self, broker: Broker, prefix: str, *, poison: bool = False, forgetful: bool = False, readers: bool = False
    ) -> None:
        self.world = World(broker, prefix, poison=poison, forgetful=forgetful)
        kinds = [ReadersApi if readers and kind is Api else kind for kind in KINDS]
        self.pools: list[list[Machine]] = [[kind(self.world) for _ in range(2)] for kind in kinds]

    def turns(self, count: int, seed: int, *, mischief: bool) -> None:
        """Let machines act in random order."""
        self.world.rng.seed(seed)
        self.world.mischief = mischief
        for _ in range(count):
            self._turn()

    def _turn(self) -> None:
        pool = self.world.rng.choice(self.pools)
        place = self.world.rng.randrange(len(pool))
        machine = pool[place]
        if machine.paused and not self.world.calm:
            machine.paused -= 1
            return
        machine.paused = 0
        try:
            machine.act()
        except Crash:
            self._replace(pool, place)

    def kill(self, kind: int, place: int) -> None:
        """End a machine as SIGKILL does; another one starts in its place."""
        self._replace(self.pools[kind], place)

    def pause(self, kind: int, place: int, turns: int) -> None:
        """Stop a machine for some of its turns; it wakes with all it believed."""
        self.world.events["paused"] += 1
        self.pools[kind][place].paused = turns

    def drain(self, place: int) -> None:
        """End an engine as SIGTERM does."""
        engine = self.engines[place]
        if engine.paused:
            return
        try:
            engine.drain()
        except Crash:
            self.world.events["died while draining"] += 1
        self._replace(self.pools[KINDS.index(Engine)], place)

    def _replace(self, pool: list[Machine], place: int) -> None:
        self.world.events["died"] += 1
        pool[place].died()
        pool[place] = type(pool[place])(self.world)

    @property
    def engines(self) -> list[Engine]:
        return [machine for machine in self._machines() if isinstance(machine, Engine)]

    @property
    def open_clients(self) -> list[Client]:
        """Clients that still wait, at an api that lives."""
        return [c for machine in self._machines() if isinstance(machine, Api) for c in machine.open_clients.values()]

    def _machines(self) -> Iterator[Machine]:
        return (machine for pool in self.pools for machine in pool)

    # --- at every instant ---

    def check_now(self) -> None:
        """What must hold between any two commands."""
        self._check_lives()
        opened_again = self.world.events["opened again"]
        if opened_again and not self.world.forgetful:
            raise Violation("an api opened a request again, though no data was lost")
        if not self.world.data_lost and not opened_again:
            self._check_logs()
            self._check_holders()

    def _check_lives(self) -> None:
        streams = ("tokenize:", "tokens:", "alive:")
        for key in self.world.find_keys():
            name = key.decode().removeprefix(f"{self.world.keys.prefix}:")
            if not name.startswith(streams) and self.world.raw("PTTL", key) == -1:
                raise Violation(f"{name} would live for ever")

    def _check_logs(self) -> None:
        """A log only grows; ids are contiguous and rise; nothing follows the end."""
        for uid in {client.uid for client in self.world.clients.values()}:
            entries = self.world.broker.run(read_log(self.world.keys, uid))
            before = self.world.logs.get(uid, [])
            if entries and entries[: len(before)] != before:
                raise Violation(f"{uid}: its log was rewritten")
            if not entries:
                continue
            _check_ids(uid, entries)
            self.world.logs[uid] = entries

    def _check_holders(self) -> None:
        """An unfinished request is in the queue or in exactly one engine's stream."""
        queued = self.world.raw("XRANGE", self.world.keys.tokenize(MODEL), "-", "+")
        places = [value.decode() for _, fields in queued for name, value in pairs(fields) if name == b"u"]
        prefix = self.world.keys.generate("").encode()
        for key in self.world.find_keys():
            if key.startswith(prefix):
                engine = key.removeprefix(prefix).decode()
                places += [uid for _, uid in self.world.broker.run(list_held(self.world.keys, engine))]
        for client in {c.uid: c for c in self.open_clients}.values():
            log = self.world.broker.run(read_log(self.world.keys, client.uid))
            if log and not isinstance(log[-1], EndEntry) and places.count(client.uid) != 1:
                raise Violation(f"{client.uid} is in {places.count(client.uid)} places")

    # --- in the end ---

    def settle(self) -> None:
        """No more trouble: everything must come to its end by itself."""
        self.world.calm = True
        for turn in range(MAX_CALM_TURNS):
            self._turn()
            if turn % 50 == 49 and self._is_quiet():
                return
        left = [f"{c.uid} ({len(c.token_ids)} of {c.length})" for c in self.open_clients]
        raise Violation(f"not quiet: waiting {left}, left {self._leftovers()}")

    def _is_quiet(self) -> bool:
        busy = any(engine.running or engine.waiting or engine.output for engine in self.engines)
        waiting = any(c.away and c.end is None for c in self.world.clients.values())
        return not self.open_clients and not waiting and not busy and not self._leftovers()

    def _leftovers(self) -> list[str]:
        world = self.world
        streams = [world.keys.tokenize(MODEL), *(world.keys.tokens(MODEL, shard) for shard in range(NUM_SHARDS))]
        left = [stream for stream in streams if world.raw("XLEN", stream)]
        left += [f"held by {e.id}" for e in self.engines if world.raw("XLEN", world.keys.generate(e.id))]
        left += [f"pending at {name}" for name, n in world.broker.run(list_consumers(world.keys, MODEL)).items() if n]
        return left

    def check_ends(self) -> None:
        """Each client that stayed has been told one good end, or one that its trouble explains."""
        for client in self.world.clients.values():
            if not client.gone and not client.left:
                self._check_end(client)

    def _check_end(self, client: Client) -> None:
        world = self.world
        excused = {LOST_DATA, NOT_FOUND} if world.data_lost else set()
        if client.lapsed:
            excused.add(NOT_FOUND)
        if world.events["paused"] or world.data_lost:
            excused.add("replica_lost")
        if client.uid in world.poison:
            if client.end not in {"poison", *excused}:
                raise Violation(f"{client.uid} is poison and ended with {client.end}")
            if world.launches[client.uid] > 3 and not world.data_lost:
                raise Violation(f"{client.uid} is poison and was launched {world.launches[client.uid]} times")
        elif client.end not in {"length", "stop", *excused}:
            raise Violation(f"{client.uid} ended with {client.end}")


def _check_ids(uid: str, entries: list[LogEntry]) -> None:
    """The log begins with its opening, `said` has no gap, fences raise the attempt, and the end is the end."""
    if not isinstance(entries[0], OpenEntry):
        raise Violation(f"{uid}: its log does not begin with its opening")
    said, attempt = 0, 0
    for entry in entries:
        now, after = split_log_id(entry.log_id)
        said += len(entry.delta.token_ids) if isinstance(entry, TokensEntry | EndEntry) else 0
        if isinstance(entry, TokensEntry):
            right = now == attempt
        else:
            right = now == END_ATTEMPT if isinstance(entry, EndEntry) else attempt < now < END_ATTEMPT
        if not right or after != said:
            raise Violation(f"{uid}: {entry.log_id!r} after attempt {attempt} and {said} tokens")
        attempt = now
