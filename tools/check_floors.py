"""Check the architecture's floors: imports point down only, files and functions stay short.

It reads the source with `ast` and imports none of it. Run it as `python -m tools.check_floors`.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Floor:
    """State one row of the architecture's table; every list is separated by spaces.

    Args:
        name: as other rows refer to it.
        files: patterns, relative to nxrt/.
        floors: what may be imported, this floor included where its files may import each other.
        packages: what may be imported besides nxrt and the standard library.
        never: modules that may not be imported by name although their floor may.
    """

    name: str
    files: str
    floors: str
    packages: str
    never: str = ""


FLOORS = (
    Floor("0", "errors.py locks.py storage.py tensor.py graph.py", floors="0", packages="numpy"),
    Floor("1", "memory/*.py", floors="0 1", packages="numpy pydantic"),
    Floor(
        "2",
        "runtime/*.py runtime/compilation/*.py",
        floors="0 1 2",
        packages="numpy filelock cuda.pathfinder",
        never="nxrt.memory.governor nxrt.memory.state_group",
    ),
    Floor(
        "3",
        "kernels/__init__.py kernels/api.py kernels/registry.py kernels/numerics.py"
        " kernels/*/__init__.py kernels/*/spec.py kernels/*/reference.py kernels/*/records.py"
        " kernels/*/cpu.py kernels/*/score_bounds.py kernels/*/filter_layout.py"
        " kernels/*/prefill/__init__.py kernels/*/prefill/prefill_layout.py",
        floors="0 3",
        packages="numpy ml_dtypes",
    ),
    Floor(
        "4",
        "kernels/*/cuda.py kernels/*/buffers.py kernels/*/routes.py kernels/*/prefill_route.py",
        floors="0 1 2 3 4",
        packages="numpy ml_dtypes",
    ),
    Floor(
        "5-cpu",
        "providers/__init__.py providers/base.py providers/create.py providers/cpu.py",
        floors="0 1 3 5-cpu",
        packages="numpy",
    ),
    Floor("5", "providers/*.py", floors="0 1 2 3 4 5-cpu 5", packages="numpy"),
    Floor(
        "6",
        "__init__.py __main__.py binding.py graph_cache.py placement.py ready_node.py session.py"
        " interop.py onnx.py testing.py cli/*.py planning/*.py",
        floors="0 1 2 3 4 5-cpu 5 6",
        packages="lazy_loader numpy ml_dtypes pydantic",
    ),
)
"""A file stands on the first floor that names it. On floors 3 and 4 an operator's folder may not
import from another operator's folder."""

ONLY_HERE = {
    "__init__.py": "lazy_loader",
    "runtime/driver.py": "cuda.bindings",
    "memory/metrics.py": "prometheus_client",
    "cli/*.py": "typer rich",
}
"""Packages that these files may import besides those of their floor."""

MAX_LINES = {".py": 400, ".cu": 500, ".cuh": 500}
MEASURED_FOLDERS = ("nxrt", "tests", "tools", "benchmarks")
MAX_FUNCTION_LINES = 40
"""From `def` to the end, without the docstring; for functions of nxrt/."""

_NAMESPACE_PACKAGES = ("cuda",)

_AnyFunction: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_AnyImport: TypeAlias = ast.Import | ast.ImportFrom


@dataclass(frozen=True)
class Violation:
    """Say what is wrong where; reads as `path:line: message`."""

    path: PurePosixPath
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def main(root: Path = ROOT) -> int:
    """Print every violation under a root; return 1 where there is one."""
    files = measured_files(root)
    violations = [violation for path in files for violation in check_file(root, path)]
    for violation in violations:
        print(violation)
    print(f"{len(files)} files, {len(violations)} violations")
    return 1 if violations else 0


def measured_files(root: Path) -> list[PurePosixPath]:
    """Return the files that have a size limit, relative to the root."""
    return sorted(
        PurePosixPath(path.relative_to(root))
        for folder in MEASURED_FOLDERS
        for path in (root / folder).rglob("*")
        if path.suffix in MAX_LINES
    )


def check_file(root: Path, path: PurePosixPath) -> list[Violation]:
    """Return what one file violates, in the order of its lines."""
    content = (root / path).read_bytes()
    found = list(check_length(path, content))
    if path.parts[0] == "nxrt" and path.suffix == ".py":
        try:
            tree = ast.parse(content)
        except SyntaxError as error:
            return [*found, Violation(path, error.lineno or 1, f"does not parse: {error.msg}")]
        found += check_imports(root, path, tree)
        found += check_functions(path, tree)
    # Two names from one module are one violation.
    return sorted(dict.fromkeys(found), key=lambda violation: violation.line)


def check_length(path: PurePosixPath, content: bytes) -> Iterator[Violation]:
    """Yield a violation where a file has too many lines."""
    num_lines = len(content.splitlines())
    limit = MAX_LINES[path.suffix]
    if num_lines > limit:
        yield Violation(path, limit + 1, f"{num_lines} lines; {limit} is the limit: split the file")


