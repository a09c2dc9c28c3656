"""A method added from outside the package, by following the worked example in CONTRIBUTING.md."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

import proxpo
from proxpo import Recipe, register, stage
from proxpo.recipes import Options, options_of
from proxpo.recipes.grpo import grpo
from proxpo.stages.prune import largest_advantages

ROOT = Path(__file__).parents[2]
USE = """
import json, torch, proxpo
{load}
batch = proxpo.Batch(
    logp=torch.full((2, 2), -1.0, dtype=torch.float64, requires_grad=True),
    old_logp=torch.full((2, 2), -1.0, dtype=torch.float64),
    mask=torch.ones(2, 2, dtype=torch.bool),
    rewards=torch.tensor([3.0, 1.0], dtype=torch.float64),
    group=torch.tensor([0, 0]),
)
proxpo.loss_fn(proxpo.make_recipe("signpo", {{"clip_low": 0.1}}))(batch).value.backward()
swapped = proxpo.make_recipe("grpo", {{"advantage": "reward_sign"}})
entry = proxpo.methods()["signpo"]
print(json.dumps([batch.logp.grad.tolist(), swapped.advantage.name, entry.paper, entry.summary]))
"""
CHECK = """
import json
{load}
from helpers import close, gradients, loss_and_gradients, make_batch, method, with_leaves
test_signpo.test_scale()
for slug, settings, reference in test_signpo.CASES.values():
    value, slopes = loss_and_gradients(method(slug, **settings), make_batch(1))
    leaves = with_leaves(make_batch(1))
    expected = reference(leaves)
    close(value, expected.detach())
    close(slopes, gradients(expected, leaves))
print(json.dumps([list(test_signpo.CASES), bool(slopes["logp"].any())]))
"""
REMEMBER = """
import json, torch, proxpo
{load}
from helpers import make_batch
recipe = proxpo.make_recipe("grpo", {{"weights+": "above_usual_entropy"}})
states, batch = recipe.init_state(), make_batch(1)
loss = proxpo.loss_fn(recipe)(batch, proxpo.Context(states=states))
states = recipe.update_state(states, batch, loss.metrics)
(place,) = states
usual, mean = states[place]["usual"], batch.entropy[batch.mask].mean()
print(json.dumps([place, bool((usual - 0.1 * mean).abs() < 1e-6)]))
"""
EXPECTED = [
    [[-0.25, -0.25], [0.25, 0.25]],
    "reward_sign",
    "arXiv:0000.00000",
    "SignPO: PPO's clip on the sign of the centred reward.",
]


def worked_example(name: str = "signpo") -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return re.search(rf"```python\n(# {name}\.py\n.*?)```", text, re.DOTALL).group(1)


def run(folder: Path, load: str, use: str = USE) -> list:
    path = os.pathsep.join(str(part) for part in (ROOT, ROOT / "tests", folder))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", use.format(load=load)],
        env=env, capture_output=True, text=True, cwd=folder, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_worked_example_by_import(tmp_path: Path) -> None:
    (tmp_path / "signpo.py").write_text(worked_example())
    assert run(tmp_path, load="import signpo") == EXPECTED


def test_worked_example_of_a_test(tmp_path: Path) -> None:
    """The case in CONTRIBUTING agrees with its plain loops, and its limit holds."""
    for name in ("signpo", "test_signpo"):
        (tmp_path / f"{name}.py").write_text(worked_example(name))
    assert run(tmp_path, load="import signpo, test_signpo", use=CHECK) == [["signpo"], True]


def test_worked_example_of_a_stage_with_memory(tmp_path: Path) -> None:
    (tmp_path / "usual.py").write_text(worked_example("usual"))
    found = run(tmp_path, load="import usual", use=REMEMBER)
    assert found == ["weights.above_usual_entropy", True]


def test_worked_example_as_an_installed_package(tmp_path: Path) -> None:
    """What pip leaves behind for the entry point of CONTRIBUTING: nothing has to be imported."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    group, name, module = re.search(
        r'\[project\.entry-points\."([\w.]+)"\]\n(\w+) = "(\w+)"', text
    ).groups()
    (tmp_path / "signpo.py").write_text(worked_example())
    info = tmp_path / "signpo-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: signpo\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}\n")
    assert run(tmp_path, load="") == EXPECTED


