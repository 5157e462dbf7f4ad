"""The structure of the package: imports point downwards, names are documented, the import is light."""

import ast
import graphlib
import importlib
import inspect
import itertools
import operator
import pydoc
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.quick

# From the ground up. A room is a file or a folder of longspan/; it may import the rooms before it, not those after it.
ORDER = (
    "version", "tested_jax", "array_types", "optional", "files", "checks", "constants", "dropout", "masks", "programs",
    "axes", "biases", "pairs", "tile_kinds", "layout", "render", "maskinfo", "rope", "combine", "engines", "attend",
    "cross_entropy", "cache", "work", "parallel", "advice", "explanation", "explorer", "patterns", "nn", "models", "hf",
    "train", "testing", "cli", "__main__",
)  # fmt: skip

# Engines in `longspan/engines`. They share the other modules of the folder, and do not import each other.
ENGINE_NAMES = ("cpu", "pallas_tpu", "reference", "xla")

NEVER_LOADED = (
    "flax", "optax", "orbax", "safetensors", "tokenizers", "typer", "rich", "matplotlib", "torch", "transformers",
    "beartype", "hypothesis", "pytest", "jax.experimental.pallas",
)  # fmt: skip

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "longspan"


def test_module_level_imports_point_downwards():
    complaints = [c for i in imports_of(PACKAGE) if (c := complaint(i))]
    assert not complaints, "\n" + "\n".join(complaints)


def test_models_and_modules_name_no_engine():
    """They call `longspan.engines`, which chooses the engine."""
    above = [i for i in imports_of(PACKAGE) if room(i.importer) in ("nn", "models", "hf")]
    named = [f"{i.importer}, line {i.line}: {i.target}" for i in above if re.match(r"longspan\.engines\.", i.target)]
    assert not named, "\n" + "\n".join(named)


def test_every_module_has_a_place_in_the_order():
    strangers = {room(name) for name in modules_of(PACKAGE)} - {*ORDER, "", "__main__"}
    assert not strangers, (
        f"Add {sorted(strangers)} to ORDER at the top of {Path(__file__).name}, after what they import."
    )


def test_modules_do_not_import_in_circles():
    graph: dict[str, set[str]] = {name: set() for name in modules_of(PACKAGE)}
    for i in imports_of(PACKAGE):
        graph[i.importer].add(i.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("These modules import each other: " + " <- ".join(error.args[1]))


def test_exports_and_api_page_list_the_same_names():
    exported, documented = public_names(), {name for name in documented_names() if "." not in name}
    assert not exported - documented, f"Add to docs/api.md: {sorted(exported - documented)}"
    assert not documented - exported, f"In docs/api.md, but not in `__all__`: {sorted(documented - exported)}"


def test_exports_that_are_not_listed_are_documented_in_maskinfo():
    longspan = importlib.import_module("longspan")
    unlisted = exports(PACKAGE) - public_names()
    assert len(unlisted) == 11
    assert {f"maskinfo.{name}" for name in unlisted} <= set(documented_names())
    for name in unlisted:
        assert getattr(longspan, name) is getattr(longspan.maskinfo, name)
        assert name not in dir(longspan) and name not in longspan.__all__


def test_every_documented_name_has_an_example():
    longspan = importlib.import_module("longspan")
    bare = [name for name in documented_names() if ">>>" not in (operator.attrgetter(name)(longspan).__doc__ or "")]
    assert not bare, f"No `>>>` in the docstring of {bare}"


def test_importing_longspan_loads_no_optional_dependency():
    program = f"import sys, longspan; print(*sorted(set({NEVER_LOADED}) & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    assert not loaded.strip(), (
        f"`import longspan` loads {loaded.split()}: import them inside the function that needs them."
    )


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not a git checkout")
def test_files_name_no_registry_host_and_no_machine_path():
    # In pieces, so that this file does not name them either.
    hosts = "|".join(rf"{host}\.{top}" for host, top in [("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"),
                                                         ("anaconda", "org"), ("crates", "io")])  # fmt: skip
    forbidden = re.compile(rf"{hosts}|(?<![\w.~-])/(?:root|work|opt|home)/")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    found = [
        f"{name}:{number}: {match[0]}"
        for name in names
        if (ROOT / name).is_file()
        for number, line in enumerate((ROOT / name).read_text("utf-8", errors="replace").splitlines(), start=1)
        for match in forbidden.finditer(line)
    ]
    assert not found, "\n" + "\n".join(found)