def check_functions(path: PurePosixPath, tree: ast.Module) -> Iterator[Violation]:
    """Yield a violation for every function that is too long."""
    for node in ast.walk(tree):
        if not isinstance(node, _AnyFunction):
            continue
        num_lines = _span(node) - _docstring_span(node)
        if num_lines > MAX_FUNCTION_LINES:
            message = f"{node.name}() has {num_lines} lines; {MAX_FUNCTION_LINES} is the limit"
            yield Violation(path, node.lineno, message)


def _span(node: ast.stmt) -> int:
    assert node.end_lineno is not None  # the parser always sets it
    return node.end_lineno - node.lineno + 1


def _docstring_span(node: _AnyFunction) -> int:
    return 0 if ast.get_docstring(node) is None else _span(node.body[0])


def check_imports(root: Path, path: PurePosixPath, tree: ast.Module) -> Iterator[Violation]:
    """Yield a violation for every import that the rules refuse, and for a file without a floor."""
    floor = floor_of(path)
    if floor is None:
        message = "no floor: say in tools/check_floors.py which floor it belongs to"
        yield Violation(path, 1, message)
    for statement, is_in_function in _imports(tree):
        if is_in_function:
            message = "import inside a function: move it to the top of the file"
            yield Violation(path, statement.lineno, message)
        for message in _refusals(root, path, floor, statement):
            yield Violation(path, statement.lineno, message)


def floor_of(path: PurePosixPath) -> Floor | None:
    """Return the floor a file stands on, None where no rule places it."""
    for floor in FLOORS:
        if _is_any(path, floor.files):
            return floor
    return None


def _is_any(path: PurePosixPath, patterns: str) -> bool:
    return any(path.match(f"nxrt/{pattern}") for pattern in patterns.split())


def _imports(node: ast.AST, is_in_function: bool = False) -> Iterator[tuple[_AnyImport, bool]]:
    """Yield each import and whether it waits for a call; one for types alone waits for nothing."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _AnyImport):
            yield child, is_in_function
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            yield from _imports(ast.Module(child.body, []))
            yield from _imports(ast.Module(child.orelse, []), is_in_function)
        else:
            yield from _imports(child, is_in_function or isinstance(child, _AnyFunction))


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _refusals(
    root: Path, path: PurePosixPath, floor: Floor | None, statement: _AnyImport
) -> Iterator[str]:
    if isinstance(statement, ast.ImportFrom) and statement.level > 0:
        yield "relative import: write the module's full name"
        return
    if any(alias.name == "*" for alias in statement.names):
        yield "import *: name what is needed"
    for module, name in _modules(statement):
        if module.split(".")[0] == "nxrt":
            yield from _nxrt_refusal(root, path, floor, module, name)
        else:
            yield from _package_refusal(path, floor, module, name)


def _modules(statement: _AnyImport) -> list[tuple[str, str]]:
    """Return (module, imported name); the name is empty in `import module`."""
    if isinstance(statement, ast.Import):
        return [(alias.name, "") for alias in statement.names]
    return [(statement.module or "", alias.name) for alias in statement.names]


def _nxrt_refusal(
    root: Path, path: PurePosixPath, floor: Floor | None, module: str, name: str
) -> Iterator[str]:
    target = _module_file(root, f"{module}.{name}") or _module_file(root, module)
    if target is None:
        yield f"there is no module {module}"
        return
    target_floor = floor_of(target)
    if floor is None or target_floor is None:
        return  # reported at the file that has no floor
    dotted = _dotted(target)
    allowed = floor.floors.split()
    if target_floor.name not in allowed:
        climb = f"{dotted} (floor {target_floor.name})"
        yield f"floor {floor.name} may not import {climb}, only floors {', '.join(allowed)}"
    elif dotted in floor.never.split():
        yield f"floor {floor.name} may not import {dotted} by name"
    elif path.parts[1] == "kernels" and _operator(target) not in ("", _operator(path)):
        yield f"{dotted} belongs to another operator"


def _module_file(root: Path, module: str) -> PurePosixPath | None:
    stem = PurePosixPath(*module.split("."))
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if (root / path).is_file():
            return path
    return None


def _dotted(path: PurePosixPath) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _operator(path: PurePosixPath) -> str:
    return path.parts[2] if path.match("nxrt/kernels/*/*.py") else ""


def _package_refusal(
    path: PurePosixPath, floor: Floor | None, module: str, name: str
) -> Iterator[str]:
    package = f"{module}.{name}" if name and module in _NAMESPACE_PACKAGES else module
    if floor is None or package.split(".")[0] in sys.stdlib_module_names:
        return
    allowed = floor.packages.split()
    for pattern, packages in ONLY_HERE.items():
        if _is_any(path, pattern):
            allowed += packages.split()
        elif _is_within(package, packages):
            yield f"only nxrt/{pattern} may import {package}"
            return
    if not _is_within(package, " ".join(allowed)):
        yield f"floor {floor.name} may not import {package}, only {', '.join(allowed)}"


def _is_within(package: str, packages: str) -> bool:
    return any(f"{package}.".startswith(f"{allowed}.") for allowed in packages.split())


if __name__ == "__main__":
    sys.exit(main())
