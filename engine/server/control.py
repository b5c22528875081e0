"""The control plane: pause, resume, abort, weights, versions, sleep, caches. There only in development mode.

Each call is answered after its effect. Paths and fields are vLLM's; what is refused, and
with which status, is in docs/server.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query

from ..async_llm import AsyncLLM
from ..errors import Conflict
from . import control_schemas as schemas
from .dependencies import Engine, Handed, Meter

router = APIRouter(tags=["control plane"])


@router.post("/pause")
async def pause(
    llm: Engine, deliveries: Handed, query: Annotated[schemas.PauseQuery, Query()], body: schemas.NoBody | None = None
) -> schemas.Paused:
    """Stop generating. Answered when the engine is quiet and every output has been written to its client."""
    await llm.pause_generation(mode=query.mode, clear_cache=query.clear_cache)
    await deliveries.written()
    return schemas.Paused()


@router.post("/resume")
async def resume(llm: Engine, query: Annotated[schemas.NoQuery, Query()], body: schemas.NoBody | None = None) -> schemas.Resumed:
    """Go on; while running, do nothing."""
    await llm.resume_generation()
    return schemas.Resumed()


@router.get("/is_paused")
async def is_paused(llm: Engine) -> schemas.IsPaused:
    return schemas.IsPaused(is_paused=await llm.is_paused())


@router.post("/abort_requests")
async def abort_requests(llm: Engine, body: schemas.AbortBody | None = None) -> schemas.Aborted:
    """End requests in whatever state they are; their callers get what was generated, with the reason `abort`."""
    return schemas.Aborted(aborted=await llm.abort(body and body.request_ids))


@router.post("/init_weight_transfer_engine")
async def init_weight_transfer_engine(meter: Meter, body: schemas.InitBody) -> schemas.Done:
    """Choose how weights come. Safetensors need nothing, so that this may be left out."""
    with meter.weight_operation("init"):
        return schemas.Done(message=f"weights come by {body.init_info.backend}")


@router.post("/start_weight_update")
async def start_weight_update(
    llm: Engine, meter: Meter, query: Annotated[schemas.UnpausedQuery, Query()], body: schemas.NoBody | None = None
) -> schemas.Done:
    """Open a weight session; a pause must have taken effect."""
    with meter.weight_operation("start"):
        await llm.start_weight_update(allow_unpaused=query.allow_unpaused)
    return schemas.Done(message="weight update started")


@router.post("/update_weights")
async def update_weights(llm: Engine, meter: Meter, body: schemas.UpdateBody) -> schemas.Done:
    """Write the tensors of a folder, all of the model's or some of them; any number of calls a session."""
    info = body.update_info
    with meter.weight_operation("update"):
        await llm.update_weights(Path(info.path), part=info.part, of=info.of)
    return schemas.Done(message="weights updated")


@router.post("/finish_weight_update")
async def finish_weight_update(llm: Engine, meter: Meter, body: schemas.FinishBody | None = None) -> schemas.Done:
    """Close the session: tokens from now on belong to the new version."""
    with meter.weight_operation("finish"):
        await llm.finish_weight_update(body and body.weight_version)
    return schemas.Done(message="weight update finished")


@router.post("/shutdown_weight_transfer_engine")
async def shutdown_weight_transfer_engine(query: Annotated[schemas.NoQuery, Query()], body: schemas.NoBody | None = None) -> schemas.Done:
    """The reverse of init; safetensors hold nothing open."""
    return schemas.Done(message="weight transfer shut down")


@router.post("/update_weight_version")
async def update_weight_version(
    llm: Engine, query: Annotated[schemas.UnpausedQuery, Query()], body: schemas.VersionBody
) -> schemas.VersionSet:
    """Set the label without touching weights; a pause must have taken effect."""
    await llm.update_weight_version(body.new_version, allow_unpaused=query.allow_unpaused)
    return schemas.VersionSet(new_version=body.new_version)


@router.get("/weight_info")
async def weight_info(llm: Engine) -> schemas.WeightInfo:
    return schemas.WeightInfo(weight_version=await llm.get_weight_version())


@router.post("/weight_checker")
async def weight_checker(llm: Engine, body: schemas.CheckBody) -> schemas.Checksums | schemas.Compared | schemas.Reset:
    """Checksums of the resident weights, their comparison with others, or weights that are surely wrong."""
    if body.action == "reset":
        await _drop_weights(llm)
        return schemas.Reset()
    checksums = await llm.weight_checksums()
    if body.baseline is None:
        return schemas.Checksums(checksums=checksums)
    names = checksums.keys() | body.baseline.keys()
    mismatches = sorted(name for name in names if checksums.get(name) != body.baseline.get(name))
    return schemas.Compared(match=not mismatches, mismatches=mismatches)


async def _drop_weights(llm: AsyncLLM) -> None:
    """Sleep on level 2 forgets the weights, and waking up leaves the engine out of service until a full update.

    Raises:
        Conflict: no pause is effective, so that this would abort requests; or a weight session is open.
    """
    counters = await llm.counters()
    if counters.pause_mode is None or counters.pause_pending:
        raise Conflict("weights may be reset only while a pause is effective; pause first")
    await llm.sleep(level=2)
    await llm.wake_up()


@router.get("/get_world_size")
async def get_world_size(query: Annotated[schemas.WorldSizeQuery, Query()]) -> schemas.WorldSize:
    """How many devices a trainer sends weights to."""
    return schemas.WorldSize(world_size=1)


@router.post("/sleep")
async def sleep(
    llm: Engine, deliveries: Handed, query: Annotated[schemas.SleepQuery, Query()], body: schemas.NoBody | None = None
) -> schemas.SleepState:
    """Pause, then give memory back."""
    await llm.sleep(query.level, query.mode)
    await deliveries.written()
    return schemas.SleepState(status="sleeping")


@router.post("/wake_up")
async def wake_up(llm: Engine, query: Annotated[schemas.WakeQuery, Query()], body: schemas.NoBody | None = None) -> schemas.SleepState:
    """Map memory again; `sleeping` if something still is asleep."""
    awake = await llm.wake_up(query.tags or None)
    return schemas.SleepState(status="awake" if awake else "sleeping")


@router.get("/is_sleeping")
async def is_sleeping(llm: Engine) -> schemas.IsSleeping:
    return schemas.IsSleeping(is_sleeping=await llm.is_sleeping())


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(
    llm: Engine, query: Annotated[schemas.NoQuery, Query()], body: schemas.NoBody | None = None
) -> schemas.CacheReset:
    """Forget all KV; while a pause is effective, frozen requests give theirs up too."""
    await llm.reset_prefix_cache()
    return schemas.CacheReset()


@router.post("/reset_mm_cache")
@router.post("/reset_encoder_cache")
async def reset_other_cache(query: Annotated[schemas.NoQuery, Query()], body: schemas.NoBody | None = None) -> schemas.CacheReset:
    """Text models have no such cache: it is empty."""
    return schemas.CacheReset()
