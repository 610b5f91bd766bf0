"""`nxrt doctor`: what this machine has, what is missing, and what to do about it.

Looking is done by `nxrt.runtime.environment`; here is what a person sees.
"""

import platform
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nxrt.runtime.environment import Finding

READY, CPU_ONLY, UNUSABLE = 0, 1, 2


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 0 where CUDA can be used, 1 where only the CPU can, 2 where nothing can."""
    missing = {finding.needed_for for finding in findings if not finding.is_ok}
    if "cpu" in missing:
        return UNUSABLE
    return CPU_ONLY if "cuda" in missing else READY


def render(findings: Sequence[Finding], console: Console) -> None:
    """Print one line for each finding, then the verdict."""
    title = f"nxrt doctor, Python {platform.python_version()}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        mark = Text("ok", "green") if finding.is_ok else Text("--", "yellow")
        text = Text(finding.found)
        if not finding.is_ok and finding.remedy:
            text.append(f"\n→ {finding.remedy}", "cyan")
        table.add_row(mark, finding.subject, text)
    console.print(table)
    verdicts = {
        READY: "CUDA kernels can be compiled and run here.",
        CPU_ONLY: "The CPU provider works here; the lines marked -- say what CUDA needs.",
        UNUSABLE: "nxrt cannot run here until the lines marked -- are mended.",
    }
    console.print(verdicts[exit_code(findings)])
