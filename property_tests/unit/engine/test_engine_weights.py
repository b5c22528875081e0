"""Weight sessions: what they change, what they refuse, and what a failure leaves behind."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine import Conflict, InvalidArgument, OutOfService, SamplingParams, UpdateFailed, WeightTarget, named_weights, read_safetensors

PROMPT = list(range(30, 40))


@pytest.fixture
def old(checkpoint):
    return load_file(checkpoint() / "model.safetensors")


@pytest.fixture
def new(checkpoint):
    return load_file(checkpoint(seed=1) / "model.safetensors")


@pytest.fixture
def paused(make_engine, recorder):
    """An engine under an effective keep with one frozen request, which has one output token."""
    engine = make_engine(observer=recorder)
    engine.submit("r", PROMPT, SamplingParams(max_tokens=6))
    engine.step()
    engine.pause("keep", clear_cache=False)
    recorder.take()
    return engine


def resident(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in named_weights(engine.runner.model)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def breaking_after(count: int, tensors: dict[str, torch.Tensor]):
    for index, pair in enumerate(tensors.items()):
        if index == count:
            raise ConnectionError("the trainer went away")
        yield pair


def fail_half_way(engine, tensors) -> None:
    with pytest.raises(UpdateFailed):
        engine.load_weights(breaking_after(1, tensors))
    assert engine.is_out_of_service


class FailingTarget(WeightTarget):
    """A device that fails in `begin` or in `commit`."""

    failing = ""

    def begin(self) -> None:
        if self.failing == "begin":
            raise OSError("no link")

    def commit(self) -> None:
        if self.failing == "commit":
            raise OSError("no link")


# ---- what an update does ----


def test_timeline_of_an_update(paused, new, recorder):
    paused.start_weight_update()
    paused.update_weights(new.items())
    paused.finish_weight_update("v2")
    total = sum(tensor.nbytes for tensor in new.values())
    assert recorder.take() == ["update_started", f"part_received tensors={len(new)} num_bytes={total}", "committed v2"]


def test_weights_arrive_where_they_were(paused, new):
    addresses = [tensor.data_ptr() for _, tensor in named_weights(paused.runner.model)]
    paused.load_weights(new, "v2")
    assert same(resident(paused), new)
    assert [tensor.data_ptr() for _, tensor in named_weights(paused.runner.model)] == addresses
    assert paused.weight_version == "v2"


def test_the_result_does_not_depend_on_parts_or_order(paused, old, new):
    paused.load_weights(new)
    whole = resident(paused)
    paused.load_weights(old)
    pairs = list(new.items())[::-1]
    paused.start_weight_update()
    for start in range(0, len(pairs), 7):
        paused.update_weights(pairs[start : start + 7])
    paused.finish_weight_update()
    assert same(resident(paused), whole)


def test_a_folder_a_state_dict_and_pairs_are_the_same_source(paused, checkpoint, new):
    for source in (checkpoint(seed=1), new, read_safetensors(checkpoint(seed=1))):
        paused.load_weights(checkpoint())
        paused.load_weights(source)
        assert same(resident(paused), new)


def test_an_update_leaves_the_checkpoint_it_replaces_alone(paused, checkpoint, new):
    before = (checkpoint() / "model.safetensors").read_bytes()
    paused.load_weights(new)
    assert (checkpoint() / "model.safetensors").read_bytes() == before


def test_sharded_checkpoints_are_read_in_order_of_names(checkpoint, tmp_path, old):
    AutoModelForCausalLM.from_pretrained(checkpoint()).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tensors = list(read_safetensors(tmp_path))
    assert [name for name, _ in tensors] == sorted(old)
    assert same(dict(tensors), old)


def test_wider_and_narrower_floats_are_converted(paused, new):
    paused.load_weights({name: tensor.to(torch.bfloat16) for name, tensor in new.items()})
    assert same(resident(paused), {name: tensor.to(torch.bfloat16).float() for name, tensor in new.items()})


def test_tokens_after_a_clear_are_those_of_a_fresh_engine_on_the_new_weights(make_engine, drain, checkpoint, new):
    engine = make_engine()
    engine.submit("r", PROMPT, SamplingParams(max_tokens=12))
    for _ in range(4):
        engine.step()
    before = [token for output in engine.pause("keep", clear_cache=True) for token in output.token_ids]
    engine.load_weights(new, "v2")
    engine.resume()
    after = drain(engine)["r"]
    fresh = make_engine(checkpoint=checkpoint(seed=1))
    fresh.submit("r", PROMPT + before, SamplingParams(max_tokens=12 - len(before)))
    assert after == drain(fresh)["r"]


def test_tokens_are_labelled_with_the_weights_that_sampled_them(paused, new, recorder):
    paused.load_weights(new, "v2")
    paused.resume()
    while paused.has_work():
        paused.step()
    last = paused.take_outputs()[-1]
    assert last.weight_versions == (("default", 0, 1), ("v2", 1, 6))
    assert "finished r reason=length num_prompt_tokens=10 num_output_tokens=6 spans=[[default 0 1] [v2 1 6]]" in recorder.log


def test_finishing_without_a_version_keeps_the_label(paused, new, recorder):
    paused.update_weight_version("v1")
    paused.load_weights(new)
    assert recorder.take()[-1] == "committed v1"


# ---- tied weights ----


@pytest.fixture
def tied(make_engine, checkpoint):
    engine = make_engine(checkpoint=checkpoint("llama", tied=True))
    engine.pause()
    return engine


def test_a_tied_weight_exists_once_and_is_taken_under_either_name(tied):
    names = [name for name, _ in named_weights(tied.runner.model)]
    assert names == sorted(names)
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    ones = torch.ones(512, 64)
    tied.load_weights({"lm_head.weight": ones})
    assert torch.equal(tied.runner.model.get_input_embeddings().weight, ones)


@pytest.mark.parametrize("first", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_weight_sent_twice_must_be_the_same(tied, first):
    (second,) = {"lm_head.weight", "model.embed_tokens.weight"} - {first}
    ones = torch.ones(512, 64)
    tied.load_weights([(first, ones), (second, ones.double())])
    with pytest.raises(UpdateFailed, match=f"'{second}' is tied to '{first}', which was sent with other values"):
        tied.load_weights([(first, ones), (second, 2 * ones)])


# ---- what is refused ----


def test_a_session_needs_an_effective_pause_unless_told_otherwise(make_engine):
    engine = make_engine()
    with pytest.raises(Conflict, match="needs an effective pause"):
        engine.start_weight_update()
    engine.submit("r", PROMPT, SamplingParams())
    engine.begin_pause("wait")
    for allow_unpaused in (False, True):
        with pytest.raises(Conflict, match="a pause is pending"):
            engine.start_weight_update(allow_unpaused=allow_unpaused)
    engine.resume()
    engine.start_weight_update(allow_unpaused=True)
    assert engine.update_open and engine.has_work()


def test_calls_outside_their_session_are_refused_and_change_nothing(paused, new, recorder):
    with pytest.raises(Conflict, match="update_weights without an open weight session"):
        paused.update_weights(new.items())
    with pytest.raises(Conflict, match="finish_weight_update without an open weight session"):
        paused.finish_weight_update()
    paused.start_weight_update()
    for call in (paused.start_weight_update, lambda: paused.load_weights(new)):
        with pytest.raises(Conflict, match="open already"):
            call()
    with pytest.raises(Conflict, match="resume while a weight session is open"):
        paused.resume()
    with pytest.raises(Conflict, match="while a weight session is open"):
        paused.begin_pause("wait")
    with pytest.raises(InvalidArgument, match="at least one character"):
        paused.finish_weight_update("")
    assert recorder.take() == ["update_started"]
    assert paused.update_open and not paused.pause_pending


def test_wait_with_an_open_session_is_effective_at_once_when_nothing_is_live(paused):
    paused.abort(None)
    paused.take_outputs()
    paused.start_weight_update()
    ticket = paused.begin_pause("wait")
    assert paused.pause_complete() and ticket.done


MISFITS = {
    "unknown name": ({"model.nonsense": torch.ones(1)}, "no weight is called 'model.nonsense'"),
    "wrong shape": ({"model.norm.weight": torch.ones(65)}, r"'model.norm.weight' has shape \[65\], expected \[64\]"),
    "integers": ({"model.norm.weight": torch.ones(64, dtype=torch.int64)}, "dtype torch.int64, which does not convert"),
    "complex numbers": ({"model.norm.weight": torch.ones(64, dtype=torch.complex64)}, "does not convert"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_tensor_that_does_not_fit_changes_nothing_and_leaves_the_session_open(paused, old, new, recorder, case):
    tensors, message = MISFITS[case]
    paused.start_weight_update()
    with pytest.raises(UpdateFailed, match=message) as failure:
        paused.update_weights(tensors.items())
    assert not failure.value.wrote and failure.value.code == "failed"
    assert recorder.take()[-1].startswith("update_failed update wrote=False why=ValueError: ")
    assert paused.update_open and not paused.is_out_of_service
    assert same(resident(paused), old)
    paused.update_weights(new.items())
    paused.finish_weight_update()
    assert same(resident(paused), new)


@pytest.mark.parametrize(
    ("name", "index"),
    [("", None), ("nowhere", None), ("n" * 300, None), ("\0", None), ("", "no JSON"), ("", "[]"), ("", "{}"), ("", '{"weight_map": 1}')],
    ids=["empty", "nowhere", "name too long", "no name", "no JSON", "a list", "no map", "another type"],
)
def test_a_source_that_cannot_be_read_is_refused_before_the_session(paused, recorder, tmp_path, name, index):
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InvalidArgument, match="no weights can be read from"):
        paused.load_weights(tmp_path / name)
    assert recorder.log == []


def test_a_swap_that_fails_before_the_first_byte_leaves_no_session_and_the_engine_in_service(paused, old, new):
    with pytest.raises(UpdateFailed, match="the trainer went away; nothing was written"):
        paused.load_weights(breaking_after(0, new), "v2")
    assert not paused.update_open and not paused.is_out_of_service
    assert paused.weight_version == "default" and same(resident(paused), old)
    paused.resume()


# ---- what a failure leaves behind ----


def test_a_source_that_breaks_after_the_first_byte_puts_the_engine_out_of_service(paused, new, recorder):
    paused.start_weight_update()
    with pytest.raises(UpdateFailed, match="out of service until a full update succeeds") as failure:
        paused.update_weights(breaking_after(1, new))
    assert failure.value.wrote
    assert recorder.take()[-1] == "update_failed update wrote=True why=ConnectionError: the trainer went away"
    assert paused.is_out_of_service and not paused.update_open
    assert paused.weight_version == "default"
    with pytest.raises(OutOfService, match=r"resume refused.*update: ConnectionError: the trainer went away") as refusal:
        paused.resume()
    assert refusal.value.code == "out-of-service"
    with pytest.raises(OutOfService, match="half-written weights"):
        paused.begin_pause("wait")
    assert paused.abort(["r"]) == 1


def test_a_bad_tensor_in_a_later_part_counts_what_earlier_parts_wrote(paused, new):
    paused.start_weight_update()
    paused.update_weights(list(new.items())[:1])
    with pytest.raises(UpdateFailed) as failure:
        paused.update_weights([("model.nonsense", torch.ones(1))])
    assert failure.value.wrote and paused.is_out_of_service


def test_only_a_full_update_ends_being_out_of_service(paused, new):
    fail_half_way(paused, new)
    pairs = list(new.items())
    paused.start_weight_update()
    paused.update_weights(pairs[1:])
    with pytest.raises(Conflict, match="1 weights were not sent"):
        paused.finish_weight_update("v2")
    assert paused.update_open
    paused.update_weights(pairs[:1])
    paused.finish_weight_update("v2")
    assert not paused.is_out_of_service
    paused.resume()
    assert paused.has_work()


def test_a_partial_swap_while_out_of_service_is_refused_and_leaves_no_session(paused, new):
    fail_half_way(paused, new)
    with pytest.raises(Conflict, match="a full update is needed"):
        paused.load_weights(list(new.items())[1:])
    assert not paused.update_open and paused.is_out_of_service


@pytest.mark.parametrize("policy", ["queue", "block"])
def test_coming_back_into_service_while_not_paused_lets_late_requests_in(make_engine, recorder, new, policy):
    engine = make_engine(observer=recorder, late_requests=policy)
    engine.start_weight_update(allow_unpaused=True)
    with pytest.raises(UpdateFailed):
        engine.update_weights(breaking_after(1, new))
    assert engine.submit("late", PROMPT, SamplingParams()) == {"queue": "parked", "block": "blocked"}[policy]
    assert not engine.has_work()
    engine.start_weight_update(allow_unpaused=True)
    engine.update_weights(new.items())
    recorder.take()
    engine.finish_weight_update("v2")
    assert recorder.take() == {"queue": ["committed v2"], "block": ["committed v2", "accepted late parked=False"]}[policy]
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["late"]


def test_coming_back_into_service_while_paused_leaves_late_requests_until_resume(paused, new):
    fail_half_way(paused, new)
    paused.submit("late", PROMPT, SamplingParams())
    paused.load_weights(new)
    assert [request.parked for request in paused.scheduler.waiting] == [True]
    paused.resume()
    assert [request.parked for request in paused.scheduler.waiting] == [False]


def test_a_start_that_fails_changes_nothing(paused, recorder):
    paused.weight_target = target = FailingTarget(paused.runner.model)
    target.failing = "begin"
    with pytest.raises(UpdateFailed, match="failed in start: OSError: no link; nothing was written"):
        paused.start_weight_update()
    assert recorder.take() == ["update_failed start wrote=False why=OSError: no link"]
    assert not paused.update_open and not paused.is_out_of_service


def test_a_finish_that_fails_depends_on_whether_the_session_wrote(paused, new, recorder):
    paused.weight_target = target = FailingTarget(paused.runner.model)
    target.failing = "commit"
    paused.start_weight_update()
    with pytest.raises(UpdateFailed, match="nothing was written"):
        paused.finish_weight_update("v2")
    assert paused.update_open and not paused.is_out_of_service
    paused.update_weights(new.items())
    with pytest.raises(UpdateFailed, match="out of service"):
        paused.finish_weight_update("v2")
    assert recorder.take()[-1] == "update_failed finish wrote=True why=OSError: no link"
    assert not paused.update_open and paused.is_out_of_service
    assert paused.weight_version == "default"


def test_ctrl_c_in_the_middle_of_an_update_leaves_no_half_written_weights_in_service(paused, new):
    def interrupted():
        yield next(iter(new.items()))
        raise KeyboardInterrupt

    paused.start_weight_update()
    with pytest.raises(KeyboardInterrupt):
        paused.update_weights(interrupted())
    assert paused.is_out_of_service
    assert not paused.update_open
    with pytest.raises(OutOfService):
        paused.resume()
