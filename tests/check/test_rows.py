# SPDX-License-Identifier: Apache-2.0
"""Rows of published runs: read strictly, filled by rule, refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_rows import run_of

from autoplan.check.case import case_of, runtime_for, sizes_of
from autoplan.check.machines import cluster_of
from autoplan.check.rows import COLUMNS, degrees_of, measured_s, read_runs
from autoplan.check.sweep import sweep
from autoplan.errors import ProfileError

GPT = {
    "model": "GPT-145B", "layers": "80", "hidden": "12288", "heads": "96", "vocab": "51200",
    "seq_len": "2048", "gpus": "1536", "tp": "8", "pp": "8", "vpp": "2", "dp": "24",
    "micro_batch_seqs": "2", "global_batch_seqs": "2304",
}  # fmt: skip


def test_degrees_multiply_up() -> None:
    degrees = degrees_of(run_of(**GPT))
    assert (degrees.tp, degrees.pp, degrees.dp, degrees.chunks) == (8, 8, 24, 2)
    assert degrees.num_microbatches == 48


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dp": "23"}, "tp x pp x cp x dp = 1472, not 1536"),
        ({"tp": "7"}, "does not divide"),
        ({"tp": "", "dp": ""}, "does not state tp"),
        ({"gpus": "many"}, "not a number"),
        ({"layers": ""}, "does not state layers"),
        ({"precision": "int4"}, "precision 'int4'"),
        ({"gpu": "Cray-1"}, "no device profile"),
        ({"model": "deepseek-v3"}, "several kinds"),
        ({"global_batch_seqs": "", "micro_batch_seqs": ""}, "does not state the batch"),
        ({"notes": "CPU offload"}, "offloaded"),
    ],
)
def test_what_cannot_be_priced_is_listed_with_its_reason(
    changed: dict[str, str], reason: str
) -> None:
    swept = sweep([run_of(**{**GPT, **changed})])
    assert not swept.predictions
    assert reason in swept.refused[0][1]


def test_rates_are_turned_around_with_the_papers_formula() -> None:
    # Narayanan et al., SC 2021, equation 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h) FLOP a step
    run = run_of(**GPT, tflops_per_gpu="148", notes="TFLOP/s counts recompute")
    b, s, layers, h, v = 2304, 2048, 80, 12288, 51200
    flop = 96.0 * b * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    parameters = layers * 12 * h * h + v * h
    found = measured_s(run, degrees_of(run), parameters)
    assert found == pytest.approx(flop / (148e12 * 1536), rel=1e-9)


def test_tokens_are_turned_around() -> None:
    run = run_of(**GPT, tokens_per_s_per_gpu="100")
    assert measured_s(run, degrees_of(run), 1.0) == pytest.approx(2304 * 2048 / (100 * 1536))


def test_a_network_is_as_stated() -> None:
    stated = "8x HDR InfiniBand 200 Gb/s per node"
    inter = cluster_of(run_of(gpus="16", interconnect_inter=stated)).inter_host
    assert inter is not None
    assert inter.bytes_per_s == pytest.approx(200e9)
    inter = cluster_of(run_of(gpus="16", interconnect_inter="4x 100 Gb/s RoCE per node")).inter_host
    assert inter is not None
    assert inter.bytes_per_s == pytest.approx(50e9)


def test_a_rack_is_one_domain() -> None:
    cluster = cluster_of(run_of(gpu="GB200", gpus="256", gpus_per_node="4"))
    assert (cluster.num_hosts, cluster.devices_per_host) == (4, 64)


def test_the_framework_follows_source_level_and_notes() -> None:
    assert runtime_for(run_of(source="2104.04473 SC21")).name == "megatron-2021"
    assert runtime_for(run_of(source="SC21", fsdp_or_zero="zero3")).name == "deepspeed-2021"
    assert runtime_for(run_of(source="pytorch/torchtitan")).name == "torchtitan"
    assert runtime_for(run_of(source="somebody", fsdp_or_zero="fsdp2")).name == "fsdp"


def test_releases_and_options_of_a_framework_add_up() -> None:
    plain = runtime_for(run_of(source="pytorch/torchtitan 2025"))
    assert (plain.hides_tp, plain.loss_bytes) == (0.0, (6.0, 10.0))
    both = runtime_for(run_of(source="pytorch/torchtitan 202412", notes="async TP, rowwise"))
    assert both.hides_tp > 0.0
    assert both.float8_casts > plain.float8_casts
    assert both.loss_bytes == (14.0, 18.0)
    assert not runtime_for(run_of(source="pytorch/torchtitan 202412", notes="(eager)")).compiled


@pytest.mark.parametrize(
    ("seq", "source", "tokens"),
    [
        ("512", "NVIDIA/DeepLearningExamples BERT", 288),  # half of them, and half a bin of 64
        ("128", "NVIDIA/DeepLearningExamples BERT", 128),
        ("512", "MLPerf Megatron-LM", 256),
        ("512", "Megatron-DeepSpeed", 512),
    ],
)
def test_padding_is_computed_as_far_as_a_framework_fills_up(
    seq: str, source: str, tokens: int
) -> None:
    run = run_of(
        source=source, model="BERT-Large", layers="24", hidden="1024", heads="16", vocab="30528",
        seq_len=seq, gpus="1", tp="1", dp="1", micro_batch_seqs="32", global_batch_seqs="64",
    )  # fmt: skip
    assert case_of(run).sizes.seq == tokens


def test_the_count_of_parameters_tells_a_gate() -> None:
    cells = {**GPT, "model": "unheard-of", "ffn_hidden": "49152"}
    plain = run_of(**cells, params_b="146")
    assert not sizes_of(plain, degrees_of(plain)).gated
    gated = run_of(**cells, params_b="194")
    assert sizes_of(gated, degrees_of(gated)).gated


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(",".join(c for c in COLUMNS if c != "tp") + "\n", encoding="utf-8")
    with pytest.raises(ProfileError, match="lacks columns tp"):
        read_runs(path)
