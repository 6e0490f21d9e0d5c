"""What the licence of a base model asks of a drafter made for it.

A drafter learns from its target's features and from text that the target writes. It is held here to be derived from
the target, which is the careful reading; none of this is legal advice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..sources import is_hub_id


@dataclass(frozen=True)
class Terms:
    """What a licence asks of models that are derived from one under it.

    Attributes:
        source: Where it says so.
        allowed: Licences such a model may have; None = any.
        prefixes: What its name must begin with, one of them; none = anything.
        notice: What must be said beside it.
    """

    source: str
    allowed: frozenset[str] | None = None
    prefixes: tuple[str, ...] = ()
    notice: str | None = None

    @property
    def link(self) -> str | None:
        """Where its text is, if the source has an address."""
        return self.source.partition(",")[0] if self.source.startswith("https://") else None


def _same(name: str, source: str, *, prefixes: tuple[str, ...] = (), notice: str | None = None) -> tuple[str, Terms]:
    return name, Terms(source, frozenset({name}), prefixes, notice)


def _llama(version: str, source: str, prefixes: tuple[str, ...] = ("Llama",)) -> tuple[str, Terms]:
    title = f"{'Meta Llama' if version == '3' else 'Llama'} {version}"
    built = "" if version == "2" else f" Built with {'Meta Llama 3' if version == '3' else 'Llama'}."
    notice = (
        f"{title} is licensed under the {title} Community License, Copyright © Meta Platforms, Inc. All Rights "
        f"Reserved.{built}"
    )
    return _same(f"llama{version}", source, prefixes=prefixes, notice=notice)


_CC = "https://creativecommons.org/licenses"
_NON_COMMERCIAL = frozenset({"cc-by-nc-4.0", "cc-by-nc-sa-4.0"})
_PERMISSIVE = "permits derived works under other terms, with the notices kept"

#: Terms by licence, as the Hub names it; `license_name` for those it calls `other`.
TERMS: Mapping[str, Terms] = {
    **{
        name: Terms(_PERMISSIVE)
        for name in (
            "apache-2.0",
            "mit",
            "bsd",
            "bsd-2-clause",
            "bsd-3-clause",
            "bsl-1.0",
            "cc0-1.0",
            "cc-by-3.0",
            "cc-by-4.0",
            "isc",
            "unlicense",
            "zlib",
        )
    },
    **dict(
        [
            # Outputs may improve Llama 2 and its derivatives alone, and Llama 3 likewise; from 3.1 on any model whose
            # name begins with Llama.
            _llama("2", "https://ai.meta.com/llama/license, 1.b.v", ()),
            _llama("3", "https://llama.meta.com/llama3/license, 1.b.i and 1.b.v", ("Llama-3", "Llama3")),
            _llama("3.1", "https://www.llama.com/llama3_1/license, 1.b.i and 1.b.iii"),
            _llama("3.2", "https://www.llama.com/llama3_2/license, 1.b.i and 1.b.iii"),
            _llama("3.3", "https://www.llama.com/llama3_3/license, 1.b.i and 1.b.iii"),
            _llama("4", "https://www.llama.com/llama4/license, 1.b.i and 1.b.iii"),
            _same(
                "gemma",
                "https://ai.google.dev/gemma/terms, 1.1(e) and 3.1",
                notice="Gemma is provided under and subject to the Gemma Terms of Use found at "
                "ai.google.dev/gemma/terms.",
            ),
            _same(
                "qwen-research",
                "https://huggingface.co/Qwen/Qwen2.5-3B/blob/main/LICENSE, grant of rights",
                notice="Improved using Qwen. Qwen is licensed under the Qwen RESEARCH LICENSE AGREEMENT, Copyright "
                "(c) Alibaba Cloud. All Rights Reserved.",
            ),
            _same("tongyi-qianwen", "https://huggingface.co/Qwen/Qwen1.5-7B/blob/main/LICENSE, 5.b"),
            _same("cc-by-sa-3.0", f"{_CC}/by-sa/3.0"),
            _same("cc-by-sa-4.0", f"{_CC}/by-sa/4.0"),
            _same("cc-by-nc-sa-4.0", f"{_CC}/by-nc-sa/4.0"),
            _same("gpl-3.0", "https://www.gnu.org/licenses/gpl-3.0.html, 5"),
            _same("agpl-3.0", "https://www.gnu.org/licenses/agpl-3.0.html, 5"),
        ]
    ),
    "qwen": Terms(
        "https://huggingface.co/Qwen/Qwen2.5-72B/blob/main/LICENSE, 5.b",
        notice="Improved using Qwen. Qwen is licensed under the Qwen LICENSE AGREEMENT, Copyright (c) Alibaba Cloud. "
        "All Rights Reserved.",
    ),
    "cc-by-nc-4.0": Terms(f"{_CC}/by-nc/4.0", _NON_COMMERCIAL),
    **{name: Terms(f"{_CC}/{name[3:-4]}/4.0", frozenset()) for name in ("cc-by-nd-4.0", "cc-by-nc-nd-4.0")},
}

#: Identifiers that the Hub takes as `license` (https://huggingface.co/docs/hub/repositories-licenses); any other name
#: goes into `license_name` of an `other` licence.
HUB_LICENSES = frozenset(
    """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl
    lgpl-2.1 lgpl-3.0 isc lppl-1.3c ms-pl mpl-2.0 odc-by odbl openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib
    pddl lgpl-lr deepfloyd-if-license llama2 llama3 llama3.1 llama3.2 llama3.3 gemma
    """.split()  # noqa: SIM905
)


def license_of(metadata: Mapping[str, Any]) -> str | None:
    """The licence that a card's metadata state: the name of an `other` one; None where they state none."""
    stated = metadata.get("license")
    if isinstance(stated, list):
        stated = stated[0] if len(stated) == 1 else None
    if stated == "other":
        stated = metadata.get("license_name")
    return str(stated).lower() if stated and stated != "unknown" else None


