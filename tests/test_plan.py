# SPDX-License-Identifier: Apache-2.0
"""The plan document: identity through JSON, strict reading, and relations, each broken once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sample_plans import llama_plan, mlp_plan

from autoplan.errors import PlanError
from autoplan.plan import Fingerprint, Plan

TESTS = Path(__file__).parent


def edited(edit: Callable[[dict[str, Any]], object]) -> str:
    """A good plan's JSON after one edit."""
    raw = json.loads(llama_plan().to_json())
    edit(raw)
    return json.dumps(raw)


def refusal(text: str) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text, source="p.json")
    return str(caught.value)


@pytest.mark.parametrize("make", [llama_plan, mlp_plan])
def test_saved_and_loaded_is_the_same_plan(make: Callable[[], Plan], tmp_path: Path) -> None:
    plan = make()
    saved = plan.save(tmp_path / "plan.json")
    assert Plan.load(saved) == plan
    assert Plan.load(saved).to_json() == plan.to_json() == saved.read_text()
    assert Plan.from_json(plan.to_json()) == plan
    assert os.listdir(tmp_path) == ["plan.json"]  # no partial file stays


def test_json_is_plain_sorted_and_holds_what_the_plan_holds() -> None:
    plan = llama_plan()
    raw = json.loads(plan.to_json())
    assert raw == msgspec.json.decode(msgspec.json.encode(plan))  # an independent writer
    orders: list[list[str]] = []
    json.loads(plan.to_json(), object_pairs_hook=lambda pairs: orders.append([k for k, _ in pairs]))
    assert len(orders) > 300
    assert all(keys == sorted(keys) for keys in orders)
    assert raw["stages"][0]["mesh"] == {"dp": 2, "tp": 4}
    assert raw["parameters"]["lm_head.weight"]["shape"] == [128256, 4096]
    assert "time" not in {key.split("_")[0] for key in raw}


def test_short_parts_share_a_line() -> None:
    plan = llama_plan(num_layers=200)
    lines = plan.to_json().splitlines()
    assert sum(line.startswith('  "linear_') for line in lines) == 400
    assert '  "linear_7": 1,' in lines


def test_bytes_do_not_depend_on_the_hash_seed() -> None:
    code = "from sample_plans import llama_plan; print(llama_plan().to_json())"
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert texts == {llama_plan().to_json() + "\n"}


def test_tuples_in_pins_and_descriptions_survive() -> None:
    plan = mlp_plan()
    settings = msgspec.structs.replace(plan.settings, pins={"stage_layers": (3, 4)})
    pinned = msgspec.structs.replace(plan, settings=settings)
    assert Plan.from_json(pinned.to_json()) == pinned


def test_loading_imports_and_executes_nothing(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('executed')")
    plan = mlp_plan()
    model = msgspec.structs.replace(plan.model, name="trap:build")
    plan = msgspec.structs.replace(plan, model=model, unruled_ops=("trap.build", "os.system"))
    path = plan.save(tmp_path / "plan.json")
    code = (
        "import sys, autoplan.plan\n"
        "sys.path.insert(0, '.')\n"
        "before = set(sys.modules)\n"
        "plan = autoplan.plan.Plan.load('plan.json'); print(plan.summary()); plan.explain('head')\n"
        "new = {m for m in sys.modules if m not in before and not m.startswith('autoplan.')}\n"
        "assert 'trap' not in sys.modules and 'torch' not in sys.modules, new\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=path.parent,
        env={"PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "trap:build" in done.stdout


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda r: r.update(tensor_paralel=1), ["unknown key $.tensor_paralel"]),
        (lambda r: r["layout"].update(ttp=2), ["$.layout.ttp", 'did you mean "tp"?']),
        (lambda r: r["stages"][0]["runner_up"].update(reasn=""), ["$.stages[0].runner_up.reasn"]),
        (lambda r: r["stages"][1].update(layerz=[]), ["$.stages[1].layerz", '"layers"']),
        (
            lambda r: r["parameters"]["lm_head.weight"].update(specs="R"),
            ['$.parameters["lm_head.weight"].specs', 'did you mean "spec"?'],
        ),
        (
            lambda r: r["stages"][0]["estimate"]["memory"].update(gradient=1),
            ["$.stages[0].estimate.memory.gradient", '"gradients"'],
        ),
    ],
)
def test_unknown_keys_are_refused_with_path_and_near_match(
    edit: Callable[[dict[str, Any]], object], words: list[str]
) -> None:
    message = refusal(edited(edit))
    assert message.startswith("p.json: ")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda r: r["layout"].update(tp="4"), ['$.layout.tp is "4"', "an integer"]),
        (lambda r: r["layout"].update(tp=True), ["$.layout.tp is true", "an integer"]),
        (lambda r: r["layout"].update(tp=1.5), ["$.layout.tp is 1.5", "an integer"]),
        (lambda r: r.update(stages={}), ["$.stages is an object", "an array"]),
        (lambda r: r.update(parameters=[]), ["$.parameters is an array", "an object"]),
        (lambda r: r.update(model=None), ["$.model is null", "an object"]),
        (
            lambda r: r["op_strategies"].update(linear_3=None),
            ["$.op_strategies.linear_3 is null", "an integer"],
        ),
        (
            lambda r: r["alternatives"][1].update(step_time_s="slow"),
            ['$.alternatives[1].step_time_s is "slow"', "a number or null"],
        ),
        (lambda r: r["estimate"].pop("mfu"), ["$.estimate.mfu is missing"]),
    ],
)
def test_wrong_types_are_refused_with_path(
    edit: Callable[[dict[str, Any]], object], words: list[str]
) -> None:
    message = refusal(edited(edit))
    for word in words:
        assert word in message


