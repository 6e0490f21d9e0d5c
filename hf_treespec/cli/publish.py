"""`hf-treespec publish`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import errors_in_a_line

if TYPE_CHECKING:
    from ..drafters.base import BlockDrafter


def publish(
    drafter: Annotated[str, typer.Argument(help="Drafter: Hub id, path, `embedded` or `embedded:FAMILY`.")],
    repo_id: Annotated[str, typer.Argument(help="Repository to publish it in, `owner/name`.")],
    target: Annotated[
        str | None,
        typer.Option(help="Hub id of its target.", show_default="what the drafter's card or the measurement names"),
    ] = None,
    measurement: Annotated[
        Path | None, typer.Option(dir_okay=False, help="JSON that `bench --json` wrote of this drafter.")
    ] = None,
    license: Annotated[  # noqa: A002
        str | None, typer.Option(help="Its licence, as the Hub names it.", show_default="the target's")
    ] = None,
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Who sees a new repository.", show_default="the Hub's default"),
    ] = None,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Message of the commit.")] = None,
    output: Annotated[
        Path | None, typer.Option(file_okay=False, help="New or empty folder to keep what is uploaded in.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the folder only: to OUTPUT, or named as the repository.")
    ] = False,
) -> None:
    """Publish a drafter on the Hub: weights, configuration, model card, code for `custom_generate`.

    Nothing is created there before everything has been checked: finite weights, a measurement of this very drafter,
    the licence, the card, the token. What the folder would hold, `--dry-run` writes.

    Example: `hf-treespec publish ./my-drafter me/my-drafter --measurement bench.json --dry-run`
    """
    from ..hub import publishing

    options: dict[str, Any] = {"measurement": measurement, "target": target, "license": license}
    with errors_in_a_line():
        loaded = _load(drafter)
        if dry_run:
            folder = output or Path(repo_id.rpartition("/")[2])
            publishing.write_repository(loaded, repo_id, folder, **options)
            typer.echo(f"Written to {folder}, nothing uploaded.")
            return
        commit = publishing.publish(loaded, repo_id, private=private, commit_message=message, output=output, **options)
    typer.echo(f"Published: {commit.commit_url}")


def _load(name: str) -> BlockDrafter:
    """The drafter, in its checkpoint's own format."""
    from .. import embedded
    from ..drafters import AutoDrafter

    source, _, family = name.partition(":")
    path = embedded.path(family or "dflash") if source == "embedded" else name
    drafter: BlockDrafter = AutoDrafter.from_pretrained(path, dtype="auto")
    return drafter
