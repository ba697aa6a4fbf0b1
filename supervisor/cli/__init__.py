"""The command line: the words of each command, and commands that only show.

Public: `app`.
"""
