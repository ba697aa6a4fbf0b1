"""The doctor: what a living host holds unexplained, and what dead hosts left.

Public: `leaks`, `leftovers`.
"""
