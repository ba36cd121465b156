# SPDX-License-Identifier: Apache-2.0
"""A rule tried in numbers: do the parts of an op's operands make up its result and its gradients?

One call is run whole, and then on the parts of two and of two times two pretend ranks, under every
strategy that the rule gives, all in this process. What a user registers is believed only then.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from autoplan.graph import Op, Ref, TensorMeta
from autoplan.placements import Partial, Shard, ShardingSpec
from autoplan.sharding.factors import OpRule
from autoplan.sharding.rules import example_shapes, resolve
from autoplan.sharding.strategies import Strategy, axis_choices, make_strategy

Tensor = torch.Tensor
Place = tuple[int, ...]
MESHES = ((2,), (2, 2))
SIZE = 4  # of every letter, so that it divides by both axes


def try_rule(target: str, text: str, example: tuple[object, ...] | None) -> None:
    """Returns if the rule holds for one small call.

    Args:
        target: "namespace.name", callable on the CPU as torch.ops.namespace.name.
        text: The rule, registered already.
        example: Arguments of the call, on the CPU; by default random float64 tensors, one per
            operand, every dim of size 4.

    Raises:
        ValueError: There is no such op, it cannot be called so, or the parts do not make up the
            whole; the message shows the first that does not.
    """
    namespace, name = target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        raise ValueError(
            f"there is no op {namespace}::{name}. Define it before its rule is registered, in every"
            " process."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        given = example
        if given is None:
            shapes = example_shapes(text, SIZE)
            given = tuple(torch.rand(shape, dtype=torch.float64) for shape in shapes)
        trial = _Trial(packet, text, given)
        for sizes in MESHES:
            for strategy in trial.strategies(sizes):
                trial.check(strategy, sizes)


class _Trial:
    def __init__(self, packet: Any, text: str, given: tuple[object, ...]) -> None:
        self.packet, self.text = packet, text
        self.inputs: list[Tensor] = []
        self.args = tuple(self._encode(a) for a in given)
        try:
            self.outputs = _results(packet(*self._fill(self.inputs)))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            shapes = ", ".join(str(tuple(x.shape)) for x in self.inputs)
            raise ValueError(
                f"{packet} cannot be tried on tensors of shapes {shapes}: {error}. "
                "Pass example=(...), small arguments that it takes."
            ) from error
        self.rule = self._rule()
        self.ups = [torch.rand_like(y) if y.is_floating_point() else None for y in self.outputs]
        self.grads: list[Tensor | None] = [None] * len(self.inputs)
        try:
            self.grads = self._differentiate(self.inputs)[1]
        except (
            RuntimeError
        ):  # the op has no derivative: a model that trains through it fails anyway
            self.ups = [None] * len(self.outputs)

    def _encode(self, argument: object) -> object:
        if isinstance(argument, Tensor):
            self.inputs.append(argument.detach())
            return Ref(len(self.inputs) - 1)
        if isinstance(argument, list | tuple):
            return tuple(self._encode(a) for a in argument)
        return argument

    def _fill(self, inputs: list[Tensor]) -> tuple[Any, ...]:
        def fill(argument: object) -> Any:
            if isinstance(argument, Ref):
                return inputs[argument.index]
            return [fill(a) for a in argument] if isinstance(argument, tuple) else argument

        return tuple(fill(a) for a in self.args)

    def _rule(self) -> OpRule:
        namespace, name = str(self.packet).split(".")
        ins, outs = tuple(map(_meta, self.inputs)), tuple(map(_meta, self.outputs))
        names = tuple(f"x{i}" for i in range(len(ins)))
        arguments: Mapping[str, object] = MappingProxyType(dict(enumerate_args(self.args)))
        results = tuple(f"y{i}" for i in range(len(outs)))
        op = Op("op", f"{namespace}.{name}.default", names, results, arguments)
        rule = resolve(op, ins, outs)
        if rule is None:
            shapes = f"{[m.shape for m in ins]} -> {[m.shape for m in outs]}"
            raise ValueError(
                f"rule {self.text!r} of {self.packet} does not fit its tensors, {shapes}: as many "
                "operands and results as the op has, a letter for every dim."
            )
        sizes: dict[str, int] = {}
        for dims, meta in zip((*rule.inputs, *rule.outputs), (*ins, *outs)):
            for (atom,), size in zip(dims, meta.shape):
                if atom.letter and sizes.setdefault(atom.letter, size) != size:
                    raise ValueError(
                        f"rule {self.text!r} of {self.packet}: {atom.letter} has the sizes "
                        f"{sizes[atom.letter]} and {size}; dims of one letter are equally long."
                    )
        return rule

    def strategies(self, sizes: tuple[int, ...]) -> Iterator[Strategy]:
        """Every distinct strategy of the rule on a mesh."""
        grads = tuple(x.is_floating_point() for x in (*self.inputs, *self.outputs))
        choices = axis_choices(self.rule, {}, sums=True, grads=True)
        for combination in itertools.product(choices, repeat=len(sizes)):
            strategy = make_strategy(self.rule, grads, sizes, combination)
            if strategy is not None:
                yield strategy

    def _differentiate(
        self, inputs: list[Tensor], ups: list[Tensor | None] | None = None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Outputs, and the inputs' gradients; None where none flows."""
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        outputs = _results(self.packet(*self._fill(leaves)))
        given = self.ups if ups is None else ups
        pairs = [(y, u) for y, u in zip(outputs, given) if u is not None and y.requires_grad]
        wanted = [x for x in leaves if x.requires_grad]
        if not pairs or not wanted:
            return outputs, [None] * len(inputs)
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs], wanted, [u for _, u in pairs], allow_unused=True
            )
        )
        return outputs, [next(found) if x.requires_grad else None for x in leaves]

    def check(self, strategy: Strategy, sizes: tuple[int, ...]) -> None:
        """Raises ValueError where the parts of a strategy do not make up the whole."""
        places = list(itertools.product(*(range(size) for size in sizes)))
        ins = [_parts(x, at.value, sizes) for x, at in zip(self.inputs, strategy.inputs)]
        ups = [
            None if u is None else _parts(u, at.grad, sizes)
            for u, at in zip(self.ups, strategy.outputs)
        ]
        outs: list[dict[Place, Tensor]] = [{} for _ in self.outputs]
        grads: list[dict[Place, Tensor]] = [{} for _ in self.inputs]
        for place in places:
            here = [None if u is None else u[place] for u in ups]
            try:
                results, back = self._differentiate([part[place] for part in ins], here)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise ValueError(f"{self._split(strategy)}, the op fails: {error}") from error
            for i, y in enumerate(results):
                outs[i][place] = y.detach()
            for i, g in enumerate(back):
                if g is not None:
                    grads[i][place] = g
        for i, (parts, at) in enumerate(zip(outs, strategy.outputs)):
            self._compare(f"result {i}", parts, self.outputs[i], at.value, sizes, strategy)
        for i, (parts, at) in enumerate(zip(grads, strategy.inputs)):
            whole = self.grads[i]
            if whole is not None and parts:
                self._compare(
                    f"the gradient of operand {i}", parts, whole, at.grad, sizes, strategy
                )

    def _compare(
        self,
        what: str,
        parts: Mapping[Place, Tensor],
        whole: Tensor,
        spec: ShardingSpec,
        sizes: tuple[int, ...],
        strategy: Strategy,
    ) -> None:
        summed = [a for a, p in enumerate(spec) if isinstance(p, Partial)]
        for place in parts:
            group = [q for q in parts if all(q[a] == place[a] for a in _others(summed, place))]
            found = torch.stack([parts[q] for q in group]).sum(0) if summed else parts[place]
            wanted = _part(whole.detach(), spec, sizes, place)
            if found.shape != wanted.shape:
                raise ValueError(
                    f"{self._split(strategy)}, {what} of rank {place} has shape "
                    f"{tuple(found.shape)}; its part of the whole has {tuple(wanted.shape)}."
                )
            off = ~torch.isclose(
                found.double(), wanted.double(), rtol=_near(whole), atol=_near(whole)
            )
            if bool(off.any()):
                at = tuple(int(i) for i in off.nonzero()[0])
                raise ValueError(
                    f"{self._split(strategy)}, {what} is wrong at {at} of rank {place}: "
                    f"{float(wanted[at]):.6g} on one device, {float(found[at]):.6g} from the parts."
                )

    def _split(self, strategy: Strategy) -> str:
        layouts = ", ".join(str(x.value) for x in strategy.inputs)
        results = ", ".join(str(x.value) for x in strategy.outputs)
        return (
            f"rule {self.text!r} of {self.packet} does not hold: with the axes assigned to "
            f"({strategy}), that is {layouts} -> {results}"
        )


