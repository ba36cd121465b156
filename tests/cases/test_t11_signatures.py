# SPDX-License-Identifier: Apache-2.0
"""T11: dataclass results, keyword switches, buffers of both kinds, in-place ops, train and eval,
models on meta."""

from __future__ import annotations

import copy
import re
from functools import lru_cache

import pytest
import torch
from cases.catalog import Inputs, build, tensors_of
from cases.models import Branching, Library, Out
from cases.running import TOLERANCE, error, plain_cluster, plan_case, run, train, whole
from torch import Tensor

import autoplan
from autoplan.plan import Plan

SPLIT = {"b1.weight": "RS(0)", "b2.weight": "RS(1)", "emb.weight": "RS(0)"}
LAYOUTS: dict[str, dict[str, object]] = {
    "pp": {"pp": 2, "tp": 1, "dp": 1, "num_microbatches": 2, "stage_layers": (2, 2)},
    "tp": {"pp": 1, "tp": 2, "dp": 1, "placements": SPLIT},
}


def _plan(layout: str, inputs: dict[str, object], mode: str = "train") -> Plan:
    model, _, _ = build("library")
    pins = autoplan.Pins(**LAYOUTS[layout])  # type: ignore[arg-type]  # checked by Pins itself
    return autoplan.optimize(model, plain_cluster(2), inputs, mode=mode, pins=pins)


@lru_cache
def planned(layout: str) -> Plan:
    """Ids and labels, everything else by default."""
    return _plan(layout, dict(build("library")[1]))


def _tokens(rows: int = 2) -> Inputs:
    torch.manual_seed(5)
    return {
        "input_ids": torch.randint(0, 50, (rows, 6)),
        "labels": torch.randint(0, 50, (rows, 6)),
    }


def results(rank: int, text: str, inputs: dict[str, object]) -> tuple[object, object, float]:
    """(result under the plan, result of the model, largest gradient error) for these inputs."""
    model, _, _ = build("library")
    parallel = autoplan.parallelize(model, Plan.from_json(text))
    ours, theirs = parallel(**inputs), model(**inputs)
    loss = theirs.loss if isinstance(theirs, Out) else theirs[0]
    gradient = 0.0
    if parallel.plan.settings.mode == "train":
        parallel.forward_backward(**inputs)
        loss.backward()
        named = dict(model.named_parameters())
        held = {n: p for n, p in parallel.named_parameters() if n in named}
        # type: ignore[arg-type]
        gradient = max(error(whole(p.grad), named[n].grad) for n, p in held.items())
    with torch.no_grad():
        return _detached(ours), _detached(theirs), gradient


def _detached(result: object) -> object:
    """The same structure with tensors that pickle."""
    if isinstance(result, Out):
        return Out(*(t.detach() if isinstance(t, Tensor) else t for t in vars(result).values()))
    assert isinstance(result, tuple), "a tuple or an Out"
    return tuple(t.detach() if isinstance(t, Tensor) else t for t in result)


def refusal_of(rank: int, text: str, inputs: dict[str, object]) -> str:
    """The message of the PlanError that this call raises."""
    model, _, _ = build("library")
    parallel = autoplan.parallelize(model, Plan.from_json(text))
    found = []
    for call in (parallel.forward_backward, parallel):
        with pytest.raises(autoplan.PlanError) as refusal:
            call(**inputs)
        found.append(str(refusal.value))
    assert found[0] == found[1]
    return found[0]


def state_and_buffers(rank: int, text: str) -> tuple[list[str], list[str], bool, float]:
    """(keys here, keys gathered, rope right where it is, output error) with a model planned on
    meta, weights loaded after."""
    real, inputs, _ = build("library")
    with torch.device("meta"):
        empty = Library().to(torch.float64)
    parallel = autoplan.parallelize(
        empty, Plan.from_json(text), buffers={"rope": real.get_buffer("rope")}
    )
    parallel.load_full_state_dict(real.state_dict())
    here = dict(parallel.named_buffers())
    right = "rope" not in here or torch.equal(here["rope"], real.get_buffer("rope"))
    ours, theirs = tensors_of(parallel(**inputs)), tensors_of(real(**inputs))
    return (
        sorted(parallel.state_dict()),
        sorted(parallel.full_state_dict()),
        right,
        max(map(error, ours, theirs)),
    )


