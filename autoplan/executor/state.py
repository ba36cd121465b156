# SPDX-License-Identifier: Apache-2.0
"""The tensors of one stage: taking them from a model, registering, loading, initialising, saving.

`StageState` holds what this rank stores of parameters and buffers, under the first name of each
shared group; every name of the model leads to it. Whole tensors come in and go out one at a time.
Running is `module.py`'s; layouts of one parameter are `parameters.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys  # checked on 2.13

from autoplan.capture import Captured
from autoplan.errors import PlanError
from autoplan.executor.collectives import convert_stored
from autoplan.executor.meshes import Ranks
from autoplan.executor.parameters import StoredParameter, make_parameter, own_shard
from autoplan.executor.special_ops import stream_seed
from autoplan.placements import R, ShardingSpec
from autoplan.plan import Plan

Tensor = torch.Tensor
WHOLE = ShardingSpec((R, R))


class StageState:
    """What one rank holds of a model.

    Attributes:
        stored: Parameters of this stage by first name.
        buffers: Buffers and lifted constants of this stage by first name; bodies read them.
        first_name: Every name of a shared tensor -> the first of its group.
        unloaded: First names of tensors that came from the meta device and have no values yet.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        plan: Plan,
        ranks: Ranks,
        buffers: Mapping[str, Tensor],
    ) -> None:
        self.plan, self.ranks, self.graph = plan, ranks, captured.graph
        self.first_name = {n: group[0] for group in self.graph.shared for n in group}
        self.unloaded: set[str] = set()
        self.stored = self._take_parameters(model)
        self.buffers: dict[str, Tensor] = {}
        self._is_persistent: dict[str, bool] = {}
        self._take_buffers(model, buffers)
        for name, constant in captured.constants.items():
            self.buffers[name] = constant.to(ranks.device)

    # -- taking

    def first(self, name: str) -> str:
        """The name under which a tensor is held."""
        return self.first_name.get(name, name)

    def _take_parameters(self, model: nn.Module) -> dict[str, StoredParameter]:
        own = dict(model.named_parameters(remove_duplicate=False))
        stored = {}
        for name, entry in self.plan.parameters.items():
            if self.ranks.stage in entry.stages and self.first(name) == name:
                dtype = getattr(torch, self.graph.values[name].meta.dtype)
                stored[name] = make_parameter(name, own[name], entry, self.ranks, dtype)
                if own[name].is_meta:
                    self.unloaded.add(name)
        for name, group in self._tied_groups().items():
            if name in stored:
                stored[name].tied_group = group
        return stored

    def _tied_groups(self) -> dict[str, dist.ProcessGroup]:
        """Groups of the copies that several stages hold.

        Every rank makes all of them, in one order.
        """
        groups: dict[str, dist.ProcessGroup] = {}
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if self.ranks.mesh is None:
            return groups
        grid = self.ranks.mesh.mesh.flatten(1)
        for name, entry in self.plan.parameters.items():
            if len(entry.stages) < 2 or self.first(name) != name:
                continue
            for place in range(grid.shape[1]):
                members = tuple(int(grid[s, place]) for s in entry.stages)
                if members not in made:
                    made[members] = dist.new_group(list(members))
                if dist.get_rank() in members:
                    groups[name] = made[members]
        return groups

    def _take_buffers(self, model: nn.Module, given: Mapping[str, Tensor]) -> None:
        persistent = set(model.state_dict(keep_vars=True))
        for name, tensor in model.named_buffers(remove_duplicate=False):
            first = self.first(name)
            entry = self.plan.buffers.get(first)
            if entry is None or self.ranks.stage not in entry.stages or first in self.buffers:
                continue
            source = given.get(name, tensor)
            if source.is_meta:
                if name not in persistent:
                    raise PlanError(
                        f"buffer {name!r} has no values: the model is on the meta device and the "
                        "buffer is not in checkpoints. Pass parallelize(..., "
                        "buffers={name: tensor, ...}), or build the model's buffers on the CPU."
                    )
                self.unloaded.add(first)
                source = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.buffers[first] = source.detach().to(self.ranks.device, copy=True)
            self._is_persistent[first] = name in persistent

    def register(self, root: nn.Module) -> None:
        """Registers parameters and buffers on a module under the model's own dotted names.

        A stage without parameters gets an empty one, so that any optimizer can be made.
        """
        for name, stored in self.stored.items():
            container, last = _container(root, name)
            container.register_parameter(last, stored.parameter)
        if not self.stored:
            nothing = nn.Parameter(torch.zeros(0, device=self.ranks.device))
            root.register_parameter("nothing_to_train", nothing)
        for name, persistent in self._is_persistent.items():
            container, last = _container(root, name)
            container.register_buffer(last, self.buffers[name], persistent=persistent)

    # -- this stage's part

    def own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What this stage holds, under every name the model's own state dict has for it.

        Parameters as they are registered (DTensors on several devices), buffers whole.
        """
        for name in self.plan.parameters:
            first = self.first(name)
            if first in self.stored:
                yield name, self.stored[first].parameter
        for name, entry in self.plan.buffers.items():
            first = self.first(name)
            if entry.persistent and first in self.buffers:
                yield name, self.buffers[first]

    def load(self, state_dict: Mapping[str, object], *, strict: bool) -> _IncompatibleKeys:
        """Loads this stage's tensors from DTensors of this plan, or from whole tensors.

        Returns:
            Names of this stage that are missing, and names that are on no stage.

        Raises:
            PlanError: With `strict`, there is a name of either kind; nothing is loaded then.
        """
        own = [name for name, _ in self.own_tensors()]
        known = {*own, *self.plan.parameters}
        known.update(name for name, entry in self.plan.buffers.items() if entry.persistent)
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in known]
        if missing and strict:
            raise PlanError(
                f"{len(missing)} tensors of this stage are not in the state dict, first "
                f"{missing[0]!r}. Load all, or strict=False."
            )
        if unexpected and strict:
            raise PlanError(
                f"{len(unexpected)} tensors of the state dict are not the planned model's, first "
                f"{unexpected[0]!r}. Load the planned model's state dict, or strict=False."
            )
        for name in own:
            if name in state_dict:
                self._load_one(name, state_dict[name])
        return _IncompatibleKeys(missing, unexpected)

    def _load_one(self, name: str, value: object) -> None:
        assert isinstance(value, Tensor), "state dicts hold tensors"
        first = self.first(name)
        with torch.no_grad():
            if first in self.stored:
                stored = self.stored[first]
                if isinstance(value, DTensor):
                    stored.local.copy_(value.to_local())
                else:
                    stored.local.copy_(own_shard(value, stored.spec, self.ranks))
            else:
                self.buffers[first].copy_(value)
        self.unloaded.discard(first)

    def initialize(self, init_fn: Callable[[str, Tensor], None], seed: int) -> None:
        """Fills parameters shard by shard; see `ParallelModule.initialize`."""
        for number, (name, entry) in enumerate(self.plan.parameters.items()):
            if name not in self.stored:
                continue
            with torch.random.fork_rng(), torch.no_grad():
                torch.manual_seed(stream_seed(seed, number))
                full = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
                init_fn(name, full)
                self._load_one(name, full.to(self.ranks.device))

    # -- the whole model

    def load_full(self, state_dict: Mapping[str, Tensor] | None, *, from_rank0: bool) -> None:
        """Loads whole tensors; see `ParallelModule.load_full_state_dict`."""
        for name, shape, dtype in self._entries():
            value = self._find(name, state_dict) if state_dict is not None else None
            if from_rank0 and self.ranks.mesh is not None:
                if value is None:
                    value = torch.empty(shape, dtype=dtype)
                value = value.to(dtype).to(self.ranks.device).contiguous()
                dist.broadcast(value, 0)
            if value is None or tuple(value.shape) != shape:
                found = "is missing" if value is None else f"has shape {tuple(value.shape)}"
                raise PlanError(
                    f"{name!r} {found} in the state dict; the plan has {shape}. Load the state "
                    "dict of the planned model."
                )
            if name in self.stored or name in self.buffers:
                self._load_one(name, value)

    def _entries(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """First name, shape and dtype of every tensor of the model's state dict."""
        for name, entry in self.plan.parameters.items():
            if self.first(name) == name:
                yield name, tuple(entry.shape), getattr(torch, entry.dtype)
        for name, buffer in self.plan.buffers.items():
            if buffer.persistent and self.first(name) == name:
                yield name, tuple(buffer.shape), getattr(torch, buffer.dtype)

    def _find(self, name: str, state_dict: Mapping[str, Tensor]) -> Tensor | None:
        group = next((g for g in self.graph.shared if name in g), (name,))
        return next((state_dict[n] for n in group if n in state_dict), None)

    def gather(self) -> dict[str, Tensor]:
        """The whole model's state dict on every rank, on the CPU."""
        result: dict[str, Tensor] = {}
        for name, entry in self.plan.parameters.items():
            first = self.first(name)
            result[name] = (
                self._gather_one(name, tuple(entry.shape), entry.dtype, entry.stages)
                if first == name
                else result[first]
            )
        for name, buffer in self.plan.buffers.items():
            if buffer.persistent:
                first = self.first(name)
                result[name] = (
                    result[first]
                    if first in result
                    else self._gather_one(first, tuple(buffer.shape), buffer.dtype, buffer.stages)
                )
        return result

    def _gather_one(
        self, name: str, shape: tuple[int, ...], dtype: str, stages: tuple[int, ...]
    ) -> Tensor:
        full: Tensor | None = None
        with torch.no_grad():
            if name in self.stored:
                stored = self.stored[name]
                full = convert_stored(stored.local, stored.spec, WHOLE, self.ranks)
            elif name in self.buffers:
                full = self.buffers[name]
            if self.plan.layout.pp > 1:
                if full is None:
                    device = self.ranks.device
                    full = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                full = full.contiguous()
                dist.broadcast(full, group=self.ranks.pipeline_group, group_src=stages[0])
        assert full is not None, f"{name} is held by a stage"
        return full.detach().cpu().clone()


def _container(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that a dotted name lies in, made if need be; and the name's last part."""
    *path, last = name.split(".")
    for part in path:
        child = root._modules.get(part)
        if child is None:
            child = nn.Module()
            root.add_module(part, child)
        root = child
    return root, last
