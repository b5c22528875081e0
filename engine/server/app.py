"""The application: an engine, its routes, and what stands in front of them."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Depends, FastAPI

from ..async_llm import AsyncLLM
from . import completions, control, status
from .config import ServerConfig
from .delivery import Deliveries
from .errors import ErrorResponse, install_error_handlers
from .guard import BodyLimit, require_api_key
from .metrics import Metrics
from .tokenizer import Tokenizer

REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "Refused: `error.type` says why in a word, `error.message` in a sentence."},
    "503": {"model": ErrorResponse, "description": "Paused or out of service under the policy `reject`, or the engine is dead."},
}


def make_app(llm: AsyncLLM, tokenizer: Tokenizer, config: ServerConfig) -> FastAPI:
    """The ASGI application. It does not own the engine: whoever made `llm` shuts it down."""
    app = FastAPI(title="Caesura", description="An engine that may be paused mid-tokens and given new weights.", responses=REFUSALS)
    app.state.llm, app.state.tokenizer, app.state.config = llm, tokenizer, config
    app.state.metrics, app.state.deliveries = Metrics(), Deliveries(llm)
    app.state.started = int(time.time())
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    install_error_handlers(app)
    app.include_router(status.router)
    key_wanted = [] if config.api_key is None else [Depends(require_api_key)]
    app.include_router(completions.router, dependencies=key_wanted)
    if config.dev_mode:
        app.include_router(control.router, dependencies=key_wanted)
    return app
