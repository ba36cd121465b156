# SPDX-License-Identifier: Apache-2.0
"""The models of single public reports: complex tables, convolutions, custom ops, loose tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


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

    table: Tensor

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

    steps: Tensor

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
    q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))
    result = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
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


class Assigned(nn.Module):
    """Writes into slices and whole tensors in place, in another dtype too; joins empty tensors;
    second names of ops.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        rows = torch.zeros_like(h)
        rows[:, :4] = h[:, 4:]
        rows[:, 4:] = h[:1, :4].float()
        whole = torch.zeros_like(h)
        whole[:] = torch.multiply(rows, h.type_as(x))
        whole = torch.cat([torch.tensor([]), whole], -1)
        whole = torch.concat([whole[:, :3], torch.zeros(4, 0, dtype=x.dtype), whole[:, 3:]], -1)
        result: Tensor = self.out(torch.min(whole, torch.tensor(0.5, dtype=x.dtype)))
        return result


class Positioned(nn.Module):
    """One table of positions for the layers and for the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        h = torch.relu(self.mid(self.emb(ids) * positions.unsqueeze(-1)))
        logits = self.head(h * (positions > 1).unsqueeze(-1))
        counted = torch.where(positions > ids.shape[0], labels, -100)
        return functional.cross_entropy(logits.flatten(0, 1), counted.flatten())


class Windows(nn.Module):
    """Overlapping windows along the sequence, read from the start of the memory by strides."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x).transpose(0, 1)  # (seq, batch, width); batch comes first in memory
        seq, (step, row, column) = h.shape[0], h.stride()
        windows = h.as_strided((seq - 2, 3, h.shape[1], 8), (step, step, row, column), 0)
        result: Tensor = self.out(torch.tanh(windows.sum(1)))
        return result
