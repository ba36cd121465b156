# SPDX-License-Identifier: Apache-2.0
"""An op as one rank sees it, and how it is called: what `local_ops.py` and `special_ops.py` speak
of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from autoplan.graph import Op, TensorMeta
from autoplan.placements import Layout


@dataclass(frozen=True)
class LocalOp:
    """An op, and the sizes and layouts it runs at on this rank.

    Attributes:
        op: The op.
        inputs, outputs: Its strategy's layouts.
        global_inputs, global_outputs: Metas of the whole batch on one device.
        local_inputs, local_outputs: Metas of this rank's shards of one microbatch.
        index: Its number in the graph: the name of its random stream.
        over_time: An output differs from microbatch to microbatch.
    """

    op: Op
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    global_inputs: tuple[TensorMeta, ...]
    global_outputs: tuple[TensorMeta | None, ...]
    local_inputs: tuple[TensorMeta, ...]
    local_outputs: tuple[TensorMeta | None, ...]
    index: int
    over_time: bool


@dataclass(frozen=True, slots=True)
class Call:
    """How to run it: a function or a module, and its arguments, in which `Ref` stands for a tensor
    input.
    """

    function: Callable[..., object] | nn.Module
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    needs_moment: bool = (
        False  # the first argument is the `Moment`: microbatch number and random seed
    )
