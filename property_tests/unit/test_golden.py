"""Every token can be recomputed from the log alone, and one that should have been another is found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

from engine.core import EngineCore
from engine.weights import WeightTarget
from harness.backends.torch import FailingTarget, TorchBackend
from harness.cli import main
from harness.events import Closed, Committed, Finished, Landed, Loaded, Reference, Returned, StepFailed
from harness.invariants import judge
from harness.operations import (
    Abort,
    Advance,
    FinishWeightUpdate,
    Operation,
    Pause,
    Perturbation,
    Prompt,
    ResetPrefixCache,
    Resume,
    Sleep,
    StartWeightUpdate,
    Submit,
    SwapWeights,
    TokenRun,
    UpdateWeights,
    WakeUp,
    WeightSource,
)
from harness.scenario import EngineShape, Scenario, load_scenario
from harness.trial import Trial, run_trial
from harness.verdict import Judgement, Violation

from .invariants.logs import Timeline, said

MODES = Path(__file__).parents[2] / "scenarios" / "modes"
SHAPE = EngineShape(block_size=4, num_blocks=32, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
NEW, NEWER = (WeightSource(perturb=Perturbation(seed=seed, scale=0.1)) for seed in (1, 2))
KEEP, KEEP_CLEAR = Pause(mode="keep", clear_cache=False), Pause(mode="keep", clear_cache=True)


@pytest.fixture
def trial_of(tmp_path):
    """trial_of(operations): what `torch` makes of them."""
    folders = (tmp_path / str(number) for number in range(10_000))

    def run(operations: list[Operation] | Scenario, shape: EngineShape = SHAPE, *, explain: bool = False) -> Trial:
        scenario = operations if isinstance(operations, Scenario) else Scenario.from_operations(shape, operations)
        backend = TorchBackend()
        try:
            info = backend.start(scenario.engine)
            return run_trial(scenario, backend, info, next(folders), explain=explain)
        finally:
            backend.stop()

    return run


def submit(id: str, *, tokens: int = 9, seed: int = 1, max_tokens: int = 12, **fields) -> Submit:
    return Submit(id=id, prompt=Prompt(tokens=tokens, seed=seed), max_tokens=max_tokens, **fields)


def references(trial: Trial) -> list[Reference]:
    return [entry.event for entry in trial.entries if isinstance(entry.event, Reference)]


def stretches(trial: Trial) -> list[tuple[str, str, int, int]]:
    """Of each reference, its request and kind and the output tokens that it covers."""
    return [(event.request, event.kind, event.first, event.first + len(event.tokens)) for event in references(trial)]


def golden(trial: Trial) -> Judgement:
    return next(judgement for judgement in trial.verdict.judgements if judgement.invariant == "golden")


def holds(trial: Trial) -> bool:
    judgement = golden(trial)
    assert judgement.status == "holds", judgement
    return True


# ---- what is compared with what ----


def test_a_run_without_updates_is_compared_with_an_engine_that_was_never_paused(trial_of):
    trial = trial_of([submit("r1"), Advance(steps=4), KEEP_CLEAR, Resume(), submit("r2", seed=2)])
    assert stretches(trial) == [("r1", "unpaused", 0, 12), ("r2", "unpaused", 0, 12)]
    assert holds(trial)


def test_after_a_clear_tokens_are_compared_with_a_fresh_engine_on_the_new_weights(trial_of):
    trial = trial_of([submit("r1"), Advance(steps=5), KEEP_CLEAR, SwapWeights(source=NEW, version="v2"), Resume(), submit("r2")])
    assert stretches(trial) == [("r1", "unpaused", 0, 5), ("r1", "fresh", 5, 12), ("r2", "unpaused", 0, 12)]
    assert holds(trial)


def test_without_a_clear_tokens_are_compared_with_the_mixed_replay(trial_of):
    trial = trial_of([submit("r1"), Advance(steps=5), KEEP, SwapWeights(source=NEW, version="v2"), Resume(), submit("r2")])
    assert stretches(trial) == [("r1", "unpaused", 0, 5), ("r1", "mixed", 5, 12), ("r2", "mixed", 0, 12)]
    assert holds(trial)


def test_a_reset_after_the_update_makes_later_tokens_those_of_a_fresh_engine(trial_of):
    operations = [submit("r1"), Advance(steps=5), KEEP, SwapWeights(source=NEW), ResetPrefixCache(), Resume()]
    assert stretches(trial := trial_of(operations)) == [("r1", "unpaused", 0, 5), ("r1", "fresh", 5, 12)]
    assert holds(trial)


def test_parts_sent_beside_steps_are_weights_of_their_own(trial_of):
    operations = [submit("r1"), Advance(steps=3), StartWeightUpdate(allow_unpaused=True)]
    for part in (1, 2, 3):
        operations += [UpdateWeights(source=NEW, part=part, of=3), Advance(steps=2)]
    trial = trial_of([*operations, FinishWeightUpdate(version="v2")])
    assert stretches(trial) == [("r1", "unpaused", 0, 3), ("r1", "mixed", 3, 5), ("r1", "mixed", 5, 7), ("r1", "mixed", 7, 12)]
    assert holds(trial)


def test_entries_that_come_back_from_the_host_are_those_that_older_weights_wrote(trial_of):
    shape = EngineShape(block_size=4, num_blocks=6, max_model_len=24, max_num_seqs=2, max_num_batched_tokens=24, host_blocks=6)
    evicting = submit("r2", tokens=20, seed=2, max_tokens=3)
    operations = [submit("r1", max_tokens=2), Advance(steps=3), evicting, Advance(steps=4), KEEP, SwapWeights(source=NEW), Resume()]
    trial = trial_of([*operations, submit("r3", max_tokens=4)], shape)
    (loaded,) = [entry.event for entry in trial.entries if isinstance(entry.event, Loaded)]
    assert (loaded.request, len(loaded.blocks)) == ("r3", 2)
    assert stretches(trial) == [("r1", "unpaused", 0, 2), ("r2", "unpaused", 0, 3), ("r3", "mixed", 0, 4)]
    assert holds(trial)


def test_a_sleep_that_gives_memory_back_promises_an_empty_cache(trial_of):
    operations = [submit("r1"), Advance(steps=5), Sleep(level=1, mode="keep"), WakeUp(tags=("weights",)), SwapWeights(source=NEW), WakeUp()]
    assert stretches(trial := trial_of(operations)) == [("r1", "unpaused", 0, 5), ("r1", "fresh", 5, 12)]
    assert holds(trial)


def test_an_id_that_is_used_again_is_another_request(trial_of):
    trial = trial_of([submit("r1", max_tokens=3), Advance(steps=4), submit("r1", seed=2, max_tokens=4)])
    assert [(event.request, event.nth, len(event.tokens)) for event in references(trial)] == [("r1", 1, 3), ("r1", 2, 4)]
    assert holds(trial)


def test_drawn_tokens_are_recomputed_too(trial_of):
    hot = {"temperature": 1.5, "top_p": 0.9, "top_k": 40, "min_p": 0.01}
    operations = [submit("r1", **hot, seed=3, logprobs=2), submit("r2", **hot), Advance(steps=4), KEEP, SwapWeights(source=NEW)]
    trial = trial_of([*operations, Resume()])
    assert trial.verdict.status == "holds", trial.verdict.reasons
    assert golden(trial).checked == 4


def test_a_version_that_returns_with_other_weights_is_not_taken_for_the_first(trial_of):
    """Labels are only labels: what is recomputed depends on the weights that were sent."""
    operations = [submit("r1", max_tokens=20)]
    for source in (NEW, NEWER, NEW):
        operations += [Advance(steps=4), KEEP_CLEAR, SwapWeights(source=source, version="again"), Resume()]
    trial = trial_of(operations)
    assert [entry.event.version for entry in trial.entries if isinstance(entry.event, Committed)] == ["again"] * 3
    (spans,) = [entry.event.spans for entry in trial.entries if isinstance(entry.event, Finished)]
    assert [span.version for span in spans] == ["default", "again"]
    assert stretches(trial) == [("r1", "unpaused", 0, 4), ("r1", "fresh", 4, 8), ("r1", "fresh", 8, 11), ("r1", "fresh", 11, 20)]
    assert holds(trial)


@pytest.mark.parametrize(
    "name",
    [
        "chunked_prefill_across_clear",
        "failed_update_out_of_service",
        "keep_stale_small_pool",
        "shared_prefix_over_update",
        "there_and_back",
        "three_epochs_one_context",
        "weights_in_parts",
    ],
)
def test_pause_scenarios_are_recomputed_to_the_last_token(trial_of, name):
    trial = trial_of(load_scenario(MODES / f"{name}.yaml"))
    assert holds(trial)
    sampled = sum(len(request.output) for request in trial.replay.requests.values())
    assert sum(len(event.tokens) for event in references(trial)) == sampled


def test_old_before_and_new_after_would_be_wrong(trial_of):
    """The mixed replay tells itself from a fresh engine, and from one whose KV is of the weights that sampled each token."""
    operations = [submit("r1"), submit("r2", seed=2), Advance(steps=5), KEEP, SwapWeights(source=NEW, version="v2"), Resume()]
    mixed = [event.tokens for event in references(trial_of(operations)) if event.kind == "mixed"]
    operations[3] = KEEP_CLEAR
    fresh = [event.tokens for event in references(trial_of(operations)) if event.kind == "fresh"]
    assert all(one != other for one, other in zip(mixed, fresh, strict=True))


# ---- any run at all ----


def random_operations(draw: random.Random) -> list[Operation]:
    """Submissions that share prefixes, pauses, updates and resets in any order, and a resume at the end."""
    operations: list[Operation] = []
    for number in range(draw.randint(8, 16)):
        prompt = Prompt(tokens=draw.randint(1, 6), seed=draw.randint(0, 2), prefix=TokenRun(tokens=draw.randint(2, 9), seed=0))
        hot = {"temperature": draw.choice([0.0, 1.0]), "top_p": draw.choice([1.0, 0.8])}
        request = Submit(id=f"r{number}", prompt=prompt, max_tokens=draw.randint(1, 14), **hot)
        swap = [SwapWeights(source=draw.choice([NEW, NEWER, WeightSource(original=True)]), version=f"v{number}"), Resume()]
        operations += draw.choice(
            [
                [request],
                [request, Advance(steps=draw.randint(1, 5))],
                [Pause(mode="keep", clear_cache=draw.random() < 0.4), *swap],
                [Pause(mode=draw.choice(["abort", "keep"]), clear_cache=draw.random() < 0.4), *swap],
                [ResetPrefixCache()],
            ]
        )
    return [*operations, Resume()]


@pytest.mark.parametrize("seed", range(20))
def test_any_run_is_recomputed_to_the_last_token(trial_of, seed):
    draw = random.Random(seed)
    shape = SHAPE.model_copy(
        update={
            "block_size": draw.randint(2, 5),
            "num_blocks": draw.randint(14, 20),
            "max_num_batched_tokens": draw.randint(4, 16),
            "prefix_caching": draw.random() < 0.8,
        }
    )
    trial = trial_of([submit("r"), Advance(steps=2), *random_operations(draw)], shape)
    assert holds(trial)


# ---- what is found ----


def test_a_clear_that_is_not_carried_out_shows_in_the_tokens(trial_of, monkeypatch):
    monkeypatch.setattr(EngineCore, "_clear_cache", lambda self: self._observer.cleared(success=True, empty=True))
    trial = trial_of([submit("r1"), Advance(steps=5), KEEP_CLEAR, SwapWeights(source=NEW, version="v2"), Resume()])
    (violation,) = golden(trial).violations
    assert violation.sentence.endswith("of r1 is not that of a fresh engine on the weights that sampled it")
    assert isinstance(trial.entries[violation.seq].event, Landed)


def test_an_update_that_writes_nothing_shows_in_the_tokens(trial_of, monkeypatch):
    monkeypatch.setattr(FailingTarget, "write", lambda self, name, tensor: tensor.nbytes)
    trial = trial_of([submit("r1"), Advance(steps=5), KEEP_CLEAR, SwapWeights(source=NEW, version="v2"), Resume()])
    assert [violation.seq for violation in golden(trial).violations] != []


def test_an_update_that_leaves_out_a_tensor_shows_in_the_tokens(trial_of, monkeypatch):
    def write(self, name, tensor):
        return tensor.nbytes if name == "model.layers.1.mlp.up_proj.weight" else WeightTarget.write(self, name, tensor)

    monkeypatch.setattr(FailingTarget, "write", write)
    trial = trial_of([submit("r1"), Advance(steps=5), KEEP, SwapWeights(source=NEW, version="v2"), Resume()])
    assert [violation.sentence.split(" is not ")[1] for violation in golden(trial).violations] == [
        "that of the mixed replay, which recomputes every KV entry as the log says"
    ]


def test_kv_that_a_pause_loses_shows_in_the_tokens(trial_of, monkeypatch):
    right = EngineCore.begin_pause

    def begin_pause(self, mode="abort", *, clear_cache=True):
        for keys in self.runner.kv_cache.keys.values():
            keys.zero_()
        return right(self, mode, clear_cache=clear_cache)

    monkeypatch.setattr(EngineCore, "begin_pause", begin_pause)
    trial = trial_of([submit("r1"), Advance(steps=5), KEEP, Resume()])
    (violation,) = golden(trial).violations
    assert violation.sentence.endswith("of r1 is not that of an engine that was never paused")


# ---- numbers that are none, and arguments without a meaning ----


def test_logits_that_are_not_finite_end_the_run_in_words(trial_of):
    huge = WeightSource(perturb=Perturbation(seed=1, scale=1e18))
    trial = trial_of([submit("r1"), Advance(steps=5), KEEP_CLEAR, SwapWeights(source=huge, version="v2"), Resume()])
    (failed,) = [entry.event for entry in trial.entries if isinstance(entry.event, StepFailed)]
    assert failed.why == "NotFinite: the logits of r1 hold NaN or infinity: the resident weights cannot be sampled from"
    closed = trial.entries[-1].event
    assert isinstance(closed, Closed) and closed.why == "failed"
    assert trial.verdict.status == "violated"
    assert trial.verdict.reasons == (f"step 6 failed, {failed.why}",)
    assert stretches(trial) == [("r1", "unpaused", 0, 5)] and holds(trial)


@pytest.mark.parametrize("field", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"min_p": 2.0}, {"logprobs": -1}], ids=str)
def test_model_and_engine_refuse_the_same_parameters(trial_of, field):
    trial = trial_of([submit("r1", **field), submit("r2", max_tokens=2)], explain=True)
    refusals = [entry.event.error for entry in trial.entries if isinstance(entry.event, Returned) and entry.event.error]
    assert [refusal.code for refusal in refusals] == ["invalid"]
    assert next(iter(field)) in refusals[0].message
    assert trial.verdict.status == "holds"


# ---- the invariant ----


def recomputed(*references: Reference) -> Timeline:
    """r1 got tokens 7 and 8 from one version and 9 from another."""
    log = Timeline().submit("r1", [20, 21]).admit("r1", [0]).step(("r1", 0, 2), r1=7).step(("r1", 2, 1), r1=8)
    log.pause("keep").effective("keep").swap("v2").resume().step(("r1", 3, 1), r1=9)
    return log.add(*references).close("stalled")


def reference(*tokens: int, first: int = 0, nth: int = 1, kind: str = "unpaused", request: str = "r1") -> Reference:
    return Reference(request=request, nth=nth, kind=kind, first=first, tokens=tokens)  # type: ignore[arg-type]


def violation(log: Timeline) -> Violation:
    return log.violation("golden")


def test_equal_tokens_hold_and_are_counted():
    log = recomputed(reference(7, 8), reference(9, first=2, kind="mixed"))
    assert log.holds("golden") and log.judgement("golden").checked == 2


def test_a_token_that_should_be_another_is_named_where_it_was_sampled():
    log = recomputed(reference(7, 8), reference(5, first=2, kind="fresh"))
    found = violation(log)
    assert said(found) == (
        "token 2 of r1 is not that of a fresh engine on the weights that sampled it",
        "5 from weights v2, given the 2 tokens before it",
        "9; of the 1 tokens from 2 on, 1 differ: [2]",
    )
    assert found.seq == log.last(Landed)
    assert [cause.what for cause in found.cause] == ["r1 was taken on", "first byte of epoch 1, whose weights sampled it"]


@pytest.mark.parametrize("strange", [reference(7, nth=2), reference(7, request="r9"), reference(7, 8, 9, 10)], ids=["nth", "id", "length"])
def test_a_reference_without_its_tokens_is_a_violation(strange):
    assert violation(recomputed(strange)).sentence.endswith("is for tokens that no step sampled")


def test_without_references_nothing_can_be_said():
    judgement = recomputed().judgement("golden")
    assert (judgement.status, judgement.reason) == ("not-checkable", "the log has no `reference` events: nobody recomputed its tokens")


@pytest.mark.parametrize(
    ("min_pass_rate", "status", "reason"),
    [
        (1.0, "violated", "3 of 4 checks pass, asked for 100 %; the first violation is at event 29"),
        (0.76, "violated", "3 of 4 checks pass, asked for 76 %; the first violation is at event 29"),
        (0.75, "holds", "3 of 4 checks pass, asked for 75 %"),
    ],
)
def test_a_pass_rate_that_is_asked_for_decides_and_is_told(min_pass_rate, status, reason):
    log = recomputed(reference(7), reference(8, first=1), reference(5, first=2), reference(9, first=2))
    judgement = log.judgement("golden").tolerating(min_pass_rate)
    assert (judgement.status, judgement.reason) == (status, reason)


def test_a_pass_rate_changes_no_other_invariant():
    log = recomputed(reference(7))
    assert [judgement for judgement in judge(log.entries) if judgement.tolerating(0.5) != judgement] == [log.judgement("golden")]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ([], "violated       golden: 2 of 4 checks pass, asked for 100 %; the first violation is at event "),
        (["--min-pass-rate", "0.5"], "holds          golden: 2 of 4 checks pass, asked for 50 %\n"),
    ],
    ids=["by default all", "half"],
)
def test_the_command_line_takes_the_pass_rate_and_prints_it(tmp_path, monkeypatch, capsys, asked, told):
    monkeypatch.setattr(EngineCore, "_clear_cache", lambda self: self._observer.cleared(success=True, empty=True))
    with pytest.raises(SystemExit):
        main(["run", str(MODES / "keep_clear_two_requests.yaml"), "--engine", "torch", "--runs", str(tmp_path), *asked])
    assert told in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["replay", str(tmp_path / "latest"), *asked])
    assert told in capsys.readouterr().out


def test_abort_leaves_what_was_sampled_to_be_judged(trial_of):
    trial = trial_of([submit("r1"), Advance(steps=4), Abort(ids=("r1",))])
    assert stretches(trial) == [("r1", "unpaused", 0, 4)] and holds(trial)
