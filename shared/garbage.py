"""How the garbage collector of a service is set, once all that lives for ever is loaded.

Reference counts free nearly everything here; the collector looks for cycles, and by default it does so after every
700 new objects, which under load is thousands of times a second over objects of which none is garbage.
"""

import gc
from typing import Final

_YOUNG: Final = 10_000
"""New objects before the collector looks at them."""


def settle() -> None:
    """Leave what is loaded by now out of all collections, and make the others rarer. Call once, before the work."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
