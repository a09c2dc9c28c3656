"""The script of ratios and the table of claims."""

import re
import sys
from pathlib import Path

import pytest
import torch

from proxpo import Batch

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))


def test_variances_of_a_random_walk_seen_through_noise():
    import ratio_why

    torch.manual_seed(0)
    walk = 0.3 * torch.randn(64, 400, dtype=torch.float64).cumsum(1)
    seen = walk + 0.3 * torch.randn_like(walk)
    batch = Batch(logp=seen, old_logp=torch.zeros_like(seen), mask=torch.ones(64, 400).bool())
    fit = ratio_why.fitted(batch)
    assert fit["q"] == pytest.approx(0.09, rel=0.1)
    assert fit["v"] == pytest.approx(0.09, rel=0.1)
    assert fit["gain"] == pytest.approx((5**0.5 - 1) / 2, rel=0.05)  # where Q = V


def test_claims_have_a_verdict_and_a_page():
    import evidence_pages

    assert "**not tested**" in evidence_pages.claim_block()
    seen = [s for p in evidence_pages.claims() for c in p["claims"] for s in c["seen"]]
    counts = re.findall(r"\| (\d+)(?= )", evidence_pages.tally_block())
    assert sum(map(int, counts)) == len(seen), "a verdict that is in no column"
    assert all((evidence_pages.RESULTS / s["result"]).exists() for s in seen)
    rows = evidence_pages.claim_summary_block().splitlines()[2:]
    assert len(rows) == sum(len(p["claims"]) for p in evidence_pages.claims())
    shown = [int(n) for row in rows for n in re.findall(r"\d+", row.split("|")[2])]
    assert sum(shown) == len(seen)
