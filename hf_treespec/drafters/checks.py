"""What a drafter and its target must have in common, one function a rule.

The target decides every token, so a broken rule never shows in the output. It shows in the time: drafts are refused,
quietly, and decoding is slower than without a drafter. Hence each rule says what it found, what it wanted and what to
do. What cannot work is an error before anything is decoded; what may only be slow is one warning for a pair.

A family lists its rules in `BlockDrafter.rules`. None of them runs a forward of the target or reads its vocabulary.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..sources import is_hub_id
from . import probes
from .base import BlockDrafter
from .rope import describe_rope, stretching, target_ropes

logger = logging.get_logger(__name__)

#: Vocabularies that differ by at most this share are taken for one tokenizer's, padded or extended differently.
_RESIZED = 0.02
#: A row of an embedding this much smaller than its neighbours' has never been trained.
_UNTRAINED = 1e-3
#: Window to suggest to drafters of long contexts: what published ones with windows have.
_LONGEST_WINDOW = 2048
#: Relative error of rotary frequencies that float32 arithmetic explains.
_ROUNDING = 1e-4
#: Parts of a model's name that say how it is stored, not what it is.
_STORAGE = re.compile(
    r"[-_.](awq|gptq|gguf|bnb|hf|mlx|nf4|fp8|fp16|bf16|int4|int8|[48]bit|mxfp4|nvfp4|w\d+a\d+|dynamic|quantized)\b"
)


class Status(StrEnum):
    """What became of a rule."""

    fits = "fits"
    slow = "slow"
    wrong = "wrong"
    unchecked = "not checked"


@dataclass(frozen=True)
class Finding:
    """What a rule came to.

    Attributes:
        rule: What it is about, in a word or two.
        status: Whether it holds.
        found: The values found.
        wanted: What they should be; empty where the rule holds.
        fix: What to do; empty where the rule holds.
    """

    rule: str
    status: Status
    found: str
    wanted: str = ""
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.found}; {self.wanted}. {self.fix}" if self.wanted else self.found


#: A rule looks at a pair; the target's weights may be on the meta device.
Rule = Callable[[BlockDrafter, PreTrainedModel], Iterable[Finding]]

#: What a pair was like when it was last found to fit, by the drafter's weights and then by target.
_CHECKED: weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[PreTrainedModel, Any]] = (
    weakref.WeakKeyDictionary()
)
#: Drafters whose user has been told that a call goes beyond the trained positions.
_TOLD_LENGTH: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def examine(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """What each rule of the drafter's family finds, in order."""
    for rule in drafter.rules:
        yield from rule(drafter, target)


def check(drafter: BlockDrafter, target: PreTrainedModel) -> None:
    """Holds a pair to the rules of the drafter's family; a pair that fitted once costs nothing the next time.

    Raises:
        ValueError: A rule is broken; the message says the values found, the ones wanted and the fix.
    """
    seen = _CHECKED.setdefault(drafter.weights, weakref.WeakKeyDictionary())
    state = _state(drafter, target)
    if seen.get(target) == state:
        return
    slow = []
    for finding in examine(drafter, target):
        if finding.status is Status.wrong:
            raise ValueError(str(finding))
        if finding.status is Status.slow:
            slow.append(f"{finding.rule}: {finding}")
    if slow:
        logger.warning(f"This drafter may be slow for this target; no token changes. {' '.join(slow)}")
    seen[target] = state


def _state(drafter: BlockDrafter, target: PreTrainedModel) -> tuple[Any, ...]:
    """What a verdict depends on, as far as it can change under the same two objects."""
    borrowed = (target.get_input_embeddings(), target.get_output_embeddings())
    weights = [getattr(module, "weight", None) for module in borrowed]
    return (
        dict(vars(drafter.config)),
        drafter.dtype,
        *((id(weight), weight.shape, weight.dtype) for weight in weights if weight is not None),
        target.config.get_text_config().vocab_size,
    )


def _fits(rule: str, found: str) -> Finding:
    return Finding(rule, Status.fits, found)


def _text(target: PreTrainedModel) -> PreTrainedConfig:
    return target.config.get_text_config()


# Shapes


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
        yield _fits("target", name)


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
    config, found = drafter.config, _text(target).hidden_size
    if _own(drafter, "embed_tokens") is None or _own(drafter, "lm_head") is None:
        yield _equal("width", found, config.hidden_size, "hidden size", "hidden_size")
    yield _equal("width", found, config.target_hidden_size, "feature width", "target_hidden_size")


def _own(drafter: BlockDrafter, name: str) -> Any:
    """The drafter's own embedding or head, where its checkpoint has one."""
    return getattr(drafter.backbone, name, None)


