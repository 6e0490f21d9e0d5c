"""Where a target's attention has its projections, found in its modules so that no family needs code of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

#: Of each projection or norm of an attention, by its name there: the shape of each of its tensors.
AttentionLayout = dict[str, dict[str, list[int]]]

_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


def decoder_of(target: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """A target's decoder and its stack of layers.

    Raises:
        ValueError: It has no `get_decoder().layers`.
    """
    decoder = target.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{type(target).__name__} has no `get_decoder().layers`, in whose last layers a FlexDraft drafter drafts; "
            "use a DFlash drafter for this target."
        )
    return decoder, layers


def attention_of(layer: nn.Module) -> nn.Module:
    """The attention of a decoder layer.

    Raises:
        ValueError: The layer has none: a recurrent or convolution layer.
    """
    for child in layer.children():
        if hasattr(child, "layer_idx") and hasattr(child, "is_causal"):
            return child
    mixers = [type(child).__name__ for child in layer.children() if hasattr(child, "layer_idx")]
    raise ValueError(
        f"{type(layer).__name__} has no attention (it mixes tokens by {mixers or 'no known module'}): mask rows mean "
        "nothing to a recurrent state. Draft in fewer layers (target_layer_ids), behind the last recurrent one."
    )


def rotaries_of(decoder: nn.Module) -> list[nn.Module]:
    """The modules by which a decoder computes what its layers take as `position_embeddings`.

    Raises:
        ValueError: It has none.
    """
    found = [module for module in decoder.modules() if "RotaryEmbedding" in type(module).__name__]
    if not found:
        raise ValueError(f"{type(decoder).__name__} has no rotary module, by which mask rows are given positions.")
    return found


def projections_of(attention: nn.Module) -> dict[str, nn.Module]:
    """Children of an attention that have parameters: projections, fused or not, latent ones, and norms."""
    return {name: child for name, child in attention.named_children() if next(child.parameters(), None) is not None}


def final_norm_of(decoder: nn.Module) -> nn.Module:
    """The norm between the last layer and the head.

    Raises:
        ValueError: None is known by its name.
    """
    for name in _FINAL_NORMS:
        norm = getattr(decoder, name, None)
        if isinstance(norm, nn.Module):
            return norm
    raise ValueError(f"{type(decoder).__name__} has no final norm by any of the names {', '.join(_FINAL_NORMS)}.")


def is_linear(projection: nn.Module) -> bool:
    """Whether a projection multiplies by a matrix, whatever it is stored as."""
    return hasattr(projection, "in_features") and hasattr(projection, "out_features")


def layout_of(attention: nn.Module) -> AttentionLayout:
    """Shapes of an attention's projections and norms, as the unquantised tensors have them."""
    layout: AttentionLayout = {}
    for name, child in projections_of(attention).items():
        if is_linear(child):
            layout[name] = {"weight": [child.out_features, child.in_features]}  # type: ignore[list-item]
            bias = getattr(child, "bias", None)
            if isinstance(bias, torch.Tensor):
                layout[name]["bias"] = list(bias.shape)
        else:
            layout[name] = {key: list(tensor.shape) for key, tensor in child.named_parameters(recurse=False)}
    return layout


def differences(found: AttentionLayout, wanted: AttentionLayout) -> Sequence[str]:
    """Where two layouts differ, in words; empty if nowhere."""
    return [
        f"{name}: {wanted.get(name, 'absent')} in the drafter, {found.get(name, 'absent')} in the target"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name)
    ]
