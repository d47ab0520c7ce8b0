"""`python -m studies.capacity`."""

from studies.capacity.search import main

main()
