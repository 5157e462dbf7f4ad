"""`python -m longspan.cli` runs the command `longspan`."""

from longspan.cli import leave, main

if __name__ == "__main__":
    leave(main())
