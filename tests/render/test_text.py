# SPDX-License-Identifier: Apache-2.0
"""The page of a plan: two golden pages, folding, and what each answer must contain."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from sample_plans import LLAMA_BLOCK, llama_plan, mlp_plan

from autoplan.errors import PlanError
from autoplan.plan import Plan
from autoplan.plan_estimates import Alternative
from autoplan.render import explain_text, render_text

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize(
    ("name", "make"), [("llama_2_stages", llama_plan), ("mlp_infer", mlp_plan)]
)
def test_page_is_the_golden_one(
    name: str, make: Callable[[], Plan], pytestconfig: pytest.Config
) -> None:
    page, golden = make().summary(), GOLDEN / f"{name}.txt"
    if pytestconfig.getoption("--update-golden"):
        golden.write_text(page)
    assert page == golden.read_text()


@pytest.mark.parametrize("make", [llama_plan, mlp_plan])
def test_pages_are_plain_and_80_columns(make: Callable[[], Plan]) -> None:
    plan = make()
    pages = [plan.summary(), render_text(plan, stage=0), plan.explain("stage 0")]
    pages += [plan.explain(name) for name in plan.parameters]
    for page in pages:
        assert page.isascii()
        assert page.endswith("\n")
        assert max(map(len, page.splitlines())) <= 80
        assert not re.search(r"[ \t]+$", page, re.MULTILINE)


def test_page_does_not_change_with_saving() -> None:
    plan = llama_plan()
    assert Plan.from_json(plan.to_json()).summary() == plan.summary()


def test_equal_blocks_fold_and_every_parameter_is_named() -> None:
    page = llama_plan(num_layers=80).summary()
    assert "  model.layers.{0-79} (stages 0-1)\n" in page
    section = page[page.index("parameters  ") : page.index("conversions")]
    for name in (*LLAMA_BLOCK, "lm_head.weight", "model.embed_tokens.weight"):
        assert section.count(f"    {name}") == 1
    assert "80 x 250 us" in page
    assert len(page.splitlines()) == len(llama_plan(num_layers=8).summary().splitlines())


def test_a_block_that_differs_stands_apart() -> None:
    plan = llama_plan(num_layers=8)
    odd = msgspec.structs.replace(plan.parameters["model.layers.5.mlp.up_proj.weight"], zero=1)
    parameters = {**plan.parameters, "model.layers.5.mlp.up_proj.weight": odd}
    page = render_text(msgspec.structs.replace(plan, parameters=parameters))
    assert "model.layers.{0-4,6-7} (stages 0-1)" in page
    assert re.search(r"model\.layers\.5\.mlp\.up_proj\.weight\n .* zero 1\n", page)


def test_nested_numbers_and_strides_fold() -> None:
    plan = mlp_plan()
    parameter = plan.parameters["head.bias"]
    names = [f"layers.{i}.experts.{j}.w" for i in range(0, 12, 4) for j in range(4)]
    plan = msgspec.structs.replace(plan, parameters=dict.fromkeys(names, parameter))
    page = render_text(plan)
    assert "layers.{0-8 step 4} (stage 0)\n    experts.{0-3}.w" in page


def test_all_folds_nothing() -> None:
    plan = llama_plan(num_layers=4)
    page = render_text(plan, all=True)
    for name in (*plan.parameters, *plan.op_strategies, *plan.buffers):
        assert name in page
    assert "linear_7  S(0)S(2), RS(1)~PS(1) -> S(0)P~S(0)R" in page


def test_long_names_keep_every_letter() -> None:
    plan = mlp_plan()
    name = "a_very_long_module_name." * 5 + "weight"
    parameters = {name: plan.parameters["head.bias"]}
    page = render_text(msgspec.structs.replace(plan, parameters=parameters))
    assert f"    {name}\n" in page


def test_numbers_are_the_plans_own() -> None:
    page = llama_plan().summary()
    assert "step 256 ms (compute 199, communication 27.5, bubble 18.9, optimizer 11.1 ms)" in page
    assert "peak 61.00 GiB of 80.00 GiB on stage 0   MFU 47.1%" in page
    # 16 * (4.2 + 10.1) + 11.1 = 239.9 of 256.1 ms
    assert re.search(r"^0      0-7      dp=2 tp=4  93\.7%  61\.00 GiB", page, re.MULTILINE)
    terms = dict(re.findall(r"^  ([a-z ]+?) +([\d.]+) GiB$", page, re.MULTILINE))
    parts = ("parameters", "gradients", "optimizer state", "activations", "transient")
    assert sum(float(terms[t]) for t in parts) == float(terms["total"]) == 61.0
    assert sum(float(terms[t]) for t in ("total", "reserve", "free")) == float(terms["device"])
    assert "81% measured, 13% alpha-beta, 6% roofline\n" in page


def test_alternatives_and_notes_are_on_the_page() -> None:
    page = llama_plan().summary()
    for alternative in llama_plan().alternatives:
        assert alternative.reason in " ".join(page.split())
    assert "one tensor: lm_head.weight, model.embed_tokens.weight" in page
    small = " ".join(mlp_plan().summary().split())
    assert "2 devices idle: on 4 devices the step takes 310 us" in small
    assert "no sharding rule: cumsum" in small


def test_only_the_dearest_conversions_unless_all() -> None:
    plan = mlp_plan()
    conversions = tuple(
        msgspec.structs.replace(plan.conversions[0], module_path=f"part{i}", time_s=1e-3 * i)
        for i in range(1, 15)
    )
    plan = msgspec.structs.replace(plan, conversions=conversions)
    page = render_text(plan)
    shown = re.findall(r"^  (part\d+) ", page, re.MULTILINE)
    assert shown == [f"part{i}" for i in range(14, 4, -1)]
    assert "and 4 more, 10 ms: show --all" in page
    assert len(re.findall(r"^  part", render_text(plan, all=True), re.MULTILINE)) == 14


def test_stage_page_holds_only_that_stage() -> None:
    page = render_text(llama_plan(), stage=1)
    assert "model.layers.{16-31} (stage 1)" in page
    assert "model.layers.{0-15}" not in page
    assert "add_31 bf16 4x4096x4096 S(0)R from stage 0" in page
    with pytest.raises(PlanError, match="no stage 2: this plan has stages 0 to 1"):
        render_text(llama_plan(), stage=2)
    with pytest.raises(PlanError, match="no stage 7"):
        explain_text(llama_plan(), "stage 7")


def test_explain_a_parameter() -> None:
    text = explain_text(llama_plan(), "model.layers.3.mlp.up_proj.weight")
    assert "28.00 MiB a device, 1/8 of 224.00 MiB" in text  # 14336 * 4096 * 4 bytes over 2 * 4
    assert "ZeRO    level 3" in text
    assert "pinned  model.layers.*.mlp.up_proj.weight = S(0)S(0)" in text
    assert "all-gather dp; backward reduce-scatter dp" in text  # its class's, listed at layer 0
    assert "runner-up of the whole plan: dp=4 tp=2 pp=2" in text
    text = " ".join(text.split())
    assert "+18.3 ms a step, +5.00 GiB" in text
    tied = explain_text(llama_plan(), "lm_head.weight")
    assert "one tensor  with model.embed_tokens.weight" in tied
    assert "pinned" not in tied


def test_explain_a_module_an_op_and_a_folded_name() -> None:
    plan = llama_plan()
    text = explain_text(plan, "model.layers.3.mlp")
    assert "down_proj.weight" in text
    assert "q_proj" not in text
    assert "1 x 250 us" in text
    assert explain_text(plan, "linear_3").startswith("linear_3: S(0)S(2), RS(1)~PS(1) -> S(0)P")
    assert explain_text(plan, "model.layers.{0-31}.mlp") == explain_text(plan, "model.layers.0.mlp")
    # "model.layers.1" is not a prefix of "model.layers.10"
    assert "model.layers.{" not in explain_text(plan, "model.layers.1")


def test_explain_says_when_no_alternative_was_priced() -> None:
    plan = llama_plan()
    refused: tuple[Alternative, ...] = plan.alternatives[1:]
    plan = msgspec.structs.replace(plan, alternatives=refused)
    assert "runner-up of the whole plan: none was priced" in explain_text(plan, "lm_head.weight")


def test_explain_offers_near_names() -> None:
    with pytest.raises(PlanError, match=r"Did you mean .*lm_head\.weight"):
        explain_text(llama_plan(), "lm_haed.weight")
    with pytest.raises(PlanError, match="autoplan show"):
        explain_text(llama_plan(), "zzz")


def test_rendering_imports_neither_torch_nor_rich() -> None:
    code = "import sys, autoplan.render; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    root = str(Path(__file__).parent.parent.parent)
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
