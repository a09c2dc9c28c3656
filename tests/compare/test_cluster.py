"""A Ray cluster of two workers on this machine, one of which is lost in the middle of its run."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from comparisons import SMALL, arguments, rows_of

from proxpo.cli import main
from proxpo.compare.state import state_of

STEPS = 12


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def test_a_run_whose_machine_is_lost_goes_on_elsewhere(cluster, tmp_path, capsys):
    import ray

    first = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    out = tmp_path / "ray"
    folders = [out / "runs" / f"{name}-seed0" for name in ("grpo", "p3o")]
    killed: list[list[int]] = []

    def lose_a_machine() -> None:
        while not all(_steps(one) >= 2 for one in folders):
            time.sleep(0.05)
        cluster.remove_node(first, allow_graceful=False)
        killed.append([_steps(one) for one in folders])

    threading.Thread(target=lose_a_machine, daemon=True).start()
    small = (*SMALL, f"steps={STEPS}", "evaluate.every=0")
    code = main(arguments(out, "grpo", "p3o", small=small, seeds="1", on="ray"))
    assert code == 0, capsys.readouterr()
    assert killed
    assert max(killed[0]) < STEPS
    begun = [(one / "log.txt").read_text().count("sampler and trainer") for one in folders]
    assert sorted(begun) == [1, 1]
    started = [(one / "log.txt").read_text().count(f"{STEPS} steps ->") for one in folders]
    assert sorted(started) == [1, 2]  # one was begun once, the other taken up again
    for one in folders:
        assert [row["step"] for row in rows_of(one)] == list(range(STEPS + 1))
        assert state_of(one, steps=STEPS, score="reward").status == "done"


def _steps(folder: Path) -> int:
    return state_of(folder, steps=10**9, score="x").step


def test_ray_is_named_when_it_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert main(["compare", "grpo", "--on", "ray", "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'proxpo[ray]'" in capsys.readouterr().err
    assert not os.path.exists(tmp_path / "out")
