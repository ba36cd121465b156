# SPDX-License-Identifier: Apache-2.0
"""Written graphs: parameters as counted by hand, depth by repetition, saved activations as
published.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from check_rows import run_of

from autoplan.check import predict
from autoplan.check.models import Sizes, write_model
from autoplan.solver import repeated

GPT = Sizes(
    layers=6,
    hidden=64,
    heads=4,
    kv_heads=4,
    head_dim=16,
    ffn=256,
    vocab=512,
    rows=8,
    seq=32,
    gated=False,
    biased=True,
    rms=False,
    rotary=False,
    causal=True,
    tied=True,
    predicted=1.0,
    dropout=0.1,
    norm_after=False,
    packed=True,
    fused_attention=False,
    dtype="float16",
    stored="",
)
LLAMA = replace(
    GPT,
    kv_heads=2,
    gated=True,
    biased=False,
    rms=True,
    rotary=True,
    tied=False,
    dropout=0.0,
    packed=False,
    fused_attention=True,
    dtype="bfloat16",
)


@pytest.mark.parametrize("sizes", [GPT, LLAMA, replace(LLAMA, experts=4, top_k=2, ffn=32)])
def test_every_op_has_a_rule_and_a_cost(sizes: Sizes) -> None:
    written = write_model(sizes)
    written.graph.verify()
    part = predict._part(sizes)
    assert part.space.unruled_ops == ()
    assert not part.space.batch.hindrances
    assert part.space.batch.size == sizes.rows


def test_parameters_are_those_of_the_formula() -> None:
    # 12 h^2 + 13 h a block (Narayanan et al., SC 2021), two final norms, V h and s h at the ends
    written = write_model(replace(GPT, layers=3))
    h = GPT.hidden
    expected = 3 * (12 * h * h + 13 * h) + 2 * h + GPT.vocab * h + GPT.seq * h
    assert written.graph.num_parameters == expected


def test_a_deep_model_costs_what_its_whole_graph_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {
        "model": "gpt", "layers": "8", "hidden": "64", "heads": "4", "vocab": "512",
        "seq_len": "32", "gpus": "8", "tp": "2", "pp": "2", "dp": "2", "micro_batch_seqs": "2",
        "global_batch_seqs": "32", "recompute": "full", "attention_kernel": "unfused",
        "precision": "fp16", "ffn_hidden": "256",
    }  # fmt: skip
    short = predict.predict(run_of(**cells))
    predict._part.cache_clear()
    monkeypatch.setattr("autoplan.check.models.LEAST", 8)
    monkeypatch.setattr("autoplan.check.predict.LEAST", 8)
    whole = predict.predict(run_of(**cells))
    predict._part.cache_clear()
    assert repeated.LEAST == 3
    assert short.step_s == pytest.approx(whole.step_s, rel=1e-9)
    assert short.memory_bytes == pytest.approx(whole.memory_bytes, rel=1e-9)


@pytest.mark.parametrize(
    ("tp", "sequence", "recompute", "formula"),
    [
        (1, "no", "none", lambda sbh, a, t: sbh * (34 + a)),
        (8, "no", "none", lambda sbh, a, t: sbh * (10 + 24 / t + a / t)),
        (8, "yes", "none", lambda sbh, a, t: sbh / t * (34 + a)),
        (8, "yes", "selective", lambda sbh, a, t: 34 * sbh / t),
        (1, "no", "selective", lambda sbh, a, t: 34 * sbh),
        (8, "no", "full", lambda sbh, a, t: 2 * sbh),
        (8, "yes", "full", lambda sbh, a, t: 2 * sbh / t),
    ],
)
def test_saved_activations_are_korthikantis(
    tp: int, sequence: str, recompute: str, formula: object
) -> None:
    # Korthikanti et al., "Reducing Activation Recomputation", 2022, table 2; a = 5 heads s / h.
    # The formulas leave out a norm's statistics: 4 + 4 bytes a row of 2 h.
    s, b, h, heads = 2048, 4, 6144, 64
    run = run_of(
        source="Korthikanti et al. 2022", model="GPT-22B", layers="8", hidden=str(h),
        heads=str(heads), vocab="51200", seq_len=str(s), gpus=str(tp), tp=str(tp), pp="1", dp="1",
        micro_batch_seqs=str(b), global_batch_seqs=str(b), sequence_parallel=sequence,
        recompute=recompute, attention_kernel="unfused", precision="fp16",
    )  # fmt: skip
    block = predict.priced(run).prices[4]
    expected = formula(s * b * h, 5 * heads * s / h, tp)  # type: ignore[operator]
    assert math.isclose(block.activation_bytes, expected, rel_tol=2e-4)
