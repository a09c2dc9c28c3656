"""Where proxpo and released code give different numbers, and why: one table for docs and tests.

    python tests/parity/parity_table.py      prints docs/parity.md

Every row is shown by a test decorated with `shows(name)`, which asserts the difference itself.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

Test = TypeVar("Test", bound=Callable)


class Difference(NamedTuple):
    library: str
    where: str
    theirs: str
    ours: str
    cause: str


DIFFERENCES: dict[str, Difference] = {
    "verl-row-count": Difference(
        "verl 0.9.1",
        "`seq-mean-token-mean`, `geo_mean`",
        "divides a response by L + 1e-8",
        "divides by L",
        "a guard against empty responses; 1e-8/L relative. proxpo leaves empty responses out",
    ),
    "verl-whiten-count": Difference(
        "verl 0.9.1",
        "whitening (`gae`, `reinforce_plus_plus`, `..._baseline`)",
        "mean and variance over N + 1e-8 tokens",
        "over N",
        "the same guard; about 1e-8/N relative",
    ),
    "verl-weight-count": Difference(
        "verl 0.9.1",
        "`rollout_is_batch_normalize`",
        "mean weight over N + 1e-8 tokens (or L + 1e-8 in a response)",
        "over N",
        "the same guard; 1e-8/N (1e-8/L) relative",
    ),
    "verl-geo-empty": Difference(
        "verl 0.9.1",
        "`geo_mean` with a fully masked response",
        "averages over all B responses",
        "averages over the B⁺ that have tokens",
        "verl takes a plain mean there, unlike its other averages; factor B⁺/B",
    ),
    "verl-geo-weights": Difference(
        "verl 0.9.1",
        "`geo_mean` with rollout weights",
        "weighs a response by the geometric mean of its token weights",
        "by their arithmetic mean",
        "a proxpo weight stage multiplies token losses, whatever the ratio; "
        "`weights.tis.level=geometric` gives verl's weight before truncation",
    ),
    "verl-penalty-weights": Difference(
        "verl 0.9.1",
        "`kl_cov`, `dro` with rollout weights",
        "weighs the penalty as well",
        "weighs the policy term only",
        "proxpo's regularisers are not importance-weighted; in verl "
        "`policy_loss.weighted_terms=all` weighs them",
    ),
    "verl-gspo-token": Difference(
        "verl 0.9.1",
        "`gspo` with advantages or rollout weights that differ within a response",
        "each token carries its own gradient",
        "`gspo`: the gradient of the response's ratio, eq. 5 of arXiv:2507.18071",
        "`variant=token` gives verl's, and is what `proxpo_gspo` takes inside verl",
    ),
    "verl-cov-limit": Difference(
        "verl 0.9.1",
        "`clip_cov`, `kl_cov`, log-ratios beyond ±20",
        "exp without a bound",
        "log-ratio held within ±20",
        "verl bounds it in `vanilla`, `cispo` and `sapo` only; `ratio.limit=inf` removes ours",
    ),
    "verl-grpo-alone": Difference(
        "verl 0.9.1",
        "`grpo`, a response without siblings",
        "r/(1 + 1e-6), in float32: mean 0, std 1 and the usual epsilon",
        "the raw reward r",
        "there is no std to guard; 1e-6 relative",
    ),
    "verl-rloo-alone": Difference(
        "verl 0.9.1",
        "`rloo`, a response without siblings",
        "keeps the raw reward (its `rloo_vectorized` gives 0)",
        "advantage 0",
        "no leave-one-out baseline exists; `advantage.singleton=raw` gives verl's",
    ),
    "verl-dr-grpo-alone": Difference(
        "verl 0.9.1",
        "`grpo` without std, a response without siblings",
        "keeps the raw reward",
        "`dr-grpo`: advantage 0",
        "the paper's group mean of one response is the reward itself; "
        "`advantage.singleton=raw` gives verl's",
    ),
    "verl-vectorized-float32": Difference(
        "verl 0.9.1",
        "`grpo_vectorized`",
        "group statistics in float32 whatever the input",
        "in the input's precision",
        "hard-coded cast in verl; about 1e-7 relative",
    ),
    "verl-dual": Difference(
        "verl 0.9.1",
        "`vanilla`, negative advantage and ratio above 3",
        "always dual-clipped at `clip_ratio_c` = 3",
        "dual clip off unless asked for",
        "not part of PPO, GRPO or DAPO as published; `dual=3` gives verl's",
    ),
    "trl-empty": Difference(
        "TRL 1.16",
        "`grpo`, `sapo`, `dr_grpo`, `luspo` with a fully masked response",
        "averages over all B responses",
        "over the B⁺ that have tokens",
        "`aggregate.count_empty=true` gives TRL's; `ProxpoTrainer` counts what TRL masks whole",
    ),
    "trl-accumulation": Difference(
        "TRL 1.16",
        "`bnpo` with gradient accumulation",
        "averages the token means of the micro-batches",
        "divides by the tokens of the whole step",
        "cutting a batch into micro-batches must not change its loss; `dapo` in TRL agrees where "
        "a generation batch is one step",
    ),
    "trl-tokens-of-a-step": Difference(
        "TRL 1.16",
        "`dapo`, `cispo` with more than one optimizer step for a generation batch",
        "divides a step by its share of the whole generation batch's tokens",
        "by the step's own tokens",
        "the token mean of what a step trains on; `ProxpoTrainer` divides as TRL does where "
        "`loss_type` is the recipe's",
    ),
    "trl-alone": Difference(
        "TRL 1.16",
        "`grpo`, one completion of a group alone has a reward, or `num_generations_eval=1`",
        "advantage 0",
        "the raw reward",
        "as verl; `advantage.singleton=zero` gives TRL's",
    ),
    "trl-limit": Difference(
        "TRL 1.16",
        "log-ratios beyond ±20 (above 10 for a sequence ratio)",
        "exp without a bound",
        "held within ±20 (below 10)",
        "keeps log-ratios of ±50 finite, as verl does; `ratio.limit=inf` gives TRL's",
    ),
    "trl-entropy-bonus": Difference(
        "TRL 1.16",
        "`entropy_coef` with `grpo`, `dr_grpo`, `luspo`",
        "adds the token mean of the entropy, whatever the loss's own average",
        "adds it per token, under the loss's average",
        "one average for the whole loss; `ProxpoTrainer` takes TRL's where `GRPOConfig` has "
        "`entropy_coef`, and refuses it under `top_entropy`, to whose tokens TRL restricts it",
    ),
    "trl-vespo-kl": Difference(
        "TRL 1.16",
        "`vespo` with `beta` > 0",
        "multiplies k3 by the ratio of the token",
        "`ratio_corrected=true`: by the recipe's ratio, that of the response",
        "a stage is given one ratio; `ProxpoTrainer` takes TRL's where `GRPOConfig` has `beta`",
    ),
    "trl-entropy-selected": Difference(
        "TRL 1.16",
        "`top_entropy_quantile` < 1",
        "divides by all tokens",
        "`entropy-80-20` divides by the selected ones",
        "eq. 6 of arXiv:2506.01939 averages over the selected tokens; `normalise=all` gives TRL's",
    ),
    "trl-cispo-cap": Difference(
        "TRL 1.16",
        "`cispo`",
        "caps the ratio at `epsilon_high`",
        "at 1 + `clip_high`",
        "eq. 5 of arXiv:2506.13585 (and verl); `absolute=true` gives TRL's",
    ),
    "trl-vespo-correction": Difference(
        "TRL 1.16",
        "`vespo` with vLLM's correction",
        "multiplies the bounded weights of all tokens into the ratio of the response",
        "`weights=tis` multiplies the loss",
        "`ratio.anchor=rollout` takes the response's ratio to the sampler, without bounds; equal "
        "where no weight meets one",
    ),
    "trl-sapo-temperature": Difference(
        "TRL 1.16",
        "`sapo` in float64",
        "rounds its temperatures to float32",
        "keeps them in the precision of the log-probabilities",
        "`torch.where` of two Python numbers is float32; about 5e-8 relative, nothing in training",
    ),
    "trl-eps": Difference(
        "TRL 1.16",
        "GRPO advantages",
        "adds 1e-4 to the std",
        "1e-6",
        "verl's value; `eps=1e-4` gives TRL's",
    ),
    "trl-kl": Difference(
        "TRL 1.16",
        "`beta` > 0",
        "multiplies k3 by the ratio",
        "plain k3",
        "the papers' estimator; `kl_ratio_corrected=true` gives TRL's",
    ),
    "polgrad-limit": Difference(
        "polgrad 0.2.1",
        "log-ratios beyond ±20",
        "exp without a bound",
        "held within ±20",
        "keeps log-ratios of ±50 finite; `ratio.limit=inf` gives polgrad's",
    ),
    "polgrad-alone": Difference(
        "polgrad 0.2.1",
        "GRPO and RLOO, a response without siblings",
        "raises",
        "raw reward (GRPO, as verl) or 0 (RLOO)",
        "a stray response should not stop a training run",
    ),
    "polgrad-reinforce-pp": Difference(
        "polgrad 0.2.1",
        "REINFORCE++ advantages",
        "one value per response, standardised over responses",
        "whitened over tokens",
        "arXiv:2501.03262 eq. 5 and verl normalise over tokens, so long responses count more",
    ),
}

SHOWN: set[str] = set()


def shows(name: str) -> Callable[[Test], Test]:
    """Mark the test that asserts a difference of the table."""
    if name not in DIFFERENCES:
        raise ValueError(f"no difference called '{name}' in the table")
    SHOWN.add(name)
    return lambda test: test


def page() -> str:
    rows = "\n".join(f"| {' | '.join(row)} |" for row in DIFFERENCES.values())
    return f"""# Parity with released code

In float64, losses and gradients agree to 1e-9 relative with verl 0.9.1 (`core_algos`,
`rollout_corr_helper`), with TRL 1.16 (`GRPOTrainer`, `RLOOTrainer`: loss, advantages, sampler
correction; the soft length penalty) and with polgrad 0.2.1, wherever they compute the same thing.
The tests in `tests/parity/` call those libraries' own functions; verl runs in its own environment.

These are all the known differences. Each row is asserted by a test: the difference is what the
table says, no more and no less. Options in the last column reproduce the other side.

| library | where | there | here | cause, and how to get theirs |
| --- | --- | --- | --- | --- |
{rows}

Not compared, because proxpo has no such method: verl's `gdpo`, `grpo_passk`, `gpg` advantages,
`optimal_token_baseline` and `tir_optimal_token_baseline`; TRL's `normalize_then_sum`.

This page is printed by `python tests/parity/parity_table.py`.
"""


if __name__ == "__main__":
    print(page(), end="")
