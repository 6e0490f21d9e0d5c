"""The rules of shapes: a target of the right kind, whose widths and layers are those of the training."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedModel

from ..base import BlockDrafter
from ..feature_layers import spread_layer_ids
from .findings import Finding, Status, fits, own, text_config


def decoder_only(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """The target is a decoder-only causal LM."""
    name = type(target).__name__
    if getattr(target.config, "is_encoder_decoder", False):
        yield Finding(
            "target",
            Status.wrong,
            f"{name} is an encoder-decoder",
            "a block drafter extends decoder-only causal LMs",
            "Call `generate` without `assistant_model`.",
        )
    else:
        yield fits("target", name)


def lends_modules(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """The target has the input embedding and the output head that the drafter borrows."""
    if target.get_input_embeddings() is None or target.get_output_embeddings() is None:
        yield Finding(
            "borrowed modules",
            Status.wrong,
            f"{type(target).__name__} has no input embedding or no output head for the drafter to borrow",
            "it needs both",
            "Load the target with AutoModelForCausalLM.",
        )


def widths(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """Hidden states of the two have the same width, where the drafter borrows the embedding or the head."""
    config, found = drafter.config, text_config(target).hidden_size
    if own(drafter, "embed_tokens") is None or own(drafter, "lm_head") is None:
        yield equal("width", found, config.hidden_size, "hidden size", "hidden_size")
    yield equal("width", found, config.target_hidden_size, "feature width", "target_hidden_size")


def equal(rule: str, found: int, wanted: int, what: str, field: str) -> Finding:
    """A number of the target's that a field of the drafter's configuration must equal."""
    if found == wanted:
        return fits(rule, f"{what} {found}")
    return Finding(
        rule,
        Status.wrong,
        f"the target's {what} is {found}, the drafter's {field} is {wanted}",
        "they must be equal",
        "Use the target this drafter was trained for.",
    )


def feature_layers(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """Features come from the decoder layers they were trained on, in that order, and fill the fusion layer."""
    rule, config = "feature layers", drafter.config
    ids = config.target_layer_ids
    width = config.hidden_size if getattr(config, "feature_adapter", False) else config.target_hidden_size
    count = text_config(target).num_hidden_layers
    fusion = getattr(drafter, "fc", None)
    if fusion is not None and fusion.in_features != len(ids) * width:
        yield Finding(
            "fusion width",
            Status.wrong,
            f"fc takes {fusion.in_features} features, but {len(ids)} feature layers of width {width} give "
            f"{len(ids) * width}",
            "they must be equal",
            "Correct target_layer_ids in the drafter's config.json.",
        )
    if config.num_target_layers is not None:
        yield equal("layers", count, config.num_target_layers, "number of layers", "num_target_layers")
    outside = [layer for layer in ids if not 0 <= layer < count]
    if outside:
        hint = " Ids that count the embedding's output as 0 are to be lowered by one." if max(outside) == count else ""
        yield Finding(
            rule,
            Status.wrong,
            f"target_layer_ids {outside} are no decoder layers of the target",
            f"it has layers 0 to {count - 1}",
            f"Correct target_layer_ids in the drafter's config.json.{hint}",
        )
        return
    if sorted(set(ids)) != list(ids):
        yield Finding(
            rule,
            Status.slow,
            f"target_layer_ids {ids} do not rise",
            "published drafters read each layer once, from the first to the last",
            "Their order must be the one that fc was trained with.",
        )
        return
    shift = _shift(ids, count)
    if shift:
        yield Finding(
            rule,
            Status.slow,
            f"target_layer_ids {ids} lie one {'above' if shift > 0 else 'below'} the published spread",
            f"0-based decoder layers would be {[layer - shift for layer in ids]}",
            "Ids that count the embedding's output as 0 are to be lowered by one."
            if shift > 0
            else "They look as if they had been lowered twice.",
        )
        return
    yield fits(rule, f"{', '.join(map(str, ids))} of {count}")


def _shift(ids: list[int], count: int) -> int:
    """By how much ids are off the published spread, where that is one up or down for all; else 0.

    With one or two ids, or a spread without gaps, a shift says nothing.
    """
    if len(ids) < 3 or len(ids) > count - 5:
        return 0
    offsets = {layer - wanted for layer, wanted in zip(ids, spread_layer_ids(count, len(ids)), strict=True)}
    return offsets.pop() if offsets in ({1}, {-1}) else 0
