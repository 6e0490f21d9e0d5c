"""The benchmark's arms: names of ways of decoding, and how each calls `generate`.

`ARM@NAME` is an arm of a further drafter for the same target, which the benchmark was given under that name.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from transformers import CompileConfig, GenerationConfig, PreTrainedModel

from ..drafters.base import BlockDrafter
from .shapes import StaticTopology, beam_lattice, reshaped

#: Budgets among which `oracle` chooses.
ORACLE_GRID = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
#: Nodes a depth keeps in the beam trees, as in BASTION's ablation (arXiv 2605.29727).
_BEAM_WIDTH = 4
_LOOKUP_TOKENS = 10


class UnavailableArmError(ValueError):
    """An arm that this pair, version or machine cannot run; the message says why."""


@dataclass(frozen=True)
class Arm:
    """One way of decoding.

    Attributes:
        name: As in options and reports.
        options: What it adds to a `generate` call.
        exact: Whether it gives plain decoding's very tokens when sampling from the same seed too. Greedily all do.
        single_row: Whether it decodes one row at a time only.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    exact: bool = True
    single_row: bool = False

    @property
    def drafter(self) -> BlockDrafter | None:
        drafter: BlockDrafter | None = self.options.get("assistant_model")
        return drafter


@dataclass(frozen=True)
class Pair:
    """What arms are built for.

    Attributes:
        target: The target.
        drafter: Its drafter.
        max_length: No request of the benchmark grows longer than this.
    """

    target: PreTrainedModel
    drafter: BlockDrafter
    max_length: int

    @property
    def family(self) -> str:
        """The drafter's family, such as `dflash`."""
        return self.drafter.config.model_type.removeprefix("treespec_")


def _with(pair: Pair, name: str, **options: Any) -> Arm:
    """An arm of the drafter with other decoding options."""
    try:
        return Arm(name, {"assistant_model": pair.drafter.with_options(**options)})
    except (TypeError, ValueError) as error:
        raise UnavailableArmError(f"this version does not know it ({error})") from error


def _only_for(pair: Pair, family: str) -> None:
    if pair.family != family:
        raise UnavailableArmError(f"needs a {family} drafter, this one is {pair.family}")


def _plain(pair: Pair, name: str) -> Arm:
    return Arm(name)


def _compiled(pair: Pair, name: str) -> Arm:
    if not (os.environ.get("CC") or os.environ.get("CXX") or any(map(shutil.which, ("cc", "gcc", "clang", "cl")))):
        raise UnavailableArmError("torch.compile finds no C compiler")
    options: dict[str, Any] = {"cache_implementation": "static"}
    if pair.target.device.type == "cuda":
        if find_spec("triton") is None:
            raise UnavailableArmError("torch.compile needs triton on a GPU")
    else:
        # Elsewhere transformers compiles only when told so by this field, which it has for tests.
        options["compile_config"] = CompileConfig()
        options["compile_config"]._compile_all_devices = True
    if hasattr(GenerationConfig(), "max_cache_len"):
        # One size of cache for all requests: another would be compiled again.
        options["max_cache_len"] = pair.max_length
    return Arm(name, options)


def _lookup(pair: Pair, name: str) -> Arm:
    return Arm(name, {"prompt_lookup_num_tokens": _LOOKUP_TOKENS}, exact=False, single_row=True)


def _stock_chain(pair: Pair, name: str) -> Arm:
    _only_for(pair, "dflash")
    if not hasattr(GenerationConfig(), "speculation_type"):
        raise UnavailableArmError("this version of transformers has no DFlash loop of its own")
    options = {"assistant_model": pair.drafter.with_options(), "speculation_type": "dflash"}
    return Arm(name, options, exact=False, single_row=True)


def _chain(pair: Pair, name: str) -> Arm:
    return _with(pair, name, budget=pair.drafter.drafted_depths + 1, shape="chain")


def _tree(pair: Pair, name: str, nodes: int) -> Arm:
    return _with(pair, name, budget=nodes, shape="tree")


def _unconditional(pair: Pair) -> Pair:
    """The pair with the drafter whose depths do not depend on one another: a TreeFlash drafter's backbone."""
    if pair.family not in ("dflash", "treeflash"):
        raise UnavailableArmError(f"the depths of a {pair.family} drafter depend on one another")
    return replace(pair, drafter=pair.drafter.backbone)


def _marginal(pair: Pair, name: str, nodes: int) -> Arm:
    return _tree(_unconditional(pair), name, nodes)


def _marginal_auto(pair: Pair, name: str) -> Arm:
    return _auto(_unconditional(pair), name)


def _treeflash(pair: Pair, name: str, nodes: int) -> Arm:
    _only_for(pair, "treeflash")
    return _tree(pair, name, nodes)


def _beam(pair: Pair, name: str, nodes: int) -> Arm:
    reshape = partial(beam_lattice, width=_BEAM_WIDTH)
    return Arm(name, {"assistant_model": reshaped(pair.drafter, reshape, budget=nodes, shape="tree")})


