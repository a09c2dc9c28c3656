# %% [markdown]
# # From a TRL script to ProxpoTrainer
#
# `ProxpoTrainer` is TRL's `GRPOTrainer` with a recipe in place of `loss_type`. Needs `pip install
# 'proxpo[trl]'`; takes seconds on a CPU. The change to a script is two lines:
#
# ```diff
# -from trl import GRPOConfig, GRPOTrainer
# +from trl import GRPOConfig
# +from proxpo.adapters.trl import ProxpoTrainer
# ...
# -trainer = GRPOTrainer(model, reward, args, data)
# +trainer = ProxpoTrainer(model, reward, args, data, recipe="isopo")
# ```
#
# Model, rewards and data stay the same. Here: three-digit sums, and the included model.

# %%
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig

from proxpo.adapters.trl import ProxpoTrainer
from proxpo.models import load_policy

pairs = [(100 + 37 * n % 800, 899 - 41 * n % 790) for n in range(64)]
data = Dataset.from_list([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs])


def exact_match(completions, answer, **_):
    """Reward 1 for the right sum, else 0."""
    return [float(text.strip() == right) for text, right in zip(completions, answer)]


policy = load_policy("tiny")
args = GRPOConfig(
    "runs/trl",
    max_steps=4,
    per_device_train_batch_size=64,
    num_generations=8,
    max_completion_length=6,
    learning_rate=5e-4,
    logging_steps=1,
    use_cpu=True,
    bf16=False,
    save_strategy="no",
    disable_tqdm=True,
    report_to=[],
)

# %% [markdown]
# `recipe` names the method, `recipe_options` its options and stages. `batch_every=2` saves the
# batch of every second step, for a look at it afterwards.

# %%
trainer = ProxpoTrainer(
    policy.model,
    exact_match,
    args,
    data,
    recipe="isopo",
    recipe_options={"reg": 1.0, "overlap": 16},
    batch_every=2,
    processing_class=policy.tokenizer,
)
trainer.remove_callback(PrinterCallback)
trainer.train()
for row in trainer.state.log_history[:-1]:
    print(f"step {row['step']}: reward {row['reward']:.3f}, entropy {row['entropy']:.2f}")

# %% [markdown]
# TRL's own metrics keep their names; those of the recipe begin with `proxpo/`. An argument of
# `GRPOConfig` that the recipe decides is refused, with what to write instead:

# %%
from proxpo import ProxpoError

args.epsilon = 0.1
try:
    ProxpoTrainer(policy.model, exact_match, args, data, recipe="grpo")
except ProxpoError as error:
    print(error)

# %% [markdown]
# The batch of step 4, under two other methods: how many responses would they have pushed? On the
# command line: `proxpo inspect grpo p3o --run runs/trl --step 4`, with `--html` for a heat map of
# every token.

# %%
from proxpo import make_recipe
from proxpo.batch_file import load_batch, step_file
from proxpo.inspection import inspect_batch

batch = load_batch(step_file("runs/trl", 4))
for name in ("grpo", "p3o"):
    seen = inspect_batch(make_recipe(name), batch)
    pushed = int((seen.mass > 0).sum())
    print(f"{name}: loss {seen.loss:.4f}, {pushed} of {len(batch.mask)} responses pushed")

# %% [markdown]
# Every argument of TRL, and what becomes of it: [from TRL](../../docs/from-trl.md).
