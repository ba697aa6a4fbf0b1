"""The directory: what it orders, adopts, loses and places again."""

import msgspec
import pytest

from supervisor.fleet.directory import (
    MOST_GONE,
    MOST_OVER,
    Directory,
    FleetError,
    PlacementRequest,
)
from supervisor.fleet.lease import LEASE_S, SILENT_S
from supervisor.fleet.listings import ShownChild
from supervisor.fleet.messages import (
    VERSION,
    AskSlice,
    Base,
    Beat,
    ChildNews,
    ChildReport,
    Confirm,
    End,
    FromNode,
    HandBack,
    Join,
    Joined,
    Leave,
    Message,
    Program,
    Refused,
    Renewed,
    Session,
    SliceGranted,
    SliceNews,
    SliceReport,
    SlicesSettled,
    Start,
)
from supervisor.fleet.placement import Needs
from supervisor.fleet.slices import DAY, NEVER
from supervisor.fleet.step import Moment, Step
from supervisor.spawn.restart_policies import RESTARTS

TRUE = Program(("true",))
ALWAYS = Program(("true",), restart="always")


class Scene:
    """A directory, its store and a clock.

    Attributes:
        granted: the last slice.
    """

    def __init__(self) -> None:
        self.now_s = 100.0
        self.rows: dict[tuple[str, str], bytes] = {}
        self.epoch = 0
        self.sessions: dict[str, Session] = {}
        self.granted = ""
        self.restart()

    def restart(self, fleet: str = "one", lease_s: float = LEASE_S) -> None:
        """Start a directory on what is stored; a new store is a fleet of its own."""
        self.epoch += 1
        stored = [(table, key, row) for (table, key), row in self.rows.items()]
        self.directory = Directory(self.epoch, stored, self.now, lease_s)
        self.store(self.directory.name_fleet(fleet))

    @property
    def now(self) -> Moment:
        """The time."""
        return Moment(self.now_s, 1e9 + self.now_s)

    def store(self, step: Step) -> list[tuple[str, Message]]:
        """Store what a step changes; return what it sends."""
        for change in step.changes:
            key = (change.table, change.key)
            if change.row is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = msgspec.msgpack.encode(change.row)
        return [(send.node, send.message) for send in step.sends]

    def tell(self, message: FromNode) -> list[Message]:
        """Let a node send a message; return the answers."""
        sends = self.store(self.directory.receive(message, self.now))
        return [sent for _, sent in sends]

    def wait(self, seconds: float) -> list[tuple[str, Message]]:
        """Let time pass; return what is sent at its end."""
        self.now_s += seconds
        return self.store(self.directory.tick(self.now))

    def join(  # noqa: PLR0917 - as a node has them
        self,
        node: str,
        number: int = 1,
        ledger: str | None = None,
        labels: tuple[str, ...] = (),
        children: tuple[ChildReport, ...] = (),
        slices: tuple[SliceReport, ...] = (),
        version: str = VERSION,
        capacity: int = 2,
        fleet: str = "",
    ) -> Message:
        """Let a node join; return the last answer."""
        session = Session(ledger or f"L{node}", number)
        join = Join(
            node, session, 1, version, labels, capacity, children, slices, fleet=fleet
        )
        answer = self.tell(join)[-1]
        if isinstance(answer, Joined):
            self.sessions[node] = session
        return answer

    def beat(self, node: str, others: int = 0) -> Message:
        """Let a node beat; return the answer."""
        (answer,) = self.tell(Beat(node, self.sessions[node], 9, others))
        return answer

    def spawn(
        self,
        name: str = "x",
        program: Program = TRUE,
        count: int | None = None,
        needs: Needs | None = None,
        *,
        wait: bool = False,
    ) -> list[tuple[str, Message]]:
        """Spawn children; return what is sent."""
        request = PlacementRequest(name, program, needs or Needs(), count, wait)
        return self.store(self.directory.spawn(request, self.now)[1])

    def report(
        self, node: str, state: str, incarnation: int = 1, child: str = "c1"
    ) -> list[Message]:
        """Let a node tell of a child."""
        pid = 7 if state == "running" else None
        status = 3 if state == "ended" else None
        report = ChildReport(child, incarnation, state, pid, status, "why")
        return self.tell(ChildNews(node, self.sessions[node], report))

    def lose(self, node: str) -> None:
        """Let the lease of one node run out; the others beat."""
        for _ in range(5):
            for name in self.sessions.keys() - {node}:
                self.beat(name)
            self.wait(LEASE_S / 5)

    def child(self, name: str = "x") -> ShownChild:
        """Return a child as `ps` shows it."""
        shown = self.directory.ps().children
        return next(child for child in shown if child.name == name)

    def node_state(self, name: str) -> str:
        """Return a node's state as `ps` shows it."""
        shown = self.directory.ps().nodes
        return next(node.state for node in shown if node.name == name)


