"""Tells whether two drafters hold the same weights."""

from __future__ import annotations

import hashlib

import torch

from .base import BlockDrafter


def weights_fingerprint(drafter: BlockDrafter) -> str:
    """SHA-256 of all weights by name and shape, numbers rounded to bfloat16; hexadecimal.

    The rounding makes it the same for a checkpoint loaded in float32 or in bfloat16. Integers count as they are.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.state_dict().items()):
        digest.update(f"{name} {[*tensor.shape]}\n".encode())
        dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
        digest.update(tensor.detach().to("cpu", dtype).contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
