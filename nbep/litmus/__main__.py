"""`python -m nbep.litmus` prints the table."""

from nbep.litmus.table import main

main()
