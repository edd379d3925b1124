"""The reference of all commands, made from the command line's own parser. `docs/cli.md` is this text."""

import argparse
from collections.abc import Iterator
from textwrap import wrap

HEAD = """# Commands

Every command with its arguments. `raytrain3d commands` prints this page; it is made from the parser of the command line.
Every command also takes `--help` and, to see the traceback of an error, `--debug`. Exit codes: 0 done, 1 it failed, 2
something to change first, 130 and 143 ended by Ctrl-C or SIGTERM; `submit --wait` and `logs --follow` give the driver's."""
WIDTH = 120
LEFT_OUT = {"--help", "--debug"}


def command_reference(parser: argparse.ArgumentParser) -> str:
    """The page, in Markdown."""
    return "\n\n".join([HEAD, *_pages(parser)]) + "\n"


def _pages(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A section for each command below `parser`, groups gone into."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _pages(command)
            return
    yield _section(parser)


def _section(parser: argparse.ArgumentParser) -> str:
    actions = [action for action in parser._actions if not LEFT_OUT & set(action.option_strings)]
    positional = [_name(action) for action in actions if not action.option_strings]
    heading = " ".join([f"## {parser.prog}", *positional])
    return "\n".join([heading, parser.description or "", "", *map(_entry, actions)]).rstrip()


def _name(action: argparse.Action) -> str:
    """`FILE`, `[key=value ...]`, `--ranks NUMBER`, `--launcher ray|local|inline`."""
    value = "|".join(map(str, action.choices)) if action.choices is not None else action.metavar
    if not action.option_strings:
        return f"[{value} ...]" if action.nargs == "*" else str(value)
    takes_value = action.nargs != 0
    return f"{action.option_strings[0]} {value or action.dest.upper()}" if takes_value else action.option_strings[0]


def _entry(action: argparse.Action) -> str:
    needed = "; required" if action.required and action.option_strings else ""
    return "\n".join(wrap(f"- **`{_name(action)}`**: {action.help or ''}{needed}", WIDTH, subsequent_indent="  ",
                          break_long_words=False, break_on_hyphens=False))
