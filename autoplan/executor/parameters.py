# SPDX-License-Identifier: Apache-2.0
"""Parameters as the user sees them (DTensors) and as the stage's ops use them (local leaves).

A parameter is stored in its plan's spec. Ops see the leaf, in the layout they use: the stored shard
itself, or (ZeRO-1 and 2, and packed projections) a copy made once per step. Gradients collect on
the leaf over all microbatches and are reduced to the stored spec once per step; with ZeRO-2 after
every microbatch. ZeRO-3 needs nothing here: the leaf is the shard, and the stage gathers it where
it is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.executor.collectives import convert_stored
from autoplan.executor.meshes import Ranks, to_torch
from autoplan.placements import Layout, Replicate, ShardingSpec, parse_layout, parse_spec
from autoplan.plan import ParameterPlan

Tensor = torch.Tensor


def own_shard(full: Tensor, spec: ShardingSpec, ranks: Ranks) -> Tensor:
    """This rank's part of a whole tensor, as a tensor of its own."""
    whole = ShardingSpec((Replicate(),) * len(spec))
    part = convert_stored(full, whole, spec, ranks)
    return part.detach().clone(memory_format=torch.contiguous_format)


@dataclass
class StoredParameter:
    """One parameter of a stage.

    Attributes:
        name: The model's own name, the first of a shared group.
        entry: Its plan.
        ranks: This process's place.
        parameter: What optimizers and state dicts see: a DTensor, or a plain tensor on one device.
        local: This rank's stored shard, the parameter's own memory.
        compute_dtype: What the ops use; gradients of a narrower one collect in the stored dtype.
        tied_group: Ranks of the other stages that hold a copy, or None.
    """

    name: str
    entry: ParameterPlan
    ranks: Ranks
    parameter: nn.Parameter
    local: Tensor
    compute_dtype: torch.dtype
    tied_group: dist.ProcessGroup | None = None
    leaf: Tensor = field(init=False)
    spec: ShardingSpec = field(init=False)
    used: Layout = field(init=False)
    _collected: Tensor | None = field(init=False, default=None)
    # what `parameter.grad` is, made once: DTensors are dear to make
    _grad: Tensor | None = field(init=False, default=None)
    _grad_local: Tensor | None = field(init=False, default=None)  # its memory

    def __post_init__(self) -> None:
        self.spec = parse_spec(self.entry.spec)
        self.used = parse_layout(self.entry.used)
        self.leaf = self._make_leaf()

    @property
    def is_copied(self) -> bool:
        """Ops use a copy, in another layout or dtype than the stored one."""
        return self.spec != self.used.value or self.local.dtype != self.compute_dtype

    def _make_leaf(self) -> Tensor:
        leaf = convert_stored(
            self.local.to(self.compute_dtype), self.spec, self.used.value, self.ranks
        )
        leaf = leaf.detach().requires_grad_(self.entry.trainable)
        if self.entry.trainable and (
            self.entry.zero == 2 or self.local.dtype != self.compute_dtype
        ):
            register = leaf.register_post_accumulate_grad_hook
            register(self._collect)  # type: ignore[no-untyped-call] # torch leaves it untyped
        return leaf

    def begin_step(self) -> None:
        """Makes the leaf current: a copy follows the shard, which an optimizer may have changed."""
        if self.is_copied:
            with torch.no_grad():
                self.leaf = self._make_leaf()
        if self.parameter.grad is None and self._grad_local is not None:
            nothing = torch.empty(0, dtype=self.local.dtype, device=self.local.device)
            _exchange(self._grad_local, nothing)

    def _collect(self, leaf: Tensor) -> None:
        """After every microbatch: the gradient in the stored dtype, with ZeRO-2 already reduced."""
        assert leaf.grad is not None, "the hook runs after a gradient"
        grad = leaf.grad.to(self.local.dtype)
        part = self._reduced(grad) if self.entry.zero == 2 else grad
        self._collected = part if self._collected is None else self._collected.add_(part)
        leaf.grad = None

    def _reduced(self, grad: Tensor) -> Tensor:
        return convert_stored(grad, self.used.grad, self.spec, self.ranks)

    def end_step(self) -> None:
        """Adds the step's gradient to the parameter's `grad`.

        Reduced to the stored spec and over tied copies.
        """
        grad = self._collected if self._collected is not None else self.leaf.grad
        self.leaf.grad, self._collected = None, None
        if grad is not None and self.entry.zero != 2:
            grad = self._reduced(grad)
        if self.tied_group is not None and self.entry.trainable:
            grad = torch.zeros_like(self.local) if grad is None else grad.clone()
            dist.all_reduce(grad, group=self.tied_group)
        if grad is not None:
            self._add_to_grad(grad)

    def _add_to_grad(self, grad: Tensor) -> None:
        """Adds to the parameter's gradient.

        Where there is none, the memory of `grad` is handed over without a copy.
        """
        if self.parameter.grad is not None and self.parameter.grad is self._grad:
            assert self._grad_local is not None, "a gradient has memory"
            self._grad_local.add_(grad)
            return
        if self._grad is None:
            self._grad_local = grad.contiguous()
            wrap = isinstance(self.parameter, DTensor)
            self._grad = (
                as_dtensor(self._grad_local, self.entry.shape, self.spec, self.ranks)
                if wrap
                else self._grad_local
            )
            if isinstance(self._grad, DTensor):
                # with gradients on, to_local gives a view, whose memory cannot be exchanged
                with torch.no_grad():
                    self._grad_local = self._grad.to_local()
        else:
            assert self._grad_local is not None, "a gradient has memory"
            _exchange(self._grad_local, grad.contiguous())
        own = self.parameter.grad
        self.parameter.grad = self._grad if own is None else own + self._grad

    @property
    def num_copies(self) -> int:
        """How many ranks of the whole launch hold the same elements as this one."""
        copies = len(self.entry.stages)
        for placement, size in zip(self.spec, self.ranks.axis_sizes):
            copies *= size if isinstance(placement, Replicate) else 1
        return copies


def _exchange(tensor: Tensor, source: Tensor) -> None:
    """Gives a tensor object the memory, sizes and strides of another."""
    offset = source.storage_offset()
    tensor.set_(source.untyped_storage(), offset, source.size(), source.stride())


def as_dtensor(local: Tensor, shape: tuple[int, ...], spec: ShardingSpec, ranks: Ranks) -> DTensor:
    """A local shard as a DTensor of global `shape` on the stage's mesh."""
    stride = torch.empty(shape, device="meta").stride()
    result: DTensor = DTensor.from_local(
        local,
        ranks.stage_mesh,
        to_torch(spec),
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )
    return result


def make_parameter(
    name: str, source: Tensor, entry: ParameterPlan, ranks: Ranks, compute_dtype: torch.dtype
) -> StoredParameter:
    """The stored form of one of the model's parameters.

    From a meta tensor the shard is left for loading.
    """
    spec = parse_spec(entry.spec)
    dtype = getattr(torch, entry.dtype)
    with torch.no_grad():
        if source.is_meta:
            local = torch.empty(
                spec.local_shape(entry.shape, ranks.axis_sizes), dtype=dtype, device=ranks.device
            )
        else:
            local = own_shard(source.detach(), spec, ranks).to(device=ranks.device, dtype=dtype)
        data: Tensor = local if ranks.mesh is None else as_dtensor(local, entry.shape, spec, ranks)
    return StoredParameter(
        name, entry, ranks, nn.Parameter(data, requires_grad=entry.trainable), local, compute_dtype
    )
