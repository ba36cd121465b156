# SPDX-License-Identifier: Apache-2.0
"""Interleaved 1F1B: complete orders, the published bubble, its memory."""

from __future__ import annotations

import pytest

from autoplan.interleaved import interleaved


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 4, 4), (8, 3, 64)])
def test_every_chunk_runs_every_microbatch_once_each_way(p: int, v: int, m: int) -> None:
    for order in interleaved(p, v, m).orders:
        assert sorted(order) == sorted(
            (forward, chunk, k) for forward in (True, False) for chunk in range(v) for k in range(m)
        )
        for chunk in range(v):
            for k in range(m):
                assert order.index((True, chunk, k)) < order.index((False, chunk, k))


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 8), (4, 2, 8), (8, 3, 64), (4, 4, 16)])
def test_the_bubble_is_a_vth(p: int, v: int, m: int) -> None:
    # Narayanan et al., SC 2021, section 2.2.2: m (f + b) + (p - 1) (f + b) / v
    stages = p * v
    forward, backward, send = [1 / v] * stages, [2 / v] * stages, [0.0] * (stages - 1)
    ends = interleaved(p, v, m).finish_times(forward, backward, send)
    assert max(ends) == pytest.approx(3 * m + 3 * (p - 1) / v, rel=1e-9)


def test_the_first_rank_holds_the_published_number_of_chunks() -> None:
    # Korthikanti et al., 2022, section 4.2.3: p (1 + (p - 1) / (p v)) layers' worth, in chunks of
    # 1 / v: p v + p - 1 of them
    p, v = 8, 3
    assert sum(interleaved(p, v, 64).in_flight[0]) == p * v + p - 1


def test_transfers_are_waited_for() -> None:
    free = interleaved(2, 2, 4).finish_times([1.0] * 4, [1.0] * 4, [0.0] * 3)
    slow = interleaved(2, 2, 4).finish_times([1.0] * 4, [1.0] * 4, [0.5] * 3)
    assert max(slow) > max(free)


def test_uneven_microbatches_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the ranks"):
        interleaved(4, 2, 6)