def starts(sends: list[tuple[str, Message]]) -> list[tuple[str, int]]:
    """Return (node, incarnation) of the starts that are ordered."""
    return [
        (node, message.incarnation)
        for node, message in sends
        if isinstance(message, Start)
    ]


@pytest.fixture
def scene() -> Scene:
    """A fleet of two nodes with room for two children each."""
    scene = Scene()
    scene.join("a")
    scene.join("b", labels=("gpu",))
    return scene


# spec FL4
def test_a_child_is_ordered_once_and_runs_when_its_node_says_so(scene: Scene) -> None:
    assert starts(scene.spawn()) == [("a", 1)]
    assert scene.child().state == "placing"
    scene.report("a", "running")
    assert (scene.child().state, scene.child().pid) == ("running", 7)


# spec FL3, FL11
def test_a_child_of_which_only_the_end_was_heard_had_begun(scene: Scene) -> None:
    scene.spawn()
    over = ChildReport("c1", 1, "ended", pid=7, status=0)
    scene.tell(ChildNews("a", scene.sessions["a"], over))
    shown = scene.child()
    assert (shown.state, shown.pid, shown.status) == ("ended", 7, 0)


# spec FL4
def test_an_order_without_an_answer_is_sent_again_to_the_same_node(
    scene: Scene,
) -> None:
    scene.spawn()
    for _ in range(3):
        scene.beat("a")
        scene.beat("b")
        assert starts(scene.wait(1.0)) == [("a", 1)]
    assert scene.child().state == "placing"


# spec FL4
def test_it_goes_elsewhere_only_when_its_node_is_lost(scene: Scene) -> None:
    scene.spawn(program=ALWAYS)
    sends = []
    for _ in range(10):
        scene.beat("b")
        sends += scene.wait(0.5)
    assert set(starts(sends)) == {("a", 1), ("b", 2)}
    assert scene.node_state("a") == "lost"


# spec FL4
def test_a_report_of_another_incarnation_or_session_changes_nothing(
    scene: Scene,
) -> None:
    scene.spawn()
    scene.report("a", "ended", incarnation=2)
    assert scene.child().state == "placing"
    report = ChildReport("c1", 1, "ended", status=0)
    scene.tell(ChildNews("a", Session("La", 9), report))
    assert scene.child().state == "placing"


# spec FL4
def test_all_children_of_a_request_are_placed_or_none(scene: Scene) -> None:
    with pytest.raises(FleetError, match="5 children: there is room for 4"):
        scene.spawn(count=5)
    assert scene.directory.ps().children == ()
    scene.spawn(count=4)
    names = [child.name for child in scene.directory.ps().children]
    assert names == ["x-0", "x-1", "x-2", "x-3"]


# spec FL4
def test_what_is_refused_at_once_is_not_in_the_table(scene: Scene) -> None:
    with pytest.raises(FleetError, match="no node has these labels"):
        scene.spawn(needs=Needs(labels=("tpu",)))
    scene.spawn()
    with pytest.raises(FleetError, match="the name is taken"):
        scene.spawn()
    assert len(scene.directory.ps().children) == 1


# spec FL4
def test_a_child_waits_only_if_asked_and_says_for_what(scene: Scene) -> None:
    scene.spawn(needs=Needs(labels=("tpu",)), wait=True)
    assert scene.child().state == "waiting"
    assert "no node has these labels" in scene.child().reason
    scene.join("c", labels=("tpu",))
    assert starts(scene.wait(0.1)) == [("c", 1)]


# spec FL4
def test_a_child_that_waits_delays_no_other(scene: Scene) -> None:
    scene.spawn("x", needs=Needs(labels=("tpu",)), wait=True)
    scene.spawn("y", count=4)
    scene.spawn("z", wait=True)
    scene.report("a", "ended", child="c2")
    assert scene.child("z").state == "placing"
    assert scene.child("x").state == "waiting"


