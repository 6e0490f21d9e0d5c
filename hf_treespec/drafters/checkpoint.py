"""What a checkpoint holds, read and checked before anything is built from it.

Files from the Hub are a stranger's. The idea here: a checkpoint may ask for no more than it carries. Weights are
safetensors, which cannot execute anything; the index names files beside it and nothing else; what config.json asks for
is built without memory and held against the shapes in the files' headers, so that no number in it makes the loader
allocate.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..sources import ModelFiles

#: Bytes of config.json or an index; those of published drafters take a few thousand.
_LARGEST_JSON = 16 * 2**20
_SHARD_NAME = re.compile(r"[A-Za-z0-9][\w.-]*\.safetensors")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
#: Sizes: positive whole numbers, and at most so much where building the modules alone would take long.
_SIZES = {
    "num_hidden_layers": 512,
    "hidden_size": None,
    "intermediate_size": None,
    "head_dim": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "target_hidden_size": None,
    "block_size": 4096,
}
#: Fields that hold others, lists and names.
_FORMS: dict[str, type] = {
    "model_type": str,
    **dict.fromkeys(("dflash_config", "flexdraft_config", "speculators_config", "transformer_layer_config"), dict),
    **dict.fromkeys(("treeflash_config", "rope_parameters", "rope_scaling", "verifier"), dict),
    **dict.fromkeys(("layer_types", "target_layer_ids", "aux_hidden_state_layer_ids", "attention_layouts"), list),
}
_FORM_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a name"}
#: Types of a weight's numbers in safetensors files; others are those of a quantised one, which needs its scales.
_WEIGHTS = ("F64", "F32", "F16", "BF16")
#: Fields under which transformers takes a repository's name and runs the code in it.
_CODE = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")


class CheckpointError(ValueError):
    """A checkpoint that is malformed, or asks for something that no drafter's does."""


