"""Every recipe TRL can feed trains the model in the box; every other one says why it cannot."""

import copy
import math
import runpy
import warnings
from pathlib import Path

import pytest
import torch
from trl.trainer.utils import (
    shuffle_sequence_dict,
    split_pixel_values_by_grid,
    split_tensor_dict,
    unsplit_pixel_values_by_grid,
)
from trl_runs import (
    Watched,
    canned,
    closeness,
    config,
    losses,
    policy,
    questions,
    right_or_wrong,
    seen,
    trainer,
)

import proxpo
from proxpo.adapters.trl import ProxpoTrainer
from proxpo.adapters.trl._generation_batch import trained_tokens
from proxpo.adapters.trl._optimizer_step import ROW, in_generation_order
from proxpo.adapters.trl._refusals import PROVIDED, check_evaluated, resolve_recipe
from proxpo.batch_file import load_batch, saved_steps
from proxpo.errors import ProxpoError
from proxpo.recipes import methods
from proxpo.settings import at_length
from proxpo.stages.schedule import variants
from proxpo.types import Clock

REFUSED = {
    slug
    for slug in methods("language")
    if proxpo.make_recipe(slug).needs() - PROVIDED - {"rollout_logp"}
}
ONCE = ("opo",)  # one update per rollout, by definition
SCHEDULED = ("mdpo", "rapid", "sfpo", "trpo")  # whose steps TRL makes by itself
OPTIONS = {slug: {"schedule": None} for slug in SCHEDULED}
LABELS = ("pacs",)
# Of two responses with the same |advantage| the earlier stays, and TRL has shuffled the rows.
TIES = ("cppo",)


@pytest.mark.long
@pytest.mark.parametrize("slug", sorted(set(methods("language")) - REFUSED))
def test_two_rollouts_of_four_updates(slug, tmp_path):
    speaks = {"rollout_func": canned} if "rollout_logp" in proxpo.make_recipe(slug).needs() else {}
    if slug in LABELS:
        speaks["reward"] = right_or_wrong
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = trainer(
            tmp_path,
            slug,
            options=OPTIONS.get(slug),
            kind=Watched,
            **speaks,
            num_iterations=1 if slug in ONCE else 4,
            max_steps=8,
        )
        run.train()
    assert len(losses(run)) == 8
    assert all(map(math.isfinite, losses(run) + seen(run, "grad_norm")))
    moved = zip(run.start.parameters(), run.model.parameters())
    assert any(not torch.equal(before, after) for before, after in moved)
    if slug in TIES:
        return
    first = first_loss(run, slug)
    assert first == pytest.approx(losses(run)[0], rel=1e-5, abs=1e-6)


def first_loss(run: Watched, slug: str) -> float:
    """Loss of the first micro-batch by proxpo alone, without TRL."""
    made = proxpo.make_recipe(slug, OPTIONS.get(slug, {}))
    made = at_length(made, run.args.max_completion_length)
    made = (variants(made) or (made,))[0]
    rows = run.parts[0]
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
    attended = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
    mask = trained_tokens(rows)
    run.start.forward = type(run.start).forward.__get__(run.start)  # without TRL's fused head
    with torch.no_grad():
        logp, entropy = proxpo.model_logp(
            run.start, ids, mask, attention_mask=attended, entropy=True
        )
    sampler = rows.get("sampling_per_token_logps")
    behaviour = sampler if sampler is not None and "prox_logp" in made.needs() else logp
    batch = proxpo.Batch(
        logp=logp,
        old_logp=behaviour,
        prox_logp=logp,
        ref_logp=logp,
        entropy=entropy,
        rollout_logp=sampler,
        tokens=rows["completion_ids"],
        mask=mask,
        rewards=rows["rewards"],
        group=rows["group"],
    )
    clock = Clock(steps=20)
    noise = torch.Generator().manual_seed(0)
    return float(proxpo.loss_fn(made)(batch, proxpo.Context(generator=noise, clock=clock)).value)


@pytest.mark.parametrize("slug", SCHEDULED)
def test_who_makes_the_steps_is_told(slug, tmp_path):
    with pytest.raises(ProxpoError, match=f"recipe {slug}: schedule=.* TRL does itself") as caught:
        trainer(tmp_path, slug)
    assert f"recipe_options={OPTIONS[slug]} leaves them to num_iterations" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("slug", sorted(REFUSED))
