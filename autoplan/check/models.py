# SPDX-License-Identifier: Apache-2.0
"""A transformer's graph from its sizes, in the vocabulary of captured graphs, without torch.

In: `Sizes`, what a published run says of its model and its microbatch. Out: a `Written` graph of a
few equal blocks, with how often each block really is there, and along which dim Megatron's layout
splits each value over tensor parallel ranks. What kind of model a name is stands in
`profiles/architectures.json`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from autoplan.graph import Graph, Op, Ref, TensorMeta, Value
from autoplan.solver.repeated import LEAST


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What decides a graph.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, ffn, vocab: Of the model; `ffn` of one gate where
            there are two.
        rows, seq: Of one microbatch over all data parallel ranks.
        gated: The feed-forward has two input projections.
        biased: Projections have biases.
        rms: Norms are RMS norms without bias.
        rotary: Positions are rotations of queries and keys; else they are learned.
        causal: Each token attends to those before it.
        tied: The output projection is the embedding.
        predicted: Share of the tokens that the loss is about.
        dropout: Probability behind embedding, attention and feed-forward; 0: none.
        norm_after: Each norm follows its residual sum (encoders of 2018).
        packed: Queries, keys and values come from one product.
        fused_attention: One kernel; else products and a softmax.
        scores_dropout: With unfused attention, dropout on the probabilities.
        dtype: Of the computation.
        stored: Of the parameters where they are kept wider; "".
        frozen: Parameters have no gradients (a low-rank adapter trains instead).
        experts, top_k: Of every feed-forward; 0: one for all tokens. `ffn` is one expert's.
        expert_ranks: Neighbouring data parallel ranks that share out the experts.
        context_ranks: Neighbouring ranks that share out a sequence: `rows` are its parts, `seq` the
            tokens of one.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rows: int
    seq: int
    gated: bool
    biased: bool
    rms: bool
    rotary: bool
    causal: bool
    tied: bool
    predicted: float
    dropout: float
    norm_after: bool
    packed: bool
    fused_attention: bool
    dtype: str
    stored: str
    frozen: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ranks: int = 1
    context_ranks: int = 1

    @property
    def num_parameters(self) -> int:
        """Of the whole model, that a token meets: of experts the chosen ones."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (queries + 2 * keys) + queries * self.hidden
        width = self.ffn * max(1, self.top_k)
        block = attention + (3 if self.gated else 2) * self.hidden * width
        ends = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * block + ends + (0 if self.rotary else self.seq * self.hidden)


@dataclass(frozen=True)
class Written:
    """A graph of a few blocks.

    Attributes:
        graph: Of one microbatch.
        num_blocks: Of the real model; the graph has min(num_blocks, LEAST).
        split_dims: Value -> its dim that tensor parallel ranks share out.
        products: Ops of the blocks that float8 recipes run in float8.
        core: Ops of the attention between its projections.
        expert_weights: Parameters of experts.
    """

    graph: Graph
    num_blocks: int
    split_dims: dict[str, int]
    products: frozenset[str]
    core: frozenset[str]
    expert_weights: frozenset[str]


