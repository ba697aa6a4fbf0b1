"""The names for Python programs: `sandhost.fleet`, and beside Ray `sandhost.ray`.

Nothing is imported here: a program that uses no Ray never loads it.
"""
