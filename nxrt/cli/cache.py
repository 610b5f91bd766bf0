"""`nxrt cache`: fill the compile cache ahead of time, look at it, check it, empty it.

What the cache is and how it is kept is `nxrt.runtime`'s; here is what a person asks and sees.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from nxrt.cli.output import Output, progress_bar, reader_may_leave
from nxrt.cli.sizes import size_text
from nxrt.errors import JobError
from nxrt.kernels.api import CompileUnit
from nxrt.providers.cuda import all_compile_units
from nxrt.runtime import driver
from nxrt.runtime.compilation.cache_folder import CacheFolder
from nxrt.runtime.compilation.cache_upkeep import CheckedEntry, check_entries, clear, tidy
from nxrt.runtime.compilation.compile_cache import (
    CacheStats,
    CompileCache,
    default_cache_dir,
    default_cache_nbytes,
)
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.warm_up import WarmUpJob, WarmUpResult, usable_cores, warm_up
from nxrt.runtime.device import Device

T = TypeVar("T")

FINE, SOMETHING_IS_WRONG = 0, 1

app = typer.Typer(
    no_args_is_help=True,
    help="Fill the compile cache ahead of time, look at it, check it, empty it.",
)

_ARCH = re.compile(r"sm_\d{2,3}[af]?")
_Folder = Annotated[
    Path | None,
    typer.Option("--dir", help="The folder; NXRT_CACHE_DIR or ~/.cache/nxrt when left out."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print data instead.")]


@app.command()
def warm(
    arch: Annotated[
        list[str] | None,
        typer.Option(help="Such as sm_90a; may be repeated. Those of the devices when left out."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=256, help="How many to compile at a time.")
    ] = None,
    folder: _Folder = None,
    as_json: _Json = False,
) -> None:
    """Compile every kernel ahead of time; exit 0 if all compiled and were kept, 1 if not."""
    cache = CompileCache(
        Compiler(), _folder(folder).path, max_nbytes=default_cache_nbytes(os.environ)
    )
    todo = warm_up_jobs(all_compile_units(), arch or device_archs())
    num_workers = jobs or usable_cores()
    with progress_bar() as progress:
        task = progress.add_task("warm", total=len(todo))
        results = warm_up(
            cache, todo, num_workers=num_workers, on_done=lambda _: progress.advance(task)
        )
    with reader_may_leave():
        if as_json:
            typer.echo(json.dumps(_warm_data(results, cache), indent=2))
        else:
            _render_warm(results, cache, Output())
        sys.stdout.flush()
    is_wrong = any(result.error for result in results) or cache.stats.unwritten_entries
    raise typer.Exit(SOMETHING_IS_WRONG if is_wrong else FINE)


@app.command(name="list")
def list_command(folder: _Folder = None, as_json: _Json = False) -> None:
    """Show every entry; those that cannot be used say why."""
    place = _folder(folder)
    checked = _checked(place)
    with reader_may_leave():
        if as_json:
            typer.echo(json.dumps([_entry_data(entry) for entry in checked], indent=2))
        else:
            _render_entries(checked, place, Output())
        sys.stdout.flush()


@app.command()
def verify(
    folder: _Folder = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Move what is not usable into quarantine.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Check the digest of every entry; exit 0 if all are whole, 1 if one was not."""
    place = _folder(folder)
    checked = _checked(place)
    bad = [entry for entry in checked if entry.problem]
    if remove:
        for entry in bad:
            place.quarantine(entry.file.name)
        _looked(place, tidy, 0)
    with reader_may_leave():
        if as_json:
            data = {"checked": len(checked), "bad": [_entry_data(entry) for entry in bad]}
            typer.echo(json.dumps(data, indent=2))
        else:
            for entry in bad:
                typer.echo(f"{entry.file.name}: {entry.problem}")
            removed = ", moved into quarantine" if remove and bad else ""
            typer.echo(f"{len(checked)} entries checked, {len(bad)} not usable{removed}")
        sys.stdout.flush()
    raise typer.Exit(SOMETHING_IS_WRONG if bad else FINE)


@app.command(name="clear")
def clear_command(folder: _Folder = None, as_json: _Json = False) -> None:
    """Remove every file of the cache's own; nothing else in the folder is touched."""
    place = _folder(folder)
    num_removed, nbytes = _looked(place, clear, (0, 0))
    with reader_may_leave():
        if as_json:
            typer.echo(json.dumps({"removed": num_removed, "nbytes": nbytes}))
        else:
            typer.echo(f"{num_removed} files removed from {place.path}, {size_text(nbytes)}")
        sys.stdout.flush()


def warm_up_jobs(units: Sequence[CompileUnit], archs: Sequence[str]) -> list[WarmUpJob]:
    """Return every unit for every architecture, each once.

    Raises:
        JobError: something is not an architecture.
    """
    for arch in archs:
        if not _ARCH.fullmatch(arch):
            raise JobError("--arch", found=repr(arch), accepted="a real architecture: sm_90a")
    return [
        WarmUpJob(unit.path, CompileOptions(arch, unit.defines, unit.flags, unit.artefact))
        for unit in units
        for arch in dict.fromkeys(archs)
    ]