def test_recipes_trl_cannot_feed_are_refused(slug, tmp_path):
    missing = sorted(proxpo.make_recipe(slug).needs() - PROVIDED)[0]
    with pytest.raises(ProxpoError, match=f"recipe {slug} needs '{missing}' in TRL: ") as caught:
        trainer(tmp_path, slug)
    assert "\n" not in str(caught.value)


BAD = [
    ("tis", {}, {}, "generation with transformers reports no log-probabilities; set use_vllm=True"),
    (
        *("grpo", {}, {"beta": 0.04}),
        "beta=0.04 has no effect on recipe grpo: use {'kl_coef': 0.04, 'kl_ratio_corrected': True",
    ),
    (
        "isopo",
        {},
        {"beta": 0.04},
        "'kl_to_ref', 'regularisers.kl_to_ref.coef': 0.04",
    ),
    (
        "grpo",
        {},
        {"epsilon": 0.1},
        "no effect on recipe grpo: use {'clip_low': 0.1, 'clip_high': 0.1}",
    ),
    ("opo", {}, {"epsilon": 0.1}, "use {'clip_low': 0.1, 'clip_high': 0.1} in"),
    ("dpo", {}, {"beta": 0.04}, "no effect on recipe dpo: it has no place for a KL term"),
    ("isopo", {}, {"epsilon": 0.1}, "no effect on recipe isopo: a clip range, where it has one"),
    ("grpo", {}, {"vespo_k_pos": 1.0}, "vespo_k_pos=1.0 has no effect on recipe grpo"),
    ("grpo", {}, {"entropy_target": 0.5}, "entropy_target=0.5 has no effect on recipe grpo"),
    (
        *("grpo", {}, {"sync_ref_model": True}),
        "sync_ref_model=True has no effect on recipe grpo, which reads no reference.*kl_to_ref",
    ),
    (
        *("grpo", {"schedule": "clipping_bias"}, {}),
        "recipe grpo: schedule=clipping_bias decides over the optimizer steps of a rollout, which",
    ),
    ("grpo", {}, {"scale_rewards": "none"}, "'advantage.scale'"),
    ("grpo", {"clip": 1}, {}, "unknown option 'clip' of grpo; did you mean 'clip_"),
    ("gropo", {}, {}, "unknown method 'gropo'; did you mean 'grpo'"),
    ("opo", {}, {"num_iterations": 2}, "opo makes one update per rollout, but num_iterations=2"),
    ("lopti", {}, {}, "lopti goes over a rollout in 2 passes: num_iterations must be a multiple"),
    (
        "grpo",
        {},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
        "gradient_accumulation_steps=4 does not divide steps_per_generation=2",
    ),
    (
        "dpo",
        {},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        "per_device_train_batch_size=1 must be a multiple of num_generations=2",
    ),
    (
        *("dapo", {}, {"mask_truncated_completions": True}),
        "completions from reward=overlong_penalty of recipe dapo: use {'filter\\+': 'not_trunc",
    ),
    ("isopo", {}, {"cast_lm_head_to_fp32": True}, "gradient=isopo cannot run here: its log-prob"),
    ("grpo", {"schedule": "poisson_replay"}, {}, "decides over the optimizer steps of a rollout"),
    (
        "grpo",
        {"regularisers": "kl_dual", "regularisers.kl": "sampled"},
        {},
        "regularisers=kl_dual follows every optimizer step by its numbers",
    ),
    (
        *("grpo", {}, {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}}),
        "gradient_accumulation_steps=2 does not divide steps_per_generation=1",
    ),
    ("isopo", {}, {"optim": "galore_adamw_layerwise"}, "optim=galore_adamw_layerwise moves the"),
    (
        *("grpo", {}, {"optim": "lomo", "gradient_accumulation_steps": 2}),
        "optim=lomo moves the weights inside each backward pass, and gradient_accumulation_steps=2",
    ),
    (
        *("dr-grpo", {}, {"max_completion_length": None}),
        r"dr-grpo depends on the longest response allowed \(aggregate.max_tokens\), and GRPO",
    ),
]


@pytest.mark.parametrize(("recipe", "options", "changes", "message"), BAD)
def test_bad_input(recipe, options, changes, message, tmp_path):
    with pytest.raises(ProxpoError, match=message) as caught:
        trainer(tmp_path, recipe, options=options, **changes)
    assert "\n" not in str(caught.value)


