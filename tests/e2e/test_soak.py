"""Many requests, a third of which hang up at a random moment: nothing of them is left, and no service grows."""

import pytest

from bench.soak import soak

MAX_GROWTH = 0.15
"""Of a short soak, in which caches still fill; `make soak` is the long one and stricter."""


@pytest.mark.slow
def test_requests_leave_nothing_behind() -> None:
    result = soak(1500, at_once=32, seed=7)
    assert result["wrong"] == [0]
    assert result["whole"] + result["hung_up"] == 1500
    assert result["hung_up"] > 400
    assert result["left"] == {}
    assert all(share < MAX_GROWTH for share in result["growth"].values()), result["mib"]
