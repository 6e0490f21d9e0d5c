"""A stranger's checkpoint: refused by name, nothing executed, allocated, or read and written elsewhere."""

from __future__ import annotations

import json
import pickle
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import LoopbackHub
from pairs import build_pair
from safetensors.torch import load, save
from transformers import AutoModel

from hf_treespec import AutoDrafter
from hf_treespec.drafters.checkpoint import CheckpointError
from hf_treespec.drafters.dflash import DFlashDrafter

REPOSITORY = "mallory/drafter"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DRAFTER = build_pair()[1]

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Files of a sound drafter."""
    folder = tmp_path_factory.mktemp("sound")
    DRAFTER.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., None]:
    """Loads files from a folder and sees to it that they are refused by name, at no cost, and leave nothing behind."""

    def check(files: Files, message: str, error: type[Exception] = CheckpointError) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        before = set(tmp_path.rglob("*"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(error, match=message):
            AutoDrafter.from_pretrained(folder)
        assert set(tmp_path.rglob("*")) == before
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
        assert grown < 100, f"{grown} MB"

    return check


@pytest.fixture
def refused_everywhere(
    refused: Callable[..., None], hub: LoopbackHub, cache: Path, tmp_path: Path
) -> Callable[..., None]:
    """The same from a folder and from the Hub, whose cache is all that is written to."""

    def check(files: Files, message: str, error: type[Exception] = CheckpointError) -> None:
        refused(files, message, error)
        hub.create(REPOSITORY, files)
        before = set(tmp_path.rglob("*"))
        with pytest.raises(error, match=message):
            AutoDrafter.from_pretrained(REPOSITORY)
        home = cache.parent
        assert not {path for path in set(tmp_path.rglob("*")) - before if home not in (path, *path.parents)}

    return check


def with_config(sound: Files, **fields: Any) -> Files:
    return sound | {"config.json": json.dumps({**json.loads(sound["config.json"]), **fields}).encode()}


def header(entries: bytes | dict[str, Any], data: bytes = bytes(64), length: int | None = None) -> bytes:
    """A safetensors file with this header, and `length` as what it claims to have."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickled_weights_are_not_opened(
    sound: Files, refused_everywhere: Callable[..., None], tmp_path: Path, name: str
):
    canary = tmp_path / "canary"
    weights = pickle.dumps(Canary(canary))
    pickle.loads(weights)
    assert canary.exists()  # it would have
    canary.unlink()
    files = {"config.json": sound["config.json"], name: weights}
    refused_everywhere(files, rf"its weights are pickled \({name}\); unpickling runs whatever code is in the file")
    assert not canary.exists()


def test_a_family_opens_no_pickled_weights_either(sound: Files, tmp_path: Path):
    (tmp_path / "config.json").write_bytes(sound["config.json"])
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    for load_from in (DFlashDrafter.from_pretrained, AutoModel.from_pretrained):
        with pytest.raises(OSError, match="safetensors"):
            load_from(tmp_path)
    assert not (tmp_path / "canary").exists()


def test_pickled_weights_beside_sound_ones_are_left_alone(hub: LoopbackHub, sound: Files, tmp_path: Path):
    canary = tmp_path / "canary"
    hub.create(REPOSITORY, sound | {"pytorch_model.bin": pickle.dumps(Canary(canary))})
    AutoDrafter.from_pretrained(REPOSITORY)
    assert not canary.exists()
    assert not hub.asked(path="pytorch_model")


@pytest.mark.parametrize(
    "name",
    [
        "../../secret.safetensors",
        "/etc/secret.safetensors",
        "link/model.safetensors",
        "..\\secret.safetensors",
        "C:\\secret.safetensors",
        "~/secret.safetensors",
        "pytorch_model.bin",
        ".safetensors",
        "model.safetensors\n",
        "",
    ],
)
def test_an_index_that_leads_elsewhere(sound: Files, refused_everywhere: Callable[..., None], name: str):
    index = json.dumps({"weight_map": {"fc.weight": name}}).encode()
    refused_everywhere({"config.json": sound["config.json"], INDEX: index}, "a shard is a .* file beside it")