def test_schema_versions_each_have_their_message() -> None:
    messages = {
        refusal(edited(lambda r: r.pop("schema_version"))): "$.schema_version is missing",
        refusal(edited(lambda r: r.update(schema_version=3))): "schema_version 3 is newer",
        refusal(edited(lambda r: r.update(schema_version=1))): "schema_version 1 is older",
        refusal(edited(lambda r: r.update(schema_version="1"))): 'is "1", expected an integer',
    }
    assert len(messages) == 4
    for message, part in messages.items():
        assert part in message
        assert "this autoplan reads schema_version 2" in message
    # a newer file may hold anything: its version is the thing to report, not its new keys
    newer = edited(lambda r: r.update(schema_version=3, novelty=1))
    assert "Upgrade autoplan" in refusal(newer)


def test_text_that_is_not_json_gives_line_and_column() -> None:
    text = llama_plan().to_json()
    cut = text[: text.index('"buffers"') + 4]
    line = cut.count("\n") + 1
    message = refusal(cut)
    assert f"line {line} column " in message
    assert "truncated" in message
    assert "truncated" in refusal(text[: text.index("70866960384") + 4])
    assert "line 1 column 1" in refusal("")
    assert "line 2 column 1" in refusal("{\n]")
    assert "$ is an array" in refusal("[]")
    assert "NaN" in refusal('{"schema_version": NaN}')
    assert '"a" occurs twice' in refusal('{"a": 1, "a": 2}')
    assert "nested too deeply" in refusal("[" * 100_000)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no plan file at .*absent\.json"):
        Plan.load(tmp_path / "absent.json")
    with pytest.raises(PlanError, match="cannot read"):
        Plan.load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not UTF-8"):
        Plan.load(tmp_path / "binary")
    with pytest.raises(PlanError, match="cannot write"):
        mlp_plan().save(tmp_path / "no" / "plan.json")
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(PlanError, match="cannot write"):
        mlp_plan().save(target)
    assert sorted(os.listdir(tmp_path)) == ["binary", "target"]


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda r: r["op_strategies"].update(linear_0=9), "$.op_strategies.linear_0 is 9"),
        (lambda r: r["stages"][1].update(index=2), "$.stages[1].index is 2"),
        (lambda r: r["stages"].reverse(), "$.stages[0].index is 1"),
        (lambda r: r["stages"].pop(), "$.stages has 1 stages, expected pp = 2"),
        (lambda r: r["stages"][1]["ranks"].__setitem__(0, 7), "rank 7 is also in stage 0"),
        (lambda r: r["stages"][1]["ranks"].__setitem__(0, 16), "rank 16 does not exist"),
        (lambda r: r["stages"][0]["ranks"].pop(), "has 7, expected dp * tp = 8"),
        (lambda r: r["stages"][0]["mesh"].update(tp=2), "$.stages[0].mesh"),
        (
            lambda r: r["stages"][1]["layers"].append("model.layers.0"),
            '$.stages[1].layers: "model.layers.0" is also in stage 0',
        ),
        (lambda r: r["stages"][1].update(recompute=["x"]), '"x" is not among its layers'),
        (lambda r: r["stages"][1]["receives"][0].update(from_stage=1), "from_stage is 1"),
        (lambda r: r["shared"][0].append("lm_head.wait"), 'did you mean "lm_head.weight"?'),
        (lambda r: r["shared"].append(["lm_head.weight"]), "$.shared[1]"),
        (lambda r: r["shared"].append(["model.norm.weight"]), "two or more names"),
        (
            lambda r: r["parameters"]["model.norm.weight"].update(spec="S0"),
            "$.parameters[\"model.norm.weight\"].spec: 'S0' is not a sharding spec",
        ),
        (
            lambda r: r["parameters"]["model.norm.weight"].update(used="R~Q"),
            "$.parameters[\"model.norm.weight\"].used: 'Q'",
        ),
        (lambda r: r["parameters"]["model.norm.weight"].update(zero=4), "zero is 4"),
        (lambda r: r["parameters"]["model.norm.weight"].update(stages=[2]), "stages has 2"),
        (lambda r: r["strategies"][1].update(outputs=["?"]), "$.strategies[1].outputs[0]"),
        (lambda r: r["conversions"][0].update(target="S"), "$.conversions[0].target"),
        (lambda r: r["estimate"].update(peak_stage=1), "on stage 1, expected 65498251264"),
        (lambda r: r["estimate"].update(peak_stage=2), "$.estimate.peak_stage is 2"),
        (lambda r: r["search"].update(idle_devices=1), "expected 0 of 16"),
        (lambda r: r["settings"].update(mode="eval"), '"eval", expected one of train, infer'),
        (lambda r: r["schedule"].update(name="zb"), '"zb", expected one of gpipe'),
        (lambda r: r["schedule"].update(num_microbatches=0), "below 1"),
        (lambda r: r["signature"]["tensors"][0].update(batch_dim=2), "tensors[0].batch_dim is 2"),
    ],
)
def test_relations(edit: Callable[[dict[str, Any]], object], part: str) -> None:
    assert part in refusal(edited(edit))


