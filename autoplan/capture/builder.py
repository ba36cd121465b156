# SPDX-License-Identifier: Apache-2.0
"""torch.export's graph -> our Graph.

Values and ops come under the model's own names, tied tensors are merged, buffer updates kept. The
result is canonical (`canonical.py`); tracing is `trace.py`'s.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec

from autoplan.canonical import canonicalize
from autoplan.capture.hand_written import TARGET, call_of, name_of
from autoplan.capture.structure import InputLeaf, dtype_name
from autoplan.errors import CaptureError
from autoplan.graph import Graph, Op, Ref, TensorMeta, Value

# where an op runs and how its memory lies is not part of what is computed
_NOT_COMPUTED = frozenset(
    ("device", "layout", "pin_memory", "memory_format", "non_blocking", "generator")
)
_IGNORED = ("aten._assert", "aten.sym_constrain", "aten.sym_size", "aten.sym_numel")


def _only_checked(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Checks, and the Python numbers that only they read: no result depends on them."""
    found: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        is_number = isinstance(
            node.meta.get("val"), int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool
        )
        if str(node.target).startswith(_IGNORED) or (is_number and found.issuperset(node.users)):
            found.add(node)
    return found


class _GraphBuilder:
    """Walks the exported graph once and collects values and ops under the model's own names."""

    def __init__(
        self,
        model: nn.Module,
        exported: torch.export.ExportedProgram,
        leaves: tuple[InputLeaf, ...],
        precision: str | None,
    ) -> None:
        self.exported, self.precision = exported, precision
        self.values: dict[str, Value] = {}
        self.ops: list[Op] = []
        self.names: dict[torch.fx.Node, str | tuple[str, ...]] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.results: list[str | None] = []
        self.updates: dict[str, str] = {}
        self.first_name, self.shared = _shared_names(model)
        named = model.named_parameters(remove_duplicate=False)
        self.trainable = {name for name, p in named if p.requires_grad}
        self._leaves = iter(leaves)

    def walk(self) -> None:
        """Visits every node; values, ops, constants, results and updates are then complete."""
        signature = self.exported.graph_signature
        inputs = iter(signature.input_specs)
        left_out = _only_checked(self.exported.graph)
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                self.add_input(node, next(inputs))
            elif node.op == "call_function" and node not in left_out:
                self.add_call(node)
            elif node.op == "output":
                for spec, out in zip(signature.output_specs, node.args[0]):
                    self.add_output(spec, out)

    def add_input(self, node: torch.fx.Node, spec: InputSpec) -> None:
        """A placeholder: a parameter, buffer, constant or input, under the model's own name."""
        tensor = node.meta.get("val")
        target = str(spec.target).removeprefix("model.")
        if spec.kind == InputKind.USER_INPUT:
            leaf = next(self._leaves)
            if leaf.value is not None:
                assert isinstance(tensor, torch.Tensor), f"{leaf.value} is a tensor"
                self.names[node] = self.add_value(leaf.value, tensor, "input", False)
            return
        kinds = {
            InputKind.PARAMETER: "parameter",
            InputKind.BUFFER: "buffer",
            InputKind.CONSTANT_TENSOR: "constant",
        }
        if spec.kind not in kinds:
            raise CaptureError(
                f"the model takes a {spec.kind} ({spec.target}), which autoplan does not plan. "
                "Pass tensors and plain values."
            )
        assert isinstance(tensor, torch.Tensor), f"{spec.target} is a tensor"
        if spec.kind == InputKind.CONSTANT_TENSOR:
            name = self.add_value(f"constant:{target}", tensor, "constant", False)
            self.constants[name] = self.exported.constants[str(spec.target)]
        else:
            name = self.first_name.get(target, target)
            if name not in self.values:
                self._add_state(name, tensor, kinds[spec.kind])
        self.names[node] = name

    def _add_state(self, name: str, tensor: torch.Tensor, kind: str) -> None:
        is_parameter = kind == "parameter"
        mixed = self.precision == "bf16-mixed" and is_parameter and tensor.is_floating_point()
        requires_grad = is_parameter and name in self.trainable
        self.add_value(name, tensor, kind, requires_grad, "float32" if mixed else "")

    def add_call(self, node: torch.fx.Node) -> None:
        """A call: an op, or one of an op's several results."""
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, torch.fx.Node), "getitem reads an op"
            names = self.names[source]
            assert isinstance(names, tuple), "getitem reads an op of several outputs"
            assert isinstance(index, int), "results are numbered"
            self.names[node] = names[index]
        elif not isinstance(node.target, torch._ops.OpOverload):
            raise CaptureError(
                f"{node.target} at {_where(node)} is control flow that autoplan does not plan. "
                "Use torch.where, or a branch on shapes or configuration."
            )
        elif node.target is torch.ops.aten.as_strided.default:
            self.add_strided(node)
        elif node.target is torch.ops.autoplan.function.default:
            self.add_function(node)
        else:
            self.add_op(node)

    def add_output(self, spec: OutputSpec, out: object) -> None:
        """A result: an output or the loss, or a buffer's new value."""
        name = str(self.names[out]) if isinstance(out, torch.fx.Node) else None
        if spec.kind == OutputKind.BUFFER_MUTATION:
            self.updates[str(spec.target).removeprefix("model.")] = str(name)
        elif spec.kind == OutputKind.USER_OUTPUT:
            self.results.append(name)
        else:
            raise CaptureError(
                f"the model changes its input {spec.target!r} in place. Return the new tensor "
                "instead."
            )

    def add_value(
        self,
        name: str,
        tensor: torch.Tensor,
        kind: str,
        requires_grad: bool,
        stored_dtype: str = "",
    ) -> str:
        if name in self.values:
            name = f"{kind}:{name}"
        meta = TensorMeta(tuple(int(s) for s in tensor.shape), dtype_name(tensor.dtype))
        self.values[name] = Value(name, meta, kind, requires_grad, stored_dtype)
        return name

    def add_op(self, node: torch.fx.Node) -> None:
        target = node.target
        assert isinstance(target, torch._ops.OpOverload), f"{target} is not an ATen op"
        inputs: list[str] = []

        def encode(argument: object) -> object:
            if isinstance(argument, torch.fx.Node):
                inputs.append(str(self.names[argument]))
                return Ref(len(inputs) - 1)
            if isinstance(argument, list | tuple):
                return tuple(encode(a) for a in argument)
            return dtype_name(argument) if isinstance(argument, torch.dtype) else argument

        arguments: dict[str, object] = {}
        for i, schema in enumerate(target._schema.arguments):
            if schema.name in _NOT_COMPUTED:
                continue
            given = node.kwargs.get(schema.name, schema.default_value)
            if i < len(node.args):
                given = node.args[i]
            arguments[schema.name] = encode(given)
        if str(target).startswith("aten.as_strided"):
            inputs[0] = self._in_memory_order(node, inputs[0])
        grad = any(self.values[name].requires_grad for name in inputs)
        if target is torch.ops.aten.detach.default:
            grad = False
        outputs = self._outputs(node, grad)
        self.ops.append(
            Op(
                node.name,
                str(target),
                tuple(inputs),
                outputs,
                MappingProxyType(arguments),
                _module_path(node),
                _source(node),
            )
        )

    def add_function(self, node: torch.fx.Node) -> None:
        """A hand-written function that is kept whole; its arguments are those of the call."""
        tensors, key = node.args
        assert isinstance(tensors, list | tuple), "keep_call gives a list"
        inputs = tuple(str(self.names[t]) for t in tensors if isinstance(t, torch.fx.Node))
        call = call_of(str(key))
        grad = any(self.values[name].requires_grad for name in inputs)
        arguments = {
            "function": name_of(call.function),
            "arguments": call.arguments,
        }
        outputs = self._outputs(node, grad)
        place = (_module_path(node), _source(node))
        self.ops.append(Op(node.name, TARGET, inputs, outputs, MappingProxyType(arguments), *place))

    def _in_memory_order(self, node: torch.fx.Node, name: str) -> str:
        """What an op that reads memory by strides reads: the tensor, its dims in the order in which
        they lie there.

        Raises:
            CaptureError: The tensor is a part of another one: the rest is not in the graph.
        """
        source = node.args[0]
        assert isinstance(source, torch.fx.Node), "the first argument is the tensor"
        base, made = source.meta["val"], node.meta["val"]
        order = sorted(range(base.dim()), key=lambda d: -base.stride(d))
        scatters = "scatter" in str(node.target)
        steps = sum((size - 1) * stride for size, stride in zip(made.shape, made.stride()))
        inside = scatters or made.storage_offset() + steps < max(base.numel(), 1)
        in_order = base.permute(order).is_contiguous()
        moved = not base.is_contiguous()
        if base.storage_offset() or not inside or not in_order or (scatters and moved):
            raise CaptureError(
                f"{node.target} at {_where(node)} reads the memory of a tensor that is a part of "
                "another one. Call contiguous() before it, or use unfold or indexing."
            )
        if not moved:
            return name
        grad = self.values[name].requires_grad
        result = self.add_value(f"{node.name}.memory", base.permute(order), "activation", grad)
        arguments = MappingProxyType({"self": Ref(0), "dims": tuple(order)})
        place = (_module_path(node), _source(node))
        self.ops.append(Op(result, "aten.permute.default", (name,), (result,), arguments, *place))
        return result

    def add_strided(self, node: torch.fx.Node) -> None:
        """A view by strides, as the view by dims that it is: the same one, or windows over one dim.

        Strides speak of memory, which is another one on a rank that holds a part; so any other view
        is kept whole.
        """
        source_node = node.args[0]
        assert isinstance(source_node, torch.fx.Node), "as_strided views a tensor"
        source, result = source_node.meta["val"], node.meta["val"]
        name = str(self.names[source_node])
        had = list(zip(source.shape, source.stride()))
        wanted = list(zip(result.shape, result.stride()))
        window = _window(had, wanted)
        if result.storage_offset() != source.storage_offset() or window is None:
            self.add_op(node)
            return
        dim, step = window
        if dim < 0:
            self.names[node] = name
            return
        grad = self.values[name].requires_grad
        rank, size = len(had), int(result.shape[dim + 1])
        shape = (*result.shape[: dim + 1], *result.shape[dim + 2 :], size)
        meta = TensorMeta(tuple(int(n) for n in shape), dtype_name(result.dtype))
        windows, order = f"{node.name}.windows", [*range(dim + 1), rank, *range(dim + 1, rank)]
        self.values[windows] = Value(windows, meta, "activation", grad)
        self.names[node] = self.add_value(node.name, result, "activation", grad)
        unfold = {"self": Ref(0), "dimension": dim, "size": size, "step": step}
        permute = {"self": Ref(0), "dims": tuple(order)}
        for target, into, out, arguments in (
            ("aten.unfold.default", name, windows, unfold),
            ("aten.permute.default", windows, str(self.names[node]), permute),
        ):
            where = (_module_path(node), _source(node))
            held = MappingProxyType(arguments)
            self.ops.append(Op(out, target, (into,), (out,), held, *where))

    def _outputs(self, node: torch.fx.Node, grad: bool) -> tuple[str, ...]:
        result = node.meta["val"]
        if isinstance(result, torch.Tensor):
            grad = grad and _is_differentiable(result)
            name = self.add_value(node.name, result, "activation", grad)
            self.names[node] = name
            return (name,)
        if not isinstance(result, list | tuple):
            raise CaptureError(
                f"{node.target} at {_where(node)} gives a Python number that depends on data. "
                "Sizes must be known when planning: compute it from shapes, or keep it a tensor."
            )
        used = {user.args[1] for user in node.users if user.target is operator.getitem}
        names = tuple(
            self.add_value(f"{node.name}.{i}", t, "activation", grad and _is_differentiable(t))
            if i in used and isinstance(t, torch.Tensor)
            else ""
            for i, t in enumerate(result)
        )
        self.names[node] = names
        return names