def enumerate_args(args: tuple[object, ...]) -> Iterator[tuple[str, object]]:
    """Arguments by made-up names."""
    return ((f"argument{i}", a) for i, a in enumerate(args))


def _others(summed: list[int], place: Place) -> list[int]:
    return [a for a in range(len(place)) if a not in summed]


def _meta(x: Tensor) -> TensorMeta:
    return TensorMeta(tuple(x.shape), str(x.dtype).removeprefix("torch."))


def _results(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    assert isinstance(result, list | tuple), "an op gives a tensor or several"
    return list(result)


def _near(whole: Tensor) -> float:
    return 1e-9 if whole.dtype == torch.float64 else 1e-4


def _part(x: Tensor, spec: ShardingSpec, sizes: tuple[int, ...], place: Place) -> Tensor:
    for placement, size, at in zip(spec, sizes, place):
        if isinstance(placement, Shard):
            x = x.chunk(size, placement.dim)[at]
    return x


def _parts(x: Tensor, spec: ShardingSpec, sizes: tuple[int, ...]) -> dict[Place, Tensor]:
    """What each rank holds; of a sum not yet taken, random summands."""
    summed = [a for a, p in enumerate(spec) if isinstance(p, Partial)]
    keys = list(itertools.product(*(range(sizes[a]) for a in summed)))
    summands = {key: torch.rand_like(x) for key in keys[:-1]}
    summands[keys[-1]] = x - sum(summands.values()) if summands else x
    return {
        place: _part(summands[tuple(place[a] for a in summed)], spec, sizes, place)
        for place in itertools.product(*(range(size) for size in sizes))
    }
