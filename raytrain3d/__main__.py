"""`python -m raytrain3d`, the same as the command `raytrain3d`."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - whatever `python` is on a cluster gets here
    sys.exit("error: raytrain3d needs Python 3.11 or newer, and {} is {}.{}: run another one by its path (on a cluster: "
             "`raytrain3d submit --python`)".format(sys.executable, *sys.version_info[:2]))

from raytrain3d.cli import main

if __name__ == "__main__":
    sys.exit(main())