# spec FL4
def test_a_child_that_a_node_refuses_is_tried_on_another(scene: Scene) -> None:
    scene.spawn()
    scene.report("a", "refused")
    assert (scene.child().node, scene.child().incarnation) == ("b", 2)


# spec FL4
@pytest.mark.parametrize("restart", RESTARTS)
def test_a_child_that_all_nodes_refuse_ends_with_the_reason(
    scene: Scene, restart: str
) -> None:
    scene.spawn(program=Program(("true",), restart=restart))
    scene.report("a", "refused")
    scene.restart()
    scene.beat("a", others=2)
    scene.report("b", "refused", incarnation=2)
    assert (scene.child().state, scene.child().reason) == ("ended", "why")


# spec FL4
def test_a_child_that_may_wait_waits_where_all_nodes_refuse_it(scene: Scene) -> None:
    scene.spawn(wait=True)
    scene.report("a", "refused")
    scene.report("b", "refused", incarnation=2)
    assert scene.child().state == "waiting"
    scene.beat("a")
    assert starts(scene.wait(0.1)) == [("a", 3)]


# spec FL4, FL5
def test_a_child_whose_only_node_is_lost_before_it_began_ends(scene: Scene) -> None:
    scene.spawn(program=ALWAYS, needs=Needs(node="a"))
    scene.lose("a")
    assert scene.child().state == "ended"
    assert "node 'a' lost: not heard for 5 s" in scene.child().reason


# spec FL5: it waits for a place, also where no node takes it at first.
@pytest.mark.parametrize("is_first", [True, False])
def test_a_child_that_has_run_waits_where_all_nodes_refuse_it(
    scene: Scene, is_first: bool
) -> None:
    scene.spawn(program=ALWAYS)
    if not is_first:
        scene.report("a", "refused")
    first, other, number = ("a", "b", 1) if is_first else ("b", "a", 2)
    scene.report(first, "running", incarnation=number)
    scene.lose(first)
    scene.restart()
    scene.report(other, "refused", incarnation=number + 1)
    assert scene.child().state == "waiting"
    scene.beat(other)
    assert starts(scene.wait(0.1)) == [(other, number + 2)]


# spec FL4
def test_others_of_a_nodes_daemon_take_room(scene: Scene) -> None:
    scene.beat("a", others=2)
    assert starts(scene.spawn()) == [("b", 1)]


# spec FL4
def test_an_end_is_ordered_until_it_is_answered(scene: Scene) -> None:
    scene.spawn()
    step = scene.directory.kill("x", "KILL", scene.now)
    assert [send.message for send in step.sends] == [
        End(1, scene.sessions["a"], "c1", 1, "KILL")
    ]
    scene.report("a", "running")
    scene.beat("a")
    sends = scene.wait(1.0)
    assert [type(message) for _, message in sends] == [End]
    scene.report("a", "ended")
    assert (scene.child().state, scene.child().status) == ("ended", 3)


# spec FL5
def test_a_silent_node_is_unknown_and_up_again_when_it_is_heard(scene: Scene) -> None:
    scene.spawn()
    scene.report("a", "running")
    scene.wait(SILENT_S)
    assert (scene.node_state("a"), scene.child().state) == ("unknown", "unknown")
    assert isinstance(scene.beat("a"), Renewed)
    assert (scene.node_state("a"), scene.child().state) == ("up", "running")


# spec FL5
def test_a_wall_clock_that_jumps_loses_no_node(scene: Scene) -> None:
    scene.spawn()
    scene.report("a", "running")
    for wall_s in (0.0, 4e9, 1e9):
        scene.now_s += 1.0
        now = Moment(scene.now_s, wall_s)
        for node in ("a", "b"):
            beat = Beat(node, scene.sessions[node], 9)
            scene.store(scene.directory.receive(beat, now))
        scene.store(scene.directory.tick(now))
        assert (scene.node_state("a"), scene.node_state("b")) == ("up", "up")
    assert (scene.child().state, scene.child().incarnation) == ("running", 1)


