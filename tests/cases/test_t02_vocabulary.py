# SPDX-License-Identifier: Apache-2.0
"""T02: a vocabulary of 50257, which no tensor parallel degree divides: refused when pinned, whole
otherwise, always exact."""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch
from cases.catalog import build
from cases.models import Vocabulary
from cases.running import TOLERANCE, digest, error, plain_cluster, plan_case, run, train
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import autoplan
from autoplan.plan import Plan

WIDTH = {"emb.weight": "RS(1)", "head.weight": "RS(1)"}


@lru_cache
def planned(degree: int, split: bool) -> Plan:
    """Over `degree` ranks; the tables whole, or split along the width of 16."""
    return plan_case("vocabulary", degree, tp=degree, dp=1, pp=1, placements=WIDTH if split else {})


def shapes(rank: int, text: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of the output, of both saved tables."""
    model, inputs, loss_fn = build("vocabulary")
    parallel = autoplan.parallelize(model, Plan.from_json(text), loss_fn=loss_fn)
    output = parallel(**inputs)
    assert isinstance(output, Tensor)
    state = parallel.state_dict()
    # type: ignore[attr-defined]
    return tuple(output.shape), tuple(state["emb.weight"].shape), tuple(state["head.weight"].shape)


def save(rank: int, text: str, folder: str) -> dict[str, str]:
    """One step, then a distributed checkpoint; digests of the whole tables."""
    model, inputs, loss_fn = build("vocabulary")
    parallel = autoplan.parallelize(model, Plan.from_json(text), loss_fn=loss_fn)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
    parallel.forward_backward(**inputs)
    optimizer.step()
    state_dict_saver.save(parallel.state_dict(), checkpoint_id=folder)
    return {n: digest(v) for n, v in parallel.full_state_dict().items()}


def load(rank: int, text: str, folder: str) -> dict[str, str]:
    """A checkpoint read into another plan of a fresh model."""
    model, _, loss_fn = build("vocabulary", seed=1)
    parallel = autoplan.parallelize(model, Plan.from_json(text), loss_fn=loss_fn)
    state = parallel.state_dict()
    state_dict_loader.load(state, checkpoint_id=folder)
    parallel.load_state_dict(state)
    return {n: digest(v) for n, v in parallel.full_state_dict().items()}


def test_parameters_are_counted() -> None:
    assert planned(2, False).model.num_parameters == 1608224


@pytest.mark.distributed
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "width"])
def test_nothing_is_padded(degree: int, split: bool) -> None:
    """Outputs, gradients' and states' shapes are the model's own, never 50258, 50260 or 50304."""
    for output, table, head in run(degree, shapes, planned(degree, split).to_json()):
        assert output == (2, 4, 50257)
        assert table == head == (50257, 16)


@pytest.mark.distributed
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "width"])
def test_five_sgd_steps_equal_one_device(degree: int, split: bool) -> None:
    outcomes = run(degree, train, planned(degree, split).to_json(), "vocabulary", 5, "sgd")
    assert max(o.worst for o in outcomes) < TOLERANCE


@pytest.mark.distributed
@pytest.mark.parametrize("degree", [2, 4])
def test_confident_logits_show_no_padding(degree: int) -> None:
    """+6 at the label and -6 elsewhere give log(1 + 50256 exp(-12)) = 0.2691 (0.354 with 47 pad
    columns of 0)."""
    expected = math.log1p(50256 * math.exp(-12.0))
    model, inputs, loss_fn = build("confident")
    assert loss_fn is not None
    assert (
        error(loss_fn(model(**inputs), inputs), torch.tensor(expected, dtype=torch.float64)) < 1e-9
    )
    plan = plan_case("confident", degree, tp=degree, dp=1, pp=1, placements=WIDTH)
    outcomes = run(degree, train, plan.to_json(), "confident", 1, "sgd")
    assert max(o.worst for o in outcomes) < TOLERANCE


@pytest.mark.distributed
# pytest's own
# type: ignore[no-untyped-def]
def test_checkpoint_of_four_ranks_loads_on_two_and_on_one(tmp_path) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = run(4, save, planned(4, True).to_json(), folder)[0]
    assert run(2, load, planned(2, True).to_json(), folder) == [saved, saved]
    assert run(2, load, planned(2, False).to_json(), folder) == [saved, saved]
    fresh = Vocabulary().to(torch.float64)
    state = fresh.state_dict()
    with pytest.warns(UserWarning, match="single process"):  # torch says so; it is what is meant
        state_dict_loader.load(state, checkpoint_id=folder, no_dist=True)
    assert {n: digest(v) for n, v in state.items()} == saved


@pytest.mark.parametrize(("name", "degree"), [("emb.weight", 2), ("head.weight", 4)])
def test_pinned_split_of_the_vocabulary_is_refused(name: str, degree: int) -> None:
    """The refusal names the parameter, the size, the degree, and offers to replicate."""
    with pytest.raises(autoplan.InfeasibleError) as refusal:
        plan_case("vocabulary", degree, tp=degree, dp=1, pp=1, placements={name: "RS(0)"})
    message = str(refusal.value)
    for words in (name, "50257", f"tp={degree}", "replicated", "dim 1 (16)"):
        assert words in message


def test_pin_that_names_nothing_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        autoplan.InfeasibleError, match=r"'head.weigth'.*did you mean 'head.weight'"
    ):
        plan_case("vocabulary", 2, tp=2, placements={"head.weigth": "RR"})


@pytest.mark.parametrize("num_devices", [2, 4])
def test_searched_plan_is_always_returned(num_devices: int) -> None:
    plan = plan_case("vocabulary", num_devices)
    assert plan.parameters["emb.weight"].shape == (50257, 16)
    assert plan.layout.dp * plan.layout.tp * plan.layout.pp <= num_devices


def test_size_that_divides_is_never_rounded_up() -> None:
    """R15: 151936 rows over two ranks are 75968 each."""
    torch.manual_seed(0)
    model, ids = Vocabulary(151936, 4), {"ids": torch.randint(0, 151936, (2, 4))}
    plan = autoplan.optimize(
        model,
        plain_cluster(2),
        ids,
        loss_fn=build("vocabulary")[2],
        pins=autoplan.Pins(tp=2, dp=1, pp=1, placements={"*.weight": "RS(0)"}),
    )
    assert plan.parameters["emb.weight"].shape == (151936, 4)
    assert plan.parameters["head.weight"].spec == "RS(0)"
    assert plan.stages[0].estimate.memory.parameters == 2 * 75968 * 4 * 4
