# SPDX-License-Identifier: Apache-2.0
"""The search against what it must beat and what it must respect: baselines, exhaustive layouts,
pins, folding, memory.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))

import torch
from models import build
from torch import nn

import autoplan
from autoplan.capture import capture
from autoplan.cluster import DeviceSpec, Link
from autoplan.solver.baselines import price_baselines
from autoplan.solver.decision import decide
from autoplan.solver.layers import find_layers, fold
from autoplan.solver.pins import Pinned
from autoplan.solver.search import Search
from autoplan.solver.space import Space


def slow_cluster(
    num_devices: int, *, memory_bytes: float = 2.0**32, link: float = 1e9
) -> autoplan.Cluster:
    """Devices of 1 GFLOP/s: every split pays unless the link is slow."""
    device = DeviceSpec(
        name="slow",
        memory_bytes=memory_bytes,
        memory_bytes_per_s=1e9,
        peak_flop_per_s={"float64": 1e9, "float32": 1e9},
    )
    return autoplan.Cluster(
        name="slow",
        num_hosts=1,
        devices_per_host=num_devices,
        device=device,
        intra_host=Link(latency_s=1e-5, bytes_per_s=link),
    )


def search_of(
    name: str, cluster: autoplan.Cluster, pinned: Pinned | None = None, limit: float | None = None
) -> Search:
    """A finished search over one of the test models."""
    model, inputs = build(name)
    search = Search(
        Space.of(capture(model, inputs).graph),
        cluster,
        pinned or Pinned(),
        True,
        "adamw",
        limit or cluster.device.memory_bytes,
        60.0,
    )
    search.run()
    return search


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama", "t5", "resnet"])
@pytest.mark.parametrize("link", [1e7, 1e9])
def test_never_slower_than_the_baselines(name: str, link: float) -> None:
    search = search_of(name, slow_cluster(4, link=link))
    assert search.best is not None
    for baseline, priced in price_baselines(search).items():
        if priced is not None:
            assert search.best.step_s <= priced.step_s * (1 + 1e-9), baseline


def test_descending_microbatches_finds_what_trying_all_does() -> None:
    search = search_of("llama", slow_cluster(4, link=1e8))
    everything = Search(
        search.space, search.cluster, Pinned(), True, "adamw", search.limit_bytes, 60.0
    )
    for count in (1, 2, 4):
        for candidate in everything.candidates(count):
            everything.price(candidate)
    assert search.best is not None
    assert everything.best is not None
    # the program weighs stages evenly, so choices that tie there may differ a little once cut
    assert search.best.step_s == pytest.approx(everything.best.step_s, rel=1e-3)


def test_less_memory_is_never_faster_and_always_kept() -> None:
    unlimited = search_of("llama", slow_cluster(4)).best
    assert unlimited is not None
    before = unlimited.step_s
    for share in (0.9, 0.7, 0.5):
        limit = unlimited.peak_bytes * share
        best = search_of("llama", slow_cluster(4), limit=limit).best
        assert best is not None
        assert best.peak_bytes <= limit
        assert best.step_s >= before * (1 - 1e-9)
        before = best.step_s


def test_a_faster_link_is_never_slower() -> None:
    found = [search_of("gpt2", slow_cluster(4, link=link)).best for link in (1e6, 1e7, 1e8, 1e9)]
    times = [best.step_s for best in found if best is not None]
    assert len(times) == 4
    assert times == sorted(times, reverse=True)


def test_pins_are_kept() -> None:
    model, inputs = build("llama")
    pins = autoplan.Pins(tp=2, pp=2, dp=1, num_microbatches=4, schedule="gpipe", recompute=True)
    plan = autoplan.optimize(model, slow_cluster(4), inputs, pins=pins)
    assert (plan.layout.tp, plan.layout.pp, plan.layout.dp) == (2, 2, 1)
    assert (plan.schedule.name, plan.schedule.num_microbatches) == ("gpipe", 4)
    assert all(stage.recompute for stage in plan.stages)
    spec = "RS(0)"
    pinned = replace(pins, placements={"model.layers.*.mlp.up_proj.weight": spec})
    plan = autoplan.optimize(model, slow_cluster(4), inputs, pins=pinned)
    assert plan.parameters["model.layers.0.mlp.up_proj.weight"].used.split("~")[0] == spec
    assert plan.parameters["model.layers.1.mlp.up_proj.weight"].used.split("~")[0] == spec


def test_pinned_zero_levels() -> None:
    model, inputs = build("mlp")
    for zero in (0, 1, 3):
        plan = autoplan.optimize(
            model, slow_cluster(2), inputs, pins=autoplan.Pins(dp=2, tp=1, pp=1, zero=zero)
        )
        levels = {p.zero for n, p in plan.parameters.items() if p.shape[0] % 2 == 0}
        assert levels == {zero}


class Repeated(nn.Module):
    """`depth` equal blocks between two linears."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(depth)
        )
        self.last = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x).square().mean()


