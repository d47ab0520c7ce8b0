"""`python -m studies.capacity`."""

from studies.capacity.search import main

if __name__ == "__main__":
    main()
