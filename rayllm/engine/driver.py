"""`EngineDriver`: the thread that runs the engine, and the fronts that send it requests.

Threads: the engine thread alone touches the core. Fronts put adds and aborts into its inbox and get deltas back through
`Front.deliver`, called on the engine thread, once a step and front. `serve_zmq` adds one thread that polls the socket: a step may
take seconds (compilation, a huge prefill), and hellos, heartbeats and figures must be answered meanwhile.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from rayllm.errors import EngineDeadError, InvalidRequestError
from rayllm.types import EngineInfo, EngineStats, GenerationRequest, TokenDelta

if TYPE_CHECKING:
    from rayllm.engine.zmq_server import ZmqServer

logger = logging.getLogger(__name__)
