"""The agents that are tried, as data: how each is installed, started and led.

A model leads an agent by its answers. `answers` are those of a model that finds a failing
test, mends the file and runs the test again, by the tools that this agent offers. In them
and in the arguments `{base}` is the workspace and `{task}` what the user asks.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

TASK = "Run the tests, mend calc.py, and run the tests again."
TESTS = "python3 -m unittest -v"
OLD = "    return a - b\n"
NEW = "    return a + b\n"
CALC = "def add(a, b):\n    return a - b\n"

Answers = tuple[str | list[list[Any]], ...]


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent.

    Attributes:
        package: its name in the registry.
        registry: whose name that is.
        command: its program, and the arguments.
        answers: of the model, in order: a text, or calls of tools.
        environment: variables that it needs.
        setup: a shell script before it, with its program in `$0`: it may write settings,
            or add arguments to `$@`.
        more: what is installed with it.
        reason: why it is left out.
    """

    package: str
    registry: Literal["pip", "npm"]
    command: tuple[str, ...]
    answers: Answers
    environment: dict[str, str] = field(default_factory=dict)
    setup: str = ""
    more: tuple[str, ...] = ()
    reason: str = ""


def calls(shell: list[Any], *edits: list[Any]) -> Answers:
    """Return the answers of a model that has a tool for commands and some to edit."""
    return [shell], *([edit] for edit in edits), [shell], "All tests pass now."


OPENCODE = """{
  "autoupdate": false, "share": "disabled", "permission": {"*": "allow"},
  "model": "host/any",
  "provider": {"host": {
    "npm": "@ai-sdk/openai-compatible", "name": "host",
    "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
    "models": {"any": {"name": "any"}}}}
}"""

PI = """mkdir -p ~/.pi/agent
cat > ~/.pi/agent/models.json <<END
{"providers": {"host": {
  "baseUrl": "$OPENAI_BASE_URL", "apiKey": "OPENAI_API_KEY", "api": "openai-completions",
  "models": [{"id": "any"}]}}}
END"""

CLINE = (
    '"$0" auth --provider openai --modelid any '
    '--apikey "$OPENAI_API_KEY" --baseurl "$OPENAI_BASE_URL"'
)

SED = f"sed -i 's/a - b/a + b/' calc.py && {TESTS}"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CODE = """import subprocess
print(subprocess.run("COMMAND 2>&1", shell=True, capture_output=True, text=True).stdout)"""
BLOCK = f"calc.py\n```python\n<<<<<<< SEARCH\n{OLD}=======\n{NEW}>>>>>>> REPLACE\n```\n"

AGENTS = (
    Agent(
        package="mini-swe-agent",
        registry="pip",
        command=(
            "mini", "--yolo", "--exit-immediately", "--model", "openai/any",
            "--task", "{task}",
        ),
        answers=(
            [["bash", {"command": TESTS}]],
            [["bash", {"command": SED}]],
            [["bash", {"command": SUBMIT}]],
        ),
        environment={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
    Agent(
        package="aider-chat",
        registry="pip",
        command=(
            "aider", "--model", "openai/any", "--yes-always", "--no-check-update",
            "--analytics-disable", "--no-show-model-warnings", "--no-auto-commits",
            "--no-gitignore", "--edit-format", "diff", "--auto-test", "--test-cmd", TESTS,
            "--message", "{task}", "calc.py",
        ),
        answers=(f"The sign is wrong.\n\n{BLOCK}",),
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    Agent(
        package="gptme",
        registry="pip",
        command=("gptme", "--non-interactive", "--model", "local/any", "{task}"),
        answers=(
            [["shell", {"command": TESTS}]],
            [["patch", {
                "path": "calc.py",
                "patch": f"<<<<<<< ORIGINAL\n{OLD}=======\n{NEW}>>>>>>> UPDATED\n",
            }]],
            [["shell", {"command": TESTS}]],
            [["complete", {}]],
        ),
    ),
    Agent(
        package="opencode-ai",
        registry="npm",
        command=("opencode", "run", "{task}"),
        answers=calls(
            ["bash", {"command": TESTS, "description": "Run the tests"}],
            ["read", {"filePath": "{base}/calc.py"}],
            ["edit", {
                "filePath": "{base}/calc.py", "oldString": OLD, "newString": NEW,
            }],
        ),
        environment={
            "OPENCODE_CONFIG_CONTENT": OPENCODE,
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
        },
    ),
    Agent(
        package="@qwen-code/qwen-code",
        registry="npm",
        command=("qwen", "--auth-type", "openai", "--yolo", "--prompt", "{task}"),
        answers=calls(
            ["run_shell_command", {"command": TESTS, "is_background": False}],
            ["read_file", {"file_path": "{base}/calc.py"}],
            ["edit", {
                "file_path": "{base}/calc.py", "old_string": OLD, "new_string": NEW,
            }],
        ),
        environment={"OPENAI_MODEL": "any"},
    ),
    Agent(
        package="@mariozechner/pi-coding-agent",
        registry="npm",
        command=("pi", "--provider", "host", "--model", "any", "--print", "{task}"),
        answers=calls(
            ["bash", {"command": TESTS}],
            ["edit", {
                "path": "calc.py", "edits": [{"oldText": OLD, "newText": NEW}],
            }],
        ),
        environment={"PI_OFFLINE": "1"},
        setup=PI,
    ),
    Agent(
        package="smolagents",
        registry="pip",
        command=(
            "smolagent", "{task}", "--model-type", "OpenAIModel", "--model-id", "any",
            "--imports", "subprocess", "--tools", "python_interpreter",
        ),
        answers=(
            f"Thought: run it.\n<code>\n{CODE.replace('COMMAND', TESTS)}\n</code>",
            f"Thought: mend it.\n<code>\n{CODE.replace('COMMAND', SED)}\n</code>",
            "Thought: done.\n<code>\nfinal_answer('It is mended.')\n</code>",
        ),
        setup='set -- "$@" --api-base "$OPENAI_BASE_URL" --api-key "$OPENAI_API_KEY"',
        more=("openai",),
    ),
    Agent(
        package="cline",
        registry="npm",
        command=("cline", "{task}"),
        answers=calls(
            ["run_commands", {"commands": [TESTS]}],
            ["editor", {
                "path": "{base}/calc.py", "old_text": OLD, "new_text": NEW,
            }],
        ),
        setup=CLINE,
    ),
    Agent(
        package="@openai/codex",
        registry="npm",
        command=("codex",),
        answers=(),
        reason="it asks by Responses, which the endpoint does not speak",
    ),
    Agent(
        package="@anthropic-ai/claude-code",
        registry="npm",
        command=("claude",),
        answers=(),
        reason="it asks by Messages, which the endpoint does not speak",
    ),
)  # fmt: skip
"""Each agent that was tried; docs/agents.md says what came of it."""
