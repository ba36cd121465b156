# SPDX-License-Identifier: Apache-2.0
"""Random legal plans: every op a random strategy, every parameter a random storage, random cuts and
microbatches.

They look like nothing a search would choose, and they must compute exactly what one device
computes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import torch

from autoplan.capture import Captured
from autoplan.placements import Layout
from autoplan.plan import ClusterSummary, InputTensor, Plan, Settings, Signature
from autoplan.sharding.batch import cut_batch, find_batch
from autoplan.sharding.cutting import chain_ops
from autoplan.sharding.rules import find_rule, kept_whole
from autoplan.sharding.strategies import (
    NONE,
    ParameterStrategy,
    Strategy,
    axis_choices,
    block_options,
    enumerate_strategies,
    parameter_strategies,
)
from autoplan.solver.assemble import Decision, Setting, assemble, no_figures

Pick = Callable[[random.Random, tuple[Strategy, ...]], Strategy]


def setting_of(captured: Captured, num_devices: int) -> Setting:
    """A setting without cluster figures, for plans that nothing prices."""
    graph = captured.graph
    rules = {op.name: find_rule(op, graph) or kept_whole(op, graph) for op in graph.ops}
    batch = find_batch(graph, rules)
    signature = Signature(
        positional=captured.positional,
        tensors=tuple(
            InputTensor(
                path=x.path,
                shape=x.shape,
                dtype=x.dtype,
                batch_dim=0 if x.value in batch.positions else None,
            )
            for x in captured.leaves
            if x.value
        ),
        # type: ignore[misc]
        constants={x.path: x.constant for x in captured.leaves if not x.value},
    )
    return Setting(
        graph=graph,
        batch=batch,
        signature=signature,
        settings=Settings(
            mode="train", optimizer="adamw", precision=None, memory_reserve=0.0, pins={}
        ),
        cluster=ClusterSummary(
            name="none",
            num_hosts=1,
            devices_per_host=num_devices,
            device="none",
            memory_bytes=1,
            num_devices=num_devices,
            description={},
        ),
        cluster_digest="none",
        profiles_digest="none",
        torch_version=str(torch.__version__),
    )


def random_plan(
    captured: Captured,
    seed: int,
    *,
    dp: int,
    tp: int,
    pp: int,
    num_microbatches: int,
    schedule: str = "1f1b",
    recompute: bool = False,
) -> Plan:
    """One random legal plan.

    Raises:
        ValueError: The batch cannot be cut so.
    """
    rng = random.Random(seed)
    setting = setting_of(captured, dp * tp * pp)
    graph, sizes = captured.graph, (dp, tp)
    cut = cut_batch(graph, setting.batch, num_microbatches)
    rules = {op.name: find_rule(op, cut) or kept_whole(op, cut) for op in cut.ops}
    blocks = block_options(cut, rules)
    strategies: dict[str, Strategy] = {}
    wanted: dict[str, list[Layout]] = {}
    for op in cut.ops:
        grads = any(cut.values[n].requires_grad for n in op.inputs)
        choices = axis_choices(rules[op.name], blocks[op.name], sums=True, grads=grads)
        found = enumerate_strategies(
            op, rules[op.name], cut, sizes, tuple(choices if s > 1 else (NONE,) for s in sizes)
        )
        strategies[op.name] = rng.choice(found)
        for name, layout in zip(op.inputs, strategies[op.name].inputs):
            wanted.setdefault(name, []).append(layout)
    whole = enumerate_strategies(
        cut.ops[0], rules[cut.ops[0].name], cut, sizes, ((NONE,), (NONE,))
    )[0]
    default = whole.outputs[0]
    replicated = Layout(default.value.replicated(2), default.value.replicated(2))
    parameters: dict[str, ParameterStrategy] = {}
    for value in graph.of_kind("parameter"):
        layouts = tuple(wanted.get(value.name, [replicated]))
        options = parameter_strategies(
            value.meta.shape, value.requires_grad, layouts, sizes, (0, 1, 2, 3)
        )
        parameters[value.name] = rng.choice(options)
    chain = chain_ops(cut)
    cuts = sorted(rng.sample(range(1, len(chain)), pp - 1)) if pp > 1 else []
    edges = [0, *cuts, len(chain)]
    labels, recomputed = _labels(chain, edges)
    decision = Decision(
        dp=dp,
        tp=tp,
        pp=pp,
        num_microbatches=num_microbatches,
        schedule=schedule,
        strategies=strategies,
        parameters=parameters,
        bounds=tuple((chain[a].name, chain[b - 1].name) for a, b in pairwise(edges)),
        layers=labels,
        recompute=recomputed if recompute else ((),) * pp,
        ranks=tuple(tuple(range(s * dp * tp, (s + 1) * dp * tp)) for s in range(pp)),
    )
    return assemble(setting, decision, no_figures(pp))


def _labels(chain, edges):  # type: ignore[no-untyped-def]
    """Module paths that lie wholly inside one stage, as layers; the random cuts leave some in no
    stage.
    """
    stage_of: dict[str, set[int]] = {}
    for s, (a, b) in enumerate(pairwise(edges)):
        for op in chain[a:b]:
            parts = op.module_path.split(".")
            numbered = [i for i, part in enumerate(parts) if part.isdigit()]
            if numbered:
                stage_of.setdefault(".".join(parts[: numbered[0] + 1]), set()).add(s)
    labels = tuple(
        tuple(x for x, stages in stage_of.items() if stages == {s}) for s in range(len(edges) - 1)
    )
    return labels, labels