def test_the_design_page_shows_the_tree_as_it_is():
    page = (ROOT / "docs" / "design.md").read_text("utf-8")
    block = re.search(r"^## The tree$.*?^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    # A line that starts with a space continues the line above it.
    lines = re.sub(r"\n +", " ", block[1]).splitlines()
    shown = {line.split()[0]: line for line in lines}
    rooms = {
        path.stem + "/" * path.is_dir(): path
        for path in PACKAGE.iterdir()
        if (path.is_dir() and path.name != "__pycache__") or (path.suffix == ".py" and path.name != "__init__.py")
    }
    assert set(shown) == set(rooms)
    order = [name.rstrip("/") for name in shown]
    assert order == [name for name in ORDER if name in order], "the page's order is that of imports"
    for name, path in rooms.items():
        inside = {p.stem for p in path.glob("*") if not p.name.startswith("_") and p.suffix in ("", ".py")}
        missing = {part for part in inside if not re.search(rf"\b{part}\b", shown[name])}
        assert not missing, f"the line of {name} does not name {sorted(missing)}"


def test_files_of_tests_have_different_names():
    """Pytest cannot collect two files of one name together, because the folders of tests are no packages."""
    names = sorted(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    repeated = {name for name, other in itertools.pairwise(names) if name == other}
    assert not repeated, f"rename all but one of each: {sorted(repeated)}"


def test_a_class_name_occurs_once_in_the_package():
    places: dict[str, list[str]] = {}
    for name, tree in trees_of(PACKAGE):
        if name == "longspan.nn.linen":
            continue  # it mirrors longspan.nn.nnx, name by name
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    repeated = {name: found for name, found in places.items() if len(found) > 1}
    assert not repeated


def test_conditional_expressions_are_few_and_never_nested():
    found, nested, lines = 0, [], 0
    for name, tree in trees_of(PACKAGE):
        lines += len(modules_of(PACKAGE)[name].read_text("utf-8").splitlines())
        for node in ast.walk(tree):
            if isinstance(node, ast.IfExp):
                found += 1
                inside = [other for child in ast.iter_child_nodes(node) for other in ast.walk(child)]
                nested += [f"{name}:{node.lineno}" for other in inside if isinstance(other, ast.IfExp)]
    assert not nested, f"Write an `if` statement: {nested}"
    assert 1000 * found / lines <= 18, f"{found} conditional expressions in {lines} lines: at most 18 per 1,000 lines."


def test_no_names_are_unpacked_from_a_generator_or_a_comprehension():
    unpacked = [
        f"{name}:{node.lineno}"
        for name, tree in trees_of(PACKAGE)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
        if isinstance(node.value, ast.GeneratorExp | ast.ListComp)
    ]
    assert not unpacked, f"Write one line per name: {unpacked}"


def test_no_top_level_module_has_the_name_of_a_public_function():
    longspan = importlib.import_module("longspan")
    modules = {room(name) for name in modules_of(PACKAGE)}
    assert not [name for name in modules & exports(PACKAGE) if callable(getattr(longspan, name))]


def test_dir_and_all_list_the_public_names():
    longspan = importlib.import_module("longspan")
    public = public_names()
    assert public <= set(dir(longspan)) <= public | {"__version__"}
    assert public <= exports(PACKAGE), "static checkers see names that are imported `X as X`"
    assert not set(longspan.__all__) & set(longspan._LAZY)


def test_the_signature_of_attention_has_its_own_arguments_only():
    longspan = importlib.import_module("longspan")
    for function in (longspan.attention, longspan.parallel.attention):
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
        assert "unknown" not in pydoc.render_doc(function, renderer=pydoc.plaintext)
        with pytest.raises(
            TypeError, match=r"attention\(\) has no argument 'is_causal'. Give `mask=ls.Causal\(\)` instead"
        ):
            function(is_causal=True)
        with pytest.raises(TypeError, match=r"attention\(\) got an unexpected keyword argument 'is_cusal'"):
            function(is_cusal=True)


def test_help_shows_the_public_functions_and_rules():
    text = pydoc.render_doc(importlib.import_module("longspan"), renderer=pydoc.plaintext)
    for name in ("attention(", "explain(", "merge(", "class Window(", "class MaskInfo(", "bigbird_attention("):
        assert name in text


class Import(NamedTuple):
    importer: str
    target: str
    line: int


def complaint(i: Import) -> str | None:
    here, there = room(i.importer), room(i.target)
    where = f"{i.importer}, line {i.line}, imports {i.target}"
    if here in ("", "__main__") or here not in ORDER:
        return None
    if there not in ORDER:
        return f"{where}: import from the module that defines the name, not from one that imports everything."
    if ORDER.index(there) > ORDER.index(here):
        return f"{where}: that points upwards, `{there}` comes after `{here}`. Move it, or import inside the function."
    names = i.importer.split("."), i.target.split(".")
    inside = here == there == "engines" and all(len(n) > 2 for n in names)
    if inside and names[0][2] != names[1][2] and names[1][2] in ENGINE_NAMES:
        return f"{where}: engines do not import each other. Move shared code to a module of engines/."
    return None


def room(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


def modules_of(package: Path) -> dict[str, Path]:
    """The package's modules by dotted name; a folder has the name of its package."""
    paths = sorted(package.rglob("*.py"))
    parts = [path.relative_to(package.parent).with_suffix("").parts for path in paths]
    return {".".join(p[:-1] if p[-1] == "__init__" else p): path for p, path in zip(parts, paths, strict=True)}


def trees_of(package: Path) -> list[tuple[str, ast.Module]]:
    """The package's modules by dotted name, parsed."""
    return [(name, ast.parse(path.read_text("utf-8"))) for name, path in modules_of(package).items()]


def imports_of(package: Path) -> list[Import]:
    """Every import of one of the package's modules by another that runs when the importer is loaded."""
    modules = modules_of(package)
    return [
        Import(importer, target, node.lineno)
        for importer, path in modules.items()
        for node in loaded_nodes(ast.parse(path.read_text("utf-8")))
        for target in targets(node, importer, path.name == "__init__.py", modules)
    ]


def loaded_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those inside functions and `if TYPE_CHECKING`, which do not run on import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from (other, *loaded_nodes(other))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from loaded_nodes(node)


def targets(node: ast.AST, importer: str, is_folder: bool, modules: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = importer.split(".")
            above = above[: len(above) - node.level + is_folder]
            base = ".".join([*above, *base.split(".")] if base else above)
        for alias in node.names:
            target = f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base
            if target in modules:
                yield target


def exports(package: Path) -> set[str]:
    """The names that `__init__.py` re-exports as `X as X`."""
    nodes = ast.walk(ast.parse((package / "__init__.py").read_text("utf-8")))
    aliases = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    return {a.name for a in aliases if a.asname == a.name and not a.name.startswith("_")}


def public_names() -> set[str]:
    """The names that `dir(longspan)` lists, with those that need an optional dependency."""
    longspan = importlib.import_module("longspan")
    return {*longspan.__all__, *longspan._LAZY}


def documented_names() -> list[str]:
    """The names that docs/api.md lists, one a bullet; `testing.make_qkv` is a name inside an exported module."""
    return re.findall(r"^- `([\w.]+)`", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE)
