"""Pages that explain with numbers: each shown output is what its command prints, and each number in the text is in one of
them. Translations show the same commands and outputs."""

import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from raytrain3d.cli import main

ROOT = Path(__file__).parent.parent
SHOWN = re.compile(r"^```sh\nraytrain3d ([^\n]*)\n```\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES: dict[str, str | None] = {"docs/parallelism.md": "docs/parallelism.zh-CN.md", "docs/planning.md": None}
"""With their translations."""
NAMES = re.compile(r"\]\([^)]*\)|ZeRO-\d|Llama-[\d.]+-\d+B|\b1F1B\b|FP32|bf16|`[^`]*`|^\d+\. |80 GB", re.MULTILINE)
"""What has digits and is no figure: links, names, code, numbered lists, the size that a GPU is sold with."""


@cache
def printed(command: str) -> list[str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.chdir(ROOT):
        assert main(shlex.split(command)) == 0
    return [line.rstrip() for line in output.getvalue().splitlines()]


@pytest.mark.parametrize(("page", "command"), [
    (page, command) for page in PAGES for command, _ in SHOWN.findall((ROOT / page).read_text())])
def test_shown_output_is_what_the_command_prints(page: str, command: str) -> None:
    shown = dict(SHOWN.findall((ROOT / page).read_text()))[command]
    rest = iter(printed(command))
    for line in shown.splitlines():
        assert line in rest, f"{page}: `raytrain3d {command}` does not print, in this order:\n{line}"


@pytest.mark.parametrize(("page", "translation"), [pair for pair in PAGES.items() if pair[1] is not None])
def test_translations_show_the_same(page: str, translation: str) -> None:
    first, second = ((ROOT / each).read_text() for each in (page, translation))
    assert SHOWN.findall(first) == SHOWN.findall(second)
    for part in (r"^## ", r"^- ", r"^\d\. ", r"^\| "):
        assert len(re.findall(part, first, re.MULTILINE)) == len(re.findall(part, second, re.MULTILINE)), part


@pytest.mark.parametrize("page", [each for pair in PAGES.items() for each in pair if each is not None])
def test_every_number_in_the_text_is_in_an_output(page: str) -> None:
    text = (ROOT / page).read_text()
    outputs = " ".join(command + " " + output for command, output in SHOWN.findall(text))
    known = set(re.findall(r"\d[\d,.]*", outputs))
    prose = NAMES.sub(" ", SHOWN.sub(" ", text))
    unknown = set(re.findall(r"\d[\d,.]*\d|\d", prose)) - known
    assert not unknown, f"{page}: {unknown} is in no shown output"
