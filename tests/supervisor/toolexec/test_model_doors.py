"""The model's endpoint as tools find it.

With their child's token, in its net namespace.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from protocol.toolexec.token import narrow_token
from supervisor.control.client import call
from supervisor.llm.section import DOOR_VARIABLES
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.provider import key_file, provider_process
from tests.helpers.replacing import assert_clean
from tests.helpers.toolupgrade import Tools, rest

pytestmark = pytest.mark.slow

NAMES = DOOR_VARIABLES

TELL = (
    'printf "%s %s\\n%s\\n" "$AIFO_TOOLEEXEC_URL" "$AIFO_TOOLEEXEC_TOKEN"'
    ' "$OPENAI_API_KEY"; exec sleep 1000'
)

STATUS = (
    "curl -s -o /dev/null -w '%{http_code}\\n' \"$OPENAI_BASE_URL/models\""
    ' -H "Authorization: Bearer '
)
OWN = f'{STATUS}$OPENAI_API_KEY"'
LISTENING = "grep -c ' 0A ' /proc/net/tcp"
SAY = "\n".join([f"echo ${{{name}-unset}}" for name in NAMES])

PACKAGES = Path(openai.__file__).parents[1]
"""Where the clients are installed: a tool sees that as a directory of its sidecar's."""

CLIENTS = f"""PYTHONPATH={PACKAGES} exec {sys.executable} - <<'END'
import anthropic, openai
ask = {{"model": "m", "max_tokens": 9, "messages": [{{"role": "user", "content": "a b"}}]}}
print(openai.OpenAI().chat.completions.create(**ask).choices[0].message.content)
print(anthropic.Anthropic().messages.create(**ask).content[0].text)
END"""

CONFIG = """
[llm]
base_url = "{base_url}"
api_key_file = "{key}"
endpoint = true
[toolexec]
listen = ["unix"]
[sidecar.plain]
kind = "c-cpp"
allow = ["sh"]
path = ["{python}", "{packages}"]
{sidecar}
"""

CHILD = """
[policy.{name}]
root = "{where}/{name}"
{policy}
[child.{name}]
command = ["/bin/sh", "-c", '{tell}']
cwd = "{where}/{name}"
policy = "{name}"
"""


class Scene:
    """A daemon with children, whose tools are run by the test in their place."""

    def __init__(self, where: Path, base_url: str) -> None:
        self.where = where
        self._base_url = base_url

    def config(self, *names: str, sidecar: str = "", policy: str = "") -> str:
        """Return a configuration with some children."""
        for name in names:
            (self.where / name).mkdir()
        head = CONFIG.format(
            base_url=self._base_url,
            key=key_file(self.where),
            python=Path(sys.executable).parent,
            packages=PACKAGES,
            sidecar=sidecar,
        )
        children = (
            CHILD.format(where=self.where, name=name, policy=policy, tell=TELL)
            for name in names
        )
        return head + "".join(children)

    def tools(self, running: Daemon, name: str) -> Tools:
        """Return the tools of a child."""
        return Tools(running, self.where, name)


@pytest.fixture
def scene() -> Iterator[Scene]:
    """A directory with a short name, and a stand-in for a provider."""
    with (
        tempfile.TemporaryDirectory(prefix="td-", dir="/tmp") as name,
        provider_process(Path(name) / "served") as base_url,
    ):
        Path(name).chmod(0o755)
        yield Scene(Path(name), base_url)


def key_of(tools: Tools, name: str) -> str:
    """Return what a child has as its key."""
    lines = tools.running.wait(lambda: tools.running.log(name).decode().split("\n")[1:])
    return str(lines[0])


def said(tools: Tools, script: str) -> list[str]:
    """Return the lines that a tool prints that is a script."""
    reply = tools.run(script)
    assert reply.status == 200, reply
    return reply.body.decode().splitlines()


# spec MD1, L13
@pytest.mark.parametrize("profile", ["auto", "none"])
def test_a_tool_asks_the_model_with_its_childs_token(
    scene: Scene, profile: str
) -> None:
    config = scene.config("one", policy=f'sandbox = "{profile}"')
    with daemon(scene.where, config) as running:
        tools = scene.tools(running, "one")
        url, key, root, token = said(tools, SAY)
        assert key == token == key_of(tools, "one")
        assert url == f"{root}/v1"
        assert said(tools, OWN) == ["200"]
        assert said(tools, CLIENTS) == ["The message has 2 words."] * 2
        _, account = call(running.client.path, "quota")
        assert account["spent"] > 0
        assert_clean(running)
        assert running.end() == 0