def device_archs() -> list[str]:
    """Return the architectures of this machine's devices.

    Raises:
        JobError: there is none.
    """
    status = driver.probe()
    if not status.is_available:
        raise JobError(
            "--arch",
            found=f"no device to take it from ({status.reason})",
            accepted="--arch sm_90a, which may be repeated",
        )
    archs = []
    for ordinal in range(status.num_devices):
        device = Device(ordinal)
        archs.append(device.capabilities.arch)
        device.close()
    return archs


def _folder(option: Path | None) -> CacheFolder:
    path = option or default_cache_dir(os.environ)
    if path is None:
        raise JobError(
            "compile cache", found="no folder is configured", accepted="--dir, or NXRT_CACHE_DIR"
        )
    return CacheFolder(path)


def _checked(folder: CacheFolder) -> list[CheckedEntry]:
    return _looked(folder, check_entries, [])


def _looked(folder: CacheFolder, look: Callable[[CacheFolder], T], nothing: T) -> T:
    """Return what a look at the folder gives, and `nothing` where there is no folder."""
    try:
        return look(folder)
    except FileNotFoundError:
        return nothing
    except OSError as error:
        raise JobError(
            "compile cache",
            found=error.strerror or str(error),
            accepted="a folder that only you can write to",
        ) from error


def _render_warm(results: Sequence[WarmUpResult], cache: CompileCache, console: Output) -> None:
    table = _table("unit", "defines", "arch")
    table.add_column("ms", justify="right")
    table.add_column("size", justify="right")
    table.add_column("from")
    for result in results:
        origin = Text("failed", "bold red") if result.error else Text(_ORIGINS[result.origin])
        elapsed, size = f"{result.elapsed_ms:,.0f}", size_text(result.nbytes)
        table.add_row(*_described(result), elapsed, size, origin)
    console.print(table)
    for result in results:
        if result.error:
            console.print(Text(f"{' '.join(_described(result))}: {result.error}"), soft_wrap=True)
    num_failed = sum(bool(result.error) for result in results)
    num_compiled = sum(result.origin == "compiler" for result in results)
    console.print(
        f"{num_compiled} compiled, {len(results) - num_compiled - num_failed} already there,"
        f" {num_failed} failed; in {cache.directory}",
        soft_wrap=True,
    )
    if cache.stats.unwritten_entries:
        console.print(f"{cache.stats.unwritten_entries} could not be kept there")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE)
    for column in columns:
        table.add_column(column, overflow="fold")  # a name that is cut names nothing
    return table


_ORIGINS = {"compiler": "compiled", "disk": "cache", "memory": "cache"}


def _described(result: WarmUpResult) -> tuple[str, str, str]:
    options = result.job.options
    defines = " ".join(f"{name}={value}" for name, value in options.defines) or "-"
    arch = options.arch if options.artefact == "cubin" else f"{options.arch} {options.artefact}"
    return result.job.path.name, defines, arch


def _warm_data(results: Sequence[WarmUpResult], cache: CompileCache) -> dict[str, Any]:
    stats: CacheStats = cache.stats
    return {
        "folder": str(cache.directory),
        "units": [
            {
                "source": str(result.job.path),
                **asdict(result.job.options),
                "from": result.origin,
                "nbytes": result.nbytes,
                "elapsed_ms": result.elapsed_ms,
                "error": result.error,
            }
            for result in results
        ],
        "cache": asdict(stats),
    }


def _render_entries(checked: Sequence[CheckedEntry], folder: CacheFolder, console: Output) -> None:
    table = _table("source", "defines", "arch", "NVRTC")
    table.add_column("size", justify="right")
    table.add_column("age", justify="right")
    for data in map(_entry_data, checked):
        if not data["problem"]:
            texts = (data["source"], data["defines"], data["arch"], data["nvrtc"])
            size, age = size_text(data["nbytes"]), _age_text(data["age_s"])
            table.add_row(*map(Text, (*texts, size, age)))
    console.print(table)
    for data in map(_entry_data, checked):
        if data["problem"]:
            console.print(Text(f"{data['name']}: {data['problem']}"), soft_wrap=True)
    total = sum(entry.file.nbytes for entry in checked)
    console.print(f"{len(checked)} entries, {size_text(total)}, in {folder.path}", soft_wrap=True)


def _entry_data(entry: CheckedEntry) -> dict[str, Any]:
    info = entry.info
    older = "of another version of nxrt" if info is None else ""
    created = entry.file.used if info is None else info.created
    return {
        "name": entry.file.name,
        "source": "" if info is None else info.source,
        "defines": "" if info is None else info.defines,
        "arch": "" if info is None else info.arch,
        "artefact": "" if info is None else info.artefact,
        "nvrtc": "" if info is None else info.compiler,
        "nbytes": entry.file.nbytes,
        "age_s": max(0.0, time.time() - created),
        "problem": entry.problem or older,
    }


def _age_text(age_s: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= length_s:
            return f"{age_s / length_s:,.0f} {unit}"
    return f"{age_s:.0f} s"
