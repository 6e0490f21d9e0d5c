"""What a drafter and its target must have in common, one function a rule.

The target decides every token, so a broken rule never shows in the output. It shows in the time: drafts are refused,
quietly, and decoding is slower than without a drafter. Hence each rule says what it found, what it wanted and what to
do. What cannot work is an error before anything is decoded; what may only be slow is one warning for a pair.

A family lists its rules in `BlockDrafter.rules`. None of them runs a forward of the target or reads its vocabulary.
"""

from .architecture import decoder_only, feature_layers, lends_modules, widths
from .attaching import check, examine, logger
from .findings import Finding, Rule, Status, own
from .numbers import embeddings, finite, logits, precision
from .origin import model_name, trained_target
from .positions import attention_windows, check_length, describe_windows, rotary_embedding
from .tokens import draft_vocabulary, mask_in_tokenizer, mask_token, special_tokens, vocabulary

__all__ = [
    "Finding",
    "Rule",
    "Status",
    "attention_windows",
    "check",
    "check_length",
    "decoder_only",
    "describe_windows",
    "draft_vocabulary",
    "embeddings",
    "examine",
    "feature_layers",
    "finite",
    "lends_modules",
    "logger",
    "logits",
    "mask_in_tokenizer",
    "mask_token",
    "model_name",
    "own",
    "precision",
    "rotary_embedding",
    "special_tokens",
    "trained_target",
    "vocabulary",
    "widths",
]
