"""Whether a transform of `proxpo.gradients` is open over the head, and what it then knows."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from proxpo.errors import ProxpoError
from proxpo.gradients import Layout, Session, Site, active
from proxpo.gradients._session import Call, Unit
from proxpo.logp._head import Head, Rows
from proxpo.logp._treated import Pulled, Scored, Spot, treated
from proxpo.ops.shapes import Float, Int, Tensor


@dataclass(frozen=True)
class Treatment:
    """One call of the head under a transform."""

    sites: dict[str, Site]
    scored: Scored
    unit: Unit | None
    call: Call | None

    def pull_back(
        self,
        head: Head,
        tokens: Rows,
        sides: Mapping[str, Float[Tensor, "tok _"]],
        *,
        to_hidden: bool,
    ) -> Pulled:
        self._claim()
        spots = [Spot(self.sites[name], side) for name, side in sides.items()]
        d_hidden, outs = treated(head, tokens, spots, self.scored, to_hidden=to_hidden)
        for spot, out in zip(spots, outs):
            spot.site.send(out)
        return d_hidden, outs

    def _claim(self) -> None:
        """A sequence's gradient is one: it cannot be weighed in two calls that know half each."""
        if self.unit is None or self.call is None:
            return
        others = any(call is not self.call for call in self.unit._open[self.call.nested])
        if others or self.unit.finish(self.call, {}):
            raise ProxpoError(
                f"token_logp: {self.unit.name} is used more than once in this `applied` block;"
                " score all positions in one call, or open one block per call"
            )


def find(
    weight: Tensor, bias: Tensor | None, lead: torch.Size, index: Int[Tensor, " tok"] | None
) -> Treatment | None:
    """The treatment of trained head parameters; None outside `transform.applied(...)`."""
    trained = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    trained = {name: p for name, p in trained.items() if p.requires_grad}
    found = {name: active(p) for name, p in trained.items()} if torch.is_grad_enabled() else {}
    sites = {name: _head_site(site) for name, site in found.items() if site is not None}
    if not sites or next(iter(sites.values())).session.quiet:
        return None
    if len(sites) < len(found):
        missing = next(name for name, site in found.items() if site is None)
        raise ProxpoError(f"token_logp: the head's {missing} is not in the model of the open block")
    session = next(iter(sites.values())).session
    layout = _layout(session, lead)
    if index is not None:
        layout = layout.take(index)
    mine = set(map(id, sites.values()))
    units = [u for u in session.units if mine & set(map(id, u.sites.values()))]
    unit = units[0] if units else None
    return Treatment(sites, Scored(layout, index), unit, unit.begin(layout) if unit else None)


def _head_site(site: Site) -> Site:
    """An embedding that doubles as head, without a module of its own: a second group."""
    if not isinstance(site.module, nn.Embedding):
        return site
    return Site(site.session, site.module, f"{site.name}.head", site.attribute)


def _layout(session: Session, lead: torch.Size) -> Layout:
    """Rows of hidden states as positions of `sequences`; axes of length 1 count for nothing."""
    have, want = ([n for n in shape if n != 1] for shape in (lead, session.shape))
    if have not in (want, [session.layout.size]):
        raise ProxpoError(
            f"token_logp: hidden states of {list(lead)} positions inside an `applied` block whose"
            f" `sequences` has shape {list(session.shape)}; pass all positions and a mask"
        )
    return session.layout