def _static(pair: Pair, name: str, nodes: int) -> Arm:
    pair = _unconditional(pair)
    return Arm(name, {"assistant_model": reshaped(pair.drafter, StaticTopology(), budget=nodes, shape="tree")})


def _bastion(pair: Pair, name: str) -> Arm:
    return _with(pair, name, budget="bastion", shape="tree")


def _auto(pair: Pair, name: str) -> Arm:
    return _with(pair, name, budget="auto", shape="auto")


def _flex(pair: Pair, name: str) -> Arm:
    _only_for(pair, "flexdraft")
    return _with(pair, name, flex_mode=name.removeprefix("flex-"))


#: Arms by name, each with what it is; `N` stands for a number of verified rows, the root included.
ARMS: dict[str, tuple[Callable[..., Arm], str]] = {
    "plain": (_plain, "the target alone"),
    "compiled": (_compiled, "the target alone, compiled, with a static cache"),
    "lookup": (_lookup, "transformers' prompt lookup"),
    "stock-chain": (_stock_chain, "transformers' own DFlash loop with this drafter"),
    "chain": (_chain, "the drafter's best chain"),
    "tree-N": (_tree, "the N best nodes"),
    "marginal-N": (_marginal, "the same for a drafter whose depths do not depend on one another (DDTree)"),
    "marginal-auto": (_marginal_auto, "as many of them as pay"),
    "treeflash-N": (_treeflash, "the same for a TreeFlash drafter"),
    "beam-N": (_beam, f"up to N nodes of a beam of width {_BEAM_WIDTH}"),
    "static-N": (_static, "N nodes in one topology for all rounds (Medusa, EAGLE)"),
    "bastion": (_bastion, "as many nodes as BASTION's rule takes"),
    "auto": (_auto, "as many nodes as pay, the library's rule"),
    "oracle": (_plain, "the fixed N best on half of the prompts, scored on the other half"),
    "flex-parallel": (_flex, "FlexDraft, drafting while it verifies"),
    "flex-sequential": (_flex, "FlexDraft, drafting after it has verified"),
    "flex-batch": (_flex, "FlexDraft, the first up to a batch of two, as in its paper"),
    "flex-auto": (_flex, "FlexDraft, whichever pays"),
}


def parse_arms(names: Sequence[str], beside: Sequence[str] = ()) -> list[str]:
    """The arms to measure, `plain` first, each once, and what `oracle` chooses among.

    Args:
        names: As the user gave them.
        beside: Names of further drafters.

    Raises:
        ValueError: A name is unknown; the message lists those that are.
    """
    found = ["plain"]
    for name in names:
        arm, _, drafter = name.partition("@")
        _look_up(arm)
        if drafter not in ("", *beside):
            known = ", ".join(beside) or "there is none"
            raise ValueError(f"Arm {name!r} is of no drafter given to measure beside the first; known: {known}.")
        if name == "oracle":
            found += [f"tree-{nodes}" for nodes in ORACLE_GRID]
        elif arm == "oracle":
            raise ValueError(f"{name!r}: `oracle` is of the first drafter only.")
        found.append(name)
    return list(dict.fromkeys(found))


def _look_up(name: str) -> tuple[str, int | None]:
    """Key of an arm in `ARMS`, and its N where it has one."""
    if name in ARMS and not name.endswith("-N"):
        return name, None
    match = re.fullmatch(r"(\w+)-([1-9]\d*)", name)
    if match and f"{match[1]}-N" in ARMS:
        return f"{match[1]}-N", int(match[2])
    raise ValueError(f"Unknown arm {name!r}; the arms are {', '.join(ARMS)}, with a number in the place of N.")


def build_arms(
    names: Sequence[str], pair: Pair, beside: Mapping[str, BlockDrafter] | None = None
) -> tuple[dict[str, Arm], dict[str, str]]:
    """The arms of some names that can run, and why the others cannot. `oracle` is none: it only reads the others.

    Args:
        names: From `parse_arms`.
        pair: What arms are of.
        beside: Further drafters by name, for arms `ARM@NAME`.
    """
    arms: dict[str, Arm] = {}
    skipped: dict[str, str] = {}
    for name in names:
        if name == "oracle":
            continue
        arm, _, drafter = name.partition("@")
        key, nodes = _look_up(arm)
        build = ARMS[key][0]
        of = replace(pair, drafter=beside[drafter]) if drafter and beside else pair
        try:
            built = build(of, arm) if nodes is None else build(of, arm, nodes)
        except UnavailableArmError as error:
            skipped[name] = str(error)
        else:
            arms[name] = replace(built, name=name)
    return arms, skipped


def tree_nodes(name: str) -> int | None:
    """N of a `tree-N` arm; None for all others."""
    if "@" in name:
        return None
    key, nodes = _look_up(name)
    return nodes if key == "tree-N" else None
