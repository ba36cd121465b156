# SPDX-License-Identifier: Apache-2.0
"""ParallelModule: this rank's part of a planned model, as an ordinary nn.Module.

Parameters are DTensors under the model's own names, so optimizers, `torch.distributed.checkpoint`
and state dicts work as they do anywhere. `forward_backward` takes the global batch on every rank,
runs the plan's microbatches and leaves gradients ready; calling the module runs forward only and
gives the model's own output type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree  # checked on 2.13

from autoplan.capture import Captured, leaf_path
from autoplan.errors import ExecutionError, PlanError
from autoplan.executor.collectives import convert_stored
from autoplan.executor.meshes import Ranks, check_world, join
from autoplan.executor.parameters import StoredParameter, make_parameter, own_shard
from autoplan.executor.pipeline import Pipeline, StageRun, run_forward, train_alone
from autoplan.executor.special_ops import stream_seed
from autoplan.executor.stage import Body, build_stage
from autoplan.placements import R, ShardingSpec
from autoplan.plan import Plan

Tensor = torch.Tensor


class ParallelModule(nn.Module):
    """This rank's part of a planned model.

    Built by `autoplan.parallelize`. `parameters()` are this stage's (an empty one where a stage has
    none, so that any optimizer can be made); `state_dict()` holds what this stage owns.
    """

    def __init__(
        self, model: nn.Module, captured: Captured, plan: Plan, buffers: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.plan = plan
        self._captured = captured
        self._ranks = join(plan)
        self._program = build_stage(captured.graph, plan, self._ranks)
        self._first_name = {n: group[0] for group in captured.graph.shared for n in group}
        self._unloaded: set[str] = set()
        self._stored = self._take_parameters(model)
        self._names = self._register(model)
        self._buffers_here = self._take_buffers(model, buffers)
        self._step = 0
        self._seed = self._common_seed()
        self._pipeline = self._make_pipeline()
        self.train(model.training)

    # -- set-up
    # ---------------------------------------------------------------------------------------------------

    def _take_parameters(self, model: nn.Module) -> dict[str, StoredParameter]:
        own = dict(model.named_parameters(remove_duplicate=False))
        stored = {}
        for name, entry in self.plan.parameters.items():
            if self._ranks.stage in entry.stages and self._first_name.get(name, name) == name:
                dtype = getattr(torch, self._captured.graph.values[name].meta.dtype)
                stored[name] = make_parameter(name, own[name], entry, self._ranks, dtype)
                if own[name].is_meta:
                    self._unloaded.add(name)
        for name, group in self._tied_groups().items():
            if name in stored:
                stored[name].tied_group = group
        return stored

    def _tied_groups(self) -> dict[str, dist.ProcessGroup]:
        """Groups of the copies that several stages hold; every rank makes all of them, in one
        order.
        """
        groups: dict[str, dist.ProcessGroup] = {}
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if self._ranks.mesh is None:
            return groups
        grid = self._ranks.mesh.mesh.flatten(1)
        for name, entry in self.plan.parameters.items():
            if len(entry.stages) < 2 or self._first_name.get(name, name) != name:
                continue
            for place in range(grid.shape[1]):
                members = tuple(int(grid[s, place]) for s in entry.stages)
                if members not in made:
                    made[members] = dist.new_group(list(members))
                if dist.get_rank() in members:
                    groups[name] = made[members]
        return groups

    def _register(self, model: nn.Module) -> dict[str, str]:
        """Registers parameters under the model's own dotted names; every name of the model -> the
        stored name.
        """
        for name, stored in self._stored.items():
            _put(self, name, stored.parameter)
        if not self._stored:
            self.register_parameter(
                "nothing_to_train", nn.Parameter(torch.zeros(0, device=self._ranks.device))
            )
        names = {
            n: self._first_name.get(n, n) for n, _ in model.named_parameters(remove_duplicate=False)
        }
        return {n: first for n, first in names.items() if first in self._stored}

    def _take_buffers(self, model: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        here: dict[str, Tensor] = {}
        persistent = set(model.state_dict(keep_vars=True))
        for name, tensor in model.named_buffers(remove_duplicate=False):
            first = self._first_name.get(name, name)
            entry = self.plan.buffers.get(first)
            if entry is None or self._ranks.stage not in entry.stages or first in here:
                continue
            source = given.get(name, tensor)
            if source.is_meta:
                if name not in persistent:
                    raise PlanError(
                        f"buffer {name!r} has no values: the model is on the meta device and the buffer is not in checkpoints. Pass "
                        "parallelize(..., buffers={name: tensor, ...}), or build the model's buffers on the CPU."
                    )
                self._unloaded.add(first)
                source = torch.empty(tensor.shape, dtype=tensor.dtype)
            value = source.detach().to(self._ranks.device, copy=True)
            here[first] = value
            _put_buffer(self, first, value, persistent=name in persistent)
        for name, tensor in self._captured.constants.items():
            here[name] = tensor.to(self._ranks.device)
        return here

    def _common_seed(self) -> int:
        """One seed for all ranks: rank 0's, so that masks agree wherever layouts say they must."""
        seed = torch.tensor([torch.initial_seed() & 0x7FFFFFFFFFFFFFFF], device=self._ranks.device)
        if self._ranks.mesh is not None:
            dist.broadcast(seed, 0)
        return int(seed)

    def _make_pipeline(self) -> Pipeline | None:
        plan = self.plan
        if plan.layout.pp == 1 or plan.settings.mode != "train":
            return None
        return Pipeline(
            self._program,
            plan.schedule.name,
            plan.schedule.num_microbatches,
            plan.layout.pp,
            self._ranks,
            self._captured.graph.loss,
        )

    # -- running
    # --------------------------------------------------------------------------------------------------

    def forward_backward(self, *args: object, **kwargs: object) -> Tensor:
        """One step's forward and backward over all microbatches; gradients are added to `grad`,
        ready for an optimizer.

        Args:
            args, kwargs: The global batch, the same on every rank, in the form of the plan's
                example inputs.

        Returns:
            The loss of the whole batch, on every rank.

        Raises:
            PlanError: The inputs differ from the planned ones.
            ExecutionError: Parameters have not been loaded, or the plan is for inference.
        """
        loss = self._captured.graph.loss
        if loss is None or self.plan.settings.mode != "train":
            raise ExecutionError(
                "the plan is for inference and has no loss. Plan with mode='train'.",
                rank=self._rank,
                stage=self._ranks.stage,
            )
        run = self._begin(args, kwargs)
        total = self._pipeline.step(run) if self._pipeline is not None else train_alone(run, loss)
        for stored in self._stored.values():
            stored.end_step()
        self._update_buffers(run)
        self._step += 1
        return self._whole_loss(total)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Forward only: the model's own output object, whole, on every rank."""
        run = self._begin(args, kwargs)
        with torch.no_grad():
            made = run_forward(run, self._ranks, self.plan.layout.pp)
            made = self._share_outputs(made)
        if self.training:
            self._step += 1
        names = self._captured.graph.outputs
        return self._captured.output.rebuild([made[n] if n else None for n in names])

    def train(self, mode: bool = True) -> ParallelModule:
        """Switches what dropout and batch norm do, in this rank's bodies too; `eval()` is
        `train(False)`.
        """
        super().train(mode)
        for body in (self._program.prologue, self._program.training, self._program.full):
            if body is not None:
                body.module.train(mode)
        return self

    @property
    def _rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def _begin(self, args: tuple[object, ...], kwargs: dict[str, object]) -> StageRun:
        if self._unloaded:
            names = ", ".join(sorted(self._unloaded)[:3])
            raise ExecutionError(
                f"{len(self._unloaded)} tensors have no values yet ({names}, ...): the model was on the meta device. Call "
                "load_full_state_dict, initialize, or torch.distributed.checkpoint.load first.",
                rank=self._rank,
                stage=self._ranks.stage,
            )
        values: dict[str, Tensor] = {**self._inputs(args, kwargs), **self._buffers_here}
        for name, stored in self._stored.items():
            stored.begin_step()
            values[name] = stored.leaf
        run = StageRun(
            self._program,
            self.plan.schedule.num_microbatches,
            stream_seed(self._seed, self._step),
            values,
        )
        if self._program.prologue is not None:
            with torch.no_grad():
                values.update(run.run(self._program.prologue, 0, {}))
        return run

    def _inputs(self, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, Tensor]:
        """The given batch under the graph's input names, checked against the planned shapes."""
        leaves = self._captured.leaves
        found = {
            leaf_path(keys): given
            for keys, given in pytree.tree_flatten_with_path((args, kwargs))[0]
        }
        missing = [leaf.path for leaf in leaves if leaf.path not in found]
        besides = [path for path in found if path not in {leaf.path for leaf in leaves}]
        if missing or besides or bool(args) != self._captured.positional:
            form = "positional" if self._captured.positional else "keyword"
            differs = [f"lacks {', '.join(map(repr, missing))}"] * bool(missing) + [
                f"has {', '.join(map(repr, besides))} besides"
            ] * bool(besides)
            raise PlanError(
                f"the plan was made for the {form} inputs {[leaf.path for leaf in leaves]}, this call "
                f"{' and '.join(differs) or 'passes them otherwise'}. Plan again with these inputs."
            )
        values = {}
        for leaf in leaves:
            given = found[leaf.path]
            if leaf.value is None:
                if given != leaf.constant:
                    raise PlanError(
                        f"input {leaf.path!r} was planned as {leaf.constant!r}, this call has {given!r}. Plan again with it."
                    )
                continue
            if (
                not isinstance(given, Tensor)
                or tuple(given.shape) != leaf.shape
                or str(given.dtype) != f"torch.{leaf.dtype}"
            ):
                raise PlanError(
                    f"input {leaf.path!r} was planned as {leaf.dtype} {leaf.shape}, this call has {_differs(given, leaf.shape)}. Plan again for it."
                )
            values[leaf.value] = given.to(self._ranks.device)
        return values

    def _update_buffers(self, run: StageRun) -> None:
        if not self.training:
            return
        for buffer, name in self._captured.graph.buffer_updates.items():
            first = self._first_name.get(buffer, buffer)
            if name in run.updates and first in self._buffers_here:
                self._buffers_here[first].copy_(run.updates[name])

    def _whole_loss(self, total: Tensor | None) -> Tensor:
        layout = self._program_loss_layout()
        if total is not None and layout is not None:
            total = convert_stored(total, layout, ShardingSpec((R, R)), self._ranks)
        if self.plan.layout.pp == 1:
            assert total is not None, "one stage makes the loss"
            return total
        graph = self._captured.graph
        assert graph.loss is not None, "training has a loss"
        if total is None:
            total = torch.empty(
                (),
                dtype=getattr(torch, graph.values[graph.loss].meta.dtype),
                device=self._ranks.device,
            )
        dist.broadcast(total, group=self._ranks.pipeline_group, group_src=self.plan.layout.pp - 1)
        return total

    def _program_loss_layout(self) -> ShardingSpec | None:
        return next(
            (
                r.layout.value
                for r in self._program.training.returns
                if r.name == self._captured.graph.loss
            ),
            None,
        )

    def _share_outputs(self, made: dict[str, Tensor]) -> dict[str, Tensor]:
        """Every output on every stage: the stage that made it sends it along its pipeline group."""
        if self.plan.layout.pp == 1:
            return {n.removesuffix("@rows"): x for n, x in made.items()}
        shared: dict[str, Tensor] = {}
        made = {n.removesuffix("@rows"): x for n, x in made.items()}
        for name in dict.fromkeys(n for n in self._captured.graph.outputs if n):
            base = name.removesuffix("@rows")
            meta = self._captured.graph.values[base].meta
            holders: list[object] = [None] * self.plan.layout.pp
            dist.all_gather_object(holders, base in made, group=self._ranks.pipeline_group)
            source = max(i for i, has in enumerate(holders) if has)
            value = made.get(base)
            if value is None:
                value = torch.empty(
                    meta.shape, dtype=getattr(torch, meta.dtype), device=self._ranks.device
                )
            value = value.contiguous()
            dist.broadcast(
                value.view(torch.uint8) if value.dtype == torch.bool else value,
                group=self._ranks.pipeline_group,
                group_src=source,
            )
            shared[base] = value
        return shared

    # -- gradients and state
    # --------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their norm over the whole model is at most `max_norm`; gives
        the norm before.

        Every element counts once, wherever and however often it is held (tied copies and replicas
        included).
        """
        infinite = norm_type == float("inf")
        total = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        grads = []
        for stored in self._stored.values():
            grad = stored.parameter.grad
            if grad is None:
                continue
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            grads.append(local)
            size = local.detach().abs().to(torch.float64)
            if infinite:
                total = torch.maximum(total, size.max()) if size.numel() else total
            else:
                total = total + size.pow(norm_type).sum() / stored.num_copies
        if self._ranks.mesh is not None:
            dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM)
        norm = total if infinite else total.pow(1.0 / norm_type)
        scale = float(max_norm / (norm + 1e-6))
        if scale < 1.0:
            for local in grads:
                local.mul_(scale)
        return norm

    # type: ignore[override]
    def state_dict(self, *args: object, **kwargs: object) -> dict[str, object]:
        """What this stage owns, under every name the model's own state dict has for it: DTensors,
        and buffers whole.
        """
        result: dict[str, object] = {
            n: self._stored[first].parameter.detach() for n, first in self._names.items()
        }
        for name, entry in self.plan.buffers.items():
            first = self._first_name.get(name, name)
            if entry.persistent and first in self._buffers_here:
                result[name] = self._buffers_here[first]
        return result

    def load_state_dict(
        self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False
    ) -> object:
        """Loads what `state_dict()` gives (DTensors of this plan, or whole tensors).

        Raises:
            PlanError: With `strict`, a tensor of this stage is missing.
        """
        missing = [n for n in self.state_dict() if n not in state_dict]
        if missing and strict:
            raise PlanError(
                f"{len(missing)} tensors of this stage are not in the state dict, first {missing[0]!r}. Load all, or strict=False."
            )
        for name in self.state_dict():
            if name in state_dict:
                self._load_one(name, state_dict[name])
        return None

    def _load_one(self, name: str, value: object) -> None:
        assert isinstance(value, Tensor), "state dicts hold tensors"
        first = self._first_name.get(name, name)
        with torch.no_grad():
            if first in self._stored:
                stored = self._stored[first]
                part = (
                    value.to_local()
                    if isinstance(value, DTensor)
                    else own_shard(value, stored.spec, self._ranks)
                )
                stored.local.copy_(part)
            else:
                self._buffers_here[first].copy_(value)
        self._unloaded.discard(first)

    def load_full_state_dict(
        self, state_dict: Mapping[str, Tensor] | None, *, from_rank0: bool = False
    ) -> None:
        """Loads a state dict of the original model; each process keeps only its own shards.

        Args:
            state_dict: Whole tensors (a memory-mapped file's are read as they are needed).
            from_rank0: Only rank 0 has them (others pass None): tensors are broadcast one at a
                time, so a process holds its shards and one tensor at most.

        Raises:
            PlanError: A tensor is missing or has another shape.
        """
        entries: list[tuple[str, tuple[int, ...], str]] = [
            (n, p.shape, p.dtype)
            for n, p in self.plan.parameters.items()
            if self._first_name.get(n, n) == n
        ]
        entries += [
            (n, b.shape, b.dtype)
            for n, b in self.plan.buffers.items()
            if b.persistent and self._first_name.get(n, n) == n
        ]
        for name, shape, dtype in entries:
            value = self._find(name, state_dict) if state_dict is not None else None
            if from_rank0 and self._ranks.mesh is not None:
                value = (
                    torch.empty(shape, dtype=getattr(torch, dtype))
                    if value is None
                    else value.to(getattr(torch, dtype))
                )
                value = value.to(self._ranks.device).contiguous()
                dist.broadcast(value, 0)
            if value is None or tuple(value.shape) != tuple(shape):
                found = "is missing" if value is None else f"has shape {tuple(value.shape)}"
                raise PlanError(
                    f"{name!r} {found} in the state dict; the plan has {tuple(shape)}. Load the state dict of the planned model."
                )
            if name in self._stored or name in self._buffers_here:
                self._load_one(name, value)

    def _find(self, name: str, state_dict: Mapping[str, Tensor]) -> Tensor | None:
        group = next((g for g in self._captured.graph.shared if name in g), (name,))
        return next((state_dict[n] for n in group if n in state_dict), None)

    def initialize(self, init_fn: Callable[[str, Tensor], None], *, seed: int = 0) -> None:
        """Initialises parameters shard by shard: `init_fn(name, tensor)` fills one whole tensor in
        place at a time.

        The result does not depend on the plan: each tensor has its own stream, from `seed` and its
            place in the model.
        """
        for number, (name, entry) in enumerate(self.plan.parameters.items()):
            if name not in self._stored:
                continue
            with torch.random.fork_rng(), torch.no_grad():
                torch.manual_seed(stream_seed(seed, number))
                full = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
                init_fn(name, full)
                self._load_one(name, full.to(self._ranks.device))

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state dict on every rank, on the CPU; loads with strict=True into the
        original class.
        """
        result: dict[str, Tensor] = {}
        for name, entry in self.plan.parameters.items():
            first = self._first_name.get(name, name)
            if first != name:
                result[name] = result[first]
                continue
            result[name] = self._gather(name, tuple(entry.shape), entry.dtype, entry.stages)
        for name, buffer in self.plan.buffers.items():
            if buffer.persistent:
                first = self._first_name.get(name, name)
                result[name] = (
                    result[first]
                    if first in result
                    else self._gather(first, tuple(buffer.shape), buffer.dtype, buffer.stages)
                )
        return result

    def _gather(
        self, name: str, shape: tuple[int, ...], dtype: str, stages: tuple[int, ...]
    ) -> Tensor:
        full: Tensor | None = None
        with torch.no_grad():
            if name in self._stored:
                stored = self._stored[name]
                full = convert_stored(stored.local, stored.spec, ShardingSpec((R, R)), self._ranks)
            elif name in self._buffers_here:
                full = self._buffers_here[name]
            if self.plan.layout.pp > 1:
                full = (
                    torch.empty(shape, dtype=getattr(torch, dtype), device=self._ranks.device)
                    if full is None
                    else full.contiguous()
                )
                dist.broadcast(full, group=self._ranks.pipeline_group, group_src=stages[0])
        assert full is not None, f"{name} is held by a stage"
        return full.detach().cpu().clone()

    def print_readable(self) -> str:
        """The code this rank runs for one training microbatch, collectives by name."""
        body: Body = self._program.training
        return body.module.print_readable(print_output=False)


def _differs(given: object, planned: tuple[int, ...]) -> str:
    """What a call has instead of a planned tensor, with the dims that differ."""
    if not isinstance(given, Tensor):
        return f"a {type(given).__name__}"
    text = f"{str(given.dtype).removeprefix('torch.')} {tuple(given.shape)}"
    pairs = enumerate(zip(given.shape, planned)) if given.dim() == len(planned) else ()
    dims = [f"dim {d} is {here}, planned {then}" for d, (here, then) in pairs if here != then]
    return f"{text} ({', '.join(dims)})" if dims else text


def _container(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    *path, last = name.split(".")
    for part in path:
        child = root._modules.get(part)
        if child is None:
            child = nn.Module()
            root.add_module(part, child)
        root = child
    return root, last


def _put(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    container, last = _container(root, name)
    container.register_parameter(last, parameter)


def _put_buffer(root: nn.Module, name: str, value: Tensor, *, persistent: bool) -> None:
    container, last = _container(root, name)
    container.register_buffer(last, value, persistent=persistent)


__all__ = ["ParallelModule", "Ranks", "check_world"]
