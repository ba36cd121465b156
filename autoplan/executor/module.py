# SPDX-License-Identifier: Apache-2.0
"""ParallelModule: this rank's part of a planned model, running, as an ordinary nn.Module.

Parameters are DTensors under the model's own names, so optimizers, `torch.distributed.checkpoint`
and state dicts work as they do anywhere. `forward_backward` takes the global batch on every rank,
runs the plan's microbatches and leaves gradients ready; calling the module runs forward only and
gives the model's own output type. Its tensors are held and loaded by `state.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm  # these three: checked on 2.13
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils import _pytree as pytree  # checked on 2.13

from autoplan.capture import Captured, InputLeaf, leaf_path
from autoplan.errors import ExecutionError, PlanError
from autoplan.executor.collectives import convert_stored
from autoplan.executor.meshes import Ranks, check_world, join
from autoplan.executor.pipeline import Pipeline, StageRun, run_forward, train_alone
from autoplan.executor.special_ops import stream_seed
from autoplan.executor.stage import build_stage
from autoplan.executor.state import WHOLE, StageState
from autoplan.placements import ShardingSpec
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
        self._state = StageState(model, captured, plan, self._ranks, buffers)
        self._state.register(self)
        self._step = 0
        self._seed = self._common_seed()
        self._pipeline = self._make_pipeline()
        self._fixed_by_eval = _fixed_by_eval(model)
        self.train(model.training)

    # -- set-up

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

    def forward_backward(self, *args: object, **kwargs: object) -> Tensor:
        """One step's forward and backward over all microbatches.

        Gradients are added to `grad`, ready for an optimizer.

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
        for stored in self._state.stored.values():
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
        """Switches what dropout and batch norm do, in this rank's bodies too.

        `eval()` is `train(False)`.

        Raises:
            ExecutionError: The model was captured in eval mode, which left its dropout out of the
                graph and fixed its batch norms: there is nothing to switch back on.
        """
        if mode and self._fixed_by_eval:
            name, kind = self._fixed_by_eval[0]
            raise ExecutionError(
                f"train(True) cannot bring back {len(self._fixed_by_eval)} modules (first {name!r},"
                f" a {kind}): the model was in eval mode when it was captured, which left dropout "
                "and batch statistics out of the plan. Call model.train() before optimize and "
                "parallelize.",
                rank=self._rank,
                stage=self._ranks.stage,
            )
        super().train(mode)
        for body in (self._program.prologue, self._program.training, self._program.full):
            if body is not None:
                body.module.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NoReturn:
        """Refuses what `nn.Module` does to all tensors at once: `to`, `half`, `cuda` and the like.

        Raises:
            ExecutionError: Always; the rewritten ops and the optimizer's tensors would not follow.
        """
        raise ExecutionError(
            "to(), half(), cuda() and the like do not work on a parallel module: its parameters "
            f"live on {self._ranks.device} in the plan's shards and dtypes. Convert the model "
            "before autoplan.optimize, or plan with precision=...",
            rank=self._rank,
            stage=self._ranks.stage,
        )

    @property
    def _rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def _begin(self, args: tuple[object, ...], kwargs: dict[str, object]) -> StageRun:
        unloaded = sorted(self._state.unloaded)
        if unloaded:
            names = ", ".join(unloaded[:3]) + ", ..." * (len(unloaded) > 3)
            raise ExecutionError(
                f"{len(unloaded)} tensors have no values yet ({names}): the model was on the meta "
                "device. Call load_full_state_dict or initialize first; or load_state_dict, with "
                "what torch.distributed.checkpoint.load read.",
                rank=self._rank,
                stage=self._ranks.stage,
            )
        values: dict[str, Tensor] = {**self._inputs(args, kwargs), **self._state.buffers}
        for name, stored in self._state.stored.items():
            stored.begin_step()
            values[name] = stored.leaf
        seed = stream_seed(self._seed, self._step)
        run = StageRun(self._program, self.plan.schedule.num_microbatches, seed, values)
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
            differs = [f"lacks {', '.join(map(repr, missing))}"] * bool(missing)
            differs += [f"has {', '.join(map(repr, besides))} besides"] * bool(besides)
            raise PlanError(
                f"the plan was made for the {form} inputs {[leaf.path for leaf in leaves]}, this "
                f"call {' and '.join(differs) or 'passes them otherwise'}. Plan again with these "
                "inputs."
            )
        values = {}
        for leaf in leaves:
            given = found[leaf.path]
            if leaf.value is None:
                if given != leaf.constant:
                    raise PlanError(
                        f"input {leaf.path!r} was planned as {leaf.constant!r}, this call has "
                        f"{given!r}. Plan again with it."
                    )
                continue
            if not _is_planned(given, leaf):
                raise PlanError(
                    f"input {leaf.path!r} was planned as {leaf.dtype} {leaf.shape}, this call has "
                    f"{_differs(given, leaf.shape)}. Plan again for it."
                )
            assert isinstance(given, Tensor), "planned tensors are tensors"
            values[leaf.value] = given.to(self._ranks.device)
        return values

    def _update_buffers(self, run: StageRun) -> None:
        if not self.training:
            return
        for buffer, name in self._captured.graph.buffer_updates.items():
            first = self._state.first(buffer)
            if name in run.updates and first in self._state.buffers:
                self._state.buffers[first].copy_(run.updates[name])

    def _whole_loss(self, total: Tensor | None) -> Tensor:
        layout = self._program_loss_layout()
        if total is not None and layout is not None:
            total = convert_stored(total, layout, WHOLE, self._ranks)
        if self.plan.layout.pp == 1:
            assert total is not None, "one stage makes the loss"
            return total
        graph = self._captured.graph
        assert graph.loss is not None, "training has a loss"
        if total is None:
            dtype = getattr(torch, graph.values[graph.loss].meta.dtype)
            total = torch.empty((), dtype=dtype, device=self._ranks.device)
        dist.broadcast(total, group=self._ranks.pipeline_group, group_src=self.plan.layout.pp - 1)
        return total

    def _program_loss_layout(self) -> ShardingSpec | None:
        returns = self._program.training.returns
        loss = self._captured.graph.loss
        return next((r.layout.value for r in returns if r.name == loss), None)

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

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their norm over the whole model is at most `max_norm`.

        Every element counts once, wherever and however often it is held (tied copies and replicas
        included).

        Returns:
            The norm before.
        """
        infinite = norm_type == float("inf")
        total = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        grads = []
        for stored in self._state.stored.values():
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

    def state_dict(  # type: ignore[override] # torch's overload returns the given destination's type
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """What this stage owns, under every name the model's own state dict has for it.

        Args:
            destination, prefix, keep_vars: As of `nn.Module.state_dict`.

        Returns:
            DTensors of the parameters (plain tensors on one device), and buffers whole.
        """
        result = {} if destination is None else destination
        for name, tensor in self._state.own_tensors():
            result[prefix + name] = tensor if keep_vars else tensor.detach()
        return result

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Loads what `state_dict()` gives (DTensors of this plan), or whole tensors.

        Args:
            state_dict: Names and tensors; those of other stages may be among them.
            strict: Refuse missing and unexpected names, before anything is loaded.
            assign: Has no effect: values are copied to where the plan put the parameters.

        Returns:
            missing_keys: names of this stage that are not there; unexpected_keys: names that the
            planned model does not have.

        Raises:
            PlanError: With `strict`, a tensor of this stage is missing, or one is not the model's.
        """
        return self._state.load(state_dict, strict=strict)

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
        self._state.load_full(state_dict, from_rank0=from_rank0)

    def initialize(self, init_fn: Callable[[str, Tensor], None], *, seed: int = 0) -> None:
        """Initialises parameters shard by shard.

        The result does not depend on the plan: each tensor has its own stream, from `seed` and its
        place in the model.

        Args:
            init_fn: init_fn(name, tensor) fills one whole tensor in place at a time.
            seed: Of all streams.
        """
        self._state.initialize(init_fn, seed)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state dict on every rank, on the CPU.

        It loads with strict=True into the original class.
        """
        return self._state.gather()

    def print_readable(self) -> str:
        """The code this rank runs for one training microbatch, collectives by name."""
        return self._program.training.module.print_readable(print_output=False)


def _fixed_by_eval(model: nn.Module) -> list[tuple[str, str]]:
    """(name, class) of the modules of a model in eval mode that do something else in training."""
    if model.training:
        return []
    return [
        (name, type(module).__name__)
        for name, module in model.named_modules()
        if not module.training
        and (
            (isinstance(module, _DropoutNd) and module.p > 0)
            or (isinstance(module, nn.MultiheadAttention) and module.dropout > 0)
            or isinstance(module, _BatchNorm)
        )
    ]


def _is_planned(given: object, leaf: InputLeaf) -> bool:
    """A given leaf has the planned shape and dtype."""
    return (
        isinstance(given, Tensor)
        and tuple(given.shape) == leaf.shape
        and str(given.dtype) == f"torch.{leaf.dtype}"
    )


def _differs(given: object, planned: tuple[int, ...]) -> str:
    """What a call has instead of a planned tensor, with the dims that differ."""
    if not isinstance(given, Tensor):
        return f"a {type(given).__name__}"
    text = f"{str(given.dtype).removeprefix('torch.')} {tuple(given.shape)}"
    pairs = enumerate(zip(given.shape, planned)) if given.dim() == len(planned) else ()
    dims = [f"dim {d} is {here}, planned {then}" for d, (here, then) in pairs if here != then]
    return f"{text} ({', '.join(dims)})" if dims else text


__all__ = ["ParallelModule", "Ranks", "check_world"]
