# SPDX-License-Identifier: Apache-2.0
"""The zoo: every architecture that the installed transformers has for four training tasks, with
random weights and one batch.

    for entry in zoo("tiny"):                    # or "full"
        model, inputs = entry.build("cpu")       # training mode, keyword inputs with labels

`full` is an architecture's default configuration cut to two blocks; `tiny` has small widths too and
runs on a CPU. Every probability of dropping is 0 (in the configuration and in the modules), so that
a model in training mode gives the same numbers on every run: a split dropout draws other masks than
one device does, by design. What transformers itself cannot build raises from `build`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

transformers.logging.set_verbosity_error()

SIZES = ("full", "tiny")
FAMILIES_PER_PROCESS = (
    12  # of a sweep: torch keeps what it traced, and forks of much memory are slow
)
TASKS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}
# how configurations call the number of their blocks, and a list with one entry per block
DEPTHS = (
    "num_hidden_layers n_layer num_layers encoder_layers decoder_layers num_decoder_layers n_layers"
).split()
PER_BLOCK = ("layer_types", "mlp_layer_types")
# largest value that a tiny configuration keeps -> the names it is kept under
LIMITS = {
    250: "vocab_size",
    128: "intermediate_size ffn_dim d_ff n_inner hidden_dim encoder_ffn_dim decoder_ffn_dim "
    "ffn_hidden_size inner_dim dff n_positions max_position_embeddings n_ctx max_seq_len",
    64: "hidden_size n_embd d_model dim emb_dim embed_dim embedding_size word_embed_proj_dim "
    "moe_intermediate_size shared_expert_intermediate_size",
    32: "q_lora_rank image_size",
    16: "head_dim d_kv kv_channels kv_lora_rank v_head_dim",
    8: "qk_rope_head_dim qk_nope_head_dim patch_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts",
    2: "num_key_value_heads num_experts_per_tok moe_topk",
    1: "n_group topk_group n_shared_experts",
}
VOCABULARY = 250


@dataclass(frozen=True)
class Entry:
    """One architecture for one task.

    Attributes:
        task: A key of TASKS.
        family: transformers' `model_type`.
        class_name: The class in transformers.
        size: One of SIZES.
    """

    task: str
    family: str
    class_name: str
    size: str

    @property
    def name(self) -> str:
        """As "causal:llama"."""
        return f"{self.task}:{self.family}"

    def build(
        self, device: str = "meta", *, batch: int = 4, seq: int = 32, seed: int = 0
    ) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model in training mode and one global batch; seeded on a real device.

        Args:
            device: "meta" or "cpu".
            batch: Rows.
            seq: Tokens per row; images have the configuration's own size.
            seed: Of weights and inputs; the caller's random state is kept.

        Raises:
            Exception: Whatever transformers raises for a configuration it cannot build.
        """
        made, config = getattr(transformers, self.class_name), CONFIG_MAPPING[self.family]()
        if made.config_class is config.sub_configs.get("text_config"):
            config = config.get_text_config()  # as AutoModelForCausalLM.from_config does
        _cut(config, self.size)
        _complete(config)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with torch.device(device):
                model = made(config).train()
                inputs = (
                    _images(config, batch) if self.task == "image" else _tokens(config, batch, seq)
                )
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
        return model, inputs


def zoo(size: str, task: str | None = None) -> Iterator[Entry]:
    """All entries of a size, of one task or of all."""
    for name, families in TASKS.items():
        if task in (None, name):
            for family, classes in families.items():
                first = classes if isinstance(classes, str) else classes[0]
                yield Entry(name, family, first, size)


def select(size: str, only: str, done: Collection[str]) -> list[Entry]:
    """Entries of a size: those that `only` names (names, families or tasks, with commas; "": all)
    without those that are `done`.
    """
    wanted = set(filter(None, only.split(",")))
    named = (e for e in zoo(size) if not wanted or {e.name, e.family, e.task} & wanted)
    return [e for e in named if e.name not in done]


def find(name: str, size: str) -> Entry:
    """The entry called `name`, as "causal:llama".

    Raises:
        KeyError: transformers has none of that name.
    """
    task, family = name.split(":")
    classes = TASKS[task][family]
    return Entry(task, family, classes if isinstance(classes, str) else classes[0], size)


def loss_of_logits(outputs: Any, batch: Any) -> Tensor:
    """The loss of a model that has none of its own: cross-entropy of its first output and the
    labels.
    """
    return nn.functional.cross_entropy(outputs[0].flatten(0, -2), batch["labels"].flatten())


def _cut(config: PretrainedConfig, size: str) -> None:
    """Two blocks, no dropout, and small widths if `size` is "tiny"; nested configurations too."""
    nested = [v for v in vars(config).values() if isinstance(v, PretrainedConfig)]
    for part in (config, *nested):
        for name in DEPTHS:
            if isinstance(getattr(part, name, None), int):
                _set(part, name, 2)
        if isinstance(getattr(part, "num_blocks", None), int) and part.num_blocks > 2:
            _set(part, "num_blocks", 2)
        for name in PER_BLOCK:
            if isinstance(getattr(part, name, None), list):
                _set(part, name, getattr(part, name)[:2])
        if size == "tiny":
            _shrink(part)
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and _is_dropout(name):
                _set(part, name, 0.0)


def _complete(config: PretrainedConfig) -> None:
    """What every checkpoint's configuration has and some defaults lack."""
    own = vars(config)
    heads, hidden = own.get("num_attention_heads"), own.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int):
        for name, value in (("num_key_value_heads", heads), ("head_dim", hidden // heads)):
            if name in own and own[name] is None:
                _set(config, name, value)
    if not hasattr(config, "pad_token_id"):
        _set(config, "pad_token_id", None)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        _set(config, "decoder_start_token_id", config.pad_token_id or 0)


def _is_dropout(name: str) -> bool:
    return "dropout" in name or "pdrop" in name or name.endswith(("_drop", "layerdrop"))


def _shrink(part: PretrainedConfig) -> None:
    for limit, names in LIMITS.items():
        for name in names.split():
            value = getattr(part, name, None)
            if isinstance(value, int) and value > limit:
                _set(part, name, limit)
    for name, value in list(vars(part).items()):
        if name.endswith("token_id") and isinstance(value, int) and value >= VOCABULARY:
            _set(part, name, 1)


def _set(config: PretrainedConfig, name: str, value: object) -> None:
    try:
        setattr(config, name, value)
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        pass  # another name of a field, for reading only


def _images(config: PretrainedConfig, batch: int) -> dict[str, Tensor]:
    side = getattr(config, "image_size", None) or 224
    side = side if isinstance(side, int) else side[0]
    channels = getattr(config, "num_channels", 3)
    return {
        "pixel_values": torch.randn(batch, channels, side, side),
        "labels": torch.randint(0, 2, (batch,)),
    }


def _tokens(config: PretrainedConfig, batch: int, seq: int) -> dict[str, Tensor]:
    own = getattr(config, "vocab_size", None)
    vocabulary = min(own, VOCABULARY) if isinstance(own, int) else VOCABULARY
    return {
        "input_ids": torch.randint(3, vocabulary, (batch, seq)),
        "labels": torch.randint(3, vocabulary, (batch, seq)),
    }