_Dims = list[tuple[int, int]]  # (size, stride) of every dim


def _window(had: _Dims, wanted: _Dims) -> tuple[int, int] | None:
    """(dim, step) if the view is windows over that dim, put behind it; dim -1 if it is the tensor
    itself; None if it is neither.
    """

    def same(a: _Dims, b: _Dims) -> bool:
        sizes = [n for n, _ in a] == [n for n, _ in b]
        return sizes and all(n == 1 or s == t for (n, s), (_, t) in zip(a, b))

    if same(had, wanted):
        return -1, 1
    for dim, (size, stride) in enumerate(had):
        if len(wanted) != len(had) + 1 or not same(had[:dim], wanted[:dim]):
            continue
        (count, far), (width, near) = wanted[dim], wanted[dim + 1]
        step = max(far // stride, 1) if stride else 1
        fits = (count - 1) * step + width <= size and (count == 1 or far == step * stride)
        inside = near == stride or width == 1
        # unfold gives all windows there are
        every = (size - width) // step + 1 == count
        if fits and inside and every and same(had[dim + 1 :], wanted[dim + 2 :]):
            return dim, step
    return None


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path).removeprefix("model").removeprefix(".") if path else ""


def _source(node: torch.fx.Node) -> str:
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{frames[-1][0].rsplit('/', 1)[-1]}:{frames[-1][1]}" if frames else ""


