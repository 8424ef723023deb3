"""Which rank this process is, of how many, and what its piece of something is."""

from dataclasses import dataclass
from typing import Final

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of several processes that share a model.

    Attributes:
        rank: this one, from 0; rank 0 plans and draws.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    def piece(self, count: int, what: str) -> int:
        """Divide something evenly.

        Args:
            count: all of it.
            what: its name, for the refusal.

        Returns:
            What each rank has.

        Raises:
            ConfigError: it cannot be divided; names it, and the sizes that could.
        """
        if count % self.size:
            fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0 and n <= 64)
            raise ConfigError(
                f"tensor_parallel_size {self.size} does not divide the model's {count} {what}; it would by {fitting}"
            )
        return count // self.size


SOLO_RANK: Final = Ranks()
"""A process that has a model to itself."""
