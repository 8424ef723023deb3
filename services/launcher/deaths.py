"""Tells the installation that a process has ended, which its parent knows at once and others only by a lease.

What has ended is found by the mark of its start (`shared.ids.BIRTH`), which stands in the heartbeats of all that was
started with it. So neither a successor under the same name nor an instance of another launcher is ever meant.
"""

from typing import Final

from shared.broker.connection import Broker
from shared.broker.control import ALL_ROLES, look, pronounce
from shared.errors import BrokerError, WireError
from shared.keys import Role
from shared.messages import Heartbeat, decode
from shared.settings import RedisSettings

PATIENCE_S: Final = 0.3
"""A broker that does not answer within this time is left alone: the lease then ends by itself."""


class Deaths:
    """Ends leases of the dead. One round trip to look, one to write, on a connection that is closed again."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings

    def tell(self, role: str, birth: str) -> bool:
        """End the leases of an instance whose processes have all ended; True if it had any.

        Nothing is lost where the broker does not take it: the lease ends by itself.
        """
        if role not in ALL_ROLES:
            return False
        try:
            with Broker(self._settings, name="launcher", timeout_s=PATIENCE_S) as broker:
                return _end_leases(broker, role, birth)
        except (BrokerError, WireError):
            return False


def _end_leases(broker: Broker, role: Role, birth: str) -> bool:
    registered = broker.run(look(broker.keys, role))
    ended = [(name, beat) for name, beat in registered.items() if _birth_of(beat) == birth]
    return any(broker.run_many([pronounce(broker.keys, role, name, beat) for name, beat in ended]))


def _birth_of(beat: bytes) -> str:
    try:
        return decode(Heartbeat, beat).birth
    except WireError:
        return ""
