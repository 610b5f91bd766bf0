"""The `nxrt` command: its options, its exit codes, and one line for every error.

Exit codes of `run`: 0 every row is right; 1 a row differs from the oracle; 2 the job could not run;
3 a defect of nxrt's, with its traceback; 141 the reader of the output left. Of `plan`: 0 it fits;
1 it does not; 2, 3 and 141 as above. Of `cache warm` and `cache verify`: 1 something is wrong.
"""

import io
import json
import sys
import traceback
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.text import Text
except ModuleNotFoundError as error:
    print(
        f"nxrt: the command line needs {error.name}; install nxrt-driver with its extra [cli]",
        file=sys.stderr,
    )
    raise SystemExit(2) from error

from nxrt.cli import cache, decode, doctor, plan, report
from nxrt.cli.job import load_job
from nxrt.cli.output import Output, drop_output, progress_bar, reader_may_leave
from nxrt.cli.plan_picture import check_picture_path, write_picture
from nxrt.cli.trace import load_trace
from nxrt.errors import JobError, NxrtError
from nxrt.memory.budget import MemoryBudget
from nxrt.planning import planner
from nxrt.planning.geometry import load_geometry
from nxrt.runtime.environment import inspect_environment

DEFECT = 3

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Custom CUDA kernels for inference engines: run a job, or see what this machine has.",
)
app.add_typer(cache.app, name="cache")


@app.command()
def run(
    job: Annotated[Path, typer.Argument(help="A job file, such as examples/glm_decode.toml.")],
    provider: Annotated[
        str | None, typer.Option(help="auto, cuda or cpu; wins over the job file.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="How many keys to select; wins over the job file.")
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(metavar="TIER=SIZE", help="Such as device=24GiB; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead.")] = False,
) -> None:
    """Decode a trace step by step, check every row, and show what was selected."""
    loaded = load_job(job, provider=provider, top_k=top_k, budgets=_parse_budgets(budget or []))
    trace = load_trace(loaded.trace_path)
    with progress_bar() as progress:
        task = progress.add_task("open", total=trace.num_steps)

        def show(state: decode.Progress) -> None:
            progress.update(
                task, description=state.phase, completed=state.done, total=state.total
            )  # fmt: skip

        result = decode.run_decode(loaded, trace, show)
    with reader_may_leave():
        if as_json:
            typer.echo(json.dumps(report.as_data(result), indent=2))
        else:
            report.render(result, trace, Output())
        sys.stdout.flush()
    if not result.rows_equal.all():
        raise typer.Exit(1)


@app.command(name="doctor")
def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead.")] = False,
) -> None:
    """Say what was found; exit 0 with CUDA, 1 with the CPU only, 2 with neither."""
    findings = inspect_environment()
    with reader_may_leave():
        if as_json:
            typer.echo(json.dumps([vars(finding) for finding in findings], indent=2))
        else:
            doctor.render(findings, Output())
        sys.stdout.flush()
    raise typer.Exit(doctor.exit_code(findings))


@app.command(name="plan")
def plan_command(
    model: Annotated[str, typer.Option(help="A known model, or a .toml file with a geometry.")],
    context: Annotated[int, typer.Option(help="Tokens of each sequence.")],
    batch: Annotated[int, typer.Option(help="Number of sequences.")] = 1,
    budget: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.toml|TIER=SIZE", help="Such as device=24GiB; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw it too, into an .svg or .html file.")
    ] = None,
) -> None:
    """Say what a model will need before anything runs; exit 0 if it fits, 1 if it does not."""
    if picture is not None:
        check_picture_path(picture)
    limits = plan.load_budget(budget or [])
    planned = planner.plan(
        load_geometry(model),
        context=context,
        batch=batch,
        budget=limits,
        capacities=plan.measured_capacities(limits),
    )
    if picture is not None:
        write_picture(planned, picture)
    with reader_may_leave():
        if as_json:
            typer.echo(json.dumps(plan.as_data(planned), indent=2))
        else:
            plan.render(planned, Output())
        sys.stdout.flush()
    raise typer.Exit(plan.FITS if planned.fits else plan.DOES_NOT_FIT)


def _parse_budgets(options: list[str]) -> dict[str, str]:
    budgets = {}
    for option in options:
        tier, separator, size = option.partition("=")
        if not separator:
            raise JobError("--budget", found=repr(option), accepted="TIER=SIZE: device=24GiB")
        if tier not in MemoryBudget.model_fields:
            accepted = f"a tier of {', '.join(MemoryBudget.model_fields)}"
            raise JobError("--budget", found=repr(tier), accepted=accepted)
        budgets[tier] = size
    return budgets


def main() -> None:
    """Run the command; an error of nxrt's is one line on the error stream and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character gets a "?", not a traceback.
            stream.reconfigure(errors="replace")
    try:
        app()
    except NxrtError as error:
        # A message is text, not markup: it may quote anything.
        message = Text.assemble(("error: ", "bold red"), str(error))
        Console(stderr=True, soft_wrap=True).print(message)
        sys.exit(2)
    except OSError as error:
        print(f"error: {error.strerror or error}", file=sys.stderr)
        drop_output()
        sys.exit(2)
    except Exception:  # noqa: BLE001  (whatever it is: not to be mistaken for a differing row)
        traceback.print_exc()
        sys.exit(DEFECT)
