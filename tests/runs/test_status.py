"""The one rule of a run's status, and the lock of its folder."""

import multiprocessing
import os
import signal

import pytest

from proxpo.errors import ProxpoError
from proxpo.runs.folder import hold_folder
from proxpo.runs.lock import InUse, exclusive
from proxpo.runs.status import clear_end, status_of, write_failure, write_summary


@pytest.mark.parametrize(
    ("summary", "failure", "started", "status"),
    [
        (None, None, False, "waiting"),
        (None, None, True, "running"),
        ({"steps": 3}, None, True, "running"),  # stopped early
        ({"steps": "all"}, None, True, "running"),
        ({}, None, True, "running"),
        ({"steps": 10}, None, False, "done"),
        ({"steps": 12}, None, True, "done"),
        (None, {"reason": "out of memory"}, True, "failed"),
        (None, {}, False, "failed"),
        ({"steps": 3}, {"reason": "killed"}, True, "failed"),
        ({"steps": 10}, {"reason": "killed"}, True, "done"),  # continued and finished
    ],
)
def test_status(summary, failure, started, status):
    assert status_of(summary, failure, steps=10, started=started) == status


def test_a_new_attempt_clears_the_end_of_the_last(tmp_path):
    write_summary(tmp_path, {"steps": 3})
    write_failure(tmp_path, reason="x", step=1, phase="update", kind="ValueError")
    clear_end(tmp_path)
    clear_end(tmp_path)
    assert list(tmp_path.iterdir()) == []


def hold(path, ready):
    with exclusive(path):
        ready.set()
        signal.pause()


def test_a_lock_names_its_owner_and_goes_with_its_process(tmp_path):
    path = tmp_path / ".lock"
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=(path, ready))
    process.start()
    assert ready.wait(60)
    with pytest.raises(InUse, match=f"process {process.pid} on "), exclusive(path):
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with exclusive(path) as last_owner:
        assert last_owner.startswith(f"process {process.pid} on ")
    with exclusive(path, wait=True) as last_owner:
        assert last_owner == ""


def test_a_folder_is_held_once_and_removed_if_nothing_was_written(tmp_path):
    out = tmp_path / "a" / "b"
    refused = pytest.raises(ProxpoError, match="is in use by process")
    with hold_folder(out), refused, hold_folder(out):
        pass
    assert list(tmp_path.iterdir()) == []
    with hold_folder(out):
        (out / "file").touch()
    assert (out / "file").exists()
    with pytest.raises(ProxpoError, match="is or lies below a file"), hold_folder(out / "file"):
        pass
