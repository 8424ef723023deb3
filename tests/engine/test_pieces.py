"""The pieces that prompt attention is cut into: each query row sees each key once, and what is reserved suffices."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.engine.kernels.prefill_attention import MIN_PIECE, TILE, PrefillShape, list_pieces

chunks = st.lists(st.tuples(st.integers(0, 60_000), st.integers(1, 9_000)), min_size=1, max_size=8)


@given(chunks, st.sampled_from([1, 2, 3, 5, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 40, 264]))
def test_pieces_cover_what_rows_see_and_fit(
    rows: list[tuple[int, int]], group: int, num_kv: int, programs: int
) -> None:
    starts, lengths = np.array(rows, dtype=np.int64).T
    shape = PrefillShape(group, num_kv, programs)
    pieces = list_pieces(starts, lengths, shape)
    assert len(pieces) <= shape.max_pieces(int(lengths.sum()), len(rows))
    sizes = pieces[:, 3] - pieces[:, 2]
    assert (sizes > 0).all() and (np.diff(sizes) <= 0).all(), "the longest come first"
    places = set()
    for row, (start, length) in enumerate(rows):
        for tile in range(-(-length * group // TILE)):
            parts = sorted(p.tolist() for p in pieces[(pieces[:, 0] == row) & (pieces[:, 1] == tile)])
            last_token = min(length, -(-(tile + 1) * TILE // group)) - 1
            assert parts[0][2] == 0 and parts[-1][3] == start + last_token + 1
            assert all(before[3] == after[2] and after[2] % 64 == 0 for before, after in itertools.pairwise(parts))
            assert [p[5:7] for p in parts] == [[len(parts), i] for i in range(len(parts))]
            if len(parts) > 1:
                assert len({p[4] for p in parts}) == 1
                own = {parts[0][4] + i for i in range(len(parts))}
                assert not own & places
                places |= own
    assert len(places) <= 2 * shape.max_split
    assert sizes.max() >= MIN_PIECE // 2 or starts.max() + lengths.max() < MIN_PIECE