def link_of(licence: str, cards: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Where the text of a licence is, by the cards' metadata or by `TERMS`; None = not known.

    Args:
        licence: As `license_of` names it.
        cards: Metadata by the id or folder of the model whose card states them. A file that a card on the Hub names is
            linked where it is.
    """
    for name, metadata in cards.items():
        link = metadata.get("license_link") if license_of(metadata) == licence else None
        if link and "://" not in link:
            link = f"https://huggingface.co/{name}/blob/main/{link}" if is_hub_id(name) else None
        if link:
            return str(link)
    return TERMS[licence].link if licence in TERMS else None


def choose_license(chosen: str | None, bases: Mapping[str, str | None], repo_id: str) -> tuple[str, list[str]]:
    """The licence to publish under, and the notices that go with it.

    Args:
        chosen: What the publisher asks for; None = the base model's own.
        bases: Models the drafter is derived from, its target first, each with its licence where that is known.
        repo_id: Where it is published: some licences ask for a name.

    Raises:
        ValueError: No licence is chosen and the base model's is not known here, or one forbids the choice or the name.
    """
    if chosen is None:
        found = next(iter(bases.values()))
        if found not in TERMS:
            base = next(iter(bases))
            raise ValueError(
                f"A licence must be given where the base model's is not known here: {base} has "
                f"{'none that could be read' if found is None else repr(found)}. Read it, and pass the drafter's "
                "licence (--license, such as apache-2.0)."
            )
        chosen = found
    assert chosen is not None
    chosen = chosen.lower()
    notices = []
    for base, found in bases.items():
        terms = TERMS.get(found or "")
        if terms is None:
            continue
        if terms.allowed is not None and chosen not in terms.allowed:
            allowed = " or ".join(sorted(terms.allowed))
            raise ValueError(
                f"The licence of {base}, {found}, does not let a drafter derived from it be published under "
                f"{chosen!r} ({terms.source}). "
                + (f"Publish it under {allowed} (--license)." if allowed else "It lets none be published.")
            )
        name = repo_id.rpartition("/")[2]
        if terms.prefixes and not name.startswith(terms.prefixes):
            raise ValueError(
                f"The licence of {base}, {found}, asks for names that begin with {terms.prefixes[0]!r} "
                f"({terms.source}); this repository is to be {name!r}. Call it '{terms.prefixes[0]}-{name}'."
            )
        if terms.notice and terms.notice not in notices:
            notices.append(terms.notice)
    return chosen, notices
