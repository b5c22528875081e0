"""The toy engine behind HTTP: in the paths of vLLM's RL server, or in those of SGLang."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import APIRouter, Body, FastAPI, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from .fake_engine import FakeEngine, FakeRequest, Refusal

Kind = Literal["contract", "sglang"]
END = "data: [DONE]\n\n"


class FakeServer:
    """A server that runs in a thread: its URL, and the engine behind it."""

    def __init__(self, url: str, engine: FakeEngine) -> None:
        self.url = url
        self.engine = engine


@contextmanager
def serving(
    engine: FakeEngine, kind: Kind = "contract", *, key: str | None = None, control_plane: bool = True, metrics: bool = True
) -> Iterator[FakeServer]:
    """A server for as long as the block runs."""
    app = _app(engine, key)
    app.include_router(_common(engine, kind, metrics=metrics))
    if control_plane:
        app.include_router(_contract_control(engine) if kind == "contract" else _sglang_control(engine))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server ended before it stood"
            time.sleep(0.01)
        yield FakeServer(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", engine)
    finally:
        server.should_exit = True
        thread.join()


def _app(engine: FakeEngine, key: str | None) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.create_task(engine.run())
        yield
        loop.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> JSONResponse:
        return JSONResponse({"error": {"message": str(error)}}, error.status)

    if key is not None:

        @app.middleware("http")
        async def want_key(request: Request, call_next: Any) -> Any:
            if request.headers.get("Authorization") != f"Bearer {key}":
                return JSONResponse({"detail": "a key is wanted"}, 401)
            return await call_next(request)

    return app


def _common(engine: FakeEngine, kind: Kind, *, metrics: bool) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict:
        owner = {"contract": "caesura", "sglang": "sglang"}[kind]
        return {"data": [{"id": "tracer", "owned_by": owner, "root": "v1", "max_model_len": engine.book.context}]}

    if metrics:

        @router.get("/metrics")
        async def render() -> PlainTextResponse:
            return PlainTextResponse("".join(f'fake:{name}{{rank="0"}} {value}\n' for name, value in engine.counts().items()))

    if kind == "contract":

        @router.post("/v1/completions")
        async def complete(request: Request, body: Annotated[dict, Body()]) -> StreamingResponse:
            id = f"cmpl-{request.headers.get('X-Request-Id', 'none')}"
            ids = [f"{id}-0"] if body.get("n", 1) == 1 else [f"0_{id}-0", f"1_{id}-0"]
            requests = [engine.submit(id, body["prompt"], body["max_tokens"]) for id in ids]
            return StreamingResponse(_completions(engine, requests), media_type="text/event-stream")

    else:

        @router.post("/generate")
        async def generate(body: Annotated[dict, Body()]) -> StreamingResponse:
            request = engine.submit(body.get("rid", "none"), body["input_ids"], body["sampling_params"]["max_new_tokens"])
            return StreamingResponse(_generations(engine, request), media_type="text/event-stream")

    return router


async def _completions(engine: FakeEngine, requests: list[FakeRequest]) -> AsyncIterator[str]:
    """OpenAI's events; a choice that has ended says which weights made it."""
    try:
        unended = list(requests)
        while unended:
            for request in list(unended):
                tokens, reason = await request.news.get()
                choice: dict[str, Any] = {"index": requests.index(request), "token_ids": tokens, "finish_reason": reason}
                if reason:
                    choice["weight_versions"] = engine.spans(request)
                    unended.remove(request)
                yield _event({"choices": [choice]})
        counts = {"prompt_tokens": requests[0].prompt_tokens, "completion_tokens": sum(request.output_tokens for request in requests)}
        yield _event({"choices": [], "usage": counts})
        yield END
    finally:
        engine.abort([request.id for request in requests])


async def _generations(engine: FakeEngine, request: FakeRequest) -> AsyncIterator[str]:
    """SGLang's events, each with all tokens so far."""
    heard: list[int] = []
    try:
        reason = None
        while reason is None:
            tokens, reason = await request.news.get()
            heard += tokens
            meta = {
                "id": request.id,
                "finish_reason": {"type": reason} if reason else None,
                "prompt_tokens": request.prompt_tokens,
                "completion_tokens": len(heard),
                "weight_versions": engine.spans(request) if reason else None,
            }
            yield _event({"output_ids": heard, "meta_info": meta})
        yield END
    finally:
        engine.abort([request.id])


