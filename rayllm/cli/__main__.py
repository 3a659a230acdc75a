"""`python -m rayllm.cli`, the same as the command `rayllm`."""

from rayllm.cli.main import main

main()
