"""`python -m nbep` is the `nbep` command."""

import sys

from nbep.cli import main

sys.exit(main())
