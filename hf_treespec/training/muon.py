"""Muon for the matrices of a network, AdamW for the rest, as one optimizer.

Muon (Jordan et al., 2024) steps along the orthogonalised momentum: all singular directions of a weight move equally
far. `torch.optim.Muon` orthogonalises in bfloat16, which processors without such units emulate a hundred times slower
than float32; this one stays in the gradient's dtype and handles matrices of one shape together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

#: Quintic iteration that brings all singular values near 1 (the coefficients of the method's authors).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Replaces the singular values of a stack of matrices `[S, m, n]` by values near 1."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon on weight matrices of hidden layers, AdamW on embeddings, heads and vectors.

    Muon's step is scaled by 0.2·√max(m, n), which gives it the size of an AdamW step, so that both take one learning
    rate.

    Args:
        named_parameters: Parameters with their names.
        lr: Learning rate of both.
        weight_decay: Decoupled decay of all matrices.
        momentum: Muon's momentum, with Nesterov's look-ahead.
        betas: AdamW's.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        lr: float = 2e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        groups: dict[str, list[nn.Parameter]] = {"muon": [], "matrices": [], "vectors": []}
        for name, parameter in named_parameters:
            if not parameter.requires_grad:
                continue
            hidden = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            groups["muon" if hidden else "matrices" if parameter.ndim > 1 else "vectors"].append(parameter)
        decays = {"muon": weight_decay, "matrices": weight_decay, "vectors": 0.0}
        super().__init__(
            [
                {"params": parameters, "kind": kind, "weight_decay": decays[kind]}
                for kind, parameters in groups.items()
                if parameters
            ],
            {"lr": lr, "momentum": momentum, "betas": betas},
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            step = self._muon if group["kind"] == "muon" else self._adamw
            step(group, [parameter for parameter in group["params"] if parameter.grad is not None])
        return loss

    def _muon(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            shapes.setdefault(parameter.shape, []).append(parameter)
        for shape, same in shapes.items():
            updates = []
            for parameter in same:
                gradient = parameter.grad
                assert gradient is not None
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(gradient, 1 - group["momentum"])
                updates.append(torch.lerp(gradient, momentum, group["momentum"]))
            size = 0.2 * max(shape) ** 0.5
            for parameter, update in zip(same, orthogonalise(torch.stack(updates)), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * size)

    def _adamw(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        first, second = group["betas"]
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            gradient = parameter.grad
            assert gradient is not None
            state["step"] += 1
            steps = int(state["step"])
            state["mean"].lerp_(gradient, 1 - first)
            state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
            root = (state["square"] / (1 - second**steps)).sqrt_().add_(1e-8)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.addcdiv_(state["mean"], root, value=-group["lr"] / (1 - first**steps))
