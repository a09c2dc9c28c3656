"""`Experience`: sampled sequences with rewards, as tensors; choosing and mixing its prompts.

Shapes of the data on the way from the sampler to the optimizer:
    Samples        responses as the sampler draws them (proxpo.sampler)
    Episodes       the same in turns, with text for the reward function (episodes.py)
    Experience     token ids, masks and rewards of a rollout, kept for training and replay
    TrainingBatch  an Experience and its prepared `Batch`; mini- and micro-batches are cuts of it
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch.nn.functional import pad

from proxpo.ops.shapes import Bool, Float, Int, Tensor

FULL_SEQUENCE = ("input_ids", "attention_mask")  # fields over the prompt and the response
HISTORY = ("history_ids", "history_mask")  # fields over another prompt alone
THOUGHTS = ("thoughts", "thought_means")  # fields over the first columns of the response


@dataclass(frozen=True, kw_only=True)
class Experience:
    """B sequences: prompts padded on the left, responses on the right (the last `tok` columns).

    group numbers are unique over the run, so that rows of several rollouts can be mixed.
    `version` is the number of optimizer steps the sampling policy had made. A tool's reply is in
    `attention_mask` and not in `mask`. In an environment of texts each turn is a row: `prompt`
    numbers the different prompts of a group, and `history` is the prompt without folding, empty
    where that does not fit the context. Latent thoughts come before the tokens of a response, of
    which they are the first columns: `thoughts` as they were fed back, `thought_means` as they were
    computed. They are in `mask` where the recipe trains on them.

    In control a token is a step of the environment: there is no prompt, `input_ids` are the actions
    of a list, and `observations` and `actions` hold the vectors. In generative models it is a
    denoising step: the observation is x_t and the number of the step, the action x_{t-1}.
    """

    input_ids: Int[Tensor, "seq pos"]
    attention_mask: Bool[Tensor, "seq pos"]
    mask: Bool[Tensor, "seq tok"]
    rollout_logp: Float[Tensor, "seq tok"]
    rewards: Float[Tensor, " seq"]
    truncated: Bool[Tensor, " seq"]
    group: Int[Tensor, " seq"]
    version: Int[Tensor, " seq"]
    correct: Bool[Tensor, " seq"] | None = None
    greedy_rewards: Float[Tensor, " seq"] | None = None
    prompt_id: Int[Tensor, " seq"] | None = None
    turn: Int[Tensor, "seq tok"] | None = None
    span_rewards: Float[Tensor, "seq tok"] | None = None
    void: Bool[Tensor, " seq"] | None = None
    duration: Float[Tensor, " seq"] | None = None
    feasible: Bool[Tensor, " seq"] | None = None
    token_rewards: Float[Tensor, "seq tok"] | None = None
    observations: Float[Tensor, "seq tok obs"] | None = None
    actions: Float[Tensor, "seq tok action"] | None = None
    old_mean: Float[Tensor, "seq tok action"] | None = None
    noise: Float[Tensor, "seq tok"] | None = None
    step_size: Float[Tensor, "seq tok"] | None = None
    time: Float[Tensor, "seq tok"] | None = None
    prompt: Int[Tensor, " seq"] | None = None
    episode: Int[Tensor, " seq"] | None = None
    step: Int[Tensor, " seq"] | None = None
    attempt: Int[Tensor, " seq"] | None = None
    reflect: Bool[Tensor, " seq"] | None = None
    step_rewards: Float[Tensor, " seq"] | None = None
    state: Int[Tensor, " seq"] | None = None
    summary: Bool[Tensor, "seq tok"] | None = None
    segment_draw: Float[Tensor, " seq"] | None = None
    history_ids: Int[Tensor, "seq hist"] | None = None
    history_mask: Bool[Tensor, "seq hist"] | None = None
    thoughts: Float[Tensor, "seq thought dim"] | None = None
    thought_means: Float[Tensor, "seq thought dim"] | None = None

    @property
    def shared_prompt(self) -> Int[Tensor, " seq"]:
        """Equal for rows with the same prompt: their group, but in an environment."""
        return self.group if self.prompt is None else self.prompt

    @property
    def token_mask(self) -> Bool[Tensor, "seq tok"]:
        """The mask without latent thoughts."""
        if self.thoughts is None:
            return self.mask
        column = torch.arange(self.mask.shape[1], device=self.mask.device)
        return self.mask & (column >= self.thoughts.shape[1])

    def unfolded(self) -> "Experience":
        """The responses after their whole histories, or the folded prompt where there is none."""
        assert self.history_ids is not None
        assert self.history_mask is not None
        tokens = self.mask.shape[1]
        width = self.input_ids.shape[1] - tokens
        more = max(self.history_ids.shape[1] - width, 0)
        has_history = self.history_mask.any(dim=1, keepdim=True)

        def joined(name: str, history: Tensor) -> Tensor:
            own = pad(getattr(self, name), (more, 0))
            before = pad(history, (width + more - history.shape[1], 0))
            return torch.cat(
                [torch.where(has_history, before, own[:, :-tokens]), own[:, -tokens:]], dim=1
            )

        ids, real = (
            joined("input_ids", self.history_ids),
            joined("attention_mask", self.history_mask),
        )
        before = torch.where(real, ids, -1)[:, :-tokens]
        return replace(
            self,
            input_ids=ids,
            attention_mask=real,
            prompt=before.unique(dim=0, return_inverse=True)[1],
            history_ids=None,
            history_mask=None,
        )

    def rows(self, index: Int[Tensor, " row"]) -> "Experience":
        """The sequences `index`, cut to the columns they use."""
        chosen = replace(self, **{name: value[index] for name, value in self.tensors().items()})
        return _trimmed(chosen)

    def tensors(self) -> dict[str, Tensor]:
        """The fields that have a value, for a checkpoint."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in named.items() if value is not None}

    def to(self, device: torch.device | str) -> "Experience":
        return replace(self, **{name: value.to(device) for name, value in self.tensors().items()})


