# SPDX-License-Identifier: Apache-2.0
"""Single public reports, one or two tests each, named by their row: R05, R16-R18, R32, R37-R39,
R45-R50, R53-R55, R64, R65, R67."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from cases.catalog import build
from cases.models import WeightAndBias, linears, mean_square
from cases.report_models import Counting, EncoderDecoder
from cases.running import TOLERANCE, digest, error, plain_cluster, plan_case, run, train, whole
from random_plans import random_plan
from torch import Tensor, nn

import autoplan
from autoplan.capture import capture
from autoplan.cluster import Link
from autoplan.placements import parse_layout
from autoplan.plan import Plan
from autoplan.sharding.batch import cut_batch, find_batch
from autoplan.sharding.rules import find_rule, kept_whole
from autoplan.sharding.strategies import axis_choices, block_options, enumerate_strategies

PP: dict[str, object] = {"pp": 2, "tp": 1, "dp": 1}
TP: dict[str, object] = {"pp": 1, "tp": 2, "dp": 1}
DP: dict[str, object] = {"pp": 1, "tp": 1, "dp": 2}
ATTENTION = {
    "q.weight": "RS(0)",
    "k.weight": "RS(0)",
    "v.weight": "RS(0)",
    "o.weight": "RS(1)",
    "up.weight": "RS(0)",
    "down.weight": "RS(1)",
}


def _equal(plan: Plan, name: str, steps: int = 2) -> None:
    world = plan.layout.dp * plan.layout.tp * plan.layout.pp
    outcomes = run(world, train, plan.to_json(), name, steps)
    assert max(o.worst for o in outcomes) < TOLERANCE


# ---- memory and sizes ----------------------------------------------------------------------------


def test_r05_several_tied_tensors_are_counted_once() -> None:
    """Two Linear(3, 3) with one weight and one bias: 12 parameters, 48 bytes in float32."""
    model = WeightAndBias()
    plan = autoplan.optimize(model, plain_cluster(1), {"x": torch.randn(4, 3)}, loss_fn=mean_square)
    assert plan.model.num_parameters == 12
    assert set(plan.shared) == {("a.weight", "b.weight"), ("a.bias", "b.bias")}
    assert plan.stages[0].estimate.memory.parameters == 48


@pytest.mark.distributed
def test_r05_several_tied_tensors_on_two_stages_equal_one_device() -> None:
    plan = plan_case("weight_and_bias", 2, **PP)
    assert plan.parameters["b.bias"].stages == (0, 1)
    _equal(plan, "weight_and_bias", 3)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "pins", [DP, {**TP, "placements": {"fc.weight": "RS(0)"}}], ids=["dp", "tp"]
)
def test_r16_flattened_tensor_equals_one_device(pins: dict[str, object]) -> None:
    _equal(plan_case("flattened", 2, **pins), "flattened")


def test_r16_six_rows_over_four_ranks_are_never_cut_unevenly() -> None:
    plan = plan_case("flattened", 4)
    assert 6 % plan.layout.dp == 0
    with pytest.raises(autoplan.InfeasibleError, match=r"batch of 6 .* dp=4 \(valid dp: 1, 2, 3\)"):
        plan_case("flattened", 4, dp=4)


def _feed_forward(hidden: int, num_devices: int, placements: dict[str, str]) -> Plan:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 64))
        x = torch.empty(12, 64)
    pins = autoplan.Pins(tp=num_devices, dp=1, pp=1, placements=placements)
    return autoplan.optimize(
        model, plain_cluster(num_devices), {"input": x}, loss_fn=mean_square, pins=pins
    )


@pytest.mark.parametrize(("hidden", "num_devices"), [(11008, 3), (30, 4)])
def test_r17_r18_width_that_does_not_divide(hidden: int, num_devices: int) -> None:
    """Unpinned it stays whole, and every rank's memory has the whole of it; pinned it is refused
    with the size, the degree and what divides."""
    plan = _feed_forward(hidden, num_devices, {})
    held = 0
    for parameter in plan.parameters.values():
        layout = parse_layout(parameter.used).value
        # raises where it does not divide
        held += 4 * math.prod(layout.local_shape(parameter.shape, (1, num_devices)))
    assert plan.stages[0].estimate.memory.parameters >= held
    if num_devices == 3:  # no dim of any weight divides
        assert held == 4 * (2 * 64 * hidden + hidden + 64)
    with pytest.raises(autoplan.InfeasibleError) as refusal:
        _feed_forward(hidden, num_devices, {"0.weight": "RS(0)"})
    message = str(refusal.value)
    assert f"dim 0 has {hidden} elements, which tp={num_devices} does not divide" in message
    assert "replicated" in message


@pytest.mark.distributed
def test_r18_width_that_does_not_divide_equals_one_device() -> None:
    """Linear(100, 30) over four ranks: whole on each of them."""
    _equal(plan_case("narrow", 4, pp=1, tp=4, dp=1), "narrow")


# ---- pipelines -----------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize(
    "pins", [PP, {**DP, "num_microbatches": 2}, {**TP, "placements": {"blocks.0.weight": "RS(0)"}}]
)
def test_r32_shared_complex_table_equals_one_device(pins: dict[str, object]) -> None:
    plan = plan_case("rotary", 2, **pins)
    assert plan.unruled_ops == ()
    _equal(plan, "rotary")


@pytest.mark.distributed
def test_r32_complex_tensor_crosses_stages() -> None:
    plan = plan_case("turned", 2, **PP, num_microbatches=2)
    assert "complex128" in {t.dtype for t in plan.stages[1].receives}
    _equal(plan, "turned")


def test_r37_another_length_is_refused_by_its_dim() -> None:
    """Lengths 6, 12, 6 under one plan: the second is refused, the third runs."""
    model, inputs, loss_fn = build("rotary")
    plan = plan_case("rotary", 1)
    parallel = autoplan.parallelize(model, plan, loss_fn=loss_fn)
    expected = mean_square(model(**inputs), inputs)
    for length in (6, 12, 6):
        if length == 12:
            with pytest.raises(autoplan.PlanError, match=r"dim 1 is 12, planned 6.*Plan again"):
                parallel.forward_backward(x=torch.randn(4, 12, 16, dtype=torch.float64))
        else:
            assert error(parallel.forward_backward(**inputs), expected) < TOLERANCE


def mixed(rank: int, text: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step with parameters in float32 and work in bfloat16."""
    torch.manual_seed(0)
    model, x = linears(4, 32).to_empty(device="cpu"), torch.randn(8, 32, dtype=torch.bfloat16)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    parallel = autoplan.parallelize(model, Plan.from_json(text), loss_fn=mean_square)
    loss = parallel.forward_backward(input=x)
    held = {n: p for n, p in parallel.named_parameters() if p.grad is not None}
    # type: ignore[arg-type]
    return float(loss.detach()), {n: whole(p.grad) for n, p in held.items()}


