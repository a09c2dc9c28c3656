"""docs/parity.md is the table, and every row of the table is asserted somewhere."""

from pathlib import Path

import parity_table
import pytest
import test_polgrad  # noqa: F401  (importing a test module declares what it shows)
import test_trl  # noqa: F401
import test_verl  # noqa: F401

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"


def test_every_difference_is_shown():
    assert set(parity_table.DIFFERENCES) - parity_table.SHOWN == set()


def test_page_is_the_table():
    assert PAGE.read_text() == parity_table.page(), (
        "write the page anew: python tests/parity/parity_table.py > docs/parity.md"
    )


def test_cells_hold_no_bars():
    for row in parity_table.DIFFERENCES.values():
        assert not any("|" in cell for cell in row), row


def test_unknown_differences_are_refused():
    with pytest.raises(ValueError, match="no difference called 'nonsense'"):
        parity_table.shows("nonsense")
