"""What loading a drafter adds to a process's own memory; pages of the mapped file are the system's to give back."""

from __future__ import annotations

import json
import multiprocessing
import re
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_treespec import AutoDrafter
from hf_treespec.drafters.dflash import DFlashConfig, DFlashDrafter


def anonymous() -> int:
    """Bytes of this process's own memory."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s*(\d+)", status)[1]) * 1024


def measure(folder: Path, dtype: torch.dtype | None) -> tuple[int, int]:
    """Bytes of a drafter's weights, and what loading it adds at most."""
    before, peaks, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peaks.append(anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    drafter = AutoDrafter.from_pretrained(folder, dtype=dtype)
    peaks.append(anonymous())
    done.set()
    watcher.join()
    return sum(weight.nbytes for weight in drafter.parameters()), max(peaks) - before


def save_zeros(folder: Path, **fields: int) -> None:
    """A drafter in bfloat16, in two shards."""
    config = DFlashConfig(target_layer_ids=[1, 2, 3], num_target_layers=6, vocab_size=300, dtype="bfloat16", **fields)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in DFlashDrafter(config).state_dict().items()}
    folder.mkdir()
    config.save_pretrained(folder)
    names = sorted(shapes)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: torch.zeros(shapes[name], dtype=torch.bfloat16) for name in held}, folder / file)
    index = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 2}, id="140 MB"),
        pytest.param(
            {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 5, "head_dim": 128},
            id="1 GB",
            marks=pytest.mark.matrix,
        ),
    ],
)
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["as saved", "cast"])
def test_loading_adds_the_weights_and_little_more(tmp_path: Path, fields: dict[str, int], dtype: torch.dtype | None):
    save_zeros(tmp_path / "drafter", **fields)
    # In a process of its own, whose memory nothing else has used and freed; forked, so that all is imported.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        size, added = pool.apply(measure, (tmp_path / "drafter", dtype))
    assert size > 100e6
    assert added < 1.2 * size, f"{added / size:.2f} times the weights"
