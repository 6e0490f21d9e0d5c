"""Publishing a drafter: everything is checked, then the repository is written, then it is uploaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import CommitInfo, HfApi, ModelCard
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from jinja2 import Template

from .. import __version__
from ..drafters.base import BlockDrafter, check_unwrapped
from ..sources import HTTPError, is_hub_id
from .cards import check_card, render_card, training_section, write_card
from .licenses import choose_license, license_of, link_of
from .measurement import check_measurement, read_measurement

_TOKENS = "https://huggingface.co/settings/tokens"
#: What an older version may have left in the repository and this one does not overwrite: shards and their index.
_REPLACED = ["*.safetensors", "*.safetensors.index.json"]


def publish(
    drafter: BlockDrafter,
    repo_id: str,
    *,
    measurement: str | Path | Mapping[str, Any] | None = None,
    target: str | None = None,
    license: str | None = None,  # noqa: A002
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "5GB",
    tags: Sequence[str] | None = None,
    output: str | Path | None = None,
) -> CommitInfo:
    """Publishes a drafter on the Hub: weights, configuration, `custom_generate` and a model card.

    Nothing is created before everything has been checked (see `write_repository`).

    Args:
        drafter: What to publish.
        repo_id: `owner/name`.
        measurement: What `hf-treespec bench --json` wrote of this drafter, or its path.
        target: Hub id of the model it drafts for; by default what its card or the measurement names.
        license: Its licence; by default the target's own.
        private: Whether a new repository is private.
        token: Of the Hub; by default the one that is logged in.
        commit_message: Of the commit; `commit_description` and `create_pr` likewise as in `HfApi.upload_folder`.
        revision: Branch to publish to, made where there is none; with `create_pr` the one the pull request is for.
        max_shard_size: As in `save_pretrained`.
        tags: Tags of the card, besides its own.
        output: New or empty folder in which to keep what is uploaded.

    Raises:
        FileNotFoundError: There is no such measurement.
        PermissionError: There is no token, or it may not write there.
        TypeError: It is no drafter, but a wrapper around one.
        ValueError: Something must not be published; the message names the rule, the value and the fix.
    """
    check_unwrapped(drafter)
    check_repo_id(repo_id)
    if not create_pr:
        check_account(repo_id, token)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary if output is None else output)
        card = write_repository(
            drafter,
            repo_id,
            folder,
            measurement=measurement,
            target=target,
            license=license,
            token=token,
            max_shard_size=max_shard_size,
            tags=tags,
        )
        card.validate()
        api = HfApi(token=token)
        with _permissions_explained(repo_id):
            if not create_pr:
                api.create_repo(repo_id, private=private, exist_ok=True)
                if revision is not None and not revision.startswith("refs/"):
                    api.create_branch(repo_id, branch=revision, exist_ok=True)
            return api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message or f"Upload {type(drafter).__name__}",
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
                delete_patterns=_REPLACED,
            )


def write_repository(
    drafter: BlockDrafter,
    repo_id: str,
    folder: str | Path,
    *,
    measurement: str | Path | Mapping[str, Any] | None = None,
    target: str | None = None,
    license: str | None = None,  # noqa: A002
    token: str | bool | None = None,
    max_shard_size: int | str = "5GB",
    tags: Sequence[str] | None = None,
) -> ModelCard:
    """Checks a drafter and writes the folder that `publish` uploads. The arguments are those of `publish`.

    Of the network only the target's licence is asked for; offline, `license` must be given.

    Returns:
        The model card.

    Raises:
        FileNotFoundError: There is no such measurement.
        ValueError: The repository's name is none, the folder is not empty, a weight is not finite, the measurement is
            absent or of another drafter or target, the target is not on the Hub, or a licence forbids it.
    """
    check_unwrapped(drafter)
    check_repo_id(repo_id)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"A repository is written into an empty folder; {str(folder)!r} is not. Give a new one.")
    check_weights(drafter)
    measured = read_measurement(measurement)
    card = own_card(drafter, token)
    target = find_target(target, card, measured)
    check_measurement(measured, drafter, target)
    metadata = card.data.to_dict() if card else {}
    if metadata.get("license") == "other" and license_of(metadata) is None:
        raise ValueError(
            "The drafter's own card says `license: other` without a license_name, so it is not known what may be done "
            "with it. State license_name and license_link in its README.md, or one of the Hub's licences."
        )
    base = base_metadata(target, token)
    bases = {target: license_of(base)}
    if license_of(metadata):
        bases["the drafter's own card"] = license_of(metadata)
    licence, notices = choose_license(license, bases, repo_id)
    card = render_card(
        drafter,
        target=target,
        repo_id=repo_id,
        licence=licence,
        notices=notices,
        measurement=measured,
        training=training_section(card) if card else None,
        metadata={
            "datasets": metadata.get("datasets"),
            "language": metadata.get("language"),
            "license_link": link_of(licence, {target: base, drafter.name_or_path: metadata}),
            "tags": [*_list(metadata.get("tags")), *(tags or ())],
        },
    )
    check_card(card)
    folder.mkdir(parents=True, exist_ok=True)
    drafter.save_pretrained(folder, max_shard_size=max_shard_size)
    write_card(card, folder)
    write_custom_generate(repo_id, folder)
    if notices:
        (folder / "NOTICE").write_text("\n".join(notices) + "\n", encoding="utf-8")
    return card


def write_custom_generate(repo_id: str, folder: Path) -> None:
    """Writes `custom_generate/` for a repository: the code that transformers runs, and what it needs."""
    source = files(__package__) / "repository" / "custom_generate"
    (folder / "custom_generate").mkdir()
    for name in ("generate.py", "requirements.txt"):
        template = Template((source / name).read_text(encoding="utf-8"), keep_trailing_newline=True)
        text = template.render(repo_id=repo_id, version=__version__)
        (folder / "custom_generate" / name).write_text(text, encoding="utf-8")


def check_repo_id(repo_id: str) -> None:
    """Checks that a repository can have this id.

    Raises:
        ValueError: It cannot.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is no repository id of the Hub: {error} Give one such as owner/name.") from None
    if repo_id.count("/") != 1:
        raise ValueError(
            f"A drafter is published as owner/name, which its own code and card name; {repo_id!r} has no owner."
        )


