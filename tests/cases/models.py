# SPDX-License-Identifier: Apache-2.0
"""The models of the twelve public cases, their losses, and shapes that several of them plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


def given(batch: object, name: str) -> Tensor:
    """One tensor of a batch that was passed as keywords."""
    assert isinstance(batch, dict), "the cases pass their inputs as keywords"
    tensor = batch[name]
    assert isinstance(tensor, Tensor), f"{name} is a tensor"
    return tensor


def next_token(outputs: object, batch: object) -> Tensor:
    """Cross entropy of the logits against the input ids."""
    assert isinstance(outputs, Tensor), "the model gives its logits"
    return functional.cross_entropy(outputs.flatten(0, 1), given(batch, "ids").flatten())


def mean_square(outputs: object, batch: object) -> Tensor:
    """Mean of the squared output."""
    assert isinstance(outputs, Tensor), "the model gives one tensor"
    return outputs.square().mean()


# ---- tied weights --------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose table is also the output head's weight."""

    def __init__(self, vocabulary: int = 101, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        h: Tensor = self.emb(ids)
        for block in self.blocks:
            h = h + block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


class TwoUses(nn.Module):
    """One layer norm used behind the first and behind the last of four blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(torch.tanh(self.blocks[0](x)))
        h = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](h))))
        result: Tensor = self.norm(torch.tanh(self.blocks[3](h)))
        return result


class WeightAndBias(nn.Module):
    """Two linears that share weight and bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.tanh(self.a(x)))
        return result


# ---- vocabulary, heads ---------------------------------------------------------------------------


class Vocabulary(nn.Module):
    """An embedding and an untied head over a vocabulary that nothing divides."""

    def __init__(self, vocabulary: int = 50257, width: int = 16) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.emb(ids))
        return logits


