"""Fixtures that tests of the trainer share."""

import pytest


@pytest.fixture
def no_pictures(request, monkeypatch):
    """Drawing takes longer than small runs; it is looked at where curves are the point."""
    if "curves" not in request.node.name:
        monkeypatch.setattr("proxpo.train.finish.write_pictures", lambda *_, **__: None)
