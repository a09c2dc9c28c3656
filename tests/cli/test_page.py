"""The heat map page: complete, escaped and offline."""

import json
import re
from html.parser import HTMLParser

import pytest
import torch

from proxpo.batch_file import BatchFile, load_batch, read_batch
from proxpo.inspection import inspect_batch
from proxpo.report import inspection_page
from proxpo.report.inspection_page import _method_data, inspect_page
from proxpo.settings import make_recipe

NASTY = "</script><img src=x onerror=alert(1)>&"


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in ("meta", "br", "img", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def data_of(text):
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])


def render(*names, file=None, label=None):
    file = file or read_batch("sample")
    found = [inspect_batch(make_recipe(name), file.batch, name=label or name) for name in names]
    return found, inspect_page(found, file, source="sample")


def test_weights_on_the_page_are_minus_the_gradient():
    found, text = render("grpo", "gspo")
    data = data_of(text)
    mask = load_batch("sample").mask
    for one, shown in zip(found, data["methods"]):
        for row in range(8):
            for col in range(24):
                weight = shown["weight"][row][col]
                if not mask[row, col]:
                    assert weight is None
                else:
                    assert weight == pytest.approx(-float(one.dloss_dlogp[row, col]), rel=1e-3)
    assert data["tokens"][1][:3] == ["17", "+", "25"]
    assert data["prompts"][0] == "17 + 25"


def test_filtered_responses_have_no_weight():
    _, text = render("dapo")
    recipe = make_recipe("dapo", {"overlong": "filter"})
    file = read_batch("sample")
    one = inspect_batch(recipe, file.batch)
    shown = data_of(inspect_page([one], file, source="sample"))["methods"][0]["weight"]
    assert shown[3] == [None] * 24  # the truncated response
    assert data_of(text)["methods"][0]["weight"][3] != shown[3]


def test_the_page_is_whole_and_offline():
    _, text = render("grpo", "p3o")
    tags = Tags(text)
    assert tags.open == []
    assert "{{" not in text
    assert [t for t, a in tags.found if {"src", "srcset", "data", "action"} & set(a)] == []
    assert [a["href"] for t, a in tags.found if "href" in a] == ["#m0", "#m1"]
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest", text)
    assert ("Content-Security-Policy", "default-src 'none'") in [
        (a.get("http-equiv"), a.get("content", "").split(";")[0]) for _, a in tags.found
    ]


def test_text_from_the_batch_cannot_become_markup():
    sample = read_batch("sample")
    text = {"tokens": [NASTY] * 99, "group": [NASTY, NASTY + "2"]}
    _, out = render("grpo", file=BatchFile(batch=sample.batch, text=text), label=NASTY)
    tags = Tags(out)
    assert not [tag for tag, _ in tags.found if tag == "img"]
    assert [tag for tag, _ in tags.found].count("script") == 2
    assert data_of(out)["tokens"][0][0] == NASTY


def test_pages_of_bare_batches():
    sample = read_batch("sample").batch
    bare = BatchFile(
        batch=sample.replace(tokens=None, group=None, rewards=None, advantages=torch.ones(8)),
        text={},
    )
    _, text = render("grpo", file=bare)
    data = data_of(text)
    assert data["tokens"] is None
    assert data["rewards"] is None
    assert data["prompts"] == [""] * 8


def test_what_is_left_out_is_said(monkeypatch):
    assert "Drawn: the first" not in render("grpo")[1]
    monkeypatch.setattr(inspection_page, "MOST_ROWS", 3)
    monkeypatch.setattr(inspection_page, "MOST_TOKENS", 5)
    _, text = render("grpo")
    assert "the first 3 responses and 5 tokens" in text
    data = data_of(text)
    assert (data["rows"], data["cols"]) == (3, 5)
    assert [len(row) for row in data["methods"][0]["weight"]] == [5] * 3


def test_a_response_that_is_pruned_keeps_its_advantage():
    inspection = inspect_batch(make_recipe("cppo"), load_batch("sample"))
    data = _method_data(inspection)
    pruned = ~inspection.mask.any(dim=1)
    assert pruned.any()
    assert data["adv_row"] == data["advantage"]
    assert any(data["adv_row"][row] for row in pruned.nonzero().flatten().tolist())
