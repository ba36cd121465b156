# SPDX-License-Identifier: Apache-2.0
"""nn.Module + example inputs -> Graph, through `torch.export`.

In: any module that `torch.export` accepts, on any device (meta too), and one global batch. Out: a `Captured`: the torch-free
`Graph`, and what the executor needs to run it (constants, the structure of inputs and outputs). The module object, its
tensors and the caller's random state are untouched: the trace runs on a structural copy that shares the tensors.

Rewriting ATen calls into autoplan's own few ops lives in `canonical.py`. Backward is not captured (DESIGN 2).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree  # checked on 2.13; torch.export's own containers use it

from autoplan.canonical import canonicalize
from autoplan.errors import CaptureError
from autoplan.graph import Graph, Op, Ref, TensorMeta, Value

ExampleInputs = Mapping[str, object] | tuple[object, ...]
LossFn = Callable[[object, object], torch.Tensor]

_IGNORED = ("aten._assert", "aten.sym_constrain", "aten.sym_size", "aten.sym_numel")


@dataclass(frozen=True, slots=True)
class InputLeaf:
    """One leaf of the example inputs.

    Attributes:
        path: "input_ids", "0", "features.1".
        value: The graph's name of the tensor, or None for a constant.
        constant: The non-tensor value (number, string, bool, None).
        shape, dtype: Of a tensor, global.
    """

    path: str
    value: str | None
    constant: object = None
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class OutputTree:
    """The model's own output structure; leaves are positions in `Graph.outputs` or constants.

    Attributes:
        kind: "tensor", "constant", "tuple", "list", "dict" or "object" (a dataclass or library output object).
        type: The Python type to rebuild, for containers.
        keys: Field names or keys, for "dict" and "object".
        children: Parts, for containers.
        leaf: Position in `Graph.outputs` for "tensor", the value itself for "constant".
    """

    kind: str
    type: type | None = None
    keys: tuple[object, ...] = ()
    children: tuple[OutputTree, ...] = ()
    leaf: object = None

    def rebuild(self, tensors: list[torch.Tensor | None]) -> object:
        """The output object with these tensors as its leaves."""
        if self.kind == "tensor":
            assert isinstance(self.leaf, int), "a tensor leaf holds its position"
            return tensors[self.leaf]
        if self.kind == "constant":
            return self.leaf
        parts = [child.rebuild(tensors) for child in self.children]
        assert self.type is not None, "containers carry their type"
        if self.kind in ("dict", "object"):
            return (
                self.type(**dict(zip(map(str, self.keys), parts)))
                if self.kind == "object"
                else self.type(zip(self.keys, parts))
            )
        if hasattr(self.type, "_fields"):
            return self.type(*parts)
        return self.type(parts)


@dataclass(frozen=True)
class Captured:
    """A captured model: the graph, and what ties it back to the module.

    Attributes:
        graph: What is computed.
        leaves: The flattened example inputs, tensors and constants, in order.
        output: The model's own output structure.
        constants: Tensors the trace lifted out of the code, by value name.
        positional: The example inputs were a tuple.
    """

    graph: Graph
    leaves: tuple[InputLeaf, ...]
    output: OutputTree
    constants: Mapping[str, torch.Tensor]
    positional: bool


def capture(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    loss_fn: LossFn | None = None,
    mode: str = "train",
    precision: str | None = None,
) -> Captured:
    """The model's graph for one global batch.

    Args:
        model: Any module; not modified.
        example_inputs: The global batch: a dict of keyword inputs or a tuple of positional ones; leaves may be non-tensors.
        loss_fn: loss_fn(outputs, example_inputs) -> scalar; part of the graph. Default: the model's own loss.
        mode: "train" (a loss is required) or "infer".
        precision: None keeps the model's dtypes; "bf16-mixed" holds floating parameters in float32 and casts them to bfloat16 for use.

    Raises:
        CaptureError: The model has no loss in train mode, branches on data, or cannot be exported; names module and line.
    """
    positional = not isinstance(example_inputs, Mapping)
    args = tuple(example_inputs) if positional else ()
    kwargs = {} if positional else dict(example_inputs)
    args, kwargs = _without_aliases((args, kwargs))
    copied = _structural_copy(model, precision)
    note = _OutputNote()
    wrapper = _WithLoss(copied, loss_fn, mode, positional, note)
    exported = _export(wrapper, args, kwargs)
    leaves = _input_leaves(args, kwargs)
    assert note.tree is not None, "the trace has run the wrapper"
    graph, constants = _to_graph(model, exported, note.num_tensors, leaves, precision)
    if mode == "train" and (graph.loss is None or not graph.values[graph.loss].requires_grad):
        raise CaptureError(
            f"{type(model).__name__} gives no loss that depends on a trainable parameter. Train mode needs one: pass labels so that the "
            "model returns its own loss (a scalar, `.loss` or ['loss']), pass loss_fn(outputs, batch) -> scalar, or use mode='infer'."
        )
    graph.verify()
    return Captured(graph, leaves, note.tree, constants, positional)


@dataclass
class _OutputNote:
    """What the trace learns of the output's structure."""

    tree: OutputTree | None = None
    num_tensors: int = 0


