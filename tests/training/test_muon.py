"""The optimizer of small models trained from scratch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hf_treespec.training.muon import MuonWithAdamW, orthogonalise


@pytest.mark.parametrize("shape", [(3, 24, 24), (2, 16, 40), (2, 40, 16)])
def test_singular_values_come_near_one(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.quantile(0.1) > 0.5  # the smallest of a square matrix take more iterations
    assert values.max() < 1.3


def test_directions_are_kept() -> None:
    matrices = torch.randn(1, 12, 20, generator=torch.Generator().manual_seed(1))
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    inner = u.mT @ orthogonalise(matrices) @ v.mT
    assert (inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> float:
    loss = torch.zeros(())
    for step in range(start, start + steps):
        inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs[:, :4].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_matrices_and_the_rest_go_apart() -> None:
    named = {"embed_tokens.weight": 2, "layers.0.q_proj.weight": 2, "norm.weight": 1, "lm_head.weight": 2}
    parameters = [(name, nn.Parameter(torch.randn(*[6] * ndim))) for name, ndim in named.items()]
    kinds = {group["kind"]: len(group["params"]) for group in MuonWithAdamW(parameters).param_groups}
    assert kinds == {"muon": 1, "matrices": 2, "vectors": 1}


def test_it_learns() -> None:
    model = network()
    optimizer = MuonWithAdamW(model.named_parameters(), lr=0.01, weight_decay=0.0)
    first = train(model, optimizer, 1)
    assert train(model, optimizer, 150) < 0.2 * first


def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    model = network()
    optimizer = MuonWithAdamW(model.named_parameters(), lr=0.01)
    train(model, optimizer, 10)
    resumed = copy.deepcopy(model)
    again = MuonWithAdamW(resumed.named_parameters(), lr=0.01)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 10, start=10)
    train(resumed, again, 10, start=10)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
