"""The rank explorer finds what is planted, finds nothing in the correct protocol, and can itself be trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.errors import BadInput
from harness.ranks.explorer import search
from harness.ranks.promises import JudgedRanks
from harness.ranks.protocol import Move, Protocol
from harness.ranks.shapes import FAULTS, SHAPES, explore
from harness.ranks.state import Add, Entered, Operation, Rank, Share, State

REPOSITORY = Path(__file__).parents[2]


class Toy:
    """A system given as a graph: for each state its successors. `bad` states break a promise; ends must be in `good`."""

    def __init__(self, graph: dict[Any, list[Any]], *, bad: tuple[Any, ...] = (), good: tuple[Any, ...] = ()) -> None:
        self.graph, self.bad, self.good = graph, bad, good

    def initial(self) -> Any:
        return next(iter(self.graph))

    def moves(self, state: Any) -> list[tuple[str, Any]]:
        return [(f"to {after}", after) for after in self.graph[state]]

    def broken(self, state: Any) -> tuple[str, str] | None:
        return ("bad", f"{state} is bad") if state in self.bad else None

    def ends_badly(self, state: Any) -> tuple[str, str] | None:
        return None if state in self.good else ("stuck", f"{state} is no end")

    def never_ends(self, state: Any) -> tuple[str, str]:
        return ("spins", f"{state} never ends")

    def words(self, before: Any, move: str, after: Any) -> str:
        assert move == f"to {after}"
        return f"{before} {move}"


class Locks(NamedTuple):
    """Two threads that each take two locks, one after the other, and release both."""

    held: tuple[int, int] = (0, 0)  # how many of its locks each thread has taken; 3 = done
    owners: tuple[int | None, int | None] = (None, None)


class Philosophers(Toy):
    """The textbook deadlock: each thread holds the lock that the other wants, unless both take them in one order."""

    def __init__(self, orders: tuple[tuple[int, int], tuple[int, int]]) -> None:
        self.orders = orders

    def initial(self) -> Locks:
        return Locks()

    def moves(self, state: Locks) -> list[tuple[str, Locks]]:
        found = []
        for thread, held in enumerate(state.held):
            owners = list(state.owners)
            if held < 2 and owners[self.orders[thread][held]] is None:
                owners[self.orders[thread][held]] = thread
            elif held == 2:
                owners = [None if owner == thread else owner for owner in owners]
            else:
                continue
            after = Locks(tuple(n + (at == thread) for at, n in enumerate(state.held)), tuple(owners))  # type: ignore[arg-type]
            found.append((f"to {after}", after))
        return found

    def broken(self, state: Locks) -> None:
        return None

    def ends_badly(self, state: Locks) -> tuple[str, str] | None:
        return None if state.held == (3, 3) else ("deadlock", f"locks held {state.owners}")


def grid(width: int, height: int) -> dict[Any, list[Any]]:
    return {(x, y): [p for p in ((x + 1, y), (x, y + 1)) if p[0] < width and p[1] < height] for x in range(width) for y in range(height)}


class TestSearch:
    def test_every_state_is_entered_once_and_every_move_counted(self):
        found = search(Toy(grid(7, 5), good=((6, 4),)), max_states=1000)
        assert found == (35, 6 * 5 + 7 * 4, 10, True, None)

    def test_a_counterexample_is_a_shortest_one(self):
        graph = {"a": ["b", "c"], "b": ["d"], "d": ["e"], "c": ["e"], "e": []}
        found = search(Toy(graph, bad=("e",)), max_states=1000)
        assert found.violation == ("bad", "e is bad", ("a to c", "c to e"))
        assert not found.exhaustive

    def test_threads_that_lock_in_opposite_orders_deadlock(self):
        found = search(Philosophers(((0, 1), (1, 0))), max_states=1000)
        assert found.violation is not None
        assert (found.violation.invariant, len(found.violation.steps)) == ("deadlock", 2)

    def test_threads_that_lock_in_one_order_do_not(self):
        found = search(Philosophers(((0, 1), (0, 1))), max_states=1000)
        assert found.violation is None and found.exhaustive

    def test_a_loop_that_can_no_longer_be_left_is_found(self):
        graph = {"start": ["work", "spin"], "work": ["start", "done"], "done": [], "spin": ["spun"], "spun": ["spin"]}
        found = search(Toy(graph, good=("done",)), max_states=1000)
        assert found.violation == ("spins", "spin never ends", ("start to spin",))

    def test_a_loop_with_a_way_out_is_not_a_hang(self):
        found = search(Toy({"work": ["work", "done"], "done": []}, good=("done",)), max_states=1000)
        assert found.violation is None and found.exhaustive

    def test_a_bound_that_cuts_the_search_is_reported(self):
        found = search(Toy(grid(7, 5), good=((6, 4),)), max_states=34)
        assert (found.states, found.exhaustive, found.violation) == (34, False, None)

    def test_a_bound_that_just_suffices_does_not_cut(self):
        assert search(Toy(grid(7, 5), good=((6, 4),)), max_states=35).exhaustive

    def test_a_bound_below_one_is_refused(self):
        with pytest.raises(ValueError, match="max_states must be at least 1, got 0"):
            search(Toy(grid(1, 1)), max_states=0)


class TestCorrectProtocol:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_no_order_of_events_breaks_a_promise_on_two_ranks(self, shape):
        found = explore(shape, 2)
        assert found.violation is None
        assert found.exhaustive

    @pytest.mark.parametrize("shape", ["pause-resume-wave", "pause-and-stay"])
    def test_nor_on_three(self, shape):
        found = explore(shape, 3)
        assert found.violation is None
        assert found.exhaustive
        assert found.states > explore(shape, 2).states

    @pytest.mark.parametrize("agree_every", [1, 3])
    def test_nor_when_the_all_reduce_comes_more_or_less_often(self, agree_every):
        system = JudgedRanks(SHAPES["pause-resume-wave"].callers, 2, Protocol(agree_every=agree_every))
        found = search(system, max_states=100_000)
        assert found.violation is None and found.exhaustive

    def test_the_search_reaches_the_situations_that_matter(self):
        """Without them a clean result would say nothing."""
        heard: set[str] = set()

        class Listening(JudgedRanks):
            def moves(self, state):
                for move, after in super().moves(state):
                    heard.add(self.words(state, move, after))
                    yield move, after

        callers: tuple[tuple[Operation, ...], ...] = (("pause abort", "weights", "resume", "pause keep"), ("resume",), (Add(1),))
        assert search(Listening(callers, 2, Protocol()), max_states=100_000).exhaustive
        told = "\n".join(sorted(heard))
        for situation in (
            "rank 1 takes up r1 and parks it",
            "rank 1 takes up r1 and asks for a wave",
            "the coordinator learns that rank 1 wants a wave and sends a wave start (due at rank 0)",
            "the wave start reaches rank 0, which is paused and ignores it",
            "the wave start reaches rank 0, which begins to step",
            "sends a wave start (of no effect)",
            "rank 0 takes up resume of caller 2: pause given up",
            "rank 0 takes up resume of caller 1: barrier and waits",
            "rank 0 takes up weights of caller 1: refused",
            "rank 0 takes up weights of caller 1: transfer; it completes on every rank",
            "rank 1 enters a step and waits",
            "rank 0 enters a dummy step; it completes, all agree to pause",
            "rank 0 enters a dummy step; it completes, all agree that no work is left",
        ):
            assert situation in told, situation


class TestPlantedFaults:
    @pytest.mark.parametrize(
        ("fault", "shape", "ranks", "invariant", "steps_max"),
        [
            ("K36", "pause-resume-wave", 2, "collective-symmetry", 16),
            ("K36", "pause-resume-wave", 3, "collective-symmetry", 19),
            ("K36", "keep-then-wait", 2, "collective-symmetry", 15),
            ("K37", "pause-resume-wave", 2, "flags-converge", 17),
            ("K37", "pause-resume-wave", 3, "flags-converge", 21),
            ("K37", "pause-and-stay", 2, "flags-converge", 15),
            ("K38", "pause-resume-wave", 2, "idempotent-control", 19),
            ("K38", "pause-resume-wave", 3, "idempotent-control", 24),
            ("agrees-across-calls", "two-controllers", 2, "idempotent-control", 10),
            ("agrees-across-calls", "resume-over-pause", 2, "deadlock", 16),
            ("resume-keeps-wave", "pause-resume-wave", 2, "deadlock", 24),
            ("resume-keeps-wave", "pause-resume-wave", 3, "deadlock", 31),
            ("resume-forgets-parked", "pause-resume-wave", 2, "one-ending", 23),
        ],
    )
    def test_it_is_found_and_told_in_few_steps(self, fault, shape, ranks, invariant, steps_max):
        violation = explore(shape, ranks, faults=[fault]).violation
        assert violation is not None
        assert violation.invariant == invariant
        assert len(violation.steps) <= steps_max

    @pytest.mark.parametrize("fault", FAULTS)
    def test_none_shows_without_a_control_call(self, fault):
        system = JudgedRanks(((Add(0), Add(1)),), 2, Protocol(**{FAULTS[fault]: True}))
        found = search(system, max_states=100_000)
        assert found.violation is None and found.exhaustive

    def test_k36_ends_with_one_rank_in_a_step_and_the_other_in_the_transfer(self):
        violation = explore("pause-resume-wave", 2, faults=["K36"]).violation
        assert violation is not None
        assert violation.sentence.endswith("rank 0 waits in step; rank 1 waits in weights")
        assert violation.steps[-3:] == (
            "the wave start reaches rank 0, which begins to step",
            "rank 0 enters a dummy step and waits",
            "rank 1 takes up weights of caller 1: transfer and waits",
        )

    def test_k37_ends_with_a_flag_that_nothing_lowers(self):
        violation = explore("pause-and-stay", 2, faults=["K37"]).violation
        assert violation is not None
        assert violation.sentence == "events have stopped; the coordinator holds running=True, observed False"

    def test_k38_ends_with_two_branches_of_one_resume(self):
        violation = explore("pause-resume-wave", 2, faults=["K38"]).violation
        assert violation is not None
        assert violation.sentence == "one call (resume), two branches: rank 1 took `barrier`, a rank before it `nothing to do`"


class TestPromises:
    def test_a_request_that_ends_twice_is_a_violation(self):
        system = JudgedRanks(((Add(0),),), 2, Protocol())
        running = Rank(running=True, live=(Share(0, 1),))
        state = system.initial()._replace(ranks=(running, Rank(running=True, entered=Entered("step"))), ended=(True,))
        after = dict(system.moves(state))[Move("step", 0)]
        assert system.broken(after) == ("one-ending", "request r1 ended twice")

    def test_ranks_in_different_collectives_are_a_violation_whoever_they_are(self):
        system = JudgedRanks(((Add(0),),), 3, Protocol())
        ranks = (Rank(), Rank(running=True, entered=Entered("step")), Rank(entered=Entered("resume", 0)))
        violation = system.broken(system.initial()._replace(ranks=ranks))
        assert violation is not None and violation.invariant == "collective-symmetry"

    def test_a_call_that_never_returns_is_a_deadlock(self):
        system = JudgedRanks((("weights",),), 2, Protocol())
        violation = system.ends_badly(system.initial())
        assert violation == ("deadlock", "caller 1's weights never returns: rank 0 is idle; rank 1 is idle")

    def test_a_parked_request_may_outlast_the_events_only_while_paused(self):
        system = JudgedRanks(((),), 2, Protocol())
        parked = Rank(parked=(Share(0, 1),))
        state: State = system.initial()._replace(ended=(False,))
        assert system.ends_badly(state._replace(ranks=(parked._replace(pause="effective"),) * 2)) is None
        violation = system.ends_badly(state._replace(ranks=(parked, Rank())))
        assert violation is not None and violation.invariant == "one-ending"


class TestExplore:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"shape": "nothing", "ranks": 2}, "no shape 'nothing'; there are waves, pause-resume-wave"),
            ({"shape": "waves", "ranks": 1}, "cannot explore 1 ranks; choose 2 to 4"),
            ({"shape": "waves", "ranks": 2, "faults": ["K1"]}, "no fault 'K1'; there are K36, K37, K38"),
        ],
    )
    def test_what_does_not_exist_is_refused_by_name(self, arguments, message):
        with pytest.raises(BadInput, match=message):
            explore(**arguments)

    def test_a_bound_makes_the_result_inexhaustive(self):
        found = explore("pause-resume-wave", 2, max_states=1000)
        assert (found.states, found.exhaustive, found.violation) == (1000, False, None)

    def test_results_do_not_depend_on_hash_randomisation(self):
        program = (
            "import json; from harness.ranks.shapes import explore;"
            "print(json.dumps([explore('pause-resume-wave', 2), explore('pause-resume-wave', 2, faults=['K36', 'K38'])]))"
        )
        outputs = [
            subprocess.run(
                [sys.executable, "-c", program],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in ("0", "1")
        ]
        assert outputs[0] == outputs[1]
        assert json.loads(outputs[0])[0][3] is True