@pytest.mark.distributed
def test_r38_mixed_precision_crosses_stages_in_the_dtype_of_one_device() -> None:
    """Boundaries are bfloat16, gradients float32; loss and gradients are one device's, bit for
    bit."""
    found = []
    for num_devices in (1, 2):
        plan = autoplan.optimize(
            linears(4, 32),
            plain_cluster(num_devices),
            {"input": torch.empty(8, 32, dtype=torch.bfloat16, device="meta")},
            loss_fn=mean_square,
            precision="bf16-mixed",
            pins=autoplan.Pins(pp=num_devices, tp=1, dp=1, num_microbatches=2),
        )
        assert {t.dtype for s in plan.stages for t in s.receives} <= {"bfloat16"}
        assert {p.dtype for p in plan.parameters.values()} == {"float32"}
        found.append(
            run(2, mixed, plan.to_json()) if num_devices == 2 else [mixed(0, plan.to_json())]
        )
    (expected, gradients), stages = found[0][0], found[1]
    for loss, mine in stages:
        assert loss == expected
        assert all(
            g.dtype == torch.float32 and torch.equal(g, gradients[n]) for n, g in mine.items()
        )
    assert {n for _, mine in stages for n in mine} == set(gradients)


def test_r39_batch_norm_with_microbatches_is_refused_by_name() -> None:
    with pytest.raises(autoplan.InfeasibleError) as refusal:
        plan_case("conv", 2, **DP, num_microbatches=4)
    message = str(refusal.value)
    assert "batch_norm takes statistics over the batch" in message
    assert "blocks.0.norm1" in message
    assert "num_microbatches=1" in message


