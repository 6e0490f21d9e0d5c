"""What makes two drafters the same to a fingerprint."""

from __future__ import annotations

import torch
from dflash_models import tiny_drafter, tiny_target

from hf_treespec.drafters.fingerprint import weights_fingerprint


def test_the_format_of_the_weights_does_not_matter():
    drafter = tiny_drafter(tiny_target())
    found = weights_fingerprint(drafter)
    assert found == weights_fingerprint(drafter.with_options(budget=4))
    assert found == weights_fingerprint(drafter.to(torch.bfloat16))


def test_one_weight_does():
    drafter = tiny_drafter(tiny_target())
    found = weights_fingerprint(drafter)
    next(drafter.parameters()).data.view(-1)[-1] += 1
    assert found != weights_fingerprint(drafter)
