"""Figures: what is counted, what a scraper is told, and who may ask."""

import json
import platform
import re
import socket
from collections.abc import AsyncIterator
from importlib import metadata

import psutil
import pytest
import trio

from hostlib.journal import Journal
from supervisor.app import open_metrics
from supervisor.config.metrics import MetricsSection, check_metrics
from supervisor.fsproxy.ports import TokenAccount
from supervisor.network.service import open_network
from supervisor.observe.families import families
from supervisor.observe.listener import MAX_CONNECTIONS, serve_metrics
from supervisor.observe.registry import MAX_NAMES, attach_metrics
from tests.architecture.tree import ROOT
from tests.helpers.scrape import listening, parsed
from tests.helpers.stage import Stage, eventually, stage
from tests.supervisor.observe.plain_yaml import plain_yaml

pytestmark = pytest.mark.slow

__all__ = ["stage"]

# ---------------------------------------------------------------- what is told


async def test_a_scrape_tells_children_requests_errors_and_bytes(stage: Stage) -> None:
    async with listening(stage) as listener:
        puppet = await stage.puppet()
        fileno = await puppet.open(b"a", b"w")
        await puppet.write(fileno, b"abc")
        await puppet.ask(b"NONSENSE\n")
        await puppet.open(b"b", b"w")
        figures = await listener.figures()
        assert figures["sandhost_children{state=running}"] == 1
        assert figures["sandhost_children_spawned_total"] == 1
        assert figures["sandhost_clients"] == 1
        assert figures["sandhost_open_files"] == 2
        assert figures["sandhost_requests_total{command=OPEN}"] == 2
        assert figures["sandhost_requests_total{command=WRITE}"] == 1
        assert figures["sandhost_requests_total{command=invalid}"] == 1
        assert figures["sandhost_request_errors_total{command=invalid}"] == 1
        assert figures["sandhost_request_errors_total{command=WRITE}"] == 0
        assert figures["sandhost_received_bytes_total"] > 40
        assert figures["sandhost_sent_bytes_total"] > 20
        assert figures["process_open_fds"] > 10
        assert figures["process_resident_memory_bytes"] > 10_000_000
        await puppet.leave()
    counts = listener.metrics.counts
    assert counts["sandhost_child_exits"] == {("status 0",): 1}
    (closed,) = counts["sandhost_auto_closed_files"].items()
    assert closed in {(("process exit",), 2), (("pipe EOF",), 2)}


async def test_versions_and_the_start_of_the_process_are_told(stage: Stage) -> None:
    async with listening(stage) as listener:
        figures = await listener.figures()
    versions = (
        f"version={metadata.version('sandhost')},python={platform.python_version()}"
    )
    known = {versions, ",".join(reversed(versions.split(",")))}
    told = {name: value for name, value in figures.items() if "build_info" in name}
    assert {f"sandhost_build_info{{{one}}}": 1 for one in known}.items() >= told.items()
    assert len(told) == 1
    started_s = psutil.Process().create_time()  # whole seconds: btime of /proc/stat
    assert abs(figures["process_start_time_seconds"] - started_s) < 2


async def test_figures_of_clients_that_are_gone_are_kept(stage: Stage) -> None:
    async with listening(stage) as listener:
        puppet = await stage.puppet()
        await puppet.ask(b"PING\n")
        before = await listener.figures()
        await puppet.leave()
        after = await listener.figures()
        assert after["sandhost_received_bytes_total"] == len(b"PING\n")
        for name, value in before.items():
            if name.partition("{")[0].endswith(("_total", "_count", "_bucket")):
                assert after[name] >= value, f"{name} fell"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 0", "status 0"),
        ("exit 3", "failed"),
        ("kill -9 $$", "SIGKILL"),
        ("exec sleep 100", "timeout"),
    ],
)
async def test_exits_are_counted_by_reason(
    stage: Stage, script: str, reason: str
) -> None:
    metrics = attach_metrics(stage.host)
    timeout_s = 2.0 if reason == "timeout" else None
    child = await stage.sh(script, timeout_s=timeout_s)
    await child.wait_gone()
    assert metrics.counts["sandhost_child_exits"] == {(reason,): 1}


