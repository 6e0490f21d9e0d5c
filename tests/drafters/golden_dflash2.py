"""Outputs of the published DFlash 2 code for tiny drafters whose weights are a formula.

`golden/dflash2.json` was written by running this file as a script, with the PyPI package `dflash` 0.1.0 (MIT) under
transformers 5.24.0 and torch 2.13.0 on a CPU in float32:

    pip download --no-deps dflash==0.1.0 && unzip dflash-0.1.0-py3-none-any.whl -d published
    PYTHONPATH=published python tests/drafters/golden_dflash2.py

For each case it holds the block's final states `[S, H]` of `DFlash2DraftModel.forward` over the whole context without
a cache, and what `propose` says to rows 1 to S − 1 of them: the greedy path, and at the temperature a sampled path
with the candidates and their probabilities at each of its steps (`[D, K]`, in no order).
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

GOLDEN = Path(__file__).parent / "golden" / "dflash2.json"
VOCAB, BLOCK, MASK, CONTEXT, ANCHOR, TEMPERATURE = 29, 5, 28, 13, 7, 0.7

_DRAFTER: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "num_target_layers": 6,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "sliding_window": 8,
    "dtype": "float32",
}
_METHOD: dict[str, Any] = {
    "block_size": BLOCK,
    "conv_group_size": 8,
    "conv_kernel_size": 2,
    "mask_token_id": MASK,
    "selector_rank": 6,
    "selector_top_k": 5,
    "target_layer_ids": [1, 3],
}
#: `config.json` of each case: one in the manner of either published drafter, one that leaves causality to the layers.
CASES: dict[str, dict[str, Any]] = {
    "unscaled": {
        **_DRAFTER,
        "is_causal": False,
        "layer_types": ["sliding_attention"] * 2,
        "dflash_config": _METHOD,
    },
    "scaled": {
        **_DRAFTER,
        "is_causal": False,
        "layer_types": ["sliding_attention"] * 2,
        "dflash_config": {**_METHOD, "output_multiplier": 0.4, "final_logit_softcapping": 3.0},
    },
    "three taps, causal where sliding": {
        **_DRAFTER,
        "layer_types": ["sliding_attention", "full_attention"],
        "dflash_config": {**_METHOD, "conv_kernel_size": 3, "conv_group_size": 4, "input_embedding_scale": 1.5},
    },
}


def tensor(name: str, *shape: int, scale: float = 0.5) -> torch.Tensor:
    """A tensor that depends on its name and shape alone: normal numbers from NumPy's frozen legacy generator."""
    numbers = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape) * scale
    return torch.from_numpy(numbers).float() + (1.0 if "norm" in name else 0.0)


def weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A checkpoint of the published form for a `config.json`."""
    method, width, inner = config["dflash_config"], config["hidden_size"], config["intermediate_size"]
    head = config["head_dim"]
    queries, shared = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    taps, groups = method["conv_kernel_size"], width // method["conv_group_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(method["target_layer_ids"]) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
        "candidate_selector.predecessor_codebook": (VOCAB, method["selector_rank"]),
        "candidate_selector.successor_codebook": (VOCAB, method["selector_rank"]),
        "candidate_selector.hidden_projection.weight": (method["selector_rank"], width),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{layer}.{name}": shape
            for name, shape in {
                "self_attn.q_proj.weight": (queries, width),
                "self_attn.k_proj.weight": (shared, width),
                "self_attn.v_proj.weight": (shared, width),
                "self_attn.o_proj.weight": (width, queries),
                "self_attn.q_norm.weight": (head,),
                "self_attn.k_norm.weight": (head,),
                "mlp.gate_proj.weight": (inner, width),
                "mlp.up_proj.weight": (inner, width),
                "mlp.down_proj.weight": (width, inner),
                "input_layernorm.weight": (width,),
                "post_attention_layernorm.weight": (width,),
                "attention_conv.base_kernel": (2, taps, width),
                "attention_conv.kernel_projection.weight": (2 * taps * groups, width),
                "mlp_conv.base_kernel": (2, taps, width),
                "mlp_conv.kernel_projection.weight": (2 * taps * groups, width),
            }.items()
        }
    return {name: tensor(name, *shape) for name, shape in shapes.items()}


def borrowed(config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The target's embedding and head, `[V, H]`, and its features of the context, `[1, T, layers · H]`."""
    width = config["hidden_size"]
    features = tensor("features", 1, CONTEXT, len(config["dflash_config"]["target_layer_ids"]) * width, scale=1.0)
    return tensor("embedding", VOCAB, width), tensor("head", VOCAB, width), features


def published_outputs(config: dict[str, Any]) -> dict[str, Any]:
    """What the published code makes of a case."""
    from dflash import DFlash2DraftModel
    from transformers import Qwen3Config

    model = DFlash2DraftModel(Qwen3Config(**config)).eval()
    renamed = {name + ".weight" * name.endswith("codebook"): value for name, value in weights(config).items()}
    model.load_state_dict(renamed, strict=True)
    embedding, head, features = borrowed(config)
    output = torch.nn.Linear(config["hidden_size"], VOCAB, bias=False)
    output.weight.data = head
    block = torch.tensor([[ANCHOR, *[MASK] * (BLOCK - 1)]])
    scale = config["dflash_config"].get("input_embedding_scale", 1.0)
    states = model(
        position_ids=torch.arange(CONTEXT + BLOCK)[None],
        noise_embedding=embedding[block] * scale,
        target_hidden=features,
    )
    torch.manual_seed(0)
    anchors = torch.tensor([ANCHOR])
    greedy = model.propose(states[:, 1:], anchors, output, 0.0)[0]
    path, candidates, probabilities = model.propose(states[:, 1:], anchors, output, TEMPERATURE)
    return {
        "states": states[0].tolist(),
        "greedy": greedy[0].tolist(),
        "path": path[0].tolist(),
        "candidates": candidates[0].tolist(),
        "probabilities": probabilities[0].tolist(),
    }


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    with torch.no_grad():
        outputs = {name: published_outputs(config) for name, config in CASES.items()}
    GOLDEN.write_text(json.dumps(outputs) + "\n")
