"""`python -m nbep.litmus` is `nbep litmus`."""

import sys

from nbep.litmus.command import main

sys.exit(main())
