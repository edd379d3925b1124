"""`python -m raytrain3d`, the same as the command `raytrain3d`."""

import sys

from raytrain3d.cli import main

if __name__ == "__main__":
    sys.exit(main())
