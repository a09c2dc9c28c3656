"""Train the model in the box: a small Qwen3 that adds and subtracts, not well.

    python scripts/train_tiny_model.py            # writes proxpo/data/tiny

Supervised on training problems of the arithmetic task, and stopped while the model is still
mediocre at the default level, so that reinforcement has something to add. Seeded: on the CPU, with
one version of torch, the weights come out the same, bit for bit.
"""

import argparse
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from proxpo.models import SUMS, TINY, Policy
from proxpo.sampler import make_sampler
from proxpo.train.tasks import Problem
from proxpo.train.tasks.arithmetic import arithmetic
from proxpo.train.tasks.calculator import calculate, calculator, solution

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = ["\n", *map(chr, range(32, 127))]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
CONTEXT = 256


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character."""
    vocabulary = {token: number for number, token in enumerate(SPECIAL + CHARACTERS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> Qwen3ForCausalLM:
    torch.manual_seed(args.seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=args.dim,
            intermediate_size=args.mlp,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.kv_heads,
            head_dim=args.width,
            max_position_embeddings=CONTEXT,
            # Texts are short: every pair of the rotation turns within a few characters.
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            initializer_range=args.dim**-0.5,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


Piece = tuple[str, bool]  # text, and whether the model says it


def batches(tokenizer: PreTrainedTokenizerFast, size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Ids and labels (-100 where others speak): of eight batches five are of default level, two
    mixed, and one shows how to call the calculator."""
    default, mixed = arithmetic().train, arithmetic(level="mixed").train
    calls = calculator().train
    for number in itertools.count():
        here = slice(number * size, (number + 1) * size)
        if number % 8 == 7:
            yield tensors(tokenizer, [episode(p) for p in calls[here]])
        else:
            problems = (mixed if number % 8 in (2, 5) else default)[here]
            yield tensors(tokenizer, [[(p.prompt, False), (p.answer, True)] for p in problems])


def episode(problem: Problem) -> list[Piece]:
    """A calculator problem solved with calls, turn by turn."""
    turns = solution([int(term) for term in problem.prompt.rstrip("?").split("+")])
    replies = [(calculate(turn).text, False) for turn in turns]
    return [(problem.prompt, False), *itertools.chain(*zip([(t, True) for t in turns], replies))]


def tensors(
    tokenizer: PreTrainedTokenizerFast, texts: list[list[Piece]]
) -> tuple[torch.Tensor, ...]:
    """What the model says ends with the end token and is labelled; the rest is read only."""
    end, rows, labels = tokenizer.eos_token_id, [], []
    for pieces in texts:
        parts = [(tokenizer.encode(text) + [end] * mine, mine) for text, mine in pieces]
        rows.append([token for ids, _ in parts for token in ids])
        labels.append([token if mine else -100 for ids, mine in parts for token in ids])
    width = max(map(len, rows))
    return (
        torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows]),
        torch.tensor([row + [-100] * (width - len(row)) for row in labels]),
    )


def accuracy(policy: Policy, level: str, temperature: float) -> float:
    """Share of held-out problems answered exactly."""
    task = arithmetic(level=level)
    prompts = [policy.tokenizer.encode(problem.prompt) for problem in task.test]
    rollout = make_sampler("local", policy)
    samples = rollout.sample(
        prompts, seeds=list(range(len(prompts))), max_tokens=8, temperature=temperature
    )
    texts = policy.tokenizer.batch_decode(samples.tokens, skip_special_tokens=True)
    return sum(text == p.answer for text, p in zip(texts, task.test)) / len(task.test)


def train(policy: Policy, args: argparse.Namespace) -> None:
    """Until greedy accuracy on the default level reaches `--until`, then stop."""
    optimizer = torch.optim.AdamW(
        policy.model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    for step, (ids, labels) in enumerate(batches(policy.tokenizer, args.batch), 1):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / 100)
        ids, labels = ids.to(policy.device), labels.to(policy.device)
        logits = policy.model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        if step % args.every == 0:
            greedy, sampled = (accuracy(policy, "default", t) for t in (0.0, 1.0))
            print(f"step {step}: loss {loss:.4f}, greedy {greedy:.1%}, sampled {sampled:.1%}")
            if greedy >= args.until or step >= args.steps:
                return


def save(policy: Policy, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    files = sorted(file for file in folder.iterdir() if file.name != SUMS)
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in files]
    (folder / SUMS).write_text("\n".join(sums) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=TINY)
    parser.add_argument("--until", type=float, default=0.5, help="greedy accuracy to stop at")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--mlp", type=int, default=192)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--width", type=int, default=32, help="of a head; engines want 32 or more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="the shipped one was trained on cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the order of sums, and so every bit, depends on the number
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args).to(args.device)
    ends = [tokenizer.eos_token_id]
    policy = Policy(model, tokenizer, ends, tokenizer.pad_token_id, "tiny", CONTEXT)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    train(policy, args)
    for level in ("easy", "default", "hard", "expert", "mixed"):
        print(f"{level}: greedy {accuracy(policy, level, 0.0):.1%}")
    save(policy, args.out)


if __name__ == "__main__":
    main()
