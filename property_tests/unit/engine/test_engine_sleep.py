"""Sleep gives memory back and wakes to what it promises; what is asleep cannot be used by mistake."""

from __future__ import annotations

import pytest
import torch

from engine import Conflict, EngineCore, InvalidArgument, OutOfService, SamplingParams
from engine.errors import MemoryAsleep
from engine.weights import WeightSession

PROMPT = list(range(20, 26))


def submit(engine: EngineCore, request_id: str = "r", max_tokens: int = 8) -> None:
    engine.submit(request_id, PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def sleep(engine: EngineCore, level: int = 1, mode: str | None = None) -> None:
    ticket = engine.begin_sleep(level, mode)
    while not ticket.done:
        engine.take_outputs()
        if not engine.pause_complete():
            engine.step()


def weights(engine: EngineCore) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.runner.model.state_dict().items()}


def held(engine: EngineCore) -> dict[str, int]:
    return {tag: memory.num_bytes for tag, memory in engine.runner.memory.items()}


def test_level_one_gives_all_memory_back_and_wakes_to_the_same_weights_and_tokens(make_engine, drain):
    engine, other = make_engine(), make_engine()
    before, at_first = weights(engine), held(engine)
    submit(engine)
    submit(other)
    for _ in range(3):
        engine.step()
    tokens = [token for output in engine.take_outputs() for token in output.token_ids]
    sleep(engine, 1, "keep")
    assert held(engine) == {"kv_cache": 0, "weights": 0} and engine.asleep == ("kv_cache", "weights")
    engine.wake_up()
    assert held(engine) == at_first and not engine.is_sleeping()
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())
    assert tokens + drain(engine)["r"] == drain(other)["r"]


def test_level_zero_gives_nothing_back_and_only_a_call_without_tags_wakes_it(make_engine, recorder):
    engine = make_engine(observer=recorder)
    at_first = held(engine)
    sleep(engine, 0)
    assert engine.is_sleeping() and engine.asleep == () and held(engine) == at_first
    engine.wake_up(["weights"])
    assert engine.is_sleeping()
    with pytest.raises(Conflict, match="resume while asleep"):
        engine.resume()
    engine.wake_up()
    assert not engine.is_sleeping() and not engine.is_paused()
    assert recorder.take()[-3:] == ["asleep 0 tags=[]", "awake tags=[]", "resumed"]


def test_level_two_wakes_to_no_weights_at_all_until_a_full_update(make_engine, checkpoint, drain):
    engine, other = make_engine(), make_engine()
    sleep(engine, 2)
    engine.wake_up(["weights"])
    floats = [tensor for tensor in weights(engine).values() if tensor.is_floating_point()]
    assert floats and all(tensor.isnan().all() for tensor in floats)
    assert engine.is_out_of_service
    engine.wake_up()
    with pytest.raises(OutOfService, match=r"sleep\(2\) dropped them"):
        engine.resume()
    submit(engine)
    assert not engine.has_work()
    engine.load_weights(checkpoint(), "v2")
    submit(other)
    assert drain(engine) == drain(other)


def test_tied_weights_sleep_and_wake_as_one(make_engine, checkpoint):
    engine = make_engine(checkpoint=checkpoint("llama", tied=True))
    before, at_first = weights(engine), held(engine)
    sleep(engine)
    engine.wake_up()
    model = engine.runner.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert held(engine) == at_first
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())


@pytest.mark.parametrize(("woken", "asleep"), [("weights", "kv_cache"), ("kv_cache", "weights")])
def test_a_forward_pass_over_memory_that_is_asleep_is_an_error(make_engine, woken, asleep):
    engine = make_engine()
    submit(engine)
    batch = engine.scheduler.schedule()
    sleep(engine, 1, "keep")
    engine.wake_up([woken])
    with pytest.raises(MemoryAsleep, match=f"a forward pass while {asleep} sleep"):
        engine.runner.launch(batch)


def test_weights_that_are_asleep_can_be_neither_written_nor_summed(make_engine, checkpoint):
    engine = make_engine()
    sleep(engine)
    for call in (engine.start_weight_update, engine.weight_checksums, lambda: engine.load_weights(checkpoint())):
        with pytest.raises(Conflict, match="the weights are asleep; wake them up first"):
            call()
    engine.wake_up(["weights"])
    engine.load_weights(checkpoint(seed=1), "v2")
    with pytest.raises(Conflict, match="resume while asleep"):
        engine.resume()


def test_weights_written_before_a_sleep_are_those_that_wake(make_engine, checkpoint):
    engine = make_engine()
    engine.pause("keep")
    engine.load_weights(checkpoint(seed=1), "v2")
    written = engine.weight_checksums()
    sleep(engine)
    engine.wake_up()
    assert engine.weight_checksums() == written


def test_a_higher_level_drops_the_copy_that_a_lower_one_kept(make_engine):
    engine = make_engine()
    sleep(engine, 1)
    sleep(engine, 2)
    engine.wake_up()
    assert engine.runner.model.state_dict()["model.norm.weight"].isnan().all()


def test_what_sleeps_with_a_step_in_flight_lands_it_first(make_engine, recorder):
    engine = make_engine(async_scheduling=True, observer=recorder)
    submit(engine)
    engine.step()
    engine.step()
    engine.take_outputs()
    ticket = engine.begin_sleep(1, "keep")
    engine.take_outputs()
    assert not engine.pause_complete() and not engine.is_sleeping()
    engine.step()
    engine.take_outputs()
    assert engine.pause_complete() and ticket.done and engine.is_sleeping()
    assert [line.split()[0] for line in recorder.take()][-6:] == ["landed", "preempted", "freed", "cleared", "pause_effective", "asleep"]


def test_an_unknown_level_or_mode_is_refused(make_engine):
    engine = make_engine()
    with pytest.raises(InvalidArgument, match="sleep level must be one of 0, 1, 2, got 3"):
        engine.begin_sleep(3)
    with pytest.raises(InvalidArgument, match="pause mode must be one of abort, wait, keep, got 'now'"):
        engine.begin_sleep(1, "now")
    assert not engine.is_paused()


def test_memory_that_was_given_back_is_not_written(make_engine):
    engine = make_engine()
    sent = weights(engine)
    sleep(engine, 1)
    session = WeightSession(engine.weight_target)
    with pytest.raises(ValueError, match="asleep"):
        session.write(sent.items())
    assert not session.wrote
    engine.wake_up()
    session.write(sent.items())
