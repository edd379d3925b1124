"""`python -m raytrain3d.gang.ask RUN COMMAND`: sends a command to a run of the cluster that this process is a job of.

The answer is the run's status, a JSON line at the end of the output. Exit code 1 when the run does not answer.
"""

import json
import sys
from dataclasses import asdict

from raytrain3d.gang.ray_mailbox import ask_actor


def main(run: str, command: str) -> int:
    status = ask_actor(run, command, None)
    sys.stdout.write("" if status is None else json.dumps(asdict(status)) + "\n")
    return 1 if status is None else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