SAID = [
    ("grpo", {}, {"loss_type": "dapo"}, "loss_type='dapo': in their place recipe grpo has trust="),
    ("gspo", {}, {}, "epsilon=0.2, epsilon_high=None, importance_sampling_level='token': in their"),
    ("isopo", {}, {}, "loss_type='dapo', epsilon=0.2, importance_sampling_level='token': in their"),
    ("grpo", {"kl_coef": 0.1}, {}, "beta=0.0: in their place recipe grpo has"),
    (
        "dapo",
        {"prompts": None},
        {},
        "epsilon_high=None: in their place recipe dapo has trust=ppo_cl",
    ),
    ("rloo", {"kl_coef": 0.0}, {}, "scale_rewards='group'"),
    ("grpo", {"aggregate": "token_mean"}, {"loss_type": "dapo"}, ""),
]


@pytest.mark.parametrize(("recipe", "options", "changes", "line"), SAID)
def test_values_of_trl_that_a_recipe_replaces_are_named(
    recipe, options, changes, line, tmp_path, capfd
):
    """A GRPOConfig does not tell a written value from a default; all without effect are said."""
    trainer(tmp_path, recipe, options=options, **changes)
    said = [text for text in capfd.readouterr().err.splitlines() if text.startswith("proxpo: ")]
    assert len(said) == bool(line)
    assert line in "".join(said)


@pytest.mark.parametrize(("slug", "parts"), [("kl-cov", 2), ("kl-cov", 1), ("p3o", 2)])
def test_a_loss_that_depends_on_the_micro_batch_says_so(slug, parts, tmp_path, capfd):
    scope = {"scope": "microbatch"} if slug == "kl-cov" else {}
    given = {"gradient_accumulation_steps": parts, "options": {"prompts": None, **scope}}
    trainer(tmp_path, slug, **given)
    line = (
        "kl-cov looks at each of the 2 micro-batches of an optimizer step by itself (regularisers="
    )
    assert (line in capfd.readouterr().err) == (slug == "kl-cov" and parts == 2)


def test_batches_are_saved_as_the_losses_saw_them(tmp_path):
    """Rollouts of two optimizer steps of two micro-batches, the third step's and the fourth's."""
    run = trainer(
        tmp_path,
        "grpo",
        dtype="float64",
        max_steps=4,
        batch_every=3,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
    )
    run.train()
    assert list(saved_steps(tmp_path)) == [4]
    batch = load_batch(saved_steps(tmp_path)[4])
    assert batch.advantages is None
    assert batch.group.unique(return_counts=True)[1].tolist() == [2] * 8
    recipe = proxpo.make_recipe("grpo")
    ready = proxpo.prepare(recipe, batch)
    ratio = (batch.logp - batch.old_logp)[batch.mask]
    assert ratio.abs().max() > 0  # the second update moved away from the sampling policy
    clipped = proxpo.policy_loss(recipe, ready.batch, ready.ctx).metrics["trust/clipped"]
    logged = seen(run, "proxpo/trust/clipped")[-2:]
    assert float(clipped) == pytest.approx(sum(logged) / 2, abs=0.1)
    with pytest.raises(ProxpoError, match="batch_every is a number of steps"):
        trainer(tmp_path, "grpo", batch_every=-1)


def test_options_belong_to_a_name(tmp_path):
    with pytest.raises(ProxpoError, match="recipe_options go with the name of a recipe"):
        trainer(tmp_path, proxpo.make_recipe("grpo"), options={"clip_low": 0.1})


def test_what_is_written_down_names_the_method(tmp_path):
    """The model card names the recipe, the config keeps its beta; positions are TRL's."""
    base, data = policy(), questions().select(range(4))
    run = ProxpoTrainer(
        *(copy.deepcopy(base.model), closeness, config(tmp_path), data, data, base.tokenizer),
        recipe="isopo",
        recipe_options={"regularisers+": "kl_to_ref"},
    )
    assert run.eval_dataset is not None
    assert (run.args.beta, run.beta) == (0.0, 1.0)
    run.create_model_card("name")
    card = (tmp_path / "README.md").read_text()
    assert "trained with isopo (proxpo), a method introduced in [ISOPO: Proximal policy" in card
    assert "- isopo" in card
    assert "grpo" not in card.lower()


