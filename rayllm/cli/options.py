"""How commands read their options: flags made from the option classes, the file of --config, defaults.

Each field of a class is one flag, so that no option is declared in two places. Flags override the file, and the file
overrides the defaults of the command and of the classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rayllm.config.options import EngineConfig, ModelConfig, ServerConfig, load_config_file, make_models, pick_config
from rayllm.errors import ConfigError

ServerUrl = Annotated[str, typer.Option("--url", help="Address of a running server.")]
ServedModel = Annotated[str | None, typer.Option("--model", help="Name of its model; the first it lists if absent.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="RAYLLM_API_KEY", help="API key; a variable is safer, flags are visible to others.")
]
LOCAL_SERVER = "http://127.0.0.1:8000"

_MODEL = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Folder or name (org/name) of a Hugging Face model; the bundled if absent."),
]
_CONFIG = Annotated[str | None, typer.Option(metavar="FILE", help="YAML file of options; flags override it.")]
# Flags that are not just the name of their field.
_FLAGS = {"tensor_parallel_size": ["--tensor-parallel-size", "--tp"]}

Command = Callable[..., None]


def make_app(text: str | None = None, *, completion: bool = False) -> typer.Typer:
    """An application without the boxes of rich, which cut long flags off. text: its help.

    completion: whether it has the flags --install-completion and --show-completion, for the shell that it is run in.
    """
    return typer.Typer(
        help=text,
        no_args_is_help=True,
        add_completion=completion,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def config_flags(*kinds: type[BaseModel], positional_model: bool = True) -> Callable[[Command], Command]:
    """Decorate a command with a flag for each field of `kinds`, with --config and, if wanted, an argument MODEL.

    The command takes **options: "model_argument", "config" and all fields, each None if it was not given.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        annotations: dict[str, Any] = {"model_argument": _MODEL} if positional_model else {}
        annotations["config"] = _CONFIG
        for kind in kinds:
            annotations |= {name: _flag(name, field) for name, field in kind.model_fields.items()}
        parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        for name, annotation in annotations.items():
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _flag(name: str, field: FieldInfo) -> Any:
    """The typer annotation of one field. Ranges are left to the class, whose messages are the same everywhere."""
    default = f" (default {field.default})" if field.default is not None and name != "model" else ""
    kind: Any = field.annotation
    return Annotated[kind | None, typer.Option(*_FLAGS.get(name, []), help=f"{field.description}{default}")]


def engine_config(options: dict[str, Any], **defaults: Any) -> EngineConfig:
    """The engine of a command's options. defaults: the command's own. Raises ConfigError."""
    file, flags = _read(options)
    if "models" in file:
        raise ConfigError("the config file lists several models; this command runs one")
    return pick_config(EngineConfig, defaults | file | flags)


def deployment_config(options: dict[str, Any]) -> tuple[list[ModelConfig], ServerConfig]:
    """The models of a command's options, and the options of the whole deployment. Raises ConfigError."""
    return make_models(*_read(options))


def _read(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options of the file, options of the flags). Raises ConfigError."""
    given = {name: value for name, value in options.items() if value is not None}
    path, model = given.pop("config", None), given.pop("model_argument", None)
    if model is not None and given.setdefault("model", model) != model:
        raise ConfigError(f"model is given twice, as {model} and as --model {given['model']}")
    return {} if path is None else load_config_file(path), given


def length_range(name: str, text: str) -> tuple[int, int]:
    """(least, most) of "N" or "A:B". Raises ConfigError that names the option."""
    low, _, high = text.partition(":")
    high = high or low
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise ConfigError(f"{name} must be at least 1, or an ascending range A:B, not {text!r}")
    return int(low), int(high)
