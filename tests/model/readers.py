"""An api whose streams can be resumed: clients leave and come back anywhere, several may read one, nobody owns any."""

from typing import ClassVar, Final

from shared.broker import replies, resumable
from shared.broker.log_id import LogId
from shared.broker.resumable import Record
from shared.messages import Delta, ReplyHeader
from tests.model.machines import LOST_DATA, Api, fault
from tests.model.world import Client, Violation

NOT_FOUND: Final = "stream_not_found"
LIFE_MS: Final = 600_000
MAX_READERS: Final = 40


class ReadersApi(Api):
    """Knows of a stream that it did not open what is in the broker, and nothing else."""

    actions: ClassVar[tuple[str, ...]] = (*Api.actions, "poll", "poll", "poll", "come_back", "join", "tend", "lapse")

    def died(self) -> None:
        for client in self.open_clients.values():
            if client.announced:
                client.away = True
            else:
                client.gone = True

    def header(self) -> ReplyHeader:
        return ReplyHeader(self.id, resumable_ms=LIFE_MS)

    def forget_log(self, uid: str) -> None:
        """Leave it: others may read it, and it goes by itself."""

    def stranger(self, uid: str) -> None:
        """Leave it to itself: somebody may come back to it."""

    def _open(self, clients: list[Client]) -> None:
        if not clients[0].announced:
            uids = [client.uid for client in clients]
            self.world.run(resumable.keep(self.keys, Record(uids, "", LIFE_MS, b"record")))
            for client in clients:
                client.stream = uids[0]
        super()._open(clients)
        for client in clients:
            client.announced = True

    def leave(self) -> None:
        """A client hangs up; it will come back."""
        if self.world.calm or not self.open_clients or self.world.rng.random() > 0.2:
            return
        client = self.open_clients[self.world.rng.choice(sorted(self.open_clients))]
        if client.announced:
            del self.open_clients[client.key]
            client.away = True

    def come_back(self) -> None:
        """A client that was away asks for the rest of its stream."""
        clients = [c for c in self.world.clients.values() if c.away and c.end is None]
        if clients:
            self._attach(self.world.rng.choice(sorted(clients, key=lambda c: c.key)))

    def join(self) -> None:
        """Somebody else reads a stream from its beginning, whoever reads it or has read it."""
        clients = [c for c in self.world.clients.values() if c.announced and not c.lapsed]
        if clients and not self.world.calm and len(self.world.clients) < MAX_READERS and self.world.rng.random() < 0.2:
            client = self.world.rng.choice(sorted(clients, key=lambda c: c.key))
            self._attach(Client(client.uid, client.length, stream=client.stream, announced=True), join=True)

    def _attach(self, client: Client, *, join: bool = False) -> None:
        """Begin to read, as a reader who knows nothing but where its client stopped."""
        if self.world.run(resumable.attach(self.keys, client.stream, "")) is None:
            if not join:
                self.world.events["found nothing"] += 1
                client.end = NOT_FOUND
            elif not self.world.data_lost:
                raise Violation(f"{client.uid}: its stream is gone")
            return
        entries = self.world.run(replies.read_log(self.keys, client.uid))
        if not entries:
            return
        self.world.events["joined" if join else "came back"] += 1
        reader = Client(client.uid, client.length, self.world.name("#"), stream=client.stream, announced=True)
        reader.before = None if join else client
        client.left = client.away = False
        client.gone = True  # from here on its reader speaks for it
        reader.lapsed = client.lapsed
        self.world.clients[reader.key] = self.open_clients[reader.key] = reader
        self.read(reader)

    def say(self, client: Client, log_id: LogId, delta: Delta) -> None:
        super().say(client, log_id, delta)
        before = client.before
        if before is None:
            return
        told, now = before.token_ids, client.token_ids
        if told[: len(now)] != now[: len(told)] or (delta.finish is not None and len(told) > len(now)):
            if not self.world.data_lost:
                raise Violation(f"{client.uid}: what follows is not the rest of what its client has")
            client.end = LOST_DATA
            self.open_clients.pop(client.key, None)

    def poll(self) -> None:
        """Look at the logs of those for whom nobody rings."""
        for client in [c for c in self.open_clients.values() if c.reader][:4]:
            if self.world.run(replies.last_id(self.keys, client.uid)) != client.last:
                self.read(client)

    def tend(self) -> None:
        """Say what is read here, and keep again what was lost."""
        for stream in sorted({c.stream for c in self.open_clients.values() if c.announced}):
            if self.world.run(resumable.put_off(self.keys, stream, LIFE_MS)) == "UNKNOWN":
                uids = sorted({c.uid for c in self.world.clients.values() if c.stream == stream})
                uids.remove(stream)
                self.world.run(resumable.keep(self.keys, Record([stream, *uids], "", LIFE_MS, b"record")))

    def lapse(self) -> None:
        """End what nobody has come back to; now and then so much time goes by that it is due."""
        world = self.world
        if not world.calm and world.rng.random() < 0.1:
            away = {c.stream for c in world.clients.values() if c.away and c.end is None}
            read = {c.stream for c in world.clients.values() if c.end is None and not (c.away or c.gone)}
            for stream in sorted(away - read)[:1]:
                world.raw("ZADD", self.keys.streams, "XX", 1, stream)
                for client in world.clients.values():
                    client.lapsed = client.lapsed or client.stream == stream
        lapsed = world.run(resumable.lapse(self.keys, fault("deadline")))
        world.events["abandoned"] += lapsed.abandoned
