# SPDX-License-Identifier: Apache-2.0
"""The models of the public bug reports, each a `Case`: a builder, one global batch, a loss.

`build(name)` gives (model, inputs, loss function) in float64, the same for every call on every process: a plan crosses to the
ranks of a pool as text and a case as its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Inputs = dict[str, Tensor]
Loss = Callable[[object, object], Tensor]


@dataclass(frozen=True)
class Case:
    """A model, one global batch for it, and a loss (None: the model's own)."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    loss: Loss | None = None


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
    """The same with logits of +6 at the label and -6 elsewhere, whatever the ids: what a pad column would show."""

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
    """Skip connections over stages, an integer tensor made early and used late, a second output from the middle."""

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
    """relu(u x), dropout, w, dropout; every weight 0.1, every bias 0: masks are visible as zeros."""

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

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Out:  # type: ignore[override]  # fewer switches than its parent
        h = self.emb(input_ids)
        if h.sum() > 0:
            h = self.b1(h)
        logits = self.head(h)
        return Out(loss=logits.square().mean(), logits=logits)


# ---- further reports ---------------------------------------------------------------------------


class Flattened(nn.Module):
    """A tensor of 6 x 256 made flat, then scaled elementwise."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(256, 256)
        self.scale = nn.Parameter(torch.randn(6 * 256))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.tanh(self.fc(x)).view(-1) * self.scale
        return flat.view(6, 256)


class Rotary(nn.Module):
    """Two blocks that share one complex table."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        angles = torch.outer(torch.arange(6.0), torch.linspace(0.1, 1.0, 8)).double()
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            turned = torch.view_as_complex(block(x).unflatten(-1, (8, 2))) * self.table
            x = x + torch.view_as_real(turned).flatten(-2)
        return x


class Turned(nn.Module):
    """A complex tensor made before a linear and used behind it: it must cross between stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.a(x).unflatten(-1, (8, 2)))
        h = torch.tanh(self.b(x + torch.view_as_real(z * z).flatten(-2)))
        return torch.view_as_real(z * h)


class ConvBlock(nn.Module):
    """Residual convolution with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(h)))


class ConvNet(nn.Module):
    """Four residual blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(8) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(h.mean((2, 3)))
        return logits


class ParallelResidual(nn.Module):
    """x + attention(norm1 x) + mlp(norm2 x), with norms on queries and keys per head."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, size = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(size), nn.RMSNorm(size)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)

        def split(t: Tensor) -> Tensor:
            return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k = self.q_norm(split(self.q(h))), self.k_norm(split(self.k(h)))
        a = functional.scaled_dot_product_attention(q, k, split(self.v(h)), is_causal=True)
        attended = self.o(a.transpose(1, 2).flatten(2))
        result: Tensor = x + attended + self.down(functional.gelu(self.up(self.norm2(x))))
        return result