# spec FL5
def test_a_loss_is_stored_with_what_is_placed_again(scene: Scene) -> None:
    scene.spawn(program=ALWAYS)
    scene.report("a", "running")
    scene.wait(LEASE_S - 1)
    scene.beat("b")
    scene.now_s += 1.0
    step = scene.directory.tick(scene.now)
    tables = [(change.table, change.key) for change in step.changes]
    assert tables.index(("nodes", "a")) < tables.index(("children", "c1"))
    assert starts(scene.store(step)) == [("b", 2)]


# spec FL5
def test_a_renewal_after_the_loss_is_refused(scene: Scene) -> None:
    scene.wait(LEASE_S)
    assert isinstance(scene.beat("a"), Refused)
    assert isinstance(scene.join("a"), Refused)
    assert isinstance(scene.join("a", number=2), Joined)


# spec FL5
def test_a_beat_that_comes_with_the_end_of_the_lease_is_too_late(scene: Scene) -> None:
    scene.now_s += LEASE_S
    assert isinstance(scene.beat("a"), Refused)
    assert scene.node_state("a") == "lost"


# spec FL5
@pytest.mark.parametrize(
    ("restart", "state"), [("no", "lost"), ("on-failure", "placing")]
)
def test_the_policy_says_what_becomes_of_a_lost_nodes_children(
    scene: Scene, restart: str, state: str
) -> None:
    scene.spawn(program=Program(("true",), restart=restart))
    scene.report("a", "running")
    scene.lose("a")
    assert scene.child().state == state
    assert "node 'a' lost: not heard for 5 s" in scene.child().reason


# spec FL5
def test_a_daemon_that_joins_again_has_lost_its_children(scene: Scene) -> None:
    scene.spawn()
    scene.report("a", "running")
    scene.join("a", number=2)
    assert (scene.node_state("a"), scene.child().state) == ("up", "lost")


# spec FL5
def test_a_join_that_was_overtaken_by_a_later_one_is_refused(scene: Scene) -> None:
    scene.join("a", number=3)
    scene.spawn()
    assert isinstance(scene.join("a", number=2), Refused)
    assert scene.child().state == "placing"


# spec FL2
def test_after_a_restart_every_node_has_one_full_lease(scene: Scene) -> None:
    scene.spawn()
    scene.report("a", "running")
    scene.now_s += 60.0
    scene.restart()
    scene.wait(LEASE_S - 0.1)
    assert scene.child().state == "unknown"
    assert isinstance(scene.beat("a"), Renewed)
    assert scene.child().state == "running"
    scene.wait(LEASE_S)
    assert scene.child().state == "lost"


# spec FL2
def test_what_matches_is_adopted_and_the_rest_is_ended(scene: Scene) -> None:
    scene.spawn()
    scene.restart()
    running = tuple(
        ChildReport(child, incarnation, "running", pid=5)
        for child, incarnation in (("c1", 1), ("c1", 7), ("c8", 1))
    )
    session = scene.sessions["a"]
    answers = scene.tell(Join("a", session, 4, VERSION, (), 2, running, ()))
    assert [message for message in answers if isinstance(message, End)] == [
        End(2, session, "c1", 7),
        End(2, session, "c8", 1),
    ]
    assert (scene.child().state, scene.child().pid) == ("running", 5)


# spec FL2
def test_a_store_holds_all_that_a_directory_knows(scene: Scene) -> None:
    scene.store(scene.directory.open_account("t", 160.0, NEVER, scene.now))
    scene.tell(AskSlice("a", scene.sessions["a"], "t", 1, 1.0))
    scene.spawn(count=3)
    scene.report("a", "running")
    before = (scene.directory.ps(), scene.directory.quota())
    scene.restart()
    assert (scene.directory.ps(), scene.directory.quota()) == before


# spec FL2
def test_a_name_that_is_in_the_fleet_is_refused_and_its_node_untouched(
    scene: Scene,
) -> None:
    scene.spawn()
    refused = scene.join("a", ledger="L9")
    assert isinstance(refused, Refused)
    assert refused.is_final
    assert "a node of that name is up" in refused.reason
    assert scene.child().state == "placing"


# spec FL11
def test_a_node_of_another_version_is_refused(scene: Scene) -> None:
    refused = scene.join("c", version="fleet-0")
    assert isinstance(refused, Refused)
    assert "'fleet-0'" in refused.reason
    assert VERSION in refused.reason


