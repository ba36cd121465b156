# SPDX-License-Identifier: Apache-2.0
"""Which clusters are tried, in which order, and what is found: against a model of known need."""

from __future__ import annotations

import pytest
from sample_plans import llama_plan

from autoplan.errors import ClusterError, InfeasibleError
from autoplan.sizing import Ladder, kind_with


def climb(kind: str, need: int, most: int = 512) -> tuple[list[int], Ladder]:
    """Answers a ladder as a model would that fits from `need` devices on."""
    ladder, tried = Ladder(kind, most), []
    for cluster in ladder.clusters():
        tried.append(cluster.num_devices)
        fits = cluster.num_devices >= need
        ladder.note(cluster, llama_plan() if fits else InfeasibleError(f"needs {need}"))
    return tried, ladder


@pytest.mark.parametrize("need", range(1, 9))
def test_the_smallest_inside_a_host_is_found(need: int) -> None:
    _, ladder = climb("dgx-h100", need)
    assert ladder.smallest is not None
    assert ladder.smallest.num_devices == need


@pytest.mark.parametrize(
    ("need", "smallest"), [(9, 16), (17, 24), (40, 40), (41, 48), (201, 208), (337, 344)]
)
def test_between_hosts_whole_hosts_are_tried(need: int, smallest: int) -> None:
    _, ladder = climb("dgx-h100", need)
    assert ladder.smallest is not None
    assert ladder.smallest.num_devices == smallest


def test_odd_sizes_may_fit_worse_than_smaller_ones() -> None:
    ladder = Ladder("dgx-h100", 8)
    for cluster in ladder.clusters():
        fits = cluster.num_devices in (6, 8)
        ladder.note(cluster, llama_plan() if fits else InfeasibleError("not on so many"))
    assert ladder.smallest is not None
    assert ladder.smallest.num_devices == 6


def test_the_curve_goes_on_for_three_doublings() -> None:
    tried, ladder = climb("dgx-h100", 3)
    assert tried == [1, 2, 4, 3, 8, 16, 32]
    assert [size.num_devices for size in ladder.curve] == [1, 2, 3, 4, 8, 16, 32]
    assert [size.plan is None for size in ladder.curve] == [True, True, *[False] * 5]


def test_no_more_is_tried_than_allowed_and_nothing_found_is_said() -> None:
    tried, ladder = climb("dgx-h100", 100, most=32)
    assert tried == [1, 2, 4, 8, 16, 32]
    assert ladder.smallest is None
    assert ladder.curve[-1].reason == "needs 100"


def test_a_kind_without_a_network_is_one_host() -> None:
    tried, _ = climb("local-cpu", 2)
    assert tried == [1, 2, 4, 8, 16]


def test_single_device_hosts_grow_by_hosts() -> None:
    tried, ladder = climb("l4-single", 3)
    assert tried == [1, 2, 4, 3, 8, 16, 32]
    assert ladder.sizes[3].cluster == "l4-single-3x1"


def test_a_device_names_its_kind() -> None:
    assert kind_with("h100-80g") == "dgx-h100"
    assert kind_with("rtx4090-24g") == "rtx4090-pcie"
    with pytest.raises(ClusterError, match=r"no kind of cluster has device 'h900'.*h100-80g"):
        kind_with("h900")
    with pytest.raises(ClusterError, match=r"unknown kind of cluster 'dgx-h9'.*dgx-h100"):
        climb("dgx-h9", 1)
