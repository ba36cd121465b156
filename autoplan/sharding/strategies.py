# SPDX-License-Identifier: Apache-2.0
"""Every strategy of one op on one mesh, from its rule.

A strategy assigns to each mesh axis a letter of the rule (or nothing, or one of two ways in which
sums not yet taken travel through); the layout of every operand follows by the table of DESIGN 2.
The second axis sees the sizes the first one left. `block_options` finds, over a whole graph, in how
many blocks a dim may be split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from autoplan.graph import Graph, Op
from autoplan.placements import Layout, P, Partial, Placement, R, Replicate, Shard, ShardingSpec
from autoplan.sharding.factors import OpRule

MAX_BLOCK_OPTIONS = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """What one mesh axis does to one op.

    Attributes:
        kind: "factor" (split a letter), "none" (all whole), "sum" (a Partial passes from the inputs
            to the outputs), "grad" (everything whole, gradients stay sums not yet taken).
        letter, blocks: For "factor".
        slots: The Partial inputs, for "sum".
    """

    kind: str
    letter: str = ""
    blocks: int = 1
    slots: frozenset[int] = frozenset()

    def __str__(self) -> str:
        if self.kind == "factor":
            return self.letter if self.blocks == 1 else f"{self.letter}/{self.blocks}"
        return {"none": "-", "sum": "+", "grad": "~"}[self.kind]


NONE, GRAD = Choice("none"), Choice("grad")


@dataclass(frozen=True, slots=True)
class Strategy:
    """One legal way to run an op on a mesh: a layout per tensor input and output, and the choices
    they follow from.
    """

    choices: tuple[Choice, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.choices))


def axis_choices(
    rule: OpRule, blocks: Mapping[str, tuple[int, ...]], *, sums: bool, grads: bool
) -> tuple[Choice, ...]:
    """All choices one axis has, sizes not yet considered.

    Args:
        rule: The op's rule.
        blocks: letter -> numbers of blocks it may be split in, besides 1.
        sums: Offer "sum" where the rule lets a Partial pass.
        grads: Offer "grad".
    """
    found = [NONE]
    for letter in rule.letters:
        counts = (1,) if letter in rule.contiguous else (1, *blocks.get(letter, ()))
        found += [Choice("factor", letter, b) for b in counts]
    if sums:
        found += [Choice("sum", slots=slots) for slots in rule.linear]
    if grads:
        found.append(GRAD)
    return tuple(found)


def enumerate_strategies(
    op: Op,
    rule: OpRule,
    graph: Graph,
    axis_sizes: tuple[int, ...],
    choices: tuple[tuple[Choice, ...], ...],
) -> tuple[Strategy, ...]:
    """The distinct strategies of `op` over all combinations of its axes' choices, those whose sizes
    divide.

    Args:
        op, rule: The op and its rule.
        graph: Holds the op's values (which of them carry gradients decides their layouts).
        axis_sizes: Sizes of the mesh axes, outermost first.
        choices: Per axis, the choices to try.
    """
    distinct: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], Strategy] = {}
    grads = tuple(graph.values[n].requires_grad if n else False for n in (*op.inputs, *op.outputs))
    for combination in product(*choices):
        strategy = make_strategy(rule, grads, axis_sizes, combination)
        if strategy is not None:
            distinct.setdefault((strategy.inputs, strategy.outputs), strategy)
    return tuple(distinct.values())


def make_strategy(
    rule: OpRule, grads: tuple[bool, ...], axis_sizes: tuple[int, ...], choices: tuple[Choice, ...]
) -> Strategy | None:
    """The strategy that these choices give, or None when a size does not divide.

    Args:
        rule: The op's rule.
        grads: Per tensor, inputs then outputs: it carries a gradient.
        axis_sizes: Sizes of the mesh axes, outermost first.
        choices: One per axis.
    """
    num_inputs = len(rule.inputs)
    num_tensors = num_inputs + len(rule.outputs)
    pairs: list[list[tuple[Placement, Placement]]] = [[] for _ in range(num_tensors)]
    shrunk: dict[str, int] = {}  # letter -> parts it is already split in
    for choice, size in zip(choices, axis_sizes):
        if choice.kind == "factor" and size > 1:
            if not _divides(rule, choice, size, shrunk):
                return None
            placed = _place_factor(rule, choice, shrunk)
            shrunk[choice.letter] = shrunk.get(choice.letter, 1) * size
        else:
            placed = [_place_whole(choice, t, num_inputs) for t in range(num_tensors)]
        for tensor, pair in enumerate(placed):
            pairs[tensor].append(pair)
    layouts = tuple(_layout(pair, carries) for pair, carries in zip(pairs, grads))
    return Strategy(choices, layouts[:num_inputs], layouts[num_inputs:])


def _divides(rule: OpRule, choice: Choice, size: int, shrunk: Mapping[str, int]) -> bool:
    return all(
        (full // shrunk.get(choice.letter, 1)) % (choice.blocks * size) == 0
        for *_, full in rule.places[choice.letter]
    )


def _place_factor(
    rule: OpRule, choice: Choice, shrunk: Mapping[str, int]
) -> list[tuple[Placement, Placement]]:
    num_inputs = len(rule.inputs)
    tensors = (*rule.inputs, *rule.outputs)
    where = {tensor: (dim, atom) for tensor, dim, atom, _, _ in rule.places[choice.letter]}
    in_output = any(tensor >= num_inputs for tensor in where)
    completed = choice.letter in rule.completes
    placed: list[tuple[Placement, Placement]] = []
    for tensor in range(len(tensors)):
        if tensor in where:
            dim, position = where[tensor]
            left = choice.blocks
            for atom in tensors[tensor][dim][:position]:
                left *= atom.size // shrunk.get(atom.letter or "", 1)
            placed.append((Shard(dim, left), Shard(dim, left)))
        elif tensor >= num_inputs:
            placed.append((R, R) if completed else (P, R))
        elif tensor in rule.additive and not in_output:
            placed.append((P, R))
        else:
            placed.append((R, P))
    return placed


def _place_whole(choice: Choice, tensor: int, num_inputs: int) -> tuple[Placement, Placement]:
    if choice.kind == "grad":
        return (R, P)
    if choice.kind == "sum":
        return (P, R) if tensor in choice.slots or tensor >= num_inputs else (R, P)
    return (R, R)


def _layout(pairs: list[tuple[Placement, Placement]], carries_gradient: bool) -> Layout:
    value = ShardingSpec(tuple(v for v, _ in pairs))
    if carries_gradient:
        return Layout(value, ShardingSpec(tuple(g for _, g in pairs)))
    return Layout(value, without_gradient(value))


def without_gradient(value: ShardingSpec) -> ShardingSpec:
    """The gradient spec written for a tensor that carries none: the value's, with sums whole."""
    return ShardingSpec(tuple(R if isinstance(p, Partial | Replicate) else p for p in value))


