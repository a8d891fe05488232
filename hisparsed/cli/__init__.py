"""The `hisparsed` command. One module a command, imported only when that command runs.

What a command does lives elsewhere (engine, control, replay); here are options, output and exit
codes.
"""
