# SPDX-License-Identifier: Apache-2.0
"""torch.export's graph -> our Graph: values and ops under the model's own names, tied tensors
merged, buffer updates kept.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind

from autoplan.canonical import canonicalize
from autoplan.capture.structure import InputLeaf, dtype_name
from autoplan.errors import CaptureError
from autoplan.graph import Graph, Op, Ref, TensorMeta, Value

_IGNORED = ("aten._assert", "aten.sym_constrain", "aten.sym_size", "aten.sym_numel")


class _GraphBuilder:
    """Walks the exported graph once and collects values and ops under the model's own names."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.ops: list[Op] = []
        self.names: dict[torch.fx.Node, object] = {}  # node -> value name, or tuple of names

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
            given = (
                node.args[i]
                if i < len(node.args)
                else node.kwargs.get(schema.name, schema.default_value)
            )
            if schema.name in (
                "device",
                "layout",
                "pin_memory",
                "memory_format",
                "non_blocking",
                "generator",
            ):
                continue
            arguments[schema.name] = encode(given)
        module_path = _module_path(node)
        grad = (
            any(self.values[name].requires_grad for name in inputs)
            and target is not torch.ops.aten.detach.default
        )
        outputs = self._outputs(node, grad)
        self.ops.append(
            Op(
                node.name,
                str(target),
                tuple(inputs),
                outputs,
                MappingProxyType(arguments),
                module_path,
                _source(node),
            )
        )

    def _outputs(self, node: torch.fx.Node, grad: bool) -> tuple[str, ...]:
        result = node.meta["val"]
        if isinstance(result, torch.Tensor):
            name = self.add_value(
                node.name, result, "activation", grad and _is_differentiable(result)
            )
            self.names[node] = name
            return (name,)
        if not isinstance(result, list | tuple):
            raise CaptureError(
                f"{node.target} at {_source(node) or node.name} ({_module_path(node)}) gives a Python number that depends on data. "
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


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path).removeprefix("model").removeprefix(".") if path else ""


def _source(node: torch.fx.Node) -> str:
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{frames[-1][0].rsplit('/', 1)[-1]}:{frames[-1][1]}" if frames else ""


def build_graph(
    model: nn.Module,
    exported: torch.export.ExportedProgram,
    num_outputs: int,
    leaves: tuple[InputLeaf, ...],
    precision: str | None,
) -> tuple[Graph, Mapping[str, torch.Tensor]]:
    builder = _GraphBuilder()
    signature = exported.graph_signature
    first_name, shared = _shared_names(model)
    trainable = {
        name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad
    }
    constants: dict[str, torch.Tensor] = {}
    specs = iter(signature.input_specs)
    user = iter(leaves)
    updates: dict[str, str] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            spec = next(specs)
            _add_input(
                builder, node, spec, first_name, trainable, constants, exported, user, precision
            )
        elif node.op == "call_function":
            if node.target is operator.getitem:
                names = builder.names[node.args[0]]
                assert isinstance(names, tuple), "getitem reads an op of several outputs"
                builder.names[node] = names[node.args[1]]
            elif not str(node.target).startswith(_IGNORED):
                if not isinstance(node.target, torch._ops.OpOverload):
                    raise CaptureError(
                        f"{node.target} at {_source(node) or node.name} ({_module_path(node)}) is control flow that autoplan does not plan."
                    )
                builder.add_op(node)
        elif node.op == "output":
            results = []
            for spec, out in zip(signature.output_specs, node.args[0]):
                name = str(builder.names[out]) if isinstance(out, torch.fx.Node) else None
                if spec.kind == OutputKind.BUFFER_MUTATION:
                    updates[str(spec.target).removeprefix("model.")] = str(name)
                elif spec.kind == OutputKind.USER_OUTPUT:
                    results.append(name)
                else:
                    raise CaptureError(
                        f"the model changes its input {spec.target!r} in place. Return the new tensor instead."
                    )
    loss = results[num_outputs] if len(results) > num_outputs else None
    graph = canonicalize(
        Graph(
            name=type(model).__name__,
            values=builder.values,
            ops=tuple(builder.ops),
            inputs=tuple(leaf.value for leaf in leaves if leaf.value is not None),
            outputs=tuple(results[:num_outputs]),
            loss=loss,
            buffer_updates=MappingProxyType(updates),
            shared=shared,
        )
    )
    return graph, MappingProxyType({k: v for k, v in constants.items() if k in graph.values})


# type: ignore[no-untyped-def]
def _add_input(builder, node, spec, first_name, trainable, constants, exported, user, precision):
    """One placeholder of the exported graph: a parameter, buffer, constant or input, under the
    model's own name.
    """
    tensor = node.meta.get("val")
    if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
        kind = "parameter" if spec.kind == InputKind.PARAMETER else "buffer"
        own = str(spec.target).removeprefix("model.")
        name = first_name.get(own, own)
        if name not in builder.values:
            grad = kind == "parameter" and name in trainable
            mixed = precision == "bf16-mixed" and kind == "parameter" and tensor.is_floating_point()
            builder.add_value(name, tensor, kind, grad, "float32" if mixed else "")
        builder.names[node] = name
    elif spec.kind == InputKind.CONSTANT_TENSOR:
        name = builder.add_value(
            f"constant:{spec.target.removeprefix('model.')}", tensor, "constant", False
        )
        constants[name] = exported.constants[spec.target]
        builder.names[node] = name
    elif spec.kind == InputKind.USER_INPUT:
        leaf = next(user)
        if leaf.value is not None:
            builder.names[node] = builder.add_value(leaf.value, tensor, "input", False)
    else:
        raise CaptureError(
            f"the model takes a {spec.kind} ({spec.target}), which autoplan does not plan. Pass tensors and plain values."
        )


def _shared_names(model: nn.Module) -> tuple[dict[str, str], tuple[tuple[str, ...], ...]]:
    """Every parameter and buffer name -> the first name of the same tensor; and the groups with
    several names.
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
