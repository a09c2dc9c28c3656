"""Forward passes of `ProxpoTrainer`: log-probabilities, entropies, and the block of a transform.

They come from recorded passes where the model suits them, from TRL's own code, or under a transform
from proxpo's.
"""

from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from proxpo.adapters.trl._replay import Completions, policy_graphs
from proxpo.logp import model_logp
from proxpo.ops.attention import safe_attention
from proxpo.ops.shapes import Tensor
from proxpo.replay import PolicyGraphs
from proxpo.types import Batch

IMAGES = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes"),
    *("num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)


class PolicyPasses(GRPOTrainer):
    """GRPOTrainer with its forward passes made to fit a recipe."""

    model: Any
    _transform: Any
    _needs: set[str]
    _graphs_wanted: str

    @cached_property
    def _graphs(self) -> PolicyGraphs | None:
        """Recorded passes, if the model suits them as it is at the first pass, hooks and all."""
        return self._find_graphs()

    def _find_graphs(self) -> PolicyGraphs | None:
        return policy_graphs(self, self._transform, wanted=self._graphs_wanted)

    @torch.no_grad()
    def _score(self, output: dict[str, Any]) -> dict[str, Tensor]:
        """Log-probabilities of a generation batch, where TRL leaves them out, and entropies."""
        rows = self.args.per_device_train_batch_size
        checkpointing: Any = self.args.gradient_checkpointing_kwargs
        with disable_gradient_checkpointing(self.model, checkpointing):
            return self._forward(self.model, output, rows=rows)

    def _applied(self, model: nn.Module, inputs: dict[str, Any], batch: Batch) -> Any:
        """The transform's block for a micro-batch, but for the advantages."""
        ids, attended = _whole(inputs)
        if self._graphs is not None:
            rows = Completions(ids, attended.bool(), batch.mask.shape[1], batch.group)
            return partial(self._graphs.applied, rows, temperature=self.temperature, entropy=True)
        attended = attended.bool()
        number = torch.arange(len(attended), device=attended.device)[:, None]
        return partial(
            self._transform.applied,
            self.accelerator.unwrap_model(model),
            sequences=torch.where(attended, number, -1),
            groups=batch.group,
        )

    def _present(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        batch: Batch,
        *,
        entropy: bool = False,
        aux: list[Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Batch fields of the current weights; on fresh data they are the old policy's as well.

        aux: the list that gets the router's loss of a mixture of experts
        """
        wanted = aux is not None and self.aux_loss_enabled
        fields = self._forward(model, inputs, aux=wanted, entropy=entropy)
        if "aux_loss" in fields and aux is not None:
            aux.append(fields.pop("aux_loss"))
        if batch.old_logp is None:
            fields["old_logp"] = fields["logp"].detach()
        return fields

    def _forward(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        *,
        aux: bool = False,
        entropy: bool = False,
        rows: int | None = None,
    ) -> dict[str, Tensor]:
        """Log-probabilities of a micro-batch by Batch name, and entropies where they are needed."""
        ids, attended = _whole(inputs)
        logp, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            ids,
            attended,
            inputs["completion_ids"].shape[1],
            batch_size=rows,
            compute_entropy=entropy or self._transform is None or "entropy" in self._needs,
            compute_aux_loss=aux,
            **{name: inputs[name] for name in IMAGES if name in inputs},
        )
        fields = {"logp": logp, "entropy": entropies, "aux_loss": aux_loss}
        return {name: value for name, value in fields.items() if value is not None}

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """TRL's, or the recorded pass; under a transform proxpo's: it cannot see TRL's fused head.

        Old and reference log-probabilities then come from the same code as the current ones.
        """
        graphs = self._graphs
        if graphs is not None and self.accelerator.unwrap_model(model) is graphs.policy.model:
            rows = Completions(input_ids, attention_mask.bool(), logits_to_keep)
            return self._replayed(graphs, rows, batch_size, entropy=compute_entropy)
        if self._transform is None:
            with safe_attention(input_ids.shape[1], input_ids.device) as follow:
                logp, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
                    model,
                    input_ids,
                    attention_mask,
                    logits_to_keep,
                    batch_size=batch_size,
                    compute_entropy=compute_entropy,
                    compute_aux_loss=compute_aux_loss,
                    **images,
                )
            follow(logp)
            return logp, entropies, aux_loss
        parts: list[Any] = []
        with self.accelerator.autocast():
            for rows in torch.arange(len(input_ids)).split(batch_size or len(input_ids)):
                part: Any = model_logp(  # type: ignore[call-overload]
                    model,
                    input_ids[rows],
                    attention_mask[rows, -logits_to_keep:].bool(),
                    attention_mask=attention_mask[rows],
                    temperature=self.temperature,
                    entropy=compute_entropy,
                )
                parts.append(part if compute_entropy else (part,))
        logp, *entropies = (torch.cat(columns) for columns in zip(*parts))
        return logp, entropies[0] if compute_entropy else None, None

    def _replayed(
        self, graphs: PolicyGraphs, rows: Completions, batch_size: int | None, *, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        parts = [
            graphs.fields(part, temperature=self.temperature, entropy=entropy)
            for part in rows.split(batch_size)
        ]
        logp = torch.cat([part["logp"] for part in parts])
        return logp, torch.cat([part["entropy"] for part in parts]) if entropy else None, None


def _whole(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Token ids of prompts and completions, and which of them are real."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    return ids, torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)


__all__ = ["PolicyPasses"]
