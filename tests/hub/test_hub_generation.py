"""From a Hub id to tokens, as a user's script does it: in a process of its own, through the environment alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import UserScript
from loopback import LoopbackHub
from pairs import build_pair, save_pair

SCRIPT = """
import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, pipeline

import hf_treespec

PROMPTS = ["def push(self, item):", "def pop", "item", "self, self"]
OPTIONS = dict(max_new_tokens=24, do_sample=False)
found = {}

plain = pipeline("text-generation", "acme/target", device_map="auto", dtype=torch.float32)
fast = pipeline(
    "text-generation", "acme/target", assistant_model="acme/drafter", device_map="auto", dtype=torch.float32
)
drafter = fast.assistant_model
found["family"] = type(drafter).__name__
drafter.treespec_config = hf_treespec.TreeSpecConfig(budget=6)  # else a random drafter may be left unused
for size in (1, 4):
    for sample in (False, True):
        texts = []
        for generator in (plain, fast):
            generator.tokenizer.pad_token_id = 0
            torch.manual_seed(7)
            answers = generator(PROMPTS[:size], batch_size=size, max_new_tokens=24, do_sample=sample)
            texts.append([answer[0]["generated_text"] for answer in answers])
        found[f"pipeline, batch {size}, {'sampled' if sample else 'greedy'}"] = (
            texts[0] == texts[1] and drafter.last_report.pairs > 0
        )

target = AutoModelForCausalLM.from_pretrained("acme/target", device_map="auto", dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained("acme/target", padding_side="left")
tokenizer.pad_token_id = 0
loaded = hf_treespec.AutoDrafter.from_pretrained("acme/drafter", target=target, device_map="auto")
loaded = loaded.with_options(budget=6)
for size in (1, 4):
    inputs = tokenizer(PROMPTS[:size], return_tensors="pt", padding=True, return_token_type_ids=False)
    fast_ids = target.generate(**inputs, assistant_model=loaded, **OPTIONS)
    found[f"generate, batch {size}"] = (
        torch.equal(fast_ids, target.generate(**inputs, **OPTIONS)) and loaded.last_report.pairs > 0
    )


class Kept(TextStreamer):
    def __init__(self):
        super().__init__(tokenizer)
        self.pieces = []

    def on_finalized_text(self, text, stream_end=False):
        self.pieces.append(text)


inputs = tokenizer(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
streamers = Kept(), Kept()
target.generate(**inputs, assistant_model=loaded, streamer=streamers[0], **OPTIONS)
target.generate(**inputs, streamer=streamers[1], **OPTIONS)
found["streamed"] = streamers[0].pieces == streamers[1].pieces and len(streamers[0].pieces) > 1
print(json.dumps(found))
"""


@pytest.mark.slow
def test_pipeline_and_generate_take_drafters_from_the_hub(hub: LoopbackHub, user_script: UserScript, tmp_path: Path):
    save_pair(build_pair(), tmp_path)
    hub.create_from("acme/target", tmp_path / "target")
    hub.create_from("acme/drafter", tmp_path / "drafter")
    found = json.loads(user_script(SCRIPT).splitlines()[-1])
    assert found.pop("family") == "DFlashDrafter"
    assert len(found) == 7
    assert not [what for what, holds in found.items() if not holds]
    assert len(hub.asked("GET", "/storage/")) == 2  # one file of each model, once
