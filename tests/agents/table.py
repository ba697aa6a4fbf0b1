"""The agents that are tried: how a model leads each, and what it can pass.

The needs of an agent are in its recipe (`supervisor/llm/recipes`). A model leads it by its
answers: those of `STEPS`, which `demo/provider/steps.py` makes calls of the tools that
the agent offers, or answers of its own. In them `{base}` is the workspace.
"""

import shutil
from dataclasses import dataclass
from typing import Any

from supervisor.llm.recipe import read_recipe

TASK = "Run the tests, mend calc.py, and run the tests again."
TESTS = "python3 -B -m unittest -v"
CALC = "def add(a, b):\n    return a - b\n"
OLD = "    return a - b\n"
WRONG = "    return a * b\n"
NEW = "    return a + b\n"
FILE = "{base}/calc.py"

ALL = (
    "starts",
    "asks",
    "edits",
    "tests",
    "commits",
    "keyless",
    "charged",
    "ends",
    "clean",
)
"""The steps of a whole trial."""

STEPS: tuple[Any, ...] = (
    {"look": "{base}"},
    {"read": FILE},
    {"run": "env; cat test_calc.py"},
    {"run": TESTS},
    {"edit": FILE, "old": OLD, "new": WRONG},
    {"run": TESTS},
    {"edit": FILE, "old": WRONG, "new": NEW},
    {"read": FILE},
    {"run": TESTS},
    "All tests pass now.",
)
"""Ten steps: look, read, read, a failing test, edit, a failing test, mend, read, test, end."""

FILES: tuple[Any, ...] = (
    [["list", {}]],
    [["read", {"path": "calc.py"}]],
    [["exec", {"command": "env; cat test_calc.py"}]],
    [["exec", {"command": TESTS}]],
    [["edit", {"path": "calc.py", "old": OLD, "new": WRONG}]],
    [["exec", {"command": TESTS}]],
    [["edit", {"path": "calc.py", "old": WRONG, "new": NEW}]],
    [["read", {"path": "calc.py"}]],
    [["exec", {"command": TESTS}]],
    "All tests pass now.",
)
"""The same by the tools of `sandhost mcp --files`."""

SED = f"sed -i 's/a - b/a + b/' calc.py && {TESTS}"
CODE = """import subprocess
print(subprocess.run("COMMAND 2>&1", shell=True, capture_output=True, text=True).stdout)"""


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent.

    Attributes:
        name: of its recipe.
        answers: of the model, in order: a text, calls of tools, or a step.
        more: further words of its command.
        program: of its installation; empty for the first word of the recipe's command.
        after: a command in its package's directory after the installation.
        passes: columns that it can pass.
        has_files: its tools are those of `sandhost mcp --files`, which it is shown.
    """

    name: str
    answers: tuple[Any, ...] = STEPS
    more: tuple[str, ...] = ()
    program: str = ""
    after: tuple[str, ...] = ()
    passes: tuple[str, ...] = ALL
    has_files: bool = False


def block(old: str, new: str) -> str:
    """Return an edit as aider reads it from a text."""
    edit = f"<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE"
    return f"The sign is wrong.\n\ncalc.py\n```python\n{edit}\n```\n"


def code(command: str) -> str:
    """Return what a model says that answers in Python."""
    return f"Thought: go on.\n<code>\n{CODE.replace('COMMAND', command)}\n</code>"


AGENTS = (
    # npm runs no script of a package that was not named to it.
    Agent("claude", after=("node", "install.cjs")),
    Agent("codex"),
    Agent("opencode"),
    Agent("qwen"),
    Agent("pi"),
    Agent("cline", program="cline"),
    Agent(
        "mini-swe-agent",
        answers=(
            *STEPS[:-1],
            {"run": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"},
        ),
    ),
    Agent(
        "aider",
        # It runs the test after each edit, and tells of one that fails.
        answers=(block(OLD, WRONG), block(WRONG, NEW)),
        more=("--auto-test", "--test-cmd", TESTS, "calc.py"),
    ),
    Agent(
        "gptme",
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
        "smolagents",
        answers=(
            code(TESTS),
            code(SED),
            "Thought: done.\n<code>\nfinal_answer('It is mended.')\n</code>",
        ),
        more=("--imports", "subprocess", "--tools", "python_interpreter"),
        program="smolagent",
    ),
    Agent("openai-agents", program="python3"),
    Agent("claude-agent-sdk", program="python3"),
    Agent("pydantic-ai", program="python3"),
    Agent("pydantic-ai-mcp", answers=FILES, program="python3", has_files=True),
    Agent("langgraph", program="python3"),
    Agent(
        "llm",
        answers=("It is in calc.py.",),
        passes=("starts", "asks", "keyless", "charged", "ends", "clean"),
    ),
)  # fmt: skip
"""Each agent that is tried; docs/reference/agents.md says what came of it."""

SMALLEST = ("qwen", "llm", "pydantic-ai")
"""The agents of least size: 55, 83 and 111 MB; Codex has 424, mini-swe-agent 754."""


def smallest() -> tuple[str, ...]:
    """Return the two agents of least size that this machine can install."""
    has_npm = shutil.which("npm") is not None
    found = [one for one in SMALLEST if has_npm or "pip" in read_recipe(one).packages]
    return tuple(found[:2])