# spec FL2
def test_a_node_that_leaves_is_left_and_its_children_go_elsewhere(
    scene: Scene,
) -> None:
    scene.spawn(program=ALWAYS)
    scene.report("a", "running")
    scene.tell(Leave("a", scene.sessions["a"]))
    assert scene.node_state("a") == "left"
    assert starts(scene.wait(0.1)) == [("b", 2)]


# spec FL2
def test_an_end_is_confirmed_again_as_often_as_it_is_told(scene: Scene) -> None:
    scene.spawn()
    confirm = Confirm(1, scene.sessions["a"], "c1", 1)
    assert scene.report("a", "ended") == [confirm]
    assert scene.report("a", "ended") == [confirm]


# spec FL7
def test_only_a_member_gets_a_slice(scene: Scene) -> None:
    scene.store(scene.directory.open_account("t", 160.0, NEVER, scene.now))
    session = scene.sessions["a"]
    (grant,) = scene.tell(AskSlice("a", session, "t", 1, 1.0))
    assert isinstance(grant, SliceGranted)
    assert scene.tell(AskSlice("a", Session("La", 9), "t", 2, 1.0)) == []
    scene.wait(LEASE_S)
    assert scene.tell(AskSlice("a", session, "t", 2, 1.0)) == []


# spec FL7
def test_a_last_report_is_confirmed_of_a_lost_node_too(scene: Scene) -> None:
    scene.store(scene.directory.open_account("t", 160.0, NEVER, scene.now))
    (grant,) = scene.tell(AskSlice("a", scene.sessions["a"], "t", 1, 1.0))
    assert isinstance(grant, SliceGranted)
    scene.wait(LEASE_S)
    last = SliceNews("a", "La", (SliceReport(grant.slice, 4.0, is_last=True),))
    assert scene.tell(last) == [SlicesSettled(1, "La", (grant.slice,))]
    (account,) = scene.directory.quota().accounts
    assert (account.spent, account.free) == (4.0, 156.0)


# spec FL7
def test_a_lost_node_can_be_forgotten_and_no_other(scene: Scene) -> None:
    scene.store(scene.directory.open_account("t", 160.0, NEVER, scene.now))
    scene.tell(AskSlice("a", scene.sessions["a"], "t", 1, 1.0))
    with pytest.raises(FleetError, match="it is up; only a node that is lost"):
        scene.directory.forget("a", scene.now)
    scene.wait(LEASE_S)
    scene.store(scene.directory.forget("a", scene.now))
    (account,) = scene.directory.quota().accounts
    assert (account.spent, account.slices) == (10.0, ())
    with pytest.raises(FleetError, match="no such node"):
        scene.directory.forget("z", scene.now)


# spec FL4: what a refused order comes across would be stored by nothing.
def test_a_refused_order_changes_nothing(scene: Scene) -> None:
    scene.spawn("web", program=ALWAYS, needs=Needs(node="a"))
    scene.now_s += LEASE_S
    before = scene.directory.ps()
    with pytest.raises(FleetError, match="no such child"):
        scene.directory.kill("nobody", "TERM", scene.now)
    with pytest.raises(FleetError, match="no such node"):
        scene.directory.forget("nobody", scene.now)
    assert scene.directory.ps() == before
    scene.wait(0.1)
    shown = scene.directory.ps()
    assert [node.state for node in shown.nodes] == ["lost", "lost"]
    scene.restart()
    assert scene.directory.ps() == shown


# spec FL2
def test_children_that_are_over_are_listed_up_to_a_bound(scene: Scene) -> None:
    scene.join("c", capacity=MOST_OVER + 5)
    scene.spawn(count=MOST_OVER + 5, needs=Needs(node="c"))
    for number in range(1, MOST_OVER + 6):
        scene.report("c", "ended", child=f"c{number}")
    assert len(scene.directory.ps().children) == MOST_OVER
    stored = [key for table, key in scene.rows if table == "children"]
    assert len(stored) == MOST_OVER


