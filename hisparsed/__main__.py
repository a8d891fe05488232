"""`python -m hisparsed`: the same as the `hisparsed` command."""

from hisparsed.cli.app import main

if __name__ == "__main__":
    main()
