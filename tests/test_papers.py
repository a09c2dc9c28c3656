"""The settings of docs/papers.yaml are accepted by the trainer and by TRL; nothing is trained."""

import sys
import warnings
from pathlib import Path

import pytest

from proxpo.errors import ProxpoError
from proxpo.settings import make_recipe
from proxpo.train.config import load_config

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import paper_pages

RUNS = paper_pages.runs()


@pytest.mark.parametrize("slug", RUNS)
def test_the_trainer_accepts_the_settings(slug):
    named = {"method": slug, "task": paper_pages.task(RUNS[slug])}
    config = load_config(None, paper_pages.settings(RUNS[slug]), named)
    recipe = config.make_method()
    for name, value in paper_pages.recipe_options(RUNS[slug]).items():
        assert recipe.options[name] == value


def test_trl_accepts_the_arguments():
    from trl import GRPOConfig

    from proxpo.adapters.trl._refusals import check_recipe

    for slug, run in RUNS.items():
        if not paper_pages.in_trl(slug, run).startswith("```"):
            continue
        options = paper_pages.trl_options(slug, run)
        try:
            recipe = make_recipe(slug, options)
            arguments = paper_pages.trl_arguments(slug, run)
            args = GRPOConfig("unused", use_cpu=True, bf16=False, **arguments)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check_recipe(recipe, args, reports_logp=False)
        except ProxpoError as error:
            pytest.fail(f"{slug}: {error}")