def statistics(rank: int, text: str, name: str, steps: int) -> dict[str, float]:
    """Relative error of every buffer after some steps."""
    model, inputs, loss_fn = build(name)
    parallel = autoplan.parallelize(model, Plan.from_json(text), loss_fn=loss_fn)
    for _ in range(steps):
        parallel.forward_backward(**inputs)
        model(**inputs)
    expected = dict(model.named_buffers())
    return {
        n: error(b.to(torch.float64), expected[n].to(torch.float64))
        for n, b in parallel.named_buffers()
    }


@pytest.mark.distributed
@pytest.mark.parametrize("pins", [DP, PP], ids=["dp", "pp"])
def test_r39_running_statistics_are_those_of_the_whole_batch(pins: dict[str, object]) -> None:
    """Split over replicas they are one device's: three updates in three steps, not one a
    microbatch."""
    plan = plan_case("conv", 2, **pins)
    found = run(2, statistics, plan.to_json(), "conv", 3)
    names = {n for errors in found for n in errors}
    assert len(names) == 8 * 3
    assert max(e for errors in found for e in errors.values()) < TOLERANCE


@pytest.mark.distributed
@pytest.mark.parametrize("pins", [PP, {**DP, "num_microbatches": 2}], ids=["pp", "dp-2"])
def test_r45_counter_buffer_counts_steps_on_every_owner(pins: dict[str, object]) -> None:
    """An in-place `steps += 1` is once a step, however many microbatches that step has."""
    assert Counting().steps == 0
    plan = plan_case("counting", 2, **({**pins, "pp": 1, "dp": 2} if "pp" in pins else pins))
    found = run(2, statistics, plan.to_json(), "counting", 3)
    assert found == [{"steps": 0.0}] * 2


# ---- coverage of ops and tensors -----------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize(
    "pins",
    [
        PP,
        DP,
        {**TP, "placements": {"blocks.*.conv1.weight": "RS(0)", "blocks.*.conv2.weight": "RS(1)"}},
    ],
    ids=["pp", "dp", "tp"],
)
def test_r46_residual_convolutions_equal_one_device(pins: dict[str, object]) -> None:
    _equal(plan_case("conv", 2, **pins), "conv")


@pytest.mark.distributed
def test_r47_r54_parallel_residual_with_head_norms_equals_one_device() -> None:
    """Both row-split products are found; norms shared by all heads have whole gradients; three
    AdamW steps."""
    plan = plan_case("parallel_residual", 2, **TP, placements=ATTENTION)
    norms = [plan.parameters[n] for n in ("q_norm.weight", "k_norm.weight")]
    assert {p.spec for p in norms} == {"RR"}
    outcomes = run(2, train, plan.to_json(), "parallel_residual", 3)
    assert max(o.worst for o in outcomes) < TOLERANCE
    assert outcomes[0].values == outcomes[1].values


@pytest.mark.distributed
@pytest.mark.parametrize("pins", [TP, DP, PP], ids=["tp", "dp", "pp"])
def test_r48_op_without_a_rule_is_kept_whole_and_listed(pins: dict[str, object]) -> None:
    plan = plan_case("custom", 2, **pins)
    assert len(plan.unruled_ops) == 1
    name = plan.unruled_ops[0]
    assert "halved" in name
    record = plan.strategies[plan.op_strategies[name]]
    assert set(record.inputs + record.outputs) == {"RR"}
    _equal(plan, "custom")