async def test_a_child_that_cannot_be_started_is_counted(stage: Stage) -> None:
    metrics = attach_metrics(stage.host)
    child = await stage.host.spawn(stage.spec(("/nonexistent/program",)))
    await child.wait_gone()
    assert metrics.counts["sandhost_child_exits"] == {("not started",): 1}
    assert metrics.counts["sandhost_children_spawned"] == {(): 0}


async def test_denials_are_counted_by_command(stage: Stage) -> None:
    async with listening(stage) as listener:
        puppet = await stage.puppet()
        await puppet.ask(b"OPEN /etc/passwd r true\n")
        await puppet.ask(b"OPEN ../x r false\n")
        figures = await listener.figures()
    assert figures["sandhost_security_denials_total{command=OPEN}"] == 2


async def test_events_of_services_are_counted_without_a_word_from_them(
    stage: Stage,
) -> None:
    async with listening(stage) as listener:
        puppet = await stage.puppet()
        write = stage.host.journal.write
        own = {"child_id": puppet.child.id, "client_id": puppet.client_id}
        told = {"model": "small", "outcome": "ok", "prompt_tokens": 10}
        write("llm.called", **own, **told, cached_tokens=4, completion_tokens=5)
        write("quota.denied", **own, model="small")
        write("exec.started", **own, tool="make")
        write("exec.ended", **own, code=2, timed_out=False)
        write(
            "sidecar.restarting", sidecar="my-rust", reason="exited with 3", pause_s=1
        )
        figures = await listener.figures()
        assert figures["sandhost_llm_calls_total{model=small,outcome=ok}"] == 1
        tokens = "sandhost_llm_tokens_total{kind=%s,model=small}"
        kinds = ("prompt", "cached", "completion")
        assert [figures[tokens % kind] for kind in kinds] == [10, 4, 5]
        assert figures["sandhost_quota_denials_total{model=small}"] == 1
        assert figures["sandhost_executions_started_total"] == 1
        assert figures["sandhost_executions_ended_total{outcome=failed}"] == 1
        assert figures["sandhost_sidecar_restarts_total{sidecar=my-rust}"] == 1
        own_tokens = listener.metrics.tokens[puppet.child.id]
        assert (own_tokens.calls, own_tokens.tokens, own_tokens.denials) == (1, 15, 1)
        await puppet.leave()
        assert not listener.metrics.tokens, "a child that is gone is forgotten"


class Bank:
    """A service with one account."""

    async def child_starting(self, child: object, stack: object) -> dict[str, str]:
        del child, stack
        return {}

    def client_gone(self, client: object) -> None:
        del client

    def accounts(self) -> list[TokenAccount]:
        return [TokenAccount("all children", 30.0, 12.5, 100.0)]


async def test_accounts_of_a_service_are_told(stage: Stage) -> None:
    stage.host.services.toolexec = Bank()  # whichever keeps accounts
    async with listening(stage) as listener:
        figures = await listener.figures()
    quota = "sandhost_quota{account=all children,of=%s}"
    told = [figures[quota % word] for word in ("spent", "reserved", "limit")]
    assert told == [30, 12.5, 100]


async def test_names_that_children_choose_cannot_make_figures_grow(
    stage: Stage,
) -> None:
    metrics = attach_metrics(stage.host)
    for number in range(MAX_NAMES + 100):
        stage.host.journal.write("quota.denied", model=f"m{number}", child_id="x")
    denied = metrics.counts["sandhost_quota_denials"]
    assert len(denied) == MAX_NAMES + 1
    assert denied["other",] == 100
    assert not metrics.tokens


