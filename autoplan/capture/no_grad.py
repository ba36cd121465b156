# SPDX-License-Identifier: Apache-2.0
"""Regions of a model's code that carry no gradient, as detaches in the graph.

`torch.export` keeps a `torch.no_grad()` block as an op around a graph of its own; decomposing puts
the block's ops beside the others, and the plan would send gradients through them. What leaves a
block is detached here, before that.
"""

from __future__ import annotations

import operator

import torch

from autoplan.errors import CaptureError

_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled  # checked on 2.13


def detach_regions(exported: torch.export.ExportedProgram) -> None:
    """Detaches the results of every no_grad block of an exported program, in place.

    Raises:
        CaptureError: A block turns gradients on again inside.
    """
    module = exported.graph_module
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is not _REGION or node.args[0]:
            continue
        inner = getattr(module, node.args[1].target)
        if any(n.target is _REGION for n in inner.graph.nodes):
            raise CaptureError(
                "the model turns gradients on inside a torch.no_grad() block, which autoplan does "
                "not plan. Take that part out of the block."
            )
        for taken in list(node.users):
            value = taken.meta.get("val")
            if taken.target is operator.getitem and value is not None and _carries(value):
                _detach(exported, taken)
    module.recompile()


def _carries(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _detach(exported: torch.export.ExportedProgram, node: torch.fx.Node) -> None:
    graph = exported.graph_module.graph
    with graph.inserting_after(node):
        detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    detached.meta = dict(node.meta)
    node.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)
    exported.graph_signature.replace_all_uses(node.name, detached.name)
