"""``python -m kvledger`` is ``kvledger``."""

from kvledger.cli import main

main()