def _event(data: dict) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _contract_control(engine: FakeEngine) -> APIRouter:
    router = APIRouter()

    @router.post("/pause")
    async def pause(mode: Annotated[Literal["abort", "wait", "keep"], Query()] = "abort", clear_cache: bool = True) -> dict:
        await engine.pause(mode, clear_cache)
        return {"status": "paused"}

    @router.post("/resume")
    async def resume() -> dict:
        engine.resume()
        return {"status": "resumed"}

    @router.get("/is_paused")
    async def is_paused() -> dict:
        return {"is_paused": engine.is_paused}

    @router.post("/abort_requests")
    async def abort(request_ids: Annotated[list[str] | None, Body(embed=True)] = None) -> dict:
        named = request_ids and [id for name in request_ids for id in (name, f"0_{name}", f"1_{name}")]
        return {"status": "aborted", "aborted": engine.abort(named)}

    @router.post("/reset_prefix_cache")
    async def reset() -> dict:
        engine.reset()
        return {"success": True}

    @router.post("/sleep")
    async def sleep(level: int, mode: str = "abort") -> dict:
        await engine.pause(mode, False) if engine.mode is None else None
        engine.sleeping = True
        return {"status": "sleeping"}

    @router.post("/wake_up")
    async def wake_up() -> dict:
        engine.sleeping = False
        return {"status": "awake"}

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict:
        return {"is_sleeping": engine.sleeping}

    @router.post("/start_weight_update")
    async def start() -> dict:
        engine.start_update()
        return {"message": "started"}

    @router.post("/update_weights")
    async def update(update_info: Annotated[dict[str, str], Body(embed=True)]) -> dict:
        engine.update(update_info["path"])
        return {"message": "updated"}

    @router.post("/finish_weight_update")
    async def finish(weight_version: Annotated[str | None, Body(embed=True)] = None) -> dict:
        engine.finish_update(weight_version)
        return {"message": "finished"}

    @router.post("/update_weight_version")
    async def set_version(new_version: Annotated[str, Body(embed=True)]) -> dict:
        engine.set_label(new_version)
        return {"success": True, "new_version": new_version}

    @router.get("/weight_info")
    async def weight_info() -> dict:
        return {"weight_version": engine.label}

    return router


def _sglang_control(engine: FakeEngine) -> APIRouter:
    """From the contract: abort + flush = abort/clear, in_place = keep/no clear, retract + flush = keep/clear, no wait."""
    router = APIRouter()

    @router.post("/pause_generation")
    async def pause(mode: Annotated[Literal["abort", "retract", "in_place"], Body(embed=True)] = "abort") -> dict:
        await engine.pause("abort" if mode == "abort" else "keep", False)
        return {"status": "ok"}

    @router.post("/continue_generation")
    async def resume() -> dict:
        engine.resume()
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> JSONResponse:
        return JSONResponse({}, 503 if engine.is_paused else 200)

    @router.post("/abort_request")
    async def abort(rid: Annotated[str, Body()] = "", abort_all: Annotated[bool, Body()] = False) -> dict:
        engine.abort(None if abort_all else [id for id in engine.live if id.startswith(rid)] if rid in engine.live else [])
        return {}

    @router.post("/flush_cache")
    async def flush() -> dict:
        with suppress(Refusal):
            engine.reset()
            return {}
        raise Refusal(400, "requests are running")

    @router.post("/update_weights_from_disk")
    async def update(body: Annotated[dict, Body()]) -> dict:
        engine.load(body["model_path"])
        if "weight_version" in body and "forgotten-label" not in engine.faults:
            engine.label = body["weight_version"]
        return {"success": True}

    @router.post("/update_weight_version")
    async def set_version(new_version: Annotated[str, Body()], abort_all_requests: Annotated[bool, Body()] = True) -> dict:
        if abort_all_requests:
            engine.abort(None)
        engine.set_label(new_version)
        return {"success": True, "new_version": new_version}

    @router.get("/model_info")
    async def model_info() -> dict:
        return {"weight_version": engine.label}

    return router
