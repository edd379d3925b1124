"""Are two runs the same? Their numbers step by step, and their newest checkpoints box by box."""

import json
from pathlib import Path
from typing import Any

from raytrain3d.checkpoint.manifest import Entry
from raytrain3d.checkpoint.store import read_manifest, step_directory, steps
from raytrain3d.errors import ConfigError

NUMBERS = ("loss", "gradient_norm", "tokens", "learning_rate")


def compare_runs(first: str, second: str) -> tuple[bool, str]:
    """Whether all that both have is equal to the bit, and a text that says so. ConfigError when they have nothing in common.
    """
    lines = [_metrics(first), _metrics(second)]
    common = sorted(lines[0].keys() & lines[1].keys())
    if not common:
        raise ConfigError(f"{first} and {second} have no step in common: nothing to compare")
    different = [step for step in common if any(lines[0][step][key] != lines[1][step][key] for key in NUMBERS)]
    text = [f"steps {common[0]} to {common[-1]}: loss, gradient norm, tokens and learning rate are the same to the bit"]
    if different:
        losses = " and ".join(repr(each[different[0]]["loss"]) for each in lines)
        text = [f"{len(different)} of {len(common)} steps differ, the first is step {different[0]} (loss {losses})"]
    saved = sorted(set(steps(first)) & set(steps(second)))
    if not saved:
        return not different, "\n".join([*text, "no checkpoint of the same step in both"])
    boxes = [_boxes(run, saved[-1]) for run in (first, second)]
    if boxes[0].keys() != boxes[1].keys():
        return not different, "\n".join([*text, f"checkpoints of step {saved[-1]} are cut differently: not compared"])
    changed = [box for box, checksum in boxes[0].items() if boxes[1][box] != checksum]
    text.append(f"checkpoint of step {saved[-1]}: " + (
        f"all {len(boxes[0])} boxes of weights and moments are the same" if not changed else
        f"{len(changed)} of {len(boxes[0])} boxes differ, such as {changed[0][1]} of {changed[0][0]}"))
    return not different and not changed, "\n".join(text)


def _metrics(run: str) -> dict[int, dict[str, Any]]:
    path = Path(run) / "metrics.jsonl"
    try:
        return {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give the directory of a run") from error


def _boxes(run: str, step: int) -> dict[tuple[str, str, str], str]:
    """(parameter, kind, rectangle) -> checksum"""
    def key(entry: Entry) -> tuple[str, str, str]:
        return entry.name, entry.kind, f"{entry.rectangle.offset} {entry.rectangle.shape}"

    return {key(entry): entry.checksum for entry in read_manifest(step_directory(run, step)).entries}
