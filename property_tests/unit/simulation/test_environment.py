"""Virtual time: whole nanoseconds, and a seeded order of what happens at one instant."""

from __future__ import annotations

import math

import simpy

from harness.simulation.environment import Environment, Process
from harness.simulation.streams import stream


def order_of_four(env: simpy.Environment) -> str:
    """The order in which four processes act that all wait for the same instant."""
    acted = []

    def act(name: str) -> Process:
        yield env.timeout(10)
        acted.append(name)

    for name in "abcd":
        env.process(act(name))
    env.run()
    return "".join(acted)


def test_every_order_of_four_simultaneous_processes_is_run_by_some_seed():
    orders = {order_of_four(Environment(stream(seed, "ties"))) for seed in range(300)}
    assert len(orders) == math.factorial(4)


def test_simpy_by_itself_runs_one_of_these_orders():
    assert {order_of_four(simpy.Environment()) for _ in range(20)} == {"abcd"}


def test_one_seed_gives_one_order():
    assert len({order_of_four(Environment(stream(7, "ties"))) for _ in range(20)}) == 1


def test_a_process_that_is_woken_at_an_instant_may_act_before_others_that_waited_for_it():
    def last(seed: int) -> str:
        env, acted = Environment(stream(seed, "ties")), []

        def wake(name: str) -> Process:
            yield env.timeout(10)
            if name == "first":
                env.process(wake_late())
            acted.append(name)

        def wake_late() -> Process:
            yield env.timeout(0)
            acted.append("woken")

        env.process(wake("first"))
        env.process(wake("second"))
        env.run()
        return acted[-1]

    assert {last(seed) for seed in range(40)} == {"second", "woken"}


def test_time_is_a_whole_number_of_nanoseconds():
    env = Environment(stream(0, "ties"))
    env.timeout(3_600_000_000_000_001)
    env.run()
    assert env.now_ns == 3_600_000_000_000_001
    assert type(env.now) is int