def test_equal_blocks_fold_and_depth_adds_nothing() -> None:
    shallow, deep = (capture(Repeated(depth), (torch.randn(4, 8),)).graph for depth in (3, 12))
    layers = find_layers(deep)
    classes = [layer.block_class for layer in layers.layers]
    assert len(layers.layers) == 14
    assert classes[1:-1] == [classes[1]] * 12
    folded = fold(deep, layers)
    assert len(folded.ops) == len(fold(shallow, find_layers(shallow)).ops)
    assert folded.count["blocks.0.0.weight"] == 12
    inner = [count for (value, _, _), count in folded.edges.items() if value == "blocks.0.0.weight"]
    assert inner == [12]


def test_folded_price_is_the_sum_of_its_layers() -> None:
    """Twelve blocks cost twelve times what the twelfth of them costs, and so say the figures."""
    search = Search(
        Space.of(capture(Repeated(12), (torch.randn(4, 8),)).graph),
        slow_cluster(1),
        Pinned(),
        True,
        "adamw",
        2.0**32,
        60.0,
    )
    best = search.run()
    blocks = [p for layer, p in zip(search.space.layers.layers, best.prices) if layer.is_block]
    assert len(blocks) == 12
    assert len({(p.forward_s, p.backward_s, p.held_bytes) for p in blocks}) == 1
    _, figures = decide(search)
    assert figures.stages[0].forward_s == pytest.approx(sum(p.forward_s for p in best.prices))


def test_same_inputs_same_bytes() -> None:
    model, inputs = build("gpt2")
    texts = {autoplan.optimize(model, slow_cluster(4), inputs).to_json() for _ in range(2)}
    assert len(texts) == 1


REFUSED = r"least any layout needs .* Largest term: .* devices of the same kind are enough"


def test_refusal_names_need_term_and_a_count_that_works() -> None:
    model, inputs = build("mlp")
    with pytest.raises(autoplan.InfeasibleError, match=REFUSED) as caught:
        autoplan.optimize(model, slow_cluster(1, memory_bytes=150_000), inputs, memory_reserve=0.0)
    assert caught.value.required_bytes is not None
    assert caught.value.required_bytes > 150_000
    assert caught.value.candidates


def test_a_program_that_the_solver_gives_up_on_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One candidate's failure is a reason beside it, not the end of the search (R65)."""
    from autoplan.errors import AutoplanError
    from autoplan.solver.evaluate import CandidateSolver

    original, calls = CandidateSolver.solve, []

    def first_fails(self: CandidateSolver, beat_s: float = float("inf")) -> object:
        calls.append(self.candidate)
        if len(calls) == 1:
            raise AutoplanError("the solver failed")
        return original(self, beat_s)

    monkeypatch.setattr(CandidateSolver, "solve", first_fails)
    search = search_of("mlp", slow_cluster(2))
    assert search.best is not None
    assert search.rejected[calls[0]] == "the solver failed"
    assert not search.exhaustive
