"""Checks of compiled models, a script: the compiler does not follow the tests' type checks."""

import torch
from models import Tiny, hf, nll, padded
from torch import Tensor
from torch.testing import assert_close

from proxpo.gradients import isopo

A = torch.tensor([1.0, -0.6, 0.3]).double()
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def check_blocks() -> None:
    """The block is seen, its gradients are right, and nothing of it stays behind."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Tiny().double()
    ids, seq = padded([5, 7, 4], 13)
    graphs = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(model, backend=counting)

    def plain(run) -> dict[str, Tensor]:
        model.zero_grad()
        nll(run(ids, seq), ids, seq).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    def treated(run, wrapped, transform) -> dict[str, Tensor]:
        model.zero_grad()
        with transform.applied(wrapped, sequences=seq, advantages=A):
            nll(run(ids, seq), ids, seq).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    want, reinforced = treated(model, model, isopo(overlap="all")), plain(model)
    assert_close(plain(compiled), reinforced, **EXACT)
    transform = isopo(overlap="all")
    # Compiled before the block: the old graph must not be used in it, nor the new one after it.
    assert_close(treated(compiled, compiled, transform), want, **EXACT)
    assert_close(plain(compiled), reinforced, **EXACT)
    before = graphs
    for _ in range(2):
        assert_close(treated(compiled, compiled, transform), want, **EXACT)
        transform.step()
    assert graphs == before > 1, "the second block compiled everything again"
    assert set(transform.state_dict()) - {"steps"} == {
        f"average.{name}/F" for name, _ in model.named_parameters()
    }


def check_one_graph(kind: str) -> None:
    """A model under the transform is one graph, forward and backward."""
    torch._dynamo.reset()
    model = hf(kind)
    ids, seq = padded([5, 7, 4], 50)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def gradients(run) -> dict[str, Tensor]:
        model.zero_grad()
        with isopo(overlap="all", r=-1.0).applied(run, sequences=seq, advantages=A):
            nll(run(ids, use_cache=False).logits, ids, seq).sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    assert_close(gradients(compiled), gradients(model), **EXACT)


if __name__ == "__main__":
    check_blocks()
    for kind in ("llama", "gpt2"):
        check_one_graph(kind)