# spec FL4: `spawn` fails by it, though all others have begun and ended meanwhile.
def test_a_child_that_was_not_started_is_listed_beside_all_that_have_ended(
    scene: Scene,
) -> None:
    scene.join("c", capacity=MOST_OVER + 5)
    scene.spawn(count=MOST_OVER + 5, needs=Needs(node="c"))
    scene.report("c", "failed")
    for number in range(2, MOST_OVER + 6):
        scene.report("c", "running", child=f"c{number}")
        scene.report("c", "ended", child=f"c{number}")
    for _ in range(2):
        assert (scene.child("x-0").state, scene.child("x-0").reason) == ("ended", "why")
        assert len(scene.directory.ps().children) == MOST_OVER + 1
        scene.restart()
    assert scene.directory.state("c2") is None
    assert [row.id for row in scene.directory.children(("c2", "c1"))] == ["c1"]


# spec FL7, FL11: machines that come and go have new names, for months.
def test_nodes_that_are_gone_are_listed_up_to_a_bound() -> None:
    scene = Scene()
    scene.store(scene.directory.open_account("t", 160.0, NEVER, scene.now))
    names = [f"n{number:04}" for number in range(MOST_GONE + 5)]
    for name in names:
        scene.join(name)
        ask = AskSlice(name, scene.sessions[name], "t", 1, 1.0)
        (answer,) = [one for one in scene.tell(ask) if not isinstance(one, HandBack)]
        if name != names[0]:
            assert isinstance(answer, SliceGranted)
            last = SliceReport(answer.slice, 0.0, is_last=True)
            scene.tell(SliceNews(name, f"L{name}", (last,)))
        scene.tell(Leave(name, scene.sessions[name]))
        scene.wait(0.1)
    kept = [names[0], *names[-MOST_GONE:]]  # the first one's slice counts
    for _ in range(2):
        assert [node.name for node in scene.directory.ps().nodes] == kept
        assert [key for table, key in scene.rows if table == "nodes"] == kept
        requests = [key for table, key in scene.rows if table == "requests"]
        assert requests == [f"t/{name}" for name in kept]
        scene.restart()
    scene.store(scene.directory.forget(names[0], scene.now))
    # Its machine was paused, clock and all, and it holds a lease by its own clock.
    refused = scene.join(names[1], fleet="one")
    assert isinstance(refused, Refused)
    assert refused.reason == "its session is over"
    assert isinstance(scene.join(names[1]), Joined)
    scene.tell(Leave(names[1], scene.sessions[names[1]]))
    shown = [node.name for node in scene.directory.ps().nodes]
    assert len(shown) == MOST_GONE
    assert shown[-1] == names[1]


# spec FL2
def test_a_child_that_is_over_can_be_ended_again_after_a_restart(scene: Scene) -> None:
    scene.spawn()
    scene.report("a", "ended")
    scene.restart()
    assert scene.store(scene.directory.kill("x", "KILL", scene.now)) == []
    assert scene.child().state == "ended"


# spec FL7
@pytest.mark.parametrize("name", ["", "a/b"])
def test_an_account_has_a_plain_name(scene: Scene, name: str) -> None:
    with pytest.raises(FleetError, match="cannot open account"):
        scene.directory.open_account(name, 160.0, NEVER, scene.now)


# spec FL2, FL4: a store gives its rows in the order of their keys, c10 before c9.
def test_children_keep_their_order_over_a_restart() -> None:
    scene = Scene()
    scene.spawn(count=11, wait=True)
    scene.rows = dict(sorted(scene.rows.items()))
    scene.restart()
    scene.join("a", capacity=11)
    ordered = [sent.child for _, sent in scene.wait(0.1) if isinstance(sent, Start)]
    assert ordered == [f"c{number}" for number in range(1, 12)]


# spec FL2
def test_the_name_of_a_child_that_is_over_is_free_again(scene: Scene) -> None:
    scene.spawn()
    scene.report("a", "ended")
    scene.spawn()
    (child,) = scene.directory.ps().children
    assert (child.id, child.state) == ("c2", "placing")


BASE = Base("a", "/srv/repo", "0" * 64, 512, 1)


