"""When things that are done now and then are due again. Knows nothing of what they are."""


class Timetable:
    """Kept by one thread; `hasten` may come from any."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def is_due(self, what: str, every_s: float, now: float) -> bool:
        """Whether something is to be done now; if so, it is due again after `every_s`."""
        if now < self._due.get(what, 0.0):
            return False
        self._due[what] = now + every_s
        return True

    def hasten(self, *whats: str) -> None:
        """Make things due at once. Who calls it has made known before why they are."""
        for what in whats:
            self._due[what] = 0.0

    def left_s(self, now: float, *whats: str) -> float:
        """Give the seconds until the first of these is due; negative when it is overdue."""
        return min(self._due.get(what, 0.0) for what in whats) - now
