"""`proxpo report`: redraws a comparison, or compares runs of proxpo, TRL and verl."""

from pathlib import Path

from rich.console import Console

from proxpo.errors import ProxpoError


def write_reports(paths: list[str], out: str | None) -> None:
    """Writes the report of one comparison to its own folder, of single runs to `out`."""
    try:
        from proxpo.report.analysis import analyse
        from proxpo.report.comparison_report import gather_runs, write_report
        from proxpo.report.findings import (
            caveats,
            claims,
            ranking_heading,
            ranking_lines,
            setting_warnings,
        )
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
        *((line, "") for line in (*ranking_lines(analysis), *claims(analysis))),
        *((line, "dim") for line in (*caveats(analysis), *analysis.notes)),
    ]
    for line, style in lines:
        console.print(line, style=style)
    console.print(f"report: {page}")


__all__ = ["write_reports"]
