"""`vllm`: vLLM as the sampler, in the training process, with weights handed over in memory."""

import copy
import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import save_file

from proxpo.errors import ProxpoError
from proxpo.models import Policy
from proxpo.ops.shapes import Tensor
from proxpo.sampler._types import Progress, Samples, check_request, finish
from proxpo.sampler._weights import merged_parameters

SHARE = 0.3  # of a GPU's memory, weights included; the trainer has the rest
PARTS = ("weights", "kv_cache")  # vLLM's names of what it keeps in a GPU's memory


class VllmSampler:
    """A sampler with a vLLM engine, built from the policy's weights with adapters merged in.

    memory: GiB of key-value cache on a CPU; share of the device's memory on a GPU, 0.3 by default
    sleep: between rollouts the cache is freed and the weights wait in the host's memory (GPU)
    max_rows: most sequences at a time; eager: without compilation and graphs
    """

    def __init__(
        self,
        policy: Policy,
        *,
        memory: float | None = None,
        sleep: bool = False,
        max_rows: int = 512,
        max_length: int | None = None,
        eager: bool | None = None,
    ) -> None:
        on_cpu = policy.device.type == "cpu"
        if sleep and on_cpu:
            raise ProxpoError(
                "rollout 'vllm': sleep=true frees a GPU's memory; the policy is on a CPU"
            )
        vllm = _vllm(memory if on_cpu else None)
        self._policy, self._make_params = policy, vllm.SamplingParams
        self.context = min(max_length or policy.context, policy.context)
        share = SHARE if memory is None else memory
        options: dict[str, Any] = (
            {} if on_cpu else {"gpu_memory_utilization": share, "enable_sleep_mode": sleep}
        )
        start = "start" if on_cpu else f"start with rollout.options.memory={share}"
        with tempfile.TemporaryDirectory() as folder, _explained(start):
            config: Any = copy.deepcopy(policy.bare.config)
            config.architectures = [type(policy.bare).__name__]
            # A tied head keeps a packed copy of the old weight on a CPU when the embedding moves.
            config.tie_word_embeddings = False
            config.save_pretrained(folder)
            weights = {name: x.clone() for name, x in self._weights()}
            save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
            self._llm = vllm.LLM(
                model=folder,
                runner="generate",
                skip_tokenizer_init=True,
                dtype=str(policy.dtype).removeprefix("torch."),
                logprobs_mode="processed_logprobs",  # after temperature, as training needs them
                max_model_len=self.context,
                max_num_seqs=max_rows,
                enforce_eager=on_cpu if eager is None else eager,
                disable_log_stats=True,
                **options,
            )
        self._memory = Sleep(self._llm) if sleep else None

    def sample(
        self,
        prompts: list[list[int]],
        *,
        seeds: list[int],
        max_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        progress: Progress | None = None,
    ) -> Samples:
        check_request(
            prompts,
            seeds=seeds,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            context=self.context,
            vocabulary=self._policy.vocabulary,
        )
        if top_p < 1 and temperature > 0:
            raise ProxpoError(
                f"rollout 'vllm': top_p is {top_p}, expected 1: vLLM would report log-probabilities"
                " of the cut distribution, which the trainer cannot compare; use "
                "rollout.backend=local"
            )
        params = [
            self._make_params(
                temperature=temperature,
                seed=seed % (1 << 63),
                max_tokens=max_tokens,
                logprobs=0,
                stop_token_ids=self._policy.eos_ids,
                detokenize=False,
            )
            for seed in seeds
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        with _explained("sample"):
            self._wake(*PARTS)
            outputs = self._llm.generate(requests, params, use_tqdm=False)
            if self._memory is not None:
                self._memory.sleep()
        if progress is not None:
            progress(len(prompts), len(prompts))
        tokens, logp = self._tensors([output.outputs[0] for output in outputs], max_tokens)
        ends = torch.tensor(self._policy.eos_ids, device=tokens.device)
        return finish(prompts, tokens, logp, ends, self._policy.pad_id)

    def sync(self) -> None:
        with _explained("take over the weights"):
            self._wake("weights")
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._weights()})
            self._llm.reset_prefix_cache()  # what it holds was computed with the old weights

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm, self._memory

    def _wake(self, *parts: str) -> None:
        if self._memory is not None:
            self._memory.wake(*parts)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        with torch.no_grad():
            yield from merged_parameters(self._policy.bare, self._policy.dtype)

    def _tensors(self, answers: list[Any], width: int) -> tuple[Tensor, Tensor]:
        device = self._policy.device
        tokens = torch.full((len(answers), width), self._policy.pad_id)
        logp = torch.zeros(len(answers), width, dtype=torch.float32)
        for row, answer in enumerate(answers):
            ids = list(answer.token_ids)
            scores = [place[token].logprob for token, place in zip(ids, answer.logprobs)]
            tokens[row, : len(ids)] = torch.tensor(ids)
            logp[row, : len(ids)] = torch.tensor(scores)
        return tokens.to(device), logp.to(device)


class Sleep:
    """The parts of an engine that are out of a GPU's memory: all of them after `sleep`."""

    def __init__(self, llm: Any) -> None:
        self._llm, self._asleep = llm, list[str]()

    def sleep(self) -> None:
        self._llm.sleep(level=1)  # which keeps the weights, so that stale ones can be sampled from
        self._asleep = list(PARTS)

    def wake(self, *parts: str) -> None:
        """Brings back those of the parts that are asleep."""
        tags = [part for part in self._asleep if part in parts]
        if tags:
            torch.cuda.empty_cache()  # what the trainer's allocator holds unused
            self._llm.wake_up(tags=tags)
            self._asleep = [part for part in self._asleep if part not in tags]


@contextmanager
def _explained(task: str) -> Iterator[None]:
    """Raises an engine's error as one line; a lack of memory is explained by the trainer."""
    try:
        yield
    except (ProxpoError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ProxpoError(f"rollout 'vllm': vLLM could not {task}: {reason}") from error


def _vllm(cpu_memory: float | None) -> Any:
    """Imports vLLM, set to run in one process, so that weights need not be copied."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if cpu_memory is not None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(cpu_memory)))
    try:
        return importlib.import_module("vllm")
    except ImportError:
        raise ProxpoError(
            "rollout 'vllm' needs vLLM: pip install 'proxpo[vllm]' (see requirements/vllm.txt)"
        ) from None
