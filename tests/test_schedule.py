# SPDX-License-Identifier: Apache-2.0
"""Schedules against closed forms; their replay against PyTorch's own classes in virtual time.

The classes' loops are private (`_step_microbatches`, checked on PyTorch 2.13): they are the truth.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from autoplan.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    finish_times,
    gpipe,
    inference,
    make_schedule,
    one_f_one_b,
    parse_action,
    replay,
)

SHAPES = [(1, 1), (1, 5), (2, 1), (2, 2), (2, 7), (3, 3), (4, 2), (4, 4), (4, 9), (7, 3), (8, 16)]
TORCH: dict[str, Any] = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "infer": torch_schedules._ScheduleForwardOnly,
}


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.actions]


def test_orders() -> None:
    assert rows(gpipe(2, 3)) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]
    assert rows(one_f_one_b(3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert rows(inference(2, 2)) == ["0F0 0F1", "1F0 1F1"]
    assert str(inference(2, 2)) == "infer, 2 microbatches\n0: 0F0 0F1\n1: 1F0 1F1"


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_single_stage_accumulates_gradients(name: str) -> None:
    schedule = make_schedule(name, 1, 3)
    assert rows(schedule) == ["0F0 0B0 0F1 0B1 0F2 0B2"]
    assert schedule.in_flight(0) == 1


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), SHAPES)
def test_every_schedule_verifies(name: str, num_stages: int, num_microbatches: int) -> None:
    schedule = make_schedule(name, num_stages, num_microbatches)
    schedule.verify()
    assert schedule.name == name
    assert schedule.trains == (name != "infer")
    kinds = 1 if name == "infer" else 2
    assert all(len(row) == kinds * num_microbatches for row in schedule.actions)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SHAPES)
def test_in_flight(num_stages: int, num_microbatches: int) -> None:
    p, m = num_stages, num_microbatches
    for stage in range(p):
        assert one_f_one_b(p, m).in_flight(stage) == min(m, p - stage)
        assert gpipe(p, m).in_flight(stage) == (m if p > 1 else 1)
        assert inference(p, m).in_flight(stage) == 1


def test_actions_read_back() -> None:
    assert str(Action(12, "B", 340)) == "12B340"
    for row in one_f_one_b(3, 4).actions:
        assert all(parse_action(str(action)) == action for action in row)


@pytest.mark.parametrize("text", ["", "2F", "F0", "2X0", "-1F0", "2F0 ", "2f0", "2F0B1"])
def test_text_that_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        parse_action(text)


def test_unknown_names_and_counts() -> None:
    with pytest.raises(ValueError, match="choose one of gpipe, 1f1b, infer"):
        make_schedule("zigzag", 2, 2)
    for name in SCHEDULES:
        for counts in ((0, 1), (1, 0), (-2, 4)):
            with pytest.raises(ValueError, match="at least 1"):
                make_schedule(name, *counts)


def edited(old: str, new: str) -> Schedule:
    """1F1B of 2 stages and 3 microbatches with one piece of its text replaced."""
    schedule = one_f_one_b(2, 3)
    text = [row.replace(old, new) for row in rows(schedule)]
    assert text != rows(schedule)
    actions = tuple(tuple(map(parse_action, row.split())) for row in text)
    return dataclasses.replace(schedule, actions=actions)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (" 1B2", "", "1B2 is missing"),
        ("0F2", "", "0F2"),
        ("1B2", "1B1", "1B1 stands twice"),
        ("1F1", "0F1", "0F1 cannot stand in row 1"),
        ("1F2 1B2", "1B2 1F2", "1B2 .* before its forward"),
        ("1F1", "1F3", "1F3 cannot stand"),
        ("1F0 1B0 1F1 1B1", "1F1 1B1 1F0 1B0", "1F1 .* out of order"),
        ("0F0 0F1 0B0", "0F0 0B0 0F1", None),
    ],
)
def test_verify_names_the_action(old: str, new: str, match: str | None) -> None:
    schedule = edited(old, new)
    if match is None:
        schedule.verify()
    else:
        with pytest.raises(ValueError, match=match):
            schedule.verify()


def test_verify_finds_deadlock() -> None:
    """Stage 1 wants both forwards before its first backward, stage 0 the backward in between."""
    first = "0F0 0B0 0F1 0B1".split()
    second = "1F0 1F1 1B0 1B1".split()
    actions = tuple(tuple(map(parse_action, row)) for row in (first, second))
    with pytest.raises(ValueError, match="deadlocks: stage 0 waits forever before action 0B0"):
        Schedule("gpipe", 2, 2, actions).verify()


def test_verify_counts_rows() -> None:
    schedule = one_f_one_b(2, 3)
    with pytest.raises(ValueError, match="2 rows of actions for 3 stages"):
        dataclasses.replace(schedule, num_stages=3).verify()


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), SHAPES)
def test_bubble_of_equal_stages(name: str, num_stages: int, num_microbatches: int) -> None:
    """(p - 1)(f + b) on every stage, with free transfers. Source: Narayanan et al., SC 2021."""
    p, m = num_stages, num_microbatches
    timeline = replay(make_schedule(name, p, m), (2.0,) * p, (3.0,) * p, (0.0,) * (p - 1))
    assert timeline.end_s == pytest.approx((m + p - 1) * 5.0)
    for stage in range(p):
        assert timeline.busy_s(stage) == pytest.approx(m * 5.0)
        assert timeline.bubble_s(stage) == pytest.approx((p - 1) * 5.0)


def test_forward_only_is_a_flow_shop() -> None:
    """sum + (m - 1) max for unequal stages and free transfers."""
    forward = (1.0, 4.0, 2.0, 3.0)
    assert replay(inference(4, 6), forward, (0.0,) * 4, (0.0,) * 3).end_s == pytest.approx(30.0)


def test_transfers_by_hand() -> None:
    """1F1B, 2 stages, 2 microbatches, f=1, b=2, a transfer takes 0.5.

    Stage 0: F0 0-1, F1 1-2 (its send waits for stage 1's receive); stage 1: F0 1.5-2.5, B0 2.5-4.5,
    then B0's send and F1's receive together, 4.5-5; F1 5-6, B1 6-8; stage 0: B0 5-7, B1 8.5-10.5.
    """
    timeline = replay(one_f_one_b(2, 2), (1.0, 1.0), (2.0, 2.0), (0.5,))
    spans = {str(span.action): (span.start_s, span.end_s) for span in timeline.spans}
    assert spans == {
        "0F0": (0.0, 1.0),
        "0F1": (1.0, 2.0),
        "0B0": (5.0, 7.0),
        "0B1": (8.5, 10.5),
        "1F0": (1.5, 2.5),
        "1B0": (2.5, 4.5),
        "1F1": (5.0, 6.0),
        "1B1": (6.0, 8.0),
    }
    assert timeline.finish_s == (10.5, 8.5)
    assert timeline.end_s == 10.5


def both_posted(posts: list[float]) -> bool:
    return len(posts) == 2


class VirtualTorch:
    """Runs PyTorch's own `_step_microbatches` of every stage in a thread with a clock of its own.

    Point-to-point operations meet in `posted`: a transfer runs from the later of the two posts.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, send_s: list[float]) -> None:
        self.send_s = send_s
        self.posted: dict[tuple[str, int, int], list[float]] = {}
        self.meeting = threading.Condition()
        self.local = threading.local()
        self.spans: dict[str, tuple[float, float]] = {}
        monkeypatch.setattr(torch_schedules, "_batch_p2p", self.post)
        monkeypatch.setattr(torch_schedules, "_wait_batch_p2p", self.wait)

    def post(self, operations: list[Any], desc: str | None = None) -> list[Any]:
        with self.meeting:
            for operation in operations:
                self.posted.setdefault(operation.key, []).append(self.local.clock)
            self.meeting.notify_all()
        return operations

    def wait(self, works: list[Any]) -> None:
        for work in works:
            with self.meeting:
                posts = self.posted[work.key]
                met = self.meeting.wait_for(partial(both_posted, posts), timeout=20)
                assert met, f"{work.key} never met its other end"
                arrival = max(posts) + self.send_s[work.key[1]]
            self.local.clock = max(self.local.clock, arrival)

    def stage(self, index: int, count: int, forward_s: float, backward_s: float) -> SimpleNamespace:
        def operations(kind: str, boundary: int, peer: int) -> Callable[[int], list[Any]]:
            exists = 0 <= boundary < count - 1
            return lambda m: [SimpleNamespace(key=(kind, boundary, m), peer=peer)] * exists

        def compute(kind: str, seconds: float) -> Callable[..., None]:
            def run(microbatch: int, *_: object, **__: object) -> None:
                start = self.local.clock
                self.local.clock += seconds
                self.spans[f"{index}{kind}{microbatch}"] = (start, self.local.clock)

            return run

        return SimpleNamespace(
            stage_index=index,
            get_fwd_recv_ops=operations("F", index - 1, index - 1),
            get_fwd_send_ops=operations("F", index, index + 1),
            get_bwd_recv_ops=operations("B", index, index + 1),
            get_bwd_send_ops=operations("B", index - 1, index - 1),
            forward_one_chunk=compute("F", forward_s),
            backward_one_chunk=compute("B", backward_s),
            perform_reduce_grad=lambda _: None,
        )

    def run(
        self, name: str, m: int, forward_s: list[float], backward_s: list[float]
    ) -> list[float]:
        """Every stage's clock at its end."""
        count = len(forward_s)
        finish = [-1.0] * count

        def one(index: int) -> None:
            self.local.clock = 0.0
            itself = SimpleNamespace(
                _stage=self.stage(index, count, forward_s[index], backward_s[index]),
                _n_microbatches=m,
                _num_stages=count,
                scale_grads=False,
                _check_inputs=lambda *_: ([()] * m, [{}] * m),
                _initialize_stage=lambda *_: None,
                _maybe_compute_loss=lambda *_: None,
                _maybe_get_loss=lambda *_: None,
                _update_losses=lambda *_: None,
            )
            TORCH[name]._step_microbatches(itself)
            finish[index] = self.local.clock

        threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        return finish


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [s for s in SHAPES if s[0] > 1])
def test_replay_is_what_pytorch_does(
    name: str, num_stages: int, num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{name} {num_stages} {num_microbatches}")
    for _ in range(4):
        forward = [rng.uniform(0.5, 2.0) for _ in range(num_stages)]
        backward = [rng.uniform(0.5, 4.0) for _ in range(num_stages)]
        send = [rng.choice([0.0, 0.1, 1.0, 3.0]) for _ in range(num_stages - 1)]
        torch = VirtualTorch(monkeypatch, send)
        finish = torch.run(name, num_microbatches, forward, backward)
        schedule = make_schedule(name, num_stages, num_microbatches)
        timeline = replay(schedule, forward, backward, send)
        ours = {str(span.action): (span.start_s, span.end_s) for span in timeline.spans}
        assert ours.keys() == torch.spans.keys()
        for action, span in ours.items():
            assert span == pytest.approx(torch.spans[action]), action
        assert timeline.finish_s == pytest.approx(finish)
        assert finish_times(schedule, forward, backward, send) == timeline.finish_s


def test_faster_link_never_makes_a_step_slower() -> None:
    rng = random.Random(0)
    for _ in range(60):
        p, m = rng.randint(2, 5), rng.randint(1, 8)
        schedule = make_schedule(rng.choice(SCHEDULES), p, m)
        forward, backward = ([rng.uniform(0.5, 3.0) for _ in range(p)] for _ in range(2))
        send = [rng.uniform(0.0, 2.0) for _ in range(p - 1)]
        slow = replay(schedule, forward, backward, send).end_s
        fast = replay(schedule, forward, backward, [s * rng.random() for s in send]).end_s
        assert fast <= slow + 1e-9


@pytest.mark.parametrize(
    ("times", "match"),
    [
        (((1.0,), (1.0, 1.0), (0.0,)), "forward_s"),
        (((1.0, 1.0), (1.0, -1.0), (0.0,)), "backward_s"),
        (((1.0, 1.0), (1.0, 1.0), ()), "send_s"),
        (((1.0, 1.0), (1.0, 1.0), (float("nan"),)), "send_s"),
    ],
)
def test_times_that_do_not_fit_are_refused(times: tuple[Any, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replay(gpipe(2, 2), *times)
