# SPDX-License-Identifier: Apache-2.0
"""saved.py against autograd itself, on exported models.

Every op of seven models on the values that really flow there, and the total bytes of those models'
forward passes.
"""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch
import torch.nn.functional as F
import transformers
import transformers.integrations.moe  # registers grouped_mm_fallback
from keeper import Keeper, compare, meta_of, op_of, schema_arguments, storage, tensors_in
from torch import nn

from autoplan.costs.saved import is_exact, saved_by

aten = torch.ops.aten


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.second(self.drop(F.relu(self.first(x)))), y)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.conv, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.act, self.mean, self.head = (
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Linear(8, 4),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.act(self.norm(self.stem(x))))
        x = self.act(self.norm2(self.conv(x)) + x)
        return F.cross_entropy(self.head(torch.flatten(self.mean(x), 1)), y)


IDS = torch.arange(64).reshape(2, 32) % 60 + 2  # 32 tokens: the log-sum-exp needs no rounding
TEXT = {"input_ids": IDS, "labels": IDS.clone()}
SMALL = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1}
WIDTHS = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
NO_DROP = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0}


def build(name: str, attention: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    t, chosen = transformers, {"attn_implementation": attention}
    match name:
        case "mlp":
            return Perceptron(), {"x": torch.rand(5, 4), "y": torch.arange(5) % 3}
        case "resnet":
            return Residual(), {"x": torch.rand(2, 3, 8, 8), "y": torch.arange(2)}
        case "gpt2":
            config = t.GPT2Config(
                **SMALL, n_positions=32, n_embd=16, n_layer=2, n_head=2, attn_pdrop=0.0, **chosen
            )
            return t.GPT2LMHeadModel(config), TEXT
        case "llama":
            return t.LlamaForCausalLM(
                t.LlamaConfig(**SMALL, **WIDTHS, num_key_value_heads=2, **chosen)
            ), TEXT
        case "bert":
            config = t.BertConfig(
                **SMALL, **WIDTHS, **NO_DROP, max_position_embeddings=32, **chosen
            )
            return t.BertForMaskedLM(config), {**TEXT, "attention_mask": torch.ones_like(IDS)}
        case "vit":
            config = t.ViTConfig(
                **WIDTHS, **NO_DROP, image_size=8, patch_size=4, num_labels=4, **chosen
            )
            return t.ViTForImageClassification(config), {
                "pixel_values": torch.rand(2, 3, 8, 8),
                "labels": torch.arange(2),
            }
        case "t5":
            sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
            config = t.T5Config(
                **{**SMALL, "bos_token_id": None}, **sizes, decoder_start_token_id=0, **chosen
            )
            return t.T5ForConditionalGeneration(config), TEXT
    raise KeyError(name)


@cache
def exported(name: str, attention: str) -> torch.export.ExportedProgram:
    model, batch = build(name, attention)
    model.train()
    extra = {"use_cache": False} if name in ("gpt2", "llama", "t5") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.export's own, about its tree specs
        return torch.export.export(model, (), {**batch, **extra}, strict=False).run_decompositions(
            {}
        )


class Checker(torch.fx.Interpreter):
    """Runs an exported graph, compares every op on the values that flow, sums the predictions."""

    def __init__(self, module: torch.fx.GraphModule, check: bool) -> None:
        super().__init__(module)
        self.check = check
        self.wrong: list[str] = []
        self.targets: set[str] = set()
        self.root: dict[
            int, int
        ] = {}  # storage address -> address of the storage that it is counted as
        self.kept: dict[int, int] = {}  # predicted: address -> bytes
        self.alive: list[object] = []
        self.extra_bytes = 0.0

    def call_function(self, target, args, kwargs):
        if not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, kwargs)
        self.targets.add(str(target))
        _, tensors = op_of(str(target), schema_arguments(target, args, kwargs), 1)
        needs = tuple(t.requires_grad for t in tensors)
        if self.check and any(needs) and not skipped(target, args, kwargs):
            self.wrong += [w for w in [compare(target, args, kwargs, needs)[1]] if w]
        result = target(*args, **kwargs)
        self.predict(target, args, kwargs, result)
        return result

    def predict(self, target, args, kwargs, result) -> None:
        outputs = tensors_in([result])
        op, inputs = op_of(str(target), schema_arguments(target, args, kwargs), len(outputs))
        needs = tuple(t.requires_grad for t in inputs)
        said = saved_by(op, tuple(map(meta_of, inputs)), tuple(map(meta_of, outputs)), needs)
        self.alive += [inputs, outputs]
        for tensor in (*(inputs[i] for i in said.inputs), *(outputs[i] for i in said.outputs)):
            address, size_bytes = storage(tensor)
            self.kept[address] = size_bytes
        self.extra_bytes += said.extra_bytes


def skipped(target, args, kwargs) -> bool:
    """Calls in which the CPU differs.

    Matmul of strided operands keeps contiguous copies of them (the totals agree); attention keeps
    the log-sum-exp unrounded, or all scores where the mask needs a gradient or dropout is on.
    """
    if target is aten.scaled_dot_product_attention.default:
        given = schema_arguments(target, args, kwargs)
        mask = given["attn_mask"]
        learned = mask is not None and mask.requires_grad
        return args[0].shape[-2] % 32 != 0 or learned or given["dropout_p"] > 0
    return target is aten.matmul.default and not all(t.is_contiguous() for t in args)


MODELS = [(n, a) for n in ("gpt2", "llama", "bert", "vit", "t5") for a in ("sdpa", "eager")]
MODELS += [("mlp", "sdpa"), ("resnet", "sdpa")]


def run_checked(name: str, attention: str, check: bool) -> tuple[Checker, Keeper]:
    program = exported(name, attention)
    state = {
        **dict(program.named_parameters()),
        **dict(program.named_buffers()),
        **program.constants,
    }
    inputs = iter(program.example_inputs[1].values())
    signature = program.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    holders = [n for n in program.graph.nodes if n.op == "placeholder"]
    values = [state[names[n.name]] if n.name in names else next(inputs) for n in holders]
    checker = Checker(program.graph_module, check)
    with Keeper() as keeper:
        checker.run(*values)
    return checker, keeper


@pytest.mark.parametrize(("name", "attention"), MODELS)
def test_every_op_of_a_model(name: str, attention: str) -> None:
    checker, _ = run_checked(name, attention, check=True)
    assert {t for t in checker.targets if not is_exact(t)} == set()
    assert checker.wrong == []


@pytest.mark.parametrize(
    ("name", "attention"), [m for m in MODELS if m not in {("vit", "sdpa"), ("t5", "sdpa")}]
)
def test_total_bytes_of_a_model(name: str, attention: str) -> None:
    checker, keeper = run_checked(name, attention, check=False)
    said, kept = sum(checker.kept.values()) + checker.extra_bytes, sum(keeper.kept.values())
    assert said == kept
