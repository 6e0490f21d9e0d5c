"""Text a target writes itself: the sequences its drafter is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from ..drafters.base import BlockDrafter
from .streams import PromptStream

#: Rows decoded together where a drafter helps: beyond, verification costs more than drafting saves.
_DRAFTED_ROWS = 8


class _RoomyLayer(DynamicLayer):
    """A cache layer with room for the whole sequence, so that a decoding step copies no past."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.store: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
            batch, heads, _, width = key_states.shape
            self.store = key_states.new_empty(2, batch, heads, self.capacity, width)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        self.store[0, :, :, start:end] = key_states
        self.store[1, :, :, start:end] = value_states
        self.keys, self.values = self.store[:, :, :, :end]
        return self.keys, self.values


def _roomy_cache(target: PreTrainedModel, capacity: int) -> DynamicCache:
    cache = DynamicCache(config=target.config.get_text_config())
    cache.layers = [_RoomyLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@torch.no_grad()
def sample_continuations(
    target: PreTrainedModel,
    prompts: torch.Tensor,
    new_tokens: int,
    *,
    temperature: float = 0.8,
    generator: torch.Generator | None = None,
    drafter: BlockDrafter | None = None,
) -> torch.Tensor:
    """Samples `new_tokens` tokens behind each prompt; end-of-text is a token like any other.

    Args:
        prompts: Prompts of one length, long `[B, P]`.

    Returns:
        Prompts and continuations, long `[B, P + new_tokens]`.
    """
    if drafter is not None:
        return _drafted(target, drafter, prompts, new_tokens, temperature, generator)
    batch, length = prompts.shape
    cache = _roomy_cache(target, length + new_tokens)
    tokens = torch.cat([prompts, prompts.new_zeros(batch, new_tokens)], dim=1)
    fed = prompts
    for position in range(length, length + new_tokens):
        logits = target(input_ids=fed, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        fed = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens[:, position] = fed[:, 0]
    return tokens


def _drafted(
    target: PreTrainedModel,
    drafter: BlockDrafter,
    prompts: torch.Tensor,
    new_tokens: int,
    temperature: float,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """The same by assisted decoding: other draws, since `generate` knows the global generator alone."""
    seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device if generator else "cpu"))
    devices = [prompts.device] if prompts.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        parts = [
            target.generate(
                input_ids=rows,
                attention_mask=torch.ones_like(rows),
                assistant_model=drafter,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=new_tokens,
                eos_token_id=None,
            )
            for rows in prompts.split(_DRAFTED_ROWS)
        ]
    return torch.cat(parts)


def write_continuations(
    target: PreTrainedModel,
    stream: np.ndarray | PromptStream,
    folder: Path,
    *,
    sequences: int,
    prompt_length: int = 128,
    new_tokens: int = 384,
    temperature: float = 0.8,
    batch_size: int = 128,
    seed: int = 0,
    drafter: BlockDrafter | None = None,
) -> np.ndarray:
    """Samples continuations of prompts cut from a token stream at random, into `.npy` shards of one batch.

    Shards that are there already are kept: a killed run goes on where it was. Each shard depends only on the seed, its
    number, and on whether a drafter helps.

    Args:
        stream: Running text `[tokens]`, or a stream that says where prompts may end.
        batch_size: Sequences of a shard.
        drafter: Decodes faster, with the same distribution.

    Returns:
        All sequences, `[sequences, prompt_length + new_tokens]`.
    """
    if isinstance(stream, np.ndarray):
        stream = PromptStream.anywhere(stream)
    ends = stream.ends[stream.ends >= prompt_length]
    folder.mkdir(parents=True, exist_ok=True)
    target.eval()
    for shard in logging.tqdm(range(-(-sequences // batch_size)), desc=f"continuations in {folder.name}"):
        path = folder / f"{shard:05d}.npy"
        if path.exists():
            continue
        rows = min(batch_size, sequences - shard * batch_size)
        draws = np.random.default_rng([seed, shard])
        chosen = ends[draws.integers(0, len(ends), rows)]
        cut = np.stack([stream.tokens[end - prompt_length : end] for end in chosen]).astype(np.int64)
        generator = torch.Generator(target.device).manual_seed(int(draws.integers(2**63)))
        tokens = sample_continuations(
            target,
            torch.from_numpy(cut).to(target.device),
            new_tokens,
            temperature=temperature,
            generator=generator,
            drafter=drafter,
        )
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.save(file, tokens.cpu().numpy().astype(stream.tokens.dtype))
        partial.replace(path)
    return load_continuations(folder)[:sequences]


def load_continuations(path: Path) -> np.ndarray:
    """Every sequence of a `.npy` file, or of all shards in a folder, `[sequences, length]`.

    Raises:
        FileNotFoundError: There are none.
    """
    shards = sorted(path.glob("*.npy")) if path.is_dir() else [path]
    if not shards:
        raise FileNotFoundError(f"{path} holds no .npy shards of continuations.")
    return np.concatenate([np.load(shard) for shard in shards])
