# SPDX-License-Identifier: Apache-2.0
"""A ParallelModule on one device: what it refuses, what loading says, what a segment holds.

No processes are started: a plan for one device needs none. Runs on several are in `cases/`.
"""

from __future__ import annotations

import copy
from types import MappingProxyType

import pytest
import torch
from cases.running import plain_cluster
from torch import Tensor, nn

import autoplan
from autoplan.executor.local_op import first_index, shard_number
from autoplan.executor.meshes import Ranks
from autoplan.executor.module import ParallelModule
from autoplan.executor.segments import find_segments
from autoplan.graph import Op
from autoplan.placements import R, Shard, ShardingSpec


class Small(nn.Module):
    """A normalised layer, dropout and a head; the loss is its output."""

    def __init__(self, p: float = 0.5, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.norm = norm(6)
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.norm(self.body(x)))).square().mean()
        return out


def parallel_of(model: nn.Module) -> ParallelModule:
    """The model on one device."""
    inputs = {"x": torch.ones(8, 4)}
    plan = autoplan.optimize(model, plain_cluster(1), inputs)
    return autoplan.parallelize(model, plan)


@pytest.fixture
def small() -> Small:
    torch.manual_seed(0)
    return Small()


def test_load_state_dict_tells_what_nn_module_tells(small: Small) -> None:
    """Without `strict` both name the same missing and unexpected keys, and load the rest."""
    parallel = parallel_of(small)
    given = {name: tensor + 1 for name, tensor in small.state_dict().items()}
    del given["body.bias"]
    given["tail.weight"] = torch.zeros(1)
    told = parallel.load_state_dict(given, strict=False)
    expected = copy.deepcopy(small).load_state_dict(given, strict=False)
    assert told == expected
    assert (told.missing_keys, told.unexpected_keys) == (["body.bias"], ["tail.weight"])
    after = parallel.full_state_dict()
    assert torch.equal(after["head.weight"], given["head.weight"])
    assert torch.equal(after["body.bias"], small.body.bias.detach())


def test_load_state_dict_of_all_keys_matches(small: Small) -> None:
    parallel = parallel_of(small)
    told = parallel.load_state_dict(small.state_dict())
    assert (told.missing_keys, told.unexpected_keys) == ([], [])
    assert str(told) == "<All keys matched successfully>"


@pytest.mark.parametrize(
    ("drop", "add", "words"),
    [
        ("norm.running_mean", None, "1 tensors of this stage are not in .* 'norm.running_mean'"),
        (None, "tail.bias", "1 tensors of the state dict are not .* 'tail.bias'"),
    ],
)
def test_strict_loading_refuses_and_loads_nothing(
    small: Small, drop: str | None, add: str | None, words: str
) -> None:
    parallel = parallel_of(small)
    given = {n: t + 1 for n, t in small.state_dict().items() if n != drop}
    given.update({add: torch.zeros(1)} if add else {})
    with pytest.raises(autoplan.PlanError, match=words):
        parallel.load_state_dict(given)
    after = parallel.full_state_dict()
    assert all(torch.equal(after[n], t) for n, t in small.state_dict().items())


def test_state_dict_takes_the_arguments_of_nn_module(small: Small) -> None:
    parallel = parallel_of(small)
    into: dict[str, object] = {"other": 1}
    assert parallel.state_dict(destination=into, prefix="inner.") is into
    assert set(into) == {"other", *(f"inner.{name}" for name in small.state_dict())}
    assert not any(t.requires_grad for t in parallel.state_dict().values())
    kept = parallel.state_dict(keep_vars=True)
    assert kept["head.weight"] is dict(parallel.named_parameters())["head.weight"]


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("to", ("cpu",)),
        ("to", (torch.float64,)),
        ("half", ()),
        ("bfloat16", ()),
        ("double", ()),
        ("cpu", ()),
        ("share_memory", ()),
    ],
)
def test_moving_and_casting_are_refused(
    small: Small, method: str, arguments: tuple[object, ...]
) -> None:
    parallel = parallel_of(small)
    with pytest.raises(autoplan.ExecutionError, match="live on cpu in the plan's shards") as told:
        getattr(parallel, method)(*arguments)
    assert (told.value.rank, told.value.stage) == (0, 0)
    assert all(p.dtype == torch.float32 for p in parallel.parameters())


@pytest.mark.parametrize(
    ("model", "fixed"),
    [
        (Small(0.5), "2 modules .first 'norm', a BatchNorm1d"),
        (Small(0.5, nn.LayerNorm), "1 modules .first 'drop', a Dropout"),
        (Small(0.0), "1 modules .first 'norm', a BatchNorm1d"),
    ],
)
def test_train_is_refused_after_a_capture_in_eval_mode(model: nn.Module, fixed: str) -> None:
    parallel = parallel_of(model.eval())
    assert not parallel.training
    with pytest.raises(autoplan.ExecutionError, match=fixed):
        parallel.train()
    assert not parallel.training, "a refused switch changes nothing"
    assert parallel.eval() is parallel


def test_train_and_eval_switch_where_nothing_is_fixed() -> None:
    """Captured in training, or without any module that tells the modes apart."""
    for model in (Small(0.5), Small(0.0, nn.LayerNorm).eval()):
        parallel = parallel_of(model)
        assert parallel.training == model.training
        assert not parallel.eval().training
        assert parallel.train().training


def test_eval_gives_what_the_model_gives_in_eval(small: Small) -> None:
    parallel = parallel_of(small)
    x = torch.randn(8, 4)
    expected = copy.deepcopy(small).eval()(x)
    assert torch.allclose(parallel.eval()(x=x), expected, rtol=1e-6, atol=0)


def op(name: str, path: str, *inputs: str) -> Op:
    """An op that gives a value of its own name."""
    return Op(name, "aten.add.Tensor", inputs, (name,), MappingProxyType({}), path)


def test_segments_hold_a_layer_each_and_keep_the_order_of_inputs() -> None:
    """A free op joins the layer that alone uses it; one that others use too stays outside."""
    ops = [
        op("a", "head", "x"),
        op("b", "layers.0.up", "a"),
        op("mask", "", "x"),
        op("own", "", "x"),
        op("c", "layers.0.down", "b", "mask", "own"),
        op("d", "layers.1.up", "c", "mask"),
        op("e", "layers.10", "d"),
    ]
    found = find_segments(ops, ("layers.0", "layers.1"))
    labelled = [(label, [o.name for o in group]) for label, group in found]
    assert labelled == [
        (None, ["a"]),
        (None, ["mask"]),
        ("layers.0", ["b", "own", "c"]),
        ("layers.1", ["d"]),
        (None, ["e"]),
    ]


def test_without_labels_there_is_one_segment() -> None:
    ops = [op("a", "layers.0", "x"), op("b", "layers.1", "a")]
    assert find_segments(ops, ()) == [(None, ops)]


@pytest.mark.parametrize(
    ("placements", "first", "number"),
    [
        ((Shard(0), Shard(0)), 10, 5),  # 12 rows: halves of 6, the second in parts of 2
        ((Shard(0), R), 6, 1),
        ((R, Shard(0)), 8, 2),  # thirds of 4
        ((R, Shard(1)), 0, 2),
        ((R, R), 0, 0),
    ],
)
def test_where_a_shard_lies(placements: tuple[Shard, ...], first: int, number: int) -> None:
    ranks = Ranks(torch.device("cpu"), 0, (1, 2), (2, 3), None)
    spec = ShardingSpec(placements)
    assert first_index(spec, 0, 12, ranks) == first
    assert shard_number(spec, ranks) == number
