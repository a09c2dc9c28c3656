"""`import proxpo` needs torch and nothing else, and loads nothing heavy."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import proxpo

ROOT = Path(__file__).parents[1]
ONLY_TORCH = """
import json, sys, torch
allowed = {name.partition(".")[0] for name in sys.modules} | {"proxpo"}
allowed |= set(sys.stdlib_module_names)

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
before = set(sys.modules)
"""
USE = """
import proxpo, proxpo.pictures
generator = torch.Generator().manual_seed(0)
logp = torch.randn(4, 5, generator=generator).requires_grad_()
yes, where = torch.ones(4, 5, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
same = ("old_logp", "ref_logp", "rollout_logp", "prox_logp", "prev_logp", "entropy", "values",
        "full_logp")
other = dict.fromkeys(same, logp.detach() + 0.1)
other |= dict.fromkeys(("span_rewards", "noise", "step_size", "time", "ref_kl"), torch.rand(4, 5))
other |= dict.fromkeys(("mean", "old_mean", "ref_mean", "hidden", "thought"), torch.rand(4, 5, 3))
other |= dict.fromkeys(("vocab_logp", "old_vocab_logp"), torch.rand(4, 5, 7).log_softmax(-1))
other |= dict.fromkeys(("tokens", "turn"), yes.long())
other |= dict.fromkeys(("correct", "void", "truncated", "reflect"), where == 1)
other |= dict.fromkeys(("episode", "attempt", "state"), where)
other |= {"step": torch.tensor([0, 1, 0, 1]), "step_rewards": torch.rand(4),
          "segment_draw": torch.rand(4), "summary": yes, "latent": ~yes}
batch = proxpo.Batch(
    logp=logp, mask=yes, rewards=torch.tensor([1.0, 0.0, 1.0, 0.5]), group=where, prompt_id=where,
    greedy_rewards=torch.zeros(4), duration=torch.rand(4), features=torch.rand(4, 3), **other,
)
for slug in proxpo.methods("language"):
    proxpo.loss_fn(proxpo.make_recipe(slug))(batch).value.backward()
assert logp.grad.isfinite().all()
assert proxpo.pictures.picture("isopo").startswith("<svg")
new = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(json.dumps(sorted(new)))
"""


def run(code: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_method_runs_with_torch_alone() -> None:
    added = json.loads(run(ONLY_TORCH + USE))
    assert set(added) <= {"proxpo", "torch"}


def test_import_loads_no_torch_and_no_framework() -> None:
    """Names are loaded when used, so that `proxpo --help` answers at once."""
    heavy = ("torch", "transformers", "peft", "accelerate", "numpy", "jaxtyping", "yaml", "rich")
    code = f"import sys, proxpo; print([m for m in {heavy} if m in sys.modules])"
    assert run(code).strip() == "[]"


@pytest.mark.parametrize("name", proxpo.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(proxpo, name) is not None
    assert name in dir(proxpo)


def test_modules_resolve_and_unknown_names_do_not() -> None:
    for name in proxpo._MODULES:
        assert getattr(proxpo, name) is importlib.import_module(f"proxpo.{name}")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        proxpo.nonsense  # noqa: B018


def test_every_name_a_module_exports_exists() -> None:
    for name in proxpo._MODULES:
        module = importlib.import_module(f"proxpo.{name}")
        for exported in getattr(module, "__all__", ()):
            assert hasattr(module, exported), f"{name}.{exported}"
