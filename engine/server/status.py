"""Whether the server can serve, and its metrics. Open to everyone, as probes and scrapers have no key."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from .dependencies import Engine, Meter
from .errors import error_answer
from .schemas import Health

router = APIRouter(tags=["status"])


@router.get("/health", response_model=Health)
async def health(llm: Engine) -> Health | Response:
    """200 while the engine lives and its weights are whole, paused or not; 503 out of service, or when it is dead."""
    counters = await llm.counters()
    if (why := counters.out_of_service) is not None:
        message = f"a weight update failed half-way ({why}); send a full update"
        return error_answer(message, "out-of-service", HTTPStatus.SERVICE_UNAVAILABLE)
    if counters.sleeping:
        return Health(status="sleeping")
    return Health(status="running" if counters.pause_mode is None else "pausing" if counters.pause_pending else "paused")


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
async def metrics(llm: Engine, meter: Meter) -> Response:
    """Prometheus' text format."""
    return Response(meter.render(await llm.counters()), media_type=CONTENT_TYPE_LATEST)