def block_options(
    graph: Graph, rules: Mapping[str, OpRule]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """op name -> letter -> numbers of blocks, besides 1, in which a neighbour may have split it.

    A split behind other factors of a dim (the sequence in a flattened batch x sequence; each third
    of a packed projection) is worth having only if the ops around can carry it; so the options
    spread along dims that belong together.
    """
    known: dict[tuple[str, int], set[int]] = {}
    changed = True
    rounds = 0
    while changed and rounds < 8:
        changed = False
        rounds += 1
        for op in graph.ops if rounds % 2 else reversed(graph.ops):
            changed |= _spread(op, rules[op.name], known)
    result: dict[str, dict[str, tuple[int, ...]]] = {}
    for op in graph.ops:
        rule = rules[op.name]
        result[op.name] = {
            letter: tuple(sorted(_relative(op, rule, letter, known) - {1}))
            for letter in rule.letters
        }
    return result


def _relative(
    op: Op, rule: OpRule, letter: str, known: Mapping[tuple[str, int], set[int]]
) -> set[int]:
    """Blocks inside the letter itself, over all places where it stands."""
    names = (*op.inputs, *op.outputs)
    found = {1}
    for tensor, dim, _, left, size in rule.places[letter]:
        for blocks in known.get((names[tensor], dim), ()):
            if blocks % left == 0 and blocks // left < size and size % (blocks // left) == 0:
                found.add(blocks // left)
    return found


def _spread(op: Op, rule: OpRule, known: dict[tuple[str, int], set[int]]) -> bool:
    names = (*op.inputs, *op.outputs)
    changed = False
    for letter in rule.letters:
        inside = {1} if letter in rule.contiguous else _relative(op, rule, letter, known)
        for tensor, dim, _, left, _ in rule.places[letter]:
            if not names[tensor]:
                continue
            options = known.setdefault((names[tensor], dim), set())
            fresh = {left * b for b in inside if left * b > 1} - options
            for blocks in sorted(fresh)[: MAX_BLOCK_OPTIONS - len(options)]:
                options.add(blocks)
                changed = True
    return changed


@dataclass(frozen=True, slots=True)
class ParameterStrategy:
    """How one parameter is stored and handed to the ops.

    Attributes:
        used: The layout the ops' conversions start from.
        spec: As stored: what optimizer states follow.
        zero: 0: stored as used. 1: stored split over data parallel ranks, gathered and reduced once
            per step. 2: as 1, but gradients are reduced after every microbatch. 3: used as stored,
            gathered by the ops where they need it.
    """

    used: Layout
    spec: ShardingSpec
    zero: int


def parameter_strategies(
    shape: tuple[int, ...],
    trainable: bool,
    wanted: tuple[Layout, ...],
    axis_sizes: tuple[int, ...],
    zero_levels: tuple[int, ...],
    padded: bool = False,
) -> tuple[ParameterStrategy, ...]:
    """The distinct ways to store a parameter whose users want these layouts.

    Args:
        shape: Global.
        trainable: It has a gradient and optimizer state.
        wanted: Layouts of the users' strategies.
        axis_sizes: (dp, tp).
        zero_levels: Which of 0, 1, 2, 3 may be chosen; a level that nothing can be split for falls
            back to 0.
        padded: Where nothing divides, the last shards are filled up.
    """
    found: dict[ParameterStrategy, None] = {}
    for used in dict.fromkeys(wanted):
        plain = _storable(used.value, shape, axis_sizes)
        split = _split_over_data_parallel(plain, used.value, shape, axis_sizes, padded)
        frozen = (
            not trainable and 3 not in zero_levels
        )  # ZeRO-1 and 2 split optimizer states, of which it has none
        if split is None or 0 in zero_levels or frozen:
            found[ParameterStrategy(used, plain, 0)] = None
        if split is None:
            continue
        for level in (1, 2):
            if level in zero_levels and trainable:
                found[ParameterStrategy(used, split, level)] = None
        if 3 in zero_levels:
            found[ParameterStrategy(Layout(split, split), split, 3)] = None
    return tuple(found)


def _storable(
    used: ShardingSpec, shape: tuple[int, ...], axis_sizes: tuple[int, ...]
) -> ShardingSpec:
    """The plain split nearest to a used value's spec: DTensors and checkpoints know no blocks."""
    spec = ShardingSpec(tuple(Shard(p.dim) if isinstance(p, Shard) else R for p in used))
    try:
        spec.local_shape(shape, axis_sizes)
    except ValueError:
        spec = ShardingSpec.replicated(len(used))
    return spec


def _split_over_data_parallel(
    plain: ShardingSpec,
    used: ShardingSpec,
    shape: tuple[int, ...],
    axis_sizes: tuple[int, ...],
    padded: bool,
) -> ShardingSpec | None:
    """`plain` with the first axis splitting the longest free dim; None when it splits already or
    nothing divides and shards are not `padded`.
    """
    if axis_sizes[0] == 1 or not isinstance(used[0], Replicate):
        return None
    taken = {p.dim for p in (*plain.placements[1:], *used.placements[1:]) if isinstance(p, Shard)}
    free = [d for d in range(len(shape)) if d not in taken]
    dims = [d for d in free if shape[d] % axis_sizes[0] == 0] or (free if padded else [])
    if not dims:
        return None
    return plain.replace(0, Shard(max(dims, key=lambda d: (shape[d], -d))))