def missing_buffer(rank: int, text: str) -> str:
    """What is said of a meta model whose unsaved buffer nobody gives."""
    with torch.device("meta"):
        empty = Library().to(torch.float64)
    try:
        autoplan.parallelize(empty, Plan.from_json(text))
    except autoplan.PlanError as refusal:
        return str(refusal)
    return ""


def original_untouched(rank: int, text: str) -> bool:
    """Parallel training steps leave the model object as it was."""
    model, inputs, _ = build("library")
    before = copy.deepcopy(model.state_dict())
    identities = [id(p) for p in model.parameters()]
    attributes = {n: sorted(vars(m)) for n, m in model.named_modules()}
    parallel = autoplan.parallelize(model, Plan.from_json(text))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
    for mode in (False, True):
        parallel.train(mode)
        parallel.forward_backward(**inputs)
        optimizer.step()
    after = model.state_dict()
    return (
        all(torch.equal(before[k], after[k]) for k in before)
        and identities == [id(p) for p in model.parameters()]
        and attributes == {n: sorted(vars(m)) for n, m in model.named_modules()}
        and model.training
        and all(p.grad is None for p in model.parameters())
    )


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dataclass_result_with_reference_values(layout: str) -> None:
    """In-place relu_ and += do not damage what is sent or saved: gradients too."""
    outcomes = run(2, train, planned(layout).to_json(), "library", 2)
    assert max(o.worst for o in outcomes) < TOLERANCE
    for ours, theirs, gradient in run(2, results, planned(layout).to_json(), _tokens()):
        assert type(ours) is Out
        assert ours.past is None
        assert error(ours.logits, theirs.logits) < TOLERANCE
        assert error(ours.loss, theirs.loss) < TOLERANCE
        assert gradient < TOLERANCE


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "extra",
    [
        {"return_dict": False},
        {"use_act": False},
        {"mask": torch.tensor([[True, False, False, True, False, False]] * 2)},
    ],
    ids=["tuple", "use_act", "mask"],
)
def test_keywords_in_the_example_inputs_work(layout: str, extra: dict[str, object]) -> None:
    inputs = {**_tokens(), **extra}
    plan = _plan(layout, inputs)
    for ours, theirs, gradient in run(2, results, plan.to_json(), inputs):
        assert type(ours) is type(theirs)
        assert gradient < TOLERANCE
        for mine, other in zip(tensors_of(ours), tensors_of(theirs), strict=True):
            assert error(mine, other) < TOLERANCE


@pytest.mark.distributed
def test_inference_without_labels_has_no_loss() -> None:
    inputs = {"input_ids": _tokens()["input_ids"]}
    plan = _plan("tp", dict(inputs), mode="infer")
    for ours, theirs, _ in run(2, _infer, plan.to_json(), inputs):
        assert type(ours) is Out
        assert ours.loss is None
        assert error(ours.logits, theirs.logits) < TOLERANCE


