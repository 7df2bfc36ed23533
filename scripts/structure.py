"""Prints the structure of the tree: sizes of folders and modules, public names, cycles, imports of private modules, and
small modules that a single module imports (ADR 74).

    python scripts/structure.py

Exits with 1 if `hpctrain/` has a folder with more than 30 Python files, a module over 600 lines, an import cycle, or an
import from another package that is not from its `__init__`, if there are more than 250 public names, or if two modules
define a class or function of the same name.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "hpctrain"
MAX_FILES, MAX_LINES, MAX_PUBLIC_NAMES = 30, 600, 250
SMALL_LINES = 150


def public_modules() -> list[str]:
    """Returns the public packages and modules: "", which is `hpctrain` itself, and what its stub imports as a whole."""
    imports = [node for node in _parse(PACKAGE / "__init__.pyi") if isinstance(node, ast.ImportFrom)]
    return ["", *(alias.name for node in imports if node.module is None for alias in node.names)]


def public_names(module: str) -> list[str]:
    """Returns the public names of a public module.

    For a package these are the names in the `__all__` of its stub, or all names of the stub if it has no `__all__`; for
    another module, its classes and functions.
    """
    if not (PACKAGE / module).is_dir():
        kinds = (ast.ClassDef, ast.FunctionDef)
        return sorted(node.name for node in _parse(PACKAGE / f"{module}.py") if isinstance(node, kinds))
    stub = _parse(PACKAGE / module / "__init__.pyi")
    for node in stub:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    return sorted(alias.name for node in stub if isinstance(node, ast.ImportFrom) for alias in node.names)


def names_of_two_things() -> dict[str, list[str]]:
    """Returns the classes and functions without underscore that several modules define, with these modules.

    Each program has its `main`, and `hpctrain.hvd` has the names of Horovod.
    """
    horovods = {*public_names("hvd"), "State"}
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for module, path in modules().items():
        for node in _parse(path):
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or node.name.startswith("_"):
                continue
            if node.name != "main" and not (module.startswith("hpctrain.hvd") and node.name in horovods):
                found[node.name][module] = None
    return {name: list(defined) for name, defined in found.items() if len(defined) > 1}


def _parse(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text()).body


def modules() -> dict[str, Path]:
    """Returns dotted name -> file; for packages their `__init__.py`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, known: Mapping[str, Path]) -> set[str]:
    """Returns the modules of hpctrain that a file imports, including imports in functions and under TYPE_CHECKING."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known.keys()
            found |= submodules or ({node.module} & known.keys())
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known.keys()
    return found


def cycles(edges: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Yields the strongly connected components with more than one module. Source: Tarjan 1972, doi:10.1137/0201010."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> Iterator[list[str]]:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(edges.get(module, ())):
            if other not in index:
                yield from visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                yield sorted(component)

    for module in sorted(edges):
        if module not in index:
            yield from visit(module)


def small_with_one_importer(known: Mapping[str, Path], edges: Mapping[str, set[str]]) -> list[str]:
    """Returns the small modules that one other module imports, and no package's `__init__.pyi`."""
    users: dict[str, set[str]] = defaultdict(set)
    for module, others in edges.items():
        for other in others:
            users[other].add(module)
    for package, path in known.items():
        stub = path.with_suffix(".pyi")
        if path.name == "__init__.py" and stub.exists():
            for node in ast.parse(stub.read_text()).body:
                if isinstance(node, ast.ImportFrom) and node.level == 1:
                    users[f"{package}.{node.module}"].add(package)
    return [
        module.removeprefix("hpctrain.")
        for module, path in known.items()
        if path.name != "__init__.py" and len(path.read_text().splitlines()) < SMALL_LINES
        if len(users[module]) == 1 and not any(known[user].name == "__init__.py" for user in users[module])
    ]


def main() -> int:
    known = modules()
    files = Counter(path.parent.relative_to(REPOSITORY) for path in known.values())
    lines = {path.relative_to(REPOSITORY): len(path.read_text().splitlines()) for path in known.values()}
    edges = {
        module: imports_of(path, known) - {module}
        for module, path in known.items()
        if path.name not in ("__init__.py", "__main__.py")
    }
    without_doors = {
        module: {other for other in others if known[other].name != "__init__.py"}
        for module, others in edges.items()
    }
    past: dict[str, int] = defaultdict(int)
    across = 0
    for module, others in edges.items():
        for other in others:
            package, own = other.split(".")[:2], module.split(".")[:2]
            if package != own and len(package) == 2 and known[".".join(package)].name == "__init__.py":
                across += 1
                past[package[1]] += other.count(".") > 1
    crowded = {folder: count for folder, count in files.items() if count > MAX_FILES}
    long = {path: count for path, count in lines.items() if count > MAX_LINES}
    circles = list(cycles(without_doors))
    names = {module or "hpctrain": len(public_names(module)) for module in public_modules()}
    num_public = sum(names.values())
    print(f"hpctrain: {len(known)} modules in {len(files)} folders, {sum(lines.values()):,} lines")
    print(f"largest folder: {max(files.values())} files; longest module: {max(lines.values())} lines")
    print(
        f"imports between packages: {across}, past a package's __init__: {sum(past.values())} ("
        + ", ".join(
            f"{package} {count}"
            for package, count in sorted(past.items(), key=lambda item: -item[1])
            if count
        )
        + ")"
    )
    print(f"public names: {num_public} ({', '.join(f'{module} {count}' for module, count in names.items())})")
    small = small_with_one_importer(known, edges)
    print(f"modules under {SMALL_LINES} lines with one importer: {len(small)} ({', '.join(small)})")
    for folder, count in crowded.items():
        print(f"too many files: {folder} has {count}, at most {MAX_FILES}")
    for path, count in long.items():
        print(f"too long: {path} has {count} lines, at most {MAX_LINES}")
    for circle in circles:
        print(f"cycle: {', '.join(circle)}")
    ambiguous = names_of_two_things()
    for name, defined in ambiguous.items():
        print(f"one name for several things: {name}, in {', '.join(defined)}")
    if num_public > MAX_PUBLIC_NAMES:
        print(f"too many public names: {num_public}, at most {MAX_PUBLIC_NAMES}")
    too_many = num_public > MAX_PUBLIC_NAMES
    return 1 if crowded or long or circles or any(past.values()) or too_many or ambiguous else 0


if __name__ == "__main__":
    sys.exit(main())
