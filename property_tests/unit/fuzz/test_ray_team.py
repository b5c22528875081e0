"""A campaign on a Ray cluster runs every seed once, also when a node's process is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import BadInput
from harness.fuzz.campaign import Campaign, Result
from harness.fuzz.hunt import Settings
from harness.fuzz.ledger import Plan, read_ledger

pytest.importorskip("ray")

from ray.cluster_utils import Cluster

from harness.fuzz.ray_team import RayTeam, RayWorker


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of one node with two slots."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False})
    yield str(cluster.address)
    cluster.shutdown()


def campaign(address: str, folder: Path) -> Result:
    folder.mkdir()
    return Campaign(Plan(engine="sim", seed=0, cases=400), folder, team=RayTeam("sim", Settings(), address), jobs=2).run()


def test_every_seed_is_run_once(address: str, tmp_path: Path) -> None:
    result = campaign(address, tmp_path / "run")
    assert (result.tally.cases, result.failures, result.deaths) == (400, [], 0)
    assert read_ledger(tmp_path / "run").done == set(range(400))


def test_a_lost_actor_loses_nothing(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = RayWorker.give
    killed: list[RayWorker] = []

    def give_and_kill(self: RayWorker, task) -> None:
        given(self, task)
        if not killed:
            killed.append(self)
            self.end()

    monkeypatch.setattr(RayWorker, "give", give_and_kill)
    result = campaign(address, tmp_path / "run")
    assert (result.tally.cases, result.failures, result.deaths) == (400, [], 1)
    assert read_ledger(tmp_path / "run").done == set(range(400))


def test_without_a_cluster_it_says_how_to_start_one() -> None:
    with pytest.raises(BadInput, match="ray start --head"):
        RayTeam("sim", Settings(), "127.0.0.1:1")