def _where(node: torch.fx.Node) -> str:
    return f"{_source(node) or node.name} ({_module_path(node)})"


def build_graph(
    model: nn.Module,
    exported: torch.export.ExportedProgram,
    num_outputs: int,
    leaves: tuple[InputLeaf, ...],
    precision: str | None,
) -> tuple[Graph, Mapping[str, torch.Tensor]]:
    """The canonical graph of an exported model, and the values of its constants.

    Args:
        model: The module that was exported, under the name "model" of its wrapper.
        exported: What torch.export gave for the wrapper.
        num_outputs: Tensors of the model's own output; the loss, if there is one, follows them.
        leaves: The flattened example inputs.
        precision: None or "bf16-mixed".

    Raises:
        CaptureError: The model has control flow, data-dependent sizes, inputs that are neither
            tensors nor plain values, or inputs that it changes in place.
    """
    builder = _GraphBuilder(model, exported, leaves, precision)
    builder.walk()
    results = builder.results
    graph = canonicalize(
        Graph(
            name=type(model).__name__,
            values=builder.values,
            ops=tuple(builder.ops),
            inputs=tuple(leaf.value for leaf in leaves if leaf.value is not None),
            outputs=tuple(results[:num_outputs]),
            loss=results[num_outputs] if len(results) > num_outputs else None,
            buffer_updates=MappingProxyType(builder.updates),
            shared=builder.shared,
        )
    )
    constants = {k: v for k, v in builder.constants.items() if k in graph.values}
    return graph, MappingProxyType(constants)


def _shared_names(model: nn.Module) -> tuple[dict[str, str], tuple[tuple[str, ...], ...]]:
    """Every parameter and buffer name -> the first name of the same tensor.

    And the groups with several names.
    """
    groups: dict[int, list[str]] = {}
    for named in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in named:
            groups.setdefault(id(tensor), []).append(name)
    first = {name: names[0] for names in groups.values() for name in names}
    return first, tuple(tuple(names) for names in groups.values() if len(names) > 1)
