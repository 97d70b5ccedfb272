"""What do tests of the layout look at? The sources, and the names that they use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
CPP = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".h"))
PYTHON = sorted((ROOT / "cumem").rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def dotted(node: ast.AST) -> str:
    """``torch.cuda.MemPool`` of the expression that says so; empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        front = dotted(node.value)
        return f"{front}.{node.attr}" if front else ""
    return ""


def names_used(path: Path) -> Iterator[str]:
    """Dotted names in the code, and those imported from somewhere."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif name := dotted(node):
            yield name
