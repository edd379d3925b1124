"""Every layout trains as one rank does: 20 steps of loss and gradient norm, each gradient and weight at the end.

The normal run covers every pair of choices; `pytest -m slow tests/train/test_parity.py` runs all of them, with `-k
sharding` every level of sharding with what else lowers memory.
"""

from collections.abc import Iterable

import pytest
from jobs import JobRunner
from parity import (MESHES, SHARDINGS, Case, Reference, all_cases, case_job, case_name, check_parity, pairwise_cases,
                    sharding_cases)

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("case", pairwise_cases(), ids=case_name)
def test_layout_trains_as_one_rank_does(case: Case, run_job: JobRunner, reference: Reference) -> None:
    check_parity(run_job, reference, case_job(case))


def check_all(cases: Iterable[Case], run: JobRunner, reference: Reference) -> None:
    failures = []
    for case in cases:
        try:
            check_parity(run, reference, case_job(case))
        except AssertionError as error:
            failures.append(f"{case_name(case)}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.slow
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_every_layout_trains_as_one_rank_does(dtype: str, mesh: tuple[int, int, int], run_job: JobRunner,
                                              reference: Reference) -> None:
    check_all((case for case in all_cases() if (case["dtype"], case["mesh"]) == (dtype, mesh)), run_job, reference)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("level", SHARDINGS)
def test_every_sharding_trains_as_one_rank_does(level: str, run_job: JobRunner, reference: Reference) -> None:
    check_all((case for case in sharding_cases() if case["sharding"] == level), run_job, reference)
