"""`proxpo report`: redraws a comparison, or compares runs of proxpo, TRL and verl."""

from pathlib import Path

from rich.console import Console

from proxpo.compare.plan import SEARCH
from proxpo.errors import ProxpoError


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
        raise ProxpoError(
            f"reports need {error.name}: pip install 'proxpo[train]'; the runs are complete, and "
            "proxpo report draws them"
        ) from None

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    comparison = gather_runs(paths, Path(out or "report"))
    analysis = analyse(comparison)
    page = write_report(analysis, Path(out) if out else comparison.folder)
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
