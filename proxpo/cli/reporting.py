"""`proxpo report`: redraws a comparison, or compares runs of proxpo, TRL and verl."""

from pathlib import Path

from rich.console import Console

from proxpo.compare.plan import PLAN, SEARCH
from proxpo.errors import ProxpoError
from proxpo.runs.jsonlines import METRICS


def write_reports(paths: list[str], out: str | None) -> None:
    """Writes the report of one comparison to its own folder, of single runs to `out`."""
    if len(paths) == 1 and (Path(paths[0]) / SEARCH).is_file():
        _write_search(Path(paths[0]), out)
        return
    try:
        from proxpo.report.analysis import analyse
        from proxpo.report.caveats import caveats, setting_warnings
        from proxpo.report.comparison_report import gather_runs, write_report
        from proxpo.report.confirmed import spoken_confirmed
        from proxpo.report.findings import ranking_heading, ranking_lines, spoken_claims
    except ModuleNotFoundError as error:
        raise ProxpoError(f"reports need {error.name}: pip install 'proxpo[train]'") from None

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    comparison = gather_runs(paths, Path(out or "report"))
    target = Path(out) if out else comparison.folder
    _check_target(target, paths)
    analysis = analyse(comparison)
    page = write_report(analysis, target)
    lines = [
        *((line, "bold") for line in setting_warnings(analysis)),
        (ranking_heading(analysis), ""),
        *((line, "") for line in (*ranking_lines(analysis), *spoken_claims(analysis))),
        *((line, "") for line in spoken_confirmed(analysis)),
        *((line, "dim") for line in (*caveats(analysis), *analysis.notes)),
    ]
    for line, style in lines:
        console.print(line, style=style)
    console.print(f"report: {page}")


def _check_target(target: Path, paths: list[str]) -> None:
    """Refuses a folder whose own summary and page the report would replace."""
    holds = ""
    if any((target / name).exists() for name in ("config.yaml", METRICS)):
        holds = "a run"
    elif (target / SEARCH).is_file():
        holds = "a search"
    elif (target / PLAN).is_file() and [Path(p).resolve() for p in paths] != [target.resolve()]:
        holds = "another comparison"
    if holds:
        raise ProxpoError(
            f"{target} holds {holds}, and a report there would replace its summary.json and "
            "report.html: choose another --out"
        )


def _write_search(folder: Path, out: str | None) -> None:
    from proxpo.search.page import write_search_page

    if out is not None:
        raise ProxpoError("the page of a search is written to its own folder: leave --out away")
    page, lines = write_search_page(folder)
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for line in lines:
        console.print(line)
    console.print(f"search: {page}")


__all__ = ["write_reports"]