# spec FL10
def test_each_life_of_a_child_has_a_workspace_of_its_own() -> None:
    scene = Scene()
    for node in ("a", "b"):
        scene.join(node)
    scene.spawn(program=TRUE)
    assert scene.directory.workspace("x") is None
    program = Program(("true",), restart="always", base=BASE)
    ((node, order),) = scene.spawn("w", program)
    assert isinstance(order, Start)
    assert (node, order.program.base) == ("b", BASE)
    first = scene.directory.workspace("w")
    assert first is not None
    assert (first.node, first.name, first.is_over) == ("b", "c2.1-s1", False)
    scene.wait(LEASE_S - 1)
    scene.beat("a")
    scene.wait(1)
    row = scene.directory.child("w")
    assert row is not None
    assert (row.node, row.incarnation) == ("a", 2)
    lost = f"node 'b' lost: not heard for {LEASE_S:g} s"
    assert row.reason == f"{lost}; what it wrote stays there"
    second = scene.directory.workspace("w")
    assert second is not None
    assert (second.node, second.name) == ("a", "c2.2-s1")


# spec FL10, FL11
def test_a_workspace_that_cannot_be_is_told() -> None:
    scene = Scene()
    scene.join("a")
    with pytest.raises(FleetError, match="cannot find 'x': no such child"):
        scene.directory.workspace("x")
    needs = Needs(labels=("gpu",))
    scene.spawn(program=Program(("true",), base=BASE), needs=needs, wait=True)
    with pytest.raises(FleetError, match="it is on no node"):
        scene.directory.workspace("x")


# spec FL4
def test_an_incarnation_is_never_used_twice(scene: Scene) -> None:
    for node in ("a", "b"):
        scene.join(node)
    seen: list[int] = []

    def note(sends: list[tuple[str, Message]]) -> Start:
        orders = [sent for _, sent in sends if isinstance(sent, Start)]
        seen.append(orders[0].incarnation)
        return orders[0]

    order = note(scene.spawn(program=ALWAYS))
    refused = ChildReport(order.child, order.incarnation, "refused")
    news = ChildNews("a", scene.sessions["a"], refused)
    note(scene.store(scene.directory.receive(news, scene.now)))
    scene.restart()
    scene.beat("a")
    scene.wait(LEASE_S - 1)
    scene.beat("a")
    note(scene.wait(1))  # b is lost
    scene.restart()
    scene.join("b", number=2)
    scene.wait(LEASE_S - 1)
    scene.beat("b")
    note(scene.wait(1))  # a is lost
    assert seen == [1, 2, 3, 4]


# spec FL2: the epochs of two fleets tell nothing of each other.
def test_a_daemon_that_is_still_in_another_fleet_is_refused() -> None:
    scene = Scene()
    text = (
        "cannot join as 'b': its daemon is still in another fleet; run `sandhost fleet"
        " leave` there first"
    )
    refused = scene.join("b", fleet="two")
    assert refused == Refused(1, Session("Lb", 1), text, True, "one")
    assert scene.directory.ps().nodes == ()
    joined = scene.join("b")
    assert isinstance(joined, Joined)
    assert joined.fleet == "one"


# spec FL2: its head was lost, and its store is taken over.
def test_a_fleet_keeps_its_id_with_its_store() -> None:
    scene = Scene()
    scene.join("a")
    scene.restart("two")
    assert isinstance(scene.join("a", fleet="one"), Joined)
    beat = Beat("a", Session("La", 9), 1)
    (refused,) = scene.tell(beat)
    assert isinstance(refused, Refused)
    assert refused.fleet == "one"


# spec FL2
def test_a_store_of_before_there_were_ids_becomes_a_fleet_of_its_own() -> None:
    scene = Scene()
    scene.rows = {("meta", ""): msgspec.msgpack.encode({"children": 4})}
    scene.restart("two")
    joined = scene.join("a")
    assert isinstance(joined, Joined)
    assert joined.fleet == "two"
    scene.spawn()
    assert scene.child().id == "c5"
    scene.restart("three")
    assert isinstance(scene.join("a", fleet="two"), Joined)


# spec FL5, FL6: its store is taken over where `lease` in [fleet] is a shorter one. A
# node learns that with the answer to its next join, which may never come.
@pytest.mark.parametrize("is_heard", [False, True])
def test_a_node_has_the_lease_under_which_it_joined(is_heard: bool) -> None:
    scene = Scene()
    scene.restart(lease_s=30.0)
    scene.join("a")
    scene.spawn(program=ALWAYS)
    scene.report("a", "running")
    scene.restart(lease_s=LEASE_S)
    scene.join("b")
    if is_heard:
        scene.beat("a")
    for _ in range(29):
        scene.wait(1.0)
        scene.beat("b")
        assert scene.node_state("a") != "lost"
        assert scene.child().incarnation == 1
    scene.wait(1.0)
    assert scene.node_state("a") == "lost"
    assert (scene.child().node, scene.child().incarnation) == ("b", 2)