def _infer(rank: int, text: str, inputs: Inputs) -> tuple[object, object, float]:
    model, _, _ = build("library")
    parallel = autoplan.parallelize(model, Plan.from_json(text))
    with torch.no_grad():
        return parallel(**inputs), _detached(model(**inputs)), 0.0


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask": torch.zeros(2, 6, dtype=torch.bool)}, ["mask", "Plan again"]),
        ({"labels": None}, ["labels", "Plan again"]),
        ({"use_act": False}, ["use_act", "Plan again"]),
        (_tokens(3), ["input_ids", "(2, 6)", "(3, 6)", "dim 0", "Plan again"]),
        (
            {"labels": torch.zeros(2, 6, dtype=torch.int32)},
            ["labels", "int64", "int32", "Plan again"],
        ),
    ],
    ids=["new-keyword", "no-labels", "another-switch", "batch-of-3", "dtype"],
)
def test_calls_that_were_never_planned_are_refused(
    change: dict[str, object], words: list[str]
) -> None:
    """Every rank refuses before any work; the message names the input and what differs."""
    inputs = {**_tokens(), **change}
    inputs = {k: v for k, v in inputs.items() if v is not None}
    for message in run(2, refusal_of, planned("pp").to_json(), inputs):
        assert all(word in message for word in words), message


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_after_planning_on_meta(layout: str) -> None:
    """A plan made from a meta copy is the plan of the model; its saved buffer is saved, the other
    one is right anyway."""
    with torch.device("meta"):
        empty = Library().to(torch.float64)
        shapes = {k: torch.empty_like(v) for k, v in build("library")[1].items()}
    pins = autoplan.Pins(**LAYOUTS[layout])  # type: ignore[arg-type]  # checked by Pins itself
    plan = autoplan.optimize(empty, plain_cluster(2), shapes, pins=pins)
    assert plan == planned(layout)
    assert plan.buffers["scale"].persistent
    assert not plan.buffers["rope"].persistent
    for here, gathered, right, worst in run(2, state_and_buffers, plan.to_json()):
        assert set(gathered) == set(Library().state_dict())
        assert "scale" in gathered
        assert "rope" not in here
        assert right
        assert worst < TOLERANCE


@pytest.mark.distributed
def test_unsaved_buffer_of_a_meta_model_is_never_left_empty() -> None:
    messages = run(2, missing_buffer, planned("tp").to_json())
    assert all("rope" in m and "buffers=" in m for m in messages)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_original_module_is_not_modified(layout: str) -> None:
    assert run(2, original_untouched, planned(layout).to_json()) == [True, True]


def test_planning_leaves_the_model_as_it_was() -> None:
    model, inputs, _ = build("library")
    model.b1.eval()
    before = copy.deepcopy(model.state_dict())
    attributes = {n: sorted(vars(m)) for n, m in model.named_modules()}
    autoplan.optimize(model, plain_cluster(2), inputs)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert attributes == {n: sorted(vars(m)) for n, m in model.named_modules()}
    assert model.training
    assert not model.b1.training
    assert all(p.grad is None and not p.is_meta for p in model.parameters())


def test_branch_on_data_is_refused_with_module_and_line() -> None:
    model = Branching()
    model_inputs = build("library")[1]
    source = Branching.forward.__code__
    line = source.co_firstlineno + 2  # "if h.sum() > 0:"
    with pytest.raises(autoplan.CaptureError) as refusal:
        autoplan.optimize(model, plain_cluster(2), model_inputs)
    message = str(refusal.value)
    assert f"models.py:{line}" in message
    assert "Branching" in message
    assert "branches on the values of a tensor" in message
    assert not re.search(r"\bu\d+\b|zuf\d+", message), "no internal symbols"


@pytest.mark.distributed
def test_keywords_may_come_in_any_order() -> None:
    inputs = dict(reversed(_tokens().items()))
    for ours, theirs, _ in run(2, results, planned("tp").to_json(), inputs):
        assert error(ours.loss, theirs.loss) < TOLERANCE


def test_branch_in_a_submodule_names_its_path() -> None:
    outer = torch.nn.ModuleDict({"inner": Branching()})

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = outer

        def forward(self, input_ids: Tensor, labels: Tensor) -> object:
            return self.parts["inner"](input_ids, labels)

    with pytest.raises(autoplan.CaptureError, match=r"parts\.inner"):
        autoplan.optimize(Outer(), plain_cluster(2), build("library")[1])


def test_plan_case_by_default_uses_the_model_s_own_loss() -> None:
    assert plan_case("library", 1).settings.mode == "train"
