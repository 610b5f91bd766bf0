"""The key of compiled code: the digest of everything that decides its bytes, and of nothing else.

A path does not, the order of definitions does not, and neither does what was compiled before.
"""

import hashlib
from collections.abc import Iterable

from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.source import KernelSource

KEY_VERSION = 3
"""Raised with every change of the key, of an entry's layout, or of how NVRTC is called."""


def cache_key(source: KernelSource, options: CompileOptions, compiler: Compiler) -> str:
    """Return the key in hex.

    Raises:
        CompileError: NVRTC is missing, or a header cannot be used.
    """
    digest = hashlib.sha256()
    for group in (
        (f"nxrt-compile-cache-{KEY_VERSION}", compiler.identity),
        (options.artefact, options.arch),
        (source.name, source.text),
        _flat(source.headers),
        _flat(compiler.header_bytes(source, options)),
        _flat(sorted(options.defines)),
        options.flags,
    ):
        fields = [field if isinstance(field, bytes) else field.encode() for field in group]
        # With count and lengths no two inputs run together to the same bytes.
        digest.update(len(fields).to_bytes(8, "little"))
        for field in fields:
            digest.update(len(field).to_bytes(8, "little"))
            digest.update(field)
    return digest.hexdigest()


def _flat(pairs: Iterable[tuple[str, str | bytes]]) -> list[str | bytes]:
    return [part for pair in pairs for part in pair]