def test_a_linked_folder_is_not_followed(sound: Files, tmp_path: Path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / WEIGHTS).write_bytes(sound[WEIGHTS])
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "drafter" / "config.json").write_bytes(sound["config.json"])
    index = {"weight_map": dict.fromkeys(DRAFTER.state_dict(), f"link/{WEIGHTS}")}
    (tmp_path / "drafter" / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="names the file 'link/"):
        AutoDrafter.from_pretrained(tmp_path / "drafter")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"{}", "has no weight_map"),
        (b'{"weight_map": {}}', "has no weight_map"),
        (b'{"weight_map": [1]}', "has no weight_map"),
        (b'{"weight_map": {"fc.weight": 3}}', "has no weight_map"),
        (b"[]", "holds a list instead of an object"),
        (b'{"weight_map": {"fc.weight": "a.safetensors"}}', "the file 'a.safetensors' that .* names is not there"),
        (
            b'{"weight_map": {"fc.weight": "a.safetensors", "fc.weight": "b.safetensors"}}',
            "fc.weight stand there twice",
        ),
    ],
)
def test_an_index_that_makes_no_sense(sound: Files, refused: Callable[..., None], index: bytes, message: str):
    refused({"config.json": sound["config.json"], INDEX: index}, message)


def test_shards_that_contradict_each_other(sound: Files, refused_everywhere: Callable[..., None]):
    tensors = load(sound[WEIGHTS])
    first = save({"fc.weight": tensors["fc.weight"]})
    index = json.dumps({"weight_map": {"fc.weight": "a.safetensors", "norm.weight": "b.safetensors"}}).encode()
    refused_everywhere(
        {"config.json": sound["config.json"], INDEX: index, "a.safetensors": first, "b.safetensors": first},
        "tensors are in several files: fc.weight",
    )


def test_an_index_that_names_tensors_which_are_not_there(sound: Files, refused: Callable[..., None]):
    index = json.dumps({"weight_map": {"fc.weight": "a.safetensors", "norm.weight": "a.safetensors"}}).encode()
    shard = save({"fc.weight": load(sound[WEIGHTS])["fc.weight"]})
    refused(
        {"config.json": sound["config.json"], INDEX: index, "a.safetensors": shard},
        "a.safetensors lacks tensors that the index places there: norm.weight",
    )


ENTRY = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (header({}, length=2**63), "no sound safetensors file: .*header too large"),
        (header({}, length=2**31), "no sound safetensors file: .*header too large"),
        (header({"fc.weight": ENTRY}, length=5000), "no sound safetensors file"),
        (b"", "no sound safetensors file: .*header too small"),
        (header({"fc.weight": {**ENTRY, "shape": [10**9, 10**12]}}), "no sound safetensors file: .*overflow"),
        (header({"fc.weight": {**ENTRY, "shape": [2**20]}}), "no sound safetensors file"),
        (header({"fc.weight": ENTRY, "norm.weight": ENTRY}), "no sound safetensors file: .*invalid offset"),
        (header({"fc.weight": {**ENTRY, "shape": [-16]}}), "no sound safetensors file"),
        (header({"fc.weight": {**ENTRY, "dtype": "PICKLE"}}), "no sound safetensors file"),
        (header(b"[" * 100_000), "no sound safetensors file"),
        (
            header(f'{{"fc.weight": {json.dumps(ENTRY)}, "fc.weight": {json.dumps(ENTRY)}}}'.encode()),
            "header of model.safetensors is no sound JSON: fc.weight stand there twice",
        ),
    ],
    ids=[
        "header of 2^63 bytes",
        "header of 2 GB",
        "header beyond the end",
        "empty",
        "shape that overflows",
        "shape beyond the data",
        "overlapping tensors",
        "negative shape",
        "unknown dtype",
        "deep nesting",
        "a tensor twice",
    ],
)
def test_malformed_weights(sound: Files, refused: Callable[..., None], weights: bytes, message: str):
    refused(sound | {WEIGHTS: weights}, message)