class Edited(ProxpoTrainer):
    """Adds 7 to the rewards, hides the first token of each completion, reverses the rows."""

    factor = 1.0

    def _calculate_rewards(self, *given):
        return super()._calculate_rewards(*given) + 7

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        output["tool_mask"] = torch.ones_like(output["completion_ids"])
        output["tool_mask"][:, 0] = 0
        output["advantages"] = self.factor * output["advantages"]
        return {name: x.flip(0) if x.dim() else x for name, x in output.items()}


def test_what_a_subclass_returns_reaches_the_recipe(tmp_path):
    run = trainer(tmp_path, "grpo", kind=Edited, max_steps=1, batch_every=1)
    run.train()
    rollout = run._rollouts["train"][0]
    assert rollout.whole.rewards.min() > 7
    assert not rollout.whole.mask[:, 0].any()
    assert rollout.whole.mask[:, 1].any()
    batch = load_batch(saved_steps(tmp_path)[1])
    texts = run._tokenizer.batch_decode(batch.tokens, skip_special_tokens=True)
    logged = list(run._logs["completion"])  # in the order of rewards
    assert texts == logged
    changed = trainer(tmp_path, "grpo", kind=Edited, max_steps=1)
    changed.factor = 2.0
    with pytest.raises(ProxpoError, match="advantages of TRL's rollout were changed, but"):
        changed.train()


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        (None, None, "a method or a Recipe, got a NoneType"),
        ("grpo", ["eps"], "by name, got a list"),
    ],
)
def test_what_is_no_recipe(recipe, options, message):
    with pytest.raises(ProxpoError, match=message):
        resolve_recipe(recipe, options)


def test_lengths_are_trls_unless_set(tmp_path):
    """dr-grpo divides by max_completion_length and dapo penalises it, as TRL's own losses do.

    Also where the recipe comes ready made.
    """
    made = proxpo.make_recipe("dr-grpo")
    for number, (recipe, options, length) in enumerate(
        [("dr-grpo", {}, 3), (made, None, 3), ("dr-grpo", {"max_tokens": 50}, 50)]
    ):
        run = trainer(tmp_path / str(number), recipe, options=options)
        assert run.recipe.aggregate.options["max_tokens"] == length
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = trainer(tmp_path / "dapo", "dapo")
    assert run.recipe.reward[0].options["max_tokens"] == 3


def test_what_trl_leaves_out_is_told(tmp_path):
    with pytest.warns(UserWarning, match="prompts=informative redraws prompts, which TRL does not"):
        trainer(tmp_path, "dapo")
    with pytest.warns(UserWarning, match="asks for 2 times as many prompts, which TRL does not"):
        trainer(tmp_path, "cppo")


def test_groups_in_parts_are_not_evaluated():
    recipe = proxpo.make_recipe("dpo")
    check_evaluated(recipe, rows=4, group=2)
    check_evaluated(proxpo.make_recipe("grpo"), rows=1, group=2)
    with pytest.raises(ProxpoError, match="must be a multiple of num_generations_eval=2"):
        check_evaluated(recipe, rows=1, group=2)


def test_the_example(tmp_path):
    example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "trl_isopo.py"))
    run = example["main"](["--steps", "2", "--out", str(tmp_path)])
    assert run.state.global_step == 2


def test_images_follow_their_completions_into_whole_groups():
    """TRL shuffles a rollout and cuts it; images of a completion are rows of their own."""
    grid = torch.tensor([[1, 2, 1], [1, 1, 1], [1, 3, 1], [1, 1, 2], [1, 1, 1]])
    images = [1, 2, 0, 2]
    batch = {
        "prompt_ids": torch.arange(8).reshape(4, 2),
        ROW: torch.arange(4),
        "num_images": images,
        "image_grid_thw": grid,
        "pixel_values": torch.arange(18.0).reshape(9, 2),
        "num_items_in_batch": torch.tensor(8),
    }
    torch.manual_seed(1)
    shuffled = shuffle_sequence_dict(split_pixel_values_by_grid(batch))
    assert shuffled[ROW].tolist() != [0, 1, 2, 3]
    parts = [unsplit_pixel_values_by_grid(part) for part in split_tensor_dict(shuffled, 2)]
    first, second = in_generation_order(parts)
    assert first["num_images"] + second["num_images"] == images
    assert [len(first["pixel_values"]), len(second["pixel_values"])] == [6, 3]
    for name in ("prompt_ids", ROW, "image_grid_thw", "pixel_values"):
        torch.testing.assert_close(torch.cat([first[name], second[name]]), batch[name])
    assert first["num_items_in_batch"] == 8