@pytest.mark.parametrize("name", ["tied", "parallel_residual", "conv", "grouped_query", "rotary"])
@pytest.mark.parametrize("pins", [TP, DP], ids=["tp", "dp"])
def test_r49_every_op_runs_as_its_rule_allows(name: str, pins: dict[str, object]) -> None:
    """What a plan asks of an op is found among the strategies of its rule, before anything runs."""
    model, inputs, loss_fn = build(name)
    graph = capture(model, inputs, loss_fn=loss_fn).graph
    plan = plan_case(name, 2, **pins)
    rules = {op.name: find_rule(op, graph) or kept_whole(op, graph) for op in graph.ops}
    cut = cut_batch(graph, find_batch(graph, rules), plan.schedule.num_microbatches)
    rules = {op.name: find_rule(op, cut) or kept_whole(op, cut) for op in cut.ops}
    blocks = block_options(cut, rules)
    sizes = (plan.layout.dp, plan.layout.tp)
    for op in cut.ops:
        record = plan.strategies[plan.op_strategies[op.name]]
        choices = axis_choices(rules[op.name], blocks[op.name], sums=True, grads=True)
        legal = enumerate_strategies(op, rules[op.name], cut, sizes, (choices, choices))
        written = {(tuple(map(str, s.inputs)), tuple(map(str, s.outputs))) for s in legal}
        assert (record.inputs, record.outputs) in written, op.name


@pytest.mark.parametrize("pins", [PP, DP], ids=["pp", "dp"])
@pytest.mark.parametrize("name", ["loose", "tied", "library", "conv"])
def test_r50_every_tensor_is_in_the_plan_once(name: str, pins: dict[str, object]) -> None:
    """Parameters on the root, scalars and unused ones too; buffers of both kinds."""
    model = build(name)[0]
    plan = plan_case(name, 2, **pins)
    stages = range(plan.layout.pp)
    assert set(plan.parameters) == {n for n, _ in model.named_parameters(remove_duplicate=False)}
    assert set(plan.buffers) == {n for n, _ in model.named_buffers(remove_duplicate=False)}
    for entry in (*plan.parameters.values(), *plan.buffers.values()):
        assert entry.stages
        assert set(entry.stages) <= set(stages)
    several = {n for group in plan.shared for n in group}
    for parameter, entry in plan.parameters.items():
        assert len(entry.stages) == 1 or parameter in several or plan.layout.pp > 1


@pytest.mark.distributed
@pytest.mark.parametrize("pins", [PP, DP], ids=["pp", "dp"])
def test_r50_loose_tensors_train_and_are_saved(pins: dict[str, object]) -> None:
    plan = plan_case("loose", 2, **pins)
    _equal(plan, "loose")
    saved = run(2, full_state, plan.to_json(), "loose")[0]
    assert set(saved) == set(build("loose")[0].state_dict())


def full_state(rank: int, text: str, name: str) -> dict[str, str]:
    """Digests of the gathered state before any step."""
    model, _, loss_fn = build(name)
    parallel = autoplan.parallelize(model, Plan.from_json(text), loss_fn=loss_fn)
    return {n: digest(v) for n, v in parallel.full_state_dict().items()}


# ---- numerics under tensor parallelism -----------------------------------------------------------


@pytest.mark.distributed
def test_r53_norm_in_a_region_split_along_the_sequence_has_whole_gradients() -> None:
    """Each rank sees three of six positions; weight and bias gradients are sums over both."""
    model, inputs, loss_fn = build("parallel_residual")
    captured = capture(model, inputs, loss_fn=loss_fn)

    norms = [op.name for op in captured.graph.ops if op.target == "aten.layer_norm.default"]

    def split_norms(seed: int) -> Plan | None:
        plan = random_plan(captured, seed, dp=1, tp=2, pp=1, num_microbatches=1)
        specs = [plan.strategies[plan.op_strategies[n]].outputs[0] for n in norms]
        return plan if all(spec.startswith("RS(1)") for spec in specs) else None

    plan = next(plan for plan in map(split_norms, range(400)) if plan is not None)
    assert len(norms) == 2
    outcomes = run(2, train, plan.to_json(), "parallel_residual", 2)
    assert max(o.worst for o in outcomes) < TOLERANCE
    assert outcomes[0].values == outcomes[1].values


