"""Shows what a drafter costs that does not fit: one of random weights, and one trained for another target.

    python examples/poor_drafters.py --prompts 6 --repeats 3

Cold calls start without a profile and measure the machine first; warm ones go on from earlier calls.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hf_treespec import embedded
from hf_treespec.decoding import budgets
from hf_treespec.drafters.dflash import DFlashDrafter
from hf_treespec.evaluation.encoding import encode_text
from hf_treespec.evaluation.held_out import load_slice
from hf_treespec.evaluation.timing import timed_generate

SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0}


@torch.no_grad()
def shuffled(target: Any) -> Any:
    """The same function with the hidden dimensions in another order: a target that no drafter has seen."""
    other = copy.deepcopy(target)
    decoder = other.get_decoder()
    order = torch.randperm(other.config.hidden_size, generator=torch.Generator().manual_seed(0))
    readers = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    for name, parameter in decoder.named_parameters():
        part = name.split(".")[-2]
        if part in readers or part == "embed_tokens":
            parameter.copy_(parameter[:, order])
        elif part in ("o_proj", "down_proj", "input_layernorm", "post_attention_layernorm", "norm"):
            parameter.copy_(parameter[order])
    return other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    os.environ["HF_TREESPEC_PROFILES"] = folder = tempfile.mkdtemp()
    target, drafter, tokenizer = embedded.load()
    torch.manual_seed(0)
    pairs = {
        "random weights": (target, DFlashDrafter(drafter.config).eval()),
        "of another target": (shuffled(target), drafter.with_options()),
    }
    prompts, _ = load_slice("stdlib-functions", arguments.prompts)
    table = Table(
        title=f"{arguments.max_new_tokens} tokens, plain decoding's time ÷ the drafter's", title_justify="left"
    )
    for column in ("drafter", "", "identical", "median", "least"):
        table.add_column(column, justify="right")
    verdicts = {}
    for name, (model, poor) in pairs.items():
        ratios: dict[str, list[float]] = {"cold": [], "warm": []}
        identical = True
        for index in track(range(len(prompts) * arguments.repeats), name, transient=True):
            inputs = encode_text(tokenizer, prompts[index % len(prompts)], model.device)
            options = {**SAMPLING, "max_new_tokens": arguments.max_new_tokens, "eos_token_id": None, "seed": index}
            plain = timed_generate(model, inputs, **options)
            budgets.forget(poor)
            for file in Path(folder).glob("*.json"):
                file.unlink()
            for measured in ratios.values():
                call = timed_generate(model, inputs, assistant_model=poor, **options)
                measured.append(plain.decode_seconds / call.decode_seconds)
                identical &= torch.equal(plain.sequence, call.sequence)
            verdicts[name] = poor.last_report.reason
        for kind, values in ratios.items():
            row = (f"{statistics.median(values):.3f}×", f"{min(values):.3f}×")
            table.add_row(name, kind, "yes" if identical else "NO", *row)
    console = Console()
    console.print(table)
    for name, verdict in verdicts.items():
        console.print(f"{name}: {verdict}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
