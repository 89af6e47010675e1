"""Muon for the matrices, AdamW for the rest, and a moving average of the weights."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

_NOT_MATRICES = ("conv_in", "conv_out", "embedding.weight", "norm")


class Muon(torch.optim.Optimizer):
    """Momentum whose direction is orthogonalised (Jordan et al., 2024).

    Convolutions count as matrices [out, in * kh * kw]. Matrices of one shape are stacked and
    orthogonalised together: small models would otherwise wait on thousands of tiny launches.
    """

    def __init__(
        self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[tuple(parameter.flatten(1).shape)].append(parameter)
            for shape, parameters in by_shape.items():
                self._update(group, shape, parameters)

    def _update(self, group: dict, shape: tuple[int, int], parameters: list[nn.Parameter]) -> None:
        grads = [p.grad for p in parameters]
        for p in parameters:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum"] for p in parameters]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, buffers, group["momentum"])
        stacked = torch.stack([a.reshape(shape) for a in ahead])
        directions = orthogonalise(stacked).to(stacked.dtype)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["decay"])
        # 0.2 * sqrt(longer side) gives the update the size an Adam update would have.
        scale = -group["lr"] * 0.2 * max(shape) ** 0.5
        updates = [d.reshape(p.shape) for d, p in zip(directions, parameters, strict=True)]
        torch._foreach_add_(parameters, updates, alpha=scale)


def orthogonalise(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices of [K, m, n], by a quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Optimizers:
    """Both optimizers behind one learning rate, with gradient clipping."""

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        adam_factor: float = 0.4,
        decay: float = 0.01,
        not_matrices: tuple[str, ...] = _NOT_MATRICES,
    ) -> None:
        """Weights whose names contain one of `not_matrices` are left to AdamW."""
        matrices, rest = [], []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.ndim >= 2 and not any(key in name for key in not_matrices)
            (matrices if is_matrix else rest).append(parameter)
        self.parameters = matrices + rest
        self.lr, self.adam_factor = lr, adam_factor
        self.muon = Muon(matrices, lr, decay=decay)
        self.adam = torch.optim.AdamW(rest, lr, betas=(0.9, 0.99), weight_decay=decay, foreach=True)

    def step(self, rate: float) -> Tensor:
        """Apply the gradients at `rate` times the peak learning rate; their norm before that."""
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        for optimizer, factor in ((self.muon, 1.0), (self.adam, self.adam_factor)):
            for group in optimizer.param_groups:
                group["lr"] = self.lr * factor * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> dict:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


class MovingAverage:
    """Exponential moving average of a model's weights, quicker at the start."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        current = [p.detach() for p in model.parameters()]
        torch._foreach_lerp_(list(self.weights.values()), current, 1 - decay)


def rate_at(progress: float, step: int, warmup: int, decay_share: float) -> float:
    """Share of the peak learning rate: linear warm-up by steps, linear decay by progress."""
    return min(1.0, (step + 1) / warmup, max(0.0, (1 - progress) / decay_share))