def _equal(rule: str, found: int, wanted: int, what: str, field: str) -> Finding:
    if found == wanted:
        return _fits(rule, f"{what} {found}")
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
    count = _text(target).num_hidden_layers
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
        yield _equal("layers", count, config.num_target_layers, "number of layers", "num_target_layers")
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
    yield _fits(rule, f"{', '.join(map(str, ids))} of {count}")


def _shift(ids: list[int], count: int) -> int:
    """By how much ids are off the published spread (DFlash, A.3), where that is one up or down for all; else 0."""
    last = count - 3
    if len(ids) < 3 or last - 1 < len(ids):
        return 0
    spread = [round(1 + index * (last - 1) / (len(ids) - 1)) for index in range(len(ids))]
    offsets = {layer - wanted for layer, wanted in zip(ids, spread, strict=True)}
    return offsets.pop() if offsets in ({1}, {-1}) else 0


# Tokens


def vocabulary(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """Both speak of the same tokens, as far as sizes tell."""
    found, wanted = _text(target).vocab_size, drafter.config.vocab_size
    if wanted is None or found == wanted:
        yield _fits("vocabulary", f"{found:,} tokens")
    elif abs(found - wanted) <= _RESIZED * min(found, wanted):
        yield Finding(
            "vocabulary",
            Status.slow,
            f"the target's vocabulary size is {found}, the drafter's vocab_size is {wanted}",
            "they are equal unless the target's embedding was resized",
            "Nothing to do if it was; else use the target this drafter was trained for.",
        )
    else:
        yield _equal("vocabulary", found, wanted, "vocabulary size", "vocab_size")


def special_tokens(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """Begin and end of a text are the same tokens, as they are with the same tokenizer."""
    rule, differing = "special tokens", []
    for name in ("bos_token_id", "eos_token_id"):
        own, theirs = _ids(drafter.config, name), _ids(_text(target), name)
        theirs |= _ids(target.config, name) | _ids(getattr(target, "generation_config", None), name)
        if own and theirs and not own & theirs:
            differing.append(f"{name} {sorted(theirs)} in the target, {sorted(own)} in the drafter")
    if differing:
        yield Finding(
            rule,
            Status.slow,
            ", ".join(differing),
            "one tokenizer has one of each",
            "If the target has another tokenizer than the one this drafter was trained with, use another drafter.",
        )
    else:
        yield _fits(rule, "no contradiction")


def _ids(config: Any, name: str) -> set[int]:
    value = getattr(config, name, None)
    return set() if value is None else set(value) if isinstance(value, (list, tuple, set)) else {int(value)}


def mask_token(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """The token that fills undrafted rows is a row of the target's embedding, and has no other use."""
    rule, mask, text = "mask token", drafter.config.mask_token_id, _text(target)
    own_embedding = _own(drafter, "embed_tokens")
    embedding = own_embedding or target.get_input_embeddings()
    if embedding is None:
        return
    rows = embedding.weight.shape[0]
    if not 0 <= mask < rows:
        whose = "target" if own_embedding is None else "drafter"
        yield Finding(
            rule,
            Status.wrong,
            f"mask_token_id {mask} is no row of the {whose}'s embedding, which has {rows}",
            "the drafter fills its block with that row",
            f"Correct mask_token_id in the drafter's config.json or resize the {whose}'s embedding.",
        )
        return
    uses = [
        name.removesuffix("_token_id")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id")
        if mask in _ids(text, name) | _ids(target.config, name) | _ids(drafter.config, name)
    ]
    if uses:
        yield Finding(
            rule,
            Status.slow,
            f"mask_token_id {mask} is the {' and '.join(uses)} token too",
            "drafters are trained with a token of their own",
            "Correct mask_token_id in the drafter's config.json, unless it was trained with this one.",
        )
    if embedding.weight.is_meta:
        yield Finding(rule, Status.unchecked, f"{mask}; its row not checked without weights")
        return
    # The last row stands for the unused tail of a padded vocabulary, from which published masks are taken on purpose.
    others = torch.linspace(0, min(rows, text.vocab_size) - 1, 17, dtype=torch.long)
    probe = torch.cat([torch.tensor([mask]), others]).to(embedding.weight.device)
    with torch.no_grad():
        own, *norms = embedding(probe).float().norm(dim=-1).tolist()
    usual, last = statistics.median(norms), norms[-1]
    if not math.isfinite(own):
        yield Finding(
            rule,
            Status.wrong,
            f"the embedding of mask_token_id {mask} is not finite",
            "every row of a block would be",
            "Check the target's weights.",
        )
    elif own < _UNTRAINED * usual < last:
        yield Finding(
            rule,
            Status.slow,
            f"the embedding of mask_token_id {mask} has norm {own:.2g} where others have {usual:.2g}",
            "a row that was never trained is as a rule not the one the drafter was trained with",
            "Correct mask_token_id in the drafter's config.json.",
        )
    elif not uses:
        yield _fits(rule, f"{mask}, of norm {own:.2g} where others have {usual:.2g}")


# Positions


def rotary_embedding(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """The drafter rotates by the frequencies its configuration states, and these are the target's.

    A drafter has attention of its own, so other frequencies than the target's can be right: those it was trained
    with. But published ones are trained with the target's, and a base or a stretching that differs is how a field that
    was lost on the way looks.
    """
    rule, config = "rotary embedding", drafter.config
    own = config.rope_parameters
    problems = list(_honours(rule, own, config.head_dim, getattr(drafter, "rotary_emb", None)))
    ropes = target_ropes(_text(target))
    same_base = [rope for rope in ropes if rope["rope_theta"] == own["rope_theta"]]
    if ropes and not same_base:
        problems.append(
            Finding(
                rule,
                Status.slow,
                f"the drafter's rope_theta is {own['rope_theta']:,.0f}, the target's "
                f"{' and '.join(format(rope['rope_theta'], ',.0f') for rope in ropes)}",
                "drafters are trained with their target's, as a rule",
                "If its config.json lost the field, restore rope_theta there; nothing to do if it was trained so.",
            )
        )
    elif ropes and not any(stretching(rope) == stretching(own) for rope in same_base):
        problems.append(
            Finding(
                rule,
                Status.slow,
                f"the drafter rotates with {describe_rope(own)}, the target with {describe_rope(same_base[0])}",
                "drafters are trained with their target's frequencies, as a rule",
                "If its config.json lost rope_parameters, restore them there; if the target was stretched for longer "
                "texts since, limit the drafter with draft_window.",
            )
        )
    yield from problems or [_fits(rule, describe_rope(own))]


def _honours(rule: str, own: dict[str, Any], head_dim: int, module: nn.Module | None) -> Iterator[Finding]:
    """Whether a drafter's rotary module has the frequencies that the configuration states."""
    inverse = getattr(module, "inv_freq", None)
    if module is None or inverse is None or inverse.is_meta:
        return
    partial = own.get("partial_rotary_factor") or 1.0
    if 2 * len(inverse) != int(partial * head_dim):
        yield Finding(
            rule,
            Status.slow,
            f"the drafter's config.json states partial_rotary_factor {partial:g}, and {2 * len(inverse)} of "
            f"{head_dim} channels are rotated",
            "it must be trained and run the same way",
            "If it was trained by code that rotates whole heads, as the published does, remove the field.",
        )
        return
    exact = type(module)(module.config).inv_freq
    error = float((inverse.float().cpu() / exact.cpu() - 1).abs().max())
    if error > _ROUNDING:
        yield Finding(
            rule,
            Status.slow,
            f"the drafter's rotary frequencies are off by up to {error:.1%}",
            "they must stay in float32",
            "A cast with .to(dtype) or .half() rounds them: load the drafter with from_pretrained(..., dtype=...).",
        )


def attention_windows(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """A window that the configuration names is one that some layer has."""
    config, rule = drafter.config, "windows"
    windows = [config.layer_window(layer) for layer in range(config.num_hidden_layers)]
    if config.sliding_window and not any(windows):
        yield Finding(
            rule,
            Status.slow,
            f"the drafter's sliding_window is {config.sliding_window}, and no layer in layer_types is sliding",
            "a window that was trained with must be drafted with",
            "Correct layer_types in the drafter's config.json, or set draft_window.",
        )
        return
    yield _fits(rule, describe_windows(windows))


def describe_windows(windows: list[int | None]) -> str:
    """How far layers look back, such as `2048 ×4, all ×1`."""
    groups = [(window, len(list(group))) for window, group in itertools.groupby(windows)]
    return ", ".join(f"{'all' if window is None else window} ×{count}" for window, count in groups)


def check_length(drafter: BlockDrafter, length: int, window: int | None) -> None:
    """Warns, once for a drafter, where a call may go beyond the positions that it was trained at.

    Acceptance collapses there, unless every layer looks back no further than a window.

    Args:
        length: Positions that the call may reach.
        window: The call's `draft_window`.
    """
    config, weights = drafter.config, drafter.weights
    trained = getattr(config, "max_position_embeddings", None)
    if window or trained is None or length <= trained or weights in _TOLD_LENGTH:
        return
    if all(config.layer_window(layer) for layer in range(config.num_hidden_layers)):
        return
    _TOLD_LENGTH.add(weights)
    logger.warning(
        f"This call may reach {length} positions, and the drafter was trained for at most {trained} "
        "(max_position_embeddings). Beyond them few drafts are accepted: limit how far it looks back, such as by "
        f"drafter.with_options(draft_window={min(trained, _LONGEST_WINDOW)})."
    )


# Scales


def embeddings(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """The drafter is given embeddings as the target's own layers are.

    Measured, not read from names: some families scale inside their embedding, others behind it. Where the target
    changes more than a scale (a norm, learned positions), drafters are given the rows themselves.
    """
    rule = "embeddings"
    if _own(drafter, "embed_tokens") is not None:
        yield _fits(rule, "the drafter's own")
        return
    if target.get_input_embeddings() is None:
        return
    if target.get_input_embeddings().weight.is_meta:
        yield Finding(rule, Status.unchecked, "not checked without weights")
        return
    path = probes.embedding_path(target)
    if path is None:
        yield Finding(rule, Status.unchecked, "what the first layer is given could not be measured")
        return
    lost = probes.ratio(path.seen, path.given)
    scale = probes.ratio(path.given, path.rows)
    times = "" if scale is None or probes.is_one(scale) else f", × {scale:.4g}"
    if lost is not None and probes.is_one(lost):
        yield _fits(rule, f"as the target's first layer is given them{times}")
    elif lost is None and scale is not None:
        yield _fits(rule, f"the embedding's rows{times}, without what the target adds to them")
    else:
        seen = "something else" if lost is None else f"{lost:.4g} times that"
        yield Finding(
            rule,
            Status.slow,
            f"the drafter is given the embedding's rows{times}, the target's first layer {seen}",
            "drafters are trained with what the target is given",
            f"{type(target).__name__} scales its embeddings in a way not known here; please report it.",
        )


def logits(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """Behind the head, drafts get the scale and the soft cap that the target's logits get. Measured."""
    rule = "logits"
    if _own(drafter, "lm_head") is not None:
        yield _fits(rule, "of the drafter's own head")
        return
    if target.get_output_embeddings() is None:
        return
    pair = probes.logits_behind_head(target)
    if pair is None:
        yield Finding(rule, Status.unchecked, "what comes behind the head could not be measured")
        return
    wanted, given = pair
    lost = probes.ratio(wanted, given)
    if lost is not None and probes.is_one(lost):
        yield _fits(rule, "as the target's own")
        return
    found = "are capped or bent in a way not known here" if lost is None else f"are {lost:.4g} times the drafter's"
    yield Finding(
        rule,
        Status.slow,
        f"the target's logits {found}",
        "drafts are scored as the target scores",
        "Please report it."
        if lost is None or lost <= 0
        else f"drafter.with_options(drafter_temperature={1 / lost:.4g}) makes up for it.",
    )


# Numbers


def finite(drafter: PreTrainedModel) -> Iterator[Finding]:
    """A drafter in float16 holds finite weights and drafts finite states; other dtypes have the range of float32.

    Looks at every weight, then at a block over random features of unit variance. Features far from that can overflow
    still, which a call notices as it drafts.
    """
    rule = "precision"
    if drafter.dtype != torch.float16:
        yield _fits(rule, str(drafter.dtype).removeprefix("torch."))
        return
    if any(parameter.is_meta for parameter in drafter.parameters()):
        yield Finding(rule, Status.unchecked, "float16, not checked without weights")
        return
    weights = [name for name, parameter in drafter.named_parameters() if not bool(parameter.isfinite().all())]
    hidden = drafter.probe() if not weights and isinstance(drafter, BlockDrafter) else None
    if not weights and (hidden is None or bool(hidden.isfinite().all())):
        yield _fits(rule, "float16, which holds its weights and a block over random features")
        return
    where = f"its weight {weights[0]}" if weights else "a block over random features"
    yield Finding(
        rule,
        Status.wrong,
        f"the drafter overflows in float16: {where} came out infinite or not a number",
        "nothing it drafts would be accepted",
        "Load it with dtype=torch.bfloat16 or torch.float32; the target may stay in float16.",
    )


def precision(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """The drafter's dtype holds its numbers; the target's may be another."""
    yield from finite(drafter)


# Origin


def trained_target(drafter: BlockDrafter, target: PreTrainedModel) -> Iterator[Finding]:
    """The target is the one whose name the drafter's configuration records, where both are known."""
    rule = "trained for"
    recorded = getattr(drafter.config, "target_name_or_path", None)
    name = getattr(target.config, "_name_or_path", "") or ""
    if not recorded or not is_hub_id(name):
        yield Finding(rule, Status.unchecked, recorded or "not recorded")
    elif model_name(recorded) == model_name(name):
        yield _fits(rule, recorded)
    else:
        yield Finding(
            rule,
            Status.slow,
            f"the drafter was trained for {recorded}, the target is {name}",
            "acceptance is best with the target it was trained for",
            "Nothing to do if this is a fine-tune of it.",
        )


def model_name(name: str) -> str:
    """What a model is called, whoever uploaded it and however it is quantised."""
    bare = name.rstrip("/").rpartition("/")[2].lower()
    while (shorter := _STORAGE.sub("", bare)) != bare:
        bare = shorter
    return bare
