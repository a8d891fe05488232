"""`python -m hisparsed`: the same as the `hisparsed` command, also for processes that it begins."""

import sys

from hisparsed.cli.app import main

if __name__ == "__main__":
    # Without a name multiprocessing lets its children import this file first, as it does with the
    # script of the command; `hisparsed.cli.app` prepares them for vLLM.
    sys.modules[__name__].__spec__ = None
    main()
