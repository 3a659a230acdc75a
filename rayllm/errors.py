"""The error tree. Everything rayllm raises on purpose is a `RayllmError`.

    RayllmError
    ├── ConfigError          a bad option, config file or model folder: exit code 2 on the command line
    │   └── ModelError       a checkpoint that cannot be served (missing, unknown architecture, wrong weights)
    ├── InvalidRequestError  a bad request: HTTP 400; `param` names the field
    │   └── OverloadedError  a request that is refused only for now, as too much waits: HTTP 429
    ├── OutputError          results that cannot be written
    ├── StartupError         the engine could not be started (too few GPUs, a worker died while loading)
    └── EngineDeadError      the engine stopped; requests in flight end with this

Each message names the field and the limit, in one sentence a user can act on.
"""

from __future__ import annotations


class RayllmError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(RayllmError, ValueError):
    """An engine option, a config file or a deployment that cannot work as given."""


class ModelError(ConfigError):
    """A model folder or checkpoint that cannot be served as it is."""


class InvalidRequestError(RayllmError, ValueError):
    """A request that is refused; the engine goes on serving. `param` is the field at fault, if one is."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param

    def __reduce__(self):
        return (type(self), (str(self), self.param))


class OverloadedError(InvalidRequestError):
    """A request that is refused because too much waits already; the same may be taken a little later."""


class OutputError(RayllmError):
    """Results that cannot be written."""


class StartupError(RayllmError, RuntimeError):
    """The engine could not be started."""


class EngineDeadError(RayllmError, RuntimeError):
    """The engine stopped and cannot answer."""
