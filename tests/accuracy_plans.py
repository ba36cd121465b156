# SPDX-License-Identifier: Apache-2.0
"""The plans whose step times `tests/accuracy.py` predicts and measures: models of three shapes and
several sizes in float32, each pinned to layouts of four processes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from models import MLP
from torch import nn

import autoplan

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One plan: a model's name and size, and the pins "dp=2,tp=2,..." that complete it."""

    model: str
    pins: str

    def __str__(self) -> str:
        return f"{self.model} {self.pins}"


def build(name: str) -> tuple[nn.Module, Batch]:
    """The model and global batch of "mlp-WIDTH-DEPTH-ROWS", "gpt-HIDDEN-LAYERS-ROWS-TOKENS" or
    "llama-HIDDEN-LAYERS-ROWS-TOKENS"; the same weights on every call.
    """
    kind, *numbers = name.split("-")
    sizes = [int(n) for n in numbers]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if kind == "mlp":
            width, depth, rows = sizes
            return MLP(width, depth), {
                "x": torch.randn(rows, width),
                "target": torch.randn(rows, 4),
            }
        hidden, layers, rows, tokens = sizes
        ids = torch.randint(0, 512, (rows, tokens))
        model = _gpt(hidden, layers, tokens) if kind == "gpt" else _llama(hidden, layers, tokens)
        return model.train(), {"input_ids": ids, "labels": ids.clone()}


def _gpt(hidden: int, layers: int, tokens: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=hidden,
        n_head=8,
        vocab_size=512,
        n_positions=tokens,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def _llama(hidden: int, layers: int, tokens: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=2 * hidden,
        vocab_size=512,
        num_hidden_layers=layers,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


LAYOUTS = (
    "dp=4,tp=1,pp=1,zero=0,num_microbatches=1",
    "dp=1,tp=4,pp=1,zero=0,num_microbatches=1",
    "dp=2,tp=2,pp=1,zero=0,num_microbatches=1",
    "dp=1,tp=1,pp=4,zero=0,num_microbatches=8",
    "dp=2,tp=1,pp=2,zero=0,num_microbatches=4",
    "dp=1,tp=2,pp=2,zero=0,num_microbatches=4",
)
MORE = (
    "dp=4,tp=1,pp=1,zero=1,num_microbatches=1",
    "dp=4,tp=1,pp=1,zero=3,num_microbatches=2",
    "dp=2,tp=2,pp=1,zero=2,num_microbatches=4",
    "dp=1,tp=1,pp=4,zero=0,num_microbatches=4,schedule=gpipe",
    "dp=2,tp=1,pp=2,zero=0,num_microbatches=8,schedule=gpipe",
    "dp=1,tp=4,pp=1,zero=0,num_microbatches=2,recompute=true",
)
MODELS = (
    "mlp-256-8-256",
    "mlp-768-4-256",
    "gpt-128-4-16-64",
    "gpt-384-4-16-64",
    "llama-256-4-16-64",
)


def cases(two_hosts: bool = False) -> list[Case]:
    """All plans of a run; fewer on two hosts."""
    if two_hosts:
        return [Case(m, p) for m in ("mlp-256-8-256", "gpt-128-4-16-64") for p in LAYOUTS]
    every = [Case(m, p) for m in MODELS for p in LAYOUTS]
    return (
        every
        + [Case("gpt-128-4-16-64", p) for p in MORE[:3]]
        + [Case("llama-256-4-16-64", p) for p in MORE[3:]]
    )


def parse_pins(text: str) -> autoplan.Pins:
    """Pins of "dp=2,recompute=true"."""
    values: dict[str, object] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        values[key] = (
            int(value) if value.isdigit() else {"true": True, "false": False}.get(value, value)
        )
    return autoplan.Pins(**values)  # type: ignore[arg-type]