@torch.library.custom_op("autoplan_cases::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    """x / 2, as an op that no rule knows."""
    return x / 2.0


@halved.register_fake
def _halved_shape(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _halved_backward(ctx: object, grad: Tensor) -> Tensor:
    return grad / 2.0


halved.register_autograd(_halved_backward)


class Custom(nn.Module):
    """Two linears around an op that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(halved(torch.tanh(self.a(x))))
        return result


class Loose(nn.Module):
    """A parameter on the root, a scalar one, one that nothing uses, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(16))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("offset", torch.randn(16))
        self.register_buffer("spare", torch.randn(2), persistent=False)
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(x * self.gain + self.shift) + self.offset
        return result


class Counting(nn.Module):
    """Counts its forward passes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        result: Tensor = self.fc(x)
        return result


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attention of two heads on (batch, seq, width)."""
    parts = [t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v)]
    result = functional.scaled_dot_product_attention(*parts, is_causal=causal)
    return result.transpose(1, 2).flatten(2)


class EncoderDecoder(nn.Module):
    """One block of each; logits of every target position."""

    def __init__(self, vocabulary: int = 20, width: int = 16) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.encode = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width))
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encode(self.emb(source))
        h = self.emb(target)
        h = h + attend(h, h, h, causal=True)
        h = h + self.mix(attend(self.q(h), self.k(memory), self.v(memory), causal=False))
        logits: Tensor = self.head(h)
        return logits


class Adapted(nn.Module):
    """A frozen linear with a trainable low-rank side path, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(16, 16) for _ in range(2)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(16, 2, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.base, self.down, self.up):
            x = torch.tanh(base(x) + up(down(x)))
        return x


# ---- the table of cases --------------------------------------------------------------------------


def _ids(rows: int, seq: int, vocabulary: int) -> Inputs:
    return {"ids": torch.randint(0, vocabulary, (rows, seq))}


def _pair() -> Inputs:
    return {"input": torch.randn(10, 8), "target": torch.randn(10, 3)}


def _ignored() -> Inputs:
    labels = torch.full((4, 6), -100)
    for row, valid in enumerate((1, 6, 6, 5)):
        labels[row, :valid] = torch.randint(0, 3, (valid,))
    return {"input": torch.randn(4, 6, 8), "labels": labels}


def _tokens() -> Inputs:
    return {"input_ids": torch.randint(0, 50, (2, 6)), "labels": torch.randint(0, 50, (2, 6))}


def _skip_inputs() -> Inputs:
    return {"x": torch.randn(8, 16), "keep": torch.tensor([True, False, True, True] * 2)}


def _heads(heads: int) -> Case:
    return Case(
        lambda: Heads(heads, 4), lambda: {"x": torch.randn(4, 4, 8 * heads)}, mean_square
    )


CASES: dict[str, Case] = {
    **{f"heads_{h}": _heads(h) for h in (12, 14, 28)},
    "tied": Case(Tied, lambda: _ids(4, 6, 101), next_token),
    "two_uses": Case(TwoUses, lambda: {"x": torch.randn(4, 16)}, mean_square),
    "weight_and_bias": Case(WeightAndBias, lambda: {"x": torch.randn(4, 3)}, mean_square),
    "vocabulary": Case(Vocabulary, lambda: _ids(2, 4, 50257), next_token),
    "confident": Case(Confident, lambda: {"ids": torch.full((2, 4), 7)}, next_token),
    "grouped_query": Case(GroupedQuery, lambda: {"x": torch.randn(2, 5, 128)}, mean_square),
    "skip": Case(Skip, _skip_inputs, both_outputs),
    "skip_first": Case(Skip, _skip_inputs, first_output),
    "late_class": Case(LateClass, _skip_inputs, both_outputs),
    "microbatches": Case(lambda: WithTarget(small_stack()), _pair, mean_error),
    "ignored": Case(lambda: WithTarget(small_stack()), _ignored, labelled),
    "drops": Case(Drops, lambda: {"x": torch.ones(8, 64)}, second_sum),
    "drop_blocks": Case(DropBlocks, lambda: {"x": torch.ones(8, 16)}, second_sum),
    "library": Case(Library, _tokens),
    "flattened": Case(Flattened, lambda: {"x": torch.randn(6, 256)}, mean_square),
    "rotary": Case(Rotary, lambda: {"x": torch.randn(4, 6, 16)}, mean_square),
    "turned": Case(Turned, lambda: {"x": torch.randn(4, 6, 16)}, mean_square),
    "conv": Case(ConvNet, lambda: {"x": torch.randn(8, 3, 8, 8)}, mean_square),
    "parallel_residual": Case(ParallelResidual, lambda: {"x": torch.randn(4, 6, 32)}, mean_square),
    "custom": Case(Custom, lambda: {"x": torch.randn(4, 16)}, mean_square),
    "loose": Case(Loose, lambda: {"x": torch.randn(4, 16)}, mean_square),
    "counting": Case(Counting, lambda: {"x": torch.randn(4, 8)}, mean_square),
    "adapted": Case(Adapted, lambda: {"x": torch.randn(4, 16)}, mean_square),
}


def build(name: str, seed: int = 0) -> tuple[nn.Module, Inputs, Loss | None]:
    """The case's model in training mode, its batch and its loss; float64, the same for every call with one seed."""
    case = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = case.model().double().train()  # complex tensors stay complex
        inputs = case.inputs()
    doubled = {k: v.to(torch.float64) if v.is_floating_point() else v for k, v in inputs.items()}
    return model, doubled, case.loss


def tensors_of(result: object) -> list[Tensor]:
    """The tensors of a model's output, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [t for part in result for t in tensors_of(part)]
    if isinstance(result, dict):
        return [t for part in result.values() for t in tensors_of(part)]
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return [
            t for f in dataclasses.fields(result) for t in tensors_of(getattr(result, f.name))
        ]
    return []
