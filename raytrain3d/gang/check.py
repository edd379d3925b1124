"""`raytrain3d check`: start the gangs, try everything a job needs, and report what was found."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from raytrain3d.gang.fleet import Fleet
from raytrain3d.gang.worker import NodeFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """What was found. `links`: (rank, name of the measurement) -> value."""

    facts: tuple[NodeFacts, ...]
    disk: dict[str, float]
    """Node -> bytes a second written to the run directory."""
    links: dict[tuple[int, str], float]

    @property
    def warnings(self) -> list[str]:
        """What may make a job wrong or slow."""
        models = Counter(fact.cpu_model for fact in self.facts)
        if len(models) < 2:
            return []
        common = models.most_common(1)[0][0]
        odd = sorted({fact.address for fact in self.facts if fact.cpu_model != common})
        text = f"CPU models differ ({', '.join(sorted(models))}; odd nodes: {', '.join(odd)})"
        return [f"{text}: the same seed gives equal bits only on equal CPUs"]

    def table(self) -> str:
        """Text for people."""
        lines = ["ranks"] + [f"  rank {fact.rank:4d}  {fact.host} ({fact.address})  {fact.device}  {fact.cpu_model}"
                             for fact in self.facts]
        lines += ["disk"] + [f"  {node}: {rate / 1e6:,.0f} MB/s written" for node, rate in sorted(self.disk.items())]
        lines += ["links"] + [f"  rank {rank:4d}  {name}: {value:,.3g}"
                              for (rank, name), value in sorted(self.links.items())]
        return "\n".join([*lines, *([f"warning: {text}" for text in self.warnings] or ["all well"])])


def check_fleet(fleet: Fleet, run_directory: str, host: str, port: int,
                check_nodes: Callable[[set[str]], None]) -> CheckReport:
    """Raises whatever would end a job that starts on this fleet."""
    facts = fleet.facts()
    check_nodes(set(fleet.nodes.values()))
    fleet.probe(run_directory)
    disk = fleet.measure_disk(run_directory)
    fleet.join(host, port, 0)
    links = {(rank, name): value for rank, found in zip(sorted(fleet.nodes), fleet.measure_links(), strict=True)
             for name, value in found.items()}
    return CheckReport(facts=tuple(facts), disk=disk, links=links)