class Confident(Vocabulary):
    """The same with logits of +6 at the label and -6 elsewhere, whatever the ids: what a pad
    column would show."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.emb.weight.fill_(0.5)
            self.head.weight.fill_(-6.0 / 8.0)
            self.head.weight[7].fill_(6.0 / 8.0)


class GroupedQuery(nn.Module):
    """Attention with fewer key-value heads than query heads, heads repeated by hand."""

    def __init__(self, width: int = 128, heads: int = 8, kv_heads: int = 2, size: int = 16) -> None:
        super().__init__()
        self.size = size
        self.q = nn.Linear(width, heads * size, bias=False)
        self.k = nn.Linear(width, kv_heads * size, bias=False)
        self.v = nn.Linear(width, kv_heads * size, bias=False)
        self.o = nn.Linear(heads * size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape

        def split(t: Tensor) -> Tensor:
            return t.view(batch, seq, -1, self.size).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.o(o.transpose(1, 2).reshape(batch, seq, -1))
        return result


def linears(depth: int, width: int) -> nn.Module:
    """`depth` square linears with ReLU between, on meta."""
    with torch.device("meta"):
        parts: list[nn.Module] = []
        for i in range(depth):
            parts += [nn.Linear(width, width), *([nn.ReLU()] if i < depth - 1 else [])]
        return nn.Sequential(*parts)


def wide_blocks(depth: int, width: int, hidden: int) -> nn.Module:
    """`depth` bias-free blocks width -> hidden -> width, on meta."""
    with torch.device("meta"):
        return nn.Sequential(
            *(
                nn.Sequential(
                    nn.Linear(width, hidden, bias=False),
                    nn.ReLU(),
                    nn.Linear(hidden, width, bias=False),
                )
                for _ in range(depth)
            )
        )


class Heads(nn.Module):
    """Blocks of attention (heads of width 8) and an MLP."""

    def __init__(self, heads: int, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HeadsBlock(heads) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class HeadsBlock(nn.Module):
    """One block of `Heads`."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        width = 8 * heads
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = (
            t.view(batch, seq, self.heads, 8).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        a = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(a.transpose(1, 2).reshape(batch, seq, width))
        result: Tensor = x + self.down(functional.gelu(self.up(x)))
        return result


# ---- pipelines -----------------------------------------------------------------------------------


class Skip(nn.Module):
    """Skip connections over stages, an integer tensor made early and used late, a second output
    from the middle."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.e1, self.e2, self.mid = (nn.Linear(width, width) for _ in range(3))
        self.d2, self.d1 = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.table, self.aux = nn.Embedding(width, width), nn.Linear(width, 1)

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        cls = x.argmax(-1)
        a = torch.relu(self.e1(x))
        b = torch.relu(self.e2(a))
        m = torch.relu(self.mid(b))
        u = torch.relu(self.d2(torch.cat([m, b], -1)))
        y = self.d1(torch.cat([u, a], -1)) + self.table(cls)
        return y * keep.unsqueeze(-1), self.aux(b)


class LateClass(Skip):
    """`Skip` whose integer tensor depends on a parameter, so that it must cross the boundaries."""

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.relu(self.e1(x))
        cls, small = a.argmax(-1), a < 0.1
        b = torch.relu(self.e2(a))
        m = torch.relu(self.mid(b)).masked_fill(small, 0.5)
        u = torch.relu(self.d2(torch.cat([m, b], -1)))
        y = self.d1(torch.cat([u, a], -1)) + self.table(cls)
        return (y * keep.unsqueeze(-1)).masked_fill(small, 0.25), self.aux(b)


def both_outputs(outputs: object, batch: object) -> Tensor:
    """mean(y^2) + mean(aux)."""
    assert isinstance(outputs, tuple), "the model gives y and aux"
    y, aux = outputs
    loss: Tensor = y.square().mean() + aux.mean()
    return loss


def first_output(outputs: object, batch: object) -> Tensor:
    """mean(y^2): the second output gets no gradient."""
    assert isinstance(outputs, tuple), "the model gives y and aux"
    loss: Tensor = outputs[0].square().mean()
    return loss


def small_stack() -> nn.Module:
    """Linear-Tanh-Linear."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def mean_error(outputs: object, batch: object) -> Tensor:
    """Mean squared error over all elements."""
    assert isinstance(outputs, Tensor), "the model gives one tensor"
    return functional.mse_loss(outputs, given(batch, "target"))


def summed_error(outputs: object, batch: object) -> Tensor:
    """Sum of squared errors over a denominator that the caller gives."""
    assert isinstance(outputs, Tensor), "the model gives one tensor"
    return (outputs - given(batch, "target")).square().sum() / given(batch, "count")


def labelled(outputs: object, batch: object) -> Tensor:
    """Cross entropy of (batch, seq, classes) over the labels that are not -100."""
    assert isinstance(outputs, Tensor), "the model gives its logits"
    return functional.cross_entropy(outputs.flatten(0, 1), given(batch, "labels").flatten())


class WithTarget(nn.Module):
    """A stack that also takes what only the loss uses: a target, a denominator, labels."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.stack = stack

    def forward(
        self,
        input: Tensor,
        target: Tensor | None = None,
        count: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        result: Tensor = self.stack(input)
        return result


# ---- randomness ----------------------------------------------------------------------------------


class Drops(nn.Module):
    """relu(u x), dropout, w, dropout; every weight 0.1, every bias 0: masks are visible as
    zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.w = nn.Linear(64, 256), nn.Linear(256, 64)
        fill(self)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = functional.dropout(torch.relu(self.u(x)), 0.5, self.training)
        return h, functional.dropout(self.w(h), 0.5, self.training)


class DropBlocks(nn.Module):
    """Two equal blocks like `Drops`, which can be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 16), nn.Dropout(0.5)
            )
            for _ in range(2)
        )
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def fill(module: nn.Module) -> None:
    """Weights 0.1, biases 0."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.1 if parameter.dim() > 1 else 0.0)


def second_sum(outputs: object, batch: object) -> Tensor:
    """Sum of the last output."""
    last = outputs[-1] if isinstance(outputs, tuple) else outputs
    assert isinstance(last, Tensor), "the model gives tensors"
    return last.sum()


# ---- library-style signatures --------------------------------------------------------------------


@dataclass
class Out:
    """What the model returns."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past: tuple[Tensor, ...] | None = None


class Library(nn.Module):
    """Tied head, buffers of both kinds, in-place ops, keyword switches, a dataclass result."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 16)
        self.b1, self.b2 = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("rope", torch.linspace(0, 1, 16), persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        use_act: bool = True,
        return_dict: bool = True,
        mask: Tensor | None = None,
    ) -> Out | tuple[Tensor | None, Tensor]:
        h = self.emb(input_ids) * self.scale + self.rope
        r = h
        h = self.b1(h)
        if use_act:
            h = torch.relu_(h)
        if mask is not None:
            h = h.masked_fill(mask.unsqueeze(-1), 0.0)
        h = self.b2(h)
        h += r
        logits = self.head(h)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Out(loss=loss, logits=logits) if return_dict else (loss, logits)


class Branching(Library):
    """`Library` with a branch on data."""

    # fewer switches than its parent
    # type: ignore[override]
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Out:
        h = self.emb(input_ids)
        if h.sum() > 0:
            h = self.b1(h)
        logits = self.head(h)
        return Out(loss=logits.square().mean(), logits=logits)
