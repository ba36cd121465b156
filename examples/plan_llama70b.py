# SPDX-License-Identifier: Apache-2.0
"""Llama-3-70B, sequence 4096, batch 512, on the meta device: a model for the command line.

    autoplan plan examples/plan_llama70b.py:llama --cluster dgx-h100-8x8 --precision bf16-mixed

No GPU is needed, and no memory for the weights. Shape: 80 layers, hidden 8192, 64 heads of which 8
are keys and values, feed-forward 28672, vocabulary 128256.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import nn

BATCH, SEQUENCE = 512, 4096


def llama(num_layers: int = 80) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and one global batch; what `autoplan plan FILE.py:FUNCTION` calls."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
        num_hidden_layers=num_layers,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config).train()
        ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}
