"""`Architecture`: what rayllm knows of one class of models before it loads any, and those of users' packages."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from rayllm.config.json_fields import JsonFields
from rayllm.errors import ModelError

GROUP = "rayllm.architectures"


class Architecture(NamedTuple):
    """parse: config.json and the name of the architecture -> fields of `ModelSpec` as for `make_spec`.

    model_type: what config.json calls it.
    eos_token_id: the default of transformers' class; None for none. Null stands for a list too.
    model: "module:name" of the class, a subclass of `rayllm.models.base.CausalLM`, of an architecture that a package
    brings. It is imported where a model is loaded, so that the module of this object needs no torch.
    text_types: of a checkpoint that holds towers for images or sound beside a text model: the model types that the text
    model may have, the default first. parse is handed the text_config then.
    models: by which names people know them, for the table of what is served.
    """

    parse: Callable[[JsonFields, str], dict[str, Any]]
    model_type: str
    eos_token_id: int | list[int] | None = None
    model: str | None = None
    text_types: tuple[str, ...] = ()
    models: str = ""


def packaged(name: str) -> Architecture | None:
    """The architecture that an installed package has under the entry point `name` of `GROUP`; None if none has.

    Raises ModelError if several have, or if it cannot be imported.
    """
    points = {point.value: point for point in entry_points(group=GROUP, name=name)}
    if not points:
        return None
    if len(points) > 1:
        raise ModelError(f"architecture {name} has several entry points in {GROUP}: {', '.join(points)}")
    [(value, point)] = points.items()
    where = f"architecture {name}: entry point {value}" + (f" of {point.dist.name}" if point.dist else "")
    try:
        found = point.load()
    except Exception as error:  # whatever the package's code raises
        raise ModelError(f"{where} cannot be imported: {error!r}") from error
    if not isinstance(found, Architecture) or found.model is None:
        raise ModelError(f"{where} must be an Architecture with a model, not {found!r}")
    return found


def packaged_names() -> list[str]:
    """Of all architectures that installed packages have."""
    return sorted(entry_points(group=GROUP).names)
