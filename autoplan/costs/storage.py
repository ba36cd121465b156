# SPDX-License-Identifier: Apache-2.0
"""What storing a parameter costs: seconds and bytes of every way its shards may lie.

In: a parameter, the layouts its users want, the mesh, the user's wishes. Out: a `ParameterTable`
over the storage choices of `sharding/strategies.py`: gathers, gradient reductions and the
optimizer's update per step; parameters, gradients and optimizer state per device.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from autoplan.costs.compute import kernel_time
from autoplan.costs.tables import MeshCosts, ParameterTable, Wishes
from autoplan.graph import Value
from autoplan.placements import Layout, Shard, ShardingSpec
from autoplan.sharding.resharding import Move, transition
from autoplan.sharding.strategies import ParameterStrategy, parameter_strategies
from autoplan.units import DTYPE_BYTES

# tensors like the parameter that the optimizer keeps
STATE_TENSORS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1}
# reads and writes of such tensors in one step
STEP_PASSES = {"adamw": 7, "adam": 7, "sgd": 3, "sgd-momentum": 5}
UPDATE_FLOP = 4.0  # of an update, per byte of the shard: memory binds it, not these


class PinnedPlacementError(ValueError):
    """A pinned placement is not among what the parameter's users allow."""


def parameter_table(
    value: Value, wanted: tuple[Layout, ...], mesh: MeshCosts, wishes: Wishes
) -> ParameterTable:
    """Seconds and bytes of every storage choice of one parameter.

    Args:
        value: The parameter.
        wanted: Layouts in which its users may want it; none: whole everywhere.
        mesh: The stage's.
        wishes: Training, optimizer, ZeRO levels and pinned placements.

    Raises:
        PinnedPlacementError: A pinned placement is not among the choices.
    """
    whole = ShardingSpec.replicated(len(mesh.axis_sizes))
    trainable = value.requires_grad and wishes.training
    offered = parameter_strategies(
        value.meta.shape,
        value.requires_grad,
        wanted or (Layout(whole, whole),),
        mesh.axis_sizes,
        wishes.zero_levels,
        padded=wishes.runtime.pads_shards,
    )
    table = ParameterTable(value, _pinned(value.name, offered, mesh, wishes))
    for strategy in table.strategies:
        _add_bytes(table, strategy, mesh, wishes, trainable)
        _add_seconds(table, strategy, mesh, wishes, trainable)
    return table


def _stored_bytes(value: Value) -> int:
    """Bytes of the whole parameter as it is stored: mixed precision stores it wider than used."""
    return value.meta.numel * DTYPE_BYTES[value.stored_dtype or value.meta.dtype]


