"""The budget policy of a call: learned by earlier calls with the same pair, and kept in a profile between processes.

Latencies belong to the machine and the shapes of both models, so that is what a profile is keyed by and holds. How far
a drafter's promises can be trusted belongs to its weights, and is kept with those, in memory.
"""

from __future__ import annotations

import functools
import platform
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from ..attention.interface import kinds_of_attention
from ..budget import (
    BastionPolicy,
    BudgetController,
    BudgetPolicy,
    FixedBudget,
    LatencyModel,
    ProfileKey,
    ProfileStore,
    Workload,
    measure_peak,
)
from ..configuration import TreeSpecConfig
from ..drafters.base import BlockDrafter

#: Most rows a policy may choose where the options do not say: compute bounds a CPU early.
_CPU_ROWS, _ROWS = 64, 128
#: Seconds between two writes of a profile that is only being corrected.
_SAVE_INTERVAL = 30.0
_SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")

#: Policies at rest, by the drafter's weights: what they learned waits for the next call.
_AT_REST: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], BudgetPolicy]] = weakref.WeakKeyDictionary()
_saved: dict[ProfileKey, float] = {}


@contextmanager
def lend_policy(
    config: TreeSpecConfig, target: PreTrainedModel, drafter: BlockDrafter, cache: Cache
) -> Iterator[BudgetPolicy]:
    """The policy that `config` asks for, for one call; what the call teaches it stays.

    Calls that run at the same time do not share a policy: one that comes while it is lent starts from the profile.
    """
    if isinstance(config.budget, int):
        yield FixedBudget(config.budget)
        return
    largest = config.max_budget or (_CPU_ROWS if target.device.type == "cpu" else _ROWS)
    key = profile_key(target, drafter, cache)
    resting = _AT_REST.setdefault(drafter.weights, {})
    place = (key, config)
    policy = resting.pop(place, None) or _start(config.budget, key, target, largest, drafter.riding_load)
    try:
        yield policy
    finally:
        resting[place] = policy
        if config.budget == "auto" and isinstance(policy, BudgetController) and not policy.calibrating:
            _save(key, policy)


def forget(drafter: BlockDrafter) -> None:
    """Drops what calls with this drafter have learned in this process, so that profiles are read again."""
    _AT_REST.pop(drafter.weights, None)
    _saved.clear()


def _start(name: str, key: ProfileKey, target: PreTrainedModel, largest: int, riding_load: float) -> BudgetPolicy:
    if name == "ema":
        return BudgetController(LatencyModel(), largest)
    profile = ProfileStore().load(key)
    workload = Workload.from_model(target, riding_load)
    peak = measure_peak(target.device, target.dtype) if profile is None else None
    splits = kinds_of_attention(key.attention, target.device)
    controller = BudgetController.from_profile(profile, workload, largest, splits, peak=peak, online=name == "auto")
    return BastionPolicy(controller.latency, largest) if name == "bastion" else controller


def _save(key: ProfileKey, controller: BudgetController) -> None:
    now = time.monotonic()
    if now - _saved.get(key, -_SAVE_INTERVAL) >= _SAVE_INTERVAL:
        _saved[key] = now
        ProfileStore().save(key, controller.profile())


def profile_key(target: PreTrainedModel, drafter: BlockDrafter, cache: Cache) -> ProfileKey:
    """What the latencies of this pair on this machine depend on, contexts and batches apart."""
    from .. import __version__

    on_cpu = target.device.type == "cpu"
    kind = type(cache).__name__
    return ProfileKey(
        device=_cpu_name() if on_cpu else torch.cuda.get_device_name(target.device),
        target=_shape(target.config.get_text_config()),
        drafter=_shape(drafter.config),
        dtype=str(target.dtype).removeprefix("torch."),
        kv_dtype=kind if "Quant" in kind else str(target.dtype).removeprefix("torch."),
        attention=str(getattr(target.config, "_attn_implementation", None)),
        threads=torch.get_num_threads() if on_cpu else 0,
        torch=torch.__version__,
        transformers=transformers.__version__,
        hf_treespec=__version__,
    )


def _shape(config: PreTrainedConfig) -> str:
    sizes = [str(getattr(config, name, None) or 0) for name in _SHAPE]
    vocabulary = getattr(config, "vocab_size", None) or 0
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    block = getattr(config, "block_size", None)
    quantisation = getattr(config, "quantization_config", None)
    parts = [config.model_type, "x".join(sizes), f"v{vocabulary}"]
    parts += [f"e{experts}"] if experts else []
    parts += [f"b{block}"] if block else []
    parts += [str(getattr(quantisation, "quant_method", "quantised"))] if quantisation else []
    return "-".join(parts)


@functools.cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine() or "cpu")
