# SPDX-License-Identifier: Apache-2.0
"""Graph -> Graph: ATen calls that mean the same become one form, a few autoplan's own ops.

- Aliases and copies that change nothing (clone, contiguous, alias, casts to the own dtype)
  disappear.
- Every reshape (view, _unsafe_view, flatten, ...) is `aten.reshape.default` with full sizes.
- `autoplan.dropout`: dropout whose random stream the executor rules.
- `autoplan.batch_norm`: batch norm with its statistics as outputs, synchronised where the batch is
  split.
- `autoplan.cross_entropy_sum` / `_count`: a mean over labels that are not ignored is a sum over a
  count (DESIGN 8).
- `autoplan.index`: advanced indexing in which an index is `arange` over a whole dim, so that this
  dim can be split.
- `autoplan.grouped_mm`: rows times the matrix of their group, in their own order
  (`canonical_rows.py`).
- new_zeros and kin take nothing from their tensor but its dtype: they are zeros and kin.
Ops that nothing uses are dropped. In and out are Graphs; no torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoplan.canonical_names import SYNONYMS
from autoplan.canonical_rows import unsort
from autoplan.graph import Graph, Op, Ref, TensorMeta, Value, prune

_IDENTITIES = frozenset(
    {
        "aten.alias.default",
        "aten.clone.default",
        "aten.contiguous.default",
        "aten.lift_fresh_copy.default",
        "aten.lift_fresh.default",
        "aten.positive.default",
        "aten.view_as_real_copy.default",
    }
)
_RESHAPES = frozenset(
    {
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.reshape.default",
        "aten.flatten.using_ints",
        "aten.unflatten.int",
        "aten.view_copy.default",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
    }
)
_BATCH_NORMS = frozenset(
    {
        "aten._native_batch_norm_legit_functional.default",
        "aten._native_batch_norm_legit_no_training.default",
        "aten.batch_norm.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten.cudnn_batch_norm.default",
    }
)
_NEW = frozenset(f"aten.new_{name}.default" for name in ("zeros", "ones", "full", "empty"))
IGNORE_INDEX = -100


def canonicalize(graph: Graph) -> Graph:
    """The same computation in autoplan's canonical ops, without dead ones."""
    rewriter = _Rewriter(graph)
    for op in graph.ops:
        rewriter.visit(op)
    return prune(unsort(prune(rewriter.finish())))


