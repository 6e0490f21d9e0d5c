"""What cannot be decoded with a drafter, found out before prefill and refused by name."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation.utils import GenerationMixin

from ..attention.masks import layer_kinds
from ..configuration import TreeSpecConfig
from ..drafters.base import BlockDrafter
from ..drafters.fields import COUNT

#: Ways of generation that exclude a drafter, by the generation option that asks for them.
_EXCLUSIVE = ("prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit", "assistant_ensemble_weight")

#: `generate` fills `num_assistant_tokens` with this where the caller said nothing.
_UNSET_ASSISTANT_TOKENS = 20
#: Rotary embeddings whose frequencies follow the longest position of a forward.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

#: How many residual streams a target's layers pass on side by side, by the field that says so.
_STREAMS = ("altup_num_inputs", "hc_mult", "hc_count")


class UnsupportedRequestError(ValueError):
    """A request that a drafter cannot take part in."""


def decoding_config(drafter: BlockDrafter, generation_config: GenerationConfig) -> TreeSpecConfig:
    """The options of one call: the generation config's over the drafter's over the defaults.

    Raises:
        TypeError: The generation config's are no options, or none of this drafter's family.
        ValueError: `num_assistant_tokens` is no depth.
    """
    config, found = drafter.treespec_config or TreeSpecConfig(), getattr(generation_config, "treespec", None)
    if found is not None:
        config = config.overlaid(found)
    depth = generation_config.num_assistant_tokens
    if depth is None or depth == _UNSET_ASSISTANT_TOKENS:
        return config
    if not COUNT.holds(depth):
        raise ValueError(
            f"`num_assistant_tokens` is how many tokens to draft ahead, {COUNT.name}, got {depth!r}. Leave it out for "
            "all that the drafter has, or call `generate` without `assistant_model` to draft none."
        )
    return config.with_options(depth=depth) if config.depth is None else config


def check_request(
    target: PreTrainedModel,
    drafter: BlockDrafter,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Checks everything that can be checked before prefill.

    Raises:
        UnsupportedRequestError: The request cannot be served; the message says the rule, the value passed and the fix.
        ValueError: The drafter does not fit the target, or the call asks for DoLa, which no fallback decodes with.
    """
    config = generation_config
    if getattr(config, "dola_layers", None) is not None:
        raise ValueError(
            "DoLa contrasts the logits of several layers, which a drafter cannot follow and `generate` leaves out "
            f"where `assistant_model` is given (dola_layers={config.dola_layers!r}). Pass one of the two."
        )
    penalty = getattr(config, "penalty_alpha", None) or 0.0
    if penalty > 0.0 and (config.top_k or 0) > 1 and not config.do_sample:
        raise UnsupportedRequestError(
            "Contrastive search ranks candidates by their hidden states, which a drafter cannot follow "
            f"(penalty_alpha={penalty} with top_k={config.top_k}). Drop `penalty_alpha` or `assistant_model`."
        )
    if target.config.is_encoder_decoder:
        raise UnsupportedRequestError(
            f"A block drafter extends decoder-only targets, and {type(target).__name__} is an encoder-decoder. "
            "Call `generate` without `assistant_model`."
        )
    if (config.num_beams or 1) > 1:
        raise UnsupportedRequestError(
            f"A drafter verifies one continuation a row and cannot follow beams (num_beams={config.num_beams}). "
            "Set `num_beams=1` or drop `assistant_model`."
        )
    for option in _EXCLUSIVE:
        value = getattr(config, option, None)
        if value is not None and value is not False:  # 0 is a layer, or a number
            raise UnsupportedRequestError(
                f"`{option}` names another way to speculate and excludes a drafter "
                f"({option}={value!r} with `assistant_model`). Pass one of the two."
            )
    if config.use_cache is False or model_kwargs.get("use_cache") is False:
        raise UnsupportedRequestError(
            "Verification reads the prefix from the cache, so a drafter needs `use_cache=True` (got False)."
        )
    if config.return_dict_in_generate and config.output_attentions:
        raise UnsupportedRequestError(
            "Attentions of a verified tree have the tree's columns, not those of plain decoding, so "
            "`output_attentions=True` cannot be served with a drafter. Drop one of the two."
        )
    check_layers(target.config.get_text_config())
    if "position_ids" not in inspect.signature(target.forward).parameters:
        name = type(target).__name__
        raise UnsupportedRequestError(
            f"{name} keeps a recurrent state, which cannot be rolled back to a branch of the tree. Decode this target "
            "without a drafter."
            if getattr(target, "_is_stateful", False)
            else f"Tree nodes of one depth share a position, so the target must take `position_ids`; {name} does not. "
            "Decode it without a drafter."
        )
    decoder_layers(target)
    if _has_prompt_learning(target):
        raise UnsupportedRequestError(
            "Prompt-learning adapters put virtual tokens in front of every forward, which a verification forward "
            "cannot reproduce. Merge or disable the adapter, or drop `assistant_model`."
        )
    if type(target)._sample is not GenerationMixin._sample:
        raise UnsupportedRequestError(
            f"{type(target).__name__} samples by a loop of its own, which a drafter cannot follow. "
            "Call `generate` without `assistant_model`."
        )
    borrowed = (target.get_input_embeddings(), target.get_output_embeddings())
    if any(module is not None and getattr(module.weight, "is_meta", False) for module in borrowed):
        raise UnsupportedRequestError(
            "A drafter borrows the target's embeddings and head, and offloading keeps them off every device (meta). "
            "Give them a device in `device_map`."
        )
    drafter.check_target(target)


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The target's stack of decoder layers.

    Raises:
        UnsupportedRequestError: The target has no `get_decoder().layers`.
    """
    layers = getattr(target.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedRequestError(
            f"A drafter reads hidden states from the target's decoder layers, but {type(target).__name__} has no "
            "`get_decoder().layers`. Decode this target without a drafter."
        )
    return layers


def check_tokenizers(tokenizer: Any, assistant_tokenizer: Any) -> None:
    """Checks that no tokenizer but the target's was passed for the drafter.

    Raises:
        ValueError: `assistant_tokenizer` has another vocabulary than `tokenizer`, or nothing to compare with.
    """
    if assistant_tokenizer is None or assistant_tokenizer is tokenizer:
        return
    if tokenizer is not None and assistant_tokenizer.get_vocab() == tokenizer.get_vocab():
        return
    raise ValueError(
        f"`assistant_tokenizer` ({type(assistant_tokenizer).__name__} of {len(assistant_tokenizer)} tokens) is not "
        "the target's tokenizer. A drafter reads the target's hidden states and drafts the target's token ids, so it "
        "can have no other: drop `assistant_tokenizer`, and take a drafter made for this target."
    )


def check_layers(text_config: PreTrainedConfig) -> None:
    """Checks that every decoder layer's attention can verify a tree and its output is one state a position.

    Raises:
        UnsupportedRequestError: A layer's is not so.
    """
    for field in _STREAMS:
        if (getattr(text_config, field, None) or 1) > 1:
            raise UnsupportedRequestError(
                f"A drafter reads one hidden state a position, and the layers of {text_config.model_type!r} pass on "
                f"several side by side ({field}={getattr(text_config, field)}). Decode this target without a drafter."
            )
    try:
        layer_kinds(text_config)
    except ValueError as error:
        raise UnsupportedRequestError(
            f"{error}. A recurrent or convolution state cannot be rolled back to a branch of the tree. "
            "Decode this target without a drafter."
        ) from error


def check_positions(text_config: PreTrainedConfig, length: int) -> None:
    """Checks that positions mean the same in a tree as one by one, up to `length` positions.

    Raises:
        UnsupportedRequestError: The rotary frequencies change with the longest position of a forward before that.
    """
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = parameters.get("rope_type") or parameters.get("type")
        original = parameters.get("original_max_position_embeddings") or getattr(
            text_config, "original_max_position_embeddings", None
        )
        original = original or text_config.max_position_embeddings
        if kind in _LENGTH_DEPENDENT_ROPE and length > original:
            raise UnsupportedRequestError(
                f"{kind!r} rotary embeddings change with the longest position of a forward, so a tree would be "
                f"verified with other frequencies than plain decoding has: the call may reach {length} positions, and "
                f"they change after {original}. Ask for fewer tokens, or drop `assistant_model`."
            )


def _has_prompt_learning(target: PreTrainedModel) -> bool:
    prepare = target.__dict__.get("prepare_inputs_for_generation")
    adapter = getattr(getattr(prepare, "__self__", None), "active_peft_config", None)
    return bool(getattr(adapter, "is_prompt_learning", False))
