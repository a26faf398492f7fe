# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The import graph of the project, read from its sources: imports inside functions count too."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def sources(*packages: str, root: Path = ROOT) -> dict[str, str]:
    """Source text by module name, of packages in the checkout; symbolic links are followed."""
    found = {}
    for package in packages:
        for folder in [root / package, *(p for p in (root / package).iterdir() if p.is_symlink())]:
            if not folder.is_dir():
                continue
            for path in folder.rglob("*.py"):
                parts = path.relative_to(root).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                found[name] = path.read_text(encoding="utf-8")
                if parts[-1] == "__init__":
                    found[name] += f"\n__path__ = {name!r}\n"  # marks a package for `imports`
    return found


def imports(name: str, source: str, modules: Iterable[str]) -> set[str]:
    """Names that a module imports, as absolute module names.

    Args:
        name: the module's own name, which relative imports start from.
        source: its text.
        modules: every module of the project: ``from x import y`` is ``x.y`` if that is one of them.
    """
    modules = set(modules)
    package = name if f"\n__path__ = {name!r}\n" in source else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                above = parts[: len(parts) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_module = full in modules or full == "torch.distributed"
                found.add(full if is_module else base)
    return found - {name}


def graph(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Imports of each module of ``files``, of modules within the project and of others."""
    return {name: imports(name, source, files) for name, source in files.items()}


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in edges.get(name, ()):
            if other not in edges:
                continue
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = []
            while True:
                group.append(stack.pop())
                if group[-1] == name:
                    break
            if len(group) > 1:
                found.append(sorted(group))

    for name in edges:
        if name not in order:
            visit(name)
    return found