# spec FL5
def test_a_node_that_joins_under_a_longer_lease_has_it_at_once() -> None:
    scene = Scene()
    scene.join("a")
    scene.restart(lease_s=30.0)
    joined = scene.join("a")
    assert isinstance(joined, Joined)
    assert joined.lease_s == 30.0
    scene.restart(lease_s=LEASE_S)
    scene.wait(29.0)
    assert scene.node_state("a") == "unknown"
    joined = scene.join("a", number=2)  # nothing runs of the session before
    scene.wait(LEASE_S)
    assert scene.node_state("a") == "lost"


# spec FL7: the other fleet still waits for the report, if the node comes back to it.
def test_a_slice_of_another_fleet_is_not_settled() -> None:
    scene, other = Scene(), Scene()
    other.rows.clear()
    other.restart("two")
    for one in (scene, other):
        one.store(one.directory.open_account("t", 160.0, NEVER, one.now))
        one.join("a", ledger="L1")
        ask = AskSlice("a", one.sessions["a"], "t", 1, 1.0)
        (grant,) = one.tell(ask)
        assert isinstance(grant, SliceGranted)
        one.granted = grant.slice
    assert scene.granted != other.granted
    last = SliceReport(scene.granted, 8.0, is_last=True)
    assert other.tell(SliceNews("a", "L1", (last,))) == []
    (settled,) = scene.tell(SliceNews("a", "L1", (last,)))
    assert settled == SlicesSettled(1, "L1", (scene.granted,))
    assert scene.directory.quota().accounts[0].spent == 8.0


# spec FL7: an account of before fleets had ids.
def test_an_account_that_is_opened_again_gives_slices_of_its_fleet() -> None:
    scene = Scene()
    row = {"name": "t", "limit": 160.0, "kind": NEVER, "window": NEVER, "slices": 3}
    scene.rows["accounts", "t"] = msgspec.msgpack.encode(row)
    scene.restart()
    scene.store(scene.directory.open_account("t", 160.0, NEVER, scene.now))
    scene.join("a")
    (grant,) = scene.tell(AskSlice("a", scene.sessions["a"], "t", 1, 1.0))
    assert isinstance(grant, SliceGranted)
    assert grant.slice == "t/one.4"
    before = SliceReport("t/3", 8.0, is_last=True)
    (settled,) = scene.tell(SliceNews("a", "La", (before,)))
    assert settled == SlicesSettled(2, "La", ("t/3",))


# spec FL7: `[fleet.quota]` is read where `up` runs.
def test_an_account_that_is_opened_again_has_the_window_that_is_said_then() -> None:
    scene = Scene()
    for kind in (DAY, NEVER):
        scene.store(scene.directory.open_account("t", 160.0, kind, scene.now))
        scene.restart()
    (shown,) = scene.directory.quota().accounts
    assert shown.window == NEVER


# spec FL7: [fleet.quota] is gone at the next `up`, and comes back at one after it.
def test_an_account_that_is_closed_pays_no_call_and_keeps_what_is_spent() -> None:
    scene = Scene()
    scene.store(scene.directory.open_account("t", 160.0, NEVER, scene.now))
    scene.join("a")
    (grant,) = scene.tell(AskSlice("a", scene.sessions["a"], "t", 1, 1.0))
    assert isinstance(grant, SliceGranted)
    scene.tell(SliceNews("a", "La", (SliceReport(grant.slice, 8.0, is_last=True),)))
    scene.store(scene.directory.close_account("t"))
    scene.restart()
    joined = scene.join("a")
    assert isinstance(joined, Joined)
    assert joined.accounts == ()
    assert scene.directory.quota().accounts == ()
    scene.store(scene.directory.open_account("t", 160.0, NEVER, scene.now))
    joined = scene.join("a")
    assert isinstance(joined, Joined)
    assert joined.accounts == ("t",)
    assert scene.directory.quota().accounts[0].spent == 8.0
    (grant,) = scene.tell(AskSlice("a", scene.sessions["a"], "t", 2, 1.0))
    assert isinstance(grant, SliceGranted)
    assert grant.slice == "t/one.2"
    assert scene.directory.close_account("other").changes == []