def greedy(rank: int, text: str) -> list[list[int]]:
    """Six greedy tokens for two sources, under the plan (or on one device when there is none)."""
    torch.manual_seed(0)
    model = EncoderDecoder().double()
    source, target = torch.randint(0, 20, (2, 5)), torch.zeros(2, 7, dtype=torch.int64)
    run_model: nn.Module = autoplan.parallelize(model, Plan.from_json(text)) if text else model
    with torch.no_grad():
        for position in range(6):
            logits = run_model(source=source, target=target)
            target[:, position + 1] = logits[:, position].argmax(-1)
    found: list[list[int]] = target.tolist()
    return found


@pytest.mark.distributed
def test_r55_greedy_output_of_an_encoder_decoder_does_not_depend_on_the_degree() -> None:
    split = {"encode.0.weight": "RS(0)", "encode.2.weight": "RS(1)", "head.weight": "RS(0)"}
    plan = autoplan.optimize(
        EncoderDecoder().double(),
        plain_cluster(2),
        {
            "source": torch.zeros(2, 5, dtype=torch.int64),
            "target": torch.zeros(2, 7, dtype=torch.int64),
        },
        mode="infer",
        pins=autoplan.Pins(tp=2, dp=1, pp=1, placements=split),
    )
    assert plan.parameters["head.weight"].spec == "RS(0)"
    expected = greedy(0, "")
    assert len({tuple(row) for row in expected}) > 1
    assert run(2, greedy, plan.to_json()) == [expected, expected]


# ---- the search ----------------------------------------------------------------------------------


@lru_cache
def _deep(depth: int) -> Plan:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(depth))
    ).to("meta")
    return autoplan.optimize(
        model,
        plain_cluster(2),
        {"input": torch.empty(8, 64, device="meta")},
        loss_fn=mean_square,
        pins=autoplan.Pins(tp=2, dp=1, pp=1, num_microbatches=1),
    )


def test_r64_depth_changes_no_choice() -> None:
    """12 and 96 equal blocks: every block has the choices of its twin, and the program has no more
    of them."""

    def of_block(plan: Plan, block: int) -> list[str]:
        return [plan.parameters[f"{block}.{n}"].used for n in ("0.weight", "0.bias", "2.weight")]

    shallow, deep = _deep(12), _deep(96)
    inner = of_block(shallow, 5)
    assert all(of_block(deep, block) == inner for block in range(1, 95))
    # the first and the last block may differ, where the batch comes in and the loss is taken
    assert len(deep.strategies) <= len(shallow.strategies) + 2


def test_r65_search_out_of_time_gives_a_valid_plan_and_says_so() -> None:
    model, inputs, loss_fn = build("parallel_residual")
    plan = autoplan.optimize(model, plain_cluster(4), inputs, loss_fn=loss_fn, time_limit_s=0.0)
    plan.verify()
    assert not plan.search.optimal
    assert any("time limit" in a.reason for a in plan.alternatives)


def test_r67_tensor_parallel_groups_are_the_fast_pairs() -> None:
    """Four devices, fast links between 0 and 2, 1 and 3."""
    cluster = replace(
        plain_cluster(4, bytes_per_s=1e9),
        fast_pairs=((0, 2), (1, 3)),
        pair_link=Link(latency_s=1e-6, bytes_per_s=1e12),
    )
    model, inputs, loss_fn = build("parallel_residual")
    plan = autoplan.optimize(
        model, cluster, inputs, loss_fn=loss_fn, pins=autoplan.Pins(tp=2, pp=2, dp=1)
    )
    assert [set(s.ranks) for s in plan.stages] == [{0, 2}, {1, 3}]


def test_pins_of_one_of_several_equal_blocks_hold_for_it_alone() -> None:
    """Equal blocks are solved once; a pin on one of them makes it another one."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(4))
    ).to("meta")
    plan = autoplan.optimize(
        model,
        plain_cluster(2),
        {"input": torch.empty(8, 64, device="meta")},
        loss_fn=mean_square,
        pins=autoplan.Pins(tp=2, dp=1, pp=1, placements={"2.*.weight": "RR"}),
    )
    used = {n: plan.parameters[f"{n}.0.weight"].used.partition("~")[0] for n in range(4)}
    assert used[2] == "RR"
    assert all(used[n].startswith("RS(") for n in (0, 1, 3))
