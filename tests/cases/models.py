# SPDX-License-Identifier: Apache-2.0
"""The models of the public bug reports, each a `Case`: a builder, one global batch, a loss.

`build(name)` gives (model, inputs, loss function) in float64, the same for every call on every process: a plan crosses to the
ranks of a pool as text and a case as its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Inputs = dict[str, Tensor]
Loss = Callable[[object, object], Tensor]


@dataclass(frozen=True)
class Case:
    """A model, one global batch for it, and a loss (None: the model's own)."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    loss: Loss | None = None


def given(batch: object, name: str) -> Tensor:
    """One tensor of a batch that was passed as keywords."""
    assert isinstance(batch, dict), "the cases pass their inputs as keywords"
    tensor = batch[name]
    assert isinstance(tensor, Tensor), f"{name} is a tensor"
    return tensor


def next_token(outputs: object, batch: object) -> Tensor:
    """Cross entropy of the logits against the input ids."""
    assert isinstance(outputs, Tensor), "the model gives its logits"
    return functional.cross_entropy(outputs.flatten(0, 1), given(batch, "ids").flatten())


def mean_square(outputs: object, batch: object) -> Tensor:
    """Mean of the squared output."""
    assert isinstance(outputs, Tensor), "the model gives one tensor"
    return outputs.square().mean()


# ---- tied weights --------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose table is also the output head's weight."""

    def __init__(self, vocabulary: int = 101, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        h: Tensor = self.emb(ids)
        for block in self.blocks:
            h = h + block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits
