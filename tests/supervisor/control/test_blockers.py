"""The facts that a stop gives of a child that it waits for."""

from supervisor.control.blockers import last_request
from tests.helpers.sessions import Hall, hall

__all__ = ["hall"]


async def test_the_last_request_is_told_as_its_line_begins(hall: Hall) -> None:
    line = hall.connect()
    assert last_request(line.session.last_request) is None
    fileno = await line.open(b"a", b"w")
    asked = {
        b"WRITE %d 3\nabc" % fileno: f"WRITE {fileno} 3",
        b"STAT false a\n": "STAT a",
        b"LLM_QUOTA\n": "LLM_QUOTA",
        b"NONSENSE\n": "invalid",
    }
    for request, told in asked.items():
        await line.send(request)
        await line.line()
        assert last_request(line.session.last_request) == told
