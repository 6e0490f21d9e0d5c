"""The two forms of the walk give the same rows: lazily along the path, and with all nodes picked at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import batch, dflash, prompt, target
from parity import GREEDY, SAMPLED, assert_same, run
from rigged import rigged, rows_of

from hf_treespec.decoding.walk import Walk


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 4])
def test_picking_all_nodes_at_once_is_plain_decoding(
    rows: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    original = Walk.__init__

    def at_once(self: Walk, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._at_once = True
        used.append(self)

    model, inputs = target("qwen3"), prompt() if rows == 1 else batch()
    ends = [5, 17, 40]
    options = {**options, "max_new_tokens": 24, "eos_token_id": ends}
    plain = run(model, inputs, **options)
    monkeypatch.setattr(Walk, "__init__", at_once)
    for drafter in (rigged(rows_of(plain.sequences, inputs, ends), kind="half"), dflash("qwen3")):
        assert_same(plain, run(model, inputs, assistant_model=drafter, **options), model, inputs, options)
    assert len(used) == 2


def test_the_round_reads_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Picking at once needs one transfer to the host a round; counted on the tensors' own `tolist`."""
    model, inputs = target("qwen3"), prompt()
    plain = run(model, inputs, **GREEDY, max_new_tokens=20)
    original = Walk.__init__

    def at_once(self: Walk, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._at_once = True

    reads = []
    walk_picked = Walk._walk_picked

    def counted(self: Walk, *args: Any) -> Any:
        before = len(reads)
        paths = walk_picked(self, *args)
        rounds.append(len(reads) - before)
        return paths

    rounds: list[int] = []
    to_list = torch.Tensor.tolist
    monkeypatch.setattr(Walk, "__init__", at_once)
    monkeypatch.setattr(Walk, "_walk_picked", counted)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (reads.append(1), to_list(self))[1])
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("a hidden read"))
    drafter = rigged(rows_of(plain.sequences, inputs), kind="perfect")
    model.generate(**inputs, assistant_model=drafter, **GREEDY, max_new_tokens=20)
    assert rounds
    assert set(rounds) == {1}
