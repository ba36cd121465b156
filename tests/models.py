# SPDX-License-Identifier: Apache-2.0
"""Small models of the seven shapes the tests run, each with one batch; float64, seeded, no dropout
unless asked.

`build(name)` gives (model, inputs). The transformers classes are the library's own with random
weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import nn

Built = tuple[nn.Module, dict[str, torch.Tensor]]


class MLP(nn.Module):
    """Residual blocks of two linears; its own mean squared loss."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = x + block(x)
        y = self.head(x)
        return {"loss": nn.functional.mse_loss(y, target), "y": y}


def _mlp() -> Built:
    return MLP(), {"x": torch.randn(8, 16), "target": torch.randn(8, 4)}


def _tokens(batch: int = 8, seq: int = 16, vocabulary: int = 64) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (batch, seq))
    labels = ids.clone()
    labels[0, :5] = -100
    labels[3, 8:] = -100
    return {"input_ids": ids, "labels": labels}


def _gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        vocab_size=64,
        n_positions=32,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config), _tokens()


def _float64_norms(model: nn.Module) -> nn.Module:
    """The library's RMS norms compute in float32 whatever the model is; torch's own keeps
    float64.
    """
    for module in model.modules():
        for name, child in module.named_children():
            if type(child).__name__ in ("LlamaRMSNorm", "T5LayerNorm"):
                setattr(module, name, nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon))
    return model


def _llama() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=64,
        num_hidden_layers=2,
        use_cache=False,
    )
    return _float64_norms(LlamaForCausalLM(config)), _tokens()


def _bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=64,
        num_hidden_layers=2,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config), _tokens()


def _vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=64,
        num_hidden_layers=2,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=4,
    )
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(8, 3, 16, 16),
        "labels": torch.randint(0, 4, (8,)),
    }


def _t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=64,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
        dropout_rate=0.0,
    )
    inputs = _tokens()
    return _float64_norms(T5ForConditionalGeneration(config)), {
        "input_ids": inputs["input_ids"],
        "labels": inputs["labels"].roll(1, 1),
    }


def _resnet() -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="bottleneck", num_labels=4
    )
    return ResNetForImageClassification(config), {
        "pixel_values": torch.randn(8, 3, 16, 16),
        "labels": torch.randint(0, 4, (8,)),
    }


BUILDERS: dict[str, Callable[[], Built]] = {
    "mlp": _mlp,
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "vit": _vit,
    "t5": _t5,
    "resnet": _resnet,
}


def build(name: str, seed: int = 0) -> Built:
    """The model in training mode and one batch, float64, the same for every call with one seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, inputs = BUILDERS[name]()
        model = model.to(torch.float64).train()
        return model, {
            k: v.to(torch.float64) if v.is_floating_point() else v for k, v in inputs.items()
        }


class Checking(nn.Module):
    """Asserts something of its input's values (here, where pytest leaves asserts as they are)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = (x != 0).sum(dim=-1)
        assert lengths.max().item() <= x.shape[-1]
        return self.linear(x).sum()
