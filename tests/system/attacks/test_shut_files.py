"""Files that the kernel keeps shut, also where no namespace hides them."""

import errno

from supervisor.sandbox.plan import make_profile
from tests.system.attacks.conftest import only
from tests.system.attacks.test_walls import Attacker, attacker

__all__ = ["attacker"]

pytestmark = only("auto")

KERNELS = make_profile("kernel's", ["landlock", "seccomp"])


async def test_nothing_outside_is_cut_short_by_its_name(attacker: Attacker) -> None:
    file = attacker.stage.where / "note"
    file.write_text("whole")
    file.chmod(0o666)
    attacker.stage.sandbox = KERNELS
    program = "print(attempt(lambda: os.truncate(sys.argv[1], 0)))"
    assert await attacker.says(program, str(file)) == errno.errorcode[errno.EACCES]
    assert file.read_text() == "whole"


async def test_a_private_root_is_not_read_by_its_path(attacker: Attacker) -> None:
    note = attacker.stage.root / "note"
    note.write_text("by the door")
    note.chmod(0o644)
    attacker.stage.root.chmod(0o755)
    program = "print(attempt(lambda: os.open(sys.argv[1], os.O_RDONLY)))"
    for sandbox in (attacker.stage.sandbox, KERNELS):
        attacker.stage.sandbox = sandbox
        assert await attacker.says(program, str(note)) in {"EACCES", "ENOENT"}
