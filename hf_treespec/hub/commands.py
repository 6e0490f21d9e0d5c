"""The `publish` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def publish(
    drafter: Annotated[str, typer.Argument(help="Drafter: Hub id, path, `embedded` or `embedded:FAMILY`.")],
    repo_id: Annotated[str, typer.Argument(help="Repository to publish it in, `owner/name`.")],
    target: Annotated[
        str | None,
        typer.Option(help="Hub id of its target; what the drafter's card or the measurement names, if not set."),
    ] = None,
    measurement: Annotated[Path | None, typer.Option(help="JSON that `bench --json` wrote of this drafter.")] = None,
    license: Annotated[str | None, typer.Option(help="Its licence; the target's own if not set.")] = None,  # noqa: A002
    private: Annotated[bool | None, typer.Option("--private/--public", help="Who sees a new repository.")] = None,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Of the commit.")] = None,
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
    """
    from . import publishing

    options: dict[str, Any] = {"measurement": measurement, "target": target, "license": license}
    try:
        loaded = _load(drafter)
        if dry_run:
            folder = output or Path(repo_id.rpartition("/")[2])
            publishing.write_repository(loaded, repo_id, folder, **options)
            typer.echo(f"Written to {folder}, nothing uploaded.")
            return
        commit = publishing.publish(loaded, repo_id, private=private, commit_message=message, output=output, **options)
    except (OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"Published: {commit.commit_url}")


def _load(name: str) -> Any:
    """The drafter, in its checkpoint's own format."""
    from .. import embedded
    from ..drafters import AutoDrafter

    source, _, family = name.partition(":")
    path = embedded.path(family or "dflash") if source == "embedded" else name
    return AutoDrafter.from_pretrained(path, dtype="auto")
