"""AsyncLLM over a core in a thread and over one in a process: the same promises, kept by both."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from engine import (
    AsyncLLM,
    Conflict,
    EngineConfig,
    EngineCore,
    EngineDeadError,
    InvalidArgument,
    OutOfService,
    PauseSuperseded,
    RequestOutput,
    RequestRejected,
    SamplingParams,
    UpdateFailed,
    read_safetensors,
)
from harness.checkpoints import ensure, make_tiny

PROMPT = list(range(20, 37))
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def config(**overrides) -> EngineConfig:
    shape = {
        "checkpoint": ensure("tiny"),
        "block_size": 8,
        "num_blocks": 256,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    return EngineConfig(**{**shape, **overrides})


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for the whole module: an AsyncLLM belongs to one."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=["thread", "process"])
def served(request, runner) -> Iterator[tuple[AsyncLLM, Run]]:
    llm = AsyncLLM.from_config(config(async_scheduling=request.param == "process"), in_process=request.param == "thread")
    yield llm, runner.run
    llm.shutdown()


@pytest.fixture
def llm(served) -> Iterator[AsyncLLM]:
    """An engine that runs, holds no request and no pause, and must be left like that, every block free again."""
    llm, run = served
    yield llm

    async def left() -> None:
        await llm.resume_generation()
        counters = await llm.counters()
        assert (counters.running, counters.waiting, counters.blocked) == (0, 0, 0)
        assert counters.free_blocks == counters.num_blocks

    run(left())


@pytest.fixture
def run(served) -> Run:
    return served[1]


async def collect(llm: AsyncLLM, request_id: str, params: SamplingParams, prompt: list[int] = PROMPT) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, request_id)]


async def tokens(llm: AsyncLLM, request_id: str, params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    return (await collect(llm, request_id, params, prompt))[-1].outputs[0].token_ids


@asynccontextmanager
async def generating(llm: AsyncLLM, request_id: str, params: SamplingParams = LONG) -> AsyncIterator[asyncio.Task[list[RequestOutput]]]:
    """A request that has generated something, and whose outputs somebody takes."""
    began = asyncio.Event()

    async def take() -> list[RequestOutput]:
        outputs = []
        async for output in llm.generate(PROMPT, params, request_id):
            outputs.append(output)
            began.set()
        return outputs

    task = asyncio.create_task(take())
    waiting = asyncio.create_task(began.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    yield task
    if not task.done():
        await llm.resume_generation()
        await llm.abort(request_id)
        await task


def in_lockstep(prompt: list[int], params: SamplingParams, **overrides) -> list[int]:
    core = EngineCore(config(**overrides))
    core.submit("lockstep", prompt, params)
    while core.has_work():
        core.step()
    return [token for output in core.take_outputs() for token in output.token_ids]


# ---- requests ----


def test_tokens_are_those_of_the_core_in_lockstep(llm, run):
    assert run(tokens(llm, "r1", SHORT)) == in_lockstep(PROMPT, SHORT)


def test_deltas_and_the_final_output_add_up_to_the_cumulative_one(llm, run):
    async def of_each_kind():
        kinds = ("cumulative", "delta", "final_only")
        return await asyncio.gather(*(collect(llm, kind, replace(SHORT, output_kind=kind, logprobs=1)) for kind in kinds))

    cumulative, delta, final = run(of_each_kind())
    last = cumulative[-1].outputs[0]
    assert [token for output in delta for token in output.outputs[0].token_ids] == last.token_ids
    assert [logprobs for output in delta for logprobs in output.outputs[0].logprobs] == last.logprobs
    assert [output.outputs[0].token_ids for output in final] == [last.token_ids]
    for outputs in (cumulative, delta, final):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].weight_versions == [("default", 0, 8)]
        assert outputs[-1].outputs[0].finish_reason == "length"


def test_n_sequences_are_n_requests_whose_seeds_count_up(llm, run):
    async def both_ways():
        hot = replace(SHORT, temperature=1.0, seed=7, output_kind="final_only")
        (together,) = await collect(llm, "r1", replace(hot, n=3))
        return together, [await tokens(llm, f"single-{i}", replace(hot, seed=7 + i)) for i in range(3)]

    together, singles = run(both_ways())
    assert together.finished
    assert [(output.index, output.token_ids) for output in together.outputs] == list(enumerate(singles))


def test_aborting_a_request_reaches_each_of_its_sequences(llm, run):
    async def aborted():
        async with generating(llm, "r1", replace(LONG, n=3)) as task:
            return await llm.abort("r1"), await task

    count, outputs = run(aborted())
    assert count == 3
    last = {completion.index: completion for output in outputs for completion in output.outputs}
    assert [last[i].finish_reason for i in range(3)] == ["abort"] * 3


def test_aborting_ids_that_nobody_has_ends_nothing(llm, run):
    assert run(llm.abort(["never", "heard of"])) == 0


def test_a_closed_generator_aborts_its_request_and_frees_the_id(llm, run):
    async def close():
        generator = llm.generate(PROMPT, LONG, "r1")
        await anext(generator)
        await generator.aclose()
        return await tokens(llm, "r1", SHORT)

    assert run(close()) == in_lockstep(PROMPT, SHORT)


def test_a_cancelled_generator_aborts_its_request(llm, run):
    async def cancel():
        async with generating(llm, "r1") as task:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await llm.counters()

    counters = run(cancel())
    assert (counters.running, counters.free_blocks) == (0, counters.num_blocks)


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ([], SHORT, "empty"),
        (PROMPT * 40, SHORT, "max_model_len"),
        ("text", SHORT, "tokenize"),
        ([1, "2"], SHORT, "Expected `int`, got `str`"),
        ([10**9], SHORT, "vocabulary"),
        (PROMPT, SamplingParams(max_tokens=0), "max_tokens must be at least 1"),
        (PROMPT, SamplingParams(max_tokens="8"), "Expected `int`, got `str`"),  # pyright: ignore[reportArgumentType]
        (PROMPT, SamplingParams(temperature=-1.0), "temperature"),
        (PROMPT, SamplingParams(n=0), "n must be"),
        (PROMPT, SamplingParams(output_kind="sometimes"), "output_kind"),  # pyright: ignore[reportArgumentType]
        (PROMPT, None, "SamplingParams"),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_others_go_on(llm, run, prompt, params, said):
    async def refused():
        other = asyncio.create_task(tokens(llm, "other", SHORT))
        with pytest.raises(InvalidArgument, match=said):
            await collect(llm, "r1", params, prompt)
        return await other

    assert run(refused()) == in_lockstep(PROMPT, SHORT)


def test_an_id_in_use_is_refused_and_its_owner_goes_on(llm, run):
    async def twice():
        async with generating(llm, "r1") as task:
            with pytest.raises(InvalidArgument, match="'r1' exists already"):
                await collect(llm, "r1", SHORT)
            with pytest.raises(InvalidArgument, match="'r1' exists already"):
                await collect(llm, "r1", replace(SHORT, n=2))
            assert not task.done()

    run(twice())


# ---- pause ----


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_what_was_generated_reaches_its_taker_before_the_pause_returns(llm, run, mode):
    async def paused():
        order: list[str] = []

        async def take(name: str) -> None:
            async for output in llm.generate(PROMPT, replace(LONG, max_tokens=60, output_kind="delta"), name):
                order.extend([name] * len(output.outputs[0].token_ids))
                if output.finished:
                    order.append(f"{name} {output.outputs[0].finish_reason}")

        takers = [asyncio.create_task(take(f"r{i}")) for i in range(4)]
        while len(order) < 20:
            await asyncio.sleep(0)
        await llm.pause_generation(mode=mode)
        order.append("paused")
        generated = (await llm.counters()).generated_tokens
        for _ in range(20):
            await llm.is_paused()
        at_rest = len(order)
        assert generated == (await llm.counters()).generated_tokens
        await llm.resume_generation()
        await asyncio.gather(*takers)
        return order, at_rest

    order, at_rest = run(paused())
    assert order.index("paused") == at_rest - 1, "something was heard while paused"
    ended = {"abort": "abort", "wait": "length"}.get(mode)
    assert [word for word in order[: order.index("paused")] if " " in word] == ([f"r{i} {ended}" for i in range(4)] if ended else [])


def test_a_kept_request_goes_on_as_if_nothing_had_been(llm, run):
    async def kept():
        async with generating(llm, "r1", replace(LONG, max_tokens=60)) as task:
            for clear_cache in (True, False):
                await llm.pause_generation(mode="keep", clear_cache=clear_cache)
                assert await llm.is_paused()
                await llm.resume_generation()
            return await task

    assert run(kept())[-1].outputs[0].token_ids == in_lockstep(PROMPT, replace(LONG, max_tokens=60))


def test_late_requests_wait_for_resume(llm, run):
    async def late():
        await llm.pause_generation()
        task = asyncio.create_task(tokens(llm, "late", SHORT))
        while (counters := await llm.counters()).parked == 0:
            pass
        assert (counters.running, counters.waiting) == (0, 1)
        await llm.resume_generation()
        return await task

    assert run(late()) == in_lockstep(PROMPT, SHORT)


@pytest.mark.parametrize("overriding", ["keep", "resume"])
def test_a_pause_that_is_overridden_says_so(llm, run, overriding):
    async def meet():
        async with generating(llm, "r1"):
            waiting = asyncio.create_task(llm.pause_generation(mode="wait"))
            while not await llm.is_paused():
                pass
            await (llm.resume_generation() if overriding == "resume" else llm.pause_generation(mode="keep"))
            with pytest.raises(PauseSuperseded, match=overriding):
                await waiting

    run(meet())


def test_abort_ends_a_pending_wait_and_both_return(llm, run):
    async def meet():
        async with generating(llm, "r1") as task:
            waiting = asyncio.create_task(llm.pause_generation(mode="wait"))
            while not await llm.is_paused():
                pass
            await llm.pause_generation(mode="abort")
            await waiting
            return (await task)[-1].outputs[0].finish_reason

    assert run(meet()) == "abort"


def test_an_unknown_mode_changes_nothing(llm, run):
    async def refused():
        with pytest.raises(ValueError, match="must be one of"):
            await llm.pause_generation(mode="nap")  # pyright: ignore[reportArgumentType]
        with pytest.raises(InvalidArgument, match="Expected `bool`"):
            await llm.pause_generation(clear_cache="yes")  # pyright: ignore[reportArgumentType]
        return await llm.is_paused()

    assert run(refused()) is False


def test_the_old_flag_means_wait_and_warns(llm, run):
    async def old():
        async with generating(llm, "r1", replace(LONG, max_tokens=30)) as task:
            with pytest.warns(DeprecationWarning, match='mode="wait"'):
                await llm.pause_generation(wait_for_inflight_requests=True)
            return (await task)[-1].outputs[0].finish_reason

    assert run(old()) == "length"


# ---- weights ----


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    make_tiny(folder, seed=1)
    return folder


@pytest.fixture
def restored(served) -> Iterator[None]:
    """Puts the first weights and their label back."""
    yield
    llm, run = served

    async def restore() -> None:
        await llm.pause_generation()
        await llm.load_weights(llm.config.checkpoint, "default")

    run(restore())


@pytest.mark.parametrize("source", ["folder", "tensors"])
def test_new_weights_take_over_at_the_pause(llm, run, restored, other_weights, source):
    async def update():
        async with generating(llm, "r1", replace(LONG, max_tokens=120)) as task:
            await llm.pause_generation(mode="keep")
            await llm.start_weight_update()
            if source == "folder":
                await llm.update_weights(other_weights)
            else:
                named = list(read_safetensors(other_weights))
                await llm.update_weights(named[:5], part=1, of=2)
                with pytest.raises(Conflict, match="1 of 2 parts"):
                    await llm.finish_weight_update("v2")
                await llm.update_weights(dict(named[5:]), part=2, of=2)
            assert await llm.finish_weight_update("v2") == "v2" == await llm.get_weight_version()
            await llm.resume_generation()
            return (await task)[-1].outputs[0]

    output = run(update())
    (old, zero, boundary), (new, begin, end) = output.weight_versions
    assert (old, zero, new, begin, end) == ("default", 0, "v2", boundary, 120)
    before, after = output.token_ids[:boundary], output.token_ids[boundary:]
    assert before == in_lockstep(PROMPT, replace(LONG, max_tokens=120))[:boundary]
    assert after == in_lockstep(PROMPT + before, replace(LONG, max_tokens=120 - boundary), checkpoint=other_weights)


def test_checksums_tell_whether_weights_are_the_same(llm, run, restored, other_weights):
    async def round_trip():
        first = await llm.weight_checksums()
        await llm.pause_generation()
        await llm.load_weights(other_weights)
        second = await llm.weight_checksums()
        await llm.load_weights(dict(read_safetensors(llm.config.checkpoint)))
        return first, second, await llm.weight_checksums()

    first, second, third = run(round_trip())
    assert first == third != second
    assert first.keys() == second.keys()


def test_a_failed_update_takes_the_engine_out_of_service_until_a_full_one(llm, run, restored, other_weights):
    async def fail():
        name, tensor = next(read_safetensors(other_weights))
        await llm.pause_generation()
        with pytest.raises(InvalidArgument, match="no weights can be read from"):
            await llm.load_weights(other_weights / "nowhere")
        await llm.check_health()
        with pytest.raises(UpdateFailed, match="no weight is called") as failed:
            await llm.load_weights([(name, tensor), ("unheard.of", tensor)])
        assert failed.value.wrote
        with pytest.raises(OutOfService, match=r"unheard\.of"):
            await llm.check_health()
        with pytest.raises(OutOfService):
            await llm.resume_generation()
        await llm.load_weights(other_weights)
        await llm.check_health()

    run(fail())


def test_weights_change_only_under_a_pause(llm, run, other_weights):
    async def refused():
        for call in (llm.start_weight_update(), llm.load_weights(other_weights, "v2"), llm.update_weight_version("v2")):
            with pytest.raises(Conflict, match="pause"):
                await call
        return await llm.get_weight_version()

    assert run(refused()) == "default"


def test_a_kept_request_survives_a_sleep(llm, run):
    async def sleep():
        async with generating(llm, "r1", replace(LONG, max_tokens=60)) as task:
            await llm.pause_generation(mode="keep")
            await llm.sleep(1)
            assert await llm.is_sleeping()
            with pytest.raises(Conflict):
                await llm.resume_generation()
            assert not await llm.wake_up(["weights"])
            assert await llm.wake_up()
            assert await llm.is_paused()
            await llm.resume_generation()
            return (await task)[-1].outputs[0].token_ids

    assert run(sleep()) == in_lockstep(PROMPT, replace(LONG, max_tokens=60))


# ---- the end ----


@pytest.mark.parametrize("policy", ["reject", "block"])
def test_late_requests_are_rejected_or_held_in_front_of_the_core(policy):
    async def late() -> None:
        llm = AsyncLLM.from_config(config(late_requests=policy), in_process=True)
        await llm.pause_generation()
        if policy == "reject":
            with pytest.raises(RequestRejected, match="paused"):
                await tokens(llm, "r1", SHORT)
        else:
            task = asyncio.create_task(tokens(llm, "r1", SHORT))
            while (await llm.counters()).blocked == 0:
                pass
            await llm.resume_generation()
            assert len(await task) == 8
        llm.shutdown()

    asyncio.run(late())


def test_what_does_not_start_says_why(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint in"):
        AsyncLLM.from_config(config(checkpoint=tmp_path), in_process=True)


def test_shutdown_ends_requests_and_whatever_comes_later():
    async def shut() -> None:
        llm = AsyncLLM.from_config(config(), in_process=True)
        async with generating(llm, "r1") as task:
            llm.shutdown()
            llm.shutdown()
            assert (await task)[-1].outputs[0].finish_reason == "abort"
        for call in (llm.is_paused(), llm.pause_generation(), tokens(llm, "r2", SHORT)):
            with pytest.raises(EngineDeadError, match="shutdown was called"):
                await call

    asyncio.run(shut())


def test_shutdown_lets_requests_end_if_it_may_take_the_time():
    async def shut() -> None:
        llm = AsyncLLM.from_config(config(), in_process=True)
        async with generating(llm, "r1", replace(LONG, max_tokens=30)) as task:
            llm.shutdown(timeout=60)
            assert (await task)[-1].outputs[0].finish_reason == "length"

    asyncio.run(shut())


def test_an_engine_belongs_to_one_event_loop():
    llm = AsyncLLM.from_config(config(), in_process=True)
    asyncio.run(llm.is_paused())
    with pytest.raises(RuntimeError, match="event loop of its first call"):
        asyncio.run(llm.is_paused())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.shutdown()
