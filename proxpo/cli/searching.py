"""`proxpo compare --search`: a plan, its brackets, the confirmation and the page."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from proxpo.cli.comparing import (
    CompareOptions,
    SearchOptions,
    make_display,
    make_pool,
    request_of,
)
from proxpo.cli.reporting import write_reports
from proxpo.compare.plan import SEARCH
from proxpo.errors import ProxpoError, resolve
from proxpo.report.text import plural
from proxpo.search.halving import Runner, confirmations, run_search
from proxpo.search.page import search_space
from proxpo.search.plan import (
    NAMED,
    SearchPlan,
    SearchRequest,
    make_search,
    open_search,
    parse_budget,
)
from proxpo.search.proposals import PROPOSERS, import_optuna
from proxpo.settings import parse_setting

SEEDS = 5  # of the confirmation
FOLDER = "comparisons/search"


def run_search_command(options: CompareOptions, searched: SearchOptions) -> int:
    """Makes the search, its confirmation and its page."""
    console = Console(highlight=False, markup=False)
    options = replace(options, on=resolve(options.on, ("local", "ray"), what="place"))
    folder = Path(options.out or FOLDER)
    again = searched.budget is None and not searched.unseen and (folder / SEARCH).is_file()
    if again:
        options.refuse_description(
            f"without --budget and --unseen {folder} goes on as it was planned"
        )
        searched.refuse_unused("takes no effect: without --budget and --unseen the search goes on")
    plan = None if again else make_search(_request(options, searched))
    if plan is not None and plan.proposer == "tpe":
        import_optuna()
    pool = make_pool(options)
    with open_search(folder, plan) as (plan, state):
        space = search_space(plan)
        console.print(_announcement(plan, space.size, folder), soft_wrap=True)

        def show(heading: str):
            console.print(heading, soft_wrap=True)
            return make_display(console)

        runner = Runner(pool=pool, show=show, retry_failed=options.retry_failed)
        try:
            state = run_search(plan, state, space, folder, runner)
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on from here")
            raise
        for place in confirmations(state, folder).values():
            write_reports([str(place)], None)
        write_reports([str(folder)], None)
    return 0


def _request(options: CompareOptions, searched: SearchOptions) -> SearchRequest:
    if options.confirm is not None:
        raise ProxpoError("--confirm has no place in a search, which confirms its finalists itself")
    if searched.budget is None or not searched.unseen:
        missing = "--budget RUNS" if searched.budget is None else "--unseen KEY=VALUE"
        raise ProxpoError(f"a search needs {missing}; see proxpo compare --help")
    if not options.methods and options.study is None:
        options = replace(options, methods=NAMED)
    request = request_of(replace(options, seeds=SEEDS if options.seeds is None else options.seeds))
    own: dict[str, Any] = {
        "candidates": searched.candidates,
        "finalists": searched.finalists,
        "proposer": searched.proposals and resolve(searched.proposals, PROPOSERS, what="proposer"),
    }
    return SearchRequest(
        named=request,
        unseen=[parse_setting(text) for text in searched.unseen],
        budget=parse_budget(searched.budget),
        **{name: value for name, value in own.items() if value is not None},
    )


def _announcement(plan: SearchPlan, size: int, folder: Path) -> str:
    if plan.brackets is None:
        limit = f"{plan.budget.minutes:g} minutes"
    else:
        runs = plan.cost(len(plan.named)) + plan.brackets * plan.cost(plan.candidates)
        limit = (
            f"{plural(plan.brackets, 'bracket')} of {plural(plan.candidates, 'candidate')}, "
            f"{plural(runs, 'run')}"
        )
    lines = [
        f"search of {size:,} compositions of stages: {limit}, then at most {plan.confirmation} "
        f"runs to confirm -> {folder}",
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


__all__ = ["run_search_command"]
