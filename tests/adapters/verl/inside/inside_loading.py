"""How proxpo gets into verl: its entry point, Ray's workers, the versions that it knows."""

import importlib
import os
from functools import partial
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import ray
import verl
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from proxpo.adapters.verl import _environment
from proxpo.recipes import methods


def test_the_entry_point_is_installed():
    found = [entry.value for entry in entry_points(group="verl.plugins") if entry.name == "proxpo"]
    assert found == ["proxpo.adapters.verl.plugin"], "install proxpo into this environment"


@ray.remote
def registered() -> tuple[list[str], list[str], int]:
    """A fresh Ray worker has the names after importing verl alone."""
    import verl.trainer.ppo.core_algos as algos

    return list(algos.POLICY_LOSS_REGISTRY), list(algos.ADV_ESTIMATOR_REGISTRY), os.getpid()


def start_ray() -> None:
    """Ray gives its own processes 30 s, which a cold disk exceeds once, but not a second time."""
    start = partial(ray.init, num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        start()
    except Exception as error:  # Ray raises no narrower class
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        start()


def test_verl_loads_us_here_and_in_ray_workers():
    names = {f"proxpo_{slug.replace('-', '_')}" for slug in methods("language")}
    assert names <= set(POLICY_LOSS_REGISTRY)
    assert {"vanilla", "gspo", "cispo"} <= set(POLICY_LOSS_REGISTRY)
    start_ray()
    try:
        losses, estimators, pid = ray.get(registered.remote(), timeout=180)
    finally:
        ray.shutdown()
    assert pid != os.getpid()
    assert names <= set(losses)
    assert names <= set(estimators)


@pytest.mark.parametrize("version", ["0.8.0", "0.10.0", "1.0"])
def test_another_verl_is_refused(version):
    with pytest.raises(ValueError, match=rf"knows verl 0.9.x, found {version}"):
        _environment.check_version(version)
    _environment.check_version(verl.__version__)


def test_a_moved_signature_is_refused():
    def moved(log_prob, old_log_prob):
        raise AssertionError

    with pytest.raises(ValueError, match=r"moved takes \(log_prob, old_log_prob\), expected"):
        _environment.check_signature(moved, _environment.LOSS_ARGUMENTS)


def test_a_failure_to_load_is_printed(monkeypatch, capfd):
    """verl swallows what plugins raise, so the plugin prints it."""
    from proxpo.adapters.verl import plugin

    monkeypatch.setattr(verl, "__version__", "0.8.0")
    entry = SimpleNamespace(load=lambda: importlib.reload(plugin))
    with pytest.raises(ValueError, match=r"found 0\.8\.0"):
        entry.load()
    assert "proxpo: not loaded into verl: proxpo.adapters.verl knows verl" in capfd.readouterr().err
