"""The formulas of ISOPO and ISOPO-NTK, obviously right and slow.

Every position gradient is one autograd call on one module with the other positions' gradients set
to zero; lengths and kernels are loops over materialised gradients.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def position_gradients(
    model: nn.Module, objective: Callable[[], Tensor], positions: int
) -> dict[str, Tensor]:
    """G_t by parameter name, positions first; calls of one module follow one another."""
    calls: dict[str, list] = {}
    handles = []

    def record(name: str):
        def hook(module, args, kwargs, output):
            entry = {"args": args, "kwargs": kwargs, "grad": None}
            calls.setdefault(name, []).append(entry)
            if isinstance(output, tuple):  # routers: logits, scores, indices
                output = output[1]
            output.register_hook(lambda grad: entry.__setitem__("grad", grad))

        return hook

    modules = {
        name: module
        for name, module in model.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    }
    for name, module in modules.items():
        handles.append(module.register_forward_hook(record(name), with_kwargs=True))
    objective().backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    collected: dict[str, list[Tensor]] = {}
    for name, entries in calls.items():
        for entry in entries:
            for own, value in _of_call(modules[name], entry, positions).items():
                collected.setdefault(f"{name}.{own}", []).append(value)
    return {name: torch.cat(parts) for name, parts in collected.items()}


def _of_call(module: nn.Module, entry: dict, positions: int) -> dict[str, Tensor]:
    own = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
    detach = lambda x: x.detach() if isinstance(x, Tensor) else x  # noqa: E731
    args = tuple(map(detach, entry["args"]))
    kwargs = {key: detach(value) for key, value in entry["kwargs"].items()}
    with torch.enable_grad():
        output = module(*args, **kwargs)
    if isinstance(output, tuple):
        output = output[1]
    grad = entry["grad"]
    if grad.dim() == 4 and grad.shape[0] * grad.shape[1] != positions:
        # Heads before positions: batch, head, place, width.
        output, grad = output.transpose(1, 2), grad.transpose(1, 2)
    out: dict[str, list[Tensor]] = {name: [] for name in own}
    for t in range(positions):
        only = torch.zeros_like(grad).reshape(positions, -1)
        only[t] = grad.reshape(positions, -1)[t]
        only = only.view(output.shape)
        grads = torch.autograd.grad(output, list(own.values()), only, retain_graph=True)
        for name, collected in zip(own, grads):
            out[name].append(collected)
    return {name: torch.stack(parts) for name, parts in out.items()}


def sequence_gradients(grads: Tensor, seq: Tensor, count: int) -> Tensor:
    """V_i = Σ_{t in i} G_t."""
    return torch.stack([grads[seq == i].sum(0) for i in range(count)])


def lengths(grads: Tensor, sums: Tensor, overlap_set: Tensor) -> tuple[Tensor, Tensor]:
    """F_i and N_i from materialised gradients."""
    flat, v = grads.flatten(1), sums.flatten(1)
    scale = torch.sqrt(sum(flat[j] @ flat[j] for j in overlap_set))
    f = [torch.sqrt(sum((vi @ flat[j]) ** 2 for j in overlap_set)) / scale for vi in v]
    return torch.stack(f), v.norm(dim=1)


def reg2(x: Tensor, rho: float, mean: Tensor | float, eps: float, keep_small: bool) -> Tensor:
    if keep_small:
        return torch.sqrt((x**2 + eps) / (rho * mean) + 1)
    return torch.sqrt(x**2 + rho * mean + eps)


def isopo(
    grads: Tensor,
    seq: Tensor,
    advantages: Tensor,
    overlap_set: Tensor,
    *,
    p: float = -1.0,
    q: float = 0.0,
    r: float = 0.0,
    reg: float = 0.0,
    overlap_reg: float | None = None,
    norm_reg: float | None = None,
    rel_overlap_reg: float | None = None,
    eps: float = 1e-8,
    keep_small: bool = False,
) -> Tensor:
    """U = Σ_i A_i s_i V_i in the first mini-batch, where E is the mean of the micro-batch."""
    sums = sequence_gradients(grads, seq, len(advantages))
    if not grads[seq >= 0].any():
        return torch.zeros_like(sums[0])
    f, n = lengths(grads, sums, overlap_set)
    ratio = torch.where(n > 0, f / n, 0.0)
    s = torch.ones_like(f)
    for x, exponent, own in ((f, p, overlap_reg), (n, q, norm_reg), (ratio, r, rel_overlap_reg)):
        if exponent:
            rho = reg if own is None else own
            s = s * reg2(x, rho, (x**2).mean(), eps, keep_small) ** exponent
    return sum(a * si * v for a, si, v in zip(advantages, s, sums) if v.any())


def ntk(
    grads: Tensor, seq: Tensor, advantages: Tensor, *, rho: float = 1.0, scale: str = "c"
) -> Tensor:
    """The parameter-space solve (JᵀJ + cI)⁻¹ Jᵀ A of section 3, with J materialised."""
    v = sequence_gradients(grads, seq, len(advantages)).flatten(1)
    c = rho * (v @ v.T).diagonal().mean()
    if c == 0:
        return torch.zeros_like(grads[0])
    if v.shape[1] > 400:  # too large for parameter space: the same step in the space of sequences
        solved = v.T @ torch.linalg.solve(
            v @ v.T + c * torch.eye(len(v), dtype=v.dtype), advantages
        )
    else:
        eye = torch.eye(v.shape[1], dtype=v.dtype)
        solved = torch.linalg.solve(v.T @ v + c * eye, v.T @ advantages)
    return (c * solved if scale == "c" else solved).view(grads.shape[1:])
