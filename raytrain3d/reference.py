"""The reference of all configuration keys, made from the docstrings under the fields of `config.py` and `config_data.py`.

Docstrings under fields exist only in the source, so that is what is read. `docs/config.md` is this text.
"""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from raytrain3d import config, config_data

HEAD = """# Configuration

Every key of a job file. `raytrain3d config` prints this page; it is made from the docstrings in `raytrain3d/config*.py`.
A key is set in the YAML file, or after it on the command line: `raytrain3d train job.yaml train.steps=50`. Values may
refer to other keys, `${run.name}`. Lists are written `[1, 2]`, and `null` makes an optional key absent."""
WIDTH = 120


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One field of a section class as the source has it."""

    name: str
    type: str
    default: str | None
    """Source of the default; None for a required key."""
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One section class as the source has it."""

    text: str
    keys: tuple[Key, ...]


def reference() -> str:
    """The page, in Markdown."""
    sections = {name: section for module in (config, config_data)
                for name, section in read_sections(Path(str(module.__file__)).read_text(encoding="utf-8")).items()}
    return "\n\n".join([HEAD, *_pages(sections, "JobConfig", "")]) + "\n"


def read_sections(source: str) -> dict[str, Section]:
    """Class name -> section, for every class with fields in the source text of a module."""
    statements = ast.parse(source).body
    aliases = {node.targets[0].id: node.value for node in statements
               if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}
    return {node.name: Section(text=ast.get_docstring(node) or "", keys=tuple(_keys(node, aliases)))
            for node in statements if isinstance(node, ast.ClassDef)}


def _keys(node: ast.ClassDef, aliases: dict[str, ast.expr]) -> Iterator[Key]:
    for field, text in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            yield Key(name=field.target.id, type=_type(field.annotation, aliases), text=_docstring(text),
                      default=_default(field.value) if field.value is not None else None)


def _docstring(statement: ast.stmt | None) -> str:
    """The text of a statement that is only a string, in one line; else nothing."""
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(text.split())
    return ""


def _type(annotation: ast.expr, aliases: dict[str, ast.expr]) -> str:
    """`fp32 | bf16` for a Literal, `list of int` for a tuple; other hints as they are. aliases: names given to hints."""
    match annotation:
        case ast.Name(id=name) if name in aliases:
            return _type(aliases[name], aliases)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            options = choices.elts if isinstance(choices, ast.Tuple) else [choices]
            return " | ".join(ast.unparse(option).strip("'") for option in options)
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[item, *_])):
            kind = _type(item, aliases)
            return f"list of ({kind})" if "|" in kind else f"list of {kind}"
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[names, values])):
            return f"mapping of {_type(names, aliases)} to {_type(values, aliases)}"
        case ast.BinOp(left=left, right=ast.Constant(value=None)):
            return f"{_type(left, aliases)} | null"
    return ast.unparse(annotation)


def _default(value: ast.expr) -> str:
    """The default as YAML would have it."""
    match value:
        case ast.Constant(value=None):
            return "null"
        case ast.Constant(value=bool(flag)):
            return str(flag).lower()
        case ast.Constant(value=constant):
            return str(constant)
        case ast.Call(func=ast.Name(id="field")):
            return "{}"
        case ast.Tuple(elts=items):
            return f"[{', '.join(map(_default, items))}]"
    return ast.unparse(value)


def _pages(sections: dict[str, Section], name: str, path: str) -> Iterator[str]:
    """A heading, the section's text and its keys; then the sections inside, and those that lists hold."""
    section = sections[name]
    inner = {key.name: kind for key in section.keys for kind in key.type.split(" | ") if kind in sections}
    listed = {f"{key.name}[]": kind for key in section.keys if (kind := key.type.removeprefix("list of ")) in sections
              and key.name not in inner}
    if path:
        plain = [_entry(path, key) for key in section.keys if key.type.removesuffix(" | null") not in sections]
        yield "\n".join([f"## {path}", section.text, "", *plain])
    for key, kind in (inner | listed).items():
        yield from _pages(sections, kind, f"{path}.{key}" if path else key)


def _entry(path: str, key: Key) -> str:
    needed = "required" if key.default is None else f"default {key.default or repr('')}"
    return "\n".join(wrap(f"- **`{path}.{key.name}`** ({key.type}; {needed}): {key.text}", WIDTH,
                          subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
