"""Does each Python module leave alone what is another's? Needs neither compiler nor GPU."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from layout_support import PYTHON, ROOT, dotted, name_of, names_used, tree_of

MAY_PRINT = {"__main__.py", "demo.py", "_info.py"}


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_only_one_module_touches_torchs_allocator(path: Path) -> None:
    if path.name == "_torch.py":
        return
    parts = {
        *("MemPool", "CUDAPluggableAllocator", "use_mem_pool", "memory_snapshot", "empty_cache"),
        *("MemPoolContext", "change_current_allocator", "caching_allocator_alloc"),
        *("memory_reserved", "set_allocator_settings", "_accelerator_setAllocatorSettings"),
    }
    touched = [
        name
        for name in names_used(path)
        if name.startswith("torch.") and parts & set(name.split("."))
    ]
    assert touched == []


@pytest.mark.parametrize("path", [*PYTHON, ROOT / "setup.py"], ids=name_of)
def test_only_the_options_read_the_environment(path: Path) -> None:
    if path.name in ("options.py", "setup.py"):
        return
    reads = {"os.environ", "os.getenv", "os.environb", "os.putenv", "os.getenvb"}
    assert reads.isdisjoint(names_used(path))


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_only_the_command_line_prints(path: Path) -> None:
    if path.name in MAY_PRINT:
        return
    called = [dotted(node.func) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    assert "print" not in called
    assert not [name for name in names_used(path) if name in ("sys.stdout", "sys.stderr")]


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_no_error_is_swallowed_whatever_it_is(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = dotted(node.type) if node.type is not None else "BaseException"
        idle = all(
            isinstance(line, ast.Pass | ast.Continue)
            or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            for line in node.body
        )
        assert not (idle and caught in ("Exception", "BaseException")), f"line {node.lineno}"


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_nothing_is_pickled(path: Path) -> None:
    modules = {name.split(".")[0] for name in names_used(path)}
    modules |= {
        alias.name
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert modules.isdisjoint({"pickle", "marshal", "shelve", "dill", "cloudpickle"})


def test_the_package_only_re_exports() -> None:
    for node in tree_of(ROOT / "cumem" / "__init__.py").body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        exported = isinstance(node, ast.Assign) and dotted(node.targets[0]) == "__all__"
        assert docstring or exported or isinstance(node, ast.ImportFrom), ast.unparse(node)
