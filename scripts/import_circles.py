"""Finds import circles and imports that point up, over the whole package.

    python scripts/import_circles.py [FOLDER]

Imports inside functions and below TYPE_CHECKING count as any other, and so does
`importlib.import_module("proxpo.x")`. Prints a line for each fault; exit status 1 if there is one.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "proxpo"
# Lowest first: a module imports its own layer and lower ones. The longest matching name decides, so
# a module can lie in another layer than its package; "" is proxpo/__init__.py.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "ops.shapes"),
    ("fields",),
    ("conversion",),
    ("types",),
    ("ops",),
    ("exact", "logp"),
    ("gradients",),
    ("stages",),
    ("recipes", "settings"),
    ("compose",),
    ("backward",),
    ("optimizers", "models", "sampler", "rewards"),
    ("replay",),
    ("runs",),
    ("batch_file", "inspection", "sparsity"),
    ("report.inspection_page", "report.inspection_text", "report.text"),
    ("train", "control", "generative", "adapt", "adapters"),
    ("compare",),
    ("report",),
    ("search",),
    ("doctor", "pictures"),
    ("cli", ""),
    ("__main__",),
)
Imports = dict[str, dict[str, int]]  # module -> imported module -> line


def read_imports(package: Path) -> Imports:
    """Imports of every module below `package` that lead to another one of them."""
    files = {_name(path, package): path for path in sorted(package.rglob("*.py"))}
    imports: Imports = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        targets = ((_module(dotted, files), line) for dotted, line in _targets(tree, name, path))
        imports[name] = {target: line for target, line in targets if target not in ("", name)}
    return imports


def circles(imports: Imports) -> list[list[str]]:
    """Strongly connected components of more than one module, each sorted by name (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in imports[module]:
            if target not in index:
                visit(target)
            if target in stack:
                low[module] = min(low[module], low[target])
        if low[module] == index[module]:
            start = stack.index(module)
            component = sorted(stack[start:])
            del stack[start:]
            if len(component) > 1:
                components.append(component)

    for module in imports:
        if module not in index:
            visit(module)
    return sorted(components)


def upward(
    imports: Imports, layers: Sequence[Sequence[str]] = LAYERS
) -> list[tuple[str, str, int]]:
    """(module, imported module, line) of each import from a higher layer."""
    order = {name: number for number, names in enumerate(layers) for name in names}
    return [
        (module, target, line)
        for module, targets in imports.items()
        for target, line in targets.items()
        if _layer(target, order) > _layer(module, order)
    ]


def _layer(module: str, order: Mapping[str, int]) -> int:
    """The layer of the longest declared name that the module lies in."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        if (number := order.get(".".join(parts[:length]))) is not None:
            return number
    if parts:
        raise SystemExit(f"{module} lies in no layer: add it to LAYERS")
    return order[""]


def _name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _module(target: str, files: Mapping[str, Path]) -> str:
    """The module that holds `target`, a module or a name in one; "" for other packages."""
    if target in files:
        return target
    holder = target.rpartition(".")[0]
    return holder if holder in files else ""


def _targets(tree: ast.AST, module: str, path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names that the module imports, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                up = node.level - (path.name == "__init__.py")
                base = ".".join([*parts[: len(parts) - up], *([base] if base else [])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_module(node):
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value, node.lineno


def _is_import_module(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return name == "import_module" and bool(call.args)


def _path_through(component: Sequence[str], imports: Imports) -> str:
    """`a -> b -> a`: the shortest circle through the first module of a component."""
    first = component[0]
    paths = [[first]]
    visited = {first}
    for path in paths:
        for target in imports[path[-1]]:
            if target == first:
                return " -> ".join([*path, first])
            if target in component and target not in visited:
                visited.add(target)
                paths.append([*path, target])
    raise AssertionError(component)


def main(folder: Path) -> int:
    imports = read_imports(folder)
    for component in (components := circles(imports)):
        print(f"circle of {len(component)}: {_path_through(component, imports)}")
    for module, target, line in (arrows := upward(imports)):
        print(f"upward: {module}:{line} imports {target}")
    print(f"{len(imports)} modules, {len(components)} circles, {len(arrows)} upward imports")
    return int(bool(components or arrows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=PACKAGE)
    sys.exit(main(parser.parse_args().folder))