def test_truncated_weights(sound: Files, refused_everywhere: Callable[..., None]):
    refused_everywhere(sound | {WEIGHTS: sound[WEIGHTS][:-1]}, "no sound safetensors file")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1,000,000,000; at most 512 makes sense"),
        ({"block_size": 10**9}, "block_size is 1,000,000,000; at most"),
        ({"hidden_size": 10**9}, "parameters, but its files hold"),
        (
            {"hidden_size": 10**12, "target_hidden_size": 10**12},
            "config.json describes no DFlashDrafter that can be built",
        ),
        ({"intermediate_size": 10**9}, "parameters, but its files hold"),
        ({"head_dim": 10**9}, "parameters, but its files hold"),
        ({"num_attention_heads": 10**6}, "parameters, but its files hold"),
        ({"num_hidden_layers": 100, "layer_types": None}, "parameters, but its files hold"),
        ({"target_layer_ids": [*range(1000)]}, "parameters, but its files hold"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1 instead of a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0 instead"),
        ({"hidden_size": "64"}, "hidden_size is '64' instead"),
        ({"hidden_size": [64]}, r"hidden_size is \[64\] instead"),
        ({"hidden_size": 64.5}, "hidden_size is 64.5 instead"),
        ({"hidden_size": True}, "hidden_size is True instead"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0 instead"),
        ({"dflash_config": {"block_size": "many"}}, "dflash_config.block_size is 'many' instead"),
        ({"rms_norm_eps": float("nan")}, "config.json is no sound JSON: NaN is no number"),
        ({"rope_theta": float("-inf")}, "config.json is no sound JSON: -Infinity is no number"),
        ({"architectures": 3}, "architectures is 3 instead of a list of names"),
        ({"architectures": [["DFlashDrafter"]]}, "architectures is .* instead of a list of names"),
        ({"target_layer_ids": 5}, "target_layer_ids is 5 instead of a list"),
        ({"target_layer_ids": []}, r"target_layer_ids is \[\]; it is a list of at least one decoder layer"),
        ({"target_layer_ids": [-1, 1]}, r"target_layer_ids is \[-1, 1\]; it is a list of"),
        ({"target_layer_ids": [1, 1]}, r"target_layer_ids is \[1, 1\]; it is .* none twice"),
        ({"target_layer_ids": ["1", "2"]}, r"target_layer_ids is \['1', '2'\]; it is a list of"),
        ({"mask_token_id": None}, "mask_token_id is None; it is a token id"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; it is a positive number"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings is 'many'; it is a positive whole number"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'; it is a token id or a list of them"),
        ({"is_causal": 3}, "is_causal is 3; it is true or false"),
        ({"hidden_act": "no_such_function"}, "hidden_act is 'no_such_function'; it is the name of an activation"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\] instead of an object"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "has the rope_type 'spiral'; it is one of"),
        ({"rope_parameters": {"rope_theta": 0}}, "has the rope_theta 0; it is a positive number"),
        ({"transformer_layer_config": {"model_type": [1]}}, r"model_type is \[1\] instead of a name"),
        ({"dflash_config": 5}, "dflash_config is 5 instead of an object"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention' instead of a list"),
        ({"dtype": 3}, "dtype is 3 instead of the name of a floating-point type"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8' instead of the name of a floating-point type"),
        (
            {"attn_implementation": "mallory/kernel"},
            "attn_implementation is 'mallory/kernel', which would run the code",
        ),
        ({"text_config": {"_attn_implementation": "a/b@main"}}, "is 'a/b@main', which would run"),
    ],
)
def test_configuration_bombs(sound: Files, refused: Callable[..., None], fields: dict[str, Any], message: str):
    refused(with_config(sound, **fields), message)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "config.json is no sound JSON: maximum recursion depth"),
        (b"[" * 100_000, "config.json is no sound JSON"),
        (b'"a string"', "config.json holds a str instead of an object"),
        (b"\xff\xfe{}", "config.json is no sound JSON"),
        (b'{"model_type": "treespec_dflash", "model_type": "qwen3"}', "model_type stand there twice"),
        (b"{" + b" " * (17 * 2**20) + b"}", "config.json has .* bytes; more than .* are not read"),
    ],
    ids=["deep objects", "deep lists", "a string", "no UTF-8", "twice the same", "17 MB"],
)
def test_malformed_configurations(sound: Files, refused: Callable[..., None], config: bytes, message: str):
    refused(sound | {"config.json": config}, message)


