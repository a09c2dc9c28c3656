"""`proxpo report`: draw a comparison again, or compare runs wherever they were made."""

from pathlib import Path

from rich.console import Console

from proxpo.errors import ProxpoError


def write_reports(paths: list[str], out: str | None) -> None:
    """One comparison is drawn in its own folder, loose runs in `out`."""
    try:
        from proxpo.report.analysis import analyse
        from proxpo.report.comparison_report import gather, write_report
        from proxpo.report.findings import caveats, claims, heading, ranking_lines, warnings
    except ModuleNotFoundError as error:
        raise ProxpoError(
            f"reports need {error.name}: pip install 'proxpo[train]'; the runs are complete, and "
            "proxpo report draws them"
        ) from None

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    comparison = gather(paths, Path(out or "report"))
    analysis = analyse(comparison)
    page = write_report(analysis, Path(out) if out else comparison.folder)
    lines = [
        *((line, "bold") for line in warnings(analysis)),
        (heading(analysis), ""),
        *((line, "") for line in (*ranking_lines(analysis), *claims(analysis))),
        *((line, "dim") for line in (*caveats(analysis), *analysis.notes)),
    ]
    for line, style in lines:
        console.print(line, style=style)
    console.print(f"report: {page}")


__all__ = ["write_reports"]