async def test_the_lag_of_the_loop_is_measured_where_figures_are_told(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.observe.registry.LAG_INTERVAL_S", 0.01)
    section = MetricsSection(listen="tcp://127.0.0.1:0")
    async with trio.open_nursery() as nursery:
        metrics = await open_metrics(stage.host, section, nursery)
        nursery.start_soon(metrics.watch_lag)
        await eventually(lambda: metrics.lag.total > 2)
        (told,) = [f for f in families(metrics) if f.name.endswith("loop_lag_seconds")]
        assert told.histograms[0][1].total > 2
        nursery.cancel_scope.cancel()


async def test_a_host_that_is_not_scraped_has_no_task_for_it(stage: Stage) -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    async with trio.open_nursery() as nursery:
        await open_metrics(stage.host, None, nursery)
    assert stage.host.metrics is not None, "events are counted all the same"
    assert trio.lowlevel.current_statistics().tasks_living == before


def test_an_event_that_cannot_be_written_is_counted() -> None:
    journal = Journal(1_000_000, lambda _: None)
    journal.write("x")
    journal.write("x")
    assert journal.lost == 2


# ---------------------------------------------------------------- the contract


@pytest.fixture
async def whole(stage: Stage) -> AsyncIterator[Stage]:
    """A host that tells every figure: of the network as well."""
    async with open_network(stage.host):
        yield stage


async def test_names_follow_the_usage_of_prometheus(whole: Stage) -> None:
    for family in families(attach_metrics(whole.host)):
        assert re.fullmatch(r"(sandhost|process)_[a-z_]+", family.name)
        assert not family.name.endswith("_total"), "the text adds it"
        assert family.about
        assert not family.about.endswith(".")


async def test_every_metric_is_documented_and_no_other(whole: Stage) -> None:
    page = (ROOT / "docs/reference/observability.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `((?:sandhost|process)_\w+)", page, re.MULTILINE))
    made = {
        f"{f.name}_total" if f.kind == "counter" else f.name
        for f in families(attach_metrics(whole.host))
    }
    assert told == made


def series(stage: Stage) -> dict[str, str]:
    """Return the name of each series that is told, and the family that it is of."""
    suffixes = {
        "counter": ("_total",),
        "gauge": ("",),
        "histogram": ("_bucket", "_sum", "_count"),
    }
    return {
        family.name + suffix: family.name
        for family in families(attach_metrics(stage.host))
        for suffix in suffixes[family.kind]
    }


def named_in(expression: str) -> set[str]:
    """Return the names of metrics in an expression."""
    return set(re.findall(r"\b(?:sandhost|process)_\w+", expression))


# Both directions: a metric that is new and forgotten here fails, too.
async def test_the_dashboard_names_every_metric_and_no_other(whole: Stage) -> None:
    text = (ROOT / "docs/grafana-dashboard.json").read_text(encoding="utf-8")
    panels = [p for p in json.loads(text)["panels"] if p.get("targets")]
    asked = [t["expr"] for panel in panels for t in panel["targets"]]
    known = series(whole)
    assert all(named_in(expression) for expression in asked)
    named = set().union(*map(named_in, asked))
    assert named <= known.keys()
    assert {known[name] for name in named} == set(known.values())


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    text = (ROOT / "docs/grafana-dashboard.json").read_text(encoding="utf-8")
    panels = json.loads(text)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        xs = range(at["x"], at["x"] + at["w"])
        ys = range(at["y"], at["y"] + at["h"])
        assert max(xs) < 24
        area = {(x, y) for x in xs for y in ys}
        assert not area & taken, panel["title"]
        taken |= area


async def test_alert_rules_name_metrics_and_labels_that_exist(whole: Stage) -> None:
    page = (ROOT / "docs/prometheus-alerts.yml").read_text(encoding="utf-8")
    document = plain_yaml(page)
    (group,) = document["groups"]
    known = series(whole)
    labels = {f.name: set(f.labels) for f in families(attach_metrics(whole.host))}
    for rule in group["rules"]:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"Sandhost[A-Za-z]+", rule["alert"])
        assert re.fullmatch(r"\d+m", rule.get("for", "0m"))
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"].keys() == {"summary", "action"}
        expression = rule["expr"]
        assert named_in(expression)
        assert named_in(expression) <= known.keys(), rule["alert"]
        for name, inside in re.findall(r"(\w+)\{(.*?)\}", expression):
            chosen = set(re.findall(r"(\w+)[!=]", inside))
            assert chosen <= labels[known[name]], rule["alert"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names)


def test_odd_yaml_is_refused() -> None:
    for text in ("a: b", "a:\n\tb: 1", "a: 'x'", 'a: "x', 'a: "x"\na: "y"', "- x"):
        with pytest.raises(ValueError, match="line"):
            plain_yaml(text)


async def test_openmetrics_is_spoken_to_who_asks_for_it(stage: Stage) -> None:
    async with listening(stage) as listener:
        header = "Accept: application/openmetrics-text; version=1.0.0"
        reply = await listener.curl("/metrics", "-H", header)
        assert "application/openmetrics-text" in reply.head
        assert reply.body.rstrip().endswith("# EOF")
        plain = await listener.curl("/metrics")
        assert "text/plain; version=" in plain.head
        assert parsed(plain.body)


