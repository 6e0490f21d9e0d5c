"""Teaches transformers' `generate()` and pipelines to decode with a block drafter.

Three functions of transformers are wrapped, on the class and the module, so that every model and pipeline sees them.
The wrappers act only when the assistant is a `BlockDrafter`, and step aside when the generation config asks for
transformers' own DFlash loop (`speculation_type="dflash"`). Besides, `generate` takes the option `treespec` like
those that every generation config has, and refuses the mere name of an assistant.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
import transformers.pipelines.base as pipelines_base
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin
from transformers.utils import logging

from ..attention import interface
from ..caches import UnsupportedCacheError
from ..drafters.auto import AutoDrafter, drafting_device, family_of
from ..drafters.base import BlockDrafter, check_unwrapped
from ..sources import find_source
from .report import GenerationReport
from .rounds import TreeDecoding
from .support import UnsupportedRequestError, check_request, check_tokenizers, decoding_config

logger = logging.get_logger(__name__)


def _is_ours(assistant: Any, generation_config: GenerationConfig) -> bool:
    if not isinstance(assistant, BlockDrafter):
        return False
    return getattr(generation_config, "speculation_type", None) != "dflash"


def _go_on_without(drafter: BlockDrafter, refusal: Exception) -> None:
    """Warns that a call is decoded without its drafter, and leaves a report that says why."""
    drafter.last_report = GenerationReport(reason=str(refusal))
    logger.warning(f"Decoding without the drafter. {refusal}")


def _wrap_assisted_decoding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _assisted_decoding(
        self: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        inputs_tensor: torch.Tensor | None = None,
        assistant_model: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not _is_ours(assistant_model, generation_config):
            return original(
                self,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                inputs_tensor=inputs_tensor,
                assistant_model=assistant_model,
                **kwargs,
            )
        model_kwargs = {key: kwargs[key] for key in kwargs if key not in ("tokenizer", "assistant_tokenizer")}
        config = decoding_config(assistant_model, generation_config)
        try:
            if synced_gpus:
                raise UnsupportedRequestError(
                    "Ranks of a synchronised run would need different numbers of forwards (synced_gpus=True). "
                    "Generate on each rank alone, or without a drafter."
                )
            check_request(self, assistant_model, generation_config, model_kwargs)
            decoding = TreeDecoding(
                self,
                assistant_model,
                config,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                streamer,
                model_kwargs,
            )
        except (UnsupportedRequestError, UnsupportedCacheError) as refusal:
            if config.on_unsupported == "raise":
                raise
            _go_on_without(assistant_model, refusal)
            return self._sample(
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )
        try:
            return decoding.run()
        finally:
            decoding.close()
            assistant_model.last_report = decoding.report

    return _assisted_decoding


def _wrap_validate_generation_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _validate_generation_mode(
        self: PreTrainedModel,
        generation_mode: GenerationMode,
        generation_config: GenerationConfig,
        generation_mode_kwargs: dict[str, Any],
    ) -> Any:
        drafter = generation_mode_kwargs.get("assistant_model")
        if isinstance(drafter, (str, os.PathLike)):
            name = os.fspath(drafter)
            raise TypeError(
                f"`generate` takes a loaded `assistant_model`, got the name {name!r}. Load it: "
                f"`hf_treespec.AutoDrafter.from_pretrained({name!r})`, or "
                f"`AutoModelForCausalLM.from_pretrained({name!r})` where it is no drafter. `pipeline` loads by name."
            )
        check_unwrapped(drafter)
        if not _is_ours(drafter, generation_config):
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        assert isinstance(drafter, BlockDrafter)
        check_tokenizers(generation_mode_kwargs.get("tokenizer"), generation_mode_kwargs.get("assistant_tokenizer"))
        raises = decoding_config(drafter, generation_config).on_unsupported == "raise"
        # What may be decoded plainly is checked by our loop, which modes other than assisted generation pass by.
        if raises or generation_mode != GenerationMode.ASSISTED_GENERATION:
            try:
                check_request(self, drafter, generation_config, {})
            except UnsupportedRequestError as refusal:
                if raises:
                    raise
                _go_on_without(drafter, refusal)
        # What is left to check are rules that hold without an assistant too.
        plain = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
        mode = plain if generation_mode == GenerationMode.ASSISTED_GENERATION else generation_mode
        rest = {key: value for key, value in generation_mode_kwargs.items() if key != "assistant_model"}
        return original(self, mode, generation_config, rest)

    return _validate_generation_mode


def _wrap_load_assistant_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_assistant_model(model: PreTrainedModel, assistant_model: Any, assistant_tokenizer: Any) -> Any:
        if isinstance(assistant_model, str) and family_of(find_source(assistant_model)) is not None:
            assistant_model = AutoDrafter.from_pretrained(assistant_model)
        check_unwrapped(assistant_model)
        if not isinstance(assistant_model, BlockDrafter):
            return original(model, assistant_model, assistant_tokenizer)
        return assistant_model.to(device=drafting_device(model)), assistant_tokenizer

    return load_assistant_model


_WRAPPED: tuple[tuple[Any, str, Callable[..., Any], tuple[str, ...]], ...] = (
    (
        GenerationMixin,
        "_assisted_decoding",
        _wrap_assisted_decoding,
        ("input_ids", "logits_processor", "stopping_criteria", "generation_config", "assistant_model"),
    ),
    (
        GenerationMixin,
        "_validate_generation_mode",
        _wrap_validate_generation_mode,
        ("generation_mode", "generation_config", "generation_mode_kwargs"),
    ),
    (
        pipelines_base,
        "load_assistant_model",
        _wrap_load_assistant_model,
        ("model", "assistant_model", "assistant_tokenizer"),
    ),
)


#: Our wrappers in place, and what they wrap.
_installed: dict[tuple[Any, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}


def install() -> None:
    """Wraps the three functions and registers tree attention. Idempotent.

    Raises:
        RuntimeError: This version of transformers has other signatures than the wrappers were written for.
    """
    for owner, name, wrap, expected in _WRAPPED:
        if (owner, name) in _installed:
            continue
        function = getattr(owner, name)
        missing = [parameter for parameter in expected if parameter not in inspect.signature(function).parameters]
        if missing:
            raise RuntimeError(
                f"transformers' `{name}` has no parameter {', '.join(missing)}; this version is not supported. "
                "Install a version named in the project's requirements."
            )
        wrapper = wrap(function)
        _installed[owner, name] = (wrapper, function)
        setattr(owner, name, wrapper)
    # `generate` takes as keywords what a generation config has: so does `treespec` become one.
    GenerationConfig.treespec = None
    interface.install()


def uninstall() -> None:
    """Gives transformers its own functions back. Idempotent.

    Raises:
        RuntimeError: Another library has wrapped a function after us; it must be taken off first.
    """
    for (owner, name), (wrapper, function) in list(_installed.items()):
        if getattr(owner, name) is not wrapper:
            raise RuntimeError(f"`{name}` has been wrapped by another library since; take that wrapper off first.")
        setattr(owner, name, function)
        del _installed[owner, name]
    if "treespec" in vars(GenerationConfig):
        del GenerationConfig.treespec
    interface.uninstall()
