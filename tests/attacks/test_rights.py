import pytest
from pathlib import Path
from tests.helpers.hosts import Stage
pytestmark=[pytest.mark.slow, pytest.mark.attack]
@pytest.mark.parametrize("publish", ["direct", "on-close"])
async def test_x(stage: Stage, publish) -> None:
    child = await stage.puppet(publish=publish)
    a = await child.open(b"a", b"w")
    big = 2 << 20
    b=a+1
    child.tell(f"""(send(b"WRITE {a} {big}\\n" + b"x"*{big} + b"WRITE {a} 3\\nabcCLOSE {a}\\nOPEN b w false\\nWRITE {b} 3\\nabcCLOSE {b}\\nOPEN c w false\\nWRITE {b+1} {big}\\n" + b"x"*{big}+b"WRITE {b+1} 3\\nabcCLOSE {b+1}\\n"), die())""")
    print(await child.child.wait_gone())
    for n in "abc":
        p=stage.root/n
        print(n, p.exists() and p.stat().st_size)
    print(stage.journal.read_text())
    assert 0
