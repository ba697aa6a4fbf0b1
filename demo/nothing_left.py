"""Compares what ``sandhost doctor --leaks --json`` found before and after the demo."""

import json
import sys
from pathlib import Path

before, after = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
found = {
    kind: fresh
    for kind, rows in after.items()
    if isinstance(rows, list) and kind != "unknown"
    if (fresh := [row for row in rows if row not in before.get(kind, [])])
}
for kind, rows in found.items():
    print(f"   {kind}: {rows}")
if found:
    sys.exit("demo: a host left something on this machine")
print("   no process, no scratch directory, no socket, no staged file of a dead host")