@pytest.mark.usefixtures("registry")
def test_register_names_the_recipe_and_checks_it() -> None:
    @register("half-grpo", paper="none", confidence="reconstructed")
    def half_grpo(*, clip: float = 0.1) -> Recipe:
        """Half of GRPO."""
        return proxpo.make_recipe("grpo", {"clip_low": clip})

    made = half_grpo(clip=0.3)
    assert (made.name, made.options) == ("half-grpo", {"clip": 0.3})
    assert proxpo.make_recipe("half_grpo").trust.options["clip_low"] == 0.1
    assert proxpo.methods()["half-grpo"].defaults == {"clip": 0.1}
    assert "half-grpo" in proxpo.methods()
    with pytest.raises(ValueError, match="half-grpo: option 'clip' takes float"):
        half_grpo(clip="wide")


@pytest.mark.usefixtures("registry")
def test_options_that_are_passed_on_are_those_of_the_target() -> None:
    """In the signature, with their types; the method's own defaults and options come first."""

    @register("passing", paper="none")
    def passing(
        *,
        prune: Options = options_of(largest_advantages, "rate", "pool"),
        pool: Literal["here", "there"] = "there",
        base: Options = options_of(grpo, "clip_low", eps=0.5),
    ) -> Recipe:
        """GRPO on some responses."""
        assert prune.keys() == {"rate"}  # `pool` is the method's own
        return grpo(**base).replace(prune=(largest_advantages(**prune),))

    assert str(inspect.signature(passing)).startswith("(*, rate: float = 0.5, pool: Literal[")
    assert proxpo.methods()["passing"].defaults == {
        "rate": 0.5, "pool": "there", "clip_low": 0.2, "eps": 0.5
    }  # fmt: skip
    made = passing(rate=0.25, clip_low=1)
    assert made.options == {"rate": 0.25, "pool": "there", "clip_low": 1.0, "eps": 0.5}
    assert made.prune[0].options["rate"] == 0.25
    assert (made.trust.options["clip_low"], made.advantage.options["eps"]) == (1.0, 0.5)
    with pytest.raises(ValueError, match="passing: option 'rate' takes float"):
        passing(rate="some")
    with pytest.raises(ValueError, match="unknown option of passing 'clip_high'"):
        passing(clip_high=0.1)


@pytest.mark.usefixtures("registry")
def test_register_refuses_what_would_confuse() -> None:
    def no_text(*, clip: float = 0.1) -> Recipe: ...

    def stage_name(*, ratio: float = 0.1) -> Recipe:
        """Has an option named like a stage."""

    with pytest.raises(ValueError, match="needs a docstring"):
        register("a", paper="none")(no_text)
    with pytest.raises(ValueError, match="'ratio' has the name of a stage"):
        register("a", paper="none")(stage_name)
    with pytest.raises(ValueError, match="confidence 'sure' is not one of"):
        register("a", paper="none", confidence="sure")
    assert "a" not in proxpo.methods()
    with pytest.raises(
        ValueError, match=r"the method 'grpo' is defined in proxpo\.recipes\.grpo and"
    ):
        register("grpo", paper="none")(stage_name)
    with pytest.raises(
        ValueError, match=r"trust=ppo_clip is defined in proxpo\.stages\.trust\.clip"
    ):
        stage("trust", name="ppo_clip")(no_text)
    with pytest.raises(ValueError, match="unknown kind of stage 'trusts'; did you mean 'trust'"):
        stage("trusts")


@pytest.mark.usefixtures("registry")
def test_a_recipe_whose_stages_do_not_fit_is_refused_when_made() -> None:
    @register("broken", paper="none")
    def broken() -> Recipe:
        """A clip without a ratio."""
        return proxpo.make_recipe("reinforce").replace(trust=proxpo.stages.trust.ppo_clip())

    with pytest.raises(ValueError, match="broken: trust=ppo_clip works on ratio"):
        broken()


def test_one_short_file_for_a_method() -> None:
    folder = ROOT / "proxpo/recipes"
    long = {
        file.name: lines
        for file in folder.glob("[!_]*.py")
        if (lines := len(file.read_text().splitlines())) > 64  # options are explained there too
    }
    assert not long
