"""A node: which orders it follows, and what it lets out under its lease."""

import pytest
from msgspec.structs import replace

from supervisor.fleet.fence import FencedError
from supervisor.fleet.held_slices import (
    HeldRow,
    HeldSlices,
    HeldState,
    LedgerRow,
    ReserveResult,
)
from supervisor.fleet.lease import LEASE_S, MARGIN_S
from supervisor.fleet.messages import (
    Beat,
    ChildNews,
    ChildReport,
    Confirm,
    End,
    FromDirectory,
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
    SliceRefused,
    Start,
)
from supervisor.fleet.node import (
    KNOWN_S,
    Action,
    Arm,
    AskDaemon,
    CallsDecided,
    EndAll,
    EndChild,
    Node,
    NodeStep,
    OperatorNotice,
    StartChild,
)
from supervisor.fleet.states import NodePhase
from supervisor.fleet.step import Moment

TRUE = Program(("true",))


class Scene:
    """A node, and a clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.node = Node("a", (), 2, HeldSlices("a", LedgerRow("L1")))

    @property
    def now(self) -> Moment:
        """The time."""
        return Moment(self.now_s, 0.0)

    @property
    def session(self) -> Session:
        """The node's session."""
        assert self.node.session is not None
        return self.node.session

    def hear(self, message: FromDirectory) -> NodeStep:
        """Let the directory send a message."""
        return self.node.receive(message, self.now)

    def enter(self, epoch: int = 1, fleet: str = "") -> None:
        """Join, with a lease that is armed."""
        (join,) = messages(self.node.join(self.now))
        assert isinstance(join, Join)
        joined = Joined(epoch, self.session, join.number, LEASE_S, fleet=fleet)
        self.arm(self.hear(joined))

    def arm(self, step: NodeStep) -> None:
        """Arm what a step says."""
        for action in step.actions:
            if isinstance(action, Arm):
                self.node.armed(action.deadline_s)

    def live(self, seconds: float) -> None:
        """Let time pass, with a lease that is renewed."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 1.0
            for action in self.node.tick(self.now).actions:
                assert isinstance(action, AskDaemon)
                self.arm(self.hear(Renewed(1, self.session, action.number)))

    def start(
        self, incarnation: int = 1, session: Session | None = None, epoch: int = 1
    ) -> list[Action]:
        """Order a start; return what is done."""
        order = Start(epoch, session or self.session, "c1", "x", incarnation, TRUE)
        return self.hear(order).actions


def messages(step: NodeStep) -> list[Message]:
    """Return what a step sends."""
    return [send.message for send in step.sends]


@pytest.fixture
def scene() -> Scene:
    """A member whose lease began at 100 s."""
    scene = Scene()
    scene.enter()
    return scene


# spec FL5
def test_nothing_starts_before_the_launchpad_has_armed_the_deadline() -> None:
    scene = Scene()
    scene.node.join(scene.now)
    step = scene.hear(Joined(1, scene.session, 1, LEASE_S))
    assert step.actions == [Arm(scene.session, 100.0 + LEASE_S - MARGIN_S)]
    assert scene.start() == []
    scene.arm(step)
    assert len(scene.start()) == 1


# spec FL4: its beats are answered, so it would never be lost, and its orders never end.
def test_a_node_that_cannot_have_a_launchpad_refuses_orders() -> None:
    scene = Scene()
    scene.node.join(scene.now)
    joined = scene.hear(Joined(1, scene.session, 1, LEASE_S))
    order = Start(1, scene.session, "c1", "x", 1, TRUE)
    assert messages(scene.hear(order)) == []
    scene.node.launchpad_failed("no room")
    for _ in range(2):
        step = scene.hear(order)
        assert step.actions == []
        (news,) = messages(step)
        refused = ChildReport("c1", 1, "refused", reason="no room")
        assert news == ChildNews("a", scene.session, refused)
    scene.arm(joined)
    assert scene.start(incarnation=1) == []
    assert len(scene.start(incarnation=2)) == 1
    scene.node.launchpad_gone(scene.now)
    scene.node.all_gone(scene.now)
    scene.hear(Joined(1, scene.session, 1, LEASE_S))
    assert messages(scene.hear(replace(order, session=scene.session))) == []


# spec FL5
def test_a_beat_goes_out_only_when_the_daemon_has_answered(scene: Scene) -> None:
    scene.now_s = 101.0
    step = scene.node.tick(scene.now)
    assert messages(step) == []
    (question,) = step.actions
    assert isinstance(question, AskDaemon)
    answered = scene.node.daemon_answered(question.number, 1)
    assert messages(answered) == [Beat("a", scene.session, question.number, 1)]
    renewed = scene.hear(Renewed(1, scene.session, question.number))
    assert renewed.actions == [Arm(scene.session, 101.0 + LEASE_S - MARGIN_S)]


# spec FL5
def test_a_wall_clock_that_jumps_ends_no_child(scene: Scene) -> None:
    assert len(scene.start()) == 1
    for wall_s in (-1e9, 4e9):
        step = scene.node.tick(Moment(scene.now_s, wall_s))
        assert not any(isinstance(action, EndAll) for action in step.actions)
        scene.node.check_effect("c1", 1, Moment(scene.now_s, wall_s))


# spec FL5
def test_at_its_deadline_a_node_ends_its_children_then_joins_anew(scene: Scene) -> None:
    before = scene.session
    scene.now_s = 104.0
    assert scene.node.tick(scene.now).actions == [EndAll()]
    assert scene.node.phase is NodePhase.ENDING
    assert scene.start() == []
    (join,) = messages(scene.node.all_gone(scene.now))
    assert isinstance(join, Join)
    assert join.session.number == before.number + 1


# spec FL5
def test_a_renewal_that_is_refused_ends_the_children(scene: Scene) -> None:
    step = scene.hear(Refused(1, scene.session, "lost", is_final=False))
    assert step.actions == [EndAll()]


# spec FL6
def test_a_launchpad_that_is_gone_ends_the_session(scene: Scene) -> None:
    assert scene.node.launchpad_gone(scene.now).actions == [EndAll()]


# spec FL4
def test_the_same_order_twice_is_one_child(scene: Scene) -> None:
    assert scene.start() == [StartChild(scene.session, "c1", "x", 1, TRUE)]
    assert scene.start() == []
    (news,) = messages(scene.node.child_started("c1", 1, 7))
    again = scene.hear(Start(1, scene.session, "c1", "x", 1, TRUE))
    assert (again.actions, messages(again)) == ([], [news])


# spec FL4
def test_an_order_of_another_session_is_refused(scene: Scene) -> None:
    assert scene.start(session=Session("L1", 7)) == []
    assert scene.start(session=Session("L9", 1)) == []


# spec FL2
def test_an_order_of_a_lower_epoch_is_refused() -> None:
    scene = Scene()
    scene.enter(epoch=3)
    assert scene.start(epoch=2) == []
    assert len(scene.start(epoch=3)) == 1


# spec FL2
def test_a_directory_that_has_started_anew_is_told_what_runs(scene: Scene) -> None:
    scene.start()
    scene.node.child_started("c1", 1, 7)
    (join,) = messages(scene.hear(Renewed(2, scene.session, 99)))
    assert isinstance(join, Join)
    assert join.session == scene.session
    assert [(one.child, one.state) for one in join.children] == [("c1", "running")]


# spec FL4
def test_an_incarnation_that_was_ended_before_it_began_never_starts(
    scene: Scene,
) -> None:
    (news,) = messages(scene.hear(End(1, scene.session, "c1", 1)))
    assert isinstance(news, ChildNews)
    assert news.report.state == "ended"
    assert scene.start() == []


# spec FL4
def test_a_later_incarnation_starts_only_after_the_one_before_is_over(
    scene: Scene,
) -> None:
    scene.start()
    scene.node.child_started("c1", 1, 7)
    assert scene.start(incarnation=2) == []
    scene.node.child_over(ChildReport("c1", 1, "ended", status=0), scene.now)
    assert len(scene.start(incarnation=2)) == 1
    assert scene.start(incarnation=1) == []


# spec FL4
def test_an_end_is_passed_on_to_what_runs(scene: Scene) -> None:
    scene.start()
    step = scene.hear(End(1, scene.session, "c1", 1, "INT"))
    assert step.actions == [EndChild("c1", 1, "INT")]
    assert scene.hear(End(1, scene.session, "c1", 0, "INT")).actions == []


# spec FL2
def test_an_end_is_told_with_each_beat_until_it_is_confirmed(scene: Scene) -> None:
    scene.start()
    over = ChildReport("c1", 1, "ended", status=4)
    news = ChildNews("a", scene.session, over)
    assert messages(scene.node.child_over(over, scene.now)) == [news]
    assert news in messages(scene.node.daemon_answered(1, 0))
    scene.hear(Confirm(1, scene.session, "c1", 1))
    assert news not in messages(scene.node.daemon_answered(1, 0))


# spec FL3, FL11: the message that it began may have been lost.
def test_an_end_tells_that_the_child_had_begun(scene: Scene) -> None:
    scene.start()
    scene.node.child_started("c1", 1, 7)
    over = ChildReport("c1", 1, "ended", status=0)
    (news,) = messages(scene.node.child_over(over, scene.now))
    assert news == ChildNews("a", scene.session, replace(over, pid=7))


# spec FL4: a session lasts for months. No order is under way for so long.
def test_an_end_that_was_confirmed_is_known_for_a_time(scene: Scene) -> None:
    for child in ("c1", "c2", "c3"):
        scene.hear(Start(1, scene.session, child, child, 1, TRUE))
        scene.node.child_started(child, 1, 7)
    ends = [ChildReport(child, 1, "ended", 7, 4) for child in ("c1", "c2")]
    for end in ends:
        scene.node.child_over(end, scene.now)
    scene.hear(Confirm(1, scene.session, "c1", 1))
    for _ in range(2):
        scene.live(KNOWN_S / 2 - 1.0)
        assert scene.start() == []
        (news,) = messages(scene.hear(End(1, scene.session, "c1", 1)))
        assert news == ChildNews("a", scene.session, ends[0])
        scene.hear(Confirm(1, scene.session, "c1", 1))
    scene.live(4.0)
    (news,) = messages(scene.hear(End(1, scene.session, "c1", 1)))
    assert isinstance(news, ChildNews)
    assert news.report.reason == "ended before it began"
    (join,) = messages(scene.hear(Renewed(2, scene.session, 99)))
    assert isinstance(join, Join)
    states = [(one.child, one.state) for one in join.children]
    assert states == [("c2", "ended"), ("c3", "running"), ("c1", "ended")]


# spec FL4
def test_a_child_that_has_begun_again_is_known_for_as_long_as_it_runs(
    scene: Scene,
) -> None:
    scene.start()
    scene.node.child_over(ChildReport("c1", 1, "refused"), scene.now)
    scene.hear(Confirm(1, scene.session, "c1", 1))
    scene.start(incarnation=2)
    scene.node.child_started("c1", 2, 7)
    scene.live(KNOWN_S + 2.0)
    scene.node.check_effect("c1", 2, scene.now)


# spec FL4
def test_an_end_of_a_later_life_is_known_until_it_is_confirmed(scene: Scene) -> None:
    scene.start()
    scene.node.child_over(ChildReport("c1", 1, "refused"), scene.now)
    scene.hear(Confirm(1, scene.session, "c1", 1))
    (news,) = messages(scene.hear(End(1, scene.session, "c1", 2)))
    scene.live(KNOWN_S + 2.0)
    assert news in messages(scene.node.daemon_answered(1, 0))


# spec FL6: a renewal was armed in time, and is known here after the old deadline only.
def test_an_end_while_no_lease_is_held_is_told_if_the_session_goes_on(
    scene: Scene,
) -> None:
    scene.start()
    scene.node.child_started("c1", 1, 7)
    scene.now_s = 103.9
    (question,) = scene.node.tick(scene.now).actions
    assert isinstance(question, AskDaemon)
    renewed = scene.hear(Renewed(1, scene.session, question.number))
    scene.now_s = 104.0
    over = ChildReport("c1", 1, "ended", status=4)
    assert messages(scene.node.child_over(over, scene.now)) == []
    scene.arm(renewed)
    assert scene.node.is_member(scene.now)
    news = ChildNews("a", scene.session, replace(over, pid=7))
    assert news in messages(scene.node.daemon_answered(1, 0))


# spec FL6
def test_before_each_effect_the_lease_and_the_incarnation_are_compared(
    scene: Scene,
) -> None:
    scene.start()
    scene.node.check_effect("c1", 1, scene.now)
    with pytest.raises(FencedError, match="incarnation 2 is not the one"):
        scene.node.check_effect("c1", 2, scene.now)
    scene.now_s = 104.0
    with pytest.raises(FencedError, match="the lease of node 'a' is over"):
        scene.node.check_effect("c1", 1, scene.now)


# spec FL6, FL7
def test_no_call_is_paid_after_the_lease(scene: Scene) -> None:
    scene.now_s = 104.0
    with pytest.raises(FencedError, match="cannot pay a call"):
        scene.node.reserve("t", "call", 1.0, scene.now)


# spec FL7
def test_calls_that_wait_for_a_slice_try_again_when_it_has_come(scene: Scene) -> None:
    outcome, _ = scene.node.reserve("t", "call", 1.0, scene.now)
    assert outcome is ReserveResult.ASKED
    step = scene.hear(SliceGranted(1, scene.session, "t", 1, "t/1", 10.0, "never"))
    assert step.actions == [CallsDecided("t", None)]
    outcome, step = scene.node.reserve("t", "call", 1.0, scene.now)
    assert outcome is ReserveResult.YES
    assert [change.table for change in step.changes] == ["held"]


# spec FL7
def test_a_refusal_says_which_calls_it_is_for(scene: Scene) -> None:
    scene.node.reserve("t", "call", 3.0, scene.now)
    step = scene.hear(SliceRefused(1, scene.session, "t", 1, is_held=True))
    assert step.actions == [CallsDecided("t", 3.0, is_held=True)]


# spec FL2
def test_a_node_that_the_fleet_does_not_take_says_why() -> None:
    scene = Scene()
    scene.node.join(scene.now)
    step = scene.hear(Refused(1, scene.session, "the name is taken", is_final=True))
    assert step.actions == [OperatorNotice("the name is taken")]
    assert scene.node.phase is NodePhase.OUT


# spec FL5
def test_a_join_without_an_answer_is_tried_again_with_the_same_session() -> None:
    scene = Scene()
    (first,) = messages(scene.node.join(scene.now))
    scene.now_s += 0.6
    (second,) = messages(scene.node.tick(scene.now))
    assert isinstance(first, Join)
    assert isinstance(second, Join)
    assert second.session == first.session
    assert second.number > first.number


# spec FL2
def test_a_node_that_leaves_ends_its_children_first(scene: Scene) -> None:
    scene.start()
    step = scene.node.leave(scene.now)
    assert (step.actions, messages(step)) == ([EndAll()], [])
    assert messages(scene.node.all_gone(scene.now)) == [Leave("a", scene.session)]


# spec FL2, FL6
def test_a_member_that_another_fleet_refuses_stays_what_it_is() -> None:
    scene = Scene()
    scene.enter(epoch=3, fleet="one")
    scene.start(epoch=3)
    (join,) = messages(scene.node.relink((), None, scene.now))
    assert isinstance(join, Join)
    assert join.fleet == "one"
    for epoch in (1, 9):
        for is_final in (False, True):
            refused = Refused(epoch, scene.session, "no", is_final, "two")
            assert scene.hear(refused).actions == []
    scene.node.check_effect("c1", 1, scene.now)
    assert scene.start(incarnation=1, epoch=3) == []  # it counts no other's epoch


# spec FL2
@pytest.mark.parametrize("how", ["leave", "expire"])
def test_a_node_of_which_nothing_runs_may_join_another_fleet(how: str) -> None:
    scene = Scene()
    scene.enter(epoch=3, fleet="one")
    if how == "leave":
        scene.node.leave(scene.now)
    else:
        scene.node.launchpad_gone(scene.now)
    step = scene.node.all_gone(scene.now)
    if how == "leave":
        step = scene.node.join(scene.now)
    (join,) = messages(step)
    assert isinstance(join, Join)
    assert join.fleet == ""
    joined = Joined(1, scene.session, join.number, LEASE_S, fleet="two")
    scene.arm(scene.hear(joined))
    assert len(scene.start()) == 1


# spec FL7: a fleet may never come back that has not confirmed them.
def test_slices_of_another_fleet_are_told_at_a_join_alone() -> None:
    scene = Scene()
    before = Session("L1", 1)
    rows = [
        HeldRow(name, "t", before, 1.0, "never", state=HeldState.CLOSED)
        for name in ("t/one.1", "t/two.1")
    ]
    scene.node = Node("a", (), 2, HeldSlices("a", LedgerRow("L1"), rows))
    (join,) = messages(scene.node.join(scene.now))
    assert isinstance(join, Join)
    assert [report.slice for report in join.slices] == ["t/one.1", "t/two.1"]
    scene.hear(Joined(1, scene.session, join.number, LEASE_S, fleet="two"))
    (news,) = (
        one
        for one in messages(scene.node.tick(scene.now))
        if isinstance(one, SliceNews)
    )
    assert [report.slice for report in news.slices] == ["t/two.1"]
