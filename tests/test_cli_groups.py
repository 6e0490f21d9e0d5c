"""Groups of options: dataclasses that a command takes and typer reads field by field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from hf_treespec.cli.groups import takes_groups


@dataclass(frozen=True, kw_only=True)
class Pace:
    panel: ClassVar[str] = "How fast"

    steps: Annotated[int, typer.Option(help="Steps to take.")] = 3
    name: Annotated[str, typer.Option(help="Whose steps.")]


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    @takes_groups
    def walk(*, far: Annotated[bool, typer.Option(help="Go far.")] = False, pace: Pace) -> None:
        """Walk."""
        typer.echo(f"{far} {pace}")

    @app.command()
    @takes_groups
    def run(*, pace: Pace = Pace(steps=9, name="hare")) -> None:
        """Run."""
        typer.echo(pace)

    return app


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["walk", "--name", "snail"], "False Pace(steps=3, name='snail')"),
        (["walk", "--far", "--steps", "4", "--name", "snail"], "True Pace(steps=4, name='snail')"),
        (["run"], "Pace(steps=9, name='hare')"),
        (["run", "--steps", "7"], "Pace(steps=7, name='hare')"),
    ],
)
def test_options_come_back_as_the_group(app: typer.Typer, arguments: list[str], printed: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == printed


def test_a_field_without_a_default_is_required(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["walk"])
    assert result.exit_code == 2
    assert "--name" in result.output


def test_the_help_shows_the_panel_and_the_commands_own_defaults(app: typer.Typer) -> None:
    text = CliRunner().invoke(app, ["run", "--help"]).stdout
    assert "How fast" in text
    assert "Steps to take." in text
    assert "[default: 9]" in text
