"""The report of one device: readable tables, complete data, a picture beside it."""

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import index_select, outcomes, peers, suite
from benchmarks.cases import CURVE, EVERYTHING, INDEX_SELECT, IndexSelectShape
from benchmarks.ceilings import Ceilings
from benchmarks.index_select import judged
from benchmarks.outcomes import Outcome, OutcomeRow
from benchmarks.suite import (
    WIDTH,
    DeviceFigures,
    as_table,
    curve_table,
    file_name,
    measure_device,
)
from nxrt import CudaProvider
from tests.benchmarks.made_up import row

CEILINGS = Ceilings(4e12, 3e12, 8e14)
ROWS = judged([row(shape, 12_345.6, 9_876.5, "bytes only") for shape in EVERYTHING], "NVIDIA H200")
FULL = tuple(replace(found, torch_us=99_999.9, exact_us=299_999.9) for found in ROWS)
FIGURES = DeviceFigures(
    "NVIDIA H200", CEILINGS, FULL, (OutcomeRow("Gaussian", 8, 2**17, Outcome(8, 40, 0, 9)),)
)


def printed(what: object) -> str:
    console = Console(width=WIDTH)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def test_the_table_is_readable_at_its_width() -> None:
    lines = printed(as_table(FULL)).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert not any("…" in line for line in lines)
    # Nothing is wrapped.
    assert sum(line.startswith("│") for line in lines) == len(FULL)


@pytest.mark.parametrize(("median_us", "color"), [(314, "green"), (316, "red")])
def test_a_median_is_green_where_it_is_met_and_red_where_not(median_us: float, color: str) -> None:
    rows = judged([row(IndexSelectShape(64, 1, 65_536), median_us)], "NVIDIA H200")
    (cell,) = as_table(rows).columns[1].cells
    assert color in str(cell)


def test_a_median_without_a_goal_has_no_color() -> None:
    (cell,) = as_table([row(CURVE[0], 7.25)]).columns[1].cells
    assert cell == "7.2"


def test_the_curves_table_has_a_column_for_each_batch() -> None:
    text = printed(curve_table(FULL))
    assert all(f"B = {batch}" in text for batch in (1, 8, 64))
    assert "12,346 (1.25)" in text


def test_everything_is_data() -> None:
    data = json.loads(json.dumps(FIGURES.as_json()))
    assert set(data) == {"ceilings", "benchmarks", "growth", "outcomes"}
    assert len(data["benchmarks"]) == len(EVERYTHING)
    first = data["benchmarks"][0]
    assert (first["must_us"], first["is_met"], first["torch_us"]) == (10, False, 99_999.9)
    assert data["ceilings"]["read_bytes_per_s"] == 4e12
    assert data["outcomes"][0]["outcome"]["num_scored_exactly"] == 40


def test_everything_is_printed() -> None:
    console = Console(width=WIDTH)
    with console.capture() as captured:
        FIGURES.print(console)
    text = captured.get()
    assert "read 4.00 TB/s" in text
    assert "matrix 800 TFLOP/s" in text
    assert all(shape.label in text for shape in INDEX_SELECT)
    assert "Gaussian" in text
    assert "times what linear growth gives" in text


def test_the_picture_is_named_after_the_device(tmp_path: Path) -> None:
    path = FIGURES.write_picture(date(2026, 12, 1), tmp_path)
    assert path == tmp_path / "nvidia-h200-time-against-keys.svg"
    assert "NVIDIA H200; 2026-12-01; bf16" in path.read_text(encoding="utf-8")


def test_file_names_are_plain() -> None:
    assert file_name("NVIDIA H200") == "nvidia-h200"


@pytest.mark.gpu
@pytest.mark.fake
def test_a_device_is_measured_from_ceilings_to_outcomes(
    cuda_provider: CudaProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = tuple(IndexSelectShape(1, 1, num_keys, H=8, D=64, K=16) for num_keys in (96, 160))
    monkeypatch.setattr(suite, "EVERYTHING", shapes)
    monkeypatch.setattr(suite, "INDEX_SELECT", shapes[:1])
    monkeypatch.setattr(suite, "measure_ceilings", lambda _: CEILINGS)
    monkeypatch.setattr(index_select, "BUSY_NBYTES", 4096)
    monkeypatch.setattr(index_select, "REPEATS", 2)
    monkeypatch.setattr(index_select, "FEW_REPEATS", 2)
    monkeypatch.setattr(peers, "has_torch", lambda: False)
    few = list(outcomes.troubled_cases(shapes[0]))
    monkeypatch.setattr(outcomes, "outcome_cases", lambda: few[:2])
    found = measure_device(cuda_provider, Console(quiet=True))
    assert [row.case for row in found.rows] == [shape.id for shape in shapes]
    assert [row.exact_us is None for row in found.rows] == [False, True]
    assert [row.data for row in found.outcomes] == [case.data for case in few[:2]]
    json.dumps(found.as_json())
