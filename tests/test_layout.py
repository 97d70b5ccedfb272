"""Do sources keep to the layers, and built files to their names? Needs neither compiler nor GPU."""

from __future__ import annotations

import ast
import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from layout_support import CPP, PYTHON, ROOT, name_of, tree_of

from cumem import _C

LONGEST = 300

# What a layer may include of the others, bottom-up.
MAY_INCLUDE = {
    "digest": {"digest"},
    "core": {"core", "digest"},
    "emulator": {"emulator", "digest"},
    "torch": {"core", "torch"},
    "python": {"core", "torch", "python"},
}


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*["<]([^">]+)[">]', path.read_text(), re.MULTILINE)


def code_of(path: Path) -> str:
    """C++ without comments and strings."""
    pattern = r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/'
    return re.sub(pattern, '""', path.read_text(), flags=re.DOTALL)


# C++


def test_there_is_something_to_look_at() -> None:
    assert len(CPP) > 20
    assert len(PYTHON) > 10
    assert {path.parent.name for path in CPP} <= set(MAY_INCLUDE)


@pytest.mark.parametrize("path", CPP, ids=name_of)
def test_includes_point_down_only(path: Path) -> None:
    layers = {name.split("/")[0] for name in includes(path) if "/" in name}
    assert layers & set(MAY_INCLUDE) <= MAY_INCLUDE[path.parent.name]


@pytest.mark.parametrize("path", CPP, ids=name_of)
def test_no_source_includes_torch(path: Path) -> None:
    own = {name_of(header).removeprefix("csrc/") for header in CPP}
    foreign = [name for name in includes(path) if name not in own]
    assert not [name for name in foreign if re.match(r"(torch|ATen|c10|caffe2)/", name)]


@pytest.mark.parametrize("path", CPP, ids=name_of)
def test_only_the_binding_knows_python(path: Path) -> None:
    python = [name for name in includes(path) if re.match(r"(pybind11/|Python\.h)", name)]
    assert not python or path.parent.name == "python"


@pytest.mark.parametrize(
    "path", [path for path in CPP if path.parent.name != "emulator"], ids=name_of
)
def test_no_source_ends_the_process(path: Path) -> None:
    ends = r"\b(exit|_exit|_Exit|quick_exit|abort|terminate|assert|raise_signal)\s*\("
    assert re.findall(ends, code_of(path)) == []


@pytest.mark.parametrize(
    "path", [path for path in CPP if path.parent.name != "emulator"], ids=name_of
)
def test_no_source_prints(path: Path) -> None:
    prints = r"\b(printf|fprintf|puts|perror|cout|cerr|clog)\b"
    assert re.findall(prints, code_of(path)) == []


def test_the_core_has_no_process_wide_state() -> None:
    core = [path for path in CPP if path.parent.name == "core"]
    for path in core:
        code = code_of(path)
        assert "thread_local" not in code, name_of(path)
        state = re.findall(r"^(?:static )?(?:std::)?(?:atomic|mutex)\b", code, re.MULTILINE)
        assert state == [], name_of(path)


def test_nothing_links_to_the_driver() -> None:
    calls = [node for node in ast.walk(tree_of(ROOT / "setup.py")) if isinstance(node, ast.keyword)]
    linked = [
        ast.literal_eval(node.value)
        for node in calls
        if node.arg in ("libraries", "extra_link_args")
    ]
    assert linked
    assert "cuda" not in str(linked)


@pytest.mark.parametrize("module", ["_C", "_emulator_driver"])
def test_the_built_files_need_no_driver(module: str) -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("needs readelf")
    (built,) = (ROOT / "cumem").glob(f"{module}*.so")
    needed = subprocess.run([readelf, "-d", built], capture_output=True, text=True, check=True)
    libraries = re.findall(r"\(NEEDED\).*\[(.+)\]", needed.stdout)
    assert libraries
    assert not [name for name in libraries if re.match(r"lib(cuda|torch|c10)", name)]


# The built extension


def test_the_two_functions_for_torch_are_found_by_name() -> None:
    library = ctypes.CDLL(_C.__file__)
    for name in ("cumem_malloc", "cumem_free"):
        assert ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def test_the_extension_exports_nothing_else() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("needs nm")
    listed = subprocess.run(
        [nm, "-D", "--defined-only", "-C", _C.__file__], capture_output=True, text=True, check=True
    )
    exported = [line.split(maxsplit=2)[1:] for line in listed.stdout.splitlines()]
    # Weak symbols are templates of the standard library, which it exports whatever one says.
    strong = {name for kind, name in exported if kind not in "WVuvw"}
    assert strong == {"PyInit__C", "cumem_malloc", "cumem_free"}
    assert not [name for kind, name in exported if kind in "WVu" and name.startswith("cumem::")]


# Names that every Python class has, or that pybind11 gives it.
PLAIN = {*dir(type("Plain", (Exception,), {})), "_pybind11_conduit_v1_"}


def stub_names() -> dict[str, set[str]]:
    """What the stub says: classes with their members, and functions with none."""
    stub: dict[str, set[str]] = {}
    for node in tree_of(ROOT / "cumem" / "_C.pyi").body:
        if isinstance(node, ast.ClassDef):
            stub[node.name] = {
                member.target.id if isinstance(member, ast.AnnAssign) else member.name
                for member in node.body
                if isinstance(member, (ast.AnnAssign, ast.FunctionDef))
            } - {"__init__"}
        elif isinstance(node, ast.FunctionDef):
            stub[node.name] = set()
    return stub


def is_own(member: str) -> bool:
    """Written for the class, and not what pybind11 gives every enum."""
    return member not in PLAIN and (member == "__init__" or not member.startswith("__"))


def module_names(module: ModuleType) -> dict[str, set[str]]:
    names = {name for name in vars(module) if not name.startswith("_")}
    return {
        name: {member for member in vars(getattr(module, name)) if is_own(member)}
        if isinstance(getattr(module, name), type)
        else set()
        for name in names
    }


def test_the_stub_is_the_module() -> None:
    stub, module = stub_names(), module_names(_C)
    assert stub.keys() == module.keys()
    # Its attributes are set on each error, not on the class.
    stub.pop("StatusError"), module.pop("StatusError")
    assert stub == module


@pytest.mark.parametrize("name", sorted(stub_names()))
def test_the_stub_has_the_arguments_of_the_module(name: str) -> None:
    (node,) = [
        node
        for node in tree_of(ROOT / "cumem" / "_C.pyi").body
        if getattr(node, "name", "") == name
    ]
    functions = [node] if isinstance(node, ast.FunctionDef) else node.body
    for function in functions:
        if not isinstance(function, ast.FunctionDef) or function.decorator_list:
            continue
        owner = _C if function is node else getattr(_C, name)
        documented = getattr(owner, function.name).__doc__ or ""
        arguments = [*function.args.args, *function.args.kwonlyargs]
        for argument in arguments[0 if function is node else 1 :]:
            assert re.search(rf"\b{argument.arg}: ", documented), (function.name, argument.arg)


# C++ and Python


@pytest.mark.parametrize("path", [*PYTHON, *CPP], ids=name_of)
def test_files_are_short_and_open_with_what_they_answer(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST
    if path.suffix == ".py":
        assert ast.get_docstring(ast.parse(text)) or path.name in ("_version.py",)