def _shard_bytes(value: Value, spec: ShardingSpec, mesh: MeshCosts) -> float:
    """Bytes of the largest shard: of a dim that does not divide, the ceiling of its share."""
    factor = 1.0
    for placement, num in zip(spec, mesh.stored_sizes):
        if isinstance(placement, Shard):
            size = value.meta.shape[placement.dim]
            factor *= -(-size // num) * num / size
    return factor * _stored_bytes(value) / spec.num_shards(mesh.stored_sizes)


def _is_copied(value: Value, strategy: ParameterStrategy) -> bool:
    """Whether what is used is a tensor of its own beside what is stored."""
    return strategy.spec != strategy.used.value or bool(value.stored_dtype)


def _add_bytes(
    table: ParameterTable,
    strategy: ParameterStrategy,
    mesh: MeshCosts,
    wishes: Wishes,
    trainable: bool,
) -> None:
    value, sizes = table.value, mesh.axis_sizes
    stored = _shard_bytes(value, strategy.spec, mesh)
    in_use = value.meta.size_bytes / strategy.used.value.num_shards(sizes)
    table.parameter_bytes.append(stored + (in_use if _is_copied(value, strategy) else 0.0))
    gradient = 0.0
    if trainable and strategy.zero >= 2:
        gradient = stored
    elif trainable:
        gradient = _stored_bytes(value) / strategy.used.grad.num_shards(sizes)
        if strategy.zero == 1 and strategy.spec != strategy.used.grad:
            gradient += stored  # the reduced shard beside the gradient in full
    table.gradient_bytes.append(gradient)
    table.state_bytes.append(stored * (STATE_TENSORS[wishes.optimizer] if trainable else 0))


def _add_seconds(
    table: ParameterTable,
    strategy: ParameterStrategy,
    mesh: MeshCosts,
    wishes: Wishes,
    trainable: bool,
) -> None:
    value, sizes = table.value, mesh.axis_sizes
    gather_s = sum(
        mesh.collective(move, size).time_s for move, size in gather_moves(value, strategy, sizes)
    )
    gradient_s = reduce_s = optimizer_s = 0.0
    if trainable:
        reduced = sum(
            mesh.collective(move, size).time_s
            for move, size in gradient_moves(value, strategy, sizes, wishes.runtime.gradient_dtype)
        )
        gradient_s, reduce_s = (0.0, reduced) if reduces_each(strategy) else (reduced, 0.0)
    stored = _shard_bytes(value, strategy.spec, mesh)
    in_use = value.meta.size_bytes / strategy.used.value.num_shards(sizes)
    device = mesh.profiles.device
    passes = STEP_PASSES[wishes.optimizer] * device.update_factor if trainable else 0.0
    cast_bytes = stored + in_use if value.stored_dtype else 0.0
    if passes or cast_bytes:
        optimizer_s = kernel_time(
            device,
            "memory",
            UPDATE_FLOP * stored,
            passes * stored + cast_bytes,
            value.stored_dtype or value.meta.dtype,
        ).time_s
    if trainable:
        optimizer_s += device.host.parameter_s
    table.optimizer_s.append(optimizer_s)
    accumulate_s = 0.0
    if trainable and strategy.zero < 3:
        # a microbatch's gradient and the sum so far are read, the sum is written
        summed = _summed_bytes(value, wishes.runtime.gradient_dtype)
        moved = in_use + 2 * summed / strategy.used.grad.num_shards(sizes)
        accumulate_s = kernel_time(device, "memory", 0.0, moved, value.meta.dtype).time_s
    table.accumulate_s.append(accumulate_s)
    table.gather_s.append(gather_s)
    table.gradient_s.append(gradient_s)
    table.step_s.append(gather_s + gradient_s + optimizer_s)
    table.reduce_s.append(reduce_s)


def gather_moves(
    value: Value, strategy: ParameterStrategy, axis_sizes: tuple[int, ...]
) -> Iterator[tuple[Move, float]]:
    """(move, bytes of the whole tensor) from what is stored of a parameter to what is used, once a
    step, beside the conversions of its uses.

    Args:
        value: The parameter.
        strategy: How it is stored and used.
        axis_sizes: Of the mesh.
    """
    if _is_copied(value, strategy):
        for move in transition(strategy.spec, strategy.used.value, axis_sizes):
            yield move, value.meta.size_bytes


def gradient_moves(
    value: Value, strategy: ParameterStrategy, axis_sizes: tuple[int, ...], dtype: str = ""
) -> Iterator[tuple[Move, float]]:
    """(move, bytes of the whole tensor) from a parameter's summed gradient to what is stored, of a
    parameter that is trained; how often is `reduces_each`'s.

    Args:
        value: The parameter.
        strategy: How it is stored and used.
        axis_sizes: Of the mesh.
        dtype: In which gradients are summed; "" as they are stored.
    """
    if value.requires_grad:
        size = _summed_bytes(value, dtype)
        for move in transition(strategy.used.grad, strategy.spec, axis_sizes):
            yield move, size


def _summed_bytes(value: Value, dtype: str) -> float:
    """Bytes of a parameter's summed gradient; "" as it is stored."""
    return float(value.meta.numel * DTYPE_BYTES[dtype] if dtype else _stored_bytes(value))


def reduces_each(strategy: ParameterStrategy) -> bool:
    """Whether gradients are reduced after every microbatch, as ZeRO-2's, and not once a step."""
    return strategy.zero == 2


def _pinned(
    name: str, offered: tuple[ParameterStrategy, ...], mesh: MeshCosts, wishes: Wishes
) -> tuple[ParameterStrategy, ...]:
    """Of the choices offered, those that the first pin on this name allows."""
    for pattern, spec in wishes.placements:
        if fnmatchcase(name, pattern):
            kept = tuple(s for s in offered if spec in (str(s.used.value), str(s.spec)))
            if not kept:
                dp, tp = mesh.axis_sizes
                allowed = ", ".join(sorted({str(s.used.value) for s in offered}))
                raise PinnedPlacementError(
                    f"{name} cannot be placed as {spec} on a mesh of dp={dp} x tp={tp}; "
                    f"its users allow {allowed}"
                )
            return kept
    return offered
