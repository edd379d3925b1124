"""Imports go one way (DESIGN.md): who may import whom, and which packages each room may use. Read from the source."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import raytrain3d

ROOT = Path(raytrain3d.__file__).parent
NAME = "raytrain3d"
LOW = {"config", "errors"}
MIDDLE = {"data", "model", "parallel", "checkpoint"}

# Room or file -> what of the project it may import beside itself. A dotted name allows one file only.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "config_checks": {"errors"},
    "config_data": {"config_checks"},
    "config": {"config_checks", "config_data", "errors"},
    "convert": LOW,
    "masking": {"config"},
    "load": LOW | {"convert", "model.huggingface_config"},
    "reference": {"config", "config_data"},
    "plan": LOW,
    "data": LOW | {"files", "plan"},
    "model": LOW | {"plan"},
    "checkpoint": LOW | {"convert", "files", "masking", "plan", "model.huggingface", "model.huggingface_config"},
    "parallel": LOW | {"plan", "checkpoint.layout"},
    "train": LOW | MIDDLE | {"plan"},
    "metrics": LOW | {"files", "plan", "train.report"},
    "gang": LOW | MIDDLE | {"plan", "train", "metrics", "load", "masking"},
    "cli_parser": set(),
    "cli_reference": set(),
    "cli_checkpoint": LOW | MIDDLE | {"cli_parser", "train", "load"},
    "cli_data": LOW | {"cli_parser", "data", "metrics", "gang", "load"},
    "cli_run": LOW | {"cli_parser", "load", "plan", "gang"},
    "cli_plan": LOW | {"cli_parser", "cli_report", "load", "plan", "metrics", "gang"},
    "cli_report": LOW | {"cli_parser", "plan", "metrics"},
    "cli": ({"cli_parser", "cli_checkpoint", "cli_data", "cli_plan", "cli_reference", "cli_report", "cli_run", "plan",
             "train", "metrics", "load", "reference", "gang"} | LOW | MIDDLE),
    "__main__": {"cli"},
}
# Package -> rooms or files that may import it.
OWNERS: dict[str, set[str]] = {
    "ray": {"gang"},
    "torch.distributed": {"parallel"},
    "pyarrow": {"data", "checkpoint.remote"},
    "aiohttp": {"gang.jobs"},
    "omegaconf": {"load"},
    "yaml": {"load"},
    "prometheus_client": {"metrics.exporter"},
    "rich": {"metrics"},
    "safetensors": {"checkpoint"},
    "tokenizers": {"data"},
    "psutil": {"gang"},
    "numpy": {"data"},
    "torch": {"data", "model", "parallel", "checkpoint", "train", "gang"},
}
PURE = ("config", "config_checks", "config_data", "errors", "convert", "reference", "plan", "data.sampler", "data.mixture",
        "data.ideal", "data.stretch", "data.manifest", "model.huggingface", "model.huggingface_config", "checkpoint.layout",
        "checkpoint.manifest", "train.lr", "train.report", "train.standing", "train.position", "gang.failure",
        "gang.recovery", "gang.budget", "gang.diagnose", "cli", "files", "masking", "gang.follow",
        "metrics.catalogue", "metrics.run_metrics", "metrics.expected")


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module, by its whole name."""

    module: str
    line: int
    at_top: bool
    """Runs when the file is imported, not only in a function."""


def in_room(module: str, rooms: set[str] | tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def imports_of(source: str, exists: set[str]) -> list[Import]:
    """Imports of a file, those for type checkers left out. `exists`: the project's modules."""
    found: list[Import] = []

    def visit(node: ast.AST, at_top: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        found.extend(Import(module=module, line=getattr(node, "lineno", 0), at_top=at_top)
                     for module in modules_of(node, exists))
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, at_top and not inside)

    visit(ast.parse(source), True)
    return found


def modules_of(node: ast.AST, exists: set[str]) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (name.name for name in names)
        case ast.ImportFrom(module=str(module), level=0, names=names):
            for name in names:
                whole = f"{module}.{name.name}"
                yield whole if whole in exists or whole == "torch.distributed" else module
        case ast.ImportFrom():
            yield "a relative import"
        case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
            yield "torch.distributed"


def project() -> dict[str, list[Import]]:
    """Module name below raytrain3d -> its imports."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    exists = {f"{NAME}.{name}" for name in files}
    return {name: imports_of(path.read_text(encoding="utf-8"), exists) for name, path in files.items()}


PROJECT = project()


def inner(module: str) -> str | None:
    """`plan.mesh` for `raytrain3d.plan.mesh`; None for modules of others."""
    return module.removeprefix(f"{NAME}.") if module.startswith(f"{NAME}.") else None


def test_every_room_has_a_rule() -> None:
    assert {name.partition(".")[0] for name in PROJECT} - {"__init__"} <= set(ALLOWED)


def test_imports_go_one_way() -> None:
    wrong = []
    for name, imports in PROJECT.items():
        room = name.partition(".")[0]
        for item in imports:
            target = inner(item.module)
            if target is not None and not in_room(target, ALLOWED[room] | {room}):
                wrong.append(f"{name}:{item.line} imports {target}")
    assert not wrong


@pytest.mark.parametrize("package", OWNERS)
def test_only_its_owners_import(package: str) -> None:
    wrong = [f"{name}:{item.line}" for name, imports in PROJECT.items() for item in imports
             if in_room(item.module, (package,)) and not in_room(name, OWNERS[package])]
    assert not wrong, f"{package} belongs to {OWNERS[package]}"


def test_every_package_has_an_owner() -> None:
    known = {package.partition(".")[0] for package in OWNERS} | set(sys.stdlib_module_names) | {NAME}
    assert {item.module for imports in PROJECT.values() for item in imports
            if item.module.partition(".")[0] not in known} == set()


def reached(start: str) -> dict[str, str]:
    """Module (of the project or of others) -> which file imports it, for all that importing `start` imports."""
    found: dict[str, str] = {}
    waiting = [start]
    while waiting:
        name = waiting.pop()
        for item in PROJECT[name]:
            if item.at_top and item.module not in found:
                found[item.module] = name
                target = inner(item.module)
                waiting += [target] if target is not None else []
    return found


@pytest.mark.parametrize("name", [name for name in PROJECT if in_room(name, PURE)])
def test_pure_file_needs_nothing_installed(name: str) -> None:
    needed = {module: by for module, by in reached(name).items()
              if module.partition(".")[0] not in sys.stdlib_module_names and inner(module) is None and module != NAME}
    assert needed == {}


@pytest.mark.parametrize("name", ["gang.run", "gang.local", "gang.worker", "train.trainer"])
def test_runs_without_ray_do_not_import_it(name: str) -> None:
    assert {module: by for module, by in reached(name).items() if in_room(module, ("ray",))} == {}


@pytest.mark.parametrize(("source", "modules"), [
    ("import ray.util", ["ray.util"]),
    ("from raytrain3d import load", ["raytrain3d.load"]),
    ("from raytrain3d.errors import ConfigError", ["raytrain3d.errors"]),
    ("from torch import distributed", ["torch.distributed"]),
    ("import torch\ntorch.distributed.barrier()", ["torch", "torch.distributed"]),
    ("if TYPE_CHECKING:\n    import ray", []),
    ("def f():\n    import ray", ["ray"]),
    ("from . import x", ["a relative import"]),
])
def test_the_reader_of_imports_misses_none(source: str, modules: list[str]) -> None:
    assert [item.module for item in imports_of(source, {"raytrain3d.load"})] == modules
