# SPDX-License-Identifier: Apache-2.0
"""Rules inside models: every op of six small models, split in the blocks that its neighbours give.

Also here: dropout, whose random stream follows the part a rank holds.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 - registers the grouped product
from pretend import Place, Sizes, part_of, places_of
from rule_check import Whole, graph_of, local_op, problems_of, run_rank, values_of
from torch import nn

from autoplan.capture import capture
from autoplan.placements import Replicate
from autoplan.sharding.batch import find_batch
from autoplan.sharding.rules import find_rule, kept_whole
from autoplan.sharding.strategies import axis_choices, block_options, enumerate_strategies

torch.manual_seed(20)


class PackedAttention(nn.Module):
    """Embedding, one projection to queries, keys and values, causal attention, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8, dtype=torch.float64)
        self.qkv = nn.Linear(8, 24, dtype=torch.float64)
        self.head = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x_BSD = self.table(ids)
        q, k, v = self.qkv(x_BSD).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4).unbind(0)
        y_BHSD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(y_BHSD.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class HandMadeAttention(nn.Module):
    """Chunks of one projection, rotation of halves, a mask, softmax: what older models write."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, dtype=torch.float64)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.reshape(4, 4, 2, 4) for t in self.qkv(x_BSD).chunk(3, -1))
        q = torch.cat((-q[..., 2:], q[..., :2]), -1)
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / 2.0
        future = torch.arange(4) > torch.arange(4).unsqueeze(1)
        scores = scores.masked_fill(future, float("-inf"))
        y_BHSD: torch.Tensor = scores.softmax(-1) @ v.transpose(1, 2)
        return y_BHSD.square().mean()


class RowsByNumber(nn.Module):
    """Rows picked one per sample by an arange, as a classifier's last token or a router does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, dtype=torch.float64))

    def forward(self, x_BTC: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        logits = x_BTC @ self.weight
        return logits[torch.arange(8), last].logsumexp(-1).sum()


class SortedExperts(nn.Module):
    """A router and its experts as libraries write them: rows sorted by expert, multiplied in runs,
    put back.
    """

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(8, experts, dtype=torch.float64)
        self.up = nn.Parameter(torch.randn(experts, 8, 8, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(experts, 8, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(experts, 8, 4, dtype=torch.float64))

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        grouped_mm = torch.ops.transformers.grouped_mm_fallback
        x_TD = x_BSD.flatten(0, 1)
        weight_TK, expert_TK = self.router(x_TD).softmax(-1).topk(2)
        expert_R, order_R = expert_TK.flatten().sort()
        counts_E = torch.histc(expert_R.float(), 4, 0, 3)
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        y_RD = grouped_mm(x_TD[order_R // 2], self.up.transpose(1, 2), ends_E)
        y_RD = y_RD + self.bias[expert_R]
        gate_RH, value_RH = y_RD.chunk(2, -1)
        z_RD = grouped_mm(gate_RH.sigmoid() * value_RH, self.down.transpose(1, 2), ends_E)
        z_RD = z_RD * weight_TK.flatten()[order_R].unsqueeze(-1)
        back_R = torch.empty_like(order_R)
        back_R[order_R] = torch.arange(order_R.shape[0])
        out: torch.Tensor = z_RD[back_R].unflatten(0, (-1, 2)).sum(1).square().sum()
        return out


class Assembled(nn.Module):
    """What caches and placeholders do: an empty tensor joined, rows replaced where a mask says so,
    repeated rows, windows by strides.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.value = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x_BSD: torch.Tensor, ids_BS: torch.Tensor) -> torch.Tensor:
        y_BSD = torch.cat([torch.tensor([], dtype=torch.float64), x_BSD * self.weight], dim=-2)
        y_BSD = y_BSD.sin()
        y_BSD[ids_BS == 0] = self.value
        z_BSE = torch.concat([y_BSD, y_BSD.cos()], -1).repeat(1, 2, 1)
        batch, length, width = z_BSE.shape
        w_BNWE = z_BSE.contiguous().as_strided(
            (batch, 3, 4, width), (length * width, 2 * width, width, 1)
        )
        weights = torch.arange(1, 13, dtype=torch.float64).reshape(3, 4, 1)
        return (w_BNWE * weights).square().sum()


class Images(nn.Module):
    """Convolution, batch norm, pooling, a flattened head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1, dtype=torch.float64)
        self.norm = nn.BatchNorm2d(8, dtype=torch.float64)
        self.head = nn.Linear(32, 4, dtype=torch.float64)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        y_NCHW = F.max_pool2d(torch.relu(self.norm(self.first(x_NCHW))), 2)
        logits: torch.Tensor = self.head(y_NCHW.flatten(1))
        return logits.log_softmax(-1).square().sum()


MODELS: list[tuple[type[nn.Module], dict[str, torch.Tensor]]] = [
    (PackedAttention, {"ids": torch.randint(0, 8, (4, 4)), "labels": torch.randint(0, 8, (4, 4))}),
    (HandMadeAttention, {"x_BSD": torch.randn(4, 4, 8, dtype=torch.float64)}),
    (
        RowsByNumber,
        {"x_BTC": torch.randn(8, 4, 8, dtype=torch.float64), "last": torch.randint(0, 4, (8,))},
    ),
    (SortedExperts, {"x_BSD": torch.randn(4, 4, 8, dtype=torch.float64)}),
    (
        Assembled,
        {
            "x_BSD": torch.randn(4, 4, 4, dtype=torch.float64),
            "ids_BS": torch.randint(0, 2, (4, 4)),
        },
    ),
    (Images, {"x_NCHW": torch.randn(4, 4, 4, 4, dtype=torch.float64)}),
]


def own_loss(outputs: Any, batch: object) -> torch.Tensor:
    """These models return their loss."""
    return torch.as_tensor(outputs)


@pytest.mark.parametrize(("kind", "batch"), MODELS, ids=lambda one: getattr(one, "__name__", ""))
def test_every_op_of_a_model(kind: type[nn.Module], batch: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(20)
    model = kind()
    captured = capture(model, batch, loss_fn=own_loss)
    graph = captured.graph
    held = {**dict(model.named_parameters()), **dict(model.named_buffers()), **batch}
    values = values_of(graph, {**captured.constants, **held})
    rules = {op.name: find_rule(op, graph) or kept_whole(op, graph) for op in graph.ops}
    blocks = block_options(graph, rules)
    assert graph.loss is not None
    assert torch.allclose(values[graph.loss], model(**batch)), "the graph computes the model"
    wrong = problems_of(graph, values, lambda op, rule: blocks[op.name])
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:12])


def test_index_by_arange_is_split_with_its_rows() -> None:
    captured = capture(RowsByNumber(), MODELS[2][1], loss_fn=own_loss)
    op = next(op for op in captured.graph.ops if op.target == "autoplan.index")
    rule = find_rule(op, captured.graph)
    assert rule is not None
    where = {tensor for places in rule.places.values() for tensor, *_ in places if len(places) > 2}
    assert {0, len(op.inputs)} <= where, "source and result share the letter of the rows"


def test_experts_are_worked_on_in_the_rows_own_order() -> None:
    captured = capture(SortedExperts(), MODELS[3][1], loss_fn=own_loss)
    graph = captured.graph
    targets = [op.target for op in graph.ops]
    assert targets.count("autoplan.grouped_mm") == 2
    left = {"sort", "histc", "index_put", "cumsum"} & {t.split(".")[1] for t in targets}
    assert not left, f"the sort has gone, {left} are still there"
    rules = {op.name: find_rule(op, graph) or kept_whole(op, graph) for op in graph.ops}
    batch = find_batch(graph, rules)
    assert not batch.hindrances, "rows of a batch are independent again: it can be cut"
    product = next(op for op in graph.ops if op.target == "autoplan.grouped_mm")
    assert batch.over_time[product.outputs[0]] == "S"
    assert "e" in rules[product.name].letters, "experts can be split"


def test_what_caches_and_placeholders_do_is_split_with_the_batch() -> None:
    kind, inputs = MODELS[4]
    graph = capture(kind(), inputs, loss_fn=own_loss).graph
    targets = [op.target for op in graph.ops]
    assert targets.count("aten.cat.default") == 1, "the empty part has gone, and its cat"
    assert {"aten.where.self", "aten.unfold.default"} <= set(targets)
    rules = {op.name: find_rule(op, graph) or kept_whole(op, graph) for op in graph.ops}
    assert not find_batch(graph, rules).hindrances


def test_rows_that_are_not_put_back_stay_sorted() -> None:
    class Ranked(SortedExperts):
        def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
            x_TD = x_BSD.flatten(0, 1)
            order_T = self.router(x_TD).argmax(-1).sort()[1]
            out: torch.Tensor = x_TD[order_T].cumsum(0).square().sum() * self.router.bias.sum()
            return out

    targets = [op.target for op in capture(Ranked(), MODELS[3][1], loss_fn=own_loss).graph.ops]
    assert "aten.sort.default" in targets
    assert targets.count("autoplan.index") == 1, "nothing is worked on twice"


# -- random streams --------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_dropout_draws_one_mask_per_part(sizes: Sizes) -> None:
    value = torch.rand(16, 8, dtype=torch.float64) + 0.5
    graph, _ = graph_of(
        torch.ops.aten.native_dropout.default, (value, 0.5, True), {}, frozenset(), 1
    )
    (op,) = graph.ops
    assert op.target == "autoplan.dropout"
    rule = find_rule(op, graph)
    assert rule is not None
    choices = axis_choices(rule, {}, sums=True, grads=False)
    whole = Whole(op, graph, [value], [value], [None], [None])
    for strategy in enumerate_strategies(op, rule, graph, sizes, (choices,) * len(sizes)):
        spec = strategy.inputs[0].value
        masks: dict[Place, torch.Tensor] = {}
        for place in places_of(sizes):
            part = part_of(value, spec, sizes, place)
            (out,) = run_rank(local_op(whole, strategy, sizes), sizes, place, [part])
            kept = out != 0
            assert torch.allclose(out, torch.where(kept, 2.0 * part, 0.0)), "zero, or twice it"
            masks[place] = kept
        for a, b in itertools.combinations(masks, 2):
            same = all(isinstance(p, Replicate) or i == j for p, i, j in zip(spec, a, b))
            assert torch.equal(masks[a], masks[b]) == same, f"{spec}: ranks {a} and {b}"
