"""The table of calls: one row each, for checker, model and dispatcher."""

from __future__ import annotations

from supervisor.llmfd.arguments import (
    BLOCKS,
    BOOLEAN,
    FDS,
    INTEGER,
    STRING,
    TEXT,
    Param,
    Tool,
)
from supervisor.llmfd.calls import checkpoint_calls, files, naming, reading, wrapping
from supervisor.llmfd.calls.files import MODES
from supervisor.llmfd.source_code import LANGUAGES
from supervisor.llmfd.units import UNITS

_FD = Param("fd", STRING, "Descriptor, as in fd:1")
_THE_FD = Param("fd", STRING, "Descriptor, as in fd:1", required=True)
_NAME = Param("name", STRING, "Name of the descriptor, in place of fd")
_PAGE = Param("page", INTEGER, "Page, from 1")
_START_LINE = Param("start_line", INTEGER, "First line, from 1")
_END_LINE = Param("end_line", INTEGER, "Last line; the end of the content if missing")
_REF = Param("ref_id", STRING, "Id of the marked section", required=True)
_TEMP = Param("temp_file_id", STRING, "Temporary file, as in temp:1", required=True)
_TOKEN = Param("token", STRING, "Stands for content that FD_PUT has brought")

_ROWS = (
    Tool(
        "read_fd",
        "Read content from a file descriptor: a page, all of it, lines, characters, or"
        " a unit such as a paragraph or a function. Without a selector: page 1.",
        (
            _FD,
            _PAGE,
            Param("read_all", BOOLEAN, "Read the entire content"),
            _START_LINE,
            _END_LINE,
            Param(
                "mode",
                STRING,
                "What start and count count: pages and lines from 1, characters from 0",
                choices=("page", "line", "char"),
            ),
            Param("start", INTEGER, "Where to start, in the unit of mode"),
            Param("count", INTEGER, "How many, in the unit of mode"),
            Param("unit", STRING, "Read one unit of this kind", choices=UNITS),
            Param("index", INTEGER, "Which unit, from 1"),
            Param(
                "name",
                STRING,
                "Name of the unit, as in f or A.f; without unit, of the descriptor",
            ),
            Param(
                "language",
                STRING,
                "Language of the source, with unit function or class; else guessed",
                choices=tuple(LANGUAGES),
            ),
            Param(
                "extract_to_new_fd",
                BOOLEAN,
                "Make what was selected a new file descriptor in place of showing it",
            ),
        ),
        reading.read_fd,
        is_slow=True,
    ),
    Tool(
        "fd_to_file",
        "Write content of a file descriptor to a file.",
        (
            _FD,
            Param("file_path", STRING, "The file", required=True),
            Param("mode", STRING, "How to write", choices=MODES),
            _PAGE,
            _START_LINE,
            _END_LINE,
            Param("insert_at_line", INTEGER, "With mode insert: before this line"),
            Param("create", BOOLEAN, "Make a missing file (default true)"),
            Param("exist_ok", BOOLEAN, "Change an existing file (default true)"),
            _NAME,
        ),
        files.fd_to_file,
        is_async=True,
    ),
    Tool(
        "search_fd",
        "Find lines in a file descriptor, with lines of context around them.",
        (
            _FD,
            Param("query", STRING, "Text, or with regex an expression", required=True),
            Param("case_sensitive", BOOLEAN, "Default true"),
            Param("regex", BOOLEAN, "The query is a regular expression (RE2)"),
            Param("context", INTEGER, "Lines before and after (default 2)"),
            Param("max_results", INTEGER, "Most matching lines to show (default 20)"),
            Param("start_line", INTEGER, "Begin here, to go on after next_line"),
            _NAME,
        ),
        reading.search_fd,
        is_slow=True,
    ),
    Tool(
        "rename_fd",
        "Give a file descriptor a name to speak of it.",
        (_THE_FD, Param("name", STRING, "The name", required=True)),
        naming.rename_fd,
    ),
    Tool(
        "mark_fd_section",
        "Mark lines of a file descriptor under an id, to come back to them.",
        (_THE_FD, _START_LINE, _END_LINE, _REF),
        naming.mark_fd_section,
    ),
    Tool(
        "get_fd_section",
        "Read marked lines of a file descriptor.",
        (_FD, _REF, _NAME),
        naming.get_fd_section,
        is_slow=True,
    ),
    Tool(
        "list_fd_sections",
        "List the marked lines of a file descriptor.",
        (_FD, _NAME),
        naming.list_fd_sections,
        is_slow=True,
    ),
    Tool(
        "delete_fd_section",
        "Forget a mark.",
        (_THE_FD, _REF),
        naming.delete_fd_section,
    ),
    Tool(
        "create_temp_file",
        "Make a temporary file that processes can share.",
        (Param("content", TEXT, "What it holds", required=True),),
        naming.create_temp_file,
        is_slow=True,
    ),
    Tool(
        "read_temp_file",
        "Read a temporary file.",
        (_TEMP,),
        naming.read_temp_file,
        is_slow=True,
    ),
    Tool(
        "write_temp_file",
        "Replace the content of a temporary file.",
        (
            _TEMP,
            Param("content", TEXT, "The new content", required=True),
            Param("version", INTEGER, "Refuse if this is not its version any more"),
        ),
        naming.write_temp_file,
        is_slow=True,
    ),
    Tool(
        "delete_temp_file",
        "Remove a temporary file.",
        (_TEMP,),
        naming.delete_temp_file,
    ),
    Tool(
        "checkpoint_process",
        "Keep the conversation, all file descriptors and the files of the workspace as"
        " they are now.",
        (
            Param("label", STRING, "What to remember it by"),
            Param("files", BOOLEAN, "Also the files of the workspace (default true)"),
        ),
        checkpoint_calls.checkpoint_process,
        is_async=True,
    ),
    Tool(
        "restore_process",
        "Go back to a checkpoint; what came after it is dropped.",
        (
            Param("checkpoint_id", STRING, "As checkpoint_process told", required=True),
            Param(
                "files",
                BOOLEAN,
                "Also the files of the workspace, once this program has ended (default"
                " false)",
            ),
        ),
        checkpoint_calls.restore_process,
        is_async=True,
    ),
    Tool(
        "list_checkpoints",
        "List the checkpoints.",
        (),
        checkpoint_calls.list_checkpoints,
        is_async=True,
    ),
    Tool(
        "delete_checkpoint",
        "Delete a checkpoint; the process stays as it is.",
        (Param("checkpoint_id", STRING, "As checkpoint_process told", required=True),),
        checkpoint_calls.delete_checkpoint,
        is_async=True,
    ),
    Tool(
        "fd_info",
        "Tell source, type and size of a file descriptor.",
        (_FD, _NAME),
        reading.fd_info,
    ),
    Tool("list_fds", "List the file descriptors.", (), reading.list_fds, is_slow=True),
    Tool(
        "keep_fds",
        "Give up every file descriptor but these.",
        (Param("fds", FDS, "Those to keep", required=True),),
        naming.keep_fds,
        is_slow=True,
    ),
    Tool(
        "tool_schemas",
        "List the tools that may be called, as JSON schemas for the chat API.",
        (),
        reading.tool_schemas,
    ),
    Tool(
        "wrap_output",
        "Hand a tool's output on, or store it if it is long.",
        (
            Param("text", TEXT, "The output"),
            Param("base64", STRING, "The output, where it is no text"),
            Param("blocks", BLOCKS, "The output, as a list of blocks"),
            _TOKEN,
            Param("source", STRING, "Where it came from, as in tool:NAME"),
            Param("is_error", BOOLEAN, "It is an error: hand it on as it is"),
        ),
        wrapping.wrap_output,
        is_slow=True,
    ),
    Tool(
        "wrap_input",
        "Hand a user's input on, or store it if it is long.",
        (Param("text", TEXT, "The input"), _TOKEN),
        wrapping.wrap_input,
        is_slow=True,
    ),
)

TOOLS: dict[str, Tool] = {row.name: row for row in _ROWS}
"""The calls by name."""