@dataclass
class _Writer:
    sizes: Sizes
    values: dict[str, Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    split_dims: dict[str, int] = field(default_factory=dict)
    products: set[str] = field(default_factory=set)
    core: set[str] = field(default_factory=set)
    expert_weights: set[str] = field(default_factory=set)

    def value(self, name: str, shape: tuple[int, ...], dtype: str, kind: str) -> str:
        grad = kind == "parameter" and not self.sizes.frozen
        stored = self.sizes.stored if kind == "parameter" else ""
        self.values[name] = Value(name, TensorMeta(shape, dtype), kind, grad, stored)
        return name

    def parameter(self, path: str, name: str, *shape: int) -> str:
        full = f"{path}.{name}"
        if full in self.values:
            return full
        return self.value(full, shape, self.sizes.dtype, "parameter")

    def op(
        self,
        target: str,
        inputs: tuple[str, ...],
        shape: tuple[int, ...],
        path: str,
        /,
        *,
        into: str = "",
        split: int | None = None,
        **arguments: Any,
    ) -> str:
        """One op with one output, which is returned; `split` is the dim that tensor parallel ranks
        share out.
        """
        return self.ops_of(target, inputs, (shape,), path, into=into, split=split, **arguments)[0]

    def ops_of(
        self,
        target: str,
        inputs: tuple[str, ...],
        shapes: tuple[tuple[int, ...], ...],
        path: str,
        /,
        *,
        into: str = "",
        split: int | None = None,
        **arguments: Any,
    ) -> tuple[str, ...]:
        name = f"op{len(self.ops)}"
        outputs = tuple(f"{name}_{i}" for i in range(len(shapes)))
        carries = any(self.values[v].requires_grad for v in inputs) or (
            self.sizes.frozen and any(self.values[v].kind == "parameter" for v in inputs)
        )
        for output, shape in zip(outputs, shapes):
            meta = TensorMeta(shape, into or self.sizes.dtype)
            self.values[output] = Value(output, meta, "activation", carries)
            if split is not None:
                self.split_dims[output] = split
        self.ops.append(Op(name, target, inputs, outputs, arguments, path))
        return outputs

    # -- what models are made of

    def linear(
        self, x: str, path: str, width: int, *, split: int | None = None, product: bool = True
    ) -> str:
        shape = self.values[x].meta.shape
        inputs: tuple[str, ...] = (x, self.parameter(path, "weight", width, shape[-1]))
        if self.sizes.biased and product:
            inputs += (self.parameter(path, "bias", width),)
        bias = Ref(2) if len(inputs) > 2 else None
        out = self.op(
            "aten.linear.default",
            inputs,
            (*shape[:-1], width),
            path,
            split=split,
            input=Ref(0),
            weight=Ref(1),
            bias=bias,
        )
        if product:
            self.products.add(self.ops[-1].name)
        return out

    def norm(self, x: str, path: str) -> str:
        shape, s = self.values[x].meta.shape, self.sizes
        inputs: tuple[str, ...] = (x, self.parameter(path, "weight", s.hidden))
        given: dict[str, Any] = {"input": Ref(0), "normalized_shape": (s.hidden,)}
        given["weight"] = Ref(1)
        if s.rms:
            return self.op("aten.rms_norm.default", inputs, shape, path, **given, eps=1e-5)
        if s.biased:
            inputs += (self.parameter(path, "bias", s.hidden),)
        given["bias"] = Ref(2) if s.biased else None
        return self.op("aten.layer_norm.default", inputs, shape, path, **given, eps=1e-5)

    def pointwise(self, name: str, path: str, *inputs: str) -> str:
        shape = self.values[inputs[0]].meta.shape
        split = self.split_dims.get(inputs[0])
        names = ("self", "other")
        given: dict[str, Any] = {names[i]: Ref(i) for i in range(len(inputs))}
        if name == "add":
            given["alpha"] = 1
        overload = "Tensor" if len(inputs) > 1 else "default"
        return self.op(f"aten.{name}.{overload}", inputs, shape, path, split=split, **given)

    def dropped(self, x: str, path: str) -> str:
        if not self.sizes.dropout:
            return x
        meta, p = self.values[x].meta, self.sizes.dropout
        split = self.split_dims.get(x)
        given: dict[str, Any] = {"input": Ref(0), "p": p, "train": True, "stream": 0}
        return self.op("autoplan.dropout", (x,), meta.shape, path, split=split, **given)

    def reshaped(self, x: str, path: str, *shape: int, split: int | None = None) -> str:
        return self.op(
            "aten.reshape.default", (x,), shape, path, split=split, self=Ref(0), shape=shape
        )

    def swapped(self, x: str, path: str, a: int, b: int, split: int | None) -> str:
        shape = list(self.values[x].meta.shape)
        shape[a], shape[b] = shape[b], shape[a]
        return self.op(
            "aten.transpose.int",
            (x,),
            tuple(shape),
            path,
            split=split,
            self=Ref(0),
            dim0=a,
            dim1=b,
        )


def write_model(sizes: Sizes) -> Written:
    """The graph of one microbatch of a model, loss included.

    Heads are packed key-value group by group, as Megatron packs them, so that a split of the packed
    projection is a split of heads.
    """
    w, s = _Writer(sizes), sizes
    ids = w.value("input_ids", (s.rows, s.seq), "int64", "input")
    labels = w.value("labels", (s.rows, s.seq), "int64", "input")
    x = _embedded(w, ids)
    for i in range(min(s.layers, LEAST)):
        x = _block(w, x, f"layers.{i}")
    if not s.norm_after:
        x = w.norm(x, "final_norm")
    loss = _loss(w, x, labels)
    graph = Graph("transformer", w.values, tuple(w.ops), (ids, labels), (loss,), loss)
    return Written(
        graph,
        s.layers,
        w.split_dims,
        frozenset(w.products),
        frozenset(w.core),
        frozenset(w.expert_weights),
    )


def _embedded(w: _Writer, ids: str) -> str:
    s, path = w.sizes, "embedding"
    weight = w.parameter(path, "weight", s.vocab, s.hidden)
    w.split_dims[weight] = 0
    given: dict[str, Any] = {"weight": Ref(0), "indices": Ref(1), "padding_idx": -1}
    given |= {"scale_grad_by_freq": False, "sparse": False}
    shape = (s.rows, s.seq, s.hidden)
    x = w.op("aten.embedding.default", (weight, ids), shape, path, **given)
    if not s.rotary:
        position = w.parameter(path, "position", s.seq, s.hidden)
        x = w.pointwise("add", path, x, position)
    return w.dropped(x, path)


def _block(w: _Writer, x: str, path: str) -> str:
    s = w.sizes
    inner = x if s.norm_after else w.norm(x, f"{path}.norm1")
    y = w.dropped(_attention(w, inner, f"{path}.attention"), path)
    x = w.pointwise("add", path, x, y)
    if s.norm_after:
        x = w.norm(x, f"{path}.norm1")
    inner = x if s.norm_after else w.norm(x, f"{path}.norm2")
    y = w.dropped(_feed_forward(w, inner, f"{path}.mlp"), path)
    x = w.pointwise("add", path, x, y)
    return w.norm(x, f"{path}.norm2") if s.norm_after else x


def _attention(w: _Writer, x: str, path: str) -> str:
    s = w.sizes
    groups, per_group, d = s.kv_heads, s.heads // s.kv_heads, s.head_dim
    sizes = (per_group * d, d, d)
    if s.packed:
        joint = w.linear(x, f"{path}.qkv", groups * sum(sizes), split=2)
        joint = w.reshaped(joint, path, s.rows, s.seq, groups, sum(sizes), split=2)
        parts = w.ops_of(
            "aten.split_with_sizes.default",
            (joint,),
            tuple((s.rows, s.seq, groups, size) for size in sizes),
            path,
            split=2,
            self=Ref(0),
            split_sizes=sizes,
            dim=-1,
        )
    else:
        parts = tuple(
            w.reshaped(
                w.linear(x, f"{path}.{name}", groups * size, split=2),
                path,
                s.rows,
                s.seq,
                groups,
                size,
                split=2,
            )
            for name, size in zip("qkv", sizes)
        )
    first = len(w.ops)
    query = w.reshaped(parts[0], path, s.rows, s.seq, s.heads, d, split=2)
    q, k, v = (w.swapped(t, path, 1, 2, 1) for t in (query, parts[1], parts[2]))
    if s.rotary:
        q, k = _rotated(w, q, path), _rotated(w, k, path)
    if s.context_ranks > 1:
        k, v = (_gathered(w, x, path) for x in (k, v))
    y = _fused_attention(w, q, k, v, path) if s.fused_attention else _scores(w, q, k, v, path)
    w.core.update(op.name for op in w.ops[first:])
    y = w.swapped(y, path, 1, 2, 2)
    y = w.reshaped(y, path, s.rows, s.seq, s.heads * d, split=2)
    return w.linear(y, f"{path}.out", s.hidden)


def _gathered(w: _Writer, x: str, path: str) -> str:
    """Keys or values of the whole sequence, from the ranks that share it."""
    rows, heads, seq, d = w.values[x].meta.shape
    shape = (rows, heads, seq * w.sizes.context_ranks, d)
    given: dict[str, Any] = {"self": Ref(0), "ranks": w.sizes.context_ranks}
    return w.op("autoplan.context", (x,), shape, path, split=1, **given)


def _rotated(w: _Writer, x: str, path: str) -> str:
    """x cos + turned(x) sin: the turn is a pass of its own, the tables are small."""
    shape = w.values[x].meta.shape
    if "rotary" not in w.values:
        w.value("rotary", (shape[-2], shape[-1]), w.sizes.dtype, "constant")
    turned = w.pointwise("neg", path, x)
    sides = []
    for side in (x, turned):
        given: dict[str, Any] = {"self": Ref(0), "other": Ref(1)}
        made = w.op("aten.mul.Tensor", (side, "rotary"), shape, path, split=1, **given)
        sides.append(made)
    return w.pointwise("add", path, *sides)


def _fused_attention(w: _Writer, q: str, k: str, v: str, path: str) -> str:
    s = w.sizes
    return w.op(
        "aten.scaled_dot_product_attention.default",
        (q, k, v),
        w.values[q].meta.shape,
        path,
        split=1,
        query=Ref(0),
        key=Ref(1),
        value=Ref(2),
        attn_mask=None,
        dropout_p=0.0,
        is_causal=s.causal,
        scale=1.0 / math.sqrt(s.head_dim),
        enable_gqa=s.heads != s.kv_heads,
    )


def _scores(w: _Writer, q: str, k: str, v: str, path: str) -> str:
    """softmax(q k^T) v, the scores in memory; scale and mask are the softmax kernel's."""
    s = w.sizes
    lead = (s.rows, s.heads)
    if s.heads != s.kv_heads:
        groups, per_group = s.kv_heads, s.heads // s.kv_heads
        full = (s.rows, groups, per_group, s.seq, s.head_dim)
        spread = []
        for x in (k, v):
            one = (s.rows, groups, 1, s.seq, s.head_dim)
            x = w.op("aten.unsqueeze.default", (x,), one, path, split=1, self=Ref(0), dim=2)
            given: dict[str, Any] = {"self": Ref(0), "size": full, "implicit": False}
            x = w.op("aten.expand.default", (x,), full, path, split=1, **given)
            spread.append(w.reshaped(x, path, *lead, s.seq, s.head_dim, split=1))
        k, v = spread
    k = w.swapped(k, path, 2, 3, 1)
    pair: dict[str, Any] = {"self": Ref(0), "other": Ref(1)}
    scores = w.op("aten.matmul.default", (q, k), (*lead, s.seq, s.seq), path, split=1, **pair)
    given = {"self": Ref(0), "dim": -1, "dtype": None}
    shape = w.values[scores].meta.shape
    shares = w.op("aten.softmax.int", (scores,), shape, path, split=1, **given)
    shares = w.dropped(shares, path)
    return w.op(
        "aten.matmul.default", (shares, v), (*lead, s.seq, s.head_dim), path, split=1, **pair
    )


def _experts(w: _Writer, x: str, path: str) -> str:
    """Each token through its `top_k` experts, which lie on `expert_ranks`; loads are even."""
    s, k = w.sizes, w.sizes.top_k
    chances = w.linear(x, f"{path}.router", s.experts, product=False)
    shape = w.values[chances].meta.shape
    w.op("aten.softmax.int", (chances,), shape, path, self=Ref(0), dim=-1, dtype=None)
    tokens = s.rows * s.seq
    one, many = (s.rows, s.seq, 1, s.hidden), (s.rows, s.seq, k, s.hidden)
    x = w.op("aten.unsqueeze.default", (x,), one, path, self=Ref(0), dim=2)
    given: dict[str, Any] = {"self": Ref(0), "size": many, "implicit": False}
    x = w.op("aten.expand.default", (x,), many, path, **given)
    x = w.reshaped(x, path, tokens * k, s.hidden)
    x = _exchanged(w, x, path)
    up = _grouped(w, x, f"{path}.up", s.ffn, split=1)
    if s.gated:
        gate = _grouped(w, x, f"{path}.gate", s.ffn, split=1)
        inner = w.pointwise("mul", path, w.pointwise("silu", path, gate), up)
    else:
        inner = w.pointwise("gelu", path, up)
    y = _exchanged(w, _grouped(w, inner, f"{path}.down", s.hidden), path)
    y = w.reshaped(y, path, *many)
    out = (s.rows, s.seq, s.hidden)
    return w.op("aten.sum.dim_IntList", (y,), out, path, self=Ref(0), dim=(2,), keepdim=False)


def _exchanged(w: _Writer, x: str, path: str) -> str:
    given: dict[str, Any] = {"self": Ref(0), "ranks": w.sizes.expert_ranks}
    return w.op("autoplan.exchange", (x,), w.values[x].meta.shape, path, **given)


def _grouped(w: _Writer, x: str, path: str, width: int, *, split: int | None = None) -> str:
    s = w.sizes
    rows, k = w.values[x].meta.shape
    local = max(1, s.experts // s.expert_ranks)
    weight = w.parameter(path, "weight", local, k, width)
    w.expert_weights.add(weight)
    given: dict[str, Any] = {"input": Ref(0), "weight": Ref(1)}
    out = w.op("autoplan.expert_mm", (x, weight), (rows, width), path, split=split, **given)
    w.products.add(w.ops[-1].name)
    return out


def _feed_forward(w: _Writer, x: str, path: str) -> str:
    s = w.sizes
    if s.experts:
        return _experts(w, x, path)
    up = w.linear(x, f"{path}.up", s.ffn, split=2)
    if s.gated:
        gate = w.linear(x, f"{path}.gate", s.ffn, split=2)
        inner = w.pointwise("mul", path, w.pointwise("silu", path, gate), up)
    else:
        inner = w.pointwise("gelu", path, up)
    return w.linear(inner, f"{path}.down", s.hidden)


def _loss(w: _Writer, x: str, labels: str) -> str:
    s = w.sizes
    path = "embedding" if s.tied else "head"
    seq = max(1, round(s.predicted * s.seq))
    if seq < s.seq:
        part: dict[str, Any] = {"self": Ref(0), "dim": 1, "start": 0, "end": seq, "step": 1}
        x = w.op("aten.slice.Tensor", (x,), (s.rows, seq, s.hidden), "head", **part)
        labels = w.op("aten.slice.Tensor", (labels,), (s.rows, seq), "head", into="int64", **part)
    logits = w.linear(x, path, s.vocab, split=2, product=False)
    tokens = s.rows * seq
    flat = w.reshaped(logits, "head", tokens, s.vocab, split=1)
    given: dict[str, Any] = {"self": Ref(0), "dtype": "float32"}
    flat = w.op(
        "aten._to_copy.default", (flat,), (tokens, s.vocab), "head", into="float32", split=1,
        **given,
    )  # fmt: skip
    name = w.op(
        "aten.reshape.default", (labels,), (tokens,), "head", into="int64", self=Ref(0),
        shape=(tokens,),
    )  # fmt: skip
    return w.op(
        "autoplan.cross_entropy_sum",
        (flat, name),
        (),
        "head",
        into="float32",
        input=Ref(0),
        target=Ref(1),
        weight=None,
        ignore_index=-100,
        label_smoothing=0.0,
        log_probs=False,
    )
