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

from nxrt.cli import budget_options, cache, decode, doctor, plan, report
from nxrt.cli.job import Job, load_job
from nxrt.cli.memory_report import check_report_path, run_recorded
from nxrt.cli.output import Output, drop_output, progress_bar, reader_may_leave
from nxrt.cli.plan_picture import check_picture_path, write_picture
from nxrt.cli.recording import Recording
from nxrt.cli.trace import Trace, load_trace
from nxrt.errors import NxrtError
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
        typer.Option(metavar=budget_options.METAVAR, help=budget_options.HELP),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead.")] = False,
    memory_report: Annotated[
        Path | None,
        typer.Option(help="Tell what held memory when, in an .html, .svg or .jsonl file."),
    ] = None,
) -> None:
    """Decode a trace step by step, check every row, and show what was selected."""
    if memory_report is not None:
        check_report_path(memory_report)
    budgets = budget_options.parse_budgets(budget or [])
    loaded = load_job(job, provider=provider, top_k=top_k, budgets=budgets)
    trace = load_trace(loaded.trace_path)
    result = _run_shown(loaded, trace, job.name, memory_report)
    with reader_may_leave():
        if as_json:
            typer.echo(json.dumps(report.as_data(result), indent=2))
        else:
            report.render(result, trace, Output())
        sys.stdout.flush()
    if not result.rows_equal.all():
        raise typer.Exit(1)


def _run_shown(
    job: Job, trace: Trace, title: str, memory_report: Path | None
) -> decode.DecodeResult:
    """Run a job with a bar that shows where it is."""
    with progress_bar() as progress:
        task = progress.add_task("open", total=trace.num_steps)

        def show(state: decode.Progress) -> None:
            progress.update(
                task, description=state.phase, completed=state.done, total=state.total
            )  # fmt: skip

        def run(recording: Recording) -> decode.DecodeResult:
            return decode.run_decode(job, trace, show, recording)

        return run_recorded(run, title, memory_report)


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
        typer.Option(metavar=f"FILE.toml|{budget_options.METAVAR}", help=budget_options.HELP),
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
