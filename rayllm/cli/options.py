"""Command-line flags made from the config classes: one flag a field, so that no option is named in two places.

Precedence: flags, then the file of --config, then the defaults of the classes.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rayllm.config.options import (
    EngineConfig,
    FileOptions,
    ModelConfig,
    ServerConfig,
    load_config_file,
    make_config,
    make_models,
)
from rayllm.errors import ConfigError

_ALIASES = {"tensor_parallel_size": ["--tp"]}

_MODEL = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="Folder of a Hugging Face checkpoint; the bundled model if absent."),
]
_CONFIG = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="YAML file of options; flags override it.")
]


def config_flags(
    *kinds: type[BaseModel], positional_model: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command with a flag for each field of `kinds`, --config and, if positional_model, an argument MODEL.

    The command must take **options; it gets "model_argument", "config" and all fields, None where not given.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        hints = typing.get_type_hints(command, include_extras=True)
        parameters = [p.replace(annotation=hints.get(p.name, p.annotation)) for p in own]
        if positional_model:
            parameters.append(_parameter("model_argument", _MODEL))
        parameters.append(_parameter("config", _CONFIG))
        for kind in kinds:
            texts = field_help(kind)
            for name, field in kind.model_fields.items():
                parameters.append(_parameter(name, _flag(name, field, texts.get(name, ""))))
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def engine_config(options: dict[str, Any], **defaults: Any) -> EngineConfig:
    """The EngineConfig of a command's options. defaults: of the command, below file and flags. Raises ConfigError."""
    file, (engine, _) = _read(options)
    if file.models:
        raise ConfigError("the config file lists several models; this command runs one")
    return make_config(EngineConfig, defaults | file.engine | engine)


def deployment_config(options: dict[str, Any]) -> tuple[list[ModelConfig], ServerConfig]:
    """The models of a command's options, and the options of the whole deployment. Raises ConfigError."""
    file, flags = _read(options)
    return make_models(file, flags)


def field_help(kind: type[BaseModel]) -> dict[str, str]:
    """Field -> its sentence in the docstring of its class, where fields are described as "name: text" in a row."""
    classes = [each for each in kind.__mro__ if issubclass(each, BaseModel) and each is not BaseModel]
    text = " ".join(" ".join(each.__doc__ or "" for each in classes).split())
    names = "|".join(sorted(kind.model_fields, key=len, reverse=True))
    parts = re.split(rf"(?:^|(?<=[.] ))({names}): ", text)
    return {name: body.strip().removesuffix(".") for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def _read(options: dict[str, Any]) -> tuple[FileOptions, tuple[dict[str, Any], dict[str, Any]]]:
    """(options of the file, (engine flags, server flags)). Raises ConfigError."""
    given = {name: value for name, value in options.items() if value is not None}
    argument, path = given.pop("model_argument", None), given.pop("config", None)
    if argument is not None:
        if given.get("model", argument) != argument:
            raise ConfigError(f"model is given twice, as {argument} and as --model {given['model']}")
        given["model"] = argument
    file = load_config_file(path) if path is not None else FileOptions({}, {}, [])
    engine: dict[str, Any] = {}
    server: dict[str, Any] = {}
    for name, value in given.items():
        (server if name in ServerConfig.model_fields else engine)[name] = value
    return file, (engine, server)


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _flag(name: str, field: FieldInfo, text: str) -> Any:
    """The typer annotation of one field. Limits are left to the config, whose messages are the same everywhere."""
    kind, choices = _plain_type(field.annotation)
    flag = "--" + name.replace("_", "-")
    default = f" (default {field.default})" if field.default is not None and name != "model" else ""
    names = [flag, *_ALIASES.get(name, [])] if kind is not bool else [f"{flag}/--no-{flag[2:]}"]
    metavar = f"[{'|'.join(map(str, choices))}]" if choices else None
    option = typer.Option(*names, help=(text + default).strip(), metavar=metavar, show_default=False)
    return Annotated[kind | None, option]


def _plain_type(annotation: Any) -> tuple[type, tuple[Any, ...]]:
    """(type on the command line, choices) of a field's annotation."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is Literal:
        choices = typing.get_args(annotation)
        return type(choices[0]), choices
    return annotation, ()