class _Rewriter:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values: dict[str, Value] = dict(graph.values)
        self.ops: list[Op] = []
        self.alias: dict[str, str] = {}  # value -> the value that it equals
        self.maker: dict[str, Op] = {}  # value -> the rewritten op that makes it

    def meta(self, name: str) -> TensorMeta:
        return self.values[name].meta

    def emit(self, op: Op) -> None:
        self.ops.append(op)
        for name in op.outputs:
            self.maker[name] = op

    def visit(self, op: Op) -> None:
        inputs = tuple(self.alias.get(n, n) for n in op.inputs)
        op = _replace(op, inputs=inputs, target=SYNONYMS.get(op.target, op.target))
        target, arguments = op.target, op.arguments
        if target in _IDENTITIES or (
            target == "aten._to_copy.default"
            and arguments.get("dtype") in (None, self.meta(op.inputs[0]).dtype)
        ):
            self.alias[op.outputs[0]] = op.inputs[0]
        elif target == "aten.detach.default" and not self.values[op.inputs[0]].requires_grad:
            self.alias[op.outputs[0]] = op.inputs[0]
        elif target == "aten.broadcast_tensors.default":
            self.broadcast(op)
        elif target in _RESHAPES:
            self.reshape(op)
        elif (
            target == "aten.expand.default"
            and self.meta(op.inputs[0]).shape == self.meta(op.outputs[0]).shape
        ):
            self.alias[op.outputs[0]] = op.inputs[0]
        elif target in ("aten.native_dropout.default", "aten.dropout.default"):
            self.dropout(op)
        elif target in _BATCH_NORMS:
            self.batch_norm(op)
        elif target in (
            "aten.cross_entropy_loss.default",
            "aten.nll_loss_nd.default",
            "aten.nll_loss.default",
            "aten.nll_loss_forward.default",
        ):
            self.cross_entropy(op)
        elif target == "aten.index.Tensor":
            self.index(op)
        elif target == "aten.index_put.default":
            self.index_put(op)
        elif target in ("aten.cat.default", "aten.concat.default"):
            self.cat(op)
        elif target == "aten.copy.default":
            self.copy(op)
        elif target == "aten.type_as.default":
            self.cast(op, op.inputs[0], op.outputs[0])
        elif target in _NEW:
            self.new(op)
        else:
            self.emit(op)

    def cat(self, op: Op) -> None:
        """A concatenation without its empty operands (what a cache starts from), which may have
        another rank than the others; of one operand, itself.
        """
        result = op.outputs[0]
        kept = tuple(n for n in op.inputs if 0 not in self.meta(n).shape)
        if len(kept) == 1 and self.meta(kept[0]).shape == self.meta(result).shape:
            self.cast(op, kept[0], result)
            return
        if not any(self.meta(n).dtype == self.meta(result).dtype for n in kept):
            kept = op.inputs  # the dtype comes from an empty one
        tensors = tuple(Ref(i) for i in range(len(kept)))
        arguments = {"tensors": tensors, "dim": op.arguments.get("dim", 0)}
        self.emit(_replace(op, target="aten.cat.default", inputs=kept, arguments=arguments))

    def index_put(self, op: Op) -> None:
        """One value for all the elements that a mask picks is a choice between two tensors."""
        given, where = op.arguments, op.arguments["indices"]
        assert isinstance(where, tuple), "index_put takes a tuple of indices"
        mask, value = where[0], given["values"]
        if len(where) != 1 or not isinstance(mask, Ref) or not isinstance(value, Ref):
            self.emit(op)
            return
        masked, source = self.meta(op.inputs[mask.index]), self.meta(op.inputs[0])
        rest = source.shape[len(masked.shape) :]
        narrow = len(self.meta(op.inputs[value.index]).shape) <= len(rest)
        if given.get("accumulate") or masked.dtype != "bool" or not narrow:
            self.emit(op)
            return
        condition = op.inputs[mask.index]
        if rest:
            shape = (*masked.shape, *(1,) * len(rest))
            name = f"{op.name}.mask"
            self.values[name] = Value(name, TensorMeta(shape, "bool"), "activation")
            arguments = {"self": Ref(0), "shape": shape}
            wide = _replace(op, name=name, target="aten.reshape.default", arguments=arguments)
            self.emit(_replace(wide, inputs=(condition,), outputs=(name,)))
            condition = name
        self.emit(
            _replace(
                op,
                target="aten.where.self",
                inputs=(condition, op.inputs[value.index], op.inputs[0]),
                arguments={"condition": Ref(0), "self": Ref(1), "other": Ref(2)},
            )
        )

    def new(self, op: Op) -> None:
        """A factory that borrows a tensor's dtype, with the dtype written out."""
        arguments = {k: v for k, v in op.arguments.items() if k != "self"}
        arguments["dtype"] = self.meta(op.outputs[0]).dtype
        family = op.target.removeprefix("aten.new_").removesuffix(".default")
        overload = "memory_format" if family == "empty" else "default"
        self.emit(_replace(op, target=f"aten.{family}.{overload}", inputs=(), arguments=arguments))

    def broadcast(self, op: Op) -> None:
        """One expand per tensor; those that have the common shape are themselves."""
        for source, result in zip(op.inputs, op.outputs):
            if not result or self.meta(source).shape == self.meta(result).shape:
                self.alias[result] = source
            else:
                arguments = {"self": Ref(0), "size": self.meta(result).shape, "implicit": False}
                self.emit(
                    _replace(
                        op,
                        name=result,
                        target="aten.expand.default",
                        inputs=(source,),
                        outputs=(result,),
                        arguments=arguments,
                    )
                )

    def copy(self, op: Op) -> None:
        """An assignment to a whole tensor is its source, cast and expanded: `aten.copy` has no
        derivative.
        """
        slot = op.arguments["src"]
        assert isinstance(slot, Ref), "the source is a tensor"
        result, source = op.outputs[0], op.inputs[slot.index]
        if self.meta(source).shape == self.meta(result).shape:
            self.cast(op, source, result)
            return
        narrow = f"{result}.source"
        meta = TensorMeta(self.meta(source).shape, self.meta(result).dtype)
        carries = self.values[source].requires_grad and meta.is_floating
        self.values[narrow] = Value(narrow, meta, "activation", carries)
        self.cast(_replace(op, name=narrow), source, narrow)
        self.broadcast(_replace(op, inputs=(self.alias.get(narrow, narrow),)))

    def cast(self, op: Op, source: str, result: str) -> None:
        """`result` is `source` in result's own dtype."""
        dtype = self.meta(result).dtype
        if self.meta(source).dtype == dtype:
            self.alias[result] = source
            return
        arguments = {"self": Ref(0), "dtype": dtype}
        made = _replace(op, target="aten._to_copy.default", arguments=arguments)
        self.emit(_replace(made, inputs=(source,), outputs=(result,)))

    def reshape(self, op: Op) -> None:
        shape = self.meta(op.outputs[0]).shape
        if shape == self.meta(op.inputs[0]).shape:
            self.alias[op.outputs[0]] = op.inputs[0]
        else:
            self.emit(
                _replace(
                    op, target="aten.reshape.default", arguments={"self": Ref(0), "shape": shape}
                )
            )

    def dropout(self, op: Op) -> None:
        p = op.arguments.get("p")
        if not p or not op.arguments.get("train", True):
            self.alias[op.outputs[0]] = op.inputs[0]
        else:
            self.emit(
                _replace(
                    op,
                    target="autoplan.dropout",
                    arguments={"self": Ref(0), "p": p},
                    outputs=op.outputs[:1],
                )
            )

    def batch_norm(self, op: Op) -> None:
        """Batch norm with its statistics as outputs.

        Inputs: input[, weight, bias][, running_mean, running_var]. Outputs: output, new running
        mean, new running variance.
        """
        given = op.arguments
        training = bool(
            given.get(
                "training",
                given.get("train", op.target.endswith(("no_stats", "functional.default"))),
            )
        )
        if op.target.endswith("no_training.default"):
            training = False
        slots = {
            key: given.get(key)
            for key in ("input", "weight", "bias", "running_mean", "running_var")
        }
        outputs = (op.outputs[0], *(op.outputs[3:5] if len(op.outputs) == 5 else ("", "")))
        arguments = {
            **slots,
            "training": training,
            "momentum": given.get("momentum", 0.0),
            "eps": given.get("eps"),
        }
        self.emit(_replace(op, target="autoplan.batch_norm", arguments=arguments, outputs=outputs))

    def cross_entropy(self, op: Op) -> None:
        """mean -> sum / count; sum -> sum; none stays per element.

        Label smoothing needs all classes, so it stays inside the sum.
        """
        given = op.arguments
        log_probs = "nll" in op.target  # the input is log-probabilities already
        reduction = given.get("reduction", 1)
        arguments: dict[str, object] = {
            "input": given["self"],
            "target": given["target"],
            "weight": given.get("weight"),
            "ignore_index": given.get("ignore_index", IGNORE_INDEX),
            "label_smoothing": given.get("label_smoothing", 0.0),
            "log_probs": log_probs,
        }
        if reduction != 1:
            target = "autoplan.cross_entropy" if reduction == 0 else "autoplan.cross_entropy_sum"
            self.emit(_replace(op, target=target, arguments=arguments, outputs=op.outputs[:1]))
            return
        self.mean_cross_entropy(op, arguments)

    def mean_cross_entropy(self, op: Op, arguments: dict[str, object]) -> None:
        """A sum over a count; `arguments` are those of the sum."""
        given = op.arguments
        out = self.values[op.outputs[0]]
        total = Value(f"{op.name}.sum", out.meta, "activation", out.requires_grad)
        count = Value(f"{op.name}.count", out.meta, "activation", False)
        self.values[total.name], self.values[count.name] = total, count
        slots = [given["target"]] + ([given["weight"]] if given.get("weight") is not None else [])
        counted = tuple(op.inputs[s.index] for s in slots if isinstance(s, Ref))
        logits_shape = self.meta(op.inputs[0]).shape
        count_args = {
            "target": Ref(0),
            "weight": Ref(1) if len(counted) > 1 else None,
            "ignore_index": arguments["ignore_index"],
            "num_classes": logits_shape[1 if len(logits_shape) > 1 else 0],
            "dtype": out.meta.dtype,
            "probabilities": self.meta(counted[0]).is_floating,
        }
        self.emit(
            _replace(
                op,
                name=count.name,
                target="autoplan.cross_entropy_count",
                inputs=counted,
                outputs=(count.name,),
                arguments=count_args,
            )
        )
        self.emit(
            _replace(
                op,
                name=total.name,
                target="autoplan.cross_entropy_sum",
                outputs=(total.name,),
                arguments=arguments,
            )
        )
        divide = {"self": Ref(0), "other": Ref(1)}
        self.emit(
            _replace(
                op,
                target="aten.div.Tensor",
                inputs=(total.name, count.name),
                outputs=op.outputs[:1],
                arguments=divide,
            )
        )

    def index(self, op: Op) -> None:
        """Marks (source dim, output dim) pairs where an index is all of the dim, in order."""
        indices = op.arguments["indices"]
        assert isinstance(indices, tuple), "index.Tensor takes a tuple of indices"
        source = self.meta(op.inputs[0]).shape
        tensors = [(dim, ref) for dim, ref in enumerate(indices) if isinstance(ref, Ref)]
        adjacent = [d for d, _ in tensors] == list(range(tensors[0][0], tensors[-1][0] + 1))
        rank = max(len(self.meta(op.inputs[ref.index]).shape) for _, ref in tensors)
        start = tensors[0][0] if adjacent else 0
        aligned = []
        for dim, ref in tensors:
            name = op.inputs[ref.index]
            at = self.iota_dim(name)
            if at is not None and self.meta(name).shape[at] == source[dim]:
                aligned.append((dim, start + at + rank - len(self.meta(name).shape)))
        arguments = {
            "self": Ref(0),
            "indices": indices,
            "aligned": tuple(aligned),
            "first": start,
            "rank": rank,
        }
        self.emit(_replace(op, target="autoplan.index", arguments=arguments))

    def iota_dim(self, name: str) -> int | None:
        """The dim along which the value is 0, 1, 2, ... and constant along the others; None if that
        is not known.
        """
        op = self.maker.get(name)
        if op is None:
            return None
        given = op.arguments
        if op.target.startswith("aten.arange"):
            return 0 if given.get("start", 0) == 0 and given.get("step", 1) == 1 else None
        if op.target in (
            "aten.unsqueeze.default",
            "aten._to_copy.default",
            "aten.expand.default",
            "aten.reshape.default",
        ):
            before = self.iota_dim(op.inputs[0])
            if before is None:
                return None
            size = self.meta(op.inputs[0]).shape[before]
            places = [d for d, s in enumerate(self.meta(op.outputs[0]).shape) if s == size]
            if op.target == "aten.unsqueeze.default":
                at = given["dim"]
                assert isinstance(at, int), "unsqueeze takes an int"
                at += len(self.meta(op.outputs[0]).shape) if at < 0 else 0
                return before + (at <= before)
            if op.target == "aten.expand.default":
                return (
                    before
                    + len(self.meta(op.outputs[0]).shape)
                    - len(self.meta(op.inputs[0]).shape)
                )
            if op.target == "aten.reshape.default":
                return (
                    places[0]
                    if self.meta(op.inputs[0]).numel == size and len(places) == 1
                    else None
                )
            return before
        if op.target == "aten.add.Tensor" and len(op.inputs) == 1 and given.get("other") == 0:
            return self.iota_dim(op.inputs[0])
        return None

    def finish(self) -> Graph:
        graph = self.graph
        return Graph(
            graph.name,
            MappingProxyType(self.values),
            tuple(self.ops),
            graph.inputs,
            tuple(self.alias.get(o, o) if o else None for o in graph.outputs),
            self.alias.get(graph.loss, graph.loss) if graph.loss else None,
            MappingProxyType({k: self.alias.get(v, v) for k, v in graph.buffer_updates.items()}),
            graph.shared,
        )


def _replace(op: Op, **changes: object) -> Op:
    fields = {
        slot: getattr(op, slot)
        for slot in ("name", "target", "inputs", "outputs", "arguments", "module_path", "source")
    }
    fields.update(changes)
    arguments = fields["arguments"]
    assert isinstance(arguments, Mapping), "arguments are a mapping"
    fields["arguments"] = MappingProxyType(dict(arguments))
    return Op(**fields)
