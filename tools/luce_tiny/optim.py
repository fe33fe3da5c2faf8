"""Muon for the matrices, AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .model import LuceTiny

# quintic iteration towards the nearest (semi-)orthogonal matrix
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Roughly replace the singular values of g [n, r, c] (r <= c) by ones."""
    a, b, c = _COEFFICIENTS
    x = g.bfloat16() if g.is_cuda else g.float()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.transpose(-1, -2)
        x = a * x + (b * s + c * s @ s) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; matrices of one shape are updated together.

    A three-dimensional parameter is a stack of matrices (one an expert). The update is scaled so that its
    root mean square is 0.2 at lr 1, as AdamW's typically is, so learning rates carry over between shapes.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.1):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                shapes[p.shape[-2:]].append(p)
            for shape, params in shapes.items():
                grad = torch.cat([p.grad.reshape(-1, *shape) for p in params])  # type: ignore[union-attr]
                state = self.state[params[0]]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(grad)
                buffer = state["momentum"]
                buffer.lerp_(grad, 1 - group["momentum"])
                update = grad.lerp(buffer, group["momentum"])
                wide = shape[0] <= shape[1]
                update = orthogonalise(update if wide else update.transpose(-1, -2))
                update = (update if wide else update.transpose(-1, -2)).float() * (0.2 * max(shape) ** 0.5)
                start = 0
                for p in params:
                    n = p.numel() // (shape[0] * shape[1])
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update[start : start + n].view_as(p), alpha=-group["lr"])
                    start += n


def build(model: LuceTiny, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Two optimisers whose groups carry `base_lr` for the schedule."""
    matrices, tables, vectors, rest = [], [], [], []
    for name, p in model.named_parameters():
        if name in {"token_embd", "ngram.table"}:
            tables.append(p)
        elif name != "output" and p.dim() >= 2 and min(p.shape[-2:]) >= 32:
            matrices.append(p)
        elif p.dim() == 1:
            vectors.append(p)
        else:
            rest.append(p)
    fused = next(model.parameters()).is_cuda
    adam = torch.optim.AdamW(
        [
            {"params": tables, "lr": 3 * adam_lr, "weight_decay": 0.0},
            {"params": vectors, "lr": 2 * adam_lr, "weight_decay": 0.0},
            {"params": rest, "lr": adam_lr, "weight_decay": 0.01},
        ],
        betas=(0.9, 0.98), eps=1e-10, fused=fused,
    )
    optimisers: list[torch.optim.Optimizer] = [Muon(matrices, muon_lr), adam]
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["base_lr"] = group["lr"]
    return optimisers