# ---------------------------------------------------------------- who may ask


async def test_nothing_can_be_changed_and_other_paths_are_not_there(
    stage: Stage,
) -> None:
    async with listening(stage) as listener:
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            reply = await listener.curl("/metrics", "-X", method, "-d", "x=1")
            assert reply.status == 405
            assert "Allow: GET, HEAD" in reply.head
        for path in ("/", "/events", "/etc/passwd", "/metrics/../x", "/%2e%2e/x"):
            assert (await listener.curl(path, "--path-as-is")).status == 404
        head = await listener.curl("/metrics", "-I")
        assert (head.status, head.body) == (200, "")


async def test_a_web_page_cannot_ask_under_a_name_of_its_own(stage: Stage) -> None:
    async with listening(stage) as listener:
        port = listener.address[1]
        names = {
            f"127.0.0.1:{port}": 200,
            f"localhost:{port}": 200,
            f"LOCALHOST:{port}": 200,
            f"[::1]:{port}": 200,
            "localhost": 200,
            f"evil.example:{port}": 421,
            "127.0.0.1.evil.example": 421,
            "": 400,
        }
        for name, status in names.items():
            header = f"Host: {name}" if name else "Host;"
            reply = await listener.curl("/metrics", "-H", header)
            assert reply.status in {status, 421 if status == 400 else status}, name


async def test_garbage_is_refused_and_costs_nobody_else(stage: Stage) -> None:
    async with listening(stage) as listener:
        for data in (b"\0\xff" * 100, b"GET / HTTP/1.1\r\nA: " + b"x" * 100_000, b"\n"):
            stream = await trio.open_tcp_stream(*listener.address)
            async with stream:
                try:
                    await stream.send_all(data)
                    await stream.send_eof()
                    while await stream.receive_some():
                        pass
                except trio.BrokenResourceError:
                    pass  # it was closed while more came
        assert (await listener.curl("/metrics")).status == 200


async def test_connections_that_idle_make_room(stage: Stage) -> None:
    async with listening(stage) as listener:
        idle = [
            await trio.open_tcp_stream(*listener.address)
            for _ in range(MAX_CONNECTIONS + 5)
        ]
        try:
            assert (await listener.curl("/metrics")).status == 200
        finally:
            for stream in idle:
                await stream.aclose()


async def test_a_request_that_does_not_end_is_given_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.observe.listener.REQUEST_S", 0.3)
    async with listening(stage) as listener:
        stream = await trio.open_tcp_stream(*listener.address)
        async with stream:
            await stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: loc")
            assert await stream.receive_some() == b""


async def test_a_connection_is_used_again(stage: Stage) -> None:
    async with listening(stage) as listener:
        url = listener.url + "/metrics"
        reply = await listener.curl("/metrics", "-w", "%{num_connects}\n", url)
        assert reply.body.rstrip().endswith("0"), "the second one needed no connection"


async def test_a_port_that_is_taken_is_said_with_what_to_do(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        section = MetricsSection(listen=text)
        with pytest.raises(OSError, match=r"choose another metrics\.listen") as caught:
            await serve_metrics(stage.host, section)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tcp://0.0.0.0:9464", "not on loopback"),
        ("tcp://[::]:9464", "not on loopback"),
        ("tcp://192.168.1.1:9464", "not on loopback"),
        ("tcp://localhost:9464", "in numbers"),
        ("tcp://127.0.0.1", "write tcp://"),
        ("tcp://127.0.0.1:99999", "write tcp://"),
        ("tcp://user@127.0.0.1:1", "write tcp://"),
        ("tcp://127.0.0.1:1/x", "write tcp://"),
        ("http://127.0.0.1:9464", "write tcp://"),
        ("unix:/x", "write tcp://"),
        ("", "write tcp://"),
    ],
)
def test_an_address_that_is_none_or_open_to_others_is_refused(
    text: str, why: str
) -> None:
    ((key, reason),) = check_metrics(MetricsSection(listen=text))
    assert key == "listen"
    assert why in reason


def test_loopback_addresses_are_taken() -> None:
    for text in ("tcp://127.0.0.1:9464", "tcp://[::1]:0", "tcp://127.8.8.8:1"):
        assert list(check_metrics(MetricsSection(listen=text))) == []