# spec MD1, E19: nothing of the machine's own loopback comes in with it.
def test_a_tool_hears_what_its_child_has_on_loopback_and_nothing_else(
    scene: Scene,
) -> None:
    with daemon(scene.where, scene.config("one")) as running:
        assert said(scene.tools(running, "one"), LISTENING) == ["1"]


# spec MD1, E19: a child's own mounts and its network are joined by one tool.
@pytest.mark.nobody
def test_a_tool_in_a_workspace_has_both_the_workspace_and_the_model(
    scene: Scene,
) -> None:
    (scene.where / "base").mkdir()
    (scene.where / "base" / "given").write_text("from the base\n")
    policy = 'workspace = ["w"]'
    config = scene.config("one", policy=policy)
    config = config.replace(f'root = "{scene.where}/one"\n', "").replace(
        f'cwd = "{scene.where}/one"', f'cwd = "{scene.where}/base"'
    )
    config += f'[workspace.w]\nbase = "{scene.where}/base"\n'
    with daemon(scene.where, config) as running:
        tools = scene.tools(running, "one")
        script = f"cat given; echo >made; {OWN}"
        assert said(tools, script) == ["from the base", "200"]
        assert not (scene.where / "base" / "made").exists()
        assert_clean(running)


# spec MD1: what a sidecar sets wins, and a key does not go with another's address.
def test_what_a_sidecar_sets_wins(scene: Scene) -> None:
    own = 'env = { OPENAI_BASE_URL = "http://other/v1", ANTHROPIC_AUTH_TOKEN = "mine" }'
    with daemon(scene.where, scene.config("one", sidecar=own)) as running:
        url, key, root, token = said(scene.tools(running, "one"), SAY)
        assert (url, key, token) == ("http://other/v1", "unset", "mine")
        assert root.startswith("http://127.0.0.1:")


# spec MD1, E37, I8: the holder of a narrowed token may have no account of its own.
@pytest.mark.attack
def test_a_tool_of_a_narrowed_token_has_no_way_to_the_model(scene: Scene) -> None:
    with daemon(scene.where, scene.config("one")) as running:
        tools = scene.tools(running, "one")
        tools.token = narrow_token(tools.token, "less")
        assert said(tools, f"{SAY}; {LISTENING}") == ["unset"] * 4 + ["0"]


# spec MD1, E5: one sidecar runs the tools of both; a token ends with its child.
@pytest.mark.nobody
@pytest.mark.attack
def test_each_childs_tools_have_its_own_token_and_net_namespace(scene: Scene) -> None:
    with daemon(scene.where, scene.config("one", "two")) as running:
        one, two = scene.tools(running, "one"), scene.tools(running, "two")
        ask = "printenv OPENAI_API_KEY; readlink /proc/self/ns/net"
        (key, net), (other_key, other_net) = said(one, ask), said(two, ask)
        assert (key, other_key) == (key_of(one, "one"), key_of(two, "two"))
        assert len({key, other_key, net, other_net}) == 4
        assert said(two, f'{STATUS}{key}"') == ["200"]
        running.client.stop_child("one")
        assert said(two, f'{STATUS}{key}"') == ["401"]
        assert said(two, OWN) == ["200"]


# spec MD1
def test_a_tool_reaches_the_model_after_its_host_was_replaced(scene: Scene) -> None:
    with daemon(scene.where, scene.config("one")) as running:
        tools = scene.tools(running, "one")
        before = said(tools, f"{SAY}; {OWN}")
        assert before[-1] == "200"
        tools.replace()
        assert said(tools, f"{SAY}; {OWN}") == before
        assert_clean(running)


# spec MD1: FD 3 of a tool has an account of its own beneath its child's; its key has not.
def test_a_tool_with_fd3_keeps_its_own_account_there(scene: Scene) -> None:
    script = (
        "printf 'LLM_CHAT false 0 0 3 7\\na bgeneral' >&3; read -r reply <&3"
        f"; echo $reply; {OWN}; : >asked; while [ -e asked ]; do sleep 0.01; done"
    )
    with daemon(scene.where, scene.config("one", sidecar="fd3 = true")) as running:
        tools = scene.tools(running, "one")
        line = tools.begin(script)
        asked = scene.where / "one" / "asked"
        running.wait(asked.exists, "its calls")
        _, child, tool = call(running.client.path, "quota")
        asked.unlink()
        reply, status = rest(line).body.decode().splitlines()
        assert (reply[:3], status) == ("OK ", "200")
        assert tool["parent_id"] == child["client_id"]
        assert child["spent"] == tool["spent"] > 0