def join(parts: Sequence[Experience]) -> Experience:
    """Joins rollouts, padded to a common width on both sides."""
    if len(parts) == 1:
        return parts[0]
    tokens = max(part.mask.shape[1] for part in parts)
    prompt = max(part.input_ids.shape[1] - part.mask.shape[1] for part in parts)
    history = max(0 if part.history_ids is None else part.history_ids.shape[1] for part in parts)

    def padded(part: Experience, name: str, value: Tensor) -> Tensor:
        if value.dim() == 1 or name in THOUGHTS:
            return value
        if name in HISTORY:
            return pad(value, (history - value.shape[1], 0))
        right = tokens - part.mask.shape[1]
        left = prompt - (part.input_ids.shape[1] - part.mask.shape[1])
        behind = [0, 0] * (value.dim() - 2)
        return pad(value, (*behind, left if name in FULL_SEQUENCE else 0, right))

    names = parts[0].tensors()
    merged = {
        name: torch.cat([padded(part, name, part.tensors()[name]) for part in parts])
        for name in names
    }
    return Experience(**merged)


def mini_batches(
    experience: Experience, shuffle: torch.Generator, parts: int
) -> list[Int[Tensor, "_"]]:
    """Rows of each part of the shuffled prompts; responses to a prompt stay together."""
    _, index = experience.group.unique(return_inverse=True)
    index = index.cpu()
    order = torch.randperm(int(index.max()) + 1, generator=shuffle)
    place = torch.empty_like(order).scatter(0, order, torch.arange(len(order)))
    ranks = place[index]
    sizes = (ranks * parts // len(order)).bincount(minlength=parts)
    rows = ranks.argsort(stable=True).to(experience.group.device)
    return list(rows.split(sizes.tolist()))


def random_prompts(
    experience: Experience, shuffle: torch.Generator, prompts: int
) -> Int[Tensor, " row"]:
    """All rows of `prompts` prompts drawn at random."""
    groups, index = experience.group.unique(return_inverse=True)
    chosen = torch.randperm(len(groups), generator=shuffle)[:prompts].to(index.device)
    return torch.isin(index, chosen).nonzero()[:, 0]


def with_replayed_share(
    fresh: Experience, past: list[Experience], share: float, draw: torch.Generator
) -> Experience:
    """The rollout with a share of its prompts replaced by prompts of earlier rollouts."""
    prompts = len(fresh.group.unique())
    replayed = round(share * prompts)
    if not replayed or not past:
        return fresh
    earlier = join(past)
    kept = random_prompts(fresh, draw, prompts - replayed)
    return join([fresh.rows(kept), earlier.rows(random_prompts(earlier, draw, replayed))])


def mixture(
    fresh: Experience, past: list[Experience], share: float, draw: torch.Generator
) -> Experience:
    """Takes each prompt, with chance `share`, from one of the earlier rollouts, drawn evenly."""
    prompts = len(fresh.group.unique())
    if not past or not share:
        return fresh
    replayed = int((torch.rand(prompts, generator=draw) < share).sum())
    source = torch.randint(len(past), (replayed,), generator=draw)
    counts = [(fresh, prompts - replayed)]
    counts += [(rollout, int((source == i).sum())) for i, rollout in enumerate(past)]
    return join(
        [rollout.rows(random_prompts(rollout, draw, count)) for rollout, count in counts if count]
    )


def kept_rollouts(
    past: list[Experience], fresh: Experience, *, samples: int = 0, rollouts: int = 0
) -> list[Experience]:
    """The rollouts to keep for replay: the last `rollouts`, or as many as have `samples` rows."""
    kept = [*past, fresh]
    most = max(samples, len(fresh.mask)) if samples else 0
    while kept and len(kept) > rollouts and sum(len(rollout.mask) for rollout in kept) > most:
        kept.pop(0)
    return kept


def used_columns(
    mask: Bool[Tensor, "seq tok"], attention_mask: Bool[Tensor, "seq pos"]
) -> tuple[slice, int]:
    """The columns of whole sequences that are not padding in every row, and of responses."""
    tokens, width = mask.shape[1], attention_mask.shape[1]
    used = int(mask.any(dim=0).nonzero().max()) + 1 if mask.any() else 1
    real = attention_mask.any(dim=0).nonzero()
    first = min(int(real.min()) if len(real) else 0, width - tokens)
    return slice(first, width - tokens + used), used


def _trimmed(experience: Experience) -> Experience:
    """Drops the columns in which every sequence has padding."""
    columns, used = used_columns(experience.mask, experience.attention_mask)
    return replace(
        experience,
        input_ids=experience.input_ids[:, columns],
        attention_mask=experience.attention_mask[:, columns],
        **{
            name: value[:, :used]
            for name, value in experience.tensors().items()
            if value.dim() >= 2 and name not in (*FULL_SEQUENCE, *HISTORY)
        },
    )


__all__ = [
    "Experience",
    "join",
    "kept_rollouts",
    "mini_batches",
    "mixture",
    "random_prompts",
    "used_columns",
    "with_replayed_share",
]
