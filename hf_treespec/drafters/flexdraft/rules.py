"""What a FlexDraft drafter and its target must have in common, beside the rules of all drafters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from ...attention.masks import layer_kinds
from ..checks import Finding, Status
from .layout import attention_of, decoder_of, differences, final_norm_of, layout_of, rotaries_of

#: Fields of targets whose layers need more than a hidden state, each with what they need.
_BESIDE_HIDDEN = {
    "hidden_size_per_layer_input": "an embedding of each row's token in every layer",
    "num_kv_shared_layers": "keys and values of other layers",
}
_OTHER_TARGET = "Use the target this drafter was trained for."


def same_shape(drafter: Any, target: PreTrainedModel) -> Iterator[Finding]:
    """Width, depth and vocabulary are the target's: the drafter is a part of it."""
    text, config = target.config.get_text_config(), drafter.config
    wanted = {
        "hidden size": (text.hidden_size, config.hidden_size, "hidden_size"),
        "number of layers": (text.num_hidden_layers, config.num_target_layers, "num_target_layers"),
        "vocabulary size": (text.vocab_size, config.vocab_size, "vocab_size"),
    }
    for what, (found, own, field) in wanted.items():
        if found != own:
            yield Finding(
                "shape",
                Status.wrong,
                f"the target's {what} is {found}, the drafter's {field} is {own}",
                "they must be equal",
                _OTHER_TARGET,
            )
            return
    yield Finding("shape", Status.fits, f"width {config.hidden_size}, {config.num_target_layers} layers")


def takes_mask_rows(drafter: Any, target: PreTrainedModel) -> Iterator[Finding]:
    """Rows that are no tokens can pass the target's last layers."""
    rule, text, config = "mask rows", target.config.get_text_config(), drafter.config
    for field, need in _BESIDE_HIDDEN.items():
        if getattr(text, field, None):
            yield Finding(
                rule,
                Status.wrong,
                f"layers of {type(target).__name__} need {need} ({field}={getattr(text, field)})",
                "mask rows do not have it",
                "Use a DFlash drafter for this target.",
            )
            return
    try:
        (decoder, layers), kinds = decoder_of(target), layer_kinds(text)
        final_norm_of(decoder)
        rotaries_of(decoder)
        attentions = {layer: attention_of(layers[layer]) for layer in config.target_layer_ids}
    except ValueError as error:
        yield Finding(
            rule,
            Status.wrong,
            str(error),
            "mask rows need layers of attention with rotary positions",
            "Use a DFlash drafter for this target.",
        )
        return
    for layer, attention in attentions.items():
        if kinds[layer].name == "chunked_attention" or hasattr(attention, "indexer"):
            yield Finding(
                rule,
                Status.wrong,
                f"layer {layer} of the target ({type(attention).__name__}) chooses what it attends to by chunks or an "
                "index",
                "mask rows have neither",
                "Use a DFlash drafter for this target.",
            )
            return
    yield Finding(rule, Status.fits, f"enter at layer {config.split_layer} of {len(layers)}")


def same_projections(drafter: Any, target: PreTrainedModel) -> Iterator[Finding]:
    """The attention of each layer has the projections and norms that the drafter has tensors for."""
    try:
        layers = decoder_of(target)[1]
        for index, layer in enumerate(drafter.config.target_layer_ids):
            lines = differences(layout_of(attention_of(layers[layer])), drafter.config.layout(index))
            if lines:
                yield Finding(
                    "projections",
                    Status.wrong,
                    f"attention of the target's layer {layer} has other projections: {'; '.join(lines)}",
                    "they must be those the drafter was tuned for",
                    _OTHER_TARGET,
                )
                return
    except (ValueError, IndexError):
        return  # the other rules say so
    yield Finding("projections", Status.fits, ", ".join(drafter.config.layout(0)))


def shows_no_rows(drafter: Any, target: PreTrainedModel) -> Iterator[Finding]:
    """The target is not asked for values that would hold mask rows among the text's."""
    text = target.config.get_text_config()
    flags = [flag for flag in ("output_attentions", "output_router_logits") if getattr(text, flag, False)]
    for flag in flags:
        yield Finding(
            "outputs",
            Status.wrong,
            f"{flag}=True in the target's config",
            "these values would hold mask rows among the text's",
            f"Set {flag}=False while a FlexDraft drafter drafts inside the target.",
        )
    if not flags:
        yield Finding("outputs", Status.fits, "of the text alone")
