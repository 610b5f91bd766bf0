"""What the driver does not load is compiled anew once, and then it is an error that says why."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from nxrt import CompileError, DriverError
from nxrt.runtime import code_loading
from nxrt.runtime.code_loading import UNLOADABLE_CODES, load_module
from nxrt.runtime.compilation.compile_cache import CompileCache
from nxrt.runtime.compilation.compiler import CompileOptions
from nxrt.runtime.device import Device
from tests.helpers.cache_processes import OPTIONS, StubCompiler, code_of, source_of

DEVICE = cast("Device", None)


@dataclass
class FakeLoader:
    """Stand in for Module: refuse as often as it is told."""

    codes: list[int]
    call: str = "cuModuleLoadData"
    images: list[bytes] = field(default_factory=list)

    def __call__(self, _: Device, image: bytes) -> Any:
        self.images.append(image)
        if self.codes:
            code = self.codes.pop(0)
            raise DriverError(code=code, name=f"E{code}", call=self.call, explanation="no")
        return "module"


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(StubCompiler(tmp_path / "journal", 0), tmp_path / "cache")


def loader(monkeypatch: pytest.MonkeyPatch, *codes: int) -> FakeLoader:
    made = FakeLoader(list(codes))
    monkeypatch.setattr(code_loading, "Module", made)
    monkeypatch.setattr(code_loading, "_driver_version", lambda: "12.9")
    return made


def load(cache: CompileCache, options: CompileOptions = OPTIONS) -> Any:
    return load_module(DEVICE, cache, source_of("text"), options)


@pytest.mark.parametrize("code", sorted(UNLOADABLE_CODES))
def test_code_that_is_refused_is_compiled_anew_and_loaded(
    cache: CompileCache,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = loader(monkeypatch, code)
    with caplog.at_level(logging.WARNING):
        assert load(cache) == "module"
    assert made.images == [code_of("text")] * 2
    stats = cache.stats
    assert (stats.compilations, stats.rejected_entries, stats.quarantined_entries) == (2, 1, 1)
    assert len(caplog.records) == 1
    assert "the driver does not load it" in caplog.text


def test_an_entry_on_disk_that_is_refused_is_replaced(
    cache: CompileCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.get(source_of("text"), OPTIONS)
    later = CompileCache(StubCompiler(tmp_path / "journal", 0), tmp_path / "cache")
    loader(monkeypatch, 200)
    assert load(later) == "module"
    assert (later.stats.disk_hits, later.stats.compilations) == (1, 1)
    last = CompileCache(StubCompiler(tmp_path / "journal", 0), tmp_path / "cache")
    assert last.fetch(source_of("text"), OPTIONS).origin == "disk"


def test_code_that_is_refused_twice_is_one_error_with_its_cause(
    cache: CompileCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = loader(monkeypatch, 209, 209, 209)
    with pytest.raises(CompileError) as failure:
        load(cache)
    assert len(made.images) == 2
    assert isinstance(failure.value.__cause__, DriverError)
    assert "E209" in failure.value.log
    assert "NVRTC is 13.0, the driver is for CUDA 12.9" in failure.value.remedy
    assert not list((tmp_path / "cache").glob("*.cubin"))


def test_ptx_that_is_too_new_says_what_to_do(
    cache: CompileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader(monkeypatch, 222, 222)
    with pytest.raises(CompileError) as failure:
        load(cache, CompileOptions("sm_90a", artefact="ptx"))
    for part in ("13.0", "12.9", "update the driver", "nvidia-cuda-nvrtc==12.9.*", "cubin"):
        assert part in failure.value.remedy


@pytest.mark.parametrize("code", [2, 201, 700, 999])
def test_other_refusals_are_not_the_codes_fault(
    cache: CompileCache, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    loader(monkeypatch, code)
    with pytest.raises(DriverError):
        load(cache)
    assert (cache.stats.compilations, cache.stats.rejected_entries) == (1, 0)
    assert cache.fetch(source_of("text"), OPTIONS).origin == "memory"


def test_a_refusal_by_another_call_is_not_the_codes_fault(
    cache: CompileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader(monkeypatch, 222).call = "cuCtxPushCurrent"
    with pytest.raises(DriverError):
        load(cache)
    assert cache.stats.rejected_entries == 0
