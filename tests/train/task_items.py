"""A tokenizer, answers to problems and files of them, for the tests of tasks."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from proxpo.rewards import RewardItem
from proxpo.train.tasks import Problem


def tokenizer(**options):
    """One token a character."""
    letters = {chr(code): i for i, code in enumerate(range(32, 127))}
    model = Tokenizer(models.WordLevel({**letters, "[unk]": 95, "[end]": 96}, unk_token="[unk]"))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="[end]", **options)


def item(problem: Problem, text: str) -> RewardItem:
    return RewardItem(
        prompt=problem.prompt,
        completion=text,
        answer=problem.answer,
        extra=problem.extra,
    )


def jsonl(folder: Path, *rows, name: str = "data.jsonl") -> str:
    text = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (folder / name).write_text("\n".join(text))
    return str(folder / name)
