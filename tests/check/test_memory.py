# SPDX-License-Identifier: Apache-2.0
"""Peaks of published runs: units, shards that are filled up, caches, losses, optimizer steps.

Expected bytes are counted by hand from the sizes of the rows.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from check_rows import run_of

from autoplan.check import case, predict
from autoplan.check.predict import Prediction
from autoplan.check.report import memory_error
from autoplan.placements import Layout, ShardingSpec
from autoplan.sharding.strategies import parameter_strategies
from autoplan.units import GIB

LLAMA = {
    "source": "pytorch/torchtitan benchmarks/llama3_h100_202412", "gpu": "H100-80GB",
    "model": "llama3-8b", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8",
    "ffn_hidden": "14336", "vocab": "128256", "seq_len": "8192", "precision": "bf16",
    "gpus": "8", "dp": "8", "tp": "1", "pp": "1", "micro_batch_seqs": "2",
    "global_batch_seqs": "16", "fsdp_or_zero": "fsdp2", "recompute": "selective",
    "attention_kernel": "flash",
}  # fmt: skip
INTERN = {
    "source": "InternLM/InternEvo", "model": "InternLM-7B", "layers": "32", "hidden": "4096",
    "heads": "32", "kv_heads": "32", "ffn_hidden": "11008", "vocab": "103168", "seq_len": "2048",
    "precision": "bf16", "micro_batch_seqs": "1", "recompute": "full", "attention_kernel": "flash",
}  # fmt: skip
TOKENS = 2 * 8192


@pytest.mark.parametrize(
    ("notes", "predicted", "error"),
    [
        ("memory in GiB", 11 * GIB, 0.1),
        ("memory in GB", 11e9, 0.1),
        ("", 10.5e9, 0.0),  # between 10 GB and 10 GiB
        ("", 9e9, -0.1),
        ("", 11 * GIB, 0.1),
    ],
)
def test_a_peak_is_read_in_its_unit(notes: str, predicted: float, error: float) -> None:
    run = run_of(peak_memory_gb="10", micro_batch_seqs="1", notes=notes)
    made = Prediction(run, "a100-80g", "fsdp", 1.0, predicted, None, 80 * GIB, "none")
    assert memory_error(made) == pytest.approx(error, abs=1e-9)


def test_shards_are_filled_up_where_frameworks_do() -> None:
    whole = ShardingSpec.replicated(2)
    wanted = (Layout(whole, whole),)
    (own,) = parameter_strategies((64, 256), True, wanted, (3, 1), (3,))
    assert str(own.spec) == "RR"
    (padded,) = parameter_strategies((64, 256), True, wanted, (3, 1), (3,), padded=True)
    assert str(padded.spec) == "S(1)R"
    (even,) = parameter_strategies((64, 255), True, wanted, (4, 1), (3,), padded=True)
    assert str(even.spec) == "S(0)R"


def test_three_ranks_hold_a_third_each() -> None:
    run = run_of(**INTERN, gpus="3", tp="1", pp="1", dp="3", grad_accum="4", fsdp_or_zero="fsdp")
    found = predict.priced(run)
    parameters = case.case_of(run).sizes.num_parameters
    states = sum(price.state_bytes for price in found.prices)
    # 32 blocks of seven matrices and two norms, embedding, head and norm: each rounded up
    assert 8 * parameters / 3 < states < 8 * parameters / 3 * 1.001


@pytest.mark.parametrize(("notes", "second"), [("(eager)", 4096), ("torch.compile", 0)])
def test_op_wise_recomputation_keeps_what_it_caches(notes: str, second: int) -> None:
    # the block's input, every second product from the first (q, v, up, down) and attention's output
    # with its float32 log-sum-exp; compiled, nothing reads the last product's output
    block = predict.priced(run_of(**LLAMA, notes=f"FSDP {notes}")).prices[4]
    width = 4096 + 4096 + 1024 + 14336 + 4096 + second
    expected = 2 * TOKENS * width + 4 * 32 * TOKENS
    assert block.activation_bytes == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("tp", "each"), [(1, 14.0), (8, 18.0)])
def test_the_peak_of_a_loss_is_bytes_per_logit(tp: int, each: float) -> None:
    cells = {**LLAMA, "tp": str(tp), "dp": str(8 // tp), "global_batch_seqs": str(16 // tp)}
    head = predict.priced(run_of(**cells, notes="torch.compile")).prices[-1]
    logits = TOKENS * (128256 if tp == 1 else math.ceil(128256 / 1024) * 1024) / tp
    # float32 log-probabilities and the total weight are kept from forward to backward
    assert head.transient_bytes == pytest.approx((each - 4.0) * logits - 4.0, rel=1e-10)


def test_a_compiled_loss_keeps_no_float32_logits() -> None:
    eager = predict.predict(run_of(**LLAMA, notes="torch.compile")).memory_bytes
    cells = {**LLAMA, "source": "pytorch/torchtitan benchmarks/llama3-8b_h200_202506"}
    compiled = predict.predict(run_of(**cells, notes="torch.compile")).memory_bytes
    saved = (14.0 - 6.0) * TOKENS * 128256 * 1.05  # with the allocator's share
    assert eager - compiled == pytest.approx(saved, rel=0.03)


def test_an_optimizer_step_holds_its_copies() -> None:
    run = run_of(**INTERN, gpus="4", tp="4", pp="1", dp="1", grad_accum="4", fsdp_or_zero="zero1")
    made = case.case_of(run)
    peak = made.memory_bytes(predict.priced(run)) - made.traits.reserve_GiB * GIB
    # bfloat16 and float32 parameters, float32 gradients, two states, and 12 more
    assert peak == pytest.approx(30.0 * made.sizes.num_parameters / 4, rel=1e-3)
    plain = replace(made, traits=case.runtime("fsdp"))
    assert plain.memory_bytes(predict.priced(run)) < 0.7 * peak


def test_left_over_blocks_go_to_the_last_stages() -> None:
    cells = {**INTERN, "gpus": "5", "tp": "1", "pp": "5", "dp": "1", "grad_accum": "5"}
    found = predict.priced(run_of(**cells, fsdp_or_zero="zero1"))
    counts = [last - first for first, last in found.assignment.bounds]
    # 32 blocks on 5 stages: 6, 6, 6, 7, 7, and the layers before and behind
    assert counts[1:4] == [6, 6, 7]
    assert sum(counts) == len(found.prices)