def test_fields_that_json_cannot_hold_are_refused() -> None:
    plan = mlp_plan()
    for wrong in (float("nan"), float("inf")):
        estimate = msgspec.structs.replace(plan.estimate, mfu=wrong)
        broken = msgspec.structs.replace(plan, estimate=estimate)
        with pytest.raises(PlanError):
            broken.verify()
        with pytest.raises(PlanError, match="cannot be written"):
            broken.to_json()
    with pytest.raises(PlanError, match=r"changes|not plain"):
        msgspec.structs.replace(plan, unruled_ops=["cumsum"]).verify()
    with pytest.raises(PlanError, match="not plain data"):
        msgspec.structs.replace(plan, tool_version=1).verify()


def test_memory_total_leaves_the_reserve_out() -> None:
    memory = mlp_plan().stages[0].estimate.memory
    assert memory.total == 8232 + 4096 + 1024
    assert llama_plan().estimate.peak_memory_bytes == 61 * 2**30


def test_fingerprints_differ_in_words() -> None:
    plan = llama_plan()
    assert plan.diff_fingerprint(plan.fingerprint) == ()
    other = Fingerprint(graph="9a01", inputs="ff", cluster="9a03", profiles="9a04", settings="ee")
    inputs, settings = plan.diff_fingerprint(other)
    assert inputs.startswith("the example inputs")
    assert "9a02 in the plan, ff now" in inputs
    assert settings.startswith("the settings")


def test_plans_are_immutable() -> None:
    plan = mlp_plan()
    with pytest.raises(AttributeError):
        plan.layout = plan.layout  # type: ignore[misc]  # the point of the test


@pytest.mark.parametrize(
    ("share", "warns"), [(1.0, False), (0.81, False), (0.7, True), (1.3, True)]
)
def test_r62_measured_step_beside_the_predicted_one(share: float, warns: bool) -> None:
    plan = llama_plan()
    line = plan.compare_measured(plan.estimate.step_time_s / share)
    assert f"{share:.2f} of the measured time" in line
    assert ("WARNING: more than 25% off" in line) == warns