class Checkpoint:
    """A drafter's files, checked.

    Attributes:
        config: Its config.json.
        shapes: Shape of each tensor; empty before `read_shapes`.
    """

    def __init__(self, files: ModelFiles) -> None:
        self.files = files
        self.shapes: dict[str, tuple[int, ...]] = {}
        path = files.find("config.json")
        if path is None:
            raise FileNotFoundError(f"{self} has no config.json. {self._what_it_is()}")
        self.config = self._read_json(path)
        self._check_config()

    def __str__(self) -> str:
        return f"{self.files.source}{f'/{self.files.subfolder}' if self.files.subfolder else ''}"

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self}: {what}")

    def _what_it_is(self) -> str:
        """What files without a `config.json`, or without weights beside it, are, and what to do."""
        if self.files.find("adapter_config.json") is not None:
            return (
                "It is a PEFT adapter, not a drafter. Load the drafter it was trained on, put the adapter on it with "
                "PEFT, and save what `merge_and_unload()` gives."
            )
        quantised = sorted(self.files.folder.glob("*.gguf")) if self.files.folder else []
        if quantised:
            return f"It has {quantised[0].name}, and GGUF is not read. Give the drafter's safetensors checkpoint."
        return "Is it a drafter, and is it not in a subfolder?"

    def _read_json(self, path: Path) -> dict[str, Any]:
        size = path.stat().st_size
        if size > _LARGEST_JSON:
            raise self._error(f"{path.name} has {size:,} bytes; more than {_LARGEST_JSON:,} are not read.")
        return self._parse(path.read_bytes(), path.name)

    def _parse(self, text: bytes, name: str) -> dict[str, Any]:
        try:
            value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise self._error(f"{name} is no sound JSON: {error}.") from error
        if not isinstance(value, dict):
            raise self._error(f"{name} holds a {type(value).__name__} instead of an object.")
        return value

    def _check_config(self) -> None:
        architectures = self.config.get("architectures")
        if architectures is not None and not _all_strings(architectures):
            raise self._error(f"architectures is {architectures!r} instead of a list of names.")
        for name in ("dtype", "torch_dtype"):
            value = self.config.get(name)
            dtype = getattr(torch, str(value).removeprefix("torch."), None)
            if value is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise self._error(
                    f"{name} is {value!r} instead of the name of a floating-point type, like 'bfloat16'."
                )
        for path, value in _fields(self.config):
            name = path.rpartition(".")[2]
            if name in _CODE and "/" in str(value):
                raise self._error(f"{path} is {value!r}, which would run the code of that repository. Remove it.")
            form = _FORMS.get(name)
            if form is not None and value is not None and not isinstance(value, form):
                raise self._error(f"{path} is {value!r} instead of {_FORM_NAMES[form]}.")
            if name not in _SIZES or value is None:
                continue
            if type(value) is not int or value < 1:
                raise self._error(f"{path} is {value!r} instead of a positive whole number.")
            if value > (_SIZES[name] or value):
                raise self._error(f"{path} is {value:,}; at most {_SIZES[name]:,} makes sense.")

    def read_shapes(self) -> None:
        """Reads the shapes of all tensors from the files' headers, after downloading them if need be.

        Raises:
            CheckpointError: Files are malformed or weights are pickled.
            FileNotFoundError: There are no weights.
        """
        path = self.files.find(SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
        if path is None:
            raise self._without_weights()
        if path.name == SAFE_WEIGHTS_NAME:
            self.shapes = self._read_header(path)
        else:
            self._read_shards(self._read_json(path).get("weight_map"))

    def _without_weights(self) -> Exception:
        pickle = self.files.find(*_PICKLES)
        if pickle is None:
            lacking = f"{self} has no weights (neither {SAFE_WEIGHTS_NAME} nor its index)."
            return FileNotFoundError(f"{lacking} {self._what_it_is()}")
        return self._error(
            f"its weights are pickled ({pickle.name}); unpickling runs whatever code is in the file, so it has not "
            "been opened. Use a revision with safetensors, or convert it where you trust it: load it there and call "
            "`save_pretrained`."
        )

    def _read_shards(self, weight_map: Any) -> None:
        if not isinstance(weight_map, dict) or not weight_map or not _all_strings([*weight_map.values()]):
            raise self._error(f"{SAFE_WEIGHTS_INDEX_NAME} has no weight_map from tensors to files.")
        for name in sorted(set(weight_map.values())):
            if not _SHARD_NAME.fullmatch(name):
                raise self._error(
                    f"{SAFE_WEIGHTS_INDEX_NAME} names the file {name!r}; a shard is a *.safetensors file beside it."
                )
            path = self.files.find(name)
            if path is None:
                raise self._error(f"the file {name!r} that {SAFE_WEIGHTS_INDEX_NAME} names is not there.")
            shapes = self._read_header(path)
            twice = sorted(shapes.keys() & self.shapes.keys())
            if twice:
                raise self._error(f"tensors are in several files: {', '.join(twice)}.")
            absent = sorted(tensor for tensor, file in weight_map.items() if file == name and tensor not in shapes)
            if absent:
                raise self._error(f"{name} lacks tensors that the index places there: {', '.join(absent)}.")
            self.shapes |= shapes

    def _read_header(self, path: Path) -> dict[str, tuple[int, ...]]:
        try:
            # Bounds the header's size, and holds its shapes and offsets against the file's length.
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise self._error(f"{path.name} is no sound safetensors file: {error}.") from error
        with path.open("rb") as file:
            header = self._parse(file.read(int.from_bytes(file.read(8), "little")), f"the header of {path.name}")
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        for name, entry in tensors.items():
            # Maps between vocabularies are lists of whole numbers.
            if len(entry["shape"]) > 1 and entry["dtype"] not in _WEIGHTS:
                raise self._error(
                    f"{name} in {path.name} holds {entry['dtype']} numbers instead of {', '.join(_WEIGHTS)}. "
                    "Quantised weights are not read; give the checkpoint that they were made from."
                )
        return {name: tuple(entry["shape"]) for name, entry in tensors.items()}

    def check_family(self, family: type[PreTrainedModel]) -> None:
        """Builds the drafter that the configuration describes without memory for its weights, and counts them.

        Raises:
            CheckpointError: It cannot be built, or has more than twice the elements that the files hold; or the files
                have a weight under two names, or an adapter beside them, which transformers would put on it.
        """
        if self.files.folder is not None and (self.files.folder / "adapter_config.json").is_file():
            raise self._error(
                "adapter_config.json beside its weights would put a PEFT adapter on them. Take it away, or merge it "
                "into the weights (`merge_and_unload()`) and save those."
            )
        prefix = f"{family.base_model_prefix}."
        twice = sorted(name for name in self.shapes if name.removeprefix(prefix) in self.shapes.keys() - {name})
        if twice:
            raise self._error(
                f"tensors are there with and without {prefix!r}: {', '.join(twice)}. Remove one of each."
            )
        try:
            config = family.config_class.from_pretrained(str(self.files.folder))
            with torch.device("meta"):
                wanted = sum(parameter.numel() for parameter in family(config).parameters())
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise self._error(
                f"config.json describes no {family.__name__} that can be built: {kind}{error}"
            ) from error
        held = sum(math.prod(shape) for shape in self.shapes.values())
        if wanted > 2 * held:
            raise self._error(f"config.json describes {wanted:,} parameters, but its files hold {held:,}.")


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every field of a configuration and of the configurations in it, by its dotted path."""
    waiting = [("", config)]
    while waiting:
        prefix, fields = waiting.pop()
        for name, value in fields.items():
            yield prefix + name, value
            if isinstance(value, Mapping):
                waiting.append((f"{prefix}{name}.", value))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = sorted({name for name, _ in pairs if [other for other, _ in pairs].count(name) > 1})
        raise ValueError(f"{', '.join(twice)} stand there twice")
    return value


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _all_strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