def test_half_deep_configurations_are_followed_no_further_than_need_be(sound: Files, refused: Callable[..., None]):
    nested: Any = 10**9
    for _ in range(500):
        nested = {"num_hidden_layers": nested}
    refused(with_config(sound, text_config=nested), "num_hidden_layers")


def test_wrong_shapes(sound: Files, refused: Callable[..., None]):
    tensors = load(sound[WEIGHTS])
    tensors["fc.weight"] = torch.zeros(64, 64)
    message = r"misshaped: fc\.weight \[64, 64\] instead of \[64, 128\]"
    refused(sound | {WEIGHTS: save(tensors, {"format": "pt"})}, message, ValueError)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_quantised_weights(sound: Files, refused: Callable[..., None], dtype: torch.dtype):
    tensors = load(sound[WEIGHTS])
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    weights = save(tensors | {name: tensors[name].to(dtype)}, {"format": "pt"})
    refused(sound | {WEIGHTS: weights}, rf"{name} in {WEIGHTS} holds \w+ numbers instead of F64, .* Quantised")


def test_a_weight_under_two_names(sound: Files, refused: Callable[..., None]):
    tensors = load(sound[WEIGHTS])
    tensors["model.fc.weight"] = torch.zeros(3)
    message = r"tensors are there with and without 'model\.': model\.fc\.weight"
    refused(sound | {WEIGHTS: save(tensors, {"format": "pt"})}, message)


ADAPTER = {"adapter_config.json": b'{"peft_type": "LORA", "base_model_name_or_path": "acme/drafter"}'}


def test_an_adapter_is_no_drafter(sound: Files, refused_everywhere: Callable[..., None]):
    message = r"has no config.json. It is a PEFT adapter, not a drafter.*merge_and_unload"
    refused_everywhere({**ADAPTER, "adapter_model.safetensors": sound[WEIGHTS]}, message, FileNotFoundError)


def test_an_adapter_beside_the_weights_is_not_put_on_them(sound: Files, refused: Callable[..., None]):
    refused(sound | ADAPTER, "adapter_config.json beside its weights would put a PEFT adapter on them")


@pytest.mark.parametrize("names", [(), ("config.json",)], ids=["alone", "with a configuration"])
def test_gguf_is_not_read(sound: Files, refused: Callable[..., None], names: tuple[str, ...]):
    files = {name: sound[name] for name in names} | {"drafter-q4.gguf": b"GGUF"}
    refused(files, "It has drafter-q4.gguf, and GGUF is not read", FileNotFoundError)


def test_a_file_is_no_folder(sound: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / WEIGHTS).write_bytes(sound[WEIGHTS])
    monkeypatch.chdir(tmp_path)
    for name in (tmp_path / WEIGHTS, WEIGHTS):
        with pytest.raises(NotADirectoryError, match=r"is a file\. Give the folder that it is in"):
            AutoDrafter.from_pretrained(name)


def test_no_weights_at_all(sound: Files, refused_everywhere: Callable[..., None]):
    refused_everywhere({"config.json": sound["config.json"]}, "has no weights", FileNotFoundError)


def test_no_configuration(sound: Files, refused_everywhere: Callable[..., None]):
    refused_everywhere({WEIGHTS: sound[WEIGHTS]}, "has no config.json", FileNotFoundError)
