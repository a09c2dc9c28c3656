# %% [markdown]
# # A fair comparison, from plan to page
#
# Does a method beat another one? On equal terms: same model, prompts, budget and seeds, and the
# same number of settings tried for each. Needs `pip install 'proxpo[train]'`. The runs here are far
# too short to show a difference; the same command without `--set` takes minutes.
#
# ```sh
# proxpo compare grpo p3o --seeds 2
# ```

# %%
import json
import subprocess
import sys
from pathlib import Path

import yaml

short = "--set steps=2 --set prompts_per_step=8 --set evaluate.size=32 --set evaluate.k=0"
command = f"proxpo compare grpo p3o --seeds 2 --out comparison {short}".split()
done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=True)
print(done.stdout)

# %% [markdown]
# The plan was written first. With `--sweep lr=1e-4,3e-4` it would also hold runs that tune each
# arm, on seeds of their own (1000, ...); the best setting of each arm then goes to the reported
# seeds, which no choice has seen.

# %%
folder = Path("comparison")
plan = yaml.safe_load((folder / "plan.yaml").read_text())
for run in plan["runs"]:
    print(run["arm"], "seed", run["seed"])

# %% [markdown]
# Every run is an ordinary run folder, with the command that repeats it. A comparison can be stopped
# at any moment; the same command continues it.

# %%
print(*sorted(path.name for path in folder.iterdir()), sep="\n")

# %% [markdown]
# The result. "A beats B" is written only where the paired interval over seeds excludes zero; two
# seeds of two steps show nothing, and the page says so.

# %%
summary = json.loads((folder / "summary.json").read_text())
print(*summary["ranking"], *summary["caveats"], sep="\n")

# %% [markdown]
# `report.html` in the folder works offline: curves with bands, score against drift, paired
# differences. What is first among many is partly first by luck: `--confirm comparison --seeds 10`
# runs the arms again on seeds that this comparison has not seen, and the page says what held. What
# each part means: [comparing methods](../../docs/comparing.md). What we have measured this way,
# lost comparisons included: [results](../../docs/results/README.md).