def check_weights(drafter: BlockDrafter) -> None:
    """Checks that the weights are the drafter's own, every one a finite number.

    Raises:
        ValueError: One is NaN or infinite, or of an adapter.
    """
    weights = drafter.state_dict()
    layers = sorted(name for name in weights if ".base_layer." in name)
    if layers:
        raise ValueError(
            f"An adapter lies round layers of the drafter ({layers[0]} and {len(layers) - 1} more), which could not "
            "be loaded. Publish what `merge_and_unload()` of the PEFT model returns."
        )
    for name, tensor in weights.items():
        wrong = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
        if wrong:
            raise ValueError(
                f"Weights must be finite numbers; {wrong} of {tensor.numel()} in {name} are NaN or infinite. Publish "
                "an earlier checkpoint, or one that was not cast to a format it overflows in."
            )


def check_account(repo_id: str, token: str | bool | None = None) -> None:
    """Checks that the token may write into the repository's namespace, as far as the Hub tells beforehand.

    Raises:
        PermissionError: There is none, or it may not.
    """
    owner = repo_id.partition("/")[0]
    with _permissions_explained(repo_id):
        user = HfApi().whoami(token=token)
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise PermissionError(
            f"Publishing needs a token that may write; this one of {user['name']!r} may only read. Make another at "
            f"{_TOKENS} and log in with it: hf auth login"
        )
    organisations = [org["name"] for org in user.get("orgs", ()) if org.get("roleInOrg") != "read"]
    if owner not in (user["name"], *organisations):
        raise PermissionError(
            f"{user['name']!r} may not write to {owner!r}, the owner of {repo_id!r}. Publish under "
            f"{' or '.join([user['name'], *organisations])}, or log in as somebody who may: hf auth login"
        )


@contextmanager
def _permissions_explained(repo_id: str) -> Iterator[None]:
    try:
        yield
    except LocalTokenNotFoundError:
        raise PermissionError(
            f"Publishing needs a token of the Hub, and there is none. Make one that may write at {_TOKENS} and log in "
            "with it (hf auth login), or put it into HF_TOKEN."
        ) from None
    except OfflineModeIsEnabled:
        raise ValueError(
            "Publishing needs the Hub, and HF_HUB_OFFLINE forbids it. Unset it, or only write the folder (--dry-run)."
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status not in (401, 403):
            raise
        reason = "does not know the token" if status == 401 else f"does not let the token write to {repo_id!r}"
        raise PermissionError(
            f"The Hub {reason} ({status}). Make one that may write there at {_TOKENS} and log in with it: "
            "hf auth login"
        ) from error


def own_card(drafter: BlockDrafter, token: str | bool | None = None) -> ModelCard | None:
    """The card that lies with the drafter where it was loaded from; None where there is none."""
    source = drafter.name_or_path
    path = Path(source) / "README.md"
    if path.is_file():
        return ModelCard.load(path)
    if not is_hub_id(source):
        return None
    try:
        return ModelCard.load(source, token=token if isinstance(token, str) else None)
    except (EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError):
        return None


def find_target(target: str | None, card: ModelCard | None, measurement: Mapping[str, Any]) -> str:
    """Hub id of the target a drafter is published for.

    Raises:
        ValueError: None is known, or it is not on the Hub.
    """
    stated = card.data.get("base_model") if card else None
    found = target or (stated if isinstance(stated, str) else None) or str(measurement["environment"]["target"])
    if not is_hub_id(found):
        raise ValueError(
            f"A published drafter names its target by a Hub id; {found!r} is none. Give it (--target owner/name)."
        )
    return found


def base_metadata(target: str, token: str | bool | None = None) -> Mapping[str, Any]:
    """Metadata of the target's card on the Hub; empty where the Hub is out of reach.

    Raises:
        ValueError: There is no such model.
    """
    try:
        data = HfApi().model_info(target, token=token).card_data
    except RepositoryNotFoundError:
        raise ValueError(
            f"The target {target!r} is not on the Hub, or hidden from this token. Give its id (--target owner/name)."
        ) from None
    except HfHubHTTPError:
        raise
    except (OfflineModeIsEnabled, HTTPError):
        return {}
    return data.to_dict() if data else {}


def _list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())
