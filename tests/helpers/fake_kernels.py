"""nxrt's own kernels on the fake driver: their sources, run on the host by tests/emulator."""

from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

from nxrt.kernels.dsa_index_select.routes import EXACT_SOURCE, FILTER_SOURCE
from nxrt.providers.cuda import all_compile_units
from nxrt.runtime.compilation.compile_cache import CompileCache, Fetched
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.source import KernelSource
from tests.helpers.emulated import EmulatedModule
from tests.helpers.fake_driver import ILLEGAL_ADDRESS, OK, FakeDriver, value_of

SCORE = "dsa_index_select_score"
SELECT = "dsa_index_select_select"
FILTER = "dsa_index_select_filter"
LATCH_ADVANCE = "nxrt_latch_advance"
LATCH_TAKE = "nxrt_latch_take"

_BUILT = Path(__file__).parents[2] / ".pytest_cache" / "emulator"

Defines = tuple[tuple[str, str], ...]
Fetch = Callable[[CompileCache, KernelSource, CompileOptions], Fetched]

_defines_of_images: dict[bytes, Defines] = {}


def _remembering(fetch: Fetch) -> Fetch:
    """Note what each code was compiled with: a launch does not say it, and the code does not."""

    @wraps(fetch)
    def remember(self: CompileCache, source: KernelSource, options: CompileOptions) -> Fetched:
        found = fetch(self, source, options)
        _defines_of_images[found.code] = options.defines
        return found

    return remember


@cache
def _watch_compile_caches() -> None:
    CompileCache.fetch = _remembering(CompileCache.fetch)  # type: ignore[method-assign,assignment]


@cache
def emulated(source: Path, defines: Defines) -> EmulatedModule:
    """Return a source's kernels for the host, built once."""
    return EmulatedModule(source, defines, _BUILT)


class EmulatedKernels:
    """Run the kernels of one source where the double launches them.

    Args:
        fake: the double.
        source: the .cu file.
        defines: of any one of the source's variants, to learn its kernels' parameters.
    """

    def __init__(self, fake: FakeDriver, source: Path, defines: Defines) -> None:
        self._fake = fake
        self._source = source
        self._defines = defines

    def register(self) -> None:
        """Register every entry point of the source."""
        module = emulated(self._source, self._defines)
        for name in module.names:
            self._register(name, module.letters(name))

    def _register(self, name: str, letters: str) -> None:
        def run(params: Any, grid: Any, block: Any, shared_nbytes: int) -> int:
            if not self._are_pointers_live(params, letters):
                return ILLEGAL_ADDRESS
            defines = _defines_of_images[self._fake.running_image()]
            emulated(self._source, defines).launch(name, params, grid, block, shared_nbytes)
            return OK

        self._fake.register_launcher(name, letters.replace("P", "Q"), run)

    def _are_pointers_live(self, params: Any, letters: str) -> bool:
        """Say whether each begins in a live block; how far it may go the blocks' guards tell."""
        pointers = [value_of(params[i], "Q") for i, letter in enumerate(letters) if letter == "P"]
        return all(self._fake.is_usable(pointer, 1) for pointer in pointers if pointer)


def register_all(fake: FakeDriver) -> None:
    """Register every kernel of nxrt."""
    Compiler().version  # noqa: B018  (loads NVRTC, which calls the driver: not inside a launch)
    _watch_compile_caches()
    defines = {unit.path: unit.defines for unit in all_compile_units()}
    assert {EXACT_SOURCE, FILTER_SOURCE} <= set(defines)
    for source, some in defines.items():
        EmulatedKernels(fake, source, some).register()
