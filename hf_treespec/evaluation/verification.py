"""Is assisted decoding the same as plain decoding? Token for token, and where not: a rounding tie or a bug."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ..decoding.report import GenerationReport
from ..drafters.base import BlockDrafter

#: Score difference below which two tokens of a float32 model count as tied.
FLOAT32_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Difference:
    """The first place where a row differs from plain decoding.

    Scores are what plain decoding decides by, in nats: the processed logits when greedy; when sampling, the processed
    log-probabilities with the step's noise, `log p − log E`, whose argmax is the token drawn.

    Attributes:
        row: Batch row.
        position: Index of the token among the new ones.
        expected: Plain decoding's token; None where its row is the shorter one.
        actual: The token that came instead; None where its row is the shorter one.
        gap: Plain decoding's best score there minus its second best.
        margin: Score of `expected` minus score of `actual`: what rounding would have had to move.
        tolerance: Margins below this are ties.
    """

    row: int
    position: int
    expected: int | None
    actual: int | None
    gap: float
    margin: float
    tolerance: float

    @property
    def verdict(self) -> Literal["tie", "bug"]:
        """`"tie"` where two tokens score the same to rounding; anything else is a `"bug"`."""
        return "tie" if self.margin < self.tolerance else "bug"


@dataclass(frozen=True)
class Verification:
    """One comparison of assisted with plain decoding.

    Attributes:
        plain: Output of plain decoding, long `[B, T]`.
        assisted: Output of assisted decoding, long `[B, T']`.
        prompt_length: Columns of both that are prompt.
        differences: First difference of each row that has one.
        report: What the assisted call reports of itself.
    """

    plain: torch.Tensor
    assisted: torch.Tensor
    prompt_length: int
    differences: tuple[Difference, ...]
    report: GenerationReport | None

    @property
    def identical(self) -> bool:
        """Whether every row is the same, token for token."""
        return not self.differences

    @property
    def passed(self) -> bool:
        """Whether every difference is a rounding tie."""
        return all(difference.verdict == "tie" for difference in self.differences)

    @property
    def new_tokens(self) -> int:
        """Columns that plain decoding generated."""
        return self.plain.shape[1] - self.prompt_length


def verify(
    target: PreTrainedModel,
    drafter: BlockDrafter,
    inputs: dict[str, torch.Tensor],
    *,
    seed: int = 0,
    tolerance: float | None = None,
    **options: Any,
) -> Verification:
    """Decodes once plainly and once assisted, from the same seed, and compares.

    Args:
        target: The model whose output must not change.
        drafter: Its drafter.
        inputs: Model inputs of any batch size, `input_ids` among them unless `inputs_embeds` are given.
        seed: Seed of both calls; the caller's generators are left untouched.
        tolerance: Margin below which a difference is a tie. Default: 1e-4 for float32; for narrower dtypes four units
            of rounding at the size of the largest score.
        **options: Whatever else `generate` takes, such as `do_sample=True, max_new_tokens=64`.
    """
    with _forked_generators(target.device):
        torch.manual_seed(seed)
        plain = target.generate(**inputs, **options)
        torch.manual_seed(seed)
        assisted = target.generate(**inputs, assistant_model=drafter, **options)
    differences = judge_differences(target, inputs, plain, assisted, seed=seed, tolerance=tolerance, **options)
    prompt_length = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
    return Verification(plain, assisted, prompt_length, differences, drafter.last_report)


def judge_differences(
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    plain: torch.Tensor,
    assisted: torch.Tensor,
    *,
    seed: int = 0,
    tolerance: float | None = None,
    **options: Any,
) -> tuple[Difference, ...]:
    """First difference of each row between two outputs of the same request, `[B, T]` and `[B, T']`.

    Plain decoding runs again up to each difference, to see by how much it decided; the other arguments are `verify`'s.
    """
    prompt_length = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
    with _forked_generators(target.device):
        return tuple(
            _judge(target, inputs, options, seed, tolerance, row, position, plain, assisted, prompt_length)
            for row, position in first_differences(plain[:, prompt_length:], assisted[:, prompt_length:])
        )


def _forked_generators(device: torch.device) -> AbstractContextManager[None]:
    """Leaves the caller's generators as they are."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def first_differences(expected: torch.Tensor, actual: torch.Tensor) -> list[tuple[int, int]]:
    """Rows of two long tensors `[B, T]` and `[B, T']` that differ, each with its first differing column.

    Where one tensor is a prefix of the other, the first column that only one has counts as different.
    """
    common = min(expected.shape[1], actual.shape[1])
    unequal = expected[:, :common] != actual[:, :common]
    found = []
    for row, columns in enumerate(unequal.tolist()):
        if any(columns):
            found.append((row, columns.index(True)))
        elif expected.shape[1] != actual.shape[1]:
            found.append((row, common))
    return found


def _judge(
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    options: dict[str, Any],
    seed: int,
    tolerance: float | None,
    row: int,
    position: int,
    plain: torch.Tensor,
    assisted: torch.Tensor,
    prompt_length: int,
) -> Difference:
    column = prompt_length + position
    if column >= min(plain.shape[1], assisted.shape[1]):
        expected, actual = (
            int(tokens[row, column]) if column < tokens.shape[1] else None for tokens in (plain, assisted)
        )
        return Difference(row, position, expected, actual, math.inf, math.inf, tolerance or FLOAT32_TOLERANCE)
    expected, actual = int(plain[row, column]), int(assisted[row, column])
    processed, decisive = _replay(target, inputs, options, seed, position)
    if tolerance is None:
        tolerance = FLOAT32_TOLERANCE
        if target.dtype not in (torch.float32, torch.float64):
            tolerance = 4 * torch.finfo(target.dtype).eps * max(1.0, abs(processed[row].max().item()))
    scores = decisive[row]
    best = scores.topk(2).values.tolist()
    return Difference(
        row,
        position,
        expected,
        actual,
        gap=best[0] - best[1],
        margin=(scores[expected] - scores[actual]).item(),
        tolerance=tolerance,
    )


class _StopAfter(StoppingCriteria):
    """Stops once `steps` tokens are out, and keeps the generator's state from before the last of them was drawn."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.steps = steps
        self.device = device
        self.calls = 0
        self.state = _generator(device).get_state()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.steps - 1:
            self.state = _generator(self.device).get_state()
        return torch.full((len(input_ids),), self.calls >= self.steps, dtype=torch.bool, device=input_ids.device)


def _generator(device: torch.device) -> torch.Generator:
    """The global generator of a device."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _replay(
    target: PreTrainedModel, inputs: dict[str, torch.Tensor], options: dict[str, Any], seed: int, position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decodes plainly again up to a step; its processed scores and the scores that decide it, float32 `[B, V]`."""
    torch.manual_seed(seed)
    stop = _StopAfter(position + 1, target.device)
    criteria = StoppingCriteriaList([*options.get("stopping_criteria", []), stop])
    requested = {name: value for name, value in options.items() if name not in ("stopping_criteria", "streamer")}
    requested |= {"return_dict_in_generate": True, "output_scores": True}
    processed = target.generate(**inputs, stopping_criteria=criteria, **requested).scores[position].float()
    config = requested.get("generation_config") or target.generation_config
    if not requested.get("do_sample", config.do_sample):
        return processed, processed
    # torch.multinomial draws argmax(p / E) with E exponential; here in logarithms.
    generator = torch.Generator(processed.device)
    generator.set_state(stop.state)
    noise = torch.empty_like(processed).exponential_(generator=generator)
    return processed, processed.log_softmax(-1) - noise.log()
