"""The table of prompts: what is written is read back, for any order and any batch."""

import torch
from helpers import close, f64
from hypothesis import given
from hypothesis import strategies as st

from proxpo.ops.prompt_memory import blank, recall, remember

visits = st.lists(st.tuples(st.integers(-9, 9), st.floats(-5, 5)), max_size=12)


@given(st.lists(visits, max_size=5))
def test_a_table_is_a_dictionary(batches: list[list[tuple[int, float]]]) -> None:
    table, known = blank("x", "y"), {}
    for batch in batches:
        prompts = torch.tensor([prompt for prompt, _ in batch], dtype=torch.int64)
        table = remember(table, prompts, {"x": f64([value for _, value in batch])})
        known.update(batch)
    assert table["prompt_id"].tolist() == sorted(known)
    asked = torch.arange(-10, 11)
    close(recall(table, "x", asked, default=7.0), [known.get(p, 7.0) for p in asked.tolist()])
    close(recall(table, "y", asked), torch.zeros(21))


def test_columns_that_are_not_named_keep_their_entries() -> None:
    table = remember(blank("x", "y"), torch.tensor([4]), {"x": f64([1.0]), "y": f64([2.0])})
    before = {name: column.clone() for name, column in table.items()}
    later = remember(table, torch.tensor([9, 4]), {"x": f64([5.0, 6.0])})
    close(later["x"], [6.0, 5.0])
    close(later["y"], [2.0, 0.0])
    assert all(torch.equal(table[name], column) for name, column in before.items())
