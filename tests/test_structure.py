"""The floors, the names and the sizes of the code, read from its syntax trees."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from transformer import families

ROOT = Path(__file__).parent.parent
CODE = sorted([*ROOT.glob("transformer/**/*.py"), *ROOT.glob("configs/**/*.py"), ROOT / "train.py"])
MODULES = [path for path in CODE if path.is_relative_to(ROOT / "transformer")]

# Longest prefix wins. Modules of a floor that may not import each other have a room of their own.
FLOORS = {
    "transformer.spec": 0,
    "transformer.axes": 0,
    "transformer.checks": 0,
    "transformer.optimizer_settings": 0,
    "transformer.data_settings": 0,
    "transformer.settings": 0,
    "transformer.mapping": 0,
    "transformer.ops": 1,
    "transformer.kernels": 1,
    "transformer.sharding": 1,
    "transformer.distributed": 1,
    "transformer.sentence_pieces": 1,
    "transformer.tokenizer": 1,
    "transformer.nn": 2,
    "transformer.families": 3,
    "transformer.checkpoints": 3,
    "transformer.config": 3,
    "transformer.chat": 3,
    # Below the rooms: plans ask an optimiser what it keeps.
    "transformer.training.guard": 3,
    "transformer.training.optimizer": 3,
    "transformer.training": 4,
    "transformer.generation": 4,
    "transformer.planning": 4,
    "transformer.api": 5,
    "transformer.generate": 5,
    "transformer.generate_options": 5,
    "transformer.convert": 5,
    "transformer.embed": 5,
    "transformer.evaluate": 5,
    "transformer.report": 5,
    "transformer.tokenize": 5,
    "transformer.check_mesh": 5,
    "transformer.explain": 5,
    "transformer.huge_pages": 5,
    "transformer.explorer": 5,
    "transformer.plan": 5,
    "transformer.programs": 5,
    "transformer.figures": 5,
    "transformer": 5,
    "train": 5,
}
ROOMS = ("transformer.training", "transformer.generation", "transformer.planning")

# What the families are called elsewhere; those there are, with and without version, come from the listing.
ALIASES = {"llama", "gemma", "qwen", "gpt", "deepseek", "mixtral", "mistral", "bert", "marian"}
NO_ARRAYS = (
    "transformer.spec", "transformer.axes", "transformer.checks", "transformer.data_settings", "transformer.settings",
    "transformer.mapping",
)  # fmt: skip


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Dotted names of all that a file imports, those inside functions too; `from a import b` counts as a.b."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: write imports in full"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def place(name: str, table) -> str | None:
    """The longest entry of `table` that a dotted name lies in."""
    inside = [entry for entry in table if name == entry or name.startswith(entry + ".")]
    return max(inside, key=len, default=None)


def ids(paths):
    return pytest.mark.parametrize("path", paths, ids=relative)


@ids([path for path in CODE if not path.is_relative_to(ROOT / "configs")])
def test_imports_go_strictly_downwards(path):
    here = place(module_name(path), FLOORS)
    assert here != "transformer" or path.parent == ROOT / "transformer", f"give {relative(path)} a floor"
    assert here != "transformer" or path.name == "__init__.py", f"give {relative(path)} a floor"
    for name in imports(path):
        assert place(name, ("tests", "benchmarks", "configs")) is None, f"imports {name}"
        there = place(name, FLOORS)
        if there is None or there == here:
            continue
        allowed = FLOORS[there] <= FLOORS[here] if here not in ROOMS else FLOORS[there] < FLOORS[here]
        assert allowed, f"{here} (floor {FLOORS[here]}) imports {name} (floor {FLOORS[there]})"


@ids([path for path in MODULES if place(module_name(path), ("transformer.ops", "transformer.kernels"))])
def test_ops_know_no_flax(path):
    assert not [name for name in imports(path) if place(name, ("flax", "optax", "orbax"))]


@ids([path for path in MODULES if place(module_name(path), NO_ARRAYS)])
def test_specs_and_settings_hold_no_arrays(path):
    assert not [name for name in imports(path) if place(name, ("jax", "numpy", "flax", "jaxtyping"))]


@ids(sorted(ROOT.glob("configs/*.py")))
def test_config_pages_are_plain_data(path):
    allowed = ("ml_collections", "configs.common")
    if path.stem == "common":
        allowed = ("ml_collections", "dataclasses", "transformer.settings")
    assert not [name for name in imports(path) if not place(name, allowed)]


def docstrings(module: ast.Module) -> set[ast.Constant]:
    """String expressions that stand alone: documentation, not data."""
    alone = [node.value for node in ast.walk(module) if isinstance(node, ast.Expr)]
    return {value for value in alone if isinstance(value, ast.Constant)}


def words(path: Path):
    """Identifiers and strings of a file, with their lines."""
    documentation = docstrings(tree(path))
    for node in ast.walk(tree(path)):
        for field in ("id", "name", "attr", "arg", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value, getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation:
            yield node.value, node.lineno


@ids(
    [path for path in MODULES if place(module_name(path), ("transformer.nn", "transformer.ops", "transformer.kernels"))]
)
def test_no_family_is_named_where_models_are_built(path):
    """Comments and docstrings may cite; identifiers, strings and file names may not."""
    names = {*families.names(), *(re.sub(r"[\d_].*", "", name) for name in families.names()), *ALIASES}
    # A letter and a digit, as in "t5", only as a word of its own: "int5" would be no family.
    names = {name for name in names if len(name) > 2}
    pattern = re.compile(
        "|".join(sorted(map(re.escape, names), key=len, reverse=True)) + r"|(?<![a-z])t5", re.IGNORECASE
    )
    assert not pattern.search(relative(path))
    found = [f"{relative(path)}:{line}: {word!r}" for word, line in words(path) if pattern.search(word)]
    assert not found, "\n".join(found)


@ids(CODE)
def test_files_and_functions_are_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= 300, f"{lines} lines"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= 60, f"{node.name}: {length} lines"


@ids(CODE)
def test_nothing_runs_what_it_reads(path):
    """No pickle, eval, exec or remote code: a checkpoint or a config is data."""
    assert not [name for name in imports(path) if place(name, ("pickle", "cloudpickle", "dill", "marshal", "shelve"))]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            builtin = isinstance(node.func, ast.Name) and called in ("eval", "exec", "compile", "__import__")
            assert not builtin and called != "load_module", f"line {node.lineno}: {called}()"
            for keyword in node.keywords:
                forbidden = keyword.arg == "trust_remote_code" or (
                    keyword.arg == "allow_pickle"
                    and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
                )
                assert not forbidden, f"line {node.lineno}: {keyword.arg}"


def test_import_is_lazy():
    """`import transformer` alone loads neither jax nor flax; specs and settings load no arrays either."""
    code = (
        "import sys, transformer, transformer.spec, transformer.settings, transformer.families;"
        "heavy = [m for m in ('jax', 'flax', 'numpy', 'orbax', 'grain') if m in sys.modules];"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_package_offers_its_names_and_no_others():
    import transformer

    for name in transformer.__all__:
        assert callable(getattr(transformer, name)), name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = transformer.no_such_name
