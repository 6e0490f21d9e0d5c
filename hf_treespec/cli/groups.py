"""Options that several commands share, as dataclasses: a field an option, its help and its default said once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a command readable to typer that takes groups of options.

    Each parameter whose type is a dataclass becomes options, one for each field; the command is called with the
    dataclass again. A field's default is the field's own, or that of the parameter's default, an instance. The help
    shows a group in a panel of its own, which the dataclass names as `panel`.

    Args:
        command: A function whose parameters all have types, with the fields of groups annotated as typer wants them.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups[parameter.name] = kind
            options += _options_of(kind, parameter.default)
        else:
            options.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def grouped(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    grouped.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    grouped.__annotations__ = {option.name: option.annotation for option in options}
    return grouped


def _options_of(group: Any, instance: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    options = []
    for field in fields(group):
        kind, option = get_args(hints[field.name])
        option = copy(option)
        option.rich_help_panel = group.panel
        default = field.default if instance is inspect.Parameter.empty else getattr(instance, field.name)
        options.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is MISSING else default,
                annotation=Annotated[kind, option],
            )
        )
    return options
