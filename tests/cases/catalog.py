# SPDX-License-Identifier: Apache-2.0
"""The table of cases: a model, one global batch and a loss by name.

`build(name)` gives them in float64, the same for every call on every process: a plan crosses to the
ranks of a pool as text and a case as its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cases.models import (
    Confident,
    DropBlocks,
    Drops,
    GroupedQuery,
    Heads,
    LateClass,
    Library,
    Skip,
    Tied,
    TwoUses,
    Vocabulary,
    WeightAndBias,
    WithTarget,
    both_outputs,
    first_output,
    labelled,
    mean_error,
    mean_square,
    next_token,
    second_sum,
    small_stack,
)
from cases.report_models import (
    Adapted,
    Assigned,
    ConvNet,
    Counting,
    Custom,
    Flattened,
    Loose,
    ParallelResidual,
    Positioned,
    Rotary,
    Turned,
    Windows,
)
from torch import Tensor, nn

Inputs = dict[str, Tensor]
Loss = Callable[[object, object], Tensor]


@dataclass(frozen=True)
class Case:
    """A model, one global batch for it, and a loss (None: the model's own)."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    loss: Loss | None = None


def _ids(rows: int, seq: int, vocabulary: int) -> Inputs:
    return {"ids": torch.randint(0, vocabulary, (rows, seq))}


def _labelled_ids(rows: int, seq: int, vocabulary: int) -> Inputs:
    return {**_ids(rows, seq, vocabulary), "labels": torch.randint(0, vocabulary, (rows, seq))}


def _pair() -> Inputs:
    return {"input": torch.randn(10, 8), "target": torch.randn(10, 3)}


def _ignored() -> Inputs:
    labels = torch.full((4, 6), -100)
    for row, valid in enumerate((1, 6, 6, 5)):
        labels[row, :valid] = torch.randint(0, 3, (valid,))
    return {"input": torch.randn(4, 6, 8), "labels": labels}


def _tokens() -> Inputs:
    return {"input_ids": torch.randint(0, 50, (2, 6)), "labels": torch.randint(0, 50, (2, 6))}


def _skip_inputs() -> Inputs:
    return {"x": torch.randn(8, 16), "keep": torch.tensor([True, False, True, True] * 2)}


def _narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(100, 30), nn.ReLU(), nn.Linear(30, 100))


def _heads(heads: int) -> Case:
    return Case(lambda: Heads(heads, 4), lambda: {"x": torch.randn(4, 4, 8 * heads)}, mean_square)


def itself(outputs: object, batch: object) -> Tensor:
    """The output, a scalar."""
    assert isinstance(outputs, Tensor), "the model gives its loss"
    return outputs


CASES: dict[str, Case] = {
    **{f"heads_{h}": _heads(h) for h in (12, 14, 28)},
    "tied": Case(Tied, lambda: _ids(4, 6, 101), next_token),
    "two_uses": Case(TwoUses, lambda: {"x": torch.randn(4, 16)}, mean_square),
    "weight_and_bias": Case(WeightAndBias, lambda: {"x": torch.randn(4, 3)}, mean_square),
    "vocabulary": Case(Vocabulary, lambda: _ids(2, 4, 50257), next_token),
    "confident": Case(Confident, lambda: {"ids": torch.full((2, 4), 7)}, next_token),
    "grouped_query": Case(GroupedQuery, lambda: {"x": torch.randn(2, 5, 128)}, mean_square),
    "skip": Case(Skip, _skip_inputs, both_outputs),
    "skip_first": Case(Skip, _skip_inputs, first_output),
    "late_class": Case(LateClass, _skip_inputs, both_outputs),
    "microbatches": Case(lambda: WithTarget(small_stack()), _pair, mean_error),
    "ignored": Case(lambda: WithTarget(small_stack()), _ignored, labelled),
    "drops": Case(Drops, lambda: {"x": torch.ones(8, 64)}, second_sum),
    "drop_blocks": Case(DropBlocks, lambda: {"x": torch.ones(8, 16)}, second_sum),
    "library": Case(Library, _tokens),
    "flattened": Case(Flattened, lambda: {"x": torch.randn(6, 256)}, mean_square),
    "rotary": Case(Rotary, lambda: {"x": torch.randn(4, 6, 16)}, mean_square),
    "turned": Case(Turned, lambda: {"x": torch.randn(4, 6, 16)}, mean_square),
    "conv": Case(ConvNet, lambda: {"x": torch.randn(8, 3, 8, 8)}, mean_square),
    "parallel_residual": Case(ParallelResidual, lambda: {"x": torch.randn(4, 6, 32)}, mean_square),
    "custom": Case(Custom, lambda: {"x": torch.randn(4, 16)}, mean_square),
    "loose": Case(Loose, lambda: {"x": torch.randn(4, 16)}, mean_square),
    "counting": Case(Counting, lambda: {"x": torch.randn(4, 8)}, mean_square),
    "narrow": Case(_narrow, lambda: {"input": torch.randn(3, 100)}, mean_square),
    "assigned": Case(Assigned, lambda: {"x": torch.randn(4, 8)}, mean_square),
    "positioned": Case(Positioned, lambda: _labelled_ids(4, 8, 20), itself),
    "windows": Case(Windows, lambda: {"x": torch.randn(4, 6, 8)}, mean_square),
    "adapted": Case(Adapted, lambda: {"x": torch.randn(4, 16)}, mean_square),
}


def build(name: str, seed: int = 0) -> tuple[nn.Module, Inputs, Loss | None]:
    """The case's model in training mode, its batch and its loss; float64, the same for every call
    with one seed."""
    case = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = case.model().double().train()  # complex tensors stay complex
        inputs = case.inputs()
    doubled = {k: v.to(torch.float64) if v.is_floating_point() else v for k, v in inputs.items()}
    return model, doubled, case.loss


def tensors_of(result: object) -> list[Tensor]:
    """The tensors of a model's output, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [t for part in result for t in tensors_of(part)]
    if isinstance(result, dict):
        return [t for part in result.values() for t in tensors_of(part)]
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return [t for f in dataclasses.fields(result) for t in tensors_of(getattr(result, f.name))]
    return []
