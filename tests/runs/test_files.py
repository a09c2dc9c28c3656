"""Files appear whole or not at all."""

import os
import stat
import threading

import pytest

from proxpo.runs.files import write_whole


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "page.html"
    write_whole(target, b"old")

    def fail(*_):
        raise OSError(28, "No space left on device", "hidden")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(target, b"new")
    assert caught.value.filename == str(target)
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_links_are_followed(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_whole(pipe, b"page")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    reader.join(timeout=10)
    assert read == [b"page"]
