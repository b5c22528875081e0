"""A campaign on a Ray cluster runs every seed once, also when a node's process is lost."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import BadInput
from harness.fuzz.campaign import Campaign, Result
from harness.fuzz.hunt import Settings
from harness.fuzz.ledger import Plan, read_ledger

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster

from harness.fuzz.ray_team import RayTeam, RayWorker

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "fuzzing.md").read_text(encoding="utf-8")


class Holder:
    """Someone else's actor, on a CPU of the cluster."""

    def ready(self) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of one node with two slots."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False})
    yield str(cluster.address)
    cluster.shutdown()


def campaign(address: str, folder: Path, *, cases: int = 400, jobs: int = 2) -> Result:
    folder.mkdir()
    return Campaign(Plan(engine="sim", seed=0, cases=cases), folder, team=RayTeam("sim", Settings(), address), jobs=jobs).run()


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


def test_a_worker_for_whom_there_is_no_cpu_is_given_up_and_its_cases_are_run_by_the_others(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listened = RayTeam.listen

    def listen_and_be_impatient(self: RayTeam, workers: list[RayWorker], seconds: float):
        # Those who have a CPU may start as slowly as they like: the time is up for the third once one of them has spoken.
        for worker, word in listened(self, workers, seconds):
            monkeypatch.setattr("harness.fuzz.ray_team.START_S", 0.0)
            yield worker, word

    monkeypatch.setattr(RayTeam, "listen", listen_and_be_impatient)
    result = campaign(address, tmp_path / "run", cases=3000, jobs=3)
    assert (result.tally.cases, result.deaths) == (3000, 0)
    assert result.unplaced >= 1
    assert read_ledger(tmp_path / "run").done == set(range(3000))


def test_without_a_cpu_for_anybody_the_campaign_ends(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    team = RayTeam("sim", Settings(), address)
    taken = [ray.remote(num_cpus=1)(Holder).remote() for _ in range(2)]
    ray.get([holder.ready.remote() for holder in taken])
    monkeypatch.setattr("harness.fuzz.ray_team.START_S", 2.0)
    with pytest.raises(BadInput, match=r"no worker started in 2 s; 0 of the cluster's 2 CPUs are free"):
        Campaign(Plan(engine="sim", seed=0, cases=10), tmp_path, team=team).run()


def test_the_command_of_the_page_runs_on_a_cluster(address: str, tmp_path: Path) -> None:
    (command,) = re.findall(r"^\$ caesura (.*--ray.*?)  #", PAGE, re.M)
    words = shlex.split(re.sub(r"--cases \d+", "--cases 60", command))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": address}
    done = subprocess.run([sys.executable, "-m", "harness.cli", *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "HOLDS" in done.stdout, done.stdout + done.stderr


def test_without_a_cluster_it_says_how_to_start_one() -> None:
    with pytest.raises(BadInput, match="ray start --head"):
        RayTeam("sim", Settings(), "127.0.0.1:1")
