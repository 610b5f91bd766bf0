"""nxrt's own kernels on the fake driver: their sources, run on the host by tests/emulator."""

from functools import cache
from pathlib import Path
from typing import Any

from nxrt.kernels.dsa_index_select.cuda import SOURCE, compile_unit
from nxrt.kernels.dsa_index_select.spec import FLOAT_DTYPES
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.source import KernelSource
from nxrt.runtime.error_latch import SOURCE as LATCH_SOURCE
from nxrt.tensor import DType
from tests.helpers.emulated import EmulatedModule
from tests.helpers.fake_driver import ILLEGAL_ADDRESS, OK, FakeDriver, value_of

FAKE_ARCH = "sm_90a"
SCORE = "dsa_index_select_score"
SELECT = "dsa_index_select_select"
LATCH_ADVANCE = "nxrt_latch_advance"
LATCH_TAKE = "nxrt_latch_take"

_BUILT = Path(__file__).parents[2] / ".pytest_cache" / "emulator"

Defines = tuple[tuple[str, str], ...]
_assumed: list[Defines] = []


@cache
def _defines_of_images() -> dict[bytes, Defines]:
    """Return what each cubin of DsaIndexSelect was compiled with; the compiler is deterministic."""
    found = {}
    for dtype in FLOAT_DTYPES:
        unit = compile_unit(dtype)
        options = CompileOptions(FAKE_ARCH, unit.defines, unit.flags)
        found[Compiler().compile(KernelSource.load(unit.path), options).cubin] = unit.defines
    return found


def take_every_image_for(dtype: DType) -> None:
    """Compile nothing to tell dtypes apart, in a process that runs kernels of one."""
    _assumed.append(compile_unit(dtype).defines)


def _defines_of(image: bytes) -> Defines:
    return _assumed[-1] if _assumed else _defines_of_images()[image]


@cache
def emulated(source: Path, defines: Defines = ()) -> EmulatedModule:
    """Return a source's kernels for the host, built once."""
    return EmulatedModule(source, defines, _BUILT)


class EmulatedKernels:
    """Run the kernels of one source where the double launches them.

    Args:
        fake: the double.
        source: the .cu file.
        has_variants: whether the launched code tells what the source was compiled with.
    """

    def __init__(self, fake: FakeDriver, source: Path, *, has_variants: bool) -> None:
        self._fake = fake
        self._source = source
        self._has_variants = has_variants

    def register(self) -> None:
        """Register every entry point of the source."""
        if self._has_variants and not _assumed:
            _defines_of_images()  # compiling may call the driver: not inside a launch
        defines = compile_unit(FLOAT_DTYPES[0]).defines if self._has_variants else ()
        module = emulated(self._source, defines)
        for name in module.names:
            self._register(name, module.letters(name))

    def _register(self, name: str, letters: str) -> None:
        def run(params: Any, grid: Any, block: Any, shared_nbytes: int) -> int:
            if not self._are_pointers_live(params, letters):
                return ILLEGAL_ADDRESS
            self._module().launch(name, params, grid, block, shared_nbytes)
            return OK

        self._fake.register_launcher(name, letters.replace("P", "Q"), run)

    def _module(self) -> EmulatedModule:
        if not self._has_variants:
            return emulated(self._source)
        return emulated(self._source, _defines_of(self._fake.running_image()))

    def _are_pointers_live(self, params: Any, letters: str) -> bool:
        """Say whether each begins in a live block; how far it may go the blocks' guards tell."""
        pointers = [value_of(params[i], "Q") for i, letter in enumerate(letters) if letter == "P"]
        return all(self._fake.is_usable(pointer, 1) for pointer in pointers if pointer)


def register_all(fake: FakeDriver) -> None:
    """Register every kernel of nxrt."""
    Compiler().version  # noqa: B018  (loads NVRTC, which calls the driver: not inside a launch)
    EmulatedKernels(fake, SOURCE, has_variants=True).register()
    EmulatedKernels(fake, LATCH_SOURCE, has_variants=False).register()
