"""Reads what ``sandhost doctor --leaks --json`` found and says it in a line."""

import json
import sys

report = json.load(sys.stdin)
found = {kind: rows for kind, rows in report.items() if isinstance(rows, list) and rows}
found.pop("unknown", None)
for kind, rows in found.items():
    print(f"   {kind}: {rows}")
if found or not report.get("clean", True):
    sys.exit("demo: a dead host left something on this machine")
print("   no process, no scratch directory, no socket, no staged file of a dead host")
