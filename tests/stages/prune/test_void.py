"""Turns without code or answer."""

from proxpo.stages.prune import has_void


def test_one_void_turn_is_enough() -> None:
    assert has_void(["```python\nx\n```", "hm"])
    assert not has_void(["```python\nx\n```", r"\boxed{2}"])
    assert not has_void([])
