"""The sections of a job about its data: what is trained on, how it is prepared, and what is evaluated."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from raytrain3d.config_checks import fraction, positive, require


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One data set of a mixture."""

    name: str
    """What phases, records and messages call it."""
    path: str
    """Directory or URI of a prepared data set."""
    weight: float | None = None
    """Its share of the samples relative to the other sources' (`data.temperature` applies to it). Give it for all sources
    or for none. Default: the source's number of training tokens."""
    epochs: float | None = None
    """Most passes over it. When they are used up the other sources share its place, in proportion. Absent: no limit."""

    def __post_init__(self) -> None:
        require(bool(self.name), "data.sources.name", self.name, "must not be empty")
        require(bool(self.path), "data.sources.path", self.path, "must name a prepared data set")
        positive("data.sources", weight=self.weight, epochs=self.epochs)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseConfig:
    """A later part of a run, with another mix of the same sources."""

    tokens: int
    """Tokens of the run after which it begins; rounded up to whole samples."""
    weights: dict[str, float]
    """Name of a source -> its share relative to the others'. Sources that are not named rest."""

    def __post_init__(self) -> None:
        positive("data.phases", tokens=self.tokens)
        require(any(self.weights.values()), "data.phases.weights", self.weights, "must give a source a weight above 0")
        for name, weight in self.weights.items():
            require(weight >= 0, f"data.phases.weights.{name}", weight, "must be at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Token data, made by `raytrain3d data prepare`."""

    path: str | None = None
    """Directory or URI of the data set. Give this or `sources`."""
    sources: tuple[SourceConfig, ...] = ()
    """Data sets of a mixture, instead of `path`. Of the first n samples of a run, whatever n, each source has its exact
    share but for less than one sample."""
    temperature: float = 1.0
    """Shares of sources are their weights to the power 1 / temperature: above 1 small ones get more. Weights of phases are
    taken as they are."""
    phases: tuple[PhaseConfig, ...] = ()
    """Later parts of the run with another mix, in order."""
    mask_documents: bool = False
    """Treat each document of a sample as if it stood alone: attention and positions begin anew at it, and its first token
    is not predicted from the document before. Otherwise a sample is one run of tokens."""
    cache_directory: str | None = None
    """Local directory in which every node keeps copies of shards that lie at a URI. Default: `raytrain3d-data` in the
    directory for temporary files."""
    cache_gib: float = 100.0
    """Most that these copies take on a node, in GiB; those not used for longest make room for others."""
    text: tuple[str, ...] = ()
    """Files to prepare, as glob patterns of paths or URIs (`{stdlib}` stands for the Python standard library's directory; a
    pattern that begins with `!` leaves out what it matches). Parquet (`.parquet`), Arrow (`.arrow`, `.feather`, `.ipc`) and
    JSON lines (`.jsonl`, `.ndjson`) hold a document a row, any other file is a document itself; `.gz` or `.zst` may follow.
    When given and `path` does not exist yet, `train` prepares it from them first."""
    column: str = "text"
    """Column, or key of a JSON line, that has the text."""
    bad_records: Literal["skip", "fail"] = "skip"
    """What to do when preparing with records that are no documents (not UTF-8, no such column, null, empty, too long):
    `skip` and list them, or `fail` at the first one."""
    max_record_bytes: int = 67_108_864
    """Longest document of a row or line, in UTF-8 bytes. A file that is a document itself may be longer."""
    drop_duplicates: bool = False
    """Leave out documents that repeat an earlier one to the byte when preparing; the input is then read twice."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of the `tokenizer.json` that `path` was or will be prepared with."""
    validation_fraction: float = 0.05
    """Share of documents held out for validation when preparing."""

    def __post_init__(self) -> None:
        require((self.path is None) != (not self.sources), "data.path", self.path,
                "must name a directory of token shards, or give data.sources instead")
        require(self.path != "", "data.path", self.path, "must name a directory of token shards")
        positive("data", temperature=self.temperature, max_record_bytes=self.max_record_bytes,
                 cache_gib=self.cache_gib)
        fraction("data", validation_fraction=self.validation_fraction)
        names = unique("data.sources", (source.name for source in self.sources))
        given = [source.name for source in self.sources if source.weight is not None]
        require(len(given) in (0, len(names)), "data.sources.weight", given, "give it for all sources or for none")
        starts = [phase.tokens for phase in self.phases]
        require(starts == sorted(set(starts)), "data.phases.tokens", starts, "each must be above the one before")
        for phase in self.phases:
            for name in phase.weights:
                require(name in names, "data.phases.weights", name, f"valid are the sources {', '.join(names) or '(none)'}")

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """`path` alone is a mixture of one."""
        return self.sources if self.path is None else (SourceConfig(name="data", path=self.path),)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSetConfig:
    """One validation set."""

    name: str
    """What records and messages call it."""
    path: str
    """Directory or URI of a prepared data set."""
    split: Literal["train", "validation"] = "validation"
    """Part of it that is evaluated."""

    def __post_init__(self) -> None:
        require(bool(self.name), "evaluate.sets.name", self.name, "must not be empty")
        require(bool(self.path), "evaluate.sets.path", self.path, "must name a prepared data set")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """Validation loss at intervals."""

    interval: int | None = None
    """Steps between evaluations; one more follows the last step. Absent: only the one after the last step."""
    samples: int = 64
    """Samples of each validation set, spread evenly over it, always the same ones (all of it where it is smaller)."""
    sets: tuple[EvaluationSetConfig, ...] = ()
    """Validation sets, each with its own loss, perplexity and bits per byte; the validation loss of the run is the mean
    over the tokens of all. Default: the validation split of `data.path`, or of every source."""

    def __post_init__(self) -> None:
        positive("evaluate", interval=self.interval, samples=self.samples)
        unique("evaluate.sets", (each.name for each in self.sets))


def unique(key: str, names: Iterable[str]) -> list[str]:
    """The names; ConfigError when one comes twice."""
    found = list(names)
    twice = next((name for name in found if found.count(name) > 1), None)
    require(twice is None, f"{key}.name", twice, "must not be given twice")
    return found