class _WithLoss(nn.Module):
    """Runs the model and its loss, and notes the structure of the output while it is traced."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        mode: str,
        positional: bool,
        note: _OutputNote,
    ) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn
        self._mode = mode
        self._positional = positional
        self.note = note  # torch.export undoes assignments to a module's own attributes
        self.training = model.training

    def forward(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
        outputs = self.model(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        self.note.tree = _flatten_output(outputs, tensors)
        self.note.num_tensors = len(tensors)
        loss = None
        if self._mode == "train":
            loss = (
                _own_loss(outputs)
                if self._loss_fn is None
                else self._loss_fn(outputs, args if self._positional else kwargs)
            )
        return (*tensors, loss) if loss is not None else tuple(tensors)


def _own_loss(outputs: object) -> torch.Tensor | None:
    """The scalar that the model itself returns: the output, its `.loss` or ["loss"], or the first of a tuple."""
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif hasattr(outputs, "loss"):
        found = outputs.loss
    elif isinstance(outputs, tuple | list) and outputs:
        found = outputs[0]
    return (
        found
        if isinstance(found, torch.Tensor) and found.numel() == 1 and found.is_floating_point()
        else None
    )


def _flatten_output(value: object, tensors: list[torch.Tensor]) -> OutputTree:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return OutputTree("tensor", leaf=len(tensors) - 1)
    if isinstance(value, Mapping):
        kind = "object" if dataclasses.is_dataclass(value) else "dict"
        return OutputTree(
            kind,
            type(value),
            tuple(value.keys()),
            tuple(_flatten_output(v, tensors) for v in value.values()),
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
        return OutputTree(
            "object",
            type(value),
            tuple(k for k, _ in fields),
            tuple(_flatten_output(v, tensors) for _, v in fields),
        )
    if isinstance(value, tuple | list):
        return OutputTree(
            "tuple" if isinstance(value, tuple) else "list",
            type(value),
            (),
            tuple(_flatten_output(v, tensors) for v in value),
        )
    plain = value is None or isinstance(value, bool | int | float | str)
    return OutputTree(
        "constant", leaf=value if plain else None
    )  # a cache object is state of a run, not a result of the plan


def _without_aliases(
    tree: tuple[tuple[object, ...], dict[str, object]],
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The same inputs with a tensor that is passed twice cloned: torch.export wires both uses to one input otherwise."""
    seen: set[int] = set()

    def once(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in seen:
                return leaf.clone()
            seen.add(id(leaf))
        return leaf

    result: tuple[tuple[object, ...], dict[str, object]] = pytree.tree_map(once, tree)
    return result


def _structural_copy(model: nn.Module, precision: str | None) -> nn.Module:
    """A copy of the module objects that shares every tensor (with "bf16-mixed": parameters in bfloat16 on the same device)."""
    if precision not in (None, "bf16-mixed"):
        raise CaptureError(
            f"precision {precision!r} is not known. Use None (the model's own dtypes) or 'bf16-mixed'."
        )
    memo: dict[int, object] = {}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            memo[id(tensor)] = tensor
            if (
                precision == "bf16-mixed"
                and isinstance(tensor, nn.Parameter)
                and tensor.is_floating_point()
            ):
                memo[id(tensor)] = nn.Parameter(
                    tensor.to(torch.bfloat16), requires_grad=tensor.requires_grad
                )
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def _export(
    wrapper: _WithLoss, args: tuple[object, ...], kwargs: dict[str, object]
) -> torch.export.ExportedProgram:
    try:
        with _random_state_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.export warns of its own internals
            return torch.export.export(wrapper, args, kwargs, strict=False).run_decompositions({})
    except CaptureError:
        raise
    except Exception as error:  # torch.export has no base class of its own for what it refuses
        raise CaptureError(_explain(error, wrapper)) from error


def _explain(error: Exception, wrapper: _WithLoss) -> str:
    """torch.export's refusal as one message: what, where in the model's code, what to do."""
    text = str(error)
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', text)
    paths = {id(m): name for name, m in wrapper.model.named_modules()}
    inside = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        frames.append((code.co_filename, str(line), code.co_name))
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        inside = owner if id(owner) in paths else inside  # the innermost module whose method runs
    own = [
        f
        for f in frames
        if "/torch/" not in f[0] and "/autoplan/" not in f[0] and f[2] != "<module>"
    ]
    where = f" at {own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]} in {own[-1][2]}" if own else ""
    if inside is not None:
        path = paths[id(inside)]
        where += f" ({f'module {path!r}, a ' if path else ''}{type(inside).__name__})"
    if (
        "data-dependent" in text
        or "DataDependent" in type(error).__name__
        or "Could not guard" in text
    ):
        return (
            f"the model cannot be captured{where}: the code branches on the values of a tensor, which a plan cannot know. Make the branch "
            "depend on shapes or configuration only, or use torch.where."
        )
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"torch.export cannot capture the model{where}: {first[:300]}"


def leaf_path(keys: tuple[object, ...]) -> str:
    """The name of one leaf of (args, kwargs): "input_ids", "0", "features.1"."""
    return ".".join(
        str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in keys[1:]
    )


def _input_leaves(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[InputLeaf, ...]:
    leaves = []
    for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
        name = leaf_path(path)
        if isinstance(leaf, torch.Tensor):
            leaves.append(InputLeaf(name, name, None, tuple(leaf.shape), _dtype(leaf.dtype)))
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            leaves.append(InputLeaf(name, None, leaf))
        else:
            raise CaptureError(
                f"input {name!r} is a {type(leaf).__name__}. Inputs are tensors, numbers, strings, None and nests of them."
            )
    return tuple(leaves)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _GraphBuilder:
    """Walks the exported graph once and collects values and ops under the model's own names."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.ops: list[Op] = []
        self.names: dict[torch.fx.Node, object] = {}  # node -> value name, or tuple of names

    def add_value(
        self, name: str, tensor: torch.Tensor, kind: str, requires_grad: bool, stored_dtype: str = ""
    ) -> str:
        if name in self.values:
            name = f"{kind}:{name}"
        meta = TensorMeta(tuple(int(s) for s in tensor.shape), _dtype(tensor.dtype))
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
            return _dtype(argument) if isinstance(argument, torch.dtype) else argument

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


def _to_graph(
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


def _add_input(builder, node, spec, first_name, trainable, constants, exported, user, precision):  # type: ignore[no-untyped-def]
    """One placeholder of the exported graph: a parameter, buffer, constant or input, under the model's own name."""
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
    """Every parameter and buffer name -> the first name of the same tensor; and the groups with several names."""
    groups: dict[int, list[str]] = {}
    for named in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in named:
            groups.setdefault(id(tensor), []).append(name)
    first = {name: names[0] for names in groups.values() for name in names}
    return first, tuple(tuple(names) for names in groups.values() if len(names) > 1)
